// phi and post are compile-time constants inside the loops, so each has its own loop without branches.
#include "attention/rows.h"

#include <string.h>

#include "attention/l2.h"

Row row_at(const Normalizer *normalizer, Scalars scalars, size_t h, size_t n, size_t T, int L, size_t HS) {
    Row row = {.at = row_place(scalars, h, (int)n, (int)T, L, (int)HS)};
    row.c = row_scale(normalizer->scale, row.at);
    row.o = row_offset(normalizer->offset, row.at);
    row.cap = (real)normalizer->cap;
    return row;
}

// What phi is evaluated at for a score, and its derivative with respect to z.
typedef struct {
    real value, slope;
} Argument;

// capped: is there a cap? A constant in the loops over a row.
NORMALIZER_INLINE Argument argument_of(const Row *row, bool capped, real s) {
    Argument x = {row->c * (s - row->anchor) + row->rest, 1};
    if (capped) x.value = cap_both(row->cap, row->c * s + row->o, &x.slope) - row->shift;
    return x;
}

static bool is_relative(const Normalizer *normalizer) {
    return subtracts_maximum(NORMALIZER_PHI(normalizer), normalizer->norm);
}

// Where exp is divided by its sum, it is taken relative to the row's largest z, that of the score `anchor`. The scores
// are subtracted before scaling, so that nothing overflows or rounds to an exponent above 0. A cap keeps their order.
static void row_anchor(const Normalizer *normalizer, Row *row, real anchor) {
    int phi = NORMALIZER_PHI(normalizer);
    bool relative = is_relative(normalizer);
    real z = relative ? row->c * anchor + row->o : 0, unused;
    if (row->cap != 0) z = cap_both(row->cap, z, &unused);
    real least = relative ? least_maximum(phi, normalizer->norm, row->at) : 0;
    row->anchor = relative ? anchor : 0;
    row->shift = z < least ? least : z;
    row->rest = relative ? z - row->shift : row->o;
    row->number = phi_number(phi, row->at, row->shift);
}

// Sets what norm and post make of the row: 1/Z, with which a post that does not change it divides.
static void row_divide(const Normalizer *normalizer, Row *row, real inverse) {
    row->inverse = inverse;
    row->post = (PostRow){.n = row->at.n,
                          .inverse = inverse,
                          .power = (real)normalizer->post.value,
                          .divide = post_sign(NORMALIZER_POST(normalizer)) * inverse};
}

void row_keep(const Row *row, real *stats) {
    stats[0] = row->anchor;
    stats[1] = row->inverse;
    stats[2] = row->post.by;
    stats[3] = row->post.divide;
}

void row_recall(const Normalizer *normalizer, Row *row, const real *stats) {
    row_anchor(normalizer, row, stats[0]);
    row_divide(normalizer, row, stats[1]);
    row->post.by = stats[2];
    row->post.divide = stats[3];
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// The score with the largest z among n of the row. Several maxima hide the latency of each.
static real row_top(const real *s, int n, const Row *row) {
    enum { APART = 64 };
    real sign = row->c < 0 ? -1 : 1, largest[APART], top = -INFINITY;
    for (int i = 0; i < APART; i++) largest[i] = -INFINITY;
    int j = 0;
    for (; j + APART <= n; j += APART) {
        #pragma omp simd
        for (int i = 0; i < APART; i++) {
            real x = sign * s[j + i];
            largest[i] = x > largest[i] ? x : largest[i];
        }
    }
    for (int i = 0; j < n; i++, j++) largest[i] = sign * s[j] > largest[i] ? sign * s[j] : largest[i];
    #pragma omp simd reduction(max : top)
    for (int i = 0; i < APART; i++) top = largest[i] > top ? largest[i] : top;
    return sign * top;
}

// s (n): scores in, f out. Returns sum |f|.
NORMALIZER_INLINE real phi_values(int phi, bool capped, real *restrict s, int n, const Row *row) {
    const Row numbers = *row;
    real number = row->number, sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real f, slope;
        phi_both(phi, argument_of(&numbers, capped, s[j]).value, number, &f, &slope);
        s[j] = f;
        sum += phi_signed(phi) && f < 0 ? -f : f;
    }
    return sum;
}

static real row_values(const Normalizer *normalizer, real *s, int n, const Row *row) {
#define CASE(kind_, ...) \
    case kind_: return row->cap != 0 ? phi_values(kind_, true, s, n, row) : phi_values(kind_, false, s, n, row);
    switch (NORMALIZER_PHI(normalizer)) { PHI_VALUES(CASE) }
#undef CASE
    return 0;
}

NORMALIZER_INLINE PostSums post_sums(int post, const real *restrict f, int n) {
    PostSums sums = {.f = f};
    if (post_needs(post) & POST_SUMS) {
        real sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (int j = 0; j < n; j++) sum += f[j];
        sums.sum = sum;
    }
    if (post_needs(post) & POST_LARGEST) {
        real largest = f[0];
        #pragma omp simd reduction(max : largest)
        for (int j = 0; j < n; j++) largest = f[j] > largest ? f[j] : largest;
        sums.largest = largest;
    }
    return sums;
}

// f (n) in, w out. Sets all of `row`. Returns sum |w| if all w may be 0.   of_all: sum |A|
NORMALIZER_INLINE real post_weights(int post, real *restrict f, PostRow *row, real of_all) {
    int n = row->n, needs = post_needs(post);
    real sum = 0;
    post_begin(post, row, post_sums(post, f, n));
    const PostRow numbers = *row;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real w = post_weight(post, &numbers, f[j]);
        f[j] = w;
        if (needs & POST_VANISHES) sum += real_abs(w);
    }
    if (needs & POST_CENTERS && needs & POST_DIVIDES) sum = post_settle(f, n, of_all);
    if (needs & POST_DIVIDES) row->divide = inverse_or_zero(sum);
    return sum;
}

bool row_in_parts(const Normalizer *normalizer) {
    return !post_needs(NORMALIZER_POST(normalizer));
}

// Takes new scores (n) into account: the row's anchor, and what that changes in the sums.
static void row_move(const Normalizer *normalizer, RowSoFar *so_far, const real *s, int n, real *sums, size_t width) {
    Row *row = &so_far->row;
    bool relative = is_relative(normalizer);
    real top = relative ? row_top(s, n, row) : 0, before = row->shift;
    if (so_far->started && !(relative && (row->c < 0 ? top < row->anchor : top > row->anchor))) return;
    row_anchor(normalizer, row, top);
    if (so_far->started && row->shift > before) {
        real by = real_exp(before - row->shift);
        so_far->sum *= by;
        #pragma omp simd
        for (size_t c = 0; c < width; c++) sums[c] *= by;
    }
    so_far->started = true;
}

void row_take(const Normalizer *normalizer, RowSoFar *so_far, real *s, int n, real *sums, size_t width) {
    row_move(normalizer, so_far, s, n, sums, width);
    so_far->sum += row_values(normalizer, s, n, &so_far->row);
}

real row_finish(const Normalizer *normalizer, RowSoFar *so_far, real *f, bool *weight) {
    Row *row = &so_far->row;
    int post = NORMALIZER_POST(normalizer);
    real sum = so_far->sum, left = sum;
    row_divide(normalizer, row, row_inverse(normalizer->norm, row->at, sum, row->shift));
    if (post_acts(post, row->at.n)) {
#define CASE(kind_, ...) case kind_: left = post_weights(kind_, f, &row->post, sum * row->inverse); break;
        switch (post) { POSTS(CASE) }
#undef CASE
    }
    *weight = sum != 0 && (left != 0 || !(post_needs(post) & POST_VANISHES)) && row->inverse != 0;
    return row->post.divide;
}

real row_forward(const Normalizer *normalizer, real *s, Row *row, bool *weight) {
    RowSoFar so_far = {.row = *row};
    row_take(normalizer, &so_far, s, row->at.n, NULL, 0);
    real factor = row_finish(normalizer, &so_far, s, weight);
    *row = so_far.row;
    return factor;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Where post does not change the row; D as norm sees it. `sign` is -1 if post negates it.
NORMALIZER_INLINE real row_backward_plain(int phi, bool capped, real *restrict s, real *restrict dW, Row *row, real D,
                                          real sign) {
    int n = row->at.n;
    const Row numbers = *row;
    real c = row->c, number = row->number, inverse = row->inverse, sum = 0, by_number = 0;
    #pragma omp simd reduction(+ : sum, by_number)
    for (int j = 0; j < n; j++) {
        real f, slope;
        Argument z = argument_of(&numbers, capped, s[j]);
        phi_both(phi, z.value, number, &f, &slope);
        real signed_D = phi_signed(phi) ? with_sign_of(f, D) : D;
        real df = (sign * dW[j] - signed_D) * inverse, dz = df * slope;
        if (capped) dz *= z.slope;
        sum += dz * s[j];
        if (phi_learns(phi)) by_number += df * phi_slope_by_number(phi, z.value, number, f, slope);
        dW[j] = c * dz;
        s[j] = sign * f * inverse;
    }
    row->by_number = by_number;
    return sum;
}

static real backward_plain(const Normalizer *normalizer, real *s, real *dW, Row *row, real sign) {
#define CASE(kind_, ...)                                                                  \
    case kind_:                                                                           \
        return row->cap != 0 ? row_backward_plain(kind_, true, s, dW, row, row->D, sign) \
                             : row_backward_plain(kind_, false, s, dW, row, row->D, sign);
    switch (NORMALIZER_PHI(normalizer)) { PHI_VALUES(CASE) }
#undef CASE
    return 0;
}

// Computes f and df/dz (n) from the scores s (n).
NORMALIZER_INLINE void row_slopes(int phi, bool capped, real *restrict f, real *restrict slope, const real *restrict s,
                                  const Row *row) {
    const Row numbers = *row;
    #pragma omp simd
    for (int j = 0; j < numbers.at.n; j++) {
        Argument z = argument_of(&numbers, capped, s[j]);
        phi_both(phi, z.value, numbers.number, &f[j], &slope[j]);
        if (capped) slope[j] *= z.slope;
    }
}

static void backward_slopes(const Normalizer *normalizer, real *f, real *slope, const real *s, const Row *row) {
#define CASE(kind_, ...)                                     \
    case kind_:                                              \
        if (row->cap != 0) row_slopes(kind_, true, f, slope, s, row); \
        else row_slopes(kind_, false, f, slope, s, row);     \
        break;
    switch (NORMALIZER_PHI(normalizer)) { PHI_VALUES(CASE) }
#undef CASE
}

// w: f in, W out. d: dW in, dA out, which is also returned.
NORMALIZER_INLINE real post_gradient(int post, real *w, real *d, const PostRow *row, real D) {
    real W;
    *d = post_back(post, row, *w, *d, D, &W);
    *w = W;
    return *d;
}

// The same for a row, w (n) and d (n).
NORMALIZER_INLINE void post_gradients(int post, real *restrict w, real *restrict d, PostRow *row, real D) {
    int n = row->n, needs = post_needs(post);
    real sum = 0;
    post_again(post, row, post_sums(post, w, n));
    const PostRow numbers = *row;
    if (needs & POST_CENTERS && !(needs & POST_DIVIDES)) {    // in order: runs of earlier versions keep their bits
        for (int j = 0; j < n; j++) sum += post_gradient(post, &w[j], &d[j], &numbers, D);
    } else {
        #pragma omp simd reduction(+ : sum)
        for (int j = 0; j < n; j++) sum += post_gradient(post, &w[j], &d[j], &numbers, D);
    }
    if (!(needs & POST_CENTERS)) return;
    sum /= (real)n;
    #pragma omp simd
    for (int j = 0; j < n; j++) d[j] -= sum;
}

// sum_j df df/dnumber, from the scores s and dA.
static real by_number(int phi, const Row *row, const real *s, const real *dA) {
    real sum = 0, f, slope;
    for (int j = 0; j < row->at.n; j++) {
        real z = argument_of(row, row->cap != 0, s[j]).value;
        phi_both(phi, z, row->number, &f, &slope);
        real signed_D = phi_signed(phi) ? with_sign_of(f, row->D) : row->D;
        sum += (dA[j] - signed_D) * row->inverse * phi_slope_by_number(phi, z, row->number, f, slope);
    }
    return sum;
}

// Where post changes the row.   f, slope, w (n): scratch
static real backward_post(const Normalizer *normalizer, real *restrict s, real *restrict d, Row *row, real D,
                          real *restrict f, real *restrict slope, real *restrict w) {
    int n = row->at.n, phi = NORMALIZER_PHI(normalizer);
    bool is_signed = phi_signed(phi);
    real inverse = row->inverse, c = row->c, sum = 0, D_norm = 0;
    backward_slopes(normalizer, f, slope, s, row);
    memcpy(w, f, (size_t)n * sizeof *w);
#define CASE(kind_, ...) case kind_: post_gradients(kind_, w, d, &row->post, D); break;
    switch (NORMALIZER_POST(normalizer)) { POSTS(CASE) }
#undef CASE
    if (norm_is_sum(normalizer->norm)) {
        #pragma omp simd reduction(+ : D_norm)
        for (int j = 0; j < n; j++) D_norm += f[j] * d[j];
        D_norm *= inverse;
    }
    row->D = D_norm;
    row->by_number = phi_learns(phi) ? by_number(phi, row, s, d) : 0;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real signed_D = is_signed ? with_sign_of(f[j], D_norm) : D_norm;
        real dz = (d[j] - signed_D) * inverse * slope[j];
        sum += dz * s[j];
        d[j] = c * dz;
        s[j] = w[j];
    }
    return sum;
}

real row_backward(const Normalizer *normalizer, real *s, real *dW, Row *row, real D, real *buffers, size_t step) {
    int post = NORMALIZER_POST(normalizer);
    if (post_acts(post, row->at.n)) {
        real by_post = post_needs(post) & POST_DIVIDES ? D : 0;
        return backward_post(normalizer, s, dW, row, by_post, buffers, buffers + step, buffers + 2 * step);
    }
    row->D = norm_is_sum(normalizer->norm) ? D : 0;
    return backward_plain(normalizer, s, dW, row, post_sign(post));
}

// ---------------------------------------------------------------------------------------------------------------------
// One query

static real dot(const real *restrict x, const real *restrict y, size_t n) {
    real sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

static void add_scaled(real *restrict sum, real by, const real *restrict x, size_t n) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++) sum[i] += by * x[i];
}

void query_scores(real *scores, Query query, size_t n) {
    for (size_t j = 0; j < n; j++) {
        const real *key = query.k + j * query.k_step;
        scores[j] = dot(query.q, key, query.HS);
        if (query.unit_keys) scores[j] *= l2_inverse(key, query.HS);
    }
}

bool query_forward(real *out, Query query, const Normalizer *normalizer, Row *row, real *weights) {
    size_t n = (size_t)row->at.n;
    bool weight;
    query_scores(weights, query, n);
    real factor = row_forward(normalizer, weights, row, &weight);
    memset(out, 0, query.VS * sizeof *out);
    for (size_t j = 0; j < n; j++) add_scaled(out, weights[j] * factor, query.v + j * query.v_step, query.VS);
    return weight;
}

real query_backward(real *dq, real *dk, real *dv, const real *dout, const real *out, Query query,
                    const Normalizer *normalizer, Row *row, real *buffers) {
    size_t n = (size_t)row->at.n;
    real *scores = buffers, *d = scores + n;
    query_scores(scores, query, n);
    for (size_t j = 0; j < n; j++) d[j] = dot(dout, query.v + j * query.v_step, query.VS);
    real g = row_backward(normalizer, scores, d, row, dot(dout, out, query.VS), d + n, n);
    memset(dq, 0, query.HS * sizeof *dq);
    for (size_t j = 0; j < n; j++) {
        add_scaled(dq, d[j], query.k + j * query.k_step, query.HS);
        add_scaled(dk + j * query.k_step, d[j], query.q, query.HS);
        add_scaled(dv + j * query.v_step, scores[j], dout, query.VS);
    }
    return g;
}

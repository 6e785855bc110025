// Attention for the whole family in blocks of rows, by the formulas of attention/normalizer.h: rows (scores to weights
// and back), then heads.
// Limits: any T, any head size; float, or double with REAL=double. Tested by test_gpt2.c (the reference),
// dev/tests/test_gradients.c (finite differences) and dev/tests/test_attention.c (what must hold for any numbers).
#include "attention/attention_cpu.h"

#include <omp.h>
#include <string.h>

#include "runtime/gemm.h"

// Rows of queries at a time: each needs its scores for all visible keys, BLOCK · T numbers a thread.
enum { BLOCK = 64 };

static size_t block_rows(size_t T) {
    return T < BLOCK ? T : BLOCK;
}

// Numbers from one row of scores to the next: an odd number of cache lines, so that a column's entries spread over the
// cache. With a power of two they collide, and the products that read the scores by columns take twice as long.
static size_t row_step(size_t T) {
    return ((T + 15) / 16 | 1) * 16;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows: scores to weights, and back. phi is a constant where the loops are, so that each has one of its own without
// branches.

typedef struct {
    RowPlace at;
    real c, o;                   // z = c s + o
    real anchor, rest, shift;    // phi is taken at c (s - anchor) + rest, which is z - shift
    real one;                    // exp(-shift) for expm1
    real inverse;                // 1/Z
    real D;                      // of the backward pass: sum_j A dA as norm saw them
    real top;                    // of reweight: the largest A n - 1
    real post_inverse;           // of reweight and recenter-l1: 1 over the sum that post divides by
} Row;

static Row row_at(const AttentionShape *shape, AttentionScalars scalars, size_t h, size_t n, size_t T) {
    Row row = {.at = {.n = (int)n,
                      .T = (int)T,
                      .L = shape->L,
                      .d = (int)shape->HS,
                      .s = scalars.s ? scalars.s[h] : 1,
                      .b = scalars.b ? scalars.b[h] : 0,
                      .p = scalars.p ? scalars.p[n - 1] : 1,
                      .sink = scalars.sink ? scalars.sink[h] : 0}};
    row.c = row_scale(shape->normalizer->scale, row.at);
    row.o = row_offset(shape->normalizer->offset, row.at);
    return row;
}

// Where exp is divided by its sum, it is taken relative to the row's largest z, that of the score `anchor`: by the
// difference of the scores, so that nothing overflows or rounds to more than 0.
static void row_anchor(const Normalizer *normalizer, Row *row, real anchor) {
    int phi = NORMALIZER_PHI(normalizer);
    bool relative = subtracts_maximum(phi, normalizer->norm);
    real z = relative ? row->c * anchor + row->o : 0,
         least = relative ? least_maximum(phi, normalizer->norm, row->at) : 0;
    row->anchor = relative ? anchor : 0;
    row->shift = z < least ? least : z;
    row->rest = relative ? z - row->shift : row->o;
    row->one = phi == PHI_EXPM1 ? real_exp(-row->shift) : 0;
}

static void row_keep(const Row *row, real *stats) {
    stats[0] = row->anchor, stats[1] = row->inverse, stats[2] = row->top, stats[3] = row->post_inverse;
}

static void row_recall(const Normalizer *normalizer, Row *row, const real *stats) {
    row_anchor(normalizer, row, stats[0]);
    row->inverse = stats[1], row->top = stats[2], row->post_inverse = stats[3];
}

// The score with the row's largest z.
static real row_top(const real *s, const Row *row) {
    real sign = row->c < 0 ? -1 : 1, largest = -INFINITY;
    #pragma omp simd reduction(max : largest)
    for (int j = 0; j < row->at.n; j++) {
        real x = sign * s[j];
        largest = x > largest ? x : largest;
    }
    return sign * largest;
}

// s (n): scores in, f out; returns sum |f|.
NORMALIZER_INLINE real row_values(int phi, real *restrict s, const Row *row) {
    real c = row->c, anchor = row->anchor, rest = row->rest, one = row->one, sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < row->at.n; j++) {
        real f, slope;
        phi_both(phi, c * (s[j] - anchor) + rest, one, &f, &slope);
        s[j] = f;
        sum += phi_signed(phi) && f < 0 ? -f : f;
    }
    return sum;
}

// The same, and all of row but top and post_inverse.
static real forward_values(const Normalizer *normalizer, real *s, Row *row) {
    real sum = 0;
    row_anchor(normalizer, row, subtracts_maximum(NORMALIZER_PHI(normalizer), normalizer->norm) ? row_top(s, row) : 0);
#define CASE(kind_, ...) case kind_: sum = row_values(kind_, s, row); break;
    switch (NORMALIZER_PHI(normalizer)) { PHI_VALUES(CASE) }
#undef CASE
    row->inverse = row_inverse(normalizer->norm, row->at, sum, row->shift);
    return sum;
}

// f in, its positive part out; returns the sum.
static real rectify(real *restrict f, const Row *row) {
    real sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < row->at.n; j++) {
        f[j] = f[j] < 0 ? 0 : f[j];
        sum += f[j];
    }
    return sum;
}

// f in, A - mean(A) out; returns the sum of absolute values.
static real recenter(real *restrict f, const Row *row) {
    int n = row->at.n;
    real sum = 0, absolute = 0;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) sum += f[j];
    real inverse = row->inverse, mean = sum * inverse / (real)n;
    #pragma omp simd reduction(+ : absolute)
    for (int j = 0; j < n; j++) {
        real a = f[j] * inverse - mean;
        f[j] = a;
        absolute += a < 0 ? -a : a;
    }
    return absolute;
}

// What reweight subtracts from A n.
static real reweight_from(const Row *row) {
    return row->at.n > POST_FROM ? 1 : 0;
}

// f in, r^P out, r = max(A n - 1, 0) over its largest in the row, so that no power overflows; returns the sum. Fills
// row->top.
static real reweight(real *restrict f, Row *row, real P) {
    int n = row->at.n;
    real factor = row->inverse * (real)n, from = reweight_from(row), top = 0, sum = 0;
    #pragma omp simd reduction(max : top)
    for (int j = 0; j < n; j++) {
        real u = f[j] * factor - from;
        top = u > top ? u : top;
    }
    // In a row of equal weights A n - 1 is 0 but for rounding, which must not be mistaken for weight.
    if (from > 0 && top < 32 * REAL_EPSILON) top = 0;
    row->top = top;
    real by = inverse_or_zero(top);
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real u = f[j] * factor - from, r = u < 0 ? 0 : u * by;
        real w = real_pow01(r > 1 ? 1 : r, P);
        f[j] = w;
        sum += w;
    }
    return sum;
}

// s (n): scores in, weights out up to a factor, which is returned; `weight` gets whether the row has any.
static real row_forward(const Normalizer *normalizer, real *s, Row *row, bool *weight) {
    real sum = forward_values(normalizer, s, row), left = sum, factor = row->inverse;
    bool early = row->at.n <= POST_FROM;
    row->top = row->post_inverse = 0;
    switch (NORMALIZER_POST(normalizer)) {
    case POST_NEGATE: factor = -factor; break;
    case POST_RECTIFY: left = rectify(s, row); break;
    case POST_RECENTER:
        if (!early) recenter(s, row), factor = 1;
        break;
    case POST_RECENTER_L1:
        if (!early) left = recenter(s, row), factor = row->post_inverse = inverse_or_zero(left);
        break;
    case POST_REWEIGHT:
        left = reweight(s, row, (real)normalizer->post.value);
        factor = row->post_inverse = inverse_or_zero(left);
        break;
    }
    *weight = sum != 0 && left != 0 && row->inverse != 0;
    return factor;
}

// s (n): scores in, A out.  dA (n): in, dS out.  D = sum_j A dA; `sign` -1 negates A.  Returns g = sum_j dz s.
NORMALIZER_INLINE real row_backward_plain(int phi, real *restrict s, real *restrict dA, const Row *row, real D,
                                          real sign) {
    int n = row->at.n;
    real c = row->c, anchor = row->anchor, rest = row->rest, one = row->one, inverse = row->inverse, sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real f, slope;
        phi_both(phi, c * (s[j] - anchor) + rest, one, &f, &slope);
        real signed_D = phi_signed(phi) ? (f < 0 ? -D : f > 0 ? D : 0) : D;
        real dz = (sign * dA[j] - signed_D) * inverse * slope;
        sum += dz * s[j];
        dA[j] = c * dz;
        s[j] = sign * f * inverse;
    }
    return sum;
}

static real backward_plain(const Normalizer *normalizer, real *s, real *dA, const Row *row, real D, real sign) {
#define CASE(kind_, ...) case kind_: return row_backward_plain(kind_, s, dA, row, D, sign);
    switch (NORMALIZER_PHI(normalizer)) { PHI_VALUES(CASE) }
#undef CASE
    return 0;
}

// f and slope (n) from the scores s (n).
NORMALIZER_INLINE void row_slopes(int phi, real *restrict f, real *restrict slope, const real *restrict s,
                                  const Row *row) {
    real c = row->c, anchor = row->anchor, rest = row->rest, one = row->one;
    #pragma omp simd
    for (int j = 0; j < row->at.n; j++) phi_both(phi, c * (s[j] - anchor) + rest, one, &f[j], &slope[j]);
}

static void backward_slopes(const Normalizer *normalizer, real *f, real *slope, const real *s, const Row *row) {
#define CASE(kind_, ...) case kind_: row_slopes(kind_, f, slope, s, row); break;
    switch (NORMALIZER_PHI(normalizer)) { PHI_VALUES(CASE) }
#undef CASE
}

// The gradient by A from that by its positive part. a (n): f in, the weights out; d in and out (n).
static void rectify_backward(real *restrict a, real *restrict d, const Row *row) {
    #pragma omp simd
    for (int j = 0; j < row->at.n; j++) {
        d[j] = a[j] > 0 ? d[j] : 0;
        a[j] = a[j] < 0 ? 0 : a[j] * row->inverse;
    }
}

// The gradient by A from that by the recentered weights: d in and out (n). l1: they were divided by the sum of their
// absolute values.
//   a = A - mean(A),  out a/S:  da = (d - sign(a) D)/S,  dA = da - mean(da).  a (n): f in, the weights out.
static void recenter_backward(real *restrict a, real *restrict d, const Row *row, real D, bool l1) {
    int n = row->at.n;
    real inverse = row->inverse, factor = l1 ? row->post_inverse : 1, sum = 0, mean = 0;
    #pragma omp simd reduction(+ : mean)
    for (int j = 0; j < n; j++) mean += a[j];
    mean *= inverse / (real)n;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real centered = a[j] * inverse - mean, signed_D = l1 ? (centered < 0 ? -D : centered > 0 ? D : 0) : 0;
        real da = (d[j] - signed_D) * factor;
        a[j] = centered * factor;
        d[j] = da;
        sum += da;
    }
    sum /= (real)n;
    #pragma omp simd
    for (int j = 0; j < n; j++) d[j] -= sum;
}

// The gradient by A from that by the reweighted weights W = r^P/sum, r = u/top, u = max(A n - 1, 0): dA = n P W/u (d -
// D). a (n): f in, W out; d in and out (n). The derivative of the power is taken as P W/r, which needs no second power.
static void reweight_backward(real *restrict a, real *restrict d, const Row *row, real D, real P) {
    int n = row->at.n;
    real factor = row->inverse * (real)n, from = reweight_from(row), by = inverse_or_zero(row->top);
    real inverse = row->post_inverse, slope = P * (real)n * by;
    #pragma omp simd
    for (int j = 0; j < n; j++) {
        real u = a[j] * factor - from, r = u < 0 ? 0 : u * by;
        real W = real_pow01(r > 1 ? 1 : r, P) * inverse;
        real by_u = r > 0 ? W / r * slope : 0;
        a[j] = W;
        d[j] = by_u * (d[j] - D);
    }
}

// As row_backward_plain, for the posts that change a row as a whole. f, slope (n) scratch.
static real row_backward_post(const Normalizer *normalizer, real *restrict s, real *restrict dA, Row *row, real D,
                              real *restrict f, real *restrict slope) {
    int n = row->at.n, post = NORMALIZER_POST(normalizer);
    bool is_signed = phi_signed(NORMALIZER_PHI(normalizer)), is_sum = norm_is_sum(normalizer->norm);
    real *restrict a = slope + row_step((size_t)n), inverse = row->inverse, c = row->c, sum = 0, D_norm = 0;
    backward_slopes(normalizer, f, slope, s, row);
    memcpy(a, f, (size_t)n * sizeof *a);
    if (post == POST_REWEIGHT) reweight_backward(a, dA, row, D, (real)normalizer->post.value);
    else if (post == POST_RECTIFY) rectify_backward(a, dA, row);
    else recenter_backward(a, dA, row, D, post == POST_RECENTER_L1);
    if (is_sum) {
        #pragma omp simd reduction(+ : D_norm)
        for (int j = 0; j < n; j++) D_norm += f[j] * dA[j];
        D_norm *= inverse;
    }
    row->D = D_norm;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real signed_D = is_signed ? (f[j] < 0 ? -D_norm : f[j] > 0 ? D_norm : 0) : D_norm;
        real dz = (dA[j] - signed_D) * inverse * slope[j];
        sum += dz * s[j];
        dA[j] = c * dz;
        s[j] = a[j];
    }
    return sum;
}

enum { ROW_BUFFERS = 3 };    // of row_backward_post

static real row_backward(const Normalizer *normalizer, real *s, real *dA, Row *row, real D, real *buffers) {
    int post = NORMALIZER_POST(normalizer);
    bool whole = post == POST_REWEIGHT || post == POST_RECTIFY ||
                 (row->at.n > POST_FROM && (post == POST_RECENTER || post == POST_RECENTER_L1));
    if (whole) return row_backward_post(normalizer, s, dA, row, D, buffers, buffers + row_step((size_t)row->at.n));
    row->D = norm_is_sum(normalizer->norm) ? D : 0;
    return backward_plain(normalizer, s, dA, row, row->D, post == POST_NEGATE ? -1 : 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// qk=l2: x (n,HS) over the rows' Euclidean norms; a row of zeros stays one.

static real inverse_norm(const real *x, size_t HS) {
    real sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < HS; i++) sum += x[i] * x[i];
    return sum < REAL_MIN ? 0 : 1 / real_sqrt(sum);    // its square, too, must stay a number
}

static const real *unit_rows(real *out, const real *x, size_t n, size_t HS) {
    for (size_t t = 0; t < n; t++) {
        real inverse = inverse_norm(x + t * HS, HS);
        #pragma omp simd
        for (size_t i = 0; i < HS; i++) out[t * HS + i] = x[t * HS + i] * inverse;
    }
    return out;
}

// dx = (du - u (u · du))/|x|, u = x/|x|: du in and out.
static void unit_rows_backward(real *dx, const real *x, size_t n, size_t HS) {
    for (size_t t = 0; t < n; t++) {
        real *d = dx + t * HS, inverse = inverse_norm(x + t * HS, HS), dot = 0;
        const real *row = x + t * HS;
        #pragma omp simd reduction(+ : dot)
        for (size_t i = 0; i < HS; i++) dot += row[i] * d[i];
        dot *= inverse * inverse;
        #pragma omp simd
        for (size_t i = 0; i < HS; i++) d[i] = (d[i] - row[i] * dot) * inverse;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Heads. Where there are enough of them each is one thread's work. Otherwise (few sequences of the one-headed gated
// unit) the threads share the products and the rows of each.

static bool heads_in_parallel(AttentionShape shape) {
    return shape.B * shape.NH >= (size_t)omp_get_max_threads();
}

// A thread's part: two blocks of scores (A and dA), a block of dout, under qk=l2 a block of q and all of k by their
// norms, the buffers of its rows.
typedef struct {
    real *scores, *dscores, *dout, *q, *k, *buffers;
} Part;

static size_t thread_scratch(AttentionShape shape) {
    return block_rows(shape.T) * (2 * row_step(shape.T) + shape.VS + shape.HS) + shape.T * shape.HS +
           ROW_BUFFERS * row_step(shape.T);
}

static Part part_of(AttentionShape shape, real *scratch, int thread) {
    size_t rows = block_rows(shape.T), step = row_step(shape.T);
    Part p = {.scores = scratch + (size_t)thread * thread_scratch(shape)};
    p.dscores = p.scores + rows * step;
    p.dout = p.dscores + rows * step;
    p.q = p.dout + rows * shape.VS;
    p.k = p.q + rows * shape.HS;
    p.buffers = p.k + shape.T * shape.HS;
    return p;
}

// What a row leaves for the gradients of the learned scalars.
enum { ROW_GRADS = 2 };    // g = sum_j dz s, and the row's part of dsink

size_t attention_scratch(AttentionShape shape, int threads) {
    return (size_t)threads * thread_scratch(shape) + shape.B * shape.NH * shape.T * ROW_GRADS;
}

static uint64_t head_forward(real *out, real *stats, const real *q, const real *k, const real *v,
                             AttentionScalars scalars, size_t h, AttentionShape shape, Part part, bool share) {
    size_t T = shape.T, HS = shape.HS, VS = shape.VS, step = shape.NH * VS, ld = row_step(T);
    uint64_t without_weight = 0;
    bool unit = shape.normalizer->qk.kind == QK_L2;
    if (unit) k = unit_rows(part.k, k, T, HS);
    for (size_t from = 0; from < T; from += BLOCK) {
        size_t rows = T - from < BLOCK ? T - from : BLOCK, keys = from + rows;
        real factor[BLOCK];
        const real *q_rows = unit ? unit_rows(part.q, q + from * HS, rows, HS) : q + from * HS;
        gemm('N', 'T', rows, keys, HS, q_rows, HS, k, HS, 0, part.scores, ld);
        #pragma omp parallel for schedule(static) reduction(+ : without_weight) if (share)
        for (size_t r = 0; r < rows; r++) {
            bool weight;
            Row row = row_at(&shape, scalars, h, from + r + 1, T);
            real *scores = part.scores + r * ld;
            factor[r] = row_forward(shape.normalizer, scores, &row, &weight);
            memset(scores + row.at.n, 0, (keys - (size_t)row.at.n) * sizeof *scores);
            row_keep(&row, stats + ROW_STATS * (from + r));
            without_weight += !weight;
        }
        gemm('N', 'N', rows, VS, keys, part.scores, ld, v, VS, 0, out + from * step, step);
        for (size_t r = 0; r < rows; r++) {
            #pragma omp simd
            for (size_t c = 0; c < VS; c++) out[(from + r) * step + c] *= factor[r];
        }
    }
    return without_weight;
}

uint64_t attention_forward(real *out, real *stats, const real *q, const real *k, const real *v,
                           AttentionScalars scalars, AttentionShape shape, real *scratch) {
    size_t B = shape.B, T = shape.T, NH = shape.NH, HS = shape.HS, VS = shape.VS;
    bool each = heads_in_parallel(shape);
    uint64_t without_weight = 0;
    #pragma omp parallel for schedule(static) reduction(+ : without_weight) if (each)
    for (size_t i = 0; i < B * NH; i++) {
        size_t b = i / NH, h = i % NH;
        without_weight +=
            head_forward(out + (b * T * NH + h) * VS, stats + i * T * ROW_STATS, q + i * T * HS, k + i * T * HS,
                         v + i * T * VS, scalars, h, shape, part_of(shape, scratch, omp_get_thread_num()), !each);
    }
    return without_weight;
}

// g (T,ROW_GRADS) written.
static void head_backward(real *dq, real *dk, real *dv, real *g, const real *dout, const real *out, const real *stats,
                          const real *q, const real *k, const real *v, AttentionScalars scalars, size_t h,
                          AttentionShape shape, real *scratch, bool share) {
    size_t T = shape.T, HS = shape.HS, VS = shape.VS, step = shape.NH * VS, ld = row_step(T);
    int thread = omp_get_thread_num();
    Part part = part_of(shape, scratch, thread);
    const real *k_in = k;
    bool unit = shape.normalizer->qk.kind == QK_L2;
    if (unit) k = unit_rows(part.k, k, T, HS);
    // The last block reaches all keys, so the blocks go backwards: the first product writes dk and dv, the others add.
    size_t last = (T - 1) / BLOCK * BLOCK;
    for (size_t from = last;; from -= BLOCK) {
        size_t rows = T - from < BLOCK ? T - from : BLOCK, keys = from + rows;
        for (size_t r = 0; r < rows; r++) memcpy(part.dout + r * VS, dout + (from + r) * step, VS * sizeof *dout);
        const real *q_rows = unit ? unit_rows(part.q, q + from * HS, rows, HS) : q + from * HS;
        gemm('N', 'T', rows, keys, HS, q_rows, HS, k, HS, 0, part.scores, ld);
        gemm('N', 'T', rows, keys, VS, part.dout, VS, v, VS, 0, part.dscores, ld);
        #pragma omp parallel for schedule(static) if (share)
        for (size_t r = 0; r < rows; r++) {
            Row row = row_at(&shape, scalars, h, from + r + 1, T);
            real D = 0, *scores = part.scores + r * ld, *dscores = part.dscores + r * ld;
            row_recall(shape.normalizer, &row, stats + ROW_STATS * (from + r));
            #pragma omp simd reduction(+ : D)
            for (size_t c = 0; c < VS; c++) D += part.dout[r * VS + c] * out[(from + r) * step + c];
            real *buffers = part_of(shape, scratch, share ? omp_get_thread_num() : thread).buffers;
            g[ROW_GRADS * (from + r)] = row_backward(shape.normalizer, scores, dscores, &row, D, buffers);
            g[ROW_GRADS * (from + r) + 1] =
                -row.D * row.inverse * norm_extra(shape.normalizer->norm, row.at, row.shift);
            memset(scores + row.at.n, 0, (keys - (size_t)row.at.n) * sizeof *scores);
            memset(dscores + row.at.n, 0, (keys - (size_t)row.at.n) * sizeof *scores);
        }
        real beta = from == last ? 0 : 1;
        gemm('T', 'N', keys, VS, rows, part.scores, ld, part.dout, VS, beta, dv, VS);
        gemm('T', 'N', keys, HS, rows, part.dscores, ld, q_rows, HS, beta, dk, HS);
        gemm('N', 'N', rows, HS, keys, part.dscores, ld, k, HS, 0, dq + from * HS, HS);
        if (from == 0) break;
    }
    if (unit) unit_rows_backward(dq, q, T, HS), unit_rows_backward(dk, k_in, T, HS);
}

// ds[h] += sum over the batch and the rows of dc/ds g, and so for b; dp[n-1] += sum over the batch and the heads. g
// (B,NH,T,ROW_GRADS).
static void scalars_backward(AttentionScalarGrads grads, const real *g, AttentionScalars scalars,
                             AttentionShape shape) {
    for (size_t i = 0; i < shape.B * shape.NH; i++) {
        size_t h = i % shape.NH;
        double ds = 0, db = 0, dsink = 0;
        for (size_t t = 0; t < shape.T; t++) {
            ScaleSlopes slopes =
                row_scale_slopes(shape.normalizer->scale, row_at(&shape, scalars, h, t + 1, shape.T).at);
            const real *g_t = g + (i * shape.T + t) * ROW_GRADS;
            ds += slopes.s * g_t[0];
            db += slopes.b * g_t[0];
            dsink += g_t[1];
            if (grads.p) grads.p[t] += slopes.p * g_t[0];
        }
        if (grads.s) grads.s[h] += (real)ds;
        if (grads.b) grads.b[h] += (real)db;
        if (grads.sink) grads.sink[h] += (real)dsink;
    }
}

void attention_backward(real *dq, real *dk, real *dv, AttentionScalarGrads grads, const real *dout, const real *out,
                        const real *stats, const real *q, const real *k, const real *v, AttentionScalars scalars,
                        AttentionShape shape, real *scratch) {
    size_t B = shape.B, T = shape.T, NH = shape.NH, HS = shape.HS, VS = shape.VS;
    bool each = heads_in_parallel(shape);
    real *g = scratch + (size_t)omp_get_max_threads() * thread_scratch(shape);
    #pragma omp parallel for schedule(static) if (each)
    for (size_t i = 0; i < B * NH; i++) {
        size_t b = i / NH, h = i % NH, qk = i * T * HS, row = (b * T * NH + h) * VS;
        head_backward(dq + qk, dk + qk, dv + i * T * VS, g + i * T * ROW_GRADS, dout + row, out + row,
                      stats + i * T * ROW_STATS, q + qk, k + qk, v + i * T * VS, scalars, h, shape, scratch, !each);
    }
    if (grads.s || grads.b || grads.p || grads.sink) scalars_backward(grads, g, scalars, shape);
}

bool attention_row(real *out, const real *q, const real *k, size_t k_step, const real *v, size_t v_step, size_t n,
                   size_t h, AttentionScalars scalars, AttentionShape shape, real *scratch) {
    size_t HS = shape.HS, VS = shape.VS;
    bool unit = shape.normalizer->qk.kind == QK_L2, weight;
    real q_inverse = unit ? inverse_norm(q, HS) : 1;
    for (size_t j = 0; j < n; j++) {
        real sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < HS; c++) sum += q[c] * k[j * k_step + c];
        scratch[j] = unit ? sum * q_inverse * inverse_norm(k + j * k_step, HS) : sum;
    }
    Row row = row_at(&shape, scalars, h, n, n);
    real factor = row_forward(shape.normalizer, scratch, &row, &weight);
    memset(out, 0, VS * sizeof *out);
    for (size_t j = 0; j < n; j++) {
        real a = scratch[j] * factor;
        #pragma omp simd
        for (size_t c = 0; c < VS; c++) out[c] += a * v[j * v_step + c];
    }
    return weight;
}

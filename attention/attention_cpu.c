// Attention for the whole family in blocks of rows, with the formulas of attention/normalizer.h. First come rows (from
// scores to weights and back), then heads.
// Limits: any T, any head size; float, or double with REAL=double. Tested by test_gpt2.c (against the reference),
// dev/tests/test_gradients.c (against finite differences) and dev/tests/test_attention.c (properties that hold for any
// input).
#include "attention/attention_cpu.h"

#include <omp.h>
#include <string.h>

#include "attention/l2.h"

// Query rows per block. Each row needs its scores for all visible keys, which makes BLOCK · T numbers per thread.
enum { BLOCK = 64 };

static size_t block_rows(size_t T) {
    return T < BLOCK ? tiled(T) : BLOCK;
}

// The stride between rows of scores, for whole tiles: an odd number of cache lines, so that the entries of a column
// spread over the cache. With a power of two they collide, and matmuls that read the scores by columns take twice as
// long.
static size_t row_step(size_t T) {
    return (tiled(T) / 16 | 1) * 16;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows: from scores to weights, and back. phi is a compile-time constant inside the loops, so each phi gets its own
// loop without branches.

typedef struct {
    RowPlace at;
    real c, o;                   // z = c s + o
    real anchor, rest, shift;    // phi is evaluated at c (s - anchor) + rest, which equals z - shift
    real number, by_number;      // see phi_number(); the derivative of the loss with respect to it
    real inverse;                // 1/Z
    real D;                      // backward pass: sum_j A dA, for the A and dA of norm
    real top;                    // reweight: the largest A n - 1
    real post_inverse;           // reweight and recenter-l1: 1 over the sum that post divides by
} Row;

static Row row_at(const AttentionShape *shape, Scalars scalars, size_t h, size_t n, size_t T) {
    Row row = {.at = row_place(scalars, h, (int)n, (int)T, shape->L, (int)shape->HS)};
    row.c = row_scale(shape->normalizer->scale, row.at);
    row.o = row_offset(shape->normalizer->offset, row.at);
    return row;
}

// Where exp is divided by its sum, it is taken relative to the row's largest z, that of the score `anchor`. The scores
// are subtracted before scaling, so that nothing overflows or rounds to an exponent above 0.
static void row_anchor(const Normalizer *normalizer, Row *row, real anchor) {
    int phi = NORMALIZER_PHI(normalizer);
    bool relative = subtracts_maximum(phi, normalizer->norm);
    real z = relative ? row->c * anchor + row->o : 0,
         least = relative ? least_maximum(phi, normalizer->norm, row->at) : 0;
    row->anchor = relative ? anchor : 0;
    row->shift = z < least ? least : z;
    row->rest = relative ? z - row->shift : row->o;
    row->number = phi_number(phi, row->at, row->shift);
}

static void row_keep(const Row *row, real *stats) {
    stats[0] = row->anchor;
    stats[1] = row->inverse;
    stats[2] = row->top;
    stats[3] = row->post_inverse;
}

static void row_recall(const Normalizer *normalizer, Row *row, const real *stats) {
    row_anchor(normalizer, row, stats[0]);
    row->inverse = stats[1];
    row->top = stats[2];
    row->post_inverse = stats[3];
}

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
NORMALIZER_INLINE real phi_values(int phi, real *restrict s, int n, const Row *row) {
    real c = row->c, anchor = row->anchor, rest = row->rest, number = row->number, sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real f, slope;
        phi_both(phi, c * (s[j] - anchor) + rest, number, &f, &slope);
        s[j] = f;
        sum += phi_signed(phi) && f < 0 ? -f : f;
    }
    return sum;
}

static real row_values(const Normalizer *normalizer, real *s, int n, const Row *row) {
#define CASE(kind_, ...) case kind_: return phi_values(kind_, s, n, row);
    switch (NORMALIZER_PHI(normalizer)) { PHI_VALUES(CASE) }
#undef CASE
    return 0;
}

static bool is_relative(const Normalizer *normalizer) {
    return subtracts_maximum(NORMALIZER_PHI(normalizer), normalizer->norm);
}

// The same for all keys; also fills all fields of row except top and post_inverse.
static real forward_values(const Normalizer *normalizer, real *s, Row *row) {
    row_anchor(normalizer, row, is_relative(normalizer) ? row_top(s, row->at.n, row) : 0);
    real sum = row_values(normalizer, s, row->at.n, row);
    row->inverse = row_inverse(normalizer->norm, row->at, sum, row->shift);
    return sum;
}

// f in, its positive part out. Returns the sum.
static real rectify(real *restrict f, const Row *row) {
    real sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < row->at.n; j++) {
        f[j] = f[j] < 0 ? 0 : f[j];
        sum += f[j];
    }
    return sum;
}

// f in, A - mean(A) out. Returns the sum of absolute values.
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

// The same for recenter-l1, whose division by that sum would magnify the rounding of the mean: subtracts what is left
// of the mean, too. Returns 0 if the weights of the row are equal up to rounding.   of_all: the sum of |A|
static real recenter_exactly(real *restrict f, const Row *row, real of_all) {
    int n = row->at.n;
    real rest = 0, absolute = 0;
    recenter(f, row);
    #pragma omp simd reduction(+ : rest)
    for (int j = 0; j < n; j++) rest += f[j];
    rest /= (real)n;
    #pragma omp simd reduction(+ : absolute)
    for (int j = 0; j < n; j++) {
        real a = f[j] - rest;
        f[j] = a;
        absolute += a < 0 ? -a : a;
    }
    return absolute < 32 * REAL_EPSILON * of_all ? 0 : absolute;
}

// Are the n weights equal up to rounding?
static bool equal_weights(const real *f, int n) {
    real least = f[0], largest = f[0];
    #pragma omp simd reduction(min : least) reduction(max : largest)
    for (int j = 0; j < n; j++) {
        least = f[j] < least ? f[j] : least;
        largest = f[j] > largest ? f[j] : largest;
    }
    return largest - least <= 32 * REAL_EPSILON * largest;
}

// The value that reweight subtracts from A n.
static real reweight_from(const Row *row) {
    return row->at.n > POST_FROM ? 1 : 0;
}

// f in, r^P out, where r = max(A n - 1, 0) over its maximum in the row, so that no power overflows. Returns the sum and
// sets row->top.
static real reweight(real *restrict f, Row *row, real P) {
    int n = row->at.n;
    real factor = row->inverse * (real)n, from = reweight_from(row), top = 0, sum = 0;
    #pragma omp simd reduction(max : top)
    for (int j = 0; j < n; j++) {
        real u = f[j] * factor - from;
        top = u > top ? u : top;
    }
    // In a row of equal weights, A n - 1 is 0 up to the rounding of their sum, which must not be mistaken for weight.
    if (from > 0 && top < REAL_EPSILON * (real)(n > 32 ? n : 32) && equal_weights(f, n)) top = 0;
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

// s (n): scores in, unscaled weights out. Returns their factor; *weight is false if the row is all-zero.
static real row_forward(const Normalizer *normalizer, real *s, Row *row, bool *weight) {
    real sum = forward_values(normalizer, s, row), left = sum, factor = row->inverse;
    bool early = row->at.n <= POST_FROM;
    row->top = row->post_inverse = 0;
    switch (NORMALIZER_POST(normalizer)) {
    case POST_NEGATE: factor = -factor; break;
    case POST_RECTIFY: left = rectify(s, row); break;
    case POST_RECENTER:
        if (!early) {
            recenter(s, row);
            factor = 1;
        }
        break;
    case POST_RECENTER_L1:
        if (!early) {
            left = recenter_exactly(s, row, sum * row->inverse);
            factor = row->post_inverse = inverse_or_zero(left);
        }
        break;
    case POST_REWEIGHT:
        left = reweight(s, row, (real)normalizer->post.value);
        factor = row->post_inverse = inverse_or_zero(left);
        break;
    }
    *weight = sum != 0 && left != 0 && row->inverse != 0;
    return factor;
}

// sign(f) D
NORMALIZER_INLINE real with_sign_of(real f, real D) {
    if (f < 0) return -D;
    return f > 0 ? D : 0;
}

// s (n): scores in, A out. dA (n): dA in, dS out. D = sum_j A dA; `sign` -1 negates A. Returns g = sum_j dz s and sets
// row->by_number = sum_j df df/dnumber.
NORMALIZER_INLINE real row_backward_plain(int phi, real *restrict s, real *restrict dA, Row *row, real D, real sign) {
    int n = row->at.n;
    real c = row->c, anchor = row->anchor, rest = row->rest, number = row->number, inverse = row->inverse, sum = 0,
         by_number = 0;
    #pragma omp simd reduction(+ : sum, by_number)
    for (int j = 0; j < n; j++) {
        real f, slope;
        real z = c * (s[j] - anchor) + rest;
        phi_both(phi, z, number, &f, &slope);
        real signed_D = phi_signed(phi) ? with_sign_of(f, D) : D;
        real df = (sign * dA[j] - signed_D) * inverse, dz = df * slope;
        sum += dz * s[j];
        if (phi_learns(phi)) by_number += df * phi_slope_by_number(phi, z, number, f, slope);
        dA[j] = c * dz;
        s[j] = sign * f * inverse;
    }
    row->by_number = by_number;
    return sum;
}

static real backward_plain(const Normalizer *normalizer, real *s, real *dA, Row *row, real D, real sign) {
#define CASE(kind_, ...) case kind_: return row_backward_plain(kind_, s, dA, row, D, sign);
    switch (NORMALIZER_PHI(normalizer)) { PHI_VALUES(CASE) }
#undef CASE
    return 0;
}

// Computes f and its slope (n) from the scores s (n).
NORMALIZER_INLINE void row_slopes(int phi, real *restrict f, real *restrict slope, const real *restrict s,
                                  const Row *row) {
    real c = row->c, anchor = row->anchor, rest = row->rest, number = row->number;
    #pragma omp simd
    for (int j = 0; j < row->at.n; j++) phi_both(phi, c * (s[j] - anchor) + rest, number, &f[j], &slope[j]);
}

static void backward_slopes(const Normalizer *normalizer, real *f, real *slope, const real *s, const Row *row) {
#define CASE(kind_, ...) case kind_: row_slopes(kind_, f, slope, s, row); break;
    switch (NORMALIZER_PHI(normalizer)) { PHI_VALUES(CASE) }
#undef CASE
}

// Turns the gradient of A's positive part into that of A. a (n): f in, weights out. d (n): in place.
static void rectify_backward(real *restrict a, real *restrict d, const Row *row) {
    #pragma omp simd
    for (int j = 0; j < row->at.n; j++) {
        d[j] = a[j] > 0 ? d[j] : 0;
        a[j] = a[j] < 0 ? 0 : a[j] * row->inverse;
    }
}

// Turns the gradient of the recentered weights into that of A, in place in d (n). l1: the weights were divided by the
// sum S of their absolute values.
//   a = A - mean(A),  out a/S:  da = (d - sign(a) D)/S,  dA = da - mean(da).  a (n): f in, weights out
static void recenter_backward(real *restrict a, real *restrict d, const Row *row, real D, bool l1) {
    int n = row->at.n;
    real inverse = row->inverse, factor = l1 ? row->post_inverse : 1, sum = 0, mean = 0;
    #pragma omp simd reduction(+ : mean)
    for (int j = 0; j < n; j++) mean += a[j];
    mean *= inverse / (real)n;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real centered = a[j] * inverse - mean, signed_D = l1 ? with_sign_of(centered, D) : 0;
        real da = (d[j] - signed_D) * factor;
        a[j] = centered * factor;
        d[j] = da;
        sum += da;
    }
    sum /= (real)n;
    #pragma omp simd
    for (int j = 0; j < n; j++) d[j] -= sum;
}

// Turns the gradient of the reweighted weights W = r^P/sum, with r = u/top and u = max(A n - 1, 0), into that of A, in
// place in d (n): dA = n P W/u (d - D). a (n): f in, W out. The power's derivative is P W/r, which needs no second
// power.
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

// sum_j df df/dnumber, from f and its slope at the scores s, and dA as norm sees it.
static real by_number(int phi, const Row *row, const real *s, const real *dA, const real *f, const real *slope,
                      real D) {
    real sum = 0;
    for (int j = 0; j < row->at.n; j++) {
        real signed_D = phi_signed(phi) ? with_sign_of(f[j], D) : D;
        real z = row->c * (s[j] - row->anchor) + row->rest;
        sum += (dA[j] - signed_D) * row->inverse * phi_slope_by_number(phi, z, row->number, f[j], slope[j]);
    }
    return sum;
}

// Like row_backward_plain, for posts that transform the whole row. f, slope (n): scratch.
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
    int phi = NORMALIZER_PHI(normalizer);
    row->by_number = phi_learns(phi) ? by_number(phi, row, s, dA, f, slope, D_norm) : 0;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        real signed_D = is_signed ? with_sign_of(f[j], D_norm) : D_norm;
        real dz = (dA[j] - signed_D) * inverse * slope[j];
        sum += dz * s[j];
        dA[j] = c * dz;
        s[j] = a[j];
    }
    return sum;
}

enum { ROW_BUFFERS = 3 };    // of row_backward_post()

static real row_backward(const Normalizer *normalizer, real *s, real *dA, Row *row, real D, real *buffers) {
    int post = NORMALIZER_POST(normalizer);
    bool whole = post == POST_REWEIGHT || post == POST_RECTIFY ||
                 (row->at.n > POST_FROM && (post == POST_RECENTER || post == POST_RECENTER_L1));
    if (whole) return row_backward_post(normalizer, s, dA, row, D, buffers, buffers + row_step((size_t)row->at.n));
    row->D = norm_is_sum(normalizer->norm) ? D : 0;
    return backward_plain(normalizer, s, dA, row, row->D, post == POST_NEGATE ? -1 : 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Heads. The query heads that share keys and values are a group, which one thread processes if there are enough groups.
// Otherwise (for example, few sequences of the gated unit with its single head), the threads share the matmuls and the
// rows of each head.

static Tiles tiles_of(const AttentionInput *in) {
    return in->mm ? in->mm->tiles : TILES_NONE;
}

// The number of keys of a sequence.
static size_t key_count(AttentionShape shape) {
    return shape.past + shape.T;
}

static bool groups_in_parallel(AttentionShape shape, int threads) {
    return shape.B * shape.NKV >= (size_t)threads;
}

// A thread's share of the scratch: two blocks of scores (A and dA), its row buffers, and for tiles the left inputs (a
// block of q and of dout, as they are and transposed, and the weights or dS in bfloat16) and the sums of a block.
typedef struct {
    real *scores, *dscores, *buffers, *q, *dout, *q_transposed, *dout_transposed, *rounded, *sums;
} Part;

// The same for the forward pass in chunks of keys: their scores, which are a few keys of many rows, fit into the
// second-level cache.
enum { CHUNK_ROWS = 128, CHUNK_KEYS = 512 };

typedef struct {
    real *scores, *rounded, *q, *sums;
} ChunkPart;

// The elements in which a block of rows in bfloat16 fits.
static size_t rounded_row(size_t step) {
    return step * sizeof(uint16_t) / sizeof(real);
}

static size_t widest(AttentionShape shape) {
    return tiled(shape.HS > shape.VS ? shape.HS : shape.VS);
}

static size_t chunk_keys(AttentionShape shape) {
    return tiled(key_count(shape)) < CHUNK_KEYS ? tiled(key_count(shape)) : CHUNK_KEYS;
}

static size_t chunk_rows(AttentionShape shape) {
    return tiled(shape.T) < CHUNK_ROWS ? tiled(shape.T) : CHUNK_ROWS;
}

static size_t chunk_scratch(AttentionShape shape) {
    size_t step = row_step(chunk_keys(shape));
    return chunk_rows(shape) * (step + rounded_row(step) + tiled(shape.HS) + tiled(shape.VS));
}

static size_t block_scratch(AttentionShape shape) {
    size_t step = row_step(key_count(shape)), rows = block_rows(shape.T);
    return (2 * rows + ROW_BUFFERS) * step + rows * rounded_row(step) +
           BLOCK * (2 * tiled(shape.HS) + 2 * tiled(shape.VS) + widest(shape));
}

static size_t thread_scratch(AttentionShape shape) {
    size_t block = block_scratch(shape), chunk = chunk_scratch(shape);
    return block > chunk ? block : chunk;
}

static Part part_of(AttentionShape shape, real *scratch, int thread) {
    size_t step = row_step(key_count(shape)), block = block_rows(shape.T) * step;
    Part p = {.scores = scratch + (size_t)thread * thread_scratch(shape)};
    p.dscores = p.scores + block;
    p.buffers = p.dscores + block;
    p.q = p.buffers + ROW_BUFFERS * step;
    p.q_transposed = p.q + BLOCK * tiled(shape.HS);
    p.dout = p.q_transposed + BLOCK * tiled(shape.HS);
    p.dout_transposed = p.dout + BLOCK * tiled(shape.VS);
    p.sums = p.dout_transposed + BLOCK * tiled(shape.VS);
    p.rounded = p.sums + BLOCK * widest(shape);
    return p;
}

static ChunkPart chunk_part_of(AttentionShape shape, real *scratch, int thread) {
    size_t step = row_step(chunk_keys(shape)), rows = chunk_rows(shape);
    ChunkPart p = {.scores = scratch + (size_t)thread * thread_scratch(shape)};
    p.q = p.scores + rows * step;
    p.sums = p.q + rows * tiled(shape.HS);
    p.rounded = p.sums + rows * tiled(shape.VS);
    return p;
}

// What each row saves for the gradients of the learned scalars: the derivative of the loss with respect to its c (g =
// sum_j dz s), to phi's number, and to the ln of norm_extra.
enum { ROW_GRADS = SCALAR_STAGES };

static size_t row_grads_size(AttentionShape shape) {
    return ((shape.B * shape.NH * shape.T * ROW_GRADS + 15) / 16) * 16;
}

// Attention's scratch: each thread's part, then the row gradients, then space for the copies of one group or, if each
// thread processes groups by itself, of a group per thread.   threads: omp_get_max_threads() outside parallel regions;
// inside one, it depends on OMP_NUM_THREADS's list for nested regions
static real *row_grads(AttentionShape shape, real *scratch, int threads) {
    return scratch + (size_t)threads * thread_scratch(shape);
}

// The keys and values of the group being processed, in up to three forms, and their gradients.
static size_t packed_scratch(size_t keys, size_t width) {
    return tiled(keys) * tiled(width);
}

static size_t group_scratch(AttentionShape shape) {
    size_t keys = key_count(shape);
    return 3 * packed_scratch(keys, shape.HS) + 2 * packed_scratch(keys, shape.VS);
}

size_t attention_scratch(AttentionShape shape, int threads) {
    size_t groups = groups_in_parallel(shape, threads) ? (size_t)threads : 1;
    return (size_t)threads * thread_scratch(shape) + row_grads_size(shape) + groups * group_scratch(shape);
}

// What the heads of a group share: k (keys,HS) and v (keys,VS) and, in the backward pass, their gradients. Each block
// of rows reads them again, so they are packed for tiles, or else copied to adjacent rows, unless they are adjacent
// already: the rows of a view of many heads lie far apart and share a few sets of the cache.
typedef struct {
    size_t b, kv;
    const real *k, *v;
    const void *packed_k, *packed_v;      // for scores: k transposed (HS,keys); for out: v (keys,VS)
    const void *packed_kt, *packed_vt;    // for dq: k (keys,HS); for dA: v transposed (VS,keys)
    real *dk, *dv;                        // (keys,HS), (keys,VS); with tiles as tiled_sums() writes them
} Group;

static Group group_of(AttentionShape shape, size_t i) {
    return (Group){.b = i / shape.NKV, .kv = i % shape.NKV};
}

// The calling thread's space for copies of a group. groups: these spaces in attention's scratch
static real *group_space(AttentionShape shape, real *groups) {
    return groups + (size_t)omp_get_thread_num() * group_scratch(shape);
}

static size_t group_offset(const Group *group, size_t keys, size_t row, size_t head) {
    return group->b * keys * row + group->kv * head;
}

static const real *copy_in(ConstView all, const Group *group, size_t width, size_t keys, real *copy) {
    const real *from = all.p + group_offset(group, keys, all.row, all.head);
    if (all.row == width) return from;
    for (size_t t = 0; t < keys; t++) memcpy(copy + t * width, from + t * all.row, width * sizeof *copy);
    return copy;
}

static void copy_in_keys(Group *group, const AttentionInput *in, AttentionShape shape, real *groups) {
    size_t keys = key_count(shape);
    real *k = group_space(shape, groups), *v = k + keys * shape.HS;
    group->k = copy_in(in->k, group, shape.HS, keys, k);
    group->v = copy_in(in->v, group, shape.VS, keys, v);
    group->dk = v + keys * shape.VS;
    group->dv = group->dk + keys * shape.HS;
}

// Packs the keys and values as the forward pass reads them, or as the backward pass does.
static void pack_keys(Group *group, const AttentionInput *in, AttentionShape shape, real *groups, bool backward) {
    size_t keys = key_count(shape), HS = shape.HS, VS = shape.VS;
    size_t of_k = packed_scratch(keys, HS), of_v = packed_scratch(keys, VS);
    const real *k = in->k.p + group_offset(group, keys, in->k.row, in->k.head);
    const real *v = in->v.p + group_offset(group, keys, in->v.row, in->v.head);
    real *first = group_space(shape, groups), *second = first + of_k, *third = second + of_v;
    group->packed_k = first;
    tiles_pack(tiles_of(in), first, transposed(k, in->k.row), HS, keys);
    if (!backward) {
        group->packed_v = second;
        tiles_pack(tiles_of(in), second, as_stored(v, in->v.row), keys, VS);
        return;
    }
    group->packed_vt = second;
    group->packed_kt = third;
    tiles_pack(tiles_of(in), second, transposed(v, in->v.row), VS, keys);
    tiles_pack(tiles_of(in), third, as_stored(k, in->k.row), keys, HS);
    group->dk = third + of_k;
    group->dv = group->dk + of_k;
}

// Where a gradient is summed: in place if its rows are adjacent, else in `copy`, for copy_out().
static real *sum_in(View all, const Group *group, size_t width, size_t T, real *copy) {
    return all.row == width ? all.p + group_offset(group, T, all.row, all.head) : copy;
}

static void copy_out(View all, const Group *group, const real *from, size_t width, size_t T) {
    real *to = all.p + group_offset(group, T, all.row, all.head);
    if (to == from) return;
    for (size_t t = 0; t < T; t++) memcpy(to + t * all.row, from + t * width, width * sizeof *to);
}

// Query head j of a group: where its position 0 lies in each array. q's row stride is that of the whole array.
typedef struct {
    size_t h;
    const Group *group;
    const real *q;
    const int32_t *first;    // (T) or NULL
    size_t rows, out;        // offsets in (B,NH,T), in (B,T,NH,VS)
} Head;

static Head head_of(AttentionShape shape, const AttentionInput *in, const Group *group, size_t j) {
    size_t b = group->b, t = b * shape.T, h = group->kv * (shape.NH / shape.NKV) + j;
    return (Head){.h = h,
                  .group = group,
                  .q = in->q.p + t * in->q.row + h * in->q.head,
                  .first = in->first ? in->first + t : NULL,
                  .rows = (b * shape.NH + h) * shape.T,
                  .out = (t * shape.NH + h) * shape.VS};
}

static size_t first_key(const Head *head, size_t t) {
    return head->first ? (size_t)head->first[t] : 0;
}

// The rows of a head from `from` on. Their scores cover `keys` keys from key `low` on, or a chunk of them: those of
// these keys from `begin` to `end`, whose scores begin in column 0.
typedef struct {
    size_t from, rows, low, keys, begin, end;
} RowBlock;

static RowBlock block_at(const Head *head, size_t from, size_t rows, AttentionShape shape) {
    size_t low = first_key(head, from);
    if (rows > shape.T - from) rows = shape.T - from;
    if (head->group->packed_k) low = (low / TILE) * TILE;
    size_t keys = shape.past + from + rows - low;
    return (RowBlock){from, rows, low, keys, 0, keys};
}

// In a block's scores, each row has `hidden` keys before its n visible ones, and possibly others after them.
static Row block_row(AttentionShape shape, Scalars scalars, const Head *head, RowBlock block, size_t r,
                     size_t *hidden) {
    size_t t = block.from + r, first = first_key(head, t), end = shape.past + t + 1;
    *hidden = first - block.low;
    return row_at(&shape, scalars, head->h, end - first, shape.cached ? end : key_count(shape));
}

static void hide(real *scores, const Row *row, size_t hidden, size_t keys) {
    size_t end = hidden + (size_t)row->at.n;
    memset(scores, 0, hidden * sizeof *scores);
    memset(scores + end, 0, (keys - end) * sizeof *scores);
}

// ---- matmuls of tiles, for a block of rows and its chunk of keys. `share`: by all threads.

// Where the keys of the chunk end that any of the 32 rows of a block from row r on sees.
static size_t visible_end(RowBlock at, size_t r) {
    size_t end = at.rows - r < TILE ? at.keys : at.keys - (at.rows - r - TILE);
    return end < at.end ? end : at.end;
}

// x (rows,width) as a left input, and zeros in the rest of its last 32 rows. Anything else there would be multiplied,
// too, and processors take a hundred times as long for subnormal numbers.
static void left_rows(Tiles tiles, real *out, const real *x, size_t ld, size_t rows, size_t width) {
    size_t step = tiles_row(tiles, width);
    tiles_left(tiles, out, as_stored(x, ld), rows, width);
    memset((char *)out + rows * step, 0, (tiled(rows) - rows) * step);
}

// out (rows,keys) = left (rows,width) · packed (width,keys), where keys are visible
static void tiled_scores(Tiles tiles, real *out, size_t ld, const void *left, const void *packed, size_t width,
                         RowBlock at, bool share) {
    size_t left_bytes = tiles_row(tiles, width);
    #pragma omp parallel if (share)
    {
        tiles_begin(tiles);
        #pragma omp for schedule(static)
        for (size_t key = at.begin; key < at.end; key += TILE) {
            TileRows b = tiles_at(tiles, packed, width, 0, at.low + key);
            for (size_t r = 0; r < at.rows; r += TILE) {
                TileRows a = {(const char *)left + r * left_bytes, left_bytes};
                if (key < visible_end(at, r))
                    tiles_multiply(tiles, out + r * ld + key - at.begin, ld, a, b, tiled(width), false);
            }
        }
        tiles_end(tiles);
    }
}

// The keys that all rows of a block are multiplied by before the next ones: what they meet stays in the first-level
// cache.
enum { OUTPUT_KEYS = 128 };

// sums (rows,tiled(width)) = left (rows,keys) · packed (key_count,width); added unless the chunk is the first
static void tiled_output(Tiles tiles, real *sums, TileRows left, const void *packed, size_t key_count, size_t width,
                         RowBlock at, bool share) {
    size_t ld = tiled(width);
    #pragma omp parallel if (share)
    {
        tiles_begin(tiles);
        #pragma omp for schedule(static)
        for (size_t col = 0; col < width; col += TILE) {
            for (size_t key = at.begin; key < at.end; key += OUTPUT_KEYS) {
                TileRows b = tiles_at(tiles, packed, key_count, at.low + key, col);
                for (size_t r = 0; r < at.rows; r += TILE) {
                    TileRows a = {(const char *)left.at + r * left.step + tiles_row(tiles, key - at.begin), left.step};
                    size_t end = visible_end(at, r), keys = end > key ? end - key : 0;
                    if (keys > OUTPUT_KEYS) keys = OUTPUT_KEYS;
                    if (keys) tiles_multiply(tiles, sums + r * ld + col, ld, a, b, tiled(keys), key > 0);
                }
            }
        }
        tiles_end(tiles);
    }
}

// out (rows,width) = factor (rows) · sums (rows,tiled(width)), without a factor if it is NULL
//   out: step elements from one row to the next
static void scale_rows(real *out, size_t step, const real *factor, const real *sums, size_t rows, size_t width) {
    for (size_t r = 0; r < rows; r++) {
        real by = factor ? factor[r] : 1;
        #pragma omp simd
        for (size_t c = 0; c < width; c++) out[r * step + c] = by * sums[r * tiled(width) + c];
    }
}

// sums = left (width,rows) · weights (rows,keys), for the keys of the block; added if `add`. sums has, for each 32 keys
// of the whole sequence, tiled(width) rows of 32 numbers.
static void tiled_sums(Tiles tiles, real *sums, const void *left, size_t width, TileRows weights, RowBlock at, bool add,
                       bool share) {
    size_t left_bytes = tiles_row(tiles, at.rows);
    #pragma omp parallel if (share)
    {
        tiles_begin(tiles);
        #pragma omp for schedule(static)
        for (size_t key = 0; key < at.keys; key += TILE) {
            size_t r = 0;    // the first of 32 rows that see some of these keys
            while (key >= visible_end(at, r)) r += TILE;
            size_t steps = tiles_are_bf16(tiles) ? r / 2 : r;
            TileRows b = {(const char *)weights.at + steps * weights.step + key * sizeof(uint32_t), weights.step};
            for (size_t c = 0; c < width; c += TILE) {
                TileRows a = {(const char *)left + c * left_bytes + tiles_row(tiles, r), left_bytes};
                real *out = sums + (at.low + key) * tiled(width) + c * TILE;
                tiles_multiply(tiles, out, TILE, a, b, tiled(at.rows - r), add);
            }
        }
        tiles_end(tiles);
    }
}

static void copy_out_tiles(View all, const Group *group, const real *sums, size_t width, size_t T) {
    real *to = all.p + group_offset(group, T, all.row, all.head);
    for (size_t t = 0; t < T; t += TILE) {
        for (size_t c = 0; c < width; c += TILE)
            tiles_take_transposed(to + t * all.row + c, all.row, sums + t * tiled(width) + c * TILE,
                                  T - t < TILE ? T - t : TILE, width - c < TILE ? width - c : TILE);
    }
}

// The weights or dS of a block as a left input: in bfloat16 as rounded by round_left(), else where they are.
static TileRows left_of(Tiles tiles, const real *rounded, const real *scores, size_t ld) {
    bool bf16 = tiles_are_bf16(tiles);
    return (TileRows){bf16 ? rounded : scores, bf16 ? ld * sizeof(uint16_t) : ld * sizeof(real)};
}

static void round_left(Tiles tiles, real *rounded, size_t r, const real *scores, size_t ld, size_t keys) {
    if (tiles_are_bf16(tiles))
        tiles_left(tiles, rounded + r * rounded_row(ld), as_stored(scores + r * ld, ld), 1, keys);
}

// ---- either

// part.scores (rows,keys) = q · k of a block of rows
static void block_scores(const Head *head, const AttentionInput *in, AttentionShape shape, Part part, RowBlock at,
                         bool share) {
    size_t HS = shape.HS, ld = row_step(key_count(shape));
    const real *q = head->q + at.from * in->q.row;
    if (head->group->packed_k) {
        left_rows(tiles_of(in), part.q, q, in->q.row, at.rows, HS);
        tiled_scores(tiles_of(in), part.scores, ld, part.q, head->group->packed_k, HS, at, share);
        return;
    }
    gemm(in->mm, at.rows, at.keys, HS, as_stored(q, in->q.row), transposed(head->group->k + at.low * HS, HS), 0,
         part.scores, ld);
}

// out (rows,VS) = factor · weights · v of a block of rows.
static void block_output(real *out, const real *factor, const Head *head, const AttentionInput *in,
                         AttentionShape shape, Part part, RowBlock at, bool share) {
    size_t VS = shape.VS, step = shape.NH * VS, ld = row_step(key_count(shape));
    Tiles tiles = tiles_of(in);
    if (head->group->packed_v) {
        tiled_output(tiles, part.sums, left_of(tiles, part.rounded, part.scores, ld), head->group->packed_v,
                     key_count(shape), VS, at, share);
        scale_rows(out, step, factor, part.sums, at.rows, VS);
        return;
    }
    gemm(in->mm, at.rows, VS, at.keys, as_stored(part.scores, ld), as_stored(head->group->v + at.low * VS, VS), 0, out,
         step);
    for (size_t r = 0; r < at.rows; r++) {
        #pragma omp simd
        for (size_t c = 0; c < VS; c++) out[r * step + c] *= factor[r];
    }
}

static uint64_t head_forward(real *out, real *stats, const Head *head, const AttentionInput *in, Scalars scalars,
                             AttentionShape shape, Part part, bool share) {
    size_t ld = row_step(key_count(shape));
    Tiles tiles = tiles_of(in);
    uint64_t all_zero = 0;
    out += head->out;
    stats += head->rows * ROW_STATS;
    for (size_t from = 0; from < shape.T; from += BLOCK) {
        RowBlock at = block_at(head, from, BLOCK, shape);
        real factor[BLOCK];
        block_scores(head, in, shape, part, at, share);
        #pragma omp parallel for schedule(static) reduction(+ : all_zero) if (share)
        for (size_t r = 0; r < at.rows; r++) {
            bool weight;
            size_t hidden;
            Row row = block_row(shape, scalars, head, at, r, &hidden);
            real *scores = part.scores + r * ld;
            factor[r] = row_forward(shape.normalizer, scores + hidden, &row, &weight);
            hide(scores, &row, hidden, tiled(at.keys));
            round_left(tiles, part.rounded, r, part.scores, ld, at.keys);
            row_keep(&row, stats + ROW_STATS * (from + r));
            all_zero += !weight;
        }
        block_output(out + from * shape.NH * shape.VS, factor, head, in, shape, part, at, share);
    }
    return all_zero;
}

// ---- the forward pass in chunks of keys, for tiles and the normalizers whose weights are f over a sum. Where phi is
// evaluated relative to the largest z, that is the largest so far; when it grows, the sums so far are scaled down.

static bool in_chunks(const AttentionInput *in, AttentionShape shape) {
    int post = NORMALIZER_POST(shape.normalizer);
    return tiles_of(in) && (post == POST_NONE || post == POST_NEGATE);
}

// A row and its sums so far.
typedef struct {
    Row row;
    size_t hidden;
    real sum;    // of |f|
    bool started;
} ChunkRow;

// Takes new scores (n) into account: the row's anchor, and what that changes in the sums (width) of f times v.
static void chunk_anchor(const Normalizer *normalizer, ChunkRow *r, const real *scores, int n, real *sums,
                         size_t width) {
    bool relative = is_relative(normalizer);
    real top = relative ? row_top(scores, n, &r->row) : 0, before = r->row.shift;
    if (r->started && !(relative && (r->row.c < 0 ? top < r->row.anchor : top > r->row.anchor))) return;
    row_anchor(normalizer, &r->row, top);
    if (r->started && r->row.shift > before) {
        real by = real_exp(before - r->row.shift);
        r->sum *= by;
        #pragma omp simd
        for (size_t c = 0; c < width; c++) sums[c] *= by;
    }
    r->started = true;
}

// scores: those of the chunk in, f out, 0 where keys are hidden
static void chunk_row(const Normalizer *normalizer, ChunkRow *r, real *scores, RowBlock at, real *sums, size_t width) {
    size_t first = r->hidden, end = r->hidden + (size_t)r->row.at.n, columns = tiled(at.end - at.begin);
    if (first < at.begin) first = at.begin;
    if (end > at.end) end = at.end;
    if (first >= end) {
        memset(scores, 0, columns * sizeof *scores);
        return;
    }
    first -= at.begin;
    end -= at.begin;
    chunk_anchor(normalizer, r, scores + first, (int)(end - first), sums, width);
    r->sum += row_values(normalizer, scores + first, (int)(end - first), &r->row);
    memset(scores, 0, first * sizeof *scores);
    memset(scores + end, 0, (columns - end) * sizeof *scores);
}

// Returns the factor of the row's sums; counts a row whose f are all 0.
static real chunk_factor(const Normalizer *normalizer, ChunkRow *r, real *stats, uint64_t *all_zero) {
    Row *row = &r->row;
    row->inverse = row_inverse(normalizer->norm, row->at, r->sum, row->shift);
    row->top = row->post_inverse = 0;
    row_keep(row, stats);
    *all_zero += !(r->sum != 0 && row->inverse != 0);
    return NORMALIZER_POST(normalizer) == POST_NEGATE ? -row->inverse : row->inverse;
}

static uint64_t chunks_forward(real *out, real *stats, const Head *head, const AttentionInput *in, Scalars scalars,
                               AttentionShape shape, ChunkPart part, RowBlock at) {
    size_t HS = shape.HS, VS = shape.VS, ld = row_step(chunk_keys(shape));
    const Normalizer *normalizer = shape.normalizer;
    Tiles tiles = tiles_of(in);
    ChunkRow rows[CHUNK_ROWS];
    real factor[CHUNK_ROWS];
    uint64_t all_zero = 0;
    for (size_t r = 0; r < at.rows; r++) {
        rows[r] = (ChunkRow){.sum = 0};
        rows[r].row = block_row(shape, scalars, head, at, r, &rows[r].hidden);
    }
    left_rows(tiles, part.q, head->q + at.from * in->q.row, in->q.row, at.rows, HS);
    for (; at.begin < at.keys; at.begin += CHUNK_KEYS) {
        at.end = at.keys - at.begin < CHUNK_KEYS ? at.keys : at.begin + CHUNK_KEYS;
        tiled_scores(tiles, part.scores, ld, part.q, head->group->packed_k, HS, at, false);
        for (size_t r = 0; r < at.rows; r++) {
            chunk_row(normalizer, &rows[r], part.scores + r * ld, at, part.sums + r * tiled(VS), VS);
            round_left(tiles, part.rounded, r, part.scores, ld, at.end - at.begin);
        }
        TileRows left = left_of(tiles, part.rounded, part.scores, ld);
        tiled_output(tiles, part.sums, left, head->group->packed_v, key_count(shape), VS, at, false);
    }
    for (size_t r = 0; r < at.rows; r++)
        factor[r] = chunk_factor(normalizer, &rows[r], stats + (head->rows + at.from + r) * ROW_STATS, &all_zero);
    scale_rows(out + head->out + at.from * shape.NH * VS, shape.NH * VS, factor, part.sums, at.rows, VS);
    return all_zero;
}

// The threads share the head's blocks, the longest first.
static uint64_t head_chunks_forward(real *out, real *stats, const Head *head, const AttentionInput *in, Scalars scalars,
                                    AttentionShape shape, real *scratch, bool share) {
    size_t blocks = (shape.T + CHUNK_ROWS - 1) / CHUNK_ROWS;
    int own = omp_get_thread_num();
    uint64_t all_zero = 0;
    #pragma omp parallel for schedule(static, 1) reduction(+ : all_zero) if (share)
    for (size_t i = 0; i < blocks; i++) {
        ChunkPart part = chunk_part_of(shape, scratch, share ? omp_get_thread_num() : own);
        RowBlock at = block_at(head, (blocks - 1 - i) * CHUNK_ROWS, CHUNK_ROWS, shape);
        all_zero += chunks_forward(out, stats, head, in, scalars, shape, part, at);
    }
    return all_zero;
}

// ---- the forward pass one query at a time, for decoding: to pack all keys for a few queries would take longer

enum { FEW_QUERIES = 4 };

bool attention_of_few(AttentionShape shape) {
    return shape.past > 0 && shape.T <= FEW_QUERIES;
}

// out (VS) = attention of q (HS) over the keys that the row sees, divided by their norms if `unit_keys`. k, v: p is the
// first of them   weights (n): scratch. Returns false if the row is all-zero.
static bool query_forward(real *out, const real *q, ConstView k, ConstView v, bool unit_keys, Row *row,
                          AttentionShape shape, real *weights) {
    bool weight;
    size_t n = (size_t)row->at.n;
    for (size_t j = 0; j < n; j++) {
        const real *key = k.p + j * k.row;
        real sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < shape.HS; c++) sum += q[c] * key[c];
        weights[j] = unit_keys ? sum * l2_inverse(key, shape.HS) : sum;
    }
    real factor = row_forward(shape.normalizer, weights, row, &weight);
    memset(out, 0, shape.VS * sizeof *out);
    for (size_t j = 0; j < n; j++) {
        real a = weights[j] * factor;
        #pragma omp simd
        for (size_t c = 0; c < shape.VS; c++) out[c] += a * v.p[j * v.row + c];
    }
    return weight;
}

static ConstView keys_from(ConstView all, const Group *group, size_t keys, size_t first) {
    return (ConstView){all.p + group_offset(group, keys, all.row, all.head) + first * all.row, all.row, all.head};
}

static uint64_t queries_forward(real *out, real *stats, const AttentionInput *in, Scalars scalars, AttentionShape shape,
                                real *scratch) {
    size_t group_heads = shape.NH / shape.NKV, keys = key_count(shape);
    uint64_t all_zero = 0;
    #pragma omp parallel for schedule(static) reduction(+ : all_zero)
    for (size_t i = 0; i < shape.B * shape.NH; i++) {
        Group group = group_of(shape, i / group_heads);
        Head head = head_of(shape, in, &group, i % group_heads);
        real *weights = part_of(shape, scratch, omp_get_thread_num()).scores;
        for (size_t t = 0; t < shape.T; t++) {
            size_t first = first_key(&head, t), hidden;
            Row row = block_row(shape, scalars, &head, (RowBlock){.from = t, .low = first}, 0, &hidden);
            all_zero += !query_forward(out + head.out + t * shape.NH * shape.VS, head.q + t * in->q.row,
                                       keys_from(in->k, &group, keys, first), keys_from(in->v, &group, keys, first),
                                       in->unit_keys, &row, shape, weights);
            row_keep(&row, stats + (head.rows + t) * ROW_STATS);
        }
    }
    return all_zero;
}

void attention_weights_of_scores(real *weights, size_t ld, real *log_Z, const int32_t *first, Scalars scalars,
                                 AttentionShape shape, AttentionRows at) {
    size_t keys = shape.past + at.from + at.rows;
    Head head = {.h = at.h, .first = first ? first + at.b * shape.T : NULL};
    for (size_t r = 0; r < at.rows; r++) {
        bool weight;
        size_t hidden;
        real *scores = weights + r * ld;
        Row row =
            block_row(shape, scalars, &head, (RowBlock){.from = at.from, .rows = at.rows, .keys = keys}, r, &hidden);
        real factor = row_forward(shape.normalizer, scores + hidden, &row, &weight);
        hide(scores, &row, hidden, keys);
        #pragma omp simd
        for (size_t j = 0; j < keys; j++) scores[j] *= factor;
        if (!log_Z) continue;
        log_Z[r] = -INFINITY;
        if (row.inverse > 0) log_Z[r] = row.shift - real_log(row.inverse);
        if (isnan(row.inverse)) log_Z[r] = NAN;
    }
}

void attention_weights(real *weights, size_t ld, real *log_Z, AttentionInput in, Scalars scalars, AttentionShape shape,
                       AttentionRows at) {
    size_t group_heads = shape.NH / shape.NKV;
    Group group = {.b = at.b, .kv = at.h / group_heads};
    Head head = head_of(shape, &in, &group, at.h % group_heads);
    const real *k = in.k.p + group_offset(&group, key_count(shape), in.k.row, in.k.head);
    gemm(in.mm, at.rows, shape.past + at.from + at.rows, shape.HS, as_stored(head.q + at.from * in.q.row, in.q.row),
         transposed(k, in.k.row), 0, weights, ld);
    attention_weights_of_scores(weights, ld, log_Z, in.first, scalars, shape, at);
}

// Where the forward pass writes, and its scratch.
typedef struct {
    real *out, *stats, *scratch, *groups;
} Forward;

static uint64_t group_forward(const Forward *pass, size_t i, const AttentionInput *in, Scalars scalars,
                              AttentionShape shape, bool share) {
    Part part = part_of(shape, pass->scratch, omp_get_thread_num());
    Group group = group_of(shape, i);
    uint64_t all_zero = 0;
    if (tiles_of(in)) pack_keys(&group, in, shape, pass->groups, false);
    else copy_in_keys(&group, in, shape, pass->groups);
    for (size_t j = 0; j < shape.NH / shape.NKV; j++) {
        Head head = head_of(shape, in, &group, j);
        if (in_chunks(in, shape))
            all_zero += head_chunks_forward(pass->out, pass->stats, &head, in, scalars, shape, pass->scratch, share);
        else all_zero += head_forward(pass->out, pass->stats, &head, in, scalars, shape, part, share);
    }
    return all_zero;
}

uint64_t attention_forward(real *out, real *stats, AttentionInput in, Scalars scalars, AttentionShape shape,
                           real *scratch) {
    if (attention_of_few(shape)) return queries_forward(out, stats, &in, scalars, shape, scratch);
    int threads = omp_get_max_threads();
    Forward pass = {out, stats, scratch, row_grads(shape, scratch, threads) + row_grads_size(shape)};
    uint64_t all_zero = 0;
    if (!groups_in_parallel(shape, threads)) {
        for (size_t i = 0; i < shape.B * shape.NKV; i++) all_zero += group_forward(&pass, i, &in, scalars, shape, true);
        return all_zero;
    }
    #pragma omp parallel for schedule(static) reduction(+ : all_zero)
    for (size_t i = 0; i < shape.B * shape.NKV; i++) all_zero += group_forward(&pass, i, &in, scalars, shape, false);
    return all_zero;
}

// What head_backward() reads in addition to the input, and where it writes.
typedef struct {
    const AttentionInput *in;
    const real *dout, *out, *stats;
    AttentionInputGrads d;
    real *g;    // (B,NH,T,ROW_GRADS) written
    real *scratch, *groups;
} Backward;

// Turns row r of a block's scores and dA (part.scores, part.dscores) into weights and gradients of the scores. D is
// of the same rounded dout as dA: in a row of one weight, the two cancel.
static void block_row_backward(const Backward *pass, const Head *head, RowBlock at, Scalars scalars,
                               AttentionShape shape, Part part, size_t r, real *buffers) {
    size_t VS = shape.VS, step = shape.NH * VS, ld = row_step(key_count(shape)), hidden;
    const real *out = pass->out + head->out + (at.from + r) * step,
               *dout = pass->dout + head->out + (at.from + r) * step;
    real *g_row = pass->g + (head->rows + at.from + r) * ROW_GRADS;
    Row row = block_row(shape, scalars, head, at, r, &hidden);
    bool bf16 = tiles_are_bf16(tiles_of(pass->in));
    real D = 0, *scores = part.scores + r * ld, *dscores = part.dscores + r * ld;
    row_recall(shape.normalizer, &row, pass->stats + (head->rows + at.from + r) * ROW_STATS);
    #pragma omp simd reduction(+ : D)
    for (size_t c = 0; c < VS; c++)
        D += (bf16 ? (real)bf16_to_float(bf16_from_float((float)dout[c])) : dout[c]) * out[c];
    g_row[IN_SCALE] = row_backward(shape.normalizer, scores + hidden, dscores + hidden, &row, D, buffers);
    g_row[IN_PHI] = row.by_number;
    g_row[IN_NORM] = -row.D * row.inverse * norm_extra(shape.normalizer->norm, row.at, row.shift);
    hide(scores, &row, hidden, tiled(at.keys));
    hide(dscores, &row, hidden, tiled(at.keys));
}

// All rows of a block. With tiles, also the rows of zeros that fill the last tile; and in bfloat16, rounds dS as a left
// input, and both as pairs of rows.
static void block_backward(const Backward *pass, const Head *head, RowBlock at, Scalars scalars, AttentionShape shape,
                           Part part, bool share) {
    size_t ld = row_step(key_count(shape)), keys = tiled(at.keys);
    Tiles tiles = tiles_of(pass->in);
    #pragma omp parallel for schedule(static) if (share)
    for (size_t pair = 0; pair < tiled(at.rows); pair += 2) {
        real *buffers = share ? part_of(shape, pass->scratch, omp_get_thread_num()).buffers : part.buffers;
        real *scores = part.scores + pair * ld, *dscores = part.dscores + pair * ld;
        for (size_t r = pair; r < pair + 2; r++) {
            if (r < at.rows) {
                block_row_backward(pass, head, at, scalars, shape, part, r, buffers);
                round_left(tiles, part.rounded, r, part.dscores, ld, at.keys);
            } else if (tiles) {
                memset(part.scores + r * ld, 0, keys * sizeof(real));
                memset(part.dscores + r * ld, 0, keys * sizeof(real));
            }
        }
        tiles_pair(tiles, scores, scores + ld, keys);
        tiles_pair(tiles, dscores, dscores + ld, keys);
    }
}

// `add`: dk and dv already contain the sums of the group's previous blocks of rows.
static void block_grads(const Backward *pass, const Head *head, RowBlock at, AttentionShape shape, Part part, bool add,
                        bool share) {
    size_t HS = shape.HS, VS = shape.VS, step = shape.NH * VS, dq_step = pass->d.q.row;
    size_t keys = key_count(shape), ld = row_step(keys);
    const AttentionInput *in = pass->in;
    const Group *group = head->group;
    const real *q = head->q + at.from * in->q.row, *dout = pass->dout + head->out + at.from * step;
    real *dq = pass->d.q.p + (group->b * shape.T + at.from) * dq_step + head->h * pass->d.q.head;
    Tiles tiles = tiles_of(in);
    if (tiles) {
        tiles_left(tiles, part.q_transposed, transposed(q, in->q.row), HS, at.rows);
        tiles_left(tiles, part.dout_transposed, transposed(dout, step), VS, at.rows);
        tiled_sums(tiles, group->dv, part.dout_transposed, VS, tiles_in_place(tiles, part.scores, ld), at, add, share);
        tiled_sums(tiles, group->dk, part.q_transposed, HS, tiles_in_place(tiles, part.dscores, ld), at, add, share);
        tiled_output(tiles, part.sums, left_of(tiles, part.rounded, part.dscores, ld), group->packed_kt, keys, HS, at,
                     share);
        scale_rows(dq, dq_step, NULL, part.sums, at.rows, HS);
        return;
    }
    real *dk = group->dk + at.low * HS, *dv = group->dv + at.low * VS, beta = add ? 1 : 0;
    Matrix k = as_stored(group->k + at.low * HS, HS), dS = as_stored(part.dscores, ld);
    gemm(in->mm, at.keys, VS, at.rows, transposed(part.scores, ld), as_stored(dout, step), beta, dv, VS);
    gemm(in->mm, at.keys, HS, at.rows, transposed(part.dscores, ld), as_stored(q, in->q.row), beta, dk, HS);
    gemm(in->mm, at.rows, HS, at.keys, dS, k, 0, dq, dq_step);
}

// part.dscores (rows,keys) = dout · v of a block of rows
static void block_dscores(const Backward *pass, const Head *head, AttentionShape shape, Part part, RowBlock at,
                          bool share) {
    size_t VS = shape.VS, step = shape.NH * VS, ld = row_step(key_count(shape));
    const AttentionInput *in = pass->in;
    const real *dout = pass->dout + head->out + at.from * step;
    if (head->group->packed_vt) {
        left_rows(tiles_of(in), part.dout, dout, step, at.rows, VS);
        tiled_scores(tiles_of(in), part.dscores, ld, part.dout, head->group->packed_vt, VS, at, share);
        return;
    }
    gemm(in->mm, at.rows, at.keys, VS, as_stored(dout, step), transposed(head->group->v + at.low * VS, VS), 0,
         part.dscores, ld);
}

// `add`: dk and dv already contain the sums of the group's previous heads.
static void head_backward(const Backward *pass, const Head *head, Scalars scalars, AttentionShape shape, bool share,
                          bool add) {
    const Group *group = head->group;
    Part part = part_of(shape, pass->scratch, omp_get_thread_num());
    // Without `first`, the last block reaches all keys. Going backward, its matmuls come first and write all of dk and
    // dv.
    if (head->first && !add) {
        bool tiles = tiles_of(pass->in);
        size_t keys = key_count(shape);
        memset(group->dk, 0, (tiles ? packed_scratch(keys, shape.HS) : keys * shape.HS) * sizeof(real));
        memset(group->dv, 0, (tiles ? packed_scratch(keys, shape.VS) : keys * shape.VS) * sizeof(real));
    }
    size_t last = ((shape.T - 1) / BLOCK) * BLOCK;
    for (size_t from = last;; from -= BLOCK) {
        RowBlock at = block_at(head, from, BLOCK, shape);
        block_scores(head, pass->in, shape, part, at, share);
        block_dscores(pass, head, shape, part, at, share);
        block_backward(pass, head, at, scalars, shape, part, share);
        block_grads(pass, head, at, shape, part, add || head->first || from < last, share);
        if (from == 0) break;
    }
}

static void group_backward(const Backward *pass, size_t i, Scalars scalars, AttentionShape shape, bool share) {
    size_t keys = key_count(shape), HS = shape.HS, VS = shape.VS;
    Group group = group_of(shape, i);
    Tiles tiles = tiles_of(pass->in);
    if (tiles) pack_keys(&group, pass->in, shape, pass->groups, true);
    else copy_in_keys(&group, pass->in, shape, pass->groups);
    if (!tiles) {
        group.dk = sum_in(pass->d.k, &group, HS, keys, group.dk);
        group.dv = sum_in(pass->d.v, &group, VS, keys, group.dv);
    }
    for (size_t j = 0; j < shape.NH / shape.NKV; j++) {
        Head head = head_of(shape, pass->in, &group, j);
        head_backward(pass, &head, scalars, shape, share, j > 0);
    }
    if (tiles) {
        copy_out_tiles(pass->d.k, &group, group.dk, HS, keys);
        copy_out_tiles(pass->d.v, &group, group.dv, VS, keys);
    } else {
        copy_out(pass->d.k, &group, group.dk, HS, keys);
        copy_out(pass->d.v, &group, group.dv, VS, keys);
    }
}

// For a scalar x with one value per head: dx[h] += sum over the batch and the rows of row_slope times the row's entry
// in g. With one value per position: dx[n-1] += the sum over the batch and the heads. g (B,NH,T,ROW_GRADS), first (B,T)
// or NULL.
static void scalars_backward(ScalarGrads grads, const real *g, const int32_t *first, Scalars scalars,
                             AttentionShape shape) {
    for (size_t i = 0; i < shape.B * shape.NH; i++) {
        size_t h = i % shape.NH, b = i / shape.NH;
        double sums[SCALAR_COUNT] = {0};
        for (size_t t = 0; t < shape.T; t++) {
            size_t n = shape.past + t + 1 - (first ? (size_t)first[b * shape.T + t] : 0);
            RowPlace at = row_place(scalars, h, (int)n, (int)key_count(shape), shape.L, (int)shape.HS);
            const real *g_row = g + (i * shape.T + t) * ROW_GRADS;
            for (int x = 0; x < SCALAR_COUNT; x++) {
                if (!grads.of[x]) continue;
                real of_row = row_slope(x, shape.normalizer->scale, at) * g_row[scalar_stage(x)];
                if (scalar_width(x) == PER_HEAD) sums[x] += of_row;
                else grads.of[x][n - 1] += of_row;
            }
        }
        for (int x = 0; x < SCALAR_COUNT; x++)
            if (grads.of[x] && scalar_width(x) == PER_HEAD) grads.of[x][h] += (real)sums[x];
    }
}

static bool any_wanted(ScalarGrads grads) {
    bool any = false;
    for (int x = 0; x < SCALAR_COUNT; x++) any |= grads.of[x] != NULL;
    return any;
}

void attention_backward(AttentionInputGrads d, ScalarGrads grads, const real *dout, const real *out, const real *stats,
                        AttentionInput in, Scalars scalars, AttentionShape shape, real *scratch) {
    int threads = omp_get_max_threads();
    Backward pass = {.in = &in, .dout = dout, .out = out, .stats = stats, .d = d, .scratch = scratch};
    pass.g = row_grads(shape, scratch, threads);
    pass.groups = pass.g + row_grads_size(shape);
    if (groups_in_parallel(shape, threads)) {
        #pragma omp parallel for schedule(static)
        for (size_t i = 0; i < shape.B * shape.NKV; i++) group_backward(&pass, i, scalars, shape, false);
    } else {
        for (size_t i = 0; i < shape.B * shape.NKV; i++) group_backward(&pass, i, scalars, shape, true);
    }
    if (any_wanted(grads)) scalars_backward(grads, pass.g, in.first, scalars, shape);
}

bool attention_row(real *out, const real *q, ConstView k, ConstView v, size_t n, size_t h, Scalars scalars,
                   AttentionShape shape, real *scratch) {
    Row row = row_at(&shape, scalars, h, n, shape.T);
    return query_forward(out, q, k, v, false, &row, shape, scratch);
}

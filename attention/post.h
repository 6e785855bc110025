// The last stage of attention/normalizer.h: what `post` makes of a row of weights A_j = f_j/Z, from f and 1/Z.
//
// A post that changes rows has a section below and a row in POSTS. For each key,
//   w_j = weight(f_j)    from the row's numbers, which begin() computes from sums over f
//   W_j = w_j divide     where divide is 1 over the sum of |w| or, without POST_DIVIDES, what begin() says
// and backward, from dW_j and D = sum_j W_j dW_j (0 without POST_DIVIDES),
//   dA_j = back(f_j, dW_j, D), minus the mean of all dA with POST_CENTERS
//
// The kernels for GPUs have other forms of the same numbers: attention/flash_post.cuh, and the functions named _on_gpu.
//
// Tested by dev/tests/test_gradients.c (finite differences), test_gpt2.c (reference), dev/tests/test_attention.c.
#ifndef ATTENTION_POST_H
#define ATTENTION_POST_H

#include "attention/normalizer.h"

// What a post requires of an engine.
enum {
    POST_SUMS = 1,         // begin() and again() read the sum of f
    POST_LARGEST = 2,      // begin() reads the largest f; on GPUs, w is then a power of a number in [0, 1]
    POST_DIVIDES = 4,      // the weights are divided by the sum of their absolute values
    POST_CENTERS = 8,      // the mean of dA is subtracted from it; with POST_DIVIDES, post_settle() computes sum |w|
    POST_VANISHES = 16,    // all w may be 0 although not all f are: the row is then all-zero
    POST_LATE = 32         // rows of n <= POST_FROM keys do not change
};

// X(KIND, the name that its functions begin with, what it requires)
#define POSTS(X) \
    X(POST_RECTIFY,     rectify,     POST_VANISHES) \
    X(POST_RECENTER,    recenter,    POST_LATE | POST_SUMS | POST_CENTERS) \
    X(POST_RECENTER_L1, recenter,    POST_LATE | POST_SUMS | POST_CENTERS | POST_DIVIDES | POST_VANISHES) \
    X(POST_REWEIGHT,    reweight,    POST_LARGEST | POST_DIVIDES | POST_VANISHES)

// The f (n) of a row, and what its post requires of them.
typedef struct {
    const real *f;
    real sum, largest;
} PostSums;

// A row's numbers. The forward pass keeps `by` and `divide` for the backward pass, and again() computes the others.
typedef struct {
    int n;                  // the visible keys
    real inverse, power;    // 1/Z; the post's number
    real factor, shift;     // f factor - shift is what the post starts from: A - mean(A), or A n - 1
    real by;                // reweight: 1 over the largest of these
    real divide;
} PostRow;

// sign(x) D
NORMALIZER_INLINE real with_sign_of(real x, real D) {
    if (x < 0) return -D;
    return x > 0 ? D : 0;
}

// In a row of n equal weights, what remains of A after its mean is subtracted is 0 up to the rounding of the row's sum:
// on GPUs at most about this, relative to the sum of |A| or, for A n - 1, to 1. It must not be mistaken for weight.
NORMALIZER_INLINE float rounding_on_gpu(int n) {
    return 32 * FLT_EPSILON * fmaxf(1, (float)n / 512);
}

// ---- rectify: w = max(A, 0)

NORMALIZER_INLINE void rectify_begin(PostRow *row, PostSums sums) {
    (void)sums;
    row->divide = row->inverse;
}

NORMALIZER_INLINE void rectify_again(PostRow *row, PostSums sums) {
    (void)row, (void)sums;
}

NORMALIZER_INLINE real rectify_weight(const PostRow *row, real f) {
    (void)row;
    return f < 0 ? 0 : f;
}

NORMALIZER_INLINE real rectify_back(const PostRow *row, real f, real d, real D, real *W) {
    (void)D;
    *W = f < 0 ? 0 : f * row->divide;
    return f > 0 ? d : 0;
}

// ---- recenter: w = A - mean(A); recenter-l1: the same w, and W = w / sum |w|

NORMALIZER_INLINE real recenter_mean(real sum, real inverse, int n) {
    return n > POST_FROM ? sum * inverse / (real)n : 0;
}

NORMALIZER_INLINE void recenter_begin(PostRow *row, PostSums sums) {
    row->factor = row->inverse;
    row->shift = recenter_mean(sums.sum, row->inverse, row->n);
    row->divide = 1;
}

// Rounds in another order than begin(); one order for both would change the last bits of resumed runs.
NORMALIZER_INLINE void recenter_again(PostRow *row, PostSums sums) {
    row->factor = row->inverse;
    row->shift = sums.sum * (row->inverse / (real)row->n);
}

NORMALIZER_INLINE real recenter_weight(const PostRow *row, real f) {
    return f * row->factor - row->shift;
}

NORMALIZER_INLINE real recenter_back(const PostRow *row, real f, real d, real D, real *W) {
    real w = recenter_weight(row, f);
    *W = w * row->divide;
    return (d - with_sign_of(w, D)) * row->divide;
}

// Dividing by the sum magnifies the rounding of the mean. So what is left of it in w (n) is subtracted, too. Returns
// sum |w|, or 0 if the weights of the row are equal up to rounding.   of_all: the sum of |A|
NORMALIZER_INLINE real post_settle(real *w, int n, real of_all) {
    real rest = 0, sum = 0;
    #pragma omp simd reduction(+ : rest)
    for (int j = 0; j < n; j++) rest += w[j];
    rest /= (real)n;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        w[j] -= rest;
        sum += real_abs(w[j]);
    }
    return sum < 32 * REAL_EPSILON * of_all ? 0 : sum;
}

// ---- reweight:P: w = r^P, where r = max(A n - 1, 0) over its largest in the row, so that no power overflows; 0 takes
// the place of 1 for n <= POST_FROM

NORMALIZER_INLINE void reweight_again(PostRow *row, PostSums sums) {
    (void)sums;
    row->factor = row->inverse * (real)row->n;
    row->shift = row->n > POST_FROM ? 1 : 0;
}

NORMALIZER_INLINE bool all_equal(const real *f, int n, real largest) {
    real least = largest;
    for (int j = 0; j < n; j++) least = f[j] < least ? f[j] : least;
    return largest - least <= 32 * REAL_EPSILON * largest;
}

// In a row of equal weights, A n - 1 is 0 up to the rounding of their sum, which must not be mistaken for weight.
NORMALIZER_INLINE void reweight_begin(PostRow *row, PostSums sums) {
    reweight_again(row, sums);
    real top = sums.largest * row->factor - row->shift;
    bool small = row->shift > 0 && top < REAL_EPSILON * (real)(row->n > 32 ? row->n : 32);
    if (small && all_equal(sums.f, row->n, sums.largest)) top = 0;
    row->by = inverse_or_zero(top);
}

// On GPUs: r = 1 + (f - mean) factor, where mean is the largest f. In bf16 (narrow), f is not accurate enough for this
// form to matter, so r = f factor + mean, where mean = 1 - (the largest f) factor. An all-zero row gets r = 0. f is not
// kept there, so that a row counts as one of equal weights by its largest f alone.
NORMALIZER_INLINE void reweight_on_gpu(bool narrow, float *factor, float *mean, float inverse, float largest, int n) {
    float from = n > POST_FROM ? 1 : 0, top = largest * (inverse * (float)n) - from;
    bool weight = !(top < (from > 0 ? rounding_on_gpu(n) : FLT_MIN));
    *factor = weight ? inverse * (float)n / top : 1;
    if (narrow) *mean = weight ? -from / top : -INFINITY;
    else *mean = weight ? largest : INFINITY;
}

NORMALIZER_INLINE real reweight_base(const PostRow *row, real f) {
    real u = f * row->factor - row->shift, r = u < 0 ? 0 : u * row->by;
    return r > 1 ? 1 : r;
}

NORMALIZER_INLINE real reweight_weight(const PostRow *row, real f) {
    return real_pow01(reweight_base(row, f), row->power);
}

// dA = n P W/u (d - D). The power's derivative is P W/r, which needs no second power.
NORMALIZER_INLINE real reweight_back(const PostRow *row, real f, real d, real D, real *W) {
    real r = reweight_base(row, f), slope = row->power * (real)row->n * row->by;
    *W = real_pow01(r, row->power) * row->divide;
    return (r > 0 ? *W / r * slope : 0) * (d - D);
}

// ---- the functions of a post that is a compile-time constant

NORMALIZER_CONSTANT int post_needs(int post) {
#define CASE(kind_, name, needs) case kind_: return needs;
    switch (post) { POSTS(CASE) }
#undef CASE
    return 0;
}

// Does the post change a row of n visible keys? Otherwise W is A, or -A for negate.
NORMALIZER_INLINE bool post_acts(int post, int n) {
    return post_needs(post) & POST_LATE ? n > POST_FROM : post_needs(post) != 0;
}

// The factor of a row that the post does not change.
NORMALIZER_INLINE real post_sign(int post) {
    return post == POST_NEGATE ? -1 : 1;
}

NORMALIZER_INLINE void post_begin(int post, PostRow *row, PostSums sums) {
#define CASE(kind_, name, needs) case kind_: name##_begin(row, sums); break;
    switch (post) { POSTS(CASE) }
#undef CASE
}

NORMALIZER_INLINE void post_again(int post, PostRow *row, PostSums sums) {
#define CASE(kind_, name, needs) case kind_: name##_again(row, sums); break;
    switch (post) { POSTS(CASE) }
#undef CASE
}

NORMALIZER_INLINE real post_weight(int post, const PostRow *row, real f) {
#define CASE(kind_, name, needs) case kind_: return name##_weight(row, f);
    switch (post) { POSTS(CASE) }
#undef CASE
    return f;
}

NORMALIZER_INLINE real post_back(int post, const PostRow *row, real f, real d, real D, real *W) {
#define CASE(kind_, name, needs) case kind_: return name##_back(row, f, d, D, W);
    switch (post) { POSTS(CASE) }
#undef CASE
    return d;
}
#endif

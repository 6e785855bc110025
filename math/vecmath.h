// Elementary functions without branches, calls or tables, which compilers vectorize in a loop under `#pragma omp simd`.
//
// A NaN produces a NaN. Errors are relative and hold for every float in the stated range whose result is a normal
// number; dev/tests/test_vecmath.c compares them with libm in double precision. Functions that take an exponent apart
// (log, pow) treat a subnormal x as 0.
//
// A function whose comment states a range is undefined outside of it: it returns wrong numbers without an error or NaN.
// Builds with -DCHECK_RANGES (make SAN=1) assert the ranges.
//
// The polynomials are minimax fits for the relative error of the result, with float coefficients; `(minimax, e)` gives
// that error.
#ifndef MATH_VECMATH_H
#define MATH_VECMATH_H

#ifdef CHECK_RANGES
#undef NDEBUG
#endif
#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef CHECK_RANGES
#define VEC_RANGE(condition) assert(condition)
#else
#define VEC_RANGE(condition) ((void)0)
#endif

static inline uint32_t vec_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float vec_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The parts of exp: exp(x) = 2^k · exp(r), k = round(x / ln 2), r = x - k · ln 2, |r| <= ln(2)/2.
//   Adding 1.5 · 2^23 rounds to k and leaves k in the low bits. ln 2 is split in two, the first part with 9 trailing
//   zero bits, so that its product with k is exact.
static inline float vec_exp_rounded(float x) {
    return x * 1.44269504088896341f + 12582912.0f;
}

static inline float vec_exp_reduced(float x, float rounded) {
    float k = rounded - 12582912.0f;
    return x - k * 0.693145751953125f - k * 1.42860682030941723e-6f;
}

// 2^k · exp(r). exp(r), between 2^-0.5 and 2^0.5, is a polynomial of degree 6 (minimax, 3e-9), to whose exponent k is
// added.
//   Only valid if the result is a normal number. Otherwise, and for a NaN, the bits are arbitrary, and the caller
//   replaces them.
static inline float vec_exp_from_parts(float rounded, float r) {
    float p = 1.38145399e-3f;
    p = p * r + 8.36874513e-3f;
    p = p * r + 4.16683908e-2f;
    p = p * r + 1.66665204e-1f;
    p = p * r + 4.99999934e-1f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return vec_from_bits(vec_bits(p) + (vec_bits(rounded) << 23));
}

// exp(x), error below 1e-7 for x in [-87.336, 88.722], exactly 1 for 0; 0 below -87.33654, where exp(x) is subnormal;
// +inf above 88.72283.
static inline float vec_exp(float x) {
    float rounded = vec_exp_rounded(x);
    float y = vec_exp_from_parts(rounded, vec_exp_reduced(x, rounded));
    y = x <= 88.72283f ? y : x * INFINITY;    // a NaN fails the comparison and remains NaN
    return x < -87.33654f ? 0.0f : y;
}

// 1 / (1 + exp(-x)), relative error below 3e-7
static inline float vec_sigmoid(float x) {
    return 1.0f / (1.0f + vec_exp(-x));
}

// tanh(x), relative error below 3e-7. Near 0 a polynomial (Cephes' tanhf), because 1 - 2/(exp(2x) + 1) cancels there.
static inline float vec_tanh(float x) {
    float s = x * x, p = -5.70498872745e-3f;
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    float large = 1.0f - 2.0f / (vec_exp(2.0f * fabsf(x)) + 1.0f);
    return fabsf(x) < 0.625f ? x + x * s * p : copysignf(large, x);
}

// The parts of log for normal x > 0: x = 2^k · (1 + f), 2/3 <= 1 + f < 4/3, log(1 + f) = f + f² · Q(f), Q of degree 8
// (minimax, 5e-9).
//   Writes k and f, which are exact, and returns f² · Q(f), at most 0.18 of log(1 + f), so that its rounding error
//   matters little.
static inline float vec_log_parts(float x, float *k, float *f) {
    uint32_t above = vec_bits(x) - 0x3F2AAAABu;    // relative to the bits of 2/3
    float t = vec_from_bits(vec_bits(x) - (above & 0xFF800000u)) - 1.0f;
    float q = -1.28802225e-1f;
    q = q * t + 1.39846087e-1f;
    q = q * t - 1.21874459e-1f;
    q = q * t + 1.40057325e-1f;
    q = q * t - 1.66801974e-1f;
    q = q * t + 2.00104266e-1f;
    q = q * t - 2.49998063e-1f;
    q = q * t + 3.33332151e-1f;
    q = q * t - 0.5f;
    *k = (float)((int32_t)above >> 23);
    *f = t;
    return t * t * q;
}

// log(x), error below 1.2e-7 for normal x > 0, including x near 1; exactly 0 for 1. -inf for 0 and subnormal x, NaN for
// x <= -2^-126, +inf for +inf.
static inline float vec_log(float x) {
    float k, f, rest = vec_log_parts(x, &k, &f);
    float y = k * 0.693145751953125f + (f + (rest + k * 1.42860682030941723e-6f));
    float below = x <= -FLT_MIN ? NAN : -INFINITY;
    y = x >= FLT_MIN ? y : below;
    return x <= FLT_MAX ? y : x;    // +inf, and a NaN
}

// log(1 + x), only for x in [0, 1], error below 1.8e-7, including subnormal x; exactly 0 for 0.
//   x + x² · P(x), P of degree 7 (minimax, 3.3e-8). A rational approximation has fewer terms, but its division costs as
//   much.
static inline float vec_log1p01(float x) {
    VEC_RANGE(!(x < 0.0f) && !(x > 1.0f));    // a NaN passes
    float p = 5.36542246e-3f;
    p = p * x - 3.00683007e-2f;
    p = p * x + 7.92088285e-2f;
    p = p * x - 1.37541875e-1f;
    p = p * x + 1.91538483e-1f;
    p = p * x - 2.48572171e-1f;
    p = p * x + 3.33213300e-1f;
    p = p * x - 4.99996483e-1f;
    return x * x * p + x;
}

// x^p for x in [0, 1] and finite p > 0. Error below 1.2e-7 + 5e-8 · p·|ln x|: 8.2e-7 for results above 1e-6, 3.6e-6
// above 1e-30; for p <= 100, 1.8e-6 above 1e-30.
//   1^p is exactly 1. 0 and subnormal x give 0, as does a result below 2^-126. x < 0 gives -0 (-inf gives NaN); x > 1
//   is undefined. p · ln x is carried in two floats, because exp turns its absolute error into a relative one: ln x =
//   high + low, where k · ln 2 and f add exactly, so that only the rounding of f² · Q(f) remains: 4e-8 of ln x if |f|
//   is 1/3 and k is 0 or -1, less elsewhere. high and p are cut to 12 bits, so that their product is exact with or
//   without a fused multiply-add.
static inline float vec_pow01(float x, float p) {
    VEC_RANGE(!(x > 1.0f));
    float k, f, rest = vec_log_parts(x, &k, &f);
    float whole = k * 0.693145751953125f;
    float high = whole + f;
    float low = f - (high - whole) + (rest + k * 1.42860682030941723e-6f);
    float high12 = vec_from_bits(vec_bits(high) & 0xFFFFF000u), p12 = vec_from_bits(vec_bits(p) & 0xFFFFF000u);
    float product = p12 * high12;
    float more = p * (high - high12 + low) + (p - p12) * high12;
    float rounded = vec_exp_rounded(product + more);
    float y = vec_exp_from_parts(rounded, vec_exp_reduced(product, rounded) + more);
    y = product + more < -87.33654f ? 0.0f : y;
    return x >= FLT_MIN ? y : x * 0.0f;    // 0, and a NaN
}

// Phi(z) = erfc(-z/sqrt 2)/2, the standard normal distribution function, given gauss = exp(-z²/2). Error below 5e-7, in
// addition to that of gauss, for z in [-12, 12], including the lower tail; exactly 1/2 for 0; 0 and 1 for large |z|,
// where gauss is 0.
//   Phi(-|z|) = gauss · R(|z|), where R is a quotient of polynomials of degrees 4 and 5 with positive terms (minimax on
//   [0, 13.5], 6e-9).
//   A gauss computed from a float z² has a relative error of 6e-8 · z²/2 itself: 4e-6 at z = -12.
static inline float vec_normal_cdf(float z, float gauss) {
    VEC_RANGE(!(gauss < 0.0f) && !(gauss > 1.0f));
    float a = fabsf(z);
    a = a > 16.0f ? 16.0f : a;    // keeps p and q finite; a NaN passes through
    float p = 4.00742602e-3f, q = 1.00449854e-2f;
    p = p * a + 3.99121107e-2f;
    p = p * a + 1.81113799e-1f;
    p = p * a + 4.35458670e-1f;
    p = p * a + 0.5f;
    q = q * a + 1.00052178e-1f;
    q = q * a + 4.63864755e-1f;
    q = q * a + 1.19373559f;
    q = q * a + 1.66880215f;
    q = q * a + 1.0f;
    float tail = gauss * (p / q);
    return z > 0.0f ? 1.0f - tail : tail;
}

// float32 to bfloat16, to nearest, ties to even; a NaN remains a NaN
static inline uint16_t bf16_from_float(float x) {
    uint32_t u = vec_bits(x);
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    uint32_t quiet = (u >> 16) | 0x40u;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

static inline float bf16_to_float(uint16_t x) {
    return vec_from_bits((uint32_t)x << 16);
}

#endif

// Elementary functions that a compiler turns into vector code inside a loop under `#pragma omp simd`: no branch, no call, no table.
#ifndef RUNTIME_VECMATH_H
#define RUNTIME_VECMATH_H

#include <stdint.h>
#include <string.h>

// exp(x), relative error under 1e-7 for x in [-87.3, 88.7]; 0 below, +inf above, NaN for NaN.
//   exp(x) = 2^k · exp(r), k = round(x / ln 2), |r| <= ln(2)/2, exp(r) by a polynomial of degree 6 (minimax, 3e-9).
//   k is rounded by adding 1.5 · 2^23, which leaves it in the low bits; 2^k is applied in two halves so that k = 128 stays in range.
static inline float vec_exp(float x) {
    const float magic = 12582912.0f;
    float t = x < -110.0f ? -110.0f : x;           // the order of the comparison lets a NaN through
    t = t > 100.0f ? 100.0f : t;
    float shifted = t * 1.44269504088896341f + magic;
    float k = shifted - magic;
    float r = t - k * 0.693145751953125f;          // ln 2 in two parts, the first with 11 zero bits at its end
    r -= k * 1.42860682030941723e-6f;
    float p = 1.38145399e-3f;
    p = p * r + 8.36874513e-3f;
    p = p * r + 4.16683908e-2f;
    p = p * r + 1.66665204e-1f;
    p = p * r + 4.99999934e-1f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    int32_t n = (int32_t)(bits - 0x4B400000u);     // k as an integer
    int32_t half = n >> 1;
    uint32_t low_bits = (uint32_t)(half + 127) << 23, high_bits = (uint32_t)(n - half + 127) << 23;
    float low, high;
    memcpy(&low, &low_bits, sizeof low);
    memcpy(&high, &high_bits, sizeof high);
    float y = p * low * high;
    return x < -87.33654f ? 0.0f : y;
}

// 1 / (1 + exp(-x)), relative error under 3e-7
static inline float vec_sigmoid(float x) {
    return 1.0f / (1.0f + vec_exp(-x));
}

// ln(x), relative error under 3e-7 for normal x > 0; NaN for x < 0 and NaN. 0 counts as the smallest of all, about -88.
//   x = 2^k m, m in [sqrt(1/2), sqrt(2));  ln m = f - f^2/2 + f^3 P(f), f = m - 1, P of degree 7 (minimax, 6e-9).
static inline float vec_log(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int32_t k = (int32_t)(bits - 0x3F3504F3u) >> 23;             // 0x3F3504F3 is sqrt(1/2)
    uint32_t m_bits = bits - ((uint32_t)k << 23);
    float m, e = (float)k;
    memcpy(&m, &m_bits, sizeof m);
    float f = m - 1.0f, p = -0.0763442963f;
    p = p * f + 0.127615497f;
    p = p * f - 0.131601945f;
    p = p * f + 0.142017618f;
    p = p * f - 0.166233569f;
    p = p * f + 0.200012267f;
    p = p * f - 0.250008225f;
    p = p * f + 0.333333313f;
    float square = f * f, y = f * square * p + e * -2.12194440e-4f - 0.5f * square;      // ln 2 in two parts
    y = y + f + e * 0.693359375f;
    return x >= 0.0f ? y : (x - x) / 0.0f;                        // NaN
}

// ln(1 + x) for x in [0, 1], relative error under 2e-7, down to the smallest x; NaN for NaN.
//   x P(x), P of degree 8 (minimax, 3e-8).
static inline float vec_log1p(float x) {
    float p = 0.00523262378f;
    p = p * x - 0.0295049567f;
    p = p * x + 0.0782254934f;
    p = p * x - 0.13663207f;
    p = p * x + 0.191059887f;
    p = p * x - 0.248429775f;
    p = p * x + 0.333190948f;
    p = p * x - 0.499994934f;
    p = p * x + 0.99999994f;
    return p * x;
}

// x^p for x in [0, 1] and p > 0, by exp(p ln x): relative error under 1e-7 (3 + 3 p |ln x|), so 2e-5 where the result is 1e-30 and 1e-6 where it
// is above 0.1. 0^p is 0, 1^p is 1; results below 1.2e-38 are 0; NaN for NaN.
static inline float vec_pow01(float x, float p) {
    float y = vec_exp(p * vec_log(x));
    return x == 0.0f ? 0.0f : y;
}

// The normal distribution's Phi(z) = erfc(-z/sqrt(2))/2, for gauss = exp(-z^2/2); relative error under 5e-7 beside that of gauss: also in the
// negative tail, which GELU's rows may lie in as a whole before they are divided by their sums. 0 and 1 at the ends; NaN for NaN.
//   Phi(-x) = gauss t Q(t), t = 1/(1 + 0.3 x), Q of degree 9 (minimax, 4e-9 up to x = 13.5, where gauss ends).
static inline float vec_normal_cdf(float z, float gauss) {
    float x = z < 0.0f ? -z : z, t = 1.0f / (1.0f + 0.3f * x), q = -0.0205946937f;
    q = q * t + 0.112273663f;
    q = q * t - 0.227817878f;
    q = q * t + 0.191234544f;
    q = q * t - 0.0789453387f;
    q = q * t + 0.0958877504f;
    q = q * t + 0.0784874558f;
    q = q * t + 0.110213332f;
    q = q * t + 0.119574621f;
    q = q * t + 0.119686536f;
    float tail = gauss * t * q;
    return z < 0.0f ? tail : 1.0f - tail;
}

// float32 to bfloat16, to nearest, ties to even; a NaN stays one
static inline uint16_t bf16_from_float(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    uint32_t quiet = (u >> 16) | 0x40u;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

static inline float bf16_to_float(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

#endif

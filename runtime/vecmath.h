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

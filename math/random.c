#include "math/random.h"

#include <math.h>
#include <string.h>

#include "math/philox.h"

uint64_t random_u64(uint64_t seed, uint64_t stream, uint64_t counter) {
    Philox bits = philox(seed, stream, counter);
    return (uint64_t)bits.words[1] << 32 | bits.words[0];
}

double random_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
    return (double)(random_u64(seed, stream, counter) >> 11) * 0x1p-53;
}

// ---- normals: blocks of 64 from 16 counters, so that each loop over the 16 vectorizes

#define LANES 16
#define BLOCK (4 * LANES)

// -2 ln u for u = (bits / 2 + 0.5) 2^-31, in float32. u = m 2^e with m in [0.707, 1.414), and ln m = 2 atanh((m - 1) /
// (m + 1)), whose series is accurate to 3e-9 in this range.
static inline float minus_two_log(uint32_t bits) {
    float u = ((float)(int32_t)(bits >> 1) + 0.5f) * 0x1p-31f, m;
    uint32_t w;
    memcpy(&w, &u, 4);
    int32_t e = (int32_t)(w - 0x3f3504f3u) >> 23;    // 0x3f3504f3 is sqrt(1/2)
    w -= (uint32_t)e << 23;
    memcpy(&m, &w, 4);
    float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    float log_m = s * (2.0f + z * (0.66666667f + z * (0.4f + z * (0.28571429f + z * 0.22222222f))));
    return -2.0f * (log_m + 0.69314718f * (float)e);
}

// cos and sin of the angle 2 pi bits / 2^32 (plus a constant eighth of a turn). The top two bits are the quadrant, the
// rest an angle in [-pi/4, pi/4), where the Taylor polynomials are accurate to 4e-8 (cos) and 2e-9 (sin).
static inline void turn(uint32_t bits, float *cosine, float *sine) {
    uint32_t quadrant = bits >> 30, c, s;
    float x = (float)((int32_t)(bits & 0x3fffffffu) - 0x20000000) * (1.57079633f * 0x1p-30f), z = x * x;
    float a = 1.0f + z * (-0.5f + z * (4.1666667e-2f + z * (-1.3888889e-3f + z * 2.4801587e-5f)));
    float b = x * (1.0f + z * (-1.6666667e-1f + z * (8.3333333e-3f + z * (-1.9841270e-4f + z * 2.7557319e-6f))));
    float first = quadrant & 1 ? b : a, second = quadrant & 1 ? a : b;
    memcpy(&c, &first, 4);
    memcpy(&s, &second, 4);
    c ^= (quadrant ^ quadrant << 1) << 30 & 0x80000000u;    // cos is negative in quadrants 1 and 2
    s ^= quadrant << 30 & 0x80000000u;                      // sin in 2 and 3
    memcpy(cosine, &c, 4);
    memcpy(sine, &s, 4);
}

// Normals 64 block .. 64 block + 63 of the stream. Each counter produces four of them, LANES apart.
static void normal_block(float out[BLOCK], float mean, float std, uint64_t seed, uint64_t stream, uint64_t block) {
#pragma omp simd
    for (int i = 0; i < LANES; i++) {
        Philox bits = philox(seed, stream, block * LANES + (uint64_t)i);
        float cosine, sine, radius = sqrtf(minus_two_log(bits.words[0])), other = sqrtf(minus_two_log(bits.words[2]));
        turn(bits.words[1], &cosine, &sine);
        out[i] = mean + std * (radius * cosine);
        out[LANES + i] = mean + std * (radius * sine);
        turn(bits.words[3], &cosine, &sine);
        out[2 * LANES + i] = mean + std * (other * cosine);
        out[3 * LANES + i] = mean + std * (other * sine);
    }
}

void random_normal_fill(float *out, size_t n, float mean, float std, uint64_t seed, uint64_t stream) {
    size_t whole = n / BLOCK;
#pragma omp parallel for schedule(static)
    for (size_t block = 0; block < whole; block++) normal_block(out + block * BLOCK, mean, std, seed, stream, block);
    if (n % BLOCK == 0) return;
    float last[BLOCK];    // computed by the same code, so that the last values do not depend on the tensor's size
    normal_block(last, mean, std, seed, stream, whole);
    memcpy(out + whole * BLOCK, last, (n % BLOCK) * sizeof *out);
}

#include "math/gemv.h"

#include <string.h>

typedef float Eight __attribute__((vector_size(32), aligned(4)));
typedef uint16_t EightRounded __attribute__((vector_size(16), aligned(2)));
typedef uint32_t EightBits __attribute__((vector_size(32)));

// An element is the sum of 4 vectors of partial sums, which hide the latency of the FMA units. Two rows at a time fill
// AVX2's registers. bfloat16 weights are fetched this many bytes ahead, because their rows are too short for the
// processor's own prefetching, which is enough in float32.
enum { VECTORS = 4, LANES = 8, ROWS = 2, AHEAD = 2048 };

// The first n <= 8 numbers at x, and zeros.
static inline Eight eight_at(const float *x, size_t n) {
    Eight eight = {0};
    if (n >= LANES) return *(const Eight *)x;
    memcpy(&eight, x, n * sizeof *x);
    return eight;
}

static inline Eight eight_rounded_at(const uint16_t *x, size_t n) {
    EightRounded eight = {0};
    if (n >= LANES) eight = *(const EightRounded *)x;
    else memcpy(&eight, x, n * sizeof *x);
    return (Eight)(__builtin_convertvector(eight, EightBits) << 16);
}

// sum[r] = sum_i inp[r C + i] w[i] for N rows of inp, at most ROWS; `rounded` replaces w if it is not NULL
static inline __attribute__((always_inline)) void dot_rows(float *sum, const float *inp, const float *w,
                                                           const uint16_t *rounded, size_t N, size_t C) {
    Eight parts[ROWS][VECTORS] = {{{0}}};
    size_t i = 0;
    for (; i + VECTORS * LANES <= C; i += VECTORS * LANES) {
        if (rounded) __builtin_prefetch((const char *)(rounded + i) + AHEAD);
        #pragma GCC unroll 4
        for (size_t v = 0; v < VECTORS; v++) {
            size_t at = i + v * LANES;
            Eight x = rounded ? eight_rounded_at(rounded + at, LANES) : eight_at(w + at, LANES);
            for (size_t r = 0; r < N; r++) parts[r][v] += eight_at(inp + r * C + at, LANES) * x;
        }
    }
    for (; i < C; i += LANES) {
        Eight x = rounded ? eight_rounded_at(rounded + i, C - i) : eight_at(w + i, C - i);
        for (size_t r = 0; r < N; r++) parts[r][0] += eight_at(inp + r * C + i, C - i) * x;
    }
    for (size_t r = 0; r < N; r++) {
        Eight part = (parts[r][0] + parts[r][1]) + (parts[r][2] + parts[r][3]);
        sum[r] = 0;
        for (size_t lane = 0; lane < LANES; lane++) sum[r] += part[lane];
    }
}

void gemv(float *out, const float *inp, const float *weight, const uint16_t *rounded, size_t N, size_t C, size_t OC,
          bool add) {
    #pragma omp parallel for schedule(static) if (N * C * OC >= SHARED_WORK)
    for (size_t o = 0; o < OC; o++) {
        for (size_t r = 0; r < N; r += ROWS) {
            const float *w = rounded ? NULL : weight + o * C, *rows = inp + r * C;
            const uint16_t *w_rounded = rounded ? rounded + o * C : NULL;
            float sum[ROWS];
            size_t count = N - r < ROWS ? 1 : ROWS;
            if (rounded && count == 1) dot_rows(sum, rows, NULL, w_rounded, 1, C);
            else if (rounded) dot_rows(sum, rows, NULL, w_rounded, ROWS, C);
            else if (count == 1) dot_rows(sum, rows, w, NULL, 1, C);
            else dot_rows(sum, rows, w, NULL, ROWS, C);
            for (size_t i = 0; i < count; i++) {
                float *to = out + (r + i) * OC + o;
                *to = add ? *to + sum[i] : sum[i];
            }
        }
    }
}

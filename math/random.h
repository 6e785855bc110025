// Counter-based random numbers: a value depends only on (seed, stream, index), never on threads, order or earlier
// draws.
// Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
#ifndef MATH_RANDOM_H
#define MATH_RANDOM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Returns 64 random bits.
uint64_t random_u64(uint64_t seed, uint64_t stream, uint64_t counter);

// Returns a uniform number in [0, 1), a multiple of 2^-53.
double random_uniform(uint64_t seed, uint64_t stream, uint64_t counter);

// out[i] = mean + std * (the i-th standard normal of the stream)
//   out (n) written, by all OpenMP threads
// Box-Muller in float32; the largest magnitude is 6.66 std. Give each tensor a stream of its own.
void random_normal_fill(float *out, size_t n, float mean, float std, uint64_t seed, uint64_t stream);

#ifdef __cplusplus
}
#endif
#endif

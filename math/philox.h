// Philox4x32-10, the counter-based random numbers of the CPU (math/random.c) and of the kernels (cuda/adamw.cuh).
// Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
#ifndef MATH_PHILOX_H
#define MATH_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define PHILOX_INLINE static __host__ __device__ __forceinline__
#else
#define PHILOX_INLINE static inline __attribute__((always_inline))
#endif

typedef struct {
    uint32_t words[4];
} Philox;

// Returns the 128 random bits of the counter (counter, stream) under the key `seed`. Inlined, so that a loop of calls
// vectorizes.
PHILOX_INLINE Philox philox(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p = (uint64_t)c0 * 0xD2511F53u, q = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(q >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)q;
        c2 = (uint32_t)(p >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Philox bits = {{c0, c1, c2, c3}};
    return bits;
}

#endif

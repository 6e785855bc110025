// Stores that bypass the caches, for arrays larger than the caches: a line stored this way need not be read first.
#ifndef MATH_STREAM_H
#define MATH_STREAM_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { STREAM_BYTES = 64 };    // of a line

static inline bool stream_aligned(const void *to) {
    return (uintptr_t)to % STREAM_BYTES == 0;
}

// Copies a line to an aligned address.
static inline void stream_line(void *to, const void *from) {
#ifdef __AVX512F__
    _mm512_stream_si512(to, _mm512_loadu_si512(from));
#else
    memcpy(to, from, STREAM_BYTES);
#endif
}

// After a thread's last stream_line(), before other threads read.
static inline void stream_end(void) {
#ifdef __AVX512F__
    _mm_sfence();
#endif
}

#endif

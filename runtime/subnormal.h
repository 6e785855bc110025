// The mode in which a thread counts subnormal numbers, those below 2^-126 (in double 2^-1022), as 0, both as inputs and
// as results. Otherwise an x86 processor takes a hundred times as long for each of them. Small weights and their
// gradients become subnormal, and so do AdamW's moments of a token that is never seen again. What they would add to a
// result does not matter.
#ifndef RUNTIME_SUBNORMAL_H
#define RUNTIME_SUBNORMAL_H

#ifdef __SSE__
#include <pmmintrin.h>
#endif

// Sets the mode for the calling thread, and for threads that it creates later. Returns the previous mode.
static inline unsigned flush_subnormals(void) {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    return before;
#else
    return 0;
#endif
}

static inline void restore_subnormals(unsigned before) {
#ifdef __SSE__
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

#endif

// Time for measuring durations.
#ifndef RUNTIME_CLOCK_H
#define RUNTIME_CLOCK_H

#include <time.h>

// Monotonic time in seconds since an arbitrary start.
static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif

// Time for measuring durations.
#ifndef RUNTIME_CLOCK_H
#define RUNTIME_CLOCK_H

#include <time.h>

// Seconds from an arbitrary start; never steps back.
static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif

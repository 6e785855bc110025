// Human-readable numbers. Use: printf("%s", human_count(n).text).
#ifndef RUNTIME_HUMAN_H
#define RUNTIME_HUMAN_H

#include <math.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char text[32];
} Human;

Human human_count(double n);             // "853", "123 k", "12.3 M", "1.23 B": three digits
Human human_bytes(double bytes);         // "512 bytes", "1.50 MB", "2.00 GB": powers of 1000
Human human_duration(double seconds);    // "45 s", "12 min 5 s", "1 h 34 min", "3 d 4 h"
Human human_grouped(uint64_t n);         // "100,000,000"

// Removes a NaN's sign, because printf() would print "-nan".
static inline double shown(double x) {
    return isnan(x) ? (double)NAN : x;
}

#ifdef __cplusplus
}
#endif
#endif

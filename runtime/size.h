// The smaller and the larger of two sizes.
#ifndef RUNTIME_SIZE_H
#define RUNTIME_SIZE_H

#include <stddef.h>

static inline size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

#endif

// qk=l2 on the CPU: one head of q or k divided by its Euclidean norm, and the gradient of that.
#ifndef ATTENTION_L2_H
#define ATTENTION_L2_H

#include <stddef.h>

#include "math/real.h"

// 1/|x|, or 0 if |x|² is below the smallest normal number
static inline real l2_inverse(const real *x, size_t HS) {
    real sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < HS; i++) sum += x[i] * x[i];
    return sum < REAL_MIN ? 0 : 1 / real_sqrt(sum);
}

// dx = (du − u (u · du))/|x|, u = x/|x|, in place: dx holds du on entry.
static inline void l2_backward(real *dx, const real *u, real inverse, size_t HS) {
    real dot = 0;
    #pragma omp simd reduction(+ : dot)
    for (size_t i = 0; i < HS; i++) dot += u[i] * dx[i];
    #pragma omp simd
    for (size_t i = 0; i < HS; i++) dx[i] = (dx[i] - u[i] * dot) * inverse;
}

#endif

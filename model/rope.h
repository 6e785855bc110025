// The rotation angles of RoPE, in one table that both trainers use.
#ifndef MODEL_ROPE_H
#define MODEL_ROPE_H

#include <math.h>
#include <stddef.h>

#include "runtime/real.h"

// cos and sin of t · theta^(−2i/HS)
//   cosines, sines (T,HS/2) written
static inline void rope_table(real *cosines, real *sines, size_t T, size_t HS, double theta) {
    size_t half = HS / 2;
#ifdef _OPENMP    // nvcc builds its host code without OpenMP
    #pragma omp parallel for schedule(static)
#endif
    for (size_t t = 0; t < T; t++) {
        for (size_t i = 0; i < half; i++) {
            double angle = (double)t * pow(theta, -2.0 * (double)i / (double)HS);
            cosines[t * half + i] = (real)cos(angle);
            sines[t * half + i] = (real)sin(angle);
        }
    }
}

#endif

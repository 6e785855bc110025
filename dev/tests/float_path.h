// The trainer's float32 code for test_gradients.c, which is itself built in double. Arguments and results are double.
#ifndef DEV_TESTS_FLOAT_PATH_H
#define DEV_TESTS_FLOAT_PATH_H

#include <stddef.h>
#include <stdint.h>

#include "attention/normalizer.h"

// f (n) = phi(z) and its slope, by phi_both in float32, in a loop like attention's. z (n) is rounded to float32.
void phi_in_float(int phi, const double *z, double one, double *f, double *slope, size_t n);

typedef struct {
    const Normalizer *normalizer;
    size_t B, T, NH, NKV, HS, VS;
    int L;
    const int32_t *first;
    // q (B,T,NH,HS), k (B,T,NKV,HS), v (B,T,NKV,VS), dout (B,T,NH,VS)
    const double *q, *k, *v, *dout;
    const double *scalars[SCALAR_COUNT];    // as Scalars
    double *out, *dq, *dk, *dv;             // written
} FloatAttention;

void attention_in_float(const FloatAttention *c);

#endif

// The number type of the layers and of attention, and its elementary functions: float with the vector functions of
// vecmath.h, or double with libm in the build that checks gradients by finite differences (-DREAL=double).
#ifndef MATH_REAL_H
#define MATH_REAL_H

#include <float.h>
#include <math.h>

#include "math/vecmath.h"

#ifndef REAL
#define REAL float
#endif
typedef REAL real;

#ifdef __cplusplus    // CUDA, or CUDA source compiled for the CPU (cuda/gpu.cuh)
#define real_exp expf
#define real_log1p01 log1pf
#define real_log logf
#define real_sqrt sqrtf
#define real_rsqrt rsqrtf
#define real_floor floorf
#define real_abs fabsf
#define real_sigmoid(x) (1 / (1 + expf(-(x))))
#define real_tanh tanhf
#define real_pow01 powf
#define real_normal_cdf(z, gauss) normcdff(z)
#define REAL_MIN FLT_MIN
#define REAL_EPSILON FLT_EPSILON
#else
#define BY_TYPE(x, f, d) _Generic((real)0, float: f, double: d)
#define REAL_MIN     BY_TYPE(0, FLT_MIN, DBL_MIN)                  // the smallest normal number
#define REAL_EPSILON BY_TYPE(0, FLT_EPSILON, DBL_EPSILON)
#define real_exp(x)    BY_TYPE(x, vec_exp, exp)(x)
#define real_log1p01(x) BY_TYPE(x, vec_log1p01, log1p)(x)           // only for x in [0, 1]
#define real_log(x)    BY_TYPE(x, vec_log, log)(x)
#define real_sqrt(x)   BY_TYPE(x, sqrtf, sqrt)(x)
#define real_rsqrt(x)  (1 / real_sqrt(x))
#define real_floor(x)  BY_TYPE(x, floorf, floor)(x)
#define real_abs(x)    BY_TYPE(x, fabsf, fabs)(x)
#define real_pow01(x, p) BY_TYPE(x, vec_pow01, pow)(x, p)           // only for x in [0, 1]
#define real_sigmoid(x) BY_TYPE(x, vec_sigmoid, double_sigmoid)(x)
#define real_tanh(x)   BY_TYPE(x, vec_tanh, tanh)(x)
#define real_normal_cdf(z, gauss) BY_TYPE(z, vec_normal_cdf, double_normal_cdf)(z, gauss)

static inline double double_sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

static inline double double_normal_cdf(double z, double gauss) {
    (void)gauss;
    return erfc(-z / sqrt(2)) / 2;
}
#endif
#endif

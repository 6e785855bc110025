// The trainer's float32 code for test_gradients.c, which is itself built in double.
#ifndef DEV_TESTS_FLOAT_PATH_H
#define DEV_TESTS_FLOAT_PATH_H

#include <stddef.h>

// f (n) = phi(z) and its slope, by phi_both in float32, in a loop like attention's.
void phi_in_float(int phi, const float *z, float one, float *f, float *slope, size_t n);

#endif

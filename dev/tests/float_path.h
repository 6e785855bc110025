// The trainer's float32 code for test_gradients.c, which is itself built in double. Arguments and results are double.
#ifndef DEV_TESTS_FLOAT_PATH_H
#define DEV_TESTS_FLOAT_PATH_H

#include <stddef.h>

// f (n) = phi(z) and its slope, by phi_both in float32, in a loop like attention's. z (n) is rounded to float32.
void phi_in_float(int phi, const double *z, double one, double *f, double *slope, size_t n);

#endif

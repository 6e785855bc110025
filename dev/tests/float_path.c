// Linked into test_gradients next to its double code, whose functions have other names (see there).
#include "dev/tests/float_path.h"

#include <stdlib.h>

#include "attention/normalizer.h"
#include "runtime/error.h"

static float *floats(const double *from, size_t n) {
    float *x = calloc(n + 1, sizeof *x);
    if (!x) fail(EXIT_RESOURCE, "out of memory.");
    for (size_t i = 0; from && i < n; i++) x[i] = (float)from[i];
    return x;
}

static void give_back(double *to, float *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = from[i];
    free(from);
}

NORMALIZER_INLINE void phi_loop(int phi, const float *restrict z, float one, float *restrict f, float *restrict slope,
                                size_t n) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++) phi_both(phi, z[i], one, &f[i], &slope[i]);
}

void phi_in_float(int phi, const double *z, double one, double *f, double *slope, size_t n) {
    float *x = floats(z, n), *values = floats(NULL, n), *slopes = floats(NULL, n);
#define CASE(kind_, ...) case kind_: phi_loop(kind_, x, (float)one, values, slopes, n); break;
    switch (phi) { PHI_VALUES(CASE) }
#undef CASE
    give_back(f, values, n);
    give_back(slope, slopes, n);
    free(x);
}

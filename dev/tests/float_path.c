// Linked into test_gradients beside its double code. It uses only inline functions, so no names clash.
#include "dev/tests/float_path.h"

#include "attention/normalizer.h"

NORMALIZER_INLINE void phi_loop(int phi, const float *restrict z, float one, float *restrict f, float *restrict slope,
                                size_t n) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++) phi_both(phi, z[i], one, &f[i], &slope[i]);
}

void phi_in_float(int phi, const float *z, float one, float *f, float *slope, size_t n) {
#define CASE(kind_, ...) case kind_: phi_loop(kind_, z, one, f, slope, n); break;
    switch (phi) { PHI_VALUES(CASE) }
#undef CASE
}

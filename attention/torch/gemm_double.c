// gemm() for REAL=double, by plain loops: finite differences and gradcheck need exactness, not speed.
#include "runtime/gemm.h"

void gemm(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, real beta, real *C, size_t ldc) {
    (void)mm;
    for (size_t i = 0; i < m; i++) {
        real *row = C + i * ldc;
        for (size_t j = 0; j < n; j++) row[j] = beta != 0 ? row[j] : 0;
        for (size_t j = 0; B.transposed && j < n; j++)
            for (size_t p = 0; p < k; p++)
                row[j] += A.f32[A.transposed ? p * A.ld + i : i * A.ld + p] * B.f32[j * B.ld + p];
        for (size_t p = 0; !B.transposed && p < k; p++)
            for (size_t j = 0; j < n; j++)
                row[j] += A.f32[A.transposed ? p * A.ld + i : i * A.ld + p] * B.f32[p * B.ld + j];
    }
}

// The matrix products of the CPU programs: one function over oneDNN, a CBLAS, or own loops, whichever the build found.
#ifndef RUNTIME_GEMM_H
#define RUNTIME_GEMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { PRODUCT_F32, PRODUCT_BF16 } ProductType;

// C (m,n) = op(A) (m,k) · op(B) (k,n) + beta · C, all row-major; ta, tb: 'N' as stored, 'T' transposed.
//   lda, ldb, ldc   elements from one stored row to the next;  beta is 0 (C written) or 1 (added to)
// Outside a parallel region it uses all threads, inside one only the caller's.
void gemm(char ta, char tb, size_t m, size_t n, size_t k, const real *A, size_t lda, const real *B, size_t ldb,
          real beta, real *C, size_t ldc);

// One input of gemm_bf16: numbers that are bfloat16 already, or float32 that it rounds first (to nearest, ties to
// even).
typedef struct {
    const real *f32;    // used when bf16 is NULL
    const uint16_t *bf16;
} Operand;

// The same product of bfloat16 inputs with float32 sums and output. Called outside parallel regions.
// Where neither the processor nor the library multiplies bfloat16, the rounded inputs are multiplied in float32: same
// numbers, no gain.
void gemm_bf16(char ta, char tb, size_t m, size_t n, size_t k, Operand A, size_t lda, Operand B, size_t ldb, real beta,
               real *C, size_t ldc);

// Bytes of scratch that gemm_bf16 needs for inputs of at most these many elements; and the memory for them, taken by
// the caller once.
size_t gemm_bf16_scratch(size_t largest_a, size_t largest_b);
void gemm_bf16_use(void *scratch, size_t largest_a, size_t largest_b);

bool gemm_has_bf16(void);          // is bfloat16 multiplied natively?
const char *gemm_backend(void);    // "oneDNN 2.6", "CBLAS", "own loops"

void bf16_round(uint16_t *out, const float *in, size_t n);    // all threads

// The three kinds of product by oneDNN's primitives in the given type; false where it has none. Only the tests ask for
// float32 here: it tries the code that bfloat16 takes on processors that lack it.
bool gemm_by_primitive(ProductType type, char ta, char tb, size_t m, size_t n, size_t k, const void *A, size_t lda,
                       const void *B, size_t ldb, float beta, float *C, size_t ldc);

#ifdef __cplusplus
}
#endif
#endif

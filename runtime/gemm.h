// Matmuls on the CPU, by oneDNN, a CBLAS, or built-in loops, depending on what the build found.
#ifndef RUNTIME_GEMM_H
#define RUNTIME_GEMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { GEMM_F32, GEMM_BF16 } GemmType;

// An input of a matmul, stored row by row.
typedef struct {
    const real *f32;         // used if bf16 is NULL
    const uint16_t *bf16;    // only for gemm_bf16()
    size_t ld;               // elements from one stored row to the next
    bool transposed;         // the matmul uses the transpose of what is stored
} Matrix;

static inline Matrix as_stored(const real *x, size_t ld) {
    Matrix matrix = {x, NULL, ld, false};
    return matrix;
}

static inline Matrix transposed(const real *x, size_t ld) {
    Matrix matrix = {x, NULL, ld, true};
    return matrix;
}

// C (m,n) = A (m,k) · B (k,n) + beta · C, where A and B are meant after transposition
//   C   row-major, ldc elements from one row to the next; written if beta is 0, added to if beta is 1
// Uses all threads, or inside a parallel region only the calling thread.
void gemm(size_t m, size_t n, size_t k, Matrix A, Matrix B, real beta, real *C, size_t ldc);

// Memory for the inputs that gemm_bf16() rounds.
typedef struct {
    void *a, *b;
} GemmScratch;

// The bytes of memory that gemm_bf16() needs for inputs of at most these numbers of elements, and the scratch made of
// it.
size_t gemm_bf16_bytes(size_t largest_a, size_t largest_b);
GemmScratch gemm_bf16_scratch(void *memory, size_t largest_a);

// The same with bfloat16 inputs and float32 sums and output. float32 inputs are first rounded, to nearest, ties to
// even. Call it outside parallel regions. If the processor or the library does not support bfloat16 matmuls, the
// rounded inputs are multiplied in float32, which gives the same numbers but no speedup. Ends with EXIT_RESOURCE if
// oneDNN fails.
void gemm_bf16(const GemmScratch *scratch, size_t m, size_t n, size_t k, Matrix A, Matrix B, real beta, real *C,
               size_t ldc);

bool gemm_has_bf16(void);          // are there native bfloat16 matmuls?
const char *gemm_backend(void);    // "oneDNN 2.6", "CBLAS" or "built-in loops"

// out (n) = in (n) rounded to bfloat16, by all threads
void bf16_round(uint16_t *out, const float *in, size_t n);

// gemm() by a oneDNN primitive, on inputs of the given type: `f32` or `bf16` of both matrices must be set accordingly.
// Returns false if there is no such primitive. gemm_bf16() uses it; the tests also call it with float32, to exercise
// that code on processors without bfloat16.
bool gemm_by_primitive(GemmType type, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C,
                       size_t ldc);

#ifdef __cplusplus
}
#endif
#endif

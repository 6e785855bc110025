// Matmuls on the CPU, by oneDNN, a CBLAS, or built-in loops, depending on what the build found.
#ifndef MATH_GEMM_H
#define MATH_GEMM_H

#include <stdbool.h>
#include <stddef.h>

#include "math/real.h"
#include "math/tiles.h"

#ifdef __cplusplus
extern "C" {
#endif

// What matmuls keep from call to call. {0} is float32 without a buffer.
typedef struct {
    bool bf16;                        // gemm_run() rounds its inputs to bfloat16
    bool native;                      // with bf16: the processor and the library support such matmuls
    Tiles tiles;                      // the instructions of attention's matmuls, and in bfloat16 of all
    void *a, *b;                      // with bf16: the rounded inputs
    struct Primitives *primitives;    // with bf16: oneDNN's, one per shape
    float *spread;                    // 8 MiB for gemm_spread(); NULL where no matmul uses it
} Gemm;

// With bf16, gemm_start() tests native matmuls, and gemm_run() needs scratch memory for inputs of at most these numbers
// of elements: this many bytes, handed over by gemm_use(). gemm_start() ends with EXIT_RESOURCE if it is out of memory.
void gemm_start(Gemm *mm, bool bf16);
size_t gemm_scratch(const Gemm *mm, size_t largest_a, size_t largest_b);
void gemm_use(Gemm *mm, void *scratch, size_t largest_a);
void gemm_end(Gemm *mm);

// gemm_run() by tiles, for mm->tiles in bfloat16, with this many bytes at mm->a.
size_t gemm_tiles_scratch(void);
void gemm_tiles(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C, size_t ldc);

// C (m,n) = A (m,k) · B (k,n) + beta · C, in float32, where A and B are meant after transposition
//   C   row-major, ldc elements from one row to the next; written if beta is 0, added to if beta is 1
// Uses all threads, or inside a parallel region only the calling thread. mm may be NULL; a few shapes then take up to
// twice as long, see gemm_spread().
void gemm(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, real beta, real *C, size_t ldc);

// The same, but with bf16, inputs are bfloat16 (float32 ones are first rounded, to nearest, ties to even), sums and
// output float32. Without native matmuls, the rounded inputs are multiplied in float32, which gives the same numbers
// but no speedup. Call it outside parallel regions. Ends with EXIT_RESOURCE if oneDNN fails.
void gemm_run(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, real beta, real *C, size_t ldc);

typedef struct {
    char name[32];       // "oneDNN 2.6", "CBLAS" or "built-in loops"
    int instructions;    // oneDNN's choice for this processor; otherwise 0
} GemmLibrary;
GemmLibrary gemm_library(void);

// gemm() by a oneDNN primitive, on inputs that are both bfloat16 or both float32. Returns false if there is no such
// primitive. gemm_run() uses it; the tests also call it with float32, to exercise that code on processors without
// bfloat16.
bool gemm_by_primitive(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C,
                       size_t ldc);

#ifdef __cplusplus
}
#endif
#endif

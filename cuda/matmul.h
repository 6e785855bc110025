// Matmuls by cuBLASLt, row-major, with inputs X = float or bf16:
//
//   out (N,OC) = inp (N,C) · weight (OC,C)ᵀ (+ add)
//   dinp (N,C) = dout (N,OC) · weight
//   dweight (OC,C) = doutᵀ · inp (+ dweight)
//
// Sums are float32, and float inputs are multiplied in true float32 (no TF32). out and dinp are X; dweight is float, so
// that nothing is lost over many micro-batches. All sums have a fixed order: split-k is only allowed if the parts are
// added as floats in the workspace. For the same library version, GPU, shape and algorithm, the bits are always the
// same.
//
// Speed: 2·N·C·OC FLOPs each. The algorithm for a shape is the one that a file of earlier measurements names
// (cuda/matmul_file.h). If there is none, it is the heuristic's first choice or, if matmul_start() was told to measure,
// the fastest of its first few. Another measurement may choose another algorithm, which rounds differently; with the
// file, later runs use the same ones.
//
// Limits: each size must be below 2^31. Any alignment works, but tensor cores need pointers and rows at multiples of 16
// bytes. Tests: dev/tests/test_matmul.cu.
#ifndef CUDA_MATMUL_H
#define CUDA_MATMUL_H

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/check.h"
#include "runtime/process.h"

#define CUBLAS_CHECK(call) cublas_check((call), #call, __FILE__, __LINE__)

static inline void cublas_check(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fail(EXIT_PEER, "rank %d: %s:%d: %s failed: %s (%s).", process.rank, file, line, call,
         cublasLtGetStatusString(status), cublasLtGetStatusName(status));
}

enum { MATMUL_CANDIDATES = 8, MATMUL_SHAPES = 256 };
#define MATMUL_WORKSPACE ((size_t)32 << 20)    // bytes; the library's own default on Hopper

// D (m,n) = op(A) (m,k) · op(B) (k,n) + beta · C, all row-major without gaps between rows. Algorithms are chosen by
// shape.
struct MatmulShape {
    size_t m, n, k;
    bool ta, tb;                    // A, B are stored transposed: as (k,m), (n,k)
    cudaDataType type, out_type;    // of A and B; of C and D
    uint32_t alignment[4];          // of A, B, C, D: bytes, up to 256
};

// The descriptors and the algorithm for one shape.
struct MatmulPlan {
    MatmulShape shape;
    cublasLtMatmulDesc_t matmul;
    cublasLtMatrixLayout_t first, second, out;
    cublasLtMatmulHeuristicResult_t candidates[MATMUL_CANDIDATES];
    int count, chosen;
    bool measured;
};

struct MatmulFile;
struct MatmulChoice;

struct Matmul {
    cublasLtHandle_t handle;
    void *workspace;    // device memory, aligned to 256
    size_t workspace_bytes;
    MatmulFile *file;
    bool measure;
    MatmulPlan plans[MATMUL_SHAPES];
    int count, oldest;    // when all plans are in use, the oldest is replaced
};

// Initializes *mm. `workspace` is device memory to which every matmul writes, so all of them must use the same stream.
// With fewer than MATMUL_WORKSPACE bytes (0: none), there are fewer algorithms to choose from. Algorithms in `file` are
// used without measuring, and those that are measured are added to it; it may be NULL.
void matmul_start(Matmul *mm, void *workspace, size_t bytes, MatmulFile *file, bool measure);
void matmul_end(Matmul *mm);

// Returns the first choice that applies here and that cuBLASLt rejects on this GPU, or NULL if it accepts all.
const MatmulChoice *matmul_rejected(const MatmulFile *file);

bool matmul_same_shape(const MatmulShape &a, const MatmulShape &b);

// Computes D for this shape, without its alignments, which are determined here. C is NULL to add nothing. C may be D
// itself if D is float, but not in bf16, where cuBLASLt then rounds the sums before it adds C: with cuBLASLt 13 on an
// H200, errors were up to 87 times as large as one rounding allows. Ends with EXIT_USAGE if C is D in bf16, and with
// EXIT_PEER if cuBLASLt has no algorithm for the shape.
void matmul_run(Matmul *mm, MatmulShape shape, void *D, const void *A, const void *B, const void *C,
                cudaStream_t stream);

// D = alpha · op(A) · op(B) + beta · C. Otherwise the same; C is not NULL, and not D.
struct MatmulFactors {
    float alpha, beta;
};
void matmul_scaled(Matmul *mm, MatmulShape shape, void *D, const void *A, const void *B, const void *C,
                   MatmulFactors factors, cudaStream_t stream);

static inline cudaDataType matmul_type(const float *) {
    return CUDA_R_32F;
}
static inline cudaDataType matmul_type(const __nv_bfloat16 *) {
    return CUDA_R_16BF;
}

// N rows of C inputs and OC outputs each.
struct MatmulSize {
    size_t N, C, OC;
};

// out[n,o] = sum_c inp[n,c] · weight[o,c] (+ add[n,o])
//   out (N,OC) written   inp (N,C)   weight (OC,C)   add (N,OC), NULL to add nothing; out itself only in float, see
//   matmul_run()
template <class X>
void matmul_forward(Matmul *mm, X *out, const X *inp, const X *weight, const X *add, MatmulSize s,
                    cudaStream_t stream) {
    matmul_run(mm, {s.N, s.OC, s.C, false, true, matmul_type(inp), matmul_type(out), {}}, out, inp, weight, add,
               stream);
}

// dinp[n,c] = sum_o dout[n,o] · weight[o,c] (+ more[n,c])
//   dinp (N,C) written   dout (N,OC)   weight (OC,C)   more (N,C), NULL to add nothing; not dinp in bf16
template <class X>
void matmul_input_backward(Matmul *mm, X *dinp, const X *dout, const X *weight, const X *more, MatmulSize s,
                           cudaStream_t stream) {
    cudaDataType x = matmul_type(dout);
    matmul_run(mm, {s.N, s.C, s.OC, false, false, x, x, {}}, dinp, dout, weight, more, stream);
}

// dweight[o,c] = sum_n dout[n,o] · inp[n,c] (+ dweight[o,c] if `add`), and dinp as above, without `more`
//   dinp (N,C) written, dweight (OC,C) written or added to, either may be NULL
//   dout (N,OC)   inp (N,C)   weight (OC,C)
template <class X>
void matmul_backward(Matmul *mm, X *dinp, float *dweight, const X *dout, const X *inp, const X *weight, MatmulSize s,
                     bool add, cudaStream_t stream) {
    cudaDataType x = matmul_type(dout);
    if (dinp) matmul_input_backward(mm, dinp, dout, weight, (const X *)NULL, s, stream);
    if (!dweight) return;
    const float *added = add ? dweight : NULL;
    matmul_run(mm, {s.OC, s.C, s.N, true, false, x, CUDA_R_32F, {}}, dweight, dout, inp, added, stream);
}

#endif

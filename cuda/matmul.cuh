// Matrix products by cuBLASLt, row-major, for inputs X = float or bf16:
//
//   out (N,OC) = inp (N,C) · weight (OC,C)ᵀ (+ add)        dinp (N,C) = dout (N,OC) · weight        dweight (OC,C) =
//   doutᵀ · inp (+ dweight)
//
// Sums are float32, of float inputs in true float32 (no TF32). out and dinp are X; dweight is float, so that nothing is
// lost over many micro-batches. Every sum is made in a fixed order: split sums are allowed only where the parts are
// added as floats from the workspace. The library gives the same bits each time for the same version, GPU and shape.
//
// Speed: 2·N·C·OC FLOPs each. The algorithm for a shape is the heuristic's first, kept from then on; or, where
// matmul_start() was told to measure, the fastest of its first few, which may be another one in the next run, with
// other roundings.
//
// Limits: each size below 2^31; any alignment, though the tensor cores want pointers and rows at multiples of 16 bytes.
// Tests: dev/tests/test_matmul.cu.
#ifndef CUDA_MATMUL_CUH
#define CUDA_MATMUL_CUH

#include "cuda/gpu.cuh"

#include <cublasLt.h>

#include "cuda/check.h"

#define CUBLAS_CHECK(call) cublas_check((call), #call, __FILE__, __LINE__)

static inline void cublas_check(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fail(EXIT_PEER, "process %d: %s:%d: %s failed: %s (%s).", process.rank, file, line, call,
         cublasLtGetStatusString(status), cublasLtGetStatusName(status));
}

enum { MATMUL_CANDIDATES = 8, MATMUL_REPEATS = 3, MATMUL_SHAPES = 256 };
#define MATMUL_WORKSPACE ((size_t)32 << 20)    // bytes; what the library's own default is on Hopper

// D (m,n) = op(A) (m,k) · op(B) (k,n) + beta · C, all row-major, rows without gaps. What an algorithm is chosen for.
struct MatmulShape {
    size_t m, n, k;
    bool ta, tb;                    // A, B are stored transposed
    cudaDataType type, out_type;    // of A and B; of C and D
    uint32_t alignment[4];          // of A, B, C, D: bytes, up to 256
};

static inline bool matmul_same_shape(const MatmulShape &a, const MatmulShape &b) {
    return a.m == b.m && a.n == b.n && a.k == b.k && a.ta == b.ta && a.tb == b.tb && a.type == b.type &&
           a.out_type == b.out_type && a.alignment[0] == b.alignment[0] && a.alignment[1] == b.alignment[1] &&
           a.alignment[2] == b.alignment[2] && a.alignment[3] == b.alignment[3];
}

// A shape that was met: its descriptors and its algorithm. The library counts columns first, so it sees every matrix
// transposed, and multiplies Dᵀ (n,m) = op(B)ᵀ · op(A)ᵀ: its first factor is our B.
struct MatmulPlan {
    MatmulShape shape;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t first, second, out;
    cublasLtMatmulHeuristicResult_t candidates[MATMUL_CANDIDATES];
    int count, chosen;
    bool measured;
};

struct Matmul {
    cublasLtHandle_t handle;
    void *workspace;    // on the device, aligned to 256
    size_t workspace_bytes;
    bool measure;
    MatmulPlan plans[MATMUL_SHAPES];
    int count, oldest;    // the oldest makes room once there are MATMUL_SHAPES
};

inline Matmul matmul;

// Before the first product. `workspace`: device memory that the products, one after the other, write to, so all of them
// go into one stream; at best MATMUL_WORKSPACE bytes, fewer (0: none) leave fewer algorithms to choose from.
static inline void matmul_start(void *workspace, size_t bytes, bool measure) {
    CUBLAS_CHECK(cublasLtCreate(&matmul.handle));
    matmul.workspace = workspace;
    matmul.workspace_bytes = bytes;
    matmul.measure = measure;
}

static inline void matmul_forget(MatmulPlan *plan) {
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan->product));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->first));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->second));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->out));
    *plan = MatmulPlan();
}

static inline void matmul_end(void) {
    for (int i = 0; i < matmul.count; i++) matmul_forget(&matmul.plans[i]);
    CUBLAS_CHECK(cublasLtDestroy(matmul.handle));
    matmul = Matmul();
}

// ---- plans

// The library's layout of a row-major matrix (rows,cols).
static inline cublasLtMatrixLayout_t matmul_layout(cudaDataType type, size_t rows, size_t cols) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, cols, rows, (int64_t)cols));
    return layout;
}

static inline cublasLtMatmulDesc_t matmul_product(bool transpose_first, bool transpose_second) {
    cublasLtMatmulDesc_t product;
    cublasOperation_t first = transpose_first ? CUBLAS_OP_T : CUBLAS_OP_N,
                      second = transpose_second ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    return product;
}

// What the heuristic is asked for: algorithms that the workspace and the matrices' alignment allow, with sums split
// only where their parts stay floats (not in the output's type, which may be bf16).
static inline cublasLtMatmulPreference_t matmul_preference(const MatmulShape &shape) {
    cublasLtMatmulPreference_t wishes;
    uint64_t workspace = matmul.workspace_bytes;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&wishes));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(wishes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                      sizeof workspace));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(wishes, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                                                      sizeof reductions));
    const uint32_t *a = shape.alignment;
    CUBLAS_CHECK(
        cublasLtMatmulPreferenceSetAttribute(wishes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a[1], sizeof *a));
    CUBLAS_CHECK(
        cublasLtMatmulPreferenceSetAttribute(wishes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a[0], sizeof *a));
    CUBLAS_CHECK(
        cublasLtMatmulPreferenceSetAttribute(wishes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &a[2], sizeof *a));
    CUBLAS_CHECK(
        cublasLtMatmulPreferenceSetAttribute(wishes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &a[3], sizeof *a));
    return wishes;
}

static inline void matmul_refused(const MatmulShape &s, cublasStatus_t status) {
    fail(EXIT_PEER,
         "process %d: cuBLASLt has no algorithm for a product (%zu,%zu) of %s, %zu terms each, A %s, B %s: %s.",
         process.rank, s.m, s.n, s.type == CUDA_R_16BF ? "bf16" : "float", s.k, s.ta ? "transposed" : "as stored",
         s.tb ? "transposed" : "as stored", cublasLtGetStatusName(status));
}

static inline MatmulPlan *matmul_room(void) {
    if (matmul.count < MATMUL_SHAPES) return &matmul.plans[matmul.count++];
    MatmulPlan *plan = &matmul.plans[matmul.oldest];
    matmul.oldest = (matmul.oldest + 1) % MATMUL_SHAPES;
    matmul_forget(plan);
    return plan;
}

static inline MatmulPlan *matmul_plan_make(const MatmulShape &s) {
    MatmulPlan *plan = matmul_room();
    plan->shape = s;
    plan->product = matmul_product(s.tb, s.ta);
    plan->first = s.tb ? matmul_layout(s.type, s.n, s.k) : matmul_layout(s.type, s.k, s.n);
    plan->second = s.ta ? matmul_layout(s.type, s.k, s.m) : matmul_layout(s.type, s.m, s.k);
    plan->out = matmul_layout(s.out_type, s.m, s.n);
    cublasLtMatmulPreference_t wishes = matmul_preference(s);
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(matmul.handle, plan->product, plan->first, plan->second, plan->out, plan->out,
                                       wishes, MATMUL_CANDIDATES, plan->candidates, &plan->count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(wishes));
    while (plan->chosen < plan->count && plan->candidates[plan->chosen].state != CUBLAS_STATUS_SUCCESS) plan->chosen++;
    if (status != CUBLAS_STATUS_SUCCESS || plan->chosen == plan->count) matmul_refused(s, status);
    return plan;
}

static inline MatmulPlan *matmul_plan(const MatmulShape &shape) {
    for (int i = 0; i < matmul.count; i++)
        if (matmul_same_shape(matmul.plans[i].shape, shape)) return &matmul.plans[i];
    return matmul_plan_make(shape);
}

// ---- products

static inline void matmul_run(const MatmulPlan *plan, int candidate, void *D, const void *A, const void *B,
                              const void *C, float beta, cudaStream_t stream) {
    float alpha = 1;
    CUBLAS_CHECK(cublasLtMatmul(matmul.handle, plan->product, &alpha, B, plan->first, A, plan->second, &beta, C,
                                plan->out, D, plan->out, &plan->candidates[candidate].algo, matmul.workspace,
                                matmul.workspace_bytes, stream));
}

// Milliseconds of a candidate, the least of a few runs; +inf where it is not for this case.
static inline float matmul_time(const MatmulPlan *plan, int candidate, void *D, const void *A, const void *B,
                                const void *C, float beta, cudaEvent_t begin, cudaEvent_t end, cudaStream_t stream) {
    float least = INFINITY;
    if (plan->candidates[candidate].state != CUBLAS_STATUS_SUCCESS) return least;
    for (int i = 0; i < MATMUL_REPEATS; i++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(begin, stream));
        matmul_run(plan, candidate, D, A, B, C, beta, stream);
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (ms < least) least = ms;
    }
    return least;
}

// Chooses the fastest. D is written again and again, so it must not be an input.
static inline void matmul_measure(MatmulPlan *plan, void *D, const void *A, const void *B, const void *C, float beta,
                                  cudaStream_t stream) {
    cudaEvent_t begin, end;
    float best = INFINITY;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int i = 0; i < plan->count; i++) {
        float ms = matmul_time(plan, i, D, A, B, C, beta, begin, end, stream);
        if (ms < best) best = ms, plan->chosen = i;
    }
    plan->measured = true;
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
}

static inline uint32_t matmul_alignment(const void *p) {
    uint32_t bytes = 256;
    while ((uintptr_t)p % bytes) bytes /= 2;
    return bytes;
}

static inline cudaDataType matmul_type(const float *) {
    return CUDA_R_32F;
}
static inline cudaDataType matmul_type(const bf16 *) {
    return CUDA_R_16BF;
}

// D (m,n) = op(A) (m,k) · op(B) (k,n) + C; C NULL: nothing is added; C may be D.
//   ta, tb   A, B are stored as (k,m), (n,k)
template <class X, class Y>
void matmul_any(Y *D, const X *A, const X *B, const Y *C, bool ta, bool tb, size_t m, size_t n, size_t k,
                cudaStream_t stream) {
    const Y *c = C ? C : D;
    MatmulShape shape = {m,
                         n,
                         k,
                         ta,
                         tb,
                         matmul_type(A),
                         matmul_type(D),
                         {matmul_alignment(A), matmul_alignment(B), matmul_alignment(c), matmul_alignment(D)}};
    MatmulPlan *plan = matmul_plan(shape);
    float beta = C ? 1 : 0;
    if (matmul.measure && !plan->measured && C != D) matmul_measure(plan, D, A, B, c, beta, stream);
    matmul_run(plan, plan->chosen, D, A, B, c, beta, stream);
}

// out[n,o] = sum_c inp[n,c] · weight[o,c] (+ add[n,o])
//   out (N,OC) written   inp (N,C)   weight (OC,C)   add (N,OC), out itself, or NULL: nothing is added
template <class X>
void matmul_forward(X *out, const X *inp, const X *weight, const X *add, size_t N, size_t C, size_t OC,
                    cudaStream_t stream) {
    matmul_any(out, inp, weight, add, false, true, N, OC, C, stream);
}

// dinp[n,c] = sum_o dout[n,o] · weight[o,c],   dweight[o,c] = sum_n dout[n,o] · inp[n,c] (+ dweight[o,c] where `add`)
//   dinp (N,C) written, dweight (OC,C) written or added to, either may be NULL   dout (N,OC)   inp (N,C)   weight
//   (OC,C)
template <class X>
void matmul_backward(X *dinp, float *dweight, const X *dout, const X *inp, const X *weight, size_t N, size_t C,
                     size_t OC, bool add, cudaStream_t stream) {
    if (dinp) matmul_any(dinp, dout, weight, (const X *)NULL, false, false, N, C, OC, stream);
    if (dweight) matmul_any(dweight, dout, inp, add ? dweight : (const float *)NULL, true, false, OC, C, N, stream);
}

#endif

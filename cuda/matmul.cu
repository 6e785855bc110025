#include "cuda/matmul.h"

#include <math.h>

#include "cuda/matmul_file.h"

enum { REPEATS = 3 };    // timings of a candidate

bool matmul_same_shape(const MatmulShape &a, const MatmulShape &b) {
    return a.m == b.m && a.n == b.n && a.k == b.k && a.ta == b.ta && a.tb == b.tb && a.type == b.type &&
           a.out_type == b.out_type && a.alignment[0] == b.alignment[0] && a.alignment[1] == b.alignment[1] &&
           a.alignment[2] == b.alignment[2] && a.alignment[3] == b.alignment[3];
}

void matmul_start(Matmul *mm, void *workspace, size_t bytes, MatmulFile *file, bool measure) {
    *mm = Matmul();
    CUBLAS_CHECK(cublasLtCreate(&mm->handle));
    mm->workspace = workspace;
    mm->workspace_bytes = bytes;
    mm->file = file;
    mm->measure = measure;
}

static void free_plan(MatmulPlan *plan) {
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan->matmul));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->first));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->second));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->out));
    *plan = MatmulPlan();
}

void matmul_end(Matmul *mm) {
    for (int i = 0; i < mm->count; i++) free_plan(&mm->plans[i]);
    CUBLAS_CHECK(cublasLtDestroy(mm->handle));
    *mm = Matmul();
}

// ---- plans

// The library's layout of a row-major matrix (rows,cols).
static cublasLtMatrixLayout_t make_layout(cudaDataType type, size_t rows, size_t cols) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, cols, rows, (int64_t)cols));
    return layout;
}

static cublasLtMatmulDesc_t make_matmul(bool transpose_first, bool transpose_second) {
    cublasLtMatmulDesc_t description;
    cublasOperation_t first = transpose_first ? CUBLAS_OP_T : CUBLAS_OP_N,
                      second = transpose_second ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    return description;
}

template <class T>
static void set_preference(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                           T value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

// Restricts the heuristic to algorithms that the workspace and the matrices' alignment allow, and that split sums only
// if the parts remain floats (rather than the output's type, which may be bf16).
static cublasLtMatmulPreference_t make_preference(const Matmul *mm, const MatmulShape &shape) {
    cublasLtMatmulPreference_t preference;
    const uint32_t *alignment = shape.alignment;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)mm->workspace_bytes);
    set_preference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment[1]);
    set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment[0]);
    set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment[2]);
    set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment[3]);
    return preference;
}

static void fail_without_algorithm(const MatmulShape &s, cublasStatus_t status) {
    fail(EXIT_PEER,
         "rank %d: cuBLASLt has no algorithm for a matmul of %s with m = %zu, n = %zu, k = %zu, A %s, B %s: %s.",
         process.rank, s.type == CUDA_R_16BF ? "bf16" : "float", s.m, s.n, s.k, s.ta ? "transposed" : "as stored",
         s.tb ? "transposed" : "as stored", cublasLtGetStatusName(status));
}

// Returns an unused plan. If there is none, frees the oldest.
static MatmulPlan *unused_plan(Matmul *mm) {
    if (mm->count < MATMUL_SHAPES) return &mm->plans[mm->count++];
    MatmulPlan *plan = &mm->plans[mm->oldest];
    mm->oldest = (mm->oldest + 1) % MATMUL_SHAPES;
    free_plan(plan);
    return plan;
}

// The library is column-major, so it sees every matrix transposed. It computes Dᵀ (n,m) = op(B)ᵀ · op(A)ᵀ, so its first
// factor is our B.
static void make_descriptors(MatmulPlan *plan, const MatmulShape &s) {
    plan->shape = s;
    plan->matmul = make_matmul(s.tb, s.ta);
    plan->first = s.tb ? make_layout(s.type, s.n, s.k) : make_layout(s.type, s.k, s.n);
    plan->second = s.ta ? make_layout(s.type, s.k, s.m) : make_layout(s.type, s.m, s.k);
    plan->out = make_layout(s.out_type, s.m, s.n);
}

static MatmulPlan *make_plan(Matmul *mm, const MatmulShape &s) {
    MatmulPlan *plan = unused_plan(mm);
    make_descriptors(plan, s);
    if (const MatmulChoice *stored = mm->file ? matmul_file_find(mm->file, s) : NULL) {
        plan->candidates[0].algo = stored->algorithm;
        plan->count = 1;
        plan->measured = true;
        return plan;
    }
    cublasLtMatmulPreference_t preference = make_preference(mm, s);
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(mm->handle, plan->matmul, plan->first, plan->second, plan->out, plan->out,
                                       preference, MATMUL_CANDIDATES, plan->candidates, &plan->count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    while (plan->chosen < plan->count && plan->candidates[plan->chosen].state != CUBLAS_STATUS_SUCCESS) plan->chosen++;
    if (status != CUBLAS_STATUS_SUCCESS || plan->chosen == plan->count) fail_without_algorithm(s, status);
    return plan;
}

static MatmulPlan *find_plan(Matmul *mm, const MatmulShape &shape) {
    for (int i = 0; i < mm->count; i++)
        if (matmul_same_shape(mm->plans[i].shape, shape)) return &mm->plans[i];
    return make_plan(mm, shape);
}

const MatmulChoice *matmul_rejected(const MatmulFile *file) {
    const MatmulChoice *rejected = NULL;
    cublasLtHandle_t handle;
    CUBLAS_CHECK(cublasLtCreate(&handle));
    for (const MatmulChoice &choice : file->choices) {
        if (rejected || !matmul_file_applies(file, choice)) continue;
        MatmulPlan plan = {};
        cublasLtMatmulHeuristicResult_t needs = {};
        make_descriptors(&plan, choice.shape);
        cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, plan.matmul, plan.first, plan.second, plan.out,
                                                        plan.out, &choice.algorithm, &needs);
        if (status != CUBLAS_STATUS_SUCCESS || needs.workspaceSize > file->workspace) rejected = &choice;
        free_plan(&plan);
    }
    CUBLAS_CHECK(cublasLtDestroy(handle));
    return rejected;
}

// ---- matmuls

// The operands of one call; C is never NULL.
struct Operands {
    void *D;
    const void *A, *B, *C;
    MatmulFactors factors;
};

static void run_candidate(const Matmul *mm, const MatmulPlan *plan, int candidate, const Operands &x,
                          cudaStream_t stream) {
    CUBLAS_CHECK(cublasLtMatmul(mm->handle, plan->matmul, &x.factors.alpha, x.B, plan->first, x.A, plan->second,
                                &x.factors.beta, x.C, plan->out, x.D, plan->out, &plan->candidates[candidate].algo,
                                mm->workspace, mm->workspace_bytes, stream));
}

// Returns the least time of a few runs in milliseconds, or +inf if the candidate does not support this case.
static float time_candidate(const Matmul *mm, const MatmulPlan *plan, int candidate, const Operands &x,
                            const cudaEvent_t events[2], cudaStream_t stream) {
    float least = INFINITY;
    if (plan->candidates[candidate].state != CUBLAS_STATUS_SUCCESS) return least;
    for (int i = 0; i < REPEATS; i++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(events[0], stream));
        run_candidate(mm, plan, candidate, x, stream);
        CUDA_CHECK(cudaEventRecord(events[1], stream));
        CUDA_CHECK(cudaEventSynchronize(events[1]));
        CUDA_CHECK(cudaEventElapsedTime(&ms, events[0], events[1]));
        if (ms < least) least = ms;
    }
    return least;
}

// Chooses the fastest candidate and adds it to the file. D is written repeatedly, so it must not be an input.
static void measure(const Matmul *mm, MatmulPlan *plan, const Operands &x, cudaStream_t stream) {
    cudaEvent_t events[2];
    float best = INFINITY;
    for (cudaEvent_t &event : events) CUDA_CHECK(cudaEventCreate(&event));
    for (int i = 0; i < plan->count; i++) {
        float ms = time_candidate(mm, plan, i, x, events, stream);
        if (!(ms < best)) continue;
        best = ms;
        plan->chosen = i;
    }
    plan->measured = true;
    if (mm->file) matmul_file_add(mm->file, plan->shape, plan->candidates[plan->chosen].algo, best);
    for (cudaEvent_t event : events) CUDA_CHECK(cudaEventDestroy(event));
}

static uint32_t alignment_of(const void *p) {
    uint32_t bytes = 256;
    while ((uintptr_t)p % bytes) bytes /= 2;
    return bytes;
}

void matmul_scaled(Matmul *mm, MatmulShape shape, void *D, const void *A, const void *B, const void *C,
                   MatmulFactors factors, cudaStream_t stream) {
    const Operands x = {D, A, B, C, factors};
    const void *const matrices[] = {A, B, C, D};
    if (C == D && factors.beta != 0 && shape.out_type != CUDA_R_32F)
        fail(EXIT_USAGE,
             "matmul: C and D (%zu,%zu) in bf16 are the same array, at %p; expected two, because cuBLASLt would round"
             " the sums before it adds C.",
             shape.m, shape.n, D);
    for (int i = 0; i < 4; i++) shape.alignment[i] = alignment_of(matrices[i]);
    MatmulPlan *plan = find_plan(mm, shape);
    if (mm->measure && !plan->measured && (C != D || factors.beta == 0)) measure(mm, plan, x, stream);
    run_candidate(mm, plan, plan->chosen, x, stream);
}

void matmul_run(Matmul *mm, MatmulShape shape, void *D, const void *A, const void *B, const void *C,
                cudaStream_t stream) {
    matmul_scaled(mm, shape, D, A, B, C ? C : D, {1, C ? 1.0f : 0.0f}, stream);
}

// cuBLASLt on the CPU: the functions of cublasLt.h for D = alpha · op(A) · op(B) + beta · C, column-major, in float32
// and bfloat16 with sums in float32. A call that the library would reject is rejected here, with the same status, and a
// line on stderr gives the reason. A matmul is work in its stream, like a kernel, and its matrices must be device
// memory when it runs. A C in bfloat16 that is D itself is rejected here but not by the library, which rounds the sums
// before it adds C.
//
// The heuristic offers up to three algorithms: one that adds two halves of the sum through the workspace, one that
// needs all matrices aligned to 16 bytes and begins with the second half, and one for any matrices. This exercises a
// caller's workspaces, alignments, and tolerance of different orders of sums, and the bits of a result show which
// algorithm was used. An algorithm rejects matrices of other sizes than it was offered for, or less aligned than the
// preference promised (on a GPU it might read wrong values or fail).
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "cuda_on_cpu.h"
#include "engine.h"

namespace {

struct Layout {    // (rows,cols), column-major, columns `ld` elements apart
    uint32_t type;
    uint64_t rows, cols;
    int64_t ld;

    size_t element() const {
        return type == CUDA_R_32F ? 4 : 2;
    }
    size_t bytes() const {    // from the first element to the last
        return ((cols - 1) * (size_t)ld + rows) * element();
    }
    size_t at(size_t row, size_t col) const {
        return row + col * (size_t)ld;
    }
};

struct Operation {
    int32_t compute, scale, transa, transb;
};

struct Preference {
    uint64_t workspace;
    uint32_t reductions;
    uint32_t alignment[4];    // of A, B, C, D
};

enum Kind : uint64_t { NO_ALGORITHM, HALVES, ALIGNED, ANY };

struct Algorithm {    // the contents of a cublasLtMatmulAlgo_t
    uint64_t kind, workspace;
    uint32_t alignment[4];    // of A, B, C, D, as promised to the heuristic
    uint64_t m, n, k;
};

bool refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool refuse(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "cuBLASLt on the CPU: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return false;
}

// ---- attributes: the place of each in its structure, and its size in bytes

struct Place {
    void *p;
    size_t bytes;
};

Place place(Operation *x, cublasLtMatmulDescAttributes_t attribute) {
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return {&x->transa, sizeof x->transa};
    case CUBLASLT_MATMUL_DESC_TRANSB: return {&x->transb, sizeof x->transb};
    default: return {NULL, 0};
    }
}

Place place(Preference *x, cublasLtMatmulPreferenceAttributes_t attribute) {
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return {&x->workspace, sizeof x->workspace};
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return {&x->reductions, sizeof x->reductions};
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return {&x->alignment[0], sizeof x->alignment[0]};
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return {&x->alignment[1], sizeof x->alignment[1]};
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return {&x->alignment[2], sizeof x->alignment[2]};
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return {&x->alignment[3], sizeof x->alignment[3]};
    default: return {NULL, 0};
    }
}

cublasStatus_t set(Place place, const void *from, size_t bytes, const char *what, int attribute) {
    if (!place.p || !from || bytes != place.bytes) {
        const char *reason = from ? "expected a value of another size" : "no value";
        refuse("%s attribute %d: %s", what, attribute, place.p ? reason : "not supported by this emulation");
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(place.p, from, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

Layout *layout(cublasLtMatrixLayout_t x) {
    return reinterpret_cast<Layout *>(x);
}
Operation *operation(cublasLtMatmulDesc_t x) {
    return reinterpret_cast<Operation *>(x);
}
Preference *preference(cublasLtMatmulPreference_t x) {
    return reinterpret_cast<Preference *>(x);
}

// ---- what the library rejects

struct Problem {
    Operation op;
    Layout a, b, c, d;
    uint64_t m, n, k;
};

bool layout_fits(const char *name, const Layout &x, uint64_t rows, uint64_t cols) {
    if (x.rows != rows || x.cols != cols)
        return refuse("%s is (%zu,%zu), but the other matrices require (%zu,%zu)", name, (size_t)x.rows, (size_t)x.cols,
                      (size_t)rows, (size_t)cols);
    if (x.rows < 1 || x.cols < 1 || x.rows > INT32_MAX || x.cols > INT32_MAX)
        return refuse("%s: found (%zu,%zu), expected sizes from 1 to 2^31 - 1", name, (size_t)x.rows, (size_t)x.cols);
    if (x.ld < (int64_t)x.rows)
        return refuse("%s: leading dimension %lld, expected at least %zu", name, (long long)x.ld, (size_t)x.rows);
    return true;
}

// The library mixes neither of the two types that this emulation knows with the other.
bool types_match(const char *names, const Layout &x, const Layout &y) {
    auto known = [](uint32_t type) { return type == CUDA_R_32F || type == CUDA_R_16BF; };
    if (known(x.type) && known(y.type) && x.type != y.type)
        return refuse("%s have the types %u and %u, expected the same", names, x.type, y.type);
    return true;
}

// Fills the problem; false if sizes, types or values contradict each other.
bool problem_is_valid(Problem *p, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                      cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    if (!op || !a || !b || !c || !d) return refuse("a descriptor is NULL");
    *p = {*operation(op), *layout(a), *layout(b), *layout(c), *layout(d), 0, 0, 0};
    bool ta = p->op.transa != CUBLAS_OP_N, tb = p->op.transb != CUBLAS_OP_N;
    p->m = p->d.rows;
    p->n = p->d.cols;
    p->k = ta ? p->a.rows : p->a.cols;
    if (p->op.compute == CUBLAS_COMPUTE_32F && p->op.scale != CUDA_R_32F)
        return refuse("scale type %d does not match sums in float", p->op.scale);
    if (!types_match("A and B", p->a, p->b) || !types_match("C and D", p->c, p->d)) return false;
    return layout_fits("D", p->d, p->m, p->n) && layout_fits("C", p->c, p->m, p->n) &&
           layout_fits("A", p->a, ta ? p->k : p->m, ta ? p->m : p->k) &&
           layout_fits("B", p->b, tb ? p->n : p->k, tb ? p->k : p->n);
}

// The types that the library multiplies and that this emulation supports.
bool problem_is_supported(const Problem &p) {
    bool floats = p.a.type == CUDA_R_32F && p.b.type == CUDA_R_32F && p.c.type == CUDA_R_32F;
    bool halves =
        p.a.type == CUDA_R_16BF && p.b.type == CUDA_R_16BF && (p.c.type == CUDA_R_16BF || p.c.type == CUDA_R_32F);
    if (p.op.compute != CUBLAS_COMPUTE_32F || p.op.scale != CUDA_R_32F)
        return refuse("compute type %d with scale type %d is not supported by this emulation", p.op.compute,
                      p.op.scale);
    if (p.c.type != p.d.type || !(floats || halves))
        return refuse("types A %u, B %u, C %u, D %u: this emulation does not support the combination", p.a.type,
                      p.b.type, p.c.type, p.d.type);
    return true;
}

// ---- algorithms

bool columns_aligned(const Layout &x) {
    return ((size_t)x.ld * x.element()) % 16 == 0;
}

bool fits_aligned(const Problem &p, const uint32_t alignment[4]) {
    bool fits = columns_aligned(p.a) && columns_aligned(p.b) && columns_aligned(p.c) && columns_aligned(p.d);
    for (int i = 0; i < 4; i++) fits = fits && alignment[i] >= 16;
    return fits;
}

std::vector<Algorithm> algorithms(const Problem &p, const Preference &preference) {
    std::vector<Algorithm> list;
    uint64_t partial = p.m * p.n * sizeof(float);
    if (p.k >= 32 && partial <= preference.workspace &&
        (preference.reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE))
        list.push_back({HALVES, partial, {}, p.m, p.n, p.k});
    if (fits_aligned(p, preference.alignment)) list.push_back({ALIGNED, 0, {}, p.m, p.n, p.k});
    list.push_back({ANY, 0, {}, p.m, p.n, p.k});
    for (Algorithm &algorithm : list) memcpy(algorithm.alignment, preference.alignment, sizeof algorithm.alignment);
    return list;
}

// Can this be one of algorithms() for matrices of these sizes?
bool algorithm_fits(const Problem &p, const Algorithm &algorithm) {
    uint64_t partial = p.m * p.n * sizeof(float);
    if (algorithm.kind < HALVES || algorithm.kind > ANY || algorithm.m != p.m || algorithm.n != p.n ||
        algorithm.k != p.k || algorithm.workspace != (algorithm.kind == HALVES ? partial : 0))
        return refuse("the algorithm is missing, or is for other sizes");
    for (uint32_t bytes : algorithm.alignment)
        if (bytes < 1 || bytes > 256 || (bytes & (bytes - 1)))
            return refuse("the algorithm is for an alignment to %u bytes", bytes);
    if (algorithm.kind == ALIGNED && !fits_aligned(p, algorithm.alignment))
        return refuse("the algorithm needs all matrices aligned to 16 bytes");
    return true;
}

// The largest power of two, up to 256, that divides an address.
uint32_t alignment_of(const void *p) {
    uint32_t alignment = 256;
    while ((uintptr_t)p % alignment) alignment /= 2;
    return alignment;
}

// ---- the matmul, tile by tile of D: the parts of both factors are packed as floats, then multiplied

enum { ROWS = 16, COLS = 6, TILE_M = 8 * ROWS, TILE_N = 16 * COLS, TILE_K = 256 };

float as_float(float x) {
    return x;
}
float as_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}

float element(const void *p, uint32_t type, size_t i) {
    return type == CUDA_R_32F ? as_float(((const float *)p)[i]) : as_float(((const __nv_bfloat16 *)p)[i]);
}

// packed[(line / group) · depth · group + k · group + line % group] = element `line` of op(x) across, k along the sum;
// 0 past the last line. op(x) has lines x depth, its element (line, k) at line · line_step + k · k_step.
template <size_t group, class X>
void pack(float *packed, const X *x, size_t line_step, size_t k_step, size_t lines, size_t depth) {
    for (size_t first = 0; first < lines; first += group, packed += depth * group) {
        size_t there = std::min(group, lines - first);
        for (size_t k = 0; k < depth; k++)
            for (size_t i = 0; i < group; i++)
                packed[k * group + i] = i < there ? as_float(x[(first + i) * line_step + k * k_step]) : 0.0f;
    }
}

template <size_t group>
void pack(float *packed, const void *p, uint32_t type, size_t line_step, size_t k_step, size_t lines, size_t depth) {
    if (type == CUDA_R_32F) pack<group>(packed, (const float *)p, line_step, k_step, lines, depth);
    else pack<group>(packed, (const __nv_bfloat16 *)p, line_step, k_step, lines, depth);
}

// sums[j][i] += sum_k a[k][i] · b[k][j], for ROWS x COLS elements of a tile; sums has TILE_M from one column to the
// next.
void multiply(float *sums, const float *a, const float *b, size_t depth) {
    float s[COLS][ROWS];
    for (int j = 0; j < COLS; j++) memcpy(s[j], sums + j * TILE_M, sizeof s[j]);
    for (size_t k = 0; k < depth; k++, a += ROWS, b += COLS)
        for (int j = 0; j < COLS; j++)
#pragma omp simd
            for (int i = 0; i < ROWS; i++) s[j][i] += a[i] * b[j];
    for (int j = 0; j < COLS; j++) memcpy(sums + j * TILE_M, s[j], sizeof s[j]);
}

struct Matrices {
    const void *a, *b, *c;
    void *d, *workspace;
    float alpha, beta;
};

const char *offset(const void *p, const Layout &x, size_t i) {
    return (const char *)p + i * x.element();
}

// A part of D: at most TILE_M by TILE_N elements.
struct Tile {
    size_t row, col, rows, cols;
};

// sums (TILE_M to a column) += the terms from k_from to k_to of the tile
void add_products(float *sums, const Problem &p, const void *a, const void *b, Tile tile, size_t k_from, size_t k_to) {
    bool ta = p.op.transa != CUBLAS_OP_N, tb = p.op.transb != CUBLAS_OP_N;
    size_t a_row = ta ? p.a.at(0, 1) : p.a.at(1, 0), a_k = ta ? p.a.at(1, 0) : p.a.at(0, 1);
    size_t b_col = tb ? p.b.at(1, 0) : p.b.at(0, 1), b_k = tb ? p.b.at(0, 1) : p.b.at(1, 0);
    static thread_local float packed_a[TILE_M * TILE_K], packed_b[TILE_N * TILE_K];
    for (size_t k = k_from; k < k_to; k += TILE_K) {
        size_t depth = std::min<size_t>(TILE_K, k_to - k);
        pack<ROWS>(packed_a, offset(a, p.a, tile.row * a_row + k * a_k), p.a.type, a_row, a_k, tile.rows, depth);
        pack<COLS>(packed_b, offset(b, p.b, tile.col * b_col + k * b_k), p.b.type, b_col, b_k, tile.cols, depth);
        for (size_t j = 0; j < tile.cols; j += COLS)
            for (size_t i = 0; i < tile.rows; i += ROWS)
                multiply(sums + j * TILE_M + i, packed_a + i * depth, packed_b + j * depth, depth);
    }
}

// One tile of D: alpha · sums + beta · C, C is not read if beta is 0.
void write_tile(const Problem &p, const Matrices &x, const float *sums, Tile tile) {
    for (size_t j = 0; j < tile.cols; j++)
        for (size_t i = 0; i < tile.rows; i++) {
            size_t row = tile.row + i, col = tile.col + j;
            float y = x.alpha * sums[j * TILE_M + i];
            if (x.beta != 0) y += x.beta * element(x.c, p.c.type, p.c.at(row, col));
            size_t at = p.d.at(row, col);
            if (p.d.type == CUDA_R_32F) ((float *)x.d)[at] = y;
            else ((__nv_bfloat16 *)x.d)[at] = __float2bfloat16_rn(y);
        }
}

void make_tile(const Problem &p, const Matrices &x, Kind kind, size_t row, size_t col) {
    size_t rows = std::min<size_t>(TILE_M, p.m - row), cols = std::min<size_t>(TILE_N, p.n - col);
    const Tile tile = {row, col, rows, cols};
    size_t half = kind == ANY ? 0 : p.k / 2;
    static thread_local float sums[TILE_M * TILE_N];
    memset(sums, 0, sizeof sums);
    add_products(sums, p, x.a, x.b, tile, half, p.k);
    if (kind == HALVES) {
        float *partial = (float *)x.workspace;
        for (size_t j = 0; j < cols; j++)
            memcpy(partial + (col + j) * p.m + row, sums + j * TILE_M, rows * sizeof *sums);
        memset(sums, 0, sizeof sums);
        add_products(sums, p, x.a, x.b, tile, 0, half);
        for (size_t j = 0; j < cols; j++)
            for (size_t i = 0; i < rows; i++) sums[j * TILE_M + i] += partial[(col + j) * p.m + row + i];
    } else {
        add_products(sums, p, x.a, x.b, tile, 0, half);
    }
    write_tile(p, x, sums, tile);
}

void expect_device(const char *name, const void *p, size_t bytes) {
    if (!cuda_on_cpu::is_device(p, bytes))
        cuda_on_cpu::die("cublasLtMatmul: %s: not all of the %zu bytes at %p are device memory", name, bytes, p);
}

// Declares what the matmul reads and writes, column by column, because memory between the columns may belong to
// something else.
template <class Touch, class P>
void touch(Touch touches, P p, const Layout &x) {
    touches(p, x.rows * x.element(), x.cols, (size_t)x.ld * x.element());
}

void product(const Problem &p, const Matrices &x, Algorithm algorithm) {
    expect_device("A", x.a, p.a.bytes());
    expect_device("B", x.b, p.b.bytes());
    if (x.beta != 0) expect_device("C", x.c, p.c.bytes());
    expect_device("D", x.d, p.d.bytes());
    if (algorithm.workspace) expect_device("the workspace", x.workspace, algorithm.workspace);
    touch(cuda_on_cpu::reads, x.a, p.a);
    touch(cuda_on_cpu::reads, x.b, p.b);
    if (x.beta != 0) touch(cuda_on_cpu::reads, x.c, p.c);
    touch(cuda_on_cpu::writes, x.d, p.d);
    if (algorithm.workspace) cuda_on_cpu::writes(x.workspace, algorithm.workspace);
    size_t down = (p.m + TILE_M - 1) / TILE_M, across = (p.n + TILE_N - 1) / TILE_N;
#pragma omp parallel for schedule(dynamic) if (p.m * p.n * p.k > 1 << 18 && !cuda_on_cpu::race_check())
    for (size_t tile = 0; tile < down * across; tile++)
        make_tile(p, x, (Kind)algorithm.kind, (tile % down) * TILE_M, (tile / down) * TILE_N);
}

}

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
    *handle = reinterpret_cast<cublasLtHandle_t>(new char);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete reinterpret_cast<char *>(handle);
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) {
    return CUBLAS_VERSION;
}

const char *cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "another CUBLAS_STATUS";
    }
}

const char *cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_INVALID_VALUE: return "a value is invalid or contradicts another";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the operation is not supported";
    default: return "another error";
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *x, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
    *x = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{(uint32_t)type, rows, cols, ld});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t x) {
    delete layout(x);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *x, cublasComputeType_t compute, cudaDataType_t scale) {
    *x = reinterpret_cast<cublasLtMatmulDesc_t>(new Operation{compute, scale, CUBLAS_OP_N, CUBLAS_OP_N});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t x) {
    delete operation(x);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t x, cublasLtMatmulDescAttributes_t attribute,
                                              const void *from, size_t bytes) {
    return set(place(operation(x), attribute), from, bytes, "matmul", attribute);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *x) {
    *x = reinterpret_cast<cublasLtMatmulPreference_t>(
        new Preference{0, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t x) {
    delete preference(x);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t x,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *from,
                                                    size_t bytes) {
    return set(place(preference(x), attribute), from, bytes, "preference", attribute);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t wishes, int count,
                                              cublasLtMatmulHeuristicResult_t results[], int *found) {
    Problem p;
    if (!wishes || count < 1 || !results || !found || !problem_is_valid(&p, op, a, b, c, d))
        return CUBLAS_STATUS_INVALID_VALUE;
    *found = 0;
    if (!problem_is_supported(p)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (count > 1) {    // the library, too, lists algorithms that fail: their state says so
        memset(results, 0, sizeof *results);
        results[(*found)++].state = CUBLAS_STATUS_NOT_SUPPORTED;
    }
    for (Algorithm algorithm : algorithms(p, *preference(wishes))) {
        if (*found == count) break;
        cublasLtMatmulHeuristicResult_t *result = &results[(*found)++];
        memset(result, 0, sizeof *result);
        memcpy(&result->algo, &algorithm, sizeof algorithm);
        result->workspaceSize = algorithm.workspace;
        result->state = CUBLAS_STATUS_SUCCESS;
        result->wavesCount = 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *chosen, cublasLtMatmulHeuristicResult_t *result) {
    Problem p;
    Algorithm algorithm;
    if (!chosen || !result || !problem_is_valid(&p, op, a, b, c, d)) return CUBLAS_STATUS_INVALID_VALUE;
    if (!problem_is_supported(p)) return CUBLAS_STATUS_NOT_SUPPORTED;
    memcpy(&algorithm, chosen, sizeof algorithm);
    if (!algorithm_fits(p, algorithm)) return CUBLAS_STATUS_INVALID_VALUE;
    result->workspaceSize = algorithm.workspace;
    result->state = CUBLAS_STATUS_SUCCESS;
    result->wavesCount = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t op, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *chosen, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    Problem p;
    if (!chosen || !problem_is_valid(&p, op, a_layout, b_layout, c_layout, d_layout))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!problem_is_supported(p)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (c == d && p.c.ld != p.d.ld) {
        refuse("cublasLtMatmul: C and D are the same memory with two layouts");
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (c == d && p.d.type == CUDA_R_16BF && *(const float *)beta != 0) {
        refuse("cublasLtMatmul: C is D in bfloat16, so the library would round the sums before it adds C");
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    uint32_t alignment[4] = {alignment_of(a), alignment_of(b), c ? alignment_of(c) : 256, alignment_of(d)};
    Algorithm algorithm;
    memcpy(&algorithm, chosen, sizeof algorithm);
    if (!algorithm_fits(p, algorithm)) return CUBLAS_STATUS_INVALID_VALUE;
    if (algorithm.workspace > workspace_bytes ||
        (algorithm.workspace && (!workspace || alignment_of(workspace) < 256))) {
        refuse("cublasLtMatmul: the algorithm needs %zu bytes of workspace aligned to 256, found %zu at %p",
               (size_t)algorithm.workspace, workspace_bytes, workspace);
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    for (int i = 0; i < 4; i++)
        if (alignment[i] % algorithm.alignment[i]) {
            refuse("cublasLtMatmul: %c is aligned to %u bytes, but the algorithm was chosen for %u", "ABCD"[i],
                   alignment[i], algorithm.alignment[i]);
            return CUBLAS_STATUS_INVALID_VALUE;
        }
    Matrices x = {a, b, c, d, workspace, *(const float *)alpha, *(const float *)beta};
    // D is (m,n), or its transpose (n,m) in row-major order.
    std::string name = "cublasLtMatmul m=" + std::to_string(p.m) + " n=" + std::to_string(p.n) +
                       " k=" + std::to_string(p.k) + (x.beta == 0 ? "" : " + C");
    cuda_on_cpu::enqueue(stream, [=] { product(p, x, algorithm); }, {name, 0});
    return CUBLAS_STATUS_SUCCESS;
}
}

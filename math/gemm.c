#include "math/gemm.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "math/vecmath.h"
#include "runtime/error.h"
#include "runtime/size.h"

#ifdef USE_ONEDNN
#include <dnnl.h>
#endif
#if defined(USE_CBLAS) && !defined(USE_ONEDNN)
#include <cblas.h>
#define USES_CBLAS
#endif

// ---- a matmul by a single thread, for builds without oneDNN (which has its own threads)

#if defined(USES_CBLAS)

// A BLAS with its own threads would start them inside ours, so it is told to use one before main() starts, if it has a
// function for that.
extern void openblas_set_num_threads(int) __attribute__((weak));

static __attribute__((constructor)) void use_one_thread(void) {
    if (openblas_set_num_threads) openblas_set_num_threads(1);
}

static void gemm_one_thread(size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C, size_t ldc) {
    cblas_sgemm(CblasRowMajor, A.transposed ? CblasTrans : CblasNoTrans, B.transposed ? CblasTrans : CblasNoTrans,
                (int)m, (int)n, (int)k, 1.0f, A.f32, (int)A.ld, B.f32, (int)B.ld, beta, C, (int)ldc);
}

#elif !defined(USE_ONEDNN)

// Computes tiles of 4 rows by 32 columns in registers, over slices of k. For each slice, a strip of B is packed so that
// it is read sequentially.
enum { TILE_M = 4, TILE_N = 32, SLICE_K = 256 };

// C (rows,cols) += A (rows,depth) · packed (depth,TILE_N)
static void tile(size_t rows, size_t cols, size_t depth, Matrix A, const float *packed, float *C, size_t ldc) {
    float sum[TILE_M][TILE_N] = {{0}};
    const float *a[TILE_M];
    size_t depth_step = A.transposed ? A.ld : 1;
    for (size_t i = 0; i < TILE_M; i++) a[i] = matrix_from(A, smaller(i, rows - 1), 0).f32;
    for (size_t p = 0; p < depth; p++) {
        for (size_t i = 0; i < TILE_M; i++) {
            float x = a[i][p * depth_step];
            #pragma omp simd
            for (size_t j = 0; j < TILE_N; j++) sum[i][j] += x * packed[p * TILE_N + j];
        }
    }
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++) C[i * ldc + j] += sum[i][j];
}

// packed (depth,TILE_N) = B (depth,cols), padded with zeros
static void pack(float *packed, Matrix B, size_t depth, size_t cols) {
    for (size_t q = 0; q < depth; q++)
        for (size_t c = 0; c < TILE_N; c++) packed[q * TILE_N + c] = c < cols ? *matrix_from(B, q, c).f32 : 0.0f;
}

static void gemm_one_thread(size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C, size_t ldc) {
    float packed[SLICE_K * TILE_N];
    if (beta == 0.0f)
        for (size_t i = 0; i < m; i++) memset(C + i * ldc, 0, n * sizeof *C);
    for (size_t p = 0; p < k; p += SLICE_K) {
        size_t depth = smaller(SLICE_K, k - p);
        for (size_t j = 0; j < n; j += TILE_N) {
            size_t cols = smaller(TILE_N, n - j);
            pack(packed, matrix_from(B, p, j), depth, cols);
            for (size_t i = 0; i < m; i += TILE_M)
                tile(smaller(TILE_M, m - i), cols, depth, matrix_from(A, i, p), packed, C + i * ldc + j, ldc);
        }
    }
}

#endif

// ---- float32

#ifdef USE_ONEDNN

static void gemm_onednn(size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C, size_t ldc) {
    dnnl_status_t status =
        dnnl_sgemm(A.transposed ? 'T' : 'N', B.transposed ? 'T' : 'N', (dnnl_dim_t)m, (dnnl_dim_t)n, (dnnl_dim_t)k,
                   1.0f, A.f32, (dnnl_dim_t)A.ld, B.f32, (dnnl_dim_t)B.ld, beta, C, (dnnl_dim_t)ldc);
    if (status != dnnl_success)
        fail(EXIT_RESOURCE,
             "oneDNN failed on a matmul of %zu x %zu x %zu (status %d). Build with ONEDNN=0 to avoid oneDNN.", m, n, k,
             (int)status);
}

// If A has few rows, oneDNN reads B in place. Rows of B that are a multiple of 4 KiB apart then compete for the same
// cache lines, which took twice as long (256 x 2048 x 768, Zen 3). So B is first copied, some rows at a time, to a
// buffer whose rows are one cache line further apart.
enum { FEW_ROWS = 256, COLLIDING = 1024, BUFFER = 2 << 20 };

static bool collides(size_t m, size_t n, size_t k, Matrix B) {
    return !B.transposed && B.ld % COLLIDING == 0 && n % COLLIDING == 0 && m >= 16 && m <= FEW_ROWS && k >= 64 &&
           n + 16 <= BUFFER;
}

static void gemm_spread(float *buffer, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C,
                        size_t ldc) {
    size_t spread = n + 16, part = BUFFER / spread;
    for (size_t first = 0; first < k; first += part) {
        size_t here = smaller(part, k - first);
        #pragma omp parallel for schedule(static)
        for (size_t p = 0; p < here; p++) memcpy(buffer + p * spread, B.f32 + (first + p) * B.ld, n * sizeof *B.f32);
        gemm_onednn(m, n, here, matrix_from(A, 0, first), as_stored(buffer, spread), first ? 1.0f : beta, C, ldc);
    }
}

void gemm(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C, size_t ldc) {
    bool spread = mm && mm->spread && collides(m, n, k, B) && !omp_in_parallel();
    if (spread) gemm_spread(mm->spread, m, n, k, A, B, beta, C, ldc);
    else gemm_onednn(m, n, k, A, B, beta, C, ldc);
}

#else

enum { BUFFER = 0 };

// Divides the longer side of C among the threads, in multiples of 32.
void gemm(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C, size_t ldc) {
    (void)mm;
    size_t threads = omp_in_parallel() ? 1 : (size_t)omp_get_max_threads();
    if (2.0 * m * n * k < 1e5) threads = 1;
    if (threads == 1) {
        gemm_one_thread(m, n, k, A, B, beta, C, ldc);
        return;
    }
    bool by_row = m >= n;
    size_t side = by_row ? m : n, part = (((side + threads - 1) / threads + 31) / 32) * 32;
    #pragma omp parallel for schedule(static, 1)
    for (size_t first = 0; first < side; first += part) {
        size_t here = smaller(part, side - first);
        if (by_row) gemm_one_thread(here, n, k, matrix_from(A, first, 0), B, beta, C + first * ldc, ldc);
        else gemm_one_thread(m, here, k, A, matrix_from(B, 0, first), beta, C + first, ldc);
    }
}

#endif

GemmLibrary gemm_library(void) {
    GemmLibrary library = {0};
#if defined(USE_ONEDNN)
    library.instructions = dnnl_get_effective_cpu_isa();
    snprintf(library.name, sizeof library.name, "oneDNN %d.%d", dnnl_version()->major, dnnl_version()->minor);
#elif defined(USES_CBLAS)
    strcpy(library.name, "CBLAS");
#else
    strcpy(library.name, "built-in loops");
#endif
    return library;
}

// ---- oneDNN's primitives, which bfloat16 matmuls need. They are created once per shape and kept. Versions 2 and 3
// differ in how a primitive is described.

#ifdef USE_ONEDNN

typedef struct {
    bool bf16;    // A and B; otherwise float32
    size_t m, n, k, lda, ldb, ldc;
    bool ta, tb, add;
    dnnl_primitive_t primitive;
    dnnl_memory_t a, b, c;
} Primitive;

enum { MAX_PRIMITIVES = 128 };

struct Primitives {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    Primitive of[MAX_PRIMITIVES];
    size_t count, oldest;    // if all are in use, the oldest is replaced
};

typedef dnnl_memory_desc_t Description;
#if DNNL_VERSION_MAJOR >= 3
#define DESCRIPTION(d) (d)
#define DESCRIBE dnnl_memory_desc_create_with_strides
#else
#define DESCRIPTION(d) (&(d))
#define DESCRIBE dnnl_memory_desc_init_by_strides
#endif

static bool describe(Description *d, size_t rows, size_t cols, dnnl_data_type_t type, size_t row_step,
                     size_t col_step) {
    dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)cols}, steps = {(dnnl_dim_t)row_step, (dnnl_dim_t)col_step};
    return DESCRIBE(d, 2, dims, type, steps) == dnnl_success;
}

static bool create(Primitive *p, dnnl_engine_t engine) {
    dnnl_data_type_t type = p->bf16 ? dnnl_bf16 : dnnl_f32;
    Description a, b, c;
    if (!describe(&a, p->m, p->k, type, p->ta ? 1 : p->lda, p->ta ? p->lda : 1)) return false;
    if (!describe(&b, p->k, p->n, type, p->tb ? 1 : p->ldb, p->tb ? p->ldb : 1)) return false;
    if (!describe(&c, p->m, p->n, dnnl_f32, p->ldc, 1)) return false;

    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t post;
    dnnl_primitive_desc_t description = NULL;
    if (dnnl_primitive_attr_create(&attributes) != dnnl_success || dnnl_post_ops_create(&post) != dnnl_success)
        return false;
#if DNNL_VERSION_MAJOR >= 3
    if (p->add) dnnl_post_ops_append_sum(post, 1.0f, 0, dnnl_data_type_undef);
    dnnl_primitive_attr_set_post_ops(attributes, post);
    bool created = dnnl_matmul_primitive_desc_create(&description, engine, a, b, NULL, c, attributes) == dnnl_success;
#else
    if (p->add) dnnl_post_ops_append_sum(post, 1.0f);
    dnnl_primitive_attr_set_post_ops(attributes, post);
    dnnl_matmul_desc_t matmul;
    bool created = dnnl_matmul_desc_init(&matmul, &a, &b, NULL, &c) == dnnl_success &&
                   dnnl_primitive_desc_create(&description, &matmul, attributes, engine, NULL) == dnnl_success;
#endif
    created = created && dnnl_primitive_create(&p->primitive, description) == dnnl_success &&
              dnnl_memory_create(&p->a, DESCRIPTION(a), engine, DNNL_MEMORY_NONE) == dnnl_success &&
              dnnl_memory_create(&p->b, DESCRIPTION(b), engine, DNNL_MEMORY_NONE) == dnnl_success &&
              dnnl_memory_create(&p->c, DESCRIPTION(c), engine, DNNL_MEMORY_NONE) == dnnl_success;
    if (description) dnnl_primitive_desc_destroy(description);
    dnnl_post_ops_destroy(post);
    dnnl_primitive_attr_destroy(attributes);
#if DNNL_VERSION_MAJOR >= 3
    dnnl_memory_desc_destroy(a);
    dnnl_memory_desc_destroy(b);
    dnnl_memory_desc_destroy(c);
#endif
    return created;
}

static void destroy(const Primitive *p) {
    dnnl_memory_destroy(p->a);
    dnnl_memory_destroy(p->b);
    dnnl_memory_destroy(p->c);
    dnnl_primitive_destroy(p->primitive);
}

// Returns the primitive for this shape, or NULL if oneDNN has none.
static Primitive *find(struct Primitives *all, const Primitive *wanted) {
    for (size_t i = 0; i < all->count; i++) {
        Primitive *p = &all->of[i];
        if (p->bf16 == wanted->bf16 && p->ta == wanted->ta && p->tb == wanted->tb && p->m == wanted->m &&
            p->n == wanted->n && p->k == wanted->k && p->lda == wanted->lda && p->ldb == wanted->ldb &&
            p->ldc == wanted->ldc && p->add == wanted->add)
            return p;
    }
    Primitive made = *wanted;
    if (!create(&made, all->engine)) return NULL;
    Primitive *place = &all->of[all->oldest];
    if (all->count < MAX_PRIMITIVES) {
        place = &all->of[all->count++];
    } else {
        destroy(place);
        all->oldest = (all->oldest + 1) % MAX_PRIMITIVES;
    }
    *place = made;
    return place;
}

// Returns NULL if oneDNN cannot start.
static struct Primitives *primitives_start(void) {
    struct Primitives *all = allocate(1, sizeof *all, "oneDNN's primitives");
    if (dnnl_engine_create(&all->engine, dnnl_cpu, 0) == dnnl_success &&
        dnnl_stream_create(&all->stream, all->engine, dnnl_stream_default_flags) == dnnl_success)
        return all;
    if (all->engine) dnnl_engine_destroy(all->engine);
    free(all);
    return NULL;
}

static void primitives_end(struct Primitives *all) {
    if (!all) return;
    for (const Primitive *p = all->of; p < all->of + all->count; p++) destroy(p);
    dnnl_stream_destroy(all->stream);
    dnnl_engine_destroy(all->engine);
    free(all);
}

bool gemm_by_primitive(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C,
                       size_t ldc) {
    Primitive wanted = {.bf16 = A.bf16 != NULL,
                        .m = m,
                        .n = n,
                        .k = k,
                        .lda = A.ld,
                        .ldb = B.ld,
                        .ldc = ldc,
                        .ta = A.transposed,
                        .tb = B.transposed,
                        .add = beta != 0};
    Primitive *p = mm->primitives ? find(mm->primitives, &wanted) : NULL;
    if (!p) return false;
    dnnl_memory_set_data_handle(p->a, A.bf16 ? (void *)A.bf16 : (void *)A.f32);
    dnnl_memory_set_data_handle(p->b, B.bf16 ? (void *)B.bf16 : (void *)B.f32);
    dnnl_memory_set_data_handle(p->c, C);
    dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, p->a}, {DNNL_ARG_WEIGHTS, p->b}, {DNNL_ARG_DST, p->c}};
    dnnl_stream_t stream = mm->primitives->stream;
    return dnnl_primitive_execute(p->primitive, stream, 3, args) == dnnl_success &&
           dnnl_stream_wait(stream) == dnnl_success;
}

#else

static struct Primitives *primitives_start(void) {
    return NULL;
}

static void primitives_end(struct Primitives *all) {
    (void)all;
}

bool gemm_by_primitive(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C,
                       size_t ldc) {
    (void)mm, (void)m, (void)n, (void)k, (void)A, (void)B, (void)beta, (void)C, (void)ldc;
    return false;
}

#endif

// ---- bfloat16

// Computes a matmul whose result is known, so that a library that accepts bfloat16 but computes it wrongly is not used.
static bool bf16_works(const Gemm *mm) {
    enum { SIDE = 32 };
    uint16_t a[SIDE * SIDE], b[SIDE * SIDE];
    float c[SIDE * SIDE];
    for (int i = 0; i < SIDE * SIDE; i++) {
        a[i] = bf16_from_float((float)(i % 7 - 3));
        b[i] = bf16_from_float((float)(i % 5 - 2));
    }
    Matrix A = {.bf16 = a, .ld = SIDE}, B = {.bf16 = b, .ld = SIDE, .transposed = true};
    if (!gemm_by_primitive(mm, SIDE, SIDE, SIDE, A, B, 0.0f, c, SIDE)) return false;
    for (int i = 0; i < SIDE; i++) {
        for (int j = 0; j < SIDE; j++) {
            float sum = 0.0f;
            for (int p = 0; p < SIDE; p++) sum += bf16_to_float(a[i * SIDE + p]) * bf16_to_float(b[j * SIDE + p]);
            if (c[i * SIDE + j] != sum) return false;
        }
    }
    return true;
}

enum { CHUNK = 4 << 20 };    // elements of B that are widened at a time if bfloat16 is not native

static size_t padded(size_t elements) {
    return ((elements + 63) / 64) * 64;
}

size_t gemm_scratch(const Gemm *mm, size_t largest_a, size_t largest_b) {
    if (!mm->bf16) return 0;
    if (tiles_are_bf16(mm->tiles)) return gemm_tiles_scratch();
    return mm->native ? (padded(largest_a) + largest_b) * sizeof(uint16_t)
                      : (padded(largest_a) + CHUNK) * sizeof(float);
}

void gemm_use(Gemm *mm, void *scratch, size_t largest_a) {
    size_t element = mm->native ? sizeof(uint16_t) : sizeof(float);
    mm->a = scratch;
    mm->b = (char *)scratch + padded(largest_a) * element;
}

// out (rows,cols), packed = the stored matrix, rounded to bfloat16, in float32
static void round_to_float(float *out, Matrix x, size_t rows, size_t cols) {
    #pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r++) {
        if (x.bf16) {
            #pragma omp simd
            for (size_t c = 0; c < cols; c++) out[r * cols + c] = bf16_to_float(x.bf16[r * x.ld + c]);
        } else {
            #pragma omp simd
            for (size_t c = 0; c < cols; c++) out[r * cols + c] = bf16_to_float(bf16_from_float(x.f32[r * x.ld + c]));
        }
    }
}

// In float32, with B widened in parts.
static void gemm_bf16_widened(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C,
                              size_t ldc) {
    float *a = mm->a, *b = mm->b;
    size_t a_rows = A.transposed ? k : m, a_cols = A.transposed ? m : k;
    size_t b_rows = B.transposed ? n : k, b_cols = B.transposed ? k : n;
    round_to_float(a, A, a_rows, a_cols);
    Matrix wide_a = {.f32 = a, .ld = a_cols, .transposed = A.transposed};
    Matrix wide_b = {.f32 = b, .ld = b_cols, .transposed = B.transposed};
    size_t part = larger(CHUNK / b_cols, 1);
    for (size_t first = 0; first < b_rows; first += part) {
        size_t here = smaller(part, b_rows - first);
        round_to_float(b, stored_from(B, first, 0), here, b_cols);
        if (B.transposed) gemm(mm, m, here, k, wide_a, wide_b, beta, C + first, ldc);
        else gemm(mm, m, n, here, matrix_from(wide_a, 0, first), wide_b, first ? 1.0f : beta, C, ldc);
    }
}

// Rounds a stored matrix (rows,cols) into scratch, packed, unless it is bfloat16 already.
static Matrix rounded(Matrix x, uint16_t *scratch, size_t rows, size_t cols) {
    if (x.bf16) return x;
    #pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r++) {
        #pragma omp simd
        for (size_t c = 0; c < cols; c++) scratch[r * cols + c] = bf16_from_float(x.f32[r * x.ld + c]);
    }
    return (Matrix){.bf16 = scratch, .ld = cols, .transposed = x.transposed};
}

static void gemm_bf16_native(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C,
                             size_t ldc) {
    A = rounded(A, mm->a, A.transposed ? k : m, A.transposed ? m : k);
    B = rounded(B, mm->b, B.transposed ? n : k, B.transposed ? k : n);
    if (!gemm_by_primitive(mm, m, n, k, A, B, beta, C, ldc))
        fail(EXIT_RESOURCE, "oneDNN failed on a bfloat16 matmul of %zu x %zu x %zu. Use --dtype fp32.", m, n, k);
}

// ---- either

void gemm_start(Gemm *mm, bool bf16) {
    *mm = (Gemm){.bf16 = bf16, .tiles = tiles_available(bf16)};
    if (bf16) mm->primitives = primitives_start();
    if (bf16) mm->native = bf16_works(mm);
    if (BUFFER > 0) mm->spread = aligned_alloc(64, BUFFER * sizeof *mm->spread);
    if (BUFFER > 0 && !mm->spread)
        fail(EXIT_RESOURCE, "out of memory for the %zu bytes of a matmul.", sizeof(float[BUFFER]));
}

void gemm_end(Gemm *mm) {
    primitives_end(mm->primitives);
    free(mm->spread);
    *mm = (Gemm){0};
}

void gemm_run(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C, size_t ldc) {
    if (!mm->bf16) gemm(mm, m, n, k, A, B, beta, C, ldc);
    else if (tiles_are_bf16(mm->tiles)) gemm_tiles(mm, m, n, k, A, B, beta, C, ldc);
    else if (mm->native) gemm_bf16_native(mm, m, n, k, A, B, beta, C, ldc);
    else gemm_bf16_widened(mm, m, n, k, A, B, beta, C, ldc);
}

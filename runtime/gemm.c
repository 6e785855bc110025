#include "gemm.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "vecmath.h"

#ifdef USE_ONEDNN
#include <dnnl.h>
#endif
#if defined(USE_CBLAS) && !defined(USE_ONEDNN)
#include <cblas.h>
#define THROUGH_CBLAS
#endif

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

// ---------------------------------------------------------------------------------------------------------------------
// One thread's product, for the builds without oneDNN (which has its own threads).

#if defined(THROUGH_CBLAS)

// A BLAS with threads of its own would start them inside ours: it is told to keep to one, where it can be told.
extern void openblas_set_num_threads(int) __attribute__((weak));

static void gemm_one_thread(char ta, char tb, size_t m, size_t n, size_t k, const float *A, size_t lda, const float *B,
                            size_t ldb, float beta, float *C, size_t ldc) {
    cblas_sgemm(CblasRowMajor, ta == 'T' ? CblasTrans : CblasNoTrans, tb == 'T' ? CblasTrans : CblasNoTrans, (int)m,
                (int)n, (int)k, 1.0f, A, (int)lda, B, (int)ldb, beta, C, (int)ldc);
}

#elif !defined(USE_ONEDNN)

// Own loops: a tile of 4 rows by 32 columns in registers, over slices of k whose strip of B is packed so that it is
// read in order.
enum { TILE_M = 4, TILE_N = 32, SLICE_K = 256 };

static void tile(size_t rows, size_t cols, size_t depth, const float *A, size_t row_step, size_t depth_step,
                 const float *packed, float *C, size_t ldc) {
    float sum[TILE_M][TILE_N] = {{0}};
    const float *a[TILE_M];
    for (size_t i = 0; i < TILE_M; i++) a[i] = A + MIN(i, rows - 1) * row_step;
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

static void gemm_one_thread(char ta, char tb, size_t m, size_t n, size_t k, const float *A, size_t lda, const float *B,
                            size_t ldb, float beta, float *C, size_t ldc) {
    float packed[SLICE_K * TILE_N];
    if (beta == 0.0f)
        for (size_t i = 0; i < m; i++) memset(C + i * ldc, 0, n * sizeof *C);
    size_t row_step = ta == 'T' ? 1 : lda, depth_step = ta == 'T' ? lda : 1;
    for (size_t p = 0; p < k; p += SLICE_K) {
        size_t depth = MIN(SLICE_K, k - p);
        for (size_t j = 0; j < n; j += TILE_N) {
            size_t cols = MIN(TILE_N, n - j);
            for (size_t q = 0; q < depth; q++)
                for (size_t c = 0; c < TILE_N; c++)
                    packed[q * TILE_N + c] = c >= cols   ? 0.0f
                                             : tb == 'T' ? B[(j + c) * ldb + p + q]
                                                         : B[(p + q) * ldb + j + c];
            for (size_t i = 0; i < m; i += TILE_M)
                tile(MIN(TILE_M, m - i), cols, depth, A + i * row_step + p * depth_step, row_step, depth_step, packed,
                     C + i * ldc + j, ldc);
        }
    }
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// float32

#ifdef USE_ONEDNN

static void gemm_onednn(char ta, char tb, size_t m, size_t n, size_t k, const float *A, size_t lda, const float *B,
                        size_t ldb, float beta, float *C, size_t ldc) {
    dnnl_status_t status = dnnl_sgemm(ta, tb, (dnnl_dim_t)m, (dnnl_dim_t)n, (dnnl_dim_t)k, 1.0f, A, (dnnl_dim_t)lda, B,
                                      (dnnl_dim_t)ldb, beta, C, (dnnl_dim_t)ldc);
    if (status != dnnl_success)
        fail(EXIT_RESOURCE,
             "oneDNN refused a product of %zu x %zu x %zu (status %d). Build with ONEDNN=0 to do without it.", m, n, k,
             (int)status);
}

// With few rows oneDNN reads B in place, and rows of B a multiple of 4 KiB apart fall on the same lines of the cache:
// it took twice as long (256 x 2048 x 768, Zen 3). So B goes first into a buffer whose rows are a line further apart,
// some of its rows at a time.
enum { FEW_ROWS = 256, COLLIDING = 1024, BUFFER = 2 << 20 };

static void gemm_spread(char ta, size_t m, size_t n, size_t k, const float *A, size_t lda, const float *B, size_t ldb,
                        float beta, float *C, size_t ldc) {
    static float buffer[BUFFER] __attribute__((aligned(64)));
    size_t spread = n + 16, part = BUFFER / spread;
    for (size_t from = 0; from < k; from += part) {
        size_t here = MIN(part, k - from);
        #pragma omp parallel for schedule(static)
        for (size_t p = 0; p < here; p++) memcpy(buffer + p * spread, B + (from + p) * ldb, n * sizeof *B);
        gemm_onednn(ta, 'N', m, n, here, A + from * (ta == 'T' ? lda : 1), lda, buffer, spread, from ? 1.0f : beta, C,
                    ldc);
    }
}

void gemm(char ta, char tb, size_t m, size_t n, size_t k, const float *A, size_t lda, const float *B, size_t ldb,
          float beta, float *C, size_t ldc) {
    bool spread = tb == 'N' && ldb % COLLIDING == 0 && n % COLLIDING == 0 && m >= 16 && m <= FEW_ROWS && k >= 64 &&
                  n + 16 <= BUFFER;
    if (spread && !omp_in_parallel()) gemm_spread(ta, m, n, k, A, lda, B, ldb, beta, C, ldc);
    else gemm_onednn(ta, tb, m, n, k, A, lda, B, ldb, beta, C, ldc);
}

#else

// The longer side of C is divided among the threads, in multiples of 32, so that each has a product of its own.
void gemm(char ta, char tb, size_t m, size_t n, size_t k, const float *A, size_t lda, const float *B, size_t ldb,
          float beta, float *C, size_t ldc) {
    size_t threads = omp_in_parallel() ? 1 : (size_t)omp_get_max_threads();
    if (2.0 * m * n * k < 1e5) threads = 1;
#ifdef THROUGH_CBLAS
    static bool told;
    if (!told && !omp_in_parallel()) {
        if (openblas_set_num_threads) openblas_set_num_threads(1);
        told = true;
    }
#endif
    if (threads == 1) {
        gemm_one_thread(ta, tb, m, n, k, A, lda, B, ldb, beta, C, ldc);
        return;
    }
    bool by_row = m >= n;
    size_t side = by_row ? m : n, part = ((side + threads - 1) / threads + 31) / 32 * 32;
    #pragma omp parallel for schedule(static, 1)
    for (size_t from = 0; from < side; from += part) {
        size_t here = MIN(part, side - from);
        if (by_row)
            gemm_one_thread(ta, tb, here, n, k, A + from * (ta == 'T' ? 1 : lda), lda, B, ldb, beta, C + from * ldc,
                            ldc);
        else gemm_one_thread(ta, tb, m, here, k, A, lda, B + from * (tb == 'T' ? ldb : 1), ldb, beta, C + from, ldc);
    }
}

#endif

const char *gemm_backend(void) {
#if defined(USE_ONEDNN)
    static char name[32];
    snprintf(name, sizeof name, "oneDNN %d.%d", dnnl_version()->major, dnnl_version()->minor);
    return name;
#elif defined(THROUGH_CBLAS)
    return "CBLAS";
#else
    return "own loops";
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// oneDNN's primitives, made once for each shape: the way to its bfloat16 products. Versions 2 and 3 differ in how one
// is described.

#ifdef USE_ONEDNN

typedef struct {
    ProductType type;
    char ta, tb;
    size_t m, n, k, lda, ldb, ldc;
    bool add;
    dnnl_primitive_t primitive;
    dnnl_memory_t a, b, c;
} Product;

enum { MAX_PRODUCTS = 128 };
static Product products[MAX_PRODUCTS];
static size_t product_count;
static dnnl_engine_t engine;
static dnnl_stream_t stream;

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t Description;
#define DESCRIPTION(d) (d)
static bool describe(Description *d, size_t rows, size_t cols, dnnl_data_type_t type, size_t row_step,
                     size_t col_step) {
    dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)cols}, steps = {(dnnl_dim_t)row_step, (dnnl_dim_t)col_step};
    return dnnl_memory_desc_create_with_strides(d, 2, dims, type, steps) == dnnl_success;
}
#else
typedef dnnl_memory_desc_t Description;
#define DESCRIPTION(d) (&(d))
static bool describe(Description *d, size_t rows, size_t cols, dnnl_data_type_t type, size_t row_step,
                     size_t col_step) {
    dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)cols}, steps = {(dnnl_dim_t)row_step, (dnnl_dim_t)col_step};
    return dnnl_memory_desc_init_by_strides(d, 2, dims, type, steps) == dnnl_success;
}
#endif

static bool product_make(Product *p) {
    dnnl_data_type_t type = p->type == PRODUCT_BF16 ? dnnl_bf16 : dnnl_f32;
    Description a, b, c;
    if (!engine && (dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success ||
                    dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) != dnnl_success))
        return false;
    if (!describe(&a, p->m, p->k, type, p->ta == 'T' ? 1 : p->lda, p->ta == 'T' ? p->lda : 1)) return false;
    if (!describe(&b, p->k, p->n, type, p->tb == 'T' ? 1 : p->ldb, p->tb == 'T' ? p->ldb : 1)) return false;
    if (!describe(&c, p->m, p->n, dnnl_f32, p->ldc, 1)) return false;

    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t post;
    dnnl_primitive_desc_t description = NULL;
    if (dnnl_primitive_attr_create(&attributes) != dnnl_success || dnnl_post_ops_create(&post) != dnnl_success)
        return false;
#if DNNL_VERSION_MAJOR >= 3
    if (p->add) dnnl_post_ops_append_sum(post, 1.0f, 0, dnnl_data_type_undef);
    dnnl_primitive_attr_set_post_ops(attributes, post);
    bool made = dnnl_matmul_primitive_desc_create(&description, engine, a, b, NULL, c, attributes) == dnnl_success;
#else
    if (p->add) dnnl_post_ops_append_sum(post, 1.0f);
    dnnl_primitive_attr_set_post_ops(attributes, post);
    dnnl_matmul_desc_t matmul;
    bool made = dnnl_matmul_desc_init(&matmul, &a, &b, NULL, &c) == dnnl_success &&
                dnnl_primitive_desc_create(&description, &matmul, attributes, engine, NULL) == dnnl_success;
#endif
    made = made && dnnl_primitive_create(&p->primitive, description) == dnnl_success &&
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
    return made;
}

static Product *product_find(const Product *wanted) {
    for (size_t i = 0; i < product_count; i++) {
        Product *p = &products[i];
        if (p->type == wanted->type && p->ta == wanted->ta && p->tb == wanted->tb && p->m == wanted->m &&
            p->n == wanted->n && p->k == wanted->k && p->lda == wanted->lda && p->ldb == wanted->ldb &&
            p->ldc == wanted->ldc && p->add == wanted->add)
            return p;
    }
    if (product_count == MAX_PRODUCTS) return NULL;
    products[product_count] = *wanted;
    return product_make(&products[product_count]) ? &products[product_count++] : NULL;
}

bool gemm_by_primitive(ProductType type, char ta, char tb, size_t m, size_t n, size_t k, const void *A, size_t lda,
                       const void *B, size_t ldb, float beta, float *C, size_t ldc) {
    Product wanted = {
        .type = type, .ta = ta, .tb = tb, .m = m, .n = n, .k = k, .lda = lda, .ldb = ldb, .ldc = ldc, .add = beta != 0};
    Product *p = product_find(&wanted);
    if (!p) return false;
    dnnl_memory_set_data_handle(p->a, (void *)A);
    dnnl_memory_set_data_handle(p->b, (void *)B);
    dnnl_memory_set_data_handle(p->c, C);
    dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, p->a}, {DNNL_ARG_WEIGHTS, p->b}, {DNNL_ARG_DST, p->c}};
    return dnnl_primitive_execute(p->primitive, stream, 3, args) == dnnl_success &&
           dnnl_stream_wait(stream) == dnnl_success;
}

#else

bool gemm_by_primitive(ProductType type, char ta, char tb, size_t m, size_t n, size_t k, const void *A, size_t lda,
                       const void *B, size_t ldb, float beta, float *C, size_t ldc) {
    (void)type, (void)ta, (void)tb, (void)m, (void)n, (void)k, (void)A, (void)lda, (void)B, (void)ldb, (void)beta,
        (void)C, (void)ldc;
    return false;
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// bfloat16

// Tried once, on numbers whose product is known, so that a library that takes the type but is wrong about it is not
// used.
bool gemm_has_bf16(void) {
    static int known = -1;
    if (known < 0) {
        enum { SIDE = 32 };
        uint16_t a[SIDE * SIDE], b[SIDE * SIDE];
        float c[SIDE * SIDE];
        bool right = true;
        for (int i = 0; i < SIDE * SIDE; i++)
            a[i] = bf16_from_float((float)(i % 7 - 3)), b[i] = bf16_from_float((float)(i % 5 - 2));
        right = gemm_by_primitive(PRODUCT_BF16, 'N', 'T', SIDE, SIDE, SIDE, a, SIDE, b, SIDE, 0.0f, c, SIDE);
        for (int i = 0; right && i < SIDE; i++) {
            for (int j = 0; j < SIDE; j++) {
                float sum = 0.0f;
                for (int p = 0; p < SIDE; p++) sum += bf16_to_float(a[i * SIDE + p]) * bf16_to_float(b[j * SIDE + p]);
                if (c[i * SIDE + j] != sum) right = false;
            }
        }
        known = right;
    }
    return known;
}

void bf16_round(uint16_t *out, const float *in, size_t n) {
    #pragma omp parallel for simd schedule(static) if (n > 10000)
    for (size_t i = 0; i < n; i++) out[i] = bf16_from_float(in[i]);
}

enum { CHUNK = 4 << 20 };    // elements of B that are widened at a time where bfloat16 is not native
static uint16_t *scratch_a, *scratch_b;

size_t gemm_bf16_scratch(size_t largest_a, size_t largest_b) {
    largest_a = (largest_a + 63) / 64 * 64;
    return gemm_has_bf16() ? (largest_a + largest_b) * sizeof(uint16_t) : (largest_a + CHUNK) * sizeof(float);
}

void gemm_bf16_use(void *scratch, size_t largest_a, size_t largest_b) {
    (void)largest_b;
    largest_a = (largest_a + 63) / 64 * 64;
    scratch_a = scratch;
    scratch_b = scratch_a + largest_a * (gemm_has_bf16() ? 1 : 2);
}

// out (rows,cols) packed, in float32 = the operand's numbers, rounded to bfloat16
static void round_to_float(float *out, Operand in, size_t rows, size_t cols, size_t ld) {
    #pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r++) {
        if (in.bf16) {
            #pragma omp simd
            for (size_t c = 0; c < cols; c++) out[r * cols + c] = bf16_to_float(in.bf16[r * ld + c]);
        } else {
            #pragma omp simd
            for (size_t c = 0; c < cols; c++) out[r * cols + c] = bf16_to_float(bf16_from_float(in.f32[r * ld + c]));
        }
    }
}

static Operand operand_at(Operand x, size_t offset) {
    return x.bf16 ? (Operand){.bf16 = x.bf16 + offset} : (Operand){.f32 = x.f32 + offset};
}

static void gemm_bf16_widened(char ta, char tb, size_t m, size_t n, size_t k, Operand A, size_t lda, Operand B,
                              size_t ldb, float beta, float *C, size_t ldc) {
    float *a = (float *)scratch_a, *b = (float *)scratch_b;
    size_t a_rows = ta == 'T' ? k : m, a_cols = ta == 'T' ? m : k, b_rows = tb == 'T' ? n : k,
           b_cols = tb == 'T' ? k : n;
    round_to_float(a, A, a_rows, a_cols, lda);
    size_t part = MAX(CHUNK / b_cols, 1);
    for (size_t from = 0; from < b_rows; from += part) {
        size_t here = MIN(part, b_rows - from);
        round_to_float(b, operand_at(B, from * ldb), here, b_cols, ldb);
        if (tb == 'T') gemm(ta, 'T', m, here, k, a, a_cols, b, b_cols, beta, C + from, ldc);
        else
            gemm(ta, 'N', m, n, here, a + from * (ta == 'T' ? a_cols : 1), a_cols, b, b_cols, from ? 1.0f : beta, C,
                 ldc);
    }
}

// Rounds an operand into scratch, packed, unless it is bfloat16 already.
static const uint16_t *rounded(Operand in, uint16_t *scratch, size_t rows, size_t cols, size_t *ld) {
    if (in.bf16) return in.bf16;
    #pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r++) {
        #pragma omp simd
        for (size_t c = 0; c < cols; c++) scratch[r * cols + c] = bf16_from_float(in.f32[r * *ld + c]);
    }
    *ld = cols;
    return scratch;
}

void gemm_bf16(char ta, char tb, size_t m, size_t n, size_t k, Operand A, size_t lda, Operand B, size_t ldb, float beta,
               float *C, size_t ldc) {
    if (!gemm_has_bf16()) {
        gemm_bf16_widened(ta, tb, m, n, k, A, lda, B, ldb, beta, C, ldc);
        return;
    }
    const uint16_t *a = rounded(A, scratch_a, ta == 'T' ? k : m, ta == 'T' ? m : k, &lda);
    const uint16_t *b = rounded(B, scratch_b, tb == 'T' ? n : k, tb == 'T' ? k : n, &ldb);
    if (!gemm_by_primitive(PRODUCT_BF16, ta, tb, m, n, k, a, lda, b, ldb, beta, C, ldc))
        fail(EXIT_RESOURCE, "oneDNN refused a bfloat16 product of %zu x %zu x %zu. Use --dtype fp32.", m, n, k);
}

#include "tiles.h"

#include <string.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { LANES = TILE / 2 };    // 16 columns of a strip, or one vector

const char *tiles_name(Tiles tiles) {
    static const char *const names[] = {"none", "float32", "loops", "AVX512-BF16", "AMX"};
    return names[tiles];
}

void tiles_left(Tiles tiles, void *out, const float *a, size_t lda, size_t rows, size_t k) {
    for (size_t row = 0; row < rows; row++) {
        const float *from = a + row * lda;
        void *to = (char *)out + row * tiles_row(tiles, k);
        if (tiles_are_bf16(tiles)) {
            uint16_t *rounded = to;
            #pragma omp simd
            for (size_t p = 0; p < k; p++) rounded[p] = bf16_from_float(from[p]);
        } else {
            memcpy(to, from, k * sizeof *from);
        }
        size_t filled = k * (tiles_row(tiles, TILE) / TILE);
        memset((char *)to + filled, 0, tiles_row(tiles, k) - filled);
    }
}

// ---- float32: a strip of B is row after row of 32 columns

static void pack_floats(float *packed, const float *b, size_t ldb, bool transposed, size_t k, size_t n) {
    size_t row_step = transposed ? 1 : ldb, column_step = transposed ? ldb : 1;
    memset(packed, 0, tiled(k) * tiled(n) * sizeof *packed);
    for (size_t column = 0; column < n; column += TILE) {
        size_t columns = n - column < TILE ? n - column : TILE;
        float *strip = packed + column * tiled(k);
        for (size_t row = 0; row < k; row++) {
            #pragma omp simd
            for (size_t i = 0; i < columns; i++) strip[row * TILE + i] = b[row * row_step + (column + i) * column_step];
        }
    }
}

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

static inline Vector *vector_at(float *x, size_t i) {
    return (Vector *)(x + i * LANES);
}

// 8 rows at a time: 16 vectors of sums, two of B, and a number of A in all lanes of another.
static void multiply_floats(float *c, size_t ldc, const float *a, size_t lda, const float *b, size_t k, bool add) {
    enum { ROWS = 8 };
    for (size_t row = 0; row < TILE; row += ROWS, a += ROWS * lda, c += ROWS * ldc) {
        Vector sum[ROWS][2] = {{{0}}};
        if (add) {
            for (size_t r = 0; r < ROWS; r++) {
                sum[r][0] = *vector_at(c + r * ldc, 0);
                sum[r][1] = *vector_at(c + r * ldc, 1);
            }
        }
        for (size_t p = 0; p < k; p++) {
            Vector left = *vector_at((float *)b, 2 * p), right = *vector_at((float *)b, 2 * p + 1);
            #pragma GCC unroll 8
            for (size_t r = 0; r < ROWS; r++) {
                sum[r][0] += a[r * lda + p] * left;
                sum[r][1] += a[r * lda + p] * right;
            }
        }
        for (size_t r = 0; r < ROWS; r++) {
            *vector_at(c + r * ldc, 0) = sum[r][0];
            *vector_at(c + r * ldc, 1) = sum[r][1];
        }
    }
}

// ---- bfloat16: the instructions multiply pairs, numbers 2p and 2p + 1 of a row of A by the same two of a column of B.
// A register of B has 16 such pairs of rows and 16 columns, and a strip is a sequence of two registers: columns 0 to 15
// and 16 to 31 of the same 32 rows.

enum { PAIRS = TILE / 2, REGISTER = PAIRS * LANES };

// The register of B[row][column] in a strip, and in it the pair of the row.
static size_t place(size_t row, size_t column) {
    size_t registers = row / TILE * 2 + column % TILE / LANES, pair = row % TILE / 2;
    return registers * REGISTER + pair * LANES;
}

static inline uint32_t pair_of(float first, float second) {
    return (uint32_t)bf16_from_float(first) | (uint32_t)bf16_from_float(second) << 16;
}

static void pack_pairs(uint32_t *packed, const float *b, size_t ldb, size_t k, size_t n) {
    static const float zeros[LANES];
    memset(packed, 0, tiled(k) * tiled(n) / 2 * sizeof *packed);
    for (size_t row = 0; row < k; row += 2) {
        for (size_t column = 0; column < n; column += LANES) {
            const float *first = b + row * ldb + column, *second = row + 1 < k ? first + ldb : zeros;
            uint32_t *to = packed + column / TILE * TILE * tiled(k) / 2 + place(row, column);
            size_t lanes = n - column < LANES ? n - column : LANES;
            #pragma omp simd
            for (size_t i = 0; i < lanes; i++) to[i] = pair_of(first[i], second[i]);
        }
    }
}

// Fills a register from 16 columns of B, which are rows of b, each of `count` numbers.
static void pack_register(uint32_t *to, const float *b, size_t ldb, size_t count, size_t lanes) {
    uint32_t pairs[LANES][PAIRS] = {{0}};
    for (size_t i = 0; i < lanes; i++) {
        const float *from = b + i * ldb;
        #pragma omp simd
        for (size_t p = 0; p < count / 2; p++) pairs[i][p] = pair_of(from[2 * p], from[2 * p + 1]);
        if (count % 2) pairs[i][count / 2] = pair_of(from[count - 1], 0);
    }
    for (size_t p = 0; p < PAIRS; p++)
        for (size_t i = 0; i < LANES; i++) to[p * LANES + i] = pairs[i][p];
}

static void pack_pairs_transposed(uint32_t *packed, const float *b, size_t ldb, size_t k, size_t n) {
    for (size_t column = 0; column < tiled(n); column += LANES) {
        uint32_t *strip = packed + column / TILE * TILE * tiled(k) / 2;
        size_t left = column < n ? n - column : 0, lanes = left < LANES ? left : LANES;
        for (size_t row = 0; row < k; row += TILE) {
            size_t count = k - row < TILE ? k - row : TILE;
            pack_register(strip + place(row, column), b + column * ldb + row, ldb, count, lanes);
        }
    }
}

static void multiply_loops(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint32_t *b, size_t k, bool add) {
    for (size_t row = 0; row < TILE; row++) {
        for (size_t column = 0; column < TILE; column++) {
            float sum = add ? c[row * ldc + column] : 0;
            for (size_t p = 0; p < k; p += 2) {
                uint32_t pair = b[place(p, column) + column % LANES];
                sum += bf16_to_float(a[row * lda + p]) * bf16_to_float((uint16_t)pair);
                sum += bf16_to_float(a[row * lda + p + 1]) * bf16_to_float((uint16_t)(pair >> 16));
            }
            c[row * ldc + column] = sum;
        }
    }
}

#ifdef __AVX512BF16__

// 8 rows at a time, like multiply_floats().
static void multiply_avx512(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint32_t *b, size_t k,
                            bool add) {
    enum { ROWS = 8 };
    for (size_t row = 0; row < TILE; row += ROWS, a += ROWS * lda, c += ROWS * ldc) {
        __m512 sum[ROWS][2];
        for (size_t r = 0; r < ROWS; r++) {
            sum[r][0] = add ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
            sum[r][1] = add ? _mm512_loadu_ps(c + r * ldc + LANES) : _mm512_setzero_ps();
        }
        for (size_t p = 0; p < k; p += 2) {
            const uint32_t *at = b + place(p, 0);
            __m512bh left = (__m512bh)_mm512_loadu_si512(at), right = (__m512bh)_mm512_loadu_si512(at + REGISTER);
            #pragma GCC unroll 8
            for (size_t r = 0; r < ROWS; r++) {
                int both;
                memcpy(&both, a + r * lda + p, sizeof both);
                __m512bh x = (__m512bh)_mm512_set1_epi32(both);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], x, left);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], x, right);
            }
        }
        for (size_t r = 0; r < ROWS; r++) {
            _mm512_storeu_ps(c + r * ldc, sum[r][0]);
            _mm512_storeu_ps(c + r * ldc + LANES, sum[r][1]);
        }
    }
}

#endif

#ifdef __AMX_BF16__

// All eight registers have 16 rows of 64 bytes. It is a constant because the compiler does not see that the instruction
// reads all of it, and might omit stores to it.
#define EIGHT(x) x, x, x, x, x, x, x, x
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_registers = {.palette = 1, .row_bytes = {EIGHT(64)}, .rows = {EIGHT(16)}};

void tiles_begin(Tiles tiles) {
    if (tiles == TILES_AMX) _tile_loadconfig(&amx_registers);
}

void tiles_end(Tiles tiles) {
    if (tiles == TILES_AMX) _tile_release();
}

// Registers 0 to 3 have the sums of C's quarters, 4 and 5 the upper and lower half of A, 6 and 7 the left and right
// half of B.
static void multiply_amx(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint32_t *b, size_t k, bool add) {
    size_t c_step = ldc * sizeof *c, a_step = lda * sizeof *a;
    if (add) {
        _tile_loadd(0, c, c_step);
        _tile_loadd(1, c + 16, c_step);
        _tile_loadd(2, c + 16 * ldc, c_step);
        _tile_loadd(3, c + 16 * ldc + 16, c_step);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (size_t p = 0; p < k; p += TILE, b += 2 * REGISTER) {
        _tile_loadd(4, a + p, a_step);
        _tile_loadd(5, a + 16 * lda + p, a_step);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + REGISTER, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_step);
    _tile_stored(1, c + 16, c_step);
    _tile_stored(2, c + 16 * ldc, c_step);
    _tile_stored(3, c + 16 * ldc + 16, c_step);
}

// Linux gives a process the registers of AMX only if it asks for them.
static bool may_use_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#else

void tiles_begin(Tiles tiles) {
    (void)tiles;
}

void tiles_end(Tiles tiles) {
    (void)tiles;
}

#endif

// ---- all

Tiles tiles_available(bool bf16) {
#ifdef __AMX_BF16__
    if (bf16 && may_use_amx()) return TILES_AMX;
#endif
#ifdef __AVX512BF16__
    if (bf16) return TILES_AVX512;
#endif
#ifdef __AVX512F__
    return TILES_FLOAT;    // processors with fewer registers spill the sums
#else
    (void)bf16;
    return TILES_NONE;
#endif
}

void tiles_pack(Tiles tiles, void *packed, const float *b, size_t ldb, size_t k, size_t n) {
    if (tiles_are_bf16(tiles)) pack_pairs(packed, b, ldb, k, n);
    else pack_floats(packed, b, ldb, false, k, n);
}

void tiles_pack_transposed(Tiles tiles, void *packed, const float *b, size_t ldb, size_t k, size_t n) {
    if (tiles_are_bf16(tiles)) pack_pairs_transposed(packed, b, ldb, k, n);
    else pack_floats(packed, b, ldb, true, k, n);
}

void tiles_multiply(Tiles tiles, float *c, size_t ldc, const void *a, size_t a_bytes, const void *b, size_t k,
                    bool add) {
    size_t lda = a_bytes / (tiles_are_bf16(tiles) ? sizeof(uint16_t) : sizeof(float));
    if (tiles == TILES_FLOAT) multiply_floats(c, ldc, a, lda, b, k, add);
    if (tiles == TILES_LOOPS) multiply_loops(c, ldc, a, lda, b, k, add);
#ifdef __AVX512BF16__
    if (tiles == TILES_AVX512) multiply_avx512(c, ldc, a, lda, b, k, add);
#endif
#ifdef __AMX_BF16__
    if (tiles == TILES_AMX) multiply_amx(c, ldc, a, lda, b, k, add);
#endif
}

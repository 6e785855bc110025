#include "math/tiles.h"

#include <string.h>

#include "runtime/size.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/cpuid.h"
#endif

enum { LANES = TILE / 2 };    // half the columns of a strip: as many float32 as AVX-512's registers hold

// 32-bit numbers in a register
#if defined(__AVX512F__)
enum { NATIVE = 16 };
#elif defined(__AVX2__)
enum { NATIVE = 8 };
#else
enum { NATIVE = 4 };
#endif

const char *tiles_name(Tiles tiles) {
    static const char *const names[] = {"vectors", "loops", "AVX512-BF16", "AMX"};
    return names[tiles];
}

// ---- rounding, and transposing numbers or pairs of 32 bits

#ifdef __AVX512BF16__

// The instructions treat subnormal numbers as 0, as those that multiply do.
static void round_row(uint16_t *out, const float *x, size_t n) {
    size_t i = 0;
    for (; i + TILE <= n; i += TILE) {
        __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + LANES), _mm512_loadu_ps(x + i));
        _mm512_storeu_si512(out + i, (__m512i)rounded);
    }
    for (; i < n; i += LANES) {
        __mmask16 mask = (__mmask16)(n - i < LANES ? (1u << (n - i)) - 1 : 0xFFFF);
        __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i));
        _mm256_mask_storeu_epi16(out + i, mask, (__m256i)rounded);
    }
}

static void pair_rows(uint32_t *out, const float *first, const float *second, size_t n) {
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 mask = (__mmask16)(n - i < LANES ? (1u << (n - i)) - 1 : 0xFFFF);
        __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, first + i)));
        __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, second + i)));
        _mm512_mask_storeu_epi32(out + i, mask, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

#else

static void round_row(uint16_t *out, const float *x, size_t n) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++) out[i] = bf16_from_float(x[i]);
}

static void pair_rows(uint32_t *out, const float *first, const float *second, size_t n) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++)
        out[i] = (uint32_t)bf16_from_float(first[i]) | (uint32_t)bf16_from_float(second[i]) << 16;
}

#endif

// The first n numbers of a stored row. (If real is double, nothing is bfloat16.) gcc makes a slow `rep movsl` of a copy
// whose size it does not know.
static void take_row(uint16_t *out, Matrix x, size_t n) {
    if (!x.bf16) round_row(out, (const float *)x.f32, n);
    else if (n == TILE) memcpy(out, x.bf16, TILE * sizeof *out);
    else memcpy(out, x.bf16, n * sizeof *out);
}

// The same of two rows, `second` elements apart, in pairs.
static void take_pairs(uint32_t *out, Matrix x, size_t second, size_t n) {
    if (!x.bf16) {
        pair_rows(out, (const float *)x.f32, (const float *)(x.f32 + second), n);
        return;
    }
    #pragma omp simd
    for (size_t i = 0; i < n; i++) out[i] = (uint32_t)x.bf16[i] | (uint32_t)x.bf16[second + i] << 16;
}

typedef uint32_t Words __attribute__((vector_size(NATIVE * sizeof(uint32_t)), aligned(sizeof(uint32_t))));

// The numbers of both, one after the other, at these indices. clang has no __builtin_shuffle; it makes one of the loop.
static inline Words shuffle(Words first, Words second, Words indices) {
#ifdef __clang__
    Words out;
    for (uint32_t j = 0; j < NATIVE; j++)
        out[j] = indices[j] < NATIVE ? first[indices[j]] : second[indices[j] - NATIVE];
    return out;
#else
    return __builtin_shuffle(first, second, indices);
#endif
}

// to = the transpose of from, both squares of a register's width. In each round, rows whose numbers differ in one bit
// exchange the halves in which the columns differ in the same bit.
static inline void transpose_square(uint32_t *to, size_t to_step, const uint32_t *from, size_t from_step) {
    Words x[NATIVE];
    for (size_t i = 0; i < NATIVE; i++) x[i] = *(const Words *)(from + i * from_step);
    #pragma GCC unroll 4
    for (uint32_t bit = 1; bit < NATIVE; bit *= 2) {
        Words lower, upper;
        for (uint32_t j = 0; j < NATIVE; j++) {
            lower[j] = j & bit ? NATIVE + j - bit : j;
            upper[j] = j & bit ? NATIVE + j : j + bit;
        }
        #pragma GCC unroll 16
        for (uint32_t i = 0; i < NATIVE; i++) {
            if (i & bit) continue;
            Words first = x[i], second = x[i | bit];
            x[i] = shuffle(first, second, lower);
            x[i | bit] = shuffle(first, second, upper);
        }
    }
    for (size_t i = 0; i < NATIVE; i++) *(Words *)(to + i * to_step) = x[i];
}

// to (16,16) = the transpose of from (16,16)
static void transpose(uint32_t *to, size_t to_step, const uint32_t *from, size_t from_step) {
    for (size_t row = 0; row < LANES; row += NATIVE)
        for (size_t column = 0; column < LANES; column += NATIVE)
            transpose_square(to + row * to_step + column, to_step, from + column * from_step + row, from_step);
}

// to (16,16) = the transpose of from (rows,columns), and zeros in the rest
static void transpose_part(real *to, size_t to_step, const real *from, size_t from_step, size_t rows, size_t columns) {
    if (sizeof(real) == sizeof(uint32_t) && rows >= LANES && columns >= LANES) {
        transpose((uint32_t *)to, to_step, (const uint32_t *)from, from_step);
        return;
    }
    for (size_t i = 0; i < LANES; i++)
        for (size_t j = 0; j < LANES; j++) to[i * to_step + j] = i < columns && j < rows ? from[j * from_step + i] : 0;
}

// ---- A

static void left_as_stored(Tiles tiles, char *out, Matrix a, size_t rows, size_t k) {
    size_t step = tiles_row(tiles, k), filled = k * (tiles_row(tiles, TILE) / TILE);
    for (size_t row = 0; row < rows; row++, out += step) {
        if (tiles_are_bf16(tiles)) take_row((uint16_t *)out, stored_from(a, row, 0), k);
        else memcpy(out, a.f32 + row * a.ld, k * sizeof *a.f32);
        memset(out + filled, 0, step - filled);
    }
}

// words (16 pairs,16): numbers 2p and 2p + 1 of each of 16 columns of x (rows,columns), and zeros in the rest
static void pairs_of_columns(uint32_t *words, Matrix x, size_t rows, size_t columns) {
    size_t last = smaller(rows, TILE) - 1, n = smaller(columns, LANES);
    if (rows < TILE || columns < LANES) memset(words, 0, LANES * LANES * sizeof *words);
    for (size_t row = 0; row < last; row += 2) take_pairs(words + (row / 2) * LANES, stored_from(x, row, 0), x.ld, n);
    if (last % 2) return;
    take_pairs(words + (last / 2) * LANES, stored_from(x, last, 0), 0, n);
    for (size_t i = 0; i < n; i++) words[(last / 2) * LANES + i] &= 0xFFFF;
}

static void left_pairs_transposed(uint32_t *out, Matrix a, size_t rows, size_t k) {
    uint32_t words[LANES * LANES];
    size_t step = tiled(k) / 2;
    for (size_t p = 0; p < tiled(k); p += TILE) {
        for (size_t row = 0; row < tiled(rows); row += LANES) {
            uint32_t *to = out + row * step + p / 2;
            if (p >= k || row >= rows) {
                for (size_t i = 0; i < LANES; i++) memset(to + i * step, 0, LANES * sizeof *to);
            } else {
                pairs_of_columns(words, stored_from(a, p, row), k - p, rows - row);
                transpose(to, step, words, LANES);
            }
        }
    }
}

static void left_reals_transposed(real *out, Matrix a, size_t rows, size_t k) {
    size_t step = tiled(k);
    for (size_t p = 0; p < step; p += LANES) {
        for (size_t row = 0; row < tiled(rows); row += LANES) {
            real *to = out + row * step + p;
            if (p >= k || row >= rows) {
                for (size_t i = 0; i < LANES; i++) memset(to + i * step, 0, LANES * sizeof *to);
            } else {
                transpose_part(to, step, a.f32 + p * a.ld + row, a.ld, k - p, rows - row);
            }
        }
    }
}

void tiles_left(Tiles tiles, void *out, Matrix a, size_t rows, size_t k) {
    if (!a.transposed) left_as_stored(tiles, out, a, rows, k);
    else if (tiles_are_bf16(tiles)) left_pairs_transposed(out, a, rows, k);
    else left_reals_transposed(out, a, rows, k);
}

// ---- B. A strip is row after row of 32 columns; in bfloat16, pair of rows after pair of rows.

static void pack_reals(real *packed, Matrix b, size_t k, size_t n) {
    if (k % TILE || n % TILE) memset(packed, 0, tiled(k) * tiled(n) * sizeof *packed);
    for (size_t column = 0; column < n; column += TILE) {
        real *strip = packed + column * tiled(k);
        for (size_t row = 0; row < k; row++)
            memcpy(strip + row * TILE, b.f32 + row * b.ld + column, smaller(n - column, TILE) * sizeof *b.f32);
    }
}

// Asks for part of a row before it is read: the processor does not foresee the step to the next row.
static void fetch_row(Matrix x, size_t row, size_t n) {
    enum { LINE = 64 };    // bytes
    const char *at = x.bf16 ? (const char *)(x.bf16 + row * x.ld) : (const char *)(x.f32 + row * x.ld);
    size_t bytes = n * (x.bf16 ? sizeof *x.bf16 : sizeof *x.f32);
    for (size_t i = 0; i < bytes; i += LINE) __builtin_prefetch(at + i);
}

// The last row of an odd number is its own partner, since that meets zeros of A.
static void pack_pairs(uint32_t *packed, Matrix b, size_t k, size_t n) {
    enum { AHEAD = 32 };    // rows
    if (k % TILE || n % TILE) memset(packed, 0, (tiled(k) * tiled(n) / 2) * sizeof *packed);
    for (size_t row = 0; row < k; row += 2) {
        for (size_t i = row + AHEAD; i < smaller(row + AHEAD + 2, k); i++) fetch_row(b, i, n);
        for (size_t column = 0; column < n; column += TILE) {
            uint32_t *strip = packed + column * tiled(k) / 2;
            take_pairs(strip + (row / 2) * TILE, stored_from(b, row, column), row + 1 < k ? b.ld : 0,
                       smaller(n - column, TILE));
        }
    }
}

static void pack_reals_transposed(real *packed, Matrix b, size_t k, size_t n) {
    for (size_t column = 0; column < tiled(n); column += LANES) {
        real *strip = packed + (column / TILE) * TILE * tiled(k) + column % TILE;
        size_t columns = column < n ? n - column : 0;
        for (size_t row = 0; row < tiled(k); row += LANES) {
            size_t rows = row < k ? k - row : 0;
            transpose_part(strip + row * TILE, TILE, b.f32 + column * b.ld + row, b.ld, columns, rows);
        }
    }
}

static void pack_pairs_transposed(uint32_t *packed, Matrix b, size_t k, size_t n) {
    for (size_t column = 0; column < tiled(n); column += LANES) {
        uint32_t *strip = packed + (column / TILE) * TILE * (tiled(k) / 2) + column % TILE;
        size_t columns = column < n ? smaller(n - column, LANES) : 0;
        for (size_t row = 0; row < k; row += TILE) {
            uint16_t rows[LANES][TILE];
            if (columns < LANES || k - row < TILE) memset(rows, 0, sizeof rows);
            for (size_t i = column + LANES; i < smaller(column + 2 * LANES, n); i++)
                fetch_row(stored_from(b, 0, row), i, smaller(k - row, TILE));
            for (size_t i = 0; i < columns; i++)
                take_row(rows[i], stored_from(b, column + i, row), smaller(k - row, TILE));
            transpose(strip + (row / 2) * TILE, TILE, (const uint32_t *)rows, LANES);
        }
    }
}

void tiles_pack(Tiles tiles, void *packed, Matrix b, size_t k, size_t n) {
    if (tiles_are_bf16(tiles)) (b.transposed ? pack_pairs_transposed : pack_pairs)(packed, b, k, n);
    else (b.transposed ? pack_reals_transposed : pack_reals)(packed, b, k, n);
}

void tiles_pair(Tiles tiles, real *first, const real *second, size_t n) {
    if (tiles_are_bf16(tiles)) pair_rows((uint32_t *)first, (const float *)first, (const float *)second, n);
}

// ---- C = A · B

typedef real Vector __attribute__((vector_size(NATIVE * sizeof(uint32_t)), aligned(sizeof(real))));
enum { IN_VECTOR = sizeof(Vector) / sizeof(real) };

static inline Vector *vector_at(real *x, size_t i) {
    return (Vector *)(x + i * IN_VECTOR);
}

// Without this, gcc reads B's vectors again for each row, and AVX2's loop, which then waits for loads, takes 1.4 times
// as long.
static inline void keep_in_registers(Vector *left, Vector *right) {
#ifdef __AVX2__
    __asm__("" : "+v"(*left), "+v"(*right));
#else
    (void)left, (void)right;
#endif
}

// `rows` rows and two vectors of columns: 2 rows sums, two vectors of B, and a number of A in all lanes of another.
static inline __attribute__((always_inline)) void multiply_rows(size_t rows, real *c, size_t ldc, const real *a,
                                                                size_t lda, const real *b, size_t ldb, size_t k,
                                                                bool add) {
    Vector sum[8][2] = {{{0}}};
    for (size_t r = 0; add && r < rows; r++) {
        sum[r][0] = *vector_at(c + r * ldc, 0);
        sum[r][1] = *vector_at(c + r * ldc, 1);
    }
    for (size_t p = 0; p < k; p++) {
        Vector left = *vector_at((real *)b + p * ldb, 0), right = *vector_at((real *)b + p * ldb, 1);
        keep_in_registers(&left, &right);
        #pragma GCC unroll 8
        for (size_t r = 0; r < rows; r++) {
            sum[r][0] += a[r * lda + p] * left;
            sum[r][1] += a[r * lda + p] * right;
        }
    }
    for (size_t r = 0; r < rows; r++) {
        *vector_at(c + r * ldc, 0) = sum[r][0];
        *vector_at(c + r * ldc, 1) = sum[r][1];
    }
}

// As many rows at a time as there are registers for: 8 of AVX-512's 32; 6 of AVX2's 16, and 4 for the last 8 rows.
static void multiply_reals(real *c, size_t ldc, const real *a, size_t lda, const real *b, size_t ldb, size_t k,
                           bool add) {
    enum { FIRST = NATIVE == 16 ? 8 : 6, LAST = NATIVE == 16 ? 8 : 4, FROM = 24 };
    for (size_t column = 0; column < TILE; column += 2 * IN_VECTOR) {
        for (size_t row = 0; row < FROM; row += FIRST)
            multiply_rows(FIRST, c + row * ldc + column, ldc, a + row * lda, lda, b + column, ldb, k, add);
        for (size_t row = FROM; row < TILE; row += LAST)
            multiply_rows(LAST, c + row * ldc + column, ldc, a + row * lda, lda, b + column, ldb, k, add);
    }
}

// In bfloat16, the instructions multiply pairs: numbers 2p and 2p + 1 of a row of A by the same two of a column of B.

// Elements from one pair of a row of A to the next. In an A that is turned, the pairs of 32 rows lie between them.
static inline size_t pair_step(size_t lda) {
    return lda == 2 ? 2 * TILE : 2;
}

static void multiply_loops(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint32_t *b, size_t ldb, size_t k,
                           bool add) {
    for (size_t row = 0; row < TILE; row++) {
        for (size_t column = 0; column < TILE; column++) {
            const uint16_t *left = a + row * lda;
            float sum = add ? c[row * ldc + column] : 0;
            for (size_t p = 0; p < k; p += 2, left += pair_step(lda)) {
                uint32_t pair = b[(p / 2) * ldb + column];
                sum += bf16_to_float(left[0]) * bf16_to_float((uint16_t)pair);
                sum += bf16_to_float(left[1]) * bf16_to_float((uint16_t)(pair >> 16));
            }
            c[row * ldc + column] = sum;
        }
    }
}

#ifdef __AVX512BF16__

// 8 rows at a time, like multiply_floats().
static void multiply_avx512(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint32_t *b, size_t ldb,
                            size_t k, bool add) {
    enum { ROWS = 8 };
    for (size_t row = 0; row < TILE; row += ROWS, a += ROWS * lda, c += ROWS * ldc) {
        const uint16_t *pairs = a;
        __m512 sum[ROWS][2];
        for (size_t r = 0; r < ROWS; r++) {
            sum[r][0] = add ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
            sum[r][1] = add ? _mm512_loadu_ps(c + r * ldc + LANES) : _mm512_setzero_ps();
        }
        for (size_t p = 0; p < k; p += 2, pairs += pair_step(lda)) {
            const uint32_t *at = b + (p / 2) * ldb;
            __m512bh left = (__m512bh)_mm512_loadu_si512(at), right = (__m512bh)_mm512_loadu_si512(at + LANES);
            #pragma GCC unroll 8
            for (size_t r = 0; r < ROWS; r++) {
                int both;
                memcpy(&both, pairs + r * lda, sizeof both);
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
static void multiply_amx(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint32_t *b, size_t ldb, size_t k,
                         bool add) {
    size_t c_step = ldc * sizeof *c, a_step = lda * sizeof *a, b_step = ldb * sizeof *b;
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
    for (size_t p = 0; p < k; p += TILE, b += 16 * ldb) {
        _tile_loadd(4, a + p, a_step);
        _tile_loadd(5, a + 16 * lda + p, a_step);
        _tile_loadd(6, b, b_step);
        _tile_loadd(7, b + 16, b_step);
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
    return cpu_has_amx_bf16() && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#else

void tiles_begin(Tiles tiles) {
    (void)tiles;
}

void tiles_end(Tiles tiles) {
    (void)tiles;
}

#endif

Tiles tiles_available(bool bf16) {
    (void)bf16;    // not read where neither is built
#ifdef __AMX_BF16__
    if (bf16 && may_use_amx()) return TILES_AMX;
#endif
#ifdef __AVX512BF16__
    if (bf16) return TILES_AVX512;
#endif
    return TILES_REAL;
}

void tiles_multiply(Tiles tiles, real *c, size_t ldc, TileRows a, TileRows b, size_t k, bool add) {
    if (tiles == TILES_REAL) {
        multiply_reals(c, ldc, a.at, a.step / sizeof(real), b.at, b.step / sizeof(real), k, add);
        return;
    }
    size_t lda = a.step / sizeof(uint16_t), ldb = b.step / sizeof(uint32_t);
    if (tiles == TILES_LOOPS) multiply_loops((float *)c, ldc, a.at, lda, b.at, ldb, k, add);
#ifdef __AVX512BF16__
    if (tiles == TILES_AVX512) multiply_avx512((float *)c, ldc, a.at, lda, b.at, ldb, k, add);
#endif
#ifdef __AMX_BF16__
    if (tiles == TILES_AMX) multiply_amx((float *)c, ldc, a.at, lda, b.at, ldb, k, add);
#endif
}

void tiles_take_transposed(real *out, size_t ld, const real *sums, size_t rows, size_t columns) {
    if (rows == TILE && columns == TILE) {
        for (size_t row = 0; row < TILE; row += LANES)
            for (size_t column = 0; column < TILE; column += LANES)
                transpose_part(out + row * ld + column, ld, sums + column * TILE + row, TILE, LANES, LANES);
        return;
    }
    for (size_t row = 0; row < rows; row++)
        for (size_t column = 0; column < columns; column++) out[row * ld + column] = sums[column * TILE + row];
}

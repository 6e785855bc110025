// Matmuls in blocks of 32 x 32 for attention, which multiplies the same keys and values by one block of queries after
// the other. They are packed once, in the order in which the instructions read them, while a library's matmul
// rearranges them in every call. So these matmuls take a third of the library's time in bfloat16 (AMX), and half of it
// in float32 (64 queries, 8,000 keys, oneDNN 2.6 on a Xeon).
#ifndef MATH_TILES_H
#define MATH_TILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "math/real.h"

// An input of a matmul, stored row by row.
typedef struct {
    const real *f32;         // used if bf16 is NULL
    const uint16_t *bf16;    // not for gemm()
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

// What is stored from a row and a column on
static inline Matrix stored_from(Matrix x, size_t row, size_t column) {
    if (x.f32) x.f32 += row * x.ld + column;
    if (x.bf16) x.bf16 += row * x.ld + column;
    return x;
}

// The matrix from a row and a column on, which are meant after transposition
static inline Matrix matrix_from(Matrix x, size_t row, size_t column) {
    return x.transposed ? stored_from(x, column, row) : stored_from(x, row, column);
}

// The instructions, and with them the type of both inputs. Sums are real.
typedef enum {
    TILES_REAL,      // real, which is float32 but in some tests, by the compiler's vectors
    TILES_LOOPS,     // bfloat16 by plain loops, for tests on any processor
    TILES_AVX512,    // bfloat16 by AVX512-BF16
    TILES_AMX,       // bfloat16 by AMX
} Tiles;

enum { TILE = 32 };

// The fastest that this processor and this build have for bfloat16, or TILES_REAL if they have none; and without bf16,
// TILES_REAL.
Tiles tiles_available(bool bf16);

const char *tiles_name(Tiles tiles);

static inline bool tiles_are_bf16(Tiles tiles) {
    return tiles >= TILES_LOOPS;
}

// n, rounded up to whole blocks
static inline size_t tiled(size_t n) {
    return ((n + TILE - 1) / TILE) * TILE;
}

// The bytes of a row of tiled(n) numbers
static inline size_t tiles_row(Tiles tiles, size_t n) {
    return tiled(n) * (tiles_are_bf16(tiles) ? sizeof(uint16_t) : sizeof(real));
}

// Rows of an input of tiles_multiply(). A: row by row, or as tiles_turned() says. B: row by row in real, and in
// bfloat16 pairs of rows, whose numbers alternate: B[2p][i], B[2p+1][i], B[2p][i+1], ...
typedef struct {
    const void *at;
    size_t step;    // bytes from one row, or pair of rows, to the next
} TileRows;

// A (rows,k) in the type of the inputs, and zeros up to tiled(k) columns. If `a` is transposed, also zeros up to
// tiled(rows) rows.
//   out: tiles_row(tiles, k) bytes from one row to the next, written
void tiles_left(Tiles tiles, void *out, Matrix a, size_t rows, size_t k);

// B (k,n) packed in strips of 32 columns, and up to whole blocks what may meet zeros of A.
//   packed: tiled(n) tiles_row(tiles, k) bytes, written
void tiles_pack(Tiles tiles, void *packed, Matrix b, size_t k, size_t n);

// The bytes of a number of B or, in bfloat16, of a pair.
static inline size_t tiles_number(Tiles tiles) {
    return tiles_are_bf16(tiles) ? sizeof(uint32_t) : sizeof(real);
}

// From a row and a column on, both multiples of 32, of a B packed with k rows.
static inline TileRows tiles_at(Tiles tiles, const void *packed, size_t k, size_t row, size_t column) {
    size_t at = column * tiles_row(tiles, k) + row * tiles_row(tiles, TILE);
    return (TileRows){(const char *)packed + at, TILE * tiles_number(tiles)};
}

// Whether A may be read from where tiles_pack() packed its transpose, with an even k.
static inline bool tiles_may_turn(Tiles tiles) {
    return tiles == TILES_LOOPS || tiles == TILES_AVX512;
}

// The same A from a row and a column on, both multiples of 32. Its rows are one pair of numbers apart.
static inline TileRows tiles_turned(Tiles tiles, const void *packed, size_t k, size_t row, size_t column) {
    return (TileRows){tiles_at(tiles, packed, k, column, row).at, sizeof(uint32_t)};
}

// Turns two rows of B into a pair in the place of the first one. Does nothing in real.
void tiles_pair(Tiles tiles, real *first, const real *second, size_t n);

// A B whose rows, each ld numbers after the one before it, tiles_pair() was called for.
static inline TileRows tiles_in_place(Tiles tiles, const real *b, size_t ld) {
    return (TileRows){b, (tiles_are_bf16(tiles) ? 2 : 1) * ld * sizeof *b};
}

// Before and after a thread's calls of tiles_multiply(). The registers of AMX need it; other matmuls may change them.
void tiles_begin(Tiles tiles);
void tiles_end(Tiles tiles);

// C (32,32) = A (32,k) · B (k,32), for k a multiple of 32, by the calling thread. c: written, or added to if `add`
void tiles_multiply(Tiles tiles, real *c, size_t ldc, TileRows a, TileRows b, size_t k, bool add);

// out (rows,columns) = the transpose of sums (columns,rows), at most 32 of each
//   sums: 32 numbers from one row to the next
void tiles_take_transposed(real *out, size_t ld, const real *sums, size_t rows, size_t columns);

#endif

// bfloat16 matmuls by tiles, for processors that have instructions for them. Both inputs, whatever their type, are
// rounded and packed in parts that fit into the caches.
#include <string.h>

#include "math/gemm.h"
#include "math/stream.h"
#include "runtime/size.h"

// How much is packed and multiplied at a time. AMX needs 32 rows of A and 32 columns of B in the first-level cache.
// AVX512-BF16 is slower and has time to read B from the second-level cache; with deeper blocks, it adds to sums in
// memory less often. The numbers gave the shortest matmuls of a 124M step, on a Xeon (AMX) and on a Zen 4.
typedef struct {
    size_t part, part_depth;    // the most rows of A and columns of B that are packed at a time, and their depth
    size_t columns, depth;      // of a block of B, which the second-level cache holds
} Block;

enum {
    ROWS = 128,               // rows of A that a thread packs, and multiplies by one block of B after the other
    COLUMNS = 256,            // the most columns of a block
    PART_NUMBERS = 4 << 20    // part * part_depth, the numbers of an input that are packed at a time
};

static Block block_of(Tiles tiles) {
    Block amx = {.part = 2048, .part_depth = 2048, .columns = COLUMNS, .depth = 256};
    Block others = {.part = 1024, .part_depth = 4096, .columns = 128, .depth = 1024};
    return tiles == TILES_AMX ? amx : others;
}

// How A is arranged.
typedef enum {
    PANELS,      // packed in panels of block.depth columns, row by row
    TURNED,      // its transpose packed like B
    IN_PLACE,    // as it is stored
} Left;

// A part of the matmul: its A and, in `a` and `b`, what is packed.
typedef struct {
    Tiles tiles;
    Block block;
    size_t m, n, k;
    Matrix A;
    Left left;
    void *a, *b;
} Packed;

static Left left_of(const Packed *p) {
    bool whole = p->m % TILE == 0 && p->k % TILE == 0;
    if (!tiles_may_turn(p->tiles)) return PANELS;    // AMX, also in place: not measured
    if (p->A.transposed) return p->k % 2 == 0 ? TURNED : PANELS;
    return p->A.bf16 && whole ? IN_PLACE : PANELS;
}

static void *panel_at(const Packed *p, size_t row, size_t depth) {
    size_t step = tiles_row(p->tiles, smaller(p->k - depth, p->block.depth));
    return (char *)p->a + tiled(p->m) * tiles_row(p->tiles, depth) + row * step;
}

static void pack_rows(const Packed *p, size_t row) {
    size_t rows = smaller(p->m - row, ROWS);
    if (p->left == TURNED) {
        Matrix A = matrix_from(p->A, row, 0);
        A.transposed = false;
        tiles_pack(p->tiles, (char *)p->a + row * tiles_row(p->tiles, p->k), A, p->k, rows);
        return;
    }
    for (size_t depth = 0; depth < p->k; depth += p->block.depth)
        tiles_left(p->tiles, panel_at(p, row, depth), matrix_from(p->A, row, depth), rows,
                   smaller(p->k - depth, p->block.depth));
}

static void pack_left(const Packed *p) {
    if (p->left == IN_PLACE) return;
    #pragma omp for schedule(static) nowait
    for (size_t row = 0; row < p->m; row += ROWS) pack_rows(p, row);
}

static TileRows left_at(const Packed *p, size_t row, size_t depth, size_t k) {
    if (p->left == TURNED) return tiles_turned(p->tiles, p->a, p->k, row, depth);
    if (p->left == IN_PLACE) return (TileRows){matrix_from(p->A, row, depth).bf16, p->A.ld * sizeof *p->A.bf16};
    return (TileRows){panel_at(p, row, depth), tiles_row(p->tiles, k)};
}

static void pack_right(const Packed *p, Matrix B) {
    #pragma omp for schedule(static)
    for (size_t column = 0; column < p->n; column += p->block.columns)
        tiles_pack(p->tiles, (char *)p->b + column * tiles_row(p->tiles, p->k), matrix_from(B, 0, column), p->k,
                   smaller(p->n - column, p->block.columns));
}

// sums, a block of 32 x 32 for each 32 columns = 32 rows of A times at most COLUMNS columns of B
static void multiply_row(const Packed *p, float *sums, size_t row, size_t column, size_t columns) {
    for (size_t depth = 0; depth < p->k; depth += p->block.depth) {
        size_t k = smaller(p->k - depth, p->block.depth);
        TileRows a = left_at(p, row, depth, k);
        for (size_t c = 0; c < columns; c += TILE) {
            TileRows b = tiles_at(p->tiles, p->b, p->k, depth, column + c);
            tiles_multiply(p->tiles, sums + c * TILE, TILE, a, b, tiled(k), depth > 0);
        }
    }
}

typedef enum { STORE, ADD, STREAM } Store;

static void store_row(float *C, size_t ldc, const float *sums, size_t rows, size_t columns, Store how) {
    for (size_t r = 0; r < rows; r++, C += ldc) {
        for (size_t c = 0; c < columns; c += TILE) {
            const float *from = sums + c * TILE + r * TILE;
            size_t n = smaller(columns - c, TILE);
            if (how == ADD) {
                #pragma omp simd
                for (size_t i = 0; i < n; i++) C[c + i] += from[i];
            } else if (how == STREAM && n == TILE && stream_aligned(C + c)) {
                for (size_t i = 0; i < TILE; i += STREAM_BYTES / sizeof *C) stream_line(C + c + i, from + i);
            } else {
                memcpy(C + c, from, n * sizeof *C);
            }
        }
    }
}

static void multiply_part(const Packed *p, Store how, float *C, size_t ldc) {
    tiles_begin(p->tiles);
    #pragma omp for collapse(2) schedule(static) nowait
    for (size_t column = 0; column < p->n; column += p->block.columns) {
        for (size_t first = 0; first < p->m; first += ROWS) {
            float sums[TILE * COLUMNS];
            size_t columns = smaller(p->n - column, p->block.columns), end = smaller(first + ROWS, p->m);
            for (size_t row = first; row < end; row += TILE) {
                multiply_row(p, sums, row, column, columns);
                store_row(C + row * ldc + column, ldc, sums, smaller(end - row, TILE), columns, how);
            }
        }
    }
    tiles_end(p->tiles);
    stream_end();
}

enum { PART_BYTES = PART_NUMBERS * sizeof(uint16_t) };

size_t gemm_tiles_scratch(void) {
    return 2 * PART_BYTES;
}

// The way to store a part, of which others are added later unless it is the last.
static Store store_of(bool first, bool last, float beta) {
    if (!first || beta != 0) return ADD;
    return last ? STREAM : STORE;
}

void gemm_tiles(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C, size_t ldc) {
    Block block = block_of(mm->tiles);
    for (size_t row = 0; row < m; row += block.part) {
        for (size_t depth = 0; depth < k; depth += block.part_depth) {
            for (size_t column = 0; column < n; column += block.part) {
                Packed p = {.tiles = mm->tiles,
                            .block = block,
                            .m = smaller(m - row, block.part),
                            .n = smaller(n - column, block.part),
                            .k = smaller(k - depth, block.part_depth),
                            .A = matrix_from(A, row, depth),
                            .a = mm->a,
                            .b = (char *)mm->a + PART_BYTES};
                Store how = store_of(depth == 0, depth + block.part_depth >= k, beta);
                p.left = left_of(&p);
                #pragma omp parallel
                {
                    if (column == 0) pack_left(&p);
                    pack_right(&p, matrix_from(B, depth, column));
                    multiply_part(&p, how, C + row * ldc + column, ldc);
                }
            }
        }
    }
}

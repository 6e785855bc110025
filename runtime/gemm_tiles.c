// bfloat16 matmuls by tiles, for processors that have instructions for them. Both inputs, whatever their type, are
// rounded and packed in parts that fit into the caches.
#include <omp.h>
#include <string.h>

#include "gemm.h"
#include "stream.h"

enum {
    PART = 2048,      // the most rows of A, columns of B, and depth of both that are packed at a time
    COLUMNS = 256,    // the most columns of B that are multiplied at a time
    ROWS = 128        // that a thread multiplies by these columns
};

// The part of B that is multiplied at a time, which the second-level cache holds. AMX needs 32 rows of A and 32 columns
// of B in the first-level cache. AVX512-BF16 is slower and has time to read B from the second-level cache; it gains by
// adding to sums in memory less often: 0.93 of the time with 1,024 x 128 (a 124M step's matmuls on a Zen 4).
typedef struct {
    size_t depth, columns;
} Block;

static Block block_of(Tiles tiles) {
    Block amx = {256, COLUMNS}, others = {1024, 128};
    return tiles == TILES_AMX ? amx : others;
}

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

// The rest of x from a row and a column on, after transposition.
static Matrix rest(Matrix x, size_t row, size_t column) {
    size_t at = x.transposed ? column * x.ld + row : row * x.ld + column;
    if (x.bf16) x.bf16 += at;
    else x.f32 += at;
    return x;
}

// A part of the matmul, and its packed inputs: A in panels of block.depth columns, B as a whole.
typedef struct {
    Tiles tiles;
    Block block;
    size_t m, n, k;
    void *a, *b;
} Packed;

static void *panel_at(const Packed *p, size_t row, size_t depth) {
    size_t step = tiles_row(p->tiles, least(p->k - depth, p->block.depth));
    return (char *)p->a + tiled(p->m) * tiles_row(p->tiles, depth) + row * step;
}

static void pack_left(const Packed *p, Matrix A) {
    #pragma omp for schedule(static) nowait
    for (size_t row = 0; row < p->m; row += ROWS)
        for (size_t depth = 0; depth < p->k; depth += p->block.depth)
            tiles_left(p->tiles, panel_at(p, row, depth), rest(A, row, depth), least(p->m - row, ROWS),
                       least(p->k - depth, p->block.depth));
}

static void pack_right(const Packed *p, Matrix B) {
    #pragma omp for schedule(static)
    for (size_t column = 0; column < p->n; column += p->block.columns)
        tiles_pack(p->tiles, (char *)p->b + column * tiles_row(p->tiles, p->k), rest(B, 0, column), p->k,
                   least(p->n - column, p->block.columns));
}

// sums, a block of 32 x 32 for each 32 columns = 32 rows of A times at most COLUMNS columns of B
static void multiply_row(const Packed *p, float *sums, size_t row, size_t column, size_t columns) {
    for (size_t depth = 0; depth < p->k; depth += p->block.depth) {
        size_t k = least(p->k - depth, p->block.depth);
        TileRows a = {panel_at(p, row, depth), tiles_row(p->tiles, k)};
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
            size_t n = least(columns - c, TILE);
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
            size_t columns = least(p->n - column, p->block.columns), end = least(first + ROWS, p->m);
            for (size_t row = first; row < end; row += TILE) {
                multiply_row(p, sums, row, column, columns);
                store_row(C + row * ldc + column, ldc, sums, least(end - row, TILE), columns, how);
            }
        }
    }
    tiles_end(p->tiles);
    stream_end();
}

static size_t part_bytes(void) {
    return tiled(PART) * tiles_row(TILES_AMX, PART);
}

size_t gemm_tiles_scratch(void) {
    return 2 * part_bytes();
}

// The way to store a part, of which others are added later unless it is the last.
static Store store_of(bool first, bool last, float beta) {
    if (!first || beta != 0) return ADD;
    return last ? STREAM : STORE;
}

void gemm_tiles(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, float beta, float *C, size_t ldc) {
    for (size_t row = 0; row < m; row += PART) {
        for (size_t depth = 0; depth < k; depth += PART) {
            for (size_t column = 0; column < n; column += PART) {
                Packed p = {.tiles = mm->tiles,
                            .block = block_of(mm->tiles),
                            .m = least(m - row, PART),
                            .n = least(n - column, PART),
                            .k = least(k - depth, PART),
                            .a = mm->a,
                            .b = (char *)mm->a + part_bytes()};
                Store how = store_of(depth == 0, depth + PART >= k, beta);
                #pragma omp parallel
                {
                    if (column == 0) pack_left(&p, rest(A, row, depth));
                    pack_right(&p, rest(B, depth, column));
                    multiply_part(&p, how, C + row * ldc + column, ldc);
                }
            }
        }
    }
}

// Tiles in shared memory, fragments in registers, and the two matmuls of flash.cuh's kernels, with mma.m16n8k16
// (sm_80 and later).
//
// Matmuls are of bf16 with float32 accumulation. A float is split into three bf16, x = x0 + x1 + x2 to 2^-24, and a
// product of floats is the six products of parts i and j with i + j < 3: the accuracy of float32 at a sixth of the
// speed, with the same kernels.
//
// Tested by dev/tests/test_flash.py, through the kernels.
#ifndef ATTENTION_FLASH_TILE_CUH
#define ATTENTION_FLASH_TILE_CUH

#include "cuda/gpu.cuh"
#include "cuda/vector.cuh"

#include "attention/flash.h"
#include "attention/phi.cuh"

// A block owns 16·TILES rows per warp. The other side comes in tiles of STREAM rows, CHUNK of which have their scores
// in registers at a time. KEEP: the operands of the rows that a warp owns stay in registers.
template <int TILES_, int STREAM_, int CHUNK_, bool KEEP_>
struct FlashPlan {
    enum {
        WARPS = 4,
        THREADS = 32 * WARPS,
        TILES = TILES_,
        OWN = 16 * TILES * WARPS,
        STREAM = STREAM_,
        CHUNK = CHUNK_,
        NT = CHUNK / 8,
        KEEP = KEEP_
    };
};

// Owning two tiles of rows halves a warp's shared memory reads per matmul. A phi selected at run time leaves no
// registers for that.
template <class X, int PHI>
constexpr int own_tiles = is_bf16<X> && PHI >= 0 ? 2 : 1;

// The row stride of a shared tile. In bf16, 8 elements of padding make it an odd multiple of 16 bytes, so that the 8
// rows that ldmatrix reads together are in different banks; for floats, rows are 8 banks apart.
template <int C>
constexpr int tile_step = C + 8;

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

// Which 16-byte pieces of a tile (R,C) a thread copies: COPIES pieces, the first at (row, column), each ROW_STEP rows
// and COLUMN_STEP columns after the previous one. The copies of eight lanes together touch every bank once: they cover
// 8 neighbors in a row or, if rows do not consist of such groups (HS 48), a column of 8 rows; for floats, 4 rows of 2.
template <int R, int C, int THREADS, class X>
struct TileCopies {
    enum {
        PACK = 16 / sizeof(X),
        A_ROW = C / PACK,
        COPIES = (R * A_ROW) / THREADS,
        BY_ROWS = A_ROW % 8 == 0,
        ACROSS = BY_ROWS ? 8 : sizeof(X) / 2,
        DOWN = 8 / ACROSS,
        GROUPS = A_ROW / ACROSS,
        ROW_STEP = BY_ROWS ? (THREADS / 8) / GROUPS : 0,
        COLUMN_STEP = BY_ROWS ? 0 : (THREADS / ACROSS / R) * (ACROSS * PACK)
    };
    static_assert((R * A_ROW) % THREADS == 0, "each thread copies the same number of pieces");
    static_assert(BY_ROWS ? (THREADS / 8) % GROUPS == 0 : (THREADS / ACROSS) % R == 0,
                  "steps go by rows or by columns");
    int row, column;
};

template <int R, int C, int THREADS, class X>
DEVICE TileCopies<R, C, THREADS, X> tile_copies() {
    typedef TileCopies<R, C, THREADS, X> P;
    const int thread = anew(threadIdx.x), group = thread / 8, member = thread % 8;
    if (P::BY_ROWS) {    // groups go along a row, then to the next
        const int row = group / P::GROUPS;
        const int piece = (group % P::GROUPS) * P::ACROSS + member;
        return {row, piece * P::PACK};
    }
    // A group is DOWN rows of ACROSS pieces. Groups go down the tile, then to the next columns.
    const int down = group * P::DOWN + member / P::ACROSS;
    const int row = down % R;
    const int piece = (down / R) * P::ACROSS + member % P::ACROSS;
    return {row, piece * P::PACK};
}

// Rows in global memory: the first `rows` rows and `columns` columns exist, and zeros take the place of the others.
template <class X>
struct TileSource {
    const X *p;
    size_t stride;    // of a row, in elements
    int rows, columns;
};

template <class X>
DEVICE TileSource<X> rows_from(TileSource<X> source, int row) {
    return {source.p + row * source.stride, source.stride, source.rows - row, source.columns};
}

template <class X>
DEVICE TileSource<X> columns_from(TileSource<X> source, int column) {
    return {source.p + column, source.stride, source.rows, source.columns - column};
}

// Starts copying rows into tile (R,C). The caller commits and waits.
template <int R, int C, int THREADS, class X>
DEVICE void tile_load(X *tile, TileSource<X> from) {
    typedef TileCopies<R, C, THREADS, X> P;
    P mine = tile_copies<R, C, THREADS, X>();
    tile += mine.row * tile_step<C> + mine.column;
    const X *at = from.p + mine.row * from.stride + mine.column;
    if (from.rows >= R && from.columns >= C) {
        UNROLL
        for (int i = 0; i < P::COPIES; i++) {
            copy_async_16(tile + i * (P::ROW_STEP * tile_step<C> + P::COLUMN_STEP), at);
            at += P::ROW_STEP * from.stride + P::COLUMN_STEP;
        }
        return;
    }
    UNROLL_NOT
    for (int i = 0; i < P::COPIES; i++) {
        bool valid = mine.row + i * P::ROW_STEP < from.rows && mine.column + i * P::COLUMN_STEP < from.columns;
        const X *piece = valid ? at + i * (P::ROW_STEP * from.stride + P::COLUMN_STEP) : from.p;
        copy_async_16(tile + i * (P::ROW_STEP * tile_step<C> + P::COLUMN_STEP), piece, valid);
    }
}

// On return, this step's tiles are loaded and the previous buffers are free.
DEVICE void tile_wait() {
    copy_async_wait<0>();
    __syncthreads();
}

// ---------------------------------------------------------------------------------------------------------------------
// Fragments

// Where a lane's four elements of an accumulator (16,8) are: element e at row lane_row() + e/2·8 and column
// lane_column() + e%2. In a left operand (16,16), the pairs i = 0 to 3 start at row lane_row() + i%2·8 and column
// lane_column() + i/2·8.
DEVICE int lane_row() {
    return (threadIdx.x % 32) / 4;
}

DEVICE int lane_column() {
    return (threadIdx.x % 4) * 2;
}

// A lane's part of an operand of mma_m16n8k16: N registers of pairs, for each of the bf16 parts that an X is split
// into.
template <class X, int N>
struct Fragment {
    enum { PARTS = is_bf16<X> ? 1 : 3 };
    uint32_t part[PARTS][N];
};

template <class X, int N>
DEVICE void fragment_set(Fragment<X, N> &a, int i, float x, float y) {
    a.part[0][i] = pack_bf16(x, y);
    UNROLL
    for (int p = 1; p < Fragment<X, N>::PARTS; p++) {
        x -= unpack_low(a.part[p - 1][i]);
        y -= unpack_high(a.part[p - 1][i]);
        a.part[p][i] = pack_bf16(x, y);
    }
}

// d (16,8) += a (16,16) · b (16,8), the smallest partial products first. Tensor cores round each sum toward zero, and a
// long series of such roundings adds up. To keep the accuracy of float32, the sums are kept short: the partial products
// start from zero, and an addition that rounds to nearest adds them to d.
template <class X>
DEVICE void fragment_multiply(float (&d)[4], const Fragment<X, 4> &a, const Fragment<X, 2> &b) {
    if constexpr (is_bf16<X>) {
        mma_m16n8k16(d, a.part[0], b.part[0]);
    } else {
        float sum[4] = {0, 0, 0, 0};
        UNROLL
        for (int order = Fragment<X, 4>::PARTS - 1; order >= 0; order--) {
            UNROLL
            for (int i = 0; i <= order; i++) mma_m16n8k16(sum, a.part[i], b.part[order - i]);
        }
        UNROLL
        for (int e = 0; e < 4; e++) d[e] += sum[e];
    }
}

// The left operand (16,16), from rows of a tile. ldmatrix takes one address of a row of 8 from each lane.
template <int STEP>
DEVICE void load_left(Fragment<bf16, 4> &a, const bf16 *tile) {
    const int lane = threadIdx.x % 32, row = lane % 16, column = (lane / 16) * 8;
    ldmatrix_x4(a.part[0], tile + row * STEP + column);
}

template <int STEP>
DEVICE void load_left(Fragment<float, 4> &a, const float *tile) {
    const float *at = tile + lane_row() * STEP + lane_column();
    UNROLL
    for (int i = 0; i < 4; i++) {
        const int row = (i % 2) * 8, column = (i / 2) * 8;
        float2 x = *(const float2 *)(at + row * STEP + column);
        fragment_set(a, i, x.x, x.y);
    }
}

DEVICE void set_right(Fragment<bf16, 2> (&b)[2], const uint32_t (&r)[4]) {
    b[0].part[0][0] = r[0];
    b[0].part[0][1] = r[1];
    b[1].part[0][0] = r[2];
    b[1].part[0][1] = r[3];
}

// Two adjacent right operands (16,8), whose 16 columns are rows of the tile.
template <int STEP>
DEVICE void load_right(Fragment<bf16, 2> (&b)[2], const bf16 *tile) {
    const int lane = threadIdx.x % 32, row = lane % 8 + (lane / 16) * 8, column = ((lane / 8) % 2) * 8;
    uint32_t r[4];
    ldmatrix_x4(r, tile + row * STEP + column);
    set_right(b, r);
}

template <int STEP>
DEVICE void load_right(Fragment<float, 2> (&b)[2], const float *tile) {
    const float *at = tile + lane_row() * STEP + lane_column();
    UNROLL
    for (int i = 0; i < 4; i++) {
        const int row = (i / 2) * 8, column = (i % 2) * 8;
        float2 x = *(const float2 *)(at + row * STEP + column);
        fragment_set(b[i / 2], i % 2, x.x, x.y);
    }
}

// The same from a tile whose rows are the operands' rows.
template <int STEP>
DEVICE void load_right_transposed(Fragment<bf16, 2> (&b)[2], const bf16 *tile) {
    const int lane = threadIdx.x % 32, row = lane % 16, column = (lane / 16) * 8;
    uint32_t r[4];
    ldmatrix_x4_transposed(r, tile + row * STEP + column);
    set_right(b, r);
}

template <int STEP>
DEVICE void load_right_transposed(Fragment<float, 2> (&b)[2], const float *tile) {
    const float *at = tile + lane_column() * STEP + lane_row();
    UNROLL
    for (int i = 0; i < 4; i++) {
        const int row = (i % 2) * 8, column = (i / 2) * 8;
        const float *x = at + row * STEP + column;
        fragment_set(b[i / 2], i % 2, x[0], x[STEP]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Matmuls

// A warp's own rows of a tile (16·TILES, HS) as left operands.
template <class X, int HS, int TILES, bool KEEP>
struct Own {
    const X *tile;
    Fragment<X, 4> kept[KEEP ? HS / 16 : 1][TILES];
};

template <class X, int HS, int TILES, bool KEEP>
DEVICE void own_get(Fragment<X, 4> (&a)[TILES], const Own<X, HS, TILES, KEEP> &own, int k) {
    UNROLL
    for (int m = 0; m < TILES; m++) {
        if (KEEP) a[m] = own.kept[KEEP ? k : 0][m];
        else load_left<tile_step<HS>>(a[m], own.tile + m * 16 * tile_step<HS> + k * 16);
    }
}

template <class X, int HS, int TILES, bool KEEP>
DEVICE void own_keep(Own<X, HS, TILES, KEEP> &own) {
    UNROLL
    for (int k = 0; KEEP && k < HS / 16; k++) {
        UNROLL
        for (int m = 0; m < TILES; m++)
            load_left<tile_step<HS>>(own.kept[KEEP ? k : 0][m], own.tile + m * 16 * tile_step<HS> + k * 16);
    }
}

// s[m][nt] (16,8) += own rows · 8 NT rows of a tile
template <class X, int HS, int TILES, bool KEEP, int NT>
DEVICE void matmul_by_rows(float (&s)[TILES][NT][4], const Own<X, HS, TILES, KEEP> &own, const X *tile) {
    UNROLL
    for (int k = 0; k < HS / 16; k++) {
        Fragment<X, 4> a[TILES];
        own_get(a, own, k);
        UNROLL
        for (int pair = 0; pair < NT / 2; pair++) {
            Fragment<X, 2> b[2];
            load_right<tile_step<HS>>(b, tile + pair * 16 * tile_step<HS> + k * 16);
            UNROLL
            for (int m = 0; m < TILES; m++) {
                fragment_multiply<X>(s[m][2 * pair], a[m], b[0]);
                fragment_multiply<X>(s[m][2 * pair + 1], a[m], b[1]);
            }
        }
    }
}

// The accumulators of 16 columns of w as a left operand: its pair i is the (i/2)-th accumulator's row i%2 of two.
template <class X>
DEVICE void fragment_of(Fragment<X, 4> &a, const float (&first)[4], const float (&second)[4]) {
    fragment_set(a, 0, first[0], first[1]);
    fragment_set(a, 1, first[2], first[3]);
    fragment_set(a, 2, second[0], second[1]);
    fragment_set(a, 3, second[2], second[3]);
}

// sum[m][c] (16,8) += w (16 TILES, 8 NT) · a tile (8 NT, HS), w in the layout that the matmul above produces
template <class X, int HS, int TILES, int NT>
DEVICE void matmul_by_columns(float (&sum)[TILES][HS / 8][4], const float (&w)[TILES][NT][4], const X *tile) {
    UNROLL
    for (int k = 0; k < NT / 2; k++) {
        Fragment<X, 4> a[TILES];
        UNROLL
        for (int m = 0; m < TILES; m++) fragment_of(a[m], w[m][2 * k], w[m][2 * k + 1]);
        UNROLL
        for (int pair = 0; pair < HS / 16; pair++) {
            Fragment<X, 2> b[2];
            load_right_transposed<tile_step<HS>>(b, tile + k * 16 * tile_step<HS> + pair * 16);
            UNROLL
            for (int m = 0; m < TILES; m++) {
                fragment_multiply<X>(sum[m][2 * pair], a[m], b[0]);
                fragment_multiply<X>(sum[m][2 * pair + 1], a[m], b[1]);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Elements of an accumulator

// An element s[m][nt][e] of a lane's part of scores (16 TILES, 8 NT).
struct Element {
    int m, nt, e;
};

// Which of the lane's 2·TILES rows it is in.
DEVICE int own_row(Element at) {
    return 2 * at.m + at.e / 2;
}

// Calls function(Element) for all elements of s, columns in ascending order.
template <int TILES, int NT, class Function>
DEVICE void for_each_element(const float (&)[TILES][NT][4], Function function) {
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        UNROLL
        for (int i = 0; i < 4 * TILES; i++) function(Element{i / 4, nt, i % 4});
    }
}

template <int TILES, int NT>
DEVICE void set_zero(float (&s)[TILES][NT][4]) {
    for_each_element(s, [&](Element at) { s[at.m][at.nt][at.e] = 0; });
}

DEVICE void add(float (&sum)[4], float4 x) {
    sum[0] += x.x;
    sum[1] += x.y;
    sum[2] += x.z;
    sum[3] += x.w;
}

DEVICE void store_pair(float *to, float x, float y) {
    *(float2 *)to = make_float2(x, y);
}

DEVICE void store_pair(bf16 *to, float x, float y) {
    *(uint32_t *)to = pack_bf16(x, y);
}

template <class X>
DEVICE float rounded_to(float x) {
    X y;
    set_float(y, x);
    return to_float(y);
}

// x (N) rounded to X, two elements per instruction.
template <class X, int N>
DEVICE void round_to(float (&x)[N]) {
    UNROLL
    for (int e = 0; is_bf16<X> && e < N; e += 2) {
        uint32_t both = pack_bf16(x[e], x[e + 1]);
        x[e] = unpack_low(both);
        x[e + 1] = unpack_high(both);
    }
}

// Where results go: p is the address of the warp's first row and column, and only `rows` rows and `columns` columns
// exist.
template <class X>
struct TileTarget {
    X *p;
    size_t stride;    // of a row, in elements
    int rows, columns;
};

// Transposes a 4×4 matrix, of which each of the four lanes that share a row of an accumulator has a row.
DEVICE void transpose_four(uint32_t (&x)[4]) {
    UNROLL
    for (int step = 1; step <= 2; step++) {
        const bool upper = threadIdx.x & step;
        UNROLL
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            uint32_t &mine = x[i], &other = x[i + step];
            const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? mine : other, step);
            if (upper) mine = got;
            else other = got;
        }
    }
}

// Stores the rows of `sum`, each times its factor; the number of columns is a multiple of 8. `rest`, unless NULL,
// receives the rounding errors, at the address of the warp's first row and column and in rows with a stride of
// rest_stride. By whole warps. In bf16, the four lanes of a row exchange what they have, so that each stores 16 bytes
// at a time. There is no condition around that: after one, ptxas would not know that all lanes of the warp do the same.
template <class X, int TILES, int CT>
DEVICE void store_rows(TileTarget<X> to, const float (&sum)[TILES][CT][4], const float (&factor)[2 * TILES],
                       X *rest = NULL, size_t rest_stride = 0) {
    constexpr bool EXCHANGES = is_bf16<X> && CT == 8;    // with 16, some kernels would need too many registers
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        const int row = 8 * r + lane_row(), lane = threadIdx.x % 4;
        UNROLL
        for (int c = 0; EXCHANGES && c < CT; c += 4) {
            uint32_t words[4];
            UNROLL
            for (int i = 0; i < 4; i++) {
                const float *x = sum[r / 2][EXCHANGES ? c + i : 0] + (r % 2) * 2;
                words[i] = pack_bf16(x[0] * factor[r], x[1] * factor[r]);
            }
            transpose_four(words);
            if (row < to.rows && 8 * (c + lane) < to.columns)
                store_16(to.p + row * to.stride + 8 * (c + lane), make_uint4(words[0], words[1], words[2], words[3]));
        }
        if (row >= to.rows || (EXCHANGES && !rest)) continue;
        UNROLL
        for (int c = 0; c < CT; c++) {
            const float *x = sum[r / 2][c] + (r % 2) * 2;
            const int column = 8 * c + lane_column();
            if (8 * c >= to.columns) continue;
            float y = x[0] * factor[r], z = x[1] * factor[r];
            if (!EXCHANGES) store_pair(to.p + row * to.stride + column, y, z);
            if (rest) store_pair(rest + row * rest_stride + column, y - rounded_to<X>(y), z - rounded_to<X>(z));
        }
    }
}

// The sum over a row's four lanes; all four get the result.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
#endif

// The kernels of fused attention for the whole family of attention/normalizer.h. A thread block owns some query rows
// (in the dk/dv kernel: key rows) and loops over the other side tile by tile; scores exist only in registers.
//
//   forward     O = A V by row blocks: S = Q Kᵀ, then O += W V with weights W as far as the row is known; what is known
//               only at the end of the row (1/Z, a mean) is applied then. recenter-l1 and reweight need Z before their
//               weights, so they sweep over the keys twice.
//   backward    a kernel for the rows (D and the like), one for dq by row blocks, one for dk and dv by key blocks; the
//               last two both recompute the scores. That takes seven matmuls of T×T×HS. A single kernel could do with
//               five if many blocks added to dq, but either in varying order or each waiting for the one before; these
//               two kernels are deterministic and never wait. For reweight over a sum, dq takes an eighth matmul
//               instead of a prior sweep over the keys (see below).
//
// Matmuls are mma.m16n8k16 of bf16 with float32 accumulation. A float is split into three bf16, x = x0 + x1 + x2 to
// 2^-24, and a product of floats is the six products of parts i and j with i + j < 3: the accuracy of float32 at a
// sixth of the speed, with the same kernels.
//
// The numbers of a row: z = scale s + bias, f = phi(z). In the forward pass:
//   exp, expm1 over their sum    bias = o - the largest z so far (sums are rescaled by exp(new bias - old bias))
//   else                         bias = o
//   plain                        out = (f · V)/Z, then negated, or with max(f, 0) for f, as post requires
//   recenter                     out = (f · V)/Z - mean sum_{j <= i} v_j, mean = sum f/(Z n); two small kernels compute
//                                the sums of v beforehand
//   recenter-l1                  w = f factor - mean, factor = 1/Z, out = (w · V)/sum |w|
//   reweight                     r = (A n - 1)/top in [0, 1], top the largest A n - 1: r = 1 + (f - mean) factor,
//                                mean the largest f, factor = n/(Z top); w = r^P, out = (w · V)/sum w. r is at most 1,
//                                so no power overflows, and exact near 1, where a power magnifies errors
// In the backward pass, d_ij = dO_i · v_j, W_ij is the weight of v_j, and sgn the sign:
//   plain        W = factor f,           df = factor (d - sgn(f) D),            D = dO_i · O_i, 0 where Z is fixed
//   recenter     W = factor f - mean,    df = factor (d - less - sgn(f) D),     less = dO_i · sum_{j <= i} v_j / n
//   recenter-l1  W = factor f - mean,    df = factor (d - less - sgn(W) D),
//                less = (dO_i · sum_{j <= i} v_j - D sum_j sgn(W))/n
//                (factor and mean now refer to sum |w|; Z adds no term, because W does not depend on the scale of f)
//   reweight     W = r^P inverse_sum,    df = K t - sgn(f) less,    t = r^(P-1) (d - D),    K = factor P inverse_sum,
//                less = K/n sum_j t (1 - r) for n > 3 where Z is a sum, else 0. It is the sum of K t f/Z over the row,
//                because f = mean + (r - 1)/factor, mean factor - 1 = factor Z/n (0 for n <= 3), and sum_j t r = 0 by
//                the definition of D. (With t instead of t (1 - r), it cancels badly.) less is known only at the end of
//                the row. One sweep still suffices: dq_i = K c sum_j t phi'(z) k_j - less c sum_j sgn(f) phi'(z) k_j,
//                and likewise for g_i
//   dz = df phi'(z),  dq_i = c sum_j dz k_j,  dk_j = sum_i c dz q_i,  dv_j = sum_i W dO_i,  g_i = sum_j dz s
//
// The gated unit's wide v (VS > 128) is processed HS columns at a time. The forward pass and dv treat the column blocks
// like heads; for dq and dk, d_ij is summed over the column tiles (WIDE).
//
// HS in the kernels is the size that they are built for: 48, 64 or 128. A smaller head (call.HS) is padded with zeros,
// which do not affect a matmul.
//
// Limits: FlashShape. Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH_CUH
#define ATTENTION_FLASH_CUH

#include "cuda/gpu.cuh"
#include "cuda/vector.cuh"

#include "attention/flash.h"
#include "attention/phi.cuh"

#include <algorithm>
#include <type_traits>

// ---------------------------------------------------------------------------------------------------------------------
// Sizes

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

// A larger chunk has more matmuls in flight and, with a running maximum, rescales the sums less often. So it is as
// large as the registers allow.
template <int HS, int PHI, int POST>
constexpr int forward_chunk =
    PHI < 0 || ((POST == FLASH_REWEIGHT || PHI == PHI_MISH) && HS > 64) ? 16
    : POST == FLASH_REWEIGHT ? 32
                             : (PHI == PHI_EXP && HS <= 64 ? 64 : 32) / (POST == FLASH_PLAIN ? 1 : 2);

// Chunks in which all scores are visible have separate code without masks. With 128 columns there are too few registers
// for both versions.
template <int HS>
constexpr bool splits_chunks = HS <= 64;

// True if, in the forward pass, the operands of the rows that a warp owns stay in registers.
template <class X, int HS, int POST>
constexpr bool forward_keeps = is_bf16<X> && HS <= 64 && (POST < FLASH_RECENTER_L1);

template <class X, int HS, int PHI, int POST>
struct ForwardPlan
    : FlashPlan<own_tiles<X, PHI>, is_bf16<X> ? 64 : 32, forward_chunk<HS, PHI, POST>, forward_keeps<X, HS, POST>> {};

template <int POST>
constexpr bool may_reweight = POST == FLASH_REWEIGHT || POST == FLASH_TWO_SWEEPS;

// With reweight, does dq have a second accumulator, which `less` multiplies at the end? Two float32 accumulators of 128
// columns do not fit in registers; there, a separate sweep computes `less` first.
template <class X, int HS, int POST>
constexpr bool splits_dq = may_reweight<POST> && (is_bf16<X> || HS <= 64);

template <class X, int HS, int POST>
constexpr bool less_first = may_reweight<POST> && !splits_dq<X, HS, POST>;

// With a wide v, a chunk is a whole tile.
template <class X, int HS, int POST, bool WIDE>
constexpr int rows_chunk = WIDE && !less_first<X, HS, POST> ? 32 : 16;

template <class X, int HS, int PHI, int POST, bool WIDE>
struct RowsPlan : FlashPlan<HS <= 64 ? own_tiles<X, PHI> : 1,
                            WIDE         ? rows_chunk<X, HS, POST, WIDE>
                            : is_bf16<X> ? 64
                                         : 32,
                            rows_chunk<X, HS, POST, WIDE>, is_bf16<X> && HS <= 64 && !may_reweight<POST>> {};

// Two accumulators stay in registers here. mish has the longest formulas and leaves no room for two tiles.
template <class X, int HS, int PHI, bool WIDE>
struct KeysPlan : FlashPlan<HS <= 64 && PHI != PHI_MISH ? own_tiles<X, PHI> : 1, is_bf16<X> && !WIDE ? 64 : 32,
                            WIDE ? 32 : 16, false> {};

// The row stride of a shared tile. In bf16, 8 elements of padding make it an odd multiple of 16 bytes, so that the 8
// rows that ldmatrix reads together are in different banks; for floats, rows are 8 banks apart.
template <int C>
constexpr int tile_step = C + 8;

// ---------------------------------------------------------------------------------------------------------------------
// Tiles and fragments

// Which 16-byte pieces of a tile (R,C) a thread copies: COPIES pieces, the first at (row, column), each ROW_STEP rows
// and COLUMN_STEP columns after the previous one. The copies of eight lanes together touch every bank once: they cover
// 8 neighbors in a row or, if rows do not consist of such groups (HS 48), a column of 8 rows; for floats, 4 rows of 2.
template <int R, int C, int THREADS, class X>
struct TileCopies {
    enum {
        PACK = 16 / sizeof(X),
        A_ROW = C / PACK,
        COPIES = R * A_ROW / THREADS,
        BY_ROWS = A_ROW % 8 == 0,
        ACROSS = BY_ROWS ? 8 : sizeof(X) / 2,
        DOWN = 8 / ACROSS,
        GROUPS = A_ROW / ACROSS,
        ROW_STEP = BY_ROWS ? THREADS / 8 / GROUPS : 0,
        COLUMN_STEP = BY_ROWS ? 0 : THREADS / ACROSS / R * ACROSS * PACK
    };
    static_assert(R * A_ROW % THREADS == 0, "each thread copies the same number of pieces");
    static_assert(BY_ROWS ? THREADS / 8 % GROUPS == 0 : THREADS / ACROSS % R == 0, "steps go by rows or by columns");
    int row, column;
};

template <int R, int C, int THREADS, class X>
DEVICE TileCopies<R, C, THREADS, X> tile_copies() {
    typedef TileCopies<R, C, THREADS, X> P;
    int i = anew(threadIdx.x), group = i / 8, down = group * P::DOWN + i % 8 / P::ACROSS;
    if (P::BY_ROWS) return {group / P::GROUPS, (group % P::GROUPS * P::ACROSS + i % 8) * P::PACK};
    return {down % R, (down / R * P::ACROSS + i % P::ACROSS) * P::PACK};
}

// Starts copying rows with a stride of `row` elements into tile (R,C), with 0 beyond `rows` or `columns`. The caller
// commits and waits.
template <int R, int C, int THREADS, class X>
DEVICE void tile_load(X *tile, const X *from, size_t row, int rows, int columns) {
    typedef TileCopies<R, C, THREADS, X> P;
    P mine = tile_copies<R, C, THREADS, X>();
    tile += mine.row * tile_step<C> + mine.column;
    const X *at = from + mine.row * row + mine.column;
    if (rows >= R && columns >= C) {
        UNROLL
        for (int i = 0; i < P::COPIES; i++) {
            copy_async_16(tile + i * (P::ROW_STEP * tile_step<C> + P::COLUMN_STEP), at);
            at += P::ROW_STEP * row + P::COLUMN_STEP;
        }
        return;
    }
    UNROLL_NOT
    for (int i = 0; i < P::COPIES; i++) {
        bool valid = mine.row + i * P::ROW_STEP < rows && mine.column + i * P::COLUMN_STEP < columns;
        const X *piece = valid ? at + i * (P::ROW_STEP * row + P::COLUMN_STEP) : from;
        copy_async_16(tile + i * (P::ROW_STEP * tile_step<C> + P::COLUMN_STEP), piece, valid);
    }
}

// On return, this step's tiles are loaded and the previous buffers are free.
DEVICE void tile_wait() {
    copy_async_wait<0>();
    __syncthreads();
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
        x -= unpack_low(a.part[p - 1][i]), y -= unpack_high(a.part[p - 1][i]);
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

// The left operand (16,16), from rows of a tile.
template <int STEP>
DEVICE void load_left(Fragment<bf16, 4> &a, const bf16 *tile) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4(a.part[0], tile + lane % 16 * STEP + lane / 16 * 8);
}

template <int STEP>
DEVICE void load_left(Fragment<float, 4> &a, const float *tile) {
    int lane = threadIdx.x % 32;
    const float *at = tile + lane / 4 * STEP + lane % 4 * 2;
    UNROLL
    for (int i = 0; i < 4; i++) {
        float2 x = *(const float2 *)(at + i % 2 * 8 * STEP + i / 2 * 8);
        fragment_set(a, i, x.x, x.y);
    }
}

// Two adjacent right operands (16,8), whose 16 columns are rows of the tile.
template <int STEP>
DEVICE void load_right(Fragment<bf16, 2> (&b)[2], const bf16 *tile) {
    int lane = threadIdx.x % 32;
    uint32_t r[4];
    ldmatrix_x4(r, tile + (lane % 8 + lane / 16 * 8) * STEP + lane / 8 % 2 * 8);
    b[0].part[0][0] = r[0], b[0].part[0][1] = r[1], b[1].part[0][0] = r[2], b[1].part[0][1] = r[3];
}

template <int STEP>
DEVICE void load_right(Fragment<float, 2> (&b)[2], const float *tile) {
    int lane = threadIdx.x % 32;
    const float *at = tile + lane / 4 * STEP + lane % 4 * 2;
    UNROLL
    for (int i = 0; i < 4; i++) {
        float2 x = *(const float2 *)(at + i / 2 * 8 * STEP + i % 2 * 8);
        fragment_set(b[i / 2], i % 2, x.x, x.y);
    }
}

// The same from a tile whose rows are the operands' rows.
template <int STEP>
DEVICE void load_right_transposed(Fragment<bf16, 2> (&b)[2], const bf16 *tile) {
    int lane = threadIdx.x % 32;
    uint32_t r[4];
    ldmatrix_x4_transposed(r, tile + lane % 16 * STEP + lane / 16 * 8);
    b[0].part[0][0] = r[0], b[0].part[0][1] = r[1], b[1].part[0][0] = r[2], b[1].part[0][1] = r[3];
}

template <int STEP>
DEVICE void load_right_transposed(Fragment<float, 2> (&b)[2], const float *tile) {
    int lane = threadIdx.x % 32;
    const float *at = tile + lane % 4 * 2 * STEP + lane / 4;
    UNROLL
    for (int i = 0; i < 4; i++) {
        const float *x = at + i % 2 * 8 * STEP + i / 2 * 8;
        fragment_set(b[i / 2], i % 2, x[0], x[STEP]);
    }
}

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
            for (int m = 0; m < TILES; m++)
                fragment_multiply<X>(s[m][2 * pair], a[m], b[0]), fragment_multiply<X>(s[m][2 * pair + 1], a[m], b[1]);
        }
    }
}

// sum[m][c] (16,8) += w (16 TILES, 8 NT) · a tile (8 NT, HS), w in the layout that the matmul above produces
template <class X, int HS, int TILES, int NT>
DEVICE void matmul_by_columns(float (&sum)[TILES][HS / 8][4], const float (&w)[TILES][NT][4], const X *tile) {
    UNROLL
    for (int k = 0; k < NT / 2; k++) {
        Fragment<X, 4> a[TILES];
        UNROLL
        for (int m = 0; m < TILES; m++) {
            UNROLL
            for (int i = 0; i < 4; i++)
                fragment_set(a[m], i, w[m][2 * k + i / 2][i % 2 * 2], w[m][2 * k + i / 2][i % 2 * 2 + 1]);
        }
        UNROLL
        for (int pair = 0; pair < HS / 16; pair++) {
            Fragment<X, 2> b[2];
            load_right_transposed<tile_step<HS>>(b, tile + k * 16 * tile_step<HS> + pair * 16);
            UNROLL
            for (int m = 0; m < TILES; m++)
                fragment_multiply<X>(sum[m][2 * pair], a[m], b[0]),
                    fragment_multiply<X>(sum[m][2 * pair + 1], a[m], b[1]);
        }
    }
}

template <int TILES, int NT>
DEVICE void set_zero(float (&s)[TILES][NT][4]) {
    UNROLL
    for (int m = 0; m < TILES; m++) {
        UNROLL
        for (int nt = 0; nt < NT; nt++) s[m][nt][0] = s[m][nt][1] = s[m][nt][2] = s[m][nt][3] = 0;
    }
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
        x[e] = unpack_low(both), x[e + 1] = unpack_high(both);
    }
}

// Stores the rows of `sum`, each times its factor, to `to`, the address of the warp's first row and column; only the
// first `rows` rows and `columns` columns. `rest`, unless NULL, receives the rounding errors, in rows with a stride of
// rest_row.
template <class X, int TILES, int CT>
DEVICE void store_rows(X *to, size_t row, const float (&sum)[TILES][CT][4], const float (&factor)[2 * TILES], int rows,
                       int columns, X *rest = NULL, size_t rest_row = 0) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        if (8 * r + g >= rows) continue;
        UNROLL
        for (int c = 0; c < CT; c++) {
            const float *x = sum[r / 2][c] + r % 2 * 2;
            if (8 * c >= columns) continue;
            float y = x[0] * factor[r], z = x[1] * factor[r];
            store_pair(to + (8 * r + g) * row + 8 * c + 2 * t, y, z);
            if (rest)
                store_pair(rest + (8 * r + g) * rest_row + 8 * c + 2 * t, y - rounded_to<X>(y), z - rounded_to<X>(z));
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

// ---------------------------------------------------------------------------------------------------------------------
// Rows: phi, powers, positions

// z (N) in, phi(z) and its slope out. The switch over phi, if there is one, is outside the loop.
//   BY_COLUMN: element e belongs to row e % 2 of the two that a lane has among an mma's columns; otherwise to row e / 2
//   of those that it owns.
//   VALUE: see phi_at.
template <class X, int PHI, bool BY_COLUMN, bool VALUE = true, int N, class Row>
DEVICE void phi_values(int phi, float (&z)[N], float (&slope)[N], const Row *row) {
#define VALUES(kind_)                                                                                       \
    {                                                                                                       \
        UNROLL                                                                                              \
        for (int e = 0; e < N; e++) phi_at<X, PHI, kind_, VALUE>(z[e], row[BY_COLUMN ? e % 2 : e / 2].number, &z[e], &slope[e]); \
    }
#define CASE(kind_, ...) case kind_: VALUES(kind_) break;
    if (PHI >= 0) VALUES(PHI) else switch (phi) {
            PHI_VALUES(CASE)
        }
#undef CASE
#undef VALUES
}

// x^P
template <int P>
DEVICE float whole_power(float x) {
    if constexpr (P == 1) {
        return x;
    } else if constexpr (P % 3 == 0) {
        float root = whole_power<P / 3>(x);
        return root * root * root;
    } else {
        float root = whole_power<P / 2>(x);
        return P % 2 ? root * root * x : root * root;
    }
}

// w (N), each in [0, 1], to the power P; by multiplications if P is an integer. KNOWN: P, or 0 if it is not a
// compile-time constant
template <class X, int KNOWN, int N>
DEVICE void power(float (&w)[N], float P) {
    int whole = (int)P;
    if constexpr (KNOWN > 0) {
        UNROLL
        for (int e = 0; e < N; e++) w[e] = whole_power<KNOWN>(w[e]);
    } else if ((float)whole == P && whole <= 64) {
        float x[N];
        UNROLL
        for (int e = 0; e < N; e++) x[e] = w[e], w[e] = 1;
        for (; whole > 0; whole /= 2) {
            if (whole % 2) {
                UNROLL
                for (int e = 0; e < N; e++) w[e] *= x[e];
            }
            UNROLL
            for (int e = 0; e < N; e++) x[e] *= x[e];
        }
    } else {
        UNROLL
        for (int e = 0; e < N; e++)
            w[e] = w[e] > 0 ? (is_bf16<X> ? exp2_fast(P * log2_fast(w[e])) : powf(w[e], P)) : w[e];
    }
}

// Calls function(P) with reweight's P as a compile-time constant if it is a common one, otherwise with 0.
template <int POST, class Function>
DEVICE void with_power(float P, Function function) {
    if (POST == FLASH_REWEIGHT && P == 15) function(std::integral_constant<int, 15>());
    else if (POST == FLASH_REWEIGHT && P == 3) function(std::integral_constant<int, 3>());
    else function(std::integral_constant<int, 0>());
}

// The first key that a row of sequence b sees. Rows past T, whose results are discarded, use the last row's.
template <class X>
DEVICE int first_key(const FlashCall<X> &call, int b, int row) {
    return call.first ? call.first[(size_t)b * call.T + (row < call.T ? row : call.T - 1)] : 0;
}

// Row `row` of head h of sequence b.
template <class X>
DEVICE RowPlace place_of(const FlashCall<X> &call, int b, int h, int row) {
    int n = (row < call.T ? row + 1 : call.T) - first_key(call, b, row);
    return row_place(call.scalars, h, n, call.T, call.L, call.HS);
}

// The offset of position 0 of head h of sequence b.
template <class X>
DEVICE X *head_at(const FlashCall<X> &call, FlashView<X> view, int b, int h) {
    return view.p + (size_t)b * call.T * view.row + h * view.head;
}

template <class X>
DEVICE const X *head_at(const FlashCall<X> &call, FlashView<const X> view, int b, int h) {
    return view.p + (size_t)b * call.T * view.row + h * view.head;
}

// The shift that z is relative to, from the bias: the row's largest z for exp and expm1 over their sum.
template <class X>
DEVICE float row_shift(const FlashCall<X> &call, RowPlace at, float bias) {
    return subtracts_maximum(call.phi, call.norm) ? row_offset(call.offset, at) - bias : 0;
}

template <class X, int POST>
DEVICE bool is_reweight(const FlashCall<X> &call) {
    return POST == FLASH_REWEIGHT || (POST == FLASH_TWO_SWEEPS && call.post == POST_REWEIGHT);
}

template <int PHI>
constexpr bool rectifies = flash_rectifies(PHI);

// Is element e = 4 m + i of the tile that starts at the warp's first own row and the chunk's first other row visible?
// That is, is its key not after its query?
template <bool BY_COLUMN>
DEVICE bool is_visible(int own, int other, int e) {
    int lane = threadIdx.x % 32;
    own += e / 4 * 16 + e % 4 / 2 * 8 + lane / 4, other += lane % 4 * 2 + e % 2;
    return BY_COLUMN ? own <= other : other <= own;
}

// Is that key before the first one that its row, which is one of the lane's own, sees?
DEVICE bool is_before(int first, int other, int e) {
    int lane = threadIdx.x % 32;
    return other + lane % 4 * 2 + e % 2 < first;
}

// The first visible keys of the rows that a lane owns, in a kernel whose blockIdx.y runs over B·NH.
template <int ROWS, class X>
DEVICE void first_keys(int (&first)[ROWS], const FlashCall<X> &call, int own_row) {
    UNROLL
    for (int r = 0; r < ROWS; r++)
        first[r] = call.first ? first_key(call, blockIdx.y / call.NH, own_row + 8 * r + threadIdx.x % 32 / 4) : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// x times the sign of `of`. In bf16 that is one instruction, which also takes the sign of a zero: at 0, any value from
// -1 to 1 is a subgradient of |f|.
template <class X>
DEVICE float signed_as(float x, float of) {
    if (is_bf16<X>) return __uint_as_float(__float_as_uint(x) ^ (__float_as_uint(of) & 0x80000000u));
    return of < 0 ? -x : of > 0 ? x : 0;
}

struct ForwardRow {
    float scale, bias, offset, number;
    // Of |f|, of f; the largest f (in the first sweep, if that is by_z: the largest z).
    float sum, sum_signed, largest;
    float factor, mean, left, signs;    // for the second sweep: maps f to w; the sum of |w|, the sum of their signs
};

// Elements of keys before the first one that their row sees become `x`. Only runs where call.first is.
template <class X, int TILES, int NT>
DEVICE void hide_before(float (&s)[TILES][NT][4], float x, const FlashCall<X> &call, int own, int other) {
    int first[2 * TILES];
    first_keys(first, call, own);
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        UNROLL
        for (int e = 0; e < 4 * TILES; e++)
            if (is_before(first[e / 2], other + 8 * nt, e)) s[e / 4][nt][e % 4] = x;
    }
}

// Scores that are not visible do not count for the maximum.
template <int TILES, int NT>
DEVICE void forward_hide(float (&s)[TILES][NT][4], int own, int other) {
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        UNROLL
        for (int e = 0; e < 4 * TILES; e++)
            if (!is_visible<false>(own, other + 8 * nt, e)) s[e / 4][nt][e % 4] = -INFINITY;
    }
}

// Updates the row's bias to the largest z so far, and rescales all its sums.
template <class X, int HS, int PHI, int TILES, int NT>
DEVICE void forward_shift(ForwardRow (&row)[2 * TILES], float (&sum)[TILES][HS / 8][4], const float (&s)[TILES][NT][4],
                          bool sums) {
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        float top = -INFINITY;
        UNROLL
        for (int nt = 0; nt < NT; nt++) top = fmaxf(top, fmaxf(s[r / 2][nt][r % 2 * 2], s[r / 2][nt][r % 2 * 2 + 1]));
        float bias = fminf(row[r].bias, -row[r].scale * row_max(top)), by = exp_of<X, PHI>(bias - row[r].bias);
        row[r].bias = bias;
        row[r].number = exp_of<X, PHI>(bias - row[r].offset);
        row[r].sum *= by, row[r].sum_signed *= by, row[r].largest *= by;
        UNROLL
        for (int c = 0; sums && c < HS / 8; c++) sum[r / 2][c][r % 2 * 2] *= by, sum[r / 2][c][r % 2 * 2 + 1] *= by;
    }
}

// Is f rounded to X before it is summed? The matmul with v rounds it, and summing the same rounded values makes a row's
// weights add up to exactly 1 and, in a row with a single key, makes the output equal v. Otherwise d - D would not be 0
// there, and dividing by a small Z would magnify the error. exp does not need it: its slope is as small as f, and f is
// 1 in a row with one key.
template <int PHI, int POST>
constexpr bool rounds_values = PHI != PHI_EXP && POST < FLASH_RECENTER_L1;

// s: scores in, f out, 0 where not visible.
template <class X, int PHI, int POST, int TILES, int NT>
DEVICE void forward_values(int phi, float (&s)[TILES][NT][4], const ForwardRow (&row)[2 * TILES], bool masked, int own,
                           int other) {
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        float z[4 * TILES], slope[4 * TILES];
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) z[e] = s[e / 4][nt][e % 4] * row[e / 2].scale + row[e / 2].bias;
        phi_values<X, PHI, false>(phi, z, slope, row);
        if (rounds_values<PHI, POST>) round_to<X>(z);
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) {
            s[e / 4][nt][e % 4] = masked && !is_visible<false>(own, other + 8 * nt, e) ? 0 : z[e];
        }
    }
}

// BOTH: the sum of f is also needed, and differs from the sum of |f|.
template <bool BOTH, int TILES, int NT>
DEVICE void forward_sums(ForwardRow (&row)[2 * TILES], const float (&f)[TILES][NT][4], bool is_signed, bool largest) {
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) {
            float x = f[e / 4][nt][e % 4];
            row[e / 2].sum += is_signed ? fabsf(x) : x;
            if (BOTH && is_signed) row[e / 2].sum_signed += x;
            if (largest) row[e / 2].largest = fmaxf(row[e / 2].largest, x);
        }
    }
}

// Is the first sweep forward_sums_by_z?
template <class X, int PHI, int POST>
constexpr bool by_z = is_bf16<X> && PHI == PHI_SOFTPLUS && POST == FLASH_REWEIGHT;

// ln(1 + x) for x >= 0 by the fast logarithm; a small x is its own logarithm.
DEVICE float log1p_fast(float x) {
    return x < 0x1p-9f ? x - 0.5f * x * x : 0.6931471805599453f * log2_fast(1 + x);
}

// The first sweep of softplus, max(z, 0) + ln(1 + exp(-|z|)), from scores. Computes the sum of f, in the unit of z,
// with one logarithm for a row's part of the chunk, and the largest z, which belongs to the largest f.
template <class X, int PHI, bool MASKED, int TILES, int NT>
DEVICE void forward_sums_by_z(ForwardRow (&row)[2 * TILES], const float (&s)[TILES][NT][4], int own, int other,
                              const int (&first)[2 * TILES]) {
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        float product = 0;    // of all 1 + exp(-|z|), minus 1, so that a small exp is not lost
        UNROLL
        for (int i = 0; i < 2 * NT; i++) {
            const int nt = i / 2, e = r % 2 * 2 + i % 2;
            float z = s[r / 2][nt][e] * row[r].scale + row[r].bias;
            if (MASKED && (!is_visible<false>(own, other + 8 * nt, 4 * (r / 2) + e) ||
                           is_before(first[r], other + 8 * nt, 4 * (r / 2) + e)))
                z = -INFINITY;
            float x = exp_of<X, PHI>(-fabsf(z));
            row[r].largest = fmaxf(row[r].largest, z);
            row[r].sum += fmaxf(z, 0);
            product = product * x + (product + x);
        }
        row[r].sum += log1p_fast(product) * unit<X, PHI>;
    }
}

// Finishes that sweep: the sum and the largest f. The largest f uses the same logarithm as the sum, not phi_at's
// polynomial: in a row of equal weights, it must equal their mean up to rounding (reweight_numbers).
template <class X, int PHI>
DEVICE void forward_total_by_z(ForwardRow &row) {
    const float z = row.largest;
    row.sum *= 1 / unit<X, PHI>;
    float per_unit = 1 / unit<X, PHI>;
    row.largest = fmaxf(z, 0) * per_unit + log1p_fast(exp_of<X, PHI>(-fabsf(z)));
}

// Combines the sums of the row's four lanes.
DEVICE void forward_total(ForwardRow &row, bool is_signed) {
    row.sum = row_sum(row.sum);
    row.sum_signed = is_signed ? row_sum(row.sum_signed) : row.sum;
    row.largest = row_max(row.largest);
}

template <int TILES, int NT>
DEVICE void forward_rectify(float (&f)[TILES][NT][4]) {
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) f[e / 4][nt][e % 4] = max_nan(f[e / 4][nt][e % 4], 0);
    }
}

// From 1/Z and the largest f, the factor and mean that turn f into r in reweight: r = 1 + (f - mean) factor, where mean
// is the largest f. In bf16, f is not accurate enough for this form to matter, so r = f factor + mean, where mean = 1 -
// (the largest f) factor. An all-zero row gets r = 0.
template <class X>
DEVICE void reweight_numbers(float *factor, float *mean, float inverse, float largest, int n) {
    float from = n > POST_FROM ? 1 : 0, top = largest * (inverse * (float)n) - from;
    // In a row of equal weights, top is 0 up to rounding, which must not be mistaken for weight.
    bool weight = !(top < (from > 0 ? 32 * FLT_EPSILON : FLT_MIN));
    *factor = weight ? inverse * (float)n / top : 1;
    if (is_bf16<X>) *mean = weight ? -from / top : -INFINITY;
    else *mean = weight ? largest : INFINITY;
}

// Between two sweeps: from Z and the largest f, what turns f into w.
template <class X, int PHI>
DEVICE void forward_between(ForwardRow &row, const FlashCall<X> &call, RowPlace at, bool reweight) {
    float inverse = row_inverse(call.norm, at, row.sum, row_shift(call, at, row.bias / unit<X, PHI>)), n = (float)at.n;
    row.factor = inverse;
    row.mean = 0;
    if (reweight) reweight_numbers<X>(&row.factor, &row.mean, inverse, row.largest, at.n);
    else if (at.n > POST_FROM) row.mean = row.sum_signed * inverse / n;
}

// r, or 0 for NaN; a NaN still shows in the row's other numbers.
template <class X, class Row>
DEVICE float reweight_base(float f, const Row &row) {
    return __saturatef(is_bf16<X> ? f * row.factor + row.mean : (f - row.mean) * row.factor + 1);
}

// f in, w out; also adds to their sums.
template <class X, int KNOWN, int TILES, int NT>
DEVICE void forward_weights(float (&f)[TILES][NT][4], ForwardRow (&row)[2 * TILES], bool reweight, float P, bool masked,
                            int own, int other, const int (&first)[2 * TILES]) {
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        float w[4 * TILES];
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) w[e] = f[e / 4][nt][e % 4];
        if (reweight) {
            UNROLL
            for (int e = 0; e < 4 * TILES; e++) w[e] = reweight_base<X>(w[e], row[e / 2]);
            power<X, KNOWN>(w, P);
        } else {
            UNROLL
            for (int e = 0; e < 4 * TILES; e++) w[e] = w[e] * row[e / 2].factor - row[e / 2].mean;
        }
        round_to<X>(w);
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) {
            bool hidden = !is_visible<false>(own, other + 8 * nt, e) || is_before(first[e / 2], other + 8 * nt, e);
            w[e] = masked && hidden ? 0 : w[e];
            row[e / 2].left += fabsf(w[e]);
            if (!reweight) row[e / 2].signs += w[e] < 0 ? -1 : w[e] > 0 ? 1 : 0;
            f[e / 4][nt][e % 4] = w[e];
        }
    }
}

// Finishes a row: returns its accumulator's factor and writes its statistics, from which the backward pass makes a
// FlashRow:
//   bias, factor, mean, the sum of the signs (recenter-l1); or bias, 1/Z, the largest f, 1/sum w (reweight)
template <class X, int PHI, int POST>
DEVICE float forward_end(float4 *stats, ForwardRow &row, const FlashCall<X> &call, RowPlace at, bool *weight) {
    bool late = at.n > POST_FROM;
    float inverse = row_inverse(call.norm, at, row.sum, row_shift(call, at, row.bias / unit<X, PHI>)), left = row.sum,
          by = inverse;
    *stats = make_float4(row.bias, inverse, 0, 0);
    if (POST == FLASH_PLAIN) {
        if (call.post == POST_NEGATE) stats->y = by = -inverse;
        if (call.post == POST_RECTIFY) left = row.sum + row.sum_signed;
    } else if (POST == FLASH_RECENTER) {
        stats->z = row.mean = late ? row.sum_signed * inverse / (float)at.n : 0;
    } else if (is_reweight<X, POST>(call)) {
        left = row.left;
        stats->z = row.largest;
        stats->w = by = isnan(row.sum) ? row.sum : inverse_or_zero(left);
    } else {
        if (late) left = row.left;
        by = late ? inverse_or_zero(left) : 1;
        *stats = make_float4(row.bias, inverse * by, row.mean * by, row.signs);
    }
    *weight = row.sum != 0 && left != 0 && inverse != 0;
    return by;
}

// sum = sum · by - mean · prefix, then by = 1. prefix: the address of the warp's first row and column, in rows with a
// stride of `step`.
template <int HS, int TILES>
DEVICE void forward_recenter(float (&sum)[TILES][HS / 8][4], const ForwardRow (&row)[2 * TILES], float (&by)[2 * TILES],
                             const float *prefix, size_t step, int rows, int columns) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        if (8 * r + g >= rows) continue;
        UNROLL
        for (int c = 0; c < HS / 8; c++) {
            if (8 * c >= columns) continue;
            float2 p = *(const float2 *)(prefix + (8 * r + g) * step + 8 * c + 2 * t);
            float *x = sum[r / 2][c] + r % 2 * 2;
            x[0] = x[0] * by[r] - row[r].mean * p.x, x[1] = x[1] * by[r] - row[r].mean * p.y;
        }
        by[r] = 1;
    }
}

// Computes the warp's rows, one per lane, and hands them to the lanes that own them. With `relative`, a row whose scale
// is negative has it negated (and the caller negates its query), so that the largest score has the largest z.
template <class X, int HS, int PHI, int TILES>
DEVICE void forward_begin(ForwardRow (&row)[2 * TILES], bool *negative, const FlashCall<X> &call, int b, int h,
                          int own_row, bool relative) {
    const int phi = PHI >= 0 ? PHI : call.phi, lane = threadIdx.x % 32;
    RowPlace at = place_of(call, b, h, own_row + lane % (16 * TILES));
    float scale = row_scale(call.scale, at) * unit<X, PHI>, offset = row_offset(call.offset, at), bias = offset;
    *negative = relative && scale < 0;
    if (relative) scale = fabsf(scale), bias = offset - least_maximum(phi, call.norm, at);
    // With `first`, a row's first chunks may contain no visible key. The bias then keeps its initial value, which must
    // not be infinite.
    if (relative && call.first) bias = fminf(bias, 1e30f);
    const float number = phi_learns(phi) ? phi_number(phi, at, 0) : 1;
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        int from = 8 * r + lane / 4;
        row[r] = {__shfl_sync(0xFFFFFFFFu, scale, from),
                  __shfl_sync(0xFFFFFFFFu, bias, from) * unit<X, PHI>,
                  __shfl_sync(0xFFFFFFFFu, offset, from) * unit<X, PHI>,
                  phi_learns(phi) ? __shfl_sync(0xFFFFFFFFu, number, from) : 1,
                  0,
                  0,
                  0,
                  0,
                  0,
                  0,
                  0};
    }
}

// Negates those of the warp's rows of a tile whose lane requests it.
template <int HS, int TILES, class X>
DEVICE void negate_rows(X *rows, bool negative) {
    int lane = threadIdx.x % 32;
    if (negative && lane < 16 * TILES) {
        X *row = rows + lane * tile_step<HS>;
        UNROLL_NOT
        for (int c = 0; c < HS; c++) set_float(row[c], -to_float(row[c]));
    }
    __syncwarp();
}

// What a sweep over the keys does with each chunk.
struct ForwardSweep {
    bool first, adds;                      // does another sweep follow? does this one add to the output?
    bool relative, is_signed, reweight;    // of the normalizer
};

// Processes a chunk of keys (the first is `key`; they are rows of the tiles k and v) for the warp's rows from `own_row`
// on. MASKED: not every row sees every key.
template <class X, int HS, int PHI, int POST, bool MASKED, int TILES, bool KEEP>
DEVICE void forward_keys(float (&sum)[TILES][HS / 8][4], ForwardRow (&row)[2 * TILES],
                         const Own<X, HS, TILES, KEEP> &own, const X *k, const X *v, int own_row, int key,
                         const ForwardSweep &sweep, const FlashCall<X> &call) {
    enum { NT = ForwardPlan<X, HS, PHI, POST>::NT };
    const int phi = PHI >= 0 ? PHI : call.phi;
    float s[TILES][NT][4];
    int first[2 * TILES] = {};
    if (MASKED && POST >= FLASH_RECENTER_L1) first_keys(first, call, own_row);
    set_zero(s);
    matmul_by_rows(s, own, k);
    if constexpr (by_z<X, PHI, POST>) {
        if (sweep.first) return forward_sums_by_z<X, PHI, MASKED>(row, s, own_row, key, first);
    }
    if (sweep.relative && (sweep.first || POST < FLASH_RECENTER_L1)) {
        if (MASKED) forward_hide(s, own_row, key);
        if (MASKED && call.first) hide_before(s, -INFINITY, call, own_row, key);
        forward_shift<X, HS, PHI>(row, sum, s, sweep.adds);
    }
    forward_values<X, PHI, POST>(phi, s, row, MASKED, own_row, key);
    if (MASKED && call.first) hide_before(s, 0, call, own_row, key);
    constexpr bool both = POST != FLASH_PLAIN || rectifies<PHI>;
    if (sweep.first || POST < FLASH_RECENTER_L1) forward_sums<both>(row, s, sweep.is_signed, sweep.reweight);
    if (POST == FLASH_PLAIN && rectifies<PHI> && sweep.is_signed && call.post == POST_RECTIFY) forward_rectify(s);
    if (!sweep.adds) return;
    if (POST >= FLASH_RECENTER_L1)
        with_power<POST>(call.power, [&](auto P) {
            forward_weights<X, P.value>(s, row, sweep.reweight, call.power, MASKED, own_row, key, first);
        });
    matmul_by_columns<X, HS>(sum, s, v);
}

// registers: at most 255 (flash_forward_kernel, flash_dq_kernel, flash_dkv_kernel)
template <class X, int HS, int PHI, int POST>
KERNEL void flash_forward_kernel(const FlashCall<X> call) {
    typedef ForwardPlan<X, HS, PHI, POST> P;
    enum {
        TILES = P::TILES,
        OWN = P::OWN,
        KEYS = P::STREAM,
        CHUNK = P::CHUNK,
        STEP = tile_step<HS>,
        THREADS = P::THREADS
    };
    DYNAMIC_SHARED(X, shared);
    X *q_tile = shared, *k_tiles = q_tile + OWN * STEP, *v_tiles = k_tiles + 2 * KEYS * STEP;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, T = call.T, b = blockIdx.y / call.NH,
        h = blockIdx.y % call.NH, kv = h / (call.NH / call.NKV);
    // Longest rows first.
    int row0 = (gridDim.x - 1 - blockIdx.x) * OWN, warp_row = row0 + warp * 16 * TILES;
    int column0 = blockIdx.z * HS, columns = call.VS - column0;
    const X *q = head_at(call, call.q, b, h), *k = head_at(call, call.k, b, kv);
    const X *v = head_at(call, call.v, b, kv) + column0;
    const int phi = PHI >= 0 ? PHI : call.phi;
    const bool relative = subtracts_maximum(phi, call.norm), is_signed = phi_signed(phi),
               reweight = is_reweight<X, POST>(call);

    ForwardRow row[2 * TILES];
    bool negative;
    forward_begin<X, HS, PHI, TILES>(row, &negative, call, b, h, warp_row, relative);
    for (int r = 0; by_z<X, PHI, POST> && r < 2 * TILES; r++) row[r].largest = -INFINITY;
    float sum[TILES][HS / 8][4];
    set_zero(sum);

    int last = row0 + OWN < T ? row0 + OWN : T, low = first_key(call, b, row0) / KEYS,
        tiles = (last - 1) / KEYS + 1 - low, steps = POST >= FLASH_RECENTER_L1 ? 2 * tiles : tiles;
    auto key_of = [&](int step) {
        return ((POST >= FLASH_RECENTER_L1 && step >= tiles ? step - tiles : step) + low) * KEYS;
    };
    auto load = [&](int step) {
        int key0 = key_of(step);
        tile_load<KEYS, HS, THREADS>(k_tiles + step % 2 * KEYS * STEP, k + key0 * call.k.row, call.k.row, T - key0,
                                     call.HS);
        if (step >= steps - tiles)
            tile_load<KEYS, HS, THREADS>(v_tiles + step % 2 * KEYS * STEP, v + key0 * call.v.row, call.v.row, T - key0,
                                         columns);
        copy_async_commit();
    };
    tile_load<OWN, HS, THREADS>(q_tile, q + row0 * call.q.row, call.q.row, T - row0, call.HS);
    load(0);
    Own<X, HS, TILES, P::KEEP> own = {q_tile + warp * 16 * TILES * STEP, {}};

    for (int step = 0; step < steps; step++) {
        tile_wait();
        if (step + 1 < steps) load(step + 1);
        if (step == 0) {
            if (relative) negate_rows<HS, TILES>(q_tile + warp * 16 * TILES * STEP, negative);
            own_keep(own);
        }
        const X *k_tile = k_tiles + step % 2 * KEYS * STEP, *v_tile = v_tiles + step % 2 * KEYS * STEP;
        const ForwardSweep sweep = {step < steps - tiles, step >= steps - tiles, relative, is_signed, reweight};
        const int key0 = key_of(step), visible = warp_row + 16 * TILES - key0;
        UNROLL_NOT
        for (int c = 0; c < KEYS && c < visible; c += CHUNK) {
            bool masked = warp_row < key0 + c + CHUNK - 1;
            if (call.first) {
                if (key0 + c + CHUNK <= first_key(call, b, warp_row)) continue;
                masked = masked || key0 + c < first_key(call, b, warp_row + 16 * TILES - 1);
            }
            const X *k_rows = k_tile + c * STEP, *v_rows = v_tile + c * STEP;
            if (masked || !splits_chunks<HS>)
                forward_keys<X, HS, PHI, POST, true>(sum, row, own, k_rows, v_rows, warp_row, key0 + c, sweep, call);
            else forward_keys<X, HS, PHI, POST, false>(sum, row, own, k_rows, v_rows, warp_row, key0 + c, sweep, call);
        }
        if (POST >= FLASH_RECENTER_L1 && step == tiles - 1) {
            UNROLL
            for (int r = 0; r < 2 * TILES; r++) {
                forward_total(row[r], is_signed);
                if constexpr (by_z<X, PHI, POST>) forward_total_by_z<X, PHI>(row[r]);
                forward_between<X, PHI>(row[r], call, place_of(call, b, h, warp_row + 8 * r + g), reweight);
            }
        }
    }

    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        if (POST < FLASH_RECENTER_L1) forward_total(row[r], is_signed);
        else row[r].left = row_sum(row[r].left), row[r].signs = row_sum(row[r].signs);
    }
    // Of the four lanes that share rows, each finishes one row.
    const int mine = threadIdx.x % (2 * TILES), i = warp_row + 8 * mine + g;
    ForwardRow end = row[0];
    UNROLL
    for (int r = 1; r < 2 * TILES; r++)
        if (mine == r) end = row[r];
    bool weight;
    float4 stats;
    float factor = forward_end<X, PHI, POST>(&stats, end, call, place_of(call, b, h, i), &weight), by[2 * TILES];
    if (i < T && blockIdx.z == 0 && threadIdx.x % 4 < 2 * TILES) {
        *(float4 *)(call.stats + ((size_t)blockIdx.y * T + i) * FLASH_STATS) = stats;
        if (!weight) atomicAdd(call.all_zero_rows, 1ull);
    }
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        by[r] = __shfl_sync(0xFFFFFFFFu, factor, 4 * g + r);
        if (POST == FLASH_RECENTER) row[r].mean = __shfl_sync(0xFFFFFFFFu, end.mean, 4 * g + r);
    }
    if (POST == FLASH_RECENTER)
        forward_recenter<HS>(sum, row, by,
                             call.prefix + (((size_t)b * call.NKV + kv) * T + warp_row) * call.VS + column0, call.VS,
                             T - warp_row, columns);
    X *out = head_at(call, call.out, b, h) + warp_row * call.out.row + column0;
    X *rest = call.rest ? call.rest + ((size_t)blockIdx.y * T + warp_row) * call.VS + column0 : NULL;
    store_rows(out, call.out.row, sum, by, T - warp_row, columns, rest, call.VS);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward: elementwise

// Is 0 <= phi' <= phi? (The FFMA that this allows overflows only where |dO · O| scale/Z does: if every z of a row is
// below -80.)
template <int PHI>
constexpr bool slope_within_value = PHI == PHI_EXP || PHI == PHI_SIGMOID || PHI == PHI_SOFTPLUS;

// r and q = r^(P-1) from f; q is 0 where r is.   KNOWN: P, if known, see power()
template <class X, int KNOWN, bool BY_COLUMN, int N>
DEVICE void reweight_powers(float (&r)[N], float (&q)[N], const float (&f)[N], const FlashRow *row, float P) {
    UNROLL
    for (int e = 0; e < N; e++) r[e] = q[e] = reweight_base<X>(f[e], row[BY_COLUMN ? e % 2 : e / 2]);
    power<X, (KNOWN > 0 ? KNOWN - 1 : 0)>(q, P - 1);
    UNROLL
    for (int e = 0; KNOWN == 0 && e < N; e++) q[e] = r[e] > 0 ? q[e] : 0;
}

// From the scores s (N) and d = dO · v, in place: d becomes df (times the row's scale for reweight, and for plain posts
// with BY_COLUMN). Also writes f, its slope and the weights w. row: see phi_values.
template <class X, int PHI, int POST, bool BY_COLUMN, int KNOWN = 0, int N>
DEVICE void backward_values(float (&d)[N], float (&f)[N], float (&slope)[N], float (&w)[N], const float (&s)[N],
                            const FlashRow *row, const FlashCall<X> &call) {
    const int phi = PHI >= 0 ? PHI : call.phi;
    const bool is_signed = phi_signed(phi);
    UNROLL
    for (int e = 0; e < N; e++)
        f[e] = s[e] * row[BY_COLUMN ? e % 2 : e / 2].scale + row[BY_COLUMN ? e % 2 : e / 2].bias;
    phi_values<X, PHI, BY_COLUMN, BY_COLUMN || POST >= FLASH_RECENTER_L1>(phi, f, slope, row);
    if (is_reweight<X, POST>(call)) {
        float r[N], q[N];
        reweight_powers<X, KNOWN, BY_COLUMN>(r, q, f, row, call.power);
        UNROLL
        for (int e = 0; e < N; e++) {
            const FlashRow &at = row[BY_COLUMN ? e % 2 : e / 2];
            const float scale = at.scale * (1 / unit<X, PHI>), by_r = q[e] * at.inverse_sum, less = at.less * scale;
            w[e] = by_r * r[e];
            d[e] =
                at.factor * call.power * scale * (by_r * (d[e] - at.D)) - (is_signed ? signed_as<X>(less, f[e]) : less);
        }
        return;
    }
    const bool rectify = POST == FLASH_PLAIN && rectifies<PHI> && is_signed && call.post == POST_RECTIFY;
    UNROLL
    for (int e = 0; e < N; e++) w[e] = f[e];
    if (BY_COLUMN && rounds_values<PHI, POST>) round_to<X>(w);    // only BY_COLUMN needs the weights
    UNROLL
    for (int e = 0; e < N; e++) {
        const FlashRow &at = row[BY_COLUMN ? e % 2 : e / 2];
        w[e] *= at.factor;
        if (rectify && !(f[e] > 0)) w[e] = d[e] = 0;
        if (POST == FLASH_PLAIN) {
            // A difference that should be 0 must be exactly 0, because it is divided by Z. Where the slope is as small
            // as f, rounding is harmless.
            if (slope_within_value<PHI>) d[e] = d[e] * at.by_d - at.by_D;
            else d[e] = (d[e] - (is_signed ? signed_as<X>(at.D, f[e]) : at.D)) * at.by_d;
            continue;
        }
        w[e] -= at.mean, d[e] -= at.less;
        bool by_w = POST == FLASH_RECENTER_L1 || POST == FLASH_TWO_SWEEPS;
        d[e] = at.factor * (d[e] - (by_w ? signed_as<X>(at.D, w[e]) : is_signed ? signed_as<X>(at.D, f[e]) : at.D));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward: dq, by row blocks

// A row's sums for the gradient of phi's number: of df df/dnumber or, with reweight, the two with t and with sgn(f), as
// for dq.
struct NumberSum {
    float t, less;
};

// For reweight: d becomes t phi'(z), along becomes sgn(f) phi'(z), and t (1 - r) is added to less_sum; see the header.
// hidden: not visible
template <class X, int PHI, int KNOWN, int N>
DEVICE void dq_reweight(float (&d)[N], float (&along)[N], float *less_sum, NumberSum *number_sum, const float (&s)[N],
                        const bool (&hidden)[N], const FlashRow *row, const FlashCall<X> &call) {
    const int phi = PHI >= 0 ? PHI : call.phi;
    const bool is_signed = phi_signed(phi);
    float f[N], r[N], q[N];
    UNROLL
    for (int e = 0; e < N; e++) f[e] = s[e] * row[e / 2].scale + row[e / 2].bias;
    phi_values<X, PHI, false>(phi, f, along, row);
    reweight_powers<X, KNOWN, false>(r, q, f, row, call.power);
    UNROLL
    for (int e = 0; e < N; e++) {
        float t = hidden[e] ? 0 : q[e] * (d[e] - row[e / 2].D);
        less_sum[e / 2] += t * (1 - r[e]);
        d[e] = t * along[e];
        if (phi_learns(phi) && !hidden[e]) {
            float z = (s[e] * row[e / 2].scale + row[e / 2].bias) * (1 / unit<X, PHI>);
            float by_number = phi_slope_by_number(phi, z, row[e / 2].number, f[e], along[e]);
            number_sum[e / 2].t += t * by_number;
            number_sum[e / 2].less += is_signed ? signed_as<X>(by_number, f[e]) : by_number;
        }
        if (is_signed) along[e] = signed_as<X>(along[e], f[e]);
        if (hidden[e]) d[e] = along[e] = 0;
    }
}

// d += dO · v over all columns of a wide v, tile by tile, for the rows that the block owns and a tile of the other
// side. All threads of the block must call it.
template <class X, int HS, int OWN, int STREAM, int THREADS, int TILES, int NT>
DEVICE void matmul_wide(float (&d)[TILES][NT][4], const Own<X, HS, TILES, false> &own, X *own_tile, X *tile,
                        const X *own_from, size_t own_row, int own_rows, const X *from, size_t row, int rows,
                        int columns) {
    for (int c = 0; c < columns; c += HS) {
        __syncthreads();    // the previous columns are no longer needed
        tile_load<OWN, HS, THREADS>(own_tile, own_from + c, own_row, own_rows, columns - c);
        tile_load<STREAM, HS, THREADS>(tile, from + c, row, rows, columns - c);
        copy_async_commit();
        tile_wait();
        matmul_by_rows(d, own, tile);
    }
}

// K of a row.
template <class X>
DEVICE float reweight_factor(const FlashRow &row, const FlashCall<X> &call) {
    return row.factor * call.power * row.inverse_sum;
}

// less of row n, from the four lanes' sums of t (1 - r).
template <class X>
DEVICE float reweight_less(float less_sum, const FlashRow &row, const FlashCall<X> &call, int n) {
    float less = row_sum(less_sum) * reweight_factor(row, call) / (float)n;
    return norm_is_sum(call.norm) && n > POST_FROM ? less : 0;
}

// Processes a chunk of keys, as forward_keys does. number_sum: the rows' sums for phi's number. d: dO · v if WIDE,
// otherwise uninitialized. less_dq: the second accumulator, see splits_dq. first: the first of two sweeps, which only
// adds to less_sum.
template <class X, int HS, int PHI, int POST, bool WIDE, bool MASKED, int TILES, int SPLIT, int NT, bool KEEP,
          bool KEEP_DOUT>
DEVICE void dq_keys(float (&dq)[TILES][HS / 8][4], float (&less_dq)[SPLIT][HS / 8][4], float (&d)[TILES][NT][4],
                    float (&g_sum)[2 * TILES], NumberSum (&number_sum)[2 * TILES], float (&less_sum)[2 * TILES],
                    const FlashRow (&row)[2 * TILES], const Own<X, HS, TILES, KEEP> &own_q,
                    const Own<X, HS, TILES, KEEP_DOUT> &own_dout, const X *k, const X *v, int own_row, int key,
                    bool first, const FlashCall<X> &call) {
    float s[TILES][NT][4], along[may_reweight<POST> ? TILES : 1][NT][4];
    int from[2 * TILES] = {};
    if (MASKED) first_keys(from, call, own_row);
    set_zero(s);
    matmul_by_rows(s, own_q, k);
    if (!WIDE) {
        set_zero(d);
        matmul_by_rows(d, own_dout, v);
    }
    const bool reweight = is_reweight<X, POST>(call);
    const int phi = PHI >= 0 ? PHI : call.phi;
    auto is_hidden = [&](int m, int nt, int e) {
        return MASKED && (!is_visible<false>(own_row + 16 * m, key + 8 * nt, e) ||
                          is_before(from[2 * m + e / 2], key + 8 * nt, e));
    };
    if constexpr (may_reweight<POST>) {
        if (reweight)
            with_power<POST>(call.power, [&](auto P) {
                UNROLL
                for (int i = 0; i < TILES * NT; i++) {
                    const int m = i / NT, nt = i % NT;
                    const bool hidden[4] = {is_hidden(m, nt, 0), is_hidden(m, nt, 1), is_hidden(m, nt, 2),
                                            is_hidden(m, nt, 3)};
                    dq_reweight<X, PHI, P.value>(d[m][nt], along[m][nt], less_sum + 2 * m, number_sum + 2 * m, s[m][nt],
                                                 hidden, row + 2 * m, call);
                }
            });
    }
    if constexpr (less_first<X, HS, POST>) {
        if (reweight && first) return;
        UNROLL
        for (int i = 0; i < TILES * NT * 4 && reweight; i++) {
            const int m = i / 4 / NT, nt = i / 4 % NT, e = i % 4;
            const FlashRow &at = row[2 * m + e / 2];
            d[m][nt][e] = reweight_factor(at, call) * d[m][nt][e] - at.less * along[m][nt][e];
        }
    }
    UNROLL
    for (int i = 0; i < TILES * NT && !reweight; i++) {
        const int m = i / NT, nt = i % NT;
        float f[4], slope[4], w[4];
        backward_values<X, PHI, POST, false>(d[m][nt], f, slope, w, s[m][nt], row + 2 * m, call);
        UNROLL
        for (int e = 0; e < 4 && phi_learns(phi); e++) {
            const FlashRow &at = row[2 * m + e / 2];
            const float z = (s[m][nt][e] * at.scale + at.bias) * (1 / unit<X, PHI>);
            if (!is_hidden(m, nt, e))
                number_sum[2 * m + e / 2].t += d[m][nt][e] * phi_slope_by_number(phi, z, at.number, f[e], slope[e]);
        }
        UNROLL
        for (int e = 0; e < 4; e++) d[m][nt][e] = is_hidden(m, nt, e) ? 0 : d[m][nt][e] * slope[e];
    }
    if (call.g && !reweight) {
        UNROLL
        for (int i = 0; i < TILES * NT; i++) {
            const int m = i / NT, nt = i % NT;
            UNROLL
            for (int e = 0; e < 4; e++) g_sum[2 * m + e / 2] += d[m][nt][e] * s[m][nt][e];
        }
    }
    matmul_by_columns<X, HS>(dq, d, k);
    if constexpr (splits_dq<X, HS, POST>) {
        if (reweight && norm_is_sum(call.norm)) matmul_by_columns<X, HS>(less_dq, along, k);
    }
}

// Finishes a row under reweight, whose part of dq in this lane is at `half`: applies K and less.
template <int CT>
DEVICE void dq_combine(float (&dq)[CT][4], const float (&less_dq)[CT][4], int half, float K, float less) {
    UNROLL
    for (int c = 0; c < CT; c++) {
        UNROLL
        for (int e = 2 * half; e < 2 * half + 2; e++) dq[c][e] = K * dq[c][e] - less * less_dq[c][e];
    }
}

// A lane's part of g_i = sum_j dz s = q_i · sum_j dz k_j. q: the lane's part of the row in the tile
template <class X, int CT>
DEVICE float dot_q(const float (&dq)[CT][4], int half, const X *q) {
    float sum = 0;
    UNROLL
    for (int c = 0; c < CT; c++)
        sum += dq[c][2 * half] * to_float(q[8 * c]) + dq[c][2 * half + 1] * to_float(q[8 * c + 1]);
    return sum;
}

template <class X, int HS, int PHI, int POST, bool WIDE>
KERNEL void flash_dq_kernel(const FlashCall<X> call) {
    typedef RowsPlan<X, HS, PHI, POST, WIDE> P;
    enum {
        TILES = P::TILES,
        OWN = P::OWN,
        KEYS = P::STREAM,
        CHUNK = P::CHUNK,
        NT = P::NT,
        STEP = tile_step<HS>,
        THREADS = P::THREADS
    };
    DYNAMIC_SHARED(X, shared);
    X *q_tile = shared, *dout_tile = q_tile + OWN * STEP, *k_tiles = dout_tile + OWN * STEP,
      *v_tiles = k_tiles + 2 * KEYS * STEP;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, T = call.T, b = blockIdx.y / call.NH,
        h = blockIdx.y % call.NH, kv = h / (call.NH / call.NKV);
    // Longest rows first.
    int row0 = (gridDim.x - 1 - blockIdx.x) * OWN, warp_row = row0 + warp * 16 * TILES;
    const X *q = head_at(call, call.q, b, h), *k = head_at(call, call.k, b, kv), *v = head_at(call, call.v, b, kv);
    const X *dout = head_at(call, call.dout, b, h) + row0 * call.dout.row;
    FlashRow *rows = call.rows + (size_t)blockIdx.y * T;
    const bool reweight = is_reweight<X, POST>(call),
               two_sweeps = less_first<X, HS, POST> && reweight && norm_is_sum(call.norm);

    FlashRow row[2 * TILES];
    float g_sum[2 * TILES], less_sum[2 * TILES];
    NumberSum number_sum[2 * TILES] = {};
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        int i = warp_row + 8 * r + g;
        row[r] = i < T ? rows[i] : FlashRow();
        g_sum[r] = less_sum[r] = 0;
        if (POST == FLASH_PLAIN) row[r].by_d = row[r].factor, row[r].by_D = row[r].factor * row[r].D;
    }
    float dq[TILES][HS / 8][4], less_dq[splits_dq<X, HS, POST> ? TILES : 1][HS / 8][4];
    set_zero(dq);
    set_zero(less_dq);

    int last = row0 + OWN < T ? row0 + OWN : T, low = first_key(call, b, row0) / KEYS,
        tiles = (last - 1) / KEYS + 1 - low, steps = two_sweeps ? 2 * tiles : tiles;
    auto key_of = [&](int step) { return ((two_sweeps && step >= tiles ? step - tiles : step) + low) * KEYS; };
    auto load = [&](int step) {
        int key0 = key_of(step);
        tile_load<KEYS, HS, THREADS>(k_tiles + step % 2 * KEYS * STEP, k + key0 * call.k.row, call.k.row, T - key0,
                                     call.HS);
        if (!WIDE)
            tile_load<KEYS, HS, THREADS>(v_tiles + step % 2 * KEYS * STEP, v + key0 * call.v.row, call.v.row, T - key0,
                                         call.VS);
        copy_async_commit();
    };
    tile_load<OWN, HS, THREADS>(q_tile, q + row0 * call.q.row, call.q.row, T - row0, call.HS);
    if (!WIDE) tile_load<OWN, HS, THREADS>(dout_tile, dout, call.dout.row, T - row0, call.VS);
    load(0);
    Own<X, HS, TILES, P::KEEP> own_q = {q_tile + warp * 16 * TILES * STEP, {}},
                               own_dout = {dout_tile + warp * 16 * TILES * STEP, {}};

    for (int step = 0; step < steps; step++) {
        tile_wait();
        if (step + 1 < steps) load(step + 1);
        if (step == 0) {
            own_keep(own_q);
            if (!WIDE) own_keep(own_dout);
        }
        const X *k_tile = k_tiles + step % 2 * KEYS * STEP, *v_tile = v_tiles + step % 2 * KEYS * STEP;
        const int key0 = key_of(step), visible = warp_row + 16 * TILES - key0;
        const bool first = two_sweeps && step < tiles;
        float d[TILES][NT][4];
        if constexpr (WIDE) {
            set_zero(d);
            matmul_wide<X, HS, OWN, KEYS, THREADS>(d, own_dout, dout_tile, v_tiles, dout, call.dout.row, T - row0,
                                                   v + key0 * call.v.row, call.v.row, T - key0, call.VS);
        }
        UNROLL_NOT
        for (int c = 0; c < KEYS && c < visible; c += CHUNK) {
            bool masked = key0 + c + CHUNK - 1 > warp_row;
            if (call.first) {
                if (key0 + c + CHUNK <= first_key(call, b, warp_row)) continue;
                masked = masked || key0 + c < first_key(call, b, warp_row + 16 * TILES - 1);
            }
            const X *k_rows = k_tile + c * STEP, *v_rows = v_tile + c * STEP;
            if (masked)
                dq_keys<X, HS, PHI, POST, WIDE, true>(dq, less_dq, d, g_sum, number_sum, less_sum, row, own_q, own_dout,
                                                      k_rows, v_rows, warp_row, key0 + c, first, call);
            else
                dq_keys<X, HS, PHI, POST, WIDE, false>(dq, less_dq, d, g_sum, number_sum, less_sum, row, own_q,
                                                       own_dout, k_rows, v_rows, warp_row, key0 + c, first, call);
        }
        if (two_sweeps && step == tiles - 1) {
            UNROLL
            for (int r = 0; r < 2 * TILES; r++) {
                int i = warp_row + 8 * r + g;
                row[r].less = reweight_less(less_sum[r], row[r], call, place_of(call, b, h, i).n);
                if (i < T && threadIdx.x % 4 == 0) rows[i].less = row[r].less;
                number_sum[r] = {};    // only the second sweep counts
            }
        }
    }

    float by[2 * TILES];
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        int i = warp_row + 8 * r + g;
        by[r] = row[r].scale * (1 / unit<X, PHI>);
        float less = row[r].less;
        if constexpr (splits_dq<X, HS, POST>) {
            if (reweight) {
                FlashRow end = i < T ? rows[i] : FlashRow();    // reloaded, to save registers
                less = reweight_less(less_sum[r], end, call, place_of(call, b, h, i).n);
                dq_combine(dq[r / 2], less_dq[r / 2], r % 2, reweight_factor(end, call), less);
                __syncwarp();
                if (i < T && threadIdx.x % 4 == 0) rows[i].less = less;
            }
        }
        if (reweight && call.g)
            g_sum[r] = dot_q(dq[r / 2], r % 2, own_q.tile + (8 * r + g) * STEP + threadIdx.x % 4 * 2);
        float of_row = row_sum(g_sum[r]);
        if (call.g && i < T && threadIdx.x % 4 == 0) call.g[(size_t)blockIdx.y * T + i] = of_row;
        if (!phi_learns(PHI >= 0 ? PHI : call.phi) || !call.by_number) continue;
        of_row = row_sum(number_sum[r].t);
        if (reweight) of_row = reweight_factor(row[r], call) * of_row - less * row_sum(number_sum[r].less);
        if (i < T && threadIdx.x % 4 == 0) call.by_number[(size_t)blockIdx.y * T + i] = of_row;
    }
    store_rows(head_at(call, call.dq, b, h) + warp_row * call.dq.row, call.dq.row, dq, by, T - warp_row, call.HS);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward: dk and dv, by key blocks

enum KeysMode { KEYS_BOTH, KEYS_DK_WIDE, KEYS_DV };    // dk and dv; only dk, of a wide v; only HS columns of dv

// Weights and gradients of rows whose first key comes after the lane's become 0. Only runs where call.first is.
template <class X, int TILES, int NT>
DEVICE void keys_hide_before(float (&w)[TILES][NT][4], float (&d)[TILES][NT][4], const FlashCall<X> &call, int own_key,
                             int query) {
    const int lane = threadIdx.x % 32, b = blockIdx.y / call.NKV;
    UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int nt = i / 2, first = first_key(call, b, query + 8 * nt + lane % 4 * 2 + i % 2);
        UNROLL
        for (int r = 0; r < 2 * TILES; r++) {
            const int e = r % 2 * 2 + i % 2;
            if (own_key + 8 * r + lane / 4 < first) w[r / 2][nt][e] = d[r / 2][nt][e] = 0;
        }
    }
}

// Processes a chunk of queries (the first is `query`; they are rows of the tiles q, dout and row_tile) for the warp's
// keys from `own_key` on. MASKED: not every query sees every key. d: see dq_keys
template <class X, int HS, int PHI, int POST, int MODE, bool MASKED, int TILES, int NT, int ROWS, bool KEEP>
DEVICE void dkv_rows(float (&dk)[TILES][HS / 8][4], float (&dv)[TILES][HS / 8][4], float (&d)[TILES][NT][4],
                     const Own<X, HS, TILES, KEEP> &own_k, const Own<X, HS, TILES, KEEP> &own_v, const X *q,
                     const X *dout, const float4 *row_tile, int own_key, int query, const FlashCall<X> &call) {
    float s[TILES][NT][4];
    set_zero(s);
    matmul_by_rows(s, own_k, q);
    if (MODE != KEYS_DK_WIDE) set_zero(d);
    if (MODE == KEYS_BOTH) matmul_by_rows(d, own_v, dout);
    with_power<POST>(call.power, [&](auto P) {
        UNROLL
        for (int nt = 0; nt < NT; nt++) {
            FlashRow row[2];
            UNROLL
            for (int i = 0; i < 2; i++) {
                int at = 8 * nt + threadIdx.x % 4 * 2 + i;
                float4 x = row_tile[at], y = row_tile[ROWS + at];
                row[i] = {x.x, x.y, x.z, x.w, {y.x}, {y.y}, y.z, y.w};
            }
            UNROLL
            for (int m = 0; m < TILES; m++) {
                float f[4], slope[4], w[4];
                backward_values<X, PHI, POST, true, P.value>(d[m][nt], f, slope, w, s[m][nt], row, call);
                UNROLL
                for (int e = 0; e < 4; e++) {
                    bool hidden = MASKED && !is_visible<true>(own_key + 16 * m, query + 8 * nt, e);
                    float dz = d[m][nt][e] * slope[e];
                    if (POST != FLASH_PLAIN && !is_reweight<X, POST>(call)) dz *= row[e % 2].scale * (1 / unit<X, PHI>);
                    s[m][nt][e] = hidden ? 0 : w[e];
                    d[m][nt][e] = hidden ? 0 : dz;
                }
            }
        }
    });
    if (MASKED && call.first) keys_hide_before(s, d, call, own_key, query);
    if (MODE != KEYS_DK_WIDE) matmul_by_columns<X, HS>(dv, s, dout);
    if (MODE != KEYS_DV) matmul_by_columns<X, HS>(dk, d, q);
}

template <class X, int HS, int PHI, int POST, int MODE>
KERNEL void flash_dkv_kernel(const FlashCall<X> call) {
    typedef KeysPlan<X, HS, PHI, MODE == KEYS_DK_WIDE> P;
    enum {
        TILES = P::TILES,
        OWN = P::OWN,
        ROWS = P::STREAM,
        CHUNK = P::CHUNK,
        NT = P::NT,
        STEP = tile_step<HS>,
        THREADS = P::THREADS,
        DK = MODE != KEYS_DV,
        DV = MODE != KEYS_DK_WIDE,
        WIDE = MODE == KEYS_DK_WIDE
    };
    DYNAMIC_SHARED(X, shared);
    X *k_tile = shared, *v_tile = k_tile + OWN * STEP, *q_tiles = v_tile + OWN * STEP,
      *dout_tiles = q_tiles + 2 * ROWS * STEP;
    // (2,2,ROWS): halves of FlashRow
    float4 *row_tiles = (float4 *)(dout_tiles + 2 * ROWS * STEP);
    int warp = threadIdx.x / 32, T = call.T, b = blockIdx.y / call.NKV, kv = blockIdx.y % call.NKV;
    int key0 = blockIdx.x * OWN, warp_key = key0 + warp * 16 * TILES, column0 = blockIdx.z * HS,
        columns = call.VS - column0;
    const X *k = head_at(call, call.k, b, kv) + key0 * call.k.row;
    const X *v = head_at(call, call.v, b, kv) + key0 * call.v.row + column0;
    const int first = key0 / ROWS * ROWS, group = call.NH / call.NKV;
    // Rows that start after these keys see none of them, and neither do later rows.
    auto sees_none = [&](int row) { return call.first && key0 + OWN <= first_key(call, b, row); };

    tile_load<OWN, HS, THREADS>(k_tile, k, call.k.row, T - key0, call.HS);
    if (MODE == KEYS_BOTH) tile_load<OWN, HS, THREADS>(v_tile, v, call.v.row, T - key0, columns);
    Own<X, HS, TILES, P::KEEP> own_k = {k_tile + warp * 16 * TILES * STEP, {}},
                               own_v = {v_tile + warp * 16 * TILES * STEP, {}};
    float dk[TILES][HS / 8][4], dv[TILES][HS / 8][4];
    set_zero(dk);
    set_zero(dv);

    UNROLL_NOT
    for (int member = 0; member < group; member++) {    // the query heads that share these keys
        const int h = kv * group + member;
        const X *q = head_at(call, call.q, b, h), *dout = head_at(call, call.dout, b, h) + column0;
        auto load = [&](int row0) {
            int stage = row0 / ROWS % 2;
            tile_load<ROWS, HS, THREADS>(q_tiles + stage * ROWS * STEP, q + row0 * call.q.row, call.q.row, T - row0,
                                         call.HS);
            if (!WIDE)
                tile_load<ROWS, HS, THREADS>(dout_tiles + stage * ROWS * STEP, dout + row0 * call.dout.row,
                                             call.dout.row, T - row0, columns);
            if (int i = anew(threadIdx.x); i < 2 * ROWS) {
                static_assert(2 * ROWS <= THREADS, "each thread copies at most half a row");
                const float4 *rows = (const float4 *)(call.rows + ((size_t)anew(blockIdx.y) * group + member) * T);
                bool valid = row0 + i % ROWS < T;
                copy_async_16(row_tiles + stage * 2 * ROWS + i, rows + (valid ? 2 * (row0 + i % ROWS) + i / ROWS : 0),
                              valid);
            }
            copy_async_commit();
        };
        if (member > 0) __syncthreads();    // the previous head's tiles are free
        load(first);
        for (int row0 = first; row0 < T && !sees_none(row0); row0 += ROWS) {
            tile_wait();
            if (row0 + ROWS < T && !sees_none(row0 + ROWS)) load(row0 + ROWS);
            if (row0 == first && member == 0) {
                own_keep(own_k);
                if (MODE == KEYS_BOTH) own_keep(own_v);
            }
            const int stage = row0 / ROWS % 2;
            const X *q_tile = q_tiles + stage * ROWS * STEP, *dout_tile = dout_tiles + stage * ROWS * STEP;
            const float4 *row_tile = row_tiles + stage * 2 * ROWS;
            float d[TILES][NT][4];
            if constexpr (WIDE) {
                set_zero(d);
                matmul_wide<X, HS, OWN, ROWS, THREADS>(d, own_v, v_tile, dout_tiles, v, call.v.row, T - key0,
                                                       dout + row0 * call.dout.row, call.dout.row, T - row0, call.VS);
            }
            UNROLL_NOT
            for (int c = 0; c < ROWS && row0 + c < T; c += CHUNK) {
                if (row0 + c + CHUNK <= warp_key) continue;
                bool masked = row0 + c < warp_key + 16 * TILES - 1;
                if (call.first) {
                    if (warp_key + 16 * TILES <= first_key(call, b, row0 + c)) continue;
                    masked = masked || warp_key < first_key(call, b, row0 + c + CHUNK - 1);
                }
                const X *q_rows = q_tile + c * STEP, *dout_rows = dout_tile + c * STEP;
                if (masked)
                    dkv_rows<X, HS, PHI, POST, MODE, true, TILES, NT, ROWS>(dk, dv, d, own_k, own_v, q_rows, dout_rows,
                                                                            row_tile + c, warp_key, row0 + c, call);
                else
                    dkv_rows<X, HS, PHI, POST, MODE, false, TILES, NT, ROWS>(dk, dv, d, own_k, own_v, q_rows, dout_rows,
                                                                             row_tile + c, warp_key, row0 + c, call);
            }
        }
    }

    float by[2 * TILES];
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) by[r] = 1;
    // Recomputed here, so that they occupy no registers in the loop.
    b = anew(blockIdx.y) / call.NKV, kv = anew(blockIdx.y) % call.NKV;
    warp_key = key0 + anew(threadIdx.x) / 32 * 16 * TILES;
    if (DK)
        store_rows(head_at(call, call.dk, b, kv) + warp_key * call.dk.row, call.dk.row, dk, by, T - warp_key, call.HS);
    if (DV)
        store_rows(head_at(call, call.dv, b, kv) + warp_key * call.dv.row + column0, call.dv.row, dv, by, T - warp_key,
                   columns);
}

// ---------------------------------------------------------------------------------------------------------------------
// Before and after

enum { SEGMENT = 64 };    // positions whose v are summed separately first

// registers: at most 48 (flash_segments_kernel, flash_prefix_kernel, flash_rows_kernel)
// registers: at most 48 (flash_scalars_kernel)
// registers: at most 56 (flash_positions_kernel)
// registers: at most 32 (flash_scalars_add_kernel, flash_positions_add_kernel)
// segments (B NKV, T/SEGMENT, VS): sums of v over SEGMENT positions. One thread per column.
template <class X>
KERNEL void flash_segments_kernel(float *segments, const FlashCall<X> call) {
    int c = blockIdx.z * blockDim.x + threadIdx.x, from = blockIdx.x * SEGMENT;
    if (c >= call.VS) return;
    const X *v = head_at(call, call.v, blockIdx.y / call.NKV, blockIdx.y % call.NKV) + c;
    float sum = 0;
    for (int t = from; t < from + SEGMENT && t < call.T; t++) sum += to_float(v[t * call.v.row]);
    segments[((size_t)blockIdx.y * gridDim.x + blockIdx.x) * call.VS + c] = sum;
}

// prefix (B NKV, T, VS): the sum of v_j over the keys j that row t sees
template <class X>
KERNEL void flash_prefix_kernel(float *prefix, const float *segments, const FlashCall<X> call) {
    int c = blockIdx.z * blockDim.x + threadIdx.x, b = blockIdx.y / call.NKV, from = blockIdx.x * SEGMENT;
    if (c >= call.VS) return;
    const X *v = head_at(call, call.v, b, blockIdx.y % call.NKV) + c;
    float sum = 0;
    // What the row before this segment sees: the rest of one segment, then whole segments.
    int seen = from ? first_key(call, b, from - 1) : 0, at = seen;
    for (; at % SEGMENT && at < from; at++) sum += to_float(v[at * call.v.row]);
    for (int i = at / SEGMENT; i < (int)blockIdx.x; i++)
        sum += segments[((size_t)blockIdx.y * gridDim.x + i) * call.VS + c];
    for (int t = from; t < from + SEGMENT && t < call.T; t++) {
        int first = first_key(call, b, t);
        if (first != seen) {
            sum = 0;
            for (int j = first; j < t; j++) sum += to_float(v[j * call.v.row]);
            seen = first;
        }
        sum += to_float(v[t * call.v.row]);
        prefix[((size_t)blockIdx.y * call.T + t) * call.VS + c] = sum;
    }
}

// What the backward pass needs to know about row n, from its statistics (forward_end), D = dO · O and, for the posts
// that recenter, along = dO · sum_{j <= i} v_j. in_unit: the unit of z in the instance.
template <class X>
DEVICE FlashRow backward_row(const FlashCall<X> &call, RowPlace at, float4 stats, float D, float along, float in_unit) {
    bool late = at.n > POST_FROM, is_sum = norm_is_sum(call.norm);
    float n = (float)at.n, shift = row_shift(call, at, stats.x / in_unit);
    FlashRow row = {row_scale(call.scale, at) * in_unit, stats.x, stats.y, is_sum ? D : 0, stats.z, 0, 0,
                    phi_number(call.phi, at, shift)};
    if (call.post == POST_NEGATE) row.D = -row.D;
    if (call.post == POST_NONE || call.post == POST_NEGATE || call.post == POST_RECTIFY)
        row.by_d = row.factor * (row.scale / in_unit), row.by_D = row.by_d * row.D;
    if (call.post == POST_RECENTER && late) row.less = along / n;
    if (call.post == POST_RECENTER_L1 && late) row.D = D, row.less = (along - D * stats.w) / n;
    if (call.post == POST_REWEIGHT) {
        reweight_numbers<X>(&row.factor, &row.mean, stats.y, stats.z, at.n);
        row.D = D, row.inverse_sum = stats.w;    // flash_dq_kernel sets less
    }
    return row;
}

enum { ROW_LANES = 8 };    // lanes per row in flash_rows_kernel

template <class X>
KERNEL void flash_rows_kernel(const FlashCall<X> call, float in_unit) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / ROW_LANES, rows = (size_t)call.B * call.NH * call.T;
    bool there = i < rows;
    if (!there) i = rows - 1;    // stay in range; the lane still takes part in the shuffles
    int lane = threadIdx.x % ROW_LANES, t = i % call.T, h = i / call.T % call.NH, b = i / call.T / call.NH;
    const X *dout_row = head_at(call, call.dout, b, h) + t * call.dout.row;
    const X *out_row = head_at(call, call.out, b, h) + t * call.out.row;
    size_t prefix = (((size_t)b * call.NKV + h / (call.NH / call.NKV)) * call.T + t) * call.VS;
    float D = 0, along = 0;
    for (int c = lane * Pack<X>::size; c < call.VS; c += ROW_LANES * Pack<X>::size) {
        Pack<X> dout, out;
        unpack_16(dout, load_16(dout_row + c));
        unpack_16(out, load_16(out_row + c));
        UNROLL
        for (int e = 0; e < Pack<X>::size; e++) D += dout.x[e] * out.x[e];
        if (call.rest) {
            unpack_16(out, load_16(call.rest + i * call.VS + c));
            UNROLL
            for (int e = 0; e < Pack<X>::size; e++) D += dout.x[e] * out.x[e];
        }
        if (!call.prefix) continue;
        UNROLL
        for (int e = 0; e < Pack<X>::size; e++) along += dout.x[e] * call.prefix[prefix + c + e];
    }
    for (int step = ROW_LANES / 2; step > 0; step /= 2) {
        D += __shfl_xor_sync(0xFFFFFFFFu, D, step);
        along += __shfl_xor_sync(0xFFFFFFFFu, along, step);
    }
    if (there && lane == 0)
        call.rows[i] = backward_row(call, place_of(call, b, h, t), *(const float4 *)(call.stats + i * FLASH_STATS), D,
                                    along, in_unit);
}

// The gradients of the scalars take two stages: each block writes partial sums over a fixed number of rows or heads,
// and a second kernel adds these in order. Their number depends only on the shape, so every GPU gives the same bits.
enum { SCALAR_THREADS = 256, SCALAR_ROWS = 1024, POSITION_THREADS = 128, POSITION_HEADS = 16 };

// What row t of head h contributes to the gradients of the scalars that act in `stage`: the derivative of the loss with
// respect to its c (g), to phi's number, or to the ln of norm_extra (-D norm_extra/Z, with D as norm sees it). i: the
// index in call.rows
template <class X>
DEVICE float row_grad(const FlashCall<X> &call, int stage, RowPlace at, size_t i, float in_unit) {
    if (stage == IN_SCALE) return call.g[i];
    if (stage == IN_PHI) return call.by_number[i];
    FlashRow row = call.rows[i];
    float D = call.post == POST_REWEIGHT                          ? row.less
              : call.post == POST_RECENTER_L1 && at.n > POST_FROM ? 0
                                                                  : row.D * row.factor;
    return -D * norm_extra(call.norm, at, row_shift(call, at, row.bias / in_unit));
}

// partials (SCALAR_COUNT,NH,gridDim.x): for each per-head scalar whose gradient is needed, the sum of row_slope
// row_grad over SCALAR_ROWS rows of the batch from row blockIdx.x SCALAR_ROWS on
template <class X>
KERNEL void flash_scalars_kernel(double *partials, ScalarGrads wanted, const FlashCall<X> call, float in_unit) {
    int h = blockIdx.y, first = blockIdx.x * SCALAR_ROWS, rows = call.B * call.T,
        last = first + SCALAR_ROWS < rows ? first + SCALAR_ROWS : rows;
    double sums[SCALAR_COUNT] = {};
    for (int i = first + threadIdx.x; i < last; i += SCALAR_THREADS) {
        int t = i % call.T;
        size_t at = ((size_t)(i / call.T) * call.NH + h) * call.T + t;
        RowPlace place = place_of(call, i / call.T, h, t);
        UNROLL
        for (int x = 0; x < SCALAR_COUNT; x++)
            if (wanted.of[x] && scalar_width(x) == PER_HEAD)
                sums[x] += row_slope(x, call.scale, place) * row_grad(call, scalar_stage(x), place, at, in_unit);
    }
    UNROLL
    for (int x = 0; x < SCALAR_COUNT; x++) {
        if (!wanted.of[x] || scalar_width(x) != PER_HEAD) continue;
        double sum = block_sum_double<SCALAR_THREADS>(sums[x]);
        if (threadIdx.x == 0) partials[((size_t)x * gridDim.y + h) * gridDim.x + blockIdx.x] = sum;
    }
}

// grads.of[x][h] += the partial sums (SCALAR_COUNT,NH,pieces) of each per-head scalar x. One block per head.
template <int THREADS>
KERNEL void flash_scalars_add_kernel(ScalarGrads grads, const double *partials, int pieces) {
    UNROLL
    for (int x = 0; x < SCALAR_COUNT; x++) {
        if (!grads.of[x] || scalar_width(x) != PER_HEAD) continue;
        const double *from = partials + ((size_t)x * gridDim.x + blockIdx.x) * pieces;
        double sum = 0;
        for (int j = threadIdx.x; j < pieces; j += THREADS) sum += from[j];
        sum = block_sum_double<THREADS>(sum);
        if (threadIdx.x == 0) grads.of[x][blockIdx.x] += (float)sum;
    }
}

// partials (gridDim.y,T): for a per-position scalar, the sum of row_slope row_grad over POSITION_HEADS of the batch's
// heads and over the rows with n visible keys. One thread per n.
template <class X>
KERNEL void flash_positions_kernel(double *partials, int scalar, const FlashCall<X> call, float in_unit) {
    int n = blockIdx.x * POSITION_THREADS + threadIdx.x + 1, from = blockIdx.y * POSITION_HEADS,
        heads = call.B * call.NH;
    if (n > call.T) return;
    double sum = 0;
    for (int i = from; i < from + POSITION_HEADS && i < heads; i++) {
        // Without `first`, that is only row n - 1.
        for (int t = n - 1; t < (call.first ? call.T : n); t++) {
            if (t + 1 - first_key(call, i / call.NH, t) != n) continue;
            RowPlace place = place_of(call, i / call.NH, i % call.NH, t);
            float grad = row_grad(call, scalar_stage(scalar), place, (size_t)i * call.T + t, in_unit);
            sum += row_slope(scalar, call.scale, place) * grad;
        }
    }
    partials[(size_t)blockIdx.y * call.T + n - 1] = sum;
}

// grads[t] += its partial sums (pieces,T)
template <int THREADS>
KERNEL void flash_positions_add_kernel(float *grads, const double *partials, int pieces, int T) {
    int t = blockIdx.x * THREADS + threadIdx.x;
    if (t >= T) return;
    double sum = 0;
    for (int i = 0; i < pieces; i++) sum += partials[(size_t)i * T + t];
    grads[t] += (float)sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

// The bytes of shared memory per block.
template <class P, int HS, class X>
constexpr size_t flash_shared(size_t own_tiles, size_t streamed_tiles) {
    return (own_tiles * P::OWN + streamed_tiles * P::STREAM) * tile_step<HS> * sizeof(X);
}

template <class X, int HS, int PHI, int POST>
constexpr size_t forward_shared = flash_shared<ForwardPlan<X, HS, PHI, POST>, HS, X>(1, 4);

template <class X, int HS, int PHI, int POST, bool WIDE>
constexpr size_t dq_shared = flash_shared<RowsPlan<X, HS, PHI, POST, WIDE>, HS, X>(2, 4);

template <class X, int HS, int PHI, bool WIDE>
constexpr size_t dkv_shared =
    flash_shared<KeysPlan<X, HS, PHI, WIDE>, HS, X>(2, 4) + 2 * KeysPlan<X, HS, PHI, WIDE>::STREAM * sizeof(FlashRow);

// The most that any of these kernels requests; those for a wide v use smaller tiles.
template <class X, int HS, int PHI, int POST>
constexpr size_t most_shared =
    std::max({forward_shared<X, HS, PHI, POST>, dq_shared<X, HS, PHI, POST, false>, dkv_shared<X, HS, PHI, false>});

template <class P, class X>
dim3 flash_grid(const FlashCall<X> &call, int heads, int columns) {
    return dim3((call.T - 1) / P::OWN + 1, call.B * heads, columns);
}

template <class X, int HS, int PHI, int POST>
void flash_forward_launch(const FlashCall<X> &call, cudaStream_t stream) {
    typedef ForwardPlan<X, HS, PHI, POST> P;
    launch(flash_forward_kernel<X, HS, PHI, POST>, flash_grid<P>(call, call.NH, (call.VS - 1) / HS + 1),
           dim3(P::THREADS), forward_shared<X, HS, PHI, POST>, stream, call);
}

template <class X, int HS, int PHI, int POST, int MODE>
void flash_dkv_launch(const FlashCall<X> &call, int columns, cudaStream_t stream) {
    typedef KeysPlan<X, HS, PHI, MODE == KEYS_DK_WIDE> P;
    launch(flash_dkv_kernel<X, HS, PHI, POST, MODE>, flash_grid<P>(call, call.NKV, columns), dim3(P::THREADS),
           dkv_shared<X, HS, PHI, MODE == KEYS_DK_WIDE>, stream, call);
}

template <class X, int HS, int PHI, int POST, bool WIDE>
void flash_dq_launch(const FlashCall<X> &call, cudaStream_t stream) {
    typedef RowsPlan<X, HS, PHI, POST, WIDE> P;
    launch(flash_dq_kernel<X, HS, PHI, POST, WIDE>, flash_grid<P>(call, call.NH, 1), dim3(P::THREADS),
           dq_shared<X, HS, PHI, POST, WIDE>, stream, call);
}

template <class X, int HS, int PHI, int POST>
void flash_backward_launch(const FlashCall<X> &call, cudaStream_t stream) {
    // One kernel computes dk and dv, except for 128 columns in float32, which need too many registers.
    constexpr bool together = HS < 128 || is_bf16<X>;
    if (call.VS <= HS) flash_dq_launch<X, HS, PHI, POST, false>(call, stream);
    if constexpr (HS == 128) {
        if (call.VS > HS) flash_dq_launch<X, HS, PHI, POST, true>(call, stream);
        if (call.VS > HS || !together) {
            flash_dkv_launch<X, HS, PHI, POST, KEYS_DK_WIDE>(call, 1, stream);
            flash_dkv_launch<X, HS, PHI, POST, KEYS_DV>(call, (call.VS - 1) / HS + 1, stream);
            return;
        }
    }
    if constexpr (together) flash_dkv_launch<X, HS, PHI, POST, KEYS_BOTH>(call, 1, stream);
}
#endif

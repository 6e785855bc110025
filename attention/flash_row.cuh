// What flash.cuh's kernels compute for each row and element, whichever matmul instructions they use: phi, powers, and
// which keys a row sees.
//
// Tested by dev/tests/test_flash.py, through the kernels.
#ifndef ATTENTION_FLASH_ROW_CUH
#define ATTENTION_FLASH_ROW_CUH

#include "attention/flash.h"
#include "attention/flash_tile.cuh"
#include "attention/phi.cuh"

#include <type_traits>

// ---------------------------------------------------------------------------------------------------------------------
// phi and powers

// The row of element e of N: BY_COLUMN, e belongs to one of the two rows that a lane has among an mma's columns;
// otherwise to one of those that it owns.
template <bool BY_COLUMN>
DEVICE int row_of(int e) {
    return BY_COLUMN ? e % 2 : e / 2;
}

// The phi of an instance: known at compile time, or the call's.
template <int PHI, class X>
DEVICE int phi_of(const FlashCall<X> &call) {
    return PHI >= 0 ? PHI : call.phi;
}

template <class X, int PHI, int KIND, bool BY_COLUMN, Wanted WANTED, Divides DIVIDES, int N, class Row>
DEVICE void phi_values_of(float (&z)[N], float (&slope)[N], const Row *row) {
    UNROLL
    for (int e = 0; e < N; e++)
        phi_at<X, PHI, KIND, WANTED>(z[e], row[row_of<BY_COLUMN>(e)].number, &z[e], &slope[e], DIVIDES == ALWAYS);
}

// z (N) in, phi(z) and its slope out, or what is WANTED of them. The switch over phi, if there is one, is outside the
// loop.
template <class X, int PHI, bool BY_COLUMN, Wanted WANTED, Divides DIVIDES = NEVER, int N, class Row>
DEVICE void phi_values(int phi, float (&z)[N], float (&slope)[N], const Row *row) {
    if constexpr (PHI >= 0) {
        phi_values_of<X, PHI, PHI, BY_COLUMN, WANTED, DIVIDES>(z, slope, row);
    } else {
        switch (phi) {
// case PHI_EXP: phi_values_of<X, PHI, PHI_EXP, BY_COLUMN, WANTED, DIVIDES>(z, slope, row); break; ...
#define CASE(kind_, ...) case kind_: phi_values_of<X, PHI, kind_, BY_COLUMN, WANTED, DIVIDES>(z, slope, row); break;
            PHI_VALUES(CASE)
#undef CASE
        }
    }
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
        for (int e = 0; e < N; e++) {
            x[e] = w[e];
            w[e] = 1;
        }
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
        for (int e = 0; e < N; e++) {
            const float x = is_bf16<X> ? exp2_fast(P * log2_fast(w[e])) : powf(w[e], P);
            w[e] = w[e] > 0 ? x : w[e];
        }
    }
}

// Calls function(P) with reweight's P as a compile-time constant if it is a common one, otherwise with 0.
template <int POST, class Function>
DEVICE void with_power(float P, Function function) {
    if (POST == FLASH_REWEIGHT && P == 15) function(std::integral_constant<int, 15>());
    else if (POST == FLASH_REWEIGHT && P == 3) function(std::integral_constant<int, 3>());
    else function(std::integral_constant<int, 0>());
}

template <class X, int POST>
DEVICE bool is_reweight(const FlashCall<X> &call) {
    return POST == FLASH_REWEIGHT || (POST == FLASH_TWO_SWEEPS && call.post == POST_REWEIGHT);
}

// Does the bias of the backward pass's rows include ln |factor|? It does for exp in flash90_backward.cuh.
template <class X>
DEVICE bool weighs_by_bias(const FlashCall<X> &call) {
    return call.dq_sums && call.phi == PHI_EXP;
}

// Is 0 <= phi' <= phi? (The FFMA that this allows overflows only where |dO · O| or |dO · v| times scale/Z does: if
// every z of a row is below -80.)
NORMALIZER_CONSTANT bool slope_within_value(int phi) {
    return phi == PHI_EXP || phi == PHI_SIGMOID || phi == PHI_SOFTPLUS;
}

// In the backward pass's rows, is D multiplied by the factor of df, while `less` holds D itself? scales_D is the same
// at compile time.
template <class X>
DEVICE bool rows_scale_D(const FlashCall<X> &call) {
    return call.dq_sums && slope_within_value(call.phi) && call.post != POST_RECENTER_L1 && call.post != POST_REWEIGHT;
}

// value_unit of an instance, from the unit of its z.
template <class X>
DEVICE float value_unit_of(const FlashCall<X> &call, float in_unit) {
    return call.phi == PHI_SOFTPLUS ? in_unit : 1;
}

template <int PHI>
constexpr bool rectifies = flash_rectifies(PHI);

// Is f rounded to X before it is summed? The matmul with v rounds it, and summing the same rounded values makes a row's
// weights add up to exactly 1 and, in a row with a single key, makes the output equal v. Otherwise d - D would not be 0
// there, and dividing by a small Z would magnify the error. exp does not need it: its slope is as small as f, and f is
// 1 in a row with one key. On compute capability 9.0, four of sigmoid's values share a division forward, and each has
// its own backward; a few round to different neighbors.
template <int PHI, int POST>
constexpr bool rounds_values = PHI != PHI_EXP && POST < FLASH_RECENTER_L1;

// x times the sign of f. In bf16 that is one instruction, which also takes the sign of a zero: at 0, any value from
// -1 to 1 is a subgradient of |f|.
template <class X>
DEVICE float signed_as(float x, float f) {
    if (is_bf16<X>) return __uint_as_float(__float_as_uint(x) ^ (__float_as_uint(f) & 0x80000000u));
    if (f < 0) return -x;
    return f > 0 ? x : 0;
}

// In a row of n equal weights, what remains of A after its mean is subtracted is 0 up to the rounding of the row's sum:
// at most about this, relative to the sum of |A| or, for A n - 1, to 1. It must not be mistaken for weight.
DEVICE float rounding_of_row(int n) {
    return 32 * FLT_EPSILON * fmaxf(1, (float)n / 512);
}

// From 1/Z and the largest f, the factor and mean that turn f into r in reweight: r = 1 + (f - mean) factor, where mean
// is the largest f. In bf16, f is not accurate enough for this form to matter, so r = f factor + mean, where mean = 1 -
// (the largest f) factor. An all-zero row gets r = 0.
template <class X>
DEVICE void reweight_numbers(float *factor, float *mean, float inverse, float largest, int n) {
    float from = n > POST_FROM ? 1 : 0, top = largest * (inverse * (float)n) - from;
    bool weight = !(top < (from > 0 ? rounding_of_row(n) : FLT_MIN));
    *factor = weight ? inverse * (float)n / top : 1;
    if (is_bf16<X>) *mean = weight ? -from / top : -INFINITY;
    else *mean = weight ? largest : INFINITY;
}

// r, or 0 for NaN; a NaN still shows in the row's other numbers.
template <class X, class Row>
DEVICE float reweight_base(float f, const Row &row) {
    return __saturatef(is_bf16<X> ? f * row.factor + row.mean : (f - row.mean) * row.factor + 1);
}

// r and q = r^(P-1) from f; q is 0 where r is.   KNOWN: P, if known, see power()
template <class X, int KNOWN, bool BY_COLUMN, int N, class Row>
DEVICE void reweight_powers(float (&r)[N], float (&q)[N], const float (&f)[N], const Row *row, float P) {
    UNROLL
    for (int e = 0; e < N; e++) r[e] = q[e] = reweight_base<X>(f[e], row[row_of<BY_COLUMN>(e)]);
    power<X, (KNOWN > 0 ? KNOWN - 1 : 0)>(q, P - 1);
    UNROLL
    for (int e = 0; KNOWN == 0 && e < N; e++) q[e] = r[e] > 0 ? q[e] : 0;
}

// factor P of a row, and K.
template <class X>
DEVICE float reweight_slope(const FlashRow &row, const FlashCall<X> &call) {
    return row.factor * call.power;
}

template <class X>
DEVICE float reweight_factor(const FlashRow &row, const FlashCall<X> &call) {
    return reweight_slope(row, call) * row.inverse_sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Positions

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

// A chunk of scores of sequence b, as positions in it: the warp's first own row, and the other side's first row.
struct Chunk {
    int own, other, b;
};

// The positions of an element.
DEVICE int own_position(Chunk chunk, Element at) {
    return chunk.own + (16 * at.m + (at.e / 2) * 8 + lane_row());
}

DEVICE int other_position(Chunk chunk, Element at) {
    return chunk.other + 8 * at.nt + (lane_column() + at.e % 2);
}

// Is the key not after its query? KEYS: the own rows are keys, otherwise queries.
template <bool KEYS>
DEVICE bool is_visible(Chunk chunk, Element at) {
    const int own = own_position(chunk, at), other = other_position(chunk, at);
    return KEYS ? own <= other : other <= own;
}

// Is the key before `first`, the first that its row, one of the lane's own, sees?
DEVICE bool is_before(int first, Chunk chunk, Element at) {
    return other_position(chunk, at) < first;
}

// The first visible keys of the rows that a lane owns, in a kernel that owns query rows.
template <int ROWS, class X>
DEVICE void first_keys(int (&first)[ROWS], const FlashCall<X> &call, Chunk chunk) {
    UNROLL
    for (int r = 0; r < ROWS; r++) first[r] = call.first ? first_key(call, chunk.b, chunk.own + 8 * r + lane_row()) : 0;
}

// What a chunk's rows do not see, in a kernel that owns query rows. MASKED: is there anything?
template <bool MASKED, int ROWS>
struct Hidden {
    Chunk chunk;
    int first[ROWS];    // see first_keys()
};

template <bool MASKED, int ROWS>
DEVICE bool is_hidden(const Hidden<MASKED, ROWS> &hidden, Element at) {
    return MASKED && (!is_visible<false>(hidden.chunk, at) || is_before(hidden.first[own_row(at)], hidden.chunk, at));
}

// A block of query rows.
struct QueryBlock {
    int b, h, kv;          // the sequence, the query head and the key-value head that it reads
    int head, part;        // the head's number among all B·NH; which HS columns of the values
    int row0, warp_row;    // the first row of the block, of the warp
};

// That of the kernels whose blockIdx.x is the row block, longest rows first, blockIdx.y the sequence and head, and
// blockIdx.z the part. The grid has the row blocks from the one of row `from` on.
template <class Plan, class X>
DEVICE QueryBlock query_block(const FlashCall<X> &call, int from = 0) {
    QueryBlock at;
    at.b = blockIdx.y / call.NH;
    at.h = blockIdx.y % call.NH;
    at.kv = at.h / (call.NH / call.NKV);
    at.head = blockIdx.y;
    at.part = blockIdx.z;
    at.row0 = (gridDim.x - 1 - blockIdx.x + from / Plan::OWN) * Plan::OWN;
    at.warp_row = at.row0 + (threadIdx.x / 32) * (16 * Plan::TILES);
    return at;
}

// The tiles of keys and values that the rows of a block go through, in double buffers: `count` tiles from tile `first`
// on, which hold every key that a row sees; with `twice`, all over again. TWICE: `twice` may be true.
template <class X, int HS, class Plan, bool TWICE>
struct KeyTiles {
    X *k_tiles, *v_tiles;    // (2,STREAM,HS) each, in shared memory
    TileSource<X> k, v;      // of the whole sequence
    int first, count;
    bool twice;
};

// shared: where the tiles go   column0: the first of the HS columns of v
template <class X, int HS, class Plan, bool TWICE>
DEVICE KeyTiles<X, HS, Plan, TWICE> key_tiles(X *shared, bool twice, const FlashCall<X> &call, QueryBlock at,
                                              int column0) {
    KeyTiles<X, HS, Plan, TWICE> tiles;
    tiles.k_tiles = shared;
    tiles.v_tiles = shared + 2 * Plan::STREAM * tile_step<HS>;
    tiles.k = {head_at(call, call.k, at.b, at.kv), call.k.row, call.T, call.HS};
    tiles.v = {head_at(call, call.v, at.b, at.kv) + column0, call.v.row, call.T, call.VS - column0};
    const int end = at.row0 + Plan::OWN < call.T ? at.row0 + Plan::OWN : call.T;
    tiles.first = first_key(call, at.b, at.row0) / Plan::STREAM;
    tiles.count = (end - 1) / Plan::STREAM + 1 - tiles.first;
    tiles.twice = twice;
    return tiles;
}

template <class X, int HS, class Plan, bool TWICE>
DEVICE int steps_of(const KeyTiles<X, HS, Plan, TWICE> &tiles) {
    return TWICE && tiles.twice ? 2 * tiles.count : tiles.count;
}

// The first key of a step's tile.
template <class X, int HS, class Plan, bool TWICE>
DEVICE int key_of(const KeyTiles<X, HS, Plan, TWICE> &tiles, int step) {
    const int tile = TWICE && tiles.twice && step >= tiles.count ? step - tiles.count : step;
    return (tile + tiles.first) * Plan::STREAM;
}

template <int HS, class Plan, class X>
DEVICE X *buffer_of(X *tiles, int step) {
    return tiles + (step % 2) * Plan::STREAM * tile_step<HS>;
}

// Starts loading a step's keys and, if wanted, its values.
template <class X, int HS, class Plan, bool TWICE>
DEVICE void key_tiles_load(const KeyTiles<X, HS, Plan, TWICE> &tiles, int step, bool values) {
    const int key = key_of(tiles, step);
    tile_load<Plan::STREAM, HS, Plan::THREADS>(buffer_of<HS, Plan>(tiles.k_tiles, step), rows_from(tiles.k, key));
    if (values)
        tile_load<Plan::STREAM, HS, Plan::THREADS>(buffer_of<HS, Plan>(tiles.v_tiles, step), rows_from(tiles.v, key));
    copy_async_commit();
}

// Calls function(masked, c) for each chunk, in the tile that starts at `key`, that any of the warp's rows sees. c: the
// chunk's first row in the tile   masked: some row does not see all of its keys
template <class Plan, class X, class Function>
DEVICE void for_each_chunk(const FlashCall<X> &call, QueryBlock at, int key, Function function) {
    const int last_row = at.warp_row + 16 * Plan::TILES - 1;
    UNROLL_NOT
    for (int c = 0; c < Plan::STREAM && key + c <= last_row; c += Plan::CHUNK) {
        bool masked = at.warp_row < key + c + Plan::CHUNK - 1;
        if (call.first) {
            if (key + c + Plan::CHUNK <= first_key(call, at.b, at.warp_row)) continue;
            masked = masked || key + c < first_key(call, at.b, last_row);
        }
        function(masked, c);
    }
}
#endif

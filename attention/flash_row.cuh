// What flash.cuh's kernels compute for each row and element, whichever matmul instructions they use: phi, and which
// keys a row sees. flash_post.cuh has what depends on the post.
//
// Tested by dev/tests/test_flash.py, through the kernels.
#ifndef ATTENTION_FLASH_ROW_CUH
#define ATTENTION_FLASH_ROW_CUH

#include "attention/flash.h"
#include "attention/flash_tile.cuh"
#include "attention/phi.cuh"

#include <type_traits>

// ---------------------------------------------------------------------------------------------------------------------
// phi

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

// Is 0 <= phi' <= phi? (The FFMA that this allows overflows only where |dO · O| or |dO · v| times scale/Z does: if
// every z of a row is below -80.)
NORMALIZER_CONSTANT bool slope_within_value(int phi) {
    return phi == PHI_EXP || phi == PHI_SIGMOID || phi == PHI_SOFTPLUS;
}

// With a cap, y = C tanh(z/C) takes the place of z for the maximum, for phi and its slope, and dz = dy (1 - (y/C)²). A
// row's bias is its offset minus the shift that y is relative to. flash_find() says which instances have caps.
template <int PHI, class X>
DEVICE bool caps(const FlashCall<X> &call) {
    return PHI < 0 && call.cap > 0;
}

// y from z
template <class X>
DEVICE float capped(float z, const FlashCall<X> &call) {
    float slope;
    return cap_both(call.cap, z, &slope);
}

// What phi is taken of, from the score s of a row.
template <int PHI, class Row, class X>
DEVICE float phi_input(float s, const Row &row, float offset, const FlashCall<X> &call) {
    if (!caps<PHI>(call)) return s * row.scale + row.bias;
    return capped(s * row.scale + offset, call) + (row.bias - offset);
}

// The slopes of phi (N) times dy/dz, from the rows' scores.
template <int PHI, bool BY_COLUMN, int N, class Row, class Offset, class X>
DEVICE void times_cap_slopes(float (&slope)[N], const float (&s)[N], const Row *row, Offset offset,
                             const FlashCall<X> &call) {
    UNROLL
    for (int e = 0; e < N && caps<PHI>(call); e++) {
        const int r = row_of<BY_COLUMN>(e);
        float of_cap;
        cap_both(call.cap, s[e] * row[r].scale + offset(r), &of_cap);
        slope[e] *= of_cap;
    }
}

// value_unit of an instance, from the unit of its z.
template <class X>
DEVICE float value_unit_of(const FlashCall<X> &call, float in_unit) {
    return call.phi == PHI_SOFTPLUS ? in_unit : 1;
}

// May the instance be asked to drop negative f (Post::drops)?
template <int PHI>
constexpr bool may_drop = flash_may_drop(PHI);

// x times the sign of f. In bf16 that is one instruction, which also takes the sign of a zero: at 0, any value from
// -1 to 1 is a subgradient of |f|.
template <class X>
DEVICE float signed_as(float x, float f) {
    if (is_bf16<X>) return __uint_as_float(__float_as_uint(x) ^ (__float_as_uint(f) & 0x80000000u));
    if (f < 0) return -x;
    return f > 0 ? x : 0;
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

// The offset of a row, which a cap needs besides its bias, in the backward pass. Loaded anew for each score: float32's
// kernels have no registers for it.
template <int PHI, class X>
DEVICE float cap_offset(const FlashCall<X> &call, int b, int row) {
    if (!caps<PHI>(call)) return 0;
    return *(const volatile float *)(call.offsets + (size_t)b * call.T + min(row, call.T - 1));
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

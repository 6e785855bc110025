// The forward kernel of flash.cuh, whose header has the formulas, with mma.sync.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH_FORWARD_CUH
#define ATTENTION_FLASH_FORWARD_CUH

#include "attention/flash_forward_row.cuh"

// A larger chunk has more matmuls in flight and, with a running maximum, rescales the sums less often. So it is as
// large as the registers allow.
template <int HS, int PHI, int POST>
constexpr int forward_chunk() {
    if (PHI < 0) return 16;
    if ((Post<POST>::POWERS || PHI == PHI_MISH || PHI == PHI_EXPM1) && HS > 64) return 16;
    if (Post<POST>::POWERS) return 32;
    const int chunk = PHI == PHI_EXP && HS <= 64 ? 64 : 32;
    return Post<POST>::PLAIN ? chunk : chunk / 2;
}

// Chunks in which all scores are visible have separate code without masks. With 128 columns there are too few registers
// for both versions.
template <int HS>
constexpr bool splits_chunks = HS <= 64;

// True if, in the forward pass, the operands of the rows that a warp owns stay in registers. mish, the longest phi,
// leaves no room for them.
template <class X, int HS, int PHI, int POST>
constexpr bool forward_keeps = is_bf16<X> && HS <= 64 && !Post<POST>::TWICE && PHI != PHI_MISH;

template <class X, int HS, int PHI, int POST>
struct ForwardPlan : FlashPlan<own_tiles<X, PHI>, is_bf16<X> ? 64 : 32, forward_chunk<HS, PHI, POST>(),
                               forward_keeps<X, HS, PHI, POST>> {};

// What a warp keeps in registers: its rows, and their queries.
template <class X, int HS, int PHI, int POST>
struct ForwardWarp : ForwardRows<HS, ForwardPlan<X, HS, PHI, POST>::TILES> {
    typedef ForwardPlan<X, HS, PHI, POST> P;
    Own<X, HS, P::TILES, P::KEEP> q;
};

// Negates each of the warp's rows of a tile whose lane passes `negative`.
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

// Processes a chunk of keys for the warp's rows. k, v: the chunk's rows of the tiles   MASKED: not every row sees every
// key
template <bool MASKED, class X, int HS, int PHI, int POST>
DEVICE void forward_keys(ForwardWarp<X, HS, PHI, POST> &own, const X *k, const X *v, Chunk chunk,
                         const ForwardSweep &sweep, const FlashCall<X> &call) {
    typedef ForwardPlan<X, HS, PHI, POST> P;
    float s[P::TILES][P::NT][4], by[2 * P::TILES];
    set_zero(s);
    matmul_by_rows(s, own.q, k);
    forward_weigh<MASKED, X, PHI, POST, NEVER, true>(s, own.row, by, chunk, sweep, call, NULL, [] {});
    if (!sweep.adds) return;
    if (rescales<POST>(sweep)) forward_rescale(own.sum, by);
    matmul_by_columns<X, HS>(own.sum, s, v);
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

// registers: at most 255 (flash_forward_kernel)
template <class X, int HS, int PHI, int POST>
KERNEL void flash_forward_kernel(const FlashCall<X> call) {
    typedef ForwardPlan<X, HS, PHI, POST> P;
    enum { STEP = tile_step<HS>, TWICE = Post<POST>::TWICE };
    DYNAMIC_SHARED(X, shared);
    const QueryBlock at = query_block<P>(call, call.from);
    const ForwardSweep first = forward_sweep<X, PHI>(call, false), last = forward_sweep<X, PHI>(call, true);

    X *q_tile = shared, *warp_q = q_tile + (threadIdx.x / 32) * (16 * P::TILES * STEP);
    ForwardWarp<X, HS, PHI, POST> own;
    const bool negative = forward_negates<P::TILES>(call, at, last.relative);
    forward_begin<PHI, POST>(own, call, at, last.relative);
    own.q.tile = warp_q;
    const X *q = head_at(call, call.q, at.b, at.h) + at.row0 * call.q.row;
    tile_load<P::OWN, HS, P::THREADS>(q_tile, TileSource<X>{q, call.q.row, call.T - at.row0, call.HS});
    const auto keys = key_tiles<X, HS, P, TWICE>(shared + P::OWN * STEP, true, call, at, at.part * HS);
    const int steps = steps_of(keys), adds_from = steps - keys.count;
    key_tiles_load(keys, 0, adds_from == 0);

    for (int step = 0; step < steps; step++) {
        tile_wait();
        if (step + 1 < steps) key_tiles_load(keys, step + 1, step + 1 >= adds_from);
        if (step == 0) {
            if (last.relative) negate_rows<HS, P::TILES>(warp_q, negative);
            own_keep(own.q);
        }
        const X *k = buffer_of<HS, P>(keys.k_tiles, step), *v = buffer_of<HS, P>(keys.v_tiles, step);
        const ForwardSweep sweep = step < adds_from ? first : last;
        const int key = key_of(keys, step);
        for_each_chunk<P>(call, at, key, [&](bool masked, int c) {
            // at.b, recomputed where it would otherwise cost spilled registers
            const int b = !Post<POST>::POWERS ? (int)(blockIdx.y / call.NH) : at.b;
            const Chunk chunk = {at.warp_row, key + c, b};
            if (masked || !splits_chunks<HS>) forward_keys<true>(own, k + c * STEP, v + c * STEP, chunk, sweep, call);
            else forward_keys<false>(own, k + c * STEP, v + c * STEP, chunk, sweep, call);
        });
        if constexpr (TWICE) {
            UNROLL
            for (int r = 0; r < 2 * P::TILES && step == keys.count - 1; r++) {
                const int row = at.warp_row + 8 * r + lane_row();
                forward_between<X, PHI, POST>(own.row[r], call, place_of(call, at.b, at.h, row), sweep);
            }
        }
    }
    forward_store<PHI, POST>(own, call, at, last.is_signed);
}
#endif

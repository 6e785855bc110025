// The forward kernel of flash90.cuh. flash.cuh's header has the formulas.
//
// A consumer's step: from the scores of tile j it computes weights, while O += W V of tile j - 1 runs; then it issues
// the scores of tile j + 1 and O += W V of tile j. The other consumer's matmuls run meanwhile. Together with the last
// O += W V of a block of rows it issues the first scores of the next block, which run while O is stored.
//
// With heads of at most 64, the matmul of O = W V also sums the weights of most normalizers (sums_by_matmul): its right
// operand is a tile of values followed by 8 columns of ones. So the sum is that of the rounded weights, as it must be,
// and no instructions are spent on rounding and adding each weight.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH90_FORWARD_CUH
#define ATTENTION_FLASH90_FORWARD_CUH

#include "attention/flash90.cuh"
#include "attention/flash_forward_row.cuh"

// mish issues so many other instructions that its special functions have time for all divisions.
template <int PHI>
constexpr Divides forward90_divides = PHI == PHI_MISH ? ALWAYS : SHARED;

template <int POST, int HS>
constexpr bool keeps_along = flash90_keeps_along(POST, HS);

// Does the matmul sum the weights that it multiplies with v? They must not be negative. exp issues so little else that
// the tensor cores' time counts: with it, this is 5 to 8 % slower (H200, T = 4,096 and 16,384).
template <int HS, int PHI, int POST>
constexpr bool sums_by_matmul =
    HS <= 64 && (POST < FLASH_RECENTER_L1 ? !phi_signed(PHI) && PHI != PHI_EXP : POST == FLASH_REWEIGHT);

// The columns of ones after those of v.
template <int HS, int PHI, int POST>
constexpr int ones_columns = sums_by_matmul<HS, PHI, POST> ? 8 : 0;

// A block: CONSUMERS warpgroups own 64 rows each, and the keys come in tiles of STREAM rows through STAGES buffers.
template <int HS>
struct Forward90Plan {
    enum {
        CONSUMERS = 2,
        THREADS = 128 * (CONSUMERS + 1),
        OWN = 64 * CONSUMERS,
        STREAM = 128,
        NT = STREAM / 8,
        STAGES = HS <= 64 ? 4 : 2,    // of keys, and of values
        OWN_STAGES = 2,               // of queries: those of the next rows come while these are in use
        // With 168 registers for each of 384 threads at first, there are 64,512.
        PRODUCER_REGISTERS = 24,
        CONSUMER_REGISTERS = 240
    };
};

// ---------------------------------------------------------------------------------------------------------------------
// Work

// A positive number by which kernels divide: x / by = (x factor) >> 31 >> shift for 0 <= x < 2^31.
struct Divisor {
    int by;
    unsigned factor, shift;
};

static inline Divisor divisor(int by) {
    Divisor d = {by, 0, 0};
    while (1u << d.shift < (unsigned)by) d.shift++;
    d.factor = (unsigned)(((uint64_t)1 << (31 + d.shift)) / (unsigned)by + 1);
    return d;
}

DEVICE int divided(int x, Divisor d) {
    return (int)((uint64_t)(unsigned)x * d.factor >> 31 >> d.shift);
}

// All blocks of rows: `blocks` of each of `heads` heads, from block `first` on. A head counts once for each of its
// `parts` parts of HS columns of values.
struct Forward90Work {
    int heads, first, blocks;
    Divisor pairs;    // of a head, or `blocks` if there are SMs for all blocks of rows: then none has a second one
    Divisor parts, NH, group;
};

// Does a block of the grid, of which there are then at most as many as SMs, compute several blocks of rows? It loads
// the next while it finishes the one before. Otherwise, for lack of registers, it computes one.
template <int HS, int POST>
constexpr bool forward90_loops = HS <= 64 && POST < FLASH_REWEIGHT;

// Are its first scores then issued before the one before it is stored? If registers suffice.
template <int HS, int PHI, int POST>
constexpr bool forward90_ahead = forward90_loops<HS, POST> && POST < FLASH_RECENTER_L1 && PHI != PHI_EXPM1;

// Which block of rows: those of a head come in pairs, the longest with the shortest and so on, so that without
// documents all pairs take nearly the same time. A block of the grid takes every gridDim.x-th pair, and neighbors share
// a head's keys and values.
struct Forward90Place {
    int pair;
    bool second;
};

// The block after `at`; false if there is none. The middle one of an odd number of blocks is alone.
DEVICE bool forward90_next(Forward90Place &at, const Forward90Work &work) {
    const int short_one = at.pair - divided(at.pair, work.pairs) * work.pairs.by;
    if (work.pairs.by < work.blocks && !at.second && 2 * short_one + 1 < work.blocks) {
        at.second = true;
    } else {
        at.second = false;
        at.pair += gridDim.x;
    }
    return at.pair < work.heads * work.pairs.by;
}

template <int HS>
DEVICE QueryBlock forward90_block(const Forward90Work &work, int head, int block) {
    QueryBlock at;
    at.head = divided(head, work.parts);
    at.part = head - at.head * work.parts.by;
    at.b = divided(at.head, work.NH);
    at.h = at.head - at.b * work.NH.by;
    at.kv = divided(at.h, work.group);
    at.row0 = (work.first + block) * Forward90Plan<HS>::OWN;
    at.warp_row = at.row0 + (threadIdx.x / 32) * 16;
    return at;
}

template <int HS>
DEVICE QueryBlock forward90_block(const Forward90Work &work, Forward90Place at) {
    const int head = divided(at.pair, work.pairs), short_one = at.pair - head * work.pairs.by;
    return forward90_block<HS>(work, head, at.second ? short_one : work.blocks - 1 - short_one);
}

// The tiles of keys that its rows see: `count` from tile `first` on.
struct Forward90Keys {
    int first, count;
};

template <int HS>
DEVICE Forward90Keys forward90_keys(const FlashCall<bf16> &call, const QueryBlock &at) {
    typedef Forward90Plan<HS> P;
    const int end = at.row0 + P::OWN < call.T ? at.row0 + P::OWN : call.T,
              first = first_key(call, at.b, at.row0) / P::STREAM;
    return {first, (end - 1) / P::STREAM + 1 - first};
}

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory

struct Forward90Maps {
    TensorMap q, k, v;
};

template <int HS>
struct Forward90Barriers {
    Ring<Forward90Plan<HS>::OWN_STAGES> q;
    Ring<Forward90Plan<HS>::STAGES> k, v;
};

// How many tiles have passed through each ring before the current block of rows.
struct Forward90Passed {
    int q, k, v;
};

template <int HS>
struct Forward90Tiles {
    char *q, *k, *v, *ones;
    Forward90Barriers<HS> *barriers;
};

// The ones are a panel, of which matmuls read the first columns.
template <int HS>
constexpr unsigned ones_bytes = HS <= 64 ? panel_bytes<Forward90Plan<HS>::STREAM> : 0;

template <int HS>
constexpr size_t forward90_shared =
    1024 + Forward90Plan<HS>::OWN_STAGES * tile_bytes<Forward90Plan<HS>::OWN, HS> +
    2 * Forward90Plan<HS>::STAGES * tile_bytes<Forward90Plan<HS>::STREAM, HS> + ones_bytes<HS>;

template <int HS>
DEVICE Forward90Tiles<HS> forward90_tiles(char *memory, Forward90Barriers<HS> *barriers) {
    typedef Forward90Plan<HS> P;
    Forward90Tiles<HS> tiles;
    tiles.q = aligned_tile(memory);
    tiles.k = tiles.q + P::OWN_STAGES * tile_bytes<P::OWN, HS>;
    tiles.v = tiles.k + P::STAGES * tile_bytes<P::STREAM, HS>;
    tiles.ones = tiles.v + P::STAGES * tile_bytes<P::STREAM, HS>;
    tiles.barriers = barriers;
    return tiles;
}

// Writes the ones, which matmuls read after a barrier of the block. By all threads.
template <int HS>
DEVICE void forward90_write_ones(const Forward90Tiles<HS> &tiles) {
    const uint32_t pair = pack_bf16(1, 1);
    for (unsigned i = threadIdx.x; i < ones_bytes<HS> / sizeof(uint4); i += Forward90Plan<HS>::THREADS)
        store_shared((uint4 *)tiles.ones + i, make_uint4(pair, pair, pair, pair));
    fence_proxy_async();
}

// The buffer of the step-th tile of queries; of keys or of values.
template <int HS>
DEVICE char *own_stage_of(char *tiles, int step) {
    typedef Forward90Plan<HS> P;
    return tiles + (step % P::OWN_STAGES) * tile_bytes<P::OWN, HS>;
}

template <int HS>
DEVICE char *stage_of(char *tiles, int step) {
    typedef Forward90Plan<HS> P;
    return tiles + (step % P::STAGES) * tile_bytes<P::STREAM, HS>;
}

// By the producer's thread: loads what a block of rows needs. Where there are two sweeps, the first needs no values.
template <int HS, bool TWICE>
DEVICE void forward90_load(const Forward90Tiles<HS> &tiles, const Forward90Maps &maps, const QueryBlock &at,
                           Forward90Keys keys, Forward90Passed &passed) {
    typedef Forward90Plan<HS> P;
    Forward90Barriers<HS> &barriers = *tiles.barriers;
    const int steps = TWICE ? 2 * keys.count : keys.count, adds_from = steps - keys.count;
    ring_wait_empty(barriers.q, passed.q);
    load_rows<P::OWN, HS>(own_stage_of<HS>(tiles.q, passed.q), &barriers.q.full[passed.q % P::OWN_STAGES], &maps.q, 0,
                          at.h, at.row0, at.b);
    passed.q++;
    UNROLL_NOT
    for (int step = 0; step < steps; step++) {
        const int tile = step - (step >= adds_from ? adds_from : 0), row = (keys.first + tile) * P::STREAM;
        ring_wait_empty(barriers.k, passed.k);
        load_rows<P::STREAM, HS>(stage_of<HS>(tiles.k, passed.k), &barriers.k.full[passed.k % P::STAGES], &maps.k, 0,
                                 at.kv, row, at.b);
        passed.k++;
        if (step < adds_from) continue;
        ring_wait_empty(barriers.v, passed.v);
        load_rows<P::STREAM, HS>(stage_of<HS>(tiles.v, passed.v), &barriers.v.full[passed.v % P::STAGES], &maps.v,
                                 at.part * HS, at.kv, row, at.b);
        passed.v++;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The consumers

// Negates each of the warp's rows of q whose lane passes `negative`, for the matmuls of its warpgroup.
template <int HS>
DEVICE void forward90_negate(char *q, bool negative, int warpgroup) {
    typedef Forward90Plan<HS> P;
    const int lane = threadIdx.x % 32, row = (threadIdx.x / 32) * 16 + lane;
    if (negative && lane < 16) {
        UNROLL_NOT
        for (int c = 0; c < HS; c++) {
            bf16 *x = (bf16 *)(q + (c / PANEL) * panel_bytes<P::OWN> + row * PANEL_ROW) + c % PANEL;
            store_shared(x, __float2bfloat16_rn(-to_float(*x)));
        }
    }
    fence_proxy_async();
    named_barrier_sync(1 + P::CONSUMERS + warpgroup, 128);
}

// What a consumer's warp keeps in registers: its rows, their scores or weights for a tile, the factors of the rows'
// output so far, and the weights as operands of the matmul.
template <int HS, int ONES>
struct Consumer90 {
    enum { NT = Forward90Plan<HS>::NT };
    ForwardRows<HS, 1, ONES> own;
    float s[1][NT][4], by[2];
    uint32_t p[NT / 2][4];
    uint32_t along[NT / 2][4];              // if keeps_along: r^(P-1) (1 - r) as operands,
    float along_sum[(HS + ONES) / 8][4];    // and their sums times v
    const char *q;                          // the warpgroup's rows
    int warpgroup;
};

// Issues the scores of the step-th tile of keys.
template <int HS, int ONES>
DEVICE void forward90_issue_scores(Consumer90<HS, ONES> &c, const Forward90Tiles<HS> &tiles, int step) {
    wgmma_fence();
    issue_by_rows<Forward90Plan<HS>::OWN, HS>(c.s[0], c.q, stage_of<HS>(tiles.k, step));
    wgmma_commit();
}

// Issues the weights times the step-th tile of values.
template <int POST, int HS, int ONES>
DEVICE void forward90_issue_output(Consumer90<HS, ONES> &c, const Forward90Tiles<HS> &tiles, int step) {
    const char *v = stage_of<HS>(tiles.v, step);
    const unsigned apart = ONES ? (unsigned)(tiles.ones - v) : panel_bytes<Forward90Plan<HS>::STREAM>;
    wgmma_fence();
    issue_by_columns(c.own.sum[0], c.p, v, apart);
    if constexpr (keeps_along<POST, HS>) issue_by_columns(c.along_sum, c.along, v, apart);
    wgmma_commit();
}

// later: have scores been issued since then?
template <int POST, bool later = false, int HS, int ONES>
DEVICE void forward90_wait_output(Consumer90<HS, ONES> &c) {
    if constexpr (keeps_along<POST, HS>) wgmma_wait<later>(c.own.sum[0], c.along_sum);
    else wgmma_wait<later>(c.own.sum[0]);
}

// Waits for the queries of a block of rows. relative: see forward_negates()
template <int HS, int ONES>
DEVICE void forward90_queries(Consumer90<HS, ONES> &c, const Forward90Tiles<HS> &tiles, const FlashCall<bf16> &call,
                              const QueryBlock &at, int step, bool relative) {
    char *const q = own_stage_of<HS>(tiles.q, step);
    c.q = q + c.warpgroup * panel_bytes<64>;
    ring_wait_full(tiles.barriers->q, step);
    if (forward_may_negate(call, relative)) forward90_negate<HS>(q, forward_negates<1>(call, at, true), c.warpgroup);
}

// Issues the scores of the step-th tile of keys, with no matmul beside them.
template <int HS, int ONES>
DEVICE void forward90_start_scores(Consumer90<HS, ONES> &c, const Forward90Tiles<HS> &tiles, int step) {
    ring_wait_full(tiles.barriers->k, step);
    turn_wait(c.warpgroup);
    forward90_issue_scores(c, tiles, step);
    turn_pass(c.warpgroup);
}

template <int HS, int ONES>
DEVICE void forward90_wait_scores(Consumer90<HS, ONES> &c, const Forward90Tiles<HS> &tiles, int step) {
    wgmma_wait<0>(c.s[0]);
    ring_release(tiles.barriers->k, step);
}

// From the scores of the tile-th of a block's tiles of keys to weights. Rows see all keys of tiles before the one on
// the diagonal, unless they begin at first_key(). between: see forward_weigh   after(): called with the weights, in the
// same straight piece of code
template <int PHI, int POST, int HS, int ONES, class Between, class After>
DEVICE void forward90_weigh(Consumer90<HS, ONES> &c, const QueryBlock &at, Forward90Keys keys, int tile,
                            const ForwardSweep &sweep, const FlashCall<bf16> &call, Between between, After after) {
    typedef Forward90Plan<HS> P;
    constexpr Divides DIVIDES = forward90_divides<PHI>;
    constexpr bool SUMS = !ONES;
    const Chunk chunk = {at.warp_row, (keys.first + tile) * P::STREAM, at.b};
    static_assert((int)P::OWN == (int)P::STREAM, "one tile of keys is on the diagonal");
    uint32_t (*along)[4] = keeps_along<POST, HS> ? c.along : NULL;
    const bool diagonal = tile == keys.count - 1;
    if (!keeps_along<POST, HS> && diagonal && at.warp_row + 15 < chunk.other + P::STREAM / 2) {
        // The rows see none of the second half.
        enum { HALF_NT = P::NT / 2 };
        forward_weigh<true, bf16, PHI, POST, DIVIDES, SUMS>((float (&)[1][HALF_NT][4])c.s, c.own.row, c.by, chunk,
                                                            sweep, call, along, between);
        UNROLL
        for (int nt = HALF_NT; nt < P::NT; nt++) {
            UNROLL
            for (int e = 0; e < 4; e++) c.s[0][nt][e] = 0;
        }
        after();
    } else if (diagonal || (call.first && chunk.other < first_key(call, at.b, at.warp_row + 15))) {
        forward_weigh<true, bf16, PHI, POST, DIVIDES, SUMS>(c.s, c.own.row, c.by, chunk, sweep, call, along, between);
        after();
    } else {
        forward_weigh<false, bf16, PHI, POST, DIVIDES, SUMS>(c.s, c.own.row, c.by, chunk, sweep, call, along, between);
        after();
    }
}

// The same in the sweep that adds to the output. v: the tile's number among all tiles of values. The matmul with the
// tile before it ends meanwhile: it is over when the rows' maxima are known (or earlier, where the weights of both
// would need too many registers). So the output is rescaled, and weights are packed, between the exponentials.
template <int PHI, int POST, int HS, int ONES>
DEVICE void forward90_weights(Consumer90<HS, ONES> &c, const Forward90Tiles<HS> &tiles, const QueryBlock &at,
                              Forward90Keys keys, int tile, int v, const ForwardSweep &sweep,
                              const FlashCall<bf16> &call) {
    auto output_ends = [&] {
        forward90_wait_output<POST>(c);
        ring_release(tiles.barriers->v, v + Forward90Plan<HS>::STAGES - 1, tile > 0);    // the buffer of tile - 1
        // For exp, whose factors are otherwise 1, without a condition, so that it runs beside the exponentials.
        if (PHI == PHI_EXP ? POST < FLASH_RECENTER_L1 : rescales<POST>(sweep)) forward_rescale(c.own.sum, c.by);
    };
    auto pack = [&] { pack_weights(c.p, c.s[0]); };
    if constexpr (keeps_along<POST, HS>) {
        output_ends();
        forward90_weigh<PHI, POST>(c, at, keys, tile, sweep, call, [] {}, pack);
    } else {
        forward90_weigh<PHI, POST>(c, at, keys, tile, sweep, call, output_ends, pack);
    }
}

// Takes the rows' sums of weights from the columns of ones. Each of a row's four lanes has all of the sum there, and
// forward_ends() adds up what the four have.
template <int POST, int HS, int ONES>
DEVICE void forward90_take_sums(Consumer90<HS, ONES> &c) {
    UNROLL
    for (int r = 0; r < 2; r++) {
        const float sum = threadIdx.x % 4 == 0 ? c.own.sum[0][HS / 8][2 * r] : 0;
        (POST < FLASH_RECENTER_L1 ? c.own.row[r].sum : c.own.row[r].left) = sum;
    }
}

// For the backward pass under reweight: sum_j r^(P-1) (1 - r) (v_j - out), which needs the rows' sums of w.
template <int HS, int ONES>
DEVICE void forward90_store_along(Consumer90<HS, ONES> &c, const FlashCall<bf16> &call, QueryBlock at) {
    static_assert(ONES > 0, "the matmul has summed both");
    const float one[2] = {1, 1};
    if (!call.along) return;
    UNROLL
    for (int r = 0; r < 2; r++) {
        const float mean = c.along_sum[HS / 8][2 * r] * inverse_or_zero(c.own.sum[0][HS / 8][2 * r]);
        UNROLL
        for (int n = 0; n < HS / 8; n++) {
            UNROLL
            for (int e = 2 * r; e < 2 * r + 2; e++) c.along_sum[n][e] -= mean * c.own.sum[0][n][e];
        }
    }
    bf16 *along = call.along + ((size_t)at.head * call.T + at.warp_row) * call.VS;
    store_rows(TileTarget<bf16>{along, (size_t)call.VS, call.T - at.warp_row, call.VS},
               (float (&)[1][HS / 8][4]) c.along_sum, one);
}

// A block of rows, whose first scores have been issued if forward90_ahead. more: is there a `next` one?
template <int PHI, int POST, int HS, int ONES>
DEVICE void forward90_compute(Consumer90<HS, ONES> &c, const Forward90Tiles<HS> &tiles, const FlashCall<bf16> &call,
                              const QueryBlock &at, Forward90Passed &passed, const QueryBlock &next, bool more) {
    constexpr bool AHEAD = forward90_ahead<HS, PHI, POST>;
    const ForwardSweep last = forward_sweep<bf16, PHI, POST>(call, true);
    const Forward90Keys keys = forward90_keys<HS>(call, at);
    int &k = passed.k, &v = passed.v, tile = 0;
    c.by[0] = c.by[1] = 1;
    forward_begin<PHI, POST>(c.own, call, at, last.relative);
    if constexpr (keeps_along<POST, HS>) set_zero((float (&)[1][(HS + ONES) / 8][4]) c.along_sum);
    if constexpr (!AHEAD) forward90_queries(c, tiles, call, at, passed.q, last.relative);

    if constexpr (POST >= FLASH_RECENTER_L1) {
        const ForwardSweep first = forward_sweep<bf16, PHI, POST>(call, false);
        UNROLL_NOT
        for (; tile < keys.count; tile++, k++) {
            forward90_start_scores(c, tiles, k);
            forward90_wait_scores(c, tiles, k);
            forward90_weigh<PHI, POST>(c, at, keys, tile, first, call, [] {}, [] {});
        }
        tile = 0;
        UNROLL
        for (int r = 0; r < 2; r++)
            forward_between<bf16, PHI, POST>(c.own.row[r], call,
                                             place_of(call, at.b, at.h, at.warp_row + 8 * r + lane_row()), first);
    }

    // The last tile is separate because nothing, or another block's tile, follows it: with a condition around a matmul,
    // ptxas would not overlap any.
    if constexpr (!AHEAD) forward90_start_scores(c, tiles, k);
    forward90_wait_scores(c, tiles, k++);
    ring_wait_full(tiles.barriers->v, v);
    UNROLL_NOT
    for (; tile < keys.count - 1; tile++, k++, v++) {
        forward90_weights<PHI, POST>(c, tiles, at, keys, tile, v, last, call);
        ring_wait_full(tiles.barriers->k, k);
        turn_wait(c.warpgroup);
        forward90_issue_scores(c, tiles, k);
        forward90_issue_output<POST>(c, tiles, v);
        turn_pass(c.warpgroup);
        ring_wait_full(tiles.barriers->v, v + 1);    // while the scores are on their way
        wgmma_wait<1>(c.s[0]);
        ring_release(tiles.barriers->k, k);
    }
    ring_release(tiles.barriers->q, passed.q++);
    if (AHEAD && more) forward90_queries(c, tiles, call, next, passed.q, last.relative);
    forward90_weights<PHI, POST>(c, tiles, at, keys, tile, v, last, call);
    if (AHEAD && more) ring_wait_full(tiles.barriers->k, k);
    turn_wait(c.warpgroup);
    forward90_issue_output<POST>(c, tiles, v);
    if constexpr (AHEAD) forward90_issue_scores(c, tiles, more ? k : k - 1);    // once more, if there is no other block
    if (more || c.warpgroup == 0) turn_pass(c.warpgroup);
    forward90_wait_output<POST, AHEAD>(c);
    ring_release(tiles.barriers->v, v++);
    if constexpr (ONES > 0) forward90_take_sums<POST>(c);
    if constexpr (keeps_along<POST, HS>) forward90_store_along(c, call, at);
    forward_store<PHI, POST>(c.own, call, at, last.is_signed);
    if (AHEAD && !more) wgmma_wait<0>(c.s[0]);
}

// registers: at most 168 (flash90_forward_kernel)
template <int HS, int PHI, int POST>
KERNEL void __launch_bounds__(Forward90Plan<HS>::THREADS, 1)
    flash90_forward_kernel(const FlashCall<bf16> call, const Forward90Work work, GRID_CONSTANT Forward90Maps maps) {
    typedef Forward90Plan<HS> P;
    if (!hopper_here()) return;
    DYNAMIC_SHARED(char, memory);
    SHARED_ARRAY(Forward90Barriers<HS>, barriers, 1);
    const Forward90Tiles<HS> tiles = forward90_tiles<HS>(memory, barriers);
    Forward90Passed passed = {0, 0, 0};
    if (threadIdx.x == 0) {
        ring_init(barriers->q, 1, 4 * P::CONSUMERS);
        ring_init(barriers->k, 1, 4 * P::CONSUMERS);
        ring_init(barriers->v, 1, 4 * P::CONSUMERS);
        mbarrier_init_fence();
    }
    if constexpr (sums_by_matmul<HS, PHI, POST>) forward90_write_ones(tiles);
    __syncthreads();
    // Without loops, blockIdx.x is the block, the longest of each head first.
    Forward90Place place = {(int)blockIdx.x, false};
    const int block = work.blocks - 1 - (int)blockIdx.x % work.blocks;
    if (threadIdx.x / 128 == P::CONSUMERS) {
        setmaxnreg_dec<P::PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 > 0) return;
        auto load = [&](const QueryBlock &at) {
            forward90_load<HS, (POST >= FLASH_RECENTER_L1)>(tiles, maps, at, forward90_keys<HS>(call, at), passed);
        };
        if constexpr (forward90_loops<HS, POST>) {
            do load(forward90_block<HS>(work, place));
            while (forward90_next(place, work));
        } else {
            load(forward90_block<HS>(work, blockIdx.x / work.blocks, block));
        }
    } else {
        setmaxnreg_inc<P::CONSUMER_REGISTERS>();
        Consumer90<HS, ones_columns<HS, PHI, POST>> c;
        c.warpgroup = warpgroup();
        if (c.warpgroup == 1) turn_pass(c.warpgroup);    // the first warpgroup goes first
        if constexpr (forward90_loops<HS, POST>) {
            QueryBlock next = forward90_block<HS>(work, place);
            if constexpr (forward90_ahead<HS, PHI, POST>) {
                forward90_queries(c, tiles, call, next, 0, forward_sweep<bf16, PHI, POST>(call, true).relative);
                forward90_start_scores(c, tiles, 0);
            }
            for (bool more = true; more;) {
                const QueryBlock at = next;
                more = forward90_next(place, work);
                if (more) next = forward90_block<HS>(work, place);
                forward90_compute<PHI, POST>(c, tiles, call, at, passed, next, more);
            }
        } else {
            const QueryBlock at = forward90_block<HS>(work, blockIdx.x / work.blocks, block);
            forward90_compute<PHI, POST>(c, tiles, call, at, passed, at, false);
        }
    }
}

// All work of a call, without pairs.
template <int HS>
Forward90Work forward90_work(const FlashCall<bf16> &call) {
    typedef Forward90Plan<HS> P;
    const int parts = (call.VS - 1) / HS + 1;
    Forward90Work work = {};
    work.heads = call.B * call.NH * parts;
    work.first = call.from / P::OWN;
    work.blocks = (call.T - 1) / P::OWN + 1 - work.first;
    work.pairs = divisor(work.blocks);
    work.parts = divisor(parts);
    work.NH = divisor(call.NH);
    work.group = divisor(call.NH / call.NKV);
    return work;
}

template <int HS, int PHI, int POST>
void flash90_forward_launch(const FlashCall<bf16> &call, cudaStream_t stream) {
    typedef Forward90Plan<HS> P;
    Forward90Work work = forward90_work<HS>(call);
    int blocks = work.heads * work.blocks;
    if (const int processors = processors_of_device(); forward90_loops<HS, POST> && blocks > processors) {
        work.pairs = divisor((work.blocks + 1) / 2);
        blocks = work.heads * work.pairs.by < processors ? work.heads * work.pairs.by : processors;
    }
    Forward90Maps maps;
    rows_map(&maps.q, call.q, call.HS, call.NH, call.T, call.B, P::OWN);
    rows_map(&maps.k, call.k, call.HS, call.NKV, call.T, call.B, P::STREAM);
    rows_map(&maps.v, call.v, call.VS, call.NKV, call.T, call.B, P::STREAM);
    launch(flash90_forward_kernel<HS, PHI, POST>, dim3(blocks), dim3(P::THREADS), forward90_shared<HS>, stream, call,
           work, maps);
}
#endif

// The forward kernel of flash90.cuh. flash.cuh's header has the formulas.
//
// A consumer's step: from the scores of tile j it computes weights, while O += W V of tile j - 1 runs; then it issues
// the scores of tile j + 1 and O += W V of tile j. The other consumer's matmuls run meanwhile. Together with the last
// O += W V of a block of rows it issues the first scores of the next block, which run while O is stored.
//
// With heads of at most 64, the matmul of O = W V also sums the weights of most normalizers (SUMS): its right
// operand is a tile of values followed by 8 columns of ones. So the sum is that of the rounded weights, as it must be,
// and no instructions are spent on rounding and adding each weight.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH90_FORWARD_CUH
#define ATTENTION_FLASH90_FORWARD_CUH

#include "attention/flash90.cuh"
#include "attention/flash_forward_row.cuh"

// How the kernel works for a head size, a phi and a class of posts. A block of threads has CONSUMERS warpgroups, which
// own 64 rows each, and the keys come in tiles of STREAM rows through STAGES buffers.
template <int HEAD_SIZE, int phi, int post>
struct Forward90Plan {
    static constexpr int HS = HEAD_SIZE, PHI = phi, POST = post;
    enum {
        CONSUMERS = 2,
        THREADS = 128 * (CONSUMERS + 1),
        OWN = 64 * CONSUMERS,
        STREAM = 128,
        NT = STREAM / 8,
        STAGES = HS <= 64 ? 4 : 2,    // of keys, and of values
        OWN_STAGES = 2,               // of queries: those of the next rows arrive while these are in use
        // With 168 registers for each of 384 threads at first, there are 64,512.
        PRODUCER_REGISTERS = 24,
        CONSUMER_REGISTERS = 240
    };
    static constexpr bool
        // Are there two sweeps over the keys, of which the first needs no values?
        TWICE = Post<POST>::TWICE,
        // Does the matmul with v also sum its weights? Only those that are never negative, and not those of exp: its
        // kernel issues so little else that the tensor cores' time counts, and summing them this way made it 5 to 8 %
        // slower (H200, T = 4,096 and 16,384).
        SUMS = HS <= 64 && (TWICE ? Post<POST>::POWERS : !phi_signed(PHI) && PHI != PHI_EXP),
        // Does a second matmul sum r^(P-1) (1 - r) times v, for the backward pass?
        ALONG = flash90_keeps_along(POST, HS),
        // Does a block of the grid compute several blocks of rows? Then the grid has at most one block for each SM, and
        // a block loads the next rows while it finishes those before. Otherwise, for lack of registers, it computes one
        // block of rows.
        LOOPS = HS <= 64 && !Post<POST>::POWERS,
        // Are a block's first scores issued before the previous block is stored? They are where registers suffice.
        AHEAD = LOOPS && !TWICE && PHI != PHI_EXPM1;
    static constexpr int ONES = SUMS ? 8 : 0;    // the columns of ones after those of v
    // mish issues so many other instructions that its special functions have time for all divisions.
    static constexpr Divides DIVIDES = PHI == PHI_MISH ? ALWAYS : SHARED;
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
    Divisor pairs;    // of a head; or `blocks`, where a block of the grid computes a single block of rows: without
                      // LOOPS, or with an SM for each
    Divisor parts, NH, group;
};

// Which block of rows: those of a head come in pairs, the longest with the shortest and so on, so that without
// documents all pairs take nearly the same time. A block of the grid takes every gridDim.x-th pair, and neighbors share
// a head's keys and values. Without pairs, the longest block of each head comes first.
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

template <class P>
DEVICE QueryBlock forward90_block(const Forward90Work &work, Forward90Place place) {
    const int head = divided(place.pair, work.pairs), short_one = place.pair - head * work.pairs.by,
              block = place.second ? short_one : work.blocks - 1 - short_one;
    QueryBlock at;
    at.head = divided(head, work.parts);
    at.part = head - at.head * work.parts.by;
    at.b = divided(at.head, work.NH);
    at.h = at.head - at.b * work.NH.by;
    at.kv = divided(at.h, work.group);
    at.row0 = (work.first + block) * P::OWN;
    at.warp_row = at.row0 + (threadIdx.x / 32) * 16;
    return at;
}

// The tiles of keys that its rows see: `count` from tile `first` on.
struct Forward90Keys {
    int first, count;
};

template <class P>
DEVICE Forward90Keys forward90_keys(const FlashCall<bf16> &call, const QueryBlock &at) {
    const int end = at.row0 + P::OWN < call.T ? at.row0 + P::OWN : call.T,
              first = first_key(call, at.b, at.row0) / P::STREAM;
    return {first, (end - 1) / P::STREAM + 1 - first};
}

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory

struct Forward90Maps {
    TensorMap q, k, v;
};

// In dynamic shared memory, from a multiple of 1,024 bytes on.
template <class P>
struct Forward90Tiles {
    char q[P::OWN_STAGES][tile_bytes<P::OWN, P::HS>];
    char k[P::STAGES][tile_bytes<P::STREAM, P::HS>], v[P::STAGES][tile_bytes<P::STREAM, P::HS>];
    char ones[P::SUMS ? panel_bytes<P::STREAM> : 16];    // a panel, of which matmuls read the first columns
};

template <class P>
struct Forward90Barriers {
    Ring<P::OWN_STAGES> q;
    Ring<P::STAGES> k, v;
};

template <class P>
struct Forward90Shared {
    Forward90Tiles<P> &tiles;
    Forward90Barriers<P> &barriers;
};

// How many tiles have passed through each ring before the current block of rows.
struct Forward90Passed {
    unsigned q, k, v;
};

// Writes the ones, which matmuls read after a barrier of the block. By all threads.
template <class P>
DEVICE void forward90_write_ones(const Forward90Shared<P> &shared) {
    const uint32_t pair = pack_bf16(1, 1);
    uint4 *ones = (uint4 *)shared.tiles.ones;
    for (unsigned i = threadIdx.x; i < sizeof shared.tiles.ones / sizeof *ones; i += P::THREADS)
        store_shared(ones + i, make_uint4(pair, pair, pair, pair));
    fence_proxy_async();
}

// By the producer's thread: loads what a block of rows needs.
template <class P>
DEVICE void forward90_load(const Forward90Shared<P> &shared, const Forward90Maps &maps, const QueryBlock &at,
                           Forward90Keys keys, Forward90Passed &passed) {
    Forward90Tiles<P> &tiles = shared.tiles;
    Forward90Barriers<P> &barriers = shared.barriers;
    const int steps = P::TWICE ? 2 * keys.count : keys.count, adds_from = steps - keys.count;
    ring_load<P::OWN, P::HS>(barriers.q, tiles.q, passed.q++, &maps.q, 0, at.h, at.row0, at.b);
    UNROLL_NOT
    for (int step = 0; step < steps; step++) {
        const int tile = step - (step >= adds_from ? adds_from : 0), row = (keys.first + tile) * P::STREAM;
        ring_load<P::STREAM, P::HS>(barriers.k, tiles.k, passed.k++, &maps.k, 0, at.kv, row, at.b);
        if (step < adds_from) continue;
        ring_load<P::STREAM, P::HS>(barriers.v, tiles.v, passed.v++, &maps.v, at.part * P::HS, at.kv, row, at.b);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The consumers

// Negates each of the warp's rows of q whose lane passes `negative`, for the matmuls of its warpgroup.
template <class P>
DEVICE void forward90_negate(char *q, bool negative, int warpgroup) {
    const int lane = threadIdx.x % 32, row = (threadIdx.x / 32) * 16 + lane;
    if (negative && lane < 16) {
        UNROLL_NOT
        for (int c = 0; c < P::HS; c++) {
            bf16 *x = (bf16 *)(q + (c / PANEL) * panel_bytes<P::OWN> + row * PANEL_ROW) + c % PANEL;
            store_shared(x, __float2bfloat16_rn(-to_float(*x)));
        }
    }
    fence_proxy_async();
    named_barrier_sync(1 + P::CONSUMERS + warpgroup, 128);
}

// What a consumer's warp keeps in registers: its rows, their scores or weights for a tile, the factors of the rows'
// output so far, and the weights as operands of the matmul.
template <class P>
struct Forward90Consumer {
    ForwardRows<P::HS, 1, P::ONES> own;
    float s[1][P::NT][4], by[2];
    uint32_t p[P::NT / 2][4];
    uint32_t along[P::NT / 2][4];                    // if ALONG: r^(P-1) (1 - r) as operands,
    float along_sum[1][(P::HS + P::ONES) / 8][4];    // and their sums times v
    const char *q;                                   // the warpgroup's rows
    int warpgroup;
};

// Issues the scores of the step-th tile of keys.
template <class P>
DEVICE void forward90_issue_scores(Forward90Consumer<P> &c, const Forward90Shared<P> &shared, unsigned step) {
    wgmma_fence();
    issue_by_rows<P::OWN, P::HS>(c.s[0], c.q, shared.tiles.k[step % P::STAGES]);
    wgmma_commit();
}

// Issues the weights times the step-th tile of values.
template <class P>
DEVICE void forward90_issue_output(Forward90Consumer<P> &c, const Forward90Shared<P> &shared, unsigned step) {
    const char *v = shared.tiles.v[step % P::STAGES];
    const unsigned apart = P::SUMS ? (unsigned)(shared.tiles.ones - v) : panel_bytes<P::STREAM>;
    wgmma_fence();
    issue_by_columns(c.own.sum[0], c.p, v, apart);
    if constexpr (P::ALONG) issue_by_columns(c.along_sum[0], c.along, v, apart);
    wgmma_commit();
}

// later: have scores been issued since then?
template <bool later = false, class P>
DEVICE void forward90_wait_output(Forward90Consumer<P> &c) {
    if constexpr (P::ALONG) wgmma_wait<later>(c.own.sum[0], c.along_sum[0]);
    else wgmma_wait<later>(c.own.sum[0]);
}

// Waits for the queries of a block of rows.
template <class P>
DEVICE void forward90_queries(Forward90Consumer<P> &c, const Forward90Shared<P> &shared, const FlashCall<bf16> &call,
                              const QueryBlock &at, unsigned step) {
    const bool relative = forward_sweep<bf16, P::PHI>(call, true).relative;
    char *q = shared.tiles.q[step % P::OWN_STAGES];
    c.q = q + c.warpgroup * panel_bytes<64>;
    ring_wait_full(shared.barriers.q, step);
    if (forward_may_negate(call, relative)) forward90_negate<P>(q, forward_negates<1>(call, at, true), c.warpgroup);
}

// Issues the scores of the step-th tile of keys, with no matmul beside them.
template <class P>
DEVICE void forward90_start_scores(Forward90Consumer<P> &c, const Forward90Shared<P> &shared, unsigned step) {
    ring_wait_full(shared.barriers.k, step);
    turn_wait(c.warpgroup);
    forward90_issue_scores(c, shared, step);
    turn_pass(c.warpgroup);
}

template <class P>
DEVICE void forward90_wait_scores(Forward90Consumer<P> &c, const Forward90Shared<P> &shared, unsigned step) {
    wgmma_wait<0>(c.s[0]);
    ring_release(shared.barriers.k, step);
}

// From the scores of the tile-th of a block's tiles of keys to weights. Rows see all keys of tiles before the one on
// the diagonal, unless they begin at first_key(). between: see forward_weigh   after(): called with the weights, in the
// same straight piece of code
template <class P, class Between, class After>
DEVICE void forward90_weigh(Forward90Consumer<P> &c, const QueryBlock &at, Forward90Keys keys, int tile,
                            const ForwardSweep &sweep, const FlashCall<bf16> &call, Between between, After after) {
    const Chunk chunk = {at.warp_row, (keys.first + tile) * P::STREAM, at.b};
    static_assert((int)P::OWN == (int)P::STREAM, "one tile of keys is on the diagonal");
    uint32_t (*along)[4] = P::ALONG ? c.along : NULL;
    const bool diagonal = tile == keys.count - 1;
    auto weigh = [&](auto masked, auto &s) {
        forward_weigh<masked.value, bf16, P::PHI, P::POST, P::DIVIDES, !P::SUMS>(s, c.own.row, c.by, chunk, sweep, call,
                                                                                 along, between);
        after();
    };
    if (!P::ALONG && diagonal && at.warp_row + 15 < chunk.other + P::STREAM / 2) {
        // The rows see none of the second half.
        typedef float Half[1][P::NT / 2][4];
        set_zero((Half &)c.s[0][P::NT / 2]);
        weigh(std::true_type(), (Half &)c.s);
    } else if (diagonal || (call.first && chunk.other < first_key(call, at.b, at.warp_row + 15))) {
        weigh(std::true_type(), c.s);
    } else {
        weigh(std::false_type(), c.s);
    }
}

// The same in the sweep that adds to the output. v: the tile's number among all tiles of values. The matmul with the
// tile before it ends meanwhile: it is over when the rows' maxima are known (or earlier, where the weights of both
// would need too many registers). So the output is rescaled, and weights are packed, between the exponentials.
template <class P>
DEVICE void forward90_weights(Forward90Consumer<P> &c, const Forward90Shared<P> &shared, const QueryBlock &at,
                              Forward90Keys keys, int tile, unsigned v, const ForwardSweep &sweep,
                              const FlashCall<bf16> &call) {
    auto output_ends = [&] {
        forward90_wait_output(c);
        if (tile > 0) ring_release(shared.barriers.v, v - 1);
        // For exp, whose factors are otherwise 1, without a condition, so that it runs beside the exponentials.
        if (P::PHI == PHI_EXP ? !P::TWICE : rescales<P::POST>(sweep)) forward_rescale(c.own.sum, c.by);
    };
    auto pack = [&] { pack_weights(c.p, c.s[0]); };
    if constexpr (P::ALONG) {
        output_ends();
        forward90_weigh(c, at, keys, tile, sweep, call, [] {}, pack);
    } else {
        forward90_weigh(c, at, keys, tile, sweep, call, output_ends, pack);
    }
}

// Takes the rows' sums of weights from the columns of ones. Each of a row's four lanes has all of the sum there, and
// forward_ends() adds up what the four have.
template <class P>
DEVICE void forward90_take_sums(Forward90Consumer<P> &c) {
    UNROLL
    for (int r = 0; r < 2; r++) {
        const float sum = threadIdx.x % 4 == 0 ? c.own.sum[0][P::HS / 8][2 * r] : 0;
        float &to = P::TWICE ? c.own.row[r].left : c.own.row[r].sum;
        to = sum;
    }
}

// For the backward pass of powers: sum_j r^(P-1) (1 - r) (v_j - out), which needs the rows' sums of w.
template <class P>
DEVICE void forward90_store_along(Forward90Consumer<P> &c, const FlashCall<bf16> &call, QueryBlock at) {
    static_assert(P::SUMS, "the matmul has summed both");
    const float one[2] = {1, 1};
    if (!call.along) return;
    UNROLL
    for (int r = 0; r < 2; r++) {
        const float mean = c.along_sum[0][P::HS / 8][2 * r] * inverse_or_zero(c.own.sum[0][P::HS / 8][2 * r]);
        UNROLL
        for (int n = 0; n < P::HS / 8; n++) {
            UNROLL
            for (int e = 2 * r; e < 2 * r + 2; e++) c.along_sum[0][n][e] -= mean * c.own.sum[0][n][e];
        }
    }
    bf16 *along = call.along + ((size_t)at.head * call.T + at.warp_row) * call.VS;
    store_rows(TileTarget<bf16>{along, (size_t)call.VS, call.T - at.warp_row, call.VS},
               (float (&)[1][P::HS / 8][4]) c.along_sum, one);
}

// A block of rows, whose first scores have been issued if AHEAD. more: is there a `next` one?
template <class P>
DEVICE void forward90_compute(Forward90Consumer<P> &c, const Forward90Shared<P> &shared, const FlashCall<bf16> &call,
                              const QueryBlock &at, Forward90Passed &passed, const QueryBlock &next, bool more) {
    const ForwardSweep last = forward_sweep<bf16, P::PHI>(call, true);
    const Forward90Keys keys = forward90_keys<P>(call, at);
    unsigned &k = passed.k, &v = passed.v;
    int tile = 0;
    c.by[0] = c.by[1] = 1;
    forward_begin<P::PHI, P::POST>(c.own, call, at, last.relative);
    if (P::ALONG) set_zero(c.along_sum);
    if constexpr (!P::AHEAD) forward90_queries(c, shared, call, at, passed.q);

    if constexpr (P::TWICE) {
        const ForwardSweep first = forward_sweep<bf16, P::PHI>(call, false);
        UNROLL_NOT
        for (; tile < keys.count; tile++, k++) {
            forward90_start_scores(c, shared, k);
            forward90_wait_scores(c, shared, k);
            forward90_weigh(c, at, keys, tile, first, call, [] {}, [] {});
        }
        tile = 0;
        UNROLL
        for (int r = 0; r < 2; r++)
            forward_between<bf16, P::PHI, P::POST>(c.own.row[r], call,
                                                   place_of(call, at.b, at.h, at.warp_row + 8 * r + lane_row()), first);
    }

    // The last tile is separate because nothing, or another block's tile, follows it: with a condition around a matmul,
    // ptxas would not overlap any.
    if constexpr (!P::AHEAD) forward90_start_scores(c, shared, k);
    forward90_wait_scores(c, shared, k++);
    ring_wait_full(shared.barriers.v, v);
    UNROLL_NOT
    for (; tile < keys.count - 1; tile++, k++, v++) {
        forward90_weights(c, shared, at, keys, tile, v, last, call);
        ring_wait_full(shared.barriers.k, k);
        turn_wait(c.warpgroup);
        forward90_issue_scores(c, shared, k);
        forward90_issue_output(c, shared, v);
        turn_pass(c.warpgroup);
        ring_wait_full(shared.barriers.v, v + 1);    // while the scores are on their way
        wgmma_wait<1>(c.s[0]);
        ring_release(shared.barriers.k, k);
    }
    ring_release(shared.barriers.q, passed.q++);
    if (P::AHEAD && more) forward90_queries(c, shared, call, next, passed.q);
    forward90_weights(c, shared, at, keys, tile, v, last, call);
    if (P::AHEAD && more) ring_wait_full(shared.barriers.k, k);
    turn_wait(c.warpgroup);
    forward90_issue_output(c, shared, v);
    if constexpr (P::AHEAD)
        forward90_issue_scores(c, shared, more ? k : k - 1);    // once more, if there is no other block
    if (more || c.warpgroup == 0) turn_pass(c.warpgroup);
    forward90_wait_output<P::AHEAD>(c);
    ring_release(shared.barriers.v, v++);
    if constexpr (P::SUMS) forward90_take_sums(c);
    if constexpr (P::ALONG) forward90_store_along(c, call, at);
    forward_store<P::PHI, P::POST>(c.own, call, at, last.is_signed);
    if (P::AHEAD && !more) wgmma_wait<0>(c.s[0]);
}

// registers: at most 168 (flash90_forward_kernel)
template <int HS, int PHI, int POST>
KERNEL void __launch_bounds__(Forward90Plan<HS, PHI, POST>::THREADS, 1)
    flash90_forward_kernel(const FlashCall<bf16> call, const Forward90Work work, GRID_CONSTANT Forward90Maps maps) {
    typedef Forward90Plan<HS, PHI, POST> P;
    if (!hopper_here()) return;
    DYNAMIC_SHARED(char, memory);
    SHARED_ARRAY(Forward90Barriers<P>, barriers, 1);
    const Forward90Shared<P> shared = {*(Forward90Tiles<P> *)aligned_tile(memory), *barriers};
    Forward90Passed passed = {0, 0, 0};
    if (threadIdx.x == 0) {
        ring_init(barriers->q, 1, 4 * P::CONSUMERS);
        ring_init(barriers->k, 1, 4 * P::CONSUMERS);
        ring_init(barriers->v, 1, 4 * P::CONSUMERS);
        mbarrier_init_fence();
    }
    if (P::SUMS) forward90_write_ones(shared);
    __syncthreads();
    Forward90Place place = {(int)blockIdx.x, false};
    if (threadIdx.x / 128 == P::CONSUMERS) {
        setmaxnreg_dec<P::PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 > 0) return;
        do {
            const QueryBlock at = forward90_block<P>(work, place);
            forward90_load(shared, maps, at, forward90_keys<P>(call, at), passed);
        } while (P::LOOPS && forward90_next(place, work));
    } else {
        setmaxnreg_inc<P::CONSUMER_REGISTERS>();
        Forward90Consumer<P> c;
        c.warpgroup = warpgroup();
        if (c.warpgroup == 1) turn_pass(c.warpgroup);    // the first warpgroup goes first
        QueryBlock next = forward90_block<P>(work, place);
        if constexpr (P::AHEAD) {
            forward90_queries(c, shared, call, next, 0);
            forward90_start_scores(c, shared, 0);
        }
        for (bool more = true; more;) {
            const QueryBlock at = next;
            more = P::LOOPS && forward90_next(place, work);
            if (more) next = forward90_block<P>(work, place);
            forward90_compute(c, shared, call, at, passed, next, more);
        }
    }
}

// All work of a call, without pairs.
template <class P>
Forward90Work forward90_work(const FlashCall<bf16> &call) {
    const int parts = (call.VS - 1) / P::HS + 1;
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
    typedef Forward90Plan<HS, PHI, POST> P;
    Forward90Work work = forward90_work<P>(call);
    int blocks = work.heads * work.blocks;
    if (const int processors = processors_of_device(); P::LOOPS && blocks > processors) {
        work.pairs = divisor((work.blocks + 1) / 2);
        blocks = work.heads * work.pairs.by < processors ? work.heads * work.pairs.by : processors;
    }
    Forward90Maps maps;
    rows_map(&maps.q, call.q, call.HS, call.NH, call.T, call.B, P::OWN);
    rows_map(&maps.k, call.k, call.HS, call.NKV, call.T, call.B, P::STREAM);
    rows_map(&maps.v, call.v, call.VS, call.NKV, call.T, call.B, P::STREAM);
    launch(flash90_forward_kernel<HS, PHI, POST>, dim3(blocks), dim3(P::THREADS), 1024 + sizeof(Forward90Tiles<P>),
           stream, call, work, maps);
}
#endif

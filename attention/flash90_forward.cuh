// The forward kernel of flash90.cuh. flash.cuh's header has the formulas.
//
// A consumer's step: from the scores of tile j it computes weights, while O += W V of tile j - 1 runs; then it issues
// the scores of tile j + 1 and O += W V of tile j. The other consumer's matmuls run meanwhile.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH90_FORWARD_CUH
#define ATTENTION_FLASH90_FORWARD_CUH

#include "attention/flash90.cuh"
#include "attention/flash_forward_row.cuh"

template <int POST, int HS>
constexpr bool keeps_along = flash90_keeps_along(POST, HS);

struct Forward90Maps {
    TensorMap q, k, v;
};

struct Forward90Barriers {
    Mbarrier q;
    Ring<Plan90::STAGES> k, v;
};

// Shared memory, and the tiles of keys that a block's rows see: `count` from tile `first` on.
struct Forward90Tiles {
    char *q, *k, *v;
    Forward90Barriers *barriers;
    int first, count;
};

template <int HS>
constexpr size_t forward90_shared =
    1024 + tile_bytes<Plan90::OWN, HS> + 2 * Plan90::STAGES * tile_bytes<Plan90::STREAM, HS>;

template <int HS>
DEVICE char *stage_of(char *tiles, int step) {
    return tiles + (step % Plan90::STAGES) * tile_bytes<Plan90::STREAM, HS>;
}

template <int HS>
DEVICE Forward90Tiles forward90_tiles(char *memory, Forward90Barriers *barriers, const FlashCall<bf16> &call,
                                      QueryBlock at) {
    Forward90Tiles tiles;
    tiles.q = aligned_tile(memory);
    tiles.k = tiles.q + tile_bytes<Plan90::OWN, HS>;
    tiles.v = tiles.k + Plan90::STAGES * tile_bytes<Plan90::STREAM, HS>;
    tiles.barriers = barriers;
    const int end = at.row0 + Plan90::OWN < call.T ? at.row0 + Plan90::OWN : call.T;
    tiles.first = first_key(call, at.b, at.row0) / Plan90::STREAM;
    tiles.count = (end - 1) / Plan90::STREAM + 1 - tiles.first;
    return tiles;
}

// The producer's thread. Where there are two sweeps, the first needs no values.
template <int HS, bool TWICE>
DEVICE void forward90_load(const Forward90Tiles &tiles, const Forward90Maps &maps, QueryBlock at) {
    Forward90Barriers &barriers = *tiles.barriers;
    load_rows<Plan90::OWN, HS>(tiles.q, &barriers.q, &maps.q, 0, at.h, at.row0, at.b);
    const int steps = TWICE ? 2 * tiles.count : tiles.count, adds_from = steps - tiles.count;
    UNROLL_NOT
    for (int step = 0; step < steps; step++) {
        const int tile = step - (step >= adds_from ? adds_from : 0), row = (tiles.first + tile) * Plan90::STREAM;
        ring_wait_empty(barriers.k, step);
        load_rows<Plan90::STREAM, HS>(stage_of<HS>(tiles.k, step), &barriers.k.full[step % Plan90::STAGES], &maps.k, 0,
                                      at.kv, row, at.b);
        if (step < adds_from) continue;
        ring_wait_empty(barriers.v, tile);
        load_rows<Plan90::STREAM, HS>(stage_of<HS>(tiles.v, tile), &barriers.v.full[tile % Plan90::STAGES], &maps.v,
                                      blockIdx.z * HS, at.kv, row, at.b);
    }
}

// Negates each of the warp's rows of q whose lane passes `negative`, for the matmuls of its warpgroup.
template <int HS>
DEVICE void forward90_negate(char *q, bool negative, int warpgroup) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane;
    if (negative && lane < 16) {
        UNROLL_NOT
        for (int c = 0; c < HS; c++) {
            bf16 *x = (bf16 *)(q + c / PANEL * panel_bytes<Plan90::OWN> + row * PANEL_ROW) + c % PANEL;
            store_shared(x, __float2bfloat16_rn(-to_float(*x)));
        }
    }
    fence_proxy_async();
    named_barrier_sync(1 + Plan90::CONSUMERS + warpgroup, 128);
}

// What a consumer's warp keeps in registers: its rows, their scores or weights for a tile, the factors of the rows'
// output so far, and the weights as operands of the matmul.
template <int HS>
struct Consumer90 {
    ForwardRows<HS, 1> own;
    float s[1][Plan90::NT][4], by[2];
    uint32_t p[Plan90::NT / 2][4];
    uint32_t along[Plan90::NT / 2][4];    // if keeps_along: r^(P-1) (1 - r) as operands,
    float along_sum[HS / 8][4];           // and their sums times v
    const char *q;                        // the warpgroup's rows
    int warpgroup;
};

// Issues the scores of a step's tile.
template <int HS>
DEVICE void forward90_issue_scores(Consumer90<HS> &c, const Forward90Tiles &tiles, int step) {
    wgmma_fence();
    issue_by_rows<Plan90::OWN, HS>(c.s[0], c.q, stage_of<HS>(tiles.k, step));
    wgmma_commit();
}

template <int HS, int POST>
DEVICE void forward90_issue_output(Consumer90<HS> &c, const Forward90Tiles &tiles, int tile) {
    wgmma_fence();
    issue_by_columns(c.own.sum[0], c.p, stage_of<HS>(tiles.v, tile));
    if constexpr (keeps_along<POST, HS>) issue_by_columns(c.along_sum, c.along, stage_of<HS>(tiles.v, tile));
    wgmma_commit();
}

template <int HS, int POST>
DEVICE void forward90_wait_output(Consumer90<HS> &c) {
    if constexpr (keeps_along<POST, HS>) wgmma_wait<0>(c.own.sum[0], c.along_sum);
    else wgmma_wait<0>(c.own.sum[0]);
}

// The scores of a step's tile, with no matmul beside them.
template <int HS>
DEVICE void forward90_scores(Consumer90<HS> &c, const Forward90Tiles &tiles, int step) {
    ring_wait_full(tiles.barriers->k, step);
    turn_wait(c.warpgroup);
    forward90_issue_scores(c, tiles, step);
    turn_pass(c.warpgroup);
    wgmma_wait<0>(c.s[0]);
    ring_release(tiles.barriers->k, step);
}

// From the scores of a tile to weights. Rows see all keys of tiles before the one on the diagonal, unless they begin
// at first_key().
template <int PHI, int POST, int HS>
DEVICE void forward90_weigh(Consumer90<HS> &c, const Forward90Tiles &tiles, QueryBlock at, int tile,
                            const ForwardSweep &sweep, const FlashCall<bf16> &call) {
    const Chunk chunk = {at.warp_row, (tiles.first + tile) * Plan90::STREAM};
    static_assert((int)Plan90::OWN == (int)Plan90::STREAM, "one tile of keys is on the diagonal");
    uint32_t (*along)[4] = keeps_along<POST, HS> ? c.along : NULL;
    if (tile == tiles.count - 1 || (call.first && chunk.other < first_key(call, at.b, at.warp_row + 15)))
        forward_weigh<true, bf16, PHI, POST>(c.s, c.own.row, c.by, chunk, sweep, call, along);
    else forward_weigh<false, bf16, PHI, POST>(c.s, c.own.row, c.by, chunk, sweep, call, along);
}

// The same in the sweep that adds to the output, whose matmul with the tile before it ends meanwhile (except where the
// weights of both would need too many registers).
template <int PHI, int POST, int HS>
DEVICE void forward90_weights(Consumer90<HS> &c, const Forward90Tiles &tiles, QueryBlock at, int tile,
                              const ForwardSweep &sweep, const FlashCall<bf16> &call) {
    if constexpr (keeps_along<POST, HS>) forward90_wait_output<HS, POST>(c);
    forward90_weigh<PHI, POST>(c, tiles, at, tile, sweep, call);
    forward90_wait_output<HS, POST>(c);
    if (tile > 0) ring_release(tiles.barriers->v, tile - 1);
    if (rescales<POST>(sweep)) forward_rescale(c.own.sum, c.by);
    pack_weights(c.p, c.s[0]);
    ring_wait_full(tiles.barriers->v, tile);
}

// For the backward pass under reweight: sum_j r^(P-1) (1 - r) (v_j - out), which needs the rows' sums of w.
template <int HS>
DEVICE void forward90_store_along(Consumer90<HS> &c, const FlashCall<bf16> &call, QueryBlock at) {
    const float one[2] = {1, 1};
    if (!call.along) return;
    UNROLL
    for (int r = 0; r < 2; r++) {
        const float mean = row_sum(c.own.row[r].signs) * inverse_or_zero(row_sum(c.own.row[r].left));
        UNROLL
        for (int n = 0; n < HS / 8; n++) {
            UNROLL
            for (int e = 2 * r; e < 2 * r + 2; e++) c.along_sum[n][e] -= mean * c.own.sum[0][n][e];
        }
    }
    bf16 *along = call.along + ((size_t)blockIdx.y * call.T + at.warp_row) * call.VS;
    store_rows(TileTarget<bf16>{along, (size_t)call.VS, call.T - at.warp_row, call.VS},
               (float (&)[1][HS / 8][4]) c.along_sum, one);
}

template <int HS, int PHI, int POST>
DEVICE void forward90_compute(const Forward90Tiles &tiles, const FlashCall<bf16> &call, QueryBlock at) {
    const ForwardSweep last = forward_sweep<bf16, PHI, POST>(call, true);
    Consumer90<HS> c;
    bool negative;
    int step = 0, tile = 0;
    c.warpgroup = threadIdx.x / 128;
    c.q = tiles.q + c.warpgroup * panel_bytes<64>;
    forward_begin<PHI, POST>(c.own, &negative, call, at, last.relative);
    if constexpr (keeps_along<POST, HS>) set_zero((float (&)[1][HS / 8][4]) c.along_sum);
    mbarrier_wait(&tiles.barriers->q, 0);
    if (last.relative) forward90_negate<HS>(tiles.q, negative, c.warpgroup);
    if (c.warpgroup == 1) turn_pass(c.warpgroup);    // the first warpgroup goes first

    if constexpr (POST >= FLASH_RECENTER_L1) {
        const ForwardSweep first = forward_sweep<bf16, PHI, POST>(call, false);
        UNROLL_NOT
        for (; step < tiles.count; step++) {
            forward90_scores(c, tiles, step);
            forward90_weigh<PHI, POST>(c, tiles, at, step, first, call);
        }
        UNROLL
        for (int r = 0; r < 2; r++)
            forward_between<bf16, PHI, POST>(c.own.row[r], call,
                                             place_of(call, at.b, at.h, at.warp_row + 8 * r + lane_row()), first);
    }

    // The last tile is separate because nothing follows it: with a condition around a matmul, ptxas would not overlap
    // any.
    forward90_scores(c, tiles, step);
    UNROLL_NOT
    for (; tile < tiles.count - 1; tile++) {
        forward90_weights<PHI, POST>(c, tiles, at, tile, last, call);
        step++;
        ring_wait_full(tiles.barriers->k, step);
        turn_wait(c.warpgroup);
        forward90_issue_scores(c, tiles, step);
        forward90_issue_output<HS, POST>(c, tiles, tile);
        turn_pass(c.warpgroup);
        wgmma_wait<1>(c.s[0]);
        ring_release(tiles.barriers->k, step);
    }
    forward90_weights<PHI, POST>(c, tiles, at, tile, last, call);
    turn_wait(c.warpgroup);
    forward90_issue_output<HS, POST>(c, tiles, tile);
    if (c.warpgroup == 0) turn_pass(c.warpgroup);
    forward90_wait_output<HS, POST>(c);
    ring_release(tiles.barriers->v, tile);
    if constexpr (keeps_along<POST, HS>) forward90_store_along(c, call, at);
    forward_store<PHI, POST>(c.own, call, at, last.is_signed);
}

// registers: at most 168 (flash90_forward_kernel)
template <int HS, int PHI, int POST>
KERNEL void __launch_bounds__(Plan90::THREADS, 1)
    flash90_forward_kernel(const FlashCall<bf16> call, GRID_CONSTANT Forward90Maps maps) {
    if (!hopper_here()) return;
    DYNAMIC_SHARED(char, memory);
    SHARED_ARRAY(Forward90Barriers, barriers, 1);
    const QueryBlock at = query_block<Plan90>(call, call.from);
    const Forward90Tiles tiles = forward90_tiles<HS>(memory, barriers, call, at);
    if (threadIdx.x == 0) {
        mbarrier_init(&barriers->q, 1);
        ring_init(barriers->k, 1, 4 * Plan90::CONSUMERS);
        ring_init(barriers->v, 1, 4 * Plan90::CONSUMERS);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x / 128 == Plan90::CONSUMERS) {
        setmaxnreg_dec<Plan90::PRODUCER_REGISTERS>();
        if (threadIdx.x % 128 == 0) forward90_load<HS, (POST >= FLASH_RECENTER_L1)>(tiles, maps, at);
    } else {
        setmaxnreg_inc<Plan90::CONSUMER_REGISTERS>();
        forward90_compute<HS, PHI, POST>(tiles, call, at);
    }
}

template <int HS, int PHI, int POST>
void flash90_forward_launch(const FlashCall<bf16> &call, cudaStream_t stream) {
    Forward90Maps maps;
    rows_map(&maps.q, call.q, call.HS, call.NH, call.T, call.B, Plan90::OWN);
    rows_map(&maps.k, call.k, call.HS, call.NKV, call.T, call.B, Plan90::STREAM);
    rows_map(&maps.v, call.v, call.VS, call.NKV, call.T, call.B, Plan90::STREAM);
    const dim3 grid((call.T - 1) / Plan90::OWN + 1 - call.from / Plan90::OWN, call.B * call.NH, (call.VS - 1) / HS + 1);
    launch(flash90_forward_kernel<HS, PHI, POST>, grid, dim3(Plan90::THREADS), forward90_shared<HS>, stream, call,
           maps);
}
#endif

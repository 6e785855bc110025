// The backward pass of flash90.cuh: dq, dk and dv with five matmuls. flash.cuh's header has the formulas.
//
// A block owns OWN keys, 64 for each consumer, and goes through the queries that see them, STREAM at a time. A
// consumer's step:
//
//   Sᵀ = K Qᵀ,  dPᵀ = V dOᵀ           (64,STREAM), in registers, where they become weights W and score gradients dZ,
//                                     times the rows' scales in phi's unit
//   dV += Wᵀ dO,  dK += dZᵀ Q         with left operands from registers
//   dQ = dZ K, of the step before     with the dZ of both consumers, from shared memory; each has half of the columns
//
// As dQ is a step late, a consumer does not have to wait for the other's dZ. All of these are issued together, with S
// and dP of the next step last where registers allow that, so that the tensor cores are busy while the consumer hands
// over dQ. With a head size of at most 64, the consumers issue them in turns, so that one's matmuls run while the other
// computes dZ; otherwise both would compute at the same time and then both wait for the tensor cores.
//
// Many blocks add to a query's dQ, in float32 in global memory, by the asynchronous additions of one or two warps. By
// default they do so in a fixed order. A counter for each tile of queries tells whose turn it is. Blocks have numbers,
// which are drawn, so that each waits only for blocks that have started. There are two orders, between which
// flash90_last_queries_first() chooses:
//
//   last queries first   All blocks start with the last queries, and the sums with the first keys.
//       Numbers begin with the first keys, which most queries see, of several heads. So the longest blocks start first,
//       and the short ones fill the end. Blocks of a head that start together wait for each other only at first.
//   first queries first   Sums start with the last keys that a query sees, which is the order in which the blocks of a
//       head reach it if they start together. Numbers go head by head, so that few heads are in the L2 cache.
//
// flash90_dq_kernel then rounds the sums.
//
// The gated unit's wide values (VS > 128) are processed in parts of HS columns, each by blocks of its own, like a
// head: dO · v is a sum over the columns, and dz is linear in it. So a part has its own D, less and dv, and its share
// of dq and dk. Blocks add dq in the order of their keys, then of their parts, every second part to a sum of its own.
// Those of the same keys add dk in the order of their parts, and the last one stores it.
//
// With a head size of at most 64, there are at most as many blocks of the grid as SMs, and each draws one block of keys
// after the other: it loads the next while it finishes the one before.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH90_BACKWARD_CUH
#define ATTENTION_FLASH90_BACKWARD_CUH

#include "attention/flash90.cuh"
#include "attention/flash_backward.cuh"

struct Backward90Plan {
    enum {
        CONSUMERS = 2,
        THREADS = 128 * (CONSUMERS + 1),
        OWN = FLASH90_KEYS,
        STREAM = FLASH90_QUERIES,
        NT = STREAM / 8,
        STAGES = 2,
        // With 168 registers for each of 384 threads at first, there are 64,512.
        PRODUCER_REGISTERS = 24,
        CONSUMER_REGISTERS = 240
    };
};

// A head size of 128 leaves room for one buffer of dq. One of 64 leaves registers for K and V as left operands, which
// then do not have to be read from shared memory again for each tile of queries, and for S and dP of the next step
// while the other matmuls run.
template <int HS>
constexpr int dq_stages = HS <= 64 ? 4 : 1;

// The warps that add dq. Each has buffers of its own, so it waits for every phase of a buffer, in turn.
template <int HS>
constexpr int dq_adders = dq_stages<HS> > 1 ? 2 : 1;

template <int HS>
constexpr bool keeps_own = HS <= 64;

// The buffers of dz. Before a consumer writes step j, it has waited for the other's dz of step j - 2, which the other
// wrote after its dq of step j - 4 was complete, the last reader of this buffer. So with four buffers, nobody has to
// wait until one is free; three need barriers.
template <int HS>
constexpr int dz_stages = HS <= 64 ? 4 : 3;

template <int HS>
constexpr bool scores_ahead = HS <= 64;

// Before others may see what a warp has stored, a fence takes some hundred clocks. With several buffers for dq, a step
// can share it together with the next step's dz.
template <int HS>
constexpr bool shares_late = dq_stages<HS> > 1;

// Does a block of the grid compute one block of keys after the other? Where there is room for two tiles of K: that of V
// is free as soon as V is in registers.
template <int HS>
constexpr bool backward90_loops = HS <= 64;

template <int HS, int PHI>
constexpr bool last_queries_first = flash90_last_queries_first(PHI, HS);

template <int HS>
constexpr int key_stages = backward90_loops<HS> ? 2 : 1;

// K is in panels of HS/2 columns, of which each consumer needs one for dq.
template <int HS>
constexpr int key_panel = HS / 2;

template <int HS>
constexpr Swizzle key_swizzle = HS / 2 == PANEL ? SWIZZLE_128 : SWIZZLE_64;

struct Backward90Maps {
    TensorMap q, k, v, dout;
    int together;    // the number of key heads whose blocks share a range of numbers
};

// A tile of keys of a head, and the tiles of queries that see some of them: `count` of each query head from h to
// h_end - 1, from `first` on. In a loop over blocks, each needs two steps: the last one waits for K of the next block,
// whose buffer is free after the first. So a single step is followed by another one, of zeros. With it, there are
// `steps`, up to head steps_h_end - 1. 0 steps: there is no block with this number.
//
// With wide values, a block has a part of their columns, HS from part · HS on. call.rows has the numbers of a part's
// heads together; those of the sequence's first head are at rows · T.
struct Backward90Work {
    int b, kv, tile, h, h_end, steps_h_end, first, count, steps, part, rows;
};

// With blocks of two steps, 2 would not do: dq is handed over two steps late, and only then is its block done.
enum { WORK_STAGES = 4 };

template <int HS>
struct Backward90Barriers {
    Ring<WORK_STAGES> work;
    Ring<key_stages<HS>> k;
    Ring<1> v;
    Ring<Backward90Plan::STAGES> queries;    // q, dout and rows
    Ring<dz_stages<HS>> dz;
    Ring<dq_stages<HS>> dq;
};

// Shared memory.
template <int HS>
struct Backward90Tiles {
    char *k, *v;             // key_stages of (OWN,HS), and one
    char *q, *dout;          // STAGES of (STREAM,HS)
    char *dz;                // dz_stages of (OWN,STREAM)
    float4 *dq;              // dq_stages of (STREAM,HS) floats, in the order in which threads hold them
    float4 *rows;            // STAGES of (2,STREAM): halves of FlashRow
    Backward90Work *work;    // WORK_STAGES
    Backward90Barriers<HS> *barriers;
};

template <int HS>
constexpr unsigned dq_pieces = Backward90Plan::STREAM * HS / 4;    // of a tile of dq, 16 bytes each

enum { DZ_BYTES = Backward90Plan::OWN * PANEL_ROW, ROW_PIECES = 2 * Backward90Plan::STREAM };

template <int HS>
constexpr size_t backward90_shared =
    1024 + (key_stages<HS> + 1) * tile_bytes<Backward90Plan::OWN, HS> +
    2 * Backward90Plan::STAGES * tile_bytes<Backward90Plan::STREAM, HS> + dz_stages<HS> * DZ_BYTES +
    (dq_stages<HS> * dq_pieces<HS> + Backward90Plan::STAGES * ROW_PIECES) * 16;

template <int HS>
DEVICE Backward90Tiles<HS> backward90_tiles(char *memory, Backward90Barriers<HS> *barriers, Backward90Work *work) {
    typedef Backward90Plan P;
    Backward90Tiles<HS> tiles;
    tiles.k = aligned_tile(memory);
    tiles.v = tiles.k + key_stages<HS> * tile_bytes<P::OWN, HS>;
    tiles.q = tiles.v + tile_bytes<P::OWN, HS>;
    tiles.dout = tiles.q + P::STAGES * tile_bytes<P::STREAM, HS>;
    tiles.dz = tiles.dout + P::STAGES * tile_bytes<P::STREAM, HS>;
    tiles.dq = (float4 *)(tiles.dz + dz_stages<HS> * DZ_BYTES);
    tiles.rows = tiles.dq + dq_stages<HS> * dq_pieces<HS>;
    tiles.work = work;
    tiles.barriers = barriers;
    return tiles;
}

// The K of the block-th block of keys.
template <int HS>
DEVICE char *keys_of(const Backward90Tiles<HS> &tiles, unsigned block) {
    return tiles.k + (block % key_stages<HS>)*tile_bytes<Backward90Plan::OWN, HS>;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a block does

// A step's tile of queries.
struct QueryTile {
    int h, tile;
};

// Stores in `work` what the block with this number is.
template <int HS, bool LAST_FIRST, class X>
DEVICE void backward90_work(Backward90Work &work, const FlashCall<X> &call, int together, int number) {
    typedef Backward90Plan P;
    const int tiles = anew((call.T - 1) / P::OWN + 1), NKV = anew(call.NKV), parts = HS <= 64 ? 1 : anew(call.parts),
              group = call.NH / NKV, before = number / (together * tiles * parts) * together,
              heads = min(together, call.B * NKV - before), at = number - before * tiles * parts;
    work.steps = 0;
    if (heads <= 0 || at >= heads * tiles * parts) return;    // the last range has fewer heads
    const int head = before + at % heads, turn = at / heads / parts,
              tile = LAST_FIRST || call.any_order ? turn : tiles - 1 - turn;
    work.b = head / NKV;
    work.kv = head % NKV;
    work.part = at / heads % parts;
    work.rows = (work.part * call.B + work.b) * call.NH;
    work.tile = tile;
    work.h = work.kv * group;
    work.h_end = work.h + group;
    work.first = tile * P::OWN / P::STREAM;
    // Queries that start after these keys see none of them, and neither do later ones.
    int end = (call.T - 1) / P::STREAM + 1;
    UNROLL_NOT
    for (int least = work.first + 1; call.first && least < end;) {
        const int middle = (least + end) / 2;
        if ((work.tile + 1) * P::OWN <= first_key(call, work.b, middle * P::STREAM)) end = middle;
        else least = middle + 1;
    }
    work.count = end - work.first;
    work.steps = work.count * (anew(call.NH) / anew(call.NKV));    // divided again, for lack of registers
    work.steps_h_end = work.h_end;
    if (work.steps > 1 || !backward90_loops<HS>) return;
    work.steps++;
    work.steps_h_end++;
}

// A block's first tile of queries.
template <bool LAST_FIRST>
DEVICE QueryTile first_tile(const Backward90Work &work) {
    return {work.h, work.first + (LAST_FIRST ? work.count - 1 : 0)};
}

// The tile after `at`, of the same or the next query head.
template <bool LAST_FIRST>
DEVICE void next_tile(QueryTile &at, const Backward90Work &work) {
    at.tile += LAST_FIRST ? -1 : 1;
    if (at.tile >= work.first && at.tile < work.first + work.count) return;
    at.tile += LAST_FIRST ? work.count : -work.count;
    at.h++;
}

// ---------------------------------------------------------------------------------------------------------------------
// The producer's warps

// Waits until it is known what the block-th block of keys is. A warp that has read it for the last time releases it.
template <int HS>
DEVICE const Backward90Work &work_of(const Backward90Tiles<HS> &tiles, unsigned block) {
    ring_wait_full(tiles.barriers->work, block);
    return tiles.work[block % WORK_STAGES];
}

// By one thread: draws blocks of keys, tells the other warps, and loads K and V, then Q and dO of each step.
template <int HS, bool LAST_FIRST>
DEVICE void backward90_load(const Backward90Tiles<HS> &tiles, const Backward90Maps &maps, const FlashCall<bf16> &call) {
    typedef Backward90Plan P;
    Backward90Barriers<HS> &barriers = *tiles.barriers;
    auto &ring = barriers.queries;
    unsigned step = 0;
    UNROLL_NOT
    for (unsigned block = 0; block == 0 || backward90_loops<HS>; block++) {
        ring_wait_empty(barriers.work, block);
        Backward90Work &work = tiles.work[block % WORK_STAGES];
        backward90_work<HS, LAST_FIRST>(work, call, maps.together, (int)atomicAdd(call.counters, 1u));
        mbarrier_arrive(&barriers.work.full[block % WORK_STAGES]);
        if (work.steps == 0) return;
        Mbarrier *k_full = &barriers.k.full[block % key_stages<HS>], *v_full = &barriers.v.full[0];
        ring_wait_empty(barriers.k, block);
        mbarrier_arrive_expect_tx(k_full, tile_bytes<P::OWN, HS>);
        load_panels<P::OWN, HS, key_panel<HS>>(keys_of(tiles, block), k_full, &maps.k, 0, work.kv, work.tile * P::OWN,
                                               work.b);
        ring_wait_empty(barriers.v, block);
        load_rows<P::OWN, HS>(tiles.v, v_full, &maps.v, work.part * HS, work.kv, work.tile * P::OWN, work.b);
        QueryTile at = first_tile<LAST_FIRST>(work);
        UNROLL_NOT
        for (; at.h < work.steps_h_end; step++, next_tile<LAST_FIRST>(at, work)) {
            Mbarrier *full = &ring.full[step % P::STAGES];
            const int offset = (step % P::STAGES) * tile_bytes<P::STREAM, HS>;
            ring_wait_empty(ring, step);
            mbarrier_arrive_expect_tx(full, 2 * tile_bytes<P::STREAM, HS>);
            const int h = at.h < work.h_end ? at.h : call.NH;    // TMA fills what is outside with zeros
            load_panels<P::STREAM, HS>(tiles.q + offset, full, &maps.q, 0, h, at.tile * P::STREAM, work.b);
            load_panels<P::STREAM, HS>(tiles.dout + offset, full, &maps.dout, work.part * HS, h, at.tile * P::STREAM,
                                       work.b);
        }
    }
}

// By a warp: copies the FlashRows of a block's steps, zeros for rows past T. step: the number of steps before it
template <int HS, bool LAST_FIRST, class Work>
DEVICE void backward90_load_rows(const Backward90Tiles<HS> &tiles, Work work, unsigned &step,
                                 const FlashCall<bf16> &call, int lane) {
    typedef Backward90Plan P;
    enum { EACH = P::STREAM / 32 };    // rows of a lane
    auto &ring = tiles.barriers->queries;
    QueryTile at = first_tile<LAST_FIRST>(work());
    UNROLL_NOT
    for (; at.h < work().steps_h_end; step++, next_tile<LAST_FIRST>(at, work())) {
        UNROLL
        for (int i = 0; i < EACH; i++) {    // one at a time, for lack of registers
            const int mine = lane + 32 * i, row = at.tile * P::STREAM + mine;
            const float4 *from = (const float4 *)(call.rows + (size_t)(work().rows + at.h) * call.T + row);
            // The weights of rows that do not exist are 0: factor is, or with exp the bias is -infinity.
            float4 halves[2] = {make_float4(0, call.phi == PHI_EXP ? -INFINITY : 0, 0, 0), make_float4(0, 0, 0, 0)};
            if (row < call.T && at.h < work().h_end) {
                halves[0] = from[0];
                halves[1] = from[1];
            }
            if (i == 0) ring_wait_empty(ring, step);
            float4 *to = tiles.rows + (step % P::STAGES) * ROW_PIECES + mine;
            to[0] = halves[0];
            to[P::STREAM] = halves[1];
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&ring.full[step % P::STAGES]);
    }
    __syncwarp();    // all lanes have read `work`
}

// A step's dq.
template <int HS>
DEVICE float4 *dq_of(const Backward90Tiles<HS> &tiles, unsigned step) {
    return tiles.dq + dq_pieces<HS> * (step % dq_stages<HS>);
}

// Which of the sums of dq a block adds to.
template <int HS>
DEVICE int set_of(const FlashCall<bf16> &call, const Backward90Work &work) {
    return HS <= 64 ? 0 : work.part % call.dq_sets;
}

// How many blocks add to this tile of queries before a block does: those of later keys that it sees (LAST_FIRST: of
// earlier ones), and those of the same keys and earlier parts.
template <int HS, bool LAST_FIRST>
DEVICE int blocks_before(const FlashCall<bf16> &call, const Backward90Work &work, int tile) {
    typedef Backward90Plan P;
    const int row = tile * P::STREAM,
              others = LAST_FIRST ? work.tile - first_key(call, work.b, row) / P::OWN : row / P::OWN - work.tile;
    if (HS <= 64) return others;
    const int sets = call.dq_sets, parts = (call.parts - 1 - set_of<HS>(call, work)) / sets + 1;
    return others * parts + work.part / sets;
}

// By one thread of each of dq_adders warps: adds its tiles of a block's dq to global memory. While one waits until the
// others see that its addition is over, the other begins with the next. step: the number of steps before the block
template <int HS, bool LAST_FIRST>
DEVICE void backward90_add(const Backward90Tiles<HS> &tiles, const Backward90Work &work, unsigned &step,
                           const FlashCall<bf16> &call, int adder) {
    typedef Backward90Plan P;
    auto &ring = tiles.barriers->dq;
    static_assert(dq_stages<HS> % dq_adders<HS> == 0, "a buffer belongs to one warp");
    const int row_tiles = (call.T - 1) / P::STREAM + 1;
    QueryTile at = first_tile<LAST_FIRST>(work);
    UNROLL_NOT
    for (; at.h < work.steps_h_end; step++, next_tile<LAST_FIRST>(at, work)) {
        if (step % dq_adders<HS> != (unsigned)adder) continue;
        if (at.h == work.h_end) {    // nothing to add
            ring_wait_full(ring, step);
            mbarrier_arrive(&ring.empty[step % dq_stages<HS>]);
            continue;
        }
        const size_t head = (set_of<HS>(call, work) * call.B + work.b) * call.NH + at.h,
                     tile = head * row_tiles + at.tile;
        const float4 *from = dq_of(tiles, step);
        float *to = call.dq_sums + tile * (P::STREAM * HS);
        unsigned *turn = call.counters + 1 + tile;
        const int before = blocks_before<HS, LAST_FIRST>(call, work, at.tile);
        if (!call.any_order) wait_for_counter(turn, before);
        ring_wait_full(ring, step);
        if (!call.any_order && before == 0) bulk_store(to, from, dq_pieces<HS> * 16);
        else bulk_reduce_add(to, (const float *)from, dq_pieces<HS> * 16);
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(&ring.empty[step % dq_stages<HS>]);
        if (call.any_order) continue;
        bulk_wait<0>();
        add_to_counter(turn, 1);
    }
}

// Calls act(work) for each block of keys. By a warp, or by its first lane alone.
template <int HS, class Act>
DEVICE void for_each_block(const Backward90Tiles<HS> &tiles, int lane, Act act) {
    UNROLL_NOT
    for (unsigned block = 0; block == 0 || backward90_loops<HS>; block++) {
        const Backward90Work &work = work_of(tiles, block);
        if (work.steps == 0) return;
        act([&]() -> const Backward90Work & { return tiles.work[anew((int)block) % WORK_STAGES]; });
        if (lane == 0) mbarrier_arrive(&tiles.barriers->work.empty[anew((int)block) % WORK_STAGES]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The consumers

// The cosines and sines of RoPE's angles for a lane's columns of one of its two rows (cuda/rope.cuh).
template <int HS>
struct LaneAngles {
    float2 cosines[HS / 16], sines[HS / 16];
};

// row: the position
template <int HS>
DEVICE LaneAngles<HS> load_angles(int row, const FlashCall<bf16> &call) {
    const int at = (row < call.T ? row : call.T - 1) * (HS / 2) + lane_column();
    LaneAngles<HS> angles;
    UNROLL
    for (int n = 0; n < HS / 16; n++) {
        angles.cosines[n] = *(const float2 *)(call.rope.cosines + at + 8 * n);
        angles.sines[n] = *(const float2 *)(call.rope.sines + at + 8 * n);
    }
    return angles;
}

// Turns the lane's r-th row of gradients, times `by`, back by RoPE's angles.
template <int HS>
DEVICE void undo_rope(float (&d)[1][HS / 8][4], float by, int r, const LaneAngles<HS> &angles) {
    UNROLL
    for (int n = 0; n < HS / 16; n++) {
        const float2 c = angles.cosines[n], s = angles.sines[n];
        float *a = d[0][n] + 2 * r, *b = d[0][n + HS / 16] + 2 * r;
        const float a0 = a[0] * by, a1 = a[1] * by, b0 = b[0] * by, b1 = b[1] * by;
        a[0] = a0 * c.x + b0 * s.x;
        a[1] = a1 * c.y + b1 * s.y;
        b[0] = b0 * c.x - a0 * s.x;
        b[1] = b1 * c.y - a1 * s.y;
    }
}

// What a consumer's thread keeps in registers.
template <int HS>
struct Backward90Consumer {
    enum { KEPT = keeps_own<HS> ? HS / 16 : 1, NT = Backward90Plan::NT };
    float dk[1][HS / 8][4], dv[1][HS / 8][4];
    float s[NT][4], d[NT][4];                // scores; dO · v
    uint32_t w[NT / 2][4], dz[NT / 2][4];    // weights and dz as left operands
    uint32_t k[KEPT][4], v[KEPT][4];         // left operands
    int number;                              // the consumer's
};

// The first of the warp's keys among the block's. Recomputed where it is needed, so that it occupies no registers.
DEVICE int warp_row() {
    return (anew(threadIdx.x) / 32) * 16;
}

// A left operand, 16 rows by 16 columns, of a tile in panels of WIDTH columns and ROWS rows.
template <int ROWS, int WIDTH>
DEVICE void load_left_swizzled(uint32_t (&a)[4], const char *tile, int row, int column, Swizzle swizzle) {
    const int lane = threadIdx.x % 32, c = column + (lane / 16) * 8;
    const unsigned byte = (row + lane % 16) * (WIDTH * sizeof(bf16)) + (c % WIDTH) * sizeof(bf16);
    ldmatrix_x4(a, (const bf16 *)(tile + (c / WIDTH) * (ROWS * WIDTH * sizeof(bf16)) + swizzled_byte(byte, swizzle)));
}

// Waits for the K and V of the block-th block of keys. They become left operands if registers keep them.
template <int HS>
DEVICE void backward90_begin(Backward90Consumer<HS> &c, const Backward90Tiles<HS> &tiles, unsigned block) {
    typedef Backward90Plan P;
    const int row = warp_row();
    ring_wait_full(tiles.barriers->k, block);
    ring_wait_full(tiles.barriers->v, block);
    UNROLL
    for (int k = 0; keeps_own<HS> && k < HS / 16; k++) {
        load_left_swizzled<P::OWN, key_panel<HS>>(c.k[keeps_own<HS> ? k : 0], keys_of(tiles, block), row, 16 * k,
                                                  key_swizzle<HS>);
        load_left_swizzled<P::OWN, PANEL>(c.v[keeps_own<HS> ? k : 0], tiles.v, row, 16 * k, SWIZZLE_128);
    }
    __syncwarp();    // all lanes have read V
    ring_release(tiles.barriers->v, block, keeps_own<HS>);
}

// Issues S and dO · v.
template <int HS>
DEVICE void backward90_issue_scores(Backward90Consumer<HS> &c, const Backward90Tiles<HS> &tiles, unsigned step) {
    typedef Backward90Plan P;
    const int offset = (step % P::STAGES) * tile_bytes<P::STREAM, HS>;
    wgmma_fence();
    if constexpr (keeps_own<HS>) {
        issue_by_rows(c.s, c.k, tiles.q + offset);
        issue_by_rows(c.d, c.v, tiles.dout + offset);
    } else {
        issue_by_rows<P::OWN, HS>(c.s, tiles.k + c.number * panel_bytes<64>, tiles.q + offset);
        issue_by_rows<P::OWN, HS>(c.d, tiles.v + c.number * panel_bytes<64>, tiles.dout + offset);
    }
    wgmma_commit();
}

// Which of the lane's 4 NT elements are visible: bit 4 nt + e.
template <int NT>
DEVICE uint32_t visible_elements(Chunk chunk, const FlashCall<bf16> &call) {
    uint32_t visible = 0;
    static_assert(4 * NT <= 32, "one bit each");
    UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int first = call.first ? first_key(call, chunk.b, other_position(chunk, {0, i / 2, i % 2})) : 0;
        UNROLL
        for (int e = i % 2; e < 4; e += 2) {
            const Element at = {0, i / 2, e};
            if (is_visible<true>(chunk, at) && own_position(chunk, at) >= first) visible |= 1u << (4 * at.nt + e);
        }
    }
    return visible;
}

// Sets to 0 the elements of an operand whose bit of `visible` is 0.
DEVICE void hide_elements(uint32_t (&a)[4], uint32_t visible) {
    UNROLL
    for (int i = 0; i < 4; i++) {
        const uint32_t low = visible >> (2 * i) & 1, high = visible >> (2 * i + 1) & 1;
        a[i] &= low * 0xFFFF | high * 0xFFFF0000;
    }
}

// The rows of the lane's columns of an operand, 16 queries.
typedef FlashRow OperandRows[2][2];

template <int HS>
DEVICE void backward90_rows(OperandRows &rows, const Backward90Tiles<HS> &tiles, unsigned step, int k) {
    typedef Backward90Plan P;
    UNROLL
    for (int nt = 0; nt < 2; nt++)
        rows_of_lane(rows[nt], tiles.rows + (step % P::STAGES) * ROW_PIECES, 16 * k + 8 * nt, P::STREAM);
}

// A block's sequence, its first key, and the query after those of its first head that see its keys.
struct Backward90Span {
    int b, key0, end;
};

// Are those of the first operand read a step ahead? In other cases there are too few registers.
template <int HS, int POST>
constexpr bool reads_first_ahead = HS <= 64 && POST == FLASH_PLAIN;

// With exp, the sign of the weights: all of them are negated, or none.
template <int PHI>
DEVICE float sign_of_exp(const FlashCall<bf16> &call) {
    return PHI == PHI_EXP && call.post == POST_NEGATE ? -1 : 1;
}

// Waits for the scores. They become weights, and dO · v becomes dz, which both consumers need for dq:
// backward90_share() follows. Rows are read ahead. span(): the block's Backward90Span   first: the rows of the first
// operand
template <int HS, int PHI, int POST, class Span>
DEVICE void backward90_weigh(Backward90Consumer<HS> &c, const Backward90Tiles<HS> &tiles, unsigned step, Span span,
                             int row0, OperandRows &first, const FlashCall<bf16> &call) {
    typedef Backward90Plan P;
    enum { PARTS = P::NT / 2 };    // of 16 queries, which is an operand's
    OperandRows rows[2];
    if (!reads_first_ahead<HS, POST>) backward90_rows(first, tiles, step, 0);
    wgmma_wait<0>(c.s, c.d);
    UNROLL
    for (int k = 0; k < PARTS; k++) {
        const OperandRows &now = k == 0 ? first : rows[k % 2];
        float s[1][2][4], d[1][2][4];
        if (k + 1 < PARTS) backward90_rows(rows[(k + 1) % 2], tiles, step, k + 1);
        for_each_element(s, [&](Element at) {
            s[0][at.nt][at.e] = c.s[2 * k + at.nt][at.e];
            d[0][at.nt][at.e] = c.d[2 * k + at.nt][at.e];
        });
        auto rows_of = [&](int nt) { return now[nt]; };
        dkv_values<PHI, POST, false>(s, d, rows_of, [](Element) { return false; }, call);
        pack_operand(c.w[k], s[0][0], s[0][1]);
        pack_operand(c.dz[k], d[0][0], d[0][1]);
    }
    const int warp_key = span().key0 + warp_row();
    if (row0 < warp_key + 15 || (call.first && warp_key < first_key(call, span().b, row0 + P::STREAM - 1))) {
        const uint32_t visible = visible_elements<P::NT>({warp_key, row0, span().b}, call);
        UNROLL
        for (int k = 0; k < PARTS; k++) {
            hide_elements(c.w[k], visible >> 8 * k);
            hide_elements(c.dz[k], visible >> 8 * k);
        }
    }
    const int thread = anew(threadIdx.x), key = (thread / 32) * 16 + thread % 16, query = ((thread % 32) / 16) * 8;
    char *tile = tiles.dz + DZ_BYTES * (step % dz_stages<HS>);
    if (dz_stages<HS> < 4) ring_wait_empty(tiles.barriers->dz, step);
    UNROLL
    for (int k = 0; k < PARTS; k++)
        stmatrix_x4(tile + swizzled_byte(key * PANEL_ROW + (16 * k + query) * sizeof(bf16), SWIZZLE_128), c.dz[k]);
}

// Makes visible what the warp has stored: a step's dz to the other consumer, and a step's dq to backward90_add();
// -1: none.
template <int HS>
DEVICE void backward90_share(const Backward90Tiles<HS> &tiles, int dz_step, int dq_step) {
    fence_proxy_async();
    __syncwarp();
    const bool first = threadIdx.x % 32 == 0;
    if (first && dz_step >= 0) mbarrier_arrive(&tiles.barriers->dz.full[dz_step % dz_stages<HS>]);
    if (first && dq_step >= 0) mbarrier_arrive(&tiles.barriers->dq.full[dq_step % dq_stages<HS>]);
}

// Issues dV and dK.
template <int HS>
DEVICE void backward90_issue_keys(Backward90Consumer<HS> &c, const Backward90Tiles<HS> &tiles, unsigned step) {
    const int offset = (step % Backward90Plan::STAGES) * tile_bytes<Backward90Plan::STREAM, HS>;
    wgmma_fence();
    issue_by_columns(c.dv[0], c.w, tiles.dout + offset);
    issue_by_columns(c.dk[0], c.dz, tiles.q + offset);
    wgmma_commit();
}

// Issues the consumer's columns of dq, from `dz`, which has both consumers' rows.
template <int HS>
DEVICE void backward90_issue_queries(float (&dq)[key_panel<HS> / 8][4], const char *keys, const char *dz,
                                     int consumer) {
    typedef Backward90Plan P;
    constexpr int ROW = key_panel<HS> * sizeof(bf16);
    const uint64_t a = matrix_descriptor(dz, 0, 8 * PANEL_ROW, SWIZZLE_128),
                   b = matrix_descriptor(keys + consumer * (P::OWN * ROW), 0, 8 * ROW, key_swizzle<HS>);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < P::OWN / 16; k++)
        wgmma<MN_MAJOR, MN_MAJOR>(dq, matrix_descriptor_plus(a, k * 16 * PANEL_ROW),
                                  matrix_descriptor_plus(b, k * 16 * ROW), k > 0);
    wgmma_commit();
}

template <int HS>
DEVICE const char *dz_of(const Backward90Tiles<HS> &tiles, unsigned step) {
    return tiles.dz + DZ_BYTES * (step % dz_stages<HS>);
}

// Stores a step's dq for backward90_add(), which must not see it yet.
template <int HS>
DEVICE void backward90_store_dq(const Backward90Tiles<HS> &tiles, const float (&dq)[key_panel<HS> / 8][4],
                                unsigned step, int consumer) {
    ring_wait_empty(tiles.barriers->dq, step);
    float4 *to = dq_of(tiles, step) + consumer * (dq_pieces<HS> / 2) + threadIdx.x % 128;
    UNROLL
    for (int nt = 0; nt < key_panel<HS> / 8; nt++)
        store_shared(to + nt * 128, make_float4(dq[nt][0], dq[nt][1], dq[nt][2], dq[nt][3]));
}

// Adds dk over the parts, in their order, by each warp for its rows: after the last part's turn, dk is the sum.
template <int HS>
DEVICE void add_parts(float (&dk)[1][HS / 8][4], const Backward90Work &work, const FlashCall<bf16> &call) {
    typedef Backward90Plan P;
    constexpr int WARPS = 4 * P::CONSUMERS;
    static_assert(WARPS == (int)FLASH90_KEY_TURNS, "a counter for each warp");
    const int key_tiles = (call.T - 1) / P::OWN + 1, query_tiles = (call.T - 1) / P::STREAM + 1,
              lane = threadIdx.x % 32;
    const size_t own = ((size_t)(work.b * call.NKV + work.kv) * key_tiles + work.tile) * WARPS + threadIdx.x / 32;
    float4 *sums = (float4 *)call.dk_sums + own * (HS / 8 * 32) + lane;
    unsigned *turn = call.counters + 1 + (size_t)call.dq_sets * call.B * call.NH * query_tiles + own;
    if (work.part > 0) {
        if (lane == 0) wait_for_counter(turn, work.part);
        __syncwarp();
        UNROLL
        for (int c = 0; c < HS / 8; c++) {
            const float4 x = __ldcg(sums + 32 * c);
            dk[0][c][0] += x.x;
            dk[0][c][1] += x.y;
            dk[0][c][2] += x.z;
            dk[0][c][3] += x.w;
        }
    }
    if (work.part == call.parts - 1) return;
    UNROLL
    for (int c = 0; c < HS / 8; c++)
        __stcg(sums + 32 * c, make_float4(dk[0][c][0], dk[0][c][1], dk[0][c][2], dk[0][c][3]));
    __threadfence();
    __syncwarp();
    if (lane == 0) add_to_counter(turn, 1);
}

// Stores dk and dv.
template <int PHI, int POST, int HS>
DEVICE void backward90_end(Backward90Consumer<HS> &c, const Backward90Work &work, const FlashCall<bf16> &call) {
    const float sign = sign_of_exp<PHI>(call), in_unit = POST == FLASH_REWEIGHT ? 1 : sign * slope_unit<bf16, PHI>;
    const float by[2] = {sign, sign};
    float by_dk[2] = {in_unit, in_unit};
    const int key = work.tile * Backward90Plan::OWN + warp_row(), rows = call.T - key;
    bf16 *dk = head_at(call, call.dk, work.b, work.kv) + key * call.dk.row;
    bf16 *dv = head_at(call, call.dv, work.b, work.kv) + key * call.dv.row + work.part * HS;
    store_rows(TileTarget<bf16>{dv, call.dv.row, rows, call.VS - work.part * HS}, c.dv, by);
    if (HS > 64 && call.parts > 1) add_parts<HS>(c.dk, work, call);
    UNROLL
    for (int r = 0; r < 2 && call.rope.cosines; r++) {
        undo_rope(c.dk, by_dk[r], r, load_angles<HS>(key + 8 * r + lane_row(), call));
        by_dk[r] = 1;
    }
    if (HS <= 64 || work.part == call.parts - 1)
        store_rows(TileTarget<bf16>{dk, call.dk.row, rows, call.HS}, c.dk, by_dk);
    __syncwarp();    // all lanes have read `work`
}

// All blocks of keys, one after the other. With the first step of a block, the last dq of the one before is computed;
// with the last step, the first scores of the next.
//
// With a condition around a matmul, ptxas would not overlap any. So the very first step computes a dq that nobody uses,
// its own, and the very last one issues its own scores once more. And with a loop around the loop over steps, ptxas
// would no longer see that all lanes are in the same step.
template <int HS, int PHI, int POST>
DEVICE void backward90_compute(const Backward90Tiles<HS> &tiles, const FlashCall<bf16> &call) {
    typedef Backward90Plan P;
    constexpr bool LATE = shares_late<HS>, LAST_FIRST = last_queries_first<HS, PHI>;
    Backward90Barriers<HS> &barriers = *tiles.barriers;
    Backward90Consumer<HS> c;
    float dq[key_panel<HS> / 8][4];
    OperandRows first;
    unsigned block = 0, begin = 0, end, step = 0;    // the block, its first step, the step after its last, and the step
    int row0;                                        // the step's first query
    // Shared memory is slow to load from while matmuls read it. So what a step needs is copied if registers suffice.
    auto read_span = [&] {
        const Backward90Work &work = tiles.work[block % WORK_STAGES];
        const int key0 = work.tile * P::OWN;
        return Backward90Span{work.b, key0, key0 + work.count * P::STREAM};
    };
    Backward90Span copy;
    auto span = [&] {
        if constexpr (HS <= 64) return copy;
        else return read_span();
    };
    // The queries before a block's keys see none of them.
    auto first_row = [&] { return LAST_FIRST ? span().end - P::STREAM : span().key0; };
    auto start_block = [&](unsigned step) {
        set_zero(c.dk);
        set_zero(c.dv);
        copy = read_span();
        begin = step;
        end = step + tiles.work[block % WORK_STAGES].steps;
        row0 = first_row();    // of the first query head
    };
    auto wait_queries = [&](unsigned step) {
        ring_wait_full(barriers.queries, step);
        if (reads_first_ahead<HS, POST>) backward90_rows(first, tiles, step, 0);
    };
    c.number = warpgroup();
    if (work_of(tiles, 0).steps == 0) return;
    start_block(0);
    backward90_begin(c, tiles, 0);
    if (scores_ahead<HS>) {
        wait_queries(0);
        backward90_issue_scores(c, tiles, 0);
        if (c.number == 1) turn_pass(c.number);    // the first consumer goes first
    }
    UNROLL_NOT
    for (;; step++) {
        const bool ends = step + 1 == end;
        bool more = !ends;
        if (!scores_ahead<HS>) {
            wait_queries(step);
            backward90_issue_scores(c, tiles, step);
        }
        backward90_weigh<HS, PHI, POST>(c, tiles, step, span, row0, first, call);
        if (backward90_loops<HS> && ends) more = work_of(tiles, block + 1).steps > 0;
        if (scores_ahead<HS>) {
            wait_queries(step + more);
            // Before its turn, because the other consumer's first dq needs this one's dz.
            backward90_share(tiles, step, LATE ? (int)step - 2 : -1);
            turn_wait(c.number);
        }
        backward90_issue_keys(c, tiles, step);
        if (!scores_ahead<HS>) backward90_share(tiles, step, LATE ? (int)step - 2 : -1);
        const unsigned late = step - (step > 0);
        ring_wait_full(barriers.dz, late);
        backward90_issue_queries<HS>(dq, keys_of(tiles, block - (late < begin)), dz_of(tiles, late), c.number);
        if constexpr (scores_ahead<HS>) {
            if (ends && more) backward90_begin(c, tiles, block + 1);
            backward90_issue_scores(c, tiles, step + more);
            if (more || c.number == 0) turn_pass(c.number);
            wgmma_wait<1>(c.dv[0], c.dk[0], dq);
        } else {
            wgmma_wait<0>(c.dv[0], c.dk[0], dq);
        }
        ring_release(barriers.queries, step, more);
        if (step > 0) {
            if (dz_stages<HS> < 4) ring_release(barriers.dz, step - 1);
            backward90_store_dq<HS>(tiles, dq, step - 1, c.number);
            if (!LATE) backward90_share(tiles, -1, step - 1);
        }
        if (step == begin) ring_release(barriers.k, block - 1, block > 0);
        row0 += LAST_FIRST ? -P::STREAM : P::STREAM;
        if (LAST_FIRST ? row0 < span().key0 : row0 >= span().end) row0 = first_row();    // of the next query head
        if (!ends) continue;
        if (!more) break;
        backward90_end<PHI, POST>(c, tiles.work[block % WORK_STAGES], call);
        ring_release(barriers.work, block++);
        start_block(step + 1);
    }
    wgmma_wait<0>(c.s, c.d);
    if (LATE && step > 0) backward90_share(tiles, -1, step - 1);
    ring_wait_full(barriers.dz, step);
    backward90_issue_queries<HS>(dq, keys_of(tiles, block), dz_of(tiles, step), c.number);
    wgmma_wait<0>(dq);
    backward90_store_dq<HS>(tiles, dq, step, c.number);
    backward90_share(tiles, -1, step);
    backward90_end<PHI, POST>(c, tiles.work[block % WORK_STAGES], call);
}

template <int HS>
DEVICE void backward90_init(Backward90Barriers<HS> &barriers) {
    enum { WARPS = 4 * Backward90Plan::CONSUMERS };
    ring_init(barriers.work, 1, WARPS + 1 + dq_adders<HS>);    // backward90_load_rows(), backward90_add()
    ring_init(barriers.k, 1, WARPS);
    ring_init(barriers.v, 1, WARPS);
    ring_init(barriers.queries, 2, WARPS);    // backward90_load() and backward90_load_rows()
    ring_init(barriers.dz, WARPS, WARPS);
    ring_init(barriers.dq, WARPS, 1);
    mbarrier_init_fence();
}

// registers: at most 168 (flash90_backward_kernel)
template <int HS, int PHI, int POST>
KERNEL void __launch_bounds__(Backward90Plan::THREADS, 1)
    flash90_backward_kernel(const FlashCall<bf16> call, GRID_CONSTANT Backward90Maps maps) {
    typedef Backward90Plan P;
    constexpr bool LAST_FIRST = last_queries_first<HS, PHI>;
    if (!hopper_here()) return;
    DYNAMIC_SHARED(char, memory);
    SHARED_ARRAY(Backward90Barriers<HS>, barriers, 1);
    SHARED_ARRAY(Backward90Work, works, WORK_STAGES);
    const Backward90Tiles<HS> tiles = backward90_tiles<HS>(memory, barriers, works);
    if (threadIdx.x == 0) backward90_init(*barriers);
    __syncthreads();
    if (threadIdx.x / 128 == P::CONSUMERS) {
        unsigned step = 0;
        setmaxnreg_dec<P::PRODUCER_REGISTERS>();
        const int warp = (threadIdx.x / 32) % 4, lane = threadIdx.x % 32;
        if (warp == 3) {
            for_each_block(tiles, lane,
                           [&](auto work) { backward90_load_rows<HS, LAST_FIRST>(tiles, work, step, call, lane); });
        } else if (lane == 0 && warp == 2) {
            backward90_load<HS, LAST_FIRST>(tiles, maps, call);
        } else if (lane == 0 && warp < dq_adders<HS>) {
            for_each_block(tiles, lane,
                           [&](auto work) { backward90_add<HS, LAST_FIRST>(tiles, work(), step, call, warp); });
        }
    } else {
        setmaxnreg_inc<P::CONSUMER_REGISTERS>();
        backward90_compute<HS, PHI, POST>(tiles, call);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// dq

// The heads of a block, which share their positions' angles.
template <int HS>
constexpr int dq_heads = HS <= 64 ? 6 : 1;

// dq, and g if it is needed, of a tile of queries of a head, from its sums. With a single head, loads the angles.
template <int HS>
DEVICE void dq_of_head(const FlashCall<bf16> &call, int b, int h, const LaneAngles<HS> (&angles)[2], float in_unit) {
    const int warp_row = blockIdx.x * Backward90Plan::STREAM + (threadIdx.x / 32) * 16, head = b * call.NH + h;
    const float4 *sums =
        (const float4 *)call.dq_sums + ((size_t)head * gridDim.x + blockIdx.x) * dq_pieces<HS> + threadIdx.x;
    float dq[1][HS / 8][4], by[2];
    set_zero(dq);
    UNROLL_NOT
    for (int set = 0; set < (HS <= 64 ? 1 : call.dq_sets); set++) {
        UNROLL
        for (int c = 0; c < HS / 8; c++) {
            const float4 x = sums[c * 128];
            dq[0][c][0] += x.x;
            dq[0][c][1] += x.y;
            dq[0][c][2] += x.z;
            dq[0][c][3] += x.w;
        }
        sums += (size_t)call.B * call.NH * gridDim.x * dq_pieces<HS>;
    }
    UNROLL
    for (int r = 0; r < 2; r++) {
        const int i = warp_row + 8 * r + lane_row(), row = i < call.T ? i : call.T - 1;
        const size_t index = (size_t)head * call.T + row;
        const bf16 *q = head_at(call, call.q, b, h) + row * call.q.row + lane_column();
        by[r] = call.post == POST_REWEIGHT ? 1 : value_unit_of(call, in_unit) / in_unit;
        if (call.phi == PHI_EXP) by[r] *= sign_of_exp<PHI_EXP>(call);
        if (!call.g) continue;
        float g = 0;    // sum_j dz s = q · sum_j dz k_j
        UNROLL
        for (int c = 0; c < HS / 8; c++)
            if (8 * c < call.HS)
                g += dq[0][c][2 * r] * to_float(q[8 * c]) + dq[0][c][2 * r + 1] * to_float(q[8 * c + 1]);
        g = row_sum(g);
        if (i < call.T && threadIdx.x % 4 == 0) call.g[index] = g * by[r] * (in_unit / call.rows[index].scale);
    }
    UNROLL
    for (int r = 0; r < 2 && call.rope.cosines; r++) {
        const int row = warp_row + 8 * r + lane_row();
        undo_rope(dq, by[r], r, dq_heads<HS> == 1 ? load_angles<HS>(row, call) : angles[r]);
        by[r] = 1;
    }
    bf16 *dq_rows = head_at(call, call.dq, b, h) + warp_row * call.dq.row;
    store_rows(TileTarget<bf16>{dq_rows, call.dq.row, call.T - warp_row, call.HS}, dq, by);
}

// A block has a tile of queries of dq_heads heads; blockIdx.y goes through all heads.
//
// registers: at most 128 (flash90_dq_kernel)
template <int HS>
KERNEL void flash90_dq_kernel(const FlashCall<bf16> call, float in_unit) {
    const int groups = (call.NH - 1) / dq_heads<HS> + 1, b = blockIdx.y / groups,
              first = (blockIdx.y % groups) * dq_heads<HS>;
    const int row = blockIdx.x * Backward90Plan::STREAM + (threadIdx.x / 32) * 16 + lane_row();
    LaneAngles<HS> angles[2] = {};
    UNROLL
    for (int r = 0; r < 2 && dq_heads<HS> > 1 && call.rope.cosines; r++) angles[r] = load_angles<HS>(row + 8 * r, call);
    UNROLL_NOT
    for (int h = first; h < first + dq_heads<HS> && h < call.NH; h++) dq_of_head(call, b, h, angles, in_unit);
}

// How many heads share a range of numbers. With more, the longest blocks of all start earlier; with fewer, their q,
// dout and dq stay in the L2 cache.
static inline int heads_together(int heads, int key_tiles) {
    enum { BLOCKS = 256, LEAST = 16 };
    const int most = BLOCKS / key_tiles > LEAST ? BLOCKS / key_tiles : LEAST, ranges = (heads - 1) / most + 1;
    return (heads - 1) / ranges + 1;
}

template <int HS, int PHI, int POST>
void flash90_backward_launch(const FlashCall<bf16> &call, cudaStream_t stream) {
    typedef Backward90Plan P;
    const unsigned key_tiles = (call.T - 1) / P::OWN + 1, query_tiles = (call.T - 1) / P::STREAM + 1,
                   heads = call.B * call.NH;
    Backward90Maps maps;
    rows_map(&maps.q, call.q, call.HS, call.NH, call.T, call.B, P::STREAM);
    rows_map(&maps.k, call.k, call.HS, call.NKV, call.T, call.B, P::OWN, key_panel<HS>, key_swizzle<HS>);
    rows_map(&maps.v, call.v, call.VS, call.NKV, call.T, call.B, P::OWN);
    rows_map(&maps.dout, call.dout, call.VS, call.NH, call.T, call.B, P::STREAM);
    // The number that is drawn next, then whose turn it is.
    const size_t tiles = (size_t)call.dq_sets * heads * query_tiles,
                 key_turns = call.parts > 1 ? (size_t)FLASH90_KEY_TURNS * call.B * call.NKV * key_tiles : 0,
                 cleared = 1 + (call.any_order ? 0 : tiles);
    CUDA_CHECK(cudaMemsetAsync(call.counters, 0, cleared * sizeof(unsigned), stream));
    if (key_turns) CUDA_CHECK(cudaMemsetAsync(call.counters + 1 + tiles, 0, key_turns * sizeof(unsigned), stream));
    if (call.any_order) CUDA_CHECK(cudaMemsetAsync(call.dq_sums, 0, tiles * dq_pieces<HS> * sizeof(float4), stream));
    const unsigned all = key_tiles * call.B * call.NKV * call.parts;
    maps.together = last_queries_first<HS, PHI> ? heads_together(call.B * call.NKV, key_tiles) : 1;
    const unsigned processors = (unsigned)processors_of_device(),
                   blocks = backward90_loops<HS> && processors < all ? processors : all;
    launch(flash90_backward_kernel<HS, PHI, POST>, dim3(blocks), dim3(P::THREADS), backward90_shared<HS>, stream, call,
           maps);
    const unsigned groups = call.B * ((call.NH - 1) / dq_heads<HS> + 1);
    launch(flash90_dq_kernel<HS>, dim3(query_tiles, groups), dim3(128), 0, stream, call, unit<bf16, PHI>);
}
#endif

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
//       Blocks are numbered from the first keys of several heads on. Most queries see these keys, so the longest blocks
//       start first, and the short ones fill the end. Blocks of a head that start together wait for each other only at
//       first.
//   first queries first   Sums start with the last keys that a query sees, which is the order in which the blocks of a
//       head reach it if they start together. Blocks are numbered head by head, so that few heads are in the L2 cache.
//
// flash90_dq_kernel (flash90_dq.cuh) then rounds the sums.
//
// The gated unit's wide values (VS > 128) are processed in parts of HS columns, each by blocks of its own, like a
// head: dO · v is a sum over the columns, and dz is linear in it. So a part has its own D, less and dv, and its share
// of dq and dk. Blocks add dq in the order of their keys, then of their parts, every second part to a sum of its own.
// Those of the same keys add dk in the order of their parts, and the last one stores it.
//
// With a head size of at most 64, the grid has at most one block for each SM, and each draws one block of keys after
// the other: it loads the next while it finishes the one before.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH90_BACKWARD_CUH
#define ATTENTION_FLASH90_BACKWARD_CUH

#include "attention/flash90_dq.cuh"
#include "attention/flash_backward.cuh"

// How the kernel works for a head size, a phi and a class of posts. A block owns OWN keys, and the queries come in
// tiles of STREAM rows through STAGES buffers.
template <int HEAD_SIZE, int phi, int post>
struct Backward90Plan {
    static constexpr int HS = HEAD_SIZE, PHI = phi, POST = post;
    static constexpr bool SMALL = HS <= 64;    // leaves room in registers and shared memory
    enum {
        CONSUMERS = 2,
        WARPS = 4 * CONSUMERS,
        THREADS = 128 * (CONSUMERS + 1),
        OWN = FLASH90_KEYS,
        STREAM = FLASH90_QUERIES,
        NT = STREAM / 8,
        STAGES = 2,
        // K is in panels of so many columns, of which each consumer needs one for dq.
        KEY_PANEL = HS / 2,
        // Buffers of K: two if LOOPS. V needs only one, which is free as soon as V is in registers.
        KEY_STAGES = SMALL ? 2 : 1,
        // Before a consumer writes the dz of step j, it has waited for the other's dz of step j - 2. The other wrote
        // that after its dq of step j - 4, the last reader of this buffer, was complete. So with four buffers, no
        // consumer has to wait until one is free; three need barriers.
        DZ_STAGES = SMALL ? 4 : 3,
        // A head size of 128 leaves room for one buffer of dq.
        DQ_STAGES = SMALL ? 4 : 1,
        // The warps that add dq. Each has buffers of its own, so it waits for every phase of a buffer, in turn.
        DQ_ADDERS = SMALL ? 2 : 1,
        // Blocks of keys that have been drawn. With blocks of two steps, 2 would not do: dq is handed over two steps
        // late, and only then is its block done.
        WORK_STAGES = 4,
        // With 168 registers for each of 384 threads at first, there are 64,512.
        PRODUCER_REGISTERS = 24,
        CONSUMER_REGISTERS = 240
    };
    static constexpr Swizzle KEY_SWIZZLE = (int)KEY_PANEL == (int)PANEL ? SWIZZLE_128 : SWIZZLE_64;
    static constexpr bool
        // Does a block of the grid compute one block of keys after the other?
        LOOPS = SMALL,
        // Are K and V left operands in registers? Then they do not have to be read from shared memory again for each
        // tile of queries.
        KEEPS_OWN = SMALL,
        // Are S and dP of the next step computed while the other matmuls run?
        AHEAD = SMALL,
        // Are the rows of a step's first operand read a step ahead?
        READS_AHEAD = SMALL && Post<POST>::PLAIN,
        // Others see what a warp has stored only after a fence, which takes some hundred clocks. Does a step's dq wait
        // for the fence of a later step's dz? That takes several buffers of dq.
        SHARES_LATE = SMALL,
        // May values be wide (VS > 128)? Then each part of their columns has blocks of its own.
        WIDE = !SMALL,
        // Do blocks start with the last queries?
        LAST_FIRST = flash90_last_queries_first(PHI, HS);
    static_assert(!LOOPS || (AHEAD && KEEPS_OWN), "the next block's keys are taken, and V is released, only then");
};

struct Backward90Maps {
    TensorMap q, k, v, dout;
    int together;    // the number of key heads whose blocks share a range of numbers
};

// A tile of keys of a head, and the tiles of queries that see some of them: `count` tiles of each query head from h on,
// below h_end, from tile `first` on. In a loop over blocks, each needs two steps, because its last step waits for the
// next block's K, whose buffer is free only after this block's first step. So a single step is followed by another one,
// of zeros, which `steps` counts and for which steps_h_end is h_end + 1. 0 steps: there is no block with this number.
//
// With wide values, a block has a part of their columns, HS from part · HS on. call.rows has the numbers of a part's
// heads together; those of the sequence's first head are at rows · T.
struct Backward90Work {
    int b, kv, tile, h, h_end, steps_h_end, first, count, steps, part, rows;
};

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory

// In dynamic shared memory, from a multiple of 1,024 bytes on.
template <class P>
struct Backward90Tiles {
    char k[P::KEY_STAGES][tile_bytes<P::OWN, P::HS>], v[1][tile_bytes<P::OWN, P::HS>];
    char q[P::STAGES][tile_bytes<P::STREAM, P::HS>], dout[P::STAGES][tile_bytes<P::STREAM, P::HS>];
    char dz[P::DZ_STAGES][tile_bytes<P::OWN, P::STREAM>];
    float4 dq[P::DQ_STAGES][dq_pieces<P::HS>];    // in the order in which threads hold it
    float4 rows[P::STAGES][2][P::STREAM];         // halves of rows
};

template <class P>
struct Backward90Barriers {
    Ring<P::WORK_STAGES> work;
    Ring<P::KEY_STAGES> k;
    Ring<1> v;
    Ring<P::STAGES> queries;    // q, dout and rows
    Ring<P::DZ_STAGES> dz;
    Ring<P::DQ_STAGES> dq;
};

template <class P>
struct Backward90Shared {
    Backward90Tiles<P> &tiles;
    Backward90Barriers<P> &barriers;
    Backward90Work *works;    // WORK_STAGES
};

template <class P>
DEVICE void backward90_init(Backward90Barriers<P> &barriers) {
    ring_init(barriers.work, 1, P::WARPS + 1 + P::DQ_ADDERS);    // backward90_load_rows(), backward90_add()
    ring_init(barriers.k, 1, P::WARPS);
    ring_init(barriers.v, 1, P::WARPS);
    ring_init(barriers.queries, 2, P::WARPS);    // backward90_load() and backward90_load_rows()
    ring_init(barriers.dz, P::WARPS, P::WARPS);
    ring_init(barriers.dq, P::WARPS, 1);
    mbarrier_init_fence();
}

// ---------------------------------------------------------------------------------------------------------------------
// What a block does

// A step's tile of queries.
struct QueryTile {
    int h, tile;
};

// Stores in `work` what the block with this number is.
template <class P>
DEVICE void backward90_work(Backward90Work &work, const FlashCall<bf16> &call, int together, int number) {
    const int tiles = anew((call.T - 1) / P::OWN + 1), NKV = anew(call.NKV), parts = P::WIDE ? anew(call.parts) : 1,
              of_head = tiles * parts, group = call.NH / NKV;
    // The heads of earlier ranges, and the heads and the number in this range. The last one has fewer heads.
    const int before = (number / (together * of_head)) * together, heads = min(together, call.B * NKV - before),
              at = number - before * of_head;
    work.steps = 0;
    if (heads <= 0 || at >= heads * of_head) return;
    const int head = before + at % heads, turn = at / heads;
    const int tile = P::LAST_FIRST || call.any_order ? turn / parts : tiles - 1 - turn / parts;
    work.b = head / NKV;
    work.kv = head % NKV;
    work.part = turn % parts;
    work.rows = (work.part * call.B + work.b) * call.NH;
    work.tile = tile;
    work.h = work.kv * group;
    work.h_end = work.h + group;
    work.first = tile * (P::OWN / P::STREAM);
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
    if (work.steps > 1 || !P::LOOPS) return;
    work.steps++;
    work.steps_h_end++;
}

// A block's first tile of queries.
template <class P>
DEVICE QueryTile first_tile(const Backward90Work &work) {
    return {work.h, work.first + (P::LAST_FIRST ? work.count - 1 : 0)};
}

// The tile after `at`, of the same or the next query head.
template <class P>
DEVICE void next_tile(QueryTile &at, const Backward90Work &work) {
    at.tile += P::LAST_FIRST ? -1 : 1;
    if (at.tile >= work.first && at.tile < work.first + work.count) return;
    at.tile += P::LAST_FIRST ? work.count : -work.count;
    at.h++;
}

// Which of the sums of dq a block adds to.
template <class P>
DEVICE int set_of(const FlashCall<bf16> &call, const Backward90Work &work) {
    return P::WIDE ? work.part % call.dq_sets : 0;
}

// How many blocks add to this tile of queries before a block does: those of later keys that it sees (LAST_FIRST: of
// earlier ones), and those of the same keys and earlier parts.
template <class P>
DEVICE int blocks_before(const FlashCall<bf16> &call, const Backward90Work &work, int tile) {
    const int row = tile * P::STREAM,
              others = P::LAST_FIRST ? work.tile - first_key(call, work.b, row) / P::OWN : row / P::OWN - work.tile;
    if (!P::WIDE) return others;
    const int sets = call.dq_sets, parts = (call.parts - 1 - set_of<P>(call, work)) / sets + 1;
    return others * parts + work.part / sets;
}

// ---------------------------------------------------------------------------------------------------------------------
// The producer's warps

// Waits until the block-th block of keys has been drawn, and returns it.
template <class P>
DEVICE const Backward90Work &work_of(const Backward90Shared<P> &shared, unsigned block) {
    ring_wait_full(shared.barriers.work, block);
    return shared.works[block % P::WORK_STAGES];
}

// The same without waiting, once it has been drawn: read from shared memory again, so that it occupies no registers.
template <class P>
DEVICE const Backward90Work &work_anew(const Backward90Shared<P> &shared, unsigned block) {
    return shared.works[anew((int)block) % P::WORK_STAGES];
}

// Calls act(block) for each block of keys, and then releases it. By a warp, or by its first lane alone.
template <class P, class Act>
DEVICE void for_each_block(const Backward90Shared<P> &shared, int lane, Act act) {
    UNROLL_NOT
    for (unsigned block = 0; block == 0 || P::LOOPS; block++) {
        if (work_of(shared, block).steps == 0) return;
        act(block);
        if (lane == 0) mbarrier_arrive(&shared.barriers.work.empty[anew((int)block) % P::WORK_STAGES]);
    }
}

// By one thread: draws blocks of keys, tells the other warps, and loads K and V, then Q and dO of each step.
template <class P>
DEVICE void backward90_load(const Backward90Shared<P> &shared, const Backward90Maps &maps,
                            const FlashCall<bf16> &call) {
    Backward90Tiles<P> &tiles = shared.tiles;
    Backward90Barriers<P> &barriers = shared.barriers;
    unsigned step = 0;
    UNROLL_NOT
    for (unsigned block = 0; block == 0 || P::LOOPS; block++) {
        ring_wait_empty(barriers.work, block);
        Backward90Work &work = shared.works[block % P::WORK_STAGES];
        backward90_work<P>(work, call, maps.together, (int)atomicAdd(call.counters, 1u));
        mbarrier_arrive(&barriers.work.full[block % P::WORK_STAGES]);
        if (work.steps == 0) return;
        const int key = work.tile * P::OWN, column = work.part * P::HS;
        ring_load<P::OWN, P::HS, P::KEY_PANEL>(barriers.k, tiles.k, block, &maps.k, 0, work.kv, key, work.b);
        ring_load<P::OWN, P::HS>(barriers.v, tiles.v, block, &maps.v, column, work.kv, key, work.b);
        QueryTile at = first_tile<P>(work);
        UNROLL_NOT
        for (; at.h < work.steps_h_end; step++, next_tile<P>(at, work)) {
            const unsigned stage = step % P::STAGES;
            Mbarrier *full = &barriers.queries.full[stage];
            ring_wait_empty(barriers.queries, step);
            mbarrier_arrive_expect_tx(full, 2 * tile_bytes<P::STREAM, P::HS>);
            const int h = at.h < work.h_end ? at.h : call.NH, row = at.tile * P::STREAM;    // head NH: zeros, by TMA
            load_panels<P::STREAM, P::HS>(tiles.q[stage], full, &maps.q, 0, h, row, work.b);
            load_panels<P::STREAM, P::HS>(tiles.dout[stage], full, &maps.dout, work.part * P::HS, h, row, work.b);
        }
    }
}

// By a warp: copies the rows of a block's steps, zeros for rows past T. step: the number of steps before it
template <class P>
DEVICE void backward90_load_rows(const Backward90Shared<P> &shared, unsigned block, unsigned &step,
                                 const FlashCall<bf16> &call, int lane) {
    auto &ring = shared.barriers.queries;
    auto work = [&]() -> const Backward90Work & { return work_anew(shared, block); };
    QueryTile at = first_tile<P>(work());
    UNROLL_NOT
    for (; at.h < work().steps_h_end; step++, next_tile<P>(at, work())) {
        UNROLL
        for (int i = 0; i < P::STREAM / 32; i++) {    // one at a time, for lack of registers
            const int mine = lane + 32 * i, row = at.tile * P::STREAM + mine;
            const float4 *from = (const float4 *)(call.rows + (size_t)(work().rows + at.h) * call.T + row);
            // The weights of rows that do not exist are 0: factor is, or with exp the bias is -infinity.
            float4 halves[2] = {make_float4(0, call.phi == PHI_EXP ? -INFINITY : 0, 0, 0), make_float4(0, 0, 0, 0)};
            if (row < call.T && at.h < work().h_end) {
                halves[0] = from[0];
                halves[1] = from[1];
            }
            if (i == 0) ring_wait_empty(ring, step);
            auto &rows = shared.tiles.rows[step % P::STAGES];
            rows[0][mine] = halves[0];
            rows[1][mine] = halves[1];
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&ring.full[step % P::STAGES]);
    }
    __syncwarp();    // all lanes have read `work`
}

// By one thread of each of DQ_ADDERS warps: adds its tiles of a block's dq to global memory. While one waits until the
// others see that its addition is over, the other begins with the next. step: the number of steps before the block
template <class P>
DEVICE void backward90_add(const Backward90Shared<P> &shared, const Backward90Work &work, unsigned &step,
                           const FlashCall<bf16> &call, int adder) {
    enum { BYTES = dq_pieces<P::HS> * sizeof(float4) };
    auto &ring = shared.barriers.dq;
    static_assert((int)P::DQ_STAGES % (int)P::DQ_ADDERS == 0, "a buffer belongs to one warp");
    const int row_tiles = (call.T - 1) / P::STREAM + 1;
    QueryTile at = first_tile<P>(work);
    UNROLL_NOT
    for (; at.h < work.steps_h_end; step++, next_tile<P>(at, work)) {
        if (step % P::DQ_ADDERS != (unsigned)adder) continue;
        if (at.h == work.h_end) {    // nothing to add
            ring_wait_full(ring, step);
            mbarrier_arrive(&ring.empty[step % P::DQ_STAGES]);
            continue;
        }
        const size_t head = (set_of<P>(call, work) * call.B + work.b) * call.NH + at.h,
                     tile = head * row_tiles + at.tile;
        const float4 *from = shared.tiles.dq[step % P::DQ_STAGES];
        float *to = call.dq_sums + tile * (P::STREAM * P::HS);
        unsigned *turn = call.counters + 1 + tile;
        const int before = blocks_before<P>(call, work, at.tile);
        if (!call.any_order) wait_for_counter(turn, before);
        ring_wait_full(ring, step);
        if (!call.any_order && before == 0) bulk_store(to, from, BYTES);
        else bulk_reduce_add(to, (const float *)from, BYTES);
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(&ring.empty[step % P::DQ_STAGES]);
        if (call.any_order) continue;
        bulk_wait<0>();
        add_to_counter(turn, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The consumers

// The rows of the lane's columns of an operand, 16 queries.
template <class P>
using OperandRows = typename Post<P::POST>::template Row90<P::PHI>[2][2];

// A block's sequence, its first key, and the query after those of its first head that see its keys.
struct Backward90Span {
    int b, key0, end;
};

// What a consumer's thread keeps in registers.
template <class P>
struct Backward90Consumer {
    enum { KEPT = P::KEEPS_OWN ? P::HS / 16 : 1 };
    float dk[1][P::HS / 8][4], dv[1][P::HS / 8][4];
    float dq[P::KEY_PANEL / 8][4];                 // its columns of the dq of the step before
    float s[P::NT][4], d[P::NT][4];                // scores; dO · v
    uint32_t w[P::NT / 2][4], dz[P::NT / 2][4];    // weights and dz as left operands
    uint32_t k[KEPT][4], v[KEPT][4];               // left operands
    OperandRows<P> first;                          // the rows of a step's first operand
    unsigned block, begin, end;                    // the block of keys, its first step, and the step after its last
    int row0;                                      // the step's first query
    Backward90Span kept;                           // a copy for span_of()
    int warpgroup;                                 // the consumer's
};

// The span of the block of keys c.block, from shared memory.
template <class P>
DEVICE Backward90Span read_span(const Backward90Consumer<P> &c, const Backward90Shared<P> &shared) {
    const Backward90Work &work = shared.works[c.block % P::WORK_STAGES];
    const int key0 = work.tile * P::OWN;
    return {work.b, key0, key0 + work.count * P::STREAM};
}

// The same for each step: shared memory is slow to load from while matmuls read it, so the span is copied if registers
// suffice.
template <class P>
DEVICE Backward90Span span_of(const Backward90Consumer<P> &c, const Backward90Shared<P> &shared) {
    if constexpr (P::SMALL) return c.kept;
    else return read_span(c, shared);
}

// The first query of a head's first step. The queries before a block's keys see none of them.
template <class P>
DEVICE int first_row(const Backward90Span &span) {
    return P::LAST_FIRST ? span.end - P::STREAM : span.key0;
}

// Begins with the block of keys c.block, whose first step this is.
template <class P>
DEVICE void backward90_start(Backward90Consumer<P> &c, const Backward90Shared<P> &shared, unsigned step) {
    set_zero(c.dk);
    set_zero(c.dv);
    c.kept = read_span(c, shared);
    c.begin = step;
    c.end = step + shared.works[c.block % P::WORK_STAGES].steps;
    c.row0 = first_row<P>(c.kept);
}

// Goes on to the next step's queries, of the same or the next head.
template <class P>
DEVICE void backward90_next_rows(Backward90Consumer<P> &c, const Backward90Shared<P> &shared) {
    const Backward90Span span = span_of(c, shared);
    c.row0 += P::LAST_FIRST ? -P::STREAM : P::STREAM;
    if (P::LAST_FIRST ? c.row0 < span.key0 : c.row0 >= span.end) c.row0 = first_row<P>(span);
}

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
template <class P>
DEVICE void backward90_take_keys(Backward90Consumer<P> &c, const Backward90Shared<P> &shared, unsigned block) {
    const int row = warp_row();
    ring_wait_full(shared.barriers.k, block);
    ring_wait_full(shared.barriers.v, block);
    if constexpr (P::KEEPS_OWN) {
        UNROLL
        for (int k = 0; k < c.KEPT; k++) {
            load_left_swizzled<P::OWN, P::KEY_PANEL>(c.k[k], shared.tiles.k[block % P::KEY_STAGES], row, 16 * k,
                                                     P::KEY_SWIZZLE);
            load_left_swizzled<P::OWN, PANEL>(c.v[k], shared.tiles.v[0], row, 16 * k, SWIZZLE_128);
        }
        __syncwarp();    // all lanes have read V
        ring_release(shared.barriers.v, block);
    }
}

template <class P>
DEVICE void backward90_rows(OperandRows<P> &rows, const Backward90Shared<P> &shared, unsigned step, int k) {
    UNROLL
    for (int nt = 0; nt < 2; nt++)
        rows_of_lane(rows[nt], shared.tiles.rows[step % P::STAGES][0], 16 * k + 8 * nt, P::STREAM);
}

// Waits for a step's queries.
template <class P>
DEVICE void backward90_wait_queries(Backward90Consumer<P> &c, const Backward90Shared<P> &shared, unsigned step) {
    ring_wait_full(shared.barriers.queries, step);
    if (P::READS_AHEAD) backward90_rows(c.first, shared, step, 0);
}

// Issues S and dO · v.
template <class P>
DEVICE void backward90_issue_scores(Backward90Consumer<P> &c, const Backward90Shared<P> &shared, unsigned step) {
    Backward90Tiles<P> &tiles = shared.tiles;
    const char *q = tiles.q[step % P::STAGES], *dout = tiles.dout[step % P::STAGES];
    wgmma_fence();
    if constexpr (P::KEEPS_OWN) {
        issue_by_rows(c.s, c.k, q);
        issue_by_rows(c.d, c.v, dout);
    } else {
        issue_by_rows<P::OWN, P::HS>(c.s, tiles.k[0] + c.warpgroup * panel_bytes<64>, q);
        issue_by_rows<P::OWN, P::HS>(c.d, tiles.v[0] + c.warpgroup * panel_bytes<64>, dout);
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

// Waits for the scores. They become weights, and dO · v becomes dz, which both consumers need for dq:
// backward90_store_dz() and backward90_share() follow. Rows are read ahead.
template <class P>
DEVICE void backward90_weigh(Backward90Consumer<P> &c, const Backward90Shared<P> &shared, unsigned step,
                             const FlashCall<bf16> &call) {
    enum { PARTS = P::NT / 2 };
    typedef float Part[1][2][4];    // 16 queries, which are an operand's
    OperandRows<P> rows[2];
    if (!P::READS_AHEAD) backward90_rows(c.first, shared, step, 0);
    wgmma_wait<0>(c.s, c.d);
    UNROLL
    for (int k = 0; k < PARTS; k++) {
        const OperandRows<P> &now = k == 0 ? c.first : rows[k % 2];
        Part &s = *(Part *)(c.s + 2 * k), &d = *(Part *)(c.d + 2 * k);
        if (k + 1 < PARTS) backward90_rows(rows[(k + 1) % 2], shared, step, k + 1);
        auto rows_of = [&](int nt) { return now[nt]; };
        dkv_values<P::PHI, P::POST, true>(s, d, rows_of, [](Element) { return false; }, Chunk(), call);
        pack_operand(c.w[k], c.s[2 * k], c.s[2 * k + 1]);
        pack_operand(c.dz[k], c.d[2 * k], c.d[2 * k + 1]);
    }
    const Backward90Span span = span_of(c, shared);
    const int warp_key = span.key0 + warp_row();
    if (c.row0 < warp_key + 15 || (call.first && warp_key < first_key(call, span.b, c.row0 + P::STREAM - 1))) {
        const uint32_t visible = visible_elements<P::NT>({warp_key, c.row0, span.b}, call);
        UNROLL
        for (int k = 0; k < PARTS; k++) {
            hide_elements(c.w[k], visible >> 8 * k);
            hide_elements(c.dz[k], visible >> 8 * k);
        }
    }
}

// Stores dz for both consumers' dq, which read it only after backward90_share().
template <class P>
DEVICE void backward90_store_dz(const Backward90Consumer<P> &c, const Backward90Shared<P> &shared, unsigned step) {
    const int thread = anew(threadIdx.x), key = (thread / 32) * 16 + thread % 16, query = ((thread % 32) / 16) * 8;
    char *tile = shared.tiles.dz[step % P::DZ_STAGES];
    if (P::DZ_STAGES < 4) ring_wait_empty(shared.barriers.dz, step);
    UNROLL
    for (int k = 0; k < P::NT / 2; k++)
        stmatrix_x4(tile + swizzled_byte(key * PANEL_ROW + (16 * k + query) * sizeof(bf16), SWIZZLE_128), c.dz[k]);
}

// Stores a step's dq for backward90_add(), which reads it only after backward90_share().
template <class P>
DEVICE void backward90_store_dq(const Backward90Consumer<P> &c, const Backward90Shared<P> &shared, unsigned step) {
    ring_wait_empty(shared.barriers.dq, step);
    float4 *to = shared.tiles.dq[step % P::DQ_STAGES] + c.warpgroup * (dq_pieces<P::HS> / 2) + threadIdx.x % 128;
    UNROLL
    for (int nt = 0; nt < P::KEY_PANEL / 8; nt++)
        store_shared(to + nt * 128, make_float4(c.dq[nt][0], c.dq[nt][1], c.dq[nt][2], c.dq[nt][3]));
}

// Makes visible what the warp has stored: a step's dz to the other consumer, and a step's dq to backward90_add();
// -1: none.
template <class P>
DEVICE void backward90_share(const Backward90Shared<P> &shared, int dz_step, int dq_step) {
    fence_proxy_async();
    __syncwarp();
    const bool first = threadIdx.x % 32 == 0;
    if (first && dz_step >= 0) mbarrier_arrive(&shared.barriers.dz.full[dz_step % P::DZ_STAGES]);
    if (first && dq_step >= 0) mbarrier_arrive(&shared.barriers.dq.full[dq_step % P::DQ_STAGES]);
}

// Issues dV and dK.
template <class P>
DEVICE void backward90_issue_keys(Backward90Consumer<P> &c, const Backward90Shared<P> &shared, unsigned step) {
    wgmma_fence();
    issue_by_columns(c.dv[0], c.w, shared.tiles.dout[step % P::STAGES]);
    issue_by_columns(c.dk[0], c.dz, shared.tiles.q[step % P::STAGES]);
    wgmma_commit();
}

// Waits for both consumers' dz of a step, and issues the consumer's columns of its dq.
template <class P>
DEVICE void backward90_issue_queries(Backward90Consumer<P> &c, const Backward90Shared<P> &shared, unsigned step) {
    constexpr int ROW = P::KEY_PANEL * sizeof(bf16);
    ring_wait_full(shared.barriers.dz, step);
    const unsigned block = c.block - (step < c.begin);    // the step may be the last one of the block before
    const char *keys = shared.tiles.k[block % P::KEY_STAGES] + c.warpgroup * (P::OWN * ROW);
    const uint64_t a = matrix_descriptor(shared.tiles.dz[step % P::DZ_STAGES], 0, 8 * PANEL_ROW, SWIZZLE_128),
                   b = matrix_descriptor(keys, 0, 8 * ROW, P::KEY_SWIZZLE);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < P::OWN / 16; k++)
        wgmma<MN_MAJOR, MN_MAJOR>(c.dq, matrix_descriptor_plus(a, k * 16 * PANEL_ROW),
                                  matrix_descriptor_plus(b, k * 16 * ROW), k > 0);
    wgmma_commit();
}

// Adds dk over the parts, in their order, by each warp for its rows: after the last part's turn, dk is the sum.
template <class P>
DEVICE void add_parts(float (&dk)[1][P::HS / 8][4], const Backward90Work &work, const FlashCall<bf16> &call) {
    static_assert((int)P::WARPS == (int)FLASH90_KEY_TURNS, "a counter for each warp");
    const int key_tiles = (call.T - 1) / P::OWN + 1, query_tiles = (call.T - 1) / P::STREAM + 1,
              lane = threadIdx.x % 32;
    const size_t tile = (size_t)(work.b * call.NKV + work.kv) * key_tiles + work.tile,
                 own = tile * P::WARPS + threadIdx.x / 32;
    float4 *sums = (float4 *)call.dk_sums + own * ((P::HS / 8) * 32) + lane;
    unsigned *turn = call.counters + 1 + (size_t)call.dq_sets * call.B * call.NH * query_tiles + own;
    if (work.part > 0) {
        if (lane == 0) wait_for_counter(turn, work.part);
        __syncwarp();
        UNROLL
        for (int c = 0; c < P::HS / 8; c++) add(dk[0][c], __ldcg(sums + 32 * c));
    }
    if (work.part == call.parts - 1) return;
    UNROLL
    for (int c = 0; c < P::HS / 8; c++)
        __stcg(sums + 32 * c, make_float4(dk[0][c][0], dk[0][c][1], dk[0][c][2], dk[0][c][3]));
    __threadfence();
    __syncwarp();
    if (lane == 0) add_to_counter(turn, 1);
}

// Stores dk and dv.
template <class P>
DEVICE void backward90_end(Backward90Consumer<P> &c, const Backward90Shared<P> &shared, const FlashCall<bf16> &call) {
    const Backward90Work &work = shared.works[c.block % P::WORK_STAGES];
    const float sign = sign_of_exp<P::PHI>(call), in_unit = Post<P::POST>::POWERS ? 1 : sign * slope_unit<bf16, P::PHI>;
    const float by[2] = {sign, sign};
    float by_dk[2] = {in_unit, in_unit};
    const int key = work.tile * P::OWN + warp_row(), rows = call.T - key;
    bf16 *dk = head_at(call, call.dk, work.b, work.kv) + key * call.dk.row;
    bf16 *dv = head_at(call, call.dv, work.b, work.kv) + key * call.dv.row + work.part * P::HS;
    store_rows(TileTarget<bf16>{dv, call.dv.row, rows, call.VS - work.part * P::HS}, c.dv, by);
    if (P::WIDE && call.parts > 1) add_parts<P>(c.dk, work, call);
    UNROLL
    for (int r = 0; r < 2 && call.rope.cosines; r++) {
        undo_rope(c.dk, by_dk[r], r, load_angles<P::HS>(key + 8 * r + lane_row(), call));
        by_dk[r] = 1;
    }
    if (!P::WIDE || work.part == call.parts - 1)
        store_rows(TileTarget<bf16>{dk, call.dk.row, rows, call.HS}, c.dk, by_dk);
    __syncwarp();    // all lanes have read `work`
}

// All blocks of keys, one after the other. With the first step of a block, the last dq of the one before is computed;
// with the last step, the first scores of the next.
//
// With a condition around a matmul, ptxas would not overlap any. So the very first step computes a dq that nobody uses,
// its own, and the very last one issues its own scores once more. And with a loop around the loop over steps, ptxas
// would no longer see that all lanes are in the same step.
template <class P>
DEVICE void backward90_compute(const Backward90Shared<P> &shared, const FlashCall<bf16> &call) {
    Backward90Barriers<P> &barriers = shared.barriers;
    Backward90Consumer<P> c;
    unsigned step = 0;
    c.warpgroup = warpgroup();
    c.block = 0;
    if (work_of(shared, 0).steps == 0) return;
    backward90_start(c, shared, 0);
    backward90_take_keys(c, shared, 0);
    if (P::AHEAD) {
        backward90_wait_queries(c, shared, 0);
        backward90_issue_scores(c, shared, 0);
        if (c.warpgroup == 1) turn_pass(c.warpgroup);    // the first consumer goes first
    }
    UNROLL_NOT
    for (;; step++) {
        const bool ends = step + 1 == c.end;
        bool more = !ends;
        if (!P::AHEAD) {
            backward90_wait_queries(c, shared, step);
            backward90_issue_scores(c, shared, step);
        }
        backward90_weigh(c, shared, step, call);
        backward90_store_dz(c, shared, step);
        if (P::LOOPS && ends) more = work_of(shared, c.block + 1).steps > 0;
        const int late_dq = P::SHARES_LATE ? (int)step - 2 : -1;
        if (P::AHEAD) {
            backward90_wait_queries(c, shared, step + more);
            // Before its turn, because the other consumer's first dq needs this one's dz.
            backward90_share(shared, step, late_dq);
            turn_wait(c.warpgroup);
        }
        backward90_issue_keys(c, shared, step);
        if (!P::AHEAD) backward90_share(shared, step, late_dq);
        backward90_issue_queries(c, shared, step - (step > 0));
        if constexpr (P::AHEAD) {
            if (ends && more) backward90_take_keys(c, shared, c.block + 1);
            backward90_issue_scores(c, shared, step + more);
            if (more || c.warpgroup == 0) turn_pass(c.warpgroup);
            wgmma_wait<1>(c.dv[0], c.dk[0], c.dq);
        } else {
            wgmma_wait<0>(c.dv[0], c.dk[0], c.dq);
        }
        if (more) ring_release(barriers.queries, step);
        if (step > 0) {
            if (P::DZ_STAGES < 4) ring_release(barriers.dz, step - 1);
            backward90_store_dq(c, shared, step - 1);
            if (!P::SHARES_LATE) backward90_share(shared, -1, step - 1);
        }
        if (step == c.begin && c.block > 0) ring_release(barriers.k, c.block - 1);
        backward90_next_rows(c, shared);
        if (!ends) continue;
        if (!more) break;
        backward90_end(c, shared, call);
        ring_release(barriers.work, c.block++);
        backward90_start(c, shared, step + 1);
    }
    wgmma_wait<0>(c.s, c.d);
    if (P::SHARES_LATE && step > 0) backward90_share(shared, -1, step - 1);
    backward90_issue_queries(c, shared, step);
    wgmma_wait<0>(c.dq);
    backward90_store_dq(c, shared, step);
    backward90_share(shared, -1, step);
    backward90_end(c, shared, call);
}

// registers: at most 168 (flash90_backward_kernel)
template <int HS, int PHI, int POST>
KERNEL void __launch_bounds__(Backward90Plan<HS, PHI, POST>::THREADS, 1)
    flash90_backward_kernel(const FlashCall<bf16> call, GRID_CONSTANT Backward90Maps maps) {
    typedef Backward90Plan<HS, PHI, POST> P;
    enum { LOADS = 2, LOADS_ROWS = 3 };    // the producer's warps; those before them add dq
    if (!hopper_here()) return;
    DYNAMIC_SHARED(char, memory);
    SHARED_ARRAY(Backward90Barriers<P>, barriers, 1);
    SHARED_ARRAY(Backward90Work, works, P::WORK_STAGES);
    const Backward90Shared<P> shared = {*(Backward90Tiles<P> *)aligned_tile(memory), *barriers, works};
    if (threadIdx.x == 0) backward90_init(*barriers);
    __syncthreads();
    if (threadIdx.x / 128 == P::CONSUMERS) {
        unsigned step = 0;
        setmaxnreg_dec<P::PRODUCER_REGISTERS>();
        const int warp = (threadIdx.x / 32) % 4, lane = threadIdx.x % 32;
        if (warp == LOADS_ROWS) {
            for_each_block(shared, lane,
                           [&](unsigned block) { backward90_load_rows(shared, block, step, call, lane); });
        } else if (lane == 0 && warp == LOADS) {
            backward90_load(shared, maps, call);
        } else if (lane == 0 && warp < P::DQ_ADDERS) {
            for_each_block(shared, lane,
                           [&](unsigned block) { backward90_add(shared, work_anew(shared, block), step, call, warp); });
        }
    } else {
        setmaxnreg_inc<P::CONSUMER_REGISTERS>();
        backward90_compute(shared, call);
    }
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
    typedef Backward90Plan<HS, PHI, POST> P;
    const unsigned key_tiles = (call.T - 1) / P::OWN + 1, query_tiles = (call.T - 1) / P::STREAM + 1,
                   heads = call.B * call.NH;
    Backward90Maps maps;
    rows_map(&maps.q, call.q, call.HS, call.NH, call.T, call.B, P::STREAM);
    rows_map(&maps.k, call.k, call.HS, call.NKV, call.T, call.B, P::OWN, P::KEY_PANEL, P::KEY_SWIZZLE);
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
    maps.together = P::LAST_FIRST ? heads_together(call.B * call.NKV, key_tiles) : 1;
    const unsigned processors = (unsigned)processors_of_device(),
                   blocks = P::LOOPS && processors < all ? processors : all;
    launch(flash90_backward_kernel<HS, PHI, POST>, dim3(blocks), dim3(P::THREADS), 1024 + sizeof(Backward90Tiles<P>),
           stream, call, maps);
    flash90_dq_launch<HS>(call, unit<bf16, PHI>, stream);
}
#endif

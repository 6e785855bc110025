// The test of hopper_on_cpu.h: defects planted in kernels, each with a correct twin. dev/tests/test_kernels.cu compares
// its functions with plain loops.
//     test_hopper_on_cpu numbers             the correct kernels' numbers
//     test_hopper_on_cpu NAME 0|1            the kernel NAME, correct (0) or with its defect (1)
//     test_hopper_on_cpu help                the names
// The exit status is 0 if the results are right and 1 if they are wrong; a defect may also end in a message and
// abort(). test_hopper_on_cpu.py lists the settings that find each defect.
#include "gpu_on_cpu.h"
#include "hopper_on_cpu.h"
#include "planted_defects.h"

#include <algorithm>
#include <vector>

static float to_float(bf16 x) {
    return __bfloat162float(x);
}

static std::vector<bf16> small_numbers(size_t n, unsigned seed) {    // whole, from -3 to 3: sums of products are exact
    std::vector<bf16> a(n);
    for (size_t i = 0; i < n; i++)
        a[i] = __float2bfloat16_rn((float)((int)((i * 2654435761u + seed * 40503u) >> 7) % 7 % 4));
    return a;
}

static CUresult encode(TensorMap *map, bf16 *p, std::vector<cuuint64_t> dims, std::vector<cuuint64_t> strides,
                       std::vector<cuuint32_t> box, Swizzle swizzle) {
    const cuuint32_t ones[] = {1, 1};
    return cuTensorMapEncodeTiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)dims.size(), p, dims.data(),
                                  strides.data(), box.data(), ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  (CUtensorMapSwizzle)swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A matrix (rows, columns) without gaps.
static TensorMap matrix_map(bf16 *p, size_t rows, size_t columns, unsigned box_rows, unsigned box_columns,
                            Swizzle swizzle) {
    TensorMap map = {};
    CUresult result = encode(&map, p, {columns, rows}, {columns * sizeof *p}, {box_columns, box_rows}, swizzle);
    CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled");
    return map;
}

// PTX ISA, "Matrix descriptor": addresses and offsets without their lowest four bits.
DEVICE uint64_t descriptor(const void *p, uint64_t leading, uint64_t stride, Swizzle swizzle) {
    static const uint64_t LAYOUT[] = {0, 3, 2, 1};
    return (shared_address(p) >> 4) | leading >> 4 << 16 | stride >> 4 << 32 | LAYOUT[swizzle] << 62;
}

DEVICE uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    return word;
}

template <class T>
DEVICE T *aligned(T *p) {    // to a multiple of 1,024 bytes of shared memory; the caller has as many to spare
    return (T *)((char *)p + (1024 - shared_address(p) % 1024) % 1024);
}

DEVICE unsigned swizzle_bits(unsigned address, Swizzle swizzle) {
    static const unsigned BITS[] = {0, 16, 48, 112};
    return address ^ ((address >> 3) & BITS[swizzle]);
}

// ---- the defects of a pipeline: d (128, 64) = a (128, K) · b (K, 64)
// Threads 0-127 are the producer, of which one loads tiles a (128, 64) and b (64, 64) into STAGES buffers; two consumer
// warpgroups multiply 64 rows each, taking turns by named barriers, first K-major from shared memory, then the upper
// half of each tile's K from registers. Their results go through stmatrix and bulk copies to global memory, in bf16.

enum { STAGES = 2, K_TILE = 64, A_BYTES = 128 * K_TILE * 2, B_BYTES = K_TILE * 64 * 2 };
enum { STAGE_BYTES = A_BYTES + B_BYTES, PIPELINE_BYTES = STAGES * STAGE_BYTES + 1024, PIPELINE_THREADS = 384 };

#define PIPELINE_DEFECTS(X) \
    X(missing_arrive) X(missing_full_wait) X(missing_empty_wait) X(missing_expect_tx) X(expects_too_many_bytes) \
    X(missing_init_fence) X(missing_init) X(missing_sync_after_init) X(too_many_arrivals) X(initialized_twice) \
    X(mbarrier_overwritten) X(missing_wgmma_fence) X(missing_wgmma_commit) X(missing_wgmma_wait) \
    X(wait_for_too_few_wgmmas) X(result_read_before_wait) X(result_not_named) X(result_written_in_flight) \
    X(a_written_after_fence) X(a_written_in_flight) X(laggards_release_before_wait) X(half_a_warpgroup) \
    X(different_descriptors) X(start_not_aligned) X(wrong_stride_offset) X(wrong_swizzle) X(descriptor_past_shared) \
    X(misaligned_tile) X(past_the_rows_end) X(box_past_shared) X(wrong_rank) X(missing_proxy_fence) X(ordinary_store) \
    X(missing_sync_before_store) X(missing_bulk_commit) X(missing_bulk_wait) X(source_reused) X(wrong_barrier_count) \
    X(incomplete_warps) X(missing_barrier_arrive) X(arrived_twice) X(registers_over_budget) X(unobserved_load) \
    X(store_into_load) X(load_over_unfenced_store) X(loads_overlap) X(a_from_accumulators_in_flight)

enum Defect {
    NO_DEFECT,
#define X(name) name##_,
    PIPELINE_DEFECTS(X)
#undef X
};

struct Pipeline {
    TensorMap a, b;
    bf16 *d;
    int tiles;    // of K
};

struct PipelineBarriers {
    Mbarrier full[STAGES], empty[STAGES];
};

DEVICE void produce(const Pipeline &p, char *tiles, PipelineBarriers *barriers, int defect) {
    for (int i = 0; i < p.tiles + (defect == unobserved_load_); i++) {
        int stage = i % STAGES, round = i / STAGES;
        char *tile = tiles + stage * STAGE_BYTES;
        Mbarrier *full = &barriers->full[stage];
        unsigned bytes = STAGE_BYTES + (defect == expects_too_many_bytes_ ? 16 : 0);
        if (defect != missing_empty_wait_) mbarrier_wait(&barriers->empty[stage], (unsigned)(round + 1) % 2);
        if (defect == missing_expect_tx_) mbarrier_arrive(full);
        else mbarrier_arrive_expect_tx(full, bytes);
        int at = i * K_TILE;
        if (defect == load_over_unfenced_store_) store_shared((bf16 *)tile + 64, __float2bfloat16_rn(3.0f));
        if (defect == wrong_rank_) {
            tma_load(tile, &p.a, full, {at, 0, 0});
        } else tma_load(defect == misaligned_tile_ ? tile + 512 : tile, &p.a, full, {at, 0});
        if (defect == store_into_load_) store_shared((bf16 *)tile + 64, __float2bfloat16_rn(3.0f));
        char *b_tile = defect == box_past_shared_ ? tile + PIPELINE_BYTES - 1024 : tile + A_BYTES;
        if (defect == loads_overlap_) b_tile = tile;
        tma_load(b_tile, &p.b, full, {0, at});
    }
}

DEVICE void registers_of_a(uint32_t (&r)[2][4], const char *a, int row0) {    // columns 32 to 63 of 64 rows of a tile
    int lane = (int)threadIdx.x % 32, g = row0 + (int)threadIdx.x % 128 / 32 * 16 + lane / 4, t = lane % 4 * 2;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 4; i++) {
            int row = g + i % 2 * 8, column = 32 + k * 16 + t + i / 2 * 8;
            unsigned byte = (unsigned)(row * 128 + column * 2);
            r[k][i] = *(const uint32_t *)(a + swizzle_bits(byte, SWIZZLE_128));
        }
}

DEVICE uint64_t b_descriptor(const char *b, int k, int defect) {
    uint64_t stride = defect == wrong_stride_offset_ ? 512 : 1024;
    Swizzle swizzle = defect == wrong_swizzle_ ? SWIZZLE_64 : SWIZZLE_128;
    const char *start = b + k * 2048;    // 16 rows of 128 bytes
    if (defect == start_not_aligned_) start += 128;
    if (defect == descriptor_past_shared_) stride = 192 * 1024;
    return descriptor(start, 0, stride, swizzle);    // one pattern is as wide as B
}

// The products of a tile, of which the last two steps of K take a from registers.
DEVICE void consume_tile(float (&d)[8][4], uint32_t (&a)[2][4], const char *tile, int row0, bool first, int defect) {
    const char *b = tile + A_BYTES, *rows = tile + row0 * 128 + (defect == past_the_rows_end_ ? 112 : 0);
    registers_of_a(a, tile, row0);
    if (defect != missing_wgmma_fence_) wgmma_fence();
    if (defect == a_written_after_fence_) a[1][0] ^= 1;
    for (int k = 0; k < 4; k++) {
        uint64_t right = b_descriptor(b, k, defect);
        if (defect == different_descriptors_ && threadIdx.x % 32 == 5) right += 1;
        if (k >= 2 && defect == a_from_accumulators_in_flight_) wgmma<MN_MAJOR>(d, *(uint32_t (*)[4])d[0], right, true);
        else if (k >= 2) wgmma<MN_MAJOR>(d, a[k - 2], right, true);
        else wgmma<K_MAJOR, MN_MAJOR>(d, descriptor(rows + 32 * k, 16, 1024, SWIZZLE_128), right, !first || k > 0);
    }
    if (defect != missing_wgmma_commit_) wgmma_commit();
}

// By each warp, after its warpgroup's matmuls.
DEVICE void release_buffer(Mbarrier *empty) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

DEVICE void consume(const Pipeline &p, char *tiles, PipelineBarriers *barriers, bf16 *staging, int defect) {
    const int consumer = (int)threadIdx.x / 128 - 1, row0 = 64 * consumer, thread = (int)threadIdx.x % 128;
    const int mine = 1 + consumer, other = 2 - consumer;    // named barriers
    float d[8][4], early[8][4];
    uint32_t a[2][4];
    memset(d, 0, sizeof d);
    if (consumer == 1) {
        if (defect != missing_barrier_arrive_) named_barrier_arrive(1, 256);
        if (defect == arrived_twice_) named_barrier_arrive(1, 256);
    }
    for (int i = 0; i < p.tiles; i++) {
        int stage = i % STAGES;
        unsigned parity = (unsigned)(i / STAGES) % 2;
        char *tile = tiles + stage * STAGE_BYTES;
        if (defect != missing_full_wait_) mbarrier_wait(&barriers->full[stage], parity);
        named_barrier_sync(mine, defect == wrong_barrier_count_ ? 384 : 256);
        if (defect == half_a_warpgroup_ && thread >= 64) wgmma_fence();
        else consume_tile(d, a, tile, row0, i == 0, defect);
        if (consumer == 0 || i + 1 < p.tiles) named_barrier_arrive(other, 256);
        const bool too_early = defect == laggards_release_before_wait_ && consumer == 0;
        if (too_early) release_buffer(&barriers->empty[stage]);
        if (defect == a_written_in_flight_) a[0][0] ^= 1;
        if (defect == result_written_in_flight_) d[0][0] = 1.0f;
        memcpy(early, d, sizeof d);
        if (defect == wait_for_too_few_wgmmas_) wgmma_wait<1>(d);
        else if (defect == result_not_named_) wgmma_wait<0>();
        else if (defect != missing_wgmma_wait_) wgmma_wait<0>(d);
        if (defect != missing_arrive_ && !too_early) release_buffer(&barriers->empty[stage]);
        if (defect == too_many_arrivals_ && thread == 0) mbarrier_arrive(&barriers->empty[stage]);
    }
    if (defect == result_read_before_wait_) memcpy(d, early, sizeof d);
    // Rows of 64 columns, 128 bytes.
    char *out = (char *)(staging + row0 * 64);
    for (int j = 0; j < 8; j += 2) {
        uint32_t r[4] = {pack(d[j][0], d[j][1]), pack(d[j][2], d[j][3]), pack(d[j + 1][0], d[j + 1][1]),
                         pack(d[j + 1][2], d[j + 1][3])};
        int lane = thread % 32, row = thread / 32 * 16 + lane % 16, column = 8 * (j + lane / 16);
        stmatrix_x4(out + row * 128 + column * 2, r);
    }
    if (defect != missing_proxy_fence_) fence_proxy_async();
    if (defect == ordinary_store_ && thread == 0) *(bf16 *)out = __float2bfloat16_rn(3.0f);
    if (defect == incomplete_warps_) {
        if (thread % 64 < 48) named_barrier_sync(3 + consumer, 96);
    } else if (defect != missing_sync_before_store_) named_barrier_sync(3 + consumer, 128);
    if (thread != 0) return;
    bulk_store(p.d + (128 * (int)blockIdx.x + row0) * 64, out, 64 * 128);    // each block stores its own copy
    if (defect != missing_bulk_commit_) bulk_commit();
    if (defect == source_reused_) store_shared((bf16 *)out, __float2bfloat16_rn(3.0f));
    if (defect != missing_bulk_wait_) bulk_wait_read<0>();
}

KERNEL void pipeline_kernel(GRID_CONSTANT Pipeline p, int defect) {
    DYNAMIC_SHARED(char, memory);
    SHARED_ARRAY(PipelineBarriers, barriers, 1);
    char *tiles = aligned(memory);
    bf16 *staging = (bf16 *)(tiles + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0 && defect != missing_init_) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(&barriers->full[i], 1);
            mbarrier_init(&barriers->empty[i], 8);
        }
        if (defect == initialized_twice_) mbarrier_init(&barriers->full[0], 1);
        if (defect != missing_init_fence_) mbarrier_init_fence();
        if (defect == mbarrier_overwritten_) ((uint64_t *)barriers)[1] = 0;
    }
    if (defect != missing_sync_after_init_) __syncthreads();
    const int producers = 24, consumers = 240;
    if (threadIdx.x < 128) {
        setmaxnreg_dec<producers>();
        if (threadIdx.x == 0) produce(p, tiles, barriers, defect);
    } else {
        if (defect == registers_over_budget_) setmaxnreg_inc<248>();
        else setmaxnreg_inc<consumers>();
        consume(p, tiles, barriers, staging, defect);
    }
}

static void pipeline(int defect) {
    const int tiles = 5, K = tiles * K_TILE;
    std::vector<bf16> a = small_numbers(128 * (size_t)K, 6), b = small_numbers((size_t)K * 64, 7);
    Device<bf16> da(a), db(b), dd(2 * 128 * 64);
    Pipeline p = {};
    p.tiles = tiles;
    p.a = matrix_map(da.p, 128, (size_t)K, 128, K_TILE, SWIZZLE_128);
    p.b = matrix_map(db.p, (size_t)K, 64, K_TILE, 64, SWIZZLE_128);
    p.d = dd.p;
    launch(pipeline_kernel, 2, dim3(PIPELINE_THREADS), PIPELINE_BYTES + 128 * 64 * 2, NULL, p, defect);
    std::vector<bf16> got = dd.host();
    for (int i = 0; i < 128; i++)
        for (int n = 0; n < 64; n++) {
            float sum = 0;
            for (int k = 0; k < K; k++) sum += to_float(a[(size_t)(i * K + k)]) * to_float(b[(size_t)(k * 64 + n)]);
            bf16 expected = __float2bfloat16_rn(sum);
            for (int block = 0; block < 2; block++) {
                float x = to_float(got[(size_t)((128 * block + i) * 64 + n)]);
                CHECK(x == to_float(expected), "(%d, %d) is %g, not %g", i, n, x, to_float(expected));
            }
        }
}

// ---- defects in one line each: d (64, 64) = 4 t (64, 16) · tᵀ by a warpgroup, t the first columns of a tile

#define RULE_DEFECTS(X) \
    X(phase_not_observed) X(ordinary_store_into_load) X(load_over_ordinary_store) X(operand_not_fenced) \
    X(operand_not_shared) X(different_commits) X(different_accumulators) X(accumulators_overlap) \
    X(half_a_warp_arrives) X(wgmma_without_wait) X(store_not_shared) X(store_over_store) X(load_of_what_is_stored) \
    X(load_at_misaligned_coordinate) X(copy_without_commit) X(wrong_block) X(bulk_misaligned) X(bulk_past_shared) \
    X(bulk_past_allocation)

enum Rule {
    NO_RULE,
#define X(name) name##_,
    RULE_DEFECTS(X)
#undef X
};

struct Rules {
    TensorMap in, out;
    bf16 *copy;
    float *product, *sums;
    unsigned *counter;
};

DEVICE void rules_of_loads(const Rules &r, char *tile, Mbarrier *full, int defect) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    for (int i = 0; i < 2 && defect == phase_not_observed_; i++) mbarrier_arrive(full);
    mbarrier_arrive_expect_tx(full, 8192);
    if (defect == load_over_ordinary_store_) *(bf16 *)tile = __float2bfloat16_rn(3.0f);
    tma_load(tile, &r.in, full, {defect == load_at_misaligned_coordinate_ ? 4 : 0, 0});
    if (defect == ordinary_store_into_load_) *(bf16 *)tile = __float2bfloat16_rn(3.0f);
}

DEVICE void rules_of_wgmma(float (&d)[8][4], const char *left, const char *right, int defect) {
    const bool first_warp = threadIdx.x < 32, half = threadIdx.x % 32 < 16;
    float other[8][4] = {}, third[8][4] = {};
    uint64_t a = descriptor(left, 0, 1024, SWIZZLE_128), b = descriptor(right, 0, 1024, SWIZZLE_128);
    if (defect == operand_not_shared_) b &= ~0x3FFFull;
    wgmma_fence();
    wgmma<K_MAJOR, K_MAJOR>(d, a, b, true);
    if (defect == different_commits_ && first_warp) {
        wgmma_commit();
        wgmma_fence();
    }
    if (defect == accumulators_overlap_) wgmma<K_MAJOR, K_MAJOR>(*(float (*)[4][4])d[2], a, b, true);
    wgmma<K_MAJOR, K_MAJOR>(defect == different_accumulators_ && first_warp ? other : d, a, b, true);
    wgmma<K_MAJOR, K_MAJOR>(other, a, b, true);
    wgmma_commit();
    wgmma_fence();
    wgmma<K_MAJOR, K_MAJOR>(third, a, b, false);
    wgmma_commit();
    wgmma_wait<1>(d, other);
    if (defect != wgmma_without_wait_) wgmma_wait<0>(d, other, third);
    for (int j = 0; j < 8; j++)
        for (int e = 0; e < 4; e++) d[j][e] += other[j][e] + third[j][e];
    if (defect == half_a_warp_arrives_ && first_warp && half) named_barrier_arrive(1, 128);
    else named_barrier_sync(1, 128);
    wgmma_fence();
}

DEVICE void rules_of_copies(const Rules &r, char *tile, const float *ones, Mbarrier *full, int defect) {
    float local = 0;
    if (defect == store_not_shared_) store_shared(&local, 1.0f);
    bulk_store(defect == bulk_past_allocation_ ? r.copy + 8 : r.copy,
               defect == bulk_past_shared_ ? tile + 2 * 8192 : tile, defect == bulk_misaligned_ ? 8188 : 8192);
    for (int i = 0; i < 2; i++) bulk_reduce_add(r.sums, ones, 64);    // in any order
    if (defect == store_over_store_) bulk_store(r.sums, ones, 64);
    bulk_commit();
    if (defect == load_of_what_is_stored_) {
        mbarrier_arrive_expect_tx(full, 8192);
        tma_load(tile, &r.out, full, {0, 0});
        mbarrier_wait(full, 1);
    }
    bulk_wait<0>();
    wait_for_counter(r.counter, 0);
    add_to_counter(r.counter, 1);
    if (defect == copy_without_commit_) bulk_store(r.sums, ones, 64);
    else bulk_commit();    // of nothing, for which no wait is needed
}

KERNEL void rules_kernel(GRID_CONSTANT Rules r, int defect) {
    DYNAMIC_SHARED(char, memory);
    SHARED_ARRAY(Mbarrier, full, 1);
    SHARED_ARRAY(float4, ones, 4);
    char *tile = aligned(memory), *left = tile + 8192;
    const int thread = (int)threadIdx.x, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    float d[8][4] = {};
    if (thread == 0) rules_of_loads(r, tile, full, defect);
    __syncthreads();
    mbarrier_wait(full, 0);
    for (int i = thread; i < 512; i += 128) store_shared((uint4 *)left + i, ((const uint4 *)tile)[i]);
    if (thread < 4) store_shared(&ones[thread], make_float4(1, 1, 1, 1));
    if (defect != operand_not_fenced_) fence_proxy_async();
    __syncthreads();
    rules_of_wgmma(d, left, tile, defect);
    for (int j = 0; j < 8; j++)
        for (int e = 0; e < 4; e++) r.product[(row + e / 2 * 8) * 64 + 8 * j + column + e % 2] = d[j][e];
    if (thread == 0) rules_of_copies(r, tile, &ones[0].x, full, defect);
}

static void rules(int defect) {
    std::vector<bf16> x = small_numbers(64 * 64, 9);
    Device<bf16> in(x), out(x.size());
    Device<float> product(64 * 64), sums(std::vector<float>(16, 0.0f));
    Device<unsigned> counter(std::vector<unsigned>(2, 0u));
    Rules r = {};
    r.in = matrix_map(in.p, 64, 64, 64, 64, SWIZZLE_128);
    r.out = matrix_map(out.p, 64, 64, 64, 64, SWIZZLE_128);
    r.copy = out.p;
    r.product = product.p;
    r.sums = sums.p;
    r.counter = counter.p;
    launch(rules_kernel, 1, defect == wrong_block_ ? 160 : 128, 2 * 8192 + 1024, NULL, r, defect);
    std::vector<bf16> copied = out.host();
    std::vector<float> got = product.host();
    for (size_t i = 0; i < 64; i++)
        for (size_t j = 0; j < 64; j++) {
            float sum = 0;
            for (size_t k = 0; k < 16; k++) sum += 4 * to_float(x[64 * i + k]) * to_float(x[64 * j + k]);
            CHECK(got[64 * i + j] == sum, "(%zu, %zu) is %g, not %g", i, j, got[64 * i + j], sum);
            const size_t at = swizzle_bits((unsigned)(128 * i + 2 * j), SWIZZLE_128) / 2;
            CHECK(to_float(copied[at]) == to_float(x[64 * i + j]), "the copy of (%zu, %zu)", i, j);
        }
    for (float sum : sums.host()) CHECK(sum == 2, "a sum is %g", sum);
    CHECK(counter.host()[0] == 1, "the counter");
}

// ---- defects between blocks: sum (64) += x of each block, in the order of the blocks

enum { ORDERED_BLOCKS = 8 };

enum OrderedDefect {
    ORDERED,
    NO_WAIT_FOR_COUNTER,
    NO_ADVANCE,
    READ_WAIT_ONLY,
    // From here on, a block ends when it has added its numbers, so few blocks run at a time.
    LAUNCH_ORDER,
    TICKETS
};

KERNEL void ordered_kernel(float *sum, unsigned *turn, unsigned *ticket, const float *x, int defect) {
    SHARED_ARRAY(float4, memory, 16);
    SHARED_ARRAY(unsigned, drawn, 1);
    float *tile = (float *)memory;
    if (threadIdx.x == 0) {
        const bool by_ticket = defect != LAUNCH_ORDER && defect != NO_WAIT_FOR_COUNTER;
        *drawn = by_ticket ? atomicAdd(ticket, 1u) : blockIdx.x;
    }
    __syncthreads();
    unsigned block = *drawn;
    store_shared(&tile[threadIdx.x], x[block * 64 + threadIdx.x]);
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (defect != NO_WAIT_FOR_COUNTER) wait_for_counter(turn, block);
    bulk_reduce_add(sum, tile, 256);
    bulk_commit();
    if (defect == READ_WAIT_ONLY) bulk_wait_read<0>();
    else bulk_wait<0>();
    if (defect != NO_ADVANCE) add_to_counter(turn, 1);
    if (defect < LAUNCH_ORDER) wait_for_counter(turn, gridDim.x);    // all blocks have to be resident
}

static void ordered(int defect) {
    std::vector<float> x(ORDERED_BLOCKS * 64), expected(64, 0.0f);
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = 1.0f / (float)(i + 1);    // rounding makes the sums depend on the order
        expected[i % 64] += x[i];
    }
    Device<float> dx(x), sum(std::vector<float>(64, 0.0f));
    Device<unsigned> counters(std::vector<unsigned>(2, 0u));
    launch(ordered_kernel, dim3(ORDERED_BLOCKS), 64, 0, NULL, sum.p, counters.p, counters.p + 1, dx.p, defect);
    std::vector<float> got = sum.host();
    for (size_t i = 0; i < 64; i++) CHECK(got[i] == expected[i], "%zu is %g, not %g", i, got[i], expected[i]);
}
static void waits_for_a_block_not_resident(bool defect) {
    const uint64_t resident = cuda_on_cpu::settings().resident;
    if (defect) cuda_on_cpu::settings().resident = ORDERED_BLOCKS - 1;
    ordered(ORDERED);
    cuda_on_cpu::settings().resident = resident;
}

// Each block in its turn writes one more than the block before. One thread copies, and another passes the turn on.
KERNEL void relay_kernel(float4 *numbers, unsigned *turn, unsigned *ticket, bool defect) {
    SHARED_ARRAY(float4, memory, 1);
    SHARED_ARRAY(unsigned, drawn, 1);
    if (threadIdx.x == 32) {
        *drawn = atomicAdd(ticket, 1u);
        wait_for_counter(turn, *drawn);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned block = *drawn;
        const float x = block ? numbers[block - 1].x + 1 : 1.0f;
        store_shared(memory, make_float4(x, x, x, x));
        fence_proxy_async();
        bulk_store(&numbers[block], memory, sizeof *memory);
        bulk_commit();
        if (defect) bulk_wait_read<0>();
        else bulk_wait<0>();
    }
    __syncthreads();
    if (threadIdx.x == 32) add_to_counter(turn, 1);
}

static void turn_passed_on_before_store(bool defect) {
    Device<float4> numbers(std::vector<float4>(ORDERED_BLOCKS, make_float4(0, 0, 0, 0)));
    Device<unsigned> counters(std::vector<unsigned>(2, 0u));
    launch(relay_kernel, dim3(ORDERED_BLOCKS), 64, 0, NULL, numbers.p, counters.p, counters.p + 1, defect);
    std::vector<float4> got = numbers.host();
    for (size_t i = 0; i < got.size(); i++) CHECK(got[i].w == (float)(i + 1), "%zu is %g", i, got[i].w);
}
// ---- a warp hands rows over to another: one lane arrives for all

enum { HANDOVERS = 20 };

KERNEL void handover_kernel(float *out, bool defect) {
    SHARED_ARRAY(float, row, 32);
    SHARED_ARRAY(Mbarrier, full, 1);
    SHARED_ARRAY(Mbarrier, empty, 1);
    const int lane = (int)threadIdx.x % 32;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    for (int i = 0; i < HANDOVERS; i++) {
        if (threadIdx.x < 32) {
            mbarrier_wait(empty, (unsigned)(i + 1) % 2);
            row[lane] = (float)(32 * i + lane);
            if (!defect) __syncwarp();
            if (lane == 0) mbarrier_arrive(full);
        } else {
            mbarrier_wait(full, (unsigned)i % 2);
            out[32 * i + lane] = row[lane];
            __syncwarp();
            if (lane == 0) mbarrier_arrive(empty);
        }
    }
}

static void missing_syncwarp_before_arrival(bool defect) {
    Device<float> out(32 * HANDOVERS);
    launch(handover_kernel, 1, dim3(64), 0, NULL, out.p, defect);
    std::vector<float> got = out.host();
    for (size_t i = 0; i < got.size(); i++) CHECK(got[i] == (float)i, "%zu is %g", i, got[i]);
}

// ---- tensor maps that CUDA refuses

static void map_defect(int defect) {
    Device<bf16> x(64 * 72);
    TensorMap map;
    std::vector<cuuint64_t> dims = {64, 64}, strides = {144};
    std::vector<cuuint32_t> box = {64, 64};
    if (defect == 1) box[0] = 128;
    if (defect == 2) dims[1] = 65;
    CHECK(encode(&map, x.p, dims, strides, box, SWIZZLE_128) == CUDA_SUCCESS, "refused");
}
// The last of three warpgroups releases what the others wait for.
KERNEL void __launch_bounds__(384, 1) registers_kernel(int *out) {
    if (threadIdx.x < 256) setmaxnreg_inc<240>();
    else setmaxnreg_dec<24>();
    out[threadIdx.x] = (int)threadIdx.x;
}

static void registers_numbers() {
    Device<int> out(384);
    launch(registers_kernel, 1, dim3(384), 0, NULL, out.p);
    std::vector<int> got = out.host();
    for (int i = 0; i < 384; i++) CHECK(got[(size_t)i] == i, "thread %d left %d", i, got[(size_t)i]);
}

static void numbers() {
    registers_numbers();
    ordered(ORDERED);
    pipeline(NO_DEFECT);
    rules(NO_RULE);
}

#define X(name)                       \
    static void name(bool defect) {   \
        pipeline(defect ? name##_ : NO_DEFECT); \
    }
PIPELINE_DEFECTS(X)
#undef X
#define X(name)                       \
    static void name(bool defect) {   \
        rules(defect ? name##_ : NO_RULE); \
    }
RULE_DEFECTS(X)
#undef X

int main(int argc, char **argv) {
#define X(f) {#f, f},
    // clang-format off
    static const PlantedDefect ALL_CASES[] = {
        PIPELINE_DEFECTS(X) RULE_DEFECTS(X)
        {"missing_counter_wait", [](bool defect) { ordered(defect ? NO_WAIT_FOR_COUNTER : ORDERED); }},
        {"counter_not_advanced", [](bool defect) { ordered(defect ? NO_ADVANCE : ORDERED); }},
        {"counter_before_writes", [](bool defect) { ordered(defect ? READ_WAIT_ONLY : ORDERED); }},
        {"waits_for_a_block_not_resident", waits_for_a_block_not_resident},
        // The order of launch is not guaranteed, unlike that of tickets.
        {"order_of_launch", [](bool defect) { ordered(defect ? LAUNCH_ORDER : TICKETS); }},
        {"turn_passed_on_before_store", turn_passed_on_before_store},
        {"missing_syncwarp_before_arrival", missing_syncwarp_before_arrival},
        {"map_row_longer_than_swizzle", [](bool defect) { map_defect(defect ? 1 : 0); }},
        {"map_past_allocation", [](bool defect) { map_defect(defect ? 2 : 0); }},
    };
    // clang-format on
#undef X
    return run_planted(argc, argv, numbers, ALL_CASES);
}

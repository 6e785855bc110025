// Part of test_kernels.cu: every function of cuda/hopper.cuh against plain loops. On a GPU, this shows that the PTX
// does what the emulation does. Where the functions do not exist (other than compute capability 9.0), the cases are
// skipped.
#include "cuda/hopper.cuh"
#include "cuda/tensor_map.cuh"

template <class T>
KERNEL void hopper_here_kernel(T *here) {
    *here = hopper_here();
}

static bool has_hopper(void) {
    Tensor<int32_t> here(1);
    Device device = device_read();
    if (device.major != 9 || device.minor != 0) return false;
    here.device();
    launch(hopper_here_kernel<int32_t>, dim3(1), dim3(1), 0, stream, here.device());
    array_fetch(&here);
    return here.at(0) != 0;
}

template <class X>
static std::vector<X> whole(size_t n, unsigned seed) {    // from -3 to 3, so that sums of products are exact
    std::vector<X> x(n);
    for (size_t i = 0; i < n; i++)
        set_value(&x[i], (double)((int)((i * 2654435761u + seed * 40503u) >> 7 & 0xFFFF) % 7 - 3));
    return x;
}

// ---- TMA: a box of a tensor in bf16 with four dimensions, as attention has them, is loaded, and copied to `tile`.

enum { RANK = 4, TMA_PHASES = 3 };    // the load is repeated, so that phases of the mbarrier alternate

struct TmaCase {
    int at[RANK], bytes;
};

template <class X>
KERNEL void tma_test_kernel(GRID_CONSTANT TensorMap in, X *tile, TmaCase c) {
    DYNAMIC_SHARED(char, memory);
    SHARED_ARRAY(Mbarrier, full, 1);
    X *shared = (X *)aligned_tile(memory);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    for (int phase = 0; phase < TMA_PHASES; phase++) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(full, (unsigned)c.bytes);
            tma_load(shared, &in, full, c.at);
        }
        mbarrier_wait(full, phase % 2);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < c.bytes / (int)sizeof(X); i += blockDim.x) tile[i] = shared[i];
}

// The byte of a tile after swizzling, from PTX's tables: row r of 128 bytes permutes its 16-byte pieces by XOR.
static size_t swizzle_table(size_t byte, Swizzle swizzle) {
    const size_t row = byte / 128, piece = (byte / 16) % 8, change = row % (swizzle == SWIZZLE_64 ? 4 : 8);
    return row * 128 + (piece ^ change) * 16 + byte % 16;
}

static void test_tma(const char *what, const uint64_t (&sizes)[RANK], const uint32_t (&box)[RANK], TmaCase c,
                     Swizzle swizzle) {
    if (!case_begins("wrappers tma, swizzle %d, %s", 16 << swizzle, what)) return;
    const size_t row = (sizes[0] * sizeof(bf16) + 31) / 16 * 16;    // with gaps between rows
    const size_t strides[] = {row, row * sizes[1], row * sizes[1] * sizes[2]};
    const size_t n = strides[2] * sizes[3] / sizeof(bf16), boxed = (size_t)box[0] * box[1] * box[2] * box[3];
    c.bytes = (int)(boxed * sizeof(bf16));
    Tensor<bf16> in(n), tile(boxed);
    Numbers x, got(boxed);
    for (bf16 v : whole<bf16>(n, 1)) x.push_back(value_of(v));
    fill(in, x);
    TensorMap map;
    tensor_map(&map, in.device(), sizes, {strides[0], strides[1], strides[2]}, box, swizzle);
    run_twice({&tile},
              [&] { launch(tma_test_kernel<bf16>, dim3(1), dim3(64), 32 * 1024, stream, map, tile.device(), c); });
    for (size_t i = 0; i < boxed; i++) {
        size_t rest = i, from = 0;
        bool inside = true;
        for (int d = 0; d < RANK; d++) {
            const int64_t at = c.at[d] + (int64_t)(rest % box[d]);
            rest /= box[d];
            inside = inside && at >= 0 && at < (int64_t)sizes[d];
            if (inside) from += (size_t)at * (d == 0 ? 1 : strides[d - 1] / sizeof(bf16));
        }
        got[swizzle_table(i * sizeof(bf16), swizzle) / sizeof(bf16)] = inside ? x[from] : 0;
    }
    compare("tile", tile, got, 0);
    case_ends();
}

static void test_tmas(void) {
    for (Swizzle s : {SWIZZLE_64, SWIZZLE_128}) {
        const uint32_t row = (16u << s) / 2;    // elements
        const int half = (int)row / 2;
        test_tma("before the start", {64, 3, 5, 2}, {row, 2, 8, 2}, {{-half, -1, -4, -1}, 0}, s);
        test_tma("past the end", {64, 3, 5, 2}, {row, 2, 8, 2}, {{64 - half, 2, 1, 1}, 0}, s);
        test_tma("past both ends", {row - 8, 3, 2, 1}, {row, 5, 4, 1}, {{-8, -1, -1, 0}, 0}, s);
        test_tma("larger than the tensor", {row - 8, 3, 2, 1}, {row, 5, 4, 1}, {{0, 0, 0, 0}, 0}, s);
        test_tma("rows of 100 bytes", {50, 1, 40, 1}, {row, 1, 16, 1}, {{8, 0, 30, 0}, 0}, s);
    }
}

// ---- a ring of two stages, filled by tma_load in one warpgroup and emptied by two others, which get its registers.
// out: sums of pieces of 256 floats; then all of them, stored and added through shared memory.

enum { RING_STAGES = 2, RING_FLOATS = 256, RING_PIECES = 7 };

template <class T>
KERNEL void __launch_bounds__(384, 1) ring_test_kernel(GRID_CONSTANT TensorMap in, T *out, T *stored, T *added) {
    DYNAMIC_SHARED(char, memory);
    SHARED_ARRAY(float4, results, RING_FLOATS / 4);
    SHARED_ARRAY(Mbarrier, full, RING_STAGES);
    SHARED_ARRAY(Mbarrier, empty, RING_STAGES);
    float *ring = (float *)aligned_tile(memory), *result = (float *)results;
    const int thread = threadIdx.x - 128;    // of the consumers
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING_STAGES; i++) {
            mbarrier_init(&full[i], 1);
            mbarrier_init(&empty[i], 256);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<40>();
        for (int i = 0; threadIdx.x == 0 && i < RING_PIECES; i++) {
            const int stage = i % RING_STAGES;
            mbarrier_wait(&empty[stage], (i / RING_STAGES + 1) % 2);
            mbarrier_arrive_expect_tx(&full[stage], RING_FLOATS * sizeof(float));
            tma_load(ring + stage * RING_FLOATS, &in, &full[stage], {i * RING_FLOATS});
        }
        return;
    }
    setmaxnreg_inc<232>();
    float sum = 0;
    for (int i = 0; i < RING_PIECES; i++) {
        const int stage = i % RING_STAGES;
        mbarrier_wait(&full[stage], (i / RING_STAGES) % 2);
        sum += ring[stage * RING_FLOATS + thread];
        mbarrier_arrive(&empty[stage]);
    }
    out[thread] = sum;
    store_shared(&result[thread], sum);
    fence_proxy_async();
    named_barrier_sync(1, 256);
    if (thread > 0) return;
    bulk_store(stored, result, RING_FLOATS * sizeof(float));
    bulk_reduce_add(added, result, RING_FLOATS * sizeof(float));
    bulk_commit();
    bulk_wait<0>();
}

static void test_ring(void) {
    if (!case_begins("wrappers mbarrier, bulk copies, setmaxnreg")) return;
    Tensor<float> in(RING_PIECES * RING_FLOATS), out(RING_FLOATS), stored(RING_FLOATS), added(RING_FLOATS);
    Numbers x, sums(RING_FLOATS), start(RING_FLOATS, 5);
    for (float v : whole<float>(RING_PIECES * RING_FLOATS, 3)) x.push_back(v);
    fill(in, x);
    fill(added, start);
    TensorMap map;
    tensor_map(&map, in.device(), {RING_PIECES * RING_FLOATS}, {}, {RING_FLOATS}, SWIZZLE_NONE);
    run_twice({&out, &stored, &added}, [&] {
        launch(ring_test_kernel<float>, dim3(1), dim3(384), 1024 + RING_STAGES * RING_FLOATS * sizeof(float), stream,
               map, out.device(), stored.device(), added.device());
    });
    for (size_t i = 0; i < x.size(); i++) sums[i % RING_FLOATS] += x[i];
    compare("sums", out, sums, 0);
    compare("stored", stored, sums, 0);
    for (double &s : sums) s += 5;
    compare("added", added, sums, 0);
    case_ends();
}

// ---- stmatrix, the inverse of ldmatrix: matrices are stored, and read with plain loads.

template <class T>
KERNEL void stmatrix_test_kernel(uint16_t *out, const T *r) {
    SHARED_ARRAY(uint4, memory, 32);
    uint16_t *rows = (uint16_t *)memory;
    const int lane = threadIdx.x;
    const uint32_t four[4] = {r[4 * lane], r[4 * lane + 1], r[4 * lane + 2], r[4 * lane + 3]};
    stmatrix_x4(rows + 8 * lane, four);
    __syncwarp();
    for (int i = lane; i < 256; i += 32) out[i] = rows[i];
}

static void test_stmatrix(void) {
    if (!case_begins("wrappers stmatrix")) return;
    Tensor<uint32_t> in(128);
    Tensor<uint16_t> out(256);
    std::vector<uint32_t> r(128);
    for (uint32_t i = 0; i < 128; i++) r[i] = 2 * i | (2 * i + 1) << 16;
    upload(in, r);
    run_twice({&out},
              [&] { launch(stmatrix_test_kernel<uint32_t>, dim3(1), dim3(32), 0, stream, out.device(), in.device()); });
    size_t wrong = 0;
    for (size_t i = 0; i < 256; i++) {
        const size_t matrix = i / 64, lane = i % 64 / 2;
        wrong += out.at(i) != 2 * (4 * lane + matrix) + i % 2;
    }
    check("wrong elements", (double)wrong, 0);
    case_ends();
}

// ---- wgmma: out (64,N) = 2 or 1 times a (64,16) · b (N,16)ᵀ, plus c if `accumulate`. Operands are put where the
// canonical layouts of PTX's matrix descriptors say, byte by byte.

struct WgmmaLayout {
    Swizzle swizzle;
    unsigned leading, stride;    // bytes
};

// Offsets at which tiles of up to 256 by 16 do not overlap, larger than they need to be.
static WgmmaLayout layout_for(Major major, Swizzle swizzle) {
    return {swizzle, 2048, major == K_MAJOR ? 128u << swizzle : 1024u};
}

// PTX ISA, "Canonical layouts": of element (i, k), the byte before swizzling.
DEVICE unsigned canonical_byte(Major major, int i, int k, WgmmaLayout l) {
    const int row = 16 << l.swizzle, along = row / 2;    // bytes and elements of a row of a pattern
    if (major == K_MAJOR) return (i % 8) * row + (i / 8) * l.stride + k * 2;
    return (i % along) * 2 + (i / along) * l.leading + (k % 8) * row + (k / 8) * l.stride;
}

DEVICE void store_operand(char *tile, const bf16 *x, int rows, Major major, WgmmaLayout l) {
    for (int i = threadIdx.x; i < rows * 16; i += blockDim.x) {
        const unsigned byte = swizzled_byte(canonical_byte(major, i / 16, i % 16, l), l.swizzle);
        store_shared((bf16 *)(tile + byte), x[i]);
    }
}

enum { A_TILE_BYTES = 32 * 1024, B_TILE_BYTES = 64 * 1024 };

// A thread's part of D, from or to a matrix (64, 8 NT).
template <int NT>
DEVICE void load_results(float (&d)[NT][4], const float *from) {
    const int row = (threadIdx.x / 32) * 16 + threadIdx.x % 32 / 4, column = (threadIdx.x % 4) * 2;
    UNROLL
    for (int j = 0; j < NT; j++) {
        UNROLL
        for (int i = 0; i < 4; i++) d[j][i] = from[(row + (i / 2) * 8) * 8 * NT + 8 * j + column + i % 2];
    }
}

template <int NT>
DEVICE void store_results(float *to, const float (&d)[NT][4]) {
    const int row = (threadIdx.x / 32) * 16 + threadIdx.x % 32 / 4, column = (threadIdx.x % 4) * 2;
    UNROLL
    for (int j = 0; j < NT; j++) {
        UNROLL
        for (int i = 0; i < 4; i++) to[(row + (i / 2) * 8) * 8 * NT + 8 * j + column + i % 2] = d[j][i];
    }
}

template <Major A, Major B, int NT>
KERNEL void __launch_bounds__(128, 1)
    wgmma_test_kernel(float *out, float *from_registers, const bf16 *a, const bf16 *b, const float *c,
                      WgmmaLayout a_layout, WgmmaLayout b_layout, bool accumulate) {
    DYNAMIC_SHARED(char, memory);
    char *a_tile = aligned_tile(memory), *b_tile = a_tile + A_TILE_BYTES;
    float d[NT][4];
    uint32_t fragment[4];
    store_operand(a_tile, a, 64, A, a_layout);
    store_operand(b_tile, b, 8 * NT, B, b_layout);
    fence_proxy_async();
    __syncthreads();
    const uint64_t left = matrix_descriptor(a_tile, a_layout.leading, a_layout.stride, a_layout.swizzle);
    const uint64_t right = matrix_descriptor(b_tile, b_layout.leading, b_layout.stride, b_layout.swizzle);
    load_results(d, c);
    wgmma_fence();
    wgmma<A, B>(d, left, right, accumulate);
    wgmma<A, B>(d, left, right, true);
    wgmma_commit();
    wgmma_wait<0>(d);
    store_results(out, d);
    load_results(d, c);
    UNROLL
    for (int i = 0; i < 4; i++) {
        const int row = (threadIdx.x / 32) * 16 + threadIdx.x % 32 / 4 + (i % 2) * 8,
                  k = (threadIdx.x % 4) * 2 + (i / 2) * 8;
        fragment[i] = pack_bf16(to_float(a[row * 16 + k]), to_float(a[row * 16 + k + 1]));
    }
    wgmma_fence();
    wgmma<B>(d, fragment, right, accumulate);
    wgmma_commit();
    wgmma_wait<0>(d);
    store_results(from_registers, d);
}

template <Major A, Major B, int NT>
static void test_wgmma(Swizzle a_swizzle, Swizzle b_swizzle, bool accumulate) {
    const size_t N = 8 * NT;
    if (!case_begins("wrappers wgmma N %zu, a %s %d, b %s %d%s", N, A == K_MAJOR ? "K" : "M", 16 << a_swizzle,
                     B == K_MAJOR ? "K" : "N", 16 << b_swizzle, accumulate ? ", added" : ""))
        return;
    Tensor<bf16> a(64 * 16), b(N * 16);
    Tensor<float> c(64 * N), out(64 * N), from_registers(64 * N);
    std::vector<bf16> x = whole<bf16>(64 * 16, 3), y = whole<bf16>(N * 16, 4);
    std::vector<float> z = whole<float>(64 * N, 5);
    upload(a, x);
    upload(b, y);
    upload(c, z);
    run_twice({&out, &from_registers}, [&] {
        launch(wgmma_test_kernel<A, B, NT>, dim3(1), dim3(128), 1024 + A_TILE_BYTES + B_TILE_BYTES, stream,
               out.device(), from_registers.device(), a.device(), b.device(), c.device(), layout_for(A, a_swizzle),
               layout_for(B, b_swizzle), accumulate);
    });
    Numbers twice(64 * N), once(64 * N);
    for (size_t i = 0; i < 64; i++)
        for (size_t n = 0; n < N; n++) {
            double sum = 0;
            for (size_t k = 0; k < 16; k++) sum += value_of(x[i * 16 + k]) * value_of(y[n * 16 + k]);
            once[i * N + n] = sum + (accumulate ? z[i * N + n] : 0);
            twice[i * N + n] = once[i * N + n] + sum;
        }
    compare("a from shared memory, twice", out, twice, 0);
    compare("a from registers", from_registers, once, 0);
    case_ends();
}

template <int NT>
static void test_wgmma_width(void) {
    test_wgmma<K_MAJOR, K_MAJOR, NT>(SWIZZLE_128, SWIZZLE_128, false);
    test_wgmma<K_MAJOR, MN_MAJOR, NT>(SWIZZLE_128, SWIZZLE_128, true);
}

static void test_wgmmas(void) {
    test_wgmma_width<1>();
    test_wgmma_width<2>();
    test_wgmma_width<4>();
    test_wgmma_width<9>();
    test_wgmma_width<12>();
    test_wgmma_width<16>();
    test_wgmma_width<24>();
    test_wgmma_width<32>();
    for (Swizzle s : {SWIZZLE_64, SWIZZLE_128}) {
        const Swizzle other = s == SWIZZLE_64 ? SWIZZLE_128 : SWIZZLE_64;
        test_wgmma<K_MAJOR, K_MAJOR, 8>(s, other, true);
        test_wgmma<K_MAJOR, MN_MAJOR, 8>(other, s, false);
        test_wgmma<MN_MAJOR, K_MAJOR, 8>(s, s, false);
        test_wgmma<MN_MAJOR, MN_MAJOR, 8>(other, other, true);
    }
}

// ---- named barriers: one warp writes after a delay and arrives at the first barrier. The other waits there, reads
// after a delay, and arrives at the second one, for which the first warp waits before it writes again.

enum { BARRIER_ROUNDS = 3, LATE = 1000 };

// Takes a while: adds 0 to a counter in global memory, again and again. Each addition waits for the result of the one
// before it, whose highest bit, 0, it adds.
DEVICE void be_late(unsigned *counter, int additions) {
    unsigned nothing = 0;
    UNROLL_NOT
    for (int i = 0; i < additions; i++) nothing = atomicAdd(counter, nothing) >> 31;
}

template <class T>
KERNEL void named_barrier_test_kernel(T *out, unsigned *counter) {
    SHARED_ARRAY(int, numbers, 32);
    const int lane = threadIdx.x % 32;
    for (int round = 0; round < BARRIER_ROUNDS; round++) {
        if (threadIdx.x < 32) {
            if (round > 0) named_barrier_sync(2, 64);
            be_late(counter, LATE);
            numbers[lane] = 100 * round + lane;
            named_barrier_arrive(1, 64);
        } else {
            named_barrier_sync(1, 64);
            be_late(counter, LATE);
            out[32 * round + lane] = numbers[31 - lane];
            if (round + 1 < BARRIER_ROUNDS) named_barrier_arrive(2, 64);
        }
    }
}

static void test_named_barriers(void) {
    if (!case_begins("wrappers named_barrier")) return;
    Tensor<int32_t> out(32 * BARRIER_ROUNDS);
    Tensor<uint32_t> counter(1);
    upload(counter, std::vector<uint32_t>(1, 0));
    run_twice({&out}, [&] {
        launch(named_barrier_test_kernel<int32_t>, dim3(1), dim3(64), 0, stream, out.device(), counter.device());
    });
    size_t wrong = 0;
    for (size_t i = 0; i < out.n; i++) wrong += out.at(i) != (int32_t)(100 * (i / 32) + 31 - i % 32);
    check("wrong elements", (double)wrong, 0);
    case_ends();
}

// ---- a counter: from the last block to the first, each reads what the one before it wrote after a delay. There are so
// few blocks that all of them run at the same time.

enum { COUNTER_BLOCKS = 4 };

template <class T>
KERNEL void counter_test_kernel(T *out, unsigned *counters) {
    const int turn = COUNTER_BLOCKS - 1 - (int)blockIdx.x;
    T *mine = out + 32 * turn;
    if (threadIdx.x == 0) wait_for_counter(&counters[1], 2 * turn);
    __syncthreads();
    const T before = turn > 0 ? *(volatile T *)(mine - 32 + threadIdx.x) : 0;
    be_late(&counters[0], LATE);
    mine[threadIdx.x] = before + turn + 1;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) add_to_counter(&counters[1], 2);
}

static void test_counters(void) {
    if (!case_begins("wrappers wait_for_counter, add_to_counter")) return;
    Tensor<int32_t> out(32 * COUNTER_BLOCKS);
    Tensor<uint32_t> counters(2);
    upload(counters, std::vector<uint32_t>(2, 0));
    run_twice({&out, &counters}, [&] {
        launch(counter_test_kernel<int32_t>, dim3(COUNTER_BLOCKS), dim3(32), 0, stream, out.device(),
               counters.device());
    });
    size_t wrong = 0;
    for (size_t i = 0; i < out.n; i++) {
        const int32_t turn = (int32_t)i / 32;
        wrong += out.at(i) != (turn + 1) * (turn + 2) / 2;
    }
    check("wrong elements", (double)wrong, 0);
    check_true("two for each block", counters.at(1) == 2 * COUNTER_BLOCKS);
    case_ends();
}

static void test_hopper(void) {
    if (!has_hopper()) {
        printf("-- wrappers of cuda/hopper.cuh: skipped, for compute capability 9.0 only (built for sm_90a)\n");
        return;
    }
    test_tmas();
    test_ring();
    test_stmatrix();
    test_wgmmas();
    test_named_barriers();
    test_counters();
}

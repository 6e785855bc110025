// The emulator's own test: the sums of mma, the runtime's functions, and defects planted in kernels, each with a
// correct twin.
//     test_cuda_on_cpu numbers             mma and the runtime
//     test_cuda_on_cpu NAME 0|1            the kernel NAME, correct (0) or with its defect (1)
//     test_cuda_on_cpu help                the names
// The exit status is 0 if the results are right and 1 if they are wrong; a defect may also end in a message and
// abort(). test_cuda_on_cpu.py lists the settings that find each defect.
#include "planted_defects.h"

#include <algorithm>
#include <numeric>
#include <vector>

static const unsigned ALL = 0xFFFFFFFFu;

static std::vector<float> count_up(size_t n) {
    std::vector<float> a(n);
    for (size_t i = 0; i < n; i++) a[i] = (float)(i % 1021);
    return a;
}

// ---- numbers

// Every element of out (16,8) is sum_k x_k y_k + c
KERNEL void dot_product(float *out, const bf16 *x, const bf16 *y, float c) {
    int l = (int)threadIdx.x, g = l / 4, t = l % 4;
    auto pair = [&](const bf16 *p) { return (uint32_t)__bfloat16_as_ushort(p[1]) << 16 | __bfloat16_as_ushort(p[0]); };
    uint32_t a[4] = {pair(x + 2 * t), pair(x + 2 * t), pair(x + 2 * t + 8), pair(x + 2 * t + 8)};
    uint32_t b[2] = {pair(y + 2 * t), pair(y + 2 * t + 8)};
    float d[4] = {c, c, c, c};
    mma_m16n8k16(d, a, b);
    for (int i = 0; i < 4; i++) out[(g + (i / 2) * 8) * 8 + 2 * t + i % 2] = d[i];
}

// Computed by hand, for each way of adding. The products are x_k y_k; the remaining x and y are 0.
static void test_sums() {
    const float large = 67108864, inf = INFINITY;    // 2^26
    const struct {
        const char *what;
        float c, nearest, hopper;
        std::vector<float> x, y;
    } cases[] = {
        {"2^-24 is kept next to 1, sixteen times", 1, 1, 1 + 0x1p-20f, std::vector<float>(16, 0x1p-12f),
         std::vector<float>(16, 0x1p-12f)},
        {"2^-26 is cut off", 1, 1, 1, std::vector<float>(16, 0x1p-13f), std::vector<float>(16, 0x1p-13f)},
        {"of 1.5 · 2^-25 a third is cut off", 1, 1, 1 + 0x1p-21f, std::vector<float>(16, 0x1.8p-12f),
         std::vector<float>(16, 0x1p-13f)},
        {"also below 0", -1, -1, -1 - 0x1p-21f, std::vector<float>(16, -0x1.8p-12f), std::vector<float>(16, 0x1p-13f)},
        {"the sum is rounded toward zero", 1, 1 + 0x1p-22f, 1 + 0x1p-23f, {0x1.8p-12f}, {0x1p-11f}},
        {"1.5 · 1.5 has the exponent of 1", 0, 0x1p-25f, 0x1p-25f, {1.5f, -1.5f, 0x1p-12f}, {1.5f, 1.5f, 0x1p-13f}},
        {"a 1 is lost next to 2^26", 0, 1, 0, {large, -large, 1}, {1, 1, 1}},
        {"also if the 1 is the addend", 1, 0, 0, {large, -large}, {1, 1}},
        {"next to 2^26, 2 stays 2, and 3 becomes 2", 3, 0, 2, {large, -large}, {1, 1}},
        {"zeros have no exponent", 0, 0x1p-100f, 0x1p-100f, {0x1p-50f, 0, 0x1p100f}, {0x1p-50f, 0x1p100f, 0}},
        {"the smallest subnormal", 0, 0x1p-149f, 0x1p-149f, {0x1p-126f}, {0x1p-23f}},
        {"subnormal factors", 0, 0x1p-132f, 0x1p-132f, {0x1p-133f}, {2}},
        {"the largest", 0x1.fffffep127f, inf, 0x1.fffffep127f, {0x1p103f}, {1}},
        {"overflow", 0x1p127f, inf, inf, {0x1p127f}, {1}},
        {"infinity", 1, -inf, -inf, {-inf}, {1}},
    };
    for (auto &x : cases) {
        std::vector<bf16> a(16, __float2bfloat16(0)), b = a;
        for (size_t k = 0; k < x.x.size(); k++) {
            a[k] = __float2bfloat16(x.x[k]);
            b[k] = __float2bfloat16(x.y[k]);
        }
        Device<bf16> da(a), db(b);
        Device<float> out(128);
        const cuda_on_cpu::MmaSums before = cuda_on_cpu::settings().mma;
        for (cuda_on_cpu::MmaSums sums : {cuda_on_cpu::SUMS_NEAREST, cuda_on_cpu::SUMS_HOPPER}) {
            float right = sums == cuda_on_cpu::SUMS_HOPPER ? x.hopper : x.nearest;
            cuda_on_cpu::settings().mma = sums;
            launch(dot_product, 1, 32, 0, NULL, out.p, da.p, db.p, x.c);
            for (float y : out.host())
                CHECK(y == right, "%s, %s: %a, not %a", x.what, sums == cuda_on_cpu::SUMS_HOPPER ? "hopper" : "nearest",
                      y, right);
        }
        cuda_on_cpu::settings().mma = before;
    }
}

KERNEL void add_one(float *x, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] += 1.0f;
}

static void test_runtime() {
    cudaStream_t a, b;
    cudaEvent_t from, to;
    CUDA(cudaStreamCreate(&a));
    CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&from));
    CUDA(cudaEventCreate(&to));
    Device<float> x(count_up(100)), y(100);
    float *pinned;
    CUDA(cudaMallocHost((void **)&pinned, 400));
    CUDA(cudaEventRecord(from, a));
    launch(add_one, 2, 64, 0, a, x.p, 100);
    launch(add_one, 2, 64, 0, NULL, x.p, 100);    // the default stream waits for a
    launch(add_one, 2, 64, 0, a, x.p, 100);       // and a waits for it
    CUDA(cudaEventRecord(to, a));
    CUDA(cudaStreamWaitEvent(b, to, 0));
    CUDA(cudaMemcpyAsync(y.p, x.p, 400, cudaMemcpyDeviceToDevice, b));
    CUDA(cudaMemcpyAsync(pinned, y.p, 400, cudaMemcpyDeviceToHost, b));
    CUDA(cudaLaunchHostFunc(b, [](void *p) { ((float *)p)[0] += 1000.0f; }, pinned));
    CUDA(cudaStreamSynchronize(b));
    for (int i = 1; i < 100; i++) CHECK(pinned[i] == (float)(i % 1021) + 3.0f, "%d: %g", i, pinned[i]);
    CHECK(pinned[0] == 1003.0f, "a host function");
    float ms = -1, host[4];
    CUDA(cudaEventElapsedTime(&ms, from, to));
    CHECK(ms >= 0, "elapsed time");
    CUDA(cudaMemset(y.p, 0, 400));
    CUDA(cudaMemcpy2DAsync(host, 8, y.p, 200, 8, 2, cudaMemcpyDeviceToHost, NULL));
    CUDA(cudaDeviceSynchronize());
    CHECK(host[0] == 0 && host[3] == 0, "memset and 2D copy");
    CHECK(cudaMemcpy(y.p, host, 404, cudaMemcpyHostToDevice) == cudaErrorInvalidValue, "a copy past the end");
    CHECK(cudaMemcpy(y.p, host, 4, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue, "a copy in the wrong direction");
    CHECK(cudaMalloc((void **)&pinned + 0, (size_t)1 << 60) == cudaErrorMemoryAllocation, "too much memory");
    int attribute;
    CUDA(cudaDeviceGetAttribute(&attribute, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(attribute == 227 * 1024, "shared memory of a block");
    const char *name = "";
    CUDA(cudaFuncGetName(&name, (const void *)add_one));
    CHECK(strcmp(name, "add_one(float*, int)") == 0, "%s", name);
    CHECK(strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation") == 0, "an error's name");
    size_t free_bytes, total, free_then;
    CUDA(cudaMemGetInfo(&free_bytes, &total));
    {
        Device<float> more(100);
        CUDA(cudaMemGetInfo(&free_then, &total));
    }
    CHECK(free_bytes - free_then == 400, "memory in use");
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaStreamDestroy(b));
    CHECK(cudaStreamSynchronize(a) == cudaErrorInvalidResourceHandle, "a destroyed stream");
    CUDA(cudaEventDestroy(from));
    CUDA(cudaEventDestroy(to));
}

// Two streams, the second of which is forked from the first and joined to it, and an event for each.
struct Fork {
    cudaStream_t a, b;
    cudaEvent_t forked, joined;
    Fork() {
        CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
        CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
        CUDA(cudaEventCreate(&forked));
        CUDA(cudaEventCreate(&joined));
    }
    void fork() {
        CUDA(cudaEventRecord(forked, a));
        CUDA(cudaStreamWaitEvent(b, forked));
    }
    void join() {
        CUDA(cudaEventRecord(joined, b));
        CUDA(cudaStreamWaitEvent(a, joined));
    }
    Fork(const Fork &) = delete;
    ~Fork() {
        CUDA(cudaStreamDestroy(a));
        CUDA(cudaStreamDestroy(b));
        CUDA(cudaEventDestroy(forked));
        CUDA(cudaEventDestroy(joined));
    }
};

static void begin_capture(cudaStream_t stream) {
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

static cudaGraphExec_t end_capture(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

// Three launches of every kind of node: sum = 1, and each time y[0] + y[255] + x[3].
static void test_graphs() {
    Fork s;
    Device<float> x(count_up(256)), y(256), sum(std::vector<float>{0});
    int calls = 0;
    CUDA(cudaDeviceSynchronize());
    begin_capture(s.a);
    CUDA(cudaMemsetAsync(y.p, 0, 1024, s.a));
    launch(add_one, 1, 256, 0, s.a, y.p, 256);
    launch(add_one, 1, 256, 0, s.a, x.p, 256);
    CUDA(cudaLaunchHostFunc(s.a, [](void *p) { ++*(int *)p; }, &calls));
    cuda_on_cpu::enqueue(s.a,
                         [x = x.p, y = y.p, sum = sum.p] {
                             cuda_on_cpu::reads(x, 1024);
                             cuda_on_cpu::reads(y, 1024);
                             cuda_on_cpu::reads(sum, 4);
                             cuda_on_cpu::writes(sum, 4);
                             *sum += y[0] + y[255] + x[3];
                         },
                         {"a library", 1});
    cudaGraphExec_t exec = end_capture(s.a);
    CHECK(calls == 0 && x.host()[3] == 3, "nothing runs in a capture");
    cuda_on_cpu::counts_reset();
    CUDA(cudaGraphLaunch(exec, s.a));
    CUDA(cudaGraphLaunch(exec, s.a));
    CUDA(cudaGraphLaunch(exec, s.b));    // after the others, although in another stream
    CUDA(cudaGraphExecDestroy(exec));
    s.join();
    launch(add_one, 1, 256, 0, s.a, sum.p, 1);
    CUDA(cudaDeviceSynchronize());
    CHECK(calls == 3 && x.host()[3] == 6, "%d launches", calls);
    CHECK(sum.host()[0] == 3 * 2 + 4 + 5 + 6 + 1, "%g", sum.host()[0]);
    cuda_on_cpu::Counts c = cuda_on_cpu::counts();
    CHECK(c.graphs == 3 && c.launches == 7, "%d launches of graphs, %d of kernels", (int)c.graphs, (int)c.launches);
}

static void numbers() {
    test_sums();
    test_runtime();
    test_graphs();
}

// ---- planted defects: each kernel is correct with defect = false

// out = in, each block's 256 elements backwards
KERNEL void reverse_kernel(float *out, const float *in, bool defect) {
    SHARED_ARRAY(float, tile, 256);
    size_t start = blockIdx.x * 256;
    tile[threadIdx.x] = in[start + threadIdx.x];
    if (!defect) __syncthreads();
    out[start + threadIdx.x] = tile[255 - threadIdx.x];
}

static void check_reversed(const std::vector<float> &r) {
    for (size_t i = 0; i < r.size(); i++)
        CHECK(r[i] == (float)((i / 256 * 256 + 255 - i % 256) % 1021), "%zu: %g", i, r[i]);
}

static void missing_barrier(bool defect) {
    Device<float> in(count_up(512)), out(512);
    launch(reverse_kernel, 2, 256, 0, NULL, out.p, in.p, defect);
    check_reversed(out.host());
}

// The tile is reused: without the barrier after its use, a fast warp overwrites what a slow warp has not read yet.
KERNEL void reverse_in_one_block(float *out, const float *in, int tiles, bool defect) {
    SHARED_ARRAY(float, tile, 256);
    for (int i = 0; i < tiles; i++) {
        tile[threadIdx.x] = in[256 * i + threadIdx.x];
        __syncthreads();
        float x = tile[255 - threadIdx.x];
        x += __shfl_xor_sync(ALL, x, 0);    // something to wait for between the barriers
        out[256 * i + threadIdx.x] = x / 2 + (tile[255 - threadIdx.x] - x / 2);
        if (!defect) __syncthreads();
    }
}

static void missing_barrier_after_use(bool defect) {
    Device<float> in(count_up(1024)), out(1024);
    launch(reverse_in_one_block, 1, 256, 0, NULL, out.p, in.p, 4, defect);
    check_reversed(out.host());
}

KERNEL void neighbor_kernel(float *out, const float *in, bool defect) {    // within a warp: __syncwarp is enough
    SHARED_ARRAY(float, tile, 64);
    tile[threadIdx.x] = in[threadIdx.x];
    if (!defect) __syncwarp();
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

static void missing_syncwarp(bool defect) {
    Device<float> in(count_up(64)), out(64);
    launch(neighbor_kernel, 1, 64, 0, NULL, out.p, in.p, defect);
    std::vector<float> r = out.host();
    for (int i = 0; i < 64; i++) CHECK(r[i] == (float)(i ^ 1), "%d: %g", i, r[i]);
}

enum CopyDefect { SOUND, NO_WAIT, NO_BARRIER, NO_COMMIT, ONE_GROUP_LEFT, NO_BARRIER_BEFORE_REUSE };

// out = in, each 256 elements backwards, through a tile that asynchronous copies fill; two tiles alternate
KERNEL void reverse_by_copies(float *out, const float *in, int tiles, int defect) {
    DYNAMIC_SHARED(float, tile);
    int i = (int)threadIdx.x;
    copy_async_16(tile + 4 * i, in + 4 * i, true);
    copy_async_commit();
    for (int k = 0; k < tiles; k++) {
        if (defect != NO_BARRIER_BEFORE_REUSE) __syncthreads();    // everyone has read the tile that is filled next
        if (k + 1 < tiles) copy_async_16(tile + (k + 1) % 2 * 256 + 4 * i, in + 256 * (k + 1) + 4 * i, true);
        if (defect != NO_COMMIT) copy_async_commit();
        if (defect == ONE_GROUP_LEFT) copy_async_wait<2>();
        else if (defect != NO_WAIT) copy_async_wait<1>();
        if (defect != NO_BARRIER) __syncthreads();
        for (int j = i; j < 256; j += 64) out[256 * k + j] = tile[(k % 2) * 256 + 255 - j];
    }
}

static void copy_defect(int defect) {
    Device<float> in(count_up(2048)), out(2048);
    launch(reverse_by_copies, 1, 64, 2 * 256 * 4, NULL, out.p, in.p, 8, defect);
    check_reversed(out.host());
}
static void missing_stream_wait(bool defect) {
    Fork s;
    Device<float> x(count_up(256)), y(256);
    CUDA(cudaDeviceSynchronize());
    launch(add_one, 1, 256, 0, s.a, x.p, 256);
    if (!defect) s.fork();
    CUDA(cudaMemcpyAsync(y.p, x.p, 1024, cudaMemcpyDeviceToDevice, s.b));
    CUDA(cudaDeviceSynchronize());
    std::vector<float> r = y.host();
    for (int i = 0; i < 256; i++) CHECK(r[i] == (float)i + 1, "%d: %g", i, r[i]);
}

static void missing_host_wait(bool defect) {
    cudaStream_t a;
    float *pinned;
    CUDA(cudaStreamCreate(&a));
    CUDA(cudaMallocHost((void **)&pinned, 1024));
    memset(pinned, 0, 1024);
    Device<float> x(count_up(256));
    launch(add_one, 1, 256, 0, a, x.p, 256);
    CUDA(cudaMemcpyAsync(pinned, x.p, 1024, cudaMemcpyDeviceToHost, a));
    if (!defect) CUDA(cudaStreamSynchronize(a));
    for (int i = 0; i < 256; i++) CHECK(pinned[i] == (float)i + 1, "%d: %g", i, pinned[i]);
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaFreeHost(pinned));
}

static void buffer_changed_under_copy(bool defect) {
    cudaStream_t a;
    float *pinned;
    CUDA(cudaStreamCreate(&a));
    CUDA(cudaMallocHost((void **)&pinned, 1024));
    Device<float> x(256);
    for (int i = 0; i < 256; i++) pinned[i] = (float)i;
    CUDA(cudaMemcpyAsync(x.p, pinned, 1024, cudaMemcpyHostToDevice, a));
    if (!defect) CUDA(cudaStreamSynchronize(a));
    for (int i = 0; i < 256; i++) pinned[i] = -1.0f;
    CUDA(cudaStreamSynchronize(a));
    std::vector<float> r = x.host();
    for (int i = 0; i < 256; i++) CHECK(r[i] == (float)i, "%d: %g", i, r[i]);
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaFreeHost(pinned));
}

enum WarpDefect { NONE, DIVERGED, TWO_PLACES, EXITED, PARTIAL_MASK, PARTIAL_WARP };

KERNEL void warp_kernel(int *out, int defect) {
    int lane = (int)threadIdx.x % 32, x = (int)threadIdx.x;
    if (defect == EXITED && lane == 13) return;
    if (defect == DIVERGED) {
        if (lane < 16) x = __shfl_xor_sync(ALL, x, 1);
    } else if (defect == TWO_PLACES && lane < 16) {
        x = __shfl_xor_sync(ALL, x, 1);
    } else {
        x = __shfl_xor_sync(defect == PARTIAL_MASK ? 0xFFFFu : ALL, x, 1);
    }
    out[threadIdx.x] = x;
}

static void warp_defect(int defect) {
    Device<int> out(64);
    launch(warp_kernel, 1, defect == PARTIAL_WARP ? 48 : 64, 0, NULL, out.p, defect);
    std::vector<int> r = out.host();
    for (int i = 0; i < 64; i++) CHECK(r[i] == (i ^ 1), "%d: %d", i, r[i]);
}
KERNEL void barrier_kernel(int *out, int defect) {
    if (defect == 1 && threadIdx.x < 40) __syncthreads();    // for only a part of the block
    if (defect == 2 && threadIdx.x == 50) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}
static void barrier_defect(int defect) {
    Device<int> out(64);
    launch(barrier_kernel, 1, 64, 0, NULL, out.p, defect);
    for (int x : out.host()) CHECK(x == 1, "%d", x);
}
KERNEL void
deadlock_kernel(int *out,
                bool defect) {    // lanes 8-31 of warp 1 wait for its other lanes, which wait for them at the barrier
    if (!defect || threadIdx.x >= 40) out[threadIdx.x] = __shfl_xor_sync(ALL, 1, 1);
    __syncthreads();
    if (defect && threadIdx.x < 40) out[threadIdx.x] = __shfl_xor_sync(ALL, 1, 1);
}
static void deadlock(bool defect) {
    Device<int> out(64);
    launch(deadlock_kernel, 1, 64, 0, NULL, out.p, defect);
    for (int x : out.host()) CHECK(x == 1, "%d", x);
}

KERNEL void dynamic_kernel(float *out, int n) {
    DYNAMIC_SHARED(float, tile);
    for (int i = (int)threadIdx.x; i < n; i += 32) tile[i] = 1.0f;
    out[threadIdx.x] = tile[threadIdx.x];
}
static void write_past_dynamic_shared(bool defect) {    // the next byte is on a guard page
    Device<float> out(32);
    launch(dynamic_kernel, 1, 32, 4224, NULL, out.p, defect ? 1057 : 1056);
}
static void write_just_past_dynamic_shared(bool defect) {    // within the 128 bytes to which it is rounded up
    Device<float> out(32);
    launch(dynamic_kernel, 1, 32, 160, NULL, out.p, defect ? 41 : 40);
}

KERNEL void array_kernel(float *out, int n) {
    SHARED_ARRAY(float, first, 40);
    SHARED_ARRAY(float, second, 40);
    for (int i = (int)threadIdx.x; i < n; i += 32) {
        first[i] = 1.0f;
        second[i % 40] = 2.0f;
    }
    __syncwarp();
    out[threadIdx.x] = first[threadIdx.x] + second[threadIdx.x];
}
static void write_past_shared_array(bool defect) {
    Device<float> out(32);
    launch(array_kernel, 1, 32, 0, NULL, out.p, defect ? 41 : 40);
}

KERNEL void sum_kernel(float *out, const float *in, bool set) {
    SHARED_ARRAY(float, sum, 1);
    if (set && threadIdx.x == 0) sum[0] = 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 32; i++) sum[0] += in[i];
        *out = sum[0];
    }
}
static void uninitialized_shared(bool defect) {
    Device<float> in(count_up(32)), out(1);
    launch(sum_kernel, 1, 32, 0, NULL, out.p, in.p, !defect);
    CHECK(out.host()[0] == 496.0f, "%g", out.host()[0]);
}
static void uninitialized_device_memory(bool defect) {
    Device<float> in(32), out(1);
    std::vector<float> a = count_up(32);
    CUDA(cudaMemcpy(in.p, a.data(), defect ? 31 * 4 : 32 * 4, cudaMemcpyHostToDevice));
    launch(sum_kernel, 1, 32, 0, NULL, out.p, in.p, true);
    CHECK(out.host()[0] == 496.0f, "%g", out.host()[0]);
}

static void read_past_device_memory(bool defect) {
    Device<float> x(64);    // 256 bytes: the next one is on a guard page
    CUDA(cudaMemset(x.p, 0, 256));
    launch(add_one, 3, 32, 0, NULL, x.p, defect ? 65 : 64);
    CUDA(cudaDeviceSynchronize());
}
static void write_just_past_device_memory(bool defect) {
    Device<float> x(50);
    CUDA(cudaMemset(x.p, 0, 200));
    launch(add_one, 2, 32, 0, NULL, x.p, defect ? 51 : 50);
}

KERNEL void flag_kernel(int *flag, bool defect) {    // everyone writes the same value, so the result is usually right
    if (defect || threadIdx.x % 256 == 0) *flag = 1;
}
static void race_between_warps(bool defect) {
    Device<int> flag(1);
    launch(flag_kernel, 1, 64, 0, NULL, flag.p, defect);
    CHECK(flag.host()[0] == 1, "flag");
}

KERNEL void total_kernel(float *total, const float *in, bool defect) {    // whole numbers: the order does not matter
    float x = in[blockIdx.x * 32 + threadIdx.x];
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    if (threadIdx.x == 0) {
        if (defect) *total += x;
        else atomicAdd(total, x);
    }
}
static void race_between_blocks(bool defect) {
    Device<float> in(count_up(256)), total(std::vector<float>{0});
    launch(total_kernel, 8, 32, 0, NULL, total.p, in.p, defect);
    CHECK(defect || total.host()[0] == 255.0f * 128.0f, "%g", total.host()[0]);
}

static void race_in_later_launch(bool defect) {    // by threads of the race check that earlier launches have used
    Device<float> in(count_up(256)), total(std::vector<float>{0});
    for (int i = 0; i < 8; i++) launch(total_kernel, 8, 32, 0, NULL, total.p, in.p, false);
    launch(total_kernel, 8, 32, 0, NULL, total.p, in.p, defect);
    CHECK(defect || total.host()[0] == 9.0f * 255.0f * 128.0f, "%g", total.host()[0]);
}

// The last block to arrive adds the sums of the others, which need a fence before they announce them.
KERNEL void last_block_kernel(float *out, float *sums, unsigned *arrived, const float *in, bool defect) {
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = in[blockIdx.x];
        if (!defect) __threadfence();
        bool last = atomicAdd(arrived, 1u) == gridDim.x - 1;
        if (!defect) __threadfence();
        if (last) {
            *out = 0.0f;
            for (unsigned i = 0; i < gridDim.x; i++) *out += sums[i];
        }
    }
}
static void missing_fence(bool defect) {
    Device<float> in(count_up(8)), sums(8), out(1);
    Device<unsigned> arrived(std::vector<unsigned>{0});
    launch(last_block_kernel, 8, 32, 0, NULL, out.p, sums.p, arrived.p, in.p, defect);
    CHECK(out.host()[0] == 28.0f, "%g", out.host()[0]);
}

static void unordered_kernels_far_apart(bool defect) {    // many launches after the first of the two
    Fork s;
    Device<float> x(count_up(256)), y(count_up(256)), z(count_up(256));
    launch(add_one, 1, 256, 0, s.a, x.p, 256);
    for (int i = 0; i < 10; i++) launch(add_one, 1, 256, 0, s.a, y.p, 256);
    for (int i = 0; i < 10; i++) launch(add_one, 1, 256, 0, s.b, z.p, 256);
    if (!defect) CUDA(cudaStreamSynchronize(s.a));
    launch(add_one, 1, 256, 0, s.b, x.p, 256);
    CUDA(cudaDeviceSynchronize());
    CHECK(x.host()[5] == 7.0f && y.host()[5] == 15.0f && z.host()[5] == 15.0f, "%g", x.host()[5]);
}

static void unordered_library(bool defect) {    // a library's work in one stream reads what a kernel in another writes
    Fork s;
    Device<float> x(count_up(32)), sum(std::vector<float>(1));
    launch(add_one, 1, 32, 0, s.a, x.p, 32);
    if (!defect) s.fork();
    cuda_on_cpu::enqueue(s.b, [&] {
        cuda_on_cpu::reads(x.p, 32 * sizeof(float));
        cuda_on_cpu::writes(sum.p, sizeof(float));
        *sum.p = std::accumulate(x.p, x.p + 32, 0.0f);
    });
    CUDA(cudaDeviceSynchronize());
    CHECK(sum.host()[0] == 528.0f, "%g", sum.host()[0]);
}

// ---- graphs

enum CaptureDefect { ALLOWED, STREAM_WAIT, DEVICE_WAIT, ALLOCATION, EVENT, LEGACY_STREAM, PAGEABLE };

static void capture_defect(int defect) {
    Fork s;
    Device<float> x(32);
    float pageable[4] = {};
    void *p = NULL;
    begin_capture(s.a);
    if (defect == STREAM_WAIT) CUDA(cudaStreamSynchronize(s.a));
    if (defect == DEVICE_WAIT) CUDA(cudaDeviceSynchronize());
    if (defect == ALLOCATION) CUDA(cudaMalloc(&p, 4));
    if (defect == EVENT) CUDA(cudaEventRecord(s.forked, s.a));
    if (defect == PAGEABLE) CUDA(cudaMemcpyAsync(x.p, pageable, 16, cudaMemcpyHostToDevice, s.a));
    launch(add_one, 1, 32, 0, defect == LEGACY_STREAM ? NULL : s.a, x.p, 32);
    CUDA(cudaGraphExecDestroy(end_capture(s.a)));
}

// A stream's work before the launch of a graph in another, which does not wait for it.
static void missing_wait_before_graph(bool defect) {
    Fork s;
    Device<float> x(count_up(256)), y(256);
    CUDA(cudaDeviceSynchronize());
    begin_capture(s.b);
    CUDA(cudaMemcpyAsync(y.p, x.p, 1024, cudaMemcpyDeviceToDevice, s.b));
    cudaGraphExec_t exec = end_capture(s.b);
    launch(add_one, 1, 256, 0, s.a, x.p, 256);
    if (!defect) s.fork();
    CUDA(cudaGraphLaunch(exec, s.b));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaGraphExecDestroy(exec));
    std::vector<float> r = y.host();
    for (int i = 0; i < 256; i++) CHECK(r[i] == (float)i + 1, "%d: %g", i, r[i]);
}

KERNEL void matrix_kernel(uint32_t *out, int row_elements, int shift) {    // 16 rows of 64 elements
    DYNAMIC_SHARED(bf16, tile);
    int l = (int)threadIdx.x;
    for (int i = l; i < 16 * row_elements; i += 32) tile[i] = __float2bfloat16((float)i);
    __syncthreads();
    uint32_t r[4];
    ldmatrix_x4(r, tile + (l % 16) * row_elements + (l / 16) * 8 + shift);
    for (int i = 0; i < 4; i++) out[4 * l + i] = r[i];
}
static void misaligned_ldmatrix(bool defect) {
    Device<uint32_t> out(128);
    launch(matrix_kernel, 1, 32, 16 * 72 * 2, NULL, out.p, 72, defect ? 4 : 0);
}
static void ldmatrix_past_shared(bool defect) {
    Device<uint32_t> out(128);
    launch(matrix_kernel, 1, 32, 16 * 72 * 2, NULL, out.p, 72, defect ? 64 : 0);
}
static void bank_conflicts(bool defect) {    // rows of 128 bytes all begin in the same bank; of 144 in different ones
    Device<uint32_t> out(128);
    cuda_on_cpu::counts_reset();
    launch(matrix_kernel, 1, 32, 16 * 72 * 2, NULL, out.p, defect ? 64 : 72, 0);
    CUDA(cudaDeviceSynchronize());
    cuda_on_cpu::Counts c = cuda_on_cpu::counts();
    CHECK(c.ldmatrix == 1, "%llu ldmatrix", (unsigned long long)c.ldmatrix);
    CHECK(c.ldmatrix_conflicts == 0, "%llu bank conflicts of ldmatrix", (unsigned long long)c.ldmatrix_conflicts);
}

KERNEL void copy_rows(const float *in, int row_bytes) {    // lane l copies the first 16 bytes of row l
    DYNAMIC_SHARED(char, tile);
    copy_async_16(tile + (int)threadIdx.x * row_bytes, in, true);
    copy_async_commit();
    copy_async_wait<0>();
}
static void bank_conflicts_of_copies(bool defect) {
    Device<float> in(count_up(32));
    cuda_on_cpu::counts_reset();
    launch(copy_rows, 1, 32, 32 * 144, NULL, in.p, defect ? 128 : 144);
    CUDA(cudaDeviceSynchronize());
    cuda_on_cpu::Counts c = cuda_on_cpu::counts();
    CHECK(c.copies == 32 && c.copy_conflicts == 0, "%llu bank conflicts of copies",
          (unsigned long long)c.copy_conflicts);
}

KERNEL void address_kernel(float *out, const float *in, int defect) {
    DYNAMIC_SHARED(float, tile);
    copy_async_16(tile + (defect == 1 ? 1 : 0), in, true);
    copy_async_wait<0>();
    if (threadIdx.x == 0) store_16(out, load_16(in + (defect == 2 ? 2 : 0)));
    if (defect == 3) copy_async_16(tile + 1024, in, true);
}
static void address_defect(int defect) {
    Device<float> in(count_up(32)), out(32);
    launch(address_kernel, 1, 1, 4096, NULL, out.p, in.p, defect);
}
KERNEL void empty_kernel() {}
KERNEL void large_array_kernel(bool both) {
    SHARED_ARRAY(float, first, 12 * 1024);
    first[threadIdx.x] = 0;
    if (both) {
        SHARED_ARRAY(float, second, 1);
        second[0] = 0;
    }
}
static void host_pointer(bool defect) {
    Device<float> x(std::vector<float>(32, 0.0f));
    float on_host[32] = {0};
    launch(add_one, 1, 32, 0, NULL, defect ? on_host : x.p, 32);
}
static void host_touches_device_memory(bool defect) {    // past its end
    Device<float> x(count_up(64));
    CHECK((defect ? *(volatile float *)(x.p + 64) : x.host()[5]) == 5.0f, "a value");
}

static float deep(float x, int n) {
    volatile float room[1024];
    room[n % 1024] = x;
    return n ? deep(x, n - 1) + room[n % 1024] : x;
}
KERNEL void stack_kernel(float *out, int n) {
    *out = deep(1.0f, n);
}
static void stack_overflow(bool defect) {
    Device<float> out(1);
    launch(stack_kernel, 1, 1, 0, NULL, out.p, defect ? 10000 : 3);
}

KERNEL void local_kernel(float *out, int n) {
    float local[8] = {0}, *p = local;
    for (int i = 0; i < n; i++) *p++ = (float)i;
    __syncthreads();
    out[threadIdx.x] = local[threadIdx.x % 8];
}
static void write_past_local_array(bool defect) {
    Device<float> out(32);
    launch(local_kernel, 1, 32, 0, NULL, out.p, defect ? 9 : 8);
}

int main(int argc, char **argv) {
#define X(f) {#f, f},
    // clang-format off
    static const PlantedDefect ALL_CASES[] = {
        X(missing_barrier) X(missing_barrier_after_use) X(missing_syncwarp) X(missing_stream_wait) X(missing_host_wait)
        X(buffer_changed_under_copy) X(deadlock) X(write_past_dynamic_shared) X(write_just_past_dynamic_shared)
        X(write_past_shared_array) X(uninitialized_shared) X(uninitialized_device_memory) X(read_past_device_memory)
        X(write_just_past_device_memory) X(race_between_warps) X(race_between_blocks) X(missing_fence)
        X(race_in_later_launch) X(unordered_kernels_far_apart) X(unordered_library) X(missing_wait_before_graph)
        X(misaligned_ldmatrix) X(ldmatrix_past_shared) X(bank_conflicts) X(bank_conflicts_of_copies) X(host_pointer)
        X(host_touches_device_memory) X(stack_overflow) X(write_past_local_array)
        {"missing_copy_wait", [](bool defect) { copy_defect(defect ? NO_WAIT : SOUND); }},
        {"missing_barrier_after_copy", [](bool defect) { copy_defect(defect ? NO_BARRIER : SOUND); }},
        {"missing_copy_commit", [](bool defect) { copy_defect(defect ? NO_COMMIT : SOUND); }},
        {"wait_for_too_few_groups", [](bool defect) { copy_defect(defect ? ONE_GROUP_LEFT : SOUND); }},
        {"copy_into_tile_in_use", [](bool defect) { copy_defect(defect ? NO_BARRIER_BEFORE_REUSE : SOUND); }},
        {"diverged_shuffle", [](bool defect) { warp_defect(defect ? DIVERGED : NONE); }},
        {"shuffles_at_two_places", [](bool defect) { warp_defect(defect ? TWO_PLACES : NONE); }},
        {"exited_lane", [](bool defect) { warp_defect(defect ? EXITED : NONE); }},
        {"partial_mask", [](bool defect) { warp_defect(defect ? PARTIAL_MASK : NONE); }},
        {"partial_warp", [](bool defect) { warp_defect(defect ? PARTIAL_WARP : NONE); }},
        {"barrier_in_branch", [](bool defect) { barrier_defect(defect ? 1 : 0); }},
        {"barrier_after_exit", [](bool defect) { barrier_defect(defect ? 2 : 0); }},
        {"wait_for_captured_stream", [](bool defect) { capture_defect(defect ? STREAM_WAIT : ALLOWED); }},
        {"wait_for_device_in_capture", [](bool defect) { capture_defect(defect ? DEVICE_WAIT : ALLOWED); }},
        {"allocation_in_capture", [](bool defect) { capture_defect(defect ? ALLOCATION : ALLOWED); }},
        {"event_in_capture", [](bool defect) { capture_defect(defect ? EVENT : ALLOWED); }},
        {"legacy_stream_in_capture", [](bool defect) { capture_defect(defect ? LEGACY_STREAM : ALLOWED); }},
        {"pageable_memory_in_capture", [](bool defect) { capture_defect(defect ? PAGEABLE : ALLOWED); }},
        {"copy_to_misaligned", [](bool defect) { address_defect(defect ? 1 : 0); }},
        {"misaligned_load", [](bool defect) { address_defect(defect ? 2 : 0); }},
        {"copy_past_shared", [](bool defect) { address_defect(defect ? 3 : 0); }},
        {"grid_too_large", [](bool defect) { launch(empty_kernel, dim3(1, defect ? 65536 : 1), 32, 0, NULL); }},
        {"too_much_shared", [](bool defect) { launch(empty_kernel, 1, 32, 227 * 1024 + (defect ? 1 : 0), NULL); }},
        {"arrays_too_large", [](bool defect) { launch(large_array_kernel, 1, 1, 0, NULL, defect); }},
    };
    // clang-format on
#undef X
    return run_planted(argc, argv, numbers, ALL_CASES);
}

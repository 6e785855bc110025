// RMSNorm, forward and backward.
//
//   out[n,c]   = inp[n,c] · r_n · weight[c],   r_n = 1/sqrt(mean_c inp[n,c]² + eps)
//   dinp[n,c] = r_n (weight[c] dout[n,c] − inp[n,c] r_n² mean_c(dout weight inp)) (+ dinp[n,c])
//   dweight[c] = sum_n dout[n,c] inp[n,c] r_n (+ dweight[c])
//
// Shapes: inp, out and their gradients (N,C), weight and dweight (C), r (N). X = float or bf16; r, weight, dweight and
// all sums are float, and each result is rounded once. C up to RMSNORM_MAX_CHANNELS, any N.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Test: dev/tests/test_kernels.cu rmsnorm.
//
// Each warp processes a row. If all lanes have the same number of vectors, at most RMSNORM_KEPT, it loads the row at
// once and keeps it in registers; otherwise it reads the row twice, the second time from L1. For dweight, each warp
// sums its own rows in its part of shared memory. The block then sums its warps and writes one row of partial sums, and
// columns_sum() adds the blocks' rows. The number of blocks depends only on N and C, so every GPU produces the same
// bits.
//
// Memory traffic for N = 16,384, C = 768 in bf16: forward 2·N·C·2 + 4·N = 50.4 MB, 15 µs at 3.35 TB/s; backward (dout,
// inp, dinp twice) 4·N·C·2 = 100.7 MB, plus the partial sums, 528·C·4 = 1.6 MB, written and read: 31 µs.
#ifndef CUDA_RMSNORM_CUH
#define CUDA_RMSNORM_CUH

#include <type_traits>

#include "cuda/vector.cuh"

enum {
    RMSNORM_WARPS = 8,                  // warps per block; fewer if there are many channels
    RMSNORM_BLOCKS = 528,               // of the backward pass: 4 per SM of an H100 (132 SMs)
    RMSNORM_KEPT = 3,                   // vectors of a lane
    RMSNORM_SHARED = 96 * 1024,         // bytes of shared memory that every GPU from sm_80 on can give to a block
    RMSNORM_MAX_CHANNELS = 24 * 1024    // with more, a warp's sums would not fit into RMSNORM_SHARED
};

// The vectors of a row that a lane has: lane + 32 k for all k. KEPT: their number, and they are in registers; or 0 if
// they are read when they are needed
template <class X, int W, int KEPT>
struct LaneRow {
    const X *p;    // the lane's first element
    uint4 kept[KEPT > 0 ? KEPT : 1];
};

template <class X, int W, int KEPT>
DEVICE LaneRow<X, W, KEPT> lane_row_of(const X *row) {
    LaneRow<X, W, KEPT> lane = {row + (threadIdx.x % 32) * W, {}};
    UNROLL
    for (int k = 0; k < KEPT; k++) lane.kept[k] = load_16(lane.p + k * 32 * W);
    return lane;
}

template <class X, int W, int KEPT>
DEVICE void vector_of(float x[W], const LaneRow<X, W, KEPT> &lane, size_t k) {
    if constexpr (KEPT > 0) {
        Pack<X> pack;
        unpack_16(pack, lane.kept[k]);
        for (int i = 0; i < W; i++) x[i] = pack.x[i];
    } else {
        load_vector<W>(x, lane.p + k * 32 * W);
    }
}

// Calls function(k, c) for each of a lane's vectors, of which the first element is column c.
template <int W, int KEPT, class Function>
DEVICE void for_each_vector(size_t C, Function function) {
    const size_t first = (threadIdx.x % 32) * W;
    if constexpr (KEPT > 0) {
        UNROLL
        for (int k = 0; k < KEPT; k++) function((size_t)k, first + k * 32 * W);
    } else {
        UNROLL_NOT
        for (size_t c = first; c < C; c += 32 * W) function(c / (32 * W), c);
    }
}

// ---- forward
// registers: at most 54 (rmsnorm_forward_kernel)

template <class X, int W, int KEPT>
KERNEL void rmsnorm_forward_kernel(X *out, float *r, const X *inp, const float *weight, size_t N, size_t C, float eps) {
    size_t n = (size_t)blockIdx.x * RMSNORM_WARPS + threadIdx.x / 32;
    if (n >= N) return;
    const auto x = lane_row_of<X, W, KEPT>(inp + n * C);
    float sum = 0;
    for_each_vector<W, KEPT>(C, [&](size_t k, size_t) {
        float v[W];
        vector_of(v, x, k);
        for (int i = 0; i < W; i++) sum += v[i] * v[i];
    });
    float r_n = 1.0f / sqrtf(warp_sum(sum) / (float)C + eps);
    for_each_vector<W, KEPT>(C, [&](size_t k, size_t c) {
        float v[W], w[W];
        vector_of(v, x, k);
        load_vector<W>(w, weight + c);
        for (int i = 0; i < W; i++) v[i] = v[i] * r_n * w[i];
        store_vector<W>(out + n * C + c, v);
    });
    if (threadIdx.x % 32 == 0) r[n] = r_n;
}

// ---- backward
// registers: at most 64 (rmsnorm_backward_kernel)

// Computes dx of a warp's row, added to what is there if `add`, and adds its part of dweight to `sums`. The lane's
// element i of vector k is at (k·W + i)·32 + lane, so that neighboring lanes have neighboring addresses.
template <class X, int W, int KEPT>
DEVICE void rmsnorm_row(X *dx, bool add, float *sums, const X *dout, const X *inp, const float *weight, float r_n,
                        size_t C) {
    const auto dy = lane_row_of<X, W, KEPT>(dout), x = lane_row_of<X, W, KEPT>(inp);
    const size_t lane = threadIdx.x % 32;
    float sum = 0;    // over c of dout weight inp
    for_each_vector<W, KEPT>(C, [&](size_t k, size_t c) {
        float d[W], v[W], w[W];
        vector_of(d, dy, k);
        vector_of(v, x, k);
        load_vector<W>(w, weight + c);
        for (int i = 0; i < W; i++) sum += d[i] * w[i] * v[i];
    });
    const float by = r_n * r_n * (warp_sum(sum) / (float)C);
    for_each_vector<W, KEPT>(C, [&](size_t k, size_t c) {
        float *part = sums + (c - lane * W) + lane;
        float d[W], v[W], w[W], y[W] = {};
        vector_of(d, dy, k);
        vector_of(v, x, k);
        load_vector<W>(w, weight + c);
        if (add) load_vector<W, READ_LAST>(y, dx + c);
        for (int i = 0; i < W; i++) {
            y[i] += r_n * (w[i] * d[i] - v[i] * by);
            part[32 * i] += d[i] * v[i] * r_n;
        }
        store_vector<W>(dx + c, y);
    });
}

template <class X, int W, int KEPT>
KERNEL void __launch_bounds__(32 * RMSNORM_WARPS, KEPT > 0 ? 4 : 1)
    rmsnorm_backward_kernel(Gradient<X> dinp, float *partials, const X *dout, const X *inp, const float *weight,
                            const float *r, size_t N, size_t C) {
    DYNAMIC_SHARED(float, sums);    // (warps, room)
    size_t pieces = (C + 32 * W - 1) / (32 * W), room = pieces * 32 * W, warps = blockDim.x / 32,
           warp = threadIdx.x / 32;
    for (size_t i = threadIdx.x; i < warps * room; i += blockDim.x) sums[i] = 0;
    __syncthreads();
    for (size_t n = blockIdx.x * warps + warp; n < N; n += gridDim.x * warps)
        rmsnorm_row<X, W, KEPT>(dinp.p + n * C, dinp.add, sums + warp * room, dout + n * C, inp + n * C, weight, r[n],
                                C);
    __syncthreads();
    for (size_t c = threadIdx.x; c < C; c += blockDim.x) {
        size_t vector = c / W, at = ((vector / 32) * W + c % W) * 32 + vector % 32;
        float sum = 0;
        for (size_t w = 0; w < warps; w++) sum += sums[w * room + at];
        partials[blockIdx.x * C + c] = sum;
    }
}

// ---- launchers

// Returns function(W, KEPT), both as compile-time constants, for rows of C channels.
template <class X, class Function>
auto rmsnorm_choose(size_t C, Function function) {
    constexpr size_t W = Pack<X>::size;
    constexpr std::integral_constant<int, (int)W> wide;
    static_assert(RMSNORM_KEPT == 3, "a case for each");
    if (!fits<X>(C)) return function(std::integral_constant<int, 1>(), std::integral_constant<int, 0>());
    switch (C % (32 * W) == 0 ? C / (32 * W) : 0) {
    case 1: return function(wide, std::integral_constant<int, 1>());
    case 2: return function(wide, std::integral_constant<int, 2>());
    case 3: return function(wide, std::integral_constant<int, 3>());
    default: return function(wide, std::integral_constant<int, 0>());
    }
}

//   out (N,C) written   r (N) written   inp (N,C)   weight (C)
template <class X>
void rmsnorm_forward(X *out, float *r, const X *inp, const float *weight, size_t N, size_t C, float eps,
                     cudaStream_t stream) {
    auto kernel =
        rmsnorm_choose<X>(C, [](auto W, auto KEPT) { return rmsnorm_forward_kernel<X, W.value, KEPT.value>; });
    launch(kernel, row_grid(N, dim3(32, RMSNORM_WARPS)), dim3(32 * RMSNORM_WARPS), 0, stream, out, r, inp, weight, N, C,
           eps);
}

// The bytes of one warp's sums in the backward pass, and the number of warps per block.
template <class X>
size_t rmsnorm_room(size_t C) {
    size_t round = 32 * (fits<X>(C) ? Pack<X>::size : 1);
    return ((C + round - 1) / round) * round * sizeof(float);
}

template <class X>
size_t rmsnorm_warps(size_t C) {
    size_t warps = smaller(RMSNORM_SHARED / rmsnorm_room<X>(C), RMSNORM_WARPS);
    if (warps == 0)
        fail(EXIT_USAGE, "%zu channels: RMSNorm on a GPU supports at most %d.", C, (int)RMSNORM_MAX_CHANNELS);
    return warps;
}

// The number of floats of scratch that the backward pass needs, for float or bf16.
static inline size_t rmsnorm_partials(size_t N, size_t C) {
    return smaller(N, RMSNORM_BLOCKS) * C;
}

// What the forward pass read and left: inp (N,C), weight (C), r (N).
template <class X>
struct RmsNormed {
    const X *inp;
    const float *weight, *r;
    size_t N, C;
};

//   dinp (N,C), dweight (C): each written or added to   partials scratch   dout (N,C)
template <class X>
void rmsnorm_backward(Gradient<X> dinp, Gradient<float> dweight, float *partials, const X *dout, RmsNormed<X> x,
                      cudaStream_t stream) {
    size_t C = x.C, warps = rmsnorm_warps<X>(C), blocks = smaller((x.N + warps - 1) / warps, RMSNORM_BLOCKS);
    auto kernel =
        rmsnorm_choose<X>(C, [](auto W, auto KEPT) { return rmsnorm_backward_kernel<X, W.value, KEPT.value>; });
    launch(kernel, dim3((unsigned)blocks), dim3((unsigned)(32 * warps)), warps * rmsnorm_room<X>(C), stream, dinp,
           partials, dout, x.inp, x.weight, x.r, x.N, C);
    columns_sum(dweight, partials, blocks, C, C, stream);
}
#endif

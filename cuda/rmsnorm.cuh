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
// Each warp processes a row. It reads the row twice, the second time from L1: a row of the 124M model is 1.5 KB. For
// dweight, each warp sums its own rows in its part of shared memory. The block then sums its warps and writes one row
// of partial sums, and columns_sum() adds the blocks' rows. The number of blocks depends only on N and C, so every GPU
// produces the same bits.
//
// Memory traffic for N = 16,384, C = 768 in bf16: forward 2·N·C·2 + 4·N = 50.4 MB, 15 µs at 3.35 TB/s; backward (dout,
// inp, dinp twice) 4·N·C·2 = 100.7 MB, plus the partial sums, 528·C·4 = 1.6 MB, written and read: 31 µs.
#ifndef CUDA_RMSNORM_CUH
#define CUDA_RMSNORM_CUH

#include "cuda/vector.cuh"

enum {
    RMSNORM_WARPS = 8,                  // warps per block; fewer if there are many channels
    RMSNORM_BLOCKS = 528,               // of the backward pass: 4 per SM of an H100 (132 SMs)
    RMSNORM_SHARED = 96 * 1024,         // bytes of shared memory that every GPU from sm_80 on can give to a block
    RMSNORM_MAX_CHANNELS = 24 * 1024    // with more, a warp's sums would not fit into RMSNORM_SHARED
};

// ---- forward
// registers: at most 40 (rmsnorm_forward_kernel)

template <class X, int W>
KERNEL void rmsnorm_forward_kernel(X *out, float *r, const X *inp, const float *weight, size_t N, size_t C, float eps) {
    size_t n = (size_t)blockIdx.x * RMSNORM_WARPS + threadIdx.x / 32, first = (threadIdx.x % 32) * W;
    if (n >= N) return;
    const X *x = inp + n * C;
    float sum = 0;
    for (size_t c = first; c < C; c += 32 * W) {
        float v[W];
        load_vector<W>(v, x + c);
        for (int i = 0; i < W; i++) sum += v[i] * v[i];
    }
    float r_n = 1.0f / sqrtf(warp_sum(sum) / (float)C + eps);
    for (size_t c = first; c < C; c += 32 * W) {
        float v[W], w[W];
        load_vector<W>(v, x + c);
        load_vector<W>(w, weight + c);
        for (int i = 0; i < W; i++) v[i] = v[i] * r_n * w[i];
        store_vector<W>(out + n * C + c, v);
    }
    if (first == 0) r[n] = r_n;
}

// ---- backward
// registers: at most 48 (rmsnorm_backward_kernel)

// mean_c(dout weight inp) of a warp's row
template <class X, int W>
DEVICE float rmsnorm_mean(const X *dy, const X *x, const float *weight, size_t first, size_t C) {
    float sum = 0;
    for (size_t c = first; c < C; c += 32 * W) {
        float d[W], v[W], w[W];
        load_vector<W>(d, dy + c);
        load_vector<W>(v, x + c);
        load_vector<W>(w, weight + c);
        for (int i = 0; i < W; i++) sum += d[i] * w[i] * v[i];
    }
    return warp_sum(sum) / (float)C;
}

// Computes dx of a warp's row, added to what is there if `add`, and adds its part of dweight to `sums`. The lane's
// element i of round k is at (k·W + i)·32 + lane, so that neighboring lanes have neighboring addresses.
template <class X, int W>
DEVICE void rmsnorm_row(X *dx, bool add, float *sums, const X *dy, const X *x, const float *weight, float r_n,
                        float mean, size_t C) {
    float k = r_n * r_n * mean;
    size_t lane = threadIdx.x % 32;
    for (size_t c = lane * W; c < C; c += 32 * W) {
        float *sum = sums + (c - lane * W) + lane;
        float d[W], v[W], w[W], y[W] = {};
        load_vector<W>(d, dy + c);
        load_vector<W>(v, x + c);
        load_vector<W>(w, weight + c);
        if (add) load_vector_in_place<W>(y, dx + c);
        for (int i = 0; i < W; i++) {
            y[i] += r_n * (w[i] * d[i] - v[i] * k);
            sum[32 * i] += d[i] * v[i] * r_n;
        }
        store_vector<W>(dx + c, y);
    }
}

template <class X, int W>
KERNEL void rmsnorm_backward_kernel(Gradient<X> dinp, float *partials, const X *dout, const X *inp, const float *weight,
                                    const float *r, size_t N, size_t C) {
    DYNAMIC_SHARED(float, sums);    // (warps, room)
    size_t pieces = (C + 32 * W - 1) / (32 * W), room = pieces * 32 * W, warps = blockDim.x / 32,
           warp = threadIdx.x / 32;
    for (size_t i = threadIdx.x; i < warps * room; i += blockDim.x) sums[i] = 0;
    __syncthreads();
    for (size_t n = blockIdx.x * warps + warp; n < N; n += gridDim.x * warps) {
        float mean = rmsnorm_mean<X, W>(dout + n * C, inp + n * C, weight, (threadIdx.x % 32) * W, C);
        rmsnorm_row<X, W>(dinp.p + n * C, dinp.add, sums + warp * room, dout + n * C, inp + n * C, weight, r[n], mean,
                          C);
    }
    __syncthreads();
    for (size_t c = threadIdx.x; c < C; c += blockDim.x) {
        size_t vector = c / W, at = ((vector / 32) * W + c % W) * 32 + vector % 32;
        float sum = 0;
        for (size_t w = 0; w < warps; w++) sum += sums[w * room + at];
        partials[blockIdx.x * C + c] = sum;
    }
}

// ---- launchers

//   out (N,C) written   r (N) written   inp (N,C)   weight (C)
template <class X>
void rmsnorm_forward(X *out, float *r, const X *inp, const float *weight, size_t N, size_t C, float eps,
                     cudaStream_t stream) {
    auto kernel = fits<X>(C) ? rmsnorm_forward_kernel<X, Pack<X>::size> : rmsnorm_forward_kernel<X, 1>;
    launch(kernel, row_grid(N, dim3(32, RMSNORM_WARPS)), dim3(32 * RMSNORM_WARPS), 0, stream, out, r, inp, weight, N, C,
           eps);
}

// The bytes of one warp's sums in the backward pass, and the number of warps per block.
template <class X>
size_t rmsnorm_room(size_t C) {
    size_t round = 32 * (fits<X>(C) ? Pack<X>::size : 1);
    return (C + round - 1) / round * round * sizeof(float);
}

template <class X>
size_t rmsnorm_warps(size_t C) {
    size_t warps = smaller(RMSNORM_SHARED / rmsnorm_room<X>(C), RMSNORM_WARPS);
    if (warps == 0) fail(EXIT_USAGE, "%zu channels: RMSNorm on a GPU has at most %d.", C, (int)RMSNORM_MAX_CHANNELS);
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
    auto kernel = fits<X>(C) ? rmsnorm_backward_kernel<X, Pack<X>::size> : rmsnorm_backward_kernel<X, 1>;
    launch(kernel, dim3((unsigned)blocks), dim3((unsigned)(32 * warps)), warps * rmsnorm_room<X>(C), stream, dinp,
           partials, dout, x.inp, x.weight, x.r, x.N, C);
    columns_sum(dweight, partials, blocks, C, C, stream);
}
#endif

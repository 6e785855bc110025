// Biases of a matmul's output, in place.
//
//   forward    out[n,o]  = out[n,o] + bias[o]
//   backward   dbias[o]  = sum_n dout[n,o] (+ dbias[o])
//
// Shapes: out, dout (N,OC); bias, dbias (OC) in float. X = float or bf16; sums are float, and a result is rounded once.
// Any N and OC. Source: Qwen2's q, k and v. Test: dev/tests/test_kernels.cu bias.
//
// In the backward pass, each warp of a block reads its own rows of the block's columns, 16 bytes per lane. The block
// sums over its warps in shared memory and writes one row of partial sums for columns_sum(). The number of blocks
// depends only on the shape, so every GPU gives the same bits.
//
// Memory traffic at N = 16,384, OC = 2,304 in bf16: forward 2·N·OC·2 = 151 MB, 45 µs at 3.35 TB/s; backward half of
// that.
#ifndef CUDA_BIAS_CUH
#define CUDA_BIAS_CUH

#include "cuda/vector.cuh"

enum {
    BIAS_WARPS = 8,
    BIAS_ROWS = 64    // the most blocks along the rows in the backward pass
};

// registers: at most 32 (bias_forward_kernel)
template <class X, int W>
KERNEL void bias_forward_kernel(X *out, const float *bias, size_t N, size_t OC) {
    size_t n = row_of_thread();
    if (n >= N) return;
    for (size_t o = threadIdx.x * W; o < OC; o += blockDim.x * W) {
        float x[W], b[W];
        load_vector<W, READ_LAST>(x, out + n * OC + o);
        load_vector<W, READ_AGAIN>(b, bias + o);
        for (int i = 0; i < W; i++) x[i] += b[i];
        store_vector<W>(out + n * OC + o, x);
    }
}

// registers: at most 32 (bias_backward_kernel)
// partials (gridDim.y,OC) written
template <class X, int W>
KERNEL void bias_backward_kernel(float *partials, const X *dout, size_t N, size_t OC) {
    SHARED_ARRAY(float, sums, BIAS_WARPS * 32 * W);
    size_t o = ((size_t)blockIdx.x * 32 + threadIdx.x) * W, rows = (size_t)gridDim.y * BIAS_WARPS;
    float sum[W] = {0};
    for (size_t n = (size_t)blockIdx.y * BIAS_WARPS + threadIdx.y; n < N && o < OC; n += rows) {
        float d[W];
        load_vector<W>(d, dout + n * OC + o);
        for (int i = 0; i < W; i++) sum[i] += d[i];
    }
    for (int i = 0; i < W; i++) sums[(threadIdx.y * 32 + threadIdx.x) * W + i] = sum[i];
    __syncthreads();
    if (threadIdx.y > 0 || o >= OC) return;
    for (int warp = 1; warp < BIAS_WARPS; warp++)
        for (int i = 0; i < W; i++) sum[i] += sums[(warp * 32 + threadIdx.x) * W + i];
    store_vector<W>(partials + blockIdx.y * OC + o, sum);
}

// ---- launchers

static inline size_t bias_blocks(size_t N) {
    return smaller((N + BIAS_WARPS - 1) / BIAS_WARPS, BIAS_ROWS);
}

// The number of scratch floats for the backward pass.
static inline size_t bias_partials(size_t N, size_t OC) {
    return bias_blocks(N) * OC;
}

//   out (N,OC) added to   bias (OC)
template <class X>
void bias_forward(X *out, const float *bias, size_t N, size_t OC, cudaStream_t stream) {
    bool vectors = fits<X>(OC);
    dim3 block = row_block(vectors ? OC / Pack<X>::size : OC);
    launch(vectors ? bias_forward_kernel<X, Pack<X>::size> : bias_forward_kernel<X, 1>, row_grid(N, block), block, 0,
           stream, out, bias, N, OC);
}

//   dbias (OC) written or added to   partials scratch   dout (N,OC)
template <class X>
void bias_backward(Gradient<float> dbias, float *partials, const X *dout, size_t N, size_t OC, cudaStream_t stream) {
    bool vectors = fits<X>(OC);
    size_t columns = 32 * (vectors ? Pack<X>::size : 1), blocks = bias_blocks(N);
    dim3 grid((unsigned)((OC + columns - 1) / columns), (unsigned)blocks);
    launch(vectors ? bias_backward_kernel<X, Pack<X>::size> : bias_backward_kernel<X, 1>, grid, dim3(32, BIAS_WARPS), 0,
           stream, partials, dout, N, OC);
    columns_sum(dbias, partials, blocks, OC, OC, stream);
}
#endif

// Gates: SwiGLU in the feed-forward layer, and the output gate of gated attention units (gau.cuh), which uses the same
// kernels on other arrays.
//
//   forward    out = silu(gate) · up,  silu(x) = x sigmoid(x)
//   backward   dgate = dout · up · sigmoid(gate) (1 + gate (1 − sigmoid(gate))),   dup = dout · silu(gate)
//
// Shapes: out, dout (N,F); gate, up, dgate and dup are F columns of arrays of N rows, which may be wider. X = float or
// bf16, computed in float, rounded once; any F.
// Source: Shazeer, "GLU Variants Improve Transformer" (2020). Test: dev/tests/test_kernels.cu swiglu.
//
// Each thread processes 16 bytes of each array at a time. The sigmoid takes one ex2 and one rcp, so 2 special functions
// per element. An SM computes 16 per clock, while memory delivers only 2 to 3 elements per clock and SM, so they do not
// limit the speed.
//
// Memory traffic for N = 16,384, F = 2,048 in bf16: forward 3·N·F·2 = 201 MB, 60 µs at 3.35 TB/s; backward 5·N·F·2 =
// 336 MB, 100 µs.
#ifndef CUDA_SWIGLU_CUH
#define CUDA_SWIGLU_CUH

#include "cuda/vector.cuh"

// The first of F columns of gate and up, in rows that are gate_row and up_row apart.
template <class X>
struct Gate {
    const X *gate, *up;
    size_t gate_row, up_row;
};

// registers: at most 32 (gate_forward_kernel, gate_backward_kernel)
template <class X, int W>
KERNEL void gate_forward_kernel(X *out, Gate<X> x, size_t N, size_t F) {
    size_t n = row_of_thread();
    if (n >= N) return;
    for (size_t f = threadIdx.x * W; f < F; f += blockDim.x * W) {
        float g[W], u[W];
        load_vector<W>(g, x.gate + n * x.gate_row + f);
        load_vector<W>(u, x.up + n * x.up_row + f);
        for (int i = 0; i < W; i++) u[i] *= silu(g[i]);
        store_vector<W>(out + n * F + f, u);
    }
}

template <class X, int W>
KERNEL void gate_backward_kernel(X *dgate, X *dup, const X *dout, Gate<X> x, size_t N, size_t F) {
    size_t n = row_of_thread();
    if (n >= N) return;
    for (size_t f = threadIdx.x * W; f < F; f += blockDim.x * W) {
        float d[W], g[W], u[W];
        load_vector<W>(d, dout + n * F + f);
        load_vector<W>(g, x.gate + n * x.gate_row + f);
        load_vector<W>(u, x.up + n * x.up_row + f);
        for (int i = 0; i < W; i++) {
            float value, slope;
            silu_both(g[i], &value, &slope);
            g[i] = d[i] * u[i] * slope;
            u[i] = d[i] * value;
        }
        store_vector<W>(dgate + n * x.gate_row + f, g);
        store_vector<W>(dup + n * x.up_row + f, u);
    }
}

// ---- launchers

//   out (N,F) written
template <class X>
void gate_forward(X *out, Gate<X> x, size_t N, size_t F, cudaStream_t stream) {
    bool vectors = fits<X>(F) && fits<X>(x.gate_row) && fits<X>(x.up_row);
    dim3 block = row_block(vectors ? F / Pack<X>::size : F);
    launch(vectors ? gate_forward_kernel<X, Pack<X>::size> : gate_forward_kernel<X, 1>, row_grid(N, block), block, 0,
           stream, out, x, N, F);
}

//   dgate, dup written, laid out like x.gate and x.up   dout (N,F)
template <class X>
void gate_backward(X *dgate, X *dup, const X *dout, Gate<X> x, size_t N, size_t F, cudaStream_t stream) {
    bool vectors = fits<X>(F) && fits<X>(x.gate_row) && fits<X>(x.up_row);
    dim3 block = row_block(vectors ? F / Pack<X>::size : F);
    launch(vectors ? gate_backward_kernel<X, Pack<X>::size> : gate_backward_kernel<X, 1>, row_grid(N, block), block, 0,
           stream, dgate, dup, dout, x, N, F);
}

//   out (N,F) written   gate_up (N,2F): gate, then up
template <class X>
void swiglu_forward(X *out, const X *gate_up, size_t N, size_t F, cudaStream_t stream) {
    gate_forward(out, {gate_up, gate_up + F, 2 * F, 2 * F}, N, F, stream);
}

//   dgate_up (N,2F) written   dout (N,F)   gate_up (N,2F)
template <class X>
void swiglu_backward(X *dgate_up, const X *dout, const X *gate_up, size_t N, size_t F, cudaStream_t stream) {
    gate_backward(dgate_up, dgate_up + F, dout, {gate_up, gate_up + F, 2 * F, 2 * F}, N, F, stream);
}
#endif

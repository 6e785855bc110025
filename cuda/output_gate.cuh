// Gated attention: attention's output times the sigmoids of gates that are computed from the layer's normalized input,
// one gate for each of its channels or for each head.
//
//   forward    out[n,e] = att[n,e] · s,   s = sigmoid(gate[n,e/D]),   D = E/G: 1, or a head's size
//   backward   datt = dout · s,   dgate[n,g] = s (1 − s) · sum of dout att over the D channels of the gate
//
// Shapes: att, out, dout and datt (N,E), gate and dgate (N,G). X = float or bf16; computed in float, rounded once. Any
// N, any G that divides E.
// Source: Qiu et al., "Gated Attention for Large Language Models" (arXiv 2505.06708). Test: dev/tests/test_kernels.cu
// output_gate.
//
// In the backward pass, `group` lanes process the channels of a gate, as in rope.cuh, and read them twice, the second
// time from the caches. With a gate for each channel, each lane processes 16 bytes of every array instead.
//
// Memory traffic for N = 16,384, E = 768 in bf16, a gate for each channel: forward 3·N·E·2 = 75 MB, 23 µs at 3.35 TB/s;
// backward 5·N·E·2 = 126 MB, 38 µs. For each head: 2·N·E·2 = 50 MB, 15 µs, and 3·N·E·2 = 75 MB, 23 µs.
#ifndef CUDA_OUTPUT_GATE_CUH
#define CUDA_OUTPUT_GATE_CUH

#include "cuda/rope.cuh"

struct OutputGate {
    size_t N, E, G;
};

enum { OUTPUT_GATE_THREADS = 256 };

// ---- forward
// registers: at most 32 (output_gate_forward_kernel)

template <class X, int W>
KERNEL void output_gate_forward_kernel(X *out, const X *att, const X *gate, OutputGate o) {
    size_t n = row_of_thread(), D = o.E / o.G;
    if (n >= o.N) return;
    for (size_t e = threadIdx.x * W; e < o.E; e += blockDim.x * W) {
        float x[W], g[W];
        load_vector<W>(x, att + n * o.E + e);
        if (D == 1) load_vector<W>(g, gate + n * o.G + e);
        else
            for (int i = 0; i < W; i++) g[i] = to_float(gate[n * o.G + e / D]);
        for (int i = 0; i < W; i++) x[i] *= sigmoid(g[i]);
        store_vector<W>(out + n * o.E + e, x);
    }
}

// ---- backward
// registers: at most 32 (output_gate_channels_backward_kernel, output_gate_heads_backward_kernel)

template <class X, int W>
KERNEL void output_gate_channels_backward_kernel(X *d, X *dgate, const X *att, const X *gate, OutputGate o) {
    size_t n = row_of_thread();
    if (n >= o.N) return;
    for (size_t e = threadIdx.x * W; e < o.E; e += blockDim.x * W) {
        float x[W], a[W], g[W];
        load_vector<W, READ_LAST>(x, d + n * o.E + e);
        load_vector<W>(a, att + n * o.E + e);
        load_vector<W>(g, gate + n * o.E + e);
        for (int i = 0; i < W; i++) {
            float s = sigmoid(g[i]);
            g[i] = x[i] * a[i] * s * (1.0f - s);
            x[i] *= s;
        }
        store_vector<W>(dgate + n * o.E + e, g);
        store_vector<W>(d + n * o.E + e, x);
    }
}

template <class X, int W>
KERNEL void output_gate_heads_backward_kernel(X *d, X *dgate, const X *att, const X *gate, OutputGate o, int group) {
    size_t D = o.E / o.G, first = (threadIdx.x % group) * W, step = (size_t)group * W;
    size_t head = (size_t)blockIdx.x * (blockDim.x / group) + threadIdx.x / group;
    bool there = head < o.N * o.G;
    X *dx = d + (there ? head : 0) * D;
    const X *x = att + (there ? head : 0) * D;
    float dot = 0;
    for (size_t c = first; there && c < D; c += step) {
        float g[W], a[W];
        load_vector<W, READ_AGAIN>(g, dx + c);
        load_vector<W>(a, x + c);
        for (int i = 0; i < W; i++) dot += g[i] * a[i];
    }
    dot = group_sum(dot, group);    // all: it needs whole warps
    if (!there) return;
    float s = sigmoid(to_float(gate[head]));
    if (first == 0) set_float(dgate[head], dot * s * (1.0f - s));
    for (size_t c = first; c < D; c += step) {
        float g[W];
        load_vector<W, READ_LAST>(g, dx + c);
        for (int i = 0; i < W; i++) g[i] *= s;
        store_vector<W>(dx + c, g);
    }
}

// ---- launchers

// Can the channels of a gate be read in vectors?
template <class X>
bool output_gate_fits(OutputGate o) {
    return fits<X>(o.E) && (o.G == o.E || fits<X>(o.E / o.G));
}

//   out (N,E) written   att (N,E)   gate (N,G)
template <class X>
void output_gate_forward(X *out, const X *att, const X *gate, OutputGate o, cudaStream_t stream) {
    bool vectors = output_gate_fits<X>(o);
    dim3 block = row_block(vectors ? o.E / Pack<X>::size : o.E);
    launch(vectors ? output_gate_forward_kernel<X, Pack<X>::size> : output_gate_forward_kernel<X, 1>,
           row_grid(o.N, block), block, 0, stream, out, att, gate, o);
}

//   d (N,E): dout on entry, datt on return   dgate (N,G) written   att (N,E)   gate (N,G)
template <class X>
void output_gate_backward(X *d, X *dgate, const X *att, const X *gate, OutputGate o, cudaStream_t stream) {
    enum { W = Pack<X>::size };
    bool vectors = output_gate_fits<X>(o);
    if (o.G == o.E) {
        dim3 block = row_block(vectors ? o.E / W : o.E);
        launch(vectors ? output_gate_channels_backward_kernel<X, W> : output_gate_channels_backward_kernel<X, 1>,
               row_grid(o.N, block), block, 0, stream, d, dgate, att, gate, o);
        return;
    }
    size_t group = lanes_for(o.E / o.G, vectors ? (size_t)W : 1), groups = OUTPUT_GATE_THREADS / group;
    launch(vectors ? output_gate_heads_backward_kernel<X, W> : output_gate_heads_backward_kernel<X, 1>,
           row_grid(o.N * o.G, dim3(1, (unsigned)groups)), dim3(OUTPUT_GATE_THREADS), 0, stream, d, dgate, att, gate, o,
           (int)group);
}
#endif

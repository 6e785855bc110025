// Rotary positions in place on q and k inside their projection, and, under qk=l2, their Euclidean norms divided out.
//
//   forward    y[i] = a cos − b sin,  y[i + HS/2] = b cos + a sin     of each pair a = x[i], b = x[i + HS/2]
//              (half-split), the angle
//              t · theta^(−2i/HS); with l2 u = y/|y|, and 1/|y| kept; 0 for a row of zeros, whose u is 0
//   backward   with l2 dy = (du − u (u · du))/|y|, else dy = du;   da = dy[i] cos + dy[i + HS/2] sin,  db = dy[i +
//              HS/2] cos − dy[i] sin
//
// Shapes: qkv and dqkv (B,T,3,NH,HS), of which q's and k's thirds change; cosines, sines (T,HS/2); inverse_norms
// (B,T,2,NH), q's and then k's. HS even. X = float or bf16; all else is float, and an element is rounded once each way.
// Sources: Su et al., "RoFormer" (2021); Hugging Face's Llama for the order of the pairs. Test:
// dev/tests/test_kernels.cu rope.
//
// A block has one row of qkv. A head's pairs are shared by `group` lanes, a power of two of at most 32, so that a
// head's sum is a few shuffles and needs no barrier; at HS = 64 in bf16 a group is 4 lanes with 16 bytes of each half.
// The heads of a row share its cosines and sines through L1.
//
// Bytes at N = 16,384, 12 heads of 64 in bf16: q and k read and written, 2·2·N·768·2 = 100.7 MB, 30 µs at 3.35 TB/s,
// each way; with l2 the backward pass reads qkv's q and k too, 151 MB, 45 µs.
#ifndef CUDA_ROPE_CUH
#define CUDA_ROPE_CUH

#include <float.h>

#include "cuda/vector.cuh"

// Over `group` neighboring lanes, a power of two; each of them gets the sum.
DEVICE float group_sum(float x, int group) {
    for (int step = group / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

// 1/sqrt(sum of squares), or 0 where that is no normal number
DEVICE float inverse_norm(float squares) {
    return squares < FLT_MIN ? 0.0f : 1.0f / sqrtf(squares);
}

// ---- forward
// registers: at most 48 (rope_forward_kernel)

// The pairs of a head that are this lane's: i, i + step, ...
template <class X, int W>
DEVICE float rope_squares(const X *x, size_t first, size_t step, size_t half) {
    float sum = 0;
    for (size_t i = first; i < half; i += step) {
        float a[W], b[W];
        load_vector_in_place<W>(a, x + i);
        load_vector_in_place<W>(b, x + half + i);
        for (int j = 0; j < W; j++) sum += a[j] * a[j] + b[j] * b[j];
    }
    return sum;
}

template <class X, int W>
DEVICE void rope_rotate(X *x, float factor, const float *cosines, const float *sines, size_t first, size_t step,
                        size_t half) {
    for (size_t i = first; i < half; i += step) {
        float a[W], b[W], c[W], s[W];
        load_vector_in_place<W>(a, x + i);
        load_vector_in_place<W>(b, x + half + i);
        load_vector<W>(c, cosines + i);
        load_vector<W>(s, sines + i);
        for (int j = 0; j < W; j++) {
            float y = a[j] * c[j] - b[j] * s[j], z = b[j] * c[j] + a[j] * s[j];
            a[j] = y * factor, b[j] = z * factor;
        }
        store_vector<W>(x + i, a);
        store_vector<W>(x + half + i, b);
    }
}

template <class X, int W, bool L2>
KERNEL void rope_forward_kernel(X *qkv, float *inverse_norms, const float *cosines, const float *sines, size_t T,
                                size_t NH, size_t HS, int group) {
    size_t n = blockIdx.x, t = n % T, half = HS / 2, heads = blockDim.x / group, first = threadIdx.x % group * W,
           step = (size_t)group * W;
    // All threads go round together: group_sum() wants whole warps.
    for (size_t from = 0; from < 2 * NH; from += heads) {
        size_t head = from + threadIdx.x / group;
        bool there = head < 2 * NH;
        X *x = qkv + n * 3 * NH * HS + (there ? head : 0) * HS;
        float factor = 1;
        if (L2) {
            factor = inverse_norm(group_sum(there ? rope_squares<X, W>(x, first, step, half) : 0.0f, group));
            if (there && first == 0) inverse_norms[n * 2 * NH + head] = factor;
        }
        if (there) rope_rotate<X, W>(x, factor, cosines + t * half, sines + t * half, first, step, half);
    }
}

// ---- backward
// registers: at most 56 (rope_backward_kernel)

// The lane's part of u · du
template <class X, int W>
DEVICE float rope_dot(const X *u, const X *du, size_t first, size_t step, size_t half) {
    float sum = 0;
    for (size_t i = first; i < half; i += step) {
        float a[W], b[W], da[W], db[W];
        load_vector<W>(a, u + i);
        load_vector<W>(b, u + half + i);
        load_vector_in_place<W>(da, du + i);
        load_vector_in_place<W>(db, du + half + i);
        for (int j = 0; j < W; j++) sum += a[j] * da[j] + b[j] * db[j];
    }
    return sum;
}

template <class X, int W, bool L2>
DEVICE void rope_rotate_back(X *du, const X *u, float dot, float inverse, const float *cosines, const float *sines,
                             size_t first, size_t step, size_t half) {
    for (size_t i = first; i < half; i += step) {
        float a[W], b[W], c[W], s[W];
        load_vector_in_place<W>(a, du + i);
        load_vector_in_place<W>(b, du + half + i);
        if (L2) {
            float y[W], z[W];
            load_vector<W>(y, u + i);
            load_vector<W>(z, u + half + i);
            for (int j = 0; j < W; j++) a[j] = (a[j] - y[j] * dot) * inverse, b[j] = (b[j] - z[j] * dot) * inverse;
        }
        load_vector<W>(c, cosines + i);
        load_vector<W>(s, sines + i);
        for (int j = 0; j < W; j++) {
            float y = a[j] * c[j] + b[j] * s[j], z = b[j] * c[j] - a[j] * s[j];
            a[j] = y, b[j] = z;
        }
        store_vector<W>(du + i, a);
        store_vector<W>(du + half + i, b);
    }
}

template <class X, int W, bool L2>
KERNEL void rope_backward_kernel(X *dqkv, const X *qkv, const float *inverse_norms, const float *cosines,
                                 const float *sines, size_t T, size_t NH, size_t HS, int group) {
    size_t n = blockIdx.x, t = n % T, half = HS / 2, heads = blockDim.x / group, first = threadIdx.x % group * W,
           step = (size_t)group * W;
    for (size_t from = 0; from < 2 * NH; from += heads) {
        size_t head = from + threadIdx.x / group;
        bool there = head < 2 * NH;
        size_t at = n * 3 * NH * HS + (there ? head : 0) * HS;
        float dot = 0, inverse = 1;
        if (L2) {
            dot = group_sum(there ? rope_dot<X, W>(qkv + at, dqkv + at, first, step, half) : 0.0f, group);
            inverse = there ? inverse_norms[n * 2 * NH + head] : 0.0f;
        }
        if (there)
            rope_rotate_back<X, W, L2>(dqkv + at, qkv + at, dot, inverse, cosines + t * half, sines + t * half, first,
                                       step, half);
    }
}

// ---- launchers

typedef struct {
    dim3 grid, block;
    int group;    // lanes of a head
} RopeGrid;

static inline RopeGrid rope_grid(size_t N, size_t NH, size_t HS, size_t width) {
    size_t group = 1, threads;
    if (HS % 2) fail(EXIT_USAGE, "a head size of %zu: RoPE needs an even one.", HS);
    while (group < HS / 2 / width && group < 32) group *= 2;
    threads = (2 * NH * group + 31) / 32 * 32;
    return (RopeGrid){row_grid(N, dim3(1, 1)), dim3((unsigned)smaller(threads, 512)), (int)group};
}

//   qkv (B,T,3,NH,HS) in place   inverse_norms (B,T,2,NH) written if l2, else not used   cosines, sines (T,HS/2)
template <class X>
void rope_forward(X *qkv, float *inverse_norms, const float *cosines, const float *sines, bool l2, size_t B, size_t T,
                  size_t NH, size_t HS, cudaStream_t stream) {
    enum { W = Pack<X>::size };
    bool vectors = fits<X>(HS / 2);
    RopeGrid g = rope_grid(B * T, NH, HS, vectors ? (size_t)W : 1);
    auto kernel = vectors ? (l2 ? rope_forward_kernel<X, W, true> : rope_forward_kernel<X, W, false>)
                          : (l2 ? rope_forward_kernel<X, 1, true> : rope_forward_kernel<X, 1, false>);
    launch(kernel, g.grid, g.block, 0, stream, qkv, inverse_norms, cosines, sines, T, NH, HS, g.group);
}

//   dqkv (B,T,3,NH,HS) in place   qkv, inverse_norms as rope_forward() left them; not used but with l2
template <class X>
void rope_backward(X *dqkv, const X *qkv, const float *inverse_norms, const float *cosines, const float *sines, bool l2,
                   size_t B, size_t T, size_t NH, size_t HS, cudaStream_t stream) {
    enum { W = Pack<X>::size };
    bool vectors = fits<X>(HS / 2);
    RopeGrid g = rope_grid(B * T, NH, HS, vectors ? (size_t)W : 1);
    auto kernel = vectors ? (l2 ? rope_backward_kernel<X, W, true> : rope_backward_kernel<X, W, false>)
                          : (l2 ? rope_backward_kernel<X, 1, true> : rope_backward_kernel<X, 1, false>);
    launch(kernel, g.grid, g.block, 0, stream, dqkv, qkv, inverse_norms, cosines, sines, T, NH, HS, g.group);
}
#endif

// RoPE, in place on q and k inside their projection, and, with qk=l2, division by their Euclidean norms.
//
//   forward    y[i] = a cos − b sin,  y[i + HS/2] = b cos + a sin   for each pair a = x[i], b = x[i + HS/2]
//   (half-split), cos and sin being those of position t and pair i in model/rope.h; with l2, u = y/|y|, and 1/|y| is
//   stored (0 for an all-zero row, whose u is 0)
//   backward   with l2, dy = (du − u (u · du))/|y|, otherwise dy = du;   da = dy[i] cos + dy[i + HS/2] sin,  db = dy[i
//   + HS/2] cos − dy[i] sin
//
// Shapes: qkv and dqkv (B,T,NH + 2 NKV,HS): the heads of q and k, which change, then those of v; cosines, sines
// (T,HS/2); inverse_norms (B,T,NH + NKV). HS even. X = float or bf16; all else is float, and an element is rounded once
// each way.
// Sources: Su et al., "RoFormer" (2021); Hugging Face's Llama for the order of the pairs. Test:
// dev/tests/test_kernels.cu rope.
//
// Each block processes one row of qkv. The pairs of a head are divided among `group` lanes, a power of two of at most
// 32, so a head's sum takes a few shuffles and no barrier. With HS = 64 in bf16, a group has 4 lanes, each with 16
// bytes of both halves. The heads of a row share its cosines and sines through L1.
//
// Memory traffic for N = 16,384, 12 heads of 64 in bf16: q and k are read and written, 2·2·N·768·2 = 100.7 MB, 30 µs at
// 3.35 TB/s, in each direction. With l2, the backward pass also reads q and k of qkv: 151 MB, 45 µs.
#ifndef CUDA_ROPE_CUH
#define CUDA_ROPE_CUH

#include <float.h>

#include "cuda/vector.cuh"

// What happens to q and k before attention.
struct Rope {
    size_t B, T, NH, NKV, HS;
    const float *cosines, *sines;    // (T,HS/2); NULL: no rotation
    bool l2;                         // qk=l2: after RoPE each head's row is divided by its Euclidean norm
    float amplitude = 1;             // cos² + sin² is its square (model/rope.h)
};

// The elements of a head that a lane processes, W at a time: from first, first + step, ... on, below end.
struct LanePart {
    size_t first, step, end;
};

// Sum over `group` neighboring lanes, a power of two. Each of them gets the result.
DEVICE float group_sum(float x, int group) {
    for (int step = group / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

// 1/sqrt(squares), or 0 if `squares` is not a normal number
DEVICE float inverse_norm(float squares) {
    return squares < FLT_MIN ? 0.0f : 1.0f / sqrtf(squares);
}

// A row of cosines or sines, from pair i of a position on; where there is no rotation, those of an angle of 0.
template <int W>
DEVICE void load_turn(float (&x)[W], const float *row, size_t i, float without) {
    for (int j = 0; j < W; j++) x[j] = without;
    if (row) load_vector<W>(x, row + i);
}

// The row of a position.
DEVICE const float *turn_at(const float *rows, size_t at) {
    return rows ? rows + at : NULL;
}

// ---- forward
// registers: at most 48 (rope_forward_kernel)

// The sum of squares of this lane's pairs of a head; part.end is HS/2.
template <class X, int W>
DEVICE float rope_squares(const X *x, LanePart part) {
    size_t half = part.end;
    float sum = 0;
    for (size_t i = part.first; i < half; i += part.step) {
        float a[W], b[W];
        load_vector<W, READ_AGAIN>(a, x + i);
        load_vector<W, READ_AGAIN>(b, x + half + i);
        for (int j = 0; j < W; j++) sum += a[j] * a[j] + b[j] * b[j];
    }
    return sum;
}

template <class X, int W>
DEVICE void rope_rotate(X *x, float factor, const float *cosines, const float *sines, LanePart part) {
    size_t half = part.end;
    for (size_t i = part.first; i < half; i += part.step) {
        float a[W], b[W], c[W], s[W];
        load_vector<W, READ_LAST>(a, x + i);
        load_vector<W, READ_LAST>(b, x + half + i);
        load_turn<W>(c, cosines, i, 1);
        load_turn<W>(s, sines, i, 0);
        for (int j = 0; j < W; j++) {
            float y = a[j] * c[j] - b[j] * s[j], z = b[j] * c[j] + a[j] * s[j];
            a[j] = y * factor;
            b[j] = z * factor;
        }
        store_vector<W>(x + i, a);
        store_vector<W>(x + half + i, b);
    }
}

template <class X, int W, bool L2>
KERNEL void rope_forward_kernel(X *qkv, float *inverse_norms, Rope r, int group) {
    size_t n = blockIdx.x, half = r.HS / 2, angles = (n % r.T) * half, rotated = r.NH + r.NKV,
           heads = blockDim.x / group;
    LanePart part = {(threadIdx.x % group) * W, (size_t)group * W, half};
    // All threads run the same iterations, because group_sum() needs whole warps.
    for (size_t from = 0; from < rotated; from += heads) {
        size_t head = from + threadIdx.x / group;
        bool there = head < rotated;
        X *x = qkv + (n * (rotated + r.NKV) + (there ? head : 0)) * r.HS;
        float factor = 1;
        if (L2) {
            float squares = group_sum(there ? rope_squares<X, W>(x, part) : 0.0f, group);
            factor = inverse_norm(r.amplitude * r.amplitude * squares);    // |y| = amplitude |x|
            if (there && part.first == 0) inverse_norms[n * rotated + head] = factor;
        }
        if (there) rope_rotate<X, W>(x, factor, turn_at(r.cosines, angles), turn_at(r.sines, angles), part);
    }
}

// ---- backward
// registers: at most 56 (rope_backward_kernel)

// This lane's part of u · du
template <class X, int W>
DEVICE float rope_dot(const X *u, const X *du, LanePart part) {
    size_t half = part.end;
    float sum = 0;
    for (size_t i = part.first; i < half; i += part.step) {
        float a[W], b[W], da[W], db[W];
        load_vector<W>(a, u + i);
        load_vector<W>(b, u + half + i);
        load_vector<W, READ_AGAIN>(da, du + i);
        load_vector<W, READ_AGAIN>(db, du + half + i);
        for (int j = 0; j < W; j++) sum += a[j] * da[j] + b[j] * db[j];
    }
    return sum;
}

template <class X, int W, bool L2>
DEVICE void rope_rotate_back(X *du, const X *u, float dot, float inverse, const float *cosines, const float *sines,
                             LanePart part) {
    size_t half = part.end;
    for (size_t i = part.first; i < half; i += part.step) {
        float a[W], b[W], c[W], s[W];
        load_vector<W, READ_LAST>(a, du + i);
        load_vector<W, READ_LAST>(b, du + half + i);
        if (L2) {
            float y[W], z[W];
            load_vector<W>(y, u + i);
            load_vector<W>(z, u + half + i);
            for (int j = 0; j < W; j++) {
                a[j] = (a[j] - y[j] * dot) * inverse;
                b[j] = (b[j] - z[j] * dot) * inverse;
            }
        }
        load_turn<W>(c, cosines, i, 1);
        load_turn<W>(s, sines, i, 0);
        for (int j = 0; j < W; j++) {
            float y = a[j] * c[j] + b[j] * s[j], z = b[j] * c[j] - a[j] * s[j];
            a[j] = y;
            b[j] = z;
        }
        store_vector<W>(du + i, a);
        store_vector<W>(du + half + i, b);
    }
}

template <class X, int W, bool L2>
KERNEL void rope_backward_kernel(X *dqkv, const X *qkv, const float *inverse_norms, Rope r, int group) {
    size_t n = blockIdx.x, half = r.HS / 2, angles = (n % r.T) * half, rotated = r.NH + r.NKV,
           heads = blockDim.x / group;
    LanePart part = {(threadIdx.x % group) * W, (size_t)group * W, half};
    for (size_t from = 0; from < rotated; from += heads) {
        size_t head = from + threadIdx.x / group;
        bool there = head < rotated;
        size_t at = (n * (rotated + r.NKV) + (there ? head : 0)) * r.HS;
        float dot = 0, inverse = 1;
        if (L2) {
            dot = group_sum(there ? rope_dot<X, W>(qkv + at, dqkv + at, part) : 0.0f, group);
            inverse = there ? inverse_norms[n * rotated + head] : 0.0f;
        }
        if (there)
            rope_rotate_back<X, W, L2>(dqkv + at, qkv + at, dot, inverse, turn_at(r.cosines, angles),
                                       turn_at(r.sines, angles), part);
    }
}

// ---- launchers

// How many lanes process a head: a power of two of at most 32, where each lane processes `width` of the elements at a
// time.
static inline size_t lanes_for(size_t elements, size_t width) {
    size_t group = 1;
    while (group * width < elements && group < 32) group *= 2;
    return group;
}

typedef struct {
    dim3 grid, block;
    int group;    // lanes per head
} RopeGrid;

static inline RopeGrid rope_grid(Rope r, size_t width) {
    if (r.HS % 2) fail(EXIT_USAGE, "a head size of %zu: RoPE needs an even head size.", r.HS);
    size_t group = lanes_for(r.HS / 2, width);    // each has the same elements of both halves
    size_t threads = (((r.NH + r.NKV) * group + 31) / 32) * 32;
    return (RopeGrid){row_grid(r.B * r.T, dim3(1, 1)), dim3((unsigned)smaller(threads, 512)), (int)group};
}

//   qkv (B,T,NH + 2 NKV,HS) updated in place   inverse_norms (B,T,NH + NKV) written if r.l2, otherwise unused
template <class X>
void rope_forward(X *qkv, float *inverse_norms, Rope r, cudaStream_t stream) {
    enum { W = Pack<X>::size };
    bool vectors = fits<X>(r.HS / 2);
    RopeGrid g = rope_grid(r, vectors ? (size_t)W : 1);
    if (!r.cosines && !r.l2) return;
    auto kernel = r.l2 ? rope_forward_kernel<X, 1, true> : rope_forward_kernel<X, 1, false>;
    if (vectors) kernel = r.l2 ? rope_forward_kernel<X, W, true> : rope_forward_kernel<X, W, false>;
    launch(kernel, g.grid, g.block, 0, stream, qkv, inverse_norms, r, g.group);
}

//   dqkv (B,T,NH + 2 NKV,HS) updated in place   qkv, inverse_norms from rope_forward(), only used if r.l2
template <class X>
void rope_backward(X *dqkv, const X *qkv, const float *inverse_norms, Rope r, cudaStream_t stream) {
    enum { W = Pack<X>::size };
    bool vectors = fits<X>(r.HS / 2);
    RopeGrid g = rope_grid(r, vectors ? (size_t)W : 1);
    if (!r.cosines && !r.l2) return;
    auto kernel = r.l2 ? rope_backward_kernel<X, 1, true> : rope_backward_kernel<X, 1, false>;
    if (vectors) kernel = r.l2 ? rope_backward_kernel<X, W, true> : rope_backward_kernel<X, W, false>;
    launch(kernel, g.grid, g.block, 0, stream, dqkv, qkv, inverse_norms, r, g.group);
}
#endif

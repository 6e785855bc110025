// QK norms: an RMSNorm with a gain over each head of q and k, in place in the joint projection, before RoPE.
//
//   y[c]      = x[c] · r · gain[c],   r = 1/sqrt(mean_c x[c]² + eps)
//   dx[c]     = r (gain[c] dy[c] − x[c] r² mean_c(dy gain x))
//   dgain[c]  = sum over rows and heads of dy[c] x[c] r (+ dgain[c])
//
// Shapes: qkv and dqkv (N,NH + 2 NKV,HS), the heads of q and k, which are updated, followed by those of v; inputs (N,NH
// + NKV,HS) and inverse (N,NH + NKV), the x and r kept for the backward pass; q_gain, k_gain and their gradients (HS).
// X = float or bf16. Gains, r and all sums are float, and a result is rounded once. HS at most QK_NORM_MAX_HEAD, any N.
// Source: Henry et al., "Query-Key Normalization for Transformers" (2020); with RMSNorm and gains as in Hugging Face's
// Qwen3. Test: dev/tests/test_kernels.cu qk_norm.
//
// `group` lanes process a head, a power of two of at most 32, as in rope.cuh. In the backward pass, a lane has the same
// elements (at most QK_NORM_LANE) of every head that its group processes, and sums their contributions to both gain
// gradients in registers. The block then sums over its groups in shared memory and writes one row of partial sums for
// columns_sum(). The number of blocks depends only on the shape, so every GPU gives the same bits.
//
// Memory traffic at N = 16,384, 12 + 12 heads of 64 in bf16: forward, q and k are read, written and saved, 3·2·N·768·2
// = 151 MB, 45 µs at 3.35 TB/s; backward, dq, dk and the saved q and k are read, and dq and dk written, 151 MB.
#ifndef CUDA_QK_NORM_CUH
#define CUDA_QK_NORM_CUH

#include "cuda/rope.cuh"

enum {
    QK_NORM_THREADS = 256,
    QK_NORM_BLOCKS = 528,    // in the backward pass: 4 for each of an H100's 132 SMs
    QK_NORM_LANE = 8,        // the most elements of a head per lane
    QK_NORM_MAX_HEAD = 32 * QK_NORM_LANE
};

struct QkNorm {
    size_t N, NH, NKV, HS;
    float eps;
    const float *q_gain, *k_gain;    // (HS)
};

// The offset in qkv of head i of the N·(NH + NKV) heads of q and k.
DEVICE size_t qk_head(const QkNorm &q, size_t i) {
    size_t heads = q.NH + q.NKV;
    size_t row = i / heads, head = i % heads;
    return (row * (heads + q.NKV) + head) * q.HS;
}

DEVICE bool qk_is_query(const QkNorm &q, size_t i) {
    return i % (q.NH + q.NKV) < q.NH;
}

// ---- forward
// registers: at most 40 (qk_norm_forward_kernel)

template <class X, int W>
KERNEL void qk_norm_forward_kernel(X *qkv, X *inputs, float *inverse, QkNorm q, int group) {
    size_t first = (threadIdx.x % group) * W, step = (size_t)group * W, groups = blockDim.x / group;
    size_t i = blockIdx.x * groups + threadIdx.x / group;
    bool there = i < q.N * (q.NH + q.NKV);
    X *x = qkv + (there ? qk_head(q, i) : 0);
    float sum = 0;
    for (size_t c = first; there && c < q.HS; c += step) {
        float v[W];
        load_vector<W, READ_AGAIN>(v, x + c);
        for (int j = 0; j < W; j++) sum += v[j] * v[j];
    }
    float r = 1.0f / sqrtf(group_sum(sum, group) / (float)q.HS + q.eps);    // all: group_sum() needs whole warps
    if (!there) return;
    const float *gain = qk_is_query(q, i) ? q.q_gain : q.k_gain;
    for (size_t c = first; c < q.HS; c += step) {
        float v[W], g[W];
        load_vector<W, READ_LAST>(v, x + c);
        load_vector<W>(g, gain + c);
        store_vector<W>(inputs + i * q.HS + c, v);
        for (int j = 0; j < W; j++) v[j] = v[j] * r * g[j];
        store_vector<W>(x + c, v);
    }
    if (first == 0) inverse[i] = r;
}

// ---- backward
// registers: at most 56 (qk_norm_backward_kernel)

// The lane's part of mean_c(dy gain x), before the division by HS.
template <class X, int W>
DEVICE float qk_norm_dot(const X *dy, const X *x, const float *gain, LanePart part) {
    float sum = 0;
    for (size_t c = part.first; c < part.end; c += part.step) {
        float d[W], v[W], g[W];
        load_vector<W, READ_AGAIN>(d, dy + c);
        load_vector<W>(v, x + c);
        load_vector<W>(g, gain + c);
        for (int j = 0; j < W; j++) sum += d[j] * g[j] * v[j];
    }
    return sum;
}

// Replaces dy of a head with dx, and adds dy x r to the lane's sums.
template <class X, int W>
DEVICE void qk_norm_head(X *dx, float sums[QK_NORM_LANE], const X *x, const float *gain, float r, float k,
                         LanePart part) {
    UNROLL
    for (int round = 0; round < QK_NORM_LANE / W; round++) {
        size_t c = part.first + round * part.step;
        if (c >= part.end) continue;
        float d[W], v[W], g[W];
        load_vector<W, READ_LAST>(d, dx + c);
        load_vector<W>(v, x + c);
        load_vector<W>(g, gain + c);
        UNROLL
        for (int j = 0; j < W; j++) {
            sums[round * W + j] += d[j] * v[j] * r;
            d[j] = r * (g[j] * d[j] - v[j] * k);
        }
        store_vector<W>(dx + c, d);
    }
}

// Writes the lane's sums to their elements' places in `sums`.
template <int W>
DEVICE void qk_norm_leave(float *sums, const float lane[QK_NORM_LANE], LanePart part) {
    UNROLL
    for (int round = 0; round < QK_NORM_LANE / W; round++) {
        size_t c = part.first + round * part.step;
        for (int j = 0; j < W; j++)
            if (c < part.end) sums[c + j] = lane[round * W + j];
    }
}

template <class X, int W>
KERNEL void qk_norm_backward_kernel(X *dqkv, float *partials, const X *inputs, const float *inverse, QkNorm q,
                                    int group) {
    DYNAMIC_SHARED(float, sums);    // (groups, 2, HS)
    size_t groups = blockDim.x / group, mine = threadIdx.x / group;
    LanePart part = {(threadIdx.x % group) * W, (size_t)group * W, q.HS};
    size_t count = q.N * (q.NH + q.NKV);
    float of_q[QK_NORM_LANE] = {0}, of_k[QK_NORM_LANE] = {0};
    // All threads iterate together, because group_sum() needs whole warps.
    for (size_t from = blockIdx.x * groups; from < count; from += gridDim.x * groups) {
        size_t i = from + mine;
        bool there = i < count, query = there && qk_is_query(q, i);
        const X *x = inputs + (there ? i : 0) * q.HS;
        X *dx = dqkv + (there ? qk_head(q, i) : 0);
        const float *gain = query ? q.q_gain : q.k_gain;
        float r = there ? inverse[i] : 0.0f;
        float dot = group_sum(there ? qk_norm_dot<X, W>(dx, x, gain, part) : 0.0f, group);
        float k = r * r * (dot / (float)q.HS);
        if (query) qk_norm_head<X, W>(dx, of_q, x, gain, r, k, part);
        else if (there) qk_norm_head<X, W>(dx, of_k, x, gain, r, k, part);
    }
    qk_norm_leave<W>(sums + mine * 2 * q.HS, of_q, part);
    qk_norm_leave<W>(sums + mine * 2 * q.HS + q.HS, of_k, part);
    __syncthreads();
    for (size_t c = threadIdx.x; c < 2 * q.HS; c += blockDim.x) {
        float sum = 0;
        for (size_t g = 0; g < groups; g++) sum += sums[g * 2 * q.HS + c];
        partials[blockIdx.x * 2 * q.HS + c] = sum;
    }
}

// ---- launchers

// The number of lanes per head, where each lane processes `width` elements at a time.
static inline size_t qk_norm_group(size_t HS, size_t width) {
    if (HS > QK_NORM_MAX_HEAD)
        fail(EXIT_USAGE, "a head size of %zu: QK norms on a GPU support at most %d.", HS, (int)QK_NORM_MAX_HEAD);
    return lanes_for(HS, width);
}

// The number of blocks in the backward pass.
static inline size_t qk_norm_blocks(const QkNorm &q, size_t group) {
    size_t groups = QK_NORM_THREADS / group;
    return smaller((q.N * (q.NH + q.NKV) + groups - 1) / groups, QK_NORM_BLOCKS);
}

// The number of scratch floats for the backward pass, enough for every shape with this head size.
static inline size_t qk_norm_partials(size_t HS) {
    return QK_NORM_BLOCKS * 2 * HS;
}

//   qkv (N,NH + 2 NKV,HS) in place   inputs (N,NH + NKV,HS), inverse (N,NH + NKV) written
template <class X>
void qk_norm_forward(X *qkv, X *inputs, float *inverse, const QkNorm &q, cudaStream_t stream) {
    enum { W = Pack<X>::size };
    bool vectors = fits<X>(q.HS);
    size_t group = qk_norm_group(q.HS, vectors ? (size_t)W : 1), groups = QK_NORM_THREADS / group;
    auto kernel = vectors ? qk_norm_forward_kernel<X, W> : qk_norm_forward_kernel<X, 1>;
    launch(kernel, row_grid(q.N * (q.NH + q.NKV), dim3(1, (unsigned)groups)), dim3(QK_NORM_THREADS), 0, stream, qkv,
           inputs, inverse, q, (int)group);
}

//   dqkv (N,NH + 2 NKV,HS) in place   dq_gain, dk_gain (HS): each written or added to   partials scratch
//   inputs, inverse: as written by qk_norm_forward()
template <class X>
void qk_norm_backward(X *dqkv, Gradient<float> dq_gain, Gradient<float> dk_gain, float *partials, const X *inputs,
                      const float *inverse, const QkNorm &q, cudaStream_t stream) {
    enum { W = Pack<X>::size };
    bool vectors = fits<X>(q.HS);
    size_t group = qk_norm_group(q.HS, vectors ? (size_t)W : 1), blocks = qk_norm_blocks(q, group);
    size_t shared = (QK_NORM_THREADS / group) * 2 * q.HS * sizeof(float);
    auto kernel = vectors ? qk_norm_backward_kernel<X, W> : qk_norm_backward_kernel<X, 1>;
    launch(kernel, dim3((unsigned)blocks), dim3(QK_NORM_THREADS), shared, stream, dqkv, partials, inputs, inverse, q,
           (int)group);
    const Gradient<float> gains[] = {dq_gain, dk_gain};
    columns_sums(gains, 2, partials, blocks, q.HS, stream);
}
#endif

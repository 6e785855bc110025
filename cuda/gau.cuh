// The gated attention unit: from the joint projection uvz = h·[Wu Wv Wz]ᵀ to attention's q, k and v, the gate after
// attention, and the backward passes of both.
//
//   forward    v = silu(v_in);   q = rope(silu(z) · q_gain + q_offset), and k likewise with its own gains; with qk=l2,
//   each is divided by its Euclidean norm
//   backward   dv_in = dv silu'(v_in);   with dq, dk taken before the rotation (and the norm): dz = (dq q_gain + dk
//   k_gain) silu'(z), dq_gain = sum_n dq silu(z), dq_offset = sum_n dq, and likewise for k
//   gate       out = silu(u) · att; forward and backward use swiglu.cuh's kernels
//
// Shapes: uvz and duvz (B,T,2E+HS): u, v_in (E each), z (HS); q, k (B,T,HS), v (B,T,E); gains and offsets (HS), float;
// inverse_norms (B,T,2); cosines, sines (T,HS/2). X = float or bf16; computed in float, rounded once. HS must be even
// and at most GAU_WIDEST (a unit's is 128); any E.
// Source: Su, kexue.fm 9019, after Hua et al., "Transformer Quality in Linear Time" (2022). Test:
// dev/tests/test_kernels.cu gau.
//
// z is only a twenty-fifth of a row. Each warp processes one row of z, and each lane up to GAU_PAIRS pairs of the
// rotation, one element at a time. For the gains' gradients, each lane sums its columns over its rows in registers. The
// block then sums its warps and writes one row of partial sums, and columns_sum() adds the blocks' rows.
//
// Memory traffic for N = 16,384, E = 1,536, HS = 128 in bf16: forward v_in, v, z, q, k: N·(2·1536 + 3·128)·2 = 113 MB,
// 34 µs at 3.35 TB/s; backward v_in, dv, dv_in, z, dz, dq, dk (and with l2 q, k): N·(3·1536 + 4·128)·2 = 168 MB, 50 µs;
// gate 3·N·E·2 = 151 MB, 45 µs, its backward pass 252 MB, 75 µs.
#ifndef CUDA_GAU_CUH
#define CUDA_GAU_CUH

#include "cuda/rope.cuh"
#include "cuda/swiglu.cuh"

// The learned gains and offsets of q and k, each (HS) on the device; or their gradients.
typedef struct {
    float *q_gain, *q_offset, *k_gain, *k_offset;
} GauGains;

// What a layer computes from its normalized input before attention, or the gradients of it. `joined` is the output of
// one matmul: qkv (B,T,NH + 2 NKV,HS) in a Llama layer, uvz (B,T,2E+HS) in a gated unit. Only gated units have q, k
// (B,T,HS) and v (B,T,E). inverse_norms (B,T,NH + NKV) of q and k exist only with l2.
template <class X>
struct Projected {
    X *joined, *q, *k, *v;
    float *inverse_norms;
};

enum {
    GAU_PAIRS = 2,              // pairs of the rotation per lane
    GAU_OWN = 2 * GAU_PAIRS,    // columns per lane: the first halves of its pairs, then the second halves
    GAU_WIDEST = 32 * GAU_OWN,
    GAU_WARPS = 8,
    GAU_BLOCKS = 264    // for sums over rows: 2 per SM of an H100 (132 SMs)
};

// ---- a row of HS columns in the registers of a warp

// The pair of columns that a lane's element e belongs to.
DEVICE size_t gau_pair(int e) {
    size_t lane = threadIdx.x % 32;
    return lane + 32 * (size_t)(e % GAU_PAIRS);
}

// The column of a lane's element e; gau_there() says whether it exists.
DEVICE size_t gau_column(int e, size_t half) {
    return (e < GAU_PAIRS ? 0 : half) + gau_pair(e);
}

DEVICE bool gau_there(int e, size_t half) {
    return gau_pair(e) < half;
}

template <class X>
DEVICE void gau_load(float x[GAU_OWN], const X *row, size_t half) {
    for (int e = 0; e < GAU_OWN; e++) x[e] = gau_there(e, half) ? to_float(row[gau_column(e, half)]) : 0.0f;
}

template <class X>
DEVICE void gau_store(X *row, const float x[GAU_OWN], size_t half) {
    for (int e = 0; e < GAU_OWN; e++)
        if (gau_there(e, half)) set_float(row[gau_column(e, half)], x[e]);
}

DEVICE float gau_dot(const float a[GAU_OWN], const float b[GAU_OWN]) {
    float sum = 0;
    for (int e = 0; e < GAU_OWN; e++) sum += a[e] * b[e];
    return warp_sum(sum);
}

// Rotates by the position's angles, or back if `sign` is −1; not if they are NULL.
DEVICE void gau_rotate(float x[GAU_OWN], const float *cosines, const float *sines, float sign, size_t half) {
    if (!cosines) return;
    for (int p = 0; p < GAU_PAIRS; p++) {
        bool there = gau_there(p, half);
        float c = there ? cosines[gau_column(p, half)] : 0.0f, s = there ? sign * sines[gau_column(p, half)] : 0.0f;
        float a = x[p], b = x[GAU_PAIRS + p];
        x[p] = a * c - b * s;
        x[GAU_PAIRS + p] = b * c + a * s;
    }
}

// ---- forward
// registers: at most 40 (gau_values_kernel, gau_qk_kernel)

template <class X, int W>
KERNEL void gau_values_kernel(X *v, const X *v_in, size_t row, size_t N, size_t E) {
    size_t n = row_of_thread();
    if (n >= N) return;
    for (size_t e = threadIdx.x * W; e < E; e += blockDim.x * W) {
        float x[W];
        load_vector<W>(x, v_in + n * row + e);
        for (int i = 0; i < W; i++) x[i] = silu(x[i]);
        store_vector<W>(v + n * E + e, x);
    }
}

// Computes a row of q or k from silu(z) and rotates it. With l2, divides it by its norm and returns the norm's inverse.
template <class X>
DEVICE float gau_head(X *out, const float silu_z[GAU_OWN], const float *gain, const float *offset, const float *cosines,
                      const float *sines, bool l2, size_t half) {
    float x[GAU_OWN], g[GAU_OWN], inverse = 1;
    gau_load(g, gain, half);
    gau_load(x, offset, half);
    for (int e = 0; e < GAU_OWN; e++) x[e] += silu_z[e] * g[e];
    gau_rotate(x, cosines, sines, 1, half);
    if (l2) {
        inverse = inverse_norm(gau_dot(x, x));
        for (int e = 0; e < GAU_OWN; e++) x[e] *= inverse;
    }
    gau_store(out, x, half);
    return inverse;
}

template <class X>
KERNEL void gau_qk_kernel(X *q, X *k, float *inverse_norms, const X *z, size_t row, GauGains gains, Rope r) {
    size_t n = (size_t)blockIdx.x * GAU_WARPS + threadIdx.x / 32, HS = r.HS, half = HS / 2, at = (n % r.T) * half;
    if (n >= r.B * r.T) return;
    float x[GAU_OWN];
    gau_load(x, z + n * row, half);
    for (int e = 0; e < GAU_OWN; e++) x[e] = silu(x[e]);
    const float *cos_t = turn_at(r.cosines, at), *sin_t = turn_at(r.sines, at);
    float q_inverse = gau_head(q + n * HS, x, gains.q_gain, gains.q_offset, cos_t, sin_t, r.l2, half);
    float k_inverse = gau_head(k + n * HS, x, gains.k_gain, gains.k_offset, cos_t, sin_t, r.l2, half);
    if (r.l2 && threadIdx.x % 32 == 0) {
        inverse_norms[2 * n] = q_inverse;
        inverse_norms[2 * n + 1] = k_inverse;
    }
}

// ---- backward
// registers: at most 32 (gau_values_backward_kernel)
// registers: at most 64 (gau_qk_backward_kernel)

template <class X, int W>
KERNEL void gau_values_backward_kernel(X *dv_in, const X *dv, const X *v_in, size_t row, size_t N, size_t E) {
    size_t n = row_of_thread();
    if (n >= N) return;
    for (size_t e = threadIdx.x * W; e < E; e += blockDim.x * W) {
        float x[W], d[W];
        load_vector<W>(x, v_in + n * row + e);
        load_vector<W>(d, dv + n * E + e);
        for (int i = 0; i < W; i++) {
            float value, slope;
            silu_both(x[i], &value, &slope);
            d[i] *= slope;
        }
        store_vector<W>(dv_in + n * row + e, d);
    }
}

// Computes the gradient of a row of q or k before norm and rotation from d, the gradient of attention's input u.
template <class X>
DEVICE void gau_head_backward(float dx[GAU_OWN], const X *d, const X *u, float inverse, const float *cosines,
                              const float *sines, bool l2, size_t half) {
    gau_load(dx, d, half);
    if (l2) {
        float x[GAU_OWN];
        gau_load(x, u, half);
        float dot = gau_dot(x, dx);
        for (int e = 0; e < GAU_OWN; e++) dx[e] = (dx[e] - x[e] * dot) * inverse;
    }
    gau_rotate(dx, cosines, sines, -1, half);
}

// sums[0..3] added to: the lane's columns of the gradients of q_gain, q_offset, k_gain and k_offset
template <class X>
DEVICE void gau_row_backward(X *dz, float sums[4][GAU_OWN], const float dq[GAU_OWN], const float dk[GAU_OWN],
                             const X *z, GauGains gains, size_t half) {
    float x[GAU_OWN], q_gain[GAU_OWN], k_gain[GAU_OWN];
    gau_load(x, z, half);
    gau_load(q_gain, gains.q_gain, half);
    gau_load(k_gain, gains.k_gain, half);
    for (int e = 0; e < GAU_OWN; e++) {
        float value, slope;
        silu_both(x[e], &value, &slope);
        x[e] = (dq[e] * q_gain[e] + dk[e] * k_gain[e]) * slope;
        sums[0][e] += dq[e] * value;
        sums[1][e] += dq[e];
        sums[2][e] += dk[e] * value;
        sums[3][e] += dk[e];
    }
    gau_store(dz, x, half);
}

// d.joined's columns of z written   partials (gridDim.x, 4, HS) written
template <class X>
KERNEL void gau_qk_backward_kernel(Projected<X> d, float *partials, Projected<X> x, GauGains gains, Rope r, size_t E) {
    SHARED_ARRAY(float, of_warps, GAU_WARPS * 4 * GAU_WIDEST);
    X *dz = d.joined + 2 * E;
    const X *z = x.joined + 2 * E;
    size_t HS = r.HS, half = HS / 2, row = 2 * E + HS, warp = threadIdx.x / 32;
    float sums[4][GAU_OWN] = {};
    for (size_t n = (size_t)blockIdx.x * GAU_WARPS + warp; n < r.B * r.T; n += gridDim.x * GAU_WARPS) {
        const float *cos_t = turn_at(r.cosines, (n % r.T) * half), *sin_t = turn_at(r.sines, (n % r.T) * half);
        float dq_n[GAU_OWN], dk_n[GAU_OWN];
        float q_inverse = r.l2 ? x.inverse_norms[2 * n] : 1.0f;
        gau_head_backward(dq_n, d.q + n * HS, x.q + n * HS, q_inverse, cos_t, sin_t, r.l2, half);
        float k_inverse = r.l2 ? x.inverse_norms[2 * n + 1] : 1.0f;
        gau_head_backward(dk_n, d.k + n * HS, x.k + n * HS, k_inverse, cos_t, sin_t, r.l2, half);
        gau_row_backward(dz + n * row, sums, dq_n, dk_n, z + n * row, gains, half);
    }
    for (int i = 0; i < 4; i++) gau_store(of_warps + (warp * 4 + i) * HS, sums[i], half);
    __syncthreads();
    for (size_t c = threadIdx.x; c < 4 * HS; c += blockDim.x) {
        float sum = 0;
        for (size_t w = 0; w < GAU_WARPS; w++) sum += of_warps[w * 4 * HS + c];
        partials[blockIdx.x * 4 * HS + c] = sum;
    }
}

// ---- launchers

static inline void gau_check(size_t HS) {
    if (HS % 2 || HS > GAU_WIDEST)
        fail(EXIT_USAGE, "a gated unit with q and k of width %zu: expected an even width of at most %d.", HS,
             (int)GAU_WIDEST);
}

// q, k, v and, if r.l2, inverse_norms written, from joined. r.NH and r.NKV are 1.
template <class X>
void gau_forward(Projected<X> x, GauGains gains, Rope r, size_t E, cudaStream_t stream) {
    size_t N = r.B * r.T, row = 2 * E + r.HS;
    bool vectors = fits<X>(E) && fits<X>(row);
    dim3 block = row_block(vectors ? E / Pack<X>::size : E);
    gau_check(r.HS);
    launch(vectors ? gau_values_kernel<X, Pack<X>::size> : gau_values_kernel<X, 1>, row_grid(N, block), block, 0,
           stream, x.v, x.joined + E, row, N, E);
    launch(gau_qk_kernel<X>, row_grid(N, dim3(32, GAU_WARPS)), dim3(32 * GAU_WARPS), 0, stream, x.q, x.k,
           x.inverse_norms, x.joined + 2 * E, row, gains, r);
}

static inline size_t gau_blocks(size_t N) {
    return smaller((N + GAU_WARPS - 1) / GAU_WARPS, GAU_BLOCKS);
}

// The number of floats of scratch that the backward pass needs.
static inline size_t gau_partials(size_t N, size_t HS) {
    return gau_blocks(N) * 4 * HS;
}

// d.joined written, except u's part, from d.q, d.k and d.v   grads (HS each) written, or added to if `add`
//   partials scratch   x: as gau_forward() left it
template <class X>
void gau_backward(Projected<X> d, GauGains grads, bool add, float *partials, Projected<X> x, GauGains gains, Rope r,
                  size_t E, cudaStream_t stream) {
    size_t N = r.B * r.T, HS = r.HS, row = 2 * E + HS, blocks = gau_blocks(N);
    bool vectors = fits<X>(E) && fits<X>(row);
    dim3 block = row_block(vectors ? E / Pack<X>::size : E);
    gau_check(HS);
    launch(vectors ? gau_values_backward_kernel<X, Pack<X>::size> : gau_values_backward_kernel<X, 1>,
           row_grid(N, block), block, 0, stream, d.joined + E, d.v, x.joined + E, row, N, E);
    launch(gau_qk_backward_kernel<X>, dim3((unsigned)blocks), dim3(32 * GAU_WARPS), 0, stream, d, partials, x, gains, r,
           E);
    const Gradient<float> sums[] = {
        {grads.q_gain, add}, {grads.q_offset, add}, {grads.k_gain, add}, {grads.k_offset, add}};
    columns_sums(sums, 4, partials, blocks, HS, stream);
}

//   out (N,E) written   uvz (N,width), whose first E columns are u   att (N,E)
template <class X>
void gau_gate_forward(X *out, const X *uvz, const X *att, size_t N, size_t E, size_t width, cudaStream_t stream) {
    gate_forward(out, {uvz, att, width, E}, N, E, stream);
}

//   datt (N,E) written   duvz (N,width): only u's part written   dout (N,E)
template <class X>
void gau_gate_backward(X *datt, X *duvz, const X *dout, const X *uvz, const X *att, size_t N, size_t E, size_t width,
                       cudaStream_t stream) {
    gate_backward(duvz, datt, dout, {uvz, att, width, E}, N, E, stream);
}
#endif

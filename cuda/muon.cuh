// Muon for one hidden matrix (R,C) of the flat parameter array; math/muon.h has the formula and its constants.
//
//   muon_momentum_kernel   m += (1 − momentum) (g − m), g = gradient · numbers.scale; the sum of u²,
//                          u = m − (1 − momentum) (m − g)
//   muon_start_kernel      X = u/max(|u|, eps)
//   5 rounds               A = X Xᵀ,  B = c A A + b A,  Y = B X + a X;  X and Y change places
//   muon_apply_kernel      p = (1 − lr · weight decay) p − rate X, and the bf16 copy of p
//
// If R > C, X is the smaller matrix times its transpose the other way around: A = XᵀX, Y = X B + a X. B is symmetric,
// and nothing is transposed in memory. X, Y, A and B are bf16 whatever the run's type, and matmuls sum in float; each
// result is rounded once. m, p and the gradient are float. If numbers.finite is 0, neither m nor p changes.
// Sources: math/muon.h. Test: dev/tests/test_kernels.cu muon; whole steps in dev/tests/test_cuda.py.
//
// 5 (4 S² L + 2 S³) FLOPs, S and L being the smaller and the larger of R and C: 1.7 TFLOP for the 84 matrices of the
// 124M model, 1.7 ms at an H100's 989 TFLOP/s; their 1,260 matmuls of 768 rows are too small to reach that. The kernels
// move 28 bytes per element. The algorithms come from cuBLASLt's heuristic, never from measurements, so that ranks with
// equal GPUs compute the same bits.
#ifndef CUDA_MUON_CUH
#define CUDA_MUON_CUH

#include "cuda/adamw.cuh"
#include "cuda/matmul.h"
#include "cuda/norms.cuh"
#include "math/muon.h"

enum { MUON_PART = 4096, MUON_THREADS = 256, MUON_WIDTH = 8 };

// The matrix. All pointers are to its first element, which is element `from` of the flat array.
struct MuonMatrix {
    size_t R, C, from;
    float *param;
    bf16 *rounded;    // NULL without a bf16 copy
    float *momentum;
    const float *grad;
};

// Scratch for the largest matrix: x, y (R·C), gram, step (S·S), and sums, one per MUON_PART elements and one more.
struct MuonScratch {
    bf16 *x, *y, *gram, *step;
    double *sums;
};

// Calls f(i) with the first of every W elements of this block's part of n elements.
template <int W, class F>
DEVICE void muon_elements(size_t n, F f) {
    size_t from = (size_t)blockIdx.x * MUON_PART, to = n - from > MUON_PART ? from + MUON_PART : n;
    for (size_t i = from + threadIdx.x * W; i < to; i += MUON_THREADS * W) f(i);
}

// The direction u from the updated momentum m and the gradient g.
DEVICE float muon_direction(float m, float g) {
    return m - (float)(1 - MUON_MOMENTUM) * (m - g);
}

// registers: at most 48 (muon_momentum_kernel, muon_start_kernel)
// sums[block] written: that of the block's u²
template <int W>
KERNEL void muon_momentum_kernel(double *sums, MuonMatrix x, const StepNumbers *numbers) {
    double sum = 0;
    float scale = numbers->scale;
    if (!numbers->finite) return;
    muon_elements<W>(x.R * x.C, [&](size_t i) {
        float m[W], g[W];
        load_vector<W, READ_LAST>(m, x.momentum + i);
        load_vector<W>(g, x.grad + i);
        for (int j = 0; j < W; j++) {
            g[j] *= scale;
            m[j] += (float)(1 - MUON_MOMENTUM) * (g[j] - m[j]);
            float u = muon_direction(m[j], g[j]);
            sum += (double)u * u;
        }
        store_vector<W>(x.momentum + i, m);
    });
    sum = block_sum_double<MUON_THREADS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// out (R,C) written   squares (1): that of |u|
template <int W>
KERNEL void muon_start_kernel(bf16 *out, MuonMatrix x, const StepNumbers *numbers, const double *squares) {
    float scale = numbers->scale, inverse = (float)(1 / fmax(sqrt(*squares), MUON_EPS));
    if (!numbers->finite) return;
    muon_elements<W>(x.R * x.C, [&](size_t i) {
        float m[W], g[W];
        load_vector<W>(m, x.momentum + i);
        load_vector<W>(g, x.grad + i);
        for (int j = 0; j < W; j++) m[j] = muon_direction(m[j], g[j] * scale) * inverse;
        store_vector<W>(out + i, m);
    });
}

// registers: at most 32 (muon_apply_kernel)
template <int W, bool STOCHASTIC>
KERNEL void muon_apply_kernel(MuonMatrix x, const bf16 *X, const StepNumbers *numbers, float keep, float rate,
                              uint64_t seed, uint64_t step) {
    if (!numbers->finite) return;
    muon_elements<W>(x.R * x.C, [&](size_t i) {
        float p[W], d[W];
        load_vector<W, READ_LAST>(p, x.param + i);
        load_vector<W>(d, X + i);
        for (int j = 0; j < W; j++) p[j] = keep * p[j] - rate * d[j];
        store_vector<W>(x.param + i, p);
        if (x.rounded) store_rounded<W, STOCHASTIC>(x.rounded - x.from, p, x.from + i, seed, step);
    });
}

// ---- launchers

static inline size_t muon_blocks(size_t n) {
    return (n + MUON_PART - 1) / MUON_PART;
}

// Can the kernels read 16 bytes at a time?
static inline bool muon_fits(const MuonMatrix &x) {
    return (x.R * x.C) % MUON_WIDTH == 0 && x.from % MUON_WIDTH == 0 && (uintptr_t)x.momentum % 16 == 0;
}

// The momentum, and X = u/max(|u|, eps).
//   x.momentum updated   out (R,C) written   sums (muon_blocks() + 1) scratch
static inline void muon_start(bf16 *out, const MuonMatrix &x, double *sums, const StepNumbers *numbers,
                              cudaStream_t stream) {
    enum { W = MUON_WIDTH };
    size_t blocks = muon_blocks(x.R * x.C);
    dim3 grid((unsigned)blocks), threads(MUON_THREADS);
    bool vectors = muon_fits(x);
    launch(vectors ? muon_momentum_kernel<W> : muon_momentum_kernel<1>, grid, threads, 0, stream, sums, x, numbers);
    launch(sum_kernel<NORM_THREADS>, dim3(1), dim3(NORM_THREADS), 0, stream, sums + blocks, sums, blocks);
    launch(vectors ? muon_start_kernel<W> : muon_start_kernel<1>, grid, threads, 0, stream, out, x, numbers,
           sums + blocks);
}

// p = (1 − lr · weight decay) p − rate X
//   x.param updated, x.rounded written   X (R,C)
static inline void muon_apply(const MuonMatrix &x, const bf16 *X, const StepNumbers *numbers, AdamW a, bool stochastic,
                              uint64_t seed, cudaStream_t stream) {
    enum { W = MUON_WIDTH };
    auto nearest = muon_fits(x) ? muon_apply_kernel<W, false> : muon_apply_kernel<1, false>;
    auto random = muon_fits(x) ? muon_apply_kernel<W, true> : muon_apply_kernel<1, true>;
    launch(stochastic ? random : nearest, dim3((unsigned)muon_blocks(x.R * x.C)), dim3(MUON_THREADS), 0, stream, x, X,
           numbers, (float)(1 - a.lr * a.weight_decay), (float)muon_rate(a.lr, x.R, x.C), seed, (uint64_t)a.step);
}

// s.y = a X + (b A + c A²) X, or with X on the left.
static inline void muon_round(Matmul *mm, const MuonScratch &s, size_t R, size_t C, cudaStream_t stream) {
    cudaDataType type = CUDA_R_16BF;
    bool tall = R > C;
    size_t S = tall ? C : R, L = tall ? R : C;
    matmul_run(mm, {S, S, L, tall, !tall, type, type, {}}, s.gram, s.x, s.x, NULL, stream);
    matmul_scaled(mm, {S, S, S, false, false, type, type, {}}, s.step, s.gram, s.gram, s.gram,
                  {(float)MUON_C, (float)MUON_B}, stream);
    matmul_scaled(mm, {R, C, S, false, false, type, type, {}}, s.y, tall ? s.x : s.step, tall ? s.step : s.x, s.x,
                  {1, (float)MUON_A}, stream);
}

// A step of Muon.
//   x.momentum, x.param updated, x.rounded written   s scratch   numbers (1)
static inline void muon(Matmul *mm, const MuonMatrix &x, MuonScratch s, const StepNumbers *numbers, AdamW a,
                        bool stochastic, uint64_t seed, cudaStream_t stream) {
    muon_start(s.x, x, s.sums, numbers, stream);
    for (int i = 0; i < MUON_ROUNDS; i++) {
        muon_round(mm, s, x.R, x.C, stream);
        bf16 *y = s.y;
        s.y = s.x;
        s.x = y;
    }
    muon_apply(x, s.x, numbers, a, stochastic, seed, stream);
}
#endif

// The cross-entropy loss, and its gradient, which replaces the logits in place.
//
//   losses[n] = ln Z − y[targets[n]],   Z = sum_{v<V} exp(y[v]),   y = c tanh(logits[n]/c), or logits[n] if c is 0
//   if scale is not 0: logits[n,v] becomes the derivative of scale (losses[n] + z ln(Z)²), which is
//   scale ((1 + 2 z ln Z) exp(y[v])/Z − [v = targets[n]]) (1 − (y[v]/c)²), without the last factor if c is 0
//
// Shapes: logits (rows,VP) X, of which the first V columns count and the others get gradient 0; losses (rows) float;
// targets (rows), each below V; mask (rows) or NULL: a row whose mask is 0 has loss 0 and gradient 0. X = float or
// bf16; sums are float, and each gradient is rounded once. VP must be a multiple of 8; the padded vocabulary is a
// multiple of 128. If a logit is NaN or infinite, the row's loss is NaN or infinite.
// Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018) for the running maximum; Gemma 2
// (arXiv 2408.00118) for c; PaLM (arXiv 2204.02311), section 5, for z. Test: dev/tests/test_kernels.cu classifier.
//
// Each block reads its row twice: first forward, for maximum and sum in a single pass (each thread rescales its sum
// when its maximum grows), then backward, to write the gradient. So the end of the row, which was read last, is still
// in L1, and the rest should be in L2: a row of GPT-2's vocabulary is 100 KB in bf16, 2 rows on each of 132 SMs are 27
// MB, and an H100's L2 has 50 MB. (An H200 moved 3.39 GB instead of 3.3, and 4.23 GB with 4 rows on each, by blocks of
// 512 threads.) Only the second reading tells the caches that it is the last. Nothing of size rows·VP is ever stored in
// float.
//
// Memory traffic for 16,384 rows of 50,304 in bf16: at least 1.65 GB read from and 1.65 GB written to DRAM, 0.98 ms at
// 3.35 TB/s. If the second reading also came from DRAM, it would be 1.48 ms.
#ifndef CUDA_CLASSIFIER_CUH
#define CUDA_CLASSIFIER_CUH

#include "cuda/vector.cuh"

enum { CLASSIFIER_THREADS = 1024 };

// How a row's loss is computed from its logits, and what its gradient is multiplied by.
typedef struct {
    size_t V, VP;     // the vocabulary, and the length of a row
    float softcap;    // c; 0: the logits are not capped
    float z_loss;     // z
    float scale;      // 0: losses only
} CrossEntropy;

// A maximum, and the sum of exp(x − maximum)
typedef struct {
    float largest, sum;
} RunningSum;

DEVICE float exp_fast(float x) {
    return exp2_fast(1.44269504f * x);
}

// c tanh(x/c). Near 0 a polynomial (Cephes' tanhf), because 1 − 2/(exp(2x) + 1) cancels there.
DEVICE float softcap(float x, float c) {
    float u = x / c, s = u * u, p = -5.70498872745e-3f;
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    float large = 1.0f - 2.0f * reciprocal_fast(exp_fast(2.0f * fabsf(u)) + 1.0f);
    return c * (fabsf(u) < 0.625f ? u + u * s * p : copysignf(large, u));
}

// Adds W logits to a running sum.
template <int W>
DEVICE void running_add(RunningSum *s, const float x[W]) {
    float largest = s->largest;
    for (int i = 0; i < W; i++) largest = fmaxf(largest, x[i]);
    s->sum *= exp_fast(s->largest - largest);
    for (int i = 0; i < W; i++) s->sum += exp_fast(x[i] - largest);
    s->largest = largest;
}

// Combines the threads' running sums to that of the row, and returns it in every thread. A thread without logits passes
// (−inf, 0).
DEVICE RunningSum running_block(RunningSum s) {
    RunningSum all;
    all.largest = block_max(s.largest);
    all.sum = block_sum(s.sum == 0 ? 0.0f : s.sum * exp_fast(s.largest - all.largest));
    return all;
}

// Loads the W logits from column v on, and caps them. Columns from V on count as −inf.
template <int W, Use USE, bool CAPPED, class X>
DEVICE void load_logits(float x[W], const X *row, int v, int V, float c) {
    load_vector<W, USE>(x, row + v);
    for (int i = 0; i < W && CAPPED; i++) x[i] = softcap(x[i], c);
    for (int i = 0; i < W && v + W > V; i++)
        if (v + i >= V) x[i] = -INFINITY;
}

// registers: at most 32 (classifier_kernel, losses_sum_kernel)
template <class X, int W, bool CAPPED>
KERNEL void classifier_kernel(float *losses, X *logits, const int32_t *targets, const uint8_t *mask, CrossEntropy ce) {
    size_t n = blockIdx.x;
    int V = (int)ce.V, VP = (int)ce.VP;
    float scale = ce.scale, c = ce.softcap;
    int step = blockDim.x * W, first = threadIdx.x * W, target = targets[n];
    X *row = logits + n * VP;
    if (mask && !mask[n]) {
        float zero[W] = {};
        for (int v = first; v < VP && scale != 0; v += step) store_vector<W>(row + v, zero);
        if (threadIdx.x == 0) losses[n] = 0;
        return;
    }
    // Every thread reads this before any thread overwrites it: running_block() contains the barriers.
    float target_logit = CAPPED ? softcap(to_float(row[target]), c) : to_float(row[target]);
    RunningSum s = {-INFINITY, 0};
    for (int v = first; v < V; v += step) {
        float x[W];
        load_logits<W, READ_AGAIN, CAPPED>(x, row, v, V, c);
        running_add<W>(&s, x);
    }
    s = running_block(s);
    float log_Z = logf(s.sum) + s.largest;
    if (threadIdx.x == 0) losses[n] = log_Z - target_logit;
    if (scale == 0) return;
    float factor = scale * (1.0f + 2.0f * ce.z_loss * log_Z) / s.sum;
    for (int v = ((VP - 1) / step) * step + first; v >= 0; v -= step) {
        if (v >= VP) continue;
        float x[W];
        load_logits<W, READ_LAST, CAPPED>(x, row, v, V, c);
        for (int i = 0; i < W; i++) {
            float slope = CAPPED && v + i < V ? 1.0f - (x[i] / c) * (x[i] / c) : 1.0f;
            x[i] = (factor * exp_fast(x[i] - s.largest) - (v + i == target ? scale : 0.0f)) * slope;
        }
        store_vector<W>(row + v, x);
    }
}

// One block; thread t adds losses t, t + THREADS, ...
template <int THREADS>
KERNEL void losses_sum_kernel(double *sum, const float *losses, size_t N) {
    double x = 0;
    for (size_t n = threadIdx.x; n < N; n += THREADS) x += losses[n];
    x = block_sum_double<THREADS>(x);
    if (threadIdx.x == 0) *sum += x;
}

// ---- launchers

//   losses (rows) written   logits (rows,VP) read; replaced by their gradient if scale is not 0   targets (rows)   mask
//   (rows) or NULL
template <class X>
void classifier(float *losses, X *logits, const int32_t *targets, const uint8_t *mask, size_t rows, CrossEntropy ce,
                cudaStream_t stream) {
    enum { W = Pack<X>::size };
    if (!fits<X>(ce.VP) || ce.V > ce.VP || ce.VP > 1 << 30)
        fail(EXIT_USAGE, "rows of %zu logits for a vocabulary of %zu: expected at least as many, and a multiple of %d.",
             ce.VP, ce.V, (int)W);
    launch(ce.softcap != 0 ? classifier_kernel<X, W, true> : classifier_kernel<X, W, false>, row_grid(rows, dim3(1, 1)),
           dim3(CLASSIFIER_THREADS), 0, stream, losses, logits, targets, mask, ce);
}

//   sum (1) double, added to   losses (N)
static inline void losses_sum(double *sum, const float *losses, size_t N, cudaStream_t stream) {
    launch(losses_sum_kernel<CLASSIFIER_THREADS>, dim3(1), dim3(CLASSIFIER_THREADS), 0, stream, sum, losses, N);
}
#endif

// AdamW for all tensors in one launch, driven by a table of ranges of the flat parameter array.
//
//   g = gradient · numbers.scale;   m = b1 m + (1 − b1) g,  v = b2 v + (1 − b2) g²
//   p −= scale lr (m/(1 − b1^t) / (sqrt(v/(1 − b2^t)) + eps) + wd p), scale being that of the range
//
// If numbers.finite is 0, nothing changes. The numbers are on the device, so the host need not wait for the gradient's
// norm before it launches the update.
//
// grads: a flat float array. params (with bf16, the master weights), mean, square: float; each range's parameters start
// at its `param` and its moments at its `state`, which equal its `from` if this rank has them all. With ZeRO-1, a rank
// has only those of the tensors that it owns, one after the other. rounded: a flat bf16 copy of params, or NULL. It is
// rounded to
// nearest or stochastically: up with a probability equal to the fraction that is cut off, so that the expected value is
// exact. The 16 random bits of element i of `rounded` are half-word i mod 8 of Philox4x32-10 (math/philox.h) at
// (seed, step, i div 8), so they depend neither on the grid nor on which rank owns the element.
// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019). Test: dev/tests/test_kernels.cu adamw.
//
// Each block handles at most SEGMENT_PART elements of one range, which it finds by bisection in the table (7 steps for
// the 110 ranges of 124M). Ranges whose `from`, `param` and `state` are multiples of 8, as all of tensors_of()'s
// are, use 16-byte accesses; others go element by element.
//
// Memory traffic for 124M parameters: params, mean and square are read and written, grads read, and the bf16 copy
// written: 30 bytes per parameter, 3.71 GB, 1.11 ms at 3.35 TB/s.
#ifndef CUDA_ADAMW_CUH
#define CUDA_ADAMW_CUH

#include <math.h>

#include "cuda/vector.cuh"
#include "math/adamw.h"
#include "math/philox.h"

enum { SEGMENT_PART = 4096, SEGMENT_THREADS = 256, ADAMW_WIDTH = 8 };

// A range of elements, from <= i < to, of the flat arrays. segments_ready() sets `block`.
typedef struct {
    size_t from, to;    // of grads and rounded
    size_t param;       // the position of element `from` in params
    size_t state;       // and in mean and square
    double lr_scale;    // of the learning rate
    bool decay;
    unsigned block;    // the first block of this range
} AdamSegment;

// Fills in `block` of each range and returns the total number of blocks. Upload the table afterwards.
static inline size_t segments_ready(AdamSegment *segments, size_t count) {
    size_t blocks = 0;
    for (size_t i = 0; i < count; i++) {
        segments[i].block = (unsigned)blocks;
        blocks += (segments[i].to - segments[i].from + SEGMENT_PART - 1) / SEGMENT_PART;
        if (blocks > 0x7FFFFFFF)
            fail(EXIT_USAGE, "too many parameters: the update needs more blocks than a grid can have.");
    }
    return blocks;
}

// The elements that one block updates.
typedef struct {
    size_t from, to, param, state;
    double lr_scale;
    bool decay;
} SegmentPart;

// Finds the last range whose first block is not after this one.
DEVICE SegmentPart segment_part(const AdamSegment *segments, size_t count) {
    size_t low = 0, high = count;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (segments[middle].block <= blockIdx.x) low = middle;
        else high = middle;
    }
    AdamSegment s = segments[low];
    size_t skipped = (size_t)(blockIdx.x - s.block) * SEGMENT_PART, from = s.from + skipped;
    size_t to = s.to - from > SEGMENT_PART ? from + SEGMENT_PART : s.to;
    SegmentPart part = {from, to, s.param + skipped, s.state + skipped, s.lr_scale, s.decay};
    return part;
}

// ---- stochastic rounding

// The 16 random bits of element i
DEVICE uint32_t random_bits(const Philox *r, int i) {
    return (r->words[i / 2] >> ((i % 2) * 16)) & 0xFFFF;
}

// Rounds x to one of its two bf16 neighbors, returned as a float: away from 0 with a probability equal to the fraction
// that the lower 16 bits represent, else toward 0. Infinities and NaNs are unchanged.
DEVICE float round_stochastically(float x, uint32_t bits) {
    uint32_t word = __float_as_uint(x);
    if ((word & 0x7F800000u) == 0x7F800000u) return x;
    return __uint_as_float((word + bits) & 0xFFFF0000u);
}

// ---- the update

// What the device finds out about a step: the update needs it, and the host reads a copy later. See step_numbers() in
// norms.cuh.
typedef struct {
    double loss, norm;    // the sum of the step's losses, and the gradient's norm
    float scale;          // clips the gradient
    int finite;           // 1 if loss and norm are finite, else 0
} StepNumbers;

// The device memory that the update reads and writes.
typedef struct {
    float *params;
    bf16 *rounded;    // NULL without a bf16 copy
    float *mean, *square;
    const float *grads;
    const StepNumbers *numbers;
} AdamArrays;

// AdamW's coefficients for a step, in float like the CPU trainer's, except of those that a range scales.
typedef struct {
    float b1, one_b1, b2, one_b2, square_scale, eps;
    double rate, decay;    // lr/(1 − b1^t), and lr · weight decay
    uint64_t seed, step;
} AdamRates;

static inline AdamRates adam_rates(AdamW a, uint64_t seed) {
    AdamRates r;
    r.b1 = (float)a.beta1;
    r.one_b1 = (float)(1 - a.beta1);
    r.b2 = (float)a.beta2;
    r.one_b2 = (float)(1 - a.beta2);
    r.rate = a.lr / (1 - pow(a.beta1, (double)a.step));
    r.square_scale = (float)(1 / (1 - pow(a.beta2, (double)a.step)));
    r.eps = (float)a.eps;
    r.decay = a.lr * a.weight_decay;
    r.seed = seed;
    r.step = (uint64_t)a.step;
    return r;
}

// Writes W elements of the bf16 copy, starting at element i. Overwrites x.
template <int W, bool STOCHASTIC>
DEVICE void store_rounded(bf16 *rounded, float x[W], size_t i, uint64_t seed, uint64_t step) {
    if (STOCHASTIC) {
        Philox r = philox(seed, step, i / ADAMW_WIDTH);
        for (int j = 0; j < W; j++)
            x[j] = round_stochastically(x[j], random_bits(&r, W == 1 ? (int)(i % ADAMW_WIDTH) : j));
    }
    store_vector<W>(rounded + i, x);
}

// Updates W elements, starting at element i of the flat arrays, `at` of the parameters, and s of the moments.
template <int W, bool STOCHASTIC>
DEVICE void adamw_update(AdamArrays x, size_t i, size_t at, size_t s, AdamRates a, float scale, float rate,
                         float keep) {
    float p[W], m[W], v[W], g[W];
    load_vector<W, READ_LAST>(p, x.params + at);
    load_vector<W, READ_LAST>(m, x.mean + s);
    load_vector<W, READ_LAST>(v, x.square + s);
    load_vector<W, READ_LAST>(g, x.grads + i);
    for (int j = 0; j < W; j++) {
        float d = g[j] * scale;
        m[j] = a.b1 * m[j] + a.one_b1 * d;
        v[j] = a.b2 * v[j] + a.one_b2 * d * d;
        p[j] = keep * p[j] - rate * m[j] / (sqrtf(v[j] * a.square_scale) + a.eps);
    }
    store_vector<W>(x.params + at, p);
    store_vector<W>(x.mean + s, m);
    store_vector<W>(x.square + s, v);
    if (x.rounded) store_rounded<W, STOCHASTIC>(x.rounded, p, i, a.seed, a.step);
}

// registers: at most 64 (adamw_kernel)
template <bool STOCHASTIC>
KERNEL void adamw_kernel(AdamArrays x, const AdamSegment *segments, size_t count, AdamRates a) {
    SegmentPart part = segment_part(segments, count);
    float scale = x.numbers->scale, rate = (float)(part.lr_scale * a.rate);
    float keep = part.decay ? (float)(1 - part.lr_scale * a.decay) : 1.0f;
    bool vectors = (part.from | part.param | part.state) % ADAMW_WIDTH == 0;
    if (!x.numbers->finite) return;
    for (size_t i = part.from + threadIdx.x * ADAMW_WIDTH; i < part.to; i += SEGMENT_THREADS * ADAMW_WIDTH) {
        size_t at = part.param + (i - part.from), s = part.state + (i - part.from);
        if (vectors && i + ADAMW_WIDTH <= part.to) {
            adamw_update<ADAMW_WIDTH, STOCHASTIC>(x, i, at, s, a, scale, rate, keep);
        } else {
            for (size_t j = 0; j < ADAMW_WIDTH && i + j < part.to; j++)
                adamw_update<1, STOCHASTIC>(x, i + j, at + j, s + j, a, scale, rate, keep);
        }
    }
}

// Recreates the bf16 copy of the parameters from <= i < to exactly as the update of this step left it: before the first
// step, and after loading. params[0] is element `from`.
// registers: at most 48 (round_kernel)
template <bool STOCHASTIC>
KERNEL void round_kernel(bf16 *rounded, const float *params, size_t from, size_t to, uint64_t seed, uint64_t step) {
    size_t i = from + ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * ADAMW_WIDTH;
    size_t end = i + ADAMW_WIDTH < to ? i + ADAMW_WIDTH : to;
    float x[ADAMW_WIDTH];
    if (from % ADAMW_WIDTH == 0 && (uintptr_t)params % 16 == 0 && end - i == ADAMW_WIDTH) {
        load_vector<ADAMW_WIDTH>(x, params + (i - from));
        store_rounded<ADAMW_WIDTH, STOCHASTIC>(rounded, x, i, seed, step);
    } else {
        for (; i < end; i++) {
            x[0] = params[i - from];
            store_rounded<1, STOCHASTIC>(rounded, x, i, seed, step);
        }
    }
}

// ---- launchers

//   x.params, x.mean, x.square updated, x.rounded written   x.numbers (1)   segments (count) on the device, after
//   segments_ready(), which returned `blocks`
static inline void adamw(AdamArrays x, const AdamSegment *segments, size_t count, size_t blocks, AdamW a,
                         bool stochastic, uint64_t seed, cudaStream_t stream) {
    if (blocks == 0) return;
    launch(stochastic ? adamw_kernel<true> : adamw_kernel<false>, dim3((unsigned)blocks), dim3(SEGMENT_THREADS), 0,
           stream, x, segments, count, adam_rates(a, seed));
}

//   rounded[from..to-1] written   params (to - from)   step: that of the last update
static inline void parameters_round(bf16 *rounded, const float *params, size_t from, size_t to, bool stochastic,
                                    uint64_t seed, int64_t step, cudaStream_t stream) {
    size_t part = (size_t)SEGMENT_THREADS * ADAMW_WIDTH;
    if (from == to) return;
    launch(stochastic ? round_kernel<true> : round_kernel<false>, row_grid((to - from + part - 1) / part, dim3(1, 1)),
           dim3(SEGMENT_THREADS), 0, stream, rounded, params, from, to, seed, (uint64_t)step);
}
#endif

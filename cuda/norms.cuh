// The squared norm of the gradient, and the step's numbers that follow from it.
//
//   the sum of squares over the table's ranges (adamw.cuh), in double
//   norm = sqrt(squares);   scale = clip_scale(norm, clip) (math/adamw.h)
//
// Shapes: grads the flat array, float; partials double, one per block of segments_ready(). The order of the sum depends
// only on the table, so every run on any GPU produces the same bits. With several ranks, the gradients are reduced
// before this or, with ZeRO, their sums of squares after it and before step_numbers().
// Test: dev/tests/test_kernels.cu norms.
//
// A square is exact in double (24 + 24 bits), and the sum of 124M squares is accurate to about 1e-13. A float sum would
// lose small gradients next to large ones.
//
// Memory traffic for 124M parameters: 4 bytes each, 494 MB, 0.15 ms at 3.35 TB/s. The 124M multiply-adds in double take
// 8 µs on an H100.
#ifndef CUDA_NORMS_CUH
#define CUDA_NORMS_CUH

#include "cuda/adamw.cuh"

enum { NORM_THREADS = 1024 };

// registers: at most 32 (squares_kernel, sum_kernel)
// partials[block] = the block's sum   of_params: x is laid out as the parameters rather than as the gradients
template <int THREADS>
KERNEL void squares_kernel(double *partials, const float *x, const AdamSegment *segments, size_t count,
                           bool of_params) {
    SegmentPart part = segment_part(segments, count);
    double sum = 0;
    size_t from = of_params ? part.param : part.from, to = from + (part.to - part.from);
    for (size_t i = from + threadIdx.x * 4; i < to; i += THREADS * 4) {
        if (from % 4 == 0 && i + 4 <= to) {
            float g[4];
            load_vector<4>(g, x + i);
            for (int j = 0; j < 4; j++) sum += (double)g[j] * g[j];
        } else {
            for (size_t j = i; j < i + 4 && j < to; j++) sum += (double)x[j] * x[j];
        }
    }
    sum = block_sum_double<THREADS>(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <int THREADS>
KERNEL void sum_kernel(double *out, const double *partials, size_t n) {
    double sum = 0;
    for (size_t i = threadIdx.x; i < n; i += THREADS) sum += partials[i];
    sum = block_sum_double<THREADS>(sum);
    if (threadIdx.x == 0) *out = sum;
}

// registers: at most 32 (step_numbers_kernel)
static KERNEL void step_numbers_kernel(StepNumbers *out, const double *loss, const double *squares, double clip) {
    double norm = sqrt(*squares);
    *out = {*loss, norm, (float)clip_scale(norm, clip), isfinite(*loss) && isfinite(norm)};
}

// ---- launchers

//   out (1) written: the sum of squares of x   partials (blocks) scratch   segments, blocks: as for adamw()
static inline void gradient_squares(double *out, double *partials, const float *x, const AdamSegment *segments,
                                    size_t count, size_t blocks, bool of_params, cudaStream_t stream) {
    if (blocks)
        launch(squares_kernel<SEGMENT_THREADS>, dim3((unsigned)blocks), dim3(SEGMENT_THREADS), 0, stream, partials, x,
               segments, count, of_params);
    launch(sum_kernel<NORM_THREADS>, dim3(1), dim3(NORM_THREADS), 0, stream, out, partials, blocks);
}

//   out (1) written   loss (1), squares (1): sums over all ranks   clip: the largest norm of the gradient; 0: any
static inline void step_numbers(StepNumbers *out, const double *loss, const double *squares, double clip,
                                cudaStream_t stream) {
    launch(step_numbers_kernel, dim3(1), dim3(1), 0, stream, out, loss, squares, clip);
}
#endif

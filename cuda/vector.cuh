// Common parts of the row-wise kernels: loads and stores of W elements at a time as floats, grid shapes, and sums over
// blocks.
//
// W is Pack<X>::size (16 bytes) if every row starts at a multiple of 16 bytes, otherwise 1: shapes whose rows are not
// multiples of 16 bytes are slower, not wrong. Kernels are templates on W, and their launchers choose it with fits().
// Arrays must start at a multiple of 16 bytes. Tested through the kernels by dev/tests/test_kernels.cu.
#ifndef CUDA_VECTOR_CUH
#define CUDA_VECTOR_CUH

#include "cuda/gpu.cuh"

#include "runtime/error.h"
#include "runtime/size.h"

// ---- W elements as floats; W is 1 or, for X = float, a multiple of 4, for X = bf16, 8

// What else happens to the memory in this kernel.
enum Use {
    READ_ONLY,    // it is never written
    READ_LAST,    // it is not read again; this thread may write it afterwards
    READ_AGAIN    // it is read again, so it should stay in the caches, and may be written after that
};

template <Use USE>
DEVICE uint4 load_16(const void *p) {
    if constexpr (USE == READ_ONLY) return load_16(p);
    else if constexpr (USE == READ_LAST) return load_16_streaming(p);
    else return load_16_again(p);
}

template <int W, Use USE = READ_ONLY>
DEVICE void load_vector(float x[W], const float *p) {
    if constexpr (W == 1) {
        x[0] = *p;
    } else {
        for (int i = 0; i < W; i += 4) {
            Pack<float> pack;
            unpack_16(pack, load_16<USE>(p + i));
            for (int j = 0; j < 4; j++) x[i + j] = pack.x[j];
        }
    }
}

template <int W, Use USE = READ_ONLY>
DEVICE void load_vector(float x[W], const bf16 *p) {
    if constexpr (W == 1) {
        x[0] = to_float(*p);
    } else {
        Pack<bf16> pack;
        unpack_16(pack, load_16<USE>(p));
        for (int j = 0; j < 8; j++) x[j] = pack.x[j];
    }
}

template <int W>
DEVICE void store_vector(float *p, const float x[W]) {
    if constexpr (W == 1) {
        *p = x[0];
    } else {
        for (int i = 0; i < W; i += 4) {
            Pack<float> pack;
            for (int j = 0; j < 4; j++) pack.x[j] = x[i + j];
            store_16(p + i, pack_16(pack));
        }
    }
}

template <int W>
DEVICE void store_vector(bf16 *p, const float x[W]) {
    if constexpr (W == 1) {
        set_float(*p, x[0]);
    } else {
        Pack<bf16> pack;
        for (int j = 0; j < 8; j++) pack.x[j] = x[j];
        store_16(p, pack_16(pack));
    }
}

// Can rows of this length, or with this distance, be read in vectors?
template <class X>
bool fits(size_t elements) {
    return elements % Pack<X>::size == 0;
}

// ---- grids

// For kernels without a sum over rows: 256 threads, as many of them along a row (x) as it has vectors, the others on
// further rows (y).
static inline dim3 row_block(size_t vectors) {
    unsigned x = 1;
    while (x < vectors && x < 256) x *= 2;
    return dim3(x, 256 / x);
}

static inline dim3 row_grid(size_t N, dim3 block) {
    size_t blocks = (N + block.y - 1) / block.y;
    if (blocks > 0x7FFFFFFF) fail(EXIT_USAGE, "%zu rows need more blocks than a grid can have.", N);
    return dim3((unsigned)blocks);
}

// The row of a thread in a row_grid() of row_block()s.
DEVICE size_t row_of_thread() {
    return (size_t)blockIdx.x * blockDim.y + threadIdx.y;
}

// ---- sigmoid(x), silu(x) = x sigmoid(x) and its derivative: relative error 1e-6 for |x| up to 20
DEVICE float sigmoid(float x) {
    return reciprocal_fast(1.0f + exp2_fast(-1.44269504f * x));
}

DEVICE float silu(float x) {
    return x * sigmoid(x);
}

DEVICE void silu_both(float x, float *value, float *slope) {
    float s = sigmoid(x);
    *value = x * s;
    *slope = s * (1.0f + x * (1.0f - s));
}

// ---- sums over a block, and over blocks

// Sum over a block of THREADS threads, a power of two. Every thread gets the result.
template <int THREADS>
DEVICE double block_sum_double(double x) {
    SHARED_ARRAY(double, sums, THREADS);
    __syncthreads();    // the previous call may still be reading `sums`
    sums[threadIdx.x] = x;
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

// A gradient that a kernel writes or, if `add`, adds to.
template <class X>
struct Gradient {
    X *p;
    bool add;
};

// out[c] = sum_r partials[r,c] (+ out[c]), in an order that depends only on the sizes
//   out (C) written or added to   partials (R, row): its first C columns
// This is the second stage of sums over all rows of a batch, whose first stage writes one row per block.
enum { COLUMNS = 32, COLUMN_THREADS = 32 };

// registers: at most 32 (columns_sum_kernel)
template <class X>
KERNEL void columns_sum_kernel(Gradient<X> out, const X *partials, size_t R, size_t row, size_t C) {
    SHARED_ARRAY(X, sums, COLUMN_THREADS * COLUMNS);
    size_t c = (size_t)blockIdx.x * COLUMNS + threadIdx.x;
    X sum = 0;
    if (c < C)
        for (size_t r = threadIdx.y; r < R; r += COLUMN_THREADS) sum += partials[r * row + c];
    sums[threadIdx.y * COLUMNS + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    for (int y = 1; y < COLUMN_THREADS; y++) sum += sums[y * COLUMNS + threadIdx.x];
    out.p[c] = out.add ? out.p[c] + sum : sum;
}

static inline void columns_sum(Gradient<float> out, const float *partials, size_t R, size_t row, size_t C,
                               cudaStream_t stream) {
    launch(columns_sum_kernel<float>, dim3((unsigned)((C + COLUMNS - 1) / COLUMNS)), dim3(COLUMNS, COLUMN_THREADS), 0,
           stream, out, partials, R, row, C);
}

// The same for `count` outputs of C columns each, with the same `add`, side by side in partials (R,count·C). Those that
// follow each other in memory, too, take a single launch.
static inline void columns_sums(const Gradient<float> *outs, size_t count, const float *partials, size_t R, size_t C,
                                cudaStream_t stream) {
    for (size_t i = 0, next; i < count; i = next) {
        for (next = i + 1; next < count && outs[next].p == outs[i].p + (next - i) * C; next++) {}
        columns_sum(outs[i], partials + i * C, R, count * C, (next - i) * C, stream);
    }
}
#endif

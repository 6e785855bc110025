// The scores of one query of each head, from which the host computes weights that attention's kernels never store.
//
//   scores[h,j] = sum_c q[h,c] k[j,h / (NH/NKV),c]
//
// Shapes: q (NH,HS); k (T,NKV,HS), rows k_row elements apart; scores (NH,T) in float. X = float or bf16, sums are
// float; any T and HS. Test: dev/tests/test_kernels.cu scores.
//
// `group` lanes process a key, a power of two of at most 32, as in rope.cuh. A head that shares its keys with others
// reads them from the L2 cache.
//
// Memory traffic at T = 8,000, 12 heads of 64 in bf16: 12.3 MB of keys and 0.4 MB of scores, 4 µs at 3.35 TB/s.
#ifndef CUDA_SCORES_CUH
#define CUDA_SCORES_CUH

#include "cuda/rope.cuh"

enum { SCORES_THREADS = 256 };

template <class X>
struct QueryKeys {
    const X *q, *k;
    size_t k_row, T, NH, NKV, HS;
};

// registers: at most 40 (query_scores_kernel)
template <class X, int W>
KERNEL void query_scores_kernel(float *scores, QueryKeys<X> of, int group) {
    size_t lane = threadIdx.x % group, h = blockIdx.y;
    size_t j = (size_t)blockIdx.x * (SCORES_THREADS / group) + threadIdx.x / group;
    const X *q = of.q + h * of.HS, *k = of.k + j * of.k_row + (h / (of.NH / of.NKV)) * of.HS;
    float sum = 0;
    for (size_t c = lane * W; j < of.T && c < of.HS; c += (size_t)group * W) {
        float x[W], y[W];
        load_vector<W, READ_AGAIN>(x, q + c);
        load_vector<W, READ_AGAIN>(y, k + c);
        for (int i = 0; i < W; i++) sum += x[i] * y[i];
    }
    sum = group_sum(sum, group);    // all: group_sum() needs whole warps
    if (lane == 0 && j < of.T) scores[h * of.T + j] = sum;
}

//   scores (NH,T) written
template <class X>
void query_scores(float *scores, const QueryKeys<X> &of, cudaStream_t stream) {
    enum { W = Pack<X>::size };
    bool vectors = fits<X>(of.HS) && fits<X>(of.k_row);
    size_t group = lanes_for(of.HS, vectors ? (size_t)W : 1);
    dim3 grid = row_grid(of.T, dim3(1, (unsigned)(SCORES_THREADS / group)));
    grid.y = (unsigned)of.NH;
    launch(vectors ? query_scores_kernel<X, W> : query_scores_kernel<X, 1>, grid, dim3(SCORES_THREADS), 0, stream,
           scores, of, (int)group);
}
#endif

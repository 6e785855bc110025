// The token embedding, and its gradient, which is summed in a fixed order.
//
//   out[n,c] = weight[tokens[n],c];   dweight[tokens[n],c] += sum of dout[n,c] over the rows n of that token, in order
//
// Shapes: out, dout (N,C) X, weight (V,C) X, dweight (V,C) float, tokens (N). X = float or bf16; sums are float. N
// below 2^31, any C.
// Test: dev/tests/test_kernels.cu embedding.
//
// The backward pass follows a plan that the host makes from the tokens (embedding_plan(), a stable counting sort) and
// uploads with them. It consists of pieces, each of at most EMBEDDING_PIECE rows of one token. If a token has a single
// piece, its sum is added to dweight at once. If it has several, as the end-of-text token that pads short examples
// does, each piece writes its sum to `partials`, and a second launch adds these in order. So as many blocks share a
// frequent token as it has pieces.
//
// Memory traffic for N = 16,384, C = 768 in bf16: forward 2·N·C·2 = 50.3 MB, 15 µs at 3.35 TB/s. Backward N·C·2 = 25 MB
// of dout, and 8 bytes per channel of dweight for each distinct token, about 4,000 in a batch of English: 25 MB; 15 µs.
#ifndef CUDA_EMBEDDING_CUH
#define CUDA_EMBEDDING_CUH

#include <string.h>

#include "cuda/vector.cuh"

enum { EMBEDDING_PIECE = 64 };

// `count` rows of one token: order[from], ... of dout, or in the second stage rows `from`, ... of partials. The sum is
// written to row `slot` of partials or, if that is -1, added to dweight.
typedef struct {
    int32_t token, from, count, slot;
} EmbeddingPiece;

// ---- forward
// registers: at most 32 (embedding_forward_kernel)

template <class X, int W>
KERNEL void embedding_forward_kernel(X *out, const X *weight, const int32_t *tokens, size_t N, size_t C) {
    size_t n = row_of_thread();
    if (n >= N) return;
    const X *row = weight + (size_t)tokens[n] * C;
    for (size_t c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float x[W];
        load_vector<W>(x, row + c);
        store_vector<W>(out + n * C + c, x);
    }
}

// ---- backward
// registers: at most 48 (embedding_backward_kernel)

// order: NULL means that the pieces refer to `rows` directly.
template <class X, int W>
KERNEL void embedding_backward_kernel(float *dweight, float *partials, const X *rows, const int32_t *order,
                                      const EmbeddingPiece *pieces, size_t count, size_t C) {
    size_t p = row_of_thread();
    if (p >= count) return;
    EmbeddingPiece piece = pieces[p];
    for (size_t c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float sum[W] = {}, x[W];
        for (int i = piece.from; i < piece.from + piece.count; i++) {
            load_vector<W>(x, rows + (size_t)(order ? order[i] : i) * C + c);
            for (int j = 0; j < W; j++) sum[j] += x[j];
        }
        float *to = piece.slot < 0 ? dweight + (size_t)piece.token * C + c : partials + (size_t)piece.slot * C + c;
        if (piece.slot < 0) {
            load_vector<W, READ_LAST>(x, to);
            for (int j = 0; j < W; j++) sum[j] += x[j];
        }
        store_vector<W>(to, sum);
    }
}

// ---- the plan, on the host

// The number of pieces in the first stage, and of sums in the second.
typedef struct {
    size_t pieces, sums;
} EmbeddingPlan;

// The room that a plan of N rows needs: for its pieces, and for the rows of partials.
static inline size_t embedding_pieces(size_t N) {
    return N + N / EMBEDDING_PIECE;
}

static inline size_t embedding_partials(size_t N) {
    return 2 * (N / EMBEDDING_PIECE);
}

// Adds the pieces of one token, whose rows are order[from], ...
static inline void embedding_plan_token(EmbeddingPlan *plan, EmbeddingPiece *pieces, EmbeddingPiece *sum, int32_t token,
                                        int32_t from, int32_t rows, int32_t *slots) {
    *sum = (EmbeddingPiece){token, *slots, 0, -1};
    for (int32_t at = 0; at < rows; at += EMBEDDING_PIECE) {
        int32_t count = rows - at < EMBEDDING_PIECE ? rows - at : (int32_t)EMBEDDING_PIECE;
        pieces[plan->pieces++] =
            (EmbeddingPiece){token, from + at, count, rows > EMBEDDING_PIECE ? *slots + sum->count++ : -1};
    }
    *slots += sum->count;
}

//   order (N), pieces (embedding_pieces(N)) written   tokens (N), each below V   starts (V + 1) scratch
// All arrays are on the host.
static inline EmbeddingPlan embedding_plan(int32_t *order, EmbeddingPiece *pieces, const int32_t *tokens, size_t N,
                                           int32_t *starts, size_t V) {
    EmbeddingPlan plan = {0, 0};
    int32_t slots = 0;
    if (N > INT32_MAX) fail(EXIT_USAGE, "%zu tokens: the embedding's gradient on a GPU supports fewer than 2^31.", N);
    memset(starts, 0, (V + 1) * sizeof *starts);
    for (size_t n = 0; n < N; n++) starts[tokens[n] + 1]++;
    for (size_t v = 0; v < V; v++) starts[v + 1] += starts[v];
    // From here on, starts[v] is the start of token v + 1's rows.
    for (size_t n = 0; n < N; n++) order[starts[tokens[n]]++] = (int32_t)n;
    // The second stage's sums are collected from the end of the array, then moved to follow the pieces.
    EmbeddingPiece *sums = pieces + embedding_pieces(N), sum;
    for (size_t v = 0, from = 0; v < V; from = (size_t)starts[v++]) {
        if ((size_t)starts[v] == from) continue;
        embedding_plan_token(&plan, pieces, &sum, (int32_t)v, (int32_t)from, starts[v] - (int32_t)from, &slots);
        if (sum.count) sums[-(ptrdiff_t)++plan.sums] = sum;
    }
    memmove(pieces + plan.pieces, sums - plan.sums, plan.sums * sizeof *pieces);
    return plan;
}

// ---- launchers

//   out (N,C) written   weight (V,C)   tokens (N), each below V
template <class X>
void embedding_forward(X *out, const X *weight, const int32_t *tokens, size_t N, size_t C, cudaStream_t stream) {
    bool vectors = fits<X>(C);
    dim3 block = row_block(vectors ? C / Pack<X>::size : C);
    launch(vectors ? embedding_forward_kernel<X, Pack<X>::size> : embedding_forward_kernel<X, 1>, row_grid(N, block),
           block, 0, stream, out, weight, tokens, N, C);
}

template <class X>
void embedding_stage(float *dweight, float *partials, const X *rows, const int32_t *order, const EmbeddingPiece *pieces,
                     size_t count, size_t C, cudaStream_t stream) {
    bool vectors = fits<X>(C);
    dim3 block = row_block(vectors ? C / Pack<X>::size : C);
    if (count == 0) return;
    launch(vectors ? embedding_backward_kernel<X, Pack<X>::size> : embedding_backward_kernel<X, 1>,
           row_grid(count, block), block, 0, stream, dweight, partials, rows, order, pieces, count, C);
}

//   dweight (V,C) added to   partials (embedding_partials(N), C) scratch   dout (N,C)   order, pieces: the plan's, on
//   the device
template <class X>
void embedding_backward(float *dweight, float *partials, const X *dout, const int32_t *order,
                        const EmbeddingPiece *pieces, EmbeddingPlan plan, size_t C, cudaStream_t stream) {
    embedding_stage(dweight, partials, dout, order, pieces, plan.pieces, C, stream);
    embedding_stage(dweight, NULL, (const float *)partials, NULL, pieces + plan.pieces, plan.sums, C, stream);
}
#endif

// A row of attention on the CPU, from its scores to its weights and back, for every normalizer.
#ifndef ATTENTION_ROWS_H
#define ATTENTION_ROWS_H

#include "attention/post.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    RowPlace at;
    real c, o, cap;    // z = c s + o; the normalizer's cap
    // phi is evaluated at c (s - anchor) + rest, which equals z - shift; with a cap, at that of z, minus shift.
    real anchor, rest, shift;
    real number, by_number;    // see phi_number(); the derivative of the loss with respect to it
    real inverse;              // 1/Z
    real D;                    // backward pass: sum_j A dA, for the A and dA of norm
    PostRow post;
} Row;

enum {
    ROW_STATS = 4,     // statistics that the forward pass keeps per row
    ROW_BUFFERS = 3    // of row_backward()
};

// The row of head h with n visible keys, of a sequence of T, under a training length of L and heads of HS.
Row row_at(const Normalizer *normalizer, Scalars scalars, size_t h, size_t n, size_t T, int L, size_t HS);

// Between the forward and the backward pass.   stats (ROW_STATS)
void row_keep(const Row *row, real *stats);
void row_recall(const Normalizer *normalizer, Row *row, const real *stats);

// s (n): scores in, unscaled weights out. Returns their factor; *weight is false if the row is all-zero.
real row_forward(const Normalizer *normalizer, real *s, Row *row, bool *weight);

// The same in parts, where row_in_parts(): row_take() for each part of the keys, then row_finish().
typedef struct {
    Row row;
    real sum;    // of |f| so far
    bool started;
} RowSoFar;

bool row_in_parts(const Normalizer *normalizer);

// s (n): the next scores in, f out. Where exp is taken relative to the largest z so far and that grows, also scales the
// sums (width) of f times v so far down.
void row_take(const Normalizer *normalizer, RowSoFar *so_far, real *s, int n, real *sums, size_t width);

// After all keys, as row_forward().   f (n): of all keys, if the normalizer does not allow parts
real row_finish(const Normalizer *normalizer, RowSoFar *so_far, real *f, bool *weight);

// s (n): scores in, weights out. dW (n): the gradient of the weights in, that of the scores out. D = sum_j W dW
//   buffers (ROW_BUFFERS,step): scratch, step >= n
// Returns g = sum_j dz s, and sets row->D and row->by_number.
real row_backward(const Normalizer *normalizer, real *s, real *dW, Row *row, real D, real *buffers, size_t step);

// ---- attention of one query, as the papers write it: for decoding, and for tests that compare everything else with it

// The query and the n keys that it sees: k and v point to the first one.
typedef struct {
    const real *q, *k, *v;    // (HS), (n,HS), (n,VS)
    size_t k_step, v_step;    // elements from one key, or value, to the next
    size_t HS, VS;
    bool unit_keys;    // divide each key by its norm; forward only
} Query;

// scores (n) = q · k
void query_scores(real *scores, Query query, size_t n);

// out (VS) = sum_j W_j v_j.   weights (n): scratch. Returns false if the row is all-zero.
bool query_forward(real *out, Query query, const Normalizer *normalizer, Row *row, real *weights);

// The gradients, from the output and the row of query_forward(). Returns g, see row_backward().
//   dq (HS) written   dk, dv: added to, with the steps of k and v   buffers (2 + ROW_BUFFERS,n): scratch
real query_backward(real *dq, real *dk, real *dv, const real *dout, const real *out, Query query,
                    const Normalizer *normalizer, Row *row, real *buffers);

#ifdef __cplusplus
}
#endif
#endif

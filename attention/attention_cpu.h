// Attention on the CPU for the whole family, forward and backward, in blocks of rows; never stores anything of size
// T×T.
#ifndef ATTENTION_CPU_H
#define ATTENTION_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "attention/rows.h"
#include "math/tiles.h"

#ifdef __cplusplus
extern "C" {
#endif

// NH query heads share NKV key-value heads: query head h reads key-value head h / (NH/NKV). NKV = NH is multi-head
// attention, NKV = 1 multi-query attention, and any other divisor of NH grouped-query attention.
typedef struct {
    const Normalizer *normalizer;
    size_t B, T, NH, NKV, HS, VS;    // sequences, their length, heads, head size of q and k, of v
    int L;                           // the training length
    // The T queries follow `past` earlier positions: query t is at position past + t, and each sequence of k and v has
    // past + T rows. The normalizer's T is past + T or, if `cached` (for decoding; forward only), each row's own length
    // so far.
    bool cached;
    size_t past;
    size_t before;    // `cached`: earlier positions that k and v no longer have; they count in T
    // No position sees more than this many keys through in.first, which bounds work and scratch; 0: all that there are.
    size_t window;
} AttentionShape;

// The heads of q, k or v anywhere in memory: position t of head h of sequence b is at p + (b·T + t)·row + h·head.
typedef struct {
    const real *p;
    size_t row, head;
} ConstView;

typedef struct {
    real *p;
    size_t row, head;
} View;

// The input of attention: q (B,T,NH,HS), k (B,T,NKV,HS), v (B,T,NKV,VS), after RoPE and any other preprocessing. first
// (B,T) is the first key that each position sees: at most the position itself, and nondecreasing along a sequence.
// NULL: every position sees its sequence from the start. n, the number of visible keys, counts from the first visible
// key.
typedef struct {
    ConstView q, k, v;
    const int32_t *first;
    // The instructions of the matmuls. With those of bfloat16, all matmuls read rounded inputs: q, k, v, dout, the
    // weights and the gradients of the scores. Sums, statistics and everything between matmuls stay float32.
    Tiles tiles;
    bool unit_keys;    // divide k by its norms; only where attention_of_few()
} AttentionInput;

typedef struct {
    View q, k, v;
} AttentionInputGrads;

// `rows` consecutive queries of head h of sequence b, from its query `from` on.
typedef struct {
    size_t b, h, from, rows;
} AttentionRows;

// The number of scratch elements that forward and backward need for this shape and number of threads, under any
// normalizer.
size_t attention_scratch(AttentionShape shape, int threads);

// Few queries after earlier positions: attention_forward() goes through the keys for each query, and copies nothing.
bool attention_of_few(AttentionShape shape);

// out[b,t,h] = sum_{first <= j <= t} A_tj v_j, where the normalizer computes A from s_tj = q_t · k_j. The caller
// applies qk=l2, or to k has it applied by in.unit_keys.
//   out (B,T,NH,VS) written      stats (B,NH,T,ROW_STATS) written
// Returns the number of all-zero rows (all f are 0, or a sum in post is 0), whose output is 0. Source:
// attention/normalizer.h.
uint64_t attention_forward(real *out, real *stats, AttentionInput in, Scalars scalars, AttentionShape shape,
                           real *scratch);

// The gradients, from the input and output of attention_forward. Recomputes the scores.
//   d written   grads added to   dout, out (B,T,NH,VS)
// With D_t = dout_t · out_t and dA_tj = dout_t · v_j, after the derivative of post:
//   df = (dA - sign(f) D)/Z (D is 0 for a norm that does not depend on the scores),  dz = df phi'(z)
//   dq_t = c_t sum_j dz_tj k_j;  dk_j and dv_j are summed over the rows and over the heads that share them
//   with g_t = sum_j dz_tj s_tj:  dx = sum_t dc_t/dx g_t for a scalar x of the scale;  dsink = -sum_t D_t exp(sink)/Z_t
// Deterministic: sums over rows, heads of a group and the batch have a fixed order.
void attention_backward(AttentionInputGrads d, ScalarGrads grads, const real *dout, const real *out, const real *stats,
                        AttentionInput in, Scalars scalars, AttentionShape shape, real *scratch);

// The weights A of a few queries, for statistics. Inside a parallel region, only the calling thread computes.
//   weights (rows, ld), its first past + from + rows columns written: A, and 0 where a key is invisible
//   log_Z (rows) written, or NULL: ln Z, with A = f/Z before post; -inf if Z is 0, NaN if it is NaN
void attention_weights(real *weights, size_t ld, real *log_Z, AttentionInput in, Scalars scalars, AttentionShape shape,
                       AttentionRows at);

// The same from scores that are known.
//   weights (rows, ld): q · k on entry   first (B,T) or NULL, as in AttentionInput
void attention_weights_of_scores(real *weights, size_t ld, real *log_Z, const int32_t *first, Scalars scalars,
                                 AttentionShape shape, AttentionRows at);

// What in.first is in a layer with this window, without earlier positions.
//   first (B,T) written   starts (B,T): the first key of each position's document, or NULL
void attention_window_starts(int32_t *first, const int32_t *starts, size_t B, size_t T, size_t window);

// Attention of one query of head h over its n visible keys, for generation.
//   out (VS) written   q (HS)   k, v: p is the row of the first visible key in the head that h reads   scratch (n)
//   shape.T: the current length of the sample
// Returns false if the row is all-zero.
bool attention_row(real *out, const real *q, ConstView k, ConstView v, size_t n, size_t h, Scalars scalars,
                   AttentionShape shape, real *scratch);

#ifdef __cplusplus
}
#endif
#endif

// Attention on the CPU for the whole family, forward and backward, in blocks of rows: nothing of size T×T is kept.
#ifndef ATTENTION_CPU_H
#define ATTENTION_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "attention/normalizer.h"

// NH query heads share NKV heads of keys and values: query head h reads key-value head h / (NH/NKV). NKV = NH is
// multi-head attention, NKV = 1 multi-query, anything between that divides NH grouped-query.
typedef struct {
    const Normalizer *normalizer;
    size_t B, T, NH, NKV, HS, VS;    // sequences, their length, heads, size of a head's q and k, of its v
    int L;                           // the training length
} AttentionShape;

// The heads of q, k or v wherever they lie: position t of sequence b and head h is at p + (b·T + t)·row + h·head.
typedef struct {
    const real *p;
    size_t row, head;
} ConstView;

typedef struct {
    real *p;
    size_t row, head;
} View;

// What attention reads: q (B,T,NH,HS), k (B,T,NKV,HS), v (B,T,NKV,VS), after RoPE and whatever else comes first.
// first (B,T): the first key that each position sees, at most its own and not falling along a sequence; NULL: all see
// the sequence from its start on. n, the number of visible keys, counts from there.
typedef struct {
    ConstView q, k, v;
    const int32_t *first;
} AttentionInput;

typedef struct {
    View q, k, v;
} AttentionInputGrads;

enum { ROW_STATS = 4 };    // numbers that the forward pass keeps of a row

// Numbers of scratch that forward and backward need for this shape with this many threads, under any normalizer.
size_t attention_scratch(AttentionShape shape, int threads);

// out[b,t,h] = sum_{first <= j <= t} A_tj v_j, A by the normalizer from s_tj = q_t · k_j; qk=l2 is done before.
//   out (B,T,NH,VS) written      stats (B,NH,T,ROW_STATS) written
// Returns the number of all-zero rows (all f 0, or a sum in post 0), whose output is 0. Source: attention/normalizer.h.
uint64_t attention_forward(real *out, real *stats, AttentionInput in, Scalars scalars, AttentionShape shape,
                           real *scratch);

// The gradients, from what attention_forward saw and wrote; the scores are computed again.
//   d written   grads added to   dout, out (B,T,NH,VS)
// With D_t = dout_t · out_t and dA_tj = dout_t · v_j, after post's own derivative:
//   df = (dA - sign(f) D)/Z (D is 0 for a norm that does not depend on the scores),  dz = df phi'(z)
//   dq_t = c_t sum_j dz_tj k_j,  and dk_j and dv_j summed over the rows and over the heads that share them
//   with g_t = sum_j dz_tj s_tj:  dx = sum_t dc_t/dx g_t for a scalar x of the scale;  dsink = -sum_t D_t exp(sink)/Z_t
// Deterministic: sums over rows, over the heads of a group and over the batch are taken in order.
void attention_backward(AttentionInputGrads d, ScalarGrads grads, const real *dout, const real *out, const real *stats,
                        AttentionInput in, Scalars scalars, AttentionShape shape, real *scratch);

// One query of head h over its n visible keys, for generation.
//   out (VS) written   q (HS)   k, v: p is the first visible key's row of the head that h reads   scratch (n)
//   shape.T: the length of the sample so far
// Returns whether the row is not all-zero.
bool attention_row(real *out, const real *q, ConstView k, ConstView v, size_t n, size_t h, Scalars scalars,
                   AttentionShape shape, real *scratch);

#endif

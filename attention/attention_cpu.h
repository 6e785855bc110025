// Attention on the CPU for the whole family, forward and backward, in blocks of rows: nothing of size T×T is kept.
#ifndef ATTENTION_CPU_H
#define ATTENTION_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "attention/normalizer.h"

typedef struct {
    const Normalizer *normalizer;
    size_t B, T, NH, HS, VS;    // sequences, their length, heads, size of a head's q and k, of its v
    int L;                      // the training length
} AttentionShape;

// The learned scalars of a layer; NULL where the normalizer has none.
typedef struct {
    const real *s, *b, *p, *sink;    // (NH), (NH), (L), (NH)
} AttentionScalars;

typedef struct {
    real *s, *b, *p, *sink;    // NULL: not wanted
} AttentionScalarGrads;

enum { ROW_STATS = 4 };    // numbers that the forward pass keeps of a row

// Numbers of scratch that forward and backward need for this shape with this many threads, under any normalizer.
size_t attention_scratch(AttentionShape shape, int threads);

// out[b,t,h] = sum_{j <= t} A_tj v_j, A by the normalizer from s_tj = q_t · k_j
//   out (B,T,NH,VS) written      stats (B,NH,T,ROW_STATS) written
//   q, k (B,NH,T,HS)             v (B,NH,T,VS)
// Returns the number of rows without weight (all f 0, or a sum in post 0), whose output is 0. Source:
// attention/normalizer.h.
uint64_t attention_forward(real *out, real *stats, const real *q, const real *k, const real *v,
                           AttentionScalars scalars, AttentionShape shape, real *scratch);

// The gradients, from what attention_forward saw and wrote; the scores are computed again.
//   dq, dk (B,NH,T,HS), dv (B,NH,T,VS) written   grads added to   dout, out (B,T,NH,VS)
// With D_t = dout_t · out_t and dA_tj = dout_t · v_j, after post's own derivative:
//   df = (dA - sign(f) D)/Z (D is 0 for a norm that does not depend on the scores),  dz = df phi'(z),  dq_t = c_t sum_j
//   dz_tj k_j,
//   with g_t = sum_j dz_tj s_tj:  ds = sum_t dc_t/ds g_t, and so for b and p;  dsink = -sum_t D_t exp(sink)/Z_t
// Deterministic: sums over rows and over the batch are taken in order.
void attention_backward(real *dq, real *dk, real *dv, AttentionScalarGrads grads, const real *dout, const real *out,
                        const real *stats, const real *q, const real *k, const real *v, AttentionScalars scalars,
                        AttentionShape shape, real *scratch);

// One query over n keys, for generation: head h of a sample whose length is n so far.
//   out (VS) written   q (HS)   k (n rows of HS, k_step numbers from one to the next), v (n rows of VS, v_step)
//                      scratch (n)
// Returns whether the row had weight.
bool attention_row(real *out, const real *q, const real *k, size_t k_step, const real *v, size_t v_step, size_t n,
                   size_t h, AttentionScalars scalars, AttentionShape shape, real *scratch);

#endif

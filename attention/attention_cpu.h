// Attention on the CPU for the whole family, forward and backward, in blocks of rows: nothing of size T×T is kept.
#ifndef ATTENTION_CPU_H
#define ATTENTION_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "attention/normalizer.h"

typedef struct {
    const Normalizer *normalizer;
    size_t B, T, NH, HS;       // sequences, their length, heads, head size
} AttentionShape;

// Floats of scratch that forward and backward need for this shape with this many threads.
size_t attention_scratch(AttentionShape shape, int threads);

// out[b,t,h] = sum_{j <= t} A_tj v_j, A by the normaliser from s_tj = q_t · k_j
//   out (B,T,NH,HS) written      stats (B,NH,T,2) written: what was subtracted from a row's z, and 1/Z
//   q, k, v (B,NH,T,HS)          s (NH), or NULL where the normaliser has none
// Returns the number of rows without weight (Z = 0), whose output is 0. Source: attention/normalizer.h.
uint64_t attention_forward(float *out, float *stats, const float *q, const float *k, const float *v, const float *s,
                           AttentionShape shape, float *scratch);

// The gradients, from what attention_forward saw and wrote; the scores are computed again.
//   dq, dk, dv (B,NH,T,HS) written   ds (NH) added to, or NULL   dout, out (B,T,NH,HS)
// With D_t = dout_t · out_t (0 for a norm that does not depend on the scores):
//   df = (dA - sign(f) D)/Z,  dz = df phi'(z),  dq_t = c_t sum_j dz_tj k_j,  ds = sum_t dc_t/ds sum_j dz_tj s_tj
// Deterministic: each head is one thread's work, sums over the batch are taken in order.
void attention_backward(float *dq, float *dk, float *dv, float *ds, const float *dout, const float *out, const float *stats,
                        const float *q, const float *k, const float *v, const float *s, AttentionShape shape, float *scratch);

// One query over n keys, for generation.
//   out (HS) written   q (HS)   k, v (n rows of HS, `step` floats from one to the next)   scratch (n)
// Returns whether the row had weight.
bool attention_row(float *out, const float *q, const float *k, const float *v, size_t n, size_t step, size_t HS,
                   const Normalizer *normalizer, float s, float *scratch);

#endif

// Trains a Llama-style GPT on the CPU with a choice of attention normalizers (--attn). Reads from top to bottom:
//
//   1. Layers       each forward above its backward, in the order in which the network uses them
//   2. Model        the parameters, the activations, and the memory for both
//   3. Passes       forward, loss, backward
//   4. Update       the gradient norm, AdamW and Muon
//   5. Training     main(), which contains the training loop
//
// attention/ contains the normalizers, model/ the tensors, their files and decoding, run/ everything around the model
// in a run (flags, data, checkpoints), and runtime/ utilities that know neither models nor runs. train_gpt2.cu does the
// same on GPUs, in the same order.
// Shapes: B sequences of T tokens, N = B·T rows, C channels, NH heads of size HS, feed-forward width F, and a
// vocabulary of V tokens (VP when padded).

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>

#include "attention/attention_cpu.h"
#include "attention/l2.h"
#include "data/shards.h"
#include "math/adamw.h"
#include "math/gemm.h"
#include "math/muon.h"
#include "math/peak.h"
#include "math/real.h"
#include "model/activations.h"
#include "model/model.h"
#include "model/rope.h"
#include "model/weights.h"
#include "run/profile.h"
#include "run/run.h"
#include "runtime/activity.h"
#include "runtime/cgroup.h"
#include "runtime/clock.h"
#include "runtime/memory.h"
#include "runtime/process.h"
#include "runtime/size.h"

// ---------------------------------------------------------------------------------------------------------------------
// Phase timers: phase() ends the current phase and starts the next. --profile prints the totals.

static double phase_seconds[PHASE_COUNT];

static bool aside;    // charge everything to PHASE_ASIDE

static void phase(Phase next) {
    static Phase current = PHASE_OTHER;
    static double since;
    activity_progress();
    if (aside && next != PHASE_ASIDE) return;
    double t = now();
    if (since > 0) phase_seconds[current] += t - since;
    since = t;
    current = next;
}

// ---------------------------------------------------------------------------------------------------------------------
// 1. Layers

// An array that only matmuls read: float32, or bfloat16 with --dtype bf16.
typedef struct {
    real *f32;    // used if bf16 is NULL
    uint16_t *bf16;
} MatmulInput;

static MatmulInput in_f32(const real *x) {
    return (MatmulInput){.f32 = (real *)x};
}

static MatmulInput from_element(MatmulInput x, size_t at) {
    return x.bf16 ? (MatmulInput){.bf16 = x.bf16 + at} : (MatmulInput){.f32 = x.f32 + at};
}

// A matrix whose rows have n numbers.
static Matrix matrix_of(MatmulInput x, size_t n, bool transposed) {
    return (Matrix){x.f32, x.bf16, n, transposed};
}

// Layers compute a row of such an array piece by piece: in place, or in `piece`, which piece_done() then rounds into
// it.
enum { PIECE = 256 };

static real *piece_of(MatmulInput out, size_t at, real *piece) {
    return out.bf16 ? piece : out.f32 + at;
}

static void piece_done(MatmulInput out, size_t at, const real *piece, size_t n) {
    if (!out.bf16) return;
    #pragma omp simd
    for (size_t i = 0; i < n; i++) out.bf16[at + i] = bf16_from_float((float)piece[i]);
}

// out[n,c] = weight[tokens[n],c]
//   out (N,C) written   weight (V,C)   tokens (N)
static void embedding_forward(real *out, const real *weight, const int32_t *tokens, size_t N, size_t C) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) memcpy(out + n * C, weight + (size_t)tokens[n] * C, C * sizeof *out);
}

// dweight[tokens[n],c] += dout[n,c]
//   dweight (V,C) added to   dout (N,C)
// A token may occur several times. Each thread owns a range of channels and visits all rows in order, so the sums do
// not depend on the number of threads.
static void embedding_backward(real *dweight, const real *dout, const int32_t *tokens, size_t N, size_t C) {
    enum { PART = 64 };
    #pragma omp parallel for schedule(static)
    for (size_t from = 0; from < C; from += PART) {
        size_t to = smaller(from + PART, C);
        for (size_t n = 0; n < N; n++) {
            real *row = dweight + (size_t)tokens[n] * C;
            #pragma omp simd
            for (size_t c = from; c < to; c++) row[c] += dout[n * C + c];
        }
    }
}

static real rms_inverse(const real *x, size_t C, real eps) {
    real sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (size_t c = 0; c < C; c++) sum += x[c] * x[c];
    return 1 / real_sqrt(sum / (real)C + eps);
}

// out[n,c] = inp[n,c] · r_n · weight[c],  r_n = 1/sqrt(mean_c inp[n,c]² + eps)
//   out (N,C) written   inp (N,C)   weight (C)
static void rmsnorm_forward(MatmulInput out, const real *inp, const real *weight, size_t N, size_t C, real eps) {
    #pragma omp parallel for schedule(static) if (N > 1)
    for (size_t n = 0; n < N; n++) {
        real r = rms_inverse(inp + n * C, C, eps);
        for (size_t from = 0; from < C; from += PIECE) {
            size_t at = n * C + from, count = smaller(C - from, PIECE);
            real piece[PIECE], *y = piece_of(out, at, piece);
            #pragma omp simd
            for (size_t c = 0; c < count; c++) y[c] = inp[at + c] * r * weight[from + c];
            piece_done(out, at, y, count);
        }
    }
}

// dinp[n,c] += r_n (w[c] dout[n,c] − inp[n,c] r_n² mean_c(dout w inp)),   dweight[c] += sum_n dout[n,c] inp[n,c] r_n
//   dinp (N,C) added to   dweight (C) added to   dout, inp (N,C)   weight (C)   r (N) scratch
static void rmsnorm_backward(real *dinp, real *dweight, const real *dout, const real *inp, const real *weight, real *r,
                             size_t N, size_t C, real eps) {
    enum { PART = 64 };
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const real *x = inp + n * C, *dy = dout + n * C;
        real *dx = dinp + n * C, dot = 0;
        r[n] = rms_inverse(x, C, eps);
        #pragma omp simd reduction(+ : dot)
        for (size_t c = 0; c < C; c++) dot += dy[c] * weight[c] * x[c];
        real r_n = r[n], k = r_n * r_n * dot / (real)C;
        #pragma omp simd
        for (size_t c = 0; c < C; c++) dx[c] += r_n * (weight[c] * dy[c] - x[c] * k);
    }
    #pragma omp parallel for schedule(static)
    for (size_t from = 0; from < C; from += PART) {
        size_t to = smaller(from + PART, C);
        for (size_t n = 0; n < N; n++) {
            #pragma omp simd
            for (size_t c = from; c < to; c++) dweight[c] += dout[n * C + c] * inp[n * C + c] * r[n];
        }
    }
}

// A weight matrix (OC,C).
typedef struct {
    const real *f32;
    const uint16_t *bf16;    // the copy that matmuls read; NULL in float32
    const Gemm *mm;
} WeightMatrix;

// out[n,o] = sum_c inp[n,c] weight[o,c] (+ out[n,o] when add)
//   out (N,OC) written or added to   inp (N,C)   weight (OC,C); uses its bfloat16 copy if there is one
static void matmul_forward(real *out, MatmulInput inp, WeightMatrix weight, size_t N, size_t C, size_t OC, bool add) {
    Matrix w = {weight.f32, weight.bf16, .ld = C, .transposed = true};
    gemm_run(weight.mm, N, OC, C, matrix_of(inp, C, false), w, add ? 1 : 0, out, OC);
}

// dinp[n,c] = sum_o dout[n,o] weight[o,c] (+ dinp[n,c] when add)
//   dinp (N,C) written or added to   dout (N,OC)   weight (OC,C)
static void matmul_input_backward(real *dinp, MatmulInput dout, WeightMatrix weight, size_t N, size_t C, size_t OC,
                                  bool add) {
    Matrix w = {weight.f32, weight.bf16, .ld = C};
    gemm_run(weight.mm, N, C, OC, matrix_of(dout, OC, false), w, add ? 1 : 0, dinp, C);
}

// dweight[o,c] = sum_n dout[n,o] inp[n,c] (+ dweight[o,c] when add), and dinp as above, unless it is NULL
//   dinp (N,C) written   dweight (OC,C) written or added to   dout (N,OC)   inp (N,C)
static void matmul_backward(real *dinp, real *dweight, MatmulInput dout, MatmulInput inp, WeightMatrix weight, size_t N,
                            size_t C, size_t OC, bool add) {
    if (dinp) matmul_input_backward(dinp, dout, weight, N, C, OC, false);
    gemm_run(weight.mm, OC, C, N, matrix_of(dout, OC, true), matrix_of(inp, C, false), add ? 1 : 0, dweight, C);
}

// out[n,o] += bias[o]
//   out (N,OC) added to   bias (OC)
static void bias_forward(real *out, const real *bias, size_t N, size_t OC) {
    #pragma omp parallel for schedule(static) if (N > 1)
    for (size_t n = 0; n < N; n++) {
        #pragma omp simd
        for (size_t o = 0; o < OC; o++) out[n * OC + o] += bias[o];
    }
}

// dbias[o] += sum_n dout[n,o]. Each thread owns a range of channels and visits all rows in order.
//   dbias (OC) added to   dout (N,OC)
static void bias_backward(real *dbias, const real *dout, size_t N, size_t OC) {
    enum { PART = 64 };
    #pragma omp parallel for schedule(static)
    for (size_t from = 0; from < OC; from += PART) {
        size_t to = smaller(from + PART, OC);
        for (size_t n = 0; n < N; n++) {
            #pragma omp simd
            for (size_t o = from; o < to; o++) dbias[o] += dout[n * OC + o];
        }
    }
}

// QK norms: an RMSNorm with a gain over each head of q and k, before RoPE.
typedef struct {
    size_t N, NH, NKV, HS;
    real eps;
    const real *q_gain, *k_gain;    // (HS)
} QkNorm;

// y[c] = x[c] · r · gain[c],  r = 1/sqrt(mean_c x[c]² + eps), for each head of q and k, in place in the joint
// projection
//   qkv (N,NH + 2 NKV,HS): q's heads, then k's, then v's
//   inputs (N,NH + NKV,HS), inverse (N,NH + NKV): x and r, written for the backward pass; both NULL without one
static void qk_norm_forward(real *qkv, real *inputs, real *inverse, QkNorm q) {
    size_t HS = q.HS, heads = q.NH + q.NKV, row = (heads + q.NKV) * HS;
    #pragma omp parallel for schedule(static) if (q.N > 1)
    for (size_t n = 0; n < q.N; n++) {
        if (inputs) memcpy(inputs + n * heads * HS, qkv + n * row, heads * HS * sizeof *qkv);
        for (size_t h = 0; h < heads; h++) {
            real *x = qkv + n * row + h * HS, r = rms_inverse(x, HS, q.eps);
            const real *gain = h < q.NH ? q.q_gain : q.k_gain;
            if (inverse) inverse[n * heads + h] = r;
            #pragma omp simd
            for (size_t c = 0; c < HS; c++) x[c] = x[c] * r * gain[c];
        }
    }
}

// dgain[c] += sum over rows and heads of dy[c] x[c] r. Each thread owns a range of channels and visits all rows in
// order.
static void qk_norm_gains_backward(real *dq_gain, real *dk_gain, const real *dqkv, const real *inputs,
                                   const real *inverse, QkNorm q) {
    enum { PART = 16 };
    size_t HS = q.HS, heads = q.NH + q.NKV, row = (heads + q.NKV) * HS;
    #pragma omp parallel for schedule(static)
    for (size_t from = 0; from < HS; from += PART) {
        size_t to = smaller(from + PART, HS);
        for (size_t i = 0; i < q.N * heads; i++) {
            size_t n = i / heads, h = i % heads;
            const real *x = inputs + i * HS, *dy = dqkv + n * row + h * HS;
            real *dgain = h < q.NH ? dq_gain : dk_gain;
            #pragma omp simd
            for (size_t c = from; c < to; c++) dgain[c] += dy[c] * x[c] * inverse[i];
        }
    }
}

// dx[c] = r (gain[c] dy[c] − x[c] r² mean_c(dy gain x))
//   dqkv (N,NH + 2 NKV,HS): for the heads of q and k, dy on entry and dx on return
//   dq_gain, dk_gain (HS) added to   inputs, inverse: as written by qk_norm_forward()
static void qk_norm_backward(real *dqkv, real *dq_gain, real *dk_gain, const real *inputs, const real *inverse,
                             QkNorm q) {
    size_t HS = q.HS, heads = q.NH + q.NKV, row = (heads + q.NKV) * HS;
    qk_norm_gains_backward(dq_gain, dk_gain, dqkv, inputs, inverse, q);
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < q.N * heads; i++) {
        size_t n = i / heads, h = i % heads;
        const real *x = inputs + i * HS, *gain = h < q.NH ? q.q_gain : q.k_gain;
        real *dx = dqkv + n * row + h * HS, r = inverse[i], dot = 0;
        #pragma omp simd reduction(+ : dot)
        for (size_t c = 0; c < HS; c++) dot += dx[c] * gain[c] * x[c];
        real k = r * r * dot / (real)HS;
        #pragma omp simd
        for (size_t c = 0; c < HS; c++) dx[c] = r * (gain[c] * dx[c] - x[c] * k);
    }
}

// Rotates each pair (x[i], x[i + HS/2]) of a head by the angle of its position: the half-split convention. out may
// alias x.
static void rotate(real *out, const real *x, const real *cosines, const real *sines, size_t HS) {
    size_t half = HS / 2;
    #pragma omp simd
    for (size_t i = 0; i < half; i++) {
        real a = x[i], b = x[i + half];
        out[i] = a * cosines[i] - b * sines[i];
        out[i + half] = b * cosines[i] + a * sines[i];
    }
}

static void rotate_back(real *dx, const real *dout, const real *cosines, const real *sines, size_t HS) {
    size_t half = HS / 2;
    #pragma omp simd
    for (size_t i = 0; i < half; i++) {
        real a = dout[i], b = dout[i + half];
        dx[i] = a * cosines[i] + b * sines[i];
        dx[i + half] = b * cosines[i] - a * sines[i];
    }
}

// The stage between the projections of q and k and attention: RoPE, then optionally l2 normalization.
typedef struct {
    size_t B, T, NH, NKV, HS;
    const real *cosines, *sines;    // (T,HS/2); NULL: no rotation
    bool l2;                        // qk=l2: after RoPE, divides each head of q and k by its Euclidean norm
} Rope;

// One head at position t, in place. Writes *inverse only with l2.
static void rope_head_forward(real *x, real *inverse, const Rope *r, size_t t) {
    if (r->cosines) rotate(x, x, r->cosines + t * (r->HS / 2), r->sines + t * (r->HS / 2), r->HS);
    if (!r->l2) return;
    *inverse = l2_inverse(x, r->HS);
    #pragma omp simd
    for (size_t i = 0; i < r->HS; i++) x[i] *= *inverse;
}

// Its gradient, in place. x is the output of the forward pass.
static void rope_head_backward(real *dx, const real *x, const real *inverse, const Rope *r, size_t t) {
    if (r->l2) l2_backward(dx, x, *inverse, r->HS);
    if (r->cosines) rotate_back(dx, dx, r->cosines + t * (r->HS / 2), r->sines + t * (r->HS / 2), r->HS);
}

// Applies RoPE to the heads of q and k in place in the joint projection; v is unchanged.
//   qkv (B,T,NH + 2 NKV,HS): q's heads, then k's, then v's   inverse_norms (B,T,NH + NKV) written only with l2
static void rope_forward(real *qkv, real *inverse_norms, Rope r) {
    size_t heads = r.NH + r.NKV, row = (heads + r.NKV) * r.HS;
    #pragma omp parallel for schedule(static) if (r.B * r.T > 1)
    for (size_t n = 0; n < r.B * r.T; n++)
        for (size_t h = 0; h < heads; h++)
            rope_head_forward(qkv + n * row + h * r.HS, inverse_norms + n * heads + h, &r, n % r.T);
}

//   dqkv (B,T,NH + 2 NKV,HS) in place   qkv, inverse_norms: as written by rope_forward()
static void rope_backward(real *dqkv, const real *qkv, const real *inverse_norms, Rope r) {
    size_t heads = r.NH + r.NKV, row = (heads + r.NKV) * r.HS;
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < r.B * r.T; n++) {
        for (size_t h = 0; h < heads; h++) {
            size_t at = n * row + h * r.HS;
            rope_head_backward(dqkv + at, qkv + at, inverse_norms + n * heads + h, &r, n % r.T);
        }
    }
}

// out[n,f] = silu(gate[n,f]) · up[n,f],  silu(x) = x sigmoid(x)
//   out (N,F) written   gate_up (N,2F): gate, then up
static void swiglu_forward(MatmulInput out, const real *gate_up, size_t N, size_t F) {
    #pragma omp parallel for schedule(static) if (N > 1)
    for (size_t n = 0; n < N; n++) {
        for (size_t from = 0; from < F; from += PIECE) {
            const real *gate = gate_up + n * 2 * F + from, *up = gate + F;
            size_t at = n * F + from, count = smaller(F - from, PIECE);
            real piece[PIECE], *y = piece_of(out, at, piece);
            #pragma omp simd
            for (size_t f = 0; f < count; f++) y[f] = gate[f] * real_sigmoid(gate[f]) * up[f];
            piece_done(out, at, y, count);
        }
    }
}

// dgate = dout · up · sigmoid(gate) (1 + gate (1 − sigmoid(gate))),   dup = dout · silu(gate)
//   dgate_up (N,2F) written   dout (N,F)   gate_up (N,2F)
static void swiglu_backward(MatmulInput dgate_up, const real *dout, const real *gate_up, size_t N, size_t F) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        for (size_t from = 0; from < F; from += PIECE) {
            const real *gate = gate_up + n * 2 * F + from, *up = gate + F, *dy = dout + n * F + from;
            size_t at = n * 2 * F + from, count = smaller(F - from, PIECE);
            real of_gate[PIECE], of_up[PIECE];
            real *dgate = piece_of(dgate_up, at, of_gate), *dup = piece_of(dgate_up, at + F, of_up);
            #pragma omp simd
            for (size_t f = 0; f < count; f++) {
                real sigmoid = real_sigmoid(gate[f]);
                dgate[f] = dy[f] * up[f] * sigmoid * (1 + gate[f] * (1 - sigmoid));
                dup[f] = dy[f] * gate[f] * sigmoid;
            }
            piece_done(dgate_up, at, dgate, count);
            piece_done(dgate_up, at + F, dup, count);
        }
    }
}

// out[n,e] = att[n,e] · sigmoid(gate[n,e/D]),  D = E/G: 1, or a head's size
//   out (N,E) written, may be att   att (N,E)   gate (N,G)
// Source: Qiu et al., "Gated Attention for Large Language Models" (arXiv 2505.06708).
static void output_gate_forward(real *out, const real *att, const real *gate, size_t N, size_t E, size_t G) {
    size_t D = E / G;
    #pragma omp parallel for schedule(static) if (N > 1)
    for (size_t n = 0; n < N; n++) {
        if (D == 1) {
            #pragma omp simd
            for (size_t e = n * E; e < (n + 1) * E; e++) out[e] = att[e] * real_sigmoid(gate[e]);
            continue;
        }
        for (size_t h = n * G; h < (n + 1) * G; h++) {
            real s = real_sigmoid(gate[h]);
            #pragma omp simd
            for (size_t e = h * D; e < (h + 1) * D; e++) out[e] = att[e] * s;
        }
    }
}

// datt = dout · s,   dgate[n,g] = s (1 − s) · sum of dout att over its D channels,   s = sigmoid(gate[n,g])
//   d (N,E): dout on entry, datt on return   dgate (N,G) written   att (N,E)   gate (N,G)
static void output_gate_backward(real *d, real *dgate, const real *att, const real *gate, size_t N, size_t E,
                                 size_t G) {
    size_t D = E / G;
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        if (D == 1) {
            #pragma omp simd
            for (size_t e = n * E; e < (n + 1) * E; e++) {
                real s = real_sigmoid(gate[e]);
                dgate[e] = s * (1 - s) * d[e] * att[e];
                d[e] *= s;
            }
            continue;
        }
        for (size_t h = n * G; h < (n + 1) * G; h++) {
            real s = real_sigmoid(gate[h]), dot = 0;
            #pragma omp simd reduction(+ : dot)
            for (size_t e = h * D; e < (h + 1) * D; e++) {
                dot += d[e] * att[e];
                d[e] *= s;
            }
            dgate[h] = s * (1 - s) * dot;
        }
    }
}

// ---- the gated attention unit (uvz = rmsnorm(x)·[Wu Wv Wz]ᵀ, out = (silu(u) · attention(q, k, silu(v)))·Woᵀ)
// E is the width of u and v, HS the width of z, q and k.

// The learned gain and offset of q and k, each (HS): q = silu(z) · q_gain + q_offset.
typedef struct {
    real *q_gain, *q_offset, *k_gain, *k_offset;
} GauGains;

static inline void silu_both(real x, real *value, real *slope) {
    real sigmoid = real_sigmoid(x);
    *value = x * sigmoid;
    *slope = sigmoid * (1 + x * (1 - sigmoid));
}

// What a layer computes from its normalized input before attention, or the gradients of it. `joined` is the output of
// one matmul: qkv (B,T,NH + 2 NKV,HS) in a Llama layer, uvz (B,T,2E+HS) in a gated unit. Only gated units have q, k
// (B,T,HS) and v (B,T,E). inverse_norms (B,T,NH + NKV) of q and k exist only with l2.
typedef struct {
    real *joined, *q, *k, *v, *inverse_norms;
} Projected;

// Computes q, k and v from uvz, and applies RoPE to q and k. r.NH and r.NKV are 1.
static void gau_forward(Projected x, GauGains gains, Rope r, size_t E) {
    size_t HS = r.HS;
    #pragma omp parallel for schedule(static) if (r.B * r.T > 1)
    for (size_t n = 0; n < r.B * r.T; n++) {
        const real *v_in = x.joined + n * (2 * E + HS) + E, *z = v_in + E;
        real *q = x.q + n * HS, *k = x.k + n * HS, *inverse = x.inverse_norms + 2 * n;
        #pragma omp simd
        for (size_t e = 0; e < E; e++) x.v[n * E + e] = v_in[e] * real_sigmoid(v_in[e]);
        #pragma omp simd
        for (size_t c = 0; c < HS; c++) {
            real silu = z[c] * real_sigmoid(z[c]);
            q[c] = silu * gains.q_gain[c] + gains.q_offset[c];
            k[c] = silu * gains.k_gain[c] + gains.k_offset[c];
        }
        rope_head_forward(q, inverse, &r, n % r.T);
        rope_head_forward(k, inverse + 1, &r, n % r.T);
    }
}

// The gradients of the gains, from the gradients of q and k before RoPE. Each thread owns a range of channels and
// visits all rows in order.
static void gau_gains_backward(GauGains grads, Projected d, Projected x, size_t N, size_t E, size_t HS) {
    enum { PART = 16 };
    #pragma omp parallel for schedule(static)
    for (size_t from = 0; from < HS; from += PART) {
        size_t to = smaller(from + PART, HS);
        for (size_t n = 0; n < N; n++) {
            const real *z = x.joined + n * (2 * E + HS) + 2 * E, *dq = d.q + n * HS, *dk = d.k + n * HS;
            #pragma omp simd
            for (size_t c = from; c < to; c++) {
                real silu = z[c] * real_sigmoid(z[c]);
                grads.q_gain[c] += dq[c] * silu;
                grads.k_gain[c] += dk[c] * silu;
                grads.q_offset[c] += dq[c];
                grads.k_offset[c] += dk[c];
            }
        }
    }
}

// Writes d.joined except its u columns, from d.q, d.k and d.v. Leaves in d.q and d.k the gradients before RoPE. Adds to
// grads.
static void gau_backward(Projected d, GauGains grads, Projected x, GauGains gains, Rope r, size_t E) {
    size_t N = r.B * r.T, HS = r.HS;
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        size_t at = n * (2 * E + HS) + E;
        const real *v_in = x.joined + at, *z = v_in + E, *inverse = x.inverse_norms + 2 * n;
        real *dv_in = d.joined + at, *dz = dv_in + E, *dq = d.q + n * HS, *dk = d.k + n * HS;
        rope_head_backward(dq, x.q + n * HS, inverse, &r, n % r.T);
        rope_head_backward(dk, x.k + n * HS, inverse + 1, &r, n % r.T);
        #pragma omp simd
        for (size_t e = 0; e < E; e++) {
            real value, slope;
            silu_both(v_in[e], &value, &slope);
            dv_in[e] = d.v[n * E + e] * slope;
        }
        #pragma omp simd
        for (size_t c = 0; c < HS; c++) {
            real value, slope;
            silu_both(z[c], &value, &slope);
            dz[c] = (dq[c] * gains.q_gain[c] + dk[c] * gains.k_gain[c]) * slope;
        }
    }
    gau_gains_backward(grads, d, x, N, E, HS);
}

// out[n,e] = silu(u[n,e]) · att[n,e]
//   out (N,E) written   uvz (N,W), whose first E columns are u   att (N,E)
static void gau_gate_forward(MatmulInput out, const real *uvz, const real *att, size_t N, size_t E, size_t W) {
    #pragma omp parallel for schedule(static) if (N > 1)
    for (size_t n = 0; n < N; n++) {
        for (size_t from = 0; from < E; from += PIECE) {
            const real *u = uvz + n * W + from;
            size_t at = n * E + from, count = smaller(E - from, PIECE);
            real piece[PIECE], *y = piece_of(out, at, piece);
            #pragma omp simd
            for (size_t e = 0; e < count; e++) y[e] = u[e] * real_sigmoid(u[e]) * att[at + e];
            piece_done(out, at, y, count);
        }
    }
}

//   datt (N,E) written   duvz (N,W): only its u columns written   dout (N,E)
static void gau_gate_backward(real *datt, real *duvz, const real *dout, const real *uvz, const real *att, size_t N,
                              size_t E, size_t W) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const real *u = uvz + n * W;
        real *du = duvz + n * W;
        #pragma omp simd
        for (size_t e = 0; e < E; e++) {
            real value, slope;
            silu_both(u[e], &value, &slope);
            datt[n * E + e] = dout[n * E + e] * value;
            du[e] = dout[n * E + e] * att[n * E + e] * slope;
        }
    }
}

// Soft cap: y[v] = c tanh(x[v]/c), in place
static void softcap(real *x, size_t n, real c) {
    #pragma omp simd
    for (size_t v = 0; v < n; v++) x[v] = c * real_tanh(x[v] / c);
}

static real largest_of(const real *x, size_t n) {
    real largest = -INFINITY;
    #pragma omp simd reduction(max : largest)
    for (size_t v = 0; v < n; v++) largest = x[v] > largest ? x[v] : largest;
    return largest;
}

// Returns the sum of exp(x − largest), which `out` receives unless it is NULL; out may be x.
static real exp_sum(real *out, const real *x, size_t n, real largest) {
    real sum = 0;
    if (out) {
        #pragma omp simd reduction(+ : sum)
        for (size_t v = 0; v < n; v++) {
            out[v] = real_exp(x[v] - largest);
            sum += out[v];
        }
    } else {
        #pragma omp simd reduction(+ : sum)
        for (size_t v = 0; v < n; v++) sum += real_exp(x[v] - largest);
    }
    return sum;
}

// A row of logits has VP numbers, of which the first V count.
typedef struct {
    size_t V, VP;
    real softcap;    // c; 0: the logits are not capped
    real z_loss;     // z
    real scale;      // of the gradient; 0: losses only
} CrossEntropy;

// loss[n] = ln Z − y[n,targets[n]], where y are the logits, capped if there is a cap, and Z = sum_v exp(y[n,v]). Unless
// scale is 0, replaces the logits with the gradient of scale · (loss + z · ln(Z)²). The losses are those without z.
//   losses (N) written   logits (N,VP) in, gradient out, 0 past V   targets (N)
//   mask (N) or NULL: rows where it is 0 have no loss and no gradient
// Sources: Gemma 2 (arXiv 2408.00118) for the cap; PaLM (arXiv 2204.02311), section 5, for z.
static void crossentropy(real *losses, real *logits, const int32_t *targets, const uint8_t *mask, size_t N,
                         CrossEntropy ce) {
    size_t V = ce.V;
    real c = ce.softcap, scale = ce.scale;
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        real *row = logits + n * ce.VP;
        losses[n] = 0;
        if (mask && !mask[n]) {
            if (scale != 0) memset(row, 0, ce.VP * sizeof *row);
            continue;
        }
        if (c != 0) softcap(row, V, c);
        real target = row[targets[n]], largest = largest_of(row, V);
        real sum = exp_sum(scale != 0 && c == 0 ? row : NULL, row, V, largest), log_Z = real_log(sum) + largest;
        losses[n] = log_Z - target;
        if (scale == 0) continue;
        real factor = scale * (1 + 2 * ce.z_loss * log_Z) / sum, slope = 1;
        if (c != 0) {    // dy/dx = 1 − (y/c)²
            slope -= (target / c) * (target / c);
            #pragma omp simd
            for (size_t v = 0; v < V; v++)
                row[v] = factor * real_exp(row[v] - largest) * (1 - (row[v] / c) * (row[v] / c));
        } else {
            #pragma omp simd
            for (size_t v = 0; v < V; v++) row[v] *= factor;
        }
        row[targets[n]] -= scale * slope;
        memset(row + V, 0, (ce.VP - V) * sizeof *row);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Model

enum { LOSS_ROWS = 512 };    // rows whose logits are in memory at a time: 103 MB for GPT-2's vocabulary

// For the largest of the matrices (R,C) that Muon updates, S being the smaller of R and C.
typedef struct {
    size_t elements;      // R·C
    real *x;              // (R,C)
    real *gram, *step;    // (S,S)
} MuonScratch;

// model/activations.h describes the arrays. layer_of() returns those of one layer, in the same struct.
typedef real *Numbers, *Statistics;
#define FIELD(name, type, ...) type name;
typedef struct {
    ACTIVATIONS(FIELD)
    real *stats;     // (kept, N·NH, ROW_STATS) statistics of each attention row
    real *x_next;    // of a layer: x of the next
} Activations;
#undef FIELD

typedef struct {
    ModelConfig config;
    TensorList list;
    // Further lists of normalizers that the model may have later, for which there is memory, too. Only read by plans.
    const AttentionList *const *others;
    size_t other_count;
    // list.floats each. The gradients and the state of the update rules are NULL for inference.
    real *params, *grads, *state[STATE_ARRAYS];
    // A rounded copy for the matmuls, with --dtype bf16. Also in float32 where every matrix of a checkpoint is
    // bfloat16: the numbers are the same, and decoding, which mostly waits for the weights, reads half as many bytes.
    uint16_t *params_bf16;

    // If not NULL, replaces the learned p_n of the normalizer: (T) or longer.
    const real *p_n;
    real z_loss;    // see CrossEntropy

    bool doc_mask;       // attention stops at document boundaries
    int32_t *first;      // (B, T) with doc_mask: the first key that each position of the current batch sees
    int32_t *windows;    // (windows, B, T): the same for layers with each of the normalizers' windows

    // The capacity of the activations: B·T rows, sequences of at most T tokens.
    size_t B, T;
    // The number of layers whose activations are kept: all layers for a backward pass, otherwise 1 is enough.
    size_t kept;
    ActivationWidths widths;
    Activations activations;
    real *attention;    // scratch for attention_cpu.c
    size_t attention_bytes;
    void *matmul_scratch;     // with bf16
    real *cosines, *sines;    // (tables, T, HS/2)
    double *sums;             // partial sums of the gradient's norm
    MuonScratch muon;         // with Muon

    Gemm mm;
    double seconds;                  // of the passes of this step so far
    uint64_t all_zero_rows, rows;    // since they were last reset: all-zero attention rows, all attention rows
    MemoryPlan plan;
} Model;

// One row per block: where attention finds q, k and v, and the passes. The block's tensors and sizes are in
// model/model.c, its activations in model/activations.h, its decoding in model/decode.h.
typedef struct {
    AttentionInputGrads (*views)(const ModelConfig *c, Projected of);
    void (*forward)(Model *m, size_t l, size_t B, size_t T);
    void (*backward)(Model *m, size_t l, size_t B, size_t T, bool add);
} BlockRow;

static const BlockRow *block_of(const Model *m);

#ifndef LAYERS_ONLY
static Weights weights_of(const Model *m) {
    return (Weights){
        &m->config, &m->list, m->params, {m->state[STATE_MEAN], m->state[STATE_SQUARE]}, m->params_bf16 != NULL};
}
#endif

static real norm_eps(const Model *m) {
    return (real)m->config.norm_eps;
}

static WeightMatrix weight(const Model *m, size_t offset) {
    return (WeightMatrix){m->params + offset, m->mm.bf16 ? m->params_bf16 + offset : NULL, &m->mm};
}

// The learned scalars of a layer; m->p_n, if set, replaces the learned p_n.
static Scalars layer_scalars(const Model *m, size_t layer) {
    Scalars scalars = scalars_of(&m->list, m->params, layer, &m->config.attn);
    if (scalars.of[SCALAR_P] && m->p_n) scalars.of[SCALAR_P] = m->p_n;
    return scalars;
}

static GauGains gains_in(const Model *m, real *array, size_t layer) {
    const LayerOffsets *at = &m->list.layers[layer];
    return (GauGains){array + at->q_gain, array + at->q_offset, array + at->k_gain, array + at->k_offset};
}

static AttentionShape attention_shape(const ModelConfig *c, size_t layer, size_t B, size_t T) {
    return (AttentionShape){.normalizer = normalizer_of(c, layer),
                            .B = B,
                            .T = T,
                            .NH = c->heads,
                            .NKV = c->kv_heads,
                            .HS = head_size(c),
                            .VS = value_size(c),
                            .L = (int)c->seq_len,
                            .window = attention_of(c, layer)->window};
}

// Sums over a tensor's elements are added up from those over pieces of a fixed size, so that they do not depend on the
// number of threads. Model.sums has room for the pieces of all tensors.
enum { SUM_PIECE = 1 << 16 };

static size_t sum_pieces(size_t elements) {
    return (elements + SUM_PIECE - 1) / SUM_PIECE;
}

static size_t all_sum_pieces(const TensorList *list) {
    size_t count = 0;
    for (size_t i = 0; i < list->count; i++) count += sum_pieces(list->tensors[i].elements);
    return count;
}

#define FLOATS(n) ((size_t)(n) * sizeof(real))

// The widest rows that matmuls read: as the first operand (a gradient or an activation), and as the second operand in
// dweight.
static size_t widest_first(const ModelConfig *c) {
    return larger(joined_width(c), 2 * c->ffn);
}

static size_t widest_second(const ModelConfig *c) {
    return larger(larger(c->channels, c->ffn), output_width(c));
}

// The most elements of a matmul's first and second operand.
static size_t largest_first(const Model *m) {
    size_t N = m->B * m->T, logits = smaller(N, LOSS_ROWS) * padded_vocab(&m->config);
    return larger(larger(N * widest_first(&m->config), logits), m->muon.elements);
}

static size_t largest_second(const Model *m) {
    return larger(m->B * m->T * widest_second(&m->config), m->muon.elements);
}

static void plan_muon(Model *m) {
    size_t square = 0;
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        size_t side = smaller(t->shape[0], t->shape[1]);
        if (t->update != UPDATE_MUON) continue;
        if (t->elements > m->muon.elements) m->muon.elements = t->elements;
        if (side * side > square) square = side * side;
    }
    if (!square) return;
    memory_add(&m->plan, "Muon's scratch", (void **)&m->muon.x, FLOATS(m->muon.elements));
    memory_add(&m->plan, "Muon's scratch", (void **)&m->muon.gram, FLOATS(square));
    memory_add(&m->plan, "Muon's scratch", (void **)&m->muon.step, FLOATS(square));
}

// Rows of the memory plan that several arrays share
static const char *const KEPT = "activations kept for the backward pass", *const SCRATCH = "scratch";

static void plan_parameters(Model *m, bool train, bool rounded) {
    size_t floats = m->list.floats;
    memory_add(&m->plan, "parameters", (void **)&m->params, FLOATS(floats));
    if (rounded) memory_add(&m->plan, "parameters in bfloat16", (void **)&m->params_bf16, floats * sizeof(uint16_t));
    if (!train) return;
    memory_add(&m->plan, "gradients", (void **)&m->grads, FLOATS(floats));
    for (size_t s = 0; s < STATE_ARRAYS; s++)
        memory_add(&m->plan, "optimizer state", (void **)&m->state[s], FLOATS(floats));
    plan_muon(m);
    memory_add(&m->plan, SCRATCH, (void **)&m->sums, all_sum_pieces(&m->list) * sizeof(double));
}

// Refreshes the bf16 copy, if there is one. Call after setting the parameters.
static void round_parameters(Model *m) {
    if (!m->params_bf16) return;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < m->list.floats; i++) m->params_bf16[i] = bf16_from_float(m->params[i]);
}

// The most of something under the lists of normalizers that the model has and may have later.
static size_t most_of(const Model *m, size_t (*count)(const AttentionList *list)) {
    size_t most = count(&m->config.attn);
    for (size_t i = 0; i < m->other_count; i++) most = larger(most, count(m->others[i]));
    return most;
}

static size_t widest_window(const AttentionList *list) {
    size_t widest = 0;
    for (size_t i = 0; i < list->count; i++) {
        size_t window = list->items[i].layer.window;
        widest = larger(widest, window ? window : SIZE_MAX);
    }
    return widest;
}

// Makes attention's scratch large enough for batches of B sequences of T tokens, too. Shorter sequences can need more:
// if there are as many groups of heads as threads, each thread copies the keys of one.
static void plan_shape(Model *m, size_t B, size_t T) {
    AttentionShape shape = attention_shape(&m->config, 0, B, T);
    shape.window = most_of(m, widest_window);
    size_t bytes = FLOATS(attention_scratch(shape, omp_get_max_threads()));
    if (bytes > m->attention_bytes) memory_resize(&m->plan, (void **)&m->attention, m->attention_bytes = bytes);
}

// The backward pass recomputes every KEPT_INPUT.
static size_t layers_in(const Model *m, ActivationMemory memory) {
    return activation_layers(memory, m->kept, 1);
}

static size_t rows_in(const Model *m, ActivationMemory memory) {
    size_t N = m->B * m->T;
    if (memory == SCRATCH_LOGITS) return smaller(N, LOSS_ROWS);
    return layers_in(m, memory) * N;
}

static const char *kind_of(ActivationMemory memory) {
    if (memory == SCRATCH_LOGITS) return "logits of one block of rows";
    return memory < KEPT_INPUT ? KEPT : SCRATCH;
}

static void plan_numbers(Model *m, real **x, ActivationMemory memory, size_t width) {
    if (width) memory_add(&m->plan, kind_of(memory), (void **)x, FLOATS(rows_in(m, memory) * width));
}

static void plan_input(Model *m, MatmulInput *x, ActivationMemory memory, size_t width) {
    size_t bytes = rows_in(m, memory) * width * sizeof *x->bf16;
    if (!m->mm.bf16) plan_numbers(m, &x->f32, memory, width);
    else if (width) memory_add(&m->plan, kind_of(memory), (void **)&x->bf16, bytes);
}

static void plan_activations(Model *m, size_t kept_layers, size_t B, size_t T) {
    const ModelConfig *c = &m->config;
    Activations *a = &m->activations;
    size_t HS = head_size(c), N = B * T;
    m->kept = kept_layers;
    m->B = B;
    m->T = T;
    m->widths = activation_widths(c, true);    // rope_forward() expects inverse_norms under every normalizer
#define PLAN(name, type, width, memory, exists) \
    _Generic(a->name, real *: plan_numbers, MatmulInput: plan_input)(m, &a->name, memory, m->widths.name);
    ACTIVATIONS(PLAN)
#undef PLAN
    memory_add(&m->plan, KEPT, (void **)&a->stats, FLOATS(kept_layers * N * c->heads * ROW_STATS));
    if (m->doc_mask) memory_add(&m->plan, SCRATCH, (void **)&m->first, N * sizeof *m->first);
    m->attention_bytes = 0;
    memory_add(&m->plan, SCRATCH, (void **)&m->attention, 0);
    plan_shape(m, B, T);
    size_t windows = most_of(m, attention_windows), angles = most_of(m, attention_tables) * T * HS / 2;
    if (windows) memory_add(&m->plan, SCRATCH, (void **)&m->windows, windows * N * sizeof *m->windows);
    memory_add(&m->plan, SCRATCH, (void **)&m->cosines, FLOATS(angles));
    memory_add(&m->plan, SCRATCH, (void **)&m->sines, FLOATS(angles));
    size_t matmul_bytes = gemm_scratch(&m->mm, largest_first(m), largest_second(m));
    if (matmul_bytes) memory_add(&m->plan, "bfloat16 matmul scratch", &m->matmul_scratch, matmul_bytes);
}

// Where a table of RoPE's angles begins.
static size_t angles_at(const Model *m, size_t table) {
    return table * m->T * (head_size(&m->config) / 2);
}

// Call after memory_take(), and after a change of the model's normalizers.
static void model_ready(Model *m) {
    const AttentionList *attn = &m->config.attn;
    if (m->matmul_scratch) gemm_use(&m->mm, m->matmul_scratch, largest_first(m));
    for (size_t i = 0; i < attention_tables(attn); i++)
        rope_table(m->cosines + angles_at(m, i), m->sines + angles_at(m, i), m->T,
                   model_rope(&m->config, attention_table_base(attn, i)));
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Passes

// The row of an array at which layer l begins. A layer stays in place, whatever the batch.
static size_t row_of(const Model *m, ActivationMemory memory, size_t l) {
    return (l % layers_in(m, memory)) * m->B * m->T;
}

// The residual stream (N,C) before layer l.
static real *residual(const Model *m, size_t l) {
    return m->activations.x + row_of(m, KEPT_STREAM, l) * m->widths.x;
}

static real *numbers_from(real *x, size_t at) {
    return x ? x + at : NULL;
}

// The activations of layer l.
static Activations layer_of(const Model *m, size_t l) {
    Activations of = m->activations;
#define VIEW(name, type, width, memory, exists)                                   \
    of.name = _Generic(of.name, real *: numbers_from, MatmulInput: from_element)( \
        of.name, row_of(m, memory, l) * m->widths.name);
    ACTIVATIONS(VIEW)
#undef VIEW
    of.stats += row_of(m, KEPT_STATISTICS, l) * m->config.heads * ROW_STATS;
    of.x_next = residual(m, l + 1);
    return of;
}

static Projected projected_of(const Activations *a) {
    return (Projected){a->joined, a->q, a->k, a->v, a->inverse_norms};
}

static Projected gradients_of(const Activations *a) {
    return (Projected){a->djoined, a->dq, a->dk, a->dv, NULL};
}

static QkNorm qk_norm_of(const Model *m, size_t layer, size_t N) {
    const ModelConfig *c = &m->config;
    const LayerOffsets *at = &m->list.layers[layer];
    return (QkNorm){
        N, c->heads, c->kv_heads, head_size(c), norm_eps(m), m->params + at->q_norm, m->params + at->k_norm};
}

static Rope rope_of(const Model *m, size_t layer, size_t B, size_t T) {
    const ModelConfig *c = &m->config;
    size_t table = attention_table(&c->attn, layer);
    Rope rope = {.B = B,
                 .T = T,
                 .NH = c->heads,
                 .NKV = c->kv_heads,
                 .HS = head_size(c),
                 .l2 = normalizer_of(c, layer)->qk.kind == QK_L2};
    if (table == NO_TABLE) return rope;
    rope.cosines = m->cosines + angles_at(m, table);
    rope.sines = m->sines + angles_at(m, table);
    return rope;
}

// q, k and v as attention reads them; with gradients, where attention writes them.
static AttentionInputGrads layer_views(const ModelConfig *c, Projected of) {
    size_t W = joined_width(c), HS = head_size(c), K = query_width(c);
    return (AttentionInputGrads){{of.joined, W, HS}, {of.joined + K, W, HS}, {of.joined + K + key_width(c), W, HS}};
}

static AttentionInputGrads unit_views(const ModelConfig *c, Projected of) {
    size_t K = query_width(c);
    return (AttentionInputGrads){{of.q, K, 0}, {of.k, K, 0}, {of.v, output_width(c), 0}};
}

static AttentionInput attention_input(const Model *m, size_t layer, Projected of) {
    size_t window = attention_window(&m->config.attn, layer);
    AttentionInputGrads at = block_of(m)->views(&m->config, of);
    return (AttentionInput){.q = {at.q.p, at.q.row, at.q.head},
                            .k = {at.k.p, at.k.row, at.k.head},
                            .v = {at.v.p, at.v.row, at.v.head},
                            .first = window == NO_TABLE ? m->first : m->windows + window * m->B * m->T,
                            .tiles = m->mm.tiles};
}

// Attention itself, which both blocks share. Expects the layer's q, k and v.
static void attention_layer_forward(Model *m, const Activations *of, size_t l, size_t B, size_t T) {
    AttentionShape shape = attention_shape(&m->config, l, B, T);
    AttentionInput in = attention_input(m, l, projected_of(of));
    phase(PHASE_ATTENTION);
    m->all_zero_rows += attention_forward(of->att, of->stats, in, layer_scalars(m, l), shape, m->attention);
    m->rows += B * T * shape.NH;
}

// Computes the gradients of q, k and v (in djoined, or in dq, dk, dv) and of the learned scalars from datt.
static void attention_layer_backward(Model *m, const Activations *of, size_t l, size_t B, size_t T) {
    AttentionShape shape = attention_shape(&m->config, l, B, T);
    AttentionInputGrads d = block_of(m)->views(&m->config, gradients_of(of));
    phase(PHASE_ATTENTION);
    ScalarGrads grads = scalar_grads_of(&m->list, m->grads, l, &m->config.attn);
    AttentionInput in = attention_input(m, l, projected_of(of));
    attention_backward(d, grads, of->datt, of->att, of->stats, in, layer_scalars(m, l), shape, m->attention);
}

static void layer_forward(Model *m, size_t l, size_t B, size_t T) {
    const ModelConfig *c = &m->config;
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = c->channels, F = c->ffn, W = joined_width(c), E = output_width(c), G = gate_width(c);
    Activations of = layer_of(m, l);
    phase(PHASE_NORM);
    rmsnorm_forward(of.h, of.x, m->params + at->norm1, N, C, norm_eps(m));
    phase(PHASE_PROJECTIONS);
    matmul_forward(of.joined, of.h, weight(m, at->q), N, C, W, false);
    if (c->qkv_bias) bias_forward(of.joined, m->params + at->q_bias, N, W);
    if (c->gate) matmul_forward(of.att_gate, of.h, weight(m, at->att_gate), N, C, G, false);
    phase(PHASE_NORM);
    if (c->qk_norm) qk_norm_forward(of.joined, of.qk_inputs, of.qk_inverse, qk_norm_of(m, l, N));
    phase(PHASE_ROPE);
    rope_forward(of.joined, of.inverse_norms, rope_of(m, l, B, T));
    attention_layer_forward(m, &of, l, B, T);
    if (c->gate) {
        phase(PHASE_GATE);
        output_gate_forward(of.gated, of.att, of.att_gate, N, E, G);
    }
    phase(PHASE_PROJECTIONS);
    memcpy(of.x_mid, of.x, FLOATS(N * C));
    matmul_forward(of.x_mid, in_f32(c->gate ? of.gated : of.att), weight(m, at->o), N, E, C, true);

    phase(PHASE_NORM);
    rmsnorm_forward(of.h, of.x_mid, m->params + at->norm2, N, C, norm_eps(m));
    phase(PHASE_FEED_FORWARD);
    matmul_forward(of.gate_up, of.h, weight(m, at->gate), N, C, 2 * F, false);
    phase(PHASE_SWIGLU);
    swiglu_forward(of.act, of.gate_up, N, F);
    phase(PHASE_FEED_FORWARD);
    memcpy(of.x_next, of.x_mid, FLOATS(N * C));
    matmul_forward(of.x_next, of.act, weight(m, at->down), N, F, C, true);
}

// of.dx (N,C) is the gradient of the residual stream: after the layer on entry, before it on return.
static void layer_backward(Model *m, size_t l, size_t B, size_t T, bool add) {
    const ModelConfig *c = &m->config;
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = c->channels, F = c->ffn, W = joined_width(c), E = output_width(c), G = gate_width(c);
    Activations of = layer_of(m, l);
    real *grads = m->grads;
    phase(PHASE_SWIGLU);
    swiglu_forward(of.act, of.gate_up, N, F);
    phase(PHASE_FEED_FORWARD);
    matmul_backward(of.dact, grads + at->down, in_f32(of.dx), of.act, weight(m, at->down), N, F, C, add);
    phase(PHASE_SWIGLU);
    swiglu_backward(of.dgate_up, of.dact, of.gate_up, N, F);
    phase(PHASE_NORM);
    rmsnorm_forward(of.h, of.x_mid, m->params + at->norm2, N, C, norm_eps(m));
    phase(PHASE_FEED_FORWARD);
    matmul_backward(of.dh, grads + at->gate, of.dgate_up, of.h, weight(m, at->gate), N, C, 2 * F, add);
    phase(PHASE_NORM);
    rmsnorm_backward(of.dx, grads + at->norm2, of.dh, of.x_mid, m->params + at->norm2, of.r, N, C, norm_eps(m));

    if (c->gate) {
        phase(PHASE_GATE);
        output_gate_forward(of.gated, of.att, of.att_gate, N, E, G);
    }
    phase(PHASE_PROJECTIONS);
    matmul_backward(of.datt, grads + at->o, in_f32(of.dx), in_f32(c->gate ? of.gated : of.att), weight(m, at->o), N, E,
                    C, add);
    if (c->gate) {
        phase(PHASE_GATE);
        output_gate_backward(of.datt, of.datt_gate, of.att, of.att_gate, N, E, G);
    }
    attention_layer_backward(m, &of, l, B, T);
    phase(PHASE_ROPE);
    rope_backward(of.djoined, of.joined, of.inverse_norms, rope_of(m, l, B, T));
    phase(PHASE_NORM);
    if (c->qk_norm)
        qk_norm_backward(of.djoined, grads + at->q_norm, grads + at->k_norm, of.qk_inputs, of.qk_inverse,
                         qk_norm_of(m, l, N));
    rmsnorm_forward(of.h, of.x, m->params + at->norm1, N, C, norm_eps(m));
    phase(PHASE_PROJECTIONS);
    if (c->qkv_bias) bias_backward(grads + at->q_bias, of.djoined, N, W);
    matmul_backward(of.dh, grads + at->q, in_f32(of.djoined), of.h, weight(m, at->q), N, C, W, add);
    if (c->gate) {
        WeightMatrix gate = weight(m, at->att_gate);
        matmul_backward(NULL, grads + at->att_gate, in_f32(of.datt_gate), of.h, gate, N, C, G, add);
        matmul_input_backward(of.dh, in_f32(of.datt_gate), gate, N, C, G, true);
    }
    phase(PHASE_NORM);
    rmsnorm_backward(of.dx, grads + at->norm1, of.dh, of.x, m->params + at->norm1, of.r, N, C, norm_eps(m));
}

static void unit_forward(Model *m, size_t l, size_t B, size_t T) {
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = m->config.channels, E = m->config.ffn, W = joined_width(&m->config);
    Activations of = layer_of(m, l);
    phase(PHASE_NORM);
    rmsnorm_forward(of.h, of.x, m->params + at->norm1, N, C, norm_eps(m));
    phase(PHASE_PROJECTIONS);
    matmul_forward(of.joined, of.h, weight(m, at->u), N, C, W, false);
    phase(PHASE_ROPE);
    gau_forward(projected_of(&of), gains_in(m, m->params, l), rope_of(m, l, B, T), E);
    attention_layer_forward(m, &of, l, B, T);
    phase(PHASE_GATE);
    gau_gate_forward(of.act, of.joined, of.att, N, E, W);
    phase(PHASE_PROJECTIONS);
    memcpy(of.x_next, of.x, FLOATS(N * C));
    matmul_forward(of.x_next, of.act, weight(m, at->o), N, E, C, true);
}

static void unit_backward(Model *m, size_t l, size_t B, size_t T, bool add) {
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = m->config.channels, E = m->config.ffn, W = joined_width(&m->config);
    Activations of = layer_of(m, l);
    real *grads = m->grads;
    phase(PHASE_GATE);
    gau_gate_forward(of.act, of.joined, of.att, N, E, W);
    phase(PHASE_PROJECTIONS);
    matmul_backward(of.dact, grads + at->o, in_f32(of.dx), of.act, weight(m, at->o), N, E, C, add);
    phase(PHASE_GATE);
    gau_gate_backward(of.datt, of.djoined, of.dact, of.joined, of.att, N, E, W);
    attention_layer_backward(m, &of, l, B, T);
    phase(PHASE_ROPE);
    gau_backward(gradients_of(&of), gains_in(m, grads, l), projected_of(&of), gains_in(m, m->params, l),
                 rope_of(m, l, B, T), E);
    phase(PHASE_NORM);
    rmsnorm_forward(of.h, of.x, m->params + at->norm1, N, C, norm_eps(m));
    phase(PHASE_PROJECTIONS);
    matmul_backward(of.dh, grads + at->u, in_f32(of.djoined), of.h, weight(m, at->u), N, C, W, add);
    phase(PHASE_NORM);
    rmsnorm_backward(of.dx, grads + at->norm1, of.dh, of.x, m->params + at->norm1, of.r, N, C, norm_eps(m));
}

static const BlockRow *block_of(const Model *m) {
    static const BlockRow BLOCKS[] = {
        [BLOCK_LLAMA] = {layer_views, layer_forward, layer_backward},
        [BLOCK_GAU] = {unit_views, unit_forward, unit_backward},
    };
    return &BLOCKS[m->config.block];
}

static void model_embed(Model *m, const int32_t *tokens, size_t B, size_t T) {
    const AttentionList *attn = &m->config.attn;
    if (m->first) document_starts(m->first, tokens, B, T, m->config.end_of_text);
    for (size_t i = 0; i < attention_windows(attn); i++)
        attention_window_starts(m->windows + i * m->B * m->T, m->first, B, T, attention_window_size(attn, i));
    phase(PHASE_EMBEDDING);
    embedding_forward(m->activations.x, m->params + m->list.embedding, tokens, B * T, m->config.channels);
}

static void model_final_norm(Model *m, size_t N) {
    size_t layers = m->config.layers;
    phase(PHASE_NORM);
    rmsnorm_forward(m->activations.h, residual(m, layers), m->params + m->list.norm, N, m->config.channels,
                    norm_eps(m));
    phase(PHASE_OTHER);
}

// Fills the activations, up to and including h (N,C), the normalized output of the last layer.
static void model_forward(Model *m, const int32_t *tokens, size_t B, size_t T) {
    model_embed(m, tokens, B, T);
    for (size_t l = 0; l < m->config.layers; l++) block_of(m)->forward(m, l, B, T);
    model_final_norm(m, B * T);
}

// The sum of the losses of N rows, computed in blocks of LOSS_ROWS so that memory does not grow with N. Unless scale is
// 0, also computes the gradients of scale times the sum: writes dh (N,C), and writes the output projection's
// gradient, or adds to it if `add`.
static double model_loss(Model *m, const int32_t *targets, const uint8_t *mask, size_t N, real scale, bool add) {
    size_t C = m->config.channels, VP = padded_vocab(&m->config);
    CrossEntropy ce = {m->config.vocab, VP, (real)m->config.logit_softcap, m->z_loss, scale};
    const Activations *a = &m->activations;
    WeightMatrix head = weight(m, m->list.head);
    double sum = 0;
    phase(PHASE_CLASSIFIER);
    for (size_t from = 0; from < N; from += LOSS_ROWS) {
        size_t rows = smaller(N - from, LOSS_ROWS);
        MatmulInput h = from_element(a->h, from * C);
        matmul_forward(a->logits, h, head, rows, C, VP, false);
        crossentropy(a->losses + from, a->logits, targets + from, mask ? mask + from : NULL, rows, ce);
        if (scale != 0)
            matmul_backward(a->dh + from * C, m->grads + m->list.head, in_f32(a->logits), h, head, rows, C, VP,
                            add || from > 0);
    }
    for (size_t n = 0; n < N; n++) sum += a->losses[n];
    phase(PHASE_OTHER);
    return sum;
}

// Computes the gradients of all parameters except the output projection from dh and the other activations. Writes the
// gradients of weight matrices, or adds to them if `add`; always adds to the others. Recomputes what the forward pass
// did not keep (normalized inputs, swiglu's output).
static void model_backward(Model *m, const int32_t *tokens, size_t B, size_t T, bool add) {
    size_t N = B * T, C = m->config.channels, layers = m->config.layers;
    const Activations *a = &m->activations;
    phase(PHASE_NORM);
    memset(a->dx, 0, FLOATS(N * C));
    rmsnorm_backward(a->dx, m->grads + m->list.norm, a->dh, residual(m, layers), m->params + m->list.norm, a->r, N, C,
                     norm_eps(m));
    for (size_t l = layers; l-- > 0;) block_of(m)->backward(m, l, B, T, add);
    phase(PHASE_EMBEDDING);
    embedding_backward(m->grads + m->list.embedding, a->dx, tokens, N, C);
    phase(PHASE_OTHER);
}

// Call before the first micro-batch of a step. Clears only the gradients that the passes add to; matmuls overwrite
// theirs.
static void model_zero_gradients(Model *m) {
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        bool added_to = t->ndim == 1 || (t->offset == m->list.embedding && !m->config.tied);
        if (added_to) memset(m->grads + t->offset, 0, FLOATS(t->elements));
    }
}

// Runs one micro-batch and returns the sum of its losses. Adds the gradients of scale times that sum to m->grads;
// `first` marks the first micro-batch of a step.
static double model_step(Model *m, const int32_t *inputs, const int32_t *targets, const uint8_t *mask, size_t B,
                         size_t T, real scale, bool first) {
    if (first) model_zero_gradients(m);
    model_forward(m, inputs, B, T);
    double sum = model_loss(m, targets, mask, B * T, scale, !first);
    model_backward(m, inputs, B, T, !first);
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Update

// Writes the sums of squares of pieces of each trained tensor to m->sums, in double. Returns their number.
//   of   an array of all parameters or gradients
static size_t sum_squares(const Model *m, const real *of) {
    size_t at = 0;
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        const real *x = of + t->offset;
        size_t pieces = sum_pieces(t->elements);
        if (!tensor_trained(t, &m->config.attn)) continue;
        #pragma omp parallel for schedule(static) if (pieces > 1)
        for (size_t p = 0; p < pieces; p++) {
            size_t to = smaller((p + 1) * SUM_PIECE, t->elements);
            double sum = 0;
            #pragma omp simd reduction(+ : sum)
            for (size_t j = p * SUM_PIECE; j < to; j++) sum += (double)x[j] * x[j];
            m->sums[at + p] = sum;
        }
        at += pieces;
    }
    return at;
}

// The Euclidean norm of all gradients
static double gradient_norm(const Model *m) {
    size_t pieces = sum_squares(m, m->grads);
    double sum = 0;
    for (size_t p = 0; p < pieces; p++) sum += m->sums[p];
    return sqrt(sum);
}

// g = grad · scale,  m = b1 m + (1 − b1) g,  v = b2 v + (1 − b2) g²,
// p −= lr (m/(1 − b1^t) / (sqrt(v/(1 − b2^t)) + eps) + wd p)
//   param, mean, square (n) updated   grad (n)   rounded (n): receives p in bf16 unless NULL
// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
static void adamw(real *param, real *mean, real *square, uint16_t *rounded, const real *grad, size_t n, real scale,
                  AdamW a) {
    real b1 = (real)a.beta1, b2 = (real)a.beta2, eps = (real)a.eps;
    real one_b1 = (real)(1 - a.beta1), one_b2 = (real)(1 - a.beta2);
    real rate = (real)(a.lr / (1 - pow(a.beta1, (double)a.step)));
    real square_scale = (real)(1 / (1 - pow(a.beta2, (double)a.step)));
    real keep = (real)(1 - a.lr * a.weight_decay);
    enum { CHUNK = 4096 };    // rounded while they are still in the cache
    #pragma omp parallel for schedule(static) if (n > 2 * CHUNK)
    for (size_t from = 0; from < n; from += CHUNK) {
        size_t to = smaller(from + CHUNK, n);
        #pragma omp simd
        for (size_t i = from; i < to; i++) {
            real g = grad[i] * scale;
            real mean_i = b1 * mean[i] + one_b1 * g;
            real square_i = b2 * square[i] + one_b2 * g * g;
            mean[i] = mean_i;
            square[i] = square_i;
            param[i] = keep * param[i] - rate * mean_i / (real_sqrt(square_i * square_scale) + eps);
        }
        if (!rounded) continue;
        #pragma omp simd
        for (size_t i = from; i < to; i++) rounded[i] = bf16_from_float(param[i]);
    }
}

static void adamw_update(Model *m, const Tensor *t, real scale, AdamW a) {
    size_t at = t->offset;
    if (!t->decay) a.weight_decay = 0;
    adamw(m->params + at, m->state[STATE_MEAN] + at, m->state[STATE_SQUARE] + at,
          m->params_bf16 ? m->params_bf16 + at : NULL, m->grads + at, t->elements, scale, a);
}

// Updates the momentum and writes u to x (n). Returns |u|, summed in double.
//   x, momentum (n)   grad (n)   sums (sum_pieces(n)) scratch
static double muon_momentum(real *x, real *momentum, const real *grad, size_t n, real scale, double *sums) {
    const real rest = (real)(1 - MUON_MOMENTUM);
    size_t pieces = sum_pieces(n);
    #pragma omp parallel for schedule(static) if (pieces > 1)
    for (size_t p = 0; p < pieces; p++) {
        size_t to = smaller((p + 1) * SUM_PIECE, n);
        double sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t i = p * SUM_PIECE; i < to; i++) {
            real g = grad[i] * scale, m = momentum[i] + rest * (g - momentum[i]);
            momentum[i] = m;
            x[i] = m - rest * (m - g);
            sum += (double)x[i] * x[i];
        }
        sums[p] = sum;
    }
    double sum = 0;
    for (size_t p = 0; p < pieces; p++) sum += sums[p];
    return sqrt(sum);
}

// z = a x + b y
//   z, x, y (n); z may be x or y
static void combine(real *z, double a, const real *x, double b, const real *y, size_t n) {
    real a_ = (real)a, b_ = (real)b;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) z[i] = a_ * x[i] + b_ * y[i];
}

// A round of Newton-Schulz: y = a x + (b A + c A²) x with A = x xᵀ; if R > C, the same for the transposed matrices.
//   y, x (R,C)
static void muon_round(const Model *m, real *y, const real *x, size_t R, size_t C) {
    bool tall = R > C;
    size_t S = tall ? C : R;
    real *gram = m->muon.gram, *step = m->muon.step;
    Matrix X = {x, NULL, C, false}, X_T = {x, NULL, C, true}, A = {gram, NULL, S, false}, B = {step, NULL, S, false};
    gemm_run(&m->mm, S, S, tall ? R : C, tall ? X_T : X, tall ? X : X_T, 0, gram, S);
    gemm_run(&m->mm, S, S, S, A, A, 0, step, S);
    combine(step, MUON_B, gram, MUON_C, step, S * S);
    combine(y, MUON_A, x, 0, x, R * C);
    gemm_run(&m->mm, R, C, S, tall ? X : B, tall ? B : X, 1, y, C);
}

// One step of Muon (math/muon.h) for a matrix. The rounds alternate between two buffers, one of which is the state
// array that Muon does not keep.
static void muon_update(Model *m, const Tensor *t, real scale, AdamW a) {
    real *x = m->state[STATE_SQUARE] + t->offset, *y = m->muon.x, *param = m->params + t->offset;
    size_t R = t->shape[0], C = t->shape[1], n = t->elements;
    double norm = muon_momentum(x, m->state[STATE_MEAN] + t->offset, m->grads + t->offset, n, scale, m->sums);
    combine(x, 1 / fmax(norm, MUON_EPS), x, 0, x, n);
    for (int i = 0; i < MUON_ROUNDS; i++) {
        real *from = x;
        muon_round(m, y, from, R, C);
        x = y;
        y = from;
    }
    combine(param, 1 - a.lr * a.weight_decay, param, -muon_rate(a.lr, R, C), x, n);
    if (!m->params_bf16) return;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) m->params_bf16[t->offset + i] = bf16_from_float((float)param[i]);
}

// Every gradient is multiplied by `scale`.
static void model_update(Model *m, double scale, AdamW a) {
    static void (*const UPDATES[])(Model *m, const Tensor *t, real scale, AdamW a) = {UPDATE_RULES(UPDATE_FUNCTION)};
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        AdamW scaled = a;
        scaled.lr *= t->lr_scale;
        if (tensor_trained(t, &m->config.attn)) UPDATES[t->update](m, t, (real)scale, scaled);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
#ifndef WITHOUT_MAIN
// 5. Training

#include "model/decode.h"

static const RunProgram PROGRAM = {
    .name = "train_gpt2",
    .usage = "Usage: train_gpt2 --train-data GLOB [flags]\n\n"
             "Trains a GPT on the CPU. To run N ranks: scripts/launch.sh N ./train_gpt2 ...",
};

static void describe_matmuls(char *out, size_t size, const Gemm *mm) {
    int threads = omp_get_max_threads();
    bool tiles = tiles_are_bf16(mm->tiles), widened = mm->bf16 && !tiles && !mm->native;
    snprintf(out, size, "matmuls   %s by %s%s, %d thread%s on %d rank%s", mm->bf16 ? "bfloat16" : "float32",
             tiles ? tiles_name(mm->tiles) : gemm_library().name,
             widened ? " (widened to float32: no bfloat16 matmuls on this CPU)" : "", threads, threads == 1 ? "" : "s",
             process.size, process.size == 1 ? "" : "s");
}

static void plan_training(Model *m, Decoder *d, const Run *run) {
    bool bf16 = run->o.dtype == TRAIN_BF16;
    m->list = run_tensors(run);
    m->doc_mask = run->o.doc_mask;
    m->z_loss = (real)run->o.z_loss;
    m->others = run->others;
    m->other_count = run->other_count;
    gemm_start(&m->mm, bf16);
    plan_parameters(m, true, bf16);
    plan_activations(m, m->config.layers, (size_t)run->o.batch, run->T);
    for (size_t i = 0; i < run->o.seq_len.count; i++) {
        size_t T = (size_t)run->o.seq_len.values[i];
        plan_shape(m, (size_t)run->o.batch * (run->T / T), T);
    }
    if (run_sample_length(run)) plan_decoder(d, m, &m->plan, 1, run_sample_length(run), 0);
}

// The peak FLOP/s of all ranks. Ranks on one machine may together have more threads than it has cores. *best: see
// peak_flops().
static double peak_of(const Model *m, double *best) {
    int threads = omp_get_max_threads() * process.local_size, cores = cores_available();
    double flops = peak_flops(best, m->params_bf16 != NULL) * (threads > cores ? (double)cores / threads : 1.0);
    process_sum_double(&flops, 1);
    return flops;
}

// The time between pause_step() and its counterpart belongs to no step.
static void pause_step(Run *run) {
    run_pause(run);
    phase(PHASE_ASIDE);
    aside = true;
}

static void unpause_step(Run *run) {
    aside = false;
    phase(PHASE_OTHER);
    run_unpause(run);
}

// The sum of the losses of a batch, without gradients.
static double model_evaluate(Model *m, const Batch *batch) {
    uint64_t rows = m->rows, all_zero = m->all_zero_rows;
    if (batch->B == 0) return 0;
    model_forward(m, batch->inputs, batch->B, batch->T);
    double loss = model_loss(m, batch->targets, batch->mask, batch->B * batch->T, 0, false);
    m->rows = rows;
    m->all_zero_rows = all_zero;
    return loss;
}

// Returns false if a stop was requested during the validation.
static bool validate(Run *run, Model *m, double *loss) {
    Batch batch;
    run_validation_start(run);
    while (run_validation_batch(run, &batch)) run_validation_add(run, model_evaluate(m, &batch));
    return run_validation_end(run, loss);
}

static void change_normalizer(Run *run, Model *m, Change *change) {
    model_ready(m);
    if (run->val && !validate(run, m, &change->before)) return;
    run_change_apply(run, change);
    model_ready(m);
    round_parameters(m);
    if (!run->val || validate(run, m, &change->after)) {
        run_change_finish(run, change);
    } else {
        run_change_undo(run, change);
        model_ready(m);
        round_parameters(m);
    }
}

static void change_normalizers(Run *run, Model *m) {
    Change change;
    pause_step(run);
    while (run_change_due(run, &change)) change_normalizer(run, m, &change);
    unpause_step(run);
}

// For --norms-every
static void measure_norms(Run *run, Model *m) {
    pause_step(run);
    run_norms_start(run);
    for (int kind = 0; kind < NORMS_KINDS; kind++) {
        const double *piece = m->sums;
        sum_squares(m, kind == NORMS_OF_GRADIENT ? m->grads : m->params);
        for (size_t i = 0; i < m->list.count; i++) {
            const Tensor *t = &m->list.tensors[i];
            double sum = 0;
            if (!tensor_trained(t, &m->config.attn)) continue;
            for (size_t p = sum_pieces(t->elements); p > 0; p--) sum += *piece++;
            run_norms_add(run, (NormsOf)kind, t, sum);
        }
    }
    unpause_step(run);
}

static void draw_sample(Run *run, Decoder *d) {
    Sample sample;
    run_sample_start(run, &sample);
    decoder_ready(d);
    float *logits = decode_prompt(d, sample.ids, sample.count, 0);
    while (run_sample_add(run, &sample, logits)) {
        size_t last = sample.count - 1;
        decode(d, &(DecodeRow){sample.ids[last], 0, last}, 1);
        logits = decode_logits(d, 0, 1, 0);
    }
    run_sample_end(run, &sample);
}

static int end(Run *run, Model *m) {
    gemm_end(&m->mm);
    return run_end(run);
}

int main(int argc, char **argv) {
    static Run run;
    static Model model;
    static Decoder decoder;
    const TrainOptions *o = &run.o;
    char matmuls[256];
    double loss, norm, best_peak = 0, first_step[PHASE_COUNT] = {0};
    Batch batch;

    // Parse and check the flags, then plan and check the memory. Nothing is written yet.
    run_open(&run, &PROGRAM, &model.config, argc, argv);
    plan_training(&model, &decoder, &run);
    describe_matmuls(matmuls, sizeof matmuls, &model.mm);
    run_plan(&run, &model.plan, matmuls, NULL, 0);
    if (!run_take(&run)) return end(&run, &model);

    model_ready(&model);
    run_load(&run, weights_of(&model));
    round_parameters(&model);
    run_begin(&run, peak_of(&model, &best_peak));

    // Switch now if --attn differs from the normalizer of --init-from, or if --attn-switch names step 0.
    change_normalizers(&run, &model);
    while (run_continues(&run)) {
        if (!run.owed) {    // otherwise the run stopped between a step and its validation
            for (loss = 0; run_batch(&run, &batch);) {
                double start = now();
                loss += model_step(&model, batch.inputs, batch.targets, batch.mask, batch.B, batch.T, batch.scale,
                                   batch.first);
                model.seconds += now() - start;
            }
            if (run.stopped) break;

            phase(PHASE_REDUCE);
            process_sum_float(model.grads, model.list.floats);
            process_sum_double(&loss, 1);
            phase(PHASE_UPDATE);
            norm = gradient_norm(&model);
            AdamW update = run_update(&run);
            run_check_step(&run, loss, norm);
            model_update(&model, clip_scale(norm, o->grad_clip), update);
            phase(PHASE_OTHER);
            run_step_done(&run, model.seconds, model.rows, model.all_zero_rows);
            model.rows = model.all_zero_rows = 0;
            model.seconds = 0;
            if (run_norms_due(&run)) measure_norms(&run, &model);
        }

        pause_step(&run);
        if (run_validation_due(&run) && validate(&run, &model, &loss)) run_validated(&run, loss);
        unpause_step(&run);
        if (run.stopped) break;
        run_report(&run, "", "");
        if (run.step == run.first_step + 1) memcpy(first_step, phase_seconds, sizeof first_step);

        pause_step(&run);
        if (run_sample_due(&run)) draw_sample(&run, &decoder);
        if (run_finish_step(&run)) run_save(&run);
        // Measure the peak again while the processor's clock settles.
        if (run.step <= run.first_step + 3) run.flops = peak_of(&model, &best_peak);
        unpause_step(&run);
        change_normalizers(&run, &model);
    }

    if (run_save_due_at_end(&run)) run_save(&run);
    if (run_validation_due_at_end(&run) && validate(&run, &model, &loss)) run_validated_at_end(&run, loss);
    if (o->profile && run.step > run.first_step)
        profile_print(&run.progress, phase_seconds, first_step, run.step - run.first_step);
    return end(&run, &model);
}
#endif

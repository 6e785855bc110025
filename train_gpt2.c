// Trains a Llama-style GPT on the CPU, with an attention whose normaliser is a flag. To be read from top to bottom:
//
//   1. Layers       each forward above its backward, in the order in which the network uses them
//   2. Model        the parameters, the activations, and the memory for both
//   3. Passes       forward, loss, backward
//   4. Update       the gradient's norm and AdamW
//   5. Decoding     one token after another with a key-value cache, for samples
//   6. Weights: the first ones, and those in checkpoints
//   7. The run      flags, data, validation, steps, main()
//
// Beside it: attention/ has the normalisers, model.h the tensors, runtime/ everything that a trainer stands on.
// Shapes: B sequences, T tokens each, N = B·T rows, C channels, NH heads of size HS, F the feed-forward's width, V the vocabulary
// (VP when padded).

#include <errno.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "attention/attention_cpu.h"
#include "attention/modeling.h"
#include "model.h"
#include "runtime/checkpoint.h"
#include "runtime/file.h"
#include "runtime/gemm.h"
#include "runtime/human.h"
#include "runtime/json.h"
#include "runtime/memory.h"
#include "runtime/metrics.h"
#include "runtime/peak.h"
#include "runtime/process.h"
#include "runtime/random.h"
#include "runtime/real.h"
#include "runtime/run.h"
#include "runtime/safetensors.h"
#include "runtime/sampler.h"
#include "runtime/schedule.h"
#include "runtime/shards.h"
#include "runtime/tokenizer.h"
#include "runtime/train_options.h"

// ---------------------------------------------------------------------------------------------------------------------------
// Where the time goes: phase() ends the phase before it and starts the next. --profile prints the sums.

#define PHASES(X) \
    X(OTHER, "data, metrics and the rest") X(EMBEDDING, "embedding") X(NORM, "rmsnorm") X(PROJECTIONS, "q, k, v and o products") \
    X(ROPE, "rope") X(ATTENTION, "attention") X(FEED_FORWARD, "feed-forward products") X(SWIGLU, "swiglu") \
    X(GATE, "gate of gated units")     X(CLASSIFIER, "output product and loss") X(REDUCE, "gradients summed over processes") X(UPDATE, "norm and AdamW")
#define PHASE_KIND(kind, name) PHASE_##kind,
#define PHASE_NAME(kind, name) name,
typedef enum { PHASES(PHASE_KIND) PHASE_COUNT } Phase;
static double phase_seconds[PHASE_COUNT];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void phase(Phase next) {
    static Phase current = PHASE_OTHER;
    static double since;
    double t = now();
    if (since > 0) phase_seconds[current] += t - since;
    since = t;
    current = next;
}

// ---------------------------------------------------------------------------------------------------------------------------
// 1. Layers

// out[n,c] = weight[tokens[n],c]
//   out (N,C) written   weight (V,C)   tokens (N)
static void embedding_forward(real *out, const real *weight, const int32_t *tokens, size_t N, size_t C) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) memcpy(out + n * C, weight + (size_t)tokens[n] * C, C * sizeof *out);
}

// dweight[tokens[n],c] += dout[n,c]
//   dweight (V,C) added to   dout (N,C)
// A token may occur several times: each thread has some of the channels and goes through all rows in order, so that the sums
// are the same for any number of threads.
static void embedding_backward(real *dweight, const real *dout, const int32_t *tokens, size_t N, size_t C) {
    enum { PART = 64 };
    #pragma omp parallel for schedule(static)
    for (size_t from = 0; from < C; from += PART) {
        size_t to = from + PART < C ? from + PART : C;
        for (size_t n = 0; n < N; n++) {
            real *row = dweight + (size_t)tokens[n] * C;
            #pragma omp simd
            for (size_t c = from; c < to; c++) row[c] += dout[n * C + c];
        }
    }
}

static real rms_inverse(const real *x, size_t C) {
    real sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (size_t c = 0; c < C; c++) sum += x[c] * x[c];
    return 1 / real_sqrt(sum / (real)C + RMSNORM_EPS);
}

// out[n,c] = inp[n,c] · r_n · weight[c],  r_n = 1/sqrt(mean_c inp[n,c]² + eps)
//   out (N,C) written   inp (N,C)   weight (C)
static void rmsnorm_forward(real *out, const real *inp, const real *weight, size_t N, size_t C) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        real r = rms_inverse(inp + n * C, C);
        #pragma omp simd
        for (size_t c = 0; c < C; c++) out[n * C + c] = inp[n * C + c] * r * weight[c];
    }
}

// dinp[n,c] += r_n (w[c] dout[n,c] − inp[n,c] r_n² mean_c(dout w inp)),   dweight[c] += sum_n dout[n,c] inp[n,c] r_n
//   dinp (N,C) added to   dweight (C) added to   dout, inp (N,C)   weight (C)   r (N) scratch
static void rmsnorm_backward(real *dinp, real *dweight, const real *dout, const real *inp, const real *weight, real *r,
                             size_t N, size_t C) {
    enum { PART = 64 };
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const real *x = inp + n * C, *dy = dout + n * C;
        real *dx = dinp + n * C, dot = 0;
        r[n] = rms_inverse(x, C);
        #pragma omp simd reduction(+ : dot)
        for (size_t c = 0; c < C; c++) dot += dy[c] * weight[c] * x[c];
        real r_n = r[n], k = r_n * r_n * dot / (real)C;
        #pragma omp simd
        for (size_t c = 0; c < C; c++) dx[c] += r_n * (weight[c] * dy[c] - x[c] * k);
    }
    #pragma omp parallel for schedule(static)
    for (size_t from = 0; from < C; from += PART) {
        size_t to = from + PART < C ? from + PART : C;
        for (size_t n = 0; n < N; n++) {
            #pragma omp simd
            for (size_t c = from; c < to; c++) dweight[c] += dout[n * C + c] * inp[n * C + c] * r[n];
        }
    }
}

// out[n,o] = sum_c inp[n,c] weight[o,c] (+ out[n,o] when add)
//   out (N,OC) written or added to   inp (N,C)   weight (OC,C); its bfloat16 copy is used where there is one
static void matmul_forward(real *out, const real *inp, Operand weight, size_t N, size_t C, size_t OC, bool add) {
    real beta = add ? 1 : 0;
    if (weight.bf16)
        gemm_bf16('N', 'T', N, OC, C, (Operand){.f32 = inp}, C, weight, C, beta, out, OC);
    else
        gemm('N', 'T', N, OC, C, inp, C, weight.f32, C, beta, out, OC);
}

// dinp[n,c] = sum_o dout[n,o] weight[o,c],   dweight[o,c] = sum_n dout[n,o] inp[n,c] (+ dweight[o,c] when add)
//   dinp (N,C) written   dweight (OC,C) written or added to   dout (N,OC)   inp (N,C)
static void matmul_backward(real *dinp, real *dweight, const real *dout, const real *inp, Operand weight, size_t N, size_t C,
                            size_t OC, bool add) {
    real beta = add ? 1 : 0;
    if (weight.bf16) {
        gemm_bf16('N', 'N', N, C, OC, (Operand){.f32 = dout}, OC, weight, C, 0, dinp, C);
        gemm_bf16('T', 'N', OC, C, N, (Operand){.f32 = dout}, OC, (Operand){.f32 = inp}, C, beta, dweight, C);
    } else {
        gemm('N', 'N', N, C, OC, dout, OC, weight.f32, C, 0, dinp, C);
        gemm('T', 'N', OC, C, N, dout, OC, inp, C, beta, dweight, C);
    }
}

// cos and sin (T,HS/2) of t · theta^(−2i/HS)
static void rope_table(real *cosines, real *sines, size_t T, size_t HS, double theta) {
    #pragma omp parallel for schedule(static)
    for (size_t t = 0; t < T; t++) {
        for (size_t i = 0; i < HS / 2; i++) {
            double angle = (double)t * pow(theta, -2.0 * (double)i / (double)HS);
            cosines[t * (HS / 2) + i] = (real)cos(angle);
            sines[t * (HS / 2) + i] = (real)sin(angle);
        }
    }
}

// Rotates each pair (x[i], x[i + HS/2]) of a head by its position's angle: the half-split convention. out may be x.
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

// q, k rotated by their positions and v as it is, each head's rows brought together
//   q, k, v (B,NH,T,HS) written   qkv (B,T,3,NH,HS)   cosines, sines (T,HS/2)
static void rope_forward(real *q, real *k, real *v, const real *qkv, const real *cosines, const real *sines, size_t B, size_t T,
                         size_t NH, size_t HS) {
    size_t C = NH * HS;
    #pragma omp parallel for collapse(2) schedule(static)
    for (size_t b = 0; b < B; b++) {
        for (size_t t = 0; t < T; t++) {
            const real *row = qkv + (b * T + t) * 3 * C, *cos_t = cosines + t * (HS / 2), *sin_t = sines + t * (HS / 2);
            for (size_t h = 0; h < NH; h++) {
                size_t to = ((b * NH + h) * T + t) * HS;
                rotate(q + to, row + h * HS, cos_t, sin_t, HS);
                rotate(k + to, row + C + h * HS, cos_t, sin_t, HS);
                memcpy(v + to, row + 2 * C + h * HS, HS * sizeof *v);
            }
        }
    }
}

//   dqkv (B,T,3,NH,HS) written   dq, dk, dv (B,NH,T,HS)
static void rope_backward(real *dqkv, const real *dq, const real *dk, const real *dv, const real *cosines, const real *sines,
                          size_t B, size_t T, size_t NH, size_t HS) {
    size_t C = NH * HS;
    #pragma omp parallel for collapse(2) schedule(static)
    for (size_t b = 0; b < B; b++) {
        for (size_t t = 0; t < T; t++) {
            real *row = dqkv + (b * T + t) * 3 * C;
            const real *cos_t = cosines + t * (HS / 2), *sin_t = sines + t * (HS / 2);
            for (size_t h = 0; h < NH; h++) {
                size_t from = ((b * NH + h) * T + t) * HS;
                rotate_back(row + h * HS, dq + from, cos_t, sin_t, HS);
                rotate_back(row + C + h * HS, dk + from, cos_t, sin_t, HS);
                memcpy(row + 2 * C + h * HS, dv + from, HS * sizeof *dv);
            }
        }
    }
}

// out[n,f] = silu(gate[n,f]) · up[n,f],  silu(x) = x sigmoid(x)
//   out (N,F) written   gate_up (N,2F): gate, then up
static void swiglu_forward(real *out, const real *gate_up, size_t N, size_t F) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const real *gate = gate_up + n * 2 * F, *up = gate + F;
        #pragma omp simd
        for (size_t f = 0; f < F; f++) out[n * F + f] = gate[f] * real_sigmoid(gate[f]) * up[f];
    }
}

// dgate = dout · up · sigmoid(gate) (1 + gate (1 − sigmoid(gate))),   dup = dout · silu(gate)
//   dgate_up (N,2F) written   dout (N,F)   gate_up (N,2F)
static void swiglu_backward(real *dgate_up, const real *dout, const real *gate_up, size_t N, size_t F) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const real *gate = gate_up + n * 2 * F, *up = gate + F, *dy = dout + n * F;
        real *dgate = dgate_up + n * 2 * F, *dup = dgate + F;
        #pragma omp simd
        for (size_t f = 0; f < F; f++) {
            real sigmoid = real_sigmoid(gate[f]);
            dgate[f] = dy[f] * up[f] * sigmoid * (1 + gate[f] * (1 - sigmoid));
            dup[f] = dy[f] * gate[f] * sigmoid;
        }
    }
}

// ---- the gated attention unit (SPEC: uvz = rmsnorm(x)·[Wu Wv Wz]ᵀ, out = (silu(u) · attention(q, k, silu(v)))·Woᵀ)
// E the width of u and v, HS the width of z, q and k.

// The learnt gain and offset of q and k, each (HS): q = silu(z) · q_gain + q_offset.
typedef struct {
    real *q_gain, *q_offset, *k_gain, *k_offset;
} GauGains;

static inline void silu_both(real x, real *value, real *slope) {
    real sigmoid = real_sigmoid(x);
    *value = x * sigmoid;
    *slope = sigmoid * (1 + x * (1 - sigmoid));
}

//   q, k (B,T,HS), v (B,T,E) written   uvz (B,T,2E+HS)   cosines, sines (T,HS/2)
static void gau_forward(real *q, real *k, real *v, const real *uvz, GauGains gains, const real *cosines, const real *sines, size_t B, size_t T,
                        size_t E, size_t HS) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < B * T; n++) {
        const real *v_in = uvz + n * (2 * E + HS) + E, *z = v_in + E, *cos_t = cosines + n % T * (HS / 2), *sin_t = sines + n % T * (HS / 2);
        real *q_n = q + n * HS, *k_n = k + n * HS;
        #pragma omp simd
        for (size_t e = 0; e < E; e++) v[n * E + e] = v_in[e] * real_sigmoid(v_in[e]);
        #pragma omp simd
        for (size_t c = 0; c < HS; c++) {
            real silu = z[c] * real_sigmoid(z[c]);
            q_n[c] = silu * gains.q_gain[c] + gains.q_offset[c];
            k_n[c] = silu * gains.k_gain[c] + gains.k_offset[c];
        }
        rotate(q_n, q_n, cos_t, sin_t, HS);
        rotate(k_n, k_n, cos_t, sin_t, HS);
    }
}

//   duvz (B,T,2E+HS) written but for u's part   grads added to   dq, dk (B,T,HS): rotated back in place   dv (B,T,E)
static void gau_backward(real *duvz, GauGains grads, real *dq, real *dk, const real *dv, const real *uvz, GauGains gains, const real *cosines,
                         const real *sines, size_t B, size_t T, size_t E, size_t HS) {
    enum { PART = 16 };
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < B * T; n++) {
        size_t at = n * (2 * E + HS) + E;
        const real *v_in = uvz + at, *z = v_in + E, *cos_t = cosines + n % T * (HS / 2), *sin_t = sines + n % T * (HS / 2);
        real *dv_in = duvz + at, *dz = dv_in + E, *dq_n = dq + n * HS, *dk_n = dk + n * HS;
        rotate_back(dq_n, dq_n, cos_t, sin_t, HS);
        rotate_back(dk_n, dk_n, cos_t, sin_t, HS);
        #pragma omp simd
        for (size_t e = 0; e < E; e++) {
            real value, slope;
            silu_both(v_in[e], &value, &slope);
            dv_in[e] = dv[n * E + e] * slope;
        }
        #pragma omp simd
        for (size_t c = 0; c < HS; c++) {
            real value, slope;
            silu_both(z[c], &value, &slope);
            dz[c] = (dq_n[c] * gains.q_gain[c] + dk_n[c] * gains.k_gain[c]) * slope;
        }
    }
    #pragma omp parallel for schedule(static)
    for (size_t from = 0; from < HS; from += PART) {             // each thread some of the channels, through all rows in order
        for (size_t n = 0; n < B * T; n++) {
            const real *z = uvz + n * (2 * E + HS) + 2 * E, *dq_n = dq + n * HS, *dk_n = dk + n * HS;
            #pragma omp simd
            for (size_t c = from; c < from + PART; c++) {
                real silu = z[c] * real_sigmoid(z[c]);
                grads.q_gain[c] += dq_n[c] * silu;
                grads.k_gain[c] += dk_n[c] * silu;
                grads.q_offset[c] += dq_n[c];
                grads.k_offset[c] += dk_n[c];
            }
        }
    }
}

// out[n,e] = silu(u[n,e]) · att[n,e]
//   out (N,E) written   uvz (N,W), its first E columns u   att (N,E)
static void gau_gate_forward(real *out, const real *uvz, const real *att, size_t N, size_t E, size_t W) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const real *u = uvz + n * W;
        #pragma omp simd
        for (size_t e = 0; e < E; e++) out[n * E + e] = u[e] * real_sigmoid(u[e]) * att[n * E + e];
    }
}

//   datt (N,E) written   duvz (N,W): u's part written   dout (N,E)
static void gau_gate_backward(real *datt, real *duvz, const real *dout, const real *uvz, const real *att, size_t N, size_t E, size_t W) {
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

// loss[n] = logsumexp(logits[n]) − logits[n,targets[n]];  with `scale` not 0 the logits become their gradient, scale (softmax − onehot)
//   losses (N) written   logits (N,VP) in, gradient out, 0 past V   targets (N)   mask (N) or NULL: rows with 0 do not count
static void crossentropy(real *losses, real *logits, const int32_t *targets, const uint8_t *mask, size_t N, size_t V, size_t VP,
                         real scale) {
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        real *row = logits + n * VP, largest = -INFINITY, sum = 0;
        losses[n] = 0;
        if (mask && !mask[n]) {
            if (scale != 0) memset(row, 0, VP * sizeof *row);
            continue;
        }
        real target = row[targets[n]];
        #pragma omp simd reduction(max : largest)
        for (size_t v = 0; v < V; v++) largest = row[v] > largest ? row[v] : largest;
        if (scale == 0) {
            #pragma omp simd reduction(+ : sum)
            for (size_t v = 0; v < V; v++) sum += real_exp(row[v] - largest);
        } else {
            #pragma omp simd reduction(+ : sum)
            for (size_t v = 0; v < V; v++) {
                row[v] = real_exp(row[v] - largest);
                sum += row[v];
            }
            real factor = scale / sum;
            #pragma omp simd
            for (size_t v = 0; v < V; v++) row[v] *= factor;
            row[targets[n]] -= scale;
            memset(row + V, 0, (VP - V) * sizeof *row);
        }
        losses[n] = real_log(sum) + largest - target;
    }
}

// ---------------------------------------------------------------------------------------------------------------------------
// 2. Model

enum { LOSS_ROWS = 512 };          // rows whose logits stand in memory at a time, 103 MB of GPT-2's

typedef struct {
    ModelConfig config;
    TensorList list;
    real *params, *grads, *mean, *square;       // list.floats each; the last three are NULL for a model that only generates
    uint16_t *params_bf16;                       // a rounded copy for the products, with --dtype bf16

    size_t B, T;                                 // what the activations have room for: B·T rows, sequences of at most T
    // E is the width of all heads' values: C, or a gated unit's F; K that of their q and k: C, or a unit's GAU_HEAD.
    real *x;             // (layers + 1, N, C)   the residual stream, before each layer and at the end
    real *q, *k, *v;     // (layers, N, K or E)  by head, after RoPE
    real *stats;         // (layers, N·NH, ROW_STATS) of the rows of attention
    real *att;           // (layers, N, E)       attention's output
    real *x_mid;         // (layers, N, C)       the residual stream between attention and feed-forward
    real *gate_up;       // (layers, N, 2F)
    real *uvz;           // (layers, N, 2F + K)  of gated units, which have neither x_mid nor gate_up

    real *h;            // (N, C)               a normalised input
    real *qkv;          // (N, 3C)              and its gradient; of gated units that of uvz
    real *act;          // (N, F)
    real *logits;       // (LOSS_ROWS, VP)
    real *losses;       // (N)
    real *dx, *dh, *datt, *dact, *dgate_up;     // gradients of x, h, att, act, gate_up
    real *dq, *dk, *dv;
    real *rms;          // (N)
    real *attention;    // scratch of attention_cpu.c
    void *products;      // scratch of gemm_bf16
    real *cosines, *sines;                      // (T, HS/2)
    double *sums;        // partial sums of the gradient's norm

    uint64_t rows_without_weight, rows;          // of attention, since someone set them to 0
    MemoryPlan plan;
} Model;

static Operand weight(const Model *m, size_t offset) {
    return (Operand){.f32 = m->params + offset, .bf16 = m->params_bf16 ? m->params_bf16 + offset : NULL};
}

// The learnt scalars of a layer, in the parameters or in an array like theirs; NULL for those that the normaliser lacks.
static AttentionScalarGrads scalars_in(const Model *m, real *array, size_t layer, bool (*wanted)(const Normalizer *, Scalar)) {
    const LayerOffsets *at = &m->list.layers[layer];
    const Normalizer *attn = &m->config.attn;
    return (AttentionScalarGrads){wanted(attn, SCALAR_S) ? array + at->s : NULL, wanted(attn, SCALAR_B) ? array + at->b : NULL,
                                  wanted(attn, SCALAR_P) ? array + m->list.p : NULL, wanted(attn, SCALAR_SINK) ? array + at->sink : NULL};
}

static AttentionScalars scalars_of(const Model *m, size_t layer) {
    AttentionScalarGrads there = scalars_in(m, m->params, layer, normalizer_has);
    return (AttentionScalars){there.s, there.b, there.p, there.sink};
}

static GauGains gains_in(const Model *m, real *array, size_t layer) {
    const LayerOffsets *at = &m->list.layers[layer];
    return (GauGains){array + at->q_gain, array + at->q_offset, array + at->k_gain, array + at->k_offset};
}

static AttentionShape attention_shape(const ModelConfig *c, size_t B, size_t T) {
    return (AttentionShape){&c->attn, B, T, (size_t)c->heads, head_size(c), value_size(c), c->seq_len};
}

static size_t norm_chunks(const TensorList *list) {
    size_t count = 0;
    for (size_t i = 0; i < list->count; i++) count += (list->tensors[i].elements + (1 << 16) - 1) >> 16;
    return count;
}

#define FLOATS(n) ((size_t)(n) * sizeof(real))

// The widest inputs of a row to a product: of the first operand (a gradient or an activation), of the second in dweight.
static size_t widest_first(const ModelConfig *c) {
    size_t C = (size_t)c->channels, F = (size_t)c->ffn, joined = c->block == BLOCK_GAU ? 2 * F + GAU_HEAD : 3 * C;
    return joined > 2 * F ? joined : 2 * F;
}

static size_t widest_second(const ModelConfig *c) {
    return (size_t)(c->channels > c->ffn ? c->channels : c->ffn);
}

static void plan_parameters(Model *m, bool train, bool bf16) {
    size_t floats = m->list.floats;
    memory_add(&m->plan, "parameters", (void **)&m->params, FLOATS(floats));
    if (bf16) memory_add(&m->plan, "parameters in bfloat16", (void **)&m->params_bf16, floats * sizeof(uint16_t));
    if (!train) return;
    memory_add(&m->plan, "gradients", (void **)&m->grads, FLOATS(floats));
    memory_add(&m->plan, "AdamW's moments", (void **)&m->mean, FLOATS(floats));
    memory_add(&m->plan, "AdamW's moments", (void **)&m->square, FLOATS(floats));
    memory_add(&m->plan, "scratch", (void **)&m->sums, norm_chunks(&m->list) * sizeof(double));
}

static void plan_activations(Model *m, size_t B, size_t T, bool bf16) {
    const ModelConfig *c = &m->config;
    bool gau = c->block == BLOCK_GAU;
    size_t N = B * T, C = (size_t)c->channels, F = (size_t)c->ffn, VP = padded_vocab(c), L = (size_t)c->layers, NH = (size_t)c->heads;
    size_t HS = head_size(c), K = NH * HS, E = NH * value_size(c), W = gau ? 2 * F + K : 3 * C, loss_rows = N < LOSS_ROWS ? N : LOSS_ROWS;
    m->B = B;
    m->T = T;
    const char *kept = "activations kept for the backward pass", *scratch = "scratch";
    memory_add(&m->plan, kept, (void **)&m->x, FLOATS((L + 1) * N * C));
    memory_add(&m->plan, kept, (void **)&m->q, FLOATS(L * N * K));
    memory_add(&m->plan, kept, (void **)&m->k, FLOATS(L * N * K));
    memory_add(&m->plan, kept, (void **)&m->v, FLOATS(L * N * E));
    memory_add(&m->plan, kept, (void **)&m->stats, FLOATS(L * N * NH * ROW_STATS));
    memory_add(&m->plan, kept, (void **)&m->att, FLOATS(L * N * E));
    if (gau) {
        memory_add(&m->plan, kept, (void **)&m->uvz, FLOATS(L * N * W));
    } else {
        memory_add(&m->plan, kept, (void **)&m->x_mid, FLOATS(L * N * C));
        memory_add(&m->plan, kept, (void **)&m->gate_up, FLOATS(L * N * 2 * F));
        memory_add(&m->plan, scratch, (void **)&m->dgate_up, FLOATS(N * 2 * F));
    }
    memory_add(&m->plan, scratch, (void **)&m->h, FLOATS(N * C));
    memory_add(&m->plan, scratch, (void **)&m->qkv, FLOATS(N * W));
    memory_add(&m->plan, scratch, (void **)&m->act, FLOATS(N * F));
    memory_add(&m->plan, "logits of some rows", (void **)&m->logits, FLOATS(loss_rows * VP));
    memory_add(&m->plan, scratch, (void **)&m->losses, FLOATS(N));
    memory_add(&m->plan, scratch, (void **)&m->dx, FLOATS(N * C));
    memory_add(&m->plan, scratch, (void **)&m->dh, FLOATS(N * C));
    memory_add(&m->plan, scratch, (void **)&m->datt, FLOATS(N * E));
    memory_add(&m->plan, scratch, (void **)&m->dact, FLOATS(N * F));
    memory_add(&m->plan, scratch, (void **)&m->dq, FLOATS(N * K));
    memory_add(&m->plan, scratch, (void **)&m->dk, FLOATS(N * K));
    memory_add(&m->plan, scratch, (void **)&m->dv, FLOATS(N * E));
    memory_add(&m->plan, scratch, (void **)&m->rms, FLOATS(N));
    memory_add(&m->plan, scratch, (void **)&m->attention, FLOATS(attention_scratch(attention_shape(c, B, T), omp_get_max_threads())));
    memory_add(&m->plan, scratch, (void **)&m->cosines, FLOATS(T * HS / 2));
    memory_add(&m->plan, scratch, (void **)&m->sines, FLOATS(T * HS / 2));
    size_t largest_a = N * widest_first(c) > loss_rows * VP ? N * widest_first(c) : loss_rows * VP;
    if (bf16) memory_add(&m->plan, "scratch of bfloat16 products", &m->products, gemm_bf16_scratch(largest_a, N * widest_second(c)));
}

// After memory_take().
static void model_ready(Model *m) {
    const ModelConfig *c = &m->config;
    size_t N = m->B * m->T, logits = (N < LOSS_ROWS ? N : LOSS_ROWS) * padded_vocab(c);
    size_t largest_a = N * widest_first(c) > logits ? N * widest_first(c) : logits;
    if (m->products) gemm_bf16_use(m->products, largest_a, N * widest_second(c));
    rope_table(m->cosines, m->sines, m->T, head_size(c), c->rope_theta);
}

// ---------------------------------------------------------------------------------------------------------------------------
// 3. Passes

// The part of attention itself, the same in both blocks: q, k, v of the layer are there.
static void attention_layer_forward(Model *m, size_t l, size_t B, size_t T) {
    AttentionShape shape = attention_shape(&m->config, B, T);
    size_t rows = B * T * shape.NH, qk = l * rows * shape.HS, v = l * rows * shape.VS;
    phase(PHASE_ATTENTION);
    m->rows_without_weight += attention_forward(m->att + v, m->stats + l * rows * ROW_STATS, m->q + qk, m->k + qk, m->v + v, scalars_of(m, l),
                                                shape, m->attention);
    m->rows += rows;
}

// From m->datt to m->dq, m->dk, m->dv and the gradients of the learnt scalars.
static void attention_layer_backward(Model *m, size_t l, size_t B, size_t T) {
    AttentionShape shape = attention_shape(&m->config, B, T);
    size_t rows = B * T * shape.NH, qk = l * rows * shape.HS, v = l * rows * shape.VS;
    phase(PHASE_ATTENTION);
    attention_backward(m->dq, m->dk, m->dv, scalars_in(m, m->grads, l, normalizer_trains), m->datt, m->att + v, m->stats + l * rows * ROW_STATS,
                       m->q + qk, m->k + qk, m->v + v, scalars_of(m, l), shape, m->attention);
}

static void layer_forward(Model *m, size_t l, size_t B, size_t T) {
    const ModelConfig *c = &m->config;
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = (size_t)c->channels, F = (size_t)c->ffn, NH = (size_t)c->heads, HS = head_size(c), here = l * N * C;
    real *x = m->x + here, *x_mid = m->x_mid + here, *x_next = x + N * C, *gate_up = m->gate_up + l * N * 2 * F;
    phase(PHASE_NORM);
    rmsnorm_forward(m->h, x, m->params + at->norm1, N, C);
    phase(PHASE_PROJECTIONS);
    matmul_forward(m->qkv, m->h, weight(m, at->q), N, C, 3 * C, false);
    phase(PHASE_ROPE);
    rope_forward(m->q + here, m->k + here, m->v + here, m->qkv, m->cosines, m->sines, B, T, NH, HS);
    attention_layer_forward(m, l, B, T);
    phase(PHASE_PROJECTIONS);
    memcpy(x_mid, x, FLOATS(N * C));
    matmul_forward(x_mid, m->att + here, weight(m, at->o), N, C, C, true);

    phase(PHASE_NORM);
    rmsnorm_forward(m->h, x_mid, m->params + at->norm2, N, C);
    phase(PHASE_FEED_FORWARD);
    matmul_forward(gate_up, m->h, weight(m, at->gate), N, C, 2 * F, false);
    phase(PHASE_SWIGLU);
    swiglu_forward(m->act, gate_up, N, F);
    phase(PHASE_FEED_FORWARD);
    memcpy(x_next, x_mid, FLOATS(N * C));
    matmul_forward(x_next, m->act, weight(m, at->down), N, F, C, true);
}

// m->dx (N,C), the gradient by the residual stream, goes from after the layer to before it.
static void layer_backward(Model *m, size_t l, size_t B, size_t T, bool add) {
    const ModelConfig *c = &m->config;
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = (size_t)c->channels, F = (size_t)c->ffn, NH = (size_t)c->heads, HS = head_size(c), here = l * N * C;
    const real *x = m->x + here, *x_mid = m->x_mid + here, *gate_up = m->gate_up + l * N * 2 * F;
    real *grads = m->grads;
    phase(PHASE_SWIGLU);
    swiglu_forward(m->act, gate_up, N, F);
    phase(PHASE_FEED_FORWARD);
    matmul_backward(m->dact, grads + at->down, m->dx, m->act, weight(m, at->down), N, F, C, add);
    phase(PHASE_SWIGLU);
    swiglu_backward(m->dgate_up, m->dact, gate_up, N, F);
    phase(PHASE_NORM);
    rmsnorm_forward(m->h, x_mid, m->params + at->norm2, N, C);
    phase(PHASE_FEED_FORWARD);
    matmul_backward(m->dh, grads + at->gate, m->dgate_up, m->h, weight(m, at->gate), N, C, 2 * F, add);
    phase(PHASE_NORM);
    rmsnorm_backward(m->dx, grads + at->norm2, m->dh, x_mid, m->params + at->norm2, m->rms, N, C);

    phase(PHASE_PROJECTIONS);
    matmul_backward(m->datt, grads + at->o, m->dx, m->att + here, weight(m, at->o), N, C, C, add);
    attention_layer_backward(m, l, B, T);
    phase(PHASE_ROPE);
    rope_backward(m->qkv, m->dq, m->dk, m->dv, m->cosines, m->sines, B, T, NH, HS);
    phase(PHASE_NORM);
    rmsnorm_forward(m->h, x, m->params + at->norm1, N, C);
    phase(PHASE_PROJECTIONS);
    matmul_backward(m->dh, grads + at->q, m->qkv, m->h, weight(m, at->q), N, C, 3 * C, add);
    phase(PHASE_NORM);
    rmsnorm_backward(m->dx, grads + at->norm1, m->dh, x, m->params + at->norm1, m->rms, N, C);
}

static void unit_forward(Model *m, size_t l, size_t B, size_t T) {
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = (size_t)m->config.channels, E = (size_t)m->config.ffn, W = 2 * E + GAU_HEAD, qk = l * N * GAU_HEAD;
    real *x = m->x + l * N * C, *x_next = x + N * C, *uvz = m->uvz + l * N * W;
    phase(PHASE_NORM);
    rmsnorm_forward(m->h, x, m->params + at->norm1, N, C);
    phase(PHASE_PROJECTIONS);
    matmul_forward(uvz, m->h, weight(m, at->u), N, C, W, false);
    phase(PHASE_ROPE);
    gau_forward(m->q + qk, m->k + qk, m->v + l * N * E, uvz, gains_in(m, m->params, l), m->cosines, m->sines, B, T, E, GAU_HEAD);
    attention_layer_forward(m, l, B, T);
    phase(PHASE_GATE);
    gau_gate_forward(m->act, uvz, m->att + l * N * E, N, E, W);
    phase(PHASE_PROJECTIONS);
    memcpy(x_next, x, FLOATS(N * C));
    matmul_forward(x_next, m->act, weight(m, at->o), N, E, C, true);
}

static void unit_backward(Model *m, size_t l, size_t B, size_t T, bool add) {
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = (size_t)m->config.channels, E = (size_t)m->config.ffn, W = 2 * E + GAU_HEAD;
    const real *x = m->x + l * N * C, *uvz = m->uvz + l * N * W, *att = m->att + l * N * E;
    real *grads = m->grads, *duvz = m->qkv;
    phase(PHASE_GATE);
    gau_gate_forward(m->act, uvz, att, N, E, W);
    phase(PHASE_PROJECTIONS);
    matmul_backward(m->dact, grads + at->o, m->dx, m->act, weight(m, at->o), N, E, C, add);
    phase(PHASE_GATE);
    gau_gate_backward(m->datt, duvz, m->dact, uvz, att, N, E, W);
    attention_layer_backward(m, l, B, T);
    phase(PHASE_ROPE);
    gau_backward(duvz, gains_in(m, grads, l), m->dq, m->dk, m->dv, uvz, gains_in(m, m->params, l), m->cosines, m->sines, B, T, E, GAU_HEAD);
    phase(PHASE_NORM);
    rmsnorm_forward(m->h, x, m->params + at->norm1, N, C);
    phase(PHASE_PROJECTIONS);
    matmul_backward(m->dh, grads + at->u, duvz, m->h, weight(m, at->u), N, C, W, add);
    phase(PHASE_NORM);
    rmsnorm_backward(m->dx, grads + at->norm1, m->dh, x, m->params + at->norm1, m->rms, N, C);
}

// Fills the activations, down to the normalised output h (N,C) of the last layer.
static void model_forward(Model *m, const int32_t *tokens, size_t B, size_t T) {
    size_t N = B * T, C = (size_t)m->config.channels, layers = (size_t)m->config.layers;
    phase(PHASE_EMBEDDING);
    embedding_forward(m->x, m->params + m->list.embedding, tokens, N, C);
    for (size_t l = 0; l < layers; l++) {
        if (m->config.block == BLOCK_GAU) unit_forward(m, l, B, T);
        else layer_forward(m, l, B, T);
    }
    phase(PHASE_NORM);
    rmsnorm_forward(m->h, m->x + layers * N * C, m->params + m->list.norm, N, C);
    phase(PHASE_OTHER);
}

// The sum of the losses of N rows, in parts of LOSS_ROWS, so that their memory does not grow with N. With `scale` not 0 also the gradients of the
// sum times scale: m->dh (N,C) written, the output projection's gradient written, or added to when `add`.
static double model_loss(Model *m, const int32_t *targets, const uint8_t *mask, size_t N, real scale, bool add) {
    size_t C = (size_t)m->config.channels, V = (size_t)m->config.vocab, VP = padded_vocab(&m->config);
    Operand head = weight(m, m->list.head);
    double sum = 0;
    phase(PHASE_CLASSIFIER);
    for (size_t from = 0; from < N; from += LOSS_ROWS) {
        size_t rows = N - from < LOSS_ROWS ? N - from : LOSS_ROWS;
        const real *h = m->h + from * C;
        matmul_forward(m->logits, h, head, rows, C, VP, false);
        crossentropy(m->losses + from, m->logits, targets + from, mask ? mask + from : NULL, rows, V, VP, scale);
        if (scale != 0)
            matmul_backward(m->dh + from * C, m->grads + m->list.head, m->logits, h, head, rows, C, VP, add || from > 0);
    }
    for (size_t n = 0; n < N; n++) sum += m->losses[n];
    phase(PHASE_OTHER);
    return sum;
}

// The gradients of all parameters but the output projection, from m->dh and the activations; matrices written, or added to when `add`,
// all others added to. What the forward pass did not keep (normalised inputs, swiglu's output) is computed again.
static void model_backward(Model *m, const int32_t *tokens, size_t B, size_t T, bool add) {
    size_t N = B * T, C = (size_t)m->config.channels, layers = (size_t)m->config.layers;
    phase(PHASE_NORM);
    memset(m->dx, 0, FLOATS(N * C));
    rmsnorm_backward(m->dx, m->grads + m->list.norm, m->dh, m->x + layers * N * C, m->params + m->list.norm, m->rms, N, C);
    for (size_t l = layers; l-- > 0;) {
        if (m->config.block == BLOCK_GAU) unit_backward(m, l, B, T, add);
        else layer_backward(m, l, B, T, add);
    }
    phase(PHASE_EMBEDDING);
    embedding_backward(m->grads + m->list.embedding, m->dx, tokens, N, C);
    phase(PHASE_OTHER);
}

// Before the first micro-batch of a step: 0 in what the passes add to (the products write their first result).
static void model_zero_gradients(Model *m) {
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        bool added_to = t->ndim == 1 || (t->offset == m->list.embedding && !m->config.tied);
        if (added_to) memset(m->grads + t->offset, 0, FLOATS(t->elements));
    }
}

// One micro-batch: the sum of its losses; gradients of that sum times `scale` added to m->grads (`first`: the step's first).
static double model_step(Model *m, const int32_t *inputs, const int32_t *targets, const uint8_t *mask, size_t B, size_t T, real scale,
                         bool first) {
    if (first) model_zero_gradients(m);
    model_forward(m, inputs, B, T);
    double sum = model_loss(m, targets, mask, B * T, scale, !first);
    model_backward(m, inputs, B, T, !first);
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------------
// 4. Update

// The Euclidean norm of all gradients, summed in double in pieces of a fixed size, so that threads do not change it.
static double gradient_norm(const Model *m) {
    enum { PIECE = 1 << 16 };
    size_t at = 0;
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        const real *g = m->grads + t->offset;
        size_t pieces = (t->elements + PIECE - 1) / PIECE;
        if (!tensor_trained(t, &m->config.attn)) continue;
        #pragma omp parallel for schedule(static) if (pieces > 1)
        for (size_t p = 0; p < pieces; p++) {
            size_t to = (p + 1) * PIECE < t->elements ? (p + 1) * PIECE : t->elements;
            double sum = 0;
            #pragma omp simd reduction(+ : sum)
            for (size_t j = p * PIECE; j < to; j++) sum += (double)g[j] * g[j];
            m->sums[at + p] = sum;
        }
        at += pieces;
    }
    double sum = 0;
    for (size_t p = 0; p < at; p++) sum += m->sums[p];
    return sqrt(sum);
}

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, grad_scale;
    int64_t step;                        // from 1
} AdamW;

// m = b1 m + (1 − b1) g,  v = b2 v + (1 − b2) g²,  p −= lr (m/(1 − b1^t) / (sqrt(v/(1 − b2^t)) + eps) + wd p),  g = gradient · grad_scale
//   param, mean, square (n) updated   grad (n)   rounded (n) written, or NULL
// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
static void adamw(real *param, real *mean, real *square, uint16_t *rounded, const real *grad, size_t n, AdamW a, bool decay) {
    real b1 = (real)a.beta1, b2 = (real)a.beta2, scale = (real)a.grad_scale, eps = (real)a.eps;
    real one_b1 = (real)(1 - a.beta1), one_b2 = (real)(1 - a.beta2);
    real rate = (real)(a.lr / (1 - pow(a.beta1, (double)a.step)));
    real square_scale = (real)(1 / (1 - pow(a.beta2, (double)a.step)));
    real keep = decay ? (real)(1 - a.lr * a.weight_decay) : 1;
    enum { PIECE = 4096 };                     // rounded while it is still in the cache
    #pragma omp parallel for schedule(static) if (n > 2 * PIECE)
    for (size_t from = 0; from < n; from += PIECE) {
        size_t to = from + PIECE < n ? from + PIECE : n;
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

static void model_update(Model *m, AdamW a) {
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        if (!tensor_trained(t, &m->config.attn)) continue;
        adamw(m->params + t->offset, m->mean + t->offset, m->square + t->offset,
              m->params_bf16 ? m->params_bf16 + t->offset : NULL, m->grads + t->offset, t->elements, a, t->decay);
    }
}

#ifndef LAYERS_ONLY              // as dev/tests/test_gradients.c has them, in double
// ---------------------------------------------------------------------------------------------------------------------------
// 5. Decoding

enum { PREFILL_ROWS = 64,          // prompt tokens that go through the layers together
       FEW_ROWS = 8 };             // rows up to which a product is matmul_few()

typedef struct {
    Model *m;
    size_t sequences, length, rows;              // sequences at once, their longest length, rows a call
    float *k, *v;                                // (layers, sequences, length, K or E)
    float *x, *h, *qkv, *att, *gate_up, *act;    // (rows, ...); of gated units qkv is uvz
    float *q;                                    // (rows, K)
    float *logits;                               // (sequences, V)
    float *scores;                               // (threads, length)
    float *cosines, *sines;                      // (length, HS/2)
} Decoder;

static void plan_decoder(Decoder *d, Model *m, MemoryPlan *plan, size_t sequences, size_t length) {
    const ModelConfig *c = &m->config;
    bool gau = c->block == BLOCK_GAU;
    size_t C = (size_t)c->channels, F = (size_t)c->ffn, rows = sequences > PREFILL_ROWS ? sequences : PREFILL_ROWS;
    size_t K = (size_t)c->heads * head_size(c), E = (size_t)c->heads * value_size(c), cached = (size_t)c->layers * sequences * length;
    const char *kind = "key-value cache and decoding";
    *d = (Decoder){.m = m, .sequences = sequences, .length = length, .rows = rows};
    memory_add(plan, kind, (void **)&d->k, FLOATS(cached * K));
    memory_add(plan, kind, (void **)&d->v, FLOATS(cached * E));
    memory_add(plan, kind, (void **)&d->x, FLOATS(rows * C));
    memory_add(plan, kind, (void **)&d->h, FLOATS(rows * C));
    memory_add(plan, kind, (void **)&d->q, FLOATS(rows * K));
    memory_add(plan, kind, (void **)&d->qkv, FLOATS(rows * (gau ? 2 * F + K : 3 * C)));
    memory_add(plan, kind, (void **)&d->att, FLOATS(rows * E));
    if (!gau) memory_add(plan, kind, (void **)&d->gate_up, FLOATS(rows * 2 * F));
    memory_add(plan, kind, (void **)&d->act, FLOATS(rows * F));
    memory_add(plan, kind, (void **)&d->logits, FLOATS(sequences * (size_t)c->vocab));
    memory_add(plan, kind, (void **)&d->scores, FLOATS((size_t)omp_get_max_threads() * length));
    memory_add(plan, kind, (void **)&d->cosines, FLOATS(length * head_size(c) / 2));
    memory_add(plan, kind, (void **)&d->sines, FLOATS(length * head_size(c) / 2));
}

static void decoder_ready(Decoder *d) {
    rope_table(d->cosines, d->sines, d->length, head_size(&d->m->config), d->m->config.rope_theta);
}

// One row of a decoding call: a token, its sequence, its position. Rows of a sequence stand in order, and their positions follow
// what the cache holds already.
typedef struct {
    int32_t token;
    size_t sequence, position;
} DecodeRow;

// q of a row, and its k and v into the cache (K and E numbers), from the products of a Llama layer or of a gated unit.
static void decode_qkv(Decoder *d, const DecodeRow *row, size_t r, size_t layer, float *k, float *v) {
    const ModelConfig *c = &d->m->config;
    size_t C = (size_t)c->channels, E = (size_t)c->ffn, NH = (size_t)c->heads, HS = head_size(c);
    const float *cosines = d->cosines + row->position * (HS / 2), *sines = d->sines + row->position * (HS / 2);
    float *q = d->q + r * NH * HS;
    if (c->block == BLOCK_GAU) {
        gau_forward(q, k, v, d->qkv + r * (2 * E + HS), gains_in(d->m, d->m->params, layer), cosines, sines, 1, 1, E, HS);
        return;
    }
    const float *qkv = d->qkv + r * 3 * C;
    for (size_t h = 0; h < NH; h++) {
        rotate(q + h * HS, qkv + h * HS, cosines, sines, HS);
        rotate(k + h * HS, qkv + C + h * HS, cosines, sines, HS);
    }
    memcpy(v, qkv + 2 * C, FLOATS(C));
}

// Attention of one layer for all rows: their keys and values join the cache first, so that a row sees those before it in the same call.
static void decode_attention(Decoder *d, const DecodeRow *rows, size_t count, size_t layer) {
    const ModelConfig *c = &d->m->config;
    AttentionShape shape = attention_shape(c, 1, d->length);
    AttentionScalars scalars = scalars_of(d->m, layer);
    size_t NH = shape.NH, HS = shape.HS, VS = shape.VS, K = NH * HS, E = NH * VS;
    #pragma omp parallel
    {
        #pragma omp for schedule(static)
        for (size_t r = 0; r < count; r++) {
            size_t at = (layer * d->sequences + rows[r].sequence) * d->length + rows[r].position;
            decode_qkv(d, &rows[r], r, layer, d->k + at * K, d->v + at * E);
        }
        #pragma omp for collapse(2) schedule(dynamic)
        for (size_t r = 0; r < count; r++) {
            for (size_t h = 0; h < NH; h++) {
                size_t cache = (layer * d->sequences + rows[r].sequence) * d->length;
                attention_row(d->att + r * E + h * VS, d->q + r * K + h * HS, d->k + cache * K + h * HS, K, d->v + cache * E + h * VS, E,
                              rows[r].position + 1, h, scalars, shape, d->scores + (size_t)omp_get_thread_num() * d->length);
            }
        }
    }
}

// matmul_forward for a few rows, whose elements are each a sum of their own: a sequence's numbers never depend on how many others are
// decoded beside it, as they do in a library's tiles. The weights, whose reading takes the time here, are read once for all rows.
static void matmul_few(float *out, const float *inp, const float *weight, size_t N, size_t C, size_t OC, bool add) {
    #pragma omp parallel for schedule(static)
    for (size_t o = 0; o < OC; o++) {
        const float *w = weight + o * C;
        for (size_t r = 0; r < N; r += 4) {                    // four hide each other's latency; a row may stand in for missing ones
            const float *a = inp + r * C, *b = r + 1 < N ? a + C : a, *c = r + 2 < N ? b + C : b, *d = r + 3 < N ? c + C : c;
            float sum[4], sum_a = 0.0f, sum_b = 0.0f, sum_c = 0.0f, sum_d = 0.0f;
            #pragma omp simd reduction(+ : sum_a, sum_b, sum_c, sum_d)
            for (size_t i = 0; i < C; i++) {
                sum_a += a[i] * w[i];
                sum_b += b[i] * w[i];
                sum_c += c[i] * w[i];
                sum_d += d[i] * w[i];
            }
            sum[0] = sum_a, sum[1] = sum_b, sum[2] = sum_c, sum[3] = sum_d;
            for (size_t i = r; i < N && i < r + 4; i++) out[i * OC + o] = add ? out[i * OC + o] + sum[i - r] : sum[i - r];
        }
    }
}

static void decode_product(float *out, const float *inp, Operand weight, size_t N, size_t C, size_t OC, bool add) {
    if (N <= FEW_ROWS && !weight.bf16)
        matmul_few(out, inp, weight.f32, N, C, OC, add);
    else
        matmul_forward(out, inp, weight, N, C, OC, add);
}

static void decode_layer(Decoder *d, const DecodeRow *rows, size_t count, size_t l) {
    Model *m = d->m;
    const LayerOffsets *at = &m->list.layers[l];
    size_t C = (size_t)m->config.channels, F = (size_t)m->config.ffn;
    rmsnorm_forward(d->h, d->x, m->params + at->norm1, count, C);
    decode_product(d->qkv, d->h, weight(m, at->q), count, C, 3 * C, false);
    decode_attention(d, rows, count, l);
    decode_product(d->x, d->att, weight(m, at->o), count, C, C, true);
    rmsnorm_forward(d->h, d->x, m->params + at->norm2, count, C);
    decode_product(d->gate_up, d->h, weight(m, at->gate), count, C, 2 * F, false);
    swiglu_forward(d->act, d->gate_up, count, F);
    decode_product(d->x, d->act, weight(m, at->down), count, F, C, true);
}

static void decode_unit(Decoder *d, const DecodeRow *rows, size_t count, size_t l) {
    Model *m = d->m;
    const LayerOffsets *at = &m->list.layers[l];
    size_t C = (size_t)m->config.channels, E = (size_t)m->config.ffn, W = 2 * E + GAU_HEAD;
    rmsnorm_forward(d->h, d->x, m->params + at->norm1, count, C);
    decode_product(d->qkv, d->h, weight(m, at->u), count, C, W, false);
    decode_attention(d, rows, count, l);
    gau_gate_forward(d->act, d->qkv, d->att, count, E, W);
    decode_product(d->x, d->act, weight(m, at->o), count, E, C, true);
}

// Runs at most d->rows rows through the layers; d->x (count,C) is the residual stream at the end.
static void decode(Decoder *d, const DecodeRow *rows, size_t count) {
    Model *m = d->m;
    size_t C = (size_t)m->config.channels;
    for (size_t r = 0; r < count; r++)
        memcpy(d->x + r * C, m->params + m->list.embedding + (size_t)rows[r].token * C, FLOATS(C));
    for (size_t l = 0; l < (size_t)m->config.layers; l++) {
        if (m->config.block == BLOCK_GAU) decode_unit(d, rows, count, l);
        else decode_layer(d, rows, count, l);
    }
}

// The logits (count,V) after `count` rows of the last decode(), `row` and on, into the places of as many sequences, `sequence` and on.
static float *decode_logits(Decoder *d, size_t row, size_t count, size_t sequence) {
    Model *m = d->m;
    size_t C = (size_t)m->config.channels, V = (size_t)m->config.vocab;
    float *logits = d->logits + sequence * V;
    rmsnorm_forward(d->h, d->x + row * C, m->params + m->list.norm, count, C);
    decode_product(logits, d->h, weight(m, m->list.head), count, C, V, false);
    return logits;
}

// Puts a prompt into the cache of a sequence and returns the logits after its last token. count >= 1.
static float *decode_prompt(Decoder *d, const int32_t *prompt, size_t count, size_t sequence) {
    DecodeRow rows[PREFILL_ROWS];
    size_t from = 0, here = 0;
    for (; from < count; from += here) {
        here = count - from < PREFILL_ROWS ? count - from : PREFILL_ROWS;
        for (size_t r = 0; r < here; r++) rows[r] = (DecodeRow){prompt[from + r], sequence, from + r};
        decode(d, rows, here);
    }
    return decode_logits(d, here - 1, 1, sequence);
}

// ---------------------------------------------------------------------------------------------------------------------------
// 6. Weights: the first ones, and those in checkpoints

// The first weights: each tensor's mean and deviation by the list, its numbers by the seed and its place among those that have random
// ones: so that all normalisers start from the same weights, with or without scalars of their own.
static void model_init(Model *m, uint64_t seed) {
    uint64_t place = 0;
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        random_normal_fill(m->params + t->offset, t->elements, t->mean, t->std, seed, t->std > 0 ? place++ : 0);
    }
}

// The rounded copy, after the weights were set by other means than adamw().
static void model_round(Model *m) {
    if (m->params_bf16) bf16_round(m->params_bf16, m->params, m->list.floats);
}

// Each learnt scalar that a model under `from` does not bring along starts at its first value.
static void start_scalars(Model *m, const Normalizer *from) {
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        if (!t->scalar || !tensor_exists(t, &m->config.attn) || normalizer_keeps(from, &m->config.attn, t->scalar)) continue;
        float start = (float)normalizer_start(&m->config.attn, t->scalar, m->config.seq_len);
        for (size_t j = 0; j < t->elements; j++) m->params[t->offset + j] = start;
        if (m->mean) memset(m->mean + t->offset, 0, FLOATS(t->elements)), memset(m->square + t->offset, 0, FLOATS(t->elements));
    }
}

// Loads all tensors of the model from a folder with model.safetensors; under bfloat16 the masters are optimizer.safetensors' matter.
// Learnt scalars that another normaliser than the folder's brings start at their first values.
static bool model_load(Model *m, const char *folder, Error *error) {
    ModelConfig saved;
    Safetensors *file = model_config_read(&saved, folder, error) ? safetensors_open(folder, error) : NULL;
    if (!file) return false;
    bool done = true;
    for (size_t i = 0; done && i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        if (!tensor_exists(t, &saved.attn)) continue;
        done = safetensors_read(file, t->name, t->ndim, t->shape, m->params + t->offset, error);
    }
    safetensors_close(file);
    start_scalars(m, &saved.attn);
    model_round(m);
    return done;
}

static bool read_optimizer_row(Safetensors *file, const Tensor *t, const char *suffix, float *out, Error *error) {
    char name[128];
    snprintf(name, sizeof name, "%s.%s", t->name, suffix);
    return safetensors_read(file, name, t->ndim, t->shape, out + t->offset, error);
}

static bool optimizer_load(Model *m, const char *folder, Error *error) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    Safetensors *file = safetensors_open(path, error);
    if (!file) return false;
    bool done = true;
    for (size_t i = 0; done && i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        if (!tensor_exists(t, &m->config.attn)) continue;
        done = read_optimizer_row(file, t, "exp_avg", m->mean, error) && read_optimizer_row(file, t, "exp_avg_sq", m->square, error)
            && (!m->params_bf16 || read_optimizer_row(file, t, "master", m->params, error));
    }
    safetensors_close(file);
    model_round(m);
    return done;
}

static bool model_save(const Model *m, const char *path, Error *error) {
    TensorRow *rows = malloc(m->list.count * sizeof *rows);
    if (!rows) return error_set(error, EXIT_RESOURCE, "%s: out of memory for its list of tensors.", path);
    size_t count = 0;
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        if (!tensor_exists(t, &m->config.attn)) continue;
        rows[count++] = (TensorRow){t->name, m->params_bf16 ? DTYPE_BF16 : DTYPE_F32, t->ndim, {t->shape[0], t->shape[1]},
                                    m->params + t->offset};
    }
    bool done = safetensors_write(path, rows, count, (const char *const[]){"format", "pt", NULL}, error);
    free(rows);
    return done;
}

static bool optimizer_save(const Model *m, const char *path, Error *error) {
    const struct { const char *suffix; const float *data; } parts[] = {
        {"exp_avg", m->mean}, {"exp_avg_sq", m->square}, {"master", m->params}};
    size_t part_count = m->params_bf16 ? 3 : 2, count = 0;
    TensorRow *rows = malloc(m->list.count * part_count * sizeof *rows);
    char (*names)[128] = malloc(m->list.count * part_count * sizeof *names);
    bool done = rows && names;
    for (size_t i = 0; done && i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        for (size_t p = 0; p < part_count && tensor_exists(t, &m->config.attn); p++, count++) {
            snprintf(names[count], sizeof names[count], "%s.%s", t->name, parts[p].suffix);
            rows[count] = (TensorRow){names[count], DTYPE_F32, t->ndim, {t->shape[0], t->shape[1]}, parts[p].data + t->offset};
        }
    }
    done = done ? safetensors_write(path, rows, count, (const char *const[]){"format", "pt", NULL}, error)
                : error_set(error, EXIT_RESOURCE, "%s: out of memory for its list of tensors.", path);
    free(rows);
    free(names);
    return done;
}

// ---------------------------------------------------------------------------------------------------------------------------
#ifndef WITHOUT_MAIN
// 7. The run

typedef struct {
    TrainOptions o;
    Model model;
    Decoder decoder;
    Tokenizer *tokenizer;              // NULL: samples are shown as ids
    char tokenizer_folder[PATH_MAX];   // where its files lie, for the checkpoints; "" for none
    Shards *train, *val;
    char *train_print, *val_print;     // fingerprints
    cJSON *lineage;
    Metrics *metrics;
    Schedule schedule;

    bool resumed;                      // continues from a checkpoint
    bool started_over;                 // continues a run that has none yet
    int64_t step, tokens;              // done
    uint64_t sequence;                 // the next in the data's order
    double best_loss;
    int64_t best_step;                 // -1: none yet

    int64_t switch_step;               // of --attn-switch; -1: none to come
    Normalizer switch_to;
    Normalizer loaded;                 // of the weights that --init-from brings; .text is empty without

    size_t T;                          // the longest sequence
    int64_t step_tokens;               // a step's, all processes together
    int64_t micro_batches;             // of one process, a step
    double flops;                      // the peak of all processes
    int32_t *window, *inputs, *targets;
    uint8_t *window_mask, *mask;       // NULL where everything counts
    char *scalars;                     // text of metrics.jsonl about the learnt scalars
    size_t scalars_size;
} Run;

static bool is_main(void) {
    return process.rank == 0;
}

// ---- before anything is taken: what is to be done

static void settle_switch(Run *run) {
    char *end, message[1024];
    run->switch_step = -1;
    if (!run->o.attn_switch) return;
    run->switch_step = strtoll(run->o.attn_switch, &end, 10);
    if (end == run->o.attn_switch || *end != ':' || run->switch_step < 0)
        fail(EXIT_USAGE, "--attn-switch %s: expected STEP:NAME, for example 5000:ssmax.", run->o.attn_switch);
    if (!normalizer_parse(&run->switch_to, end + 1, message, sizeof message))
        fail(EXIT_USAGE, "--attn-switch %s: %s.", run->o.attn_switch, message);
}

// state.json: where the run stood.
static void read_state(Run *run, const char *folder) {
    char path[PATH_MAX];
    Error error;
    snprintf(path, sizeof path, "%s/state.json", folder);
    cJSON *json = json_read(path, &error);
    if (!json) fail_with(&error);
    uint64_t step, tokens, sequence, rewarm;
    const cJSON *best = cJSON_GetObjectItemCaseSensitive(json, "best_val_loss");
    uint64_t best_step;
    if (!json_u64(cJSON_GetObjectItemCaseSensitive(json, "step"), &step) ||
        !json_u64(cJSON_GetObjectItemCaseSensitive(json, "tokens"), &tokens) ||
        !json_u64(cJSON_GetObjectItemCaseSensitive(json, "data_position"), &sequence) ||
        !json_u64(cJSON_GetObjectItemCaseSensitive(json, "rewarm"), &rewarm))
        fail(EXIT_INPUT, "%s: expected the whole numbers \"step\", \"tokens\", \"data_position\" and \"rewarm\".", path);
    run->step = (int64_t)step, run->tokens = (int64_t)tokens, run->sequence = sequence;
    run->schedule.rewarm = (int64_t)rewarm;
    if (cJSON_IsNumber(best) && json_u64(cJSON_GetObjectItemCaseSensitive(json, "best_step"), &best_step))
        run->best_loss = best->valuedouble, run->best_step = (int64_t)best_step;
    cJSON_Delete(json);
}

// A run that ended before its first checkpoint: its arguments hold, and it starts again from the beginning.
static void settle_started_over(Run *run) {
    TrainOptions *o = &run->o;
    Error error;
    if (checkpoint_any(o->out))
        fail(EXIT_INPUT, "%s/ckpt: none of the checkpoints is whole; see the warnings above. Nothing was changed.\n"
             "  Bring back a whole one, or start anew in another --out.", o->out);
    if (!run_exists(o->out)) return;
    cJSON *lineage = run_resume(o->out, o, &error);
    if (!lineage) fail_with(&error);
    const char *attn = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(cJSON_GetArrayItem(lineage, 0), "attn"));
    if (attn) o->attn = strdup(attn);
    cJSON_Delete(lineage);
    run->started_over = true;
    if (is_main()) printf("%s: no checkpoint yet; the run starts over\n", o->out);
}

// --resume: the run's arguments, shape and position, and the folder of its newest checkpoint. False where there is none.
static bool settle_resumed(Run *run, char *folder, size_t size) {
    TrainOptions *o = &run->o;
    Error error;
    uint64_t step;
    if (!o->out) fail(EXIT_USAGE, "--resume needs --out, the folder of the run to continue.");
    if (!checkpoint_newest(o->out, folder, size, &step)) {
        folder[0] = 0;
        settle_started_over(run);
        return false;
    }
    run->lineage = run_resume(o->out, o, &error);
    if (!run->lineage || !checkpoint_verify(folder, false, &error) || !model_config_read(&run->model.config, folder, &error))
        fail_with(&error);
    read_state(run, folder);
    if (run->step != (int64_t)step) fail(EXIT_INPUT, "%s/state.json: says step %lld.", folder, (long long)run->step);
    run_lineage_cut(run->lineage, run->step);
    return true;
}

// --init-from: the shape of the weights there, which --model may repeat but not contradict.
static void settle_loaded(Run *run) {
    const TrainOptions *o = &run->o;
    ModelConfig *config = &run->model.config, asked;
    Error error;
    char shape[256];
    if (!model_config_read(config, o->init_from, &error) || !checkpoint_verify(o->init_from, true, &error)) fail_with(&error);
    run->loaded = config->attn;
    if (train_options_given(o, "rope-theta")) config->rope_theta = o->rope_theta;
    if (!train_options_given(o, "model")) return;
    if (!model_parse(&asked, o->model, &error)) fail_with(&error);
    if (!model_same_shape(&asked, config))
        fail(EXIT_USAGE, "--model %s is not the shape of %s: %s.\n  Leave --model out to take that.", o->model, o->init_from,
             model_text(config, shape, sizeof shape));
}

// T, the longest of --seq-len
static void find_longest(Run *run) {
    const IntList *lengths = &run->o.seq_len;
    run->T = 0;
    for (size_t i = 0; i < lengths->count; i++)
        if ((size_t)lengths->values[i] > run->T) run->T = (size_t)lengths->values[i];
}

// The model's shape, from the run that is resumed, from --init-from, or from --model; `folder` gets where its weights lie, or "".
static void settle_model(Run *run, char *folder, size_t size) {
    TrainOptions *o = &run->o;
    ModelConfig *config = &run->model.config;
    Error error;
    char message[1024];
    folder[0] = 0;
    run->resumed = o->resume && settle_resumed(run, folder, size);
    find_longest(run);
    if (run->resumed) return;
    if (!o->resume && o->out && run_exists(o->out))
        fail(EXIT_USAGE, "--out %s: there is a run already. Continue it with --resume, or give another folder.", o->out);
    if (o->init_from) {
        settle_loaded(run);
        snprintf(folder, size, "%s", o->init_from);
    } else {
        if (!model_parse(config, o->model, &error)) fail_with(&error);
        config->rope_theta = o->rope_theta;
        config->seq_len = (int)run->T;
    }
    if ((!o->init_from || train_options_given(o, "attn") || run->started_over) && !normalizer_parse(&config->attn, o->attn, message, sizeof message))
        fail(EXIT_USAGE, "--attn %s: %s.", o->attn, message);
    if (o->norm_length) config->seq_len = (int)o->norm_length;
    if (o->norm_length && run->loaded.text[0] && normalizer_has(&run->loaded, SCALAR_P))
        fail(EXIT_USAGE, "--norm-length %lld: %s has learnt p_n for its own length; leave the flag out.", (long long)o->norm_length, o->init_from);
    run->lineage = cJSON_CreateArray();
    run_lineage_add(run->lineage, 0, o->init_from ? "init-from" : "start", "attn", config->attn.text, o->init_from ? "from" : NULL,
                    o->init_from, NULL);
}

// Sequence lengths, and how a step's tokens divide among lengths, processes and micro-batches.
static void settle_batches(Run *run) {
    TrainOptions *o = &run->o;
    int64_t T = (int64_t)run->T;
    for (size_t i = 0; i < o->seq_len.count; i++)
        if (T % o->seq_len.values[i])
            fail(EXIT_USAGE, "--seq-len: %lld does not divide the longest, %lld.", (long long)o->seq_len.values[i], (long long)T);
    if (o->batch * T > INT32_MAX)
        fail(EXIT_USAGE, "--batch %lld x --seq-len %lld: at most 2^31 - 1 tokens at a time. Accumulate by --total-batch-tokens.",
             (long long)o->batch, (long long)T);
    int64_t together = o->batch * T * process.size;
    if (!o->total_batch_tokens) o->total_batch_tokens = together;
    if (o->total_batch_tokens % together) {
        int64_t nearest = (o->total_batch_tokens + together / 2) / together * together;
        fail(EXIT_USAGE, "--total-batch-tokens %lld is no multiple of batch x T x processes = %lld x %lld x %d = %lld.\n  Nearest: %lld.",
             (long long)o->total_batch_tokens, (long long)o->batch, (long long)T, process.size, (long long)together,
             (long long)(nearest ? nearest : together));
    }
    run->step_tokens = o->total_batch_tokens;
    run->micro_batches = o->total_batch_tokens / together;
}

static Shards *open_shards(Run *run, const char *glob, bool shuffle, uint64_t min_windows, char **print) {
    ShardsConfig config = {.T = run->T, .vocab = run->model.config.vocab, .end_of_text = run->model.config.end_of_text,
                           .seed = (uint64_t)run->o.seed, .shuffle = shuffle, .pack = (PackMode)run->o.pack, .min_windows = min_windows};
    Error error;
    Shards *shards = shards_open(glob, config, &error);
    if (!shards) fail_with(&error);
    *print = shards_fingerprint(shards, &error);
    if (!*print) fail_with(&error);
    return shards;
}

static bool folder_has_tokenizer(const char *folder) {
    char path[PATH_MAX];
    FILE *file;
    snprintf(path, sizeof path, "%s/%s", folder, tokenizer_files[0]);
    if (!(file = fopen(path, "r"))) return false;
    fclose(file);
    return true;
}

// The tokenizer lies beside the shards, or in the folder that the weights come from. Without one, samples are shown as ids.
static void settle_tokenizer(Run *run, const char *weights) {
    char beside[PATH_MAX];
    Error error;
    if (!shards_first_path(run->o.train_data, beside, sizeof beside)) return;     // opening the shards says what is wrong
    char *slash = strrchr(beside, '/');
    if (slash) *slash = 0; else strcpy(beside, ".");
    const char *folder = folder_has_tokenizer(beside) ? beside : weights[0] && folder_has_tokenizer(weights) ? weights : NULL;
    if (!folder) return;
    if (!(run->tokenizer = tokenizer_open(folder, &error))) fail_with(&error);
    if (tokenizer_vocab(run->tokenizer) > run->model.config.vocab)
        fail(EXIT_INPUT, "%s: its tokenizer has %d tokens, the model a vocabulary of %d.\n  Give the model vocab=%d.", folder,
             tokenizer_vocab(run->tokenizer), run->model.config.vocab, tokenizer_vocab(run->tokenizer));
    snprintf(run->tokenizer_folder, sizeof run->tokenizer_folder, "%s", folder);
    run->model.config.end_of_text = tokenizer_end_of_text(run->tokenizer);
}

// What a normaliser asks of the lengths.
static void check_normalizer(const Run *run, const Normalizer *attn, const char *flag) {
    char message[1024];
    int L = run->model.config.seq_len;
    if (!normalizer_fits(attn, L, message, sizeof message)) fail(EXIT_USAGE, "%s %s.", flag, message);
    if (normalizer_has(attn, SCALAR_P) && run->T > (size_t)L)
        fail(EXIT_USAGE, "%s %s: p_n is learnt for n up to L = %d, and --seq-len asks for %zu.", flag, attn->text, L, run->T);
}

// Everything that the flags, the run folder and the data say, checked; nothing written yet.
static void settle(Run *run, char *weights, size_t size) {
    TrainOptions *o = &run->o;
    Error error;
    run->best_step = -1;
    settle_model(run, weights, size);
    if (process_max_int(run->resumed) != run->resumed)
        fail(EXIT_PEER, "process %d sees no run in %s, but another one does. All machines need the same --out folder.", process.rank, o->out);
    settle_switch(run);
    check_normalizer(run, &run->model.config.attn, "--attn");
    if (run->switch_step >= 0) check_normalizer(run, &run->switch_to, "--attn-switch");
    settle_batches(run);
    if (!o->train_data) fail(EXIT_USAGE, "--train-data is missing: the shards to train on. data/shakespeare.py makes some.");
    settle_tokenizer(run, weights);
    run->train = open_shards(run, o->train_data, o->shuffle, (uint64_t)(run->step_tokens / (int64_t)run->T), &run->train_print);
    if (o->val_data) run->val = open_shards(run, o->val_data, false, 1, &run->val_print);
    if ((run->resumed || run->started_over) && (!run_same_data(o->out, "train", run->train_print, &error) ||
                         !run_same_data(o->out, "val", run->val_print, &error)))
        fail_with(&error);
    run->schedule = (Schedule){.kind = (ScheduleKind)o->schedule, .lr = o->lr, .min_lr_frac = o->min_lr_frac, .warmup = o->warmup,
                               .steps = o->steps, .rewarm = run->schedule.rewarm};
    if (run->switch_step >= 0 && run->switch_step < run->step) {
        if (train_options_given(o, "attn-switch"))
            fail(EXIT_USAGE, "--attn-switch %s: the run stands at step %lld; give that step or a later one.", o->attn_switch,
                 (long long)run->step);
        run->switch_step = -1;
    }
}

static void plan_memory(Run *run) {
    Model *m = &run->model;
    TrainOptions *o = &run->o;
    const Normalizer *others[2];
    size_t count = 0;
    if (run->switch_step >= 0) others[count++] = &run->switch_to;
    if (run->loaded.text[0]) others[count++] = &run->loaded;
    m->list = tensors_of(&m->config, others, count);
    plan_parameters(m, true, o->dtype == TRAIN_BF16);
    plan_activations(m, (size_t)o->batch, run->T, o->dtype == TRAIN_BF16);
    size_t sample = run->T < 256 ? run->T : 256;
    if (o->sample_every) plan_decoder(&run->decoder, m, &m->plan, 1, sample);
    size_t N = (size_t)o->batch * run->T;
    bool masked = shards_masked(run->train) || (run->val && shards_masked(run->val));
    run->scalars_size = 3 * (64 + 64 * (size_t)m->config.layers);
    memory_add(&m->plan, "scratch", (void **)&run->scalars, run->scalars_size);
    memory_add(&m->plan, "a batch", (void **)&run->window, (run->T + 1) * sizeof(int32_t));
    memory_add(&m->plan, "a batch", (void **)&run->inputs, N * sizeof(int32_t));
    memory_add(&m->plan, "a batch", (void **)&run->targets, N * sizeof(int32_t));
    if (masked) {
        memory_add(&m->plan, "a batch", (void **)&run->window_mask, run->T);
        memory_add(&m->plan, "a batch", (void **)&run->mask, N);
    }
}

// Weights, two moments, and under bfloat16 the masters.
static double checkpoint_bytes(const ModelConfig *config, bool bf16) {
    return (double)model_parameters(config) * (bf16 ? 2 + 12 : 4 + 8);
}

static void print_plan(Run *run) {
    const ModelConfig *c = &run->model.config;
    const TrainOptions *o = &run->o;
    int64_t windows_a_step = run->step_tokens / (int64_t)run->T;
    Error error;
    char name[NORMALIZER_TEXT];
    normalizer_shortest(&c->attn, name, sizeof name);
    printf("model     %s parameters (%s), ", human_grouped(model_parameters(c)).text, human_count((double)model_parameters(c)).text);
    if (c->block == BLOCK_GAU)
        printf("%d gated attention units of %d and %d, %d channels", c->layers, GAU_HEAD, c->ffn, c->channels);
    else
        printf("%d layers, %d heads of %zu, %d channels, ffn %d", c->layers, c->heads, head_size(c), c->channels, c->ffn);
    printf(", vocabulary %d, %s\n", c->vocab, c->tied ? "tied" : "untied");
    printf("attention %s%s%s, L = %d\n", c->attn.text, strcmp(c->attn.text, name) ? ", which is " : "", strcmp(c->attn.text, name) ? name : "",
           c->seq_len);
    if (run->switch_step >= 0)
        printf("switch    to %s at step %lld%s\n", run->switch_to.text, (long long)run->switch_step,
               run->switch_step >= o->steps ? ", which is not before --steps: a later --resume will come to it" : "");
    printf("products  %s by %s%s, %d thread%s in %d process%s\n", o->dtype == TRAIN_BF16 ? "bfloat16" : "float32", gemm_backend(),
           o->dtype == TRAIN_BF16 && !gemm_has_bf16() ? " (widened to float32: no bfloat16 products here)" : "", omp_get_max_threads(),
           omp_get_max_threads() == 1 ? "" : "s", process.size, process.size == 1 ? "" : "es");
    printf("data      %s tokens in %zu shard%s, %s windows of %zu, %.1f steps an epoch", human_grouped(shards_tokens(run->train)).text,
           shards_count(run->train), shards_count(run->train) == 1 ? "" : "s", human_grouped(shards_windows(run->train)).text, run->T,
           (double)shards_windows(run->train) / (double)windows_a_step);
    if (run->val) printf("; validation %s tokens", human_grouped(shards_tokens(run->val)).text);
    printf("\nstep      %s tokens: %lld process%s x %lld micro-batch%s of %lld x %zu\n", human_grouped((uint64_t)run->step_tokens).text,
           (long long)process.size, process.size == 1 ? "" : "es", (long long)run->micro_batches, run->micro_batches == 1 ? "" : "es",
           (long long)o->batch, run->T);
    printf("run       %lld steps, %s tokens%s%s\n", (long long)o->steps, human_count((double)o->steps * (double)run->step_tokens).text,
           o->out ? ", into " : ", nothing is kept (no --out)", o->out ? o->out : "");
    memory_print(&run->model.plan);
    if (o->out) {
        uint64_t free_bytes;
        double bytes = checkpoint_bytes(c, o->dtype == TRAIN_BF16);
        if (file_free_space(o->out, &free_bytes, &error)) {
            printf("disk      %s a checkpoint, %s free\n", human_bytes(bytes).text, human_bytes((double)free_bytes).text);
            if (bytes * (double)(o->keep ? o->keep + 1 : 1) > (double)free_bytes)
                warn("%s: %s free, but the checkpoints that --keep %lld leaves need up to %s.", o->out,
                     human_bytes((double)free_bytes).text, (long long)o->keep, human_bytes(bytes * (double)(o->keep ? o->keep + 1 : 1)).text);
        }
    }
    fflush(stdout);
}

// ---- the start

static void load_weights(Run *run, const char *folder) {
    Model *m = &run->model;
    Error error;
    if (!folder[0]) {
        model_init(m, (uint64_t)run->o.seed);
        model_round(m);
        return;
    }
    Normalizer attn = m->config.attn;
    if (run->loaded.text[0]) m->config.attn = run->loaded;         // change_normalizer() comes when its loss is known
    process_agree(!is_main() || (model_load(m, folder, &error) && (!run->resumed || optimizer_load(m, folder, &error))), &error);
    m->config.attn = attn;
    process_broadcast(m->params, FLOATS(m->list.floats));
    if (!run->resumed) {
        model_round(m);
        return;
    }
    process_broadcast(m->mean, FLOATS(m->list.floats));
    process_broadcast(m->square, FLOATS(m->list.floats));
    model_round(m);
}

static void write_run(Run *run) {
    Error error;
    bool writes = run->o.out && is_main();
    process_agree(!writes || run_write(run->o.out, &run->o, run->train_print, run->val_print, run->lineage, &error), &error);
}

// From here on the folder is ours.
static void open_run_folder(Run *run) {
    char path[PATH_MAX];
    Error error;
    if (!run->o.out) return;
    snprintf(path, sizeof path, "%s/metrics.jsonl", run->o.out);
    process_agree(!is_main() || (metrics_cut(path, run->step, &error) && (run->metrics = metrics_open(path, &error))), &error);
    write_run(run);
}

// ---- saving

static char *state_json(const Run *run) {
    cJSON *json = cJSON_CreateObject(), *random;
    cJSON_AddNumberToObject(json, "step", (double)run->step);
    cJSON_AddNumberToObject(json, "tokens", (double)run->tokens);
    cJSON_AddNumberToObject(json, "data_position", (double)run->sequence);
    random = cJSON_AddObjectToObject(json, "random");
    cJSON_AddStringToObject(random, "generator", "philox4x32-10, by counter");
    cJSON_AddNumberToObject(random, "seed", (double)run->o.seed);
    cJSON_AddNumberToObject(json, "processes", process.size);
    cJSON_AddNumberToObject(json, "rewarm", (double)run->schedule.rewarm);
    if (run->best_step >= 0) {
        cJSON_AddNumberToObject(json, "best_val_loss", run->best_loss);
        cJSON_AddNumberToObject(json, "best_step", (double)run->best_step);
    }
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    return text;
}

static bool copy_tokenizer(const Run *run, Checkpoint *c, Error *error) {
    char path[PATH_MAX + 64];
    if (!run->tokenizer_folder[0]) return true;
    for (size_t i = 0; tokenizer_files[i]; i++) {
        snprintf(path, sizeof path, "%s/%s", run->tokenizer_folder, tokenizer_files[i]);
        FILE *there = fopen(path, "r");
        if (!there) continue;
        fclose(there);
        if (!checkpoint_copy(c, path, error)) return false;
    }
    return true;
}

static bool write_checkpoint(const Run *run, Error *error) {
    const Model *m = &run->model;
    Checkpoint c;
    if (!checkpoint_begin(&c, run->o.out, (uint64_t)run->step, error)) return false;
    char *config = model_config_json(&m->config, m->params_bf16 != NULL), *state = state_json(run);
    bool done = model_save(m, checkpoint_path(&c, "model.safetensors"), error)
             && optimizer_save(m, checkpoint_path(&c, "optimizer.safetensors"), error)
             && file_write_text(checkpoint_path(&c, "config.json"), config, error)
             && file_write_text(checkpoint_path(&c, "state.json"), state, error)
             && (model_is_plain_llama(&m->config) || file_write_text(checkpoint_path(&c, MODELING_FILE), modeling_text, error))
             && copy_tokenizer(run, &c, error)
             && checkpoint_commit(&c, error);
    if (!done) checkpoint_abandon(&c);
    free(config);
    free(state);
    return done;
}

// Saves and prunes. A save that fails in mid-run is reported, and training goes on: the checkpoint before it is whole. `last`: the
// process is about to end, so a failure ends it with EXIT_RESOURCE.
static void save(Run *run, bool last) {
    Error error;
    bool done = true;
    if (!run->o.out) return;
    if (is_main()) {
        double start = now();
        progress_end();
        if ((done = write_checkpoint(run, &error))) {
            printf("saved %s/ckpt/step-%08lld in %.1f s\n", run->o.out, (long long)run->step, now() - start);
            uint64_t best = run->o.keep_best && run->best_step >= 0 ? (uint64_t)run->best_step : UINT64_MAX;
            if (!checkpoint_prune(run->o.out, (int)run->o.keep, best, &error)) warn("%s", error.text);
        } else if (!last) {
            warn("%s\n  Training goes on; the checkpoint before this one is whole.", error.text);
        }
        fflush(stdout);
    }
    process_agree(done || !last, &error);
}

// ---- data to the model

// Sequence `g` of the data, cut to pieces of T, into rows from `row` on of the batch.
static void load_window(Run *run, Shards *shards, uint64_t g, size_t row) {
    Error error;
    if (!shards_window(shards, g, run->window, run->mask ? run->window_mask : NULL, &error)) fail_with(&error);
    memcpy(run->inputs + row * run->T, run->window, run->T * sizeof(int32_t));
    memcpy(run->targets + row * run->T, run->window + 1, run->T * sizeof(int32_t));
    if (run->mask) memcpy(run->mask + row * run->T, run->window_mask, run->T);
}

// Has any process been asked to stop? All processes ask together.
static bool stopping(void) {
    return process_max_int(process_stop_requested());
}

// Mean loss over the validation data's first windows, the same for any number of processes (but for the order of the sum). NAN where a
// signal came in between.
static double validate(Run *run) {
    Model *m = &run->model;
    uint64_t windows = shards_windows(run->val), most = (uint64_t)run->o.val_tokens / run->T;
    if (most < 1) most = 1;
    if (windows > most) windows = most;
    double sum = 0;
    uint64_t rows_without_weight = m->rows_without_weight, rows = m->rows;
    bool stopped = false;
    for (uint64_t first = 0; first < windows && !stopped; first += (uint64_t)run->o.batch * (uint64_t)process.size) {
        size_t B = 0;
        for (uint64_t g = first + (uint64_t)process.rank; B < (size_t)run->o.batch && g < windows; B++, g += (uint64_t)process.size)
            load_window(run, run->val, g, B);
        if (B) model_forward(m, run->inputs, B, run->T);
        if (B) sum += model_loss(m, run->targets, run->mask, B * run->T, 0.0f, false);
        stopped = stopping();
    }
    m->rows_without_weight = rows_without_weight, m->rows = rows;
    if (stopped) return NAN;
    process_sum_double(&sum, 1);
    return sum / (double)(shards_masked(run->val) ? windows : windows * run->T);
}

// ---- one step

// The gradients of all of a step's sequences, and its loss. Micro-batch i of process r has sequences (i · processes + r) · B and on.
// False where a signal came in between: nothing of the step counts then.
static bool accumulate(Run *run, size_t T, double *mean_loss) {
    double loss = 0;
    size_t B = (size_t)run->o.batch, pieces = run->T / T;
    int64_t sequences = run->step_tokens / (int64_t)run->T;
    double count = shards_masked(run->train) ? (double)sequences : (double)run->step_tokens;
    for (int64_t i = 0; i < run->micro_batches; i++) {
        if (stopping()) return false;
        uint64_t first = run->sequence + ((uint64_t)i * (uint64_t)process.size + (uint64_t)process.rank) * B;
        for (size_t b = 0; b < B; b++) load_window(run, run->train, first + b, b);
        loss += model_step(&run->model, run->inputs, run->targets, run->mask, B * pieces, T, (float)(1.0 / count), i == 0);
    }
    phase(PHASE_REDUCE);
    process_sum_float(run->model.grads, run->model.list.floats);
    process_sum_double(&loss, 1);
    phase(PHASE_OTHER);
    run->sequence += (uint64_t)sequences;
    *mean_loss = loss / count;
    return true;
}

// A loss or gradient that is not finite ends the run before it can spoil the weights.
static void check_finite(const Run *run, double loss, double norm) {
    if (isfinite(loss) && isfinite(norm)) return;
    char path[PATH_MAX];
    uint64_t step;
    progress_end();
    bool saved = run->o.out && checkpoint_newest(run->o.out, path, sizeof path, &step);
    const Normalizer *attn = &run->model.config.attn;
    const char *unbounded = attn->phi.kind == PHI_EXP && !norm_is_sum(attn->norm)
        ? "\n  phi=exp without norm=l1 has no bound: exp(z) overflows from z = 88.8 on." : "";
    fail(EXIT_DIVERGED, "step %lld: the loss is %g and the gradient's norm %g: training diverged. Nothing of this step was kept.%s\n"
         "  Last good checkpoint: %s. A lower --lr, a longer --warmup or a smaller --grad-clip may help.", (long long)run->step + 1, loss,
         norm, unbounded, saved ? path : "none");
}

// False where a signal came before the weights changed.
static bool train_step(Run *run, StepMetrics *metrics) {
    Model *m = &run->model;
    const TrainOptions *o = &run->o;
    double start = now(), loss;
    size_t T = step_length(o->seq_len.values, o->seq_len.count, (uint64_t)o->seed, (uint64_t)run->step);
    m->rows = m->rows_without_weight = 0;
    if (!accumulate(run, T, &loss)) return false;
    phase(PHASE_UPDATE);
    double norm = gradient_norm(m), lr = schedule_lr(&run->schedule, run->step);
    check_finite(run, loss, norm);
    double scale = o->grad_clip > 0 && norm > 0 ? fmin(1.0, o->grad_clip / (norm + 1e-6)) : 1.0;
    model_update(m, (AdamW){lr, o->beta1, o->beta2, 1e-8, o->weight_decay, scale, run->step + 1});
    phase(PHASE_OTHER);
    run->step++;
    run->tokens += run->step_tokens;
    double seconds = now() - start, speed = (double)run->step_tokens / seconds;
    *metrics = (StepMetrics){.step = run->step, .tokens = run->tokens, .loss = (float)loss, .lr = (float)lr, .grad_norm = (float)norm,
                             .ms = 1000 * seconds, .tok_per_s = speed, .val_loss = NAN,
                             .mfu = speed * model_flops_per_token(&m->config, T) / run->flops};
    return true;
}

// ---- what a person sees

static void show_text(FILE *file, const Run *run, const int32_t *ids, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char *bytes = run->tokenizer ? tokenizer_token(run->tokenizer, ids[i], &length) : NULL;
        if (bytes) fwrite(bytes, 1, length, file); else fprintf(file, "%d ", ids[i]);
    }
}

// A sample from the model as it stands, to the terminal and samples.txt. It starts from end-of-text; the same step draws the same.
static void show_sample(Run *run) {
    Decoder *d = &run->decoder;
    int32_t ids[256];
    size_t count = 0;
    if (!is_main()) return;
    int32_t token = run->model.config.end_of_text;
    while (count < d->length) {
        float *logits = count ? (decode(d, &(DecodeRow){token, 0, count}, 1), decode_logits(d, 0, 1, 0)) : decode_prompt(d, &token, 1, 0);
        double u = random_uniform((uint64_t)run->o.seed, (uint64_t)run->step, count);
        token = sample_token(logits, (size_t)run->model.config.vocab, 0.9, 50, 1.0, u);
        if (token == run->model.config.end_of_text) break;
        ids[count++] = token;
    }
    progress_end();
    printf("sample at step %lld: ", (long long)run->step);
    show_text(stdout, run, ids, count);
    printf("\n");
    fflush(stdout);
    FILE *file = run->o.out ? fopen(run_path(run->o.out, "samples.txt"), "a") : NULL;
    if (!file) return;
    fprintf(file, "---- step %lld\n", (long long)run->step);
    show_text(file, run, ids, count);
    fprintf(file, "\n");
    fclose(file);
}

// "attn_scale": [[mean, least, largest] of each layer], or those of another learnt scalar, onto the end of `out`.
static size_t scalar_statistics(char *out, size_t size, size_t at, const Model *m, Scalar scalar) {
    bool first = true;
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        if (t->scalar != scalar || !tensor_trained(t, &m->config.attn)) continue;
        const float *x = m->params + t->offset;
        double sum = 0, least = x[0], largest = x[0];
        for (size_t j = 0; j < t->elements; j++) sum += x[j], least = fmin(least, x[j]), largest = fmax(largest, x[j]);
        if (first) at += (size_t)snprintf(out + at, size - at, ", \"%s\": [", scalar_names[scalar]);
        at += (size_t)snprintf(out + at, size - at, "%s[%.6g, %.6g, %.6g]", first ? "" : ", ", sum / (double)t->elements, least, largest);
        first = false;
    }
    if (!first) at += (size_t)snprintf(out + at, size - at, "]");
    return at;
}

static void show_step(Run *run, StepMetrics *metrics, double seconds_a_step, bool keep) {
    char line[512];
    if (run->metrics && !isnan(metrics->val_loss)) {
        size_t at = 0;
        run->scalars[0] = 0;
        for (Scalar scalar = SCALAR_S; scalar < SCALAR_COUNT; scalar++)
            if (scalar != SCALAR_P) at = scalar_statistics(run->scalars, run->scalars_size, at, &run->model, scalar);
        metrics->more = run->scalars;
    }
    if (run->metrics) metrics_write(run->metrics, metrics);
    if (!is_main()) return;
    metrics_line(line, sizeof line, metrics, run->o.steps, seconds_a_step * (double)(run->o.steps - run->step));
    const Model *m = &run->model;
    size_t length = strlen(line);
    double share = m->rows ? 100.0 * (double)m->rows_without_weight / (double)m->rows : 0;
    if (share > 0) snprintf(line + length, sizeof line - length, " | %.*f %% of rows without weight", share < 0.1 ? 4 : share < 9.95 ? 1 : 0, share);
    progress_show(line, keep);
}

static void show_profile(double steps) {
    double sum = 0;
    for (int i = 0; i < PHASE_COUNT; i++) sum += phase_seconds[i];
    printf("\n%-36s %10s %8s\n", "where the time went", "ms a step", "share");
    for (int i = 0; i < PHASE_COUNT; i++) {
        static const char *const NAMES[] = {PHASES(PHASE_NAME)};
        if (phase_seconds[i] > 0) printf("%-36s %10.2f %7.1f%%\n", NAMES[i], 1000 * phase_seconds[i] / steps, 100 * phase_seconds[i] / sum);
    }
}

// ---- a change of normaliser

// Names the learnt scalars that `to` brings and `from` did not leave.
static void show_new_scalars(const Model *m, const Normalizer *from, const Normalizer *to) {
    const char *where = m->config.block == BLOCK_GAU ? "gau" : "self_attn";
    for (Scalar scalar = SCALAR_S; scalar < SCALAR_COUNT; scalar++) {
        if (!normalizer_has(to, scalar) || normalizer_keeps(from, to, scalar)) continue;
        double start = normalizer_start(to, scalar, m->config.seq_len);
        if (scalar == SCALAR_P)
            printf("new parameters: model.%s, %d of %.4f\n", scalar_names[scalar], m->config.seq_len, start);
        else
            printf("new parameters: model.layers.0..%d.%s.%s, %.4f%s\n", m->config.layers - 1, where, scalar_names[scalar], start,
                   normalizer_trains(to, scalar) ? "" : ", not trained");
    }
}

// Weights, moments, step and data position stay; scalars that the new normaliser brings start. Says what it does to the validation loss.
static void change_normalizer(Run *run, const char *event, Normalizer from, Normalizer to) {
    Model *m = &run->model;
    char before[32] = "not measured", after[32] = "not measured";
    m->config.attn = from;
    double loss = run->val ? validate(run) : NAN;
    if (isfinite(loss)) snprintf(before, sizeof before, "%.6f", loss);
    m->config.attn = to;
    if (is_main()) progress_end();
    start_scalars(m, &from);
    if (is_main()) show_new_scalars(m, &from, &to);
    loss = run->val ? validate(run) : NAN;
    if (isfinite(loss)) snprintf(after, sizeof after, "%.6f", loss);
    run_lineage_add(run->lineage, run->step, event, "from", from.text, "attn", to.text, "val_loss_before", before,
                    "val_loss_after", after, NULL);
    write_run(run);
    if (is_main())
        printf("step %lld: --attn %s becomes %s; validation loss %s before, %s after\n", (long long)run->step, from.text, to.text, before,
               after);
}

// In mid-run the warm-up runs again.
static void switch_normalizer(Run *run) {
    change_normalizer(run, "attn-switch", run->model.config.attn, run->switch_to);
    run->schedule.rewarm = run->step;
    run->switch_step = -1;
}

// ---- the loop

// Of all processes; those of one machine may have more threads than it has cores.
static void measure_peak(Run *run) {
    int threads = omp_get_max_threads() * process.local_size, cores = omp_get_num_procs();
    run->flops = peak_flops(run->o.dtype == TRAIN_BF16) * (threads > cores ? (double)cores / threads : 1.0);
    process_sum_double(&run->flops, 1);
}

static bool due(int64_t every, int64_t step) {
    return every && step % every == 0;
}

static void train(Run *run) {
    const TrainOptions *o = &run->o;
    double seconds = 0;
    int64_t first = run->step, saved = run->resumed ? run->step : -1;
    while (run->step < o->steps) {
        if (run->step == run->switch_step) switch_normalizer(run);
        if (run->step > first && run->step <= first + 3) measure_peak(run);
        StepMetrics metrics;
        if (!train_step(run, &metrics)) break;
        bool last = run->step == o->steps, best = false;
        seconds = run->step == first + 1 ? metrics.ms / 1000 : 0.9 * seconds + 0.1 * metrics.ms / 1000;
        if (run->val && due(o->val_every, run->step)) {
            metrics.val_loss = (float)validate(run);
            best = isfinite(metrics.val_loss) && (run->best_step < 0 || metrics.val_loss < run->best_loss);
            if (best) run->best_loss = metrics.val_loss, run->best_step = run->step;
        }
        show_step(run, &metrics, seconds, last || isfinite(metrics.val_loss));
        if (o->sample_every && (due(o->sample_every, run->step) || last)) show_sample(run);
        if (due(o->ckpt_every, run->step) || (best && o->keep_best) || last) {
            save(run, last);
            saved = run->step;
        }
    }
    bool stopped = run->step < o->steps;
    if (saved != run->step) save(run, true);           // a stop, or --steps 0: the first weights
    if (is_main()) progress_end();
    if (!stopped && run->val && o->val_every && !due(o->val_every, run->step)) {
        // Not in the metrics: a run that is continued from here has them as if it had never stopped.
        double loss = validate(run);
        if (is_main() && isfinite(loss)) printf("validation loss %.4f at the end\n", loss);
    }
    if (is_main() && o->profile && run->step > first) show_profile((double)(run->step - first));
    if (stopped) {
        if (is_main()) printf("stopped by a signal at step %lld%s\n", (long long)run->step,
                              o->out ? "; --resume continues from here" : "; nothing was kept, as there is no --out");
        fflush(stdout);
        process_end();
        exit(EXIT_STOPPED);
    }
}

int main(int argc, char **argv) {
    static Run run;
    char weights[PATH_MAX];
    Error error;
    double start = now();
    program_name = "train_gpt2";
    train_options_init(&run.o, normalizer_flag_help);
    options_parse(run.o.table, run.o.count, argc, argv,
                  "train_gpt2 --train-data GLOB [flags]\n\nTrains a GPT on the CPU. Several processes: scripts/launch.sh N ./train_gpt2 ...");
    if (normalizer_help(run.o.attn)) return EXIT_DONE;
    process_start(&argc, &argv);
    bool locks = run.o.out && is_main() && !run.o.dry_run;
    process_agree(!locks || run_lock(run.o.out, false, &error), &error);
    settle(&run, weights, sizeof weights);
    if (run.resumed && run.step >= run.o.steps) {
        if (is_main()) printf("%s stands at step %lld; --steps %lld asks for no more\n", run.o.out, (long long)run.step, (long long)run.o.steps);
        process_end();
        return EXIT_DONE;
    }
    plan_memory(&run);
    if (is_main()) print_plan(&run);
    memory_check(&run.model.plan, process.local_size);
    if (run.o.dry_run) {
        process_agree(!is_main() || (shards_check_all(run.train, &error) && (!run.val || shards_check_all(run.val, &error))), &error);
        if (is_main()) printf("dry run: all tokens are below the vocabulary; nothing was written\n");
        process_end();
        return EXIT_DONE;
    }
    process_agree(!locks || run_lock(run.o.out, true, &error), &error);
    memory_take(&run.model.plan);
    model_ready(&run.model);
    if (run.o.sample_every) decoder_ready(&run.decoder);
    load_weights(&run, weights);
    open_run_folder(&run);
    measure_peak(&run);
    process_catch_signals();
    if (run.loaded.text[0] && !normalizer_equal(&run.loaded, &run.model.config.attn))
        change_normalizer(&run, "attn-at-start", run.loaded, run.model.config.attn);
    if (is_main()) {
        printf("%s %s after %.1f s; peak %.0f GFLOP/s\n", run.resumed ? "continues at step" : "starts at step",
               human_grouped((uint64_t)run.step).text, now() - start, run.flops / 1e9);
        fflush(stdout);
    }
    train(&run);
    metrics_close(run.metrics);
    process_end();
    return EXIT_DONE;
}
#endif
#endif

// The activations of a model: one row per array. Each trainer expands these rows into its struct of arrays, its memory
// plan and its views of a layer, so an activation is added here and where it is computed.
//   type      what the array holds: Numbers, of the trainer's element type; MatmulInput, which only matmuls read and
//             --dtype bf16 therefore rounds on the CPU, too; Statistics, float32 in both trainers
//   width     numbers per token
//   memory    see ActivationMemory
//   exists    whether the model has it. llama, gau: its block
// The widths are the variables of activation_widths(): W of the joint projection, K and KV of q and k, E of attention's
// output, G of its gates.
#ifndef MODEL_ACTIVATIONS_H
#define MODEL_ACTIVATIONS_H

#include <stdbool.h>
#include <stddef.h>

#include "model/model.h"

// Of N tokens. What is kept is for the backward pass; without one, there may be room for fewer layers.
typedef enum {
    KEPT_STREAM,         // (layers + 1, N, width)
    KEPT_NUMBERS,        // (layers, N, width)
    KEPT_STATISTICS,     // (layers, N, width)
    KEPT_INPUT,          // (layers, N, width), or (N, width) if the backward pass recomputes it
    SCRATCH_ROWS,        // (N, width)
    SCRATCH_GRADIENT,    // (N, width), only in the backward pass
    SCRATCH_LOGITS,      // (loss_rows, width)
} ActivationMemory;

// clang-format off
#define ACTIVATIONS(X) \
    /* name          type         width      memory            exists */ \
    X(x,             Numbers,     C,         KEPT_STREAM,      true)       /* the residual stream before each layer */ \
    X(joined,        Numbers,     W,         KEPT_NUMBERS,     true)       /* q, k, v after RoPE; or u, v, z */ \
    X(qk_inputs,     Numbers,     K + KV,    KEPT_NUMBERS,     c->qk_norm) /* q and k before their QK norms */ \
    X(qk_inverse,    Statistics,  NH + NKV,  KEPT_STATISTICS,  c->qk_norm) /* 1/RMS of each head of those */ \
    X(q,             Numbers,     K,         KEPT_NUMBERS,     gau)        /* after RoPE, as k */ \
    X(k,             Numbers,     K,         KEPT_NUMBERS,     gau) \
    X(v,             Numbers,     E,         KEPT_NUMBERS,     gau) \
    X(inverse_norms, Statistics,  NH + NKV,  KEPT_STATISTICS,  l2)         /* 1/|q| and 1/|k| of each head */ \
    X(att,           Numbers,     E,         KEPT_NUMBERS,     true)       /* attention's output */ \
    X(att_gate,      Numbers,     G,         KEPT_NUMBERS,     c->gate)    /* before their sigmoid */ \
    X(gated,         Numbers,     E,         KEPT_INPUT,       c->gate)    /* att times sigmoid(att_gate) */ \
    X(x_mid,         Numbers,     C,         KEPT_NUMBERS,     llama)      /* the residual stream after attention */ \
    X(gate_up,       Numbers,     2 * F,     KEPT_NUMBERS,     llama) \
    X(act,           MatmulInput, F,         KEPT_INPUT,       true)       /* the output of swiglu or of the gate */ \
    X(h,             MatmulInput, C,         SCRATCH_ROWS,     true)       /* a normalized input, last the output's */ \
    X(r,             Statistics,  1,         SCRATCH_ROWS,     true)       /* 1/RMS of what h normalizes */ \
    X(logits,        Numbers,     VP,        SCRATCH_LOGITS,   true) \
    X(losses,        Statistics,  1,         SCRATCH_ROWS,     true) \
    X(dx,            Numbers,     C,         SCRATCH_GRADIENT, true)       /* gradients of x, h, ... */ \
    X(dh,            Numbers,     C,         SCRATCH_GRADIENT, true) \
    X(datt,          Numbers,     E,         SCRATCH_GRADIENT, true) \
    X(datt_gate,     Numbers,     G,         SCRATCH_GRADIENT, c->gate) \
    X(dact,          Numbers,     F,         SCRATCH_GRADIENT, true) \
    X(dgate_up,      MatmulInput, 2 * F,     SCRATCH_GRADIENT, llama) \
    X(djoined,       Numbers,     W,         SCRATCH_GRADIENT, true) \
    X(dq,            Numbers,     K,         SCRATCH_GRADIENT, gau) \
    X(dk,            Numbers,     K,         SCRATCH_GRADIENT, gau) \
    X(dv,            Numbers,     E,         SCRATCH_GRADIENT, gau)

// What only the CUDA trainer keeps. The CPU computes it again, in h and r.
#define GPU_ACTIVATIONS(X) \
    X(h1,            MatmulInput, C,         KEPT_INPUT,       true)       /* the normalized x */ \
    X(r1,            Statistics,  1,         KEPT_STATISTICS,  true)       /* 1/RMS of x */ \
    X(h2,            MatmulInput, C,         KEPT_INPUT,       llama)      /* the normalized x_mid */ \
    X(r2,            Statistics,  1,         KEPT_STATISTICS,  llama)      /* 1/RMS of x_mid */ \
    X(dh_more,       Numbers,     C,         SCRATCH_GRADIENT, c->gate)    /* dh with the part of the gates */
// clang-format on

// The width of each array, 0 if the model does not have it.
#define ACTIVATION_WIDTH(name, ...) size_t name;
typedef struct {
    ACTIVATIONS(ACTIVATION_WIDTH) GPU_ACTIVATIONS(ACTIVATION_WIDTH)
} ActivationWidths;
#undef ACTIVATION_WIDTH

// l2: whether a normalizer of the run divides q and k by their norms
static inline ActivationWidths activation_widths(const ModelConfig *c, bool l2) {
    bool llama = c->block == BLOCK_LLAMA, gau = c->block == BLOCK_GAU;
    size_t C = c->channels, F = c->ffn, VP = padded_vocab(c), W = joined_width(c);
    size_t K = query_width(c), KV = key_width(c), E = output_width(c), G = gate_width(c);
    size_t NH = c->heads, NKV = c->kv_heads;
    ActivationWidths widths;
#define ACTIVATION_WIDTH(name, type, width, memory, exists) widths.name = (exists) ? (width) : 0;
    ACTIVATIONS(ACTIVATION_WIDTH)
    GPU_ACTIVATIONS(ACTIVATION_WIDTH)
#undef ACTIVATION_WIDTH
    return widths;
}

// The number of layers that such an array has room for.   kept: those of KEPT_NUMBERS   inputs: those of KEPT_INPUT
static inline size_t activation_layers(ActivationMemory memory, size_t kept, size_t inputs) {
    switch (memory) {
    case KEPT_STREAM: return kept + 1;
    case KEPT_NUMBERS:
    case KEPT_STATISTICS: return kept;
    case KEPT_INPUT: return inputs;
    default: return 1;
    }
}

#endif

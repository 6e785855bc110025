// What the model is: its shape, its tensors and its config.json, for every program. How it computes is up to the
// trainers.
#ifndef MODEL_H
#define MODEL_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attention/list.h"
#include "model/rope.h"
#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DEFAULT_ROPE_THETA 10000.0
#define DEFAULT_NORM_EPS 1e-5
#define MIN_NORM_EPS 1e-12
#define MAX_NORM_EPS 0.1
#define MIN_SOFTCAP 0.1    // no token can be more than e^0.2 times as likely as another: less leaves nothing to learn
#define MAX_SOFTCAP 1e6

enum { MAX_SEQ_LEN = 1 << 20, MAX_VOCAB = 1 << 20, MAX_LAYERS = 2048 };

// A layer is either rmsnorm, attention with RoPE, rmsnorm and SwiGLU, or rmsnorm and a gated attention unit. Two gated
// units replace one Llama layer.
typedef enum { BLOCK_LLAMA, BLOCK_GAU, BLOCK_COUNT } Block;

// Gated attention (arXiv 2505.06708): attention's output times sigmoid(h·Wg), h being the layer's normalized input,
// with one gate for each channel of that output or for each head.
typedef enum { GATE_NONE, GATE_CHANNEL, GATE_HEAD, GATE_COUNT } GateKind;

extern const char *const gate_names[GATE_COUNT];

enum { MAX_ENDS = 8, NO_ID = -1, NULL_ID = -2 };

enum { GAU_HEAD = 128 };    // the width of a unit's q and k

// A decoder: embedding, layers, rmsnorm, output projection. Under BLOCK_GAU `layers` counts units, heads and kv_heads
// are 1, head_dim is GAU_HEAD, and ffn is 2·channels, the width of a unit's values.
typedef struct {
    Block block;
    size_t layers, heads, channels, ffn, vocab;
    size_t kv_heads;         // each serves heads/kv_heads consecutive query heads
    size_t head_dim;         // the size of a head's q, k and v; channels/heads by default
    bool qk_norm;            // an RMSNorm with a gain over each head's q and k, before RoPE (as in Qwen3)
    bool qkv_bias;           // the projections to q, k and v have biases (as in Qwen2)
    GateKind gate;           // of attention's output, before its projection
    bool tied;               // the output projection shares the embedding's weights
    bool mistral;            // a Mistral, which computes what a Llama computes, and is saved as one
    double logit_softcap;    // c in c·tanh(logits/c), as in Gemma 2; 0: the logits are not capped
    double norm_eps;         // of every RMSNorm: x / sqrt(mean(x²) + norm_eps)
    double rope_theta;
    RopeScaling rope_scaling;
    size_t seq_len;                   // L, the training length
    int end_of_text;                  // the token between documents
    int ends[MAX_ENDS], end_count;    // eos_token_id of the file: what else ends a generated text, such as <|im_end|>
    int bos, pad;    // bos_token_id and pad_token_id of the file, NULL_ID if null, NO_ID if missing; for other programs
    AttentionList attn;
} ModelConfig;

// The attention of a layer.
static inline const LayerAttention *attention_of(const ModelConfig *config, size_t layer) {
    return attention_at(&config->attn, layer);
}

static inline const Normalizer *normalizer_of(const ModelConfig *config, size_t layer) {
    return &attention_of(config, layer)->normalizer;
}

// One row per block: its sizes and tensors, and how --model, config.json and the log describe it. Its memory and its
// passes are rows of the trainers.
typedef struct {
    const char *name;                    // block=NAME in --model, and "block" in config.json
    bool plain;                          // transformers' Llama has this block, and config.json does not name it
    size_t replaces;                     // how many layers of this block stand for one of --model's
    void (*fix)(ModelConfig *c);         // sets the sizes that --model cannot choose; NULL if it chooses all
    const char *fixed;                   // those sizes in words
    const char *attention;               // the part of a layer's tensor names that holds attention's learned scalars
    size_t residual_writes;              // per layer: the matmuls that add to the residual stream
    const struct TensorSpec *tensors;    // of a layer
    size_t tensor_count;
    size_t (*value_size)(const ModelConfig *c);      // of a head
    size_t (*joined_width)(const ModelConfig *c);    // the columns that the layer's first matmul computes
    // For model_text() and model_description(). shared: the keys that every block has.
    void (*text)(const ModelConfig *c, const char *shared, char *out, size_t size);
    void (*describe)(const ModelConfig *c, char *out, size_t size);
} BlockShape;

extern const BlockShape block_shapes[BLOCK_COUNT];

// Parses --model: a preset, key=value,... (layers, heads, channels, ffn, kv_heads, head_dim, norm_eps, qk_norm, bias,
// gate, tied, vocab, block), or a preset followed by keys. Sets the shape, end_of_text and RoPE without scaling, but
// not seq_len and attn. On failure, returns false with EXIT_USAGE and a message that lists the models and keys.
bool model_parse(ModelConfig *config, const char *text, Error *error);

// Does the text of --model set vocab? If not, the vocabulary is a default that the data may replace.
bool model_gives_vocab(const char *text);

// GPT-2's end-of-text token, or the last token of the vocabulary, where data/vocabulary.py puts it.
int default_end_of_text(size_t vocab);

// Does this token end a generated text?
static inline bool model_ends_text(const ModelConfig *config, int32_t token) {
    for (int i = 0; i < config->end_count; i++)
        if (token == config->ends[i]) return true;
    return token == config->end_of_text;
}

// Sets kv_heads and head_dim to their defaults if they are 0. Returns false with a message if the sizes are
// inconsistent: RoPE needs an even head size, and heads must be divisible by kv_heads.
bool model_shape_complete(ModelConfig *config, char *message, size_t size);

// The shape, written as keys of --model.
const char *model_text(const ModelConfig *config, char *out, size_t size);

// The layers in words: "12 layers, 12 heads of 64, 768 channels, ffn 2048". Returns out.
const char *model_description(const ModelConfig *config, char *out, size_t size);

// Do both have the same shape, norm_eps included?
bool model_same_shape(const ModelConfig *a, const ModelConfig *b);

// The sizes of a head's q and k, and of its v.
size_t head_size(const ModelConfig *config);
size_t value_size(const ModelConfig *config);

// What RoPE's angles (rope_table()) depend on in the layers with this base (attention_table_base()), 0 for the model's.
// Only that one is scaled.
RopeAngles model_rope(const ModelConfig *config, double base);

// The widths of all heads together, in numbers per token.
size_t query_width(const ModelConfig *config);     // q: heads · head_size
size_t key_width(const ModelConfig *config);       // k: kv_heads · head_size
size_t value_width(const ModelConfig *config);     // v: kv_heads · value_size
size_t output_width(const ModelConfig *config);    // attention's output, which o_proj reads: heads · value_size
size_t gate_width(const ModelConfig *config);      // the gates of that output; 0 if it has none

// The output width of the matmul on a layer's normalized input: q, k and v, or a gated unit's u, v and z.
size_t joined_width(const ModelConfig *config);

// What a rule keeps for each parameter, in float32. The squares are at least 0.
enum { STATE_MEAN, STATE_SQUARE, STATE_ARRAYS };

// One row per update rule: its function in both trainers, and the suffixes of its state arrays in
// optimizer.safetensors, or NULL for an array that it does not keep. A rule gets whole tensors: not even ZeRO-1 divides
// one between ranks. Rules with squares come first.
// clang-format off
#define UPDATE_RULES(X) \
    /* rule   function      mean        square */ \
    X(ADAMW,  adamw_update, "exp_avg",  "exp_avg_sq") \
    X(MUON,   muon_update,  "momentum", NULL)
// clang-format on
#define UPDATE_RULE(rule, ...) UPDATE_##rule,
#define UPDATE_FUNCTION(rule, function, ...) function,
typedef enum { UPDATE_RULES(UPDATE_RULE) UPDATE_COUNT } UpdateRule;

extern const char *const update_state[UPDATE_COUNT][STATE_ARRAYS];

#define NO_LAYER ((size_t)-1)

// One tensor of the model. Only the list knows which tensors exist.
typedef struct {
    char name[96];    // in checkpoints; follows Hugging Face's Llama
    int ndim;
    size_t shape[2], elements;
    size_t offset;      // of its first float in an array of all parameters (or gradients, or moments)
    float mean, std;    // of the initial values
    bool decay;         // has weight decay
    UpdateRule update;
    double lr_scale;    // multiplies the learning rate, and so weight decay, too
    bool hidden;        // a layer's matrix: with Muon, it takes the place of AdamW
    Scalar scalar;      // the learned scalar that this tensor is; SCALAR_NONE for all other tensors
    size_t layer;       // the layer whose scalar it is; NO_LAYER for all other tensors and for what the layers share
} Tensor;

typedef struct {
    size_t norm1, o, scalar[SCALAR_COUNT];    // in both blocks; WHOLE_MODEL scalars have the same offset in all layers
    size_t q, k, v, norm2, gate, up, down;    // q, k, v are contiguous, and so are gate, up
    size_t q_norm, k_norm;                    // with qk_norm
    size_t att_gate;                          // with gate
    size_t q_bias, k_bias, v_bias;            // contiguous, with qkv_bias
    size_t u, gau_v, z, q_gain, k_gain, q_offset, k_offset;    // u, v, z are contiguous
} LayerOffsets;

typedef struct {
    Tensor *tensors;
    size_t count, floats;            // floats: the length of an array of all parameters, including alignment gaps
    size_t embedding, norm, head;    // head equals embedding if tied
    size_t scalar[SCALAR_COUNT];     // the sets that the whole model shares
    LayerOffsets *layers;
} TensorList;

// The vocabulary size in memory, the next multiple of 128 (50,304 for 50,257). The padding rows are 0 and stay 0. They
// are not saved, and their logits are ignored.
size_t padded_vocab(const ModelConfig *config);

// The tensors of a model, including the learned scalars of its normalizers and of `others`, those before or after a
// switch.
TensorList tensors_of(const ModelConfig *config, const AttentionList *const *others, size_t count);
void tensors_free(TensorList *list);

// --optimizer muon: updates the hidden matrices by Muon.
void tensors_use_muon(TensorList *list);

// The learned scalars of a layer that exist under its normalizer (in the parameters), and the gradients of those that
// it trains. Inline, because the caller determines `real` (math/real.h).
static inline Scalars scalars_of(const TensorList *list, const real *params, size_t layer, const AttentionList *attn) {
    const Normalizer *normalizer = &attention_at(attn, layer)->normalizer;
    Scalars scalars = {{NULL}};
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (normalizer_has(normalizer, (Scalar)x)) scalars.of[x] = params + list->layers[layer].scalar[x];
    return scalars;
}

static inline ScalarGrads scalar_grads_of(const TensorList *list, real *grads, size_t layer,
                                          const AttentionList *attn) {
    const Normalizer *normalizer = &attention_at(attn, layer)->normalizer;
    ScalarGrads of = {{NULL}};
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (normalizer_trains(normalizer, (Scalar)x)) of.of[x] = grads + list->layers[layer].scalar[x];
    return of;
}

// Is the tensor part of the model under these normalizers, and is it trained?
bool tensor_exists(const Tensor *tensor, const AttentionList *attn);
bool tensor_trained(const Tensor *tensor, const AttentionList *attn);

// Of a learned scalar: its initial value, and does it keep its values in a switch? See normalizer_keeps().
double tensor_start(const Tensor *tensor, const ModelConfig *config);
bool tensor_keeps(const Tensor *tensor, const AttentionList *from, const AttentionList *to);

// The number of parameters under the model's normalizers.
uint64_t model_parameters(const ModelConfig *config);

// Floating-point operations per token, forward and backward: 6·P + 6·layers·(query width + output width)·T, where P
// excludes an untied embedding.
double model_flops_per_token(const ModelConfig *config, size_t T);

// The text of config.json: the keys of the model's family (see model_is_plain()) and attention_normalizer. The caller
// frees it.
char *model_config_json(const ModelConfig *config, bool bf16);

// Reads config.json of our own checkpoints, and of Llama, Mistral, Qwen2 and Qwen3 models from elsewhere that compute
// what our model computes. Rejects everything else and reports all reasons at once: an unknown model_type, an
// unsupported value, and every key that is neither understood nor known to be harmless, unless its value is null, false
// or empty, or `ignored` names it (--ignore-config-key: comma-separated names, or NULL). Warns about ignored names that
// are not in the file.
bool model_config_read(ModelConfig *config, const char *folder, const char *ignored, Error *error);

// Is the model saved as a Llama, Mistral, Qwen2 (with biases) or Qwen3 (with QK norms), which transformers loads
// without extra code? True for softmax with neither capped logits nor both biases and QK norms; all others come with a
// modeling file.
bool model_is_plain(const ModelConfig *config);

#ifdef __cplusplus
}
#endif
#endif

// What the model is, for every program: its shape, its tensors, its config.json. How it computes is in the trainers.
#ifndef MODEL_H
#define MODEL_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attention/normalizer.h"
#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DEFAULT_NORM_EPS 1e-5
#define MIN_NORM_EPS 1e-12
#define MAX_NORM_EPS 0.1

enum { MAX_SEQ_LEN = 1 << 20, MAX_VOCAB = 65536 };    // a token is 16 bits in a shard

// What a layer is: rmsnorm, attention with RoPE, rmsnorm, SwiGLU; or rmsnorm and a gated attention unit, two of which
// stand for the other.
typedef enum { BLOCK_LLAMA, BLOCK_GAU } Block;

enum { GAU_HEAD = 128 };    // the width of a unit's q and k

// A decoder: embedding, layers, rmsnorm, output projection. Under BLOCK_GAU `layers` counts units, heads and kv_heads
// are 1, head_dim is GAU_HEAD, and ffn is 2·channels, the width of a unit's values.
typedef struct {
    Block block;
    int layers, heads, channels, ffn, vocab;
    int kv_heads;       // key-value heads, each shared by heads/kv_heads query heads that follow each other
    int head_dim;       // the size of a head's q, k and v; channels/heads unless it is given
    bool qk_norm;       // an RMSNorm with a gain over each head's q and k, before RoPE (as in Qwen3)
    bool tied;          // the output projection is the embedding
    double norm_eps;    // of every RMSNorm: x / sqrt(mean(x²) + norm_eps)
    double rope_theta;
    int seq_len;        // L, the length that it was trained with
    int end_of_text;    // the token between documents
    Normalizer attn;
} ModelConfig;

// Reads --model: a preset, or key=value,... (layers, heads, channels, ffn, kv_heads, head_dim, norm_eps, qk_norm, tied,
// vocab, block), or a preset and then keys. Sets shape, rope_theta and end_of_text; leaves seq_len and attn. False with
// EXIT_USAGE and a message that lists the models and keys.
bool model_parse(ModelConfig *config, const char *text, Error *error);

// Does the text of --model have the key vocab? Without it the vocabulary is a default, which the data may replace.
bool model_gives_vocab(const char *text);

// GPT-2's, or the last token, where data/vocabulary.py puts it.
int default_end_of_text(int vocab);

// Sets kv_heads and head_dim to their defaults where they are 0. False with a message if sizes do not fit each other:
// the head size must be even for RoPE, and the heads must divide among the key-value heads.
bool model_shape_complete(ModelConfig *config, char *message, size_t size);

// The shape as --model would name it by keys.
const char *model_text(const ModelConfig *config, char *out, size_t size);

// Of the same shape, norm_eps included?
bool model_same_shape(const ModelConfig *a, const ModelConfig *b);

// The sizes of a head's q and k, and of its v.
size_t head_size(const ModelConfig *config);
size_t value_size(const ModelConfig *config);

// The widths of all heads together, in numbers per token.
size_t query_width(const ModelConfig *config);     // q: heads · head_size
size_t key_width(const ModelConfig *config);       // k: kv_heads · head_size
size_t value_width(const ModelConfig *config);     // v: kv_heads · value_size
size_t output_width(const ModelConfig *config);    // attention's output, which o_proj reads: heads · value_size

// The width of what one matmul computes from a layer's normalized input: q, k and v, or a gated unit's u, v and z.
size_t joined_width(const ModelConfig *config);

// How a tensor is updated: by Adam, with decoupled weight decay or without.
typedef enum { UPDATE_ADAM, UPDATE_ADAMW } UpdateRule;

// One tensor of the model; the list is the only place that knows them.
typedef struct {
    char name[96];    // in checkpoints: Hugging Face's Llama names
    int ndim;
    size_t shape[2], elements;
    size_t offset;      // of its first float in an array of all parameters (or gradients, or moments)
    float mean, std;    // how it starts
    UpdateRule update;
    Scalar scalar;    // which of the normalizer's, which it may have, train, or lack; SCALAR_NONE for all else
} Tensor;

typedef struct {
    size_t norm1, o, scalar[SCALAR_COUNT];                     // of both blocks; the same in all layers for WHOLE_MODEL
    size_t q, k, v, norm2, gate, up, down;                     // q, k, v and gate, up follow each other without a gap
    size_t q_norm, k_norm;                                     // with qk_norm
    size_t u, gau_v, z, q_gain, k_gain, q_offset, k_offset;    // so do u, v, z
} LayerOffsets;

typedef struct {
    Tensor *tensors;
    size_t count, floats;            // floats: the length of an array of all of them, gaps for alignment included
    size_t embedding, norm, head;    // head is the embedding's offset when tied
    size_t scalar[SCALAR_COUNT];     // those that are one set for the whole model
    LayerOffsets *layers;
} TensorList;

// The vocabulary as it lies in memory: the next multiple of 128 (50,257 is 50,304). The rows past it are 0 and stay so;
// they are in no file, and their logits take part in nothing.
size_t padded_vocab(const ModelConfig *config);

// The tensors of a model. Among them are the learned scalars of its normalizer, and of `others`, those before or after
// a change.
TensorList tensors_of(const ModelConfig *config, const Normalizer *const *others, size_t count);
void tensors_free(TensorList *list);

// The learned scalars of a layer that attn has, in the parameters, and the gradients of those that it trains. Inline,
// as `real` is what the caller says (runtime/real.h).
static inline Scalars scalars_of(const TensorList *list, const real *params, size_t layer, const Normalizer *attn) {
    Scalars scalars = {{NULL}};
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (normalizer_has(attn, (Scalar)x)) scalars.of[x] = params + list->layers[layer].scalar[x];
    return scalars;
}

static inline ScalarGrads scalar_grads_of(const TensorList *list, real *grads, size_t layer, const Normalizer *attn) {
    ScalarGrads of = {{NULL}};
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (normalizer_trains(attn, (Scalar)x)) of.of[x] = grads + list->layers[layer].scalar[x];
    return of;
}

// Is the tensor part of the model under this normalizer, and is it trained?
bool tensor_exists(const Tensor *tensor, const Normalizer *attn);
bool tensor_trained(const Tensor *tensor, const Normalizer *attn);

// Parameters under the model's normalizer, with or without the embedding when it is not the output projection too.
uint64_t model_parameters(const ModelConfig *config);
uint64_t model_product_parameters(const ModelConfig *config);

// Floating-point operations a token, forward and backward: 6·P + 12·layers·channels·T, P without an untied embedding
// (the second term is 6·layers·(head size + value size)·T under BLOCK_GAU).
double model_flops_per_token(const ModelConfig *config, size_t T);

// config.json: LlamaConfig's keys (Qwen3Config's with QK norms) and attention_normalizer. The caller frees the text.
char *model_config_json(const ModelConfig *config, bool bf16);

// The inverse, for our own checkpoints and for Llamas and Qwen3s from elsewhere that compute what this model computes.
// All else is rejected with every reason at once: an unknown model_type, a value that is not computed here, and each
// key that is neither understood nor known to be harmless, unless its value is null, false or empty, or `ignored` (of
// --ignore-config-key: names with commas between, or NULL) has it. Warns about names in `ignored` that are not in the
// file.
bool model_config_read(ModelConfig *config, const char *folder, const char *ignored, Error *error);

// Is it written as a Llama, or as a Qwen3 with QK norms, which transformers loads as it is? That is plain softmax; the
// others come with a modeling file.
bool model_is_plain(const ModelConfig *config);

#ifdef __cplusplus
}
#endif
#endif

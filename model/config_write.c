// Writes config.json next to our weights: as a Llama, Mistral or Qwen if the model is one, otherwise as our own family.
#include <string.h>

#include "model/config.h"

// clang-format off
const Family model_families[FAMILY_COUNT] = {
    //          model_type, class                  QK norms  biases  Mistral  needs kv_heads, head_dim  L
    [LLAMA]   = {"llama",    "LlamaForCausalLM",    false,    false,  false,   false, false,             2048},
    [MISTRAL] = {"mistral",  "MistralForCausalLM",  false,    false,  true,    true,  false,             131072},
    [QWEN2]   = {"qwen2",    "Qwen2ForCausalLM",    false,    true,   false,   true,  false,             32768},
    [QWEN3]   = {"qwen3",    "Qwen3ForCausalLM",    true,     false,  false,   true,  true,              32768},
    [OUR_OWN] = {"attn_gpt", "AttnGPTForCausalLM",  false,    false,  false,   false, false,             2048},
};
// clang-format on

// Which layers have a sliding window.
typedef enum { NO_WINDOW, SOME_WINDOWS, ALL_WINDOWS } Windows;

// Are all layers softmax, with at most one window among them? *window is that one, or 0.
static bool is_softmax(const ModelConfig *config, Windows *windows, size_t *window) {
    LayerAttention softmax = {0};
    char message[256];
    size_t count = 0;
    *window = 0;
    if (!normalizer_parse(&softmax.normalizer, "softmax", message, sizeof message)) return false;
    for (size_t l = 0; l < config->layers; l++) {
        const LayerAttention *layer = attention_of(config, l);
        if (!normalizer_equal(&layer->normalizer, &softmax.normalizer) || layer->rope != softmax.rope) return false;
        if (!layer->window) continue;
        if (*window && *window != layer->window) return false;
        *window = layer->window;
        count++;
    }
    *windows = count == 0 ? NO_WINDOW : count < config->layers ? SOME_WINDOWS : ALL_WINDOWS;
    return true;
}

// The family of a model with softmax. transformers rejects a Llama whose channels are not divisible by its heads, even
// if head_dim is given.
static const Family *family_of(const ModelConfig *config, Windows windows) {
    bool mistral = windows == ALL_WINDOWS || (windows == NO_WINDOW && config->mistral);
    if (config->qk_norm && config->qkv_bias) return &model_families[OUR_OWN];
    if (config->qk_norm) return &model_families[QWEN3];
    if (config->qkv_bias) return &model_families[QWEN2];
    if (mistral) return &model_families[MISTRAL];
    return &model_families[windows == NO_WINDOW && config->channels % config->heads == 0 ? LLAMA : OUR_OWN];
}

// The family as which the model is saved: our own unless it is a plain softmax model. *window is its sliding window.
static const Family *saved_family(const ModelConfig *config, Windows *windows, size_t *window) {
    bool plain = block_shapes[config->block].plain && config->logit_softcap == 0 && !config->gate;
    return plain && is_softmax(config, windows, window) ? family_of(config, *windows) : &model_families[OUR_OWN];
}

bool model_is_plain(const ModelConfig *config) {
    Windows windows;
    size_t window;
    return saved_family(config, &windows, &window) != &model_families[OUR_OWN];
}

// Adds the sliding windows by the family's own keys.
static void write_windows(cJSON *json, const ModelConfig *config, const Family *family, Windows windows,
                          size_t window) {
    if (family == &model_families[MISTRAL] && windows == NO_WINDOW) cJSON_AddNullToObject(json, "sliding_window");
    else if (windows != NO_WINDOW) cJSON_AddNumberToObject(json, "sliding_window", (double)window);
    if (family == &model_families[MISTRAL] || windows == NO_WINDOW) return;
    cJSON_AddBoolToObject(json, "use_sliding_window", true);
    cJSON *types = cJSON_AddArrayToObject(json, "layer_types");
    for (size_t l = 0; l < config->layers; l++)
        cJSON_AddItemToArray(types, cJSON_CreateString(attention_of(config, l)->window ? SLIDING : FULL));
}

// Adds what our own family needs and no other has.
static void write_own(cJSON *json, const ModelConfig *config) {
    cJSON *map = cJSON_AddObjectToObject(json, "auto_map");
    cJSON_AddStringToObject(map, "AutoConfig", "modeling_attn_gpt.AttnGPTConfig");
    cJSON_AddStringToObject(map, "AutoModel", "modeling_attn_gpt.AttnGPTModel");
    cJSON_AddStringToObject(map, "AutoModelForCausalLM", "modeling_attn_gpt.AttnGPTForCausalLM");
    if (config->qk_norm) cJSON_AddBoolToObject(json, "qk_norm", true);
    if (config->qkv_bias) cJSON_AddBoolToObject(json, "qkv_bias", true);
    if (config->gate) cJSON_AddStringToObject(json, "gate", gate_names[config->gate]);
    if (config->mistral) cJSON_AddStringToObject(json, "softmax_model_type", model_families[MISTRAL].model_type);
    if (config->logit_softcap != 0) cJSON_AddNumberToObject(json, SOFTCAP, config->logit_softcap);
}

// Adds RoPE's parameters under the name of transformers 5 and, if they are scaled, also of transformers 4, which would
// otherwise load the model without scaling. Our own model type needs only the first: its modeling file reads that.
static void write_rope(cJSON *json, const ModelConfig *config, bool plain) {
    const RopeScaling *scaling = &config->rope_scaling;
    const RopeShape *shape = &rope_shapes[scaling->kind];
    cJSON *objects[2] = {cJSON_AddObjectToObject(json, "rope_parameters"), NULL};
    if (plain && scaling->kind != ROPE_NONE) objects[1] = cJSON_AddObjectToObject(json, "rope_scaling");
    for (size_t i = 0; i < COUNT(objects) && objects[i]; i++) {
        cJSON_AddStringToObject(objects[i], "rope_type", shape->type);
        if (i == 0) cJSON_AddNumberToObject(objects[i], "rope_theta", config->rope_theta);
        for (size_t n = 0; n < ROPE_NUMBERS && shape->numbers[n]; n++)
            cJSON_AddNumberToObject(objects[i], shape->numbers[n]->key, rope_scaling_get(scaling, shape->numbers[n]));
    }
}

static void write_id(cJSON *json, const char *key, int id) {
    if (id == NULL_ID) cJSON_AddNullToObject(json, key);
    else if (id != NO_ID) cJSON_AddNumberToObject(json, key, id);
}

// eos_token_id, as it was read, or end_of_text.
static void write_ends(cJSON *json, const ModelConfig *config) {
    if (config->end_count > 1)
        cJSON_AddItemToObject(json, "eos_token_id", cJSON_CreateIntArray(config->ends, config->end_count));
    else cJSON_AddNumberToObject(json, "eos_token_id", config->end_count ? config->ends[0] : config->end_of_text);
}

void config_write_layer(cJSON *json, const LayerAttention *layer) {
    const Normalizer *normalizer = &layer->normalizer;
    for (size_t i = 0; i < STAGE_COUNT; i++) {
        char text[64];
        cJSON_AddStringToObject(json, stage_names[i], normalizer_stage_text(normalizer, i, text, sizeof text));
    }
    if (normalizer->cap != 0) cJSON_AddNumberToObject(json, "cap", normalizer->cap);
    if (layer->window) cJSON_AddNumberToObject(json, "window", (double)layer->window);
    if (layer->rope == NO_ROPE) cJSON_AddStringToObject(json, "rope", "none");
    else if (layer->rope != 0) cJSON_AddNumberToObject(json, "rope", layer->rope);
    if (normalizer->fixed) cJSON_AddBoolToObject(json, "fixed", true);
}

static void write_normalizer(cJSON *json, const ModelConfig *config) {
    cJSON *attn = cJSON_AddObjectToObject(json, "attention_normalizer");
    cJSON_AddStringToObject(attn, "name", config->attn.text);
    cJSON_AddNumberToObject(attn, "seq_len", config->seq_len);
    if (config->attn.count == 1) config_write_layer(attn, attention_of(config, 0));
    else {
        cJSON *layers = cJSON_AddArrayToObject(attn, "layers");
        for (size_t l = 0; l < config->layers; l++) {
            cJSON *layer = cJSON_CreateObject();
            cJSON_AddStringToObject(layer, "name", normalizer_of(config, l)->text);
            config_write_layer(layer, attention_of(config, l));
            cJSON_AddItemToArray(layers, layer);
        }
    }
    const BlockShape *block = &block_shapes[config->block];
    if (!block->plain) cJSON_AddStringToObject(attn, "block", block->name);
}

char *model_config_json(const ModelConfig *config, bool bf16) {
    cJSON *json = cJSON_CreateObject();
    Windows windows = NO_WINDOW;
    size_t window = 0;
    const Family *family = saved_family(config, &windows, &window);
    bool plain = family != &model_families[OUR_OWN];
    cJSON_AddItemToObject(json, "architectures", cJSON_CreateStringArray(&family->class_name, 1));
    cJSON_AddStringToObject(json, "model_type", family->model_type);
    if (!plain) write_own(json, config);
    cJSON_AddNumberToObject(json, "vocab_size", config->vocab);
    cJSON_AddNumberToObject(json, "hidden_size", config->channels);
    cJSON_AddNumberToObject(json, "intermediate_size", config->ffn);
    cJSON_AddNumberToObject(json, "num_hidden_layers", config->layers);
    cJSON_AddNumberToObject(json, "num_attention_heads", config->heads);
    cJSON_AddNumberToObject(json, "num_key_value_heads", config->kv_heads);
    cJSON_AddNumberToObject(json, "head_dim", (double)head_size(config));
    cJSON_AddNumberToObject(json, "max_position_embeddings", config->seq_len);
    cJSON_AddStringToObject(json, "hidden_act", "silu");
    cJSON_AddNumberToObject(json, "rms_norm_eps", config->norm_eps);
    cJSON_AddNumberToObject(json, "rope_theta", config->rope_theta);
    write_rope(json, config, plain);
    cJSON_AddBoolToObject(json, "tie_word_embeddings", config->tied);
    if (!config->qkv_bias) cJSON_AddBoolToObject(json, "attention_bias", false);
    cJSON_AddBoolToObject(json, "mlp_bias", false);
    if (plain) write_windows(json, config, family, windows, window);
    cJSON_AddNumberToObject(json, "attention_dropout", 0);
    cJSON_AddNumberToObject(json, "initializer_range", 0.02);
    write_id(json, "bos_token_id", config->bos == NO_ID ? config->end_of_text : config->bos);
    write_ends(json, config);
    write_id(json, "pad_token_id", config->pad);
    cJSON_AddBoolToObject(json, "use_cache", true);
    cJSON_AddStringToObject(json, "torch_dtype", bf16 ? "bfloat16" : "float32");
    write_normalizer(json, config);
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    if (!text) fail(EXIT_RESOURCE, "out of memory for config.json.");
    return text;
}

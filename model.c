#include "model.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/json.h"

// ---------------------------------------------------------------------------------------------------------------------------
// Shape

static const struct {
    const char *name;
    int layers, heads, channels, ffn, vocab;
    bool tied;
} PRESETS[] = {
    {"15M",   6,  6, 288,  768, 32000, true},
    {"124M", 12, 12, 768, 2048, 50257, true},
    {"162M", 12, 12, 768, 2048, 50257, false},
};

static const struct {
    const char *name;
    size_t offset;
    int min, max;
} KEYS[] = {
    {"layers",   offsetof(ModelConfig, layers),   1, 1024},
    {"heads",    offsetof(ModelConfig, heads),    1, 1024},
    {"channels", offsetof(ModelConfig, channels), 2, 65536},
    {"ffn",      offsetof(ModelConfig, ffn),      1, 262144},
    {"vocab",    offsetof(ModelConfig, vocab),    2, MAX_VOCAB},
};

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

// GPT-2's, or the last token, where data/vocabulary.py puts it.
static int default_end_of_text(int vocab) {
    return vocab > 50256 ? 50256 : vocab - 1;
}

static bool parse_key(ModelConfig *config, bool *given, char *word, Error *error) {
    char *equals = strchr(word, '='), *end = NULL;
    if (equals) *equals++ = 0;
    long value = equals && *equals ? strtol(equals, &end, 10) : 0;
    bool whole = end && *end == 0;
    if (!strcmp(word, "tied")) {
        if (!whole || (value != 0 && value != 1))
            return error_set(error, EXIT_USAGE, "--model: tied is 0 or 1, not '%s'.", equals ? equals : "");
        config->tied = value;
        return true;
    }
    for (size_t i = 0; i < COUNT(KEYS); i++) {
        if (strcmp(word, KEYS[i].name) != 0) continue;
        if (!whole || value < KEYS[i].min || value > KEYS[i].max)
            return error_set(error, EXIT_USAGE, "--model: %s is a whole number from %d to %d, not '%s'.", word, KEYS[i].min, KEYS[i].max,
                             equals ? equals : "");
        *(int *)((char *)config + KEYS[i].offset) = (int)value;
        given[i] = true;
        return true;
    }
    return error_set(error, EXIT_USAGE, "--model: no model or key '%s'. Models: 15M, 124M, 162M. Keys: layers=, heads=, channels=, ffn=, "
                     "vocab=, tied=0|1.", word);
}

static bool check_shape(const ModelConfig *config, const char *where, ExitCode code, Error *error) {
    if (config->channels % config->heads)
        return error_set(error, code, "%s: %d channels do not divide among %d heads.", where, config->channels, config->heads);
    if (config->channels / config->heads % 2)
        return error_set(error, code, "%s: the head size is %d channels / %d heads = %d; RoPE needs an even one.", where,
                         config->channels, config->heads, config->channels / config->heads);
    return true;
}

bool model_parse(ModelConfig *config, const char *text, Error *error) {
    char words[512];
    bool given[COUNT(KEYS)] = {false}, preset = false;
    if (strlen(text) >= sizeof words) return error_set(error, EXIT_USAGE, "--model: longer than %zu characters.", sizeof words - 1);
    strcpy(words, text);
    config->vocab = 50257;
    config->tied = true;
    config->rope_theta = 10000;
    char *rest = words;
    for (char *word = strsep(&rest, ","); word; word = strsep(&rest, ",")) {
        bool found = false;
        for (size_t i = 0; word == words && i < COUNT(PRESETS); i++) {
            if (strcmp(word, PRESETS[i].name) != 0) continue;
            config->layers = PRESETS[i].layers, config->heads = PRESETS[i].heads, config->channels = PRESETS[i].channels;
            config->ffn = PRESETS[i].ffn, config->vocab = PRESETS[i].vocab, config->tied = PRESETS[i].tied;
            preset = found = true;
        }
        if (!found && !parse_key(config, given, word, error)) return false;
    }
    for (size_t i = 0; i < COUNT(KEYS) - 1 && !preset; i++)
        if (!given[i]) return error_set(error, EXIT_USAGE, "--model %s: %s= is missing.", text, KEYS[i].name);
    config->end_of_text = default_end_of_text(config->vocab);
    return check_shape(config, "--model", EXIT_USAGE, error);
}

// ---------------------------------------------------------------------------------------------------------------------------
// Tensors

typedef enum { NONE, CHANNELS, FFN, VOCAB, HEADS } Dimension;
typedef enum { START_ONE, START_NORMAL, START_RESIDUAL, START_S } Start;

// One row a tensor. `joined`: follows the one before without a gap, so that one product serves both.
typedef struct {
    const char *name;
    Dimension rows, cols;
    Start start;
    bool joined;
    size_t field;              // where its offset goes
} Row;

#define IN_LAYER(field) offsetof(LayerOffsets, field)
#define IN_LIST(field) offsetof(TensorList, field)

static const Row FIRST_ROWS[] = {
    {"model.embed_tokens.weight",             VOCAB,    CHANNELS, START_NORMAL,   false, IN_LIST(embedding)},
};
static const Row LAYER_ROWS[] = {                                    // after "model.layers.N."
    {"input_layernorm.weight",                CHANNELS, NONE,     START_ONE,      false, IN_LAYER(norm1)},
    {"self_attn.q_proj.weight",               CHANNELS, CHANNELS, START_NORMAL,   false, IN_LAYER(q)},
    {"self_attn.k_proj.weight",               CHANNELS, CHANNELS, START_NORMAL,   true,  IN_LAYER(k)},
    {"self_attn.v_proj.weight",               CHANNELS, CHANNELS, START_NORMAL,   true,  IN_LAYER(v)},
    {"self_attn.attn_scale",                  HEADS,    NONE,     START_S,        false, IN_LAYER(s)},
    {"self_attn.o_proj.weight",               CHANNELS, CHANNELS, START_RESIDUAL, false, IN_LAYER(o)},
    {"post_attention_layernorm.weight",       CHANNELS, NONE,     START_ONE,      false, IN_LAYER(norm2)},
    {"mlp.gate_proj.weight",                  FFN,      CHANNELS, START_NORMAL,   false, IN_LAYER(gate)},
    {"mlp.up_proj.weight",                    FFN,      CHANNELS, START_NORMAL,   true,  IN_LAYER(up)},
    {"mlp.down_proj.weight",                  CHANNELS, FFN,      START_RESIDUAL, false, IN_LAYER(down)},
};
static const Row LAST_ROWS[] = {
    {"model.norm.weight",                     CHANNELS, NONE,     START_ONE,      false, IN_LIST(norm)},
    {"lm_head.weight",                        VOCAB,    CHANNELS, START_NORMAL,   false, IN_LIST(head)},
};

static size_t dimension(const ModelConfig *config, Dimension d) {
    switch (d) {
    case CHANNELS: return (size_t)config->channels;
    case FFN:      return (size_t)config->ffn;
    case VOCAB:    return (size_t)config->vocab;
    case HEADS:    return (size_t)config->heads;
    case NONE:     break;
    }
    return 1;
}

size_t padded_vocab(const ModelConfig *config) {
    return ((size_t)config->vocab + 127) / 128 * 128;
}

static void add(TensorList *list, const ModelConfig *config, const Row *row, const char *prefix, void *offsets) {
    Tensor *t = &list->tensors[list->count++];
    *t = (Tensor){.ndim = row->cols == NONE ? 1 : 2, .shape = {dimension(config, row->rows), dimension(config, row->cols)}};
    snprintf(t->name, sizeof t->name, "%s%s", prefix, row->name);
    t->elements = t->shape[0] * t->shape[1];
    t->decay = t->ndim == 2;
    t->is_s = row->start == START_S;
    t->mean = row->start == START_ONE ? 1.0f : t->is_s ? (float)normalizer_s_start(&config->attn, config->seq_len) : 0.0f;
    t->std = row->start == START_NORMAL ? 0.02f : row->start == START_RESIDUAL ? 0.02f / sqrtf(2.0f * (float)config->layers) : 0.0f;
    if (!row->joined) list->floats = (list->floats + 15) / 16 * 16;      // 64 bytes
    t->offset = list->floats;
    *(size_t *)((char *)offsets + row->field) = t->offset;
    list->floats += (row->rows == VOCAB ? padded_vocab(config) : t->shape[0]) * t->shape[1];
}

TensorList tensors_of(const ModelConfig *config, bool room_for_s) {
    size_t layers = (size_t)config->layers;
    TensorList list = {.layers = calloc(layers, sizeof *list.layers)};
    list.tensors = calloc(COUNT(FIRST_ROWS) + layers * COUNT(LAYER_ROWS) + COUNT(LAST_ROWS), sizeof *list.tensors);
    if (!list.layers || !list.tensors) fail(EXIT_RESOURCE, "out of memory for the list of tensors.");
    room_for_s = room_for_s || normalizer_has_s(&config->attn);
    for (size_t i = 0; i < COUNT(FIRST_ROWS); i++) add(&list, config, &FIRST_ROWS[i], "", &list);
    for (size_t l = 0; l < layers; l++) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "model.layers.%zu.", l);
        for (size_t i = 0; i < COUNT(LAYER_ROWS); i++)
            if (LAYER_ROWS[i].start != START_S || room_for_s) add(&list, config, &LAYER_ROWS[i], prefix, &list.layers[l]);
    }
    for (size_t i = 0; i < COUNT(LAST_ROWS); i++)
        if (LAST_ROWS[i].field != IN_LIST(head) || !config->tied) add(&list, config, &LAST_ROWS[i], "", &list);
    if (config->tied) list.head = list.embedding;
    return list;
}

void tensors_free(TensorList *list) {
    free(list->tensors);
    free(list->layers);
    *list = (TensorList){0};
}

bool tensor_exists(const Tensor *tensor, const Normalizer *attn) {
    return !tensor->is_s || normalizer_has_s(attn);
}

bool tensor_trained(const Tensor *tensor, const Normalizer *attn) {
    return !tensor->is_s || (normalizer_has_s(attn) && !attn->fixed);
}

uint64_t model_parameters(const ModelConfig *config) {
    TensorList list = tensors_of(config, false);
    uint64_t sum = 0;
    for (size_t i = 0; i < list.count; i++) sum += list.tensors[i].elements;
    tensors_free(&list);
    return sum;
}

uint64_t model_product_parameters(const ModelConfig *config) {
    uint64_t embedding = (uint64_t)config->vocab * (uint64_t)config->channels;
    return model_parameters(config) - (config->tied ? 0 : embedding);
}

double model_flops_per_token(const ModelConfig *config, size_t T) {
    return 6.0 * (double)model_product_parameters(config) + 12.0 * config->layers * config->channels * (double)T;
}

// ---------------------------------------------------------------------------------------------------------------------------
// config.json

static const char *const STAGES[] = {"qk", "scale", "offset", "phi", "norm", "post"};

static Stage stage_value(const Normalizer *n, size_t i) {
    const Stage values[] = {n->qk, n->scale, n->offset, n->phi, n->norm, n->post};
    return values[i];
}

bool model_is_plain_llama(const ModelConfig *config) {
    Normalizer softmax;
    char message[256];
    return normalizer_parse(&softmax, "softmax", message, sizeof message) && normalizer_equal(&config->attn, &softmax);
}

char *model_config_json(const ModelConfig *config, bool bf16) {
    cJSON *json = cJSON_CreateObject(), *rope, *attn;
    bool plain = model_is_plain_llama(config);
    cJSON_AddItemToObject(json, "architectures",
                          cJSON_CreateStringArray((const char *[]){plain ? "LlamaForCausalLM" : "AttnGPTForCausalLM"}, 1));
    cJSON_AddStringToObject(json, "model_type", plain ? "llama" : "attn_gpt");
    if (!plain) {
        cJSON *map = cJSON_AddObjectToObject(json, "auto_map");
        cJSON_AddStringToObject(map, "AutoConfig", "modeling_attn_gpt.AttnGPTConfig");
        cJSON_AddStringToObject(map, "AutoModelForCausalLM", "modeling_attn_gpt.AttnGPTForCausalLM");
    }
    cJSON_AddNumberToObject(json, "vocab_size", config->vocab);
    cJSON_AddNumberToObject(json, "hidden_size", config->channels);
    cJSON_AddNumberToObject(json, "intermediate_size", config->ffn);
    cJSON_AddNumberToObject(json, "num_hidden_layers", config->layers);
    cJSON_AddNumberToObject(json, "num_attention_heads", config->heads);
    cJSON_AddNumberToObject(json, "num_key_value_heads", config->heads);
    cJSON_AddNumberToObject(json, "head_dim", config->channels / config->heads);
    cJSON_AddNumberToObject(json, "max_position_embeddings", config->seq_len);
    cJSON_AddStringToObject(json, "hidden_act", "silu");
    cJSON_AddNumberToObject(json, "rms_norm_eps", 1e-5);
    cJSON_AddNumberToObject(json, "rope_theta", config->rope_theta);
    rope = cJSON_AddObjectToObject(json, "rope_parameters");
    cJSON_AddStringToObject(rope, "rope_type", "default");
    cJSON_AddNumberToObject(rope, "rope_theta", config->rope_theta);
    cJSON_AddBoolToObject(json, "tie_word_embeddings", config->tied);
    cJSON_AddBoolToObject(json, "attention_bias", false);
    cJSON_AddBoolToObject(json, "mlp_bias", false);
    cJSON_AddNumberToObject(json, "attention_dropout", 0);
    cJSON_AddNumberToObject(json, "initializer_range", 0.02);
    cJSON_AddNumberToObject(json, "bos_token_id", config->end_of_text);
    cJSON_AddNumberToObject(json, "eos_token_id", config->end_of_text);
    cJSON_AddBoolToObject(json, "use_cache", true);
    cJSON_AddStringToObject(json, "torch_dtype", bf16 ? "bfloat16" : "float32");
    attn = cJSON_AddObjectToObject(json, "attention_normalizer");
    cJSON_AddStringToObject(attn, "name", config->attn.text);
    cJSON_AddNumberToObject(attn, "seq_len", config->seq_len);
    for (size_t i = 0; i < COUNT(STAGES); i++) {
        char text[64];
        cJSON_AddStringToObject(attn, STAGES[i], normalizer_stage_text(STAGES[i], stage_value(&config->attn, i), text, sizeof text));
    }
    if (config->attn.fixed) cJSON_AddBoolToObject(attn, "fixed", true);
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    if (!text) fail(EXIT_RESOURCE, "out of memory for config.json.");
    return text;
}

// A whole number within bounds, or `fallback` where the key is missing (fallback < min: it must be there).
static bool read_int(const cJSON *json, const char *path, const char *key, int min, int max, int fallback, int *out, Error *error) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    uint64_t value;
    if ((!item || cJSON_IsNull(item)) && fallback >= min) {
        *out = fallback;
        return true;
    }
    if (!json_u64(item, &value) || value < (uint64_t)min || value > (uint64_t)max)
        return error_set(error, EXIT_INPUT, "%s: \"%s\" must be a whole number from %d to %d.", path, key, min, max);
    *out = (int)value;
    return true;
}

static bool is_true(const cJSON *json, const char *key) {
    return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, key));
}

// What this project's model does not have, and would silently compute wrongly without.
static bool refuse_foreign(const cJSON *json, const char *path, const ModelConfig *config, Error *error) {
    int kv = 0, head_dim = 0;
    if (!read_int(json, path, "num_key_value_heads", 1, INT_MAX, config->heads, &kv, error)) return false;
    if (kv != config->heads)
        return error_set(error, EXIT_INPUT, "%s: a grouped-query model (%d heads share %d key-value heads); only models with one key-value "
                         "head for each head are read.", path, config->heads, kv);
    if (!read_int(json, path, "head_dim", 1, INT_MAX, config->channels / config->heads, &head_dim, error)) return false;
    if (head_dim != config->channels / config->heads)
        return error_set(error, EXIT_INPUT, "%s: head_dim is %d; expected hidden_size/num_attention_heads = %d.", path, head_dim,
                         config->channels / config->heads);
    const cJSON *act = cJSON_GetObjectItemCaseSensitive(json, "hidden_act");
    if (cJSON_IsString(act) && strcmp(act->valuestring, "silu") != 0)
        return error_set(error, EXIT_INPUT, "%s: hidden_act is \"%s\"; only \"silu\" is read.", path, act->valuestring);
    if (is_true(json, "attention_bias") || is_true(json, "mlp_bias"))
        return error_set(error, EXIT_INPUT, "%s: a model with biases; only models without are read.", path);
    const cJSON *eps = cJSON_GetObjectItemCaseSensitive(json, "rms_norm_eps");
    if (!cJSON_IsNumber(eps) || fabs(eps->valuedouble - 1e-5) > 1e-9)
        return error_set(error, EXIT_INPUT, "%s: rms_norm_eps must be 1e-5, which is what this model computes with.", path);
    return true;
}

static bool read_rope(const cJSON *json, const char *path, ModelConfig *config, Error *error) {
    const cJSON *theta = cJSON_GetObjectItemCaseSensitive(json, "rope_theta");
    const cJSON *rope = cJSON_GetObjectItemCaseSensitive(json, "rope_parameters");
    if (!rope || cJSON_IsNull(rope)) rope = cJSON_GetObjectItemCaseSensitive(json, "rope_scaling");
    if (cJSON_IsObject(rope)) {
        const cJSON *type = cJSON_GetObjectItemCaseSensitive(rope, "rope_type");
        if (cJSON_IsString(type) && strcmp(type->valuestring, "default") != 0)
            return error_set(error, EXIT_INPUT, "%s: rope_type is \"%s\"; only \"default\" is read.", path, type->valuestring);
        const cJSON *inner = cJSON_GetObjectItemCaseSensitive(rope, "rope_theta");
        if (cJSON_IsNumber(theta) && cJSON_IsNumber(inner) && theta->valuedouble != inner->valuedouble)
            return error_set(error, EXIT_INPUT, "%s: rope_theta is %.15g, but %s.rope_theta is %.15g. Remove the wrong one.", path,
                             theta->valuedouble, rope->string, inner->valuedouble);
        if (!cJSON_IsNumber(theta)) theta = inner;
    }
    config->rope_theta = cJSON_IsNumber(theta) ? theta->valuedouble : 10000;
    if (!(config->rope_theta > 1 && config->rope_theta < 1e12))
        return error_set(error, EXIT_INPUT, "%s: rope_theta must lie between 1 and 1e12.", path);
    return true;
}

static bool read_normalizer(const cJSON *json, const char *path, ModelConfig *config, Error *error) {
    const cJSON *attn = cJSON_GetObjectItemCaseSensitive(json, "attention_normalizer");
    char message[1024];
    if (!attn) return normalizer_parse(&config->attn, "softmax", message, sizeof message);
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(attn, "name");
    if (!cJSON_IsString(name))
        return error_set(error, EXIT_INPUT, "%s: attention_normalizer has no \"name\".", path);
    if (!normalizer_parse(&config->attn, name->valuestring, message, sizeof message))
        return error_set(error, EXIT_INPUT, "%s: attention_normalizer \"%s\": %s.", path, name->valuestring, message);
    for (size_t i = 0; i < COUNT(STAGES); i++) {
        char text[64];
        const cJSON *stage = cJSON_GetObjectItemCaseSensitive(attn, STAGES[i]);
        normalizer_stage_text(STAGES[i], stage_value(&config->attn, i), text, sizeof text);
        if (stage && (!cJSON_IsString(stage) || strcmp(stage->valuestring, text) != 0))
            return error_set(error, EXIT_INPUT, "%s: attention_normalizer \"%s\" means %s=%s, but the file says %s=%s.", path,
                             name->valuestring, STAGES[i], text, STAGES[i], cJSON_IsString(stage) ? stage->valuestring : "(no text)");
    }
    return read_int(attn, path, "seq_len", 1, MAX_SEQ_LEN, config->seq_len, &config->seq_len, error);
}

static bool read_config(ModelConfig *config, const cJSON *json, const char *path, Error *error) {
    if (!cJSON_IsObject(json)) return error_set(error, EXIT_INPUT, "%s: expected a JSON object.", path);
    return read_int(json, path, "vocab_size", 2, MAX_VOCAB, -1, &config->vocab, error)
        && read_int(json, path, "hidden_size", 2, 65536, -1, &config->channels, error)
        && read_int(json, path, "intermediate_size", 1, 262144, -1, &config->ffn, error)
        && read_int(json, path, "num_hidden_layers", 1, 1024, -1, &config->layers, error)
        && read_int(json, path, "num_attention_heads", 1, 1024, -1, &config->heads, error)
        && read_int(json, path, "max_position_embeddings", 1, INT_MAX, 1024, &config->seq_len, error)
        && read_int(json, path, "eos_token_id", 0, config->vocab - 1, default_end_of_text(config->vocab), &config->end_of_text, error)
        && check_shape(config, path, EXIT_INPUT, error)
        && refuse_foreign(json, path, config, error)
        && read_rope(json, path, config, error)
        && read_normalizer(json, path, config, error);
}

bool model_config_read(ModelConfig *config, const char *folder, Error *error) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/config.json", folder);
    cJSON *json = json_read(path, error);
    if (!json) return false;
    *config = (ModelConfig){0};
    config->tied = is_true(json, "tie_word_embeddings");
    bool right = read_config(config, json, path, error);
    cJSON_Delete(json);
    return right;
}

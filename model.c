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
    bool in_llama, in_gau;     // must it be given for a model of that block?
} KEYS[] = {
    {"layers",   offsetof(ModelConfig, layers),   1, 1024,      true,  true},
    {"heads",    offsetof(ModelConfig, heads),    1, 1024,      true,  false},
    {"channels", offsetof(ModelConfig, channels), 2, 65536,     true,  true},
    {"ffn",      offsetof(ModelConfig, ffn),      1, 262144,    true,  false},
    {"vocab",    offsetof(ModelConfig, vocab),    2, MAX_VOCAB, false, false},
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
    if (!strcmp(word, "block")) {
        if (!equals || (strcmp(equals, "llama") != 0 && strcmp(equals, "gau") != 0))
            return error_set(error, EXIT_USAGE, "--model: block is llama or gau, not '%s'.", equals ? equals : "");
        config->block = !strcmp(equals, "gau") ? BLOCK_GAU : BLOCK_LLAMA;
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
                     "vocab=, tied=0|1, block=llama|gau.", word);
}

// Two units of one head stand for a layer.
static bool make_gau(ModelConfig *config, const bool *given, Error *error) {
    for (size_t i = 0; i < COUNT(KEYS); i++)
        if (given[i] && (!strcmp(KEYS[i].name, "heads") || !strcmp(KEYS[i].name, "ffn")))
            return error_set(error, EXIT_USAGE, "--model: %s= has no place beside block=gau, whose units have one head and values of width "
                             "2 x channels.", KEYS[i].name);
    config->layers *= 2;
    config->heads = 1;
    config->ffn = 2 * config->channels;
    return true;
}

size_t head_size(const ModelConfig *config) {
    return config->block == BLOCK_GAU ? GAU_HEAD : (size_t)(config->channels / config->heads);
}

size_t value_size(const ModelConfig *config) {
    return config->block == BLOCK_GAU ? (size_t)config->ffn : (size_t)(config->channels / config->heads);
}

bool model_same_shape(const ModelConfig *a, const ModelConfig *b) {
    return a->block == b->block && a->layers == b->layers && a->heads == b->heads && a->channels == b->channels && a->ffn == b->ffn &&
           a->vocab == b->vocab && a->tied == b->tied;
}

const char *model_text(const ModelConfig *c, char *out, size_t size) {
    if (c->block == BLOCK_GAU)
        snprintf(out, size, "layers=%d,block=gau,channels=%d,tied=%d,vocab=%d", c->layers / 2, c->channels, c->tied, c->vocab);
    else
        snprintf(out, size, "layers=%d,heads=%d,channels=%d,ffn=%d,tied=%d,vocab=%d", c->layers, c->heads, c->channels, c->ffn, c->tied, c->vocab);
    return out;
}

static bool check_shape(const ModelConfig *config, const char *where, ExitCode code, Error *error) {
    if (config->block == BLOCK_GAU) return true;
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
    config->block = BLOCK_LLAMA;
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
    for (size_t i = 0; i < COUNT(KEYS) && !preset; i++) {
        bool needed = config->block == BLOCK_GAU ? KEYS[i].in_gau : KEYS[i].in_llama;
        if (!given[i] && needed) return error_set(error, EXIT_USAGE, "--model %s: %s= is missing.", text, KEYS[i].name);
    }
    if (config->block == BLOCK_GAU && !make_gau(config, given, error)) return false;
    config->end_of_text = default_end_of_text(config->vocab);
    return check_shape(config, "--model", EXIT_USAGE, error);
}

// ---------------------------------------------------------------------------------------------------------------------------
// Tensors

typedef enum { NONE, CHANNELS, FFN, VOCAB, HEADS, QK_WIDTH, LENGTH } Dimension;
typedef enum { START_ZERO, START_ONE, START_NORMAL, START_RESIDUAL, START_SCALAR } Start;

// One row a tensor. `joined`: follows the one before without a gap, so that one product serves both.
typedef struct {
    const char *name;
    Dimension rows, cols;
    Start start;
    bool joined;
    Scalar scalar;
    size_t field;              // where its offset goes
} Row;

#define IN_LAYER(field) offsetof(LayerOffsets, field)
#define IN_LIST(field) offsetof(TensorList, field)

static const Row FIRST_ROWS[] = {
    {"model.embed_tokens.weight",       VOCAB,    CHANNELS, START_NORMAL,   false, SCALAR_NONE, IN_LIST(embedding)},
    {"model.attn_pn",                   LENGTH,   NONE,     START_SCALAR,   false, SCALAR_P,    IN_LIST(p)},
};
static const Row LLAMA_ROWS[] = {                                    // after "model.layers.N."
    {"input_layernorm.weight",          CHANNELS, NONE,     START_ONE,      false, SCALAR_NONE, IN_LAYER(norm1)},
    {"self_attn.q_proj.weight",         CHANNELS, CHANNELS, START_NORMAL,   false, SCALAR_NONE, IN_LAYER(q)},
    {"self_attn.k_proj.weight",         CHANNELS, CHANNELS, START_NORMAL,   true,  SCALAR_NONE, IN_LAYER(k)},
    {"self_attn.v_proj.weight",         CHANNELS, CHANNELS, START_NORMAL,   true,  SCALAR_NONE, IN_LAYER(v)},
    {"self_attn.attn_scale",            HEADS,    NONE,     START_SCALAR,   false, SCALAR_S,    IN_LAYER(s)},
    {"self_attn.attn_bias",             HEADS,    NONE,     START_SCALAR,   false, SCALAR_B,    IN_LAYER(b)},
    {"self_attn.attn_sink",             HEADS,    NONE,     START_SCALAR,   false, SCALAR_SINK, IN_LAYER(sink)},
    {"self_attn.o_proj.weight",         CHANNELS, CHANNELS, START_RESIDUAL, false, SCALAR_NONE, IN_LAYER(o)},
    {"post_attention_layernorm.weight", CHANNELS, NONE,     START_ONE,      false, SCALAR_NONE, IN_LAYER(norm2)},
    {"mlp.gate_proj.weight",            FFN,      CHANNELS, START_NORMAL,   false, SCALAR_NONE, IN_LAYER(gate)},
    {"mlp.up_proj.weight",              FFN,      CHANNELS, START_NORMAL,   true,  SCALAR_NONE, IN_LAYER(up)},
    {"mlp.down_proj.weight",            CHANNELS, FFN,      START_RESIDUAL, false, SCALAR_NONE, IN_LAYER(down)},
};
static const Row GAU_ROWS[] = {
    {"input_layernorm.weight",          CHANNELS, NONE,     START_ONE,      false, SCALAR_NONE, IN_LAYER(norm1)},
    {"gau.u_proj.weight",               FFN,      CHANNELS, START_NORMAL,   false, SCALAR_NONE, IN_LAYER(u)},
    {"gau.v_proj.weight",               FFN,      CHANNELS, START_NORMAL,   true,  SCALAR_NONE, IN_LAYER(gau_v)},
    {"gau.z_proj.weight",               QK_WIDTH, CHANNELS, START_NORMAL,   true,  SCALAR_NONE, IN_LAYER(z)},
    {"gau.q_gain",                      QK_WIDTH, NONE,     START_ONE,      false, SCALAR_NONE, IN_LAYER(q_gain)},
    {"gau.q_offset",                    QK_WIDTH, NONE,     START_ZERO,     false, SCALAR_NONE, IN_LAYER(q_offset)},
    {"gau.k_gain",                      QK_WIDTH, NONE,     START_ONE,      false, SCALAR_NONE, IN_LAYER(k_gain)},
    {"gau.k_offset",                    QK_WIDTH, NONE,     START_ZERO,     false, SCALAR_NONE, IN_LAYER(k_offset)},
    {"gau.attn_scale",                  HEADS,    NONE,     START_SCALAR,   false, SCALAR_S,    IN_LAYER(s)},
    {"gau.attn_bias",                   HEADS,    NONE,     START_SCALAR,   false, SCALAR_B,    IN_LAYER(b)},
    {"gau.attn_sink",                   HEADS,    NONE,     START_SCALAR,   false, SCALAR_SINK, IN_LAYER(sink)},
    {"gau.o_proj.weight",               CHANNELS, FFN,      START_RESIDUAL, false, SCALAR_NONE, IN_LAYER(o)},
};
static const Row LAST_ROWS[] = {
    {"model.norm.weight",               CHANNELS, NONE,     START_ONE,      false, SCALAR_NONE, IN_LIST(norm)},
    {"lm_head.weight",                  VOCAB,    CHANNELS, START_NORMAL,   false, SCALAR_NONE, IN_LIST(head)},
};

static size_t dimension(const ModelConfig *config, Dimension d) {
    switch (d) {
    case CHANNELS: return (size_t)config->channels;
    case FFN:      return (size_t)config->ffn;
    case VOCAB:    return (size_t)config->vocab;
    case HEADS:    return (size_t)config->heads;
    case QK_WIDTH: return GAU_HEAD;
    case LENGTH:   return (size_t)config->seq_len;
    case NONE:     break;
    }
    return 1;
}

size_t padded_vocab(const ModelConfig *config) {
    return ((size_t)config->vocab + 127) / 128 * 128;
}

// Where a tensor's numbers start: their mean and their deviation. Each layer writes to the residual stream twice, a gated unit once.
static void set_start(Tensor *t, const ModelConfig *config, Start start) {
    int writes = config->block == BLOCK_GAU ? config->layers : 2 * config->layers;
    t->mean = start == START_ONE ? 1.0f : start == START_SCALAR ? (float)normalizer_start(&config->attn, t->scalar, config->seq_len) : 0.0f;
    t->std = start == START_NORMAL ? 0.02f : start == START_RESIDUAL ? 0.02f / sqrtf((float)writes) : 0.0f;
}

static void add(TensorList *list, const ModelConfig *config, const Row *row, const char *prefix, void *offsets) {
    Tensor *t = &list->tensors[list->count++];
    *t = (Tensor){.ndim = row->cols == NONE ? 1 : 2, .shape = {dimension(config, row->rows), dimension(config, row->cols)},
                  .scalar = row->scalar};
    snprintf(t->name, sizeof t->name, "%s%s", prefix, row->name);
    t->elements = t->shape[0] * t->shape[1];
    t->decay = t->ndim == 2;
    set_start(t, config, row->start);
    if (!row->joined) list->floats = (list->floats + 15) / 16 * 16;      // 64 bytes
    t->offset = list->floats;
    *(size_t *)((char *)offsets + row->field) = t->offset;
    list->floats += (row->rows == VOCAB ? padded_vocab(config) : t->shape[0]) * t->shape[1];
}

// Does any of the normalisers have the row's scalars (or is the row none)?
static bool row_exists(const Row *row, const ModelConfig *config, const Normalizer *const *others, size_t count) {
    bool there = !row->scalar || normalizer_has(&config->attn, row->scalar);
    for (size_t i = 0; i < count && !there; i++) there = normalizer_has(others[i], row->scalar);
    return there;
}

TensorList tensors_of(const ModelConfig *config, const Normalizer *const *others, size_t count) {
    size_t layers = (size_t)config->layers, rows = config->block == BLOCK_GAU ? COUNT(GAU_ROWS) : COUNT(LLAMA_ROWS);
    const Row *layer_rows = config->block == BLOCK_GAU ? GAU_ROWS : LLAMA_ROWS;
    TensorList list = {.layers = calloc(layers, sizeof *list.layers)};
    list.tensors = calloc(COUNT(FIRST_ROWS) + layers * rows + COUNT(LAST_ROWS), sizeof *list.tensors);
    if (!list.layers || !list.tensors) fail(EXIT_RESOURCE, "out of memory for the list of tensors.");
    for (size_t i = 0; i < COUNT(FIRST_ROWS); i++)
        if (row_exists(&FIRST_ROWS[i], config, others, count)) add(&list, config, &FIRST_ROWS[i], "", &list);
    for (size_t l = 0; l < layers; l++) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "model.layers.%zu.", l);
        for (size_t i = 0; i < rows; i++)
            if (row_exists(&layer_rows[i], config, others, count)) add(&list, config, &layer_rows[i], prefix, &list.layers[l]);
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
    return !tensor->scalar || normalizer_has(attn, tensor->scalar);
}

bool tensor_trained(const Tensor *tensor, const Normalizer *attn) {
    return !tensor->scalar || normalizer_trains(attn, tensor->scalar);
}

uint64_t model_parameters(const ModelConfig *config) {
    TensorList list = tensors_of(config, NULL, 0);
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
    double width = (double)config->heads * (double)(head_size(config) + value_size(config));
    return 6.0 * (double)model_product_parameters(config) + 6.0 * config->layers * width * (double)T;
}

// ---------------------------------------------------------------------------------------------------------------------------
// config.json

bool model_is_plain_llama(const ModelConfig *config) {
    Normalizer softmax;
    char message[256];
    return config->block == BLOCK_LLAMA && normalizer_parse(&softmax, "softmax", message, sizeof message) && normalizer_equal(&config->attn, &softmax);
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
    cJSON_AddNumberToObject(json, "head_dim", (double)head_size(config));
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
    for (size_t i = 0; i < STAGE_COUNT; i++) {
        char text[64];
        cJSON_AddStringToObject(attn, stage_names[i], normalizer_stage_text(&config->attn, i, text, sizeof text));
    }
    if (config->attn.fixed) cJSON_AddBoolToObject(attn, "fixed", true);
    if (config->block == BLOCK_GAU) cJSON_AddStringToObject(attn, "block", "gau");
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
    int expected = (int)head_size(config);
    if (!read_int(json, path, "head_dim", 1, INT_MAX, expected, &head_dim, error)) return false;
    if (head_dim != expected)
        return error_set(error, EXIT_INPUT, "%s: head_dim is %d; expected %s = %d.", path, head_dim,
                         config->block == BLOCK_GAU ? "a gated unit's" : "hidden_size/num_attention_heads", expected);
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
    if (!attn) return normalizer_parse(&config->attn, "softmax", message, sizeof message) ||
                      error_set(error, EXIT_INPUT, "%s: no attention_normalizer, which means softmax: %s.", path, message);
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(attn, "name");
    if (!cJSON_IsString(name))
        return error_set(error, EXIT_INPUT, "%s: attention_normalizer has no \"name\".", path);
    if (!normalizer_parse(&config->attn, name->valuestring, message, sizeof message))
        return error_set(error, EXIT_INPUT, "%s: attention_normalizer \"%s\": %s.", path, name->valuestring, message);
    for (size_t i = 0; i < STAGE_COUNT; i++) {
        char text[64];
        const cJSON *stage = cJSON_GetObjectItemCaseSensitive(attn, stage_names[i]);
        normalizer_stage_text(&config->attn, i, text, sizeof text);
        if (stage && (!cJSON_IsString(stage) || strcmp(stage->valuestring, text) != 0))
            return error_set(error, EXIT_INPUT, "%s: attention_normalizer \"%s\" means %s=%s, but the file says %s=%s.", path,
                             name->valuestring, stage_names[i], text, stage_names[i], cJSON_IsString(stage) ? stage->valuestring : "(no text)");
    }
    if (is_true(attn, "fixed") != config->attn.fixed)
        return error_set(error, EXIT_INPUT, "%s: attention_normalizer \"%s\" %s, but the file says otherwise in \"fixed\".", path,
                         name->valuestring, config->attn.fixed ? "has a fixed s" : "has no fixed s");
    return read_int(attn, path, "seq_len", 1, MAX_SEQ_LEN, config->seq_len, &config->seq_len, error);
}

static bool read_block(const cJSON *json, const char *path, ModelConfig *config, Error *error) {
    const cJSON *block = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, "attention_normalizer"), "block");
    if (!block) return true;
    if (!cJSON_IsString(block) || strcmp(block->valuestring, "gau") != 0)
        return error_set(error, EXIT_INPUT, "%s: attention_normalizer.block must be \"gau\" where there is one.", path);
    config->block = BLOCK_GAU;
    if (config->heads == 1 && config->ffn == 2 * config->channels) return true;
    return error_set(error, EXIT_INPUT, "%s: a gated attention unit has num_attention_heads 1 and intermediate_size 2 x hidden_size = %d, not %d "
                     "and %d.", path, 2 * config->channels, config->heads, config->ffn);
}

static bool read_config(ModelConfig *config, const cJSON *json, const char *path, Error *error) {
    if (!cJSON_IsObject(json)) return error_set(error, EXIT_INPUT, "%s: expected a JSON object.", path);
    return read_int(json, path, "vocab_size", 2, MAX_VOCAB, -1, &config->vocab, error)
        && read_int(json, path, "hidden_size", 2, 65536, -1, &config->channels, error)
        && read_int(json, path, "intermediate_size", 1, 262144, -1, &config->ffn, error)
        && read_int(json, path, "num_hidden_layers", 1, 2048, -1, &config->layers, error)
        && read_int(json, path, "num_attention_heads", 1, 1024, -1, &config->heads, error)
        && read_int(json, path, "max_position_embeddings", 1, INT_MAX, 1024, &config->seq_len, error)
        && read_int(json, path, "eos_token_id", 0, config->vocab - 1, default_end_of_text(config->vocab), &config->end_of_text, error)
        && read_block(json, path, config, error)
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

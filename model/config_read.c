// Reads config.json next to our weights, and next to those of Llama, Mistral, Qwen2 and Qwen3 models from elsewhere.
//
// Any key that is not known to be harmless may change what the model computes, so every key in the file must
// be accounted for.
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "model/config.h"
#include "runtime/file.h"
#include "runtime/spelling.h"
#include "text/tokenizer.h"

static const Family NO_FAMILY = {.seq_len = 2048};

// Keys that never change this model's loss: ids that only generation uses, the file's origin, weight initialization,
// dropout (none in evaluation, and none in this trainer), and how other programs compute or generate.
// clang-format off
static const char *const HARMLESS[] = {
    "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "tokenizer_class",
    "_attn_implementation", "_attn_implementation_autoset", "use_cache", "pretraining_tp", "torchscript",
    "chunk_size_feed_forward", "return_dict", "output_attentions", "output_hidden_states", "output_scores",
    "return_dict_in_generate", "id2label", "label2id", "problem_type", "task_specific_params",
    "bos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "max_length", "min_length", "max_new_tokens", "num_beams",
    "num_beam_groups", "num_return_sequences", "early_stopping", "repetition_penalty", "length_penalty",
    "diversity_penalty", "exponential_decay_length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values",
    "is_llama_config", "transformers.js_config",       // SmolLM2
    "unsloth_version", "unsloth_fixed",                // folders that Unsloth wrote
};
// clang-format on

#define LENGTH "max_position_embeddings"

// Integers. All but LENGTH must be there.
static const struct {
    const char *key;
    size_t offset, min, max;
} SIZES[] = {
    // clang-format off
    {"vocab_size",              offsetof(ModelConfig, vocab),    2, MAX_VOCAB},
    {"hidden_size",             offsetof(ModelConfig, channels), 2, 65536},
    {"intermediate_size",       offsetof(ModelConfig, ffn),      1, 262144},
    {"num_hidden_layers",       offsetof(ModelConfig, layers),   1, MAX_LAYERS},
    {"num_attention_heads",     offsetof(ModelConfig, heads),    1, 1024},
    {LENGTH,                    offsetof(ModelConfig, seq_len),  1, INT_MAX},
    // clang-format on
};

// The other keys that we understand. Each has its function below.
// clang-format off
static const char *const UNDERSTOOD[] = {
    "model_type", "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "mlp_bias", "rms_norm_eps",
    "rope_theta", "rope_parameters", "rope_scaling", ROTARY_PART, "tie_word_embeddings", "eos_token_id", "layer_types",
    "quantization_config", "attention_normalizer",
};
// clang-format on

static Value quoted(const char *text) {
    cJSON *item = cJSON_CreateString(text);
    Value value = value_of(item);
    cJSON_Delete(item);
    return value;
}

static bool is_listed(const char *name, const char *const *list, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(name, list[i])) return true;
    return false;
}

// Notes that --ignore-config-key would remove the newest reason.
static void add_ignorable(Reader *r, const char *name) {
    size_t used = strlen(r->names);
    snprintf(r->names + used, sizeof r->names - used, "%s%s", used ? "," : "", name);
    r->ignorable++;
}

void config_unknown(Reader *r, const char *prefix, const cJSON *item) {
    char name[256];
    snprintf(name, sizeof name, "%s%s", prefix, item->string);
    if (says_nothing(item) || (r->ignored && word_place(r->ignored, ',', name) >= 0)) return;
    reasons_add(&r->reasons, "%s is %s: an unknown key, which may change the results", quoted(name).text,
                value_of(item).text);
    add_ignorable(r, name);
}

// Reads a size within bounds. Otherwise returns false and records the reason.
static bool read_size(Reader *r, const cJSON *object, const char *prefix, const char *key, size_t min, size_t max,
                      size_t *out) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    uint64_t value;
    if (json_u64(item, &value) && value >= min && value <= max) {
        *out = value;
        return true;
    }
    reasons_add(&r->reasons, "\"%s%s\" is %s; expected a whole number from %zu to %zu", prefix, key,
                value_of(item).text, min, max);
    return false;
}

static bool is_own(const Reader *r) {
    return r->family == &model_families[OUR_OWN];
}

static bool is_qwen(const Reader *r) {
    return r->family == &model_families[QWEN2] || r->family == &model_families[QWEN3];
}

static bool has_type(const Reader *r, const char *name) {
    const cJSON *type = get(r, "model_type");
    return cJSON_IsString(type) && !strcmp(type->valuestring, name);
}

static void read_type(Reader *r) {
    const cJSON *type = get(r, "model_type");
    r->family = &NO_FAMILY;
    for (size_t i = 0; i < FAMILY_COUNT; i++)
        if (has_type(r, model_families[i].model_type)) r->family = &model_families[i];
    if (r->family != &NO_FAMILY) return;
    bool gpt2 = has_type(r, "gpt2");
    r->foreign = type != NULL;
    reasons_add(&r->reasons,
                "\"model_type\" is %s; expected \"llama\", \"mistral\", \"qwen2\" or \"qwen3\" (or \"attn_gpt\", "
                "attn.c's own)%s",
                value_of(type).text,
                gpt2 ? "; a GPT-2 has learned positions, LayerNorm and GELU, which none of these has" : "");
}

// Reads the sizes. Missing or invalid ones stay 0.
static void read_sizes(Reader *r) {
    for (size_t i = 0; i < COUNT(SIZES); i++) {
        size_t *size = (size_t *)((char *)r->config + SIZES[i].offset);
        *size = 0;
        if (get(r, SIZES[i].key)) read_size(r, r->json, "", SIZES[i].key, SIZES[i].min, SIZES[i].max, size);
        else if (!strcmp(SIZES[i].key, LENGTH)) *size = r->family->seq_len;
        else if (!r->foreign)
            reasons_add(&r->reasons, "\"%s\" is missing; expected a whole number from %zu to %zu", SIZES[i].key,
                        SIZES[i].min, SIZES[i].max);
    }
}

// eos_token_id: an id, or a list of at most MAX_ENDS. Adds nothing without the key, or if it is invalid.
static void read_ends(Reader *r) {
    ModelConfig *c = r->config;
    const cJSON *item = get(r, "eos_token_id"), *one = cJSON_IsArray(item) ? item->child : item;
    bool valid = true;
    uint64_t id;
    while (one && valid) {
        valid = c->end_count < MAX_ENDS && json_u64(one, &id) && id < c->vocab;
        if (valid) c->ends[c->end_count++] = (int)id;
        one = cJSON_IsArray(item) ? one->next : NULL;
    }
    if (!valid)
        reasons_add(&r->reasons, "\"eos_token_id\" is %s; expected an id from 0 to %zu, or a list of at most %d",
                    value_of(item).text, c->vocab - 1, MAX_ENDS);
}

// An id that only other programs use: any other value counts as missing.
static int read_id(const Reader *r, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->json, key);
    uint64_t id;
    if (cJSON_IsNull(item)) return NULL_ID;
    return json_u64(item, &id) && id < r->config->vocab ? (int)id : NO_ID;
}

// The ids of special tokens. If the tokenizer in the folder has another token between the documents of shards than
// eos_token_id, the latter ends the turns of a chat. Without a tokenizer, its first id is between documents.
static void read_special(Reader *r, const char *folder) {
    ModelConfig *c = r->config;
    int tokens, end_of_text;
    if (!c->vocab) return;
    read_ends(r);
    c->end_of_text = c->end_count ? c->ends[0] : default_end_of_text(c->vocab);
    if (tokenizer_ids(folder, &tokens, &end_of_text) && end_of_text >= 0 && (size_t)end_of_text < c->vocab)
        c->end_of_text = end_of_text;
    c->bos = read_id(r, "bos_token_id");
    c->pad = read_id(r, "pad_token_id");
}

static void read_block(Reader *r) {
    const cJSON *block = cJSON_GetObjectItemCaseSensitive(get(r, "attention_normalizer"), "block");
    if (!block) return;
    for (int i = 0; i < BLOCK_COUNT; i++) {
        if (!cJSON_IsString(block) || strcmp(block->valuestring, block_shapes[i].name) != 0) continue;
        r->config->block = (Block)i;
        return;
    }
    reasons_add(&r->reasons, "attention_normalizer.block is %s; expected \"gau\" or no such key", value_of(block).text);
}

// The sizes that the block determines must be those in the file.
static void read_fixed(Reader *r) {
    static const struct {
        const char *key;
        size_t offset;
    } FIXABLE[] = {
        {"num_attention_heads", offsetof(ModelConfig, heads)},
        {"num_key_value_heads", offsetof(ModelConfig, kv_heads)},
        {"head_dim", offsetof(ModelConfig, head_dim)},
        {"intermediate_size", offsetof(ModelConfig, ffn)},
    };
    const BlockShape *block = &block_shapes[r->config->block];
    ModelConfig fixed = *r->config;
    if (!block->fix || !fixed.channels) return;
    block->fix(&fixed);
    for (size_t i = 0; i < COUNT(FIXABLE); i++) {
        const size_t *is = (const size_t *)((const char *)r->config + FIXABLE[i].offset);
        const size_t *must_be = (const size_t *)((const char *)&fixed + FIXABLE[i].offset);
        if (*is && *is != *must_be)
            reasons_add(&r->reasons, "\"%s\" is %zu; expected %zu with block \"%s\"", FIXABLE[i].key, *is, *must_be,
                        block->name);
    }
    if (r->config->qk_norm && !fixed.qk_norm)
        reasons_add(&r->reasons, "\"qk_norm\" is true; expected false with block \"%s\"", block->name);
    if (r->config->qkv_bias && !fixed.qkv_bias)
        reasons_add(&r->reasons, "\"qkv_bias\" is true; expected false with block \"%s\"", block->name);
    if (r->config->gate && !fixed.gate)
        reasons_add(&r->reasons, "\"gate\" is \"%s\"; expected no such key with block \"%s\"",
                    gate_names[r->config->gate], block->name);
}

// num_key_value_heads and head_dim. Some families may omit them.
static void read_heads(Reader *r) {
    ModelConfig *c = r->config;
    char message[256];
    if (!c->heads || !c->channels) return;
    if (get(r, "num_key_value_heads") || r->family->needs_kv_heads)
        read_size(r, r->json, "", "num_key_value_heads", 1, 1024, &c->kv_heads);
    if (get(r, "head_dim") || r->family->needs_head_dim) read_size(r, r->json, "", "head_dim", 1, 65536, &c->head_dim);
    read_fixed(r);
    if (!model_shape_complete(c, message, sizeof message)) reasons_add(&r->reasons, "%s", message);
}

// What every model of the family has; for our own, keys say so.
static void read_family(Reader *r) {
    ModelConfig *c = r->config;
    const struct {
        const char *key;
        bool *value, family;
    } parts[] = {{"qk_norm", &c->qk_norm, r->family->qk_norm}, {"qkv_bias", &c->qkv_bias, r->family->qkv_bias}};
    for (size_t i = 0; i < COUNT(parts); i++) {
        const cJSON *key = is_own(r) ? get(r, parts[i].key) : NULL;
        *parts[i].value = parts[i].family || cJSON_IsTrue(key);
        if (key && !cJSON_IsBool(key))
            reasons_add(&r->reasons, "\"%s\" is %s; expected true or false", parts[i].key, value_of(key).text);
    }
    const cJSON *gate = is_own(r) ? get(r, "gate") : NULL;
    for (int i = GATE_COUNT - 1; gate && i >= 0 && !c->gate; i--)
        if (cJSON_IsString(gate) && !strcmp(gate->valuestring, gate_names[i])) c->gate = (GateKind)i;
    if (gate && !c->gate)
        reasons_add(&r->reasons, "\"gate\" is %s; expected \"channel\", \"head\" or no such key", value_of(gate).text);
    const cJSON *type = is_own(r) ? get(r, "softmax_model_type") : NULL;
    c->mistral = r->family->mistral || cJSON_IsString(type);
    if (type && !(cJSON_IsString(type) && !strcmp(type->valuestring, model_families[MISTRAL].model_type)))
        reasons_add(&r->reasons, "\"softmax_model_type\" is %s; expected \"mistral\" or no such key",
                    value_of(type).text);
}

// The sliding window of a Mistral, in all of its layers, or of a Qwen, in those from max_window_layers on.
static void read_window(Reader *r) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->json, "sliding_window");
    const cJSON *used = get(r, "use_sliding_window"), *full = get(r, "max_window_layers");
    if (is_qwen(r) && used && !cJSON_IsBool(used))
        reasons_add(&r->reasons, "\"use_sliding_window\" is %s; expected true or false", value_of(used).text);
    if (r->family != &model_families[MISTRAL] && !(is_qwen(r) && cJSON_IsTrue(used))) return;
    size_t first = is_qwen(r) ? DEFAULT_FULL_LAYERS : 0;
    if (is_qwen(r) && full) read_size(r, r->json, "", "max_window_layers", 0, INT_MAX, &first);
    if (!item) r->window = DEFAULT_WINDOW;
    else if (!cJSON_IsNull(item) && !read_size(r, r->json, "", "sliding_window", 1, INT_MAX, &r->window))
        r->window = 1;    // so that what depends on it can be checked
    for (size_t l = first; l < r->config->layers && r->window; l++) r->slides[l] = true;
}

// Which layers have the window? In a Qwen, layer_types takes precedence over max_window_layers.
static void read_layer_types(Reader *r) {
    const cJSON *types = get(r, "layer_types"), *type;
    bool known = !types || cJSON_IsArray(types);
    size_t l = 0;
    cJSON_ArrayForEach(type, types) {
        const char *text = cJSON_GetStringValue(type);
        bool slides = text && r->window && is_qwen(r) && !strcmp(text, SLIDING);
        known = known && text && (slides || !strcmp(text, FULL));
        if (l < MAX_LAYERS && is_qwen(r)) r->slides[l++] = slides;
    }
    if (types && r->window && !is_qwen(r))
        reasons_add(&r->reasons,
                    "\"layer_types\" is %s; expected no such key beside \"sliding_window\" in a Mistral, because "
                    "transformers reads that as another family",
                    value_of(types).text);
    else if (!known && is_qwen(r) && !r->window)
        reasons_add(&r->reasons,
                    "\"layer_types\" is %s; expected \"" FULL "\" in every layer, because \"use_sliding_window\" is "
                    "not true or \"sliding_window\" is null",
                    value_of(types).text);
    else if (!known)
        reasons_add(&r->reasons, "\"layer_types\" is %s; expected \"" FULL "\"%s in every layer", value_of(types).text,
                    is_qwen(r) ? " or \"" SLIDING "\"" : "");
    else if (types && is_qwen(r) && (size_t)cJSON_GetArraySize(types) != r->config->layers)
        reasons_add(&r->reasons, "\"layer_types\" has %d items; expected one for each of %zu layers",
                    cJSON_GetArraySize(types), r->config->layers);
}

static void read_softcap(Reader *r) {
    const cJSON *cap = is_own(r) ? get(r, SOFTCAP) : NULL;
    if (!cap) return;
    double c = r->config->logit_softcap = cJSON_IsNumber(cap) ? cap->valuedouble : NAN;
    if (!(c == 0 || (c >= MIN_SOFTCAP && c <= MAX_SOFTCAP)))
        reasons_add(&r->reasons, "\"%s\" is %s; expected 0 or a number from %g to %g", SOFTCAP, value_of(cap).text,
                    MIN_SOFTCAP, MAX_SOFTCAP);
}

static void read_norm_eps(Reader *r) {
    const cJSON *eps = get(r, "rms_norm_eps");
    double value = cJSON_IsNumber(eps) ? eps->valuedouble : NAN;
    if (!eps && r->foreign) return;
    if (!(value >= MIN_NORM_EPS && value <= MAX_NORM_EPS))
        reasons_add(&r->reasons, "\"rms_norm_eps\" is %s; expected a number from %g to %g", value_of(eps).text,
                    MIN_NORM_EPS, MAX_NORM_EPS);
    r->config->norm_eps = value;
}

static void read_layers(Reader *r) {
    const cJSON *act = get(r, "hidden_act");
    static const char *const biases[] = {"attention_bias", "mlp_bias"};
    if (act && !(cJSON_IsString(act) && (!strcmp(act->valuestring, "silu") || !strcmp(act->valuestring, "swish"))))
        reasons_add(&r->reasons, "\"hidden_act\" is %s; expected \"silu\"", value_of(act).text);
    for (size_t i = 0; i < COUNT(biases); i++)
        if (get(r, biases[i]) && !cJSON_IsFalse(get(r, biases[i])))
            reasons_add(&r->reasons, "\"%s\" is %s; only Qwen2's biases, of q, k and v, are supported", biases[i],
                        value_of(get(r, biases[i])).text);
}

static void read_files(Reader *r) {
    const cJSON *tied = get(r, "tie_word_embeddings"), *quantized = get(r, "quantization_config");
    r->config->tied = cJSON_IsTrue(tied);
    if (tied && !cJSON_IsBool(tied))
        reasons_add(&r->reasons, "\"tie_word_embeddings\" is %s; expected true or false", value_of(tied).text);
    if (quantized && !says_nothing(quantized))
        reasons_add(&r->reasons, "\"quantization_config\" is %s; quantized weights are not supported",
                    value_of(quantized).text);
}

// If peft is installed, transformers applies such an adapter to the weights.
static void read_adapter(Reader *r, const char *folder) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/adapter_config.json", folder);
    if (access(path, F_OK) == 0)
        reasons_add(&r->reasons, "adapter_config.json exists; the adapter changes the weights, so merge it into the "
                                 "model first (merge_and_unload() in peft) and load the result");
}

static const char *const LAYER_KEYS[] = {"cap", "window", "rope", "fixed"};    // besides the stages

static bool is_layer_key(const char *key) {
    return is_listed(key, stage_names, STAGE_COUNT) || is_listed(key, LAYER_KEYS, COUNT(LAYER_KEYS));
}

typedef struct {
    char text[sizeof(Value) + 32];
} Pair;

// A key and its value as in the file, or that it is not there.
static Pair pair_of(const char *key, const cJSON *item) {
    Pair pair;
    if (item) snprintf(pair.text, sizeof pair.text, "\"%s\": %s", key, value_of(item).text);
    else snprintf(pair.text, sizeof pair.text, "no \"%s\"", key);
    return pair;
}

// The keys of an object spell out a layer's attention for other readers. Here they must agree with the name; an object
// without stages, which attn_c writes, spells out nothing but "fixed".
static void read_layer(Reader *r, const cJSON *object, const char *name, const char *where,
                       const LayerAttention *layer) {
    cJSON *expected = cJSON_CreateObject();
    bool spelled = false;
    config_write_layer(expected, layer);
    for (size_t i = 0; i < STAGE_COUNT; i++)
        spelled |= cJSON_GetObjectItemCaseSensitive(object, stage_names[i]) != NULL;
    for (size_t i = 0; i < STAGE_COUNT + COUNT(LAYER_KEYS); i++) {
        const char *key = i < STAGE_COUNT ? stage_names[i] : LAYER_KEYS[i - STAGE_COUNT];
        const cJSON *means = cJSON_GetObjectItemCaseSensitive(expected, key);
        const cJSON *says = cJSON_GetObjectItemCaseSensitive(object, key);
        if (i >= STAGE_COUNT && says && says_nothing(says)) says = NULL;
        bool may_lack = i < STAGE_COUNT || (!spelled && strcmp(key, "fixed") != 0);
        if (!says && (!means || may_lack)) continue;
        if (!says || !means || !cJSON_Compare(means, says, true))
            reasons_add(&r->reasons, "%s: \"%s\" means %s, but the file has %s", where, name, pair_of(key, means).text,
                        pair_of(key, says).text);
    }
    cJSON_Delete(expected);
}

// "layers": an object for each layer.
static void read_normalizer_layers(Reader *r, const cJSON *layers, const char *name) {
    const cJSON *object, *item;
    size_t l = 0, count = (size_t)cJSON_GetArraySize(layers);
    if (!cJSON_IsArray(layers))
        reasons_add(&r->reasons, "attention_normalizer.layers is %s; expected a list with an object for each layer",
                    value_of(layers).text);
    else if (r->config->layers && count != r->config->layers)
        reasons_add(&r->reasons, "attention_normalizer.layers has %zu object%s; expected one for each of %zu layers",
                    count, count == 1 ? "" : "s", r->config->layers);
    if (!cJSON_IsArray(layers) || count != r->config->layers) return;
    cJSON_ArrayForEach(object, layers) {
        char where[64];
        snprintf(where, sizeof where, "attention_normalizer.layers[%zu]", l);
        if (!cJSON_IsObject(object))
            reasons_add(&r->reasons, "%s is %s; expected an object", where, value_of(object).text);
        read_layer(r, object, name, where, attention_of(r->config, l++));
        cJSON_ArrayForEach(item, object) if (!is_layer_key(item->string) && strcmp(item->string, "name") != 0)
            reasons_add(&r->reasons, "%s.%s is %s: an unknown key", where, item->string, value_of(item).text);
    }
}

// Adds the windows of a Mistral or Qwen to the name of its normalizer: that of each layer is equal to the one as many
// layers before as the list is long. Without a window, a layer keeps what the name says.
static void add_windows(Reader *r) {
    ModelConfig *c = r->config;
    char text[ATTENTION_TEXT] = "", name[ATTENTION_TEXT], message[1024], window[32];
    size_t period = 1, at = 0;
    const bool *slides = r->slides;
    for (size_t l = period; l < c->layers; l++)
        if (slides[l] != slides[l - period]) l = ++period - 1;
    snprintf(window, sizeof window, "+window=%zu", r->window);
    c->attn.items[0].count = 1;
    attention_shortest(&c->attn, name, sizeof name);
    for (size_t l = 0, count; l < period && at < sizeof text; l += count) {
        char times[32] = "";
        for (count = 1; l + count < period && slides[l + count] == slides[l];) count++;
        if (count > 1) snprintf(times, sizeof times, "%zu*", count);
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s%s%s", l ? "," : "", times, name,
                               slides[l] ? window : "");
    }
    if (at >= sizeof text || !attention_parse(&c->attn, text, c->layers, message, sizeof message))
        reasons_add(&r->reasons, "the windows change too often from layer to layer: %s",
                    at >= sizeof text ? "their list is too long" : message);
}

// The windows of the name, if it has any, must be those of the family's keys.
static void read_windows(Reader *r, const char *name) {
    bool same = true, named = false;
    if (r->family != &model_families[MISTRAL] && !is_qwen(r)) return;
    for (size_t l = 0; l < r->config->layers; l++) {
        size_t window = attention_of(r->config, l)->window;
        same &= window == (r->slides[l] ? r->window : 0);
        named |= window != 0;
    }
    if (same) return;
    if (!named && r->config->attn.count == 1) add_windows(r);
    else
        reasons_add(&r->reasons, "attention_normalizer \"%s\" has other windows than the keys of a %s; change one",
                    name, r->family->model_type);
}

static void read_normalizer(Reader *r) {
    const cJSON *attn = get(r, "attention_normalizer"), *name = cJSON_GetObjectItemCaseSensitive(attn, "name"), *item;
    const cJSON *layers = cJSON_GetObjectItemCaseSensitive(attn, "layers");
    char message[1024];
    if (!attn) {
        if (is_own(r))
            reasons_add(&r->reasons, "\"attention_normalizer\" is missing; \"model_type\" \"attn_gpt\" requires it");
        else if (attention_parse(&r->config->attn, "softmax", r->config->layers, message, sizeof message))
            read_windows(r, "softmax");
        else reasons_add(&r->reasons, "the file has no attention_normalizer, so it means softmax: %s", message);
        return;
    }
    if (!cJSON_IsString(name)) {
        reasons_add(&r->reasons, "attention_normalizer has no \"name\"");
        return;
    }
    bool parsed = attention_parse(&r->config->attn, name->valuestring, r->config->layers, message, sizeof message);
    if (!parsed) reasons_add(&r->reasons, "attention_normalizer %s: %s", quoted(name->valuestring).text, message);
    else if (layers) read_normalizer_layers(r, layers, name->valuestring);
    else if (r->config->attn.count == 1)
        read_layer(r, attn, name->valuestring, "attention_normalizer", attention_of(r->config, 0));
    bool by_layer = layers || (parsed && r->config->attn.count > 1);
    if (parsed) read_windows(r, name->valuestring);
    if (cJSON_GetObjectItemCaseSensitive(attn, "seq_len"))
        read_size(r, attn, "attention_normalizer.", "seq_len", 1, INT_MAX, &r->config->seq_len);
    static const char *const keys[] = {"name", "seq_len", "layers", "block"};
    cJSON_ArrayForEach(item, attn) {
        if (is_layer_key(item->string) && by_layer)
            reasons_add(&r->reasons,
                        "attention_normalizer.%s is %s; where layers differ, it belongs into the objects of "
                        "\"layers\"",
                        item->string, value_of(item).text);
        else if (!is_layer_key(item->string) && !is_listed(item->string, keys, COUNT(keys)))
            config_unknown(r, "attention_normalizer.", item);
    }
}

// Without the key, attention is causal.
static void read_causal(Reader *r, const cJSON *item) {
    if (!cJSON_IsTrue(item))
        reasons_add(&r->reasons, "\"is_causal\" is %s; only causal attention is supported", value_of(item).text);
}

static void read_rest(Reader *r) {
    // softmax_sliding_window is in older files of a Mistral that was switched to another normalizer, without windows.
    static const char *const OWN[] = {
        "auto_map", "qk_norm", "qkv_bias", "gate", "softmax_model_type", "softmax_sliding_window", SOFTCAP};
    static const char *const WINDOWS[] = {"use_sliding_window", "sliding_window", "max_window_layers"};
    const cJSON *item;
    cJSON_ArrayForEach(item, r->json) {
        bool known = is_listed(item->string, UNDERSTOOD, COUNT(UNDERSTOOD)) ||
                     is_listed(item->string, HARMLESS, COUNT(HARMLESS));
        for (size_t i = 0; i < COUNT(SIZES); i++) known = known || !strcmp(item->string, SIZES[i].key);
        // auto_map names code next to the weights, which could compute anything. Ours computes what this program
        // computes.
        known = known || (is_own(r) && is_listed(item->string, OWN, COUNT(OWN)));
        known = known || (r->family == &model_families[MISTRAL] && !strcmp(item->string, "sliding_window"));
        known = known || (is_qwen(r) && is_listed(item->string, WINDOWS, COUNT(WINDOWS)));
        if (!strcmp(item->string, "is_causal")) read_causal(r, item);
        else if (!known) config_unknown(r, "", item);
    }
}

static bool refuse(const Reader *r, const char *path, Error *error) {
    char remedy[128 + sizeof(ShellWord)];
    bool whole = strlen(r->names) + 1 < sizeof r->names;
    if (r->ignorable == r->reasons.count)
        snprintf(remedy, sizeof remedy,
                 "If the model computes the same without %s, load it with --ignore-config-key %s.",
                 r->ignorable == 1 ? "it" : "them", whole ? shell_word(r->names).text : "NAME,NAME,...");
    else if (is_own(r))
        snprintf(remedy, sizeof remedy, "This is attn.c's own model_type; doc/checkpoints.md describes its keys.");
    else
        snprintf(remedy, sizeof remedy,
                 "Only plain Llama, Mistral, Qwen2 and Qwen3 models are supported; see doc/checkpoints.md.");
    return error_set(error, EXIT_INPUT, "%s: this model cannot be loaded:%s\n  %s", path,
                     reasons_text(&r->reasons).text, remedy);
}

// `name` is a key, or OBJECT.KEY.
static bool is_in_file(const cJSON *json, const char *name) {
    char outer[256];
    const char *dot = strchr(name, '.');
    if (cJSON_GetObjectItemCaseSensitive(json, name)) return true;
    if (!dot) return false;
    snprintf(outer, sizeof outer, "%.*s", (int)(dot - name), name);
    return cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, outer), dot + 1) != NULL;
}

static void warn_of_absent(const Reader *r, const char *path) {
    char name[256];
    for (const char *at = r->ignored; at && *at; at += *at == ',') {
        size_t length = strcspn(at, ",");
        snprintf(name, sizeof name, "%.*s", (int)length, at);
        if (length && !is_in_file(r->json, name)) warn("--ignore-config-key %s: %s has no such key.", name, path);
        at += length;
    }
}

bool model_config_read(ModelConfig *config, const char *folder, const char *ignored, Error *error) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/config.json", folder);
    cJSON *json = json_read(path, JSON_SMALL, error);
    if (!json) return false;
    *config = (ModelConfig){0};
    Reader r = {.json = json, .ignored = ignored, .config = config};
    bool right = cJSON_IsObject(json) ||
                 error_set(error, EXIT_INPUT, "%s: expected a JSON object, found %s.", path, value_of(json).text);
    if (right) {
        read_type(&r);
        read_sizes(&r);
        read_special(&r, folder);
        read_block(&r);
        read_family(&r);
        read_window(&r);
        read_heads(&r);
        read_norm_eps(&r);
        read_softcap(&r);
        read_layers(&r);
        read_layer_types(&r);
        read_files(&r);
        read_adapter(&r, folder);
        config_rope(&r);
        read_normalizer(&r);
        config_check_ntk(&r);
        if (!r.foreign) read_rest(&r);
        right = !r.reasons.count || refuse(&r, path, error);
        if (right) warn_of_absent(&r, path);
    }
    cJSON_Delete(json);
    return right;
}

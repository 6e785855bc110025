// What the files that write and read config.json share. Programs include model.h.
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"
#include "runtime/error.h"
#include "runtime/json.h"

// The model families that we write and read, by their names in transformers.
typedef struct {
    const char *model_type, *class_name;
    bool qk_norm, qkv_bias, mistral;    // what every model of the family has
    // Keys without which transformers assumes a number that does not follow from the others.
    bool needs_kv_heads, needs_head_dim;
    size_t seq_len;    // what transformers assumes without the key max_position_embeddings
} Family;

enum { LLAMA, MISTRAL, QWEN2, QWEN3, OUR_OWN, FAMILY_COUNT };
extern const Family model_families[FAMILY_COUNT];

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

#define SOFTCAP "final_logit_softcapping"    // Gemma 2's key
#define SLIDING "sliding_attention"          // in layer_types
#define FULL    "full_attention"
#define ROTARY_PART "partial_rotary_factor"

// What transformers assumes without the keys sliding_window, and in a Qwen max_window_layers.
enum { DEFAULT_WINDOW = 4096, DEFAULT_FULL_LAYERS = 28 };

// The stages of a layer, and what it has besides.
void config_write_layer(cJSON *json, const LayerAttention *layer);

// ---- reading

typedef struct {
    const cJSON *json;
    const char *ignored;    // comma-separated names, or NULL
    ModelConfig *config;
    const Family *family;       // without a name if model_type is missing or not ours
    bool foreign;               // not one of our families: check only the keys that a Llama also has
    size_t window;              // the sliding window of a Mistral or Qwen, or 0
    bool slides[MAX_LAYERS];    // which layers have it
    Reasons reasons;
    int ignorable;      // how many of the reasons are unknown keys
    char names[320];    // their names, comma-separated
} Reader;

static inline const cJSON *get(const Reader *r, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->json, key);
    return cJSON_IsNull(item) ? NULL : item;
}

typedef struct {
    char text[72];
} Value;

// The value as JSON, truncated if long.
static inline Value value_of(const cJSON *item) {
    Value value = {"missing"};
    char *text = item ? cJSON_PrintUnformatted(item) : NULL;
    if (text) snprintf(value.text, sizeof value.text, "%.60s%s", text, strlen(text) > 60 ? "..." : "");
    free(text);
    return value;
}

// Is the value null, false, an empty list or an empty object?
static inline bool says_nothing(const cJSON *item) {
    bool empty = (cJSON_IsArray(item) || cJSON_IsObject(item)) && !item->child;
    return cJSON_IsNull(item) || cJSON_IsFalse(item) || empty;
}

// Rejects a key that is neither understood nor harmless. `prefix` names the object that contains it.
void config_unknown(Reader *r, const char *prefix, const cJSON *item);

// RoPE's base and scaling, of either generation of transformers.
void config_rope(Reader *r);

// L determines the angles of ntk. transformers takes it from max_position_embeddings; without that key, we would guess.
void config_check_ntk(Reader *r);

#endif

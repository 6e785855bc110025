#include "model/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/number.h"
#include "runtime/spelling.h"

// ---------------------------------------------------------------------------------------------------------------------
// Shape

static const struct {
    const char *name;
    size_t layers, heads, channels, ffn, vocab;
    bool tied;
} PRESETS[] = {
    // clang-format off
    // name layers heads channels ffn  vocab  tied
    {"15M",   6,  6,  288,  768, 32000, true},
    {"124M", 12, 12,  768, 2048, 50257, true},
    {"162M", 12, 12,  768, 2048, 50257, false},
    {"350M", 24, 16, 1024, 2816, 50257, true},
    {"760M", 24, 12, 1536, 4096, 50257, true},
    {"1.3B", 24, 16, 2048, 5632, 50257, true},
    // clang-format on
};

static const struct {
    const char *name;
    size_t offset, min, max;
    bool needed;    // has no default
} KEYS[] = {
    // clang-format off
    {"layers",   offsetof(ModelConfig, layers),   1, 1024,      true},
    {"heads",    offsetof(ModelConfig, heads),    1, 1024,      true},
    {"channels", offsetof(ModelConfig, channels), 2, 65536,     true},
    {"ffn",      offsetof(ModelConfig, ffn),      1, 262144,    true},
    {"vocab",    offsetof(ModelConfig, vocab),    2, MAX_VOCAB, false},
    {"kv_heads", offsetof(ModelConfig, kv_heads), 1, 1024,      false},
    {"head_dim", offsetof(ModelConfig, head_dim), 2, 65536,     false},
    // clang-format on
};

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

int default_end_of_text(size_t vocab) {
    return vocab > 50256 ? 50256 : (int)vocab - 1;
}

static size_t *size_at(ModelConfig *config, size_t offset) {
    return (size_t *)((char *)config + offset);
}

static bool parse_switch(bool *out, const char *name, const char *value, Error *error) {
    if (strcmp(value, "0") != 0 && strcmp(value, "1") != 0)
        return error_set(error, EXIT_USAGE, "--model: %s=%s: expected 0 or 1.", name, value);
    *out = value[0] == '1';
    return true;
}

static bool parse_bias(bool *out, const char *value, Error *error) {
    if (strcmp(value, "none") != 0 && strcmp(value, "qkv") != 0)
        return error_set(error, EXIT_USAGE, "--model: bias=%s: expected none or qkv.", value);
    *out = value[0] == 'q';
    return true;
}

const char *const gate_names[GATE_COUNT] = {"none", "channel", "head"};

static bool parse_gate(GateKind *out, const char *value, Error *error) {
    for (*out = GATE_NONE; *out < GATE_COUNT; (*out)++)
        if (!strcmp(value, gate_names[*out])) return true;
    return error_set(error, EXIT_USAGE, "--model: gate=%s: expected none, channel or head.", value);
}

static bool parse_norm_eps(double *out, const char *value, Error *error) {
    double eps;
    if (!number_read(value, strlen(value), &eps) || !(eps >= MIN_NORM_EPS && eps <= MAX_NORM_EPS))
        return error_set(error, EXIT_USAGE, "--model: norm_eps must be a number from %g to %g, not '%s'.", MIN_NORM_EPS,
                         MAX_NORM_EPS, value);
    *out = eps;
    return true;
}

static bool parse_key(ModelConfig *config, bool *given, char *word, Error *error) {
    char *equals = strchr(word, '=');
    double value = 0;
    if (equals) *equals++ = 0;
    bool whole = equals && number_read(equals, strlen(equals), &value) && value == floor(value);
    if (!strcmp(word, "tied")) return parse_switch(&config->tied, word, equals ? equals : "", error);
    if (!strcmp(word, "qk_norm")) return parse_switch(&config->qk_norm, word, equals ? equals : "", error);
    if (!strcmp(word, "bias")) return parse_bias(&config->qkv_bias, equals ? equals : "", error);
    if (!strcmp(word, "gate")) return parse_gate(&config->gate, equals ? equals : "", error);
    if (!strcmp(word, "norm_eps")) return parse_norm_eps(&config->norm_eps, equals ? equals : "", error);
    if (!strcmp(word, "block")) {
        for (config->block = 0; config->block < BLOCK_COUNT; config->block++)
            if (equals && !strcmp(equals, block_shapes[config->block].name)) return true;
        return error_set(error, EXIT_USAGE, "--model: block=%s: expected llama or gau.", equals ? equals : "");
    }
    for (size_t i = 0; i < COUNT(KEYS); i++) {
        if (strcmp(word, KEYS[i].name) != 0) continue;
        if (!whole || value < (double)KEYS[i].min || value > (double)KEYS[i].max)
            return error_set(error, EXIT_USAGE, "--model: %s must be a whole number from %zu to %zu, not '%s'.", word,
                             KEYS[i].min, KEYS[i].max, equals ? equals : "");
        *size_at(config, KEYS[i].offset) = (size_t)value;
        given[i] = true;
        return true;
    }
    static const char *const words = "124M|162M|15M|350M|760M|1.3B|layers|heads|kv_heads|head_dim|channels|ffn|vocab|"
                                     "tied|qk_norm|bias|gate|norm_eps|block";
    char near[96];
    nearest_word(words, word, near, sizeof near);
    return error_set(error, EXIT_USAGE,
                     "--model: unknown model or key '%s'.%s Models: 15M, 124M, 162M, 350M, 760M, 1.3B. "
                     "Keys: layers=, heads=, kv_heads=, head_dim=, channels=, ffn=, vocab=, tied=0|1, qk_norm=0|1, "
                     "bias=none|qkv, gate=none|channel|head, norm_eps=, block=llama|gau.",
                     word, near);
}

// Does the block determine this size?
static bool is_fixed(const BlockShape *block, size_t offset) {
    ModelConfig probe = {.channels = 2};
    *size_at(&probe, offset) = SIZE_MAX;
    if (block->fix) block->fix(&probe);
    return *size_at(&probe, offset) != SIZE_MAX;
}

// Checks which keys --model gave, sets the sizes that the block determines, and counts its layers.
static bool make_block(ModelConfig *config, const char *text, bool preset, const bool *given, Error *error) {
    const BlockShape *block = &block_shapes[config->block];
    const char *invalid = NULL;
    bool qk_norm = config->qk_norm, qkv_bias = config->qkv_bias;
    GateKind gate = config->gate;
    for (size_t i = 0; i < COUNT(KEYS); i++) {
        bool fixed = is_fixed(block, KEYS[i].offset);
        if (given[i] && fixed) invalid = KEYS[i].name;
        if (!given[i] && !fixed && !preset && KEYS[i].needed)
            return error_set(error, EXIT_USAGE, "--model %s: %s= is required, unless a model such as 124M comes first.",
                             text, KEYS[i].name);
    }
    if (block->fix) block->fix(config);
    if (config->qk_norm != qk_norm) invalid = "qk_norm";
    if (config->qkv_bias != qkv_bias) invalid = "bias";
    if (config->gate != gate) invalid = "gate";
    if (invalid)
        return error_set(error, EXIT_USAGE, "--model: %s= is invalid with block=%s, %s.", invalid, block->name,
                         block->fixed);
    config->layers *= block->replaces;
    return true;
}

size_t head_size(const ModelConfig *config) {
    return config->head_dim;
}

RopeAngles model_rope(const ModelConfig *config, double base) {
    RopeAngles angles = {config->rope_theta, config->rope_scaling, head_size(config), config->seq_len};
    if (base == 0) return angles;
    angles.theta = base;
    angles.scaling = (RopeScaling){.kind = ROPE_NONE};
    return angles;
}

size_t value_size(const ModelConfig *config) {
    return block_shapes[config->block].value_size(config);
}

size_t query_width(const ModelConfig *config) {
    return config->heads * head_size(config);
}

size_t key_width(const ModelConfig *config) {
    return config->kv_heads * head_size(config);
}

size_t value_width(const ModelConfig *config) {
    return config->kv_heads * value_size(config);
}

size_t output_width(const ModelConfig *config) {
    return config->heads * value_size(config);
}

size_t gate_width(const ModelConfig *config) {
    if (config->gate == GATE_HEAD) return config->heads;
    return config->gate == GATE_CHANNEL ? output_width(config) : 0;
}

size_t joined_width(const ModelConfig *config) {
    return block_shapes[config->block].joined_width(config);
}

bool model_same_shape(const ModelConfig *a, const ModelConfig *b) {
    return a->block == b->block && a->layers == b->layers && a->heads == b->heads && a->kv_heads == b->kv_heads &&
           a->head_dim == b->head_dim && a->channels == b->channels && a->ffn == b->ffn && a->vocab == b->vocab &&
           a->tied == b->tied && a->qk_norm == b->qk_norm && a->qkv_bias == b->qkv_bias && a->gate == b->gate &&
           (float)a->norm_eps == (float)b->norm_eps;
}

// Omits keys that have their default values.
const char *model_text(const ModelConfig *c, char *out, size_t size) {
    char shared[96], norm_eps[48] = "";
    if (c->norm_eps != DEFAULT_NORM_EPS) snprintf(norm_eps, sizeof norm_eps, ",norm_eps=%.15g", c->norm_eps);
    snprintf(shared, sizeof shared, ",tied=%d,vocab=%zu%s", c->tied, c->vocab, norm_eps);
    block_shapes[c->block].text(c, shared, out, size);
    return out;
}

const char *model_description(const ModelConfig *c, char *out, size_t size) {
    block_shapes[c->block].describe(c, out, size);
    return out;
}

bool model_shape_complete(ModelConfig *config, char *message, size_t size) {
    if (block_shapes[config->block].fix) block_shapes[config->block].fix(config);
    size_t channels = config->channels, heads = config->heads;
    bool by_channels = !config->head_dim;
    if (!config->kv_heads) config->kv_heads = heads;
    if (by_channels) config->head_dim = channels / heads;
    if (by_channels && channels % heads)
        snprintf(message, size, "%zu channels are not divisible by %zu heads", channels, heads);
    else if (by_channels && config->head_dim % 2)
        snprintf(message, size, "the head size is %zu channels / %zu heads = %zu; RoPE needs an even size", channels,
                 heads, config->head_dim);
    else if (config->head_dim % 2)
        snprintf(message, size, "the head size is %zu; RoPE needs an even size", config->head_dim);
    else if (heads % config->kv_heads)
        snprintf(message, size, "%zu heads are not divisible by %zu key-value heads", heads, config->kv_heads);
    else return true;
    return false;
}

bool model_gives_vocab(const char *text) {
    return !strncmp(text, "vocab=", 6) || strstr(text, ",vocab=");
}

bool model_parse(ModelConfig *config, const char *text, Error *error) {
    char words[512], message[256];
    bool given[COUNT(KEYS)] = {false}, preset = false;
    if (strlen(text) >= sizeof words)
        return error_set(error, EXIT_USAGE, "--model: longer than %zu characters.", sizeof words - 1);
    strcpy(words, text);
    config->block = BLOCK_LLAMA;
    config->kv_heads = config->head_dim = 0;    // their defaults follow from heads and channels
    config->vocab = 50257;
    config->tied = true;
    config->qk_norm = config->qkv_bias = config->mistral = false;
    config->gate = GATE_NONE;
    config->bos = config->pad = NO_ID;
    config->logit_softcap = 0;
    config->norm_eps = DEFAULT_NORM_EPS;
    config->rope_theta = DEFAULT_ROPE_THETA;
    config->rope_scaling = (RopeScaling){.kind = ROPE_NONE};
    char *rest = words;
    for (char *word = strsep(&rest, ","); word; word = strsep(&rest, ",")) {
        bool found = false;
        for (size_t i = 0; word == words && i < COUNT(PRESETS); i++) {
            if (strcmp(word, PRESETS[i].name) != 0) continue;
            config->layers = PRESETS[i].layers;
            config->heads = PRESETS[i].heads;
            config->channels = PRESETS[i].channels;
            config->ffn = PRESETS[i].ffn;
            config->vocab = PRESETS[i].vocab;
            config->tied = PRESETS[i].tied;
            preset = found = true;
        }
        if (!found && !parse_key(config, given, word, error)) return false;
    }
    if (!make_block(config, text, preset, given, error)) return false;
    config->end_of_text = default_end_of_text(config->vocab);
    return model_shape_complete(config, message, sizeof message) ||
           error_set(error, EXIT_USAGE, "--model: %s.", message);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors

// clang-format off
typedef enum {
    NONE, CHANNELS, FFN, VOCAB, HEADS, HEAD_DIM, Q_WIDTH, KV_WIDTH, LENGTH,
    QK_GAIN, Q_BIAS, KV_BIAS, GATES,    // 0 if the model has no such tensor
} Dimension;
// clang-format on
typedef enum { START_ZERO, START_ONE, START_NORMAL, START_RESIDUAL, START_SCALAR } Start;

// One row per tensor. `decay`: has weight decay. `joined`: follows the previous tensor without a gap, so that one
// matmul serves both. START_SCALAR stands for the rows of SCALARS for this part of the model: each with its own shape
// and offset, under a name that starts with this one.
typedef struct TensorSpec {
    const char *name;
    Dimension rows, cols;
    Start start;
    bool decay, joined;
    size_t field;    // where its offset is stored; with START_SCALAR, where the first scalar's is
} TensorSpec;

#define IN_LAYER(field) offsetof(LayerOffsets, field)
#define IN_LIST(field) offsetof(TensorList, field)

// clang-format off
static const TensorSpec FIRST_ROWS[] = {
    // name                             rows      columns   start           decay  joined field
    {"model.embed_tokens.weight",       VOCAB,    CHANNELS, START_NORMAL,   true,  false, IN_LIST(embedding)},
    {"model.",                          NONE,     NONE,     START_SCALAR,   false, false, IN_LIST(scalar)},
};
// Names after "model.layers.N."
static const TensorSpec LLAMA_ROWS[] = {
    {"input_layernorm.weight",          CHANNELS, NONE,     START_ONE,      false, false, IN_LAYER(norm1)},
    {"self_attn.q_proj.weight",         Q_WIDTH,  CHANNELS, START_NORMAL,   true,  false, IN_LAYER(q)},
    {"self_attn.k_proj.weight",         KV_WIDTH, CHANNELS, START_NORMAL,   true,  true,  IN_LAYER(k)},
    {"self_attn.v_proj.weight",         KV_WIDTH, CHANNELS, START_NORMAL,   true,  true,  IN_LAYER(v)},
    {"self_attn.q_proj.bias",           Q_BIAS,   NONE,     START_ZERO,     false, false, IN_LAYER(q_bias)},
    {"self_attn.k_proj.bias",           KV_BIAS,  NONE,     START_ZERO,     false, true,  IN_LAYER(k_bias)},
    {"self_attn.v_proj.bias",           KV_BIAS,  NONE,     START_ZERO,     false, true,  IN_LAYER(v_bias)},
    {"self_attn.q_norm.weight",         QK_GAIN,  NONE,     START_ONE,      false, false, IN_LAYER(q_norm)},
    {"self_attn.k_norm.weight",         QK_GAIN,  NONE,     START_ONE,      false, false, IN_LAYER(k_norm)},
    {"self_attn.",                      NONE,     NONE,     START_SCALAR,   false, false, IN_LAYER(scalar)},
    {"self_attn.gate_proj.weight",      GATES,    CHANNELS, START_NORMAL,   true,  false, IN_LAYER(att_gate)},
    {"self_attn.o_proj.weight",         CHANNELS, Q_WIDTH,  START_RESIDUAL, true,  false, IN_LAYER(o)},
    {"post_attention_layernorm.weight", CHANNELS, NONE,     START_ONE,      false, false, IN_LAYER(norm2)},
    {"mlp.gate_proj.weight",            FFN,      CHANNELS, START_NORMAL,   true,  false, IN_LAYER(gate)},
    {"mlp.up_proj.weight",              FFN,      CHANNELS, START_NORMAL,   true,  true,  IN_LAYER(up)},
    {"mlp.down_proj.weight",            CHANNELS, FFN,      START_RESIDUAL, true,  false, IN_LAYER(down)},
};
static const TensorSpec GAU_ROWS[] = {
    {"input_layernorm.weight",          CHANNELS, NONE,     START_ONE,      false, false, IN_LAYER(norm1)},
    {"gau.u_proj.weight",               FFN,      CHANNELS, START_NORMAL,   true,  false, IN_LAYER(u)},
    {"gau.v_proj.weight",               FFN,      CHANNELS, START_NORMAL,   true,  true,  IN_LAYER(gau_v)},
    {"gau.z_proj.weight",               HEAD_DIM, CHANNELS, START_NORMAL,   true,  true,  IN_LAYER(z)},
    {"gau.q_gain",                      HEAD_DIM, NONE,     START_ONE,      false, false, IN_LAYER(q_gain)},
    {"gau.q_offset",                    HEAD_DIM, NONE,     START_ZERO,     false, false, IN_LAYER(q_offset)},
    {"gau.k_gain",                      HEAD_DIM, NONE,     START_ONE,      false, false, IN_LAYER(k_gain)},
    {"gau.k_offset",                    HEAD_DIM, NONE,     START_ZERO,     false, false, IN_LAYER(k_offset)},
    {"gau.",                            NONE,     NONE,     START_SCALAR,   false, false, IN_LAYER(scalar)},
    {"gau.o_proj.weight",               CHANNELS, FFN,      START_RESIDUAL, true,  false, IN_LAYER(o)},
};
static const TensorSpec LAST_ROWS[] = {
    {"model.norm.weight",               CHANNELS, NONE,     START_ONE,      false, false, IN_LIST(norm)},
    {"lm_head.weight",                  VOCAB,    CHANNELS, START_NORMAL,   true,  false, IN_LIST(head)},
};
// clang-format on

// ---- blocks

static size_t layer_value_size(const ModelConfig *c) {
    return head_size(c);
}

static size_t unit_value_size(const ModelConfig *c) {
    return c->ffn;
}

// q, k and v
static size_t layer_joined_width(const ModelConfig *c) {
    return query_width(c) + key_width(c) + value_width(c);
}

// u and v, each of width ffn, and z
static size_t unit_joined_width(const ModelConfig *c) {
    return 2 * c->ffn + GAU_HEAD;
}

static void layer_text(const ModelConfig *c, const char *shared, char *out, size_t size) {
    char heads[80] = "", head_dim[32] = "", gate[32] = "";
    if (c->kv_heads != c->heads) snprintf(heads, sizeof heads, ",kv_heads=%zu", c->kv_heads);
    if (c->head_dim * c->heads != c->channels) snprintf(head_dim, sizeof head_dim, ",head_dim=%zu", c->head_dim);
    if (c->gate) snprintf(gate, sizeof gate, ",gate=%s", gate_names[c->gate]);
    snprintf(out, size, "layers=%zu,heads=%zu%s%s,channels=%zu,ffn=%zu%s%s%s%s", c->layers, c->heads, heads, head_dim,
             c->channels, c->ffn, shared, c->qk_norm ? ",qk_norm=1" : "", c->qkv_bias ? ",bias=qkv" : "", gate);
}

static const char *plural(size_t count) {
    return count == 1 ? "" : "s";
}

static void layer_describe(const ModelConfig *c, char *out, size_t size) {
    char shared[48] = "", gate[48] = "";
    if (c->kv_heads != c->heads)
        snprintf(shared, sizeof shared, " with %zu key-value head%s", c->kv_heads, plural(c->kv_heads));
    if (c->gate) snprintf(gate, sizeof gate, ", a gate for each %s", gate_names[c->gate]);
    snprintf(out, size, "%zu layer%s, %zu head%s of %zu%s, %zu channels, ffn %zu%s%s%s", c->layers, plural(c->layers),
             c->heads, plural(c->heads), head_size(c), shared, c->channels, c->ffn, c->qk_norm ? ", QK norms" : "",
             c->qkv_bias ? ", biases of q, k and v" : "", gate);
}

static void unit_fix(ModelConfig *c) {
    c->heads = c->kv_heads = 1;
    c->head_dim = GAU_HEAD;
    c->ffn = 2 * c->channels;
    c->qk_norm = c->qkv_bias = false;
    c->gate = GATE_NONE;
}

static void unit_text(const ModelConfig *c, const char *shared, char *out, size_t size) {
    snprintf(out, size, "layers=%zu,block=gau,channels=%zu%s", c->layers / 2, c->channels, shared);
}

static void unit_describe(const ModelConfig *c, char *out, size_t size) {
    snprintf(out, size, "%zu gated attention units (head %d, width %zu), %zu channels", c->layers, GAU_HEAD, c->ffn,
             c->channels);
}

const BlockShape block_shapes[BLOCK_COUNT] = {
    [BLOCK_LLAMA] = {.name = "llama",
                     .plain = true,
                     .replaces = 1,
                     .attention = "self_attn",
                     .residual_writes = 2,
                     .tensors = LLAMA_ROWS,
                     .tensor_count = COUNT(LLAMA_ROWS),
                     .value_size = layer_value_size,
                     .joined_width = layer_joined_width,
                     .text = layer_text,
                     .describe = layer_describe},
    [BLOCK_GAU] = {.name = "gau",
                   .replaces = 2,
                   .fix = unit_fix,
                   .fixed = "whose units have one head with q and k of width 128 and values of width 2 x channels",
                   .attention = "gau",
                   .residual_writes = 1,
                   .tensors = GAU_ROWS,
                   .tensor_count = COUNT(GAU_ROWS),
                   .value_size = unit_value_size,
                   .joined_width = unit_joined_width,
                   .text = unit_text,
                   .describe = unit_describe},
};

static size_t dimension(const ModelConfig *config, Dimension d) {
    switch (d) {
    case CHANNELS: return config->channels;
    case FFN: return config->ffn;
    case VOCAB: return config->vocab;
    case HEADS: return config->heads;
    case HEAD_DIM: return head_size(config);
    case QK_GAIN: return config->qk_norm ? head_size(config) : 0;
    case Q_BIAS: return config->qkv_bias ? query_width(config) : 0;
    case KV_BIAS: return config->qkv_bias ? key_width(config) : 0;
    case GATES: return gate_width(config);
    case Q_WIDTH: return query_width(config);
    case KV_WIDTH: return key_width(config);
    case LENGTH: return config->seq_len;
    case NONE: break;
    }
    return 1;
}

size_t padded_vocab(const ModelConfig *config) {
    return ((config->vocab + 127) / 128) * 128;
}

// The mean and standard deviation of a tensor's initial values.
static void set_start(Tensor *t, const ModelConfig *config, Start start) {
    size_t writes = config->layers * block_shapes[config->block].residual_writes;
    t->mean = 0.0f;
    t->std = 0.0f;
    if (start == START_ONE) t->mean = 1.0f;
    if (start == START_SCALAR) t->mean = (float)tensor_start(t, config);
    if (start == START_NORMAL) t->std = 0.02f;
    if (start == START_RESIDUAL) t->std = 0.02f / sqrtf((float)writes);
}

// What goes into a list: the tensors of `config`, with the learned scalars of its normalizers and of `others`.
typedef struct {
    TensorList *list;
    const ModelConfig *config;
    const AttentionList *const *others;
    size_t count;
    size_t layer;    // NO_LAYER outside layers
} Listing;

static void add(const Listing *to, const TensorSpec *row, Scalar scalar, const char *prefix, void *offsets) {
    TensorList *list = to->list;
    Tensor *t = &list->tensors[list->count++];
    *t = (Tensor){.ndim = row->cols == NONE ? 1 : 2,
                  .shape = {dimension(to->config, row->rows), dimension(to->config, row->cols)},
                  .scalar = scalar,
                  .layer = scalar == SCALAR_NONE ? NO_LAYER : to->layer};
    snprintf(t->name, sizeof t->name, "%s%s%s", prefix, row->name, scalar == SCALAR_NONE ? "" : scalar_names[scalar]);
    t->elements = t->shape[0] * t->shape[1];
    t->decay = row->decay;
    t->update = UPDATE_ADAMW;
    t->lr_scale = 1;
    t->hidden = row->cols != NONE && row->rows != VOCAB;
    set_start(t, to->config, row->start);
    if (!row->joined) list->floats = ((list->floats + 15) / 16) * 16;    // 64 bytes
    t->offset = list->floats;
    *(size_t *)((char *)offsets + row->field) = t->offset;
    list->floats += (row->rows == VOCAB ? padded_vocab(to->config) : t->shape[0]) * t->shape[1];
}

static bool any_has(const Listing *to, Scalar scalar) {
    const Tensor tensor = {.scalar = scalar, .layer = to->layer};
    bool any = tensor_exists(&tensor, &to->config->attn);
    for (size_t i = 0; i < to->count; i++) any |= tensor_exists(&tensor, to->others[i]);
    return any;
}

static void add_rows(const Listing *to, const TensorSpec *rows, size_t count, ScalarReach reach, const char *prefix,
                     void *offsets) {
    for (size_t i = 0; i < count; i++) {
        bool there = rows[i].start != START_SCALAR && dimension(to->config, rows[i].rows) > 0;
        if (there) add(to, &rows[i], SCALAR_NONE, prefix, offsets);
        for (Scalar x = 0; rows[i].start == START_SCALAR && x < SCALAR_COUNT; x++) {
            TensorSpec row = rows[i];
            row.rows = scalar_width(x) == PER_HEAD ? HEADS : LENGTH;
            row.field += (size_t)x * sizeof(size_t);
            if (scalar_reach[x] == reach && any_has(to, x)) add(to, &row, x, prefix, offsets);
        }
    }
}

TensorList tensors_of(const ModelConfig *config, const AttentionList *const *others, size_t count) {
    const BlockShape *block = &block_shapes[config->block];
    size_t layers = config->layers;
    TensorList list = {.layers = allocate(layers, sizeof *list.layers, "the list of layers")};
    Listing to = {&list, config, others, count, NO_LAYER};
    size_t most = COUNT(FIRST_ROWS) + layers * block->tensor_count + COUNT(LAST_ROWS) + (layers + 1) * SCALAR_COUNT;
    list.tensors = allocate(most, sizeof *list.tensors, "the list of tensors");
    add_rows(&to, FIRST_ROWS, COUNT(FIRST_ROWS), WHOLE_MODEL, "", &list);
    for (size_t l = 0; l < layers; l++) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "model.layers.%zu.", l);
        memcpy(list.layers[l].scalar, list.scalar, sizeof list.scalar);
        to.layer = l;
        add_rows(&to, block->tensors, block->tensor_count, EACH_LAYER, prefix, &list.layers[l]);
    }
    to.layer = NO_LAYER;
    add_rows(&to, LAST_ROWS, config->tied ? COUNT(LAST_ROWS) - 1 : COUNT(LAST_ROWS), WHOLE_MODEL, "", &list);
    if (config->tied) list.head = list.embedding;
    return list;
}

void tensors_free(TensorList *list) {
    free(list->tensors);
    free(list->layers);
    *list = (TensorList){0};
}

const char *const update_state[UPDATE_COUNT][STATE_ARRAYS] = {
#define UPDATE_STATE(rule, function, mean, square) {mean, square},
    UPDATE_RULES(UPDATE_STATE)};

void tensors_use_muon(TensorList *list) {
    for (size_t i = 0; i < list->count; i++)
        if (list->tensors[i].hidden) list->tensors[i].update = UPDATE_MUON;
}

bool tensor_exists(const Tensor *tensor, const AttentionList *attn) {
    if (tensor->scalar == SCALAR_NONE) return true;
    if (tensor->layer == NO_LAYER) return attention_has(attn, tensor->scalar);
    return normalizer_has(&attention_at(attn, tensor->layer)->normalizer, tensor->scalar);
}

bool tensor_trained(const Tensor *tensor, const AttentionList *attn) {
    if (tensor->scalar == SCALAR_NONE) return true;
    if (tensor->layer == NO_LAYER) return attention_trains(attn, tensor->scalar);
    return normalizer_trains(&attention_at(attn, tensor->layer)->normalizer, tensor->scalar);
}

double tensor_start(const Tensor *tensor, const ModelConfig *config) {
    const LayerAttention *layer = attention_of(config, tensor->layer == NO_LAYER ? 0 : tensor->layer);
    return normalizer_start(&layer->normalizer, tensor->scalar, config->seq_len, layer->window);
}

bool tensor_keeps(const Tensor *tensor, const AttentionList *from, const AttentionList *to) {
    if (tensor->layer == NO_LAYER) return attention_has(from, tensor->scalar);
    return normalizer_keeps(&attention_at(from, tensor->layer)->normalizer,
                            &attention_at(to, tensor->layer)->normalizer, tensor->scalar);
}

uint64_t model_parameters(const ModelConfig *config) {
    TensorList list = tensors_of(config, NULL, 0);
    uint64_t sum = 0;
    for (size_t i = 0; i < list.count; i++) sum += list.tensors[i].elements;
    tensors_free(&list);
    return sum;
}

double model_flops_per_token(const ModelConfig *config, size_t T) {
    double width = (double)(query_width(config) + output_width(config));
    uint64_t in_matmuls = model_parameters(config) - (config->tied ? 0 : config->vocab * config->channels);
    return 6.0 * (double)in_matmuls + 6.0 * (double)config->layers * width * (double)T;
}

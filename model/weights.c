#include "model/weights.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "math/random.h"
#include "model/safetensors.h"

void weights_init(const Weights *w, uint64_t seed) {
    uint64_t place = 0;
    for (size_t i = 0; i < w->list->count; i++) {
        const Tensor *t = &w->list->tensors[i];
        random_normal_fill(w->params + t->offset, t->elements, t->mean, t->std, seed, t->std > 0 ? place++ : 0);
    }
}

void weights_start_scalars(const Weights *w, const AttentionList *from) {
    for (size_t i = 0; i < w->list->count; i++) {
        const Tensor *t = &w->list->tensors[i];
        if (t->scalar == SCALAR_NONE || !tensor_exists(t, &w->config->attn) || tensor_keeps(t, from, &w->config->attn))
            continue;
        float start = (float)tensor_start(t, w->config);
        for (size_t j = 0; j < t->elements; j++) w->params[t->offset + j] = start;
        for (size_t s = 0; s < STATE_ARRAYS && w->state[s]; s++)
            memset(w->state[s] + t->offset, 0, t->elements * sizeof(float));
    }
}

size_t weights_scalar_floats(const TensorList *list) {
    size_t floats = 0;
    for (size_t i = 0; i < list->count; i++)
        if (list->tensors[i].scalar != SCALAR_NONE) floats += (1 + STATE_ARRAYS) * list->tensors[i].elements;
    return floats;
}

void weights_keep_scalars(const Weights *w, float *kept, bool restore) {
    for (size_t i = 0; i < w->list->count; i++) {
        const Tensor *t = &w->list->tensors[i];
        for (size_t a = 0; t->scalar != SCALAR_NONE && a < 1 + STATE_ARRAYS; a++, kept += t->elements) {
            float *values = (a == 0 ? w->params : w->state[a - 1]) + t->offset;
            memcpy(restore ? values : kept, restore ? kept : values, t->elements * sizeof(float));
        }
    }
}

// Older files also contain RoPE's frequencies, which are redundant with rope_theta.
static bool is_buffer(const char *name) {
    const char *end = strstr(name, ".rotary_emb.inv_freq");
    return end && !strcmp(end, ".rotary_emb.inv_freq");
}

// A tensor's name in a file. In a model of transformers, attach() of the package attn_c gives each layer a module
// `normalizer` that has the scalars; the first layer's has p, too.
typedef struct {
    char text[128];
} TensorName;
static TensorName name_in(const Safetensors *file, const Tensor *t) {
    TensorName own, attached;
    snprintf(own.text, sizeof own.text, "%s", t->name);
    if (t->scalar == SCALAR_NONE || safetensors_find(file, own.text)) return own;
    const char *name = strrchr(t->name, '.') + 1, *layer = strstr(t->name, ".self_attn.");
    snprintf(attached.text, sizeof attached.text, "%.*s.self_attn.normalizer.%s", layer ? (int)(layer - t->name) : 14,
             layer ? t->name : "model.layers.0", name);
    return safetensors_find(file, attached.text) ? attached : own;
}

static bool is_expected(const TensorList *list, const Safetensors *file, const char *name) {
    for (size_t i = 0; i < list->count; i++)
        if (!strcmp(name_in(file, &list->tensors[i]).text, name)) return true;
    return is_buffer(name);
}

// The file of a tied model may also contain the output projection, if it equals the embedding.
static bool check_tied(const Safetensors *file, const TensorInfo *head, Reasons *reasons, Error *error) {
    const TensorInfo *embedding = safetensors_find(file, "model.embed_tokens.weight");
    bool same = false;
    if (embedding && !safetensors_same(head, embedding, &same, error)) return false;
    if (!same)
        reasons_add(
            reasons,
            "tensor lm_head.weight differs from model.embed_tokens.weight, but \"tie_word_embeddings\" is true");
    return true;
}

static bool check_tensors(const TensorList *list, bool tied, const Safetensors *file, const char *folder,
                          Error *error) {
    Reasons reasons = {0};
    for (size_t i = 0; i < list->count; i++) {
        const Tensor *t = &list->tensors[i];
        safetensors_fits(file, name_in(file, t).text, t->ndim, t->shape, &reasons);
    }
    bool whole = !reasons.count && safetensors_count(file) == list->count;
    for (size_t i = 0; i < safetensors_count(file) && !whole; i++) {
        const TensorInfo *info = safetensors_at(file, i);
        if (is_expected(list, file, info->name)) continue;
        if (!tied || strcmp(info->name, "lm_head.weight") != 0)
            reasons_add(&reasons, "tensor %.200s is not part of the model that config.json describes", info->name);
        else if (!check_tied(file, info, &reasons, error)) return false;
    }
    if (!reasons.count) return true;
    return error_set(error, EXIT_INPUT,
                     "%s: the tensors do not match the model that config.json describes:%s\n"
                     "  Get a complete copy of the model, correct config.json, or convert tensors of another dtype.",
                     folder, reasons_text(&reasons).text);
}

// Does the work of weights_check() and returns the open file, which the caller owns.
static Safetensors *open_checked(const ModelConfig *config, const char *folder, Error *error) {
    Safetensors *file = safetensors_open(folder, error);
    if (!file) return NULL;
    TensorList list = tensors_of(config, NULL, 0);
    bool right = check_tensors(&list, config->tied, file, folder, error);
    tensors_free(&list);
    if (right) return file;
    safetensors_close(file);
    return NULL;
}

bool weights_check(const ModelConfig *config, const char *folder, Error *error) {
    Safetensors *file = open_checked(config, folder, error);
    safetensors_close(file);
    return file != NULL;
}

bool weights_are_bf16(const ModelConfig *config, const char *folder) {
    Error error;
    Safetensors *file = safetensors_open(folder, &error);
    TensorList list = tensors_of(config, NULL, 0);
    bool bf16 = file != NULL;
    for (size_t i = 0; bf16 && i < list.count; i++) {
        const TensorInfo *info = safetensors_find(file, list.tensors[i].name);
        if (list.tensors[i].ndim == 2) bf16 = info && info->dtype == DTYPE_BF16;
    }
    tensors_free(&list);
    safetensors_close(file);
    return bf16;
}

bool weights_load(const Weights *w, const char *folder, const AttentionList *saved, Error *error) {
    ModelConfig config = *w->config;
    config.attn = *saved;
    Safetensors *file = open_checked(&config, folder, error);
    if (!file) return false;
    bool done = true;
    for (size_t i = 0; done && i < w->list->count; i++) {
        const Tensor *t = &w->list->tensors[i];
        if (!tensor_exists(t, saved)) continue;
        done = safetensors_read(file, name_in(file, t).text, t->ndim, t->shape, w->params + t->offset, error);
    }
    safetensors_close(file);
    weights_start_scalars(w, saved);
    return done;
}

// NAME.suffix in optimizer.safetensors, and where it is in memory
typedef struct {
    const char *suffix;
    float *data;
} OptimizerPart;

enum { OPTIMIZER_PARTS = STATE_ARRAYS + 1 };

// What the file has of a tensor: the state of its update rule, and with bf16 the master weights. Returns the count.
static size_t optimizer_parts(OptimizerPart parts[OPTIMIZER_PARTS], const Weights *w, const Tensor *t) {
    size_t count = 0;
    if (!tensor_exists(t, &w->config->attn)) return 0;
    for (size_t s = 0; s < STATE_ARRAYS; s++)
        if (update_state[t->update][s])
            parts[count++] = (OptimizerPart){update_state[t->update][s], w->state[s] + t->offset};
    if (w->bf16) parts[count++] = (OptimizerPart){"master", w->params + t->offset};
    return count;
}

// A mean of squares is at least 0. The update takes its root.
static bool check_squares(const char *path, const char *name, const Tensor *t, const float *square, Error *error) {
    size_t i = 0;
    while (i < t->elements && square[i] >= 0) i++;
    return i == t->elements ||
           error_set(error, EXIT_INPUT,
                     "%s: tensor %s: expected numbers of at least 0, found %g in element %zu of %zu.\n"
                     "  The file is damaged. Use an earlier checkpoint.",
                     path, name, square[i], i, t->elements);
}

bool weights_load_optimizer(const Weights *w, const char *folder, Error *error) {
    char path[PATH_MAX], name[128];
    OptimizerPart parts[OPTIMIZER_PARTS];
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    Safetensors *file = safetensors_open(path, error);
    if (!file) return false;
    bool done = true;
    for (size_t i = 0; i < w->list->count; i++) {
        const Tensor *t = &w->list->tensors[i];
        size_t count = optimizer_parts(parts, w, t);
        for (size_t p = 0; done && p < count; p++) {
            bool squares = parts[p].data == w->state[STATE_SQUARE] + t->offset;
            snprintf(name, sizeof name, "%s.%s", t->name, parts[p].suffix);
            done = safetensors_read(file, name, t->ndim, t->shape, parts[p].data, error) &&
                   (!squares || check_squares(path, name, t, parts[p].data, error));
        }
    }
    safetensors_close(file);
    return done;
}

float *weights_array(const Weights *w, size_t array) {
    return array == WEIGHTS_PARAMS ? w->params : w->state[array];
}

// Do the files contain this array of the tensor?
static bool is_saved(const Weights *w, const Tensor *t, size_t array) {
    return tensor_exists(t, &w->config->attn) && (array == WEIGHTS_PARAMS || update_state[t->update][array]);
}

bool weights_next_piece(const Weights *w, WeightsPiece *p) {
    p->from += p->floats;
    for (; p->tensor < w->list->count; p->tensor++, p->array = 0) {
        const Tensor *t = &w->list->tensors[p->tensor];
        for (; p->array <= WEIGHTS_PARAMS; p->array++, p->from = 0) {
            if (!is_saved(w, t, p->array) || p->from == t->elements) continue;
            size_t left = t->elements - p->from;
            p->floats = left < WEIGHTS_PIECE ? left : WEIGHTS_PIECE;
            p->data = weights_array(w, p->array) + t->offset + p->from;
            return true;
        }
    }
    return false;
}

static const char *const FORMAT[] = {"format", "pt", NULL};

static DType model_dtype(const Weights *w) {
    return w->bf16 ? DTYPE_BF16 : DTYPE_F32;
}

SafetensorsWriter *weights_create_model(const Weights *w, int folder, const char *path, FileHash *hash, Error *error) {
    TensorRow *rows = malloc(w->list->count * sizeof *rows);
    if (!rows) fail(EXIT_RESOURCE, "%s: out of memory for its list of tensors.", path);
    size_t count = 0;
    for (size_t i = 0; i < w->list->count; i++) {
        const Tensor *t = &w->list->tensors[i];
        if (tensor_exists(t, &w->config->attn))
            rows[count++] = (TensorRow){t->name, model_dtype(w), t->ndim, {t->shape[0], t->shape[1]}, NULL};
    }
    SafetensorsWriter *writer = safetensors_create(folder, path, rows, count, FORMAT, hash, error);
    free(rows);
    return writer;
}

SafetensorsWriter *weights_create_optimizer(const Weights *w, int folder, const char *path, FileHash *hash,
                                            Error *error) {
    OptimizerPart parts[OPTIMIZER_PARTS];
    size_t most = w->list->count * OPTIMIZER_PARTS, count = 0;
    TensorRow *rows = malloc(most * sizeof *rows);
    char (*names)[128] = malloc(most * sizeof *names);
    if (!rows || !names) fail(EXIT_RESOURCE, "%s: out of memory for its list of tensors.", path);
    for (size_t i = 0; i < w->list->count; i++) {
        const Tensor *t = &w->list->tensors[i];
        size_t of_tensor = optimizer_parts(parts, w, t);
        for (size_t p = 0; p < of_tensor; p++, count++) {
            snprintf(names[count], sizeof names[count], "%s.%s", t->name, parts[p].suffix);
            rows[count] = (TensorRow){names[count], DTYPE_F32, t->ndim, {t->shape[0], t->shape[1]}, NULL};
        }
    }
    SafetensorsWriter *writer = safetensors_create(folder, path, rows, count, FORMAT, hash, error);
    free(rows);
    free(names);
    return writer;
}

bool weights_write_piece(const WeightsFiles *files, const Weights *w, const WeightsPiece *p, Error *error) {
    bool params = p->array == WEIGHTS_PARAMS, in_optimizer = !params || w->bf16;
    return (!params || safetensors_append(files->model, model_dtype(w), p->data, p->floats, error)) &&
           (!in_optimizer || safetensors_append(files->optimizer, DTYPE_F32, p->data, p->floats, error));
}

bool weights_close(const WeightsFiles *files, bool done, Error *error) {
    if (files->model) done = safetensors_finish(files->model, done, error);
    if (files->optimizer) done = safetensors_finish(files->optimizer, done, error);
    return done;
}

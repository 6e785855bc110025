#include <math.h>
#include <stdio.h>
#include <string.h>

#include "run/parts.h"
#include "runtime/error.h"

// Groups of tensors: some of each layer, and the others. A gain is about 1 and would hide the matrices beside it.
enum { EMBED, HEAD, OTHER, OUTSIDE };
enum { ATTN, MLP, GAINS, PER_LAYER };

static const char *const OUTSIDE_NAMES[OUTSIDE] = {"embed", "head", "other"};
static const char *const LAYER_NAMES[PER_LAYER] = {"attn", "mlp", "gains"};
static const char *const KIND_NAMES[NORMS_KINDS] = {"grad_norms", "weight_norms"};

size_t norm_groups(const Run *run) {
    return OUTSIDE + PER_LAYER * run->config->layers;
}

size_t norms_room(const Run *run) {
    return run->o.norms_every ? NORMS_KINDS * (96 + 16 * norm_groups(run)) : 0;
}

void norms_ready(Run *run) {
    if (!run->o.norms_every || run->norms) return;
    run->norms = allocate(NORMS_KINDS * norm_groups(run), sizeof *run->norms, "the norms of --norms-every");
}

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), n = strlen(end);
    return length >= n && !strcmp(text + length - n, end);
}

static size_t group_of(const Run *run, const char *name) {
    size_t layers = run->config->layers, layer;
    int at = 0;
    if (sscanf(name, "model.layers.%zu.%n", &layer, &at) == 1 && at) {
        int group = strncmp(name + at, "mlp.", 4) ? ATTN : MLP;
        if (ends_with(name, "norm.weight") || ends_with(name, "_gain")) group = GAINS;
        return OUTSIDE + (size_t)group * layers + layer;
    }
    if (!strcmp(name, "model.embed_tokens.weight")) return EMBED;
    return strcmp(name, "lm_head.weight") ? OTHER : HEAD;
}

static bool has_group(const Run *run, const char *name) {
    if (!strcmp(name, "head")) return !run->config->tied;
    return strcmp(name, "mlp") != 0 || run->config->block != BLOCK_GAU;
}

bool run_norms_due(const Run *run) {
    return run->o.norms_every && run->step % run->o.norms_every == 0;
}

void run_norms_start(Run *run) {
    memset(run->norms, 0, NORMS_KINDS * norm_groups(run) * sizeof *run->norms);
    run->normed = true;
}

void run_norms_add(Run *run, NormsOf kind, const Tensor *tensor, double squares) {
    run->norms[(size_t)kind * norm_groups(run) + group_of(run, tensor->name)] += squares;
}

cJSON *norms_json(const Run *run) {
    cJSON *array = cJSON_CreateArray();
    for (size_t i = 0; i < NORMS_KINDS * norm_groups(run); i++)
        cJSON_AddItemToArray(array, cJSON_CreateNumber(run->norms[i]));
    return array;
}

bool norms_read(Run *run, const cJSON *array) {
    const cJSON *item;
    size_t i = 0, count = NORMS_KINDS * norm_groups(run);
    if (!run->norms) return true;
    cJSON_ArrayForEach(item, array) {
        if (i == count || !cJSON_IsNumber(item) || !(item->valuedouble >= 0)) return false;
        run->norms[i++] = item->valuedouble;
    }
    run->normed = i == count;
    return run->normed;
}

static size_t add_norm(char *out, size_t size, size_t at, double squares) {
    if (!isfinite(squares)) return at + (size_t)snprintf(out + at, size - at, "null");
    return at + (size_t)snprintf(out + at, size - at, "%.6g", sqrt(squares));
}

size_t norms_text(const Run *run, char *out, size_t size, size_t at) {
    size_t layers = run->config->layers;
    for (int kind = 0; run->normed && kind < NORMS_KINDS; kind++) {
        const double *squares = run->norms + (size_t)kind * norm_groups(run);
        at += (size_t)snprintf(out + at, size - at, ", \"%s\": {", KIND_NAMES[kind]);
        for (int i = 0; i < OUTSIDE; i++) {
            if (!has_group(run, OUTSIDE_NAMES[i])) continue;
            at += (size_t)snprintf(out + at, size - at, "%s\"%s\": ", i ? ", " : "", OUTSIDE_NAMES[i]);
            at = add_norm(out, size, at, squares[i]);
        }
        for (size_t i = 0; i < PER_LAYER; i++) {
            if (!has_group(run, LAYER_NAMES[i])) continue;
            at += (size_t)snprintf(out + at, size - at, ", \"%s\": [", LAYER_NAMES[i]);
            for (size_t l = 0; l < layers; l++) {
                if (l) at += (size_t)snprintf(out + at, size - at, ", ");
                at = add_norm(out, size, at, squares[OUTSIDE + i * layers + l]);
            }
            at += (size_t)snprintf(out + at, size - at, "]");
        }
        at += (size_t)snprintf(out + at, size - at, "}");
    }
    return at;
}

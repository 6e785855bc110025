// Shared by test_gpt2.c and test_gpt2.cu: reads the cases of fixtures/cases.txt, compares with their answers, and runs
// the cases of whole models and of attention. C and C++ both include it. It reaches the trainer under test through the
// functions subject_*, which the including file defines.
#ifndef REFERENCE_CASES_H
#define REFERENCE_CASES_H

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dev/reference/hash.h"
#include "dev/tests/check.h"
#include "math/adamw.h"
#include "model/model.h"
#include "model/safetensors.h"
#include "runtime/error.h"

#define FIXTURES "dev/reference/fixtures/"
#ifndef GRADIENT_BOUND
#define GRADIENT_BOUND(attn) 1e-4    // of a tensor's gradient, under an AttentionList *
#endif
#ifndef ATTENTION_FLOOR
#define ATTENTION_FLOOR(T) ((T) == 1 ? 5e-2 : 1e-2)    // for attention's gradients, of dv's norm
#endif

static double worst;    // error of the current case
static const char *case_name;
static const char *case_mode = "";    // printed after the name
static char case_line[1024];

// Prints what failed. A passing check prints nothing, a passing case one line.
static void check(const char *what, double error, double bound) {
    if (error > worst) worst = error;
    CHECK(error <= bound, "%s%s: %s: error %.3g, at most %.3g allowed", case_name, case_mode, what, error, bound);
}

// Memory of the current case.
static void **taken;
static size_t taken_count;

// Zeros, which case_done() frees.
static void *take(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    taken = (void **)realloc(taken, (taken_count + 1) * sizeof *taken);
    if (!p || !taken) fail(EXIT_RESOURCE, "out of memory.");
    taken[taken_count++] = p;
    return memset(p, 0, bytes);
}

static float *floats(size_t n) {
    return (float *)take(n * sizeof(float));
}

static void case_done(void) {
    while (taken_count > 0) free(taken[--taken_count]);
    if (!case_failures) {
        int width = 44 - (int)strlen(case_name);
        printf("ok %s%-*s worst error %.2g\n", case_name, width > 0 ? width : 0, case_mode, worst);
    }
    check_case();
    worst = 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Cases

// The value of a key on the case's line, in one of a few static buffers.
static const char *text_of(const char *key) {
    static char values[8][256];
    static int next;
    char *value = values[next++ % 8], pattern[64];
    snprintf(pattern, sizeof pattern, " %s=", key);
    const char *at = strstr(case_line, pattern);
    if (!at) fail(EXIT_INPUT, FIXTURES "cases.txt: %s has no %s=.", case_name, key);
    at += strlen(pattern);
    snprintf(value, sizeof values[0], "%.*s", (int)strcspn(at, " \n"), at);
    return value;
}

static size_t size_of(const char *key) {
    return (size_t)strtoull(text_of(key), NULL, 10);
}

static bool has_key(const char *key) {
    char pattern[64];
    snprintf(pattern, sizeof pattern, " %s=", key);
    return strstr(case_line, pattern) != NULL;
}

// The answers of the current case.
static Safetensors *models, *layers, *answers;

static size_t read_answer(const char *name, float *out, size_t room) {
    Error error;
    char full[256];
    snprintf(full, sizeof full, "%s/%s", case_name, name);
    const TensorInfo *info = safetensors_find(answers, full);
    if (!info) fail(EXIT_INPUT, FIXTURES ": there is no %s.", full);
    if (info->elements > room)
        fail(EXIT_INPUT, FIXTURES ": %s has %zu numbers, at most %zu expected.", full, info->elements, room);
    if (!safetensors_read(answers, full, info->ndim, info->shape, out, &error)) fail_with(&error);
    return info->elements;
}

// Compares x (n) with the answer of that name.
static void compare(const char *name, const float *x, size_t n, double floor, double bound) {
    float stored[FIXTURE_FULL];
    size_t count = read_answer(name, stored, FIXTURE_FULL);
    size_t expected = n <= FIXTURE_FULL ? n : (size_t)FIXTURE_DIGEST;
    if (count != expected)
        fail(EXIT_INPUT, FIXTURES ": %s/%s has %zu numbers, expected %zu.", case_name, name, count, expected);
    check(name, fixture_error(stored, x, n, floor), bound);
}

static float *input(const char *name, size_t n, float scale) {
    float *x = floats(n);
    fixture_fill(x, n, name, 0, 0.0f, scale);
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// The whole model

// The trainer to be tested: a model of this shape, for B sequences of T tokens at a time, its parameters from the host,
// and passes over it.
static void subject_start(const ModelConfig *config, const TensorList *list, size_t B, size_t T);
static void subject_set(const float *params);
// Sum of losses.
static double subject_step(const int32_t *inputs, const int32_t *targets, size_t B, size_t T, float scale, bool first);
static double subject_norm(void);
static void subject_update(double clip, AdamW adamw);    // clips the gradient to this norm
static const float *subject_params(void);                // of the last pass
static const float *subject_grads(void);
static void subject_logits(float *logits, const int32_t *inputs, size_t B, size_t T);    // (B·T,V)
static void subject_end(void);

typedef struct {
    ModelConfig config;
    TensorList list;
    size_t B, T;
} ModelCase;

static void fill_weights(const ModelCase *c) {
    float *params = floats(c->list.floats);
    for (size_t i = 0; i < c->list.count; i++) {
        const Tensor *t = &c->list.tensors[i];
        float mean, scale;
        fixture_weight_rule(t->name, t->shape[t->ndim - 1], &mean, &scale);
        if (!tensor_trained(t, &c->config.attn)) {
            mean = t->mean;
            scale = 0.0f;
        }    // s that is fixed
        fixture_fill(params + t->offset, t->elements, t->name, 0, mean, scale);
    }
    subject_set(params);
}

// A step's inputs and targets, (B,T) each, in one array.
static int32_t *take_batch(const ModelCase *c, size_t step) {
    size_t N = c->B * c->T;
    int32_t *inputs = (int32_t *)take(2 * N * sizeof *inputs), *targets = inputs + N;
    for (size_t b = 0; b < c->B; b++) {
        for (size_t t = 0; t < c->T; t++) {
            size_t at = (step * c->B + b) * (c->T + 1) + t;
            inputs[b * c->T + t] = fixture_token(at, c->config.vocab);
            targets[b * c->T + t] = fixture_token(at + 1, c->config.vocab);
        }
    }
    return inputs;
}

static double distance(const float *x, const float *y, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
    return sqrt(sum);
}

// For each row, the logits of eight ids and logsumexp, in the form of the answers.
static void check_logits(const ModelCase *c, const int32_t *inputs) {
    size_t N = c->B * c->T, V = c->config.vocab;
    float *stored = floats(N * 9), *ours = floats(N * 9), *zero = floats(N * 9), *logits = floats(N * V);
    read_answer("logits", stored, N * 9);
    subject_logits(logits, inputs, c->B, c->T);
    for (size_t n = 0; n < N; n++) {
        const float *row = logits + n * V;
        double sum = 0, largest_logit = -INFINITY;
        for (size_t j = 0; j < 8; j++) ours[n * 9 + j] = row[fixture_index("logit_ids", 8 * n + j, V)];
        for (size_t v = 0; v < V; v++) largest_logit = fmax(largest_logit, row[v]);
        for (size_t v = 0; v < V; v++) sum += exp(row[v] - largest_logit);
        ours[n * 9 + 8] = (float)(log(sum) + largest_logit);
    }
    double error = distance(ours, stored, N * 9) / distance(stored, zero, N * 9);
    check("logits", error, 1e-5);
}

static double relative(double x, double y) {
    return fabs(x - y) / fabs(y);
}

static void compare_tensors(const ModelCase *c, const char *prefix, const float *values, double floor, double bound) {
    char name[160];
    for (size_t i = 0; i < c->list.count; i++) {
        const Tensor *t = &c->list.tensors[i];
        if (!tensor_trained(t, &c->config.attn)) continue;
        snprintf(name, sizeof name, "%s/%s", prefix, t->name);
        compare(name, values + t->offset, t->elements, floor, bound);
    }
}

// Ten steps of AdamW at most: checks each loss and gradient norm. bounds: of the losses, of the first norm and of later
// ones.
static void check_steps(const ModelCase *c, size_t steps, const double bounds[3]) {
    size_t N = c->B * c->T;
    float losses[64], norms[64];
    double lr = atof(text_of("lr")), clip = atof(text_of("clip")), decay = atof(text_of("weight_decay"));
    read_answer("losses", losses, 64);
    read_answer("grad_norms", norms, 64);
    for (size_t s = 0; s < steps; s++) {
        int32_t *batch = take_batch(c, s);
        double loss = subject_step(batch, batch + N, c->B, c->T, 1.0f / (float)N, true) / (double)N,
               norm = subject_norm();
        check("a training loss", relative(loss, losses[s]), bounds[0]);
        check("a gradient norm", relative(norm, norms[s]), bounds[s ? 2 : 1]);
        AdamW adamw = {lr * fmin(1.0, (double)(s + 1) / 2), 0.9, 0.95, 1e-8, decay, (int64_t)s + 1};
        subject_update(clip, adamw);
    }
}

// Ten steps, and the change of the weights.
static void check_training(const ModelCase *c, size_t steps) {
    static const double BOUNDS[] = {1e-5, 1e-4, 1e-4};
    float *start = floats(c->list.floats);
    memcpy(start, subject_params(), c->list.floats * sizeof(float));
    check_steps(c, steps, BOUNDS);
    const float *end = subject_params();
    for (size_t i = 0; i < c->list.floats; i++) start[i] = end[i] - start[i];
    // The gradient of p_1 is 0 if a row with one key always has a weight of 1. AdamW magnifies its rounding.
    bool only_sums = true;
    for (size_t l = 0; l < c->config.layers; l++) only_sums &= norm_is_sum(normalizer_of(&c->config, l)->norm);
    for (size_t i = 0; i < c->list.count && only_sums; i++)
        if (c->list.tensors[i].scalar == SCALAR_P) start[c->list.tensors[i].offset] = 0;
    compare_tensors(c, "update", start, 0, 1e-3);
}

// The gradients of two halves of a batch, accumulated, equal those of the whole.
static void check_accumulation(const ModelCase *c, const int32_t *inputs, double loss) {
    size_t T = c->T, N = c->B * T;
    float *whole = floats(c->list.floats);
    memcpy(whole, subject_grads(), c->list.floats * sizeof(float));
    double halves = subject_step(inputs, inputs + N, 1, T, 1.0f / (float)N, true);
    halves += subject_step(inputs + T, inputs + N + T, 1, T, 1.0f / (float)N, false);
    check("loss by accumulation", relative(halves / (double)N, loss), 1e-5);
    check("gradients by accumulation", distance(subject_grads(), whole, c->list.floats) / subject_norm(), 1e-4);
}

static ModelCase model_start(void) {
    ModelCase c;
    Error error;
    char message[256];
    memset(&c, 0, sizeof c);
    c.B = size_of("B");
    c.T = size_of("T");
    if (!model_parse(&c.config, text_of("model"), &error)) fail_with(&error);
    c.config.seq_len = size_of("L");
    if (!attention_parse(&c.config.attn, text_of("attn"), c.config.layers, message, sizeof message))
        fail(EXIT_INPUT, "%s: %s", case_name, message);
    c.list = tensors_of(&c.config, NULL, 0);
    subject_start(&c.config, &c.list, c.B, c.T);
    fill_weights(&c);
    return c;
}

static void model_end(ModelCase *c) {
    subject_end();
    tensors_free(&c->list);
}

static void test_model(void) {
    ModelCase c = model_start();
    size_t steps = size_of("steps");
    float losses[64];
    size_t N = c.B * c.T;
    int32_t *batch = take_batch(&c, 0);
    check_logits(&c, batch);
    read_answer("losses", losses, 64);
    double loss = subject_step(batch, batch + N, c.B, c.T, 1.0f / (float)N, true) / (double)N;
    check("loss", relative(loss, losses[0]), 1e-5);
    // At T = 1 under l1, the gradients of q and k are 0, so that only rounding is left.
    double floor = (c.T == 1 ? 1e-2 : 1e-3) * subject_norm();
    compare_tensors(&c, "grad", subject_grads(), floor, GRADIENT_BOUND(&c.config.attn));
    if (c.B == 2) check_accumulation(&c, batch, loss);
    if (steps) check_training(&c, steps);
    model_end(&c);
    case_done();
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention by itself

typedef struct {
    LayerAttention layer;
    size_t B, T, NH, NKV, HS;
    int L;
    int32_t *first;        // (B,T) where each row's document begins, or NULL without documents
    size_t sizes[3];       // of q (B,T,NH,HS), and of k and v (B,T,NKV,HS)
    float *x[3], *d[3];    // q, k and v, of which qk=l2 has divided q and k by their norms; their gradients
    float *lengths[3];     // those norms
    float *out, *dout;     // as q
    Scalars scalars;
    ScalarGrads grads;    // of those that are trained
} AttentionCase;

// The subject's forward and backward pass, in the case's window.
static void subject_attention(AttentionCase *c);

// Divides rows of x by their norms.
static void l2_rows(float *x, float *lengths, size_t rows, size_t HS) {
    for (size_t r = 0; r < rows; r++) {
        double squares = 0;
        for (size_t i = r * HS; i < (r + 1) * HS; i++) squares += (double)x[i] * x[i];
        lengths[r] = (float)sqrt(squares);
        for (size_t i = r * HS; i < (r + 1) * HS; i++) x[i] = (float)(x[i] / sqrt(squares));
    }
}

// d of the rows u, which were divided by their norms, becomes that of the rows before: (d - u (u · d)) / norm.
static void l2_rows_backward(float *d, const float *u, const float *lengths, size_t rows, size_t HS) {
    for (size_t r = 0; r < rows; r++) {
        double dot = 0;
        for (size_t i = r * HS; i < (r + 1) * HS; i++) dot += (double)u[i] * d[i];
        for (size_t i = r * HS; i < (r + 1) * HS; i++) d[i] = (float)((d[i] - u[i] * dot) / lengths[r]);
    }
}

// The learned scalars of the normalizer, as in the fixtures, and space for the gradients of those that it trains.
static void fill_scalars(AttentionCase *c) {
    const Normalizer *normalizer = &c->layer.normalizer;
    for (int i = 0; i < SCALAR_COUNT; i++) {
        Scalar scalar = (Scalar)i;
        size_t n = scalar_size(scalar, c->NH, (size_t)c->L);
        float mean, scale;
        if (!normalizer_has(normalizer, scalar)) continue;
        fixture_weight_rule(scalar_names[i], n, &mean, &scale);
        if (normalizer_trains(normalizer, scalar)) c->grads.of[i] = floats(n);
        else {
            mean = (float)normalizer_start(normalizer, scalar, c->L, c->layer.window);
            scale = 0.0f;
        }
        float *values = floats(n);
        fixture_fill(values, n, scalar_names[i], 0, mean, scale);
        c->scalars.of[i] = values;
    }
}

// Where the document of each row begins; all have the same length.
static int32_t *document_keys(const AttentionCase *c) {
    if (!has_key("docs")) return NULL;
    int32_t *first = (int32_t *)take(c->B * c->T * sizeof *first);
    for (size_t i = 0; i < c->B * c->T; i++) first[i] = (int32_t)(i % c->T - i % c->T % size_of("docs"));
    return first;
}

static AttentionCase attention_case(void) {
    static const char *const PARTS[] = {"q", "k", "v"};
    AttentionCase c;
    char message[1024];
    AttentionList list;
    memset(&c, 0, sizeof c);
    if (!attention_parse(&list, text_of("attn"), 1, message, sizeof message))
        fail(EXIT_INPUT, "%s: %s", case_name, message);
    c.layer = *attention_at(&list, 0);
    c.B = size_of("B");
    c.T = size_of("T");
    c.NH = size_of("heads");
    c.NKV = size_of(has_key("kv_heads") ? "kv_heads" : "heads");
    c.HS = size_of("head_size");
    c.L = (int)size_of("L");
    c.first = document_keys(&c);
    for (int i = 0; i < 3; i++) {
        size_t rows = c.B * c.T * (i == 0 ? c.NH : c.NKV), n = c.sizes[i] = rows * c.HS;
        c.x[i] = input(PARTS[i], n, i < 2 ? (float)atof(text_of("scale")) : 2);
        c.d[i] = floats(n);
        c.lengths[i] = floats(rows);
        if (i < 2 && c.layer.normalizer.qk.kind == QK_L2) l2_rows(c.x[i], c.lengths[i], rows, c.HS);
    }
    c.out = floats(c.sizes[0]);
    c.dout = input("dout", c.sizes[0], 1);
    fill_scalars(&c);
    return c;
}

// The subject's passes, and that of qk=l2.
static void attention_pass(AttentionCase *c) {
    subject_attention(c);
    for (int i = 0; i < 2 && c->layer.normalizer.qk.kind == QK_L2; i++)
        l2_rows_backward(c->d[i], c->x[i], c->lengths[i], c->sizes[i] / c->HS, c->HS);
}

// Under l1 with few keys, dq and dk are differences of nearly equal numbers, and 0 up to rounding at T = 1.
static double attention_floor(const AttentionCase *c) {
    double squares = 0;
    for (size_t i = 0; i < c->sizes[2]; i++) squares += (double)c->d[2][i] * c->d[2][i];
    return ATTENTION_FLOOR(c->T) * sqrt(squares);
}

static void test_attention(void) {
    static const char *const GRADIENTS[] = {"dq", "dk", "dv"};
    AttentionCase c = attention_case();
    attention_pass(&c);
    double floor = attention_floor(&c);
    compare("out", c.out, c.sizes[0], 0, 1e-5);
    for (int i = 0; i < 3; i++) compare(GRADIENTS[i], c.d[i], c.sizes[i], floor, 1e-4);
    for (int i = 0; i < SCALAR_COUNT; i++) {
        char name[32];
        size_t n = scalar_size((Scalar)i, c.NH, (size_t)c.L);
        snprintf(name, sizeof name, "d%s", scalar_names[i]);
        if (c.grads.of[i]) compare(name, c.grads.of[i], n, floor, 1e-4);
    }
    case_done();
}

// ---------------------------------------------------------------------------------------------------------------------
// All cases

typedef struct {
    const char *kind;
    void (*run)(void);
} CaseKind;

// Runs the cases whose line contains `word`. A case of a kind that is not in the table is skipped if `some`, and an
// error otherwise.
static void run_cases(const CaseKind *kinds, size_t count, const char *word, bool some) {
    static char name[128];
    Error error;
    models = safetensors_open(FIXTURES "models.safetensors", &error);
    if (models) layers = safetensors_open(FIXTURES "layers.safetensors", &error);
    if (!models || !layers) fail_with(&error);
    FILE *file = fopen(FIXTURES "cases.txt", "r");
    if (!file) fail(EXIT_INPUT, FIXTURES "cases.txt: %s. Run this from the repository's folder.", strerror(errno));
    while (fgets(case_line, sizeof case_line, file)) {
        if (strncmp(case_line, "case=", 5) != 0 || !strstr(case_line, word)) continue;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(case_line + 5, " "), case_line + 5);
        case_name = name;
        const char *kind = text_of("kind");
        size_t i = 0;
        while (i < count && strcmp(kinds[i].kind, kind) != 0) i++;
        if (i == count && some) continue;
        if (i == count) fail(EXIT_INPUT, FIXTURES "cases.txt: %s: unknown kind %s.", name, kind);
        answers = strcmp(kind, "model") ? layers : models;
        kinds[i].run();
    }
    fclose(file);
    safetensors_close(models);
    safetensors_close(layers);
}

#endif

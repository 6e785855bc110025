#include "eval/eval.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/tokens_match.h"
#include "model/checkpoint.h"
#include "model/weights.h"
#include "runtime/human.h"
#include "runtime/path.h"
#include "runtime/utf8.h"

static bool name_taken(const Eval *e) {
    const cJSON *model;
    cJSON_ArrayForEach(model, e->described) {
        if (!strcmp(cJSON_GetObjectItem(model, "name")->valuestring, e->name)) return true;
    }
    return false;
}

// The last `parts` parts of a path.
static const char *tail_of(const char *path, size_t parts) {
    const char *at = path + strlen(path);
    while (at > path && (at[-1] != '/' || --parts > 0)) at--;
    return at;
}

// Does another of the models end so, too?
static bool is_ambiguous(const Eval *e, size_t parts) {
    const char *path = e->models[e->model_at];
    for (size_t i = 0; i < e->model_count; i++)
        if (strcmp(e->models[i], path) != 0 && !strcmp(tail_of(e->models[i], parts), tail_of(path, parts))) return true;
    return false;
}

// The shortest label that tells the models apart: the last parts of the path. If a model is given twice, all of the
// path, or with a number.
static void name_model(Eval *e) {
    const char *path = e->models[e->model_at];
    size_t parts = 1;
    while (is_ambiguous(e, parts) && tail_of(path, parts) > path) parts++;
    snprintf(e->name, sizeof e->name, "%s", tail_of(path, parts));
    if (name_taken(e)) snprintf(e->name, sizeof e->name, "%s", path);
    if (name_taken(e)) snprintf(e->name, sizeof e->name, "%.200s (model %zu)", path, e->model_at + 1);
}

static bool needs_text(const Eval *e) {
    return e->o.task == TASK_NEEDLE || e->o.task == TASK_CHOICE || (e->o.task == TASK_ATTENTION && e->o.prompt_file);
}

static bool open_tokenizer(Eval *e, Error *error) {
    bool exists = access(folder_path(e->folder, tokenizer_files[0]).text, F_OK) == 0;
    tokenizer_close(e->tokenizer);    // of an attempt that failed
    e->tokenizer = NULL;
    if (!needs_text(e)) {
        // The maps have their tokens' texts where that is possible.
        Error why;
        bool wanted = e->o.task == TASK_ATTENTION && exists;
        if (wanted && !(e->tokenizer = tokenizer_open(e->folder, &why)) && !e->checking)
            warn("%s\n  The page of maps will not show the tokens' texts.", why.text);
        return true;
    }
    if (!exists && !checkpoint_vanished(e->folder))
        fail(EXIT_INPUT,
             "%s: it has no %s, which this task needs to read and write text.\n"
             "  Copy %s from the folder of the model's training data into %s.",
             e->folder, tokenizer_files[0], tokenizer_files[0], e->folder);
    e->tokenizer = tokenizer_open(e->folder, error);
    return e->tokenizer != NULL;
}

// --rope-theta and --rope-scaling replace the checkpoint's.
static void settle_rope(const Eval *e) {
    ModelConfig *config = e->config;
    char message[512], text[ROPE_TEXT];
    if (e->o.rope_theta != 0) config->rope_theta = e->o.rope_theta;
    if (e->o.rope_scaling && !rope_scaling_parse(&config->rope_scaling, e->o.rope_scaling, message, sizeof message))
        fail(EXIT_USAGE, "--rope-scaling %s: %s.", e->o.rope_scaling, message);
    const char *wrong = rope_scaling_wrong(&config->rope_scaling, head_size(config));
    if (wrong)
        fail(EXIT_USAGE, "--rope-scaling %s: %s.", rope_scaling_text(&config->rope_scaling, text, sizeof text), wrong);
}

bool eval_find(Eval *e, Error *error) {
    char message[1024];
    name_model(e);
    if (!checkpoint_find("--model", e->models[e->model_at], e->folder, sizeof e->folder, error)) fail_with(error);
    if (!model_config_read(e->config, e->folder, e->o.ignore_config_key, error)) return false;
    if (!checkpoint_verify(e->folder, true, error)) return false;
    e->own = e->given = e->config->attn;
    if (e->o.attn && !attention_parse(&e->given, e->o.attn, e->config->layers, message, sizeof message))
        fail(EXIT_USAGE, "--attn %.400s: %s.", e->o.attn, message);
    attention_warn_of_unused("--attn", e->given.text, e->config->layers);
    attention_warn_of_start(&e->own, &e->given, e->config->layers, "--attn", e->given.text);
    e->switches = !attention_equal(&e->own, &e->given, e->config->layers);
    e->after = false;
    if (!attention_fits(&e->given, e->config->seq_len, message, sizeof message))
        fail(EXIT_USAGE, "--attn %s.", message);
    settle_rope(e);
    return open_tokenizer(e, error);
}

size_t eval_lengths(const Eval *e, size_t *lengths) {
    const IntList *given = &e->o.seq_lens;
    for (size_t i = 0; i < given->count; i++) {
        lengths[i] = given->values[i] ? (size_t)given->values[i] : e->config->seq_len;
        if (lengths[i] > MAX_SEQ_LEN)
            fail(EXIT_USAGE, "%s was trained for %zu tokens, but at most %d are supported. Set --seq-lens.", e->folder,
                 lengths[i], MAX_SEQ_LEN);
        for (size_t j = 0; j < i; j++)
            if (lengths[i] == lengths[j]) fail(EXIT_USAGE, "--seq-lens: %zu is listed twice.", lengths[i]);
    }
    return given->count;
}

size_t eval_length(const Eval *e, size_t least) {
    size_t lengths[OPTION_LIST_MAX];
    if (eval_lengths(e, lengths) > 1 || lengths[0] < least)
        fail(EXIT_USAGE, "--seq-lens: --task %s expects one length of at least %zu.", eval_tasks[e->o.task], least);
    return lengths[0];
}

// A new s is initialized so that the mean of s·ln(n) over n = 1..L is 1, softmax's temperature. Over shorter sequences,
// the mean is lower, so attention is flatter, and the loss says little about the normalizer itself.
static void note_temperature(const Eval *e) {
    const LayerAttention *layer = attention_at(&e->given, 0);
    const Normalizer *from = &attention_at(&e->own, 0)->normalizer, *to = &layer->normalizer;
    size_t L = e->config->seq_len, T = e->longest;
    for (size_t i = 0; i < e->count; i++)
        if (e->lengths[i].T < T) T = e->lengths[i].T;
    bool starts = normalizer_has(to, SCALAR_S) && !normalizer_keeps(from, to, SCALAR_S) && isnan(to->s_start) &&
                  to->scale.kind != SCALE_PN && e->given.count == 1;
    if (!starts || !T || T >= L) return;
    double start = normalizer_start(to, SCALAR_S, L, layer->window),
           here = normalizer_start(to, SCALAR_S, T, layer->window);
    if (!(start / here < 0.9)) return;
    printf(
        "note      s starts at %.4f for L = %zu, but at T = %zu its mean temperature is only %.2f of softmax's, which "
        "usually increases the loss:\n"
        "          use --attn %s+s=%.4f to start at softmax's temperature at this length\n",
        start, L, T, start / here, e->given.text, here);
}

static void print_start(const Eval *e) {
    const ModelConfig *c = e->config;
    char scaling[ROPE_TEXT], ratio[32];
    printf("%smodel     %s, %s parameters, trained with %s at L = %zu\n", e->model_at ? "\n" : "",
           utf8_printed(e->folder).text, human_count((double)model_parameters(c)).text, e->own.text, c->seq_len);
    if (e->data)
        printf("data      %s tokens in %zu shard%s\n", human_grouped(shards_tokens(e->data)).text,
               shards_count(e->data), shards_count(e->data) == 1 ? "" : "s");
    if (c->rope_scaling.kind != ROPE_NONE)
        printf("rope      scaling %s\n", rope_scaling_text(&c->rope_scaling, scaling, sizeof scaling));
    double times = (double)e->longest / (double)c->seq_len;
    snprintf(ratio, sizeof ratio, times < 100 ? "%.3g" : "%.0f", times);
    if (times > 1) {
        printf("note      lengths of up to %s L; L stays %zu in the normalizer, and RoPE's theta ", ratio, c->seq_len);
        if (c->rope_scaling.kind == ROPE_NTK) printf("grows with the length\n");
        else printf("is %s at every length\n", human_count(c->rope_theta).text);
    }
    if (e->switches) note_temperature(e);
    fflush(stdout);
}

// The most keys for which attention needs p_n, under the checkpoint's normalizers or those of --attn; 0 if none has it.
static size_t p_keys(const Eval *e) {
    size_t own = attention_p_keys(&e->own, e->longest), given = attention_p_keys(&e->given, e->longest);
    return own > given ? own : given;
}

void eval_check(const Eval *e) {
    size_t L = e->config->seq_len;
    const AttentionList *asks = attention_p_keys(&e->own, e->longest) > L ? &e->own : &e->given;
    if (p_keys(e) <= L || e->o.pn_extrapolate != PN_AS_LEARNED) return;
    fail(EXIT_USAGE,
         "%s: %s has p_n for n up to L = %zu, but this evaluation asks for %zu.\n"
         "  Use --pn-extrapolate log to extrapolate it by a fit, a1 ln(n) + a2.",
         e->folder, asks->text, L, p_keys(e));
}

// The shards may have been written with another file than the one beside them, so this is only a warning.
static void compare_tokenizers(const Eval *e) {
    FolderPath beside;
    if (!e->data || tokens_match_shards(e->folder, e->data, &beside) == TOKENS_EQUAL) return;
    warn("%s differs from %s.\n  If an id stands for another token there, the results on --data are meaningless.",
         folder_path(beside.text, tokenizer_files[0]).text, folder_path(e->folder, tokenizer_files[0]).text);
}

void eval_start(const Eval *e) {
    if (e->o.pn_extrapolate == PN_LOG && !p_keys(e))
        warn("%s%s--pn-extrapolate log has no effect: %s has no p_n.", e->model_count > 1 ? e->name : "",
             e->model_count > 1 ? ": " : "", e->given.text);
    compare_tokenizers(e);
    print_start(e);
}

void eval_count(Eval *e, bool finite, size_t number) {
    e->parts++;
    if (finite) return;
    size_t length = strlen(e->affected), room = sizeof e->affected - length;
    if (e->not_finite++ && number == e->last_affected) return;
    e->last_affected = number;
    if (room > 32) snprintf(e->affected + length, room, "%s%zu", length ? ", " : "", number);
    else if (e->affected[length - 1] != '.') strcat(e->affected, ", ...");
}

void eval_finish(Eval *e) {
    static const char *const PARTS[][2] = {{"lengths", "length"}, {"lengths", "length"}, {"needles", "length"},
                                           {"prompts", "prompt"}, {"layers", "layer"},   {"questions", "question"}};
    if (e->not_finite)
        warn("%s under %s: its activations are not finite in %s of %s %s (--task %s, %s %s).\n"
             "  Every number that depends on them is nan, and null in eval.json.",
             e->name, e->config->attn.text, human_grouped(e->not_finite).text, human_grouped(e->parts).text,
             PARTS[e->o.task][0], eval_tasks[e->o.task], PARTS[e->o.task][1], e->affected);
    e->parts = e->not_finite = e->affected[0] = 0;
}

// Where a new learned scalar starts: one number, or where layers differ one for each, null where it is not new. NULL if
// it is not new in any layer.
static cJSON *starts_of(const Eval *e, Scalar scalar) {
    cJSON *starts = cJSON_CreateArray();
    double first = NAN;
    bool same = true;
    for (size_t l = 0; l < e->config->layers; l++) {
        const Tensor t = {.scalar = scalar, .layer = scalar_reach[scalar] == WHOLE_MODEL ? NO_LAYER : l};
        bool is_new = tensor_exists(&t, &e->given) && !tensor_keeps(&t, &e->own, &e->given);
        double start = is_new ? tensor_start(&t, e->config) : NAN;
        cJSON_AddItemToArray(starts, cJSON_CreateNumber(start));
        same = same && (!is_new || isnan(first) || start == first);
        if (is_new) first = start;
    }
    if (!same) return starts;
    cJSON_Delete(starts);
    return isnan(first) ? NULL : cJSON_CreateNumber(first);
}

void eval_switch(Eval *e) {
    cJSON *entry = cJSON_CreateObject(), *started;
    e->config->attn = e->given;
    e->lineage = cJSON_CreateArray();
    cJSON_AddItemToArray(e->lineage, entry);
    cJSON_AddStringToObject(entry, "event", "attn-at-evaluation");
    cJSON_AddStringToObject(entry, "from", e->own.text);
    cJSON_AddStringToObject(entry, "attn", e->given.text);
    started = cJSON_AddObjectToObject(entry, "started");
    for (Scalar scalar = 0; scalar < SCALAR_COUNT; scalar++) {
        cJSON *start = starts_of(e, scalar);
        if (!start) continue;
        printf("%s%s starts at ", cJSON_GetArraySize(started) ? ", " : "\n", scalar_names[scalar]);
        if (cJSON_IsNumber(start)) printf("%.6g", start->valuedouble);
        else printf("values that differ by layer");
        cJSON_AddItemToObject(started, scalar_names[scalar], start);
    }
    if (cJSON_GetArraySize(started)) printf("\n");
    e->after = true;
}

// The lineage of a switch lists the losses before and after it.
static void record_losses(const Eval *e) {
    cJSON *entry = cJSON_GetArrayItem(e->lineage, 0), *lengths, *losses[2];
    lengths = cJSON_AddArrayToObject(entry, "seq_lens");
    losses[0] = cJSON_AddArrayToObject(entry, "val_loss_before");
    losses[1] = cJSON_AddArrayToObject(entry, "val_loss_after");
    for (size_t i = 0; i < e->count; i++) {
        cJSON_AddItemToArray(lengths, cJSON_CreateNumber((double)e->lengths[i].T));
        for (int after = 0; after < 2; after++)
            cJSON_AddItemToArray(losses[after], cJSON_CreateNumber(e->lengths[i].loss[after]));
    }
}

RopeAngles eval_angles(const Eval *e, double base, size_t T) {
    RopeAngles angles = model_rope(e->config, base);
    angles.theta = rope_theta(&angles, T);
    if (angles.scaling.kind == ROPE_NTK) angles.scaling.kind = ROPE_NONE;
    return angles;
}

void eval_record_model(Eval *e) {
    Error error;
    cJSON *model = cJSON_CreateObject();
    char scaling[ROPE_TEXT];
    cJSON_AddStringToObject(model, "name", e->name);
    cJSON_AddStringToObject(model, "checkpoint", e->folder);
    cJSON_AddStringToObject(model, "attn", e->own.text);
    cJSON_AddNumberToObject(model, "trained_seq_len", e->config->seq_len);
    cJSON_AddStringToObject(model, "rope_scaling",
                            rope_scaling_text(&e->config->rope_scaling, scaling, sizeof scaling));
    if (e->data) {
        char *print = shards_fingerprint(e->data, &error);
        if (!print) fail_with(&error);
        cJSON_AddItemToObject(model, "data", cJSON_Parse(print));
        free(print);
    }
    if (*e->questions) cJSON_AddItemToObject(model, "data", cJSON_Parse(e->questions));
    if (e->pn_fit) cJSON_AddItemToObject(model, "pn_fit", e->pn_fit);
    if (e->lineage && e->count) record_losses(e);
    if (e->lineage) cJSON_AddItemToObject(model, "lineage", e->lineage);
    cJSON_AddItemToArray(e->described, model);
    e->pn_fit = e->lineage = NULL;
}

void eval_close_model(Eval *e) {
    for (size_t i = 0; i < e->count; i++) shards_close(e->lengths[i].shards);
    tokenizer_close(e->tokenizer);
    e->tokenizer = NULL;
    e->data = NULL;
    e->count = e->longest = 0;
    e->model_at++;
}

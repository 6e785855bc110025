#define _GNU_SOURCE    // environ
#include "eval/eval.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <glob.h>
#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "model/weights.h"
#include "run/checkpoint.h"
#include "runtime/clock.h"
#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/json.h"
#include "runtime/mixture.h"
#include "runtime/own.h"
#include "runtime/path.h"
#include "runtime/start.h"
#include "runtime/tokens_match.h"
#include "runtime/utf8.h"
#include "runtime/version.h"

// ---------------------------------------------------------------------------------------------------------------------
// Flags

static const OptionsHelp HELP = {
    .usage = "Usage: eval_gpt2 --model DIR[,DIR...] [flags]\n\n"
             "Evaluates checkpoints: the loss at any length and position, retrieval of a needle from a haystack, where "
             "attention\ngoes, the learned scalars, and multiple choice. With --attn, also right after a switch to "
             "another normalizer.",
    .example = "--model out/quickstart --data 'data/shakespeare/*_val_*.bin' --seq-lens 256,512 --out out/eval",
    .page = "evaluation.md"};

static const EvalOptions DEFAULTS = {
    .max_tokens = 1 << 20,
    .samples = 20,
    .digits = 7,
    .seed = 1337,
    .picture = true,
    .seq_lens = {.values = {0}, .count = 1},
    .depths = {.values = {10, 30, 50, 70, 90}, .count = 5},
};

// Option.uses: the tasks that use a flag; 0 for all.
enum {
    LOSSES = 1 << TASK_LOSS | 1 << TASK_POSITIONS,
    NEEDLE = 1 << TASK_NEEDLE,
    CHOICE = 1 << TASK_CHOICE,
    ATTENTION = 1 << TASK_ATTENTION,    // without --prompt-file
    PROMPTS = 1 << TASK_COUNT,          // --task attention with --prompt-file
    MODEL_RUNS = LOSSES | NEEDLE | CHOICE | ATTENTION | PROMPTS
};

static const char *const TASKS[] = {"loss", "positions", "needle", "attention", "scores", "choice"};

// "loss, positions or needle"
static void name_tasks(unsigned uses, char *out, size_t size) {
    size_t length = 0, left = 0;
    for (int task = 0; task < TASK_COUNT; task++) left += uses >> task & 1;
    for (int task = 0; task < TASK_COUNT; task++) {
        if (!(uses >> task & 1)) continue;
        bool prompts_too = task != TASK_ATTENTION || uses & PROMPTS;
        const char *after = left > 2 ? ", " : " or ";
        length += (size_t)snprintf(out + length, size - length, "%s%s%s", TASKS[task],
                                   prompts_too ? "" : " without --prompt-file", --left ? after : "");
    }
}

static bool has_prompt_file(const Eval *e) {
    return e->o.task == TASK_ATTENTION && e->o.prompt_file;
}

static bool is_used(const Eval *e, const Option *row) {
    return !row->uses || row->uses & (has_prompt_file(e) ? PROMPTS : 1u << e->o.task);
}

static cJSON *used_flags(const Eval *e, const Option *table, size_t count) {
    char *text = options_json(table, count);
    cJSON *json = cJSON_Parse(text);
    free(text);
    for (const Option *row = table; row < table + count; row++)
        if (!is_used(e, row)) cJSON_DeleteItemFromObjectCaseSensitive(json, row->name);
    return json;
}

// A flag that the task does not use is an error.
static void check_uses(const Eval *e, const Option *table, size_t count) {
    bool prompts = has_prompt_file(e);
    char tasks[128];
    for (const Option *row = table; row < table + count; row++) {
        if (!row->given || is_used(e, row)) continue;
        name_tasks(row->uses, tasks, sizeof tasks);
        const char *task = TASKS[e->o.task], *with = prompts ? " with --prompt-file" : "";
        fail(EXIT_USAGE, "--%s is for --task %s, not %s%s.", row->name, tasks, task, with);
    }
}

// Flags that exclude each other.
static void check_pairs(Option *table, size_t count) {
    static const char *const PAIRS[][2] = {{"depths", "random-depth"}, {"digits", "number"}};
    for (size_t i = 0; i < sizeof PAIRS / sizeof *PAIRS; i++) {
        const Option *row = options_find(table, count, PAIRS[i][0]), *other = options_find(table, count, PAIRS[i][1]);
        bool off = other->type == OPT_SWITCH && !*(const bool *)other->value;
        if (row->given && other->given && !off)
            fail(EXIT_USAGE, "--%s and --%s exclude each other.", row->name, other->name);
    }
}

static void check_flags(const Eval *e) {
    const EvalOptions *o = &e->o;
    if (o->attn && normalizer_help(o->attn)) exit(EXIT_DONE);
    if (!o->model) fail(EXIT_USAGE, "--model is missing: name the folder of a checkpoint or a run.");
    bool has_prompts = has_prompt_file(e);
    const char *data = "shards to evaluate on";
    if (o->task == TASK_CHOICE) data = "JSONL file of questions";
    if (o->task == TASK_ATTENTION) data = "shards to draw sequences from, or pass --prompt-file";
    if (!o->data && o->task != TASK_SCORES && !has_prompts) fail(EXIT_USAGE, "--data is missing: name the %s.", data);
    if (o->data && o->task != TASK_CHOICE && mixture_has_weights(o->data))
        fail(EXIT_USAGE,
             "--data %s: weights are for --train-data of the trainers. Remove them to evaluate on all files as one "
             "text,\n  or evaluate on each source by itself.",
             o->data);
    if (o->out && !*o->out) fail(EXIT_USAGE, "--out is empty: expected the name of a folder.");
    if (o->save_prompts && !o->out) fail(EXIT_USAGE, "--save-prompts: expected a folder --out for prompts.jsonl.");
    for (size_t i = 0; i < o->depths.count; i++)
        for (size_t j = 0; j < i; j++)
            if (o->depths.values[i] == o->depths.values[j])
                fail(EXIT_USAGE, "--depths: %lld is listed twice.", (long long)o->depths.values[i]);
    if (o->rope_theta != 0 && !(o->rope_theta > 1))
        fail(EXIT_USAGE, "--rope-theta %g: expected a number above 1, or 0 for the checkpoint's own.", o->rope_theta);
}

// Removes slashes that do not separate two names.
static void plain_path(char *path) {
    char *end = path;
    for (const char *at = path; *at; at++)
        if (*at != '/' || at == path || at[-1] != '/') *end++ = *at;
    if (end > path + 1 && end[-1] == '/') end--;
    *end = 0;
}

// --model A,B: several models, unless it is the name of a folder. Each must exist before the first one is evaluated.
static void split_models(Eval *e) {
    Error error;
    char *rest = strdup(e->o.model), folder[PATH_MAX];
    bool one = access(rest, F_OK) == 0;
    for (char *word = strsep(&rest, one ? "" : ","); word; word = strsep(&rest, one ? "" : ",")) {
        if (e->model_count == MAX_MODELS) fail(EXIT_USAGE, "--model: more than %d models.", MAX_MODELS);
        plain_path(word);
        if (*word) e->models[e->model_count++] = word;
    }
    if (!e->model_count) fail(EXIT_USAGE, "--model is empty: name the folder of a checkpoint or a run.");
    for (size_t i = 0; i < e->model_count; i++)
        if (!checkpoint_find("--model", e->models[i], folder, sizeof folder, &error)) fail_with(&error);
}

void eval_open(Eval *e, ModelConfig *config, int argc, char **argv) {
    EvalOptions *o = &e->o;
    *o = DEFAULTS;
    // clang-format off
    Option table[] = {
        {"model", OPT_TEXT, &o->model, .arg = "DIR[,DIR...]", .group = "Model", .required = true,
         .help = "folder of a checkpoint, of a run (uses its newest checkpoint), or of a Hugging Face model (Llama, Mistral, Qwen2 or Qwen3)"},
        {"attn", OPT_TEXT, &o->attn, .arg = "NAME", .group = "Model",
         .help = "also evaluate under another normalizer, or a list for the layers, without training; `--attn help` lists them"},
        {"ignore-config-key", OPT_TEXT, &o->ignore_config_key, .arg = "NAME[,...]", .group = "Model",
         .help = "unknown keys in config.json to ignore"},
        {"pn-extrapolate", OPT_CHOICE, &o->pn_extrapolate, .choices = "none|log", .group = "Model",
         .help = "none: p_n as learned; log: replaced for all n by the fit p_n = a1 ln(n) + a2"},
        {"rope-theta", OPT_FLOAT, &o->rope_theta, 0, 1e12, .arg = "X", .group = "Model", .uses = MODEL_RUNS,
         .help = "base of RoPE's wavelengths; 0: the checkpoint's"},
        {"rope-scaling", OPT_TEXT, &o->rope_scaling, .arg = "NAME", .group = "Model", .uses = MODEL_RUNS,
         .help = "RoPE's scaling: none, linear:FACTOR, ntk, llama3:FACTOR:LOW:HIGH:ORIGINAL or yarn:FACTOR:ORIGINAL; without this flag: the checkpoint's"},
        {"data", OPT_TEXT, &o->data, .arg = "GLOB", .group = "Data",
         .uses = LOSSES | NEEDLE | CHOICE | ATTENTION,
         .help = "shards to evaluate on, for example 'data/shakespeare/*_val_*.bin'; for choice, a JSONL file"},
        {"doc-mask", OPT_SWITCH, &o->doc_mask, .group = "Data", .uses = LOSSES,
         .help = "attention stops at document boundaries, as in training with --doc-mask"},
        {"pack", OPT_CHOICE, &o->pack, .choices = "stream|example", .group = "Data", .uses = LOSSES,
         .help = "stream: sequences of one stream of tokens; example: a document each, as with the trainer's --pack"},
        {"seq-lens", OPT_INT_LIST, &o->seq_lens, 0, MAX_SEQ_LEN, .arg = "T[,T...]", .group = "Data",
         .uses = LOSSES | NEEDLE | CHOICE | ATTENTION,
         .help = "tokens per sequence; each length is evaluated in turn; 0: the checkpoint's L"},
        {"max-tokens", OPT_INT, &o->max_tokens, 1, 1e12, .arg = "N", .group = "Data", .uses = LOSSES,
         .help = "maximum number of tokens per length, in whole sequences, at least one (loss, positions)"},
        {"samples", OPT_INT, &o->samples, 1, 1e6, .arg = "N", .group = "Data", .uses = NEEDLE | ATTENTION,
         .help = "needle: needles per length and depth; attention: sequences, if there is no --prompt-file"},
        {"task", OPT_CHOICE, &o->task, .choices = "loss|positions|needle|attention|scores|choice", .group = "Evaluation",
         .help = "loss: the mean loss at each length; positions: also the loss at each position; needle: how often a number in a long text is found again; attention: where the heads attend, and maps; scores: the learned scalars; choice: accuracy in multiple choice"},
        {"prompt-file", OPT_TEXT, &o->prompt_file, .arg = "F", .group = "Evaluation", .uses = ATTENTION | PROMPTS,
         .help = "attention: a file with one prompt per line, instead of --data"},
        {"chat", OPT_CHOICE, &o->chat, .choices = "raw|squad|chatml", .group = "Evaluation", .uses = NEEDLE,
         .help = "needle: ask plainly, as data/squad.py writes questions, or in ChatML"},
        {"system", OPT_TEXT, &o->system, .arg = "TEXT", .group = "Evaluation", .uses = NEEDLE,
         .help = "needle: the system message with which a chat begins; without it, there is none"},
        {"depths", OPT_INT_LIST, &o->depths, 0, 100, .arg = "P[,P...]", .group = "Evaluation", .uses = NEEDLE,
         .help = "needle: where in the context it is inserted, in percent"},
        {"random-depth", OPT_SWITCH, &o->random_depth, .group = "Evaluation", .uses = NEEDLE,
         .help = "needle: each at a random place instead"},
        {"digits", OPT_INT, &o->digits, 1, 18, .arg = "N", .group = "Evaluation", .uses = NEEDLE,
         .help = "needle: the length of its number"},
        {"city", OPT_TEXT, &o->city, .arg = "NAME", .group = "Evaluation", .uses = NEEDLE,
         .help = "needle: always this city instead of a random one"},
        {"number", OPT_TEXT, &o->number, .arg = "DIGITS", .group = "Evaluation", .uses = NEEDLE,
         .help = "needle: always this number instead of a random one"},
        {"max-new-tokens", OPT_INT, &o->max_new_tokens, 0, 4096, .arg = "N", .group = "Evaluation", .uses = NEEDLE,
         .help = "needle: the longest answer; 0: 48 with chatml, otherwise the digits plus 4"},
        {"save-prompts", OPT_SWITCH, &o->save_prompts, .group = "Evaluation", .uses = NEEDLE,
         .help = "needle: write each prompt's and answer's token ids to prompts.jsonl in --out"},
        {"seed", OPT_INT, &o->seed, 0, 9007199254740992.0, .arg = "N", .group = "Evaluation",
         .uses = NEEDLE | ATTENTION,
         .help = "chooses needles and haystacks, or the sequences of attention"},
        {"out", OPT_TEXT, &o->out, .arg = "DIR", .group = "Evaluation",
         .help = "folder for eval.json and plots; without it, the results are only printed"},
        {"foreign-folder", OPT_SWITCH, &o->foreign_folder, .group = "Evaluation",
         .help = "accept an --out that belongs to another user and that everybody may write to"},
        {"picture", OPT_SWITCH, &o->picture, .group = "Evaluation",
         .help = "0: write eval.json without plots; scripts/plot_eval.py draws them later"},
        {"dtype", OPT_CHOICE, &o->dtype, .choices = "fp32|bf16", .group = "Machine",
         .help = "fp32: matmuls in float32; bf16: their inputs in bfloat16, on a GPU also the activations; faster and less exact"},
        {"threads", OPT_INT, &o->threads, 0, MAX_THREADS, .arg = "N", .group = "Machine", .help = THREADS_HELP},
    };
    // clang-format on
    size_t count = sizeof table / sizeof *table;
    options_parse(table, count, argc, argv, HELP);
    check_uses(e, table, count);
    check_pairs(table, count);
    check_flags(e);
    split_models(e);
    e->config = config;
    e->arguments = used_flags(e, table, count);
    e->results = cJSON_CreateArray();
    e->described = cJSON_CreateArray();
    e->files = cJSON_CreateArray();
}

// ---------------------------------------------------------------------------------------------------------------------
// Models

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
        fail(EXIT_USAGE, "--seq-lens: --task %s expects one length of at least %zu.", TASKS[e->o.task], least);
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
             PARTS[e->o.task][0], TASKS[e->o.task], PARTS[e->o.task][1], e->affected);
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

// ---------------------------------------------------------------------------------------------------------------------
// eval.json and its picture

cJSON *eval_row(Eval *e) {
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "model", e->name);
    cJSON_AddStringToObject(row, "attn", e->config->attn.text);
    cJSON_AddItemToArray(e->results, row);
    return row;
}

// Writes the path of a file of the checkout that has this program, in its root or in build/NAME. Other folders, such as
// the current one, may be somebody else's. Returns false without the file.
static bool find_beside(char *out, size_t size, const char *name) {
    char root[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", root, sizeof root - 1);
    root[length > 0 ? length : 0] = 0;
    char *slash = strrchr(root, '/');
    if (!slash) return false;
    *slash = 0;
    char *build = strrchr(root, '/');
    if (build && build - root >= 6 && !memcmp(build - 6, "/build", 6)) build[-6] = 0;
    snprintf(out, size, "%s/%s", root, name);
    return access(out, R_OK) == 0;
}

// Runs scripts/plot_eval.py, which needs Python and matplotlib. Without them the results are complete but for pictures.
// posix_spawn() neither copies the page tables of gigabytes nor runs the fork handlers of libraries with threads.
static void draw(const Eval *e) {
    char script[PATH_MAX + 32] = "scripts/plot_eval.py", python[PATH_MAX + 32];
    if (!find_beside(script, sizeof script, "scripts/plot_eval.py")) {
        warn("no plot: there is no %s. eval.json is complete.\n  With a checkout of attn.c: .venv/bin/python "
             "scripts/plot_eval.py %s",
             script, e->o.out);
        return;
    }
    if (!find_beside(python, sizeof python, ".venv/bin/python")) snprintf(python, sizeof python, "python3");
    char *words[] = {python, script, "--", (char *)e->o.out, NULL};
    pid_t child;
    int status = 0;
    fflush(stdout);
    int failed = posix_spawnp(&child, python, NULL, NULL, words, environ);
    if (failed) {
        warn("no plot: %s: %s. eval.json is complete.\n  With Python and matplotlib: python3 %s %s", python,
             strerror(failed), script, e->o.out);
        return;
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    if (status != 0) warn("no plot, but eval.json is complete. To draw it: %s %s %s", python, script, e->o.out);
}

size_t eval_characters(const char *text) {
    size_t count = 0;
    for (; *text; text++) count += ((unsigned char)*text & 0xC0) != 0x80;
    return count;
}

// ---- files in --out

static const char *const UNFINISHED[] = {"eval.json.tmp", "map-*.npy.tmp", "prompts.jsonl.tmp"};

static void remove_unfinished(const Eval *e) {
    DIR *folder = opendir(e->o.out);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        for (size_t i = 0; i < sizeof UNFINISHED / sizeof *UNFINISHED; i++)
            if (fnmatch(UNFINISHED[i], entry->d_name, 0) == 0) unlink(folder_path(e->o.out, entry->d_name).text);
    if (folder) closedir(folder);
}

// The lock is on the folder itself, so no file is left. Where a file system has no locks, it is not taken.
void eval_take_folder(const Eval *e) {
    Error error;
    struct stat there;
    const char *out = e->o.out;
    if (!out) return;
    if (!own_check(out, e->o.foreign_folder, &error) || !file_make_folders(out, &error)) fail_with(&error);
    int folder = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0 && flock(folder, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        fail(EXIT_BUSY,
             "%s: another evaluation is writing to this folder.\n  Wait until it ends, or choose another --out.", out);
    remove_unfinished(e);
    FolderPath results = folder_path(out, "eval.json");
    if (stat(results.text, &there) == 0 && S_ISDIR(there.st_mode))
        fail(EXIT_RESOURCE,
             "%s: expected a file, or none yet, found a folder.\n"
             "  The results are written to this path. Move the folder away, or choose another --out.",
             results.text);
    File *probe = file_create(AT_FDCWD, folder_path(out, UNFINISHED[0]).text, NULL, &error);
    if (!probe) fail_with(&error);
    file_discard(probe);
}

static FolderPath unfinished(const Eval *e, const char *name) {
    FolderPath path = folder_path(e->o.out, name);
    snprintf(path.text + strlen(path.text), sizeof path.text - strlen(path.text), ".tmp");
    return path;
}

File *eval_file(Eval *e, const char *name) {
    Error error;
    File *file = file_create(AT_FDCWD, unfinished(e, name).text, NULL, &error);
    if (!file) fail_with(&error);
    cJSON_AddItemToArray(e->files, cJSON_CreateString(name));
    return file;
}

void eval_file_write(File *file, const void *data, size_t size) {
    Error error;
    if (file_write(file, data, size, &error)) return;
    file_discard(file);
    fail_with(&error);
}

static void rename_files(Eval *e) {
    Error error;
    const cJSON *name;
    if (e->prompts && !file_close(e->prompts, &error)) fail_with(&error);
    cJSON_ArrayForEach(name, e->files) {
        const char *text = name->valuestring;
        if (!file_rename(AT_FDCWD, unfinished(e, text).text, folder_path(e->o.out, text).text, &error))
            fail_with(&error);
    }
}

// ---- files of the eval.json before this one

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && !strcmp(text + length - tail, end);
}

// Can this be the name of a file that belongs to an eval.json? One from elsewhere may list anything.
static bool is_result(const char *name) {
    return !strchr(name, '/') && (ends_with(name, ".png") || ends_with(name, ".html") || ends_with(name, ".npy") ||
                                  ends_with(name, ".jsonl"));
}

// The names in "files" of OUT/eval.json. NULL if there is none that can be read.
static cJSON *listed_files(const Eval *e) {
    Error ignored;
    cJSON *json = json_read(folder_path(e->o.out, "eval.json").text, JSON_LARGE, &ignored);
    cJSON *files = cJSON_DetachItemFromObjectCaseSensitive(json, "files");
    cJSON_Delete(json);
    return files;
}

static bool same_file(const char *a, const char *b) {
    struct stat first, second;
    return a && b && stat(a, &first) == 0 && stat(b, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

// Is the file one that this call reads: --prompt-file, or --data, which is a path or patterns?
static bool is_input(const Eval *e, const char *path) {
    if (same_file(path, e->o.prompt_file) || same_file(path, e->o.data)) return true;
    char *words = strdup(e->o.data ? e->o.data : ""), *rest = words;
    bool found = false;
    for (char *word = strsep(&rest, ", "); word && !found; word = strsep(&rest, ", ")) {
        glob_t paths;
        if (glob(word, GLOB_TILDE, NULL, &paths)) continue;
        for (size_t i = 0; i < paths.gl_pathc; i++) found = found || same_file(path, paths.gl_pathv[i]);
        globfree(&paths);
    }
    free(words);
    return found;
}

static bool is_listed(const cJSON *files, const char *name) {
    const cJSON *item;
    cJSON_ArrayForEach(item, files) {
        if (!strcmp(item->valuestring, name)) return true;
    }
    return false;
}

// Removes the listed files that this eval.json does not have.
static void remove_old_files(const Eval *e, const cJSON *listed) {
    const cJSON *item;
    cJSON_ArrayForEach(item, listed) {
        const char *name = item->valuestring;
        if (!cJSON_IsString(item) || !is_result(name) || is_listed(e->files, name)) continue;
        FolderPath path = folder_path(e->o.out, name);
        if (!is_input(e, path.text)) unlink(path.text);
    }
}

void eval_write(Eval *e) {
    Error error;
    cJSON *json = cJSON_CreateObject();
    cJSON *listed = listed_files(e);
    cJSON_AddStringToObject(json, "task", TASKS[e->o.task]);
    cJSON_AddItemToObject(json, "files", e->files);
    version_add(json);
    cJSON_AddItemToObject(json, "arguments", e->arguments);
    cJSON_AddItemToObject(json, "models", e->described);
    cJSON_AddItemToObject(json, "results", e->results);
    char *text = cJSON_Print(json);
    if (!text) fail(EXIT_RESOURCE, "out of memory for eval.json.");
    rename_files(e);
    if (!file_replace_text(folder_path(e->o.out, "eval.json").text, text, &error)) fail_with(&error);
    remove_old_files(e, listed);
    cJSON_Delete(listed);
    cJSON_Delete(json);
    free(text);
    if (e->o.picture) draw(e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Progress

static void bar_show(Bar *p, uint64_t done) {
    enum { WIDTH = 24 };
    static const char FULL[] = "########################", EMPTY[] = "........................";
    double t = now();
    if (!p->visible || done >= p->total || t - p->shown < 0.2) return;
    int bar = (int)(WIDTH * done / p->total);
    p->shown = t;
    fprintf(stderr, "\rtokens [%.*s%.*s] %s/%s", bar, FULL, WIDTH - bar, EMPTY, human_grouped(done).text,
            human_grouped(p->total).text);
    if (done)
        fprintf(stderr, ", %s left", human_duration((t - p->start) * (double)(p->total - done) / (double)done).text);
    fprintf(stderr, "\033[K");
}

// A program that Ctrl-C ends leaves the bar, and what follows it begins a line.
static void end_line(int number) {
    ssize_t written = write(STDERR_FILENO, "\n", 1);
    (void)written;
    raise(number);    // the default action, after the return
}

void bar_start(Bar *p) {
    p->start = now();
    p->visible = isatty(STDERR_FILENO);
    struct sigaction before, action = {.sa_handler = end_line, .sa_flags = (int)SA_RESETHAND};
    if (!p->visible || sigaction(SIGINT, NULL, &before) != 0 || before.sa_handler == SIG_IGN) return;
    sigaction(SIGINT, &action, NULL);
}

void bar_next(Bar *p, uint64_t tokens) {
    p->done += p->piece;
    p->piece = tokens;
    bar_show(p, p->done);
}

void bar_within(Bar *p, size_t part, size_t parts) {
    bar_show(p, p->done + (uint64_t)((double)p->piece * (double)part / (double)parts));
}

void bar_clear(Bar *p) {
    if (p->visible && p->shown > 0) fprintf(stderr, "\r\033[K");
    p->shown = 0;
}

void bar_end(Bar *p) {
    p->done += p->piece;
    p->piece = 0;
    bar_clear(p);
}

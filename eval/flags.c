#include "eval/eval.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/mixture.h"
#include "model/checkpoint.h"
#include "runtime/start.h"

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

#define TASK_NAME(kind, name) name,
#define TASK_OR(kind, name) "|" name
const char *const eval_tasks[TASK_COUNT] = {EVAL_TASKS(TASK_NAME)};
static const char CHOICES[] = EVAL_TASKS(TASK_OR);    // after a "|"

// "loss, positions or needle"
static void name_tasks(unsigned uses, char *out, size_t size) {
    size_t length = 0, left = 0;
    for (int task = 0; task < TASK_COUNT; task++) left += uses >> task & 1;
    for (int task = 0; task < TASK_COUNT; task++) {
        if (!(uses >> task & 1)) continue;
        bool prompts_too = task != TASK_ATTENTION || uses & PROMPTS;
        const char *after = left > 2 ? ", " : " or ";
        length += (size_t)snprintf(out + length, size - length, "%s%s%s", eval_tasks[task],
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
        const char *task = eval_tasks[e->o.task], *with = prompts ? " with --prompt-file" : "";
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
        {"task", OPT_CHOICE, &o->task, .choices = &CHOICES[1], .group = "Evaluation",
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

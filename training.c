#include "training.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "attention/modeling.h"
#include "runtime/checkpoint.h"
#include "runtime/file.h"
#include "runtime/heartbeat.h"
#include "runtime/human.h"
#include "runtime/json.h"
#include "runtime/metrics.h"
#include "runtime/process.h"
#include "runtime/random.h"
#include "runtime/run.h"
#include "runtime/sampler.h"
#include "runtime/schedule.h"
#include "runtime/shards.h"
#include "runtime/start.h"
#include "runtime/tokenizer.h"

// A change of normalizer to come.
typedef struct {
    int64_t step;
    Normalizer to;
    bool repeated;                     // the run has made it before, beyond the checkpoint that it continues from
} Switch;

typedef struct {
    TrainOptions o;
    ModelConfig *config;               // of the trainer's model
    Weights weights;
    MemoryPlan *plan;                  // of the host's memory
    Tokenizer *tokenizer;              // NULL: samples are shown as ids
    char tokenizer_folder[PATH_MAX];   // where its files lie, for the checkpoints; "" for none
    int tokenizer_vocab, end_of_text;  // its ids; 0 and -1 where they are not known
    const char *vocab_from;            // who gave the model its vocabulary, for the plan
    Shards *train, *val;
    char *train_print, *val_print;     // fingerprints
    cJSON *lineage;
    Metrics *metrics;
    Heartbeat *heartbeat;              // NULL: none
    Schedule schedule;

    bool resumed;                      // continues from a checkpoint
    bool started_over;                 // continues a run that has none yet
    int64_t step, tokens;              // done
    uint64_t sequence;                 // the next in the data's order
    double best_loss;
    int64_t best_step;                 // -1: none yet
    StepMetrics last;                  // of the newest step
    bool owed;                         // that step's validation, metrics line and sample are still to come
    int64_t saved;                     // the step of the newest checkpoint that needs no saving again; -1: none

    Switch *switches;                  // by step
    size_t switch_count;
    Normalizer loaded;                 // of the weights that --init-from brings; .text is empty without

    double mark;                       // where the newest step ended, later by all that took place since and is no part of a step
    double aside;                      // where that which is no part of a step began
    double seconds;                    // a step, smoothed
    uint64_t rows, without_weight;     // of attention in the newest step

    size_t T;                          // the longest sequence
    int64_t step_tokens;               // a step's, all processes together
    int64_t micro_batches;             // of one process, a step
    double flops;                      // the peak of all processes
    int32_t *window, *inputs, *targets;
    uint8_t *window_mask, *mask;       // NULL where everything counts
    char *more;                        // text of metrics.jsonl: what the trainer has to say, and about the learned scalars
    size_t more_size;
} Run;

#define STEPS_MAX 1000000000000LL      // as --steps has it

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static bool is_main(void) {
    return process.rank == 0;
}

// ---- before anything is taken: what is to be done

// --attn-switch: STEP:NAME. False where the flag is absent.
static bool parse_switch(const char *text, Switch *out) {
    char message[1024];
    if (!text) return false;
    size_t digits = strspn(text, "0123456789");
    int64_t step = digits && digits <= 13 ? strtoll(text, NULL, 10) : -1;
    if (text[digits] != ':' || step < 0 || step > STEPS_MAX)
        fail(EXIT_USAGE, "--attn-switch %s: expected STEP:NAME with a step from 0 to %lld, for example 5000:ssmax.", text, STEPS_MAX);
    *out = (Switch){.step = step};
    if (!normalizer_parse(&out->to, text + digits + 1, message, sizeof message)) fail(EXIT_USAGE, "--attn-switch %s: %s.", text, message);
    return true;
}

static void insert_switch(Run *run, Switch added) {
    size_t at = run->switch_count++;
    run->switches = realloc(run->switches, run->switch_count * sizeof *run->switches);
    if (!run->switches) fail(EXIT_RESOURCE, "out of memory for the changes of normalizer.");
    for (; at > 0 && run->switches[at - 1].step > added.step; at--) run->switches[at] = run->switches[at - 1];
    run->switches[at] = added;
}

static bool same_switch(const Switch *a, const Switch *b) {
    return a->step == b->step && normalizer_equal(&a->to, &b->to);
}

// A switch of a lineage. False where the entry is something else.
static bool read_switch(const cJSON *entry, const char *out, Switch *to) {
    const char *event = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "event"));
    const char *attn = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "attn"));
    uint64_t step;
    char message[1024];
    if (!event || strcmp(event, "attn-switch")) return false;
    if (!attn || !json_u64(cJSON_GetObjectItemCaseSensitive(entry, "step"), &step) || step > (uint64_t)STEPS_MAX)
        fail(EXIT_INPUT, "%s/run.json: an attn-switch in its lineage has no \"step\" and \"attn\".", out);
    *to = (Switch){.step = (int64_t)step, .repeated = true};
    if (!normalizer_parse(&to->to, attn, message, sizeof message))
        fail(EXIT_INPUT, "%s/run.json: the attn-switch at step %lld: %s.", out, (long long)step, message);
    return true;
}

// Has the run, as it stands, made this switch?
static bool switch_made(const Run *run, const Switch *asked) {
    const cJSON *entry;
    Switch made;
    cJSON_ArrayForEach(entry, run->lineage) {
        if (read_switch(entry, run->o.out, &made) && same_switch(&made, asked)) return true;
    }
    return false;
}

static void warn_of_same_normalizer(const Run *run, const Switch *asked) {
    const Normalizer *before = run->switch_count ? &run->switches[run->switch_count - 1].to : &run->config->attn;
    if (!normalizer_equal(before, &asked->to)) return;
    warn("--attn-switch %s: %s is already the normalizer at that step; only the learning rate's warmup runs again.", run->o.attn_switch,
         before->text);
}

// The changes of normalizer to come: those that the run made beyond its checkpoint, which it repeats, and --attn-switch. Where the flag is
// none of these, the run takes another course from that step on.
static void settle_switches(Run *run) {
    Switch asked;
    if (!parse_switch(run->o.attn_switch, &asked)) return;
    bool given = train_options_given(&run->o, "attn-switch");
    if (run->resumed && asked.step <= run->step && switch_made(run, &asked)) return;
    if (asked.step < run->step) {
        if (!given) return;                       // the run's own flag, which a later one has overtaken
        fail(EXIT_USAGE, "--attn-switch %s: the run is already at step %lld; give that step or a later one.", run->o.attn_switch,
             (long long)run->step);
    }
    for (size_t i = 0; i < run->switch_count; i++)
        if (same_switch(&run->switches[i], &asked)) return;
    for (; run->switch_count > 0 && run->switches[run->switch_count - 1].step >= asked.step; run->switch_count--) {
        const Switch *other = &run->switches[run->switch_count - 1];
        warn("--attn-switch %s: the change to %s at step %lld, which this run made before, is not repeated.", run->o.attn_switch, other->to.text,
             (long long)other->step);
    }
    warn_of_same_normalizer(run, &asked);
    insert_switch(run, asked);
}

// The numbers of a step whose validation, metrics line and sample are still to come.
static void read_owed(Run *run, const cJSON *owed, const char *path) {
    const struct { const char *name; double *value; float *single; } numbers[] = {
        {"loss", NULL, &run->last.loss}, {"lr", NULL, &run->last.lr}, {"grad_norm", NULL, &run->last.grad_norm},
        {"ms", &run->last.ms, NULL}, {"tok_per_s", &run->last.tok_per_s, NULL}, {"mfu", &run->last.mfu, NULL},
    };
    if (!owed) return;
    run->last = (StepMetrics){.step = run->step, .tokens = run->tokens, .val_loss = NAN};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(owed, numbers[i].name);
        if (!cJSON_IsNumber(item)) fail(EXIT_INPUT, "%s: \"owed\": expected a number \"%s\".", path, numbers[i].name);
        if (numbers[i].single) *numbers[i].single = (float)item->valuedouble;
        else *numbers[i].value = item->valuedouble;
    }
    run->owed = true;
    run->seconds = run->last.ms / 1000;
}

// state.json: where the run stood.
static void read_state(Run *run, const char *folder) {
    char path[PATH_MAX];
    Error error;
    snprintf(path, sizeof path, "%s/state.json", folder);
    cJSON *json = json_read(path, &error);
    if (!json) fail_with(&error);
    uint64_t step, tokens, sequence, rewarm;
    const cJSON *best = cJSON_GetObjectItemCaseSensitive(json, "best_val_loss");
    uint64_t best_step;
    if (!json_u64(cJSON_GetObjectItemCaseSensitive(json, "step"), &step) ||
        !json_u64(cJSON_GetObjectItemCaseSensitive(json, "tokens"), &tokens) ||
        !json_u64(cJSON_GetObjectItemCaseSensitive(json, "data_position"), &sequence) ||
        !json_u64(cJSON_GetObjectItemCaseSensitive(json, "rewarm"), &rewarm))
        fail(EXIT_INPUT, "%s: expected the whole numbers \"step\", \"tokens\", \"data_position\" and \"rewarm\".", path);
    run->step = (int64_t)step, run->tokens = (int64_t)tokens, run->sequence = sequence;
    run->schedule.rewarm = (int64_t)rewarm;
    if (cJSON_IsNumber(best) && json_u64(cJSON_GetObjectItemCaseSensitive(json, "best_step"), &best_step))
        run->best_loss = best->valuedouble, run->best_step = (int64_t)best_step;
    read_owed(run, cJSON_GetObjectItemCaseSensitive(json, "owed"), path);
    cJSON_Delete(json);
}

// Divides a lineage where the run stands: what lies beyond is to be repeated. `made` as run_lineage_cut() has it.
static void repeat_switches(Run *run, cJSON *lineage, const char *made) {
    const cJSON *entry;
    Switch repeated;
    cJSON *beyond = run_lineage_cut(lineage, run->step, made);
    cJSON_ArrayForEach(entry, beyond) {
        if (read_switch(entry, run->o.out, &repeated)) insert_switch(run, repeated);
    }
    cJSON_Delete(beyond);
}

// A stop in the change at the start leaves a checkpoint from before that change, known by its normalizer.
static void settle_lineage(Run *run) {
    ModelConfig *config = run->config;
    char message[1024];
    repeat_switches(run, run->lineage, run->schedule.rewarm == run->step ? config->attn.text : NULL);
    const char *attn = run_lineage_attn(run->lineage);
    if (run->step > 0 || !run->o.init_from || !attn || !strcmp(attn, config->attn.text)) return;
    run->loaded = config->attn;
    if (!normalizer_parse(&config->attn, attn, message, sizeof message)) fail(EXIT_INPUT, "%s/run.json: lineage: %s.", run->o.out, message);
}

// A run that ended before its first checkpoint: its arguments hold, and it starts again from the beginning.
static void settle_started_over(Run *run) {
    TrainOptions *o = &run->o;
    Error error;
    if (checkpoint_any(o->out))
        fail(EXIT_INPUT, "%s/ckpt: none of the checkpoints is whole; see the warnings above. Nothing was changed.\n"
             "  Bring back a whole one, or start anew in another --out.", o->out);
    if (!run_exists(o->out)) return;
    cJSON *lineage = run_resume(o->out, o, &error);
    if (!lineage) fail_with(&error);
    const char *attn = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(cJSON_GetArrayItem(lineage, 0), "attn"));
    if (attn) o->attn = strdup(attn);
    repeat_switches(run, lineage, NULL);
    cJSON_Delete(lineage);
    run->started_over = true;
    if (is_main()) printf("%s: no checkpoint yet; the run starts over\n", o->out);
}

// --resume: the run's arguments, shape and position, and the folder of its newest checkpoint. False where there is none.
static bool settle_resumed(Run *run, char *folder, size_t size) {
    TrainOptions *o = &run->o;
    Error error;
    uint64_t step;
    if (!o->out) fail(EXIT_USAGE, "--resume needs --out, the folder of the run to continue.");
    if (!checkpoint_newest(o->out, folder, size, &step)) {
        folder[0] = 0;
        settle_started_over(run);
        return false;
    }
    run->lineage = run_resume(o->out, o, &error);
    if (!run->lineage || !checkpoint_verify(folder, false, &error)
        || !model_config_read(run->config, folder, NULL, &error))
        fail_with(&error);
    read_state(run, folder);
    if (run->step != (int64_t)step) fail(EXIT_INPUT, "%s/state.json: says step %lld.", folder, (long long)run->step);
    settle_lineage(run);
    return true;
}

static bool folder_has_tokenizer(const char *folder) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, tokenizer_files[0]);
    return access(path, R_OK) == 0;
}

// The tokenizer lies beside the shards, or in the folder `weights`, where there is one. Without one that can be used
// here, samples are shown as ids; its files go into the checkpoints all the same.
static void open_tokenizer(Run *run, const char *weights) {
    char beside[PATH_MAX];
    Error error;
    if (run->tokenizer_folder[0] || !run->o.train_data) return;
    if (!shards_first_path(run->o.train_data, beside, sizeof beside)) return;      // opening the shards says what is wrong
    char *slash = strrchr(beside, '/');
    if (slash) *slash = 0; else strcpy(beside, ".");
    const char *folder = folder_has_tokenizer(beside) ? beside : weights;
    if (!folder[0] || !folder_has_tokenizer(folder)) return;
    snprintf(run->tokenizer_folder, sizeof run->tokenizer_folder, "%s", folder);
    if ((run->tokenizer = tokenizer_open(folder, &error))) {
        run->tokenizer_vocab = tokenizer_vocab(run->tokenizer);
        run->end_of_text = tokenizer_end_of_text(run->tokenizer);
        return;
    }
    if (error.code != EXIT_INPUT || !tokenizer_ids(folder, &run->tokenizer_vocab, &run->end_of_text)) fail_with(&error);
    if (run->tokenizer_vocab > MAX_VOCAB) run->tokenizer_vocab = 0;               // then it is not that of the shards
    warn("%s\n  Training is the same without it; samples are shown as token ids.", error.text);
}

// --init-from: the shape of the weights there, which --model may repeat but not contradict.
static void settle_loaded(Run *run) {
    const TrainOptions *o = &run->o;
    ModelConfig *config = run->config, asked;
    Error error;
    char shape[256];
    if (!model_config_read(config, o->init_from, o->ignore_config_key, &error)
        || !checkpoint_verify(o->init_from, true, &error)
        || !weights_check(config, o->init_from, &error))
        fail_with(&error);
    run->loaded = config->attn;
    run->vocab_from = " (the loaded model's)";
    if (train_options_given(o, "rope-theta")) config->rope_theta = o->rope_theta;
    if (!train_options_given(o, "model")) return;
    if (!model_parse(&asked, o->model, &error)) fail_with(&error);
    if (!model_gives_vocab(o->model)) asked.vocab = config->vocab;
    if (!model_same_shape(&asked, config))
        fail(EXIT_USAGE, "--model %s is not the shape of %s: %s.\n  Leave --model out to take that.", o->model, o->init_from,
             model_text(config, shape, sizeof shape));
}

// T, the longest of --seq-len
static void find_longest(Run *run) {
    const IntList *lengths = &run->o.seq_len;
    run->T = 0;
    for (size_t i = 0; i < lengths->count; i++)
        if ((size_t)lengths->values[i] > run->T) run->T = (size_t)lengths->values[i];
}

// The vocabulary of a new model: what --model says; else the tokenizer's beside the data; else the default.
static void settle_vocabulary(Run *run) {
    run->vocab_from = " (as --model says)";
    if (model_gives_vocab(run->o.model)) return;
    open_tokenizer(run, "");
    run->vocab_from = run->tokenizer_vocab ? " (the tokenizer's)" : " (the default without a tokenizer)";
    if (run->tokenizer_vocab >= 2 && run->tokenizer_vocab <= MAX_VOCAB) run->config->vocab = run->tokenizer_vocab;
    run->config->end_of_text = default_end_of_text(run->config->vocab);
}

// The model's shape, from the run that is resumed, from --init-from, or from --model; `folder` gets where its weights lie, or "".
static void settle_model(Run *run, char *folder, size_t size) {
    TrainOptions *o = &run->o;
    ModelConfig *config = run->config;
    Error error;
    char message[1024];
    folder[0] = 0;
    run->resumed = o->resume && settle_resumed(run, folder, size);
    find_longest(run);
    if (run->resumed) return;
    if (!o->resume && o->out && run_exists(o->out))
        fail(EXIT_USAGE, "--out %s: there is a run already. Continue it with --resume, or give another folder.", o->out);
    if (o->init_from) {
        settle_loaded(run);
        snprintf(folder, size, "%s", o->init_from);
    } else {
        if (!model_parse(config, o->model, &error)) fail_with(&error);
        settle_vocabulary(run);
        config->rope_theta = o->rope_theta;
        config->seq_len = (int)run->T;
    }
    if ((!o->init_from || train_options_given(o, "attn") || run->started_over) && !normalizer_parse(&config->attn, o->attn, message, sizeof message))
        fail(EXIT_USAGE, "--attn %s: %s.", o->attn, message);
    if (o->norm_length) config->seq_len = (int)o->norm_length;
    if (o->norm_length && run->loaded.text[0] && normalizer_has(&run->loaded, SCALAR_P))
        fail(EXIT_USAGE, "--norm-length %lld: %s has learned p_n for its own length; leave the flag out.", (long long)o->norm_length, o->init_from);
    run->lineage = cJSON_CreateArray();
    run_lineage_add(run->lineage, 0, o->init_from ? "init-from" : "start", "attn", config->attn.text, o->init_from ? "from" : NULL,
                    o->init_from, NULL);
}

// Sequence lengths, and how a step's tokens divide among lengths, processes and micro-batches.
static void settle_batches(Run *run) {
    TrainOptions *o = &run->o;
    int64_t T = (int64_t)run->T;
    for (size_t i = 0; i < o->seq_len.count; i++)
        if (T % o->seq_len.values[i])
            fail(EXIT_USAGE, "--seq-len: %lld does not divide the longest, %lld.", (long long)o->seq_len.values[i], (long long)T);
    if (o->batch * T > INT32_MAX)
        fail(EXIT_USAGE, "--batch %lld x --seq-len %lld: at most 2^31 - 1 tokens at a time. Accumulate by --total-batch-tokens.",
             (long long)o->batch, (long long)T);
    int64_t together = o->batch * T * process.size;
    if (!o->total_batch_tokens) o->total_batch_tokens = together;
    if (o->total_batch_tokens % together) {
        int64_t nearest = (o->total_batch_tokens + together / 2) / together * together;
        fail(EXIT_USAGE, "--total-batch-tokens %lld is no multiple of batch x T x processes = %lld x %lld x %d = %lld.\n  Nearest: %lld.",
             (long long)o->total_batch_tokens, (long long)o->batch, (long long)T, process.size, (long long)together,
             (long long)(nearest ? nearest : together));
    }
    run->step_tokens = o->total_batch_tokens;
    run->micro_batches = o->total_batch_tokens / together;
}

static Shards *open_shards(Run *run, const char *glob, bool shuffle, uint64_t min_windows, char **print) {
    ShardsConfig config = {.T = run->T, .vocab = run->config->vocab, .end_of_text = run->config->end_of_text,
                           .seed = (uint64_t)run->o.seed, .shuffle = shuffle, .pack = (PackMode)run->o.pack, .min_windows = min_windows};
    Error error;
    Shards *shards = shards_open(glob, config, &error);
    if (!shards) fail_with(&error);
    *print = shards_fingerprint(shards, &error);
    if (!*print) fail_with(&error);
    return shards;
}

// The tokenizer's ids must be ids of the model.
static void settle_tokenizer(Run *run, const char *weights) {
    const ModelConfig *config = run->config;
    open_tokenizer(run, weights);
    if (run->tokenizer_vocab > config->vocab && weights[0])
        fail(EXIT_INPUT, "%s: its tokenizer has %d tokens, but the model in %s has a vocabulary of %d, which cannot grow.\n"
             "  Encode the text with the model's own tokenizer: data/text.py --tokenizer FOLDER, or another script in data/.",
             run->tokenizer_folder, run->tokenizer_vocab, weights, config->vocab);
    if (run->tokenizer_vocab > config->vocab)
        fail(EXIT_INPUT, "%s: its tokenizer has %d tokens, but the model has a vocabulary of %d.\n"
             "  Leave vocab= out of --model, or give it vocab=%d or more.", run->tokenizer_folder, run->tokenizer_vocab,
             config->vocab, run->tokenizer_vocab);
    if (run->tokenizer_vocab && run->end_of_text >= 0) run->config->end_of_text = run->end_of_text;
}

// What a normalizer asks of the lengths.
static void check_normalizer(const Run *run, const Normalizer *attn, const char *flag) {
    char message[1024];
    int L = run->config->seq_len;
    if (!normalizer_fits(attn, L, message, sizeof message)) fail(EXIT_USAGE, "%s %s.", flag, message);
    if (normalizer_has(attn, SCALAR_P) && run->T > (size_t)L)
        fail(EXIT_USAGE, "%s %s: p_n is learned for n up to L = %d, and --seq-len asks for %zu.", flag, attn->text, L, run->T);
}

// Everything that the flags, the run folder and the data say, checked; nothing written yet.
static void settle(Run *run, char *weights, size_t size) {
    TrainOptions *o = &run->o;
    Error error;
    run->best_step = run->saved = -1;
    settle_model(run, weights, size);
    if (process_max_int(run->resumed) != run->resumed)
        fail(EXIT_PEER, "process %d sees no run in %s, but another one does. All machines need the same --out folder.", process.rank, o->out);
    if (run->resumed) run->saved = run->step;
    settle_switches(run);
    check_normalizer(run, &run->config->attn, "--attn");
    for (size_t i = 0; i < run->switch_count; i++) check_normalizer(run, &run->switches[i].to, "--attn-switch");
    settle_batches(run);
    if (!o->train_data) fail(EXIT_USAGE, "--train-data is missing: the shards to train on. data/shakespeare.py makes some.");
    settle_tokenizer(run, weights);
    run->train = open_shards(run, o->train_data, o->shuffle, (uint64_t)(run->step_tokens / (int64_t)run->T), &run->train_print);
    if (o->val_data) run->val = open_shards(run, o->val_data, false, 1, &run->val_print);
    if ((run->resumed || run->started_over) && (!run_same_data(o->out, "train", run->train_print, &error) ||
                         !run_same_data(o->out, "val", run->val_print, &error)))
        fail_with(&error);
    run->schedule = (Schedule){.kind = (ScheduleKind)o->schedule, .lr = o->lr, .min_lr_frac = o->min_lr_frac, .warmup = o->warmup,
                               .steps = o->steps, .rewarm = run->schedule.rewarm};
}

static void plan_memory(Run *run) {
    TrainOptions *o = &run->o;
    const Normalizer **others = malloc((run->switch_count + 1) * sizeof *others);
    size_t count = 0, N = (size_t)o->batch * run->T;
    if (!others) fail(EXIT_RESOURCE, "out of memory for the plan.");
    for (size_t i = 0; i < run->switch_count; i++) others[count++] = &run->switches[i].to;
    if (run->loaded.text[0]) others[count++] = &run->loaded;
    MemoryPlan *plan = run->plan = trainer_plan(o, others, count, (size_t)o->batch, run->T);
    free(others);
    bool masked = shards_masked(run->train) || (run->val && shards_masked(run->val));
    run->more_size = 1024 + 3 * (64 + 64 * (size_t)run->config->layers);
    memory_add(plan, "scratch", (void **)&run->more, run->more_size);
    memory_add(plan, "a batch", (void **)&run->window, (run->T + 1) * sizeof(int32_t));
    memory_add(plan, "a batch", (void **)&run->inputs, N * sizeof(int32_t));
    memory_add(plan, "a batch", (void **)&run->targets, N * sizeof(int32_t));
    if (masked) {
        memory_add(plan, "a batch", (void **)&run->window_mask, run->T);
        memory_add(plan, "a batch", (void **)&run->mask, N);
    }
}

// Weights, two moments, and under bfloat16 the masters.
static double checkpoint_bytes(const ModelConfig *config, bool bf16) {
    return (double)model_parameters(config) * (bf16 ? 2 + 12 : 4 + 8);
}

// A learning rate that rises to the end of the run is hardly ever meant.
static void warn_of_long_warmup(const Run *run) {
    const TrainOptions *o = &run->o;
    if (o->steps > 0 && o->warmup >= o->steps)
        warn("--warmup %lld is not shorter than --steps %lld: the learning rate rises through the whole run%s.\n"
             "  A twentieth of the steps is a common choice: --warmup %lld.", (long long)o->warmup, (long long)o->steps,
             o->schedule == SCHEDULE_CONSTANT ? "" : " and never decays", (long long)(o->steps >= 20 ? o->steps / 20 : 1));
    for (const Switch *s = run->switches; s < run->switches + run->switch_count; s++) {
        if (o->warmup >= o->steps || s->step >= o->steps || s->step + o->warmup < o->steps) continue;
        warn("after the change to %s at step %lld the warmup of %lld steps runs again, and --steps %lld ends the run before it is over.",
             s->to.text, (long long)s->step, (long long)o->warmup, (long long)o->steps);
    }
}

static void print_plan(Run *run) {
    const ModelConfig *c = run->config;
    const TrainOptions *o = &run->o;
    int64_t windows_a_step = run->step_tokens / (int64_t)run->T;
    Error error;
    char name[NORMALIZER_TEXT];
    normalizer_shortest(&c->attn, name, sizeof name);
    printf("model     %s parameters (%s), ", human_grouped(model_parameters(c)).text, human_count((double)model_parameters(c)).text);
    if (c->block == BLOCK_GAU)
        printf("%d gated attention units of %d and %d, %d channels", c->layers, GAU_HEAD, c->ffn, c->channels);
    else
        printf("%d layers, %d heads of %zu, %d channels, ffn %d", c->layers, c->heads, head_size(c), c->channels, c->ffn);
    printf(", vocabulary %s%s, %s\n", human_grouped((uint64_t)c->vocab).text, run->vocab_from ? run->vocab_from : "",
           c->tied ? "tied" : "untied");
    printf("attention %s%s%s, L = %d\n", c->attn.text, strcmp(c->attn.text, name) ? ", which is " : "", strcmp(c->attn.text, name) ? name : "",
           c->seq_len);
    for (const Switch *s = run->switches; s < run->switches + run->switch_count; s++)
        printf("switch    to %s at step %lld%s%s\n", s->to.text, (long long)s->step, s->repeated ? ", repeated from run.json" : "",
               s->step >= o->steps ? "; --steps ends before it" : "");
    trainer_print_products(o);
    printf("data      %s tokens in %zu shard%s, %s windows of %zu, %.1f steps an epoch", human_grouped(shards_tokens(run->train)).text,
           shards_count(run->train), shards_count(run->train) == 1 ? "" : "s", human_grouped(shards_windows(run->train)).text, run->T,
           (double)shards_windows(run->train) / (double)windows_a_step);
    if (run->val) printf("; validation %s tokens", human_grouped(shards_tokens(run->val)).text);
    printf("\nstep      %s tokens: %lld process%s x %lld micro-batch%s of %lld x %zu\n", human_grouped((uint64_t)run->step_tokens).text,
           (long long)process.size, process.size == 1 ? "" : "es", (long long)run->micro_batches, run->micro_batches == 1 ? "" : "es",
           (long long)o->batch, run->T);
    printf("run       %lld steps, %s tokens%s%s\n", (long long)o->steps, human_count((double)o->steps * (double)run->step_tokens).text,
           o->out ? ", into " : ", nothing is kept (no --out)", o->out ? o->out : "");
    memory_print(run->plan, trainer_on_gpus ? "memory of the host" : "memory", memory_available());
    trainer_print_memory();
    if (o->out) {
        uint64_t free_bytes;
        double bytes = checkpoint_bytes(c, o->dtype == TRAIN_BF16);
        if (file_free_space(o->out, &free_bytes, &error)) {
            printf("disk      %s a checkpoint, %s free\n", human_bytes(bytes).text, human_bytes((double)free_bytes).text);
            if (bytes * (double)(o->keep ? o->keep + 1 : 1) > (double)free_bytes)
                warn("%s: %s free, but the checkpoints that --keep %lld leaves need up to %s.", o->out,
                     human_bytes((double)free_bytes).text, (long long)o->keep, human_bytes(bytes * (double)(o->keep ? o->keep + 1 : 1)).text);
        }
    }
    fflush(stdout);
}

// ---- the start

static void load_weights(Run *run, const char *folder) {
    const Weights *w = &run->weights;
    size_t bytes = w->list->floats * sizeof(float);
    Error error;
    if (!folder[0]) {
        weights_init(w, (uint64_t)run->o.seed);
        trainer_upload(run->step);
        return;
    }
    Normalizer attn = run->config->attn;
    if (run->loaded.text[0]) run->config->attn = run->loaded;      // change_normalizer() comes when its loss is known
    process_agree(!is_main() || (weights_load(w, folder, &run->config->attn, &error)
                                 && (!run->resumed || weights_load_optimizer(w, folder, &error))), &error);
    run->config->attn = attn;
    process_broadcast(w->params, bytes);
    if (run->resumed) {
        process_broadcast(w->mean, bytes);
        process_broadcast(w->square, bytes);
    }
    trainer_upload(run->step);
}

static bool write_run_json(const Run *run, Error *error) {
    cJSON *to_repeat = cJSON_CreateArray();
    for (const Switch *s = run->switches; s < run->switches + run->switch_count; s++)
        if (s->repeated) run_lineage_add(to_repeat, s->step, "attn-switch", "attn", s->to.text, NULL);
    bool done = run_write(run->o.out, &run->o, run->train_print, run->val_print, run->lineage, to_repeat, error);
    cJSON_Delete(to_repeat);
    return done;
}

static void write_run(Run *run) {
    Error error;
    bool writes = run->o.out && is_main();
    process_agree(!writes || write_run_json(run, &error), &error);
}

// From here on the folder is ours. An owed metrics line may be there already: a job that wrote it may have died before its next checkpoint.
static void open_run_folder(Run *run) {
    char path[PATH_MAX];
    Error error;
    if (!run->o.out) return;
    snprintf(path, sizeof path, "%s/metrics.jsonl", run->o.out);
    process_agree(!is_main() || (metrics_cut(path, run->owed ? run->step - 1 : run->step, &error) && (run->metrics = metrics_open(path, &error))), &error);
    write_run(run);
}

// Rank 0: brings back what was removed of the run folder while the run was using it, so that its checkpoints can be resumed. False while the
// folder cannot be reached. If another run has taken it, this one ends.
static bool restore_run_folder(Run *run, Error *error) {
    if (run_intact(run->o.out) && metrics_intact(run->metrics)) return true;
    progress_end();
    if (!run_lock_again(run->o.out, error)) {
        if (error->code == EXIT_BUSY) fail_with(error);
        return false;
    }
    if (metrics_restore(run->metrics, error) && write_run_json(run, error))
        warn("%s, or part of it, was removed while this run was using it: run.json and metrics.jsonl have been written again.\n"
             "  Checkpoints and samples that were removed are lost.", run->o.out);
    else
        warn("%s\n  Training continues; the next save tries again.", error->text);
    return true;
}

// ---- saving

static void add_owed(cJSON *json, const StepMetrics *m) {
    cJSON *owed = cJSON_AddObjectToObject(json, "owed");
    cJSON_AddNumberToObject(owed, "loss", m->loss);
    cJSON_AddNumberToObject(owed, "lr", m->lr);
    cJSON_AddNumberToObject(owed, "grad_norm", m->grad_norm);
    cJSON_AddNumberToObject(owed, "ms", m->ms);
    cJSON_AddNumberToObject(owed, "tok_per_s", m->tok_per_s);
    cJSON_AddNumberToObject(owed, "mfu", isfinite(m->mfu) ? m->mfu : 0);
}

static char *state_json(const Run *run) {
    cJSON *json = cJSON_CreateObject(), *random;
    cJSON_AddNumberToObject(json, "step", (double)run->step);
    cJSON_AddNumberToObject(json, "tokens", (double)run->tokens);
    cJSON_AddNumberToObject(json, "data_position", (double)run->sequence);
    random = cJSON_AddObjectToObject(json, "random");
    cJSON_AddStringToObject(random, "generator", "philox4x32-10, by counter");
    cJSON_AddNumberToObject(random, "seed", (double)run->o.seed);
    cJSON_AddNumberToObject(json, "processes", process.size);
    cJSON_AddNumberToObject(json, "rewarm", (double)run->schedule.rewarm);
    if (run->best_step >= 0) {
        cJSON_AddNumberToObject(json, "best_val_loss", run->best_loss);
        cJSON_AddNumberToObject(json, "best_step", (double)run->best_step);
    }
    if (run->owed) add_owed(json, &run->last);
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    return text;
}

static bool copy_tokenizer(const Run *run, Checkpoint *c, Error *error) {
    char path[PATH_MAX + 64];
    if (!run->tokenizer_folder[0]) return true;
    for (size_t i = 0; tokenizer_files[i]; i++) {
        snprintf(path, sizeof path, "%s/%s", run->tokenizer_folder, tokenizer_files[i]);
        if (access(path, R_OK) != 0) continue;
        if (!checkpoint_copy(c, path, error)) return false;
    }
    return true;
}

static bool write_checkpoint(const Run *run, Error *error) {
    Checkpoint c;
    if (!checkpoint_begin(&c, run->o.out, (uint64_t)run->step, error)) return false;
    char *config = model_config_json(run->config, run->weights.bf16), *state = state_json(run);
    bool done = weights_save(&run->weights, checkpoint_path(&c, "model.safetensors"), error)
             && weights_save_optimizer(&run->weights, checkpoint_path(&c, "optimizer.safetensors"), error)
             && file_write_text(checkpoint_path(&c, "config.json"), config, error)
             && file_write_text(checkpoint_path(&c, "state.json"), state, error)
             && (model_is_plain_llama(run->config) || file_write_text(checkpoint_path(&c, MODELING_FILE), modeling_text, error))
             && copy_tokenizer(run, &c, error)
             && checkpoint_commit(&c, error);
    if (!done) checkpoint_abandon(&c);
    free(config);
    free(state);
    return done;
}

// Saves and prunes. A save that fails in mid-run is reported, and training continues; a stop at the same step tries again. `last`: the
// process is about to end, so a failure ends it with EXIT_RESOURCE.
static void save(Run *run, bool last) {
    Error error;
    bool done = true;
    if (!run->o.out) return;
    trainer_download();
    if (is_main()) {
        double start = now();
        progress_end();
        if ((done = restore_run_folder(run, &error) && write_checkpoint(run, &error))) {
            printf("saved %s/ckpt/step-%08lld in %.1f s\n", run->o.out, (long long)run->step, now() - start);
            uint64_t best = run->o.keep_best && run->best_step >= 0 ? (uint64_t)run->best_step : UINT64_MAX;
            if (!checkpoint_prune(run->o.out, (int)run->o.keep, best, &error)) warn("%s", error.text);
        } else if (!last) {
            warn("%s\n  Training continues; earlier checkpoints are intact.", error.text);
        }
        fflush(stdout);
    }
    process_agree(done || !last, &error);
    if (!process_max_int(!done)) run->saved = run->step;
}

// ---- data to the model

// Sequence `g` of the data, cut to pieces of T, into rows from `row` on of the batch.
static void load_window(Run *run, Shards *shards, uint64_t g, size_t row) {
    Error error;
    if (!shards_window(shards, g, run->window, run->mask ? run->window_mask : NULL, &error)) fail_with(&error);
    memcpy(run->inputs + row * run->T, run->window, run->T * sizeof(int32_t));
    memcpy(run->targets + row * run->T, run->window + 1, run->T * sizeof(int32_t));
    if (run->mask) memcpy(run->mask + row * run->T, run->window_mask, run->T);
}

// Built with -DFAULTS, FAULT_STOP=n is a signal that arrives just before the run asks for one the n-th time.
#ifdef FAULTS
static bool fault_stop(void) {
    static long asked;
    const char *at = getenv("FAULT_STOP");
    asked++;
    return at && asked >= atol(at);
}
#else
static bool fault_stop(void) { return false; }
#endif

// Has any rank been asked to stop? All ranks ask together.
static bool stopping(void) {
    return process_max_int(process_stop_requested() || fault_stop());
}

// Mean loss over the first windows of the validation data, the same for any number of ranks up to the order of the sum. False where a signal
// came in between.
static bool validate(Run *run, double *loss) {
    uint64_t windows = shards_windows(run->val), most = (uint64_t)run->o.val_tokens / run->T;
    if (most < 1) most = 1;
    if (windows > most) windows = most;
    double sum = 0;
    bool stopped = false;
    for (uint64_t first = 0; first < windows && !stopped; first += (uint64_t)run->o.batch * (uint64_t)process.size) {
        size_t B = 0;
        for (uint64_t g = first + (uint64_t)process.rank; B < (size_t)run->o.batch && g < windows; B++, g += (uint64_t)process.size)
            load_window(run, run->val, g, B);
        if (B) sum += trainer_loss(&(Batch){run->inputs, run->targets, run->mask, B, run->T});
        stopped = stopping();
    }
    if (stopped) return false;
    process_sum_double(&sum, 1);
    *loss = sum / (double)(shards_masked(run->val) ? windows : windows * run->T);
    return true;
}

// ---- the clock
// A step lasts from the end of the step before it to its own end, where trainer_rows() returns: all of its work is done by then, the update
// included. What lies between aside_begin() and aside_end() (validation, samples, checkpoints) belongs to no step.

static void aside_begin(Run *run) {
    trainer_aside(true);
    run->aside = now();
}

static void aside_end(Run *run) {
    run->mark += now() - run->aside;
    trainer_aside(false);
}

static double end_step(Run *run) {
    trainer_rows(&run->rows, &run->without_weight);
    double end = now(), seconds = end - run->mark;
    run->mark = end;
    return seconds;
}

// ---- one step

// The gradients of all of a step's sequences, its loss and their norm. Micro-batch i of process r has sequences (i · processes + r) · B
// and on. False where a signal came in between: nothing of the step counts then.
static bool accumulate(Run *run, size_t T, double *mean_loss, double *norm) {
    size_t B = (size_t)run->o.batch, pieces = run->T / T;
    int64_t sequences = run->step_tokens / (int64_t)run->T;
    double loss, count = shards_masked(run->train) ? (double)sequences : (double)run->step_tokens;
    for (int64_t i = 0; i < run->micro_batches; i++) {
        if (stopping()) return false;
        uint64_t first = run->sequence + ((uint64_t)i * (uint64_t)process.size + (uint64_t)process.rank) * B;
        for (size_t b = 0; b < B; b++) load_window(run, run->train, first + b, b);
        Batch batch = {run->inputs, run->targets, run->mask, B * pieces, T};
        trainer_micro_batch(&batch, (float)(1.0 / count), i == 0, i + 1 == run->micro_batches);
    }
    trainer_gradients(&loss, norm);
    run->sequence += (uint64_t)sequences;
    *mean_loss = loss / count;
    return true;
}

// A loss or gradient that is not finite ends the run before it can spoil the weights.
static void check_finite(const Run *run, double loss, double norm) {
    if (isfinite(loss) && isfinite(norm)) return;
    char path[PATH_MAX];
    uint64_t step;
    progress_end();
    bool saved = run->o.out && checkpoint_newest(run->o.out, path, sizeof path, &step);
    const Normalizer *attn = &run->config->attn;
    const char *unbounded = attn->phi.kind == PHI_EXP && !norm_is_sum(attn->norm)
        ? "\n  phi=exp without norm=l1 has no bound: exp(z) overflows from z = 88.8 on." : "";
    fail(EXIT_DIVERGED, "step %lld: the loss is %g and the gradient's norm %g: training diverged. Nothing of this step was kept.%s\n"
         "  Last good checkpoint: %s. A lower --lr, a longer --warmup or a smaller --grad-clip may help.", (long long)run->step + 1, loss,
         norm, unbounded, saved ? path : "none");
}

// False where a signal came before the weights changed.
static bool train_step(Run *run) {
    const TrainOptions *o = &run->o;
    double loss, norm, lr = schedule_lr(&run->schedule, run->step);
    size_t T = step_length(o->seq_len.values, o->seq_len.count, (uint64_t)o->seed, (uint64_t)run->step);
    if (!accumulate(run, T, &loss, &norm)) return false;
    check_finite(run, loss, norm);
    double scale = o->grad_clip > 0 && norm > 0 ? fmin(1.0, o->grad_clip / (norm + 1e-6)) : 1.0;
    trainer_update((AdamW){lr, o->beta1, o->beta2, 1e-8, o->weight_decay, scale, run->step + 1});
    run->step++;
    run->tokens += run->step_tokens;
    double seconds = end_step(run), speed = (double)run->step_tokens / seconds;
    run->seconds = run->seconds > 0 ? 0.9 * run->seconds + 0.1 * seconds : seconds;
    run->owed = true;
    run->last = (StepMetrics){.step = run->step, .tokens = run->tokens, .loss = (float)loss, .lr = (float)lr, .grad_norm = (float)norm,
                             .ms = 1000 * seconds, .tok_per_s = speed, .val_loss = NAN,
                             .mfu = speed * model_flops_per_token(run->config, T) / run->flops};
    return true;
}

// ---- what a person sees

static void show_text(FILE *file, const Run *run, const int32_t *ids, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char *bytes = run->tokenizer ? tokenizer_token(run->tokenizer, ids[i], &length) : NULL;
        if (bytes) fwrite(bytes, 1, length, file); else fprintf(file, "%d ", ids[i]);
    }
}

// Appends a sample to samples.txt; one that is lost is reported.
static void keep_sample(Run *run, const int32_t *ids, size_t count) {
    Error error;
    if (!restore_run_folder(run, &error)) {
        warn("%s\n  The sample of step %lld is not kept. Training continues.", error.text, (long long)run->step);
        return;
    }
    FILE *file = fopen(run_path(run->o.out, "samples.txt"), "a");
    if (file) {
        fprintf(file, "---- step %lld\n", (long long)run->step);
        show_text(file, run, ids, count);
        fprintf(file, "\n");
    }
    bool whole = file && fflush(file) == 0 && !ferror(file);
    int why = errno;
    if (file) fclose(file);
    if (!whole)
        warn("%s/samples.txt: the sample of step %lld cannot be written: %s. Training continues.", run->o.out, (long long)run->step,
             strerror(why));
}

// A sample from the model as it stands, to the terminal and samples.txt. It starts from end-of-text; the same step draws the same.
static void show_sample(Run *run) {
    int32_t ids[TRAINER_SAMPLE + 1];
    size_t count = 1, longest = run->T < TRAINER_SAMPLE ? run->T : TRAINER_SAMPLE;
    if (!is_main()) return;
    ids[0] = run->config->end_of_text;
    for (; count <= longest; count++) {
        double u = random_uniform((uint64_t)run->o.seed, (uint64_t)run->step, count - 1);
        ids[count] = sample_token(trainer_next_logits(ids, count), (size_t)run->config->vocab, 0.9, 50, 1.0, u);
        if (ids[count] == run->config->end_of_text) break;
    }
    progress_end();
    printf("sample at step %lld: ", (long long)run->step);
    show_text(stdout, run, ids + 1, count - 1);
    printf("\n");
    fflush(stdout);
    if (run->o.out) keep_sample(run, ids + 1, count - 1);
}

// "attn_scale": [[mean, least, largest] of each layer], or those of another learned scalar, onto the end of `out`.
static size_t scalar_statistics(char *out, size_t size, size_t at, const Weights *w, Scalar scalar) {
    bool first = true;
    for (size_t i = 0; i < w->list->count; i++) {
        const Tensor *t = &w->list->tensors[i];
        if (t->scalar != scalar || !tensor_trained(t, &w->config->attn)) continue;
        const float *x = w->params + t->offset;
        double sum = 0, least = x[0], largest = x[0];
        for (size_t j = 0; j < t->elements; j++) sum += x[j], least = fmin(least, x[j]), largest = fmax(largest, x[j]);
        if (first) at += (size_t)snprintf(out + at, size - at, ", \"%s\": [", scalar_names[scalar]);
        at += (size_t)snprintf(out + at, size - at, "%s[%.6g, %.6g, %.6g]", first ? "" : ", ", sum / (double)t->elements, least, largest);
        first = false;
    }
    if (!first) at += (size_t)snprintf(out + at, size - at, "]");
    return at;
}

static bool trains_scalars(const ModelConfig *config) {
    const Normalizer *attn = &config->attn;
    return normalizer_trains(attn, SCALAR_S) || normalizer_trains(attn, SCALAR_B) || normalizer_trains(attn, SCALAR_SINK);
}

// What metrics.jsonl has beside the numbers of every step.
static void more_metrics(Run *run, StepMetrics *metrics) {
    size_t at;
    trainer_metrics(run->more, run->more_size);
    at = strlen(run->more);
    if (!isnan(metrics->val_loss)) {
        for (Scalar scalar = SCALAR_S; scalar < SCALAR_COUNT; scalar++)
            if (scalar != SCALAR_P) at = scalar_statistics(run->more, run->more_size, at, &run->weights, scalar);
    }
    metrics->more = run->more;
}

static void show_step(Run *run, bool keep) {
    char line[512];
    if (run->metrics) {
        more_metrics(run, &run->last);
        metrics_write(run->metrics, &run->last);
    }
    if (!is_main()) return;
    metrics_line(line, sizeof line, &run->last, run->o.steps, run->seconds * (double)(run->o.steps - run->step));
    size_t length = strlen(line);
    trainer_line(line + length, sizeof line - length);
    length += strlen(line + length);
    double share = run->rows ? 100.0 * (double)run->without_weight / (double)run->rows : 0;
    if (share > 0) snprintf(line + length, sizeof line - length, " | %.*f %% of rows without weight", share < 0.1 ? 4 : share < 9.95 ? 1 : 0, share);
    progress_show(line, keep);
}

static void show_profile(double steps) {
    double seconds[PHASE_COUNT], sum = 0;
    for (int i = 0; i < PHASE_COUNT; i++) sum += seconds[i] = trainer_phase_seconds((Phase)i);
    printf("\n%-36s %10s %8s\n", "where the time went", "ms a step", "share");
    for (int i = 0; i < PHASE_COUNT; i++)
        if (seconds[i] > 0) printf("%-36s %10.2f %7.1f%%\n", phase_names[i], 1000 * seconds[i] / steps, 100 * seconds[i] / sum);
}

// ---- a change of normalizer

// Names the learned scalars that `to` brings and `from` did not leave.
static void show_new_scalars(const ModelConfig *config, const Normalizer *from, const Normalizer *to) {
    const char *where = config->block == BLOCK_GAU ? "gau" : "self_attn";
    for (Scalar scalar = SCALAR_S; scalar < SCALAR_COUNT; scalar++) {
        if (!normalizer_has(to, scalar) || normalizer_keeps(from, to, scalar)) continue;
        double start = normalizer_start(to, scalar, config->seq_len);
        if (scalar == SCALAR_P)
            printf("new parameters: model.%s, %d of %.4f\n", scalar_names[scalar], config->seq_len, start);
        else
            printf("new parameters: model.layers.0..%d.%s.%s, %.4f%s\n", config->layers - 1, where, scalar_names[scalar], start,
                   normalizer_trains(to, scalar) ? "" : ", not trained");
    }
}

// The validation loss, as the lineage has it. False where a signal came in between.
static bool measured(Run *run, char text[32]) {
    double loss = NAN;
    if (run->val && !validate(run, &loss)) return false;
    snprintf(text, 32, isfinite(loss) ? "%.6f" : "not measured", loss);
    return true;
}

// Weights, moments, step and data position stay; scalars that the new normalizer brings start. Says what it does to the validation loss.
// False where a signal came in between: then nothing has changed, and the change comes first when the run is resumed.
static bool change_normalizer(Run *run, const char *event, Normalizer from, Normalizer to) {
    char before[32], after[32];
    float *kept = malloc(weights_scalar_floats(run->weights.list) * sizeof *kept + 1);
    if (!kept) fail(EXIT_RESOURCE, "out of memory for a change of normalizer.");
    run->config->attn = from;
    bool done = measured(run, before);
    if (done) {
        trainer_download();
        weights_keep_scalars(&run->weights, kept, false);
        run->config->attn = to;
        weights_start_scalars(&run->weights, &from);
        trainer_upload(run->step);
        if (!(done = measured(run, after))) {
            weights_keep_scalars(&run->weights, kept, true);
            run->config->attn = from;
            trainer_upload(run->step);
        }
    }
    free(kept);
    if (!done) return false;
    run_lineage_add(run->lineage, run->step, event, "from", from.text, "attn", to.text, "val_loss_before", before,
                    "val_loss_after", after, NULL);
    if (!is_main()) return true;
    progress_end();
    show_new_scalars(run->config, &from, &to);
    printf("step %lld: --attn %s becomes %s; validation loss %s before, %s after\n", (long long)run->step, from.text, to.text, before,
           after);
    return true;
}

// What --init-from brings becomes what --attn asks for.
static bool change_at_start(Run *run) {
    if (!run->loaded.text[0] || normalizer_equal(&run->loaded, &run->config->attn)) return true;
    if (!change_normalizer(run, "attn-at-start", run->loaded, run->config->attn)) return false;
    write_run(run);
    return true;
}

// The changes at this step; the warmup runs again.
static bool make_switches(Run *run) {
    while (run->switch_count && run->switches[0].step <= run->step) {
        if (!change_normalizer(run, "attn-switch", run->config->attn, run->switches[0].to)) return false;
        memmove(run->switches, run->switches + 1, --run->switch_count * sizeof *run->switches);
        run->schedule.rewarm = run->step;
        write_run(run);
    }
    return true;
}

// ---- the loop

static int end_run(const Run *run) {
    trainer_end();
    heartbeat_stop(run->heartbeat);
    process_end();
    return EXIT_DONE;
}

static bool due(int64_t every, int64_t step) {
    return every && step % every == 0;
}

// The validation that is due after the newest step. False where a signal came in between.
static bool validate_step(Run *run, bool *best) {
    double loss;
    *best = false;
    if (!run->val || !due(run->o.val_every, run->step)) return true;
    aside_begin(run);
    bool done = validate(run, &loss);
    if (done) {
        run->last.val_loss = (float)loss;
        *best = isfinite(loss) && (run->best_step < 0 || run->last.val_loss < run->best_loss);
        if (*best) {
            run->best_loss = run->last.val_loss;
            run->best_step = run->step;
        }
        if (trains_scalars(run->config)) trainer_download();       // for their statistics
    }
    aside_end(run);
    return done;
}

// All that is due after the newest step. False where a signal came in its validation: then all of it is owed, and comes first when the run
// is resumed.
static bool finish_step(Run *run) {
    const TrainOptions *o = &run->o;
    bool last = run->step == o->steps, best;
    if (!validate_step(run, &best)) return false;
    show_step(run, last || isfinite(run->last.val_loss));
    aside_begin(run);
    if (o->sample_every && (due(o->sample_every, run->step) || last)) show_sample(run);
    run->owed = false;
    if (due(o->ckpt_every, run->step) || (best && o->keep_best) || last) save(run, last);
    aside_end(run);
    return true;
}

// What a stop left to do in the run that is resumed.
static bool finish_owed(Run *run) {
    if (!run->owed) return true;
    int64_t saved = run->saved;
    run->saved = -1;                    // the checkpoint that was read still owes this
    if (finish_step(run)) return true;
    run->saved = saved;
    return false;
}

// One step and all that goes with it. False where a signal came.
static bool advance(Run *run, int64_t first) {
    aside_begin(run);
    bool going = make_switches(run);
    if (run->step > first && run->step <= first + 3) run->flops = trainer_peak();
    aside_end(run);
    return going && train_step(run) && finish_step(run);
}

// Not in the metrics: a run that is continued from here has them as if it had never stopped.
static void validate_at_the_end(Run *run) {
    double loss;
    if (!run->val || !run->o.val_every || due(run->o.val_every, run->step)) return;
    if (validate(run, &loss) && is_main() && isfinite(loss)) printf("validation loss %.4f at the end\n", loss);
}

static _Noreturn void end_stopped(const Run *run) {
    if (is_main()) {
        printf("stopped by a signal at step %lld%s%s\n", (long long)run->step, run->owed ? ", before the end of its validation" : "",
               run->o.out ? "; --resume continues from here" : "; nothing was kept, as there is no --out");
        fflush(stdout);
    }
    end_run(run);
    exit(EXIT_STOPPED);
}

static void train(Run *run) {
    int64_t first = run->step;
    run->mark = now();
    bool going = change_at_start(run) && finish_owed(run);
    while (going && run->step < run->o.steps) going = advance(run, first);
    if (run->saved != run->step) save(run, true);           // a stop, or --steps 0: the first weights
    if (is_main()) progress_end();
    if (going) validate_at_the_end(run);
    if (is_main() && run->o.profile && run->step > first) show_profile((double)(run->step - first));
    if (!going) end_stopped(run);
}

int training_main(int argc, char **argv) {
    static Run run;
    char weights[PATH_MAX];
    Error error;
    double start = now();
    start_program(trainer_name);
    process_hold_signals(argv);
    train_options_init(&run.o, normalizer_flag_help, trainer_on_gpus);
    train_options_parse(&run.o, argc, argv, trainer_usage);
    if (normalizer_help(run.o.attn)) return EXIT_DONE;
    process_start(&argc, &argv);
    run.heartbeat = heartbeat_start(run.o.rank_timeout);
    bool locks = run.o.out && is_main() && !run.o.dry_run;
    process_agree(!locks || run_lock(run.o.out, false, &error), &error);
    run.config = trainer_config();
    settle(&run, weights, sizeof weights);
    start_threads(run.o.threads);
    if (run.resumed && run.step >= run.o.steps && !run.owed) {
        if (is_main())
            printf("%s is already at step %lld; pass a --steps larger than %lld to continue.\n", run.o.out, (long long)run.step,
                   (long long)run.o.steps);
        return end_run(&run);
    }
    trainer_start(&run.o);
    plan_memory(&run);
    if (is_main()) {
        print_plan(&run);
        warn_of_long_warmup(&run);
    }
    memory_check(run.plan, process.local_size);
    trainer_check_memory();
    process_barrier();                     // nobody writes anything before all have seen that it fits
    if (run.o.dry_run) {
        process_agree(!is_main() || (shards_check_all(run.train, &error) && (!run.val || shards_check_all(run.val, &error))), &error);
        if (is_main()) printf("dry run: all tokens are below the vocabulary; nothing was written\n");
        return end_run(&run);
    }
    process_agree(!locks || run_lock(run.o.out, true, &error), &error);
    memory_take(run.plan);
    trainer_take();
    run.weights = trainer_weights();
    load_weights(&run, weights);
    open_run_folder(&run);
    run.flops = trainer_peak();
    process_catch_signals();
    if (is_main()) {
        printf("%s %s%s after %.1f s; peak %.0f GFLOP/s\n", run.resumed ? "continues at step" : "starts at step",
               human_grouped((uint64_t)run.step).text, run.owed ? ", whose validation is still due," : "", now() - start, run.flops / 1e9);
        fflush(stdout);
    }
    train(&run);
    metrics_close(run.metrics);
    return end_run(&run);
}

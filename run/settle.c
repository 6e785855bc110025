#include "run/parts.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "run/checkpoint.h"
#include "run/folder.h"
#include "run/lineage.h"
#include "run/run_json.h"
#include "runtime/error.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/path.h"
#include "runtime/process.h"
#include "runtime/tokens_match.h"
#include "runtime/utf8.h"

// ---- the state of a resumed run

// A part of state.json. path: for errors.
typedef struct {
    const cJSON *json;
    const char *path;
} State;

static _Noreturn void wrong_state(State state, const char *name, const char *expected) {
    char *found = cJSON_PrintUnformatted(cJSON_GetObjectItemCaseSensitive(state.json, name));
    fail(EXIT_INPUT, "%s: \"%s\": expected %s, found %.100s. The checkpoint is damaged.", state.path, name, expected,
         found ? found : "nothing");
}

static double state_number(State state, const char *name, double least, double most) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(state.json, name);
    char expected[96];
    if (cJSON_IsNumber(item) && item->valuedouble >= least && item->valuedouble <= most) return item->valuedouble;
    snprintf(expected, sizeof expected, "a number from %g to %g", least, most);
    wrong_state(state, name, expected);
}

static int64_t state_whole(State state, const char *name, int64_t least, int64_t most) {
    uint64_t value;
    char expected[96];
    if (json_u64(cJSON_GetObjectItemCaseSensitive(state.json, name), &value) && value >= (uint64_t)least &&
        value <= (uint64_t)most)
        return (int64_t)value;
    if (least == most) snprintf(expected, sizeof expected, "%lld", (long long)least);
    else snprintf(expected, sizeof expected, "a whole number from %lld to %lld", (long long)least, (long long)most);
    wrong_state(state, name, expected);
}

static bool state_has(State state, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(state.json, name);
}

// Returns an object in the state.
static State state_in(State state, const char *name) {
    const State in = {cJSON_GetObjectItemCaseSensitive(state.json, name), state.path};
    if (!cJSON_IsObject(in.json)) wrong_state(state, name, "an object");
    return in;
}

// Reads the metrics of a step whose validation, metrics line and sample are still to come.
static void read_owed(Run *run, State owed) {
    const cJSON *norms = cJSON_GetObjectItemCaseSensitive(owed.json, "norms");
    run->last = (StepMetrics){.step = run->step,
                              .tokens = run->tokens,
                              .loss = (float)state_number(owed, "loss", -FLT_MAX, FLT_MAX),
                              .lr = (float)state_number(owed, "lr", 0, FLT_MAX),
                              .grad_norm = (float)state_number(owed, "grad_norm", 0, FLT_MAX),
                              .ms = state_number(owed, "ms", 0, DBL_MAX),
                              .tok_per_s = state_number(owed, "tok_per_s", 0, DBL_MAX),
                              .mfu = state_number(owed, "mfu", 0, DBL_MAX)};
    if (norms && !norms_read(run, norms))
        wrong_state(owed, "norms", "a number of at least 0 for each group of tensors");
    run->owed = true;
    run->seconds = run->last.ms / 1000;
}

// The counter that random numbers depend on, besides the seed, is the step.
static void check_random(const Run *run, State random) {
    const cJSON *seed = cJSON_GetObjectItemCaseSensitive(random.json, "seed");
    if (!cJSON_IsNumber(seed) || seed->valuedouble != (double)run->o.seed)
        wrong_state(random, "seed", "that of run.json");
}

// Reads state.json. step: that of the checkpoint's name
static void read_state(Run *run, const char *folder, uint64_t step) {
    const int64_t most = INT64_C(1) << 53;
    char path[PATH_MAX + 16];
    Error error;
    snprintf(path, sizeof path, "%s/state.json", folder);
    cJSON *json = json_read(path, JSON_SMALL, &error);
    if (!json) fail_with(&error);
    const State state = {json, path};
    run->step = state_whole(state, "step", (int64_t)step, (int64_t)step);
    run->tokens = state_whole(state, "tokens", 0, most);
    run->sequence = (uint64_t)state_whole(state, "data_position", 0, most);
    run->schedule.rewarm = state_whole(state, "rewarm", 0, run->step);
    if (state_has(state, "ranks")) state_whole(state, "ranks", 1, INT32_MAX);
    if (state_has(state, "random")) check_random(run, state_in(state, "random"));
    if (state_has(state, "best_val_loss") || state_has(state, "best_step"))
        run->best =
            (Best){state_number(state, "best_val_loss", 0, FLT_MAX), state_whole(state, "best_step", 0, run->step)};
    if (state_has(state, "owed")) read_owed(run, state_in(state, "owed"));
    cJSON_Delete(json);
}

// A run never changes its tokens per step, so its tokens and data position follow from its step.
static void check_position(const Run *run) {
    int64_t T = (int64_t)run->T, sequences = run->step_tokens / T;
    if (run->tokens % run->step_tokens == 0 && run->tokens / run->step_tokens == run->step &&
        run->sequence == (uint64_t)(run->tokens / T))
        return;
    fail(
        EXIT_INPUT,
        "%s/state.json: expected \"tokens\" %lld x %lld and \"data_position\" %lld x %lld after %lld steps, found %lld "
        "and %llu. The checkpoint is damaged.",
        run->weights_folder, (long long)run->step, (long long)run->step_tokens, (long long)run->step,
        (long long)sequences, (long long)run->step, (long long)run->tokens, (unsigned long long)run->sequence);
}

// If a stop interrupted the switch at the start, the checkpoint is from before that switch and has the old normalizer.
static void settle_lineage(Run *run) {
    ModelConfig *config = run->config;
    char message[1024];
    repeat_switches(run, run->lineage, run->schedule.rewarm == run->step ? config->attn.text : NULL);
    const char *attn = lineage_attn(run->lineage);
    if (run->step > 0 || !run->o.init_from || !attn || !strcmp(attn, config->attn.text)) return;
    run->loaded = config->attn;
    run->loaded_L = config->seq_len;
    if (run->o.norm_length) config->seq_len = (size_t)run->o.norm_length;
    if (!attention_parse(&config->attn, attn, config->layers, message, sizeof message))
        fail(EXIT_INPUT, "%s/run.json: lineage: %s.", run->o.out, message);
}

// Takes over what run.json has.
static void read_run_json(Run *run) {
    RunJson found;
    Error error;
    train_options_init(&run->before, "", run->program->gpus);
    if (!run_json_resume(run->o.out, &run->o, &run->before, &found, &error)) fail_with(&error);
    run->lineage = found.lineage;
    run->history = found.history;
    run->history_omitted = found.omitted;
}

// Handles a run that ended before its first checkpoint: it keeps its arguments and starts from the beginning.
static void settle_started_over(Run *run) {
    TrainOptions *o = &run->o;
    if (checkpoint_count(o->out) > 0)
        fail(EXIT_INPUT,
             "%s/ckpt: every checkpoint is damaged; see the warnings above. Nothing was changed.\n"
             "  Restore an intact checkpoint, or start a new run in another --out.",
             o->out);
    if (!folder_has_run(o->out)) return;
    read_run_json(run);
    const cJSON *first = cJSON_GetArrayItem(run->lineage, 0);
    const char *attn = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(first, "attn"));
    if (attn) o->attn = strdup(attn);
    repeat_switches(run, run->lineage, NULL);
    cJSON_Delete(run->lineage);
    run->started_over = true;
    if (run_is_main()) printf("%s: no checkpoint yet; the run starts over\n", utf8_printed(o->out).text);
}

// For --resume: takes over the run's arguments, shape and state, and finds its newest checkpoint. Returns false if it
// has none.
static bool settle_resumed(Run *run, char *folder, size_t size) {
    TrainOptions *o = &run->o;
    Error error;
    uint64_t step;
    if (!o->out) fail(EXIT_USAGE, "--resume needs --out, the folder of the run to resume.");
    if (!checkpoint_newest(o->out, folder, size, &step)) {
        folder[0] = 0;
        settle_started_over(run);
        return false;
    }
    read_run_json(run);
    if (!checkpoint_verify(folder, false, &error) || !model_config_read(run->config, folder, NULL, &error))
        fail_with(&error);
    norms_ready(run);
    read_state(run, folder, step);
    settle_lineage(run);
    return true;
}

// Does --resume continue an existing run with its flags, be it from a checkpoint or from the beginning?
static bool is_kept(const Run *run) {
    return run->resumed || run->started_over;
}

// ---- the model's shape and tokenizer

static bool folder_has_tokenizer(const char *folder) {
    return access(folder_path(folder, tokenizer_files[0]).text, R_OK) == 0;
}

// Opens the tokenizer next to the shards, or in the folder `weights`. If it is missing or unsupported, samples are
// printed as ids. Checkpoints copy its files in any case.
static void open_tokenizer(Run *run, const char *weights) {
    char first[PATH_MAX];
    Error error;
    if (run->tokenizer_folder[0] || !run->o.train_data) return;
    // If this fails, opening the shards reports why.
    if (!mixture_first_path(run->o.train_data, first, sizeof first)) return;
    const FolderPath beside = folder_of(first);
    const char *folder = folder_has_tokenizer(beside.text) ? beside.text : weights;
    if (!folder[0] || !folder_has_tokenizer(folder)) return;
    snprintf(run->tokenizer_folder, sizeof run->tokenizer_folder, "%s", folder);
    for (size_t i = 0; tokenizer_files[i] && run->o.out && !run->o.follow_links; i++)
        if (!file_check_inside(folder, folder_path(folder, tokenizer_files[i]).text, &error)) fail_with(&error);
    if ((run->tokenizer = tokenizer_open(folder, &error))) {
        run->tokenizer_vocab = tokenizer_vocab(run->tokenizer);
        run->end_of_text = tokenizer_end_of_text(run->tokenizer);
        return;
    }
    if (error.code != EXIT_INPUT || !tokenizer_ids(folder, &run->tokenizer_vocab, &run->end_of_text)) fail_with(&error);
    if (run->tokenizer_vocab > MAX_VOCAB) run->tokenizer_vocab = 0;    // it cannot be the shards' tokenizer
    warn("%s\n  This does not affect training, but samples are printed as token ids.", error.text);
}

static RopeScaling asked_scaling(const TrainOptions *o) {
    RopeScaling scaling;
    char message[512];
    if (!rope_scaling_parse(&scaling, o->rope_scaling, message, sizeof message))
        fail(EXIT_USAGE, "--rope-scaling %s: %s.", o->rope_scaling, message);
    return scaling;
}

// run.json records the scaling in this form, which a resume compares.
static void name_scaling(Run *run, const RopeScaling *scaling) {
    run->o.rope_scaling = rope_scaling_text(scaling, run->rope_text, sizeof run->rope_text);
}

// Older versions did not record the scaling in run.json, so the checkpoint has the last word.
static void check_resumed_scaling(const TrainOptions *o, const RopeScaling *has) {
    char text[ROPE_TEXT];
    if (!train_options_given(o, "rope-scaling")) return;
    RopeScaling asked = asked_scaling(o);
    if (!rope_scaling_equal(&asked, has))
        fail(EXIT_USAGE,
             "--resume: --rope-scaling is %s, but the checkpoint has %s, and a resumed run cannot change it.\n"
             "  Omit --rope-scaling, or start a new run in another --out (--init-from reuses the weights).",
             o->rope_scaling, rope_scaling_text(has, text, sizeof text));
}

// For --init-from: finds the folder of those weights and takes their shape, which --model may repeat but not
// contradict. A run's checkpoint may be pruned before it is read.
static void settle_loaded(Run *run, char *folder, size_t size) {
    const TrainOptions *o = &run->o;
    ModelConfig *config = run->config, asked;
    Error error;
    char shape[256];
    for (int attempt = 1;; attempt++) {
        if (!checkpoint_find("--init-from", o->init_from, folder, size, &error)) fail_with(&error);
        if (model_config_read(config, folder, o->ignore_config_key, &error) &&
            checkpoint_verify(folder, true, &error) && weights_check(config, folder, &error))
            break;
        if (attempt == CHECKPOINT_ATTEMPTS || !checkpoint_vanished(folder)) fail_with(&error);
    }
    if (run_is_main() && strcmp(folder, o->init_from)) printf("weights from %s\n", utf8_printed(folder).text);
    run->loaded = config->attn;
    run->loaded_L = config->seq_len;
    run->vocab_from = " (from the loaded model)";
    if (train_options_given(o, "rope-theta")) config->rope_theta = o->rope_theta;
    if (train_options_given(o, "logit-softcap")) config->logit_softcap = o->logit_softcap;
    if (!train_options_given(o, "model")) return;
    if (!model_parse(&asked, o->model, &error)) fail_with(&error);
    if (!model_gives_vocab(o->model)) asked.vocab = config->vocab;
    if (!model_same_shape(&asked, config))
        fail(EXIT_USAGE, "--model %s does not match %s: %s.\n  Omit --model to use that shape.", o->model, folder,
             model_text(config, shape, sizeof shape));
}

// Sets T to the longest --seq-len.
static void find_longest(Run *run) {
    const IntList *lengths = &run->o.seq_len;
    run->T = 0;
    for (size_t i = 0; i < lengths->count; i++)
        if ((size_t)lengths->values[i] > run->T) run->T = (size_t)lengths->values[i];
}

// Sets the vocabulary size of a new model: from --model, else from the tokenizer next to the data, else the default.
static void settle_vocabulary(Run *run) {
    run->vocab_from = " (from --model)";
    if (model_gives_vocab(run->o.model)) return;
    open_tokenizer(run, "");
    run->vocab_from = run->tokenizer_vocab ? " (from the tokenizer)" : " (default; no tokenizer found)";
    if (run->tokenizer_vocab >= 2 && run->tokenizer_vocab <= MAX_VOCAB)
        run->config->vocab = (size_t)run->tokenizer_vocab;
    run->config->end_of_text = default_end_of_text(run->config->vocab);
}

// Determines the model's shape from the resumed run, --init-from or --model. `folder` is set to the folder of its
// weights, or "".
static void settle_model(Run *run, char *folder, size_t size) {
    TrainOptions *o = &run->o;
    ModelConfig *config = run->config;
    Error error;
    char message[1024];
    folder[0] = 0;
    if (o->rope_scaling) {
        RopeScaling asked = asked_scaling(o);
        name_scaling(run, &asked);
    }
    run->resumed = o->resume && settle_resumed(run, folder, size);
    find_longest(run);
    if (run->resumed) {
        check_resumed_scaling(o, &config->rope_scaling);
        return;
    }
    if (!o->resume && o->out && !folder_is_new(o->out, &error)) fail_with(&error);
    if (o->init_from) {
        settle_loaded(run, folder, size);
    } else {
        if (!model_parse(config, o->model, &error)) fail_with(&error);
        settle_vocabulary(run);
        config->rope_theta = o->rope_theta;
        config->logit_softcap = o->logit_softcap;
        config->seq_len = run->T;
    }
    if (o->rope_scaling) config->rope_scaling = asked_scaling(o);
    name_scaling(run, &config->rope_scaling);
    if ((!o->init_from || train_options_given(o, "attn") || run->started_over) &&
        !attention_parse(&config->attn, o->attn, config->layers, message, sizeof message))
        fail(EXIT_USAGE, "--attn %.400s: %s.", o->attn, message);
    if (!run->started_over) attention_warn_of_unused("--attn", config->attn.text, config->layers);
    if (o->init_from) attention_warn_of_start(&run->loaded, &config->attn, config->layers, "--attn", config->attn.text);
    if (o->norm_length) config->seq_len = (size_t)o->norm_length;
    if (o->norm_length && run->loaded.text[0] && attention_has(&run->loaded, SCALAR_P))
        fail(EXIT_USAGE, "--norm-length %lld: %s has p_n that were learned for its own L.\n  Omit this flag.",
             (long long)o->norm_length, o->init_from);
    run->lineage = cJSON_CreateArray();
    lineage_add(run->lineage, 0, o->init_from ? "init-from" : "start", "attn", config->attn.text,
                o->init_from ? "from" : NULL, folder, NULL);
}

// ---- batches and data

// Checks the sequence lengths, and divides a step's tokens among ranks and micro-batches.
static void settle_batches(Run *run) {
    TrainOptions *o = &run->o;
    int64_t T = (int64_t)run->T;
    for (size_t i = 0; i < o->seq_len.count; i++)
        if (T % o->seq_len.values[i])
            fail(EXIT_USAGE, "--seq-len: %lld does not divide the longest length, %lld.",
                 (long long)o->seq_len.values[i], (long long)T);
    if (o->batch * T > INT32_MAX)
        fail(EXIT_USAGE,
             "--batch %lld x --seq-len %lld exceeds 2^31 - 1 tokens. Use gradient accumulation: --total-batch-tokens.",
             (long long)o->batch, (long long)T);
    int64_t together = o->batch * T * process.size;
    if (!o->total_batch_tokens) o->total_batch_tokens = together;
    if (o->total_batch_tokens % together) {
        int64_t nearest = ((o->total_batch_tokens + together / 2) / together) * together;
        char remedy[96] = "A resumed run keeps its tokens per step: change --batch or the number of ranks.";
        if (!is_kept(run)) snprintf(remedy, sizeof remedy, "Nearest: %lld.", (long long)(nearest ? nearest : together));
        fail(EXIT_USAGE,
             "--total-batch-tokens %lld is not a multiple of batch x T x ranks = %lld x %lld x %d = %lld.\n  %s",
             (long long)o->total_batch_tokens, (long long)o->batch, (long long)T, process.size, (long long)together,
             remedy);
    }
    run->step_tokens = o->total_batch_tokens;
    run->micro_batches = o->total_batch_tokens / together;
}

static ShardsConfig shards_config(const Run *run) {
    return (ShardsConfig){.T = run->T,
                          .vocab = run->config->vocab,
                          .end_of_text = run->config->end_of_text,
                          .seed = (uint64_t)run->o.seed,
                          .pack = (PackMode)run->o.pack};
}

static void open_train(Run *run) {
    ShardsConfig config = shards_config(run);
    Error error;
    config.shuffle = run->o.shuffle;
    config.min_windows = (uint64_t)(run->step_tokens / (int64_t)run->T);
    config.remedy = "Add data, or reduce --seq-len, --batch or --total-batch-tokens.";
    run->train = mixture_open(run->o.train_data, config, &error);
    for (size_t i = 0; run->train && i < run->train->count; i++) {
        Shards *shards = run->train->sources[i].shards;
        if (!shards_check_targets(shards, shards_windows(shards), true, &error)) fail_with(&error);
    }
    run->train_print = run->train ? mixture_fingerprint(run->train, &error) : NULL;
    if (!run->train_print) fail_with(&error);
}

// An existing run was already started on this data, so a difference is only a warning there.
static void check_tokens_of(const Run *run, const Shards *shards, const char *first) {
    FolderPath folder;
    TokenMatch match = tokens_match_shards(first, shards, &folder);
    if (match == TOKENS_EQUAL) return;
    const FolderPath one = folder_path(folder.text, tokenizer_files[0]), two = folder_path(first, tokenizer_files[0]);
    if (match == TOKENS_DIFFER && !is_kept(run))
        fail(EXIT_INPUT,
             "%s: differs from %s, but --train-data, all its sources and --val-data need the same tokenizer.\n"
             "  Encode the text again with one of them: --tokenizer FOLDER of the scripts in data/.",
             one.text, two.text);
    warn("%s differs from %s.\n  If an id stands for another token there, the losses are meaningless.", one.text,
         two.text);
}

// An id means another token in each tokenizer, so all data needs the same one. A model in the folder `weights` may be
// trained further with another one, but that is rarely meant.
static void check_same_tokens(const Run *run, const char *weights) {
    const FolderPath first = folder_of(shards_path(run->train->sources[0].shards, 0));
    for (size_t i = 0; i < run->train->count; i++) check_tokens_of(run, run->train->sources[i].shards, first.text);
    if (run->val) check_tokens_of(run, run->val, first.text);
    if (weights[0] && tokens_match(weights, first.text) != TOKENS_EQUAL)
        warn(
            "%s differs from %s, the tokenizer of the model.\n"
            "  Unless the model is to learn another one, encode the text with its own: --tokenizer FOLDER of the scripts "
            "in data/.",
            folder_path(first.text, tokenizer_files[0]).text, folder_path(weights, tokenizer_files[0]).text);
}

static void open_val(Run *run) {
    ShardsConfig config = shards_config(run);
    Error error;
    if (!run->o.val_data) return;
    if (mixture_has_weights(run->o.val_data))
        fail(EXIT_USAGE,
             "--val-data %s: only --train-data can have weights.\n"
             "  Validation reads one stream; to measure the loss of each source, use eval_gpt2 --data.",
             run->o.val_data);
    config.min_windows = 1;
    config.remedy = "Add data, or reduce --seq-len.";
    run->val = shards_open(run->o.val_data, config, &error);
    if (run->val && !shards_check_targets(run->val, validation_windows(run), true, &error)) fail_with(&error);
    run->val_print = run->val ? shards_fingerprint(run->val, &error) : NULL;
    if (!run->val_print) fail_with(&error);
}

// Checks that the tokenizer's ids fit into the model's vocabulary.
static void settle_tokenizer(Run *run, const char *weights) {
    int vocab = (int)run->config->vocab;
    open_tokenizer(run, weights);
    if (run->tokenizer_vocab > vocab && weights[0] && run->end_of_text < vocab)
        warn("%s: its tokenizer has %d tokens, but the vocabulary of the model in %s has %d and cannot grow.\n"
             "  Text with a token that the model lacks cannot be used. Shards are checked as they are read.",
             run->tokenizer_folder, run->tokenizer_vocab, weights, vocab);
    else if (run->tokenizer_vocab > vocab && weights[0])
        fail(EXIT_INPUT,
             "%s: its token between documents has the id %d, but the vocabulary of the model in %s has %d ids.\n"
             "  Encode the text with the model's own tokenizer: data/text.py --tokenizer FOLDER, or another script in "
             "data/.",
             run->tokenizer_folder, run->end_of_text, weights, vocab);
    else if (run->tokenizer_vocab > vocab)
        fail(EXIT_INPUT,
             "%s: its tokenizer has %d tokens, but the model's vocabulary has %d.\n"
             "  Omit vocab= from --model, or set vocab=%d or more.",
             run->tokenizer_folder, run->tokenizer_vocab, vocab, run->tokenizer_vocab);
    if (run->tokenizer_vocab && run->end_of_text >= 0) run->config->end_of_text = run->end_of_text;
}

// Checks the constraints that a normalizer places on sequence lengths.
static void check_normalizer(const Run *run, const AttentionList *attn, const char *flag) {
    char message[1024];
    size_t L = run->config->seq_len;
    if (!attention_fits(attn, L, message, sizeof message)) fail(EXIT_USAGE, "%s %s.", flag, message);
    if (attention_p_keys(attn, run->T) > L)
        fail(EXIT_USAGE, "%s %s: p_n is learned for n up to L = %zu, but --seq-len is %zu. Reduce --seq-len.", flag,
             attn->text, L, run->T);
}

static void check_softcap(double c) {
    if (c != 0 && c < MIN_SOFTCAP)
        fail(EXIT_USAGE, "--logit-softcap %g: expected a number from %g to %g, or 0 for no cap.", c, MIN_SOFTCAP,
             MAX_SOFTCAP);
}

// Under ntk the angles depend on the length of a sequence, and training has one table of angles, for the longest.
static void check_rope(const Run *run) {
    const ModelConfig *config = run->config;
    const char *wrong = rope_scaling_wrong(&config->rope_scaling, head_size(config));
    if (wrong) fail(EXIT_USAGE, "--rope-scaling %s: %s.", run->o.rope_scaling, wrong);
    if (config->rope_scaling.kind == ROPE_NTK && run->o.seq_len.count > 1 && run->T > config->seq_len)
        fail(
            EXIT_USAGE,
            "--rope-scaling ntk: beyond L = %zu the angles depend on the length, so training there needs one --seq-len.",
            config->seq_len);
}

Schedule schedule_of(const TrainOptions *o, int64_t rewarm) {
    return (Schedule){.kind = (ScheduleKind)o->schedule,
                      .lr = o->lr,
                      .min_lr_frac = o->min_lr_frac,
                      .warmup = o->warmup,
                      .steps = o->steps,
                      .rewarm = rewarm,
                      .decay_frac = o->decay_frac,
                      .decay_shape = (DecayShape)o->decay_shape};
}

void settle(Run *run) {
    char *weights = run->weights_folder;
    size_t size = sizeof run->weights_folder;
    TrainOptions *o = &run->o;
    Error error;
    run->best.step = run->last_best.step = run->saved = -1;
    settle_model(run, weights, size);
    if (o->warmup < 0) o->warmup = o->steps / 10 < 1000 ? o->steps / 10 : 1000;
    int64_t resumes = process_max_int(o->resume), resumed = process_max_int(run->resumed);
    if (resumes != o->resume)
        fail(EXIT_USAGE, "rank %d has no --resume, but another rank has it. All ranks need the same flags.",
             process.rank);
    if (resumed != run->resumed)
        fail(EXIT_PEER, "rank %d finds no run in %s, but another rank does. All machines need the same --out folder.",
             process.rank, o->out);
    int64_t newest = process_max_int(run->step), oldest = -process_max_int(-run->step);
    if (newest != oldest)
        fail(EXIT_PEER,
             "--resume: some ranks find step %lld in %s, others step %lld. All machines need the same --out folder.\n"
             "  If they share it, a cache may be out of date: try again in a minute.",
             (long long)newest, o->out, (long long)oldest);
    if (run->resumed) run->saved = run->step;
    settle_switches(run);
    check_normalizer(run, &run->config->attn, "--attn");
    for (size_t i = 0; i < run->switch_count; i++) check_normalizer(run, &run->switches[i].to, "--attn-switch");
    check_rope(run);
    check_softcap(o->logit_softcap);
    settle_batches(run);
    if (run->resumed) check_position(run);
    if (!o->train_data && o->resume && !run->resumed && !run->started_over)
        fail(EXIT_USAGE,
             "--resume --out %s: this folder contains no run to resume, and starting one there needs --train-data.\n"
             "  Check the path.",
             o->out);
    if (!o->train_data)
        fail(EXIT_USAGE, "--train-data is missing: name the shards to train on. data/shakespeare.py creates some.");
    settle_tokenizer(run, weights);
    open_train(run);
    open_val(run);
    check_same_tokens(run, weights);
    if (is_kept(run) && (!run_json_same_data(o->out, "train", run->train_print, &error) ||
                         !run_json_same_data(o->out, "val", run->val_print, &error)))
        fail_with(&error);
    check_same_on_all_ranks(run);
    norms_ready(run);
    run->schedule = schedule_of(o, run->schedule.rewarm);
}

#include "run/parts.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

#include "model/checkpoint.h"
#include "run/folder.h"
#include "run/lineage.h"
#include "run/run_json.h"
#include "runtime/error.h"
#include "runtime/json.h"
#include "runtime/path.h"
#include "runtime/utf8.h"

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
    snprintf(expected, sizeof expected, "a whole number from %lld to %lld", (long long)least, (long long)most);
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
    double seed = state_number(random, "seed", -DBL_MAX, DBL_MAX);
    if (seed != (double)run->o.seed)
        fail(EXIT_INPUT,
             "%s: the run has the seed %.0f, but its run.json says %lld.\n"
             "  If run.json was edited, restore the seed there; otherwise the checkpoint is damaged.",
             random.path, seed, (long long)run->o.seed);
}

// Reads state.json. step: that of the checkpoint's name
static void read_state(Run *run, const char *folder, uint64_t step) {
    const int64_t most = INT64_C(1) << 53;
    const FolderPath path = folder_path(folder, "state.json");
    Error error;
    cJSON *json = json_read(path.text, JSON_SMALL, &error);
    if (!json) fail_with(&error);
    const State state = {json, path.text};
    run->step = state_whole(state, "step", 0, most);
    if (run->step != (int64_t)step)
        fail(EXIT_INPUT,
             "%s: \"step\": expected %llu, as in the folder's name, found %lld.\n"
             "  If the folder was renamed or copied, rename it back or remove it; otherwise the checkpoint is damaged.",
             path.text, (unsigned long long)step, (long long)run->step);
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
void check_position(const Run *run) {
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
    run->arguments = found.arguments;
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
    if (attn) o->attn = run->attn_text = strdup(attn);
    run->started_over = true;
    if (run_is_main()) printf("%s: no checkpoint yet; the run starts over\n", utf8_printed(o->out).text);
}

bool settle_resumed(Run *run, char *folder, size_t size) {
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

bool is_kept(const Run *run) {
    return run->resumed || run->started_over;
}

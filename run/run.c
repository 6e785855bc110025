#include "run/parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/checkpoint.h"
#include "run/folder.h"
#include "run/run_json.h"
#include "runtime/activity.h"
#include "runtime/clock.h"
#include "runtime/error.h"
#include "runtime/human.h"
#include "runtime/own.h"
#include "runtime/path.h"
#include "runtime/process.h"
#include "runtime/start.h"
#include "runtime/utf8.h"

bool run_is_main(void) {
    return process.rank == 0;
}

// ---- the start

// Adds the normalizer that a lineage entry has under this key, if any.
static void list_past(Run *run, const cJSON *entry, const char *key) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, key));
    char ignored[1024];
    size_t i = run->other_count - run->coming_count;
    if (text && attention_parse(&run->past[i], text, run->config->layers, ignored, sizeof ignored))
        run->others[run->other_count++] = &run->past[i];
}

// Lists the other normalizers of the run: for --attn-switch and --init-from, and from its lineage.
static void list_others(Run *run) {
    size_t past = 2 * (size_t)cJSON_GetArraySize(run->lineage);
    const cJSON *entry;
    run->others = allocate(run->switch_count + 1 + past, sizeof *run->others, "the changes of normalizer");
    run->past = allocate(past, sizeof *run->past, "the changes of normalizer");
    for (size_t i = 0; i < run->switch_count; i++) run->others[run->other_count++] = &run->switches[i].to;
    if (run->loaded.text[0]) run->others[run->other_count++] = &run->loaded;
    run->coming_count = run->other_count;
    cJSON_ArrayForEach(entry, run->lineage) {
        const char *event = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "event"));
        if (event && strcmp(event, "init-from") != 0) list_past(run, entry, "from");    // there, it is a folder
        list_past(run, entry, "attn");
    }
}

// Ends the program before any device is in use.
static _Noreturn void end_early(Run *run) {
    heartbeat_stop(run->heartbeat);
    process_end();
    exit(EXIT_DONE);
}

// `create` creates the folder and its lock file if they are missing; see folder_lock().
static bool lock_folder(Run *run, bool create, Error *error) {
    if (!run->o.out) return true;
    return folder_check_name(run->o.out, error) && own_check(run->o.out, run->o.foreign_folder, error) &&
           own_check(folder_path(run->o.out, "ckpt").text, run->o.foreign_folder, error) &&
           (run->o.dry_run || folder_lock(&run->lock, run->o.out, create, error));
}

// Until a new run has the lock, another job may start and finish a run in the same folder.
static bool take_folder(Run *run, Error *error) {
    if (!run->o.out) return true;
    return lock_folder(run, true, error) && (run->resumed || run->started_over || folder_is_new(run->o.out, error)) &&
           checkpoint_prepare(&run->checkpoints, run->o.out, error);
}

static bool data_whole(const Run *run, Error *error) {
    return mixture_check_all(run->train, error) && (!run->val || shards_check_all(run->val, error));
}

// The heartbeat starts before settle() takes over a resumed run's flags, because a rank may die meanwhile.
static int64_t timeout_of(const TrainOptions *o, const char *flag, int64_t timeout) {
    if (run_is_main() && o->resume && o->out && !train_options_given(o, flag))
        timeout = run_json_number(o->out, flag, timeout);
    process_broadcast(&timeout, sizeof timeout);
    return timeout;
}

static const char EXAMPLE[] =
    "--train-data 'data/shakespeare/*_train_*.bin' --val-data 'data/shakespeare/*_val_*.bin' \\\n"
    "    --model 15M --seq-len 256 --batch 8 --steps 200 --out out/first";

void run_open(Run *run, const RunProgram *program, ModelConfig *config, int argc, char **argv) {
    TrainOptions *o = &run->o;
    Error error;
    *run = (Run){.program = program, .config = config, .lock = -1, .checkpoints = -1, .opened = now()};
    start_program(program->name);
    process_check_build(program->lacks);
    process_hold_signals(argv);
    train_options_init(o, normalizer_flag_help, program->gpus);
    OptionsHelp help = {program->usage, EXAMPLE, "training.md"};
    options_parse(o->table, o->count, argc, argv, help);
    if (normalizer_help(o->attn)) exit(EXIT_DONE);
    process_start(&argc, &argv);
    run->heartbeat = heartbeat_start(timeout_of(o, "rank-timeout", o->rank_timeout),
                                     timeout_of(o, "progress-timeout", o->progress_timeout));
    process_started();
    rank0_try(lock_folder(run, false, &error), &error);
    settle(run);
    start_threads(o->threads);
    if (run->resumed && run->step >= o->steps && !run->owed) {
        if (run_is_main())
            printf("%s is already at step %lld; pass a --steps larger than %lld to continue.\n",
                   utf8_printed(o->out).text, (long long)run->step, (long long)run->step);
        end_early(run);
    }
    list_others(run);
}

bool run_take(Run *run) {
    Error error;
    process_barrier();    // no rank writes anything before all have checked that it fits
    if (run->o.dry_run) {
        rank0_try(data_whole(run, &error), &error);
        if (run_is_main()) printf("dry run: all tokens are below the vocabulary; nothing was written\n");
        flush_stdout("the plan");
        return false;
    }
    rank0_try(take_folder(run, &error), &error);
    memory_take(run->plan);
    free(run->others);
    free(run->past);
    run->others = NULL;
    run->past = NULL;
    return true;
}

static bool read_weights(const Run *run, const AttentionList *saved, Error *error) {
    return weights_load(&run->weights, run->weights_folder, saved, error) &&
           (!run->resumed || weights_load_optimizer(&run->weights, run->weights_folder, error));
}

void run_load(Run *run, Weights weights) {
    const AttentionList attn = run->config->attn;
    size_t bytes = weights.list->floats * sizeof(float);
    Error error;
    run->weights = weights;
    activity_does("loading the weights");
    if (!run->weights_folder[0]) {
        weights_init(&run->weights, (uint64_t)run->o.seed);
        return;
    }
    // The switch to `attn` happens once the loss has been measured with the loaded normalizer.
    if (run->loaded.text[0]) run->config->attn = run->loaded;
    rank0_try(read_weights(run, &run->config->attn, &error), &error);
    run->config->attn = attn;
    if (run->loaded.text[0] && attention_equal(&run->loaded, &attn, run->config->layers)) run->loaded.text[0] = 0;
    process_broadcast(run->weights.params, bytes);
    if (!run->resumed) return;
    for (size_t s = 0; s < STATE_ARRAYS; s++) process_broadcast(run->weights.state[s], bytes);
}

void run_begin(Run *run, double flops) {
    open_run_folder(run);
    run->flops = flops;
    run->first_step = run->step;
    process_catch_signals();
    process_confirm_stop("stopping when the work in progress is done; Ctrl-C ends it at once, without saving");
    if (run_is_main()) {
        printf("%s %s%s after %.1f s; peak %.0f GFLOP/s\n", run->resumed ? "resumes at step" : "starts at step",
               human_grouped((uint64_t)run->step).text, run->owed ? ", whose validation is still due," : "",
               now() - run->opened, flops / 1e9);
        fflush(stdout);
    }
    run->mark = now();
}

// ---- stopping

// With -DFAULTS, FAULT_STOP=n simulates a signal that arrives just before the n-th time that the run checks for one.
#ifdef FAULTS
static bool fault_stop(void) {
    static long asked;
    const char *at = getenv("FAULT_STOP");
    asked++;
    return at && asked >= atol(at);
}
#else
static bool fault_stop(void) {
    return false;
}
#endif

// Has any rank been asked to stop? Collective.
static bool stopping(Run *run) {
    run->stopped = process_max_int(process_stop_requested() || fault_stop());
    return run->stopped;
}

bool run_continues(const Run *run) {
    return !run->stopped && (run->owed || run->step < run->o.steps);
}

// ---- batches

// Loads sequence `g` of the data into row `row` of the batch.
static void load_window(Run *run, Shards *shards, uint64_t g, size_t row) {
    Error error;
    activity_does("reading data");
    if (!shards_window(shards, g, run->window, run->mask ? run->window_mask : NULL, &error)) fail_with(&error);
    memcpy(run->inputs + row * run->T, run->window, run->T * sizeof(int32_t));
    memcpy(run->targets + row * run->T, run->window + 1, run->T * sizeof(int32_t));
    if (run->mask) memcpy(run->mask + row * run->T, run->window_mask, run->T);
}

// The number by which a step's loss is divided: tokens, or with masks windows, however many of their tokens count.
static double loss_count(const Run *run) {
    return mixture_masked(run->train) ? (double)(run->step_tokens / (int64_t)run->T) : (double)run->step_tokens;
}

// Micro-batch i of rank r starts at window (i · ranks + r) · B.
bool run_batch(Run *run, Batch *batch) {
    size_t B = (size_t)run->o.batch;
    int64_t i = run->micro_batch;
    if (i == run->micro_batches) {
        run->micro_batch = 0;
        return false;
    }
    if (stopping(run)) return false;
    if (i == 0)
        run->step_T =
            step_length(run->o.seq_len.values, run->o.seq_len.count, (uint64_t)run->o.seed, (uint64_t)run->step);
    uint64_t first = run->sequence + ((uint64_t)i * (uint64_t)process.size + (uint64_t)process.rank) * B;
    for (size_t b = 0; b < B; b++) {
        uint64_t g = first + b;
        const Source *source = mixture_find(run->train, &g);
        load_window(run, source->shards, g, b);
    }
    activity_does("training");
    *batch = (Batch){.inputs = run->inputs,
                     .targets = run->targets,
                     .mask = run->mask,
                     .B = B * (run->T / run->step_T),
                     .T = run->step_T,
                     .scale = (float)(1.0 / loss_count(run)),
                     .first = i == 0,
                     .last = i + 1 == run->micro_batches};
    run->micro_batch++;
    return true;
}

// ---- a step

// A non-finite loss or gradient ends the run before its weights are saved.
static void check_finite(Run *run, double loss, double norm) {
    if (isfinite(loss) && isfinite(norm)) return;
    char path[PATH_MAX];
    uint64_t step;
    progress_end(&run->progress);
    bool saved = run->o.out && checkpoint_newest(run->o.out, path, sizeof path, &step);
    char unbounded[96] = "";
    for (size_t l = 0; l < run->config->layers && !unbounded[0]; l++) {
        const Normalizer *attn = normalizer_of(run->config, l);
        bool grows = (attn->phi.kind == PHI_EXP || attn->phi.kind == PHI_EXPM1) && attn->cap == 0;
        if (grows && !norm_is_sum(attn->norm))
            snprintf(unbounded, sizeof unbounded,
                     "\n  phi=%s without norm=l1 is unbounded: exp(z) overflows from z = 88.8 on.",
                     attn->phi.kind == PHI_EXP ? "exp" : "expm1");
    }
    fail(EXIT_DIVERGED,
         "step %lld: the loss is %g and the gradient norm %g: training diverged. This step was discarded.%s\n"
         "  Last good checkpoint: %s. A lower --lr or a longer --warmup may help, or in a new run %s.",
         (long long)run->step, shown(loss), shown(norm), unbounded, saved ? path : "none",
         run->o.grad_clip != 0 ? "a smaller --grad-clip" : "--grad-clip, which is off");
}

AdamW run_update(Run *run) {
    const TrainOptions *o = &run->o;
    double lr = schedule_lr(&run->schedule, run->step);
    run->sequence += (uint64_t)(run->step_tokens / (int64_t)run->T);
    run->step++;
    run->tokens += run->step_tokens;
    run->token_flops = model_flops_per_token(run->config, run->step_T);
    run->last = (StepMetrics){.step = run->step, .tokens = run->tokens, .lr = (float)lr};
    run->normed = false;
    return (AdamW){lr, o->beta1, o->beta2, 1e-8, o->weight_decay, run->step};
}

void run_check_step(Run *run, double loss, double norm) {
    double mean_loss = loss / loss_count(run);
    check_finite(run, mean_loss, norm);
    run->last.loss = (float)mean_loss;
    run->last.grad_norm = (float)norm;
}

// Records the rank whose passes took much longer than the mean, if there is one. Collective.
static void find_slowest(Run *run, double passes) {
    double *of = run->passes, mean = 0;
    int slowest = 0;
    if (process.size == 1) return;
    of[process.rank] = passes;
    process_gather(of, sizeof *of);
    for (int r = 0; r < process.size; r++) {
        mean += of[r] / process.size;
        if (of[r] > of[slowest]) slowest = r;
    }
    if (!(of[slowest] > 1.1 * mean)) return;
    run->last.slowest_rank = slowest;
    run->last.slowest_ms = 1000 * of[slowest];
    run->last.mean_ms = 1000 * mean;
}

void run_step_done(Run *run, double passes, uint64_t rows, uint64_t all_zero) {
    double end = now(), seconds = end - run->mark, speed = (double)run->step_tokens / seconds;
    run->mark = end;
    run->rows = rows;
    run->all_zero = all_zero;
    // A process's first step is slow: it also allocates memory and loads code. So the average begins with the second.
    run->seconds = run->step <= run->first_step + 2 ? seconds : 0.9 * run->seconds + 0.1 * seconds;
    run->last.ms = 1000 * seconds;
    run->last.tok_per_s = speed;
    run->last.mfu = speed * run->token_flops / run->flops;
    find_slowest(run, passes);
    run->owed = true;
}

void run_pause(Run *run) {
    run->paused = now();
}

void run_unpause(Run *run) {
    run->mark += now() - run->paused;
}

// ---- validation

static bool due(int64_t every, int64_t step) {
    return every && step % every == 0;
}

bool run_validation_due(const Run *run) {
    return run->val && due(run->o.val_every, run->step);
}

bool run_validation_due_at_end(const Run *run) {
    return !run->stopped && run->val && run->o.val_every && !due(run->o.val_every, run->step);
}

uint64_t validation_windows(const Run *run) {
    uint64_t windows = shards_windows(run->val), most = (uint64_t)run->o.val_tokens / run->T;
    if (most < 1) most = 1;
    return windows < most ? windows : most;
}

void run_validation_start(Run *run) {
    run->window_count = validation_windows(run);
    run->window_first = 0;
    run->window_loss = 0;
}

bool run_validation_batch(Run *run, Batch *batch) {
    uint64_t ranks = (uint64_t)process.size;
    size_t B = 0;
    if (run->window_first > 0 && stopping(run)) return false;
    if (run->window_first >= run->window_count) return false;
    for (uint64_t g = run->window_first + (uint64_t)process.rank; B < (size_t)run->o.batch && g < run->window_count;
         g += ranks)
        load_window(run, run->val, g, B++);
    activity_does("validating");
    run->window_first += (uint64_t)run->o.batch * ranks;
    *batch = (Batch){.inputs = run->inputs, .targets = run->targets, .mask = run->mask, .B = B, .T = run->T};
    return true;
}

void run_validation_add(Run *run, double loss) {
    run->window_loss += loss;
}

// Every number of ranks gives the same result, up to the order of the sum.
bool run_validation_end(Run *run, double *loss) {
    if (run->stopped) return false;
    process_sum_double(&run->window_loss, 1);
    *loss = run->window_loss / (double)(shards_masked(run->val) ? run->window_count : run->window_count * run->T);
    return true;
}

void run_validated(Run *run, double loss) {
    run->last.validated = true;
    run->last.val_loss = (float)loss;
    run->best_now = isfinite(loss) && (run->best.step < 0 || run->last.val_loss < run->best.loss);
    if (!isfinite(loss))
        warn("step %lld: the validation loss is %g, so it does not count as the best.", (long long)run->step,
             shown(loss));
    if (!run->best_now) return;
    run->last_best = run->best;
    run->best = (Best){run->last.val_loss, run->step};
}

void run_validated_at_end(Run *run, double loss) {
    progress_end(&run->progress);
    if (run_is_main()) printf("final validation loss %.4f\n", shown(loss));
}

// ---- samples, checkpoints, the end

bool run_sample_due(const Run *run) {
    return run_is_main() && run->o.sample_every && (due(run->o.sample_every, run->step) || run->step == run->o.steps);
}

bool run_finish_step(Run *run) {
    bool best = run->best_now && run->o.keep_best;
    // What the checkpoint that this run resumed from still owed has now been done, so it is out of date.
    if (run->saved == run->step) run->saved = -1;
    run->owed = run->best_now = false;
    return run->o.out && (due(run->o.ckpt_every, run->step) || best || run->step == run->o.steps);
}

bool run_save_due_at_end(const Run *run) {
    return run->o.out && run->saved != run->step;
}

bool run_pauses(const Run *run) {
    return run->step == run->o.steps || run_validation_due(run) || due(run->o.sample_every, run->step) ||
           (run->o.out && due(run->o.ckpt_every, run->step)) || run_norms_due(run) || change_at_step(run);
}

int run_end(Run *run) {
    bool complete = run->step >= run->o.steps && !run->owed;
    bool stopped = run->stopped && !complete;
    progress_end(&run->progress);
    if (run_is_main() && stopped) {
        printf("stopped by a signal at step %lld%s%s\n", (long long)run->step,
               run->owed ? ", before its validation was complete" : "",
               run->o.out ? "; resume with --resume" : "; nothing was saved, because there is no --out");
        fflush(stdout);
    }
    if (run->metrics) metrics_close(run->metrics);
    heartbeat_stop(run->heartbeat);
    process_end();
    return stopped ? EXIT_STOPPED : EXIT_DONE;
}

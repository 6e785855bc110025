#include "run/parts.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attention/modeling.h"
#include "model/checkpoint.h"
#include "run/folder.h"
#include "run/lineage.h"
#include "run/run_json.h"
#include "runtime/activity.h"
#include "runtime/clock.h"
#include "runtime/error.h"
#include "runtime/file.h"
#include "runtime/path.h"
#include "runtime/process.h"
#include "runtime/utf8.h"

// ---- the run folder

static bool write_run_json(const Run *run, Error *error) {
    cJSON *to_repeat = cJSON_CreateArray();
    for (const Switch *s = run->switches; s < run->switches + run->switch_count; s++)
        if (s->repeated) lineage_add(to_repeat, s->step, "attn-switch", "attn", s->to.text, NULL);
    const RunJson rest = {run->lineage, run->history, run->history_omitted, run->arguments};
    bool done = run_json_write(run->o.out, &run->o, run->train_print, run->val_print, &rest, to_repeat, error);
    cJSON_Delete(to_repeat);
    return done;
}

void write_run(Run *run) {
    Error error;
    rank0_try(!run->o.out || write_run_json(run, &error), &error);
}

// The metrics line that is owed may already exist: the job that wrote it may have died before its next checkpoint.
static bool open_metrics(Run *run, const char *path, Error *error) {
    int64_t last = run->owed ? run->step - 1 : run->step;
    if (run->resumed && last > 0 && access(path, F_OK) != 0 && errno == ENOENT)
        warn("%s: this file is missing. A new one begins with step %lld.", path, (long long)last + 1);
    return metrics_cut(path, last, error) && (run->metrics = metrics_open(path, error));
}

// The best checkpoint may not exist: the run may have gone without --keep-best so far, or a user may have deleted it.
// Then the next validation is the best.
static void find_best(Run *run) {
    if (!run->o.keep_best || run->best.step < 0) return;
    bool gone = run_is_main() && !checkpoint_exists(run->o.out, (uint64_t)run->best.step);
    if (process_max_int(gone)) run->best.step = -1;
}

void open_run_folder(Run *run) {
    Error error;
    if (!run->o.out) return;
    find_best(run);
    rank0_try(open_metrics(run, folder_path(run->o.out, "metrics.jsonl").text, &error), &error);
    history_add(run);
    write_run(run);
}

bool restore_run_folder(Run *run, Error *error) {
    if (folder_intact(run->lock, run->o.out) && metrics_intact(run->metrics)) return true;
    progress_end(&run->progress);
    int lock = run->lock;
    if (!folder_lock_again(&run->lock, run->o.out, error)) {
        if (error->code == EXIT_BUSY) fail_with(error);
        return false;
    }
    if (run->lock != lock && run->checkpoints >= 0) {    // another folder, with a ckpt of its own
        close(run->checkpoints);
        run->checkpoints = -1;
    }
    if (metrics_restore(run->metrics, error) && write_run_json(run, error))
        warn("%s, or part of it, was removed during this run: run.json and metrics.jsonl have been restored.\n"
             "  Checkpoints and samples that were removed are lost.",
             run->o.out);
    else warn("%s\n  Training continues; the next save will try again.", error->text);
    return true;
}

// ---- checkpoints

static void add_owed(cJSON *json, const Run *run) {
    const StepMetrics *m = &run->last;
    cJSON *owed = cJSON_AddObjectToObject(json, "owed");
    cJSON_AddNumberToObject(owed, "loss", m->loss);
    cJSON_AddNumberToObject(owed, "lr", m->lr);
    cJSON_AddNumberToObject(owed, "grad_norm", m->grad_norm);
    cJSON_AddNumberToObject(owed, "ms", m->ms);
    cJSON_AddNumberToObject(owed, "tok_per_s", m->tok_per_s);
    cJSON_AddNumberToObject(owed, "mfu", isfinite(m->mfu) ? m->mfu : 0);
    if (run->normed) cJSON_AddItemToObject(owed, "norms", norms_json(run));
}

static char *state_json(const Run *run) {
    cJSON *json = cJSON_CreateObject(), *random;
    cJSON_AddNumberToObject(json, "step", (double)run->step);
    cJSON_AddNumberToObject(json, "tokens", (double)run->tokens);
    cJSON_AddNumberToObject(json, "data_position", (double)run->sequence);
    random = cJSON_AddObjectToObject(json, "random");
    cJSON_AddStringToObject(random, "generator", "philox4x32-10, by counter");
    cJSON_AddNumberToObject(random, "seed", (double)run->o.seed);
    cJSON_AddNumberToObject(json, "ranks", process.size);
    cJSON_AddNumberToObject(json, "rewarm", (double)run->schedule.rewarm);
    if (run->best.step >= 0) {
        cJSON_AddNumberToObject(json, "best_val_loss", run->best.loss);
        cJSON_AddNumberToObject(json, "best_step", (double)run->best.step);
    }
    if (run->owed) add_owed(json, run);
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    return text;
}

static bool copy_tokenizer_file(const Run *run, const Checkpoint *c, const char *path, size_t i, Error *error) {
    char *text = tokenizer_file(run->tokenizer_folder, i, run->o.follow_links, error);
    bool done = text && file_write_text(c->folder_fd, path, text, error);
    free(text);
    return done;
}

// A file that cannot be read is left out: better a checkpoint without it than none. *whole: none was left out,
// and there were some
static bool copy_tokenizer(const Run *run, Checkpoint *c, bool *whole, Error *error) {
    size_t copied = 0, left_out = 0;
    *whole = false;
    if (!run->tokenizer_folder[0]) return true;
    for (size_t i = 0; tokenizer_files[i]; i++) {
        const char *name = tokenizer_files[i];
        if (access(folder_path(run->tokenizer_folder, name).text, F_OK) != 0 && errno == ENOENT) continue;
        bool done = copy_tokenizer_file(run, c, checkpoint_path(c, name), i, error);
        copied += done;
        left_out += !done;
        if (done) continue;
        if (error->code != EXIT_INPUT) return false;
        warn("%s\n  The checkpoint is saved without this file.", error->text);
    }
    *whole = copied && !left_out;
    return true;
}

// A resume from the checkpoint does not write the lines up to its step again, so a power failure must not lose them.
static void sync_metrics(const Run *run) {
    Error error;
    if (!file_sync(AT_FDCWD, folder_path(run->o.out, "metrics.jsonl").text, &error)) warn("%s", error.text);
}

static bool begin_checkpoint(Run *run, Save *save) {
    Checkpoint *c = &save->checkpoint;
    const Weights *w = &run->weights;
    if (!restore_run_folder(run, &save->error)) return false;
    sync_metrics(run);
    if (!checkpoint_begin(c, &run->checkpoints, run->o.out, (uint64_t)run->step, &save->error)) return false;
    save->files.model = weights_create_model(w, c->folder_fd, checkpoint_path(c, "model.safetensors"),
                                             checkpoint_hash(c, "model.safetensors"), &save->error);
    if (save->files.model)
        save->files.optimizer = weights_create_optimizer(w, c->folder_fd, checkpoint_path(c, "optimizer.safetensors"),
                                                         checkpoint_hash(c, "optimizer.safetensors"), &save->error);
    return save->files.optimizer != NULL;
}

// Writes the other files.
static bool complete_checkpoint(const Run *run, Checkpoint *c, bool *whole, Error *error) {
    char *config = model_config_json(run->config, run->weights.bf16), *state = state_json(run);
    bool done = file_write_text(c->folder_fd, checkpoint_path(c, "config.json"), config, error) &&
                file_write_text(c->folder_fd, checkpoint_path(c, "state.json"), state, error) &&
                (model_is_plain(run->config) ||
                 file_write_text(c->folder_fd, checkpoint_path(c, MODELING_FILE), modeling_text, error)) &&
                copy_tokenizer(run, c, whole, error) && checkpoint_commit(c, error);
    free(config);
    free(state);
    return done;
}

// If the run has its tokenizer from one of its own checkpoints, which will be pruned, the next saves take it from this
// one. If a file could not be copied, they do so only once the old one is gone.
static void follow_tokenizer(Run *run) {
    FolderPath all = folder_path(run->o.out, "ckpt/");
    char name[64];
    if (strncmp(run->tokenizer_folder, all.text, strlen(all.text)) != 0) return;
    snprintf(name, sizeof name, "ckpt/step-%08lld", (long long)run->step);
    strcpy(run->tokenizer_folder, folder_path(run->o.out, name).text);
}

void run_save_start(Run *run, Save *save) {
    memset(save, 0, sizeof *save);
    save->done = true;
    activity_does("saving a checkpoint");
    if (!run_is_main()) return;
    save->started = now();
    progress_end(&run->progress);
    save->done = begin_checkpoint(run, save);
}

// After an error the other ranks, which do not know of it, still send their pieces.
bool run_save_piece(const Run *run, Save *save) {
    if (run_is_main() && save->done && save->piece.floats)
        save->done = weights_write_piece(&save->files, &run->weights, &save->piece, &save->error);
    return weights_next_piece(&run->weights, &save->piece);
}

void run_save_end(Run *run, Save *save) {
    bool whole = true, last = run->stopped || run->step == run->o.steps;
    if (run_is_main()) {
        Error *error = &save->error;
        save->done = weights_close(&save->files, save->done, error) &&
                     complete_checkpoint(run, &save->checkpoint, &whole, error);
        if (save->done) {
            printf("saved %s/ckpt/step-%08lld in %.1f s\n", utf8_printed(run->o.out).text, (long long)run->step,
                   now() - save->started);
            uint64_t best = run->o.keep_best && run->best.step >= 0 ? (uint64_t)run->best.step : UINT64_MAX;
            if (!checkpoint_prune(&run->checkpoints, run->o.out, (int)run->o.keep, best, error))
                warn("%s", error->text);
            if (whole || access(run->tokenizer_folder, F_OK) != 0) follow_tokenizer(run);
        } else {
            checkpoint_abandon(&save->checkpoint);
            if (!last) warn("%s\n  Training continues; earlier checkpoints are intact.", error->text);
        }
        fflush(stdout);
    }
    process_agree(save->done || !last, &save->error);
    activity_does("training");
    if (!process_max_int(!save->done)) run->saved = run->step;
    else if (run->o.keep_best && run->best.step == run->step) run->best = run->last_best;
}

void run_save(Run *run) {
    Save save;
    if (process.size > 1) run_compare(run, XXH3_64bits(run->weights.params, run->weights.list->floats * sizeof(float)));
    run_save_start(run, &save);
    while (run_save_piece(run, &save)) {}
    run_save_end(run, &save);
}

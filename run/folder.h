// The run folder: OUT/run.json, metrics.jsonl, samples.txt, ckpt/. One job at a time works in it.
#ifndef RUN_FOLDER_H
#define RUN_FOLDER_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

#include "runtime/error.h"
#include "run/train_options.h"

// Locks OUT/lock until the process ends, however it ends; called again, it does nothing. With `make` it makes folder
// and file where there are none; otherwise a folder without the file, which no run has used yet, is left as it is: so
// that nothing is written before all is checked.
// EXIT_BUSY where another job holds it, EXIT_RESOURCE where the folder cannot be written to.
bool folder_lock(const char *out, bool make, Error *error);

// Does OUT still have the lock that folder_lock() took, and run.json? False once someone has removed or replaced the
// folder under a running job.
bool folder_intact(const char *out);

// Takes the lock again in a folder that was removed: EXIT_BUSY where another job has made a run of its own there by
// now. Where this fails, the old lock is kept, so that nothing is wrong once a folder that was only out of reach is
// back.
bool folder_lock_again(const char *out, Error *error);

// Is there a run in the folder already: a checkpoint, or a line of metrics?
bool folder_has_run(const char *out);

// run.json of the run that --resume continues: takes its arguments for all flags that were not given, and refuses those
// that were given and may not change (EXIT_USAGE). Returns its lineage (the caller owns it), followed by the changes to
// repeat; NULL with the error filled in.
cJSON *run_json_resume(const char *out, TrainOptions *options, Error *error);

// Compares a data fingerprint with that of the run ("train" or "val"); other data is refused (EXIT_USAGE).
bool run_json_same_data(const char *out, const char *which, const char *fingerprint, Error *error);

// Writes run.json in one step: arguments, version and commit, data fingerprints (JSON text, NULL for none), lineage,
// and those changes of normalizer that the run made beyond the checkpoint that it continues from and still has to
// repeat (both arrays are copied).
bool run_json_write(const char *out, const TrainOptions *options, const char *train, const char *val,
                    const cJSON *lineage, const cJSON *to_repeat, Error *error);

// Adds to a lineage: {"step": N, "event": "start|init-from|attn-at-start|attn-switch", ...details as key, value, ...,
// NULL}.
void lineage_add(cJSON *lineage, int64_t step, const char *event, ...);

// Moves what a run did beyond the checkpoint of this step, its later changes of normalizer, from the lineage to an
// array of their own, which the caller owns. A checkpoint is usually saved before the change at its own step; `made`:
// the normalizer of one saved after it, otherwise NULL.
cJSON *lineage_cut(cJSON *lineage, int64_t step, const char *made);

// The normalizer after all of a lineage's changes, NULL where none is named.
const char *lineage_attn(const cJSON *lineage);

// Joins OUT and a name in a static buffer, good until the next call.
const char *folder_path(const char *out, const char *name);

#endif

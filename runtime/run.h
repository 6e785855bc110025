// The run folder: OUT/run.json, metrics.jsonl, samples.txt, ckpt/. One job at a time works in it.
#ifndef RUNTIME_RUN_H
#define RUNTIME_RUN_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

#include "runtime/error.h"
#include "runtime/train_options.h"

// Locks OUT/lock until the process ends, however it ends; called again, it does nothing. With `make` it makes folder and file where there are
// none; otherwise a folder without the file, which no run has used yet, is left as it is: so that nothing is written before all is checked.
// EXIT_BUSY where another job holds it, EXIT_RESOURCE where the folder cannot be written to.
bool run_lock(const char *out, bool make, Error *error);

// Is there a run in the folder already: a checkpoint, or a line of metrics?
bool run_exists(const char *out);

// run.json of the run that --resume continues: takes its arguments for all flags that were not given, and refuses those that were
// given and may not change (EXIT_USAGE). Returns its lineage (the caller owns it), NULL with the error filled in.
cJSON *run_resume(const char *out, TrainOptions *options, Error *error);

// Compares a data fingerprint with that of the run ("train" or "val"); other data is refused (EXIT_USAGE).
bool run_same_data(const char *out, const char *which, const char *fingerprint, Error *error);

// Writes run.json in one step: arguments, program version, data fingerprints (JSON text, NULL for none) and lineage (not consumed).
bool run_write(const char *out, const TrainOptions *options, const char *train, const char *val, const cJSON *lineage, Error *error);

// Adds to a lineage: {"step": N, "event": "start|init-from|attn-at-start|attn-switch", ...details as key, value, ..., NULL}.
void run_lineage_add(cJSON *lineage, int64_t step, const char *event, ...);

// Drops the changes of normaliser at this step or after it: what a run did beyond the checkpoint that it is continued from.
void run_lineage_cut(cJSON *lineage, int64_t step);

// Joins OUT and a name in a static buffer, good until the next call.
const char *run_path(const char *out, const char *name);

#endif

// OUT/run.json: the flags of a run, its data, and how it came about.
#ifndef RUN_RUN_JSON_H
#define RUN_RUN_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "run/train_options.h"
#include "runtime/error.h"

// What run.json keeps of a run besides its flags. `lineage`: how it began, and each change of normalizer. `history`: an
// object for each start and resume, of which `omitted` earlier ones are no longer listed; NULL in version 0.2.
// `arguments`: those before a resume, of which a run on a CPU keeps the flags of GPUs.
typedef struct {
    cJSON *lineage, *history;
    uint64_t omitted;
    cJSON *arguments;
} RunJson;

// Reads run.json for --resume: sets `before` to its arguments, uses them for all flags of `options` that were not
// given, and rejects given flags that a resumed run cannot change (EXIT_USAGE). *found: what else it has, with the
// switches to repeat at the end of the lineage; the caller owns it.
bool run_json_resume(const char *out, TrainOptions *options, TrainOptions *before, RunJson *found, Error *error);

// Returns the whole number that run.json has for this flag, or `otherwise` if it has none.
int64_t run_json_number(const char *out, const char *flag, int64_t otherwise);

// Compares the fingerprint of the "train" or "val" data with the run's. Different data is an error (EXIT_USAGE).
bool run_json_same_data(const char *out, const char *which, const char *fingerprint, Error *error);

// Writes run.json atomically: arguments, version, commit, data fingerprints (JSON text, or NULL), lineage, history, and
// the normalizer switches that the run made after the checkpoint from which it resumed and still has to repeat (all
// arrays are copied).
bool run_json_write(const char *out, const TrainOptions *options, const char *train, const char *val,
                    const RunJson *rest, const cJSON *to_repeat, Error *error);

#endif

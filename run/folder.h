// The run folder: OUT/run.json, metrics.jsonl, samples.txt, ckpt/. Only one job at a time may use it.
#ifndef RUN_FOLDER_H
#define RUN_FOLDER_H

#include <cjson/cJSON.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"
#include "runtime/file.h"
#include "run/train_options.h"
#include "runtime/shards.h"

// Fails with EXIT_USAGE if OUT is empty, or so long that the paths of files in it would exceed PATH_MAX.
bool folder_check_name(const char *out, Error *error);

// Locks OUT/lock until the process ends in any way. *lock is the descriptor that holds the lock, or -1 while there is
// none. Does nothing if *lock already holds one. `create` creates the folder and the lock file if they are missing;
// otherwise a folder without a lock file, which no run has used yet, is left unlocked, so that nothing is written
// before everything is checked. Fails with EXIT_BUSY if another job holds the lock, and with EXIT_RESOURCE if the
// folder is not writable.
bool folder_lock(int *lock, const char *out, bool create, Error *error);

// Does OUT still contain run.json and the lock that folder_lock() took? False once someone has removed or replaced the
// folder during the run.
bool folder_intact(int lock, const char *out);

// Takes the lock again after the folder was removed. Fails with EXIT_BUSY if another job has started a run there. On
// failure, the old lock is kept in case the folder was only temporarily unreachable.
bool folder_lock_again(int *lock, const char *out, Error *error);

// Does the folder already contain a run, that is, a checkpoint or a line of metrics? folder_is_new() fails with
// EXIT_USAGE if it does.
bool folder_has_run(const char *out);
bool folder_is_new(const char *out, Error *error);

// What run.json keeps of a run besides its flags. `lineage`: how it began, and each change of normalizer. `history`: an
// object for each start and resume, of which `omitted` earlier ones are no longer listed; NULL in version 0.2.
typedef struct {
    cJSON *lineage, *history;
    uint64_t omitted;
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

// Appends {"step": N, "event": "start|init-from|attn-at-start|attn-switch", ...} to a lineage. The details are key,
// value, ..., NULL. Returns the entry.
cJSON *lineage_add(cJSON *lineage, int64_t step, const char *event, ...);

// Removes normalizer switches after the checkpoint of this step from the lineage and returns them in an array that the
// caller owns. A checkpoint is usually saved before the switch at its own step. If it was saved after it, `made` is its
// normalizer, otherwise NULL.
cJSON *lineage_cut(cJSON *lineage, int64_t step, const char *made);

// Returns the normalizer after all switches of a lineage, or NULL if it names none.
const char *lineage_attn(const cJSON *lineage);

// OUT/name
typedef struct {
    char text[PATH_MAX];
} FolderPath;
FolderPath folder_path(const char *out, const char *name);

// The folder of a file; "." if the path names none.
FolderPath folder_of(const char *path);

// Does an id stand for the same token in both folders' tokenizer.json? One file may have more tokens than the other, or
// split text in another way. TOKENS_UNKNOWN: the files differ, and this program cannot read one of them.
typedef enum { TOKENS_EQUAL, TOKENS_DIFFER, TOKENS_UNKNOWN } TokenMatch;
TokenMatch folder_match_tokens(const char *folder, const char *other);    // TOKENS_EQUAL if a folder has none

// The same for the folders of all shards. Sets *other to the first of them that does not match, if there is one.
TokenMatch folder_match_shards(const char *folder, const Shards *shards, FolderPath *other);

// Adds what writes the file: "program", "version" and "commit".
void folder_add_program(cJSON *json);

#endif

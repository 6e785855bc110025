// Checkpoint folders OUT/ckpt/step-00001000: written under a temporary name, synced, and renamed, so that a folder
// named step-* is always whole. A kill at any point of a save leaves the one before, or the new one, whole.
//
//     Checkpoint c;
//     if (!checkpoint_begin(&c, out, step, &error)) ...
//     ok = safetensors_write(checkpoint_path(&c, "model.safetensors"), ..., &error)
//       && file_write_text(checkpoint_path(&c, "config.json"), text, &error)
//       && checkpoint_copy(&c, "data/tokenizer.json", &error)
//       && checkpoint_commit(&c, &error);
//     if (!ok) { checkpoint_abandon(&c); ... }
//
// One writer for a run folder; of several processes, only rank 0. Only one Checkpoint is begun at a time.
#ifndef RUN_CHECKPOINT_H
#define RUN_CHECKPOINT_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint64_t step;
    char root[PATH_MAX];      // OUT/ckpt
    char folder[PATH_MAX];    // OUT/ckpt/.tmp-step-00001000; empty when nothing is begun
    char path[PATH_MAX];      // what checkpoint_path() returned last
} Checkpoint;

// Makes OUT/ckpt/.tmp-step-%08d, after clearing away what killed saves have left.
bool checkpoint_begin(Checkpoint *c, const char *out_dir, uint64_t step, Error *error);

// The path of a file of this name in the temporary folder; good until the next call.
const char *checkpoint_path(Checkpoint *c, const char *file_name);

// Copies a file into the temporary folder, under its own name.
bool checkpoint_copy(Checkpoint *c, const char *from, Error *error);

// Writes manifest.json (size and XXH3-128 of every other file), syncs, renames to step-%08d and syncs OUT/ckpt. A
// folder of that step which is there already is replaced. Where this fails, checkpoint_abandon() cleans up.
bool checkpoint_commit(Checkpoint *c, Error *error);

// Removes the temporary folder and nothing else. Does nothing after a commit.
void checkpoint_abandon(Checkpoint *c);

// How often to look for a run's newest checkpoint again: beside a run that saves and prunes, what was found may be gone
// before it is read.
enum { CHECKPOINT_ATTEMPTS = 100 };

// After an error in reading a checkpoint: is its folder gone? Then look for the newest again. (Pruning renames a folder
// before it removes any file from it.)
bool checkpoint_vanished(const char *folder);

// The newest checkpoint of a run whose manifest is there and whose files have the sizes in it. False where there is
// none.
// Warns about each damaged one that it passes over. The hashes are checkpoint_verify's to check.
bool checkpoint_newest(const char *out_dir, char *path, size_t size, uint64_t *step);

// Is there any folder named step-*, whole or damaged?
bool checkpoint_any(const char *out_dir);

// Checks every file of manifest.json by size and hash. A folder without a manifest (one from Hugging Face) is an error
// unless `manifest_optional`.
bool checkpoint_verify(const char *folder, bool manifest_optional, Error *error);

// Deletes all whole checkpoints but the newest `keep` and the one of step `keep_also` (UINT64_MAX: none), each renamed
// to .trash-* first. keep = 0 keeps all. Damaged ones are left for you to look at.
bool checkpoint_prune(const char *out_dir, int keep, uint64_t keep_also, Error *error);

#ifdef __cplusplus
}
#endif
#endif

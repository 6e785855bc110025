// Checkpoint folders OUT/ckpt/step-00001000. They are written under a temporary name, synced and renamed, so that a
// folder named step-* is always complete. If the process is killed at any point of a save, either the previous or the
// new checkpoint is complete.
//
//     int root = -1;    // OUT/ckpt, open from the first save on
//     Checkpoint c;
//     if (!checkpoint_begin(&c, &root, out, step, &error)) ...
//     ok = file_write_text(c.folder_fd, checkpoint_path(&c, "config.json"), text, &error) && ...
//       && checkpoint_commit(&c, &error);
//     if (!ok) { checkpoint_abandon(&c); ... }
//
// A run folder has a single writer: rank 0.
#ifndef MODEL_CHECKPOINT_H
#define MODEL_CHECKPOINT_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"
#include "runtime/file.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CHECKPOINT_HASHES = 4 };

typedef struct {
    uint64_t step;
    int root_fd, folder_fd;    // the next two, open
    char root[PATH_MAX];       // OUT/ckpt
    char folder[PATH_MAX];     // OUT/ckpt/.tmp-step-00001000; empty if no checkpoint is open
    char path[PATH_MAX];       // the last result of checkpoint_path()
    struct {
        const char *name;
        FileHash hash;
    } hashes[CHECKPOINT_HASHES];
    size_t hash_count;
} Checkpoint;

// Creates OUT/ckpt, checks that it is a writable folder and not a link, and opens it as *root, which is -1 at first.
// Later calls fail if another folder, or a link, has taken its place; one that was removed is created again.
bool checkpoint_prepare(int *root, const char *out_dir, Error *error);

// Creates OUT/ckpt/.tmp-step-%08d after removing the leftovers of killed saves. `root` as for checkpoint_prepare().
bool checkpoint_begin(Checkpoint *c, int *root, const char *out_dir, uint64_t step, Error *error);

// Returns the path of this file in the temporary folder. It is valid until the next call.
const char *checkpoint_path(Checkpoint *c, const char *file_name);

// Returns where file_create() is to put the hash of this file, or NULL after CHECKPOINT_HASHES files.
// checkpoint_commit() reads every other file again to hash it, which takes a while if the file is large. The name is
// not copied.
FileHash *checkpoint_hash(Checkpoint *c, const char *file_name);

// Writes manifest.json (size and XXH3-128 of every other file), syncs, renames the folder to step-%08d, and syncs
// OUT/ckpt. Replaces an existing folder of that step. If this fails, call checkpoint_abandon() to clean up.
bool checkpoint_commit(Checkpoint *c, Error *error);

// Removes the temporary folder. Does nothing after a commit.
void checkpoint_abandon(Checkpoint *c);

// How often to search again for the newest checkpoint of a run that is still saving and pruning: the one that was found
// may be deleted before it is read.
enum { CHECKPOINT_ATTEMPTS = 100 };

// After an error while reading a checkpoint: has its folder been deleted? If so, search for the newest one again.
// (Pruning renames a folder before it removes any file in it.)
bool checkpoint_vanished(const char *folder);

// Finds the newest checkpoint of a run that has a manifest with all that a resume needs, and whose files have the sizes
// in it. Warns about each damaged one that it skips. Returns false if there is none. Use checkpoint_verify() to check
// the hashes.
bool checkpoint_newest(const char *out_dir, char *path, size_t size, uint64_t *step);

// Finds the checkpoint for a flag, --model or --init-from: this folder itself if it has config.json, otherwise its
// newest checkpoint, as that of a run. Fails with EXIT_INPUT if it is neither; `path` is then the given folder.
bool checkpoint_find(const char *flag, const char *given, char *path, size_t size, Error *error);

// Is there a checkpoint of this step, with all that a resume needs?
bool checkpoint_exists(const char *out_dir, uint64_t step);

// The number of folders named step-*, complete or damaged
size_t checkpoint_count(const char *out_dir);

// Checks every file in manifest.json by size and hash. The manifest must list config.json and model.safetensors, and
// also optimizer.safetensors and state.json unless `manifest_optional`. A folder without a manifest (from Hugging Face,
// say) is an error unless `manifest_optional`.
bool checkpoint_verify(const char *folder, bool manifest_optional, Error *error);

// Deletes all complete checkpoints except the newest `keep` and the one of step `keep_also` (UINT64_MAX: none). Each is
// first renamed to .trash-*. keep = 0 keeps all. Damaged checkpoints are kept for inspection. `root` as for
// checkpoint_prepare().
bool checkpoint_prune(int *root, const char *out_dir, int keep, uint64_t keep_also, Error *error);

#ifdef __cplusplus
}
#endif
#endif

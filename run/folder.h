// The run folder: OUT/run.json, metrics.jsonl, samples.txt, ckpt/. Only one job at a time may use it.
#ifndef RUN_FOLDER_H
#define RUN_FOLDER_H

#include <stdbool.h>

#include "runtime/error.h"

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

#endif

// Files that survive a crash: every write, fsync, rename and removal of this project goes through here.
//
// Errors: EXIT_RESOURCE where something cannot be written (disk full, no permission), EXIT_INPUT where something cannot
// be read. Built with -DFAULTS, each write, fsync, rename, mkdir and removal is a numbered fault point:
//   FAULT_AT=n        the n-th point (from 1) of the process fails,
//   FAULT_KIND=kill   by ending the process at once, before the act (the default); half: a write is done by half first;
//   FAULT_KIND=enospc or eio: the act fails with that errno, and the process goes on;
//   FAULT_COUNT=1     prints at exit how many points there were.
// Without -DFAULTS nothing of this is compiled in.
#ifndef RUNTIME_FILE_H
#define RUNTIME_FILE_H

#include <stddef.h>
#include <stdint.h>
#include <xxhash.h>

#include "error.h"

// What to do about an errno of open() that is not the path's fault (too many open files); for any other, `otherwise`.
const char *file_remedy(int number, const char *otherwise);

// ---- writing

// A file being written from its start. Pages go to the disk as they come, so that the fsync at the end has little left.
typedef struct File File;

// Creates or empties the file. NULL on error.
File *file_create(const char *path, Error *error);

// Appends `size` bytes.
bool file_write(File *file, const void *data, size_t size, Error *error);

// fsync, then close. The File is gone afterwards, whatever the result.
bool file_close(File *file, Error *error);

// Closes without fsync and removes the file: for use after a failed file_write.
void file_discard(File *file);

// Writes the text as the whole file, synced. Not atomic: for files in a folder that is renamed when whole.
bool file_write_text(const char *path, const char *text, Error *error);

// Replaces the file in one step: "PATH.tmp", fsync, rename, fsync of the folder. A reader sees the old text or the new.
bool file_replace_text(const char *path, const char *text, Error *error);

// Copies a file of any size to another path, synced.
bool file_copy(const char *to, const char *from, Error *error);

// When set, called at the end of each successful file_close with the size and XXH3-128 of what was written, so that a
// manifest needs no second reading. Hashing costs nothing while it is NULL.
extern void (*file_written)(const char *path, uint64_t size, XXH128_hash_t hash);

// ---- folders

// mkdir -p, each new folder synced into its parent. An existing one is fine.
bool file_make_folders(const char *path, Error *error);

// rename, then fsync of the folder that holds `to`. Both lie in the same folder.
bool file_rename(const char *from, const char *to, Error *error);

// fsync of a file or folder by name.
bool file_sync(const char *path, Error *error);

// Removes a file or a folder with everything in it; links are removed, not followed. Nothing there is fine.
bool file_remove_tree(const char *path, Error *error);

// Free bytes for this user on the file system of a path, or of its nearest existing parent.
bool file_free_space(const char *path, uint64_t *bytes, Error *error);

// ---- reading

// The whole file, with a 0 byte after its end (not counted in `size`, which may be NULL). Over `limit` bytes is an
// error.
// Free with free(). NULL on error.
char *file_read(const char *path, size_t limit, size_t *size, Error *error);

// XXH3-128 and size of a file, read in pieces.
bool file_hash(const char *path, uint64_t *size, XXH128_hash_t *hash, Error *error);

// Reads exactly `size` bytes at `offset`; a shorter file is an error that names the offset.
bool file_read_at(int fd, const char *path, void *out, size_t size, uint64_t offset, Error *error);

#endif

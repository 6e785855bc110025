// Crash-safe files. All programs write, sync, rename and remove files through these functions.
//
// Errors: EXIT_RESOURCE if something cannot be written (disk full, no permission), EXIT_INPUT if something cannot be
// read. With -DFAULTS, each write, fsync, rename, mkdir and removal is a numbered fault point:
//   FAULT_AT=n               the n-th fault point of the process (from 1) fails
//   FAULT_KIND=kill          the process dies before the operation (the default); half: it dies after half of a write
//   FAULT_KIND=enospc, eio   the operation fails with that errno, and the process continues
//   FAULT_COUNT=1            prints the number of fault points at exit
// Without -DFAULTS, none of this is compiled in.
#ifndef RUNTIME_FILE_H
#define RUNTIME_FILE_H

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>
#include <xxhash.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

// The remedy for an errno of open() that the path did not cause (too many open files); `otherwise` for any other errno.
const char *file_remedy(int number, const char *otherwise);

// `text` as one word of a shell command, in quotes if it needs them. Use: printf("%s", shell_word(path).text).
typedef struct {
    char text[8192];
} ShellWord;

ShellWord shell_word(const char *text);

// ---- writing

// Nothing is written through a link, and what has a new file's name goes first (runtime/own.h). With `folder`, an open
// folder, a path's last part names a file in it, and the rest of the path is only for messages: wherever somebody moves
// that folder, or what they put in its place, no other folder is touched. AT_FDCWD: the path is used as it is.

// A file that is being written from its start. Write-back to disk starts early, so the final fsync has little left to
// do.
typedef struct File File;

typedef struct {
    uint64_t size;
    XXH128_hash_t xxh3;
} FileHash;

// Creates the file, in place of an existing one. `folder` must stay open until the file is closed. If `hash` is not
// NULL, file_close() sets it, so that a manifest needs no second pass over the file. Returns NULL on error.
File *file_create(int folder, const char *path, FileHash *hash, Error *error);

// Appends `size` bytes.
bool file_write(File *file, const void *data, size_t size, Error *error);

// Syncs and closes the file. If this fails, removes it. The File is freed in any case.
bool file_close(File *file, Error *error);

// Closes the file without fsync and removes it. Use it after a failed file_write.
void file_discard(File *file);

// Writes the text as the whole file and syncs it. Not atomic: use it in a folder that is renamed once it is complete.
// NULL in place of a text is an error: the memory for it ran out.
bool file_write_text(int folder, const char *path, const char *text, Error *error);

// Replaces the file atomically: writes PATH.tmp, fsync, rename, fsync of the folder. Readers see the old or the new
// text. NULL is an error, as for file_write_text().
bool file_replace_text(const char *path, const char *text, Error *error);

// ---- folders

// mkdir -p; syncs the parent of each new folder. The folder may exist already.
bool file_make_folders(const char *path, Error *error);

// Creates a folder, in which nothing can be yet, syncs its parent, and returns its descriptor, or -1 on error.
int file_make_folder(int folder, const char *path, Error *error);

// Renames, then syncs the folder that contains `to`. Both paths must be in the same folder.
bool file_rename(int folder, const char *from, const char *to, Error *error);

// fsync of a file or folder, given by its path.
bool file_sync(int folder, const char *path, Error *error);

// Removes a file, or a folder and everything in it. Removes symbolic links without following them. Succeeds if nothing
// exists at the path.
bool file_remove_tree(int folder, const char *path, Error *error);

// Cuts the last part off a path: "a/b" becomes "a", "a" becomes ".", "/a" becomes "/".
void file_cut_last(char *path);

// Bytes available to this user on the file system of the path, or of its nearest existing parent.
bool file_free_space(const char *path, uint64_t *bytes, Error *error);

// ---- reading

// Only regular files are read, up to a limit for each kind of file: a pipe may block, and a device may never end.

// Opens a file. Returns -1 on error, whose message ends with `remedy`, a sentence.
int file_open(const char *path, const char *remedy, uint64_t *size, Error *error);

// The length of the byte order mark with which some programs begin a text in UTF-8, or 0. The functions below that read
// a text leave it out.
size_t file_mark(const char *text, size_t length);

// Returns the whole file, followed by a 0 byte that `size` (may be NULL) does not count. A file of more than `limit`
// bytes is an error. The caller frees the result. Returns NULL on error.
char *file_read(const char *path, size_t limit, size_t *size, Error *error);

// The same, unless the file is a link out of the folder. The blobs of a Hugging Face cache, whose folders
// snapshots/REVISION contain links into ../../blobs, are inside.
char *file_read_inside(const char *folder, const char *path, size_t limit, size_t *size, Error *error);

// Fails if file_read_inside() would because of a link.
bool file_check_inside(const char *folder, const char *path, Error *error);

// The same as file_read() for a file that the user may also give as a pipe, such as /dev/stdin. NULL: standard input.
char *file_read_stream(const char *path, size_t limit, size_t *size, Error *error);

// fopen() for reading the system's own files, in /proc and /sys. Returns NULL on error.
FILE *file_open_system(const char *path);

// A text file that is read line by line.
typedef struct FileLines FileLines;

// Returns NULL on error. A line of more than `limit` bytes is an error.
FileLines *file_lines_open(const char *path, size_t limit, Error *error);
void file_lines_close(FileLines *lines);    // NULL is allowed

typedef struct {
    const char
        *text;    // without its newline, followed by a 0 byte; valid until the next call. NULL after the last line
    size_t length;
    size_t number;      // from 1
    uint64_t offset;    // of its first byte in the file
} FileLine;

// Sets *line to the next line.
bool file_lines_next(FileLines *lines, FileLine *line, Error *error);

// The size and XXH3-128 of what has been read. After the last line: those of the file.
FileHash file_lines_hash(const FileLines *lines);

// Computes the size and XXH3-128 of a file of at most `limit` bytes. `folder` as for writing.
bool file_hash(int folder, const char *path, uint64_t limit, FileHash *hash, Error *error);

// 32 hexadecimal digits, as `xxhsum -H2` prints them.
typedef struct {
    char text[33];
} HashText;
HashText file_hash_text(XXH128_hash_t hash);

// Reads `size` bytes at `offset`, or fewer at the end of the file. Returns how many, or -1 with errno set on error.
ssize_t file_read_up_to(int fd, void *out, size_t size, uint64_t offset);

// Reads exactly `size` bytes at `offset`. If the file is too short, the error names the offset.
bool file_read_at(int fd, const char *path, void *out, size_t size, uint64_t offset, Error *error);

#ifdef __cplusplus
}
#endif
#endif

// Opens files and folders to write to. Where a program writes, another user, or whoever packed an archive, may have
// left a link, a FIFO or a second name of somebody's file under a name that the program uses. None of these functions
// writes through one.
#ifndef RUNTIME_OWN_H
#define RUNTIME_OWN_H

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

// Creates a new, empty file, in an open folder or (AT_FDCWD) at a path, and returns its descriptor for writing. What
// has that name goes first, whatever it is; only a folder is an error. Returns -1 with errno set on error.
int own_create(int folder, const char *name);

// Opens a regular file that has no other name (hard link), and is not a link. `flags` are those of open(), among them
// O_CREAT if it may be missing. Returns -1 with *reason and errno set on error: EEXIST if something else is there.
int own_open(const char *path, int flags, const char **reason);

// What to do about a file of the run folder that own_open() has just failed to open.
const char *own_remedy(void);

// Opens a folder that is not a link, in an open folder or (AT_FDCWD) at a path. Returns -1 with errno set on error.
int own_folder(int folder, const char *name);

// Is this name a link?
bool own_is_link(int folder, const char *name);

// Fails (EXIT_RESOURCE) if this folder, the one that contains it, or, before it exists, the one where it will be
// created, belongs to another user and everybody may write to it: they could exchange what a program writes there. A
// folder that contains it may have the sticky bit, as /tmp does. `foreign`: --foreign-folder, which allows all.
bool own_check(const char *path, bool foreign, Error *error);

#ifdef __cplusplus
}
#endif
#endif

// Paths of files in a folder, and of the folder of a file.
#ifndef RUNTIME_PATH_H
#define RUNTIME_PATH_H

#include <limits.h>

// FOLDER/NAME
typedef struct {
    char text[PATH_MAX];
} FolderPath;
FolderPath folder_path(const char *folder, const char *name);

// The folder of a file; "." if the path names none.
FolderPath folder_of(const char *path);

#endif

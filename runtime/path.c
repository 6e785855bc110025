#include "runtime/path.h"

#include <stdio.h>
#include <string.h>

FolderPath folder_path(const char *folder, const char *name) {
    FolderPath path;
    snprintf(path.text, sizeof path.text, "%s/%s", folder, name);
    return path;
}

FolderPath folder_of(const char *path) {
    FolderPath folder;
    snprintf(folder.text, sizeof folder.text, "%s", path);
    char *slash = strrchr(folder.text, '/');
    if (slash) *slash = 0;
    else strcpy(folder.text, ".");
    return folder;
}

#include "runtime/path.h"

#include <stdio.h>

#include "runtime/file.h"

FolderPath folder_path(const char *folder, const char *name) {
    FolderPath path;
    snprintf(path.text, sizeof path.text, "%s/%s", folder, name);
    return path;
}

FolderPath folder_of(const char *path) {
    FolderPath folder;
    snprintf(folder.text, sizeof folder.text, "%s", path);
    file_cut_last(folder.text);
    return folder;
}

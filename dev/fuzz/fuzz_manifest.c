// Reads a checkpoint folder whose manifest.json is hostile: no file outside the folder may be opened, and the folder
// either is rejected or agrees with its manifest.
#include <stdlib.h>
#include <string.h>

#include "dev/fuzz/folder.h"
#include "model/checkpoint.h"
#include "runtime/file.h"

static void make_file(const char *folder) {
    char path[200];
    Error error;
    static const char *const names[] = {"config.json", "model.safetensors", "a"};
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        if (!file_write_text(AT_FDCWD, path, "x", &error)) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Error error = {0};
    const char *folder = fuzz_folder(make_file);
    fuzz_file("manifest.json", bytes, size);
    if (checkpoint_verify(folder, true, &error)) return 0;
    if (error.code != EXIT_INPUT || !strstr(error.text, folder) || !strstr(error.text, "\n  ")) abort();
    return 0;
}

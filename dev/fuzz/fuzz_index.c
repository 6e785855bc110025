// Reads a sharded folder whose model.safetensors.index.json is hostile.
#include <stdlib.h>
#include <string.h>

#include "dev/fuzz/folder.h"
#include "model/safetensors.h"

static void make_shards(const char *folder) {
    char path[200];
    Error error;
    float value = 1;
    for (char name[] = "a"; *name <= 'b'; ++*name) {
        TensorRow row = {name, DTYPE_F32, 0, {0}, &value};
        snprintf(path, sizeof path, "%s/%s.safetensors", folder, name);
        if (!safetensors_write(AT_FDCWD, path, &row, 1, NULL, NULL, &error)) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Error error = {0};
    const char *folder = fuzz_folder(make_shards);
    fuzz_file("model.safetensors.index.json", bytes, size);
    Safetensors *s = safetensors_open(folder, &error);
    if (!s && (error.code != EXIT_INPUT || !strstr(error.text, folder) || !strstr(error.text, "\n  "))) abort();
    for (size_t i = 0; s && i < safetensors_count(s); i++) {
        float value = 0;
        if (!safetensors_read(s, safetensors_at(s, i)->name, 0, NULL, &value, &error) || value != 1) abort();
    }
    safetensors_close(s);
    return 0;
}

// Reads a hostile shard, with a mask if the input starts with 'm' (then 16 bits with the shard's size, the shard, the
// mask). Either it is rejected with a message that names it, or every window can be read, with ids and mask values in
// range.
#include <stdlib.h>
#include <string.h>

#include "data/shards.h"
#include "dev/fuzz/folder.h"

enum { LENGTH = 8 };

static void read_all(const char *glob, PackMode pack) {
    Error error = {0};
    int32_t tokens[LENGTH + 1];
    uint8_t mask[LENGTH];
    ShardsConfig config = {
        .T = LENGTH, .vocab = 50257, .end_of_text = 50256, .seed = 1, .shuffle = true, .pack = pack, .min_windows = 1};
    Shards *shards = shards_open(glob, config, &error);
    if (!shards && (error.code != EXIT_INPUT || !strstr(error.text, fuzz_path))) abort();
    for (uint64_t g = 0; shards && g < shards_windows(shards); g++) {
        if (!shards_window(shards, g, tokens, mask, &error)) break;
        for (int t = 0; t <= LENGTH; t++)
            if (tokens[t] < 0 || tokens[t] >= 50257) abort();
        for (int t = 0; t < LENGTH; t++)
            if (mask[t] > 1) abort();
    }
    if (shards) shards_check_all(shards, &error);
    shards_close(shards);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    char glob[200];
    const char *folder = fuzz_folder(NULL);
    snprintf(glob, sizeof glob, "%s/x_train_000000.mask", folder);
    unlink(glob);
    if (size > 3 && bytes[0] == 'm') {
        size_t split = bytes[1] + 256 * (size_t)bytes[2];
        if (split > size - 3) split = size - 3;
        fuzz_file("x_train_000000.bin", bytes + 3, split);
        fuzz_file("x_train_000000.mask", bytes + 3 + split, size - 3 - split);
    } else {
        fuzz_file("x_train_000000.bin", bytes, size);
    }
    snprintf(glob, sizeof glob, "%s/*.bin", folder);
    read_all(glob, PACK_STREAM);
    read_all(glob, PACK_EXAMPLE);
    return 0;
}

// Reads a hostile tokenizer.json: either it is rejected with a message that names it, or a text that it encodes decodes
// to the same bytes.
//
// Sources: runtime/error.c runtime/file.c runtime/json.c runtime/tokenizer.c
#include <stdlib.h>
#include <string.h>

#include "dev/fuzz/folder.h"
#include "runtime/tokenizer.h"

static void make_nothing(const char *folder) {
    (void)folder;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const char text[] = "the the  then it's 1234 \xC3\xA9\xF0\x9F\x98\x80\n\t<|endoftext|>";
    enum { LENGTH = sizeof text - 1 };
    Error error = {0};
    int32_t ids[LENGTH];
    size_t at = 0, length;
    const char *folder = fuzz_folder(make_nothing);
    fuzz_file("tokenizer.json", bytes, size);
    Tokenizer *tokenizer = tokenizer_open(folder, &error);
    if (!tokenizer) {
        if (error.code != EXIT_INPUT || !strstr(error.text, folder)) abort();
        return 0;
    }
    size_t count = tokenizer_encode(tokenizer, text, LENGTH, ids, LENGTH);
    if (count > LENGTH) abort();
    for (size_t i = 0; i < count; i++) {
        const char *token = tokenizer_token(tokenizer, ids[i], &length);
        if (!token || length > LENGTH - at || memcmp(token, text + at, length)) abort();
        at += length;
    }
    if (at != LENGTH) abort();
    tokenizer_close(tokenizer);
    return 0;
}

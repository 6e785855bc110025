// Reads a hostile tokenizer.json: either it is rejected with a message that names it, or a text that it encodes decodes
// to the same bytes, without those that have no token.
//
// Sources: runtime/error.c runtime/file.c runtime/json.c runtime/tokenizer.c
#include <stdlib.h>
#include <string.h>

#include "dev/fuzz/folder.h"
#include "runtime/tokenizer.h"

static const char text[] = "the the  then it's 1234 \xC3\xA9  \xC2\xBD\xF0\x9F\x98\x80\n\t<|endoftext|>";
enum { LENGTH = sizeof text - 1 };

static void make_nothing(const char *folder) {
    (void)folder;
}

// Encodes text and decodes the ids. The result has some of the bytes, in order; returns how many.
static size_t decoded(const Tokenizer *tokenizer, const char *from, size_t size, char *out) {
    int32_t ids[LENGTH];
    size_t count = tokenizer_encode(tokenizer, from, size, ids, LENGTH), kept = 0, length;
    if (count > size) abort();
    for (size_t i = 0; i < count; i++) {
        const char *token = tokenizer_token(tokenizer, ids[i], &length);
        if (!token || length > size - kept) abort();
        memcpy(out + kept, token, length);
        kept += length;
    }
    for (size_t i = 0, at = 0; i < kept; i++, at++) {
        while (at < size && from[at] != out[i]) at++;
        if (at == size) abort();
    }
    return kept;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Error error = {0};
    const char *folder = fuzz_folder(make_nothing);
    fuzz_file("tokenizer.json", bytes, size);
    Tokenizer *tokenizer = tokenizer_open(folder, &error);
    if (!tokenizer) {
        if (error.code != EXIT_INPUT || !strstr(error.text, folder)) abort();
        return 0;
    }
    // Whether a byte has a token does not depend on its neighbors.
    char whole[LENGTH], character[4];
    size_t kept = decoded(tokenizer, text, LENGTH, whole), at = 0;
    for (size_t i = 0, width; i < LENGTH; i += width) {
        for (width = 1; i + width < LENGTH && (text[i + width] & 0xC0) == 0x80;) width++;
        size_t length = decoded(tokenizer, text + i, width, character);
        if (length > kept - at || memcmp(whole + at, character, length)) abort();
        at += length;
    }
    if (at != kept) abort();
    tokenizer_close(tokenizer);
    return 0;
}

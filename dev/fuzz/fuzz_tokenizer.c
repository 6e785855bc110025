// Reads a hostile tokenizer.json: either it is rejected with a message that names it, or a text that it encodes has no
// more ids than promised, all of them tokens. Where text is not normalized, they decode to its bytes, without those
// that have no token.
#include <stdlib.h>
#include <string.h>

#include "dev/fuzz/folder.h"
#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"

static const char text[] =
    "the the  then it's 1234 \xC3\xA9  \xC2\xBD\xF0\x9F\x98\x80\n\t<|endoftext|>e\xCC\x81\xCC\xA3 it'S.\r\n\n \xE2\x96\x81";
static const char broken[] = "the \xFF\xE2\x96 1\xF0\x9F\x98 \xED\xA0\x80";
enum { LENGTH = sizeof text - 1 };

// Encodes text and decodes the ids. Returns the number of bytes.
static size_t decoded(const Tokenizer *tokenizer, TextPlace place, const char *from, size_t size, char *out) {
    int32_t ids[3 * LENGTH + 1];
    size_t count = tokenizer_encode_at(tokenizer, place, from, size, ids, 3 * LENGTH + 1), written = 0, length;
    if (count > tokenizer_capacity(size)) abort();
    for (size_t i = 0; i < count; i++) {
        const char *token = tokenizer_token(tokenizer, ids[i], &length);
        if (!token || length > 3 * LENGTH + 1 - written) abort();
        memcpy(out + written, token, length);
        written += length;
    }
    return written;
}

// Each byte of `part` occurs in `whole`, in order.
static void check_part(const char *part, size_t length, const char *whole, size_t size) {
    for (size_t i = 0, at = 0; i < length; i++, at++) {
        while (at < size && whole[at] != part[i]) at++;
        if (at == size) abort();
    }
}

// Whether a byte has a token does not depend on its neighbors, unless some of them are added tokens.
static void check_characters(const Tokenizer *tokenizer, const char *whole, size_t kept) {
    char character[3 * LENGTH + 1];
    size_t at = 0;
    for (size_t i = 0, width; i < LENGTH; i += width) {
        for (width = 1; i + width < LENGTH && (text[i + width] & 0xC0) == 0x80;) width++;
        size_t length = decoded(tokenizer, INSIDE, text + i, width, character);
        if (length > kept - at || memcmp(whole + at, character, length)) abort();
        at += length;
    }
    if (at != kept) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Error error = {0};
    char whole[3 * LENGTH + 1];
    const char *folder = fuzz_folder(NULL);
    fuzz_file("tokenizer.json", bytes, size);
    Tokenizer *tokenizer = tokenizer_open(folder, &error);
    if (!tokenizer) {
        if (error.code != EXIT_INPUT || !strstr(error.text, folder)) abort();
        return 0;
    }
    decoded(tokenizer, AT_START, broken, sizeof broken - 1, whole);
    decoded(tokenizer, AFTER_SPECIAL, text, LENGTH, whole);
    size_t kept = decoded(tokenizer, INSIDE, text, LENGTH, whole);
    bool plain = true;
    for (size_t i = 0; i < tokenizer->added_count; i++) plain = plain && tokenizer->added[i].special;
    if (plain && !tokenizer->nfc && !tokenizer->characters) check_part(whole, kept, text, LENGTH);
    if (plain && !tokenizer->nfc && !tokenizer->whole_words) check_characters(tokenizer, whole, kept);
    tokenizer_close(tokenizer);
    return 0;
}

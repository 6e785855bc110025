#include "data/tokens_match.h"

#include <fcntl.h>
#include <string.h>

#include "runtime/file.h"
#include "runtime/json.h"
#include "text/tokenizer.h"

static bool tokens_differ(const Tokenizer *a, const Tokenizer *b) {
    for (int32_t id = 0; id < tokenizer_vocab(a) && id < tokenizer_vocab(b); id++) {
        size_t length, other_length;
        const char *token = tokenizer_token(a, id, &length), *other = tokenizer_token(b, id, &other_length);
        if (token && other && (length != other_length || memcmp(token, other, length) != 0)) return true;
    }
    return false;
}

TokenMatch tokens_match(const char *folder, const char *other) {
    FileHash a, b;
    Error ignored;
    if (!file_hash(AT_FDCWD, folder_path(folder, tokenizer_files[0]).text, JSON_LARGE, &a, &ignored) ||
        !file_hash(AT_FDCWD, folder_path(other, tokenizer_files[0]).text, JSON_LARGE, &b, &ignored) ||
        XXH128_isEqual(a.xxh3, b.xxh3))
        return TOKENS_EQUAL;
    Tokenizer *one = tokenizer_open(folder, &ignored), *two = tokenizer_open(other, &ignored);
    TokenMatch match = TOKENS_UNKNOWN;
    if (one && two) match = tokens_differ(one, two) ? TOKENS_DIFFER : TOKENS_EQUAL;
    tokenizer_close(one);
    tokenizer_close(two);
    return match;
}

TokenMatch tokens_match_shards(const char *folder, const Shards *shards, FolderPath *other) {
    FolderPath last = {""};
    for (size_t i = 0; i < shards_count(shards); i++) {
        *other = folder_of(shards_path(shards, i));
        if (!strcmp(other->text, last.text)) continue;
        last = *other;
        TokenMatch match = tokens_match(folder, other->text);
        if (match != TOKENS_EQUAL) return match;
    }
    return TOKENS_EQUAL;
}

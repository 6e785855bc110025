// Any bytes as text: made valid UTF-8, normalized, and split into words in each way.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/utf8.h"
#include "text/nfc.h"
#include "text/pretokenize.h"

// Words follow one another without a gap, none is empty, and none ends within a character.
static void check_words(const uint8_t *text, size_t length) {
    for (int split = SPLIT_GPT2; split <= SPLIT_NONE; split++) {
        Words words = {.split = (Split)split, .s = text, .n = length};
        while (words.at < length) {
            size_t start = words.at;
            words_next(&words);
            if (words.at <= start || words.at > length) abort();
            if (words.at < length && (text[words.at] & 0xC0) == 0x80) abort();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    uint8_t *text = malloc(3 * size + 1), *once = malloc(9 * size + 1), *twice = malloc(27 * size + 1);
    if (!text || !once || !twice) exit(EXIT_RESOURCE);
    size_t length = utf8_repair(bytes, size, text);
    if (utf8_valid(text, length) != length) abort();
    size_t normal = nfc(text, length, once);
    if (normal > 3 * length || utf8_valid(once, normal) != normal) abort();
    if (nfc(once, normal, twice) != normal || memcmp(once, twice, normal) != 0) abort();
    check_words(text, length);
    free(text);
    free(once);
    free(twice);
    return 0;
}

// Splits text into the words that BPE merges within.
#ifndef TEXT_PRETOKENIZE_H
#define TEXT_PRETOKENIZE_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

typedef enum {
    SPLIT_GPT2,      // GPT-2's pattern, which is ByteLevel's
    SPLIT_DIGITS,    // every digit is cut out first, then GPT-2's pattern splits what lies between (SmolLM2)
    SPLIT_LLAMA3,    // Llama 3's pattern: numbers of at most three digits
    SPLIT_QWEN,      // the same with single digits, as in Qwen2 and Qwen3
    SPLIT_SPACES,    // before each run of spaces
    SPLIT_NONE       // not at all
} Split;

// Finds the split of a regular expression, as tokenizer.json writes it. Returns false if it is none of ours.
bool split_of_pattern(const char *pattern, Split *split);

// Goes through the words of n bytes of valid UTF-8; start with {.split, .s, .n}. After each call, a word ends at `at`.
typedef struct {
    Split split;
    const uint8_t *s;
    size_t n, at, part;    // part: the end of what the pattern may look at
} Words;

// Moves `at` to the end of the next word. Call it while at < n.
void words_next(Words *words);

#endif

// The patterns, written out as code.
//
// GPT-2:    '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// Llama 3 and Qwen: PATTERNS below
#include "text/pretokenize.h"

#include <string.h>

#include "runtime/search.h"
#include "runtime/utf8.h"
#include "text/tokenizer_classes.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define PATTERN(numbers)                                                                     \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" numbers                    \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const struct {
    const char *pattern;
    Split split;
} PATTERNS[] = {
    {PATTERN("\\p{N}{1,3}"), SPLIT_LLAMA3},
    {PATTERN("\\p{N}"), SPLIT_QWEN},
};

bool split_of_pattern(const char *pattern, Split *split) {
    for (size_t i = 0; i < COUNT(PATTERNS); i++) {
        if (strcmp(pattern, PATTERNS[i].pattern) != 0) continue;
        *split = PATTERNS[i].split;
        return true;
    }
    return false;
}

// ---- characters

static CharClass class_of(uint32_t code) {
    if (code < 0x80) {
        if ((code | 0x20) - 'a' < 26) return LETTER;
        if (code - '0' < 10) return NUMBER;
        return code == ' ' || code - '\t' < 5 ? SPACE : OTHER;
    }
    size_t at = SEARCH(char_ranges, last, code);    // the first range that ends at or after code
    bool inside = at < COUNT(char_ranges) && char_ranges[at].first <= code;
    return inside ? char_ranges[at].class : OTHER;
}

// Is this a digit, superscript, fraction or other number? The library's Digits asks Rust, which knows a newer Unicode
// than the pattern does.
static bool is_number(uint32_t code) {
    if (class_of(code) == NUMBER) return true;
    for (size_t i = 0; i < COUNT(more_numbers); i++)
        if (code >= more_numbers[i].first && code <= more_numbers[i].last) return true;
    return false;
}

// The class of the character at `at`, whose end goes to *end. `n` is allowed: OTHER, with *end = n.
static CharClass class_at(const uint8_t *s, size_t n, size_t at, size_t *end) {
    size_t width = 0;
    CharClass class = at < n ? class_of(utf8_get(s + at, n - at, &width)) : OTHER;
    *end = at + width;
    return class;
}

// Returns the end of the run of at most `limit` characters of one class that starts at `at`. Sets *last to the start of
// its last character.
static size_t run_end(const uint8_t *s, size_t n, size_t at, CharClass class, size_t limit, size_t *last) {
    size_t end;
    for (; at < n && limit && class_at(s, n, at, &end) == class; limit--) {
        *last = at;
        at = end;
    }
    return at;
}

static bool is_newline(uint8_t c) {
    return c == '\r' || c == '\n';
}

// ---- GPT-2's pattern

static size_t contraction_length(const uint8_t *s, size_t n) {
    if (n < 2 || s[0] != '\'') return 0;
    if (strchr("sdmt", s[1]) && s[1]) return 2;
    return n > 2 && (!memcmp(s + 1, "ll", 2) || !memcmp(s + 1, "ve", 2) || !memcmp(s + 1, "re", 2)) ? 3 : 0;
}

// Returns the end of the word that starts at `at`.
static size_t gpt2_end(const uint8_t *s, size_t n, size_t at) {
    size_t short_form = contraction_length(s + at, n - at);
    if (short_form) return at + short_form;
    size_t end, last = at, start = at + (s[at] == ' ');    // a leading space may belong to the word
    CharClass class = class_at(s, n, start, &end);
    if (start < n && class != SPACE) return run_end(s, n, start, class, n, &last);
    end = run_end(s, n, at, SPACE, n, &last);
    return end == n || last == at ? end : last;    // the last space of a run belongs to the next word
}

// Returns the end of the part of the text that starts at `at` and that the pattern may look at: one digit, or all up to
// the next digit.
static size_t digits_end(const uint8_t *s, size_t n, size_t at) {
    size_t width;
    if (is_number(utf8_get(s + at, n - at, &width))) return at + width;
    while (at < n && !is_number(utf8_get(s + at, n - at, &width))) at += width;
    return at;
}

// ---- Llama 3's pattern

static uint8_t lower(uint8_t c) {
    return c >= 'A' && c <= 'Z' ? c | 0x20 : c;
}

// Like contraction_length(), in any case. That includes U+017F, the long s, which is a lower case of S.
static size_t any_case_contraction_length(const uint8_t *s, size_t n) {
    uint8_t small[3] = {0};
    for (size_t i = 0; i < 3 && i < n; i++) small[i] = lower(s[i]);
    if (n > 2 && small[0] == '\'' && s[1] == 0xC5 && s[2] == 0xBF) return 3;
    return contraction_length(small, n < 3 ? n : 3);
}

// Returns the end of the run of spaces that starts at `at`, or what of it the pattern takes: up to the last newline, or
// all but the last space if a word follows.
static size_t spaces_end(const uint8_t *s, size_t n, size_t at) {
    size_t last = at, end = run_end(s, n, at, SPACE, n, &last), newline = end;
    while (newline > at && !is_newline(s[newline - 1])) newline--;
    if (newline > at) return newline;
    return end == n || last == at ? end : last;
}

// Returns the end of the word that starts at `at`.
static size_t llama3_end(const uint8_t *s, size_t n, size_t at, size_t digits) {
    size_t short_form = any_case_contraction_length(s + at, n - at), first_end, end, last;
    if (short_form) return at + short_form;
    CharClass class = class_at(s, n, at, &first_end);
    if (class == NUMBER) return run_end(s, n, at, NUMBER, digits, &last);
    if (class == LETTER) return run_end(s, n, at, LETTER, n, &last);
    bool led = !is_newline(s[at]) && first_end < n && class_at(s, n, first_end, &end) == LETTER;
    if (led) return run_end(s, n, first_end, LETTER, n, &last);
    size_t start = at + (s[at] == ' ');
    if (start == n || class_at(s, n, start, &end) != OTHER) return spaces_end(s, n, at);
    end = run_end(s, n, start, OTHER, n, &last);
    while (end < n && is_newline(s[end])) end++;
    return end;
}

// ---- all

static size_t space_words_end(const uint8_t *s, size_t n, size_t at) {
    while (at < n && s[at] == ' ') at++;
    while (at < n && s[at] != ' ') at++;
    return at;
}

void words_next(Words *w) {
    if (w->at == w->part) w->part = w->split == SPLIT_DIGITS ? digits_end(w->s, w->n, w->at) : w->n;
    switch (w->split) {
    case SPLIT_GPT2:
    case SPLIT_DIGITS: w->at = gpt2_end(w->s, w->part, w->at); break;
    case SPLIT_LLAMA3: w->at = llama3_end(w->s, w->n, w->at, 3); break;
    case SPLIT_QWEN: w->at = llama3_end(w->s, w->n, w->at, 1); break;
    case SPLIT_SPACES: w->at = space_words_end(w->s, w->n, w->at); break;
    case SPLIT_NONE: w->at = w->n; break;
    }
}

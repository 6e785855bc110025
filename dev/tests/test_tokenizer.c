// The C tokenizer with a small vocabulary made here: splitting, merging, invalid UTF-8, and files that must be
// rejected. dev/tests/test_tokenizer.py compares it with tiktoken on megabytes of text.
#include "dev/tests/check.h"
#include "text/tokenizer.h"

static char path[] = "/tmp/test_tokenizer_XXXXXX";

// ---- a tokenizer.json: the 256 bytes are ids 0 to 255, followed by the results of the merges and end-of-text

static const char *const default_merges =
    "\"a a\",\"aa aa\",\"b c\",\"a b\",\"\xC4\xA0 a\",\"' s\",\"\xC4\xA0 \xC4\xA0\"";
static const char *const default_joints[] = {"aa",
                                             "aaaa",
                                             "bc",
                                             "ab",
                                             "\xC4\xA0"
                                             "a",
                                             "'s",
                                             "\xC4\xA0\xC4\xA0",
                                             NULL};

// Appends byte b's character in the alphabet of tokenizer.json, escaped.
static int byte_name(char *out, int b) {
    int next = 0x100, code = b;
    for (int i = 0; i < b; i++) { next += !((i >= 0x21 && i <= 0x7E) || (i >= 0xA1 && i != 0xAD)); }
    if (!((b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD))) { code = next; }
    return sprintf(out, "\\u%04x", code);
}

static void write_text(const char *text, size_t length) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(text, 1, length, file) != length || fclose(file)) { exit(4); }
}

static char json[1 << 16];

static void make_json(const char *merges, const char *end_of_text, int skip_byte) {
    char *at =
        json + sprintf(json, "{\"added_tokens\":[{\"id\":263,\"content\":\"%s\"}],\"normalizer\":null,", end_of_text);
    at += sprintf(at, "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},");
    at += sprintf(at, "\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (int b = 0; b < 256; b++) {
        *at++ = '"';
        at += b == skip_byte ? sprintf(at, "zzz") : byte_name(at, b);
        at += sprintf(at, "\":%d,", b);
    }
    for (int i = 0; default_joints[i]; i++) {
        at += sprintf(at, "%s\"%s\":%d", i ? "," : "", default_joints[i], 256 + i);
    }
    sprintf(at, "},\"merges\":[%s]}}", merges);
}

// ---- encoding

static void encodes(const Tokenizer *t, const char *text, size_t length, const int32_t *expected, size_t count) {
    check_case();
    int32_t ids[256];
    size_t found = tokenizer_encode(t, text, length, ids, 256);
    CHECK(found == count && memcmp(ids, expected, count * sizeof(*ids)) == 0, "\"%s\": %zu ids, expected %zu", text,
          found, count);
}

#define ENCODES(t, text, ...) encodes(t, text, sizeof(text) - 1, (const int32_t[]){__VA_ARGS__}, \
                                      sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void test_encode(void) {
    check_group("encoding and decoding");
    make_json(default_merges, "<|endoftext|>", -1);
    write_text(json, strlen(json));
    Error error;
    Tokenizer *t = tokenizer_open(path, &error);
    CHECK(t, "%s", error.text);
    if (!t) { return; }
    CHECK(tokenizer_vocab(t) == 264 && tokenizer_end_of_text(t) == 263, "vocabulary and end of text");
    ENCODES(t, "aaaaa", 257, 'a');    // leftmost pairs first
    ENCODES(t, "abc", 'a', 258);      // "b c" ranks before "a b"
    ENCODES(t, "ab", 259);
    ENCODES(t, "  a", ' ', 260);                // the last space goes with the word
    ENCODES(t, "a's", 'a', 261);                // a contraction is a word
    ENCODES(t, "a 's", 'a', ' ', '\'', 's');    // after a space it is not
    ENCODES(t, "a   ", 'a', 262, ' ');          // at the end a run of spaces stays whole
    ENCODES(t, "a\n\na", 'a', '\n', '\n', 'a');
    ENCODES(t, "a1a", 'a', '1', 'a');
    ENCODES(t, "<|endoftext|>", '<', '|', 'e', 'n', 'd', 'o', 'f', 't', 'e', 'x', 't', '|', '>');
    ENCODES(t, "\xC3\xA9", 0xC3, 0xA9);
    ENCODES(t, "\xC3", 0xEF, 0xBF, 0xBD);    // cut short: one U+FFFD
    ENCODES(t,
            "\xE2\x82"
            "a",
            0xEF, 0xBF, 0xBD, 'a');    // an incomplete character is one
    ENCODES(t, "\xED\xA0\x80", 0xEF, 0xBF, 0xBD, 0xEF, 0xBF, 0xBD, 0xEF, 0xBF, 0xBD);    // a surrogate gives three
    ENCODES(t, "\xC0\x80", 0xEF, 0xBF, 0xBD, 0xEF, 0xBF, 0xBD);                          // overlong
    ENCODES(t, "\xE0\x9F", 0xEF, 0xBF, 0xBD, 0xEF, 0xBF, 0xBD);                          // also overlong
    ENCODES(t, "\xF4\x90\x80\x80", 0xEF, 0xBF, 0xBD, 0xEF, 0xBF, 0xBD, 0xEF, 0xBF, 0xBD, 0xEF, 0xBF, 0xBD);
    ENCODES(t, "a\0a", 'a', 0, 'a');
    CHECK(tokenizer_encode(t, "", 0, NULL, 0) == 0, "no text, no ids");
    int32_t two[3] = {-1, -1, -1};
    CHECK(tokenizer_encode(t, "b b b", 5, two, 2) == 5 && two[1] == ' ' && two[2] == -1,
          "nothing is written past the capacity");
    size_t length;
    const char *bytes = tokenizer_token(t, 260, &length);
    CHECK(length == 2 && memcmp(bytes, " a", 2) == 0, "a token's bytes");
    CHECK(!tokenizer_token(t, -1, &length) && !tokenizer_token(t, 264, &length) && length == 0, "ids without a token");
    char text[8] = "-";
    tokenizer_text(t, 260, text, sizeof text);
    CHECK(!strcmp(text, " a"), "a token's text");
    tokenizer_text(t, 0xC3, text, sizeof text);
    CHECK(!strcmp(text, "\xEF\xBF\xBD"), "half a character");
    tokenizer_text(t, 264, text, sizeof text);
    CHECK(!text[0], "an id without a token has an empty text");
    tokenizer_text(t, 260, text, 2);
    CHECK(!strcmp(text, " "), "a truncated text");
    tokenizer_close(t);
}

// ---- other tokenizers

// Replaces the first `from` in the JSON text by `to`.
static void replace(const char *from, const char *to) {
    char *at = strstr(json, from), *rest = at ? strdup(at + strlen(from)) : NULL;
    if (!rest) { exit(4); }
    sprintf(at, "%s%s", to, rest);
    free(rest);
}

#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"
#define DIGITS "{\"type\":\"Digits\",\"individual_digits\":true}"
#define SEQUENCE(parts) "{\"type\":\"Sequence\",\"pretokenizers\":[" parts "]}"
#define NO_REGEX "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define SPLIT(numbers)                                                                                       \
    "{\"type\":\"Split\",\"behavior\":\"Isolated\",\"invert\":false,\"pattern\":{\"Regex\":\""                \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|" numbers                              \
    "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"}}"

#define LINE "\xE2\x96\x81"    // U+2581
#define PREPEND                                                                                                        \
    "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"" LINE "\"},"                           \
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"" LINE "\"}]}"
#define METASPACE(scheme)                                                                                              \
    "{\"type\":\"Metaspace\",\"replacement\":\"" LINE "\",\"prepend_scheme\":\"" scheme "\",\"split\":false}"

static void test_digits(void) {
    check_group("digits as words");
    make_json(default_merges, "<|endoftext|>", -1);
    replace(BYTE_LEVEL, SEQUENCE(DIGITS "," BYTE_LEVEL));
    replace("\"id\":263", "\"id\":264");
    replace("\"b c\"", "\"1 1\",\"b c\"");
    replace("\"bc\":258", "\"bc\":258,\"11\":263");
    write_text(json, strlen(json));
    Error error;
    Tokenizer *t = tokenizer_open(path, &error);
    CHECK(t, "%s", error.text);
    if (!t) { return; }
    ENCODES(t, "a11a", 'a', '1', '1', 'a');                           // despite the merge
    ENCODES(t, "  1", 262, '1');                                      // before a digit a run of spaces stays whole
    ENCODES(t, "  a", ' ', 260);                                      // before a letter it does not
    ENCODES(t, "aa1aa", 256, '1', 256);                               // nothing is merged across a digit
    ENCODES(t, "1's", '1', 261);                                      // a contraction after a digit
    ENCODES(t, "  \xC2\xB2", 262, 0xC2, 0xB2);                        // a superscript
    ENCODES(t, "  \xD9\xA3", 262, 0xD9, 0xA3);                        // an Arabic digit
    ENCODES(t, "  \xF0\x91\xB7\xA0", 262, 0xF0, 0x91, 0xB7, 0xA0);    // U+11DE0, from Unicode 17
    ENCODES(t, "  \xF0\x96\xBF\xB6", 262, 0xF0, 0x96, 0xBF, 0xB6);    // U+16FF6, the last of these
    ENCODES(t, "  \xC3\x97", ' ', ' ', 0xC3, 0x97);                   // no number: a multiplication sign
    ENCODES(t,
            "  \xE2\x82"
            "1",
            ' ', ' ', 0xEF, 0xBF, 0xBD, '1');
    tokenizer_close(t);
}

// Opens a vocabulary whose tokens tell where words end: "11", ".\n", "\n\n", "\n " and "'S" are merged within one.
static Tokenizer *open_words(const char *words, const char *ignore_merges) {
    make_json(default_merges, "<|endoftext|>", -1);
    replace(BYTE_LEVEL, words);
    replace("\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}");
    replace("\"id\":263", "\"id\":270");
    replace("\"type\":\"BPE\"", ignore_merges);
    replace("\"b c\"",
            "\"1 1\",\". \xC4\x8A\",\"\xC4\x8A \xC4\x8A\",\"\xC4\x8A \xC4\xA0\",\"' S\",\"\xC3\x83 \xC2\xA9\",\"b c\"");
    replace("\"bc\":258", "\"bc\":258,\"11\":263,\".\xC4\x8A\":264,\"\xC4\x8A\xC4\x8A\":265,\"'S\":266,"
                          "\"\xC3\x83\xC2\xA9\":267,\"whole\":268,\"\xC4\x8A\xC4\xA0\":269");
    write_text(json, strlen(json));
    Error error;
    Tokenizer *t = tokenizer_open(path, &error);
    CHECK(t, "%s", error.text);
    return t;
}

static void test_llama3(void) {
    check_group("Llama 3's and Qwen's words, NFC, whole words");
    Tokenizer *t = open_words(SEQUENCE(SPLIT("\\\\p{N}{1,3}") "," NO_REGEX), "\"type\":\"BPE\",\"ignore_merges\":true");
    if (!t) { return; }
    ENCODES(t, "1111", 263, '1', '1');                               // a number has three digits at most
    ENCODES(t, "a.\na", 'a', 264, 'a');                              // newlines belong to the signs before them
    ENCODES(t, "a \n\n  a", 'a', ' ', 265, ' ', 260);                // spaces up to the last newline
    ENCODES(t, "a'Sa", 'a', 266, 'a');                               // a contraction in any case
    ENCODES(t, "a\n  a", 'a', '\n', ' ', 260);                       // and not beyond it
    ENCODES(t, "'\xC5\xBFwhole", '\'', 0xC5, 0xBF, 268);             // the long s is an s, after which a word begins
    ENCODES(t, "\tab", '\t', 259);                                   // any sign may lead a word
    ENCODES(t, "e\xCC\x81", 267);                                    // composed
    ENCODES(t, "e\xCC\x85\xCC\x81", 'e', 0xCC, 0x85, 0xCC, 0x81);    // an accent of the same class lies between
    ENCODES(t, "whole wholes", 268, ' ', 'w', 'h', 'o', 'l', 'e', 's');
    tokenizer_close(t);
    if (!(t = open_words(SEQUENCE(SPLIT("\\\\p{N}") "," NO_REGEX), "\"type\":\"BPE\""))) { return; }
    ENCODES(t, "11", '1', '1');
    ENCODES(t, "whole", 'w', 'h', 'o', 'l', 'e');
    tokenizer_close(t);
}

static void test_special(void) {
    check_group("special tokens, and bytes without a token");
    make_json(default_merges, "<|endoftext|>", 'A');
    replace("\"id\":263", "\"id\":264");
    replace("\"added_tokens\":[", "\"added_tokens\":[{\"id\":263,\"content\":\"<pad \xC3\xA9>\"},");
    replace("}],\"normalizer\"", "},{\"id\":265,\"content\":\"A\"}],\"normalizer\"");
    replace("\"bc\":258", "\"bc\":258,\"<pad \xC3\xA9>\":263");
    write_text(json, strlen(json));
    Error error;
    Tokenizer *t = tokenizer_open(path, &error);
    CHECK(t, "%s", error.text);
    if (!t) { return; }
    CHECK(tokenizer_special(t, "<|endoftext|>") == 264 && tokenizer_special(t, "<pad \xC3\xA9>") == 263 &&
              tokenizer_special(t, "A") == 265,
          "the ids of special tokens");
    CHECK(tokenizer_special(t, "aa") == -1 && tokenizer_special(t, "") == -1 && tokenizer_special(t, "<|end") == -1,
          "other names");
    ENCODES(t, "aAab", 256, 'b');    // A is dropped; the special token with this name does not take its place
    ENCODES(t, "<pad \xC3\xA9>", '<', 'p', 'a', 'd', ' ', 0xC3, 0xA9, '>');
    CHECK(tokenizer_encode(t, "AA", 2, NULL, 0) == 0, "only dropped bytes");
    tokenizer_close(t);
}

// ---- tokens of characters, with byte fallback

// A vocabulary like Llama 2's: <unk>, <s>, </s>, the bytes, then U+2581 for a space, a, b and what is merged.
static void make_fallback(const char *normalizer, const char *words, const char *more) {
    char *at = json + sprintf(json,
                              "{\"added_tokens\":[{\"id\":1,\"content\":\"<s>\"}],\"normalizer\":%s,"
                              "\"pre_tokenizer\":%s,\"model\":{\"type\":\"BPE\",\"byte_fallback\":true,"
                              "\"vocab\":{\"<unk>\":0,\"<s>\":1,\"</s>\":2,",
                              normalizer, words);
    for (int b = 0; b < 256; b++) { at += sprintf(at, "\"<0x%02X>\":%d,", b, 3 + b); }
    sprintf(at,
            "\"" LINE "\":259,\"a\":260,\"b\":261,\"ab\":262,\"" LINE "ab\":263,\"" LINE LINE "\":264,\"\xC3\xA9\":265"
            "%s},\"merges\":[\"a b\",\"" LINE " ab\",\"" LINE " " LINE "\"%s]}}",
            more[0] ? ",\"b" LINE "\":266" : "", more);
    write_text(json, strlen(json));
}

static void test_fallback(void) {
    check_group("characters with byte fallback");
    Error error;
    int32_t ids[8];
    make_fallback(PREPEND, "null", "");
    Tokenizer *t = tokenizer_open(path, &error);
    CHECK(t, "%s", error.text);
    if (!t) { return; }
    CHECK(tokenizer_vocab(t) == 266 && tokenizer_end_of_text(t) == 1 && tokenizer_adds_space(t), "vocabulary");
    ENCODES(t, "ab ab", 263, 263);
    ENCODES(t, " ab", 259, 263);    // a space is put in front even of one
    ENCODES(t, "  ab", 264, 263);
    ENCODES(t, LINE "b", 264, 261);                                  // the sign that stands for a space is one
    ENCODES(t, "\xC3\xA9\xC3\xA8", 259, 265, 3 + 0xC3, 3 + 0xA8);    // a character with a token, and one without
    ENCODES(t, "b\n<s>", 259, 261, 3 + '\n', 3 + '<', 3 + 's', 3 + '>');
    ENCODES(t, "\xFF", 259, 3 + 0xEF, 3 + 0xBF, 3 + 0xBD);
    CHECK(tokenizer_encode_at(t, INSIDE, "ab", 2, ids, 8) == 1 && ids[0] == 262, "no space within a text");
    CHECK(tokenizer_encode_at(t, AFTER_SPECIAL, "ab", 2, ids, 8) == 1 && ids[0] == 263, "a space after a token");
    CHECK(tokenizer_encode(t, "", 0, NULL, 0) == 0, "no text, no space");
    size_t length;
    const char *bytes = tokenizer_token(t, 263, &length);
    CHECK(length == 3 && !memcmp(bytes, " ab", 3), "the bytes of a token with a space");
    bytes = tokenizer_token(t, 3 + '\n', &length);
    CHECK(length == 1 && *bytes == '\n', "the byte of a byte's token");
    tokenizer_close(t);
    make_fallback("null", METASPACE("first"), "");
    if (!(t = tokenizer_open(path, &error))) {
        CHECK(t, "%s", error.text);
        return;
    }
    ENCODES(t, " ab", 263);    // one is there
    ENCODES(t, "ab", 263);
    CHECK(tokenizer_encode_at(t, AFTER_SPECIAL, "ab", 2, ids, 8) == 1 && ids[0] == 262, "no space after a token");
    tokenizer_close(t);
    make_fallback("null", METASPACE("never"), ",\"b " LINE "\"");
    if (!(t = tokenizer_open(path, &error))) {
        CHECK(t, "%s", error.text);
        return;
    }
    ENCODES(t, "b b", 266, 261);    // a merge across the start of a word
    CHECK(!tokenizer_adds_space(t), "no space in front");
    tokenizer_close(t);
}

static void test_added(void) {
    check_group("added tokens that are not special");
    make_json(default_merges, "<|endoftext|>", -1);
    replace("}],\"normalizer\"",
            "},{\"id\":264,\"content\":\"cab\",\"special\":false,\"normalized\":false},"
            "{\"id\":265,\"content\":\"ca\",\"special\":false,\"normalized\":false},"
            "{\"id\":266,\"content\":\"bb\",\"special\":true,\"normalized\":false}],\"normalizer\"");
    write_text(json, strlen(json));
    Error error;
    Tokenizer *t = tokenizer_open(path, &error);
    CHECK(t, "%s", error.text);
    if (!t) { return; }
    ENCODES(t, "ccab caa", 'c', 264, ' ', 265, 'a');    // the longest, and the first
    ENCODES(t, "bbc", 'b', 258);                        // a special token's name is text
    CHECK(tokenizer_special(t, "ca") == -1 && tokenizer_special(t, "bb") == 266, "which are special");
    tokenizer_close(t);
}

// A word of a megabyte takes O(n log n) time; O(n^2) would take hours.
static void test_long_words(void) {
    check_group("words of a megabyte");
    make_json(default_merges, "<|endoftext|>", -1);
    write_text(json, strlen(json));
    Error error;
    Tokenizer *t = tokenizer_open(path, &error);
    size_t n = 1 << 20;
    char *text = malloc(n);
    int32_t *ids = malloc(n * sizeof(*ids));
    if (!t || !text || !ids) { exit(4); }
    memset(text, 'a', n);
    CHECK(tokenizer_encode(t, text, n, ids, n) == n / 4 && ids[0] == 257 && ids[n / 4 - 1] == 257, "a megabyte of a");
    memset(text, ' ', n);
    CHECK(tokenizer_encode(t, text, n, ids, n) == n / 2 && ids[0] == 262, "a megabyte of spaces");
    free(text);
    free(ids);
    tokenizer_close(t);
}

// ---- rejected files

static void refused(const char *what, const char *expected) {
    check_case();
    Error error = {0};
    Tokenizer *t = tokenizer_open(path, &error);
    if (t) { tokenizer_close(t); }
    CHECK(!t && error.code == EXIT_INPUT && strstr(error.text, path) && strstr(error.text, expected), "%s: %s", what,
          t ? "it was opened" : error.text);
}

// Replaces the first `from` in the right file by `to` and writes it.
static void spoil(const char *from, const char *to) {
    make_json(default_merges, "<|endoftext|>", -1);
    replace(from, to);
    write_text(json, strlen(json));
}

static void test_refuse(void) {
    check_group("files that must be rejected");
    const char *const rows[][3] = {
        {"\"BPE\"", "\"Unigram\"", "model.type"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFD\"}", "normalizer \"NFC\" or none"},
        {"\"ByteLevel\"", "\"Whitespace\"", "found pre_tokenizer {\"type\":\"Whitespace\""},
        {"\"add_prefix_space\":false", "\"add_prefix_space\":true", "pre_tokenizer like"},
        {"\"use_regex\":true", "\"use_regex\":false", "pre_tokenizer like"},
        {BYTE_LEVEL, SEQUENCE("{\"type\":\"Digits\",\"individual_digits\":false}," BYTE_LEVEL), "pre_tokenizer like"},
        {BYTE_LEVEL, SEQUENCE("{\"type\":\"Punctuation\"}," BYTE_LEVEL), "pre_tokenizer like"},
        {BYTE_LEVEL, SEQUENCE(BYTE_LEVEL "," DIGITS), "pre_tokenizer like"},
        {BYTE_LEVEL, SEQUENCE(DIGITS "," DIGITS "," BYTE_LEVEL), "pre_tokenizer like"},
        {BYTE_LEVEL, SEQUENCE(DIGITS), "pre_tokenizer like"},
        {BYTE_LEVEL, "{\"type\":\"Sequence\",\"pretokenizers\":7}", "pre_tokenizer like"},
        {BYTE_LEVEL, SEQUENCE(DIGITS ",{\"type\":\"ByteLevel\",\"use_regex\":false}"), "pre_tokenizer like"},
        {BYTE_LEVEL, SEQUENCE(SPLIT("\\\\p{N}{1,4}") "," NO_REGEX), "{1,4}"},
        {BYTE_LEVEL, SEQUENCE(SPLIT("\\\\p{N}{1,3}") "," BYTE_LEVEL), "pre_tokenizer like"},
        {BYTE_LEVEL, SEQUENCE(SPLIT("\\\\p{N}{1,3}")), "pre_tokenizer like"},
        {"\"type\":\"BPE\"", "\"type\":\"BPE\",\"byte_fallback\":true", "Llama 2"},
        {"\"merges\"", "\"marges\"", "model.merges"},
        {"\"vocab\"", "\"vocap\"", "model.vocab"},
        {"\"bc\":258", "\"bc\":1e300", "whole number"},
        {"\"bc\":258", "\"bc\":-1", "whole number"},
        {"\"bc\":258", "\"bc\":2.5", "whole number"},
        {"\"bc\":258", "\"bc\":null", "whole number"},
        {"\"bc\":258", "\"bc\":257", "another token"},
        {"\"bc\":258", "\"bc \":258", "does not represent a byte"},
        {"\"bc\":258", "\"bd\":258", "row 2"},
        {"\"id\":263,", "", "added_tokens"},
        {"<|endoftext|>", "<|end|>", "<|endoftext|>"},
        {"\"a a\"", "\"aa\"", "row 0"},
        {"\"a a\"", "[\"a\"]", "row 0"},
        {"\"a a\"", "[\"a\",{}]", "row 0"},
        {"\"a a\"", "7", "row 0"},
        {"\"aa aa\"", "\"a a\"", "row 1"},
    };
    char what[200];
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        spoil(rows[i][0], rows[i][1]);
        snprintf(what, sizeof(what), "%s in place of %s", rows[i][1], rows[i][0]);
        refused(what, rows[i][2]);
    }
    make_json(default_merges, "<|endoftext|>", 0x41);
    replace("\"merges\"", "\"unk_token\":\"zzz\",\"merges\"");
    write_text(json, strlen(json));
    refused("a byte without a token, and an unknown token", "0x41");
    make_json(default_merges, "<|endoftext|>", -1);
    bool all = true;
    for (size_t cut = 0, whole = strlen(json); cut < whole; cut += cut < whole - 64 ? 61 : 1) {
        write_text(json, cut);
        Error error;
        Tokenizer *t = tokenizer_open(path, &error);
        all = all && !t && error.code == EXIT_INPUT;
        tokenizer_close(t);
    }
    CHECK(all, "a truncated file was opened");
    unlink(path);
    refused("a missing file", path);
}

// A damaged file is either opened or rejected, and one that opens can encode; sanitizers check that nothing else
// happens.
static void test_damage(void) {
    check_group("damaged files");
    uint64_t state = 1;
    bool all = true;
    for (int round = 0; round < 3000; round++) {
        make_json(default_merges, "<|endoftext|>", -1);
        size_t length = strlen(json);
        for (int i = 0; i < 1 + round % 3; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            const char letters[] = "{}[]\",:0129 aAbc\\u.-e";
            json[(state >> 33) % length] = letters[(state >> 20) % (sizeof(letters) - 1)];
        }
        write_text(json, length);
        Error error;
        Tokenizer *t = tokenizer_open(path, &error);
        int32_t ids[64];
        all =
            all && (t ? tokenizer_encode(t, "aaaa abc's \xC3\xA9 \xFF", 15, ids, 64) <= 45 : error.code == EXIT_INPUT);
        tokenizer_close(t);
    }
    CHECK(all, "a damaged file was neither rejected nor opened correctly");
}

int main(void) {
    int handle = mkstemp(path);
    if (handle < 0) { return 4; }
    close(handle);
    test_encode();
    test_digits();
    test_llama3();
    test_fallback();
    test_added();
    test_special();
    test_long_words();
    test_damage();
    test_refuse();
    unlink(path);
    return check_verdict();
}

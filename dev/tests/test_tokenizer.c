// The C tokenizer with a small vocabulary made here: short buffers, the text of each id, and malformed files.
// dev/tests/test_tokenizer.py compares it with tiktoken on megabytes of text, and test_vocabulary.py with the
// `tokenizers` library for other kinds.
#include "dev/tests/check.h"
#include "text/tokenizer.h"

static char path[] = "/tmp/test_tokenizer_XXXXXX";

// ---- a tokenizer.json: the 256 bytes are ids 0 to 255, followed by the results of the merges and end-of-text

static const char merges[] = "\"a a\",\"aa aa\",\"b c\",\"a b\",\"\304\240 a\",\"' s\",\"\304\240 \304\240\"";
static const char *const results[] = {"aa", "aaaa", "bc", "ab", "\304\240a", "'s", "\304\240\304\240", NULL};

// Appends byte b's character in the alphabet of tokenizer.json, escaped.
static int byte_name(char *out, int b) {
    int next = 0x100, code = b;
    for (int i = 0; i < b; i++) { next += !((i >= 0x21 && i <= 0x7E) || (i >= 0xA1 && i != 0xAD)); }
    if (!((b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD))) { code = next; }
    return sprintf(out, "\\u%04x", code);
}

static char json[1 << 16];

static void write_json(void) {
    FILE *file = fopen(path, "wb");
    if (!file || fputs(json, file) < 0 || fclose(file)) { exit(4); }
}

static void make_json(void) {
    char *at = json + sprintf(json, "{\"added_tokens\":[{\"id\":263,\"content\":\"<|endoftext|>\"}],"
                                    "\"normalizer\":null,");
    at += sprintf(at, "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},");
    at += sprintf(at, "\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (int b = 0; b < 256; b++) {
        *at++ = '"';
        at += byte_name(at, b);
        at += sprintf(at, "\":%d,", b);
    }
    for (int i = 0; results[i]; i++) { at += sprintf(at, "%s\"%s\":%d", i ? "," : "", results[i], 256 + i); }
    sprintf(at, "},\"merges\":[%s]}}", merges);
}

// ---- ids and texts

static void test_lengths(void) {
    check_group("buffers that are too short, and texts of ids");
    make_json();
    write_json();
    Error error;
    Tokenizer *t = tokenizer_open(path, &error);
    CHECK(t, "%s", error.text);
    if (!t) { return; }
    int32_t two[3] = {-1, -1, -1};
    CHECK(tokenizer_encode(t, "b b b", 5, two, 2) == 5 && two[1] == ' ' && two[2] == -1,
          "nothing is written past the capacity");
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

// ---- rejected files

// Replaces the first `from` in the JSON text by `to`.
static void replace(const char *from, const char *to) {
    char *at = strstr(json, from), *rest = at ? strdup(at + strlen(from)) : NULL;
    if (!rest) { exit(4); }
    sprintf(at, "%s%s", to, rest);
    free(rest);
}

static void refused(const char *what, const char *expected) {
    check_case();
    Error error = {0};
    Tokenizer *t = tokenizer_open(path, &error);
    if (t) { tokenizer_close(t); }
    CHECK(!t && error.code == EXIT_INPUT && strstr(error.text, path) && strstr(error.text, expected), "%s: %s", what,
          t ? "it was opened" : error.text);
}

static void test_refuse(void) {
    check_group("files that must be rejected");
    const char *const rows[][3] = {
        {"\"ByteLevel\"", "\"Sequence\",\"pretokenizers\":7", "pre_tokenizer like"},
        {"\"merges\"", "\"marges\"", "model.merges"},
        {"\"vocab\"", "\"vocap\"", "model.vocab"},
        {"\"bc\":258", "\"bc\":1e300", "whole number"},
        {"\"bc\":258", "\"bc\":-1", "whole number"},
        {"\"bc\":258", "\"bc\":2.5", "whole number"},
        {"\"bc\":258", "\"bc\":null", "whole number"},
        {"\"bc\":258", "\"bd\":258", "row 2"},
        {"\"id\":263,", "", "added_tokens"},
        {"\"a a\"", "\"aa\"", "row 0"},
        {"\"a a\"", "[\"a\"]", "row 0"},
        {"\"a a\"", "[\"a\",{}]", "row 0"},
        {"\"a a\"", "7", "row 0"},
    };
    char what[200];
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        make_json();
        replace(rows[i][0], rows[i][1]);
        write_json();
        snprintf(what, sizeof(what), "%s in place of %s", rows[i][1], rows[i][0]);
        refused(what, rows[i][2]);
    }
    unlink(path);
    refused("a missing file", path);
}

int main(void) {
    int handle = mkstemp(path);
    if (handle < 0) { return 4; }
    close(handle);
    test_lengths();
    test_refuse();
    unlink(path);
    return check_verdict();
}

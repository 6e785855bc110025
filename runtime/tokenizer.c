// Byte-level BPE. word_end() splits text into words by GPT-2's pattern,
//     '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// written out as code. If tokenizer.json says so, every digit is cut out first, and the pattern sees only what lies
// between two digits. Each word starts as one symbol per byte. Then the adjacent pair with the lowest rank is merged
// (the leftmost if there are several) until no pair can be merged. A heap finds these pairs, so even a word of a
// megabyte takes O(n log n).
#include "runtime/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/json.h"
#include "runtime/tokenizer_classes.h"

#define ID_LIMIT (1 << 24)
#define RANK_SHIFT 40   // a heap key is rank << 40 | position, so that equal ranks are merged from left to right
#define REPLACEMENT 0xFFFD
#define NAME_LIMIT 1024   // the most bytes of a token's name in a merge; GPT-2's longest has 256
#define END_OF_TEXT "<|endoftext|>"

const char *const tokenizer_files[] = {"tokenizer.json", "tokenizer_config.json", NULL};

typedef struct {
    const char *bytes;    // NULL if no token has this id
    size_t length;
} Token;

typedef struct {
    int32_t left, right, result;
} Merge;

struct Tokenizer {
    char *path;
    char *bytes;    // the bytes of all tokens, concatenated
    size_t bytes_used;
    Token *tokens;    // by id
    int vocab, end_of_text;
    bool digits;         // is each digit a word of its own?
    int32_t *special;    // the ids of the special tokens
    size_t special_count;
    int32_t byte_id[256];    // -1: the byte has no token and is dropped
    Merge *merges;           // by rank
    size_t merges_count;
    uint32_t *pairs;    // hash table of (left, right): rank + 1, or 0
    uint32_t *names;    // hash table of token bytes: id + 1, or 0; only exists while opening
    size_t pairs_mask, names_mask;
};

// ---- hash tables: open addressing, at most half full

static uint32_t *table_create(size_t entries, size_t *mask) {
    size_t size = 16;
    while (size < 2 * entries) { size *= 2; }
    *mask = size - 1;
    return calloc(size, sizeof(uint32_t));
}

static uint32_t *pair_slot(const Tokenizer *t, int32_t left, int32_t right) {
    uint64_t hash = ((uint64_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
    for (size_t i = (hash >> 32) & t->pairs_mask;; i = (i + 1) & t->pairs_mask) {
        const Merge *merge = t->pairs[i] ? &t->merges[t->pairs[i] - 1] : NULL;
        if (!merge || (merge->left == left && merge->right == right)) { return &t->pairs[i]; }
    }
}

static uint32_t *name_slot(const Tokenizer *t, const char *bytes, size_t length) {
    uint64_t hash = 0xcbf29ce484222325u;    // FNV-1a
    for (size_t i = 0; i < length; i++) { hash = (hash ^ (uint8_t)bytes[i]) * 0x100000001b3u; }
    for (size_t i = (hash ^ hash >> 32) & t->names_mask;; i = (i + 1) & t->names_mask) {
        const Token *token = t->names[i] ? &t->tokens[t->names[i] - 1] : NULL;
        if (!token || (token->length == length && memcmp(token->bytes, bytes, length) == 0)) { return &t->names[i]; }
    }
}

// ---- characters

// Returns the code point at s (n >= 1 bytes left) and sets *width. Where UTF-8 is invalid, returns U+FFFD and the width
// of the longest invalid prefix (Unicode's table 3-7, like Python's decoder).
static uint32_t char_at(const uint8_t *s, size_t n, size_t *width) {
    *width = 1;
    if (s[0] < 0x80) { return s[0]; }
    if (s[0] < 0xC2 || s[0] > 0xF4) { return REPLACEMENT; }
    size_t want = 2;
    if (s[0] >= 0xE0) { want = 3; }
    if (s[0] >= 0xF0) { want = 4; }
    uint32_t code = s[0] & (0x7F >> want);
    for (; *width < want; ++*width) {
        uint8_t low = 0x80, high = 0xBF;
        if (*width == 1 && s[0] == 0xE0) { low = 0xA0; }     // overlong
        if (*width == 1 && s[0] == 0xED) { high = 0x9F; }    // surrogates
        if (*width == 1 && s[0] == 0xF0) { low = 0x90; }     // overlong
        if (*width == 1 && s[0] == 0xF4) { high = 0x8F; }    // beyond U+10FFFF
        if (*width == n || s[*width] < low || s[*width] > high) { return REPLACEMENT; }
        code = code << 6 | (s[*width] & 0x3F);
    }
    return code;
}

static CharClass class_of(uint32_t code) {
    if (code < 0x80) {
        if ((code | 0x20) - 'a' < 26) { return LETTER; }
        if (code - '0' < 10) { return NUMBER; }
        return code == ' ' || code - '\t' < 5 ? SPACE : OTHER;
    }
    size_t low = 0,
           high = sizeof(char_ranges) / sizeof(*char_ranges);    // finds the first range that ends at or after code
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (char_ranges[middle].last < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool inside = low < sizeof(char_ranges) / sizeof(*char_ranges) && char_ranges[low].first <= code;
    return inside ? char_ranges[low].class : OTHER;
}

// Is this a digit, superscript, fraction or other number? The library's Digits asks Rust, which knows a newer Unicode
// than the pattern does.
static bool is_number(uint32_t code) {
    if (class_of(code) == NUMBER) { return true; }
    for (size_t i = 0; i < sizeof(more_numbers) / sizeof(*more_numbers); i++) {
        if (code >= more_numbers[i].first && code <= more_numbers[i].last) { return true; }
    }
    return false;
}

// Returns the end of the run of characters of one class that starts at `at`. Sets *last to the start of its last
// character.
static size_t run_end(const uint8_t *s, size_t n, size_t at, CharClass class, size_t *last) {
    while (at < n) {
        size_t width;
        if (class_of(char_at(s + at, n - at, &width)) != class) { break; }
        *last = at;
        at += width;
    }
    return at;
}

static size_t contraction_length(const uint8_t *s, size_t n) {
    if (n < 2 || s[0] != '\'') { return 0; }
    if (strchr("sdmt", s[1]) && s[1]) { return 2; }
    return n > 2 && (!memcmp(s + 1, "ll", 2) || !memcmp(s + 1, "ve", 2) || !memcmp(s + 1, "re", 2)) ? 3 : 0;
}

// Returns the end of the word that starts at `at`.
static size_t word_end(const uint8_t *s, size_t n, size_t at) {
    size_t short_form = contraction_length(s + at, n - at);
    if (short_form) { return at + short_form; }
    size_t width, last = at, start = at + (s[at] == ' ');    // a leading space may belong to the word
    if (start < n) {
        CharClass class = class_of(char_at(s + start, n - start, &width));
        if (class != SPACE) { return run_end(s, n, start, class, &last); }
    }
    size_t end = run_end(s, n, at, SPACE, &last);
    return end == n || last == at ? end : last;    // the last space of a run belongs to the next word
}

// Returns the end of the part of the text that starts at `at` and that word_end() may look at: one digit, all up to the
// next digit, or the whole text if digits are not special.
static size_t part_end(const Tokenizer *t, const uint8_t *s, size_t n, size_t at) {
    size_t width;
    if (!t->digits) { return n; }
    if (is_number(char_at(s + at, n - at, &width))) { return at + width; }
    while (at < n && !is_number(char_at(s + at, n - at, &width))) { at += width; }
    return at;
}

// ---- merging one word

typedef struct {
    int32_t *symbol;        // by position; -1 if it was merged into a symbol to its left
    size_t *next, *prev;    // positions of the neighbors; `count` means none
    uint64_t *heap;         // a min-heap of keys; stale ones, whose pair no longer exists, are skipped
    size_t count, capacity, heap_count;
} Word;

static void word_free(Word *w) {
    free(w->symbol);
    free(w->next);
    free(w->prev);
    free(w->heap);
}

static void word_reserve(Word *w, size_t capacity) {
    if (capacity <= w->capacity) { return; }
    word_free(w);
    if (capacity < 256) { capacity = 256; }
    w->capacity = capacity;
    w->symbol = malloc(capacity * sizeof(*w->symbol));
    w->next = malloc(capacity * sizeof(*w->next));
    w->prev = malloc(capacity * sizeof(*w->prev));
    w->heap = malloc(2 * capacity * sizeof(*w->heap));    // one pair per symbol; a merge removes one and adds two
    if (!w->symbol || !w->next || !w->prev || !w->heap) {
        fail(EXIT_RESOURCE, "out of memory to encode a word of %zu bytes.", capacity);
    }
}

static void heap_push(Word *w, uint64_t key) {
    size_t i = w->heap_count++;
    for (; i && w->heap[(i - 1) / 2] > key; i = (i - 1) / 2) { w->heap[i] = w->heap[(i - 1) / 2]; }
    w->heap[i] = key;
}

static uint64_t heap_pop(Word *w) {
    uint64_t top = w->heap[0], key = w->heap[--w->heap_count];
    size_t i = 0;
    for (size_t child = 1; child < w->heap_count; child = 2 * i + 1) {
        child += child + 1 < w->heap_count && w->heap[child + 1] < w->heap[child];
        if (w->heap[child] >= key) { break; }
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = key;
    return top;
}

static void push_pair(const Tokenizer *t, Word *w, size_t at) {
    uint32_t rank = *pair_slot(t, w->symbol[at], w->symbol[w->next[at]]);
    if (rank) { heap_push(w, (uint64_t)(rank - 1) << RANK_SHIFT | at); }
}

static void merge_word(const Tokenizer *t, Word *w) {
    w->heap_count = 0;
    for (size_t i = 0; i < w->count; i++) {
        w->next[i] = i + 1;
        w->prev[i] = i ? i - 1 : w->count;
        if (i + 1 < w->count) { push_pair(t, w, i); }
    }
    while (w->heap_count) {
        uint64_t key = heap_pop(w);
        size_t at = key & (((uint64_t)1 << RANK_SHIFT) - 1), right = w->next[at];
        const Merge *merge = &t->merges[key >> RANK_SHIFT];
        if (w->symbol[at] != merge->left || right == w->count || w->symbol[right] != merge->right) { continue; }
        w->symbol[at] = merge->result;
        w->symbol[right] = -1;
        w->next[at] = w->next[right];
        if (w->next[at] != w->count) {
            w->prev[w->next[at]] = at;
            push_pair(t, w, at);
        }
        if (w->prev[at] != w->count) { push_pair(t, w, w->prev[at]); }
    }
}

// Fills in one symbol per byte that has a token, and the three bytes of U+FFFD for invalid UTF-8.
static void word_fill(const Tokenizer *t, Word *w, const uint8_t *s, size_t length) {
    word_reserve(w, 3 * length);
    w->count = 0;
    for (size_t at = 0, width; at < length; at += width) {
        bool replaced = char_at(s + at, length - at, &width) == REPLACEMENT;
        const uint8_t *bytes = replaced ? (const uint8_t *)"\xEF\xBF\xBD" : s + at;
        for (size_t i = 0; i < (replaced ? 3 : width); i++) {
            w->symbol[w->count] = t->byte_id[bytes[i]];
            w->count += w->symbol[w->count] >= 0;
        }
    }
}

size_t tokenizer_encode(const Tokenizer *t, const char *text, size_t length, int32_t *ids, size_t capacity) {
    const uint8_t *s = (const uint8_t *)text;
    Word w = {0};
    size_t count = 0;
    for (size_t at = 0, part = 0, end; at < length; at = end) {
        if (at == part) { part = part_end(t, s, length, at); }
        end = word_end(s, part, at);
        word_fill(t, &w, s + at, end - at);
        merge_word(t, &w);
        for (size_t i = 0; i < w.count; i = w.next[i], count++) {
            if (count < capacity) { ids[count] = w.symbol[i]; }
        }
    }
    word_free(&w);
    return count;
}

const char *tokenizer_token(const Tokenizer *t, int32_t id, size_t *length) {
    bool known = id >= 0 && id < t->vocab;
    *length = known ? t->tokens[id].length : 0;
    return known ? t->tokens[id].bytes : NULL;
}

void tokenizer_text(const Tokenizer *t, int32_t id, char *out, size_t size) {
    size_t length, written = 0;
    const uint8_t *s = (const uint8_t *)tokenizer_token(t, id, &length);
    for (size_t at = 0, width; at < length; at += width) {
        bool replaced = char_at(s + at, length - at, &width) == REPLACEMENT;
        const uint8_t *bytes = replaced ? (const uint8_t *)"\xEF\xBF\xBD" : s + at;
        size_t count = replaced ? 3 : width;
        if (written + count >= size) break;
        if (*bytes) memcpy(out + written, bytes, count);
        if (*bytes) written += count;
    }
    out[written] = 0;
}

int tokenizer_vocab(const Tokenizer *t) {
    return t->vocab;
}
int tokenizer_end_of_text(const Tokenizer *t) {
    return t->end_of_text;
}

int32_t tokenizer_special(const Tokenizer *t, const char *text) {
    size_t length = strlen(text);
    for (size_t i = 0; i < t->special_count; i++) {
        const Token *token = &t->tokens[t->special[i]];
        if (token->length == length && memcmp(token->bytes, text, length) == 0) { return t->special[i]; }
    }
    return -1;
}

// ---- opening

static bool bad(const Tokenizer *t, Error *error, const char *what, const char *name) {
    return error_set(error, EXIT_INPUT, "%s: %s%.60s.", t->path, what, name);
}

static bool no_memory(const Tokenizer *t, Error *error) {
    return error_set(error, EXIT_RESOURCE, "%s: out of memory to read the tokenizer.", t->path);
}

static const cJSON *get(const cJSON *object, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

static bool is_empty(const cJSON *item) {
    return !item || cJSON_IsNull(item) || cJSON_IsFalse(item) || (cJSON_IsString(item) && !item->valuestring[0]);
}

static bool is_text(const cJSON *item, const char *text) {
    return cJSON_IsString(item) && strcmp(item->valuestring, text) == 0;
}

// Are all added tokens special? Like data/vocabulary.py, we never search for special tokens in text; others would have
// to be found.
static bool only_special(const cJSON *added) {
    const cJSON *token;
    cJSON_ArrayForEach(token, added) {
        if (cJSON_IsFalse(get(token, "special"))) { return false; }
    }
    return true;
}

// Do added tokens have the ids that the `tokenizers` library gives them, whatever the file says? It reuses the ids of
// those in model.vocab and numbers the others from its size on.
static bool numbered(const cJSON *vocab, const cJSON *added) {
    const cJSON *token;
    int next = cJSON_GetArraySize(vocab);
    if (!cJSON_IsObject(vocab)) { return true; }
    cJSON_ArrayForEach(token, added) {
        const cJSON *id = get(token, "id"), *content = get(token, "content");
        if (!cJSON_IsNumber(id) || !cJSON_IsString(content)) { continue; }    // make_room() reports this
        const cJSON *known = get(vocab, content->valuestring);
        if (id->valueint != (known ? known->valueint : next)) { return false; }
        if (id->valueint >= next && id->valueint < ID_LIMIT) { next = id->valueint + 1; }
    }
    return true;
}

// Returns the ByteLevel of a pre_tokenizer: the whole, or what follows Digits in a Sequence of the two.
static const cJSON *byte_level(const cJSON *words, bool *digits) {
    const cJSON *parts = get(words, "pretokenizers"), *first = cJSON_GetArrayItem(parts, 0);
    *digits = is_text(get(words, "type"), "Sequence") && cJSON_IsArray(parts) && cJSON_GetArraySize(parts) == 2 &&
              is_text(get(first, "type"), "Digits") && cJSON_IsTrue(get(first, "individual_digits"));
    return *digits ? first->next : words;
}

// Rejects every setting that would produce other ids than the code above, and lists all of them at once.
static bool check_kind(Tokenizer *t, const cJSON *root, Error *error) {
    const cJSON *model = get(root, "model"), *words = byte_level(get(root, "pre_tokenizer"), &t->digits);
    const struct {
        bool right;
        const char *expected;
    } rows[] = {
        {!get(model, "type") || is_text(get(model, "type"), "BPE"), "model.type \"BPE\""},
        {cJSON_IsObject(get(model, "vocab")), "an object model.vocab"},
        {cJSON_IsArray(get(model, "merges")), "an array model.merges"},
        {is_empty(get(model, "continuing_subword_prefix")), "no model.continuing_subword_prefix"},
        {is_empty(get(model, "end_of_word_suffix")), "no model.end_of_word_suffix"},
        {is_empty(get(model, "ignore_merges")), "model.ignore_merges false"},
        {is_empty(get(model, "byte_fallback")), "model.byte_fallback false"},
        {is_empty(get(model, "dropout")), "no model.dropout"},
        {is_empty(get(root, "normalizer")), "no normalizer"},
        {is_text(get(words, "type"), "ByteLevel"),
         "pre_tokenizer \"ByteLevel\", or a \"Sequence\" of \"Digits\" (individual_digits true) and \"ByteLevel\""},
        {is_empty(get(words, "add_prefix_space")), "pre_tokenizer.add_prefix_space false"},
        {!cJSON_IsFalse(get(words, "use_regex")), "pre_tokenizer.use_regex true"},
        {only_special(get(root, "added_tokens")), "only special tokens in added_tokens"},
        {numbered(get(model, "vocab"), get(root, "added_tokens")),
         "ids in added_tokens that continue those of model.vocab"},
    };
    Reasons reasons = {0};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        if (!rows[i].right) { reasons_add(&reasons, "expected %s", rows[i].expected); }
    }
    return !reasons.count || error_set(error, EXIT_INPUT, "%s: not a tokenizer like GPT-2's (byte-level BPE):%s",
                                       t->path, reasons_text(&reasons).text);
}

// vocab.json writes each byte as a printable character: the byte itself if it is printable, otherwise the next free
// character from U+0100 on.
static void byte_alphabet(int16_t byte_of[0x180]) {
    memset(byte_of, -1, 0x180 * sizeof(*byte_of));
    for (int byte = 0, next = 0x100; byte < 256; byte++) {
        bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
        byte_of[printable ? byte : next++] = (int16_t)byte;
    }
}

static bool is_added(const cJSON *added, const char *name) {
    const cJSON *token;
    cJSON_ArrayForEach(token, added) {
        if (is_text(get(token, "content"), name)) { return true; }
    }
    return false;
}

// Writes the bytes that a name in this alphabet (`length` bytes of UTF-8) stands for. Returns false if the name
// contains another character.
static bool bytes_of_name(const int16_t byte_of[0x180], const char *name, size_t length, char *out,
                          size_t *out_length) {
    *out_length = 0;
    for (size_t at = 0, width; at < length; at += width) {
        uint32_t code = char_at((const uint8_t *)name + at, length - at, &width);
        if (code >= 0x180 || byte_of[code] < 0) { return false; }
        out[(*out_length)++] = (char)byte_of[code];
    }
    return true;
}

static bool is_id(const cJSON *item) {
    return cJSON_IsNumber(item) && item->valuedouble >= 0 && item->valuedouble < ID_LIMIT &&
           item->valuedouble == (int)item->valuedouble;
}

// Checks all ids and allocates memory for the tokens. A token never has more bytes than its name.
static bool make_room(Tokenizer *t, const cJSON *vocab, const cJSON *added, Error *error) {
    const cJSON *item;
    size_t entries = 0, bytes = 0;
    cJSON_ArrayForEach(item, vocab) {
        if (!is_id(item)) { return bad(t, error, "expected a whole number from 0 as the id of ", item->string); }
        if (item->valueint >= t->vocab) { t->vocab = item->valueint + 1; }
        bytes += strlen(item->string);
        entries++;
    }
    cJSON_ArrayForEach(item, added) {
        const cJSON *id = get(item, "id"), *content = get(item, "content");
        if (!is_id(id) || !cJSON_IsString(content)) {
            return bad(t, error, "expected id and content in added_tokens", "");
        }
        if (id->valueint >= t->vocab) { t->vocab = id->valueint + 1; }
        bytes += strlen(content->valuestring);
        entries++;
    }
    t->tokens = calloc((size_t)t->vocab + 1, sizeof(*t->tokens));
    t->special = calloc((size_t)cJSON_GetArraySize(added) + 1, sizeof(*t->special));
    t->bytes = malloc(bytes + 1);
    t->names = table_create(entries, &t->names_mask);
    return t->tokens && t->special && t->bytes && t->names ? true : no_memory(t, error);
}

// Assigns the bytes at the end of t->bytes to an id. A name may occur twice (in vocab and in added_tokens) with one id.
static bool add_token(Tokenizer *t, int id, size_t length, const char *name, Error *error) {
    uint32_t *slot = name_slot(t, t->bytes + t->bytes_used, length);
    if (*slot == (uint32_t)id + 1) { return true; }
    if (*slot) { return bad(t, error, "two ids for the token ", name); }
    if (t->tokens[id].bytes) { return bad(t, error, "another token has the id of ", name); }
    t->tokens[id] = (Token){t->bytes + t->bytes_used, length};
    t->bytes_used += length;
    *slot = (uint32_t)id + 1;
    return true;
}

// Reads model.vocab. Its special tokens are also in added_tokens; their names may be plain text.
static bool read_vocab(Tokenizer *t, const cJSON *vocab, const cJSON *added, const int16_t byte_of[0x180],
                       Error *error) {
    const cJSON *item;
    cJSON_ArrayForEach(item, vocab) {
        size_t length;
        bool plain = bytes_of_name(byte_of, item->string, strlen(item->string), t->bytes + t->bytes_used, &length);
        if (!plain && is_added(added, item->string)) { continue; }
        if (!plain) { return bad(t, error, "a character that does not represent a byte in the token ", item->string); }
        if (!add_token(t, item->valueint, length, item->string, error)) { return false; }
    }
    return true;
}

// Finds the tokens of single bytes. One may be missing if there is no unk_token to take its place.
static bool find_bytes(Tokenizer *t, const cJSON *unknown, Error *error) {
    for (int byte = 0; byte < 256; byte++) {
        char bytes[1] = {(char)byte}, number[8];
        t->byte_id[byte] = (int32_t)*name_slot(t, bytes, 1) - 1;
        snprintf(number, sizeof(number), "0x%02X", byte);
        if (t->byte_id[byte] < 0 && unknown && !cJSON_IsNull(unknown)) {
            return bad(t, error, "model.unk_token is set, but there is no token for the single byte ", number);
        }
    }
    return true;
}

static bool read_special(Tokenizer *t, const cJSON *added, Error *error) {
    const cJSON *item;
    cJSON_ArrayForEach(item, added) {    // their names are plain text
        const char *content = get(item, "content")->valuestring;
        int32_t id = get(item, "id")->valueint;
        memcpy(t->bytes + t->bytes_used, content, strlen(content));
        if (!add_token(t, id, strlen(content), content, error)) { return false; }
        t->special[t->special_count++] = id;
    }
    uint32_t found = *name_slot(t, END_OF_TEXT, strlen(END_OF_TEXT));
    t->end_of_text = (int)found - 1;
    return found ? true : bad(t, error, "no token " END_OF_TEXT, "");
}

// Parses one merge, "left right" or ["left", "right"].
static bool read_merge(const Tokenizer *t, const cJSON *item, const int16_t byte_of[0x180], Merge *merge) {
    const char *left = NULL, *right = NULL;
    char room[2 * NAME_LIMIT];
    size_t left_length = 0, lengths[2];
    if (cJSON_IsString(item) && (right = strchr(item->valuestring, ' '))) {
        left = item->valuestring;
        left_length = (size_t)(right++ - left);
    } else if (cJSON_GetArraySize(item) == 2 && cJSON_IsString(item->child) && cJSON_IsString(item->child->next)) {
        left = item->child->valuestring;
        right = item->child->next->valuestring;
        left_length = strlen(left);
    }
    if (!left || left_length > NAME_LIMIT || strlen(right) > NAME_LIMIT) { return false; }
    if (!bytes_of_name(byte_of, left, left_length, room, &lengths[0]) ||
        !bytes_of_name(byte_of, right, strlen(right), room + lengths[0], &lengths[1])) {
        return false;
    }
    merge->left = (int32_t)*name_slot(t, room, lengths[0]) - 1;
    merge->right = (int32_t)*name_slot(t, room + lengths[0], lengths[1]) - 1;
    merge->result = (int32_t)*name_slot(t, room, lengths[0] + lengths[1]) - 1;
    return merge->left >= 0 && merge->right >= 0 && merge->result >= 0;
}

static bool bad_row(const Tokenizer *t, Error *error, const char *what) {
    char row[64];
    snprintf(row, sizeof(row), ", in row %zu of model.merges", t->merges_count);
    return bad(t, error, what, row);
}

static bool read_merges(Tokenizer *t, const cJSON *merges, const int16_t byte_of[0x180], Error *error) {
    size_t entries = (size_t)cJSON_GetArraySize(merges);
    if (entries >= ID_LIMIT) { return bad(t, error, "more than 16 million rows in model.merges", ""); }
    t->merges = malloc((entries + 1) * sizeof(*t->merges));
    t->pairs = table_create(entries, &t->pairs_mask);
    if (!t->merges || !t->pairs) { return no_memory(t, error); }
    const cJSON *item;
    cJSON_ArrayForEach(item, merges) {
        Merge *merge = &t->merges[t->merges_count];
        if (!read_merge(t, item, byte_of, merge)) {
            return bad_row(t, error, "expected two tokens whose concatenation is a token");
        }
        uint32_t *slot = pair_slot(t, merge->left, merge->right);
        if (*slot) { return bad_row(t, error, "a duplicate pair"); }
        *slot = (uint32_t)++t->merges_count;
    }
    return true;
}

static bool read_json(Tokenizer *t, const cJSON *root, Error *error) {
    int16_t byte_of[0x180];
    byte_alphabet(byte_of);
    const cJSON *model = get(root, "model"), *vocab = get(model, "vocab"), *added = get(root, "added_tokens");
    // Special tokens come last: no byte or merge may take one for a token of the vocabulary.
    return check_kind(t, root, error) && make_room(t, vocab, added, error) &&
           read_vocab(t, vocab, added, byte_of, error) && find_bytes(t, get(model, "unk_token"), error) &&
           read_merges(t, get(model, "merges"), byte_of, error) && read_special(t, added, error);
}

static char *file_in(const char *path) {
    struct stat info;
    bool folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    size_t size = strlen(path) + strlen(tokenizer_files[0]) + 2;
    char *full = malloc(size);
    if (full) { snprintf(full, size, "%s%s%s", path, folder ? "/" : "", folder ? tokenizer_files[0] : ""); }
    return full;
}

static bool open_file(Tokenizer *t, Error *error) {
    cJSON *root = json_read(t->path, error);
    bool right = root && read_json(t, root, error);
    cJSON_Delete(root);
    free(t->names);
    t->names = NULL;
    return right;
}

static void count_id(const cJSON *id, const char *name, int *vocab, int *end_of_text) {
    if (!is_id(id)) { return; }
    if (id->valueint >= *vocab) { *vocab = id->valueint + 1; }
    if (name && strcmp(name, END_OF_TEXT) == 0) { *end_of_text = id->valueint; }
}

bool tokenizer_ids(const char *path, int *vocab, int *end_of_text) {
    Error error;
    char *file = file_in(path);
    cJSON *root = file ? json_read(file, &error) : NULL;
    const cJSON *ids = get(get(root, "model"), "vocab"), *item;
    *vocab = cJSON_IsArray(ids) ? cJSON_GetArraySize(ids) : 0;    // Unigram has a list, whose indices are the ids
    *end_of_text = -1;
    cJSON_ArrayForEach(item, ids) {
        count_id(item, item->string, vocab, end_of_text);
    }
    cJSON_ArrayForEach(item, get(root, "added_tokens")) {
        count_id(get(item, "id"), cJSON_GetStringValue(get(item, "content")), vocab, end_of_text);
    }
    cJSON_Delete(root);
    free(file);
    return *vocab > 0;
}

Tokenizer *tokenizer_open(const char *path, Error *error) {
    Tokenizer *t = calloc(1, sizeof(*t));
    if (!t || !(t->path = file_in(path))) {
        error_set(error, EXIT_RESOURCE, "%s: out of memory to read the tokenizer.", path);
    } else if (open_file(t, error)) {
        return t;
    }
    tokenizer_close(t);
    return NULL;
}

void tokenizer_close(Tokenizer *t) {
    if (!t) { return; }
    free(t->path);
    free(t->bytes);
    free(t->tokens);
    free(t->special);
    free(t->merges);
    free(t->pairs);
    free(t->names);
    free(t);
}

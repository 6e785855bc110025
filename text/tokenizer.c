// BPE. The text is cut at added tokens, normalized and split into words (pretokenize.h). Each word starts as one symbol
// per byte, or per character. Then the adjacent pair with the lowest rank is merged (the leftmost if there are several)
// until no pair can be merged. A heap finds these pairs, so even a word of a megabyte takes O(n log n).
#include "text/tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "runtime/utf8.h"
#include "text/nfc.h"
#include "text/tokenizer_parts.h"

#define RANK_SHIFT 40    // a heap key is rank << 40 | position, so that equal ranks are merged from left to right
#define LOW_LINE "\xE2\x96\x81"    // U+2581, which SentencePiece writes for a space

uint32_t *tokenizer_pair_slot(const Tokenizer *t, int32_t left, int32_t right) {
    uint64_t hash = ((uint64_t)left << 32 | (uint32_t)right) * t->seed;
    for (size_t i = (hash >> 32) & t->pairs_mask;; i = (i + 1) & t->pairs_mask) {
        const Merge *merge = t->pairs[i] ? &t->merges[t->pairs[i] - 1] : NULL;
        if (!merge || (merge->left == left && merge->right == right)) return &t->pairs[i];
    }
}

uint32_t *tokenizer_name_slot(const Tokenizer *t, const void *bytes, size_t length) {
    for (size_t i = XXH3_64bits_withSeed(bytes, length, t->seed) & t->names_mask;; i = (i + 1) & t->names_mask) {
        const Token *token = t->names[i] ? &t->tokens[t->names[i] - 1] : NULL;
        if (!token || (token->length == length && memcmp(token->bytes, bytes, length) == 0)) return &t->names[i];
    }
}

// Returns the id of the token of model.vocab with these bytes, or -1.
static int32_t model_token(const Tokenizer *t, const void *bytes, size_t length) {
    return (int32_t)*tokenizer_name_slot(t, bytes, length) - 1;
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
    if (capacity <= w->capacity) return;
    word_free(w);
    if (capacity < 256) capacity = 256;
    w->capacity = capacity;
    w->symbol = malloc(capacity * sizeof(*w->symbol));
    w->next = malloc(capacity * sizeof(*w->next));
    w->prev = malloc(capacity * sizeof(*w->prev));
    w->heap = malloc(2 * capacity * sizeof(*w->heap));    // one pair per symbol; a merge removes one and adds two
    if (!w->symbol || !w->next || !w->prev || !w->heap)
        fail(EXIT_RESOURCE, "out of memory to encode a word of %zu bytes.", capacity);
}

static void heap_push(Word *w, uint64_t key) {
    size_t i = w->heap_count++;
    for (; i && w->heap[(i - 1) / 2] > key; i = (i - 1) / 2) w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = key;
}

static uint64_t heap_pop(Word *w) {
    uint64_t top = w->heap[0], key = w->heap[--w->heap_count];
    size_t i = 0;
    for (size_t child = 1; child < w->heap_count; child = 2 * i + 1) {
        child += child + 1 < w->heap_count && w->heap[child + 1] < w->heap[child];
        if (w->heap[child] >= key) break;
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = key;
    return top;
}

static void push_pair(const Tokenizer *t, Word *w, size_t at) {
    uint32_t rank = *tokenizer_pair_slot(t, w->symbol[at], w->symbol[w->next[at]]);
    if (rank) heap_push(w, (uint64_t)(rank - 1) << RANK_SHIFT | at);
}

static void merge_word(const Tokenizer *t, Word *w) {
    w->heap_count = 0;
    for (size_t i = 0; i < w->count; i++) {
        w->next[i] = i + 1;
        w->prev[i] = i ? i - 1 : w->count;
        if (i + 1 < w->count) push_pair(t, w, i);
    }
    while (w->heap_count) {
        uint64_t key = heap_pop(w);
        size_t at = key & (((uint64_t)1 << RANK_SHIFT) - 1), right = w->next[at];
        const Merge *merge = &t->merges[key >> RANK_SHIFT];
        if (w->symbol[at] != merge->left || right == w->count || w->symbol[right] != merge->right) continue;
        w->symbol[at] = merge->result;
        w->symbol[right] = -1;
        w->next[at] = w->next[right];
        if (w->next[at] != w->count) {
            w->prev[w->next[at]] = at;
            push_pair(t, w, at);
        }
        if (w->prev[at] != w->count) push_pair(t, w, w->prev[at]);
    }
}

static void add_bytes(const Tokenizer *t, Word *w, const uint8_t *s, size_t length) {
    for (size_t i = 0; i < length; i++) {
        w->symbol[w->count] = t->byte_id[s[i]];
        w->count += w->symbol[w->count] >= 0;
    }
}

static void add_characters(const Tokenizer *t, Word *w, const uint8_t *s, size_t length) {
    for (size_t at = 0, width; at < length; at += width) {
        utf8_get(s + at, length - at, &width);
        int32_t id = model_token(t, s + at, width);
        if (id >= 0) {
            w->symbol[w->count++] = id;
        } else {
            add_bytes(t, w, s + at, width);
        }
    }
}

static void encode_word(const Tokenizer *t, Word *w, const uint8_t *s, size_t length) {
    int32_t whole = t->whole_words ? model_token(t, s, length) : -1;
    word_reserve(w, length);
    w->count = 0;
    if (whole >= 0) {
        w->symbol[w->count++] = whole;
        return;
    }
    if (t->characters) {
        add_characters(t, w, s, length);
    } else {
        add_bytes(t, w, s, length);
    }
    merge_word(t, w);
}

// ---- a part of the text: what lies between two added tokens

// One call of tokenizer_encode_at().
typedef struct {
    const Tokenizer *t;
    Word word;
    uint8_t *room;    // for a part that is not encoded as it is
    size_t room_size;
    int32_t *ids;
    size_t count, capacity;
} Encoder;

static void put(Encoder *e, int32_t id) {
    if (e->count < e->capacity) e->ids[e->count] = id;
    e->count++;
}

static void reserve(Encoder *e, size_t size) {
    if (size <= e->room_size) return;
    free(e->room);
    e->room_size = size;
    if (!(e->room = malloc(size))) fail(EXIT_RESOURCE, "out of memory to encode a text of %zu bytes.", size);
}

// Writes the text with each U+2581 as the space that it stands for, and a space in front if `lead`.
static size_t spaced(const uint8_t *s, size_t length, bool lead, uint8_t *out) {
    size_t written = 0;
    if (lead) out[written++] = ' ';
    for (size_t at = 0; at < length; at++) {
        bool line = length - at >= 3 && memcmp(s + at, LOW_LINE, 3) == 0;
        out[written++] = line ? ' ' : s[at];
        at += line ? 2 : 0;
    }
    return written;
}

static bool takes_lead(const Tokenizer *t, TextPlace place, const uint8_t *s, size_t length) {
    bool missing = s[0] != ' ' && (length < 3 || memcmp(s, LOW_LINE, 3) != 0);
    switch (place == INSIDE ? LEAD_NONE : t->lead) {
    case LEAD_NONE: return false;
    case LEAD_EVERY_PART: return true;
    case LEAD_IF_MISSING: return missing;
    case LEAD_FIRST_MISSING: return missing && place == AT_START;
    }
    return false;
}

// Returns the text that the words are cut from, and sets its length: the part itself, or a copy in e->room.
static const uint8_t *normalized(Encoder *e, TextPlace place, const uint8_t *s, size_t *length) {
    bool lead = takes_lead(e->t, place, s, *length);
    if (utf8_valid(s, *length) < *length) {
        reserve(e, 6 * *length + 1);
        uint8_t *repaired = e->room + 3 * *length + 1;
        *length = utf8_repair(s, *length, repaired);
        s = repaired;
    } else if (lead || e->t->nfc || e->t->characters) {
        reserve(e, 3 * *length + 1);
    }
    if (e->t->nfc) {
        *length = nfc(s, *length, e->room);
    } else if (e->t->characters) {
        *length = spaced(s, *length, lead, e->room);
    } else {
        return s;
    }
    return e->room;
}

static void encode_part(Encoder *e, TextPlace place, const uint8_t *s, size_t length) {
    if (!length) return;
    const uint8_t *text = normalized(e, place, s, &length);
    Words words = {.split = e->t->split, .s = text, .n = length};
    while (words.at < length) {
        size_t start = words.at;
        words_next(&words);
        encode_word(e->t, &e->word, text + start, words.at - start);
        for (size_t i = 0; i < e->word.count; i++)
            if (e->word.symbol[i] >= 0) put(e, e->word.symbol[i]);
    }
}

// Below 0 if the name comes before the text, above 0 if it comes after it. A prefix comes first.
static int compare_name(Token name, const void *text, size_t length) {
    int order = memcmp(name.bytes, text, name.length < length ? name.length : length);
    return order ? order : (name.length > length) - (name.length < length);
}

int32_t tokenizer_added_before(const Tokenizer *t, const void *text, size_t length) {
    size_t low = 0, high = t->added_count;    // those below `low` are not above the text, those from `high` on are
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (compare_name(t->added[middle].name, text, length) <= 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return (int32_t)low - 1;
}

// Returns the longest added token that the text at s starts with, or NULL.
static const Added *added_at(const Tokenizer *t, const uint8_t *s, size_t length) {
    int32_t at = t->starts_added[s[0]] ? tokenizer_added_before(t, s, length) : -1;
    size_t same = 0;    // bytes in which the text equals that name
    while (at >= 0 && same < length && same < t->added[at].name.length &&
           (uint8_t)t->added[at].name.bytes[same] == s[same]) {
        same++;
    }
    while (at >= 0 && (t->added[at].name.length > same || t->added[at].normalized)) at = t->added[at].prefix;
    return at < 0 ? NULL : &t->added[at];
}

size_t tokenizer_encode_at(const Tokenizer *t, TextPlace place, const char *text, size_t length, int32_t *ids,
                           size_t capacity) {
    const uint8_t *s = (const uint8_t *)text;
    Encoder e = {.t = t, .ids = ids, .capacity = capacity};
    size_t start = 0;
    for (size_t at = 0, width; at < length; at += width) {
        const Added *added = added_at(t, s + at, length - at);
        width = added ? added->name.length : 1;
        if (!added || added->special) continue;    // the name of a special token is ordinary text
        encode_part(&e, place, s + start, at - start);
        put(&e, added->id);
        start = at + width;
        place = AFTER_SPECIAL;
    }
    encode_part(&e, place, s + start, length - start);
    word_free(&e.word);
    free(e.room);
    return e.count;
}

size_t tokenizer_encode(const Tokenizer *t, const char *text, size_t length, int32_t *ids, size_t capacity) {
    return tokenizer_encode_at(t, AT_START, text, length, ids, capacity);
}

// ---- tokens

const char *tokenizer_token(const Tokenizer *t, int32_t id, size_t *length) {
    bool exists = id >= 0 && id < t->vocab && t->tokens[id].bytes;
    *length = exists ? t->tokens[id].length : 0;
    return exists ? t->tokens[id].bytes : NULL;
}

void tokenizer_text(const Tokenizer *t, int32_t id, char *out, size_t size) {
    size_t length, written = 0;
    const uint8_t *s = (const uint8_t *)tokenizer_token(t, id, &length);
    for (size_t at = 0, width; at < length; at += width) {
        bool replaced = utf8_get(s + at, length - at, &width) == REPLACEMENT;
        const uint8_t *bytes = replaced ? (const uint8_t *)REPLACEMENT_BYTES : s + at;
        size_t count = replaced ? 3 : width;
        if (written + count >= size) break;
        if (*bytes) memcpy(out + written, bytes, count);
        if (*bytes) written += count;
    }
    out[written] = 0;
}

bool tokenizer_adds_space(const Tokenizer *t) {
    return t->lead != LEAD_NONE;
}

int tokenizer_vocab(const Tokenizer *t) {
    return t->vocab;
}

bool tokenizer_fits(const Tokenizer *t, const int32_t *ids, size_t count, size_t vocab, const char *where,
                    Error *error) {
    size_t i = 0;
    char token[128];
    while (i < count && (size_t)ids[i] < vocab) i++;
    if (i == count) return true;
    tokenizer_text(t, ids[i], token, sizeof(token));
    return error_set(
        error, EXIT_INPUT,
        "%s: the token \"%s\" has the id %d in the tokenizer, but the model's vocabulary has only %zu ids.\n"
        "  Leave this token out, or use a model that has it.",
        where, token, ids[i], vocab);
}

int32_t tokenizer_begins(const Tokenizer *t) {
    return t->begins;
}

int tokenizer_end_of_text(const Tokenizer *t) {
    return t->end_of_text;
}

int32_t tokenizer_special(const Tokenizer *t, const char *text) {
    size_t length = strlen(text);
    int32_t at = tokenizer_added_before(t, text, length);
    bool same = at >= 0 && compare_name(t->added[at].name, text, length) == 0;
    return same && t->added[at].special ? t->added[at].id : -1;
}

void tokenizer_close(Tokenizer *t) {
    if (!t) return;
    free(t->path);
    free(t->bytes);
    free(t->tokens);
    free(t->added);
    free(t->merges);
    free(t->pairs);
    free(t->names);
    free(t);
}

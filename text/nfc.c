// Characters below U+0300 are never changed, and nothing composes with the character before them. So text is copied up
// to the first other one, and only the stretch from the character before it to the next that is below U+0300 is taken
// apart and composed.
#include "text/nfc.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/search.h"
#include "runtime/utf8.h"
#include "text/nfc_tables.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define INERT 0x300    // the first character that NFC may change, or compose with the one before it

enum { DEEPEST = 4 };    // a canonical decomposition has at most 4 characters

// Hangul syllables are composed of a leading consonant L, a vowel V and perhaps a trailing consonant T.
enum {
    S_BASE = 0xAC00,
    L_BASE = 0x1100,
    V_BASE = 0x1161,
    T_BASE = 0x11A7,
    L_COUNT = 19,
    V_COUNT = 21,
    T_COUNT = 28,
    S_COUNT = L_COUNT * V_COUNT * T_COUNT
};

typedef struct {
    uint32_t code;
    uint8_t class;    // canonical combining class; 0: a starter
    size_t place;     // in its run of other classes; equal ones stay in order
} Character;

static uint8_t class_of(uint32_t code) {
    size_t at = SEARCH(combining_classes, last, code);    // the first range that ends at or after code
    bool inside = at < COUNT(combining_classes) && combining_classes[at].first <= code;
    return inside ? combining_classes[at].class : 0;
}

// Returns the number of characters.
static size_t decompose(uint32_t code, Character *out) {
    if (code >= S_BASE && code < S_BASE + S_COUNT) {
        uint32_t syllable = code - S_BASE, trailing = syllable % T_COUNT;
        out[0] = (Character){.code = L_BASE + syllable / (V_COUNT * T_COUNT)};
        out[1] = (Character){.code = V_BASE + (syllable / T_COUNT) % V_COUNT};
        out[2] = (Character){.code = T_BASE + trailing};
        return trailing ? 3 : 2;
    }
    size_t at = SEARCH(decompositions, code, code);
    if (at == COUNT(decompositions) || decompositions[at].code != code) {
        *out = (Character){.code = code, .class = class_of(code)};
        return 1;
    }
    size_t count = decompose(decompositions[at].first, out);
    return decompositions[at].second ? count + decompose(decompositions[at].second, out + count) : count;
}

static int by_class(const void *a, const void *b) {
    const Character *x = a, *y = b;
    if (x->class != y->class) return x->class < y->class ? -1 : 1;
    return x->place < y->place ? -1 : x->place > y->place;
}

// Sorts each run of characters of other classes than 0 by class, and leaves equal ones in order.
static void reorder(Character *c, size_t count) {
    for (size_t start = 0, end; start < count; start = end + 1) {
        for (end = start; end < count && c[end].class; end++) c[end].place = end;
        if (end > start + 1) qsort(c + start, end - start, sizeof(*c), by_class);
    }
}

// Returns the character that a pair is composed into, or 0.
static uint32_t composed(uint32_t first, uint32_t second) {
    if (first - L_BASE < L_COUNT && second - V_BASE < V_COUNT)
        return S_BASE + ((first - L_BASE) * V_COUNT + second - V_BASE) * T_COUNT;
    bool open = first - S_BASE < S_COUNT && (first - S_BASE) % T_COUNT == 0;
    if (open && second > T_BASE && second < T_BASE + T_COUNT) return first + second - T_BASE;
    for (size_t i = SEARCH(compositions, first, first); i < COUNT(compositions) && compositions[i].first == first;
         i++) {
        if (compositions[i].second == second) return compositions[i].code;
    }
    return 0;
}

// Composes in place: each character with the last starter before it, unless one between them is of its class or a
// higher one. Returns the number of characters that remain.
static size_t compose(Character *c, size_t count) {
    size_t kept = 0, starter = count;    // count: none yet
    for (size_t i = 0; i < count; i++) {
        bool next_to = starter != count && kept == starter + 1;
        bool blocked = starter == count || (!next_to && c[kept - 1].class >= c[i].class);
        uint32_t whole = blocked ? 0 : composed(c[starter].code, c[i].code);
        if (whole) {
            c[starter].code = whole;
            continue;
        }
        if (!c[i].class) starter = kept;
        c[kept++] = c[i];
    }
    return kept;
}

typedef struct {
    Character *characters;
    size_t capacity;
} Stretch;

static void reserve(Stretch *s, size_t capacity) {
    if (capacity <= s->capacity) return;
    s->capacity = 2 * capacity;
    s->characters = realloc(s->characters, s->capacity * sizeof(*s->characters));
    if (!s->characters) fail(EXIT_RESOURCE, "out of memory to normalize a text.");
}

static size_t normalize(Stretch *s, const uint8_t *text, size_t length, uint8_t *out) {
    size_t count = 0, written = 0;
    for (size_t at = 0, width; at < length; at += width) {
        reserve(s, count + DEEPEST);
        count += decompose(utf8_get(text + at, length - at, &width), s->characters + count);
    }
    reorder(s->characters, count);
    count = compose(s->characters, count);
    for (size_t i = 0; i < count; i++) written += utf8_put(s->characters[i].code, out + written);
    return written;
}

// Returns the end of the run of characters below U+0300, or of others, that starts at `at`. Sets *last to the start of
// its last character.
static size_t run_end(const uint8_t *text, size_t length, size_t at, bool inert, size_t *last) {
    size_t width;
    while (at < length && (utf8_get(text + at, length - at, &width) < INERT) == inert) {
        *last = at;
        at += width;
    }
    return at;
}

size_t nfc(const uint8_t *text, size_t length, uint8_t *out) {
    Stretch stretch = {0};
    size_t at = 0, written = 0;
    while (at < length) {
        size_t last = at, end = run_end(text, length, at, true, &last), unused;
        size_t copied = end == length ? end : last;    // the last one may compose with what follows
        memcpy(out + written, text + at, copied - at);
        written += copied - at;
        end = run_end(text, length, end, false, &unused);
        written += normalize(&stretch, text + copied, end - copied, out + written);
        at = end;
    }
    free(stretch.characters);
    return written;
}

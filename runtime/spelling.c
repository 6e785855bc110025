#include "runtime/spelling.h"

#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "runtime/size.h"

int word_place(const char *words, char separator, const char *word) {
    const char ends[] = {separator, 0};
    size_t length = strlen(word);
    for (int place = 0;; place++) {
        size_t here = strcspn(words, ends);
        if (here == length && memcmp(words, word, length) == 0) return place;
        words += here;
        if (*words++ == 0) return -1;
    }
}

static bool same_letter(char a, char b) {
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

// The number of slips, or 64 for longer words.
static size_t edit_distance(const char *a, size_t na, const char *b, size_t nb) {
    size_t rows[3][64];    // for the prefixes of a with i - 2, i - 1 and i letters
    if (na > 63 || nb > 63) return 64;
    for (size_t i = 0; i <= na; i++) {
        size_t *row = rows[i % 3], *before = rows[(i + 2) % 3], *two_before = rows[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            row[j] = row[j - 1] + 1;
            if (i == 0) continue;
            size_t replaced = before[j - 1] + !same_letter(a[i - 1], b[j - 1]);
            if (before[j] + 1 < row[j]) row[j] = before[j] + 1;
            if (replaced < row[j]) row[j] = replaced;
            bool swapped = i > 1 && j > 1 && same_letter(a[i - 1], b[j - 2]) && same_letter(a[i - 2], b[j - 1]);
            if (swapped && two_before[j - 2] + 1 < row[j]) row[j] = two_before[j - 2] + 1;
        }
    }
    return rows[na % 3][nb];
}

bool is_nearer(const char *a, size_t na, const char *b, size_t nb, size_t *least) {
    size_t shorter = smaller(na, nb), distance = edit_distance(a, na, b, nb);
    bool prefix = shorter >= 3 && strncasecmp(a, b, shorter) == 0;
    if (distance >= *least || (!prefix && distance > larger(1, larger(na, nb) / 3))) return false;
    *least = distance;
    return true;
}

const char *nearest_word(const char *words, const char *text, char *out, size_t size) {
    size_t least = SIZE_MAX, given = strlen(text);
    out[0] = 0;
    for (const char *p = words;; p++) {
        size_t length = strcspn(p, "|");
        if (is_nearer(text, given, p, length, &least)) snprintf(out, size, " Did you mean %.*s?", (int)length, p);
        p += length;
        if (*p == 0) return out;
    }
}

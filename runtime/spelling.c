#include "runtime/spelling.h"

#include <ctype.h>

static bool same_letter(char a, char b) {
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

size_t edit_distance(const char *a, size_t na, const char *b, size_t nb) {
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

bool edit_is_slip(size_t distance, size_t na, size_t nb) {
    size_t longer = na > nb ? na : nb;
    return distance <= 1 || distance <= longer / 3;
}

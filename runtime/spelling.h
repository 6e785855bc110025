// How alike two words are, for messages that suggest a name.
#ifndef RUNTIME_SPELLING_H
#define RUNTIME_SPELLING_H

#include <stdbool.h>
#include <stddef.h>

// The optimal string alignment distance: the number of insertions, deletions, replacements and swaps of adjacent
// letters that turn a (na letters) into b (nb letters), ignoring case. Returns 64 if either has more than 63 letters.
size_t edit_distance(const char *a, size_t na, const char *b, size_t nb);

// Could one be a typo of the other at this distance? It may be a third of the longer one's letters, and always 1.
bool edit_is_slip(size_t distance, size_t na, size_t nb);
#endif

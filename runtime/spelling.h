// Words in lists such as "a|b|c", and suggestions for mistyped ones.
#ifndef RUNTIME_SPELLING_H
#define RUNTIME_SPELLING_H

#include <stdbool.h>
#include <stddef.h>

// The place of a word in a list with this separator, from 0, or -1.
int word_place(const char *words, char separator, const char *word);

// Could a (na bytes) be a typo of b (nb bytes), with fewer slips than *least? Then *least becomes their number. Slips
// are insertions, deletions, replacements and swaps of neighbors, up to a third of the longer word, and always 1; or
// any number if one word, of at least 3 letters, is a prefix of the other (--train for --train-data). Case does not
// count.
bool is_nearer(const char *a, size_t na, const char *b, size_t nb, size_t *least);

// Writes " Did you mean WORD?" for the one of `words` ("a|b|c") that `text` is probably a typo of, or "". Returns out.
const char *nearest_word(const char *words, const char *text, char *out, size_t size);

#endif

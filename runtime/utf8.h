// UTF-8, one character at a time.
#ifndef RUNTIME_UTF8_H
#define RUNTIME_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { REPLACEMENT = 0xFFFD };
#define REPLACEMENT_BYTES "\xEF\xBF\xBD"

// Returns the code point at s (n >= 1 bytes left) and sets *width. Where UTF-8 is invalid, returns U+FFFD and the width
// of the longest invalid prefix (Unicode's table 3-7, like Python's decoder).
uint32_t utf8_get(const uint8_t *s, size_t n, size_t *width);

// Writes a code point, at most 4 bytes, and returns how many.
size_t utf8_put(uint32_t code, uint8_t *out);

// Copies text and replaces what is invalid by U+FFFD, as with Python's errors="replace". `out` has room for 3 * length
// bytes. Returns the number of bytes.
size_t utf8_repair(const uint8_t *text, size_t length, uint8_t *out);

// The length of the longest prefix that is valid UTF-8.
size_t utf8_valid(const uint8_t *text, size_t length);

#endif

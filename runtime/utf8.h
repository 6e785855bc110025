// UTF-8, one character at a time.
#ifndef RUNTIME_UTF8_H
#define RUNTIME_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { REPLACEMENT = 0xFFFD };
#define REPLACEMENT_BYTES "\xEF\xBF\xBD"

// Returns the code point at s (n >= 1 bytes left) and sets *width. Where UTF-8 is invalid, returns U+FFFD and the width
// of the longest invalid prefix (Unicode's table 3-7, like Python's decoder).
uint32_t utf8_get(const uint8_t *s, size_t n, size_t *width);

// Is it valid there? Sets *width in any case.
bool utf8_is_valid(const uint8_t *s, size_t n, size_t *width);

// Writes a code point, at most 4 bytes, and returns how many.
size_t utf8_put(uint32_t code, uint8_t *out);

// Copies text and replaces what is invalid by U+FFFD, as with Python's errors="replace". `out` has room for 3 * length
// bytes. Returns the number of bytes.
size_t utf8_repair(const uint8_t *text, size_t length, uint8_t *out);

// Copies text with an escape, such as \x1b or \u202e, in place of each character that would act on a terminal: control
// characters but newline and tab, the controls of bidirectional text, and bytes that are not UTF-8. `out` has room for
// 4 * length bytes. Returns the number of bytes.
size_t utf8_escape(const uint8_t *text, size_t length, uint8_t *out);

typedef struct {
    char text[4 * 4096 + 1];
} PrintedName;

// A path or another name for a line of output: as utf8_escape() writes it, up to 4096 bytes of the name.
PrintedName utf8_printed(const char *name);

// UTF-8 bytes on their way to a file. A character is printed once all its bytes are there; what is not UTF-8 is printed
// as U+FFFD, as with Python's errors="replace".
typedef struct {
    FILE *file;
    bool escapes;    // print as utf8_escape() does: the file is a terminal
    uint8_t bytes[4];
    size_t have;
} Utf8Printer;

Utf8Printer utf8_printer(FILE *file);
void utf8_print(Utf8Printer *printer, const char *text, size_t length);
void utf8_print_end(Utf8Printer *printer);    // prints what is incomplete

// The length of the longest prefix that is valid UTF-8.
size_t utf8_valid(const uint8_t *text, size_t length);

#endif

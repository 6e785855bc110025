// Numbers from and to text, in flags, model shapes and normalizers.
#ifndef RUNTIME_NUMBER_H
#define RUNTIME_NUMBER_H

#include <stdbool.h>
#include <stddef.h>

// Reads a finite decimal number of `length` bytes. 1e6 and 1_000_000 are valid; blanks, hex, inf and nan are not.
bool number_read(const char *text, size_t length, double *number);

typedef struct {
    char text[32];
} NumberText;

// The fewest digits, at most 17, that read back as the same number. Use: number_text(x).text.
NumberText number_text(double x);

#endif

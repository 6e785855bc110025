// Reads a file of flags: lines `flag = value`, blank lines, and comments, which begin with a # after white space. A
// value is the rest of the line; or text in quotes, in which \" and \\ and \u00XX stand for a quote, a backslash and a
// control character if the quotes are double; or a list of either in brackets.
#ifndef RUNTIME_FLAG_FILE_H
#define RUNTIME_FLAG_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "runtime/error.h"

typedef struct {
    const char *path;    // for messages
    char *next;          // the text that is still to be read, which is changed
    char *values;        // room for as many bytes as the text has
    int line;            // the number of the last line
    Error error;         // its text is "" if there was none
} FlagFile;

typedef struct {
    const char *flag;
    const char *text;    // the values, each with its 0 byte, until the next line is read
    size_t count;        // of values; 1 unless it is a list
} FlagLine;

// Reads the next flag. Returns false at the end, or with file->error set (EXIT_INPUT).
bool flag_file_next(FlagFile *file, FlagLine *line);

#endif

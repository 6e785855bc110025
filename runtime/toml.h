// Reads the part of TOML that flags need: lines `key = value`, where a value is a string in quotes, a number, true,
// false, or a list of numbers in brackets, which may span lines; blank lines, and comments from # on. Anything else,
// tables among them, is an error that names the file and the line. Python's tomllib reads the same values from such a
// file, except that this reader skips a byte order mark and keeps bytes that are not UTF-8, as in paths.
#ifndef RUNTIME_TOML_H
#define RUNTIME_TOML_H

#include <stdbool.h>
#include <stddef.h>

#include "runtime/error.h"

typedef enum { TOML_STRING, TOML_NUMBER, TOML_SWITCH, TOML_LIST, TOML_TEXTS } TomlKind;

typedef struct {
    const char *key;
    // The string without its quotes and escapes; the number as it is written; "true" or "false"; or the
    // numbers of the list, separated by commas. Of TOML_TEXTS, a list of strings: each with its 0 byte.
    const char *text;
    TomlKind kind;
    size_t count;    // of texts: 1 unless it is a list of them
    int line;
} TomlEntry;

typedef struct {
    const char *path;    // for messages
    char *at;            // what is still to be read
    int line;
    Error error;    // its text is "" if there was none
} TomlReader;

// Starts to read a text, which ends with a 0 byte and is changed by reading: entries point into it.
TomlReader toml_start(const char *path, char *text);

// Reads the next entry. Returns false at the end, or with reader->error set (EXIT_INPUT).
bool toml_next(TomlReader *reader, TomlEntry *entry);

#endif

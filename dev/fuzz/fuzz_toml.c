// Reads a hostile --config file. Either it is rejected with a message that names it, or its entries have keys and
// values of the documented form, and written out as a file they are read again.
//
// Sources: runtime/error.c runtime/toml.c runtime/utf8.c
#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/toml.h"

enum { LIMIT = 4096 };

// Appends the entry as a line. Returns the end.
static char *write_entry(char *out, const TomlEntry *entry) {
    out += sprintf(out, "%s = ", entry->key);
    if (entry->kind != TOML_STRING)
        return out + sprintf(out, entry->kind == TOML_LIST ? "[%s]\n" : "%s\n", entry->text);
    *out++ = '"';
    for (const unsigned char *p = (const unsigned char *)entry->text; *p; p++)
        out += iscntrl(*p) || *p == '"' || *p == '\\' ? sprintf(out, "\\u%04x", *p) : sprintf(out, "%c", *p);
    return out + sprintf(out, "\"\n");
}

static void check_entry(const TomlEntry *entry, int line) {
    if (!entry->key[0] || entry->line < line) abort();
    if (entry->kind == TOML_SWITCH && strcmp(entry->text, "true") && strcmp(entry->text, "false")) abort();
    if (entry->kind == TOML_LIST && strpbrk(entry->text, " \t\r\n#]")) abort();
    if (entry->kind == TOML_NUMBER && (!entry->text[0] || strpbrk(entry->text, " \t\r\n,#]"))) abort();
}

// Writes the entries of `text` to `out`. Returns how many there are.
static int copy(char *text, char *out) {
    int count = 0, line = 1;
    TomlEntry entry;
    TomlReader reader = toml_start("x.toml", text);
    for (; toml_next(&reader, &entry); count++) {
        check_entry(&entry, line);
        line = entry.line;
        out = write_entry(out, &entry);
    }
    *out = 0;
    if (reader.error.text[0] && (reader.error.code != EXIT_INPUT || !strstr(reader.error.text, "x.toml: line ")))
        abort();
    return count;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static char text[LIMIT + 1], first[8 * LIMIT], second[8 * LIMIT], again[8 * LIMIT];
    if (size > LIMIT) return 0;
    memcpy(text, bytes, size);
    text[size] = 0;
    int count = copy(text, first);
    strcpy(again, first);
    if (copy(again, second) != count || strcmp(first, second)) abort();
    return 0;
}

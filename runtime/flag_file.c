#include "runtime/flag_file.h"

#include <stdlib.h>
#include <string.h>

#define BLANKS " \t\r"

static const char *wrong(FlagFile *f, const char *expected, const char *found) {
    error_set(&f->error, EXIT_INPUT, "%s: line %d: expected %s, found %.40s.", f->path, f->line, expected,
              *found ? found : "the end of the line");
    return NULL;
}

static const char *skip_blanks(const char *at) {
    return at + strspn(at, BLANKS);
}

// The character that the escape at `at` stands for, or 0. Sets *length to that of the escape.
static char escaped(const char *at, size_t *length) {
    char hex[5] = "";
    *length = 2;
    if (at[1] == '"' || at[1] == '\\') return at[1];
    if (at[1] == 'n' || at[1] == 't') return at[1] == 'n' ? '\n' : '\t';
    if (at[1] != 'u') return 0;
    strncpy(hex, at + 2, 4);
    *length = 6;
    long code = strspn(hex, "0123456789abcdefABCDEF") == 4 ? strtol(hex, NULL, 16) : 0;
    return (char)(code < 0x80 ? code : 0);
}

// These two append a value to *out and return what follows it, or NULL.
static const char *read_quoted(FlagFile *f, const char *at, char **out) {
    char quote = *at++;
    for (size_t length = 1; *at != quote; at += length, length = 1) {
        bool escape = *at == '\\' && quote == '"';
        if (!*at) return wrong(f, "a closing quote on this line", at);
        char c = escape ? escaped(at, &length) : *at;
        if (!c) return wrong(f, "one of the escapes \\\", \\\\, \\n, \\t and \\u00XX", at);
        *(*out)++ = c;
    }
    *(*out)++ = 0;
    return at + 1;
}

static const char *read_word(FlagFile *f, const char *at, const char *ends, char **out) {
    size_t length = 0, end = 0;
    for (; at[end] && !strchr(ends, at[end]) && !(at[end] == '#' && (!end || strchr(BLANKS, at[end - 1]))); end++)
        if (!strchr(BLANKS, at[end])) length = end + 1;
    if (!length) return wrong(f, "a value", at + end);
    memcpy(*out, at, length);
    *out += length;
    *(*out)++ = 0;
    return at + end;
}

static const char *read_value(FlagFile *f, const char *at, const char *ends, char **out) {
    return *at == '"' || *at == '\'' ? read_quoted(f, at, out) : read_word(f, at, ends, out);
}

static const char *read_list(FlagFile *f, const char *at, size_t *count, char **out) {
    for (*count = 0; *at != ']'; ++*count) {
        if (!(at = read_value(f, at, ",]", out))) return NULL;
        at = skip_blanks(at);
        if (*at == ',') at = skip_blanks(at + 1);
        else if (*at != ']') return wrong(f, "a comma or ]", at);
    }
    return at + 1;
}

static const char *read_line(FlagFile *f, char *text, FlagLine *line) {
    static const char form[] = "flag = value";
    size_t length = strcspn(text, BLANKS "=");
    const char *equals = skip_blanks(text + length), *at = skip_blanks(equals + (*equals == '='));
    char *out = f->values;
    if (!length || *equals != '=') return wrong(f, form, text);
    text[length] = 0;
    *line = (FlagLine){.flag = text, .text = f->values, .count = 1};
    at = *at == '[' ? read_list(f, skip_blanks(at + 1), &line->count, &out) : read_value(f, at, "", &out);
    if (!at) return NULL;
    at = skip_blanks(at);
    return !*at || *at == '#' ? at : wrong(f, "the end of the line after a value", at);
}

bool flag_file_next(FlagFile *f, FlagLine *line) {
    while (*f->next) {
        char *text = f->next + strspn(f->next, BLANKS);
        f->next += strcspn(f->next, "\n");
        if (*f->next) *f->next++ = 0;
        f->line++;
        if (*text && *text != '#') return read_line(f, text, line) != NULL;
    }
    return false;
}

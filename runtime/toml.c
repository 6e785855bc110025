#include "runtime/toml.h"

#include <ctype.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY_LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

TomlReader toml_start(const char *path, char *text) {
    if (strncmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3;    // a byte order mark
    return (TomlReader){.path = path, .at = text, .line = 1};
}

// A character that TOML forbids, save in line ends.
static bool is_control(char c) {
    return iscntrl((unsigned char)c) && c != '\t';
}

// ---- errors

// Describes what is at `at`: a word, or a character.
static const char *found_at(const char *at, char *out, size_t size) {
    size_t length = strcspn(at, " \t\r\n,=#[]{}\"'");
    if (length == 0) length = 1;
    if (length > 40) length = 40;
    if (*at == 0) snprintf(out, size, "the end of the file");
    else if (*at == '\n' || (*at == '\r' && at[1] == '\n')) snprintf(out, size, "the end of the line");
    else if (is_control(*at)) snprintf(out, size, "the control character %d", *at);
    else snprintf(out, size, "%.*s", (int)length, at);
    return out;
}

static void wrong(TomlReader *r, const char *expected) {
    char found[64];
    error_set(&r->error, EXIT_INPUT, "%s: line %d: expected %s, found %s.", r->path, r->line, expected,
              found_at(r->at, found, sizeof found));
}

// ---- between values

static void skip_spaces(TomlReader *r) {
    r->at += strspn(r->at, " \t");
}

static void skip_comment(TomlReader *r) {
    skip_spaces(r);
    if (*r->at == '#')
        while (!is_control(*r->at)) r->at++;
}

// Skips the end of a line, if one is here.
static bool skip_line_end(TomlReader *r) {
    if (r->at[0] == '\r' && r->at[1] == '\n') r->at++;
    if (*r->at != '\n') return false;
    r->at++;
    r->line++;
    return true;
}

static void skip_blank_lines(TomlReader *r) {
    do skip_comment(r);
    while (skip_line_end(r));
}

// ---- values
//
// Each is written over its own source, which is never shorter. These functions return the end of the result, or NULL.

static char *put_utf8(char *out, uint32_t c) {
    if (c < 0x80) {
        *out++ = (char)c;
    } else if (c < 0x800) {
        *out++ = (char)(0xC0 | c >> 6);
        *out++ = (char)(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
        *out++ = (char)(0xE0 | c >> 12);
        *out++ = (char)(0x80 | (c >> 6 & 0x3F));
        *out++ = (char)(0x80 | (c & 0x3F));
    } else {
        *out++ = (char)(0xF0 | c >> 18);
        *out++ = (char)(0x80 | (c >> 12 & 0x3F));
        *out++ = (char)(0x80 | (c >> 6 & 0x3F));
        *out++ = (char)(0x80 | (c & 0x3F));
    }
    return out;
}

// Reads the digits of \uXXXX or \UXXXXXXXX. Returns 0, which no string may contain, if they are not a character.
static uint32_t read_code(TomlReader *r, size_t digits) {
    char hex[9] = "";
    memcpy(hex, r->at, strnlen(r->at, digits));
    if (strspn(hex, "0123456789abcdefABCDEF") != digits) return 0;
    unsigned long c = strtoul(hex, NULL, 16);
    if (c == 0 || c > 0x10FFFF || (c >= 0xD800 && c < 0xE000)) return 0;
    r->at += digits;
    return (uint32_t)c;
}

// Reads the escape whose backslash has just been read.
static bool read_escape(TomlReader *r, char **out) {
    static const char names[] = "btnfr\"\\", characters[] = "\b\t\n\f\r\"\\";
    const char *name = *r->at ? strchr(names, *r->at) : NULL;
    if (name) {
        *(*out)++ = characters[name - names];
        r->at++;
        return true;
    }
    size_t digits = 0;
    if (*r->at == 'u') digits = 4;
    if (*r->at == 'U') digits = 8;
    uint32_t c = 0;
    if (digits) {
        r->at++;
        c = read_code(r, digits);
    }
    if (c) *out = put_utf8(*out, c);
    else wrong(r, "an escape such as \\\\, \\\", \\n or \\u00e9");
    return c;
}

static bool at_quote(const TomlReader *r) {
    return *r->at == '"' || *r->at == '\'';
}

static char *read_string(TomlReader *r) {
    char quote = *r->at++, *out = r->at;
    while (*r->at != quote) {
        if (is_control(*r->at)) {
            wrong(r, quote == '"' ? "a closing \" on this line" : "a closing ' on this line");
            return NULL;
        }
        if (*r->at != '\\' || quote == '\'') {
            *out++ = *r->at++;
            continue;
        }
        r->at++;
        if (!read_escape(r, &out)) return NULL;
    }
    r->at++;
    return out;
}

// Is a number, or what is meant to be one, here?
static bool at_number(const TomlReader *r) {
    return *r->at && strchr("0123456789+-.", *r->at);
}

static size_t word_length(const char *word) {
    return strcspn(word, " \t\r\n,#]");
}

static bool is_digit(char c) {
    return isdigit((unsigned char)c);
}

// The end of the digits, among which there may be single underscores, or NULL if there are none.
static const char *digits_end(const char *at) {
    if (!is_digit(*at)) return NULL;
    while (is_digit(*at) || (*at == '_' && is_digit(at[1]))) at++;
    return at;
}

// Skips a number: digits, which start with 0 only if that is all, then maybe a point and digits, and an exponent.
static bool skip_number(TomlReader *r) {
    const char *first = r->at + (*r->at == '+' || *r->at == '-');
    const char *at = *first == '0' ? first + 1 : digits_end(first);
    if (at && *at == '.') at = digits_end(at + 1);
    if (at && (*at == 'e' || *at == 'E')) at = digits_end(at + 1 + (at[1] == '+' || at[1] == '-'));
    size_t length = word_length(r->at);
    if (at != r->at + length) {
        wrong(r, "a number such as 5, 0.5, 1_000 or 6e-4");
        return false;
    }
    r->at += length;
    return true;
}

// Skips the comma after an item of a list, if there is one.
static bool end_item(TomlReader *r) {
    skip_blank_lines(r);
    if (*r->at == ',') {
        r->at++;
    } else if (*r->at != ']') {
        wrong(r, "a comma or ]");
        return false;
    }
    skip_blank_lines(r);
    return true;
}

static char *read_numbers(TomlReader *r, char *start) {
    char *out = start;
    while (*r->at != ']') {
        const char *number = r->at;
        if (!at_number(r)) {
            wrong(r, "a number or ]");
            return NULL;
        }
        if (!skip_number(r)) return NULL;
        if (out > start) *out++ = ',';
        memmove(out, number, (size_t)(r->at - number));
        out += r->at - number;
        if (!end_item(r)) return NULL;
    }
    return out;
}

// The texts move to the front, each with its 0 byte, for which its quotes leave room.
static char *read_texts(TomlReader *r, char *out, size_t *count) {
    for (*count = 0; *r->at != ']'; ++*count) {
        const char *text = r->at + 1;
        if (!at_quote(r)) {
            wrong(r, "text in quotes or ]");
            return NULL;
        }
        const char *end = read_string(r);
        if (!end || !end_item(r)) return NULL;
        memmove(out, text, (size_t)(end - text));
        out += end - text;
        *out++ = 0;
    }
    return out;
}

static char *read_list(TomlReader *r, TomlEntry *entry) {
    char *start = r->at++;
    skip_blank_lines(r);
    entry->kind = at_quote(r) ? TOML_TEXTS : TOML_LIST;
    char *end = entry->kind == TOML_TEXTS ? read_texts(r, start, &entry->count) : read_numbers(r, start);
    if (end) r->at++;
    return end;
}

static char *read_word(TomlReader *r, TomlEntry *entry) {
    size_t length = word_length(r->at);
    bool is_switch = (length == 4 && !memcmp(r->at, "true", 4)) || (length == 5 && !memcmp(r->at, "false", 5));
    entry->kind = is_switch ? TOML_SWITCH : TOML_NUMBER;
    if (is_switch) return r->at += length;
    if (at_number(r)) return skip_number(r) ? r->at : NULL;
    wrong(r, "text in quotes, a number, true, false, or [a list]");
    return NULL;
}

static char *read_value(TomlReader *r, TomlEntry *entry) {
    entry->text = r->at;
    entry->count = 1;
    if (at_quote(r)) {
        entry->kind = TOML_STRING;
        entry->text++;
        return read_string(r);
    }
    return *r->at == '[' ? read_list(r, entry) : read_word(r, entry);
}

// ---- entries

// Reads the key and its =. Returns the key's length, or 0.
static size_t read_key(TomlReader *r) {
    size_t length = strspn(r->at, KEY_LETTERS);
    if (length == 0) {
        if (at_quote(r)) wrong(r, "a key without quotes");
        else wrong(r, *r->at == '[' ? "key = value (tables are not supported)" : "key = value");
        return 0;
    }
    r->at += length;
    skip_spaces(r);
    if (*r->at != '=') {
        wrong(r, "= after the key");
        return 0;
    }
    r->at++;
    skip_spaces(r);
    return length;
}

bool toml_next(TomlReader *r, TomlEntry *entry) {
    skip_blank_lines(r);
    if (*r->at == 0) return false;
    char *key = r->at;
    *entry = (TomlEntry){.key = key, .line = r->line};
    size_t length = read_key(r);
    char *end = length ? read_value(r, entry) : NULL;
    if (!end) return false;
    skip_comment(r);
    if (*r->at && !skip_line_end(r)) {
        wrong(r, "the end of the line after a value");
        return false;
    }
    // Everything before r->at has been read, so the ends of key and value may be overwritten.
    key[length] = *end = 0;
    return true;
}

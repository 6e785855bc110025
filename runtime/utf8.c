#include "runtime/utf8.h"

#include <string.h>
#include <unistd.h>

uint32_t utf8_get(const uint8_t *s, size_t n, size_t *width) {
    *width = 1;
    if (s[0] < 0x80) return s[0];
    if (s[0] < 0xC2 || s[0] > 0xF4) return REPLACEMENT;
    size_t want = 2;
    if (s[0] >= 0xE0) want = 3;
    if (s[0] >= 0xF0) want = 4;
    uint32_t code = s[0] & (0x7F >> want);
    for (; *width < want; ++*width) {
        uint8_t low = 0x80, high = 0xBF;
        if (*width == 1 && s[0] == 0xE0) low = 0xA0;     // overlong
        if (*width == 1 && s[0] == 0xED) high = 0x9F;    // surrogates
        if (*width == 1 && s[0] == 0xF0) low = 0x90;     // overlong
        if (*width == 1 && s[0] == 0xF4) high = 0x8F;    // beyond U+10FFFF
        if (*width == n || s[*width] < low || s[*width] > high) return REPLACEMENT;
        code = code << 6 | (s[*width] & 0x3F);
    }
    return code;
}

bool utf8_is_valid(const uint8_t *s, size_t n, size_t *width) {
    return utf8_get(s, n, width) != REPLACEMENT || (*width == 3 && memcmp(s, REPLACEMENT_BYTES, 3) == 0);
}

size_t utf8_put(uint32_t code, uint8_t *out) {
    size_t width = 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000);
    static const uint8_t leads[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = width; i-- > 1; code >>= 6) out[i] = (uint8_t)(0x80 | (code & 0x3F));
    out[0] = (uint8_t)(leads[width] | code);
    return width;
}

size_t utf8_valid(const uint8_t *text, size_t length) {
    size_t at = 0, width;
    while (at < length && utf8_is_valid(text + at, length - at, &width)) at += width;
    return at;
}

size_t utf8_repair(const uint8_t *text, size_t length, uint8_t *out) {
    size_t written = 0;
    for (size_t at = 0, width; at < length; at += width) {
        bool replaced = utf8_get(text + at, length - at, &width) == REPLACEMENT;
        memcpy(out + written, replaced ? (const uint8_t *)REPLACEMENT_BYTES : text + at, replaced ? 3 : width);
        written += replaced ? 3 : width;
    }
    return written;
}

// Does this character act on a terminal? Newline and tab do, but are allowed.
static bool is_control(uint32_t code) {
    bool c0 = code < 0x20 && code != '\n' && code != '\t', c1 = code >= 0x7F && code < 0xA0;
    bool bidirectional = code == 0x61C || code == 0x200E || code == 0x200F || (code >= 0x202A && code <= 0x202E) ||
                         (code >= 0x2066 && code <= 0x2069);
    return c0 || c1 || bidirectional;
}

size_t utf8_escape(const uint8_t *text, size_t length, uint8_t *out) {
    size_t written = 0;
    for (size_t at = 0, width; at < length; at += width) {
        uint32_t code = utf8_get(text + at, length - at, &width);
        bool invalid = !utf8_is_valid(text + at, length - at, &width);
        if (!invalid && !is_control(code)) {
            memcpy(out + written, text + at, width);
            written += width;
            continue;
        }
        char escape[8];
        if (invalid) width = 1;
        snprintf(escape, sizeof(escape), width == 1 ? "\\x%02x" : "\\u%04x", width == 1 ? text[at] : code);
        memcpy(out + written, escape, strlen(escape));
        written += strlen(escape);
    }
    return written;
}

PrintedName utf8_printed(const char *name) {
    PrintedName printed;
    size_t length = strnlen(name, sizeof(printed.text) / 4);
    printed.text[utf8_escape((const uint8_t *)name, length, (uint8_t *)printed.text)] = 0;
    return printed;
}

Utf8Printer utf8_printer(FILE *file) {
    return (Utf8Printer){.file = file, .escapes = isatty(fileno(file))};
}

void utf8_print_end(Utf8Printer *p) {
    if (p->have) fputs(REPLACEMENT_BYTES, p->file);
    p->have = 0;
}

static void print_byte(Utf8Printer *p, char c) {
    uint8_t escaped[16];
    p->bytes[p->have++] = (uint8_t)c;
    while (p->have) {
        size_t width, valid = utf8_valid(p->bytes, p->have);
        utf8_get(p->bytes, p->have, &width);
        if (!valid && width == p->have) return;    // it may still become a character
        if (valid && p->escapes) {
            fwrite(escaped, 1, utf8_escape(p->bytes, width, escaped), p->file);
        } else if (valid) {
            fwrite(p->bytes, 1, width, p->file);
        } else {
            fputs(REPLACEMENT_BYTES, p->file);
        }
        p->have -= width;
        memmove(p->bytes, p->bytes + width, p->have);
    }
}

void utf8_print(Utf8Printer *p, const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) print_byte(p, text[i]);
}

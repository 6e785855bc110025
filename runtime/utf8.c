#include "runtime/utf8.h"

#include <string.h>

uint32_t utf8_get(const uint8_t *s, size_t n, size_t *width) {
    *width = 1;
    if (s[0] < 0x80) { return s[0]; }
    if (s[0] < 0xC2 || s[0] > 0xF4) { return REPLACEMENT; }
    size_t want = 2;
    if (s[0] >= 0xE0) { want = 3; }
    if (s[0] >= 0xF0) { want = 4; }
    uint32_t code = s[0] & (0x7F >> want);
    for (; *width < want; ++*width) {
        uint8_t low = 0x80, high = 0xBF;
        if (*width == 1 && s[0] == 0xE0) { low = 0xA0; }     // overlong
        if (*width == 1 && s[0] == 0xED) { high = 0x9F; }    // surrogates
        if (*width == 1 && s[0] == 0xF0) { low = 0x90; }     // overlong
        if (*width == 1 && s[0] == 0xF4) { high = 0x8F; }    // beyond U+10FFFF
        if (*width == n || s[*width] < low || s[*width] > high) { return REPLACEMENT; }
        code = code << 6 | (s[*width] & 0x3F);
    }
    return code;
}

size_t utf8_put(uint32_t code, uint8_t *out) {
    size_t width = 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000);
    static const uint8_t leads[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = width; i-- > 1; code >>= 6) { out[i] = (uint8_t)(0x80 | (code & 0x3F)); }
    out[0] = (uint8_t)(leads[width] | code);
    return width;
}

size_t utf8_valid(const uint8_t *text, size_t length) {
    size_t at = 0, width;
    while (at < length) {
        bool replaced = utf8_get(text + at, length - at, &width) == REPLACEMENT;
        if (replaced && (width != 3 || memcmp(text + at, REPLACEMENT_BYTES, 3) != 0)) { break; }
        at += width;
    }
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

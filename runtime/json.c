#include "runtime/json.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/file.h"
#include "runtime/utf8.h"

// cJSON needs at least 64 bytes per value.
enum { JSON_DEPTH = 32, JSON_COMMAS = 10000000 };

// ---- a scan for everything that cJSON would accept

typedef struct {
    const unsigned char *at, *end;
    const char *wrong;    // what was found at `at`
} Scan;

static bool wrong(Scan *scan, const char *what) {
    scan->wrong = what;
    return false;
}

static bool scan_string(Scan *scan) {
    scan->at++;
    while (scan->at < scan->end && *scan->at != '"') {
        size_t left = (size_t)(scan->end - scan->at), width;
        if (*scan->at < 0x20) return wrong(scan, "a control character in a string");
        if (*scan->at >= 0x80) {
            if (!utf8_is_valid(scan->at, left, &width)) return wrong(scan, "a byte that is not UTF-8");
            scan->at += width;
        } else if (*scan->at == '\\') {
            if (left >= 6 && !memcmp(scan->at, "\\u0000", 6)) return wrong(scan, "a NUL in a string");
            scan->at += left >= 2 ? 2 : 1;
        } else {
            scan->at++;
        }
    }
    if (scan->at >= scan->end) return wrong(scan, "the end of the text in a string");
    scan->at++;
    return true;
}

static size_t scan_digits(Scan *scan) {
    const unsigned char *start = scan->at;
    while (scan->at < scan->end && *scan->at >= '0' && *scan->at <= '9') scan->at++;
    return (size_t)(scan->at - start);
}

static bool scan_number(Scan *scan) {
    if (*scan->at == '-') scan->at++;
    bool zero = scan->at < scan->end && *scan->at == '0';
    size_t digits = scan_digits(scan);
    if (digits == 0 || (zero && digits > 1)) return wrong(scan, "a malformed number");
    if (scan->at < scan->end && *scan->at == '.') {
        scan->at++;
        if (scan_digits(scan) == 0) return wrong(scan, "a malformed number");
    }
    if (scan->at < scan->end && (*scan->at | 32) == 'e') {
        scan->at++;
        if (scan->at < scan->end && (*scan->at == '+' || *scan->at == '-')) scan->at++;
        if (scan_digits(scan) == 0) return wrong(scan, "a malformed number");
    }
    return true;
}

static bool scan_text(Scan *scan) {
    int depth = 0, commas = 0;
    while (scan->at < scan->end) {
        unsigned char c = *scan->at;
        if (c == '"') {
            if (!scan_string(scan)) return false;
        } else if (c == '-' || (c >= '0' && c <= '9')) {
            if (!scan_number(scan)) return false;
        } else {
            if (c >= 0x80 || (c < 0x20 && c != '\t' && c != '\n' && c != '\r')) return wrong(scan, "a stray byte");
            if ((c == '{' || c == '[') && ++depth > JSON_DEPTH) return wrong(scan, "more than 32 levels of nesting");
            if (c == '}' || c == ']') depth--;
            if (c == ',' && ++commas > JSON_COMMAS) return wrong(scan, "more than 10,000,000 values");
            scan->at++;
        }
    }
    return depth <= 0 || wrong(scan, "the end of the text");
}

// ---- duplicate names

static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Returns the first duplicate name in the item or any object inside it, or NULL.
static const char *repeated_name(const cJSON *item) {
    const char *found = NULL;
    const cJSON *child;
    size_t count = 0, i = 0;
    cJSON_ArrayForEach(child, item) count++;
    cJSON_ArrayForEach(child, item) {
        if ((found = repeated_name(child))) return found;
    }
    if (!cJSON_IsObject(item) || count < 2) return NULL;
    const char **names = allocate(count, sizeof *names, "the names of a JSON object");
    cJSON_ArrayForEach(child, item) names[i++] = child->string;
    qsort(names, count, sizeof *names, compare_names);
    for (i = 1; i < count && !found; i++) {
        if (!strcmp(names[i - 1], names[i])) found = names[i];
    }
    free(names);
    return found;
}

// ---- parsing

static cJSON *malformed(const char *text, const char *at, JsonPlace place, const char *found, Error *error) {
    size_t line = place.line;
    for (const char *p = text; p < at; p++) line += *p == '\n';
    error_set(error, EXIT_INPUT,
              "%s: expected JSON, found %s at offset %" PRIu64 " (line %zu).\n"
              "  The file is damaged. Get another copy, or create it again.",
              place.path, found, place.offset + (uint64_t)(at - text), line);
    return NULL;
}

cJSON *json_parse_repeated(const char *text, size_t size, JsonPlace place, Error *error) {
    Scan scan = {.at = (const unsigned char *)text, .end = (const unsigned char *)text + size};
    if (!scan_text(&scan)) return malformed(text, (const char *)scan.at, place, scan.wrong, error);
    const char *end = text;
    cJSON *item = cJSON_ParseWithLengthOpts(text, size, &end, 0);
    if (!item) return malformed(text, end, place, size ? "something else" : "the end of the text", error);
    while (end < text + size && strchr(" \t\r\n", *end)) end++;
    if (end < text + size) {
        cJSON_Delete(item);
        return malformed(text, end, place, "more text after its end", error);
    }
    return item;
}

cJSON *json_parse(const char *text, size_t size, JsonPlace place, Error *error) {
    cJSON *item = json_parse_repeated(text, size, place, error);
    const char *name = repeated_name(item);
    if (name) {
        error_set(
            error, EXIT_INPUT,
            "%s: the name \"%.200s\" occurs twice in the same JSON object (in the JSON that begins at offset %" PRIu64
            ").\n  The file is damaged. Get another copy, or create it again.",
            place.path, name, place.offset);
        cJSON_Delete(item);
        return NULL;
    }
    return item;
}

cJSON *json_read(const char *path, size_t limit, Error *error) {
    size_t size;
    char *text = file_read(path, limit, &size, error);
    if (!text) return NULL;
    cJSON *item = json_parse(text, size, (JsonPlace){path, 1, 0}, error);
    free(text);
    return item;
}

bool json_u64(const cJSON *item, uint64_t *value) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble < 9007199254740992.0)) return false;
    *value = (uint64_t)item->valuedouble;
    return (double)*value == item->valuedouble;
}

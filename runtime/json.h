// A strict JSON reader for files that may be damaged or malicious. Beyond what cJSON checks, it requires valid UTF-8,
// no NUL (not even an escaped one, since C strings would end there), no duplicate names in an object, at most 32 levels
// and 10,000,000 values, and nothing after the end.
#ifndef RUNTIME_JSON_H
#define RUNTIME_JSON_H

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

// Where a text begins in its file: the line from 1, and the byte. Only used in errors.
typedef struct {
    const char *path;
    size_t line;
    uint64_t offset;
} JsonPlace;

// Parses `size` bytes. Returns NULL on error, EXIT_INPUT; free the result with cJSON_Delete().
cJSON *json_parse(const char *text, size_t size, JsonPlace place, Error *error);

// The same, but names may be repeated in an object, of which Python uses the last.
cJSON *json_parse_repeated(const char *text, size_t size, JsonPlace place, Error *error);

// The largest files: of settings and states; and of tokenizers and lists of tensors.
enum { JSON_SMALL = 4 << 20, JSON_LARGE = 64 << 20 };

// Reads and parses a file of at most `limit` bytes. Returns NULL on error.
cJSON *json_read(const char *path, size_t limit, Error *error);

// Returns true and sets *value if the item is an integer from 0 to 2^53 - 1 (a JSON number is a double). The item may
// be NULL.
bool json_u64(const cJSON *item, uint64_t *value);

#endif

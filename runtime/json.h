// JSON from files that may be damaged or hostile, strictly: UTF-8, no NUL (not even escaped: C strings would end
// there), no name twice in an object, at most 32 levels and 10,000,000 values, nothing after the end. cJSON itself lets
// these pass.
#ifndef RUNTIME_JSON_H
#define RUNTIME_JSON_H

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

// Parses `size` bytes. `path` and `offset` (of the text in its file) are for the error, EXIT_INPUT. NULL on error; free
// with cJSON_Delete().
cJSON *json_parse(const char *text, size_t size, const char *path, uint64_t offset, Error *error);

// Reads and parses a file of at most 64 MiB. NULL on error.
cJSON *json_read(const char *path, Error *error);

// True and the value where the item is a whole number from 0 to 2^53 - 1 (a JSON number is a double). NULL is false.
bool json_u64(const cJSON *item, uint64_t *value);

#endif

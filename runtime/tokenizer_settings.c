// The tokenizer_config.json of a stranger's folder, made safe for our checkpoints, which people load with
// trust_remote_code=True because of our own modeling file.
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/tokenizer.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

// A key that contains one of these names code or decides whether it runs (data/vocabulary.py has the same list).
static const char *const CODE[] = {"auto_map", "custom_pipelines", "trust_remote_code", "code_revision"};

static bool names_code(const char *key) {
    for (size_t i = 0; i < COUNT(CODE); i++)
        if (strstr(key, CODE[i])) return true;
    return false;
}

// Removes what names code from the item and everything in it. Was there any?
static bool remove_code(cJSON *item) {
    bool found = false;
    for (cJSON *child = item->child, *next; child; child = next) {
        next = child->next;
        if (child->string && names_code(child->string)) {
            cJSON_Delete(cJSON_DetachItemViaPointer(item, child));
            found = true;
        } else if (remove_code(child)) found = true;
    }
    return found;
}

// Removes every tokenizer_class that cannot be one of transformers' own, which are names without a module; all of them
// if `any`. Were there some?
static bool remove_class(cJSON *json, bool any) {
    bool found = false;
    for (cJSON *child = json->child, *next; child; child = next) {
        next = child->next;
        if (!child->string || strcmp(child->string, "tokenizer_class") != 0 || cJSON_IsNull(child)) continue;
        const char *name = cJSON_GetStringValue(child);
        size_t plain = 0;
        while (name && (isalnum((unsigned char)name[plain]) || name[plain] == '_')) plain++;
        if (!any && name && !name[plain]) continue;
        cJSON_Delete(cJSON_DetachItemViaPointer(json, child));
        found = true;
    }
    return found;
}

char *tokenizer_settings(const char *path, Error *error) {
    size_t size;
    char *text = file_read(path, JSON_BYTES, &size, error), *safe = text;
    cJSON *json = text ? json_parse_repeated(text, size, (JsonPlace){path, 1, 0}, error) : NULL;
    bool code = json && remove_code(json), class = json && remove_class(json, code);
    if (code || class) {
        cJSON_AddStringToObject(json, "tokenizer_class", "PreTrainedTokenizerFast");
        safe = cJSON_Print(json);
        if (!safe) error_set(error, EXIT_RESOURCE, "%s: out of memory.", path);
    }
    if (!json) safe = NULL;
    if (safe != text) free(text);
    cJSON_Delete(json);
    return safe;
}

// The files of a stranger's tokenizer, made safe for our checkpoints, which people publish, and load with
// trust_remote_code=True because of our own modeling file.
#define _GNU_SOURCE
#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/utf8.h"
#include "text/tokenizer.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

// A key that contains one of these, in any case, names code or decides whether it runs. data/vocabulary.py has the same
// list.
static const char *const CODE[] = {"auto_map", "custom_pipelines", "trust_remote_code", "code_revision"};

static bool names_code(const char *key) {
    for (size_t i = 0; i < COUNT(CODE); i++)
        if (strcasestr(key, CODE[i])) return true;
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

// The text of tokenizer_config.json without what names code, in place of `text`, which it frees.
static char *safe_settings(char *text, cJSON *json, const char *path, Error *error) {
    if (!cJSON_IsObject(json)) {
        free(text);
        error_set(error, EXIT_INPUT, "%s: expected a JSON object, found another value.\n  Get another copy.", path);
        return NULL;
    }
    bool code = remove_code(json), class = remove_class(json, code);
    if (!code && !class) return text;
    free(text);
    cJSON_AddStringToObject(json, "tokenizer_class", "PreTrainedTokenizerFast");
    char *safe = cJSON_Print(json);
    if (!safe) error_set(error, EXIT_RESOURCE, "%s: out of memory.", path);
    return safe;
}

// Is this what a chat_template.jinja contains?
static bool check_text(const char *text, size_t size, const char *path, Error *error) {
    return (!memchr(text, 0, size) && utf8_valid((const uint8_t *)text, size) == size) ||
           error_set(error, EXIT_INPUT, "%s: expected text in UTF-8, found other bytes.\n  Get another copy.", path);
}

char *tokenizer_file(const char *folder, size_t i, bool follow_links, Error *error) {
    char path[PATH_MAX + 64];
    size_t size, limit = i < TOKENIZER_TEMPLATE ? JSON_LARGE : TEMPLATE_BYTES;
    snprintf(path, sizeof path, "%s/%s", folder, tokenizer_files[i]);
    char *text = file_read_inside(follow_links ? NULL : folder, path, limit, &size, error);
    if (!text) return NULL;
    cJSON *json = NULL;
    bool ok = i == TOKENIZER_TEMPLATE
                  ? check_text(text, size, path, error)
                  : (json = json_parse_repeated(text, size, (JsonPlace){path, 1, 0}, error)) != NULL;
    if (ok && i == TOKENIZER_SETTINGS) text = safe_settings(text, json, path, error);
    cJSON_Delete(json);
    if (ok) return text;
    free(text);
    return NULL;
}

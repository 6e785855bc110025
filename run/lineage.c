#include "run/lineage.h"

#include <stdarg.h>
#include <stdbool.h>
#include <string.h>

cJSON *lineage_add(cJSON *lineage, int64_t step, const char *event, ...) {
    cJSON *entry = cJSON_CreateObject();
    cJSON_AddNumberToObject(entry, "step", (double)step);
    cJSON_AddStringToObject(entry, "event", event);
    va_list args;
    va_start(args, event);
    for (const char *key = va_arg(args, const char *); key; key = va_arg(args, const char *))
        cJSON_AddStringToObject(entry, key, va_arg(args, const char *));
    va_end(args);
    cJSON_AddItemToArray(lineage, entry);
    return entry;
}

static const char *entry_text(const cJSON *entry, const char *key) {
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, key));
}

// Is this entry a switch of normalizer at `step` or later?
static bool is_switch_from(const cJSON *entry, int64_t step) {
    const char *event = entry_text(entry, "event");
    const cJSON *when = cJSON_GetObjectItemCaseSensitive(entry, "step");
    return event && !strcmp(event, "attn-switch") && cJSON_IsNumber(when) && when->valuedouble >= (double)step;
}

cJSON *lineage_cut(cJSON *lineage, int64_t step, const char *made) {
    cJSON *cut = cJSON_CreateArray();
    int keep = 0;
    for (int i = 0; made && i < cJSON_GetArraySize(lineage); i++) {
        const cJSON *entry = cJSON_GetArrayItem(lineage, i);
        const char *attn = entry_text(entry, "attn");
        if (is_switch_from(entry, step) && !is_switch_from(entry, step + 1) && attn && !strcmp(attn, made))
            keep = i + 1;
    }
    for (int i = keep; i < cJSON_GetArraySize(lineage);) {
        if (is_switch_from(cJSON_GetArrayItem(lineage, i), step))
            cJSON_AddItemToArray(cut, cJSON_DetachItemFromArray(lineage, i));
        else i++;
    }
    return cut;
}

const char *lineage_attn(const cJSON *lineage) {
    for (int i = cJSON_GetArraySize(lineage); i-- > 0;) {
        const char *attn = entry_text(cJSON_GetArrayItem(lineage, i), "attn");
        if (attn) return attn;
    }
    return NULL;
}

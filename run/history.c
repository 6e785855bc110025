#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "run/parts.h"
#include "runtime/process.h"
#include "runtime/version.h"

enum { HISTORY_MOST = 200 };    // entries in run.json

static cJSON *flags_json(const TrainOptions *o) {
    char *text = options_json(o->table, o->count);
    cJSON *json = cJSON_Parse(text);
    free(text);
    return json;
}

cJSON *changed_flags(const Run *run) {
    cJSON *changed = cJSON_CreateObject();
    if (!run->before.table) return changed;
    cJSON *before = flags_json(&run->before), *now = flags_json(&run->o);
    const cJSON *value;
    cJSON_ArrayForEach(value, now) {
        const cJSON *was = cJSON_GetObjectItemCaseSensitive(before, value->string);
        if (cJSON_Compare(was, value, true) || !strcmp(value->string, "resume") || !strcmp(value->string, "dry-run"))
            continue;
        cJSON *change = cJSON_AddObjectToObject(changed, value->string);
        cJSON_AddItemToObject(change, "from", cJSON_Duplicate(was, true));
        cJSON_AddItemToObject(change, "to", cJSON_Duplicate(value, true));
    }
    cJSON_Delete(before);
    cJSON_Delete(now);
    return changed;
}

// Removes the oldest entries but the first: those without changed flags, then, if that is not enough, others. Returns
// their number.
static int shorten(cJSON *history, bool changed) {
    int count = cJSON_GetArraySize(history), removed = 0;
    cJSON *next = count > 1 ? history->child->next : NULL;
    for (cJSON *entry = next; entry && count - removed > HISTORY_MOST; entry = next) {
        next = entry->next;
        if (!changed && cJSON_HasObjectItem(entry, "changed")) continue;
        cJSON_Delete(cJSON_DetachItemViaPointer(history, entry));
        removed++;
    }
    return removed;
}

void history_add(Run *run) {
    char utc[32];
    time_t now = time(NULL);
    struct tm parts;
    strftime(utc, sizeof utc, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &parts));
    cJSON *entry = cJSON_CreateObject(), *changed = changed_flags(run);
    cJSON_AddNumberToObject(entry, "step", (double)run->step);
    cJSON_AddStringToObject(entry, "event", run->resumed ? "resume" : "start");
    cJSON_AddStringToObject(entry, "time", utc);
    cJSON_AddNumberToObject(entry, "ranks", process.size);
    version_add(entry);
    if (cJSON_GetArraySize(changed) > 0) cJSON_AddItemToObject(entry, "changed", changed);
    else cJSON_Delete(changed);
    if (!run->history) run->history = cJSON_CreateArray();
    cJSON_AddItemToArray(run->history, entry);
    run->history_omitted += shorten(run->history, false);
    run->history_omitted += shorten(run->history, true);
}

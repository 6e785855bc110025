#include "run/run_json.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/path.h"
#include "runtime/process.h"
#include "runtime/version.h"

#define NEW_RUN "  Use --init-from %s to start a new run from its newest checkpoint."

// Is it an array of objects whose "step", if they have one, is a whole number?
static bool is_list_of_events(const cJSON *list) {
    const cJSON *entry;
    uint64_t step;
    cJSON_ArrayForEach(entry, list) {
        const cJSON *at = cJSON_GetObjectItemCaseSensitive(entry, "step");
        if (!cJSON_IsObject(entry) || (at && !json_u64(at, &step))) return false;
    }
    return cJSON_IsArray(list);
}

bool run_json_resume(const char *out, TrainOptions *options, TrainOptions *before, RunJson *found, Error *error) {
    const FolderPath path = folder_path(out, "run.json");
    if (access(path.text, F_OK) != 0 && errno == ENOENT)
        return error_set(error, EXIT_INPUT,
                         "%s: this file is missing, without which --resume is not possible.\n" NEW_RUN, path.text,
                         shell_word(out).text);
    cJSON *json = json_read(path.text, JSON_SMALL, error);
    if (!json) return false;
    cJSON *arguments = cJSON_DetachItemFromObjectCaseSensitive(json, "arguments");
    cJSON *lineage = cJSON_DetachItemFromObjectCaseSensitive(json, "lineage");
    cJSON *history = cJSON_DetachItemFromObjectCaseSensitive(json, "history");
    char *text = cJSON_IsObject(arguments) ? cJSON_PrintUnformatted(arguments) : NULL;
    *found = (RunJson){lineage, history, 0, arguments};
    json_u64(cJSON_GetObjectItemCaseSensitive(json, "history_omitted"), &found->omitted);
    bool ok = (text && is_list_of_events(lineage)) ||
              error_set(error, EXIT_INPUT,
                        "%s: expected \"arguments\" and \"lineage\", without which --resume is not possible.\n" NEW_RUN,
                        path.text, shell_word(out).text);
    ok = ok && (!history || is_list_of_events(history) ||
                error_set(error, EXIT_INPUT,
                          "%s: expected \"history\" to be an array of objects with a whole number as \"step\".\n"
                          "  Remove it.",
                          path.text));
    ok = ok && options_resume(before->table, before->count, text, error) &&
         options_resume(options->table, options->count, text, error);
    cJSON *to_repeat = cJSON_GetObjectItemCaseSensitive(json, "to_repeat");
    while (ok && cJSON_GetArraySize(to_repeat) > 0)
        cJSON_AddItemToArray(lineage, cJSON_DetachItemFromArray(to_repeat, 0));
    free(text);
    cJSON_Delete(json);
    return ok;
}

int64_t run_json_number(const char *out, const char *flag, int64_t otherwise) {
    Error ignored;
    uint64_t number;
    cJSON *json = json_read(folder_path(out, "run.json").text, JSON_SMALL, &ignored);
    const cJSON *arguments = cJSON_GetObjectItemCaseSensitive(json, "arguments");
    bool found = json_u64(cJSON_GetObjectItemCaseSensitive(arguments, flag), &number);
    cJSON_Delete(json);
    return found ? (int64_t)number : otherwise;
}

bool run_json_same_data(const char *out, const char *which, const char *fingerprint, Error *error) {
    cJSON *json = json_read(folder_path(out, "run.json").text, JSON_SMALL, error);
    if (!json) return false;
    const cJSON *data = cJSON_GetObjectItemCaseSensitive(json, "data");
    const cJSON *then = cJSON_GetObjectItemCaseSensitive(data, which);
    cJSON *now = fingerprint ? cJSON_Parse(fingerprint) : NULL;
    bool same = (!then || cJSON_IsNull(then)) ? !now : cJSON_Compare(then, now, true);
    if (!same) {
        char *was = then ? cJSON_PrintUnformatted(then) : NULL;
        error_set(error, EXIT_USAGE,
                  "--resume: the %s data differs from the run's.\n  run's data: %s\n  data given: %s\n"
                  "  Restore the original shards, or start a new run from the weights with --init-from.",
                  which, was ? was : "(none)", fingerprint ? fingerprint : "(none)");
        free(was);
    }
    cJSON_Delete(now);
    cJSON_Delete(json);
    return same;
}

static void add_data(cJSON *data, const char *which, const char *fingerprint) {
    if (fingerprint) cJSON_AddItemToObject(data, which, cJSON_Parse(fingerprint));
}

bool run_json_write(const char *out, const TrainOptions *options, const char *train, const char *val,
                    const RunJson *rest, const cJSON *to_repeat, Error *error) {
    cJSON *json = cJSON_CreateObject();
    char *given = options_json(options->table, options->count);
    cJSON *arguments = cJSON_Parse(given);
    cJSON_AddItemToObject(json, "arguments", arguments);
    for (const Option *row = options->table; row < options->table + options->count; row++) {
        const cJSON *kept = cJSON_GetObjectItemCaseSensitive(rest->arguments, row->name);
        if (row->only_in && kept) cJSON_AddItemToObject(arguments, row->name, cJSON_Duplicate(kept, true));
    }
    version_add(json);
    cJSON_AddNumberToObject(json, "ranks", process.size);
    cJSON *data = cJSON_AddObjectToObject(json, "data");
    add_data(data, "train", train);
    add_data(data, "val", val);
    cJSON_AddItemToObject(json, "lineage", cJSON_Duplicate(rest->lineage, true));
    cJSON_AddItemToObject(json, "history", cJSON_Duplicate(rest->history, true));
    if (rest->omitted) cJSON_AddNumberToObject(json, "history_omitted", (double)rest->omitted);
    if (cJSON_GetArraySize(to_repeat) > 0) cJSON_AddItemToObject(json, "to_repeat", cJSON_Duplicate(to_repeat, true));
    char *text = cJSON_Print(json);
    bool done = text && file_replace_text(folder_path(out, "run.json").text, text, error);
    if (!text) error_set(error, EXIT_RESOURCE, "out of memory for run.json.");
    free(text);
    free(given);
    cJSON_Delete(json);
    return done;
}

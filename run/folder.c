#include "run/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "run/checkpoint.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/own.h"
#include "runtime/process.h"
#include "runtime/shards.h"
#include "runtime/tokenizer.h"
#include "runtime/version.h"

#ifndef COMMIT
#define COMMIT "unknown"
#endif

FolderPath folder_path(const char *out, const char *name) {
    FolderPath path;
    snprintf(path.text, sizeof path.text, "%s/%s", out, name);
    return path;
}

FolderPath folder_of(const char *path) {
    FolderPath folder;
    snprintf(folder.text, sizeof folder.text, "%s", path);
    char *slash = strrchr(folder.text, '/');
    if (slash) *slash = 0;
    else strcpy(folder.text, ".");
    return folder;
}

static bool tokens_differ(const Tokenizer *a, const Tokenizer *b) {
    for (int32_t id = 0; id < tokenizer_vocab(a) && id < tokenizer_vocab(b); id++) {
        size_t length, other_length;
        const char *token = tokenizer_token(a, id, &length), *other = tokenizer_token(b, id, &other_length);
        if (token && other && (length != other_length || memcmp(token, other, length) != 0)) return true;
    }
    return false;
}

TokenMatch folder_match_tokens(const char *folder, const char *other) {
    FileHash a, b;
    Error ignored;
    if (!file_hash(AT_FDCWD, folder_path(folder, tokenizer_files[0]).text, JSON_LARGE, &a, &ignored) ||
        !file_hash(AT_FDCWD, folder_path(other, tokenizer_files[0]).text, JSON_LARGE, &b, &ignored) ||
        XXH128_isEqual(a.xxh3, b.xxh3))
        return TOKENS_EQUAL;
    Tokenizer *one = tokenizer_open(folder, &ignored), *two = tokenizer_open(other, &ignored);
    TokenMatch match = TOKENS_UNKNOWN;
    if (one && two) match = tokens_differ(one, two) ? TOKENS_DIFFER : TOKENS_EQUAL;
    tokenizer_close(one);
    tokenizer_close(two);
    return match;
}

TokenMatch folder_match_shards(const char *folder, const Shards *shards, FolderPath *other) {
    FolderPath last = {""};
    for (size_t i = 0; i < shards_count(shards); i++) {
        *other = folder_of(shards_path(shards, i));
        if (!strcmp(other->text, last.text)) continue;
        last = *other;
        TokenMatch match = folder_match_tokens(folder, other->text);
        if (match != TOKENS_EQUAL) return match;
    }
    return TOKENS_EQUAL;
}

bool folder_check_name(const char *out, Error *error) {
    enum { LONGEST = PATH_MAX - 100 };    // leaves room for the files of a checkpoint
    if (!out[0]) return error_set(error, EXIT_USAGE, "--out is empty: expected the name of the run folder.");
    return strlen(out) <= LONGEST ||
           error_set(error, EXIT_USAGE, "--out %.60s...: expected a path of at most %d bytes, found %zu.", out, LONGEST,
                     strlen(out));
}

bool folder_lock(int *lock, const char *out, bool create, Error *error) {
    if (*lock >= 0) return true;
    if (create && !file_make_folders(out, error)) return false;
    const FolderPath file = folder_path(out, "lock");
    const char *path = file.text;
    if (!create && access(path, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR)) return true;
    const char *reason;
    int fd = own_open(path, O_RDWR | (create ? O_CREAT : 0), &reason);
    if (fd < 0)
        return error_set(error, EXIT_RESOURCE, "%s: cannot write it: %s.\n  %s", path, reason,
                         file_remedy(errno, "Choose another --out, or get write permission for this one."));
    bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
    if (!locked && errno != EWOULDBLOCK) {
        error_set(error, EXIT_RESOURCE, "%s: cannot lock it: %s.\n  Choose an --out on a file system with locks.", path,
                  strerror(errno));
        close(fd);
        return false;
    }
    if (!locked) {
        char holder[32] = "";
        ssize_t n = read(fd, holder, sizeof holder - 1);
        holder[n > 0 ? strcspn(holder, "\n") : 0] = 0;
        close(fd);
        return error_set(error, EXIT_BUSY,
                         "%s: another job (process %s) is using this run folder.\n"
                         "  Wait until it ends, or choose another --out.",
                         out, holder[0] ? holder : "unknown");
    }
    char text[32];
    int length = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    errno = ENOSPC;    // the reason of a short write, which does not set errno
    if (ftruncate(fd, 0) != 0 || write(fd, text, (size_t)length) != length) {
        error_set(error, EXIT_RESOURCE, "%s: cannot write it: %s.\n  Free some space there, or choose another --out.",
                  path, strerror(errno));
        close(fd);
        return false;
    }
    *lock = fd;
    return true;
}

static bool lock_intact(int lock, const char *out) {
    struct stat ours, there;
    return lock >= 0 && fstat(lock, &ours) == 0 && stat(folder_path(out, "lock").text, &there) == 0 &&
           ours.st_ino == there.st_ino && ours.st_dev == there.st_dev;
}

bool folder_intact(int lock, const char *out) {
    return lock_intact(lock, out) && access(folder_path(out, "run.json").text, F_OK) == 0;
}

bool folder_lock_again(int *lock, const char *out, Error *error) {
    int old = *lock;
    if (lock_intact(old, out)) return true;
    *lock = -1;
    if (folder_lock(lock, out, true, error)) {
        if (old >= 0) close(old);
        return true;
    }
    *lock = old;
    return lock_intact(old, out);    // the folder may have reappeared with our own lock in it
}

bool folder_has_run(const char *out) {
    char path[PATH_MAX];
    uint64_t step;
    struct stat info;
    if (lstat(folder_path(out, "metrics.jsonl").text, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0)
        return true;
    return checkpoint_newest(out, path, sizeof path, &step);
}

bool folder_is_new(const char *out, Error *error) {
    if (!folder_has_run(out)) return true;
    return error_set(error, EXIT_USAGE,
                     "--out %s: this folder already contains a run. Resume it with --resume, or choose another folder.",
                     out);
}

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
    cJSON *arguments = cJSON_GetObjectItemCaseSensitive(json, "arguments");
    cJSON *lineage = cJSON_DetachItemFromObjectCaseSensitive(json, "lineage");
    cJSON *history = cJSON_DetachItemFromObjectCaseSensitive(json, "history");
    char *text = cJSON_IsObject(arguments) ? cJSON_PrintUnformatted(arguments) : NULL;
    *found = (RunJson){lineage, history, 0};
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

void folder_add_program(cJSON *json) {
    cJSON_AddStringToObject(json, "program", program_name);
    cJSON_AddStringToObject(json, "version", ATTN_C_VERSION);
    cJSON_AddStringToObject(json, "commit", COMMIT);
}

bool run_json_write(const char *out, const TrainOptions *options, const char *train, const char *val,
                    const RunJson *rest, const cJSON *to_repeat, Error *error) {
    cJSON *json = cJSON_CreateObject();
    char *arguments = options_json(options->table, options->count);
    cJSON_AddItemToObject(json, "arguments", cJSON_Parse(arguments));
    folder_add_program(json);
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
    free(arguments);
    cJSON_Delete(json);
    return done;
}

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

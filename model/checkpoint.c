#define _GNU_SOURCE
#include "model/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/own.h"

// The folders in OUT/ckpt. Readers only accept step-* and .old-*; the other two are only ever removed.
#define STEP  "step-"         // complete
#define TMP   ".tmp-step-"    // being written
#define OLD   ".old-step-"    // complete; set aside while a new folder of the same step takes its name
#define TRASH ".trash-step-"  // being deleted

enum { MANIFEST_BYTES = 1 << 16 };

#define DAMAGED "The checkpoint is damaged. Use another one; to resume from the previous one, delete this folder."

// Writes folder + "/" + the formatted name into `out` (PATH_MAX bytes) and returns `out`.
static char *join(char *out, const char *folder, const char *format, ...) __attribute__((format(printf, 3, 4)));
static char *join(char *out, const char *folder, const char *format, ...) {
    va_list args;
    size_t length = strlen(folder);
    int added = -1;
    if (length + 2 < PATH_MAX) {
        memcpy(out, folder, length);
        out[length++] = '/';
        va_start(args, format);
        added = vsnprintf(out + length, PATH_MAX - length, format, args);
        va_end(args);
    }
    if (added < 0 || length + (size_t)added >= PATH_MAX)
        fail(EXIT_USAGE, "%.200s...: this folder's path is too long.", folder);
    return out;
}

static char *join_step(char *out, const char *root, const char *prefix, uint64_t step) {
    return join(out, root, "%s%08" PRIu64, prefix, step);
}

// ---- the manifest

// {"files": {"model.safetensors": {"size": 12, "xxh3_128": "32 hexadecimal digits, as printed by xxhsum -H2"}, ...}}

// A run is only resumed with all of these files; weights alone are loaded with the first WEIGHTS_FILES.
static const char *const needed_files[] = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"};
enum { WEIGHTS_FILES = 2, RESUME_FILES = 4 };

// The most bytes of a file in a checkpoint. Tensors that exceed the memory several times over cannot be loaded here, so
// they need not be hashed first.
static uint64_t most_bytes(const char *name) {
    bool tensors = !strcmp(name, needed_files[1]) || !strcmp(name, needed_files[2]);
    return tensors ? (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) * 4 : JSON_LARGE;
}

static bool check_entry(const char *folder, const char *manifest, const cJSON *entry, bool hashes, Error *error) {
    char path[PATH_MAX];
    struct stat info;
    uint64_t size;
    FileHash found;
    const char *hash = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "xxh3_128"));
    if (!json_u64(cJSON_GetObjectItemCaseSensitive(entry, "size"), &size) || !hash || strchr(entry->string, '/') ||
        strlen(entry->string) > NAME_MAX) {
        return error_set(
            error, EXIT_INPUT,
            "%s: expected a file name without a folder, with \"size\" and \"xxh3_128\", found something else "
            "at \"%.100s\".\n  " DAMAGED,
            manifest, entry->string);
    }
    join(path, folder, "%s", entry->string);
    if (stat(path, &info) != 0 && errno == ENOENT) {
        return error_set(error, EXIT_INPUT, "%s: this file is missing, although manifest.json lists it.\n  " DAMAGED,
                         path);
    }
    if (stat(path, &info) != 0) {
        return error_set(error, EXIT_INPUT, "%s: reading its size failed: %s.\n  Check the path and its permissions.",
                         path, strerror(errno));
    }
    if ((uint64_t)info.st_size != size) {
        return error_set(error, EXIT_INPUT,
                         "%s: expected %" PRIu64 " bytes (manifest.json), found %" PRIu64 ".\n  " DAMAGED, path, size,
                         (uint64_t)info.st_size);
    }
    if (!hashes) return true;
    if (!file_hash(AT_FDCWD, path, most_bytes(entry->string), &found, error)) return false;
    if (!strcmp(file_hash_text(found.xxh3).text, hash)) return true;
    return error_set(error, EXIT_INPUT, "%s: expected XXH3-128 %.32s (manifest.json), found %s.\n  " DAMAGED, path,
                     hash, file_hash_text(found.xxh3).text);
}

// Checks the files in the manifest, among which the first `needed` of needed_files must be.
static bool check_manifest(const char *folder, int needed, bool hashes, Error *error) {
    char path[PATH_MAX];
    const cJSON *entry;
    cJSON *manifest = json_read(join(path, folder, "manifest.json"), MANIFEST_BYTES, error);
    if (!manifest) return false;
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(manifest, "files");
    bool ok = cJSON_IsObject(files) ||
              error_set(error, EXIT_INPUT, "%s: expected an object \"files\", found none.\n  " DAMAGED, path);
    if (ok) {
        cJSON_ArrayForEach(entry, files) {
            if (!(ok = check_entry(folder, path, entry, hashes, error))) break;
        }
    }
    for (int i = 0; i < needed && ok; i++) {
        ok =
            cJSON_HasObjectItem(files, needed_files[i]) ||
            error_set(error, EXIT_INPUT, "%s: expected an entry of %s, found none.\n  " DAMAGED, path, needed_files[i]);
    }
    cJSON_Delete(manifest);
    return ok;
}

bool checkpoint_verify(const char *folder, bool manifest_optional, Error *error) {
    char path[PATH_MAX];
    bool there = access(join(path, folder, "manifest.json"), F_OK) == 0 || errno != ENOENT;
    if (!there && manifest_optional && access(folder, F_OK) == 0) return true;
    return check_manifest(folder, manifest_optional ? WEIGHTS_FILES : RESUME_FILES, true, error);
}

// Adds a file of the folder to the manifest. A file whose hash is not known, or that has changed since, is read to hash
// it, and synced.
static bool add_entry(const Checkpoint *c, cJSON *files, const char *name, Error *error) {
    char path[PATH_MAX];
    struct stat info;
    FileHash hash = {.size = UINT64_MAX};
    for (size_t i = 0; i < c->hash_count; i++)
        if (!strcmp(c->hashes[i].name, name)) hash = c->hashes[i].hash;
    join(path, c->folder, "%s", name);
    if (fstatat(c->folder_fd, name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode)) {
        return error_set(error, EXIT_RESOURCE,
                         "%s: expected only regular files in a checkpoint, found something else.\n"
                         "  Do not change this folder while it is being written.",
                         path);
    }
    if (hash.size != (uint64_t)info.st_size &&
        (!file_hash(c->folder_fd, path, JSON_LARGE, &hash, error) || !file_sync(c->folder_fd, path, error)))
        return false;
    cJSON *entry = cJSON_AddObjectToObject(files, name);
    if (!entry || !cJSON_AddNumberToObject(entry, "size", (double)hash.size) ||
        !cJSON_AddStringToObject(entry, "xxh3_128", file_hash_text(hash.xxh3).text)) {
        fail(EXIT_RESOURCE, "%s: out of memory for the manifest.", path);
    }
    return true;
}

static bool add_entries(const Checkpoint *c, cJSON *files, Error *error) {
    struct dirent **names;
    int count = scandirat(c->folder_fd, ".", &names, NULL, alphasort);
    if (count < 0) {
        return error_set(error, EXIT_RESOURCE, "%s: listing the folder failed: %s.\n  %s", c->folder, strerror(errno),
                         file_remedy(errno, "Was it removed?"));
    }
    bool ok = true;
    for (int i = 0; i < count; i++) {
        const char *name = names[i]->d_name;
        bool ours = strcmp(name, ".") && strcmp(name, "..") && strcmp(name, "manifest.json");
        if (ok && ours) ok = add_entry(c, files, name, error);
        free(names[i]);
    }
    free(names);
    return ok;
}

static bool write_manifest(const Checkpoint *c, Error *error) {
    char path[PATH_MAX];
    cJSON *manifest = cJSON_CreateObject(), *files = cJSON_AddObjectToObject(manifest, "files");
    if (!files) fail(EXIT_RESOURCE, "%s: out of memory for the manifest.", c->folder);
    bool ok = add_entries(c, files, error);
    if (ok) {
        char *text = cJSON_Print(manifest);
        if (!text) fail(EXIT_RESOURCE, "%s: out of memory for the manifest.", c->folder);
        ok = file_write_text(c->folder_fd, join(path, c->folder, "manifest.json"), text, error);
        free(text);
    }
    cJSON_Delete(manifest);
    return ok;
}

// ---- the contents of OUT/ckpt

typedef struct {
    uint64_t step;
    const char *prefix;    // STEP, TMP, OLD or TRASH
} Entry;

// Accepts only names that join_step() makes: not step-000000000000099, for which it would make step-00000099.
static bool parse_entry(const char *name, Entry *entry) {
    static const char *const prefixes[] = {STEP, TMP, OLD, TRASH};
    for (int i = 0; i < 4; i++) {
        size_t length = strlen(prefixes[i]);
        char made[64];
        if (strncmp(name, prefixes[i], length)) continue;
        *entry = (Entry){.step = strtoull(name + length, NULL, 10), .prefix = prefixes[i]};
        snprintf(made, sizeof made, "%s%08" PRIu64, prefixes[i], entry->step);
        return entry->step < INT64_MAX && !strcmp(made, name);
    }
    return false;
}

// Newest first; for one step, step-* before .old-step-*.
static int compare_entries(const void *a, const void *b) {
    const Entry *x = a, *y = b;
    if (x->step != y->step) return x->step > y->step ? -1 : 1;
    return strcmp(y->prefix, x->prefix);
}

// Lists our folders, newest first, in an open folder or (AT_FDCWD) at the path. The caller frees the list. A missing
// folder counts as empty. Returns NULL on error.
static Entry *list_entries(int folder, const char *root, size_t *count, Error *error) {
    struct dirent **names = NULL;
    int found = scandirat(folder, folder == AT_FDCWD ? root : ".", &names, NULL, NULL);
    *count = 0;
    if (found < 0 && errno != ENOENT && errno != ENOTDIR) {
        error_set(error, EXIT_RESOURCE, "%s: listing the folder failed: %s.\n  %s", root, strerror(errno),
                  file_remedy(errno, "Check its permissions."));
        return NULL;
    }
    Entry *entries = malloc((size_t)(found < 0 ? 1 : found + 1) * sizeof *entries);
    if (!entries) fail(EXIT_RESOURCE, "%s: out of memory.", root);
    for (int i = 0; i < found; i++) {
        *count += parse_entry(names[i]->d_name, &entries[*count]);
        free(names[i]);
    }
    free(names);
    qsort(entries, *count, sizeof *entries, compare_entries);
    return entries;
}

// The same for a program that cannot go on without the list.
static Entry *need_entries(const char *root, size_t *count) {
    Error error;
    Entry *entries = list_entries(AT_FDCWD, root, count, &error);
    if (!entries) fail(EXIT_INPUT, "%s", error.text);
    return entries;
}

// A link is no checkpoint: it may lead to another run's, and pruning would delete that one.
static bool check_no_link(const char *folder, ExitCode code, Error *error) {
    return !own_is_link(AT_FDCWD, folder) ||
           error_set(
               error, code,
               "%s: it is a link, but checkpoints are folders.\n"
               "  Remove the link. To start from the checkpoint that it leads to: --init-from, or eval_gpt2 --model.",
               folder);
}

// Does this checkpoint have all that a resume needs?
static bool check_whole(const char *folder, Error *error) {
    return check_no_link(folder, EXIT_INPUT, error) && check_manifest(folder, RESUME_FILES, false, error);
}

static bool exists(int root, const char *path) {
    return faccessat(root, strrchr(path, '/') + 1, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

// If a folder was set aside and the new one never took its name, it gets its name back. Any other leftover is removed.
static bool clear_leftover(const Checkpoint *c, const Entry *entry, Error *error) {
    char path[PATH_MAX], final[PATH_MAX];
    join_step(path, c->root, entry->prefix, entry->step);
    join_step(final, c->root, STEP, entry->step);
    bool keep = !strcmp(entry->prefix, OLD) && !exists(c->root_fd, final) && check_whole(path, error);
    return keep ? file_rename(c->root_fd, path, final, error) : file_remove_tree(c->root_fd, path, error);
}

// Clears the leftovers of killed saves and prunes. Fails only if a name that the save of this step needs remains taken.
static bool clear_leftovers(const Checkpoint *c, Error *error) {
    size_t count;
    Entry *entries = list_entries(c->root_fd, c->root, &count, error);
    bool ok = entries != NULL;
    for (size_t i = 0; i < count && ok; i++) {
        const Entry *entry = &entries[i];
        if (!strcmp(entry->prefix, STEP) || clear_leftover(c, entry, error)) continue;
        ok = entry->step != c->step || !strcmp(entry->prefix, TRASH);
        if (ok) warn("%s\n  It is left over from an interrupted save. The next save will try again.", error->text);
    }
    free(entries);
    return ok;
}

bool checkpoint_vanished(const char *folder) {
    struct stat info;
    return lstat(folder, &info) != 0 && errno == ENOENT;
}

// Does the work of checkpoint_newest() on one listing. *stale is set if a folder newer than the one found no longer
// exists, because there may then be newer ones.
static bool newest_listed(const char *out_dir, char *path, size_t size, uint64_t *step, bool *stale) {
    char root[PATH_MAX], folder[PATH_MAX];
    size_t count;
    Error error;
    bool found = false;
    Entry *entries = need_entries(join(root, out_dir, "ckpt"), &count);
    *stale = false;
    for (size_t i = 0; i < count && !found; i++) {
        bool named = !strcmp(entries[i].prefix, STEP);
        if (!named && strcmp(entries[i].prefix, OLD)) continue;
        join_step(folder, root, entries[i].prefix, entries[i].step);
        if (check_whole(folder, &error)) {
            found = strlen(folder) < size;
            if (!found) fail(EXIT_USAGE, "%s: the path is too long.", folder);
            strcpy(path, folder);
            *step = entries[i].step;
        } else if (checkpoint_vanished(folder)) {
            *stale = true;
        } else if (named) {
            error.text[strcspn(error.text, "\n")] = 0;    // without the remedy, since it is skipped
            warn("%s\n  Skipping %s.", error.text, folder);
        }
    }
    free(entries);
    return found;
}

bool checkpoint_newest(const char *out_dir, char *path, size_t size, uint64_t *step) {
    bool found = false, stale = true;
    for (int attempt = 0; attempt < CHECKPOINT_ATTEMPTS && stale; attempt++)
        found = newest_listed(out_dir, path, size, step, &stale);
    return found;
}

bool checkpoint_find(const char *flag, const char *given, char *path, size_t size, Error *error) {
    char config[PATH_MAX];
    uint64_t step;
    snprintf(path, size, "%s", given);
    bool is_model = access(join(config, given, "config.json"), F_OK) == 0;
    if (is_model || checkpoint_newest(given, path, size, &step)) return true;
    return error_set(
        error, EXIT_INPUT,
        "%s %s: expected the folder of a checkpoint or model (with config.json) or a run (with ckpt/step-*), found neither.",
        flag, given);
}

bool checkpoint_exists(const char *out_dir, uint64_t step) {
    char root[PATH_MAX], folder[PATH_MAX];
    Error error;
    return check_whole(join_step(folder, join(root, out_dir, "ckpt"), STEP, step), &error);
}

size_t checkpoint_count(const char *out_dir) {
    char root[PATH_MAX];
    size_t count, steps = 0;
    Entry *entries = need_entries(join(root, out_dir, "ckpt"), &count);
    for (size_t i = 0; i < count; i++) steps += !strcmp(entries[i].prefix, STEP);
    free(entries);
    return steps;
}

// ---- saving

static bool same_folder(int fd, int folder, const char *name) {
    struct stat ours, there;
    return fstat(fd, &ours) == 0 && fstatat(folder, name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
}

bool checkpoint_prepare(int *root, const char *out_dir, Error *error) {
    char path[PATH_MAX];
    struct stat info;
    join(path, out_dir, "ckpt");
    if (*root >= 0 && same_folder(*root, AT_FDCWD, path)) return true;
    if (*root >= 0 && lstat(path, &info) == 0)
        return error_set(error, EXIT_RESOURCE,
                         "%s: it is no longer the folder in which this run has saved its checkpoints.\n"
                         "  Move that one back, or end this run and resume it with the new one.",
                         path);
    if (!file_make_folders(path, error)) return false;
    int fd = own_folder(AT_FDCWD, path), number = errno;
    if (fd < 0 && own_is_link(AT_FDCWD, path))
        return error_set(error, EXIT_RESOURCE,
                         "%s: it is a link, but checkpoints are only saved in a folder.\n"
                         "  Put a folder in its place, or choose another --out, which may itself be a link.",
                         path);
    if (fd < 0)
        return error_set(error, EXIT_RESOURCE, "%s: opening the folder failed: %s.\n  %s", path, strerror(number),
                         file_remedy(number, "Change its permissions, or choose another --out."));
    if (access(path, W_OK | X_OK) != 0) {
        error_set(error, EXIT_RESOURCE,
                  "%s: cannot write into this folder: %s.\n  Change its permissions, or choose another --out.", path,
                  strerror(errno));
        close(fd);
        return false;
    }
    if (*root >= 0) close(*root);
    *root = fd;
    return true;
}

bool checkpoint_begin(Checkpoint *c, int *root, const char *out_dir, uint64_t step, Error *error) {
    *c = (Checkpoint){.step = step, .folder_fd = -1};
    if (!checkpoint_prepare(root, out_dir, error)) return false;
    c->root_fd = *root;
    join(c->root, out_dir, "ckpt");
    if (!clear_leftovers(c, error)) return false;
    join_step(c->folder, c->root, TMP, step);
    c->folder_fd = file_make_folder(c->root_fd, c->folder, error);
    if (c->folder_fd >= 0) return true;
    checkpoint_abandon(c);
    return false;
}

const char *checkpoint_path(Checkpoint *c, const char *file_name) {
    return join(c->path, c->folder, "%s", file_name);
}

FileHash *checkpoint_hash(Checkpoint *c, const char *file_name) {
    if (c->hash_count == CHECKPOINT_HASHES) return NULL;
    c->hashes[c->hash_count].name = file_name;
    c->hashes[c->hash_count].hash.size = UINT64_MAX;    // unknown until the file is complete
    return &c->hashes[c->hash_count++].hash;
}

// Gives the folder its final name, replacing a folder that has it. Between the two renames, .old-step-* is the complete
// one.
static bool take_name(const Checkpoint *c, Error *error) {
    char final[PATH_MAX], old[PATH_MAX];
    Error ignored;
    int root = c->root_fd;
    join_step(final, c->root, STEP, c->step);
    if (!check_no_link(final, EXIT_RESOURCE, error)) return false;
    if (!exists(root, final)) return file_rename(root, c->folder, final, error);
    join_step(old, c->root, OLD, c->step);
    if (!file_rename(root, final, old, error) || !file_rename(root, c->folder, final, error)) {
        if (!exists(root, final)) file_rename(root, old, final, &ignored);
        return false;
    }
    file_remove_tree(root, old, &ignored);    // if this fails, the next checkpoint_begin() tries again and reports it
    return true;
}

static void close_folder(Checkpoint *c) {
    if (c->folder_fd >= 0) close(c->folder_fd);
    c->folder_fd = -1;
    c->folder[0] = '\0';
}

bool checkpoint_commit(Checkpoint *c, Error *error) {
    if (!write_manifest(c, error) || !file_sync(c->root_fd, c->folder, error)) return false;
    if (!same_folder(c->folder_fd, c->root_fd, strrchr(c->folder, '/') + 1))
        return error_set(error, EXIT_RESOURCE,
                         "%s: it was replaced during the save.\n"
                         "  Do not change this folder while it is being written.",
                         c->folder);
    if (!take_name(c, error)) return false;
    close_folder(c);
    return true;
}

void checkpoint_abandon(Checkpoint *c) {
    Error error;
    if (!c->folder[0]) return;
    if (!file_remove_tree(c->root_fd, c->folder, &error)) warn("%s", error.text);
    close_folder(c);
}

// ---- pruning

static bool delete_step(int folder, const char *root, uint64_t step, Error *error) {
    char path[PATH_MAX], trash[PATH_MAX];
    join_step(path, root, STEP, step);
    join_step(trash, root, TRASH, step);
    return file_remove_tree(folder, trash, error) && file_rename(folder, path, trash, error) &&
           file_remove_tree(folder, trash, error);
}

bool checkpoint_prune(int *folder, const char *out_dir, int keep, uint64_t keep_also, Error *error) {
    char root[PATH_MAX], path[PATH_MAX];
    size_t count = 0;
    Error damage;
    if (keep <= 0) return true;
    if (!checkpoint_prepare(folder, out_dir, error)) return false;
    Entry *entries = list_entries(*folder, join(root, out_dir, "ckpt"), &count, error);
    bool ok = entries != NULL;
    for (size_t i = 0; i < count && ok; i++) {
        if (strcmp(entries[i].prefix, STEP)) continue;
        if (!check_whole(join_step(path, root, STEP, entries[i].step), &damage)) continue;
        if (keep > 0) keep--;
        else if (entries[i].step != keep_also) ok = delete_step(*folder, root, entries[i].step, error);
    }
    free(entries);
    return ok;
}

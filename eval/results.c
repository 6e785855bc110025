#define _GNU_SOURCE    // environ
#include "eval/eval.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <glob.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/own.h"
#include "runtime/path.h"
#include "runtime/version.h"

cJSON *eval_row(Eval *e) {
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "model", e->name);
    cJSON_AddStringToObject(row, "attn", e->config->attn.text);
    cJSON_AddItemToArray(e->results, row);
    return row;
}

// Writes the path of a file of the checkout that has this program, in its root or in build/NAME. Other folders, such as
// the current one, may be somebody else's. Returns false without the file.
static bool find_beside(char *out, size_t size, const char *name) {
    char root[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", root, sizeof root - 1);
    root[length > 0 ? length : 0] = 0;
    char *slash = strrchr(root, '/');
    if (!slash) return false;
    *slash = 0;
    char *build = strrchr(root, '/');
    if (build && build - root >= 6 && !memcmp(build - 6, "/build", 6)) build[-6] = 0;
    snprintf(out, size, "%s/%s", root, name);
    return access(out, R_OK) == 0;
}

// Runs scripts/plot_eval.py, which needs Python and matplotlib. Without them the results are complete but for pictures.
// posix_spawn() neither copies the page tables of gigabytes nor runs the fork handlers of libraries with threads.
static void draw(const Eval *e) {
    char script[PATH_MAX + 32] = "scripts/plot_eval.py", python[PATH_MAX + 32];
    if (!find_beside(script, sizeof script, "scripts/plot_eval.py")) {
        warn("no plot: there is no %s. eval.json is complete.\n  With a checkout of attn.c: .venv/bin/python "
             "scripts/plot_eval.py %s",
             script, e->o.out);
        return;
    }
    if (!find_beside(python, sizeof python, ".venv/bin/python")) snprintf(python, sizeof python, "python3");
    char *words[] = {python, script, "--", (char *)e->o.out, NULL};
    pid_t child;
    int status = 0;
    fflush(stdout);
    int failed = posix_spawnp(&child, python, NULL, NULL, words, environ);
    if (failed) {
        warn("no plot: %s: %s. eval.json is complete.\n  With Python and matplotlib: python3 %s %s", python,
             strerror(failed), script, e->o.out);
        return;
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    if (status != 0) warn("no plot, but eval.json is complete. To draw it: %s %s %s", python, script, e->o.out);
}

size_t eval_characters(const char *text) {
    size_t count = 0;
    for (; *text; text++) count += ((unsigned char)*text & 0xC0) != 0x80;
    return count;
}

// ---- files in --out

static const char *const UNFINISHED[] = {"eval.json.tmp", "map-*.npy.tmp", "prompts.jsonl.tmp"};

static void remove_unfinished(const Eval *e) {
    DIR *folder = opendir(e->o.out);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        for (size_t i = 0; i < sizeof UNFINISHED / sizeof *UNFINISHED; i++)
            if (fnmatch(UNFINISHED[i], entry->d_name, 0) == 0) unlink(folder_path(e->o.out, entry->d_name).text);
    if (folder) closedir(folder);
}

// The lock is on the folder itself, so no file is left. Where a file system has no locks, it is not taken.
void eval_take_folder(const Eval *e) {
    Error error;
    struct stat there;
    const char *out = e->o.out;
    if (!out) return;
    if (!own_check(out, e->o.foreign_folder, &error) || !file_make_folders(out, &error)) fail_with(&error);
    int folder = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0 && flock(folder, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        fail(EXIT_BUSY,
             "%s: another evaluation is writing to this folder.\n  Wait until it ends, or choose another --out.", out);
    remove_unfinished(e);
    FolderPath results = folder_path(out, "eval.json");
    if (stat(results.text, &there) == 0 && S_ISDIR(there.st_mode))
        fail(EXIT_RESOURCE,
             "%s: expected a file, or none yet, found a folder.\n"
             "  The results are written to this path. Move the folder away, or choose another --out.",
             results.text);
    File *probe = file_create(AT_FDCWD, folder_path(out, UNFINISHED[0]).text, NULL, &error);
    if (!probe) fail_with(&error);
    file_discard(probe);
}

static FolderPath unfinished(const Eval *e, const char *name) {
    FolderPath path = folder_path(e->o.out, name);
    snprintf(path.text + strlen(path.text), sizeof path.text - strlen(path.text), ".tmp");
    return path;
}

File *eval_file(Eval *e, const char *name) {
    Error error;
    File *file = file_create(AT_FDCWD, unfinished(e, name).text, NULL, &error);
    if (!file) fail_with(&error);
    cJSON_AddItemToArray(e->files, cJSON_CreateString(name));
    return file;
}

void eval_file_write(File *file, const void *data, size_t size) {
    Error error;
    if (file_write(file, data, size, &error)) return;
    file_discard(file);
    fail_with(&error);
}

static void rename_files(Eval *e) {
    Error error;
    const cJSON *name;
    if (e->prompts && !file_close(e->prompts, &error)) fail_with(&error);
    cJSON_ArrayForEach(name, e->files) {
        const char *text = name->valuestring;
        if (!file_rename(AT_FDCWD, unfinished(e, text).text, folder_path(e->o.out, text).text, &error))
            fail_with(&error);
    }
}

// ---- files of the eval.json before this one

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && !strcmp(text + length - tail, end);
}

// Can this be the name of a file that belongs to an eval.json? One from elsewhere may list anything.
static bool is_result(const char *name) {
    return !strchr(name, '/') && (ends_with(name, ".png") || ends_with(name, ".html") || ends_with(name, ".npy") ||
                                  ends_with(name, ".jsonl"));
}

// The names in "files" of OUT/eval.json. NULL if there is none that can be read.
static cJSON *listed_files(const Eval *e) {
    Error ignored;
    cJSON *json = json_read(folder_path(e->o.out, "eval.json").text, JSON_LARGE, &ignored);
    cJSON *files = cJSON_DetachItemFromObjectCaseSensitive(json, "files");
    cJSON_Delete(json);
    return files;
}

static bool same_file(const char *a, const char *b) {
    struct stat first, second;
    return a && b && stat(a, &first) == 0 && stat(b, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

// Is the file one that this call reads: --prompt-file, or --data, which is a path or patterns?
static bool is_input(const Eval *e, const char *path) {
    if (same_file(path, e->o.prompt_file) || same_file(path, e->o.data)) return true;
    char *words = strdup(e->o.data ? e->o.data : ""), *rest = words;
    bool found = false;
    for (char *word = strsep(&rest, ", "); word && !found; word = strsep(&rest, ", ")) {
        glob_t paths;
        if (glob(word, GLOB_TILDE, NULL, &paths)) continue;
        for (size_t i = 0; i < paths.gl_pathc; i++) found = found || same_file(path, paths.gl_pathv[i]);
        globfree(&paths);
    }
    free(words);
    return found;
}

static bool is_listed(const cJSON *files, const char *name) {
    const cJSON *item;
    cJSON_ArrayForEach(item, files) {
        if (!strcmp(item->valuestring, name)) return true;
    }
    return false;
}

// Removes the listed files that this eval.json does not have.
static void remove_old_files(const Eval *e, const cJSON *listed) {
    const cJSON *item;
    cJSON_ArrayForEach(item, listed) {
        const char *name = item->valuestring;
        if (!cJSON_IsString(item) || !is_result(name) || is_listed(e->files, name)) continue;
        FolderPath path = folder_path(e->o.out, name);
        if (!is_input(e, path.text)) unlink(path.text);
    }
}

void eval_write(Eval *e) {
    Error error;
    cJSON *json = cJSON_CreateObject();
    cJSON *listed = listed_files(e);
    cJSON_AddStringToObject(json, "task", eval_tasks[e->o.task]);
    cJSON_AddItemToObject(json, "files", e->files);
    version_add(json);
    cJSON_AddItemToObject(json, "arguments", e->arguments);
    cJSON_AddItemToObject(json, "models", e->described);
    cJSON_AddItemToObject(json, "results", e->results);
    char *text = cJSON_Print(json);
    if (!text) fail(EXIT_RESOURCE, "out of memory for eval.json.");
    rename_files(e);
    if (!file_replace_text(folder_path(e->o.out, "eval.json").text, text, &error)) fail_with(&error);
    remove_old_files(e, listed);
    cJSON_Delete(listed);
    cJSON_Delete(json);
    free(text);
    if (e->o.picture) draw(e);
}

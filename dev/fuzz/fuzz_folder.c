// Writes a run into a folder in which somebody has put links, pipes, devices, holes and folders in the place of its
// files: nothing blocks, and no file outside of the folder changes.
//
// The input is a list of what is put where: a byte for the name, a byte for the kind, and for a regular file a byte for
// the length of its contents, which follow.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "dev/fuzz/folder.h"
#include "model/checkpoint.h"
#include "run/metrics.h"
#include "runtime/own.h"
#include "text/tokenizer.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define OLD_STEP "ckpt/step-00000001"

static const char *const NAMES[] = {"lock",
                                    "run.json",
                                    "run.json.tmp",
                                    "metrics.jsonl",
                                    "metrics.jsonl.tmp",
                                    "samples.txt",
                                    "ckpt",
                                    OLD_STEP,
                                    OLD_STEP "/manifest.json",
                                    OLD_STEP "/model.safetensors",
                                    OLD_STEP "/state.json",
                                    OLD_STEP "/more",
                                    "ckpt/step-00000002",
                                    "ckpt/.tmp-step-00000002",
                                    "ckpt/.old-step-00000002",
                                    "ckpt/.trash-step-00000001",
                                    "tokenizer.json",
                                    "tokenizer_config.json",
                                    "chat_template.jinja"};
enum { TOKENIZER = COUNT(NAMES) - 3 };
static const char PRECIOUS[] = "precious {}";

typedef enum { FILE_KIND, LINK, LINK_TO_FOLDER, DANGLING, HARD_LINK, PIPE, DEVICE, HOLES, FOLDER, NOTHING, KINDS } Kind;

static void make_victim(const char *folder) {
    Error error;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/other/step-00000001", folder);
    if (!file_make_folders(path, &error)) abort();
    fuzz_file("victim", (const uint8_t *)PRECIOUS, strlen(PRECIOUS));
    fuzz_file("other/config.json", (const uint8_t *)PRECIOUS, strlen(PRECIOUS));
    fuzz_file("other/step-00000001/config.json", (const uint8_t *)PRECIOUS, strlen(PRECIOUS));
}

static void check_victim(const char *folder) {
    static const char *const files[] = {"victim", "other/config.json", "other/step-00000001/config.json"};
    char path[PATH_MAX], text[sizeof PRECIOUS] = "";
    struct stat info;
    for (size_t i = 0; i < COUNT(files); i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        int fd = open(path, O_RDONLY);
        ssize_t size = read(fd, text, sizeof text);
        close(fd);
        if (size != (ssize_t)strlen(PRECIOUS) || memcmp(text, PRECIOUS, (size_t)size) != 0) abort();
    }
    snprintf(path, sizeof path, "%s/new", folder);
    if (access(path, F_OK) == 0) abort();
    snprintf(path, sizeof path, "%s/other", folder);
    if (stat(path, &info) != 0 || info.st_nlink != 3) abort();    // it has a single folder
}

// Is a folder in OUT that contains this file a link by now?
static bool is_elsewhere(const char *out, const char *path) {
    char part[PATH_MAX];
    snprintf(part, sizeof part, "%s", path);
    for (char *slash = strrchr(part, '/'); slash - part > (ptrdiff_t)strlen(out); slash = strrchr(part, '/')) {
        *slash = 0;
        if (own_is_link(AT_FDCWD, part)) return true;
    }
    return false;
}

// Puts something in the place of a file. Most names are taken already, and some have no folder: then nothing changes.
static void put(const char *folder, const char *path, Kind kind, const uint8_t *bytes, size_t size) {
    char victim[PATH_MAX];
    Error error;
    bool other = kind == LINK_TO_FOLDER;
    snprintf(victim, sizeof victim, "%s/%s", folder, other ? "other" : kind == DANGLING ? "new" : "victim");
    if (kind == NOTHING) file_remove_tree(AT_FDCWD, path, &error);
    else if (kind == HARD_LINK) errno = link(victim, path);
    else if (kind == PIPE) errno = mkfifo(path, 0600);
    else if (kind == FOLDER) errno = mkdir(path, 0700);
    else if (kind == DEVICE) errno = symlink("/dev/zero", path);
    else if (kind != FILE_KIND && kind != HOLES) errno = symlink(victim, path);
    else {
        int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
        if (fd < 0) return;
        if (kind == FILE_KIND ? write(fd, bytes, size) < 0 : ftruncate(fd, (off_t)1 << 42) != 0) abort();
        close(fd);
    }
}

static bool save(int *root, const char *out, uint64_t step, Error *error) {
    static const char *const names[] = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"};
    Checkpoint c;
    bool ok = checkpoint_begin(&c, root, out, step, error);
    for (size_t i = 0; i < COUNT(names) && ok; i++)
        ok = file_write_text(c.folder_fd, checkpoint_path(&c, names[i]), "{}", error);
    for (size_t i = 0; tokenizer_files[i] && ok; i++) {
        Error ignored;
        char *text = tokenizer_file(out, i, false, &ignored);
        if (text && strstr(text, "precious")) abort();
        if (text) ok = file_write_text(c.folder_fd, checkpoint_path(&c, tokenizer_files[i]), text, error);
        free(text);
    }
    ok = ok && checkpoint_commit(&c, error);
    if (!ok) checkpoint_abandon(&c);
    return ok;
}

// What a run does in its folder.
static void write_run(const char *out) {
    char path[PATH_MAX], newest[PATH_MAX];
    Error error = {0};
    uint64_t step;
    const char *reason;
    int root = -1;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", out, i ? "samples.txt" : "lock");
        int fd = own_open(path, O_WRONLY | O_CREAT | O_APPEND, &reason);
        if (fd >= 0 && write(fd, "x", 1) != 1) abort();
        if (fd >= 0) close(fd);
    }
    if (checkpoint_newest(out, newest, sizeof newest, &step)) checkpoint_verify(newest, false, &error);
    snprintf(path, sizeof path, "%s/metrics.jsonl", out);
    Metrics *metrics = metrics_cut(path, 1, &error) ? metrics_open(path, &error) : NULL;
    if (metrics) {
        metrics_write(metrics, &(StepMetrics){.step = 2});
        metrics_restore(metrics, &error);
        metrics_close(metrics);
    }
    snprintf(path, sizeof path, "%s/run.json", out);
    file_replace_text(path, "{}", &error);
    save(&root, out, 2, &error);
    checkpoint_prune(&root, out, 1, UINT64_MAX, &error);
    if (root >= 0) close(root);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    const char *folder = fuzz_folder(make_victim);
    char out[PATH_MAX], path[PATH_MAX];
    Error error;
    int root = -1;
    warn_off = true;
    snprintf(out, sizeof out, "%s/out", folder);
    if (!file_remove_tree(AT_FDCWD, out, &error) || !save(&root, out, 1, &error)) abort();
    close(root);
    for (size_t at = 0, length; at + 2 < size; at += length) {
        Kind kind = (Kind)(bytes[at + 1] % KINDS);
        size_t name = bytes[at] % COUNT(NAMES);
        if (name >= TOKENIZER && kind == HARD_LINK) kind = LINK;    // nothing tells it from a file of this folder
        snprintf(path, sizeof path, "%s/%s", out, NAMES[name]);
        length = kind == FILE_KIND ? 3 + bytes[at + 2] : 2;
        if (at + length > size) break;
        if (!is_elsewhere(out, path)) put(folder, path, kind, bytes + at + 3, length - 3);
    }
    write_run(out);
    check_victim(folder);
    return 0;
}

// Checkpoints: whatever interrupts a save, at any point, either the previous checkpoint or the new one is complete.
//
// Fault points are compiled into this test only: it includes file.c with FAULTS instead of linking it.
#ifndef FAULTS
#define FAULTS
#endif
#include "runtime/file.c"

#include <dirent.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "dev/tests/check.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"

static char folder[] = "/tmp/test_checkpoint.XXXXXX", out_dir[100], source[100];

// A path in the test's folder, until the fourth call after this one.
__attribute__((format(printf, 1, 2))) static char *in_test(const char *format, ...) {
    static char paths[4][PATH_MAX];
    static int next;
    char *path = paths[next++ % 4];
    va_list arguments;
    va_start(arguments, format);
    int length = sprintf(path, "%s/", folder);
    vsnprintf(path + length, PATH_MAX - (size_t)length, format, arguments);
    va_end(arguments);
    return path;
}

// ---- a small run

enum { VALUES = 1000 };

static bool write_text(Checkpoint *c, const char *name, const char *text, Error *error) {
    return file_write_text(c->folder_fd, checkpoint_path(c, name), text, error);
}

// Without a folder that is still open from an earlier save, as in a process that has just started.
static bool prune(int keep, uint64_t keep_also, Error *error) {
    int root = -1;
    bool ok = checkpoint_prune(&root, out_dir, keep, keep_also, error);
    if (root >= 0) close(root);
    return ok;
}

static bool save_into(int *root, uint64_t step, float value, Error *error) {
    float values[VALUES];
    char text[40];
    Checkpoint c;
    for (int i = 0; i < VALUES; i++) values[i] = value;
    TensorRow rows[] = {{"a", DTYPE_F32, 1, {VALUES}, values}, {"b", DTYPE_BF16, 1, {VALUES}, values}};
    snprintf(text, sizeof text, "{\"value\": %g}", value);
    bool ok = checkpoint_begin(&c, root, out_dir, step, error) &&
              safetensors_write(c.folder_fd, checkpoint_path(&c, "model.safetensors"), rows, 2, NULL,
                                checkpoint_hash(&c, "model.safetensors"), error) &&
              write_text(&c, "optimizer.safetensors", text, error) && write_text(&c, "config.json", text, error) &&
              write_text(&c, "state.json", text, error) && write_text(&c, "source.txt", "a tokenizer", error) &&
              checkpoint_commit(&c, error);
    if (!ok) checkpoint_abandon(&c);
    return ok;
}

static bool save(uint64_t step, float value, Error *error) {
    int root = -1;
    bool ok = save_into(&root, step, value, error);
    if (root >= 0) close(root);
    return ok;
}

// The value in the newest checkpoint, after checking all of it, and its step; -1 if something is wrong, 0 if there is
// no checkpoint.
static float newest(uint64_t *step) {
    char path[PATH_MAX];
    float values[VALUES];
    Error error;
    if (!checkpoint_newest(out_dir, path, sizeof path, step)) return 0;
    Safetensors *s = checkpoint_verify(path, false, &error) ? safetensors_open(path, &error) : NULL;
    bool ok = s && safetensors_read(s, "a", 1, (size_t[]){VALUES}, values, &error);
    for (int i = 1; i < VALUES && ok; i++) ok = values[i] == values[0];
    if (!ok) printf("  %s\n", error.text);
    safetensors_close(s);
    return ok ? values[0] : -1;
}

// The number of entries of OUT/ckpt whose names do (or do not) start with step-.
static int count_entries(bool steps) {
    int count = 0;
    DIR *dir = opendir(in_test("runs/one/ckpt"));
    for (struct dirent *item; dir && (item = readdir(dir));) {
        bool dots = !strcmp(item->d_name, ".") || !strcmp(item->d_name, "..");
        count += !dots && !strncmp(item->d_name, "step-", 5) == steps;
    }
    if (dir) closedir(dir);
    return count;
}

static bool there(uint64_t step) {
    const char *path = in_test("runs/one/ckpt/step-%08d", (int)step);
    Error error;
    return access(path, F_OK) == 0 && checkpoint_verify(path, false, &error);
}

static void start_over(void) {
    Error error;
    if (!file_remove_tree(AT_FDCWD, out_dir, &error)) fail_with(&error);
}

// ---- faults

static void fault_set(long at, bool half, int number) {
    fault.ready = true;
    fault.at = at;
    fault.count = 0;
    fault.half = half;
    fault.error = number;
}

static void fault_clear(void) {
    fault_set(0, false, 0);
}

// Runs job() in a process that is killed at its n-th fault point. Returns false if the job ended before that.
static bool killed(bool (*job)(Error *), long n, bool half) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        Error error = {0};
        fault_set(n, half, 0);
        bool ok = job(&error);
        if (!ok) printf("  %s\n", error.text);
        fflush(stdout);
        _exit(ok ? 0 : 1);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 137) return true;
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "point %ld: the job ended with status %x", n, status);
    return false;
}

static bool save_10(Error *error) {
    return save(10, 2, error);
}
static bool save_20(Error *error) {
    return save(20, 2, error);
}
static bool prune_to_one(Error *error) {
    return prune(1, 10, error);
}

// Starts with step 10 (value 1) or no checkpoint; the job saves value 2. After a kill at any point, value 1 or value 2
// is complete, and the next save succeeds and removes all leftovers.
//
// `points` fixes the number of operations, because a kill does not reveal a missing fsync (the system keeps what was
// written, unlike a power failure): a save makes its folder and syncs the parent (2), writes and syncs
// model.safetensors (3 + 1), optimizer.safetensors, config.json, state.json, the tokenizer and manifest.json (2 each),
// hashes all but the first and the last of these and syncs them again (4), syncs the folder (1), renames it and syncs
// OUT/ckpt (2).
static void test_kill(const char *what, bool (*job)(Error *), uint64_t job_step, bool before, long points) {
    long n = 1, kept = 0, taken = 0;
    Error error = {0};
    check_group(what);
    for (int half = 0; half < 2; half++) {
        for (n = 1;; n++) {
            check_case();
            uint64_t step = 0;
            start_over();
            fault_clear();
            if (before) CHECK(save(10, 1, &error), "%s", error.text);
            if (!killed(job, n, half)) break;
            float value = newest(&step);
            bool old = before ? value == 1 && step == 10 : value == 0, new = value == 2 && step == job_step;
            CHECK(old || new, "%s: killed at point %ld: value %g of step %d", what, n, value, (int)step);
            kept += old;
            taken += new;
            CHECK(save(30, 3, &error) && newest(&step) == 3 && step == 30, "%s: point %ld: the next save: %s", what, n,
                  error.text);
            CHECK(count_entries(false) == 0, "%s: point %ld: %d leftovers", what, n, count_entries(false));
            CHECK(!before || there(10), "%s: point %ld: step 10 is not whole after the next save", what, n);
        }
    }
    CHECK(n - 1 == points, "%s: %ld acts, expected %ld", what, n - 1, points);
    CHECK(kept > 10 && taken > 0, "%s: %ld kills left the old one, %ld the new one", what, kept, taken);
    printf("       %ld points, whole or half writes: %ld kills left the old one, %ld the new one\n", n - 1, kept,
           taken);
}

static void test_kill_prune(void) {
    check_group("prune, killed at each point");
    long n;
    Error error = {0};
    for (n = 1;; n++) {
        check_case();
        uint64_t step = 0;
        start_over();
        fault_clear();
        for (int i = 1; i <= 4; i++) CHECK(save(10 * (uint64_t)i, (float)i, &error), "%s", error.text);
        if (!killed(prune_to_one, n, false)) break;
        CHECK(newest(&step) == 4 && step == 40, "prune killed at point %ld: step %d", n, (int)step);
        CHECK(there(10), "prune killed at point %ld: the best one is gone", n);
        CHECK(save(50, 5, &error) && prune(1, 10, &error), "%s", error.text);
        CHECK(there(50) && there(10) && count_entries(true) == 2 && count_entries(false) == 0, "prune after point %ld",
              n);
    }
    CHECK(n > 10, "prune has only %ld points", n - 1);
    CHECK(there(40) && there(10) && count_entries(true) == 2, "prune");
    printf("       %ld points\n", n - 1);
}

// The n-th operation fails with this errno. Either the save reports it by name and the old checkpoint stays, or the
// save succeeds.
static void test_errno(const char *what, int number, const char *remedy) {
    long n, refused = 0;
    Error error = {0};
    check_group(what);
    for (int over = 0; over < 2; over++) {
        for (n = 1;; n++) {
            check_case();
            uint64_t step = 0, job_step = over ? 10 : 20;
            start_over();
            fault_clear();
            CHECK(save(10, 1, &error), "%s", error.text);
            fault_set(n, false, number);
            error.text[0] = '\0';
            bool ok = save(job_step, 2, &error), hit = fault.count >= n;
            fault_clear();
            if (!hit) break;
            float value = newest(&step);
            if (ok) {
                CHECK(value == 2 && step == job_step, "%s at point %ld: reported as done, value %g", what, n, value);
            } else {
                refused++;
                CHECK(error.code == EXIT_RESOURCE && strstr(error.text, out_dir) &&
                          strstr(error.text, strerror(number)) && strstr(error.text, remedy),
                      "%s at point %ld: %d %s", what, n, error.code, error.text);
                CHECK(value == 1 || value == 2, "%s at point %ld: value %g", what, n, value);
                CHECK(there(10), "%s at point %ld: step 10 has lost its name", what, n);
                CHECK(access(in_test("runs/one/ckpt/.tmp-step-%08d", (int)job_step), F_OK) != 0,
                      "%s at point %ld: the temporary folder is still there", what, n);
            }
            CHECK(save(30, 3, &error) && newest(&step) == 3 && count_entries(false) == 0,
                  "%s at point %ld: the next save", what, n);
        }
    }
    CHECK(refused > 20, "%s: only %ld saves failed", what, refused);
}

static bool replace(Error *error) {
    return file_replace_text(in_test("run.json"), "new", error);
}

static void test_kill_replace(void) {
    check_group("replacing a file: the old text or the new at each point");
    char path[PATH_MAX];
    Error error = {0};
    strcpy(path, in_test("run.json"));
    bool done = false;
    for (long n = 1; !done; n++) {
        check_case();
        fault_clear();
        CHECK(file_replace_text(path, "the old text", &error), "%s", error.text);
        done = !killed(replace, n, true);
        char *text = file_read(path, 100, NULL, &error);
        CHECK(text && (!strcmp(text, "the old text") || !strcmp(text, "new")), "killed at point %ld: %s", n,
              text ? text : error.text);
        if (done) CHECK(n == 5 && text && !strcmp(text, "new"), "points %ld", n - 1);
        free(text);
    }
    for (long n = 1; n <= 3; n++) {
        fault_set(n, false, ENOSPC);
        CHECK(!file_replace_text(path, "newer", &error) && strstr(error.text, "run.json"), "ENOSPC at point %ld", n);
        CHECK(access(in_test("run.json.tmp"), F_OK) != 0, "ENOSPC at point %ld: the temporary file is still there", n);
    }
    fault_clear();
    CHECK(!file_replace_text(path, NULL, &error) && error.code == EXIT_RESOURCE && strstr(error.text, "out of memory"),
          "no text: %s", error.text);
}

// Although write-back of a large file starts early, it ends with an fsync.
static void test_large(void) {
    enum { BYTES = FLUSH_BYTES + 1 };
    check_group("fsync of a large file");
    char *data = calloc(1, BYTES);
    Error error;
    File *file = file_create(AT_FDCWD, in_test("large"), NULL, &error);
    bool written = file && file_write(file, data, BYTES, &error);
    fault_set(1, false, EIO);
    CHECK(written && !file_close(file, &error) && strstr(error.text, "fsync"), "its fsync fails, and nobody notices");
    fault_clear();
    free(data);
}

// ---- without faults

static void put(const char *step, const char *name, const char *text, const char *mode, long at) {
    const char *path = in_test("runs/one/ckpt/%s/%s", step, name);
    FILE *file = fopen(path, mode);
    if (!file) fail(EXIT_RESOURCE, "%s: cannot be opened.", path);
    fseek(file, at, SEEK_SET);
    fputs(text, file);
    fclose(file);
}

static bool verify_names(const char *step, const char *part) {
    const char *path = in_test("runs/one/ckpt/%s", step);
    Error error = {0};
    bool ok = !checkpoint_verify(path, false, &error) && error.code == EXIT_INPUT && strstr(error.text, path) &&
              strstr(error.text, part);
    if (!ok) printf("  expected \"%s\", found %s\n", part, error.text);
    return ok;
}

// Two empty files.
#define EMPTY            "{\"size\": 0, \"xxh3_128\": \"99aa06d3014798d86001c324468d497f\"}"
#define WEIGHTS_MANIFEST "{\"files\": {\"config.json\": " EMPTY ", \"model.safetensors\": " EMPTY "}}"

static void test_damage(void) {
    check_group("damaged checkpoints");
    uint64_t step = 0;
    Error error = {0};
    char path[PATH_MAX];
    start_over();
    CHECK(!checkpoint_newest(out_dir, path, sizeof path, &step), "a checkpoint was found where there is none");
    for (int i = 1; i <= 5; i++) CHECK(save(10 * (uint64_t)i, (float)i, &error), "%s", error.text);
    if (!freopen(in_test("warnings"), "w", stderr)) fail(EXIT_RESOURCE, "%s: cannot be opened.", in_test("warnings"));
    put("step-00000050", "model.safetensors", "x", "r+", 3000);
    CHECK(verify_names("step-00000050", "model.safetensors: expected XXH3-128"), "a changed byte");
    put("step-00000050", "state.json", "  ", "a", 0);
    CHECK(newest(&step) == 4 && step == 40, "a file that has grown");
    CHECK(verify_names("step-00000050", "expected "), "a file that has grown");
    unlink(in_test("runs/one/ckpt/step-00000040/manifest.json"));
    strcpy(path, in_test("runs/one/ckpt/step-00000040"));
    CHECK(!checkpoint_verify(path, false, &error) && checkpoint_verify(path, true, &error),
          "a folder without a manifest");
    CHECK(!checkpoint_verify("/nonexistent", true, &error) && strstr(error.text, "/nonexistent"), "no folder: %s",
          error.text);
    unlink(in_test("runs/one/ckpt/step-00000030/state.json"));
    CHECK(verify_names("step-00000030", "state.json: this file is missing"), "a missing file");
    put("step-00000020", "manifest.json", "{\"files\": ", "w", 0);
    CHECK(verify_names("step-00000020", "manifest.json: expected JSON"), "half a manifest");
    CHECK(newest(&step) == 1 && step == 10, "four damaged checkpoints were not skipped: step %d", (int)step);
    fflush(stderr);
    char *text = file_read(in_test("warnings"), 100000, NULL, &error);
    int warnings = 0;
    for (const char *p = text; p && (p = strstr(p, "Skipping")); p++) warnings++;
    CHECK(warnings == 5, "expected 1 + 4 warnings, found %s", text);
    free(text);
    put("step-00000020", "manifest.json", "{\"files\": {\"../x\": {\"size\": 1, \"xxh3_128\": \"0\"}}}", "w", 0);
    CHECK(verify_names("step-00000020", "a file name without a folder"), "a path in the manifest");
    put("step-00000020", "manifest.json", "{\"files\": []}", "w", 0);
    CHECK(verify_names("step-00000020", "an object \"files\""), "a list of files");
    put("step-00000020", "manifest.json", "{\"files\": {}}", "w", 0);
    CHECK(verify_names("step-00000020", "an entry of config.json"), "a manifest without files");
    CHECK(newest(&step) == 1 && step == 10, "a manifest without files: step %d", (int)step);
    strcpy(path, in_test("runs/one/ckpt/step-00000020"));
    CHECK(!checkpoint_verify(path, true, &error), "weights with a manifest without files");
    put("step-00000020", "manifest.json", WEIGHTS_MANIFEST, "w", 0);
    put("step-00000020", "config.json", "", "w", 0);
    put("step-00000020", "model.safetensors", "", "w", 0);
    CHECK(verify_names("step-00000020", "an entry of optimizer.safetensors"), "a manifest of weights alone");
    CHECK(checkpoint_verify(path, true, &error), "weights alone: %s", error.text);
    CHECK(prune(1, UINT64_MAX, &error) && there(10), "the only complete checkpoint was pruned");
}

// Entries of OUT/ckpt that look like newer checkpoints, but are none.
static void test_strange_names(void) {
    static const char *const names[] = {"step-000000000000099", "step-9", "step-99999999999999999999",
                                        "step-00000010 "};
    check_group("strange names");
    Error error = {0};
    uint64_t step = 0;
    start_over();
    CHECK(save(10, 1, &error), "%s", error.text);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK(mkdir(in_test("runs/one/ckpt/%s", names[i]), 0777) == 0, "%s", names[i]);
    CHECK(newest(&step) == 1 && step == 10, "folders that we would name otherwise: step %d", (int)step);
    const char *path = in_test("runs/one/ckpt/step-00000020");
    CHECK(symlink("/nonexistent", path) == 0 && !checkpoint_vanished(path), "%s", path);
    CHECK(symlink("step-00000010", in_test("runs/one/ckpt/step-00000030")) == 0, "a link to a checkpoint");
    warn_off = true;
    CHECK(newest(&step) == 1 && step == 10, "a link was taken for a checkpoint: step %d", (int)step);
    warn_off = false;
}

static void test_prune(void) {
    check_group("prune");
    Error error = {0};
    start_over();
    for (int i = 1; i <= 5; i++) CHECK(save(10 * (uint64_t)i, (float)i, &error), "%s", error.text);
    CHECK(prune(0, UINT64_MAX, &error) && count_entries(true) == 5, "keep 0");
    CHECK(prune(2, 20, &error) && count_entries(true) == 3 && there(50) && there(40) && there(20), "keep 2 and 20");
    CHECK(prune(2, 50, &error) && count_entries(true) == 2 && there(50) && there(40), "keep 2 and 50");
    CHECK(prune(7, UINT64_MAX, &error) && count_entries(true) == 2, "keep 7");
    CHECK(mkdir(in_test("runs/one/ckpt/.old-step-00000050"), 0777) == 0 && prune(2, UINT64_MAX, &error) && there(50) &&
              there(40),
          "a leftover of step 50 is not another checkpoint");
    rmdir(in_test("runs/one/ckpt/.old-step-00000050"));
    CHECK(count_entries(false) == 0, "leftovers");
    CHECK(save(123456789012, 6, &error), "%s", error.text);
    uint64_t step = 0;
    CHECK(newest(&step) == 6 && step == 123456789012, "a step of 12 digits");
}

// While a run goes on, somebody puts a link to another run's folder, or another folder, in the place of ckpt or of a
// checkpoint: no save or prune touches what it leads to.
static void test_exchanged(void) {
    char ckpt[PATH_MAX], away[PATH_MAX];
    Error error = {0};
    int root = -1;
    check_group("folders that are exchanged between saves");
    strcpy(ckpt, in_test("runs/one/ckpt"));
    strcpy(away, in_test("runs/one/away"));
    for (int linked = 0; linked < 2; linked++) {
        check_case();
        start_over();
        for (int i = 1; i <= 3; i++) CHECK(save_into(&root, (uint64_t)i, 1, &error), "%s", error.text);
        CHECK(rename(ckpt, away) == 0 && mkdir(in_test("runs/one/other"), 0777) == 0, "rename");
        CHECK((linked ? symlink(away, ckpt) : rename(in_test("runs/one/other"), ckpt)) == 0, "exchange");
        CHECK(!save_into(&root, 4, 2, &error) && error.code == EXIT_RESOURCE && strstr(error.text, "no longer"), "%s",
              error.text);
        CHECK(!checkpoint_prune(&root, out_dir, 1, UINT64_MAX, &error) && strstr(error.text, "no longer"), "%s",
              error.text);
        CHECK(file_remove_tree(AT_FDCWD, ckpt, &error) && rename(away, ckpt) == 0, "back");
        CHECK(save_into(&root, 4, 2, &error) && there(1) && there(4), "%s", error.text);
        CHECK(file_remove_tree(AT_FDCWD, ckpt, &error) && save_into(&root, 5, 3, &error) && there(5), "removed: %s",
              error.text);
        close(root);
        root = -1;
    }
}

// A folder that cannot be listed makes a save or a prune fail, but does not end the program.
static void test_unlisted(void) {
    check_group("a folder that cannot be listed");
    Checkpoint c;
    struct rlimit files, none;
    Error error = {0};
    start_over();
    CHECK(save(10, 1, &error), "%s", error.text);
    getrlimit(RLIMIT_NOFILE, &files);
    none = files;
    none.rlim_cur = 3;
    setrlimit(RLIMIT_NOFILE, &none);
    int root = -1;
    bool begun = checkpoint_begin(&c, &root, out_dir, 20, &error);
    CHECK(!begun && error.code == EXIT_RESOURCE && strstr(error.text, "ulimit -n"), "begin: %s", error.text);
    bool pruned = prune(1, UINT64_MAX, &error);
    CHECK(!pruned && error.code == EXIT_RESOURCE && strstr(error.text, "ulimit -n"), "prune: %s", error.text);
    setrlimit(RLIMIT_NOFILE, &files);
}

// A leftover that cannot be removed makes a save fail only if that save needs its name.
static void test_leftovers(void) {
    static const struct {
        const char *name;
        bool saves;
    } cases[] = {{".trash-step-00000010", true}, {".tmp-step-00000010", true},  {".old-step-00000010", true},
                 {".trash-step-00000020", true}, {".tmp-step-00000020", false}, {".old-step-00000020", false}};
    check_group("leftovers that cannot be removed");
    Error error = {0};
    warn_off = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case();
        start_over();
        CHECK(save(10, 1, &error), "%s", error.text);
        CHECK(mkdir(in_test("runs/one/ckpt/%s", cases[i].name), 0777) == 0, "%s", cases[i].name);
        fault_set(1, false, EIO);
        CHECK(save(20, 2, &error) == cases[i].saves && there(20) == cases[i].saves, "%s", cases[i].name);
        fault_clear();
        CHECK(save(30, 3, &error) && count_entries(false) == 0, "%s: the next save: %s", cases[i].name, error.text);
    }
    warn_off = false;
}

static bool write_hashed(Checkpoint *c, const char *name, const char *text, Error *error) {
    File *file = file_create(c->folder_fd, checkpoint_path(c, name), checkpoint_hash(c, name), error);
    return file && file_write(file, text, strlen(text), error) && file_close(file, error);
}

// The manifest also has files that were not hashed as they were written. A file that was written twice, or that has
// grown since it was hashed, is listed in its current state.
static void test_manifest(void) {
    check_group("the manifest");
    Checkpoint c;
    Error error = {0};
    char path[PATH_MAX];
    uint64_t step;
    int root = -1;
    start_over();
    CHECK(checkpoint_begin(&c, &root, out_dir, 7, &error), "%s", error.text);
    FILE *file = fopen(checkpoint_path(&c, "other.txt"), "w");
    fputs("written in another way", file);
    fclose(file);
    CHECK(write_hashed(&c, "twice", "1st", &error), "%s", error.text);
    CHECK(write_hashed(&c, "twice", "2nd", &error), "%s", error.text);
    CHECK(write_hashed(&c, "empty", "", &error), "%s", error.text);
    CHECK(write_hashed(&c, "longer", "hashed", &error), "%s", error.text);
    CHECK(!checkpoint_hash(&c, "more"), "more than CHECKPOINT_HASHES files");
    CHECK(file_write_text(c.folder_fd, checkpoint_path(&c, "more"), "read again", &error), "%s", error.text);
    file = fopen(checkpoint_path(&c, "longer"), "a");
    fputs("  and written in another way", file);
    fclose(file);
    static const char *const needed[] = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"};
    for (int i = 0; i < 4; i++) CHECK(write_text(&c, needed[i], "", &error), "%s", error.text);
    CHECK(write_text(&c, "source.txt", "a tokenizer", &error) && checkpoint_commit(&c, &error), "%s", error.text);
    checkpoint_abandon(&c);    // does nothing after a commit
    CHECK(checkpoint_newest(out_dir, path, sizeof path, &step) && step == 7 && checkpoint_verify(path, false, &error),
          "%s", error.text);
    strcat(path, "/manifest.json");
    char *text = file_read(path, 10000, NULL, &error);
    CHECK(text && strstr(text, "other.txt") && strstr(text, "source.txt") && strstr(text, "twice") &&
              strstr(text, "\"empty\"") && !strstr(text, "manifest"),
          "%s", text ? text : error.text);
    // XXH3-128 of nothing, from the algorithm's own test vectors.
    CHECK(text && strstr(text, "99aa06d3014798d86001c324468d497f"), "the hash of an empty file: %s", text);
    free(text);
    CHECK(checkpoint_begin(&c, &root, out_dir, 8, &error) && mkdir(checkpoint_path(&c, "sub"), 0777) == 0, "%s",
          error.text);
    CHECK(!checkpoint_commit(&c, &error) && strstr(error.text, "only regular files"), "%s", error.text);
    checkpoint_abandon(&c);
    CHECK(count_entries(true) == 1 && count_entries(false) == 0, "abandoned");
}

static void test_lines(void) {
    static const char *const TEXTS[] = {"first", "", "a longer line", "last"};
    Error error = {0};
    FileLine line;
    size_t count = 0;
    uint64_t offset = 0;
    const char *path = in_test("lines");
    CHECK(file_write_text(AT_FDCWD, path, "first\n\na longer line\nlast", &error), "%s", error.text);
    FileLines *lines = file_lines_open(path, 13, &error);
    for (; file_lines_next(lines, &line, &error) && line.text && count < 4; offset += line.length + 1) {
        CHECK(!strcmp(line.text, TEXTS[count]) && line.length == strlen(TEXTS[count]), "%s", line.text);
        CHECK(line.number == ++count && line.offset == offset, "line %zu: %zu", count, line.number);
    }
    CHECK(count == 4 && !line.text, "%zu lines", count);
    FileHash read = file_lines_hash(lines), whole;
    CHECK(file_hash(AT_FDCWD, path, UINT64_MAX, &whole, &error) && read.size == whole.size &&
              XXH128_isEqual(read.xxh3, whole.xxh3),
          "the hash of %zu bytes", (size_t)read.size);
    file_lines_close(lines);
    lines = file_lines_open(path, 12, &error);
    while (file_lines_next(lines, &line, &error) && line.text) {}
    CHECK(error.code == EXIT_INPUT && strstr(error.text, "line 3: expected at most 12 bytes"), "%s", error.text);
    file_lines_close(lines);
    CHECK(!file_lines_open(folder, 9, &error) && strstr(error.text, "a folder"), "%s", error.text);
}

static void test_shell_words(void) {
    check_group("words of a shell command");
    static const char *const WORDS[] = {"a/b.c", "it's '' $HOME [v2] `x` \\", "~", "", "new\nline"};
    for (size_t i = 0; i < sizeof WORDS / sizeof *WORDS; i++) {
        char command[1024], found[256];
        snprintf(command, sizeof command, "printf %%s %.900s", shell_word(WORDS[i]).text);
        FILE *shell = popen(command, "r");
        found[shell ? fread(found, 1, sizeof found - 1, shell) : 0] = 0;
        CHECK(shell && pclose(shell) == 0 && !strcmp(found, WORDS[i]), "%s: found %s", command, found);
    }
    CHECK(!strcmp(shell_word("a/b.c").text, "a/b.c"), "a word that needs no quotes has none");
}

static void test_cut_last(void) {
    static const char *const PATHS[][2] = {{"a/b", "a"}, {"a", "."}, {"/a", "/"}, {"a/b//", "a"}, {"/", "/"}};
    char path[16];
    for (size_t i = 0; i < sizeof PATHS / sizeof *PATHS; i++) {
        strcpy(path, PATHS[i][0]);
        file_cut_last(path);
        CHECK(!strcmp(path, PATHS[i][1]), "%s is cut to %s", PATHS[i][0], path);
    }
}

static void test_files(void) {
    check_group("files and folders");
    char path[PATH_MAX];
    uint64_t bytes = 0;
    Error error = {0};
    strcpy(path, in_test("a/b/c"));
    CHECK(file_make_folders(path, &error) && file_make_folders(path, &error) && access(path, F_OK) == 0, "%s",
          error.text);
    CHECK(file_free_space(path, &bytes, &error) && bytes > 0, "%s", error.text);
    strcat(path, "/not/there/yet");
    CHECK(file_free_space(path, &bytes, &error) && bytes > 0 && file_free_space("not/there/yet", &bytes, &error), "%s",
          error.text);
    snprintf(path, sizeof path, "%s/x", source);
    CHECK(!file_make_folders(path, &error) && error.code == EXIT_RESOURCE && strstr(error.text, source), "%s",
          error.text);
    CHECK(!file_read(source, 3, NULL, &error) && error.code == EXIT_INPUT && strstr(error.text, "at most 3"), "%s",
          error.text);
    CHECK(!file_read(folder, 3, NULL, &error) && strstr(error.text, "a folder"), "%s", error.text);
    test_lines();
    test_cut_last();
    // A link is removed, but not its target.
    CHECK(symlink(source, in_test("a/link")) == 0, "symlink");
    strcpy(path, in_test("a"));
    CHECK(file_remove_tree(AT_FDCWD, path, &error) && access(path, F_OK) != 0 && access(source, F_OK) == 0, "%s",
          error.text);
    CHECK(file_remove_tree(AT_FDCWD, path, &error), "nothing there: %s", error.text);
    CHECK(file_make_folders(path, &error), "%s", error.text);
    for (int i = 0; i < 3000; i++) close(open(in_test("a/%d", i), O_WRONLY | O_CREAT, 0666));
    pid_t child = fork();
    for (int i = 0; child == 0 && i < 3000; i++) unlink(in_test("a/%d", i));
    if (child == 0) _exit(0);
    CHECK(file_remove_tree(AT_FDCWD, path, &error) && access(path, F_OK) != 0, "two processes remove it: %s",
          error.text);
    waitpid(child, NULL, 0);
}

int main(void) {
    Error error;
    setvbuf(stdout, NULL, _IOLBF, 0);    // a child must not inherit unprinted lines
    if (!mkdtemp(folder)) fail(EXIT_RESOURCE, "%s: mkdtemp failed.", folder);
    snprintf(out_dir, sizeof out_dir, "%s/runs/one", folder);
    snprintf(source, sizeof source, "%s/source.txt", folder);
    fault_clear();
    if (!file_write_text(AT_FDCWD, source, "a tokenizer", &error)) fail_with(&error);
    test_shell_words();
    test_files();
    test_manifest();
    test_strange_names();
    test_prune();
    test_exchanged();
    test_unlisted();
    test_leftovers();
    test_kill("a save, killed at each point", save_20, 20, true, 23);
    // Two more folders made, each synced into its parent.
    test_kill("the first save, killed", save_10, 10, false, 23 + 4);
    // The old one set aside (2), its 6 files and itself removed.
    test_kill("a save of the same step, killed", save_10, 10, true, 23 + 9);
    test_kill_prune();
    test_kill_replace();
    test_errno("ENOSPC at each point of a save", ENOSPC, "Free some space");
    test_errno("EIO at each point of a save", EIO, "The disk failed");
    test_large();
    test_damage();
    file_remove_tree(AT_FDCWD, folder, &error);
    return check_verdict();
}

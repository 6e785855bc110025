#include "run/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/checkpoint.h"
#include "runtime/file.h"
#include "runtime/own.h"
#include "runtime/path.h"

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
    if (fd < 0) return error_set(error, EXIT_RESOURCE, "%s: cannot write it: %s.\n  %s", path, reason, own_remedy());
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

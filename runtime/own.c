#define _GNU_SOURCE
#include "runtime/own.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/file.h"

int own_create(int folder, const char *name) {
    if (unlinkat(folder, name, 0) != 0 && errno != ENOENT) return -1;
    return openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);    // O_EXCL follows no link
}

bool own_is_link(int folder, const char *name) {
    struct stat info;
    return fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(info.st_mode);
}

int own_folder(int folder, const char *name) {
    return openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

// What speaks against writing to an open file. Its number of names is read at its path: whoever made a second name may
// have removed that one since.
static const char *reason_against(int fd, const char *path) {
    struct stat ours, there;
    if (fstat(fd, &ours) != 0 || lstat(path, &there) != 0) return strerror(errno);
    if (!S_ISREG(ours.st_mode)) return S_ISDIR(ours.st_mode) ? "it is a folder" : "it is a pipe or device";
    if (ours.st_dev != there.st_dev || ours.st_ino != there.st_ino) return "it was replaced while it was opened";
    return there.st_nlink > 1 ? "the file has another name (a hard link), perhaps outside of this folder" : NULL;
}

// O_NONBLOCK keeps open() from waiting for the other end of a FIFO. It has no effect on regular files.
int own_open(const char *path, int flags, const char **reason) {
    int fd = open(path, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd < 0) {
        *reason = errno == ELOOP && own_is_link(AT_FDCWD, path) ? "it is a link" : strerror(errno);
        return -1;
    }
    *reason = reason_against(fd, path);
    if (!*reason) return fd;
    close(fd);
    errno = EEXIST;
    return -1;
}

const char *own_remedy(void) {
    if (errno == EEXIST || errno == EISDIR || errno == ELOOP) return "Remove it, or choose another --out.";
    return file_remedy(errno, "Choose another --out, or get write permission for this one.");
}

static bool check_one(const char *path, const char *named, bool inside, Error *error) {
    struct stat info;
    if (stat(path, &info) != 0 || info.st_uid == geteuid() || !(info.st_mode & S_IWOTH)) return true;
    if (!inside && (info.st_mode & S_ISVTX)) return true;
    return error_set(
        error, EXIT_RESOURCE,
        "%s: %s belongs to another user (%ld), and everybody may write to it.\n"
        "  Anybody could exchange what is written there. Choose another folder, or pass --foreign-folder 1.",
        named, inside ? "this folder" : "the folder that contains it", (long)info.st_uid);
}

bool own_check(const char *path, bool foreign, Error *error) {
    char part[PATH_MAX + 4];
    if (foreign || strlen(path) >= PATH_MAX) return true;
    strcpy(part, path);
    while (access(part, F_OK) != 0 && errno == ENOENT && strcmp(part, ".") && strcmp(part, "/")) file_cut_last(part);
    bool there = strlen(part) == strlen(path);
    if (!check_one(part, path, there, error)) return false;
    if (!there) return true;
    strcat(part, "/..");    // of the folder itself, if the path is a link
    if (!check_one(part, path, false, error)) return false;
    strcpy(part, path);
    file_cut_last(part);
    return check_one(part, path, false, error);
}

#define _GNU_SOURCE
#include "runtime/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "runtime/activity.h"
#include "runtime/own.h"
#include "runtime/size.h"

// ---- fault points

#ifdef FAULTS
static struct {
    bool ready, half;
    long at, count;
    int error;    // 0: end the process
} fault;

static void fault_report(void) {
    fprintf(stderr, "fault points: %ld\n", fault.count);
}

static void fault_setup(void) {
    const char *at = getenv("FAULT_AT"), *kind = getenv("FAULT_KIND");
    fault.ready = true;
    fault.at = at ? atol(at) : 0;
    if (kind && !strcmp(kind, "half")) fault.half = true;
    else if (kind && !strcmp(kind, "enospc")) fault.error = ENOSPC;
    else if (kind && !strcmp(kind, "eio")) fault.error = EIO;
    else if (kind && strcmp(kind, "kill")) fail(EXIT_USAGE, "FAULT_KIND=%s: expected kill, half, enospc or eio.", kind);
    if (getenv("FAULT_COUNT")) atexit(fault_report);
}

// Returns true, with errno set, if this operation should fail; does not return if the process should die. `data` is
// what a write was about to write.
static bool fault_hit(int fd, const void *data, size_t size) {
    if (!fault.ready) fault_setup();
    if (++fault.count != fault.at) return false;
    if (!fault.error) {
        if (fault.half && size > 1 && write(fd, data, size / 2) < 0) _exit(138);
        _exit(137);    // the status that a shell reports for a process that SIGKILL ended
    }
    errno = fault.error;
    return true;
}
#else
#define fault_hit(fd, data, size) false
#endif

static ssize_t act_write(int fd, const void *data, size_t size) {
    activity_progress();
    if (fault_hit(fd, data, size)) return -1;
    return write(fd, data, size);
}

static int act_fsync(int fd) {
    activity_progress();
    if (fault_hit(-1, NULL, 0)) return -1;
    return fsync(fd);
}

static int act_rename(int folder, const char *from, const char *to) {
    activity_progress();
    if (fault_hit(-1, NULL, 0)) return -1;
    return renameat(folder, from, folder, to);
}

static int act_mkdir(int folder, const char *path) {
    activity_progress();
    if (fault_hit(-1, NULL, 0)) return -1;
    return mkdirat(folder, path, 0777);
}

static int act_remove(int folder, const char *path, bool is_folder) {
    activity_progress();
    if (fault_hit(-1, NULL, 0)) return -1;
    return unlinkat(folder, path, is_folder ? AT_REMOVEDIR : 0);
}

// ---- errors

const char *file_remedy(int number, const char *otherwise) {
    switch (number) {
    case EMFILE: return "This process has too many open files. Raise its limit, for example with `ulimit -n 4096`.";
    case ENFILE: return "The system has too many open files. End other programs, or raise fs.file-max.";
    default: return otherwise;
    }
}

static const char *write_remedy(int number) {
    switch (number) {
    case EFBIG:
        return "Raise the limit on file sizes (`ulimit -f unlimited`), or choose a folder on a disk that allows larger files.";
    case ENOSPC:
    case EDQUOT: return "Free some space on that disk, or choose a folder on another disk.";
    case EACCES:
    case EPERM:
    case EROFS: return "Choose a folder that you can write to, or change its permissions.";
    case EIO: return "The disk failed. See the system log, and choose a folder on another disk.";
    case ENOTDIR:
    case EISDIR: return "A file is where a folder should be, or the other way around. Choose another path.";
    default: return file_remedy(number, "Choose another folder, or repair this one.");
    }
}

static bool write_error(Error *error, const char *path, const char *act) {
    int number = errno;
    return error_set(error, EXIT_RESOURCE, "%s: %s failed: %s.\n  %s", path, act, strerror(number),
                     write_remedy(number));
}

#define CHECK_PATH "Check the path and its permissions."

static bool read_error(Error *error, const char *path, const char *act, const char *remedy) {
    int number = errno;
    return error_set(error, EXIT_INPUT, "%s: %s failed: %s.\n  %s", path, act, strerror(number),
                     number == EIO ? "The disk failed. See the system log, and use another copy of the file."
                                   : file_remedy(number, remedy));
}

// ---- writing

enum { FLUSH_BYTES = 16 << 20 };    // write-back to disk starts in steps of this size

struct File {
    int fd, folder;
    uint64_t size;          // bytes written
    uint64_t flushed;       // bytes whose write-back to disk has started
    FileHash *hash;         // where the hash is to go; NULL if none is requested
    XXH3_state_t *state;    // of the hash so far
    char path[PATH_MAX];
};

// What the system gets of a path in an open folder.
static const char *in_folder(int folder, const char *path) {
    const char *slash = folder == AT_FDCWD ? NULL : strrchr(path, '/');
    return slash ? slash + 1 : path;
}

File *file_create(int folder, const char *path, FileHash *hash, Error *error) {
    if (strlen(path) >= PATH_MAX) {
        error_set(error, EXIT_RESOURCE, "%.200s...: the path is longer than %d bytes.\n  Choose a shorter one.", path,
                  PATH_MAX - 1);
        return NULL;
    }
    int fd = own_create(folder, in_folder(folder, path));
    if (fd < 0) {
        write_error(error, path, "creating it");
        return NULL;
    }
    File *file = calloc(1, sizeof *file);
    if (!file) fail(EXIT_RESOURCE, "%s: out of memory.", path);
    file->fd = fd;
    file->folder = folder;
    strcpy(file->path, path);
    if (hash) {
        file->hash = hash;
        file->state = XXH3_createState();
        if (!file->state) fail(EXIT_RESOURCE, "%s: out of memory.", path);
        XXH3_128bits_reset(file->state);
    }
    return file;
}

static void file_free(File *file) {
    XXH3_freeState(file->state);
    free(file);
}

// Starts write-back of the new pages without waiting for it. Otherwise the final fsync would have to write everything.
static void file_flush_early(File *file) {
    if (file->size - file->flushed < FLUSH_BYTES) return;
    sync_file_range(file->fd, (off_t)file->flushed, (off_t)(file->size - file->flushed), SYNC_FILE_RANGE_WRITE);
    file->flushed = file->size;
}

bool file_write(File *file, const void *data, size_t size, Error *error) {
    const char *at = data;
    while (size > 0) {
        size_t piece = smaller(size, FLUSH_BYTES);
        ssize_t written = act_write(file->fd, at, piece);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) {
            char act[80];
            if (written == 0) errno = ENOSPC;
            snprintf(act, sizeof act, "writing %zu bytes at offset %" PRIu64, piece, file->size);
            return write_error(error, file->path, act);
        }
        if (file->hash) XXH3_128bits_update(file->state, at, (size_t)written);
        file->size += (uint64_t)written;
        at += written;
        size -= (size_t)written;
        file_flush_early(file);
    }
    return true;
}

bool file_close(File *file, Error *error) {
    bool ok = act_fsync(file->fd) == 0 || write_error(error, file->path, "fsync");
    if (close(file->fd) != 0 && ok) ok = write_error(error, file->path, "close");
    if (ok && file->hash) *file->hash = (FileHash){file->size, XXH3_128bits_digest(file->state)};
    if (!ok) unlinkat(file->folder, in_folder(file->folder, file->path), 0);
    file_free(file);
    return ok;
}

void file_discard(File *file) {
    close(file->fd);
    unlinkat(file->folder, in_folder(file->folder, file->path), 0);
    file_free(file);
}

bool file_write_text(int folder, const char *path, const char *text, Error *error) {
    if (!text) return error_set(error, EXIT_RESOURCE, "%s: out of memory for its text.", path);
    File *file = file_create(folder, path, NULL, error);
    if (!file) return false;
    if (!file_write(file, text, strlen(text), error)) {
        file_discard(file);
        return false;
    }
    return file_close(file, error);
}

bool file_replace_text(const char *path, const char *text, Error *error) {
    char temporary[PATH_MAX];
    if (snprintf(temporary, sizeof temporary, "%s.tmp", path) >= (int)sizeof temporary) {
        errno = ENAMETOOLONG;
        return write_error(error, path, "naming its temporary file");
    }
    if (!file_write_text(AT_FDCWD, temporary, text, error)) return false;
    if (file_rename(AT_FDCWD, temporary, path, error)) return true;
    unlink(temporary);
    return false;
}

ssize_t file_read_up_to(int fd, void *out, size_t size, uint64_t offset) {
    size_t done = 0;
    while (done < size) {
        ssize_t got = pread(fd, (char *)out + done, size - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        activity_progress();
        done += (size_t)got;
    }
    return (ssize_t)done;
}

// O_NONBLOCK keeps open() from waiting for a FIFO's writer. It has no effect on regular files.
static int open_regular(int folder, const char *path, const char *remedy, uint64_t *size, Error *error) {
    struct stat info;
    int fd = openat(folder, in_folder(folder, path), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &info) != 0) {
        read_error(error, path, "opening it", remedy);
    } else if (!S_ISREG(info.st_mode)) {
        error_set(error, EXIT_INPUT, "%s: expected a regular file, found %s.\n  %s", path,
                  S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe", remedy);
    } else {
        *size = (uint64_t)info.st_size;
        return fd;
    }
    if (fd >= 0) close(fd);
    return -1;
}

int file_open(const char *path, const char *remedy, uint64_t *size, Error *error) {
    return open_regular(AT_FDCWD, path, remedy, size, error);
}

static bool check_limit(const char *path, uint64_t size, uint64_t limit, Error *error) {
    return size <= limit || error_set(error, EXIT_INPUT,
                                      "%s: expected at most %" PRIu64 " bytes, found %" PRIu64
                                      ".\n  This does not look like the right file.",
                                      path, limit, size);
}

// ---- folders

// Some network file systems do not support fsync on folders and return EINVAL.
static bool sync_open(int fd, const char *path, Error *error) {
    return act_fsync(fd) == 0 || errno == EINVAL || write_error(error, path, "fsync");
}

bool file_sync(int folder, const char *path, Error *error) {
    int fd = openat(folder, in_folder(folder, path), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return write_error(error, path, "opening it for fsync");
    bool ok = sync_open(fd, path, error);
    close(fd);
    return ok;
}

void file_cut_last(char *path) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') path[--length] = 0;
    char *slash = strrchr(path, '/');
    if (!slash) strcpy(path, ".");
    else slash[slash == path] = 0;
}

static bool sync_parent(int folder, const char *path, Error *error) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    file_cut_last(parent);
    return folder == AT_FDCWD ? file_sync(folder, parent, error) : sync_open(folder, parent, error);
}

static bool make_folder(const char *path, Error *error) {
    struct stat info;
    if (act_mkdir(AT_FDCWD, path) == 0) return sync_parent(AT_FDCWD, path, error);
    int number = errno;
    if (number == EEXIST && stat(path, &info) == 0 && S_ISDIR(info.st_mode)) return true;
    errno = number == EEXIST ? ENOTDIR : number;
    return write_error(error, path, "creating the folder");
}

bool file_make_folders(const char *path, Error *error) {
    char part[PATH_MAX];
    struct stat info;
    if (strlen(path) >= sizeof part) {
        errno = ENAMETOOLONG;
        return write_error(error, path, "creating the folder");
    }
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) return true;
    strcpy(part, path);
    for (char *slash = part + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        if (!(stat(part, &info) == 0 && S_ISDIR(info.st_mode)) && !make_folder(part, error)) return false;
        *slash = '/';
    }
    return make_folder(part, error);
}

int file_make_folder(int folder, const char *path, Error *error) {
    int fd = -1;
    if (act_mkdir(folder, in_folder(folder, path)) != 0 || (fd = own_folder(folder, in_folder(folder, path))) < 0) {
        write_error(error, path, "creating the folder");
    } else if (!sync_parent(folder, path, error)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

bool file_rename(int folder, const char *from, const char *to, Error *error) {
    if (act_rename(folder, in_folder(folder, from), in_folder(folder, to)) == 0) return sync_parent(folder, to, error);
    char act[PATH_MAX + 40];
    snprintf(act, sizeof act, "renaming %s to this", from);
    return write_error(error, to, act);
}

// Another process may have removed it.
static bool remove_one(int folder, const char *name, bool is_folder) {
    return act_remove(folder, name, is_folder) == 0 || errno == ENOENT;
}

// Removes what is in a folder, and then the folder. Opens no link, so that it never leaves the tree.
static bool remove_tree(int folder, const char *name, int depth) {
    enum { DEEPEST = 100 };
    int fd = own_folder(folder, name), number = 0;
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (fd >= 0 && !list) close(fd);
    if (!list && (errno == ENOTDIR || errno == ELOOP)) return remove_one(folder, name, false);
    if (!list) return errno == ENOENT;
    for (struct dirent *entry; !number && (entry = readdir(list));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (depth == DEEPEST) number = ENAMETOOLONG;
        else if (!remove_tree(fd, entry->d_name, depth + 1)) number = errno;
    }
    closedir(list);
    if (!number) return remove_one(folder, name, true);
    errno = number;
    return false;
}

bool file_remove_tree(int folder, const char *path, Error *error) {
    return remove_tree(folder, in_folder(folder, path), 0) || write_error(error, path, "removing it");
}

bool file_free_space(const char *path, uint64_t *bytes, Error *error) {
    char part[PATH_MAX];
    struct statvfs info;
    snprintf(part, sizeof part, "%s", *path ? path : ".");
    while (statvfs(part, &info) != 0) {
        if ((errno != ENOENT && errno != ENOTDIR) || !strcmp(part, "/") || !strcmp(part, ".")) {
            return read_error(error, path, "reading its free space", CHECK_PATH);
        }
        file_cut_last(part);
    }
    *bytes = (uint64_t)info.f_bavail * info.f_frsize;
    return true;
}

// ---- reading

bool file_read_at(int fd, const char *path, void *out, size_t size, uint64_t offset, Error *error) {
    ssize_t got = file_read_up_to(fd, out, size, offset);
    if (got == (ssize_t)size) return true;
    if (got < 0) return read_error(error, path, "reading it", CHECK_PATH);
    return error_set(error, EXIT_INPUT,
                     "%s: expected %zu bytes at offset %" PRIu64 ", found %zd.\n"
                     "  The file is truncated. Copy it or create it again.",
                     path, size, offset, got);
}

static bool starts_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

// Is this open file in the folder, or among the blobs of the Hugging Face cache that the folder is in?
static bool is_inside(int fd, const char *folder) {
    char name[40], start[PATH_MAX + 8], *real, *root = realpath(folder, NULL);
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    real = realpath(name, NULL);    // of what has been opened, whatever the path leads to by now
    bool inside = false;
    if (real && root) {
        snprintf(start, sizeof start, "%s/", root);
        inside = starts_with(real, start);
        char *snapshots = strstr(start, "/snapshots/");
        for (char *next = snapshots; next; next = strstr(next + 1, "/snapshots/")) snapshots = next;
        if (snapshots) strcpy(snapshots, "/blobs/");
        inside = inside || (snapshots && starts_with(real, start));
    }
    free(real);
    free(root);
    return inside;
}

static bool check_inside(int fd, const char *folder, const char *path, Error *error) {
    return is_inside(fd, folder) ||
           error_set(error, EXIT_INPUT,
                     "%s: expected a file in its folder, found a link out of it, which could reveal another file.\n"
                     "  Copy the file into the folder, or pass --follow-links 1.",
                     path);
}

bool file_check_inside(const char *folder, const char *path, Error *error) {
    uint64_t size;
    Error ignored;
    int fd = file_open(path, CHECK_PATH, &size, &ignored);
    if (fd < 0) return true;
    bool ok = check_inside(fd, folder, path, error);
    close(fd);
    return ok;
}

size_t file_mark(const char *text, size_t length) {
    static const char mark[] = "\xEF\xBB\xBF";
    return length >= strlen(mark) && memcmp(text, mark, strlen(mark)) == 0 ? strlen(mark) : 0;
}

// Removes the mark from a text, which is followed by a 0 byte.
static void drop_mark(char *text, size_t *length) {
    size_t mark = file_mark(text, *length);
    *length -= mark;
    memmove(text, text + mark, *length + 1);
}

static char *read_open(int fd, const char *path, uint64_t bytes, size_t limit, size_t *size, Error *error) {
    if (!check_limit(path, bytes, limit, error)) return NULL;
    char *text = bytes < SIZE_MAX ? malloc(bytes + 1) : NULL;
    if (!text) fail(EXIT_RESOURCE, "%s: out of memory for its %" PRIu64 " bytes.", path, bytes);
    if (!file_read_at(fd, path, text, bytes, 0, error)) {
        free(text);
        return NULL;
    }
    size_t length = bytes;
    text[length] = '\0';
    drop_mark(text, &length);
    if (size) *size = length;
    return text;
}

char *file_read_inside(const char *folder, const char *path, size_t limit, size_t *size, Error *error) {
    uint64_t bytes;
    int fd = file_open(path, CHECK_PATH, &bytes, error);
    if (fd < 0) return NULL;
    bool ok = !folder || check_inside(fd, folder, path, error);
    char *text = ok ? read_open(fd, path, bytes, limit, size, error) : NULL;
    close(fd);
    return text;
}

char *file_read(const char *path, size_t limit, size_t *size, Error *error) {
    return file_read_inside(NULL, path, limit, size, error);
}

char *file_read_stream(const char *path, size_t limit, size_t *size, Error *error) {
    size_t length = 0, room = 1 << 16;
    char *text = malloc(room);
    FILE *file = path ? fopen(path, "re") : stdin;
    if (!path) path = "stdin";
    bool ok = file || read_error(error, path, "opening it", CHECK_PATH);
    while (ok && text) {
        length += fread(text + length, 1, room - length - 1, file);
        ok = check_limit(path, length, limit, error);
        if (length < room - 1 || !ok) break;
        room *= 2;
        text = realloc(text, room);
    }
    if (!text) fail(EXIT_RESOURCE, "%s: out of memory for its text.", path);
    if (ok && ferror(file)) ok = read_error(error, path, "reading it", CHECK_PATH);
    if (file && file != stdin) fclose(file);
    text[length] = '\0';
    drop_mark(text, &length);
    *size = length;
    if (ok) return text;
    free(text);
    return NULL;
}

FILE *file_open_system(const char *path) {
    return fopen(path, "re");
}

struct FileLines {
    FILE *file;
    char *path, *text;
    size_t limit, room, number;
    uint64_t offset;    // of the next line
    uint64_t size;      // of what has been read
    XXH3_state_t *state;
};

FileLines *file_lines_open(const char *path, size_t limit, Error *error) {
    uint64_t size;
    int fd = file_open(path, CHECK_PATH, &size, error);
    if (fd < 0) return NULL;
    FileLines *lines = calloc(1, sizeof *lines);
    if (!lines) fail(EXIT_RESOURCE, "%s: out of memory.", path);
    *lines = (FileLines){.file = fdopen(fd, "r"), .path = strdup(path), .limit = limit, .state = XXH3_createState()};
    if (!lines->file || !lines->path || !lines->state) fail(EXIT_RESOURCE, "%s: out of memory.", path);
    XXH3_128bits_reset(lines->state);
    return lines;
}

void file_lines_close(FileLines *lines) {
    if (!lines) return;
    fclose(lines->file);
    XXH3_freeState(lines->state);
    free(lines->path);
    free(lines->text);
    free(lines);
}

static void keep_byte(FileLines *lines, size_t at, int byte) {
    if (at == lines->room) {
        lines->room = 2 * lines->room + 4096;
        lines->text = realloc(lines->text, lines->room);
        if (!lines->text) fail(EXIT_RESOURCE, "%s: out of memory for line %zu.", lines->path, lines->number);
    }
    lines->text[at] = (char)byte;
}

bool file_lines_next(FileLines *lines, FileLine *line, Error *error) {
    size_t length = 0;
    int byte;
    lines->number++;
    while ((byte = getc_unlocked(lines->file)) != EOF && byte != '\n') {
        if (length == lines->limit)
            return error_set(error, EXIT_INPUT,
                             "%s: line %zu: expected at most %zu bytes.\n  This does not look like the right file.",
                             lines->path, lines->number, lines->limit);
        keep_byte(lines, length++, byte);
    }
    if (byte == EOF && ferror(lines->file)) return read_error(error, lines->path, "reading it", CHECK_PATH);
    keep_byte(lines, length, '\n');
    size_t read = length + (byte == '\n');
    XXH3_128bits_update(lines->state, lines->text, read);
    lines->size += read;
    lines->text[length] = '\0';
    size_t mark = lines->number == 1 ? file_mark(lines->text, length) : 0;
    *line = (FileLine){lines->text + mark, length - mark, lines->number, lines->offset + mark};
    if (byte == EOF && !length) line->text = NULL;
    lines->offset += length + 1;
    return true;
}

FileHash file_lines_hash(const FileLines *lines) {
    return (FileHash){lines->size, XXH3_128bits_digest(lines->state)};
}

enum { PIECE = 1 << 20 };    // bytes that are read at a time

bool file_hash(int folder, const char *path, uint64_t limit, FileHash *hash, Error *error) {
    uint64_t size, offset = 0;
    int fd = open_regular(folder, path, CHECK_PATH, &size, error);
    if (fd < 0) return false;
    char *piece = malloc(PIECE);
    XXH3_state_t *state = XXH3_createState();
    if (!piece || !state) fail(EXIT_RESOURCE, "%s: out of memory.", path);
    XXH3_128bits_reset(state);
    bool ok = check_limit(path, size, limit, error);
    while (ok && offset < size) {    // up to the size that the file has now
        ssize_t got = file_read_up_to(fd, piece, smaller(size - offset, PIECE), offset);
        if (got < 0) ok = read_error(error, path, "reading it", CHECK_PATH);
        if (got <= 0) break;
        XXH3_128bits_update(state, piece, (size_t)got);
        offset += (uint64_t)got;
    }
    *hash = (FileHash){offset, XXH3_128bits_digest(state)};
    XXH3_freeState(state);
    free(piece);
    close(fd);
    return ok;
}

ShellWord shell_word(const char *text) {
    static const char PLAIN[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789@%+=:,./-_";
    ShellWord out;
    bool plain = *text && !text[strspn(text, PLAIN)];
    char *at = out.text, *end = out.text + sizeof out.text - 6;    // room for '\'' and the last '
    if (!plain) *at++ = '\'';
    for (; *text && at < end; text++) {
        if (*text == '\'') at = stpcpy(at, "'\\'");
        *at++ = *text;
    }
    strcpy(at, plain ? "" : "'");
    return out;
}

HashText file_hash_text(XXH128_hash_t hash) {
    HashText out;
    snprintf(out.text, sizeof out.text, "%016" PRIx64 "%016" PRIx64, (uint64_t)hash.high64, (uint64_t)hash.low64);
    return out;
}

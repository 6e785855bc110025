#define _GNU_SOURCE
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

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
    if (fault_hit(fd, data, size)) return -1;
    return write(fd, data, size);
}

static int act_fsync(int fd) {
    if (fault_hit(-1, NULL, 0)) return -1;
    return fsync(fd);
}

static int act_rename(const char *from, const char *to) {
    if (fault_hit(-1, NULL, 0)) return -1;
    return rename(from, to);
}

static int act_mkdir(const char *path) {
    if (fault_hit(-1, NULL, 0)) return -1;
    return mkdir(path, 0777);
}

static int act_remove(const char *path) {
    if (fault_hit(-1, NULL, 0)) return -1;
    return remove(path);
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

static bool read_error(Error *error, const char *path, const char *act) {
    int number = errno;
    return error_set(error, EXIT_INPUT, "%s: %s failed: %s.\n  %s", path, act, strerror(number),
                     number == EIO ? "The disk failed. See the system log, and use another copy of the file."
                                   : file_remedy(number, "Check the path and its permissions."));
}

// ---- writing

enum { FLUSH_BYTES = 16 << 20 };    // write-back to disk starts in steps of this size

struct File {
    int fd;
    uint64_t size;          // bytes written
    uint64_t flushed;       // bytes whose write-back to disk has started
    FileHash *hash;         // where the hash is to go; NULL if none is requested
    XXH3_state_t *state;    // of the hash so far
    char path[PATH_MAX];
};

File *file_create(const char *path, FileHash *hash, Error *error) {
    if (strlen(path) >= PATH_MAX) {
        error_set(error, EXIT_RESOURCE, "%.200s...: the path is longer than %d bytes.\n  Choose a shorter one.", path,
                  PATH_MAX - 1);
        return NULL;
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        write_error(error, path, "creating it");
        return NULL;
    }
    File *file = calloc(1, sizeof *file);
    if (!file) fail(EXIT_RESOURCE, "%s: out of memory.", path);
    file->fd = fd;
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
        size_t piece = size < FLUSH_BYTES ? size : FLUSH_BYTES;
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
    file_free(file);
    return ok;
}

void file_discard(File *file) {
    close(file->fd);
    unlink(file->path);
    file_free(file);
}

// Writes the whole file, or leaves none.
static bool write_whole(const char *path, const char *text, Error *error) {
    if (!text) return error_set(error, EXIT_RESOURCE, "%s: out of memory for its text.", path);
    File *file = file_create(path, NULL, error);
    if (!file) return false;
    if (!file_write(file, text, strlen(text), error)) {
        file_discard(file);
        return false;
    }
    if (file_close(file, error)) return true;
    unlink(path);
    return false;
}

bool file_write_text(const char *path, const char *text, Error *error) {
    return write_whole(path, text, error);
}

bool file_replace_text(const char *path, const char *text, Error *error) {
    char temporary[PATH_MAX];
    if (snprintf(temporary, sizeof temporary, "%s.tmp", path) >= (int)sizeof temporary) {
        errno = ENAMETOOLONG;
        return write_error(error, path, "naming its temporary file");
    }
    if (!write_whole(temporary, text, error)) return false;
    if (file_rename(temporary, path, error)) return true;
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
        done += (size_t)got;
    }
    return (ssize_t)done;
}

enum { PIECE = 1 << 20 };    // files are read in pieces of this many bytes

int file_open(const char *path) {
    return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);    // O_NONBLOCK has no effect on regular files
}

// Calls `take` with consecutive pieces of the file until it fails.
static bool read_pieces(const char *path, bool (*take)(void *context, const void *data, size_t size, Error *error),
                        void *context, Error *error) {
    int fd = file_open(path);
    if (fd < 0) return read_error(error, path, "opening it");
    char *piece = malloc(PIECE);
    if (!piece) fail(EXIT_RESOURCE, "%s: out of memory.", path);
    bool ok = true;
    uint64_t offset = 0;
    for (;;) {
        ssize_t got = file_read_up_to(fd, piece, PIECE, offset);
        if (got < 0) ok = read_error(error, path, "reading it");
        if (got <= 0) break;
        ok = take(context, piece, (size_t)got, error);
        offset += (uint64_t)got;
        if (!ok) break;
    }
    free(piece);
    close(fd);
    return ok;
}

static bool take_write(void *context, const void *data, size_t size, Error *error) {
    return file_write(context, data, size, error);
}

bool file_copy(const char *to, const char *from, Error *error) {
    File *file = file_create(to, NULL, error);
    if (!file) return false;
    if (!read_pieces(from, take_write, file, error)) {
        file_discard(file);
        return false;
    }
    return file_close(file, error);
}

// ---- folders

bool file_sync(const char *path, Error *error) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return write_error(error, path, "opening it for fsync");
    // Some network file systems do not support fsync on folders and return EINVAL.
    bool ok = act_fsync(fd) == 0 || errno == EINVAL || write_error(error, path, "fsync");
    close(fd);
    return ok;
}

static bool sync_parent(const char *path, Error *error) {
    char parent[PATH_MAX];
    const char *slash = strrchr(path, '/');
    int length = slash ? (int)(slash - path) : 0;
    if (!slash) strcpy(parent, ".");
    else if (length == 0) strcpy(parent, "/");
    else snprintf(parent, sizeof parent, "%.*s", length, path);
    return file_sync(parent, error);
}

static bool make_folder(const char *path, Error *error) {
    struct stat info;
    if (act_mkdir(path) == 0) return sync_parent(path, error);
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

bool file_rename(const char *from, const char *to, Error *error) {
    if (act_rename(from, to) == 0) return sync_parent(to, error);
    char act[PATH_MAX + 40];
    snprintf(act, sizeof act, "renaming %s to this", from);
    return write_error(error, to, act);
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *ftw) {
    (void)info, (void)kind, (void)ftw;
    return act_remove(path) == 0 || errno == ENOENT ? 0 : -1;    // another process may have removed it
}

bool file_remove_tree(const char *path, Error *error) {
    struct stat info;
    if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) == 0) return true;
    if (errno == ENOENT && lstat(path, &info) != 0 && errno == ENOENT) return true;
    return write_error(error, path, "removing it");
}

bool file_free_space(const char *path, uint64_t *bytes, Error *error) {
    char part[PATH_MAX];
    struct statvfs info;
    snprintf(part, sizeof part, "%s", *path ? path : ".");
    while (statvfs(part, &info) != 0) {
        char *slash = strrchr(part, '/');
        if ((errno != ENOENT && errno != ENOTDIR) || !strcmp(part, "/") || !strcmp(part, ".")) {
            return read_error(error, path, "reading its free space");
        }
        if (!slash) strcpy(part, ".");
        else slash[slash == part] = '\0';    // "/a" becomes "/"
    }
    *bytes = (uint64_t)info.f_bavail * info.f_frsize;
    return true;
}

// ---- reading

bool file_read_at(int fd, const char *path, void *out, size_t size, uint64_t offset, Error *error) {
    ssize_t got = file_read_up_to(fd, out, size, offset);
    if (got == (ssize_t)size) return true;
    if (got < 0) return read_error(error, path, "reading it");
    return error_set(error, EXIT_INPUT,
                     "%s: expected %zu bytes at offset %" PRIu64 ", found %zd.\n"
                     "  The file is truncated. Copy it or create it again.",
                     path, size, offset, got);
}

// The size of an open regular file.
static bool regular_size(int fd, const char *path, uint64_t *size, Error *error) {
    struct stat info;
    if (fstat(fd, &info) != 0) return read_error(error, path, "reading its size");
    if (!S_ISREG(info.st_mode)) {
        return error_set(error, EXIT_INPUT, "%s: expected a regular file, found %s.\n  Check the path.", path,
                         S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe");
    }
    *size = (uint64_t)info.st_size;
    return true;
}

static char *read_open(int fd, const char *path, size_t limit, size_t *size, Error *error) {
    uint64_t bytes = 0;
    if (!regular_size(fd, path, &bytes, error)) return NULL;
    if (bytes > limit) {
        error_set(error, EXIT_INPUT,
                  "%s: expected at most %zu bytes, found %" PRIu64 ".\n  This does not look like the right file.", path,
                  limit, bytes);
        return NULL;
    }
    char *text = malloc(bytes + 1);
    if (!text) fail(EXIT_RESOURCE, "%s: out of memory for its %" PRIu64 " bytes.", path, bytes);
    if (!file_read_at(fd, path, text, bytes, 0, error)) {
        free(text);
        return NULL;
    }
    text[bytes] = '\0';
    if (size) *size = bytes;
    return text;
}

char *file_read(const char *path, size_t limit, size_t *size, Error *error) {
    int fd = file_open(path);
    if (fd < 0) {
        read_error(error, path, "opening it");
        return NULL;
    }
    char *text = read_open(fd, path, limit, size, error);
    close(fd);
    return text;
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
    int fd = file_open(path);
    if (fd < 0) {
        read_error(error, path, "opening it");
        return NULL;
    }
    if (!regular_size(fd, path, &size, error)) {
        close(fd);
        return NULL;
    }
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
    if (byte == EOF && ferror(lines->file)) return read_error(error, lines->path, "reading it");
    keep_byte(lines, length, '\n');
    size_t read = length + (byte == '\n');
    XXH3_128bits_update(lines->state, lines->text, read);
    lines->size += read;
    lines->text[length] = '\0';
    *line = (FileLine){lines->text, length, lines->number, lines->offset};
    if (byte == EOF && !length) line->text = NULL;
    lines->offset += length + 1;
    return true;
}

FileHash file_lines_hash(const FileLines *lines) {
    return (FileHash){lines->size, XXH3_128bits_digest(lines->state)};
}

typedef struct {
    XXH3_state_t *state;
    uint64_t size;
} Hashing;

static bool take_hash(void *context, const void *data, size_t size, Error *error) {
    Hashing *hashing = context;
    (void)error;
    hashing->size += size;
    XXH3_128bits_update(hashing->state, data, size);
    return true;
}

bool file_hash(const char *path, FileHash *hash, Error *error) {
    Hashing hashing = {.state = XXH3_createState()};
    if (!hashing.state) fail(EXIT_RESOURCE, "%s: out of memory.", path);
    XXH3_128bits_reset(hashing.state);
    bool ok = read_pieces(path, take_hash, &hashing, error);
    *hash = (FileHash){hashing.size, XXH3_128bits_digest(hashing.state)};
    XXH3_freeState(hashing.state);
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

#include "run/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/json.h"
#include "runtime/own.h"

#define SIZE_LIMIT ((size_t)1 << 30)    // the largest metrics.jsonl: about 6 million steps

struct Metrics {
    int fd;
    off_t size;    // of the complete lines in the file
    bool warned;
    char *line;    // buffer for a line
    size_t room;
    char path[];
};

// ---- metrics.jsonl

// Returns the size of the file up to the end of its last complete line, or -1 on error.
static off_t whole_lines(int fd) {
    char block[4096];
    struct stat st;
    if (fstat(fd, &st) != 0) return -1;
    for (off_t end = st.st_size; end > 0;) {
        off_t start = end > (off_t)sizeof block ? end - (off_t)sizeof block : 0;
        ssize_t n = file_read_up_to(fd, block, (size_t)(end - start), (uint64_t)start);
        if (n >= 0 && n != end - start) errno = EIO;
        if (n != end - start) return -1;
        for (ssize_t i = n; i-- > 0;)
            if (block[i] == '\n') return start + i + 1;
        end = start;
    }
    return 0;
}

static bool cannot_open(Error *error, const char *path, const char *reason) {
    return error_set(error, EXIT_RESOURCE, "%s: cannot open it for writing: %s.\n  %s", path, reason, own_remedy());
}

Metrics *metrics_open(const char *path, Error *error) {
    Metrics *m = calloc(1, sizeof *m + strlen(path) + 1);
    if (!m) {
        error_set(error, EXIT_RESOURCE, "out of memory for %s", path);
        return NULL;
    }
    strcpy(m->path, path);
    const char *reason;
    m->fd = own_open(path, O_RDWR | O_CREAT | O_APPEND, &reason);
    m->size = m->fd < 0 ? -1 : whole_lines(m->fd);
    struct stat st;
    if (m->size >= 0 && fstat(m->fd, &st) == 0 && (st.st_size <= m->size || ftruncate(m->fd, m->size) == 0)) return m;
    if (m->fd >= 0) reason = strerror(errno);
    cannot_open(error, path, reason);
    if (m->fd >= 0) close(m->fd);
    free(m);
    return NULL;
}

// Appends ", "name": value" with this number of digits, or null if the value is not finite.
static void add_number(char *line, size_t size, const char *name, int digits, double value) {
    size_t n = strlen(line);
    if (isfinite(value)) snprintf(line + n, size - n, ", \"%s\": %.*g", name, digits, value);
    else snprintf(line + n, size - n, ", \"%s\": null", name);
}

// Returns a buffer for a line of this size. If memory runs out, warns once and returns NULL.
static char *metrics_room(Metrics *metrics, size_t size) {
    if (size <= metrics->room) return metrics->line;
    char *line = realloc(metrics->line, size);
    if (line) {
        metrics->line = line;
        metrics->room = size;
    } else if (!metrics->warned) {
        metrics->warned = true;
        warn("%s: out of memory for a line. Training continues; this line is missing.", metrics->path);
    }
    return line;
}

// Returns the number of bytes written. If it is less than `size`, errno says why: after a short write, the next one
// fails.
static size_t write_all(int fd, const char *data, size_t size) {
    size_t done = 0;
    while (done < size) {
        ssize_t written = write(fd, data + done, size - done);
        if (written < 0 && errno == EINTR) continue;
        if (written == 0) errno = ENOSPC;
        if (written <= 0) break;
        done += (size_t)written;
    }
    return done;
}

void metrics_write(Metrics *metrics, const StepMetrics *m) {
    enum { NUMBERS = 512 };
    size_t more = m->more ? strlen(m->more) : 0;
    char *line = metrics_room(metrics, NUMBERS + more + 2);
    if (!line) return;
    snprintf(line, NUMBERS, "{\"step\": %lld, \"tokens\": %lld", (long long)m->step, (long long)m->tokens);
    add_number(line, NUMBERS, "loss", 9, m->loss);
    add_number(line, NUMBERS, "lr", 9, m->lr);
    add_number(line, NUMBERS, "grad_norm", 9, m->grad_norm);
    add_number(line, NUMBERS, "ms", 6, m->ms);
    add_number(line, NUMBERS, "tok_per_s", 6, m->tok_per_s);
    add_number(line, NUMBERS, "mfu", 4, m->mfu);
    if (m->validated) add_number(line, NUMBERS, "val_loss", 9, m->val_loss);
    if (m->slowest_ms > 0) {
        add_number(line, NUMBERS, "slowest_rank", 9, m->slowest_rank);
        add_number(line, NUMBERS, "slowest_ms", 6, m->slowest_ms);
        add_number(line, NUMBERS, "mean_ms", 6, m->mean_ms);
    }
    size_t n = strlen(line);
    if (more) {
        memcpy(line + n, m->more, more);
        n += more;
    }
    memcpy(line + n, "}\n", 2);
    size_t written = write_all(metrics->fd, line, n + 2);
    if (written == n + 2) {
        metrics->size += (off_t)written;
        return;
    }
    int why = errno;
    // Remove the incomplete line, which would corrupt the next one.
    bool removed = written == 0 || ftruncate(metrics->fd, metrics->size) == 0;
    if (!metrics->warned)
        warn("%s: cannot write step %lld: %s. Training continues; %s.", metrics->path, (long long)m->step,
             strerror(why), removed ? "this line is missing" : "this line is incomplete");
    metrics->warned = true;
}

void metrics_close(Metrics *metrics) {
    if (!metrics) return;
    close(metrics->fd);
    free(metrics->line);
    free(metrics);
}

// Copies the first `bytes` bytes.
static bool copy_start(int to, int from, off_t bytes) {
    char block[1 << 16];
    for (off_t at = 0; at < bytes;) {
        size_t most = bytes - at < (off_t)sizeof block ? (size_t)(bytes - at) : sizeof block;
        ssize_t n = file_read_up_to(from, block, most, (uint64_t)at);
        if (n == 0) errno = EIO;
        if (n <= 0 || write_all(to, block, (size_t)n) != (size_t)n) return false;
        at += n;
    }
    return true;
}

bool metrics_intact(const Metrics *metrics) {
    struct stat ours, there;
    return fstat(metrics->fd, &ours) == 0 && stat(metrics->path, &there) == 0 && ours.st_ino == there.st_ino &&
           ours.st_dev == there.st_dev;
}

bool metrics_restore(Metrics *metrics, Error *error) {
    if (metrics_intact(metrics)) return true;
    const char *reason = NULL;
    int fd = own_open(metrics->path, O_RDWR | O_CREAT | O_APPEND, &reason);
    if (fd < 0 || ftruncate(fd, 0) != 0 || !copy_start(fd, metrics->fd, metrics->size)) {
        error_set(error, EXIT_RESOURCE, "%s: was removed, and cannot be written again: %s.", metrics->path,
                  reason ? reason : strerror(errno));
        if (fd >= 0) close(fd);
        return false;
    }
    close(metrics->fd);
    metrics->fd = fd;
    return true;
}

// Returns the step of a line, or -1 if the line is damaged.
static int64_t step_of(const char *line, size_t length) {
    Error error;
    uint64_t step;
    cJSON *object = json_parse(line, length, (JsonPlace){"metrics.jsonl", 1, 0}, &error);
    bool found = json_u64(cJSON_GetObjectItemCaseSensitive(object, "step"), &step);
    cJSON_Delete(object);
    return found ? (int64_t)step : -1;
}

bool metrics_cut(const char *path, int64_t last, Error *error) {
    size_t size, kept = 0;
    const char *reason;
    int fd = own_open(path, O_RDWR, &reason);
    if (fd < 0) return errno == ENOENT || cannot_open(error, path, reason);
    close(fd);
    char *text = file_read(path, SIZE_LIMIT, &size, error);
    if (!text) return false;
    for (size_t at = 0, length; at < size; at += length) {
        const char *end = memchr(text + at, '\n', size - at);
        if (!end) break;
        length = (size_t)(end - (text + at)) + 1;
        int64_t step = step_of(text + at, length);
        if (step < 0 || step > last) continue;
        memmove(text + kept, text + at, length);
        kept += length;
    }
    text[kept] = 0;
    bool ok = kept == size || file_replace_text(path, text, error);
    free(text);
    return ok;
}

// ---- the terminal's line

typedef struct {
    char text[32];
} Duration;

static Duration duration(double ms) {
    Duration d;
    if (ms < 1000) snprintf(d.text, sizeof d.text, "%.*f ms", ms < 9.95 ? 1 : 0, ms);
    else snprintf(d.text, sizeof d.text, "%.*f s", ms < 99950 ? 2 : 0, ms / 1000);
    return d;
}

void metrics_line(char *out, size_t size, const StepMetrics *m, int64_t steps, double seconds_left) {
    char validation[32] = "", slow[128] = "", left[64] = "";
    int width = snprintf(NULL, 0, "%lld", (long long)steps);
    if (m->slowest_ms > 0)
        snprintf(slow, sizeof slow, " | rank %d slow: %s, mean %s", m->slowest_rank, duration(m->slowest_ms).text,
                 duration(m->mean_ms).text);
    if (m->validated) snprintf(validation, sizeof validation, " | val %.4f", m->val_loss);
    if (seconds_left >= 0) snprintf(left, sizeof left, " | %s left", human_duration(seconds_left).text);
    snprintf(out, size,
             "step %*lld/%lld | loss %.4f%s | lr %.1e | norm %.2f | %s, %s tok/s, %.0f%% of peak%s | %s tokens%s",
             width < 5 ? 5 : width, (long long)m->step, (long long)steps, m->loss, validation, m->lr, m->grad_norm,
             duration(m->ms).text, human_count(m->tok_per_s).text, 100 * m->mfu, slow,
             human_count((double)m->tokens).text, left);
}

static bool on_terminal(void) {
    const char *term = getenv("TERM");
    return isatty(STDOUT_FILENO) && term && strcmp(term, "dumb") != 0;
}

// How many characters of a line are shown: all, or as many parts as fit, since a number that is cut looks like another.
static int clipped(const char *line, int width) {
    int fits = (int)strlen(line);
    if (fits <= width) return fits;
    fits = width;
    for (const char *part = strstr(line, " | "); part && part - line <= width; part = strstr(part + 1, " | "))
        fits = (int)(part - line);
    return fits;
}

void progress_show(Progress *progress, const char *line, bool keep) {
    if (!on_terminal()) {
        printf("%s\n", line);
    } else {
        struct winsize window;
        int width = ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 1 ? window.ws_col - 1 : 79;
        printf("\r%.*s\x1b[K%s", keep ? (int)strlen(line) : clipped(line, width), line, keep ? "\n" : "");
        progress->pending = !keep;
    }
    fflush(stdout);
}

void progress_end(Progress *progress) {
    if (progress->pending) printf("\n");
    progress->pending = false;
    fflush(stdout);
}

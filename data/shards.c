#include "data/shards.h"

#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "math/random.h"
#include "runtime/file.h"
#include "runtime/human.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are little-endian and read without conversion");

enum {
    HEADER_BYTES = 256 * 4,
    EDGE_BYTES = 4096,    // bytes at each end of a file that the fingerprint covers
    CHUNK = 1 << 16,      // items per read
    OPEN_FILES = 64       // a dataset may have more shards than a process can keep open
};

typedef enum { TOKENS, MASK } Kind;

typedef struct {
    Kind kind;
    int32_t magic, version;
    size_t bytes;    // per item
} Format;

static const Format FORMATS[] = {
    {TOKENS, 20240520, 1, 2},    // the first of a kind is the one that messages name
    {TOKENS, 20240801, 7, 4},    // llm.c's for Llama 3
    {MASK, 20240521, 1, 1},
};
enum { FORMAT_COUNT = sizeof FORMATS / sizeof *FORMATS };

typedef struct {
    char *path[2];              // by Kind; the mask's path is NULL if there is none
    const Format *format[2];    // by Kind
    uint64_t first, count;      // tokens before this shard in the stream, and tokens in it
} Shard;

typedef struct {
    uint64_t first, length;
} Document;

struct Shards {
    ShardsConfig config;
    Shard *shards;
    size_t count;
    uint64_t tokens, windows;
    bool has_masks;
    Document *documents;    // with PACK_EXAMPLE
    struct {
        uint64_t id;
        int fd;
    } open[OPEN_FILES];    // id is 2 * shard + kind + 1, or 0 if the slot is free
    size_t slots;          // in use, from the first
    uint32_t chunk[CHUNK];
};

static uint64_t file_bytes(const Format *format, uint64_t count) {
    return HEADER_BYTES + count * format->bytes;
}

// ---- finding the files

static bool ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static bool add_path(Shards *s, const char *path, Error *error) {
    if ((s->count & (s->count - 1)) == 0) {    // room for 1, 2, 4, ...
        Shard *more = realloc(s->shards, (s->count ? 2 * s->count : 1) * sizeof *more);
        if (!more) return error_set(error, EXIT_RESOURCE, "out of memory for the list of %zu shards", s->count);
        s->shards = more;
    }
    s->shards[s->count] = (Shard){.path = {strdup(path), NULL}};
    s->count++;
    return s->shards[s->count - 1].path[TOKENS] ||
           error_set(error, EXIT_RESOURCE, "out of memory for the list of %zu shards", s->count);
}

// glob(), but a folder that exists is meant as it is: "set [v2]/*.bin" is about the folder "set [v2]".
static int find_pattern(const char *pattern, glob_t *found) {
    const char *slash = strrchr(pattern, '/');
    size_t length = slash ? (size_t)(slash - pattern) : 0, size = 0;
    char *folder = strndup(pattern, length), *text = malloc(length + strlen(pattern) + 1);
    if (!folder || !text) fail(EXIT_RESOURCE, "out of memory for the pattern %s.", pattern);
    bool exists = length && access(folder, F_OK) == 0;
    for (size_t i = 0; exists && i < length; i++) {
        if (strchr("*?[\\~", folder[i])) text[size++] = '\\';
        text[size++] = folder[i];
    }
    strcpy(text + size, exists ? slash : pattern);
    int status = glob(text, GLOB_TILDE, NULL, found);
    free(folder);
    free(text);
    return status;
}

// Adds the files that a pattern matches, except masks.
static bool add_glob(Shards *s, const char *pattern, Error *error) {
    glob_t found;
    int status = find_pattern(pattern, &found);
    if (status == GLOB_NOMATCH)
        return error_set(
            error, EXIT_INPUT,
            "%s: no file matches.\n"
            "  Expected shards such as fineweb_train_000001.bin, made by the scripts in data/. Is the * quoted?",
            pattern);
    if (status != 0)
        return error_set(error, EXIT_INPUT, "%s: cannot read the folder: %s.\n  %s", pattern, strerror(errno),
                         file_remedy(errno, "Check the path and its permissions."));
    bool ok = true;
    for (size_t i = 0; ok && i < found.gl_pathc; i++)
        if (!ends_with(found.gl_pathv[i], ".mask")) ok = add_path(s, found.gl_pathv[i], error);
    globfree(&found);
    return ok;
}

static int by_path(const void *a, const void *b) {
    return strcmp(((const Shard *)a)->path[TOKENS], ((const Shard *)b)->path[TOKENS]);
}

static bool matches(const char *pattern) {
    glob_t found;
    bool any = find_pattern(pattern, &found) == 0;
    if (any) globfree(&found);
    return any;
}

// Finds the shards, sorted and without duplicates. `globs` is tried first as a path, then as one pattern that contains
// spaces, and finally as a list separated by spaces or commas.
static bool find_files(Shards *s, const char *globs, Error *error) {
    if (access(globs, F_OK) == 0) return add_path(s, globs, error);
    bool one = matches(globs);
    char *list = strdup(globs), *rest = list;
    bool ok = list || error_set(error, EXIT_RESOURCE, "out of memory for the list of shards");
    if (ok && one) {
        ok = add_glob(s, globs, error);
        rest = list + strlen(list);
    }
    for (char *word; ok && (word = strtok_r(rest, ", ", &rest));) ok = add_glob(s, word, error);
    free(list);
    if (!ok) return false;
    if (s->count == 0) return error_set(error, EXIT_INPUT, "\"%s\": expected the path or pattern of a shard", globs);
    qsort(s->shards, s->count, sizeof *s->shards, by_path);
    size_t kept = 1;
    for (size_t i = 1; i < s->count; i++) {
        if (strcmp(s->shards[i].path[TOKENS], s->shards[kept - 1].path[TOKENS]) == 0) free(s->shards[i].path[TOKENS]);
        else s->shards[kept++] = s->shards[i];
    }
    s->count = kept;
    return true;
}

// ---- one file: its header, its descriptor, its bytes

static const Format *format_of(int32_t magic) {
    for (size_t i = 0; i < FORMAT_COUNT; i++)
        if (FORMATS[i].magic == magic) return &FORMATS[i];
    return NULL;
}

static bool check_format(const char *path, Kind kind, const int32_t *header, Error *error) {
    const Format *format = format_of(header[0]);
    if (!format || format->kind != kind)
        return error_set(error, EXIT_INPUT, "%s: at offset 0: expected magic number %s, found %d.\n  %s", path,
                         kind == TOKENS ? "20240520 or 20240801 of a shard" : "20240521 of a mask", header[0],
                         format && format->kind == MASK ? "It is a mask. Give the shard next to it instead."
                                                        : "It is not a shard. The scripts in data/ make shards.");
    if (header[1] == format->version) return true;
    return error_set(error, EXIT_INPUT,
                     "%s: at offset 4: expected version %d, found %d.\n"
                     "  It was made by another program or a newer version. Recreate it with the scripts in data/.",
                     path, format->version, header[1]);
}

static bool check_size(const char *path, const Format *format, int32_t count, uint64_t bytes, Error *error) {
    if (count < 0)
        return error_set(error, EXIT_INPUT,
                         "%s: at offset 8: the header's token count is %d. The file is damaged; recreate it.", path,
                         count);
    uint64_t want = file_bytes(format, (uint64_t)count);
    if (bytes == want) return true;
    return error_set(error, EXIT_INPUT,
                     "%s: the header promises %s tokens (%s bytes), but the file has %s bytes.\n"
                     "  %s Recreate it with its script in data/, or exclude it.",
                     path, human_grouped((uint64_t)count).text, human_grouped(want).text, human_grouped(bytes).text,
                     bytes < want ? "It was probably truncated." : "It contains extra data.");
}

static int open_shard(const char *path, uint64_t *bytes, Error *error) {
    return file_open(path, "Give the path of a shard, or a pattern of several, such as \"FOLDER/*_train_*.bin\".",
                     bytes, error);
}

// Reads exactly n bytes at the offset.
static bool read_bytes(int fd, const char *path, void *out, size_t n, uint64_t offset, Error *error) {
    ssize_t got = file_read_up_to(fd, out, n, offset);
    if (got == (ssize_t)n) return true;
    if (got < 0)
        return error_set(error, EXIT_INPUT,
                         "%s: at offset %s: cannot read it: %s.\n  Check the disk, or use another copy of the file.",
                         path, human_grouped(offset).text, strerror(errno));
    return error_set(error, EXIT_INPUT,
                     "%s: the file now ends at offset %s, but had %s more bytes when it was opened.\n"
                     "  It was truncated while in use. Restore it, then rerun the command.",
                     path, human_grouped(offset + (uint64_t)got).text, human_grouped(n - (size_t)got).text);
}

// Returns the descriptor of shard i's tokens or mask, reopening it if its slot was reused. Returns -1 with *error set
// on failure.
static int descriptor(Shards *s, size_t i, Kind kind, Error *error) {
    uint64_t id = 2 * i + kind + 1, bytes, want = file_bytes(s->shards[i].format[kind], s->shards[i].count);
    size_t slot = id % s->slots;
    if (s->open[slot].id == id) return s->open[slot].fd;
    if (s->open[slot].id) close(s->open[slot].fd);
    s->open[slot].id = 0;
    const char *path = s->shards[i].path[kind];
    int fd = open_shard(path, &bytes, error);
    if (fd < 0) return -1;
    if (bytes != want) {
        error_set(error, EXIT_INPUT,
                  "%s: had %s bytes when it was first opened, but now has %s.\n"
                  "  It was changed while in use. Restore it, then rerun the command.",
                  path, human_grouped(want).text, human_grouped(bytes).text);
        close(fd);
        return -1;
    }
    s->open[slot].id = id;
    return s->open[slot].fd = fd;
}

// Reads and checks the header of the shard's tokens or mask. *count is set to its token count.
static bool check_header(Shard *shard, const char *path, Kind kind, uint64_t *count, Error *error) {
    int32_t header[3];
    uint64_t bytes;
    int fd = open_shard(path, &bytes, error);
    if (fd < 0) return false;
    bool ok =
        bytes >= HEADER_BYTES || error_set(error, EXIT_INPUT,
                                           "%s: expected a header of 1,024 bytes, but the whole file has only %s.\n"
                                           "  It is truncated, or is not a shard.",
                                           path, human_grouped(bytes).text);
    ok = ok && read_bytes(fd, path, header, sizeof header, 0, error) && check_format(path, kind, header, error);
    shard->format[kind] = ok ? format_of(header[0]) : NULL;
    ok = ok && check_size(path, shard->format[kind], header[2], bytes, error);
    close(fd);
    *count = ok ? (uint64_t)header[2] : 0;
    return ok;
}

// Finds and checks the shard's mask, if there is one.
static bool check_mask(Shard *shard, Error *error) {
    char path[PATH_MAX];
    uint64_t count;
    if (!ends_with(shard->path[TOKENS], ".bin")) return true;
    snprintf(path, sizeof path, "%.*s.mask", (int)strlen(shard->path[TOKENS]) - 4, shard->path[TOKENS]);
    if (access(path, F_OK) != 0) return true;
    if (!check_header(shard, path, MASK, &count, error)) return false;
    if (count != shard->count)
        return error_set(error, EXIT_INPUT,
                         "%s: at offset 8: the mask has %s tokens, but its shard has %s.\n  Recreate both.", path,
                         human_grouped(count).text, human_grouped(shard->count).text);
    shard->path[MASK] = strdup(path);
    return shard->path[MASK] || error_set(error, EXIT_RESOURCE, "out of memory for the list of shards");
}

static bool check_headers(Shards *s, Error *error) {
    for (size_t i = 0; i < s->count; i++) {
        Shard *shard = &s->shards[i];
        shard->first = s->tokens;
        if (!check_header(shard, shard->path[TOKENS], TOKENS, &shard->count, error) || !check_mask(shard, error))
            return false;
        s->tokens += shard->count;
        if (i > 0 && !shard->path[MASK] != !s->shards[0].path[MASK])
            return error_set(error, EXIT_INPUT,
                             "%s has a mask next to it, but %s has none.\n  Give every shard a mask, or none.",
                             (shard->path[MASK] ? shard : s->shards)->path[TOKENS],
                             (shard->path[MASK] ? s->shards : shard)->path[TOKENS]);
    }
    s->has_masks = s->shards[0].path[MASK] != NULL;
    return true;
}

// ---- the stream

// Returns the shard that contains token `at` of the stream.
static size_t shard_of(const Shards *s, uint64_t at) {
    size_t low = 0, high = s->count;    // shards[low].first <= at < shards[high].first
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (s->shards[middle].first <= at) low = middle;
        else high = middle;
    }
    return low;
}

// Reports the first item of a chunk that exceeds `limit`. `at` is the chunk's position in the shard.
static bool bad_item(const Shards *s, const Shard *shard, Kind kind, uint32_t limit, uint64_t at, Error *error) {
    size_t i = 0;
    while (s->chunk[i] <= limit) i++;
    uint64_t offset = file_bytes(shard->format[kind], at + i);
    if (kind == MASK)
        return error_set(error, EXIT_INPUT,
                         "%s: at offset %s: expected 0 or 1, found %u.\n  The mask is damaged. Recreate it.",
                         shard->path[MASK], human_grouped(offset).text, s->chunk[i]);
    return error_set(
        error, EXIT_INPUT,
        "%s: at offset %s: found token id %u, expected ids below the vocabulary size, %zu.\n"
        "  The shard is damaged, or was made with a tokenizer other than the model's. Recreate it with the model's\n"
        "  tokenizer. To train a new model with a larger vocabulary: train_gpt2 --model vocab=N.",
        shard->path[TOKENS], human_grouped(offset).text, s->chunk[i], s->config.vocab);
}

// Widens n items of 1 or 2 bytes to 4 in place. They are at the end of the chunk, where each is read before anything
// is written over it.
static void widen(uint32_t *chunk, size_t n, size_t bytes) {
    const uint8_t *at = (const uint8_t *)(chunk + n) - n * bytes;
    for (size_t k = 0; k < n && bytes == 1; k++) chunk[k] = at[k];
    for (size_t k = 0; k < n && bytes == 2; k++) chunk[k] = at[2 * k] | (uint32_t)at[2 * k + 1] << 8;
}

// Reads and checks n <= CHUNK items of one shard into s->chunk.
static bool read_chunk(Shards *s, size_t i, Kind kind, uint64_t at, size_t n, Error *error) {
    const Format *format = s->shards[i].format[kind];
    int fd = descriptor(s, i, kind, error);
    uint8_t *bytes = (uint8_t *)(s->chunk + n) - n * format->bytes;
    if (fd < 0 || !read_bytes(fd, s->shards[i].path[kind], bytes, n * format->bytes, file_bytes(format, at), error))
        return false;
    widen(s->chunk, n, format->bytes);
    uint32_t largest = 0, limit = kind == TOKENS ? (uint32_t)s->config.vocab - 1 : 1;
    for (size_t k = 0; k < n; k++) largest = s->chunk[k] > largest ? s->chunk[k] : largest;
    return largest <= limit || bad_item(s, &s->shards[i], kind, limit, at, error);
}

// Reads tokens (as int32) or mask bytes `first` .. `first + n - 1` of the stream. If `out` is NULL, only checks them.
static bool read_stream(Shards *s, Kind kind, uint64_t first, size_t n, void *out, Error *error) {
    for (size_t done = 0; done < n;) {
        size_t i = shard_of(s, first + done), part = n - done < CHUNK ? n - done : CHUNK;
        uint64_t at = first + done - s->shards[i].first;
        if (part > s->shards[i].count - at) part = s->shards[i].count - at;
        if (!read_chunk(s, i, kind, at, part, error)) return false;
        if (out && kind == TOKENS) memcpy((int32_t *)out + done, s->chunk, part * sizeof(int32_t));
        for (size_t k = 0; out && kind == MASK && k < part; k++) ((uint8_t *)out)[done + k] = (uint8_t)s->chunk[k];
        done += part;
    }
    return true;
}

// ---- documents, for PACK_EXAMPLE

// Adds the document of tokens first .. end - 1. A lone end-of-text is none, because it predicts nothing. It ends the
// document before it; only a mask can tell whether it counts there as a target.
static bool add_document(Shards *s, uint64_t first, uint64_t end, Error *error) {
    if (end - first < 2) {
        Document *before = s->windows ? &s->documents[s->windows - 1] : NULL;
        if (s->has_masks && before && before->first + before->length == first) before->length++;
        return true;
    }
    if ((s->windows & (s->windows - 1)) == 0) {
        Document *more = realloc(s->documents, (s->windows ? 2 * s->windows : 1) * sizeof *more);
        if (!more)
            return error_set(error, EXIT_RESOURCE, "out of memory for the index of %s documents",
                             human_grouped(s->windows).text);
        s->documents = more;
    }
    s->documents[s->windows++] = (Document){first, end - first};
    return true;
}

// Finds all documents; each runs from one end-of-text to the next. Tokens before the first end-of-text are the rest of
// an unknown document and are skipped.
static bool index_documents(Shards *s, Error *error) {
    uint64_t start = UINT64_MAX;
    for (size_t i = 0; i < s->count; i++)
        for (uint64_t at = 0; at < s->shards[i].count; at += CHUNK) {
            uint64_t left = s->shards[i].count - at, base = s->shards[i].first + at;
            size_t n = left < CHUNK ? left : CHUNK;
            if (!read_chunk(s, i, TOKENS, at, n, error)) return false;
            for (size_t k = 0; k < n; k++) {
                if (s->chunk[k] != (uint32_t)s->config.end_of_text) continue;
                if (start != UINT64_MAX && !add_document(s, start, base + k, error)) return false;
                start = base + k;
            }
        }
    return start == UINT64_MAX || add_document(s, start, s->tokens, error);
}

// ---- the public functions

static bool open_all(Shards *s, const char *globs, Error *error) {
    const ShardsConfig *c = &s->config;
    if (!find_files(s, globs, error) || !check_headers(s, error)) return false;
    if (c->pack == PACK_EXAMPLE && !index_documents(s, error)) return false;
    if (c->pack == PACK_STREAM) s->windows = s->tokens > 0 ? (s->tokens - 1) / c->T : 0;
    uint64_t need = c->min_windows > 1 ? c->min_windows : 1;
    if (s->windows >= need) return true;
    const char *plural = s->windows == 1 ? "" : "s";
    char what[64];
    snprintf(what, sizeof what,
             c->pack == PACK_STREAM ? "window%s of %zu + 1 tokens" : "document%s (windows of %zu + 1 tokens)", plural,
             c->T);
    return error_set(error, EXIT_INPUT,
                     "%s: too little data: %zu file%s, %s token%s, %s %s; at least %s %s needed.%s%s", globs, s->count,
                     s->count == 1 ? "" : "s", human_grouped(s->tokens).text, s->tokens == 1 ? "" : "s",
                     human_grouped(s->windows).text, what, human_grouped(need).text, need == 1 ? "is" : "are",
                     c->remedy ? "\n  " : "", c->remedy ? c->remedy : "");
}

Shards *shards_open(const char *globs, ShardsConfig config, Error *error) {
    Shards *s = calloc(1, sizeof *s);
    if (!s) {
        error_set(error, EXIT_RESOURCE, "out of memory for the shards of %s", globs);
        return NULL;
    }
    s->config = config;
    s->slots = config.open_files && config.open_files < OPEN_FILES ? config.open_files : OPEN_FILES;
    if (open_all(s, globs, error)) return s;
    shards_close(s);
    return NULL;
}

bool shards_first_path(const char *globs, char *path, size_t size) {
    Error ignored;
    Shards *s = calloc(1, sizeof *s);
    bool found = s && find_files(s, globs, &ignored) && strlen(s->shards[0].path[TOKENS]) < size;
    if (found) strcpy(path, s->shards[0].path[TOKENS]);
    shards_close(s);
    return found;
}

void shards_close(Shards *s) {
    if (!s) return;
    for (size_t i = 0; i < OPEN_FILES; i++)
        if (s->open[i].id) close(s->open[i].fd);
    for (size_t i = 0; i < s->count; i++) {
        free(s->shards[i].path[TOKENS]);
        free(s->shards[i].path[MASK]);
    }
    free(s->shards);
    free(s->documents);
    free(s);
}

uint64_t shards_tokens(const Shards *s) {
    return s->tokens;
}
uint64_t shards_windows(const Shards *s) {
    return s->windows;
}
size_t shards_count(const Shards *s) {
    return s->count;
}

const char *shards_path(const Shards *s, size_t file) {
    return s->shards[file].path[TOKENS];
}
bool shards_masked(const Shards *s) {
    return s->has_masks || s->config.pack == PACK_EXAMPLE;
}

bool shards_window(Shards *s, uint64_t g, int32_t *tokens, uint8_t *mask, Error *error) {
    size_t T = s->config.T, length = T + 1;
    uint64_t position = g % s->windows;
    uint64_t window = s->config.shuffle ? shards_order(position, s->windows, s->config.seed, g / s->windows) : position;
    uint64_t first = window * T;
    if (s->config.pack == PACK_EXAMPLE) {
        first = s->documents[window].first;
        if (s->documents[window].length < length) length = s->documents[window].length;
    }
    if (!read_stream(s, TOKENS, first, length, tokens, error)) return false;
    for (size_t t = length; t <= T; t++) tokens[t] = s->config.end_of_text;
    if (!mask) return true;
    memset(mask, 1, length - 1);
    memset(mask + length - 1, 0, T + 1 - length);
    return !s->has_masks || read_stream(s, MASK, first + 1, length - 1, mask, error);
}

// Is the token at this place of the stream a target of the first `windows` windows?
static bool is_target(const Shards *s, uint64_t at, uint64_t windows) {
    size_t low = 0, high = windows, T = s->config.T;    // documents[low].first < at <= documents[high].first
    if (s->config.pack == PACK_STREAM) return at > 0 && at <= windows * T;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (s->documents[middle].first < at) low = middle;
        else high = middle;
    }
    uint64_t first = s->documents[low].first, length = s->documents[low].length;
    return at > first && at - first < (length < T + 1 ? length : T + 1);
}

// Sets *found if a target of the windows counts in shard i.
static bool find_target(Shards *s, size_t i, uint64_t windows, bool *found, Error *error) {
    const Shard *shard = &s->shards[i];
    *found = false;
    for (uint64_t at = 0; at < shard->count && !*found; at += CHUNK) {
        size_t n = shard->count - at < CHUNK ? (size_t)(shard->count - at) : CHUNK;
        if (!read_chunk(s, i, MASK, at, n, error)) return false;
        for (size_t k = 0; k < n && !*found; k++) *found = s->chunk[k] && is_target(s, shard->first + at + k, windows);
    }
    return true;
}

bool shards_check_targets(Shards *s, uint64_t windows, bool warns, Error *error) {
    const Document *last = s->documents ? &s->documents[windows - 1] : NULL;
    uint64_t end = last ? last->first + last->length : windows * s->config.T + 1;
    size_t used = 0, idle = 0, first_idle = 0;
    bool found, all = windows == shards_windows(s);
    if (!s->has_masks) return true;
    for (; used < s->count && s->shards[used].first < end; used++) {
        if (!find_target(s, used, windows, &found, error)) return false;
        if (!found && !idle++) first_idle = used;
    }
    const char *path = shards_path(s, first_idle);
    if (idle == used)
        return error_set(error, EXIT_INPUT,
                         "%s: no token counts toward the loss at length %zu: the mask bytes of all targets %sare 0%s.\n"
                         "  Use data with another mask, or longer sequences%s.",
                         path, s->config.T, all ? "" : "that would be read ",
                         used > 1 ? ", as in the other shards" : "", all ? "" : ", or read more tokens");
    if (idle && warns)
        warn("%s: no token counts toward the loss: the mask bytes of all its targets are 0. Of %zu shards, %zu %s so.",
             path, used, idle, idle == 1 ? "is" : "are");
    return true;
}

bool shards_check_all(Shards *s, Error *error) {
    for (size_t i = 0; i < s->count; i++)
        if (!read_stream(s, TOKENS, s->shards[i].first, s->shards[i].count, NULL, error)) return false;
    for (size_t i = 0; s->has_masks && i < s->count; i++)
        if (!read_stream(s, MASK, s->shards[i].first, s->shards[i].count, NULL, error)) return false;
    return true;
}

static bool hash_file(Shards *s, size_t i, Kind kind, XXH3_state_t *state, Error *error) {
    char edge[HEADER_BYTES + EDGE_BYTES];
    const char *path = s->shards[i].path[kind], *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    uint64_t bytes = file_bytes(s->shards[i].format[kind], s->shards[i].count);
    size_t head = bytes < sizeof edge ? bytes : sizeof edge, tail = bytes < EDGE_BYTES ? bytes : EDGE_BYTES;
    int fd = descriptor(s, i, kind, error);
    if (fd < 0 || !read_bytes(fd, path, edge, head, 0, error)) return false;
    XXH3_64bits_update(state, name, strlen(name) + 1);
    XXH3_64bits_update(state, &bytes, sizeof bytes);
    XXH3_64bits_update(state, edge, head);
    if (!read_bytes(fd, path, edge, tail, bytes - tail, error)) return false;
    XXH3_64bits_update(state, edge, tail);
    return true;
}

char *shards_fingerprint(Shards *s, Error *error) {
    XXH3_state_t *state = XXH3_createState();
    char *text = malloc(160);
    bool ok = (state && text) || error_set(error, EXIT_RESOURCE, "out of memory for the data's fingerprint");
    if (ok) XXH3_64bits_reset(state);
    for (size_t i = 0; ok && i < s->count; i++)
        ok = hash_file(s, i, TOKENS, state, error) && (!s->has_masks || hash_file(s, i, MASK, state, error));
    if (ok)
        snprintf(text, 160, "{\"files\": %zu, \"tokens\": %llu, \"xxh3\": \"%016llx\"}", s->count,
                 (unsigned long long)s->tokens, (unsigned long long)XXH3_64bits_digest(state));
    XXH3_freeState(state);
    if (ok) return text;
    free(text);
    return NULL;
}

// ---- the order

#define ORDER_STREAM 0x73687566666c65u     // "shuffle"
#define LENGTH_STREAM 0x6c656e677468u      // "length"
#define ORDER_ROUNDS 12

// The finalizer of splitmix64.
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// A Feistel network on the smallest power of two that is at least W. Each round changes one half by a function of the
// other half, so it can be inverted whatever that function is. If the result is outside 0..W-1, the network is applied
// again until it is inside (cycle walking). This is still a bijection, because the path from one inside number to the
// next can be walked backwards.
uint64_t shards_order(uint64_t position, uint64_t W, uint64_t seed, uint64_t epoch) {
    uint64_t keys[ORDER_ROUNDS];
    int bits = 0;
    while (bits < 63 && (uint64_t)1 << bits < W) bits++;
    if (bits == 0) return 0;
    int low_bits = (bits + 1) / 2;
    uint64_t low_mask = ((uint64_t)1 << low_bits) - 1, high_mask = ((uint64_t)1 << (bits - low_bits)) - 1, x = position;
    for (int r = 0; r < ORDER_ROUNDS; r++) keys[r] = random_u64(seed, ORDER_STREAM, epoch * ORDER_ROUNDS + (uint64_t)r);
    do {
        uint64_t low = x & low_mask, high = x >> low_bits;
        for (int r = 0; r < ORDER_ROUNDS; r += 2) {
            low ^= mix(high + keys[r]) & low_mask;
            high ^= mix(low + keys[r + 1]) & high_mask;
        }
        x = high << low_bits | low;
    } while (x >= W);
    return x;
}

size_t step_length(const int64_t *lengths, size_t n, uint64_t seed, uint64_t step) {
    return (size_t)lengths[random_u64(seed, LENGTH_STREAM, step) % n];
}

void document_starts(int32_t *first, const int32_t *tokens, size_t B, size_t T, int32_t end_of_text) {
    for (size_t b = 0; b < B; b++) {
        int32_t start = 0;
        for (size_t t = 0; t < T; t++) {
            if (tokens[b * T + t] == end_of_text) start = (int32_t)t;
            first[b * T + t] = start;
        }
    }
}

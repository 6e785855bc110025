#include "model/safetensors.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "math/vecmath.h"
#include "runtime/file.h"
#include "runtime/json.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "safetensors files are little-endian, and this code reads them without conversion");

enum { HEADER_BYTES = 100000000, PIECE = 1 << 20 };

#define DAMAGED "The file is damaged or incomplete. Get another copy, or create it again."

static const struct {
    const char *name;
    size_t size;
} dtypes[DTYPE_COUNT] = {
    [DTYPE_F64] = {"F64", 8},   [DTYPE_F32] = {"F32", 4},         [DTYPE_F16] = {"F16", 2},
    [DTYPE_BF16] = {"BF16", 2}, [DTYPE_I64] = {"I64", 8},         [DTYPE_I32] = {"I32", 4},
    [DTYPE_I16] = {"I16", 2},   [DTYPE_I8] = {"I8", 1},           [DTYPE_U64] = {"U64", 8},
    [DTYPE_U32] = {"U32", 4},   [DTYPE_U16] = {"U16", 2},         [DTYPE_U8] = {"U8", 1},
    [DTYPE_BOOL] = {"BOOL", 1}, [DTYPE_F8_E4M3] = {"F8_E4M3", 1}, [DTYPE_F8_E5M2] = {"F8_E5M2", 1},
};

const char *dtype_name(DType dtype) {
    return dtypes[dtype].name;
}
size_t dtype_size(DType dtype) {
    return dtypes[dtype].size;
}

static void *take(size_t bytes) {
    return allocate(bytes, 1, "a safetensors file's header or buffer");
}

// A shape as text, such as "[12, 64]".
typedef struct {
    char text[200];
} ShapeText;
static ShapeText shape_text(int ndim, const size_t *shape) {
    ShapeText out = {"["};
    size_t used = 1;
    for (int i = 0; i < ndim; i++) {
        used += (size_t)snprintf(out.text + used, sizeof out.text - used, i ? ", %zu" : "%zu", shape[i]);
    }
    snprintf(out.text + used, sizeof out.text - used, "]");
    return out;
}

// ---- writing

static size_t row_elements(const TensorRow *row) {
    size_t elements = 1;
    for (int i = 0; i < row->ndim; i++) elements *= row->shape[i];
    return elements;
}

static size_t row_bytes(const TensorRow *row) {
    return row_elements(row) * dtype_size(row->dtype);
}

static bool add_row(cJSON *header, const TensorRow *row, uint64_t offset) {
    double shape[4], ends[] = {(double)offset, (double)(offset + row_bytes(row))};
    cJSON *item = cJSON_AddObjectToObject(header, row->name);
    for (int i = 0; i < row->ndim; i++) shape[i] = (double)row->shape[i];
    return cJSON_AddStringToObject(item, "dtype", dtype_name(row->dtype)) &&
           cJSON_AddItemToObject(item, "shape", cJSON_CreateDoubleArray(shape, row->ndim)) &&
           cJSON_AddItemToObject(item, "data_offsets", cJSON_CreateDoubleArray(ends, 2));
}

// The data's order in the file: all F32 tensors, then all BF16 tensors.
static const DType written_dtypes[] = {DTYPE_F32, DTYPE_BF16};

// Returns the 8 bytes of length and the header, padded with spaces to a multiple of 8. The caller frees it.
static char *make_header(const TensorRow *rows, size_t count, const char *const *metadata, size_t *size) {
    cJSON *header = cJSON_CreateObject(), *texts = metadata ? cJSON_AddObjectToObject(header, "__metadata__") : NULL;
    uint64_t offset = 0;
    bool ok = !metadata || texts;
    for (size_t i = 0; texts && metadata[i]; i += 2)
        ok = ok && cJSON_AddStringToObject(texts, metadata[i], metadata[i + 1]);
    for (size_t d = 0; d < 2; d++) {
        for (size_t i = 0; i < count; i++) {
            if (rows[i].dtype != written_dtypes[d]) continue;
            ok = ok && add_row(header, &rows[i], offset);
            offset += row_bytes(&rows[i]);
        }
    }
    char *json = ok ? cJSON_PrintUnformatted(header) : NULL;
    if (!json) fail(EXIT_RESOURCE, "out of memory for a safetensors header.");
    uint64_t length = strlen(json), padded = ((length + 7) / 8) * 8;
    char *text = memset(take(8 + padded), ' ', 8 + padded);
    memcpy(text, &padded, 8);
    memcpy(text + 8, json, length);
    *size = 8 + padded;
    cJSON_Delete(header);
    free(json);
    return text;
}

struct SafetensorsWriter {
    File *file;
    uint16_t *rounded;    // (PIECE)
};

SafetensorsWriter *safetensors_create(int folder, const char *path, const TensorRow *rows, size_t count,
                                      const char *const *metadata, FileHash *hash, Error *error) {
    size_t size;
    for (size_t i = 0; i < count; i++) {
        if (rows[i].dtype != DTYPE_F32 && rows[i].dtype != DTYPE_BF16) {
            error_set(error, EXIT_USAGE, "%s: tensor %s: can only write F32 or BF16, found %s.", path, rows[i].name,
                      dtype_name(rows[i].dtype));
            return NULL;
        }
    }
    File *file = file_create(folder, path, hash, error);
    if (!file) return NULL;
    SafetensorsWriter *w = take(sizeof *w);
    *w = (SafetensorsWriter){file, take(PIECE * sizeof *w->rounded)};
    char *header = make_header(rows, count, metadata, &size);
    bool ok = file_write(file, header, size, error);
    free(header);
    if (ok) return w;
    safetensors_finish(w, false, error);
    return NULL;
}

bool safetensors_append(SafetensorsWriter *w, DType dtype, const float *data, size_t n, Error *error) {
    if (dtype == DTYPE_F32) return file_write(w->file, data, n * 4, error);
    for (size_t at = 0; at < n; at += PIECE) {
        size_t count = n - at < PIECE ? n - at : PIECE;
        for (size_t i = 0; i < count; i++) w->rounded[i] = bf16_from_float(data[at + i]);
        if (!file_write(w->file, w->rounded, count * 2, error)) return false;
    }
    return true;
}

bool safetensors_finish(SafetensorsWriter *w, bool done, Error *error) {
    if (!done) file_discard(w->file);
    bool ok = done && file_close(w->file, error);
    free(w->rounded);
    free(w);
    return ok;
}

bool safetensors_write(int folder, const char *path, const TensorRow *rows, size_t count, const char *const *metadata,
                       FileHash *hash, Error *error) {
    SafetensorsWriter *w = safetensors_create(folder, path, rows, count, metadata, hash, error);
    bool ok = w != NULL;
    for (size_t d = 0; d < 2; d++) {
        for (size_t i = 0; i < count && ok; i++) {
            if (rows[i].dtype == written_dtypes[d])
                ok = safetensors_append(w, rows[i].dtype, rows[i].data, row_elements(&rows[i]), error);
        }
    }
    return w && safetensors_finish(w, ok, error);
}

// ---- reading headers

typedef struct {
    char *path;
    int fd;
} Part;

struct Safetensors {
    char *path;    // as given to safetensors_open
    Part *parts;
    size_t part_count;
    TensorInfo *infos;    // sorted by name
    size_t count;
};

static char *copy_string(const char *text) {
    size_t size = strlen(text) + 1;
    return memcpy(take(size), text, size);
}

static bool damaged(Error *error, const char *path, const char *name, const char *expected, const char *found) {
    return error_set(error, EXIT_INPUT, "%s: tensor %.300s: expected %s, found %s.\n  " DAMAGED, path, name, expected,
                     found);
}

static bool parse_dtype(TensorInfo *info, const cJSON *item, Error *error) {
    const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "dtype"));
    for (int i = 0; name && i < DTYPE_COUNT; i++) {
        if (strcmp(name, dtypes[i].name)) continue;
        info->dtype = (DType)i;
        return true;
    }
    char found[80];
    snprintf(found, sizeof found, name ? "\"%.60s\"" : "none", name);
    return error_set(error, EXIT_INPUT,
                     "%s: tensor %.300s: expected a \"dtype\" such as \"F32\" or \"BF16\", found %s.\n"
                     "  Convert the tensor to a supported dtype.",
                     info->path, info->name, found);
}

// Fills in ndim, shape and elements. Also checks the size in bytes for overflow.
static bool parse_shape(TensorInfo *info, const cJSON *item, uint64_t *bytes, Error *error) {
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape"), *dim;
    uint64_t value, elements = 1;
    if (!cJSON_IsArray(shape)) return damaged(error, info->path, info->name, "a \"shape\" that is a list", "none");
    cJSON_ArrayForEach(dim, shape) {
        if (info->ndim == TENSOR_DIMS) return damaged(error, info->path, info->name, "at most 8 dimensions", "more");
        if (!json_u64(dim, &value))
            return damaged(error, info->path, info->name, "whole numbers in \"shape\"", "something else");
        info->shape[info->ndim++] = value;
        if (__builtin_mul_overflow(elements, value, &elements)) {
            return damaged(error, info->path, info->name, "fewer than 2^64 elements", "a shape with more");
        }
    }
    info->elements = elements;
    if (__builtin_mul_overflow(elements, dtype_size(info->dtype), bytes)) {
        return damaged(error, info->path, info->name, "fewer than 2^64 bytes", "a shape with more");
    }
    return true;
}

// Fills in the offset, relative to the start of the data for now.
static bool parse_offsets(TensorInfo *info, const cJSON *item, uint64_t bytes, uint64_t data_size, Error *error) {
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    uint64_t begin, end;
    char expected[200], found[200];
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !json_u64(offsets->child, &begin) ||
        !json_u64(offsets->child->next, &end)) {
        return damaged(error, info->path, info->name, "\"data_offsets\": [begin, end]", "something else");
    }
    snprintf(found, sizeof found, "data_offsets [%" PRIu64 ", %" PRIu64 "]", begin, end);
    if (begin > end || end - begin != bytes) {
        snprintf(expected, sizeof expected, "%" PRIu64 " bytes (%s, %zu elements)", bytes, dtype_name(info->dtype),
                 info->elements);
        return damaged(error, info->path, info->name, expected, found);
    }
    if (end > data_size) {
        snprintf(expected, sizeof expected, "offsets within the %" PRIu64 " bytes of data in the file", data_size);
        return damaged(error, info->path, info->name, expected, found);
    }
    info->offset = begin;
    return true;
}

static bool check_metadata(const char *path, const cJSON *metadata, Error *error) {
    const cJSON *child = NULL;
    bool ok = cJSON_IsObject(metadata);
    if (ok) cJSON_ArrayForEach(child, metadata) ok = ok && cJSON_IsString(child);
    return ok || error_set(error, EXIT_INPUT,
                           "%s: expected only strings in \"__metadata__\", found something else.\n  " DAMAGED, path);
}

static uint64_t info_bytes(const TensorInfo *info) {
    return info->elements * dtype_size(info->dtype);
}

static int compare_offsets(const void *a, const void *b) {
    const TensorInfo *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (info_bytes(x) > info_bytes(y)) - (info_bytes(x) < info_bytes(y));    // empty tensors first
}

static int compare_names(const void *a, const void *b) {
    return strcmp(((const TensorInfo *)a)->name, ((const TensorInfo *)b)->name);
}

// Checks that the tensors cover the data without overlaps or holes, and makes their offsets relative to the start of
// the file.
static bool check_cover(TensorInfo *infos, size_t count, const char *path, uint64_t data_start, uint64_t data_size,
                        Error *error) {
    uint64_t at = 0;
    char expected[100], found[100];
    if (count) qsort(infos, count, sizeof *infos, compare_offsets);
    for (size_t i = 0; i < count; i++) {
        if (infos[i].offset != at) {
            snprintf(expected, sizeof expected, "its data to start at offset %" PRIu64 ", after the previous tensor",
                     at);
            snprintf(found, sizeof found, "%" PRIu64 " (%s)", infos[i].offset,
                     infos[i].offset < at ? "an overlap" : "a hole");
            return damaged(error, path, infos[i].name, expected, found);
        }
        at += info_bytes(&infos[i]);
        infos[i].offset += data_start;
    }
    if (at == data_size) return true;
    return error_set(error, EXIT_INPUT,
                     "%s: expected %" PRIu64 " bytes after the header, where its tensors end, found %" PRIu64
                     ".\n  " DAMAGED,
                     path, at, data_size);
}

// Adds the tensors of a parsed header.
static bool add_tensors(Safetensors *s, const Part *part, const cJSON *header, uint64_t data_start, uint64_t data_size,
                        Error *error) {
    const cJSON *item;
    size_t first = s->count, entries = 0;
    cJSON_ArrayForEach(item, header) entries++;
    s->infos = realloc(s->infos, (first + entries + 1) * sizeof *s->infos);
    if (!s->infos) fail(EXIT_RESOURCE, "%s: out of memory for its %zu tensors.", part->path, entries);
    cJSON_ArrayForEach(item, header) {
        if (!strcmp(item->string, "__metadata__")) {
            if (!check_metadata(part->path, item, error)) return false;
            continue;
        }
        TensorInfo *info = &s->infos[s->count++];
        uint64_t bytes = 0;
        *info = (TensorInfo){.name = copy_string(item->string), .path = part->path, .fd = part->fd};
        if (!parse_dtype(info, item, error) || !parse_shape(info, item, &bytes, error) ||
            !parse_offsets(info, item, bytes, data_size, error)) {
            return false;
        }
    }
    return check_cover(s->infos + first, s->count - first, part->path, data_start, data_size, error);
}

static bool read_header(Safetensors *s, const Part *part, uint64_t size, Error *error) {
    uint64_t length;
    if (size < 8) {
        return error_set(error, EXIT_INPUT, "%s: expected at least 8 bytes, found %" PRIu64 ".\n  " DAMAGED, part->path,
                         size);
    }
    if (!file_read_at(part->fd, part->path, &length, 8, 0, error)) return false;
    if (length > HEADER_BYTES || length > size - 8) {
        return error_set(
            error, EXIT_INPUT,
            "%s: offset 0: expected a header length of at most %" PRIu64 " bytes, found %" PRIu64 ".\n  %s", part->path,
            size - 8 < HEADER_BYTES ? size - 8 : HEADER_BYTES, length,
            length > HEADER_BYTES ? "This is not a safetensors file, or its first bytes are damaged." : DAMAGED);
    }
    char *text = take(length + 1);
    text[length] = '\0';
    cJSON *header = NULL;
    if (file_read_at(part->fd, part->path, text, length, 8, error))
        header = json_parse(text, length, (JsonPlace){part->path, 1, 8}, error);
    bool ok = header != NULL;
    if (ok && (text[0] != '{' || !cJSON_IsObject(header))) {
        ok = error_set(error, EXIT_INPUT,
                       "%s: offset 8: expected a header that starts with {, found something else.\n  " DAMAGED,
                       part->path);
    }
    ok = ok && add_tensors(s, part, header, 8 + length, size - 8 - length, error);
    cJSON_Delete(header);
    free(text);
    return ok;
}

// ---- files and folders

static bool add_part(Safetensors *s, const char *path, Error *error) {
    uint64_t size;
    int fd = file_open(path, "Check the path. A model in several files needs all of them.", &size, error);
    if (fd < 0) return false;
    s->parts = realloc(s->parts, (s->part_count + 1) * sizeof *s->parts);
    if (!s->parts) fail(EXIT_RESOURCE, "%s: out of memory.", path);
    Part *part = &s->parts[s->part_count++];
    *part = (Part){.path = copy_string(path), .fd = fd};
    return read_header(s, part, size, error);
}

static bool sort_names(Safetensors *s, Error *error) {
    if (s->count) qsort(s->infos, s->count, sizeof *s->infos, compare_names);
    for (size_t i = 1; i < s->count; i++) {
        const TensorInfo *a = &s->infos[i - 1], *b = &s->infos[i];
        if (strcmp(a->name, b->name)) continue;
        return error_set(error, EXIT_INPUT,
                         "%s: tensor %.300s is also in %s.\n"
                         "  The files of two models are mixed. Get a complete copy of one of them.",
                         b->path, b->name, a->path);
    }
    return true;
}

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Adds each file in the weight map once.
static bool add_parts_of_map(Safetensors *s, const char *folder, const char *index, const cJSON *map, Error *error) {
    size_t count = 0;
    const cJSON *item;
    char path[PATH_MAX];
    const char **files = take((size_t)cJSON_GetArraySize(map) * sizeof *files);
    bool ok = true;
    cJSON_ArrayForEach(item, map) {
        const char *file = cJSON_GetStringValue(item);
        if (!file || !*file || *file == '.' || strchr(file, '/')) {
            ok = error_set(
                error, EXIT_INPUT,
                "%s: tensor %.300s: expected the name of a file in the same folder, found %.300s.\n  " DAMAGED, index,
                item->string, file ? file : "something else");
            break;
        }
        files[count++] = file;
    }
    if (ok && count) qsort(files, count, sizeof *files, compare_strings);
    for (size_t i = 0; i < count && ok; i++) {
        if (i && !strcmp(files[i], files[i - 1])) continue;
        if (snprintf(path, sizeof path, "%s/%s", folder, files[i]) >= (int)sizeof path) {
            ok = error_set(error, EXIT_INPUT, "%s: it lists a file whose name is too long.\n  " DAMAGED, index);
        }
        ok = ok && add_part(s, path, error);
    }
    free(files);
    return ok;
}

// Checks that each tensor is in the file that the map gives, and that the files contain no others.
static bool check_map(const Safetensors *s, const char *index, const cJSON *map, Error *error) {
    const cJSON *item;
    size_t count = 0;
    cJSON_ArrayForEach(item, map) {
        const TensorInfo *info = safetensors_find(s, item->string);
        if (!info || strcmp(strrchr(info->path, '/') + 1, item->valuestring)) {
            return error_set(error, EXIT_INPUT,
                             "%s: expected tensor %.300s in %.300s, found it %s.\n"
                             "  The files of two models are mixed, or one is damaged. Get a complete copy.",
                             index, item->string, item->valuestring, info ? info->path : "nowhere");
        }
        count++;
    }
    if (count == s->count) return true;
    return error_set(error, EXIT_INPUT,
                     "%s: it lists %zu tensors, but its files contain %zu.\n"
                     "  The files of two models are mixed. Get a complete copy.",
                     index, count, s->count);
}

static bool open_index(Safetensors *s, const char *folder, const char *index, Error *error) {
    cJSON *json = json_read(index, JSON_LARGE, error);
    if (!json) return false;
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map");
    bool ok = cJSON_IsObject(map) ||
              error_set(error, EXIT_INPUT, "%s: expected an object \"weight_map\", found none.\n  " DAMAGED, index);
    ok =
        ok && add_parts_of_map(s, folder, index, map, error) && sort_names(s, error) && check_map(s, index, map, error);
    cJSON_Delete(json);
    return ok;
}

static bool open_path(Safetensors *s, const char *path, Error *error) {
    struct stat info;
    char file[PATH_MAX], index[PATH_MAX];
    if (stat(path, &info) != 0 || !S_ISDIR(info.st_mode)) return add_part(s, path, error) && sort_names(s, error);
    if (snprintf(file, sizeof file, "%s/model.safetensors", path) >= (int)sizeof file ||
        snprintf(index, sizeof index, "%s/model.safetensors.index.json", path) >= (int)sizeof index) {
        return error_set(error, EXIT_INPUT, "%.300s...: the path is too long.", path);
    }
    if (access(file, F_OK) == 0) return add_part(s, file, error) && sort_names(s, error);
    if (access(index, F_OK) == 0) return open_index(s, path, index, error);
    bool pickled = snprintf(file, sizeof file, "%s/pytorch_model.bin", path) > 0 && access(file, F_OK) == 0;
    return error_set(error, EXIT_INPUT,
                     "%s: expected model.safetensors or model.safetensors.index.json in this folder, found %s.\n  %s",
                     path, pickled ? "only pytorch_model.bin" : "neither",
                     pickled ? "Load the model in transformers, and write it again with save_pretrained()."
                             : "Give the folder of one checkpoint, such as OUT/ckpt/step-00001000.");
}

Safetensors *safetensors_open(const char *path, Error *error) {
    Safetensors *s = take(sizeof *s);
    s->path = copy_string(path);
    if (open_path(s, path, error)) return s;
    safetensors_close(s);
    return NULL;
}

void safetensors_close(Safetensors *s) {
    if (!s) return;
    for (size_t i = 0; i < s->count; i++) free((char *)s->infos[i].name);
    for (size_t i = 0; i < s->part_count; i++) {
        close(s->parts[i].fd);
        free(s->parts[i].path);
    }
    free(s->infos);
    free(s->parts);
    free(s->path);
    free(s);
}

size_t safetensors_count(const Safetensors *s) {
    return s->count;
}
const TensorInfo *safetensors_at(const Safetensors *s, size_t index) {
    return &s->infos[index];
}

const TensorInfo *safetensors_find(const Safetensors *s, const char *name) {
    return s->count ? bsearch(&(TensorInfo){.name = name}, s->infos, s->count, sizeof *s->infos, compare_names) : NULL;
}

// ---- reading data

static uint32_t float_bits_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = (uint32_t)(h & 0x7FFF) << 13, bits;
    float subnormal = (float)(h & 0x7FFF) * 0x1p-24f;
    if (magnitude >= 0x0F800000) return sign | magnitude | 0x7F800000;                        // infinity or NaN
    if (magnitude >= 0x00800000) return sign | (magnitude + ((uint32_t)(127 - 15) << 23));    // another bias
    memcpy(&bits, &subnormal, 4);
    return sign | bits;
}

static void floats_from(float *out, const void *raw, size_t count, DType dtype) {
    const uint16_t *half = raw;
    const double *wide = raw;
    if (dtype == DTYPE_F32) memcpy(out, raw, count * 4);
    else if (dtype == DTYPE_F64)
        for (size_t i = 0; i < count; i++) out[i] = (float)wide[i];
    else
        for (size_t i = 0; i < count; i++) {
            uint32_t bits = dtype == DTYPE_BF16 ? (uint32_t)half[i] << 16 : float_bits_from_f16(half[i]);
            memcpy(&out[i], &bits, 4);
        }
}

// Returns the index of the first infinity or NaN, or count. The first loop has no branches, so it vectorizes.
static size_t first_nonfinite(const float *values, size_t count) {
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        found |= (bits & 0x7F800000) == 0x7F800000;
    }
    if (!found) return count;
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(values[i])) return i;
    }
    return count;
}

// What is wrong with a tensor (`info` is NULL if there is none) that should have this name, this shape and a dtype that
// safetensors_read() reads. The text is "" if it is fine.
typedef struct {
    char text[800];
    const char *remedy;
} Problem;
static Problem problem_of(const Safetensors *s, const TensorInfo *info, const char *name, int ndim,
                          const size_t *shape) {
    Problem p = {"", NULL};
    if (!info) {
        p.remedy = "The model is of another kind or has fewer layers. Check its config.json.";
        snprintf(p.text, sizeof p.text,
                 "expected a tensor %.300s %s, found none of that name among %zu (the first is %.200s)", name,
                 shape_text(ndim, shape).text, s->count, s->count ? s->infos[0].name : "none");
    } else if (info->ndim != ndim || (ndim && memcmp(info->shape, shape, (size_t)ndim * sizeof *shape))) {
        p.remedy = "The model has other dimensions than expected. Check its config.json.";
        snprintf(p.text, sizeof p.text, "tensor %.300s: expected the shape %s, found %s", name,
                 shape_text(ndim, shape).text, shape_text(info->ndim, info->shape).text);
    } else if (info->dtype > DTYPE_BF16) {
        p.remedy = "Convert the model to one of these dtypes.";
        snprintf(p.text, sizeof p.text, "tensor %.300s: expected F32, BF16, F16 or F64, found %s", name,
                 dtype_name(info->dtype));
    }
    return p;
}

static const TensorInfo *find_fitting(const Safetensors *s, const char *name, int ndim, const size_t *shape,
                                      Error *error) {
    const TensorInfo *info = safetensors_find(s, name);
    Problem p = problem_of(s, info, name, ndim, shape);
    if (!p.text[0]) return info;
    error_set(error, EXIT_INPUT, "%s: %s.\n  %s", info ? info->path : s->path, p.text, p.remedy);
    return NULL;
}

bool safetensors_fits(const Safetensors *s, const char *name, int ndim, const size_t *shape, Reasons *reasons) {
    const TensorInfo *info = safetensors_find(s, name);
    Problem p = problem_of(s, info, name, ndim, shape);
    if (!p.text[0]) return true;
    char file[120] = "";
    if (info) {
        const char *slash = strrchr(info->path, '/');
        snprintf(file, sizeof file, "%.100s: ", slash ? slash + 1 : info->path);
    }
    reasons_add(reasons, "%s%s", file, p.text);
    return false;
}

bool safetensors_same(const TensorInfo *a, const TensorInfo *b, bool *same, Error *error) {
    *same =
        a->dtype == b->dtype && a->ndim == b->ndim && !memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape);
    char *left = take(2 * (size_t)PIECE), *right = left + PIECE;
    bool ok = true;
    for (uint64_t at = 0, bytes = info_bytes(a); at < bytes && ok && *same; at += PIECE) {
        size_t n = bytes - at < PIECE ? (size_t)(bytes - at) : PIECE;
        ok = file_read_at(a->fd, a->path, left, n, a->offset + at, error) &&
             file_read_at(b->fd, b->path, right, n, b->offset + at, error);
        *same = ok && !memcmp(left, right, n);
    }
    free(left);
    return ok;
}

static bool nonfinite(const TensorInfo *info, size_t index, double value, Error *error) {
    return error_set(error, EXIT_INPUT,
                     "%s: tensor %s: expected finite values, found %g in element %zu of %zu (offset %" PRIu64
                     ").\n  The run that wrote it had diverged, %s. Use an earlier checkpoint.",
                     info->path, info->name, value, index, info->elements,
                     info->offset + index * dtype_size(info->dtype),
                     info->dtype == DTYPE_F64 ? "the number is beyond float32's range, or the file is damaged"
                                              : "or the file is damaged");
}

bool safetensors_read(const Safetensors *s, const char *name, int ndim, const size_t *shape, float *out, Error *error) {
    const TensorInfo *info = find_fitting(s, name, ndim, shape, error);
    if (!info) return false;
    size_t width = dtype_size(info->dtype);
    void *buffer = info->dtype == DTYPE_F32 ? NULL : take(PIECE * width);
    bool ok = true;
    for (size_t at = 0; at < info->elements && ok; at += PIECE) {
        size_t n = info->elements - at < PIECE ? info->elements - at : PIECE;
        ok =
            file_read_at(info->fd, info->path, buffer ? buffer : out + at, n * width, info->offset + at * width, error);
        if (!ok) break;
        if (buffer) floats_from(out + at, buffer, n, info->dtype);
        size_t bad = first_nonfinite(out + at, n);
        if (bad < n) ok = nonfinite(info, at + bad, out[at + bad], error);
    }
    free(buffer);
    return ok;
}

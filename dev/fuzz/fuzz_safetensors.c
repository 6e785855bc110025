// Feeds hostile bytes to the safetensors reader: either it rejects them, or the tensors that it lists cover the file's
// data without overlap and can be read.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "model/safetensors.h"

// Builds the file in memory. After an 'r', the bytes are the file. After anything else, a header extends to the first
// NUL and data follows; the header's length is put in front, because a mutation would seldom keep it right.
static size_t fill(int fd, const uint8_t *bytes, size_t size) {
    if (ftruncate(fd, 0) != 0) abort();
    if (bytes[0] == 'r') return (size_t)pwrite(fd, bytes + 1, size - 1, 0);
    const uint8_t *end = memchr(bytes + 1, 0, size - 1), *stop = bytes + size;
    uint64_t length = (uint64_t)((end ? end : stop) - (bytes + 1));
    size_t data = end ? (size_t)(stop - end) - 1 : 0;
    if (pwrite(fd, &length, 8, 0) != 8) abort();
    if (pwrite(fd, bytes + 1, length, 8) != (ssize_t)length) abort();
    if (data && pwrite(fd, end + 1, data, 8 + (off_t)length) != (ssize_t)data) abort();
    return 8 + length + data;
}

static size_t tensor_bytes(const TensorInfo *info) {
    size_t bytes = 1;
    for (int i = 0; i < info->ndim; i++) {
        if (__builtin_mul_overflow(bytes, info->shape[i], &bytes)) abort();
    }
    // last: there may be a 0 among the dimensions.
    if (__builtin_mul_overflow(bytes, dtype_size(info->dtype), &bytes)) abort();
    return bytes;
}

static void check_cover(const Safetensors *s, int fd, size_t file_size) {
    uint64_t length, count = safetensors_count(s), total = 0;
    if (pread(fd, &length, 8, 0) != 8) abort();
    for (size_t i = 0; i < count; i++) {
        const TensorInfo *a = safetensors_at(s, i);
        size_t bytes = tensor_bytes(a);
        if (a->offset > file_size || bytes > file_size - a->offset) abort();
        total += bytes;
        for (size_t j = 0; j < i; j++) {
            const TensorInfo *b = safetensors_at(s, j);
            if (a->offset < b->offset + tensor_bytes(b) && b->offset < a->offset + bytes) abort();
        }
    }
    if (8 + length + total != file_size) abort();
}

static void read_tensor(const Safetensors *s, const TensorInfo *info) {
    Error error;
    if (info->elements * dtype_size(info->dtype) != tensor_bytes(info)) abort();
    if (safetensors_find(s, info->name) != info) abort();
    float *out = malloc(info->elements * sizeof *out + 1);    // a sanitizer detects one element too many
    if (!out) abort();
    safetensors_read(s, info->name, info->ndim, info->shape, out, &error);
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static int fd = -1;
    char path[40];
    Error error = {0};
    if (size == 0) return 0;
    if (fd < 0) fd = memfd_create("fuzz", 0);
    size_t file_size = fill(fd, bytes, size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    Safetensors *s = safetensors_open(path, &error);
    if (!s && (error.code != EXIT_INPUT || !strstr(error.text, path) || !strstr(error.text, "\n  "))) abort();
    if (s) check_cover(s, fd, file_size);
    for (size_t i = 0; s && i < safetensors_count(s); i++) read_tensor(s, safetensors_at(s, i));
    safetensors_close(s);
    return 0;
}

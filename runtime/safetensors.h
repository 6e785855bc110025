// safetensors files: 8 bytes of header length (little-endian), a JSON header, the tensors' data.
//
// The reader treats a file as hostile and holds it to the format's rules: a header of at most 100,000,000 bytes that
// lies in the file, strict JSON, known dtypes, ranges that agree with dtype and shape and cover the data with no
// overlap and no hole, no name twice. Offsets are 64 bits wide. Errors are EXIT_INPUT when reading, EXIT_RESOURCE when
// writing.
// Source: https://github.com/huggingface/safetensors, "Format".
#ifndef RUNTIME_SAFETENSORS_H
#define RUNTIME_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    DTYPE_F64,
    DTYPE_F32,
    DTYPE_F16,
    DTYPE_BF16,
    DTYPE_I64,
    DTYPE_I32,
    DTYPE_I16,
    DTYPE_I8,
    DTYPE_U64,
    DTYPE_U32,
    DTYPE_U16,
    DTYPE_U8,
    DTYPE_BOOL,
    DTYPE_F8_E4M3,
    DTYPE_F8_E5M2,
    DTYPE_COUNT
} DType;

// The format's name ("BF16") and the bytes of one element.
const char *dtype_name(DType dtype);
size_t dtype_size(DType dtype);

enum { TENSOR_DIMS = 8 };    // most dimensions of a tensor in a file

// ---- writing

typedef struct {
    const char *name;
    DType dtype;    // in the file: DTYPE_F32, or DTYPE_BF16, to which `data` is rounded (nearest, ties to even)
    int ndim;       // 0 (one number) to 4
    size_t shape[4];
    const float *data;    // row-major
} TensorRow;

// Writes and syncs the file, in pieces: no second copy of the model. Wider dtypes come first, as the format's own
// library orders them, so that each tensor is aligned. `metadata` is key, value, ..., NULL, or NULL for none. A file
// that could not be finished is removed.
bool safetensors_write(const char *path, const TensorRow *rows, size_t count, const char *const *metadata,
                       Error *error);

// ---- reading

typedef struct Safetensors Safetensors;

typedef struct {
    const char *name;
    DType dtype;
    int ndim;
    size_t shape[TENSOR_DIMS];
    size_t elements;
    uint64_t offset;     // of the first byte, from the start of its file
    const char *path;    // of its file
    int fd;
} TensorInfo;

// Opens a file; or a folder with model.safetensors, or with model.safetensors.index.json and the files that it names.
// Reads and checks all headers, no data. NULL on error.
Safetensors *safetensors_open(const char *path, Error *error);
void safetensors_close(Safetensors *tensors);    // NULL is fine

size_t safetensors_count(const Safetensors *tensors);
// In the order of the names' bytes.
const TensorInfo *safetensors_at(const Safetensors *tensors, size_t index);
const TensorInfo *safetensors_find(const Safetensors *tensors, const char *name);    // NULL where there is none

// Reads a tensor of exactly this shape, F32, BF16, F16 or F64, as float32. A missing name, another shape or dtype, or a
// value that is not finite is an error (for a value, with its index and offset).
bool safetensors_read(const Safetensors *tensors, const char *name, int ndim, const size_t *shape, float *out,
                      Error *error);

// Would safetensors_read() take a tensor of this name and shape, but for its values? Otherwise adds the reason.
bool safetensors_fits(const Safetensors *tensors, const char *name, int ndim, const size_t *shape, Reasons *reasons);

// Have the two tensors the same dtype, shape and bytes? False with *error set where they cannot be read; *same is the
// answer.
bool safetensors_same(const TensorInfo *a, const TensorInfo *b, bool *same, Error *error);

// The same as float64, for fixtures: also I64 and I32.
bool safetensors_read_f64(const Safetensors *tensors, const char *name, int ndim, const size_t *shape, double *out,
                          Error *error);

#ifdef __cplusplus
}
#endif
#endif

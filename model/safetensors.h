// safetensors files: 8 bytes that hold the header's length (little-endian), a JSON header, and the tensors' data.
//
// The reader treats every file as hostile and enforces the format's rules: a header of at most 100,000,000 bytes that
// lies within the file, strict JSON, known dtypes, unique names, and data ranges that match dtype and shape and cover
// the data without overlaps or holes. Offsets have 64 bits. Errors are EXIT_INPUT when reading and EXIT_RESOURCE when
// writing.
// Source: https://github.com/huggingface/safetensors, "Format".
#ifndef MODEL_SAFETENSORS_H
#define MODEL_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"
#include "runtime/file.h"

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

// The dtype's name in the file ("BF16"), and the bytes per element.
const char *dtype_name(DType dtype);
size_t dtype_size(DType dtype);

enum { TENSOR_DIMS = 8 };    // the most dimensions that a tensor in a file may have

// ---- writing

typedef struct {
    const char *name;
    DType dtype;    // in the file: DTYPE_F32, or DTYPE_BF16, to which `data` is rounded (to nearest, ties to even)
    int ndim;       // 0 (a scalar) to 4
    size_t shape[4];
    const float *data;    // row-major
} TensorRow;

// A file whose data is not in memory as a whole.
typedef struct SafetensorsWriter SafetensorsWriter;

// Creates the file and writes its header. F32 tensors come first, so that every tensor is aligned; the format's own
// library uses the same order. `folder` as for file_create(); `metadata` is key, value, ..., NULL, or NULL for none;
// `hash` is the file's, or NULL if it is not needed. `data` of the rows is not used. Returns NULL on error.
SafetensorsWriter *safetensors_create(int folder, const char *path, const TensorRow *rows, size_t count,
                                      const char *const *metadata, FileHash *hash, Error *error);

// Appends the next n numbers, in the order of the file. `dtype` is that of their row.
bool safetensors_append(SafetensorsWriter *writer, DType dtype, const float *data, size_t n, Error *error);

// Syncs and closes the file. If this fails, or with `done` false, removes it. The writer is freed in any case.
bool safetensors_finish(SafetensorsWriter *writer, bool done, Error *error);

// Does all of this for tensors that are in memory.
bool safetensors_write(int folder, const char *path, const TensorRow *rows, size_t count, const char *const *metadata,
                       FileHash *hash, Error *error);

// ---- reading

typedef struct Safetensors Safetensors;

typedef struct {
    const char *name;
    DType dtype;
    int ndim;
    size_t shape[TENSOR_DIMS];
    size_t elements;
    uint64_t offset;     // of the first byte, from the start of its file
    const char *path;    // its file
    int fd;
} TensorInfo;

// Opens a file, or a folder that contains model.safetensors, or model.safetensors.index.json and the files it lists.
// Reads and checks all headers, but no data. Returns NULL on error.
Safetensors *safetensors_open(const char *path, Error *error);
void safetensors_close(Safetensors *tensors);    // NULL is allowed

size_t safetensors_count(const Safetensors *tensors);
// The tensor at this index. Tensors are sorted by name, bytewise.
const TensorInfo *safetensors_at(const Safetensors *tensors, size_t index);
const TensorInfo *safetensors_find(const Safetensors *tensors, const char *name);    // NULL if there is none

// Reads a tensor of exactly this shape as float32. Its dtype may be F32, BF16, F16 or F64. A missing name, another
// shape or dtype, or a non-finite value (reported with its index and offset) is an error.
bool safetensors_read(const Safetensors *tensors, const char *name, int ndim, const size_t *shape, float *out,
                      Error *error);

// Would safetensors_read() accept the tensor of this name and shape, ignoring its values? If not, adds the reason.
bool safetensors_fits(const Safetensors *tensors, const char *name, int ndim, const size_t *shape, Reasons *reasons);

// Sets *same to whether two tensors have the same dtype, shape and bytes. Returns false with *error set if they cannot
// be read.
bool safetensors_same(const TensorInfo *a, const TensorInfo *b, bool *same, Error *error);

#ifdef __cplusplus
}
#endif
#endif

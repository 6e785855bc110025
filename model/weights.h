// A model's parameters on the host and their optimizer's state: initialization, and reading and writing their files.
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "model/model.h"
#include "runtime/file.h"
#include "model/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const ModelConfig *config;
    const TensorList *list;
    float *params;    // list->floats parameters
    // The optimizer's state, with the same layout; NULL for inference. What a tensor's update rule does not keep may be
    // scratch.
    float *state[STATE_ARRAYS];
    // model.safetensors stores bfloat16, and optimizer.safetensors the parameters as float32 master weights.
    bool bf16;
} Weights;

// Initializes all parameters. The list has each tensor's mean and standard deviation. Its random numbers depend only on
// the seed and on its position among the randomly initialized tensors, so all normalizers start from the same weights,
// with or without learned scalars.
void weights_init(const Weights *weights, uint64_t seed);

// Sets each learned scalar that the model did not already have under `from` to its initial value, and its moments to 0.
void weights_start_scalars(const Weights *weights, const AttentionList *from);

// Copies all learned scalars and their moments to `kept` (weights_scalar_floats() floats), or back if `restore`. This
// undoes weights_start_scalars().
size_t weights_scalar_floats(const TensorList *list);
void weights_keep_scalars(const Weights *weights, float *kept, bool restore);

// Are the folder's tensors exactly those of a model with this shape and normalizer? Reads only headers, except to
// compare a copy of a tied embedding. If not, returns false with all reasons: tensors that are missing, have another
// shape or dtype, or are not part of the model.
bool weights_check(const ModelConfig *config, const char *folder, Error *error);

// Does the folder store every matrix in bfloat16? False also if it cannot be read: weights_load() says why.
bool weights_are_bf16(const ModelConfig *config, const char *folder);

// Reads all parameters from a folder with model.safetensors after weights_check(). `saved` has the normalizers in
// its config.json; learned scalars that they do not have get their initial values. With bf16, weights_load_optimizer()
// reads the master weights.
bool weights_load(const Weights *weights, const char *folder, const AttentionList *saved, Error *error);

// Reads the optimizer's state, and with bf16 the master weights, from a folder with optimizer.safetensors.
bool weights_load_optimizer(const Weights *weights, const char *folder, Error *error);

// ---- writing model.safetensors and optimizer.safetensors, piece by piece: with ZeRO-1 other ranks have parts of the
// arrays
//
//     WeightsPiece piece = {0};
//     WeightsFiles files = {weights_create_model(...), weights_create_optimizer(...)};
//     while (ok && weights_next_piece(&weights, &piece))
//         bring its numbers to piece.data; ok = weights_write_piece(&files, &weights, &piece, &error);
//     ok = weights_close(&files, ok, &error);

enum { WEIGHTS_PARAMS = STATE_ARRAYS };

// state[array] or, for WEIGHTS_PARAMS, params
float *weights_array(const Weights *weights, size_t array);

// Up to WEIGHTS_PIECE consecutive numbers of a tensor in one of the arrays.
enum { WEIGHTS_PIECE = 4 << 20 };
typedef struct {
    size_t tensor, array;    // see weights_array()
    size_t from, floats;     // of the tensor's elements
    float *data;             // where they are in that array
} WeightsPiece;

// Advances to the next piece of what the files contain; a piece of zeros stands before the first. Returns false after
// the last. The order depends on the model only, so that all ranks go through the same pieces.
bool weights_next_piece(const Weights *weights, WeightsPiece *piece);

// Both files, open for writing; NULL if it could not be created.
typedef struct {
    SafetensorsWriter *model, *optimizer;
} WeightsFiles;

// Create the files. weights_close() sets their hashes.
SafetensorsWriter *weights_create_model(const Weights *weights, int folder, const char *path, FileHash *hash,
                                        Error *error);
SafetensorsWriter *weights_create_optimizer(const Weights *weights, int folder, const char *path, FileHash *hash,
                                            Error *error);
bool weights_write_piece(const WeightsFiles *files, const Weights *weights, const WeightsPiece *piece, Error *error);

// Syncs and closes both files. If this fails, or with `done` false, removes those that it has not closed.
bool weights_close(const WeightsFiles *files, bool done, Error *error);

#ifdef __cplusplus
}
#endif
#endif

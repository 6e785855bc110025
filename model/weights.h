// A model's parameters on the host, and what AdamW keeps of them: how they start, and their files.
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const ModelConfig *config;
    const TensorList *list;
    float *params;           // list->floats of them
    float *mean, *square;    // AdamW's moments, likewise; NULL for a model that only generates
    // model.safetensors has bfloat16, and the parameters are masters in optimizer.safetensors.
    bool bf16;
} Weights;

// The first weights: each tensor's mean and deviation by the list, its numbers by the seed and its place among those
// that have random ones: so that all normalizers start from the same weights, with or without scalars of their own.
void weights_init(const Weights *weights, uint64_t seed);

// Each learned scalar that a model under `from` does not bring along starts at its first value.
void weights_start_scalars(const Weights *weights, const Normalizer *from);

// Copies all learned scalars and their moments to `kept` (weights_scalar_floats() of them), or back where `restore`:
// what it takes to undo weights_start_scalars().
size_t weights_scalar_floats(const TensorList *list);
void weights_keep_scalars(const Weights *weights, float *kept, bool restore);

// Are the folder's tensors exactly those of a model of this shape and normalizer? Reads headers only, but for a copy of
// a tied embedding. Otherwise false with every reason: tensors that are missing, of another shape or dtype, or would be
// left over.
bool weights_check(const ModelConfig *config, const char *folder, Error *error);

// All parameters from a folder with model.safetensors, whose config.json says the normalizer `saved`, after
// weights_check(). Under bfloat16 the masters are weights_load_optimizer()'s matter. Learned scalars that `saved` does
// not bring along start at their first values.
bool weights_load(const Weights *weights, const char *folder, const Normalizer *saved, Error *error);

// The moments, and under bfloat16 the masters, from a folder with optimizer.safetensors.
bool weights_load_optimizer(const Weights *weights, const char *folder, Error *error);

// model.safetensors and optimizer.safetensors, to these paths.
bool weights_save(const Weights *weights, const char *path, Error *error);
bool weights_save_optimizer(const Weights *weights, const char *path, Error *error);

#ifdef __cplusplus
}
#endif
#endif

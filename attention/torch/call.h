// What the entry points for the CPU and for GPUs share: strides, and a layer's scalars in one array.
#ifndef ATTENTION_TORCH_CALL_H
#define ATTENTION_TORCH_CALL_H

#include "attention/normalizer.h"

#define EXPORT __attribute__((visibility("default")))

// Elements from one sequence, head or position to the next.
typedef struct {
    size_t sequence, head, position;
} Strides;

// The scalars that a normalizer has lie one after the other, in the order of SCALARS.
static inline size_t scalar_offset(const Normalizer *normalizer, size_t NH, int L, int scalar) {
    size_t offset = 0;
    for (int i = 0; i < scalar; i++)
        if (normalizer_has(normalizer, (Scalar)i)) offset += scalar_size(i, NH, (size_t)L);
    return offset;
}

static inline Scalars scalars_at(const Normalizer *normalizer, size_t NH, int L, const real *values) {
    Scalars all = {{NULL}};
    for (int i = 0; i < SCALAR_COUNT; i++)
        if (normalizer_has(normalizer, (Scalar)i)) all.of[i] = values + scalar_offset(normalizer, NH, L, i);
    return all;
}

// values: NULL if no gradients are needed
static inline ScalarGrads scalar_grads_at(const Normalizer *normalizer, size_t NH, int L, real *values) {
    ScalarGrads all = {{NULL}};
    for (int i = 0; values && i < SCALAR_COUNT; i++)
        if (normalizer_has(normalizer, (Scalar)i)) all.of[i] = values + scalar_offset(normalizer, NH, L, i);
    return all;
}

#endif

// What one step of AdamW is told; the update itself is in the trainers.
// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
#ifndef RUNTIME_ADAMW_H
#define RUNTIME_ADAMW_H

#include <stdint.h>

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale;    // the gradient is taken times this: clipping
    int64_t step;         // from 1
} AdamW;

#endif

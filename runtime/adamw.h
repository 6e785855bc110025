// The arguments of one AdamW step. The trainers implement the update itself.
// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
#ifndef RUNTIME_ADAMW_H
#define RUNTIME_ADAMW_H

#include <stdint.h>

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale;    // every gradient is multiplied by this; it clips the gradient norm
    int64_t step;         // counts from 1
} AdamW;

#endif

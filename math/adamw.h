// The arguments of one AdamW step, and what clips its gradient. The trainers implement the update itself.
// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
#ifndef MATH_ADAMW_H
#define MATH_ADAMW_H

#include <stdint.h>

#ifdef __CUDACC__
#define ADAMW_INLINE static __host__ __device__ __forceinline__
#else
#define ADAMW_INLINE static inline
#endif

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step;    // counts from 1
} AdamW;

// The factor that clips a gradient of this norm to `clip`: min(1, clip/(norm + 1e-6)), or 1 if clip is 0. The same bits
// on the host and on the device.
ADAMW_INLINE double clip_scale(double norm, double clip) {
    double scale = clip / (norm + 1e-6);
    return clip > 0 && norm > 0 && scale < 1 ? scale : 1;
}

#endif

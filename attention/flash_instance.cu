// One row of flash_instances.h: the kernels for a type, a phi and a class of posts. -DINSTANCE=FLASH_name selects the
// row. Without it, in a build for one normalizer (make ATTN=NAME), this file contains the kernels for that normalizer
// in bf16 and float.
#include "cuda/gpu.cuh"

#include "attention/flash.cuh"
#include "runtime/error.h"

template <int instance, int HS>
static void forward_of(const FlashCall<FlashX<instance>> &call, cudaStream_t stream) {
    flash_forward_launch<FlashX<instance>, HS, flash_instances[instance].phi, flash_instances[instance].post>(call,
                                                                                                              stream);
}

template <int instance, int HS>
static void backward_of(const FlashCall<FlashX<instance>> &call, cudaStream_t stream) {
    flash_backward_launch<FlashX<instance>, HS, flash_instances[instance].phi, flash_instances[instance].post>(call,
                                                                                                               stream);
}

template <int instance>
void flash_instance_forward(const FlashCall<FlashX<instance>> &call, cudaStream_t stream) {
    if (call.HS <= 48) forward_of<instance, 48>(call, stream);
    else if (call.HS <= 64) forward_of<instance, 64>(call, stream);
    else forward_of<instance, 128>(call, stream);
}

template <int instance>
void flash_instance_backward(const FlashCall<FlashX<instance>> &call, cudaStream_t stream) {
    if (call.HS <= 48) backward_of<instance, 48>(call, stream);
    else if (call.HS <= 64) backward_of<instance, 64>(call, stream);
    else backward_of<instance, 128>(call, stream);
}

#define INSTANTIATE(instance)                                                                                          \
    template void flash_instance_forward<instance>(const FlashCall<FlashX<instance>> &call, cudaStream_t stream); \
    template void flash_instance_backward<instance>(const FlashCall<FlashX<instance>> &call, cudaStream_t stream);
#ifdef INSTANCE
INSTANTIATE(INSTANCE)
#else
INSTANTIATE(flash_only(2))
INSTANTIATE(flash_only(4))
#endif

// One row of flash_instances.h: the kernels for a type, a phi and a class of posts. -DINSTANCE=FLASH_name selects the
// row. Without it, in a build for one normalizer (make ATTN=NAME), this file contains the kernels for that normalizer
// in bf16 and float.
#include "cuda/gpu.cuh"

#include "attention/flash.cuh"

template <int instance>
void flash_instance_forward(const FlashCall<FlashX<instance>> &call, cudaStream_t stream) {
    static constexpr FlashInstance it = flash_instances[instance];
    with_head_size<48, 64, 128>(
        call.HS, [&](auto HS) { flash_forward_launch<FlashX<instance>, HS.value, it.phi, it.post>(call, stream); });
}

template <int instance>
void flash_instance_backward(const FlashCall<FlashX<instance>> &call, cudaStream_t stream) {
    static constexpr FlashInstance it = flash_instances[instance];
    with_head_size<48, 64, 128>(
        call.HS, [&](auto HS) { flash_backward_launch<FlashX<instance>, HS.value, it.phi, it.post>(call, stream); });
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

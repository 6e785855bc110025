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

#ifdef INSTANCE
template void flash_instance_forward<INSTANCE>(const FlashCall<FlashX<INSTANCE>> &call, cudaStream_t stream);
template void flash_instance_backward<INSTANCE>(const FlashCall<FlashX<INSTANCE>> &call, cudaStream_t stream);
#else
// Named here so that they are instantiated. Those with and without a cap may be the same.
#define BOTH_PASSES(instance) \
    (const void *)flash_instance_forward<instance>, (const void *)flash_instance_backward<instance>
extern const void *const flash_only_passes[];
const void *const flash_only_passes[] = {BOTH_PASSES(flash_only(2, false)), BOTH_PASSES(flash_only(2, true)),
                                         BOTH_PASSES(flash_only(4, false))};
#endif

// A row of flash_instances.h for compute capability 9.0. -DINSTANCE selects it, as for flash_instance.cu.
#include "cuda/gpu.cuh"

#include "attention/flash90_backward.cuh"
#include "attention/flash90_forward.cuh"

template <int instance>
void flash90_instance_forward(const FlashCall<bf16> &call, cudaStream_t stream) {
    static constexpr FlashInstance it = flash_instances[instance];
    with_head_size<64, 128>(call.HS, [&](auto HS) {
        if constexpr (flash90_forward_fits(it.phi, it.post, HS.value))
            flash90_forward_launch<HS.value, it.phi, it.post>(call, stream);
        else flash_instance_forward<instance>(call, stream);
    });
}

template <int instance>
void flash90_instance_backward(const FlashCall<bf16> &call, cudaStream_t stream) {
    static constexpr FlashInstance it = flash_instances[instance];
    if (!call.dq_sums) return flash_instance_backward<instance>(call, stream);
    with_head_size<64, 128>(call.HS, [&](auto HS) {
        if constexpr (flash90_backward_fits(it.post, HS.value))
            flash90_backward_launch<HS.value, it.phi, it.post>(call, stream);
        else flash_instance_backward<instance>(call, stream);
    });
}

#ifndef INSTANCE
#define INSTANCE flash_only(2, false)
#endif
template void flash90_instance_forward<INSTANCE>(const FlashCall<bf16> &call, cudaStream_t stream);
template void flash90_instance_backward<INSTANCE>(const FlashCall<bf16> &call, cudaStream_t stream);

// A row of flash_instances.h for compute capability 9.0. -DINSTANCE selects it, as for flash_instance.cu.
#include "cuda/gpu.cuh"

#include "attention/flash90_backward.cuh"
#include "attention/flash90_forward.cuh"
#include "runtime/error.h"

template <int instance, int HS>
static void forward_of(const FlashCall<bf16> &call, cudaStream_t stream) {
    constexpr FlashInstance it = flash_instances[instance];
    if constexpr (flash90_forward_fits(it.phi, it.post, HS)) flash90_forward_launch<HS, it.phi, it.post>(call, stream);
    else flash_instance_forward<instance>(call, stream);
}

template <int instance, int HS>
static void backward_of(const FlashCall<bf16> &call, cudaStream_t stream) {
    constexpr FlashInstance it = flash_instances[instance];
    if constexpr (flash90_backward_fits(it.post, HS)) flash90_backward_launch<HS, it.phi, it.post>(call, stream);
    else flash_instance_backward<instance>(call, stream);
}

template <int instance>
void flash90_instance_forward(const FlashCall<bf16> &call, cudaStream_t stream) {
    if (call.HS <= 64) forward_of<instance, 64>(call, stream);
    else forward_of<instance, 128>(call, stream);
}

template <int instance>
void flash90_instance_backward(const FlashCall<bf16> &call, cudaStream_t stream) {
    if (!call.dq_sums) flash_instance_backward<instance>(call, stream);
    else if (call.HS <= 64) backward_of<instance, 64>(call, stream);
    else backward_of<instance, 128>(call, stream);
}

#ifndef INSTANCE
#define INSTANCE flash_only(2)
#endif
template void flash90_instance_forward<INSTANCE>(const FlashCall<bf16> &call, cudaStream_t stream);
template void flash90_instance_backward<INSTANCE>(const FlashCall<bf16> &call, cudaStream_t stream);

// A row of flash_instances.h for compute capability 9.0. -DINSTANCE selects it, as for flash_instance.cu.
#include "cuda/gpu.cuh"

#include "attention/flash90_forward.cuh"
#include "runtime/error.h"

// Where registers do not suffice, which would spill, flash.cuh's kernels take over.
template <int HS, int PHI, int POST>
constexpr bool forward90_fits =
    PHI >= 0 && PHI != PHI_MISH &&
    (HS <= 64 || ((PHI != PHI_SOFTPLUS || POST != FLASH_PLAIN) && POST != FLASH_RECENTER_L1));

template <int instance, int HS>
static void forward_of(const FlashCall<bf16> &call, cudaStream_t stream) {
    constexpr FlashInstance it = flash_instances[instance];
    if constexpr (forward90_fits<HS, it.phi, it.post>) flash90_forward_launch<HS, it.phi, it.post>(call, stream);
    else flash_instance_forward<instance>(call, stream);
}

template <int instance>
void flash90_instance_forward(const FlashCall<bf16> &call, cudaStream_t stream) {
    if (call.HS <= 64) forward_of<instance, 64>(call, stream);
    else forward_of<instance, 128>(call, stream);
}

#ifndef INSTANCE
#define INSTANCE flash_only(2)
#endif
template void flash90_instance_forward<INSTANCE>(const FlashCall<bf16> &call, cudaStream_t stream);

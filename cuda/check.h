// Error checks for all calls of CUDA and its libraries. On failure, the program ends with EXIT_PEER (EXIT_RESOURCE if
// device memory runs out) and a message with the rank, the call, and its place in the source.
#ifndef CUDA_CHECK_H
#define CUDA_CHECK_H

#include <cuda_runtime.h>
#include <stdio.h>

#include "runtime/error.h"
#include "runtime/process.h"

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

typedef struct {
    char text[400];
} CudaAdvice;

// The CUDA versions of driver and program, and what to do about an error of a machine that is not set up for them.
static inline CudaAdvice cuda_advice(cudaError_t error) {
    CudaAdvice advice;
    const char *remedy = "";
    int driver = 0, built = CUDART_VERSION;    // 12080 is 12.8
    cudaDriverGetVersion(&driver);
    switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion:
        remedy = "\n  Install a newer driver, or build with a CUDA Toolkit that this one supports (doc/many_gpus.md).";
        break;
    case cudaErrorNoKernelImageForDevice:
        remedy = "\n  Build for this GPU: make train_gpt2cu GPUS=90 is for compute capability 9.0.";
        break;
    case cudaErrorSystemNotReady:
        remedy = "\n  GPUs behind an NVSwitch need the service nvidia-fabricmanager, in the driver's version.";
        break;
    case cudaErrorSystemDriverMismatch:
        remedy =
            "\n  libcuda and the kernel's driver differ: reboot after an update; in a container, use the host's libcuda.";
        break;
    default: break;
    }
    snprintf(advice.text, sizeof advice.text, "\n  The driver supports CUDA %d.%d; this program has CUDA %d.%d.%s",
             driver / 1000, driver % 1000 / 10, built / 1000, built % 1000 / 10, remedy);
    return advice;
}

static inline void cuda_check(cudaError_t error, const char *call, const char *file, int line) {
    if (error == cudaSuccess) return;
    fail(error == cudaErrorMemoryAllocation ? EXIT_RESOURCE : EXIT_PEER, "rank %d: %s:%d: %s failed: %s (%s).%s",
         process.rank, file, line, call, cudaGetErrorString(error), cudaGetErrorName(error), cuda_advice(error).text);
}

static inline void launch_check(cudaError_t error, const void *kernel, dim3 grid, dim3 block, size_t shared_bytes) {
    const char *name = "a kernel";
    if (error == cudaSuccess) return;
    cudaFuncGetName(&name, kernel);
    fail(error == cudaErrorMemoryAllocation ? EXIT_RESOURCE : EXIT_PEER,
         "rank %d: launching %s with grid (%u,%u,%u), block (%u,%u,%u) and %zu bytes of shared memory failed: %s.%s",
         process.rank, name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes, cudaGetErrorString(error),
         cuda_advice(error).text);
}
#endif

// Error checks for all calls of CUDA and its libraries. On failure, the program ends with EXIT_PEER (EXIT_RESOURCE if
// device memory runs out) and a message with the rank, the call, and its place in the source.
#ifndef CUDA_CHECK_H
#define CUDA_CHECK_H

#include <cuda_runtime.h>

#include "runtime/error.h"
#include "runtime/process.h"

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

static inline void cuda_check(cudaError_t error, const char *call, const char *file, int line) {
    if (error == cudaSuccess) return;
    fail(error == cudaErrorMemoryAllocation ? EXIT_RESOURCE : EXIT_PEER, "rank %d: %s:%d: %s failed: %s (%s).",
         process.rank, file, line, call, cudaGetErrorString(error), cudaGetErrorName(error));
}

static inline void launch_check(cudaError_t error, const void *kernel, dim3 grid, dim3 block, size_t shared_bytes) {
    const char *name = "a kernel";
    if (error == cudaSuccess) return;
    cudaFuncGetName(&name, kernel);
    fail(error == cudaErrorMemoryAllocation ? EXIT_RESOURCE : EXIT_PEER,
         "rank %d: launching %s with grid (%u,%u,%u), block (%u,%u,%u) and %zu bytes of shared memory failed: %s.",
         process.rank, name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes,
         cudaGetErrorString(error));
}
#endif

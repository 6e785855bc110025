// The GPU of a process: which one it takes, what it is called, what it can do at most.
#ifndef KERNELS_DEVICE_CUH
#define KERNELS_DEVICE_CUH

#include <stdio.h>
#include <string.h>

#include "kernels/check.h"

// Process r of a machine takes device r. Ends with EXIT_PEER where there are not enough of them, or none.
static inline void device_start(void) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count < 1)
        fail(EXIT_PEER, "no GPU that CUDA can use: %s.\n  nvidia-smi shows what the driver sees; train_gpt2 trains on the CPU.",
             error == cudaSuccess ? "there is none" : cudaGetErrorString(error));
    if (process.local_rank >= count)
        fail(EXIT_PEER, "process %d: %d processes on this machine, and %d GPU%s that this one sees.\n  Start one process for each GPU, and let each"
             " see all of the machine's (CUDA_VISIBLE_DEVICES; with Slurm --gpus-per-node, not --gpus-per-task).",
             process.rank, process.local_size, count, count == 1 ? "" : "s");
    CUDA_CHECK(cudaSetDevice(process.local_rank));
}

typedef struct {
    char name[256];
    int major, minor, processors;
    double clock;                  // Hz, the highest
} Device;

static inline Device device_read(void) {
    Device d;
    cudaDeviceProp properties;
    int device, kilohertz = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device));
    snprintf(d.name, sizeof d.name, "%s", properties.name);
    d.major = properties.major, d.minor = properties.minor, d.processors = properties.multiProcessorCount;
    d.clock = 1e3 * kilohertz;
    return d;
}

// Peak of dense products with sums in float32, FLOP/s: processors x clock x what one does in a clock. The highest clock is what the vendor's
// figures are for; under load a GPU may hold less.
// Source: the vendor's architecture papers (A100 312 TFLOP/s = 108 x 1.41 GHz x 2048; H100 SXM 989 = 132 x 1.83 x 4096; RTX 4090 165 = 128 x 2.52 x 512).
static inline double device_peak(const Device *d, bool bf16) {
    static const struct { int major, minor; const char *name; double bf16, fp32; } ROWS[] = {
        {8, 0, "", 2048, 128}, {8, 6, "", 512, 256}, {8, 9, "RTX", 512, 256}, {8, 9, "", 1024, 256}, {9, 0, "", 4096, 256}, {10, 0, "", 8192, 256},
        {12, 0, "", 512, 256}};
    for (const auto &row : ROWS)
        if (row.major == d->major && row.minor == d->minor && strstr(d->name, row.name))
            return d->processors * d->clock * (bf16 ? row.bf16 : row.fp32);
    return d->processors * d->clock * (bf16 ? 1024 : 256);
}

#endif

#include "cuda/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/check.h"

// Ends all ranks if two of them have the same GPU.
static void check_own_gpu(int device) {
    cudaDeviceProp properties;
    cudaUUID_t *all = (cudaUUID_t *)allocate((size_t)process.size, sizeof *all, "the GPUs of all ranks");
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    all[process.rank] = properties.uuid;
    process_gather(all, sizeof *all);
    for (int r = 1; r < process.size; r++)
        for (int s = 0; s < r; s++)
            if (memcmp(&all[r], &all[s], sizeof *all) == 0)
                fail(EXIT_USAGE,
                     "ranks %d and %d have the same GPU.\n"
                     "  Start one rank per GPU. Each rank must see all GPUs of its machine, or only its own\n"
                     "  (CUDA_VISIBLE_DEVICES; with Slurm --gpus-per-node or --gpus-per-task).",
                     s, r);
    free(all);
}

void device_start(void) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count < 1)
        fail(EXIT_PEER,
             "CUDA found no usable GPU: %s.%s\n  nvidia-smi shows what the driver sees. train_gpt2 trains on the CPU.",
             error == cudaSuccess ? "there is none" : cudaGetErrorString(error), cuda_advice(error).text);
    CUDA_CHECK(cudaSetDevice(process.local_rank % count));
    if (process.size > 1) check_own_gpu(process.local_rank % count);
}

// FLOP per clock and SM of dense matmuls with float32 sums. The vendor's bf16 figures refer to the GPU's highest clock,
// or to a lower one, which is then given in GHz.
struct DeviceRate {
    int major, minor;
    const char *name;    // part of the device's name; "" matches any
    double bf16, fp32, bf16_clock;
};

// Returns the first matching row, or NULL.
static const DeviceRate *device_rate(const Device *d) {
    // Sources: the vendor's architecture papers and data sheets, dense bf16 in TFLOP/s = SMs x GHz x FLOP.
    // clang-format off
    static const DeviceRate ROWS[] = {
        { 8, 0, "",        2048, 128, 0    },    // A100: 312 = 108 x 1.41 x 2048
        { 8, 6, "GeForce",  512, 256, 0    },    // RTX 3090: 71
        { 8, 6, "A10G",     512, 256, 0    },
        { 8, 6, "",        1024, 256, 0    },    // A40: 149.7, A10: 125
        { 8, 9, "GeForce",  512, 256, 0    },    // RTX 4090: 165
        { 8, 9, "L40S",    1024, 256, 2.49 },    // L40S: 362
        { 8, 9, "L40",      512, 256, 0    },
        { 8, 9, "",        1024, 256, 0    },    // RTX 6000 Ada: 364, L4: 121
        { 9, 0, "PCIe",    4096, 256, 1.62 },    // H100 PCIe: 756 = 114 x 1.62 x 4096
        { 9, 0, "NVL",     4096, 256, 1.545},    // H100 NVL: 835 = 132 x 1.545 x 4096
        { 9, 0, "",        4096, 256, 1.83 },    // H100 SXM and H200: 989 = 132 x 1.83 x 4096 (highest clock 1.98)
        {10, 0, "",        8192, 256, 1.856},    // B200: 2250 = 148 x 1.856 x 8192
        {12, 0, "GeForce",  512, 256, 0    },
        {12, 0, "",        1024, 256, 0    },
    };
    // clang-format on
    for (const DeviceRate &row : ROWS)
        if (row.major == d->major && row.minor == d->minor && strstr(d->name, row.name)) return &row;
    return NULL;
}

double device_peak(const Device *d, bool bf16) {
    const DeviceRate unknown = {0, 0, "", 1024, 256, 0}, *found = device_rate(d), *rate = found ? found : &unknown;
    double clock = bf16 && rate->bf16_clock > 0 ? 1e9 * rate->bf16_clock : d->clock;
    return d->processors * clock * (bf16 ? rate->bf16 : rate->fp32);
}

Device device_read(void) {
    Device d;
    cudaDeviceProp properties;
    int device, kilohertz = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device));
    snprintf(d.name, sizeof d.name, "%s", properties.name);
    d.major = properties.major;
    d.minor = properties.minor;
    d.processors = properties.multiProcessorCount;
    d.clock = 1e3 * kilohertz;
    if (!device_rate(&d))
        warn(
            "the peak of %s (compute capability %d.%d) is unknown: \"%% of peak\" assumes 1024 FLOP per clock and SM in\n"
            "  bf16 and 256 in float32.",
            d.name, d.major, d.minor);
    return d;
}

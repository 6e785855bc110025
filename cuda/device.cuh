// The GPU of a process: which one it takes, what it is called, what it can do at most.
#ifndef CUDA_DEVICE_CUH
#define CUDA_DEVICE_CUH

#include <stdio.h>
#include <string.h>

#include "cuda/check.h"

// Process r of a machine takes device r. Ends with EXIT_PEER where there are not enough of them, or none.
static inline void device_start(void) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count < 1)
        fail(EXIT_PEER,
             "no GPU that CUDA can use: %s.\n  nvidia-smi shows what the driver sees; train_gpt2 trains on the CPU.",
             error == cudaSuccess ? "there is none" : cudaGetErrorString(error));
    if (process.local_rank >= count)
        fail(
            EXIT_PEER,
            "process %d: %d processes on this machine, and %d GPU%s that this one sees.\n  Start one process for each GPU, and let each"
            " see all of the machine's (CUDA_VISIBLE_DEVICES; with Slurm --gpus-per-node, not --gpus-per-task).",
            process.rank, process.local_size, count, count == 1 ? "" : "s");
    CUDA_CHECK(cudaSetDevice(process.local_rank));
}

typedef struct {
    char name[256];
    int major, minor, processors;
    double clock;    // Hz, the highest
} Device;

// What a processor does in a clock, FLOP of dense products with sums in float32. The vendor's figures for bf16 are for
// the GPU's highest clock, or for a lower one, which is given in GHz.
struct DeviceRate {
    int major, minor;
    const char *name;    // in the device's name; "" in all. The first row counts
    double bf16, fp32, bf16_clock;
};

// Source: the vendor's architecture papers and data sheets, dense bf16 in TFLOP/s: A100 312 = 108 processors x 1.41 GHz
// x 2048, H100 SXM and H200 989 = 132 x 1.83 x 4096 (highest clock 1.98), H100 PCIe 756 = 114 x 1.62 x 4096, H100 NVL
// 835 = 132 x 1.545 x 4096, B200 2250 = 148 x 1.856 x 8192, A40 149.7, A10 125, RTX 3090 71, RTX 4090 165, RTX 6000 Ada
// 364, L40S 362, L4 121.
static inline const DeviceRate *device_rate(const Device *d) {
    static const DeviceRate ROWS[] = {
        {8, 0, "", 2048, 128, 0},        {8, 6, "GeForce", 512, 256, 0}, {8, 6, "A10G", 512, 256, 0},
        {8, 6, "", 1024, 256, 0},        {8, 9, "GeForce", 512, 256, 0}, {8, 9, "L40S", 1024, 256, 2.49},
        {8, 9, "L40", 512, 256, 0},      {8, 9, "", 1024, 256, 0},       {9, 0, "PCIe", 4096, 256, 1.62},
        {9, 0, "NVL", 4096, 256, 1.545}, {9, 0, "", 4096, 256, 1.83},    {10, 0, "", 8192, 256, 1.856},
        {12, 0, "GeForce", 512, 256, 0}, {12, 0, "", 1024, 256, 0}};
    for (const DeviceRate &row : ROWS)
        if (row.major == d->major && row.minor == d->minor && strstr(d->name, row.name)) return &row;
    return NULL;
}

// Peak of dense products with sums in float32, FLOP/s: processors x clock x what one does in a clock. Under load a GPU
// may hold a lower clock.
static inline double device_peak(const Device *d, bool bf16) {
    const DeviceRate unknown = {0, 0, "", 1024, 256, 0}, *found = device_rate(d), *rate = found ? found : &unknown;
    double clock = bf16 && rate->bf16_clock > 0 ? 1e9 * rate->bf16_clock : d->clock;
    return d->processors * clock * (bf16 ? rate->bf16 : rate->fp32);
}

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
    if (!device_rate(&d))
        warn(
            "the peak of %s, compute capability %d.%d, is not known: \"of peak\" takes 1024 FLOP a clock and processor in bf16, 256 in float32.",
            d.name, d.major, d.minor);
    return d;
}

#endif

// This rank's GPU: selection, name and peak throughput.
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

typedef struct {
    char name[256];
    int major, minor, processors;    // compute capability; number of SMs
    double clock;                    // the highest, in Hz
} Device;

// Collective. Rank r of a machine uses device r of those that it sees, counting on from 0 if it sees fewer. Ends with
// EXIT_PEER if it sees none, and with EXIT_USAGE if two ranks have the same GPU.
void device_start(void);

// Describes the current device. Warns if its peak is unknown.
Device device_read(void);

// Returns the peak of dense matmuls with float32 sums in FLOP/s: SMs x clock x FLOP per clock and SM. Under load, a GPU
// may run at a lower clock.
double device_peak(const Device *device, bool bf16);

#endif

// The machine's peak, against which mfu is measured.
#ifndef RUNTIME_PEAK_H
#define RUNTIME_PEAK_H

#include <stdbool.h>

// Floating-point operations a second that all OpenMP threads of this process reach together in float32 fused multiply-adds held in
// registers: the best of several short runs, about 30 ms in all. With bf16, twice that where the processor has AVX512-BF16 or
// AMX-BF16 (a dot-product instruction does twice the work of an FMA), else the same.
double peak_flops(bool bf16);

#endif

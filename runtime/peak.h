// The machine's peak, against which mfu is measured.
#ifndef RUNTIME_PEAK_H
#define RUNTIME_PEAK_H

#include <stdbool.h>

// Floating-point operations a second that all OpenMP threads of this process reach together in float32 fused
// multiply-adds held in registers: the best of several short runs, about 50 ms in all, and of the calls before. (A
// moment in which a virtual machine's processors share a core finds half of it: so it is called more than once, with
// other work in between.) With bf16, what the widest instruction does a cycle against a float32 FMA: twice that with
// AVX512-BF16, 16 times with AMX-BF16, else the same. Processes on one machine have a peak each: add them up.
double peak_flops(bool bf16);

#endif

// The machine's peak throughput, the denominator of MFU.
#ifndef MATH_PEAK_H
#define MATH_PEAK_H

#include <stdbool.h>

// Returns the float32 FLOP/s that all OpenMP threads of this process reach together with fused multiply-adds on
// registers: the best of several short runs, about 3 ms in total, and of earlier calls. *best keeps it from call to
// call; set it to 0 before the first. Call this more than once, with other work in between: while a virtual machine's
// processors share a core, a measurement finds only half the peak. With bf16, the float32 result is multiplied by the
// ratio of the widest instructions' FLOPs per cycle: 2 with AVX512-BF16, 16 with AMX-BF16, otherwise 1. The ranks on
// one machine each have their own peak; add them up.
double peak_flops(double *best, bool bf16);

#endif

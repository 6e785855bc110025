// A weight matrix times each of a few vectors, for decoding. Reading the weights dominates the time here, so each is
// read from memory once for all rows, in order. Each element is its own sum in a fixed order, so a sequence's numbers
// never depend on how many others are decoded with it; a GEMM library's tiles do not guarantee that.
#ifndef MATH_GEMV_H
#define MATH_GEMV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Decoding shares a loop among the threads from this many multiplications on. Below, waking the others takes longer
// than the loop, and far longer on a busy machine, where each loop waits until all of them get a core.
enum { SHARED_WORK = 1 << 16 };

// out[n,o] = sum_c inp[n,c] weight[o,c] (+ out[n,o] when add)
//   out (N,OC) written or added to   inp (N,C)   weight (OC,C); `rounded`, in bfloat16, replaces it unless NULL
void gemv(float *out, const float *inp, const float *weight, const uint16_t *rounded, size_t N, size_t C, size_t OC,
          bool add);

#endif

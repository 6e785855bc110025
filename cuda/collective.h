// Collective operations over the GPUs of a data-parallel run, by NCCL, on a stream of their own that runs concurrently
// with the computation. With a single rank there is no Collective, and all functions accept NULL. A build without NCCL
// (make NCCL=0) supports only one rank.
//
// For ZeRO-1, an array of n floats is divided into one slice per rank, and each rank reduces and updates its own slice.
// All slices have the same length, a multiple of 64, except that the last rank's slice also has the remainder of the
// array (all of it if the array is short).
//
// While a rank waits here, it watches the others. If a rank on the same machine dies, the run ends within two seconds;
// if one on another machine dies, it ends once NCCL notices the lost connection. Both end with a message, unless a
// launcher that kills all ranks when one fails is faster. Ranks and machines that fall silent without dying are the
// business of runtime/heartbeat.h. Ranks that are alive but never reach the same operation time out after
// COLLECTIVE_PATIENCE. Tests: dev/tests/test_collective.cu.
#ifndef CUDA_COLLECTIVE_H
#define CUDA_COLLECTIVE_H

#include <cuda_runtime.h>
#include <stddef.h>

typedef struct Collective Collective;

// Collective; call it after process_start() and after selecting a device. Returns NULL with a single rank. With
// `in_bf16`, gradients are transferred and summed as bf16. Ends with EXIT_USAGE if there are several ranks but no NCCL.
Collective *collective_start(bool in_bf16);
void collective_end(Collective *collective);

// Sets from <= i < to, this rank's slice of n floats.
void collective_slice(size_t n, size_t *from, size_t *to);

// The bytes of device memory that the functions below need for arrays of up to n floats; may be 0. Pass that memory,
// aligned to 16 bytes, to collective_use() before the first of them.
size_t collective_scratch(const Collective *collective, size_t n);
void collective_use(Collective *collective, void *scratch);

// ---- Each of these returns at once. The operation starts when `stream` reaches the call.

// x (n) = its sum over the ranks
void collective_all_reduce(Collective *collective, float *x, size_t n, cudaStream_t stream);

// This rank's slice of x (n) = its sum over the ranks. The rest of x becomes undefined.
void collective_reduce_scatter(Collective *collective, float *x, size_t n, cudaStream_t stream);

// x (n) = all ranks' slices of it, transferred as float32
void collective_all_gather(Collective *collective, float *x, size_t n, cudaStream_t stream);

// Makes later work in `stream` wait for all results.
void collective_join(Collective *collective, cudaStream_t stream);

// Waits on the host until `stream` is done, and watches the other ranks meanwhile. Call it before any copy to memory
// that is not pinned, which would wait without watching them.
void collective_synchronize(Collective *collective, cudaStream_t stream);

#endif

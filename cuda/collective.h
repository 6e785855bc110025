// Collective operations over the GPUs of a data-parallel run, by NCCL, on a stream of their own that runs concurrently
// with the computation. With a single rank there is no Collective, and all functions accept NULL. A build without NCCL
// (make NCCL=0) supports only one rank.
//
// For ZeRO-1, the array of all parameters is cut at tensors into parts, and each part has an owner, the rank that gets
// the sum of its gradients and updates it. No tensor is divided, so an update rule may work on a whole matrix.
//
// While a rank waits here, it watches the others. If a rank on the same machine dies, the run ends within two seconds;
// if one on another machine dies, it ends once NCCL notices the lost connection. Both end with a message, unless a
// launcher that kills all ranks when one fails is faster. Ranks and machines that fall silent without dying, or whose
// main thread hangs, are the business of runtime/heartbeat.h. Without a heartbeat, ranks that never reach the same
// operation time out after `patience` seconds. Tests: dev/tests/test_collective.cu.
#ifndef CUDA_COLLECTIVE_H
#define CUDA_COLLECTIVE_H

#include <cuda_runtime.h>
#include <stddef.h>

typedef struct Collective Collective;

enum { COLLECTIVE_JOINS = 8 };    // see collective_wait()

// Sets NCCL's environment, so call it before anything starts a thread. Returns NULL, or in a build without NCCL its
// name, for process_check_build().
const char *collective_prepare(void);

// Collective; call it after process_start() and after selecting a device. Returns NULL with a single rank. With
// `in_bf16`, gradients are transferred and summed as bf16. patience: 0 waits forever.
Collective *collective_start(bool in_bf16, double patience);
void collective_end(Collective *collective);

// The floats x[from] to x[from + floats - 1] of an array.
typedef struct {
    size_t from, floats;
    int owner;        // a rank
    size_t memory;    // bytes that only the owner needs
} CollectivePart;

// Sets the owners of `count` parts such that each of `ranks` ranks owns about the same number of floats. The largest
// part goes first, each to the rank that owns the least so far. The largest share is then at most 4/3 of what the best
// choice of owners would give (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Rank 0 needs the most
// memory for its parts, so that no rank needs more than the plan that rank 0 prints. With more ranks than parts, some
// ranks own nothing. All ranks come to the same result without communication, because it depends on the arguments
// alone.
void collective_assign_owners(CollectivePart *parts, size_t count, int ranks);

// The bytes of device memory that the functions below need for arrays of up to n floats; may be 0. Pass that memory,
// aligned to 16 bytes, to collective_use() before the first of them.
size_t collective_scratch(const Collective *collective, size_t n);
void collective_use(Collective *collective, void *scratch);

// ---- Each of these returns at once. The operation starts when `stream` reaches the call.

// x (n) = its sum over the ranks
void collective_all_reduce(Collective *collective, float *x, size_t n, cudaStream_t stream);

// The same for doubles, which are never transferred as bf16.
void collective_sum(Collective *collective, double *x, size_t n, cudaStream_t stream);

// The parts of x that this rank owns = their sums over the ranks. The other parts become undefined. `parts` (count)
// must be the same on every rank, in the order of the array, without gaps or overlaps between them.
void collective_reduce_parts(Collective *collective, float *x, const CollectivePart *parts, size_t count,
                             cudaStream_t stream);

// All parts of x, which is bf16 or float, = what their owners have there. `parts` as above.
void collective_gather_parts(Collective *collective, void *x, bool in_bf16, const CollectivePart *parts, size_t count,
                             cudaStream_t stream);

// Records `event` when the operations so far are done. Later work in a stream that waits for it may use their results.
// After the last of several such waits comes collective_join(), as after any other operation.
void collective_record(Collective *collective, cudaEvent_t event);

// Makes later work in `stream` wait for all results.
void collective_join(Collective *collective, cudaStream_t stream);

// ---- These wait on the host, and watch the other ranks meanwhile.

// Waits until `stream` is done. Call it before any copy to memory that is not pinned, which would wait without
// watching.
void collective_synchronize(Collective *collective, cudaStream_t stream);

// Waits until `event` has happened; later work continues. At most COLLECTIVE_JOINS calls of collective_join() may be
// outstanding.
void collective_wait(Collective *collective, cudaEvent_t event);

#endif

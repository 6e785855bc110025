// CUDA on the CPU, the host side: settings, counts, and custom work in a stream. README.md describes the whole library.
//
// Every setting is read from the environment before main(), from the variable next to it. The program may change it
// between launches:
//     cuda_on_cpu::settings().order = cuda_on_cpu::REVERSE;
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <functional>

namespace cuda_on_cpu {

// Which thread runs next when one waits. FORWARD: in increasing order of thread number; REVERSE: in decreasing order;
// RANDOM: any; GREEDY: one warp as far as it gets, then another random one. Blocks start in the same order.
enum Order { FORWARD, REVERSE, RANDOM, GREEDY };

// When a cp.async takes place: when it is issued, only when it is waited for, or either at random.
enum Copy { AT_ISSUE, AT_WAIT, EITHER };

// When work in a stream takes place. AT_ONCE: immediately. LATE: only when the host waits for something, and then from
// random streams that can continue, until what the host waits for is done. ANY_TIME: like LATE, but some of it is done
// earlier, at random, in other calls.
enum Streams { AT_ONCE, LATE, ANY_TIME };

// How mma adds. SUMS_NEAREST: one product after another, each time rounded to nearest as a float; SUMS_HOPPER: like an
// H100's tensor cores (README.md).
enum MmaSums { SUMS_NEAREST, SUMS_HOPPER };

struct Settings {
    Order order;        // CUDA_ON_CPU_ORDER     forward | reverse | random | greedy
    uint64_t seed;      // CUDA_ON_CPU_SEED      the seed of everything random here
    Copy copy;          // CUDA_ON_CPU_COPY      issue | wait | either
    Streams streams;    // CUDA_ON_CPU_STREAMS   once | late | any
    MmaSums mma;        // CUDA_ON_CPU_MMA       nearest | hopper
    bool poison;        // CUDA_ON_CPU_POISON    1: fill shared memory and new device memory with NaNs
    // CUDA_ON_CPU_HIDE      1: only kernels and copies can access device memory; slow.
    bool hide;
    // CUDA_ON_CPU_THREADS   CPU threads over which blocks are spread; default: all.
    int threads;
    // CUDA_ON_CPU_STACK     bytes of stack per CUDA thread; read at a CPU thread's first launch.
    size_t stack;
    size_t memory;    // CUDA_ON_CPU_MEMORY    bytes of device memory
    size_t shared;    // CUDA_ON_CPU_SHARED    bytes of shared memory that a block may have
    int devices;      // CUDA_ON_CPU_DEVICES   number of devices; each process may use one of them
    // CUDA_ON_CPU_WATCHED   number of blocks of each launch that the race check, which is slow, watches; default: all.
    uint64_t watched;
    bool report;    // CUDA_ON_CPU_REPORT    1: print counts when the program ends
};
Settings &settings();

// Counts since the start or the last counts_reset(). A conflict is one more pass than the fewest possible through
// shared memory's 32 banks: ldmatrix takes one pass for each matrix (8 rows), cp.async one for each 8 lanes.
struct Counts {
    uint64_t launches, blocks, barriers, collectives, mmas, ldmatrix, ldmatrix_conflicts, copies, copy_conflicts;
};
Counts counts();
void counts_reset();
void counts_print(FILE *file);    // also prints the conflicts of each source line

// Enqueues `work` in the stream, like a kernel, for libraries that are emulated on top of this one. The race check only
// sees the accesses that it declares with reads() and writes().
void enqueue(cudaStream_t stream, std::function<void()> work);

// The same for work that may have to wait for another process: `attempt` is called until it returns true, whenever the
// host waits for the stream or queries it. Later work in the stream is not done before, not even with AT_ONCE.
void enqueue_until(cudaStream_t stream, std::function<bool()> attempt);

// Declares, for work in a stream or an attempt, that `rows` pieces of `bytes` from p on, `step` bytes apart, are read
// or written.
void reads(const void *p, size_t bytes, size_t rows = 1, size_t step = 0);
void writes(void *p, size_t bytes, size_t rows = 1, size_t step = 0);

// Are all bytes at p device memory or pinned host memory, which kernels may access?
bool is_device(const void *p, size_t bytes);

// Prints a message and ends the program with abort(), so that a debugger shows where.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

}
#endif

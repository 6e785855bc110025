// CUDA on the CPU, as a program's host side sees it: settings, counts, and work of one's own in a stream. README.md has
// the whole.
//
// Every setting is read from the environment before main() (the variable beside it), and may be changed by the program
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

// Who runs next when a thread waits. FORWARD: threads by rising number, round and round; REVERSE: by falling; RANDOM:
// anyone; GREEDY: one warp as far as it comes, then another at random. Blocks start in the same order.
enum Order { FORWARD, REVERSE, RANDOM, GREEDY };

// When a cp.async takes place: at its issue, only in the wait for it, or each by the toss of a coin.
enum Copy { AT_ISSUE, AT_WAIT, EITHER };

// When work given to a stream takes place: at once; LATE: only when the host waits for something, and then from streams
// that can go on, at random, until that has come; ANY_TIME: as LATE, but by the toss of a coin some of it is done at
// the next call already.
enum Streams { AT_ONCE, LATE, ANY_TIME };

// How mma adds. SUMS_NEAREST: each product to the sum, rounded to nearest as floats are; SUMS_HOPPER: as an H100's
// tensor cores do (README.md).
enum MmaSums { SUMS_NEAREST, SUMS_HOPPER };

struct Settings {
    Order order;        // CUDA_ON_CPU_ORDER     forward | reverse | random | greedy
    uint64_t seed;      // CUDA_ON_CPU_SEED      for all that is random here
    Copy copy;          // CUDA_ON_CPU_COPY      issue | wait | either
    Streams streams;    // CUDA_ON_CPU_STREAMS   once | late | any
    MmaSums mma;        // CUDA_ON_CPU_MMA       nearest | hopper
    bool poison;        // CUDA_ON_CPU_POISON    1: shared memory and new device memory are NaNs
    // CUDA_ON_CPU_HIDE      1: device memory cannot be touched but by kernels and copies; slow.
    bool hide;
    // CUDA_ON_CPU_THREADS   of the CPU, over which blocks are spread; default: as many as there are.
    int threads;
    // CUDA_ON_CPU_STACK     bytes of stack for each CUDA thread; read at a CPU thread's first launch.
    size_t stack;
    size_t memory;    // CUDA_ON_CPU_MEMORY    bytes of device memory there are
    size_t shared;    // CUDA_ON_CPU_SHARED    bytes of shared memory that a block may have
    int devices;      // CUDA_ON_CPU_DEVICES   there are; a process is meant to use one of them
    // CUDA_ON_CPU_WATCHED   blocks of each launch that the race check watches, which takes long; default: all.
    uint64_t watched;
    bool report;    // CUDA_ON_CPU_REPORT    1: counts are printed when the program ends
};
Settings &settings();

// What happened since the start or the last counts_reset(). A conflict is one more pass that the shared memory's 32
// banks need beyond the fewest possible: ldmatrix takes a pass for each matrix (8 rows), cp.async for each 8 lanes.
struct Counts {
    uint64_t launches, blocks, barriers, collectives, mmas, ldmatrix, ldmatrix_conflicts, copies, copy_conflicts;
};
Counts counts();
void counts_reset();
void counts_print(FILE *file);    // and the conflicts of each line of source

// `work` as the next thing in the stream, like a kernel: for libraries that are emulated on top of this one. The race
// check sees of it what it says by reads() and writes().
void enqueue(cudaStream_t stream, std::function<void()> work);

// The same for work that may have to wait for another process: `attempt` is called until it returns true, whenever the
// host waits for the stream or asks how far it is. Nothing behind it in the stream is done before, under AT_ONCE
// neither.
void enqueue_until(cudaStream_t stream, std::function<bool()> attempt);

// Of work in a stream, or of an attempt: `rows` pieces of `bytes` from p on, `step` bytes apart, are read or written.
void reads(const void *p, size_t bytes, size_t rows = 1, size_t step = 0);
void writes(void *p, size_t bytes, size_t rows = 1, size_t step = 0);

// Whether all of the bytes at p are device memory or pinned host memory: what a kernel may touch.
bool is_device(const void *p, size_t bytes);

// Prints a message and ends the program by abort(), so that a debugger shows where.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

}
#endif

// CUDA on the CPU, for a program's host code: settings, counts, and custom work in a stream. README.md describes the
// whole library.
//
// Every setting is read from the environment before main(), from the variable named beside it, and the program may
// change it between launches:
//     cuda_on_cpu::settings().order = cuda_on_cpu::REVERSE;
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <functional>
#include <string>

namespace cuda_on_cpu {

// The values of settings, in the order in which README.md describes them.
enum Order { FORWARD, REVERSE, RANDOM, GREEDY, STRAGGLER, LAGGARDS };
enum Copy { AT_ISSUE, AT_WAIT };
enum AsyncTime { AT_RANDOM, EARLY, LAST };
enum Suspend { IN_WAITS, OFTEN };
enum Streams { AT_ONCE, LATE, ANY_TIME };
enum MmaSums { SUMS_NEAREST, SUMS_HOPPER };

struct Settings {
    Order order;             // CUDA_ON_CPU_ORDER       forward | reverse | random | greedy | straggler | laggards
    uint64_t seed;           // CUDA_ON_CPU_SEED        of everything random
    Copy copy;               // CUDA_ON_CPU_COPY        issue | wait
    AsyncTime async;         // CUDA_ON_CPU_ASYNC       random | issue | wait
    Suspend suspend;         // CUDA_ON_CPU_SUSPEND     waiting | often
    Streams streams;         // CUDA_ON_CPU_STREAMS     once | late | any
    MmaSums mma;             // CUDA_ON_CPU_MMA         nearest | hopper
    int threads;             // CUDA_ON_CPU_THREADS     CPU threads over which blocks are spread
    size_t memory;           // CUDA_ON_CPU_MEMORY      bytes of device memory
    int capability;          // CUDA_ON_CPU_CAPABILITY  the compute capability times 10
    size_t shared;           // CUDA_ON_CPU_SHARED      bytes of shared memory that a block may have
    int devices;             // CUDA_ON_CPU_DEVICES     number of devices; a process should use one of them
    uint64_t resident;       // CUDA_ON_CPU_RESIDENT    blocks that may have started and not ended at a time
    uint64_t processors;     // CUDA_ON_CPU_PROCESSORS  number of multiprocessors
    bool report;             // CUDA_ON_CPU_REPORT      1: counts are printed when the program ends
    const char *schedule;    // CUDA_ON_CPU_SCHEDULE    a file for the operations of all streams; NULL: none
};
Settings &settings();

// Counts since the start or the last counts_reset(). A conflict is a pass of the 32 banks of shared memory beyond the
// minimum: ldmatrix needs at least one pass per matrix (8 rows), cp.async one per 8 lanes. waits: how often the host
// waited for work that was not done yet, by a call or by a loop of queries; idle_waits: those after which no stream had
// work left, so that a device would be idle until the host queues more. With settings().streams AT_ONCE, work is done
// in the calls, and only work that waits for another process is waited for. graphs: launches of graphs, whose kernels
// are among the launches, too.
struct Counts {
    uint64_t launches, blocks, barriers, collectives, mmas, ldmatrix, ldmatrix_conflicts, copies, copy_conflicts;
    uint64_t stmatrix, stmatrix_conflicts, wgmmas, bulk_copies, waits, idle_waits, graphs;
};
Counts counts();
void counts_reset();
// Prints them, with the conflicts of each source line, the launches of each kernel, and the calls and bytes of copies,
// fills and the libraries on top.
void counts_print(FILE *file);

// What counts_print() counts, of a library, a copy or a fill; without a name nothing.
struct Call {
    std::string name;
    size_t bytes;
    bool kernel = false;    // a launch of a kernel, which the report counts when it takes place
};

// Enqueues `work` in the stream, like a kernel; for libraries that are emulated on top of this one. The race check sees
// only what `work` declares by reads() and writes(). If the stream is being captured, each launch of the graph does the
// work, and counts the call.
void enqueue(cudaStream_t stream, std::function<void()> work, const Call &call = {});

// The same for work that may have to wait for another process: whenever the host waits for the stream or queries it,
// `attempt` is called, until it returns true. Later work in the stream waits for that, even under AT_ONCE. It cannot be
// captured in a graph.
void enqueue_until(cudaStream_t stream, std::function<bool()> attempt, const Call &call = {});

// Declare, inside work or an attempt, that it reads or writes `rows` pieces of `bytes` each, starting at p, `step`
// bytes apart.
void reads(const void *p, size_t bytes, size_t rows = 1, size_t step = 0);
void writes(void *p, size_t bytes, size_t rows = 1, size_t step = 0);

// True if all bytes at p are device memory or pinned host memory, which a kernel may touch.
bool is_device(const void *p, size_t bytes);

// Prints a message and calls abort(), so that a debugger stops there.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

}
#endif

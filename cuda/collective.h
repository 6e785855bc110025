// Sums and copies over the GPUs of a data-parallel run, by NCCL, on a stream of their own beside what is computed. One
// process, or a build without NCCL (make NCCL=0): nothing here does anything.
//
// An array of n floats is divided into slices, one a process, for ZeRO-1: each process sums, and updates, its own.
// Slices are of equal length, a multiple of 64; what is left at the end of the array (all of it, where it is short) is
// in the last process's slice.
//
// A process that waits here watches the others: one that died on the same machine ends the run within two seconds, one
// elsewhere when NCCL notices its connection, both with a message; a launcher that kills all when one fails may be
// faster still. A process or machine that falls silent without dying is the heartbeat's business (runtime/heartbeat.h).
// COLLECTIVE_PATIENCE is for processes that are alive and never reach the same sum.
// Tests: dev/tests/test_collective.cu.
#ifndef CUDA_COLLECTIVE_H
#define CUDA_COLLECTIVE_H

#include "cuda/gpu.cuh"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda/check.h"
#include "runtime/process.h"

// This process's slice of n floats: from `from` up to `to`.
static inline void collective_slice(size_t n, size_t *from, size_t *to) {
    size_t each = n / (size_t)process.size / 64 * 64, rank = (size_t)process.rank;
    *from = each * rank;
    *to = process.rank == process.size - 1 ? n : each * (rank + 1);
}

#ifdef USE_NCCL
#include <nccl.h>

typedef struct {
    int pid;    // 0: not on this machine, or out of sight
    unsigned long long started;
} CollectivePeer;

struct Collective {
    ncclComm_t comm;
    cudaStream_t stream;
    cudaEvent_t ready, done;    // the last array given; the last result
    bool in_bf16;
    bf16 *wire;    // a copy of the gradients on their way
    CollectivePeer *peers;
    double since;    // when waiting for the others began; 0: this process is not
};

inline Collective collective;

#define NCCL_CHECK(call) nccl_check((call), #call, __FILE__, __LINE__)

static inline void nccl_check(ncclResult_t result, const char *call, const char *file, int line) {
    if (result == ncclSuccess) return;
    fail(EXIT_PEER, "process %d: %s:%d: %s failed: %s. %s", process.rank, file, line, call, ncclGetErrorString(result),
         ncclGetLastError(collective.comm));
}

// ---- who is there, and still alive

// When a process started, in clock ticks since the machine did; 0: it is not there, or dead.
static inline unsigned long long collective_started(int pid) {
    char path[64], text[1024], state = 0;
    unsigned long long started = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    char *after = strrchr(text, ')');    // the name before it may have anything in it
    if (!after || sscanf(after + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                         &state, &started) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : started;
}

// A number for the machine and its space of process ids: processes that have the same can see each other.
static inline double collective_place(void) {
    char text[256] = "", space[128] = "";
    uint64_t hash = 14695981039346656037u;
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) {
        text[fread(text, 1, sizeof text / 2, file)] = 0;
        fclose(file);
    }
    if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) space[0] = 0;
    strcat(text, space);
    for (const char *c = text; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    return (double)(hash >> 16);
}

// Fills the table of peers, from what each process says of itself.
static inline void collective_meet(void) {
    size_t n = (size_t)process.size;
    double *all = (double *)calloc(3 * n, sizeof *all);
    collective.peers = (CollectivePeer *)calloc(n, sizeof *collective.peers);
    if (!all || !collective.peers) fail(EXIT_RESOURCE, "out of memory for a table of %zu processes.", n);
    double *mine = all + 3 * process.rank;
    mine[0] = collective_place(), mine[1] = getpid(), mine[2] = (double)collective_started(getpid());
    process_sum_double(all, 3 * n);
    for (size_t r = 0; r < n; r++) {
        const double *other = all + 3 * r;
        bool seen = other[0] == mine[0] && other[2] > 0 && (double)collective_started((int)other[1]) == other[2];
        if (seen) collective.peers[r] = {(int)other[1], (unsigned long long)other[2]};
    }
    free(all);
}

static inline void collective_fail(const char *what) {
    ncclCommAbort(collective.comm);    // else its kernel would wait on
    fail(EXIT_PEER, "process %d: %s\n  See its message above, if there is one, then go on with --resume.", process.rank,
         what);
}

enum { COLLECTIVE_PATIENCE = 600 };    // seconds for which this process waits for others that seem to be there

// Ends with EXIT_PEER where another process has died, or NCCL says that the connection has.
static inline void collective_watch(double now) {
    char text[256];
    ncclResult_t error = ncclSuccess;
    for (int r = 0; r < process.size; r++) {
        const CollectivePeer *peer = &collective.peers[r];
        if (!peer->pid || collective_started(peer->pid) == peer->started) continue;
        snprintf(text, sizeof text, "process %d (pid %d, on this machine) has died.", r, peer->pid);
        collective_fail(text);
    }
    NCCL_CHECK(ncclCommGetAsyncError(collective.comm, &error));
    if (error != ncclSuccess && error != ncclInProgress) {
        snprintf(text, sizeof text, "NCCL lost another process: %s.", ncclGetErrorString(error));
        collective_fail(text);
    }
    if (cudaEventQuery(collective.ready) != cudaSuccess || cudaEventQuery(collective.done) == cudaSuccess)
        collective.since = now;
    if (now - collective.since > COLLECTIVE_PATIENCE) {
        snprintf(text, sizeof text, "the other processes have not come to the same sum for %d s.", COLLECTIVE_PATIENCE);
        collective_fail(text);
    }
}

// ---- start and end

// After process_start() and the choice of a device, by all processes. `in_bf16`: gradients travel, and are added up, as
// bf16.
static inline void collective_start(bool in_bf16) {
    ncclUniqueId id;
    int least, greatest;
    if (process.size == 1) return;
    memset(&id, 0, sizeof id);
    if (process.rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    process_broadcast(&id, sizeof id);
    NCCL_CHECK(ncclCommInitRank(&collective.comm, process.size, id, process.rank));
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&collective.stream, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&collective.ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&collective.done, cudaEventDisableTiming));
    collective.in_bf16 = in_bf16;
    collective_meet();
}

// Bytes of device memory that the sums of arrays of up to n floats need, and the memory for them, aligned to 16, before
// the first sum.
static inline size_t collective_scratch(size_t n) {
    return collective.in_bf16 ? n * sizeof(bf16) : 0;
}

static inline void collective_use(void *scratch) {
    collective.wire = (bf16 *)scratch;
}

static inline void collective_end(void) {
    if (process.size == 1) return;
    NCCL_CHECK(ncclCommDestroy(collective.comm));
    CUDA_CHECK(cudaEventDestroy(collective.ready));
    CUDA_CHECK(cudaEventDestroy(collective.done));
    CUDA_CHECK(cudaStreamDestroy(collective.stream));
    free(collective.peers);
    collective = Collective();
}

// ---- gradients as bf16 and back: 6 bytes moved each way for each float, one a thread, since an array may start
// anywhere
// registers: at most 32 (collective_round_kernel, collective_widen_kernel)

static KERNEL void collective_round_kernel(bf16 *wire, const float *x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) wire[i] = __float2bfloat16_rn(x[i]);
}

static KERNEL void collective_widen_kernel(float *x, const bf16 *wire, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = to_float(wire[i]);
}

static inline dim3 collective_grid(size_t n) {
    return dim3((unsigned)((n + 255) / 256));
}

// ---- what the trainer calls; each returns at once

// What `stream` has been given so far comes before what is given next.
static inline void collective_begin(cudaStream_t stream) {
    CUDA_CHECK(cudaEventRecord(collective.ready, stream));
    CUDA_CHECK(cudaStreamWaitEvent(collective.stream, collective.ready, 0));
}

static inline void collective_finish(void) {
    CUDA_CHECK(cudaEventRecord(collective.done, collective.stream));
}

// x (n) = its sum over the processes, when `stream` has come to this call
static inline void collective_all_reduce(float *x, size_t n, cudaStream_t stream) {
    if (process.size == 1 || n == 0) return;
    collective_begin(stream);
    if (collective.in_bf16) {
        launch(collective_round_kernel, collective_grid(n), dim3(256), 0, collective.stream, collective.wire, x, n);
        NCCL_CHECK(ncclAllReduce(collective.wire, collective.wire, n, ncclBfloat16, ncclSum, collective.comm,
                                 collective.stream));
        launch(collective_widen_kernel, collective_grid(n), dim3(256), 0, collective.stream, x, collective.wire, n);
    } else {
        NCCL_CHECK(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, collective.comm, collective.stream));
    }
    collective_finish();
}

// The same for this process's slice of x (n); the rest of x is of no use then.
static inline void collective_reduce_scatter(float *x, size_t n, cudaStream_t stream) {
    size_t from, to, each = n / (size_t)process.size / 64 * 64, left = n - each * (size_t)process.size;
    if (process.size == 1 || n == 0) return;
    collective_slice(n, &from, &to);
    collective_begin(stream);
    ncclDataType_t type = collective.in_bf16 ? ncclBfloat16 : ncclFloat32;
    size_t element = collective.in_bf16 ? sizeof(bf16) : sizeof(float);
    char *all = collective.in_bf16 ? (char *)collective.wire : (char *)x, *rest = all + (n - left) * element;
    if (collective.in_bf16)
        launch(collective_round_kernel, collective_grid(n), dim3(256), 0, collective.stream, collective.wire, x, n);
    NCCL_CHECK(ncclGroupStart());
    if (each)
        NCCL_CHECK(
            ncclReduceScatter(all, all + from * element, each, type, ncclSum, collective.comm, collective.stream));
    if (left)
        NCCL_CHECK(ncclReduce(rest, rest, left, type, ncclSum, process.size - 1, collective.comm, collective.stream));
    NCCL_CHECK(ncclGroupEnd());
    if (collective.in_bf16 && to > from)
        launch(collective_widen_kernel, collective_grid(to - from), dim3(256), 0, collective.stream, x + from,
               collective.wire + from, to - from);
    collective_finish();
}

// x (n) = every process's slice of it, as float32
static inline void collective_all_gather(float *x, size_t n, cudaStream_t stream) {
    size_t from, to, each = n / (size_t)process.size / 64 * 64, left = n - each * (size_t)process.size;
    if (process.size == 1 || n == 0) return;
    collective_slice(n, &from, &to);
    collective_begin(stream);
    NCCL_CHECK(ncclGroupStart());
    if (each) NCCL_CHECK(ncclAllGather(x + from, x, each, ncclFloat32, collective.comm, collective.stream));
    if (left)
        NCCL_CHECK(ncclBroadcast(x + n - left, x + n - left, left, ncclFloat32, process.size - 1, collective.comm,
                                 collective.stream));
    NCCL_CHECK(ncclGroupEnd());
    collective_finish();
}

// What `stream` is given from here on comes after all results.
static inline void collective_join(cudaStream_t stream) {
    if (process.size > 1) CUDA_CHECK(cudaStreamWaitEvent(stream, collective.done, 0));
}

static inline double collective_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The host waits until `stream` has done everything, and watches the other processes meanwhile. (A copy to memory that
// is not pinned waits, too, but watches nobody: call this before it.)
static inline void collective_synchronize(cudaStream_t stream) {
    if (process.size == 1) {
        CUDA_CHECK(cudaStreamSynchronize(stream));
        return;
    }
    double watched = collective_now();
    collective.since = watched;
    for (;;) {
        cudaError_t state = cudaStreamQuery(stream);
        if (state == cudaSuccess) return;
        if (state != cudaErrorNotReady) CUDA_CHECK(state);
        double now = collective_now();
        if (now - watched > 1) collective_watch(now), watched = now;
        usleep(20);
    }
}

#else

static inline void collective_start(bool) {
    if (process.size > 1)
        fail(EXIT_USAGE,
             "there are %d processes, but this program was built without NCCL.\n"
             "  scripts/setup_cuda.sh brings it; then run make again, or start one process.",
             process.size);
}

static inline size_t collective_scratch(size_t) {
    return 0;
}
static inline void collective_use(void *) {}
static inline void collective_end(void) {}
static inline void collective_all_reduce(float *, size_t, cudaStream_t) {}
static inline void collective_reduce_scatter(float *, size_t, cudaStream_t) {}
static inline void collective_all_gather(float *, size_t, cudaStream_t) {}
static inline void collective_join(cudaStream_t) {}
static inline void collective_synchronize(cudaStream_t stream) {
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

#endif
#endif

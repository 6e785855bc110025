#include "cuda/collective.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/check.h"
#include "cuda/gpu.cuh"
#include "runtime/clock.h"
#include "runtime/process.h"

// The length of every slice but the last, which also has the remainder.
static size_t slice_length(size_t n) {
    return n / (size_t)process.size / 64 * 64;
}

void collective_slice(size_t n, size_t *from, size_t *to) {
    size_t each = slice_length(n), rank = (size_t)process.rank;
    *from = each * rank;
    *to = process.rank == process.size - 1 ? n : each * (rank + 1);
}

#ifdef USE_NCCL
#include <nccl.h>

enum { COLLECTIVE_PATIENCE = 600 };    // seconds to wait for ranks that seem to be alive

typedef struct {
    int pid;    // 0 if it is on another machine or invisible from here
    unsigned long long started;
} Peer;

struct Collective {
    ncclComm_t comm;
    cudaStream_t stream;
    cudaEvent_t ready, done;    // the last input is ready; the last result is done
    bool in_bf16;
    bf16 *wire;      // the scratch memory: gradients as bf16
    Peer *peers;     // by rank
    double since;    // when this rank started to wait for the others
};

#define NCCL_CHECK(call) nccl_check((call), #call, __FILE__, __LINE__)

static void nccl_check(ncclResult_t result, const char *call, const char *file, int line) {
    if (result == ncclSuccess) return;
    fail(EXIT_PEER, "rank %d: %s:%d: %s failed: %s. %s", process.rank, file, line, call, ncclGetErrorString(result),
         ncclGetLastError(NULL));
}

// ---- watching the other ranks

// Returns when a process started, in clock ticks since the machine booted, or 0 if it does not exist or is dead.
static unsigned long long started(int pid) {
    char path[64], text[1024], state = 0;
    unsigned long long ticks = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    char *after = strrchr(text, ')');    // the process name before it may contain anything
    const char *format = " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
    if (!after || sscanf(after + 1, format, &state, &ticks) != 2) return 0;
    return state == 'Z' || state == 'X' ? 0 : ticks;
}

// Returns a number that identifies the machine and its PID namespace: processes with the same number can see each
// other.
static double place(void) {
    char text[256] = "", space[128] = "";
    uint64_t hash = 14695981039346656037u;    // FNV-1a
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

// Exchanges place, PID and start time among all ranks, and fills in the peers that are visible from here.
static void meet(Collective *c) {
    size_t n = (size_t)process.size;
    double *all = (double *)calloc(3 * n, sizeof *all);
    c->peers = (Peer *)calloc(n, sizeof *c->peers);
    if (!all || !c->peers) fail(EXIT_RESOURCE, "out of memory for a table of %zu ranks.", n);
    double *mine = all + 3 * process.rank;
    mine[0] = place();
    mine[1] = getpid();
    mine[2] = (double)started(getpid());
    process_sum_double(all, 3 * n);
    for (size_t r = 0; r < n; r++) {
        const double *other = all + 3 * r;
        bool visible = other[0] == mine[0] && other[2] > 0 && (double)started((int)other[1]) == other[2];
        if (visible) c->peers[r] = {(int)other[1], (unsigned long long)other[2]};
    }
    free(all);
}

static void end_run(Collective *c, const char *what) {
    ncclCommAbort(c->comm);    // otherwise its kernel would keep waiting
    fail(EXIT_PEER, "rank %d: %s\n  See that rank's message above, if there is one, then resume with --resume.",
         process.rank, what);
}

// Ends the program with EXIT_PEER if another rank has died, NCCL reports a lost connection, or the others have not
// reached this operation for too long.
static void watch(Collective *c, double t) {
    char text[256];
    ncclResult_t error = ncclSuccess;
    for (int r = 0; r < process.size; r++) {
        const Peer *peer = &c->peers[r];
        if (!peer->pid || started(peer->pid) == peer->started) continue;
        snprintf(text, sizeof text, "rank %d (pid %d, on this machine) has died.", r, peer->pid);
        end_run(c, text);
    }
    NCCL_CHECK(ncclCommGetAsyncError(c->comm, &error));
    if (error != ncclSuccess && error != ncclInProgress) {
        snprintf(text, sizeof text, "NCCL lost another rank: %s.", ncclGetErrorString(error));
        end_run(c, text);
    }
    if (cudaEventQuery(c->ready) != cudaSuccess || cudaEventQuery(c->done) == cudaSuccess) c->since = t;
    if (t - c->since > COLLECTIVE_PATIENCE) {
        snprintf(text, sizeof text, "timed out after %d s waiting for the other ranks.", COLLECTIVE_PATIENCE);
        end_run(c, text);
    }
}

// ---- start and end

Collective *collective_start(bool in_bf16) {
    ncclUniqueId id;
    int least, greatest;
    if (process.size == 1) return NULL;
    Collective *c = (Collective *)calloc(1, sizeof *c);
    if (!c) fail(EXIT_RESOURCE, "out of memory for the collective operations.");
    memset(&id, 0, sizeof id);
    if (process.rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    process_broadcast(&id, sizeof id);
    NCCL_CHECK(ncclCommInitRank(&c->comm, process.size, id, process.rank));
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&c->ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming));
    c->in_bf16 = in_bf16;
    meet(c);
    return c;
}

void collective_end(Collective *c) {
    if (!c) return;
    NCCL_CHECK(ncclCommDestroy(c->comm));
    CUDA_CHECK(cudaEventDestroy(c->ready));
    CUDA_CHECK(cudaEventDestroy(c->done));
    CUDA_CHECK(cudaStreamDestroy(c->stream));
    free(c->peers);
    free(c);
}

size_t collective_scratch(const Collective *c, size_t n) {
    return c && c->in_bf16 ? n * sizeof(bf16) : 0;
}

void collective_use(Collective *c, void *scratch) {
    if (c) c->wire = (bf16 *)scratch;
}

// ---- gradients to bf16 and back: 6 bytes of memory traffic per float in each direction, one float per thread because
// an array may start anywhere
// registers: at most 32 (collective_round_kernel, collective_widen_kernel)

static KERNEL void collective_round_kernel(bf16 *wire, const float *x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) wire[i] = __float2bfloat16_rn(x[i]);
}

static KERNEL void collective_widen_kernel(float *x, const bf16 *wire, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = to_float(wire[i]);
}

static void to_wire(Collective *c, const float *x, size_t n) {
    launch(collective_round_kernel, dim3((unsigned)((n + 255) / 256)), dim3(256), 0, c->stream, c->wire, x, n);
}

static void from_wire(Collective *c, float *x, const bf16 *wire, size_t n) {
    launch(collective_widen_kernel, dim3((unsigned)((n + 255) / 256)), dim3(256), 0, c->stream, x, wire, n);
}

// ---- the operations

// Makes the next operation wait for all work that `stream` has been given so far.
static void begin(Collective *c, cudaStream_t stream) {
    CUDA_CHECK(cudaEventRecord(c->ready, stream));
    CUDA_CHECK(cudaStreamWaitEvent(c->stream, c->ready, 0));
}

static void finish(Collective *c) {
    CUDA_CHECK(cudaEventRecord(c->done, c->stream));
}

void collective_all_reduce(Collective *c, float *x, size_t n, cudaStream_t stream) {
    if (!c || n == 0) return;
    begin(c, stream);
    if (c->in_bf16) {
        to_wire(c, x, n);
        NCCL_CHECK(ncclAllReduce(c->wire, c->wire, n, ncclBfloat16, ncclSum, c->comm, c->stream));
        from_wire(c, x, c->wire, n);
    } else {
        NCCL_CHECK(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, c->comm, c->stream));
    }
    finish(c);
}

void collective_reduce_scatter(Collective *c, float *x, size_t n, cudaStream_t stream) {
    size_t from, to, each = slice_length(n), left = n - each * (size_t)process.size;
    if (!c || n == 0) return;
    collective_slice(n, &from, &to);
    begin(c, stream);
    ncclDataType_t type = c->in_bf16 ? ncclBfloat16 : ncclFloat32;
    size_t element = c->in_bf16 ? sizeof(bf16) : sizeof(float);
    char *all = c->in_bf16 ? (char *)c->wire : (char *)x, *rest = all + (n - left) * element;
    if (c->in_bf16) to_wire(c, x, n);
    NCCL_CHECK(ncclGroupStart());
    if (each) NCCL_CHECK(ncclReduceScatter(all, all + from * element, each, type, ncclSum, c->comm, c->stream));
    if (left) NCCL_CHECK(ncclReduce(rest, rest, left, type, ncclSum, process.size - 1, c->comm, c->stream));
    NCCL_CHECK(ncclGroupEnd());
    if (c->in_bf16 && to > from) from_wire(c, x + from, c->wire + from, to - from);
    finish(c);
}

void collective_all_gather(Collective *c, float *x, size_t n, cudaStream_t stream) {
    size_t from, to, each = slice_length(n), left = n - each * (size_t)process.size;
    if (!c || n == 0) return;
    collective_slice(n, &from, &to);
    begin(c, stream);
    float *rest = x + n - left;
    NCCL_CHECK(ncclGroupStart());
    if (each) NCCL_CHECK(ncclAllGather(x + from, x, each, ncclFloat32, c->comm, c->stream));
    if (left) NCCL_CHECK(ncclBroadcast(rest, rest, left, ncclFloat32, process.size - 1, c->comm, c->stream));
    NCCL_CHECK(ncclGroupEnd());
    finish(c);
}

void collective_join(Collective *c, cudaStream_t stream) {
    if (c) CUDA_CHECK(cudaStreamWaitEvent(stream, c->done, 0));
}

void collective_synchronize(Collective *c, cudaStream_t stream) {
    if (!c) {
        CUDA_CHECK(cudaStreamSynchronize(stream));
        return;
    }
    double watched = now();
    c->since = watched;
    for (;;) {
        cudaError_t state = cudaStreamQuery(stream);
        if (state == cudaSuccess) return;
        if (state != cudaErrorNotReady) CUDA_CHECK(state);
        double t = now();
        if (t - watched > 1) {
            watch(c, t);
            watched = t;
        }
        usleep(20);
    }
}

#else

Collective *collective_start(bool in_bf16) {
    (void)in_bf16;
    if (process.size > 1)
        fail(EXIT_USAGE,
             "there are %d ranks, but this program was built without NCCL.\n"
             "  Install it with scripts/setup_cuda.sh and rebuild with make, or start a single rank.",
             process.size);
    return NULL;
}

void collective_end(Collective *) {}
size_t collective_scratch(const Collective *, size_t) {
    return 0;
}
void collective_use(Collective *, void *) {}
void collective_all_reduce(Collective *, float *, size_t, cudaStream_t) {}
void collective_reduce_scatter(Collective *, float *, size_t, cudaStream_t) {}
void collective_all_gather(Collective *, float *, size_t, cudaStream_t) {}
void collective_join(Collective *, cudaStream_t) {}
void collective_synchronize(Collective *, cudaStream_t stream) {
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

#endif

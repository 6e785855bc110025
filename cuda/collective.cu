#include "cuda/collective.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/check.h"
#include "cuda/gpu.cuh"
#include "runtime/clock.h"
#include "runtime/file.h"
#include "runtime/activity.h"
#include "runtime/process.h"

// ---- owners

// Orders pointers to parts by size, the largest first; parts of the same size stay in the order of the array.
static int larger_first(const void *a, const void *b) {
    const CollectivePart *x = *(const CollectivePart *const *)a, *y = *(const CollectivePart *const *)b;
    if (x->floats != y->floats) return x->floats > y->floats ? -1 : 1;
    return (x->from > y->from) - (x->from < y->from);
}

// What a rank owns.
typedef struct {
    size_t floats, memory;
    int rank;
} Share;

// The rank that owns the least; the lowest of several.
static int least_owner(const Share *shares, int ranks) {
    int least = 0;
    for (int r = 1; r < ranks; r++)
        if (shares[r].floats < shares[least].floats) least = r;
    return least;
}

static int most_memory_first(const void *a, const void *b) {
    const Share *x = (const Share *)a, *y = (const Share *)b;
    if (x->memory != y->memory) return x->memory < y->memory ? 1 : -1;
    if (x->floats != y->floats) return x->floats < y->floats ? 1 : -1;
    return x->rank - y->rank;
}

void collective_assign_owners(CollectivePart *parts, size_t count, int ranks) {
    CollectivePart **order = (CollectivePart **)allocate(count, sizeof *order, "the owners of tensors");
    Share *shares = (Share *)allocate((size_t)ranks, sizeof *shares, "the owners of tensors");
    int *place = (int *)allocate((size_t)ranks, sizeof *place, "the owners of tensors");
    for (size_t i = 0; i < count; i++) order[i] = &parts[i];
    qsort(order, count, sizeof *order, larger_first);
    for (int r = 0; r < ranks; r++) shares[r].rank = r;
    for (size_t i = 0; i < count; i++) {
        order[i]->owner = least_owner(shares, ranks);
        shares[order[i]->owner].floats += order[i]->floats;
        shares[order[i]->owner].memory += order[i]->memory;
    }
    qsort(shares, (size_t)ranks, sizeof *shares, most_memory_first);
    for (int r = 0; r < ranks; r++) place[shares[r].rank] = r;
    for (size_t i = 0; i < count; i++) parts[i].owner = place[parts[i].owner];
    free(order);
    free(shares);
    free(place);
}

#ifdef USE_NCCL
#include <nccl.h>

typedef struct {
    int pid;    // 0 if it is on another machine or invisible from here
    unsigned long long started;
} Peer;

// The last operation before a join: its input is ready; its result is done.
typedef struct {
    cudaEvent_t ready, done;
} Joined;

struct Collective {
    ncclComm_t comm;
    cudaStream_t stream;
    Joined joins[COLLECTIVE_JOINS];    // in turn
    size_t current;                    // of joins: that of the last operation
    bool joined;                       // is it joined already?
    bool in_bf16;
    bf16 *wire;         // the scratch memory: gradients as bf16
    Peer *peers;        // by rank
    double since;       // when this rank started to wait for the others
    double patience;    // see collective.h
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
    FILE *file = file_open_system(path);
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
    FILE *file = file_open_system("/proc/sys/kernel/random/boot_id");
    if (file) {
        text[fread(text, 1, sizeof text / 2, file)] = 0;
        fclose(file);
    }
    if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) space[0] = 0;
    strcat(text, space);
    return (double)(XXH3_64bits(text, strlen(text)) >> 16);    // a double has 53 bits
}

// Exchanges place, PID and start time among all ranks, and fills in the peers that are visible from here.
static void meet(Collective *c) {
    size_t n = (size_t)process.size;
    double *all = (double *)allocate(3 * n, sizeof *all, "a table of all ranks");
    c->peers = (Peer *)allocate(n, sizeof *c->peers, "a table of all ranks");
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

// Without ncclCommAbort(), which may itself wait for the other ranks.
static void end_run(const char *what) {
    fail(EXIT_PEER, "rank %d: %s\n  See that rank's message above, if there is one, then resume with --resume.",
         process.rank, what);
}

// Is the first operation that is not done waiting for other ranks, rather than for its input? Operations after a join
// get their input only after it, so they cannot tell.
static bool waits_for_others(const Collective *c) {
    for (size_t i = 1; i <= COLLECTIVE_JOINS; i++) {
        const Joined *join = &c->joins[(c->current + i) % COLLECTIVE_JOINS];
        if (cudaEventQuery(join->done) != cudaSuccess) return cudaEventQuery(join->ready) == cudaSuccess;
    }
    return false;
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
        end_run(text);
    }
    NCCL_CHECK(ncclCommGetAsyncError(c->comm, &error));
    if (error != ncclSuccess && error != ncclInProgress) {
        snprintf(text, sizeof text, "NCCL lost another rank: %s.", ncclGetErrorString(error));
        end_run(text);
    }
    bool waits = waits_for_others(c);
    activity_waits(waits ? "NCCL" : NULL);
    if (!waits) c->since = t;
    if (c->patience > 0 && t - c->since > c->patience) {
        snprintf(text, sizeof text, "timed out after %.0f s waiting for the other ranks.", c->patience);
        end_run(text);
    }
}

// ---- start and end

const char *collective_prepare(void) {
    // NCCL would otherwise connect in the first sums, and take device memory after the plan was compared with what is
    // free.
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);
    // NVLink SHARP sums in an order that may differ between runs.
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    return NULL;
}

Collective *collective_start(bool in_bf16, double patience) {
    ncclUniqueId id;
    int least, greatest;
    if (process.size == 1) return NULL;
    Collective *c = (Collective *)allocate(1, sizeof *c, "the collective operations");
    memset(&id, 0, sizeof id);
    if (process.rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    process_broadcast(&id, sizeof id);
    NCCL_CHECK(ncclCommInitRank(&c->comm, process.size, id, process.rank));
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, greatest));
    for (Joined &join : c->joins) {
        CUDA_CHECK(cudaEventCreateWithFlags(&join.ready, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&join.done, cudaEventDisableTiming));
    }
    c->in_bf16 = in_bf16;
    c->patience = patience;
    meet(c);
    return c;
}

void collective_end(Collective *c) {
    if (!c) return;
    NCCL_CHECK(ncclCommDestroy(c->comm));
    for (Joined &join : c->joins) {
        CUDA_CHECK(cudaEventDestroy(join.ready));
        CUDA_CHECK(cudaEventDestroy(join.done));
    }
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

// The first n floats of the wire = x
static void to_wire(Collective *c, const float *x, size_t n) {
    launch(collective_round_kernel, dim3((unsigned)((n + 255) / 256)), dim3(256), 0, c->stream, c->wire, x, n);
}

static void from_wire(Collective *c, float *x, const bf16 *wire, size_t n) {
    launch(collective_widen_kernel, dim3((unsigned)((n + 255) / 256)), dim3(256), 0, c->stream, x, wire, n);
}

// ---- the operations

// Makes the next operation wait for all work that `stream` has been given so far.
static void begin(Collective *c, cudaStream_t stream) {
    if (c->joined) c->current = (c->current + 1) % COLLECTIVE_JOINS;
    c->joined = false;
    cudaEvent_t ready = c->joins[c->current].ready;
    CUDA_CHECK(cudaEventRecord(ready, stream));
    CUDA_CHECK(cudaStreamWaitEvent(c->stream, ready, 0));
}

static void finish(Collective *c) {
    CUDA_CHECK(cudaEventRecord(c->joins[c->current].done, c->stream));
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

void collective_sum(Collective *c, double *x, size_t n, cudaStream_t stream) {
    if (!c || n == 0) return;
    begin(c, stream);
    NCCL_CHECK(ncclAllReduce(x, x, n, ncclFloat64, ncclSum, c->comm, c->stream));
    finish(c);
}

// Joins the parts from `first` on that follow each other and have the same owner.
static CollectivePart run_of_parts(const CollectivePart *parts, size_t count, size_t first, size_t *next) {
    CollectivePart run = parts[first];
    for (*next = first + 1; *next < count && parts[*next].owner == run.owner; ++*next)
        run.floats += parts[*next].floats;
    return run;
}

// One ncclReduce for each run of parts with the same owner, as a group, which NCCL launches together. A single
// ncclReduceScatter would need slices of equal length: every bucket would have to be copied into slices that are padded
// to its largest share, and the embedding's bucket, which has one owner, would become N times as long for N ranks.
//
// The group costs little more. NCCL reduces along a ring that ends at the owner, so each rank sends all parts of the
// bucket but its own. For n floats that are evenly owned this is n (N - 1)/N floats per rank, exactly as in a
// reduce-scatter. For any owners it is at most n, no more than an all-reduce, where each rank sends 2n (N - 1)/N. The
// same holds for ncclBroadcast and an all-gather.
void collective_reduce_parts(Collective *c, float *x, const CollectivePart *parts, size_t count, cudaStream_t stream) {
    if (!c || count == 0) return;
    size_t start = parts[0].from, end = parts[count - 1].from + parts[count - 1].floats, next;
    ncclDataType_t type = c->in_bf16 ? ncclBfloat16 : ncclFloat32;
    begin(c, stream);
    if (c->in_bf16) to_wire(c, x + start, end - start);
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < count; i = next) {
        CollectivePart run = run_of_parts(parts, count, i, &next);
        void *at = c->in_bf16 ? (void *)(c->wire + (run.from - start)) : (void *)(x + run.from);
        NCCL_CHECK(ncclReduce(at, at, run.floats, type, ncclSum, run.owner, c->comm, c->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
    for (size_t i = 0; i < count && c->in_bf16; i = next) {
        CollectivePart run = run_of_parts(parts, count, i, &next);
        if (run.owner == process.rank) from_wire(c, x + run.from, c->wire + (run.from - start), run.floats);
    }
    finish(c);
}

void collective_gather_parts(Collective *c, void *x, bool in_bf16, const CollectivePart *parts, size_t count,
                             cudaStream_t stream) {
    if (!c || count == 0) return;
    size_t next, element = in_bf16 ? sizeof(bf16) : sizeof(float);
    begin(c, stream);
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < count; i = next) {
        CollectivePart run = run_of_parts(parts, count, i, &next);
        void *at = (char *)x + run.from * element;
        NCCL_CHECK(
            ncclBroadcast(at, at, run.floats, in_bf16 ? ncclBfloat16 : ncclFloat32, run.owner, c->comm, c->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
    finish(c);
}

void collective_record(Collective *c, cudaEvent_t event) {
    if (c) CUDA_CHECK(cudaEventRecord(event, c->stream));
}

void collective_join(Collective *c, cudaStream_t stream) {
    if (!c) return;
    CUDA_CHECK(cudaStreamWaitEvent(stream, c->joins[c->current].done, 0));
    c->joined = true;
}

// Waits until query() returns cudaSuccess.
template <class Query>
static void wait_until(Collective *c, Query query) {
    double watched = now();
    c->since = watched;
    for (;;) {
        cudaError_t state = query();
        if (state == cudaSuccess) break;
        if (state != cudaErrorNotReady) CUDA_CHECK(state);
        double t = now();
        if (t - watched > 1) {
            watch(c, t);
            watched = t;
        }
        usleep(20);
    }
    activity_waits(NULL);
}

void collective_synchronize(Collective *c, cudaStream_t stream) {
    if (c) wait_until(c, [=] { return cudaStreamQuery(stream); });
    else CUDA_CHECK(cudaStreamSynchronize(stream));
}

void collective_wait(Collective *c, cudaEvent_t event) {
    if (c) wait_until(c, [=] { return cudaEventQuery(event); });
    else CUDA_CHECK(cudaEventSynchronize(event));
}

#else

const char *collective_prepare(void) {
    return "NCCL (scripts/setup_cuda.sh)";
}

Collective *collective_start(bool in_bf16, double patience) {
    (void)in_bf16, (void)patience;
    return NULL;
}

void collective_end(Collective *) {}
size_t collective_scratch(const Collective *, size_t) {
    return 0;
}
void collective_use(Collective *, void *) {}
void collective_all_reduce(Collective *, float *, size_t, cudaStream_t) {}
void collective_sum(Collective *, double *, size_t, cudaStream_t) {}
void collective_reduce_parts(Collective *, float *, const CollectivePart *, size_t, cudaStream_t) {}
void collective_gather_parts(Collective *, void *, bool, const CollectivePart *, size_t, cudaStream_t) {}
void collective_record(Collective *, cudaEvent_t) {}
void collective_join(Collective *, cudaStream_t) {}
void collective_synchronize(Collective *, cudaStream_t stream) {
    CUDA_CHECK(cudaStreamSynchronize(stream));
}
void collective_wait(Collective *, cudaEvent_t event) {
    CUDA_CHECK(cudaEventSynchronize(event));
}

#endif

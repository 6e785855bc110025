// NCCL on the CPU, over MPI: the ranks are the processes of MPI_COMM_WORLD, and all of them take part. Without MPI (no
// -DUSE_MPI) there is one rank.
//
// A collective is enqueued on its stream, which waits there until all ranks have reached it. Ranks are added in order;
// in bfloat16 each partial sum is rounded, as in a ring. Results are therefore reproducible, and reductions of parts
// followed by broadcasts give the same bits as an all-reduce. If the ranks' calls differ, which would hang a GPU or
// corrupt data, the program ends with a message that names the difference. Captures in graphs are not emulated.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "cuda_on_cpu.h"

#ifdef USE_MPI
#include <mpi.h>
#endif

using cuda_on_cpu::die;

struct ncclComm {
    int rank, ranks;
    ncclResult_t error;    // of an operation in progress
#ifdef USE_MPI
    MPI_Comm mpi;
#endif
};

namespace {

enum Kind { ALL_REDUCE, BROADCAST, REDUCE };
const char *const KINDS[] = {"ncclAllReduce", "ncclBroadcast", "ncclReduce"};

struct Call {    // what must be the same on all ranks
    int64_t kind, count, type, op, root;
};

struct Collective {
    Call call;
    const void *send;
    void *receive;
    ncclComm_t comm;
    cudaStream_t stream;
    enum { NEW, COMPARING, MOVING } state = NEW;
    std::vector<Call> calls;
    std::vector<char> gathered;    // what each rank sent to this one, one after the other
#ifdef USE_MPI
    MPI_Request request = MPI_REQUEST_NULL;
#endif

    size_t element() const {
        if (call.type == ncclFloat64) return 8;
        return call.type == ncclFloat32 ? 4 : 2;
    }
    size_t bytes() const {
        return (size_t)call.count * element();
    }
    bool receives() const {
        return call.kind != REDUCE || comm->rank == call.root;
    }
    bool sends() const {
        return call.kind != BROADCAST || comm->rank == call.root;
    }
};

std::string describe(const Call &c) {
    char text[200];
    snprintf(text, sizeof text, "%s of %lld elements of type %lld, operation %lld, root %lld", KINDS[c.kind],
             (long long)c.count, (long long)c.type, (long long)c.op, (long long)c.root);
    return text;
}

void expect_device(const Collective &c) {
    if (c.sends() && !cuda_on_cpu::is_device(c.send, c.bytes()))
        die("NCCL: %s: the send buffer is not device memory", describe(c.call).c_str());
    if (c.receives() && !cuda_on_cpu::is_device(c.receive, c.bytes()))
        die("NCCL: %s: the receive buffer is not device memory", describe(c.call).c_str());
}

// ---- in progress: each call of advance() does what can be done without waiting, and returns true once all is done

#ifdef USE_MPI
void compare_calls(const Collective &c) {
    for (int r = 0; r < c.comm->ranks; r++)
        if (memcmp(&c.calls[r], &c.call, sizeof c.call) != 0)
            die("NCCL: rank %d calls %s, rank %d %s", c.comm->rank, describe(c.call).c_str(), r,
                describe(c.calls[r]).c_str());
}

template <class X>
void add_ranks(Collective &c) {
    X *sum = (X *)c.gathered.data();
    for (int r = 1; r < c.comm->ranks; r++) {
        const X *x = (const X *)c.gathered.data() + (size_t)r * c.call.count;
        for (int64_t i = 0; i < c.call.count; i++) sum[i] += x[i];
    }
}

// Is this the result in which CUDA_ON_CPU_FLIP=RANK:N flips a sign, the N-th that this rank receives?
bool is_wrong(const Collective &c) {
    static int received;
    const char *flip = getenv("CUDA_ON_CPU_FLIP"), *number = flip ? strchr(flip, ':') : NULL;
    return number && atoi(flip) == c.comm->rank && ++received == atoi(number + 1);
}

// Copies what has arrived to its destination.
void finish(Collective &c) {
    if (c.call.kind != BROADCAST) {
        if (c.call.type == ncclFloat32) add_ranks<float>(c);
        else if (c.call.type == ncclFloat64) add_ranks<double>(c);
        else add_ranks<__nv_bfloat16>(c);
    }
    if (c.sends()) cuda_on_cpu::reads(c.send, c.bytes());
    if (c.receives()) cuda_on_cpu::writes(c.receive, c.bytes());
    const char *from = c.gathered.data() + (c.call.kind == BROADCAST ? c.call.root * c.bytes() : 0);
    if (c.receives()) memcpy(c.receive, from, c.bytes());
    if (c.receives() && is_wrong(c)) ((unsigned char *)c.receive)[c.element() - 1] ^= 0x80;
}

bool failed(Collective &c, int status) {
    if (status == MPI_SUCCESS) return false;
    c.comm->error = ncclRemoteError;
    return true;
}

// Every rank receives everything.
int move(Collective &c) {
    size_t bytes = c.bytes();
    c.gathered.resize(bytes * c.comm->ranks);
    if (bytes > INT32_MAX) die("NCCL: %s: more than 2 GB at a time", describe(c.call).c_str());
    // In a broadcast the other ranks also send something, which is ignored.
    if (!c.sends()) c.send = c.gathered.data();
    return MPI_Iallgather(c.send, (int)bytes, MPI_BYTE, c.gathered.data(), (int)bytes, MPI_BYTE, c.comm->mpi,
                          &c.request);
}

bool advance(Collective &c) {
    if (c.comm->error != ncclSuccess) return true;
    if (c.state == Collective::NEW) {
        expect_device(c);
        c.calls.resize(c.comm->ranks);
        if (failed(c, MPI_Iallgather(&c.call, sizeof c.call, MPI_BYTE, c.calls.data(), sizeof c.call, MPI_BYTE,
                                     c.comm->mpi, &c.request)))
            return true;
        c.state = Collective::COMPARING;
    }
    int done;
    if (failed(c, MPI_Test(&c.request, &done, MPI_STATUS_IGNORE))) return true;
    if (!done) return false;
    if (c.state == Collective::COMPARING) {
        compare_calls(c);
        c.state = Collective::MOVING;
        if (failed(c, move(c)) || failed(c, MPI_Test(&c.request, &done, MPI_STATUS_IGNORE))) return true;
        if (!done) return false;
    }
    finish(c);
    return true;
}

ncclResult_t connect(ncclComm_t comm, const ncclUniqueId &id) {
    int started = 0, rank, size;
    MPI_Initialized(&started);
    if (!started) return ncclSystemError;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (rank != comm->rank || size != comm->ranks) return ncclInvalidArgument;
    if (MPI_Comm_dup(MPI_COMM_WORLD, &comm->mpi) != MPI_SUCCESS) return ncclSystemError;
    MPI_Comm_set_errhandler(comm->mpi, MPI_ERRORS_RETURN);
    ncclUniqueId first = id;
    MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, comm->mpi);
    int same = memcmp(&first, &id, sizeof id) == 0, all;
    MPI_Allreduce(&same, &all, 1, MPI_INT, MPI_MIN, comm->mpi);
    if (!same) fprintf(stderr, "NCCL: rank %d and rank 0 have different unique ids\n", rank);
    return all ? ncclSuccess : ncclInvalidArgument;
}

void disconnect(ncclComm_t comm) {
    MPI_Comm_free(&comm->mpi);
}
#else
bool advance(Collective &c) {
    (void)c;
    return true;
}
ncclResult_t connect(ncclComm_t, const ncclUniqueId &) {
    return ncclInvalidArgument;
}
void disconnect(ncclComm_t) {}
#endif

void start(const std::shared_ptr<Collective> &c) {
    const cuda_on_cpu::Call call = {KINDS[c->call.kind], c->bytes()};
    auto attempt = [=] { return advance(*c); };
    auto alone = [=] {
        expect_device(*c);
        cuda_on_cpu::reads(c->send, c->bytes());
        cuda_on_cpu::writes(c->receive, c->bytes());
        memmove(c->receive, c->send, c->bytes());
    };
    if (c->comm->ranks > 1) cuda_on_cpu::enqueue_until(c->stream, attempt, call);
    else cuda_on_cpu::enqueue(c->stream, alone, call);
}

// ---- groups: the calls start when the group ends

int groups;
std::vector<std::shared_ptr<Collective>> waiting;

bool overlap(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

bool in_place_or_apart(const Collective &c) {
    const char *send = (const char *)c.send, *receive = (const char *)c.receive;
    if (!c.sends() || !c.receives() || !overlap(send, c.bytes(), receive, c.bytes())) return true;
    return send == receive;
}

ncclResult_t add(Kind kind, const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                 int root, ncclComm_t comm, cudaStream_t stream) {
    if (!comm) return ncclInvalidArgument;
    if (comm->error != ncclSuccess) return comm->error;
    auto c = std::make_shared<Collective>();
    c->call = {kind, (int64_t)count, type, op, root};
    c->send = send;
    c->receive = receive;
    c->comm = comm;
    c->stream = stream;
    if (op != ncclSum || (type != ncclFloat32 && type != ncclFloat64 && type != ncclBfloat16))
        return ncclInvalidArgument;
    if (root < 0 || root >= comm->ranks || (c->sends() && !send) || (c->receives() && !receive) ||
        !in_place_or_apart(*c))
        return ncclInvalidArgument;
    if (count == 0) return ncclSuccess;
    if (groups) waiting.push_back(c);
    else start(c);
    return ncclSuccess;
}

}

extern "C" {

const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclSystemError: return "a call of the system failed";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "another rank failed or cannot be reached";
    case ncclInProgress: return "in progress";
    default: return "another error";
    }
}

const char *ncclGetLastError(ncclComm_t) {
    return "";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    FILE *random = fopen("/dev/urandom", "rb");
    bool got = random && fread(id, sizeof *id, 1, random) == 1;
    if (random) fclose(random);
    return got ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    if (!comm || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    *comm = new ncclComm{};
    (*comm)->rank = rank;
    (*comm)->ranks = ranks;
    return ranks > 1 ? connect(*comm, id) : ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    cudaDeviceSynchronize();
    if (comm->ranks > 1) disconnect(comm);
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = comm->error;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
    groups++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (groups == 0) return ncclInvalidUsage;
    if (--groups > 0) return ncclSuccess;
    for (auto &c : waiting) start(c);
    waiting.clear();
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return add(ALL_REDUCE, send, receive, count, type, op, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return add(BROADCAST, send, receive, count, type, ncclSum, root, comm, stream);
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return add(REDUCE, send, receive, count, type, op, root, comm, stream);
}
}

// Faults in the calls by which ranks exchange data. Preloaded into a program, it makes one rank die, hang or sleep in
// them, or receive a wrong number; see README.md. The emulated NCCL (dev/cuda_on_cpu) is above MPI_Iallgather.
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void fault(const char *call) {
    static int count;
    const char *rank = getenv("FAULT_RANK"), *chosen = getenv("FAULT_CALL"), *number = getenv("FAULT_NUMBER");
    const char *action = getenv("FAULT_ACTION"), *mine = getenv("OMPI_COMM_WORLD_RANK"), *after = getenv("FAULT_AFTER");
    if (!action || (rank && mine && strcmp(rank, mine) != 0)) return;
    if ((chosen && strcmp(chosen, call) != 0) || (after && access(after, F_OK) != 0)) return;
    if (number && ++count != atoi(number)) return;
    if (!strcmp(action, "die")) raise(SIGKILL);
    while (!strcmp(action, "hang")) pause();
    if (!strcmp(action, "delay")) usleep((useconds_t)(rand() % 20000));
    if (!strcmp(action, "slow")) usleep(15000);
}

// Changes the first number of the n-th sum of floats that a rank receives, with FAULT_WRONG=RANK:n.
static void make_wrong(void *sum, MPI_Datatype type) {
    static int count;
    int rank, number;
    const char *wrong = getenv("FAULT_WRONG"), *mine = getenv("OMPI_COMM_WORLD_RANK");
    if (type != MPI_FLOAT || !wrong || !mine || sscanf(wrong, "%d:%d", &rank, &number) != 2) return;
    if (rank == atoi(mine) && ++count == number) *(float *)sum += 1;
}

int MPI_Allreduce(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    fault("MPI_Allreduce");
    int status = PMPI_Allreduce(in, out, n, type, op, comm);
    make_wrong(out, type);
    return status;
}

#define FAULTY(name, parameters, arguments) \
    int name parameters { \
        fault(#name); \
        return P##name arguments; \
    }

FAULTY(MPI_Bcast, (void *data, int n, MPI_Datatype type, int root, MPI_Comm comm), (data, n, type, root, comm))
FAULTY(MPI_Allgather,
       (const void *in, int n, MPI_Datatype type, void *out, int m, MPI_Datatype out_type, MPI_Comm comm),
       (in, n, type, out, m, out_type, comm))
FAULTY(MPI_Iallgather,
       (const void *in, int n, MPI_Datatype type, void *out, int m, MPI_Datatype out_type, MPI_Comm comm,
        MPI_Request *request),
       (in, n, type, out, m, out_type, comm, request))
FAULTY(MPI_Barrier, (MPI_Comm comm), (comm))
FAULTY(MPI_Send, (const void *data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm),
       (data, n, type, to, tag, comm))

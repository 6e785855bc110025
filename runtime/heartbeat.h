// A heartbeat between the ranks of a run. A machine that loses power or its network sends nothing, not even a reset, so
// MPI and NCCL wait for it, silently and for a long time.
//
// A thread in each rank exchanges small UDP datagrams with rank 0. It runs beside the training, so a slow step, save or
// validation is not mistaken for a death. A rank that has been silent for the timeout counts as dead: rank 0 tells the
// others which one it is, and every rank that is left ends with EXIT_PEER, wherever its main thread is stuck. When rank
// 0 falls silent, the others notice by themselves. mpirun or its daemon is killed where it does not end in time.
//
// UDP rather than TCP: after an outage the next datagram gets through, where TCP waits for its next retransmission,
// which backs off to two minutes. Tests: dev/tests/test_machines.py.
#ifndef RUNTIME_HEARTBEAT_H
#define RUNTIME_HEARTBEAT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Heartbeat Heartbeat;

// Collective, after process_start(). `timeout` is in seconds. Returns NULL, for no heartbeat, with one rank, with a
// timeout of 0, and, after a warning, where a rank cannot reach rank 0 by UDP.
Heartbeat *heartbeat_start(int64_t timeout);

// Collective, before process_end(). Waits for all ranks, then ends the thread. NULL is fine.
void heartbeat_stop(Heartbeat *heartbeat);

#ifdef __cplusplus
}
#endif
#endif

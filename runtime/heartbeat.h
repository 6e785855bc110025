// A heartbeat between the ranks of a run. A machine that loses power or its network sends nothing, not even a TCP
// reset, so MPI and NCCL would wait for it silently and for a long time.
//
// A thread in each rank exchanges small UDP datagrams with rank 0. Because it is independent of the main thread, a slow
// step, save or validation does not look like a death. A rank that has been silent for the timeout counts as dead: rank
// 0 tells the others which one it is, and every surviving rank exits with EXIT_PEER, wherever its main thread is stuck.
// If rank 0 falls silent, each of the others notices on its own. If mpirun or its daemon does not exit in time, it is
// killed.
//
// A main thread may hang although its machine is alive: a file system stops answering, for example. So each heartbeat
// says for how long that thread has made no progress (activity_does() and others) and whether it waits for other ranks.
// Rank 0 ends the run if a rank that does not wait, or if all ranks, have made no progress for a timeout of their own.
//
// UDP rather than TCP: after an outage, the next datagram gets through, whereas TCP waits for its next retransmission,
// which backs off to two minutes. Tests: dev/tests/test_machines.py.
#ifndef RUNTIME_HEARTBEAT_H
#define RUNTIME_HEARTBEAT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Heartbeat Heartbeat;

// Collective; call it after process_start(). The timeouts, for silence and for progress, are in seconds; 0: none.
// Returns NULL, meaning no heartbeat, with a single rank, without a timeout, or (after a warning) if some rank cannot
// reach rank 0 by UDP.
Heartbeat *heartbeat_start(int64_t timeout, int64_t progress);

// Collective; call it before process_end(). Waits for all ranks, then ends the thread. NULL is allowed.
void heartbeat_stop(Heartbeat *heartbeat);

#ifdef __cplusplus
}
#endif
#endif

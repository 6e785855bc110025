// The ranks of a data-parallel run. They use MPI if a launcher started several; a single process does not touch MPI.
#ifndef RUNTIME_PROCESS_H
#define RUNTIME_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int rank, size;                // among all ranks
    int local_rank, local_size;    // among the ranks on this machine
} Process;

extern Process process;    // {0, 1, 0, 1} until process_start()

// Ends the program with EXIT_USAGE if a launcher started it as one of several ranks, but it was built without MPI, or
// without something else that they need: `lacks` names it, with how to get it; otherwise NULL. Call it before anything
// that may fail.
void process_check_build(const char *lacks);

// Ends the program with an error that usually all ranks have, possibly before process_start(), when they cannot agree
// on who reports it. Then the others wait for a few seconds until rank 0 has reported it and the launcher ends them.
void process_fail_early(const Error *error) __attribute__((noreturn));

// If a launcher (mpirun, srun) started this process as one of several, starts MPI, fills `process`, and makes fail()
// end all ranks (fail_hook, MPI_Abort). A dead rank takes the others down: mpirun kills them, and an MPI call that
// fails exits with EXIT_PEER. A rank that is silent but not dead is the business of runtime/heartbeat.h.
//
// process_end() is collective. Call it after everything that must not be lost: from the first exit on, mpirun kills the
// remaining ranks. A rank whose process has not ended a minute later ends with EXIT_PEER.
//
// If process_started() does not follow within ten minutes, because a rank hangs or a machine cannot be reached, the
// process ends with EXIT_PEER. From then on that is the business of runtime/heartbeat.h.
void process_start(int *argc, char ***argv);
void process_started(void);
void process_end(void);

// The rank according to the launcher's environment, or 0 without a launcher. Available before process_start().
int process_launched_rank(void);

// Collectives, in place: all ranks call them with the same n. All ranks get the same bits, and the same number of ranks
// always produces the same bits. They do nothing with a single rank.
void process_sum_float(float *values, size_t n);
void process_sum_double(double *values, size_t n);
int64_t process_max_int(int64_t value);
void process_broadcast(void *data, size_t bytes);    // from rank 0
void process_gather(void *all, size_t bytes);        // bytes from each rank, at all + rank * bytes
void process_barrier(void);

// On rank 0, data (bytes) = that of rank `from`, which makes the same call. Other ranks do nothing.
void process_bring(void *data, size_t bytes, int from);

// Collective. On rank 0, returns the IPv4 address, in network byte order, that MPI uses between it and other machines:
// that of its TCP connection to one of them, or if it has none (InfiniBand), an address of the host's name. Loopback if
// all ranks run on one machine; 0 if there is no such address.
uint32_t process_address(void);

// A barrier after something that may have failed on some ranks. If `done` is false on any rank, all ranks exit with
// that rank's error, which is printed once.
void process_agree(bool done, const Error *error);

// Evaluates `call` on rank 0 only. If it returns false, all ranks exit with its error.
#define rank0_try(call, error) process_agree(process.rank != 0 || (call), (error))

// SIGTERM, SIGINT, SIGUSR1 and SIGHUP are blocked in every thread, and one dedicated thread waits for them, so no
// signal handler ever runs on a compute thread. This is necessary because, for a large k, oneDNN's generated code
// points the stack register at its workspace on the heap, and the kernel would write the handler's frame below it, into
// the heap.
//
// Call process_hold_signals() first in main(), before anything starts a thread. If a library has already started some,
// the program re-executes itself so that those threads inherit the blocked signals (unless argv is NULL). Until
// process_catch_signals(), each signal has its default effect.
//
// After process_catch_signals(), these signals only set a flag, even those that were ignored at startup, except that an
// ignored SIGHUP stays ignored, as nohup requires. A SIGINT at least one second after the first of these signals ends
// the process immediately. mpirun forwards SIGUSR1 to all ranks. Ranks may see a signal at different steps, so agree
// with process_max_int(process_stop_requested()).
void process_hold_signals(char **argv);
void process_catch_signals(void);

// Call after process_catch_signals(). Rank 0 then prints this line to stderr when the first request to stop arrives,
// because the work in progress may take a minute. A stderr that takes no more is not waited for.
void process_confirm_stop(const char *text);
bool process_stop_requested(void);

#ifdef __cplusplus
}
#endif
#endif

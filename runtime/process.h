// The processes of a data-parallel run, by MPI when a launcher started several, otherwise this one alone with no MPI at
// all.
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
    int rank, size;                // among all processes
    int local_rank, local_size;    // among those on this machine
} Process;

extern Process process;    // {0, 1, 0, 1} until process_start()

// Starts MPI when a launcher (mpirun, srun) started this process as one of several, fills `process`, and makes fail()
// end all of them (fail_hook, MPI_Abort). A dead process ends the others: mpirun kills them, and an MPI call that fails
// ends with EXIT_PEER.
// One that is silent without being dead is for runtime/heartbeat.h.
// process_end() is for all processes together, after everything that must not be lost: from the first exit on, mpirun
// kills the rest.
void process_start(int *argc, char ***argv);
void process_end(void);

// The rank that the launcher's environment gives, 0 without one; known before process_start().
int process_launched_rank(void);

// In place, over all processes; every process gets the same bits, and the same number of processes gives the same bits
// each time.
// All processes call with the same n. One process: nothing happens.
void process_sum_float(float *values, size_t n);
void process_sum_double(double *values, size_t n);
int64_t process_max_int(int64_t value);
void process_broadcast(void *data, size_t bytes);    // from rank 0
void process_barrier(void);

// A barrier after something that may have failed in some processes (mostly: that only rank 0 did). Where `done` is
// false in one, all end with its error, said once.
void process_agree(bool done, const Error *error);

// Evaluates `call` on rank 0 alone. Where it is false, all ranks end with its error.
#define rank0_try(call, error) process_agree(process.rank != 0 || (call), (error))

// SIGTERM, SIGINT, SIGUSR1 and SIGHUP are blocked in every thread, and one thread waits for them, so that no handler
// ever runs on a thread that computes: with a large k, oneDNN's generated code points the stack register at its
// workspace on the heap, and the kernel would write the handler's frame below it, over the heap.
//
// Call process_hold_signals() first in main(), before anything starts a thread. If a library has started some already,
// the program starts itself again, so that those threads inherit the blocked signals (not where argv is NULL). Until
// process_catch_signals() a signal does what it does by default.
//
// From process_catch_signals() on these signals only set a flag, even where they were ignored at the start; but SIGHUP
// stays ignored then, as nohup asks. A SIGINT at least a second after the first of them ends the process at once.
// mpirun passes SIGUSR1 on to all ranks. The ranks may see a signal at different steps: agree with
// process_max_int(process_stop_requested()).
void process_hold_signals(char **argv);
void process_catch_signals(void);
bool process_stop_requested(void);

#ifdef __cplusplus
}
#endif
#endif

// Program startup: what every program does first, and the number of compute threads.
#ifndef RUNTIME_START_H
#define RUNTIME_START_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MAX_THREADS = 1024 };
#define THREADS_HELP "CPU threads; 0 means OMP_NUM_THREADS, or one per core within a container's CPU quota"

// Call this first in main(). It sets program_name; opens /dev/null in place of a closed standard input, output or
// error, because the log would otherwise go to whatever file gets that descriptor; makes writing beyond `ulimit -f`
// fail with EFBIG instead of ending the process with SIGXFSZ; counts subnormal numbers as 0, in all threads; and raises
// a stack limit that is too small. If stacks remain too small, which would end in SIGSEGV, it exits with EXIT_RESOURCE
// or EXIT_USAGE.
void start_program(const char *name);

// Call this after process_start() and before the first parallel region. Sets the number of threads to `threads` or, if
// it is 0, to OMP_NUM_THREADS or one per core, within this rank's share of a CPU quota. Exits with EXIT_USAGE above
// MAX_THREADS, and with EXIT_RESOURCE if the system does not allow that many threads.
void start_threads(int64_t threads);

#ifdef __cplusplus
}
#endif
#endif

// What every program does before anything else, and how many threads it computes with.
#ifndef RUNTIME_START_H
#define RUNTIME_START_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MAX_THREADS = 1024 };
#define THREADS_HELP "CPU threads; 0: OMP_NUM_THREADS, or one for each core"

// First in main(): sets program_name; opens /dev/null where standard input, output or error is closed, as the log would
// otherwise land in whatever file takes its number; makes a file that outgrows `ulimit -f` fail with EFBIG in place of
// ending the process by SIGXFSZ; and raises a stack limit that is too small. Ends with EXIT_RESOURCE or EXIT_USAGE
// where stacks stay too small, which would otherwise end in SIGSEGV.
void start_program(const char *name);

// After the flags, before the first parallel region: the threads of --threads, or where it is 0 those of
// OMP_NUM_THREADS, or one for each core. Ends with EXIT_USAGE beyond MAX_THREADS.
void start_threads(int64_t threads);

#ifdef __cplusplus
}
#endif
#endif

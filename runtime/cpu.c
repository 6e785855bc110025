// What has to happen before main(). Built without -march, so that it runs on any processor.
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <unistd.h>

#include "runtime/error.h"

// A processor that lacks what the other files were built for gets a message here, instead of an illegal instruction
// there. The Makefile passes BUILT_FOR, the list of X("extension") that MARCH stands for.
static void check_processor(void) {
#if defined(__x86_64__) && defined(BUILT_FOR)
    const char *lacking = NULL;
    __builtin_cpu_init();
#define X(extension) if (!__builtin_cpu_supports(extension)) lacking = extension;
    BUILT_FOR
#undef X
    if (!lacking) return;
    fprintf(stderr,
            "This program was built for a processor with %s, which this one lacks.\n"
            "  Build it here with `make clean all`, or for mixed machines with `make clean all MARCH=x86-64-v3`.\n",
            lacking);
    _exit(EXIT_PEER);
#endif
}

// libgomp's threads spin for about 6 ms before they sleep. Where another program has taken one of the cores, those that
// wait for the thread on it then keep that program from the cores that they do not need: a step took 4 times as long,
// not 1.5. A shorter spin (0.2 ms) costs nothing where nobody else is there. libgomp reads the environment before any
// code of ours and has no call for it, so the program starts itself again, once, unless the environment says how to
// wait. (AT_BASE is 0 when the dynamic linker itself was started by name; then /proc/self/exe would be the linker.)
static void shorten_spin(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || !getauxval(AT_BASE)) return;
    // Where this fails, all goes on as it was.
    if (setenv("GOMP_SPINCOUNT", "10000", 1) == 0) execv("/proc/self/exe", argv);
}

__attribute__((constructor(101))) static void before_main(int argc, char **argv) {
    (void)argc;
    check_processor();
    shorten_spin(argv);
}

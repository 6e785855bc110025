// Built without -march and run before main(): a processor that lacks what the other files were built for gets a message here, instead
// of an illegal instruction there. The Makefile passes BUILT_FOR, the list of X("extension") that MARCH stands for.
#include <stdio.h>
#include <unistd.h>

#include "runtime/error.h"

#if defined(__x86_64__) && defined(BUILT_FOR)

__attribute__((constructor(101))) static void check_processor(void) {
    const char *lacking = NULL;
    __builtin_cpu_init();
#define X(extension) if (!__builtin_cpu_supports(extension)) lacking = extension;
    BUILT_FOR
#undef X
    if (!lacking) return;
    fprintf(stderr, "This program was built for a processor with %s, which this one lacks.\n"
            "  Build it here with `make clean all`, or for mixed machines with `make clean all MARCH=x86-64-v3`.\n", lacking);
    _exit(EXIT_PEER);
}

#endif

// Runs before main(). This file is compiled without -march, so it runs on any processor.
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <unistd.h>

#include "runtime/error.h"

// Without this check, a processor that lacks an instruction-set extension would die of an illegal instruction somewhere
// in the other files. The Makefile passes BUILT_FOR, the extensions that MARCH implies, as X("avx2") X("fma") ...
static void check_processor(void) {
#if defined(__x86_64__) && defined(BUILT_FOR)
    const char *lacking = NULL;
    __builtin_cpu_init();
#define X(extension) if (!__builtin_cpu_supports(extension)) lacking = extension;
    BUILT_FOR
#undef X
    if (!lacking) return;
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    fprintf(
        stderr,
        "This program was built for a processor with %s, which the processor of %s lacks.\n"
        "  Rebuild it there with `make clean all`, or with `make clean all MARCH=x86-64-v3` for a mix of machines.\n",
        lacking, host);
    _exit(EXIT_PEER);
#endif
}

// By default, libgomp's threads spin for about 6 ms before they sleep. When another program occupies one core, the
// threads that wait for that core's thread keep spinning on the other cores, and the other program cannot use them
// either: a step takes several times as long. A shorter spin (0.2 ms) costs nothing on an idle machine.
// libgomp reads the environment before any of our code runs and offers no call for this, so the program re-executes
// itself once, unless the environment already sets a wait policy. (AT_BASE is 0 when the dynamic linker was started by
// name; /proc/self/exe would then be the linker.)
static void shorten_spin(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || !getauxval(AT_BASE)) return;
    // If this fails, the program continues with the longer spin.
    if (setenv("GOMP_SPINCOUNT", "10000", 1) == 0) execv("/proc/self/exe", argv);
}

__attribute__((constructor(101))) static void before_main(int argc, char **argv) {
    (void)argc;
    check_processor();
    shorten_spin(argv);
}

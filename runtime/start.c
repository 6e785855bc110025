#define _GNU_SOURCE
#include "runtime/start.h"

#include <fcntl.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "runtime/cgroup.h"
#include "runtime/error.h"
#include "runtime/options.h"
#include "runtime/process.h"
#include "runtime/subnormal.h"

// The tests pass with 128 KiB (oneDNN 2.6, OpenBLAS 0.3.21, built-in loops); with 64 KiB they end in SIGSEGV.
#define STACK_NEEDED ((size_t)512 << 10)
#define STACK_USUAL ((size_t)8 << 20)

static void open_standard_descriptors(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd > STDERR_FILENO) close(fd);
}

// The main thread's stack grows up to the limit. Other threads get stacks of that size unless OMP_STACKSIZE overrides
// it.
static void check_stack_limit(void) {
    struct rlimit limit;
    pthread_attr_t others;
    Error error;
    if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= STACK_NEEDED) return;
    rlim_t found = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max < STACK_USUAL ? limit.rlim_max : STACK_USUAL;
    if (limit.rlim_cur < STACK_NEEDED || setrlimit(RLIMIT_STACK, &limit) != 0) {
        error_set(&error, EXIT_RESOURCE,
                  "the stack limit is %zu KiB (ulimit -s), but this program needs at least %zu KiB.\n"
                  "  Raise the limit: ulimit -s 8192",
                  (size_t)found >> 10, STACK_NEEDED >> 10);
        process_fail_early(&error);
    }
    pthread_attr_init(&others);
    pthread_attr_setstacksize(&others, (size_t)limit.rlim_cur);
    pthread_setattr_default_np(&others);
    pthread_attr_destroy(&others);
}

// Parses an OpenMP stack size such as "16k", "2 M" or "512" (KiB) into bytes. Returns -1 if it is malformed; libgomp
// reports that itself.
static double stack_size(const char *text) {
    static const char units[] = "BKMG";
    char *end;
    double size = (double)strtoull(text, &end, 10), unit = 1024;
    if (end == text) return -1;
    end += strspn(end, " \t");
    const char *found = *end ? strchr(units, *end & ~0x20) : NULL;
    if (*end && !found) return -1;
    if (found) unit = (double)((size_t)1 << 10 * (found - units));
    return size * unit;
}

static void check_stack_size(const char *variable) {
    const char *text = getenv(variable);
    double size = text ? stack_size(text) : -1;
    if (size >= 0 && size < (double)STACK_NEEDED)
        usage_fail("%s=%s: threads need stacks of at least %zuK. Unset it, or set it to 2M.", variable, text,
                   STACK_NEEDED >> 10);
}

void start_program(const char *name) {
    program_name = name;
    open_standard_descriptors();
    flush_subnormals();
    signal(SIGXFSZ, SIG_IGN);
    check_stack_limit();
    check_stack_size("OMP_STACKSIZE");
    check_stack_size("GOMP_STACKSIZE");
}

static void *pass(void *gate) {
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

// Checks that the system allows as many threads as OpenMP will start, by starting and ending them. OpenMP itself would
// end the program without any advice. The stacks have the smallest size allowed, so only the number of threads matters.
static void check_threads(int count) {
    pthread_t threads[MAX_THREADS];
    pthread_attr_t small;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    int started = 1, status = 0;    // the main thread is one of them
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK_NEEDED);
    pthread_mutex_lock(&gate);
    while (started < count && (status = pthread_create(&threads[started], &small, pass, &gate)) == 0) started++;
    pthread_mutex_unlock(&gate);
    pthread_attr_destroy(&small);
    for (int i = 1; i < started; i++) pthread_join(threads[i], NULL);
    if (status != 0)
        fail(EXIT_RESOURCE,
             "cannot start %d threads: %s.\n"
             "  Pass a smaller --threads, or raise the limit on processes (ulimit -u), or the container's limit.",
             count, strerror(status));
}

// The threads that the quotas of control groups allow each rank of this machine, or 0 if they limit nothing. A number
// that launch.sh has computed from the cores, and put into OMP_NUM_THREADS, is no choice of the user.
static int64_t threads_of_quota(void) {
    const char *chosen = getenv("OMP_NUM_THREADS");
    uint64_t share = cores_quota_under("") / (uint64_t)process.local_size;
    if (chosen && *chosen && !getenv("CORES_DIVIDED")) return 0;
    if (share >= (uint64_t)omp_get_max_threads()) return 0;
    return share ? (int64_t)share : 1;
}

void start_threads(int64_t threads) {
    if (!threads) threads = threads_of_quota();
    if (threads) omp_set_num_threads((int)threads);
    if (omp_get_max_threads() > MAX_THREADS)
        usage_fail("OMP_NUM_THREADS asks for %d threads, but at most %d are supported. Override it with --threads N.",
                   omp_get_max_threads(), MAX_THREADS);
    int limit = omp_get_thread_limit();    // OMP_THREAD_LIMIT
    check_threads(limit < omp_get_max_threads() ? limit : omp_get_max_threads());
}

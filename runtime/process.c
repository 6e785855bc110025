#define _GNU_SOURCE
#include "runtime/process.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <math.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/activity.h"
#include "runtime/clock.h"

#ifdef USE_MPI
#include <mpi.h>
#endif

// Global like MPI_COMM_WORLD: set once, by process_start(), and read wherever ranks differ.
Process process = {0, 1, 0, 1};

// ---- the launcher's environment

// Returns the number in the first of these variables that is set, or the fallback. The names cover Open MPI, MPICH and
// Intel MPI, Slurm's PMI, and PMIx.
static int from_environment(const char *const names[], int fallback) {
    for (; *names; names++) {
        const char *text = getenv(*names);
        if (text) return atoi(text);
    }
    return fallback;
}

int process_launched_rank(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", NULL};
    return from_environment(names, 0);
}

static int launched_size(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", NULL};
    return from_environment(names, 1);
}

void process_check_build(const char *lacks) {
    Error error;
#ifndef USE_MPI
    lacks = "MPI (libopenmpi-dev and openmpi-bin)";
#endif
    if (!lacks || launched_size() < 2) return;
    error_set(&error, EXIT_USAGE,
              "%d ranks were started, but this program was built without %s.\n"
              "  Install it and run make again (`make help` shows what it finds), or start a single rank.",
              launched_size(), lacks);
    process_fail_early(&error);
}

// Lets the messages of a rank other than 0 name it, until the process ends.
static void name_rank(int rank) {
    char host[256] = "", text[300];
    if (rank <= 0) return;
    gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "rank %d on %s: ", rank, host);
    const char *where = strdup(text);
    if (where) fail_where = where;
}

void process_fail_early(const Error *error) {
    enum { OTHERS_SECONDS = 4 };    // a launcher ends the other ranks within less (launch.sh: GRACE)
    int rank = process_launched_rank();
    if (rank > 0 && !fail_speaker) sleep(OTHERS_SECONDS);
    name_rank(rank);
    fail_with(error);
}

// ---- signals

static const int stop_signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
enum { STOP_SIGNALS = sizeof stop_signals / sizeof *stop_signals };

// Signals belong to the whole process, and the thread that waits for them outlives every caller, so what it shares with
// the others is global: has it been started, may it ask for a stop, and has it?
static atomic_bool holding, stop_requested;
static const char *_Atomic catching;    // NULL: no; otherwise what rank 0 prints at the first request, or ""

static sigset_t stop_set(void) {
    sigset_t set;
    sigemptyset(&set);
    for (int i = 0; i < STOP_SIGNALS; i++) sigaddset(&set, stop_signals[i]);
    return set;
}

// The thread must not block, neither on a full stderr nor on a lock whose owner does.
static void confirm_stop(void) {
    struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT};
    const char *text = catching;
    if (!*text || process.rank != 0 || poll(&ready, 1, 0) != 1) return;
    dprintf(STDERR_FILENO, "%s%s: %s\n", isatty(STDERR_FILENO) ? "\n" : "", program_name, text);
}

// Ends the process with the signal's default action.
static void end_by(int number) {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &one, NULL);
    raise(number);
}

// A single Ctrl-C may arrive twice in quick succession, from the terminal and from a wrapper that forwards it. It
// counts as one request to stop. `data` is the set of signals that were ignored at startup, which the thread owns.
static void *wait_for_signals(void *data) {
    const sigset_t held = stop_set(), *ignored = data;
    const double moment = 1;    // seconds
    double first = INFINITY;    // time of the first request
    for (;;) {
        int number;
        if (sigwait(&held, &number) != 0) continue;
        if (sigismember(ignored, number) && (number == SIGHUP || !catching)) continue;
        if (!catching || (number == SIGINT && now() - first >= moment)) end_by(number);
        first = fmin(first, now());
        if (!atomic_exchange(&stop_requested, true)) confirm_stop();
    }
    return NULL;
}

// Has a library started threads before main()? OpenBLAS does.
static bool has_threads(void) {
    DIR *tasks = opendir("/proc/self/task");
    int count = 0;
    for (struct dirent *entry; tasks && (entry = readdir(tasks));) count += entry->d_name[0] != '.';
    if (tasks) closedir(tasks);
    return count > 1;
}

// Returns those of the stop signals that are ignored; the caller owns the set.
static sigset_t *ignored_signals(void) {
    sigset_t *ignored = allocate(1, sizeof *ignored, "a set of signals");
    sigemptyset(ignored);
    for (int i = 0; i < STOP_SIGNALS; i++) {
        struct sigaction action;
        sigaction(stop_signals[i], NULL, &action);
        if (action.sa_handler == SIG_IGN) sigaddset(ignored, stop_signals[i]);
    }
    return ignored;
}

void process_hold_signals(char **argv) {
    const sigset_t held = stop_set();
    sigset_t before;
    pthread_attr_t detached;
    pthread_t thread;
    bool blocked_before = true;
    if (atomic_exchange(&holding, true)) return;
    pthread_sigmask(SIG_BLOCK, &held, &before);
    for (int i = 0; i < STOP_SIGNALS; i++) blocked_before = blocked_before && sigismember(&before, stop_signals[i]);
    // The new program inherits the signal mask. (AT_BASE is 0 if the dynamic linker was started by name; /proc/self/exe
    // would then be the linker.)
    if (argv && !blocked_before && has_threads() && getauxval(AT_BASE)) execv("/proc/self/exe", argv);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    int status = pthread_create(&thread, &detached, wait_for_signals, ignored_signals());
    if (status != 0)
        fail(EXIT_RESOURCE,
             "cannot start the thread that waits for signals: %s.\n"
             "  Raise the limit on processes (ulimit -u), or the container's limit.",
             strerror(status));
    pthread_attr_destroy(&detached);
}

void process_catch_signals(void) {
    process_hold_signals(NULL);
    signal(SIGPIPE, SIG_IGN);    // training continues if the reader of its output exits
    catching = "";
}

void process_confirm_stop(const char *text) {
    catching = text;
}

bool process_stop_requested(void) {
    return stop_requested;
}

#ifdef USE_MPI

// ---- several ranks

// If a flag, a file or the run folder is invalid, all ranks discover it at the same time. Therefore a rank that fails
// waits up to one second for the others to fail as well. If they do, the lowest rank with a message prints it and every
// rank exits on its own. MPI_Abort is the fallback: Open MPI takes twice its grace period for it, and loses its own
// messages when several ranks call it at once.
//
// Global, because fail() may be called anywhere and ends the program from there.
static struct {
    MPI_Comm comm;
    int mine, first;    // the lowest rank with a message; MPI may still access both after the wait
    bool all;           // every rank ends on its own
} ending;

enum { END_SECONDS = 10 };

static bool speaker(bool says) {
    MPI_Request request;
    int done = 0;
    ending.mine = says ? process.rank : process.size;
    if (MPI_Iallreduce(&ending.mine, &ending.first, 1, MPI_INT, MPI_MIN, ending.comm, &request) != MPI_SUCCESS)
        return says;
    for (int i = 0; i < 100 && !done; i++) {
        if (i) usleep(10000);
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return says;
    }
    ending.all = done;
    return ending.all ? ending.first == process.rank : says;
}

// Ends the process even if MPI does not, or the GPU's driver, which may wait at exit for sums that a dead rank never
// joins.
static void *end_late(void *code) {
    sleep(END_SECONDS);
    _exit((int)(intptr_t)code);
}

// MPI_Abort makes mpirun end the other ranks and exit with this code.
static void end_all(int code) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, end_late, (void *)(intptr_t)code) == 0) pthread_detach(thread);
    if (!ending.all) MPI_Abort(MPI_COMM_WORLD, code);
    MPI_Finalize();
}

static void check(int status, const char *what) {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(status, text, &length);
    fail(EXIT_PEER,
         "rank %d of %d: %s failed: %s.\n"
         "  Another rank has died or is unreachable. See its message above, then resume with --resume.",
         process.rank, process.size, what, text);
}

#ifndef START_SECONDS    // a test defines less
#define START_SECONDS 600
#define LAST_SECONDS 60
#endif

// Global, because the thread outlives its creator.
static atomic_bool started;

// Ends a rank that waits for others which have not come so far. Uses write(), because stderr's lock may be held.
static _Noreturn void end_waiting(const char *what, int seconds, const char *remedy) {
    char host[256] = "", text[1024];
    gethostname(host, sizeof host - 1);
    const char *call = activity_now().waits;
    int length =
        snprintf(text, sizeof text, "%s: rank %d on %s: not all ranks have %s within %d s; this one is in %s.\n%s",
                 program_name, process_launched_rank(), host, what, seconds, call ? call : "no call of MPI", remedy);
    ssize_t written = write(STDERR_FILENO, text, (size_t)length);
    (void)written;
    _exit(EXIT_PEER);
}

static void *end_unless_started(void *unused) {
    (void)unused;
    sleep(START_SECONDS);
    if (started) return NULL;
    end_waiting("started", START_SECONDS,
                "  Another rank hangs, or MPI cannot reach its machine. Check the network and the file systems\n"
                "  of all machines, then start the job again.\n");
}

static void *end_unless_ended(void *unused) {
    (void)unused;
    sleep(LAST_SECONDS);
    end_waiting(
        "ended", LAST_SECONDS,
        "  What had to be saved is saved. Another rank hangs, or its machine is down: look for a process of it.\n");
}

static void start_watch(void *(*watch)(void *)) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, watch, NULL) == 0) pthread_detach(thread);
}

void process_started(void) {
    started = true;
}

// A call of MPI that may wait for other ranks.
#define WAIT(function, ...) \
    do { \
        activity_waits(#function); \
        int status = function(__VA_ARGS__); \
        activity_waits(NULL); \
        check(status, #function); \
    } while (0)

void process_start(int *argc, char ***argv) {
    if (launched_size() < 2) return;
    int threads;
    start_watch(end_unless_started);
    WAIT(MPI_Init_thread, argc, argv, MPI_THREAD_FUNNELED, &threads);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &process.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &process.size);
    if (process.size != launched_size())
        fail(EXIT_PEER,
             "the launcher started %d processes, but MPI connects only %d of them.\n"
             "  The launcher and the program must use the same MPI. Use scripts/launch.sh, or srun --mpi=pmix.",
             launched_size(), process.size);
    fail_hook = end_all;
    check(MPI_Comm_dup(MPI_COMM_WORLD, &ending.comm), "MPI_Comm_dup");
    fail_speaker = speaker;
    warn_off = process.rank > 0;
    name_rank(process.rank);
    MPI_Comm local;
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, process.rank, MPI_INFO_NULL, &local),
          "MPI_Comm_split_type");
    MPI_Comm_rank(local, &process.local_rank);
    MPI_Comm_size(local, &process.local_size);
    MPI_Comm_free(&local);
}

void process_end(void) {
    if (process.size > 1) {
        start_watch(end_unless_ended);
        activity_waits("MPI_Finalize");
        MPI_Finalize();
        activity_waits(NULL);
    }
    fail_hook = NULL;
    fail_speaker = NULL;
}

// MPI counts are ints. Working in chunks also keeps MPI's buffers small.
#define CHUNK ((size_t)1 << 24)

static int chunk(size_t n, size_t at) {
    return (int)(n - at < CHUNK ? n - at : CHUNK);
}

static void all_reduce(void *values, int n, MPI_Datatype type, MPI_Op op) {
    WAIT(MPI_Allreduce, MPI_IN_PLACE, values, n, type, op, MPI_COMM_WORLD);
}

void process_sum_float(float *values, size_t n) {
    for (size_t at = 0; process.size > 1 && at < n; at += CHUNK)
        all_reduce(values + at, chunk(n, at), MPI_FLOAT, MPI_SUM);
}

void process_sum_double(double *values, size_t n) {
    for (size_t at = 0; process.size > 1 && at < n; at += CHUNK)
        all_reduce(values + at, chunk(n, at), MPI_DOUBLE, MPI_SUM);
}

int64_t process_max_int(int64_t value) {
    if (process.size > 1) all_reduce(&value, 1, MPI_INT64_T, MPI_MAX);
    return value;
}

void process_broadcast(void *data, size_t bytes) {
    for (size_t at = 0; process.size > 1 && at < bytes; at += CHUNK)
        WAIT(MPI_Bcast, (char *)data + at, chunk(bytes, at), MPI_BYTE, 0, MPI_COMM_WORLD);
}

void process_gather(void *all, size_t bytes) {
    if (process.size > 1) WAIT(MPI_Allgather, MPI_IN_PLACE, 0, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
}

void process_barrier(void) {
    if (process.size > 1) WAIT(MPI_Barrier, MPI_COMM_WORLD);
}

void process_bring(void *data, size_t bytes, int from) {
    for (size_t at = 0; from > 0 && at < bytes; at += CHUNK) {
        char *piece = (char *)data + at;
        int n = chunk(bytes, at);
        if (process.rank == from) WAIT(MPI_Send, piece, n, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
        if (process.rank == 0) WAIT(MPI_Recv, piece, n, MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
}

// This machine's address in the first TCP connection of this process to another one, or 0.
static uint32_t connected_address(void) {
    for (int fd = 0; fd < 1 << 16; fd++) {
        struct sockaddr_in here = {0}, there = {0};
        socklen_t size = sizeof here, length = sizeof there;
        if (getsockname(fd, (struct sockaddr *)&here, &size) != 0 || here.sin_family != AF_INET) continue;
        if (getpeername(fd, (struct sockaddr *)&there, &length) != 0) continue;
        if (here.sin_addr.s_addr != there.sin_addr.s_addr) return here.sin_addr.s_addr;
    }
    return 0;
}

static bool is_loopback(uint32_t address) {
    return ntohl(address) >> 24 == IN_LOOPBACKNET;
}

static uint32_t host_address(void) {
    const struct addrinfo wanted = {.ai_family = AF_INET, .ai_socktype = SOCK_DGRAM};
    struct addrinfo *found = NULL;
    char host[256] = "";
    uint32_t address = 0;
    gethostname(host, sizeof host - 1);
    if (getaddrinfo(host, NULL, &wanted, &found) != 0) return 0;
    for (const struct addrinfo *i = found; i && !address; i = i->ai_next) {
        uint32_t one = ((const struct sockaddr_in *)i->ai_addr)->sin_addr.s_addr;
        if (!is_loopback(one)) address = one;
    }
    freeaddrinfo(found);
    return address;
}

// MPI connects two ranks when they first exchange something, so rank 0 gets an empty message from another machine.
uint32_t process_address(void) {
    bool elsewhere = process.local_rank == 0 && process.rank != 0;    // the first rank on its machine
    int other = process.size - (int)process_max_int(elsewhere ? process.size - process.rank : 0);
    if (other == process.size) return htonl(INADDR_LOOPBACK);
    if (process.rank == other) WAIT(MPI_Send, NULL, 0, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    if (process.rank != 0) return 0;
    WAIT(MPI_Recv, NULL, 0, MPI_BYTE, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    uint32_t address = connected_address();
    return address ? address : host_address();
}

#else

// ---- built without MPI

void process_start(int *argc, char ***argv) {
    (void)argc, (void)argv;
}

void process_started(void) {}
void process_end(void) {}
void process_sum_float(float *values, size_t n) {
    (void)values, (void)n;
}
void process_sum_double(double *values, size_t n) {
    (void)values, (void)n;
}
int64_t process_max_int(int64_t value) {
    return value;
}
void process_broadcast(void *data, size_t bytes) {
    (void)data, (void)bytes;
}
void process_gather(void *all, size_t bytes) {
    (void)all, (void)bytes;
}
void process_barrier(void) {}
void process_bring(void *data, size_t bytes, int from) {
    (void)data, (void)bytes, (void)from;
}
uint32_t process_address(void) {
    return 0;
}

#endif

void process_agree(bool done, const Error *error) {
    Error quiet = {.code = (ExitCode)process_max_int(done ? 0 : error->code)};
    if (quiet.code != EXIT_DONE) fail_with(done ? &quiet : error);
}

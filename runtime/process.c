#define _GNU_SOURCE
#include "runtime/process.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <time.h>
#include <unistd.h>

#include "runtime/clock.h"

#ifdef USE_MPI
#include <mpi.h>
#endif

Process process = {0, 1, 0, 1};

// ---- what the launcher says

// A number from the first of these variables that is set, or the fallback. Open MPI, MPICH and Intel MPI, Slurm's PMI
// and PMIx.
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

// ---- signals

static const int stop_signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
enum { STOP_SIGNALS = sizeof stop_signals / sizeof *stop_signals };

static sigset_t held;       // stop_signals, once process_hold_signals() has run
static sigset_t ignored;    // those of them that were ignored at the start
static atomic_bool holding, catching, stop_requested;

// Ends the process as the signal does by default.
static void end_by(int number) {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &one, NULL);
    raise(number);
}

// One Ctrl-C may arrive twice within moments, from the terminal and from a wrapper that passes it on: that is a single
// request to stop.
static void *wait_for_signals(void *unused) {
    const double moment = 1;    // seconds
    double first = INFINITY;    // when the first request came
    (void)unused;
    for (;;) {
        int number;
        if (sigwait(&held, &number) != 0) continue;
        if (sigismember(&ignored, number) && (number == SIGHUP || !catching)) continue;
        if (!catching || (number == SIGINT && now() - first >= moment)) end_by(number);
        first = fmin(first, now());
        stop_requested = true;
    }
    return NULL;
}

// Did a library start threads before main()? OpenBLAS does.
static bool has_threads(void) {
    DIR *tasks = opendir("/proc/self/task");
    int count = 0;
    for (struct dirent *entry; tasks && (entry = readdir(tasks));) count += entry->d_name[0] != '.';
    if (tasks) closedir(tasks);
    return count > 1;
}

static void note_ignored(void) {
    sigemptyset(&ignored);
    for (int i = 0; i < STOP_SIGNALS; i++) {
        struct sigaction action;
        sigaction(stop_signals[i], NULL, &action);
        if (action.sa_handler == SIG_IGN) sigaddset(&ignored, stop_signals[i]);
    }
}

void process_hold_signals(char **argv) {
    sigset_t before;
    pthread_attr_t detached;
    pthread_t thread;
    bool blocked_before = true;
    if (atomic_exchange(&holding, true)) return;
    sigemptyset(&held);
    for (int i = 0; i < STOP_SIGNALS; i++) sigaddset(&held, stop_signals[i]);
    pthread_sigmask(SIG_BLOCK, &held, &before);
    for (int i = 0; i < STOP_SIGNALS; i++) blocked_before = blocked_before && sigismember(&before, stop_signals[i]);
    // A new program inherits what is blocked. (AT_BASE is 0 where the dynamic linker was started by name;
    // /proc/self/exe is the linker then.)
    if (argv && !blocked_before && has_threads() && getauxval(AT_BASE)) execv("/proc/self/exe", argv);
    note_ignored();
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    int status = pthread_create(&thread, &detached, wait_for_signals, NULL);
    if (status != 0)
        fail(EXIT_RESOURCE,
             "the thread that waits for signals cannot be started: %s.\n"
             "  Raise the limit on processes (ulimit -u), or that of the container.",
             strerror(status));
    pthread_attr_destroy(&detached);
}

void process_catch_signals(void) {
    process_hold_signals(NULL);
    signal(SIGPIPE, SIG_IGN);    // training continues when whoever reads the output leaves
    catching = true;
}

bool process_stop_requested(void) {
    return stop_requested;
}

#ifdef USE_MPI

// ---- several processes

// What is wrong with a flag, a file or the run folder, all processes find at the same time. So one that fails waits a
// second for the others to fail, too: then the first that has a message prints it, and all end by themselves. Open MPI,
// told to abort, takes twice the grace period to do so, and with MPI_Abort from several at once its own messages get
// lost.
static MPI_Comm ending;
static bool all_end;

static bool speaker(bool says) {
    static int mine, first;    // MPI may still use them after the second
    MPI_Request request;
    int done = 0;
    mine = says ? process.rank : process.size;
    if (MPI_Iallreduce(&mine, &first, 1, MPI_INT, MPI_MIN, ending, &request) != MPI_SUCCESS) return says;
    for (int i = 0; i < 100 && !done; i++) {
        if (i) usleep(10000);
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return says;
    }
    all_end = done;
    return all_end ? first == process.rank : says;
}

// MPI_Abort has mpirun end the others. The exit code goes along, and mpirun reports it as its own.
static void end_all(int code) {
    if (!all_end) MPI_Abort(MPI_COMM_WORLD, code);
    MPI_Finalize();
}

static void check(int status, const char *what) {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(status, text, &length);
    fail(EXIT_PEER,
         "process %d of %d: %s failed: %s.\n"
         "  Another process has died or can't be reached; see its message above, then go on with --resume.",
         process.rank, process.size, what, text);
}

void process_start(int *argc, char ***argv) {
    if (launched_size() < 2) return;
    int threads;
    check(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &threads), "MPI_Init_thread");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &process.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &process.size);
    if (process.size != launched_size())
        fail(EXIT_PEER,
             "the launcher started %d processes, but MPI connects %d of them.\n"
             "  The launcher must be of the same MPI as the program: use scripts/launch.sh, or srun --mpi=pmix.",
             launched_size(), process.size);
    fail_hook = end_all;
    check(MPI_Comm_dup(MPI_COMM_WORLD, &ending), "MPI_Comm_dup");
    fail_speaker = speaker;
    warn_off = process.rank > 0;
    MPI_Comm local;
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, process.rank, MPI_INFO_NULL, &local),
          "MPI_Comm_split_type");
    MPI_Comm_rank(local, &process.local_rank);
    MPI_Comm_size(local, &process.local_size);
    MPI_Comm_free(&local);
}

void process_end(void) {
    if (process.size > 1) MPI_Finalize();
    fail_hook = NULL;
    fail_speaker = NULL;
}

// A count of MPI is an int, and its buffers stay small this way.
#define CHUNK ((size_t)1 << 24)

static int chunk(size_t n, size_t at) {
    return (int)(n - at < CHUNK ? n - at : CHUNK);
}

static void all_reduce(void *values, int n, MPI_Datatype type, MPI_Op op) {
    check(MPI_Allreduce(MPI_IN_PLACE, values, n, type, op, MPI_COMM_WORLD), "MPI_Allreduce");
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
        check(MPI_Bcast((char *)data + at, chunk(bytes, at), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
}

void process_barrier(void) {
    if (process.size > 1) check(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier");
}

#else

// ---- built without MPI

void process_start(int *argc, char ***argv) {
    (void)argc, (void)argv;
    int size = launched_size();
    if (size > 1)
        fail(EXIT_USAGE,
             "a launcher started %d processes, but this program was built without MPI.\n"
             "  Install libopenmpi-dev and run make again, or start one process.",
             size);
}

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
void process_barrier(void) {}

#endif

void process_agree(bool done, const Error *error) {
    Error quiet = {.code = (ExitCode)process_max_int(done ? 0 : error->code)};
    if (quiet.code != EXIT_DONE) fail_with(done ? &quiet : error);
}

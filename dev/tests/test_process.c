// process: sums, broadcasts and stops of several ranks, started by scripts/launch.sh from the folder of the Makefile;
// what happens when one of them hangs; the mode of a program's threads. Without MPI only the tests of a single process
// run. Each worker is this program itself, with a word as its argument.
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <signal.h>
#include <time.h>

#define START_SECONDS 5
#define LAST_SECONDS 5
#include "runtime/process.c"

#include "dev/tests/check.h"
#include "run/metrics.h"
#include "runtime/clock.h"
#include "runtime/error.h"
#include "runtime/file.h"
#include "runtime/heartbeat.h"
#include "runtime/start.h"

static char self[4096];

// ---- the workers

static void expect(bool condition, const char *what) {
    if (!condition) fail(EXIT_DIVERGED, "process %d of %d: %s is wrong", process.rank, process.size, what);
}

// All ranks receive rank 0's values.
static void expect_same(const void *values, size_t bytes, const char *what) {
    void *first = malloc(bytes);
    memcpy(first, values, bytes);
    process_broadcast(first, bytes);
    expect(memcmp(first, values, bytes) == 0, what);
    free(first);
}

static void work_sums(void) {
    const size_t n = ((size_t)1 << 24) + 12345;    // more than one piece
    float *x = malloc(n * sizeof *x), *y = malloc(n * sizeof *y);
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) x[i] = y[i] = (float)(i % 1000) * 0.1f * (float)(process.rank + 1);
    process_sum_float(x, n);
    process_sum_float(y, n);
    double ranks = process.size * (process.size + 1) / 2.0;
    for (size_t i = 0; i < n; i++) wrong += !(fabs(x[i] - (double)(i % 1000) * 0.1 * ranks) < 1e-3);
    expect(wrong == 0, "the sum of floats");
    expect(memcmp(x, y, n * sizeof *x) == 0, "the same sum a second time");
    expect_same(x, n * sizeof *x, "the sum on every rank");
    double d[3] = {1e-300, process.rank, 0.1};
    process_sum_double(d, 3);
    expect(fabs(d[0] / (1e-300 * process.size) - 1) < 1e-15 && d[1] == process.size * (process.size - 1) / 2,
           "the sum of doubles");
    expect_same(d, sizeof d, "the sum of doubles on every rank");
    expect(process_max_int(-5 - process.rank) == -5, "the maximum");
    expect(process_max_int((int64_t)1 << 40 << process.rank) == (int64_t)1 << 40 << (process.size - 1),
           "a maximum of 64 bits");
    process_broadcast(NULL, 0);
    expect(process.rank == process_launched_rank(), "the rank from the environment");
    expect(process.local_size == process.size && process.local_rank == process.rank, "the rank on this machine");
    process_barrier();
    if (process.rank == 0)
        printf("%d processes, OMP_NUM_THREADS %s\n", process.size,
               getenv("OMP_NUM_THREADS") ? getenv("OMP_NUM_THREADS") : "unset");
    free(x);
    free(y);
}

static void hang(void) {
    for (;;) pause();
}

// All ranks fail, and something that runs at exit never returns.
static void work_hang(void) {
    process_catch_signals();
    atexit(hang);
    fail(EXIT_DIVERGED, "all ranks failed");
}

// The main thread of rank 1 makes no progress while rank 0 waits for it: it hangs for good, or uses files for three
// seconds and is suspended for two, or waits itself, for something that never comes.
static void work_stuck(const char *how) {
    enum { TIMEOUT = 1 };
    static char data[1 << 20];
    Error error;
    Heartbeat *heartbeat = heartbeat_start(60, TIMEOUT);
    activity_does("reading data");
    for (int i = 0; process.rank == 1 && (i < 30 || !strcmp(how, "stuck")); i++) {
        if (!strcmp(how, "busy")) file_sync(AT_FDCWD, "/proc", &error);
        if (!strcmp(how, "busy") && i == 0)
            expect(system("sleep 0.2; kill -STOP $PPID; sleep 2; kill -CONT $PPID") == 0, "the suspension");
        if (!strcmp(how, "deadlock")) process_bring(data, sizeof data, 1);
        usleep(100000);
    }
    process_barrier();
    heartbeat_stop(heartbeat);
    printf("rank %d came through\n", process.rank);
}

// Says what a progress line would look like.
static void work_show(void) {
    Progress progress = {0};
    progress_show(&progress, process.rank == 0 ? "line" : "", false);
    process_barrier();
}

// Runs steps until a stop. Then rank 0 takes longer to save than the grace period after a dead rank.
static void work_stop(void) {
    process_catch_signals();
    process_barrier();    // a signal would end a rank that does not catch it yet
    if (process.rank == 0) {
        printf("started\n");
        fflush(stdout);
    }
    float x[1000] = {0};
    while (!process_max_int(process_stop_requested())) {
        process_sum_float(x, 1000);
        usleep(1000 + 1000 * (useconds_t)process.rank);
    }
    for (int i = 0; process.rank == 0 && i < 30; i++) usleep(100000);
    process_barrier();
    if (process.rank == 0) printf("saved\n");
    process_end();
    exit(EXIT_STOPPED);
}

static int work(const char *what, int argc, char **argv) {
    process_hold_signals(argv);
    if (!strcmp(what, "late") && process_launched_rank() == 1) sleep(60);
    process_start(&argc, &argv);
    process_started();
    if (!strcmp(what, "last") && process.rank == 1) sleep(60);
    if (!strcmp(what, "sums")) work_sums();
    else if (!strcmp(what, "hang")) work_hang();
    else if (!strcmp(what, "stop")) work_stop();
    else if (!strcmp(what, "show")) work_show();
    else if (strcmp(what, "last") != 0) work_stuck(what);
    process_end();
    return 0;
}

// ---- the checks

typedef struct {
    const char *processes, *what;
} Job;

static void launch(void *data) {
    const Job *job = data;
    setenv("GRACE", "1", 0);
    execl("scripts/launch.sh", "scripts/launch.sh", job->processes, self, job->what, NULL);
    perror("scripts/launch.sh");
    exit(100);
}

static char output[8192];    // of the last job

static void run_job(const char *processes, const char *what, int expected, const char *says) {
    int code = check_fork(launch, &(Job){processes, what}, output, sizeof output);
    CHECK(code == expected && strstr(output, says), "%s: expected code %d and \"%s\", found %d: %s", what, expected,
          says, code, output);
}

static void test_one(void) {
    check_group("one process, no MPI");
    run_job("1", "sums", 0, "1 processes");
    setenv("MPIRUN", "no-such-mpirun", 1);
    run_job("2", "sums", EXIT_USAGE, "no-such-mpirun is not installed");
    unsetenv("MPIRUN");
}

// How a single process handles signals: some are ignored from the start, some are sent before process_catch_signals(),
// some after it.
typedef struct {
    int ignored, before, after[2], apart;
} Signals;    // apart: milliseconds between them

static void settle(void) {
    sigset_t pending;
    do {
        usleep(20000);
        sigpending(&pending);
    } while (sigismember(&pending, SIGHUP) || sigismember(&pending, SIGINT) || sigismember(&pending, SIGTERM));
    usleep(50000);
}

static void send_signals(void *data) {
    const Signals *s = data;
    signal(SIGHUP, SIG_DFL);    // nohup may have started the test
    if (s->ignored) signal(s->ignored, SIG_IGN);
    process_hold_signals(NULL);
    #pragma omp parallel num_threads(3)
    usleep(1);
    if (s->before) {
        kill(getpid(), s->before);
        settle();
    }
    process_catch_signals();
    for (int i = 0; i < 2 && s->after[i]; i++) {
        if (i) usleep(1000 * (useconds_t)s->apart);
        kill(getpid(), s->after[i]);
        settle();
    }
    printf("%d", process_stop_requested());
}

static void test_signals(void) {
    check_group("signals of one process");
    // clang-format off
    const struct { Signals signals; int code; const char *says, *what; } cases[] = {
        {{0, 0, {0, 0}, 0}, 0, "0", "no signal"},
        {{0, 0, {SIGINT, 0}, 0}, 0, "1", "one SIGINT"},
        {{0, 0, {SIGTERM, SIGTERM}, 0}, 0, "1", "two SIGTERM"},
        {{0, 0, {SIGUSR1, 0}, 0}, 0, "1", "SIGUSR1"},
        {{0, 0, {SIGHUP, 0}, 0}, 0, "1", "SIGHUP"},
        {{0, 0, {SIGINT, SIGINT}, 1000}, -SIGINT, "", "a second SIGINT ends it"},
        {{0, 0, {SIGTERM, SIGINT}, 1000}, -SIGINT, "", "a SIGINT after SIGTERM ends it"},
        {{0, 0, {SIGINT, SIGINT}, 0}, 0, "1", "two SIGINTs in quick succession are one request"},
        {{0, 0, {SIGTERM, SIGINT}, 0}, 0, "1", "so are a SIGINT and a SIGTERM"},
        {{0, SIGTERM, {0, 0}, 0}, -SIGTERM, "", "SIGTERM before signals are caught"},
        {{SIGHUP, 0, {SIGHUP, 0}, 0}, 0, "0", "SIGHUP under nohup"},
        {{SIGHUP, SIGHUP, {SIGTERM, 0}, 0}, 0, "1", "SIGTERM under nohup"},
        {{SIGINT, SIGINT, {0, 0}, 0}, 0, "0", "SIGINT, ignored at the start, before signals are caught"},
        {{SIGINT, 0, {SIGINT, 0}, 0}, 0, "1", "SIGINT, ignored at the start, as in a shell's background job"},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case();
        int code = check_fork(send_signals, (void *)&cases[i].signals, output, sizeof output);
        CHECK(code == cases[i].code && !strcmp(output, cases[i].says), "%s: code %d, \"%s\"", cases[i].what, code,
              output);
    }
}

#ifdef USE_MPI

static void test_sums(void) {
    check_group("sums, maxima and broadcasts of 2 and 3 ranks");
    run_job("2", "sums", 0, "2 processes, OMP_NUM_THREADS");
    CHECK(!strstr(output, "unset"), "%s", output);
    run_job("3", "sums", 0, "3 processes, OMP_NUM_THREADS");
}

static void test_exit(void) {
    check_group("ranks whose exit hangs are ended");
    double start = now();
    run_job("2", "hang", EXIT_DIVERGED, "all ranks failed");
    CHECK(now() - start < 30, "%.1f s", now() - start);
}

static void test_progress(void) {
    check_group("a rank that does nothing ends the others, but not one that works or is suspended");
    run_job("2", "stuck", EXIT_PEER, "no progress of rank 1 on ");
    CHECK(strstr(output, " (reading data) for 1 s.") && strstr(output, "--progress-timeout") &&
              !strstr(output, "came through"),
          "%s", output);
    run_job("2", "late", EXIT_PEER, "not all ranks have started within 5 s; this one is in MPI_Init_thread");
    run_job("2", "last", EXIT_PEER, "not all ranks have ended within 5 s; this one is in MPI_Finalize");
    run_job("2", "deadlock", EXIT_PEER, "all ranks wait for each other, without progress of rank 0 on ");
    CHECK(strstr(output, "(in MPI_Barrier, reading data), rank 1 on ") && strstr(output, "(in MPI_Send, reading"), "%s",
          output);
    run_job("2", "busy", 0, "rank 0 came through");
}

// Starts two ranks, sends the signals (the first number is the milliseconds between them), and returns the output and
// the exit status.
static void stop_from_outside(void *data) {
    int *signals = data, ends[2], status;
    char line[64];
    if (pipe(ends) != 0) exit(101);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1);
        launch(&(Job){"2", "stop"});
    }
    close(ends[1]);
    FILE *lines = fdopen(ends[0], "r");
    while (fgets(line, sizeof line, lines)) {
        for (int i = 1; !strcmp(line, "started\n") && signals[i]; i++) {
            kill(child, signals[i]);
            usleep(1000 * (useconds_t)signals[0]);
        }
        fputs(line, stdout);
        fflush(stdout);
    }
    waitpid(child, &status, 0);
    exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

static void test_stop(void) {
    check_group("a stop leaves time to save");
    int signals[][4] = {{500, SIGTERM, 0}, {500, SIGINT, 0}, {500, SIGTERM, SIGTERM, 0}, {50, SIGINT, SIGINT, 0}};
    for (int i = 0; i < 4; i++) {
        check_case();
        int code = check_fork(stop_from_outside, signals[i], output, sizeof output);
        CHECK(code == EXIT_STOPPED && strstr(output, "saved"), "signals %d, code %d: %s", i, code, output);
    }
    double start = now();
    int code = check_fork(stop_from_outside, (int[]){1500, SIGINT, SIGINT, 0}, output, sizeof output);
    CHECK(code != 0 && code != EXIT_STOPPED && !strstr(output, "saved") && now() - start < 20,
          "a second SIGINT, code %d: %s", code, output);
}

static void test_terminal(void) {
    check_group("plain lines where mpirun's output goes to a file");
    setenv("TERM", "xterm", 1);
    run_job("2", "show", 0, "line");
    CHECK(!strchr(output, 27), "%s", output);
}

#endif

// In a process of its own: after a fork, the threads of OpenMP are not there any more.
static void use_subnormal(void *unused) {
    int wrong = 0;
    (void)unused;
    start_program("test_process");
    #pragma omp parallel num_threads(4) reduction(+ : wrong)
    {
        volatile float least = FLT_MIN, subnormal = 1e-40f;
        wrong += least / 2 != 0 || subnormal * 1e20f != 0;
    }
    exit(wrong);
}

static void test_subnormal(void) {
    check_group("all threads of a program count subnormal numbers as 0");
#ifdef __SSE__
    int wrong = check_fork(use_subnormal, NULL, output, sizeof output);
    CHECK(wrong == 0, "%d threads do not: %s", wrong, output);
#endif
}

int main(int argc, char **argv) {
    program_name = "test_process";
    if (argc == 2) return work(argv[1], argc, argv);
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return 1;
    signal(SIGINT, SIG_DFL);    // in a shell's background job it is ignored, and mpirun would inherit that
    test_one();
    test_subnormal();
    test_signals();
#ifdef USE_MPI
    if (system("command -v mpirun > /dev/null") == 0) {
        test_sums();
        test_exit();
        test_progress();
        test_stop();
        test_terminal();
    } else {
        printf("left out: no mpirun\n");
    }
#else
    printf("left out: built without MPI\n");
#endif
    return check_verdict();
}

// Shared by the C tests: CHECK, a line for each group of checks, the verdict, and a way to test code that ends the
// process.
#ifndef DEV_TESTS_CHECK_H
#define DEV_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// The larger of two errors, or NaN if either is NaN, which fmax() would drop.
static inline double worse(double a, double b) {
    return a >= b || a != a ? a : b;
}

// check_case() begins a case; a group that never calls it is one case. A case fails if one of its checks fails. A case
// without a check is not counted.
static int cases_passed, cases_failed, case_checks, case_failures, group_failures;
static const char *group_name;

#define CHECK(condition, ...)                                      \
    do {                                                           \
        case_checks++;                                             \
        if (!(condition)) {                                        \
            case_failures++;                                       \
            group_failures++;                                      \
            printf("FAILED %s:%d: ", __FILE__, __LINE__);          \
            printf(__VA_ARGS__);                                   \
            printf("\n");                                          \
        }                                                          \
    } while (0)

// Ends the previous case and begins another.
static inline void check_case(void) {
    if (case_failures) cases_failed++;
    else if (case_checks) cases_passed++;
    case_checks = case_failures = 0;
}

// Ends the previous group and begins another.
static inline void check_group(const char *name) {
    check_case();
    if (group_name) printf("%-6s %s\n", group_failures ? "FAILED" : "ok", group_name);
    group_name = name;
    group_failures = 0;
    fflush(stdout);
}

// The last line, and the exit status of main(): 0 if some case passed and none failed.
static inline int check_verdict(void) {
    check_group(NULL);
    printf("%d passed, %d failed\n", cases_passed, cases_failed);
    return cases_failed > 0 || cases_passed == 0;
}

static inline void check_leave(int status, void *unused) {
    (void)unused;
    fflush(NULL);
    _exit(status);
}

// Runs body(data) in a child process, with its stdout and stderr in `output`. Returns its exit code, or -signal. The
// child exits before any exit handler of the parent runs, because a driver's handler would destroy what belongs to the
// parent.
static inline int check_fork(void (*body)(void *), void *data, char *output, size_t size) {
    int ends[2], status;
    fflush(stdout);
    if (pipe(ends) != 0) abort();
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        if (on_exit(check_leave, NULL) != 0) abort();    // handlers run in reverse order: this one first
        body(data);
        exit(0);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t got; (got = read(ends[0], output + n, size - 1 - n)) > 0;) n += (size_t)got;
    output[n] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

#endif

// check.h's own promises, which every other test relies on.
#include "dev/tests/check.h"

static void exit_handler(void) {
    printf("the parent's exit handler ran\n");
    fflush(stdout);
    _exit(99);
}

static void returns(void *data) {
    printf("%s", (const char *)data);
}

static void aborts(void *data) {
    (void)data;
    abort();
}

// Two cases of two checks each, one of which fails, a case without a check, and a group without cases.
static void counts(void *data) {
    (void)data;
    cases_passed = cases_failed = case_checks = case_failures = 0;
    check_group("cases");
    for (int i = 0; i < 2; i++) {
        check_case();
        CHECK(i == 0, "%d", i);
        CHECK(i == 0, "%d again", i);
    }
    check_case();
    check_group("a group");
    CHECK(1, "1");
    CHECK(2, "2");
    exit(check_verdict());
}

static void counts_nothing(void *data) {
    (void)data;
    cases_passed = cases_failed = case_checks = case_failures = 0;
    exit(check_verdict());
}

int main(void) {
    char output[1024];
    check_group("a child exits without running the parent's exit handlers");
    if (atexit(exit_handler) != 0) abort();
    CHECK(check_fork(returns, "returns", output, sizeof output) == 0, "%s", output);
    CHECK(strcmp(output, "returns") == 0, "%s", output);
    CHECK(check_fork(aborts, NULL, output, sizeof output) == -6, "%s", output);
    check_group("cases are counted, not checks");
    CHECK(check_fork(counts, NULL, output, sizeof output) == 1, "%s", output);
    CHECK(strstr(output, "FAILED cases\nok     a group\n2 passed, 1 failed\n"), "%s", output);
    CHECK(check_fork(counts_nothing, NULL, output, sizeof output) == 1, "no case at all: %s", output);
    int failed = check_verdict();
    fflush(stdout);
    _exit(failed);
}

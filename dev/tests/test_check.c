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

static void exits(void *data) {
    (void)data;
    printf("exits");
    exit(5);
}

static void aborts(void *data) {
    (void)data;
    abort();
}

int main(void) {
    char output[256];
    check_group("a child leaves without the parent's exit handlers");
    if (atexit(exit_handler) != 0) abort();
    CHECK(check_fork(returns, "returns", output, sizeof output) == 0, "%s", output);
    CHECK(strcmp(output, "returns") == 0, "%s", output);
    CHECK(check_fork(exits, NULL, output, sizeof output) == 5, "%s", output);
    CHECK(strcmp(output, "exits") == 0, "%s", output);
    CHECK(check_fork(aborts, NULL, output, sizeof output) == -6, "%s", output);
    int failed = check_verdict();
    fflush(stdout);
    _exit(failed);
}

// metrics: formatted numbers, the progress line, metrics.jsonl with partial lines and full disks, truncation on
// --resume, the terminal.
#include <math.h>
#include <pty.h>
#include <signal.h>
#include <sys/resource.h>

#include "dev/tests/check.h"
#include "runtime/human.h"
#include "run/metrics.h"

static char path[] = "/tmp/test_metrics.XXXXXX";
static Error error;

static char *contents(void) {
    static char text[65536];
    FILE *file = fopen(path, "rb");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = 0;
    if (file) fclose(file);
    return text;
}

static void put(const char *text) {
    FILE *file = fopen(path, "wb");
    fputs(text, file);
    fclose(file);
}

static void same(const char *found, const char *want) {
    CHECK(!strcmp(found, want), "\"%s\", expected \"%s\"", found, want);
}

static void test_human(void) {
    check_group("formatted numbers");
    same(human_count(0).text, "0");
    same(human_count(999).text, "999");
    same(human_count(1000).text, "1.00 k");
    same(human_count(9996).text, "10.0 k");
    same(human_count(122880).text, "123 k");
    same(human_count(999600).text, "1.00 M");
    same(human_count(12345678).text, "12.3 M");
    same(human_count(1.5e15).text, "1500 T");
    same(human_bytes(512).text, "512 bytes");
    same(human_bytes(1.995e9).text, "2.00 GB");
    same(human_duration(45.4).text, "45 s");
    same(human_duration(59.7).text, "1 min 0 s");
    same(human_duration(725).text, "12 min 5 s");
    same(human_duration(5640).text, "1 h 34 min");
    same(human_duration(273600).text, "3 d 4 h");
    same(human_duration(-1).text, "unknown");
    same(human_duration(NAN).text, "unknown");
    same(human_grouped(0).text, "0");
    same(human_grouped(999).text, "999");
    same(human_grouped(100000000).text, "100,000,000");
    same(human_grouped(UINT64_MAX).text, "18,446,744,073,709,551,615");
}

static StepMetrics step(int64_t n) {
    return (StepMetrics){.step = n,
                         .tokens = n * 1024,
                         .loss = 6.0312f,
                         .lr = 5.9e-4f,
                         .grad_norm = 0.84f,
                         .ms = 1160,
                         .tok_per_s = 221,
                         .mfu = 0.73};
}

static void test_line(void) {
    check_group("the progress line");
    char line[256];
    StepMetrics m = step(120);
    metrics_line(line, sizeof line, &m, 5000, 5640);
    same(
        line,
        "step   120/5000 | loss 6.0312 | lr 5.9e-04 | norm 0.84 | 1.16 s, 221 tok/s, 73% of peak | 123 k tokens | 1 h 34 min left");
    m.slowest_rank = 5;
    m.slowest_ms = 1310;
    m.mean_ms = 102.4;
    metrics_line(line, sizeof line, &m, 5000, -1);
    same(
        line,
        "step   120/5000 | loss 6.0312 | lr 5.9e-04 | norm 0.84 | 1.16 s, 221 tok/s, 73% of peak | rank 5 slow: 1.31 s, mean 102 ms | 123 k tokens");
    m.slowest_ms = 0;
    m.validated = true;
    m.val_loss = 5.1234f;
    m.ms = 41.7;
    m.tok_per_s = 24576;
    metrics_line(line, sizeof line, &m, 1234567, -1);
    same(
        line,
        "step     120/1234567 | loss 6.0312 | val 5.1234 | lr 5.9e-04 | norm 0.84 | 42 ms, 24.6 k tok/s, 73% of peak | 123 k tokens");
    m.val_loss = NAN;
    metrics_line(line, sizeof line, &m, 1234567, -1);
    CHECK(strstr(line, " | val nan | "), "%s", line);
    m.loss = INFINITY;
    metrics_line(line, 20, &m, 5, -1);
    CHECK(strlen(line) == 19, "a short buffer");
}

static void test_file(void) {
    check_group("metrics.jsonl: digits, absent and infinite values, partial lines");
    unlink(path);
    Metrics *metrics = metrics_open(path, &error);
    CHECK(metrics, "%s", error.text);
    StepMetrics m = step(1);
    m.loss = 0.1f;
    m.grad_norm = NAN;
    metrics_write(metrics, &m);
    m = step(2);
    m.validated = true;
    m.val_loss = 1.0f / 3;
    metrics_write(metrics, &m);
    m.val_loss = NAN;
    metrics_write(metrics, &m);
    same(
        contents(),
        "{\"step\": 1, \"tokens\": 1024, \"loss\": 0.100000001, \"lr\": 0.000590000011, \"grad_norm\": null, \"ms\": 1160, \"tok_per_s\": 221, \"mfu\": 0.73}\n"
        "{\"step\": 2, \"tokens\": 2048, \"loss\": 6.03119993, \"lr\": 0.000590000011, \"grad_norm\": 0.839999974, \"ms\": 1160, \"tok_per_s\": 221, \"mfu\": 0.73, "
        "\"val_loss\": 0.333333343}\n"
        "{\"step\": 2, \"tokens\": 2048, \"loss\": 6.03119993, \"lr\": 0.000590000011, \"grad_norm\": 0.839999974, \"ms\": 1160, \"tok_per_s\": 221, \"mfu\": 0.73, "
        "\"val_loss\": null}\n");
    metrics_close(metrics);
    put("{\"step\": 1}\n{\"step\": 2, \"lo");
    metrics = metrics_open(path, &error);
    same(contents(), "{\"step\": 1}\n");
    metrics_close(metrics);
    put("{\"step\": 1, no line ends here");
    metrics_close(metrics_open(path, &error));
    same(contents(), "");
    CHECK(!metrics_open("/nonexistent/metrics.jsonl", &error) && error.code == EXIT_RESOURCE &&
              strstr(error.text, "/nonexistent"),
          "%s", error.text);
}

static void test_cut(void) {
    check_group("truncation on --resume");
    unlink(path);
    CHECK(metrics_cut(path, 5, &error), "no file: %s", error.text);
    put("{\"step\": 1}\n{\"step\": 2, \"loss\": 3}\nrubbish\n{\"loss\": 2}\n{\"step\": 3}\n{\"step\": 4}\n{\"st");
    CHECK(metrics_cut(path, 3, &error), "%s", error.text);
    same(contents(), "{\"step\": 1}\n{\"step\": 2, \"loss\": 3}\n{\"step\": 3}\n");
    CHECK(metrics_cut(path, 3, &error), "%s", error.text);
    same(contents(), "{\"step\": 1}\n{\"step\": 2, \"loss\": 3}\n{\"step\": 3}\n");
    CHECK(metrics_cut(path, 0, &error), "%s", error.text);
    same(contents(), "");
    static const char zeros[] = "{\"step\": 1}\n\0\0\0\0{\"step\": 2}\n{\"step\": 3}\n{\"step\": 4} }\n"
                                "{\"step\": 5, \"step\": 9}\n{\"step\": 6}\n{\"step\": 7}\n";
    FILE *file = fopen(path, "wb");
    fwrite(zeros, 1, sizeof zeros - 1, file);
    fclose(file);
    CHECK(metrics_cut(path, 6, &error), "%s", error.text);
    same(contents(), "{\"step\": 1}\n{\"step\": 3}\n{\"step\": 6}\n");
}

// Writes to a file whose size limit ends in the middle of a line (like a disk that fills up).
static void write_limited(void *unused) {
    (void)unused;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){300, 300});
    Metrics *metrics = metrics_open(path, &error);
    for (int i = 1; i <= 5; i++) {
        StepMetrics m = step(i);
        metrics_write(metrics, &m);
    }
    metrics_close(metrics);
    printf("on it goes\n");
}

static void test_full_disk(void) {
    check_group("a full disk");
    char output[4096];
    put("");
    CHECK(check_fork(write_limited, NULL, output, sizeof output) == 0 && strstr(output, "this line is missing"),
          "a file of at most 300 bytes: %s", output);
    const char *first = strstr(output, "warning: ");
    CHECK(first && !strstr(first + 10, "warning") && strstr(output, "on it goes"), "one warning: %s", output);
    const char *text = contents(), *second = strstr(text, "{\"step\": 2");
    CHECK(second && !strstr(text, "\"step\": 3") && strlen(text) < 300 && text[strlen(text) - 1] == '\n',
          "complete lines only: %s", text);
}

static void show(void *unused) {
    (void)unused;
    Progress progress = {0};
    setenv("TERM", "xterm", 1);
    progress_show(&progress, "0123456789012345678901234567890123456789", false);
    progress_show(&progress, "step 1 | loss 2.50 | norm 1.25", false);
    progress_show(&progress, "short", false);
    progress_end(&progress);
    progress_end(&progress);
    progress_show(&progress, "kept | and longer than the terminal", true);
}

static void test_terminal(void) {
    check_group("plain lines in a file, one refreshed line on a terminal");
    char output[4096];
    check_fork(show, NULL, output, sizeof output);
    same(output, "0123456789012345678901234567890123456789\nstep 1 | loss 2.50 | norm 1.25\nshort\n"
                 "kept | and longer than the terminal\n");
    struct winsize window = {.ws_row = 10, .ws_col = 21};
    int fd;
    pid_t child = forkpty(&fd, NULL, NULL, &window);
    if (child == 0) {
        show(NULL);
        exit(0);
    }
    size_t n = 0;
    for (ssize_t got; n < sizeof output - 1 && (got = read(fd, output + n, sizeof output - 1 - n)) > 0;)
        n += (size_t)got;
    output[n] = 0;
    waitpid(child, NULL, 0);
    close(fd);
    same(output, "\r01234567890123456789\x1b[K\rstep 1 | loss 2.50\x1b[K\rshort\x1b[K\r\n"
                 "\rkept | and longer than the terminal\x1b[K\r\n");
}

int main(void) {
    program_name = "test_metrics";
    close(mkstemp(path));
    test_human();
    test_line();
    test_file();
    test_cut();
    test_full_disk();
    test_terminal();
    unlink(path);
    return check_verdict();
}

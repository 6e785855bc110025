#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "eval/eval.h"
#include "runtime/clock.h"
#include "runtime/human.h"

static void bar_show(Bar *p, uint64_t done) {
    enum { WIDTH = 24 };
    static const char FULL[] = "########################", EMPTY[] = "........................";
    double t = now();
    if (!p->visible || done >= p->total || t - p->shown < 0.2) return;
    int bar = (int)(WIDTH * done / p->total);
    p->shown = t;
    fprintf(stderr, "\rtokens [%.*s%.*s] %s/%s", bar, FULL, WIDTH - bar, EMPTY, human_grouped(done).text,
            human_grouped(p->total).text);
    if (done)
        fprintf(stderr, ", %s left", human_duration((t - p->start) * (double)(p->total - done) / (double)done).text);
    fprintf(stderr, "\033[K");
}

// A program that Ctrl-C ends leaves the bar, and what follows it begins a line.
static void end_line(int number) {
    ssize_t written = write(STDERR_FILENO, "\n", 1);
    (void)written;
    raise(number);    // the default action, after the return
}

void bar_start(Bar *p) {
    p->start = now();
    p->visible = isatty(STDERR_FILENO);
    struct sigaction before, action = {.sa_handler = end_line, .sa_flags = (int)SA_RESETHAND};
    if (!p->visible || sigaction(SIGINT, NULL, &before) != 0 || before.sa_handler == SIG_IGN) return;
    sigaction(SIGINT, &action, NULL);
}

void bar_next(Bar *p, uint64_t tokens) {
    p->done += p->piece;
    p->piece = tokens;
    bar_show(p, p->done);
}

void bar_within(Bar *p, size_t part, size_t parts) {
    bar_show(p, p->done + (uint64_t)((double)p->piece * (double)part / (double)parts));
}

void bar_clear(Bar *p) {
    if (p->visible && p->shown > 0) fprintf(stderr, "\r\033[K");
    p->shown = 0;
}

void bar_end(Bar *p) {
    p->done += p->piece;
    p->piece = 0;
    bar_clear(p);
}

// schedule: each kind's formula at its corners, the warmup and its restart.
#include <math.h>

#include "dev/tests/check.h"
#include "run/schedule.h"

#define IS(schedule, step, want)                                                                                                 \
    CHECK(fabs(schedule_lr(&(schedule), step) - (want)) < 1e-12, "step %d: %.12g, expected %.12g", (int)(step),                  \
          schedule_lr(&(schedule), step), (double)(want))

int main(void) {
    Schedule s = {SCHEDULE_CONSTANT, 6e-4, 0.1, 100, 1100, 0};
    check_group("warmup and constant");
    IS(s, 0, 6e-6);
    IS(s, 49, 3e-4);
    IS(s, 99, 6e-4);
    IS(s, 1099, 6e-4);
    s.warmup = 0;
    IS(s, 0, 6e-4);
    s.warmup = 1;
    IS(s, 0, 6e-4);

    check_group("cosine");
    s = (Schedule){SCHEDULE_COSINE, 1, 0.1, 100, 1100, 0};
    IS(s, 0, 0.01);
    IS(s, 99, 1);
    IS(s, 100, 1);
    IS(s, 350, 0.1 + 0.9 * (1 + sqrt(0.5)) / 2);
    IS(s, 600, 0.55);
    IS(s, 1100, 0.1);
    IS(s, 5000, 0.1);

    check_group("linear");
    s.kind = SCHEDULE_LINEAR;
    IS(s, 100, 1);
    IS(s, 600, 0.55);
    IS(s, 1099, 1 - 0.9 * 0.999);
    IS(s, 1100, 0.1);

    check_group("wsd: the last fifth");
    s.kind = SCHEDULE_WSD;
    IS(s, 880, 1);
    IS(s, 879, 1);
    IS(s, 990, 0.55);
    IS(s, 1100, 0.1);
    s.steps = 3;    // a fifth of 3 steps is none
    s.warmup = 0;
    IS(s, 2, 1);

    check_group("a second warmup");
    s = (Schedule){SCHEDULE_LINEAR, 1, 0, 10, 110, 60};
    IS(s, 59, 0.51);
    IS(s, 60, 0.1 * 0.5);
    IS(s, 64, 0.5 * 0.46);
    IS(s, 69, 0.41);
    IS(s, 70, 0.4);

    check_group("a warmup longer than the run");
    s = (Schedule){SCHEDULE_COSINE, 1, 0, 1000, 10, 0};
    IS(s, 9, 0.01);
    return check_verdict();
}

// schedule: each kind's formula at its corners, the warmup and its restart.
#include <math.h>

#include "dev/tests/check.h"
#include "run/schedule.h"

#define IS(schedule, step, want)                                                                                                 \
    CHECK(fabs(schedule_lr(&(schedule), step) - (want)) < 1e-12, "step %d: %.12g, expected %.12g", (int)(step),                  \
          schedule_lr(&(schedule), step), (double)(want))

int main(void) {
    Schedule s = {.kind = SCHEDULE_CONSTANT, .lr = 6e-4, .min_lr_frac = 0.1, .warmup = 100, .steps = 1100};
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
    s = (Schedule){.kind = SCHEDULE_COSINE, .lr = 1, .min_lr_frac = 0.1, .warmup = 100, .steps = 1100};
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
    s.decay_frac = 0.2;
    IS(s, 880, 1);
    IS(s, 879, 1);
    IS(s, 990, 0.55);
    IS(s, 1100, 0.1);
    s.steps = 3;    // a fifth of 3 steps is none
    s.warmup = 0;
    IS(s, 2, 1);

    check_group("wsd: shapes");
    s = (Schedule){
        .kind = SCHEDULE_WSD, .lr = 1, .min_lr_frac = 0.1, .steps = 1000, .decay_frac = 0.4, .decay_shape = DECAY_SQRT};
    IS(s, 599, 1);
    IS(s, 600, 1);
    IS(s, 700, 0.1 + 0.9 * 0.5);
    IS(s, 704, 0.1 + 0.9 * (1 - sqrt(0.26)));
    IS(s, 1000, 0.1);
    s.decay_shape = DECAY_COSINE;
    IS(s, 600, 1);
    IS(s, 700, 0.1 + 0.9 * (1 + sqrt(0.5)) / 2);
    IS(s, 800, 0.55);
    IS(s, 1000, 0.1);

    check_group("wsd: fractions");
    s = (Schedule){.kind = SCHEDULE_WSD, .lr = 1, .steps = 100, .decay_frac = 0};
    IS(s, 0, 1);
    IS(s, 99, 1);
    IS(s, 100, 1);
    s.decay_frac = 1;
    IS(s, 0, 1);
    IS(s, 1, 0.99);
    IS(s, 99, 0.01);
    s.warmup = 10;    // the decay then starts during the warmup
    IS(s, 4, 0.5 * 0.96);
    s.decay_frac = 0.29;    // times 100 is less than 29 in binary
    IS(s, 71, 1);
    IS(s, 72, 1 - 1 / 29.0);
    s.decay_frac = 0.299;    // 29 steps
    IS(s, 72, 1 - 1 / 29.0);

    // Bits: with the defaults, wsd has exactly this formula.
    check_group("wsd: bits");
    for (int64_t steps = 0; steps < 2000; steps += steps < 50 ? 1 : 97) {
        s = (Schedule){.kind = SCHEDULE_WSD, .lr = 6e-4, .min_lr_frac = 0.1, .steps = steps, .decay_frac = 0.2};
        CHECK(schedule_decay_steps(&s) == steps / 5, "%d steps: %d", (int)steps, (int)schedule_decay_steps(&s));
        for (int64_t step = steps - steps / 5; step < steps; step++) {
            double p = (double)(step - (steps - steps / 5)) / (double)(steps / 5), want = 6e-4 * (1 - (1 - 0.1) * p);
            CHECK(schedule_lr(&s, step) == want, "step %d of %d", (int)step, (int)steps);
        }
    }
    s.steps = 1000000000004;
    CHECK(schedule_decay_steps(&s) == s.steps / 5, "%lld", (long long)schedule_decay_steps(&s));

    check_group("a second warmup");
    s = (Schedule){.kind = SCHEDULE_LINEAR, .lr = 1, .warmup = 10, .steps = 110, .rewarm = 60};
    IS(s, 59, 0.51);
    IS(s, 60, 0.1 * 0.5);
    IS(s, 64, 0.5 * 0.46);
    IS(s, 69, 0.41);
    IS(s, 70, 0.4);

    check_group("a warmup longer than the run");
    s = (Schedule){.kind = SCHEDULE_COSINE, .lr = 1, .warmup = 1000, .steps = 10};
    IS(s, 9, 0.01);
    return check_verdict();
}

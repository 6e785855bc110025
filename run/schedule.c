#include "run/schedule.h"

#include <math.h>

static const double PI = 3.14159265358979323846;

static double ramp(const Schedule *s, int64_t step) {
    int64_t start = s->rewarm > 0 && step >= s->rewarm ? s->rewarm : 0;
    return step - start + 1 < s->warmup ? (double)(step - start + 1) / (double)s->warmup : 1.0;
}

// The position of `step` between `begin` and `end`, as a fraction from 0 to 1.
static double progress(int64_t step, int64_t begin, int64_t end) {
    if (step <= begin || end <= begin) return 0.0;
    return step >= end ? 1.0 : (double)(step - begin) / (double)(end - begin);
}

// Binary fractions are inexact: 0.29 * 100 is a little less than 29.
int64_t schedule_decay_steps(const Schedule *s) {
    return (int64_t)floor(s->decay_frac * (double)s->steps + 1e-6);
}

// How much of the way from 1 to min_lr_frac wsd has decayed.
static double decayed(const Schedule *s, int64_t step) {
    double p = progress(step, s->steps - schedule_decay_steps(s), s->steps);
    switch (s->decay_shape) {
    case DECAY_LINEAR: return p;
    case DECAY_SQRT: return sqrt(p);
    case DECAY_COSINE: return 0.5 * (1 - cos(PI * p));
    }
    return p;
}

static double shape(const Schedule *s, int64_t step) {
    double m = s->min_lr_frac, p = progress(step, s->warmup, s->steps);
    switch (s->kind) {
    case SCHEDULE_CONSTANT: return 1.0;
    case SCHEDULE_COSINE: return m + (1 - m) * 0.5 * (1 + cos(PI * p));
    case SCHEDULE_LINEAR: return 1 - (1 - m) * p;
    case SCHEDULE_WSD: return 1 - (1 - m) * decayed(s, step);
    }
    return 1.0;
}

double schedule_lr(const Schedule *schedule, int64_t step) {
    return schedule->lr * ramp(schedule, step) * shape(schedule, step);
}

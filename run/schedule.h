// The learning rate of each step.
#ifndef RUN_SCHEDULE_H
#define RUN_SCHEDULE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// In the order of "constant|cosine|linear|wsd".
typedef enum { SCHEDULE_CONSTANT, SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD } ScheduleKind;

// In the order of "linear|sqrt|cosine".
typedef enum { DECAY_LINEAR, DECAY_SQRT, DECAY_COSINE } DecayShape;

typedef struct {
    ScheduleKind kind;
    double lr;             // the peak
    double min_lr_frac;    // the final learning rate as a fraction of lr
    int64_t warmup;        // learning-rate warmup steps
    int64_t steps;         // of the whole run
    int64_t rewarm;        // the step at which the warmup restarts (a switch of normalizer); 0 if it does not
    double decay_frac;     // wsd: the part of the steps that decays, from 0 to 1
    DecayShape decay_shape;
} Schedule;

// lr(s) = lr * ramp(s) * shape(s), where s counts from 0
//   ramp   min(1, (s + 1) / warmup); from step `rewarm` on min(1, (s - rewarm + 1) / warmup)
//   shape  1 during the warmup (not under wsd), then with p = (s - warmup) / (steps - warmup) and m = min_lr_frac
//          constant 1;  cosine m + (1 - m) (1 + cos(pi p)) / 2;  linear 1 - (1 - m) p;
//          wsd 1 until the last decay_frac of the steps, rounded down; then m + (1 - m) d, where p goes from 0 to 1
//          in those steps, and d is 1 - p (linear), 1 - sqrt(p) (sqrt) or (1 + cos(pi p)) / 2 (cosine)
// The shape would reach m at s = steps, one step after the last.
double schedule_lr(const Schedule *schedule, int64_t step);

// The number of steps that wsd decays.
int64_t schedule_decay_steps(const Schedule *schedule);

#ifdef __cplusplus
}
#endif
#endif

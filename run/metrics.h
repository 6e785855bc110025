// What a step reports: one line for the person who watches, one line of JSON in metrics.jsonl.
#ifndef RUN_METRICS_H
#define RUN_METRICS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int64_t step;      // steps done, this one included
    int64_t tokens;    // tokens done, this step's included
    float loss, lr, grad_norm;
    double ms;    // of this step
    double tok_per_s;
    double mfu;          // fraction of the machine's peak
    float val_loss;      // NAN: no validation at this step
    const char *more;    // further members of the line's JSON object, each after ", "; or NULL
} StepMetrics;

typedef struct Metrics Metrics;

// Opens metrics.jsonl to append to; a last line that was cut short by a crash is removed. NULL with the error filled
// in.
Metrics *metrics_open(const char *path, Error *error);

// Appends a line and flushes it. Floats have the digits that give back the same bits (%.9g); what is not finite is
// null. A write that fails (disk full) warns once and training continues; the next line that fits starts on a line of
// its own.
void metrics_write(Metrics *metrics, const StepMetrics *m);
void metrics_close(Metrics *metrics);

// False once metrics.jsonl was removed or replaced. Then metrics_restore() writes a new one with all lines so far,
// which the open file still has.
// Where that fails, it fills in the error, and the lines go on into the old file.
bool metrics_intact(const Metrics *metrics);
bool metrics_restore(Metrics *metrics, Error *error);

// For --resume: keeps the lines with step <= last, and drops the rest and anything that is no whole line, by a new file
// renamed over the old one. No file at all is fine.
bool metrics_cut(const char *path, int64_t last, Error *error);

// "step   120/5000 | loss 6.0312 | lr 5.9e-04 | norm 0.84 | 1.16 s, 221 tok/s, 73 % of peak | 123 k tokens | 1 h 34 min
//         left"
// with "| val 5.1234" after the loss where there is one. seconds_left < 0: unknown, left out.
void metrics_line(char *out, size_t size, const StepMetrics *m, int64_t steps, double seconds_left);

// Prints a line to stdout: on a terminal over the line before it and clipped to the terminal's width, otherwise as a
// plain line. `keep` leaves the line standing on a terminal too (a validation, the last step).
void progress_show(const char *line, bool keep);

// Ends the refreshed line, so that other output starts on a line of its own. Call it before printing anything else.
void progress_end(void);

#ifdef __cplusplus
}
#endif
#endif

// Reports a training step: one line for the terminal, and one line of JSON in metrics.jsonl.
#ifndef RUN_METRICS_H
#define RUN_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int64_t step;      // completed steps, including this one
    int64_t tokens;    // tokens processed, including this step's
    float loss, lr, grad_norm;
    double ms;    // of this step
    double tok_per_s;
    double mfu;    // fraction of the machine's peak
    // If a rank's passes took more than 1.1 times the mean of all ranks: that rank, its time and the mean. Otherwise 0.
    int slowest_rank;
    double slowest_ms, mean_ms;
    bool validated;      // did this step have a validation?
    float val_loss;      // if so
    const char *more;    // further members of the line's JSON object, each preceded by ", "; or NULL
} StepMetrics;

typedef struct Metrics Metrics;

// Opens metrics.jsonl for appending, and removes a last line that a crash truncated. Returns NULL with *error set on
// failure.
Metrics *metrics_open(const char *path, Error *error);

// Appends and flushes a line. Floats are written with enough digits to restore their bits (%.9g), non-finite values as
// null. If a write fails (disk full), warns once, and training continues; the next line that fits starts on a line of
// its own.
void metrics_write(Metrics *metrics, const StepMetrics *m);
void metrics_close(Metrics *metrics);

// metrics_intact() returns false once metrics.jsonl was removed or replaced. metrics_restore() then writes a new file
// with all lines so far, which it reads from the old, still open file. If that fails, it sets *error, and further lines
// go to the old file.
bool metrics_intact(const Metrics *metrics);
bool metrics_restore(Metrics *metrics, Error *error);

// For --resume: keeps the lines with step <= last and drops all others, including damaged lines. Replaces the file
// atomically. Does nothing if there is no file.
bool metrics_cut(const char *path, int64_t last, Error *error);

// Formats a step as one line:
//     step   120/5000 | loss 6.0312 | lr 5.9e-04 | norm 0.84 | 1.16 s, 221 tok/s, 73 % of peak | 123 k tokens |
//         1 h 34 min left
// With a validation loss, "| val 5.1234" follows the loss, and with a slowest rank, "| rank 5 slow: 1.31 s, mean 1.02 s"
// the peak. A negative seconds_left means unknown and is omitted.
void metrics_line(char *out, size_t size, const StepMetrics *m, int64_t steps, double seconds_left);

// What stdout shows; {0} at the start.
typedef struct {
    bool pending;    // a line that the next one replaces
} Progress;

// Prints a line to stdout. On a terminal, it replaces the previous line and is clipped to the terminal's width, between
// two parts " | " if it has any; elsewhere, it is a plain line. `keep` preserves the whole line on a terminal (a
// validation, the last step).
void progress_show(Progress *progress, const char *line, bool keep);

// Ends the line that is being refreshed, so that other output starts on a new line. Call it before printing anything
// else.
void progress_end(Progress *progress);

#ifdef __cplusplus
}
#endif
#endif

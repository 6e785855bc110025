// A training run: what it was asked for, where it stands, and the folder that it writes. Both trainers own a Run and
// call these functions from main(), which contains the training loop; nothing here knows what computes the model.
//
//     run_open()          flags, ranks, run folder, data, the model's shape; nothing is written yet
//     run_plan()          memory and plan, printed and checked
//     run_take()          from here on the run folder is ours; --dry-run ends here
//     run_load()          the first weights, or a checkpoint's
//     run_begin()
//     while (run_continues()) {
//         run_batch(), run_update(), run_step_done()                         one step, unless one is owed
//         run_validation_due(), run_validation_*(), run_report()             what follows a step
//         run_sample_due(), run_sample_*(), run_finish_step(), run_save()
//         run_change_due(), run_change_apply(), run_change_finish()   changes of normalizer, also before the loop
//     }
//     run_end()
//
// All functions are collective: every rank calls them in the same order. Errors end the program with a message and an
// exit code (SPEC's list is in --help); a failed save in mid-run is reported, and training continues.
#ifndef RUN_RUN_H
#define RUN_RUN_H

#include <cjson/cJSON.h>
#include <limits.h>

#include "model/model.h"
#include "run/metrics.h"
#include "run/schedule.h"
#include "run/train_options.h"
#include "runtime/adamw.h"
#include "runtime/heartbeat.h"
#include "runtime/memory.h"
#include "runtime/shards.h"
#include "runtime/tokenizer.h"
#include "model/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

// A program that trains.
typedef struct {
    const char *name, *usage;
    bool gpus;    // accepts the flags of GPUs
} RunProgram;

// B sequences of T tokens.
typedef struct {
    const int32_t *inputs, *targets;    // (B,T)
    const uint8_t *mask;                // (B,T), 0 where a target does not count; NULL: all do
    size_t B, T;
    // training: what the loss, summed over tokens, is multiplied by for the gradients.
    float scale;
    bool first, last;    // training: of the step's micro-batches on this rank
} Batch;

// A change of normalizer that is due.
typedef struct {
    // From what --init-from brings to what --attn asks for; otherwise --attn-switch.
    bool at_start;
    Normalizer from, to;
    double before, after;    // validation losses; NAN without validation data
    float *kept;             // the learned scalars and their moments as they were before the change
} Change;

// A planned change of normalizer.
typedef struct {
    int64_t step;
    Normalizer to;
    bool repeated;    // the run has made it before, beyond the checkpoint that it continues from
} Switch;

typedef struct {
    const RunProgram *program;
    TrainOptions o;
    ModelConfig *config;          // the trainer's; the run fills it in, and changes its normalizer
    Weights weights;              // the trainer's, on the host
    MemoryPlan *plan;             // of the host's memory
    const Normalizer **others;    // under which the model trains besides config->attn; until run_take()
    size_t other_count;

    Tokenizer *tokenizer;                // NULL: samples are shown as ids
    char tokenizer_folder[PATH_MAX];     // where its files are, for the checkpoints; "" for none
    int tokenizer_vocab, end_of_text;    // its ids; 0 and -1 if unknown
    const char *vocab_from;              // where the model's vocabulary came from, for the plan
    Shards *train, *val;
    char *train_print, *val_print;    // fingerprints
    cJSON *lineage;
    Metrics *metrics;
    Heartbeat *heartbeat;    // NULL: none
    Schedule schedule;

    char weights_folder[PATH_MAX];    // where the first weights come from; "": initialized
    bool resumed;                     // continues from a checkpoint
    bool started_over;                // continues a run that has none yet
    bool stopped;                     // a stop was requested; the step or validation under way was abandoned
    int64_t step, tokens;             // done
    int64_t first_step;               // where this process began
    uint64_t sequence;                // next in the data's order
    double best_loss;
    int64_t best_step;    // -1: none yet
    bool best_now;        // the newest validation is the best so far
    StepMetrics last;     // of the newest step
    bool owed;            // that step's validation, metrics line and sample are still to come
    int64_t saved;        // step of the newest checkpoint that needs no saving again; -1: none

    Switch *switches;    // ordered by step
    size_t switch_count;
    // Of the weights that --init-from brought, until the change at the start; .text is "" without.
    Normalizer loaded;

    double opened;              // when the program started
    double mark;                // where the newest step ended, later by the time that the clock was paused
    double paused;              // since when
    double seconds;             // per step, smoothed
    double flops;               // peak of all ranks
    uint64_t rows, all_zero;    // of attention in the newest step

    size_t T;                               // the longest sequence
    size_t step_T;                          // the newest step's
    int64_t step_tokens;                    // per step, over all ranks
    int64_t micro_batches;                  // per step and rank
    int64_t micro_batch;                    // the next; 0 between steps
    uint64_t window_first, window_count;    // of a validation: next and all
    double window_loss;                     // of a validation: summed on this rank

    int32_t *window, *inputs, *targets;
    uint8_t *window_mask, *mask;    // NULL if everything counts
    char *more;                     // members of a line in metrics.jsonl that only some runs have
    size_t more_size;
} Run;

// Reads the flags, starts MPI and the heartbeat, and checks everything that flags, run folder and data say; fills in
// *config. Ends the program for --help, and if the run is complete already.
void run_open(Run *run, const RunProgram *program, ModelConfig *config, int argc, char **argv);

bool run_is_main(void);    // rank 0, which prints and writes

// ---- memory

// Adds the run's own memory to the host's plan, prints the plan, and ends with EXIT_RESOURCE if the host lacks the
// memory.
//   matmuls   who multiplies, a line for the plan   device   the plan of a device's memory, or NULL, of which
//             device_free bytes are free
void run_plan(Run *run, MemoryPlan *plan, const char *matmuls, const MemoryPlan *device, uint64_t device_free);

// Locks the run folder and takes the host's memory. False under --dry-run, once all data are checked: then run_end()
// comes next.
bool run_take(Run *run);

// Initializes the parameters, or reads them on rank 0 and broadcasts them: every rank has the same numbers then.
void run_load(Run *run, Weights weights);

// Opens the run folder and catches signals. flops: the peak of all ranks.
void run_begin(Run *run, double flops);

// ---- the loop

// Is there more to do? False after the last step, or once a stop was requested.
bool run_continues(const Run *run);

// The next micro-batch of this step on this rank. False after the last one, or when a stop was requested
// (run->stopped).
bool run_batch(Run *run, Batch *batch);

// loss: summed over the tokens of all ranks; norm: of their summed gradients. Ends with EXIT_DIVERGED if either is not
// finite. Returns what the update has to apply: learning rate, clipping.
AdamW run_update(Run *run, double loss, double norm);

// Call when the devices have finished all work of the step, the update included: its time ends here. rows: of attention
// in this rank's micro-batches, of which all_zero had no weight.
void run_step_done(Run *run, uint64_t rows, uint64_t all_zero);

// Prints the step and writes its metrics. more: further members of its JSON object, each after ", ", and `line` further
// text for the person who watches, after " | "; both may be "". The learned scalars on the host must be current if
// run_reports_scalars().
void run_report(Run *run, const char *more, const char *line);
bool run_reports_scalars(const Run *run);

// A step's time excludes what happens between these two: validation, samples, checkpoints, changes of normalizer.
void run_pause(Run *run);
void run_unpause(Run *run);

// ---- validation
//
//     run_validation_start(run);
//     while (run_validation_batch(run, &batch)) run_validation_add(run, loss of batch);
//     if (!run_validation_end(run, &loss)) a stop was requested: the loss is unknown
//
// The first windows of the validation data, the same for any number of ranks. batch.B is 0 where a rank has no windows
// left.

bool run_validation_due(const Run *run);           // after the newest step
bool run_validation_due_at_end(const Run *run);    // after the loop, if none was due after the last step
void run_validation_start(Run *run);
bool run_validation_batch(Run *run, Batch *batch);
void run_validation_add(Run *run, double loss);     // summed over the batch's tokens
bool run_validation_end(Run *run, double *loss);    // the mean over all ranks
void run_validated(Run *run, double loss);          // keeps it as the newest step's
// Prints it: a run that continues has metrics as if it had never stopped.
void run_validated_at_end(double loss);

// ---- changes of normalizer
//
//     while (run_change_due(run, &change)) {
//         measure change.before;  download the parameters and moments;  run_change_apply(run, &change);  upload them
//         measure change.after;   run_change_finish(run, &change)
//     }
//
// If a stop is requested while measuring, run_change_undo() restores everything, and the change comes first when the
// run is resumed.

bool run_change_due(Run *run, Change *change);    // sets the normalizer to change->from
// ... and to change->to; scalars that it brings start at their first values.
void run_change_apply(Run *run, Change *change);
void run_change_undo(Run *run, Change *change);
void run_change_finish(Run *run, Change *change);

// ---- samples
//
//     run_sample_start(run, &sample);
//     while (run_sample_add(run, &sample, logits (vocab) after sample.ids[0 .. sample.count - 1])) {}
//     run_sample_end(run, &sample)
//
// On rank 0 alone. The text starts with end-of-text; the same step of the same run draws the same one.

enum { SAMPLE_TOKENS = 256 };    // at most, or T

typedef struct {
    int32_t ids[SAMPLE_TOKENS + 1];
    size_t count;
} Sample;

bool run_sample_due(const Run *run);
size_t run_sample_length(const Run *run);    // tokens that a sample may have; 0: none are drawn in this run
void run_sample_start(const Run *run, Sample *sample);
// Overwrites logits; false at the sample's end.
bool run_sample_add(const Run *run, Sample *sample, float *logits);
void run_sample_end(Run *run, const Sample *sample);

// ---- checkpoints

// Call once everything else that follows a step is done. Is a checkpoint due?
bool run_finish_step(Run *run);

// Saves and prunes. The host's parameters and moments must be current. A save that fails in mid-run is reported, and
// training continues; at the end of the run it ends the program with EXIT_RESOURCE.
void run_save(Run *run);
bool run_save_due_at_end(const Run *run);    // after the loop: a stop, or --steps 0

// ---- the end

// Stops heartbeat and MPI; returns the exit code. After a stop it says where to resume.
int run_end(Run *run);

#ifdef __cplusplus
}
#endif
#endif

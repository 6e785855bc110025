// A training run: its flags, its state and its folder. Each trainer owns a Run and calls these functions from main(),
// which contains the training loop. Nothing here depends on what computes the model.
//
//     run_open()          reads flags, starts ranks, checks folder and data, determines the model's shape;
//                         writes nothing
//     run_plan()          plans, prints and checks memory
//     run_take()          takes possession of the run folder; --dry-run ends here
//     run_load()          initializes the weights, or loads a checkpoint
//     run_begin()
//     while (run_continues()) {
//         run_batch(), run_update(), run_check_step(), run_step_done()       one step, unless one is owed
//         run_validation_due(), run_validation_*(), run_report()             what follows a step
//         run_sample_due(), run_sample_*(), run_finish_step(), run_save()
//         run_change_due(), run_change_apply(), run_change_finish()   switches of normalizer, also before the loop
//     }
//     run_end()
//
// All functions are collective: every rank calls them in the same order. Errors end the program with a message and one
// of the exit codes of runtime/error.h. A save that fails mid-run is reported, and training continues.
#ifndef RUN_RUN_H
#define RUN_RUN_H

#include <cjson/cJSON.h>
#include <limits.h>

#include "data/mixture.h"
#include "data/shards.h"
#include "math/adamw.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/weights.h"
#include "run/metrics.h"
#include "run/schedule.h"
#include "run/train_options.h"
#include "runtime/heartbeat.h"
#include "runtime/memory.h"
#include "text/sampler.h"
#include "text/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

// The trainer that owns the run.
typedef struct {
    const char *name, *usage;
    bool gpus;            // accepts the flags for GPUs
    const char *lacks;    // what several ranks need and this build lacks: see process_check_build()
} RunProgram;

// A batch of B sequences of T tokens.
typedef struct {
    const int32_t *inputs, *targets;    // (B,T)
    const uint8_t *mask;                // (B,T), 0 if a target does not count; NULL if all count
    size_t B, T;
    // Training only: the factor from the summed loss to the loss whose gradient is computed.
    float scale;
    bool first, last;    // training only: the first or last of this rank's micro-batches of the step
} Batch;

// A switch of normalizer that is due.
typedef struct {
    // True: from the normalizer of --init-from to that of --attn. False: --attn-switch.
    bool at_start;
    AttentionList from, to;
    size_t from_L, to_L;     // the L of each, which differ if --norm-length sets another than that of --init-from
    double before, after;    // validation losses; NAN without validation data
    float *kept;             // a copy of the learned scalars and their moments from before the switch
} Change;

// A planned switch of normalizer.
typedef struct {
    int64_t step;
    AttentionList to;
    bool repeated;    // the run made it before, after the checkpoint from which it resumed
} Switch;

typedef struct {
    double loss;
    int64_t step;    // -1 if there is none
} Best;

typedef struct {
    const RunProgram *program;
    TrainOptions o;
    ModelConfig *config;    // owned by the trainer; the run fills it in and switches its normalizer
    Weights weights;        // the trainer's, on the host
    MemoryPlan *plan;       // of host memory
    // The normalizers of this run besides config->attn: those to come, then those that it had before. There is memory
    // for the tensors of each, so that a resumed run has the layout of one that never stopped. Freed by run_take().
    const AttentionList **others;
    size_t coming_count, other_count;
    AttentionList *past;    // those that it had before

    Tokenizer *tokenizer;                // NULL: samples are printed as ids
    char rope_text[ROPE_TEXT];           // --rope-scaling as run.json records it
    char *attn_text;                     // --attn as run.json records it, where that is not the command line's
    char tokenizer_folder[PATH_MAX];     // the folder of its files, which checkpoints copy; "" if there is none
    int tokenizer_vocab, end_of_text;    // of the tokenizer; 0 and -1 if unknown
    const char *vocab_from;              // where the vocabulary size came from, for the printed plan
    Mixture *train;
    Shards *val;
    char *train_print, *val_print;    // fingerprints
    cJSON *lineage, *history;         // of run.json; see folder.h
    uint64_t history_omitted;
    cJSON *arguments;       // those that run.json had at a resume
    TrainOptions before;    // what run.json had, if the run existed
    int lock;               // of the run folder; see folder_lock()
    int checkpoints;        // OUT/ckpt; see checkpoint_prepare()
    Metrics *metrics;
    Progress progress;
    Heartbeat *heartbeat;    // NULL if there is none
    Schedule schedule;

    char weights_folder[PATH_MAX];    // the folder of the initial weights; "" for random weights
    bool resumed;                     // resumed from a checkpoint
    bool started_over;                // resumed without a checkpoint, so the run starts from the beginning
    bool stopped;                     // a stop was requested; the step or validation in progress was abandoned
    int64_t step, tokens;             // completed
    int64_t first_step;               // the step at which this process started
    uint64_t sequence;                // number of the next sequence in the data's order
    // The best validation so far, and the best one before it. With --keep-best, only of those whose checkpoint exists.
    Best best, last_best;
    bool best_now;       // the last validation is the best so far
    StepMetrics last;    // of the last step
    bool owed;           // the last step's validation, metrics line and sample are still to come
    int64_t saved;       // the step of the last checkpoint, unless it has to be saved again; -1 if there is none

    Switch *switches;    // ordered by step
    size_t switch_count;
    // The normalizer of the weights from --init-from and its L, until it is switched to --attn; .text is "" if there is
    // none.
    AttentionList loaded;
    size_t loaded_L;

    double opened;              // when the program started
    double mark;                // when the last step ended, plus the time during which the clock was paused
    double paused;              // when the clock was paused
    double seconds;             // per step, smoothed, without this process's first step
    double flops;               // peak FLOP/s of all ranks together
    uint64_t rows, all_zero;    // attention rows in the last step, and those among them that are all zero

    size_t T;                               // the longest sequence
    size_t step_T;                          // of the step whose batches are being read
    double token_flops;                     // FLOPs per token in the last step
    int64_t step_tokens;                    // per step, over all ranks
    int64_t micro_batches;                  // per step and rank
    int64_t micro_batch;                    // the next one; 0 between steps
    uint64_t window_first, window_count;    // of a validation: the next window, and the number of windows
    double window_loss;                     // of a validation: the sum on this rank

    int32_t *window, *inputs, *targets;
    Candidate *candidates;          // of the next token of a sample
    uint8_t *window_mask, *mask;    // NULL if every token counts
    char *more;                     // members of the metrics line that only some runs have
    size_t more_size;
    double *passes;    // scratch: the seconds that each rank's passes took
    double *norms;     // squared, of each kind and group (norms.c); NULL without --norms-every
    bool normed;       // are they those of the last step?
} Run;

// Parses the flags, starts MPI and the heartbeat, checks flags, run folder and data, and fills in *config. Ends the
// program for --help, or if the run is already complete.
void run_open(Run *run, const RunProgram *program, ModelConfig *config, int argc, char **argv);

bool run_is_main(void);    // is this rank 0, which prints and writes?

// The tensors of the model and of its normalizers to come, with their update rules (--optimizer) and scales
// (--lr-scale). Call it before run_take(). Ends the program with EXIT_USAGE if --lr-scale is wrong.
TensorList run_tensors(const Run *run);

// ---- memory

// Adds the run's own memory to the host's plan, prints the plan, and ends with EXIT_RESOURCE if it exceeds the host's
// memory.
//   matmuls   a line for the plan that names the matmul library
//   device    the plan of device memory, of which device_free bytes are free; or NULL
void run_plan(Run *run, MemoryPlan *plan, const char *matmuls, const MemoryPlan *device, uint64_t device_free);

// Locks the run folder and allocates the host's memory. With --dry-run, checks all data and returns false; call
// run_end() next.
bool run_take(Run *run);

// Initializes the parameters, or reads them on rank 0 and broadcasts them, so that all ranks have the same values.
void run_load(Run *run, Weights weights);

// Opens the run folder and starts catching signals. flops: the peak FLOP/s of all ranks together.
void run_begin(Run *run, double flops);

// ---- the loop

// Is there more to do? Returns false after the last step, or once a stop was requested.
bool run_continues(const Run *run);

// Does anything besides its report follow the newest step: a validation, a sample, a checkpoint, a switch, or the end?
// If not, a trainer may report it after it has started the next step. The same on every rank.
bool run_pauses(const Run *run);

// Fills in this rank's next micro-batch of the step. Returns false after the last one, or if a stop was requested
// (run->stopped).
bool run_batch(Run *run, Batch *batch);

// Advances the run by one step. Returns the arguments of the update, among them the learning rate.
AdamW run_update(Run *run);

// Records the newest step's numbers: `loss`, the sum over the tokens of all ranks, and `norm`, that of the reduced
// gradient. If either is not finite, ends with EXIT_DIVERGED. Call this before anything of the step is saved.
void run_check_step(Run *run, double loss, double norm);

// Call this once the devices have finished all work of the step, including the update: the step's time ends here.
// `rows` counts the attention rows of this rank's micro-batches, and `all_zero` those among them that are all zero.
// `passes` has the seconds that this rank's forward and backward passes took, without its waiting for others.
void run_step_done(Run *run, double passes, uint64_t rows, uint64_t all_zero);

// Prints the step and writes its metrics. `more` has further members of the JSON object, each preceded by ", ", and
// `line` further text for the printed line, preceded by " | "; both may be "". If run_reports_scalars(), the learned
// scalars on the host must be up to date.
void run_report(Run *run, const char *more, const char *line);
bool run_reports_scalars(const Run *run);

// ---- norms by layer, for --norms-every
//
//     if (run_norms_due(run)) {
//         run_norms_start(run);
//         run_norms_add(run, NORMS_OF_GRADIENT or NORMS_OF_WEIGHTS, tensor, its sum of squares) for each trained tensor
//     }
//
// After the newest step: its gradient, before it is clipped, and the weights that the update has written. Rank 0 needs
// the sums of all tensors, so where they are divided between ranks, sum run->norms over them.

typedef enum { NORMS_OF_GRADIENT, NORMS_OF_WEIGHTS, NORMS_KINDS } NormsOf;

bool run_norms_due(const Run *run);
void run_norms_start(Run *run);
void run_norms_add(Run *run, NormsOf kind, const Tensor *tensor, double squares);
size_t norm_groups(const Run *run);    // run->norms has NORMS_KINDS times as many numbers

// The time between these two calls is not part of a step: validation, samples, checkpoints, switches of normalizer.
void run_pause(Run *run);
void run_unpause(Run *run);

// ---- validation
//
//     run_validation_start(run);
//     while (run_validation_batch(run, &batch)) run_validation_add(run, loss of batch);
//     if (!run_validation_end(run, &loss)) a stop was requested, and the loss is unknown
//
// Uses the first windows of the validation data, the same ones for any number of ranks. batch.B is 0 on a rank that has
// no windows left.

bool run_validation_due(const Run *run);           // after the newest step
bool run_validation_due_at_end(const Run *run);    // after the loop, unless the last step had one
void run_validation_start(Run *run);
bool run_validation_batch(Run *run, Batch *batch);
void run_validation_add(Run *run, double loss);     // the sum over the batch's tokens
bool run_validation_end(Run *run, double *loss);    // the mean over all ranks
void run_validated(Run *run, double loss);          // records it as the last step's validation loss
// Only prints the loss: the metrics of a resumed run look as if it had never stopped.
void run_validated_at_end(Run *run, double loss);

// ---- switches of normalizer
//
//     while (run_change_due(run, &change)) {
//         measure change.before;  download the scalars and their moments;  run_change_apply(run, &change);  upload them
//         measure change.after;   run_change_finish(run, &change)
//     }
//
// If a stop is requested while measuring, run_change_undo() restores everything, and the switch comes first after the
// run is resumed.

bool run_change_due(Run *run, Change *change);    // makes change->from the model's normalizer
// Makes change->to the model's normalizer, and sets its new learned scalars to their initial values.
void run_change_apply(Run *run, Change *change);
void run_change_undo(Run *run, Change *change);
void run_change_finish(Run *run, Change *change);

// ---- samples
//
//     run_sample_start(run, &sample);
//     while (run_sample_add(run, &sample, logits (vocab) after sample.ids[0 .. sample.count - 1])) {}
//     run_sample_end(run, &sample)
//
// Only on rank 0. The text starts with end-of-text; the same step of the same run always draws the same sample.

enum { SAMPLE_TOKENS = 256 };    // the most tokens of a sample, which has at most T

typedef struct {
    int32_t ids[SAMPLE_TOKENS + 1];
    size_t count;
} Sample;

bool run_sample_due(const Run *run);
size_t run_sample_length(const Run *run);    // the most tokens that a sample may have; 0 if this run draws none
void run_sample_start(const Run *run, Sample *sample);
// Samples the next token; overwrites `logits`. Returns false at the end of the sample.
bool run_sample_add(const Run *run, Sample *sample, float *logits);
void run_sample_end(Run *run, const Sample *sample);

// ---- checkpoints

// Call this last after each step. Is a checkpoint due?
bool run_finish_step(Run *run);

// Ends the run with EXIT_PEER if this hash, of parameters that every rank has, is not the same on all ranks: a run
// whose ranks have drifted apart trains on wrong gradients. Call it before a save. Collective.
void run_compare(const Run *run, uint64_t hash);

// Saves a checkpoint and prunes old ones. If a save fails mid-run, it is reported, and training continues; at the end
// of the run, it ends the program with EXIT_RESOURCE.
//
//     run_save_start(run, &save);
//     while (run_save_piece(run, &save)) bring what save.piece names to save.piece.data of rank 0
//     run_save_end(run, &save);

typedef struct {
    WeightsPiece piece;
    bool done;    // no error so far; the rest is only used on rank 0
    Error error;
    double started;
    Checkpoint checkpoint;
    WeightsFiles files;
} Save;

void run_save_start(Run *run, Save *save);
bool run_save_piece(const Run *run, Save *save);
void run_save_end(Run *run, Save *save);

// Compares and saves parameters and moments that every rank has on the host.
void run_save(Run *run);
bool run_save_due_at_end(const Run *run);    // after the loop: a stop, or --steps 0

// ---- the end

// Stops the heartbeat and MPI, and returns the exit code. After a stop, prints how to resume.
int run_end(Run *run);

#ifdef __cplusplus
}
#endif
#endif

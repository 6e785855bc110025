// The run around a model, the same for every trainer: flags, data, first weights, steps, validation, samples, checkpoints, changes of
// the normalizer. A trainer's main() is training_main(); the model on its device is the trainer's own, behind the functions trainer_*.
#ifndef TRAINING_H
#define TRAINING_H

#include "model.h"
#include "runtime/adamw.h"
#include "runtime/memory.h"
#include "runtime/train_options.h"
#include "weights.h"

#ifdef __cplusplus
extern "C" {
#endif

int training_main(int argc, char **argv);

// ---- what a trainer provides

extern const char trainer_name[], trainer_usage[];
extern const bool trainer_on_gpus;             // has the flags of GPUs

// The devices of all processes, once these are started. Ends with EXIT_PEER where there is none.
void trainer_start(const TrainOptions *options);

// The one model's shape and normalizer, which the run fills in and changes.
ModelConfig *trainer_config(void);

// Plans for B sequences of at most T tokens at a time, with the tensors of the model under its normalizer and `others`. Returns the plan of the
// host's memory, to which the run adds its own before it takes it; that of a device is for trainer_take().
MemoryPlan *trainer_plan(const TrainOptions *options, const Normalizer *const *others, size_t count, size_t B, size_t T);

// Lines of the plan: who multiplies, and what a device has to hold.
void trainer_print_products(const TrainOptions *options);
void trainer_print_memory(void);

// Ends with EXIT_RESOURCE where a device has less free than the plan says; takes nothing.
void trainer_check_memory(void);

// Takes what the plan says of the devices and makes them ready; after the host's memory was taken.
void trainer_take(void);

// The parameters on the host, and on the way between there and the model. A trainer may have them in one place only.
Weights trainer_weights(void);
void trainer_upload(int64_t step);             // after the host's were set, which stand at this step: all processes, each with the same numbers
void trainer_download(void);                   // before the host's are read: all processes; those of rank 0 are whole then

typedef struct {
    const int32_t *inputs, *targets;           // (B,T)
    const uint8_t *mask;                       // (B,T), 0 where a target does not count; NULL: all do
    size_t B, T;
} Batch;

// A step: micro-batches, each adding to the gradients those of its loss, summed over tokens, times `scale`; then the sum of the losses of all
// processes and the norm of their summed gradients; then AdamW.
void trainer_micro_batch(const Batch *batch, float scale, bool first, bool last);
void trainer_gradients(double *loss_sum, double *norm);
void trainer_update(AdamW adamw);

// The sum of the losses of this process's batch; no gradients.
double trainer_loss(const Batch *batch);

// The end of a step: returns when the devices have finished all queued work, the update included. Counts this rank's attention rows in the
// micro-batches since the last call, and how many of them were all-zero.
void trainer_rows(uint64_t *rows, uint64_t *without_weight);

// The logits (vocab) after the last of `count` tokens, on rank 0; the sequence starts with count = 1 and grows by one from call to call.
// It has at most TRAINER_SAMPLE tokens, or T.
enum { TRAINER_SAMPLE = 256 };
float *trainer_next_logits(const int32_t *tokens, size_t count);

// The devices' peak, FLOP/s of all processes for the run's type.
double trainer_peak(void);

// What the trainer has to say of a step beside the run's own numbers: in metrics.jsonl, each after ", "; and in the line for a person,
// after " | ". Both may be "".
void trainer_metrics(char *out, size_t size);
void trainer_line(char *out, size_t size);

// --profile: the phases of a step, and the seconds of each since the start.
#define PHASES(X) \
    X(OTHER, "data, metrics and the rest") X(EMBEDDING, "embedding") X(NORM, "rmsnorm") X(PROJECTIONS, "q, k, v and o products") \
    X(ROPE, "rope") X(ATTENTION, "attention") X(FEED_FORWARD, "feed-forward products") X(SWIGLU, "swiglu") \
    X(GATE, "gate of gated units") X(CLASSIFIER, "output product and loss") X(REDUCE, "gradients summed over processes") \
    X(UPDATE, "norm and AdamW") X(ASIDE, "validation, samples, checkpoints")
#define PHASE_KIND(kind, name) PHASE_##kind,
#define PHASE_NAME(kind, name) name,
typedef enum { PHASES(PHASE_KIND) PHASE_COUNT } Phase;
static const char *const phase_names[] = {PHASES(PHASE_NAME)};
double trainer_phase_seconds(Phase phase);

// From trainer_aside(true) to trainer_aside(false) all that takes place is PHASE_ASIDE, and no part of a step.
void trainer_aside(bool begins);

// After the last step; devices and their library are left in order.
void trainer_end(void);

#ifdef __cplusplus
}
#endif
#endif

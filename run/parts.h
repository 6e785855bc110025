// Internal declarations that the files of run/ share. Programs include run.h.
#ifndef RUN_PARTS_H
#define RUN_PARTS_H

#include "run/run.h"

// settle.c: checks the flags, the run folder and the data, and fills in the run. Writes nothing.
void settle(Run *run);

// resume.c: takes over the arguments, shape and state of --resume's run, and finds its newest checkpoint. Returns false
// if it has none.
bool settle_resumed(Run *run, char *folder, size_t size);

// Does --resume continue an existing run with its flags, be it from a checkpoint or from the beginning?
bool is_kept(const Run *run);

// A run never changes its tokens per step, so its tokens and data position follow from its step: ends the program if
// those of state.json do not.
void check_position(const Run *run);

// settle_model.c: determines the shape from the resumed run, --init-from or --model. Sets `folder` to the folder of its
// weights, or "".
void settle_model(Run *run, char *folder, size_t size);

// Checks that the tokenizer's ids fit into the model's vocabulary.
void settle_tokenizer(Run *run, const char *weights);

// settle_data.c: checks the sequence lengths, and divides a step's tokens among ranks and micro-batches.
void settle_batches(Run *run);

// Opens the data, and checks that all of it and the model, in the folder `weights` or "", have the same tokenizer.
void settle_data(Run *run, const char *weights);

// The schedule of these flags, whose warmup restarted at step `rewarm`.
Schedule schedule_of(const TrainOptions *o, int64_t rewarm);

// run.c: the number of windows of --val-data that a validation reads, from the first on.
uint64_t validation_windows(const Run *run);

// agree.c: ends the program if ranks would train different models, or on different data: on a machine with other files
// under the same paths, for example. Their sums would be meaningless, or they would wait for each other forever.
// Collective.
void check_same_on_all_ranks(const Run *run);

// Ends the program if ranks would start at different steps. Collective.
void check_same_start(const Run *run);

// lr_scale.c: prints the groups of --lr-scale, a line each.
void print_lr_scale(const Run *run);

// switches.c: fills run->switches from --attn-switch and the switches that a resumed run has to repeat.
void settle_switches(Run *run);

// Is a switch of --attn-switch due at the run's step?
bool change_at_step(const Run *run);

// Moves switches after the run's step from the lineage to run->switches, to be repeated. `made` as in lineage_cut().
void repeat_switches(Run *run, cJSON *lineage, const char *made);

// norms.c: allocates run->norms if --norms-every needs them.
void norms_ready(Run *run);

// To and from the array that state.json has of the last step's norms. norms_read() does nothing without --norms-every;
// false: the array is not one of such norms.
cJSON *norms_json(const Run *run);
bool norms_read(Run *run, const cJSON *array);

// Appends the last step's norms, if there are any, to a metrics line of at most norms_room() more characters. Returns
// the new length.
size_t norms_text(const Run *run, char *out, size_t size, size_t at);
size_t norms_room(const Run *run);

// history.c: the flags that differ from those that run.json had, {"lr": {"from": 0.001, "to": 0.0001}, ...}. The caller
// owns it.
cJSON *changed_flags(const Run *run);

// Adds this start or resume to run->history.
void history_add(Run *run);

// save.c: opens metrics.jsonl, removes the lines that will be written again, and writes run.json.
void open_run_folder(Run *run);

// Writes run.json. Ends the program on failure.
void write_run(Run *run);

// On rank 0: restores what was removed from the run folder during the run, so that its checkpoints can be resumed.
// Returns false while the folder is unreachable. Ends the program if another run has taken the folder.
bool restore_run_folder(Run *run, Error *error);

#endif

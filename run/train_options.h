// The flags of a training run, one row per flag, shared by all trainers.
#ifndef RUN_TRAIN_OPTIONS_H
#define RUN_TRAIN_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/options.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { TRAIN_FP32, TRAIN_BF16 } TrainType;

typedef struct {
    const char *train_data, *val_data, *model, *attn, *attn_switch, *rope_scaling, *init_from, *ignore_config_key, *out;
    int64_t norm_length, batch, total_batch_tokens, steps, warmup, seed, val_every, val_tokens, sample_every,
        ckpt_every, keep, threads, rank_timeout;
    IntList seq_len;
    double lr, min_lr_frac, weight_decay, beta1, beta2, grad_clip, rope_theta;
    int schedule, pack, dtype;
    bool shuffle, doc_mask, resume, keep_best, profile, dry_run;
    int64_t zero;    // this and the following flags are for GPU trainers
    int reduce_dtype;
    bool recompute, deterministic, stochastic_rounding, graphs;
    const char *matmuls;
    Option *table;
    size_t count, count_on_gpus;    // rows of this trainer's table, and of a GPU trainer's
} TrainOptions;

// Sets the defaults, which --help prints, and builds the table. attn_help: the help text of --attn; gpus: whether to
// include the flags for GPUs.
void train_options_init(TrainOptions *options, const char *attn_help, bool gpus);

// Calls options_parse(). A CPU trainer rejects the flags for GPUs with a message that names the GPU trainer.
void train_options_parse(TrainOptions *options, int argc, char **argv, const char *usage);

// Was this flag on the command line?
bool train_options_given(const TrainOptions *options, const char *name);

#ifdef __cplusplus
}
#endif
#endif

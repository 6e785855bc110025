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
typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON } OptimizerKind;    // in the order of "adamw|muon"

typedef struct {
    const char *train_data, *val_data, *model, *attn, *attn_switch, *rope_scaling, *init_from, *ignore_config_key,
        *lr_scale, *out;
    int64_t norm_length, batch, total_batch_tokens, steps, warmup, seed, val_every, val_tokens, sample_every,
        norms_every, ckpt_every, keep, threads, rank_timeout, progress_timeout;
    IntList seq_len;
    double lr, min_lr_frac, decay_frac, weight_decay, beta1, beta2, grad_clip, rope_theta, z_loss, logit_softcap;
    int schedule, decay_shape, pack, dtype, optimizer;
    bool shuffle, doc_mask, resume, keep_best, profile, dry_run, follow_links, foreign_folder;
    bool zero;    // this and the following flags are for GPU trainers
    int reduce_dtype;
    bool recompute, deterministic, stochastic_rounding, graphs;
    const char *matmuls;
    Option *table;
    size_t count;
} TrainOptions;

// Sets the defaults, which --help prints, and builds the table for options_parse(). attn_help: the help text of --attn;
// gpus: whether this trainer accepts the flags for GPUs.
void train_options_init(TrainOptions *options, const char *attn_help, bool gpus);

// Was this flag given?
bool train_options_given(const TrainOptions *options, const char *name);

#ifdef __cplusplus
}
#endif
#endif

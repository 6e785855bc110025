#include "run/train_options.h"

#include <string.h>

#include "model/model.h"
#include "runtime/error.h"
#include "runtime/start.h"

#ifndef ATTN_ONLY    // set by make ATTN=NAME
#define ATTN_ONLY "softmax"
#endif

static const TrainOptions DEFAULTS = {
    .model = "124M",
    .attn = ATTN_ONLY,
    .batch = 4,
    .seq_len = {.values = {1024}, .count = 1},
    .steps = 1000,
    .lr = 6e-4,
    .warmup = -1,
    .min_lr_frac = 0.1,
    .decay_frac = 0.2,
    .weight_decay = 0.1,
    .beta1 = 0.9,
    .beta2 = 0.95,
    .grad_clip = 1.0,
    .rope_theta = DEFAULT_ROPE_THETA,
    .seed = 1337,
    .shuffle = true,
    .val_every = 250,
    .val_tokens = 1 << 20,
    .ckpt_every = 1000,
    .keep = 2,
    .rank_timeout = 60,
    .progress_timeout = 600,
    .deterministic = true,
    .graphs = true,
};

static bool same_attention(const char *a, const char *b) {
    AttentionList lists[2];
    char message[1024];
    return attention_parse(&lists[0], a, MAX_LAYERS, message, sizeof message) &&
           attention_parse(&lists[1], b, MAX_LAYERS, message, sizeof message) &&
           attention_equal(&lists[0], &lists[1], MAX_LAYERS);
}

void train_options_init(TrainOptions *o, const char *attn_help, bool gpus) {
    *o = DEFAULTS;
    // clang-format off
    const Option table[] = {
        {"train-data",  OPT_TEXT, &o->train_data, .arg = "GLOB", .group = "Data", .required = true, .help = "training shards, for example 'data/shakespeare/*_train_*.bin', or sources with weights: 'a*.bin:0.7,b*.bin:0.3'"},
        {"val-data",    OPT_TEXT, &o->val_data, .arg = "GLOB", .group = "Data", .help = "validation shards; without them, no validation"},
        {"shuffle",     OPT_SWITCH, &o->shuffle, .group = "Data", .help = "shuffle the windows by seed and epoch; 0: read them in order"},
        {"pack",        OPT_CHOICE, &o->pack, .choices = "stream|example", .group = "Data", .help = "stream: windows of one stream of tokens; example: one document per row"},
        {"doc-mask",    OPT_SWITCH, &o->doc_mask, .group = "Data", .help = "attention stops at document boundaries: each token sees only its own document"},
        {"seed",        OPT_INT, &o->seed, 0, 9007199254740992.0, .arg = "N", .group = "Data", .help = "for initial weights, data order and samples"},

        {"model",       OPT_TEXT, &o->model, .arg = "NAME|SPEC", .group = "Model", .help = "15M, 124M, 162M, 350M, 760M, 1.3B, or layers=4,heads=4,channels=128,ffn=352,tied=1, or a name and keys; more keys: vocab=, kv_heads=, head_dim=, norm_eps=, qk_norm=1, bias=qkv, gate=channel|head, block=gau"},
        {"attn",        OPT_TEXT, &o->attn, .arg = "NAME", .group = "Model", .help = attn_help, .same = same_attention, .of_model = true,
         .resume_hint = "To change the normalizer of this run, use --attn-switch STEP:NAME."},
        {"attn-switch", OPT_TEXT, &o->attn_switch, .arg = "STEP:NAME", .group = "Model", .help = "switch to another normalizer at this step", .on_resume = true},
        {"norm-length", OPT_INT, &o->norm_length, 0, 1 << 20, .arg = "N", .group = "Model", .help = "L in the normalizers' formulas; 0: the longest --seq-len, or the loaded model's L"},
        {"rope-theta",  OPT_FLOAT, &o->rope_theta, 1.0001, 1e12, .arg = "X", .group = "Model", .help = "base of RoPE's wavelengths", .of_model = true},
        {"rope-scaling", OPT_TEXT, &o->rope_scaling, .arg = "NAME", .group = "Model", .help = "RoPE's scaling: none, linear:FACTOR, ntk, llama3:FACTOR:LOW:HIGH:ORIGINAL or yarn:FACTOR:ORIGINAL; without this flag: none, or the loaded model's"},
        {"logit-softcap", OPT_FLOAT, &o->logit_softcap, 0, MAX_SOFTCAP, .arg = "C", .group = "Model", .help = "cap the output logits softly: C tanh(logits/C), 30 in Gemma 2; 0: no cap; without this flag: none, or the loaded model's", .of_model = true},
        {"init-from",   OPT_TEXT, &o->init_from, .arg = "DIR", .group = "Model", .help = "start from the weights in a checkpoint, in the newest one of a run, or in a Hugging Face folder of a Llama, Mistral, Qwen2 or Qwen3"},
        {"ignore-config-key", OPT_TEXT, &o->ignore_config_key, .arg = "NAME[,...]", .group = "Model", .help = "unknown keys in --init-from's config.json to ignore"},
        {"dtype",       OPT_CHOICE, &o->dtype, .choices = "fp32|bf16", .group = "Model", .help = "fp32: matmuls in float32; bf16: their inputs in bfloat16, faster where the hardware has it and less exact; sums and master weights stay float32"},

        {"batch",       OPT_INT, &o->batch, 1, 65536, .arg = "B", .group = "Training", .help = "micro-batch: sequences per rank", .on_resume = true},
        {"seq-len",     OPT_INT_LIST, &o->seq_len, 1, 1 << 20, .arg = "T[,T...]", .group = "Training", .help = "tokens per sequence; if several, each step draws one"},
        {"total-batch-tokens", OPT_INT, &o->total_batch_tokens, 0, 1e12, .arg = "N", .group = "Training", .help = "tokens per step, by gradient accumulation; 0: batch x T x ranks"},
        {"steps",       OPT_INT, &o->steps, 0, 1e12, .arg = "N", .group = "Training", .help = "total optimizer steps", .on_resume = true},
        {"lr",          OPT_FLOAT, &o->lr, 0, 100, .arg = "X", .group = "Training", .help = "peak learning rate", .on_resume = true},
        {"lr-scale",    OPT_TEXT, &o->lr_scale, .arg = "PATTERN:X[,...]", .group = "Training", .help = "multiply the learning rate of tensors by X, 'model.embed_tokens*:0.5,*attn_scale:10'; * in a PATTERN of their names stands for anything, and the last match wins", .on_resume = true},
        {"warmup",      OPT_INT, &o->warmup, 0, 1e12, .arg = "N", .group = "Training", .help = "learning-rate warmup steps", .computed = "min(1000, steps/10)", .on_resume = true},
        {"schedule",    OPT_CHOICE, &o->schedule, .choices = "constant|cosine|linear|wsd", .group = "Training", .help = "learning-rate schedule; wsd is constant, then decays", .on_resume = true},
        {"min-lr-frac", OPT_FLOAT, &o->min_lr_frac, 0, 1, .arg = "X", .group = "Training", .help = "final learning rate as a fraction of --lr", .on_resume = true},
        {"decay-frac",  OPT_FLOAT, &o->decay_frac, 0, 1, .arg = "X", .group = "Training", .help = "the fraction of the steps, at the end, over which --schedule wsd decays", .on_resume = true},
        {"decay-shape", OPT_CHOICE, &o->decay_shape, .choices = "linear|sqrt|cosine", .group = "Training", .help = "how --schedule wsd decays: with 1 - p, 1 - sqrt(p) or (1 + cos(pi p))/2, p going from 0 to 1", .on_resume = true},
        {"optimizer",   OPT_CHOICE, &o->optimizer, .choices = "adamw|muon", .group = "Training", .help = "muon: Muon for the layers' matrices, with the learning rate and weight decay of AdamW, and AdamW for all other tensors"},
        {"weight-decay", OPT_FLOAT, &o->weight_decay, 0, 10, .arg = "X", .group = "Training", .help = "weight decay, applied to matrices only", .on_resume = true},
        {"beta1",       OPT_FLOAT, &o->beta1, 0, 0.999999, .arg = "X", .group = "Training", .help = "AdamW beta1 (first moment)"},
        {"beta2",       OPT_FLOAT, &o->beta2, 0, 0.999999, .arg = "X", .group = "Training", .help = "AdamW beta2 (second moment)"},
        {"z-loss",      OPT_FLOAT, &o->z_loss, 0, 100, .arg = "X", .group = "Training", .help = "add X times the mean of ln(Z)^2 to what is minimized, Z being softmax's denominator; 1e-4 is common"},
        {"grad-clip",   OPT_FLOAT, &o->grad_clip, 0, 1e9, .arg = "X", .group = "Training", .help = "maximum gradient norm; 0: no clipping"},

        {"out",         OPT_TEXT, &o->out, .arg = "DIR", .group = "Run", .help = "run folder for run.json, metrics.jsonl, samples.txt and ckpt/; without it, nothing is kept", .on_resume = true},
        {"resume",      OPT_SWITCH, &o->resume, .group = "Run", .help = "continue from the newest checkpoint in --out; start from scratch if there is none", .on_resume = true, .per_call = true},
        {"val-every",   OPT_INT, &o->val_every, 0, 1e12, .arg = "N", .group = "Run", .help = "steps between validations; 0: none", .on_resume = true},
        {"val-tokens",  OPT_INT, &o->val_tokens, 1, 1e12, .arg = "N", .group = "Run", .help = "maximum number of tokens of --val-data per validation"},
        {"sample-every", OPT_INT, &o->sample_every, 0, 1e12, .arg = "N", .group = "Run", .help = "steps between samples; 0: none", .on_resume = true},
        {"norms-every", OPT_INT, &o->norms_every, 0, 1e12, .arg = "N", .group = "Run", .help = "steps between norms of the gradient and of the weights, by layer, in metrics.jsonl; 0: none", .on_resume = true},
        {"ckpt-every",  OPT_INT, &o->ckpt_every, 0, 1e12, .arg = "N", .group = "Run", .help = "steps between checkpoints; 0: only at the end", .on_resume = true},
        {"keep",        OPT_INT, &o->keep, 0, 1e6, .arg = "N", .group = "Run", .help = "newest checkpoints to keep; 0: all", .on_resume = true},
        {"keep-best",   OPT_SWITCH, &o->keep_best, .group = "Run", .help = "also keep the checkpoint with the lowest validation loss", .on_resume = true},
        {"profile",     OPT_SWITCH, &o->profile, .group = "Run", .help = "print the time per phase, from the second step on", .on_resume = true},
        {"threads",     OPT_INT, &o->threads, 0, MAX_THREADS, .arg = "N", .group = "Run", .help = THREADS_HELP, .on_resume = true},
        {"rank-timeout", OPT_INT, &o->rank_timeout, 0, 1e6, .arg = "S", .group = "Run", .help = "end the run after this many seconds without a heartbeat from a rank; 0: never", .on_resume = true},
        {"progress-timeout", OPT_INT, &o->progress_timeout, 0, 1e6, .arg = "S", .group = "Run", .help = "end a run of several ranks if one of them does nothing for this many seconds, for example because a file system hangs; 0: never", .on_resume = true},
        {"dry-run",     OPT_SWITCH, &o->dry_run, .group = "Run", .help = "check everything and print the plan; write nothing", .on_resume = true, .per_call = true},
        {"follow-links", OPT_SWITCH, &o->follow_links, .group = "Run", .help = "copy a tokenizer's files into checkpoints even if they are links out of their folder", .on_resume = true, .per_call = true},
        {"foreign-folder", OPT_SWITCH, &o->foreign_folder, .group = "Run", .help = "accept an --out that belongs to another user and that everybody may write to", .on_resume = true, .per_call = true},

        {"zero",        OPT_SWITCH, &o->zero, .group = "GPUs", .help = "shard the optimizer's state over the ranks (ZeRO-1)", .on_resume = true},
        {"recompute",   OPT_SWITCH, &o->recompute, .group = "GPUs", .help = "recompute some activations in the backward pass to save memory", .on_resume = true},
        {"reduce-dtype", OPT_CHOICE, &o->reduce_dtype, .choices = "fp32|bf16", .group = "GPUs", .help = "the all-reduce adds gradients in float32 (fp32), or in bfloat16 (bf16), with half the traffic and less exactly"},
        {"deterministic", OPT_SWITCH, &o->deterministic, .group = "GPUs", .help = "bitwise reproducible; 0: pick the fastest matmul algorithm by measurement, and sum attention's gradients in any order"},
        {"matmuls",     OPT_TEXT, &o->matmuls, .arg = "FILE", .group = "GPUs", .help = "use the matmul algorithms stored in this file; with --deterministic 0, measure those that it lacks and add the fastest", .on_resume = true},
        {"graphs",      OPT_SWITCH, &o->graphs, .group = "GPUs", .help = "queue a micro-batch as CUDA graphs (never with --profile); 0: kernel by kernel", .on_resume = true},
        {"stochastic-rounding", OPT_SWITCH, &o->stochastic_rounding, .group = "GPUs", .help = "round the weights' bf16 copy stochastically"},
    };
    // clang-format on
    o->count = sizeof table / sizeof *table;
    o->table = memcpy(allocate(1, sizeof table, "the flags"), table, sizeof table);
    for (Option *row = o->table; row < o->table + o->count; row++)
        if (!gpus && strcmp(row->group, "GPUs") == 0) row->only_in = "train_gpt2cu, the GPU trainer";
}

bool train_options_given(const TrainOptions *options, const char *name) {
    const Option *row = options_find(options->table, options->count, name);
    return row && row->given;
}

#include "run/train_options.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/start.h"

#ifndef ATTN_ONLY            // of make ATTN=NAME
#define ATTN_ONLY "softmax"
#endif

void train_options_init(TrainOptions *o, const char *attn_help, bool gpus) {
    *o = (TrainOptions){
        .model = "124M", .attn = ATTN_ONLY, .batch = 4, .seq_len = {.values = {1024}, .count = 1}, .steps = 1000, .lr = 6e-4,
        .warmup = 1000, .min_lr_frac = 0.1, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.95, .grad_clip = 1.0, .rope_theta = 10000,
        .seed = 1337, .shuffle = true, .val_every = 250, .val_tokens = 1 << 20, .ckpt_every = 1000, .keep = 2, .rank_timeout = 60,
        .deterministic = true,
    };
    const Option table[] = {
        {"train-data",  OPT_TEXT, &o->train_data, .arg = "GLOB", .group = "Data", .help = "shards to train on, for example 'data/shakespeare/*_train_*.bin'"},
        {"val-data",    OPT_TEXT, &o->val_data, .arg = "GLOB", .group = "Data", .help = "shards to validate on; none: no validation"},
        {"shuffle",     OPT_SWITCH, &o->shuffle, .group = "Data", .help = "windows in an order made from seed and epoch; 0: in sequence"},
        {"pack",        OPT_CHOICE, &o->pack, .choices = "stream|example", .group = "Data", .help = "windows of one stream, or a document a row"},
        {"seed",        OPT_INT, &o->seed, 0, 9007199254740992.0, .arg = "N", .group = "Data", .help = "of the first weights, the data's order and the samples"},

        {"model",       OPT_TEXT, &o->model, .arg = "NAME|SPEC", .group = "Model", .help = "15M, 124M, 162M, or layers=4,heads=4,channels=128,ffn=352,tied=1[,vocab=N]; block=gau: gated attention units"},
        {"attn",        OPT_TEXT, &o->attn, .arg = "NAME", .group = "Model", .help = attn_help,
         .resume_hint = "To change the normalizer of this run, use --attn-switch STEP:NAME."},
        {"attn-switch", OPT_TEXT, &o->attn_switch, .arg = "STEP:NAME", .group = "Model", .help = "change the normalizer at this step", .on_resume = true},
        {"norm-length", OPT_INT, &o->norm_length, 0, 1 << 20, .arg = "N", .group = "Model", .help = "the L of the normalizers; 0: the largest --seq-len, or the loaded model's"},
        {"rope-theta",  OPT_FLOAT, &o->rope_theta, 1.0001, 1e12, .arg = "X", .group = "Model", .help = "base of RoPE's wavelengths"},
        {"init-from",   OPT_TEXT, &o->init_from, .arg = "DIR", .group = "Model", .help = "start from the weights of a checkpoint or a Hugging Face Llama folder"},
        {"ignore-config-key", OPT_TEXT, &o->ignore_config_key, .arg = "NAME[,...]", .group = "Model", .help = "keys of --init-from's config.json that are not known here and change nothing"},
        {"dtype",       OPT_CHOICE, &o->dtype, .choices = "fp32|bf16", .group = "Model", .help = "of the inputs of matrix products; sums and master weights are float32"},

        {"batch",       OPT_INT, &o->batch, 1, 65536, .arg = "B", .group = "Training", .help = "sequences at a time, for one process", .on_resume = true},
        {"seq-len",     OPT_INT_LIST, &o->seq_len, 1, 1 << 20, .arg = "T[,T...]", .group = "Training", .help = "tokens a sequence; several: each step takes one of them"},
        {"total-batch-tokens", OPT_INT, &o->total_batch_tokens, 0, 1e12, .arg = "N", .group = "Training", .help = "tokens a step, reached by accumulation; 0: batch x T x processes"},
        {"steps",       OPT_INT, &o->steps, 0, 1e12, .arg = "N", .group = "Training", .help = "optimizer steps in all", .on_resume = true},
        {"lr",          OPT_FLOAT, &o->lr, 0, 100, .arg = "X", .group = "Training", .help = "learning rate after the warm-up", .on_resume = true},
        {"warmup",      OPT_INT, &o->warmup, 0, 1e12, .arg = "N", .group = "Training", .help = "steps in which the learning rate rises", .on_resume = true},
        {"schedule",    OPT_CHOICE, &o->schedule, .choices = "constant|cosine|linear|wsd", .group = "Training", .help = "of the learning rate; wsd decays over the last fifth", .on_resume = true},
        {"min-lr-frac", OPT_FLOAT, &o->min_lr_frac, 0, 1, .arg = "X", .group = "Training", .help = "where the schedule ends, as a fraction of --lr", .on_resume = true},
        {"weight-decay", OPT_FLOAT, &o->weight_decay, 0, 10, .arg = "X", .group = "Training", .help = "AdamW's, on tensors of rank 2"},
        {"beta1",       OPT_FLOAT, &o->beta1, 0, 0.999999, .arg = "X", .group = "Training", .help = "AdamW's decay of the mean of gradients"},
        {"beta2",       OPT_FLOAT, &o->beta2, 0, 0.999999, .arg = "X", .group = "Training", .help = "AdamW's decay of the mean of their squares"},
        {"grad-clip",   OPT_FLOAT, &o->grad_clip, 0, 1e9, .arg = "X", .group = "Training", .help = "largest norm of the gradient; 0: no limit"},

        {"out",         OPT_TEXT, &o->out, .arg = "DIR", .group = "Run", .help = "run folder: run.json, metrics.jsonl, samples.txt, ckpt/; none: nothing is kept", .on_resume = true},
        {"resume",      OPT_SWITCH, &o->resume, .group = "Run", .help = "continue from the newest checkpoint in --out, or start where there is none", .on_resume = true},
        {"val-every",   OPT_INT, &o->val_every, 0, 1e12, .arg = "N", .group = "Run", .help = "steps between validations; 0: none", .on_resume = true},
        {"val-tokens",  OPT_INT, &o->val_tokens, 1, 1e12, .arg = "N", .group = "Run", .help = "tokens of --val-data that a validation reads, at most"},
        {"sample-every", OPT_INT, &o->sample_every, 0, 1e12, .arg = "N", .group = "Run", .help = "steps between samples; 0: none", .on_resume = true},
        {"ckpt-every",  OPT_INT, &o->ckpt_every, 0, 1e12, .arg = "N", .group = "Run", .help = "steps between checkpoints; 0: one at the end", .on_resume = true},
        {"keep",        OPT_INT, &o->keep, 0, 1e6, .arg = "N", .group = "Run", .help = "checkpoints that stay; 0: all", .on_resume = true},
        {"keep-best",   OPT_SWITCH, &o->keep_best, .group = "Run", .help = "keep the one with the lowest validation loss too", .on_resume = true},
        {"profile",     OPT_SWITCH, &o->profile, .group = "Run", .help = "print where the time went", .on_resume = true},
        {"threads",     OPT_INT, &o->threads, 0, MAX_THREADS, .arg = "N", .group = "Run", .help = THREADS_HELP, .on_resume = true},
        {"rank-timeout", OPT_INT, &o->rank_timeout, 0, 1e6, .arg = "S", .group = "Run", .help = "seconds without a heartbeat from a rank until the others end; 0: no limit", .on_resume = true},
        {"dry-run",     OPT_SWITCH, &o->dry_run, .group = "Run", .help = "check everything, print the plan, write nothing", .on_resume = true},

        {"zero",        OPT_INT, &o->zero, 0, 1, .arg = "0|1", .group = "GPUs", .help = "1: each process keeps its share of AdamW's moments (ZeRO-1)", .on_resume = true},
        {"recompute",   OPT_SWITCH, &o->recompute, .group = "GPUs", .help = "keep less for the backward pass, and compute it again", .on_resume = true},
        {"reduce-dtype", OPT_CHOICE, &o->reduce_dtype, .choices = "fp32|bf16", .group = "GPUs", .help = "of gradients on their way between processes", .on_resume = true},
        {"deterministic", OPT_SWITCH, &o->deterministic, .group = "GPUs", .help = "the same bits each time; 0: products by the algorithm that a measurement finds fastest", .on_resume = true},
        {"stochastic-rounding", OPT_SWITCH, &o->stochastic_rounding, .group = "GPUs", .help = "under bf16, of the weights' copy that the products read", .on_resume = true},
    };
    const size_t count = sizeof table / sizeof *table, on_gpus = 5;      // the last rows
    o->count = gpus ? count : count - on_gpus, o->count_on_gpus = count;
    o->table = malloc(sizeof table);
    if (!o->table) fail(EXIT_RESOURCE, "out of memory for the flags.");
    memcpy(o->table, table, sizeof table);
}

void train_options_parse(TrainOptions *o, int argc, char **argv, const char *usage) {
    for (int i = 1; i < argc; i++)
        for (size_t row = o->count; row < o->count_on_gpus; row++) {
            const char *name = o->table[row].name, *word = argv[i];
            size_t length = strlen(name);
            if (strncmp(word, "--", 2) == 0 && strncmp(word + 2, name, length) == 0 && (word[2 + length] == 0 || word[2 + length] == '='))
                usage_fail("--%s is a flag of train_gpt2cu, the trainer on GPUs; %s has no such flag.", name, program_name);
        }
    options_parse(o->table, o->count, argc, argv, usage);
}

bool train_options_given(const TrainOptions *options, const char *name) {
    const Option *row = options_find(options->table, options->count, name);
    return row && row->given;
}

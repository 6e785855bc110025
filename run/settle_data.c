#include "run/parts.h"

#include <stdio.h>

#include "data/tokens_match.h"
#include "runtime/error.h"
#include "runtime/path.h"
#include "runtime/process.h"

void settle_batches(Run *run) {
    TrainOptions *o = &run->o;
    int64_t T = (int64_t)run->T;
    for (size_t i = 0; i < o->seq_len.count; i++)
        if (T % o->seq_len.values[i])
            fail(EXIT_USAGE, "--seq-len: %lld does not divide the longest length, %lld.",
                 (long long)o->seq_len.values[i], (long long)T);
    if (o->batch * T > INT32_MAX)
        fail(EXIT_USAGE,
             "--batch %lld x --seq-len %lld exceeds 2^31 - 1 tokens. Use gradient accumulation: --total-batch-tokens.",
             (long long)o->batch, (long long)T);
    int64_t together = o->batch * T * process.size;
    if (!o->total_batch_tokens) o->total_batch_tokens = together;
    if (o->total_batch_tokens % together) {
        int64_t nearest = ((o->total_batch_tokens + together / 2) / together) * together;
        char remedy[96] = "A resumed run keeps its tokens per step: change --batch or the number of ranks.";
        if (!is_kept(run)) snprintf(remedy, sizeof remedy, "Nearest: %lld.", (long long)(nearest ? nearest : together));
        fail(EXIT_USAGE,
             "--total-batch-tokens %lld is not a multiple of batch x T x ranks = %lld x %lld x %d = %lld.\n  %s",
             (long long)o->total_batch_tokens, (long long)o->batch, (long long)T, process.size, (long long)together,
             remedy);
    }
    run->step_tokens = o->total_batch_tokens;
    run->micro_batches = o->total_batch_tokens / together;
}

static ShardsConfig shards_config(const Run *run) {
    return (ShardsConfig){.T = run->T,
                          .vocab = run->config->vocab,
                          .end_of_text = run->config->end_of_text,
                          .seed = (uint64_t)run->o.seed,
                          .pack = (PackMode)run->o.pack};
}

static void open_train(Run *run) {
    ShardsConfig config = shards_config(run);
    Error error;
    config.shuffle = run->o.shuffle;
    config.min_windows = (uint64_t)(run->step_tokens / (int64_t)run->T);
    config.remedy = "Add data, or reduce --seq-len, --batch or --total-batch-tokens.";
    run->train = mixture_open(run->o.train_data, config, &error);
    for (size_t i = 0; run->train && i < run->train->count; i++) {
        Shards *shards = run->train->sources[i].shards;
        if (!shards_check_targets(shards, shards_windows(shards), true, &error)) fail_with(&error);
    }
    run->train_print = run->train ? mixture_fingerprint(run->train, &error) : NULL;
    if (!run->train_print) fail_with(&error);
}

// An existing run was already started on this data, so a difference is only a warning there.
static void check_tokens_of(const Run *run, const Shards *shards, const char *first) {
    FolderPath folder;
    TokenMatch match = tokens_match_shards(first, shards, &folder);
    if (match == TOKENS_EQUAL) return;
    const FolderPath one = folder_path(folder.text, tokenizer_files[0]), two = folder_path(first, tokenizer_files[0]);
    if (match == TOKENS_DIFFER && !is_kept(run))
        fail(EXIT_INPUT,
             "%s: differs from %s, but --train-data, all its sources and --val-data need the same tokenizer.\n"
             "  Encode the text again with one of them: --tokenizer FOLDER of the scripts in data/.",
             one.text, two.text);
    warn("%s differs from %s.\n  If an id stands for another token there, the losses are meaningless.", one.text,
         two.text);
}

static void open_val(Run *run) {
    ShardsConfig config = shards_config(run);
    Error error;
    if (!run->o.val_data) return;
    if (mixture_has_weights(run->o.val_data))
        fail(EXIT_USAGE,
             "--val-data %s: only --train-data can have weights.\n"
             "  Validation reads one stream; to measure the loss of each source, use eval_gpt2 --data.",
             run->o.val_data);
    config.min_windows = 1;
    config.remedy = "Add data, or reduce --seq-len.";
    run->val = shards_open(run->o.val_data, config, &error);
    if (run->val && !shards_check_targets(run->val, validation_windows(run), true, &error)) fail_with(&error);
    run->val_print = run->val ? shards_fingerprint(run->val, &error) : NULL;
    if (!run->val_print) fail_with(&error);
}

// An id means another token in each tokenizer, so all data needs the same one. A model in the folder `weights` may be
// trained further with another one, but that is rarely meant.
static void check_same_tokens(const Run *run, const char *weights) {
    const FolderPath first = folder_of(shards_path(run->train->sources[0].shards, 0));
    for (size_t i = 0; i < run->train->count; i++) check_tokens_of(run, run->train->sources[i].shards, first.text);
    if (run->val) check_tokens_of(run, run->val, first.text);
    if (weights[0] && tokens_match(weights, first.text) != TOKENS_EQUAL)
        warn(
            "%s differs from %s, the tokenizer of the model.\n"
            "  Unless the model is to learn another one, encode the text with its own: --tokenizer FOLDER of the scripts "
            "in data/.",
            folder_path(first.text, tokenizer_files[0]).text, folder_path(weights, tokenizer_files[0]).text);
}

void settle_data(Run *run, const char *weights) {
    open_train(run);
    open_val(run);
    check_same_tokens(run, weights);
}

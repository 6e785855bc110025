#include "run/parts.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "model/checkpoint.h"
#include "run/folder.h"
#include "run/lineage.h"
#include "runtime/error.h"
#include "runtime/file.h"
#include "runtime/path.h"
#include "runtime/utf8.h"

static bool folder_has_tokenizer(const char *folder) {
    return access(folder_path(folder, tokenizer_files[0]).text, R_OK) == 0;
}

// Opens the tokenizer next to the shards, or in the folder `weights`. If it is missing or unsupported, samples are
// printed as ids. Checkpoints copy its files in any case.
static void open_tokenizer(Run *run, const char *weights) {
    char first[PATH_MAX];
    Error error;
    if (run->tokenizer_folder[0] || !run->o.train_data) return;
    // If this fails, opening the shards reports why.
    if (!mixture_first_path(run->o.train_data, first, sizeof first)) return;
    const FolderPath beside = folder_of(first);
    const char *folder = folder_has_tokenizer(beside.text) ? beside.text : weights;
    if (!folder[0] || !folder_has_tokenizer(folder)) return;
    snprintf(run->tokenizer_folder, sizeof run->tokenizer_folder, "%s", folder);
    for (size_t i = 0; tokenizer_files[i] && run->o.out && !run->o.follow_links; i++)
        if (!file_check_inside(folder, folder_path(folder, tokenizer_files[i]).text, &error)) fail_with(&error);
    if ((run->tokenizer = tokenizer_open(folder, &error))) {
        run->tokenizer_vocab = tokenizer_vocab(run->tokenizer);
        run->end_of_text = tokenizer_end_of_text(run->tokenizer);
        return;
    }
    if (error.code != EXIT_INPUT || !tokenizer_ids(folder, &run->tokenizer_vocab, &run->end_of_text)) fail_with(&error);
    if (run->tokenizer_vocab > MAX_VOCAB) run->tokenizer_vocab = 0;    // it cannot be the shards' tokenizer
    warn("%s\n  This does not affect training, but samples are printed as token ids.", error.text);
}

static RopeScaling asked_scaling(const TrainOptions *o) {
    RopeScaling scaling;
    char message[512];
    if (!rope_scaling_parse(&scaling, o->rope_scaling, message, sizeof message))
        fail(EXIT_USAGE, "--rope-scaling %s: %s.", o->rope_scaling, message);
    return scaling;
}

// run.json records the scaling in this form, which a resume compares.
static void name_scaling(Run *run, const RopeScaling *scaling) {
    run->o.rope_scaling = rope_scaling_text(scaling, run->rope_text, sizeof run->rope_text);
}

// Older versions did not record the scaling in run.json, so the checkpoint has the last word.
static void check_resumed_scaling(const TrainOptions *o, const RopeScaling *has) {
    char text[ROPE_TEXT];
    if (!train_options_given(o, "rope-scaling")) return;
    RopeScaling asked = asked_scaling(o);
    if (!rope_scaling_equal(&asked, has))
        fail(EXIT_USAGE,
             "--resume: --rope-scaling is %s, but the checkpoint has %s, and a resumed run cannot change it.\n"
             "  Omit --rope-scaling, or start a new run in another --out (--init-from reuses the weights).",
             o->rope_scaling, rope_scaling_text(has, text, sizeof text));
}

// For --init-from: finds the folder of those weights and takes their shape, which --model may repeat but not
// contradict. A run's checkpoint may be pruned before it is read.
static void settle_loaded(Run *run, char *folder, size_t size) {
    const TrainOptions *o = &run->o;
    ModelConfig *config = run->config, asked;
    Error error;
    char shape[256];
    for (int attempt = 1;; attempt++) {
        if (!checkpoint_find("--init-from", o->init_from, folder, size, &error)) fail_with(&error);
        if (model_config_read(config, folder, o->ignore_config_key, &error) &&
            checkpoint_verify(folder, true, &error) && weights_check(config, folder, &error))
            break;
        if (attempt == CHECKPOINT_ATTEMPTS || !checkpoint_vanished(folder)) fail_with(&error);
    }
    if (run_is_main() && strcmp(folder, o->init_from)) printf("weights from %s\n", utf8_printed(folder).text);
    run->loaded = config->attn;
    run->loaded_L = config->seq_len;
    run->vocab_from = " (from the loaded model)";
    if (train_options_given(o, "rope-theta") || run->started_over) config->rope_theta = o->rope_theta;
    if (train_options_given(o, "logit-softcap") || run->started_over) config->logit_softcap = o->logit_softcap;
    if (!train_options_given(o, "model")) return;
    if (!model_parse(&asked, o->model, &error)) fail_with(&error);
    if (!model_gives_vocab(o->model)) asked.vocab = config->vocab;
    if (!model_same_shape(&asked, config))
        fail(EXIT_USAGE, "--model %s does not match %s: %s.\n  Omit --model to use that shape.", o->model, folder,
             model_text(config, shape, sizeof shape));
}

// Sets T to the longest --seq-len.
static void find_longest(Run *run) {
    const IntList *lengths = &run->o.seq_len;
    run->T = 0;
    for (size_t i = 0; i < lengths->count; i++)
        if ((size_t)lengths->values[i] > run->T) run->T = (size_t)lengths->values[i];
}

// Sets the vocabulary size of a new model: from --model, else from the tokenizer next to the data, else the default.
static void settle_vocabulary(Run *run) {
    run->vocab_from = " (from --model)";
    if (model_gives_vocab(run->o.model)) return;
    open_tokenizer(run, "");
    run->vocab_from = run->tokenizer_vocab ? " (from the tokenizer)" : " (default; no tokenizer found)";
    if (run->tokenizer_vocab >= 2 && run->tokenizer_vocab <= MAX_VOCAB)
        run->config->vocab = (size_t)run->tokenizer_vocab;
    run->config->end_of_text = default_end_of_text(run->config->vocab);
}

void settle_model(Run *run, char *folder, size_t size) {
    TrainOptions *o = &run->o;
    ModelConfig *config = run->config;
    Error error;
    char message[1024];
    folder[0] = 0;
    if (o->rope_scaling) {
        RopeScaling asked = asked_scaling(o);
        name_scaling(run, &asked);
    }
    run->resumed = o->resume && settle_resumed(run, folder, size);
    find_longest(run);
    if (run->resumed) {
        check_resumed_scaling(o, &config->rope_scaling);
        return;
    }
    if (!o->resume && o->out && !folder_is_new(o->out, &error)) fail_with(&error);
    if (o->init_from) {
        settle_loaded(run, folder, size);
    } else {
        if (!model_parse(config, o->model, &error)) fail_with(&error);
        settle_vocabulary(run);
        config->rope_theta = o->rope_theta;
        config->logit_softcap = o->logit_softcap;
        config->seq_len = run->T;
    }
    if (o->rope_scaling) config->rope_scaling = asked_scaling(o);
    name_scaling(run, &config->rope_scaling);
    if ((!o->init_from || train_options_given(o, "attn") || run->started_over) &&
        !attention_parse(&config->attn, o->attn, config->layers, message, sizeof message))
        fail(EXIT_USAGE, "--attn %.400s: %s.", o->attn, message);
    if (!run->started_over) attention_warn_of_unused("--attn", config->attn.text, config->layers);
    if (o->init_from) attention_warn_of_start(&run->loaded, &config->attn, config->layers, "--attn", config->attn.text);
    if (o->norm_length) config->seq_len = (size_t)o->norm_length;
    if (o->norm_length && run->loaded.text[0] && attention_has(&run->loaded, SCALAR_P))
        fail(EXIT_USAGE, "--norm-length %lld: %s has p_n that were learned for its own L.\n  Omit this flag.",
             (long long)o->norm_length, o->init_from);
    if (run->started_over) repeat_switches(run, run->lineage, NULL);
    cJSON_Delete(run->lineage);
    run->lineage = cJSON_CreateArray();
    lineage_add(run->lineage, 0, o->init_from ? "init-from" : "start", "attn", config->attn.text,
                o->init_from ? "from" : NULL, folder, NULL);
}

void settle_tokenizer(Run *run, const char *weights) {
    int vocab = (int)run->config->vocab;
    open_tokenizer(run, weights);
    if (run->tokenizer_vocab > vocab && weights[0] && run->end_of_text < vocab)
        warn("%s: its tokenizer has %d tokens, but the vocabulary of the model in %s has %d and cannot grow.\n"
             "  Text with a token that the model lacks cannot be used. Shards are checked as they are read.",
             run->tokenizer_folder, run->tokenizer_vocab, weights, vocab);
    else if (run->tokenizer_vocab > vocab && weights[0])
        fail(EXIT_INPUT,
             "%s: its token between documents has the id %d, but the vocabulary of the model in %s has %d ids.\n"
             "  Encode the text with the model's own tokenizer: data/text.py --tokenizer FOLDER, or another script in "
             "data/.",
             run->tokenizer_folder, run->end_of_text, weights, vocab);
    else if (run->tokenizer_vocab > vocab)
        fail(EXIT_INPUT,
             "%s: its tokenizer has %d tokens, but the model's vocabulary has %d.\n"
             "  Omit vocab= from --model, or set vocab=%d or more.",
             run->tokenizer_folder, run->tokenizer_vocab, vocab, run->tokenizer_vocab);
    if (run->tokenizer_vocab && run->end_of_text >= 0) run->config->end_of_text = run->end_of_text;
}

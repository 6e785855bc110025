#include "run/parts.h"

#include "run/run_json.h"
#include "runtime/error.h"

// Checks the constraints that a normalizer places on sequence lengths.
static void check_normalizer(const Run *run, const AttentionList *attn, const char *flag) {
    char message[1024];
    size_t L = run->config->seq_len;
    if (!attention_fits(attn, L, message, sizeof message)) fail(EXIT_USAGE, "%s %s.", flag, message);
    if (attention_p_keys(attn, run->T) > L)
        fail(EXIT_USAGE,
             "%s %s: p_n is learned for n up to L = %zu, but with --seq-len %zu queries see up to %zu keys.\n"
             "  Reduce --seq-len, or add +window=%zu to the entries that have p_n.",
             flag, attn->text, L, run->T, attention_p_keys(attn, run->T), L);
}

static void check_softcap(double c) {
    if (c != 0 && c < MIN_SOFTCAP)
        fail(EXIT_USAGE, "--logit-softcap %g: expected a number from %g to %g, or 0 for no cap.", c, MIN_SOFTCAP,
             MAX_SOFTCAP);
}

// Under ntk the angles depend on the length of a sequence, and training has one table of angles, for the longest.
static void check_rope(const Run *run) {
    const ModelConfig *config = run->config;
    const char *wrong = rope_scaling_wrong(&config->rope_scaling, head_size(config));
    if (wrong) fail(EXIT_USAGE, "--rope-scaling %s: %s.", run->o.rope_scaling, wrong);
    if (config->rope_scaling.kind == ROPE_NTK && run->o.seq_len.count > 1 && run->T > config->seq_len)
        fail(
            EXIT_USAGE,
            "--rope-scaling ntk: beyond L = %zu the angles depend on the length, so training there needs one --seq-len.",
            config->seq_len);
}

Schedule schedule_of(const TrainOptions *o, int64_t rewarm) {
    return (Schedule){.kind = (ScheduleKind)o->schedule,
                      .lr = o->lr,
                      .min_lr_frac = o->min_lr_frac,
                      .warmup = o->warmup,
                      .steps = o->steps,
                      .rewarm = rewarm,
                      .decay_frac = o->decay_frac,
                      .decay_shape = (DecayShape)o->decay_shape};
}

void settle(Run *run) {
    char *weights = run->weights_folder;
    size_t size = sizeof run->weights_folder;
    TrainOptions *o = &run->o;
    Error error;
    run->best.step = run->last_best.step = run->saved = -1;
    settle_model(run, weights, size);
    if (o->warmup < 0) o->warmup = o->steps / 10 < 1000 ? o->steps / 10 : 1000;
    check_same_start(run);
    if (run->resumed) run->saved = run->step;
    settle_switches(run);
    check_normalizer(run, &run->config->attn, "--attn");
    for (size_t i = 0; i < run->switch_count; i++) check_normalizer(run, &run->switches[i].to, "--attn-switch");
    check_rope(run);
    check_softcap(o->logit_softcap);
    settle_batches(run);
    if (run->resumed) check_position(run);
    if (!o->train_data && o->resume && !run->resumed && !run->started_over)
        fail(EXIT_USAGE,
             "--resume --out %s: this folder contains no run to resume, and starting one there needs --train-data.\n"
             "  Check the path.",
             o->out);
    if (!o->train_data)
        fail(EXIT_USAGE, "--train-data is missing: name the shards to train on. data/shakespeare.py creates some.");
    settle_tokenizer(run, weights);
    settle_data(run, weights);
    if (is_kept(run) && (!run_json_same_data(o->out, "train", run->train_print, &error) ||
                         !run_json_same_data(o->out, "val", run->val_print, &error)))
        fail_with(&error);
    check_same_on_all_ranks(run);
    if (!run->resumed) {    // run.json records what the model is, whether by a flag or by --init-from
        free(run->attn_text);
        o->attn = run->attn_text = strdup(run->config->attn.text);
        o->rope_theta = run->config->rope_theta;
        o->logit_softcap = run->config->logit_softcap;
    }
    norms_ready(run);
    run->schedule = schedule_of(o, run->schedule.rewarm);
}

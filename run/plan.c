#include "run/parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "model/checkpoint.h"
#include "runtime/error.h"
#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/process.h"
#include "runtime/utf8.h"

// Plans the memory that the run itself needs.
static void plan_memory(Run *run) {
    MemoryPlan *plan = run->plan;
    size_t N = (size_t)run->o.batch * run->T;
    plan->remedy = "Reduce --batch or --seq-len (fewer activations), or choose a smaller --model.";
    bool masked = mixture_masked(run->train) || (run->val && shards_masked(run->val));
    run->more_size = 1024 + 3 * (64 + 64 * run->config->layers) + norms_room(run);
    memory_add(plan, "scratch", (void **)&run->more, run->more_size);
    memory_add(plan, "scratch", (void **)&run->passes, (size_t)process.size * sizeof *run->passes);
    memory_add(plan, "batch", (void **)&run->window, (run->T + 1) * sizeof(int32_t));
    memory_add(plan, "batch", (void **)&run->inputs, N * sizeof(int32_t));
    memory_add(plan, "batch", (void **)&run->targets, N * sizeof(int32_t));
    if (run_sample_length(run))
        memory_add(plan, "scratch", (void **)&run->candidates, run->config->vocab * sizeof *run->candidates);
    if (masked) {
        memory_add(plan, "batch", (void **)&run->window_mask, run->T);
        memory_add(plan, "batch", (void **)&run->mask, N);
    }
}

// A checkpoint's size: weights, with bf16 the float32 master weights, and the optimizer's state.
static double checkpoint_bytes(const Run *run) {
    TensorList list = run_tensors(run);
    double bytes = 0;
    for (size_t i = 0; i < list.count; i++) {
        const Tensor *t = &list.tensors[i];
        int each = run->o.dtype == TRAIN_BF16 ? 2 + 4 : 4;
        if (!tensor_exists(t, &run->config->attn)) continue;
        for (size_t s = 0; s < STATE_ARRAYS; s++) each += update_state[t->update][s] ? 4 : 0;
        bytes += (double)t->elements * each;
    }
    tensors_free(&list);
    return bytes;
}

// A warmup that lasts until the end of the run is almost always a mistake.
static void warn_of_long_warmup(const Run *run) {
    const TrainOptions *o = &run->o;
    if (o->steps > 0 && o->warmup >= o->steps)
        warn("--warmup %lld is not shorter than --steps %lld: the learning rate rises during the whole run%s.\n"
             "  A common choice is a tenth of the steps: --warmup %lld.",
             (long long)o->warmup, (long long)o->steps, o->schedule == SCHEDULE_CONSTANT ? "" : " and never decays",
             (long long)o->steps / 10);
    for (const Switch *s = run->switches; s < run->switches + run->switch_count; s++) {
        if (o->warmup >= o->steps || s->step >= o->steps || s->step + o->warmup < o->steps) continue;
        warn(
            "after the switch to %s at step %lld, the learning-rate warmup of %lld steps restarts and does not end before the run does (--steps %lld).",
            s->to.text, (long long)s->step, (long long)o->warmup, (long long)o->steps);
    }
}

static void warn_of_no_best(const Run *run) {
    if (!run->o.keep_best || (run->val && run->o.val_every)) return;
    warn("--keep-best selects no checkpoint, because there is no validation: %s.",
         run->val ? "--val-every is 0" : "--val-data is missing");
}

static bool is_listed(const char *path, const struct stat *files, size_t count) {
    struct stat file;
    if (stat(path, &file) != 0) return false;
    for (size_t i = 0; i < count; i++)
        if (file.st_dev == files[i].st_dev && file.st_ino == files[i].st_ino) return true;
    return false;
}

// The first shard of --train-data that is also one of --val-data, or NULL.
static const char *shared_shard(const Run *run, const struct stat *val, size_t count) {
    for (size_t i = 0; i < run->train->count; i++)
        for (size_t j = 0; j < shards_count(run->train->sources[i].shards); j++) {
            const char *path = shards_path(run->train->sources[i].shards, j);
            if (is_listed(path, val, count)) return path;
        }
    return NULL;
}

// A glob such as *.bin also matches the validation shards.
static void warn_of_trained_validation(const Run *run) {
    size_t count = run->val ? shards_count(run->val) : 0;
    struct stat *val = allocate(count, sizeof *val, "the list of shards");
    for (size_t i = 0; i < count; i++) stat(shards_path(run->val, i), &val[i]);
    const char *path = shared_shard(run, val, count);
    if (path)
        warn(
            "%s is in --train-data and in --val-data, so the validation loss covers text that the model is trained on.",
            path);
    free(val);
}

// L is that of the loaded model, unless the run has set another one.
static void print_other_length(const Run *run) {
    bool kept = run->resumed || run->started_over || run->o.norm_length || attention_has(&run->loaded, SCALAR_P);
    printf(", although sequences have %zu tokens", run->T);
    if (!kept) printf(" (--norm-length %zu changes L)", run->T);
}

static void print_model(const Run *run) {
    const ModelConfig *c = run->config;
    char shortest[ATTENTION_TEXT], layers[160], scaling[ROPE_TEXT], list[ATTENTION_TEXT];
    attention_shortest(&c->attn, shortest, sizeof shortest);
    bool longer = strlen(shortest) < strlen(c->attn.text);
    printf("model     %s parameters (%s), ", human_grouped(model_parameters(c)).text,
           human_count((double)model_parameters(c)).text);
    fputs(model_description(c, layers, sizeof layers), stdout);
    if (c->norm_eps != DEFAULT_NORM_EPS) printf(", norm_eps %.15g", c->norm_eps);
    printf(", vocabulary %s%s, %s", human_grouped(c->vocab).text, run->vocab_from ? run->vocab_from : "",
           c->tied ? "tied" : "untied");
    if (c->logit_softcap != 0) printf(", logit softcap %g", c->logit_softcap);
    printf("\nattention %s%s%s, L = %zu", c->attn.text, longer ? ", the same as " : "", longer ? shortest : "",
           c->seq_len);
    if (run->T != c->seq_len) print_other_length(run);
    printf("%s\n", run->o.doc_mask ? ", within documents" : "");
    if (c->attn.count > 1 || attention_beyond_plain(&c->attn))
        printf("layers    %s\n", attention_description(&c->attn, c->layers, list, sizeof list));
    if (c->rope_scaling.kind != ROPE_NONE)
        printf("rope      scaling %s\n", rope_scaling_text(&c->rope_scaling, scaling, sizeof scaling));
    for (const Switch *s = run->switches; s < run->switches + run->switch_count; s++) {
        printf("switch    to %s at step %lld%s", s->to.text, (long long)s->step,
               s->repeated ? ", repeated from run.json" : "");
        if (s->step >= run->o.steps) printf("; never reached, because --steps is %lld", (long long)run->o.steps);
        printf("\n");
    }
}

static void print_shards(const Run *run, const Shards *shards) {
    uint64_t windows = shards_windows(shards);
    printf("%s tokens in %zu shard%s, %s window%s of %zu", human_grouped(shards_tokens(shards)).text,
           shards_count(shards), shards_count(shards) == 1 ? "" : "s", human_grouped(windows).text,
           windows == 1 ? "" : "s", run->T);
}

static void print_data(const Run *run) {
    const Mixture *train = run->train;
    double sequences = (double)run->step_tokens / (double)run->T;
    if (train->weighted) {
        printf("data      %zu source%s", train->count, train->count == 1 ? "" : "s");
    } else {
        printf("data      ");
        print_shards(run, train->sources[0].shards);
        printf(", %.1f steps per epoch", (double)shards_windows(train->sources[0].shards) / sequences);
    }
    if (run->val) printf("; validation %s tokens", human_grouped(shards_tokens(run->val)).text);
    for (const Source *s = train->sources; train->weighted && s < train->sources + train->count; s++) {
        double share = (double)s->weight / (double)train->period;
        char percent[32];
        snprintf(percent, sizeof percent, "%.4g%%", 100 * share);
        Utf8Printer globs = utf8_printer(stdout);
        printf("\n  %-7s ", percent);
        utf8_print(&globs, s->globs, strlen(s->globs));
        utf8_print_end(&globs);
        printf(": ");
        print_shards(run, s->shards);
        printf(", %.2f epochs", share * sequences * (double)run->o.steps / (double)shards_windows(s->shards));
    }
}

// A resumed run's flags come from its run.json, which anybody may have written.
static PrintedName flag_text(const TrainOptions *o, const char *name) {
    char text[128];
    options_text(options_find(o->table, o->count, name), text, sizeof text);
    return utf8_printed(text);
}

static void print_decay(const TrainOptions *o) {
    const Schedule schedule = schedule_of(o, 0);
    int64_t steps = schedule_decay_steps(&schedule);
    if (schedule.kind != SCHEDULE_WSD) return;
    if (steps == 0) printf(", no decay");
    else
        printf(", %s decay in the last %s step%s", flag_text(o, "decay-shape").text,
               human_grouped((uint64_t)steps).text, steps == 1 ? "" : "s");
}

static void print_update(const TrainOptions *o) {
    printf("update    %s, learning rate %s, %s after %s step%s of warmup", flag_text(o, "optimizer").text,
           flag_text(o, "lr").text, flag_text(o, "schedule").text, human_grouped((uint64_t)o->warmup).text,
           o->warmup == 1 ? "" : "s");
    print_decay(o);
    if (o->z_loss != 0) printf(", z-loss %s", flag_text(o, "z-loss").text);
    printf("\n");
}

// A learning rate between the last one and the one that would have followed is no jump.
static void print_jump(const Run *run) {
    if (!run->before.table || run->step == 0 || run->step >= run->o.steps) return;
    const Schedule before = schedule_of(&run->before, run->schedule.rewarm);
    double last = schedule_lr(&before, run->step - 1), next = schedule_lr(&before, run->step);
    double rate = schedule_lr(&run->schedule, run->step);
    if (rate >= 0.99 * fmin(last, next) && rate <= 1.01 * fmax(last, next)) return;
    printf("          the learning rate jumps from %.4g at step %lld to %.4g at step %lld\n", last,
           (long long)run->step, rate, (long long)run->step + 1);
}

// What the flags of a resumed run change, and whether its learning rate jumps.
static void print_resume(const Run *run) {
    if (!run->o.resume) return;
    cJSON *changed = changed_flags(run);
    const cJSON *flag;
    printf("resume    at step %s, %s %s", human_grouped((uint64_t)run->step).text,
           run->resumed ? "from" : "because there is no checkpoint in",
           utf8_printed(run->resumed ? run->weights_folder : run->o.out).text);
    cJSON_ArrayForEach(flag, changed) {
        printf("%s--%s %s (was %s)", flag == changed->child ? "; now " : ", ", flag->string,
               flag_text(&run->o, flag->string).text, flag_text(&run->before, flag->string).text);
    }
    printf("\n");
    cJSON_Delete(changed);
    print_jump(run);
}

static void print_lengths(const IntList *lengths) {
    printf(", which each step cuts to ");
    for (size_t i = 0; i < lengths->count; i++) {
        if (i > 0) printf(i + 1 < lengths->count ? ", " : " or ");
        printf("%lld", (long long)lengths->values[i]);
    }
}

static void print_validations(const Run *run) {
    if (!run->val) printf("validate  never, without --val-data\n");
    else if (!run->o.val_every) printf("validate  never, because --val-every is 0\n");
    else if (run->o.val_every == 1) printf("validate  after each step\n");
    else printf("validate  every %s steps, and at the end\n", human_grouped((uint64_t)run->o.val_every).text);
}

static void print_work(const Run *run) {
    const TrainOptions *o = &run->o;
    double tokens = (double)o->steps * (double)run->step_tokens;
    print_data(run);
    printf("\nstep      %s tokens: %lld rank%s x %lld micro-batch%s of %lld x %zu",
           human_grouped((uint64_t)run->step_tokens).text, (long long)process.size, process.size == 1 ? "" : "s",
           (long long)run->micro_batches, run->micro_batches == 1 ? "" : "es", (long long)o->batch, run->T);
    if (o->seq_len.count > 1) print_lengths(&o->seq_len);
    printf("\n");
    print_update(o);
    print_lr_scale(run);
    print_resume(run);
    print_validations(run);
    printf("run       %lld step%s, %s tokens", (long long)o->steps, o->steps == 1 ? "" : "s", human_count(tokens).text);
    if (!run->train->weighted) {
        double epochs = tokens / (double)run->T / (double)shards_windows(run->train->sources[0].shards);
        if (epochs < 1000) printf(", %.2f epochs", epochs);
        else printf(", %s epochs", human_count(epochs).text);
    }
    printf("%s%s\n", o->out ? ", into " : ", nothing is saved (no --out)", o->out ? utf8_printed(o->out).text : "");
}

static double multiples(const Run *run, int64_t of) {
    return (double)(run->o.steps / of - run->step / of);
}

// The checkpoints that the run may still save: at multiples of --ckpt-every; with --keep-best at any validation; and at
// the end.
static double checkpoints_to_come(const Run *run) {
    const TrainOptions *o = &run->o;
    int64_t ckpt = o->ckpt_every, val = o->keep_best && run->val ? o->val_every : 0;
    double count = (ckpt ? multiples(run, ckpt) : 0) + (val ? multiples(run, val) : 0);
    if (ckpt && val) {
        int64_t a = ckpt, b = val;
        for (int64_t rest; (rest = a % b); b = rest) a = b;    // b becomes the greatest common divisor
        if ((double)ckpt / (double)b * (double)val <= (double)o->steps) count -= multiples(run, ckpt / b * val);
    }
    bool last = (ckpt && o->steps % ckpt == 0) || (val && o->steps % val == 0);
    return fmax(last ? count : count + 1, 1);
}

// The most checkpoints that are added to those in the folder. A new one is complete before an old one is deleted.
static double checkpoints_at_once(const Run *run) {
    double most = (double)(run->o.keep + run->o.keep_best + 1) - (double)checkpoint_count(run->o.out);
    return run->o.keep ? fmin(checkpoints_to_come(run), fmax(most, 1)) : checkpoints_to_come(run);
}

static void print_disk(const Run *run) {
    const TrainOptions *o = &run->o;
    uint64_t free_bytes;
    Error error;
    if (!o->out || !file_free_space(o->out, &free_bytes, &error)) return;
    double bytes = checkpoint_bytes(run), count = checkpoints_at_once(run), kept = bytes * count;
    printf("disk      %s per checkpoint, up to %s%s at once: %s of %s free\n", human_bytes(bytes).text,
           human_grouped((uint64_t)count).text, run->resumed ? " more" : "", human_bytes(kept).text,
           human_bytes((double)free_bytes).text);
    if (kept > (double)free_bytes)
        warn("%s: %s free, but up to %s checkpoints at once (--keep %lld, --ckpt-every %lld%s) need %s.\n"
             "  Set --keep, or a larger --ckpt-every, or another --out.",
             o->out, human_bytes((double)free_bytes).text, human_grouped((uint64_t)count).text, (long long)o->keep,
             (long long)o->ckpt_every, o->keep_best ? ", --keep-best" : "", human_bytes(kept).text);
}

void run_plan(Run *run, MemoryPlan *plan, const char *matmuls, const MemoryPlan *device, uint64_t device_free) {
    run->plan = plan;
    plan_memory(run);
    if (run_is_main()) {
        print_model(run);
        printf("%s\n", matmuls);
        print_work(run);
        memory_print(plan, device ? "host memory" : "memory", memory_available());
        if (device) memory_print(device, "device memory per GPU", device_free);
        print_disk(run);
        fflush(stdout);
        warn_of_long_warmup(run);
        warn_of_no_best(run);
        warn_of_trained_validation(run);
    }
    memory_check(plan, process.local_size);
}

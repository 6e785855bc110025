#include "run/parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run/lineage.h"
#include "runtime/error.h"
#include "runtime/json.h"

#define STEPS_MAX 1000000000000LL      // the upper bound of --steps

// ---- planning

// Parses --attn-switch STEP:NAME. Returns false without the flag.
static bool parse_switch(const Run *run, const char *text, Switch *out) {
    char message[1024];
    if (!text) return false;
    size_t digits = strspn(text, "0123456789");
    int64_t step = digits && digits <= 13 ? strtoll(text, NULL, 10) : -1;
    if (text[digits] != ':' || step < 0 || step > STEPS_MAX)
        fail(EXIT_USAGE, "--attn-switch %s: expected STEP:NAME with a step from 0 to %lld, such as 5000:ssmax.", text,
             STEPS_MAX);
    *out = (Switch){.step = step};
    if (!attention_parse(&out->to, text + digits + 1, run->config->layers, message, sizeof message))
        fail(EXIT_USAGE, "--attn-switch %.400s: %s.", text, message);
    return true;
}

static void insert_switch(Run *run, Switch added) {
    size_t at = run->switch_count++;
    run->switches = realloc(run->switches, run->switch_count * sizeof *run->switches);
    if (!run->switches) fail(EXIT_RESOURCE, "out of memory for the switches of normalizer.");
    for (; at > 0 && run->switches[at - 1].step > added.step; at--) run->switches[at] = run->switches[at - 1];
    run->switches[at] = added;
}

static bool same_switch(const Run *run, const Switch *a, const Switch *b) {
    return a->step == b->step && attention_equal(&a->to, &b->to, run->config->layers);
}

// Reads a switch from a lineage entry. Returns false if the entry is something else.
static bool read_switch(const Run *run, const cJSON *entry, Switch *to) {
    const char *event = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "event"));
    const char *attn = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "attn"));
    uint64_t step;
    char message[1024];
    if (!event || strcmp(event, "attn-switch")) return false;
    if (!attn || !json_u64(cJSON_GetObjectItemCaseSensitive(entry, "step"), &step) || step > (uint64_t)STEPS_MAX)
        fail(EXIT_INPUT, "%s/run.json: expected \"step\" and \"attn\" in each attn-switch of its lineage.", run->o.out);
    *to = (Switch){.step = (int64_t)step, .repeated = true};
    if (!attention_parse(&to->to, attn, run->config->layers, message, sizeof message))
        fail(EXIT_INPUT, "%s/run.json: the attn-switch at step %lld: %s.", run->o.out, (long long)step, message);
    return true;
}

// Has the run already made this switch?
static bool switch_made(const Run *run, const Switch *asked) {
    const cJSON *entry;
    Switch made;
    cJSON_ArrayForEach(entry, run->lineage) {
        if (read_switch(run, entry, &made) && same_switch(run, &made, asked)) return true;
    }
    return false;
}

static void warn_of_switch(const Run *run, const Switch *asked) {
    const AttentionList *before = run->switch_count ? &run->switches[run->switch_count - 1].to : &run->config->attn;
    attention_warn_of_start(before, &asked->to, run->config->layers, "--attn-switch", run->o.attn_switch);
    if (!attention_equal(before, &asked->to, run->config->layers)) return;
    warn("--attn-switch %s: %s is already the normalizer at that step; only the learning-rate warmup restarts.",
         run->o.attn_switch, before->text);
}

// Plans the switches to come: those that the run made after its checkpoint and now repeats, and --attn-switch. If the
// flag is not one of those, it replaces them from its step on.
void settle_switches(Run *run) {
    Switch asked;
    if (!parse_switch(run, run->o.attn_switch, &asked)) return;
    bool given = train_options_given(&run->o, "attn-switch");
    if (run->resumed && asked.step <= run->step && switch_made(run, &asked)) return;
    if (asked.step < run->step) {
        if (!given) return;    // the run's own earlier flag, followed by a later switch
        fail(EXIT_USAGE, "--attn-switch %s: the run is already at step %lld; choose that step or a later one.",
             run->o.attn_switch, (long long)run->step);
    }
    for (size_t i = 0; i < run->switch_count; i++)
        if (same_switch(run, &run->switches[i], &asked)) return;
    for (; run->switch_count > 0 && run->switches[run->switch_count - 1].step >= asked.step; run->switch_count--) {
        const Switch *other = &run->switches[run->switch_count - 1];
        warn("--attn-switch %s: the earlier switch to %s at step %lld will not be repeated.", run->o.attn_switch,
             other->to.text, (long long)other->step);
    }
    attention_warn_of_unused("--attn-switch", asked.to.text, run->config->layers);
    warn_of_switch(run, &asked);
    insert_switch(run, asked);
}

void repeat_switches(Run *run, cJSON *lineage, const char *made) {
    const cJSON *entry;
    Switch repeated;
    cJSON *beyond = lineage_cut(lineage, run->step, made);
    cJSON_ArrayForEach(entry, beyond) {
        if (read_switch(run, entry, &repeated)) insert_switch(run, repeated);
    }
    cJSON_Delete(beyond);
}

// ---- switching

// Is this learned scalar new in a layer, as in the layer `like`?
static bool new_scalar(const Tensor *t, const ModelConfig *config, const AttentionList *from, const Tensor *like) {
    const AttentionList *to = &config->attn;
    return tensor_exists(t, to) && !tensor_keeps(t, from, to) &&
           (t == like || (tensor_start(t, config) == tensor_start(like, config) &&
                          tensor_trained(t, to) == tensor_trained(like, to)));
}

// Lists the learned scalars that the model adds to those of `from`, neighboring layers with equal values together.
static void show_new_scalars(const ModelConfig *config, const AttentionList *from) {
    const char *where = block_shapes[config->block].attention;
    for (Scalar scalar = 0; scalar < SCALAR_COUNT; scalar++) {
        Tensor t = {.scalar = scalar, .layer = NO_LAYER};
        if (scalar_reach[scalar] == WHOLE_MODEL) {
            if (new_scalar(&t, config, from, &t))
                printf("new parameters: model.%s, %zu of %.4f\n", scalar_names[scalar], config->seq_len,
                       tensor_start(&t, config));
            continue;
        }
        for (size_t l = 0, end; l < config->layers; l = end) {
            t.layer = l;
            end = l + 1;
            if (!new_scalar(&t, config, from, &t)) continue;
            for (Tensor next = t; end < config->layers; end++) {
                next.layer = end;
                if (!new_scalar(&next, config, from, &t)) break;
            }
            printf(end > l + 1 ? "new parameters: model.layers.%zu..%zu" : "new parameters: model.layers.%zu", l,
                   end - 1);
            printf(".%s.%s, %.4f%s\n", where, scalar_names[scalar], tensor_start(&t, config),
                   tensor_trained(&t, &config->attn) ? "" : ", not trained");
        }
    }
}

bool change_at_step(const Run *run) {
    return run->switch_count && run->switches[0].step <= run->step && run->step < run->o.steps;
}

bool run_change_due(Run *run, Change *change) {
    const AttentionList now = run->config->attn;
    bool at_start = run->loaded.text[0] != 0, at_step = change_at_step(run);
    if (run->stopped || run->owed || !(at_start || at_step)) return false;
    *change = (Change){.at_start = at_start,
                       .from = at_start ? run->loaded : now,
                       .to = at_start ? now : run->switches[0].to,
                       .from_L = at_start ? run->loaded_L : run->config->seq_len,
                       .to_L = run->config->seq_len,
                       .before = NAN,
                       .after = NAN};
    run->config->attn = change->from;
    run->config->seq_len = change->from_L;
    return true;
}

void run_change_apply(Run *run, Change *change) {
    change->kept = allocate(weights_scalar_floats(run->weights.list), sizeof *change->kept, "a switch of normalizer");
    weights_keep_scalars(&run->weights, change->kept, false);
    run->config->attn = change->to;
    run->config->seq_len = change->to_L;
    weights_start_scalars(&run->weights, &change->from);
}

void run_change_undo(Run *run, Change *change) {
    weights_keep_scalars(&run->weights, change->kept, true);
    run->config->attn = change->from;
    run->config->seq_len = change->from_L;
    free(change->kept);
}

static void loss_text(char text[32], double loss) {
    snprintf(text, 32, isfinite(loss) ? "%.6f" : "not finite", loss);
}

// Adds the loss with as many digits, or null if it was not measured or is not finite.
static void add_loss(cJSON *entry, const char *name, double loss) {
    cJSON_AddNumberToObject(entry, name, round(1e6 * loss) / 1e6);
}

void run_change_finish(Run *run, Change *change) {
    char before[32], after[32];
    const AttentionList *from = &change->from, *to = &change->to;
    loss_text(before, change->before);
    loss_text(after, change->after);
    cJSON *entry = lineage_add(run->lineage, run->step, change->at_start ? "attn-at-start" : "attn-switch", "from",
                               from->text, "attn", to->text, NULL);
    add_loss(entry, "val_loss_before", change->before);
    add_loss(entry, "val_loss_after", change->after);
    if (run_is_main()) {
        progress_end(&run->progress);
        show_new_scalars(run->config, from);
        printf("step %lld: switched --attn %s to %s; ", (long long)run->step, from->text, to->text);
        if (run->val) printf("validation loss %s before, %s after\n", before, after);
        else printf("the loss before and after is not measured without --val-data\n");
    }
    free(change->kept);
    if (change->at_start) {
        run->loaded.text[0] = 0;
    } else {
        memmove(run->switches, run->switches + 1, --run->switch_count * sizeof *run->switches);
        run->schedule.rewarm = run->step;    // the learning-rate warmup restarts
    }
    write_run(run);
}

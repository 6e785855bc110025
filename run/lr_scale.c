#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run/parts.h"
#include "runtime/error.h"
#include "runtime/human.h"
#include "runtime/number.h"
#include "runtime/utf8.h"

enum { MAX_GROUPS = 64 };

// An item of --lr-scale, with the tensors for which it is the last match.
typedef struct {
    const char *pattern;
    double scale;
    bool matches;    // some tensor, even if a later pattern wins
    size_t tensors, parameters;
} RateGroup;

typedef struct {
    char *text;    // that the patterns are parts of
    RateGroup groups[MAX_GROUPS];
    size_t count;
} RateGroups;

static void add_group(RateGroups *to, char *item) {
    char *colon = strrchr(item, ':');
    double scale;
    if (!colon || colon == item || !number_read(colon + 1, strlen(colon + 1), &scale) || !(scale >= 0 && scale <= 1e6))
        fail(EXIT_USAGE,
             "--lr-scale: expected PATTERN:X with X from 0 to 1e6, found \"%s\".\n"
             "  An example: --lr-scale 'model.embed_tokens*:0.5,*attn_scale:10'.",
             item);
    if (to->count == MAX_GROUPS) fail(EXIT_USAGE, "--lr-scale: expected at most %d patterns, found more.", MAX_GROUPS);
    *colon = 0;
    to->groups[to->count++] = (RateGroup){.pattern = item, .scale = scale};
}

static RateGroups groups_parse(const char *text) {
    RateGroups groups = {.text = strdup(text)};
    char *rest = groups.text;
    if (!rest) fail(EXIT_RESOURCE, "out of memory for --lr-scale.");
    for (char *item; (item = strsep(&rest, ","));) add_group(&groups, item);
    return groups;
}

// Sets the tensor's scale to that of the last pattern that matches its name.
static void scale_tensor(Tensor *t, RateGroups *groups) {
    RateGroup *last = NULL;
    for (RateGroup *g = groups->groups; g < groups->groups + groups->count; g++) {
        if (fnmatch(g->pattern, t->name, 0) != 0) continue;
        g->matches = true;
        last = g;
    }
    if (!last) return;
    t->lr_scale = last->scale;
    last->tensors++;
    last->parameters += t->elements;
}

// Every pattern has to match some tensor.
static RateGroups scale_rates(TensorList *list, const char *text) {
    RateGroups groups = groups_parse(text);
    for (size_t i = 0; i < list->count; i++) scale_tensor(&list->tensors[i], &groups);
    for (const RateGroup *g = groups.groups; g < groups.groups + groups.count; g++)
        if (!g->matches)
            fail(EXIT_USAGE,
                 "--lr-scale: expected a pattern that matches the name of a tensor of this model, found \"%s\".\n"
                 "  The names are those in checkpoints, from %s to %s; * stands for any characters.",
                 g->pattern, list->tensors[0].name, list->tensors[list->count - 1].name);
    return groups;
}

TensorList run_tensors(const Run *run) {
    TensorList list = tensors_of(run->config, run->others, run->other_count);
    if (run->o.optimizer == OPTIMIZER_MUON) tensors_use_muon(&list);
    if (run->o.lr_scale) free(scale_rates(&list, run->o.lr_scale).text);
    return list;
}

void print_lr_scale(const Run *run) {
    if (!run->o.lr_scale) return;
    TensorList list = tensors_of(run->config, run->others, run->other_count);
    RateGroups groups = scale_rates(&list, run->o.lr_scale);
    for (const RateGroup *g = groups.groups; g < groups.groups + groups.count; g++)
        printf("  x %-6s%s: %zu tensor%s, %s parameters\n", number_text(g->scale).text, utf8_printed(g->pattern).text,
               g->tensors, g->tensors == 1 ? "" : "s", human_grouped(g->parameters).text);
    free(groups.text);
    tensors_free(&list);
}

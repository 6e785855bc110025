// --task loss and positions: the loss at each of --seq-lens.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"
#include "runtime/human.h"
#include "runtime/utf8.h"

// Reads what will be evaluated, and thus checks its tokens, before another model is evaluated.
static void check_windows(const Length *at) {
    Error error;
    int32_t *window = malloc((at->T + 1) * sizeof *window);
    if (!window) fail(EXIT_RESOURCE, "out of memory for sequences of %zu tokens.\n  Use smaller --seq-lens.", at->T);
    for (uint64_t i = 0; i < at->windows; i++)
        if (!shards_window(at->shards, i, window, NULL, &error)) fail_with(&error);
    free(window);
}

void losses_settle(Eval *e) {
    const ModelConfig *config = e->config;
    RopeAngles rope = model_rope(config, 0);
    Error error;
    size_t lengths[OPTION_LIST_MAX];
    e->count = eval_lengths(e, lengths);
    e->longest = e->work = 0;
    for (size_t i = 0; i < e->count; i++) {
        size_t T = lengths[i];
        Shards *shards = shards_open(e->o.data,
                                     (ShardsConfig){.T = T,
                                                    .vocab = config->vocab,
                                                    .end_of_text = config->end_of_text,
                                                    .pack = (PackMode)e->o.pack,
                                                    .remedy = "Add data, or reduce --seq-lens."},
                                     &error);
        if (!shards) fail_with(&error);
        uint64_t windows = shards_windows(shards), most = (uint64_t)e->o.max_tokens / T;
        if (most < 1) most = 1;
        e->lengths[i] = (Length){
            .T = T, .shards = shards, .windows = windows < most ? windows : most, .rope_theta = rope_theta(&rope, T)};
        if (!shards_check_targets(shards, e->lengths[i].windows, i == 0 && !e->checking, &error)) fail_with(&error);
        if (T > e->longest) e->longest = T;
        e->work += e->lengths[i].windows * T;
        if (e->model_count > 1) check_windows(&e->lengths[i]);
    }
    for (e->first_part = 1; e->first_part << (EVAL_PARTS - 1) < e->longest;) e->first_part *= 2;
    e->data = e->lengths[0].shards;
    e->masked = shards_masked(e->data);
}

void fit_pn(Eval *e, const float *p, float *fit, size_t count) {
    // Under windows, training has used only the first.
    size_t L = e->config->seq_len, own = attention_p_keys(&e->own, L),
           used = own ? own : attention_p_keys(&e->config->attn, L);
    double x = 0, y = 0, xx = 0, xy = 0, yy = 0;
    for (size_t n = 1; n <= used; n++) {
        x += log((double)n);
        y += (double)p[n - 1];
    }
    x /= (double)used;
    y /= (double)used;
    for (size_t n = 1; n <= used; n++) {
        double dx = log((double)n) - x, dy = (double)p[n - 1] - y;
        xx += dx * dx;
        xy += dx * dy;
        yy += dy * dy;
    }
    double a1 = xx > 0 ? xy / xx : 0, a2 = y - a1 * x, r2 = xx > 0 && yy > 0 ? xy * xy / (xx * yy) : NAN;
    for (size_t n = 1; n <= count; n++) fit[n - 1] = (float)(a1 * log((double)n) + a2);
    printf("p_n = %.6g ln(n) + %.6g for all n, fitted to n = 1..%zu, R^2 = ", a1, a2, used);
    printf(isnan(r2) ? "undefined (p_n is constant)\n" : "%.6f\n", r2);
    e->pn_fit = cJSON_CreateObject();
    cJSON_AddNumberToObject(e->pn_fit, "a1", a1);
    cJSON_AddNumberToObject(e->pn_fit, "a2", a2);
    cJSON_AddNumberToObject(e->pn_fit, "r2", r2);
}

void losses_begin(Eval *e) {
    printf("%8s %12s %10s %15s %9s %11s%s%s\n", "length", "sequences", "theta", "tokens", "loss", "perplexity",
           e->after ? "    change" : "", e->masked ? "  per sequence" : "");
}

// Returns the mean loss over the positions from <= t < to, or NAN if no target there counts.
static double mean_loss(const double *sums, const uint64_t *counts, size_t from, size_t to, uint64_t *count) {
    double sum = 0;
    *count = 0;
    for (size_t t = from; t < to; t++) {
        sum += sums[t];
        *count += counts[t];
    }
    return *count && isfinite(sum) ? sum / (double)*count : NAN;
}

static void add_row(Eval *e, const Length *at, const double *sums, const uint64_t *counts, uint64_t count,
                    double all_zero) {
    cJSON *row = eval_row(e), *positions;
    double loss = at->loss[e->after];
    uint64_t here;
    cJSON_AddNumberToObject(row, "seq_len", (double)at->T);
    cJSON_AddNumberToObject(row, "rope_theta", at->rope_theta);
    cJSON_AddNumberToObject(row, "sequences", (double)at->windows);
    cJSON_AddNumberToObject(row, "tokens", (double)count);
    cJSON_AddNumberToObject(row, "loss", loss);
    cJSON_AddNumberToObject(row, "perplexity", exp(loss));
    if (e->masked) cJSON_AddNumberToObject(row, "loss_per_sequence", loss * (double)count / (double)at->windows);
    cJSON_AddNumberToObject(row, "all_zero_rows", all_zero);
    if (e->o.task != TASK_POSITIONS) return;
    positions = cJSON_AddArrayToObject(row, "loss_by_position");
    for (size_t t = 0; t < at->T; t++)
        cJSON_AddItemToArray(positions, cJSON_CreateNumber(mean_loss(sums, counts, t, t + 1, &here)));
}

void losses_add(Eval *e, size_t i, const double *sums, const uint64_t *counts, double all_zero) {
    Length *at = &e->lengths[i];
    uint64_t count, in_part;
    double loss = at->loss[e->after] = mean_loss(sums, counts, 0, at->T, &count);
    for (size_t p = 0, from = 0; p < EVAL_PARTS && from < at->T; p++) {
        size_t end = e->first_part << p, to = end < at->T ? end : at->T;
        at->part[p] = mean_loss(sums, counts, from, to, &in_part);
        from = to;
    }
    printf("%8zu %12s %10s %15s %9.4f %11.6g", at->T, human_grouped(at->windows).text, human_count(at->rope_theta).text,
           human_grouped(count).text, shown(loss), shown(exp(loss)));
    if (e->after) printf(" %+9.4f", shown(loss - at->loss[0]));
    if (e->masked) printf(" %13.4f", shown(loss * (double)count / (double)at->windows));
    if (all_zero > 0) printf("   %.2g%% all-zero rows", 100 * all_zero);
    printf("\n");
    fflush(stdout);
    add_row(e, at, sums, counts, count, all_zero);
    eval_count(e, isfinite(loss), at->T);
    e->tokens += at->windows * at->T;
}

// A table with a row for each range of positions and a column for each length.
static void print_positions(const Eval *e) {
    printf("\nloss by position\n%17s", "");
    for (size_t i = 0; i < e->count; i++) printf(" %9zu", e->lengths[i].T);
    for (size_t p = 0, from = 0; from < e->longest; p++) {
        char range[64];
        size_t to = e->first_part << p;
        snprintf(range, sizeof range, "%zu-%zu", from + 1, to < e->longest ? to : e->longest);
        printf("\n%17s", range);
        for (size_t i = 0; i < e->count; i++) {
            if (from < e->lengths[i].T) printf(" %9.4f", shown(e->lengths[i].part[p]));
            else printf(" %9s", "");
        }
        from = to;
    }
    printf("\n");
}

void losses_end(Eval *e) {
    if (e->o.task == TASK_POSITIONS) print_positions(e);
}

static const char *text_of(const cJSON *row, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(row, key)->valuestring;
}

static double number_of(const cJSON *row, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(row, key)->valuedouble;
}

// Do both have the same model and normalizer?
static bool same_row(const cJSON *a, const cJSON *b) {
    return a && b && !strcmp(text_of(a, "model"), text_of(b, "model")) &&
           !strcmp(text_of(a, "attn"), text_of(b, "attn"));
}

// The lengths of all results, in ascending order. Returns how many there are.
static size_t all_lengths(const Eval *e, size_t *lengths) {
    size_t count = 0;
    const cJSON *row;
    cJSON_ArrayForEach(row, e->results) {
        size_t T = (size_t)number_of(row, "seq_len"), at = 0;
        while (at < count && lengths[at] < T) at++;
        if (at < count && lengths[at] == T) continue;
        memmove(lengths + at + 1, lengths + at, (count++ - at) * sizeof *lengths);
        lengths[at] = T;
    }
    return count;
}

static int width_of(const cJSON *row, const char *key) {
    return (int)eval_characters(utf8_printed(text_of(row, key)).text);
}

static void print_compared(const cJSON *first, const size_t *lengths, size_t count, int models, int normalizers) {
    printf("\n%s%*s", utf8_printed(text_of(first, "model")).text, models - width_of(first, "model"), "");
    printf("  %-*s", normalizers, text_of(first, "attn"));
    for (size_t i = 0; i < count; i++) {
        const cJSON *row = first;
        while (same_row(first, row) && (size_t)number_of(row, "seq_len") != lengths[i]) row = row->next;
        if (same_row(first, row)) printf(" %9.4f", shown(number_of(row, "loss")));
        else if (i + 1 < count) printf(" %9s", "");
    }
}

void losses_compare(const Eval *e) {
    int rows = 0, models = 5, normalizers = 4;    // the widths of "model" and "attn"
    const cJSON *row, *before = NULL;
    cJSON_ArrayForEach(row, e->results) {
        if (width_of(row, "model") > models) models = width_of(row, "model");
        if (width_of(row, "attn") > normalizers) normalizers = width_of(row, "attn");
        rows += !same_row(before, row);
        before = row;
    }
    size_t *lengths = allocate((size_t)cJSON_GetArraySize(e->results), sizeof *lengths, "the table of all losses");
    size_t count = all_lengths(e, lengths);
    if (rows > 1) {
        printf("\nloss by length\n%-*s  %-*s", models, "model", normalizers, "attn");
        for (size_t i = 0; i < count; i++) printf(" %9zu", lengths[i]);
        before = NULL;
        cJSON_ArrayForEach(row, e->results) {
            if (!same_row(before, row)) print_compared(row, lengths, count, models, normalizers);
            before = row;
        }
        printf("\n");
    }
    free(lengths);
}

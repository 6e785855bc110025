#include "eval/observe.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "math/random.h"
#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/size.h"

// ---- prompts

static void add_prompt(Observer *o, int32_t *ids, size_t count) {
    o->prompts = realloc(o->prompts, (o->prompt_count + 1) * sizeof *o->prompts);
    if (!o->prompts) fail(EXIT_RESOURCE, "out of memory for the prompts.");
    o->prompts[o->prompt_count++] = (ObservePrompt){ids, count};
    size_t longest = count + (o->shards ? 0 : 1);    // with end-of-text, see observe_next()
    if (longest > o->longest) o->longest = longest;
}

static void read_prompt_file(Observer *o) {
    const Eval *e = o->e;
    Error error;
    size_t size, line = 1;
    char where[PATH_MAX + 32], *text = file_read_stream(e->o.prompt_file, 64 << 20, &size, &error);
    if (!text) fail_with(&error);
    for (char *at = text; at < text + size; line++) {
        char *end = memchr(at, '\n', (size_t)(text + size - at)), *next = end ? end + 1 : text + size;
        if (!end) end = text + size;
        if (end > at && end[-1] == '\r') end--;
        if (at + strspn(at, " \t") >= end) end = at;    // nothing but blanks
        size_t length = (size_t)(end - at), room = tokenizer_capacity(length);
        int32_t *ids = allocate(room, sizeof *ids, "the prompts");
        size_t count = tokenizer_encode(e->tokenizer, at, length, ids, room);
        snprintf(where, sizeof where, "%s: line %zu", e->o.prompt_file, line);
        if (!tokenizer_fits(e->tokenizer, ids, count, e->config->vocab, where, &error)) fail_with(&error);
        if (count == 1)
            fail(EXIT_INPUT,
                 "%s: line %zu: a prompt of a single token; expected at least two.\n"
                 "  Make the line longer, or remove it.",
                 e->o.prompt_file, line);
        if (count) add_prompt(o, ids, count);
        else free(ids);
        at = next;
    }
    free(text);
    if (!o->prompt_count) fail(EXIT_INPUT, "%s: expected one prompt per line, found none.", e->o.prompt_file);
}

// --samples different sequences of --data at random places, or all if it has fewer. An end-of-text token at the start
// is dropped, since each prompt is measured with and without one. One that starts with two, between documents that also
// end with one, would have a token too few without them: another is drawn.
static void read_data(Observer *o) {
    Eval *e = o->e;
    Error error;
    size_t T = eval_length(e, 3);
    int32_t end_of_text = e->config->end_of_text;
    ShardsConfig config = {.T = T, .vocab = e->config->vocab, .end_of_text = end_of_text};
    config.remedy = "Add data, or reduce --seq-lens.";
    if (!(o->shards = e->data = shards_open(e->o.data, config, &error))) fail_with(&error);
    uint64_t windows = shards_windows(e->data), drawn_count = 0, *drawn = NULL;
    for (uint64_t i = 0; o->prompt_count < (uint64_t)e->o.samples && drawn_count < windows; i++) {
        uint64_t window = random_u64((uint64_t)e->o.seed, i, 0) % windows;
        bool again = false;
        for (uint64_t j = 0; j < drawn_count; j++) again |= drawn[j] == window;
        if (again) continue;
        drawn = realloc(drawn, (drawn_count + 1) * sizeof *drawn);
        if (!drawn) fail(EXIT_RESOURCE, "out of memory for the prompts.");
        drawn[drawn_count++] = window;
        int32_t *ids = allocate(T + 1, sizeof *ids, "the prompts");
        if (!shards_window(e->data, window, ids, NULL, &error)) fail_with(&error);
        if (ids[0] == end_of_text) memmove(ids, ids + 1, T * sizeof *ids);
        if (ids[0] != end_of_text) add_prompt(o, ids, T);
        else free(ids);
    }
    free(drawn);
    if (!o->prompt_count)
        fail(EXIT_INPUT, "%s: every sequence of %zu tokens begins with two end-of-text tokens.\n  Use other data.",
             e->o.data, T);
}

void observe_settle(Observer *o, Eval *e) {
    *o = (Observer){.e = e, .layers = e->config->layers, .heads = e->config->heads};
    if (e->o.prompt_file) read_prompt_file(o);
    else read_data(o);
    if (o->longest > MAX_SEQ_LEN)
        fail(EXIT_USAGE, "a prompt of %zu tokens; at most %d are supported.", o->longest, MAX_SEQ_LEN);
    e->longest = o->longest;
    e->work = 0;
    for (size_t i = 0; i < o->prompt_count; i++) e->work += 2 * o->prompts[i].count + (o->shards ? 0 : 1);
    o->stats = allocate(o->layers * o->heads, sizeof *o->stats, "the prompts");
    o->residual = allocate(o->layers, sizeof *o->residual, "the prompts");
    o->by_layer = allocate(2 * o->layers, sizeof *o->by_layer, "the prompts");
    o->sums = allocate(4 * o->prompt_count, sizeof *o->sums, "the prompts");
    o->losses = o->sums + 2 * o->prompt_count;
    size_t T = o->prompts[0].count;
    o->cell = (T + MAX_MAP - 1) / MAX_MAP;
    o->side = (T + o->cell - 1) / o->cell;
    if (e->o.out) o->map = allocate(o->heads * o->side * o->side, sizeof *o->map, "the prompts");
}

void observe_close(Observer *o) {
    for (size_t i = 0; i < o->prompt_count; i++) free(o->prompts[i].ids);
    free(o->prompts);
    free(o->stats);
    free(o->residual);
    free(o->by_layer);
    free(o->sums);
    free(o->map);
    if (o->shards) shards_close(o->shards);
}

// ---- the maps of the first prompt, without end-of-text: OUT/map-N.npy, float32 (layers, heads, side, side)

static bool maps_wanted(const Observer *o) {
    return o->map && o->at == 0 && !o->with_end_of_text;
}

// NumPy's format 1.0: magic, version, the header's length, and a Python dict padded to a multiple of 64 bytes.
static void begin_maps(Observer *o) {
    char header[128], dict[118];
    snprintf(o->map_name, sizeof o->map_name, "map-%d.npy", cJSON_GetArraySize(o->e->results));
    o->map_file = eval_file(o->e, o->map_name);
    snprintf(dict, sizeof dict, "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %zu, %zu, %zu), }", o->layers,
             o->heads, o->side, o->side);
    memset(header, ' ', sizeof header);
    memcpy(header, "\x93NUMPY\x01\x00\x76\x00", 10);
    memcpy(header + 10, dict, strlen(dict));
    header[sizeof header - 1] = '\n';
    eval_file_write(o->map_file, header, sizeof header);
}

// Divides each cell by its number of visible weights.
static void write_map(Observer *o, size_t layer, size_t T) {
    const LayerAttention *attention = attention_of(o->e->config, layer);
    size_t cells = o->side * o->side;
    for (size_t i = 0; i < o->heads * cells; i++) {
        size_t row = ((i % cells) / o->side) * o->cell, column = (i % o->side) * o->cell, visible = 0;
        for (size_t r = row; r < row + o->cell && r < T; r++) {
            size_t end = smaller(column + o->cell, r + 1),
                   first = larger(column, r + 1 - attention_keys(attention, r + 1));
            if (end > first) visible += end - first;
        }
        if (visible) o->map[i] /= (float)visible;
    }
    size_t count = o->heads * cells;
    eval_file_write(o->map_file, o->map, count * sizeof *o->map);
    memset(o->map, 0, count * sizeof *o->map);
}

static void add_to_map(Observer *o, size_t head, const float *A, size_t i) {
    float *row = o->map + (head * o->side + i / o->cell) * o->side;
    for (size_t j = 0; j <= i; j++) row[j / o->cell] += A[j];
}

// ---- statistics

static size_t bin_of(size_t n) {
    size_t bin = 0;
    while (n >>= 1) bin++;
    return bin;
}

// The larger of two; NaN if one is NaN, which fmax() would drop.
static double nan_or_larger(double a, double b) {
    return isnan(a) || a > b ? a : b;
}

// A: the weights of position i, which sees the keys from `first` on
static void add_row(HeadStats *s, const float *A, float log_Z, size_t first, size_t i) {
    size_t n = i + 1 - first;
    double sum = 0, absolute = 0, entropy = 0, zeros = 0;
    for (size_t j = first; j <= i; j++) {
        double a = fabs((double)A[j]);
        sum += A[j];
        absolute += a;
        zeros += a == 0;
        if (a > 0) entropy -= a * log(a);
    }
    if (isnan(absolute)) zeros = NAN;
    s->rows++;
    s->weights += (double)n;
    s->sum += sum;
    s->zeros += zeros;
    if (absolute != 0) {                                                   // also a NaN, which the sums keep
        entropy = nan_or_larger(entropy / absolute + log(absolute), 0);    // of p = a/absolute; rounding may pass 0
        s->entropy += entropy;
        s->entropy_by_n[bin_of(n)] += entropy;
        if (i > 0) s->first += fabs((double)A[0]) / absolute;
        for (size_t bin = 0, end = i + 1; end > 0; bin++) {
            size_t beyond = (size_t)2 << bin, begin = i + 1 > beyond ? i + 1 - beyond : 0;
            double weight = 0;
            for (size_t j = begin; j < end; j++) weight += fabs((double)A[j]);
            s->weight_by_distance[bin] += weight / absolute;
            end = begin;
        }
    }
    s->rows_by_n[bin_of(n)]++;
    if (isinf(log_Z)) return;
    double x = log((double)n), y = isnan(absolute) ? (double)NAN : log_Z;
    s->log_z_by_n[bin_of(n)] += y;
    s->fitted_by_n[bin_of(n)]++;
    if (n == 1) return;
    s->fitted++;
    s->x += x;
    s->y += y;
    s->xx += x * x;
    s->xy += x * y;
}

void observe_head(Observer *o, float *weights, AttentionInput in, Scalars scalars, AttentionShape shape,
                  AttentionRows at, size_t layer) {
    HeadStats *s = &o->stats[layer * o->heads + at.h];
    size_t T = shape.T;
    float log_Z[OBSERVED_ROWS];
    for (at.from = 0; at.from < T; at.from += OBSERVED_ROWS) {
        at.rows = smaller(T - at.from, OBSERVED_ROWS);
        attention_weights(weights, T, log_Z, in, scalars, shape, at);
        for (size_t r = 0; r < at.rows; r++) {
            add_row(s, weights + r * T, log_Z[r], in.first ? (size_t)in.first[at.from + r] : 0, at.from + r);
            if (maps_wanted(o)) add_to_map(o, at.h, weights + r * T, at.from + r);
        }
    }
}

void observe_layer(Observer *o, size_t layer, const float *x, size_t T, size_t C) {
    double sum = 0, second = 0, fourth = 0, largest = 0;
    size_t N = T * C;
    for (size_t i = 0; i < N; i++) sum += x[i];
    double mean = sum / (double)N;
    for (size_t i = 0; i < N; i++) {
        double d = (x[i] - mean) * (x[i] - mean);
        second += d;
        fourth += d * d;
        largest = nan_or_larger(largest, fabs((double)x[i]));
    }
    o->residual[layer] = (ResidualStats){fourth * (double)N / (second * second), largest};
    if (maps_wanted(o)) write_map(o, layer, T);
}

// ---- results

// The slope of the line, or NAN.
static double slope_of(const HeadStats *s, double *intercept) {
    double n = s->fitted, spread = s->xx - s->x * s->x / n;
    double slope = spread > 1e-9 * s->xx ? (s->xy - s->x * s->y / n) / spread : NAN;    // NAN: all rows have the same n
    *intercept = s->y / n - slope * s->x / n;
    return slope;
}

static cJSON *head_json(const HeadStats *s, size_t T) {
    cJSON *head = cJSON_CreateObject(), *by_n, *log_z, *by_distance;
    double intercept, slope = slope_of(s, &intercept);
    cJSON_AddNumberToObject(head, "sum", s->sum / s->rows);
    cJSON_AddNumberToObject(head, "unspent", 1 - s->sum / s->rows);
    cJSON_AddNumberToObject(head, "entropy", s->entropy / s->rows);
    cJSON_AddNumberToObject(head, "first_token", s->rows > 1 ? s->first / (s->rows - 1) : NAN);
    cJSON_AddNumberToObject(head, "zeros", s->zeros / s->weights);
    cJSON_AddNumberToObject(head, "log_z_slope", slope);
    cJSON_AddNumberToObject(head, "log_z_intercept", intercept);
    by_n = cJSON_AddArrayToObject(head, "entropy_by_n");
    log_z = cJSON_AddArrayToObject(head, "log_z_by_n");
    by_distance = cJSON_AddArrayToObject(head, "weight_by_distance");
    for (size_t b = 0; b < OBSERVE_BINS && (size_t)1 << b <= T; b++) {
        cJSON_AddItemToArray(by_n, cJSON_CreateNumber(s->entropy_by_n[b] / s->rows_by_n[b]));
        cJSON_AddItemToArray(log_z, cJSON_CreateNumber(s->log_z_by_n[b] / s->fitted_by_n[b]));
        cJSON_AddItemToArray(by_distance, cJSON_CreateNumber(s->weight_by_distance[b] / s->rows));
    }
    return head;
}

// The texts of the prompt's tokens, which the page of maps shows, if the folder has a tokenizer.
static void add_texts(const Observer *o, cJSON *row) {
    const ObservePrompt *p = &o->prompts[o->at];
    char text[256];
    if (!o->e->tokenizer) return;
    cJSON *texts = cJSON_AddArrayToObject(row, "token_texts");
    for (size_t i = 0; i < p->count; i++) {
        tokenizer_text(o->e->tokenizer, p->ids[i], text, sizeof text);
        cJSON_AddItemToArray(texts, cJSON_CreateString(text));
    }
}

static void write_row(Observer *o, size_t T, double loss) {
    cJSON *row = eval_row(o->e), *layers;
    cJSON_AddNumberToObject(row, "prompt", (double)o->at);
    cJSON_AddBoolToObject(row, "leading_end_of_text", o->with_end_of_text);
    cJSON_AddNumberToObject(row, "tokens", (double)T);
    cJSON_AddNumberToObject(row, "loss", loss);
    cJSON_AddNumberToObject(row, "perplexity", exp(loss));
    if (o->map_file) cJSON_AddStringToObject(row, "map", o->map_name);
    if (o->map_file) cJSON_AddNumberToObject(row, "map_cell", (double)o->cell);
    if (o->map_file) add_texts(o, row);
    layers = cJSON_AddArrayToObject(row, "layers");
    for (size_t l = 0; l < o->layers; l++) {
        cJSON *layer = cJSON_CreateObject(), *heads;
        cJSON_AddNumberToObject(layer, "residual_kurtosis", o->residual[l].kurtosis);
        cJSON_AddNumberToObject(layer, "residual_largest", o->residual[l].largest);
        heads = cJSON_AddArrayToObject(layer, "heads");
        for (size_t h = 0; h < o->heads; h++) cJSON_AddItemToArray(heads, head_json(&o->stats[l * o->heads + h], T));
        cJSON_AddItemToArray(layers, layer);
    }
}

// ---- tables

static const char COLUMNS[] = "      sum   1 - sum   entropy     first     zeros     slope   kurtosis   max |x|";

static void print_means(const ObserveMeans *m) {
    printf(" %9.5f %9.5f %9.4f %9.5f %9.5f %9.4f %10.4g %9.4g\n", shown(m->sum), rounded(1 - m->sum, 1e5),
           shown(m->entropy), shown(m->first), shown(m->zeros),
           m->slopes > 0 ? rounded(m->slope / m->slopes, 1e4) : NAN, shown(m->kurtosis), shown(m->largest));
}

static void add_head(ObserveMeans *m, const HeadStats *s, double share) {
    double intercept, slope = slope_of(s, &intercept);
    m->sum += s->sum / s->rows * share;
    m->entropy += s->entropy / s->rows * share;
    m->first += s->first / (s->rows - 1) * share;
    m->zeros += s->zeros / s->weights * share;
    if (isnan(slope)) return;
    m->slope += slope;
    m->slopes++;
}

static void add_to_all(HeadStats *all, const HeadStats *s) {
    all->rows += s->rows;
    for (size_t b = 0; b < OBSERVE_BINS; b++) {
        all->entropy_by_n[b] += s->entropy_by_n[b];
        all->rows_by_n[b] += s->rows_by_n[b];
        all->weight_by_distance[b] += s->weight_by_distance[b];
    }
}

// Adds a prompt to the means of each layer. Returns its means over all layers, of whose kurtosis the greatest.
static ObserveMeans add_prompt_means(Observer *o) {
    ObserveMeans prompt = {0}, *layers = o->by_layer + (o->with_end_of_text ? o->layers : 0);
    double heads = (double)o->heads, prompts = (double)o->prompt_count;
    for (size_t l = 0; l < o->layers; l++) {
        const ResidualStats *x = &o->residual[l];
        for (size_t h = 0; h < o->heads; h++) {
            const HeadStats *s = &o->stats[l * o->heads + h];
            add_head(&prompt, s, 1 / (heads * (double)o->layers));
            add_head(&layers[l], s, 1 / (heads * prompts));
            add_to_all(&o->all[o->with_end_of_text], s);
        }
        layers[l].kurtosis += x->kurtosis / prompts;
        layers[l].largest = nan_or_larger(layers[l].largest, x->largest);
        prompt.kurtosis = nan_or_larger(prompt.kurtosis, x->kurtosis);
        prompt.largest = nan_or_larger(prompt.largest, x->largest);
    }
    return prompt;
}

// A range of integers, of which none is above `most`.
static void print_range(size_t from, size_t to, size_t most) {
    char text[48] = "";
    if (to > most) to = most;
    if (from < to) snprintf(text, sizeof text, "%zu-%zu", from, to);
    if (from == to) snprintf(text, sizeof text, "%zu", from);
    printf(" %15s", text);
}

// The means over all prompts by layer, the entropy by n, and the weight by distance.
static void print_all(const Observer *o, bool with) {
    const HeadStats *all = &o->all[with];
    size_t longest = o->longest - (with || o->shards ? 0 : 1);
    printf("\nmeans over %zu prompt%s %s a leading end-of-text token\n%6s %s\n", o->prompt_count,
           o->prompt_count == 1 ? "" : "s", with ? "with" : "without", "layer", COLUMNS);
    for (size_t l = 0; l < o->layers; l++) {
        printf("%6zu", l);
        print_means(&o->by_layer[l + (with ? o->layers : 0)]);
    }
    printf("%16s %9s %15s %9s\n", "n", "entropy", "distance", "weight");
    for (size_t b = 0; b < OBSERVE_BINS && all->rows_by_n[b] > 0; b++) {
        size_t from = (size_t)1 << b, to = 2 * from - 1;
        print_range(from, to, longest);
        printf(" %9.4f", shown(all->entropy_by_n[b] / all->rows_by_n[b]));
        if (from < longest || b == 0) {    // the largest distance is longest - 1
            print_range(b ? from : 0, to, longest - 1);
            printf(" %9.5f", shown(all->weight_by_distance[b] / all->rows));
        }
        printf("\n");
    }
}

void observe_begin(Observer *o) {
    o->at = 0;
    o->with_end_of_text = false;
    memset(o->by_layer, 0, 2 * o->layers * sizeof *o->by_layer);
    memset(o->all, 0, sizeof o->all);
    printf("%7s %4s %8s %11s %s\n", "prompt", "EOT", "tokens", "perplexity", COLUMNS);
}

bool observe_next(Observer *o, int32_t *ids, size_t *count) {
    if (o->at == o->prompt_count) return false;
    const ObservePrompt *p = &o->prompts[o->at];
    size_t before = o->with_end_of_text ? 1 : 0, tokens = p->count - (o->shards ? before : 0);
    ids[0] = o->e->config->end_of_text;
    memcpy(ids + before, p->ids, tokens * sizeof *ids);
    *count = tokens + before;
    bar_next(&o->e->bar, *count);
    memset(o->stats, 0, o->layers * o->heads * sizeof *o->stats);
    if (maps_wanted(o)) begin_maps(o);
    return true;
}

void observe_done(Observer *o, size_t T, const float *losses) {
    Error error;
    double loss = 0;
    size_t from = o->with_end_of_text ? 1 : 0;
    for (size_t t = from; t + 1 < T; t++) loss += losses[t] / (double)(T - 1 - from);
    ObserveMeans means = add_prompt_means(o);
    bar_clear(&o->e->bar);
    printf("%7zu %4s %8zu %11.6g", o->at + 1, o->with_end_of_text ? "yes" : "no", T, shown(exp(loss)));
    print_means(&means);
    fflush(stdout);
    write_row(o, T, loss);
    if (o->map_file && !file_close(o->map_file, &error)) fail_with(&error);
    o->map_file = NULL;
    // Sums that differ only by rounding are equal.
    o->sums[(o->with_end_of_text ? o->prompt_count : 0) + o->at] = round(means.sum * 1e5);
    o->losses[(o->with_end_of_text ? o->prompt_count : 0) + o->at] = loss;
    o->e->tokens += T;
    eval_count(o->e, isfinite(loss) && isfinite(means.sum) && isfinite(means.largest), o->at + 1);
    if (o->with_end_of_text) o->at++;
    o->with_end_of_text = !o->with_end_of_text;
}

// ---- Spearman's rank correlation of the sums with the perplexities

// The rank of x[i], from 1; equal values share the mean of their ranks.
static double rank_of(const double *x, size_t count, size_t i) {
    double below = 0, equal = 0;
    for (size_t j = 0; j < count; j++) {
        below += x[j] < x[i];
        equal += x[j] == x[i];
    }
    return below + (equal + 1) / 2;
}

// NAN and the reason if there is none.
static double spearman(const double *sums, const double *losses, size_t count, const char **reason) {
    double mean = ((double)count + 1) / 2, ab = 0, aa = 0, bb = 0;
    bool finite = true;
    for (size_t i = 0; i < count; i++) {
        double x = rank_of(sums, count, i) - mean, y = rank_of(losses, count, i) - mean;
        finite = finite && isfinite(sums[i]) && isfinite(losses[i]);
        ab += x * y;
        aa += x * x;
        bb += y * y;
    }
    if (!finite) *reason = "not all are finite";
    else if (!(aa > 0)) *reason = "all sums are equal";
    else if (!(bb > 0)) *reason = "all perplexities are equal";
    else return ab / sqrt(aa * bb);
    return NAN;
}

void observe_end(Observer *o) {
    bar_end(&o->e->bar);
    for (int with = 0; with < 2; with++) print_all(o, with);
    if (o->prompt_count < 3) return;
    printf("\n");
    for (int with = 0; with < 2; with++) {
        size_t from = with ? o->prompt_count : 0;
        const char *reason = NULL;
        double r = spearman(o->sums + from, o->losses + from, o->prompt_count, &reason);
        cJSON *row = eval_row(o->e);
        cJSON_AddBoolToObject(row, "leading_end_of_text", with);
        cJSON_AddNumberToObject(row, "prompts", (double)o->prompt_count);
        cJSON_AddNumberToObject(row, "spearman_sum_perplexity", r);
        printf("Spearman correlation of the sum with perplexity, %s end-of-text: ", with ? "with" : "without");
        if (reason) printf("undefined (%s)\n", reason);
        else printf("%+.3f\n", r);
    }
}

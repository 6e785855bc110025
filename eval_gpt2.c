// Evaluates a checkpoint: its loss at any sequence lengths, also by position, under its own normalizer and immediately
// after a switch to another one. The model is the trainer's (train_gpt2.c). This file adds the lengths, RoPE beyond the
// training length, p_n, and eval.json.
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"    // only some of the trainer's functions are used here
#include "train_gpt2.c"

#include <errno.h>
#include <limits.h>

#include "run/checkpoint.h"
#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/json.h"
#include "run/folder.h"
#include "runtime/shards.h"
#include "runtime/start.h"
#pragma GCC diagnostic pop

typedef enum { TASK_LOSS, TASK_POSITIONS } Task;
typedef enum { PN_AS_LEARNED, PN_LOG } PnExtrapolation;
typedef enum { ROPE_AS_TRAINED, ROPE_NTK } RopeScaling;

enum {
    ROWS = 1024,    // the fewest tokens per forward pass: short sequences are batched
    // Ranges of positions in the table. Each, except the first, is as long as all ranges before it.
    PARTS = 9
};

typedef struct {
    const char *model, *data, *attn, *ignore_config_key, *out;
    int64_t max_tokens, seed, threads;
    IntList seq_lens;
    double rope_theta;
    int rope_scaling, pn_extrapolate, task;
    bool doc_mask;
} EvalOptions;

// One of --seq-lens. The losses are in nats per token that counts, under the checkpoint's normalizer [0] and the given
// one [1].
typedef struct {
    size_t T;
    Shards *shards;
    uint64_t windows;
    double rope_theta, loss[2], part[PARTS];
} Length;

typedef struct {
    EvalOptions o;
    char *arguments;          // all flags as JSON
    char folder[PATH_MAX];    // of the checkpoint
    Model model;
    Normalizer own, given;    // the checkpoint's normalizer, and that of --attn (the same without the flag)
    bool switches;            // do they differ?
    Length lengths[OPTION_LIST_MAX];
    size_t count, longest, first_part;    // number of lengths; the longest; the end of the first range of positions
    int32_t *window, *inputs, *targets;
    uint8_t *mask;       // NULL if every token counts
    double *sums;        // (longest) the summed losses at each position
    uint64_t *counts;    // (longest) the number of targets at each position that count
    float *fit;          // (longest) the fitted p_n
    uint64_t tokens;     // evaluated so far
    cJSON *results, *lineage, *pn_fit;
} Evaluator;

// ---- flags, model and lengths

static void parse_flags(Evaluator *e, int argc, char **argv) {
    EvalOptions *o = &e->o;
    *o = (EvalOptions){.max_tokens = 1 << 20, .seed = 1337, .seq_lens = {.values = {0}, .count = 1}};
    Option table[] = {
        {"model", OPT_TEXT, &o->model, .arg = "DIR", .group = "Model",
         .help = "folder of a checkpoint, of a run (uses its newest checkpoint), or of a Hugging Face Llama model"},
        {"attn", OPT_TEXT, &o->attn, .arg = "NAME", .group = "Model",
         .help = "also evaluate under another normalizer, without training; `--attn help` lists them"},
        {"ignore-config-key", OPT_TEXT, &o->ignore_config_key, .arg = "NAME[,...]", .group = "Model",
         .help = "unknown keys in config.json to ignore"},
        {"pn-extrapolate", OPT_CHOICE, &o->pn_extrapolate, .choices = "none|log", .group = "Model",
         .help = "log: replace the learned p_n, for all n, by the fit p_n = a1 ln(n) + a2"},
        {"rope-theta", OPT_FLOAT, &o->rope_theta, 0, 1e12, .arg = "X", .group = "Model",
         .help = "base of RoPE's wavelengths; 0: the checkpoint's"},
        {"rope-scaling", OPT_CHOICE, &o->rope_scaling, .choices = "none|ntk", .group = "Model",
         .help = "ntk: for lengths T above the training length L, theta (T/L)^(d/(d-2))"},
        {"data", OPT_TEXT, &o->data, .arg = "GLOB", .group = "Data",
         .help = "shards to evaluate on, for example 'data/shakespeare/*_val_*.bin'"},
        {"doc-mask", OPT_SWITCH, &o->doc_mask, .group = "Data",
         .help = "attention stops at document boundaries, as in training with --doc-mask"},
        {"seq-lens", OPT_INT_LIST, &o->seq_lens, 0, MAX_SEQ_LEN, .arg = "T[,T...]", .group = "Data",
         .help = "tokens per sequence; each length is evaluated in turn; 0: the checkpoint's L"},
        {"max-tokens", OPT_INT, &o->max_tokens, 1, 1e12, .arg = "N", .group = "Data",
         .help = "maximum number of tokens per length, in whole sequences, at least one"},
        {"task", OPT_CHOICE, &o->task, .choices = "loss|positions", .group = "Evaluation",
         .help = "loss: the mean loss; positions: also the loss by position"},
        {"seed", OPT_INT, &o->seed, 0, 9007199254740992.0, .arg = "N", .group = "Evaluation",
         .help = "only recorded in eval.json; these tasks use no random numbers"},
        {"out", OPT_TEXT, &o->out, .arg = "DIR", .group = "Evaluation",
         .help = "folder for eval.json; without it, the results are only printed"},
        {"threads", OPT_INT, &o->threads, 0, MAX_THREADS, .arg = "N", .group = "Machine", .help = THREADS_HELP},
    };
    options_parse(
        table, sizeof table / sizeof *table, argc, argv,
        "Usage: eval_gpt2 --model DIR --data GLOB [flags]\n\nEvaluates a checkpoint's loss at several lengths, under its own normalizer and right after a switch to another.");
    if (o->attn && normalizer_help(o->attn)) exit(EXIT_DONE);
    if (!o->model) fail(EXIT_USAGE, "--model is missing: name the folder of a checkpoint or a run.");
    if (!o->data) fail(EXIT_USAGE, "--data is missing: name the shards to evaluate on.");
    if (o->rope_theta != 0 && !(o->rope_theta > 1))
        fail(EXIT_USAGE, "--rope-theta %g: expected a number above 1, or 0 for the checkpoint's own.", o->rope_theta);
    e->arguments = options_json(table, sizeof table / sizeof *table);
}

static bool settle_model(Evaluator *e, Error *error) {
    ModelConfig *config = &e->model.config;
    char message[1024];
    if (!checkpoint_find(e->o.model, e->folder, sizeof e->folder, error)) fail_with(error);
    if (!model_config_read(config, e->folder, e->o.ignore_config_key, error)) return false;
    if (!checkpoint_verify(e->folder, true, error)) return false;
    e->own = e->given = config->attn;
    if (e->o.attn && !normalizer_parse(&e->given, e->o.attn, message, sizeof message))
        fail(EXIT_USAGE, "--attn %s: %s.", e->o.attn, message);
    e->switches = !normalizer_equal(&e->own, &e->given);
    if (!normalizer_fits(&e->given, config->seq_len, message, sizeof message)) fail(EXIT_USAGE, "--attn %s.", message);
    return true;
}

// Returns theta for length T. For T > L, RoPE's longest wavelength grows by T/L while its shortest hardly changes.
// Source: "NTK-aware scaled RoPE" (bloc97, 2023).
static double scaled_theta(const Evaluator *e, size_t T) {
    const ModelConfig *config = &e->model.config;
    double theta = e->o.rope_theta != 0 ? e->o.rope_theta : config->rope_theta, d = (double)head_size(config),
           L = config->seq_len;
    if (e->o.rope_scaling != ROPE_NTK || (double)T <= L) return theta;
    if (!(d > 2)) fail(EXIT_USAGE, "--rope-scaling ntk: theta (T/L)^(d/(d-2)) is undefined for heads of size 2.");
    return theta * pow((double)T / L, d / (d - 2));
}

static void check_pn_length(const Evaluator *e) {
    int L = e->model.config.seq_len;
    const Normalizer *with_p = NULL;
    if (normalizer_has(&e->given, SCALAR_P)) with_p = &e->given;
    if (normalizer_has(&e->own, SCALAR_P)) with_p = &e->own;
    if (!with_p && e->o.pn_extrapolate == PN_LOG)
        warn("--pn-extrapolate log has no effect: %s has no p_n.", e->given.text);
    if (!with_p || e->longest <= (size_t)L || e->o.pn_extrapolate != PN_AS_LEARNED) return;
    fail(EXIT_USAGE,
         "%s has p_n for n up to L = %d, but --seq-lens asks for %zu.\n"
         "  Use --pn-extrapolate log to extrapolate it by a fit, a1 ln(n) + a2.",
         with_p->text, L, e->longest);
}

static void settle_lengths(Evaluator *e) {
    const ModelConfig *config = &e->model.config;
    Error error;
    e->count = e->o.seq_lens.count;
    for (size_t i = 0; i < e->count; i++) {
        size_t T = e->o.seq_lens.values[i] ? (size_t)e->o.seq_lens.values[i] : (size_t)config->seq_len;
        if (T > MAX_SEQ_LEN)
            fail(EXIT_USAGE, "%s was trained for %zu tokens, but at most %d are supported. Set --seq-lens.", e->folder,
                 T, MAX_SEQ_LEN);
        Shards *shards = shards_open(e->o.data,
                                     (ShardsConfig){.T = T,
                                                    .vocab = config->vocab,
                                                    .end_of_text = config->end_of_text,
                                                    .remedy = "Add data, or reduce --seq-lens."},
                                     &error);
        if (!shards) fail_with(&error);
        uint64_t windows = shards_windows(shards), most = (uint64_t)e->o.max_tokens / T;
        if (most < 1) most = 1;
        e->lengths[i] = (Length){
            .T = T, .shards = shards, .windows = windows < most ? windows : most, .rope_theta = scaled_theta(e, T)};
        if (T > e->longest) e->longest = T;
    }
    for (e->first_part = 1; e->first_part << (PARTS - 1) < e->longest;) e->first_part *= 2;
    check_pn_length(e);
}

// ---- memory and weights

static void take_memory(Evaluator *e) {
    Model *m = &e->model;
    size_t B = e->longest < ROWS ? ROWS / e->longest : 1, N = B * e->longest;
    m->list = tensors_of(&m->config, (const Normalizer *[]){&e->given}, 1);
    m->doc_mask = e->o.doc_mask;
    plan_parameters(m, false, false);
    gemm_start(&m->mm, false);
    // Without a backward pass, all layers share one layer's activations.
    plan_activations(m, 1, B, e->longest);
    memory_add(&m->plan, "batch", (void **)&e->window, (e->longest + 1) * sizeof(int32_t));
    memory_add(&m->plan, "batch", (void **)&e->inputs, N * sizeof(int32_t));
    memory_add(&m->plan, "batch", (void **)&e->targets, N * sizeof(int32_t));
    if (shards_masked(e->lengths[0].shards)) memory_add(&m->plan, "batch", (void **)&e->mask, N);
    memory_add(&m->plan, "losses by position", (void **)&e->sums, e->longest * sizeof(double));
    memory_add(&m->plan, "losses by position", (void **)&e->counts, e->longest * sizeof(uint64_t));
    memory_add(&m->plan, "p_n", (void **)&e->fit, FLOATS(e->longest));
    if ((double)m->plan.total > (double)memory_available())
        fail(EXIT_RESOURCE,
             "%zu tokens at a time need %s of memory, but only %s is available.\n  Use smaller --seq-lens.", N,
             human_bytes((double)m->plan.total).text, human_bytes((double)memory_available()).text);
    memory_take(&m->plan);
}

// Fits p_n = a1 ln n + a2 to the learned p_n for n = 1..L by least squares, and replaces p_n by the fit for all n
// ([SSMax] Figure 2).
static void fit_pn(Evaluator *e) {
    Model *m = &e->model;
    int L = m->config.seq_len;
    const float *p = m->params + m->list.scalar[SCALAR_P];
    double x = 0, y = 0, xx = 0, xy = 0, yy = 0;
    for (int n = 1; n <= L; n++) {
        x += log(n);
        y += (double)p[n - 1];
    }
    x /= L;
    y /= L;
    for (int n = 1; n <= L; n++) {
        double dx = log(n) - x, dy = (double)p[n - 1] - y;
        xx += dx * dx;
        xy += dx * dy;
        yy += dy * dy;
    }
    double a1 = xx > 0 ? xy / xx : 0, a2 = y - a1 * x, r2 = xx > 0 && yy > 0 ? xy * xy / (xx * yy) : NAN;
    for (size_t n = 1; n <= e->longest; n++) e->fit[n - 1] = (float)(a1 * log((double)n) + a2);
    m->p_n = e->fit;
    printf("p_n = %.6g ln(n) + %.6g for all n, fitted to n = 1..%d, R^2 = ", a1, a2, L);
    printf(isnan(r2) ? "undefined (p_n is constant)\n" : "%.6f\n", r2);
    e->pn_fit = cJSON_CreateObject();
    cJSON_AddNumberToObject(e->pn_fit, "a1", a1);
    cJSON_AddNumberToObject(e->pn_fit, "a2", a2);
    cJSON_AddNumberToObject(e->pn_fit, "r2", r2);
}

// ---- one length

static void load_windows(Evaluator *e, const Length *at, uint64_t first, size_t B) {
    size_t T = at->T;
    Error error;
    for (size_t b = 0; b < B; b++) {
        if (!shards_window(at->shards, first + b, e->window, e->mask ? e->mask + b * T : NULL, &error))
            fail_with(&error);
        memcpy(e->inputs + b * T, e->window, T * sizeof(int32_t));
        memcpy(e->targets + b * T, e->window + 1, T * sizeof(int32_t));
    }
}

// Sums the losses at each position over a length's windows, into e->sums and e->counts.
static void measure(Evaluator *e, const Length *at) {
    Model *m = &e->model;
    size_t T = at->T, most = m->B * m->T / T;
    rope_table(m->cosines, m->sines, T, head_size(&m->config), at->rope_theta);
    memset(e->sums, 0, T * sizeof *e->sums);
    memset(e->counts, 0, T * sizeof *e->counts);
    m->rows = m->all_zero_rows = 0;
    for (uint64_t first = 0; first < at->windows; first += most) {
        size_t B = at->windows - first < most ? (size_t)(at->windows - first) : most;
        load_windows(e, at, first, B);
        model_forward(m, e->inputs, B, T);
        model_loss(m, e->targets, e->mask, B * T, 0, false);
        for (size_t n = 0; n < B * T; n++) {
            e->sums[n % T] += m->losses[n];
            e->counts[n % T] += e->mask ? e->mask[n] : 1;
        }
    }
    e->tokens += at->windows * T;
}

// Returns the mean loss over the positions from <= t < to, or NAN if no target there counts.
static double mean_loss(const Evaluator *e, size_t from, size_t to, uint64_t *count) {
    double sum = 0;
    *count = 0;
    for (size_t t = from; t < to; t++) {
        sum += e->sums[t];
        *count += e->counts[t];
    }
    return *count && isfinite(sum) ? sum / (double)*count : NAN;
}

// Prints the results of measure() as a row of the table and adds them to eval.json.
static void report(Evaluator *e, Length *at, bool after) {
    const Model *m = &e->model;
    uint64_t count, in_part;
    double loss = at->loss[after] = mean_loss(e, 0, at->T, &count),
           all_zero = (double)m->all_zero_rows / (double)m->rows;
    double per_sequence = loss * (double)count / (double)at->windows;
    for (size_t p = 0, from = 0; p < PARTS && from < at->T; p++) {
        size_t end = e->first_part << p, to = end < at->T ? end : at->T;
        at->part[p] = mean_loss(e, from, to, &in_part);
        from = to;
    }
    printf("%8zu %12s %10s %15s %9.4f %11.6g", at->T, human_grouped(at->windows).text, human_count(at->rope_theta).text,
           human_grouped(count).text, loss, exp(loss));
    if (after) printf(" %+9.4f", loss - at->loss[0]);
    if (e->mask) printf(" %13.4f", per_sequence);
    if (all_zero > 0) printf("   %.2g %% all-zero rows", 100 * all_zero);
    printf("\n");
    fflush(stdout);

    cJSON *row = cJSON_CreateObject(), *positions;
    cJSON_AddStringToObject(row, "attn", m->config.attn.text);
    cJSON_AddNumberToObject(row, "seq_len", (double)at->T);
    cJSON_AddNumberToObject(row, "rope_theta", at->rope_theta);
    cJSON_AddNumberToObject(row, "sequences", (double)at->windows);
    cJSON_AddNumberToObject(row, "tokens", (double)count);
    cJSON_AddNumberToObject(row, "loss", loss);
    cJSON_AddNumberToObject(row, "perplexity", exp(loss));
    if (e->mask) cJSON_AddNumberToObject(row, "loss_per_sequence", per_sequence);
    cJSON_AddNumberToObject(row, "rows_without_weight", all_zero);
    if (e->o.task == TASK_POSITIONS) {
        positions = cJSON_AddArrayToObject(row, "loss_by_position");
        for (size_t t = 0; t < at->T; t++)
            cJSON_AddItemToArray(positions, cJSON_CreateNumber(mean_loss(e, t, t + 1, &in_part)));
    }
    cJSON_AddItemToArray(e->results, row);
}

// ---- all lengths, under each normalizer

// Prints a table with a row for each range of positions and a column for each length.
static void print_positions(const Evaluator *e) {
    printf("\nloss by position\n%17s", "");
    for (size_t i = 0; i < e->count; i++) printf(" %9zu", e->lengths[i].T);
    for (size_t p = 0, from = 0; from < e->longest; p++) {
        char range[64];
        size_t to = e->first_part << p;
        snprintf(range, sizeof range, "%zu-%zu", from + 1, to < e->longest ? to : e->longest);
        printf("\n%17s", range);
        for (size_t i = 0; i < e->count; i++) {
            if (from < e->lengths[i].T) printf(" %9.4f", e->lengths[i].part[p]);
            else printf(" %9s", "");
        }
        from = to;
    }
    printf("\n");
}

static void evaluate(Evaluator *e, bool after) {
    const Normalizer *attn = &e->model.config.attn;
    printf("\nunder %s%s\n", attn->text, after ? ", without training" : ", the checkpoint's own");
    if (normalizer_has(attn, SCALAR_P) && e->o.pn_extrapolate == PN_LOG && !e->pn_fit) fit_pn(e);
    printf("%8s %12s %10s %15s %9s %11s%s%s\n", "length", "sequences", "theta", "tokens", "loss", "perplexity",
           after ? "    change" : "", e->mask ? "  per sequence" : "");
    for (size_t i = 0; i < e->count; i++) {
        measure(e, &e->lengths[i]);
        report(e, &e->lengths[i], after);
    }
    if (e->o.task == TASK_POSITIONS) print_positions(e);
}

// Switches to the given normalizer and initializes its new learned scalars. The rest of the model stays unchanged.
static void start_given(Evaluator *e, cJSON *started) {
    e->model.config.attn = e->given;
    Weights weights = weights_of(&e->model);
    weights_start_scalars(&weights, &e->own);
    for (Scalar scalar = 0; scalar < SCALAR_COUNT; scalar++) {
        if (!normalizer_has(&e->given, scalar) || normalizer_keeps(&e->own, &e->given, scalar)) continue;
        double start = normalizer_start(&e->given, scalar, e->model.config.seq_len);
        printf("%s%s starts at %.6g", cJSON_GetArraySize(started) ? ", " : "\n", scalar_names[scalar], start);
        cJSON_AddNumberToObject(started, scalar_names[scalar], start);
    }
    if (cJSON_GetArraySize(started)) printf("\n");
}

static void switch_normalizer(Evaluator *e) {
    cJSON *entry = cJSON_CreateObject(), *lengths, *losses[2];
    cJSON_AddItemToArray(e->lineage = cJSON_CreateArray(), entry);
    cJSON_AddStringToObject(entry, "event", "attn-at-evaluation");
    cJSON_AddStringToObject(entry, "from", e->own.text);
    cJSON_AddStringToObject(entry, "attn", e->given.text);
    start_given(e, cJSON_AddObjectToObject(entry, "started"));
    evaluate(e, true);
    lengths = cJSON_AddArrayToObject(entry, "seq_lens");
    losses[0] = cJSON_AddArrayToObject(entry, "val_loss_before");
    losses[1] = cJSON_AddArrayToObject(entry, "val_loss_after");
    for (size_t i = 0; i < e->count; i++) {
        cJSON_AddItemToArray(lengths, cJSON_CreateNumber((double)e->lengths[i].T));
        for (int after = 0; after < 2; after++)
            cJSON_AddItemToArray(losses[after], cJSON_CreateNumber(e->lengths[i].loss[after]));
    }
}

// A new s is initialized so that the mean of s·ln(n) over n = 1..L is 1, softmax's temperature. Over shorter sequences,
// the mean is lower, so attention is flatter, and the loss says little about the normalizer itself.
static void note_temperature(const Evaluator *e) {
    const Normalizer *to = &e->given;
    int L = e->model.config.seq_len;
    size_t T = e->lengths[0].T;
    for (size_t i = 1; i < e->count; i++)
        if (e->lengths[i].T < T) T = e->lengths[i].T;
    bool starts = normalizer_has(to, SCALAR_S) && !normalizer_keeps(&e->own, to, SCALAR_S) && isnan(to->s_start) &&
                  to->scale.kind != SCALE_PN;
    if (!starts || T >= (size_t)L) return;
    double start = normalizer_start(to, SCALAR_S, L), here = normalizer_start(to, SCALAR_S, (int)T);
    if (!(start / here < 0.9)) return;
    printf(
        "note      s starts at %.4f for L = %d, but at T = %zu its mean temperature is only %.2f of softmax's, which by itself increases the loss:\n"
        "          use --attn %s+s=%.4f to start at softmax's temperature at this length\n",
        start, L, T, start / here, to->text, here);
}

static void print_start(const Evaluator *e) {
    const ModelConfig *c = &e->model.config;
    printf("model     %s, %s parameters, trained with %s at L = %d\n", e->folder,
           human_count((double)model_parameters(c)).text, e->own.text, c->seq_len);
    printf("data      %s tokens in %zu shard%s\n", human_grouped(shards_tokens(e->lengths[0].shards)).text,
           shards_count(e->lengths[0].shards), shards_count(e->lengths[0].shards) == 1 ? "" : "s");
    if (e->longest > (size_t)c->seq_len)
        printf("note      lengths of up to %.3g L; L stays %d in the normalizer, and RoPE's theta %s\n",
               (double)e->longest / c->seq_len, c->seq_len,
               e->o.rope_scaling == ROPE_NTK ? "grows with the length" : "stays unchanged");
    if (e->switches) note_temperature(e);
    fflush(stdout);
}

static void write_json(Evaluator *e) {
    Error error;
    char *print = shards_fingerprint(e->lengths[0].shards, &error);
    if (!print) fail_with(&error);
    cJSON *json = cJSON_CreateObject();
    cJSON_AddItemToObject(json, "arguments", cJSON_Parse(e->arguments));
    cJSON_AddStringToObject(json, "checkpoint", e->folder);
    cJSON_AddNumberToObject(json, "trained_seq_len", e->model.config.seq_len);
    cJSON_AddItemToObject(json, "data", cJSON_Parse(print));
    if (e->pn_fit) cJSON_AddItemToObject(json, "pn_fit", e->pn_fit);
    cJSON_AddItemToObject(json, "results", e->results);
    if (e->lineage) cJSON_AddItemToObject(json, "lineage", e->lineage);
    char *text = cJSON_Print(json);
    if (!text) fail(EXIT_RESOURCE, "out of memory for eval.json.");
    if (!file_replace_text(folder_path(e->o.out, "eval.json").text, text, &error)) fail_with(&error);
    cJSON_Delete(json);
    free(text);
    free(print);
}

// Finds and loads the checkpoint. If it is deleted meanwhile, because its run is pruning, tries again with a newer one.
static void open_checkpoint(Evaluator *e) {
    Error error;
    for (int attempt = 1;; attempt++) {
        if (settle_model(e, &error)) {
            if (!e->count) settle_lengths(e);
            take_memory(e);
            Weights weights = weights_of(&e->model);
            if (weights_load(&weights, e->folder, &e->own, &error)) return;
        }
        if (attempt == CHECKPOINT_ATTEMPTS || !checkpoint_vanished(e->folder)) fail_with(&error);
        gemm_end(&e->model.mm);
        memory_release(&e->model.plan);
        tensors_free(&e->model.list);
    }
}

int main(int argc, char **argv) {
    static Evaluator e;
    Error error;
    start_program("eval_gpt2");
    parse_flags(&e, argc, argv);
    start_threads(e.o.threads);
    open_checkpoint(&e);
    if (e.o.out && !file_make_folders(e.o.out, &error)) fail_with(&error);
    e.results = cJSON_CreateArray();
    print_start(&e);
    double start = now();
    evaluate(&e, false);
    if (e.switches) switch_normalizer(&e);
    if (e.o.out) write_json(&e);
    if (fflush(stdout) != 0 || ferror(stdout))
        fail(EXIT_RESOURCE, "stdout: cannot write the results: %s.", strerror(errno));
    double seconds = now() - start;
    fprintf(stderr, "eval_gpt2: %s tokens in %.2f s, %.1f tokens/s\n", human_grouped(e.tokens).text, seconds,
            (double)e.tokens / seconds);
    return EXIT_DONE;
}

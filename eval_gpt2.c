// The loss of a checkpoint at lengths of one's choice, by position too, under its own attention normalizer and just
// after a change to another. The layers are the trainer's, train_gpt2.c section 1 to 3; here are lengths, RoPE beyond
// the training length, p_n, and eval.json.
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"    // of the trainer's layers only some serve here
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
typedef enum { PN_AS_LEARNT, PN_LOG } PnExtrapolation;
typedef enum { ROPE_AS_TRAINED, ROPE_NTK } RopeScaling;

enum {
    ROWS = 1024,    // tokens that go through the layers together, at least: short sequences side by side
    // Ranges of positions in the table, each but the first as long as all before it.
    PARTS = 9
};

typedef struct {
    const char *model, *data, *attn, *ignore_config_key, *out;
    int64_t max_tokens, seed, threads;
    IntList seq_lens;
    double rope_theta;
    int rope_scaling, pn_extrapolate, task;
} EvalOptions;

// One of --seq-lens. Its losses are nats a token that counts: under the checkpoint's normalizer, and under the given
// one.
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
    Normalizer own, given;    // the checkpoint's, and --attn's: the same without one
    bool changes;             // do they differ?
    Length lengths[OPTION_LIST_MAX];
    size_t count, longest, first_part;    // of the lengths; the longest; the end of the first range of positions
    int32_t *window, *inputs, *targets;
    uint8_t *mask;       // NULL where everything counts
    double *sums;        // (longest) losses at each position
    uint64_t *counts;    // (longest) targets there that count
    float *fit;          // (longest) of p_n
    uint64_t tokens;     // evaluated in all
    cJSON *results, *lineage, *pn_fit;
} Evaluator;

// ---- what is to be done

static void parse_flags(Evaluator *e, int argc, char **argv) {
    EvalOptions *o = &e->o;
    *o = (EvalOptions){.max_tokens = 1 << 20, .seed = 1337, .seq_lens = {.values = {0}, .count = 1}};
    Option table[] = {
        {"model", OPT_TEXT, &o->model, .arg = "DIR", .group = "Model",
         .help = "a checkpoint's folder, a run's (then its newest checkpoint), or a Hugging Face Llama's"},
        {"attn", OPT_TEXT, &o->attn, .arg = "NAME", .group = "Model",
         .help = "evaluate under another attention normalizer too, with no training; `--attn help` lists them"},
        {"ignore-config-key", OPT_TEXT, &o->ignore_config_key, .arg = "NAME[,...]", .group = "Model",
         .help = "keys of config.json that are not known here and change nothing"},
        {"pn-extrapolate", OPT_CHOICE, &o->pn_extrapolate, .choices = "none|log", .group = "Model",
         .help = "log: in place of the learned p_n, for all n, the fit p_n = a1 ln(n) + a2"},
        {"rope-theta", OPT_FLOAT, &o->rope_theta, 0, 1e12, .arg = "X", .group = "Model",
         .help = "base of RoPE's wavelengths; 0: the checkpoint's"},
        {"rope-scaling", OPT_CHOICE, &o->rope_scaling, .choices = "none|ntk", .group = "Model",
         .help = "ntk: beyond the training length L, theta (T/L)^(d/(d-2))"},
        {"data", OPT_TEXT, &o->data, .arg = "GLOB", .group = "Data",
         .help = "shards to evaluate on, for example 'data/shakespeare/*_val_*.bin'"},
        {"seq-lens", OPT_INT_LIST, &o->seq_lens, 0, MAX_SEQ_LEN, .arg = "T[,T...]", .group = "Data",
         .help = "tokens a sequence, each length in turn; 0: the checkpoint's L"},
        {"max-tokens", OPT_INT, &o->max_tokens, 1, 1e12, .arg = "N", .group = "Data",
         .help = "tokens for each length, at most, in whole sequences, at least one"},
        {"task", OPT_CHOICE, &o->task, .choices = "loss|positions", .group = "Evaluation",
         .help = "the mean loss; or by position too"},
        {"seed", OPT_INT, &o->seed, 0, 9007199254740992.0, .arg = "N", .group = "Evaluation",
         .help = "kept in eval.json; these tasks draw nothing at random"},
        {"out", OPT_TEXT, &o->out, .arg = "DIR", .group = "Evaluation",
         .help = "folder for eval.json; none: printed only"},
        {"threads", OPT_INT, &o->threads, 0, MAX_THREADS, .arg = "N", .group = "Machine", .help = THREADS_HELP},
    };
    options_parse(
        table, sizeof table / sizeof *table, argc, argv,
        "Usage: eval_gpt2 --model DIR --data GLOB [flags]\n\nThe loss of a checkpoint at several lengths, under its own normalizer and just after a change to another.");
    if (o->attn && normalizer_help(o->attn)) exit(EXIT_DONE);
    if (!o->model) fail(EXIT_USAGE, "--model is missing: the folder of a checkpoint or of a run.");
    if (!o->data) fail(EXIT_USAGE, "--data is missing: the shards to evaluate on.");
    if (o->rope_theta != 0 && !(o->rope_theta > 1))
        fail(EXIT_USAGE, "--rope-theta %g: expected a number above 1, or 0 for the checkpoint's.", o->rope_theta);
    e->arguments = options_json(table, sizeof table / sizeof *table);
}

static bool settle_model(Evaluator *e, Error *error) {
    ModelConfig *config = &e->model.config;
    uint64_t step;
    char message[1024];
    if (!checkpoint_newest(e->o.model, e->folder, sizeof e->folder, &step))
        snprintf(e->folder, sizeof e->folder, "%s", e->o.model);
    if (!model_config_read(config, e->folder, e->o.ignore_config_key, error)) return false;
    if (!checkpoint_verify(e->folder, true, error)) return false;
    e->own = e->given = config->attn;
    if (e->o.attn && !normalizer_parse(&e->given, e->o.attn, message, sizeof message))
        fail(EXIT_USAGE, "--attn %s: %s.", e->o.attn, message);
    e->changes = !normalizer_equal(&e->own, &e->given);
    if (!normalizer_fits(&e->given, config->seq_len, message, sizeof message)) fail(EXIT_USAGE, "--attn %s.", message);
    return true;
}

// theta at length T: so that at T > L RoPE's longest wavelength grows by T/L, and its shortest hardly.
// Source: "NTK-aware scaled RoPE" (bloc97, 2023).
static double scaled_theta(const Evaluator *e, size_t T) {
    const ModelConfig *config = &e->model.config;
    double theta = e->o.rope_theta != 0 ? e->o.rope_theta : config->rope_theta, d = (double)head_size(config),
           L = config->seq_len;
    if (e->o.rope_scaling != ROPE_NTK || (double)T <= L) return theta;
    if (!(d > 2)) fail(EXIT_USAGE, "--rope-scaling ntk: theta (T/L)^(d/(d-2)) has no meaning for heads of size 2.");
    return theta * pow((double)T / L, d / (d - 2));
}

static void settle_lengths(Evaluator *e) {
    const ModelConfig *config = &e->model.config;
    Error error;
    e->count = e->o.seq_lens.count;
    for (size_t i = 0; i < e->count; i++) {
        size_t T = e->o.seq_lens.values[i] ? (size_t)e->o.seq_lens.values[i] : (size_t)config->seq_len;
        if (T > MAX_SEQ_LEN)
            fail(EXIT_USAGE, "%s was trained for %zu tokens, and %d are the most here: give --seq-lens.", e->folder, T,
                 MAX_SEQ_LEN);
        Shards *shards = shards_open(
            e->o.data, (ShardsConfig){.T = T, .vocab = config->vocab, .end_of_text = config->end_of_text}, &error);
        if (!shards) fail_with(&error);
        uint64_t windows = shards_windows(shards), most = (uint64_t)e->o.max_tokens / T;
        if (most < 1) most = 1;
        e->lengths[i] = (Length){
            .T = T, .shards = shards, .windows = windows < most ? windows : most, .rope_theta = scaled_theta(e, T)};
        if (T > e->longest) e->longest = T;
    }
    for (e->first_part = 1; e->first_part << (PARTS - 1) < e->longest;) e->first_part *= 2;
    const Normalizer *with_p = normalizer_has(&e->own, SCALAR_P)     ? &e->own
                               : normalizer_has(&e->given, SCALAR_P) ? &e->given
                                                                     : NULL;
    if (with_p && e->longest > (size_t)config->seq_len && e->o.pn_extrapolate == PN_AS_LEARNT)
        fail(
            EXIT_USAGE,
            "%s has p_n for n up to L = %d, and --seq-lens asks for %zu.\n  --pn-extrapolate log fits a1 ln(n) + a2 to them.",
            with_p->text, config->seq_len, e->longest);
}

// ---- memory and weights

static void take_memory(Evaluator *e) {
    Model *m = &e->model;
    size_t B = e->longest < ROWS ? ROWS / e->longest : 1, N = B * e->longest;
    m->list = tensors_of(&m->config, (const Normalizer *[]){&e->given}, 1);
    plan_parameters(m, false, false);
    // There is no backward pass: all layers share the activations of one.
    plan_activations(m, 1, B, e->longest, false);
    memory_add(&m->plan, "a batch", (void **)&e->window, (e->longest + 1) * sizeof(int32_t));
    memory_add(&m->plan, "a batch", (void **)&e->inputs, N * sizeof(int32_t));
    memory_add(&m->plan, "a batch", (void **)&e->targets, N * sizeof(int32_t));
    if (shards_masked(e->lengths[0].shards)) memory_add(&m->plan, "a batch", (void **)&e->mask, N);
    memory_add(&m->plan, "losses by position", (void **)&e->sums, e->longest * sizeof(double));
    memory_add(&m->plan, "losses by position", (void **)&e->counts, e->longest * sizeof(uint64_t));
    memory_add(&m->plan, "p_n", (void **)&e->fit, FLOATS(e->longest));
    if ((double)m->plan.total > (double)memory_available())
        fail(EXIT_RESOURCE,
             "this needs %s of memory, and %s is free: %zu tokens at a time.\n  Smaller --seq-lens need less.",
             human_bytes((double)m->plan.total).text, human_bytes((double)memory_available()).text, N);
    memory_take(&m->plan);
}

// p_n = a1 ln n + a2 by least squares over the learned n = 1..L, and from here on the fit in place of p_n for all n
// ([SSMax] Figure 2).
static void fit_pn(Evaluator *e) {
    Model *m = &e->model;
    int L = m->config.seq_len;
    const float *p = m->params + m->list.p;
    double x = 0, y = 0, xx = 0, xy = 0, yy = 0;
    for (int n = 1; n <= L; n++) x += log(n), y += (double)p[n - 1];
    x /= L, y /= L;
    for (int n = 1; n <= L; n++) {
        double dx = log(n) - x, dy = (double)p[n - 1] - y;
        xx += dx * dx, xy += dx * dy, yy += dy * dy;
    }
    double a1 = xx > 0 ? xy / xx : 0, a2 = y - a1 * x, r2 = xx > 0 && yy > 0 ? xy * xy / (xx * yy) : NAN;
    for (size_t n = 1; n <= e->longest; n++) e->fit[n - 1] = (float)(a1 * log((double)n) + a2);
    m->p_n = e->fit;
    printf("p_n = %.6g ln(n) + %.6g for all n, fitted to n = 1..%d, R^2 = ", a1, a2, L);
    printf(isnan(r2) ? "undefined: p_n is constant\n" : "%.6f\n", r2);
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

// The losses at each position, summed over a length's windows, into e->sums and e->counts.
static void measure(Evaluator *e, const Length *at) {
    Model *m = &e->model;
    size_t T = at->T, most = m->B * m->T / T;
    rope_table(m->cosines, m->sines, T, head_size(&m->config), at->rope_theta);
    memset(e->sums, 0, T * sizeof *e->sums);
    memset(e->counts, 0, T * sizeof *e->counts);
    m->rows = m->rows_without_weight = 0;
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

// The mean loss over the positions from <= t < to; NAN where none counts.
static double mean_loss(const Evaluator *e, size_t from, size_t to, uint64_t *count) {
    double sum = 0;
    *count = 0;
    for (size_t t = from; t < to; t++) sum += e->sums[t], *count += e->counts[t];
    return *count && isfinite(sum) ? sum / (double)*count : NAN;
}

// What measure() found, as a row of the table and an object of eval.json.
static void report(Evaluator *e, Length *at, bool after) {
    const Model *m = &e->model;
    uint64_t count, in_part;
    double loss = at->loss[after] = mean_loss(e, 0, at->T, &count),
           idle = (double)m->rows_without_weight / (double)m->rows;
    double a_sequence = loss * (double)count / (double)at->windows;
    for (size_t p = 0, from = 0; p < PARTS && from < at->T; p++) {
        size_t end = e->first_part << p, to = end < at->T ? end : at->T;
        at->part[p] = mean_loss(e, from, to, &in_part);
        from = to;
    }
    printf("%8zu %12s %10s %15s %9.4f %11.6g", at->T, human_grouped(at->windows).text, human_count(at->rope_theta).text,
           human_grouped(count).text, loss, exp(loss));
    if (after) printf(" %+9.4f", loss - at->loss[0]);
    if (e->mask) printf(" %13.4f", a_sequence);
    if (idle > 0) printf("   %.2g %% of rows without weight", 100 * idle);
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
    if (e->mask) cJSON_AddNumberToObject(row, "loss_per_sequence", a_sequence);
    cJSON_AddNumberToObject(row, "rows_without_weight", idle);
    if (e->o.task == TASK_POSITIONS) {
        positions = cJSON_AddArrayToObject(row, "loss_by_position");
        for (size_t t = 0; t < at->T; t++)
            cJSON_AddItemToArray(positions, cJSON_CreateNumber(mean_loss(e, t, t + 1, &in_part)));
    }
    cJSON_AddItemToArray(e->results, row);
}

// ---- all lengths, under one normalizer and the other

// Ranges of positions downwards, lengths across.
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
    printf("\nunder %s%s\n", attn->text, after ? ", with no training" : ", the checkpoint's own");
    if (normalizer_has(attn, SCALAR_P) && e->o.pn_extrapolate == PN_LOG && !e->pn_fit) fit_pn(e);
    printf("%8s %12s %10s %15s %9s %11s%s%s\n", "length", "sequences", "theta", "tokens", "loss", "perplexity",
           after ? "    change" : "", e->mask ? "    a sequence" : "");
    for (size_t i = 0; i < e->count; i++) {
        measure(e, &e->lengths[i]);
        report(e, &e->lengths[i], after);
    }
    if (e->o.task == TASK_POSITIONS) print_positions(e);
}

// The scalars that the given normalizer brings start; the rest of the model stays.
static void start_given(Evaluator *e, cJSON *started) {
    e->model.config.attn = e->given;
    Weights weights = weights_of(&e->model);
    weights_start_scalars(&weights, &e->own);
    for (Scalar scalar = SCALAR_S; scalar < SCALAR_COUNT; scalar++) {
        if (!normalizer_has(&e->given, scalar) || normalizer_keeps(&e->own, &e->given, scalar)) continue;
        double start = normalizer_start(&e->given, scalar, e->model.config.seq_len);
        printf("%s%s starts at %.6g", cJSON_GetArraySize(started) ? ", " : "\n", scalar_names[scalar], start);
        cJSON_AddNumberToObject(started, scalar_names[scalar], start);
    }
    if (cJSON_GetArraySize(started)) printf("\n");
}

static void change_normalizer(Evaluator *e) {
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

// A new s starts so that the mean of s·ln(n) over the row lengths n = 1..L is 1, softmax's temperature. Shorter samples
// see less of it: flatter attention, and a loss that says little about the normalizer.
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
        "note      s starts at %.4f for L = %d; at T = %zu its mean temperature is %.2f of softmax's, which costs loss by itself:\n"
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
        printf("note      up to %.3g L; L stays %d in the normalizer, and RoPE's theta %s\n",
               (double)e->longest / c->seq_len, c->seq_len,
               e->o.rope_scaling == ROPE_NTK ? "grows with the length" : "stays");
    if (e->changes) note_temperature(e);
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
    if (!file_replace_text(folder_path(e->o.out, "eval.json"), text, &error)) fail_with(&error);
    cJSON_Delete(json);
    free(text);
    free(print);
}

// Finds and loads the checkpoint; another one where that of a run is pruned meanwhile.
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
    if (e.changes) change_normalizer(&e);
    if (e.o.out) write_json(&e);
    if (fflush(stdout) != 0 || ferror(stdout))
        fail(EXIT_RESOURCE, "stdout: the figures could not be written: %s.", strerror(errno));
    double seconds = now() - start;
    fprintf(stderr, "eval_gpt2: %s tokens in %.2f s, %.1f tokens/s\n", human_grouped(e.tokens).text, seconds,
            (double)e.tokens / seconds);
    return EXIT_DONE;
}

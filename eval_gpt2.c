// Evaluates checkpoints: the loss at any sequence length and position, the needle in a haystack, where attention goes,
// the learned scalars, and multiple choice; under the checkpoint's normalizer and immediately after a switch to another
// one. The model is the trainer's (train_gpt2.c); eval/ contains what the tasks measure. Reads from top to bottom:
//
//   1. Model     memory and weights for the task
//   2. Tasks     each runs the model over its sequences and passes on what it computes
//   3. main()
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"    // only some of the trainer's functions are used here
#include "train_gpt2.c"
#pragma GCC diagnostic pop

#include <errno.h>

#include "eval/choice.h"
#include "eval/eval.h"
#include "eval/needle.h"
#include "eval/observe.h"
#include "eval/scores.h"
#include "run/checkpoint.h"
#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/start.h"

enum {
    ROWS = 1024,          // the fewest tokens per forward pass: short sequences are batched
    OBSERVED_ROWS = 64    // rows of attention weights at a time
};

typedef struct {
    Eval e;
    Model model;
    Decoder decoder;
    Needle needle;
    Observer observer;
    Choice choice;
    int32_t *window, *inputs, *targets;
    uint8_t *mask;       // NULL if every token counts
    double *sums;        // (longest) the summed losses at each position
    uint64_t *counts;    // (longest) the number of targets at each position that count
    float *fit;          // (longest) the fitted p_n
    float
        *weights;    // attention weights: needle: of one query (layers,NH,longest); attention: a block for each thread
} Evaluator;

// ---------------------------------------------------------------------------------------------------------------------
// 1. Model

// One row per task. settle() reads the task's data and sets e.longest, plan() plans the memory, run() evaluates under
// the normalizer in use.
typedef struct {
    void (*settle)(Evaluator *v);
    void (*plan)(Evaluator *v);
    void (*run)(Evaluator *v);
    void (*close)(Evaluator *v);
} Task;

static const Task *task_of(const Evaluator *v);

static void plan_losses(Evaluator *v) {
    Model *m = &v->model;
    size_t T = v->e.longest, B = T < ROWS ? ROWS / T : 1, N = B * T;
    // Without a backward pass, all layers share one layer's activations.
    plan_activations(m, 1, B, T);
    memory_add(&m->plan, "batch", (void **)&v->window, (T + 1) * sizeof(int32_t));
    memory_add(&m->plan, "batch", (void **)&v->inputs, N * sizeof(int32_t));
    memory_add(&m->plan, "batch", (void **)&v->targets, N * sizeof(int32_t));
    if (v->e.masked) memory_add(&m->plan, "batch", (void **)&v->mask, N);
    memory_add(&m->plan, "losses by position", (void **)&v->sums, T * sizeof(double));
    memory_add(&m->plan, "losses by position", (void **)&v->counts, T * sizeof(uint64_t));
}

static void plan_needle(Evaluator *v) {
    Model *m = &v->model;
    const ModelConfig *c = &m->config;
    plan_decoder(&v->decoder, m, &m->plan, 1, v->e.longest);
    memory_add(&m->plan, "attention weights", (void **)&v->weights,
               FLOATS((size_t)c->layers * (size_t)c->heads * v->e.longest));
}

static void plan_sequence(Evaluator *v) {
    Model *m = &v->model;
    size_t T = v->e.longest;
    plan_activations(m, 1, 1, T);
    memory_add(&m->plan, "batch", (void **)&v->inputs, T * sizeof(int32_t));
    memory_add(&m->plan, "batch", (void **)&v->targets, T * sizeof(int32_t));
    memory_add(&m->plan, "batch", (void **)&v->mask, T);
}

static void plan_attention(Evaluator *v) {
    plan_sequence(v);
    memory_add(&v->model.plan, "attention weights", (void **)&v->weights,
               FLOATS((size_t)omp_get_max_threads() * OBSERVED_ROWS * v->e.longest));
}

static void take_memory(Evaluator *v) {
    Model *m = &v->model;
    m->list = tensors_of(&m->config, (const Normalizer *[]){&v->e.given}, 1);
    m->doc_mask = v->e.o.doc_mask;
    v->mask = NULL;
    plan_parameters(m, false, false);
    gemm_start(&m->mm, false);
    task_of(v)->plan(v);
    memory_add(&m->plan, "p_n", (void **)&v->fit, FLOATS(v->e.longest));
    if ((double)m->plan.total > (double)memory_available())
        fail(EXIT_RESOURCE,
             "sequences of %zu tokens need %s of memory, but only %s is available.\n  Use smaller --seq-lens.",
             v->e.longest, human_bytes((double)m->plan.total).text, human_bytes((double)memory_available()).text);
    memory_take(&m->plan);
}

// Finds and loads the checkpoint. If it is deleted meanwhile, because its run is pruning, tries again with a newer one.
static void open_checkpoint(Evaluator *v) {
    Error error;
    for (int attempt = 1;; attempt++) {
        if (eval_find(&v->e, &error)) {
            if (!v->e.longest) task_of(v)->settle(v);
            take_memory(v);
            Weights weights = weights_of(&v->model);
            if (weights_load(&weights, v->e.folder, &v->e.own, &error)) return;
        }
        if (attempt == CHECKPOINT_ATTEMPTS || !checkpoint_vanished(v->e.folder)) fail_with(&error);
        gemm_end(&v->model.mm);
        memory_release(&v->model.plan);
        tensors_free(&v->model.list);
    }
}

static void close_checkpoint(Evaluator *v) {
    eval_close_model(&v->e);
    task_of(v)->close(v);
    gemm_end(&v->model.mm);
    memory_release(&v->model.plan);
    tensors_free(&v->model.list);
    memset(&v->model, 0, sizeof v->model);
}

// Switches to the given normalizer and initializes its new learned scalars. The rest of the model stays unchanged.
static void switch_normalizer(Evaluator *v) {
    eval_switch(&v->e);
    Weights weights = weights_of(&v->model);
    weights_start_scalars(&weights, &v->e.own);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Tasks

static void nothing_to_plan(Evaluator *v) {
    (void)v;
}

static void nothing_to_close(Evaluator *v) {
    (void)v;
}

// ---- loss, positions

static void losses_task_settle(Evaluator *v) {
    losses_settle(&v->e);
}

static void load_windows(Evaluator *v, const Length *at, uint64_t first, size_t B) {
    size_t T = at->T;
    Error error;
    for (size_t b = 0; b < B; b++) {
        if (!shards_window(at->shards, first + b, v->window, v->mask ? v->mask + b * T : NULL, &error))
            fail_with(&error);
        memcpy(v->inputs + b * T, v->window, T * sizeof(int32_t));
        memcpy(v->targets + b * T, v->window + 1, T * sizeof(int32_t));
    }
}

// Sums the losses at each position over a length's windows, into v->sums and v->counts.
static void measure(Evaluator *v, const Length *at) {
    Model *m = &v->model;
    size_t T = at->T, most = m->B * m->T / T;
    rope_table(m->cosines, m->sines, T, head_size(&m->config), at->rope_theta);
    memset(v->sums, 0, T * sizeof *v->sums);
    memset(v->counts, 0, T * sizeof *v->counts);
    m->rows = m->all_zero_rows = 0;
    bar_start(&v->e.bar, "sequences");
    for (uint64_t first = 0; first < at->windows; first += most) {
        size_t B = at->windows - first < most ? (size_t)(at->windows - first) : most;
        bar_show(&v->e.bar, first, at->windows);
        load_windows(v, at, first, B);
        model_forward(m, v->inputs, B, T);
        model_loss(m, v->targets, v->mask, B * T, 0, false);
        for (size_t n = 0; n < B * T; n++) {
            v->sums[n % T] += m->losses[n];
            v->counts[n % T] += v->mask ? v->mask[n] : 1;
        }
    }
    bar_clear(&v->e.bar);
}

static void evaluate_losses(Evaluator *v) {
    const Model *m = &v->model;
    losses_begin(&v->e);
    for (size_t i = 0; i < v->e.count; i++) {
        measure(v, &v->e.lengths[i]);
        losses_add(&v->e, i, v->sums, v->counts, (double)m->all_zero_rows / (double)m->rows);
    }
    losses_end(&v->e);
}

// ---- needle

static void needle_task_settle(Evaluator *v) {
    needle_settle(&v->needle, &v->e);
}

static void needle_task_close(Evaluator *v) {
    needle_close(&v->needle);
}

static void evaluate_needle(Evaluator *v) {
    Needle *n = &v->needle;
    Decoder *d = &v->decoder;
    rope_table(d->cosines, d->sines, d->length, head_size(&v->model.config), eval_theta(&v->e, d->length));
    needle_begin(n);
    while (needle_next(n)) {
        const NeedleTrial *t = &n->trial;
        d->weights = v->weights;
        size_t last = decode_span(d, t->tokens + t->shared, t->count - t->shared, 0, t->shared) - 1;
        float *logits = decode_logits(d, last, 1, 0);
        needle_weights(n, v->weights, d->length);
        d->weights = NULL;
        for (size_t position = t->count; needle_answer(n, logits); position++) {
            decode(d, &(DecodeRow){n->token, 0, position}, 1);
            logits = decode_logits(d, 0, 1, 0);
        }
    }
}

// ---- attention

static void attention_task_settle(Evaluator *v) {
    observe_settle(&v->observer, &v->e);
}

static void attention_task_close(Evaluator *v) {
    observe_close(&v->observer);
}

// The weights of all heads of a layer, whose q and k the forward pass has just computed.
static void observe_heads(Evaluator *v, size_t l, size_t T) {
    Model *m = &v->model;
    AttentionShape shape = attention_shape(&m->config, 1, T);
    AttentionInput in = attention_input(m, layer_of(m, l, T).projected);
    #pragma omp parallel for schedule(dynamic)
    for (size_t h = 0; h < shape.NH; h++) {
        float *weights = v->weights + (size_t)omp_get_thread_num() * OBSERVED_ROWS * T, log_Z[OBSERVED_ROWS];
        for (size_t from = 0; from < T; from += OBSERVED_ROWS) {
            size_t rows = T - from < OBSERVED_ROWS ? T - from : OBSERVED_ROWS;
            attention_weights(weights, T, log_Z, in, layer_scalars(m, l), shape,
                              (AttentionRows){.h = h, .from = from, .rows = rows});
            observe_rows(&v->observer, l, h, weights, T, log_Z, from, rows);
        }
    }
}

// The sum of the losses of the targets `from` to T - 1 of a sequence of T + 1 tokens, whose first T are in v->inputs.
static double sequence_loss(Evaluator *v, const int32_t *tokens, size_t T, size_t from) {
    Model *m = &v->model;
    memcpy(v->targets, tokens + 1, T * sizeof *tokens);
    for (size_t t = 0; t < T; t++) v->mask[t] = t >= from;
    return model_loss(m, v->targets, v->mask, T, 0, false);
}

static void evaluate_attention(Evaluator *v) {
    Model *m = &v->model;
    Observer *o = &v->observer;
    size_t T;
    observe_begin(o);
    while (observe_next(o, v->inputs, &T)) {
        rope_table(m->cosines, m->sines, T, head_size(&m->config), eval_theta(&v->e, T));
        model_embed(m, v->inputs, 1, T);
        for (size_t l = 0; l < (size_t)m->config.layers; l++) {
            block_of(m)->forward(m, l, 1, T);
            observe_heads(v, l, T);
            observe_layer(o, l, residual(m, l + 1, T), T, (size_t)m->config.channels);
        }
        model_final_norm(m, T);
        observe_done(o, T, sequence_loss(v, v->inputs, T - 1, 0) / (double)(T - 1));
    }
    observe_end(o);
}

// ---- scores

static void scores_task_settle(Evaluator *v) {
    v->e.longest = (size_t)v->e.config->seq_len;
}

static void report_scores(Evaluator *v) {
    Model *m = &v->model;
    Eval *e = &v->e;
    if (normalizer_has(&m->config.attn, SCALAR_P) && !e->pn_fit)
        fit_pn(e, m->params + m->list.scalar[SCALAR_P], v->fit, e->longest);
    scores_report(e, &m->list, m->params);
}

// ---- choice

static void choice_task_settle(Evaluator *v) {
    choice_settle(&v->choice, &v->e);
}

static void choice_task_close(Evaluator *v) {
    choice_close(&v->choice);
}

static void evaluate_choice(Evaluator *v) {
    Model *m = &v->model;
    const ChoiceEnding *ending;
    rope_table(m->cosines, m->sines, v->e.longest, head_size(&m->config), eval_theta(&v->e, v->e.longest));
    choice_begin(&v->choice);
    while ((ending = choice_next(&v->choice))) {
        size_t T = ending->count - 1;
        model_forward(m, ending->ids, 1, T);
        choice_add(&v->choice, sequence_loss(v, ending->ids, T, ending->from - 1));
    }
    choice_end(&v->choice);
}

static const Task *task_of(const Evaluator *v) {
    static const Task TASKS[] = {
        // clang-format off
        [TASK_LOSS]      = {losses_task_settle,    plan_losses,      evaluate_losses,    nothing_to_close},
        [TASK_POSITIONS] = {losses_task_settle,    plan_losses,      evaluate_losses,    nothing_to_close},
        [TASK_NEEDLE]    = {needle_task_settle,    plan_needle,      evaluate_needle,    needle_task_close},
        [TASK_ATTENTION] = {attention_task_settle, plan_attention,   evaluate_attention, attention_task_close},
        [TASK_SCORES]    = {scores_task_settle,    nothing_to_plan, report_scores,      nothing_to_close},
        [TASK_CHOICE]    = {choice_task_settle,    plan_sequence,    evaluate_choice,    choice_task_close},
        // clang-format on
    };
    return &TASKS[v->e.o.task];
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. main()

static void evaluate(Evaluator *v) {
    Eval *e = &v->e;
    const Normalizer *attn = &e->config->attn;
    printf("\nunder %s%s\n", attn->text, e->after ? ", without training" : ", the checkpoint's own");
    if (normalizer_has(attn, SCALAR_P) && e->o.pn_extrapolate == PN_LOG && !e->pn_fit) {
        fit_pn(e, v->model.params + v->model.list.scalar[SCALAR_P], v->fit, e->longest);
        v->model.p_n = v->fit;
    }
    task_of(v)->run(v);
}

int main(int argc, char **argv) {
    static Evaluator v;
    Eval *e = &v.e;
    Error error;
    start_program("eval_gpt2");
    eval_open(e, &v.model.config, argc, argv);
    start_threads(e->o.threads);
    double seconds = 0;
    while (e->model_at < e->model_count) {
        open_checkpoint(&v);
        if (e->o.out && !file_make_folders(e->o.out, &error)) fail_with(&error);
        eval_settle(e);
        double start = now();
        evaluate(&v);
        if (e->switches) {
            switch_normalizer(&v);
            evaluate(&v);
        }
        seconds += now() - start;
        close_checkpoint(&v);
    }
    if (e->o.out) eval_write(e);
    if (fflush(stdout) != 0 || ferror(stdout))
        fail(EXIT_RESOURCE, "stdout: cannot write the results: %s.", strerror(errno));
    if (e->tokens)
        fprintf(stderr, "eval_gpt2: %s tokens in %.2f s, %.1f tokens/s\n", human_grouped(e->tokens).text, seconds,
                (double)e->tokens / seconds);
    return EXIT_DONE;
}

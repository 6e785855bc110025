// What eval_gpt2.c and eval_gpt2.cu do between the lines of their main(): the tasks, and the models one after another.
// They include this file after they define Computer, the model and how it runs (see eval_gpt2.c for what each function
// does).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/choice.h"
#include "eval/eval.h"
#include "eval/needle.h"
#include "eval/observe.h"
#include "eval/scores.h"
#include "model/checkpoint.h"
#include "model/weights.h"
#include "runtime/clock.h"
#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/start.h"

enum { ROWS = 1024 };    // the fewest tokens per forward pass: short sequences are batched

typedef struct {
    Eval e;
    Computer c;
    Needle needle;
    Observer observer;
    Choice choice;
    int32_t *window, *inputs, *targets;    // a sequence and its next token; (B,T); (B,T)
    uint8_t *mask;                         // (B,T)
    double *sums;                          // (T) the summed losses at each position
    uint64_t *counts;                      // (T) the number of targets at each position that count
    double seconds;                        // of evaluating
} Evaluator;

// One row per task. settle() reads the task's data and sets e.longest, run() evaluates under the normalizer in use.
typedef struct {
    void (*settle)(Evaluator *v);
    void (*run)(Evaluator *v);
    void (*close)(Evaluator *v);    // NULL: there is nothing to close
} Task;

// ---- loss, positions

static void settle_losses(Evaluator *v) {
    losses_settle(&v->e);
}

static size_t batch_size(const Evaluator *v) {
    bool batches = v->e.o.task == TASK_LOSS || v->e.o.task == TASK_POSITIONS;
    return batches && v->e.longest < ROWS ? ROWS / v->e.longest : 1;
}

static void load_windows(Evaluator *v, const Length *at, uint64_t first, size_t B) {
    size_t T = at->T;
    Error error;
    for (size_t b = 0; b < B; b++) {
        if (!shards_window(at->shards, first + b, v->window, v->e.masked ? v->mask + b * T : NULL, &error))
            fail_with(&error);
        memcpy(v->inputs + b * T, v->window, T * sizeof(int32_t));
        memcpy(v->targets + b * T, v->window + 1, T * sizeof(int32_t));
    }
}

// Sums the losses at each position over a length's windows, into v->sums and v->counts.
static void measure(Evaluator *v, const Length *at) {
    size_t T = at->T, most = batch_size(v) * v->e.longest / T;
    use_angles(&v->c, &v->e, T, T);
    memset(v->sums, 0, T * sizeof *v->sums);
    memset(v->counts, 0, T * sizeof *v->counts);
    for (uint64_t first = 0; first < at->windows; first += most) {
        size_t B = at->windows - first < most ? (size_t)(at->windows - first) : most;
        const uint8_t *mask = v->e.masked ? v->mask : NULL;
        bar_next(&v->e.bar, B * T);
        load_windows(v, at, first, B);
        const float *losses = batch_losses(&v->c, v->inputs, v->targets, mask, B, T);
        for (size_t n = 0; n < B * T; n++) {
            v->sums[n % T] += losses[n];
            v->counts[n % T] += mask ? mask[n] : 1;
        }
    }
    bar_end(&v->e.bar);
}

static void run_losses(Evaluator *v) {
    losses_begin(&v->e);
    for (size_t i = 0; i < v->e.count; i++) {
        measure(v, &v->e.lengths[i]);
        losses_add(&v->e, i, v->sums, v->counts, all_zero_share(&v->c));
    }
    losses_end(&v->e);
}

// ---- needle

static void settle_needle(Evaluator *v) {
    needle_settle(&v->needle, &v->e);
}

static void run_needle(Evaluator *v) {
    Needle *n = &v->needle;
    const NeedleTrial *t = &n->trial;
    size_t length = 0;
    needle_begin(n);
    while (needle_next(n)) {
        // Each length has its own angles under ntk.
        if (t->length != length) use_angles(&v->c, &v->e, length = t->length, t->positions);
        const float *logits = prompt_logits(&v->c, n);
        v->e.tokens += t->count - t->shared;
        for (size_t position = t->count; needle_answer(n, logits); position++) {
            logits = next_logits(&v->c, n->token, position);
            v->e.tokens++;
        }
    }
}

static void close_needle(Evaluator *v) {
    needle_close(&v->needle);
}

// ---- attention

static void settle_attention(Evaluator *v) {
    observe_settle(&v->observer, &v->e);
}

static void run_attention(Evaluator *v) {
    size_t T;
    observe_begin(&v->observer);
    while (observe_next(&v->observer, v->inputs, &T)) {
        use_angles(&v->c, &v->e, T, T);
        observe_done(&v->observer, T, observe_sequence(&v->c, &v->observer, v->inputs, T));
    }
    observe_end(&v->observer);
}

static void close_attention(Evaluator *v) {
    observe_close(&v->observer);
}

// ---- scores

static void settle_scores(Evaluator *v) {
    v->e.longest = v->e.config->seq_len;
    v->e.work = 0;
}

static void run_scores(Evaluator *v) {
    Weights weights = computer_weights(&v->c);
    if (attention_has(&v->e.config->attn, SCALAR_P) && !v->e.pn_fit)
        fit_pn(&v->e, weights.params + weights.list->scalar[SCALAR_P], v->c.p_n, v->e.longest);
    scores_report(&v->e, weights.list, weights.params);
}

// ---- choice

static void settle_choice(Evaluator *v) {
    choice_settle(&v->choice, &v->e);
}

static void run_choice(Evaluator *v) {
    const ChoiceEnding *ending;
    choice_begin(&v->choice);
    while ((ending = choice_next(&v->choice))) {
        size_t T = ending->count - 1;
        use_angles(&v->c, &v->e, T, T);
        const float *losses = batch_losses(&v->c, ending->ids, ending->ids + 1, NULL, 1, T);
        double sum = 0;
        for (size_t t = ending->from - 1; t < T; t++) sum += losses[t];
        choice_add(&v->choice, sum);
    }
    choice_end(&v->choice);
}

static void close_choice(Evaluator *v) {
    choice_close(&v->choice);
}

static const Task *task_of(const Evaluator *v) {
    // clang-format off
    static const Task TASKS[] = {    // in the order of EvalTask
        {settle_losses,    run_losses,    NULL},               // loss
        {settle_losses,    run_losses,    NULL},               // positions
        {settle_needle,    run_needle,    close_needle},       // needle
        {settle_attention, run_attention, close_attention},    // attention
        {settle_scores,    run_scores,    NULL},               // scores
        {settle_choice,    run_choice,    close_choice},       // choice
    };
    // clang-format on
    return &TASKS[v->e.o.task];
}

// ---- a model

static void *take_array(size_t count, size_t size) {
    void *p = calloc(count, size);
    if (!p) fail(EXIT_RESOURCE, "out of memory for sequences of %zu tokens.\n  Use smaller --seq-lens.", count);
    return p;
}

static void take_arrays(Evaluator *v) {
    size_t T = v->e.longest, N = batch_size(v) * T;
    v->window = (int32_t *)take_array(T + 1, sizeof *v->window);
    v->inputs = (int32_t *)take_array(N, sizeof *v->inputs);
    v->targets = (int32_t *)take_array(N, sizeof *v->targets);
    v->mask = (uint8_t *)take_array(N, sizeof *v->mask);
    v->sums = (double *)take_array(T, sizeof *v->sums);
    v->counts = (uint64_t *)take_array(T, sizeof *v->counts);
}

static void free_arrays(Evaluator *v) {
    free(v->window);
    free(v->inputs);
    free(v->targets);
    free(v->mask);
    free(v->sums);
    free(v->counts);
}

// Finds and loads the checkpoint. If it is deleted meanwhile, because its run is pruning, tries again with a newer one.
static void open_model(Evaluator *v) {
    Eval *e = &v->e;
    Error error;
    for (int attempt = 1;; attempt++) {
        bool planned = eval_find(e, &error);
        if (planned) {
            if (!e->longest) task_of(v)->settle(v);
            eval_check(e);
            plan_computer(&v->c, e, batch_size(v), e->longest);
            take_computer(&v->c);
            Weights weights = computer_weights(&v->c);
            if (weights_load(&weights, e->folder, &e->own, &error)) break;
        }
        if (attempt == CHECKPOINT_ATTEMPTS || !checkpoint_vanished(e->folder)) fail_with(&error);
        if (planned) close_computer(&v->c);
    }
    computer_ready(&v->c);
    v->c.bar = &e->bar;
    take_arrays(v);
}

static void close_model(Evaluator *v) {
    eval_close_model(&v->e);
    if (task_of(v)->close) task_of(v)->close(v);
    close_computer(&v->c);
    free_arrays(v);
}

// Switches to the given normalizer and initializes its new learned scalars. The rest of the model stays unchanged.
static void switch_normalizer(Evaluator *v) {
    eval_switch(&v->e);
    Weights weights = computer_weights(&v->c);
    weights_start_scalars(&weights, &v->e.own);
    computer_ready(&v->c);
}

static void evaluate(Evaluator *v) {
    Eval *e = &v->e;
    const AttentionList *attn = &e->config->attn;
    double start = now();
    printf("\nunder %s%s\n", attn->text, e->after ? ", without training" : ", the checkpoint's own");
    if (attention_has(attn, SCALAR_P) && e->o.pn_extrapolate == PN_LOG && !e->pn_fit) {
        Weights weights = computer_weights(&v->c);
        fit_pn(e, weights.params + weights.list->scalar[SCALAR_P], v->c.p_n, e->longest);
        replace_pn(&v->c);
    }
    task_of(v)->run(v);
    eval_finish(e);
    v->seconds += now() - start;
}

// The model's part of the whole call, for the progress bar.
static void add_work(Eval *e) {
    e->bar.total += e->switches ? 2 * e->work : e->work;
}

// Opens every model and closes it again, so that a wrong one ends the program before any is evaluated.
static void check_models(Evaluator *v) {
    v->e.checking = true;
    while (v->e.model_at < v->e.model_count) {
        open_model(v);
        add_work(&v->e);
        close_model(v);
    }
    v->e.model_at = 0;
    v->e.checking = false;
}

// Before a model is evaluated: prints what will be, and takes the folder and starts the bar before the first one.
static void begin(Evaluator *v) {
    Eval *e = &v->e;
    bool first = e->model_at == 0;
    if (first) eval_take_folder(e);
    eval_start(e);
    if (first && e->model_count == 1) add_work(e);
    if (first) bar_start(&e->bar);
}

// Evaluates the next model, after a switch to another normalizer too, and goes on to the one after it.
static void evaluate_model(Evaluator *v) {
    open_model(v);
    begin(v);
    evaluate(v);
    if (v->e.switches) {
        switch_normalizer(v);
        evaluate(v);
    }
    eval_record_model(&v->e);
    close_model(v);
}

// After the last model.
static void finish(Evaluator *v) {
    Eval *e = &v->e;
    if (e->o.task == TASK_LOSS || e->o.task == TASK_POSITIONS) losses_compare(e);
    if (e->o.out) eval_write(e);
    flush_stdout("the results");
    if (e->tokens)
        fprintf(stderr, "%s: %s token%s in %.2f s, %.1f tokens/s\n", PROGRAM, human_grouped(e->tokens).text,
                e->tokens == 1 ? "" : "s", v->seconds, (double)e->tokens / v->seconds);
}

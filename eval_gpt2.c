// Evaluates checkpoints on the CPU: the loss at any sequence length and position, the needle in a haystack, where
// attention goes, the learned scalars, and multiple choice; under the checkpoint's normalizer and immediately after a
// switch to another one. The model is the trainer's (train_gpt2.c). This file runs it for the tasks; eval/program.h has
// what eval_gpt2.cu shares, and eval/ what the tasks measure.
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"    // only some of the trainer's functions are used here
#include "train_gpt2.c"

#include "model/decode.h"
#pragma GCC diagnostic pop

#include "eval/eval.h"
#include "eval/needle.h"
#include "eval/observe.h"

static const char PROGRAM[] = "eval_gpt2";

typedef struct {
    Model model;
    Decoder decoder;    // for needles
    float *weights;     // of attention, see plan_computer()
    float *p_n;         // (T) a fit that replaces the learned p_n
    Bar *bar;
} Computer;

static ModelConfig *computer_config(Computer *c) {
    return &c->model.config;
}

// Plans the memory for B sequences of at most T tokens.
static void plan_computer(Computer *c, const Eval *e, size_t B, size_t T) {
    Model *m = &c->model;
    size_t heads = m->config.layers * m->config.heads, threads = (size_t)omp_get_max_threads();
    const AttentionList *others[] = {&e->given};
    m->list = tensors_of(&m->config, others, 1);
    m->others = others;
    m->other_count = 1;
    m->doc_mask = e->o.doc_mask;
    bool decodes = e->o.task == TASK_NEEDLE;
    plan_parameters(m, false, e->o.dtype == EVAL_BF16 || (decodes && weights_are_bf16(&m->config, e->folder)));
    gemm_start(&m->mm, e->o.dtype == EVAL_BF16);
    if (decodes) {
        plan_decoder(&c->decoder, m, &m->plan, 1, T, T);    // a prompt goes back to what it shares
        memory_add(&m->plan, "attention weights", (void **)&c->weights,
                   FLOATS(heads * T));    // (layers,NH,T): one query
    } else if (e->o.task != TASK_SCORES) {
        plan_activations(m, 1, B, T);    // without a backward pass, all layers share one layer's activations
        for (size_t i = 0; i < e->count; i++) plan_shape(m, (B * T) / e->lengths[i].T, e->lengths[i].T);
    }
    if (e->o.task == TASK_ATTENTION)    // a block for each thread
        memory_add(&m->plan, "attention weights", (void **)&c->weights, FLOATS(threads * OBSERVED_ROWS * T));
    memory_add(&m->plan, "p_n", (void **)&c->p_n, FLOATS(T));
    m->others = NULL;
    m->other_count = 0;
}

// Allocates it. Ends the program if it does not fit.
static void take_computer(Computer *c) {
    c->model.plan.remedy = "Use smaller --seq-lens.";
    memory_check(&c->model.plan, 1);
    memory_take(&c->model.plan);
}

static Weights computer_weights(Computer *c) {
    return weights_of(&c->model);
}

// Call it after changing the weights.
static void computer_ready(Computer *c) {
    Model *m = &c->model;
    if (m->B) model_ready(m);
    if (c->decoder.m) decoder_ready(&c->decoder);
    round_parameters(m);
}

static void close_computer(Computer *c) {
    gemm_end(&c->model.mm);
    free(c->decoder.caches);
    memory_release(&c->model.plan);
    tensors_free(&c->model.list);
    *c = (Computer){0};
}

// Uses c->p_n from now on.
static void replace_pn(Computer *c) {
    c->model.p_n = c->p_n;
}

// From now on, the first T positions turn by the angles of a text of `length` tokens.
static void use_angles(Computer *c, const Eval *e, size_t length, size_t T) {
    Model *m = &c->model;
    const AttentionList *attn = &m->config.attn;
    for (size_t i = 0; i < attention_tables(attn); i++) {
        RopeAngles angles = eval_angles(e, attention_table_base(attn, i), length);
        if (c->decoder.m) rope_table(decoder_cosines(&c->decoder, i), decoder_sines(&c->decoder, i), T, angles);
        else rope_table(m->cosines + angles_at(m, i), m->sines + angles_at(m, i), T, angles);
    }
}

// The share of attention's rows that have been all-zero since the last call.
static double all_zero_share(Computer *c) {
    Model *m = &c->model;
    double share = m->rows ? (double)m->all_zero_rows / (double)m->rows : 0;
    m->rows = m->all_zero_rows = 0;
    return share;
}

// The loss of each token that counts, 0 for the others.
//   inputs, targets (B,T)   mask (B,T) or NULL   Returns (B,T), valid until the next call
static const float *batch_losses(Computer *c, const int32_t *inputs, const int32_t *targets, const uint8_t *mask,
                                 size_t B, size_t T) {
    Model *m = &c->model;
    size_t layers = m->config.layers;
    model_embed(m, inputs, B, T);
    for (size_t l = 0; l < layers; l++) {
        block_of(m)->forward(m, l, B, T);
        bar_within(c->bar, l + 1, layers);
    }
    model_final_norm(m, B * T);
    model_loss(m, targets, mask, B * T, 0, false);
    return m->activations.losses;
}

// The weights of all heads of a layer, whose q and k the forward pass has just computed.
static void observe_heads(Computer *c, Observer *o, size_t l, size_t T) {
    Model *m = &c->model;
    AttentionShape shape = attention_shape(&m->config, l, 1, T);
    Activations of = layer_of(m, l);
    AttentionInput in = attention_input(m, l, projected_of(&of));
    #pragma omp parallel for schedule(dynamic)
    for (size_t h = 0; h < shape.NH; h++)
        observe_head(o, c->weights + (size_t)omp_get_thread_num() * OBSERVED_ROWS * T, in, layer_scalars(m, l), shape,
                     (AttentionRows){.h = h}, l);
}

// Runs a sequence through the model and shows the observer every layer. Returns the losses of its tokens but the first
// (T - 1), valid until the next call.
static const float *observe_sequence(Computer *c, Observer *o, const int32_t *tokens, size_t T) {
    Model *m = &c->model;
    size_t layers = m->config.layers;
    model_embed(m, tokens, 1, T);
    for (size_t l = 0; l < layers; l++) {
        block_of(m)->forward(m, l, 1, T);
        observe_heads(c, o, l, T);
        observe_layer(o, l, residual(m, l + 1), T, m->config.channels);
        bar_within(c->bar, l + 1, layers);
    }
    model_final_norm(m, T);
    model_loss(m, tokens + 1, NULL, T - 1, 0, false);
    return m->activations.losses;
}

_Static_assert(SHARED_BLOCK % PREFILL_ROWS == 0, "prompts share whole blocks of the decoder");

// Feeds the rest of a prompt and shows the needle the weights of its last token. Returns the logits after it.
static const float *prompt_logits(Computer *c, Needle *n) {
    const NeedleTrial *t = &n->trial;
    Decoder *d = &c->decoder;
    size_t cached = t->shared, at = cached;
    for (; t->count - at > SHARED_BLOCK; at += SHARED_BLOCK) {
        decode_span(d, t->tokens + at, SHARED_BLOCK, 0, at);
        bar_within(c->bar, at + SHARED_BLOCK - cached, t->count - cached);
    }
    d->weights = c->weights;
    size_t last = decode_span(d, t->tokens + at, t->count - at, 0, at) - 1;
    needle_weights(n, c->weights, d->length);
    d->weights = NULL;
    return decode_logits(d, last, 1, 0);
}

static const float *next_logits(Computer *c, int32_t token, size_t position) {
    decode(&c->decoder, &(DecodeRow){token, 0, position}, 1);
    return decode_logits(&c->decoder, 0, 1, 0);
}

#include "eval/program.h"

int main(int argc, char **argv) {
    static Evaluator v;
    start_program(PROGRAM);
    eval_open(&v.e, computer_config(&v.c), argc, argv);
    start_threads(v.e.o.threads);
    if (v.e.model_count > 1) check_models(&v);
    while (v.e.model_at < v.e.model_count) evaluate_model(&v);
    finish(&v);
    return EXIT_DONE;
}

// Evaluates checkpoints on a GPU: the same tasks, flags and results as eval_gpt2.c, section for section. The model is
// that of train_gpt2.cu. Runs on a CPU, for small models, as eval_gpt2cu_on_cpu.
//
// The activations of all layers stay on the device from one forward pass to the next, so they serve as the key-value
// cache of a needle's answer, and of prompts of one haystack: a pass computes only the rows from Model.from on. Weights
// of attention, which the kernels never store, are computed on the host: from the q and k of a layer, or, where only
// those of one query are wanted, from its scores.
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"    // only some of the trainer's functions are used here
#ifdef __NVCC__
#pragma nv_diag_suppress 177    // the same
#endif
#include "train_gpt2.cu"
#pragma GCC diagnostic pop

#include <omp.h>

#include "attention/attention_cpu.h"
#include "cuda/scores.cuh"
#include "eval/eval.h"
#include "eval/needle.h"
#include "eval/observe.h"
#include "math/real.h"

static const char PROGRAM[] = "eval_gpt2cu";

struct Computer {
    ModelConfig config;
    TrainOptions options;    // those that also matter here
    // The model is one of these. It has no config until plan_computer() has planned it.
    ModelOf<float> in_float32;
    ModelOf<bf16> in_bf16;
    Model *model;
    cudaStream_t stream;
    float *losses;       // (B,T)
    float *q, *k;        // (T,NH,HS), (T,NKV,HS) of a layer
    float *x;            // (T,C) the residual stream
    float *logits;       // (VP)
    float *weights;      // of attention, see plan_computer()
    float *p_n;          // (T) a fit that replaces the learned p_n
    float *p_n_there;    // on the device
    float *scores;       // on the device, of a prompt's last token (layers,NH,T); only for needles
    int32_t *ints;       // (3 B T) a batch
    int32_t *first;      // (T) the first key that each position of a layer sees
    void *raw;           // what is copied from the device, before it is widened
    uint64_t rows;       // attention rows since the last all_zero_share()
    Bar *bar;
};

// Calls f with the model as what it is.
template <class F>
static auto by_type(Computer *c, F f) {
    return c->model == &c->in_bf16 ? f(&c->in_bf16) : f(&c->in_float32);
}

static ModelConfig *computer_config(Computer *c) {
    return &c->config;
}

// ---- memory

// Plans the memory for B sequences of at most T tokens.
static void plan_computer(Computer *c, const Eval *e, size_t B, size_t T) {
    Model *m = c->model = e->o.dtype == EVAL_BF16 ? (Model *)&c->in_bf16 : &c->in_float32;
    const ModelConfig *config = m->config = &c->config;
    const AttentionList *others[] = {&e->given};
    size_t N = B * T, heads = config->layers * config->heads, VP = padded_vocab(config);
    if (!c->stream) {
        device_start();
        CUDA_CHECK(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    }
    m->stream = c->stream;
    m->list = tensors_of(config, others, 1);
    c->options.doc_mask = e->o.doc_mask;
    c->options.recompute = c->options.deterministic = true;
    m->o = &c->options;
    m->forward_only = true;
    IntList lengths = {{(int64_t)T}, 1};
    for (size_t i = 0; i < e->count; i++) lengths.values[i] = (int64_t)e->lengths[i].T;
    if (e->count) lengths.count = e->count;
    by_type(c, [&](auto *typed) { plan_model(typed, others, 1, &lengths, B, T); });
    memory_add(&m->plan, "p_n", (void **)&c->p_n_there, T * sizeof(float));
    if (e->o.task == TASK_NEEDLE) memory_add(&m->plan, "scores", (void **)&c->scores, heads * T * sizeof(float));

    MemoryPlan *plan = &m->host_plan;
    memory_add(plan, "parameters", (void **)&m->host.params, m->list.floats * sizeof(float));
    memory_add(plan, "losses", (void **)&c->losses, N * sizeof(float));
    memory_add(plan, "batch", (void **)&c->ints, 3 * N * sizeof(int32_t));
    memory_add(plan, "batch", (void **)&c->first, T * sizeof(int32_t));
    memory_add(plan, "logits", (void **)&c->logits, VP * sizeof(float));
    memory_add(plan, "p_n", (void **)&c->p_n, T * sizeof(float));
    memory_add(plan, "activations", (void **)&c->q, T * query_width(config) * sizeof(float));
    memory_add(plan, "activations", (void **)&c->k, T * key_width(config) * sizeof(float));
    memory_add(plan, "activations", (void **)&c->x, T * config->channels * sizeof(float));
    memory_add(plan, "activations", &c->raw,
               larger(VP, T * larger(query_width(config), config->channels)) * sizeof(float));
    // Needles: of one query, (layers,NH,T). Attention: a block of rows for each thread.
    size_t blocks = (size_t)omp_get_max_threads() * OBSERVED_ROWS;
    memory_add(plan, "attention weights", (void **)&c->weights, larger(heads, blocks) * T * sizeof(float));
}

// Allocates it. Ends the program if it does not fit.
static void take_computer(Computer *c) {
    Model *m = c->model;
    size_t left, all;
    CUDA_CHECK(cudaMemGetInfo(&left, &all));
    m->host_plan.remedy = "Use smaller --seq-lens.";
    if (m->plan.total > left)
        fail(EXIT_RESOURCE, "this run needs %s of device memory, but only %s is free.\n  %s",
             human_bytes((double)m->plan.total).text, human_bytes((double)left).text, m->host_plan.remedy);
    memory_check(&m->host_plan, 1);
    memory_take(&m->host_plan);
    take_model(m);
    m->host.config = m->config;
    m->host.list = &m->list;
}

static Weights computer_weights(Computer *c) {
    return c->model->host;
}

// Call it after changing the weights.
static void computer_ready(Computer *c) {
    Model *m = c->model;
    CUDA_CHECK(cudaMemcpy(m->params, m->host.params, m->list.floats * sizeof(float), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());    // the copy does not run on our stream
    round_parameters(m, 0);
}

static void close_computer(Computer *c) {
    Model *m = c->model;
    CUDA_CHECK(cudaDeviceSynchronize());
    if (m->params) matmul_end(&m->matmul);
    for (size_t i = 0; i < m->plan.count; i++) {
        CUDA_CHECK(cudaFree(*m->plan.rows[i].where));
        *m->plan.rows[i].where = NULL;
    }
    memory_release(&m->host_plan);
    tensors_free(&m->list);
    free(m->parts);
    cudaStream_t stream = c->stream;
    *c = Computer();
    c->stream = stream;
}

// ---- what the tasks need of the model

// Uses c->p_n from now on.
static void replace_pn(Computer *c) {
    CUDA_CHECK(cudaMemcpy(c->p_n_there, c->p_n, c->model->T * sizeof(float), cudaMemcpyHostToDevice));
    c->model->p_n = c->p_n_there;
}

// From now on, the first T positions turn by the angles of a text of `length` tokens.
static void use_angles(Computer *c, const Eval *e, size_t length, size_t T) {
    const AttentionList *attn = &c->config.attn;
    for (size_t i = 0; i < attention_tables(attn); i++)
        upload_rope_table(c->model, i, T, eval_angles(e, attention_table_base(attn, i), length));
    CUDA_CHECK(cudaDeviceSynchronize());
}

// The share of attention's rows that have been all-zero since the last call.
static double all_zero_share(Computer *c) {
    Model *m = c->model;
    unsigned long long count = 0;
    CUDA_CHECK(cudaStreamSynchronize(c->stream));
    CUDA_CHECK(cudaMemcpy(&count, m->all_zero_rows + 1, sizeof count, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemset(m->all_zero_rows, 0, 2 * sizeof count));
    CUDA_CHECK(cudaDeviceSynchronize());
    double share = c->rows ? (double)count / (double)c->rows : 0;
    c->rows = 0;
    return share;
}

// Copies tokens, targets and where documents begin to the device.
static void upload_tokens(Computer *c, const int32_t *inputs, const int32_t *targets, size_t B, size_t T) {
    Model *m = c->model;
    size_t N = B * T;
    memcpy(c->ints, inputs, N * sizeof(int32_t));
    if (targets) memcpy(c->ints + N, targets, N * sizeof(int32_t));
    if (m->o->doc_mask) document_starts(c->ints + 2 * N, inputs, B, T, m->config->end_of_text);
    m->first = m->o->doc_mask ? m->batch + 2 * N : NULL;
    CUDA_CHECK(cudaMemcpyAsync(m->batch, c->ints, 3 * N * sizeof(int32_t), cudaMemcpyHostToDevice, c->stream));
    c->rows += m->config->layers * N * m->config->heads;
}

static float host_float(float x) {
    return x;
}

static float host_float(bf16 x) {
    uint16_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bf16_to_float(bits);
}

// Copies `rows` rows of `width` numbers, `stride` apart, from the device and widens them.
template <class X>
static void rows_to_host(Computer *c, float *out, const X *there, size_t rows, size_t width, size_t stride) {
    const X *raw = (const X *)c->raw;
    CUDA_CHECK(cudaMemcpy2DAsync(c->raw, width * sizeof(X), there, stride * sizeof(X), width * sizeof(X), rows,
                                 cudaMemcpyDeviceToHost, c->stream));
    CUDA_CHECK(cudaStreamSynchronize(c->stream));
    for (size_t i = 0; i < rows * width; i++) out[i] = host_float(raw[i]);
}

// The losses of the N rows that have just been computed, on the host.
static const float *losses_to_host(Computer *c, const float *losses, size_t N) {
    CUDA_CHECK(cudaMemcpyAsync(c->losses, losses, N * sizeof(float), cudaMemcpyDeviceToHost, c->stream));
    CUDA_CHECK(cudaStreamSynchronize(c->stream));
    return c->losses;
}

// The loss of each token that counts, 0 for the others.
//   inputs, targets (B,T)   mask (B,T) or NULL   Returns (B,T), valid until the next call
static const float *batch_losses(Computer *c, const int32_t *inputs, const int32_t *targets, const uint8_t *mask,
                                 size_t B, size_t T) {
    size_t N = B * T;
    upload_tokens(c, inputs, targets, B, T);
    return by_type(c, [&](auto *m) {
        if (mask) CUDA_CHECK(cudaMemcpyAsync(m->mask, mask, N, cudaMemcpyHostToDevice, m->stream));
        model_forward(m, m->batch, B, T, 1);
        model_loss(m, m->sums + SUM_VALIDATION, m->batch + N, mask ? m->mask : NULL, N, 0.0f, false);
        return losses_to_host(c, m->activations.losses, N);
    });
}

// Attention's input on the host: q and k of layer l, which has just been computed.
template <class X>
static AttentionInput host_input(Computer *c, const ModelOf<X> *m, size_t l, size_t T) {
    const ModelConfig *config = m->config;
    size_t HS = head_size(config), K = query_width(config), KV = key_width(config);
    FlashInput<X> in = attention_input(m, projected_of(layer_of(m, l, 0)), l);
    if (in.first)
        CUDA_CHECK(cudaMemcpyAsync(c->first, in.first, T * sizeof *c->first, cudaMemcpyDeviceToHost, c->stream));
    rows_to_host(c, c->q, in.q.p, T, K, in.q.row);
    rows_to_host(c, c->k, in.k.p, T, KV, in.k.row);
    AttentionInput host = {};
    host.q = {c->q, K, HS};
    host.k = {c->k, KV, HS};
    host.first = in.first ? c->first : NULL;
    return host;
}

// The learned scalars of a layer on the host.
static Scalars host_scalars(const Computer *c, size_t l) {
    const Model *m = c->model;
    Scalars scalars = scalars_of(&m->list, m->host.params, l, &m->config->attn);
    if (scalars.of[SCALAR_P] && m->p_n) scalars.of[SCALAR_P] = c->p_n;
    return scalars;
}

static AttentionShape host_shape(const ModelConfig *config, size_t layer, size_t T) {
    AttentionShape shape = {};
    shape.normalizer = normalizer_of(config, layer);
    shape.B = 1;
    shape.T = T;
    shape.NH = config->heads;
    shape.NKV = config->kv_heads;
    shape.HS = head_size(config);
    shape.VS = value_size(config);
    shape.L = (int)config->seq_len;
    shape.window = attention_of(config, layer)->window;
    return shape;
}

// Runs a sequence through the model and shows the observer every layer. Returns the losses of its tokens but the first
// (T - 1), valid until the next call.
static const float *observe_sequence(Computer *c, Observer *o, const int32_t *tokens, size_t T) {
    size_t C = c->config.channels, layers = c->config.layers;
    upload_tokens(c, tokens, NULL, 1, T);
    return by_type(c, [&](auto *m) {
        model_embed(m, m->batch, 1, T);
        for (size_t l = 0; l < layers; l++) {
            block_of(m)->forward(m, l, 1, T, 1);
            AttentionInput in = host_input(c, m, l, T);
            #pragma omp parallel for schedule(dynamic)
            for (size_t h = 0; h < c->config.heads; h++) {
                AttentionRows at = {};
                at.h = h;
                observe_head(o, c->weights + (size_t)omp_get_thread_num() * OBSERVED_ROWS * T, in, host_scalars(c, l),
                             host_shape(&c->config, l, T), at, l);
            }
            rows_to_host(c, c->x, layer_of(m, l, 0).x_next, T, C, C);
            observe_layer(o, l, c->x, T, C);
            bar_within(c->bar, l + 1, layers);
        }
        model_final_norm(m, T);
        model_loss(m, m->sums + SUM_VALIDATION, m->batch + 1, NULL, T - 1, 0.0f, false);
        return losses_to_host(c, m->activations.losses, T - 1);
    });
}

// The logits after the last of T tokens, whose normalized outputs the forward pass has computed.
static const float *last_logits(Computer *c, size_t T) {
    size_t VP = padded_vocab(&c->config);
    by_type(c, [&](auto *m) {
        model_final_norm(m, T);
        model_last_logits(m, T);
        rows_to_host(c, c->logits, m->activations.logits, 1, VP, VP);
    });
    cap_logits(c->model, c->logits);
    return c->logits;
}

// While one of these exists, T is each row's own length so far, as in the cached decoding of eval_gpt2.
struct ByRow {
    AttentionList *attn, own;
    explicit ByRow(AttentionList *attn) : attn(attn), own(*attn) {
        *attn = attention_by_row(&own);
    }
    ~ByRow() {
        *attn = own;
    }
    ByRow(const ByRow &) = delete;
};

// Computes the scores of a prompt's last token in layer l, whose q and k have just been computed.
template <class X>
static void last_scores(Computer *c, const ModelOf<X> *m, size_t l, size_t T) {
    FlashInput<X> in = attention_input(m, projected_of(layer_of(m, l, 0)), l);
    size_t NH = m->config->heads, NKV = m->config->kv_heads;
    query_scores<X>(c->scores + l * NH * T,
                    {in.q.p + (T - 1) * in.q.row, in.k.p, in.k.row, T, NH, NKV, head_size(m->config)}, m->stream);
}

// The weights of a prompt's last token in c->weights (layers,NH,T), from its scores.
static void last_weights(Computer *c, size_t T) {
    size_t NH = c->config.heads, heads = c->config.layers * NH;
    CUDA_CHECK(cudaMemcpyAsync(c->weights, c->scores, heads * T * sizeof(float), cudaMemcpyDeviceToHost, c->stream));
    CUDA_CHECK(cudaStreamSynchronize(c->stream));
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < heads; i++) {
        AttentionShape shape = host_shape(&c->config, i / NH, 1);
        shape.cached = true;
        shape.past = T - 1;
        int32_t first = (int32_t)(T - attention_keys(attention_of(&c->config, i / NH), T));
        attention_weights_of_scores(c->weights + i * T, T, NULL, &first, host_scalars(c, i / NH), shape,
                                    (AttentionRows){0, i % NH, 0, 1});
    }
}

// The kernels' n is the number of visible keys, which in a window is not the row's length.
static void check_by_row(const Computer *c) {
    for (size_t l = 0; l < c->config.layers; l++) {
        const LayerAttention *layer = attention_of(&c->config, l);
        Normalizer by_row = normalizer_by_row(&layer->normalizer);
        if (layer->window && !normalizer_equal(&layer->normalizer, &by_row))
            fail(EXIT_USAGE,
                 "--task needle: %s has a window and depends on each row's length, which eval_gpt2cu cannot compute.\n"
                 "  Use eval_gpt2.",
                 c->config.attn.text);
    }
}

// Feeds the rest of a prompt and shows the needle the weights of its last token. Returns the logits after it.
static const float *prompt_logits(Computer *c, Needle *n) {
    const NeedleTrial *t = &n->trial;
    size_t T = t->count;
    check_by_row(c);
    ByRow by_row(&c->config.attn);
    upload_tokens(c, t->tokens, NULL, 1, T);
    c->model->from = t->shared;
    by_type(c, [&](auto *m) {
        model_embed(m, m->batch, 1, T);
        for (size_t l = 0; l < c->config.layers; l++) {
            block_of(m)->forward(m, l, 1, T, 1);
            last_scores(c, m, l, T);
        }
    });
    const float *logits = last_logits(c, T);
    last_weights(c, T);
    needle_weights(n, c->weights, T);
    c->model->from = 0;
    return logits;
}

// Feeds a token of the answer. Returns the logits after it.
static const float *next_logits(Computer *c, int32_t token, size_t position) {
    size_t T = position + 1;
    ByRow by_row(&c->config.attn);
    c->ints[position] = token;
    c->model->from = position;
    by_type(c, [&](auto *m) {
        CUDA_CHECK(
            cudaMemcpyAsync(m->batch + position, c->ints + position, sizeof token, cudaMemcpyHostToDevice, m->stream));
        model_forward(m, m->batch, 1, T, 1);
    });
    const float *logits = last_logits(c, T);
    c->model->from = 0;
    return logits;
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

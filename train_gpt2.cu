// Trains a Llama-style GPT on one or more GPUs with a choice of attention normalizers (--attn). Same structure and same
// numbers as train_gpt2.c; comments there about the network also apply here.
//
//   1. Layers       not here: one kernel file each in cuda/, and attention/flash.h
//   2. Model        the parameters, the activations, and the device memory for both
//   3. Passes       forward, loss, backward
//   4. Update       the gradients summed over ranks, their norm, AdamW and Muon
//   5. Training     main(), which chooses X, and train(), which contains the training loop
//
// X is the type of the activations and of the weights that matmuls read: float or bf16 (--dtype). With either, row
// statistics, parameter gradients, the optimizer's state and master weights are float32. Everything runs on one stream,
// except what is exchanged between ranks. The host only queues a step: loss, norm and clip factor stay on the device,
// and the host reads them once it has queued the first batch of the next step. It queues most of a micro-batch as CUDA
// graphs. Shapes: B sequences of T tokens, N = B·T rows, C channels, NH heads of size HS, feed-forward width F, and a
// vocabulary of V tokens (VP when padded).

#include "cuda/gpu.cuh"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention/flash.h"
#include "cuda/adamw.cuh"
#include "cuda/bias.cuh"
#include "cuda/check.h"
#include "cuda/classifier.cuh"
#include "cuda/collective.h"
#include "cuda/device.h"
#include "cuda/embedding.cuh"
#include "cuda/gau.cuh"
#include "cuda/graphs.h"
#include "cuda/matmul.h"
#include "cuda/matmul_file.h"
#include "cuda/muon.cuh"
#include "cuda/norms.cuh"
#include "cuda/output_gate.cuh"
#include "cuda/qk_norm.cuh"
#include "cuda/rmsnorm.cuh"
#include "cuda/rope.cuh"
#include "cuda/swiglu.cuh"
#include "math/adamw.h"
#include "math/gemm.h"
#include "model/activations.h"
#include "model/model.h"
#include "model/rope.h"
#include "model/weights.h"
#include "run/profile.h"
#include "run/run.h"
#include "runtime/human.h"
#include "runtime/memory.h"
#include "runtime/process.h"

// ---------------------------------------------------------------------------------------------------------------------
// Phase timers for --profile: phase() ends the current phase and starts the next. Phases are timed by events on the
// stream, and appear as ranges in NVIDIA's profilers.

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else
static void nvtxRangePushA(const char *name) {
    (void)name;
}
static void nvtxRangePop(void) {}
#endif

struct Mark {
    cudaEvent_t event;
    Phase phase;    // the phase that starts at this mark
};

struct PhaseTimers {
    bool on, aside;             // aside: charge everything to PHASE_ASIDE
    std::vector<Mark> marks;    // the first mark_count are in use
    size_t mark_count;
    double seconds[PHASE_COUNT], first_step[PHASE_COUNT], reported[PHASE_COUNT];
};

// ---------------------------------------------------------------------------------------------------------------------
// 2. Model

#ifndef LOSS_ROWS    // a test defines fewer
#define LOSS_ROWS ((size_t)8192)    // rows whose logits are in memory at a time, or more: plan_more_logits()
#endif

// model/activations.h describes the arrays. layer_of() returns those of one layer, in the same struct.
#define FIELD(name, type, ...) type name;
template <class X>
struct Activations {
    using Numbers = X *;
    using MatmulInput = X *;
    using Statistics = float *;
    ACTIVATIONS(FIELD)
    GPU_ACTIVATIONS(FIELD)
    float *stats;    // (layers, layer_stats) statistics of the attention rows
    X *x_next;       // of a layer: x of the next
};
#undef FIELD

// The losses of this step so far; the squared gradients (next to them, because both are summed over the ranks at once);
// the losses of a validation.
enum { SUM_STEP, SUM_SQUARES, SUM_VALIDATION, SUM_PARTIALS };

// What the host reads about a step once the device has finished it.
struct StepReport {
    StepNumbers numbers;
    unsigned long long all_zero_rows;
};

// When the passes of a micro-batch start and end on the device.
struct PassTimes {
    cudaEvent_t start, end;
    bool pending;    // not in Model.pass_seconds yet
};

struct Model {
    const ModelConfig *config;
    const TrainOptions *o;    // the flags
    TensorList list;
    cudaStream_t stream;
    PhaseTimers timers;
    bool in_bf16;         // the element type is bf16
    bool zero;            // --zero 1 with several ranks
    bool forward_only;    // no backward pass: no memory for gradients and moments
    const float *p_n;     // if not NULL, replaces the learned p_n of the normalizer: (T) or longer

    float *grads;         // (list.floats)
    bf16 *params_bf16;    // (list.floats) a rounded copy for the matmuls, with --dtype bf16
    // The parameters, with --dtype bf16 the master weights. Those of tensor i start at masters[i]: where they are in
    // `list`, or with `sharded` where find_masters() puts them.
    float *params;    // (master_floats)
    size_t *masters, master_floats;
    CollectivePart *vectors;    // (vector_count) with `sharded`: the vectors in params, and the ranks that update them
    size_t vector_count;
    bool sharded;    // ZeRO-1 in bf16: this rank has no master weights of matrices that other ranks update
    // With ZeRO-1, the parameters that other ranks have updated in a step arrive bucket by bucket. The last `arriving`
    // buckets are those that the stream has not waited for yet.
    cudaEvent_t *gathered;    // (bucket_count) a bucket is there
    size_t arriving;
    CollectivePart *parts;    // (list.count) each tensor with the alignment gap after it, and the rank that updates it
    // The state of the tensors that this rank owns, without gaps, in the order of their update rules. That of tensor i
    // starts at states[i].
    float *state[STATE_ARRAYS];    // (state_floats)
    size_t *states, state_floats[STATE_ARRAYS];
    AdamSegment *segments;    // the trained tensors that this rank owns
    size_t segment_count, segment_blocks;
    size_t adam_count, adam_blocks;    // the first of them, which AdamW updates
    MuonScratch muon;                  // with Muon
    Matmul muon_matmul;
    Matmul sample_matmul;    // for samples, whose shapes are too many to measure and store

    size_t B, T, layer_stats;
    ActivationWidths widths;
    // The first row that a forward pass computes, of its only sequence. The rows before it keep what an earlier pass
    // computed, as in a key-value cache (eval_gpt2.cu). 0 in training.
    size_t from;
    size_t loss_rows;                     // rows whose logits are in memory at a time
    float *cosines, *sines;               // (tables, T, HS/2)
    float *partials;                      // (partials_size) partial sums over rows, for parameter gradients
    size_t partials_size;                 // the most that a kernel needs
    double *sums;                         // SUM_STEP ..., then partial sums of squares
    StepNumbers *numbers;                 // of this step
    unsigned long long *all_zero_rows;    // counts of all-zero attention rows: in steps, in validations
    void *scratch, *workspace;            // for attention, for cuBLASLt
    void *wire;                           // for sums over ranks
    int32_t *batch;                       // inputs, targets, and the rows of each token in order: see BatchTokens
    uint8_t *mask;

    const int32_t *first;    // of the current batch, see BatchTokens
    int32_t *windows;        // (windows, B, T): the same for layers with each of the normalizers' windows
    uint64_t rows;           // attention rows of this step so far
    MemoryPlan plan;         // of device memory

    Weights host;    // copies of parameters and moments, for files
    MemoryPlan host_plan;
    Matmul matmul;
    MatmulFile matmul_file;    // of --matmuls
    Graphs graphs;             // of micro-batches
    Collective *collective;    // NULL with a single rank
    struct {                   // staging buffers for batches: one is filled while the other is copied to the device
        int32_t *ints;
        uint8_t *mask;
        cudaEvent_t copied;
    } slots[2];
    // With several ranks, of the newest micro-batches. When the host may fill a slot again, the device has finished the
    // passes of three micro-batches ago.
    PassTimes passes[3];
    double pass_seconds;           // of the oldest step whose report the host has not read
    size_t micro_batches;          // so far
    size_t reported_batches;       // of these, up to the end of the newest step
    StepReport *report;            // pinned: the newest step's, once `reported` has happened
    cudaEvent_t reported;          // the device has finished that step
    bool unread;                   // the host has queued that step and not read its report yet
    uint64_t reported_rows;        // attention rows of that step
    size_t reported_marks;         // marks up to its end
    int32_t *starts;               // (V + 1) scratch for embedding_plan()
    float *host_logits;            // (VP) for samples
    double *host_sums;             // a copy of the partial sums in `sums`, with --norms-every
    uint16_t *host_logits_bf16;    // (VP) as received from the device, with --dtype bf16
    size_t slot;
};

// With the arrays of element type X
template <class X>
struct ModelOf : Model {
    Activations<X> activations;
};

static void phase(Model *m, Phase next) {
    PhaseTimers *t = &m->timers;
    if (!t->on || (t->aside && next != PHASE_ASIDE)) return;
    if (t->mark_count) nvtxRangePop();
    nvtxRangePushA(phase_names[next]);
    if (t->mark_count == t->marks.size()) {
        t->marks.push_back({});
        CUDA_CHECK(cudaEventCreate(&t->marks.back().event));
    }
    Mark *mark = &t->marks[t->mark_count++];
    mark->phase = next;
    CUDA_CHECK(cudaEventRecord(mark->event, m->stream));
}

static const float *weight(const ModelOf<float> *m, size_t offset) {
    return m->params + offset;
}

static const bf16 *weight(const ModelOf<bf16> *m, size_t offset) {
    return m->params_bf16 + offset;
}

// A vector of weights, which kernels read in float32. `offset` is that of its tensor.
static float *weight32(const Model *m, size_t offset) {
    if (!m->sharded) return m->params + offset;
    auto before = [](const CollectivePart &part, size_t at) { return part.from < at; };
    return m->params + m->masters[std::lower_bound(m->parts, m->parts + m->list.count, offset, before) - m->parts];
}

static Scalars layer_scalars(const Model *m, size_t layer) {
    Scalars scalars = {{NULL}};
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (normalizer_has(normalizer_of(m->config, layer), (Scalar)x))
            scalars.of[x] = weight32(m, m->list.layers[layer].scalar[x]);
    if (scalars.of[SCALAR_P] && m->p_n) scalars.of[SCALAR_P] = m->p_n;
    return scalars;
}

static ScalarGrads layer_scalar_grads(const Model *m, float *grads, size_t layer) {
    return scalar_grads_of(&m->list, grads, layer, &m->config->attn);
}

static GauGains gains_of(const Model *m, size_t layer) {
    const LayerOffsets *at = &m->list.layers[layer];
    return {weight32(m, at->q_gain), weight32(m, at->q_offset), weight32(m, at->k_gain), weight32(m, at->k_offset)};
}

static GauGains gain_grads_in(const Model *m, float *grads, size_t layer) {
    const LayerOffsets *at = &m->list.layers[layer];
    return {grads + at->q_gain, grads + at->q_offset, grads + at->k_gain, grads + at->k_offset};
}

static float norm_eps(const Model *m) {
    return (float)m->config->norm_eps;
}

// One row per block: how many partial sums its backward pass needs, where attention finds q, k and v (`views`, which
// leaves the scalars out), and the passes. The block's tensors are in model/model.c, its activations in
// model/activations.h.
template <class X>
struct BlockRow {
    size_t (*partials)(const ModelConfig *c, size_t N);
    FlashInputGrads<X> (*views)(const ModelConfig *c, Projected<X> of);
    void (*forward)(ModelOf<X> *m, size_t l, size_t B, size_t T, int counter);
    void (*backward)(ModelOf<X> *m, size_t l, size_t B, size_t T, bool add);
};

template <class X>
static const BlockRow<X> *block_of(const ModelOf<X> *m);

static FlashShape flash_shape(const Model *m, size_t layer, size_t B, size_t T) {
    const ModelConfig *c = m->config;
    return {normalizer_of(c, layer),
            B,
            T,
            c->heads,
            c->kv_heads,
            head_size(c),
            value_size(c),
            (int)c->seq_len,
            0,
            !m->o->deterministic,
            attention_of(c, layer)->window};
}

// A batch on the device: one int32 array, so that one copy suffices, and the mask.
//   inputs, targets, first, order (N), pieces of 4 numbers: the plan for embedding_backward()
struct BatchTokens {
    const int32_t *inputs, *targets, *order;
    const EmbeddingPiece *pieces;
    EmbeddingPlan plan;
    const int32_t *first;    // (B,T) with --doc-mask: the first key that each position sees; NULL: 0 for all
    const uint8_t *mask;     // NULL: all targets count
};

static_assert(sizeof(EmbeddingPiece) == 4 * sizeof(int32_t), "pieces are stored in the batch's int32 array");

static size_t batch_ints(size_t N) {
    return 4 * N + 4 * embedding_pieces(N);
}

// Gradients are summed over the ranks in buckets of whole tensors, each as soon as the backward pass has computed it:
// bucket 0 is everything before the layers, then one bucket per layer, then the rest. bucket_start(bucket_count()) is
// the end of the last.
static size_t bucket_count(const Model *m) {
    return m->config->layers + 2;
}

static size_t bucket_start(const Model *m, size_t i) {
    size_t layers = m->config->layers;
    if (i == 0) return 0;
    if (i <= layers) return m->list.layers[i - 1].norm1;
    return i == layers + 1 ? m->list.norm : m->list.floats;
}

// The tensors of bucket i, as parts of the array of all parameters. Returns the first.
static const CollectivePart *bucket_parts(const Model *m, size_t i, size_t *count) {
    size_t first = 0, end;
    while (m->parts[first].from < bucket_start(m, i)) first++;
    for (end = first; end < m->list.count && m->parts[end].from < bucket_start(m, i + 1);) end++;
    *count = end - first;
    return &m->parts[first];
}

static bool owns(const Model *m, size_t tensor) {
    return m->parts[tensor].owner == process.rank;
}

// Does this rank update the tensor, by this rule?
static bool has_rule(const Model *m, size_t tensor, int rule) {
    return owns(m, tensor) && m->list.tensors[tensor].update == rule;
}

// Lays out the state of the tensors that this rank owns, by rule.
static void find_states(Model *m) {
    size_t floats = 0;
    m->states = (size_t *)allocate(m->list.count, sizeof *m->states, "the list of states");
    for (int rule = 0; rule < UPDATE_COUNT; rule++) {
        for (size_t i = 0; i < m->list.count; i++) {
            if (!has_rule(m, i, rule)) continue;
            m->states[i] = floats;
            floats += m->parts[i].floats;
        }
        for (size_t s = 0; s < STATE_ARRAYS; s++)
            if (update_state[rule][s]) m->state_floats[s] = floats;
    }
}

static bool is_matrix(const Model *m, size_t tensor) {
    return m->list.tensors[tensor].ndim == 2;
}

// Does this rank have the tensor in m->params?
static bool has_master(const Model *m, size_t tensor) {
    return !m->sharded || !is_matrix(m, tensor) || owns(m, tensor);
}

// Lays out m->params. With ZeRO-1 in bf16, first come the vectors, which every rank needs in float32 and has at the
// same places, then the matrices that this rank updates. Matmuls read matrices in bf16, so the others are only in
// m->params_bf16.
static void find_masters(Model *m) {
    size_t count = m->list.count, floats = 0;
    m->sharded = m->zero && m->in_bf16;
    m->masters = (size_t *)allocate(count, sizeof *m->masters, "the list of parameters");
    m->vectors = (CollectivePart *)allocate(count, sizeof *m->vectors, "the list of parameters");
    for (int matrices = 0; matrices < 2; matrices++) {
        for (size_t i = 0; i < count; i++) {
            if (is_matrix(m, i) != matrices || !has_master(m, i)) continue;
            m->masters[i] = m->sharded ? floats : m->parts[i].from;
            if (!matrices) m->vectors[m->vector_count++] = {floats, m->parts[i].floats, m->parts[i].owner, 0};
            floats += m->parts[i].floats;
        }
    }
    m->master_floats = floats;
}

// With --zero 1, each tensor has one owner; otherwise, each rank updates all tensors, as the owner of all.
static void find_owners(Model *m) {
    size_t count = m->list.count;
    m->parts = (CollectivePart *)allocate(count, sizeof *m->parts, "the owners of tensors");
    for (size_t i = 0; i < count; i++) {
        size_t from = m->list.tensors[i].offset, to = i + 1 < count ? m->list.tensors[i + 1].offset : m->list.floats;
        const char *const *states = update_state[m->list.tensors[i].update];
        size_t arrays = m->in_bf16 && is_matrix(m, i);    // its master weights
        for (size_t s = 0; s < STATE_ARRAYS; s++) arrays += states[s] != NULL;
        m->parts[i] = {from, to - from, process.rank, arrays * (to - from) * sizeof(float)};
    }
    if (m->zero) collective_assign_owners(m->parts, count, process.size);
    find_states(m);
    find_masters(m);
}

static void plan_muon(Model *m) {
    size_t elements = 0, square = 0;
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        size_t side = smaller(t->shape[0], t->shape[1]);
        if (t->update != UPDATE_MUON) continue;
        if (t->elements > elements) elements = t->elements;
        if (side * side > square) square = side * side;
    }
    if (!elements) return;
    memory_add(&m->plan, "Muon's scratch", (void **)&m->muon.x, elements * sizeof(bf16));
    memory_add(&m->plan, "Muon's scratch", (void **)&m->muon.y, elements * sizeof(bf16));
    memory_add(&m->plan, "Muon's scratch", (void **)&m->muon.gram, square * sizeof(bf16));
    memory_add(&m->plan, "Muon's scratch", (void **)&m->muon.step, square * sizeof(bf16));
    memory_add(&m->plan, "Muon's scratch", (void **)&m->muon.sums, (muon_blocks(elements) + 1) * sizeof(double));
}

// Rows of the memory plan that several arrays share
static const char *const KEPT = "activations kept for the backward pass",
                         *const STATS = "statistics kept for the backward pass", *const SCRATCH = "scratch",
                         *const INPUTS = "matmul inputs (no --recompute)";

// Of m->sums: a partial sum of squares for each block of the update
static size_t sums_bytes(const Model *m) {
    return (SUM_PARTIALS + m->list.floats / SEGMENT_PART + m->list.count) * sizeof(double);
}

static void plan_parameters(Model *m) {
    size_t floats = m->list.floats;
    find_owners(m);
    memory_add(&m->plan, "parameters", (void **)&m->params, m->master_floats * sizeof(float));
    if (m->in_bf16) memory_add(&m->plan, "parameters in bfloat16", (void **)&m->params_bf16, floats * sizeof(bf16));
    memory_add(&m->plan, SCRATCH, (void **)&m->sums, sums_bytes(m));
    if (m->forward_only) return;
    memory_add(&m->plan, "gradients", (void **)&m->grads, floats * sizeof(float));
    memory_add(&m->plan, SCRATCH, (void **)&m->numbers, sizeof *m->numbers);
    for (size_t s = 0; s < STATE_ARRAYS; s++)
        memory_add(&m->plan, "optimizer state", (void **)&m->state[s], m->state_floats[s] * sizeof(float));
    plan_muon(m);
    memory_add(&m->plan, SCRATCH, (void **)&m->segments, m->list.count * sizeof(AdamSegment));
}

// Plans attention's memory for the most demanding combination of layer (under the model's normalizers and `others`) and
// length (`lengths`, which divide T). Ends the program if there is no kernel for one of these shapes.
template <class X>
static void plan_attention(ModelOf<X> *m, const AttentionList *const *others, size_t count, const IntList *lengths,
                           size_t B, size_t T) {
    size_t scratch = 0, windows = 0, tables = 0;
    bool l2 = false;
    m->layer_stats = 0;
    for (size_t i = 0; i < (count + 1) * lengths->count; i++) {
        size_t length = (size_t)lengths->values[i / (count + 1)], which = i % (count + 1);
        const AttentionList *list = which < count ? others[which] : &m->config->attn;
        windows = std::max(windows, attention_windows(list));
        tables = std::max(tables, attention_tables(list));
        for (size_t j = 0; j < list->count; j++) {
            FlashShape shape = flash_shape(m, 0, (B * T) / length, length);
            shape.normalizer = &list->items[j].layer.normalizer;
            shape.window = list->items[j].layer.window;
            flash_check(shape, sizeof(X));
            l2 = l2 || shape.normalizer->qk.kind == QK_L2;
            m->layer_stats = std::max(m->layer_stats, flash_stats(shape, sizeof(X)));
            scratch = std::max(scratch, flash_scratch(shape, sizeof(X)));
        }
    }
    m->widths = activation_widths(m->config, l2);
    memory_add(&m->plan, STATS, (void **)&m->activations.stats, m->config->layers * m->layer_stats * sizeof(float));
    memory_add(&m->plan, SCRATCH, &m->scratch, scratch);
    memory_add(&m->plan, SCRATCH, (void **)&m->windows, windows * B * T * sizeof *m->windows);
    memory_add(&m->plan, SCRATCH, (void **)&m->cosines, tables * T * (head_size(m->config) / 2) * sizeof(float));
    memory_add(&m->plan, SCRATCH, (void **)&m->sines, tables * T * (head_size(m->config) / 2) * sizeof(float));
}

static void need_partials(Model *m, size_t floats) {
    if (floats > m->partials_size) m->partials_size = floats;
}

static size_t layer_partials(const ModelConfig *c, size_t N) {
    size_t floats = 0;
    if (c->qk_norm) floats = qk_norm_partials(head_size(c));
    if (c->qkv_bias) floats = std::max(floats, bias_partials(N, joined_width(c)));
    return floats;
}

static size_t unit_partials(const ModelConfig *c, size_t N) {
    return gau_partials(N, head_size(c));
}

// What has the same size whatever the element type
static void plan_scratch(Model *m, size_t B, size_t T) {
    size_t N = B * T;
    memory_add(&m->plan, SCRATCH, (void **)&m->all_zero_rows, 2 * sizeof *m->all_zero_rows);
    memory_add(&m->plan, "batch", (void **)&m->batch, batch_ints(N) * sizeof(int32_t));
    memory_add(&m->plan, "batch", (void **)&m->mask, N);
}

static size_t layers_in(const Model *m, ActivationMemory memory) {
    size_t layers = m->config->layers;
    return activation_layers(memory, layers, m->o->recompute ? 1 : layers);
}

static size_t rows_in(const Model *m, ActivationMemory memory) {
    if (memory == SCRATCH_LOGITS) return m->loss_rows;
    if (memory == SCRATCH_GRADIENT && m->forward_only) return 0;
    return layers_in(m, memory) * m->B * m->T;
}

static const char *kind_of(const Model *m, ActivationMemory memory) {
    switch (memory) {
    case KEPT_STREAM:
    case KEPT_NUMBERS: return KEPT;
    case KEPT_STATISTICS: return STATS;
    case KEPT_INPUT: return m->o->recompute ? SCRATCH : INPUTS;
    case SCRATCH_LOGITS: return "logits of one block of rows";
    default: return SCRATCH;
    }
}

template <class T>
static void plan_array(Model *m, T **x, ActivationMemory memory, size_t width) {
    size_t numbers = rows_in(m, memory) * width;
    if (numbers) memory_add(&m->plan, kind_of(m, memory), (void **)x, numbers * sizeof **x);
}

template <class X>
static void plan_activations(ModelOf<X> *m) {
    const ModelConfig *c = m->config;
    size_t N = m->B * m->T, C = c->channels;
    rmsnorm_warps<X>(C);    // ends the program if there is no kernel for this number of channels
    if (c->qk_norm) qk_norm_group(head_size(c), 1);    // or for this head size
    need_partials(m, rmsnorm_partials(N, C));
    need_partials(m, embedding_partials(N) * C);
    need_partials(m, block_of(m)->partials(c, N));
#define PLAN(name, type, width, memory, exists) plan_array(m, &m->activations.name, memory, m->widths.name);
    ACTIVATIONS(PLAN)
    GPU_ACTIVATIONS(PLAN)
#undef PLAN
}

// Where a table of RoPE's angles begins.
static size_t angles_at(const Model *m, size_t table) {
    return table * m->T * (head_size(m->config) / 2);
}

static void upload_rope_table(Model *m, size_t number, size_t T, RopeAngles angles) {
    size_t HS = head_size(m->config), n = T * (HS / 2);
    float *table = (float *)allocate(2 * n, sizeof *table, "RoPE's table");
    rope_table(table, table + n, T, angles);
    CUDA_CHECK(cudaMemcpy(m->cosines + angles_at(m, number), table, n * sizeof *table, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(m->sines + angles_at(m, number), table + n, n * sizeof *table, cudaMemcpyHostToDevice));
    free(table);
}

// Call while the device has nothing to do.
static void upload_rope_tables(Model *m) {
    const AttentionList *attn = &m->config->attn;
    for (size_t i = 0; i < attention_tables(attn); i++)
        upload_rope_table(m, i, m->T, model_rope(m->config, attention_table_base(attn, i)));
    CUDA_CHECK(cudaDeviceSynchronize());    // the copies do not run on our stream
}

// Plans all device memory, for B sequences of T tokens at a time, or as many tokens in sequences of one of `lengths`.
template <class X>
static void plan_model(ModelOf<X> *m, const AttentionList *const *others, size_t count, const IntList *lengths,
                       size_t B, size_t T) {
    m->in_bf16 = std::is_same<X, bf16>::value;
    m->B = B;
    m->T = T;
    m->loss_rows = smaller(B * T, LOSS_ROWS);
    plan_attention(m, others, count, lengths, B, T);
    plan_parameters(m);
    plan_scratch(m, B, T);
    plan_activations(m);
    memory_add(&m->plan, SCRATCH, (void **)&m->partials, m->partials_size * sizeof(float));
    memory_add(&m->plan, "matmul scratch", &m->workspace, MATMUL_WORKSPACE);
    size_t largest = 0;
    for (size_t i = 0; i < bucket_count(m); i++) {
        size_t floats = bucket_start(m, i + 1) - bucket_start(m, i);
        if (floats > largest) largest = floats;
    }
    memory_add(&m->plan, "gradients in transit", &m->wire, collective_scratch(m->collective, largest));
}

// Allocates each array separately, so that compute-sanitizer and dev/cuda_on_cpu detect accesses out of bounds.
static void take_model(Model *m) {
    for (size_t i = 0; i < m->plan.count; i++) {
        size_t bytes = m->plan.rows[i].bytes;
        if (bytes == 0) continue;
        CUDA_CHECK(cudaMalloc(m->plan.rows[i].where, bytes));
        CUDA_CHECK(cudaMemset(*m->plan.rows[i].where, 0, bytes));
    }
    upload_rope_tables(m);
    matmul_start(&m->matmul, m->workspace, MATMUL_WORKSPACE, &m->matmul_file, !m->o->deterministic);
    if (m->muon.x) matmul_start(&m->muon_matmul, m->workspace, MATMUL_WORKSPACE, NULL, false);
    collective_use(m->collective, m->wire);
    CUDA_CHECK(cudaDeviceSynchronize());    // the work so far did not run on our stream
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Passes
// `counter` selects which count all-zero attention rows go to: 0 for steps, 1 for validations.

// The row of an array at which row `from` of layer l is. A layer stays in place, whatever the batch.
static size_t row_of(const Model *m, ActivationMemory memory, size_t l, size_t from) {
    return memory == SCRATCH_LOGITS ? 0 : (l % layers_in(m, memory)) * m->B * m->T + from;
}

// The activations of layer l, from its row `from` on.
template <class X>
static Activations<X> layer_of(const ModelOf<X> *m, size_t l, size_t from) {
    Activations<X> of = m->activations;
#define VIEW(name, type, width, memory, exists) \
    if (of.name) of.name += row_of(m, memory, l, from) * m->widths.name;
    ACTIVATIONS(VIEW)
    GPU_ACTIVATIONS(VIEW)
#undef VIEW
    of.stats += l * m->layer_stats;
    of.x_next = m->activations.x + row_of(m, KEPT_STREAM, l + 1, from) * m->widths.x;
    return of;
}

template <class X>
static Projected<X> projected_of(const Activations<X> &a) {
    return {a.joined, a.q, a.k, a.v, a.inverse_norms};
}

template <class X>
static Projected<X> gradients_of(const Activations<X> &a) {
    return {a.djoined, a.dq, a.dk, a.dv, NULL};
}

static QkNorm qk_norm_of(const Model *m, size_t layer, size_t N) {
    const ModelConfig *c = m->config;
    const LayerOffsets *at = &m->list.layers[layer];
    return {N, c->heads, c->kv_heads, head_size(c), norm_eps(m), weight32(m, at->q_norm), weight32(m, at->k_norm)};
}

static Rope rope_of(const Model *m, size_t layer, size_t B, size_t T) {
    const ModelConfig *c = m->config;
    size_t HS = head_size(c), table = attention_table(&c->attn, layer);
    Rope rope = {B, T - m->from, c->heads, c->kv_heads, HS, NULL, NULL, normalizer_of(c, layer)->qk.kind == QK_L2};
    if (table == NO_TABLE) return rope;
    rope.cosines = m->cosines + angles_at(m, table) + m->from * (HS / 2);
    rope.sines = m->sines + angles_at(m, table) + m->from * (HS / 2);
    RopeAngles angles = model_rope(c, attention_table_base(&c->attn, table));
    rope.amplitude = (float)rope_amplitude(&angles.scaling);
    return rope;
}

// q, k and v as attention reads them; with gradients, where attention writes them.
template <class X>
static FlashInputGrads<X> layer_views(const ModelConfig *c, Projected<X> of) {
    size_t W = joined_width(c), HS = head_size(c), K = query_width(c);
    return {{of.joined, W, HS}, {of.joined + K, W, HS}, {of.joined + K + key_width(c), W, HS}, {}};
}

template <class X>
static FlashInputGrads<X> unit_views(const ModelConfig *c, Projected<X> of) {
    size_t K = query_width(c);
    return {{of.q, K, K}, {of.k, K, K}, {of.v, output_width(c), value_size(c)}, {}};
}

template <class X>
static FlashInput<X> attention_input(const ModelOf<X> *m, Projected<X> of, size_t l) {
    FlashInputGrads<X> at = block_of(m)->views(m->config, of);
    size_t window = attention_window(&m->config->attn, l);
    return {{at.q.p, at.q.row, at.q.head},
            {at.k.p, at.k.row, at.k.head},
            {at.v.p, at.v.row, at.v.head},
            window == NO_TABLE ? m->first : m->windows + window * m->B * m->T,
            layer_scalars(m, l)};
}

// Does attention's backward pass undo RoPE, too?
template <class X>
static bool undoes_rope(const ModelOf<X> *m, FlashShape shape) {
    return m->config->block == BLOCK_LLAMA && shape.normalizer->qk.kind != QK_L2 && flash_undoes_rope(shape, sizeof(X));
}

// Attention itself, which both blocks share. Expects the layer's q, k and v, of all rows.
template <class X>
static void attention_layer_forward(ModelOf<X> *m, const Activations<X> &of, size_t l, size_t B, size_t T,
                                    int counter) {
    FlashShape shape = flash_shape(m, l, B, T);
    shape.from = m->from;
    phase(m, PHASE_ATTENTION);
    flash_forward<X>({of.att, output_width(m->config), shape.VS}, of.stats, m->all_zero_rows + counter,
                     attention_input(m, projected_of(of), l), shape, m->scratch, m->stream);
}

// Computes the gradients of q, k and v (in djoined, or in dq, dk, dv) and of the learned scalars from datt.
template <class X>
static void attention_layer_backward(ModelOf<X> *m, const Activations<X> &of, size_t l, size_t B, size_t T) {
    FlashShape shape = flash_shape(m, l, B, T);
    phase(m, PHASE_ATTENTION);
    FlashInputGrads<X> d = block_of(m)->views(m->config, gradients_of(of));
    d.scalars = layer_scalar_grads(m, m->grads, l);
    if (undoes_rope(m, shape)) d.rope = {rope_of(m, l, B, T).cosines, rope_of(m, l, B, T).sines};
    flash_backward<X>(d, of.datt, {of.att, output_width(m->config), shape.VS}, of.stats,
                      attention_input(m, projected_of(of), l), shape, m->scratch, m->stream);
}

template <class X>
static void layer_forward(ModelOf<X> *m, size_t l, size_t B, size_t T, int counter) {
    const ModelConfig *c = m->config;
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T - m->from, C = c->channels, F = c->ffn, W = joined_width(c), E = output_width(c);
    size_t G = gate_width(c);
    Activations<X> of = layer_of(m, l, m->from);
    phase(m, PHASE_NORM);
    rmsnorm_forward(of.h1, of.r1, of.x, weight32(m, at->norm1), N, C, norm_eps(m), m->stream);
    phase(m, PHASE_PROJECTIONS);
    matmul_forward(&m->matmul, of.joined, of.h1, weight(m, at->q), (const X *)NULL, {N, C, W}, m->stream);
    if (c->qkv_bias) bias_forward(of.joined, weight32(m, at->q_bias), N, W, m->stream);
    if (c->gate)
        matmul_forward(&m->matmul, of.att_gate, of.h1, weight(m, at->att_gate), (const X *)NULL, {N, C, G}, m->stream);
    phase(m, PHASE_NORM);
    if (c->qk_norm) qk_norm_forward(of.joined, of.qk_inputs, of.qk_inverse, qk_norm_of(m, l, N), m->stream);
    phase(m, PHASE_ROPE);
    rope_forward(of.joined, of.inverse_norms, rope_of(m, l, B, T), m->stream);
    attention_layer_forward(m, layer_of(m, l, 0), l, B, T, counter);
    if (c->gate) {
        phase(m, PHASE_GATE);
        output_gate_forward(of.gated, of.att, of.att_gate, {N, E, G}, m->stream);
    }
    phase(m, PHASE_PROJECTIONS);
    matmul_forward(&m->matmul, of.x_mid, c->gate ? of.gated : of.att, weight(m, at->o), of.x, {N, E, C}, m->stream);

    phase(m, PHASE_NORM);
    rmsnorm_forward(of.h2, of.r2, of.x_mid, weight32(m, at->norm2), N, C, norm_eps(m), m->stream);
    phase(m, PHASE_FEED_FORWARD);
    matmul_forward(&m->matmul, of.gate_up, of.h2, weight(m, at->gate), (const X *)NULL, {N, C, 2 * F}, m->stream);
    phase(m, PHASE_SWIGLU);
    swiglu_forward(of.act, of.gate_up, N, F, m->stream);
    phase(m, PHASE_FEED_FORWARD);
    matmul_forward(&m->matmul, of.x_next, of.act, weight(m, at->down), of.x_mid, {N, F, C}, m->stream);
}

// of.dx (N,C) is the gradient of the residual stream: after the layer on entry, before it on return.
template <class X>
static void layer_backward(ModelOf<X> *m, size_t l, size_t B, size_t T, bool add) {
    const ModelConfig *c = m->config;
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = c->channels, F = c->ffn, W = joined_width(c), E = output_width(c), G = gate_width(c);
    Activations<X> of = layer_of(m, l, 0);
    const X *projected = c->gate ? of.gated : of.att, *dh = c->gate ? of.dh_more : of.dh;
    float *grads = m->grads;
    phase(m, PHASE_SWIGLU);
    if (m->o->recompute) swiglu_forward(of.act, of.gate_up, N, F, m->stream);
    phase(m, PHASE_FEED_FORWARD);
    matmul_backward(&m->matmul, of.dact, grads + at->down, of.dx, of.act, weight(m, at->down), {N, F, C}, add,
                    m->stream);
    phase(m, PHASE_SWIGLU);
    swiglu_backward(of.dgate_up, of.dact, of.gate_up, N, F, m->stream);
    phase(m, PHASE_NORM);
    if (m->o->recompute) rmsnorm_forward(of.h2, of.r2, of.x_mid, weight32(m, at->norm2), N, C, norm_eps(m), m->stream);
    phase(m, PHASE_FEED_FORWARD);
    matmul_backward(&m->matmul, of.dh, grads + at->gate, of.dgate_up, of.h2, weight(m, at->gate), {N, C, 2 * F}, add,
                    m->stream);
    phase(m, PHASE_NORM);
    rmsnorm_backward<X>({of.dx, true}, {grads + at->norm2, add}, m->partials, of.dh,
                        {of.x_mid, weight32(m, at->norm2), of.r2, N, C}, m->stream);

    if (c->gate && m->o->recompute) {
        phase(m, PHASE_GATE);
        output_gate_forward(of.gated, of.att, of.att_gate, {N, E, G}, m->stream);
    }
    phase(m, PHASE_PROJECTIONS);
    matmul_backward(&m->matmul, of.datt, grads + at->o, of.dx, projected, weight(m, at->o), {N, E, C}, add, m->stream);
    if (c->gate) {
        phase(m, PHASE_GATE);
        output_gate_backward(of.datt, of.datt_gate, of.att, of.att_gate, {N, E, G}, m->stream);
    }
    attention_layer_backward(m, of, l, B, T);
    phase(m, PHASE_ROPE);
    if (!undoes_rope(m, flash_shape(m, l, B, T)))
        rope_backward(of.djoined, of.joined, of.inverse_norms, rope_of(m, l, B, T), m->stream);
    phase(m, PHASE_NORM);
    if (c->qk_norm)
        qk_norm_backward(of.djoined, {grads + at->q_norm, add}, {grads + at->k_norm, add}, m->partials, of.qk_inputs,
                         of.qk_inverse, qk_norm_of(m, l, N), m->stream);
    if (m->o->recompute) rmsnorm_forward(of.h1, of.r1, of.x, weight32(m, at->norm1), N, C, norm_eps(m), m->stream);
    phase(m, PHASE_PROJECTIONS);
    if (c->qkv_bias) bias_backward({grads + at->q_bias, add}, m->partials, of.djoined, N, W, m->stream);
    matmul_backward(&m->matmul, of.dh, grads + at->q, of.djoined, of.h1, weight(m, at->q), {N, C, W}, add, m->stream);
    if (c->gate) {
        const X *gate = weight(m, at->att_gate);
        matmul_backward(&m->matmul, (X *)NULL, grads + at->att_gate, of.datt_gate, of.h1, gate, {N, C, G}, add,
                        m->stream);
        matmul_input_backward(&m->matmul, of.dh_more, of.datt_gate, gate, of.dh, {N, C, G}, m->stream);
    }
    phase(m, PHASE_NORM);
    rmsnorm_backward<X>({of.dx, true}, {grads + at->norm1, add}, m->partials, dh,
                        {of.x, weight32(m, at->norm1), of.r1, N, C}, m->stream);
}

template <class X>
static void unit_forward(ModelOf<X> *m, size_t l, size_t B, size_t T, int counter) {
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T - m->from, C = m->config->channels, E = m->config->ffn, W = joined_width(m->config);
    Activations<X> of = layer_of(m, l, m->from);
    phase(m, PHASE_NORM);
    rmsnorm_forward(of.h1, of.r1, of.x, weight32(m, at->norm1), N, C, norm_eps(m), m->stream);
    phase(m, PHASE_PROJECTIONS);
    matmul_forward(&m->matmul, of.joined, of.h1, weight(m, at->u), (const X *)NULL, {N, C, W}, m->stream);
    phase(m, PHASE_ROPE);
    gau_forward(projected_of(of), gains_of(m, l), rope_of(m, l, B, T), E, m->stream);
    attention_layer_forward(m, layer_of(m, l, 0), l, B, T, counter);
    phase(m, PHASE_GATE);
    gau_gate_forward(of.act, of.joined, of.att, N, E, W, m->stream);
    phase(m, PHASE_PROJECTIONS);
    matmul_forward(&m->matmul, of.x_next, of.act, weight(m, at->o), of.x, {N, E, C}, m->stream);
}

template <class X>
static void unit_backward(ModelOf<X> *m, size_t l, size_t B, size_t T, bool add) {
    const LayerOffsets *at = &m->list.layers[l];
    size_t N = B * T, C = m->config->channels, E = m->config->ffn, W = joined_width(m->config);
    Activations<X> of = layer_of(m, l, 0);
    float *grads = m->grads;
    phase(m, PHASE_GATE);
    if (m->o->recompute) gau_gate_forward(of.act, of.joined, of.att, N, E, W, m->stream);
    phase(m, PHASE_PROJECTIONS);
    matmul_backward(&m->matmul, of.dact, grads + at->o, of.dx, of.act, weight(m, at->o), {N, E, C}, add, m->stream);
    phase(m, PHASE_GATE);
    gau_gate_backward(of.datt, of.djoined, of.dact, of.joined, of.att, N, E, W, m->stream);
    attention_layer_backward(m, of, l, B, T);
    phase(m, PHASE_ROPE);
    gau_backward(gradients_of(of), gain_grads_in(m, grads, l), add, m->partials, projected_of(of), gains_of(m, l),
                 rope_of(m, l, B, T), E, m->stream);
    phase(m, PHASE_NORM);
    if (m->o->recompute) rmsnorm_forward(of.h1, of.r1, of.x, weight32(m, at->norm1), N, C, norm_eps(m), m->stream);
    phase(m, PHASE_PROJECTIONS);
    matmul_backward(&m->matmul, of.dh, grads + at->u, of.djoined, of.h1, weight(m, at->u), {N, C, W}, add, m->stream);
    phase(m, PHASE_NORM);
    rmsnorm_backward<X>({of.dx, true}, {grads + at->norm1, add}, m->partials, of.dh,
                        {of.x, weight32(m, at->norm1), of.r1, N, C}, m->stream);
}

template <class X>
static const BlockRow<X> *block_of(const ModelOf<X> *m) {
    static const BlockRow<X> BLOCKS[BLOCK_COUNT] = {
        // in the order of Block
        {layer_partials, layer_views<X>, layer_forward<X>, layer_backward<X>},
        {unit_partials, unit_views<X>, unit_forward<X>, unit_backward<X>},
    };
    return &BLOCKS[m->config->block];
}

template <class X>
static void model_embed(ModelOf<X> *m, const int32_t *tokens, size_t B, size_t T) {
    const AttentionList *attn = &m->config->attn;
    size_t C = m->config->channels, N = B * T;
    for (size_t i = 0; i < attention_windows(attn); i++)
        flash_window_starts(m->windows + i * m->B * m->T, m->first, B, T, attention_window_size(attn, i), m->stream);
    phase(m, PHASE_EMBEDDING);
    embedding_forward(m->activations.x + m->from * C, weight(m, m->list.embedding), tokens + m->from, N - m->from, C,
                      m->stream);
}

template <class X>
static void model_final_norm(ModelOf<X> *m, size_t N) {
    Activations<X> of = layer_of(m, m->config->layers - 1, m->from);
    size_t C = m->config->channels;
    phase(m, PHASE_NORM);
    rmsnorm_forward(of.h, of.r, of.x_next, weight32(m, m->list.norm), N - m->from, C, norm_eps(m), m->stream);
    phase(m, PHASE_OTHER);
}

template <class X>
static void model_forward(ModelOf<X> *m, const int32_t *tokens, size_t B, size_t T, int counter) {
    model_embed(m, tokens, B, T);
    for (size_t l = 0; l < m->config->layers; l++) block_of(m)->forward(m, l, B, T, counter);
    model_final_norm(m, B * T);
}

// Writes the logits (VP) after the last of N tokens to the activations' logits. Expects their normalized outputs in h.
template <class X>
static void model_last_logits(ModelOf<X> *m, size_t N) {
    size_t C = m->config->channels, VP = padded_vocab(m->config);
    const Activations<X> *a = &m->activations;
    const X *last = a->h + (N - 1) * C, *head = weight(m, m->list.head);
    matmul_forward(&m->matmul, a->logits, last, head, (const X *)NULL, {1, C, VP}, m->stream);
}

// Adds the losses of N rows to *sum (on the device). Unless scale is 0, also computes the gradients of scale times
// their sum: writes dh (N,C), and writes the output projection's gradient, or adds to it if `add`.
template <class X>
static void model_loss(ModelOf<X> *m, double *sum, const int32_t *targets, const uint8_t *mask, size_t N, float scale,
                       bool add) {
    size_t C = m->config->channels, VP = padded_vocab(m->config);
    CrossEntropy ce = {m->config->vocab, VP, (float)m->config->logit_softcap, (float)m->o->z_loss, scale};
    const X *head = weight(m, m->list.head);
    const Activations<X> *a = &m->activations;
    phase(m, PHASE_CLASSIFIER);
    for (size_t from = 0; from < N; from += m->loss_rows) {
        size_t rows = smaller(N - from, m->loss_rows);
        const X *h = a->h + from * C;
        matmul_forward(&m->matmul, a->logits, h, head, (const X *)NULL, {rows, C, VP}, m->stream);
        classifier(a->losses + from, a->logits, targets + from, mask ? mask + from : NULL, rows, ce, m->stream);
        if (scale != 0)
            matmul_backward(&m->matmul, a->dh + from * C, m->grads + m->list.head, a->logits, h, head, {rows, C, VP},
                            add || from > 0, m->stream);
    }
    losses_sum(sum, a->losses, N, m->stream);
    phase(m, PHASE_OTHER);
}

// Caps a row of logits on the host.
static void cap_logits(const Model *m, float *logits) {
    float c = (float)m->config->logit_softcap;
    for (size_t v = 0; v < m->config->vocab && c != 0; v++) logits[v] = c * tanhf(logits[v] / c);
}

// Refreshes the copy that the matmuls read, of the parameters that this rank updates, after anything but the update
// changed the master weights.
static void round_parameters(const Model *m, int64_t step) {
    for (size_t i = 0; i < m->list.count && m->in_bf16; i++) {
        const CollectivePart *part = &m->parts[i];
        if (owns(m, i))
            parameters_round(m->params_bf16, m->params + m->masters[i], part->from, part->from + part->floats,
                             m->o->stochastic_rounding, (uint64_t)m->o->seed, step, m->stream);
    }
}

// Makes the stream wait until the parameters of the first `buckets` buckets are there.
static void await_parameters(Model *m, size_t buckets) {
    for (; m->arriving + buckets > bucket_count(m); m->arriving--) {
        size_t i = bucket_count(m) - m->arriving;
        phase(m, PHASE_REDUCE);
        CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered[i], 0));
        if (i + 1 == bucket_count(m)) collective_join(m->collective, m->stream);
        phase(m, PHASE_OTHER);
    }
}

// Starts the sum of a bucket over the ranks, concurrently with the computation that follows.
static void reduce_bucket(const Model *m, size_t i) {
    size_t count, start = bucket_start(m, i), floats = bucket_start(m, i + 1) - start;
    const CollectivePart *parts = bucket_parts(m, i, &count);
    if (m->zero) collective_reduce_parts(m->collective, m->grads, parts, count, m->stream);
    else collective_all_reduce(m->collective, m->grads + start, floats, m->stream);
}

// The rest of the forward and backward pass follows in this order. Each function writes the gradients of its
// parameters, or adds to them if `add`; the embedding's always adds to those of clear_gradients().
template <class X>
static void final_norm_backward(ModelOf<X> *m, size_t N, bool add) {
    size_t C = m->config->channels, layers = m->config->layers;
    const Activations<X> *a = &m->activations;
    phase(m, PHASE_NORM);
    rmsnorm_backward<X>({a->dx, false}, {m->grads + m->list.norm, add}, m->partials, a->dh,
                        {layer_of(m, layers - 1, 0).x_next, weight32(m, m->list.norm), a->r, N, C}, m->stream);
}

template <class X>
static void model_embed_backward(ModelOf<X> *m, const BatchTokens &tokens) {
    phase(m, PHASE_EMBEDDING);
    embedding_backward(m->grads + m->list.embedding, m->partials, m->activations.dx, tokens.order, tokens.pieces,
                       tokens.plan, m->config->channels, m->stream);
    phase(m, PHASE_OTHER);
}

// Is this a gradient that kernels only add to? Attention adds to those of the learned scalars. The embedding's is that
// of the tokens in the batch; if it is tied, the output projection's has been written there before.
static bool only_adds(const Model *m, size_t tensor) {
    const Tensor *t = &m->list.tensors[tensor];
    return t->scalar != SCALAR_NONE || (t->offset == m->list.embedding && m->list.head != m->list.embedding);
}

// Clears these, each run of neighbors at once. A step's first micro-batch overwrites all others.
static void clear_gradients(const Model *m) {
    size_t next;
    for (size_t i = 0; i < m->list.count; i = next) {
        size_t floats = 0;
        for (next = i; next < m->list.count && only_adds(m, next); next++) floats += m->parts[next].floats;
        if (next == i) next++;
        else CUDA_CHECK(cudaMemsetAsync(m->grads + m->parts[i].from, 0, floats * sizeof(float), m->stream));
    }
}

// Runs one micro-batch. Adds the sum of its losses on the device, and the gradients of scale times that sum to
// m->grads. With several ranks, the last micro-batch sends each layer's gradients to the others while the next layer's
// are computed.
//
// The work up to the last gradient of a layer is one graph. Where there are sums over ranks, each layer's gradients are
// a graph of their own, with the sums between them; and where parameters arrive, so is each layer's forward pass. What
// differs between two launches of a graph is in device memory: parameters, and the batch in m->batch and m->mask. Only
// the embedding's gradient is never in a graph: the number of its blocks depends on the tokens.
template <class X>
static void model_step(ModelOf<X> *m, const BatchTokens &batch, size_t B, size_t T, float scale, bool first,
                       bool last) {
    const BlockRow<X> *block = block_of(m);
    size_t layers = m->config->layers;
    bool arriving = m->arriving > 0, sums = last && m->collective;
    GraphKey key = {0, B, T, batch.mask != NULL, first, arriving, sums, scale};
    auto part = [&](auto work) {
        graphs_run(&m->graphs, key, m->stream, work);
        key.part++;
    };
    auto start = [&] {
        if (first) {
            clear_gradients(m);
            CUDA_CHECK(cudaMemsetAsync(m->sums + SUM_STEP, 0, sizeof(double), m->stream));
        }
        model_embed(m, batch.inputs, B, T);
    };
    if (arriving) {
        await_parameters(m, 1);
        part(start);
        for (size_t l = 0; l < layers; l++) {
            await_parameters(m, l + 2);
            part([&] { block->forward(m, l, B, T, 0); });
        }
        await_parameters(m, layers + 2);
    }
    part([&] {
        if (!arriving) start();
        for (size_t l = 0; l < layers && !arriving; l++) block->forward(m, l, B, T, 0);
        model_final_norm(m, B * T);
        model_loss(m, m->sums + SUM_STEP, batch.targets, batch.mask, B * T, scale, !first);
        final_norm_backward(m, B * T, !first);
        for (size_t l = layers; l-- > 0 && !sums;) block->backward(m, l, B, T, !first);
    });
    if (sums) reduce_bucket(m, layers + 1);
    for (size_t l = layers; l-- > 0 && sums;) {
        part([&] { block->backward(m, l, B, T, !first); });
        reduce_bucket(m, l + 1);
    }
    model_embed_backward(m, batch);
    if (sums) reduce_bucket(m, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Update

// Is this a trained tensor that this rank updates by this rule?
static bool updates(const Model *m, size_t tensor, int rule) {
    return has_rule(m, tensor, rule) && tensor_trained(&m->list.tensors[tensor], &m->config->attn);
}

// Adds these tensors to the table. Returns the new count.
static size_t add_segments(const Model *m, AdamSegment *table, size_t count, int rule) {
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        if (!updates(m, i, rule)) continue;
        table[count++] = {t->offset, t->offset + t->elements, m->masters[i], m->states[i], t->lr_scale, t->decay, 0};
    }
    return count;
}

static void upload_segments(Model *m) {
    AdamSegment *table = (AdamSegment *)allocate(m->list.count, sizeof *table, "the table of tensors");
    m->segment_count = 0;
    for (int rule = 0; rule < UPDATE_COUNT; rule++) {
        m->segment_count = add_segments(m, table, m->segment_count, rule);
        m->segment_blocks = segments_ready(table, m->segment_count);
        if (rule != UPDATE_ADAMW) continue;
        m->adam_count = m->segment_count;
        m->adam_blocks = m->segment_blocks;
    }
    CUDA_CHECK(cudaMemcpy(m->segments, table, m->segment_count * sizeof *table, cudaMemcpyHostToDevice));
    free(table);
}

// Computes the step's numbers, on the device: its loss, summed over all ranks, the norm of their summed gradients, and
// the factor that clips it to `clip`.
static void gradients_end(Model *m, double clip) {
    phase(m, PHASE_REDUCE);
    collective_join(m->collective, m->stream);
    phase(m, PHASE_UPDATE);
    gradient_squares(m->sums + SUM_SQUARES, m->sums + SUM_PARTIALS, m->grads, m->segments, m->segment_count,
                     m->segment_blocks, false, m->stream);
    collective_sum(m->collective, m->sums + SUM_STEP, m->zero ? 2 : 1, m->stream);    // with ZeRO also the squares
    collective_join(m->collective, m->stream);
    step_numbers(m->numbers, m->sums + SUM_STEP, m->sums + SUM_SQUARES, clip, m->stream);
}

// Starts to gather the parameters that other ranks have updated, in the order in which the next forward pass needs
// them: all in the type in which matmuls read them, and the vectors in float32.
static void gather_parameters(Model *m) {
    const CollectivePart *vectors = m->vectors;
    for (size_t i = 0; i < bucket_count(m); i++) {
        size_t count, vector_count = 0;
        const CollectivePart *parts = bucket_parts(m, i, &count);
        void *params = m->in_bf16 ? (void *)m->params_bf16 : m->params;
        for (size_t j = 0; j < count && m->sharded; j++) vector_count += !is_matrix(m, (size_t)(parts - m->parts) + j);
        collective_gather_parts(m->collective, params, m->in_bf16, parts, count, m->stream);
        collective_gather_parts(m->collective, m->params, false, vectors, vector_count, m->stream);
        collective_record(m->collective, m->gathered[i]);
        vectors += vector_count;
    }
    m->arriving = bucket_count(m);
}

static MuonMatrix muon_matrix(const Model *m, size_t tensor) {
    const Tensor *t = &m->list.tensors[tensor];
    return {t->shape[0],
            t->shape[1],
            t->offset,
            m->params + m->masters[tensor],
            m->in_bf16 ? m->params_bf16 + t->offset : NULL,
            m->state[STATE_MEAN] + m->states[tensor],
            m->grads + t->offset};
}

static void adamw_update(Model *m, AdamW a) {
    AdamArrays arrays = {
        m->params, m->in_bf16 ? m->params_bf16 : NULL, m->state[STATE_MEAN], m->state[STATE_SQUARE], m->grads,
        m->numbers};
    adamw(arrays, m->segments, m->adam_count, m->adam_blocks, a, m->o->stochastic_rounding, (uint64_t)m->o->seed,
          m->stream);
}

static void muon_update(Model *m, AdamW a) {
    for (size_t i = 0; i < m->list.count; i++) {
        AdamW scaled = a;
        scaled.lr *= m->list.tensors[i].lr_scale;
        if (has_rule(m, i, UPDATE_MUON))
            muon(&m->muon_matmul, muon_matrix(m, i), m->muon, m->numbers, scaled, m->o->stochastic_rounding,
                 (uint64_t)m->o->seed, m->stream);
    }
}

// If the step's numbers are not finite, the parameters stay as they are.
static void model_update(Model *m, AdamW a) {
    static void (*const UPDATES[])(Model *m, AdamW a) = {UPDATE_RULES(UPDATE_FUNCTION)};
    for (auto update : UPDATES) update(m, a);
    if (m->zero) gather_parameters(m);
    phase(m, PHASE_OTHER);
}

// ---------------------------------------------------------------------------------------------------------------------
#ifndef WITHOUT_MAIN
// 5. Training

static Device start_device(Model *m, const Run *run) {
    const TrainOptions *o = &run->o;
    device_start();
    CUDA_CHECK(cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking));
    m->collective = collective_start(o->reduce_dtype == TRAIN_BF16, run->heartbeat ? 0 : (double)o->progress_timeout);
    m->timers.on = o->profile;
    Device device = device_read();
    if (o->matmuls) matmul_file_open(&m->matmul_file, o->matmuls, device.name, MATMUL_WORKSPACE, !o->deterministic);
    return device;
}

static void describe_matmuls(char *out, size_t size, const Device *device, const MatmulFile *file,
                             const TrainOptions *o) {
    int length = snprintf(out, size, "matmuls   %s by cuBLASLt on %d %s%s, %d SMs at %.2f GHz",
                          o->dtype == TRAIN_BF16 ? "bfloat16" : "float32", process.size, device->name,
                          process.size == 1 ? "" : "s", device->processors, device->clock / 1e9);
    if (process.size > 1)
        length += snprintf(out + length, size - (size_t)length, "; gradients summed in %s%s",
                           o->reduce_dtype == TRAIN_BF16 ? "bfloat16" : "float32", o->zero ? ", ZeRO-1" : "");
    if (file->path)
        length += snprintf(out + length, size - (size_t)length, "; %zu of %zu stored algorithms apply to this GPU",
                           matmul_file_applying(file), file->choices.size());
    if (flash90_is_denied())
        snprintf(out + length, size - (size_t)length, "; attention by the kernels for compute capability 8.0");
}

struct DeviceMemory {
    size_t free, all;
};

static DeviceMemory device_memory(void) {
    DeviceMemory memory;
    CUDA_CHECK(cudaMemGetInfo(&memory.free, &memory.all));
    return memory;
}

// Plans more rows of logits at a time. Each block of rows but the first reads and writes the gradient of the output
// projection once more: 309 MB for GPT-2's vocabulary and 768 channels. The logits may take a sixteenth of the GPU's
// memory, and the whole plan nine tenths; otherwise the plan stays as it is. The amount of free memory plays no role,
// so that a run resumed on the same GPU adds in the same order.
template <class X>
static void plan_more_logits(ModelOf<X> *m, size_t memory) {
    size_t N = m->B * m->T, row = padded_vocab(m->config) * sizeof(X);
    size_t fitting = (memory / 16) / row, most = (fitting / 128) * 128, blocks = most ? (N + most - 1) / most : 0;
    size_t rows = blocks ? smaller(N, (((N + blocks - 1) / blocks + 127) / 128) * 128) : 0;
    if (rows <= m->loss_rows || m->plan.total + (rows - m->loss_rows) * row > (memory / 10) * 9) return;
    memory_resize(&m->plan, (void **)&m->activations.logits, rows * row);
    m->loss_rows = rows;
}

template <class X>
static void plan_training(ModelOf<X> *m, const Run *run) {
    const TrainOptions *o = &run->o;
    m->list = run_tensors(run);
    m->o = o;
    m->zero = o->zero && process.size > 1;
    m->graphs.on = o->graphs && !o->profile;
    plan_model(m, run->others, run->coming_count, &o->seq_len, (size_t)o->batch, run->T);
    plan_more_logits(m, device_memory().all);

    size_t bytes = m->list.floats * sizeof(float);
    memory_add(&m->host_plan, "parameters, for files", (void **)&m->host.params, bytes);
    for (size_t s = 0; s < STATE_ARRAYS; s++)
        memory_add(&m->host_plan, "optimizer state, for files", (void **)&m->host.state[s], bytes);
    memory_add(&m->host_plan, SCRATCH, (void **)&m->starts, (m->config->vocab + 1) * sizeof(int32_t));
    memory_add(&m->host_plan, "logits of one token", (void **)&m->host_logits, padded_vocab(m->config) * sizeof(float));
    if (o->norms_every) memory_add(&m->host_plan, SCRATCH, (void **)&m->host_sums, sums_bytes(m));
    if (m->in_bf16)
        memory_add(&m->host_plan, "logits of one token", (void **)&m->host_logits_bf16,
                   padded_vocab(m->config) * sizeof(uint16_t));
}

static void check_device_memory(const Model *m, const Device *device) {
    size_t left = device_memory().free;
    if (m->plan.total > left)
        fail(EXIT_RESOURCE,
             "rank %d: this run needs %s of device memory, but only %s of %s is free.\n"
             "  Reduce --batch or --seq-len, or use --recompute, to save memory for activations; "
             "--zero 1 saves memory for the optimizer's state.",
             process.rank, human_bytes((double)m->plan.total).text, human_bytes((double)left).text, device->name);
}

static Weights take_training(Model *m) {
    size_t N = m->B * m->T;
    take_model(m);
    matmul_start(&m->sample_matmul, m->workspace, MATMUL_WORKSPACE, NULL, false);
    for (auto &slot : m->slots) {
        CUDA_CHECK(cudaMallocHost((void **)&slot.ints, batch_ints(N) * sizeof(int32_t)));
        CUDA_CHECK(cudaMallocHost((void **)&slot.mask, N));
        CUDA_CHECK(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming));
    }
    CUDA_CHECK(cudaMallocHost((void **)&m->report, sizeof *m->report));
    CUDA_CHECK(cudaEventCreateWithFlags(&m->reported, cudaEventDisableTiming));
    for (PassTimes &times : m->passes) {
        CUDA_CHECK(cudaEventCreate(&times.start));
        CUDA_CHECK(cudaEventCreate(&times.end));
    }
    m->gathered = (cudaEvent_t *)allocate(bucket_count(m), sizeof *m->gathered, "CUDA's events");
    for (size_t i = 0; i < bucket_count(m); i++)
        CUDA_CHECK(cudaEventCreateWithFlags(&m->gathered[i], cudaEventDisableTiming));
    m->host.config = m->config;
    m->host.list = &m->list;
    m->host.bf16 = m->in_bf16;
    return m->host;
}

// The peak FLOP/s of all ranks.
static double peak_of(const Model *m, const Device *device) {
    double flops = device_peak(device, m->in_bf16);
    process_sum_double(&flops, 1);
    return flops;
}

// ---- parameters between host and device

// An array that a tensor has on this rank's device, or NULL: its parameters, or one of its states, which only its owner
// has. `array` as in WeightsPiece.
static float *device_array(const Model *m, size_t tensor, size_t array) {
    if (array == WEIGHTS_PARAMS) return has_master(m, tensor) ? m->params + m->masters[tensor] : NULL;
    bool kept = owns(m, tensor) && update_state[m->list.tensors[tensor].update][array];
    return kept ? m->state[array] + m->states[tensor] : NULL;
}

// Copies all arrays of a tensor that are on this rank's device, from or to the host, whose arrays hold all tensors.
static void copy_tensor(const Model *m, size_t tensor, bool to_host) {
    for (size_t array = 0; array <= WEIGHTS_PARAMS; array++) {
        float *host = weights_array(&m->host, array) + m->parts[tensor].from, *device = device_array(m, tensor, array);
        if (device)
            CUDA_CHECK(cudaMemcpy(to_host ? host : device, to_host ? device : host,
                                  m->parts[tensor].floats * sizeof(float), cudaMemcpyDefault));
    }
}

// Copies parameters and moments to the device. They must be identical on every rank and be those after step `step`.
static void upload(Model *m, int64_t step) {
    for (size_t i = 0; i < m->list.count; i++) copy_tensor(m, i, false);
    upload_segments(m);
    CUDA_CHECK(cudaDeviceSynchronize());    // the copies do not run on our stream
    round_parameters(m, step);
    if (!m->sharded) return;
    gather_parameters(m);
    await_parameters(m, bucket_count(m));
}

// Copies the learned scalars, and of their moments those that this rank has.
static void copy_scalars(Model *m, bool to_host) {
    collective_synchronize(m->collective, m->stream);
    for (size_t i = 0; i < m->list.count; i++)
        if (m->list.tensors[i].scalar != SCALAR_NONE) copy_tensor(m, i, to_host);
}

// Copies the scalars and angles of other normalizers to the device.
static void upload_scalars(Model *m) {
    graphs_drop(&m->graphs);
    upload_rope_tables(m);
    copy_scalars(m, false);
    upload_segments(m);
    CUDA_CHECK(cudaDeviceSynchronize());    // the copies do not run on our stream
}

// Brings a piece of a tensor from the rank that has it to the host of rank 0. Collective.
static void bring(const Model *m, const WeightsPiece *piece) {
    const float *device = device_array(m, piece->tensor, piece->array);
    bool divided = piece->array == WEIGHTS_PARAMS ? m->sharded : m->zero;
    int from = divided ? m->parts[piece->tensor].owner : 0;
    size_t bytes = piece->floats * sizeof(float);
    if (process.rank == from) CUDA_CHECK(cudaMemcpy(piece->data, device + piece->from, bytes, cudaMemcpyDeviceToHost));
    process_bring(piece->data, bytes, from);
}

// A hash of what every rank has, each on its device: the weights as matmuls read them, the vectors, and unless they are
// sharded the master weights. Overwrites parameters on the host.
static uint64_t hash_common(const Model *m) {
    XXH3_state_t *state = XXH3_createState();
    if (!state) fail(EXIT_RESOURCE, "out of memory for a hash.");
    XXH3_64bits_reset(state);
    auto add = [&](const CollectivePart &part, const void *device, size_t element) {
        void *host = m->host.params + part.from;
        CUDA_CHECK(cudaMemcpy(host, device, part.floats * element, cudaMemcpyDeviceToHost));
        XXH3_64bits_update(state, host, part.floats * element);
    };
    for (size_t i = 0; i < m->list.count; i++) {
        const CollectivePart &part = m->parts[i];
        if (!m->sharded || !is_matrix(m, i)) add(part, m->params + m->masters[i], sizeof(float));
        if (m->in_bf16 && is_matrix(m, i)) add(part, m->params_bf16 + part.from, sizeof(bf16));
    }
    uint64_t hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return hash;
}

static void save(Run *run, Model *m) {
    Save save;
    collective_synchronize(m->collective, m->stream);
    if (process.size > 1) run_compare(run, hash_common(m));
    run_save_start(run, &save);
    while (run_save_piece(run, &save)) bring(m, &save.piece);
    run_save_end(run, &save);
}

// ---- a step

// Copies a batch to the device; the plan of the embedding's gradient only if it trains. A slot's pinned memory is free
// again once its copy of two batches ago has finished.
static BatchTokens upload_batch(Model *m, const Batch *batch, bool trains) {
    auto *slot = &m->slots[m->slot++ % 2];
    size_t N = batch->B * batch->T;
    BatchTokens there = {};
    there.inputs = m->batch;
    there.targets = m->batch + N;
    there.first = m->o->doc_mask ? m->batch + 2 * N : NULL;
    there.order = m->batch + 3 * N;
    there.pieces = (const EmbeddingPiece *)(m->batch + 4 * N);
    there.mask = batch->mask ? m->mask : NULL;
    collective_wait(m->collective, slot->copied);
    memcpy(slot->ints, batch->inputs, N * sizeof(int32_t));
    memcpy(slot->ints + N, batch->targets, N * sizeof(int32_t));
    if (trains)
        there.plan = embedding_plan(slot->ints + 3 * N, (EmbeddingPiece *)(slot->ints + 4 * N), batch->inputs, N,
                                    m->starts, m->config->vocab);
    if (m->o->doc_mask) document_starts(slot->ints + 2 * N, batch->inputs, batch->B, batch->T, m->config->end_of_text);
    size_t ints = 4 * N + 4 * (there.plan.pieces + there.plan.sums);
    CUDA_CHECK(cudaMemcpyAsync(m->batch, slot->ints, ints * sizeof(int32_t), cudaMemcpyHostToDevice, m->stream));
    if (batch->mask) {
        memcpy(slot->mask, batch->mask, N);
        CUDA_CHECK(cudaMemcpyAsync(m->mask, slot->mask, N, cudaMemcpyHostToDevice, m->stream));
    }
    CUDA_CHECK(cudaEventRecord(slot->copied, m->stream));
    m->first = there.first;
    return there;
}

// Adds the time of passes that the device has finished.
static void add_passes(Model *m, PassTimes *times) {
    float ms;
    if (!times->pending) return;
    CUDA_CHECK(cudaEventElapsedTime(&ms, times->start, times->end));
    m->pass_seconds += 1e-3 * ms;
    times->pending = false;
}

template <class X>
static void micro_batch(ModelOf<X> *m, const Batch *batch) {
    BatchTokens there = upload_batch(m, batch, true);
    PassTimes *times = &m->passes[m->micro_batches++ % 3];
    add_passes(m, times);
    if (m->collective) CUDA_CHECK(cudaEventRecord(times->start, m->stream));
    model_step(m, there, batch->B, batch->T, batch->scale, batch->first, batch->last);
    if (m->collective) CUDA_CHECK(cudaEventRecord(times->end, m->stream));
    times->pending = m->collective;
    m->rows += m->config->layers * batch->B * batch->T * m->config->heads;
}

// Reads one of m->sums. The host waits for the stream.
static double read_sum(const Model *m, int which) {
    double value;
    // A copy would wait as well, but without noticing a dead rank.
    collective_synchronize(m->collective, m->stream);
    CUDA_CHECK(cudaMemcpy(&value, m->sums + which, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

// Queues the step's report. The host has read the one before.
static void step_end(Model *m) {
    StepReport *to = m->report;
    CUDA_CHECK(cudaMemcpyAsync(&to->numbers, m->numbers, sizeof to->numbers, cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaMemcpyAsync(&to->all_zero_rows, m->all_zero_rows, sizeof to->all_zero_rows, cudaMemcpyDeviceToHost,
                               m->stream));
    CUDA_CHECK(cudaMemsetAsync(m->all_zero_rows, 0, sizeof *m->all_zero_rows, m->stream));
    CUDA_CHECK(cudaEventRecord(m->reported, m->stream));
    m->reported_marks = m->timers.mark_count;
    m->reported_batches = m->micro_batches;
    m->reported_rows = m->rows;
    m->rows = 0;
    m->unread = true;
}

// Waits until the device has finished the newest step, including its update. Ends the program if the step's numbers are
// not finite. If parameters are still arriving from other ranks, waits for those as well, because what follows may be
// work of one rank alone, such as a sample.
static void read_step(Run *run, Model *m) {
    bool arriving = m->arriving > 0;
    await_parameters(m, bucket_count(m));
    collective_wait(m->collective, m->reported);
    m->unread = false;
    if (!m->report->numbers.finite) {    // all ranks end here: no sum of the next step may wait for one that has ended
        collective_join(m->collective, m->stream);
        collective_synchronize(m->collective, m->stream);
    }
    run_check_step(run, m->report->numbers.loss, m->report->numbers.norm);
    if (arriving) collective_synchronize(m->collective, m->stream);
    for (size_t i = m->micro_batches < 3 ? 0 : m->micro_batches - 3; i < m->reported_batches; i++)
        add_passes(m, &m->passes[i % 3]);
    run_step_done(run, m->pass_seconds, m->reported_rows, m->report->all_zero_rows);
    m->pass_seconds = 0;
}

// The time between pause_step() and its counterpart belongs to no step.
static void pause_step(Run *run, Model *m) {
    run_pause(run);
    phase(m, PHASE_ASIDE);
    m->timers.aside = true;
}

static void unpause_step(Run *run, Model *m) {
    m->timers.aside = false;
    phase(m, PHASE_OTHER);
    run_unpause(run);
}

// ---- what follows a step

// Waits until the device has reached the first `count` marks, and adds up the times between them. The last of them
// becomes the first mark.
static void phase_collect(PhaseTimers *t, size_t count) {
    if (count == 0) return;
    CUDA_CHECK(cudaEventSynchronize(t->marks[count - 1].event));
    for (size_t i = 0; i + 1 < count; i++) {
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, t->marks[i].event, t->marks[i + 1].event));
        t->seconds[t->marks[i].phase] += 1e-3 * ms;
    }
    auto first = t->marks.begin();
    std::rotate(first, first + (ptrdiff_t)(count - 1), first + (ptrdiff_t)t->mark_count);
    t->mark_count -= count - 1;
}

// Reports the memory that this rank uses on its GPU; with --profile also this step's milliseconds by phase, without
// PHASE_ASIDE.   ended: the number of marks up to the end of the step and of what followed it so far
static void report(Run *run, Model *m, size_t ended) {
    PhaseTimers *t = &m->timers;
    char metrics[1024], line[64];
    size_t size = sizeof metrics,
           at = (size_t)snprintf(metrics, size, ", \"gpu_memory_gb\": %.3f", 1e-9 * (double)m->plan.total);
    snprintf(line, sizeof line, " | %s", human_bytes((double)m->plan.total).text);
    if (t->on) phase_collect(t, ended);
    if (run->step == run->first_step + 1) memcpy(t->first_step, t->seconds, sizeof t->seconds);
    for (int i = 0; t->on && i < PHASE_ASIDE && at < size; i++) {    // PHASE_ASIDE is the last phase
        at += (size_t)snprintf(metrics + at, size - at, "%s\"%s\": %.3f", i ? ", " : ", \"ms_by_phase\": {",
                               phase_names[i], 1000 * (t->seconds[i] - t->reported[i]));
        t->reported[i] = t->seconds[i];
    }
    if (t->on && at < size) snprintf(metrics + at, size - at, "}");
    run_report(run, metrics, line);
}

// Finishes a step that nothing but its report follows, if the host has queued one and not read it yet.
static void finish_late(Run *run, Model *m) {
    if (!m->unread) return;
    read_step(run, m);
    report(run, m, m->reported_marks);
    run_finish_step(run);
}

// Adds the losses of a batch to SUM_VALIDATION.
template <class X>
static void model_evaluate(ModelOf<X> *m, const Batch *batch) {
    if (batch->B == 0) return;
    BatchTokens there = upload_batch(m, batch, false);
    model_forward(m, there.inputs, batch->B, batch->T, 1);
    model_loss(m, m->sums + SUM_VALIDATION, there.targets, there.mask, batch->B * batch->T, 0.0f, false);
}

// Returns false if a stop was requested during the validation.
template <class X>
static bool validate(Run *run, ModelOf<X> *m, double *loss) {
    Batch batch;
    run_validation_start(run);
    CUDA_CHECK(cudaMemsetAsync(m->sums + SUM_VALIDATION, 0, sizeof(double), m->stream));
    while (run_validation_batch(run, &batch)) model_evaluate(m, &batch);
    run_validation_add(run, read_sum(m, SUM_VALIDATION));
    return run_validation_end(run, loss);
}

template <class X>
static void change_normalizer(Run *run, ModelOf<X> *m, Change *change) {
    upload_rope_tables(m);
    if (run->val && !validate(run, m, &change->before)) return;
    copy_scalars(m, true);
    run_change_apply(run, change);
    upload_scalars(m);
    if (!run->val || validate(run, m, &change->after)) {
        run_change_finish(run, change);
    } else {
        run_change_undo(run, change);
        upload_scalars(m);
    }
}

template <class X>
static void change_normalizers(Run *run, ModelOf<X> *m) {
    Change change;
    pause_step(run, m);
    while (run_change_due(run, &change)) change_normalizer(run, m, &change);
    unpause_step(run, m);
}

// The logits (V) after the last of `count` tokens. Recomputes the whole sequence for each token, which needs no cache
// and no code of its own.
template <class X>
static float *logits_after(ModelOf<X> *m, const int32_t *tokens, size_t count) {
    size_t VP = padded_vocab(m->config);
    void *host = m->in_bf16 ? (void *)m->host_logits_bf16 : m->host_logits;
    m->first = NULL;    // a sample is a single document
    CUDA_CHECK(cudaMemcpyAsync(m->batch, tokens, count * sizeof(int32_t), cudaMemcpyHostToDevice, m->stream));
    model_forward(m, m->batch, 1, count, 1);
    model_last_logits(m, count);
    CUDA_CHECK(cudaMemcpyAsync(host, m->activations.logits, VP * sizeof(X), cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    for (size_t v = 0; m->in_bf16 && v < VP; v++) m->host_logits[v] = bf16_to_float(m->host_logits_bf16[v]);
    cap_logits(m, m->host_logits);
    return m->host_logits;
}

// Adds the squares of the tensors that this rank updates by this rule. Returns the sum of the next block.
static const double *add_norms(Run *run, const Model *m, NormsOf kind, int rule, const double *blocks) {
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        double sum = 0;
        if (!updates(m, i, rule)) continue;
        for (size_t from = 0; from < t->elements; from += SEGMENT_PART) sum += *blocks++;
        run_norms_add(run, kind, t, sum);
    }
    return blocks;
}

// For --norms-every
static void measure_norms(Run *run, Model *m) {
    double *partials = m->sums + SUM_PARTIALS;
    pause_step(run, m);
    run_norms_start(run);
    for (int kind = 0; kind < NORMS_KINDS; kind++) {
        gradient_squares(m->sums + SUM_SQUARES, partials, kind == NORMS_OF_GRADIENT ? m->grads : m->params, m->segments,
                         m->segment_count, m->segment_blocks, kind == NORMS_OF_WEIGHTS, m->stream);
        collective_synchronize(m->collective, m->stream);
        CUDA_CHECK(cudaMemcpy(m->host_sums, partials, m->segment_blocks * sizeof(double), cudaMemcpyDeviceToHost));
        const double *blocks = m->host_sums;
        for (int rule = 0; rule < UPDATE_COUNT; rule++) blocks = add_norms(run, m, (NormsOf)kind, rule, blocks);
    }
    if (m->zero) process_sum_double(run->norms, NORMS_KINDS * norm_groups(run));
    unpause_step(run, m);
}

template <class X>
static void draw_sample(Run *run, ModelOf<X> *m) {
    Sample sample;
    run_sample_start(run, &sample);
    std::swap(m->matmul, m->sample_matmul);
    while (run_sample_add(run, &sample, logits_after(m, sample.ids, sample.count))) {}
    std::swap(m->matmul, m->sample_matmul);
    run_sample_end(run, &sample);
}

static int end(Run *run, Model *m) {
    graphs_drop(&m->graphs);
    for (const Mark &mark : m->timers.marks) CUDA_CHECK(cudaEventDestroy(mark.event));
    matmul_file_save(&m->matmul_file);    // what a validation at the end has measured
    if (m->params) matmul_end(&m->matmul);
    if (m->params) matmul_end(&m->sample_matmul);
    if (m->muon.x) matmul_end(&m->muon_matmul);
    collective_end(m->collective);
    const int code = run_end(run);
    for (const auto &slot : m->slots)
        if (slot.copied) CUDA_CHECK(cudaEventDestroy(slot.copied));
    if (m->reported) CUDA_CHECK(cudaEventDestroy(m->reported));
    for (const PassTimes &times : m->passes) {
        if (times.start) CUDA_CHECK(cudaEventDestroy(times.start));
        if (times.end) CUDA_CHECK(cudaEventDestroy(times.end));
    }
    for (size_t i = 0; m->gathered && i < bucket_count(m); i++) CUDA_CHECK(cudaEventDestroy(m->gathered[i]));
    CUDA_CHECK(cudaStreamDestroy(m->stream));
    free(m->gathered);
    free(m->states);
    free(m->masters);
    free(m->vectors);
    free(m->parts);
    tensors_free(&m->list);
    return code;
}

template <class X>
static int train(Run *run) {
    const TrainOptions *o = &run->o;
    ModelOf<X> model = {};
    ModelOf<X> *m = &model;
    char matmuls[512];
    double loss;
    Batch batch;

    // Plan and check the memory. Nothing is written yet.
    m->config = run->config;
    Device device = start_device(m, run);
    plan_training(m, run);
    describe_matmuls(matmuls, sizeof matmuls, &device, &m->matmul_file, o);
    run_plan(run, &m->host_plan, matmuls, &m->plan, device_memory().free);
    check_device_memory(m, &device);
    if (!run_take(run)) return end(run, m);

    run_load(run, take_training(m));
    upload(m, run->step);
    run_begin(run, peak_of(m, &device));

    // Switch now if --attn differs from the normalizer of --init-from, or if --attn-switch names step 0.
    change_normalizers(run, m);
    while (run_continues(run)) {
        if (!run->owed) {    // otherwise the run stopped between a step and its validation
            while (run_batch(run, &batch)) {
                micro_batch(m, &batch);
                finish_late(run, m);    // the step before, while the device works on this batch
            }
            if (run->stopped) break;
            gradients_end(m, o->grad_clip);
            model_update(m, run_update(run));
            step_end(m);
            matmul_file_save(&m->matmul_file);
            if (!run_pauses(run)) continue;
            read_step(run, m);
            if (run_norms_due(run)) measure_norms(run, m);
        }

        pause_step(run, m);
        if (run_validation_due(run) && validate(run, m, &loss)) run_validated(run, loss);
        if (run_reports_scalars(run)) copy_scalars(m, true);
        unpause_step(run, m);
        if (run->stopped) break;
        report(run, m, m->timers.mark_count);

        pause_step(run, m);
        if (run_sample_due(run)) draw_sample(run, m);
        if (run_finish_step(run)) save(run, m);
        unpause_step(run, m);
        change_normalizers(run, m);
    }

    finish_late(run, m);    // after a stop
    if (run_save_due_at_end(run)) save(run, m);
    if (run_validation_due_at_end(run) && validate(run, m, &loss)) run_validated_at_end(run, loss);
    phase_collect(&m->timers, m->timers.mark_count);
    if (o->profile && run->step > run->first_step)
        profile_print(&run->progress, m->timers.seconds, m->timers.first_step, run->step - run->first_step);
    return end(run, m);
}

int main(int argc, char **argv) {
    static Run run;
    static ModelConfig config;
    const RunProgram program = {
        "train_gpt2cu",
        "Usage: train_gpt2cu --train-data GLOB [flags]\n\n"
        "Trains a GPT on GPUs, one per rank. To run N ranks: scripts/launch.sh N ./train_gpt2cu ...",
        true,
        collective_prepare(),
    };
    run_open(&run, &program, &config, argc, argv);
    return run.o.dtype == TRAIN_BF16 ? train<bf16>(&run) : train<float>(&run);
}
#endif

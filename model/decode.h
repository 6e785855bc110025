// Decoding on the CPU: one token at a time with a key-value cache. Include it after the model and its layers, which it
// takes from train_gpt2.c. The trainer includes it for its samples, and so does every program that generates.
#ifndef MODEL_DECODE_H
#define MODEL_DECODE_H

#include "runtime/gemv.h"

enum {
    PREFILL_ROWS = 1024,    // prompt tokens that run through the layers together
    FEW_ROWS = 8            // decoding uses gemv() for at most this many rows
};

typedef struct {
    Model *m;
    size_t sequences, length, rows;        // sequences at once, their maximum length, rows per call
    float *k, *v;                          // (layers, sequences, NKV, length, HS or VS)
    float *x, *h, *att, *gate_up, *act;    // (rows, ...)
    float *joined, *q, *inverse_norms;     // (rows, ...), see Projected
    float *logits;                         // (sequences, V)
    float *scores;                         // (threads, length)
    float *attention, *stats;              // for the attention of a span of a prompt
    int32_t *starts, *first;               // (sequences), (rows): where the newest token's document begins
    float *cosines, *sines;                // (length, HS/2)
    // (layers, NH, length), or NULL: decode() writes the attention weights of its last row
    float *weights;
} Decoder;

// One token of a sequence at its position. The rows of a sequence are in order and continue the positions in the cache.
typedef struct {
    int32_t token;
    size_t sequence, position;
} DecodeRow;

// One row per block. plan() adds the arrays that only this block needs. keys() computes k and v of row r for the cache,
// from the row's projections; it writes those of head 0 at k and v, and each other head's d->length rows after the one
// before it. decode() runs one layer for all rows.
typedef struct {
    void (*plan)(Decoder *d, MemoryPlan *plan);
    void (*keys)(Decoder *d, Rope rope, size_t r, size_t layer, float *k, float *v);
    void (*decode)(Decoder *d, const DecodeRow *rows, size_t count, size_t l);
} DecodeBlock;

static const DecodeBlock *decode_block(const Decoder *d);

static const char *const DECODING = "key-value cache and decoding";

static void layer_plan_decoder(Decoder *d, MemoryPlan *plan) {
    memory_add(plan, DECODING, (void **)&d->gate_up, FLOATS(d->rows * 2 * d->m->config.ffn));
}

static void unit_plan_decoder(Decoder *d, MemoryPlan *plan) {
    memory_add(plan, DECODING, (void **)&d->q, FLOATS(d->rows * query_width(&d->m->config)));
}

// `count` new positions of a sequence, after `past` earlier ones in the cache.
static AttentionShape span_shape(const Decoder *d, size_t layer, size_t past, size_t count) {
    AttentionShape shape = attention_shape(&d->m->config, layer, 1, count);
    shape.cached = true;
    shape.past = past;
    return shape;
}

// Call after plan_activations(), if at all: the matmuls' scratch is for both.
static void plan_decoder(Decoder *d, Model *m, MemoryPlan *plan, size_t sequences, size_t length) {
    const ModelConfig *c = &m->config;
    size_t C = c->channels, F = c->ffn, rows = larger(sequences, PREFILL_ROWS);
    size_t cached = c->layers * sequences * length, heads = c->heads + c->kv_heads;
    const char *kind = DECODING;
    *d = (Decoder){.m = m, .sequences = sequences, .length = length, .rows = rows};
    memory_add(plan, kind, (void **)&d->k, FLOATS(cached * key_width(c)));
    memory_add(plan, kind, (void **)&d->v, FLOATS(cached * value_width(c)));
    memory_add(plan, kind, (void **)&d->x, FLOATS(rows * C));
    memory_add(plan, kind, (void **)&d->h, FLOATS(rows * C));
    memory_add(plan, kind, (void **)&d->joined, FLOATS(rows * joined_width(c)));
    memory_add(plan, kind, (void **)&d->inverse_norms, FLOATS(rows * heads));
    memory_add(plan, kind, (void **)&d->att, FLOATS(rows * output_width(c)));
    decode_block(d)->plan(d, plan);
    memory_add(plan, kind, (void **)&d->act, FLOATS(rows * F));
    memory_add(plan, kind, (void **)&d->logits, FLOATS(sequences * c->vocab));
    memory_add(plan, kind, (void **)&d->scores, FLOATS((size_t)omp_get_max_threads() * length));
    memory_add(plan, kind, (void **)&d->attention,
               FLOATS(attention_scratch(span_shape(d, 0, length, rows), omp_get_max_threads())));
    memory_add(plan, kind, (void **)&d->stats, FLOATS(rows * c->heads * ROW_STATS));
    memory_add(plan, kind, (void **)&d->starts, sequences * sizeof *d->starts);
    memory_add(plan, kind, (void **)&d->first, rows * sizeof *d->first);
    memory_add(plan, kind, (void **)&d->cosines, FLOATS(length * head_size(c) / 2));
    memory_add(plan, kind, (void **)&d->sines, FLOATS(length * head_size(c) / 2));
    size_t matmul_bytes = m->B ? 0 : gemm_scratch(&m->mm, rows * widest_second(c), 0);
    if (matmul_bytes) memory_add(plan, kind, &m->matmul_scratch, matmul_bytes);
}

// Under ntk, every position uses the angles of the whole length that the cache can hold, whatever the length so far: a
// key is rotated once, when it enters the cache.
static void decoder_ready(Decoder *d) {
    Model *m = d->m;
    if (!m->B && m->matmul_scratch) gemm_use(&m->mm, m->matmul_scratch, d->rows * widest_second(&m->config));
    rope_table(d->cosines, d->sines, d->length, model_rope(&m->config, 0));
}

static Rope rope_at(const Decoder *d, size_t layer, size_t position) {
    const ModelConfig *c = &d->m->config;
    size_t HS = head_size(c), angles = position * (HS / 2);
    return (Rope){1,
                  1,
                  c->heads,
                  c->kv_heads,
                  HS,
                  d->cosines + angles,
                  d->sines + angles,
                  normalizer_of(c, layer)->qk.kind == QK_L2};
}

// q stays in place.
static void layer_keys(Decoder *d, Rope rope, size_t r, size_t layer, float *k, float *v) {
    const ModelConfig *c = &d->m->config;
    float *q = d->joined + r * joined_width(c), *inverse_norms = d->inverse_norms + r * (rope.NH + rope.NKV);
    if (c->qk_norm) qk_norm_forward(q, NULL, NULL, qk_norm_of(d->m, layer, 1));
    rope_forward(q, inverse_norms, rope);
    size_t HS = head_size(c), VS = value_size(c);
    for (size_t h = 0; h < c->kv_heads; h++) {
        memcpy(k + h * d->length * HS, q + query_width(c) + h * HS, FLOATS(HS));
        memcpy(v + h * d->length * VS, q + query_width(c) + key_width(c) + h * VS, FLOATS(VS));
    }
}

// q goes to d->q.
static void unit_keys(Decoder *d, Rope rope, size_t r, size_t layer, float *k, float *v) {
    const ModelConfig *c = &d->m->config;
    Projected x = {.joined = d->joined + r * joined_width(c), .q = d->q + r * query_width(c), .k = k, .v = v};
    x.inverse_norms = d->inverse_norms + r * (rope.NH + rope.NKV);
    gau_forward(x, gains_in(d->m, d->m->params, layer), rope, c->ffn);
}

// The queries from row r on, and the cached keys and values of their sequence.
static AttentionInput cached_input(const Decoder *d, const DecodeRow *row, size_t r, size_t layer) {
    const ModelConfig *c = &d->m->config;
    size_t K = query_width(c), W = joined_width(c), KV = key_width(c), VV = value_width(c);
    size_t cache = (layer * d->sequences + row->sequence) * d->length;
    return (AttentionInput){.q = d->q ? (ConstView){d->q + r * K, K, head_size(c)}
                                      : (ConstView){d->joined + r * W, W, head_size(c)},
                            .k = {d->k + cache * KV, head_size(c), d->length * head_size(c)},
                            .v = {d->v + cache * VV, value_size(c), d->length * value_size(c)},
                            .first = d->m->doc_mask ? d->first + r : NULL,
                            .tiles = d->m->mm.tiles};
}

// Attention of head h of row r over the cached keys of its sequence.
static void decode_head(Decoder *d, const DecodeRow *row, size_t r, size_t h, size_t layer) {
    AttentionShape shape = attention_shape(&d->m->config, layer, 1, row->position + 1);
    AttentionInput in = cached_input(d, row, r, layer);
    size_t kv = h / (shape.NH / shape.NKV), first = (size_t)d->first[r];
    in.k.p += first * in.k.row + kv * in.k.head;
    in.v.p += first * in.v.row + kv * in.v.head;
    attention_row(d->att + (r * shape.NH + h) * shape.VS, in.q.p + h * in.q.head, in.k, in.v, row->position + 1 - first,
                  h, layer_scalars(d->m, layer), shape, d->scores + (size_t)omp_get_thread_num() * d->length);
}

// Do the rows continue one sequence, as in a prompt?
static bool is_span(const DecodeRow *rows, size_t count) {
    for (size_t r = 1; r < count; r++)
        if (rows[r].sequence != rows[0].sequence) return false;
    return count > 1;
}

static void keep_weights(Decoder *d, const DecodeRow *row, size_t r, size_t layer) {
    AttentionShape shape = span_shape(d, layer, row->position, 1);
    #pragma omp parallel for schedule(static)
    for (size_t h = 0; h < shape.NH; h++)
        attention_weights(d->weights + (layer * shape.NH + h) * d->length, d->length, NULL,
                          cached_input(d, row, r, layer), layer_scalars(d->m, layer), shape,
                          (AttentionRows){.h = h, .rows = 1});
}

// Attention of one layer for all rows. All keys and values are cached first, so that a row sees earlier rows of the
// same call.
static void decode_attention(Decoder *d, const DecodeRow *rows, size_t count, size_t layer) {
    const ModelConfig *c = &d->m->config;
    size_t NH = c->heads, work = count * (rows[0].position + 1) * (query_width(c) + output_width(c));
    #pragma omp parallel for schedule(static) if (count > 1)
    for (size_t r = 0; r < count; r++) {
        size_t sequence = layer * d->sequences + rows[r].sequence, position = rows[r].position;
        size_t at = sequence * c->kv_heads * d->length + position;
        decode_block(d)->keys(d, rope_at(d, layer, position), r, layer, d->k + at * head_size(c),
                              d->v + at * value_size(c));
    }
    if (is_span(rows, count)) {
        attention_forward(d->att, d->stats, cached_input(d, rows, 0, layer), layer_scalars(d->m, layer),
                          span_shape(d, layer, rows[0].position, count), d->attention);
    } else {
        #pragma omp parallel for collapse(2) schedule(dynamic) if (work >= SHARED_WORK)
        for (size_t r = 0; r < count; r++)
            for (size_t h = 0; h < NH; h++) decode_head(d, &rows[r], r, h, layer);
    }
    if (d->weights) keep_weights(d, &rows[count - 1], count - 1, layer);
}

// matmul_forward() with the weights at `offset`. Where they are in bfloat16, the input of a few rows stays float32.
static void decode_matmul(float *out, const float *inp, const Model *m, size_t offset, size_t N, size_t C, size_t OC,
                          bool add) {
    WeightMatrix w = weight(m, offset);
    if (m->params_bf16 && N <= FEW_ROWS) w.bf16 = m->params_bf16 + offset;
    if (N <= FEW_ROWS) gemv(out, inp, w.f32, w.bf16, N, C, OC, add);
    else matmul_forward(out, in_f32(inp), w, N, C, OC, add);
}

static void decode_layer(Decoder *d, const DecodeRow *rows, size_t count, size_t l) {
    Model *m = d->m;
    const LayerOffsets *at = &m->list.layers[l];
    size_t C = m->config.channels, F = m->config.ffn, W = joined_width(&m->config);
    rmsnorm_forward(in_f32(d->h), d->x, m->params + at->norm1, count, C, norm_eps(m));
    decode_matmul(d->joined, d->h, m, at->q, count, C, W, false);
    if (m->config.qkv_bias) bias_forward(d->joined, m->params + at->q_bias, count, W);
    decode_attention(d, rows, count, l);
    decode_matmul(d->x, d->att, m, at->o, count, output_width(&m->config), C, true);
    rmsnorm_forward(in_f32(d->h), d->x, m->params + at->norm2, count, C, norm_eps(m));
    decode_matmul(d->gate_up, d->h, m, at->gate, count, C, 2 * F, false);
    swiglu_forward(in_f32(d->act), d->gate_up, count, F);
    decode_matmul(d->x, d->act, m, at->down, count, F, C, true);
}

static void decode_unit(Decoder *d, const DecodeRow *rows, size_t count, size_t l) {
    Model *m = d->m;
    const LayerOffsets *at = &m->list.layers[l];
    size_t C = m->config.channels, E = m->config.ffn, W = joined_width(&m->config);
    rmsnorm_forward(in_f32(d->h), d->x, m->params + at->norm1, count, C, norm_eps(m));
    decode_matmul(d->joined, d->h, m, at->u, count, C, W, false);
    decode_attention(d, rows, count, l);
    gau_gate_forward(in_f32(d->act), d->joined, d->att, count, E, W);
    decode_matmul(d->x, d->act, m, at->o, count, E, C, true);
}

static const DecodeBlock *decode_block(const Decoder *d) {
    static const DecodeBlock DECODE_BLOCKS[] = {
        [BLOCK_LLAMA] = {layer_plan_decoder, layer_keys, decode_layer},
        [BLOCK_GAU] = {unit_plan_decoder, unit_keys, decode_unit},
    };
    return &DECODE_BLOCKS[d->m->config.block];
}

// Runs at most d->rows rows through the layers. On return d->x (count,C) is the final residual stream.
static void decode(Decoder *d, const DecodeRow *rows, size_t count) {
    Model *m = d->m;
    size_t C = m->config.channels;
    for (size_t r = 0; r < count; r++) {
        int32_t *start = &d->starts[rows[r].sequence];
        size_t t = rows[r].position;
        if (t == 0 || (m->doc_mask && rows[r].token == m->config.end_of_text)) *start = (int32_t)t;
        d->first[r] = *start;
    }
    for (size_t r = 0; r < count; r++)
        memcpy(d->x + r * C, m->params + m->list.embedding + (size_t)rows[r].token * C, FLOATS(C));
    for (size_t l = 0; l < m->config.layers; l++) decode_block(d)->decode(d, rows, count, l);
}

// Computes the logits (count,V) of `count` rows of the last decode(), from row `row` on, and stores them for
// consecutive sequences from `sequence` on.
static float *decode_logits(Decoder *d, size_t row, size_t count, size_t sequence) {
    Model *m = d->m;
    size_t C = m->config.channels, V = m->config.vocab;
    float *logits = d->logits + sequence * V;
    rmsnorm_forward(in_f32(d->h), d->x + row * C, m->params + m->list.norm, count, C, norm_eps(m));
    decode_matmul(logits, d->h, m, m->list.head, count, C, V, false);
    if (m->config.logit_softcap != 0) softcap(logits, count * V, (float)m->config.logit_softcap);
    return logits;
}

// Feeds at least one token to a sequence, from position `from` on. The cache holds the earlier positions. Returns the
// number of tokens in the last decode().
static size_t decode_span(Decoder *d, const int32_t *tokens, size_t count, size_t sequence, size_t from) {
    DecodeRow rows[PREFILL_ROWS];
    size_t here = 0;
    for (size_t at = 0; at < count; at += here) {
        here = smaller(count - at, PREFILL_ROWS);
        for (size_t r = 0; r < here; r++) rows[r] = (DecodeRow){tokens[at + r], sequence, from + at + r};
        decode(d, rows, here);
    }
    return here;
}

// Feeds a prompt of at least one token to a sequence and returns the logits after its last token.
static float *decode_prompt(Decoder *d, const int32_t *prompt, size_t count, size_t sequence) {
    return decode_logits(d, decode_span(d, prompt, count, sequence, 0) - 1, 1, sequence);
}

#endif

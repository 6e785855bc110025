// Decoding on the CPU: one token at a time with a key-value cache. Include it after the model and its layers, which it
// takes from train_gpt2.c. The trainer includes it for its samples, and so does every program that generates.
#ifndef MODEL_DECODE_H
#define MODEL_DECODE_H

#include "math/gemv.h"

#ifndef PREFILL_ROWS
#define PREFILL_ROWS 1024    // prompt tokens that run through the layers together
#endif
enum { FEW_ROWS = 8 };    // decoding uses gemv() for at most this many rows

// A layer's part of the cache: how many positions of a sequence it holds, and the positions of all layers before it. A
// layer with a window only keeps what later queries see, and moves that to the front when it has no more room.
typedef struct {
    size_t kept, before;
} LayerCache;

typedef struct {
    Model *m;
    size_t sequences, length, rows;        // sequences at once, their maximum length, rows per call
    size_t back;                           // the most positions by which a sequence may go back, except to its start
    LayerCache *caches;                    // (layers)
    int32_t *bases;                        // (layers, sequences): the position of the first row that is in the cache
    float *k, *v;                          // for each layer (sequences, NKV, kept, HS or VS)
    float *x, *h, *att, *gate_up, *act;    // (rows, ...)
    float *joined, *q, *inverse_norms;     // (rows, ...), see Projected
    float *att_gate;                       // (rows, G)
    float *logits;                         // (sequences, V)
    float *scores;                         // (threads, length)
    float *attention, *stats;              // for the attention of a span of a prompt
    int32_t *starts, *first;               // (sequences), (rows): where the newest token's document begins
    int32_t *seen;                         // (rows): the first cached row that a row sees in the current layer
    float *cosines, *sines;                // (tables, length, HS/2)
    // (layers, NH, length), or NULL: decode() writes the attention weights of its last row
    float *weights;
} Decoder;

// One token of a sequence at its position. The rows of a sequence are in order and continue the positions in the cache.
typedef struct {
    int32_t token;
    size_t sequence, position;
} DecodeRow;

// One row per block. plan() adds the arrays that only this block needs. keys() computes k and v of row r for the cache,
// from the row's projections; it writes those of head 0 at k and v, and each other head's as many rows after the one
// before it as the layer keeps. decode() runs one layer for all rows.
typedef struct {
    void (*plan)(Decoder *d, MemoryPlan *plan);
    void (*keys)(Decoder *d, Rope rope, size_t r, size_t layer, float *k, float *v);
    void (*decode)(Decoder *d, const DecodeRow *rows, size_t count, size_t l);
} DecodeBlock;

static const DecodeBlock *decode_block(const Decoder *d);

static const char *const DECODING = "key-value cache and decoding";

static void layer_plan_decoder(Decoder *d, MemoryPlan *plan) {
    const ModelConfig *c = &d->m->config;
    if (c->gate) memory_add(plan, DECODING, (void **)&d->att_gate, FLOATS(d->rows * gate_width(c)));
    memory_add(plan, DECODING, (void **)&d->gate_up, FLOATS(d->rows * 2 * c->ffn));
}

static void unit_plan_decoder(Decoder *d, MemoryPlan *plan) {
    memory_add(plan, DECODING, (void **)&d->q, FLOATS(d->rows * query_width(&d->m->config)));
}

// `count` new positions of a sequence from this one on, of which the cache has those from `base` on.
static AttentionShape span_shape(const Decoder *d, size_t layer, size_t position, size_t base, size_t count) {
    AttentionShape shape = attention_shape(&d->m->config, layer, 1, count);
    shape.cached = true;
    shape.past = position - base;
    shape.before = base;
    return shape;
}

// How many earlier positions a layer with this window may still need.
static size_t window_past(const Decoder *d, size_t window) {
    return window && window < d->length ? window - 1 + d->back : d->length;
}

// Lays out the cache for the most that a layer needs under any of the model's lists. Returns the number of positions.
static size_t plan_caches(Decoder *d) {
    const Model *m = d->m;
    size_t positions = 0;
    d->caches = allocate(m->config.layers, sizeof *d->caches, "the list of caches");
    for (size_t l = 0; l < m->config.layers; l++) {
        size_t past = window_past(d, attention_of(&m->config, l)->window);
        for (size_t i = 0; i < m->other_count; i++)
            past = larger(past, window_past(d, attention_at(m->others[i], l)->window));
        d->caches[l] = (LayerCache){smaller(d->length, past + d->rows), positions};
        positions += d->sequences * d->caches[l].kept;
    }
    return positions;
}

// Call after plan_activations(), if at all: the matmuls' scratch is for both.   back: see Decoder
static void plan_decoder(Decoder *d, Model *m, MemoryPlan *plan, size_t sequences, size_t length, size_t back) {
    const ModelConfig *c = &m->config;
    size_t C = c->channels, F = c->ffn, rows = larger(sequences, PREFILL_ROWS), heads = c->heads + c->kv_heads;
    const char *kind = DECODING;
    *d = (Decoder){.m = m, .sequences = sequences, .length = length, .rows = rows, .back = back};
    size_t cached = plan_caches(d), most = 0, angles = most_of(m, attention_tables) * length * head_size(c) / 2;
    for (size_t l = 0; l < c->layers; l++) most = larger(most, d->caches[l].kept);
    AttentionShape span = span_shape(d, 0, most, 0, rows);
    span.window = most_of(m, widest_window);
    memory_add(plan, kind, (void **)&d->bases, c->layers * sequences * sizeof *d->bases);
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
    memory_add(plan, kind, (void **)&d->attention, FLOATS(attention_scratch(span, omp_get_max_threads())));
    memory_add(plan, kind, (void **)&d->stats, FLOATS(rows * c->heads * ROW_STATS));
    memory_add(plan, kind, (void **)&d->starts, sequences * sizeof *d->starts);
    memory_add(plan, kind, (void **)&d->first, rows * sizeof *d->first);
    memory_add(plan, kind, (void **)&d->seen, rows * sizeof *d->seen);
    memory_add(plan, kind, (void **)&d->cosines, FLOATS(angles));
    memory_add(plan, kind, (void **)&d->sines, FLOATS(angles));
    size_t matmul_bytes = m->B ? 0 : gemm_scratch(&m->mm, rows * widest_second(c), 0);
    if (matmul_bytes) memory_add(plan, kind, &m->matmul_scratch, matmul_bytes);
}

static float *decoder_cosines(const Decoder *d, size_t table) {
    return d->cosines + table * d->length * (head_size(&d->m->config) / 2);
}

static float *decoder_sines(const Decoder *d, size_t table) {
    return d->sines + table * d->length * (head_size(&d->m->config) / 2);
}

// Call after memory_take(), and after a change of the model's normalizers. Under ntk, every position uses the angles of
// the whole length that the cache can hold, whatever the length so far: a key is rotated once, when it enters it.
static void decoder_ready(Decoder *d) {
    Model *m = d->m;
    if (!m->B && m->matmul_scratch) gemm_use(&m->mm, m->matmul_scratch, d->rows * widest_second(&m->config));
    for (size_t i = 0; i < attention_tables(&m->config.attn); i++)
        rope_table(decoder_cosines(d, i), decoder_sines(d, i), d->length,
                   model_rope(&m->config, attention_table_base(&m->config.attn, i)));
}

static Rope rope_at(const Decoder *d, size_t layer, size_t position) {
    Rope rope = rope_of(d->m, layer, 1, 1);
    size_t table = attention_table(&d->m->config.attn, layer), angles = position * (rope.HS / 2);
    if (table == NO_TABLE) return rope;
    rope.cosines = decoder_cosines(d, table) + angles;
    rope.sines = decoder_sines(d, table) + angles;
    return rope;
}

static int32_t *base_of(const Decoder *d, size_t layer, size_t sequence) {
    return &d->bases[layer * d->sequences + sequence];
}

// Where the cache of a layer has this position of a sequence, in rows of its first head.
static size_t cached_row(const Decoder *d, size_t layer, size_t sequence, size_t position) {
    const LayerCache *cache = &d->caches[layer];
    size_t heads = d->m->config.kv_heads;
    return (cache->before + sequence * cache->kept) * heads + position - (size_t)*base_of(d, layer, sequence);
}

// Moves the last `count` of `rows` rows of each head to the front.
static void move_rows(float *x, size_t kept, size_t heads, size_t width, size_t rows, size_t count) {
    for (size_t h = 0; h < heads; h++, x += kept * width) memmove(x, x + (rows - count) * width, FLOATS(count * width));
}

// Makes room for the positions of a sequence from `first` to `last`.
static void make_room(Decoder *d, size_t layer, size_t sequence, size_t first, size_t last) {
    const ModelConfig *c = &d->m->config;
    int32_t *base = base_of(d, layer, sequence);
    size_t kept = d->caches[layer].kept, past = smaller(first, window_past(d, attention_of(c, layer)->window));
    if (first == 0) *base = 0;
    if (last - (size_t)*base < kept) return;
    size_t rows = first - (size_t)*base, front = cached_row(d, layer, sequence, (size_t)*base);
    move_rows(d->k + front * head_size(c), kept, c->kv_heads, head_size(c), rows, past);
    move_rows(d->v + front * value_size(c), kept, c->kv_heads, value_size(c), rows, past);
    *base = (int32_t)(first - past);
}

// Makes room for all rows of a call, and sets d->seen.
static void prepare_layer(Decoder *d, const DecodeRow *rows, size_t count, size_t layer) {
    size_t window = attention_of(&d->m->config, layer)->window;
    for (size_t r = 0; r < count; r++) {
        size_t sequence = rows[r].sequence, position = rows[r].position, earlier = 0, last = r;
        while (rows[earlier].sequence != sequence) earlier++;
        for (size_t i = r + 1; earlier == r && i < count; i++)
            if (rows[i].sequence == sequence) last = i;
        if (earlier == r) make_room(d, layer, sequence, position, rows[last].position);
        size_t first = (size_t)d->first[r];
        if (window && position + 1 > window) first = larger(first, position + 1 - window);
        d->seen[r] = (int32_t)first - *base_of(d, layer, sequence);
    }
}

// q stays in place.
static void layer_keys(Decoder *d, Rope rope, size_t r, size_t layer, float *k, float *v) {
    const ModelConfig *c = &d->m->config;
    float *q = d->joined + r * joined_width(c), *inverse_norms = d->inverse_norms + r * (rope.NH + rope.NKV);
    if (c->qk_norm) qk_norm_forward(q, NULL, NULL, qk_norm_of(d->m, layer, 1));
    rope_forward(q, inverse_norms, rope);
    size_t HS = head_size(c), VS = value_size(c), kept = d->caches[layer].kept;
    for (size_t h = 0; h < c->kv_heads; h++) {
        memcpy(k + h * kept * HS, q + query_width(c) + h * HS, FLOATS(HS));
        memcpy(v + h * kept * VS, q + query_width(c) + key_width(c) + h * VS, FLOATS(VS));
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
    size_t K = query_width(c), W = joined_width(c);
    size_t kept = d->caches[layer].kept, HS = head_size(c), VS = value_size(c);
    size_t front = cached_row(d, layer, row->sequence, (size_t)*base_of(d, layer, row->sequence));
    return (AttentionInput){.q = d->q ? (ConstView){d->q + r * K, K, HS} : (ConstView){d->joined + r * W, W, HS},
                            .k = {d->k + front * HS, HS, kept * HS},
                            .v = {d->v + front * VS, VS, kept * VS},
                            .first = d->m->doc_mask || attention_of(c, layer)->window ? d->seen + r : NULL,
                            .tiles = d->m->mm.tiles};
}

// Attention of head h of row r over the cached keys of its sequence.
static void decode_head(Decoder *d, const DecodeRow *row, size_t r, size_t h, size_t layer) {
    AttentionShape shape = attention_shape(&d->m->config, layer, 1, row->position + 1);
    AttentionInput in = cached_input(d, row, r, layer);
    size_t kv = h / (shape.NH / shape.NKV), first = (size_t)d->seen[r],
           base = (size_t)*base_of(d, layer, row->sequence);
    in.k.p += first * in.k.row + kv * in.k.head;
    in.v.p += first * in.v.row + kv * in.v.head;
    attention_row(d->att + (r * shape.NH + h) * shape.VS, in.q.p + h * in.q.head, in.k, in.v,
                  row->position + 1 - base - first, h, layer_scalars(d->m, layer), shape,
                  d->scores + (size_t)omp_get_thread_num() * d->length);
}

// Do the rows continue one sequence, as in a prompt?
static bool is_span(const DecodeRow *rows, size_t count) {
    for (size_t r = 1; r < count; r++)
        if (rows[r].sequence != rows[0].sequence) return false;
    return count > 1;
}

static void keep_weights(Decoder *d, const DecodeRow *row, size_t r, size_t layer) {
    AttentionShape shape = span_shape(d, layer, row->position, (size_t)*base_of(d, layer, row->sequence), 1);
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
    size_t NH = c->heads, keys = attention_keys(attention_of(c, layer), rows[0].position + 1);
    size_t work = count * keys * (query_width(c) + output_width(c));
    prepare_layer(d, rows, count, layer);
    #pragma omp parallel for schedule(static) if (count > 1)
    for (size_t r = 0; r < count; r++) {
        size_t position = rows[r].position, at = cached_row(d, layer, rows[r].sequence, position);
        decode_block(d)->keys(d, rope_at(d, layer, position), r, layer, d->k + at * head_size(c),
                              d->v + at * value_size(c));
    }
    if (is_span(rows, count)) {
        attention_forward(d->att, d->stats, cached_input(d, rows, 0, layer), layer_scalars(d->m, layer),
                          span_shape(d, layer, rows[0].position, (size_t)*base_of(d, layer, rows[0].sequence), count),
                          d->attention);
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
    size_t E = output_width(&m->config), G = gate_width(&m->config);
    rmsnorm_forward(in_f32(d->h), d->x, m->params + at->norm1, count, C, norm_eps(m));
    decode_matmul(d->joined, d->h, m, at->q, count, C, W, false);
    if (m->config.qkv_bias) bias_forward(d->joined, m->params + at->q_bias, count, W);
    decode_attention(d, rows, count, l);
    if (m->config.gate) {
        decode_matmul(d->att_gate, d->h, m, at->att_gate, count, C, G, false);
        output_gate_forward(d->att, d->att, d->att_gate, count, E, G);
    }
    decode_matmul(d->x, d->att, m, at->o, count, E, C, true);
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

// The C entry points of the PyTorch package attn_c (doc/pytorch.md): attention on arrays with any strides, in float, or
// in double with REAL=double. attention/torch/library.py calls them by ctypes. They know nothing of PyTorch and keep no
// state. Tested by dev/tests/test_torch.py.
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attention_cpu.h"
#include "attention/l2.h"
#include "attention/torch/call.h"
#include "runtime/subnormal.h"

// What does not change between calls with arrays of the same shapes; the class Call in library.py. The queries are the
// last of the keys' positions.
typedef struct {
    const Normalizer *normalizer;
    size_t B, NH, NKV, queries, keys, HS, VS, window;    // window: 0 without one
    int L, threads, bf16;    // bf16: the inputs were bfloat16, so rounding them loses nothing
    double scaling;          // replaces the 1/sqrt(d) of a scale that has one; 0 does not
    Strides q, k, v;
} Call;

// ---- the normalizer

static bool reads_length(const Normalizer *n) {
    bool start = normalizer_has(n, SCALAR_S) && n->scale.kind != SCALE_PN && isnan(n->s_start);
    return start || normalizer_has(n, SCALAR_P) || n->scale.kind == SCALE_LOG_L || n->offset.kind == OFFSET_LOG_L ||
           n->norm.kind == NORM_L;
}

// The normalizer of a text for the training length L, 0 if that is unknown; to be kept, since calls point to it. NULL
// with a message if there is no such normalizer, or if it depends on an unknown L.
EXPORT const Normalizer *attn_c_normalizer(const char *text, int L, char *message, size_t size) {
    Normalizer parsed, *kept;
    if (!normalizer_parse(&parsed, text, message, size)) return NULL;
    if (L == 0 && reads_length(&parsed)) {
        snprintf(message, size, "depends on the length that the model is trained with: pass it as seq_len");
        return NULL;
    }
    if (!normalizer_fits(&parsed, L ? L : 2, message, size)) return NULL;
    kept = malloc(sizeof *kept);
    if (kept) *kept = parsed;
    else snprintf(message, size, "out of memory");
    return kept;
}

// The number of values of scalar i, its initial value, and whether it is trained. 0: this normalizer does not have it.
EXPORT size_t attn_c_scalar(const Normalizer *normalizer, size_t NH, int L, size_t window, int i, double *start,
                            bool *trained) {
    if (!normalizer_has(normalizer, (Scalar)i)) return 0;
    *start = normalizer_start(normalizer, (Scalar)i, L, window);
    *trained = normalizer_trains(normalizer, (Scalar)i);
    return scalar_size(i, NH, (size_t)L);
}

// The names of the scalars in checkpoints and of the presets, by number; NULL after the last one.
EXPORT const char *attn_c_scalar_name(int i) {
    return i < SCALAR_COUNT ? scalar_names[i] : NULL;
}

EXPORT const char *attn_c_preset(int i) {
#define NAME(name, ...) #name,
    static const char *const NAMES[] = {NORMALIZERS(NAME) NULL};
#undef NAME
    return NAMES[i];
}

// How q and k are prepared before attention: divided by their norms? And is there a 1/sqrt(d) that a scaling replaces?
static bool is_l2(const Normalizer *n) {
    return n->qk.kind == QK_L2;
}

static bool has_rsqrt_d(const Normalizer *n) {
    return n->scale.kind != SCALE_LOGD_LOGN && n->scale.kind != SCALE_CONST;
}

// The same, and whether the normalizer reads the length of the text, for library.py.
EXPORT void attn_c_traits(const Normalizer *n, bool *l2, bool *rsqrt_d, bool *text_length) {
    *l2 = is_l2(n);
    *rsqrt_d = has_rsqrt_d(n);
    *text_length = n->offset.kind == OFFSET_LOG_T || n->norm.kind == NORM_T || n->norm.kind == NORM_T2;
}

// ---- q and k as attention reads them: divided by their norms under qk=l2, and q times the ratio of the scaling

static real scaling_ratio(const Call *c) {
    double ratio = c->scaling > 0 && has_rsqrt_d(c->normalizer) ? c->scaling * sqrt((double)c->HS) : 1;
    return fabs(ratio - 1) < 1e-9 ? 1 : (real)ratio;
}

// x (T,heads,HS) written
static void prepare(real *x, const real *from, Strides step, size_t T, size_t heads, size_t HS, bool l2, real ratio) {
    #pragma omp parallel for schedule(static)
    for (size_t t = 0; t < T; t++) {
        for (size_t h = 0; h < heads; h++) {
            const real *head = from + t * step.position + h * step.head;
            real by = l2 ? l2_inverse(head, HS) * ratio : ratio, *to = x + (t * heads + h) * HS;
            #pragma omp simd
            for (size_t i = 0; i < HS; i++) to[i] = by * head[i];
        }
    }
}

// dx (T,heads,HS): in, the gradient of prepare()'s output x; out, that of its input.
//   x = ratio u, u = from/|from|:  dx = ratio (dx - u (u · dx))/|from|
static void prepare_backward(real *dx, const real *x, const real *from, Strides step, size_t T, size_t heads, size_t HS,
                             bool l2, real ratio) {
    real square = ratio * ratio;
    #pragma omp parallel for schedule(static)
    for (size_t t = 0; t < T; t++) {
        for (size_t h = 0; h < heads; h++) {
            real *d = dx + (t * heads + h) * HS, along = 0, by = ratio;
            const real *u = x + (t * heads + h) * HS;
            if (l2) {
                #pragma omp simd reduction(+ : along)
                for (size_t i = 0; i < HS; i++) along += u[i] * d[i];
                along /= square;
                by *= l2_inverse(from + t * step.position + h * step.head, HS);
            }
            #pragma omp simd
            for (size_t i = 0; i < HS; i++) d[i] = by * (d[i] - u[i] * along);
        }
    }
}

// ---- parts: all sequences at once where they are adjacent, or else one after the other

// The sequences of a part, from `b` on. Of each, `start` keys and `skipped` queries are padding, which nothing reads.
typedef struct {
    size_t b, start, skipped;
    AttentionShape shape;
    AttentionInput in;
    const real *q, *k;      // as they were given
    real *own_q, *own_k;    // copies by prepare(), or NULL
    real *scratch;
} Part;

static bool adjacent(Strides step, size_t T) {
    return step.sequence == T * step.position;
}

static bool is_whole(const Call *c, const int32_t *starts) {
    bool all = adjacent(c->q, c->queries) && adjacent(c->k, c->keys) && adjacent(c->v, c->keys);
    return c->B == 1 || (!starts && all);
}

static AttentionShape shape_of(const Call *c, size_t sequences) {
    return (AttentionShape){.normalizer = c->normalizer,
                            .B = sequences,
                            .T = c->queries,
                            .NH = c->NH,
                            .NKV = c->NKV,
                            .HS = c->HS,
                            .VS = c->VS,
                            .L = c->L,
                            .window = c->window,
                            .past = c->keys - c->queries};
}

static bool has_window(const Call *c) {
    return c->window && c->window < c->keys;
}

// In elements, for q, k and first of a part.
static size_t own_scratch(const Call *c, size_t sequences) {
    size_t q = is_l2(c->normalizer) || scaling_ratio(c) != 1 ? c->queries * c->NH * c->HS : 0;
    size_t k = is_l2(c->normalizer) ? c->keys * c->NKV * c->HS : 0;
    return (sequences * (q + k + (has_window(c) ? c->queries : 0)) + 15) / 16 * 16;
}

// The elements of scratch that a forward or backward pass needs, whether sequences have padding or not.
EXPORT size_t attn_c_scratch(const Call *c) {
    size_t one = own_scratch(c, 1) + attention_scratch(shape_of(c, 1), c->threads);
    size_t all = own_scratch(c, c->B) + attention_scratch(shape_of(c, c->B), c->threads);
    return one > all ? one : all;
}

// `forward`: for the forward pass alone.
static Part part_at(const Call *c, const real *q, const real *k, const real *v, const int32_t *starts, size_t b,
                    size_t sequences, bool forward, real *scratch) {
    Part p = {.b = b, .start = starts ? (size_t)starts[b] : 0, .shape = shape_of(c, sequences)};
    if (p.start > c->keys) p.start = c->keys;
    size_t past = p.shape.past;
    if (p.start > past) p.skipped = p.start - past;
    p.shape.T -= p.skipped;
    p.shape.past = past + p.skipped - p.start;
    p.q = q + b * c->q.sequence + p.skipped * c->q.position;
    p.k = k + b * c->k.sequence + p.start * c->k.position;
    v += b * c->v.sequence + p.start * c->v.position;
    p.in = (AttentionInput){.q = {p.q, c->q.position, c->q.head},
                            .k = {p.k, c->k.position, c->k.head},
                            .v = {v, c->v.position, c->v.head},
                            .tiles = tiles_available(c->bf16)};
    real ratio = scaling_ratio(c), *own = scratch;
    p.scratch = scratch + own_scratch(c, sequences);
    if (is_l2(c->normalizer) || ratio != 1) {
        p.own_q = own;
        own += sequences * c->queries * c->NH * c->HS;
        for (size_t i = 0; i < sequences; i++)
            prepare(p.own_q + i * p.shape.T * c->NH * c->HS, p.q + i * c->q.sequence, c->q, p.shape.T, c->NH, c->HS,
                    is_l2(c->normalizer), ratio);
        p.in.q = (ConstView){p.own_q, c->NH * c->HS, c->HS};
    }
    p.in.unit_keys = is_l2(c->normalizer) && forward && attention_of_few(p.shape);
    if (is_l2(c->normalizer) && !p.in.unit_keys) {
        size_t keys = p.shape.past + p.shape.T;
        p.own_k = own;
        for (size_t i = 0; i < sequences; i++)
            prepare(p.own_k + i * keys * c->NKV * c->HS, p.k + i * c->k.sequence, c->k, keys, c->NKV, c->HS, true, 1);
        p.in.k = (ConstView){p.own_k, c->NKV * c->HS, c->HS};
        own += sequences * keys * c->NKV * c->HS;
    }
    if (has_window(c)) {
        int32_t *first = (int32_t *)own;    // the first key of each query; an element has at least 4 bytes
        for (size_t i = 0; i < sequences * p.shape.T; i++) {
            size_t keys = p.shape.past + i % p.shape.T + 1;
            first[i] = (int32_t)(keys > c->window ? keys - c->window : 0);
        }
        p.in.first = first;
    }
    return p;
}

static _Thread_local unsigned mode_before;

// Sets the number of threads and their mode for subnormal numbers during a call. end() restores both, because the
// threads belong to PyTorch.
static int begin(int threads) {
    int before = omp_get_max_threads();
    if (before != threads) omp_set_num_threads(threads);
    #pragma omp parallel if (threads > 1)
    mode_before = flush_subnormals();
    return before;
}

static void end(int before) {
    #pragma omp parallel if (omp_get_max_threads() > 1)
    restore_subnormals(mode_before);
    if (before != omp_get_max_threads()) omp_set_num_threads(before);
}

static void zero(real *rows, size_t first, size_t count, size_t width) {
    memset(rows + first * width, 0, count * width * sizeof *rows);
}

// ---- attention

// out = attention of the queries; 0 for a query that is padding
//   q (B,NH,queries,HS), k (B,NKV,keys,HS), v (B,NKV,keys,VS): with the call's strides
//   starts (B): the first key of each sequence that is not padding; NULL: none is
//   scalars: those that the normalizer has, one after the other   scratch: attn_c_scratch() elements
//   out (B,queries,NH,VS), stats (B,NH,queries,ROW_STATS) written
EXPORT void attn_c_forward(const Call *c, const real *q, const real *k, const real *v, const int32_t *starts,
                           const real *scalars, real *out, real *stats, real *scratch) {
    size_t sequences = is_whole(c, starts) ? c->B : 1, width = c->NH * c->VS;
    int threads = begin(c->threads);
    for (size_t b = 0; b < c->B; b += sequences) {
        Part p = part_at(c, q, k, v, starts, b, sequences, true, scratch);
        real *rows = out + b * c->queries * width, *kept = stats + b * c->NH * c->queries * ROW_STATS;
        zero(rows, 0, p.skipped, width);
        zero(kept, c->NH * p.shape.T * sequences, c->NH * p.skipped, ROW_STATS);
        if (p.shape.T)
            attention_forward(rows + p.skipped * width, kept, p.in, scalars_at(c->normalizer, c->NH, c->L, scalars),
                              p.shape, p.scratch);
    }
    end(threads);
}

// The gradients, from the input and output of attn_c_forward(). Deterministic.
//   dout, out (B,queries,NH,VS)
//   dq (B,queries,NH,HS), dk (B,keys,NKV,HS), dv (B,keys,NKV,VS) written   dscalars: added to, or NULL
EXPORT void attn_c_backward(const Call *c, const real *q, const real *k, const real *v, const int32_t *starts,
                            const real *scalars, const real *dout, const real *out, const real *stats, real *dq,
                            real *dk, real *dv, real *dscalars, real *scratch) {
    size_t sequences = is_whole(c, starts) ? c->B : 1;
    size_t width = c->NH * c->VS, q_width = c->NH * c->HS, k_width = c->NKV * c->HS, v_width = c->NKV * c->VS;
    int threads = begin(c->threads);
    for (size_t b = 0; b < c->B; b += sequences) {
        Part p = part_at(c, q, k, v, starts, b, sequences, false, scratch);
        size_t row = b * c->queries + p.skipped, key = b * c->keys + p.start, T = p.shape.T, keys = p.shape.past + T;
        zero(dq, b * c->queries, p.skipped, q_width);
        zero(dk, b * c->keys, T ? p.start : c->keys, k_width);
        zero(dv, b * c->keys, T ? p.start : c->keys, v_width);
        if (!T) continue;
        AttentionInputGrads d = {{dq + row * q_width, q_width, c->HS},
                                 {dk + key * k_width, k_width, c->HS},
                                 {dv + key * v_width, v_width, c->VS}};
        attention_backward(d, scalar_grads_at(c->normalizer, c->NH, c->L, dscalars), dout + row * width,
                           out + row * width, stats + b * c->NH * c->queries * ROW_STATS, p.in,
                           scalars_at(c->normalizer, c->NH, c->L, scalars), p.shape, p.scratch);
        for (size_t i = 0; i < sequences; i++) {
            if (p.own_q)
                prepare_backward(d.q.p + i * T * q_width, p.own_q + i * T * q_width, p.q + i * c->q.sequence, c->q, T,
                                 c->NH, c->HS, is_l2(c->normalizer), scaling_ratio(c));
            if (p.own_k)
                prepare_backward(d.k.p + i * keys * k_width, p.own_k + i * keys * k_width, p.k + i * c->k.sequence,
                                 c->k, keys, c->NKV, c->HS, true, 1);
        }
    }
    end(threads);
}

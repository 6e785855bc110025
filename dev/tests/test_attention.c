// Properties that attention on the CPU must have, without a reference: causality, rows by hand, extreme scores,
// all-zero rows, blocks against plain loops, memory, threads. test_gpt2 compares each normalizer, shared heads and
// documents with the reference, and each row alone with the full pass. With v = identity the output is the weights:
// out[t, j] = A_tj.
#include "attention/attention_cpu.h"

#include <math.h>
#include <omp.h>

#include "attention/l2.h"
#include "dev/reference/hash.h"
#include "dev/tests/check.h"
#include "runtime/error.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

#define NAME(name, ...) #name,
static const char *const PRESETS[] = {NORMALIZERS(NAME)};
#undef NAME

static Normalizer parse(const char *text) {
    Normalizer normalizer;
    char message[1024];
    if (!normalizer_parse(&normalizer, text, message, sizeof message)) fail(EXIT_USAGE, "%s: %s", text, message);
    return normalizer;
}

// True if a row depends on the length of the whole sample.
static bool reads_length(const Normalizer *n) {
    return n->offset.kind == OFFSET_LOG_T || n->norm.kind == NORM_T || n->norm.kind == NORM_T2;
}

// ---- a case: inputs, outputs and gradients of one shape, each followed by a guard

enum { GUARD = 64, ARRAYS = 13 + 2 * SCALAR_COUNT };
static const float GUARD_VALUE = -12345.5f;

typedef struct {
    Normalizer normalizer;
    AttentionShape shape;
    Scalars scalars;
    ScalarGrads scalar_grads;
    float *q, *k, *v, *out, *stats, *scratch, *dout, *dq, *dk, *dv;
    size_t keys, values;    // number of elements of q, of v
    struct {
        float *at;
        size_t n;
    } arrays[ARRAYS];
    size_t count;
    Tiles tiles;
} Case;

static float *floats(Case *c, size_t n) {
    float *x = calloc(n + GUARD, sizeof *x);
    if (!x || c->count == ARRAYS) abort();
    for (size_t i = 0; i < GUARD; i++) x[n + i] = GUARD_VALUE;
    c->arrays[c->count].at = x;
    c->arrays[c->count++].n = n;
    return x;
}

static float *input(Case *c, const char *name, size_t n, float mean, float scale) {
    float *x = floats(c, n);
    fixture_fill(x, n, name, 0, mean, scale);
    return x;
}

// q and k uniform in (-size, size), v and dout in (-1, 1).
static Case case_new(const char *text, size_t B, size_t NH, size_t HS, size_t VS, size_t T, float size) {
    Case c = {.normalizer = parse(text),
              .shape = {.B = B, .T = T, .NH = NH, .NKV = NH, .HS = HS, .VS = VS, .L = (int)T + 3}};
    c.keys = B * NH * T * HS;
    c.values = B * NH * T * VS;
    c.shape.normalizer = &c.normalizer;    // set again when the case is copied
    c.q = input(&c, "q", c.keys, 0, size);
    c.k = input(&c, "k", c.keys, 0, size);
    c.v = input(&c, "v", c.values, 0, 1);
    c.dout = input(&c, "dout", c.values, 0, 1);
    c.out = floats(&c, c.values);
    c.stats = floats(&c, B * NH * T * ROW_STATS);
    c.scratch = floats(&c, attention_scratch(c.shape, omp_get_max_threads()));
    c.dq = floats(&c, c.keys);
    c.dk = floats(&c, c.keys);
    c.dv = floats(&c, c.values);
    for (Scalar x = 0; x < SCALAR_COUNT; x++) {
        size_t n = scalar_size(x, NH, T + 3);
        float mean, scale;
        if (!normalizer_has(&c.normalizer, x)) continue;
        fixture_weight_rule(scalar_names[x], n, &mean, &scale);
        c.scalars.of[x] = input(&c, scalar_names[x], n, 2 * mean + 0.1f, scale);
        c.scalar_grads.of[x] = floats(&c, n);
    }
    return c;
}

// v = identity in every head: out[t, h, j] is A_tj.
static Case case_heads(const char *text, size_t NH, size_t HS, size_t T, float size) {
    Case c = case_new(text, 1, NH, HS, T, T, size);
    for (size_t t = 0; t < NH * T; t++)
        for (size_t j = 0; j < T; j++) c.v[t * T + j] = t % T == j;
    return c;
}

// With one sample arrays are (NH,T,width), so that row h T + t exists; with several they are (B,T,NH,width).
static View view(const Case *c, float *p, size_t width) {
    size_t NH = c->shape.NH, T = c->shape.T;
    return c->shape.B == 1 ? (View){p, width, T * width} : (View){p, NH * width, width};
}

static ConstView const_view(const Case *c, float *p, size_t width) {
    View x = view(c, p, width);
    return (ConstView){x.p, x.row, x.head};
}

static AttentionInput inputs(const Case *c) {
    size_t HS = c->shape.HS, VS = c->shape.VS;
    return (AttentionInput){
        .q = const_view(c, c->q, HS), .k = const_view(c, c->k, HS), .v = const_view(c, c->v, VS), .tiles = c->tiles};
}

static uint64_t forward(Case *c) {
    c->shape.normalizer = &c->normalizer;
    return attention_forward(c->out, c->stats, inputs(c), c->scalars, c->shape, c->scratch);
}

static void backward(Case *c) {
    c->shape.normalizer = &c->normalizer;
    size_t HS = c->shape.HS, VS = c->shape.VS;
    AttentionInputGrads d = {view(c, c->dq, HS), view(c, c->dk, HS), view(c, c->dv, VS)};
    attention_backward(d, c->scalar_grads, c->dout, c->out, c->stats, inputs(c), c->scalars, c->shape, c->scratch);
}

// The same by plain loops, one query after the other; backward from the output of the forward pass.
static void plain(Case *c, const int32_t *first) {
    size_t T = c->shape.T, NH = c->shape.NH, HS = c->shape.HS, VS = c->shape.VS;
    AttentionInput in = inputs(c);
    memset(c->dk, 0, c->keys * sizeof(real));
    memset(c->dv, 0, c->values * sizeof(real));
    for (size_t i = 0; i < c->shape.B * NH * T; i++) {
        size_t t = i % T, h = i / T % NH, from = i / (NH * T) * T, begin = first ? (size_t)first[from + t] : 0;
        size_t q_at = (from + t) * in.q.row + h * in.q.head, out_at = ((from + t) * NH + h) * VS;
        size_t k_at = (from + begin) * in.k.row + h * in.k.head, v_at = (from + begin) * in.v.row + h * in.v.head;
        Query query = {c->q + q_at, c->k + k_at, c->v + v_at, in.k.row, in.v.row, HS, VS, false};
        Row row = row_at(&c->normalizer, c->scalars, h, t + 1 - begin, T, c->shape.L, HS);
        query_forward(c->out + out_at, query, &c->normalizer, &row, c->scratch);
        row_keep(&row, c->stats + i * ROW_STATS);
        query_backward(c->dq + q_at, c->dk + k_at, c->dv + v_at, c->dout + out_at, c->out + out_at, query,
                       &c->normalizer, &row, c->scratch);
    }
}

// Row n (keys 1..n, without the first `hidden`) of head h of the first sample, from the case's q, k and v.
static bool row_after(Case *c, float *out, size_t h, size_t n, size_t hidden) {
    size_t T = c->shape.T, HS = c->shape.HS, VS = c->shape.VS;
    c->shape.normalizer = &c->normalizer;
    AttentionShape shape = c->shape;
    shape.T = n;
    return attention_row(out, c->q + (h * T + n - 1) * HS, (ConstView){c->k + (h * T + hidden) * HS, HS, 0},
                         (ConstView){c->v + (h * T + hidden) * VS, VS, 0}, n - hidden, h, c->scalars, shape,
                         c->scratch);
}

// Frees the case, and reports writes past the end of an array.
static void case_free(Case *c) {
    for (size_t i = 0; i < c->count; i++) {
        bool whole = true;
        for (size_t j = 0; j < GUARD; j++) whole = whole && c->arrays[i].at[c->arrays[i].n + j] == GUARD_VALUE;
        CHECK(whole, "%s: array %zu was written past its end", c->normalizer.text, i);
        free(c->arrays[i].at);
    }
}

static size_t not_finite(const float *x, size_t n) {
    size_t bad = 0;
    for (size_t i = 0; i < n; i++) bad += !isfinite(x[i]);
    return bad;
}

static size_t not_zero(const float *x, size_t n) {
    size_t bad = 0;
    for (size_t i = 0; i < n; i++) bad += !(x[i] == 0);
    return bad;
}

// ---- long rows

// The weight of the last of n scores z. Head size is 1 and q = 1, so that a score equals its k; v is 1 for the last key
// and 0 elsewhere.
static double last_weight(const char *text, const float *z, size_t n, float s) {
    Normalizer normalizer = parse(text);
    float one = 1, out, *v = calloc(n, sizeof *v), *scratch = calloc(n, sizeof *scratch);
    v[n - 1] = 1;
    attention_row(&out, &one, (ConstView){z, 1, 1}, (ConstView){v, 1, 1}, n, 0,
                  (Scalars){.of[SCALAR_S] = normalizer_has(&normalizer, SCALAR_S) ? &s : NULL},
                  (AttentionShape){&normalizer, 1, n, 1, 1, 1, 1, (int)n, .cached = false}, scratch);
    free(v);
    free(scratch);
    return out;
}

// Figure 1 of [SSMax]: n scores, of which the last is 3 and the others -2; s = 0.43. Softmax's largest weight is
// 1/((n - 1) e^-5 + 1), SSMax's 1/((n - 1) n^(-0.43·5) + 1).
static void test_figure_1(void) {
    check_group("[SSMax] Figure 1");
    enum { N = 100000 };
    float *z = calloc(N, sizeof *z);
    for (size_t n = 10; n <= N; n *= 10) {
        for (size_t j = 0; j < n; j++) z[j] = -2;
        z[n - 1] = 3;
        double a = last_weight("softmax", z, n, 0), b = last_weight("ssmax", z, n, 0.43f), m = (double)n - 1;
        double softmax = 1 / (m * exp(-5) + 1), ssmax = 1 / (m * pow((double)n, -0.43 * 5) + 1);
        double bound = n > 1000 ? 2e-3 : 5e-5;    // where a single float holds the whole sum
        CHECK(fabs(a / softmax - 1) < bound, "Figure 1, softmax at n = %zu: %.8g, not %.8g", n, a, softmax);
        CHECK(fabs(b / ssmax - 1) < bound, "Figure 1, SSMax at n = %zu: %.8g, not %.8g", n, b, ssmax);
        CHECK(b > 0.93, "Figure 1: SSMax fades to %.3g at n = %zu", b, n);
        CHECK(n < N || a < 0.002, "Figure 1: softmax stays at %.3g", a);
    }
    free(z);
}

// ---- rows by hand: head size 1 and q = 1, so that softmax's A is p if k = ln p; the last row's weights are read one
// by one

// The caller applies qk=l2 before attention.
static void unit_row(float *out, const float *x, size_t HS, bool l2) {
    double sum = 0;
    for (size_t i = 0; i < HS; i++) sum += (double)x[i] * x[i];
    for (size_t i = 0; i < HS; i++) out[i] = (float)(l2 ? x[i] / sqrt(sum) : x[i]);
}

static void check_row(const char *text, const float *q, const float *k, size_t HS, size_t n, const double *expected,
                      double bound) {
    check_case();
    Normalizer normalizer = parse(text);
    float out[8], v[8 * 8] = {0}, scratch[8], unit_q[8], unit_k[8 * 8];
    bool l2 = normalizer.qk.kind == QK_L2;
    for (size_t j = 0; j < n; j++) v[j * n + j] = 1;
    unit_row(unit_q, q, HS, l2);
    for (size_t j = 0; j < n; j++) unit_row(unit_k + j * HS, k + j * HS, HS, l2);
    attention_row(out, unit_q, (ConstView){unit_k, HS, HS}, (ConstView){v, n, n}, n, 0, (Scalars){{NULL}},
                  (AttentionShape){&normalizer, 1, n, 1, 1, HS, n, (int)n, .cached = false}, scratch);
    for (size_t j = 0; j < n; j++)
        CHECK(fabs(out[j] - expected[j]) < bound, "%s, n = %zu: A[%zu] is %.8f, not %.8f", text, n, j, out[j],
              expected[j]);
}

static void check_probabilities(const char *text, size_t n, const double *p, const double *expected) {
    float q = 1, k[8];
    for (size_t j = 0; j < n; j++) k[j] = (float)log(p[j]);
    check_row(text, &q, k, 1, n, expected, 1e-6);
}

static void test_by_hand(void) {
    check_group("rows by hand");
    // A = p = (.1, .2, .3, .4): A n - 1 = (-.6, -.2, .2, .6)
    const double p[] = {0.1, 0.2, 0.3, 0.4};
    check_probabilities("softmax", 4, p, p);
    check_probabilities("softmax-negated", 4, p, (double[]){-0.1, -0.2, -0.3, -0.4});
    check_probabilities("softmax-recentered", 4, p, (double[]){-0.15, -0.05, 0.05, 0.15});
    check_probabilities("softmax-recentered-l1", 4, p, (double[]){-0.375, -0.125, 0.125, 0.375});
    check_probabilities("softmax+post=reweight:1", 4, p, (double[]){0, 0, 0.25, 0.75});
    check_probabilities("softmax+post=reweight:2", 4, p, (double[]){0, 0, 0.1, 0.9});
    // Z = 1 + 1: A n - 1 = (-.8, -.6, -.4, -.2)
    check_probabilities("softmax1+post=reweight:1", 4, p, (double[]){0, 0, 0, 0});
    check_probabilities("softmax1", 4, p, (double[]){0.05, 0.1, 0.15, 0.2});
    check_probabilities("exp", 4, p, p);
    check_probabilities("exp+norm=n2", 4, p, (double[]){0.1 / 16, 0.2 / 16, 0.3 / 16, 0.4 / 16});
    check_probabilities("exp+norm=sqrt-half-n", 4, p,
                        (double[]){0.1 / sqrt(2), 0.2 / sqrt(2), 0.3 / sqrt(2), 0.4 / sqrt(2)});
    // e^z/(1 + e^z)
    check_probabilities("sigmoid+offset=none", 4, p, (double[]){0.1 / 1.1, 0.2 / 1.2, 0.3 / 1.3, 0.4 / 1.4});
    // e^z = p/n.
    check_probabilities("sigmoid-logn", 4, p, (double[]){0.1 / 4.1, 0.2 / 4.2, 0.3 / 4.3, 0.4 / 4.4});
    // expm1 of ln .5, 0, ln 2, ln 3: -.5, 0, 1, 2, absolute sum 3.5
    const double e[] = {0.5, 1, 2, 3}, c = 1 + 0.1 * log(3),
                 powers = pow(0.1, c) + pow(0.2, c) + pow(0.3, c) + pow(0.4, c);
    check_probabilities("softpick", 4, e, (double[]){0, 0, 1 / 3.5, 2 / 3.5});
    check_probabilities("softpick+post=none", 4, e, (double[]){-0.5 / 3.5, 0, 1 / 3.5, 2 / 3.5});
    check_probabilities("softpick+norm=l1+2", 4, e, (double[]){0, 0, 1 / 5.5, 2 / 5.5});
    check_probabilities(
        "softmax+scale=floorlog:2", 4, p,    // 1 + floor(4/2) = 3; of 5: 1 + 0
        (double[]){pow(0.1, c) / powers, pow(0.2, c) / powers, pow(0.3, c) / powers, pow(0.4, c) / powers});
    check_probabilities("softmax+scale=floorlog:5", 4, p, p);
    // The first three rows: recenter does not change them, reweight uses 0 instead of the 1.
    const double p3[] = {0.2, 0.3, 0.5}, p2[] = {0.25, 0.75}, p1[] = {1};
    check_probabilities("softmax-recentered", 1, p1, p1);
    check_probabilities("softmax-recentered-l1", 1, p1, p1);
    check_probabilities("softmax-recentered", 2, p2, p2);
    check_probabilities("softmax-recentered-l1", 2, p2, p2);
    check_probabilities("softmax-recentered", 3, p3, p3);
    check_probabilities("softmax-recentered-l1", 3, p3, p3);
    check_probabilities("softmax+post=reweight:2", 1, p1, p1);
    // .0625, .5625.
    check_probabilities("softmax+post=reweight:2", 2, p2, (double[]){0.1, 0.9});
    check_probabilities("softmax+post=reweight:2", 3, p3, (double[]){0.04 / 0.38, 0.09 / 0.38, 0.25 / 0.38});
    // [LSSA] at n = 4, d = 4: z = ln 4 ln 4 cos, with cosines .96, 1, 0, -1, whatever the lengths.
    //   f = ln(1 + e^z) = (1.991664, 2.058388, .693147, .136576), sum 4.879775
    //   A n - 1 = (.632587, .687281, -.431820, -.888048), to the 15th power (.00103945, .00360591, 0, 0)
    const float q[] = {2, 0, 0, 0}, k[] = {24, 7, 0, 0, 5, 0, 0, 0, 0, 0, 3, 0, -1, 0, 0, 0};
    check_row("lssa", q, k, 4, 4, (double[]){0.40814674, 0.42182024, 0.14204492, 0.0279881}, 1e-6);
    check_row("lssar", q, k, 4, 4, (double[]){0.22376097, 0.77623903, 0, 0}, 5e-6);
    // .632587/(.632587 + .687281)
    check_row("lssar+post=reweight:1", q, k, 4, 4, (double[]){0.4792805, 0.5207195, 0, 0}, 1e-6);
}

// ---- independence

// clang-format off
static const char *const AWKWARD[] = {
    "softmax+norm=l1+0.5+post=negate", "sigmoid-logn-l1+post=reweight:15", "lssar+post=reweight:100", "gelu-l1+post=recenter-l1",
    "mish-l1+norm=l1+2+post=recenter", "softmax+qk=l2+scale=const:-7", "softplus-l1+scale=log:L+norm=n2",
        "ssmax-bias+norm=l1+1+post=reweight:2",
    "softmax+phi=softplus+norm=none+post=recenter", "relu2-T+offset=-logT+phi=sigmoid",
    "ssmax-bias+norm=l1+sink+post=recenter-l1", "softpick+norm=l1+0.5", "lssa+scale=floorlog:8+phi=expm1",
};
// clang-format on

static void each_normalizer(void (*check)(const char *text)) {
    for (size_t i = 0; i < COUNT(PRESETS); i++) {
        check_case();
        check(PRESETS[i]);
    }
    for (size_t i = 0; i < COUNT(AWKWARD); i++) {
        check_case();
        check(AWKWARD[i]);
    }
}

// Masked weights are 0, so a huge number or a NaN in a later key must not change a row. Later values are huge but not
// NaN, because within a block of rows they are multiplied by weights of 0.
static void check_masked(const char *text) {
    enum { HS = 8, T = 90, SEEN = 70 };
    Normalizer n = parse(text);
    if (reads_length(&n)) return;
    Case c = case_new(text, 1, 1, HS, HS, T, 2);
    forward(&c);
    float *before = malloc(c.values * sizeof *before);
    memcpy(before, c.out, c.values * sizeof *before);
    for (int kind = 0; kind < 3; kind++) {
        const float keys[] = {1e30f, -1e30f, NAN}, values[] = {1e30f, -1e30f, -1e30f};
        for (size_t i = SEEN * HS; i < T * HS; i++) {
            c.k[i] = keys[kind];
            c.v[i] = values[kind];
        }
        forward(&c);
        CHECK(!memcmp(before, c.out, SEEN * HS * sizeof *before), "%s: later keys and values affect a row (%d)", text,
              kind);
    }
    free(before);
    case_free(&c);
}

static double difference(const float *a, const float *b, size_t n) {
    double off = 0, size = 1e-30;
    for (size_t i = 0; i < n; i++) {
        off += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return sqrt(off / size);
}

static bool is_there(Tiles tiles) {
    return tiles <= TILES_LOOPS || tiles <= tiles_available(true);
}

static void round_inputs(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = bf16_to_float(bf16_from_float(x[i]));
}

// The rows in several calls, each after the keys of the previous ones, as when a prompt fills a cache and a few tokens
// follow, equal those of attention_row(). From key `document` on, the earlier keys are hidden.
static void check_spans_of(const char *text, Tiles tiles, size_t T, size_t document, double tolerance) {
    enum { NH = 4 };
    const size_t ENDS[] = {1, 5, T / 2 - 5, T - 3, T - 2, T};
    int32_t first[2000];
    Case c = case_new(text, 1, NH, 6, 5, T, 2);
    round_inputs(c.q, c.keys);
    round_inputs(c.k, c.keys);
    round_inputs(c.v, c.values);
    for (size_t t = 0; t < T; t++) first[t] = t < document ? 0 : (int32_t)document;
    AttentionShape shape = c.shape;
    shape.normalizer = &c.normalizer;
    shape.cached = true;
    shape.past = T;
    float *scratch = floats(&c, attention_scratch(shape, omp_get_max_threads())), one[8];
    for (size_t i = 0, from = 0; i < COUNT(ENDS); from = ENDS[i++]) {
        AttentionInput span = inputs(&c);
        span.q.p += from * span.q.row;
        span.first = first + from;
        span.tiles = tiles;
        shape.past = from;
        shape.T = ENDS[i] - from;
        attention_forward(c.out + from * NH * shape.VS, c.stats, span, c.scalars, shape, scratch);
    }
    double off = 0;
    for (size_t t = 0; t < T; t++)
        for (size_t h = 0; h < NH; h++) {
            row_after(&c, one, h, t + 1, (size_t)first[t]);
            off = worse(off, difference(c.out + (t * NH + h) * shape.VS, one, shape.VS));
        }
    CHECK(off < tolerance, "%s, tiles %s, document at %zu: rows after cached keys are off by %.3g", text,
          tiles_name(tiles), document, off);
    case_free(&c);
}

static void check_spans(const char *text) {
    for (size_t document = 0; document < 150; document += 40) {
        for (Tiles tiles = TILES_REAL; is_there(tiles); tiles++)
            check_spans_of(text, tiles, 150, document, tiles_are_bf16(tiles) ? 4e-2 : 3e-5);
    }
}

// The last queries of two sequences, alone after their keys, give the numbers that they give in the full pass.
static void check_last_queries(const char *text) {
    enum { B = 2, NH = 4, NKV = 2, HS = 8, T = 40, LAST = 3, W = NH * HS };
    Case c = case_new(text, B, NH, HS, HS, T, 1);
    AttentionInput in = {.q = {c.q, W, HS}, .k = {c.k, NKV * HS, HS}, .v = {c.v, NKV * HS, HS}};
    float *q = floats(&c, B * LAST * W), *out = floats(&c, B * LAST * W),
          *stats = floats(&c, B * NH * LAST * ROW_STATS);
    c.shape.normalizer = &c.normalizer;
    c.shape.NKV = NKV;
    attention_forward(c.out, c.stats, in, c.scalars, c.shape, c.scratch);
    for (size_t b = 0; b < B; b++) memcpy(q + b * LAST * W, c.q + ((b + 1) * T - LAST) * W, LAST * W * sizeof *q);
    in.q.p = q;
    c.shape.T = LAST;
    c.shape.past = T - LAST;
    attention_forward(out, stats, in, c.scalars, c.shape, c.scratch);
    double off = 0, of_stats = 0;
    for (size_t b = 0; b < B; b++)
        off = worse(off, difference(out + b * LAST * W, c.out + ((b + 1) * T - LAST) * W, LAST * W));
    for (size_t i = 0; i < B * NH; i++) {
        const float *expected = c.stats + ((i + 1) * T - LAST) * ROW_STATS;
        of_stats = worse(of_stats, difference(stats + i * LAST * ROW_STATS, expected, LAST * ROW_STATS));
    }
    CHECK(off < 1e-5 && of_stats < 1e-5, "%s: out is off by %.3g, statistics by %.3g", text, off, of_stats);
    for (size_t t = 0; t < B * T * NKV; t++) {
        float inverse = l2_inverse(c.k + t * HS, HS);
        for (size_t i = 0; i < HS; i++) c.k[t * HS + i] *= inverse * (float)(1 + t % 3);
    }
    in.unit_keys = true;
    attention_forward(c.dout, stats, in, c.scalars, c.shape, c.scratch);
    for (size_t t = 0; t < B * T * NKV; t++)
        for (size_t i = 0; i < HS; i++) c.k[t * HS + i] /= (float)(1 + t % 3);
    in.unit_keys = false;
    attention_forward(out, stats, in, c.scalars, c.shape, c.scratch);
    CHECK(difference(c.dout, out, B * LAST * W) < 1e-5, "%s: keys divided by their norms: out is off", text);
    case_free(&c);
}

// attention_weights() gives the A that the forward pass multiplies with v, and ln Z.
static void check_weights(const char *text) {
    enum { T = 90, NH = 2 };
    static const size_t ENDS[] = {1, 30, T};
    Case c = case_heads(text, NH, 8, T, 2);
    AttentionInput in = inputs(&c);
    int32_t first[T];
    for (size_t t = 0; t < T; t++) first[t] = t < 40 ? 0 : 40;
    in.first = first;
    c.shape.normalizer = &c.normalizer;
    attention_forward(c.out, c.stats, in, c.scalars, c.shape, c.scratch);
    float *weights = floats(&c, T * T), log_Z[T];
    double off = 0, log_off = 0;
    for (size_t h = 0; h < NH; h++)
        for (size_t i = 0, from = 0; i < COUNT(ENDS); from = ENDS[i++]) {
            size_t rows = ENDS[i] - from;
            attention_weights(weights, T, log_Z, in, c.scalars, c.shape,
                              (AttentionRows){.h = h, .from = from, .rows = rows});
            for (size_t r = 0; r < rows; r++) {
                const float *A = c.out + ((from + r) * NH + h) * T;
                off = worse(off, worse(difference(weights + r * T, A, ENDS[i]), not_zero(A + ENDS[i], T - ENDS[i])));
                double Z = 0;
                for (size_t j = (size_t)first[from + r]; j <= from + r; j++) {
                    double z = 0;
                    for (size_t x = 0; x < 8; x++)
                        z += (double)c.q[(h * T + from + r) * 8 + x] * c.k[(h * T + j) * 8 + x];
                    Z += exp(z / sqrt(8));
                }
                if (!strcmp(text, "softmax")) log_off = worse(log_off, fabs(log(Z) - log_Z[r]));
            }
        }
    CHECK(off < 1e-5, "%s: weights are off by %.3g", text, off);
    CHECK(log_off < 1e-5, "%s: ln Z is off by %.3g", text, log_off);
    case_free(&c);
}

// ---- tiles

// Of inputs that bfloat16 can represent, the scores have the same products, so the statistics agree to the rounding of
// float32 sums. The weights are rounded before they meet v and dout, and the gradients of the scores before they meet q
// and k.
static void compare_tiled(const Case *with, const Case *without, Tiles tiles) {
    const char *what = tiles_name(tiles);
    double stats = 0;
    size_t rows = with->shape.B * with->shape.NH * with->shape.T;
    for (size_t i = 0; i < rows * ROW_STATS; i++) {
        double right = without->stats[i];
        stats = worse(stats, fabs(with->stats[i] - right) / fmax(fabs(right), 1));
    }
    double out = difference(with->out, without->out, with->values);
    double grads =
        worse(difference(with->dq, without->dq, with->keys),
              worse(difference(with->dk, without->dk, with->keys), difference(with->dv, without->dv, with->values)));
    CHECK(stats < 1e-5, "%s, %s: the rows' statistics are off by %.3g", with->normalizer.text, what, stats);
    CHECK(tiles_are_bf16(tiles) ? out > 1e-5 && out < 3e-3 : out < 1e-5, "%s, %s: out is off by %.3g",
          with->normalizer.text, what, out);
    CHECK(tiles_are_bf16(tiles) ? grads > 1e-4 && grads < 4e-3 : grads < 2e-5, "%s, %s: gradients are off by %.3g",
          with->normalizer.text, what, grads);
}

// Blocks of rows and keys against plain loops, without and with documents, in whole samples. One head is shared by the
// threads.
static void check_tiled(const char *text, Tiles tiles, size_t NH, size_t T) {
    enum { B = 2, HS = 20, VS = 37 };
    int32_t first[B * T];
    for (size_t i = 0; i < B * T; i++) first[i] = i % T < T / 2 - 4 ? 0 : (int32_t)T / 2 - 4;
    for (int documents = 0; documents < 2; documents++) {
        Case c[2];
        for (int i = 0; i < 2; i++) {
            c[i] = case_new(text, B, NH, HS, VS, T, 1);
            c[i].shape.normalizer = &c[i].normalizer;
            c[i].tiles = tiles;
            round_inputs(c[i].q, c[i].keys);
            round_inputs(c[i].k, c[i].keys);
            round_inputs(c[i].v, c[i].values);
            if (tiles_are_bf16(tiles)) round_inputs(c[i].dout, c[i].values);
        }
        plain(&c[1], documents ? first : NULL);
        AttentionInput in = inputs(&c[0]);
        in.first = documents ? first : NULL;
        AttentionInputGrads d = {view(&c[0], c[0].dq, HS), view(&c[0], c[0].dk, HS), view(&c[0], c[0].dv, VS)};
        attention_forward(c[0].out, c[0].stats, in, c[0].scalars, c[0].shape, c[0].scratch);
        attention_backward(d, c[0].scalar_grads, c[0].dout, c[1].out, c[0].stats, in, c[0].scalars, c[0].shape,
                           c[0].scratch);
        compare_tiled(&c[0], &c[1], tiles);
        for (int i = 0; i < 2; i++) case_free(&c[i]);
    }
}

// Tiles and threads know no formula, so each normalizer meets one kind of tiles with several heads, and the next kind
// with a head that two threads share.
static void check_some_tiles(const char *text) {
    static Tiles tiles = TILES_REAL;
    check_tiled(text, tiles, 4, 150);
    tiles = is_there(tiles + 1) ? tiles + 1 : TILES_REAL;
    omp_set_num_threads(2);
    check_tiled(text, tiles, 1, 150);
    omp_set_num_threads(1);
}

// Long enough for several chunks of keys, where the largest score of a row changes.
static void test_chunks(void) {
    static const char *const TEXTS[] = {"softmax",
                                        "ssmax-bias",
                                        "softmax-negated",
                                        "softmax1",
                                        "softmax-sink",
                                        "softmax+scale=const:-0.3",
                                        "softpick+post=none",
                                        "relu2-l1",
                                        "sigmoid-logn"};
    check_group("several chunks of keys");
    for (size_t i = 0; i < COUNT(TEXTS); i++) {
        for (Tiles tiles = TILES_REAL; is_there(tiles); tiles++) check_tiled(TEXTS[i], tiles, 2, 150);
        check_tiled(TEXTS[i], TILES_REAL, 1, 1100);
        if (tiles_available(true) > TILES_LOOPS) check_tiled(TEXTS[i], tiles_available(true), 1, 1100);
        check_spans_of(TEXTS[i], TILES_REAL, 1400, 0, 3e-5);
    }
}

static void test_independence(void) {
    check_group("rows after cached keys equal single rows");
    each_normalizer(check_spans);
    each_normalizer(check_last_queries);
    check_group("matmuls of tiles agree with those of a library");
    each_normalizer(check_some_tiles);
    test_chunks();
    check_group("weights to look at equal those of the forward pass");
    each_normalizer(check_weights);

    check_group("causality: later keys and values affect no row");
    each_normalizer(check_masked);
}

// ---- extremes

// Scales all scores so that the largest is `largest`; everything must be finite.
static void check_finite(const char *text, float largest) {
    enum { NH = 2, HS = 8, T = 70 };
    Case c = case_new(text, 1, NH, HS, HS, T, 1);
    double most = 0;
    for (size_t h = 0; h < NH; h++)
        for (size_t t = 0; t < T; t++)
            for (size_t j = 0; j <= t; j++) {
                double score = 0;
                for (size_t i = 0; i < HS; i++) score += (double)c.q[(h * T + t) * HS + i] * c.k[(h * T + j) * HS + i];
                most = fmax(most, fabs(score));
            }
    for (size_t i = 0; i < c.keys; i++) {
        c.q[i] *= (float)sqrt(largest / most);
        c.k[i] *= (float)sqrt(largest / most);
    }
    forward(&c);
    backward(&c);
    CHECK(not_finite(c.out, c.values) == 0, "%s at %g: %zu of %zu outputs", text, largest, not_finite(c.out, c.values),
          c.values);
    size_t bad = not_finite(c.dq, c.keys) + not_finite(c.dk, c.keys) + not_finite(c.dv, c.values);
    CHECK(bad == 0, "%s at %g: %zu of %zu gradients", text, largest, bad, 2 * c.keys + c.values);
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (c.scalar_grads.of[x])
            CHECK(not_finite(c.scalar_grads.of[x], scalar_size(x, NH, T)) == 0, "%s at %g: d%s", text, largest,
                  scalar_names[x]);
    for (size_t n = 1; n <= T; n += 23) {
        float out[HS];
        row_after(&c, out, 0, n, 0);
        CHECK(not_finite(out, HS) == 0, "%s at %g: row %zu alone", text, largest, n);
    }
    case_free(&c);
}

static void check_extremes(const char *text) {
    Normalizer n = parse(text);
    if (n.phi.kind == PHI_EXP && !norm_is_sum(n.norm)) return;    // no bound
    check_finite(text, 1e4f);
    for (int i = -18; i >= -42; i -= 6) check_finite(text, (float)pow(10, i));    // sums that are subnormal
    if (n.phi.kind != PHI_RELU2) check_finite(text, 1e30f);                       // whose square overflows
}

// exp without a sum is unbounded: it is infinite from z = 88.8 on. A row with such a z is not finite, and every other
// row is right.
static void test_exp(void) {
    enum { HS = 4, T = 100 };
    Case c = case_heads("exp", 1, HS, T, 12);
    size_t overflows = 0, wrong = 0, hidden = 0;
    forward(&c);
    for (size_t t = 0; t < T; t++) {
        double largest = 0, z[T];
        for (size_t j = 0; j <= t; j++) {
            z[j] = 0;
            for (size_t i = 0; i < HS; i++) z[j] += (double)c.q[t * HS + i] * c.k[j * HS + i] / 2;
            largest = fmax(largest, z[j]);
        }
        if (largest > 89) {
            overflows++;
            hidden += not_finite(c.out + t * T, T) == 0;
        }
        for (size_t j = 0; largest < 88 && j <= t; j++)
            wrong += !(fabs(c.out[t * T + j] / exp(z[j]) - 1) < 1e-4) && z[j] > -80;
    }
    CHECK(overflows > 5 && overflows < T - 5, "%zu rows overflow", overflows);
    CHECK(hidden == 0, "%zu rows overflow and are finite", hidden);
    CHECK(wrong == 0, "%zu weights are wrong", wrong);
    case_free(&c);
}

static void check_power(const char *base, double P) {
    check_case();
    enum { LONG = 16384, T = 4096, HS = 16, VS = 4 };
    static const size_t ROWS[] = {1, 2, 3, 4, 370, 1000, LONG};
    char text[64];
    snprintf(text, sizeof text, "%s+post=reweight:%g", base, P);
    Case c = case_new(text, 1, 1, HS, VS, T, 2);
    forward(&c);
    backward(&c);
    CHECK(not_finite(c.out, c.values) == 0, "%s at T = %d: outputs", text, T);
    CHECK(not_finite(c.dq, c.keys) + not_finite(c.dk, c.keys) + not_finite(c.dv, c.values) == 0,
          "%s at T = %d: gradients", text, T);
    case_free(&c);
    c = case_new(text, 1, 1, HS, 1, LONG, 2);
    for (size_t i = 0; i < c.values; i++) c.v[i] = 1;
    for (size_t i = 0; i < COUNT(ROWS); i++) {
        float out;
        CHECK(row_after(&c, &out, 0, ROWS[i], 0), "%s: row %zu has no weight", text, ROWS[i]);
        CHECK(fabs(out - 1) < 2e-5, "%s: row %zu sums to %.8g", text, ROWS[i], out);
    }
    for (size_t i = 0; i < LONG; i++) {
        c.k[i * HS] = i == 77 ? 1e3f : 0;
        c.q[i * HS] = 10;
        c.v[i] = i == 77;
    }    // one key has all the weight: A n = n
    float out;
    row_after(&c, &out, 0, LONG, 0);
    CHECK(isfinite(out) && out > 0, "%s: one key of %d has %.8g", text, LONG, out);
    case_free(&c);
}

static void test_extremes(void) {
    static const double POWERS[] = {0.5, 1, 2, 15, 100};
    check_group("scores of +-1e4 and +-1e30: outputs and gradients are finite");
    each_normalizer(check_extremes);
    check_group("exp without a sum overflows visibly");
    test_exp();
    check_group("reweight:P for P of 0.5 to 100 at 16,384 keys");
    for (size_t i = 0; i < COUNT(POWERS); i++) {
        check_power("lssar", POWERS[i]);
        check_power("softmax", POWERS[i]);
    }
}

// T = 2^20 needs at most 64 times the scratch of T = 2^14, and that is far below T·T.
static void check_memory(const char *text) {
    Normalizer n = parse(text);
    AttentionShape shape = {.normalizer = &n, .B = 2, .T = 1 << 14, .NH = 3, .NKV = 3, .HS = 64, .VS = 64, .L = 1024};
    size_t small = attention_scratch(shape, 4);
    shape.T = 1 << 20;
    size_t large = attention_scratch(shape, 4);
    CHECK((double)large < 64.1 * (double)small, "%s: %zu numbers at 2^14, %zu at 2^20", text, small, large);
    CHECK((double)small < 0.125 * (1 << 14) * (double)(1 << 14), "%s: %zu numbers at 2^14", text, small);
}

// ---- all-zero rows

static void check_no_weight(const char *text, float q, float k, size_t with_weight, bool no_gradient) {
    check_case();
    enum { B = 2, NH = 3, HS = 4, T = 70, ROWS = B * NH * T };
    Case c = case_new(text, B, NH, HS, HS, T, 1);
    for (size_t i = 0; i < c.keys; i++) {
        c.q[i] = q;
        c.k[i] = k;
    }
    uint64_t counted = forward(&c);
    backward(&c);
    CHECK(counted == ROWS - B * NH * with_weight, "%s, q = %g: %d of %d rows counted", text, q, (int)counted, ROWS);
    for (size_t r = 0; r < B * T; r++) {
        bool zero = r % T >= with_weight, is_zero = not_zero(c.out + r * NH * HS, NH * HS) == 0;
        CHECK(zero == is_zero, "%s, q = %g: row %zu", text, q, r % T + 1);
    }
    size_t bad = not_finite(c.dq, c.keys) + not_finite(c.dk, c.keys) + not_finite(c.dv, c.values);
    CHECK(bad == 0, "%s, q = %g: %zu gradients are not finite", text, q, bad);
    if (no_gradient && with_weight == 0)
        CHECK(not_zero(c.dq, c.keys) + not_zero(c.dk, c.keys) + not_zero(c.dv, c.values) == 0,
              "%s, q = %g: gradients are not 0", text, q);
    for (size_t b = 0; no_gradient && b < B; b++)
        CHECK(not_zero(c.dq + (b * T + with_weight) * NH * HS, (T - with_weight) * NH * HS) == 0,
              "%s, q = %g: dq of all-zero rows is not 0", text, q);
    float out[HS];
    CHECK(row_after(&c, out, 1, T, 0) == false && not_zero(out, HS) == 0, "%s, q = %g: the last row alone", text, q);
    case_free(&c);
}

// Rows of equal weights lie on reweight's kink: except for n up to 3 they are all-zero, whatever the rounding. All-zero
// rows are counted.
static void check_uniform(const char *text) {
    check_case();
    enum { T = 150, HS = 4 };
    Case c = case_new(text, 1, 1, HS, HS, T, 1);
    memset(c.q, 0, c.keys * sizeof *c.q);
    uint64_t counted = forward(&c), zero = 0;
    backward(&c);
    for (size_t t = 0; t < T; t++) zero += not_zero(c.out + t * HS, HS) == 0;
    if (c.normalizer.post.kind == POST_REWEIGHT && c.normalizer.norm.kind == NORM_L1 && c.normalizer.norm.value == 0)
        CHECK(zero >= T - POST_FROM, "%s, q = 0: %d rows of %d are 0", text, (int)zero, T);
    if (c.normalizer.post.kind == POST_RECENTER_L1 && c.normalizer.norm.kind == NORM_L1)
        CHECK(zero >= T - POST_FROM, "%s, q = 0: %d rows of %d are 0", text, (int)zero, T);
    if (c.normalizer.post.kind != POST_RECENTER)    // recenter does not divide, and counts nothing
        CHECK(zero == counted, "%s, q = 0: %d rows are 0, %d were counted", text, (int)zero, (int)counted);
    CHECK(not_finite(c.out, c.values) + not_finite(c.dq, c.keys) + not_finite(c.dk, c.keys) +
                  not_finite(c.dv, c.values) ==
              0,
          "%s, q = 0", text);
    case_free(&c);
}

// scores (n) in, the weights of a row of n visible keys out.
static void row_of_scores(const Normalizer *normalizer, float *scores, int n) {
    AttentionShape shape = {.normalizer = normalizer,
                            .B = 1,
                            .T = 1,
                            .NH = 1,
                            .NKV = 1,
                            .HS = 64,
                            .VS = 64,
                            .L = 1024,
                            .past = (size_t)n - 1};
    attention_weights_of_scores(scores, (size_t)n, NULL, NULL, (Scalars){0}, shape, (AttentionRows){.rows = 1});
}

// The same of one row of n equal weights, whose sum has the rounding errors of n additions.
static void check_long_uniform(const char *text) {
    enum { LONGEST = 20000 };
    static float weights[LONGEST];
    Normalizer normalizer = parse(text);
    for (int n = POST_FROM + 1; n <= LONGEST; n += 1 + n / 7) {
        check_case();
        for (int j = 0; j < n; j++) weights[j] = 0.01f * (float)(n % 17);
        row_of_scores(&normalizer, weights, n);
        CHECK(not_zero(weights, (size_t)n) == 0, "%s, a row of %d equal weights: not 0", text, n);
    }
}

// One key has twice the weight of all others: it keeps half of the sum of absolute values, or all of the weight.
static void check_long_outlier(const char *text, float expected) {
    enum { LONGEST = 65536 };
    static float weights[LONGEST];
    Normalizer normalizer = parse(text);
    for (int n = POST_FROM + 1; n <= LONGEST; n *= 4) {
        check_case();
        for (int j = 0; j < n; j++) weights[j] = j == 2 ? 16 : 8;    // z = 2 and 1
        row_of_scores(&normalizer, weights, n);
        CHECK(fabsf(weights[2] - expected) < 1e-3f, "%s, a row of %d weights: %g", text, n, (double)weights[2]);
    }
}

static void test_no_weight(void) {
    static const char *const RECTIFIED[] = {"relu-l1", "relu2-l1", "relu6-l1", "relu-L",    "relu-sqrt",
                                            "relu2-n", "relu2-T",  "relu2-L",  "relu2-512", "softpick"};
    check_group("all-zero rows: output 0, no gradient, counted once");
    for (size_t i = 0; i < COUNT(RECTIFIED); i++) {
        check_no_weight(RECTIFIED[i], 1, -1, 0, true);
        check_no_weight(RECTIFIED[i], 0, 1, 0, true);
    }
    check_no_weight("identity-l1", 0, 1, 0, true);
    check_no_weight("gelu-l1", 0, 1, 0, true);
    check_no_weight("mish-l1", 0, 1, 0, true);
    check_no_weight("identity", 0, 1, 0, false);    // phi' is 1 at 0, and Z is 1
    check_no_weight("relu-l1+norm=l1+2", 1, -1, 0, true);
    check_no_weight("relu-l1+qk=l2", 0, 0, 0, true);
    check_no_weight("relu-l1+post=recenter-l1", 1, -1, 0, true);
    check_no_weight("relu2-l1+post=reweight:3", 1, -1, 0, true);
    check_no_weight("sigmoid+post=reweight:2", 3, -3, 3,
                    true);    // A = sigmoid(-18)/L: all below 1/n; for n <= 3 compared with 0
    check_no_weight("softmax1+post=reweight:15", 0, 1, 3, true);    // A = 1/(n + 1)
    for (size_t i = 0; i < COUNT(PRESETS); i++) {
        char text[96];
        check_uniform(PRESETS[i]);
        snprintf(text, sizeof text, "%s+post=reweight:3", PRESETS[i]);
        check_uniform(text);
        snprintf(text, sizeof text, "%s+post=recenter-l1", PRESETS[i]);
        check_uniform(text);
    }
    static const char *const LONG[] = {"lssar", "lssa+post=recenter-l1", "relu6-l1+post=recenter-l1",
                                       "softmax-recentered-l1", "softmax+post=reweight:3"};
    for (size_t i = 0; i < COUNT(LONG); i++) check_long_uniform(LONG[i]);
    check_long_outlier("relu6-l1+post=recenter-l1", 0.5f);
    check_long_outlier("relu6-l1+post=reweight:3", 1);
}

// ---- threads

// Two threads give the same bits again, and one thread too. With one head the threads share its rows; with four each
// thread has its own.
static void check_threads_of(const char *text, Tiles tiles, size_t NH, size_t T) {
    enum { HS = 8, RUNS = 3 };
    Case c[RUNS];
    for (int i = 0; i < RUNS; i++) {
        omp_set_num_threads(i == RUNS - 1 ? 1 : 2);
        c[i] = case_new(text, 1, NH, HS, HS, T, 2);
        c[i].tiles = tiles;
        forward(&c[i]);
        backward(&c[i]);
    }
    for (size_t i = 0; i < c[0].count; i++) {
        float *x = c[0].arrays[i].at;
        if (x == c[0].scratch) continue;
        size_t n = c[0].arrays[i].n;
        CHECK(!memcmp(x, c[1].arrays[i].at, n * sizeof *x), "%s, %zu heads: array %zu differs when repeated", text, NH,
              i);
        CHECK(!memcmp(x, c[2].arrays[i].at, n * sizeof *x),
              "%s, tiles %s, %zu heads: array %zu differs with one thread", text, tiles_name(tiles), NH, i);
    }
    for (int i = 0; i < RUNS; i++) case_free(&c[i]);
}

static void check_threads(const char *text) {
    static Tiles tiles = TILES_REAL;
    check_threads_of(text, tiles, 1, 150);
    tiles = is_there(tiles + 1) ? tiles + 1 : TILES_REAL;
    check_threads_of(text, tiles, 4, 150);
}

int main(void) {
    program_name = "test_attention";
    // The arrays are small, and two threads that wait for each other on a busy machine are slow.
    omp_set_num_threads(1);
    test_figure_1();
    test_by_hand();
    test_independence();
    test_extremes();
    check_group("scratch grows with T, not with its square");
    each_normalizer(check_memory);
    test_no_weight();
    check_group("one thread and two");
    each_normalizer(check_threads);
    // Long enough for several threads to work.
    check_threads_of("lssar", TILES_REAL, 1, 1500);
    check_threads_of("softmax-recentered-l1", TILES_REAL, 1, 1500);
    return check_verdict();
}

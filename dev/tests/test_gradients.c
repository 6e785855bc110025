// Finite differences in double of the trainer's own code (the layers, attention and passes of train_gpt2.c built with
// REAL=double): every normalizer with both blocks. Because no reference is involved, this also detects errors that the
// reference shares. Double cannot show where the float32 functions of math/vecmath.h are called outside their ranges.
// Therefore every phi is also compared with the float32 code (float_path.c); test_gpt2 compares layers and attention in
// float32 with the reference.
//
//   build/tests/test_gradients [WORD]     only the cases whose name has WORD in it
#define REAL double
#define gemm_run gemm_run_in_double    // the library has another, in float32
#define LAYERS_ONLY
#define WITHOUT_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"
#include "train_gpt2.c"

#include "dev/reference/hash.h"
#include "dev/tests/check.h"
#include "dev/tests/float_path.h"

// The trainer's matmuls, by plain loops: finite differences need exactness, not speed.
static real element(Matrix x, size_t row, size_t column) {
    return x.f32[x.transposed ? column * x.ld + row : row * x.ld + column];
}

void gemm_run(const Gemm *mm, size_t m, size_t n, size_t k, Matrix A, Matrix B, real beta, real *C, size_t ldc) {
    (void)mm;
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n; j++) {
            real sum = beta != 0 ? C[i * ldc + j] : 0;
            for (size_t p = 0; p < k; p++) sum += element(A, i, p) * element(B, p, j);
            C[i * ldc + j] = sum;
        }
    }
}

// ---- numbers

// Memory of the current case, which ends with free_reals().
static real **taken;
static size_t taken_count;

static real *reals(size_t n) {
    real *x = calloc(n + 1, sizeof *x);
    taken = realloc(taken, (taken_count + 1) * sizeof *taken);
    if (!x || !taken) fail(EXIT_RESOURCE, "out of memory.");
    return taken[taken_count++] = x;
}

static void free_reals(void) {
    while (taken_count > 0) free(taken[--taken_count]);
}

static real *input(const char *name, size_t n, double mean, double scale) {
    real *x = reals(n);
    for (size_t i = 0; i < n; i++) x[i] = mean + scale * fixture_uniform(fixture_stream(name), i);
    return x;
}

static real dot(const real *a, const real *b, size_t n) {
    real sum = 0;
    for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static const char *case_name;
static double worst;    // relative error

// The slope of `value` along the unit vector r (n), by a five-point rule, must be `expected` to within 1e-6 of `size`.
// If one step size crosses a kink (relu at 0), a smaller one may not, but a wrong gradient fails with all of them.
static double slope_error(real *x, const real *r, size_t n, double expected, double size, double (*value)(void *),
                          void *context) {
    static const double STEPS[] = {1, -1, 2, -2}, SIZES[] = {1e-4, 1e-5, 2e-6, 4e-7};
    double error = INFINITY;
    real *start = reals(n);
    memcpy(start, x, n * sizeof *x);
    for (size_t s = 0; s < 4 && !(error < 1e-6); s++) {
        double h = SIZES[s] * sqrt((double)n) / (size > 1 ? size : 1), v[4];
        for (int k = 0; k < 4; k++) {
            for (size_t i = 0; i < n; i++) x[i] = start[i] + STEPS[k] * h * r[i];
            v[k] = value(context);
        }
        double here = fabs((8 * (v[0] - v[1]) - (v[2] - v[3])) / (12 * h) - expected) / size;
        if (!(here >= error)) error = here;
    }
    memcpy(x, start, n * sizeof *x);
    return error;
}

// Compares x's gradient dx (n) with slopes along dx itself and along a random direction, which reveals components
// missing from dx. The error of a nearly zero gradient is relative to `least`.
static void check_gradient(const char *what, real *x, const real *dx, size_t n, double least, double (*value)(void *),
                           void *context) {
    double norm = sqrt(dot(dx, dx, n)), size = norm > least ? norm : least;
    for (int random = 0; random < 2; random++) {
        if (!random && norm < least) continue;
        real *r = input("direction", n, 0, 1);
        double length = random ? sqrt(dot(r, r, n)) : norm;
        for (size_t i = 0; i < n; i++) r[i] = random ? r[i] / length : dx[i] / length;
        double error = slope_error(x, r, n, dot(r, dx, n), size, value, context);
        if (!(error <= worst)) worst = error;
        CHECK(error < 1e-6, "%s: %s: off by %.3g of %.3g%s", case_name, what, error, size,
              random ? ", along a random direction" : "");
    }
}

static void check_slope(const char *what, real *x, const real *dx, size_t n, double (*value)(void *), void *context) {
    CHECK(dot(dx, dx, n) > 0, "%s: %s: no gradient at all", case_name, what);
    check_gradient(what, x, dx, n, 0, value, context);
}

// ---- the family

#define NAME(name, ...) #name,
// clang-format off
static const char *const NAMES[] = {
    NORMALIZERS(NAME)
    // Awkward cases: two overrides, large, small and fractional powers, negative scales, posts on signed phis, lengths
    // T and L.
    "softmax+norm=l1+0.5+post=negate", "softmax+post=reweight:3", "sigmoid-logn-l1+post=reweight:15", "lssar+post=reweight:100",
    "lssar+post=reweight:0.5", "softmax+qk=l2+scale=const:-7", "gelu-l1+post=recenter-l1", "mish-l1+norm=l1+2+post=recenter",
    "relu6-l1+scale=const:1+norm=T2+offset=-logT", "identity-l1+post=recenter-l1", "softplus-l1+scale=log:L+norm=n2", "ssmax-pn+phi=softplus+s=0.5+fixed",
    "relu2-l1+qk=l2+scale=logd-logn+post=reweight:2.5", "ssmax-bias+norm=l1+1+post=reweight:2",
    "softmax-sink+post=recenter-l1", "softmax-floorlog+scale=floorlog:4+norm=l1+sink", "softpick+norm=n+post=recenter",
};
// Lists for the layers, with documents.
static const char *const LISTS[] = {
    "ssmax-pn+window=3,softmax-sink+cap=0.7+rope=none", "ssmax-bias+window=4+cap=2+rope=50,lssa+rope=none",
    "relu2-T+window=2+cap=1.5,softmax-recentered+window=4",
};
// clang-format on
#undef NAME

static Normalizer parse(const char *text) {
    Normalizer normalizer;
    char message[1024];
    if (!normalizer_parse(&normalizer, text, message, sizeof message)) fail(EXIT_USAGE, "%s: %s", text, message);
    return normalizer;
}

// ---- attention alone: gradients of sum(dout · out) with respect to q, k, v and the scalars

typedef struct {
    AttentionShape shape;
    Scalars scalars;
    AttentionInput in;
    real *out, *stats, *dout, *scratch;
} AttentionCase;

static double attention_value(void *context) {
    AttentionCase *c = context;
    attention_forward(c->out, c->stats, c->in, c->scalars, c->shape, c->scratch);
    return dot(c->out, c->dout, c->shape.B * c->shape.T * c->shape.NH * c->shape.VS);
}

// Compares every phi and its slope in float32 with double, for more than the range of z that scores can reach, near 0
// and far from it. The bound is 1e-5 of |f| + |phi'|; rounding z² in exp(-z²/2) alone causes 5e-6 at z = -12.
static void test_phi(int phi, const char *name) {
    check_case();
    enum { FINE = 12800, POINTS = FINE + 400 };
    static float z[POINTS], f[POINTS], slope[POINTS];
    for (int i = 0; i < FINE; i++) z[i] = (float)(i - FINE / 2) / 64;                        // -100 to 100
    for (int i = 0; i < 400; i++) z[FINE + i] = (i % 2 ? 1 : -1) * exp2f(-(float)i / 10);    // down to 2^-40
    for (float one = 1; one > 0.1f; one /= 3) {
        double far = 0, at = 0;
        phi_in_float(phi, z, one, f, slope, POINTS);
        for (int i = 0; i < POINTS; i++) {
            double value, derivative;
            phi_both(phi, z[i], one, &value, &derivative);
            if (value > FLT_MAX) continue;
            // Exp is 0 below FLT_MIN.
            double allowed = 1e-5 * (fabs(value) + fabs(derivative)) + 200 * (double)FLT_MIN;
            double off = worse(fabs(f[i] - value), fabs(slope[i] - derivative)) / allowed;
            if (!(off <= far)) {
                far = off;
                at = z[i];
            }
        }
        CHECK(
            far <= 1,
            "phi=%s in float32: at z = %g the error is %.3g times the bound. Does a function of math/real.h leave its range?",
            name, at, far);
    }
}

typedef struct {
    size_t B, NH, NKV, HS, VS, T;
    bool documents;    // rows see only the keys of their own document
} Sizes;

// Documents of random lengths, some of a single token.
static int32_t *first_keys(Sizes z) {
    int32_t *first = calloc(z.B * z.T, sizeof *first);
    if (!first) fail(EXIT_RESOURCE, "out of memory.");
    for (size_t i = 0; i < z.B * z.T; i++) {
        size_t t = i % z.T;
        if (t == 0) first[i] = 0;
        else first[i] = fixture_token(i, 5) == 0 ? (int32_t)t : first[i - 1];
    }
    return first;
}

static void test_attention(const char *text, Sizes z) {
    check_case();
    Normalizer normalizer = parse(text);
    int L = (int)z.T + 3;
    size_t B = z.B, NH = z.NH, NKV = z.NKV, HS = z.HS, VS = z.VS, T = z.T;
    size_t rows = B * NH * T, queries = rows * HS, keys = B * T * NKV * HS, values = B * T * NKV * VS, n = rows * VS;
    int32_t *first = z.documents ? first_keys(z) : NULL;
    real *q = input("q", queries, 0, 2), *k = input("k", keys, 0, 2), *v = input("v", values, 0, 1);
    AttentionCase c = {.shape = {&normalizer, B, T, NH, NKV, HS, VS, .L = L},
                       .in = {{q, NH * HS, HS}, {k, NKV * HS, HS}, {v, NKV * VS, VS}, .first = first}};
    c.dout = input("dout", n, 0, 1);
    c.out = reals(n);
    c.stats = reals(rows * ROW_STATS);
    c.scratch = reals(attention_scratch(c.shape, omp_get_max_threads()));
    real *dq = reals(queries), *dk = reals(keys), *dv = reals(values), *scalars[SCALAR_COUNT] = {NULL};
    ScalarGrads grads = {{NULL}};
    for (Scalar x = 0; x < SCALAR_COUNT; x++) {
        size_t size = scalar_size(x, NH, (size_t)L);
        float mean, scale;
        if (!normalizer_has(&normalizer, x)) continue;
        fixture_weight_rule(scalar_names[x], size, &mean, &scale);
        c.scalars.of[x] = scalars[x] = input(scalar_names[x], size, 2 * mean + 0.1, scale);
        grads.of[x] = reals(size);
    }
    attention_value(&c);
    AttentionInputGrads d = {{dq, NH * HS, HS}, {dk, NKV * HS, HS}, {dv, NKV * VS, VS}};
    attention_backward(d, grads, c.dout, c.out, c.stats, c.in, c.scalars, c.shape, c.scratch);
    check_slope("q", q, dq, queries, attention_value, &c);
    check_slope("k", k, dk, keys, attention_value, &c);
    check_slope("v", v, dv, values, attention_value, &c);
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (scalars[x])
            check_slope(scalar_names[x], scalars[x], grads.of[x], scalar_size(x, NH, (size_t)L), attention_value, &c);
    free(first);
    free_reals();
}

// ---- the whole model

typedef struct {
    Model model;
    int32_t inputs[32], targets[32];
    size_t B, T;
} ModelCase;

static double model_value(void *context) {
    ModelCase *c = context;
    model_forward(&c->model, c->inputs, c->B, c->T);
    return model_loss(&c->model, c->targets, NULL, c->B * c->T, 0, false);
}

// documents: with --doc-mask, and end-of-text tokens inside the rows.
static void test_model(const char *text, const char *shape, bool documents) {
    check_case();
    enum { B = 2, T = 9, V = 61 };
    static ModelCase c;
    Error error;
    c = (ModelCase){.B = B, .T = T};
    Model *m = &c.model;
    if (!model_parse(&m->config, shape, &error)) fail_with(&error);
    m->config.seq_len = 16;
    char message[256];
    if (!attention_parse(&m->config.attn, text, m->config.layers, message, sizeof message))
        fail(EXIT_USAGE, "%s: %s", text, message);
    m->doc_mask = documents;
    m->config.end_of_text = fixture_token(4, V);
    m->list = tensors_of(&m->config, NULL, 0);
    plan_parameters(m, true, false);
    plan_activations(m, m->config.layers, B, T);
    memory_take(&m->plan);
    model_ready(m);
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        float mean, scale;
        fixture_weight_rule(t->name, t->shape[t->ndim - 1], &mean, &scale);
        if (!tensor_trained(t, &m->config.attn)) {
            mean = t->mean;
            scale = 0;
        }
        for (size_t j = 0; j < t->elements; j++)
            m->params[t->offset + j] = mean + (double)scale * fixture_uniform(fixture_stream(t->name), j);
    }
    for (int i = 0; i < B * T; i++) {
        c.inputs[i] = fixture_token((uint64_t)i, V);
        c.targets[i] = fixture_token((uint64_t)i + 1, V);
    }
    model_step(m, c.inputs, c.targets, NULL, B, T, 1, true);
    double whole = gradient_norm(m);
    for (size_t i = 0; i < m->list.count; i++) {
        const Tensor *t = &m->list.tensors[i];
        real *dx = m->grads + t->offset;
        if (tensor_trained(t, &m->config.attn))
            check_gradient(t->name, m->params + t->offset, dx, t->elements, 1e-3 * whole, model_value, &c);
    }
    tensors_free(&m->list);
    memory_release(&m->plan);
    free_reals();
}

int main(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "";
    program_name = "test_gradients";
    omp_set_num_threads(1);
    case_name = "phi in float32";
    check_group(case_name);
#define PHI(kind, name, ...) test_phi(kind, name);
    if (strstr(case_name, word)) { PHI_VALUES(PHI) }
#undef PHI
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        case_name = NAMES[i];
        if (!strstr(case_name, word)) continue;
        check_group(case_name);
        omp_set_num_threads(2);
        // More rows than a block, values wider than keys, several threads per head.
        test_attention(NAMES[i], (Sizes){.B = 1, .NH = 1, .NKV = 1, .HS = 8, .VS = 20, .T = 70});
        test_attention(NAMES[i], (Sizes){.B = 1, .NH = 2, .NKV = 1, .HS = 8, .VS = 8, .T = 70, .documents = true});
        // The work is small, so threads would cost more than they save.
        omp_set_num_threads(1);
        test_attention(NAMES[i], (Sizes){.B = 2, .NH = 2, .NKV = 2, .HS = 6, .VS = 6, .T = 9});
        test_attention(NAMES[i], (Sizes){.B = 2, .NH = 6, .NKV = 2, .HS = 4, .VS = 6, .T = 9});
        test_model(NAMES[i], "layers=2,heads=2,channels=32,ffn=48,vocab=61,tied=0,gate=channel", false);
        test_model(NAMES[i],
                   "layers=1,heads=4,kv_heads=2,head_dim=6,channels=16,ffn=20,vocab=61,tied=1,qk_norm=1,bias=qkv,"
                   "gate=head",
                   true);
        test_model(NAMES[i], "layers=1,block=gau,channels=24,vocab=61,tied=1", false);
    }
    for (size_t i = 0; i < sizeof LISTS / sizeof *LISTS; i++) {
        case_name = LISTS[i];
        if (!strstr(case_name, word)) continue;
        check_group(case_name);
        test_model(LISTS[i], "layers=2,heads=2,channels=32,ffn=48,vocab=61,tied=0", i % 2);
        test_model(LISTS[i], "layers=2,block=gau,channels=24,vocab=61,tied=1", i % 2 == 0);
    }
    printf("worst relative error %.2g\n", worst);
    return check_verdict();
}

// Compares every number of the CUDA trainer with the float64 reference. In float32, whole models (each layer, ten steps
// of AdamW) and attention, with the cases of test_gpt2.c and, except for one normalizer, its bounds. In bfloat16, the
// models' losses with the reference, and attention with float32. dev/tests/test_kernels.cu tests the other kernels by
// themselves. Runs on a GPU, or on a CPU as test_gpt2cu_on_cpu. The exit status is the verdict.
//
//   ./test_gpt2cu [WORD]     only the cases whose names contain WORD
#define WITHOUT_MAIN
#define LOSS_ROWS ((size_t)40)      // so that most cases take several iterations, the last with fewer rows
#include "train_gpt2.cu"

// The slope of a root is infinite at r = 0, and r is rounded as 1 is, see FLOAT_ROUNDING in dev/tests/test_flash.py.
static double gradient_bound(const AttentionList *attn) {
    Stage post = attention_at(attn, 0)->normalizer.post;
    return post.kind == POST_REWEIGHT && post.value < 1 ? 5e-4 : 1e-4;
}
#define GRADIENT_BOUND(attn) gradient_bound(attn)

#include "dev/reference/cases.h"

#include <algorithm>
#include <string>
#include <vector>

// ---------------------------------------------------------------------------------------------------------------------
// The trainer under test

static cudaStream_t stream;
static bool in_bf16, recompute;    // what main() wants of the subject
static ModelConfig subject_config;
static TrainOptions subject_options;
static ModelOf<float> subject_in_float32;
static ModelOf<bf16> subject_in_bf16;
static Model *subject;    // one of these
static float *host_params, *host_grads;

// Calls f with the subject as what it is.
template <class F>
static auto by_type(F f) {
    return subject == &subject_in_bf16 ? f(&subject_in_bf16) : f(&subject_in_float32);
}

static void subject_start(const ModelConfig *config, const TensorList *list, size_t B, size_t T) {
    subject_config = *config;
    subject_in_float32 = {};
    subject_in_bf16 = {};
    subject = in_bf16 ? (Model *)&subject_in_bf16 : &subject_in_float32;
    subject->config = &subject_config;
    subject->list = *list;
    subject->stream = stream;
    subject_options.recompute = recompute;
    subject_options.deterministic = true;
    subject->o = &subject_options;
    IntList lengths = {{(int64_t)T}, 1};
    by_type([&](auto *m) { plan_model(m, NULL, 0, &lengths, B, T); });
    take_model(subject);
    upload_segments(subject);
    host_params = floats(list->floats);
    host_grads = floats(list->floats);
}

static void subject_set(const float *params) {
    CUDA_CHECK(cudaMemcpy(subject->params, params, subject->list.floats * sizeof(float), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());
    round_parameters(subject, 0);
}

static double from_device(const double *there) {
    double value;
    CUDA_CHECK(cudaMemcpyAsync(&value, there, sizeof value, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return value;
}

// A batch in the form in which the trainer has it on the device; the copies have finished on return.
static BatchTokens subject_batch(const int32_t *inputs, const int32_t *targets, size_t N) {
    int32_t *ints = (int32_t *)malloc(batch_ints(N) * sizeof *ints),
            *starts = (int32_t *)malloc((subject->config->vocab + 1) * sizeof *starts);
    BatchTokens there = {};
    there.inputs = subject->batch;
    there.targets = subject->batch + N;
    there.order = subject->batch + 2 * N;
    there.pieces = (const EmbeddingPiece *)(subject->batch + 3 * N);
    memcpy(ints, inputs, N * sizeof *ints);
    memcpy(ints + N, targets, N * sizeof *ints);
    there.plan =
        embedding_plan(ints + 2 * N, (EmbeddingPiece *)(ints + 3 * N), inputs, N, starts, subject->config->vocab);
    CUDA_CHECK(cudaMemcpy(subject->batch, ints, (3 * N + 4 * (there.plan.pieces + there.plan.sums)) * sizeof *ints,
                          cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());
    free(ints);
    free(starts);
    return there;
}

static double subject_step(const int32_t *inputs, const int32_t *targets, size_t B, size_t T, float scale, bool first) {
    BatchTokens there = subject_batch(inputs, targets, B * T);
    double before = first ? 0 : from_device(subject->sums + SUM_STEP);
    by_type([&](auto *m) { model_step(m, there, B, T, scale, first, true); });
    return from_device(subject->sums + SUM_STEP) - before;
}

static double subject_norm(void) {
    gradient_squares(subject->sums + SUM_SQUARES, subject->sums + SUM_PARTIALS, subject->grads, subject->segments,
                     subject->segment_count, subject->segment_blocks, false, stream);
    return sqrt(from_device(subject->sums + SUM_SQUARES));
}

static void subject_update(double clip, AdamW a) {
    gradients_end(subject, clip);
    model_update(subject, a);
}

static const float *to_host(float *host, const float *there) {
    CUDA_CHECK(cudaMemcpyAsync(host, there, subject->list.floats * sizeof *host, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return host;
}

static const float *subject_params(void) {
    return to_host(host_params, subject->params);
}

static const float *subject_grads(void) {
    return to_host(host_grads, subject->grads);
}

static void subject_logits(float *logits, const int32_t *inputs, size_t B, size_t T) {
    ModelOf<float> *m = &subject_in_float32;
    const Activations<float> *a = &m->activations;
    size_t N = B * T, C = m->config->channels, V = m->config->vocab, VP = padded_vocab(m->config);
    subject_batch(inputs, inputs, N);
    model_forward(m, m->batch, B, T, 1);
    for (size_t from = 0; from < N; from += LOSS_ROWS) {
        size_t rows = N - from < LOSS_ROWS ? N - from : LOSS_ROWS;
        matmul_forward(&m->matmul, a->logits, a->h + from * C, weight(m, m->list.head), (const float *)NULL,
                       {rows, C, VP}, stream);
        CUDA_CHECK(cudaMemcpy2DAsync(logits + from * V, V * sizeof(float), a->logits, VP * sizeof(float),
                                     V * sizeof(float), rows, cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }
}

static void subject_end(void) {
    matmul_end(&subject->matmul);
    for (size_t i = 0; i < subject->plan.count; i++) CUDA_CHECK(cudaFree(*subject->plan.rows[i].where));
    free(subject->parts);
    free(host_params);
    free(host_grads);
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention by itself, with q, k and v in one array, as the projection leaves them

typedef std::vector<float> Floats;

// A device array of X with the numbers of host, or with as many zeros.
template <class X = float>
static X *on_device(const Floats &host, bool zeros = false) {
    std::vector<X> numbers(host.size());
    X *there;
    for (size_t i = 0; i < host.size(); i++) numbers[i] = X(zeros ? 0.0f : host[i]);
    CUDA_CHECK(cudaMalloc((void **)&there, host.size() * sizeof(X)));
    CUDA_CHECK(cudaMemcpy(there, numbers.data(), host.size() * sizeof(X), cudaMemcpyHostToDevice));
    return there;
}

template <class X>
static void from_device_array(Floats &host, X *there) {
    std::vector<X> numbers(host.size());
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemcpy(numbers.data(), there, host.size() * sizeof(X), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(there));
    for (size_t i = 0; i < host.size(); i++) host[i] = (float)numbers[i];
}

// The numbers of a case. The learned scalars are indexed by Scalar: empty if the normalizer does not have one, or its
// gradient if the normalizer does not train it.
struct AttentionCase {
    Normalizer normalizer;
    size_t B, T, NH, NKV, HS, window;
    int L;
    Floats qkv, dout, scalars[SCALAR_COUNT], out, dq, dk, dv, scalar_grads[SCALAR_COUNT];
    Floats starts;    // (B,T): where documents begin; or empty
};

static Floats filled(const char *name, size_t n, float mean, float scale) {
    Floats x(n);
    fixture_fill(x.data(), n, name, 0, mean, scale);
    return x;
}

static AttentionCase attention_case(void) {
    static const char *const PARTS[] = {"q", "k", "v"};
    AttentionCase a = {};
    a.B = size_of("B");
    a.T = size_of("T");
    a.NH = size_of("heads");
    a.NKV = size_of(has_key("kv_heads") ? "kv_heads" : "heads");
    a.HS = size_of("head_size");
    a.L = (int)size_of("L");
    size_t C = a.NH * a.HS, K = a.NKV * a.HS, W = C + 2 * K, N = a.B * a.T;
    char message[1024];
    AttentionList list;
    if (!attention_parse(&list, text_of("attn"), 1, message, sizeof message))
        fail(EXIT_INPUT, "%s: %s", case_name, message);
    a.normalizer = attention_at(&list, 0)->normalizer;
    a.window = attention_at(&list, 0)->window;
    for (size_t i = 0; i < N && has_key("docs"); i++)
        a.starts.push_back((float)(i % a.T - (i % a.T) % size_of("docs")));
    a.qkv.resize(N * W);
    for (size_t i = 0, at = 0; i < 3; i++) {
        size_t width = i ? K : C;
        Floats x = filled(PARTS[i], N * width, 0, i < 2 ? (float)atof(text_of("scale")) : 2.0f);
        for (size_t t = 0; t < N; t++) std::copy_n(&x[t * width], width, &a.qkv[t * W + at]);
        at += width;
    }
    a.dout = filled("dout", N * C, 0, 1);
    for (int i = 0; i < SCALAR_COUNT; i++) {
        Scalar scalar = (Scalar)i;
        size_t n = scalar_size(scalar, a.NH, (size_t)a.L);
        float mean, scale;
        if (!normalizer_has(&a.normalizer, scalar)) continue;
        fixture_weight_rule(scalar_names[i], n, &mean, &scale);
        if (normalizer_trains(&a.normalizer, scalar)) a.scalar_grads[i].resize(n);
        else {
            mean = (float)normalizer_start(&a.normalizer, scalar, a.L, a.window);
            scale = 0;
        }
        a.scalars[i] = filled(scalar_names[i], n, mean, scale);
    }
    return a;
}

// Forward and backward on the device, in X. RoPE uses zero angles, which leaves only the division by norms, as in the
// trainer. other_out: NULL, or what the backward pass reads instead of its output
template <class X>
static void attention_run(AttentionCase &a, const Floats *other_out = NULL) {
    size_t C = a.NH * a.HS, K = a.NKV * a.HS, W = C + 2 * K, N = a.B * a.T, angles = a.T * a.HS / 2;
    bool l2 = a.normalizer.qk.kind == QK_L2;
    FlashShape shape = {&a.normalizer, a.B, a.T, a.NH, a.NKV, a.HS, a.HS, a.L};
    shape.window = a.window;
    Floats dqkv(N * W);
    a.out.resize(N * C);
    X *qkv = on_device<X>(a.qkv), *grads = on_device<X>(dqkv), *out = on_device<X>(a.out), *dout = on_device<X>(a.dout);
    float *stats = on_device(Floats(flash_stats(shape, sizeof(X)))), *norms = on_device(Floats(N * (a.NH + a.NKV))),
          *counts = on_device(Floats(2));
    float *cosines = on_device(Floats(angles, 1)), *sines = on_device(Floats(angles));
    Scalars scalars = {};
    ScalarGrads scalar_grads = {};
    for (int i = 0; i < SCALAR_COUNT; i++) {
        scalars.of[i] = a.scalars[i].empty() ? NULL : on_device(a.scalars[i]);
        scalar_grads.of[i] = a.scalar_grads[i].empty() ? NULL : on_device(a.scalar_grads[i], true);
    }
    int32_t *starts = a.starts.empty() ? NULL : on_device<int32_t>(a.starts), *first = starts;
    if (a.window) {
        CUDA_CHECK(cudaMalloc(&first, N * sizeof *first));
        flash_window_starts(first, starts, a.B, a.T, a.window, stream);
    }
    void *scratch;
    CUDA_CHECK(cudaMalloc(&scratch, flash_scratch(shape, sizeof(X))));
    CUDA_CHECK(cudaDeviceSynchronize());
    Rope rope = {a.B, a.T, a.NH, a.NKV, a.HS, cosines, sines, l2};
    FlashInput<X> in = {{qkv, W, a.HS}, {qkv + C, W, a.HS}, {qkv + C + K, W, a.HS}, first, scalars};
    X *read = other_out ? on_device<X>(*other_out) : out;
    rope_forward(qkv, norms, rope, stream);
    flash_forward<X>({out, C, a.HS}, stats, (unsigned long long *)counts, in, shape, scratch, stream);
    flash_backward<X>({{grads, W, a.HS}, {grads + C, W, a.HS}, {grads + C + K, W, a.HS}, scalar_grads}, dout,
                      {read, C, a.HS}, stats, in, shape, scratch, stream);
    rope_backward(grads, qkv, norms, rope, stream);

    from_device_array(a.out, out);
    from_device_array(dqkv, grads);
    Floats *parts[] = {&a.dq, &a.dk, &a.dv};
    for (size_t i = 0, at = 0; i < 3; i++) {
        size_t width = i ? K : C;
        parts[i]->resize(N * width);
        for (size_t t = 0; t < N; t++) std::copy_n(&dqkv[t * W + at], width, &(*parts[i])[t * width]);
        at += width;
    }
    for (int i = 0; i < SCALAR_COUNT; i++) {
        if (scalar_grads.of[i]) from_device_array(a.scalar_grads[i], scalar_grads.of[i]);
        if (scalars.of[i]) CUDA_CHECK(cudaFree((void *)scalars.of[i]));
    }
    for (X *x : {qkv, dout}) CUDA_CHECK(cudaFree(x));
    if (other_out) CUDA_CHECK(cudaFree(read));
    for (float *x : {stats, norms, counts, cosines, sines}) CUDA_CHECK(cudaFree(x));
    CUDA_CHECK(cudaFree(scratch));
    CUDA_CHECK(cudaFree(first));
    if (first != starts) CUDA_CHECK(cudaFree(starts));
}

static double length(const Floats &x) {
    return distance(x.data(), Floats(x.size()).data(), x.size());
}

// Under l1 with few keys, dq and dk are differences of nearly equal numbers, one of which the kernels compute from the
// output.
static double gradient_floor(const AttentionCase &a) {
    double part = a.T < 5 ? 3e-2 : 1e-2;
    return (a.T == 1 ? 1e-1 : part) * length(a.dv);
}

static void test_attention(void) {
    int before = failed;
    AttentionCase a = attention_case();
    attention_run<float>(a);
    double floor = gradient_floor(a), worst = compare("out", a.out.data(), a.out.size(), 0, 1e-5);
    worst = largest(worst, compare("dq", a.dq.data(), a.dq.size(), floor, 1e-4));
    worst = largest(worst, compare("dk", a.dk.data(), a.dk.size(), floor, 1e-4));
    worst = largest(worst, compare("dv", a.dv.data(), a.dv.size(), floor, 1e-4));
    for (int i = 0; i < SCALAR_COUNT; i++) {
        const Floats &x = a.scalar_grads[i];
        if (!x.empty())
            worst =
                largest(worst, compare((std::string("d") + scalar_names[i]).c_str(), x.data(), x.size(), floor, 1e-4));
    }
    case_done(before, worst);
}

static double beside(const char *what, const Floats &x, const Floats &expected, double floor, double bound) {
    if (x.empty()) return 0;
    double error = distance(x.data(), expected.data(), x.size());
    if (error != 0) error /= fmax(length(expected), floor);
    check(what, error, bound);
    return error;
}

// Compares the kernels in bfloat16 with those in float32 on the same inputs, all of which are representable in
// bfloat16. A power P magnifies rounding P times. With qk=l2, rows of length 1 are rounded once more, which moves some
// scores to the other side of a phi's corner. The gradients of learned scalars are those for the same output: where
// rows have one large weight, its rounding to bfloat16 changes D = dO · O and with it these sums more than all other
// rounding does. (dev/tests/test_flash.py compares with plain PyTorch in bfloat16.)
static void test_attention_in_bf16(void) {
    static char name[256];
    int before = failed;
    AttentionCase a = attention_case();
    for (Floats *x : {&a.qkv, &a.dout})
        for (float &number : *x) number = (float)bf16(number);
    AttentionCase expected = a;
    snprintf(name, sizeof name, "%s, bfloat16", case_name);
    case_name = name;
    attention_run<float>(expected);
    attention_run<bf16>(a);
    AttentionCase same_out = expected;
    attention_run<float>(same_out, &a.out);
    double power = a.normalizer.post.kind == POST_REWEIGHT ? a.normalizer.post.value : 1,
           bound = 1e-2 * fmax(1, power / 25);
    double steep = fmax(a.normalizer.qk.kind == QK_L2 ? 1e-1 : 1e-2, 1e-2 * power / 2.5),
           floor = gradient_floor(expected);
    // D = dO · O uses an output rounded to bf16. With few keys, the differences d - D are about as small as that
    // rounding.
    if (a.normalizer.post.kind == POST_REWEIGHT && a.T < 5) steep = fmax(steep, 3e-2);
    double worst = beside("out", a.out, expected.out, 0, bound);
    worst = largest(worst, beside("dq", a.dq, expected.dq, floor, steep));
    worst = largest(worst, beside("dk", a.dk, expected.dk, floor, steep));
    worst = largest(worst, beside("dv", a.dv, expected.dv, floor, bound));
    for (int i = 0; i < SCALAR_COUNT; i++)
        worst = largest(worst, beside(scalar_names[i], a.scalar_grads[i], same_out.scalar_grads[i], floor, 3e-2));
    case_done(before, worst);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks beyond the cases

// Compares the losses and norms of ten steps, in bfloat16 or with --recompute, with those of the reference.
static void test_steps(void) {
    static char name[256];
    ModelCase c;
    Error error;
    char message[256];
    float losses[64], norms[64];
    size_t steps = size_of("steps");
    int before = failed;
    double worst = 0;
    if (!steps || strstr(case_name, "v50257")) return;
    memset(&c, 0, sizeof c);
    c.B = size_of("B");
    c.T = size_of("T");
    if (!model_parse(&c.config, text_of("model"), &error)) fail_with(&error);
    c.config.seq_len = size_of("L");
    if (!attention_parse(&c.config.attn, text_of("attn"), c.config.layers, message, sizeof message))
        fail(EXIT_INPUT, "%s: %s", case_name, message);
    read_answer("losses", losses, 64);
    read_answer("grad_norms", norms, 64);
    snprintf(name, sizeof name, "%s, %s", case_name, in_bf16 ? "bfloat16" : "recomputed");
    case_name = name;
    c.list = tensors_of(&c.config, NULL, 0);
    subject_start(&c.config, &c.list, c.B, c.T);
    fill_weights(&c);
    size_t N = c.B * c.T;
    double lr = atof(text_of("lr")), clip = atof(text_of("clip")), decay = atof(text_of("weight_decay"));
    // A power of 15 magnifies rounding 15 times.
    bool steep = normalizer_of(&c.config, 0)->post.kind == POST_REWEIGHT;
    double loss_bound = in_bf16 ? 1e-2 : 1e-5;
    if (in_bf16 && steps > 4) steps = 4;    // after that, rounding has made it a different run
    for (size_t s = 0; s < steps; s++) {
        int32_t *batch = take_batch(&c, s);
        double loss = subject_step(batch, batch + N, c.B, c.T, 1.0f / (float)N, true) / (double)N,
               size = subject_norm();
        worst = largest(worst, relative(loss, losses[s]));
        check("a training loss", relative(loss, losses[s]), loss_bound);
        check("a gradient norm", relative(size, norms[s]), in_bf16 ? (s || steep ? 0.3 : 8e-2) : 1e-4);
        subject_update(clip, {lr * fmin(1.0, (double)(s + 1) / 2), 0.9, 0.95, 1e-8, decay, (int64_t)s + 1});
        free(batch);
    }
    case_done(before, worst);
    subject_end();
    tensors_free(&c.list);
}

int main(int argc, char **argv) {
    static const CaseKind KINDS[] = {{"model", test_model}, {"attention", test_attention}},
                          STEPS[] = {{"model", test_steps}};
    static const CaseKind IN_BF16[] = {{"model", test_steps}, {"attention", test_attention_in_bf16}};
    const char *word = argc > 1 ? argv[1] : "";
    program_name = "test_gpt2cu";
    device_start();
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    run_cases(KINDS, 2, word, true);
    recompute = true;
    run_cases(STEPS, 1, word, true);
    recompute = false;
    in_bf16 = true;
    run_cases(IN_BF16, 2, word, true);
    return cases_end();
}

// Every number of the CUDA trainer against the float64 reference, in float32: whole models (each layer, ten steps of AdamW) and attention,
// with the cases and bounds of test_gpt2.c; and in bfloat16 the models' losses. The other kernels alone: dev/tests/test_kernels.cu.
// On a GPU, or on a CPU as test_gpt2cu_on_cpu. The exit status is the verdict.
//
//   ./test_gpt2cu [WORD]     only the cases whose name has WORD in it
#define WITHOUT_MAIN
#define UPDATE_BOUND 5e-3           // where AdamW divides a gradient that is rounding by its own size
#include "train_gpt2.cu"

#include "dev/reference/cases.h"

// ---------------------------------------------------------------------------------------------------------------------------
// The trainer under test

static float *host_params, *host_grads;

static void subject_start(const ModelConfig *config, const TensorList *list, size_t B, size_t T) {
    bool in_bf16 = model.in_bf16, recompute = model.recompute;
    model = Model();
    model.config = *config, model.list = *list, model.in_bf16 = in_bf16, model.recompute = recompute;
    IntList lengths = {{(int64_t)T}, 1};
    plan_model(&model, NULL, 0, &lengths, B, T);
    take_model(&model);
    upload_segments(&model);
    host_params = floats(list->floats);
    host_grads = floats(list->floats);
}

static void subject_set(const float *params) {
    CUDA_CHECK(cudaMemcpy(model.params, params, model.list.floats * sizeof(float), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());
    if (model.in_bf16) parameters_round(model.params_bf16, model.params, model.list.floats, false, 0, 0, stream);
}

static double from_device(const double *there) {
    double value;
    CUDA_CHECK(cudaMemcpyAsync(&value, there, sizeof value, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return value;
}

// The batch as the trainer has it on the device; the copies are done when this returns.
static BatchTokens subject_batch(const int32_t *inputs, const int32_t *targets, size_t N) {
    int32_t *ints = (int32_t *)malloc(batch_ints(N) * sizeof *ints), *starts = (int32_t *)malloc(((size_t)model.config.vocab + 1) * sizeof *starts);
    BatchTokens there = {model.batch, model.batch + N, model.batch + 2 * N, (const EmbeddingPiece *)(model.batch + 3 * N), {0, 0}, NULL};
    memcpy(ints, inputs, N * sizeof *ints);
    memcpy(ints + N, targets, N * sizeof *ints);
    there.plan = embedding_plan(ints + 2 * N, (EmbeddingPiece *)(ints + 3 * N), inputs, N, starts, (size_t)model.config.vocab);
    CUDA_CHECK(cudaMemcpy(model.batch, ints, (3 * N + 4 * (there.plan.pieces + there.plan.sums)) * sizeof *ints, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());
    free(ints), free(starts);
    return there;
}

static double subject_step(const int32_t *inputs, const int32_t *targets, size_t B, size_t T, float scale, bool first) {
    BatchTokens there = subject_batch(inputs, targets, B * T);
    double before = first ? 0 : from_device(model.sums + SUM_STEP);
    by_type([&](auto *a) { model_step(&model, a, there, B, T, scale, first, true); });
    return from_device(model.sums + SUM_STEP) - before;
}

static double subject_norm(void) {
    gradient_squares(model.sums + SUM_SQUARES, model.sums + SUM_PARTIALS, model.grads, model.segments, model.segment_count, model.segment_blocks,
                     stream);
    return sqrt(from_device(model.sums + SUM_SQUARES));
}

static void subject_update(AdamW a) {
    adamw(model.params, model.in_bf16 ? model.params_bf16 : NULL, model.mean, model.square, model.grads, model.segments, model.segment_count,
          model.segment_blocks, a, false, 0, stream);
}

static const float *to_host(float *host, const float *there) {
    CUDA_CHECK(cudaMemcpyAsync(host, there, model.list.floats * sizeof *host, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return host;
}

static const float *subject_params(void) {
    return to_host(host_params, model.params);
}

static const float *subject_grads(void) {
    return to_host(host_grads, model.grads);
}

static void subject_logits(float *logits, const int32_t *inputs, size_t B, size_t T) {
    size_t N = B * T, C = (size_t)model.config.channels, V = (size_t)model.config.vocab, VP = padded_vocab(&model.config);
    float *padded = floats(N * VP);
    subject_batch(inputs, inputs, N);
    model_forward(&model, &activations<float>, model.batch, B, T, 1);
    matmul_forward(activations<float>.logits, activations<float>.h, weight<float>(&model, model.list.head), (const float *)NULL, N, C, VP, stream);
    CUDA_CHECK(cudaMemcpyAsync(padded, activations<float>.logits, N * VP * sizeof(float), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (size_t n = 0; n < N; n++) memcpy(logits + n * V, padded + n * VP, V * sizeof(float));
    free(padded);
}

static void subject_end(void) {
    matmul_end();
    for (size_t i = 0; i < model.plan.count; i++) CUDA_CHECK(cudaFree(*model.plan.rows[i].where));
    free(host_params), free(host_grads);
}

// ---------------------------------------------------------------------------------------------------------------------------
// Attention alone, with q, k and v in one array as the projection leaves them

static float *on_device(const float *host, size_t n) {
    float *there;
    CUDA_CHECK(cudaMalloc((void **)&there, n * sizeof(float)));
    if (host) CUDA_CHECK(cudaMemcpy(there, host, n * sizeof(float), cudaMemcpyHostToDevice));
    else CUDA_CHECK(cudaMemset(there, 0, n * sizeof(float)));
    return there;
}

static void from_device_array(float *host, float *there, size_t n) {
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemcpy(host, there, n * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(there));
}

// One learnt scalar: its values by the fixtures' rule, and room for its gradient.
struct TestScalar {
    float *values, *grads;
    size_t n;
};

static TestScalar test_scalar(const Normalizer *normalizer, Scalar scalar, const char *name, size_t n, int L) {
    float *host = floats(n), mean, scale;
    fixture_weight_rule(name, n, &mean, &scale);
    if (!normalizer_trains(normalizer, scalar)) mean = (float)normalizer_start(normalizer, scalar, L), scale = 0.0f;
    fixture_fill(host, n, name, 0, mean, scale);
    TestScalar x = {normalizer_has(normalizer, scalar) ? on_device(host, n) : NULL,
                    normalizer_trains(normalizer, scalar) ? on_device(NULL, n) : NULL, n};
    free(host);
    return x;
}

static double compare_scalar(const char *name, TestScalar x, double floor) {
    double error = 0;
    if (x.grads) {
        float *host = floats(x.n);
        from_device_array(host, x.grads, x.n);
        error = compare(name, host, x.n, floor, 1e-4);
        free(host);
    }
    if (x.values) CUDA_CHECK(cudaFree(x.values));
    return error;
}

static void test_attention(void) {
    size_t B = size_of("B"), T = size_of("T"), NH = size_of("heads"), HS = size_of("head_size"), C = NH * HS, N = B * T, n = N * C;
    int L = (int)size_of("L"), before = failed;
    char message[1024];
    Normalizer normalizer;
    if (!normalizer_parse(&normalizer, text_of("attn"), message, sizeof message)) fail(EXIT_INPUT, "%s: %s", case_name, message);
    FlashShape shape = {&normalizer, B, T, NH, HS, HS, L, 3 * C, 3 * C, 3 * C, C};
    float *qkv = floats(3 * n), *dout = floats(n), *ones = floats(T * HS / 2), *d[3];
    for (size_t i = 0; i < 3; i++) {
        float *x = floats(n);
        d[i] = floats(n);
        fixture_fill(x, n, i == 0 ? "q" : i == 1 ? "k" : "v", 0, 0.0f, i < 2 ? (float)atof(text_of("scale")) : 2.0f);
        for (size_t t = 0; t < N; t++) memcpy(qkv + (3 * t + i) * C, x + t * C, C * sizeof *x);
        free(x);
    }
    fixture_fill(dout, n, "dout", 0, 0.0f, 1.0f);
    for (size_t i = 0; i < T * HS / 2; i++) ones[i] = 1;
    TestScalar s = test_scalar(&normalizer, SCALAR_S, "attn_scale", NH, L), b = test_scalar(&normalizer, SCALAR_B, "attn_bias", NH, L);
    TestScalar p = test_scalar(&normalizer, SCALAR_P, "attn_pn", (size_t)L, L), sink = test_scalar(&normalizer, SCALAR_SINK, "attn_sink", NH, L);

    // RoPE by no angle: what is left of it is the division by norms, as the trainer has it.
    bool l2 = normalizer.qk.kind == QK_L2;
    float *there = on_device(qkv, 3 * n), *dqkv = on_device(NULL, 3 * n), *out = on_device(NULL, n), *dout_there = on_device(dout, n);
    float *stats = on_device(NULL, flash_stats(shape, sizeof(float))), *norms = on_device(NULL, 2 * N * NH), *cosines = on_device(ones, T * HS / 2);
    float *sines = on_device(NULL, T * HS / 2), *counts = on_device(NULL, 2);
    void *scratch;
    CUDA_CHECK(cudaMalloc(&scratch, flash_scratch(shape)));
    CUDA_CHECK(cudaDeviceSynchronize());
    rope_forward(there, norms, cosines, sines, l2, B, T, NH, HS, stream);
    flash_forward(out, stats, (unsigned long long *)counts, there, there + C, there + 2 * C, {s.values, b.values, p.values, sink.values}, shape,
                  scratch, stream);
    flash_backward(dqkv, dqkv + C, dqkv + 2 * C, {s.grads, b.grads, p.grads, sink.grads}, dout_there, out, stats, there, there + C, there + 2 * C,
                   {s.values, b.values, p.values, sink.values}, shape, scratch, stream);
    rope_backward(dqkv, there, norms, cosines, sines, l2, B, T, NH, HS, stream);

    from_device_array(dout, out, n);
    from_device_array(qkv, dqkv, 3 * n);
    for (size_t t = 0; t < N; t++)
        for (size_t i = 0; i < 3; i++) memcpy(d[i] + t * C, qkv + (3 * t + i) * C, C * sizeof(float));
    double norm = 0, worst = compare("out", dout, n, 0, 1e-5);
    for (size_t i = 0; i < n; i++) norm += (double)d[2][i] * d[2][i];
    // Under l1 with few keys, dq and dk are differences of nearly equal numbers, of which the kernels make one from the output.
    double floor = (T == 1 ? 1e-1 : T < 5 ? 3e-2 : 1e-2) * sqrt(norm);
    for (size_t i = 0; i < 3; i++) worst = largest(worst, compare(i == 0 ? "dq" : i == 1 ? "dk" : "dv", d[i], n, floor, 1e-4));
    worst = largest(worst, compare_scalar("dattn_scale", s, floor));
    worst = largest(worst, compare_scalar("dattn_bias", b, floor));
    worst = largest(worst, compare_scalar("dattn_pn", p, floor));
    worst = largest(worst, compare_scalar("dattn_sink", sink, floor));
    case_done(before, worst);
    for (float *x : {there, dout_there, stats, norms, cosines, sines, counts}) CUDA_CHECK(cudaFree(x));
    CUDA_CHECK(cudaFree(scratch));
    for (float *x : {qkv, dout, ones, d[0], d[1], d[2]}) free(x);
}

// ---------------------------------------------------------------------------------------------------------------------------
// Beyond the cases

// The losses and norms of ten steps in bfloat16, or under --recompute, against those of the reference.
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
    c.B = size_of("B"), c.T = size_of("T");
    if (!model_parse(&c.config, text_of("model"), &error)) fail_with(&error);
    c.config.seq_len = (int)size_of("L");
    if (!normalizer_parse(&c.config.attn, text_of("attn"), message, sizeof message)) fail(EXIT_INPUT, "%s: %s", case_name, message);
    read_answer("losses", losses, 64);
    read_answer("grad_norms", norms, 64);
    snprintf(name, sizeof name, "%s, %s", case_name, model.in_bf16 ? "bfloat16" : "recomputed");
    case_name = name;
    c.list = tensors_of(&c.config, NULL, 0);
    subject_start(&c.config, &c.list, c.B, c.T);
    fill_weights(&c);
    size_t N = c.B * c.T;
    double lr = atof(text_of("lr")), clip = atof(text_of("clip")), decay = atof(text_of("weight_decay"));
    bool steep = c.config.attn.post.kind == POST_REWEIGHT;       // a power of 15 magnifies rounding as much
    double loss_bound = model.in_bf16 ? 1e-2 : 1e-5;
    if (model.in_bf16 && steps > 4) steps = 4;                   // further on, rounding has made another run of it
    for (size_t s = 0; s < steps; s++) {
        int32_t *batch = take_batch(&c, s);
        double loss = subject_step(batch, batch + N, c.B, c.T, 1.0f / (float)N, true) / (double)N, size = subject_norm();
        worst = largest(worst, relative(loss, losses[s]));
        check("a training loss", relative(loss, losses[s]), loss_bound);
        check("a gradient norm", relative(size, norms[s]), model.in_bf16 ? (s || steep ? 0.3 : 8e-2) : 1e-4);
        subject_update({lr * fmin(1.0, (double)(s + 1) / 2), 0.9, 0.95, 1e-8, decay, fmin(1.0, clip / (size + 1e-6)), (int64_t)s + 1});
        free(batch);
    }
    case_done(before, worst);
    subject_end();
    tensors_free(&c.list);
}

int main(int argc, char **argv) {
    static const CaseKind KINDS[] = {{"model", test_model}, {"attention", test_attention}}, STEPS[] = {{"model", test_steps}};
    const char *word = argc > 1 ? argv[1] : "";
    program_name = "test_gpt2cu";
    device_start();
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    run_cases(KINDS, 2, word, true);
    model.recompute = true;
    run_cases(STEPS, 1, word, true);
    model.recompute = false, model.in_bf16 = true;
    run_cases(STEPS, 1, word, true);
    return cases_end();
}

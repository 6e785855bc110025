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
// Some differences are computed from the output.
#define ATTENTION_FLOOR(T) ((T) == 1 ? 1e-1 : (T) < 5 ? 3e-2 : 1e-2)

#include "dev/reference/cases.h"
#include "dev/tests/flash_so.cu"

#include <algorithm>
#include <vector>

// ---------------------------------------------------------------------------------------------------------------------
// The trainer under test

static cudaStream_t stream;
static bool in_bf16;    // what main() wants of the subject
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
    int32_t *ints = (int32_t *)take(batch_ints(N) * sizeof *ints),
            *starts = (int32_t *)take((subject->config->vocab + 1) * sizeof *starts);
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
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention by itself

template <class X>
static void attention_in(AttentionCase *c) {
    size_t HS = c->HS, C = c->NH * HS, K = c->NKV * HS;
    std::vector<X> x[3], d[3], dout(c->dout, c->dout + c->sizes[0]), out(c->sizes[0]);
    for (int i = 0; i < 3; i++) {
        x[i].assign(c->x[i], c->x[i] + c->sizes[i]);
        d[i].resize(c->sizes[i]);
    }
    FlashTestShape shape = {c->B, c->T, c->NH, c->NKV,   HS,    HS, c->L, C,
                            K,    K,    C,     c->first, false, {}, 0,    c->layer.window};
    FlashTestArrays arrays = {x[0].data(), x[1].data(), x[2].data(), dout.data(), c->scalars, out.data(),
                              d[0].data(), d[1].data(), d[2].data(), NULL,        c->grads,   0};
    run<X>(&c->layer.normalizer, shape, &arrays);
    std::copy(out.begin(), out.end(), c->out);
    for (int i = 0; i < 3; i++) std::copy(d[i].begin(), d[i].end(), c->d[i]);
}

static void subject_attention(AttentionCase *c) {
    if (in_bf16) attention_in<bf16>(c);
    else attention_in<float>(c);
}

static void beside(const char *what, const float *x, const float *expected, size_t n, double floor, double bound) {
    double error = distance(x, expected, n);
    if (error != 0) error /= fmax(distance(expected, std::vector<float>(n).data(), n), floor);
    check(what, error, bound);
}

static void round_to_bf16(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = (float)bf16(x[i]);
}

// Compares the kernels in bfloat16 with those in float32 on the same inputs, all of which are representable in
// bfloat16. A power P magnifies rounding P times. dev/tests/test_flash.py compares with plain PyTorch in bfloat16, also
// the gradients of learned scalars.
static void test_attention_in_bf16(void) {
    static const char *const GRADIENTS[] = {"dq", "dk", "dv"};
    AttentionCase c = attention_case(), expected = attention_case();
    for (AttentionCase *one : {&c, &expected}) {
        for (int i = 0; i < 3; i++) round_to_bf16(one->x[i], one->sizes[i]);
        round_to_bf16(one->dout, one->sizes[0]);
    }
    in_bf16 = false;
    attention_pass(&expected);
    in_bf16 = true;
    attention_pass(&c);
    Stage post = c.layer.normalizer.post;
    double power = post.kind == POST_REWEIGHT ? post.value : 1, bound = 1e-2 * fmax(1, power / 25);
    double steep = fmax(1e-2, 1e-2 * power / 2.5), floor = attention_floor(&expected);
    // D = dO · O uses an output rounded to bf16. With few keys, the differences d - D are about as small as that
    // rounding.
    if (post.kind == POST_REWEIGHT && c.T < 5) steep = fmax(steep, 3e-2);
    beside("out", c.out, expected.out, c.sizes[0], 0, bound);
    for (int i = 0; i < 3; i++) beside(GRADIENTS[i], c.d[i], expected.d[i], c.sizes[i], floor, i < 2 ? steep : bound);
    case_done();
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks beyond the cases

// Compares the losses and norms of four steps in bfloat16 with those of the reference. After that, rounding has made it
// a different run.
static void test_steps_in_bf16(void) {
    size_t steps = std::min<size_t>(size_of("steps"), 4);
    if (!steps || strstr(case_name, "v50257")) return;
    ModelCase c = model_start();
    // A power of 15 magnifies rounding 15 times.
    bool steep = normalizer_of(&c.config, 0)->post.kind == POST_REWEIGHT;
    const double bounds[] = {1e-2, steep ? 0.3 : 8e-2, 0.3};
    check_steps(&c, steps, bounds);
    model_end(&c);
    case_done();
}

int main(int argc, char **argv) {
    static const CaseKind KINDS[] = {{"model", test_model}, {"attention", test_attention}},
                          IN_BF16[] = {{"model", test_steps_in_bf16}, {"attention", test_attention_in_bf16}};
    const char *word = argc > 1 ? argv[1] : "";
    program_name = "test_gpt2cu";
    device_start();
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    run_cases(KINDS, 2, word, true);
    in_bf16 = true;
    case_mode = ", bfloat16";
    run_cases(IN_BF16, 2, word, true);
    return check_verdict();
}

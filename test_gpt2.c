// Compares every number of the CPU trainer with the float64 reference (dev/reference/README.md describes the cases and
// how they are stored). The exit status is the verdict. dev/tests/test_gradients.c checks the same code, in double,
// against finite differences.
//
//   ./test_gpt2 [WORD]     only the cases whose names contain WORD
#define WITHOUT_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"
#include "train_gpt2.c"

#include "dev/reference/cases.h"
#include "model/decode.h"

// ---------------------------------------------------------------------------------------------------------------------
// The trainer under test

static Model subject;

static void subject_start(const ModelConfig *config, const TensorList *list, size_t B, size_t T) {
    subject = (Model){.config = *config, .list = *list};
    gemm_start(&subject.mm, false);
    plan_parameters(&subject, true, false);
    plan_activations(&subject, subject.config.layers, B, T);
    memory_take(&subject.plan);
    model_ready(&subject);
}

static void subject_set(const float *params) {
    memcpy(subject.params, params, FLOATS(subject.list.floats));
}

static double subject_step(const int32_t *inputs, const int32_t *targets, size_t B, size_t T, float scale, bool first) {
    return model_step(&subject, inputs, targets, NULL, B, T, scale, first);
}

static double subject_norm(void) {
    return gradient_norm(&subject);
}

static void subject_update(double clip, AdamW adamw) {
    model_update(&subject, clip_scale(subject_norm(), clip), adamw);
}

static const float *subject_params(void) {
    return subject.params;
}

static const float *subject_grads(void) {
    return subject.grads;
}

static void subject_logits(float *logits, const int32_t *inputs, size_t B, size_t T) {
    size_t C = subject.config.channels, V = subject.config.vocab;
    model_forward(&subject, inputs, B, T);
    matmul_forward(logits, subject.activations.h, weight(&subject, subject.list.head), B * T, C, V, false);
}

static void subject_end(void) {
    memory_release(&subject.plan);
    gemm_end(&subject.mm);
}

// ---------------------------------------------------------------------------------------------------------------------
// Each layer by itself

static void test_rmsnorm(void) {
    size_t N = size_of("N"), C = size_of("C");
    float eps = has_key("eps") ? (float)atof(text_of("eps")) : 1e-5f;
    float *x = input("x", N * C, 2), *w = floats(C), *dout = input("dout", N * C, 1);
    float *out = floats(N * C), *dx = floats(N * C), *dw = floats(C), *r = floats(N);
    fixture_fill(w, C, "weight", 0, 1.0f, 0.3f);
    rmsnorm_forward(in_f32(out), x, w, N, C, eps);
    rmsnorm_backward(dx, dw, dout, x, w, r, N, C, eps);
    compare("out", out, N * C, 0, 1e-5);
    compare("dx", dx, N * C, 0, 1e-5);
    compare("dweight", dw, C, 0, 1e-5);
    case_done();
}

// The trainer's rope rotates q and k in place in the joint projection. x serves as q, k and v; q and k must come out
// equal.
static void test_rope(void) {
    size_t B = size_of("B"), T = size_of("T"), NH = size_of("heads"), HS = size_of("head_size"), C = NH * HS,
           row = (NH + 2 * NH) * HS, N = B * T;
    float *x = input("x", N * C, 1), *dout = input("dout", N * C, 1), *qkv = floats(N * row), *dqkv = floats(N * row);
    Rope rope = {B, T, NH, NH, HS, floats(T * HS / 2), floats(T * HS / 2), false};
    rope_table((float *)rope.cosines, (float *)rope.sines, T, (RopeAngles){.theta = 10000, .HS = HS});
    for (size_t i = 0; i < 3 * N; i++) {
        memcpy(qkv + i * C, x + (i / 3) * C, FLOATS(C));
        memcpy(dqkv + i * C, dout + (i / 3) * C, FLOATS(C));
    }
    rope_forward(qkv, NULL, rope);
    rope_backward(dqkv, qkv, NULL, rope);
    float *part = floats(N * C);
    for (size_t which = 0; which < 6; which++) {
        const float *from = (which < 3 ? qkv : dqkv) + (which % 3) * C;
        for (size_t n = 0; n < N; n++) memcpy(part + n * C, from + n * row, FLOATS(C));
        if (which % 3 < 2) compare(which < 3 ? "out" : "dx", part, N * C, 0, 1e-6);
        else check("v is not rotated", memcmp(part, which < 3 ? x : dout, FLOATS(N * C)) ? 1 : 0, 0);
    }
    case_done();
}

static void test_swiglu(void) {
    size_t F = size_of("N");
    float *gate_up = floats(2 * F), *dout = input("dout", F, 1), *out = floats(F), *dgate_up = floats(2 * F);
    fixture_fill(gate_up, F, "gate", 0, 0.0f, 4.0f);
    fixture_fill(gate_up + F, F, "up", 0, 0.0f, 2.0f);
    swiglu_forward(in_f32(out), gate_up, 1, F);
    swiglu_backward(in_f32(dgate_up), dout, gate_up, 1, F);
    compare("out", out, F, 0, 1e-6);
    compare("dgate", dgate_up, F, 0, 1e-6);
    compare("dup", dgate_up + F, F, 0, 1e-6);
    case_done();
}

static void test_matmul(void) {
    size_t N = size_of("N"), C = size_of("C"), OC = size_of("OC");
    float *x = input("x", N * C, 1), *w = input("weight", OC * C, (float)(2 / sqrt((double)C))),
          *dout = input("dout", N * OC, 1);
    float *out = floats(N * OC), *dx = floats(N * C), *dw = floats(OC * C);
    const Gemm mm = {0};
    const WeightMatrix weights = {.f32 = w, .mm = &mm};
    matmul_forward(out, in_f32(x), weights, N, C, OC, false);
    matmul_backward(dx, dw, in_f32(dout), in_f32(x), weights, N, C, OC, false);
    compare("out", out, N * OC, 0, 1e-6);
    compare("dx", dx, N * C, 0, 1e-6);
    compare("dweight", dw, OC * C, 0, 1e-6);
    // Adding to the output gives twice the result.
    matmul_forward(out, in_f32(x), weights, N, C, OC, true);
    matmul_backward(dx, dw, in_f32(dout), in_f32(x), weights, N, C, OC, true);
    for (size_t i = 0; i < N * OC; i++) out[i] /= 2;
    for (size_t i = 0; i < OC * C; i++) dw[i] /= 2;
    compare("out", out, N * OC, 0, 1e-6);
    compare("dweight", dw, OC * C, 0, 1e-6);
    case_done();
}

static void test_embedding(void) {
    size_t N = size_of("N"), C = size_of("C"), V = size_of("vocab");
    int32_t *tokens = take(N * sizeof *tokens);
    float *w = input("weight", V * C, (float)(2 / sqrt((double)C))), *dout = input("dout", N * C, 1);
    float *out = floats(N * C), *dw = floats(V * C);
    for (size_t n = 0; n < N; n++) tokens[n] = fixture_token(n, (int)V);
    embedding_forward(out, w, tokens, N, C);
    embedding_backward(dw, dout, tokens, N, C);
    compare("out", out, N * C, 0, 1e-7);
    compare("dweight", dw, V * C, 0, 1e-6);
    case_done();
}

static void test_crossentropy(void) {
    size_t N = size_of("N"), V = size_of("vocab");
    CrossEntropy ce = {V, V, .softcap = (float)atof(text_of("softcap")), .z_loss = (float)atof(text_of("z_loss"))};
    int32_t *targets = take(N * sizeof *targets);
    uint8_t *mask = take(N);
    float *logits = input("logits", N * V, (float)atof(text_of("scale"))), *kept = floats(N * V), *losses = floats(N),
          expected;
    memcpy(kept, logits, FLOATS(N * V));
    for (size_t n = 0; n < N; n++) targets[n] = fixture_token(n, (int)V);
    read_answer("loss", &expected, 1);
    for (int training = 0; training < 2; training++) {
        double loss = 0;
        ce.scale = training ? 1.0f / (float)N : 0.0f;
        memcpy(logits, kept, FLOATS(N * V));
        crossentropy(losses, logits, targets, NULL, N, ce);
        for (size_t n = 0; n < N; n++) loss += losses[n] / (double)N;
        check("loss", relative(loss, expected), 5e-6);
    }
    compare("dlogits", logits, N * V, 0, 1e-5);
    // Rows that the mask excludes have no loss and no gradient; the others are unchanged.
    mask[0] = 1;
    float first = losses[0];
    crossentropy(losses, kept, targets, mask, N, ce);
    double others = 0;
    for (size_t n = 1; n < N; n++) {
        others += fabsf(losses[n]);
        for (size_t v = 0; v < V; v++) others += fabsf(kept[n * V + v]);
    }
    check("masked rows", others, 0);
    check("the unmasked row", fabs((double)losses[0] - first) + (memcmp(kept, logits, FLOATS(V)) ? 1 : 0), 0);
    case_done();
}

// One query at a time, as in generation, gives the same rows; except with -logT, T and T2, where T is the length so
// far.
static void check_row_by_row(const float *out, AttentionInput in, Scalars scalars, AttentionShape shape) {
    const Normalizer *n = shape.normalizer;
    if (n->offset.kind == OFFSET_LOG_T || n->norm.kind == NORM_T || n->norm.kind == NORM_T2) return;
    size_t HS = shape.HS, NH = shape.NH, T = shape.T, K = shape.NKV * HS;
    float *row = floats(HS), *scores = floats(T);
    double difference = 0, size = 0;
    for (size_t i = 0; i < shape.B * NH * T; i++) {
        size_t h = i % NH, t = (i / NH) % T, b = i / (NH * T), start = b * T * K + (h / (NH / shape.NKV)) * HS;
        size_t first = in.first ? (size_t)in.first[b * T + t] : 0;
        start += first * K;
        shape.T = t + 1;
        attention_row(row, in.q.p + i * HS, (ConstView){in.k.p + start, K, HS}, (ConstView){in.v.p + start, K, HS},
                      t + 1 - first, h, scalars, shape, scores);
        for (size_t c = 0; c < HS; c++) {
            double o = out[i * HS + c];
            difference += (row[c] - o) * (row[c] - o);
            size += o * o;
        }
    }
    check("row by row", size > 0 ? sqrt(difference / size) : difference, 1e-5);
}

static void subject_attention(AttentionCase *c) {
    size_t HS = c->HS, C = c->NH * HS, K = c->NKV * HS;
    AttentionShape shape = {&c->layer.normalizer, c->B, c->T, c->NH, c->NKV, HS, HS, c->L, .window = c->layer.window};
    float *stats = floats(c->B * c->NH * c->T * ROW_STATS),
          *scratch = floats(attention_scratch(shape, omp_get_max_threads()));
    int32_t *first = c->layer.window ? take(c->B * c->T * sizeof *first) : c->first;
    if (c->layer.window) attention_window_starts(first, c->first, c->B, c->T, c->layer.window);
    AttentionInput in = {.q = {c->x[0], C, HS}, .k = {c->x[1], K, HS}, .v = {c->x[2], K, HS}, .first = first};
    AttentionInputGrads grads = {{c->d[0], C, HS}, {c->d[1], K, HS}, {c->d[2], K, HS}};
    attention_forward(c->out, stats, in, c->scalars, shape, scratch);
    attention_backward(grads, c->grads, c->dout, c->out, stats, in, c->scalars, shape, scratch);
    check_row_by_row(c->out, in, c->scalars, shape);
}

static void test_adamw(void) {
    size_t N = size_of("N"), steps = size_of("steps");
    float *param = input("param", N, 1), *mean = floats(N), *square = floats(N), *grad = floats(N);
    double decay = atof(text_of("weight_decay"));
    for (size_t s = 0; s < steps; s++) {
        fixture_fill(grad, N, "grad", s * N, 0.0f, 1.0f);
        adamw(param, mean, square, NULL, grad, N, 1.0f,
              (AdamW){atof(text_of("lr")), 0.9, 0.95, 1e-8, decay, (int64_t)s + 1});
    }
    compare("param", param, N, 0, 1e-6);
    compare("exp_avg", mean, N, 0, 1e-6);
    compare("exp_avg_sq", square, N, 0, 1e-6);
    case_done();
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks that need no reference

static double entry(Matrix x, size_t row, size_t column) {
    size_t at = x.transposed ? column * x.ld + row : row * x.ld + column;
    return x.bf16 ? bf16_to_float(x.bf16[at]) : x.f32[at];
}

typedef struct {
    size_t M, N, K;
    size_t row_step, column_step;    // one of so many rows and columns is compared
} MatmulSizes;

// The relative error of C (M,N), which should be times A·B + start, by norm.
static double matmul_error(const float *c, MatmulSizes z, Matrix A, Matrix B, double times, double start) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < z.M; i += z.row_step) {
        for (size_t j = i % z.column_step; j < z.N; j += z.column_step) {
            double sum = start;
            for (size_t p = 0; p < z.K; p++) sum += times * entry(A, i, p) * entry(B, p, j);
            difference += (c[i * z.N + j] - sum) * (c[i * z.N + j] - sum);
            norm += sum * sum;
        }
    }
    return sqrt(difference / norm);
}

// The error of one matmul, compared with plain loops over the rounded inputs; infinity if there is no such primitive.
// The bits of kind: A is transposed, B is transposed, C is added to, A is stored in bfloat16. `primitive`: by a
// primitive of oneDNN, and all in float32.
static double bf16_matmul_error(const Gemm *mm, size_t M, size_t N, size_t K, int kind, bool primitive) {
    bool ta = kind & 1, tb = kind & 2, add = kind & 4, done = true;
    float *a = input("a", M * K, 1), *b = input("b", K * N, 1), *c = floats(M * N);
    uint16_t *rounded_a = take(M * K * sizeof *rounded_a), *rounded_b = take(K * N * sizeof *rounded_b);
    for (size_t i = 0; i < M * K; i++) rounded_a[i] = bf16_from_float(a[i]);
    for (size_t i = 0; i < K * N; i++) rounded_b[i] = bf16_from_float(b[i]);
    for (size_t i = 0; i < M * N; i++) c[i] = add ? 1.0f : NAN;
    Matrix A = {.f32 = a, .ld = ta ? M : K, .transposed = ta}, B = {.f32 = b, .ld = tb ? K : N, .transposed = tb};
    if (primitive) {
        done = gemm_by_primitive(mm, M, N, K, A, B, add, c, N);
    } else {
        A.bf16 = kind & 8 ? rounded_a : NULL;
        B.bf16 = rounded_b;
        gemm_run(mm, M, N, K, A, B, add, c, N);
        A.bf16 = rounded_a;
    }
    double error = done ? matmul_error(c, (MatmulSizes){M, N, K, 1, 1}, A, B, 1, add) : INFINITY;
    return error;
}

// Matmuls of bfloat16 inputs. Also runs oneDNN's primitives in float32, which tests that code on processors without
// bfloat16. An odd depth, and sizes that are whole blocks of 32, take paths of their own.
static void test_bf16_matmuls(Tiles tiles) {
    static const size_t SIZES[][3] = {{37, 65, 129}, {37, 65, 96}, {64, 65, 130}, {64, 65, 96}};
    char name[64];
    Gemm mm;
    gemm_start(&mm, true);
    mm.tiles = tiles;
    const char *how = mm.native ? "native" : "widened";
    if (tiles) how = tiles_name(tiles);
    snprintf(name, sizeof name, "bfloat16 matmuls, %s", how);
    case_name = name;
    void *memory = take(gemm_scratch(&mm, 64 * 130, 65 * 130));
    gemm_use(&mm, memory, 64 * 130);
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        size_t M = SIZES[i][0], N = SIZES[i][1], K = SIZES[i][2];
        for (int kind = 0; kind < 16; kind++) {
            double error = bf16_matmul_error(&mm, M, N, K, kind, false);
            check("a matmul", error, 1e-6);
        }
#ifdef USE_ONEDNN
        for (int kind = 0; kind < 8; kind++) {
            double error = bf16_matmul_error(&mm, M, N, K, kind, true);
            check("a primitive in float32", error, 1e-6);
        }
#endif
    }
    gemm_end(&mm);
    case_done();
}

static double not_rounded(const uint16_t *rounded, const float *x, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += rounded[i] != bf16_from_float(x[i]);
    return (double)count;
}

// With --dtype bf16, layers whose output only matmuls read give the same numbers, rounded.
static void test_bf16_outputs(void) {
    enum { N = 3, F = 300, E = 2 * F };
    case_name = "outputs in bfloat16";
    float *x = input("x", N * E, 2), *y = input("y", N * F, 1), *w = input("w", F, 1), *out = floats(N * E);
    uint16_t *rounded = take(N * E * sizeof *rounded);
    MatmulInput bf16 = {.bf16 = rounded};
    rmsnorm_forward(in_f32(out), x, w, N, F, 1e-5f);
    rmsnorm_forward(bf16, x, w, N, F, 1e-5f);
    check("rmsnorm", not_rounded(rounded, out, N * F), 0);
    swiglu_forward(in_f32(out), x, N, F);
    swiglu_forward(bf16, x, N, F);
    check("swiglu", not_rounded(rounded, out, N * F), 0);
    swiglu_backward(in_f32(out), y, x, N, F);
    swiglu_backward(bf16, y, x, N, F);
    check("swiglu's gradient", not_rounded(rounded, out, N * E), 0);
    gau_gate_forward(in_f32(out), x, y, N, F, E);
    gau_gate_forward(bf16, x, y, N, F, E);
    check("the gate", not_rounded(rounded, out, N * F), 0);
    case_done();
}

// decode_matmul() against plain loops, with rows that do not fill its vectors. A row's numbers are the same to the last
// bit alone and among others, and in bfloat16 as in float32.
static void test_decoding_matmuls(void) {
    enum { N = FEW_ROWS, OC = 5, MOST = 107 };
    case_name = "matmuls of decoding";
    float *x = input("x", N * MOST, 1), *w = input("w", OC * MOST, 1), *out = floats(N * OC), *alone = floats(OC);
    uint16_t rounded[OC * MOST];
    for (size_t i = 0; i < OC * MOST; i++) w[i] = bf16_to_float(rounded[i] = bf16_from_float(w[i]));
    for (size_t C = 1; C <= MOST; C += C < 3 ? 1 : 13) {
        for (size_t n = 1; n <= N; n++) {
            for (int kind = 0; kind < 4; kind++) {
                bool add = kind & 1, differs = false;
                Model m = {.params = w, .params_bf16 = kind & 2 ? rounded : NULL};
                for (size_t i = 0; i < n * OC; i++) out[i] = add ? 1 : NAN;
                decode_matmul(out, x, &m, 0, n, C, OC, add);
                double error = matmul_error(out, (MatmulSizes){n, OC, C, 1, 1}, as_stored(x, C),
                                            (Matrix){.f32 = w, .ld = C, .transposed = true}, 1, add);
                for (size_t r = 0; r < n; r++) {
                    for (size_t o = 0; o < OC; o++) alone[o] = 1;
                    m.params_bf16 = kind & 2 ? NULL : rounded;
                    decode_matmul(alone, x + r * C, &m, 0, 1, C, OC, add);
                    m.params_bf16 = kind & 2 ? rounded : NULL;
                    differs |= memcmp(alone, out + r * OC, OC * sizeof *alone) != 0;
                }
                check("a matmul", error, 1e-6);
                check("the same bits in each way", differs, 0);
            }
        }
    }
    case_done();
}

// Matmuls that are computed in parts, of which some entries are compared. A and B are bfloat16 numbers. One thread
// packs parts one after the other, so that one too long overwrites another.
static void test_large_bf16_matmuls(void) {
    enum { M = 2178, N = 2084, MOST = 4130 };
    case_name = "large bfloat16 matmuls";
    Gemm mm;
    gemm_start(&mm, true);
    float *a = input("a", M * MOST, 1), *b = input("b", MOST * N, 1), *c = floats(M * N);
    for (size_t i = 0; i < M * MOST; i++) a[i] = bf16_to_float(bf16_from_float(a[i]));
    for (size_t i = 0; i < MOST * N; i++) b[i] = bf16_to_float(bf16_from_float(b[i]));
    void *memory = take(gemm_scratch(&mm, M * MOST, MOST * N));
    gemm_use(&mm, memory, M * MOST);
    for (int kind = 0; kind < 4; kind++) {
        size_t K = kind & 2 ? 2049 : MOST;    // if it is odd, A is packed in another way
        Matrix A = {.f32 = a, .ld = kind & 1 ? M : K, .transposed = kind & 1};
        Matrix B = {.f32 = b, .ld = kind & 2 ? K : N, .transposed = kind & 2};
        int threads = omp_get_max_threads();
        if (kind == 3) omp_set_num_threads(1);
        for (int add = 0; add < 2; add++) gemm_run(&mm, M, N, K, A, B, (float)add, c, N);
        omp_set_num_threads(threads);
        double error = matmul_error(c, (MatmulSizes){M, N, K, 23, 29}, A, B, 2, 0);
        check("the sum of two matmuls", error, 1e-6);
    }
    gemm_end(&mm);
    case_done();
}

// A matmul whose second input has rows 4 KiB apart. It takes a separate path, which splits the depth into several
// parts.
static void test_colliding_rows(void) {
    enum { M = 19, N = 2048, K = 1100 };
    case_name = "a matmul with rows 4 KiB apart";
    Gemm mm;
    gemm_start(&mm, false);
    float *a = input("a", M * K, 1), *b = input("b", K * N, 1), *c = floats(M * N);
    Matrix A = as_stored(a, K), B = as_stored(b, N);
    // The matmul, twice.
    for (int add = 0; add < 2; add++) gemm_run(&mm, M, N, K, A, B, (float)add, c, N);
    double error = matmul_error(c, (MatmulSizes){M, N, K, 1, 7}, A, B, 2, 0);
    check("the matmul", error, 1e-6);
    gemm_end(&mm);
    case_done();
}

// A NaN in one weight must reach the loss and fail every check.
static void test_nan(void) {
    case_name = "a NaN is detected";
    float logits[8] = {0, 1, 2, NAN, 4, 5, 6, 7}, loss, x[4] = {1, NAN, 2, 3}, w[4] = {1, 1, 1, 1}, out[4];
    int32_t target = 2;
    crossentropy(&loss, logits, &target, NULL, 1, (CrossEntropy){.V = 8, .VP = 8});
    check("loss", !isnan(loss), 0);
    rmsnorm_forward(in_f32(out), x, w, 1, 4, 1e-5f);
    check("rmsnorm", !isnan(out[0]), 0);
    for (size_t i = 0; i < 2; i++) {
        Normalizer normalizer;
        char message[256];
        normalizer_parse(&normalizer, i ? "relu2-n" : "softmax", message, sizeof message);
        float q[2] = {1, NAN}, k[4] = {1, 2, 3, 4}, v[4] = {1, 2, 3, 4}, scratch[2];
        AttentionShape shape = {&normalizer, 1, 2, 1, 1, 2, 2, 2, .cached = false};
        attention_row(out, q, (ConstView){k, 2, 2}, (ConstView){v, 2, 2}, 2, 0, (Scalars){{NULL}}, shape, scratch);
        check(normalizer.text, !isnan(out[0]), 0);
    }
    case_done();
}

// ---------------------------------------------------------------------------------------------------------------------

int main(int argc, char **argv) {
    static const CaseKind KINDS[] = {{"model", test_model},
                                     {"rmsnorm", test_rmsnorm},
                                     {"rope", test_rope},
                                     {"swiglu", test_swiglu},
                                     {"matmul", test_matmul},
                                     {"embedding", test_embedding},
                                     {"crossentropy", test_crossentropy},
                                     {"attention", test_attention},
                                     {"adamw", test_adamw}};
    const char *word = argc > 1 ? argv[1] : "";
    program_name = "test_gpt2";
    run_cases(KINDS, sizeof KINDS / sizeof *KINDS, word, false);
    if (!word[0]) {
        for (Tiles tiles = TILES_REAL; tiles <= TILES_LOOPS || tiles <= tiles_available(true); tiles++)
            test_bf16_matmuls(tiles);
        test_large_bf16_matmuls();
        test_bf16_outputs();
        test_decoding_matmuls();
        test_colliding_rows();
        test_nan();
    }
    return check_verdict();
}

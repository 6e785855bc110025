// Compares every kernel of cuda/ except the matmuls, forward and backward, with loops in float64; and the functions
// of cuda/gpu.cuh and cuda/hopper.cuh with plain loops, which on a GPU shows that the PTX does what the emulation
// does. Built for a GPU, or for the CPU (dev/cuda_on_cpu); the exit status is the verdict.
//
//   test_kernels [WORD]     only the cases whose name contains WORD
//
// Bounds. The loops use inputs that are rounded to X. A result may then differ from theirs by one rounding to X, half a
// unit in its last place (at most 2^-8 of a bf16, 2^-24 of a float), and by the errors of sums and functions in float,
// `bound` times the largest magnitude of the array: 2e-6 forward and 1e-5 backward unless stated otherwise. The worst
// error in a line is of the second kind. Outputs start as NaNs if they are written, and as numbers if they are
// accumulated. The bytes around each array must not change. Every case runs twice and must give the same bits.
#include "cuda/gpu.cuh"

#include <stdarg.h>

#include <functional>
#include <string>
#include <vector>

#include "attention/phi.cuh"
#include "cuda/adamw.cuh"
#include "cuda/bias.cuh"
#include "cuda/check.h"
#include "cuda/classifier.cuh"
#include "cuda/device.h"
#include "cuda/embedding.cuh"
#include "cuda/gau.cuh"
#include "cuda/muon.cuh"
#include "cuda/norms.cuh"
#include "cuda/output_gate.cuh"
#include "cuda/qk_norm.cuh"
#include "cuda/rmsnorm.cuh"
#include "cuda/rope.cuh"
#include "cuda/scores.cuh"
#include "cuda/swiglu.cuh"
#include "dev/reference/hash.h"
#include "dev/tests/check.h"
#include "math/philox.h"

typedef std::vector<double> Numbers;

static const char *filter = "";
static char case_name[128];
static double worst;
static const cudaStream_t stream = 0;

// ---- cases

__attribute__((format(printf, 1, 2))) static bool case_begins(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(case_name, sizeof case_name, format, arguments);
    va_end(arguments);
    check_case();
    worst = 0;
    return strstr(case_name, filter) != NULL;
}

static void case_ends(void) {
    if (!case_failures) printf("ok %-56s worst error %.2g\n", case_name, worst);
    fflush(stdout);
}

static void check(const char *what, double error, double bound) {
    if (!(error <= worst)) worst = error;
    CHECK(error <= bound, "%s: %s: error %.3g, at most %.3g allowed", case_name, what, error, bound);
}

static void check_true(const char *what, bool condition) {
    CHECK(condition, "%s: %s", case_name, what);
}

// ---- arrays on the device

enum { GUARD = 256, GUARD_BYTE = 0xA5 };

// `start` has the values before a run, `now` those after the last run; both are on the host.
struct Array {
    unsigned char *whole;
    size_t bytes;
    std::vector<unsigned char> start, now;
    explicit Array(size_t bytes) : bytes(bytes), start(bytes, 0xFF) {    // a NaN in every type
        CUDA_CHECK(cudaMalloc(&whole, bytes + 2 * GUARD));
        CUDA_CHECK(cudaMemset(whole, GUARD_BYTE, bytes + 2 * GUARD));
    }
    ~Array() {
        CUDA_CHECK(cudaFree(whole));
    }
    Array(const Array &) = delete;
};

static void array_reset(Array *a) {
    if (a->bytes) CUDA_CHECK(cudaMemcpy(a->whole + GUARD, a->start.data(), a->bytes, cudaMemcpyHostToDevice));
}

static void array_fetch(Array *a) {
    std::vector<unsigned char> guarded(a->bytes + 2 * GUARD);
    CUDA_CHECK(cudaMemcpy(guarded.data(), a->whole, guarded.size(), cudaMemcpyDeviceToHost));
    a->now.assign(guarded.begin() + GUARD, guarded.end() - GUARD);
    bool whole = true;
    for (size_t i = 0; i < GUARD; i++)
        whole = whole && guarded[i] == GUARD_BYTE && guarded[GUARD + a->bytes + i] == GUARD_BYTE;
    check_true("written outside of an array", whole);
}

// n of X, uninitialized: an output.
template <class X>
struct Tensor : Array {
    size_t n;
    explicit Tensor(size_t n) : Array(n * sizeof(X)), n(n) {
        array_reset(this);
    }
    X *device() const {
        return (X *)(whole + GUARD);
    }
    X at(size_t i) const {
        X x;
        memcpy(&x, now.data() + i * sizeof x, sizeof x);
        return x;
    }
};

template <class X>
static double value_of(X x) {
    if constexpr (sizeof(X) == 2) return __bfloat162float(x);
    else return x;
}

template <class X>
static void set_value(X *to, double x) {
    if constexpr (sizeof(X) == 2) *to = __float2bfloat16_rn((float)x);
    else *to = (X)x;
}

// Sets the tensor's initial values and returns them rounded.
template <class X>
static Numbers fill(Tensor<X> &t, const Numbers &x) {
    Numbers rounded(t.n);
    for (size_t i = 0; i < t.n; i++) {
        X v;
        set_value(&v, x[i]);
        memcpy(t.start.data() + i * sizeof v, &v, sizeof v);
        rounded[i] = value_of(v);
    }
    array_reset(&t);
    return rounded;
}

static Numbers numbers(const char *name, size_t n, double mean, double scale) {
    Numbers x(n);
    for (size_t i = 0; i < n; i++) x[i] = mean + scale * fixture_uniform(fixture_stream(name), i);
    return x;
}

template <class X>
static Numbers fill(Tensor<X> &t, const char *name, double mean, double scale) {
    return fill(t, numbers(name, t.n, mean, scale));
}

// The initial values of a gradient that a kernel adds to; of one that it writes, NaNs, of which no trace may remain.
template <class X>
static Numbers start(Tensor<X> &t, const char *name, bool add) {
    return add ? fill(t, name, 0, 1) : Numbers(t.n);
}

// Bytes of any type, unconverted.
template <class T>
static void upload(Tensor<T> &t, const std::vector<T> &x) {
    memcpy(t.start.data(), x.data(), t.bytes);
    array_reset(&t);
}

// ---- runs

// Runs twice from the arrays' initial values; both runs must leave the same bits.
static void run_twice(const std::vector<Array *> &arrays, const std::function<void()> &run) {
    std::vector<std::vector<unsigned char>> first;
    for (int time = 0; time < 2; time++) {
        for (Array *a : arrays) array_reset(a);
        run();
        CUDA_CHECK(cudaDeviceSynchronize());
        for (Array *a : arrays) array_fetch(a);
        for (size_t i = 0; i < arrays.size() && time == 1; i++)
            check_true("two runs differ", arrays[i]->now == first[i]);
        for (Array *a : arrays) first.push_back(a->now);
    }
}

// Half a unit in the last place of x as an X.
template <class X>
static double half_ulp(double x) {
    const int bits = sizeof(X) == 2 ? 8 : sizeof(X) == 4 ? 24 : 53;    // of the significand
    return x == 0 ? 0 : ldexp(1, ilogb(x) - bits);
}

// The largest error beyond one rounding, divided by the largest magnitude.
template <class X>
static void compare(const char *what, const Tensor<X> &t, const Numbers &expected, double bound) {
    double size = 1e-30, error = 0;
    for (double e : expected) size = fmax(size, fabs(e));
    for (size_t i = 0; i < t.n; i++) {
        double here = fabs(value_of(t.at(i)) - expected[i]) - half_ulp<X>(expected[i]);
        if (!(here / size <= error)) error = here / size;
    }
    check(what, error, bound);
}

// Elements that must not change.
template <class X>
static void compare_untouched(const char *what, const Tensor<X> &t, const std::function<bool(size_t)> &outside) {
    bool same = true;
    for (size_t i = 0; i < t.n; i++)
        if (outside(i)) same = same && !memcmp(t.now.data() + i * sizeof(X), t.start.data() + i * sizeof(X), sizeof(X));
    check_true(what, same);
}

static const double FORWARD = 2e-6, BACKWARD = 1e-5;

template <class X>
static const char *type_name(void) {
    return sizeof(X) == 2 ? "bf16" : "float";
}

// ---------------------------------------------------------------------------------------------------------------------
// RMSNorm

template <class X>
static void test_rmsnorm(size_t N, size_t C, float eps, bool add_input, bool add_weight) {
    if (!case_begins("rmsnorm %s N=%zu C=%zu eps=%g%s%s", type_name<X>(), N, C, eps, add_input ? "" : " dinp written",
                     add_weight ? "" : " dweight written"))
        return;
    Tensor<X> out(N * C), inp(N * C), dout(N * C), dinp(N * C);
    Tensor<float> r(N), weight(C), dweight(C), partials(rmsnorm_partials(N, C)), r_in(N);
    Numbers x = fill(inp, "x", 0.1, 2), w = fill(weight, "w", 1, 0.5), dy = fill(dout, "dy", 0, 1),
            dx = start(dinp, "dx", add_input), dw = start(dweight, "dw", add_weight);
    Numbers y(N * C), inverse(N);
    for (size_t n = 0; n < N; n++) {
        double squares = 0, dot = 0;
        for (size_t c = 0; c < C; c++) squares += x[n * C + c] * x[n * C + c];
        inverse[n] = 1 / sqrt(squares / (double)C + (double)eps);
        for (size_t c = 0; c < C; c++) {
            y[n * C + c] = x[n * C + c] * inverse[n] * w[c];
            dot += dy[n * C + c] * w[c] * x[n * C + c];
            dw[c] += dy[n * C + c] * x[n * C + c] * inverse[n];
        }
        double k = inverse[n] * inverse[n] * dot / (double)C;
        for (size_t c = 0; c < C; c++) dx[n * C + c] += inverse[n] * (w[c] * dy[n * C + c] - x[n * C + c] * k);
    }
    fill(r_in, inverse);
    run_twice({&out, &r},
              [&] { rmsnorm_forward(out.device(), r.device(), inp.device(), weight.device(), N, C, eps, stream); });
    run_twice({&dinp, &dweight, &partials}, [&] {
        rmsnorm_backward<X>({dinp.device(), add_input}, {dweight.device(), add_weight}, partials.device(),
                            dout.device(), {inp.device(), weight.device(), r_in.device(), N, C}, stream);
    });
    compare("out", out, y, FORWARD);
    compare("r", r, inverse, FORWARD);
    compare("dinp", dinp, dx, BACKWARD);
    compare("dweight", dweight, dw, BACKWARD);
    case_ends();
}

template <class X>
static void test_rmsnorms(void) {
    static const size_t SHAPES[][2] = {
        {1, 48},   {33, 96}, {33, 768}, {3, 97},  {1, 1},   {2, 24576}, {4300, 16},
        {5, 4104}, {9, 128}, {9, 256},  {9, 384}, {9, 512}, {9, 1024}};    // those of 9 rows: up to 4 vectors of a lane
    for (const size_t *s : SHAPES) test_rmsnorm<X>(s[0], s[1], 1e-5f, true, true);
    test_rmsnorm<X>(33, 96, 0.1f, true, true);
    for (size_t C : {(size_t)96, (size_t)97}) {
        test_rmsnorm<X>(33, C, 1e-5f, false, true);
        test_rmsnorm<X>(33, C, 1e-5f, true, false);
        test_rmsnorm<X>(33, C, 1e-5f, false, false);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// RoPE

static void make_angles(Numbers &cosines, Numbers &sines, size_t T, size_t half, double amplitude = 1) {
    cosines.resize(T * half);
    sines.resize(T * half);
    for (size_t t = 0; t < T; t++)
        for (size_t i = 0; i < half; i++) {
            double angle = ((double)t + 0.5) * pow(10000, -(double)i / (double)half);
            cosines[t * half + i] = amplitude * cos(angle);
            sines[t * half + i] = amplitude * sin(angle);
        }
}

static void rotate(double *x, const double *cosines, const double *sines, double sign, size_t half) {
    for (size_t i = 0; i < half; i++) {
        double a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - sign * b * sines[i];
        x[i + half] = b * cosines[i] + sign * a * sines[i];
    }
}

// Divides x by its norm and returns the inverse of the norm.
static double divide_by_norm(double *x, size_t n) {
    double squares = 0;
    for (size_t i = 0; i < n; i++) squares += x[i] * x[i];
    double inverse = squares > 0 ? 1 / sqrt(squares) : 0;
    for (size_t i = 0; i < n; i++) x[i] *= inverse;
    return inverse;
}

static void norm_backward(double *d, const double *u, double inverse, size_t n) {
    double dot = 0;
    for (size_t i = 0; i < n; i++) dot += u[i] * d[i];
    for (size_t i = 0; i < n; i++) d[i] = (d[i] - u[i] * dot) * inverse;
}

template <class X>
static void test_rope(size_t B, size_t T, size_t NH, size_t NKV, size_t HS, bool l2, float amplitude = 1) {
    if (!case_begins("rope %s B=%zu T=%zu NH=%zu NKV=%zu HS=%zu%s%s", type_name<X>(), B, T, NH, NKV, HS,
                     l2 ? " l2" : "", amplitude == 1 ? "" : " scaled"))
        return;
    size_t N = B * T, heads = NH + NKV, W = (heads + NKV) * HS, half = HS / 2;
    Tensor<X> qkv(N * W), u(N * W), dqkv(N * W);
    Tensor<float> inverses(N * heads), inverses_in(N * heads), cosines(T * half), sines(T * half);
    Numbers cos_t, sin_t, x = numbers("qkv", N * W, 0, 1.5), inverse(N * heads);
    for (size_t i = 0; i < HS; i++) x[i] = 0;    // a head of zeros
    x = fill(qkv, x);
    make_angles(cos_t, sin_t, T, half, amplitude);
    cos_t = fill(cosines, cos_t);
    sin_t = fill(sines, sin_t);
    for (size_t n = 0; n < N; n++)
        for (size_t h = 0; h < heads; h++) {
            double *head = &x[n * W + h * HS];
            rotate(head, &cos_t[(n % T) * half], &sin_t[(n % T) * half], 1, half);
            if (l2) inverse[n * heads + h] = divide_by_norm(head, HS);
        }
    Numbers rounded = fill(u, x), dx = fill(dqkv, "dqkv", 0, 1);
    inverse = fill(inverses_in, inverse);
    for (size_t n = 0; n < N; n++)
        for (size_t h = 0; h < heads; h++) {
            double *head = &dx[n * W + h * HS];
            if (l2) norm_backward(head, &rounded[n * W + h * HS], inverse[n * heads + h], HS);
            rotate(head, &cos_t[(n % T) * half], &sin_t[(n % T) * half], -1, half);
        }
    Rope rope = {B, T, NH, NKV, HS, cosines.device(), sines.device(), l2, amplitude};
    run_twice({&qkv, &inverses}, [&] { rope_forward(qkv.device(), l2 ? inverses.device() : NULL, rope, stream); });
    run_twice({&dqkv},
              [&] { rope_backward(dqkv.device(), u.device(), l2 ? inverses_in.device() : NULL, rope, stream); });
    compare("qkv", qkv, x, FORWARD);
    if (l2) compare("inverse_norms", inverses, inverse, FORWARD);
    compare("dqkv", dqkv, dx, BACKWARD);
    auto is_v = [&](size_t i) { return i % W >= heads * HS; };
    compare_untouched("v has changed", qkv, is_v);
    compare_untouched("dv has changed", dqkv, is_v);
    case_ends();
}

template <class X>
static void test_ropes(void) {
    // B, T, NH, NKV, HS
    static const size_t SHAPES[][5] = {{1, 1, 1, 1, 48},     {2, 33, 3, 3, 48}, {1, 5, 12, 12, 64}, {1, 5, 12, 3, 64},
                                       {2, 17, 1, 1, 128},   {2, 3, 2, 2, 6},   {2, 3, 3, 1, 6},    {1, 2, 1, 1, 530},
                                       {1, 2, 100, 100, 64}, {1, 2, 3, 3, 16}};
    for (const size_t *s : SHAPES)
        for (int l2 = 0; l2 < 2; l2++) test_rope<X>(s[0], s[1], s[2], s[3], s[4], l2);
    for (int l2 = 0; l2 < 2; l2++) test_rope<X>(1, 5, 3, 1, 64, l2, 1.25f);
}

// ---------------------------------------------------------------------------------------------------------------------
// Biases

template <class X>
static void test_bias(size_t N, size_t OC, bool add) {
    if (!case_begins("bias %s N=%zu OC=%zu%s", type_name<X>(), N, OC, add ? "" : " written")) return;
    Tensor<X> out(N * OC), dout(N * OC);
    Tensor<float> bias(OC), dbias(OC), partials(bias_partials(N, OC));
    Numbers y = fill(out, "out", 0.1, 1.5), b = fill(bias, "bias", 0.2, 1);
    Numbers d = fill(dout, "dout", 0.1, 1), db = start(dbias, "dbias", add);
    for (size_t i = 0; i < N * OC; i++) {
        y[i] += b[i % OC];
        db[i % OC] += d[i];
    }
    run_twice({&out}, [&] { bias_forward(out.device(), bias.device(), N, OC, stream); });
    run_twice({&dbias, &partials},
              [&] { bias_backward({dbias.device(), add}, partials.device(), dout.device(), N, OC, stream); });
    compare("out", out, y, FORWARD);
    compare("dbias", dbias, db, BACKWARD);
    case_ends();
}

template <class X>
static void test_biases(void) {
    static const size_t SHAPES[][2] = {{1, 48}, {33, 144}, {7, 97}, {65, 768}, {1500, 264}};
    for (const size_t *s : SHAPES) test_bias<X>(s[0], s[1], true);
    test_bias<X>(33, 260, false);
}

// ---------------------------------------------------------------------------------------------------------------------
// scores

template <class X>
static void test_query_scores(size_t T, size_t NH, size_t NKV, size_t HS, size_t k_row) {
    if (!case_begins("scores %s T=%zu NH=%zu NKV=%zu HS=%zu k_row=%zu", type_name<X>(), T, NH, NKV, HS, k_row)) return;
    Tensor<X> q(NH * HS), k(T * k_row);
    Tensor<float> scores(NH * T);
    Numbers of_q = fill(q, "q", 0.1, 1), of_k = fill(k, "k", 0.1, 1), right(NH * T);
    for (size_t h = 0; h < NH; h++)
        for (size_t j = 0; j < T; j++)
            for (size_t c = 0; c < HS; c++)
                right[h * T + j] += of_q[h * HS + c] * of_k[j * k_row + h / (NH / NKV) * HS + c];
    run_twice({&scores},
              [&] { query_scores<X>(scores.device(), {q.device(), k.device(), k_row, T, NH, NKV, HS}, stream); });
    compare("scores", scores, right, FORWARD);
    case_ends();
}

template <class X>
static void test_scores(void) {
    test_query_scores<X>(1, 1, 1, 8, 8);
    test_query_scores<X>(33, 4, 2, 48, 384);
    test_query_scores<X>(7, 3, 1, 5, 17);
    test_query_scores<X>(9, 2, 2, 320, 640);
    test_query_scores<X>(5, 2, 1, 16, 33);
    test_query_scores<X>(1500, 12, 12, 64, 2304);
}

// ---------------------------------------------------------------------------------------------------------------------
// QK norms

// Replaces dy of one head by dx, and adds its part of dgain.
static void qk_norm_head_backward(double *d, double *dgain, const double *x, const double *gain, double r, size_t HS) {
    double dot = 0;
    for (size_t c = 0; c < HS; c++) {
        dot += d[c] * gain[c] * x[c];
        dgain[c] += d[c] * x[c] * r;
    }
    for (size_t c = 0; c < HS; c++) d[c] = r * (gain[c] * d[c] - x[c] * r * r * dot / (double)HS);
}

template <class X>
static void test_qk_norm(size_t N, size_t NH, size_t NKV, size_t HS, float eps, bool add) {
    if (!case_begins("qk_norm %s N=%zu NH=%zu NKV=%zu HS=%zu eps=%g%s", type_name<X>(), N, NH, NKV, HS, eps,
                     add ? "" : " gains written"))
        return;
    size_t heads = NH + NKV, row = (heads + NKV) * HS;
    Tensor<X> qkv(N * row), inputs(N * heads * HS), inputs_in(N * heads * HS), dqkv(N * row);
    Tensor<float> inverse(N * heads), inverse_in(N * heads), q_gain(HS), k_gain(HS), dq_gain(HS), dk_gain(HS),
        partials(qk_norm_partials(HS));
    Numbers y = fill(qkv, "qkv", 0.1, 1.5), gains[] = {fill(q_gain, "q_gain", 1, 0.5), fill(k_gain, "k_gain", 1, 0.5)};
    Numbers dx = fill(dqkv, "dqkv", 0, 1), dgains[] = {start(dq_gain, "dq_gain", add), start(dk_gain, "dk_gain", add)};
    Numbers x(N * heads * HS), r(N * heads);
    for (size_t i = 0; i < N * heads; i++) {
        size_t at = (i / heads) * row + (i % heads) * HS, which = i % heads < NH ? 0 : 1;
        double squares = 0;
        for (size_t c = 0; c < HS; c++) squares += y[at + c] * y[at + c];
        r[i] = 1 / sqrt(squares / (double)HS + (double)eps);
        for (size_t c = 0; c < HS; c++) {
            x[i * HS + c] = y[at + c];
            y[at + c] *= r[i] * gains[which][c];
        }
        qk_norm_head_backward(&dx[at], &dgains[which][0], &x[i * HS], &gains[which][0], r[i], HS);
    }
    fill(inputs_in, x), fill(inverse_in, r);
    QkNorm q = {N, NH, NKV, HS, eps, q_gain.device(), k_gain.device()};
    run_twice({&qkv, &inputs, &inverse},
              [&] { qk_norm_forward(qkv.device(), inputs.device(), inverse.device(), q, stream); });
    run_twice({&dqkv, &dq_gain, &dk_gain, &partials}, [&] {
        qk_norm_backward(dqkv.device(), {dq_gain.device(), add}, {dk_gain.device(), add}, partials.device(),
                         inputs_in.device(), inverse_in.device(), q, stream);
    });
    compare("qkv", qkv, y, FORWARD);
    compare("inputs", inputs, x, 0);
    compare("inverse", inverse, r, FORWARD);
    compare("dqkv", dqkv, dx, BACKWARD);
    compare("dq_gain", dq_gain, dgains[0], BACKWARD);
    compare("dk_gain", dk_gain, dgains[1], BACKWARD);
    auto is_v = [&](size_t i) { return i % row >= heads * HS; };
    compare_untouched("v has changed", qkv, is_v);
    compare_untouched("dv has changed", dqkv, is_v);
    case_ends();
}

template <class X>
static void test_qk_norms(void) {
    static const size_t SHAPES[][4] = {{1, 1, 1, 48},  {33, 4, 2, 48}, {5, 12, 12, 64}, {17, 3, 1, 128}, {3, 8, 2, 6},
                                       {2, 2, 1, 256}, {2, 1, 1, 250}, {9, 3, 3, 16},   {1500, 8, 4, 64}};
    for (const size_t *s : SHAPES) test_qk_norm<X>(s[0], s[1], s[2], s[3], 1e-5f, true);
    test_qk_norm<X>(33, 4, 2, 24, 0.1f, false);
}

// ---------------------------------------------------------------------------------------------------------------------
// Gates and the gated unit

template <class X>
static void test_output_gate(size_t N, size_t E, size_t G) {
    if (!case_begins("output_gate %s N=%zu E=%zu G=%zu", type_name<X>(), N, E, G)) return;
    Tensor<X> out(N * E), att(N * E), gate(N * G), d(N * E), dgate(N * G);
    Numbers y = fill(att, "att", 0.1, 1.5), x = fill(gate, "gate", 0, 4), dx = fill(d, "dout", 0, 1), dg(N * G);
    const Numbers a = y;
    for (size_t i = 0; i < N * E; i++) {
        size_t g = i / (E / G);
        double s = 1 / (1 + exp(-x[g]));
        y[i] *= s;
        dg[g] += dx[i] * a[i] * s * (1 - s);
        dx[i] *= s;
    }
    OutputGate o = {N, E, G};
    run_twice({&out}, [&] { output_gate_forward(out.device(), att.device(), gate.device(), o, stream); });
    run_twice({&d, &dgate},
              [&] { output_gate_backward(d.device(), dgate.device(), att.device(), gate.device(), o, stream); });
    compare("out", out, y, FORWARD);
    compare("datt", d, dx, FORWARD);
    compare("dgate", dgate, dg, BACKWARD);
    case_ends();
}

template <class X>
static void test_output_gates(void) {
    static const size_t SHAPES[][3] = {{1, 48, 1}, {33, 96, 4}, {5, 768, 768}, {17, 130, 130},
                                       {7, 30, 5}, {3, 640, 2}, {9, 1000, 8},  {1500, 256, 4}};
    for (const size_t *s : SHAPES) test_output_gate<X>(s[0], s[1], s[2]);
}

static double silu_of(double x) {
    return x / (1 + exp(-x));
}

static double silu_slope(double x) {
    double s = 1 / (1 + exp(-x));
    return s * (1 + x * (1 - s));
}

template <class X>
static void test_swiglu(size_t N, size_t F, double scale) {
    if (!case_begins("swiglu %s N=%zu F=%zu +-%g", type_name<X>(), N, F, scale)) return;
    Tensor<X> out(N * F), gate_up(N * 2 * F), dout(N * F), dgate_up(N * 2 * F);
    Numbers x = fill(gate_up, "gate_up", 0, scale), dy = fill(dout, "dy", 0, 1), y(N * F), dx(N * 2 * F);
    for (size_t n = 0; n < N; n++)
        for (size_t f = 0; f < F; f++) {
            double gate = x[n * 2 * F + f], up = x[n * 2 * F + F + f], d = dy[n * F + f];
            y[n * F + f] = silu_of(gate) * up;
            dx[n * 2 * F + f] = d * up * silu_slope(gate);
            dx[n * 2 * F + F + f] = d * silu_of(gate);
        }
    run_twice({&out}, [&] { swiglu_forward(out.device(), gate_up.device(), N, F, stream); });
    run_twice({&dgate_up}, [&] { swiglu_backward(dgate_up.device(), dout.device(), gate_up.device(), N, F, stream); });
    compare("out", out, y, FORWARD);
    compare("dgate_up", dgate_up, dx, BACKWARD);
    case_ends();
}

template <class X>
static void test_swiglus(void) {
    static const size_t SHAPES[][2] = {{1, 88}, {33, 88}, {5, 2048}, {3, 97}, {2, 1}, {1, 5000}};
    for (const size_t *s : SHAPES) test_swiglu<X>(s[0], s[1], 3);
    test_swiglu<X>(3, 96, 200);
}

struct Gains {
    Tensor<float> q_gain, q_offset, k_gain, k_offset;
    Numbers values[4];
    Gains(size_t HS, const char *name, bool given = true) : q_gain(HS), q_offset(HS), k_gain(HS), k_offset(HS) {
        Tensor<float> *all[] = {&q_gain, &q_offset, &k_gain, &k_offset};
        for (int i = 0; i < 4; i++) {
            std::string full = name + std::to_string(i);
            values[i] = given ? fill(*all[i], full.c_str(), 0.2, 1.5) : Numbers(HS);
        }
    }
    GauGains device() const {
        return (GauGains){q_gain.device(), q_offset.device(), k_gain.device(), k_offset.device()};
    }
};

// A unit's projection and angles, and what is expected of its passes.
struct Gau {
    size_t T, E, HS, N;
    bool l2;
    Numbers x;
    size_t W = 2 * E + HS, half = HS / 2;
    Numbers cos_t = {}, sin_t = {};
    Numbers qk[2] = {Numbers(N * HS), Numbers(N * HS)}, values = Numbers(N * E), inverse = Numbers(2 * N);    // forward
    Numbers dx = {};    // backward
};

static void expect_gau_forward(Gau &g, const Gains &gains) {
    for (size_t n = 0; n < g.N; n++) {
        const double *z = &g.x[n * g.W + 2 * g.E];
        for (size_t e = 0; e < g.E; e++) g.values[n * g.E + e] = silu_of(g.x[n * g.W + g.E + e]);
        for (int i = 0; i < 2; i++) {
            double *row = &g.qk[i][n * g.HS];
            for (size_t c = 0; c < g.HS; c++)
                row[c] = silu_of(z[c]) * gains.values[2 * i][c] + gains.values[2 * i + 1][c];
            rotate(row, &g.cos_t[(n % g.T) * g.half], &g.sin_t[(n % g.T) * g.half], 1, g.half);
            if (g.l2) g.inverse[2 * n + i] = divide_by_norm(row, g.HS);
        }
    }
}

// d[0], d[1]: the gradients of q and k, overwritten   u: q and k   grads added to
static void expect_gau_backward(Gau &g, Gains &grads, Numbers d[2], const Numbers u[2], const Numbers &dvalues,
                                const Gains &gains) {
    for (size_t n = 0; n < g.N; n++) {
        const double *z = &g.x[n * g.W + 2 * g.E];
        double *dz = &g.dx[n * g.W + 2 * g.E];
        for (size_t e = 0; e < g.E; e++)
            g.dx[n * g.W + g.E + e] = dvalues[n * g.E + e] * silu_slope(g.x[n * g.W + g.E + e]);
        for (size_t c = 0; c < g.HS; c++) dz[c] = 0;
        for (int i = 0; i < 2; i++) {
            double *row = &d[i][n * g.HS];
            if (g.l2) norm_backward(row, &u[i][n * g.HS], g.inverse[2 * n + i], g.HS);
            rotate(row, &g.cos_t[(n % g.T) * g.half], &g.sin_t[(n % g.T) * g.half], -1, g.half);
            for (size_t c = 0; c < g.HS; c++) {
                dz[c] += row[c] * gains.values[2 * i][c] * silu_slope(z[c]);
                grads.values[2 * i][c] += row[c] * silu_of(z[c]);
                grads.values[2 * i + 1][c] += row[c];
            }
        }
    }
}

template <class X>
static void test_gau(size_t B, size_t T, size_t E, size_t HS, bool l2, bool add = true) {
    if (!case_begins("gau %s B=%zu T=%zu E=%zu HS=%zu%s%s", type_name<X>(), B, T, E, HS, l2 ? " l2" : "",
                     add ? "" : " gains written"))
        return;
    size_t N = B * T, W = 2 * E + HS, half = HS / 2;
    Tensor<X> uvz(N * W), q(N * HS), k(N * HS), v(N * E), q_in(N * HS), k_in(N * HS), dq(N * HS), dk(N * HS), dv(N * E),
        duvz(N * W);
    Tensor<float> inverses(2 * N), inverses_in(2 * N), cosines(T * half), sines(T * half),
        partials(gau_partials(N, HS));
    Gains gains(HS, "gain"), grads(HS, "grad", add);
    Gau g = {T, E, HS, N, l2, fill(uvz, "uvz", 0, 3)};
    make_angles(g.cos_t, g.sin_t, T, half);
    g.cos_t = fill(cosines, g.cos_t);
    g.sin_t = fill(sines, g.sin_t);
    expect_gau_forward(g, gains);
    Numbers u[2] = {fill(q_in, g.qk[0]), fill(k_in, g.qk[1])}, d[2] = {fill(dq, "dq", 0, 1), fill(dk, "dk", 0, 1)};
    Numbers dvalues = fill(dv, "dv", 0, 1);
    g.inverse = fill(inverses_in, g.inverse);
    g.dx = fill(duvz, "duvz", 0, 1);
    expect_gau_backward(g, grads, d, u, dvalues, gains);
    Rope rope = {B, T, 1, 1, HS, cosines.device(), sines.device(), l2};
    run_twice({&q, &k, &v, &inverses}, [&] {
        gau_forward<X>({uvz.device(), q.device(), k.device(), v.device(), l2 ? inverses.device() : NULL},
                       gains.device(), rope, E, stream);
    });
    run_twice({&duvz, &grads.q_gain, &grads.q_offset, &grads.k_gain, &grads.k_offset, &partials}, [&] {
        gau_backward<X>({duvz.device(), dq.device(), dk.device(), dv.device(), NULL}, grads.device(), add,
                        partials.device(),
                        {uvz.device(), q_in.device(), k_in.device(), NULL, l2 ? inverses_in.device() : NULL},
                        gains.device(), rope, E, stream);
    });
    compare("q", q, g.qk[0], FORWARD);
    compare("k", k, g.qk[1], FORWARD);
    compare("v", v, g.values, FORWARD);
    if (l2) compare("inverse_norms", inverses, g.inverse, FORWARD);
    compare("duvz", duvz, g.dx, BACKWARD);
    compare_untouched("u's gradient has changed", duvz, [&](size_t i) { return i % W < E; });
    compare("dq_gain", grads.q_gain, grads.values[0], BACKWARD);
    compare("dq_offset", grads.q_offset, grads.values[1], BACKWARD);
    compare("dk_gain", grads.k_gain, grads.values[2], BACKWARD);
    compare("dk_offset", grads.k_offset, grads.values[3], BACKWARD);
    case_ends();
}

template <class X>
static void test_gate(size_t N, size_t E, size_t W) {
    if (!case_begins("gau gate %s N=%zu E=%zu W=%zu", type_name<X>(), N, E, W)) return;
    Tensor<X> out(N * E), uvz(N * W), att(N * E), datt(N * E), duvz(N * W), dout(N * E);
    Numbers x = fill(uvz, "uvz", 0, 3), a = fill(att, "att", 0, 1), dy = fill(dout, "dy", 0, 1),
            start = fill(duvz, "duvz", 0, 1), y(N * E), da(N * E), dx = start;
    for (size_t n = 0; n < N; n++)
        for (size_t e = 0; e < E; e++) {
            double u = x[n * W + e];
            y[n * E + e] = silu_of(u) * a[n * E + e];
            da[n * E + e] = dy[n * E + e] * silu_of(u);
            dx[n * W + e] = dy[n * E + e] * a[n * E + e] * silu_slope(u);
        }
    run_twice({&out}, [&] { gau_gate_forward(out.device(), uvz.device(), att.device(), N, E, W, stream); });
    run_twice({&datt, &duvz}, [&] {
        gau_gate_backward(datt.device(), duvz.device(), dout.device(), uvz.device(), att.device(), N, E, W, stream);
    });
    compare("out", out, y, FORWARD);
    compare("datt", datt, da, BACKWARD);
    compare("duvz", duvz, dx, BACKWARD);
    compare_untouched("past u's gradient", duvz, [&](size_t i) { return i % W >= E; });
    case_ends();
}

template <class X>
static void test_gaus(void) {
    static const size_t SHAPES[][4] = {{1, 1, 96, 128},   {2, 33, 192, 128}, {1, 5, 7, 6}, {2, 3, 96, 48},
                                       {2, 1100, 8, 128}, {1, 3, 1536, 128}, {1, 4, 1, 2}};
    for (const size_t *s : SHAPES)
        for (int l2 = 0; l2 < 2; l2++) test_gau<X>(s[0], s[1], s[2], s[3], l2);
    test_gau<X>(2, 3, 48, 16, false, false);
    static const size_t GATES[][3] = {{1, 96, 320}, {33, 96, 320}, {5, 1536, 3200}, {3, 7, 20}};
    for (const size_t *g : GATES) test_gate<X>(g[0], g[1], g[2]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Embedding

// `hot` of every 100 rows have token 3.
static std::vector<int32_t> make_tokens(size_t N, size_t V, unsigned hot) {
    std::vector<int32_t> tokens(N);
    for (size_t n = 0; n < N; n++) {
        uint64_t bits = fixture_hash(fixture_stream("tokens"), n);
        tokens[n] = bits % 100 < hot ? 3 % (int32_t)V : (int32_t)((bits >> 20) % V);
    }
    return tokens;
}

// Blocks run concurrently, so no two of a launch may add to the same row of dweight or write the same row of partial
// sums.
static void check_plan(const std::vector<EmbeddingPiece> &pieces, EmbeddingPlan plan, size_t N, size_t V) {
    std::vector<int> to_weight(V), to_partials(embedding_partials(N));
    bool once = true, short_enough = true;
    for (size_t p = 0; p < plan.pieces + plan.sums; p++) {
        const EmbeddingPiece &piece = pieces[p];
        if (piece.slot < 0) once = once && ++to_weight[(size_t)piece.token] == 1;
        else once = once && (size_t)piece.slot < to_partials.size() && ++to_partials[(size_t)piece.slot] == 1;
        if (p < plan.pieces) short_enough = short_enough && piece.count >= 1 && piece.count <= EMBEDDING_PIECE;
    }
    check_true("two pieces write the same row", once);
    check_true("a piece with no or too many rows", short_enough);
}

template <class X>
static void test_embedding(size_t N, size_t C, size_t V, unsigned hot) {
    if (!case_begins("embedding %s N=%zu C=%zu V=%zu hot=%u", type_name<X>(), N, C, V, hot)) return;
    std::vector<int32_t> tokens = make_tokens(N, V, hot), order(N), starts(V + 1);
    std::vector<EmbeddingPiece> pieces(embedding_pieces(N));
    EmbeddingPlan plan = embedding_plan(order.data(), pieces.data(), tokens.data(), N, starts.data(), V);
    Tensor<int32_t> tokens_in(N), order_in(N);
    Tensor<EmbeddingPiece> pieces_in(pieces.size());
    Tensor<X> out(N * C), weight(V * C), dout(N * C);
    Tensor<float> dweight(V * C), partials(embedding_partials(N) * C);
    check_plan(pieces, plan, N, V);
    upload(tokens_in, tokens);
    upload(order_in, order);
    upload(pieces_in, pieces);
    Numbers w = fill(weight, "weight", 0, 1), dy = fill(dout, "dy", 0.2, 1), dw = fill(dweight, "dweight", 0, 1),
            y(N * C);
    for (size_t n = 0; n < N; n++)
        for (size_t c = 0; c < C; c++) {
            y[n * C + c] = w[(size_t)tokens[n] * C + c];
            dw[(size_t)tokens[n] * C + c] += dy[n * C + c];
        }
    run_twice({&out}, [&] { embedding_forward(out.device(), weight.device(), tokens_in.device(), N, C, stream); });
    run_twice({&dweight, &partials}, [&] {
        embedding_backward(dweight.device(), partials.device(), dout.device(), order_in.device(), pieces_in.device(),
                           plan, C, stream);
    });
    compare("out", out, y, 0);
    compare("dweight", dweight, dw, 2e-6);
    compare_untouched("the row of a token that does not occur", dweight, [&](size_t i) {
        for (int32_t token : tokens)
            if ((size_t)token == i / C) return false;
        return true;
    });
    case_ends();
}

// The rows of a token are added in order: with 2^24, 1, 1, ... every 1 is lost, but not if 2^24 comes later.
static void test_embedding_order(void) {
    if (!case_begins("embedding order")) return;
    enum { N = 40, C = 4, V = 5 };
    std::vector<int32_t> tokens(N, 2), order(N), starts(V + 1);
    std::vector<EmbeddingPiece> pieces(embedding_pieces(N));
    EmbeddingPlan plan = embedding_plan(order.data(), pieces.data(), tokens.data(), N, starts.data(), V);
    Tensor<int32_t> order_in(N);
    Tensor<EmbeddingPiece> pieces_in(pieces.size());
    Tensor<float> dout(N * C), dweight(V * C), partials(1);
    Numbers dy(N * C, 1.0);
    for (size_t c = 0; c < C; c++) dy[c] = 0x1p24;
    upload(order_in, order);
    upload(pieces_in, pieces);
    fill(dout, dy);
    fill(dweight, Numbers(V * C, 0.0));
    run_twice({&dweight}, [&] {
        embedding_backward(dweight.device(), partials.device(), dout.device(), order_in.device(), pieces_in.device(),
                           plan, C, stream);
    });
    for (size_t c = 0; c < C; c++) check_true("not in order", value_of(dweight.at(2 * C + c)) == 0x1p24);
    case_ends();
}

template <class X>
static void test_embeddings(void) {
    static const size_t SHAPES[][4] = {{1, 96, 97, 0},   {33, 48, 97, 10}, {700, 48, 97, 60}, {65, 97, 2, 100},
                                       {64, 8, 97, 100}, {5, 768, 97, 0},  {3, 16, 50257, 0}, {300, 16, 1, 0}};
    for (const size_t *s : SHAPES) test_embedding<X>(s[0], s[1], s[2], (unsigned)s[3]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Classifier

template <class X>
static void test_classifier(size_t rows, size_t V, double scale_of_logits, bool masked, float scale, float c = 0,
                            float z = 0) {
    if (!case_begins("classifier %s rows=%zu V=%zu +-%g%s%s c=%g z=%g", type_name<X>(), rows, V, scale_of_logits,
                     masked ? " masked" : "", scale == 0 ? " loss alone" : "", c, z))
        return;
    size_t VP = (V + 127) / 128 * 128;
    Numbers x = numbers("logits", rows * VP, 0, scale_of_logits), gradient(rows * VP, 0.0), loss(rows, 0.0);
    std::vector<int32_t> targets(rows);
    std::vector<uint8_t> mask(rows, 1);
    for (size_t n = 0; n < rows; n++) {
        targets[n] = n == 0 ? (int32_t)V - 1 : (int32_t)(fixture_hash(7, n) % V);
        if (masked) mask[n] = n % 3 != 0;
        for (size_t v = V; v < VP; v++) x[n * VP + v] = n % 2 ? NAN : 1e30;    // is ignored
    }
    Tensor<X> logits(rows * VP);
    Tensor<float> losses(rows);
    Tensor<int32_t> targets_in(rows);
    Tensor<uint8_t> mask_in(rows);
    x = fill(logits, x), upload(targets_in, targets), upload(mask_in, mask);
    for (size_t n = 0; n < rows; n++) {
        if (!mask[n]) continue;
        double sum = 0;
        Numbers y(V);
        for (size_t v = 0; v < V; v++) {
            y[v] = c != 0 ? c * tanh(x[n * VP + v] / c) : x[n * VP + v];
            sum += exp(y[v]);
        }
        loss[n] = log(sum) - y[(size_t)targets[n]];
        for (size_t v = 0; v < V; v++) {
            double slope = c != 0 ? 1 - (y[v] / c) * (y[v] / c) : 1;
            gradient[n * VP + v] =
                scale * ((1 + 2 * z * log(sum)) * exp(y[v]) / sum - (v == (size_t)targets[n])) * slope;
        }
    }
    run_twice({&logits, &losses}, [&] {
        classifier(losses.device(), logits.device(), targets_in.device(), masked ? mask_in.device() : NULL, rows,
                   CrossEntropy{V, VP, c, z, scale}, stream);
    });
    compare("losses", losses, loss, FORWARD);
    if (scale != 0) compare("gradient", logits, gradient, BACKWARD);
    else compare_untouched("logits have changed", logits, [](size_t) { return true; });
    // Also compares each gradient relative to its own size, because most of a row is small probabilities.
    double error = 0;
    for (size_t i = 0; i < rows * VP && scale != 0; i++) {
        double here = fabs(value_of(logits.at(i)) - gradient[i]) - half_ulp<X>(gradient[i]);
        if (fabs(gradient[i]) > 1e-30) error = worse(error, here / fabs(gradient[i]));
    }
    check("gradient, element by element", error, 1e-4);
    case_ends();
}

static void test_losses_sum(size_t N) {
    if (!case_begins("classifier losses_sum N=%zu", N)) return;
    Tensor<float> losses(N);
    Tensor<double> sum(1);
    Numbers x = fill(losses, "losses", 5, 5), expected = fill(sum, {3.5});
    for (double loss : x) expected[0] += loss;
    run_twice({&sum}, [&] { losses_sum(sum.device(), losses.device(), N, stream); });
    compare("sum", sum, expected, 1e-13);
    case_ends();
}

template <class X>
static void test_classifiers(void) {
    test_classifier<X>(1, 97, 5, false, 1.0f);
    test_classifier<X>(33, 97, 5, true, 0.01f);
    test_classifier<X>(33, 128, 80, false, 0.5f);
    test_classifier<X>(3, 97, 5, true, 0);
    test_classifier<X>(2, 2, 3, false, 1.0f);
    test_classifier<X>(2, 50257, 10, false, 1.0f);
    test_classifier<X>(2, 32000, 1, false, 1e-4f);
    test_classifier<X>(5, 97, 5, true, 0.5f, 0, 0.125f);
    test_classifier<X>(5, 97, 5, false, 0.5f, 4, 0);
    test_classifier<X>(5, 97, 5, true, 0, 4, 0.5f);
    test_classifier<X>(2, 32000, 20, false, 0.5f, 30, 0.03125f);
}

// ---------------------------------------------------------------------------------------------------------------------
// AdamW and the norm

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static uint16_t bits_of(bf16 x) {
    uint16_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// The expected bf16 copy of x, element i, as 16 bits.
static uint16_t rounded_bits(float x, size_t i, bool stochastic, uint64_t seed, uint64_t step) {
    if (!stochastic) return bits_of(__float2bfloat16_rn(x));
    uint32_t word = philox(seed, step, i / 8).words[(i % 8) / 2];
    return (uint16_t)((bits_of(x) + (word >> (i % 2 ? 16 : 0) & 0xFFFF)) >> 16);
}

enum { FLAT = 22000, SEED = 123456789 };

// Ranges of a flat array of FLAT elements: long, short and empty; with parameters and moments packed (as with several
// ranks) or not; at multiples of 8 or anywhere.
static std::vector<AdamSegment> make_segments(bool packed, bool odd) {
    static const size_t RANGES[][2] = {{16, 9016},    {9032, 9040},   {9100, 9100},
                                       {9104, 13200}, {13216, 13217}, {14000, 21987}};
    std::vector<AdamSegment> segments;
    size_t state = 0;
    for (size_t i = 0; i < sizeof RANGES / sizeof *RANGES; i++) {
        size_t from = RANGES[i][0] + (odd && RANGES[i][1] > RANGES[i][0] + 3 ? 3 : 0), to = RANGES[i][1];
        segments.push_back(
            {from, to, packed ? state + 16 : from, packed ? state : from, i % 3 == 0 ? 0.3 : 1, i % 2 == 0, 0});
        state += (to - from + 7) / 8 * 8 + (odd ? 1 : 0);
    }
    return segments;
}

static void expect_adamw(Numbers &p, Numbers &m, Numbers &v, const Numbers &g, const std::vector<AdamSegment> &segments,
                         double scale, AdamW a) {
    for (const AdamSegment &s : segments)
        for (size_t i = s.from, j = s.state, k = s.param; i < s.to; i++, j++, k++) {
            double x = g[i] * scale;
            m[j] = a.beta1 * m[j] + (1 - a.beta1) * x;
            v[j] = a.beta2 * v[j] + (1 - a.beta2) * x * x;
            double step =
                m[j] / (1 - pow(a.beta1, (double)a.step)) / (sqrt(v[j] / (1 - pow(a.beta2, (double)a.step))) + a.eps);
            p[k] -= s.lr_scale * a.lr * (step + (s.decay ? a.weight_decay * p[k] : 0));
        }
}

enum Copy { NO_COPY, NEAREST, STOCHASTIC };
static const char *const COPIES[] = {"", " bf16", " bf16 stochastic"};

// With finite = false, the step changes nothing, whatever the gradients are.
static void test_adamw(bool packed, bool odd, Copy copy, bool scaled, int64_t step, bool finite = true) {
    if (!case_begins("adamw%s%s%s%s step=%d%s", packed ? " packed" : "", odd ? " odd" : "", COPIES[copy],
                     scaled ? " scaled" : "", (int)step, finite ? "" : " not finite"))
        return;
    AdamW a = {1e-2, 0.9, 0.95, 1e-8, 0.1, step};
    float scale = scaled ? 0.5f : 1.0f;
    std::vector<AdamSegment> segments = make_segments(packed, odd);
    size_t blocks = segments_ready(segments.data(), segments.size());
    Tensor<AdamSegment> table(segments.size());
    Tensor<float> params(FLAT), mean(FLAT), square(FLAT), grads(FLAT);
    Tensor<bf16> rounded(FLAT);
    Tensor<StepNumbers> numbers(1);
    upload(table, segments);
    upload(numbers, {{finite ? 3.0 : NAN, 1, scale, finite}});
    Numbers p = fill(params, "p", 0, 1), m = fill(mean, "m", 0, 0.1), v = fill(square, "v", 0.2, 0.2),
            g = fill(grads, "g", 0, 1);
    if (finite) expect_adamw(p, m, v, g, segments, scale, a);
    run_twice({&params, &mean, &square, &rounded}, [&] {
        AdamArrays arrays = {params.device(), copy == NO_COPY ? NULL : rounded.device(),
                             mean.device(),   square.device(),
                             grads.device(),  numbers.device()};
        adamw(arrays, table.device(), segments.size(), blocks, a, copy == STOCHASTIC, SEED, stream);
    });
    compare("params", params, p, 1e-6);
    compare("mean", mean, m, 1e-6);
    compare("square", square, v, 1e-6);
    std::vector<bool> mine(FLAT), of_params(FLAT), of_moments(FLAT);
    std::vector<size_t> param(FLAT);
    for (const AdamSegment &s : segments)
        for (size_t i = s.from; i < s.to && finite; i++) {
            param[i] = s.param + (i - s.from);
            mine[i] = of_params[param[i]] = of_moments[s.state + (i - s.from)] = true;
        }
    compare_untouched("params outside of the ranges", params, [&](size_t i) { return !of_params[i]; });
    compare_untouched("moments outside of the ranges", mean, [&](size_t i) { return !of_moments[i]; });
    compare_untouched("squares outside of the ranges", square, [&](size_t i) { return !of_moments[i]; });
    compare_untouched("the copy outside of the ranges", rounded, [&](size_t i) { return !mine[i] || copy == NO_COPY; });
    size_t wrong = 0;
    double drift = 0;
    for (size_t i = 0; i < FLAT && copy != NO_COPY; i++) {
        if (!mine[i]) continue;
        float x = params.at(param[i]);
        wrong += bits_of(rounded.at(i)) != rounded_bits(x, i, copy == STOCHASTIC, SEED, (uint64_t)step);
        drift += (value_of(rounded.at(i)) - x) / FLAT;
    }
    check("elements of the copy that are wrong", (double)wrong, 0);
    check_true("the copy's errors have a mean", fabs(drift) < 5e-5);    // of 1e-3 each
    case_ends();
}

// Equals the copy that this step's update leaves, bit for bit.
static void test_round(size_t n, bool stochastic) {
    if (!case_begins("adamw parameters_round n=%zu%s", n, stochastic ? " stochastic" : "")) return;
    Tensor<float> params(n);
    Tensor<bf16> rounded(n);
    Numbers x = fill(params, "p", 0, 3);
    size_t half = n / 2 / ADAMW_WIDTH * ADAMW_WIDTH, end = n - n / 4;    // `end` is odd for some n
    run_twice({&rounded}, [&] {
        parameters_round(rounded.device(), params.device() + end, end, n, stochastic, SEED, 7, stream);
        parameters_round(rounded.device(), params.device() + half, half, end, stochastic, SEED, 7, stream);
        parameters_round(rounded.device(), params.device(), 0, half, stochastic, SEED, 7, stream);
    });
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) wrong += bits_of(rounded.at(i)) != rounded_bits((float)x[i], i, stochastic, SEED, 7);
    check("wrong elements", (double)wrong, 0);
    case_ends();
}

static void test_adamws(void) {
    test_adamw(false, false, NO_COPY, false, 1);
    test_adamw(false, false, NEAREST, true, 7);
    test_adamw(true, false, NEAREST, false, 1);
    test_adamw(false, true, NEAREST, true, 2);
    test_adamw(false, false, STOCHASTIC, true, 3);
    test_adamw(true, true, STOCHASTIC, true, 3);
    test_adamw(false, false, NEAREST, false, 3, false);
    test_adamw(false, false, STOCHASTIC, false, 3, false);
    for (size_t n : {1, 8, 5003})
        for (int stochastic = 0; stochastic < 2; stochastic++) test_round(n, stochastic);
}

// The kernels before and after the rounds of Newton-Schulz, which dev/tests/test_cuda.py tests. `odd`: no vectors.
// A matrix whose gradient and momentum are 0 only decays.
static void test_muon(size_t R, size_t C, bool odd, Copy copy, bool finite, double size = 1) {
    if (!case_begins("muon R=%zu C=%zu%s%s%s size=%g", R, C, odd ? " odd" : "", COPIES[copy],
                     finite ? "" : " not finite", size))
        return;
    AdamW a = {1e-2, 0.9, 0.95, 1e-8, 0.1, 3};
    size_t n = R * C, from = odd ? 13 : 16;
    Tensor<float> params(from + n), momentum(n), grads(n);
    Tensor<bf16> rounded(from + n), X(n);
    Tensor<double> sums(muon_blocks(n) + 1);
    Tensor<StepNumbers> numbers_in(1);
    Numbers p = fill(params, "p", 0, 1), m = fill(momentum, "m", 0, size), g = fill(grads, "g", 0, 2 * size), u(n);
    upload(numbers_in, std::vector<StepNumbers>{{1.0, 1.0, 0.5f, finite}});
    double squares = 0;
    for (size_t i = 0; i < n && finite; i++) {
        double step = 0.5 * g[i];
        m[i] = 0.95 * m[i] + 0.05 * step;
        u[i] = step + 0.95 * (m[i] - step);
        squares += u[i] * u[i];
    }
    MuonMatrix x = {R,
                    C,
                    from,
                    params.device() + from,
                    copy == NO_COPY ? NULL : rounded.device() + from,
                    momentum.device(),
                    grads.device()};
    run_twice({&momentum, &X}, [&] { muon_start(X.device(), x, sums.device(), numbers_in.device(), stream); });
    run_twice({&params, &rounded},
              [&] { muon_apply(x, X.device(), numbers_in.device(), a, copy == STOCHASTIC, SEED, stream); });
    double wrong = 0;
    for (size_t i = 0; i < n && finite; i++) {
        if (squares > 0) u[i] /= sqrt(squares);
        p[from + i] = (1 - 1e-3) * p[from + i] - 2e-3 * sqrt((double)(R > C ? R : C)) * value_of(X.at(i));
    }
    for (size_t i = from; i < from + n && finite && copy != NO_COPY; i++)
        wrong += bits_of(rounded.at(i)) != rounded_bits(params.at(i), i, copy == STOCHASTIC, SEED, 3);
    if (finite) compare("X", X, u, FORWARD);
    compare("momentum", momentum, m, FORWARD);
    compare("params", params, p, FORWARD);
    check("wrong elements of the copy", wrong, 0);
    case_ends();
}

static void test_muons(void) {
    test_muon(48, 40, false, NO_COPY, true);
    test_muon(40, 130, false, NEAREST, true);
    test_muon(31, 7, true, NEAREST, true);
    test_muon(96, 48, true, STOCHASTIC, true);
    test_muon(96, 48, false, STOCHASTIC, true);
    test_muon(40, 130, false, NEAREST, false);
    test_muon(8, 8, false, NEAREST, true, 0);
}

static void test_norm(bool odd, bool of_params, double size) {
    if (!case_begins("norms%s%s size=%g", odd ? " odd" : "", of_params ? " of parameters" : "", size)) return;
    std::vector<AdamSegment> segments = make_segments(true, odd);
    size_t blocks = segments_ready(segments.data(), segments.size());
    Tensor<AdamSegment> table(segments.size());
    Tensor<float> grads(FLAT);
    Tensor<double> partials(blocks), squares(1);
    Numbers g = fill(grads, "g", 0.1 * size, size), sum(1);
    upload(table, segments);
    for (const AdamSegment &s : segments)
        for (size_t i = 0, from = of_params ? s.param : s.from; i < s.to - s.from; i++)
            sum[0] += g[from + i] * g[from + i];
    run_twice({&partials, &squares}, [&] {
        gradient_squares(squares.device(), partials.device(), grads.device(), table.device(), segments.size(), blocks,
                         of_params, stream);
    });
    check("relative error", fabs(squares.at(0) - sum[0]) / sum[0], 1e-13);
    case_ends();
}

// The device's clip factor has the bits of the host's. A sum of squares that overflows, or a loss or square that is
// NaN, is not finite.
static void test_step_numbers(double loss, double squares, double clip) {
    if (!case_begins("norms numbers loss=%g squares=%g clip=%g", loss, squares, clip)) return;
    Tensor<double> sums(2);
    Tensor<StepNumbers> got(1);
    fill(sums, {loss, squares});
    run_twice({&got}, [&] { step_numbers(got.device(), sums.device(), sums.device() + 1, clip, stream); });
    StepNumbers n = got.at(0);
    double norm = sqrt(squares);
    check_true("finite", n.finite == (isfinite(loss) && isfinite(squares)));
    check_true("the loss", n.loss == loss || (isnan(n.loss) && isnan(loss)));
    check_true("the norm", n.norm == norm || (isnan(n.norm) && isnan(norm)));
    check_true("the scale", !n.finite || bits_of(n.scale) == bits_of((float)clip_scale(norm, clip)));
    check_true("the scale clips",
               !n.finite || (clip > 0 && norm > clip ? n.scale < 1 && fabs(n.scale * norm - clip) < 1e-5 * clip
                                                     : n.scale == 1 || fabs(norm - clip) < 2e-6));
    case_ends();
}

static void test_norms(void) {
    for (double clip : {0.0, 0.3, 1.0, 1e9})
        for (double squares : {0.0, 1e-30, 0.09, 0.1, 1.0, 7.3, 1e60}) test_step_numbers(5.5, squares, clip);
    for (double squares : {(double)NAN, (double)INFINITY}) test_step_numbers(5.5, squares, 1);
    for (double loss : {(double)NAN, (double)INFINITY, -(double)INFINITY}) test_step_numbers(loss, 7.3, 1);
    for (double size : {1.0, 1e-30, 1e30}) {    // squares of the last two are no floats
        test_norm(false, false, size);
        test_norm(false, true, size);
        test_norm(true, false, size);
    }
    if (case_begins("norms of nothing")) {
        Tensor<double> squares(1);
        run_twice({&squares}, [&] { gradient_squares(squares.device(), NULL, NULL, NULL, 0, 0, false, stream); });
        check_true("not 0", squares.at(0) == 0);
        case_ends();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The functions of cuda/gpu.cuh, one warp each (block sums: one block)

enum { STRIDE = 24 };    // elements from one row in shared memory to the next: 48 bytes, a multiple of 16

// Loads rows `rows[lane]` of a shared array (40, STRIDE) that counts up; returns the lanes' registers of both kinds, 4
// + 4.
template <class T>
KERNEL void ldmatrix_test_kernel(uint32_t *out, const T *rows) {
    SHARED_ARRAY(uint4, memory, 40 * STRIDE / 8);
    uint16_t *elements = (uint16_t *)memory;
    for (int i = threadIdx.x; i < 40 * STRIDE; i += 32) elements[i] = (uint16_t)i;
    __syncwarp();
    const uint16_t *row = elements + rows[threadIdx.x] * STRIDE;
    uint32_t *r = out + threadIdx.x * 8, x4[4], t4[4];
    ldmatrix_x4(x4, row);
    ldmatrix_x4_transposed(t4, row);
    for (int i = 0; i < 4; i++) {
        r[i] = x4[i];
        r[4 + i] = t4[i];
    }
}

static void test_ldmatrix(void) {
    if (!case_begins("wrappers ldmatrix")) return;
    Tensor<int32_t> rows_in(32);
    Tensor<uint32_t> out(32 * 8);
    std::vector<int32_t> rows(32);
    for (int l = 0; l < 32; l++) rows[l] = (l * 11 + 3) % 40;
    upload(rows_in, rows);
    run_twice({&out}, [&] {
        launch(ldmatrix_test_kernel<int32_t>, dim3(1), dim3(32), 0, stream, out.device(), rows_in.device());
    });
    size_t wrong = 0;
    for (int l = 0; l < 32; l++)
        for (int r = 0; r < 8; r++) {
            int matrix = r % 4;
            bool transposed = r >= 4;
            uint32_t word = 0;
            for (int half = 0; half < 2; half++) {
                int i = l / 4, j = 2 * (l % 4) + half;
                uint32_t element =
                    (uint32_t)(transposed ? rows[8 * matrix + j] * STRIDE + i : rows[8 * matrix + i] * STRIDE + j);
                word |= element << 16 * half;
            }
            wrong += out.at((size_t)(l * 8 + r)) != word;
        }
    check("wrong registers", (double)wrong, 0);
    case_ends();
}

// d += a (16,16) · b (16,8) of row-major matrices in global memory
template <class T>
KERNEL void mma_test_kernel(T *d, const bf16 *a, const bf16 *b) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t fa[4], fb[2];
    float fd[4];
    for (int i = 0; i < 4; i++) {
        int row = g + (i % 2) * 8, column = 2 * t + (i / 2) * 8;
        fa[i] = pack_bf16(to_float(a[row * 16 + column]), to_float(a[row * 16 + column + 1]));
    }
    for (int i = 0; i < 2; i++)
        fb[i] = pack_bf16(to_float(b[(2 * t + 8 * i) * 8 + g]), to_float(b[(2 * t + 8 * i + 1) * 8 + g]));
    for (int i = 0; i < 4; i++) fd[i] = d[(g + (i / 2) * 8) * 8 + 2 * t + i % 2];
    mma_m16n8k16(fd, fa, fb);
    for (int i = 0; i < 4; i++) d[(g + (i / 2) * 8) * 8 + 2 * t + i % 2] = fd[i];
}

// Small whole numbers, whose sums are exact; then fractions.
static void test_mma(bool whole) {
    if (!case_begins("wrappers mma %s", whole ? "exact" : "fractions")) return;
    Tensor<bf16> a(256), b(128);
    Tensor<float> d(128);
    Numbers x = numbers("a", 256, 0, 4), y = numbers("b", 128, 0, 4), z = numbers("d", 128, 0, 4);
    for (Numbers *n : {&x, &y, &z})
        for (double &v : *n) v = whole ? rint(v) : v;
    x = fill(a, x);
    y = fill(b, y);
    z = fill(d, z);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++)
            for (int k = 0; k < 16; k++) z[(size_t)(i * 8 + j)] += x[(size_t)(i * 16 + k)] * y[(size_t)(k * 8 + j)];
    run_twice({&d}, [&] {
        launch(mma_test_kernel<float>, dim3(1), dim3(32), 0, stream, d.device(), a.device(), b.device());
    });
    compare("d", d, z, whole ? 0 : 2e-6);
    case_ends();
}

// Two groups of copies, the second of which is waited for later. Odd lanes copy nothing, except into the third array,
// which belongs to the second group. out (3,32): the contents after each wait.
template <class T>
KERNEL void copy_async_test_kernel(T *out, const T *in) {
    SHARED_ARRAY(T, first, 32);
    SHARED_ARRAY(T, second, 32);
    SHARED_ARRAY(T, third, 32);
    int lane = threadIdx.x;
    copy_async_16(&first[lane], &in[lane], lane % 2 == 0);
    copy_async_commit();
    copy_async_16(&second[lane], &in[31 - lane], lane % 2 == 0);
    copy_async_16(&third[lane], &in[lane]);
    copy_async_commit();
    copy_async_wait<1>();
    __syncwarp();
    out[lane] = first[lane ^ 2];
    copy_async_wait<0>();
    __syncwarp();
    out[32 + lane] = second[lane ^ 2];
    out[64 + lane] = third[lane ^ 2];
}

static void test_copy_async(void) {
    if (!case_begins("wrappers copy_async")) return;
    Tensor<uint4> in(32), out(96);
    std::vector<uint4> x(32);
    for (unsigned i = 0; i < 32; i++) x[i] = make_uint4(4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4);
    upload(in, x);
    run_twice({&out},
              [&] { launch(copy_async_test_kernel<uint4>, dim3(1), dim3(32), 0, stream, out.device(), in.device()); });
    size_t wrong = 0;
    for (unsigned i = 0; i < 96; i++) {
        unsigned from = i % 32 ^ 2;
        bool valid = from % 2 == 0 || i >= 64;
        uint4 got = out.at(i), expected = valid ? x[i / 32 == 1 ? 31 - from : from] : make_uint4(0, 0, 0, 0);
        wrong += memcmp(&got, &expected, sizeof got) != 0;
    }
    check("wrong copies", (double)wrong, 0);
    case_ends();
}

template <class T>
KERNEL void functions_test_kernel(T *exp2s, T *logs, T *reciprocals, T *rectified, const T *in, size_t n) {
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        exp2s[i] = exp2_fast(in[i]);
        logs[i] = log2_fast(in[i]);
        reciprocals[i] = reciprocal_fast(in[i]);
        rectified[i] = max_nan(in[i], 0);
    }
}

// Bounds: the PTX ISA's, 2^-22 relative for ex2 and lg2 (absolute for lg2 between 0.5 and 2), 1 ulp for rcp.
static void test_functions(void) {
    if (!case_begins("wrappers exp2_fast, log2_fast, reciprocal_fast, max_nan")) return;
    Numbers x = numbers("x", 4000, 0, 126);
    for (size_t i = 1000; i < 2000; i++) x[i] /= 100;
    for (size_t i = 2000; i < 3000; i++) x[i] = exp2(x[i]);
    const double SPECIAL[] = {0, 1, -1, 2, 0.5, 128, -127.5, -200, INFINITY, -INFINITY, NAN, 1e30};
    x.insert(x.end(), std::begin(SPECIAL), std::end(SPECIAL));
    Tensor<float> in(x.size()), exp2s(x.size()), logs(x.size()), reciprocals(x.size()), rectified(x.size());
    x = fill(in, x);
    run_twice({&exp2s, &logs, &reciprocals, &rectified}, [&] {
        launch(functions_test_kernel<float>, dim3(1), dim3(32), 0, stream, exp2s.device(), logs.device(),
               reciprocals.device(), rectified.device(), in.device(), x.size());
    });
    double error[3] = {};
    bool special = true, larger = true;
    for (size_t i = 0; i < x.size(); i++) {
        double e = value_of(exp2s.at(i)), l = value_of(logs.at(i)), r = value_of(reciprocals.at(i));
        double m = value_of(rectified.at(i));
        larger = larger && (isnan(x[i]) ? isnan(m) : m == (x[i] > 0 ? x[i] : 0));
        double e_true = exp2(x[i]), l_true = log2(x[i]), r_true = 1 / x[i];
        if (isnan(x[i])) special = special && isnan(e) && isnan(l) && isnan(r);
        else if (x[i] >= 128) special = special && isinf(e) && e > 0;
        else if (x[i] < -126) special = special && e == 0;
        else error[0] = worse(error[0], fabs(e - e_true) / e_true);
        if (x[i] < 0) special = special && isnan(l);
        else if (x[i] == 0) special = special && isinf(l) && l < 0 && isinf(r);
        else if (isinf(x[i])) special = special && isinf(l) && l > 0 && r == 0;
        else if (x[i] > 0) error[1] = worse(error[1], fabs(l - l_true) / (x[i] > 0.5 && x[i] < 2 ? 1 : fabs(l_true)));
        if (isfinite(x[i]) && fabs(x[i]) > 0x1p-125 && fabs(x[i]) < 0x1p125)
            error[2] = worse(error[2], fabs(r - r_true) * fabs(x[i]));
    }
    check("exp2_fast", error[0], 0x1p-22);
    check("log2_fast", error[1], 0x1p-22);
    check("reciprocal_fast", error[2], 0x1p-23);
    check_true("infinities, NaN, 0, and values that are too large or too small", special);
    check_true("max_nan is not the larger one, or drops NaN", larger);
    case_ends();
}

// pairs (n): two floats packed; halves (n, 2): unpacked again; set (n): set_float() of the first
template <class T>
KERNEL void pack_test_kernel(uint32_t *pairs, T *halves, bf16 *set, T *packs, const T *in, const uint4 *sixteen,
                             size_t n) {
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        uint32_t pair = pack_bf16(in[i], in[(i + 1) % n]);
        pairs[i] = pair;
        halves[2 * i] = unpack_low(pair);
        halves[2 * i + 1] = unpack_high(pair);
        set_float(set[i], in[i]);
    }
    if (threadIdx.x > 0) return;
    Pack<bf16> eight;
    Pack<float> four;
    unpack_16(eight, sixteen[0]);
    unpack_16(four, sixteen[1]);
    for (int i = 0; i < 8; i++) packs[i] = eight.x[i];
    for (int i = 0; i < 4; i++) packs[8 + i] = four.x[i];
    uint4 again[2] = {pack_16(eight), pack_16(four)};
    unpack_16(four, again[0]);
    for (int i = 0; i < 4; i++) packs[12 + i] = four.x[i];    // the bits of the eight
    unpack_16(four, again[1]);
    for (int i = 0; i < 4; i++) packs[16 + i] = four.x[i];
}

// Rounds to the nearest bf16, ties to even, by arithmetic on the bits.
static uint32_t nearest_bits(float x) {
    uint32_t word = bits_of(x);
    if (isnan(x)) return 0x7FFF;
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16;
}

static void test_pack(void) {
    if (!case_begins("wrappers pack, unpack, set_float")) return;
    Numbers x = numbers("x", 200, 0, 10);
    const double SPECIAL[] = {0.0,      -0.0,     1.00390625, 1.01171875, -1.00390625, 3.4e38,
                              -3.39e38, INFINITY, -INFINITY,  1e-40,      NAN};
    x.insert(x.end(), std::begin(SPECIAL), std::end(SPECIAL));
    size_t n = x.size();
    Tensor<float> in(n), halves(2 * n), packs(20);
    Tensor<uint32_t> pairs(n);
    Tensor<bf16> set(n);
    Tensor<uint4> sixteen(2);
    std::vector<uint4> bits(2);
    float values[4] = {1.5f, -2.25f, 1e-20f, 7.0f};
    uint16_t eight[8];
    for (int i = 0; i < 8; i++) eight[i] = bits_of(__float2bfloat16_rn(0.37f * (float)i - 1.1f));
    memcpy(&bits[0], eight, 16);
    memcpy(&bits[1], values, 16);
    x = fill(in, x);
    upload(sixteen, bits);
    run_twice({&pairs, &halves, &set, &packs}, [&] {
        launch(pack_test_kernel<float>, dim3(1), dim3(32), 0, stream, pairs.device(), halves.device(), set.device(),
               packs.device(), in.device(), sixteen.device(), n);
    });
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t low = nearest_bits((float)x[i]), high = nearest_bits((float)x[(i + 1) % n]);
        wrong += pairs.at(i) != (low | high << 16);
        wrong += bits_of(halves.at(2 * i)) != low << 16 || bits_of(halves.at(2 * i + 1)) != high << 16;
        wrong += bits_of(set.at(i)) != low;
    }
    for (size_t i = 0; i < 8; i++) wrong += bits_of(packs.at(i)) != (uint32_t)eight[i] << 16;
    for (size_t i = 0; i < 4; i++) wrong += packs.at(8 + i) != values[i] || packs.at(16 + i) != values[i];
    wrong += memcmp(packs.now.data() + 12 * sizeof(float), eight, sizeof eight) != 0;
    check("wrong bits", (double)wrong, 0);
    case_ends();
}

// results (threads, 5): warp_sum, warp_max, block_sum, block_max, and block_sum again, for x and -x
template <class T>
KERNEL void sums_test_kernel(T *results, const T *in) {
    T x = in[threadIdx.x], *r = results + threadIdx.x * 5;
    r[0] = warp_sum(x);
    r[1] = warp_max(x);
    r[2] = block_sum(x);
    r[3] = block_max(x);
    r[4] = block_sum(-x);
}

static void test_sums(size_t threads) {
    if (!case_begins("wrappers sums over %zu threads", threads)) return;
    Tensor<float> in(threads), results(threads * 5);
    Numbers x = numbers("x", threads, -100, 50);
    // Sums are exact, and all values negative, so that a maximum that starts at 0 is detected.
    for (double &v : x) v = rint(v);
    x = fill(in, x);
    dim3 block((unsigned)threads);
    run_twice({&results},
              [&] { launch(sums_test_kernel<float>, dim3(1), block, 0, stream, results.device(), in.device()); });
    Numbers expected(threads * 5);
    double sum = 0, largest = -INFINITY;
    for (double v : x) {
        sum += v;
        largest = fmax(largest, v);
    }
    for (size_t i = 0; i < threads; i++) {
        double of_warp = 0, largest_of_warp = -INFINITY;
        for (size_t j = (i / 32) * 32; j < (i / 32) * 32 + 32; j++) {
            of_warp += x[j];
            largest_of_warp = fmax(largest_of_warp, x[j]);
        }
        double all[] = {of_warp, largest_of_warp, sum, largest, -sum};
        memcpy(&expected[i * 5], all, sizeof all);
    }
    compare("results", results, expected, 0);
    case_ends();
}

#include "dev/tests/hopper_wrappers.cuh"

static void test_wrappers(void) {
    test_ldmatrix();
    test_mma(true);
    test_mma(false);
    test_copy_async();
    test_functions();
    test_pack();
    for (size_t threads : {32, 96, 1024}) test_sums(threads);
    test_hopper();
}

// ---------------------------------------------------------------------------------------------------------------------
// Unsupported shapes are rejected before any work, with EXIT_USAGE and the wrong number

static void test_refusals(void) {
    static const struct {
        const char *what, *says;
        void (*call)(void *);
    } CASES[] = {
        // clang-format off
        {"an odd head size", "head size of 5",
         [](void *) { rope_forward<float>(NULL, NULL, Rope{1, 1, 1, 1, 5, NULL, NULL, false}, stream); }},
        {"too many channels", "24580 channels",
         [](void *) { rmsnorm_backward<float>({}, {}, NULL, NULL, {NULL, NULL, NULL, 1, 24580}, stream); }},
        {"a head too wide for QK norms", "head size of 258",
         [](void *) { qk_norm_forward<float>(NULL, NULL, NULL, QkNorm{1, 1, 1, 258, 1e-5f, NULL, NULL}, stream); }},
        {"a gated unit too wide", "width 130",
         [](void *) { gau_forward<bf16>({}, GauGains(), Rope{1, 1, 1, 1, 130, NULL, NULL, false}, 8, stream); }},
        {"a vocabulary without padding", "97 logits",
         [](void *) { classifier<bf16>(NULL, NULL, NULL, NULL, 1, CrossEntropy{97, 97, 0, 0, 1.0f}, stream); }},
        // clang-format on
    };
    for (const auto &c : CASES) {
        char output[1024];
        if (!case_begins("refused: %s", c.what)) continue;
        int code = check_fork(c.call, NULL, output, sizeof output);
        check("exit code", fabs((double)code - EXIT_USAGE), 0);
        check_true(output, strstr(output, c.says) != NULL);
        case_ends();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The peaks of GPUs, from the device properties: the vendor's figures, within 1 %

static void test_peaks(void) {
    static const struct {
        Device device;
        double bf16, fp32;    // TFLOP/s, dense
    } CASES[] = {
        // clang-format off
        {{"NVIDIA A100-SXM4-80GB", 8, 0, 108, 1.410e9}, 312, 19.5},
        {{"NVIDIA A40", 8, 6, 84, 1.740e9}, 149.7, 37.4},
        {{"NVIDIA A10", 8, 6, 72, 1.695e9}, 125, 31.2},
        {{"NVIDIA GeForce RTX 3090", 8, 6, 82, 1.695e9}, 71, 35.6},
        {{"NVIDIA GeForce RTX 4090", 8, 9, 128, 2.520e9}, 165.2, 82.6},
        {{"NVIDIA RTX 6000 Ada Generation", 8, 9, 142, 2.505e9}, 364, 91.1},
        {{"NVIDIA L40S", 8, 9, 142, 2.520e9}, 362, 91.6},
        {{"NVIDIA L4", 8, 9, 58, 2.040e9}, 121, 30.3},
        {{"NVIDIA H100 80GB HBM3", 9, 0, 132, 1.980e9}, 989, 67},
        {{"NVIDIA H100 PCIe", 9, 0, 114, 1.755e9}, 756, 51.2},
        {{"NVIDIA H200", 9, 0, 132, 1.980e9}, 989, 67},
        {{"a future GPU", 99, 0, 100, 2.000e9}, 204.8, 51.2},      // not in the table: 1024 and 256 per clock
        // clang-format on
    };
    for (const auto &c : CASES) {
        if (!case_begins("peak of %s", c.device.name)) continue;
        check("bf16", fabs(1e-12 * device_peak(&c.device, true) / c.bf16 - 1), 0.01);
        check("float32", fabs(1e-12 * device_peak(&c.device, false) / c.fp32 - 1), 0.01);
        case_ends();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// phi of attention, at every bf16 z

// For each z, given by its bits: f and slope together from phi_at; alone: f without the slope, and the slope without f
template <class X, int PHI, int KIND>
KERNEL void phi_test_kernel(float *f, float *slope, float *f_alone, float *slope_alone, bool divide) {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < 1 << 16; i += gridDim.x * blockDim.x) {
        float z = __uint_as_float(i << 16) * unit<X, PHI>, nothing;
        phi_at<X, PHI, KIND, BOTH>(z, 1, &f[i], &slope[i], divide);
        phi_at<X, PHI, KIND, VALUE>(z, 1, &f_alone[i], &nothing, divide);
        phi_at<X, PHI, KIND, SLOPE>(z, 1, &nothing, &slope_alone[i], divide);
        f[i] /= value_unit<X, PHI>;
        f_alone[i] /= value_unit<X, PHI>;
    }
}

struct PhiTruth {
    double f, slope;
    double f_scale, slope_scale;    // to which an error is relative
};

// NaN for a phi without a formula of its own in phi.cuh: it uses phi_both, which test_gradients checks.

static PhiTruth phi_truth(int kind, double z) {
    double e = exp(z), sigmoid = 1 / (1 + exp(-z)), positive = z > 0 ? z : 0, f = 0, slope = 0, by = 0;
    switch (kind) {
    case PHI_EXP: f = slope = e; break;
    case PHI_EXPM1:
        f = expm1(z);
        slope = e;
        by = 1;
        break;
    case PHI_IDENTITY:
        f = z;
        slope = 1;
        break;
    case PHI_RELU:
        f = positive;
        slope = z > 0;
        break;
    case PHI_RELU2:
        f = positive * positive;
        slope = 2 * positive;
        break;
    case PHI_RELU6:
        f = positive < 6 ? positive : 6;
        slope = z > 0 && z < 6;
        break;
    case PHI_GELU:
        by = erfc(-z / sqrt(2)) / 2;
        f = z * by;
        slope = by + z * exp(-z * z / 2) / sqrt(2 * M_PI);
        break;
    case PHI_SIGMOID:
        f = sigmoid;
        slope = sigmoid / (1 + e);
        break;
    case PHI_SOFTPLUS:
        f = positive + log1p(exp(-fabs(z)));
        slope = sigmoid;
        break;
    case PHI_MISH: {
        double softplus = positive + log1p(exp(-fabs(z)));
        by = tanh(softplus);
        f = z * by;
        slope = by + z * sigmoid / pow(cosh(fmin(softplus, 300)), 2);
        break;
    }
    default: f = NAN;
    }
    return {f, slope, fabs(f) + (kind == PHI_EXPM1 ? e + 1 : 0), fabs(slope) + by};
}

// The bounds stated in attention/phi.cuh; in float32, the effect of 2^-24 of z on exp(z).
template <class X>
static double phi_bound(int kind) {
    bool by_polynomial = kind == PHI_SIGMOID || kind == PHI_SOFTPLUS || kind == PHI_GELU || kind == PHI_MISH;
    return is_bf16<X> && by_polynomial ? 0x1p-13 : 0x1p-17;
}

// NaN: any result is accepted, because the formula z g(z) has no value there.
static double phi_at_infinity(int kind, double z) {
    if (kind == PHI_GELU || kind == PHI_MISH) return NAN;
    double above = kind == PHI_RELU6 ? 6 : 1, below = kind == PHI_EXPM1 ? -1 : 0;
    if (kind == PHI_SIGMOID || kind == PHI_RELU6) return z < 0 ? 0 : above;
    return z > 0 || kind == PHI_IDENTITY ? z : below;
}

// The largest z that is tested. Beyond 2e38, z in units of ln 2 is infinite. Mish stops earlier: beyond 20 (in bf16,
// 40) its slope uses a constant close to 0, which is multiplied by z.
template <class X>
static double largest_z(int kind) {
    if (kind != PHI_MISH) return 2e38;
    return is_bf16<X> ? 1e30 : 1e9;
}

// The worst error divided by the bound.
static void check_phi(const char *what, double got, double truth, double allowed, double *worst_of) {
    if (fabs(truth) > FLT_MAX) return check_true(what, isinf(got));
    double error = fabs(got - truth) / allowed;
    if (!(error <= *worst_of)) *worst_of = error;
}

template <class X, int PHI, int KIND>
static void test_phi(const char *name, bool divide) {
    if (isnan(phi_truth(KIND, 0.5).f)) return;
    if (!case_begins("phi %s %s%s%s", type_name<X>(), name, PHI < 0 ? " at run time" : "", divide ? " divided" : ""))
        return;
    Tensor<float> f(1 << 16), slope(1 << 16), f_alone(1 << 16), slope_alone(1 << 16);
    run_twice({&f, &slope, &f_alone, &slope_alone}, [&] {
        launch(phi_test_kernel<X, PHI, KIND>, dim3(8), dim3(64), 0, stream, f.device(), slope.device(),
               f_alone.device(), slope_alone.device(), divide);
    });
    double bound = phi_bound<X>(KIND), error[4] = {};
    for (uint32_t i = 0; i < 1 << 16; i++) {
        float z;
        uint32_t bits = i << 16;
        memcpy(&z, &bits, sizeof z);
        double got[] = {f.at(i), f_alone.at(i), slope.at(i), slope_alone.at(i)};
        for (int j = 0; j < 2; j++) {
            if (isnan(z)) check_true("a NaN", isnan(got[j]));
            if (isinf(z)) check_true("infinity", got[j] == phi_at_infinity(KIND, z) || isnan(phi_at_infinity(KIND, z)));
        }
        if (!(fabs(z) <= largest_z<X>(KIND))) continue;
        PhiTruth truth = phi_truth(KIND, z);
        // exp(z) may be flushed to 0.
        double rest = (is_bf16<X> ? 0 : 0x1p-23) + (1 + fmin(fabs(z), 200)) * FLT_MIN;
        // Far below 0, only the magnitude of gelu is right: phi(-9) = -1e-18, and its slope at -7 is -6e-11.
        double far_f = KIND == PHI_GELU && z < -9 ? 1e-18 : 0, far_slope = KIND == PHI_GELU && z < -7 ? 1e-12 : 0;
        double of_f = bound * truth.f_scale + rest + far_f, of_slope = 2 * bound * truth.slope_scale + rest + far_slope;
        check_phi("phi", got[0], truth.f, of_f, &error[0]);
        check_phi("phi alone", got[1], truth.f, of_f, &error[1]);
        check_phi("slope", got[2], truth.slope, of_slope, &error[2]);
        check_phi("slope alone", got[3], truth.slope, of_slope, &error[3]);
    }
    check("phi, relative to its bound", error[0], 1);
    check("phi alone, relative to its bound", error[1], 1);
    check("slope, relative to its bound", error[2], 1);
    check("slope alone, relative to its bound", error[3], 1);
    case_ends();
}

// sigmoids() (4) of each z, among other values: -z, z/3 and -7, or z again.
template <class T>
KERNEL void sigmoids_test_kernel(T *out, bool same) {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < 1 << 16; i += gridDim.x * blockDim.x) {
        const float z = __uint_as_float(i << 16) * unit<bf16, PHI_SIGMOID>;
        float four[4] = {z, same ? z : -z, same ? z : z / 3, same ? z : -7};
        sigmoids(four);
        UNROLL
        for (int j = 0; j < 4; j++) out[4 * i + j] = four[j];
    }
}

static void test_sigmoids(bool same) {
    if (!case_begins("phi bf16 sigmoid, four %s with one division", same ? "equal" : "different")) return;
    Tensor<float> out(4 << 16);
    double worst = 0;
    run_twice({&out}, [&] { launch(sigmoids_test_kernel<float>, dim3(8), dim3(64), 0, stream, out.device(), same); });
    for (uint32_t i = 0; i < 1 << 16; i++) {
        float z;
        const uint32_t bits = i << 16;
        memcpy(&z, &bits, sizeof z);
        const double four[] = {z, same ? z : -z, same ? z : z / 3, same ? z : -7 * M_LN2};
        for (size_t j = 0; j < 4; j++) {
            const double got = out.at(4 * i + j), truth = 1 / (1 + exp(-four[j]));
            if (isnan(z)) check_true("a NaN", isnan(got));
            else check_phi("sigmoid", got, truth, 0x1p-17 * truth + 100 * FLT_MIN, &worst);
        }
    }
    check("relative to its bound", worst, 1);
    case_ends();
}

static void test_phis(void) {
    test_sigmoids(false);
    test_sigmoids(true);
#define TEST(kind, name, ...) \
    test_phi<bf16, kind, kind>(name, false); \
    test_phi<bf16, kind, kind>(name, true); \
    test_phi<bf16, -1, kind>(name, false); \
    test_phi<float, -1, kind>(name, false);
    PHI_VALUES(TEST)
#undef TEST
}

// ---------------------------------------------------------------------------------------------------------------------

template <class X>
static void test_layers(void) {
    test_rmsnorms<X>();
    test_ropes<X>();
    test_biases<X>();
    test_qk_norms<X>();
    test_scores<X>();
    test_output_gates<X>();
    test_swiglus<X>();
    test_gaus<X>();
    test_embeddings<X>();
    test_classifiers<X>();
}

int main(int argc, char **argv) {
    program_name = "test_kernels";
    if (argc > 1) filter = argv[1];
    test_wrappers();
    test_layers<float>();
    test_layers<bf16>();
    test_embedding_order();
    for (size_t N : {1, 33, 2000}) test_losses_sum(N);
    test_phis();
    test_adamws();
    test_muons();
    test_norms();
    test_refusals();
    test_peaks();
    return check_verdict();
}

// vecmath: the vector functions on the floats of their ranges, against libm in double; their limits; NaNs of every
// kind. Each is called in a loop under `omp simd`, so that the vectorized code is tested.
#include <math.h>

#include "dev/tests/check.h"
#include "math/vecmath.h"

enum { CHUNK = 4096 };

// y[i] = f(x[i], p)
typedef void (*Loop)(float *y, const float *x, float p);
typedef double (*Exact)(double x, double p);

#define LOOP(name, expression)                                           \
    static void name(float *restrict y, const float *restrict x, float p) { \
        (void)p;                                                         \
        _Pragma("omp simd") for (int i = 0; i < CHUNK; i++) y[i] = expression; \
    }
LOOP(exp_loop, vec_exp(x[i]))
LOOP(sigmoid_loop, vec_sigmoid(x[i]))
LOOP(tanh_loop, vec_tanh(x[i]))
LOOP(log_loop, vec_log(x[i]))
LOOP(log1p_loop, vec_log1p01(x[i]))
LOOP(pow01_loop, vec_pow01(x[i], p))
LOOP(cdf_gauss_loop, vec_normal_cdf(x[i], vec_exp(x[i] * x[i] * -0.5f)))

// Passes a gauss that is correct to half a unit in the last place, so that only the function's own error is measured.
static void cdf_loop(float *restrict y, const float *restrict x, float p) {
    (void)p;
    float gauss[CHUNK];
    for (int i = 0; i < CHUNK; i++) gauss[i] = (float)exp(-0.5 * x[i] * x[i]);
#pragma omp simd
    for (int i = 0; i < CHUNK; i++) y[i] = vec_normal_cdf(x[i], gauss[i]);
}

#define EXACT(name, expression)                \
    static double name(double x, double p) {   \
        (void)p;                               \
        return expression;                     \
    }
EXACT(exp_exact, exp(x))
EXACT(sigmoid_exact, 1 / (1 + exp(-x)))
EXACT(tanh_exact, tanh(x))
EXACT(log_exact, log(x))
EXACT(log1p_exact, log1p(x))
EXACT(pow_exact, pow(x, p))
EXACT(cdf_exact, erfc(-x / sqrt(2)) / 2)

static float one(Loop f, float x, float p) {
    float in[CHUNK], out[CHUNK];
    for (int i = 0; i < CHUNK; i++) in[i] = x;
    f(out, in, p);
    return out[CHUNK - 1];
}

// The largest relative error on every stride-th float between from and to (of one sign, |from| < |to|), if the exact
// result is above `least`; infinite if the function gives a NaN. If the exact result is 0, the function must give 0.
static double worst(Loop f, Exact exact, float p, float from, float to, uint32_t stride, double least) {
    float x[CHUNK], y[CHUNK];
    double largest = 0;
    for (uint64_t bits = vec_bits(from), end = vec_bits(to); bits <= end;) {
        for (int i = 0; i < CHUNK; i++, bits += stride) x[i] = vec_from_bits((uint32_t)(bits <= end ? bits : end));
        f(y, x, p);
        for (int i = 0; i < CHUNK; i++) {
            double right = exact(x[i], p);
            if (fabs(right) < least) continue;
            double error = right == 0 ? (y[i] == 0 ? 0 : INFINITY) : fabs(y[i] - right) / fabs(right);
            if (!(error <= largest)) largest = isnan(error) ? INFINITY : error;
        }
    }
    return largest;
}

#define WITHIN(bound, ...)                                             \
    do {                                                               \
        double error_ = worst(__VA_ARGS__);                            \
        CHECK(error_ <= (bound), "%s: error %.3g, bound %.3g", #__VA_ARGS__, error_, (double)(bound)); \
    } while (0)

#define EQUAL(f, x, p, right)                                                          \
    do {                                                                               \
        float y_ = one(f, x, p);                                                       \
        CHECK(y_ == (right), "%s at %.9g: %.9g, not %.9g", #f, (double)(x), (double)y_, (double)(right)); \
    } while (0)

// Quiet and signaling, both signs, payloads with all bits and with single bits, because the functions take exponents
// apart as integers.
static void check_nan(Loop f, const char *name) {
    const uint32_t nans[] = {0x7FC00000u, 0xFFC00000u, 0x7FFFFFFFu, 0xFFFFFFFFu,
                             0x7F800001u, 0xFF800001u, 0x7FC00100u, 0xFFAAAAABu};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        float y = one(f, vec_from_bits(nans[i]), 15.0f);
        CHECK(isnan(y), "%s(NaN %08x) is %g", name, nans[i], (double)y);
    }
}

static void test_exp(void) {
    check_group("exp, sigmoid and tanh");
    WITHIN(1e-7, exp_loop, exp_exact, 0, 0.0f, 88.722f, 251, 0);
    WITHIN(1e-7, exp_loop, exp_exact, 0, -0.0f, -87.336f, 251, 0);
    EQUAL(exp_loop, 0.0f, 0, 1.0f);
    EQUAL(exp_loop, -87.34f, 0, 0.0f);
    EQUAL(exp_loop, -1e30f, 0, 0.0f);
    EQUAL(exp_loop, -INFINITY, 0, 0.0f);
    EQUAL(exp_loop, 88.73f, 0, INFINITY);
    EQUAL(exp_loop, 1e30f, 0, INFINITY);
    EQUAL(exp_loop, INFINITY, 0, INFINITY);
    check_nan(exp_loop, "exp");
    WITHIN(3e-7, sigmoid_loop, sigmoid_exact, 0, 0.0f, 200.0f, 251, 0);
    WITHIN(3e-7, sigmoid_loop, sigmoid_exact, 0, -0.0f, -87.0f, 251, 0);
    EQUAL(sigmoid_loop, -INFINITY, 0, 0.0f);
    EQUAL(sigmoid_loop, INFINITY, 0, 1.0f);
    check_nan(sigmoid_loop, "sigmoid");
    WITHIN(3e-7, tanh_loop, tanh_exact, 0, FLT_MIN, 100.0f, 251, 0);
    WITHIN(3e-7, tanh_loop, tanh_exact, 0, -FLT_MIN, -100.0f, 251, 0);
    WITHIN(3e-7, tanh_loop, tanh_exact, 0, 0.5f, 0.75f, 1, 0);
    EQUAL(tanh_loop, 0.0f, 0, 0.0f);
    EQUAL(tanh_loop, INFINITY, 0, 1.0f);
    EQUAL(tanh_loop, -INFINITY, 0, -1.0f);
    check_nan(tanh_loop, "tanh");
}

static void test_log(void) {
    check_group("log");
    WITHIN(1.2e-7, log_loop, log_exact, 0, FLT_MIN, FLT_MAX, 251, 0);
    // Where f² · Q(f) is largest, and near the zero.
    WITHIN(1.2e-7, log_loop, log_exact, 0, 0.5f, 2.0f, 13, 0);
    WITHIN(1.2e-7, log_loop, log_exact, 0, 0.9999f, 1.0001f, 1, 0);
    EQUAL(log_loop, 1.0f, 0, 0.0f);
    EQUAL(log_loop, 0.0f, 0, -INFINITY);
    EQUAL(log_loop, -0.0f, 0, -INFINITY);
    EQUAL(log_loop, FLT_MIN / 2, 0, -INFINITY);
    EQUAL(log_loop, INFINITY, 0, INFINITY);
    CHECK(isnan(one(log_loop, -FLT_MIN, 0)) && isnan(one(log_loop, -1.0f, 0)) && isnan(one(log_loop, -INFINITY, 0)),
          "log below 0");
    check_nan(log_loop, "log");
}

static void test_log1p(void) {
    check_group("log1p on [0, 1]");
    WITHIN(1.8e-7, log1p_loop, log1p_exact, 0, 0.0f, 1.0f, 251, 0);
    WITHIN(1.8e-7, log1p_loop, log1p_exact, 0, 0.03125f, 1.0f, 11, 0);
    EQUAL(log1p_loop, 0.0f, 0, 0.0f);
    EQUAL(log1p_loop, 1.4e-45f, 0, 1.4e-45f);
    check_nan(log1p_loop, "log1p");
}

static void test_pow01(void) {
    check_group("pow on [0, 1]");
    const float powers[] = {1e-3f, 0.1f, 0.5f, 1, 1.5f, 2, 3, 7.3f, 15, 33.333332f, 77.7f, 100, 150.15f, 200};
    const double results[] = {1e-1, 1e-3, 1e-6, 1e-10, 1e-15, 1e-20, 1e-25, 1e-30, 1e-37};
    for (size_t i = 0; i < sizeof powers / sizeof *powers; i++) {
        float p = powers[i];
        for (size_t j = 0; j < sizeof results / sizeof *results; j++) {
            double least = results[j], bound = 1.2e-7 - 5e-8 * log(least);
            if (p <= 100 && least >= 1e-30) bound = fmin(bound, 1.8e-6);
            float from = (float)fmax(FLT_MIN, pow(least, 1 / (double)p));
            double error = worst(pow01_loop, pow_exact, p, from, 1.0f, from > 1e-3f ? 211 : 4001, least);
            CHECK(error <= bound, "x^%g above %g: error %.3g, bound %.3g", (double)p, least, error, bound);
        }
        EQUAL(pow01_loop, 0.0f, p, 0.0f);
        EQUAL(pow01_loop, -0.0f, p, 0.0f);
        EQUAL(pow01_loop, FLT_MIN / 2, p, 0.0f);
        EQUAL(pow01_loop, -1.0f, p, 0.0f);
        EQUAL(pow01_loop, 1.0f, p, 1.0f);
    }
    EQUAL(pow01_loop, 0.4f, 100, 0.0f);    // 1.6e-40
    EQUAL(pow01_loop, FLT_MIN, 200, 0.0f);
    EQUAL(pow01_loop, 0.5f, 1e30f, 0.0f);
    EQUAL(pow01_loop, 1.0f, 1e30f, 1.0f);
    check_nan(pow01_loop, "pow");
}

static void test_normal_cdf(void) {
    check_group("the normal distribution function");
    WITHIN(5e-7, cdf_loop, cdf_exact, 0, 0.0f, 12.0f, 251, 0);
    WITHIN(5e-7, cdf_loop, cdf_exact, 0, -0.0f, -12.0f, 251, 0);
    WITHIN(5e-7, cdf_loop, cdf_exact, 0, -0.25f, -12.0f, 11, 0);
    WITHIN(5e-6, cdf_gauss_loop, cdf_exact, 0, -0.0f, -12.0f, 251, 0);    // plus 6e-8 · z²/2
    EQUAL(cdf_gauss_loop, 0.0f, 0, 0.5f);
    EQUAL(cdf_gauss_loop, -13.5f, 0, 0.0f);
    EQUAL(cdf_gauss_loop, -1e30f, 0, 0.0f);
    EQUAL(cdf_gauss_loop, -INFINITY, 0, 0.0f);
    EQUAL(cdf_gauss_loop, 13.5f, 0, 1.0f);
    EQUAL(cdf_gauss_loop, 1e30f, 0, 1.0f);
    EQUAL(cdf_gauss_loop, INFINITY, 0, 1.0f);
    check_nan(cdf_gauss_loop, "Phi");
}

int main(void) {
    test_exp();
    test_log();
    test_log1p();
    test_pow01();
    test_normal_cdf();
    return check_verdict();
}

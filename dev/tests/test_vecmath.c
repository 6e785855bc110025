// The elementary functions of runtime/vecmath.h against libm in double, over their ranges.
#include "runtime/vecmath.h"

#include <math.h>
#include <stdint.h>

#include "dev/tests/check.h"

static float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static double relative(double x, double y) {
    return y == 0 ? fabs(x) : fabs(x - y) / fabs(y);
}

// The largest relative error of VALUE against EXPECTED for the floats x from LOW to HIGH, every STEP-th of them, on both sides of 0.
#define WORST(low, high, step, VALUE, EXPECTED) ({                                                   \
        double worst_ = 0;                                                                           \
        for (uint64_t bits_ = 0; bits_ < 0x100000000ull; bits_ += (step)) {                          \
            float x = of_bits((uint32_t)bits_);                                                      \
            if (!(x >= (low) && x <= (high))) continue;                                              \
            double error_ = relative((VALUE), (EXPECTED));                                           \
            if (!(error_ <= worst_)) worst_ = error_;                                                \
        }                                                                                            \
        worst_; })

#define WITHIN(name, worst, bound) do { double w_ = (worst); printf("  %-44s %.2g\n", name, w_); CHECK(w_ <= (bound), "%s: relative error %.3g", name, w_); } while (0)

static void test_exp(void) {
    check_group("vec_exp");
    WITHIN("exp on [-87.3, 88.7]", WORST(-87.3f, 88.7f, 1999, vec_exp(x), exp(x)), 1e-7);
    CHECK(vec_exp(0) == 1, "exp(0)");
    CHECK(vec_exp(-INFINITY) == 0 && vec_exp(-88) == 0, "exp far below");
    CHECK(vec_exp(INFINITY) == INFINITY && vec_exp(89) == INFINITY, "exp far above");
    CHECK(isnan(vec_exp(NAN)), "exp(NaN)");
    WITHIN("sigmoid on [-80, 80]", WORST(-80.0f, 80.0f, 1999, vec_sigmoid(x), 1 / (1 + exp(-(double)x))), 3e-7);
    CHECK(vec_sigmoid(-1e30f) == 0 && vec_sigmoid(1e30f) == 1 && isnan(vec_sigmoid(NAN)), "the sigmoid's ends");
}

static void test_log(void) {
    check_group("vec_log, vec_log1p");
    WITHIN("log on the normal floats", WORST(1.2e-38f, 3.4e38f, 1999, vec_log(x), log(x)), 3e-7);
    WITHIN("log near 1", WORST(0.9f, 1.1f, 7, vec_log(x), log(x)), 3e-7);
    CHECK(vec_log(1) == 0, "log(1)");
    CHECK(isnan(vec_log(-1)) && isnan(vec_log(NAN)), "log of what has none");
    WITHIN("log1p on [0, 1]", WORST(0.0f, 1.0f, 499, vec_log1p(x), log1p(x)), 2e-7);
    CHECK(isnan(vec_log1p(NAN)), "log1p(NaN)");
}

static void test_pow(void) {
    static const float POWERS[] = {0.5f, 1, 1.5f, 2, 3, 15, 100, 200};
    check_group("vec_pow01");
    for (size_t i = 0; i < sizeof POWERS / sizeof *POWERS; i++) {
        float p = POWERS[i];
        double worst = 0;                                         // in units of the bound
        for (uint32_t bits = 0x00800000u; bits <= 0x3F800000u; bits += 997) {
            float x = of_bits(bits);
            double expected = pow(x, p);
            if (expected < 1.2e-38) continue;
            double error = relative(vec_pow01(x, p), expected) / (1e-7 * (3 + 3 * p * fabs(log(x))));
            if (!(error <= worst)) worst = error;
        }
        CHECK(worst <= 1, "x^%g: %.3g times its bound", p, worst);
        CHECK(vec_pow01(0, p) == 0 && vec_pow01(1, p) == 1 && isnan(vec_pow01(NAN, p)), "the ends of x^%g", p);
    }
}

static void test_normal_cdf(void) {
    check_group("vec_normal_cdf");
    WITHIN("Phi on [-13, 13], gauss exact", WORST(-13.0f, 13.0f, 1999, vec_normal_cdf(x, (float)exp(-0.5 * x * (double)x)), erfc(-x / sqrt(2)) / 2), 5e-7);
    CHECK(vec_normal_cdf(0, 1) == 0.5f, "Phi(0) is %.9g", vec_normal_cdf(0, 1));
    CHECK(vec_normal_cdf(-INFINITY, 0) == 0 && vec_normal_cdf(INFINITY, 0) == 1, "Phi at the ends");
    CHECK(vec_normal_cdf(-1e30f, 0) == 0 && vec_normal_cdf(1e30f, 0) == 1, "Phi far out");
    CHECK(isnan(vec_normal_cdf(NAN, NAN)), "Phi(NaN)");
}

static void test_bf16(void) {
    check_group("bfloat16");
    CHECK(bf16_to_float(bf16_from_float(1.0f)) == 1.0f, "1");
    CHECK(bf16_from_float(of_bits(0x3F808000u)) == 0x3F80 && bf16_from_float(of_bits(0x3F818000u)) == 0x3F82, "a tie goes to even");
    CHECK(isnan(bf16_to_float(bf16_from_float(NAN))), "NaN");
}

int main(void) {
    test_exp();
    test_log();
    test_pow();
    test_normal_cdf();
    test_bf16();
    return check_verdict();
}

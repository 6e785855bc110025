// phi and its slope, for the kernels of flash.cuh. Every instruction counts here: phi or its slope is evaluated three
// times per score (in the forward kernel, the dq kernel, and the dk/dv kernel).
//
// float32 uses phi_both of normalizer.h. bf16 uses one special function per score, ex2 (8 clocks per warp), and
// polynomials (one clock per FFMA), minimax fits of the relative error of the result, stated as `(minimax, e)`. Where
// the special functions have time, a second one replaces a polynomial (Divides). dev/tests/test_kernels.cu compares phi
// at every bf16 z with float64. The error bounds, relative to phi and its slope (bf16 rounding is 2^-9):
//   2^-17, from the rounding of z, for exp, expm1 (of e^z + 1), identity, relu, relu2 and relu6
//   2^-13 for sigmoid, softplus and mish
//   2^-13 for gelu if z >= -9; below, 1e-18 absolute, like |phi| itself
//   twice that for slopes; those of gelu and mish relative to |slope| + phi(z)/z
// Why relative, even where phi is close to 0: if all scores of a row are far below 0, dividing by their sum makes their
// weights as large as any others. That rules out tanh.approx, whose relative error is 2^-11: (1 + tanh(z/2))/2 is off
// by 2^-12 absolute whatever z is, which at z = -7, where sigmoid with its offset -ln L starts, is a quarter of its
// value.
// A NaN in z gives a NaN in phi. An infinite z gives the limit, except that gelu and mish may give a NaN.
#ifndef ATTENTION_PHI_CUH
#define ATTENTION_PHI_CUH

#include "cuda/gpu.cuh"

#include "attention/normalizer.h"

template <class X>
constexpr bool is_bf16 = sizeof(X) == 2;

// In these instances z is in units of ln 2 (scale and bias include the factor 1/ln 2), so that exp is one instruction.
template <class X, int PHI>
constexpr bool by_log2 =
    is_bf16<X> && (PHI == PHI_EXP || PHI == PHI_EXPM1 || PHI == PHI_SIGMOID || PHI == PHI_SOFTPLUS);

template <class X, int PHI>
constexpr float unit = by_log2<X, PHI> ? 1.4426950408889634f : 1.0f;

// f is in units of 1/value_unit, and so are a row's sum of f, its largest f and Z. Softplus has the unit of z, which
// saves an instruction.
template <class X, int PHI>
constexpr float value_unit = PHI == PHI_SOFTPLUS ? unit<X, PHI> : 1;

// df/dz in these units, over the slope.
template <class X, int PHI>
constexpr float slope_unit = value_unit<X, PHI> / unit<X, PHI>;

template <class X, int PHI>
DEVICE float exp_of(float x) {
    if (!is_bf16<X>) return expf(x);
    return exp2_fast(by_log2<X, PHI> ? x : x * 1.4426950408889634f);
}

// c0 + c1 x + c2 x² + ...
DEVICE float polynomial(float, float c0) {
    return c0;
}

template <class... More>
DEVICE float polynomial(float x, float c0, More... more) {
    return polynomial(x, more...) * x + c0;
}

// 1/(1 + e) for e in [0, 1], exact at 0 (minimax, 2^-14.0)
DEVICE float sigmoid_of_exp(float e) {
    return polynomial(e, 1.0f, -0.997308195f, 0.959154844f, -0.783540666f, 0.430777133f, -0.10911268f);
}

// by ln(1 + e) for e in [0, 1] (minimax, 2^-13.8)
DEVICE float log1p_of_exp(float e, float by) {
    return e * polynomial(e, by, by * -0.497774482f, by * 0.309224755f, by * -0.16136305f, by * 0.0431062654f);
}

// 1/x for x in [1, 2^120] (minimax, 2^-14.9). The bits of x grow like its logarithm, so subtracting them from a
// constant gives a guess within 5 %. The guess is off by a factor t in [0.949, 1.051], and a polynomial approximates
// 1/t.
DEVICE float reciprocal_by_polynomial(float x) {
    float guess = __uint_as_float(0x7EF311C7u - __float_as_uint(x));
    return guess * polynomial(x * guess, 3.00383329f, -3.00574946f, 1.00191617f);
}

// The normal CDF at -a for a >= 0, which is 1/2 at 0: 2^P(a), because its logarithm is almost a parabola (minimax on
// [0, 9], 2^-13.7). Beyond 9 it still tends to 0.
DEVICE float normal_tail(float a) {
    return exp2_fast(polynomial(a, -1.0f, -1.15030324f, -0.460977465f, -0.0517069921f, 0.00757380063f, -0.000733945111f,
                                4.11649053e-05f, -1.00055456e-06f));
}

// The normal density at a.
DEVICE float normal_density(float a) {
    return exp2_fast(-0.721347520f * (a * a) - 1.32574806f);
}

// The slope of gelu at -a is tail(a) - a density(a). It equals -tail(a) S(a) (minimax on [0, 7], 2^-12.9 of |S| + 0.05)
// or, where the tail is not needed, -(a - ZERO) 2^B(a), where ZERO is its root (minimax on [0, 8], 2^-13.1).
constexpr float GELU_ZERO = 0.751791525f;

DEVICE float gelu_slope_over_distance(float a) {
    return exp2_fast(polynomial(a, -0.588569462f, -0.380168319f, -0.569772243f, -0.0443521664f, 0.00883031357f,
                                -0.0011025354f, 7.67851889e-05f, -2.25942949e-06f));
}

DEVICE float gelu_slope_over_tail(float a) {
    return polynomial(fminf(a, 16), -1.0f, 0.79669106f, 0.640663505f, 0.105068669f, -0.0191933848f, 0.00194079196f,
                      -8.14887317e-05f);
}

// Sigmoid of four z in units of ln 2, 2^z/(1 + 2^z), with one division: 1/a = b c d/(a b c d), where a = 1 + 2^z and so
// on. Above 30, where sigmoid is 1, z counts as 30, so that the product stays finite. A NaN makes all four NaN, so they
// must belong to one row, and all be visible.
DEVICE void sigmoids(float (&z)[4]) {
    float e[4], a[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        e[i] = exp2_fast(-max_nan(-z[i], -30));
        a[i] = 1 + e[i];
    }
    const float first = a[0] * a[1], second = a[2] * a[3], inverse = reciprocal_fast(first * second);
    const float by[2] = {inverse * second, inverse * first};    // 1/first, 1/second
    UNROLL
    for (int i = 0; i < 4; i++) z[i] = e[i] * (by[i / 2] * a[i ^ 1]);
}

// What a kernel needs of phi_at.
enum Wanted { VALUE, SLOPE, BOTH };

// May it take a second special function, usually for a division? On compute capability 9.0, with one special function
// per score, these units are idle for much of the time that a polynomial's instructions need. The backward pass has
// time for a second one for every score; forward, four values of sigmoid share a division (SHARED, see sigmoids()).
enum Divides { NEVER, SHARED, ALWAYS };

// f = phi(z), in units of 1/value_unit<X, PHI>, and phi's slope, whatever the units. z is in units of 1/unit<X, PHI>,
// relative to a shift where exp is; `number` is phi_number(). Without the value, f may be anything with the right sign,
// unless phi_learns(). divide: may it take a second special function?
template <class X, int PHI, int KIND, Wanted WANTED>
DEVICE void phi_at(float z, float number, float *f, float *slope, bool divide) {
    if (!is_bf16<X>) {
        phi_both(KIND, z, number, f, slope);
    } else if (KIND == PHI_EXP) {
        *f = *slope = exp_of<X, PHI>(z);
    } else if (KIND == PHI_EXPM1) {
        *slope = exp_of<X, PHI>(z);
        *f = *slope - number;
    } else if (KIND == PHI_SIGMOID && WANTED == VALUE && divide) {
        *f = *slope = reciprocal_fast(1 + exp_of<X, PHI>(-z));
    } else if (KIND == PHI_SIGMOID && divide) {    // 1/(1 + e) and e/(1 + e)², with a finite e
        float e = exp_of<X, PHI>(-max_nan(z, -127 * 0.693147181f * unit<X, PHI>));
        *f = reciprocal_fast(1 + e);
        *slope = e * *f * *f;
    } else if (KIND == PHI_SIGMOID) {    // 1/(1 + e) or e/(1 + e), and e/(1 + e)²
        float e = exp_of<X, PHI>(-fabsf(z)), p = sigmoid_of_exp(e), q = e * p;
        *f = z < 0 ? q : p;
        *slope = p * q;
    } else if (KIND == PHI_SOFTPLUS) {
        float e = exp_of<X, PHI>(-fabsf(z)), p = divide ? reciprocal_fast(1 + e) : sigmoid_of_exp(e);
        *f = fmaxf(z, 0) + log1p_of_exp(e, value_unit<X, PHI>);    // in the unit of z
        *slope = z < 0 ? e * p : p;
    } else if (KIND == PHI_GELU) {    // max(z, 0) - |z| tail; the slopes at z and -z add up to 1
        float a = fabsf(z), tail = normal_tail(a);
        *f = WANTED != SLOPE ? fmaxf(z, 0) - a * tail : z;
        float below;
        if (WANTED == SLOPE) below = (a - GELU_ZERO) * gelu_slope_over_distance(a);
        else if (divide) below = a * normal_density(a) - tail;
        else below = tail * gelu_slope_over_tail(a);
        *slope = z < 0 ? -below : 1 + below;
    } else if (KIND == PHI_MISH) {    // z tanh(ln(1 + e)) = z w/(1 + w), w = e + e²/2
        float e = exp_of<X, PHI>(fminf(z, 40)), w = (0.5f * e + 1) * e;
        float r = divide ? reciprocal_fast(w + 1) : reciprocal_by_polynomial(w + 1), by = r * z;
        *f = WANTED != SLOPE ? w * by : z;
        *slope = ((e * e + e) * by + w) * r;    // the slope of tanh(ln(1 + e)) is (e + e²)/(1 + w)²
    } else {
        phi_both(KIND, z, number, f, slope);
    }
}
#endif

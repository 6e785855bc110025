// The posts of attention/post.h in the kernels of flash.cuh, whose header has the formulas: a struct for each with its
// rows and what it computes of them. The kernels ask Post<POST> and never compare a post.
//
// Tested by dev/tests/test_flash.py, through the kernels.
#ifndef ATTENTION_FLASH_POST_CUH
#define ATTENTION_FLASH_POST_CUH

#include "attention/flash_row.cuh"

#include <stddef.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------------------------------
// The numbers of a row

// In the forward pass.
struct ForwardRow {
    float scale, bias, offset;
    float number;          // phi's, see phi_number()
    float sum;             // of |f|
    float sum_signed;      // of f
    float largest;         // the largest f (by_z: the largest z, during the first sweep)
    float factor, mean;    // map f to w in the second sweep
    float left, signs;     // the sum of |w|, the sum of the signs of w
};

// From which flash_rows_kernel makes the row of a backward kernel.
struct RowNumbers {
    float scale, bias, number;
    float4 stats;        // of forward_end()
    float D, along;      // see backward_row()
    float slope_unit;    // of the instance
    int n;               // the visible keys
    bool is_sum;         // is Z a sum?
};

// Of the backward pass: eight floats each, of which FlashRow is the storage. number: phi's
struct alignas(16) PlainRow {
    float scale, bias, factor, D;
    float by_d, by_D;    // factor times scale, and that times D (in the dq kernel, both without scale)
    float unused, number;
};

struct alignas(16) MeanRow {
    float scale, bias, factor, D, mean, less, inverse_sum, number;
};

// Those of flash90_backward.cuh, which reads only the first half where it can. by_D: D plus less (0 for plain posts),
// times the factor of df. With exp, bias includes ln |factor|, so that f is the weight before its mean is subtracted.
struct alignas(16) ScaledRow90 {
    float scale, bias, factor, by_D, unused, D, unused_too, number;
};

struct alignas(16) ExpRow90 {
    float scale, bias, mean, by_D, unused, D, unused_too, number;
};

struct alignas(16) ExpMeanRow90 {
    float scale, bias, mean, D, unused, less, unused_too, number;
};

// less: divided by factor P   by_dz: scale times factor P
struct alignas(16) PowersRow90 {
    float scale, bias, factor, D, mean, less, inverse_sum, by_dz;
    static constexpr float number = 0;    // no phi of these kernels has one
};

static_assert(offsetof(ExpRow90, D) == offsetof(ScaledRow90, D) && offsetof(ExpMeanRow90, D) == offsetof(MeanRow, D) &&
                  offsetof(PowersRow90, factor) == offsetof(MeanRow, factor) &&
                  offsetof(PowersRow90, less) == offsetof(MeanRow, less),
              "norm_D() and norm_sum() read either as the second");

template <class Row>
DEVICE Row row_from(float4 x, float4 y) {
    static_assert(sizeof(Row) == sizeof(FlashRow), "kernels copy a row as two float4");
    return {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
}

// A row in memory, and one to store there.
template <class Row>
DEVICE const Row &row_in(const FlashRow &row) {
    static_assert(sizeof(Row) == sizeof(FlashRow), "FlashRow is its storage");
    return *(const Row *)&row;
}

template <class Row>
DEVICE FlashRow stored(const Row &row) {
    FlashRow to;
    static_assert(sizeof row == sizeof to, "FlashRow is its storage");
    memcpy(&to, &row, sizeof to);
    return to;
}

// bias plus ln |factor|, in the unit of z, which is ln 2 for exp.
DEVICE float bias_with(float bias, float factor) {
    return bias + log2f(fabsf(factor));
}

// Is D multiplied by the factor of df in the rows of flash90_backward.cuh, so that one FFMA gives the difference? For a
// post with one sweep.
template <class X>
DEVICE bool rows_scale_D(const FlashCall<X> &call) {
    return call.dq_sums && slope_within_value(call.phi);
}

// x times the sign of f if phi is signed.
template <class X>
DEVICE float signed_if(bool is_signed, float x, float f) {
    return is_signed ? signed_as<X>(x, f) : x;
}

// ---------------------------------------------------------------------------------------------------------------------
// The posts. A struct has
//   Row, Row90<PHI>   the rows of flash_backward.cuh and of flash90_backward.cuh
//   drops()           does it drop negative f?
//   between()         if TWICE: computes the row's factor and mean, after the first sweep
//   weights()         if TWICE: f (N) in, w out
//   end()             changes, where they differ, a row's `by` (1/Z), which multiplies its output; `left` (the sum of
//                     |f|), which is 0 for an all-zero row; and its statistics (bias, 1/Z, 0, 0)
//   row()             the row for the backward kernels, from its statistics
//   for_dq()          changes the row for the dq kernel
//   back()            d = dO · v (N) becomes df, and w = f becomes W. df includes the row's scale for powers and, but
//                     for the dq kernel, for plain posts. is_signed: can f be negative?
//   back90()          the same for flash90_backward.cuh, which multiplies df by by_dz() unless scales_D
//   norm_D()          the part of a row in D as norm sees it, of which there are call.parts; norm_sum() turns their sum
//                     into that D
// and, where W is a power (POWERS), what the comments in Powers say.

template <int POST>
struct PostNeeds {
    static constexpr bool PLAIN = post_is_plain(POST), CENTERS = post_centers(POST), TWICE = post_sweeps_twice(POST),
                          POWERS = post_is_power(POST), PREFIX = CENTERS && !TWICE;

    template <int PHI, class X>
    DEVICE bool drops(const FlashCall<X> &) {
        return false;
    }

    template <class Row>
    DEVICE void for_dq(Row &) {}

    template <class X>
    DEVICE float norm_sum(float D, const FlashRow &, float4 stats, const FlashCall<X> &, int) {
        return D * stats.y;
    }
};

template <int POST>
struct Post;

// See rows_scale_D(), for an instance.
template <int PHI, int POST>
constexpr bool scales_D = slope_within_value(PHI) && !Post<POST>::TWICE;

// Is f rounded to X before it is summed? The matmul with v rounds it, and summing the same rounded values makes a row's
// weights add up to exactly 1 and, in a row with a single key, makes the output equal v. Otherwise d - D would not be 0
// there, and dividing by a small Z would magnify the error. exp does not need it: its slope is as small as f, and f is
// 1 in a row with one key. On compute capability 9.0, four of sigmoid's values share a division forward, and each has
// its own backward; a few round to different neighbors.
template <int PHI, int POST>
constexpr bool rounds_values = PHI != PHI_EXP && !Post<POST>::TWICE;

// ---- none, negate, rectify

template <>
struct Post<POST_NONE> : PostNeeds<POST_NONE> {
    typedef PlainRow Row;
    template <int PHI>
    using Row90 = std::conditional_t<PHI == PHI_EXP, ExpRow90,
                                     std::conditional_t<slope_within_value(PHI), ScaledRow90, PlainRow>>;

    template <int PHI, class X>
    DEVICE bool drops(const FlashCall<X> &call) {
        return may_drop<PHI> && call.post == POST_RECTIFY;
    }

    template <class X>
    DEVICE void end(float4 *stats, float *left, float *by, ForwardRow &row, const FlashCall<X> &call, int) {
        if (call.post == POST_NEGATE) stats->y = *by = -*by;
        if (call.post == POST_RECTIFY) *left = row.sum + row.sum_signed;
    }

    template <class X>
    DEVICE FlashRow row(const RowNumbers &x, const FlashCall<X> &call) {
        const float factor = x.stats.y, D = (x.is_sum ? x.D : 0) * post_sign(call.post),
                    by_d = factor * (x.scale * x.slope_unit);
        if (rows_scale_D(call) && call.phi == PHI_EXP)
            return stored(ExpRow90{x.scale, bias_with(x.bias, factor), 0, D * x.scale, 0, D, 0, x.number});
        if (rows_scale_D(call))
            return stored(ScaledRow90{x.scale, x.bias, factor, D * (x.scale * factor), 0, D, 0, x.number});
        return stored(PlainRow{x.scale, x.bias, factor, D, by_d, by_d * D, 0, x.number});
    }

    DEVICE void for_dq(Row &row) {
        row.by_d = row.factor;
        row.by_D = row.factor * row.D;
    }

    template <class X, int PHI, bool BY_COLUMN, int KNOWN, int N>
    DEVICE void back(float (&d)[N], float (&w)[N], const float (&f)[N], const Row *row, bool is_signed,
                     const FlashCall<X> &call) {
        const bool rectify = is_signed && drops<PHI>(call);
        UNROLL
        for (int e = 0; e < N; e++) {
            const Row &at = row[row_of<BY_COLUMN>(e)];
            w[e] *= at.factor;
            if (rectify && !(f[e] > 0)) w[e] = d[e] = 0;
            // A difference that should be 0 must be exactly 0, because it is divided by Z. Where the slope is as small
            // as f, rounding is harmless.
            if (slope_within_value(PHI)) d[e] = d[e] * at.by_d - at.by_D;
            else d[e] = (d[e] - signed_if<X>(is_signed, at.D, f[e])) * at.by_d;
        }
    }

    template <int PHI, class Row>
    DEVICE float by_dz(const Row &row) {
        if constexpr (PHI == PHI_EXP) return row.scale;
        else return row.scale * row.factor;
    }

    template <int PHI, bool BY_COLUMN, int KNOWN, class Row, int N>
    DEVICE void back90(float (&d)[N], float (&w)[N], const float (&f)[N], const Row *row, const FlashCall<bf16> &call) {
        UNROLL
        for (int e = 0; e < N; e++) {
            const Row &at = row[row_of<BY_COLUMN>(e)];
            if constexpr (PHI != PHI_EXP) w[e] *= at.factor;
            if (phi_signed(PHI) && drops<PHI>(call) && !(f[e] > 0)) w[e] = d[e] = 0;
            if constexpr (slope_within_value(PHI)) d[e] = d[e] * by_dz<PHI>(at) - at.by_D;
            else d[e] -= signed_if<bf16>(phi_signed(PHI), at.D, f[e]);
        }
    }

    template <class X>
    DEVICE float norm_D(const FlashRow &row, const FlashCall<X> &call) {
        return rows_scale_D(call) ? row_in<ScaledRow90>(row).D : row_in<Row>(row).D;
    }
};

template <>
struct Post<POST_RECTIFY> : Post<POST_NONE> {};

// ---- recenter and recenter-l1

template <int POST>
struct Recenter : PostNeeds<POST> {
    typedef MeanRow Row;

    // D times the sign of the weight, or of f where the weights are not divided by their sum.
    template <class X>
    DEVICE float signed_D(float D, float f, float w, bool is_signed) {
        if (Recenter::TWICE) return signed_as<X>(D, w);
        return signed_if<X>(is_signed, D, f);
    }

    template <class X, int PHI, bool BY_COLUMN, int KNOWN, int N>
    DEVICE void back(float (&d)[N], float (&w)[N], const float (&f)[N], const Row *row, bool is_signed,
                     const FlashCall<X> &) {
        UNROLL
        for (int e = 0; e < N; e++) {
            const Row &at = row[row_of<BY_COLUMN>(e)];
            w[e] *= at.factor;
            w[e] -= at.mean;
            d[e] -= at.less;
            d[e] = at.factor * (d[e] - signed_D<X>(at.D, f[e], w[e], is_signed));
        }
    }

    template <int PHI, class Row>
    DEVICE float by_dz(const Row &row) {
        return row.scale;
    }
};

template <>
struct Post<POST_RECENTER> : Recenter<POST_RECENTER> {
    template <int PHI>
    using Row90 = ExpRow90;

    template <class X>
    DEVICE void end(float4 *stats, float *, float *by, ForwardRow &row, const FlashCall<X> &, int n) {
        stats->z = row.mean = recenter_mean(row.sum_signed, *by, n);
    }

    template <class X>
    DEVICE FlashRow row(const RowNumbers &x, const FlashCall<X> &call) {
        const float factor = x.stats.y, mean = x.stats.z, D = x.is_sum ? x.D : 0,
                    less = x.n > POST_FROM ? x.along / (float)x.n : 0;
        if (call.dq_sums)
            return stored(ExpRow90{x.scale, bias_with(x.bias, factor), mean, (D + less) * x.scale, 0, D, 0, x.number});
        return stored(MeanRow{x.scale, x.bias, factor, D, mean, less, 0, x.number});
    }

    template <int PHI, bool BY_COLUMN, int KNOWN, int N>
    DEVICE void back90(float (&d)[N], float (&w)[N], const float (&)[N], const ExpRow90 *row, const FlashCall<bf16> &) {
        static_assert(PHI == PHI_EXP, "no other kernels");
        UNROLL
        for (int e = 0; e < N; e++) {
            const ExpRow90 &at = row[row_of<BY_COLUMN>(e)];
            w[e] -= at.mean;
            d[e] = d[e] * at.scale - at.by_D;
        }
    }

    template <class X>
    DEVICE float norm_D(const FlashRow &row, const FlashCall<X> &call) {
        return call.dq_sums ? row_in<ExpRow90>(row).D : row_in<Row>(row).D;
    }
};

template <>
struct Post<POST_RECENTER_L1> : Recenter<POST_RECENTER_L1> {
    template <int PHI>
    using Row90 = ExpMeanRow90;

    template <class X>
    DEVICE void between(ForwardRow &row, float inverse, int n) {
        row.factor = inverse;
        row.mean = recenter_mean(row.sum_signed, inverse, n);
    }

    template <class X, int KNOWN, int N>
    DEVICE void weights(float (&w)[N], const ForwardRow *row, float) {
        UNROLL
        for (int e = 0; e < N; e++) w[e] = w[e] * row[e / 2].factor - row[e / 2].mean;
    }

    template <class X>
    DEVICE void end(float4 *stats, float *left, float *by, ForwardRow &row, const FlashCall<X> &, int n) {
        const bool late = n > POST_FROM;
        const float inverse = *by;
        if (late) *left = row.left < rounding_on_gpu(n) * row.sum * inverse ? 0 : row.left;
        *by = late ? inverse_or_zero(*left) : 1;
        *stats = make_float4(row.bias, inverse * *by, row.mean * *by, row.signs);
    }

    template <class X>
    DEVICE FlashRow row(const RowNumbers &x, const FlashCall<X> &call) {
        const bool late = x.n > POST_FROM;
        const float factor = x.stats.y, mean = x.stats.z, D = late || x.is_sum ? x.D : 0,
                    less = late ? (x.along - D * x.stats.w) / (float)x.n : 0;
        if (call.dq_sums)
            return stored(ExpMeanRow90{x.scale, bias_with(x.bias, factor), mean, D, 0, less, 0, x.number});
        return stored(MeanRow{x.scale, x.bias, factor, D, mean, less, 0, x.number});
    }

    template <int PHI, bool BY_COLUMN, int KNOWN, int N>
    DEVICE void back90(float (&d)[N], float (&w)[N], const float (&f)[N], const ExpMeanRow90 *row,
                       const FlashCall<bf16> &) {
        static_assert(PHI == PHI_EXP, "no other kernels");
        UNROLL
        for (int e = 0; e < N; e++) {
            const ExpMeanRow90 &at = row[row_of<BY_COLUMN>(e)];
            w[e] -= at.mean;
            d[e] -= at.less;
            d[e] -= signed_D<bf16>(at.D, f[e], w[e], false);
        }
    }

    template <class X>
    DEVICE float norm_D(const FlashRow &row, const FlashCall<X> &) {
        return row_in<Row>(row).D;
    }

    template <class X>
    DEVICE float norm_sum(float D, const FlashRow &, float4 stats, const FlashCall<X> &, int n) {
        return n > POST_FROM ? 0 : D * stats.y;
    }
};

// ---- posts with w = r^P, r in [0, 1]

// x^P
template <int P>
DEVICE float whole_power(float x) {
    if constexpr (P == 1) {
        return x;
    } else if constexpr (P % 3 == 0) {
        float root = whole_power<P / 3>(x);
        return root * root * root;
    } else {
        float root = whole_power<P / 2>(x);
        return P % 2 ? root * root * x : root * root;
    }
}

// w (N), each in [0, 1], to the power P; by multiplications if P is an integer. KNOWN: P, or 0 if it is not a
// compile-time constant
template <class X, int KNOWN, int N>
DEVICE void power(float (&w)[N], float P) {
    int whole = (int)P;
    if constexpr (KNOWN > 0) {
        UNROLL
        for (int e = 0; e < N; e++) w[e] = whole_power<KNOWN>(w[e]);
    } else if ((float)whole == P && whole <= 64) {
        float x[N];
        UNROLL
        for (int e = 0; e < N; e++) {
            x[e] = w[e];
            w[e] = 1;
        }
        for (; whole > 0; whole /= 2) {
            if (whole % 2) {
                UNROLL
                for (int e = 0; e < N; e++) w[e] *= x[e];
            }
            UNROLL
            for (int e = 0; e < N; e++) x[e] *= x[e];
        }
    } else {
        UNROLL
        for (int e = 0; e < N; e++) {
            const float x = is_bf16<X> ? exp2_fast(P * log2_fast(w[e])) : powf(w[e], P);
            w[e] = w[e] > 0 ? x : w[e];
        }
    }
}

// A post says how f becomes r, by numbers() and possibly base(), and whether df has the term `less` (has_less()).
template <int POST>
struct Powers : PostNeeds<POST> {
    typedef MeanRow Row;
    template <int PHI>
    using Row90 = PowersRow90;

    template <class X>
    DEVICE void between(ForwardRow &row, float inverse, int n) {
        Post<POST>::template numbers<X>(&row.factor, &row.mean, inverse, row.largest, n);
    }

    // r, or 0 for NaN; a NaN still shows in the row's other numbers.
    template <class X, class Row>
    DEVICE float base(float f, const Row &row) {
        return __saturatef(is_bf16<X> ? f * row.factor + row.mean : (f - row.mean) * row.factor + 1);
    }

    template <class X, int KNOWN, int N>
    DEVICE void weights(float (&w)[N], const ForwardRow *row, float P) {
        UNROLL
        for (int e = 0; e < N; e++) w[e] = Post<POST>::template base<X>(w[e], row[e / 2]);
        power<X, KNOWN>(w, P);
    }

    // r and q = r^(P-1) from f; q is 0 where r is.   KNOWN: P, if known, see power()
    template <class X, int KNOWN, bool BY_COLUMN, int N, class Row>
    DEVICE void powers(float (&r)[N], float (&q)[N], const float (&f)[N], const Row *row, float P) {
        UNROLL
        for (int e = 0; e < N; e++) r[e] = q[e] = Post<POST>::template base<X>(f[e], row[row_of<BY_COLUMN>(e)]);
        power<X, (KNOWN > 0 ? KNOWN - 1 : 0)>(q, P - 1);
        UNROLL
        for (int e = 0; KNOWN == 0 && e < N; e++) q[e] = r[e] > 0 ? q[e] : 0;
    }

    template <class X>
    DEVICE void end(float4 *stats, float *left, float *by, ForwardRow &row, const FlashCall<X> &, int) {
        *left = row.left;
        stats->z = row.largest;
        stats->w = *by = isnan(row.sum) ? row.sum : inverse_or_zero(*left);
    }

    // factor P of a row, and K.
    template <class Row, class X>
    DEVICE float slope(const Row &row, const FlashCall<X> &call) {
        return row.factor * call.power;
    }

    template <class X>
    DEVICE float factor(const Row &row, const FlashCall<X> &call) {
        return slope(row, call) * row.inverse_sum;
    }

    // Without call.dq_sums, flash_dq_kernel sets less.
    template <class X>
    DEVICE FlashRow row(const RowNumbers &x, const FlashCall<X> &call) {
        MeanRow row = {x.scale, x.bias, 0, x.D, 0, 0, x.stats.w, x.number};
        Post<POST>::template numbers<X>(&row.factor, &row.mean, x.stats.y, x.stats.z, x.n);
        if (!call.dq_sums) return stored(row);
        const float less =
            call.along && Post<POST>::has_less(call) && x.n > POST_FROM ? row.inverse_sum / (float)x.n * x.along : 0;
        return stored(PowersRow90{row.scale, row.bias, row.factor, row.D, row.mean, less, row.inverse_sum,
                                  row.scale * x.slope_unit * slope(row, call)});
    }

    template <class X, int PHI, bool BY_COLUMN, int KNOWN, int N>
    DEVICE void back(float (&d)[N], float (&w)[N], const float (&f)[N], const Row *row, bool is_signed,
                     const FlashCall<X> &call) {
        float r[N], q[N];
        powers<X, KNOWN, BY_COLUMN>(r, q, f, row, call.power);
        UNROLL
        for (int e = 0; e < N; e++) {
            const Row &at = row[row_of<BY_COLUMN>(e)];
            const float by_r = q[e] * at.inverse_sum, scale = at.scale * slope_unit<X, PHI>, less = at.less * scale;
            w[e] = by_r * r[e];
            d[e] = by_r * (d[e] - at.D);
            d[e] *= slope(at, call) * scale;
            d[e] -= signed_if<X>(is_signed, less, f[e]);
        }
    }

    template <int PHI>
    DEVICE float by_dz(const PowersRow90 &row) {
        return row.by_dz;
    }

    template <int PHI, bool BY_COLUMN, int KNOWN, int N>
    DEVICE void back90(float (&d)[N], float (&w)[N], const float (&f)[N], const PowersRow90 *row,
                       const FlashCall<bf16> &call) {
        float r[N], q[N];
        powers<bf16, KNOWN, BY_COLUMN>(r, q, f, row, call.power);
        UNROLL
        for (int e = 0; e < N; e++) {
            const PowersRow90 &at = row[row_of<BY_COLUMN>(e)];
            const float by_r = q[e] * at.inverse_sum;
            w[e] = by_r * r[e];
            d[e] = by_r * (d[e] - at.D);
            d[e] -= signed_if<bf16>(phi_signed(PHI), at.less, f[e]);
        }
    }

    // less of row n, from the four lanes' sums of t (1 - r).
    template <class X>
    DEVICE float less_of(float sum, const Row &row, const FlashCall<X> &call, int n) {
        float less = row_sum(sum) * factor(row, call) / (float)n;
        return Post<POST>::has_less(call) && n > POST_FROM ? less : 0;
    }

    template <class X>
    DEVICE float norm_D(const FlashRow &row, const FlashCall<X> &) {
        return row_in<Row>(row).less;
    }

    template <class X>
    DEVICE float norm_sum(float less, const FlashRow &row, float4, const FlashCall<X> &call, int) {
        return call.dq_sums ? less * slope(row_in<Row>(row), call) : less;
    }
};

template <>
struct Post<POST_REWEIGHT> : Powers<POST_REWEIGHT> {
    // The factor and mean that turn f into r, see base(), from 1/Z and the largest f.
    template <class X>
    DEVICE void numbers(float *factor, float *mean, float inverse, float largest, int n) {
        reweight_on_gpu(is_bf16<X>, factor, mean, inverse, largest, n);
    }

    template <class X>
    DEVICE bool has_less(const FlashCall<X> &call) {
        return norm_is_sum(call.norm);
    }
};

// ---- selection

// Calls function(P) with a common P of an instance for one phi as a compile-time constant, otherwise with 0.
template <int POST, int PHI, class Function>
DEVICE void with_power(float P, Function function) {
    if (Post<POST>::POWERS && PHI >= 0 && P == 15) function(std::integral_constant<int, 15>());
    else if (Post<POST>::POWERS && PHI >= 0 && P == 3) function(std::integral_constant<int, 3>());
    else function(std::integral_constant<int, 0>());
}

// function(integral_constant) of a post that is known at run time.
template <class Function>
DEVICE auto with_post(int post, Function function) {
#define CASE(kind_, ...) case kind_: return function(std::integral_constant<int, kind_>());
    switch (post) { POSTS(CASE) }
#undef CASE
    return function(std::integral_constant<int, POST_NONE>());
}
#endif

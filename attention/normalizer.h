// The family of attention normalizers. One table drives the parser, the help, config.json, the CPU code, the CUDA
// kernels and the tests.
//
// For the query at position i, n keys are visible: i + 1, or in a layer with a window of W at most W; s_ij = q_i · k_j
// after RoPE; d is the head size, L the training length, and T the length of the current sequence.
//   qk                a normalization of q and k, before the scores
//   z_ij = c_i s_ij + o_i      scale (c) and offset (o); with +cap=C, C tanh(z_ij/C) takes its place
//   f_ij = phi(z_ij)           phi; masked entries are set to 0 after phi, not before
//   A_ij = f_ij / Z_i          norm
//   post              a transform of the row A_i
// The output is sum_j A_ij v_j. An all-zero row (Z, or the sum in post, is 0) has output 0 and gradient 0, and is
// counted.
//
// To add a normalizer, add a row to NORMALIZERS; to add a value to a stage, add a row to that stage's list and its
// formula below (doc/normalizers.md walks through both).
#ifndef ATTENTION_NORMALIZER_H
#define ATTENTION_NORMALIZER_H

#include <stdbool.h>
#include <stddef.h>

#include "math/real.h"

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __CUDACC__
#define NORMALIZER_INLINE static __host__ __device__ __forceinline__
#else
#define NORMALIZER_INLINE static inline __attribute__((always_inline))
#endif
#ifdef __cplusplus
#define NORMALIZER_CONSTANT NORMALIZER_INLINE constexpr    // also in template arguments
#else
#define NORMALIZER_CONSTANT NORMALIZER_INLINE
#endif

// ---- the stages: X(KIND, name, the argument after a colon or plus, the formula shown by --attn help)
#define QK_VALUES(X) \
    X(QK_NONE,          "none",          "",      "q and k unchanged") \
    X(QK_L2,            "l2",            "",      "q and k divided by their Euclidean norms, after RoPE")
#define SCALE_VALUES(X) \
    X(SCALE_RSQRT_D,    "rsqrt-d",       "",      "c = 1/sqrt(d)") \
    X(SCALE_LOGN,       "logn",          "",      "c = s ln(n)/sqrt(d), one s per layer and head") \
    X(SCALE_LOGN_BIAS,  "logn-bias",     "",      "c = (s ln(n) + b)/sqrt(d), one s and b per layer and head") \
    X(SCALE_PN,         "pn",            "",      "c = (s p_n + b)/sqrt(d), one p of length L for all layers and heads") \
    X(SCALE_LOG,        "log",           ":BASE", "c = ln(n)/ln(BASE)/sqrt(d)") \
    X(SCALE_LOG_L,      "log:L",         "",      "c = ln(n)/ln(L)/sqrt(d)") \
    X(SCALE_FLOORLOG,   "floorlog",      ":F",    "c = (1 + 0.1 ln(1 + floor(n/F)))/sqrt(d)") \
    X(SCALE_LOGD_LOGN,  "logd-logn",     "",      "c = ln(d) ln(n)") \
    X(SCALE_CONST,      "const",         ":X",    "c = X")
#define OFFSET_VALUES(X) \
    X(OFFSET_NONE,      "none",          "",      "o = 0") \
    X(OFFSET_LOG_L,     "-logL",         "",      "o = -ln L") \
    X(OFFSET_LOG_T,     "-logT",         "",      "o = -ln T") \
    X(OFFSET_LOG_N,     "-logn",         "",      "o = -ln n")
#define PHI_VALUES(X) \
    X(PHI_EXP,          "exp",           "",      "exp(z)") \
    X(PHI_EXPM1,        "expm1",         "",      "exp(z) - 1") \
    X(PHI_IDENTITY,     "identity",      "",      "z") \
    X(PHI_RELU,         "relu",          "",      "max(z, 0)") \
    X(PHI_RELU2,        "relu2",         "",      "max(z, 0)^2") \
    X(PHI_RELU6,        "relu6",         "",      "min(max(z, 0), 6)") \
    X(PHI_GELU,         "gelu",          "",      "z (1 + erf(z/sqrt(2)))/2") \
    X(PHI_SIGMOID,      "sigmoid",       "",      "1/(1 + exp(-z))") \
    X(PHI_SOFTPLUS,     "softplus",      "",      "ln(1 + exp(z))") \
    X(PHI_MISH,         "mish",          "",      "z tanh(ln(1 + exp(z)))")
#define NORM_VALUES(X) \
    X(NORM_L1,          "l1",            "+C",    "Z = C + sum |f| (default C = 0; under exp, C means C e^0)") \
    X(NORM_L1_SINK,     "l1+sink",       "",      "Z = exp(sink) + sum |f|, one sink per layer and head; needs phi=exp") \
    X(NORM_N,           "n",             "",      "Z = n") \
    X(NORM_N2,          "n2",            "",      "Z = n^2") \
    X(NORM_L,           "L",             "",      "Z = L") \
    X(NORM_T,           "T",             "",      "Z = T") \
    X(NORM_T2,          "T2",            "",      "Z = T^2") \
    X(NORM_CONST,       "const",         ":X",    "Z = X") \
    X(NORM_SQRT_HALF_N, "sqrt-half-n",   "",      "Z = sqrt(n/2)") \
    X(NORM_NONE,        "none",          "",      "Z = 1")
#define POST_VALUES(X) \
    X(POST_NONE,        "none",          "",      "A unchanged") \
    X(POST_NEGATE,      "negate",        "",      "-A") \
    X(POST_RECTIFY,     "rectify",       "",      "max(A, 0)") \
    X(POST_RECENTER,    "recenter",      "",      "A - the mean of A over the n visible keys, for n > 3") \
    X(POST_RECENTER_L1, "recenter-l1",   "",      "recenter, then divide by the sum of absolute values, for n > 3") \
    X(POST_REWEIGHT,    "reweight",      ":P",    "w / sum w, w = max(A n - 1, 0)^P (with 0 instead of 1 for n <= 3)")

#define NORMALIZER_KIND(kind, name, takes, formula) kind,
typedef enum { QK_VALUES(NORMALIZER_KIND) } QkKind;
typedef enum { SCALE_VALUES(NORMALIZER_KIND) } ScaleKind;
typedef enum { OFFSET_VALUES(NORMALIZER_KIND) } OffsetKind;
typedef enum { PHI_VALUES(NORMALIZER_KIND) } PhiKind;
typedef enum { NORM_VALUES(NORMALIZER_KIND) } NormKind;
typedef enum { POST_VALUES(NORMALIZER_KIND) } PostKind;
#undef NORMALIZER_KIND

// ---- the presets. A stage that takes a number has it in parentheses. s is learned from its usual START, or FIXED at a
// number.
#define SCALE_LOG(base)   SCALE_LOG, base
#define SCALE_FLOORLOG(F) SCALE_FLOORLOG, F
#define NORM_L1_PLUS(C)   NORM_L1, C
#define NORM_CONST(X)     NORM_CONST, X
#define POST_REWEIGHT(P)  POST_REWEIGHT, P
#define S_START           false, NAN
#define S_FIXED(s)        true, s
#define NORMALIZERS(X) \
    /* name                 qk    scale      s         offset phi       norm         post          source */ \
    X(softmax,              NONE, RSQRT_D,   START,    NONE,  EXP,      L1,          NONE,         "Vaswani et al. 2017") \
    X(ssmax,                NONE, LOGN,      START,    NONE,  EXP,      L1,          NONE,         "[SSMax] eq. 2, model (b)") \
    X(ssmax-fixed,          NONE, LOGN,      FIXED(1), NONE,  EXP,      L1,          NONE,         "[SSMax] model (c)") \
    X(ssmax-bias,           NONE, LOGN_BIAS, START,    NONE,  EXP,      L1,          NONE,         "[SSMax] eq. 4, model (d)") \
    X(ssmax-pn,             NONE, PN,        START,    NONE,  EXP,      L1,          NONE,         "[SSMax] eq. 3, Figure 2") \
    X(softmax-log512,       NONE, LOG(512),  START,    NONE,  EXP,      L1,          NONE,         "[GAU] entropy invariance") \
    X(softmax1,             NONE, RSQRT_D,   START,    NONE,  EXP,      L1_PLUS(1),  NONE,         "[Softer-Max]") \
    X(softmax-negated,      NONE, RSQRT_D,   START,    NONE,  EXP,      L1,          NEGATE,       "[LSSA] Table 1, Inverse") \
    X(softmax-recentered,   NONE, RSQRT_D,   START,    NONE,  EXP,      L1,          RECENTER,     "[LSSA] Table 1") \
    X(softmax-recentered-l1, NONE, RSQRT_D,  START,    NONE,  EXP,      L1,          RECENTER_L1,  "[LSSA] Table 1") \
    X(identity,             NONE, RSQRT_D,   START,    NONE,  IDENTITY, NONE,        NONE,         "[LSSA] Table 2, I") \
    X(exp,                  NONE, RSQRT_D,   START,    NONE,  EXP,      NONE,        NONE,         "[LSSA] Table 2, II") \
    X(identity-l1,          NONE, RSQRT_D,   START,    NONE,  IDENTITY, L1,          NONE,         "[LSSA] Table 2, III") \
    X(relu-l1,              NONE, RSQRT_D,   START,    NONE,  RELU,     L1,          NONE,         "[LSSA] Table 3, Li et al. 2022") \
    X(relu2-l1,             NONE, RSQRT_D,   START,    NONE,  RELU2,    L1,          NONE,         "[LSSA] Table 3, [GAU] solution 3") \
    X(relu6-l1,             NONE, RSQRT_D,   START,    NONE,  RELU6,    L1,          NONE,         "[LSSA] Table 3") \
    X(gelu-l1,              NONE, RSQRT_D,   START,    NONE,  GELU,     L1,          NONE,         "[LSSA] Table 3") \
    X(sigmoid-l1,           NONE, RSQRT_D,   START,    NONE,  SIGMOID,  L1,          NONE,         "[LSSA] Table 3") \
    X(softplus-l1,          NONE, RSQRT_D,   START,    NONE,  SOFTPLUS, L1,          NONE,         "[LSSA] Table 3") \
    X(mish-l1,              NONE, RSQRT_D,   START,    NONE,  MISH,     L1,          NONE,         "[LSSA] Table 3") \
    X(sigmoid,              NONE, RSQRT_D,   START,    LOG_L, SIGMOID,  NONE,        NONE,         "[LSSA] Table 4, Ramapuram et al. 2024") \
    X(sigmoid-logn,         NONE, RSQRT_D,   START,    LOG_N, SIGMOID,  NONE,        NONE,         "[LSSA] Table 4") \
    X(sigmoid-logn-l1,      NONE, RSQRT_D,   START,    LOG_N, SIGMOID,  L1,          NONE,         "[LSSA] Table 4") \
    X(relu-L,               NONE, RSQRT_D,   START,    NONE,  RELU,     L,           NONE,         "[LSSA] Table 4, Wortsman et al. 2023") \
    X(relu-sqrt,            NONE, RSQRT_D,   START,    NONE,  RELU,     SQRT_HALF_N, NONE,         "[LSSA] Table 4, Shen et al. 2023") \
    X(lssa,                 L2,   LOGD_LOGN, START,    NONE,  SOFTPLUS, L1,          NONE,         "[LSSA] eq. 4") \
    X(lssar,                L2,   LOGD_LOGN, START,    NONE,  SOFTPLUS, L1,          REWEIGHT(15), "[LSSA] eq. 4 and 5") \
    X(relu2-n,              NONE, RSQRT_D,   START,    NONE,  RELU2,    N,           NONE,         "[GAU], n = the row's visible keys") \
    X(relu2-T,              NONE, RSQRT_D,   START,    NONE,  RELU2,    T,           NONE,         "[GAU], n = the sequence length") \
    X(relu2-L,              NONE, RSQRT_D,   START,    NONE,  RELU2,    L,           NONE,         "[GAU] solution 1, n = the training length") \
    X(relu2-512,            NONE, RSQRT_D,   START,    NONE,  RELU2,    CONST(512),  NONE,         "[GAU] solution 1 with its 512") \
    X(softmax-sink,         NONE, RSQRT_D,   START,    NONE,  EXP,      L1_SINK,     NONE,         "gpt-oss, arXiv 2508.10925") \
    X(softmax-floorlog,     NONE, FLOORLOG(8192), START, NONE, EXP,     L1,          NONE,         "Llama 4's temperature") \
    X(softpick,             NONE, RSQRT_D,   START,    NONE,  EXPM1,    L1,          RECTIFY,      "arXiv 2504.20966, rectified softmax")

enum { NORMALIZER_TEXT = 160 };

typedef struct {
    int kind;
    double value;    // the number after the colon or plus
} Stage;

typedef struct {
    char text[NORMALIZER_TEXT];    // as given to --attn
    Stage qk, scale, offset, phi, norm, post;
    bool fixed;        // s is not trained
    double s_start;    // from s=X; NAN for the default
    double cap;        // C: C tanh(z/C) takes the place of z, for every phi; 0: none
} Normalizer;

// `make ATTN=NAME` makes these compile-time constants, so the compiler drops all code for other normalizers.
#ifdef ATTN_ONLY
#define NORMALIZER_PICK_PHI(name, qk, scale, s, offset, phi, norm, post, source) \
    !__builtin_strcmp(#name, ATTN_ONLY) ? PHI_##phi :
#define NORMALIZER_FIRST_(kind, ...) kind
#define NORMALIZER_FIRST(...) NORMALIZER_FIRST_(__VA_ARGS__, )
#define NORMALIZER_PICK_POST(name, qk, scale, s, offset, phi, norm, post, source) \
    !__builtin_strcmp(#name, ATTN_ONLY) ? NORMALIZER_FIRST(POST_##post) :
#define NORMALIZER_PHI(normalizer) ((void)(normalizer), NORMALIZERS(NORMALIZER_PICK_PHI) -1)
#define NORMALIZER_POST(normalizer) ((void)(normalizer), NORMALIZERS(NORMALIZER_PICK_POST) -1)
#else
#define NORMALIZER_PHI(normalizer) ((normalizer)->phi.kind)
#define NORMALIZER_POST(normalizer) ((normalizer)->post.kind)
#endif

// ---- the learned scalars. Everything that stores, trains, shows or tests them loops over these rows.
//   name         in checkpoints, after "model.layers.N.self_attn." (".gau.") or "model."
//   width        PER_HEAD: one for each head; PER_POSITION: one for each n up to L
//   for          EACH_LAYER: each layer has its own set; WHOLE_MODEL: all layers share one set
//   start        the initial value under the normalizer a with training length L and a window of W keys (0: all)
//   trained      whether it is trained under a; otherwise it keeps its initial value
//   acts in      a stage of the normalizer. The scalar exists if that stage is of the given kind. In the scale and the
//                norm, it is at.scalar[KIND] in the formulas below; a phi has at most one, its `number`
// clang-format off
#define SCALARS(X) \
    /* kind        name          width         for          start             trained    acts in   exists when */ \
    X(SCALAR_S,    "attn_scale", PER_HEAD,     EACH_LAYER,  start_of_s(a, L, W), !a->fixed, IN_SCALE, \
      kind == SCALE_LOGN || kind == SCALE_LOGN_BIAS || kind == SCALE_PN) \
    X(SCALAR_B,    "attn_bias",  PER_HEAD,     EACH_LAYER,  0,                true,      IN_SCALE, \
      kind == SCALE_LOGN_BIAS || kind == SCALE_PN) \
    X(SCALAR_P,    "attn_pn",    PER_POSITION, WHOLE_MODEL, 1,                true,      IN_SCALE, kind == SCALE_PN) \
    X(SCALAR_SINK, "attn_sink",  PER_HEAD,     EACH_LAYER,  0,                true,      IN_NORM,  kind == NORM_L1_SINK)
// clang-format on

#define SCALAR_KIND(kind_, ...) kind_,
typedef enum { SCALAR_NONE = -1, SCALARS(SCALAR_KIND) SCALAR_COUNT } Scalar;
#undef SCALAR_KIND
typedef enum { PER_HEAD, PER_POSITION } ScalarWidth;
typedef enum { EACH_LAYER, WHOLE_MODEL } ScalarReach;
typedef enum { IN_SCALE, IN_PHI, IN_NORM, SCALAR_STAGES } ScalarStage;

// The columns of SCALARS as functions; with constant arguments, they compile to constants.
#define SCALAR_WIDTH(kind_, name, width, ...) case kind_: return width;
NORMALIZER_INLINE ScalarWidth scalar_width(int scalar) {
    switch (scalar) { SCALARS(SCALAR_WIDTH) }
    return PER_HEAD;
}
#undef SCALAR_WIDTH

#define SCALAR_STAGE(kind_, name, width, reach, start, trained, stage, exists) case kind_: return stage;
NORMALIZER_INLINE ScalarStage scalar_stage(int scalar) {
    switch (scalar) { SCALARS(SCALAR_STAGE) }
    return SCALAR_STAGES;
}
#undef SCALAR_STAGE

// Does the scalar exist if the stage it acts in is of this kind?
#define SCALAR_EXISTS(kind_, name, width, reach, start, trained, stage, exists) case kind_: return exists;
NORMALIZER_INLINE bool scalar_exists(int scalar, int kind) {
    switch (scalar) { SCALARS(SCALAR_EXISTS) }
    return false;
}
#undef SCALAR_EXISTS

// Does this phi have a learned number?
#define PHI_LEARNS(kind_, name, width, reach, start, trained, stage, ...) \
    || (stage == IN_PHI && scalar_exists(kind_, phi))
NORMALIZER_INLINE bool phi_learns(int phi) {
    (void)phi;
    return false SCALARS(PHI_LEARNS);
}
#undef PHI_LEARNS

NORMALIZER_INLINE size_t scalar_size(int scalar, size_t NH, size_t L) {
    return scalar_width(scalar) == PER_HEAD ? NH : L;
}

// The scalars of a layer, and where to add their gradients, on the device that computes. NULL where the normalizer does
// not have the scalar, or its gradient is not needed. Each is (NH) or (L), see scalar_size().
typedef struct {
    const real *of[SCALAR_COUNT];
} Scalars;

typedef struct {
    real *of[SCALAR_COUNT];
} ScalarGrads;

// ---- the formulas

// What the scale, offset and norm of a row depend on besides its scores.
typedef struct {
    int n, T, L, d;
    real scalar[SCALAR_COUNT];    // the learned scalars of the row's head, or for its n; 0 if they do not exist
} RowPlace;

NORMALIZER_INLINE RowPlace row_place(Scalars scalars, size_t h, int n, int T, int L, int d) {
    RowPlace at = {n, T, L, d, {0}};
#define SCALAR_PLACE(kind_, name, width, ...) \
    if (scalars.of[kind_]) at.scalar[kind_] = scalars.of[kind_][width == PER_HEAD ? h : (size_t)(n - 1)];
    SCALARS(SCALAR_PLACE)
#undef SCALAR_PLACE
    return at;
}

NORMALIZER_INLINE real row_scale(Stage scale, RowPlace at) {
    real rsqrt_d = real_rsqrt((real)at.d), s = at.scalar[SCALAR_S], b = at.scalar[SCALAR_B], p_n = at.scalar[SCALAR_P];
    if (scale.kind == SCALE_RSQRT_D) return rsqrt_d;    // needs no logarithm, which takes a kernel many instructions
    real ln_n = real_log((real)at.n);
    switch (scale.kind) {
    case SCALE_LOGN: return s * ln_n * rsqrt_d;
    case SCALE_LOGN_BIAS: return (s * ln_n + b) * rsqrt_d;
    case SCALE_PN: return (s * p_n + b) * rsqrt_d;
    case SCALE_LOG: return ln_n / real_log((real)scale.value) * rsqrt_d;
    case SCALE_LOG_L: return ln_n / real_log((real)at.L) * rsqrt_d;
    case SCALE_FLOORLOG: return (1 + (real)0.1 * real_log(1 + real_floor((real)at.n / (real)scale.value))) * rsqrt_d;
    case SCALE_LOGD_LOGN: return real_log((real)at.d) * ln_n;
    default: return (real)scale.value;    // SCALE_CONST
    }
}

// The derivative, with respect to a scalar that exists, of the quantity it acts in: c, phi's number, or the ln of the
// part of Z that comes from no key (norm_extra).
NORMALIZER_INLINE real row_slope(int scalar, Stage scale, RowPlace at) {
    real rsqrt_d = real_rsqrt((real)at.d);
    switch (scalar) {
    case SCALAR_S: return (scale.kind == SCALE_PN ? at.scalar[SCALAR_P] : real_log((real)at.n)) * rsqrt_d;
    case SCALAR_B: return rsqrt_d;
    case SCALAR_P: return at.scalar[SCALAR_S] * rsqrt_d;
    default: return 1;
    }
}

NORMALIZER_INLINE real row_offset(Stage offset, RowPlace at) {
    switch (offset.kind) {
    case OFFSET_LOG_L: return -real_log((real)at.L);
    case OFFSET_LOG_T: return -real_log((real)at.T);
    case OFFSET_LOG_N: return -real_log((real)at.n);
    default: return 0;
    }
}

// y = C tanh(z/C), the soft cap of a score, and its slope dy/dz = 1 - (y/C)^2
NORMALIZER_INLINE real cap_both(real C, real z, real *slope) {
    real t = real_tanh(z / C);
    *slope = 1 - t * t;
    return C * t;
}

// The input to phi that is constant along a row: its learned number, or exp(-shift), which is expm1's 1 relative to the
// shift.
#define PHI_NUMBER(kind_, name, width, reach, start, trained, stage, ...) \
    if (stage == IN_PHI && scalar_exists(kind_, phi)) return at.scalar[kind_];
NORMALIZER_INLINE real phi_number(int phi, RowPlace at, real shift) {
    (void)at;
    SCALARS(PHI_NUMBER)
    return phi == PHI_EXPM1 ? real_exp(-shift) : 0;
}
#undef PHI_NUMBER

// f = phi(z) and phi'(z), finite if z and the learned number are 0. A NaN in z gives a NaN in f: the comparisons are
// written so that it propagates. Where exp is taken relative to a shift, z is already shifted.
NORMALIZER_INLINE void phi_both(int phi, real z, real number, real *f, real *slope) {
    real positive = z < 0 ? 0 : z;
    switch (phi) {
    case PHI_EXPM1:
        *slope = real_exp(z);
        *f = *slope - number;
        return;
    case PHI_IDENTITY:
        *f = z;
        *slope = 1;
        return;
    case PHI_RELU:
        *f = positive;
        *slope = z > 0 ? 1 : 0;
        return;
    case PHI_RELU2:
        *f = positive * positive;
        *slope = 2 * positive;
        return;
    case PHI_RELU6: {
        real inside = z < 6 ? 1 : 0;
        *f = positive > 6 ? 6 : positive;
        *slope = z > 0 ? inside : 0;
        return;
    }
    case PHI_GELU: {
        real gauss = real_exp(z * z * (real)-0.5), cdf = real_normal_cdf(z, gauss);
        *f = z * cdf;
        *slope = cdf + z * gauss * (real)0.39894228040143267794;    // 1/sqrt(2 pi)
        return;
    }
    case PHI_SIGMOID:
        *f = real_sigmoid(z);
        *slope = *f * (1 - *f);
        return;
    case PHI_SOFTPLUS: {    // max(z, 0) + ln(1 + exp(-|z|)), which never overflows
        real e = real_exp(z < 0 ? z : -z);
        *f = positive + real_log1p01(e);
        *slope = (z < 0 ? e : 1) / (1 + e);
        return;
    }
    case PHI_MISH: {    // tanh(ln(1 + e)) = w/(w + 2), w = e (e + 2)
        real e = real_exp(z > 20 ? 20 : z), w = e * (e + 2), rest = 2 / (w + 2), t = w / (w + 2);
        *f = z * t;
        *slope = t + z * (rest * (1 + t)) * (e / (1 + e));    // 1 - t^2 = rest (1 + t)
        return;
    }
    default: *f = real_exp(z); *slope = *f;
    }
}

// The derivative of f = phi(z) with respect to phi's learned number, from f and phi'(z).
NORMALIZER_INLINE real phi_slope_by_number(int phi, real z, real number, real f, real slope) {
    (void)z, (void)number, (void)f, (void)slope;
    switch (phi) {
    default: return 0;
    }
}

// Can f be negative, so that |f| and sign(f) matter?
NORMALIZER_CONSTANT bool phi_signed(int phi) {
    return phi == PHI_IDENTITY || phi == PHI_GELU || phi == PHI_MISH || phi == PHI_EXPM1;
}

// Does Z depend on the scores?
NORMALIZER_INLINE bool norm_is_sum(Stage norm) {
    return norm.kind == NORM_L1 || norm.kind == NORM_L1_SINK;
}

// When the row is divided by its sum, exp is taken relative to the row's largest z.
NORMALIZER_INLINE bool subtracts_maximum(int phi, Stage norm) {
    return (phi == PHI_EXP || phi == PHI_EXPM1) && norm_is_sum(norm);
}

// The value that takes part in that maximum besides the scores: 0 if C > 0 (C is C e^0) and for the 1 of expm1; or the
// sink.
NORMALIZER_INLINE real least_maximum(int phi, Stage norm, RowPlace at) {
    if (norm.kind == NORM_L1_SINK) return at.scalar[SCALAR_SINK];
    return norm.value > 0 || phi == PHI_EXPM1 ? 0 : -INFINITY;
}

// The part of Z that comes from no key, with exp taken relative to `shift`.
NORMALIZER_INLINE real norm_extra(Stage norm, RowPlace at, real shift) {
    if (norm.kind == NORM_L1_SINK) return real_exp(at.scalar[SCALAR_SINK] - shift);
    return norm.value > 0 ? (real)norm.value * real_exp(-shift) : 0;
}

// 1/x; 0 if x is 0 or so small that 1/x overflows; NaN for NaN.
NORMALIZER_INLINE real inverse_or_zero(real x) {
    return x < REAL_MIN ? 0 : 1 / x;
}

// 1/Z, or 0 if Z is 0. sum = sum |f|; shift is what was subtracted from z.
NORMALIZER_INLINE real row_inverse(Stage norm, RowPlace at, real sum, real shift) {
    real n = (real)at.n, T = (real)at.T, Z = 1;
    if (norm_is_sum(norm)) return inverse_or_zero(sum + norm_extra(norm, at, shift));
    switch (norm.kind) {
    case NORM_N: Z = n; break;
    case NORM_N2: Z = n * n; break;
    case NORM_L: Z = (real)at.L; break;
    case NORM_T: Z = T; break;
    case NORM_T2: Z = T * T; break;
    case NORM_CONST: Z = (real)norm.value; break;
    case NORM_SQRT_HALF_N: Z = real_sqrt(n / 2); break;
    }
    return inverse_or_zero(Z);
}

// For n up to this, recenter and recenter-l1 leave the row unchanged, and reweight compares A with 0 instead of 1/n.
enum { POST_FROM = 3 };

// ---- attention/normalizer.c

// Columns of SCALARS by row: the name, and whether each layer or the whole model has a set.
extern const char *const scalar_names[SCALAR_COUNT];
extern const ScalarReach scalar_reach[SCALAR_COUNT];

// Does the normalizer have this scalar, does it train it, and what is its initial value for training length L and a
// window of W keys (0: all)?
bool normalizer_has(const Normalizer *normalizer, Scalar scalar);
bool normalizer_trains(const Normalizer *normalizer, Scalar scalar);
double normalizer_start(const Normalizer *normalizer, Scalar scalar, size_t L, size_t W);

// The same normalizer with each row's own length so far, n, in place of T: that of a generated text.
Normalizer normalizer_by_row(const Normalizer *normalizer);

// When a model switches from one normalizer to another, does it keep this scalar's values (or restart it)?
bool normalizer_keeps(const Normalizer *from, const Normalizer *to, Scalar scalar);

// Warns if the switch keeps a learned s, for which the +s=X of `to` has no effect, and returns whether it does. `to`
// was given as `flag value`.
bool normalizer_warn_of_start(const Normalizer *from, const Normalizer *to, const char *flag, const char *value);

// Parses NAME or NAME+stage=value+.... On failure, returns false with a message that lists the valid choices.
bool normalizer_parse(Normalizer *out, const char *text, char *message, size_t size);

// For attention/list.c. Where the next override begins, at its '+', or NULL; is the override window= or rope=, which
// belongs to a layer; and a plain decimal number, 0 or of a magnitude from 1e-30 to 1e30.
char *normalizer_next_override(char *text);
bool normalizer_is_layer_value(const char *override);
bool normalizer_number(const char *text, double *number);

// Is the normalizer valid for this training length? If not, `message` says why.
bool normalizer_fits(const Normalizer *normalizer, size_t L, char *message, size_t size);

enum { STAGE_COUNT = 6 };
extern const char *const stage_names[STAGE_COUNT];    // qk, scale, offset, phi, norm, post

// The value of stage i as written in --attn and config.json, for example "l1+1".
const char *normalizer_stage_text(const Normalizer *normalizer, size_t i, char *out, size_t size);

// The shortest text with the same meaning.
const char *normalizer_shortest(const Normalizer *normalizer, char *out, size_t size);

// Are two normalizers the same function of the scores, whatever their names?
bool normalizer_equal(const Normalizer *a, const Normalizer *b);

// The text of --attn in --help, with all names.
extern const char normalizer_flag_help[];

// Prints the answer to --attn help (the whole table) or help:NAME (one normalizer's stages and shortest name). Returns
// false if `text` is neither. Ends the program if NAME is unknown or the answer cannot be written.
bool normalizer_help(const char *text);

#ifdef __cplusplus
}
#endif
#endif

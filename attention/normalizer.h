// The family of attention normalisers: one table, read by the parser, the help, config.json, the CPU code, the CUDA kernels and the tests.
//
// For the query at position i, n = i + 1 keys are visible; s_ij = q_i · k_j after RoPE; d is the head size, L the training length.
//   z_ij = c_i s_ij + o_i      scale (c) and offset (o)
//   f_ij = phi(z_ij)           phi; masked entries are 0 after it, not before
//   A_ij = f_ij / Z_i          norm
//   then post; the output is sum_j A_ij v_j. A row with Z = 0 gives output 0 and gradient 0, and is counted.
//
// To add a normaliser, add a row to NORMALIZERS; to add a value to a stage, add a row to that stage's list and its formula below.
#ifndef ATTENTION_NORMALIZER_H
#define ATTENTION_NORMALIZER_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#ifdef __CUDACC__
#define NORMALIZER_INLINE static __host__ __device__ __forceinline__
#else
#include "runtime/vecmath.h"
#define NORMALIZER_INLINE static inline __attribute__((always_inline))
#endif

// ---- the stages: X(KIND, name, what it takes after a colon or plus, formula shown in the help)
#define QK_VALUES(X) \
    X(QK_NONE,       "none",    "",  "q and k as they are")
#define SCALE_VALUES(X) \
    X(SCALE_RSQRT_D, "rsqrt-d", "",  "c = 1/sqrt(d)") \
    X(SCALE_LOGN,    "logn",    "",  "c = s ln(n)/sqrt(d), s learnt for each head")
#define OFFSET_VALUES(X) \
    X(OFFSET_NONE,   "none",    "",  "o = 0")
#define PHI_VALUES(X) \
    X(PHI_EXP,       "exp",     "",  "exp(z)") \
    X(PHI_RELU2,     "relu2",   "",  "max(z, 0)^2")
#define NORM_VALUES(X) \
    X(NORM_L1,       "l1",      "+", "Z = C + sum |f| (l1+C; C is 0 when not given)") \
    X(NORM_N,        "n",       "",  "Z = n")
#define POST_VALUES(X) \
    X(POST_NONE,     "none",    "",  "A as it is")

#define NORMALIZER_KIND(kind, name, takes, formula) kind,
typedef enum { QK_VALUES(NORMALIZER_KIND) } QkKind;
typedef enum { SCALE_VALUES(NORMALIZER_KIND) } ScaleKind;
typedef enum { OFFSET_VALUES(NORMALIZER_KIND) } OffsetKind;
typedef enum { PHI_VALUES(NORMALIZER_KIND) } PhiKind;
typedef enum { NORM_VALUES(NORMALIZER_KIND) } NormKind;
typedef enum { POST_VALUES(NORMALIZER_KIND) } PostKind;
#undef NORMALIZER_KIND

typedef struct {
    int kind;
    double value;          // what was given after the colon or plus
} Stage;

// ---- the presets
#define NORM_L1_PLUS(C) NORM_L1, C
#define NORMALIZERS(X) \
    /* name       qk    scale    offset phi    norm        post  source */ \
    X(softmax,    NONE, RSQRT_D, NONE,  EXP,   L1,         NONE, "Vaswani et al. 2017") \
    X(ssmax,      NONE, LOGN,    NONE,  EXP,   L1,         NONE, "[SSMax] eq. 2, model (b)") \
    X(softmax1,   NONE, RSQRT_D, NONE,  EXP,   L1_PLUS(1), NONE, "[Softer-Max]") \
    X(relu2-n,    NONE, RSQRT_D, NONE,  RELU2, N,          NONE, "[GAU], n = the row's visible keys")

enum { NORMALIZER_TEXT = 160 };

typedef struct {
    char text[NORMALIZER_TEXT];   // as it was given to --attn
    Stage qk, scale, offset, phi, norm, post;
    bool fixed;                   // s is not trained
    double s_start;               // from s=X; NAN for the usual start
} Normalizer;

// ---- the formulas

// c = row_scale(...); s is ignored by the scales that have none
NORMALIZER_INLINE float row_scale(int scale, int n, int d, float s) {
    float rsqrt_d = 1.0f / sqrtf((float)d);
    return scale == SCALE_LOGN ? s * logf((float)n) * rsqrt_d : rsqrt_d;
}

// dc/ds
NORMALIZER_INLINE float row_scale_slope(int scale, int n, int d) {
    return scale == SCALE_LOGN ? logf((float)n) / sqrtf((float)d) : 0.0f;
}

NORMALIZER_INLINE float phi_value(int phi, float z) {
    if (phi == PHI_RELU2) {
        float r = z < 0.0f ? 0.0f : z;         // in this order a NaN stays one
        return r * r;
    }
#ifdef __CUDACC__
    return __expf(z);
#else
    return vec_exp(z);
#endif
}

// phi'(z); f = phi(z) where that helps
NORMALIZER_INLINE float phi_slope(int phi, float z, float f) {
    if (phi == PHI_RELU2) return z < 0.0f ? 0.0f : 2.0f * z;
    return f;
}

// exp is taken relative to the row's largest z when the row is divided by its sum
NORMALIZER_INLINE bool subtracts_maximum(int phi, int norm) {
    return phi == PHI_EXP && norm == NORM_L1;
}

// 1/Z, 0 for a row without weight; sum = sum |f|, shift what was subtracted from z, C the constant of l1+C
NORMALIZER_INLINE float row_inverse(int norm, double C, float sum, float shift, int n) {
    float Z = norm == NORM_N ? (float)n : sum + (C > 0.0 ? (float)C * expf(-shift) : 0.0f);
    return sum > 0.0f ? 1.0f / Z : sum == 0.0f ? 0.0f : NAN;
}

// ---- attention/normalizer.c

// Reads NAME or NAME+stage=value+...; false with a message in `message` that lists what there is.
bool normalizer_parse(Normalizer *out, const char *text, char *message, size_t size);

// The value of a stage as it is written in --attn and config.json, for example "l1+1".
const char *normalizer_stage_text(const char *stage, Stage value, char *out, size_t size);

// Reads one stage ("norm", "l1+1") into a normaliser.
bool normalizer_set_stage(Normalizer *normalizer, const char *stage, const char *value, char *message, size_t size);

// Does it have a scalar s for each layer and head? And where does s start, for training length L?
bool normalizer_has_s(const Normalizer *normalizer);
double normalizer_s_start(const Normalizer *normalizer, int L);

// Are two the same function of the scores (whatever they were called)?
bool normalizer_equal(const Normalizer *a, const Normalizer *b);

// Prints the table, for --attn help.
void normalizer_print_table(void);

#endif

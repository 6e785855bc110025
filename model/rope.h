// RoPE's rotation angles and the scalings that stretch them over longer texts, for every program. The formulas are
// those of transformers (modeling_rope_utils.py). Tested by dev/tests/test_rope.c and dev/tests/test_rope.py.
#ifndef MODEL_ROPE_H
#define MODEL_ROPE_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include "math/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { ROPE_NONE, ROPE_LINEAR, ROPE_NTK, ROPE_LLAMA3, ROPE_YARN, ROPE_KINDS } RopeKind;

// A scaling, written NAME[:NUMBER...]. Numbers that the kind does not have are 0.
typedef struct {
    RopeKind kind;
    double factor;       // how many times longer the text becomes
    double low, high;    // llama3: rotations over the original length, below and above which a frequency counts as
                         // low (divided by factor) or high (kept)
    double original;     // the length, in tokens, that the model had learned before it was stretched
} RopeScaling;

// What the angles depend on, apart from the position and, under ntk, the length that is processed.
typedef struct {
    double theta;    // base of the wavelengths
    RopeScaling scaling;
    size_t HS, L;    // head size; training length
} RopeAngles;

// A number of a scaling.
typedef struct {
    const char *name;    // in --rope-scaling, where NULL means that it is not written, because it can only be `min`
    const char *key;     // in transformers' rope_parameters
    size_t offset;       // in RopeScaling
    double min, max;
    bool whole;
} RopeNumber;

enum { ROPE_NUMBERS = 4 };    // the most numbers of a kind

// One row per kind. The parser, config.json and the formulas all use it.
typedef struct {
    const char *name;                           // in --rope-scaling
    const char *type;                           // rope_type in transformers
    const RopeNumber *numbers[ROPE_NUMBERS];    // in the order in which they are written
    // The scaled frequency, for the frequency i of the HS/2 that theta alone gives.
    double (*scale)(const RopeAngles *angles, size_t i, double frequency);
} RopeShape;

extern const RopeShape rope_shapes[ROPE_KINDS];

enum { ROPE_TEXT = 96 };    // room for rope_scaling_text()

// Parses NAME[:NUMBER...], such as "linear:4" or "yarn:4:8192". Numbers are rounded to 15 digits, which config.json and
// run.json keep. On failure, returns false with a message that lists the alternatives.
bool rope_scaling_parse(RopeScaling *out, const char *text, char *message, size_t size);

// The inverse of rope_scaling_parse(). Returns out.
const char *rope_scaling_text(const RopeScaling *scaling, char *out, size_t size);

bool rope_scaling_equal(const RopeScaling *a, const RopeScaling *b);

// Sets a number of the scaling, rounded to 15 digits. Returns false if it is out of bounds.
bool rope_scaling_set(RopeScaling *scaling, const RopeNumber *number, double value);
double rope_scaling_get(const RopeScaling *scaling, const RopeNumber *number);

// Returns NULL if the numbers go together and suit heads of this size, else the reason why not.
const char *rope_scaling_wrong(const RopeScaling *scaling, size_t HS);

// By how much the scaling multiplies cos and sin, and with them q and k.
double rope_amplitude(const RopeScaling *scaling);

// The theta for a sequence of T tokens. Only ntk changes it: to theta (T/L)^(HS/(HS-2)) for T > L, which stretches the
// longest wavelength by T/L and keeps the shortest.
double rope_theta(const RopeAngles *angles, size_t T);

// The HS/2 rotation angles per position, in radians, for a sequence of T tokens. The caller frees them.
double *rope_frequencies(const RopeAngles *angles, size_t T);

// cos and sin of t · frequency_i, times the amplitude, for sequences of T tokens
//   cosines, sines (T,HS/2) written
// Inline, because the caller determines `real` (math/real.h).
static inline void rope_table(real *cosines, real *sines, size_t T, RopeAngles angles) {
    size_t half = angles.HS / 2;
    double *frequency = rope_frequencies(&angles, T), amplitude = rope_amplitude(&angles.scaling);
#ifdef _OPENMP    // nvcc builds its host code without OpenMP
    #pragma omp parallel for schedule(static)
#endif
    for (size_t t = 0; t < T; t++) {
        for (size_t i = 0; i < half; i++) {
            double angle = (double)t * frequency[i];
            cosines[t * half + i] = (real)(amplitude * cos(angle));
            sines[t * half + i] = (real)(amplitude * sin(angle));
        }
    }
    free(frequency);
}

#ifdef __cplusplus
}
#endif
#endif

#include "model/rope.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/number.h"
#include "runtime/spelling.h"

// ---------------------------------------------------------------------------------------------------------------------
// The formulas

static double clamp01(double x) {
    return fmin(fmax(x, 0), 1);
}

static double scale_none(const RopeAngles *angles, size_t i, double frequency) {
    (void)angles;
    (void)i;
    return frequency;
}

// Positions divided by the factor.
static double scale_linear(const RopeAngles *angles, size_t i, double frequency) {
    (void)i;
    return frequency / angles->scaling.factor;
}

// Frequencies that make more than `high` rotations over the original length stay; those that make fewer than `low` are
// divided by the factor; between the two, a linear transition.
static double scale_llama3(const RopeAngles *angles, size_t i, double frequency) {
    const RopeScaling *s = &angles->scaling;
    double rotations = s->original * frequency / (2 * M_PI), kept = clamp01((rotations - s->low) / (s->high - s->low));
    (void)i;
    return (1 - kept) * frequency / s->factor + kept * frequency;
}

// The index, as a real number, of the frequency that makes this many rotations over the original length.
static double index_of(const RopeAngles *angles, double rotations) {
    return (double)angles->HS * log(angles->scaling.original / (rotations * 2 * M_PI)) / (2 * log(angles->theta));
}

// Like llama3, with 32 and 1 rotations as the bounds, but the transition is linear in the index i, and its ends are
// rounded outward and limited to 0 and HS - 1. Source: "YaRN: Efficient Context Window Extension of Large Language
// Models", Peng et al. 2023.
static double scale_yarn(const RopeAngles *angles, size_t i, double frequency) {
    enum { FAST = 32, SLOW = 1 };
    double first = fmax(floor(index_of(angles, FAST)), 0);
    double last = fmin(ceil(index_of(angles, SLOW)), (double)angles->HS - 1);
    if (first == last) last += 0.001;
    double divided = clamp01(((double)i - first) / (last - first));
    return divided * frequency / angles->scaling.factor + (1 - divided) * frequency;
}

// YaRN's temperature: scores grow by the square of this number.
double rope_amplitude(const RopeScaling *scaling) {
    return scaling->kind == ROPE_YARN ? 0.1 * log(scaling->factor) + 1 : 1;
}

// Source: "NTK-aware scaled RoPE" (bloc97, 2023), which transformers calls dynamic.
double rope_theta(const RopeAngles *angles, size_t T) {
    double d = (double)angles->HS;
    if (angles->scaling.kind != ROPE_NTK || T <= angles->L) return angles->theta;
    return angles->theta * pow((double)T / (double)angles->L, d / (d - 2));
}

double *rope_frequencies(const RopeAngles *angles, size_t T) {
    size_t half = angles->HS / 2;
    double *frequency = allocate(half, sizeof *frequency, "RoPE's frequencies"), theta = rope_theta(angles, T);
    for (size_t i = 0; i < half; i++) {
        double plain = pow(theta, -2.0 * (double)i / (double)angles->HS);
        frequency[i] = rope_shapes[angles->scaling.kind].scale(angles, i, plain);
    }
    return frequency;
}

// ---------------------------------------------------------------------------------------------------------------------
// The table

#define FIELD(name) offsetof(RopeScaling, name)

static const RopeNumber FACTOR = {"FACTOR", "factor", FIELD(factor), 1, 1e6, false},
                        ONE = {NULL, "factor", FIELD(factor), 1, 1, false},
                        LOW = {"LOW", "low_freq_factor", FIELD(low), 1e-6, 1e6, false},
                        HIGH = {"HIGH", "high_freq_factor", FIELD(high), 1e-6, 1e6, false},
                        ORIGINAL = {"ORIGINAL", "original_max_position_embeddings", FIELD(original), 1, INT_MAX, true};

// clang-format off
const RopeShape rope_shapes[ROPE_KINDS] = {
    [ROPE_NONE]   = {"none",   "default", {NULL},                            scale_none},
    [ROPE_LINEAR] = {"linear", "linear",  {&FACTOR},                         scale_linear},
    [ROPE_NTK]    = {"ntk",    "dynamic", {&ONE},                            scale_none},
    [ROPE_LLAMA3] = {"llama3", "llama3",  {&FACTOR, &LOW, &HIGH, &ORIGINAL}, scale_llama3},
    [ROPE_YARN]   = {"yarn",   "yarn",    {&FACTOR, &ORIGINAL},              scale_yarn},
};
// clang-format on

static double *number_in(RopeScaling *scaling, const RopeNumber *number) {
    return (double *)((char *)scaling + number->offset);
}

double rope_scaling_get(const RopeScaling *scaling, const RopeNumber *number) {
    return *(const double *)((const char *)scaling + number->offset);
}

bool rope_scaling_set(RopeScaling *scaling, const RopeNumber *number, double value) {
    char rounded[32];
    snprintf(rounded, sizeof rounded, "%.15g", value);
    double x = *number_in(scaling, number) = strtod(rounded, NULL);
    return x >= number->min && x <= number->max && (!number->whole || x == floor(x));
}

const char *rope_scaling_wrong(const RopeScaling *scaling, size_t HS) {
    if (scaling->kind == ROPE_LLAMA3 && !(scaling->high > scaling->low))
        return "HIGH (high_freq_factor) must be above LOW (low_freq_factor)";
    if (scaling->kind == ROPE_NTK && HS == 2) return "theta (T/L)^(d/(d-2)) is undefined for heads of size 2";
    return NULL;
}

bool rope_scaling_equal(const RopeScaling *a, const RopeScaling *b) {
    return a->kind == b->kind && a->factor == b->factor && a->low == b->low && a->high == b->high &&
           a->original == b->original;
}

// ---------------------------------------------------------------------------------------------------------------------
// Text

// Writes "llama3:FACTOR:LOW:HIGH:ORIGINAL", or with a scaling its numbers in their place. Returns out.
static const char *write_text(RopeKind kind, const RopeScaling *scaling, char *out, size_t size) {
    const RopeShape *shape = &rope_shapes[kind];
    size_t at = (size_t)snprintf(out, size, "%s", shape->name);
    for (size_t n = 0; n < ROPE_NUMBERS && shape->numbers[n] && at < size; n++) {
        const RopeNumber *number = shape->numbers[n];
        if (!number->name) continue;
        if (scaling) at += (size_t)snprintf(out + at, size - at, ":%.15g", rope_scaling_get(scaling, number));
        else at += (size_t)snprintf(out + at, size - at, ":%s", number->name);
    }
    return out;
}

const char *rope_scaling_text(const RopeScaling *scaling, char *out, size_t size) {
    return write_text(scaling->kind, scaling, out, size);
}

// Returns the kind whose name is the first `length` letters, or ROPE_KINDS.
static RopeKind find_kind(const char *name, size_t length) {
    size_t kind = 0;
    while (kind < ROPE_KINDS &&
           (strlen(rope_shapes[kind].name) != length || memcmp(rope_shapes[kind].name, name, length)))
        kind++;
    return (RopeKind)kind;
}

// " Did you mean NAME?" with the kind that was probably meant, also by its name in transformers, or "".
static const char *nearest_kind(const char *name, char *out, size_t size) {
    char names[ROPE_TEXT] = "";
    size_t at = 0;
    for (size_t i = 0; i < ROPE_KINDS; i++) {
        if (!strcmp(name, rope_shapes[i].type)) {
            snprintf(out, size, " Did you mean %s?", rope_shapes[i].name);
            return out;
        }
        at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", i ? "|" : "", rope_shapes[i].name);
    }
    return nearest_word(names, name, out, size);
}

static bool unknown_kind(const char *text, size_t length, char *message, size_t size) {
    char name[ROPE_TEXT], near[64], pattern[ROPE_TEXT];
    snprintf(name, sizeof name, "%.*s", (int)length, text);
    size_t at = (size_t)snprintf(message, size, "unknown scaling.%s Expected", nearest_kind(name, near, sizeof near));
    for (int i = 0; i < ROPE_KINDS && at < size; i++) {
        const char *before = i == 0 ? "" : ",";
        at += (size_t)snprintf(message + at, size - at, "%s %s", i == ROPE_KINDS - 1 ? " or" : before,
                               write_text((RopeKind)i, NULL, pattern, sizeof pattern));
    }
    return false;
}

// Reads the numbers of the kind, each after a colon. `at` points to the first colon, or the end.
static bool read_numbers(RopeScaling *out, const char *at, char *message, size_t size) {
    const RopeShape *shape = &rope_shapes[out->kind];
    char pattern[ROPE_TEXT];
    bool complete = true;
    for (size_t n = 0; n < ROPE_NUMBERS && shape->numbers[n] && complete; n++) {
        const RopeNumber *number = shape->numbers[n];
        double value;
        if (!number->name) {
            rope_scaling_set(out, number, number->min);
        } else if ((complete = *at == ':')) {
            size_t length = strcspn(++at, ":");
            if (!number_read(at, length, &value) || !rope_scaling_set(out, number, value)) {
                snprintf(message, size, "%s is '%.*s'; expected a %snumber from %.15g to %.15g", number->name,
                         (int)length, at, number->whole ? "whole " : "", number->min, number->max);
                return false;
            }
            at += length;
        }
    }
    if (complete && !*at) return true;
    snprintf(message, size, "expected %s", write_text(out->kind, NULL, pattern, sizeof pattern));
    return false;
}

bool rope_scaling_parse(RopeScaling *out, const char *text, char *message, size_t size) {
    size_t length = strcspn(text, ":");
    *out = (RopeScaling){.kind = find_kind(text, length)};
    if (out->kind == ROPE_KINDS) return unknown_kind(text, length, message, size);
    if (!read_numbers(out, text + length, message, size)) return false;
    const char *wrong = rope_scaling_wrong(out, 0);
    if (wrong) snprintf(message, size, "%s", wrong);
    return !wrong;
}

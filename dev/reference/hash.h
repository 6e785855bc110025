// The numbers that both the reference and the C tests generate, so that no fixture has to store an input, and the
// digest in which a fixture stores a large tensor. fixtures.py has the same formulas in Python. README.md explains why.
#ifndef REFERENCE_HASH_H
#define REFERENCE_HASH_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    FIXTURE_FULL = 100,    // a tensor with at most this many elements is stored in full
    FIXTURE_PROJECTIONS = 16,
    FIXTURE_SAMPLES = 8,
    FIXTURE_DIGEST = 1 + FIXTURE_PROJECTIONS + FIXTURE_SAMPLES
};

// splitmix64's finalizer.
static inline uint64_t fixture_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The seed of a stream of numbers, from its name ("model.norm.weight", "tokens"): 64-bit FNV-1a of the name's bytes,
// mixed.
static inline uint64_t fixture_stream(const char *name) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001b3ull;
    return fixture_mix(h);
}

// Number i of a stream, 64 bits: splitmix64 with the stream's seed.
static inline uint64_t fixture_hash(uint64_t stream, uint64_t i) {
    return fixture_mix(stream + (i + 1) * 0x9e3779b97f4a7c15ull);
}

// Uniform in (-1, 1): an odd multiple of 2^-24, which a float holds exactly.
static inline double fixture_uniform(uint64_t stream, uint64_t i) {
    return (double)(2 * (int64_t)(fixture_hash(stream, i) >> 40) + 1 - (1 << 24)) / (1 << 24);
}

// out[j] = mean + scale * uniform(name, first + j), j < n, in double and then rounded to float.
static inline void fixture_fill(float *out, size_t n, const char *name, size_t first, float mean, float scale) {
    uint64_t stream = fixture_stream(name);
    for (size_t j = 0; j < n; j++) out[j] = (float)((double)mean + (double)scale * fixture_uniform(stream, first + j));
}

// The mean and the scale of a parameter, by the first row whose word is in its name. All others are matrices: 0 and
// 2/sqrt(columns).
static inline void fixture_weight_rule(const char *name, size_t columns, float *mean, float *scale) {
    static const struct {
        const char *words;
        float mean, scale;
    } RULES[] = {{"norm.weight", 1.0f, 0.3f}, {"_gain", 0.0f, 1.5f},     {"_offset", 0.0f, 0.6f},
                 {"attn_scale", 0.3f, 0.1f},  {"attn_bias", 0.0f, 0.2f}, {"attn_pn", 1.0f, 0.3f},
                 {"attn_sink", 0.0f, 0.5f},   {"proj.bias", 0.0f, 0.5f}};
    *mean = 0.0f;
    *scale = (float)(2.0 / sqrt((double)columns));
    for (size_t i = 0; i < sizeof RULES / sizeof *RULES; i++)
        if (strstr(name, RULES[i].words)) {
            *mean = RULES[i].mean;
            *scale = RULES[i].scale;
            return;
        }
}

// Token i of the one token stream, in 0 .. vocab-1.
static inline int fixture_token(uint64_t i, int vocab) {
    return (int)(fixture_hash(fixture_stream("tokens"), i) % (uint64_t)vocab);
}

// Index number i of the stream "name", in 0 .. n-1: which logits and which elements are stored.
static inline size_t fixture_index(const char *name, uint64_t i, size_t n) {
    return (size_t)(fixture_hash(fixture_stream(name), i) % n);
}

// out[0] = |x|; out[1 + k] = sum_i r_ki x_i with r_ki = +1 where bit k of hash("projection", i) is 1, else -1;
// out[17 + j] = x[index("sample", j)].
static inline void fixture_digest(double out[FIXTURE_DIGEST], const float *x, size_t n) {
    uint64_t stream = fixture_stream("projection");
    double square = 0, *projection = out + 1, *sample = projection + FIXTURE_PROJECTIONS;
    for (int k = 0; k < FIXTURE_PROJECTIONS; k++) projection[k] = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = fixture_hash(stream, i);
        square += (double)x[i] * x[i];
        for (int k = 0; k < FIXTURE_PROJECTIONS; k++) projection[k] += (bits >> k & 1) ? x[i] : -x[i];
    }
    out[0] = sqrt(square);
    for (int j = 0; j < FIXTURE_SAMPLES; j++) sample[j] = x[fixture_index("sample", j, n)];
}

// The distance of x (n elements) from the stored form (n numbers if n <= FIXTURE_FULL, otherwise a digest), relative to
// the stored norm or to floor, whichever is larger (a gradient of 0 has no relative error):
//   whole:   |x - stored| / norm
//   digest:  the largest of | |x| - norm |, the root mean square of the projections' differences (which estimates
//            |x - stored|), and the largest difference of a sample; over norm.
// It is 0 if nothing differs, even if both are all zeros, and infinite if x contains a NaN.
static inline double fixture_error(const float *stored, const float *x, size_t n, double floor) {
    double square = 0, norm = 0, error, digest[FIXTURE_DIGEST];
    if (n <= FIXTURE_FULL) {
        for (size_t i = 0; i < n; i++) {
            square += ((double)x[i] - stored[i]) * ((double)x[i] - stored[i]);
            norm += (double)stored[i] * stored[i];
        }
        error = sqrt(square);
        norm = sqrt(norm);
    } else {
        fixture_digest(digest, x, n);
        norm = stored[0];
        for (int k = 1; k <= FIXTURE_PROJECTIONS; k++) square += (digest[k] - stored[k]) * (digest[k] - stored[k]);
        error = fmax(fabs(digest[0] - norm), sqrt(square / FIXTURE_PROJECTIONS));
        for (int j = 1 + FIXTURE_PROJECTIONS; j < FIXTURE_DIGEST; j++) error = fmax(error, fabs(digest[j] - stored[j]));
        if (isnan(digest[0])) error = NAN;
    }
    if (error == 0) return 0;
    error /= fmax(norm, floor);
    return error >= 0 ? error : INFINITY;
}

#endif

#include "attention/attention_cpu.h"

#include <omp.h>
#include <string.h>

#include "runtime/gemm.h"

enum { BLOCK = 64 };   // rows of queries at a time: each needs its scores for all visible keys, BLOCK · T floats a thread

static size_t block_rows(size_t T) {
    return T < BLOCK ? T : BLOCK;
}

// Floats from one row of scores to the next: an odd number of cache lines, so that a column's entries spread over the cache. With a
// power of two they collide, and the products that read the scores by columns take twice as long.
static size_t row_step(size_t T) {
    return ((T + 15) / 16 | 1) * 16;
}

// A thread's part: two blocks of scores (A and dA) and a block of dout.
static size_t thread_scratch(AttentionShape shape) {
    return block_rows(shape.T) * (2 * row_step(shape.T) + shape.HS);
}

// And the partial ds of each head of each sequence.
size_t attention_scratch(AttentionShape shape, int threads) {
    return (size_t)threads * thread_scratch(shape) + shape.B * shape.NH;
}

// ---------------------------------------------------------------------------------------------------------------------------
// Rows. phi and norm are constants where these are called, so that each normaliser has loops of its own without branches.

typedef struct {
    int n;                     // visible keys
    float c;                   // z = c s
    float shift, inverse;      // subtracted from z; 1/Z
} Row;

// s (n): scores in, f out (not yet divided by Z). Fills row->shift and row->inverse.
NORMALIZER_INLINE void row_forward(int phi, int norm, double C, float *s, Row *row) {
    int n = row->n;
    float c = row->c, shift = 0.0f, sum = 0.0f;
    if (subtracts_maximum(phi, norm)) {
        float largest = -INFINITY, smallest = INFINITY;
        #pragma omp simd reduction(max : largest) reduction(min : smallest)
        for (int j = 0; j < n; j++) {
            largest = s[j] > largest ? s[j] : largest;
            smallest = s[j] < smallest ? s[j] : smallest;
        }
        shift = c >= 0.0f ? c * largest : c * smallest;
        if (C > 0.0 && !(shift >= 0.0f)) shift = 0.0f;         // C is e^0 C: its exponent takes part in the maximum
    }
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        float f = phi_value(phi, c * s[j] - shift);
        s[j] = f;
        sum += f;
    }
    row->shift = shift;
    row->inverse = row_inverse(norm, C, sum, shift, n);
}

// s (n): scores in, A out.  dA (n): in, dS out.  D = sum_j A dA.  Returns sum_j dz s.
NORMALIZER_INLINE float row_backward(int phi, int norm, float *s, float *dA, const Row *row, float D) {
    int n = row->n;
    float c = row->c, shift = row->shift, inverse = row->inverse, sum = 0.0f;
    if (norm != NORM_L1) D = 0.0f;
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        float z = c * s[j] - shift;
        float f = phi_value(phi, z);
        float dz = (dA[j] - D) * inverse * phi_slope(phi, z, f);
        sum += dz * s[j];
        dA[j] = c * dz;
        s[j] = f * inverse;
    }
    return sum;
}

// One instance for each phi and norm of the table.
NORMALIZER_INLINE void forward_phi(int phi, const Normalizer *normalizer, float *s, Row *row) {
#define CASE(kind_, ...) case kind_: row_forward(phi, kind_, normalizer->norm.value, s, row); break;
    switch (normalizer->norm.kind) { NORM_VALUES(CASE) }
#undef CASE
}

static void forward_row(const Normalizer *normalizer, float *s, Row *row) {
#define CASE(kind_, ...) case kind_: forward_phi(kind_, normalizer, s, row); break;
    switch (normalizer->phi.kind) { PHI_VALUES(CASE) }
#undef CASE
}

NORMALIZER_INLINE float backward_phi(int phi, const Normalizer *normalizer, float *s, float *dA, const Row *row, float D) {
#define CASE(kind_, ...) case kind_: return row_backward(phi, kind_, s, dA, row, D);
    switch (normalizer->norm.kind) { NORM_VALUES(CASE) }
#undef CASE
    return 0.0f;
}

static float backward_row(const Normalizer *normalizer, float *s, float *dA, const Row *row, float D) {
#define CASE(kind_, ...) case kind_: return backward_phi(kind_, normalizer, s, dA, row, D);
    switch (normalizer->phi.kind) { PHI_VALUES(CASE) }
#undef CASE
    return 0.0f;
}

// ---------------------------------------------------------------------------------------------------------------------------
// Heads

static uint64_t head_forward(float *out, float *stats, const float *q, const float *k, const float *v, float s,
                             AttentionShape shape, float *scores) {
    size_t T = shape.T, HS = shape.HS, step = shape.NH * HS, ld = row_step(T);
    uint64_t without_weight = 0;
    for (size_t from = 0; from < T; from += BLOCK) {
        size_t rows = T - from < BLOCK ? T - from : BLOCK, keys = from + rows;
        gemm('N', 'T', rows, keys, HS, q + from * HS, HS, k, HS, 0.0f, scores, ld);
        for (size_t r = 0; r < rows; r++) {
            Row row = {.n = (int)(from + r + 1)};
            row.c = row_scale(shape.normalizer->scale.kind, row.n, (int)HS, s);
            forward_row(shape.normalizer, scores + r * ld, &row);
            memset(scores + r * ld + row.n, 0, (keys - (size_t)row.n) * sizeof *scores);
            stats[2 * (from + r)] = row.shift;
            stats[2 * (from + r) + 1] = row.inverse;
            without_weight += row.inverse == 0.0f;
        }
        gemm('N', 'N', rows, HS, keys, scores, ld, v, HS, 0.0f, out + from * step, step);
        for (size_t r = 0; r < rows; r++) {
            float inverse = stats[2 * (from + r) + 1];
            for (size_t c = 0; c < HS; c++) out[(from + r) * step + c] *= inverse;
        }
    }
    return without_weight;
}

uint64_t attention_forward(float *out, float *stats, const float *q, const float *k, const float *v, const float *s,
                           AttentionShape shape, float *scratch) {
    size_t B = shape.B, T = shape.T, NH = shape.NH, HS = shape.HS, part = thread_scratch(shape);
    uint64_t without_weight = 0;
    #pragma omp parallel for schedule(static) reduction(+ : without_weight)
    for (size_t i = 0; i < B * NH; i++) {
        size_t b = i / NH, h = i % NH;
        without_weight += head_forward(out + (b * T * NH + h) * HS, stats + i * T * 2, q + i * T * HS, k + i * T * HS, v + i * T * HS,
                                       s ? s[h] : 1.0f, shape, scratch + (size_t)omp_get_thread_num() * part);
    }
    return without_weight;
}

// Returns this head's part of ds.
static float head_backward(float *dq, float *dk, float *dv, const float *dout, const float *out, const float *stats, const float *q,
                           const float *k, const float *v, float s, AttentionShape shape, float *scores) {
    size_t T = shape.T, HS = shape.HS, step = shape.NH * HS, ld = row_step(T);
    float *dscores = scores + block_rows(T) * ld, *dout_rows = dscores + block_rows(T) * ld;
    double ds = 0;
    // The last block reaches all keys, so the blocks go backwards: the first product writes dk and dv, the others add.
    size_t last = (T - 1) / BLOCK * BLOCK;
    for (size_t from = last;; from -= BLOCK) {
        size_t rows = T - from < BLOCK ? T - from : BLOCK, keys = from + rows;
        for (size_t r = 0; r < rows; r++) memcpy(dout_rows + r * HS, dout + (from + r) * step, HS * sizeof *dout);
        gemm('N', 'T', rows, keys, HS, q + from * HS, HS, k, HS, 0.0f, scores, ld);
        gemm('N', 'T', rows, keys, HS, dout_rows, HS, v, HS, 0.0f, dscores, ld);
        for (size_t r = 0; r < rows; r++) {
            Row row = {.n = (int)(from + r + 1), .shift = stats[2 * (from + r)], .inverse = stats[2 * (from + r) + 1]};
            row.c = row_scale(shape.normalizer->scale.kind, row.n, (int)HS, s);
            float D = 0.0f;
            #pragma omp simd reduction(+ : D)
            for (size_t c = 0; c < HS; c++) D += dout_rows[r * HS + c] * out[(from + r) * step + c];
            float sum = backward_row(shape.normalizer, scores + r * ld, dscores + r * ld, &row, D);
            ds += (double)row_scale_slope(shape.normalizer->scale.kind, row.n, (int)HS) * sum;
            memset(scores + r * ld + row.n, 0, (keys - (size_t)row.n) * sizeof *scores);
            memset(dscores + r * ld + row.n, 0, (keys - (size_t)row.n) * sizeof *scores);
        }
        float beta = from == last ? 0.0f : 1.0f;
        gemm('T', 'N', keys, HS, rows, scores, ld, dout_rows, HS, beta, dv, HS);
        gemm('T', 'N', keys, HS, rows, dscores, ld, q + from * HS, HS, beta, dk, HS);
        gemm('N', 'N', rows, HS, keys, dscores, ld, k, HS, 0.0f, dq + from * HS, HS);
        if (from == 0) return (float)ds;
    }
}

void attention_backward(float *dq, float *dk, float *dv, float *ds, const float *dout, const float *out, const float *stats,
                        const float *q, const float *k, const float *v, const float *s, AttentionShape shape, float *scratch) {
    size_t B = shape.B, T = shape.T, NH = shape.NH, HS = shape.HS, part = thread_scratch(shape);
    float *ds_parts = scratch + (size_t)omp_get_max_threads() * part;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B * NH; i++) {
        size_t b = i / NH, h = i % NH, at = i * T * HS, row = (b * T * NH + h) * HS;
        ds_parts[i] = head_backward(dq + at, dk + at, dv + at, dout + row, out + row, stats + i * T * 2, q + at, k + at, v + at,
                                    s ? s[h] : 1.0f, shape, scratch + (size_t)omp_get_thread_num() * part);
    }
    if (!ds) return;
    for (size_t b = 0; b < B; b++)
        for (size_t h = 0; h < NH; h++) ds[h] += ds_parts[b * NH + h];
}

bool attention_row(float *out, const float *q, const float *k, const float *v, size_t n, size_t step, size_t HS,
                   const Normalizer *normalizer, float s, float *scratch) {
    for (size_t j = 0; j < n; j++) {
        float sum = 0.0f;
        #pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < HS; c++) sum += q[c] * k[j * step + c];
        scratch[j] = sum;
    }
    Row row = {.n = (int)n, .c = row_scale(normalizer->scale.kind, (int)n, (int)HS, s)};
    forward_row(normalizer, scratch, &row);
    memset(out, 0, HS * sizeof *out);
    for (size_t j = 0; j < n; j++) {
        float f = scratch[j] * row.inverse;
        #pragma omp simd
        for (size_t c = 0; c < HS; c++) out[c] += f * v[j * step + c];
    }
    return row.inverse != 0.0f;
}

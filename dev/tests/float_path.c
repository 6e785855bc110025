// Linked into test_gradients next to its double code, whose functions have other names (see there).
#include "dev/tests/float_path.h"

#include <omp.h>
#include <stdlib.h>

#include "attention/attention_cpu.h"
#include "runtime/error.h"

static float *floats(const double *from, size_t n) {
    float *x = calloc(n + 1, sizeof *x);
    if (!x) fail(EXIT_RESOURCE, "out of memory.");
    for (size_t i = 0; from && i < n; i++) x[i] = (float)from[i];
    return x;
}

static void give_back(double *to, float *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = from[i];
    free(from);
}

NORMALIZER_INLINE void phi_loop(int phi, const float *restrict z, float one, float *restrict f, float *restrict slope,
                                size_t n) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++) phi_both(phi, z[i], one, &f[i], &slope[i]);
}

void phi_in_float(int phi, const double *z, double one, double *f, double *slope, size_t n) {
    float *x = floats(z, n), *values = floats(NULL, n), *slopes = floats(NULL, n);
#define CASE(kind_, ...) case kind_: phi_loop(kind_, x, (float)one, values, slopes, n); break;
    switch (phi) { PHI_VALUES(CASE) }
#undef CASE
    give_back(f, values, n);
    give_back(slope, slopes, n);
    free(x);
}

void attention_in_float(const FloatAttention *c) {
    size_t NH = c->NH, NKV = c->NKV, HS = c->HS, VS = c->VS, rows = c->B * NH * c->T;
    size_t queries = rows * HS, keys = c->B * c->T * NKV * HS, values = c->B * c->T * NKV * VS, outputs = rows * VS;
    const Normalizer *a = c->normalizer;
    AttentionShape shape = {a, c->B, c->T, NH, NKV, HS, VS, c->L, .cached = false};
    float *q = floats(c->q, queries), *k = floats(c->k, keys), *v = floats(c->v, values),
          *dout = floats(c->dout, outputs);
    float *out = floats(NULL, outputs), *dq = floats(NULL, queries), *dk = floats(NULL, keys),
          *dv = floats(NULL, values);
    float *stats = floats(NULL, rows * ROW_STATS);
    float *scratch = floats(NULL, attention_scratch(shape, omp_get_max_threads()));
    Scalars scalars = {{NULL}};
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (c->scalars[x]) scalars.of[x] = floats(c->scalars[x], scalar_size(x, NH, (size_t)c->L));
    AttentionInput in = {.q = {q, NH * HS, HS}, .k = {k, NKV * HS, HS}, .v = {v, NKV * VS, VS}, .first = c->first};
    AttentionInputGrads d = {{dq, NH * HS, HS}, {dk, NKV * HS, HS}, {dv, NKV * VS, VS}};
    attention_forward(out, stats, in, scalars, shape, scratch);
    attention_backward(d, (ScalarGrads){{NULL}}, dout, out, stats, in, scalars, shape, scratch);
    give_back(c->out, out, outputs);
    give_back(c->dq, dq, queries);
    give_back(c->dk, dk, keys);
    give_back(c->dv, dv, values);
    free(q);
    free(k);
    free(v);
    free(dout);
    free(stats);
    free(scratch);
    for (int x = 0; x < SCALAR_COUNT; x++) free((void *)scalars.of[x]);
}

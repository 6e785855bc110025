#include "runtime/sampler.h"

#include <math.h>
#include <stdlib.h>

#include "runtime/error.h"
#include "runtime/vecmath.h"

typedef struct {
    float p;
    int32_t id;
} Candidate;

// The likelier first; of equals the lower id, so that the order is the same everywhere.
static int by_probability(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->p != y->p) return x->p > y->p ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

int32_t sample_token(float *logits, size_t V, double temperature, size_t top_k, double top_p, double u) {
    size_t best = 0;
    for (size_t v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (temperature <= 0) return (int32_t)best;
    float largest = logits[best], inverse = (float)(1 / temperature);
    double sum = 0;
    for (size_t v = 0; v < V; v++) {
        logits[v] = vec_exp((logits[v] - largest) * inverse);
        sum += logits[v];
    }
    if ((top_k == 0 || top_k >= V) && top_p >= 1) {
        double at = u * sum;
        for (size_t v = 0; v < V; v++)
            if ((at -= logits[v]) < 0) return (int32_t)v;
        return (int32_t)best;
    }
    static Candidate *candidates;
    static size_t room;
    if (room < V) {
        free(candidates);
        candidates = malloc(V * sizeof *candidates);
        if (!candidates) fail(EXIT_RESOURCE, "out of memory for the candidates of a sample.");
        room = V;
    }
    for (size_t v = 0; v < V; v++) candidates[v] = (Candidate){logits[v], (int32_t)v};
    qsort(candidates, V, sizeof *candidates, by_probability);
    size_t count = top_k && top_k < V ? top_k : V;
    double kept = 0, all = 0;
    for (size_t i = 0; i < count; i++) all += candidates[i].p;
    for (size_t i = 0; i < count; i++)
        if ((kept += candidates[i].p) >= top_p * all) count = i + 1;
    double at = u * kept;
    for (size_t i = 0; i < count; i++)
        if ((at -= candidates[i].p) < 0) return candidates[i].id;
    return candidates[0].id;
}

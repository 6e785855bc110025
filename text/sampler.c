#include "text/sampler.h"

#include <math.h>
#include <stdbool.h>

#include "math/vecmath.h"

// Orders candidates by probability, ties by id, so that the order is the same everywhere.
static bool before(Candidate a, Candidate b) {
    return a.p != b.p ? a.p > b.p : a.id < b.id;
}

// Restores the heap order (each element comes before its children 2i + 1 and 2i + 2) below index `at`.
static void sift(Candidate *heap, size_t count, size_t at) {
    Candidate moved = heap[at];
    for (size_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], moved)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

// Moves the first element of a heap of `count` to its end and restores the order of the rest.
static Candidate pop(Candidate *heap, size_t count) {
    Candidate first = heap[0];
    heap[0] = heap[count - 1];
    sift(heap, count - 1, 0);
    return heap[count - 1] = first;
}

int32_t sample_token(float *logits, Candidate *candidates, size_t V, double temperature, size_t top_k, double top_p,
                     double u) {
    size_t best = 0;
    bool differ = V == 1;
    for (size_t v = 0; v < V; v++) {
        if (!isfinite(logits[v])) return -1;
        differ = differ || logits[v] != logits[0];
        if (logits[v] > logits[best]) best = v;
    }
    if (!differ) return -1;
    if (temperature < 1e-6) return (int32_t)best;
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
    for (size_t v = 0; v < V; v++) candidates[v] = (Candidate){logits[v], (int32_t)v};
    // Only some are needed in order, so use a heap: the i-th most likely ends up in candidates[V - 1 - i].
    for (size_t i = V / 2; i-- > 0;) sift(candidates, V, i);
    size_t most = top_k && top_k < V ? top_k : V, sorted = 0, count = 0;
    double all = most < V ? 0 : sum, kept = 0;
    while (most < V && sorted < most) {
        all += pop(candidates, V - sorted).p;
        sorted++;
    }
    for (; count == 0 || (count < most && kept < top_p * all); count++) {
        if (count == sorted) {
            pop(candidates, V - sorted);
            sorted++;
        }
        kept += candidates[V - 1 - count].p;
    }
    double at = u * kept;
    for (size_t i = 0; i < count; i++)
        if ((at -= candidates[V - 1 - i].p) < 0) return candidates[V - 1 - i].id;
    return candidates[V - 1].id;
}

// adamw [PARAMETERS]: the bandwidth of an AdamW step of the trainer, 50 million parameters unless given, beside that of
// a parallel memcpy(). Prints GB/s, the bytes of a parameter, and the median time of 9 steps: without and with a copy
// of the weights in bf16, and once more with subnormal moments, as they are and counted as 0 (runtime/subnormal.h).
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "train_gpt2.c"

#include "runtime/start.h"
#include "runtime/subnormal.h"
#pragma GCC diagnostic pop

enum { ROUNDS = 9 };

typedef struct {
    real *param, *mean, *square, *grad;
    uint16_t *rounded;
    size_t n;
} Arrays;

static void step(const Arrays *x) {
    adamw(x->param, x->mean, x->square, x->rounded, x->grad, x->n, 1, (AdamW){1e-4, 0.9, 0.95, 1e-8, 0.1, 1000});
}

// Each thread copies a part, which stays the same from round to round.
static void copy(const Arrays *x) {
    #pragma omp parallel
    {
        size_t threads = (size_t)omp_get_num_threads(), part = x->n / threads, at = part * (size_t)omp_get_thread_num();
        memcpy(x->mean + at, x->param + at, part * sizeof *x->mean);
    }
}

static int ascending(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static void measure(const char *what, void body(const Arrays *), const Arrays *x, size_t bytes) {
    double seconds[ROUNDS];
    body(x);
    for (int i = 0; i < ROUNDS; i++) {
        double start = now();
        body(x);
        seconds[i] = now() - start;
    }
    qsort(seconds, ROUNDS, sizeof *seconds, ascending);
    double median = seconds[ROUNDS / 2];
    printf("%-36s %6.1f GB/s  %2zu bytes  %7.1f ms\n", what, (double)(bytes * x->n) / median / 1e9, bytes,
           1e3 * median);
}

static void fill(real *x, size_t n, real value) {
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) x[i] = value;
}

// What 1,000 steps without a gradient leave: 0.9 times the smallest number rounds to itself.
static void forget(const Arrays *x) {
    fill(x->grad, x->n, 0);
    fill(x->mean, x->n, REAL_MIN / (1 << 23));
}

static void as_they_are(const Arrays *x) {
    (void)x;
    #pragma omp parallel
    restore_subnormals(0x1F80);    // the mode in which a process starts
}

int main(int argc, char **argv) {
    start_threads(0);
    Arrays x = {.n = argc > 1 ? strtoul(argv[1], NULL, 10) : 50000000};
    real **arrays[] = {&x.param, &x.mean, &x.square, &x.grad};
    for (int i = 0; i < 4; i++) {
        *arrays[i] = aligned_alloc(64, (x.n * sizeof(real) + 63) / 64 * 64);
        if (!*arrays[i]) fail(EXIT_RESOURCE, "out of memory for %zu parameters.", x.n);
        fill(*arrays[i], x.n, (real)1e-3);
    }
    uint16_t *rounded = calloc(x.n, sizeof *rounded);
    if (!rounded) fail(EXIT_RESOURCE, "out of memory for %zu parameters.", x.n);
    measure("memcpy", copy, &x, 2 * sizeof(real));
    measure("AdamW", step, &x, 7 * sizeof(real));
    x.rounded = rounded;
    measure("AdamW, rounding", step, &x, 7 * sizeof(real) + sizeof *rounded);
    x.rounded = NULL;
    forget(&x);
    as_they_are(&x);
    measure("AdamW, subnormal moments", step, &x, 7 * sizeof(real));
    forget(&x);
    #pragma omp parallel
    flush_subnormals();
    measure("AdamW, subnormal moments count as 0", step, &x, 7 * sizeof(real));
    return EXIT_DONE;
}

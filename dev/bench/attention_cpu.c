// Times attention of one normalizer, for dev/bench/attention_cpu.py.
//
//   build/bench/attention_cpu NAME T B NH HS SECONDS
//
// Prints the medians of the forward and of the backward pass in ms.
#include <stdio.h>
#include <stdlib.h>

#include <omp.h>

#include "attention/attention_cpu.h"
#include "math/random.h"
#include "runtime/clock.h"
#include "runtime/error.h"
#include "runtime/subnormal.h"

static float *normals(size_t n, uint64_t place) {
    float *x = aligned_alloc(64, (n * sizeof *x + 63) / 64 * 64);
    if (!x) fail(EXIT_RESOURCE, "out of memory.");
    random_normal_fill(x, n, 0, 1, 1337, place);
    return x;
}

static int ascending(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double median(double *x, size_t n) {
    qsort(x, n, sizeof *x, ascending);
    return x[n / 2];
}

// Divides each row of x (rows, width) by its norm, which attention leaves to its caller.
static void normalize(float *x, size_t rows, size_t width) {
    for (size_t r = 0; r < rows; r++) {
        float sum = 0;
        for (size_t i = 0; i < width; i++) sum += x[r * width + i] * x[r * width + i];
        for (size_t i = 0; i < width; i++) x[r * width + i] /= sqrtf(sum);
    }
}

int main(int argc, char **argv) {
    enum { MOST = 1000 };
    static double forward[MOST], backward[MOST];
    Normalizer normalizer;
    char message[1024];
    program_name = "attention_cpu";
    flush_subnormals();
    if (argc != 7) fail(EXIT_USAGE, "expected NAME T B NH HS SECONDS.");
    if (!normalizer_parse(&normalizer, argv[1], message, sizeof message)) fail(EXIT_USAGE, "%s: %s.", argv[1], message);
    size_t T = strtoul(argv[2], NULL, 10), B = strtoul(argv[3], NULL, 10), NH = strtoul(argv[4], NULL, 10),
           HS = strtoul(argv[5], NULL, 10);
    double seconds = atof(argv[6]), start = now();
    AttentionShape shape = {&normalizer, B, T, NH, NH, HS, HS, (int)T, .window = 0};
    size_t rows = B * NH * T, n = rows * HS, runs = 0, least = seconds > 0 ? 3 : 1;
    float *dout = normals(n, 3);
    float *out = normals(n, 7), *stats = normals(rows * ROW_STATS, 11);
    float *scratch =
        aligned_alloc(64, (attention_scratch(shape, omp_get_max_threads()) * sizeof *scratch + 63) / 64 * 64);
    Scalars scalars = {{NULL}};
    ScalarGrads grads = {{NULL}};
    for (Scalar x = 0; x < SCALAR_COUNT; x++) {
        size_t size = scalar_size(x, NH, T);
        if (!normalizer_has(&normalizer, x)) continue;
        float *values = normals(size, 4);
        for (size_t i = 0; i < size; i++) values[i] = (float)normalizer_start(&normalizer, x, T, 0);
        scalars.of[x] = values;
        grads.of[x] = normals(size, 12);
    }
    // As in the trainer, q, k and v lie in one array and their gradients in another.
    size_t row = 3 * NH * HS;
    float *qkv = normals(3 * n, 0), *dqkv = normals(3 * n, 8);
    if (normalizer.qk.kind == QK_L2) normalize(qkv, 3 * rows, HS);
    AttentionInput in = {.q = {qkv, row, HS},
                         .k = {qkv + NH * HS, row, HS},
                         .v = {qkv + 2 * NH * HS, row, HS},
                         .tiles = tiles_available(false)};
    AttentionInputGrads d = {{dqkv, row, HS}, {dqkv + NH * HS, row, HS}, {dqkv + 2 * NH * HS, row, HS}};
    if (!scratch) fail(EXIT_RESOURCE, "out of memory.");
    for (start = now(); runs < MOST && (runs < least || now() - start < seconds); runs++) {
        double from = now();
        attention_forward(out, stats, in, scalars, shape, scratch);
        double between = now();
        attention_backward(d, grads, dout, out, stats, in, scalars, shape, scratch);
        forward[runs] = 1000 * (between - from);
        backward[runs] = 1000 * (now() - between);
    }
    printf("%.4f %.4f\n", median(forward, runs), median(backward, runs));
    return EXIT_DONE;
}

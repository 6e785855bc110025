// random: Philox against published values; moments and tails of the normal numbers; a value depends only on its index.
#include <math.h>
#include <omp.h>

#include "dev/tests/check.h"
#include "math/random.h"

static void test_bits(void) {
    check_group("Philox4x32-10 against the published vectors");
    // From the Random123 distribution's kat_vectors: counter and key all 0; all ones; the digits of pi.
    CHECK(random_u64(0, 0, 0) == 0xe169c58d6627e8d5u, "%016llx", (unsigned long long)random_u64(0, 0, 0));
    CHECK(random_u64(~0ull, ~0ull, ~0ull) == 0x41c83b0e408f276du, "%016llx",
          (unsigned long long)random_u64(~0ull, ~0ull, ~0ull));
    CHECK(random_u64(0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u) == 0x94fdccebd16cfe09u, "%016llx",
          (unsigned long long)random_u64(0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u));
}

static void test_uniform(void) {
    check_group("uniforms");
    double sum = 0, squares = 0, low = 1, high = 0;
    const int n = 1000000;
    for (int i = 0; i < n; i++) {
        double u = random_uniform(7, 3, (uint64_t)i);
        sum += u;
        squares += u * u;
        low = fmin(low, u);
        high = fmax(high, u);
    }
    CHECK(low >= 0 && high < 1 && low < 1e-5 && high > 1 - 1e-5, "%g to %g", low, high);
    CHECK(fabs(sum / n - 0.5) < 5 * 0.2887 / 1000 && fabs(squares / n - 1.0 / 3) < 5 * 0.2981 / 1000, "moments %g %g",
          sum / n, squares / n);
}

// The bounds are five standard errors: sqrt of (1, 2, 15, 96) / n for the first four moments.
static void test_normal(void) {
    check_group("normals: moments, tails, neighbors");
    const size_t n = (size_t)1 << 22;
    float *x = malloc(n * sizeof *x);
    random_normal_fill(x, n, 0.0f, 1.0f, 1234, 5);
    double m1 = 0, m2 = 0, m3 = 0, m4 = 0, neighbor = 0, lane = 0, pair = 0;
    size_t beyond3 = 0, beyond4 = 0;
    for (size_t i = 0; i < n; i++) {
        double a = x[i];
        m1 += a;
        m2 += a * a;
        m3 += a * a * a;
        m4 += a * a * a * a;
        beyond3 += fabs(a) > 3;
        beyond4 += fabs(a) > 4;
        if (i >= 16) {
            lane += a * x[i - 16];
            neighbor += a * x[i - 1];
            pair += (a * a - 1) * ((double)x[i - 16] * x[i - 16] - 1) / 2;
        }
    }
    double root = sqrt((double)n);
    CHECK(fabs(m1 / n) < 5 / root && fabs(m2 / n - 1) < 5 * sqrt(2) / root, "mean %g, variance %g", m1 / n, m2 / n);
    CHECK(fabs(m3 / n) < 5 * sqrt(15) / root && fabs(m4 / n - 3) < 5 * sqrt(96) / root, "third %g, fourth %g", m3 / n,
          m4 / n);
    CHECK(fabs(neighbor / n) < 5 / root && fabs(lane / n) < 5 / root && fabs(pair / n) < 5 / root,
          "correlations %g %g %g", neighbor / n, lane / n, pair / n);
    double p3 = erfc(3 / sqrt(2)), p4 = erfc(4 / sqrt(2));
    CHECK(fabs(beyond3 - p3 * n) < 5 * sqrt(p3 * n) && fabs(beyond4 - p4 * n) < 5 * sqrt(p4 * n),
          "beyond 3: %zu, beyond 4: %zu", beyond3, beyond4);
    free(x);
}

// Computes the same normals from random_u64's words in float64 with libm: words 0 and 1 of a counter give two normals,
// words 2 and 3 two more. The uniform number is first rounded to float32, as in the library.
static void test_against_libm(void) {
    check_group("normals against float64 from libm");
    enum { N = 64 * 1000 };
    static float x[N];
    random_normal_fill(x, N, 0.0f, 1.0f, 99, 17);
    double worst = 0;
    for (int i = 0; i < N; i++) {
        if ((i / 16) % 4 >= 2) continue;    // random_u64 returns the first two words
        uint64_t bits = random_u64(99, 17, (uint64_t)((i / 64) * 16 + i % 16));
        double radius = sqrt(-2 * log((double)(((float)((uint32_t)bits >> 1) + 0.5f) * 0x1p-31f)));
        double angle = 2 * M_PI * (double)(uint32_t)(bits >> 32) * 0x1p-32 - M_PI / 4;
        double want = radius * ((i / 16) % 4 == 0 ? cos(angle) : sin(angle));
        worst = fmax(worst, fabs(x[i] - want));
    }
    CHECK(worst < 1e-6, "largest difference %g", worst);
}

static void test_reproducible(void) {
    check_group("the same bits for any number of threads, length and order");
    enum { N = 100003 };
    static float a[N], b[N], c[70];
    random_normal_fill(a, N, 0.5f, 0.02f, 1, 2);
    int threads = omp_get_max_threads();
    omp_set_num_threads(3);
    random_normal_fill(b, N, 0.5f, 0.02f, 1, 2);
    omp_set_num_threads(threads);
    CHECK(!memcmp(a, b, sizeof a), "3 threads");
    int wrong = 0;
    for (size_t n = 0; n <= 70; n++) {
        random_normal_fill(c, n, 0.5f, 0.02f, 1, 2);
        wrong += memcmp(a, c, n * sizeof *c) != 0;
    }
    CHECK(wrong == 0, "%d of 71 shorter lengths differ", wrong);
    random_normal_fill(b, N, 0.5f, 0.02f, 2, 2);
    CHECK(a[0] != b[0] && a[N - 1] != b[N - 1], "another seed");
    random_normal_fill(b, N, 0.5f, 0.02f, 1, 3);
    CHECK(a[0] != b[0] && a[N - 1] != b[N - 1], "another stream");
}

int main(void) {
    test_bits();
    test_uniform();
    test_normal();
    test_against_libm();
    test_reproducible();
    return check_verdict();
}

// random: Philox against published values; normal numbers against libm; a value depends only on its index.
#include <math.h>
#include <omp.h>

#include "dev/tests/check.h"
#include "math/philox.h"
#include "math/random.h"

static void test_bits(void) {
    // From the Random123 distribution's kat_vectors: counter and key all 0; all ones; the digits of pi.
    static const struct {
        uint64_t seed, stream, counter;
        uint32_t words[4];
    } VECTORS[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {~0ull, ~0ull, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822u,
         0x0370734413198a2eu,
         0x85a308d3243f6a88u,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    check_group("Philox4x32-10 against the published vectors");
    for (size_t i = 0; i < sizeof VECTORS / sizeof *VECTORS; i++) {
        Philox bits = philox(VECTORS[i].seed, VECTORS[i].stream, VECTORS[i].counter);
        uint64_t both = random_u64(VECTORS[i].seed, VECTORS[i].stream, VECTORS[i].counter);
        for (int j = 0; j < 4; j++)
            CHECK(bits.words[j] == VECTORS[i].words[j], "vector %zu, word %d: %08x", i, j, bits.words[j]);
        CHECK(both == ((uint64_t)bits.words[1] << 32 | bits.words[0]), "vector %zu: %016llx", i,
              (unsigned long long)both);
        CHECK(random_uniform(VECTORS[i].seed, VECTORS[i].stream, VECTORS[i].counter) == (double)(both >> 11) * 0x1p-53,
              "vector %zu: the uniform number", i);
    }
}

// Computes the same normals in float64 with libm: words 0 and 1 of a counter give two normals, words 2 and 3 two more.
// The uniform number is first rounded to float32, as in the library.
static void test_against_libm(void) {
    check_group("normals against float64 from libm");
    enum { N = 64 * 4000 };
    static float x[N];
    random_normal_fill(x, N, 0.0f, 1.0f, 99, 17);
    double worst = 0, largest = 0;
    for (int i = 0; i < N; i++) {
        int lane = i / 16 % 4;
        Philox bits = philox(99, 17, (uint64_t)(i / 64 * 16 + i % 16));
        const uint32_t *words = bits.words + lane / 2 * 2;
        double radius = sqrt(-2 * log((double)(((float)(words[0] >> 1) + 0.5f) * 0x1p-31f)));
        double angle = 2 * M_PI * (double)words[1] * 0x1p-32 - M_PI / 4;
        double want = radius * (lane % 2 == 0 ? cos(angle) : sin(angle));
        worst = fmax(worst, fabs(x[i] - want));
        largest = fmax(largest, fabs(x[i]));
    }
    CHECK(worst < 1e-6 && largest > 4, "largest difference %g, largest number %g", worst, largest);
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
    test_against_libm();
    test_reproducible();
    return check_verdict();
}

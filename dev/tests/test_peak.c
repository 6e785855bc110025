// peak: the measured rate of the processor's multiply-adds is one that a processor can have.
#include <omp.h>

#include "dev/tests/check.h"
#include "math/peak.h"
#include "runtime/error.h"

// Two units of 16 floats at 7 GHz; less than any processor of the last twenty years on one busy core.
enum { MOST_GFLOPS = 2 * 16 * 2 * 7, LEAST_MFLOPS = 100 };

int main(void) {
    program_name = "test_peak";
    check_group("the measured peak");
    double best = 0, most = 1e9 * MOST_GFLOPS * omp_get_max_threads();
    double float32 = peak_flops(&best, false), bf16 = peak_flops(&best, true), more = peak_flops(&best, false);
    CHECK(float32 >= 1e6 * LEAST_MFLOPS && float32 <= most, "float32: %g FLOP/s, at most %g", float32, most);
    CHECK(bf16 >= float32 && bf16 <= 16 * most, "bf16: %g FLOP/s, float32 %g", bf16, float32);
    CHECK(more >= float32 && more <= most, "measured again: %g FLOP/s, before %g", more, float32);
    return check_verdict();
}

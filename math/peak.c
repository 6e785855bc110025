#include "math/peak.h"

#include <omp.h>
#include <time.h>

#include "runtime/cgroup.h"
#ifdef __x86_64__
#include "runtime/cpuid.h"
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
// Independent sums: enough to hide the latency of two FMA units, and few enough for 16 registers.
#define CHAINS 12

typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));

// Runs x = x * scale + add on CHAINS registers. The empty assembly statements force the compiler to compute the total
// here, between the two readings of the clock.
static void run_fma(int rounds) {
    Vector x[CHAINS], zero = {0}, scale = zero + 0.999f, add = zero + 0.001f, total = zero;
    __asm__ volatile("" : "+r"(rounds) : : "memory");
    for (int c = 0; c < CHAINS; c++) x[c] = zero + (float)(c + 2);
    for (int i = 0; i < rounds; i++)
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) x[c] = x[c] * scale + add;
    for (int c = 0; c < CHAINS; c++) total += x[c];
    __asm__ volatile("" : : "r"(&total) : "memory");
}

static double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// FLOP/s of all threads together. Each thread uses its own CPU time, so that other programs on the machine do not
// count. Threads beyond the number of processors add nothing.
static double measure(int rounds) {
    double rate = 0.0, operations = 2.0 * CHAINS * (VECTOR_BYTES / sizeof(float)) * rounds;
    int threads = omp_get_max_threads(), processors = cores_available();
#pragma omp parallel reduction(+ : rate)
    {
        double start = thread_seconds();
        run_fma(rounds);
        rate = operations / (thread_seconds() - start);
    }
    return threads > processors ? rate * processors / threads : rate;
}

static double bf16_factor(void) {
#if defined(__x86_64__)
    if (cpu_has_amx_bf16()) return 16.0;
    if (cpu_has_avx512_bf16()) return 2.0;
#endif
    return 1.0;
}

double peak_flops(double *best, bool bf16) {
    double start = omp_get_wtime();
    for (int rounds = 1 << 14; omp_get_wtime() - start < 0.003;) {
        double began = omp_get_wtime(), rate = measure(rounds);
        if (rate > *best) *best = rate;
        if (omp_get_wtime() - began < 0.001 && rounds < 1 << 28) rounds *= 2;
    }
    return bf16 ? *best * bf16_factor() : *best;
}

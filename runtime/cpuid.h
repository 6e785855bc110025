// Instructions that clang's __builtin_cpu_supports() does not know. Only for x86-64.
#ifndef RUNTIME_CPUID_H
#define RUNTIME_CPUID_H

#include <cpuid.h>
#include <stdbool.h>

static inline bool cpu_has_avx512_bf16(void) {
    unsigned eax, ebx, ecx, edx;
    return __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 5);
}

static inline bool cpu_has_amx_bf16(void) {
    unsigned eax, ebx, ecx, edx;
    return __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & 1u << 22);
}

#endif

// What the programs with planted defects share: checks, arrays on the device, and main().
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "gpu_on_cpu.h"

typedef __nv_bfloat16 bf16;
static int failures;

#define CHECK(condition, ...)                     \
    do {                                          \
        if (condition) break;                     \
        if (++failures > 20) break;               \
        printf("%s:%d: ", __func__, __LINE__);    \
        printf(__VA_ARGS__);                      \
        printf("\n");                             \
    } while (0)
#define CUDA(call) CHECK((call) == cudaSuccess, "%s failed", #call)

template <class T>
struct Device {    // n elements on the device, with a's values or uninitialized
    T *p = NULL;
    size_t n;
    explicit Device(size_t n) : n(n) {
        CUDA(cudaMalloc((void **)&p, n * sizeof(T)));
    }
    explicit Device(const std::vector<T> &a) : Device(a.size()) {
        CUDA(cudaMemcpy(p, a.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    Device(const Device &) = delete;
    ~Device() {
        CUDA(cudaFree(p));
    }
    std::vector<T> host() const {
        std::vector<T> a(n);
        CUDA(cudaMemcpy(a.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return a;
    }
};

struct PlantedDefect {
    const char *name;
    void (*run)(bool defect);
};

// The main() of a program: `numbers`, `help`, or NAME 0|1. Returns the exit status.
template <size_t N>
static int run_planted(int argc, char **argv, void (*numbers)(), const PlantedDefect (&all)[N]) {
    const char *name = argc > 1 ? argv[1] : "help";
    bool help = strcmp(name, "help") == 0, known = help || strcmp(name, "numbers") == 0;
    if (known && !help) numbers();
    for (const PlantedDefect &one : all) {
        if (help) puts(one.name);
        if (strcmp(name, one.name) != 0) continue;
        known = true;
        one.run(argc > 2 && atoi(argv[2]));
    }
    if (!known) {
        fprintf(stderr, "no test %s\n", name);
        return 2;
    }
    CUDA(cudaDeviceSynchronize());
    if (failures) printf("%d wrong\n", failures);
    return failures != 0;
}

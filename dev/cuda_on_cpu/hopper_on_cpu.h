// The asynchronous instructions of compute capability 9.0 for a CPU's C++ compiler (README.md, "Hopper"): mbarriers,
// TMA, wgmma, named barriers, setmaxnreg, stmatrix, and waiting for other blocks.
//
// The emulation is strict: whatever PTX leaves undefined, and some of what works by chance, is an error.
#ifndef HOPPER_ON_CPU_H
#define HOPPER_ON_CPU_H

#include <cuda.h>

#include "gpu_on_cpu.h"

typedef CUtensorMap TensorMap;
struct alignas(8) Mbarrier {
    uint64_t state;
};
// As in CUtensorMapSwizzle: 16-byte pieces are permuted within this many bytes.
enum Swizzle { SWIZZLE_NONE, SWIZZLE_32, SWIZZLE_64, SWIZZLE_128 };
// Which of an operand's dimensions is contiguous: K, over which the matmul sums, or its rows (of B: columns).
enum Major { K_MAJOR, MN_MAJOR };

namespace cuda_on_cpu {

// ---- provided by hopper.cpp

uint32_t shared_address(const void *p, Site site);
void mbarrier_init(Mbarrier *b, unsigned arrivals, Site site);
void mbarrier_init_fence();
void mbarrier_arrive(Mbarrier *b, unsigned expected_bytes, Site site);
void mbarrier_wait(Mbarrier *b, unsigned parity, Site site);
void tma_load(void *shared, const TensorMap *map, Mbarrier *b, const int *coordinates, int rank, Site site);
void bulk_store(void *global, const void *shared, unsigned bytes, bool add, Site site);
void bulk_commit();
void bulk_wait(unsigned groups, bool read_only, Site site);
void fence_proxy_async();
void generic_store(const void *p, size_t bytes, Site site);
struct Matmul {
    int columns;    // N
    float *d;       // this thread's part of D, columns / 2 floats
    const uint32_t *a_registers;
    uint64_t a, b;    // descriptors
    Major a_major, b_major;
    bool accumulate;
};
void wgmma(const Matmul &matmul, Site site);
// Where wgmma reads the 16-byte pieces of an operand of `extent` rows or columns, for tests: K-major, two for each of
// them; MN-major, extent / 8 for each of the 16 k.
std::vector<uint32_t> wgmma_pieces(uint64_t descriptor, Major major, int extent);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait_for(unsigned groups, const std::vector<float *> &results, Site site);
void named_barrier(int id, int threads, bool wait, Site site);
void setmaxnreg(int registers, bool increase, Site site);
void wait_for_counter(const unsigned *counter, unsigned value, Site site);
void add_to_counter(unsigned *counter, unsigned n, Site site);

}

#define GRID_CONSTANT const

DEVICE uint32_t shared_address(const void *p, CUDA_ON_CPU_SITE) {
    return cuda_on_cpu::shared_address(p, {file, line});
}

// ---- mbarriers

DEVICE void mbarrier_init(Mbarrier *b, unsigned arrivals, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::mbarrier_init(b, arrivals, {file, line});
}
DEVICE void mbarrier_init_fence() {
    cuda_on_cpu::mbarrier_init_fence();
}
DEVICE void mbarrier_arrive(Mbarrier *b, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::mbarrier_arrive(b, 0, {file, line});
}
DEVICE void mbarrier_arrive_expect_tx(Mbarrier *b, unsigned bytes, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::mbarrier_arrive(b, bytes, {file, line});
}
DEVICE void mbarrier_wait(Mbarrier *b, unsigned parity, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::mbarrier_wait(b, parity, {file, line});
}

// ---- TMA and bulk copies. Coordinates are those of a box's first element, the contiguous dimension first: {c0, c1}.

template <int rank>
DEVICE void tma_load(void *shared, const TensorMap *map, Mbarrier *b, const int (&at)[rank], CUDA_ON_CPU_SITE) {
    cuda_on_cpu::tma_load(shared, map, b, at, rank, {file, line});
}
DEVICE void bulk_store(void *global, const void *shared, unsigned bytes, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::bulk_store(global, shared, bytes, false, {file, line});
}
DEVICE void bulk_reduce_add(float *global, const float *shared, unsigned bytes, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::bulk_store(global, shared, bytes, true, {file, line});
}
DEVICE void bulk_commit() {
    cuda_on_cpu::bulk_commit();
}
template <int groups>
DEVICE void bulk_wait_read(CUDA_ON_CPU_SITE) {
    cuda_on_cpu::bulk_wait(groups, true, {file, line});
}
template <int groups>
DEVICE void bulk_wait(CUDA_ON_CPU_SITE) {
    cuda_on_cpu::bulk_wait(groups, false, {file, line});
}

// ---- shared memory that asynchronous instructions read

template <class T>
DEVICE void store_shared(T *p, typename cuda_on_cpu::Same<T>::type x, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::store(p, x, {file, line});
    cuda_on_cpu::generic_store(p, sizeof(T), {file, line});
}
DEVICE void fence_proxy_async() {
    cuda_on_cpu::fence_proxy_async();
}
DEVICE void stmatrix_x4(void *row, const uint32_t (&r)[4], CUDA_ON_CPU_SITE) {
    cuda_on_cpu::stmatrix(row, r, {file, line});
}

// ---- wgmma

template <Major A, Major B, int NT>
DEVICE void wgmma(float (&d)[NT][4], uint64_t a, uint64_t b, bool accumulate, CUDA_ON_CPU_SITE) {
    static_assert(NT >= 1 && NT <= 32, "N is a multiple of 8 from 8 to 256");
    cuda_on_cpu::wgmma({8 * NT, d[0], NULL, a, b, A, B, accumulate}, {file, line});
}
template <Major B, int NT>
DEVICE void wgmma(float (&d)[NT][4], const uint32_t (&a)[4], uint64_t b, bool accumulate, CUDA_ON_CPU_SITE) {
    static_assert(NT >= 1 && NT <= 32, "N is a multiple of 8 from 8 to 256");
    cuda_on_cpu::wgmma({8 * NT, d[0], a, 0, b, K_MAJOR, B, accumulate}, {file, line});
}
DEVICE void wgmma_fence(CUDA_ON_CPU_SITE) {
    cuda_on_cpu::wgmma_fence({file, line});
}
DEVICE void wgmma_commit(CUDA_ON_CPU_SITE) {
    cuda_on_cpu::wgmma_commit({file, line});
}

// A wait names the results that it makes readable.
template <int groups>
DEVICE void wgmma_wait(CUDA_ON_CPU_SITE) {
    cuda_on_cpu::wgmma_wait_for(groups, {}, {file, line});
}
template <int groups, int NT>
DEVICE void wgmma_wait(float (&d)[NT][4], CUDA_ON_CPU_SITE) {
    cuda_on_cpu::wgmma_wait_for(groups, {(float *)d}, {file, line});
}
template <int groups, int NT, int NT2>
DEVICE void wgmma_wait(float (&d)[NT][4], float (&d2)[NT2][4], CUDA_ON_CPU_SITE) {
    cuda_on_cpu::wgmma_wait_for(groups, {(float *)d, (float *)d2}, {file, line});
}
template <int groups, int NT, int NT2, int NT3>
DEVICE void wgmma_wait(float (&d)[NT][4], float (&d2)[NT2][4], float (&d3)[NT3][4], CUDA_ON_CPU_SITE) {
    cuda_on_cpu::wgmma_wait_for(groups, {(float *)d, (float *)d2, (float *)d3}, {file, line});
}

// ---- threads of a block

DEVICE void named_barrier_sync(int id, int threads, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::named_barrier(id, threads, true, {file, line});
}
DEVICE void named_barrier_arrive(int id, int threads, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::named_barrier(id, threads, false, {file, line});
}
template <int registers>
DEVICE void setmaxnreg_inc(CUDA_ON_CPU_SITE) {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0, "a multiple of 8 from 24 to 256");
    cuda_on_cpu::setmaxnreg(registers, true, {file, line});
}
template <int registers>
DEVICE void setmaxnreg_dec(CUDA_ON_CPU_SITE) {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0, "a multiple of 8 from 24 to 256");
    cuda_on_cpu::setmaxnreg(registers, false, {file, line});
}

// ---- other blocks

DEVICE void wait_for_counter(const unsigned *counter, unsigned value, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::wait_for_counter(counter, value, {file, line});
}
DEVICE void add_to_counter(unsigned *counter, unsigned n, CUDA_ON_CPU_SITE) {
    cuda_on_cpu::add_to_counter(counter, n, {file, line});
}
#endif

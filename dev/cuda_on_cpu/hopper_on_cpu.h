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

uint32_t shared_address(const void *p, CUDA_ON_CPU_CALL(shared_address));
void mbarrier_init(Mbarrier *b, unsigned arrivals, CUDA_ON_CPU_CALL(mbarrier_init));
void mbarrier_init_fence();
void mbarrier_arrive(Mbarrier *b, unsigned expected_bytes, Site site);
void mbarrier_wait(Mbarrier *b, unsigned parity, CUDA_ON_CPU_CALL(mbarrier_wait));
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
void wgmma_fence(CUDA_ON_CPU_CALL(wgmma_fence));
void wgmma_commit(CUDA_ON_CPU_CALL(wgmma_commit));
void wgmma_wait_for(unsigned groups, const std::vector<float *> &results, Site site);
void named_barrier(int id, int threads, bool wait, Site site);
void setmaxnreg(int registers, bool increase, Site site);
void wait_for_counter(const unsigned *counter, unsigned value, CUDA_ON_CPU_CALL(wait_for_counter));
void add_to_counter(unsigned *counter, unsigned n, CUDA_ON_CPU_CALL(add_to_counter));

}

#define GRID_CONSTANT const

using cuda_on_cpu::mbarrier_wait, cuda_on_cpu::bulk_commit, cuda_on_cpu::fence_proxy_async, cuda_on_cpu::stmatrix_x4;
using cuda_on_cpu::shared_address, cuda_on_cpu::mbarrier_init, cuda_on_cpu::mbarrier_init_fence;
using cuda_on_cpu::wait_for_counter, cuda_on_cpu::add_to_counter;
using cuda_on_cpu::wgmma_fence, cuda_on_cpu::wgmma_commit;

// ---- mbarriers

DEVICE void mbarrier_arrive(Mbarrier *b, CUDA_ON_CPU_CALL(mbarrier_arrive)) {
    cuda_on_cpu::mbarrier_arrive(b, 0, site);
}
DEVICE void mbarrier_arrive_expect_tx(Mbarrier *b, unsigned bytes, CUDA_ON_CPU_CALL(mbarrier_arrive_expect_tx)) {
    cuda_on_cpu::mbarrier_arrive(b, bytes, site);
}

// ---- TMA and bulk copies. Coordinates are those of a box's first element, the contiguous dimension first: {c0, c1}.

template <int rank>
DEVICE void tma_load(void *shared, const TensorMap *map, Mbarrier *b, const int (&at)[rank],
                     CUDA_ON_CPU_CALL(tma_load)) {
    cuda_on_cpu::tma_load(shared, map, b, at, rank, site);
}
DEVICE void bulk_store(void *global, const void *shared, unsigned bytes, CUDA_ON_CPU_CALL(bulk_store)) {
    cuda_on_cpu::bulk_store(global, shared, bytes, false, site);
}
DEVICE void bulk_reduce_add(float *global, const float *shared, unsigned bytes, CUDA_ON_CPU_CALL(bulk_reduce_add)) {
    cuda_on_cpu::bulk_store(global, shared, bytes, true, site);
}
template <int groups>
DEVICE void bulk_wait_read(CUDA_ON_CPU_CALL(bulk_wait_read)) {
    cuda_on_cpu::bulk_wait(groups, true, site);
}
template <int groups>
DEVICE void bulk_wait(CUDA_ON_CPU_CALL(bulk_wait)) {
    cuda_on_cpu::bulk_wait(groups, false, site);
}

// ---- shared memory that asynchronous instructions read

template <class T>
DEVICE void store_shared(T *p, typename cuda_on_cpu::Same<T>::type x, CUDA_ON_CPU_CALL(store_shared)) {
    cuda_on_cpu::store(p, x, site);
    cuda_on_cpu::generic_store(p, sizeof(T), site);
}

// ---- wgmma

template <Major A, Major B, int NT>
DEVICE void wgmma(float (&d)[NT][4], uint64_t a, uint64_t b, bool accumulate, CUDA_ON_CPU_CALL(wgmma)) {
    static_assert(NT >= 1 && NT <= 32, "N is a multiple of 8 from 8 to 256");
    cuda_on_cpu::wgmma({8 * NT, d[0], NULL, a, b, A, B, accumulate}, site);
}
template <Major B, int NT>
DEVICE void wgmma(float (&d)[NT][4], const uint32_t (&a)[4], uint64_t b, bool accumulate, CUDA_ON_CPU_CALL(wgmma)) {
    static_assert(NT >= 1 && NT <= 32, "N is a multiple of 8 from 8 to 256");
    cuda_on_cpu::wgmma({8 * NT, d[0], a, 0, b, K_MAJOR, B, accumulate}, site);
}

// A wait names the results that it makes readable.
template <int groups>
DEVICE void wgmma_wait(CUDA_ON_CPU_CALL(wgmma_wait)) {
    cuda_on_cpu::wgmma_wait_for(groups, {}, site);
}
template <int groups, int NT>
DEVICE void wgmma_wait(float (&d)[NT][4], CUDA_ON_CPU_CALL(wgmma_wait)) {
    cuda_on_cpu::wgmma_wait_for(groups, {(float *)d}, site);
}
template <int groups, int NT, int NT2>
DEVICE void wgmma_wait(float (&d)[NT][4], float (&d2)[NT2][4], CUDA_ON_CPU_CALL(wgmma_wait)) {
    cuda_on_cpu::wgmma_wait_for(groups, {(float *)d, (float *)d2}, site);
}
template <int groups, int NT, int NT2, int NT3>
DEVICE void wgmma_wait(float (&d)[NT][4], float (&d2)[NT2][4], float (&d3)[NT3][4], CUDA_ON_CPU_CALL(wgmma_wait)) {
    cuda_on_cpu::wgmma_wait_for(groups, {(float *)d, (float *)d2, (float *)d3}, site);
}

// ---- threads of a block

DEVICE void named_barrier_sync(int id, int threads, CUDA_ON_CPU_CALL(named_barrier_sync)) {
    cuda_on_cpu::named_barrier(id, threads, true, site);
}
DEVICE void named_barrier_arrive(int id, int threads, CUDA_ON_CPU_CALL(named_barrier_arrive)) {
    cuda_on_cpu::named_barrier(id, threads, false, site);
}
template <int registers>
DEVICE void setmaxnreg_inc(CUDA_ON_CPU_CALL(setmaxnreg_inc)) {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0, "a multiple of 8 from 24 to 256");
    cuda_on_cpu::setmaxnreg(registers, true, site);
}
template <int registers>
DEVICE void setmaxnreg_dec(CUDA_ON_CPU_CALL(setmaxnreg_dec)) {
    static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0, "a multiple of 8 from 24 to 256");
    cuda_on_cpu::setmaxnreg(registers, false, site);
}

#endif

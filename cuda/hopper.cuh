// Hopper's asynchronous instructions: mbarriers, TMA, wgmma, named barriers, setmaxnreg, stmatrix (sm_90a).
//
// Like gpu.cuh, this file has two halves: PTX for nvcc, and for the CPU dev/cuda_on_cpu/hopper_on_cpu.h, which defines
// the same names and reports whatever breaks the rules below. Compiled for another architecture, every function traps.
// Source: PTX ISA 9.0. Tested by test_kernels ("wrappers"), which is the first thing to run on a GPU.
//
//   Mbarrier, mbarrier_*      barriers in shared memory, which count arrivals and bytes
//   TensorMap, tma_load       copies of boxes of a tensor from global to shared memory by one thread; tensor_map.cuh
//                             describes the tensor
//   bulk_*                    contiguous copies and additions to global memory by one thread
//   fence_proxy_async         between ordinary stores to shared memory and asynchronous reads or writes of those bytes
//   wgmma*                    matmuls of a warpgroup, 128 threads: B in shared memory, A there or in registers
//   named_barrier_*           barriers for some of a block's warps
//   setmaxnreg_*              registers move from one warpgroup to another
//   stmatrix_x4, store_shared stores to shared memory that asynchronous instructions read
//   wait_for_counter, ...     order between blocks
//
// Why a wait names its results: the compiler does not know that wgmma writes D later, and might move an instruction
// that reads D before the wait. wgmma_wait<n>(d, ...) keeps it behind. Registers of A must not change, or go out of
// scope, before the wait; ptxas would serialize the matmuls (warning C7510), and the emulation reports it.
#ifndef CUDA_HOPPER_CUH
#define CUDA_HOPPER_CUH

#include <cuda.h>

#include "cuda/gpu.cuh"

#ifndef __CUDACC__
#include "hopper_on_cpu.h"
#else

typedef CUtensorMap TensorMap;

struct alignas(8) Mbarrier {
    uint64_t state;
};

// 16-byte pieces of shared memory are permuted within this many bytes, so that a column of a tile touches all banks:
// bits 4 to 6 of the address are XORed with bits 7 to 9 (128), 4 and 5 with 7 and 8 (64), 4 with 7 (32).
enum Swizzle { SWIZZLE_NONE, SWIZZLE_32, SWIZZLE_64, SWIZZLE_128 };

// Which of an operand's dimensions is contiguous: K, over which the matmul sums, or its rows (of B: columns).
enum Major { K_MAJOR, MN_MAJOR };

// Before a kernel's parameter of type TensorMap: tma_load() takes its address, which must not be that of a copy.
#define GRID_CONSTANT const __grid_constant__

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER_ASM(...) __trap()
#endif

// ---- mbarriers. A phase is complete when all arrivals of mbarrier_init() and all expected bytes have come; the next
// phase begins at once. Phases are numbered from 0.

// By one thread, which then calls mbarrier_init_fence(); others use it only after a barrier of the block.
DEVICE void mbarrier_init(Mbarrier *b, unsigned arrivals) {
    HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}

DEVICE void mbarrier_init_fence() {
    HOPPER_ASM("fence.mbarrier_init.release.cluster;" :: : "memory");
}

DEVICE void mbarrier_arrive(Mbarrier *b) {
    HOPPER_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// Announces the bytes of the loads that this thread then issues.
DEVICE void mbarrier_arrive_expect_tx(Mbarrier *b, unsigned bytes) {
    HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
               "r"(bytes) : "memory");
}

// Waits until the phase with this parity (its number modulo 2) is complete. It returns at once for parity 1 of a new
// mbarrier, as if a phase had come before.
DEVICE void mbarrier_wait(Mbarrier *b, unsigned parity) {
    uint32_t complete = 0;
    do {
        HOPPER_ASM(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(
                complete) : "r"(shared_address(b)),
            "r"(parity) : "memory");
    } while (!complete);
}

// ---- TMA. `at` are the coordinates of the box's first element, the contiguous dimension first. Elements out of bounds
// are loaded as 0. The box in shared memory is aligned to 128 bytes, with a swizzle of 32, 64 or 128 bytes to 256, 512
// or 1,024. at[0] times the element's size is a multiple of 16 bytes, even if it is negative: floats at -4, but not at
// -3. Otherwise, measured on an H200, the kernel ends with cudaErrorIllegalInstruction.

#define HOPPER_TMA(rank, coordinates, ...) \
    if constexpr (RANK == rank) \
        HOPPER_ASM("cp.async.bulk.tensor." #rank "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" \
                   coordinates "}], [%2];" ::"r"(shared_address(shared)), "l"(map), "r"(shared_address(b)), __VA_ARGS__ \
                   : "memory")
template <int RANK>
DEVICE void tma_load(void *shared, const TensorMap *map, Mbarrier *b, const int (&at)[RANK]) {
    HOPPER_TMA(1, "%3", "r"(at[0]));
    HOPPER_TMA(2, "%3, %4", "r"(at[0]), "r"(at[1]));
    HOPPER_TMA(3, "%3, %4, %5", "r"(at[0]), "r"(at[1]), "r"(at[2]));
    HOPPER_TMA(4, "%3, %4, %5, %6", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]));
    HOPPER_TMA(5, "%3, %4, %5, %6, %7", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]));
}
#undef HOPPER_TMA

// Contiguous copies, which belong to the bulk group that the same thread closes by bulk_commit(). Addresses and the
// number of bytes are multiples of 16.
DEVICE void bulk_store(void *global, const void *shared, unsigned bytes) {
    HOPPER_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes) : "memory");
}

DEVICE void bulk_reduce_add(float *global, const float *shared, unsigned bytes) {
    HOPPER_ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes) : "memory");
}

DEVICE void bulk_commit() {
    HOPPER_ASM("cp.async.bulk.commit_group;" :: : "memory");
}

// Waits until at most `groups` of this thread's latest groups still read shared memory. Every group has to be waited
// for before the block ends.
template <int groups>
DEVICE void bulk_wait_read() {
    HOPPER_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}

// The same until global memory is written: before another block is told.
template <int groups>
DEVICE void bulk_wait() {
    HOPPER_ASM("cp.async.bulk.wait_group %0;" ::"n"(groups) : "memory");
}

// ---- shared memory that asynchronous instructions read. After its stores, each storing thread calls
// fence_proxy_async(), and then a barrier orders them before the thread that issues the instruction.

template <class T>
DEVICE void store_shared(T *p, typename AsIs<T>::type x) {
    *p = x;
}

DEVICE void fence_proxy_async() {
    HOPPER_ASM("fence.proxy.async.shared::cta;" :: : "memory");
}

// The inverse of ldmatrix_x4: lane l passes the address of row l % 8 of matrix l / 8, and r[i] holds its elements
// 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix i.
DEVICE void stmatrix_x4(void *row, const uint32_t (&r)[4]) {
    HOPPER_ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// ---- wgmma: d (64,N) = a (64,16) · b (16,N), plus d if `accumulate`; a and b bf16, d float, N = 8 NT.
// Warp w of the warpgroup has rows 16 w to 16 w + 15. With g = l / 4 and t = l % 4, lane l holds of them
//   d[j][0] (g, 8j+2t)   d[j][1] (g, 8j+2t+1)   d[j][2] (g+8, 8j+2t)   d[j][3] (g+8, 8j+2t+1)
//   a[0] (g, 2t and 2t+1)   a[1] (g+8, 2t)   a[2] (g, 2t+8)   a[3] (g+8, 2t+8)       pairs along k
// as for mma_m16n8k16. The other operands are in shared memory, at descriptors.
//
//   wgmma_fence();                  after the last change of d's and a's registers
//   wgmma<...>(d, a, b, true);      any number, which run in this order
//   wgmma_commit();                 closes a group
//   wgmma_wait<n>(d);               returns when at most n groups are in flight; then d can be used

// Operand lists: the first N / 2 operands of the assembly are D's registers.
#define HOPPER_D8 \
    "%0, %1, %2, %3"
#define HOPPER_D16 HOPPER_D8 ", " \
    "%4, %5, %6, %7"
#define HOPPER_D32 HOPPER_D16 ", " \
    "%8, %9, %10, %11, %12, %13, %14, %15"
#define HOPPER_D64 HOPPER_D32 ", " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HOPPER_D72 HOPPER_D64 ", " \
    "%32, %33, %34, %35"
#define HOPPER_D96 HOPPER_D72 ", " \
    "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HOPPER_D128 HOPPER_D96 ", " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HOPPER_D192 HOPPER_D128 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HOPPER_D256 HOPPER_D192 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
    "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define HOPPER_F4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define HOPPER_F8 \
    HOPPER_F4(0)
#define HOPPER_F16 HOPPER_F8, \
    HOPPER_F4(1)
#define HOPPER_F32 HOPPER_F16, \
    HOPPER_F4(2), HOPPER_F4(3)
#define HOPPER_F64 HOPPER_F32, \
    HOPPER_F4(4), HOPPER_F4(5), HOPPER_F4(6), HOPPER_F4(7)
#define HOPPER_F72 HOPPER_F64, \
    HOPPER_F4(8)
#define HOPPER_F96 HOPPER_F72, \
    HOPPER_F4(9), HOPPER_F4(10), HOPPER_F4(11)
#define HOPPER_F128 HOPPER_F96, \
    HOPPER_F4(12), HOPPER_F4(13), HOPPER_F4(14), HOPPER_F4(15)
#define HOPPER_F192 HOPPER_F128, \
    HOPPER_F4(16), HOPPER_F4(17), HOPPER_F4(18), HOPPER_F4(19), HOPPER_F4(20), HOPPER_F4(21), HOPPER_F4(22), \
    HOPPER_F4(23)
#define HOPPER_F256 HOPPER_F192, \
    HOPPER_F4(24), HOPPER_F4(25), HOPPER_F4(26), HOPPER_F4(27), HOPPER_F4(28), HOPPER_F4(29), HOPPER_F4(30), \
    HOPPER_F4(31)

#define HOPPER_WGMMA(N, a, b, rest, scale) \
    "{ .reg .pred p; setp.ne.b32 p, %" #scale ", 0; " \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" HOPPER_D##N \
    "}, " a ", %" #b ", p, 1, 1, " rest "; }"
#define HOPPER_SHARED(N, i, j, scale, a_major, b_major) \
    if constexpr (8 * NT == N) \
        HOPPER_ASM(HOPPER_WGMMA(N, "%" #i, j, "%" #a_major ", %" #b_major, scale) \
                   : HOPPER_F##N \
                   : "l"(a), "l"(b), "r"((int)accumulate), "n"((int)A), "n"((int)B));
#define HOPPER_REGISTERS(N, a0, a1, a2, a3, j, scale, b_major) \
    if constexpr (8 * NT == N) \
        HOPPER_ASM(HOPPER_WGMMA(N, "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}", j, "%" #b_major, scale) \
                   : HOPPER_F##N \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"((int)B));
template <int NT>
constexpr bool wgmma_has = NT <= 2 || NT == 4 || NT == 8 || NT == 9 || NT == 12 || NT == 16 || NT == 24 || NT == 32;

template <Major A, Major B, int NT>
DEVICE void wgmma(float (&d)[NT][4], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(wgmma_has<NT>, "N is none of those below");
    HOPPER_SHARED(8, 4, 5, 6, 7, 8)
    HOPPER_SHARED(16, 8, 9, 10, 11, 12)
    HOPPER_SHARED(32, 16, 17, 18, 19, 20)
    HOPPER_SHARED(64, 32, 33, 34, 35, 36)
    HOPPER_SHARED(72, 36, 37, 38, 39, 40)
    HOPPER_SHARED(96, 48, 49, 50, 51, 52)
    HOPPER_SHARED(128, 64, 65, 66, 67, 68)
    HOPPER_SHARED(192, 96, 97, 98, 99, 100)
    HOPPER_SHARED(256, 128, 129, 130, 131, 132)
}

template <Major B, int NT>
DEVICE void wgmma(float (&d)[NT][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    static_assert(wgmma_has<NT>, "N is none of those below");
    HOPPER_REGISTERS(8, 4, 5, 6, 7, 8, 9, 10)
    HOPPER_REGISTERS(16, 8, 9, 10, 11, 12, 13, 14)
    HOPPER_REGISTERS(32, 16, 17, 18, 19, 20, 21, 22)
    HOPPER_REGISTERS(64, 32, 33, 34, 35, 36, 37, 38)
    HOPPER_REGISTERS(72, 36, 37, 38, 39, 40, 41, 42)
    HOPPER_REGISTERS(96, 48, 49, 50, 51, 52, 53, 54)
    HOPPER_REGISTERS(128, 64, 65, 66, 67, 68, 69, 70)
    HOPPER_REGISTERS(192, 96, 97, 98, 99, 100, 101, 102)
    HOPPER_REGISTERS(256, 128, 129, 130, 131, 132, 133, 134)
}

DEVICE void wgmma_fence() {
    HOPPER_ASM("wgmma.fence.sync.aligned;" :: : "memory");
}

DEVICE void wgmma_commit() {
    HOPPER_ASM("wgmma.commit_group.sync.aligned;" :: : "memory");
}

template <int NT>
DEVICE void wgmma_result(float (&d)[NT][4]) {    // used no earlier than here
    UNROLL
    for (int j = 0; j < NT; j++) {
        UNROLL
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(d[j][e])::"memory");
    }
}

template <int groups>
DEVICE void wgmma_wait() {
    HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

template <int groups, int NT>
DEVICE void wgmma_wait(float (&d)[NT][4]) {
    wgmma_wait<groups>();
    wgmma_result(d);
}

template <int groups, int NT, int NT2>
DEVICE void wgmma_wait(float (&d)[NT][4], float (&d2)[NT2][4]) {
    wgmma_wait<groups>();
    wgmma_result(d);
    wgmma_result(d2);
}

template <int groups, int NT, int NT2, int NT3>
DEVICE void wgmma_wait(float (&d)[NT][4], float (&d2)[NT2][4], float (&d3)[NT3][4]) {
    wgmma_wait<groups>();
    wgmma_result(d);
    wgmma_result(d2);
    wgmma_result(d3);
}

// ---- threads of a block

// Barrier `id`, 1 to 15, for `threads` threads, a multiple of 32, of which some may only arrive.
DEVICE void named_barrier_sync(int id, int threads) {
    HOPPER_ASM("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE void named_barrier_arrive(int id, int threads) {
    HOPPER_ASM("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// By all warps of a warpgroup. Without __launch_bounds__(threads, blocks), both, ptxas ignores it (C7508).
template <int registers>
DEVICE void setmaxnreg_inc() {
    HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
DEVICE void setmaxnreg_dec() {
    HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- other blocks, in the order that counters in global memory prescribe. By one thread of the block, which a barrier
// orders before or after the others.

// Blocks may start in any order, so a block may only wait for those that drew an earlier number from a counter. The
// fences order bulk copies to global memory, too: those that this thread has waited for, and those that follow.
DEVICE void wait_for_counter(const unsigned *counter, unsigned value) {
    unsigned now = value;
    do {
        HOPPER_ASM("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (now != value);
    HOPPER_ASM("fence.proxy.async.global;" :: : "memory");
}

DEVICE void add_to_counter(unsigned *counter, unsigned n) {
    HOPPER_ASM("fence.proxy.async.global;" :: : "memory");
    HOPPER_ASM("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
}
#endif

// ---- common to both halves

// True if this code runs where the functions above exist.
DEVICE bool hopper_here() {
#if defined(__CUDACC__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
    return false;
#else
    return true;
#endif
}

// PTX ISA, "Matrix descriptor format". Addresses are given without their lowest 4 bits; the base offset is 0.
DEVICE uint64_t matrix_descriptor_bits(uint32_t address, unsigned leading_bytes, unsigned stride_bytes,
                                       Swizzle swizzle) {
    const uint64_t layout = swizzle == SWIZZLE_NONE ? 0 : 4 - swizzle;    // 128 bytes: 1, 64: 2, 32: 3
    return (uint64_t)(address >> 4) | (uint64_t)(leading_bytes >> 4) << 16 | (uint64_t)(stride_bytes >> 4) << 32 |
           layout << 62;
}

// A tile in shared memory of which wgmma reads an operand, 64 rows of A or N columns of B by 16 of K, as TMA loads it.
// A pattern is 8 rows of 16, 32, 64 or 128 bytes, according to the swizzle.
//   K-major     a row of a pattern is along K. stride_bytes: from 8 rows to the next 8 (1,024 if tiles are 64 wide and
//               the swizzle is of 128 bytes). leading_bytes: without swizzle, from 8 of K to the next 8; else unused
//   MN-major    a row of a pattern is along M or N. With a swizzle, stride_bytes: from 8 of K to the next 8;
//               leading_bytes: from a pattern to the next one along M or N. Without, the other way around
// p is the tile's start, or further by 32 bytes for each 16 of K (K-major), within the pattern's first row.
DEVICE uint64_t matrix_descriptor(const void *p, unsigned leading_bytes, unsigned stride_bytes, Swizzle swizzle) {
    return matrix_descriptor_bits(shared_address(p), leading_bytes, stride_bytes, swizzle);
}

// The descriptor for an operand that many bytes further.
DEVICE uint64_t matrix_descriptor_plus(uint64_t descriptor, unsigned bytes) {
    return descriptor + (bytes >> 4);
}

// The byte of a tile at which TMA with this swizzle puts `byte`; the tile starts a pattern.
DEVICE unsigned swizzled_byte(unsigned byte, Swizzle swizzle) {
    const unsigned changing = swizzle == SWIZZLE_NONE ? 0 : (1u << swizzle) - 1;
    return byte ^ ((byte >> 7) & changing) << 4;
}

// p, or the next multiple of 1,024 bytes in shared memory, at which every swizzle pattern can start.
template <class T>
DEVICE T *aligned_tile(T *p) {
    return (T *)((char *)p + (1024 - shared_address(p) % 1024) % 1024);
}
#endif

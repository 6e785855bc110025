// The language of the kernels: CUDA C++, plus a named function for each instruction that has no name in CUDA C++.
//
// This file has two halves. nvcc uses the one below, which is written in PTX. A C++ compiler for the CPU uses
// dev/cuda_on_cpu/gpu_on_cpu.h, which defines the same names with the same meaning, so that the kernels' own source can
// be run and tested without a GPU. hopper.cuh has the same two halves.
//
//   KERNEL, DEVICE                 before a kernel, before a device function
//   UNROLL, UNROLL_NOT             before a loop
//   SHARED_ARRAY(T, name, N)       an uninitialized array in the block's shared memory (never use `__shared__`)
//   DYNAMIC_SHARED(T, name)        T *name, the block's dynamic shared memory, aligned to 128 bytes
//   launch(kernel, grid, block, shared_bytes, stream, arguments...)
//   threadIdx, blockIdx, blockDim, gridDim, __syncthreads, __syncwarp, __shfl_sync, __shfl_xor_sync      as in CUDA
//   atomicAdd of int, unsigned, unsigned long long, float      as in CUDA; of floats only if the order may vary
//   ldmatrix_*, mma_*, copy_async_*, load_*, store_*, exp2_fast, log2_fast, max_nan      below
//
// hopper.cuh has the instructions of sm_90a.
//
// Not supported, because it has no meaning on the CPU: spinning on another block (other than by wait_for_counter() of
// hopper.cuh), warp-synchronous code without the _sync functions, and reading another lane's registers other than by a
// shuffle.
#ifndef CUDA_GPU_CUH
#define CUDA_GPU_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef __nv_bfloat16 bf16;

#ifndef __CUDACC__
#include "gpu_on_cpu.h"
#define UNROLL
#define UNROLL_NOT
#else
#include "cuda/check.h"

#define KERNEL __global__
#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_NOT _Pragma("unroll 1")
#define SHARED_ARRAY(T, name, N) __shared__ T name[N]
#define DYNAMIC_SHARED(T, name)                                   \
    extern __shared__ __align__(128) unsigned char dynamic_shared_[]; \
    T *name = reinterpret_cast<T *>(dynamic_shared_)

// ---- launching

template <class T>
struct AsIs {
    typedef T type;
};

// Checks the launch itself (grid sizes, shared memory). Errors inside the kernel appear at the next synchronization.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            typename AsIs<Parameters>::type... arguments) {
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 48 * 1024)
        error =
            cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, arguments...);
    launch_check(error, (const void *)kernel, grid, block, shared_bytes);
}

// ---- 8×8 matrices of 16-bit elements from shared memory to registers, and their matmul (PTX ISA: ldmatrix,
// mma.m16n8k16)
// Lane l of the warp passes the address of row l % 8 of matrix l / 8: 16 bytes, aligned to 16. Lanes beyond the last
// matrix are ignored. r[i] of lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix i, the first
// one in the low half; with `transposed`, of the transposed matrix.

DEVICE uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

DEVICE void ldmatrix_x4(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DEVICE void ldmatrix_x4_transposed(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// d (16,8) += a (16,16) · b (16,8), a and b bf16, d float. With g = l / 4 and t = l % 4, lane l holds
//   a[0] (g, 2t and 2t+1)   a[1] (g+8, 2t)   a[2] (g, 2t+8)   a[3] (g+8, 2t+8)       pairs along k
//   b[0] (2t and 2t+1, g)   b[1] (2t+8, g)                                           pairs along k
//   d[0] (g, 2t)   d[1] (g, 2t+1)   d[2] (g+8, 2t)   d[3] (g+8, 2t+1)
DEVICE void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- asynchronous copies of 16 bytes from global to shared memory, both aligned to 16
// If `valid` is false, the 16 bytes are set to 0, and global memory is not read (but the address must lie within an
// allocation).
DEVICE void copy_async_16(void *shared, const void *global, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

DEVICE void copy_async_16(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// Closes the group of this thread's copies so far.
DEVICE void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `groups` of this thread's latest groups are still in flight. Other threads see the copies after a
// barrier.
template <int groups>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// ---- loads and stores of 16 bytes in global memory, aligned to 16
DEVICE uint4 load_16(const void *p) {    // read-only while the kernel runs
    return __ldg((const uint4 *)p);
}

DEVICE uint4 load_16_streaming(const void *p) {    // read once
    return __ldcs((const uint4 *)p);
}

DEVICE uint4 load_16_again(const void *p) {    // read again later, and then perhaps written
    return *(const uint4 *)p;
}

DEVICE void store_16(void *p, uint4 x) {
    *(uint4 *)p = x;
}

// ---- returns x, but hides its value from the compiler: whatever depends on it is computed here and occupies no
// registers in surrounding or earlier loops
DEVICE int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ---- fast special functions: 2^x within 2 ulp (0 for results below 2^-126), log2 within 1e-7 absolute near 1 and 1
// ulp elsewhere
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal_fast(float x) {    // 1 ulp
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger of the two; NaN if either is NaN (fmaxf would drop it).
DEVICE float max_nan(float x, float y) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
}
#endif

// ---- common to both halves

// Packs two floats as bf16, `low` in the low half, with one instruction. If the halves were converted separately, the
// compiler would use two single conversions wherever they are unpacked again, each as slow as a special function.
DEVICE uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

DEVICE float unpack_low(uint32_t pair) {
    return __uint_as_float(pair << 16);
}

DEVICE float unpack_high(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000u);
}

DEVICE float to_float(float x) {
    return x;
}

DEVICE float to_float(bf16 x) {
    return __bfloat162float(x);
}

// to = x, rounded to nearest
DEVICE void set_float(float &to, float x) {
    to = x;
}

DEVICE void set_float(bf16 &to, float x) {
    to = __float2bfloat16_rn(x);
}

// 16 bytes of X as floats: 4 if X is float, 8 if X is bf16.
template <class X>
struct Pack {
    enum { size = 16 / sizeof(X) };
    float x[size];
};

DEVICE void unpack_16(Pack<float> &p, uint4 v) {
    p.x[0] = __uint_as_float(v.x);
    p.x[1] = __uint_as_float(v.y);
    p.x[2] = __uint_as_float(v.z);
    p.x[3] = __uint_as_float(v.w);
}

DEVICE void unpack_16(Pack<bf16> &p, uint4 v) {
    p.x[0] = unpack_low(v.x);
    p.x[1] = unpack_high(v.x);
    p.x[2] = unpack_low(v.y);
    p.x[3] = unpack_high(v.y);
    p.x[4] = unpack_low(v.z);
    p.x[5] = unpack_high(v.z);
    p.x[6] = unpack_low(v.w);
    p.x[7] = unpack_high(v.w);
}

DEVICE uint4 pack_16(const Pack<float> &p) {
    return make_uint4(__float_as_uint(p.x[0]), __float_as_uint(p.x[1]), __float_as_uint(p.x[2]),
                      __float_as_uint(p.x[3]));
}

DEVICE uint4 pack_16(const Pack<bf16> &p) {
    return make_uint4(pack_bf16(p.x[0], p.x[1]), pack_bf16(p.x[2], p.x[3]), pack_bf16(p.x[4], p.x[5]),
                      pack_bf16(p.x[6], p.x[7]));
}

// Reductions over the 32 lanes in a fixed order. Every lane gets the result.
DEVICE float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

DEVICE float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
}

// Reductions over a block of at most 1024 threads; blockDim.x must be a multiple of 32. All threads must call them, and
// every thread gets the result.
DEVICE float block_sum(float x) {
    SHARED_ARRAY(float, sums, 32);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    __syncthreads();    // the previous call may still be reading `sums`
    if (lane == 0) sums[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? sums[lane] : 0.0f);
}

DEVICE float block_max(float x) {
    SHARED_ARRAY(float, largest, 32);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) largest[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? largest[lane] : -INFINITY);
}

#endif

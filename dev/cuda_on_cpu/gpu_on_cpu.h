// CUDA C++ for a CPU's C++ compiler: the functions and macros that kernels use, run by fibers (README.md). Include it
// after cuda_runtime.h and cuda_bf16.h, before kernels. Every error ends the program with a message that names the
// kernel, the block, the threads and the lines.
#ifndef GPU_ON_CPU_H
#define GPU_ON_CPU_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <device_launch_parameters.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <type_traits>
#include <vector>

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

// ---- provided by the runtime (blocks.cpp)

struct Site {    // of a call in the source
    const char *file;
    int line;
    const char *function = "";    // that is called
};
inline Site called(const char *function, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line, function};
}
// The last parameter of a function with this name: the place from which it is called.
#define CUDA_ON_CPU_CALL(function) cuda_on_cpu::Site site = cuda_on_cpu::called(#function)

struct Position {    // of a thread: its indices, and the sizes of the launch
    uint3 thread, block;
    dim3 block_size, grid;
};
const Position &position_of_this_thread();
// Without this, access to a thread-local variable in a shared library would take a function call.
#define CUDA_ON_CPU_TLS __attribute__((tls_model("initial-exec")))
extern __thread const Position *position CUDA_ON_CPU_TLS;    // of the running thread

struct Parameters {                // of a launch
    std::function<void()> call;    // the kernel with its arguments
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    Site site;
};
void enqueue_launch(cudaStream_t stream, const Parameters &parameters, const std::vector<const void *> &pointers);

struct SharedArray {
    const char *name;
    Site site;
};
void *shared_array(const SharedArray &array, size_t bytes);
void *dynamic_shared();

enum Shuffle { IDX, XOR };
void __syncthreads(CUDA_ON_CPU_CALL(__syncthreads));
void __syncwarp(unsigned mask = 0xFFFFFFFFu, CUDA_ON_CPU_CALL(__syncwarp));
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int argument, Site site);
// Orders nothing here: the accesses of blocks are ordered as the CPU orders them. (In the race check, it is an acquire
// and a release.)
void __threadfence();
void ldmatrix(uint32_t *r, bool transposed, const void *row, Site site);
void stmatrix_x4(const void *row, const uint32_t *r, CUDA_ON_CPU_CALL(stmatrix_x4));
void mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, CUDA_ON_CPU_CALL(mma_m16n8k16));
void copy_async_16(void *shared, const void *global, bool valid = true, CUDA_ON_CPU_CALL(copy_async_16));
void copy_async_commit();
void copy_wait(unsigned groups);
[[noreturn]] void misaligned(const void *p, Site site);

template <class T>
struct Same {
    typedef T type;
};

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// A grid that records its source line, so that launch() knows the line without being a macro.
struct Grid {
    dim3 size;
    Site site;
    Grid(dim3 size, CUDA_ON_CPU_CALL(launch)) : size(size), site(site) {}
    template <class I, class = typename std::enable_if<std::is_integral<I>::value>::type>
    Grid(I x, CUDA_ON_CPU_CALL(launch)) : size((unsigned)x), site(site) {}
};

template <class T>
inline void gather_pointer(std::vector<const void *> &pointers, const T &argument) {
    if constexpr (std::is_pointer<T>::value) pointers.push_back((const void *)argument);
    else (void)pointers, (void)argument;
}

}

#define KERNEL __attribute__((noinline))
#define DEVICE static inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static_assert(false, "__shared__ would be one array per thread here: use SHARED_ARRAY(T, name, N) or DYNAMIC_SHARED(T, name)");
#define SHARED_ARRAY(T, name, N)                                                                \
    static cuda_on_cpu::SharedArray name##_shared_ = {#name, {__FILE__, __LINE__}};             \
    T(&name)[N] = *static_cast<T(*)[N]>(cuda_on_cpu::shared_array(name##_shared_, sizeof(T[N])))
#define DYNAMIC_SHARED(T, name) T *name = static_cast<T *>(cuda_on_cpu::dynamic_shared())

template <class... Parameters>
void launch(void (*kernel)(Parameters...), cuda_on_cpu::Grid grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            typename cuda_on_cpu::Same<Parameters>::type... arguments) {
    std::vector<const void *> pointers;
    (cuda_on_cpu::gather_pointer(pointers, arguments), ...);
    cuda_on_cpu::enqueue_launch(
        stream, {[=] { kernel(arguments...); }, (const void *)kernel, grid.size, block, shared_bytes, grid.site},
        pointers);
}

#ifdef __SANITIZE_THREAD__
#define CUDA_ON_CPU_POSITION cuda_on_cpu::position_of_this_thread()
#else
#define CUDA_ON_CPU_POSITION (*cuda_on_cpu::position)
#endif
#define threadIdx (CUDA_ON_CPU_POSITION.thread)
#define blockIdx (CUDA_ON_CPU_POSITION.block)
#define blockDim (CUDA_ON_CPU_POSITION.block_size)
#define gridDim (CUDA_ON_CPU_POSITION.grid)

// ---- threads of a block, lanes of a warp

using cuda_on_cpu::__syncthreads, cuda_on_cpu::__syncwarp, cuda_on_cpu::__threadfence;

namespace cuda_on_cpu {
template <class T>
inline T shuffle_value(Shuffle kind, unsigned mask, T value, int argument, Site site) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8 && !std::is_pointer<T>::value,
                  "not a type that CUDA can shuffle");
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    word = shuffle(kind, mask, word, argument, site);
    memcpy(&value, &word, sizeof value);
    return value;
}
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, CUDA_ON_CPU_CALL(__shfl_sync)) {
    return cuda_on_cpu::shuffle_value(cuda_on_cpu::IDX, mask, value, lane, site);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, CUDA_ON_CPU_CALL(__shfl_xor_sync)) {
    return cuda_on_cpu::shuffle_value(cuda_on_cpu::XOR, mask, value, lane_mask, site);
}

// ---- memory
namespace cuda_on_cpu {
template <class T>
inline T load(const T *p, Site site) {
    if ((uintptr_t)p % sizeof(T) != 0) misaligned(p, site);
    return *p;
}
template <class T>
inline void store(T *p, T x, Site site) {
    if ((uintptr_t)p % sizeof(T) != 0) misaligned(p, site);
    *p = x;
}
}
template <class T>
inline T __ldcg(const T *p, CUDA_ON_CPU_CALL(__ldcg)) {
    return cuda_on_cpu::load(p, site);
}
template <class T>
inline void __stcg(T *p, typename cuda_on_cpu::Same<T>::type x, CUDA_ON_CPU_CALL(__stcg)) {
    cuda_on_cpu::store(p, x, site);
}

// Atomics are relaxed, as in CUDA.
namespace cuda_on_cpu {
template <class T, class Change>
inline T atomic_change(T *p, Change change) {
    typedef typename std::conditional<sizeof(T) == 4, uint32_t, uint64_t>::type Word;
    static_assert(sizeof(T) == sizeof(Word), "CUDA has this atomic for 4 and 8 bytes");
    Word *word = reinterpret_cast<Word *>(p), old = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(word, &old, bits<Word>(change(bits<T>(old))), true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {}
    return bits<T>(old);
}
}
template <class T>
inline T atomicAdd(T *p, typename cuda_on_cpu::Same<T>::type x) {
    static_assert(std::is_arithmetic<T>::value && !std::is_same<T, long>::value && !std::is_same<T, long long>::value,
                  "atomicAdd: CUDA has none of this type");
    return cuda_on_cpu::atomic_change(p, [=](T old) -> T { return old + x; });
}

// ---- instructions without a name in CUDA C++: ldmatrix, mma.m16n8k16, cp.async, and loads and stores of 16 bytes.
// The layout of elements over lanes is that of the PTX ISA.

DEVICE void ldmatrix_x4(uint32_t r[4], const void *row, CUDA_ON_CPU_CALL(ldmatrix_x4)) {
    cuda_on_cpu::ldmatrix(r, false, row, site);
}
DEVICE void ldmatrix_x4_transposed(uint32_t r[4], const void *row, CUDA_ON_CPU_CALL(ldmatrix_x4_transposed)) {
    cuda_on_cpu::ldmatrix(r, true, row, site);
}
using cuda_on_cpu::mma_m16n8k16, cuda_on_cpu::copy_async_16, cuda_on_cpu::copy_async_commit;
DEVICE int anew(int x) {
    return x;
}
template <int groups>
DEVICE void copy_async_wait() {
    cuda_on_cpu::copy_wait(groups);
}

DEVICE uint4 load_16(const void *p, CUDA_ON_CPU_CALL(load_16)) {
    return cuda_on_cpu::load(static_cast<const uint4 *>(p), site);
}
DEVICE uint4 load_16_streaming(const void *p, CUDA_ON_CPU_CALL(load_16_streaming)) {
    return cuda_on_cpu::load(static_cast<const uint4 *>(p), site);
}
DEVICE uint4 load_16_again(const void *p, CUDA_ON_CPU_CALL(load_16_again)) {
    return cuda_on_cpu::load(static_cast<const uint4 *>(p), site);
}
DEVICE void store_16(void *p, uint4 x, CUDA_ON_CPU_CALL(store_16)) {
    cuda_on_cpu::store(static_cast<uint4 *>(p), x, site);
}

// ---- arithmetic that the host lacks

// .ftz: a subnormal counts as 0, with its sign.
DEVICE float flush_subnormal(float x) {
    return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x;
}
DEVICE float exp2_fast(float x) {
    return flush_subnormal(exp2f(flush_subnormal(x)));
}
DEVICE float log2_fast(float x) {
    return log2f(flush_subnormal(x));
}
DEVICE float reciprocal_fast(float x) {
    return flush_subnormal(1.0f / flush_subnormal(x));
}
DEVICE float max_nan(float x, float y) {
    return isnan(x) || isnan(y) ? NAN : fmaxf(x, y);
}

DEVICE unsigned __float_as_uint(float x) {
    return cuda_on_cpu::bits<unsigned>(x);
}
DEVICE float __uint_as_float(unsigned x) {
    return cuda_on_cpu::bits<float>(x);
}
DEVICE float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
DEVICE float normcdff(float x) {
    return 0.5f * erfcf(-x * 0.707106781186547524f);
}
DEVICE float __saturatef(float x) {
    return x > 0.0f ? fminf(x, 1.0f) : 0.0f;
}
DEVICE int min(int x, int y) {
    return y < x ? y : x;
}
DEVICE int max(int x, int y) {
    return x < y ? y : x;
}
#endif

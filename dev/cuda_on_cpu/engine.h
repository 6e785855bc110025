// Shared by blocks.cpp, hopper.cpp and runtime.cpp, and included nowhere else.
#ifndef CUDA_ON_CPU_ENGINE_H
#define CUDA_ON_CPU_ENGINE_H

#include <sched.h>

#include <atomic>
#include <string>

#include "gpu_on_cpu.h"

namespace cuda_on_cpu {

// The values of GPUs of compute capability 9.0.
enum {
    BLOCK_THREADS = 1024,
    WARPS = BLOCK_THREADS / 32,
    STATIC_SHARED = 48 * 1024,
    BLOCK_SHARED = 227 * 1024,
    PROCESSORS = 132
};

// The 16 bits with which memory is filled. POISON, for uninitialized memory, is a NaN as bf16 and float16; two of them
// are a NaN as a float, and four as a double; as an integer it is outside most arrays. FENCE, for guard bytes, is a
// signaling NaN as bf16 and float, so that adding to it changes it.
enum Pattern { POISON = 0x7FF7, FENCE = 0x7FB7 };
void fill(void *p, size_t bytes, Pattern pattern);
bool is_filled(const void *p, size_t bytes, Pattern pattern);

// A lock that the race check does not see, and therefore does not mistake for synchronization by the program.
struct Lock {
    std::atomic_flag held = ATOMIC_FLAG_INIT;
    void lock() {
        while (held.test_and_set(std::memory_order_acquire)) sched_yield();
    }
    void unlock() {
        held.clear(std::memory_order_release);
    }
};

static inline uint64_t next_random(uint64_t &state) {    // splitmix64
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

void report_crashes();                          // a bad address ends the program with a message that describes it
void run_grid(const Parameters &parameters);    // returns when all blocks have run
void count_wait(bool idle);                     // a wait of the host: see Counts
void count_call(const Call &call);              // unless it is a kernel's launch, or has no name
void count_graph();                             // a launch of a graph
const std::string &kernel_name(const void *kernel);
// Formats a message. The text is never freed, because the program is about to end.
const char *print(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *line_of(Site site);                    // "f.cu:6"
const char *where(Site site);                      // "__syncthreads at f.cu:6"
const char *describe(const Parameters &launch);    // "add_one(float*, int), launched at f.cu:6"
// "8 bytes past the end of the 400 of cudaMalloc number 3"; "" if it is near no allocation.
std::string describe_address(const void *p);

// ThreadSanitizer's functions, which exist if the program is built with it.
extern "C" {
#define WEAK __attribute__((weak))
WEAK void *__tsan_get_current_fiber();
WEAK void *__tsan_create_fiber(unsigned flags);
WEAK void __tsan_destroy_fiber(void *fiber);
WEAK void __tsan_switch_to_fiber(void *fiber, unsigned flags);
WEAK void __tsan_acquire(void *address);
WEAK void __tsan_release(void *address);
WEAK void __tsan_read16(void *address);
WEAK void __tsan_write16(void *address);
WEAK void __tsan_read_range(void *address, unsigned long bytes);
WEAK void __tsan_write_range(void *address, unsigned long bytes);
WEAK unsigned __tsan_atomic32_fetch_add(volatile void *address, unsigned x, int order);
WEAK void __tsan_ignore_thread_begin();
WEAK void __tsan_ignore_thread_end();
WEAK void __sanitizer_start_switch_fiber(void **save, const void *bottom, size_t bytes);
WEAK void __sanitizer_finish_switch_fiber(void *saved, const void **bottom, size_t *bytes);
#undef WEAK
}
static inline bool race_check() {
    return __tsan_create_fiber != NULL;
}
void end_stream_context(void *stream);    // a thread of the race check, in place of __tsan_destroy_fiber()

// While an object of this type exists, the race check ignores what the thread (or fiber) does. It is for the emulator's
// own work, whose calls of memcpy, malloc and so on ThreadSanitizer would see although the emulator is not compiled
// with it.
struct Unseen {
    Unseen() {
        if (race_check()) __tsan_ignore_thread_begin();
    }
    ~Unseen() {
        if (race_check()) __tsan_ignore_thread_end();
    }
    Unseen(const Unseen &) = delete;
};

}
#endif

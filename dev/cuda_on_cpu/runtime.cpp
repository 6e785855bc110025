// The CUDA runtime's functions: settings, memory, streams, events, the device.
#include "engine.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <mutex>

namespace cuda_on_cpu {

// ---- settings

static int choice(const char *name, std::vector<const char *> values) {
    const char *text = getenv(name);
    if (!text || !*text) return 0;
    std::string all;
    for (size_t i = 0; i < values.size(); i++) {
        if (strcmp(text, values[i]) == 0) return (int)i;
        all += std::string(i ? ", " : "") + values[i];
    }
    die("%s=%s is not one of %s", name, text, all.c_str());
}

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    uint64_t value = strtoull(text, &end, 0);
    if (*end) die("%s=%s is no number", name, text);
    return value;
}

static int processors() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

static Settings from_environment() {
    Settings s;
    s.order = (Order)choice("CUDA_ON_CPU_ORDER", {"forward", "reverse", "random", "greedy"});
    s.seed = number("CUDA_ON_CPU_SEED", 1);
    s.copy = (Copy)choice("CUDA_ON_CPU_COPY", {"issue", "wait", "either"});
    s.streams = (Streams)choice("CUDA_ON_CPU_STREAMS", {"once", "late", "any"});
    s.poison = number("CUDA_ON_CPU_POISON", 1) != 0;
    s.threads = (int)number("CUDA_ON_CPU_THREADS", (uint64_t)processors());
    s.stack = number("CUDA_ON_CPU_STACK", 256 * 1024);
    s.memory = number("CUDA_ON_CPU_MEMORY", (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
    s.report = number("CUDA_ON_CPU_REPORT", 0) != 0;
    if (s.report) atexit([] { counts_print(stderr); });
    return s;
}

Settings &settings() {
    static Settings s = from_environment();
    return s;
}

// ---- memory

struct Allocation {
    size_t bytes;
    bool device;
    int number;
    char *mapping;
    size_t mapping_bytes;
};
static std::mutex memory_lock;
static std::map<char *, Allocation> allocations;
static size_t device_bytes;
static int allocation_number;
static __thread cudaError_t last_error;

static cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

static std::map<char *, Allocation>::iterator find_allocation(const void *p) {
    auto after = allocations.upper_bound((char *)p);
    if (after == allocations.begin()) return allocations.end();
    auto it = std::prev(after);
    return (char *)p < it->first + std::max<size_t>(it->second.bytes, 1) ? it : allocations.end();
}

bool is_device(const void *p, size_t bytes) {
    std::lock_guard<std::mutex> hold(memory_lock);
    auto it = find_allocation(p);
    return it != allocations.end() && (char *)p + bytes <= it->first + it->second.bytes;
}

static cudaError_t allocate(void **p, size_t bytes, bool device) {
    const size_t page = 4096, room = (bytes + 255) / 256 * 256, pages = (room + page - 1) / page * page;
    std::lock_guard<std::mutex> hold(memory_lock);
    if (bytes == 0) { *p = NULL; return cudaSuccess; }
    if (device && device_bytes + bytes > settings().memory) return result(cudaErrorMemoryAllocation);
    char *mapping = (char *)mmap(NULL, pages + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return result(cudaErrorMemoryAllocation);
    mprotect(mapping + page, pages, PROT_READ | PROT_WRITE);
    char *start = mapping + page + pages - room;
    if (settings().poison) fill_poison(start, bytes);
    fill_poison(start + bytes, room - bytes);
    allocations[start] = {bytes, device, ++allocation_number, mapping, pages + 2 * page};
    if (device) device_bytes += bytes;
    *p = start;
    return cudaSuccess;
}

static cudaError_t release(void *p, bool device) {
    std::lock_guard<std::mutex> hold(memory_lock);
    if (!p) return cudaSuccess;
    auto it = allocations.find((char *)p);
    if (it == allocations.end() || it->second.device != device) return result(cudaErrorInvalidValue);
    Allocation a = it->second;
    if (!is_poison(it->first + a.bytes, (a.bytes + 255) / 256 * 256 - a.bytes))
        die("OUT OF BOUNDS: something was written behind the end of cudaMalloc number %d, %zu bytes", a.number, a.bytes);
    munmap(a.mapping, a.mapping_bytes);
    if (device) device_bytes -= a.bytes;
    allocations.erase(it);
    return cudaSuccess;
}

// ---- streams

void enqueue(cudaStream_t stream, std::function<void()> work) {
    (void)stream;
    work();
}

static void check_launch(const Parameters &p, const std::vector<const void *> &pointers) {
    dim3 g = p.grid, b = p.block;
    std::string where = kernel_name(p.kernel) + ", launched at " + p.site.file + ":" + std::to_string(p.site.line);
    if ((uint64_t)b.x * b.y * b.z > BLOCK_THREADS || b.x == 0 || b.y == 0 || b.z == 0 || b.x > 1024 || b.y > 1024 || b.z > 64)
        die("OVER LIMIT: %s: a block of (%u,%u,%u), and the limit is 1024 threads, 1024 x 1024 x 64", where.c_str(), b.x, b.y, b.z);
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 2147483647u || g.y > 65535 || g.z > 65535)
        die("OVER LIMIT: %s: a grid of (%u,%u,%u), and the limits are 1 to 2147483647, 65535, 65535", where.c_str(), g.x, g.y, g.z);
    if (p.shared_bytes > BLOCK_SHARED)
        die("OVER LIMIT: %s: %zu bytes of dynamic shared memory, and a block has %d", where.c_str(), p.shared_bytes, BLOCK_SHARED);
    for (size_t i = 0; i < pointers.size(); i++)
        if (pointers[i] && !is_device(pointers[i], 0))
            die("HOST POINTER: %s: pointer %zu of its arguments, %p, is no device memory", where.c_str(), i + 1, pointers[i]);
}

void enqueue_launch(cudaStream_t stream, const Parameters &parameters, const std::vector<const void *> &pointers) {
    check_launch(parameters, pointers);
    enqueue(stream, [=] { run_grid(parameters); });
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}

using namespace cuda_on_cpu;

struct CUstream_st { unsigned flags; };
struct CUevent_st { double time; };

extern "C" {
cudaError_t cudaMalloc(void **p, size_t bytes) { return allocate(p, bytes, true); }
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t) { return allocate(p, bytes, true); }
cudaError_t cudaFree(void *p) { return release(p, true); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return release(p, true); }
cudaError_t cudaMallocHost(void **p, size_t bytes) { return allocate(p, bytes, false); }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) { return allocate(p, bytes, false); }
cudaError_t cudaFreeHost(void *p) { return release(p, false); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    enqueue(stream, [=] { memmove(to, from, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) { return cudaMemcpyAsync(to, from, bytes, kind, NULL); }
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
    enqueue(stream, [=] { memset(p, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, NULL); }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = settings().memory;
    *free_bytes = *total - device_bytes;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : result(cudaErrorInvalidDevice); }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetLastError() { cudaError_t e = last_error; last_error = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : e == cudaErrorMemoryAllocation ? "out of memory" : "error"; }
const char *cudaGetErrorName(cudaError_t e) { return e == cudaSuccess ? "cudaSuccess" : "cudaError"; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int) { *s = new CUstream_st{flags}; return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { delete s; return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { *e = new CUevent_st{0}; return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) { e->time = now(); return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = (float)(1e3 * (b->time - a->time)); return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { delete e; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void *p) { enqueue(stream, [=] { f(p); }); return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
}

// The CUDA runtime's functions: settings, memory, streams and events, the device.
//
// Like blocks.cpp, this file is never compiled with -fsanitize=thread. Locks that the race check must not see as
// synchronization are of type Lock.
#include "engine.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

using namespace cuda_on_cpu;

// ---- settings

// The names that the program has read. CUDA_ON_CPU_LONG belongs to the emulation's own test, CUDA_ON_CPU_FLIP to
// nccl_on_cpu.cpp.
static std::vector<std::string> &known() {
    static std::vector<std::string> names = {"CUDA_ON_CPU_LONG", "CUDA_ON_CPU_FLIP"};
    return names;
}

static const char *setting(const char *name) {
    known().push_back(name);
    return getenv(name);
}

// Rejects unknown names, because a misspelled setting would have no effect.
static void refuse_unknown() {
    for (char **at = environ; *at; at++) {
        std::string name(*at, strcspn(*at, "="));
        if (name.compare(0, 12, "CUDA_ON_CPU_") == 0 &&
            std::find(known().begin(), known().end(), name) == known().end())
            die("%s: unknown setting; README.md lists the known ones", name.c_str());
    }
}

static int choice(const char *name, std::vector<const char *> values) {
    const char *text = setting(name);
    if (!text || !*text) return 0;
    std::string all;
    for (size_t i = 0; i < values.size(); i++) {
        if (strcmp(text, values[i]) == 0) return (int)i;
        all += std::string(i ? ", " : "") + values[i];
    }
    die("%s=%s is not one of %s", name, text, all.c_str());
}

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = setting(name);
    if (!text || !*text) return otherwise;
    char *end;
    uint64_t value = strtoull(text, &end, 0);
    if (*end || *text == '-') die("%s=%s is not a whole number", name, text);
    return value;
}

// OMP_NUM_THREADS, with which launchers divide a machine among processes, or else the number of processors.
static uint64_t processors() {
    cpu_set_t set;
    const char *threads = getenv("OMP_NUM_THREADS");
    if (threads && atoi(threads) > 0) return (uint64_t)atoi(threads);
    return sched_getaffinity(0, sizeof set, &set) == 0 ? (uint64_t)CPU_COUNT(&set) : 1;
}

// The shared memory that a block may have.
static uint64_t shared_of(int capability) {
    if (capability >= 90 && capability < 120) return BLOCK_SHARED;
    return capability == 80 || capability == 87 ? 163 * 1024 : 99 * 1024;
}

// Which of the machine's devices is this process's device 0, and the CUDA version that the driver supports
static int first_device, driver_version;

static Settings from_environment() {
    Settings s;
    s.order = (Order)choice("CUDA_ON_CPU_ORDER", {"forward", "reverse", "random", "greedy", "straggler", "laggards"});
    s.seed = number("CUDA_ON_CPU_SEED", 1);
    s.copy = (Copy)choice("CUDA_ON_CPU_COPY", {"issue", "wait"});
    s.async = (AsyncTime)choice("CUDA_ON_CPU_ASYNC", {"random", "issue", "wait"});
    s.suspend = (Suspend)choice("CUDA_ON_CPU_SUSPEND", {"waiting", "often"});
    s.streams = (Streams)choice("CUDA_ON_CPU_STREAMS", {"once", "late", "any"});
    s.mma = (MmaSums)choice("CUDA_ON_CPU_MMA", {"nearest", "hopper"});
    s.threads = (int)std::max<uint64_t>(number("CUDA_ON_CPU_THREADS", processors()), 1);
    s.memory = number("CUDA_ON_CPU_MEMORY", (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
    s.capability = (int)number("CUDA_ON_CPU_CAPABILITY", 90);
    if (s.capability < 80 || s.capability > 121) die("CUDA_ON_CPU_CAPABILITY=%d is not from 80 to 121", s.capability);
    s.shared = number("CUDA_ON_CPU_SHARED", shared_of(s.capability));
    if (s.shared < STATIC_SHARED || s.shared > BLOCK_SHARED)
        die("CUDA_ON_CPU_SHARED=%zu is not from %d to %d", s.shared, STATIC_SHARED, BLOCK_SHARED);
    s.devices = (int)number("CUDA_ON_CPU_DEVICES", 8);
    first_device = (int)number("CUDA_ON_CPU_FIRST_DEVICE", 0);
    driver_version = (int)number("CUDA_ON_CPU_DRIVER", CUDART_VERSION);
    s.resident = number("CUDA_ON_CPU_RESIDENT", PROCESSORS);
    if (s.resident == 0) die("CUDA_ON_CPU_RESIDENT=0: at least one block has to run");
    s.processors = number("CUDA_ON_CPU_PROCESSORS", PROCESSORS);
    if (s.processors == 0) die("CUDA_ON_CPU_PROCESSORS=0: at least one is needed");
    s.report = number("CUDA_ON_CPU_REPORT", 0) != 0;
    s.schedule = setting("CUDA_ON_CPU_SCHEDULE");
    refuse_unknown();
    return s;
}

Settings &cuda_on_cpu::settings() {
    static Settings s = from_environment();
    return s;
}

__attribute__((constructor)) static void before_main() {
    settings();
    report_crashes();
    atexit([] {
        if (settings().report) counts_print(stderr);
    });
}

// ---- errors

// Prints the reason, which CUDA would not give.
static cudaError_t refuse(cudaError_t error, const std::string &reason) {
    fprintf(stderr, "cuda_on_cpu: %s\n", reason.c_str());
    return error;
}

#define ERRORS(X)                                                                                     \
    X(cudaSuccess, "no error")                                                                        \
    X(cudaErrorInvalidValue, "invalid argument")                                                      \
    X(cudaErrorMemoryAllocation, "out of memory")                                                     \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                               \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                      \
    X(cudaErrorNotReady, "device not ready")                                                          \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                        \
    X(cudaErrorNotSupported, "operation not supported")

extern "C" const char *cudaGetErrorName(cudaError_t error) {
#define X(name, text) if (error == name) return #name;
    ERRORS(X)
#undef X
    return "unrecognized error code";
}

extern "C" const char *cudaGetErrorString(cudaError_t error) {
#define X(name, text) if (error == name) return text;
    ERRORS(X)
#undef X
    return "unrecognized error code";
}

// ---- memory
// Every allocation has pages of its own, with a guard page before and after it. It starts at a multiple of 256, as in
// cudaMalloc, so up to 255 bytes remain before the end of the last page; they are checked when the memory is freed.

enum Place { DEVICE_MEMORY, PINNED };

struct Allocation {
    size_t bytes;
    Place place;
    int number;
    char *mapping;
    size_t mapping_bytes;
};
static Lock memory_lock;
static std::map<char *, Allocation> allocations;
static size_t device_bytes;
static int allocation_number;

static const size_t PAGE = 4096, ALIGNMENT = 256;

static size_t round_up(size_t x, size_t to) {
    return (x + to - 1) / to * to;
}

static const char *allocator(const Allocation &a) {
    return a.place == DEVICE_MEMORY ? "cudaMalloc" : "cudaMallocHost";
}

// The allocation that p points into (or to the end of), under the lock.
static std::map<char *, Allocation>::iterator allocation_of(const void *p) {
    auto after = allocations.upper_bound((char *)p);
    if (after == allocations.begin()) return allocations.end();
    auto it = std::prev(after);
    return (char *)p <= it->first + it->second.bytes ? it : allocations.end();
}

static bool within(const void *p, size_t bytes, bool device_only) {
    std::lock_guard<Lock> hold(memory_lock);
    auto it = allocation_of(p);
    return it != allocations.end() && (char *)p + bytes <= it->first + it->second.bytes &&
           (!device_only || it->second.place == DEVICE_MEMORY);
}

bool cuda_on_cpu::is_device(const void *p, size_t bytes) {
    return within(p, bytes, false);
}

std::string cuda_on_cpu::describe_address(const void *p) {
    char text[256] = "";
    for (const auto &entry : allocations) {
        const Allocation &a = entry.second;
        const char *start = entry.first, *end = start + a.bytes, *at = (const char *)p;
        if (at < a.mapping || at >= a.mapping + a.mapping_bytes) continue;
        if (at < start)
            snprintf(text, sizeof text, "%td bytes before the %zu of %s number %d", start - at, a.bytes, allocator(a),
                     a.number);
        else if (at >= end)
            snprintf(text, sizeof text, "%td bytes past the end of the %zu of %s number %d", at - end, a.bytes,
                     allocator(a), a.number);
        else
            snprintf(text, sizeof text, "byte %td of the %zu of %s number %d", at - start, a.bytes, allocator(a),
                     a.number);
    }
    return text;
}

static cudaError_t allocate(void **p, size_t bytes, Place place) {
    size_t room = round_up(bytes, ALIGNMENT), pages = round_up(room, PAGE);
    std::lock_guard<Lock> hold(memory_lock);
    *p = NULL;
    if (bytes == 0) return cudaSuccess;
    if (room < bytes ||
        (place == DEVICE_MEMORY && (bytes > settings().memory || device_bytes + bytes > settings().memory)))
        return cudaErrorMemoryAllocation;
    char *mapping = (char *)mmap(NULL, pages + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return cudaErrorMemoryAllocation;
    mprotect(mapping + PAGE, pages, PROT_READ | PROT_WRITE);
    char *start = mapping + PAGE + pages - room;
    fill(start, bytes, POISON);
    fill(start + bytes, room - bytes, FENCE);
    allocations[start] = {bytes, place, ++allocation_number, mapping, pages + 2 * PAGE};
    if (place == DEVICE_MEMORY) device_bytes += bytes;
    *p = start;
    return cudaSuccess;
}

static cudaError_t release(void *p, Place place) {
    std::lock_guard<Lock> hold(memory_lock);
    auto it = allocations.find((char *)p);
    if (!p) return cudaSuccess;
    if (it == allocations.end() || it->second.place != place)
        return refuse(cudaErrorInvalidValue, "an address is freed that this allocator did not return");
    Allocation a = it->second;
    if (!is_filled(it->first + a.bytes, round_up(a.bytes, ALIGNMENT) - a.bytes, FENCE))
        die("OUT OF BOUNDS: something was written past the end of the %zu bytes of %s number %d", a.bytes, allocator(a),
            a.number);
    munmap(a.mapping, a.mapping_bytes);
    if (place == DEVICE_MEMORY) device_bytes -= a.bytes;
    allocations.erase(it);
    return cudaSuccess;
}

// ---- streams and events
// A stream is a queue. Unless settings().streams is AT_ONCE, its work is done only when the host waits for something:
// then streams that can continue are chosen at random, until what the host waits for is done. So anything that a
// program does not wait for may well be late.
//
// For the race check, a stream is a thread of its own: it is synchronized with the host when the host enqueues work,
// and the host and other streams are synchronized with it once they have waited for it.

struct Record {             // one recording of an event
    uint64_t number = 0;    // the operation's
    bool done = false;
    double time = 0;
};

struct GraphLaunch;

struct Operation {
    uint64_t number;                       // in the order of the calls, over all streams
    std::function<bool()> work;            // true: done; false: it has to be called again
    std::shared_ptr<Record> after;         // cudaStreamWaitEvent's, or a graph's launch before this one; or NULL
    bool host_function;                    // the program's own: the race check sees all of it
    std::shared_ptr<GraphLaunch> graph;    // instead of `work`; or NULL
};

struct CUstream_st {
    bool blocking;    // waits for the legacy default stream, which waits for it
    std::deque<std::unique_ptr<Operation>> queue;
    void *context;    // the race check's
    char done;        // its address represents the finished work
};

struct CUevent_st {
    std::shared_ptr<Record> latest;    // NULL: never recorded
    bool timing;
};

struct GraphNode {
    std::function<bool()> work;
    bool host_function;
    Call call;
};

struct Capture {
    CUstream_st *stream;
    pthread_t thread;
    std::vector<GraphNode> nodes;
};
static std::unique_ptr<Capture> capture;    // the one in progress, or NULL

static std::recursive_mutex stream_lock;
static uint64_t operations, random_state;
static CUstream_st *default_stream, *favorite;
static std::vector<CUstream_st *> streams;    // all, the default first

static uint64_t toss() {
    static bool started;
    if (!started) random_state = settings().seed;
    started = true;
    return next_random(random_state);
}

static CUstream_st *new_stream(bool blocking) {
    CUstream_st *s = new CUstream_st();
    s->blocking = blocking;
    s->context = race_check() ? __tsan_create_fiber(0) : NULL;
    streams.push_back(s);
    return s;
}

// NULL if the handle is not a stream. Call with the lock held.
static CUstream_st *stream_of(cudaStream_t handle) {
    if (!default_stream) default_stream = new_stream(true);
    if (handle == NULL || handle == cudaStreamLegacy) return default_stream;
    return std::find(streams.begin(), streams.end(), handle) != streams.end() ? handle : NULL;
}

static bool can_go_on(const CUstream_st *s) {
    if (s->queue.empty()) return false;
    const Operation &next = *s->queue.front();
    if (next.after && !next.after->done) return false;
    if (s == default_stream)
        return std::all_of(streams.begin(), streams.end(), [&](const CUstream_st *other) {
            return other == s || !other->blocking || other->queue.empty() || other->queue.front()->number > next.number;
        });
    return !s->blocking || default_stream->queue.empty() || default_stream->queue.front()->number > next.number;
}

static bool progress;    // has the latest call of run_next() done something?

// Does a piece of work as the race check's thread `context`. The work follows what was released to `before`, and what
// follows it acquires `done`.
static bool run_as(void *context, const std::vector<void *> &before, void *done, bool host_function,
                   const std::function<bool()> &work) {
    bool finished = true;
    void *host = race_check() ? __tsan_get_current_fiber() : NULL;
    if (race_check()) {
        if (host_function) __tsan_release(before[0]);    // it runs on the host's stack, which it may access
        __tsan_switch_to_fiber(context, 1);
        for (void *one : before) __tsan_acquire(one);
    }
    bool unseen = race_check() && !host_function;
    if (unseen) __tsan_ignore_thread_begin();
    if (work) finished = work();
    if (unseen) __tsan_ignore_thread_end();
    if (race_check()) {
        __tsan_release(done);
        __tsan_switch_to_fiber(host, 1);
    }
    return finished;
}

static bool run_nodes(CUstream_st *s, const std::vector<void *> &before, GraphLaunch &launch);

// True if the next operation was done; one that waits for another process stays in the queue.
static bool run_next(CUstream_st *s) {
    std::unique_ptr<Operation> next = std::move(s->queue.front());
    std::vector<void *> before = {next.get()};
    s->queue.pop_front();
    if (next->after) before.push_back(next->after.get());
    for (CUstream_st *other : streams)
        if (s == default_stream ? other->blocking : s->blocking && other == default_stream)
            before.push_back(&other->done);
    bool finished;
    if (next->graph) finished = run_nodes(s, before, *next->graph);
    else finished = progress = run_as(s->context, before, &s->done, next->host_function, next->work);
    Unseen unseen;
    if (finished) next.reset();
    else s->queue.push_front(std::move(next));
    return finished;
}

// Runs an operation of any stream that can continue; false if none can. It mostly stays with the last stream, so that
// one gets far ahead of another.
static bool run_any() {
    std::vector<CUstream_st *> able;
    std::copy_if(streams.begin(), streams.end(), std::back_inserter(able), can_go_on);
    if (able.empty()) return false;
    if (toss() % 4 == 0 || std::find(able.begin(), able.end(), favorite) == able.end())
        favorite = able[toss() % able.size()];
    run_next(favorite);
    if (!progress) usleep(50);
    return true;
}

static void waited(void) {
    count_wait(std::all_of(streams.begin(), streams.end(), [](const CUstream_st *s) { return s->queue.empty(); }));
}

template <class Done>
static void run_until(Done done) {
    if (done()) return;
    while (!done())
        if (!run_any()) die("DEADLOCK: the host waits for a stream, and no stream can continue");
    waited();
}

// The result of a query. Each makes some progress, so that a loop of queries ends; such a loop counts as one wait.
static cudaError_t queried(bool done) {
    static bool waiting;
    if (done && waiting) waited();
    waiting = !done;
    if (!done) run_any();
    return done ? cudaSuccess : cudaErrorNotReady;
}

// Does everything that can be done without waiting for another process.
static void run_all() {
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < streams.size(); i++)
            while (can_go_on(streams[i]) && run_next(streams[i])) more = true;
    }
}

static bool is_captured(const CUstream_st *s) {
    return capture && capture->stream == s;
}

// A line of CUDA_ON_CPU_SCHEDULE: the operation that is queued next, its stream, the operation that it waits for or 0,
// and its name.
static void log_operation(const CUstream_st *s, const Operation &operation, const std::string &name) {
    static FILE *file;
    if (!settings().schedule || !*settings().schedule) return;
    std::string path = settings().schedule + std::string(".") + std::to_string(getpid());
    if (!file && !(file = fopen(path.c_str(), "w"))) die("CUDA_ON_CPU_SCHEDULE: cannot write %s", path.c_str());
    size_t stream = (size_t)(std::find(streams.begin(), streams.end(), s) - streams.begin());
    unsigned long long after = operation.after ? operation.after->number : 0;
    fprintf(file, "%llu %zu %llu %s\n", (unsigned long long)operations + 1, stream, after, name.c_str());
}

static void add_to_queue(CUstream_st *s, Operation operation, const std::string &name) {
    log_operation(s, operation, name);
    operation.number = ++operations;
    s->queue.emplace_back(new Operation(std::move(operation)));
    if (race_check()) __tsan_release(s->queue.back().get());
    if (settings().streams == AT_ONCE) run_all();
    if (settings().streams == ANY_TIME)
        while (toss() % 2 && run_any()) {}
}

static void add_attempt(CUstream_st *s, std::function<bool()> work, bool host_function, const Call &call) {
    if (is_captured(s)) {
        capture->nodes.push_back({std::move(work), host_function, call});
        return;
    }
    count_call(call);
    add_to_queue(s, {0, std::move(work), nullptr, host_function, nullptr}, call.name);
}

static void add_operation(CUstream_st *s, std::function<void()> work, const Call &call = {},
                          bool host_function = false) {
    auto attempt = [work = std::move(work)] {
        work();
        return true;
    };
    add_attempt(s, attempt, host_function, call);
}

static void wait_for(CUstream_st *s) {
    run_until([=] { return s->queue.empty(); });
    if (race_check()) __tsan_acquire(&s->done);
}

static void wait_for_all() {
    stream_of(NULL);
    for (size_t i = 0; i < streams.size(); i++) wait_for(streams[i]);
}

#define WITH_STREAM(s, handle)                                             \
    std::lock_guard<std::recursive_mutex> hold(stream_lock);               \
    CUstream_st *s = stream_of(handle);                                    \
    if (!s) return refuse(cudaErrorInvalidResourceHandle, std::string(__func__) + ": no such stream")

// ---- stream capture and graphs
// A captured operation becomes a node of a graph. A launch of the graph is one operation of a stream, which runs one
// node at a time, so that work of other streams may come between them; under AT_ONCE, all of them.

struct CUgraph_st {
    std::vector<GraphNode> nodes;
};

struct CUgraphExec_st {
    std::shared_ptr<const CUgraph_st> graph;    // launches in progress keep it
    std::shared_ptr<Record> latest;             // of the newest launch, after which the next one comes
};

struct GraphLaunch {
    std::shared_ptr<const CUgraph_st> graph;
    std::shared_ptr<Record> end;
    size_t next;    // node
};

// True once all nodes of the launch have run.
static bool run_nodes(CUstream_st *s, const std::vector<void *> &before, GraphLaunch &launch) {
    const std::vector<GraphNode> &nodes = launch.graph->nodes;
    for (bool more = true; more && launch.next < nodes.size(); more = settings().streams == AT_ONCE) {
        const GraphNode &node = nodes[launch.next++];
        run_as(s->context, before, &s->done, node.host_function, node.work);
    }
    progress = true;
    if (launch.next < nodes.size()) return false;
    launch.end->done = true;
    run_as(s->context, before, launch.end.get(), false, nullptr);
    return run_as(s->context, before, &s->done, false, nullptr);
}

// What CUDA forbids during a capture ends the program. This function finds work in the legacy stream.
static void check_work(const CUstream_st *s, const char *name) {
    if (capture && s == default_stream) die("CAPTURE: %s: work in the legacy stream while another is captured", name);
}

// This one: a wait, a query or an allocation by the thread that captures, or for the stream that is captured.
static void check_safe(const char *name, const CUstream_st *s = NULL) {
    if (capture && (capture->stream == s || pthread_equal(capture->thread, pthread_self())))
        die("CAPTURE: %s is not permitted while a stream is captured", name);
}

static void check_emulated(const CUstream_st *s, const char *name) {
    if (is_captured(s)) die("CAPTURE: %s: this emulation captures only kernels, copies and fills of one stream", name);
}

#define WITH_WORK(s, handle)                          \
    WITH_STREAM(s, handle);                           \
    check_work(s, __func__)

#define NO_CAPTURE()                                                                                        \
    std::lock_guard<std::recursive_mutex> hold(stream_lock);                                                \
    check_safe(__func__)

// ---- work of kernels and libraries

static CUstream_st *stream_for_library(cudaStream_t stream) {
    CUstream_st *s = stream_of(stream);
    if (!s) die("work for a stream that does not exist");
    check_work(s, "a library");
    return s;
}

void cuda_on_cpu::enqueue(cudaStream_t stream, std::function<void()> work, const Call &call) {
    std::lock_guard<std::recursive_mutex> hold(stream_lock);
    add_operation(stream_for_library(stream), std::move(work), call);
}

void cuda_on_cpu::enqueue_until(cudaStream_t stream, std::function<bool()> attempt, const Call &call) {
    std::lock_guard<std::recursive_mutex> hold(stream_lock);
    CUstream_st *s = stream_for_library(stream);
    check_emulated(s, call.name.c_str());
    add_attempt(s, std::move(attempt), false, call);
}

// The race check ignores a stream's work (run_next), except for these.
static void touches(void (*seen)(void *, unsigned long), const void *p, size_t bytes, size_t rows, size_t step) {
    __tsan_ignore_thread_end();
    for (size_t i = 0; i < rows; i++) seen((char *)p + i * step, bytes);
    __tsan_ignore_thread_begin();
}

void cuda_on_cpu::reads(const void *p, size_t bytes, size_t rows, size_t step) {
    if (race_check()) touches(__tsan_read_range, p, bytes, rows, step);
}

void cuda_on_cpu::writes(void *p, size_t bytes, size_t rows, size_t step) {
    if (race_check()) touches(__tsan_write_range, p, bytes, rows, step);
}

static void check_launch(const Parameters &p, const std::vector<const void *> &pointers) {
    dim3 g = p.grid, b = p.block;
    if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > 1024 || b.y > 1024 || b.z > 64 || b.x * b.y * b.z > BLOCK_THREADS)
        die("OVER LIMIT: %s: a block of (%u,%u,%u); the limits are 1024 threads, and 1024, 1024 and 64 per dimension",
            describe(p), b.x, b.y, b.z);
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 2147483647u || g.y > 65535 || g.z > 65535)
        die("OVER LIMIT: %s: a grid of (%u,%u,%u); the limits are 1 to 2147483647, 65535, 65535", describe(p), g.x, g.y,
            g.z);
    if (p.shared_bytes > settings().shared)
        die("OVER LIMIT: %s: %zu bytes of dynamic shared memory; a block has %zu", describe(p), p.shared_bytes,
            settings().shared);
    for (size_t i = 0; i < pointers.size(); i++)
        if (pointers[i] && !is_device(pointers[i], 0))
            die("HOST POINTER: %s: its pointer argument number %zu, %p, is neither device memory nor pinned",
                describe(p), i + 1, pointers[i]);
}

void cuda_on_cpu::enqueue_launch(cudaStream_t stream, const Parameters &parameters,
                                 const std::vector<const void *> &pointers) {
    std::lock_guard<std::recursive_mutex> hold(stream_lock);
    CUstream_st *s = stream_of(stream);
    check_launch(parameters, pointers);
    if (!s) die("%s in a stream that does not exist", describe(parameters));
    check_work(s, "a kernel's launch");
    add_operation(s, [parameters] { run_grid(parameters); }, {kernel_name(parameters.kernel), 0, true});
}

struct Rows {
    size_t count, bytes;                  // rows, and the bytes of each
    size_t to_step = 0, from_step = 0;    // from one row to the next
};

// A copy in a stream, with the runtime's synchronization ("API synchronization behavior" in its reference): memory that
// is not pinned is read, or written, before the call returns. Otherwise only the stream waits, and with `wait` also the
// host, unless both sides are on the device.
static cudaError_t copy(const char *name, void *to, const void *from, Rows rows, cudaMemcpyKind kind,
                        cudaStream_t stream, bool wait) {
    WITH_STREAM(s, stream);
    check_work(s, name);
    if (rows.bytes == 0 || rows.count == 0) return cudaSuccess;
    size_t to_bytes = (rows.count - 1) * rows.to_step + rows.bytes,
           from_bytes = (rows.count - 1) * rows.from_step + rows.bytes;
    bool to_device = within(to, to_bytes, true), from_device = within(from, from_bytes, true);
    bool to_pinned = within(to, to_bytes, false), from_pinned = within(from, from_bytes, false);
    if (kind == cudaMemcpyDefault)
        kind = to_device ? (from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                         : (from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
    if ((kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) != to_device)
        return refuse(cudaErrorInvalidValue, std::string(name) + ": " + std::to_string(to_bytes) +
                                                 " bytes at its destination are " +
                                                 (to_device ? "device" : "no device") + " memory");
    if ((kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) != from_device)
        return refuse(cudaErrorInvalidValue, std::string(name) + ": " + std::to_string(from_bytes) +
                                                 " bytes at its source are " + (from_device ? "device" : "no device") +
                                                 " memory");
    if (is_captured(s) && (!to_pinned || !from_pinned))
        die("CAPTURE: %s: a captured copy from or to host memory that is not pinned", name);
    std::shared_ptr<std::vector<char>> staged;
    if (!from_pinned && to_device) {
        staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + from_bytes);
        from = staged->data();
    }
    add_operation(s,
                  [=] {
                      (void)staged;    // must live until the copy is made
                      reads(from, rows.bytes, rows.count, rows.from_step);
                      writes(to, rows.bytes, rows.count, rows.to_step);
                      for (size_t i = 0; i < rows.count; i++)
                          memmove((char *)to + i * rows.to_step, (const char *)from + i * rows.from_step, rows.bytes);
                  },
                  {name, rows.bytes * rows.count});
    if (!to_pinned || (wait && !(to_device && from_device))) wait_for(s);
    return cudaSuccess;
}

// ---- kernels' names, for which a program has to be linked with -rdynamic

static std::string read_kernel_name(const void *kernel) {
    Dl_info info;
    if (!dladdr(kernel, &info) || info.dli_saddr != kernel) return "a kernel";
    int failed;
    char *readable = abi::__cxa_demangle(info.dli_sname, NULL, NULL, &failed);
    std::string name = failed ? info.dli_sname : readable;
    free(readable);
    return name;
}

const std::string &cuda_on_cpu::kernel_name(const void *kernel) {
    static auto &names = *new std::map<const void *, std::string>;    // the report at the end needs it, too
    static Lock lock;
    std::lock_guard<Lock> hold(lock);
    auto found = names.find(kernel);
    return found != names.end() ? found->second : names[kernel] = read_kernel_name(kernel);
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- the functions of the API
extern "C" {

cudaError_t cudaMalloc(void **p, size_t bytes) {
    NO_CAPTURE();
    return allocate(p, bytes, DEVICE_MEMORY);
}

cudaError_t cudaMallocHost(void **p, size_t bytes) {
    NO_CAPTURE();
    return allocate(p, bytes, PINNED);
}

// Frees wait for all work in progress.
cudaError_t cudaFree(void *p) {
    NO_CAPTURE();
    if (p) wait_for_all();
    return release(p, DEVICE_MEMORY);
}

cudaError_t cudaFreeHost(void *p) {
    NO_CAPTURE();
    if (p) wait_for_all();
    return release(p, PINNED);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    std::lock_guard<Lock> hold(memory_lock);
    *total = settings().memory;
    *free_bytes = *total - device_bytes;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return copy(__func__, to, from, {1, bytes}, kind, NULL, true);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(__func__, to, from, {1, bytes}, kind, stream, false);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_step, const void *from, size_t from_step, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(__func__, to, from, {height, width, to_step, from_step}, kind, stream, false);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
    WITH_WORK(s, stream);
    if (bytes == 0) return cudaSuccess;
    if (!is_device(p, bytes))
        return refuse(cudaErrorInvalidValue, "cudaMemset: " + std::to_string(bytes) + " bytes are not device memory");
    add_operation(s,
                  [=] {
                      writes(p, bytes);
                      memset(p, value, bytes);
                  },
                  {__func__, bytes});
    return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int value, size_t bytes) {
    return cudaMemsetAsync(p, value, bytes, NULL);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    std::lock_guard<std::recursive_mutex> hold(stream_lock);
    stream_of(NULL);
    *stream = new_stream(!(flags & cudaStreamNonBlocking));
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

// First does the stream's remaining work. In the race check the host does not synchronize with it, because it has not
// waited.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    WITH_STREAM(s, stream);
    if (s == default_stream) return cudaErrorInvalidResourceHandle;
    check_safe(__func__, s);
    run_until([=] { return s->queue.empty(); });
    streams.erase(std::find(streams.begin(), streams.end(), s));
    end_stream_context(s->context);
    delete s;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    WITH_STREAM(s, stream);
    check_safe(__func__, s);
    wait_for(s);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    WITH_STREAM(s, stream);
    check_safe(__func__, s);
    if (s->queue.empty() && race_check()) __tsan_acquire(&s->done);
    return queried(s->queue.empty());
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    WITH_WORK(s, stream);
    check_emulated(s, __func__);
    if (event->latest) add_to_queue(s, {0, nullptr, event->latest, false, nullptr}, "");
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    WITH_WORK(s, stream);
    add_operation(s, [=] { function(data); }, {}, true);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    std::lock_guard<std::recursive_mutex> hold(stream_lock);
    check_safe(__func__, capture ? capture->stream : NULL);
    wait_for_all();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = new CUevent_st{nullptr, !(flags & cudaEventDisableTiming)};
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    WITH_WORK(s, stream);
    check_emulated(s, __func__);
    std::shared_ptr<Record> record = event->latest = std::make_shared<Record>();
    record->number = operations + 1;
    add_operation(s, [record] {
        record->time = now();
        record->done = true;
        if (race_check()) __tsan_release(record.get());
    });
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    NO_CAPTURE();
    std::shared_ptr<Record> record = event->latest;
    if (!record) return cudaSuccess;
    run_until([&] { return record->done; });
    if (race_check()) __tsan_acquire(record.get());
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    NO_CAPTURE();
    bool done = !event->latest || event->latest->done;
    if (race_check() && event->latest && done) __tsan_acquire(event->latest.get());
    return queried(done);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    std::lock_guard<std::recursive_mutex> hold(stream_lock);
    if (!from->latest || !to->latest || !from->timing || !to->timing) return cudaErrorInvalidResourceHandle;
    if (!from->latest->done || !to->latest->done) return cudaErrorNotReady;
    *ms = (float)(1e3 * (to->latest->time - from->latest->time));
    return cudaSuccess;
}

// ---- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    WITH_STREAM(s, stream);
    if (s == default_stream || capture || mode != cudaStreamCaptureModeThreadLocal)
        die("CAPTURE: %s: one stream at a time can be captured, thread-locally, and not the legacy stream", __func__);
    capture.reset(new Capture{s, pthread_self(), {}});
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    WITH_STREAM(s, stream);
    if (!is_captured(s) || !pthread_equal(capture->thread, pthread_self()))
        die("CAPTURE: %s: this thread does not capture the stream", __func__);
    *graph = new CUgraph_st{std::move(capture->nodes)};
    capture.reset();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    if (!graph || flags) return refuse(cudaErrorInvalidValue, "cudaGraphInstantiate: no graph, or flags");
    *exec = new CUgraphExec_st{std::make_shared<const CUgraph_st>(*graph), nullptr};
    return cudaSuccess;
}

// Launches of the same executable graph follow each other, also in different streams.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    WITH_WORK(s, stream);
    if (!exec) return refuse(cudaErrorInvalidValue, "cudaGraphLaunch: no graph");
    check_emulated(s, __func__);
    auto launch = std::make_shared<GraphLaunch>(GraphLaunch{exec->graph, std::make_shared<Record>(), 0});
    count_graph();
    for (const GraphNode &node : exec->graph->nodes) count_call(node.call);
    std::shared_ptr<Record> before = exec->latest;
    exec->latest = launch->end;
    add_to_queue(s, {0, nullptr, before, false, launch}, "cudaGraphLaunch");
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

// ---- the device: those attributes of an H100 that programs query

cudaError_t cudaDriverGetVersion(int *version) {
    *version = driver_version;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = settings().devices;
    if (driver_version / 1000 < CUDART_VERSION / 1000) return cudaErrorInsufficientDriver;
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

static __thread int this_device;

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= settings().devices) return cudaErrorInvalidDevice;
    this_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = this_device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (device < 0 || device >= settings().devices) return cudaErrorInvalidDevice;
    *p = cudaDeviceProp();
    snprintf(p->name, sizeof p->name, "CUDA on the CPU");
    p->sharedMemPerBlockOptin = settings().shared;
    p->major = settings().capability / 10;
    p->minor = settings().capability % 10;
    p->multiProcessorCount = (int)settings().processors;
    gethostname(p->uuid.bytes, sizeof p->uuid.bytes - 1);
    p->uuid.bytes[sizeof p->uuid.bytes - 1] = (char)(first_device + device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    cudaError_t error = cudaGetDeviceProperties(&p, device);
    if (error != cudaSuccess) return error;
    switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrClockRate: *value = 1980000; break;    // kHz
    default:
        return refuse(cudaErrorNotSupported, "cudaDeviceGetAttribute: attribute " + std::to_string(attribute) +
                                                 " is not supported by this emulation");
    }
    return cudaSuccess;
}

cudaError_t cudaFuncGetName(const char **name, const void *kernel) {
    *name = kernel_name(kernel).c_str();
    return cudaSuccess;
}
}

// Runs the blocks of a kernel: threads as fibers, barriers, warp operations, shared memory, asynchronous copies.
//
// A block runs on one thread of the CPU, its Worker. The block's threads are fibers that take turns; a turn ends only
// where the thread has to wait for others. Blocks are spread over the workers.
//
// This file is never compiled with -fsanitize=thread, because what the emulator does between fibers must not count as
// synchronization of the kernel. What does count is declared explicitly, by __tsan_acquire and __tsan_release.
#include "block.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

namespace cuda_on_cpu {

__thread const Position *position CUDA_ON_CPU_TLS;

const Position &position_of_this_thread() {
    return *position;
}

// ---- the switch from one fiber to another: saves the call-preserved registers on the old stack and restores them from
// the new one. It ends in `ret`, not in a jump: fibers of a kernel mostly stop at the same place, so the return address
// that the processor predicts from one fiber is also right for the next (README.md, "How it works").
extern "C" void cuda_on_cpu_switch(void **save_stack, void *stack);
extern "C" void cuda_on_cpu_start();
asm(R"(
.text
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
.type cuda_on_cpu_start, @function
cuda_on_cpu_start:
    callq *%rbx
    ud2
.size cuda_on_cpu_start, .-cuda_on_cpu_start
)");

__thread Worker *worker CUDA_ON_CPU_TLS;

// ---- messages

const char *print(const char *format, ...) {
    char *text;
    va_list arguments;
    va_start(arguments, format);
    if (vasprintf(&text, format, arguments) < 0) abort();
    va_end(arguments);
    return text;
}

const char *line_of(Site site) {
    return print("%s:%d", site.file, site.line);
}

const char *describe(const Parameters &launch) {
    return print("%s, launched at %s", kernel_name(launch.kernel).c_str(), line_of(launch.site));
}

const char *where(Site site) {
    return print("%s at %s", site.function, line_of(site));
}

static const char *const order_names[] = {"forward", "reverse", "random", "greedy", "straggler", "laggards"};

void die(const char *format, ...) {
    static std::atomic_flag dying;
    while (dying.test_and_set()) pause();
    va_list arguments;
    fflush(stdout);
    fprintf(stderr, "cuda_on_cpu: ");
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    if (worker && worker->launch) {
        const Worker &w = *worker;
        const dim3 grid = w.launch->grid;
        fprintf(stderr, "  in %s, block (%u,%u,%u) of (%u,%u,%u), thread %d of %d; order %s, seed %llu\n",
                describe(*w.launch), w.block.x, w.block.y, w.block.z, grid.x, grid.y, grid.z, w.current, w.threads,
                order_names[w.settings.order], (unsigned long long)w.settings.seed);
    }
    abort();
}

bool same_site(Site a, Site b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0) &&
           (a.function == b.function || strcmp(a.function, b.function) == 0);
}

static std::string ranges(const std::vector<int> &numbers) {
    std::string text;
    for (size_t i = 0, j; i < numbers.size(); i = j) {
        for (j = i + 1; j < numbers.size() && numbers[j] == numbers[j - 1] + 1;) j++;
        text += print(j - i > 1 ? "%s%d-%d" : "%s%d", i ? ", " : "", numbers[i], numbers[j - 1]);
    }
    return text;
}

static const char *describe(const Worker &w, int number) {
    const Wait &wait = w.fibers[number].wait;
    if (wait.kind == EXITED) return "exited";
    if (wait.kind == NOTHING || (w.ready[number / 64] >> number % 64 & 1)) return "can continue";
    if (wait.kind >= MBARRIER_WAIT) return async_describe(w, w.fibers[number]);
    return print("wait in %s", where(wait.site));
}

// "24 threads wait in __shfl_xor_sync at f.cu:4: 40-63; 40 threads wait in __syncthreads at f.cu:6: 0-39"
const char *who_waits_where(int from, int to) {
    std::vector<std::pair<std::string, std::vector<int>>> places;
    for (int i = from; i < to; i++) {
        std::string place = describe(*worker, i);
        auto known = std::find_if(places.begin(), places.end(), [&](const auto &p) { return p.first == place; });
        if (known == places.end()) known = places.insert(places.end(), {place, {}});
        known->second.push_back(i);
    }
    std::string text;
    for (const auto &p : places)
        text += print("%s%zu thread%s %s: %s", text.empty() ? "" : "; ", p.second.size(),
                      p.second.size() > 1 ? "s" : "", p.first.c_str(), ranges(p.second).c_str());
    return print("%s", text.c_str());
}

static const char *who_waits_in_warp() {
    int first = worker->current / 32 * 32;
    return who_waits_where(first, std::min(first + 32, worker->threads));
}

// ---- the order of turns

void set_waiting(Worker &w, unsigned number) {
    w.ready[number / 64] &= ~(1ull << number % 64);
}

void set_ready(Worker &w, unsigned number) {
    w.ready[number / 64] |= 1ull << number % 64;
}

static void set_all_ready(Worker &w) {
    memset(w.ready, 0, sizeof w.ready);
    for (int i = 0; i < w.threads; i += 64) w.ready[i / 64] = w.threads - i >= 64 ? ~0ull : ~(~0ull << (w.threads - i));
}

static int first_ready_from(const Worker &w, int start) {    // in ascending order, wrapping around; -1: none
    int words = (w.threads + 63) / 64, word = start / 64;
    uint64_t bits = w.ready[word] & ~0ull << start % 64;
    for (int i = 0; i <= words; i++) {
        if (bits) return word * 64 + __builtin_ctzll(bits);
        if (++word == words) word = 0;
        bits = w.ready[word];
    }
    return -1;
}

static int last_ready_to(const Worker &w, int start) {    // in descending order
    int words = (w.threads + 63) / 64, word = start / 64;
    uint64_t bits = w.ready[word] & ~0ull >> (63 - start % 64);
    for (int i = 0; i <= words; i++) {
        if (bits) return word * 64 + 63 - __builtin_clzll(bits);
        if (--word < 0) word = words - 1;
        bits = w.ready[word];
    }
    return -1;
}

static int random_thread(Worker &w) {
    return (int)(next_random(w.random) % (unsigned)w.threads);
}

// Any thread but the straggler, for as long as another can run.
static int next_before_straggler(Worker &w) {
    while (w.fibers[w.straggler].wait.kind == EXITED) w.straggler = random_thread(w);
    const unsigned late = (unsigned)w.straggler;
    const bool ready = w.ready[late / 64] >> late % 64 & 1;
    set_waiting(w, late);
    const int next = first_ready_from(w, random_thread(w));
    if (ready) set_ready(w, late);
    if (next >= 0) return next;
    if (next_random(w.random) % 4 == 0) w.straggler = random_thread(w);
    return ready ? (int)late : -1;
}

// The next that is no laggard, for as long as others can run or have asynchronous work.
static int next_before_laggards(Worker &w, int after) {
    uint64_t *late = &w.ready[w.straggler / WARPGROUP * (WARPGROUP / 64)];
    int next;
    do {
        const uint64_t ready[] = {late[0], late[1]};
        late[0] = late[1] = 0;
        next = first_ready_from(w, after);
        late[0] = ready[0];
        late[1] = ready[1];
    } while (next < 0 && w.async && async_step(w, false));
    return next >= 0 ? next : first_ready_from(w, after);
}

static int next_thread(Worker &w) {
    int after = w.current + 1 < w.threads ? w.current + 1 : 0, before = w.current > 0 ? w.current - 1 : w.threads - 1;
    switch (w.settings.order) {
    case FORWARD: return first_ready_from(w, after);
    case REVERSE: return last_ready_to(w, before);
    case RANDOM: return first_ready_from(w, random_thread(w));
    case STRAGGLER: return next_before_straggler(w);
    case LAGGARDS: return next_before_laggards(w, after);
    default: break;
    }
    int warp = w.current / 32;
    unsigned lanes = (unsigned)(w.ready[warp / 2] >> (warp % 2) * 32);
    return lanes ? warp * 32 + __builtin_ctz(lanes) : first_ready_from(w, random_thread(w));
}

// ---- threads of the race check

// By default ThreadSanitizer waits a second at the program's end for other threads, but those of Pool never end.
// TSAN_OPTIONS overrides these settings.
extern "C" const char *__tsan_default_options() {
    return "atexit_sleep_ms=0 detect_deadlocks=0";
}

// A context is one of ThreadSanitizer's threads: here, that of a CUDA thread, of a thread's copies, or of a stream. To
// make one costs almost 300 KB of new pages, so it is used again when its CUDA thread has ended. The check then takes
// the earlier accesses for the new thread's own and finds no race with them, nor with what came before them. So only
// later launches of the same stream use it, which come after all of these anyway. Destroying contexts would not help:
// ThreadSanitizer itself gives a destroyed context's place, with its accesses, to a new one.
static Lock contexts_lock;
static auto *contexts_of_streams = new std::map<void *, std::vector<void *>>;    // by the stream's own context
static auto *ended_streams = new std::deque<void *>;                             // and their contexts

void *new_context(Worker &w) {
    Contexts &c = *w.contexts;
    std::lock_guard<Lock> hold(c.lock);
    void *context, *me = __tsan_get_current_fiber();
    if (!c.spare.empty()) {
        context = c.spare.back();
        c.spare.pop_back();
    } else if (c.ended.size() > BLOCK_THREADS) {    // the oldest of a large launch
        context = c.ended.front();
        c.ended.pop_front();
    } else return __tsan_create_fiber(0);
    __tsan_switch_to_fiber(context, 0);    // synchronizes, as the creation does
    __tsan_switch_to_fiber(me, 1);
    return context;
}

void end_context(Worker &w, void *context) {
    if (!context) return;
    Contexts &c = *w.contexts;
    std::lock_guard<Lock> hold(c.lock);
    c.ended.push_back(context);
}

static void begin_launch(Contexts &c) {
    std::lock_guard<Lock> hold(contexts_lock);
    c.spare.swap((*contexts_of_streams)[__tsan_get_current_fiber()]);
}

static void end_launch(Contexts &c) {
    c.spare.insert(c.spare.end(), c.ended.begin(), c.ended.end());
    std::lock_guard<Lock> hold(contexts_lock);
    (*contexts_of_streams)[__tsan_get_current_fiber()].swap(c.spare);
}

// Destroys the contexts of streams late, because their places go to new ones.
void end_stream_context(void *stream) {
    static const size_t KEPT = 2 * BLOCK_THREADS;
    if (!stream) return;
    std::lock_guard<Lock> hold(contexts_lock);
    std::vector<void *> &own = (*contexts_of_streams)[stream];
    ended_streams->insert(ended_streams->end(), own.begin(), own.end());
    ended_streams->push_back(stream);
    contexts_of_streams->erase(stream);
    for (; ended_streams->size() > KEPT; ended_streams->pop_front()) __tsan_destroy_fiber(ended_streams->front());
}

// ---- fibers

static void switch_stack(void **save, void *stack, void **fake_stack, const void *bottom, size_t bytes, void *context) {
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(fake_stack, bottom, bytes);
    if (race_check()) __tsan_switch_to_fiber(context, 1);
    cuda_on_cpu_switch(save, stack);
}

static const size_t PAGE = 4096, STACK = 256 * 1024, STACK_GUARD = 64 * 1024, STACK_STEP = STACK + STACK_GUARD;

static char *stack_of(const Worker &w, int number) {    // its lower end
    return w.stacks + (size_t)number * STACK_STEP + STACK_GUARD;
}

char *stack_top(const Worker &w, unsigned number) {
    return stack_of(w, (int)number) + STACK;
}

// Loads what a fiber touches first when its turn comes. Mostly that is the one after the next by number.
static void fetch_stack(const Fiber &fiber) {
    enum { LINE = 64, LINES = 4 };
    for (int i = 0; i < LINES; i++) __builtin_prefetch((const char *)fiber.stack + i * LINE);
}

static void switch_to(Worker &w, int next) {
    Fiber &from = self(), &to = w.fibers[next];
    if (next == w.current) return;
    if (next + 1 < w.threads) fetch_stack(w.fibers[next + 1]);
    w.current = next;
    position = &to.position;
    switch_stack(&from.stack, to.stack, &from.fake_stack, stack_of(w, next), STACK, to.context);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from.fake_stack, NULL, NULL);
}

static void go_home(Worker &w, Fiber &from) {
    position = NULL;
    switch_stack(&from.stack, w.home, NULL, w.home_bottom, w.home_bytes, w.home_context);
}

// Leaves the block until run_blocks() comes back to it.
static void suspend(Worker &w) {
    Fiber &me = w.fibers[w.current];
    position = NULL;
    w.suspended = true;
    switch_stack(&me.stack, w.home, &me.fake_stack, w.home_bottom, w.home_bytes, w.home_context);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(me.fake_stack, NULL, NULL);
}

void give_way() {
    Worker &w = *worker;
    if (w.settings.suspend != OFTEN) return;
    w.gave_way = true;
    suspend(w);
}

// The next thread that can run. If all wait, pending asynchronous work takes place; if there is none, threads may still
// wait for the counters of other blocks.
static int next_thread_or_wait(Worker &w) {
    if (w.async) async_turn(w);
    for (int next;;) {
        if ((next = next_thread(w)) >= 0) return next;
        const bool waits = w.async && async_waits_for_counter(w);
        // Before asynchronous work takes place, other blocks may get far.
        if (waits && !async_counter_reached(w) && async_lets_others_run(w)) suspend(w);
        if (!waits || !async_counter_reached(w)) {
            if (w.async && async_step(w, true)) continue;
            if (!waits) die("DEADLOCK: %s", who_waits_where(0, w.threads));
            suspend(w);
        }
        async_wake_counters(w);
    }
}

void take_turns() {
    Worker &w = *worker;
    const int after = w.current + 1;
    // The most frequent case, for speed.
    if (w.settings.order == FORWARD && !w.async && after < w.threads && (w.ready[after / 64] >> after % 64 & 1))
        switch_to(w, after);
    else switch_to(w, next_thread_or_wait(w));
}

static void thread_exits() {
    Worker &w = *worker;
    Fiber &me = self();
    me.wait.kind = EXITED;
    set_waiting(w, me.number);
    me.warp->absent |= 1u << me.lane;
    if (me.warp->waiting)
        die("EXITED LANE: thread %u has exited, and lanes of its warp wait for it: %s", me.number, who_waits_in_warp());
    if (race_check()) __tsan_release((void *)w.launch);
    if (--w.alive == 0) go_home(w, me);
    int next = next_thread_or_wait(w);
    Fiber &to = w.fibers[next];
    w.current = next;
    position = &to.position;
    switch_stack(&me.stack, to.stack, NULL, stack_of(w, next), STACK, to.context);
}

static void fiber_main() {
    Worker &w = *worker;
    if (__sanitizer_finish_switch_fiber) {
        const void *bottom;
        size_t bytes;
        __sanitizer_finish_switch_fiber(NULL, &bottom, &bytes);
        if (!w.home_bottom) {
            w.home_bottom = bottom;
            w.home_bytes = bytes;
        }    // the first fiber comes from home
    }
    w.launch->call();
    thread_exits();
}

// If the tops of stacks were whole pages apart, they would share the same few cache sets, so each starts a little lower
// than the previous one.
static void prepare_fiber(Worker &w, int number) {
    Fiber &f = w.fibers[number];
    dim3 n = w.launch->block;
    void **top = (void **)(stack_of(w, number) + STACK - (size_t)((number * 21) % 64) * 64);
    unsigned thread = (unsigned)number;
    f.position.thread = make_uint3(thread % n.x, (thread / n.x) % n.y, thread / (n.x * n.y));
    f.position.block = w.block;
    f.position.block_size = n;
    f.position.grid = w.launch->grid;
    f.warp = &w.warps[number / 32];
    f.number = (unsigned)number;
    f.lane = f.number % 32;
    f.wait = {NOTHING, {NULL, 0}};
    f.commits = f.copies = f.oldest = f.newest = 0;
    f.pending = w.pending[number];
    f.copier = NULL;
    f.fake_stack = NULL;
    *--top = NULL;    // the end of a backtrace
    *--top = NULL;    // keeps the stack aligned to 16 bytes at the call
    *--top = (void *)cuda_on_cpu_start;
    *--top = NULL;                  // rbp
    *--top = (void *)fiber_main;    // rbx
    for (int i = 0; i < 4; i++) *--top = NULL;
    f.stack = top;
    f.context = race_check() ? new_context(w) : NULL;
}

// ---- memory of a worker: stacks, each with guard pages before it, and shared memory between guard pages

static char *map_memory(size_t bytes, int protection) {
    void *p = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) die("no memory for %zu bytes of stacks or shared memory", bytes);
    return (char *)p;
}

static void allow_access(char *p, size_t bytes) {
    if (mprotect(p, bytes, PROT_READ | PROT_WRITE))
        die("OUT OF MEMORY: mprotect fails, probably because a process has at most vm.max_map_count mappings; each "
            "thread's stack takes two");
}

static void use_signal_stack();

static Worker *new_worker() {
    // Zeros; most of it is never touched.
    Worker *w = (Worker *)map_memory(sizeof(Worker), PROT_READ | PROT_WRITE);
    w->stacks = map_memory(STACK_STEP * BLOCK_THREADS, PROT_NONE);
    char *room = map_memory(STATICS_ROOM + DYNAMIC_ROOM + 3 * PAGE, PROT_NONE);
    w->meetings = (Meetings *)map_memory(sizeof(Meetings), PROT_READ | PROT_WRITE);
    w->statics = room + PAGE;
    w->statics_end = w->statics + STATICS_ROOM;
    w->dynamic_end = w->statics_end + PAGE + DYNAMIC_ROOM;
    allow_access(w->statics, STATICS_ROOM);
    allow_access(w->dynamic_end - DYNAMIC_ROOM, DYNAMIC_ROOM);
    use_signal_stack();
    return w;
}

// Accessible stacks of all workers. Above STACKS_KEPT, those of suspended blocks are released when the launch ends,
// because of vm.max_map_count; below, the next launch uses them again, which saves a system call and a page fault for
// each thread.
static std::atomic<int> stacks_ready;
static const int STACKS_KEPT = 4096;

// Makes the stacks one mapping again, without memory.
static void release_stacks(Worker &w) {
    stacks_ready -= w.stacks_ready;
    if (mmap(w.stacks, STACK_STEP * BLOCK_THREADS, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             -1, 0) == MAP_FAILED)
        die("mmap failed");
    w.stacks_ready = 0;
}

// For the race check, memory that an earlier block used must look like new memory. The time is proportional to the
// bytes, so this is done only for what was used.
static void renew(char *p, size_t bytes) {
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    if (bytes && mmap(p, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                      0) == MAP_FAILED)
        die("mmap failed");
}

static void renew_stack(const Worker &w, int number) {
    const size_t pages = STACK / PAGE;
    unsigned char resident[pages];
    size_t first = 0;
    char *stack = stack_of(w, number);
    if (mincore(stack, STACK, resident) == 0)
        while (first < pages && !(resident[first] & 1)) first++;
    renew(stack + first * PAGE, (pages - first) * PAGE);
}

// Called after the block, when the size of what it used is known.
static void renew_memory(Worker &w) {
    for (int i = 0; i < w.threads; i++) renew_stack(w, i);
    renew((char *)w.meetings, sizeof(Meetings));
    renew(w.statics, w.statics_used);
    char *dynamic_page = w.dynamic_end - (size_t)(w.dynamic_end - w.dynamic + (ptrdiff_t)PAGE - 1) / PAGE * PAGE;
    renew(dynamic_page, (size_t)(w.dynamic_end - dynamic_page));
}

static void prepare_memory(Worker &w, uint64_t block) {
    for (; w.stacks_ready < w.threads; w.stacks_ready++, stacks_ready++)
        allow_access(stack_of(w, w.stacks_ready), STACK);
    w.dynamic = w.dynamic_end - (w.launch->shared_bytes + 127) / 128 * 128;
    // On a GPU, shared arrays come first. Every second block's memory is aligned to 128 bytes and no more; the others'
    // always ends at a guard page.
    if (block % 2 == 0 && (uintptr_t)w.dynamic % 256 == 0) w.dynamic -= 128;
    fill(w.dynamic, w.launch->shared_bytes, POISON);
    fill(w.dynamic + w.launch->shared_bytes, (size_t)(w.dynamic_end - w.dynamic) - w.launch->shared_bytes, FENCE);
    w.array_count = 0;
    w.statics_used = w.statics_asked = 0;
}

// Plain stores, because the race check would see a call of memcpy.
void fill(void *p, size_t bytes, Pattern pattern) {
    typedef uint64_t __attribute__((may_alias, aligned(1))) Word;
    unsigned char *to = (unsigned char *)p;
    Word word = (uint64_t)pattern * 0x0001000100010001u;
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) *(Word *)(to + i) = word;
    for (; i < bytes; i++) to[i] = (unsigned char)(pattern >> (i % 2) * 8);
}

bool is_filled(const void *p, size_t bytes, Pattern pattern) {
    const unsigned char *from = (const unsigned char *)p;
    for (size_t i = 0; i < bytes; i++)
        if (from[i] != (unsigned char)(pattern >> (i % 2) * 8)) return false;
    return true;
}

static const size_t BETWEEN_ARRAYS = 64;    // guard bytes after each array, at least

void *shared_array(const SharedArray &array, size_t bytes) {
    Worker &w = *worker;
    for (int i = 0; i < w.array_count; i++)
        if (w.arrays[i].array == &array) return w.arrays[i].memory;
    if (w.array_count == ARRAYS_IN_BLOCK) die("too many shared arrays at %s", line_of(array.site));
    w.statics_asked += (bytes + 15) / 16 * 16;
    if (w.statics_asked > STATIC_SHARED)
        die("OVER LIMIT: the block's shared arrays take %zu bytes with %s at %s; the limit is %d", w.statics_asked,
            array.name, line_of(array.site), STATIC_SHARED);
    if (w.statics_asked + w.launch->shared_bytes > w.settings.shared)
        die("OVER LIMIT: %zu bytes of shared arrays (%s at %s) and %zu of dynamic shared memory; a block has %zu",
            w.statics_asked, array.name, line_of(array.site), w.launch->shared_bytes, w.settings.shared);
    char *memory = w.statics + w.statics_used;
    size_t room = (bytes + BETWEEN_ARRAYS + 127) / 128 * 128;
    w.statics_used += room;
    fill(memory, bytes, POISON);
    fill(memory + bytes, room - bytes, FENCE);
    w.arrays[w.array_count++] = {memory, bytes, &array};
    return memory;
}

void *dynamic_shared() {
    return worker->dynamic;
}

bool is_shared(const Worker &w, const void *p, size_t bytes) {
    const char *from = (const char *)p;
    if (from >= w.dynamic && from + bytes <= w.dynamic + w.launch->shared_bytes) return true;
    for (const ArrayInBlock *a = w.arrays; a < w.arrays + w.array_count; a++)
        if (from >= a->memory && from + bytes <= a->memory + a->bytes) return true;
    return false;
}

const char *describe_shared(const Worker &w, const void *p) {
    return print("%p; dynamic shared memory is %p-%p, %zu bytes", p, (void *)w.dynamic,
                 (void *)(w.dynamic + w.launch->shared_bytes), w.launch->shared_bytes);
}

size_t shared_offset(const Worker &w, const void *p) {
    const char *at = (const char *)p;
    return at >= w.dynamic_end - DYNAMIC_ROOM ? (size_t)(at - (w.dynamic_end - DYNAMIC_ROOM))
                                              : DYNAMIC_ROOM + (size_t)(at - w.statics);
}

char *shared_pointer(const Worker &w, size_t offset) {
    return offset < DYNAMIC_ROOM ? w.dynamic_end - DYNAMIC_ROOM + offset : w.statics + (offset - DYNAMIC_ROOM);
}

static void check_shared_arrays(Worker &w) {
    for (int i = 0; i < w.array_count; i++) {
        const ArrayInBlock &a = w.arrays[i];
        const char *end = a.memory + a.bytes, *room_end = a.memory + (a.bytes + BETWEEN_ARRAYS + 127) / 128 * 128;
        if (!is_filled(end, (size_t)(room_end - end), FENCE))
            die("OUT OF BOUNDS: something was written past the end of the shared array %s (%s), %zu bytes",
                a.array->name, line_of(a.array->site), a.bytes);
    }
    if (!is_filled(w.dynamic + w.launch->shared_bytes, (size_t)(w.dynamic_end - w.dynamic) - w.launch->shared_bytes,
                   FENCE))
        die("OUT OF BOUNDS: something was written past the end of the dynamic shared memory, %zu bytes",
            w.launch->shared_bytes);
}

void misaligned(const void *p, Site site) {
    std::string memory = describe_address(p);
    die("MISALIGNED: %s takes an address that is not a multiple of its size: %s", where(site),
        memory.empty() ? describe_shared(*worker, p) : memory.c_str());
}

// ---- a bad address

static struct sigaction handlers_before[2];

static void use_signal_stack() {    // a thread whose stack has overflowed needs another stack to report it
    stack_t stack = {};
    if (sigaltstack(NULL, &stack) == 0 && !(stack.ss_flags & SS_DISABLE)) return;
    stack = {};
    stack.ss_size = 64 * 1024;
    stack.ss_sp = map_memory(stack.ss_size, PROT_READ | PROT_WRITE);
    sigaltstack(&stack, NULL);
}

static void crashed(int signal, siginfo_t *info, void *context) {
    const char *p = (const char *)info->si_addr;
    std::string memory = describe_address(p);
    if (worker && worker->launch && position) {
        const Worker &w = *worker;
        if (p >= w.stacks && p < w.stacks + STACK_STEP * BLOCK_THREADS)
            die("STACK OVERFLOW: the thread needs more than %zu bytes of stack", STACK);
        if (p >= w.dynamic_end && p < w.dynamic_end + PAGE)
            die("OUT OF BOUNDS: byte %td past the end of the %zu of dynamic shared memory",
                p - (w.dynamic + w.launch->shared_bytes), w.launch->shared_bytes);
        if (p >= w.statics - PAGE && p < w.dynamic_end)
            die("OUT OF BOUNDS: an address near the block's shared memory, but outside");
        die("OUT OF BOUNDS: the kernel touches %p, %s", (const void *)p,
            memory.empty() ? "which is not allocated" : memory.c_str());
    }
    if (!memory.empty()) die("HOST ACCESS: the host touches %s", memory.c_str());
    struct sigaction *before = &handlers_before[signal == SIGBUS];
    if (before->sa_flags & SA_SIGINFO) before->sa_sigaction(signal, info, context);
    else sigaction(signal, before, NULL);    // the access is repeated, with that handler
}

void report_crashes() {
    struct sigaction action = {};
    action.sa_sigaction = crashed;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    use_signal_stack();
    sigaction(SIGSEGV, &action, &handlers_before[0]);
    sigaction(SIGBUS, &action, &handlers_before[1]);
}

// ---- barriers of the block

void __syncthreads(Site site) {
    Worker &w = *worker;
    Fiber &me = self();
    me.wait = {BARRIER, site};
    if (w.arrived == 0) w.barrier = me.wait;
    if (!same_site(w.barrier.site, site))
        die("MISMATCH: threads of a block wait at different barriers: %s", who_waits_where(0, w.threads));
    char *met = &w.meetings->barrier[w.barrier_phase % 2];
    if (race_check()) __tsan_release(met);
    set_waiting(w, me.number);
    if (++w.arrived == w.threads) {
        w.arrived = 0;
        w.barrier_phase++;
        w.counts.barriers++;
        set_all_ready(w);
    }
    take_turns();
    if (race_check()) __tsan_acquire(met);
}

// ---- operations of a warp
// Each lane leaves its operands and waits; the last one to arrive computes the results of all.

// True for the last lane, which has to compute the results and then call warp_goes_on(me).
static inline __attribute__((always_inline)) bool last_to_arrive(Fiber &me, Kind kind, Site site) {
    Warp &warp = *me.warp;
    me.wait = {kind, site};
    set_waiting(*worker, me.number);
    if (warp.absent)
        die("EXITED LANE: %s, called by thread %u, waits for lanes %08x, which have exited or never existed",
            where(site), me.number, warp.absent);
    if (!warp.waiting) warp.first = me.wait;
    if (warp.first.kind != kind || (kind != SYNCWARP && !same_site(warp.first.site, site)))
        die("MISMATCH: lanes of a warp meet in different operations: %s", who_waits_in_warp());
    warp.waiting |= 1u << me.lane;
    return warp.waiting == ALL_LANES;
}

static void warp_goes_on(Fiber &me) {
    Worker &w = *worker;
    unsigned first = me.number - me.lane;
    me.warp->waiting = 0;
    me.warp->phase++;
    w.ready[first / 64] |= (uint64_t)ALL_LANES << first % 64;
    w.counts.collectives++;
}

static void check_mask(unsigned mask, Site site) {
    if (mask != ALL_LANES) die("WRONG MASK: %s with the mask %08x; only all lanes are emulated", where(site), mask);
}

void __syncwarp(unsigned mask, Site site) {
    check_mask(mask, site);
    Fiber &me = self();
    char *met = &worker->meetings->warps[me.number / LANES][me.warp->phase % 2];
    if (race_check()) __tsan_release(met);
    if (last_to_arrive(me, SYNCWARP, site)) warp_goes_on(me);
    take_turns();
    if (race_check()) __tsan_acquire(met);
}

// idx: the lane whose value each lane returns; xor: of this lane's number exclusive-or'ed with it (CUDA C++ Programming
// Guide, warp shuffle functions).
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int argument, Site site) {
    check_mask(mask, site);
    Fiber &me = self();
    Warp &warp = *me.warp;
    warp.value[me.lane] = value;
    warp.argument[me.lane] = (kind == IDX ? argument : (int)me.lane ^ argument) & (LANES - 1);
    if (last_to_arrive(me, SHUFFLE, site)) {
        for (int to = 0; to < LANES; to++) warp.result[to] = warp.value[warp.argument[to]];
        warp_goes_on(me);
    }
    take_turns();
    return warp.result[me.lane];
}

void __threadfence() {
    char *fences = (char *)worker->launch + 2;
    if (race_check()) {
        __tsan_acquire(fences);
        __tsan_release(fences);
    }
}

// ---- matrices

// The number of passes beyond the first that up to 8 accesses of 16 bytes need: in a pass, each group of 4 banks
// transfers 16 bytes.
static int conflicts_of(const void *const *rows, unsigned present) {
    int used[8] = {0}, most = 1;
    for (int i = 0; i < 8; i++) {
        bool counts = present >> i & 1;
        for (int j = 0; j < i; j++) counts &= !(present >> j & 1) || rows[j] != rows[i];
        if (counts) most = std::max(most, ++used[((uintptr_t)rows[i] / 16) % 8]);
    }
    return most - 1;
}

static void count_conflicts(Worker &w, Site site, int conflicts) {
    if (!conflicts) return;
    for (unsigned i = 0, at = (unsigned)site.line * 31 + (unsigned)((uintptr_t)site.file >> 3); i < SITES; i++, at++) {
        auto &s = w.sites[at % SITES];
        if (!s.site.file) s.site = site;
        if (s.site.file != site.file || s.site.line != site.line) continue;
        s.conflicts += (uint64_t)conflicts;
        return;
    }
}

enum { MATRICES = 4 };

// Takes this lane's address of a row of 16 bytes, for ldmatrix and stmatrix.
static void take_row(const void *row, const char *accesses, Site site) {
    Fiber &me = self();
    if ((uintptr_t)row % 16 != 0) misaligned(row, site);
    if (!is_shared(*worker, row, 16))
        die("OUT OF BOUNDS: %s, lane %u, %s 16 bytes outside the block's shared memory: %s", where(site), me.lane,
            accesses, describe_shared(*worker, row));
    me.warp->row[me.lane] = row;
}

void ldmatrix(uint32_t *r, bool transposed, const void *row, Site site) {
    Worker &w = *worker;
    Fiber &me = self();
    Warp &warp = *me.warp;
    take_row(row, "reads", site);
    if (race_check()) __tsan_read16((void *)row);
    if (last_to_arrive(me, LDMATRIX, site)) {
        int conflicts = 0;
        for (int i = 0; i < MATRICES; i++) {
            const void *const *rows = warp.row + 8 * i;
            conflicts += conflicts_of(rows, 0xFF);
            uint16_t matrix[8][8];
            for (int j = 0; j < 8; j++) memcpy(matrix[j], rows[j], 16);
            for (int l = 0; l < LANES; l++) {
                int g = l / 4, t = l % 4;
                uint16_t low = transposed ? matrix[2 * t][g] : matrix[g][2 * t],
                         high = transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
                warp.r[i][l] = (uint32_t)high << 16 | low;
            }
        }
        w.counts.ldmatrix++;
        w.counts.ldmatrix_conflicts += (uint64_t)conflicts;
        count_conflicts(w, site, conflicts);
        warp_goes_on(me);
    }
    take_turns();
    for (int i = 0; i < MATRICES; i++) r[i] = warp.r[i][me.lane];
}

void stmatrix_x4(const void *row, const uint32_t *r, Site site) {
    Worker &w = *worker;
    Fiber &me = self();
    Warp &warp = *me.warp;
    take_row(row, "writes", site);
    if (race_check()) __tsan_write16((void *)row);
    for (int i = 0; i < MATRICES; i++) warp.r[i][me.lane] = r[i];
    if (last_to_arrive(me, STMATRIX, site)) {
        int conflicts = 0;
        for (int i = 0; i < MATRICES; i++) {
            const void *const *rows = warp.row + 8 * i;
            conflicts += conflicts_of(rows, 0xFF);
            uint16_t matrix[8][8];
            for (int l = 0; l < LANES; l++)
                for (int half = 0; half < 2; half++)
                    matrix[l / 4][2 * (l % 4) + half] = (uint16_t)(warp.r[i][l] >> 16 * half);
            for (int j = 0; j < 8; j++) {
                memcpy((void *)rows[j], matrix[j], 16);
                async_generic_store(rows[j], 16, me.number - me.lane + (unsigned)(8 * i + j), site);
            }
        }
        w.counts.stmatrix++;
        w.counts.stmatrix_conflicts += (uint64_t)conflicts;
        count_conflicts(w, site, conflicts);
        warp_goes_on(me);
    }
    take_turns();
}

typedef float Eight __attribute__((vector_size(32)));

static void bf16_to_float(float *to, const uint32_t *from, int pairs) {
    for (int i = 0; i < pairs; i++) {
        to[2 * i] = bits<float>(from[i] << 16);
        to[2 * i + 1] = bits<float>(from[i] & 0xFFFF0000u);
    }
}

// Products of two bf16 are exact in float. Each sum is rounded to nearest, in ascending order of k.
static void add_products_nearest(float *row, const float a[16], const Eight b[16]) {
    Eight d;
    memcpy(&d, row, sizeof d);
    for (int k = 0; k < 16; k++) d += a[k] * b[k];
    memcpy(row, &d, sizeof d);
}

typedef double EightDoubles __attribute__((vector_size(64)));
typedef int EightInts __attribute__((vector_size(32)));
typedef int64_t EightLongs __attribute__((vector_size(64)));

static const int HOPPER_FRACTION_BITS = 25, NO_EXPONENT = -2000;

// A subnormal number has the exponent of the smallest normal number; zero has none.
static int exponent_of(float x) {
    int field = (int)(bits<uint32_t>(x) >> 23 & 0xFF);
    return x == 0 ? NO_EXPONENT : std::max(field, 1) - 127;
}

static void exponents_of(EightInts &e, const float *x) {
    for (int n = 0; n < 8; n++) e[n] = exponent_of(x[n]);
}

static void powers_of_2(EightDoubles &powers, const EightInts &e) {
    EightLongs fields = (__builtin_convertvector(e, EightLongs) + 1023) << 52;
    memcpy(&powers, &fields, sizeof powers);
}

static float round_toward_zero(double x) {
    const double subnormals = 0x1p149;    // the smallest is 1 over this
    if (fabs(x) < FLT_MIN) return (float)(trunc(x * subnormals) / subnormals);
    return (float)bits<double>(bits<uint64_t>(x) & ~(uint64_t)0 << 29);
}

// sum += x scale, without its fraction
static void add_cut_off(EightDoubles &sum, const EightDoubles &x, const EightDoubles &scale) {
    EightInts whole = __builtin_convertvector(x * scale, EightInts);    // at most 4 2^25
    sum += __builtin_convertvector(whole, EightDoubles);
}

// The 16 products and the number to which they are added are aligned to the largest of their exponents. A product's
// exponent is the sum of its factors' exponents, even if the product of their significands is 2 or more. From each
// term, everything below 2^-25 of that power of two is cut off. Their sum is exact, and is then rounded toward zero to
// a float.
static void add_products_hopper(float *row, const float a[16], const Eight b[16], const EightInts exponents_of_b[16]) {
    EightInts largest;
    exponents_of(largest, row);
    for (int k = 0; k < 16; k++) {
        EightInts of_product = exponent_of(a[k]) + exponents_of_b[k];
        largest = of_product > largest ? of_product : largest;
    }
    largest = largest > NO_EXPONENT / 2 ? largest : largest - largest;    // 0 if all terms are zero
    EightDoubles scale, unit, sum = {0};
    powers_of_2(scale, HOPPER_FRACTION_BITS - largest);
    powers_of_2(unit, largest - HOPPER_FRACTION_BITS);
    Eight start;
    memcpy(&start, row, sizeof start);
    add_cut_off(sum, __builtin_convertvector(start, EightDoubles), scale);
    for (int k = 0; k < 16; k++) add_cut_off(sum, (double)a[k] * __builtin_convertvector(b[k], EightDoubles), scale);
    sum *= unit;
    for (int n = 0; n < 8; n++) row[n] = round_toward_zero(sum[n]);
}

static bool all_finite(const float *x, int count) {
    bool finite = true;
    for (int i = 0; i < count; i++) finite &= (bits<uint32_t>(x[i]) & 0x7F800000u) != 0x7F800000u;
    return finite;
}

void multiply_add(float *d, size_t step, const float (*a)[16], int rows, const float (*b)[8], MmaSums sums) {
    // Infinities and NaNs have no exponent to align to, and show in any order of sums.
    const bool hopper = sums == SUMS_HOPPER && all_finite(a[0], 16 * rows) && all_finite(b[0], 128);
    Eight columns[16];
    EightInts exponents_of_b[16];
    memcpy(columns, b, sizeof columns);
    for (int k = 0; hopper && k < 16; k++) exponents_of(exponents_of_b[k], b[k]);
    for (int i = 0; i < rows; i++) {
        float *row = d + (size_t)i * step;
        if (hopper && all_finite(row, 8)) add_products_hopper(row, a[i], columns, exponents_of_b);
        else add_products_nearest(row, a[i], columns);
    }
}

// The layout of the fragments: a[i][4 g .. 4 g + 3] are 8 consecutive elements of row g (or g + 8) of a, and b[i][4 g
// .. 4 g + 3] are 8 of column g of b.
static void multiply(Warp &warp, MmaSums sums) {
    float a[2][8][16], columns[2][8][8], b[16][8];    // a by halves of its rows; columns[k / 8][n][k % 8]
    for (int g = 0; g < 8; g++)
        for (int half = 0; half < 2; half++) {
            bf16_to_float(a[half][g], &warp.a[half][4 * g], 4);
            bf16_to_float(a[half][g] + 8, &warp.a[half + 2][4 * g], 4);
            bf16_to_float(columns[half][g], &warp.b[half][4 * g], 4);
        }
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < 8; n++) b[k][n] = columns[k / 8][n][k % 8];
    multiply_add(warp.top[0], 8, a[0], 8, b, sums);
    multiply_add(warp.bottom[0], 8, a[1], 8, b, sums);
}

void mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, Site site) {
    Fiber &me = self();
    Warp &warp = *me.warp;
    for (int i = 0; i < 4; i++) warp.a[i][me.lane] = a[i];
    for (int i = 0; i < 2; i++) {
        warp.b[i][me.lane] = b[i];
        warp.top[me.lane][i] = d[i];
        warp.bottom[me.lane][i] = d[i + 2];
    }
    if (last_to_arrive(me, MMA, site)) {
        multiply(warp, worker->settings.mma);
        worker->counts.mmas++;
        warp_goes_on(me);
    }
    take_turns();
    for (int i = 0; i < 2; i++) {
        d[i] = warp.top[me.lane][i];
        d[i + 2] = warp.bottom[me.lane][i];
    }
}

// ---- asynchronous copies

static void copy_now(const Fiber &me, const PendingCopy &c) {
    if (c.valid) memcpy(c.shared, c.global, 16);
    else memset(c.shared, 0, 16);
    if (worker->async) async_generic_store(c.shared, 16, me.number, c.site);
}

// In the race check, a thread of its own makes a thread's copies: it is synchronized with the issuing thread at the
// issue, and the issuing thread with it after the wait for their group.
static void copier_copies(Fiber &me, const PendingCopy &c) {
    char *issued = &worker->meetings->issued[me.number];
    if (!me.copier) me.copier = new_context(*worker);
    __tsan_release(issued);
    __tsan_switch_to_fiber(me.copier, 1);
    __tsan_acquire(issued);
    if (c.valid) __tsan_read16((void *)c.global);
    __tsan_write16(c.shared);
    __tsan_switch_to_fiber(me.context, 1);
}

static void copier_commits(Fiber &me) {
    __tsan_switch_to_fiber(me.copier, 1);
    __tsan_release(&worker->meetings->copied[me.number][me.commits % COPY_GROUPS]);
    __tsan_switch_to_fiber(me.context, 1);
}

static void count_copy(Worker &w, CopyOfWarp &c) {
    int conflicts = 0;
    for (int i = 0; i < LANES; i += 8) conflicts += conflicts_of(c.to + i, c.lanes >> i & 0xFF);
    w.counts.copy_conflicts += (uint64_t)conflicts;
    count_conflicts(w, c.site, conflicts);
    c.lanes = 0;
}

// The count is wrong if lanes do not make the same copies in the same order, from the same lines.
static void note_copy(Worker &w, Fiber &me, const void *shared, Site site) {
    CopyOfWarp &c = me.warp->copies[me.copies % COPIES_OF_WARP];
    if (c.lanes && (c.number != me.copies + 1 || !same_site(c.site, site))) count_copy(w, c);
    c.number = ++me.copies;
    c.site = site;
    c.to[me.lane] = shared;
    c.lanes |= 1u << me.lane;
}

void copy_async_16(void *shared, const void *global, bool valid, Site site) {
    Worker &w = *worker;
    Fiber &me = self();
    PendingCopy c = {shared, global, valid, me.commits, site};
    if ((uintptr_t)shared % 16 != 0) misaligned(shared, site);
    if ((uintptr_t)global % 16 != 0) misaligned(global, site);
    if (!is_shared(w, shared, 16))
        die("OUT OF BOUNDS: %s writes 16 bytes outside the block's shared memory: %s", where(site),
            describe_shared(w, shared));
    w.counts.copies++;
    note_copy(w, me, shared, site);
    if (race_check()) copier_copies(me, c);
    if (w.settings.copy == AT_ISSUE) {
        copy_now(me, c);
        return;
    }
    if (me.newest - me.oldest == PENDING_COPIES)
        die("%s: thread %u has %d copies in flight, more than there is room for", where(site), me.number,
            PENDING_COPIES);
    me.pending[me.newest++ % PENDING_COPIES] = c;
}

void copy_async_commit() {
    Fiber &me = self();
    if (me.copier) copier_commits(me);
    me.commits++;
}

void copy_wait(unsigned groups) {
    Fiber &me = self();
    for (; me.oldest != me.newest; me.oldest++) {
        const PendingCopy &c = me.pending[me.oldest % PENDING_COPIES];
        if (c.group + groups >= me.commits) break;
        copy_now(me, c);
    }
    if (me.copier && me.commits > groups)
        __tsan_acquire(&worker->meetings->copied[me.number][(me.commits - groups - 1) % COPY_GROUPS]);
}

// ---- blocks and grids

static void enter(Worker &w) {    // returns when the block has ended, or has been suspended
    worker = &w;
    w.suspended = w.gave_way = false;
    Fiber &next = w.fibers[w.current];
    position = &next.position;
    w.home_context = race_check() ? __tsan_get_current_fiber() : NULL;
    switch_stack(&w.home, next.stack, &w.home_fake_stack, stack_of(w, w.current), STACK, next.context);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(w.home_fake_stack, NULL, NULL);
}

static void start_block(Worker &w, uint64_t number) {
    dim3 grid = w.launch->grid;
    w.block = make_uint3((unsigned)(number % grid.x), (unsigned)((number / grid.x) % grid.y),
                         (unsigned)(number / grid.x / grid.y));
    w.random = w.settings.seed * 0x9E3779B97F4A7C15u + number;
    w.alive = w.threads;
    w.arrived = 0;
    prepare_memory(w, number);
    for (int i = 0; i < (w.threads + 31) / 32; i++) {
        w.warps[i].waiting = 0;
        w.warps[i].absent = 32 * i + 32 > w.threads ? ~0u << w.threads % 32 : 0;
    }
    for (int i = 0; i < w.threads; i++) prepare_fiber(w, i);
    set_all_ready(w);
    w.home_bottom = NULL;
    w.current = w.settings.order == FORWARD ? w.threads - 1 : 0;
    if (w.settings.order == STRAGGLER) w.straggler = random_thread(w);
    if (w.settings.order == LAGGARDS) w.straggler = (int)((w.settings.seed + number) * WARPGROUP % (unsigned)w.threads);
    w.current = next_thread(w);
}

static void end_block(Worker &w) {
    if (w.async) async_end_block(w);
    check_shared_arrays(w);
    for (int i = 0; i < (w.threads + 31) / 32; i++)
        for (CopyOfWarp &c : w.warps[i].copies)
            if (c.lanes) count_copy(w, c);
    w.counts.blocks++;
    if (!race_check()) return;
    for (int i = 0; i < w.threads; i++) {
        end_context(w, w.fibers[i].context);
        end_context(w, w.fibers[i].copier);
    }
    renew_memory(w);
}

struct Job {
    const Parameters *launch;
    uint64_t blocks, factor, shift;    // the i-th block to start is (i · factor + shift) % blocks
    // A block may wait for the counters of others (hopper_on_cpu.h); meanwhile its CPU thread runs another.
    Lock lock;                  // of the following
    uint64_t next, resident;    // the next block to start; blocks that have started and not ended
    int running, idle;          // CPU threads that have blocks; those whose blocks are all suspended
    std::vector<Worker *> suspended;
    Contexts contexts;
};

static Lock counts_lock;
static Counts all_counts;
static std::map<std::pair<std::string, int>, uint64_t> all_conflicts;
static std::map<const void *, uint64_t> all_launches;    // by kernel
struct Calls {
    uint64_t count, bytes;
};
static std::map<std::string, Calls> all_calls;

static void add_counts(Worker &w) {
    std::lock_guard<Lock> hold(counts_lock);
    uint64_t *to = (uint64_t *)&all_counts, *from = (uint64_t *)&w.counts;
    for (size_t i = 0; i < sizeof(Counts) / sizeof(uint64_t); i++) to[i] += from[i];
    w.counts = Counts();
    for (auto &s : w.sites) {
        if (s.site.file) all_conflicts[{s.site.file, s.site.line}] += s.conflicts;
        s = {};
    }
}

// A CPU thread's blocks of a launch.
struct Blocks {
    Job &job;
    std::vector<Worker *> &workers;    // kept for later launches
    std::vector<Worker *> idle, suspended;
    uint64_t random;

    void start(uint64_t i) {
        if (idle.empty()) {
            workers.push_back(new_worker());
            idle.push_back(workers.back());
        }
        Worker &w = *idle.back();
        idle.pop_back();
        w.launch = job.launch;
        w.contexts = &job.contexts;
        w.settings = settings();
        w.threads = (int)(job.launch->block.x * job.launch->block.y * job.launch->block.z);
        start_block(w, (i * job.factor + job.shift) % job.blocks);
        run(w);
    }

    void run(Worker &w) {
        enter(w);
        if (w.suspended) suspended.push_back(&w);
        else end_block(w);
        std::lock_guard<Lock> hold(job.lock);
        if (w.suspended) {
            job.suspended.push_back(&w);
            return;
        }
        job.resident--;
        idle.push_back(&w);
    }

    static bool can_continue(const Worker &w) {
        return w.gave_way || async_counter_reached(w);
    }

    // One of those that can continue (or that have asynchronous work, if they are the last resort), or NULL. Call under
    // the lock.
    Worker *take_suspended(bool (*possible)(const Worker &)) {
        const size_t n = suspended.size();
        size_t first = n ? next_random(random) % n : 0;
        // Mostly the latest one, so that earlier ones fall behind.
        if (n && settings().suspend == OFTEN && next_random(random) % 4) first = n - 1;
        for (size_t i = 0; i < n; i++) {
            Worker *w = suspended[(first + n - i) % n];
            if (!possible(*w)) continue;
            suspended.erase(std::find(suspended.begin(), suspended.end(), w));
            job.suspended.erase(std::find(job.suspended.begin(), job.suspended.end(), w));
            return w;
        }
        return NULL;
    }

    // Runs a block. False if there is none to start, and all that have started have ended or are suspended.
    bool run_one() {
        uint64_t i = UINT64_MAX;
        Worker *w;
        {
            std::lock_guard<Lock> hold(job.lock);
            const bool can_start = job.next < job.blocks && job.resident < settings().resident;
            // Those that gave way take turns with those that have not started.
            const bool start_now = can_start && settings().suspend == OFTEN && next_random(random) % 2;
            w = start_now ? NULL : take_suspended(can_continue);
            if (!w && can_start) {
                i = job.next++;
                job.resident++;
            } else if (!w) w = take_suspended(async_has_work);
        }
        if (w) run(*w);
        else if (i != UINT64_MAX) start(i);
        return w || i != UINT64_MAX;
    }

    // No CPU thread runs a block, so only a suspended one that can continue can change anything.
    void check_deadlock() {
        std::lock_guard<Lock> hold(job.lock);
        if (job.idle < job.running || job.suspended.empty()) return;
        if (job.next < job.blocks && job.resident < settings().resident) return;
        for (Worker *w : job.suspended)
            if (can_continue(*w) || async_has_work(*w)) return;
        worker = job.suspended[0];
        position = &worker->fibers[worker->current].position;
        die("DEADLOCK of blocks: %zu wait for counters of others, %llu of %llu have not started "
            "(CUDA_ON_CPU_RESIDENT=%llu at a time): %s",
            job.suspended.size(), (unsigned long long)(job.blocks - job.next), (unsigned long long)job.blocks,
            (unsigned long long)settings().resident, who_waits_where(0, worker->threads));
    }

    bool more_to_do() {
        std::lock_guard<Lock> hold(job.lock);
        return !suspended.empty() || job.next < job.blocks;
    }

    void count(int Job::*number, int change) {
        std::lock_guard<Lock> hold(job.lock);
        job.*number += change;
    }
};

// This CPU thread's workers. They are not in its thread-local storage: a library that is loaded at run time, as by each
// of some tests, must do with the few bytes of it that are left.
static std::vector<Worker *> &own_workers() {
    static const pthread_key_t key = [] {
        pthread_key_t made;
        if (pthread_key_create(&made, NULL) != 0) die("OUT OF MEMORY: pthread_key_create fails");
        return made;
    }();
    auto *found = (std::vector<Worker *> *)pthread_getspecific(key);
    if (!found) {
        found = new std::vector<Worker *>;
        pthread_setspecific(key, found);
    }
    return *found;
}

static void run_blocks(Job &job) {
    std::vector<Worker *> &workers = own_workers();
    Blocks mine = {job, workers, {workers.rbegin(), workers.rend()}, {}, settings().seed};    // workers[0] comes first
    mine.count(&Job::running, 1);
    while (mine.more_to_do()) {
        if (mine.run_one()) continue;
        mine.count(&Job::idle, 1);
        mine.check_deadlock();
        sched_yield();
        mine.count(&Job::idle, -1);
    }
    mine.count(&Job::running, -1);
    for (Worker *w : workers) {
        w->launch = NULL;
        add_counts(*w);
        if (w != workers[0] && w->stacks_ready && stacks_ready > STACKS_KEPT) release_stacks(*w);
    }
}

// The CPU threads besides the launching one. They wait for work until the program ends.
struct Pool {
    std::mutex lock;
    std::condition_variable wake, done;
    Job *job = NULL;
    int wanted = 0, running = 0, threads = 0;

    void help() {
        Unseen unseen;
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            wake.wait(hold, [&] { return wanted > 0; });
            wanted--;
            Job *mine = job;
            hold.unlock();
            if (race_check()) __tsan_acquire((void *)((char *)mine->launch + 1));
            run_blocks(*mine);
            hold.lock();
            if (--running == 0) done.notify_all();
        }
    }

    void run(Job &work, int helpers) {
        {
            std::lock_guard<std::mutex> hold(lock);
            for (; threads < helpers; threads++) std::thread([this] { help(); }).detach();
            job = &work;
            wanted = running = helpers;
        }
        wake.notify_all();
        run_blocks(work);
        std::unique_lock<std::mutex> hold(lock);
        running -= wanted;    // threads that have not woken up are no longer needed
        wanted = 0;
        done.wait(hold, [&] { return running == 0; });
    }
};

void run_grid(const Parameters &launch) {
    static Pool *pool = new Pool;    // never freed: its threads may outlive main()
    Job job = {};
    job.launch = &launch;
    job.blocks = (uint64_t)launch.grid.x * launch.grid.y * launch.grid.z;
    job.factor = 1;
    job.shift = 0;
    if (settings().order == REVERSE) {
        job.factor = job.blocks - 1;
        job.shift = job.blocks - 1;
    }
    if (settings().order >= RANDOM) {
        static const uint64_t primes[] = {1000003, 1000033, 1000037, 1000039};
        uint64_t random = settings().seed;
        do job.factor = primes[next_random(random) % 4];
        while (job.blocks % job.factor == 0);
        job.shift = next_random(random) % job.blocks;
    }
    uint64_t threads = (uint64_t)launch.block.x * launch.block.y * launch.block.z * job.blocks;
    int helpers = (int)std::min<uint64_t>({(uint64_t)settings().threads, job.blocks, 1 + threads / 256}) - 1;
    if (race_check()) {
        begin_launch(job.contexts);
        __tsan_release((void *)((char *)&launch + 1));
    }
    if (helpers > 0) pool->run(job, helpers);
    else run_blocks(job);
    if (race_check()) {
        __tsan_acquire((void *)&launch);
        end_launch(job.contexts);
    }
    std::lock_guard<Lock> hold(counts_lock);
    all_counts.launches++;
    all_launches[launch.kernel]++;
}

void count_wait(bool idle) {
    std::lock_guard<Lock> hold(counts_lock);
    all_counts.waits++;
    all_counts.idle_waits += idle;
}

Counts counts() {
    std::lock_guard<Lock> hold(counts_lock);
    return all_counts;
}

void counts_reset() {
    std::lock_guard<Lock> hold(counts_lock);
    all_counts = Counts();
    all_conflicts.clear();
    all_launches.clear();
    all_calls.clear();
}

void count_call(const Call &call) {
    if (call.kernel || call.name.empty()) return;
    std::lock_guard<Lock> hold(counts_lock);
    Calls &calls = all_calls[call.name];
    calls.count++;
    calls.bytes += call.bytes;
}

void count_graph() {
    std::lock_guard<Lock> hold(counts_lock);
    all_counts.graphs++;
}

void counts_print(FILE *file) {
    std::lock_guard<Lock> hold(counts_lock);
    const Counts &c = all_counts;
    fprintf(
        file,
        "cuda_on_cpu: %llu launches, %llu blocks, %llu barriers, %llu operations of warps, %llu mma; ldmatrix %llu, bank conflicts %llu; "
        "stmatrix %llu, bank conflicts %llu; cp.async %llu, bank conflicts %llu; %llu wgmma, %llu bulk copies; %llu waits of the host, %llu of them until no work was left; %llu launches of graphs\n",
        (unsigned long long)c.launches, (unsigned long long)c.blocks, (unsigned long long)c.barriers,
        (unsigned long long)c.collectives, (unsigned long long)c.mmas, (unsigned long long)c.ldmatrix,
        (unsigned long long)c.ldmatrix_conflicts, (unsigned long long)c.stmatrix,
        (unsigned long long)c.stmatrix_conflicts, (unsigned long long)c.copies, (unsigned long long)c.copy_conflicts,
        (unsigned long long)c.wgmmas, (unsigned long long)c.bulk_copies, (unsigned long long)c.waits,
        (unsigned long long)c.idle_waits, (unsigned long long)c.graphs);
    for (const auto &l : all_conflicts)
        fprintf(file, "  %s:%d: %llu bank conflicts\n", l.first.first.c_str(), l.first.second,
                (unsigned long long)l.second);
    for (const auto &l : all_launches)
        fprintf(file, "  %s: %llu launches\n", kernel_name(l.first).c_str(), (unsigned long long)l.second);
    for (const auto &l : all_calls)
        fprintf(file, "  %s: %llu calls, %llu bytes\n", l.first.c_str(), (unsigned long long)l.second.count,
                (unsigned long long)l.second.bytes);
}

}

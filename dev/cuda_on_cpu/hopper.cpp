// Hopper's asynchronous machinery (hopper_on_cpu.h): mbarriers, TMA and bulk copies, the asynchronous proxy's view of
// shared memory, wgmma, named barriers, setmaxnreg, and blocks that wait for counters of others.
//
// An asynchronous operation is a record in its block's Async. It takes place when settings().async says so, never later
// than in a wait for it, and checks that what it reads has not changed since its issue. What it will write is poisoned
// from its issue on: shared memory until a TMA load completes, and wgmma's accumulators until a wait that names them.
//
// Like blocks.cpp, this file is never compiled with -fsanitize=thread.
#include "hopper_on_cpu.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <bitset>
#include <deque>
#include <memory>
#include <mutex>

#include "block.h"

namespace cuda_on_cpu {

enum { PIECE = 16, NAMED_BARRIERS = 16, MOST_REGISTERS = 256 };
static const size_t ROOM = DYNAMIC_ROOM + STATICS_ROOM;
static const int64_t MOST_TRANSACTION_BYTES = (1 << 20) - 1;
static const unsigned MOST_ARRIVALS = (1 << 20) - 1;

// ---- the state of a block

struct Barrier {    // an mbarrier
    Mbarrier *address;
    unsigned arrivals, pending;    // of each phase; missing in this one
    unsigned initializer;          // the thread
    Site site;                     // of the initialization
    int64_t bytes = 0;             // of transactions: expected and not complete
    unsigned phase = 0;
    bool fenced = false;       // its initialization
    bool observed = true;      // somebody has waited for the last complete phase
    bool had_bytes = false;    // of transactions, in the last complete phase
    bool has_bytes = false;    // in this one
    std::vector<unsigned> waiting = {};
    std::bitset<BLOCK_THREADS> arrived = {};    // in this phase
};

struct Piece {          // 16 bytes of a copy
    uint32_t offset;    // in shared memory
    char *global;
    uint8_t inside;    // of its bytes, so many are in bounds, from the first on
};

enum CopyKind { LOAD, STORE, ADDITION };

struct BulkCopy {
    CopyKind kind;
    Site site;
    unsigned thread, group;    // issued by this thread, after so many commits
    Barrier *barrier;          // of a load
    unsigned phase;            // of that barrier
    bool read;                 // a store's source has been read
    size_t bytes;
    std::vector<Piece> pieces;
    std::vector<char> source;    // of a store: the bytes at its issue
};

// The registers of one accumulator, from the first wgmma that writes it to the wait that names it. Meanwhile the values
// are here, and the program's variables hold poison.
struct Accumulator {
    int columns;
    float *d[WARPGROUP];
    std::bitset<WARPGROUP> claimed;    // by threads that have waited
    std::vector<float> values;         // (64, columns)
    unsigned group;                    // of the latest wgmma
    Site site;
};

struct WgmmaOperation {
    Matmul matmul;
    Site site;
    unsigned group;
    bool done;
    std::bitset<WARPGROUP> waited;
    Accumulator *accumulator;
    const uint32_t *a_registers[WARPGROUP];
    uint32_t a[WARPGROUP][4];
    std::vector<uint32_t> a_pieces, b_pieces;    // offsets in shared memory
    std::vector<char> a_bytes, b_bytes;          // at the issue
};

struct Warpgroup {
    int waiting;    // threads that have arrived at the operation below
    Wait first;
    Matmul matmul;
    unsigned commits;
    float *d[WARPGROUP];
    const uint32_t *a[WARPGROUP];
    std::deque<std::unique_ptr<WgmmaOperation>> operations;    // in order
    std::vector<std::unique_ptr<Accumulator>> accumulators;
    int registers, wanted;    // per thread; asked for and not granted
    void *unit;               // the tensor core as a thread of the race check
};

struct NamedBarrier {
    int threads, count;
    unsigned phase;
    Site site;
    std::bitset<BLOCK_THREADS> arrived;
    std::vector<unsigned> waiting;
};

struct Run {    // of bytes in global memory
    char *start, *end;
};

struct UnfinishedStore {    // a bulk store, or addition, that no bulk_wait has covered yet
    unsigned group;
    CopyKind kind;
    std::vector<Run> runs;
    const unsigned *counter;    // for which its thread waited last
    Site site;
};

struct Aligned {    // an instruction that all lanes of a warp have to execute
    int argument;
    Site site;
};

struct AsyncThread {
    size_t aligned;             // number of such instructions so far
    unsigned commits;           // of wgmma groups
    bool fenced;                // by wgmma_fence(), since the last commit
    std::vector<char> stack;    // at that fence, up to the stack's top
    unsigned bulk_commits;
    unsigned bulk_needed;    // commits up to the latest copy's
    unsigned bulk_waited;    // groups of which the sources have been waited for
    Site bulk_site;          // of the latest copy
    bool bulk_uncommitted;
    std::deque<UnfinishedStore> unfinished;               // in order
    std::vector<std::pair<uint32_t, uint32_t>> stores;    // (offset, bytes) since its last fence.proxy.async
    std::vector<Barrier *> inits;                         // not fenced yet
    Barrier *barrier;                                     // what it waits for
    unsigned parity;
    int named;
    const unsigned *counter;
    unsigned counter_value;
    // Of its bulk copies, in the race check: one for shared memory and the sources of loads, for which bulk_wait_read()
    // waits, and one for what stores write.
    void *copier, *writer;
};

struct GenericStore {    // to 2 bytes, of which the asynchronous proxy does not know yet
    uint16_t thread;     // + 1; 0: none
    uint16_t site;
};

struct Loaded {       // by TMA, 16 bytes
    uint16_t site;    // 0: never
    uint8_t swizzle;
    bool in_flight;
};

struct Async {
    std::deque<Barrier> barriers;
    std::vector<std::unique_ptr<BulkCopy>> copies;    // in flight
    Warpgroup warpgroups[WARPS / 4];
    NamedBarrier named[NAMED_BARRIERS];
    std::vector<AsyncThread> threads;
    std::vector<Aligned> aligned[WARPS];    // what the first lane to come has executed
    std::vector<Site> sites;
    int pool;    // registers that no warpgroup has
    int counter_waiters;
    unsigned rarely;    // at random, an asynchronous step takes place in one of so many turns
    // Shared memory as the asynchronous proxy sees it, and what it does not know.
    char *shadow;
    GenericStore *stores;
    Loaded *loaded;
};

static void clear_memory(Async &a, size_t from, size_t end) {
    from = (from / PIECE) * PIECE;
    fill(a.shadow + from, end - from, POISON);
    memset(a.stores + from / 2, 0, ((end - from) / 2) * sizeof(GenericStore));
    memset(a.loaded + from / PIECE, 0, ((end - from) / PIECE) * sizeof(Loaded));
}

static Async *new_async() {
    Async *a = new Async();
    size_t bytes = ROOM + ROOM / 2 * sizeof(GenericStore) + ROOM / PIECE * sizeof(Loaded);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) die("no memory for %zu bytes of the asynchronous proxy's shared memory", bytes);
    a->shadow = (char *)p;
    a->stores = (GenericStore *)(a->shadow + ROOM);
    a->loaded = (Loaded *)(a->stores + ROOM / 2);
    // Workers are not in memory that LeakSanitizer searches.
    static Lock lock;
    static std::vector<Async *> *all = new std::vector<Async *>();
    std::lock_guard<Lock> hold(lock);
    all->push_back(a);
    return a;
}

static int registers_of_thread(const Worker &w) {    // at the start
    return std::min<int>(((64 * 1024 / w.threads) / 8) * 8, MOST_REGISTERS);
}

// The block's state, which is made anew at its first asynchronous instruction. Call under Unseen.
static Async &async_of(Worker &w) {
    if (w.async) return *w.async;
    if (!w.async_kept) w.async_kept = new_async();
    Async &a = *(w.async = w.async_kept);
    a.barriers.clear();
    a.copies.clear();
    for (Warpgroup &g : a.warpgroups) g = Warpgroup();
    for (NamedBarrier &n : a.named) n = NamedBarrier();
    a.threads.assign((size_t)w.threads, AsyncThread());
    for (auto &warp : a.aligned) warp.clear();
    a.sites.assign(1, Site{"", 0});
    a.counter_waiters = 0;
    a.rarely = 16;
    for (int i = 0; i < (w.threads + WARPGROUP - 1) / WARPGROUP; i++)
        a.warpgroups[i].registers = registers_of_thread(w);
    a.pool = 0;
    clear_memory(a, shared_offset(w, w.dynamic), ROOM);
    return a;
}

static AsyncThread &thread_of(Async &a, const Fiber &me) {
    return a.threads[me.number];
}

static uint16_t number_of_site(Async &a, Site site) {
    for (size_t i = a.sites.size(); i-- > 1;)
        if (same_site(a.sites[i], site)) return (uint16_t)i;
    if (a.sites.size() == UINT16_MAX) die("too many lines that store to shared memory");
    a.sites.push_back(site);
    return (uint16_t)(a.sites.size() - 1);
}

static void wake(Worker &w, std::vector<unsigned> &threads) {
    for (unsigned number : threads) set_ready(w, number);
    threads.clear();
}

static void wait_as(Worker &w, Fiber &me, Kind kind, Site site) {
    me.wait = {kind, site};
    set_waiting(w, me.number);
}

// PTX's .aligned: the other lanes of a warp have to execute what the first one to come has. wgmma and setmaxnreg, for
// which a whole warpgroup meets, do not need this.
static void execute_aligned(Async &a, const Fiber &me, int argument, Site site) {
    std::vector<Aligned> &warp = a.aligned[me.number / LANES];
    const size_t number = thread_of(a, me).aligned++;
    if (number == warp.size()) warp.push_back({argument, site});
    const Aligned &first = warp[number];
    if (first.argument != argument || !same_site(first.site, site))
        die("MISMATCH: thread %u executes %s(%d) at %s, and another lane of its warp %s(%d) at %s; all lanes have to execute the same instruction",
            me.number, site.function, argument, line_of(site), first.site.function, first.argument,
            line_of(first.site));
}

static void check_all_lanes_executed(const Worker &w, const Async &a) {
    for (int i = 0; i < w.threads; i++) {
        const std::vector<Aligned> &warp = a.aligned[i / LANES];
        const size_t number = a.threads[(size_t)i].aligned;
        if (number < warp.size())
            die("MISMATCH: thread %d has not executed %s(%d) at %s, and another lane of its warp has", i,
                warp[number].site.function, warp[number].argument, line_of(warp[number].site));
    }
}

// In the race check, calls function() as another of its threads, which is made at its first use.
template <class Function>
static void as_thread(void *&fiber, Function function) {
    void *me = __tsan_get_current_fiber();
    if (!fiber) fiber = new_context(*worker);
    __tsan_switch_to_fiber(fiber, 1);
    function();
    __tsan_switch_to_fiber(me, 1);
}

uint32_t shared_address(const void *p, Site site) {
    Worker &w = *worker;
    if (!is_shared(w, p, 1))
        die("OUT OF BOUNDS: %s of an address outside the block's shared memory: %s", where(site),
            describe_shared(w, p));
    return (uint32_t)shared_offset(w, p);
}

// ---- shared memory, and what the asynchronous proxy sees of it

void async_generic_store(const void *p, size_t bytes, unsigned thread, Site site) {
    Unseen unseen;
    Worker &w = *worker;
    Async &a = async_of(w);
    if (!is_shared(w, p, bytes))
        die("OUT OF BOUNDS: %s writes %zu bytes outside the block's shared memory: %s", where(site), bytes,
            describe_shared(w, p));
    size_t offset = shared_offset(w, p);
    uint16_t number = number_of_site(a, site);
    for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; i++) a.stores[i] = {(uint16_t)(thread + 1), number};
    for (size_t i = offset / PIECE; i < (offset + bytes + PIECE - 1) / PIECE; i++) {
        if (a.loaded[i].in_flight)
            die("BUFFER IN USE: thread %u stores at %s to bytes that the %s is still writing", thread, line_of(site),
                where(a.sites[a.loaded[i].site]));
        a.loaded[i] = {0, 0, false};
    }
    a.threads[thread].stores.push_back({(uint32_t)offset, (uint32_t)bytes});
}

void generic_store(const void *p, size_t bytes, Site site) {
    async_generic_store(p, bytes, self().number, site);
}

void fence_proxy_async() {
    Unseen unseen;
    Worker &w = *worker;
    Async &a = async_of(w);
    AsyncThread &me = thread_of(a, self());
    for (const auto &s : me.stores)
        for (size_t i = s.first / 2; i < (s.first + s.second + 1) / 2; i++)
            if (a.stores[i].thread == self().number + 1) {
                a.stores[i] = {0, 0};
                memcpy(a.shadow + 2 * i, shared_pointer(w, 2 * i), 2);
            }
    me.stores.clear();
}

// An asynchronous instruction reads or writes ("reads", "writes") 16 bytes.
static void check_seen(Worker &w, Async &a, uint32_t offset, const char *accesses, Site site) {
    const char *p = shared_pointer(w, offset);
    for (size_t i = offset / 2; i < (offset + PIECE) / 2; i++)
        if (a.stores[i].thread)
            die("MISSING PROXY FENCE: %s %s what thread %d stored at %s, and that thread has not called fence_proxy_async() since",
                where(site), accesses, a.stores[i].thread - 1, line_of(a.sites[a.stores[i].site]));
    if (memcmp(p, a.shadow + offset, PIECE) != 0)
        die("UNSEEN STORE: %s %s shared memory that an ordinary store has changed (byte %td of dynamic shared memory); use store_shared() or stmatrix, then fence_proxy_async()",
            where(site), accesses, p - w.dynamic);
}

static void check_read(Worker &w, Async &a, uint32_t offset, Site site) {
    const Loaded &loaded = a.loaded[offset / PIECE];
    const char *p = shared_pointer(w, offset);
    if (!is_shared(w, p, PIECE))
        die("OUT OF BOUNDS: %s reads 16 bytes outside the block's shared memory: %s", where(site),
            describe_shared(w, p));
    if (loaded.in_flight)
        die("NOT LOADED YET: %s reads shared memory that the %s is still writing", where(site),
            where(a.sites[loaded.site]));
    check_seen(w, a, offset, "reads", site);
}

// The same when the instruction is executed: nothing may have changed since its issue.
static void check_unchanged(Worker &w, Async &a, uint32_t offset, const char *then, Site site) {
    const char *p = shared_pointer(w, offset);
    if (memcmp(p, then, PIECE) == 0 && memcmp(a.shadow + offset, then, PIECE) == 0) return;
    const Loaded &loaded = a.loaded[offset / PIECE];
    const GenericStore &store = a.stores[offset / 2];
    const char *who = "something";
    if (loaded.site) who = print("the %s", where(a.sites[loaded.site]));
    if (store.thread) who = print("thread %d's store at %s", store.thread - 1, line_of(a.sites[store.site]));
    die("BUFFER REUSED: %s has overwritten shared memory that %s was still reading", who, where(site));
}

// ---- mbarriers

static uint64_t cookie(const Mbarrier *b) {    // what an initialized mbarrier holds, to detect that it is overwritten
    uint64_t state = (uint64_t)(uintptr_t)b;
    return next_random(state);
}

// The address that represents the synchronization by a phase, in the race check.
static char *sync_of(const Barrier &b, unsigned phase) {
    return (char *)b.address + phase % 2;
}

static const char *describe(const Barrier &b) {
    return print("the mbarrier initialized at %s, in phase %u, lacks %u of %u arrivals and %lld bytes", line_of(b.site),
                 b.phase, b.pending, b.arrivals, (long long)b.bytes);
}

static void check_mbarrier_address(Worker &w, const Mbarrier *b, Site site) {
    if ((uintptr_t)b % 8 != 0) misaligned(b, site);
    if (!is_shared(w, b, sizeof *b))
        die("OUT OF BOUNDS: %s: the mbarrier is outside the block's shared memory: %s", where(site),
            describe_shared(w, b));
}

static Barrier &find_barrier(Worker &w, Async &a, Mbarrier *address, bool by_hardware, Site site) {
    check_mbarrier_address(w, address, site);
    for (Barrier &b : a.barriers) {
        if (b.address != address) continue;
        if (!b.fenced && (by_hardware || b.initializer != self().number))
            die("MISSING FENCE: %s uses the mbarrier that thread %u initialized at %s without a later mbarrier_init_fence()",
                where(site), b.initializer, line_of(b.site));
        if (address->state != cookie(address))
            die("OVERWRITTEN: %s: something has written into the mbarrier initialized at %s", where(site),
                line_of(b.site));
        return b;
    }
    die("NOT INITIALIZED: %s uses an mbarrier that no thread has initialized yet", where(site));
}

void mbarrier_init(Mbarrier *address, unsigned arrivals, Site site) {
    Unseen unseen;
    Worker &w = *worker;
    Async &a = async_of(w);
    check_mbarrier_address(w, address, site);
    if (arrivals < 1 || arrivals > MOST_ARRIVALS)
        die("WRONG COUNT: %s for %u arrivals; 1 to %u are possible", where(site), arrivals, MOST_ARRIVALS);
    for (const Barrier &b : a.barriers)
        if (b.address == address)
            die("INITIALIZED TWICE: %s of the mbarrier initialized at %s", where(site), line_of(b.site));
    size_t offset = shared_offset(w, address);
    if (race_check()) {
        __tsan_ignore_thread_end();
        __tsan_write_range(address, sizeof *address);
        __tsan_ignore_thread_begin();
    }
    address->state = cookie(address);
    memcpy(a.shadow + offset, address, sizeof *address);
    a.barriers.push_back({address, arrivals, arrivals, self().number, site});
    thread_of(a, self()).inits.push_back(&a.barriers.back());
}

void mbarrier_init_fence() {
    Unseen unseen;
    AsyncThread &me = thread_of(async_of(*worker), self());
    for (Barrier *b : me.inits) b->fenced = true;
    me.inits.clear();
}

static void complete_phase_if_done(Worker &w, Barrier &b) {
    if (b.pending > 0 || b.bytes != 0) return;
    if (!b.observed)
        die("UNOBSERVED PHASE: %s completes it, and nobody has waited for the previous phase", describe(b));
    b.observed = false;
    b.had_bytes = b.has_bytes;
    b.has_bytes = false;
    b.phase++;
    b.pending = b.arrivals;
    b.arrived.reset();
    wake(w, b.waiting);
}

// In the race check, an initialization that is not ordered before a use is a race.
static void use_mbarrier(Mbarrier *address) {
    if (race_check()) __tsan_read_range(address, sizeof *address);
}

static void arrive(Worker &w, Mbarrier *address, unsigned expected_bytes, Site site) {
    Unseen unseen;
    Async &a = async_of(w);
    const unsigned thread = self().number;
    Barrier &b = find_barrier(w, a, address, false, site);
    if (b.pending == 0)
        die("OVERFLOW: %s by thread %u arrives once more than the phase expects: %s", where(site), thread, describe(b));
    if (b.arrived[thread])
        die("ARRIVED TWICE: %s: thread %u has already arrived in this phase: %s", where(site), thread, describe(b));
    if (race_check()) __tsan_release(sync_of(b, b.phase));
    b.arrived[thread] = true;
    b.bytes += expected_bytes;
    b.has_bytes |= expected_bytes > 0;
    if (b.bytes > MOST_TRANSACTION_BYTES)
        die("OVERFLOW: %s: %s; at most %lld bytes can be pending", where(site), describe(b),
            (long long)MOST_TRANSACTION_BYTES);
    b.pending--;
    complete_phase_if_done(w, b);
}

// After an arrival, others may run: what the thread does next has not happened yet for them.
void mbarrier_arrive(Mbarrier *address, unsigned expected_bytes, Site site) {
    Worker &w = *worker;
    use_mbarrier(address);
    arrive(w, address, expected_bytes, site);
    if (expected_bytes > 0) return;
    if (w.settings.async == LAST || (w.settings.async == AT_RANDOM && next_random(w.random) % 4 == 0)) take_turns();
}

void mbarrier_wait(Mbarrier *address, unsigned parity, Site site) {
    Worker &w = *worker;
    Fiber &me = self();
    if (parity > 1) die("WRONG PARITY: %s for parity %u, not 0 or 1", where(site), parity);
    use_mbarrier(address);
    for (;;) {
        {
            Unseen unseen;
            Async &a = async_of(w);
            Barrier &b = find_barrier(w, a, address, false, site);
            if (b.phase % 2 != parity) {
                b.observed = true;
                if (race_check() && b.phase > 0) __tsan_acquire(sync_of(b, b.phase - 1));
                break;
            }
            thread_of(a, me).barrier = &b;
            thread_of(a, me).parity = parity;
            b.waiting.push_back(me.number);
            wait_as(w, me, MBARRIER_WAIT, site);
        }
        take_turns();
    }
}

// ---- tensor maps

struct TensorMapBits {    // a CUtensorMap of the emulation
    uint64_t magic;
    char *base;
    uint32_t rank, element_bytes, swizzle;
    uint64_t dims[5], strides[4];    // strides in bytes, from the second dimension on
    uint16_t box[5], unused[3];
};
static_assert(sizeof(TensorMapBits) <= sizeof(CUtensorMap), "the emulated tensor map fits into CUDA's");
static const uint64_t TENSOR_MAP = 0x70616d726f736e74;

static uint32_t span(unsigned swizzle) {    // of bytes within which pieces are permuted: a row of the swizzle's pattern
    return 16u << swizzle;
}

static int64_t row_bytes(const TensorMapBits &m) {
    return (int64_t)(m.dims[0] * m.element_bytes);
}

static uint64_t extent(const TensorMapBits &m) {    // in bytes
    uint64_t bytes = (uint64_t)row_bytes(m);
    for (uint32_t i = 1; i < m.rank; i++) bytes += (m.dims[i] - 1) * m.strides[i - 1];
    return bytes;
}

// An empty string if the map is possible.
static std::string refuse_map(const TensorMapBits &m, const uint32_t *element_strides, int interleave,
                              const void *map) {
    if ((uintptr_t)map % 64 != 0) return "the tensor map is not aligned to 64 bytes";
    if (m.rank < 1 || m.rank > 5) return print("the rank %u is not from 1 to 5", m.rank);
    if (m.element_bytes == 0) return "the element type is not emulated: bfloat16 and float32 are";
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return "interleaved layouts are not emulated";
    if (m.swizzle > 3) return print("the swizzle %u is not emulated", m.swizzle);
    if ((uintptr_t)m.base % 16 != 0) return print("the global address %p is not aligned to 16 bytes", (void *)m.base);
    for (uint32_t i = 0; i < m.rank; i++) {
        if (m.dims[i] < 1 || m.dims[i] > 1ull << 32)
            return print("dimension %u has the size %llu", i, (unsigned long long)m.dims[i]);
        if (m.box[i] < 1 || m.box[i] > 256) return print("the box has the size %u in dimension %u", m.box[i], i);
        if (element_strides[i] != 1)
            return print("the element stride %u in dimension %u is not emulated", element_strides[i], i);
        if (i > 0 && (m.strides[i - 1] % 16 != 0 || m.strides[i - 1] >= 1ull << 40 || m.strides[i - 1] == 0))
            return print("the stride of dimension %u, %llu bytes, is not a multiple of 16 below 2^40", i,
                         (unsigned long long)m.strides[i - 1]);
    }
    uint32_t inner = m.box[0] * m.element_bytes;
    if (inner % 16 != 0) return print("the box's rows have %u bytes, which is not a multiple of 16", inner);
    // CUDA allows shorter rows, but does not document where they lie.
    if (m.swizzle && inner != span(m.swizzle))
        return print("the box's rows have %u bytes, and a swizzle of %u bytes needs as many", inner, span(m.swizzle));
    if (!is_device(m.base, extent(m)))
        return print("the tensor's %llu bytes at %p are not all device memory", (unsigned long long)extent(m),
                     (void *)m.base);
    return "";
}

}

using namespace cuda_on_cpu;

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                           const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                           const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill fill) {
    TensorMapBits m = {};
    m.magic = TENSOR_MAP;
    m.base = (char *)base;
    m.rank = rank;
    m.swizzle = (uint32_t)swizzle;
    if (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) m.element_bytes = 2;
    if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) m.element_bytes = 4;
    for (uint32_t i = 0; i < rank && i < 5; i++) {
        m.dims[i] = dims[i];
        m.box[i] = (uint16_t)std::min(box[i], 65535u);
        if (i > 0) m.strides[i - 1] = strides[i - 1];
    }
    std::string reason = refuse_map(m, element_strides, interleave, map);
    if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) reason = "out of bounds, only zeros are emulated";
    if (!reason.empty()) {
        fprintf(stderr, "cuda_on_cpu: cuTensorMapEncodeTiled: %s\n", reason.c_str());
        return CUDA_ERROR_INVALID_VALUE;
    }
    memset((void *)map, 0, sizeof *map);
    memcpy((void *)map, &m, sizeof m);
    return CUDA_SUCCESS;
}

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned,
                                                        unsigned long long, cudaDriverEntryPointQueryResult *found) {
    bool known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = known ? (void *)cuTensorMapEncodeTiled : NULL;
    if (found) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return known ? cudaSuccess : cudaErrorInvalidValue;
}

namespace cuda_on_cpu {

// ---- TMA and bulk copies

// Swizzling exchanges address bits 4 to 6 depending on bits 7 to 9 (128 bytes), 4 and 5 on 7 and 8 (64), 4 on 7 (32):
// of the address in shared memory, wherever the tile starts.
static uint32_t swizzled(uint32_t address, unsigned swizzle) {
    return address ^ (address >> 3 & (span(swizzle) - PIECE));
}

static unsigned alignment_of(unsigned swizzle) {    // of a tile: its swizzle pattern has 8 rows
    return 8 * span(swizzle);
}

// The pieces of a box in the order of shared memory, without swizzle.
static void list_pieces(BulkCopy &c, const TensorMapBits &m, const int *at, uint32_t to) {
    const uint32_t row_pieces = m.box[0] * m.element_bytes / PIECE;
    uint32_t rows = 1;
    for (uint32_t i = 1; i < m.rank; i++) rows *= m.box[i];
    c.bytes = (size_t)rows * row_pieces * PIECE;
    for (uint32_t row = 0; row < rows; row++) {
        bool inside = true;
        int64_t from = 0;
        for (uint32_t i = 1, rest = row; i < m.rank; i++) {
            int64_t x = at[i] + (int64_t)(rest % m.box[i]);
            rest /= m.box[i];
            inside &= x >= 0 && x < (int64_t)m.dims[i];
            from += x * (int64_t)m.strides[i - 1];
        }
        for (uint32_t p = 0; p < row_pieces; p++) {
            const int64_t first = (int64_t)at[0] * m.element_bytes + p * PIECE, left = row_bytes(m) - first;
            const bool some = inside && first >= 0 && left > 0;
            c.pieces.push_back({swizzled(to + (row * row_pieces + p) * PIECE, m.swizzle), m.base + from + first,
                                (uint8_t)(some ? std::min<int64_t>(left, PIECE) : 0)});
        }
    }
}

// In the race check, threads of their own make a thread's bulk copies.
static void announce_copy(Worker &w, AsyncThread &t, const BulkCopy &c) {
    if (!race_check()) return;
    char *issued = &w.meetings->bulk_issued[c.thread];
    __tsan_release(issued);
    as_thread(t.copier, [&] {
        __tsan_acquire(issued);
        for (const Piece &p : c.pieces)
            if (c.kind == LOAD) {
                __tsan_write_range(shared_pointer(w, p.offset), PIECE);
                __tsan_read_range(p.global, p.inside);
            } else __tsan_read_range(shared_pointer(w, p.offset), PIECE);
        if (c.barrier) __tsan_release(sync_of(*c.barrier, c.phase));
    });
    if (c.kind == LOAD) return;
    as_thread(t.writer, [&] {
        __tsan_acquire(issued);
        for (const Piece &p : c.pieces)
            if (c.kind == STORE) __tsan_write_range(p.global, p.inside);
            else
                for (int i = 0; i < p.inside; i += 4) __tsan_atomic32_fetch_add(p.global + i, 0, __ATOMIC_RELAXED);
    });
}

static void issue_load(Worker &w, Async &a, BulkCopy &c, unsigned swizzle) {
    uint16_t site = number_of_site(a, c.site);
    for (const Piece &p : c.pieces) {
        Loaded &loaded = a.loaded[p.offset / PIECE];
        if (loaded.in_flight)
            die("BUFFER IN USE: the %s writes shared memory that the %s is still writing", where(c.site),
                where(a.sites[loaded.site]));
        check_seen(w, a, p.offset, "writes", c.site);
        loaded = {site, (uint8_t)swizzle, true};
        fill(shared_pointer(w, p.offset), PIECE, POISON);
        fill(a.shadow + p.offset, PIECE, POISON);
    }
    c.barrier->has_bytes = true;
}

static void take_source(Worker &w, Async &a, BulkCopy &c) {    // of a store or an addition
    for (const Piece &p : c.pieces) {
        check_read(w, a, p.offset, c.site);
        const char *from = shared_pointer(w, p.offset);
        c.source.insert(c.source.end(), from, from + PIECE);
    }
}

// PTX allows a load to be announced after its issue, in the same phase. That is an error here, because the phase may
// complete before.
static void check_announced(const Async &a, const BulkCopy &c) {
    int64_t announced = c.barrier->bytes;
    for (const auto &other : a.copies)
        if (other->barrier == c.barrier) announced -= (int64_t)other->bytes;
    if (announced < (int64_t)c.bytes)
        die("WRONG EXPECT_TX: %s loads %zu bytes, of which the phase expects %lld: %s", where(c.site), c.bytes,
            (long long)announced, describe(*c.barrier));
}

static void complete_load(Worker &w, Async &a, BulkCopy &c) {
    for (const Piece &p : c.pieces) {
        char *to = shared_pointer(w, p.offset), bytes[PIECE] = {0};
        if (!is_filled(to, PIECE, POISON))
            die("BUFFER IN USE: something has stored to shared memory that the %s was still writing", where(c.site));
        memcpy(bytes, p.global, p.inside);
        memcpy(to, bytes, PIECE);
        memcpy(a.shadow + p.offset, bytes, PIECE);
        a.loaded[p.offset / PIECE].in_flight = false;
    }
    c.barrier->bytes -= (int64_t)c.bytes;
}

// Subnormal numbers and sums become 0, as red.add.f32 has it in global memory (PTX ISA).
static void add_floats(char *to, const char *from, int bytes) {
    for (int i = 0; i < bytes; i += 4) {
        float x;
        memcpy(&x, from + i, sizeof x);
        atomic_change((float *)(to + i),
                      [=](float old) { return flush_subnormal(flush_subnormal(old) + flush_subnormal(x)); });
    }
}

static void read_source(Worker &w, Async &a, BulkCopy &c) {
    for (size_t i = 0; i < c.pieces.size(); i++)
        check_unchanged(w, a, c.pieces[i].offset, &c.source[i * PIECE], c.site);
    c.read = true;
}

static void write_target(BulkCopy &c) {
    for (size_t i = 0; i < c.pieces.size(); i++) {
        const Piece &p = c.pieces[i];
        if (c.kind == ADDITION) add_floats(p.global, &c.source[i * PIECE], p.inside);
        else memcpy(p.global, &c.source[i * PIECE], p.inside);
    }
}

// The next step of a copy; a store first reads, and later writes.
static void step_copy(Worker &w, Async &a, size_t index) {
    BulkCopy &c = *a.copies[index];
    if (c.kind != LOAD && !c.read) return read_source(w, a, c);
    std::unique_ptr<BulkCopy> done = std::move(a.copies[index]);
    a.copies.erase(a.copies.begin() + (ptrdiff_t)index);
    if (c.kind != LOAD) return write_target(c);
    complete_load(w, a, c);
    complete_phase_if_done(w, *c.barrier);
}

static std::vector<Run> runs_of(const BulkCopy &c) {
    std::vector<Run> runs;
    for (const Piece &p : c.pieces) {
        if (p.inside == 0) continue;
        if (runs.empty() || runs.back().end != p.global) runs.push_back({p.global, p.global});
        runs.back().end += p.inside;
    }
    return runs;
}

// Bulk copies of a thread that only bulk_wait would order must not touch the same bytes, unless both add.
static void check_order(const AsyncThread &t, const BulkCopy &c, const std::vector<Run> &runs) {
    for (const UnfinishedStore &s : t.unfinished) {
        if (c.kind == ADDITION && s.kind == ADDITION) continue;
        for (const Run &x : runs)
            for (const Run &y : s.runs)
                if (x.start < y.end && y.start < x.end)
                    die("MISSING WAIT: %s %s global memory that the %s writes, and no bulk_wait has covered that",
                        where(c.site), c.kind == LOAD ? "reads" : "writes", where(s.site));
    }
}

static void issue(Worker &w, Async &a, std::unique_ptr<BulkCopy> copy) {
    AsyncThread &me = thread_of(a, self());
    copy->thread = self().number;
    copy->group = me.bulk_commits;
    announce_copy(w, me, *copy);
    w.counts.bulk_copies++;
    const bool load = copy->kind == LOAD;
    a.copies.push_back(std::move(copy));
    if (w.settings.async != EARLY) return;
    if (!load) step_copy(w, a, a.copies.size() - 1);
    step_copy(w, a, a.copies.size() - 1);
}

static std::unique_ptr<BulkCopy> new_copy(CopyKind kind, Site site) {
    std::unique_ptr<BulkCopy> c(new BulkCopy());
    c->kind = kind;
    c->site = site;
    return c;
}

void tma_load(void *shared, const TensorMap *map, Mbarrier *b, const int *at, int rank, Site site) {
    Unseen unseen;
    Worker &w = *worker;
    Async &a = async_of(w);
    TensorMapBits m;
    memcpy(&m, (const void *)map, sizeof m);
    if (m.magic != TENSOR_MAP || (uintptr_t)map % 64 != 0)
        die("WRONG TENSOR MAP: %s: what it is given is not a tensor map, or not aligned to 64 bytes", where(site));
    if ((int)m.rank != rank)
        die("WRONG TENSOR MAP: %s has %d coordinates, and the tensor map %u dimensions", where(site), rank, m.rank);
    if (!is_device(m.base, extent(m))) die("OUT OF BOUNDS: %s: the tensor is no longer device memory", where(site));
    size_t offset = shared_offset(w, shared), bytes = m.element_bytes;
    for (uint32_t i = 0; i < m.rank; i++) bytes *= m.box[i];
    if (!is_shared(w, shared, bytes))
        die("OUT OF BOUNDS: the box of %s, %zu bytes, is outside the block's shared memory: %s", where(site), bytes,
            describe_shared(w, shared));
    if (offset % alignment_of(m.swizzle) != 0)
        die("MISALIGNED: the box of %s is at byte %zu of shared memory, which is not a multiple of %u", where(site),
            offset, alignment_of(m.swizzle));
    if ((int64_t)at[0] * m.element_bytes % PIECE != 0)
        die("MISALIGNED COORDINATE: %s: the first coordinate, %d, is at byte %lld of a row, which is not a multiple of 16",
            where(site), at[0], (long long)at[0] * m.element_bytes);
    std::unique_ptr<BulkCopy> c = new_copy(LOAD, site);
    c->barrier = &find_barrier(w, a, b, true, site);
    c->phase = c->barrier->phase;
    list_pieces(*c, m, at, (uint32_t)offset);
    check_announced(a, *c);
    const std::vector<Run> runs = runs_of(*c);
    check_order(thread_of(a, self()), *c, runs);
    issue_load(w, a, *c, m.swizzle);
    issue(w, a, std::move(c));
}

void bulk_store(void *global, const void *shared, unsigned bytes, bool add, Site site) {
    Unseen unseen;
    Worker &w = *worker;
    Async &a = async_of(w);
    if ((uintptr_t)shared % 16 || (uintptr_t)global % 16 || bytes % 16 || bytes == 0)
        die("MISALIGNED: %s: addresses and the number of bytes, %u, must be multiples of 16", where(site), bytes);
    if (!is_shared(w, shared, bytes))
        die("OUT OF BOUNDS: %s, %u bytes outside the block's shared memory: %s", where(site), bytes,
            describe_shared(w, shared));
    if (!is_device(global, bytes))
        die("OUT OF BOUNDS: %s: the %u bytes at %p are not all device memory", where(site), bytes, global);
    std::unique_ptr<BulkCopy> c = new_copy(add ? ADDITION : STORE, site);
    c->bytes = bytes;
    for (uint32_t i = 0; i < bytes; i += PIECE)
        c->pieces.push_back({(uint32_t)shared_offset(w, shared) + i, (char *)global + i, PIECE});
    AsyncThread &me = thread_of(a, self());
    std::vector<Run> runs = runs_of(*c);
    check_order(me, *c, runs);
    take_source(w, a, *c);
    me.bulk_uncommitted = true;
    me.bulk_site = site;
    me.bulk_needed = me.bulk_commits + 1;
    me.unfinished.push_back({me.bulk_commits, c->kind, std::move(runs), me.counter, site});
    issue(w, a, std::move(c));
}

// After a commit, other blocks may run: what was committed has not been written yet for them.
void bulk_commit() {
    {
        Unseen unseen;
        Worker &w = *worker;
        AsyncThread &me = thread_of(async_of(w), self());
        const unsigned thread = self().number, group = me.bulk_commits % 16;
        if (me.copier) as_thread(me.copier, [&] { __tsan_release(&w.meetings->bulk_read[thread][group]); });
        if (me.writer) as_thread(me.writer, [&] { __tsan_release(&w.meetings->bulk_written[thread][group]); });
        me.bulk_commits++;
        me.bulk_uncommitted = false;
    }
    give_way();
}

void bulk_wait(unsigned groups, bool read_only, Site site) {
    Unseen unseen;
    Worker &w = *worker;
    Async &a = async_of(w);
    AsyncThread &me = thread_of(a, self());
    if (me.bulk_uncommitted)
        die("MISSING COMMIT: %s does not cover the %s, which no bulk_commit() follows", where(site),
            where(me.bulk_site));
    const auto covers = [&](unsigned group) { return group + groups < me.bulk_commits; };
    for (size_t i = 0; i < a.copies.size();) {
        BulkCopy &c = *a.copies[i];
        bool covered = c.kind != LOAD && c.thread == self().number && covers(c.group);
        if (covered && !c.read) step_copy(w, a, i);
        if (covered && !read_only) step_copy(w, a, i);
        else i++;
    }
    while (!read_only && !me.unfinished.empty() && covers(me.unfinished.front().group)) me.unfinished.pop_front();
    if (me.bulk_commits <= groups) return;
    me.bulk_waited = std::max(me.bulk_waited, me.bulk_commits - groups);
    const unsigned thread = self().number, group = (me.bulk_commits - groups - 1) % 16;
    if (me.copier) __tsan_acquire(&w.meetings->bulk_read[thread][group]);
    if (me.writer && !read_only) __tsan_acquire(&w.meetings->bulk_written[thread][group]);
}

// ---- wgmma

// The last of the warpgroup's threads to arrive returns true; all wait until it wakes them.
static bool warpgroup_meets(Worker &w, Warpgroup &g, Fiber &me, Kind kind, Site site) {
    if (w.threads % WARPGROUP != 0)
        die("WRONG BLOCK: %s in a block of %d threads, which is not a multiple of a warpgroup's 128", where(site),
            w.threads);
    wait_as(w, me, kind, site);
    if (g.waiting == 0) g.first = me.wait;
    int first = ((int)me.number / WARPGROUP) * WARPGROUP;
    if (g.first.kind != kind || !same_site(g.first.site, site))
        die("MISMATCH: threads of a warpgroup meet in different operations: %s",
            who_waits_where(first, first + WARPGROUP));
    return ++g.waiting == WARPGROUP;
}

static void warpgroup_goes_on(Worker &w, Warpgroup &g, const Fiber &me) {
    g.waiting = 0;
    for (unsigned i = 0; i < WARPGROUP; i++) set_ready(w, (me.number / WARPGROUP) * WARPGROUP + i);
}

// The open accumulator in whose registers, as this thread has them, p lies.
static Accumulator *accumulator_at(Warpgroup &g, unsigned thread, const void *p, size_t bytes) {
    for (auto &c : g.accumulators) {
        const char *from = (const char *)c->d[thread], *end = from + (size_t)c->columns / 2 * sizeof(float);
        if (!c->claimed[thread] && (const char *)p < end && (const char *)p + bytes > from) return c.get();
    }
    return NULL;
}

static bool unchanged_since_fence(const AsyncThread &t, const char *top, const void *p, size_t bytes) {
    const char *from = top - t.stack.size();
    return (const char *)p >= from && (const char *)p + bytes <= top &&
           memcmp(p, &t.stack[(size_t)((const char *)p - from)], bytes) == 0;
}

// Registers must not have been written between the last wgmma_fence() and a wgmma that uses them.
static void check_registers(Worker &w, Warpgroup &g, AsyncThread &t, const Fiber &me, const Matmul &m, Site site) {
    const unsigned thread = me.number % WARPGROUP;
    const size_t bytes = (size_t)m.columns / 2 * sizeof(float);
    const char *top = stack_top(w, me.number);
    if (!t.fenced)
        die("MISSING FENCE: %s begins a group, and thread %u has not called wgmma_fence() since the last one",
            where(site), me.number);
    Accumulator *in_flight = accumulator_at(g, thread, m.d, bytes);
    if (in_flight && (in_flight->d[thread] != m.d || in_flight->columns != m.columns))
        die("REGISTERS IN USE: %s accumulates into registers that overlap those of the %s, which is in flight",
            where(site), where(in_flight->site));
    if (!in_flight && !unchanged_since_fence(t, top, m.d, bytes))
        die("MISSING FENCE: %s: thread %u has written its accumulators after its last wgmma_fence()", where(site),
            me.number);
    if (!m.a_registers) return;
    if (Accumulator *c = accumulator_at(g, thread, m.a_registers, 4 * sizeof(uint32_t)))
        die("REGISTERS IN USE: %s takes A from accumulators of the %s, which is in flight", where(site),
            where(c->site));
    if (!unchanged_since_fence(t, top, m.a_registers, 4 * sizeof(uint32_t)))
        die("MISSING FENCE: %s: thread %u has written its registers of A after its last wgmma_fence()", where(site),
            me.number);
}

// Reads the whole stack, between variables too, which AddressSanitizer must not see, nor a call of memcpy.
__attribute__((no_sanitize("address"))) static void copy_stack(char *to, const char *from, size_t bytes) {
    typedef uint64_t __attribute__((may_alias, aligned(1))) Word;
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) *(Word *)(to + i) = *(const Word *)(from + i);
    for (; i < bytes; i++) to[i] = from[i];
}

void wgmma_fence(Site site) {
    Unseen unseen;
    Async &a = async_of(*worker);
    AsyncThread &t = thread_of(a, self());
    execute_aligned(a, self(), 0, site);
    const char *top = stack_top(*worker, self().number), *from = (const char *)__builtin_frame_address(0);
    t.stack.resize((size_t)(top - from));
    copy_stack(&t.stack[0], from, t.stack.size());
    t.fenced = true;
}

void wgmma_commit(Site site) {
    Unseen unseen;
    Async &a = async_of(*worker);
    AsyncThread &t = thread_of(a, self());
    execute_aligned(a, self(), 0, site);
    t.commits++;
    t.fenced = false;
}

// A descriptor of PTX: start address, leading and stride byte offsets, base offset, swizzle.
struct Descriptor {
    uint32_t start, leading, stride, base_offset;
    unsigned swizzle;
};

static Descriptor decode(uint64_t bits) {
    static const Swizzle SWIZZLES[] = {SWIZZLE_NONE, SWIZZLE_128, SWIZZLE_64, SWIZZLE_32};
    Descriptor d;
    d.start = (uint32_t)(bits & 0x3FFF) * 16;
    d.leading = (uint32_t)(bits >> 16 & 0x3FFF) * 16;
    d.stride = (uint32_t)(bits >> 32 & 0x3FFF) * 16;
    d.base_offset = (uint32_t)(bits >> 49 & 7);
    d.swizzle = SWIZZLES[bits >> 62];
    return d;
}

static void check_descriptor(uint64_t bits, const Descriptor &d, Major major, const char *which, Site site) {
    static const uint64_t UNUSED = 0x3FF1C000C000C000;
    if (bits & UNUSED)
        die("WRONG DESCRIPTOR: %s: %016llx, of %s, has bits set that have no meaning", where(site),
            (unsigned long long)bits, which);
    if (d.base_offset)
        die("WRONG DESCRIPTOR: %s: the base offset of %s is %u; only patterns that start at multiples of their length are emulated",
            where(site), which, d.base_offset);
    // The bits of the address that select the row of the swizzle's pattern.
    if (d.swizzle && d.start % alignment_of(d.swizzle) >= 128)
        die("MISALIGNED: %s: the start address of %s, byte %u of shared memory, is not in the first row of a swizzle pattern, which starts at multiples of %u",
            where(site), which, d.start, alignment_of(d.swizzle));
    unsigned row = span(d.swizzle);
    if (d.swizzle && major == K_MAJOR && d.start % row + 32 > row)
        die("WRONG DESCRIPTOR: %s: 32 bytes from byte %u of a row of %s reach beyond the %u bytes of the row",
            where(site), d.start % row, which, row);
}

// Where the 16-byte pieces of an operand lie, `extent` rows of A or columns of B by 16: K-major, 2 pieces for each;
// MN-major, extent / 8 pieces for each of the 16 k. The canonical layouts of PTX's matrix descriptors, in bytes:
//   K-major     8 rows are a pattern's row (16, 32, 64 or 128 bytes) apart, groups of 8 rows the stride offset; the
//               second piece follows the first or, without swizzle, is the leading offset away
//   MN-major    8 k are a pattern's row apart; groups of 8 k the stride offset, and pattern rows, of 8 to 64 elements,
//               the leading offset; without swizzle, the other way around
static void list_operand(std::vector<uint32_t> &pieces, const Descriptor &d, Major major, int extent) {
    const uint32_t row = span(d.swizzle), row_pieces = row / PIECE;
    if (major == K_MAJOR)
        for (uint32_t i = 0; i < (uint32_t)extent; i++)
            for (uint32_t j = 0; j < 2; j++)
                pieces.push_back(d.start + (i % 8) * row + (i / 8) * d.stride + j * (d.swizzle ? 16 : d.leading));
    else
        for (uint32_t k = 0; k < 16; k++)
            for (uint32_t i = 0; i < (uint32_t)extent / 8; i++)
                pieces.push_back(d.start + (i % row_pieces) * PIECE + (k % 8) * row +
                                 (i / row_pieces) * (d.swizzle ? d.leading : d.stride) +
                                 (k / 8) * (d.swizzle ? d.stride : d.leading));
    for (uint32_t &p : pieces) p = swizzled(p, d.swizzle);
}

std::vector<uint32_t> wgmma_pieces(uint64_t descriptor, Major major, int extent) {
    std::vector<uint32_t> pieces;
    list_operand(pieces, decode(descriptor), major, extent);
    return pieces;
}

static void read_operand(Worker &w, Async &a, uint64_t bits, Major major, int extent, const char *which, Site site,
                         std::vector<uint32_t> &pieces, std::vector<char> &bytes) {
    Descriptor d = decode(bits);
    check_descriptor(bits, d, major, which, site);
    list_operand(pieces, d, major, extent);
    bytes.resize(pieces.size() * PIECE);
    for (size_t i = 0; i < pieces.size(); i++) {
        if (pieces[i] >= DYNAMIC_ROOM)
            die("OUT OF BOUNDS: %s reads %s beyond the end of dynamic shared memory, in which operands must be here",
                where(site), which);
        check_read(w, a, pieces[i], site);
        const Loaded &loaded = a.loaded[pieces[i] / PIECE];
        if (loaded.site && loaded.swizzle != d.swizzle)
            die("WRONG SWIZZLE: %s reads %s with a swizzle of %u bytes, and the %s wrote it with %u", where(site),
                which, d.swizzle ? span(d.swizzle) : 0, where(a.sites[loaded.site]),
                loaded.swizzle ? span(loaded.swizzle) : 0);
        memcpy(&bytes[i * PIECE], shared_pointer(w, pieces[i]), PIECE);
    }
}

static float element(const std::vector<char> &bytes, Major major, int extent, int i, int k) {
    size_t piece = major == K_MAJOR ? (size_t)i * 2 + (size_t)k / 8 : (size_t)k * (size_t)extent / 8 + (size_t)i / 8;
    size_t at = piece * PIECE + (size_t)(major == K_MAJOR ? k % 8 : i % 8) * 2;
    uint16_t x;
    memcpy(&x, &bytes[at], sizeof x);
    return bits<float>((uint32_t)x << 16);
}

// Calls function(index, row, column) for the elements of a thread's part of D.
template <class Function>
static void for_each_result(int thread, int columns, Function function) {
    int warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4, column = (lane % 4) * 2;
    for (int i = 0; i < columns / 2; i++) function(i, row + ((i % 4) / 2) * 8, (i / 4) * 8 + column + i % 2);
}

static void execute(Worker &w, Async &a, WgmmaOperation &op) {
    const Matmul &m = op.matmul;
    float left[64][16], right[16][8];
    for (size_t i = 0; i < op.a_pieces.size(); i++)
        check_unchanged(w, a, op.a_pieces[i], &op.a_bytes[i * PIECE], op.site);
    for (size_t i = 0; i < op.b_pieces.size(); i++)
        check_unchanged(w, a, op.b_pieces[i], &op.b_bytes[i * PIECE], op.site);
    if (m.a_registers) {    // pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), as in mma_m16n8k16
        for (int t = 0; t < WARPGROUP; t++) {
            int warp = t / 32, lane = t % 32, row = warp * 16 + lane / 4, column = (lane % 4) * 2;
            for (int i = 0; i < 4; i++) {
                float *to = &left[row + (i % 2) * 8][column + (i / 2) * 8];
                to[0] = bits<float>(op.a[t][i] << 16);
                to[1] = bits<float>(op.a[t][i] & 0xFFFF0000u);
            }
        }
    } else {
        for (int i = 0; i < 64; i++)
            for (int k = 0; k < 16; k++) left[i][k] = element(op.a_bytes, m.a_major, 64, i, k);
    }
    std::vector<float> &values = op.accumulator->values;
    if (!m.accumulate) std::fill(values.begin(), values.end(), 0.0f);
    for (int n = 0; n < m.columns; n += 8) {
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) right[k][j] = element(op.b_bytes, m.b_major, m.columns, n + j, k);
        multiply_add(&values[(size_t)n], (size_t)m.columns, left, 64, right, w.settings.mma);
    }
    op.done = true;
}

// Executes a warpgroup's operations, which are in order, up to that one.
static void execute_until(Worker &w, Async &a, Warpgroup &g, const WgmmaOperation &last) {
    for (auto &op : g.operations) {
        if (!op->done) execute(w, a, *op);
        if (op.get() == &last) return;
    }
}

static void open_accumulator(Warpgroup &g, WgmmaOperation &op) {
    const Matmul &m = op.matmul;
    Accumulator *c = accumulator_at(g, 0, g.d[0], sizeof(float));
    for (unsigned t = 0; t < WARPGROUP; t++)
        if (accumulator_at(g, t, g.d[t], sizeof(float)) != c)
            die("MISMATCH: %s continues an accumulation in flight in some threads, and not in others", where(op.site));
    if (!c) {
        g.accumulators.emplace_back(new Accumulator());
        c = g.accumulators.back().get();
        c->columns = m.columns;
        c->values.resize((size_t)(64 * m.columns));
        for (int t = 0; t < WARPGROUP; t++) {
            c->d[t] = g.d[t];
            for_each_result(t, m.columns, [&](int i, int row, int column) {
                if (m.accumulate) c->values[(size_t)(row * m.columns + column)] = c->d[t][i];
            });
            fill(c->d[t], (size_t)m.columns / 2 * sizeof(float), POISON);
        }
    }
    c->group = op.group;
    c->site = op.site;
    op.accumulator = c;
}

// In the race check, the warpgroup's tensor core is a thread that reads the operands.
static void announce_wgmma(Worker &w, Warpgroup &g, const WgmmaOperation &op, unsigned number) {
    if (!race_check()) return;
    as_thread(g.unit, [&] {
        __tsan_acquire(&w.meetings->wgmma_issued[number]);
        for (uint32_t p : op.a_pieces) __tsan_read16(shared_pointer(w, p));
        for (uint32_t p : op.b_pieces) __tsan_read16(shared_pointer(w, p));
        __tsan_release(&w.meetings->wgmma_done[number][op.group % 16]);
    });
}

static void issue_wgmma(Worker &w, Async &a, Warpgroup &g, const Fiber &me, Site site) {
    std::unique_ptr<WgmmaOperation> op(new WgmmaOperation());
    const Matmul &m = op->matmul = g.matmul;
    op->site = site;
    op->group = g.commits;
    if (m.a_registers)
        for (int t = 0; t < WARPGROUP; t++) {
            op->a_registers[t] = g.a[t];
            memcpy(op->a[t], g.a[t], sizeof op->a[t]);
        }
    else read_operand(w, a, m.a, m.a_major, 64, "A", site, op->a_pieces, op->a_bytes);
    read_operand(w, a, m.b, m.b_major, m.columns, "B", site, op->b_pieces, op->b_bytes);
    open_accumulator(g, *op);
    announce_wgmma(w, g, *op, me.number / WARPGROUP);
    w.counts.wgmmas++;
    g.operations.push_back(std::move(op));
    if (w.settings.async == EARLY) execute_until(w, a, g, *g.operations.back());
}

static bool same_but_registers(const Matmul &x, const Matmul &y) {    // `a` is 0 if A is in registers
    return x.columns == y.columns && x.a == y.a && x.b == y.b && x.a_major == y.a_major && x.b_major == y.b_major &&
           x.accumulate == y.accumulate;
}

static const char *describe(const Matmul &m) {
    static const char *const MAJORS[] = {"K-major", "MN-major"};
    return print("N %d, A %s %016llx, B %s %016llx, scale-d %d", m.columns,
                 m.a_registers ? "in registers" : MAJORS[m.a_major], (unsigned long long)m.a, MAJORS[m.b_major],
                 (unsigned long long)m.b, m.accumulate);
}

void wgmma(const Matmul &m, Site site) {
    Worker &w = *worker;
    Fiber &me = self();
    {
        Unseen unseen;
        Async &a = async_of(w);
        AsyncThread &t = thread_of(a, me);
        Warpgroup &g = a.warpgroups[me.number / WARPGROUP];
        check_registers(w, g, t, me, m, site);
        if (race_check()) __tsan_release(&w.meetings->wgmma_issued[me.number / WARPGROUP]);
        bool last = warpgroup_meets(w, g, me, WGMMA, site);
        if (g.waiting == 1) {
            g.matmul = m;
            g.commits = t.commits;
        }
        if (!same_but_registers(g.matmul, m))
            die("MISMATCH: threads of a warpgroup call %s with different operands: %s; %s", where(site),
                describe(g.matmul), describe(m));
        if (g.commits != t.commits)
            die("MISMATCH: thread %u has committed %u groups of wgmma, and another of its warpgroup %u", me.number,
                t.commits, g.commits);
        g.d[me.number % WARPGROUP] = m.d;
        g.a[me.number % WARPGROUP] = m.a_registers;
        if (last) {
            issue_wgmma(w, a, g, me, site);
            warpgroup_goes_on(w, g, me);
        }
    }
    take_turns();
}

static void deliver(Accumulator &c, unsigned thread, Site site) {
    if (!is_filled(c.d[thread], (size_t)c.columns / 2 * sizeof(float), POISON))
        die("REGISTERS IN USE: accumulators of the %s were written before the wait at %s", where(c.site),
            line_of(site));
    for_each_result((int)thread, c.columns,
                    [&](int i, int row, int column) { c.d[thread][i] = c.values[(size_t)(row * c.columns + column)]; });
    c.claimed[thread] = true;
}

// The first thread that waits executes the matmuls of all four warps. Others run before that, while they are in flight.
void wgmma_wait_for(unsigned groups, const std::vector<float *> &results, Site site) {
    if (worker->settings.async != EARLY) take_turns();
    Unseen unseen;
    Worker &w = *worker;
    Fiber &me = self();
    Async &a = async_of(w);
    AsyncThread &t = thread_of(a, me);
    Warpgroup &g = a.warpgroups[me.number / WARPGROUP];
    const unsigned thread = me.number % WARPGROUP;
    execute_aligned(a, me, (int)groups, site);
    for (auto &op : g.operations) {
        if (op->group >= t.commits)
            die("MISSING COMMIT: %s does not cover the %s, which no wgmma_commit() follows", where(site),
                where(op->site));
        if (op->group + groups >= t.commits) break;
        execute_until(w, a, g, *op);
        if (op->matmul.a_registers && !op->waited[thread] &&
            memcmp(op->a_registers[thread], op->a[thread], sizeof op->a[thread]) != 0)
            die("REGISTERS IN USE: thread %u has changed registers of A between the %s and the wait at %s", me.number,
                where(op->site), line_of(site));
        op->waited[thread] = true;
    }
    for (float *d : results) {
        Accumulator *c = accumulator_at(g, thread, d, sizeof(float));
        if (!c) continue;
        if (c->group + groups >= t.commits)
            die("STILL IN FLIGHT: wgmma_wait<%u> at %s names accumulators that the %s may still be writing", groups,
                line_of(site), where(c->site));
        deliver(*c, thread, site);
    }
    if (race_check() && t.commits > groups)
        __tsan_acquire(&w.meetings->wgmma_done[me.number / WARPGROUP][(t.commits - groups - 1) % 16]);
    while (!g.operations.empty() && g.operations.front()->waited.all()) g.operations.pop_front();
    g.accumulators.erase(std::remove_if(g.accumulators.begin(), g.accumulators.end(),
                                        [](const std::unique_ptr<Accumulator> &c) { return c->claimed.all(); }),
                         g.accumulators.end());
}

// ---- when asynchronous work takes place

static bool is_open(const std::unique_ptr<WgmmaOperation> &op) {
    return !op->done;
}

bool async_step(Worker &w, bool laggards_too) {
    Unseen unseen;
    Async &a = *w.async;
    const auto may_run = [&](unsigned thread) { return laggards_too || !is_laggard(w, thread); };
    std::vector<size_t> copies;
    for (size_t i = 0; i < a.copies.size(); i++)
        if (may_run(a.copies[i]->thread)) copies.push_back(i);
    std::vector<std::pair<Warpgroup *, WgmmaOperation *>> next;    // the first of each warpgroup
    for (unsigned i = 0; i < WARPS / 4; i++) {
        auto &all = a.warpgroups[i].operations;
        const auto op = std::find_if(all.begin(), all.end(), is_open);
        if (op != all.end() && may_run(i * WARPGROUP)) next.push_back({&a.warpgroups[i], op->get()});
    }
    const size_t choices = copies.size() + next.size();
    if (choices == 0) return false;
    const size_t chosen = next_random(w.random) % choices;
    if (chosen < copies.size()) step_copy(w, a, copies[chosen]);
    else execute_until(w, a, *next[chosen - copies.size()].first, *next[chosen - copies.size()].second);
    return true;
}

bool async_has_work(const Worker &w) {
    for (const Warpgroup &g : w.async->warpgroups)
        if (std::any_of(g.operations.begin(), g.operations.end(), is_open)) return true;
    return !w.async->copies.empty();
}

bool async_lets_others_run(Worker &w) {
    return w.settings.async == LAST || (w.settings.async == AT_RANDOM && next_random(w.random) % 2);
}

void async_turn(Worker &w) {
    if (w.settings.async != AT_RANDOM) return;
    uint64_t random = next_random(w.random);
    if (random % w.async->rarely == 0) async_step(w, false);
    if (random >> 32 & 0xFF) return;
    w.async->rarely = 1u << (((random >> 40) % 4) * 4);    // for a while, soon, or only when somebody waits
}

void async_end_block(Worker &w) {
    Unseen unseen;
    Async &a = *w.async;
    for (const Warpgroup &g : a.warpgroups)
        if (!g.operations.empty())
            die("MISSING WAIT: not all threads have waited for the %s", where(g.operations.front()->site));
    for (const AsyncThread &t : a.threads) {
        if (t.bulk_uncommitted) die("MISSING COMMIT: no bulk_commit() follows the %s", where(t.bulk_site));
        if (t.bulk_waited < t.bulk_needed)
            die("MISSING WAIT: a block ends, and with it its shared memory, without a bulk_wait for the %s",
                where(t.bulk_site));
    }
    check_all_lanes_executed(w, a);
    for (const Barrier &b : a.barriers)
        if (b.had_bytes && !b.observed) die("MISSING WAIT: nobody has waited for the last loads of %s", describe(b));
    while (!a.copies.empty()) {
        if (a.copies[0]->kind == LOAD)
            die("MISSING WAIT: a block ends while the %s is in flight", where(a.copies[0]->site));
        step_copy(w, a, 0);
    }
    for (AsyncThread &t : a.threads) {
        if (t.writer) as_thread(t.writer, [&] { __tsan_release((void *)w.launch); });    // before the kernel's end
        end_context(w, t.copier);
        end_context(w, t.writer);
    }
    for (const Warpgroup &g : a.warpgroups) end_context(w, g.unit);
    w.async = NULL;
}

// ---- named barriers

static NamedBarrier &find_named_barrier(const Worker &w, Async &a, int id, int threads, Site site) {
    const unsigned me = self().number;
    if (id < 1 || id >= NAMED_BARRIERS)
        die("WRONG BARRIER: %s names barrier %d; 1 to 15 exist, and 0 is __syncthreads()'s", where(site), id);
    if (threads < 32 || threads % 32 != 0 || threads > w.threads)
        die("WRONG COUNT: %s for %d threads, in a block of %d", where(site), threads, w.threads);
    NamedBarrier &b = a.named[id];
    if (b.count == 0) {
        b.threads = threads;
        b.site = site;
    }
    if (b.threads != threads)
        die("MISMATCH: %s expects %d threads at barrier %d, and %s expects %d", where(site), threads, id,
            line_of(b.site), b.threads);
    if (b.arrived[me])
        die("ARRIVED TWICE: %s: thread %u has already arrived at barrier %d, which still lacks %d threads", where(site),
            me, id, b.threads - b.count);
    return b;
}

static void complete_named_barrier(Worker &w, NamedBarrier &b, int id, Site site) {
    for (int warp = 0; warp < (w.threads + 31) / 32; warp++) {
        unsigned lanes = 0;
        for (int l = 0; l < LANES; l++) lanes += b.arrived[(size_t)(warp * 32 + l)];
        if (lanes != 0 && lanes != 32)
            die("MISMATCH: %s completes barrier %d with %u of the 32 threads of warp %d", where(site), id, lanes, warp);
    }
    wake(w, b.waiting);
    b.arrived.reset();
    b.count = 0;
    b.phase++;
    w.counts.barriers++;
}

void named_barrier(int id, int threads, bool wait, Site site) {
    Worker &w = *worker;
    Fiber &me = self();
    char *met;
    {
        Unseen unseen;
        Async &a = async_of(w);
        NamedBarrier &b = find_named_barrier(w, a, id, threads, site);
        execute_aligned(a, me, id, site);
        met = &w.meetings->named[id][b.phase % 2];
        if (race_check()) __tsan_release(met);
        b.arrived[me.number] = true;
        thread_of(a, me).named = id;
        if (wait) {
            b.waiting.push_back(me.number);
            wait_as(w, me, NAMED_BARRIER_SYNC, site);
        }
        if (++b.count == b.threads) complete_named_barrier(w, b, id, site);
    }
    if (!wait) return;
    take_turns();
    if (race_check()) __tsan_acquire(met);
}

// ---- setmaxnreg: the registers of a block are divided anew among its warpgroups

// Grants warpgroup i what it wants, if there is enough.
static void grant_registers_to(Worker &w, Async &a, int i) {
    Warpgroup &g = a.warpgroups[i];
    int more = (g.wanted - g.registers) * WARPGROUP;
    if (!g.wanted || more > a.pool) return;
    a.pool -= more;
    g.registers = g.wanted;
    g.wanted = 0;
    for (int t = 0; t < WARPGROUP; t++) set_ready(w, (unsigned)(i * WARPGROUP + t));
}

// `latest` has just said what it wants. What it releases, others may be waiting for.
static void grant_registers(Worker &w, Async &a, int latest) {
    grant_registers_to(w, a, latest);
    for (int i = 0; i < w.threads / WARPGROUP; i++) grant_registers_to(w, a, i);
}

void setmaxnreg(int registers, bool increase, Site site) {
    Worker &w = *worker;
    Fiber &me = self();
    {
        Unseen unseen;
        Async &a = async_of(w);
        Warpgroup &g = a.warpgroups[me.number / WARPGROUP];
        if (increase ? registers < g.registers : registers > g.registers)
            die("WRONG COUNT: %s, to %d registers: the warpgroup's threads have %d", where(site), registers,
                g.registers);
        if (warpgroup_meets(w, g, me, SETMAXNREG, site)) {
            g.waiting = 0;
            g.wanted = registers;
            grant_registers(w, a, (int)(me.number / WARPGROUP));
        }
    }
    take_turns();
}

// ---- counters in global memory, by which a block waits for others

static bool reached(const AsyncThread &t) {
    return __atomic_load_n(t.counter, __ATOMIC_ACQUIRE) == t.counter_value;
}

static bool waits_for_counter(const Worker &w, size_t number) {
    const Fiber &f = w.fibers[number];
    return f.wait.kind == COUNTER && !(w.ready[number / 64] >> number % 64 & 1);
}

bool async_waits_for_counter(const Worker &w) {
    return w.async->counter_waiters > 0;
}

bool async_counter_reached(const Worker &w) {
    for (size_t i = 0; i < (size_t)w.threads; i++)
        if (waits_for_counter(w, i) && reached(w.async->threads[i])) return true;
    return false;
}

void async_wake_counters(Worker &w) {
    for (size_t i = 0; i < (size_t)w.threads; i++)
        if (waits_for_counter(w, i) && reached(w.async->threads[i])) set_ready(w, (unsigned)i);
}

static void check_counter(const unsigned *counter, Site site) {
    if ((uintptr_t)counter % sizeof *counter != 0) misaligned(counter, site);
    if (!is_device(counter, sizeof *counter))
        die("OUT OF BOUNDS: %s: the counter at %p is not in device memory", where(site), (const void *)counter);
}

void wait_for_counter(const unsigned *counter, unsigned value, Site site) {
    Worker &w = *worker;
    Fiber &me = self();
    check_counter(counter, site);
    Async *a;
    {
        Unseen unseen;
        a = &async_of(w);
    }
    AsyncThread &t = a->threads[me.number];
    t.counter = counter;
    t.counter_value = value;
    a->counter_waiters++;
    while (!reached(t)) {
        wait_as(w, me, COUNTER, site);
        take_turns();
    }
    a->counter_waiters--;
    me.wait.kind = NOTHING;
    if (race_check()) __tsan_acquire((void *)counter);
}

// A block that waits for a counter, writes, and then advances the counter, lets the next one read what it has written.
static void check_finished(const Worker &w, const unsigned *counter, Site site) {
    if (!w.async) return;
    for (const UnfinishedStore &s : thread_of(*w.async, self()).unfinished)
        if (s.counter == counter)
            die("MISSING WAIT: %s passes the turn on, and no bulk_wait has covered the %s of this turn", where(site),
                where(s.site));
}

void add_to_counter(unsigned *counter, unsigned n, Site site) {
    check_counter(counter, site);
    check_finished(*worker, counter, site);
    if (race_check()) __tsan_release(counter);
    __atomic_fetch_add(counter, n, __ATOMIC_ACQ_REL);
    give_way();
}

// ---- messages

const char *async_describe(const Worker &w, const Fiber &f) {
    const AsyncThread &t = w.async->threads[f.number];
    const Site &s = f.wait.site;
    const Warpgroup &g = w.async->warpgroups[f.number / WARPGROUP];
    const NamedBarrier &b = w.async->named[t.named];
    switch (f.wait.kind) {
    case MBARRIER_WAIT:
        return print("wait in mbarrier_wait(parity %u) at %s (%s)", t.parity, line_of(s), describe(*t.barrier));
    case NAMED_BARRIER_SYNC:
        return print("wait in named_barrier_sync(%d, %d) at %s (%d have arrived)", t.named, b.threads, line_of(s),
                     b.count);
    case WGMMA: return print("wait in %s (%d of 128 have arrived)", where(s), g.waiting);
    case SETMAXNREG:
        if (!g.wanted) return print("wait in setmaxnreg at %s (%d of 128 have arrived)", line_of(s), g.waiting);
        return print(
            "wait in setmaxnreg_inc<%d> at %s (over the budget: it needs %d registers, and %d of the block's %d are free)",
            g.wanted, line_of(s), (g.wanted - g.registers) * WARPGROUP, w.async->pool,
            registers_of_thread(w) * w.threads);
    default:
        return print("wait in wait_for_counter(%p, %u) at %s (it is %u)", (const void *)t.counter, t.counter_value,
                     line_of(s), *t.counter);
    }
}

}

// A block while it runs: its threads, what they wait for, its memory. Shared by blocks.cpp and hopper.cpp, and included
// nowhere else.
#ifndef CUDA_ON_CPU_BLOCK_H
#define CUDA_ON_CPU_BLOCK_H

#include <deque>
#include <string>
#include <vector>

#include "engine.h"

namespace cuda_on_cpu {

enum Kind {
    NOTHING,
    EXITED,
    BARRIER,
    SYNCWARP,
    SHUFFLE,
    LDMATRIX,
    STMATRIX,
    MMA,
    // Waits that hopper.cpp describes.
    MBARRIER_WAIT,
    NAMED_BARRIER_SYNC,
    WGMMA,
    SETMAXNREG,
    COUNTER
};
static const unsigned ALL_LANES = 0xFFFFFFFFu;
static const int LANES = 32;

struct Wait {
    Kind kind;
    Site site;
};

enum { WARPGROUP = 128, PENDING_COPIES = 512 };

struct PendingCopy {
    void *shared;
    const void *global;
    bool valid;
    unsigned group;    // the number of commits before it
    Site site;
};

struct Warp;

struct Fiber {
    Position position;    // first, so that `position` leads to the fiber
    void *stack;          // where it stopped
    Warp *warp;
    unsigned number, lane;       // of the thread in its block, and in its warp
    Wait wait;                   // what it waits for, or waited for last
    unsigned commits, copies;    // of cp.async: commits so far, copies so far
    // Those of pending[i % PENDING_COPIES], oldest <= i < newest, have not taken place yet.
    unsigned oldest, newest;
    PendingCopy *pending;
    void *context, *copier;    // of the thread and of its asynchronous copies, in the race check
    void *fake_stack;          // AddressSanitizer's
};

// Treats the lanes' n-th copies as one instruction of the warp, to count its bank conflicts.
enum { COPIES_OF_WARP = 128 };

struct CopyOfWarp {
    unsigned number, lanes;    // n + 1; the lanes that have issued it
    Site site;
    const void *to[32];
};

struct Warp {
    unsigned waiting, absent;          // lanes that wait in a warp operation; lanes that have exited or never existed
    Wait first;                        // what the first waiting lane waits for
    uint64_t value[32], result[32];    // of a shuffle
    int argument[32];
    const void *row[32];    // of ldmatrix
    uint32_t a[4][32], b[2][32], r[4][32];
    float top[32][2], bottom[32][2];    // mma's d[0], d[1] and d[2], d[3]: as floats, rows 0-7 and 8-15 of 8 columns
    unsigned phase;                     // how often the lanes have met
    CopyOfWarp copies[COPIES_OF_WARP];
};

// Addresses that represent synchronization between threads in the race check. A barrier or warp operation has two, used
// alternately: what a fast thread does before the next meeting must not appear ordered before a slow thread that has
// not yet left the last one.
enum { COPY_GROUPS = 16 };
struct Meetings {
    char barrier[2], warps[WARPS][2];
    char named[16][2], wgmma_issued[WARPS / 4], wgmma_done[WARPS / 4][16];
    char bulk_issued[BLOCK_THREADS], bulk_read[BLOCK_THREADS][16], bulk_written[BLOCK_THREADS][16];
    char issued[BLOCK_THREADS], copied[BLOCK_THREADS][COPY_GROUPS];
};

enum { ARRAYS_IN_BLOCK = 64, SITES = 1024 };

struct ArrayInBlock {
    char *memory;
    size_t bytes;
    const SharedArray *array;
};

// The race check's threads of a launch.
struct Contexts {
    Lock lock;
    std::vector<void *> spare;    // of earlier launches of the stream
    std::deque<void *> ended;
};
struct Worker {
    const Parameters *launch;
    Contexts *contexts;
    uint3 block;
    int threads, alive, current;
    int straggler;    // the thread that comes last, or one of the warpgroup that does
    uint64_t ready[BLOCK_THREADS / 64];
    uint64_t random;
    Settings settings;
    Fiber fibers[BLOCK_THREADS];
    Warp warps[WARPS];
    bool suspended;    // until a counter in global memory has the value that a thread of the block waits for,
    bool gave_way;     // or just for others to run
    void *home;        // the stack from which the block's fibers were entered
    void *home_context, *home_fake_stack;
    const void *home_bottom;
    size_t home_bytes;

    int arrived;    // at the barrier
    Wait barrier;
    unsigned barrier_phase;

    char *stacks;
    int stacks_ready;

    Meetings *meetings;
    char *statics, *statics_end, *dynamic, *dynamic_end;
    size_t statics_used, statics_asked;
    ArrayInBlock arrays[ARRAYS_IN_BLOCK];    // of this block, in the order of their first use
    int array_count;

    PendingCopy pending[BLOCK_THREADS][PENDING_COPIES];
    struct Async *async, *async_kept;    // hopper.cpp's state of this block, NULL if not used yet; of earlier blocks
    Counts counts;
    // A hash table; once it is full, further conflicts are counted without their line.
    struct {
        Site site;
        uint64_t conflicts;
    } sites[SITES];
};
extern __thread Worker *worker CUDA_ON_CPU_TLS;    // of the block that runs on this CPU thread

static inline bool is_laggard(const Worker &w, unsigned thread) {
    return w.settings.order == LAGGARDS && (int)thread / WARPGROUP == w.straggler / WARPGROUP;
}

static inline Fiber &self() {
    return *(Fiber *)position;
}

// ---- blocks.cpp

bool same_site(Site a, Site b);
const char *who_waits_where(int from, int to);    // "24 threads wait in __syncthreads at f.cu:6: 0-23"
void *new_context(Worker &w);                     // a thread of the race check
void end_context(Worker &w, void *context);       // NULL is allowed
void set_waiting(Worker &w, unsigned number);
void set_ready(Worker &w, unsigned number);
// Lets other threads run until this one is ready and has its turn.
void take_turns();
// Under CUDA_ON_CPU_SUSPEND=often, lets other blocks run.
void give_way();
char *stack_top(const Worker &w, unsigned number);
bool is_shared(const Worker &w, const void *p, size_t bytes);
const char *describe_shared(const Worker &w, const void *p);
// The offset of an address in shared memory, as the hardware's instructions use it: dynamic shared memory ends at
// DYNAMIC_ROOM, shared arrays follow. Its lowest bits are those of the address.
static const size_t STATICS_ROOM = 128 * 1024, DYNAMIC_ROOM = 232 * 1024;
size_t shared_offset(const Worker &w, const void *p);
char *shared_pointer(const Worker &w, size_t offset);
// d (rows, 8) += a (rows, 16) · b (16, 8), bf16 factors as floats. Rows of d are `step` floats apart.
void multiply_add(float *d, size_t step, const float (*a)[16], int rows, const float (*b)[8], MmaSums sums);

// ---- hopper.cpp

void async_end_block(Worker &w);    // reports what the block has not waited for
void async_turn(Worker &w);         // some asynchronous work takes place, at random
// A piece of asynchronous work, of the laggards' too or only of others, takes place; false if there is none.
bool async_step(Worker &w, bool laggards_too);
bool async_has_work(const Worker &w);
bool async_lets_others_run(Worker &w);    // rather than do that work at once
void async_wake_counters(Worker &w);
bool async_waits_for_counter(const Worker &w);
bool async_counter_reached(const Worker &w);
const char *async_describe(const Worker &w, const Fiber &thread);    // what it waits for
void async_generic_store(const void *p, size_t bytes, unsigned thread, Site site);

}
#endif

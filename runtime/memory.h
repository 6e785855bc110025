// Memory is planned, printed, checked against what is available, and allocated once. A plan can also describe device
// memory, which the program then allocates itself.
//
//     MemoryPlan plan = {0};
//     memory_add(&plan, "gradients", (void **)&model->grads, floats * sizeof(float));
//     memory_print(&plan, "memory", memory_available());
//     memory_take(&plan);
#ifndef RUNTIME_MEMORY_H
#define RUNTIME_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MEMORY_ROWS = 64 };

typedef struct {
    struct {
        const char *kind;    // rows of the same kind are printed as one line
        void **where;
        size_t bytes;
    } rows[MEMORY_ROWS];
    size_t count, total;
    const char *remedy;    // the last line of an error: how the program's user can need less; or NULL
    void *block;
} MemoryPlan;

// Plans a buffer. After memory_take(), *where points to it: zeroed, aligned to 256 bytes.
void memory_add(MemoryPlan *plan, const char *kind, void **where, size_t bytes);

// Changes the size of a planned buffer.
void memory_resize(MemoryPlan *plan, void **where, size_t bytes);

// Prints the title, one line per kind, and the total next to the free memory, unless that is UINT64_MAX.
void memory_print(const MemoryPlan *plan, const char *title, uint64_t free_bytes);

// Fails with EXIT_RESOURCE unless the plans of this machine's ranks, all of this size, fit into its available memory.
void memory_check(const MemoryPlan *plan, int ranks);

// Allocates all buffers in a single mapping. Fails with EXIT_RESOURCE if the system refuses it.
void memory_take(MemoryPlan *plan);
void memory_release(MemoryPlan *plan);

// Returns the bytes that this process can still allocate: the machine's available memory, or less if a control group
// limits it. UINT64_MAX if nothing says so, as without /proc.
uint64_t memory_available(void);

// The same, with `root` prepended to /proc and /sys, for tests.
uint64_t memory_available_under(const char *root);

#ifdef __cplusplus
}
#endif
#endif

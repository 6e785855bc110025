// Memory, planned, printed, checked against what is free, and taken once. A plan may also be of a device's, which its
// program takes itself.
//
//     MemoryPlan plan = {0};
//     memory_add(&plan, "gradients", (void **)&model->grads, floats * sizeof(float));
//     memory_print(&plan);
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
        const char *kind;    // rows of one kind are printed as one
        void **where;
        size_t bytes;
    } rows[MEMORY_ROWS];
    size_t count, total;
    void *block;
} MemoryPlan;

// Adds a piece, which *where points to after memory_take(): zeroed, aligned to 256 bytes.
void memory_add(MemoryPlan *plan, const char *kind, void **where, size_t bytes);

// A title, one line a kind, and the sum beside what is free.
void memory_print(const MemoryPlan *plan, const char *title, uint64_t free_bytes);

// Ends with EXIT_RESOURCE when `processes` of this size, together on this machine, do not fit into what is free.
void memory_check(const MemoryPlan *plan, int processes);

// One mapping for all pieces. Ends with EXIT_RESOURCE where the system refuses it.
void memory_take(MemoryPlan *plan);
void memory_release(MemoryPlan *plan);

// Bytes that this process can still take: what the machine has available, or less where a control group says so.
uint64_t memory_available(void);

// The same, with this folder in front of /proc and /sys: for tests.
uint64_t memory_available_under(const char *root);

#ifdef __cplusplus
}
#endif
#endif

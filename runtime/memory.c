#define _GNU_SOURCE
#include "runtime/memory.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime/cgroup.h"
#include "runtime/error.h"
#include "runtime/human.h"

static size_t rounded(size_t bytes) {
    return ((bytes + 255) / 256) * 256;
}

// The bytes of all buffers, or SIZE_MAX if they are too many for a size_t. A wrapped sum could pass for a small one.
static size_t total_of(const MemoryPlan *plan) {
    size_t total = 0;
    for (size_t i = 0; i < plan->count; i++) {
        if (plan->rows[i].bytes > SIZE_MAX / 2 || total > SIZE_MAX / 2) return SIZE_MAX;
        total += rounded(plan->rows[i].bytes);
    }
    return total;
}

void memory_add(MemoryPlan *plan, const char *kind, void **where, size_t bytes) {
    if (plan->count == MEMORY_ROWS)
        fail(EXIT_RESOURCE, "memory plan: more than %d buffers; raise MEMORY_ROWS.", MEMORY_ROWS);
    plan->rows[plan->count].kind = kind;
    plan->rows[plan->count].where = where;
    plan->rows[plan->count++].bytes = bytes;
    plan->total = total_of(plan);
}

void memory_resize(MemoryPlan *plan, void **where, size_t bytes) {
    for (size_t i = 0; i < plan->count; i++)
        if (plan->rows[i].where == where) plan->rows[i].bytes = bytes;
    plan->total = total_of(plan);
}

void memory_print(const MemoryPlan *plan, const char *title, uint64_t free_bytes) {
    printf("%s\n", title);
    for (size_t i = 0; i < plan->count; i++) {
        size_t bytes = 0;
        int first = 1;
        for (size_t j = 0; j < plan->count; j++) {
            if (strcmp(plan->rows[i].kind, plan->rows[j].kind) != 0) continue;
            if (j < i) first = 0;
            bytes += plan->rows[j].bytes;
        }
        if (first && bytes) printf("  %-38s %12s\n", plan->rows[i].kind, human_bytes((double)bytes).text);
    }
    printf("  %-38s %12s", "total", human_bytes((double)plan->total).text);
    if (free_bytes < UINT64_MAX) printf(" of %s free", human_bytes((double)free_bytes).text);
    printf("\n");
}

// The bytes that this control group leaves; UINT64_MAX without a limit.
static uint64_t group_leaves(const char *folder, int version) {
    bool one = version == 1;
    uint64_t limit = cgroup_number(folder, one ? "memory.limit_in_bytes" : "memory.max", "", UINT64_MAX);
    if (limit == UINT64_MAX) return limit;    // "max" is not a number and means no limit
    uint64_t used = cgroup_number(folder, one ? "memory.usage_in_bytes" : "memory.current", "", 0);
    // File pages, without the tmpfs pages among them, are given back.
    uint64_t cache = cgroup_number(folder, "memory.stat", one ? "total_cache " : "file ", 0);
    uint64_t shared = cgroup_number(folder, "memory.stat", one ? "total_shmem " : "shmem ", 0);
    uint64_t reclaimable = cache > shared ? cache - shared : 0;
    used = used > reclaimable ? used - reclaimable : 0;
    return limit > used ? limit - used : 0;
}

uint64_t memory_available_under(const char *root) {
    char proc[PATH_MAX];
    snprintf(proc, sizeof proc, "%s/proc", root);
    uint64_t kilobytes = cgroup_number(proc, "meminfo", "MemAvailable:", UINT64_MAX);
    uint64_t bytes = kilobytes < UINT64_MAX / 1024 ? kilobytes * 1024 : UINT64_MAX;
    uint64_t least = cgroup_least(root, "memory", group_leaves);
    return least < bytes ? least : bytes;
}

uint64_t memory_available(void) {
    return memory_available_under("");
}

void memory_check(const MemoryPlan *plan, int ranks) {
    double needed = (double)plan->total * ranks, available = (double)memory_available();
    if (needed > available)
        fail(EXIT_RESOURCE, "this run needs %s of memory%s, but only %s is available.%s%s", human_bytes(needed).text,
             ranks > 1 ? " for the ranks on this machine" : "", human_bytes(available).text, plan->remedy ? "\n  " : "",
             plan->remedy ? plan->remedy : "");
}

void memory_take(MemoryPlan *plan) {
    plan->block = mmap(NULL, plan->total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (plan->block == MAP_FAILED)
        fail(EXIT_RESOURCE, "cannot allocate %s of memory.%s%s", human_bytes((double)plan->total).text,
             plan->remedy ? "\n  " : "", plan->remedy ? plan->remedy : "");
    madvise(plan->block, plan->total, MADV_HUGEPAGE);    // only an optimization, so failure does not matter
    size_t at = 0;
    for (size_t i = 0; i < plan->count; i++) {
        *plan->rows[i].where = (char *)plan->block + at;
        at += rounded(plan->rows[i].bytes);
    }
}

void memory_release(MemoryPlan *plan) {
    if (plan->block) munmap(plan->block, plan->total);
    for (size_t i = 0; i < plan->count; i++) *plan->rows[i].where = NULL;
    *plan = (MemoryPlan){0};
}

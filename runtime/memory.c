#define _GNU_SOURCE
#include "runtime/memory.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime/error.h"
#include "runtime/human.h"

static size_t rounded(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

void memory_add(MemoryPlan *plan, const char *kind, void **where, size_t bytes) {
    if (plan->count == MEMORY_ROWS) fail(EXIT_RESOURCE, "memory plan: more than %d pieces; raise MEMORY_ROWS.", MEMORY_ROWS);
    plan->rows[plan->count].kind = kind;
    plan->rows[plan->count].where = where;
    plan->rows[plan->count++].bytes = bytes;
    plan->total += rounded(bytes);
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
    printf("  %-38s %12s of %s free\n", "in all", human_bytes((double)plan->total).text, human_bytes((double)free_bytes).text);
}

static uint64_t number_in(const char *path, const char *key, uint64_t fallback) {
    FILE *file = fopen(path, "r");
    char line[256];
    uint64_t value = fallback;
    if (!file) return fallback;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, key, strlen(key)) != 0) continue;
        char *end;
        unsigned long long number = strtoull(line + strlen(key), &end, 10);
        if (end != line + strlen(key)) value = number;
        break;
    }
    fclose(file);
    return value;
}

// What the control group of this path leaves, UINT64_MAX for no limit.
static uint64_t group_leaves(const char *group) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", group);
    uint64_t limit = number_in(path, "", UINT64_MAX);          // "max" is no number: no limit
    if (limit == UINT64_MAX) return limit;
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.current", group);
    uint64_t used = number_in(path, "", 0);
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.stat", group);
    uint64_t cache = number_in(path, "file ", 0);              // given back under pressure
    used = used > cache ? used - cache : 0;
    return limit > used ? limit - used : 0;
}

uint64_t memory_available(void) {
    uint64_t least = number_in("/proc/meminfo", "MemAvailable:", UINT64_MAX / 1024) * 1024;
    char line[PATH_MAX] = "";
    FILE *file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file) && strncmp(line, "0::", 3) != 0) {}
    if (file) fclose(file);
    char *group = strncmp(line, "0::", 3) == 0 ? line + 3 : line;
    group[strcspn(group, "\n")] = 0;
    if (!strcmp(group, "/")) group[0] = 0;
    for (;;) {                                                 // this process's group and all above it
        uint64_t left = group_leaves(group);
        if (left < least) least = left;
        char *slash = strrchr(group, '/');
        if (!slash) return least;
        *slash = 0;
    }
}

void memory_check(const MemoryPlan *plan, int processes) {
    uint64_t available = memory_available();
    if ((double)plan->total * processes > (double)available)
        fail(EXIT_RESOURCE, "this run needs %s of memory%s, and %s is free.\n"
             "  A smaller --batch or --seq-len needs less for activations, a smaller --model less for everything.",
             human_bytes((double)plan->total * processes).text, processes > 1 ? " for its processes on this machine" : "",
             human_bytes((double)available).text);
}

void memory_take(MemoryPlan *plan) {
    plan->block = mmap(NULL, plan->total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (plan->block == MAP_FAILED)
        fail(EXIT_RESOURCE, "the system refuses %s of memory. A smaller --batch, --seq-len or --model needs less.",
             human_bytes((double)plan->total).text);
    madvise(plan->block, plan->total, MADV_HUGEPAGE);      // large pages where there are some; no matter if not
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

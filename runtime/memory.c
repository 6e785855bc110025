#define _GNU_SOURCE
#include "runtime/memory.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

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

// Returns the number that follows `key` at the start of a line, or the fallback.
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

// Where each version of Linux control groups keeps its files, relative to /sys/fs/cgroup/.
typedef struct {
    const char *controller;               // in /proc/self/cgroup: "" for the single hierarchy of version 2
    const char *folder, *limit, *used;    // file names
    const char *cache, *shared;           // lines of memory.stat: file pages, and the tmpfs pages among them
} GroupVersion;

static const GroupVersion group_versions[] = {
    {"", "", "memory.max", "memory.current", "file ", "shmem "},
    {"memory", "/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache ", "total_shmem "},
};

// The bytes that this control group leaves; UINT64_MAX without a limit.
static uint64_t group_leaves(const char *root, const GroupVersion *version, const char *group) {
    char folder[PATH_MAX], path[2 * PATH_MAX];
    snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s%s", root, version->folder, group);
    snprintf(path, sizeof path, "%s/%s", folder, version->limit);
    uint64_t limit = number_in(path, "", UINT64_MAX);    // "max" is not a number and means no limit
    if (limit == UINT64_MAX) return limit;
    snprintf(path, sizeof path, "%s/%s", folder, version->used);
    uint64_t used = number_in(path, "", 0);
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    uint64_t cache = number_in(path, version->cache, 0), shared = number_in(path, version->shared, 0);
    uint64_t reclaimable = cache > shared ? cache - shared : 0;
    used = used > reclaimable ? used - reclaimable : 0;
    return limit > used ? limit - used : 0;
}

// The least that this group and its ancestors leave. Truncates `group` in place. In a container, the path may be the
// host's, which is not visible there; the container's own group then appears as the root.
static uint64_t groups_leave(const char *root, const GroupVersion *version, char *group) {
    uint64_t least = UINT64_MAX;
    if (!strcmp(group, "/")) group[0] = 0;
    for (;;) {
        uint64_t left = group_leaves(root, version, group);
        if (left < least) least = left;
        char *slash = strrchr(group, '/');
        if (!slash) return least;
        *slash = 0;
    }
}

// Is `name` in the comma-separated list? An empty name matches an empty list.
static bool listed(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *at = list;; at++) {
        size_t word = strcspn(at, ",");
        if (word == length && strncmp(at, name, length) == 0) return true;
        at += word;
        if (!*at) return false;
    }
}

uint64_t memory_available_under(const char *root) {
    char path[PATH_MAX], line[PATH_MAX];
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    uint64_t kilobytes = number_in(path, "MemAvailable:", UINT64_MAX);
    uint64_t least = kilobytes < UINT64_MAX / 1024 ? kilobytes * 1024 : UINT64_MAX;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {    // "4:memory:/a/b" in version 1, "0::/a/b" in version 2
        char *rest = line, *number = strsep(&rest, ":"), *controllers = strsep(&rest, ":");
        if (!number || !controllers || !rest) continue;
        rest[strcspn(rest, "\n")] = 0;
        for (size_t i = 0; i < sizeof group_versions / sizeof *group_versions; i++) {
            if (!listed(controllers, group_versions[i].controller)) continue;
            uint64_t left = groups_leave(root, &group_versions[i], rest);
            if (left < least) least = left;
        }
    }
    if (file) fclose(file);
    return least;
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

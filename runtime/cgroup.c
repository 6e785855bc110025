#define _GNU_SOURCE
#include "runtime/cgroup.h"

#include <limits.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/file.h"
#include "runtime/spelling.h"

uint64_t cgroup_number(const char *folder, const char *name, const char *key, uint64_t fallback) {
    char path[2 * PATH_MAX], line[256];
    uint64_t value = fallback;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = file_open_system(path);
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

// The least of this group and its ancestors. In a container, the path may be the host's, which is not visible there;
// the container's own group then appears as the root.
static uint64_t least_above(const char *base, const char *group, int version,
                            uint64_t (*limit)(const char *folder, int version)) {
    char folder[2 * PATH_MAX];
    uint64_t least = UINT64_MAX;
    size_t start = (size_t)snprintf(folder, sizeof folder, "%s", base);
    if (strcmp(group, "/") != 0) snprintf(folder + start, sizeof folder - start, "%s", group);
    for (;;) {
        uint64_t here = limit(folder, version);
        if (here < least) least = here;
        char *slash = strrchr(folder + start, '/');
        if (!slash) return least;
        *slash = 0;
    }
}

uint64_t cgroup_least(const char *root, const char *controller, uint64_t (*limit)(const char *folder, int version)) {
    char path[PATH_MAX], line[PATH_MAX];
    uint64_t least = UINT64_MAX;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = file_open_system(path);
    while (file && fgets(line, sizeof line, file)) {    // "4:memory:/a/b" in version 1, "0::/a/b" in version 2
        char *rest = line, *number = strsep(&rest, ":"), *controllers = strsep(&rest, ":");
        if (!number || !controllers || !rest) continue;
        rest[strcspn(rest, "\n")] = 0;
        int version = controllers[0] ? 1 : 2;
        if (version == 1 && word_place(controllers, ',', controller) < 0) continue;
        // The folder of several controllers has all their names, and a link for each, which a container may lack.
        for (int i = 0; i < version % 2 + 1; i++) {
            const char *name = i ? controllers : controller;
            snprintf(path, sizeof path, "%s/sys/fs/cgroup%s%s", root, version == 1 ? "/" : "",
                     version == 1 ? name : "");
            uint64_t found = least_above(path, rest, version, limit);
            if (found < least) least = found;
        }
    }
    if (file) fclose(file);
    return least;
}

// Version 2: "150000 100000" microseconds in each period, or "max 100000". Version 1: two files, with -1 for no quota.
static uint64_t cores_of(const char *folder, int version) {
    uint64_t quota = cgroup_number(folder, version == 2 ? "cpu.max" : "cpu.cfs_quota_us", "", 0), period;
    char key[32];
    snprintf(key, sizeof key, "%llu ", (unsigned long long)quota);
    if (version == 2) period = cgroup_number(folder, "cpu.max", key, 0);
    else period = cgroup_number(folder, "cpu.cfs_period_us", "", 0);
    if (!quota || quota > INT64_MAX || !period) return UINT64_MAX;    // strtoull() makes -1 a large number
    return (quota + period - 1) / period;
}

uint64_t cores_quota_under(const char *root) {
    return cgroup_least(root, "cpu", cores_of);
}

int cores_available(void) {
    uint64_t quota = cores_quota_under("");
    int cores = omp_get_num_procs();
    return quota < (uint64_t)cores ? (int)quota : cores;
}

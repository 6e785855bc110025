// Limits of Linux control groups: the files of this process's groups and of all groups above them.
#ifndef RUNTIME_CGROUP_H
#define RUNTIME_CGROUP_H

#include <stdint.h>

// The least that `limit` returns for the folders of this process's groups under a controller, such as "memory", and for
// those above them; UINT64_MAX without a limit.   version: 1 or 2   root: precedes /proc and /sys, for tests
uint64_t cgroup_least(const char *root, const char *controller, uint64_t (*limit)(const char *folder, int version));

// Returns the number that follows `key` at the start of a line of folder/name, or the fallback.
uint64_t cgroup_number(const char *folder, const char *name, const char *key, uint64_t fallback);

// The cores that this process may use: those of its affinity, or fewer if the quotas of control groups allow only part
// of their time; rounded up.
int cores_available(void);

// The quota, in cores; UINT64_MAX without one.
uint64_t cores_quota_under(const char *root);

#endif

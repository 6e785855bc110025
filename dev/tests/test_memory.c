// memory: the free memory and the cores under the limits of control groups, versions 1 and 2, read from imitations of
// the kernel's files.
#include <limits.h>
#include <sys/stat.h>

#include "dev/tests/check.h"
#include "runtime/cgroup.h"
#include "runtime/memory.h"

static char root[] = "/tmp/test_memory.XXXXXX";

static void put(const char *path, const char *text) {
    char full[PATH_MAX];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = full + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(full, 0777);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    if (!file || fputs(text, file) < 0 || fclose(file) != 0) abort();
}

static void clear(void) {
    char command[PATH_MAX];
    snprintf(command, sizeof command, "rm -rf %s/*", root);
    if (system(command) != 0) abort();
}

static void start(const char *groups) {
    clear();
    put("/proc/meminfo", "MemTotal:       2000000 kB\nMemAvailable:   1000000 kB\n");
    put("/proc/self/cgroup", groups);
}

static void expect(uint64_t bytes, const char *what) {
    check_case();
    uint64_t found = memory_available_under(root);
    CHECK(found == bytes, "%s: expected %llu bytes, found %llu", what, (unsigned long long)bytes,
          (unsigned long long)found);
}

static void test_none(void) {
    check_group("no control groups: the machine's memory");
    start("");
    expect(1024000000, "no groups");
    start("0::/\n");
    expect(1024000000, "no files");
    put("/sys/fs/cgroup/memory.max", "max\n");
    expect(1024000000, "no limit in version 2");
    start("4:memory:/\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
    expect(1024000000, "no limit in version 1");
}

static void test_unknown(void) {
    check_group("without /proc: unknown");
    clear();
    expect(UINT64_MAX, "no /proc");
}

static void test_version_2(void) {
    check_group("control groups, version 2");
    start("0::/a/b\n");
    put("/sys/fs/cgroup/a/memory.max", "500000000\n");
    put("/sys/fs/cgroup/a/memory.current", "300000000\n");
    put("/sys/fs/cgroup/a/memory.stat", "anon 100000000\nfile 150000000\nshmem 50000000\n");
    expect(300000000, "page cache is given back, tmpfs is not");
    put("/sys/fs/cgroup/a/b/memory.max", "200000000\n");
    expect(200000000, "the lowest limit counts");
}

static void test_version_1(void) {
    check_group("control groups, version 1");
    start("9:name=systemd:/\n5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n");
    put("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "500000000\n");
    put("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "300000000\n");
    put("/sys/fs/cgroup/memory/a/memory.stat", "cache 7\ntotal_cache 150000000\ntotal_shmem 50000000\n");
    expect(300000000, "page cache is given back, tmpfs is not");
    put("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "200000000\n");
    expect(200000000, "the lowest limit counts");
    put("/proc/self/cgroup", "4:hugetlb,memory:/a/b\n");
    expect(200000000, "one of several controllers");
    put("/proc/self/cgroup", "4:memory_other:/a/b\n");
    expect(1024000000, "another controller");
    start("4:memory:/docker/0123\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "400000000\n");
    expect(400000000, "in a container, whose files are those of its own group");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500000000\n");
    expect(0, "more is used than the limit");
}

static void expect_cores(uint64_t cores, const char *what) {
    check_case();
    uint64_t found = cores_quota_under(root);
    CHECK(found == cores, "%s: expected %llu cores, found %llu", what, (unsigned long long)cores,
          (unsigned long long)found);
}

static void test_cores(void) {
    check_group("cores under CPU quotas, versions 1 and 2");
    start("0::/a/b\n");
    expect_cores(UINT64_MAX, "no files");
    put("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    expect_cores(UINT64_MAX, "no quota in version 2");
    put("/sys/fs/cgroup/a/b/cpu.max", "800000 100000\n");
    expect_cores(8, "version 2");
    put("/sys/fs/cgroup/a/cpu.max", "125000 50000\n");
    expect_cores(3, "the lowest quota counts, rounded up");
    put("/sys/fs/cgroup/cpu.max", "100 100000\n");
    expect_cores(1, "in a container, whose files are at the root");
    start("3:cpuacct:/x\n4:cpuset,cpu:/a/b\n0::/\n");
    expect_cores(UINT64_MAX, "no files");
    put("/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n");
    expect_cores(UINT64_MAX, "no quota in version 1");
    put("/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "400000\n");
    expect_cores(4, "version 1");
    put("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "200000\n");
    put("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
    expect_cores(2, "the group above");
    put("/sys/fs/cgroup/cpuset,cpu/cpu.cfs_quota_us", "100000\n");
    put("/sys/fs/cgroup/cpuset,cpu/cpu.cfs_period_us", "100000\n");
    expect_cores(1, "a folder of several controllers");
    put("/sys/fs/cgroup/cpuset,cpu/cpu.cfs_period_us", "0\n");
    expect_cores(2, "no period");
}

static void test_resize(void) {
    check_group("a buffer of another size");
    MemoryPlan plan = {0};
    char *a, *b;
    memory_add(&plan, "a", (void **)&a, 1000);
    memory_add(&plan, "b", (void **)&b, 256);
    memory_resize(&plan, (void **)&a, 2000);
    CHECK(plan.total == 2048 + 256 && plan.rows[0].bytes == 2000, "%zu bytes instead of 2,304", plan.total);
    memory_resize(&plan, (void **)&a, 1);
    CHECK(plan.total == 256 + 256, "%zu bytes instead of 512", plan.total);
}

static void test_too_large(void) {
    check_group("buffers whose sum does not fit a size_t");
    MemoryPlan plan = {0};
    char *a, *b;
    memory_add(&plan, "a", (void **)&a, SIZE_MAX);
    CHECK(plan.total == SIZE_MAX, "%zu bytes", plan.total);
    memory_resize(&plan, (void **)&a, SIZE_MAX / 3);
    CHECK(plan.total >= SIZE_MAX / 3 && plan.total < SIZE_MAX / 2, "%zu bytes", plan.total);
    for (int i = 0; i < 3; i++) memory_add(&plan, "b", (void **)&b, SIZE_MAX / 3);
    CHECK(plan.total == SIZE_MAX, "%zu bytes", plan.total);
}

int main(void) {
    if (!mkdtemp(root)) return 1;
    test_none();
    test_unknown();
    test_version_2();
    test_version_1();
    test_cores();
    test_resize();
    test_too_large();
    clear();
    rmdir(root);
    return check_verdict();
}

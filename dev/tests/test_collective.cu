// collective: cuda/collective.h on one to four ranks, started by scripts/launch.sh from the folder of the Makefile:
// sums, owners of parts, and the effect of a dead rank on the others. Each worker is this program itself, with a word
// as its argument.
#include "cuda/collective.cu"

#include <math.h>
#include <signal.h>

#include <vector>

#include "cuda/check.h"
#include "dev/tests/check.h"
#include "runtime/clock.h"
#include "runtime/process.h"

using std::vector;

static char self[4096];
static const size_t lengths[] = {1, 5, 64, 127, 256, 1000, 4096, 70000};

// ---- the workers

static cudaStream_t stream;
static Collective *collective;    // NULL with a single rank

static void expect(bool condition, const char *what, size_t n) {
    if (!condition)
        fail(EXIT_DIVERGED, "process %d of %d: %s is wrong, %zu floats", process.rank, process.size, what, n);
}

// The initial values of rank r.
static vector<float> start_values(size_t n, int r) {
    vector<float> x(n);
    for (size_t i = 0; i < n; i++) x[i] = sinf((float)(i % 1009) * 0.37f + (float)r) * (float)(1 + r);
    return x;
}

// A device array that is filled, used and read only on `stream`, as in the trainer, so that only the calls under test
// order that work relative to other streams.
struct Array {
    float *device;
    size_t n;
    explicit Array(const vector<float> &x) : n(x.size()) {
        CUDA_CHECK(cudaMalloc(&device, n * sizeof(float)));
        CUDA_CHECK(cudaMemcpyAsync(device, x.data(), n * sizeof(float), cudaMemcpyHostToDevice, stream));
    }
    ~Array() {
        CUDA_CHECK(cudaFree(device));
    }
    Array(const Array &) = delete;
    vector<float> read(void) const {
        vector<float> x(n);
        collective_join(collective, stream);
        collective_synchronize(collective, stream);
        CUDA_CHECK(cudaMemcpy(x.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost));
        return x;
    }
};

// The largest difference from the sums in double, divided by the bound for float or bf16 sums.
static double sum_error(const vector<float> &got, size_t from, size_t to, bool in_bf16) {
    vector<vector<float>> parts;
    double worst = 0;
    for (int r = 0; r < process.size; r++) parts.push_back(start_values(got.size(), r));
    for (size_t i = from; i < to; i++) {
        double sum = 0, size = 0;
        for (const vector<float> &part : parts) {
            sum += part[i];
            size += fabs(part[i]);
        }
        double error = fabs(got[i] - sum) / (size * (in_bf16 ? 1.0 / 128 : 1e-6) + 1e-30);
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

static void expect_same(const vector<float> &x, const char *what) {
    vector<float> first = x;
    process_broadcast(first.data(), first.size() * sizeof(float));
    expect(memcmp(first.data(), x.data(), x.size() * sizeof(float)) == 0, what, x.size());
}

// Cuts n floats into parts of very different sizes (half of the array, then half of the rest, and so on) with owners.
static vector<CollectivePart> make_parts(size_t n, int ranks) {
    vector<CollectivePart> parts;
    for (size_t from = 0, floats; from < n; from += floats) {
        floats = (n - from + 1) / 2;
        parts.push_back({from, floats, -1, 0});
    }
    collective_assign_owners(parts.data(), parts.size(), ranks);
    return parts;
}

// Sums the parts of two buckets on their owners, then gathers them.
static void check_parts(size_t n, const vector<float> &mine, const vector<float> &sum, bool in_bf16) {
    const vector<CollectivePart> parts = make_parts(n, process.size);
    size_t first = parts.size() / 3, rest = parts.size() - first;
    Array owned(mine), others(vector<float>(n, NAN));
    collective_all_reduce(collective, others.device, n, stream);    // leaves NaN in the scratch memory
    collective_reduce_parts(collective, owned.device, parts.data(), first, stream);
    collective_reduce_parts(collective, owned.device, parts.data() + first, rest, stream);
    vector<float> own = owned.read();
    for (const CollectivePart &part : parts)
        if (part.owner == process.rank)
            expect(sum_error(own, part.from, part.from + part.floats, in_bf16) <= 1, "the sum of a part", n);

    collective_gather_parts(collective, owned.device, false, parts.data(), first, stream);
    collective_gather_parts(collective, owned.device, false, parts.data() + first, rest, stream);
    vector<float> gathered = owned.read();
    expect_same(gathered, "the gathered array on every rank");
    for (const CollectivePart &part : parts)
        if (part.owner == process.rank)
            expect(memcmp(&gathered[part.from], &own[part.from], part.floats * sizeof(float)) == 0,
                   "this rank's part of the gathered array", n);
    expect(sum_error(gathered, 0, n, in_bf16) <= 1, "the sum, gathered", n);
    if (getenv("SAME_BITS"))
        expect(memcmp(gathered.data(), sum.data(), n * sizeof(float)) == 0,
               "the bits of the gathered parts of the sum, against those of one sum", n);
}

static void check_sums(size_t n, bool in_bf16) {
    vector<float> mine = start_values(n, process.rank);
    Array whole(mine), two(mine);
    collective_all_reduce(collective, whole.device, n, stream);
    vector<float> sum = whole.read();
    expect(sum_error(sum, 0, n, in_bf16) <= 1, "the sum", n);
    expect_same(sum, "the sum on every rank");
    check_parts(n, mine, sum, in_bf16);

    collective_all_reduce(collective, two.device, n,
                          stream);    // several in flight; the second sums the results of the first
    collective_all_reduce(collective, two.device, n, stream);
    vector<float> twice = two.read();
    bool right = true;
    for (size_t i = 0; i < n; i++)
        right = right && fabs(twice[i] - process.size * sum[i]) <=
                             (in_bf16 ? 0.03 : 2e-6) * (fabs(sum[i]) * process.size + 1e-30);
    expect(right, "the sum of sums", n);
}

// A stream that waits for the events of several gathers sees what each of them has brought.
static void check_records(void) {
    const size_t n = 3000;
    vector<CollectivePart> parts = make_parts(n, process.size);
    vector<float> mine(n, NAN), expected(n);
    cudaEvent_t events[2];
    size_t first = parts.size() / 2, cut = parts[first].from;
    for (const CollectivePart &part : parts) {
        for (size_t i = part.from; i < part.from + part.floats; i++) {
            expected[i] = (float)(part.owner + 1);
            if (part.owner == process.rank) mine[i] = expected[i];
        }
    }
    Array x(mine), copy(vector<float>(n, NAN));
    for (cudaEvent_t &event : events) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    collective_gather_parts(collective, x.device, false, parts.data(), first, stream);
    collective_record(collective, events[0]);
    collective_gather_parts(collective, x.device, false, parts.data() + first, parts.size() - first, stream);
    collective_record(collective, events[1]);
    CUDA_CHECK(cudaStreamWaitEvent(stream, events[0], 0));
    CUDA_CHECK(cudaMemcpyAsync(copy.device, x.device, cut * sizeof(float), cudaMemcpyDeviceToDevice, stream));
    CUDA_CHECK(cudaStreamWaitEvent(stream, events[1], 0));
    CUDA_CHECK(cudaMemcpyAsync(copy.device + cut, x.device + cut, (n - cut) * sizeof(float), cudaMemcpyDeviceToDevice,
                               stream));
    expect(memcmp(copy.read().data(), expected.data(), n * sizeof(float)) == 0, "what the events announce", n);
    for (cudaEvent_t event : events) CUDA_CHECK(cudaEventDestroy(event));
}

// The sum is ordered with the stream's own work before and after it.
static void check_order(void) {
    const size_t n = 3000;
    Array x(vector<float>(n, NAN)), copy(vector<float>(n, NAN));
    vector<float> ones(n, 1.0f);
    for (int i = 0; i < 3; i++) {
        CUDA_CHECK(cudaMemcpyAsync(x.device, ones.data(), n * sizeof(float), cudaMemcpyHostToDevice, stream));
        collective_all_reduce(collective, x.device, n, stream);
        collective_join(collective, stream);
        CUDA_CHECK(cudaMemcpyAsync(copy.device, x.device, n * sizeof(float), cudaMemcpyDeviceToDevice, stream));
        CUDA_CHECK(cudaMemsetAsync(x.device, 0xFF, n * sizeof(float), stream));
        vector<float> got = copy.read();
        for (float y : got) expect(y == (float)process.size, "a sum among other work", n);
    }
}

// The sums of doubles, with more joins than the collective keeps, and events that are waited for while later work is
// queued.
static void check_doubles(void) {
    double *there, *got;
    cudaEvent_t event;
    CUDA_CHECK(cudaMalloc((void **)&there, 2 * sizeof *there));
    CUDA_CHECK(cudaMallocHost((void **)&got, 2 * sizeof *got));
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (int i = 0; i < 3 * COLLECTIVE_JOINS; i++) {
        const double mine[] = {1 + 0x1p-40 * process.rank, (double)i};
        CUDA_CHECK(cudaMemcpyAsync(there, mine, sizeof mine, cudaMemcpyHostToDevice, stream));
        collective_sum(collective, there, 2, stream);
        collective_join(collective, stream);
        CUDA_CHECK(cudaMemcpyAsync(got, there, sizeof mine, cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaEventRecord(event, stream));
        CUDA_CHECK(cudaMemsetAsync(there, 0xFF, sizeof mine, stream));
        collective_wait(collective, event);
        double ranks = process.size;
        expect(got[0] == ranks + 0x1p-40 * ranks * (ranks - 1) / 2 && got[1] == i * ranks, "a sum of doubles", 2);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaFree(there));
    CUDA_CHECK(cudaFreeHost(got));
    CUDA_CHECK(cudaEventDestroy(event));
}

static void work_sums(bool in_bf16) {
    void *wire = NULL;
    size_t longest = lengths[sizeof lengths / sizeof *lengths - 1];
    if (collective_scratch(collective, longest)) CUDA_CHECK(cudaMalloc(&wire, collective_scratch(collective, longest)));
    expect((collective_scratch(collective, longest) > 0) == (in_bf16 && process.size > 1), "the scratch", longest);
    collective_use(collective, wire);
    for (size_t n : lengths) check_sums(n, in_bf16 && process.size > 1);
    check_order();
    check_records();
    check_doubles();
    process_barrier();
    if (wire) CUDA_CHECK(cudaFree(wire));
    if (process.rank == 0) printf("%d processes are right\n", process.size);
}

static void work_die(void) {
    Array x(vector<float>(1000, 1.0f));
    collective_all_reduce(collective, x.device, x.n, stream);
    x.read();
    if (process.rank == 1) raise(SIGKILL);
    collective_all_reduce(collective, x.device, x.n, stream);
    x.read();
    printf("process %d came through\n", process.rank);
}

// Rank 1 sums fewer floats than the others.
static void work_differ(void) {
    Array x(vector<float>(1000, 1.0f));
    collective_all_reduce(collective, x.device, process.rank == 1 ? 999 : 1000, stream);
    x.read();
    printf("process %d came through\n", process.rank);
}

// Rank 1 is alive, but never reaches the first of two sums. The other rank waits for an event between them.
static void work_stuck(void) {
    cudaEvent_t event;
    Array x(vector<float>(1000, 1.0f));
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    while (process.rank == 1) pause();
    collective_all_reduce(collective, x.device, x.n, stream);
    collective_join(collective, stream);
    CUDA_CHECK(cudaEventRecord(event, stream));
    collective_all_reduce(collective, x.device, x.n, stream);
    collective_wait(collective, event);
    printf("process %d came through\n", process.rank);
}

static void sleep_briefly(void *) {
    usleep(500000);
}

// The work before a sum takes longer than the ranks wait for each other.
static void work_slow(void) {
    Array x(vector<float>(1000, 1.0f));
    for (int i = 0; i < 10; i++) CUDA_CHECK(cudaLaunchHostFunc(stream, sleep_briefly, NULL));
    collective_all_reduce(collective, x.device, x.n, stream);
    for (float y : x.read()) expect(y == (float)process.size, "a sum after other work", x.n);
    if (process.rank == 0) printf("%d processes are right\n", process.size);
}

// Rank 1 has other owners than the other ranks.
static void work_owners(void) {
    Array x(vector<float>(1000, 1.0f));
    int first = process.rank == 1;
    const CollectivePart parts[] = {{0, 400, first, 0}, {400, 600, !first, 0}};
    collective_reduce_parts(collective, x.device, parts, 2, stream);
    x.read();
    printf("process %d came through\n", process.rank);
}

static int work(const char *what, int argc, char **argv) {
    process_start(&argc, &argv);
    CUDA_CHECK(cudaSetDevice(process.local_rank));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    collective = collective_start(!strcmp(what, "bf16"), !strcmp(what, "stuck") || !strcmp(what, "slow") ? 3 : 600);
    if (!strcmp(what, "die")) work_die();
    else if (!strcmp(what, "stuck")) work_stuck();
    else if (!strcmp(what, "slow")) work_slow();
    else if (!strcmp(what, "differ")) work_differ();
    else if (!strcmp(what, "owners")) work_owners();
    else work_sums(!strcmp(what, "bf16"));
    collective_end(collective);
    CUDA_CHECK(cudaStreamDestroy(stream));
    process_end();
    return 0;
}

// ---- the checks

typedef struct {
    const char *processes, *what;
} Job;

static void start_job(void *data) {
    const Job *job = (const Job *)data;
    execl("scripts/launch.sh", "scripts/launch.sh", job->processes, self, job->what, NULL);
    perror("scripts/launch.sh");
    exit(100);
}

static void run_job(const char *processes, const char *what) {
    char output[8192], right[64];
    Job job = {processes, what};
    int code = check_fork(start_job, &job, output, sizeof output);
    snprintf(right, sizeof right, "%s processes are right", processes);
    CHECK(code == 0 && strstr(output, right), "%s, %s: code %d: %s", processes, what, code, output);
}

static vector<size_t> shares(const vector<CollectivePart> &parts, int ranks) {
    vector<size_t> owned(ranks);
    for (const CollectivePart &part : parts) {
        CHECK(part.owner >= 0 && part.owner < ranks, "owner %d of %d", part.owner, ranks);
        owned.at((size_t)part.owner) += part.floats;
    }
    return owned;
}

// No rank can own more than another without its smallest part: that part would have gone to the other.
static void check_balance(const vector<CollectivePart> &parts, int ranks) {
    vector<size_t> owned = shares(parts, ranks), smallest(ranks, SIZE_MAX);
    for (const CollectivePart &part : parts)
        if (part.floats < smallest[part.owner]) smallest[part.owner] = part.floats;
    for (int r = 0; r + 1 < ranks; r++)
        CHECK(owned[r] >= owned[r + 1], "rank %d of %d owns %zu, the next %zu", r, ranks, owned[r], owned[r + 1]);
    for (int r = 0; r < ranks; r++)
        CHECK(owned[r] == 0 || owned[r] - smallest[r] <= owned[ranks - 1],
              "rank %d of %d owns %zu, %zu in its smallest part; the last rank owns %zu", r, ranks, owned[r],
              smallest[r], owned[ranks - 1]);
}

static void expect_owners(const vector<size_t> &sizes, int ranks, const vector<int> &owners) {
    vector<CollectivePart> parts;
    size_t from = 0;
    for (size_t size : sizes) parts.push_back({from, size, -1, 0}), from += size;
    collective_assign_owners(parts.data(), parts.size(), ranks);
    for (size_t i = 0; i < parts.size(); i++)
        CHECK(parts[i].owner == owners[i], "part %zu of %zu on %d ranks belongs to rank %d, not %d", i, parts.size(),
              ranks, parts[i].owner, owners[i]);
}

static void test_owners(void) {
    check_group("owners of parts");
    for (int ranks : {1, 2, 3, 4, 8, 40})
        for (size_t n : lengths) {
            check_case();
            check_balance(make_parts(n, ranks), ranks);
        }
    check_case();
    expect_owners({4, 9, 3, 5, 3}, 3, {2, 0, 2, 1, 1});
    check_case();
    expect_owners({5, 4, 4}, 2, {1, 0, 0});
    check_case();
    expect_owners({7, 7, 7}, 5, {0, 1, 2});
    check_case();
    expect_owners({}, 2, {});
    check_case();
    vector<CollectivePart> parts = {{0, 9, -1, 9}, {9, 8, -1, 16}};    // the smaller one needs more memory
    collective_assign_owners(parts.data(), parts.size(), 2);
    CHECK(parts[0].owner == 1 && parts[1].owner == 0, "rank %d needs the most memory, not rank 0", parts[1].owner);
}

static void test_one(void) {
    check_group("one process");
    run_job("1", "sums");
    run_job("1", "bf16");
}

#ifdef USE_NCCL
// On the CPU, stream work is done at once, late, or at any time.
static void test_several(void) {
    const Job jobs[] = {{"2", "sums"}, {"4", "bf16"}, {"3", "sums"}, {"3", "bf16"}, {"4", "sums"}, {"2", "sums"}};
    const char *when[] = {"once", "once", "late", "any", "late", "any"};
    check_group("sums, and sums of parts, of 2, 3 and 4 ranks");
    for (int i = 0; i < 6; i++) {
        setenv("CUDA_ON_CPU_STREAMS", when[i], 1);
        run_job(jobs[i].processes, jobs[i].what);
    }
    unsetenv("CUDA_ON_CPU_STREAMS");
}

// Runs a job that must fail and print both texts.
static void run_failing(const char *processes, const char *what, const char *says, const char *also) {
    char output[8192];
    Job job = {processes, what};
    int code = check_fork(start_job, &job, output, sizeof output);
    CHECK(code != 0 && !strstr(output, "came through"), "%s: code %d: %s", what, code, output);
    CHECK(strstr(output, says) && strstr(output, also), "%s: expected \"%s\" and \"%s\": %s", what, says, also, output);
}

// mpirun would also end the others, but is made to wait longer than they need to notice by themselves.
static void test_death(void) {
    check_group("a dead rank ends the others");
    setenv("GRACE", "4", 1);
    double start = now();
    run_failing("3", "die", "rank 1 (pid", "has died");
    CHECK(now() - start < 30, "%.1f s", now() - start);
    unsetenv("GRACE");
}

static void test_patience(void) {
    check_group("ranks that wait for each other forever");
    run_failing("2", "stuck", "rank 0: timed out after 3 s", " waiting for the other ranks.");
    setenv("CUDA_ON_CPU_STREAMS", "late", 1);
    run_job("2", "slow");
    unsetenv("CUDA_ON_CPU_STREAMS");
}

static bool on_a_cpu(void) {
    cudaDeviceProp device;
    return cudaGetDeviceProperties(&device, 0) == cudaSuccess && strstr(device.name, "CPU");
}

static void test_difference(void) {
    check_group("calls that differ between ranks");
    run_failing("2", "differ", "ncclAllReduce of 999 elements", "ncclAllReduce of 1000 elements");
    run_failing("2", "owners", "ncclReduce of 400 elements", "root 1");
}
#endif

int main(int argc, char **argv) {
    program_name = "test_collective";
    if (argc == 2) return work(argv[1], argc, argv);
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return 1;
    test_owners();
    test_one();
#ifdef USE_NCCL
    int devices;
    CUDA_CHECK(cudaGetDeviceCount(&devices));
    if (on_a_cpu()) setenv("SAME_BITS", "1", 1);
    if (system("command -v mpirun > /dev/null") != 0 || devices < 4) {
        printf("left out: several ranks, which need mpirun and 4 GPUs (here: %d)\n", devices);
    } else {
        test_several();
        test_death();
        test_patience();
        if (on_a_cpu()) test_difference();
    }
#else
    printf("left out: built without NCCL\n");
#endif
    return check_verdict();
}

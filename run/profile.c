#include "run/profile.h"

#include <stdio.h>
#include <stdlib.h>

#include "runtime/error.h"
#include "runtime/process.h"

#define PHASE_NAME(kind, name) name,
const char *const phase_names[PHASE_COUNT] = {PHASES(PHASE_NAME)};

// reduce: of each rank. The slowest waits least.
static void print_table(const double counted[PHASE_COUNT], double sum, const double *reduce) {
    printf("\n%-36s %10s %8s\n", "phase", "ms/step", "share");
    for (int i = 0; i < PHASE_COUNT; i++)
        if (counted[i] > 0) printf("%-36s %10.2f %7.1f%%\n", phase_names[i], 1000 * counted[i], 100 * counted[i] / sum);
    if (process.size == 1) return;
    printf("%s by rank, ms/step:", phase_names[PHASE_REDUCE]);
    for (int r = 0; r < process.size; r++) printf(" %.2f", reduce[r]);
    printf("\n");
}

void profile_print(Progress *progress, const double seconds[PHASE_COUNT], const double first[PHASE_COUNT],
                   int64_t steps) {
    double counted[PHASE_COUNT], sum = 0;
    double *reduce = allocate((size_t)process.size, sizeof *reduce, "the times of all ranks");
    progress_end(progress);
    for (int i = 0; i < PHASE_COUNT; i++) {
        counted[i] = steps > 1 ? (seconds[i] - first[i]) / (double)(steps - 1) : seconds[i];
        sum += counted[i];
    }
    reduce[process.rank] = 1000 * counted[PHASE_REDUCE];
    process_gather(reduce, sizeof *reduce);
    if (process.rank == 0) print_table(counted, sum, reduce);
    free(reduce);
}

#include "run/profile.h"

#include <stdio.h>

#define PHASE_NAME(kind, name) name,
const char *const phase_names[PHASE_COUNT] = {PHASES(PHASE_NAME)};

void profile_print(Progress *progress, const double seconds[PHASE_COUNT], const double first[PHASE_COUNT],
                   int64_t steps) {
    double counted[PHASE_COUNT], sum = 0;
    progress_end(progress);
    for (int i = 0; i < PHASE_COUNT; i++) {
        counted[i] = steps > 1 ? (seconds[i] - first[i]) / (double)(steps - 1) : seconds[i];
        sum += counted[i];
    }
    printf("\n%-36s %10s %8s\n", "phase", "ms/step", "share");
    for (int i = 0; i < PHASE_COUNT; i++)
        if (counted[i] > 0) printf("%-36s %10.2f %7.1f%%\n", phase_names[i], 1000 * counted[i], 100 * counted[i] / sum);
}

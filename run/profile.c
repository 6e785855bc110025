#include "run/profile.h"

#include <stdio.h>

#define PHASE_NAME(kind, name) name,
const char *const phase_names[PHASE_COUNT] = {PHASES(PHASE_NAME)};

void profile_print(Progress *progress, const double seconds[PHASE_COUNT], int64_t steps) {
    double sum = 0;
    progress_end(progress);
    for (int i = 0; i < PHASE_COUNT; i++) sum += seconds[i];
    printf("\n%-36s %10s %8s\n", "phase", "ms/step", "share");
    for (int i = 0; i < PHASE_COUNT; i++)
        if (seconds[i] > 0)
            printf("%-36s %10.2f %7.1f%%\n", phase_names[i], 1000 * seconds[i] / (double)steps, 100 * seconds[i] / sum);
}

// --profile: the time of each phase of a step. Each trainer measures the phases in its own way.
#ifndef RUN_PROFILE_H
#define RUN_PROFILE_H

#include <stdint.h>

#include "run/metrics.h"

#ifdef __cplusplus
extern "C" {
#endif

// A phase and its name in the table. For example, PHASES(PHASE_KIND) expands to PHASE_OTHER, PHASE_EMBEDDING, ...
#define PHASES(X) \
    X(OTHER,        "data, metrics and the rest") \
    X(EMBEDDING,    "embedding") \
    X(NORM,         "rmsnorm") \
    X(PROJECTIONS,  "q, k, v and o matmuls") \
    X(ROPE,         "rope") \
    X(ATTENTION,    "attention") \
    X(FEED_FORWARD, "feed-forward matmuls") \
    X(SWIGLU,       "swiglu") \
    X(GATE,         "gate of gated attention units") \
    X(CLASSIFIER,   "logits and loss") \
    X(REDUCE,       "gradient all-reduce") \
    X(UPDATE,       "gradient norm and AdamW") \
    X(ASIDE,        "validation, samples, checkpoints")
#define PHASE_KIND(kind, name) PHASE_##kind,
typedef enum { PHASES(PHASE_KIND) PHASE_COUNT } Phase;
#undef PHASE_KIND
extern const char *const phase_names[PHASE_COUNT];

// Collective. Prints each phase's time per step and share of the total, and with several ranks each one's time in
// PHASE_REDUCE. `seconds` covers `steps` steps and what follows each. If there are several, the first is left out,
// because it sets up what the others use: `first` is its part.
void profile_print(Progress *progress, const double seconds[PHASE_COUNT], const double first[PHASE_COUNT],
                   int64_t steps);

#ifdef __cplusplus
}
#endif
#endif

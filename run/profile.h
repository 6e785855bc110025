// --profile: where the time of a step goes. Trainers measure the phases, each in its own way.
#ifndef RUN_PROFILE_H
#define RUN_PROFILE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PHASES(X) \
    X(OTHER, "data, metrics and the rest") X(EMBEDDING, "embedding") X(NORM, "rmsnorm") X(PROJECTIONS, "q, k, v and o products") \
    X(ROPE, "rope") X(ATTENTION, "attention") X(FEED_FORWARD, "feed-forward products") X(SWIGLU, "swiglu") \
    X(GATE, "gate of gated units") X(CLASSIFIER, "output product and loss") X(REDUCE, "gradients summed over processes") \
    X(UPDATE, "norm and AdamW") X(ASIDE, "validation, samples, checkpoints")
#define PHASE_KIND(kind, name) PHASE_##kind,
typedef enum { PHASES(PHASE_KIND) PHASE_COUNT } Phase;
#undef PHASE_KIND
extern const char *const phase_names[PHASE_COUNT];

// Prints the phases' share of the time: seconds of each, in `steps` steps.
void profile_print(const double seconds[PHASE_COUNT], int64_t steps);

#ifdef __cplusplus
}
#endif
#endif

// Samples a token from logits.
#ifndef TEXT_SAMPLER_H
#define TEXT_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

// A token and its probability.
typedef struct {
    float p;
    int32_t id;
} Candidate;

// Returns the most likely token if temperature is below 1e-6 (1/temperature must stay finite in float32). Otherwise
// samples from softmax(logits / temperature), restricted to the top_k most likely tokens (0: all) and then to the
// fewest most likely tokens whose total probability reaches top_p (1: all).
// Returns -1 if a logit is not finite, or if all are equal: RMSNorm gives 0 where the square of an activation
// overflows.
//   logits (V) overwritten   candidates (V) scratch   u in [0, 1): the quantile at which the token is drawn
int32_t sample_token(float *logits, Candidate *candidates, size_t V, double temperature, size_t top_k, double top_p,
                     double u);

#endif

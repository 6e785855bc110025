// Draws a token from logits.
#ifndef RUNTIME_SAMPLER_H
#define RUNTIME_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

// temperature below 1e-6: the likeliest, as 1/temperature must stay finite in float32. Otherwise from softmax(logits /
// temperature), kept to the top_k likeliest (0: all) and then to the fewest whose probability reaches top_p (1: all),
// at the quantile u in [0, 1).
//   logits (V), overwritten
int32_t sample_token(float *logits, size_t V, double temperature, size_t top_k, double top_p, double u);

#endif

// The lineage of a run, an array in run.json: how it began, and each change of normalizer.
#ifndef RUN_LINEAGE_H
#define RUN_LINEAGE_H

#include <cjson/cJSON.h>
#include <stdint.h>

// Appends {"step": N, "event": "start|init-from|attn-at-start|attn-switch", ...} to a lineage. The details are key,
// value, ..., NULL. Returns the entry.
cJSON *lineage_add(cJSON *lineage, int64_t step, const char *event, ...);

// Removes normalizer switches after the checkpoint of this step from the lineage and returns them in an array that the
// caller owns. A checkpoint is usually saved before the switch at its own step. If it was saved after it, `made` is its
// normalizer, otherwise NULL.
cJSON *lineage_cut(cJSON *lineage, int64_t step, const char *made);

// Returns the normalizer after all switches of a lineage, or NULL if it names none.
const char *lineage_attn(const cJSON *lineage);

#endif

// Training data from several sources in fixed proportions: "web*.bin:0.7,books*.bin:0.3".
//
// Sequence g of the mixture is a sequence of one of its sources, which only g and the weights determine. Of the first n
// sequences, for any n, each source has its share of n rounded up or down. Its own sequences come in its own order,
// with its own epochs (data/shards.h). Weights are ratios of whole numbers, so the choice of sources has a period.
#ifndef DATA_MIXTURE_H
#define DATA_MIXTURE_H

#include "data/shards.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char *globs;
    uint64_t weight;    // sequences of each period; weights have no common divisor
    Shards *shards;
} Source;

// The place of a sequence: its source, and how many sequences of this source precede it in the period.
typedef struct {
    uint32_t source, before;
} Turn;

enum { MAX_SOURCES = 64 };

typedef struct {
    Source sources[MAX_SOURCES];
    size_t count;
    bool weighted;      // false: one source, given without a weight
    uint64_t period;    // the sum of the weights
    Turn *turns;        // (period)
} Mixture;

// Does the text give weights? A text that as a whole names files gives none, whatever their names.
bool mixture_has_weights(const char *text);

// Like shards_first_path(), of the first source.
bool mixture_first_path(const char *text, char *path, size_t size);

// Opens the sources in `text`: globs as for shards_open(), which are one source, or a list of globs with a weight each,
// separated by spaces or commas. Weights are decimal numbers above 0; only their ratios count. config.min_windows is
// divided among the sources. Returns NULL on error: EXIT_USAGE if the weights are invalid, otherwise as shards_open().
Mixture *mixture_open(const char *text, ShardsConfig config, Error *error);
void mixture_close(Mixture *mixture);

// Returns the source that has sequence *g of the mixture, and sets *g to the sequence's number in that source.
const Source *mixture_find(const Mixture *mixture, uint64_t *g);

// Does any source have masks, or is any loss masked because of PACK_EXAMPLE?
bool mixture_masked(const Mixture *mixture);

// Reads and checks all tokens and masks of all sources, for --dry-run.
bool mixture_check_all(Mixture *mixture, Error *error);

// Returns the fingerprint of a single source without a weight, or {"sources": [{"weight": 7, "files": ...}, ...]}. The
// caller frees it; NULL is an error.
char *mixture_fingerprint(Mixture *mixture, Error *error);

#ifdef __cplusplus
}
#endif
#endif

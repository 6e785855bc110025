// --task attention: where attention goes, and what the residual stream looks like, over a few prompts.
#ifndef EVAL_OBSERVE_H
#define EVAL_OBSERVE_H

#include "attention/attention_cpu.h"
#include "eval/eval.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    OBSERVE_BINS = 21,    // one for each power of two up to MAX_SEQ_LEN
    MAX_MAP = 1024,       // the side of a map; longer prompts are averaged in cells
    OBSERVED_ROWS = 64    // rows of weights at a time
};

// Sums over the rows of a prompt, of one head of one layer. p_ij = |A_ij| / sum_j |A_ij|.
typedef struct {
    double rows, weights;                 // rows; visible weights
    double sum, entropy, first, zeros;    // sum_j A_ij; -sum_j p_ij ln p_ij; p_i0 for i > 0; how many A_ij are 0
    double fitted, x, y, xx, xy;          // for the line ln Z = slope ln n + intercept, over rows with n > 1 and Z > 0
    double entropy_by_n[OBSERVE_BINS], rows_by_n[OBSERVE_BINS];    // bin b: 2^b <= n < 2^(b+1)
    double log_z_by_n[OBSERVE_BINS], fitted_by_n[OBSERVE_BINS];    // ln Z, over the rows with Z > 0
    double weight_by_distance[OBSERVE_BINS];    // of p; bin 0: distance 0 and 1; bin b: 2^b <= i - j < 2^(b+1)
} HeadStats;

// Of the residual stream after a layer, over all its elements.
typedef struct {
    double kurtosis, largest;    // E(x - mean)^4 / variance^2; max |x|
} ResidualStats;

// Means over heads, and over prompts; largest is the greatest of all.
typedef struct {
    double sum, entropy, first, zeros, slope, slopes;    // slope: a sum of `slopes` terms, since some heads have none
    double kurtosis, largest;
} ObserveMeans;

typedef struct {
    int32_t *ids;
    size_t count;
} ObservePrompt;

typedef struct {
    Eval *e;
    Shards *shards;    // NULL with --prompt-file
    ObservePrompt *prompts;
    size_t prompt_count, longest;
    size_t layers, heads;
    HeadStats *stats;           // (layers, heads)
    ResidualStats *residual;    // (layers)
    // The maps of the first prompt: means over the visible ones of cell x cell positions; (heads, side, side).
    float *map;
    size_t cell, side;
    File *map_file;
    char map_name[64];
    bool with_end_of_text;    // does the prompt start with an end-of-text token?
    size_t at;                // the prompt
    // Without and with a leading end-of-text token:
    double *sums, *losses;     // (2, prompts)
    ObserveMeans *by_layer;    // (2, layers)
    HeadStats all[2];          // summed over all heads and prompts
} Observer;

// Reads --prompt-file, or --samples sequences of the first of --seq-lens tokens from --data.
void observe_settle(Observer *o, Eval *e);
void observe_close(Observer *o);

void observe_begin(Observer *o);

// The next prompt, each without and with a leading end-of-text token. Sequences of --data keep their length: with
// end-of-text, they lose their last token. False after the last.
bool observe_next(Observer *o, int32_t *ids, size_t *count);

// Computes the weights of a head of a layer, OBSERVED_ROWS rows at a time, and adds them. Different heads may be added
// in parallel.
//   weights (OBSERVED_ROWS,T) scratch
void observe_head(Observer *o, float *weights, AttentionInput in, Scalars scalars, AttentionShape shape,
                  AttentionRows at, size_t layer);

// After all heads of a layer: the residual stream that it leaves.
//   x (T,C)
void observe_layer(Observer *o, size_t layer, const float *x, size_t T, size_t C);

// After all layers. The prompt's loss is the mean over its tokens but the first, with and without a leading end-of-text
// token.
//   losses (T - 1): of each token but the first of the sequence, in nats
void observe_done(Observer *o, size_t T, const float *losses);
void observe_end(Observer *o);

#ifdef __cplusplus
}
#endif
#endif

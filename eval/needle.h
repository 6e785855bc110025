// --task needle: does the model find a fact that is hidden in a long context? [SSMax] sections 3.3 and 3.4.
//
// A needle, "The special magic CITY number is: NUMBER.", is inserted into tokens of --data (the haystack), and the
// model is asked for the number. One prompt after another:
//
//     while (needle_next(&n)) {
//         feed n.trial.tokens to the model, keeping the cache of the first n.trial.shared ones from the trial before
//         needle_weights(&n, weights of the last token, ...);
//         while (needle_answer(&n, logits)) feed n.token;
//     }
#ifndef EVAL_NEEDLE_H
#define EVAL_NEEDLE_H

#include "eval/eval.h"

#ifdef __cplusplus
extern "C" {
#endif

// One city per line.
extern const char cities_text[];

enum {
    MAX_CITY = 64,
    MAX_DIGITS = 18,
    // Prompts share the cache in whole blocks, which is a multiple of the tokens that the decoder computes together. So
    // each token is computed in the same block of tokens, with the same rounding, whatever is shared.
    SHARED_BLOCK = 1024
};
typedef enum { NEEDLE_WRONG, NEEDLE_FIRST_DIGIT, NEEDLE_RIGHT, NEEDLE_NOT_FINITE } NeedleVerdict;

// A prompt: n.length tokens of haystack and needle, then the question.
typedef struct {
    size_t length_at, sample, depth_at;    // indices into --seq-lens, --samples and --depths
    double depth;                          // how much of the haystack precedes the needle, in percent
    char city[MAX_CITY], number[MAX_DIGITS + 1];
    const int32_t *tokens;
    size_t count, shared;            // shared: this many tokens are also those of the previous trial's prompt
    size_t length;                   // of --seq-lens; RoPE's theta follows from it
    size_t positions;                // the most that a prompt of this length and its answer need
    size_t number_at, number_end;    // the tokens from just after the needle's colon to its end
} NeedleTrial;

typedef struct {
    Eval *e;
    Shards *shards;
    uint64_t windows;
    int32_t opening, closing, turn;    // special tokens of the prompts; -1 for none
    size_t frame, answer_tokens;       // the most tokens of a prompt beside haystack and needle, and of an answer
    size_t trials, at;                 // all of them; the number of the next one
    NeedleTrial trial;
    int32_t token;          // the newest token of the answer
    int32_t *answer_ids;    // (answered)
    int32_t *tokens, *previous, *hay;
    size_t previous_count;
    size_t lengths[OPTION_LIST_MAX], length_count, depth_count, longest;
    char *answer;    // as text
    size_t answer_length, answered;
    double *scores, *mean_scores;    // (layers, heads): of this trial; summed over the trials of this length
    cJSON *row, *trial_rows;         // of this length
    double theta;                    // RoPE's, of this length
    bool finite;                     // all logits of the answer so far
    size_t right[OPTION_LIST_MAX], first_digit[OPTION_LIST_MAX], not_finite[OPTION_LIST_MAX];    // by depth
} Needle;

// Checks the lengths, the city and the number. Sets e->longest: the positions that a prompt and its answer need.
void needle_settle(Needle *n, Eval *e);
void needle_close(Needle *n);

// Prints the head of the table and goes to the first trial.
void needle_begin(Needle *n);

// Makes the next trial's prompt. False after the last. The first prompt of each length shares nothing.
bool needle_next(Needle *n);

// The attention weights of the prompt's last token, which generates the first token of the answer: the needle score of
// a head is the sum over the needle's number.
//   weights (layers,heads,stride)
void needle_weights(Needle *n, const float *weights, size_t stride);

// Takes the likeliest token that does not end a text. Returns false once the answer is complete: after its first
// number, in ChatML at the end of the turn, which may be chosen there, or if a logit is not finite.
bool needle_answer(Needle *n, const float *logits);

#ifdef __cplusplus
}
#endif
#endif

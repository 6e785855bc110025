// --task choice: multiple choice, by the likelihood of each ending, as lm_eval scores it.
#ifndef EVAL_CHOICE_H
#define EVAL_CHOICE_H

#include "eval/eval.h"
#include "runtime/file.h"

#ifdef __cplusplus
extern "C" {
#endif

// A question's JSON has either HellaSwag's keys (activity_label, ctx_a, ctx_b or ctx, endings, label), whose texts are
// cleaned as by lm_eval's hellaswag task, or query, choices and gold, which are used as they are.
typedef struct {
    int32_t *ids;
    size_t count, from;    // tokens; the first one of the ending
    size_t length;         // of the ending, in characters
    double log_likelihood;
} ChoiceEnding;

typedef struct {
    ChoiceEnding *endings;
    size_t count, gold;
} ChoiceQuestion;

// The file is read a question at a time: for each model, first to reject bad lines and to count tokens, then to measure
// under each normalizer.
typedef struct {
    Eval *e;
    FileLines *lines;
    FileHash file;    // as first read; it must stay the same for all models and normalizers
    ChoiceQuestion question;
    size_t question_count, ending;    // of the file; the question's next
    size_t right, right_norm, not_finite, judged;
    cJSON *log_likelihoods;    // of the questions that were measured
} Choice;

// Reads --data and checks it. A sequence longer than --seq-lens (default: L) keeps its end. *c is zero before the first
// model, and later what the previous model left.
void choice_settle(Choice *c, Eval *e);
void choice_close(Choice *c);

void choice_begin(Choice *c);

// The next ending, after its question. NULL after the last. The caller then adds the sum of the losses of the tokens
// from `from` on.
const ChoiceEnding *choice_next(Choice *c);
void choice_add(Choice *c, double loss);
void choice_end(Choice *c);

#ifdef __cplusplus
}
#endif
#endif

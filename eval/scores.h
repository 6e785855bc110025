// --task scores: the learned scalars of every layer and head.
#ifndef EVAL_SCORES_H
#define EVAL_SCORES_H

#include "eval/eval.h"

#ifdef __cplusplus
extern "C" {
#endif

// Prints and records s, b, p_n and the sinks, and for s and b the line c sqrt(d) = a1 ln n + a2 that they make.
//   params: of all tensors of the list
void scores_report(Eval *e, const TensorList *list, const float *params);

#ifdef __cplusplus
}
#endif
#endif

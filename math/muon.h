// Muon's constants, the same as torch.optim.Muon's defaults, and its learning rate. With --optimizer muon, both
// trainers update every hidden matrix p (R,C), whose clipped gradient is g, as follows:
//
//   m = m + (1 − momentum) (g − m),   u = g + momentum (m − g)                  Nesterov's momentum
//   X = u/max(|u|, eps), then `rounds` times X = a X + (b A + c A²) X, A = X Xᵀ   Newton-Schulz
//   p = (1 − lr · weight decay) p − muon_rate(lr, R, C) X
//
// The rounds bring X's singular values near 1. If R > C, they use XᵀX and multiply from the right, which is the same.
// Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
// Scalable for LLM Training" (arXiv 2502.16982) for the rate, which torch.optim.Muon calls match_rms_adamw.
#ifndef MATH_MUON_H
#define MATH_MUON_H

#include <math.h>
#include <stddef.h>

enum { MUON_ROUNDS = 5 };

#define MUON_MOMENTUM 0.95
#define MUON_EPS 1e-7
#define MUON_A 3.4445
#define MUON_B (-4.7750)
#define MUON_C 2.0315

// The factor of X, with which an update has the size of AdamW's, so that both use the same learning rate.
static inline double muon_rate(double lr, size_t R, size_t C) {
    return lr * 0.2 * sqrt((double)(R > C ? R : C));
}

#endif

// The kernels of fused attention for the whole family of attention/normalizer.h. A thread block owns some query rows
// (in the dk/dv kernel: key rows) and loops over the other side tile by tile; scores exist only in registers.
//
//   forward     O = A V by row blocks: S = Q Kᵀ, then O += W V with weights that are not yet normalized; factors known
//               only at the end of the row (1/Z, a mean) are applied then. recenter-l1 and reweight need Z before their
//               weights, so they sweep over the keys twice.
//   backward    a kernel for the rows (D and the like), one for dq by row blocks, one for dk and dv by key blocks; the
//               last two both recompute the scores. That takes seven matmuls of T×T×HS. A single kernel would need
//               five, but many blocks would add to dq, either in varying order or each waiting for its predecessor;
//               these two kernels are deterministic and never wait. For reweight over a sum, dq takes an eighth matmul
//               instead of a prior sweep over the keys (see below). (flash90_backward.cuh is such a single kernel.)
//
//   flash_tile.cuh        shared-memory tiles, register fragments and matmuls
//   flash_row.cuh         what is computed for a row or an element: phi, which keys a row sees
//   flash_post.cuh        what depends on the post: a row's numbers, its weights and their gradients
//   flash_forward_row.cuh what the forward pass computes for a row
//   flash_forward.cuh     the forward kernel
//   flash90*.cuh          the kernels for compute capability 9.0
//   flash_backward.cuh    the kernels of dq, and of dk and dv
//   flash_sums.cuh        the small kernels before and after them
//   flash.cuh             this description, and the launches
//
// The numbers of a row: z = scale s + bias, f = phi(z); flash_row.cuh has the cap of z. In the forward pass:
//   exp, expm1 over their sum    bias = o - the largest z so far (sums are rescaled by exp(new bias - old bias))
//   else                         bias = o
//   plain                        out = (f · V)/Z, then negated, or with max(f, 0) for f, as post requires
//   recenter                     out = (f · V)/Z - mean sum_{j <= i} v_j, mean = sum f/(Z n); two small kernels compute
//                                the sums of v beforehand
//   recenter-l1                  w = f factor - mean, factor = 1/Z, out = (w · V)/sum |w|
//   reweight                     r = (A n - 1)/top in [0, 1], top the largest A n - 1: r = 1 + (f - mean) factor,
//                                mean the largest f, factor = n/(Z top); w = r^P, out = (w · V)/sum w. r is at most 1,
//                                so no power overflows, and exact near 1, where a power magnifies errors
// In the backward pass, d_ij = dO_i · v_j, W_ij is the weight of v_j, and sgn the sign:
//   plain        W = factor f,           df = factor (d - sgn(f) D),            D = dO_i · O_i, 0 where Z is fixed
//   recenter     W = factor f - mean,    df = factor (d - less - sgn(f) D),     less = dO_i · sum_{j <= i} v_j / n
//   recenter-l1  W = factor f - mean,    df = factor (d - less - sgn(W) D),
//                less = (dO_i · sum_{j <= i} v_j - D sum_j sgn(W))/n
//                (factor and mean now refer to sum |w|; Z adds no term, because W does not depend on the scale of f)
//   reweight     W = r^P inverse_sum,    df = K t - sgn(f) less,    t = r^(P-1) (d - D),    K = factor P inverse_sum,
//                less = K/n sum_j t (1 - r) for n > 3 where Z is a sum, else 0. It is the sum of K t f/Z over the row,
//                because f = mean + (r - 1)/factor, mean factor - 1 = factor Z/n (0 for n <= 3), and sum_j t r = 0 by
//                the definition of D. (With t instead of t (1 - r), it cancels badly.) less is known only at the end of
//                the row. One sweep still suffices: dq_i = K c sum_j t phi'(z) k_j - less c sum_j sgn(f) phi'(z) k_j,
//                and likewise for g_i. flash90.cuh's forward pass keeps along = sum_j r^(P-1) (1 - r) (v_j - out), and
//                sum_j t (1 - r) = dO_i · along
//   dz = df phi'(z),  dq_i = c sum_j dz k_j,  dk_j = sum_i c dz q_i,  dv_j = sum_i W dO_i,  g_i = sum_j dz s
//
// The gated unit's wide v (VS > 128) is processed HS columns at a time. The forward pass and dv treat the column blocks
// like heads; for dq and dk, d_ij is summed over the column tiles (WIDE). (flash90_backward.cuh treats the column
// blocks like heads in the whole backward pass.)
//
// HS in the kernels is the size that they are built for: 48, 64 or 128. A smaller head (call.HS) is padded with zeros,
// which do not affect a matmul.
//
// Source: FlashAttention-2 (arXiv 2307.08691) for exp over its sum; the other formulas are [SSMax], [LSSA] and [GAU] of
// attention/normalizer.h. Limits: FlashShape. Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH_CUH
#define ATTENTION_FLASH_CUH

#include "attention/flash.h"
#include "attention/flash_backward.cuh"
#include "attention/flash_forward.cuh"
#include "attention/flash_sums.cuh"

#include <algorithm>

// The bytes of shared memory per block.
template <class P, int HS, class X>
constexpr size_t flash_shared(size_t own_tiles, size_t streamed_tiles) {
    return (own_tiles * P::OWN + streamed_tiles * P::STREAM) * tile_step<HS> * sizeof(X);
}

template <class X, int HS, int PHI, int POST>
constexpr size_t forward_shared = flash_shared<ForwardPlan<X, HS, PHI, POST>, HS, X>(1, 4);

template <class X, int HS, int PHI, int POST, bool WIDE>
constexpr size_t dq_shared = flash_shared<RowsPlan<X, HS, PHI, POST, WIDE>, HS, X>(2, 4);

template <class X, int HS, int PHI, bool WIDE>
constexpr size_t dkv_shared =
    flash_shared<KeysPlan<X, HS, PHI, WIDE>, HS, X>(2, 4) + 2 * KeysPlan<X, HS, PHI, WIDE>::STREAM * sizeof(FlashRow);

// The most that any of these kernels requests; those for a wide v use smaller tiles.
template <class X, int HS, int PHI, int POST>
constexpr size_t most_shared =
    std::max({forward_shared<X, HS, PHI, POST>, dq_shared<X, HS, PHI, POST, false>, dkv_shared<X, HS, PHI, false>});

// Blocks of rows from the one of row `from` on.
template <class P, class X>
dim3 flash_grid(const FlashCall<X> &call, int from, int heads, int columns) {
    return dim3((call.T - 1) / P::OWN + 1 - from / P::OWN, call.B * heads, columns);
}

template <class X, int HS, int PHI, int POST>
void flash_forward_launch(const FlashCall<X> &call, cudaStream_t stream) {
    typedef ForwardPlan<X, HS, PHI, POST> P;
    launch(flash_forward_kernel<X, HS, PHI, POST>, flash_grid<P>(call, call.from, call.NH, (call.VS - 1) / HS + 1),
           dim3(P::THREADS), forward_shared<X, HS, PHI, POST>, stream, call);
}

template <class X, int HS, int PHI, int POST, int MODE>
void flash_dkv_launch(const FlashCall<X> &call, int columns, cudaStream_t stream) {
    typedef KeysPlan<X, HS, PHI, MODE == KEYS_DK_WIDE> P;
    launch(flash_dkv_kernel<X, HS, PHI, POST, MODE>, flash_grid<P>(call, 0, call.NKV, columns), dim3(P::THREADS),
           dkv_shared<X, HS, PHI, MODE == KEYS_DK_WIDE>, stream, call);
}

template <class X, int HS, int PHI, int POST, bool WIDE>
void flash_dq_launch(const FlashCall<X> &call, cudaStream_t stream) {
    typedef RowsPlan<X, HS, PHI, POST, WIDE> P;
    launch(flash_dq_kernel<X, HS, PHI, POST, WIDE>, flash_grid<P>(call, 0, call.NH, 1), dim3(P::THREADS),
           dq_shared<X, HS, PHI, POST, WIDE>, stream, call);
}

template <class X, int HS, int PHI, int POST>
void flash_backward_launch(const FlashCall<X> &call, cudaStream_t stream) {
    // One kernel computes dk and dv, except for 128 columns in float32, which need too many registers.
    constexpr bool together = HS < 128 || is_bf16<X>;
    if (call.VS <= HS) flash_dq_launch<X, HS, PHI, POST, false>(call, stream);
    if constexpr (HS == 128) {
        if (call.VS > HS) flash_dq_launch<X, HS, PHI, POST, true>(call, stream);
        if (call.VS > HS || !together) {
            flash_dkv_launch<X, HS, PHI, POST, KEYS_DK_WIDE>(call, 1, stream);
            flash_dkv_launch<X, HS, PHI, POST, KEYS_DV>(call, (call.VS - 1) / HS + 1, stream);
            return;
        }
    }
    if constexpr (together) flash_dkv_launch<X, HS, PHI, POST, KEYS_BOTH>(call, 1, stream);
}
#endif

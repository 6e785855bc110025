// Attention on GPUs for the whole family, forward and backward, fused: nothing of size T×T is ever stored. C++; the
// kernels are in flash.cuh, built once for each row of flash_instances.h (flash_instance.cu), and chosen in flash.cu.
//   X is bf16 (products of bf16, sums in float32) or float (products as exact as float32's, see flash.cuh).
#ifndef ATTENTION_FLASH_H
#define ATTENTION_FLASH_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "attention/normalizer.h"

// NH query heads share NKV heads of keys and values: query head h reads key-value head h / (NH/NKV).
//   HS is a multiple of 8, at most 128 (48, 64 and 128 lose nothing), and VS = HS; or, for the gated unit, HS is 128
//   and VS any multiple of 8.
struct FlashShape {
    const Normalizer *normalizer;
    size_t B, T, NH, NKV, HS, VS;    // sequences, their length, heads, size of a head's q and k, of its v
    int L;                           // the training length
};

// The heads of q, k, v or out wherever they lie: position t of sequence b and head h is at p + (b·T + t)·row + h·head,
// in elements. q, k and v may stand in one (B,T,NH + 2 NKV,HS) array. Pointers, rows and heads are multiples of 16
// bytes.
template <class X>
struct FlashView {
    X *p;
    size_t row, head;
};

// What attention reads: q (B,T,NH,HS), k (B,T,NKV,HS), v (B,T,NKV,VS), after RoPE, qk=l2 and whatever else comes first.
// first (B,T): the first key that each position sees, at most its own and not falling along a sequence; NULL: all see
// the sequence from its start on. n, the number of visible keys, counts from there.
template <class X>
struct FlashInput {
    FlashView<const X> q, k, v;
    const int32_t *first;
};

template <class X>
struct FlashInputGrads {
    FlashView<X> q, k, v;
};

enum { FLASH_STATS = 4 };    // floats that the forward pass keeps of a row, at least

// Ends the program, by name, with what there is, when no kernel takes this shape with elements of `element` bytes.
void flash_check(FlashShape shape, size_t element);

// Floats that a forward pass with elements of `element` bytes keeps for its backward pass: FLASH_STATS a row, and,
// where the gradient needs them, what rounding took from the output.
size_t flash_stats(FlashShape shape, size_t element);

// Bytes of scratch on the device that a forward or a backward pass needs.
size_t flash_scratch(FlashShape shape);

// out[b,t,h] = sum_{first <= j <= t} A_tj v_j, A by the normalizer from s_tj = q_t · k_j (attention/normalizer.h)
//   out (B,T,NH,VS) written   stats (flash_stats) written, for flash_backward
//   rows_without_weight: a counter on the device, added to; such a row's output is 0
template <class X>
void flash_forward(FlashView<X> out, float *stats, unsigned long long *rows_without_weight, FlashInput<X> in,
                   Scalars scalars, FlashShape shape, void *scratch, cudaStream_t stream);

// The gradients, from what flash_forward saw and wrote; the scores are computed again. Deterministic: dk and dv are
// summed over the heads that share them in order.
//   d written   grads added to   dout, out (B,T,NH,VS), which lie alike
template <class X>
void flash_backward(FlashInputGrads<X> d, ScalarGrads grads, const X *dout, FlashView<const X> out, const float *stats,
                    FlashInput<X> in, Scalars scalars, FlashShape shape, void *scratch, cudaStream_t stream);

// ---- between flash.cu and the instances

// What the kernels know of a row when they go back (flash.cuh has the formulas).
struct alignas(16) FlashRow {
    float scale, bias, factor, D;
    union {
        float mean, by_d;
    };    // by_d and by_D are those of plain posts: factor scale, and that times D
    union {
        float less, by_D;
    };    // (without the scale in the kernel of dq)
    float inverse_sum, number;    // phi's, see phi_number()
};

template <class X>
struct FlashCall {
    FlashView<const X> q, k, v, dout;
    FlashView<X> out, dq, dk, dv;
    const int32_t *first;    // (B,T) or NULL
    float *stats;            // (B,NH,T,FLASH_STATS)
    X *rest;                 // (B,NH,T,VS): what rounding took from out; NULL: not wanted
    unsigned long long *rows_without_weight;
    const float *prefix;    // (B,NKV,T,VS): the sum of v_j over the visible j, for recenter and recenter-l1
    FlashRow *rows;         // (B,NH,T)
    float *g;               // (B,NH,T): sum_j dz_tj s_tj; NULL: not wanted
    float *by_number;       // (B,NH,T): sum_j df_tj df/dnumber, where phi_learns(); NULL: not wanted
    Scalars scalars;
    Stage scale, offset, norm;
    int phi, post;
    float power;    // of reweight
    int B, T, NH, NKV, HS, VS, L;
};

// The posts by what they ask of the kernels.
enum FlashPost {
    FLASH_PLAIN,          // none, negate, rectify: one sweep
    FLASH_RECENTER,       // one sweep, and sums of v
    FLASH_RECENTER_L1,    // two sweeps over the keys
    FLASH_REWEIGHT,       // two sweeps
    FLASH_TWO_SWEEPS      // either of the last two, asked at run time
};

enum { FLASH_ANY_PHI = -1 };    // asked at run time

struct FlashInstance {
    size_t element;    // bytes
    int phi, post;
};

#define FLASH_INSTANCE(name, X, phi, post) FLASH_##name,
enum FlashInstanceName {
#include "attention/flash_instances.h"
    FLASH_INSTANCE_COUNT
};
#undef FLASH_INSTANCE

typedef __nv_bfloat16 bf16;
#define FLASH_INSTANCE(name, X, phi, post) {sizeof(X), phi, post},
inline constexpr FlashInstance flash_instances[] = {
#include "attention/flash_instances.h"
};
#undef FLASH_INSTANCE

// post=rectify costs a phi of both signs some instructions for each score, whether it is asked for or not. Only expm1's
// instance (softpick) has them, and those that ask for phi at run time.
constexpr bool flash_rectifies(int phi) {
    return phi == PHI_EXPM1 || phi == FLASH_ANY_PHI;
}

constexpr bool flash_post_fits(int have, int post) {
    return post == POST_RECENTER      ? have == FLASH_RECENTER
           : post == POST_RECENTER_L1 ? have == FLASH_RECENTER_L1 || have == FLASH_TWO_SWEEPS
           : post == POST_REWEIGHT    ? have == FLASH_REWEIGHT || have == FLASH_TWO_SWEEPS
                                      : have == FLASH_PLAIN;
}

// The instance for elements of `element` bytes, phi and post.
constexpr int flash_find(size_t element, int phi, int post) {
    for (int i = 0; i < FLASH_INSTANCE_COUNT; i++) {
        FlashInstance have = flash_instances[i];
        bool phi_fits =
            have.phi == FLASH_ANY_PHI || (have.phi == phi && (post != POST_RECTIFY || flash_rectifies(phi)));
        if (have.element == element && phi_fits && flash_post_fits(have.post, post)) return i;
    }
    return -1;
}

// In a build for one normalizer (make ATTN=NAME) there are only its own instances.
#ifdef ATTN_ONLY
constexpr int flash_only(size_t element) {
    return flash_find(element, NORMALIZER_PHI((Normalizer *)0), NORMALIZER_POST((Normalizer *)0));
}
constexpr bool flash_is_built(int instance) {
    return instance == flash_only(2) || instance == flash_only(4);
}
#else
constexpr bool flash_is_built(int) {
    return true;
}
#endif

template <size_t element>
struct FlashElement;
template <>
struct FlashElement<2> {
    typedef bf16 type;
};
template <>
struct FlashElement<4> {
    typedef float type;
};
template <int instance>
using FlashX = typename FlashElement<flash_instances[instance].element>::type;

// In flash_instance.cu, a translation unit each.
template <int instance>
void flash_instance_forward(const FlashCall<FlashX<instance>> &call, cudaStream_t stream);
template <int instance>
void flash_instance_backward(const FlashCall<FlashX<instance>> &call, cudaStream_t stream);

#endif

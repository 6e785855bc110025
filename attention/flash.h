// Fused attention on GPUs for the whole family, forward and backward; never stores anything of size T×T. C++. The
// kernels are in flash.cuh; flash_instance.cu builds them once for each row of flash_instances.h, and flash.cu selects
// one.
//   X is bf16 (bf16 matmuls with float32 accumulation) or float (matmuls with the accuracy of float32, see flash.cuh).
#ifndef ATTENTION_FLASH_H
#define ATTENTION_FLASH_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#include "attention/post.h"

// NH query heads share NKV key-value heads: query head h reads key-value head h / (NH/NKV).
//   HS is a multiple of 8 and at most 128 (48, 64 and 128 need no padding), and VS = HS; or, for the gated unit, HS is
//   128 and VS any multiple of 8.
struct FlashShape {
    const Normalizer *normalizer;
    size_t B, T, NH, NKV, HS, VS;    // sequences, their length, heads, head size of q and k, of v
    int L;                           // the training length
    size_t from = 0;                 // see flash_forward
    bool any_order = false;    // may dq be summed in any order? Otherwise the same input always gives the same bits
    size_t window = 0;         // the most keys that FlashInput's `first` lets a row see; 0: no such limit
};

// The heads of q, k, v or out anywhere in memory: position t of head h of sequence b is at p + (b·T + t)·row + h·head,
// in elements. q, k and v may share one (B,T,NH + 2 NKV,HS) array. Pointers, rows and heads must be multiples of 16
// bytes.
template <class X>
struct FlashView {
    X *p;
    size_t row, head;
};

// The input of attention: q (B,T,NH,HS), k (B,T,NKV,HS), v (B,T,NKV,VS), after RoPE, qk=l2 and any other preprocessing,
// and the learned scalars.
// first (B,T) is the first key that each position sees: at most the position itself, and nondecreasing along a
// sequence. NULL: every position sees its sequence from the start. n, the number of visible keys, counts from the first
// visible key. In a window (flash_window_starts), work grows as T·W.
template <class X>
struct FlashInput {
    FlashView<const X> q, k, v;
    const int32_t *first;
    Scalars scalars;
};

// RoPE's cosines and sines (T,HS/2) of each position, as in cuda/rope.cuh.
struct FlashRope {
    const float *cosines, *sines;
};

// Their gradients: those of q, k and v are written, those of the scalars added to. With rope, where
// flash_undoes_rope(), the gradients of q and k are those before RoPE; otherwise its pointers are NULL.
template <class X>
struct FlashInputGrads {
    FlashView<X> q, k, v;
    ScalarGrads scalars;
    FlashRope rope = {NULL, NULL};
};

enum { FLASH_STATS = 4 };    // the minimum number of floats that the forward pass keeps per row

// If no kernel supports this shape with elements of `element` bytes, ends the program with a message that says what is
// supported.
void flash_check(FlashShape shape, size_t element);

// Does FLASH90=0 in the environment select the kernels for compute capability 8.0 on every GPU? A value other than 0 or
// 1 ends the program.
bool flash90_is_denied(void);

// The number of floats that a forward pass with elements of `element` bytes keeps for its backward pass: FLASH_STATS
// per row and, where the gradient needs them, the rounding error of the output and, for powers on compute capability
// 9.0, another sum over v, both like the output.
size_t flash_stats(FlashShape shape, size_t element);

// The bytes of device scratch that a forward or backward pass with elements of `element` bytes needs.
size_t flash_scratch(FlashShape shape, size_t element);

// FlashInput's `first` in a window of so many keys: first[b,t] = max(starts[b,t], t + 1 - window)
//   first (B,T) written   starts (B,T): the first key of each position's document; NULL: 0
void flash_window_starts(int32_t *first, const int32_t *starts, size_t B, size_t T, size_t window, cudaStream_t stream);

// Can flash_backward() undo RoPE? It saves a pass over the gradients of q and k.
bool flash_undoes_rope(FlashShape shape, size_t element);

// out[b,t,h] = sum_{first <= j <= t} A_tj v_j, where the normalizer computes A from s_tj = q_t · k_j
// (attention/normalizer.h)
//   out (B,T,NH,VS) written   stats (flash_stats) written, for flash_backward
//   all_zero_rows: a counter on the device; the number of all-zero rows, whose output is 0, is added to it
// With shape.from, of a single sequence, only rows t >= from are needed, such as those of new tokens after others whose
// keys and values are there. The kernel computes whole blocks of rows: q must exist from the start of the block of row
// `from` on, and the out, stats and count of these rows are written too.
template <class X>
void flash_forward(FlashView<X> out, float *stats, unsigned long long *all_zero_rows, FlashInput<X> in,
                   FlashShape shape, void *scratch, cudaStream_t stream);

// The gradients, from the input and output of flash_forward. Recomputes the scores. Deterministic, unless
// shape.any_order.
//   dout, out (B,T,NH,VS), both with the same layout, and 16-byte aligned
template <class X>
void flash_backward(FlashInputGrads<X> d, const X *dout, FlashView<const X> out, const float *stats, FlashInput<X> in,
                    FlashShape shape, void *scratch, cudaStream_t stream);

// ---- between flash.cu and the instances

// What the backward kernels need to know about a row: Post<POST>::Row or Row90 of flash_post.cuh.
struct alignas(16) FlashRow {
    float scale, more[7];
};

template <class X>
struct FlashCall {
    FlashView<const X> q, k, v, dout;
    FlashView<X> out, dq, dk, dv;
    const int32_t *first;    // (B,T) or NULL
    float *stats;            // (B,NH,T,FLASH_STATS)
    X *rest;                 // (B,NH,T,VS): the rounding error of out, or NULL
    unsigned long long *all_zero_rows;
    X *along;               // (B,NH,T,VS): sum_j r^(P-1) (1 - r) (v_j - out) if the post is a power, or NULL
    const float *prefix;    // (B,NKV,T,VS): the sum of v_j over the visible j, for recenter and recenter-l1
    int parts;              // of v's columns, HS each, which flash90_backward.cuh processes like heads; elsewhere 1
    FlashRow *rows;         // (parts,B,NH,T)
    float *g;               // (B,NH,T): sum_j dz_tj s_tj, or NULL if not needed
    float *by_number;       // (B,NH,T): sum_j df_tj df/dnumber with phi_learns(), or NULL if not needed
    int dq_sets;            // the number of its sums of dq
    float *dq_sums;         // flash90_backward.cuh's sums of dq, or NULL where flash_backward.cuh computes it
    float *dk_sums;         // its sums of dk over the parts, or NULL if there is one part
    unsigned *counters;     // its next block's number; then whose turn it is, for each tile of queries, and
                            // FLASH90_KEY_TURNS for each tile of keys
    bool any_order;         // see FlashShape
    FlashRope rope;         // see FlashInputGrads
    Scalars scalars;
    Stage scale, offset, norm;
    int phi, post;
    float power;    // the number of the post
    int B, T, NH, NKV, HS, VS, L, from;
    float cap;         // of z, in the instances that select phi at run time; 0: none
    float *offsets;    // (B,T): with a cap, row_offset() for the backward pass
};

// What a post requires of the kernels.
//   plain      W is f times a factor of the row, or 0: none, negate, rectify
//   centers    prefix sums of v
//   twice      two sweeps over the keys: W is divided by a sum that only Z or the largest f makes known
//   power      W is a power of a function of f that is at most 1
NORMALIZER_CONSTANT bool post_is_plain(int post) {
    return !(post_needs(post) & (POST_SUMS | POST_LARGEST | POST_DIVIDES));
}
NORMALIZER_CONSTANT bool post_centers(int post) {
    return post_needs(post) & POST_CENTERS;
}
NORMALIZER_CONSTANT bool post_sweeps_twice(int post) {
    return post_needs(post) & POST_DIVIDES;
}
NORMALIZER_CONSTANT bool post_is_power(int post) {
    return post_needs(post) & POST_LARGEST;
}

enum { FLASH_ANY_PHI = -1 };    // phi is selected at run time

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

// Dropping negative f (post=rectify) costs a signed phi a few instructions per score, even if it is not used. Only
// expm1's instance (softpick) supports it, and the instances that select phi at run time.
constexpr bool flash_may_drop(int phi) {
    return phi == PHI_EXPM1 || phi == FLASH_ANY_PHI;
}

// The instance for these elements, phi and post, or -1. First match wins. All plain posts have the same instances. With
// a cap of z, only those that select phi at run time: the others, which most models run, owe it no instruction.
constexpr int flash_find(size_t element, int phi, int post, bool capped) {
    const bool plain = post_is_plain(post), drops = plain && post_needs(post) & POST_VANISHES;
    for (int i = 0; i < FLASH_INSTANCE_COUNT; i++) {
        FlashInstance have = flash_instances[i];
        bool phi_fits = have.phi == FLASH_ANY_PHI || (have.phi == phi && !capped && (!drops || flash_may_drop(phi)));
        if (have.element == element && phi_fits && have.post == (plain ? POST_NONE : post)) return i;
    }
    return -1;
}

// A build for one normalizer (make ATTN=NAME) contains only its instances.
#ifdef ATTN_ONLY
constexpr int flash_only(size_t element, bool capped) {
    return flash_find(element, NORMALIZER_PHI((Normalizer *)0), NORMALIZER_POST((Normalizer *)0), capped);
}
constexpr bool flash_is_built(int instance) {
    return instance == flash_only(2, false) || instance == flash_only(2, true) || instance == flash_only(4, false);
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

// Defined in flash_instance.cu, one translation unit per instance.
template <int instance>
void flash_instance_forward(const FlashCall<FlashX<instance>> &call, cudaStream_t stream);
template <int instance>
void flash_instance_backward(const FlashCall<FlashX<instance>> &call, cudaStream_t stream);

// Calls act() with the first of these head sizes, which ascend, that has room for HS columns, as an integral_constant.
template <int FIRST, int... MORE, class Act>
auto with_head_size(int HS, Act act) {
    if constexpr (sizeof...(MORE) > 0)
        if (HS > FIRST) return with_head_size<MORE...>(HS, act);
    return act(std::integral_constant<int, FIRST>());
}

// Does the instance have kernels for compute capability 9.0 too, in flash90_instance.cu?
constexpr bool flash90_has(int instance) {
    return flash_instances[instance].element == 2 && flash_instances[instance].phi != FLASH_ANY_PHI;
}
template <int instance>
void flash90_instance_forward(const FlashCall<bf16> &call, cudaStream_t stream);
template <int instance>
void flash90_instance_backward(const FlashCall<bf16> &call, cudaStream_t stream);

// The two kernels for heads of up to HS = 64 or 128: where registers do not suffice, which would spill, flash.cuh's
// kernels take over.
constexpr bool flash90_forward_fits(int phi, int post, int HS) {
    return HS <= 64 ||
           ((phi != PHI_SOFTPLUS || !post_is_plain(post)) && !(post_centers(post) && post_sweeps_twice(post)));
}
constexpr bool flash90_backward_fits(int post, int HS) {
    return HS <= 64 || !post_is_power(post);
}

// Do the blocks of flash90_backward.cuh start with the last queries? With heads of at most 64, those of instances with
// exp do not, because softmax is faster that way (dev/notes/speed_gpu.md).
constexpr bool flash90_last_queries_first(int phi, int HS) {
    return HS > 64 || phi != PHI_EXP;
}

// Does flash90.cuh's forward pass keep `along`, which its backward pass needs?
constexpr bool flash90_keeps_along(int post, int HS) {
    return HS <= 64 && post_is_power(post);
}

// Tiles of its backward kernel; and the warps that store a tile of keys, each of which waits for its turn with parts.
enum { FLASH90_KEYS = 128, FLASH90_QUERIES = 64, FLASH90_KEY_TURNS = 8 };

#endif

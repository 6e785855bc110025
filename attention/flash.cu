// The host side of flash.h: validation, scratch, selection of the instance, and the kernels that all instances share.
#include "cuda/gpu.cuh"

#include "attention/flash.cuh"
#include "cuda/check.h"
#include "runtime/error.h"

#include <stdlib.h>
#include <string.h>

#include <utility>

// ---- what the forward pass keeps

static size_t rows_of(FlashShape shape) {
    return shape.B * shape.NH * shape.T;
}

static int post_of(FlashShape shape) {
    return NORMALIZER_POST(shape.normalizer);
}

static bool centers(FlashShape shape) {
    return post_centers(post_of(shape));
}

bool flash90_is_denied(void) {
    const char *wanted = getenv("FLASH90");
    if (!wanted || !*wanted || !strcmp(wanted, "1")) return false;
    if (strcmp(wanted, "0")) fail(EXIT_USAGE, "FLASH90=%s in the environment: expected 0 or 1.", wanted);
    return true;
}

// Has this program the kernels of flash90.cuh, and the current device their instructions?
static bool is_hopper(void) {
#ifdef USE_HOPPER
    int device, major;
    if (flash90_is_denied()) return false;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major == 9;
#else
    return false;
#endif
}

static int flash_of(const Normalizer *a, size_t element) {
    return flash_find(element, NORMALIZER_PHI(a), NORMALIZER_POST(a), a->cap > 0);
}

// Does flash90_backward.cuh compute the gradients?
static bool backward_is_90(FlashShape shape, size_t element) {
    const Normalizer *a = shape.normalizer;
    int instance = flash_of(a, element);
    return is_hopper() && flash90_has(instance) && (shape.VS == shape.HS || shape.HS == 128) &&
           !phi_learns(NORMALIZER_PHI(a)) && flash90_backward_fits(flash_instances[instance].post, (int)shape.HS);
}

// D = dO · O, computed from an O in bf16, has a relative error of 2^-9. Where sgn(f) D is subtracted from every d and
// phi is signed, these errors add up over the row's keys to more than all other rounding.
static bool keeps_rest(FlashShape shape, size_t element) {
    return element == 2 && phi_signed(NORMALIZER_PHI(shape.normalizer)) &&
           (norm_is_sum(shape.normalizer->norm) || (centers(shape) && post_sweeps_twice(post_of(shape))));
}

static bool keeps_along(FlashShape shape, size_t element) {
    return backward_is_90(shape, element) && post_is_power(post_of(shape)) && norm_is_sum(shape.normalizer->norm);
}

// Of the columns of v, which flash90_backward.cuh processes like heads.
static size_t parts_of(FlashShape shape, size_t element) {
    return backward_is_90(shape, element) ? (shape.VS - 1) / shape.HS + 1 : 1;
}

// The floats of a pass's rest or along.
static size_t like_out(FlashShape shape, size_t element) {
    return rows_of(shape) * shape.VS * element / sizeof(float);
}

bool flash_undoes_rope(FlashShape shape, size_t element) {
    return backward_is_90(shape, element) && (shape.HS == 64 || shape.HS == 128);
}

size_t flash_stats(FlashShape shape, size_t element) {
    size_t stats = rows_of(shape) * FLASH_STATS;
    if (keeps_rest(shape, element)) stats += like_out(shape, element);
    if (keeps_along(shape, element)) stats += like_out(shape, element);
    return stats;
}

// ---- scratch

static unsigned scalar_pieces(FlashShape shape) {
    return (unsigned)((shape.B * shape.T - 1) / SCALAR_ROWS + 1);
}

static unsigned position_pieces(FlashShape shape) {
    return (unsigned)((shape.B * shape.NH - 1) / POSITION_HEADS + 1);
}

// The largest number of visible keys.
static size_t positions_of(FlashShape shape) {
    return shape.window && shape.window < shape.T ? shape.window : shape.T;
}

// The partial sums of the scalars' gradients. Per-head and per-position scalars share the space: the former are added
// up before the latter are computed.
static size_t partials_of(FlashShape shape) {
    size_t most = SCALAR_COUNT * shape.NH * scalar_pieces(shape);
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (scalar_width(x) == PER_POSITION && normalizer_has(shape.normalizer, (Scalar)x))
            most = std::max(most, positions_of(shape) * position_pieces(shape));
    return most;
}

// Parts of v add to dq in order, so those that run at the same time wait for each other. With every second part in a
// sum of its own they wait little.
static size_t dq_sets_of(FlashShape shape, size_t element) {
    return std::min(parts_of(shape, element), (size_t)2);
}

// The first byte of each array in scratch, and how many bytes there are in all.
struct FlashScratch {
    size_t rows, g, by_number, offsets;    // FlashCall's, of each row (rows: for each part of v)
    size_t prefix, segments;               // prefix sums of v and sums of their segments, for the posts that recenter
    size_t dq_sums, dk_sums, counters;     // FlashCall's, for flash90_backward.cuh
    size_t partials;                       // partials_of()
    size_t bytes;
};

static FlashScratch scratch_of(FlashShape shape, size_t element) {
    FlashScratch at = {};
    auto place = [&at](size_t *where, size_t count, size_t size) {
        *where = at.bytes;
        at.bytes += ((count * size + 255) / 256) * 256;
    };
    const size_t parts = parts_of(shape, element), rows = rows_of(shape), sequences = shape.B * shape.NKV;
    place(&at.rows, parts * rows, sizeof(FlashRow));
    place(&at.g, rows, sizeof(float));
    if (phi_learns(NORMALIZER_PHI(shape.normalizer))) place(&at.by_number, rows, sizeof(float));
    if (shape.normalizer->cap > 0) place(&at.offsets, shape.B * shape.T, sizeof(float));
    if (centers(shape)) {
        place(&at.prefix, sequences * shape.T * shape.VS, sizeof(float));
        place(&at.segments, sequences * ((shape.T - 1) / SEGMENT + 1) * shape.VS, sizeof(float));
    }
    if (backward_is_90(shape, element)) {
        const size_t HS = shape.HS <= 64 ? 64 : 128, key_tiles = sequences * ((shape.T - 1) / FLASH90_KEYS + 1),
                     query_tiles = shape.B * shape.NH * ((shape.T - 1) / FLASH90_QUERIES + 1),
                     dq_tiles = dq_sets_of(shape, element) * query_tiles;
        place(&at.dq_sums, dq_tiles * FLASH90_QUERIES * HS, sizeof(float));
        if (parts > 1) place(&at.dk_sums, key_tiles * FLASH90_KEYS * HS, sizeof(float));
        place(&at.counters, 1 + dq_tiles + FLASH90_KEY_TURNS * key_tiles, sizeof(unsigned));
    }
    place(&at.partials, partials_of(shape), sizeof(double));
    return at;
}

size_t flash_scratch(FlashShape shape, size_t element) {
    return scratch_of(shape, element).bytes;
}

template <class X>
static FlashCall<X> call_of(FlashShape shape, FlashInput<X> in, float *stats, void *scratch) {
    const Normalizer *a = shape.normalizer;
    FlashCall<X> call = {};
    call.q = in.q;
    call.k = in.k;
    call.v = in.v;
    call.first = in.first;
    call.scalars = in.scalars;
    call.scale = a->scale;
    call.offset = a->offset;
    call.norm = a->norm;
    call.phi = NORMALIZER_PHI(a);
    call.post = NORMALIZER_POST(a);
    call.power = (float)a->post.value;
    call.cap = (float)a->cap;
    call.B = (int)shape.B;
    call.T = (int)shape.T;
    call.NH = (int)shape.NH;
    call.NKV = (int)shape.NKV;
    call.HS = (int)shape.HS;
    call.VS = (int)shape.VS;
    call.L = shape.L;
    call.from = (int)shape.from;
    call.stats = stats;
    float *kept = stats + rows_of(shape) * FLASH_STATS;
    if (keeps_rest(shape, sizeof(X))) {
        call.rest = (X *)kept;
        kept += like_out(shape, sizeof(X));
    }
    if (keeps_along(shape, sizeof(X))) call.along = (X *)kept;
    call.parts = (int)parts_of(shape, sizeof(X));
    call.dq_sets = (int)dq_sets_of(shape, sizeof(X));
    const FlashScratch at = scratch_of(shape, sizeof(X));
    char *from = (char *)scratch;
    call.rows = (FlashRow *)(from + at.rows);
    call.g = (float *)(from + at.g);
    if (phi_learns(call.phi)) call.by_number = (float *)(from + at.by_number);
    if (call.cap > 0) call.offsets = (float *)(from + at.offsets);
    if (centers(shape)) call.prefix = (float *)(from + at.prefix);
    return call;
}

template <class X>
static void prefix_sums(const FlashCall<X> &call, FlashShape shape, void *scratch, cudaStream_t stream) {
    if (!call.prefix) return;
    float *prefix = (float *)call.prefix;
    float *segments = (float *)((char *)scratch + scratch_of(shape, sizeof(X)).segments);
    dim3 grid((call.T - 1) / SEGMENT + 1, call.B * call.NKV, (call.VS - 1) / (4 * SUM_LANES) + 1);
    dim3 block(SUM_LANES, SUM_GROUPS);
    launch(flash_segments_kernel<X>, grid, block, 0, stream, segments, call);
    launch(flash_prefix_kernel<X>, grid, block, 0, stream, prefix, segments, call);
}

// Is the gradient of any scalar needed that acts in this stage, or has this width?
static bool any_acts(ScalarGrads grads, ScalarStage stage) {
    bool any = false;
    for (int x = 0; x < SCALAR_COUNT; x++) any |= grads.of[x] && scalar_stage(x) == stage;
    return any;
}

static bool any_has(ScalarGrads grads, ScalarWidth width) {
    bool any = false;
    for (int x = 0; x < SCALAR_COUNT; x++) any |= grads.of[x] && scalar_width(x) == width;
    return any;
}

template <class X>
static void scalar_gradients(ScalarGrads grads, const FlashCall<X> &call, FlashShape shape, float in_unit,
                             void *scratch, cudaStream_t stream) {
    double *partials = (double *)((char *)scratch + scratch_of(shape, sizeof(X)).partials);
    const int positions = (int)positions_of(shape);
    const bool in_window = positions < call.T;
    unsigned pieces = scalar_pieces(shape), blocks = (positions - 1) / POSITION_THREADS + 1;
    if (any_has(grads, PER_HEAD)) {
        launch(flash_scalars_kernel<X>, dim3(pieces, call.NH), dim3(SCALAR_THREADS), 0, stream, partials, grads, call,
               in_unit);
        launch(flash_scalars_add_kernel<32>, dim3(call.NH), dim3(32), 0, stream, grads, partials, (int)pieces);
    }
    for (int x = 0; x < SCALAR_COUNT; x++) {
        if (!grads.of[x] || scalar_width(x) != PER_POSITION) continue;
        launch(flash_positions_kernel<X>, dim3(blocks + in_window, position_pieces(shape)), dim3(POSITION_THREADS), 0,
               stream, partials, x, positions, in_window, call, in_unit);
        launch(flash_positions_add_kernel<POSITION_THREADS>, dim3(blocks), dim3(POSITION_THREADS), 0, stream,
               grads.of[x], partials, (int)position_pieces(shape), positions);
    }
}

void flash_window_starts(int32_t *first, const int32_t *starts, size_t B, size_t T, size_t window,
                         cudaStream_t stream) {
    launch(flash_window_kernel<256>, dim3((unsigned)((T - 1) / 256 + 1), (unsigned)B), dim3(256), 0, stream, first,
           starts, (int)T, (int)std::min(window, T));
}

// ---- selection of the instance

template <class X>
struct Pass {
    void (*forward)(const FlashCall<X> &, cudaStream_t), (*backward)(const FlashCall<X> &, cudaStream_t);
    size_t (*shared)(int head_size);    // the most shared memory per block, in bytes
    float in_unit;
};

template <class X, int PHI, int POST>
static size_t shared_of(int head_size) {
    return with_head_size<48, 64, 128>(head_size, [](auto HS) { return most_shared<X, HS.value, PHI, POST>; });
}

template <class X, int instance>
static void pass_if(Pass<X> *pass, int wanted) {
    constexpr FlashInstance it = flash_instances[instance];
    if constexpr (flash_is_built(instance) && it.element == sizeof(X))
        if (instance == wanted) {
            *pass = {flash_instance_forward<instance>, flash_instance_backward<instance>, shared_of<X, it.phi, it.post>,
                     unit<X, it.phi>};
#ifdef USE_HOPPER
            if constexpr (flash90_has(instance))
                if (is_hopper()) {
                    pass->forward = flash90_instance_forward<instance>;
                    pass->backward = flash90_instance_backward<instance>;
                }
#endif
        }
}

template <class X, int... all>
static Pass<X> pass_of(const Normalizer *a, std::integer_sequence<int, all...>) {
    Pass<X> pass = {};
    (pass_if<X, all>(&pass, flash_of(a, sizeof(X))), ...);
    return pass;
}

template <class X>
static Pass<X> pass_of(const Normalizer *a) {
    return pass_of<X>(a, std::make_integer_sequence<int, FLASH_INSTANCE_COUNT>());
}

// ---- validation

// The limit of this rank's GPU: 163 KB per block with compute capability 8.0, 99 KB with 8.6 and 8.9, 227 KB with 9.0.
static void check_shared(FlashShape shape, size_t element) {
    const int HS = (int)shape.HS;
    const size_t needed = element == sizeof(bf16) ? pass_of<bf16>(shape.normalizer).shared(HS)
                                                  : pass_of<float>(shape.normalizer).shared(HS);
    int device, most;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (needed > (size_t)most)
        fail(EXIT_USAGE,
             "attention: a head size of %d needs %zu KB of shared memory per block, but this GPU has only %d KB.\n"
             "  Heads of at most 64 need less (head_dim in --model, or else channels / heads); gated units always have "
             "128.",
             HS, needed / 1024, most / 1024);
}

void flash_check(FlashShape shape, size_t element) {
    size_t HS = shape.HS, VS = shape.VS;
    if (HS < 8 || HS > 128 || HS % 8)
        fail(EXIT_USAGE,
             "attention: no kernel for a head size of %zu; expected a multiple of 8, at most 128 (head_dim in --model, "
             "or else channels / heads).",
             HS);
    if (VS != HS && !(HS == 128 && VS % 8 == 0 && VS > 0))
        fail(EXIT_USAGE,
             "attention: no kernel for values of size %zu with a head size of %zu; expected the same size or, in a "
             "gated unit (where it is 2 x channels), a multiple of 8.",
             VS, HS);
    if (shape.T < 1 || shape.T > 1 << 24 || shape.B < 1 || shape.NH < 1 || shape.B * shape.NH > 65535)
        fail(EXIT_USAGE,
             "attention: %zu sequences of %zu tokens with %zu heads; expected 1 to 16,777,216 tokens, and at most "
             "65,535 heads in all sequences together.",
             shape.B, shape.T, shape.NH);
    if (shape.NKV < 1 || shape.NH % shape.NKV)
        fail(EXIT_USAGE, "attention: %zu heads are not divisible by %zu key-value heads (see --model).", shape.NH,
             shape.NKV);
    // Their slopes under a cap are df/dz, but phi_slope_by_number() expects phi'.
    if (shape.normalizer->cap > 0 && phi_learns(NORMALIZER_PHI(shape.normalizer)))
        fail(EXIT_USAGE, "attention: no kernel for +cap= with a phi that has a learned number.");
    check_shared(shape, element);
}

// ---- the passes

// Kernels copy 16 bytes at a time.
template <class X>
static void check_view(const char *name, FlashView<X> view) {
    size_t pack = 16 / sizeof(X);
    if ((uintptr_t)view.p % 16 || view.row % pack || view.head % pack)
        fail(EXIT_USAGE,
             "attention: %s is at %p with strides of %zu (row) and %zu (head) elements; expected a 16-byte aligned "
             "address and multiples of %zu elements.",
             name, (const void *)view.p, view.row, view.head, pack);
}

template <class X>
void flash_forward(FlashView<X> out, float *stats, unsigned long long *all_zero_rows, FlashInput<X> in,
                   FlashShape shape, void *scratch, cudaStream_t stream) {
    flash_check(shape, sizeof(X));
    check_view("q", in.q);
    check_view("k", in.k);
    check_view("v", in.v);
    check_view("out", out);
    FlashCall<X> call = call_of(shape, in, stats, scratch);
    call.out = out;
    call.all_zero_rows = all_zero_rows;
    if (!post_sweeps_twice(call.post)) prefix_sums(call, shape, scratch, stream);    // otherwise only for the gradients
    pass_of<X>(shape.normalizer).forward(call, stream);
}

template <class X>
void flash_backward(FlashInputGrads<X> d, const X *dout, FlashView<const X> out, const float *stats, FlashInput<X> in,
                    FlashShape shape, void *scratch, cudaStream_t stream) {
    flash_check(shape, sizeof(X));
    check_view("dq", d.q);
    check_view("dk", d.k);
    check_view("dv", d.v);
    check_view("out", out);
    FlashCall<X> call = call_of(shape, in, const_cast<float *>(stats), scratch);
    call.out = {const_cast<X *>(out.p), out.row, out.head};
    call.dout = {dout, out.row, out.head};
    check_view("dout", call.dout);
    call.dq = d.q;
    call.dk = d.k;
    call.dv = d.v;
    if (!any_acts(d.scalars, IN_SCALE)) call.g = NULL;
    if (!any_acts(d.scalars, IN_PHI)) call.by_number = NULL;
    if (backward_is_90(shape, sizeof(X))) {
        const FlashScratch at = scratch_of(shape, sizeof(X));
        char *from = (char *)scratch;
        call.dq_sums = (float *)(from + at.dq_sums);
        if (call.parts > 1) call.dk_sums = (float *)(from + at.dk_sums);
        call.counters = (unsigned *)(from + at.counters);
        call.any_order = shape.any_order;
        call.rope = d.rope;
    }
    prefix_sums(call, shape, scratch, stream);
    Pass<X> pass = pass_of<X>(shape.normalizer);
    launch(flash_rows_kernel<X>, dim3((call.T - 1) / ROW_THREADS + 1, call.B * call.NH, call.parts), dim3(ROW_THREADS),
           0, stream, call, pass.in_unit);
    pass.backward(call, stream);
    scalar_gradients(d.scalars, call, shape, pass.in_unit, scratch, stream);
}

// template void flash_forward(FlashView<bf16>, ...); template void flash_backward(FlashInputGrads<bf16>, ...);
// clang-format off
#define INSTANTIATE(X)                                                                                                 \
    template void flash_forward(FlashView<X>, float *, unsigned long long *, FlashInput<X>, FlashShape, void *,        \
                                cudaStream_t);                                                                         \
    template void flash_backward(FlashInputGrads<X>, const X *, FlashView<const X>, const float *, FlashInput<X>,      \
                                 FlashShape, void *, cudaStream_t);
// clang-format on
INSTANTIATE(bf16)
INSTANTIATE(float)

// The forward kernel of flash.cuh, whose header has the formulas.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH_FORWARD_CUH
#define ATTENTION_FLASH_FORWARD_CUH

#include "attention/flash_row.cuh"

// A larger chunk has more matmuls in flight and, with a running maximum, rescales the sums less often. So it is as
// large as the registers allow.
template <int HS, int PHI, int POST>
constexpr int forward_chunk() {
    if (PHI < 0) return 16;
    if ((POST == FLASH_REWEIGHT || PHI == PHI_MISH || PHI == PHI_EXPM1) && HS > 64) return 16;
    if (POST == FLASH_REWEIGHT) return 32;
    const int chunk = PHI == PHI_EXP && HS <= 64 ? 64 : 32;
    return POST == FLASH_PLAIN ? chunk : chunk / 2;
}

// Chunks in which all scores are visible have separate code without masks. With 128 columns there are too few registers
// for both versions.
template <int HS>
constexpr bool splits_chunks = HS <= 64;

// True if, in the forward pass, the operands of the rows that a warp owns stay in registers. mish, the longest phi,
// leaves no room for them.
template <class X, int HS, int PHI, int POST>
constexpr bool forward_keeps = is_bf16<X> && HS <= 64 && (POST < FLASH_RECENTER_L1) && PHI != PHI_MISH;

template <class X, int HS, int PHI, int POST>
struct ForwardPlan : FlashPlan<own_tiles<X, PHI>, is_bf16<X> ? 64 : 32, forward_chunk<HS, PHI, POST>(),
                               forward_keeps<X, HS, PHI, POST>> {};

struct ForwardRow {
    float scale, bias, offset;
    float number;          // phi's, see phi_number()
    float sum;             // of |f|
    float sum_signed;      // of f
    float largest;         // f; in the first sweep, if that is by_z: the largest z
    float factor, mean;    // map f to w in the second sweep
    float left, signs;     // the sum of |w|, the sum of the signs of w
};

// What a warp keeps in registers: its rows, their sums of weights times v, and their queries.
template <class X, int HS, int PHI, int POST>
struct ForwardWarp {
    typedef ForwardPlan<X, HS, PHI, POST> P;
    ForwardRow row[2 * P::TILES];
    float sum[P::TILES][HS / 8][4];
    Own<X, HS, P::TILES, P::KEEP> q;
};

// What a sweep over the keys does with each chunk.
struct ForwardSweep {
    bool first, adds;                      // does another sweep follow? does this one add to the output?
    bool relative, is_signed, reweight;    // of the normalizer
};

// ---------------------------------------------------------------------------------------------------------------------
// From scores to weights

// Sets to x every element whose key precedes the first key that its row sees. Call only if call.first is set.
template <class X, int TILES, int NT>
DEVICE void hide_before(float (&s)[TILES][NT][4], float x, const FlashCall<X> &call, Chunk chunk) {
    int first[2 * TILES];
    first_keys(first, call, chunk.own);
    for_each_element(s, [&](Element at) {
        if (is_before(first[own_row(at)], chunk, at)) s[at.m][at.nt][at.e] = x;
    });
}

// Scores that are not visible do not count for the maximum.
template <int TILES, int NT>
DEVICE void forward_hide(float (&s)[TILES][NT][4], Chunk chunk) {
    for_each_element(s, [&](Element at) {
        if (!is_visible<false>(chunk, at)) s[at.m][at.nt][at.e] = -INFINITY;
    });
}

// Sets each row's bias to o minus the largest z so far, and rescales the row's sums; with `sums`, also its output.
template <class X, int HS, int PHI, int TILES, int NT>
DEVICE void forward_shift(ForwardRow (&row)[2 * TILES], float (&sum)[TILES][HS / 8][4], const float (&s)[TILES][NT][4],
                          bool sums) {
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        const int m = r / 2, e = (r % 2) * 2;    // the row's elements are s[m][nt][e] and [e + 1]
        float top = -INFINITY;
        UNROLL
        for (int nt = 0; nt < NT; nt++) top = fmaxf(top, fmaxf(s[m][nt][e], s[m][nt][e + 1]));
        float bias = fminf(row[r].bias, -row[r].scale * row_max(top)), by = exp_of<X, PHI>(bias - row[r].bias);
        row[r].bias = bias;
        row[r].number = exp_of<X, PHI>(bias - row[r].offset);
        row[r].sum *= by;
        row[r].sum_signed *= by;
        row[r].largest *= by;
        UNROLL
        for (int c = 0; sums && c < HS / 8; c++) {
            sum[m][c][e] *= by;
            sum[m][c][e + 1] *= by;
        }
    }
}

// s: scores in, f out, 0 where not visible.
template <class X, int PHI, int POST, bool MASKED, int TILES, int NT>
DEVICE void forward_values(int phi, float (&s)[TILES][NT][4], const ForwardRow (&row)[2 * TILES], Chunk chunk) {
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        float z[4 * TILES], slope[4 * TILES];
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) z[e] = s[e / 4][nt][e % 4] * row[e / 2].scale + row[e / 2].bias;
        phi_values<X, PHI, false>(phi, z, slope, row);
        if (rounds_values<PHI, POST>) round_to<X>(z);
        UNROLL
        for (int e = 0; e < 4 * TILES; e++)
            s[e / 4][nt][e % 4] = MASKED && !is_visible<false>(chunk, {e / 4, nt, e % 4}) ? 0 : z[e];
    }
}

// BOTH: the sum of f is also needed, and differs from the sum of |f|.
template <bool BOTH, int TILES, int NT>
DEVICE void forward_sums(ForwardRow (&row)[2 * TILES], const float (&f)[TILES][NT][4], bool is_signed, bool largest) {
    for_each_element(f, [&](Element at) {
        ForwardRow &of = row[own_row(at)];
        const float x = f[at.m][at.nt][at.e];
        of.sum += is_signed ? fabsf(x) : x;
        if (BOTH && is_signed) of.sum_signed += x;
        if (largest) of.largest = fmaxf(of.largest, x);
    });
}

// Is the first sweep forward_sums_by_z?
template <class X, int PHI, int POST>
constexpr bool by_z = is_bf16<X> && PHI == PHI_SOFTPLUS && POST == FLASH_REWEIGHT;

// ln(1 + x) for x >= 0 by the fast logarithm; a small x is its own logarithm.
DEVICE float log1p_fast(float x) {
    return x < 0x1p-9f ? x - 0.5f * x * x : 0.6931471805599453f * log2_fast(1 + x);
}

// The first sweep of softplus, max(z, 0) + ln(1 + exp(-|z|)), from scores. Computes the sum of f, in the unit of z,
// with one logarithm for a row's part of the chunk, and the largest z, which belongs to the largest f.
template <class X, int PHI, bool MASKED, int TILES, int NT>
DEVICE void forward_sums_by_z(ForwardRow (&row)[2 * TILES], const float (&s)[TILES][NT][4],
                              const Hidden<MASKED, 2 * TILES> &hidden) {
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        float product = 0;    // of all 1 + exp(-|z|), minus 1, so that a small exp is not lost
        UNROLL
        for (int i = 0; i < 2 * NT; i++) {
            const Element at = {r / 2, i / 2, (r % 2) * 2 + i % 2};
            float z = s[at.m][at.nt][at.e] * row[r].scale + row[r].bias;
            if (is_hidden(hidden, at)) z = -INFINITY;
            float x = exp_of<X, PHI>(-fabsf(z));
            row[r].largest = fmaxf(row[r].largest, z);
            row[r].sum += fmaxf(z, 0);
            product = product * x + (product + x);
        }
        row[r].sum += log1p_fast(product) * unit<X, PHI>;
    }
}

// Finishes that sweep: the sum and the largest f. The largest f uses the same logarithm as the sum, not phi_at's
// polynomial: in a row of equal weights, it must equal their mean up to rounding (reweight_numbers).
template <class X, int PHI>
DEVICE void forward_total_by_z(ForwardRow &row) {
    const float z = row.largest, per_unit = 1 / unit<X, PHI>;
    row.sum *= per_unit;
    row.largest = fmaxf(z, 0) * per_unit + log1p_fast(exp_of<X, PHI>(-fabsf(z)));
}

// Combines the sums of the row's four lanes.
DEVICE void forward_total(ForwardRow &row, bool is_signed) {
    row.sum = row_sum(row.sum);
    row.sum_signed = is_signed ? row_sum(row.sum_signed) : row.sum;
    row.largest = row_max(row.largest);
}

template <int TILES, int NT>
DEVICE void forward_rectify(float (&f)[TILES][NT][4]) {
    for_each_element(f, [&](Element at) { f[at.m][at.nt][at.e] = max_nan(f[at.m][at.nt][at.e], 0); });
}

// f in, w out; also adds to their sums.
template <class X, int KNOWN, bool MASKED, int TILES, int NT>
DEVICE void forward_weights(float (&f)[TILES][NT][4], ForwardRow (&row)[2 * TILES], bool reweight, float P,
                            const Hidden<MASKED, 2 * TILES> &hidden) {
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        float w[4 * TILES];
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) w[e] = f[e / 4][nt][e % 4];
        if (reweight) {
            UNROLL
            for (int e = 0; e < 4 * TILES; e++) w[e] = reweight_base<X>(w[e], row[e / 2]);
            power<X, KNOWN>(w, P);
        } else {
            UNROLL
            for (int e = 0; e < 4 * TILES; e++) w[e] = w[e] * row[e / 2].factor - row[e / 2].mean;
        }
        round_to<X>(w);
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) {
            const Element at = {e / 4, nt, e % 4};
            w[e] = is_hidden(hidden, at) ? 0 : w[e];
            row[e / 2].left += fabsf(w[e]);
            if (!reweight) row[e / 2].signs += signed_as<float>(1, w[e]);
            f[at.m][at.nt][at.e] = w[e];
        }
    }
}

// Processes a chunk of keys for the warp's rows. k, v: the chunk's rows of the tiles   MASKED: not every row sees every
// key
template <bool MASKED, class X, int HS, int PHI, int POST>
DEVICE void forward_keys(ForwardWarp<X, HS, PHI, POST> &own, const X *k, const X *v, Chunk chunk,
                         const ForwardSweep &sweep, const FlashCall<X> &call) {
    typedef ForwardPlan<X, HS, PHI, POST> P;
    enum { TILES = P::TILES, NT = P::NT };
    float s[TILES][NT][4];
    Hidden<MASKED, 2 * TILES> hidden = {chunk, {}};
    if (MASKED && POST >= FLASH_RECENTER_L1) first_keys(hidden.first, call, chunk.own);
    set_zero(s);
    matmul_by_rows(s, own.q, k);
    if constexpr (by_z<X, PHI, POST>) {
        if (sweep.first) return forward_sums_by_z<X, PHI>(own.row, s, hidden);
    }
    if (sweep.relative && (sweep.first || POST < FLASH_RECENTER_L1)) {
        if (MASKED) forward_hide(s, chunk);
        if (MASKED && call.first) hide_before(s, -INFINITY, call, chunk);
        forward_shift<X, HS, PHI>(own.row, own.sum, s, sweep.adds);
    }
    forward_values<X, PHI, POST, MASKED>(phi_of<PHI>(call), s, own.row, chunk);
    if (MASKED && call.first) hide_before(s, 0, call, chunk);
    constexpr bool both = POST != FLASH_PLAIN || rectifies<PHI>;
    if (sweep.first || POST < FLASH_RECENTER_L1) forward_sums<both>(own.row, s, sweep.is_signed, sweep.reweight);
    if (POST == FLASH_PLAIN && rectifies<PHI> && sweep.is_signed && call.post == POST_RECTIFY) forward_rectify(s);
    if (!sweep.adds) return;
    if (POST >= FLASH_RECENTER_L1)
        with_power<POST>(call.power, [&](auto power) {
            forward_weights<X, power.value>(s, own.row, sweep.reweight, call.power, hidden);
        });
    matmul_by_columns<X, HS>(own.sum, s, v);
}

// ---------------------------------------------------------------------------------------------------------------------
// The start and the end of a row

// Computes the warp's rows, one per lane, and hands them to the lanes that own them. With `relative`, a row whose scale
// is negative has it negated (and the caller negates its query), so that the largest score has the largest z.
template <class X, int HS, int PHI, int POST>
DEVICE void forward_begin(ForwardWarp<X, HS, PHI, POST> &own, bool *negative, const FlashCall<X> &call,
                          QueryBlock block, bool relative) {
    enum { TILES = ForwardPlan<X, HS, PHI, POST>::TILES };
    const int phi = phi_of<PHI>(call), lane = threadIdx.x % 32;
    RowPlace at = place_of(call, block.b, block.h, block.warp_row + lane % (16 * TILES));
    float scale = row_scale(call.scale, at) * unit<X, PHI>, offset = row_offset(call.offset, at), bias = offset;
    *negative = relative && scale < 0;
    if (relative) {
        scale = fabsf(scale);
        bias = offset - least_maximum(phi, call.norm, at);
    }
    // With `first`, a row's first chunks may contain no visible key. The bias then keeps its initial value, which must
    // not be infinite.
    if (relative && call.first) bias = fminf(bias, 1e30f);
    const float number = phi_learns(phi) ? phi_number(phi, at, 0) : 1;
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        const int from = 8 * r + lane_row();
        ForwardRow row = {};
        row.scale = __shfl_sync(0xFFFFFFFFu, scale, from);
        row.bias = __shfl_sync(0xFFFFFFFFu, bias, from) * unit<X, PHI>;
        row.offset = __shfl_sync(0xFFFFFFFFu, offset, from) * unit<X, PHI>;
        row.number = phi_learns(phi) ? __shfl_sync(0xFFFFFFFFu, number, from) : 1;
        if (by_z<X, PHI, POST>) row.largest = -INFINITY;
        own.row[r] = row;
    }
    set_zero(own.sum);
}

// Negates each of the warp's rows of a tile whose lane passes `negative`.
template <int HS, int TILES, class X>
DEVICE void negate_rows(X *rows, bool negative) {
    int lane = threadIdx.x % 32;
    if (negative && lane < 16 * TILES) {
        X *row = rows + lane * tile_step<HS>;
        UNROLL_NOT
        for (int c = 0; c < HS; c++) set_float(row[c], -to_float(row[c]));
    }
    __syncwarp();
}

// Between two sweeps: from Z and the largest f, what turns f into w.
template <class X, int PHI, int POST>
DEVICE void forward_between(ForwardRow &row, const FlashCall<X> &call, RowPlace at, const ForwardSweep &sweep) {
    forward_total(row, sweep.is_signed);
    if constexpr (by_z<X, PHI, POST>) forward_total_by_z<X, PHI>(row);
    float inverse = row_inverse(call.norm, at, row.sum, row_shift(call, at, row.bias / unit<X, PHI>)), n = (float)at.n;
    row.factor = inverse;
    row.mean = 0;
    if (sweep.reweight) reweight_numbers<X>(&row.factor, &row.mean, inverse, row.largest, at.n);
    else if (at.n > POST_FROM) row.mean = row.sum_signed * inverse / n;
}

// Finishes a row: returns its accumulator's factor and writes its statistics, from which the backward pass makes a
// FlashRow:
//   bias, factor, mean, the sum of the signs (recenter-l1); or bias, 1/Z, the largest f, 1/sum w (reweight)
template <class X, int PHI, int POST>
DEVICE float forward_end(float4 *stats, ForwardRow &row, const FlashCall<X> &call, RowPlace at, bool *weight) {
    bool late = at.n > POST_FROM;
    float inverse = row_inverse(call.norm, at, row.sum, row_shift(call, at, row.bias / unit<X, PHI>)), left = row.sum,
          by = inverse;
    *stats = make_float4(row.bias, inverse, 0, 0);
    if (POST == FLASH_PLAIN) {
        if (call.post == POST_NEGATE) stats->y = by = -inverse;
        if (call.post == POST_RECTIFY) left = row.sum + row.sum_signed;
    } else if (POST == FLASH_RECENTER) {
        stats->z = row.mean = late ? row.sum_signed * inverse / (float)at.n : 0;
    } else if (is_reweight<X, POST>(call)) {
        left = row.left;
        stats->z = row.largest;
        stats->w = by = isnan(row.sum) ? row.sum : inverse_or_zero(left);
    } else {
        if (late) left = row.left;
        by = late ? inverse_or_zero(left) : 1;
        *stats = make_float4(row.bias, inverse * by, row.mean * by, row.signs);
    }
    *weight = row.sum != 0 && left != 0 && inverse != 0;
    return by;
}

// sum = sum · by - mean · prefix, then by = 1. prefix: the warp's first row and column
template <int HS, int TILES>
DEVICE void forward_recenter(float (&sum)[TILES][HS / 8][4], const ForwardRow (&row)[2 * TILES], float (&by)[2 * TILES],
                             TileSource<float> prefix) {
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        const int i = 8 * r + lane_row();
        if (i >= prefix.rows) continue;
        UNROLL
        for (int c = 0; c < HS / 8; c++) {
            if (8 * c >= prefix.columns) continue;
            float2 p = *(const float2 *)(prefix.p + i * prefix.stride + 8 * c + lane_column());
            float *x = sum[r / 2][c] + (r % 2) * 2;
            x[0] = x[0] * by[r] - row[r].mean * p.x;
            x[1] = x[1] * by[r] - row[r].mean * p.y;
        }
        by[r] = 1;
    }
}

// Finishes the warp's rows: writes their statistics and gets their accumulators' factors. Of the four lanes that share
// rows, each finishes one row.
template <class X, int HS, int PHI, int POST, int ROWS>
DEVICE void forward_ends(float (&by)[ROWS], ForwardWarp<X, HS, PHI, POST> &own, const FlashCall<X> &call, QueryBlock at,
                         bool is_signed) {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        ForwardRow &row = own.row[r];
        if (POST < FLASH_RECENTER_L1) {
            forward_total(row, is_signed);
        } else {
            row.left = row_sum(row.left);
            row.signs = row_sum(row.signs);
        }
    }
    const int mine = threadIdx.x % ROWS, i = at.warp_row + 8 * mine + lane_row();
    ForwardRow end = own.row[0];
    UNROLL
    for (int r = 1; r < ROWS; r++)
        if (mine == r) end = own.row[r];
    bool weight;
    float4 stats;
    float factor = forward_end<X, PHI, POST>(&stats, end, call, place_of(call, at.b, at.h, i), &weight);
    if (i < call.T && blockIdx.z == 0 && threadIdx.x % 4 < ROWS) {
        *(float4 *)(call.stats + ((size_t)blockIdx.y * call.T + i) * FLASH_STATS) = stats;
        if (!weight) atomicAdd(call.all_zero_rows, 1ull);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        const int from = 4 * lane_row() + r;
        by[r] = __shfl_sync(0xFFFFFFFFu, factor, from);
        if (POST == FLASH_RECENTER) own.row[r].mean = __shfl_sync(0xFFFFFFFFu, end.mean, from);
    }
}

// Writes the warp's rows of the output.
template <class X, int HS, int PHI, int POST>
DEVICE void forward_store(ForwardWarp<X, HS, PHI, POST> &own, const FlashCall<X> &call, QueryBlock at, bool is_signed) {
    enum { TILES = ForwardPlan<X, HS, PHI, POST>::TILES };
    const int column0 = blockIdx.z * HS, rows = call.T - at.warp_row, columns = call.VS - column0;
    float by[2 * TILES];
    forward_ends(by, own, call, at, is_signed);
    if (POST == FLASH_RECENTER) {
        const float *prefix = call.prefix + (((size_t)at.b * call.NKV + at.kv) * call.T + at.warp_row) * call.VS;
        forward_recenter<HS>(own.sum, own.row, by, {prefix + column0, (size_t)call.VS, rows, columns});
    }
    X *out = head_at(call, call.out, at.b, at.h) + at.warp_row * call.out.row + column0;
    X *rest = call.rest ? call.rest + ((size_t)blockIdx.y * call.T + at.warp_row) * call.VS + column0 : NULL;
    store_rows(TileTarget<X>{out, call.out.row, rows, columns}, own.sum, by, rest, call.VS);
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

// registers: at most 255 (flash_forward_kernel)
template <class X, int HS, int PHI, int POST>
KERNEL void flash_forward_kernel(const FlashCall<X> call) {
    typedef ForwardPlan<X, HS, PHI, POST> P;
    enum { STEP = tile_step<HS>, TWICE = POST >= FLASH_RECENTER_L1 };
    DYNAMIC_SHARED(X, shared);
    const QueryBlock at = query_block<P>(call);
    const bool relative = subtracts_maximum(phi_of<PHI>(call), call.norm), is_signed = phi_signed(phi_of<PHI>(call)),
               reweight = is_reweight<X, POST>(call);

    X *q_tile = shared, *warp_q = q_tile + (threadIdx.x / 32) * (16 * P::TILES * STEP);
    ForwardWarp<X, HS, PHI, POST> own;
    bool negative;
    forward_begin(own, &negative, call, at, relative);
    own.q.tile = warp_q;
    const X *q = head_at(call, call.q, at.b, at.h) + at.row0 * call.q.row;
    tile_load<P::OWN, HS, P::THREADS>(q_tile, TileSource<X>{q, call.q.row, call.T - at.row0, call.HS});
    const auto keys = key_tiles<X, HS, P, TWICE>(shared + P::OWN * STEP, true, call, at, blockIdx.z * HS);
    const int steps = steps_of(keys), adds_from = steps - keys.count;
    key_tiles_load(keys, 0, adds_from == 0);

    for (int step = 0; step < steps; step++) {
        tile_wait();
        if (step + 1 < steps) key_tiles_load(keys, step + 1, step + 1 >= adds_from);
        if (step == 0) {
            if (relative) negate_rows<HS, P::TILES>(warp_q, negative);
            own_keep(own.q);
        }
        const X *k = buffer_of<HS, P>(keys.k_tiles, step), *v = buffer_of<HS, P>(keys.v_tiles, step);
        const ForwardSweep sweep = {step < adds_from, step >= adds_from, relative, is_signed, reweight};
        const int key = key_of(keys, step);
        for_each_chunk<P>(call, at, key, [&](bool masked, int c) {
            const Chunk chunk = {at.warp_row, key + c};
            if (masked || !splits_chunks<HS>) forward_keys<true>(own, k + c * STEP, v + c * STEP, chunk, sweep, call);
            else forward_keys<false>(own, k + c * STEP, v + c * STEP, chunk, sweep, call);
        });
        if (TWICE && step == keys.count - 1) {
            UNROLL
            for (int r = 0; r < 2 * P::TILES; r++) {
                const int row = at.warp_row + 8 * r + lane_row();
                forward_between<X, PHI, POST>(own.row[r], call, place_of(call, at.b, at.h, row), sweep);
            }
        }
    }
    forward_store(own, call, at, is_signed);
}
#endif

// What the forward kernels of flash.cuh and flash90.cuh share: a row's numbers, from scores to weights, and the start
// and the end of a row. A warp owns TILES times 16 rows; its scores, s[TILES][NT][4], and its rows' output are
// accumulators of its matmuls.
//
// Tested by dev/tests/test_flash.py, through the kernels.
#ifndef ATTENTION_FLASH_FORWARD_ROW_CUH
#define ATTENTION_FLASH_FORWARD_ROW_CUH

#include "attention/flash_post.cuh"

// The rows that a warp owns, and their sums of weights times v, which has MORE columns than HS if the matmul sums the
// weights too.
template <int HS, int TILES, int MORE = 0>
struct ForwardRows {
    ForwardRow row[2 * TILES];
    float sum[TILES][(HS + MORE) / 8][4];
};

// What a sweep over the keys does with each chunk.
struct ForwardSweep {
    bool first, adds;            // does another sweep follow? does this one add to the output?
    bool relative, is_signed;    // of the normalizer
};

// The sweep that a step belongs to; the output grows from step adds_from on.
template <class X, int PHI>
DEVICE ForwardSweep forward_sweep(const FlashCall<X> &call, bool adds) {
    return {!adds, adds, subtracts_maximum(phi_of<PHI>(call), call.norm), phi_signed(phi_of<PHI>(call))};
}

// Is the row's output so far to be rescaled when a chunk has a larger z?
template <int POST>
DEVICE bool rescales(const ForwardSweep &sweep) {
    return sweep.relative && !Post<POST>::TWICE;
}

// ---------------------------------------------------------------------------------------------------------------------
// From scores to weights

// Sets to x every element whose key precedes the first key that its row sees. Call only if call.first is set.
template <class X, int TILES, int NT>
DEVICE void hide_before(float (&s)[TILES][NT][4], float x, const FlashCall<X> &call, Chunk chunk) {
    int first[2 * TILES];
    first_keys(first, call, chunk);
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

// Sets each row's bias to o minus the largest z so far, and rescales the row's numbers. by: the same factor, for the
// row's output so far
template <class X, int PHI, int TILES, int NT>
DEVICE void forward_shift(ForwardRow (&row)[2 * TILES], float (&by)[2 * TILES], const float (&s)[TILES][NT][4],
                          const FlashCall<X> &call) {
    float top[2 * TILES];
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) top[r] = -INFINITY;
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        UNROLL
        for (int r = 0; r < 2 * TILES; r++) {
            const float *pair = s[r / 2][nt] + (r % 2) * 2;
            top[r] = fmaxf(top[r], fmaxf(pair[0], pair[1]));
        }
    }
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) top[r] = row_max(top[r]);
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) {
        float bias = fminf(row[r].bias, -row[r].scale * top[r]);
        if (caps<PHI>(call))
            bias = fminf(row[r].bias, row[r].offset - capped(row[r].scale * top[r] + row[r].offset, call));
        by[r] = exp_of<X, PHI>(bias - row[r].bias);
        row[r].bias = bias;
        row[r].number = exp_of<X, PHI>(bias - row[r].offset);
        row[r].sum *= by[r];
        row[r].sum_signed *= by[r];
        row[r].largest *= by[r];
    }
}

// Multiplies each row's output so far by its factor.
template <int TILES, int CT>
DEVICE void forward_rescale(float (&sum)[TILES][CT][4], const float (&by)[2 * TILES]) {
    for_each_element(sum, [&](Element at) { sum[at.m][at.nt][at.e] *= by[own_row(at)]; });
}

// s: scores in, f out. TILES is 1.
template <int TILES, int NT>
DEVICE void forward_sigmoids(float (&s)[TILES][NT][4], const ForwardRow (&row)[2 * TILES]) {
    UNROLL
    for (int nt = 0; nt < NT; nt += 2) {
        UNROLL
        for (int r = 0; r < 2; r++) {
            float z[4];
            UNROLL
            for (int i = 0; i < 4; i++) z[i] = s[0][nt + i / 2][2 * r + i % 2] * row[r].scale + row[r].bias;
            sigmoids(z);
            UNROLL
            for (int i = 0; i < 4; i++) s[0][nt + i / 2][2 * r + i % 2] = z[i];
        }
    }
}

// s: scores in, f out, 0 where not visible. ROUNDS: to X
template <class X, int PHI, bool MASKED, Divides DIVIDES, bool ROUNDS, int TILES, int NT>
DEVICE void forward_values(float (&s)[TILES][NT][4], const ForwardRow (&row)[2 * TILES], Chunk chunk,
                           const FlashCall<X> &call) {
    if constexpr (PHI == PHI_SIGMOID && DIVIDES == SHARED && !MASKED && !ROUNDS) {
        forward_sigmoids(s, row);
    } else {
        UNROLL
        for (int nt = 0; nt < NT; nt++) {
            float z[4 * TILES], slope[4 * TILES];
            UNROLL
            for (int e = 0; e < 4 * TILES; e++)
                z[e] = phi_input<PHI>(s[e / 4][nt][e % 4], row[e / 2], row[e / 2].offset, call);
            phi_values<X, PHI, false, VALUE, DIVIDES == SHARED ? ALWAYS : DIVIDES>(phi_of<PHI>(call), z, slope, row);
            if (ROUNDS) round_to<X>(z);
            UNROLL
            for (int e = 0; e < 4 * TILES; e++)
                s[e / 4][nt][e % 4] = MASKED && !is_visible<false>(chunk, {e / 4, nt, e % 4}) ? 0 : z[e];
        }
    }
}

// BOTH: the sum of f is also needed, and differs from the sum of |f|. The chunk is summed before the row's earlier
// chunks are added, so that it need not wait for their rescaling.
template <bool BOTH, int TILES, int NT>
DEVICE void forward_sums(ForwardRow (&row)[2 * TILES], const float (&f)[TILES][NT][4], bool is_signed, bool largest) {
    float sum[2 * TILES] = {};
    for_each_element(f, [&](Element at) {
        ForwardRow &of = row[own_row(at)];
        const float x = f[at.m][at.nt][at.e];
        sum[own_row(at)] += is_signed ? fabsf(x) : x;
        if (BOTH && is_signed) of.sum_signed += x;
        if (largest) of.largest = fmaxf(of.largest, x);
    });
    UNROLL
    for (int r = 0; r < 2 * TILES; r++) row[r].sum += sum[r];
}

// Is the first sweep forward_sums_by_z?
template <class X, int PHI, int POST>
constexpr bool by_z = is_bf16<X> && PHI == PHI_SOFTPLUS && Post<POST>::POWERS;

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

// Finishes that sweep: the largest f, in the unit of z like the sum. It uses the same logarithm as the sum, not
// phi_at's polynomial: in a row of equal weights, it must equal their mean up to rounding (rounding_on_gpu).
template <class X, int PHI>
DEVICE void forward_total_by_z(ForwardRow &row) {
    const float z = row.largest;
    row.largest = fmaxf(z, 0) + log1p_fast(exp_of<X, PHI>(-fabsf(z))) * unit<X, PHI>;
}

// Combines the sums of the row's four lanes.
DEVICE void forward_total(ForwardRow &row, bool is_signed) {
    row.sum = row_sum(row.sum);
    row.sum_signed = is_signed ? row_sum(row.sum_signed) : row.sum;
    row.largest = row_max(row.largest);
}

template <int TILES, int NT>
DEVICE void forward_drop(float (&f)[TILES][NT][4]) {
    for_each_element(f, [&](Element at) { f[at.m][at.nt][at.e] = max_nan(f[at.m][at.nt][at.e], 0); });
}

// f (4) of a lane's columns nt in, w = r^P out, and along (2) = r^(P-1) (1 - r), which the matmul sums. TILES is 1.
template <class X, int POST, int KNOWN, bool MASKED, int N>
DEVICE void forward_along(float (&w)[N], uint32_t *along, ForwardRow (&row)[N / 2], int nt, float P,
                          const Hidden<MASKED, N / 2> &hidden) {
    float r[N], q[N];
    Post<POST>::template powers<X, KNOWN, false>(r, q, w, row, P);
    UNROLL
    for (int e = 0; e < N; e++) {
        w[e] = q[e] * r[e];
        q[e] = is_hidden(hidden, {0, nt, e}) ? 0 : q[e] - w[e];
    }
    along[0] = pack_bf16(q[0], q[1]);
    along[1] = pack_bf16(q[2], q[3]);
}

// f in, w out. SUMS: also adds to their sums. along: NULL, or for powers receives r^(P-1) (1 - r) as left operands
template <class X, int POST, int KNOWN, bool SUMS, bool MASKED, int TILES, int NT>
DEVICE void forward_weights(float (&f)[TILES][NT][4], ForwardRow (&row)[2 * TILES], float P,
                            const Hidden<MASKED, 2 * TILES> &hidden, uint32_t (*along)[4]) {
    UNROLL
    for (int nt = 0; nt < NT; nt++) {
        float w[4 * TILES];
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) w[e] = f[e / 4][nt][e % 4];
        if constexpr (TILES == 1 && Post<POST>::POWERS) {
            if (along) forward_along<X, POST, KNOWN>(w, along[nt / 2] + (nt % 2) * 2, row, nt, P, hidden);
            else Post<POST>::template weights<X, KNOWN>(w, row, P);
        } else {
            Post<POST>::template weights<X, KNOWN>(w, row, P);
        }
        if (SUMS) round_to<X>(w);
        UNROLL
        for (int e = 0; e < 4 * TILES; e++) {
            const Element at = {e / 4, nt, e % 4};
            w[e] = is_hidden(hidden, at) ? 0 : w[e];
            if (SUMS) row[e / 2].left += fabsf(w[e]);
            if (SUMS && Post<POST>::CENTERS) row[e / 2].signs += signed_as<float>(1, w[e]);
            f[at.m][at.nt][at.e] = w[e];
        }
    }
}

// Turns a chunk's scores into weights, in place, and adds them to the rows' numbers. MASKED: not every row sees every
// key   by: if rescales(), the factors of the rows' output so far   along: see forward_weights   between(): called when
// `by` is known and the weights are not   SUMS: otherwise the matmul sums the weights that it multiplies with v
template <bool MASKED, class X, int PHI, int POST, Divides DIVIDES, bool SUMS, int TILES, int NT, class Between>
DEVICE void forward_weigh(float (&s)[TILES][NT][4], ForwardRow (&row)[2 * TILES], float (&by)[2 * TILES], Chunk chunk,
                          const ForwardSweep &sweep, const FlashCall<X> &call, uint32_t (*along)[4], Between between) {
    Hidden<MASKED, 2 * TILES> hidden = {chunk, {}};
    if (MASKED && Post<POST>::TWICE) first_keys(hidden.first, call, chunk);
    if constexpr (by_z<X, PHI, POST>) {
        if (sweep.first) return forward_sums_by_z<X, PHI>(row, s, hidden);
    }
    if (sweep.relative && (sweep.first || !Post<POST>::TWICE)) {
        if (MASKED) forward_hide(s, chunk);
        if (MASKED && call.first) hide_before(s, -INFINITY, call, chunk);
        forward_shift<X, PHI>(row, by, s, call);
    }
    between();
    forward_values<X, PHI, MASKED, DIVIDES, (SUMS && rounds_values<PHI, POST>)>(s, row, chunk, call);
    if (MASKED && call.first) hide_before(s, 0, call, chunk);
    constexpr bool both = !Post<POST>::PLAIN || may_drop<PHI>;
    if (sweep.first || (SUMS && !Post<POST>::TWICE)) forward_sums<both>(row, s, sweep.is_signed, Post<POST>::POWERS);
    if (sweep.is_signed && Post<POST>::template drops<PHI>(call)) forward_drop(s);
    if constexpr (Post<POST>::TWICE) {
        if (!sweep.adds) return;
        with_power<POST, PHI>(call.power, [&](auto power) {
            forward_weights<X, POST, power.value, SUMS>(s, row, call.power, hidden, along);
        });
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The start and the end of a row

// The row that a lane computes for its warp.
template <int TILES, class X>
DEVICE RowPlace forward_row_of_lane(const FlashCall<X> &call, QueryBlock block) {
    return place_of(call, block.b, block.h, block.warp_row + (threadIdx.x % 32) % (16 * TILES));
}

// With `relative`, a row whose scale is negative has its scale and its query negated, so that the largest score has the
// largest z. Can there be such rows?
template <class X>
DEVICE bool forward_may_negate(const FlashCall<X> &call, bool relative) {
    return relative && call.scale.kind != SCALE_RSQRT_D;
}

// Is the lane's row one of them?
template <int TILES, class X>
DEVICE bool forward_negates(const FlashCall<X> &call, QueryBlock block, bool relative) {
    return relative && row_scale(call.scale, forward_row_of_lane<TILES>(call, block)) < 0;
}

// Computes the warp's rows, one per lane, and hands them to the lanes that own them.
template <int PHI, int POST, class X, int HS, int TILES, int MORE>
DEVICE void forward_begin(ForwardRows<HS, TILES, MORE> &own, const FlashCall<X> &call, QueryBlock block,
                          bool relative) {
    const int phi = phi_of<PHI>(call);
    RowPlace at = forward_row_of_lane<TILES>(call, block);
    float scale = row_scale(call.scale, at) * unit<X, PHI>, offset = row_offset(call.offset, at), bias = offset;
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

// 1/Z, in the unit of 1/f.
template <class X, int PHI>
DEVICE float forward_inverse(const ForwardRow &row, const FlashCall<X> &call, RowPlace at) {
    constexpr float natural = 1 / value_unit<X, PHI>;
    const float shift = row_shift(call, at, row.bias * (1 / unit<X, PHI>));
    return row_inverse(call.norm, at, row.sum * natural, shift) * natural;
}

// Between two sweeps: from Z and the largest f, what turns f into w.
template <class X, int PHI, int POST>
DEVICE void forward_between(ForwardRow &row, const FlashCall<X> &call, RowPlace at, const ForwardSweep &sweep) {
    forward_total(row, sweep.is_signed);
    if constexpr (by_z<X, PHI, POST>) forward_total_by_z<X, PHI>(row);
    Post<POST>::template between<X>(row, forward_inverse<X, PHI>(row, call, at), at.n);
}

// Finishes a row: returns its accumulator's factor and writes its statistics, from which the backward pass makes its
// row: bias, then 1/Z and what its post keeps.
template <class X, int PHI, int POST>
DEVICE float forward_end(float4 *stats, ForwardRow &row, const FlashCall<X> &call, RowPlace at, bool *weight) {
    float inverse = forward_inverse<X, PHI>(row, call, at), left = row.sum, by = inverse;
    *stats = make_float4(row.bias, inverse, 0, 0);
    Post<POST>::end(stats, &left, &by, row, call, at.n);
    *weight = row.sum != 0 && left != 0 && inverse != 0;
    return by;
}

// sum = sum · by - mean · prefix, then by = 1. prefix: the warp's first row and column
template <int HS, int TILES>
DEVICE void forward_center(float (&sum)[TILES][HS / 8][4], const ForwardRow (&row)[2 * TILES], float (&by)[2 * TILES],
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
template <int PHI, int POST, class X, int ROWS>
DEVICE void forward_ends(float (&by)[ROWS], ForwardRow (&row)[ROWS], const FlashCall<X> &call, QueryBlock at,
                         bool is_signed) {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        if (!Post<POST>::TWICE) {
            forward_total(row[r], is_signed);
        } else {
            row[r].left = row_sum(row[r].left);
            row[r].signs = row_sum(row[r].signs);
        }
    }
    const int mine = threadIdx.x % ROWS, i = at.warp_row + 8 * mine + lane_row();
    ForwardRow end = row[0];
    UNROLL
    for (int r = 1; r < ROWS; r++)
        if (mine == r) end = row[r];
    bool weight;
    float4 stats;
    float factor = forward_end<X, PHI, POST>(&stats, end, call, place_of(call, at.b, at.h, i), &weight);
    if (i < call.T && at.part == 0 && threadIdx.x % 4 < ROWS) {
        *(float4 *)(call.stats + ((size_t)at.head * call.T + i) * FLASH_STATS) = stats;
        if (!weight) atomicAdd(call.all_zero_rows, 1ull);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        const int from = 4 * lane_row() + r;
        by[r] = __shfl_sync(0xFFFFFFFFu, factor, from);
        if (Post<POST>::PREFIX) row[r].mean = __shfl_sync(0xFFFFFFFFu, end.mean, from);
    }
}

// Writes the warp's rows of the output.
template <int PHI, int POST, class X, int HS, int TILES, int MORE>
DEVICE void forward_store(ForwardRows<HS, TILES, MORE> &own, const FlashCall<X> &call, QueryBlock at, bool is_signed) {
    const int column0 = at.part * HS, rows = call.T - at.warp_row, columns = call.VS - column0;
    float by[2 * TILES];
    float (&sum)[TILES][HS / 8][4] = (float (&)[TILES][HS / 8][4]) own.sum;
    static_assert(TILES == 1 || MORE == 0, "otherwise the columns of a tile do not follow those of the one before");
    forward_ends<PHI, POST>(by, own.row, call, at, is_signed);
    if (Post<POST>::PREFIX) {
        const float *prefix = call.prefix + (((size_t)at.b * call.NKV + at.kv) * call.T + at.warp_row) * call.VS;
        forward_center<HS>(sum, own.row, by, {prefix + column0, (size_t)call.VS, rows, columns});
    }
    X *out = head_at(call, call.out, at.b, at.h) + at.warp_row * call.out.row + column0;
    X *rest = call.rest ? call.rest + ((size_t)at.head * call.T + at.warp_row) * call.VS + column0 : NULL;
    store_rows(TileTarget<X>{out, call.out.row, rows, columns}, sum, by, rest, call.VS);
}
#endif

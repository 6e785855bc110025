// What flash.cuh's main kernels need before they start (prefix sums of v; D and the like for each row), and the sums
// that follow them (gradients of the scalars).
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH_SUMS_CUH
#define ATTENTION_FLASH_SUMS_CUH

#include "attention/flash_post.cuh"
#include "cuda/vector.cuh"

// A block of the kernels that sum v covers SEGMENT positions of 4 SUM_LANES columns, and each of its SUM_GROUPS groups
// of threads takes SUM_ROWS positions. A thread loads four columns of all of these at once, which keeps memory busy,
// and stores 16 bytes per position, next to those of its neighbors.
enum { SEGMENT = 64, SUM_LANES = 16, SUM_GROUPS = 8, SUM_ROWS = SEGMENT / SUM_GROUPS };

// Four columns of a row, which one instruction loads.
template <class X>
struct alignas(4 * sizeof(X)) Four {
    uint32_t words[sizeof(X)];
};

DEVICE void add(float4 &sum, float4 x) {
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
}

DEVICE void add(float4 &sum, Four<float> x) {
    add(sum, make_float4(__uint_as_float(x.words[0]), __uint_as_float(x.words[1]), __uint_as_float(x.words[2]),
                         __uint_as_float(x.words[3])));
}

DEVICE void add(float4 &sum, Four<bf16> x) {
    add(sum,
        make_float4(unpack_low(x.words[0]), unpack_high(x.words[0]), unpack_low(x.words[1]), unpack_high(x.words[1])));
}

template <class X>
DEVICE Four<X> load_four(const X *p) {
    return *(const Four<X> *)p;
}

// registers: at most 24 (flash_window_kernel)
// registers: at most 48 (flash_segments_kernel)
// registers: at most 72 (flash_prefix_kernel, flash_rows_kernel)
// registers: at most 56 (flash_scalars_kernel, flash_positions_kernel)
// registers: at most 32 (flash_scalars_add_kernel, flash_positions_add_kernel)

// See flash_window_starts(). blockIdx.y is the sequence.
template <int THREADS>
KERNEL void flash_window_kernel(int32_t *first, const int32_t *starts, int T, int window) {
    const int t = blockIdx.x * THREADS + threadIdx.x;
    const size_t i = (size_t)blockIdx.y * T + t;
    if (t < T) first[i] = max(starts ? starts[i] : 0, t + 1 - window);
}

// The group's rows of v, from row t on. Rows past T, whose sums are discarded, are the last row.
template <class X>
DEVICE void load_rows(Four<X> (&rows)[SUM_ROWS], const FlashCall<X> &call, const X *v, int t) {
    UNROLL
    for (int r = 0; r < SUM_ROWS; r++) rows[r] = load_four(v + min(t + r, call.T - 1) * call.v.row);
}

// segments (B NKV, T/SEGMENT, VS): sums of v over SEGMENT positions
template <class X>
KERNEL void flash_segments_kernel(float *segments, const FlashCall<X> call) {
    SHARED_ARRAY(float4, sums, SUM_GROUPS * SUM_LANES);
    const int lane = threadIdx.x, group = threadIdx.y, c = (blockIdx.z * SUM_LANES + lane) * 4;
    float4 sum = {};
    if (c < call.VS) {
        Four<X> rows[SUM_ROWS];
        load_rows(rows, call, head_at(call, call.v, blockIdx.y / call.NKV, blockIdx.y % call.NKV) + c,
                  blockIdx.x * SEGMENT + group * SUM_ROWS);
        UNROLL
        for (int r = 0; r < SUM_ROWS; r++) add(sum, rows[r]);
    }
    sums[group * SUM_LANES + lane] = sum;
    __syncthreads();
    if (group > 0 || c >= call.VS) return;
    UNROLL
    for (int g = 1; g < SUM_GROUPS; g++) add(sum, sums[g * SUM_LANES + lane]);
    *(float4 *)(segments + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * call.VS + c) = sum;
}

// prefix (B NKV, T, VS): the sum of v_j over the keys j that row t sees. In a window, the rows of a segment begin at
// different keys before it. From the last of these, `seen`, on they see the same keys, whose sum they share; and going
// back from `seen`, each row adds the keys that the row after it does not see. So no sum is a difference, which would
// have the rounding of keys that the row does not see.
template <class X>
KERNEL void flash_prefix_kernel(float *prefix, const float *segments, const FlashCall<X> call) {
    // For each group: its share of the sum from `seen` to the segment; the same plus the group's own rows; the keys
    // before `seen` that its rows see and those of the next group do not.
    SHARED_ARRAY(float4, before, SUM_GROUPS * SUM_LANES);
    SHARED_ARRAY(float4, through, SUM_GROUPS * SUM_LANES);
    SHARED_ARRAY(float4, own, SUM_GROUPS * SUM_LANES);
    const int lane = threadIdx.x, group = threadIdx.y, c = (blockIdx.z * SUM_LANES + lane) * 4,
              b = blockIdx.y / call.NKV, segment = blockIdx.x * SEGMENT, start = segment + group * SUM_ROWS;
    const X *v = head_at(call, call.v, b, blockIdx.y % call.NKV) + c;
    // The last row that sees the keys from `seen` to the segment. Later ones begin within it.
    int last = segment + SEGMENT - 1;
    while (first_key(call, b, last) > segment) last--;
    int seen = first_key(call, b, last);
    auto first_of = [&](int t) { return first_key(call, b, min(t, last)); };
    auto add_keys = [&](float4 &sum, int from, int to) {
        UNROLL_NOT
        for (int j = from; j < to; j++) add(sum, load_four(v + j * call.v.row));
    };
    Four<X> rows[SUM_ROWS];
    float4 sum = {};
    if (c < call.VS) {
        add_keys(sum, first_of(start), first_of(start + SUM_ROWS));
        own[group * SUM_LANES + lane] = sum;
        sum = {};
        load_rows(rows, call, v, start);
        // The rest of one segment, then whole segments.
        const int whole = (seen + SEGMENT - 1) / SEGMENT;
        UNROLL_NOT
        for (int t = seen + group; t < whole * SEGMENT; t += SUM_GROUPS) add(sum, load_four(v + t * call.v.row));
        UNROLL_NOT
        for (int i = whole + group; i < (int)blockIdx.x; i += SUM_GROUPS)
            add(sum, load_four(segments + ((size_t)blockIdx.y * gridDim.x + i) * call.VS + c));
        before[group * SUM_LANES + lane] = sum;
        UNROLL
        for (int r = 0; r < SUM_ROWS; r++) add(sum, rows[r]);
        through[group * SUM_LANES + lane] = sum;
    }
    __syncthreads();
    if (c >= call.VS) return;
    sum = {};
    UNROLL
    for (int g = 0; g < SUM_GROUPS; g++) add(sum, (g < group ? through : before)[g * SUM_LANES + lane]);
    float4 *to = (float4 *)(prefix + ((size_t)blockIdx.y * call.T + start) * call.VS + c);
    UNROLL
    for (int r = 0; r < SUM_ROWS && start + r < call.T; r++) {
        const int t = start + r, first = first_key(call, b, t);
        if (first > segment && first != seen) {    // as where a document begins within the segment
            sum = {};
            add_keys(sum, first, t);
            seen = first;
        }
        add(sum, rows[r]);
        to[r * (call.VS / 4)] = sum;
    }
    if (first_of(start) == first_of(last)) return;
    sum = {};
    for (int g = SUM_GROUPS - 1; g > group; g--) add(sum, own[g * SUM_LANES + lane]);
    UNROLL_NOT
    for (int t = min(min(start + SUM_ROWS - 1, last), call.T - 1); t >= start; t--) {
        add_keys(sum, first_of(t), first_of(t + 1));
        float4 &row = to[(t - start) * (call.VS / 4)];
        add(row, sum);
    }
}

// What the backward pass needs to know about row n, from its statistics (forward_end), D = dO · O and `along`: for the
// posts that recenter, dO · sum_{j <= i} v_j; for powers, dO · call.along. in_unit: the unit of z in the instance.
template <class X>
DEVICE FlashRow backward_row(const FlashCall<X> &call, RowPlace at, float4 stats, float D, float along, float in_unit) {
    const float shift = row_shift(call, at, stats.x / in_unit);
    RowNumbers x = {row_scale(call.scale, at) * in_unit,    stats.x, phi_number(call.phi, at, shift), stats, D, along,
                    value_unit_of(call, in_unit) / in_unit, at.n,    norm_is_sum(call.norm)};
    // dq_of_head() divides by it, and sums of dq that small are still normal numbers. As a factor of anything else,
    // this is as good as 0, with one exception: where z would be 0, relu's slope is that of a z beside 0, on the side
    // of the score's sign.
    if (call.dq_sums && call.g && fabsf(x.scale) < 0x1p-40f) x.scale = copysignf(0x1p-40f, x.scale);
    return with_post(call.post, [&](auto post) { return Post<post.value>::row(x, call); });
}

// The rows of a part of v's columns.
template <class X>
DEVICE size_t rows_of_all(const FlashCall<X> &call) {
    return (size_t)call.B * call.NH * call.T;
}

// Of flash_rows_kernel: lanes that read a row, threads, and rows of which a lane loads its part at once.
enum { ROW_LANES = 8, ROW_THREADS = 128, ROWS_AT_ONCE = 4 };

template <class X>
DEVICE float dot_16(uint4 a, uint4 b) {
    Pack<X> x, y;
    float sum = 0;
    unpack_16(x, a);
    unpack_16(y, b);
    UNROLL
    for (int e = 0; e < Pack<X>::size; e++) sum += x.x[e] * y.x[e];
    return sum;
}

// The sum over the ROW_LANES lanes of a row.
DEVICE float lanes_sum(float x) {
    UNROLL
    for (int step = ROW_LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

// blockIdx.y is the sequence and head, and blockIdx.z the part of v's columns. A warp has 32 rows: ROW_LANES lanes read
// one of them at a time, but each lane computes one.
template <class X>
KERNEL void flash_rows_kernel(const FlashCall<X> call, float in_unit) {
    enum { AT_ONCE = 32 / ROW_LANES };
    const int lane = threadIdx.x % 32, b = blockIdx.y / call.NH, h = blockIdx.y % call.NH,
              first = blockIdx.x * ROW_THREADS + (threadIdx.x / 32) * 32,
              own = first + (lane % ROW_LANES) * AT_ONCE + lane / ROW_LANES;
    const size_t rows = (size_t)blockIdx.y * call.T,
                 prefixes = ((size_t)b * call.NKV + h / (call.NH / call.NKV)) * call.T;
    const X *dout = head_at(call, call.dout, b, h), *out = head_at(call, call.out, b, h);
    const int from_column = blockIdx.z * call.HS,
              end_column = blockIdx.z + 1 < gridDim.z ? from_column + call.HS : call.VS;
    float own_D = 0, own_along = 0;
    // Past T, a lane stays in range and still takes part in the shuffles.
    auto row_of = [&](int i) {
        const int row = first + i * AT_ONCE + lane / ROW_LANES;
        return row < call.T ? row : call.T - 1;
    };
    if (call.VS == ROW_LANES * Pack<X>::size && !call.rest && !call.along && !call.prefix) {
        UNROLL
        for (int from = 0; from < ROW_LANES; from += ROWS_AT_ONCE) {
            uint4 x[ROWS_AT_ONCE], y[ROWS_AT_ONCE];
            UNROLL
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                const int t = row_of(from + i), c = (lane % ROW_LANES) * Pack<X>::size;
                x[i] = load_16(dout + t * call.dout.row + c);
                y[i] = load_16(out + t * call.out.row + c);
            }
            UNROLL
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                const float D = lanes_sum(dot_16<X>(x[i], y[i]));
                if (from + i == lane % ROW_LANES) own_D = D;
            }
        }
    } else {
        UNROLL
        for (int i = 0; i < ROW_LANES; i++) {
            const int t = row_of(i);
            float D = 0, along = 0;
            for (int c = from_column + (lane % ROW_LANES) * Pack<X>::size; c < end_column;
                 c += ROW_LANES * Pack<X>::size) {
                const uint4 x = load_16(dout + t * call.dout.row + c);
                D += dot_16<X>(x, load_16(out + t * call.out.row + c));
                if (call.rest) D += dot_16<X>(x, load_16(call.rest + (rows + t) * call.VS + c));
                if (call.along) along += dot_16<X>(x, load_16(call.along + (rows + t) * call.VS + c));
                if (!call.prefix) continue;
                Pack<X> values;
                unpack_16(values, x);
                UNROLL
                for (int e = 0; e < Pack<X>::size; e++)
                    along += values.x[e] * call.prefix[(prefixes + t) * call.VS + c + e];
            }
            D = lanes_sum(D);
            along = lanes_sum(along);
            if (i != lane % ROW_LANES) continue;
            own_D = D;
            own_along = along;
        }
    }
    if (own < call.T && call.cap > 0 && h == 0)
        call.offsets[(size_t)b * call.T + own] = row_offset(call.offset, place_of(call, b, h, own));
    if (own < call.T)
        call.rows[blockIdx.z * rows_of_all(call) + rows + own] =
            backward_row(call, place_of(call, b, h, own), *(const float4 *)(call.stats + (rows + own) * FLASH_STATS),
                         own_D, own_along, in_unit);
}

// The gradients of the scalars take two stages: each block writes partial sums over a fixed number of rows or heads,
// and a second kernel adds these in order. Their number depends only on the shape, so every GPU gives the same bits.
enum { SCALAR_THREADS = 256, SCALAR_ROWS = 1024, POSITION_THREADS = 128, POSITION_HEADS = 16 };

// What row t of head h contributes to the gradients of the scalars that act in `stage`: the derivative of the loss with
// respect to its c (g), to phi's number, or to the ln of norm_extra (-D norm_extra/Z, with D as norm sees it). i: the
// index in call.rows
template <class X>
DEVICE float row_grad(const FlashCall<X> &call, int stage, RowPlace at, size_t i, float in_unit) {
    if (stage == IN_SCALE) return call.g[i];
    if (stage == IN_PHI) return call.by_number[i];
    const float4 stats = *(const float4 *)(call.stats + i * FLASH_STATS);
    float D = 0;
    UNROLL_NOT
    for (int part = 0; part < call.parts; part++)
        D += with_post(call.post, [&](auto post) {
            return Post<post.value>::norm_D(call.rows[part * rows_of_all(call) + i], call);
        });
    D = with_post(call.post, [&](auto post) { return Post<post.value>::norm_sum(D, call.rows[i], stats, call, at.n); });
    return -D * norm_extra(call.norm, at, row_shift(call, at, stats.x / in_unit));
}

// partials (SCALAR_COUNT,NH,gridDim.x): for each per-head scalar whose gradient is needed, the sum of row_slope
// row_grad over SCALAR_ROWS rows of the batch from row blockIdx.x SCALAR_ROWS on
template <class X>
KERNEL void flash_scalars_kernel(double *partials, ScalarGrads wanted, const FlashCall<X> call, float in_unit) {
    int h = blockIdx.y, first = blockIdx.x * SCALAR_ROWS, rows = call.B * call.T,
        last = first + SCALAR_ROWS < rows ? first + SCALAR_ROWS : rows;
    double sums[SCALAR_COUNT] = {};
    for (int i = first + threadIdx.x; i < last; i += SCALAR_THREADS) {
        int t = i % call.T;
        size_t at = ((size_t)(i / call.T) * call.NH + h) * call.T + t;
        RowPlace place = place_of(call, i / call.T, h, t);
        UNROLL
        for (int x = 0; x < SCALAR_COUNT; x++)
            if (wanted.of[x] && scalar_width(x) == PER_HEAD)
                sums[x] += row_slope(x, call.scale, place) * row_grad(call, scalar_stage(x), place, at, in_unit);
    }
    UNROLL
    for (int x = 0; x < SCALAR_COUNT; x++) {
        if (!wanted.of[x] || scalar_width(x) != PER_HEAD) continue;
        double sum = block_sum_double<SCALAR_THREADS>(sums[x]);
        if (threadIdx.x == 0) partials[((size_t)x * gridDim.y + h) * gridDim.x + blockIdx.x] = sum;
    }
}

// grads.of[x][h] += the partial sums (SCALAR_COUNT,NH,pieces) of each per-head scalar x. One block per head.
template <int THREADS>
KERNEL void flash_scalars_add_kernel(ScalarGrads grads, const double *partials, int pieces) {
    UNROLL
    for (int x = 0; x < SCALAR_COUNT; x++) {
        if (!grads.of[x] || scalar_width(x) != PER_HEAD) continue;
        const double *from = partials + ((size_t)x * gridDim.x + blockIdx.x) * pieces;
        double sum = 0;
        for (int j = threadIdx.x; j < pieces; j += THREADS) sum += from[j];
        sum = block_sum_double<THREADS>(sum);
        if (threadIdx.x == 0) grads.of[x][blockIdx.x] += (float)sum;
    }
}

// For a per-position scalar, the sum of row_slope row_grad over the rows with n visible keys, in the batch's heads from
// `from` to `end`: of a sequence's rows from n - 1 on, every parts-th from the part-th on. From one row to the next,
// the visible keys grow by at most one. (Without `first`, only row n - 1 has n of them.)
template <class X>
DEVICE double position_sum(int scalar, int n, int part, int parts, int from, int end, const FlashCall<X> &call,
                           float in_unit) {
    double sum = 0;
    for (int i = from, next; i < end; i = next) {    // the heads of a sequence together
        const int b = i / call.NH;
        next = min((b + 1) * call.NH, end);
        for (int t = n - 1 + part, step; t < (call.first ? call.T : n); t += step) {
            const int visible = t + 1 - first_key(call, b, t);
            step = visible < n && parts == 1 ? n - visible : parts;
            for (int head = i; head < next && visible == n; head++) {
                RowPlace place = place_of(call, b, head % call.NH, t);
                float grad = row_grad(call, scalar_stage(scalar), place, (size_t)head * call.T + t, in_unit);
                sum += row_slope(scalar, call.scale, place) * grad;
            }
        }
    }
    return sum;
}

// partials (gridDim.y,positions): these sums for n from 1 to `positions`, over POSITION_HEADS of the batch's heads. One
// thread per n. In a window of so many keys, nearly all rows see as many: a last block sums these.
template <class X>
KERNEL void flash_positions_kernel(double *partials, int scalar, int positions, bool in_window, const FlashCall<X> call,
                                   float in_unit) {
    const int from = blockIdx.y * POSITION_HEADS, end = min(from + POSITION_HEADS, call.B * call.NH);
    double *to = partials + (size_t)blockIdx.y * positions;
    if (in_window && blockIdx.x == gridDim.x - 1) {
        double sum = position_sum(scalar, positions, threadIdx.x, POSITION_THREADS, from, end, call, in_unit);
        sum = block_sum_double<POSITION_THREADS>(sum);
        if (threadIdx.x == 0) to[positions - 1] = sum;
        return;
    }
    const int n = blockIdx.x * POSITION_THREADS + threadIdx.x + 1;
    if (n + in_window <= positions) to[n - 1] = position_sum(scalar, n, 0, 1, from, end, call, in_unit);
}

// grads[t] += its partial sums (pieces,positions)
template <int THREADS>
KERNEL void flash_positions_add_kernel(float *grads, const double *partials, int pieces, int positions) {
    int t = blockIdx.x * THREADS + threadIdx.x;
    if (t >= positions) return;
    double sum = 0;
    for (int i = 0; i < pieces; i++) sum += partials[(size_t)i * positions + t];
    grads[t] += (float)sum;
}
#endif

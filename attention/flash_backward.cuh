// The backward kernels of flash.cuh, whose header has the formulas: dq by row blocks, dk and dv by key blocks.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH_BACKWARD_CUH
#define ATTENTION_FLASH_BACKWARD_CUH

#include "attention/flash_post.cuh"

// With powers, does dq have a second accumulator, which `less` multiplies at the end? Two float32 accumulators of 128
// columns do not fit in registers; there, a separate sweep computes `less` first.
template <class X, int HS, int POST>
constexpr bool splits_dq = Post<POST>::POWERS && (is_bf16<X> || HS <= 64);

template <class X, int HS, int POST>
constexpr bool less_first = Post<POST>::POWERS && !splits_dq<X, HS, POST>;

// Have chunks in which all scores are visible separate code without masks, as in the forward pass?
template <class X, int HS, int POST>
constexpr bool splits_chunks_of_dq = is_bf16<X> || HS < 64 || !Post<POST>::POWERS;

// With a wide v, a chunk is a whole tile.
template <class X, int HS, int POST, bool WIDE>
constexpr int rows_chunk = WIDE && !less_first<X, HS, POST> ? 32 : 16;

template <class X, int HS, int POST, bool WIDE>
constexpr int rows_stream() {
    if (WIDE) return rows_chunk<X, HS, POST, WIDE>;
    return is_bf16<X> ? 64 : 32;
}

template <class X, int HS, int PHI, int POST, bool WIDE>
struct RowsPlan
    : FlashPlan<HS <= 64 ? own_tiles<X, PHI> : 1, rows_stream<X, HS, POST, WIDE>(), rows_chunk<X, HS, POST, WIDE>,
                is_bf16<X> && HS <= 64 && !Post<POST>::POWERS && PHI != PHI_MISH> {};

// Two accumulators stay in registers here. mish has the longest formulas and leaves no room for two tiles.
template <class X, int HS, int PHI, bool WIDE>
struct KeysPlan : FlashPlan<HS <= 64 && PHI != PHI_MISH ? own_tiles<X, PHI> : 1, is_bf16<X> && !WIDE ? 64 : 32,
                            WIDE ? 32 : 16, false> {};

// ---------------------------------------------------------------------------------------------------------------------
// Elementwise

// From the scores s (N) and d = dO · v, in place: d becomes df as back() or, FOR_90, back90() of the post says. Also
// writes f, its slope and the weights w. row: see phi_values   offset: the same rows' cap_offset()
template <class X, int PHI, int POST, bool BY_COLUMN, int KNOWN = 0, bool FOR_90 = false, int N, class Row,
          class Offset>
DEVICE void backward_values(float (&d)[N], float (&f)[N], float (&slope)[N], float (&w)[N], const float (&s)[N],
                            const Row *row, Offset offset, const FlashCall<X> &call) {
    const int phi = phi_of<PHI>(call);
    const bool is_signed = phi_signed(phi);
    UNROLL
    for (int e = 0; e < N; e++) {
        const int r = row_of<BY_COLUMN>(e);
        f[e] = phi_input<PHI>(s[e], row[r], offset(r), call);
    }
    constexpr Wanted wanted = BY_COLUMN || Post<POST>::TWICE ? BOTH : SLOPE;
    phi_values<X, PHI, BY_COLUMN, wanted, FOR_90 ? ALWAYS : NEVER>(phi, f, slope, row);
    times_cap_slopes<PHI, BY_COLUMN>(slope, s, row, offset, call);
    UNROLL
    for (int e = 0; e < N; e++) w[e] = f[e];
    if (BY_COLUMN && rounds_values<PHI, POST>) round_to<X>(w);    // only BY_COLUMN needs the weights
    if constexpr (FOR_90) Post<POST>::template back90<PHI, BY_COLUMN, KNOWN>(d, w, f, row, call);
    else Post<POST>::template back<X, PHI, BY_COLUMN, KNOWN>(d, w, f, row, is_signed, call);
}

// d += dO · v over all columns of a wide v, HS at a time, for the rows that the block owns and a tile of the other
// side. All threads of the block must call it. own_tile, tile: in shared memory
template <class Plan, class X, int HS, int TILES, int NT>
DEVICE void matmul_wide(float (&d)[TILES][NT][4], const Own<X, HS, TILES, false> &own, X *own_tile, X *tile,
                        TileSource<X> own_rows, TileSource<X> rows) {
    for (int c = 0; c < rows.columns; c += HS) {
        __syncthreads();    // the previous columns are no longer needed
        tile_load<Plan::OWN, HS, Plan::THREADS>(own_tile, columns_from(own_rows, c));
        tile_load<Plan::STREAM, HS, Plan::THREADS>(tile, columns_from(rows, c));
        copy_async_commit();
        tile_wait();
        matmul_by_rows(d, own, tile);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// dq, by row blocks

// A row's sums for the gradient of phi's number: of df df/dnumber or, with powers, the two with t and with sgn(f), as
// for dq.
struct NumberSum {
    float t, sign;
};

// What a warp keeps in registers: its rows, their sums, and their queries and output gradients.
template <class X, int HS, int PHI, int POST, bool WIDE>
struct DqWarp {
    typedef RowsPlan<X, HS, PHI, POST, WIDE> P;
    typedef typename Post<POST>::Row Row;
    enum { TILES = P::TILES, ROWS = 2 * TILES };
    Row row[ROWS];
    float g[ROWS], less_sum[ROWS];    // of dz s; of t (1 - r)
    NumberSum number[ROWS];
    float dq[TILES][HS / 8][4];
    float less_dq[splits_dq<X, HS, POST> ? TILES : 1][HS / 8][4];    // the second accumulator, see splits_dq
    Own<X, HS, TILES, P::KEEP> q, dout;
};

// With powers: d becomes t phi'(z), along becomes sgn(f) phi'(z), and t (1 - r) is added to less_sum; see flash.cuh.
// hidden: not visible
template <class X, int PHI, int POST, int KNOWN, int N, class Offset>
DEVICE void dq_powers(float (&d)[N], float (&along)[N], float *less_sum, NumberSum *number_sum, const float (&s)[N],
                      const bool (&hidden)[N], const typename Post<POST>::Row *row, Offset offset,
                      const FlashCall<X> &call) {
    const int phi = phi_of<PHI>(call);
    const bool is_signed = phi_signed(phi);
    float f[N], r[N], q[N];
    UNROLL
    for (int e = 0; e < N; e++) f[e] = phi_input<PHI>(s[e], row[e / 2], offset(e / 2), call);
    phi_values<X, PHI, false, VALUE>(phi, f, along, row);
    times_cap_slopes<PHI, false>(along, s, row, offset, call);
    Post<POST>::template powers<X, KNOWN, false>(r, q, f, row, call.power);
    UNROLL
    for (int e = 0; e < N; e++) {
        float t = hidden[e] ? 0 : q[e] * (d[e] - row[e / 2].D);
        less_sum[e / 2] += t * (1 - r[e]);
        d[e] = t * along[e];
        if (phi_learns(phi) && !hidden[e]) {
            float z = phi_input<PHI>(s[e], row[e / 2], offset(e / 2), call) * (1 / unit<X, PHI>);
            float by_number = phi_slope_by_number(phi, z, row[e / 2].number, f[e], along[e]);
            number_sum[e / 2].t += t * by_number;
            number_sum[e / 2].sign += is_signed ? signed_as<X>(by_number, f[e]) : by_number;
        }
        if (is_signed) along[e] = signed_as<X>(along[e], f[e]);
        if (hidden[e]) d[e] = along[e] = 0;
    }
}

// d and along of a chunk become what dq_powers says, or, with less_first, d becomes dz in the second sweep.
// first: the first of two sweeps, which only adds to own.less_sum
template <bool MASKED, class X, int HS, int PHI, int POST, bool WIDE, int TILES, int NT, int ALONG>
DEVICE void dq_values_powers(float (&d)[TILES][NT][4], float (&along)[ALONG][NT][4],
                             DqWarp<X, HS, PHI, POST, WIDE> &own, const float (&s)[TILES][NT][4],
                             const Hidden<MASKED, 2 * TILES> &hidden, bool first, const FlashCall<X> &call) {
    with_power<POST, PHI>(call.power, [&](auto power) {
        UNROLL
        for (int i = 0; i < TILES * NT; i++) {
            const int m = i / NT, nt = i % NT;
            auto offset = [&](int r) {
                return cap_offset<PHI>(call, hidden.chunk.b, own_position(hidden.chunk, {m, nt, 2 * r}));
            };
            bool hides[4];
            UNROLL
            for (int e = 0; e < 4; e++) hides[e] = is_hidden(hidden, {m, nt, e});
            dq_powers<X, PHI, POST, power.value>(d[m][nt], along[m][nt], own.less_sum + 2 * m, own.number + 2 * m,
                                                 s[m][nt], hides, own.row + 2 * m, offset, call);
        }
    });
    if (!less_first<X, HS, POST> || first) return;
    for_each_element(d, [&](Element at) {
        const auto &row = own.row[own_row(at)];
        float &x = d[at.m][at.nt][at.e];
        x = Post<POST>::factor(row, call) * x - row.less * along[at.m][at.nt][at.e];
    });
}

// d becomes dz, for posts without powers.
template <bool MASKED, class X, int HS, int PHI, int POST, bool WIDE, int TILES, int NT>
DEVICE void dq_values(float (&d)[TILES][NT][4], DqWarp<X, HS, PHI, POST, WIDE> &own, const float (&s)[TILES][NT][4],
                      const Hidden<MASKED, 2 * TILES> &hidden, const FlashCall<X> &call) {
    const int phi = phi_of<PHI>(call);
    UNROLL
    for (int i = 0; i < TILES * NT; i++) {
        const int m = i / NT, nt = i % NT;
        float f[4], slope[4], w[4];
        auto offset = [&](int r) {
            return cap_offset<PHI>(call, hidden.chunk.b, own_position(hidden.chunk, {m, nt, 2 * r}));
        };
        backward_values<X, PHI, POST, false>(d[m][nt], f, slope, w, s[m][nt], own.row + 2 * m, offset, call);
        UNROLL
        for (int e = 0; e < 4 && phi_learns(phi); e++) {
            const int r = 2 * m + e / 2;
            const float z = phi_input<PHI>(s[m][nt][e], own.row[r], offset(e / 2), call) * (1 / unit<X, PHI>);
            if (is_hidden(hidden, {m, nt, e})) continue;
            own.number[r].t += d[m][nt][e] * phi_slope_by_number(phi, z, own.row[r].number, f[e], slope[e]);
        }
        UNROLL
        for (int e = 0; e < 4; e++) d[m][nt][e] = is_hidden(hidden, {m, nt, e}) ? 0 : d[m][nt][e] * slope[e];
    }
}

// Processes a chunk of keys, as forward_keys does. d: dO · v if WIDE, otherwise uninitialized   first: see
// dq_values_powers
template <bool MASKED, class X, int HS, int PHI, int POST, bool WIDE, int TILES, int NT>
DEVICE void dq_keys(DqWarp<X, HS, PHI, POST, WIDE> &own, float (&d)[TILES][NT][4], const X *k, const X *v, Chunk chunk,
                    bool first, const FlashCall<X> &call) {
    float s[TILES][NT][4], along[Post<POST>::POWERS ? TILES : 1][NT][4];
    Hidden<MASKED, 2 * TILES> hidden = {chunk, {}};
    if (MASKED) first_keys(hidden.first, call, chunk);
    set_zero(s);
    matmul_by_rows(s, own.q, k);
    if (!WIDE) {
        set_zero(d);
        matmul_by_rows(d, own.dout, v);
    }
    if constexpr (Post<POST>::POWERS) {
        dq_values_powers<MASKED>(d, along, own, s, hidden, first, call);
        if (less_first<X, HS, POST> && first) return;
    } else {
        dq_values<MASKED>(d, own, s, hidden, call);
        if (call.g)
            for_each_element(d, [&](Element at) { own.g[own_row(at)] += d[at.m][at.nt][at.e] * s[at.m][at.nt][at.e]; });
    }
    matmul_by_columns<X, HS>(own.dq, d, k);
    if constexpr (splits_dq<X, HS, POST>) {
        if (Post<POST>::has_less(call)) matmul_by_columns<X, HS>(own.less_dq, along, k);
    }
}

// Finishes a row with powers, whose part of dq in this lane is at `half`: applies K and less.
template <int CT>
DEVICE void dq_combine(float (&dq)[CT][4], const float (&less_dq)[CT][4], int half, float K, float less) {
    UNROLL
    for (int c = 0; c < CT; c++) {
        UNROLL
        for (int e = 2 * half; e < 2 * half + 2; e++) dq[c][e] = K * dq[c][e] - less * less_dq[c][e];
    }
}

// A lane's part of g_i = sum_j dz s = q_i · sum_j dz k_j. q: the lane's part of the row in the tile
template <class X, int CT>
DEVICE float dot_q(const float (&dq)[CT][4], int half, const X *q) {
    float sum = 0;
    UNROLL
    for (int c = 0; c < CT; c++)
        sum += dq[c][2 * half] * to_float(q[8 * c]) + dq[c][2 * half + 1] * to_float(q[8 * c + 1]);
    return sum;
}

template <class X, int HS, int PHI, int POST, bool WIDE>
DEVICE void dq_begin(DqWarp<X, HS, PHI, POST, WIDE> &own, const typename Post<POST>::Row *rows,
                     const FlashCall<X> &call, QueryBlock at) {
    typedef typename Post<POST>::Row Row;
    UNROLL
    for (int r = 0; r < own.ROWS; r++) {
        const int i = at.warp_row + 8 * r + lane_row();
        own.row[r] = i < call.T ? rows[i] : Row();
        own.g[r] = own.less_sum[r] = 0;
        own.number[r] = {};
        Post<POST>::for_dq(own.row[r]);
    }
    set_zero(own.dq);
    set_zero(own.less_dq);
}

// Between two sweeps: less of the warp's rows.
template <class X, int HS, int PHI, int POST, bool WIDE>
DEVICE void dq_between(DqWarp<X, HS, PHI, POST, WIDE> &own, typename Post<POST>::Row *rows, const FlashCall<X> &call,
                       QueryBlock at) {
    UNROLL
    for (int r = 0; r < own.ROWS; r++) {
        const int i = at.warp_row + 8 * r + lane_row();
        own.row[r].less = Post<POST>::less_of(own.less_sum[r], own.row[r], call, place_of(call, at.b, at.h, i).n);
        if (i < call.T && threadIdx.x % 4 == 0) rows[i].less = own.row[r].less;
        own.number[r] = {};    // only the second sweep counts
    }
}

// Finishes the warp's rows and writes dq, and where they are needed less, g and by_number.
template <class X, int HS, int PHI, int POST, bool WIDE>
DEVICE void dq_end(DqWarp<X, HS, PHI, POST, WIDE> &own, typename Post<POST>::Row *rows, const FlashCall<X> &call,
                   QueryBlock at) {
    typedef typename Post<POST>::Row Row;
    float by[DqWarp<X, HS, PHI, POST, WIDE>::ROWS];
    UNROLL
    for (int r = 0; r < own.ROWS; r++) {
        const int i = at.warp_row + 8 * r + lane_row();
        const bool writes = i < call.T && threadIdx.x % 4 == 0;
        const size_t index = (size_t)blockIdx.y * call.T + i;
        by[r] = own.row[r].scale * slope_unit<X, PHI>;
        float less = 0;
        if constexpr (less_first<X, HS, POST>) less = own.row[r].less;
        if constexpr (splits_dq<X, HS, POST>) {
            Row end = i < call.T ? rows[i] : Row();    // reloaded, to save registers
            less = Post<POST>::less_of(own.less_sum[r], end, call, place_of(call, at.b, at.h, i).n);
            dq_combine(own.dq[r / 2], own.less_dq[r / 2], r % 2, Post<POST>::factor(end, call), less);
            __syncwarp();
            if (writes) rows[i].less = less;
        }
        if (Post<POST>::POWERS && call.g) {
            const X *q = own.q.tile + (8 * r + lane_row()) * tile_step<HS> + lane_column();
            own.g[r] = dot_q(own.dq[r / 2], r % 2, q);
        }
        float of_row = row_sum(own.g[r]) * value_unit<X, PHI>;
        if (call.g && writes) call.g[index] = of_row;
        if (!phi_learns(phi_of<PHI>(call)) || !call.by_number) continue;
        of_row = row_sum(own.number[r].t);
        if constexpr (Post<POST>::POWERS)
            of_row = Post<POST>::factor(own.row[r], call) * of_row - less * row_sum(own.number[r].sign);
        if (writes) call.by_number[index] = of_row;
    }
    X *dq = head_at(call, call.dq, at.b, at.h) + at.warp_row * call.dq.row;
    store_rows(TileTarget<X>{dq, call.dq.row, call.T - at.warp_row, call.HS}, own.dq, by);
}

// registers: at most 255 (flash_dq_kernel, flash_dkv_kernel)
template <class X, int HS, int PHI, int POST, bool WIDE>
KERNEL void flash_dq_kernel(const FlashCall<X> call) {
    typedef RowsPlan<X, HS, PHI, POST, WIDE> P;
    enum { STEP = tile_step<HS>, TILE = P::OWN * STEP };
    DYNAMIC_SHARED(X, shared);
    const QueryBlock at = query_block<P>(call);
    auto *rows = (typename Post<POST>::Row *)(call.rows + (size_t)blockIdx.y * call.T);
    bool two_sweeps = false;
    if constexpr (less_first<X, HS, POST>) two_sweeps = Post<POST>::has_less(call);

    X *q_tile = shared, *dout_tile = q_tile + TILE;
    const int warp = threadIdx.x / 32;
    DqWarp<X, HS, PHI, POST, WIDE> own;
    dq_begin(own, rows, call, at);
    own.q.tile = q_tile + warp * (16 * P::TILES * STEP);
    own.dout.tile = dout_tile + warp * (16 * P::TILES * STEP);
    const TileSource<X> q = {head_at(call, call.q, at.b, at.h), call.q.row, call.T, call.HS};
    const TileSource<X> dout = {head_at(call, call.dout, at.b, at.h), call.dout.row, call.T, call.VS};
    tile_load<P::OWN, HS, P::THREADS>(q_tile, rows_from(q, at.row0));
    if (!WIDE) tile_load<P::OWN, HS, P::THREADS>(dout_tile, rows_from(dout, at.row0));
    const auto keys = key_tiles<X, HS, P, less_first<X, HS, POST>>(dout_tile + TILE, two_sweeps, call, at, 0);
    const int steps = steps_of(keys);
    key_tiles_load(keys, 0, !WIDE);

    for (int step = 0; step < steps; step++) {
        tile_wait();
        if (step + 1 < steps) key_tiles_load(keys, step + 1, !WIDE);
        if (step == 0) {
            own_keep(own.q);
            if (!WIDE) own_keep(own.dout);
        }
        const X *k = buffer_of<HS, P>(keys.k_tiles, step), *v = buffer_of<HS, P>(keys.v_tiles, step);
        const int key = key_of(keys, step);
        const bool first = two_sweeps && step < keys.count;
        float d[P::TILES][P::NT][4];
        if constexpr (WIDE) {
            set_zero(d);
            matmul_wide<P>(d, own.dout, dout_tile, keys.v_tiles, rows_from(dout, at.row0), rows_from(keys.v, key));
        }
        for_each_chunk<P>(call, at, key, [&](bool masked, int c) {
            const Chunk chunk = {at.warp_row, key + c, (int)(blockIdx.y / call.NH)};
            if (masked || !splits_chunks_of_dq<X, HS, POST>)
                dq_keys<true>(own, d, k + c * STEP, v + c * STEP, chunk, first, call);
            else dq_keys<false>(own, d, k + c * STEP, v + c * STEP, chunk, first, call);
        });
        if constexpr (less_first<X, HS, POST>)
            if (two_sweeps && step == keys.count - 1) dq_between(own, rows, call, at);
    }
    dq_end(own, rows, call, at);
}

// ---------------------------------------------------------------------------------------------------------------------
// dk and dv, by key blocks

enum KeysMode { KEYS_BOTH, KEYS_DK_WIDE, KEYS_DV };    // dk and dv; only dk, of a wide v; only HS columns of dv

// What a warp keeps in registers: the gradients of its keys and values, and their operands.
template <class X, int HS, int PHI, int POST, int MODE>
struct DkvWarp {
    typedef KeysPlan<X, HS, PHI, MODE == KEYS_DK_WIDE> P;
    float dk[P::TILES][HS / 8][4], dv[P::TILES][HS / 8][4];
    Own<X, HS, P::TILES, P::KEEP> k, v;
};

// A block of keys; with more than HS columns of v, blockIdx.z is the block of columns.
struct KeyBlock {
    int b, kv;               // sequence and key-value head
    int key0, warp_key;      // the first key of the block, of the warp
    int column0, columns;    // the first column of v, and how many there are from there
};

template <class Plan, int HS, class X>
DEVICE KeyBlock key_block(const FlashCall<X> &call, int thread, int of_grid) {
    KeyBlock at;
    at.b = of_grid / call.NKV;
    at.kv = of_grid % call.NKV;
    at.key0 = blockIdx.x * Plan::OWN;
    at.warp_key = at.key0 + (thread / 32) * 16 * Plan::TILES;
    at.column0 = blockIdx.z * HS;
    at.columns = call.VS - at.column0;
    return at;
}

// The values of a block of keys.
template <class X>
DEVICE TileSource<X> values_of(const FlashCall<X> &call, KeyBlock at) {
    const TileSource<X> v = {head_at(call, call.v, at.b, at.kv) + at.column0, call.v.row, call.T, at.columns};
    return rows_from(v, at.key0);
}

// The queries, output gradients and rows of a head, in tiles of STREAM rows in double buffers.
template <class X, int HS, class Plan>
struct QueryTiles {
    X *q_tiles, *dout_tiles;    // (2,STREAM,HS) each, in shared memory
    float4 *row_tiles;          // (2,2,STREAM): halves of rows
    TileSource<X> q, dout;      // of the whole sequence
    int group, member;          // how many heads share the keys; which of them this is
};

// Starts loading the tile from row row0 on; the output gradients unless v is wide.
template <bool WIDE, class X, int HS, class Plan>
DEVICE void query_tiles_load(const QueryTiles<X, HS, Plan> &tiles, int row0, const FlashCall<X> &call) {
    enum { ROWS = Plan::STREAM };
    const int step = row0 / ROWS;
    tile_load<ROWS, HS, Plan::THREADS>(buffer_of<HS, Plan>(tiles.q_tiles, step), rows_from(tiles.q, row0));
    if (!WIDE)
        tile_load<ROWS, HS, Plan::THREADS>(buffer_of<HS, Plan>(tiles.dout_tiles, step), rows_from(tiles.dout, row0));
    static_assert(2 * ROWS <= Plan::THREADS, "each thread copies at most half a row");
    const int thread = anew(threadIdx.x);
    if (thread < 2 * ROWS) {
        const int half = thread / ROWS, row = row0 + thread % ROWS;
        const size_t head = (size_t)anew(blockIdx.y) * tiles.group + tiles.member;
        const float4 *halves = (const float4 *)(call.rows + head * call.T);
        const bool valid = row < call.T;
        copy_async_16(tiles.row_tiles + (step % 2) * 2 * ROWS + thread, halves + (valid ? 2 * row + half : 0), valid);
    }
    copy_async_commit();
}

// Sets to 0 the weights and gradients of rows whose first key comes after the lane's. Call only if call.first is set.
template <class X, int TILES, int NT>
DEVICE void keys_hide_before(float (&w)[TILES][NT][4], float (&d)[TILES][NT][4], const FlashCall<X> &call,
                             Chunk chunk) {
    UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int nt = i / 2, column = i % 2, first = first_key(call, chunk.b, other_position(chunk, {0, nt, column}));
        UNROLL
        for (int r = 0; r < 2 * TILES; r++) {
            const Element at = {r / 2, nt, (r % 2) * 2 + column};
            if (own_position(chunk, at) < first) w[at.m][nt][at.e] = d[at.m][nt][at.e] = 0;
        }
    }
}

// The two rows that a lane has among the 8 queries from `from` on.
template <class Row>
DEVICE void rows_of_lane(Row (&row)[2], const float4 *row_tile, int from, int ROWS) {
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int at = from + lane_column() + i;
        row[i] = row_from<Row>(row_tile[at], row_tile[ROWS + at]);
    }
}

// Scores s become weights, and d = dO · v becomes dz times the row's scale. Both are 0 where hides(Element).
// rows(nt): the lane's two rows, as by rows_of_lane   chunk: where they are, for a cap
template <int PHI, int POST, bool FOR_90, class X, int TILES, int NT, class Rows, class Hides>
DEVICE void dkv_values(float (&s)[TILES][NT][4], float (&d)[TILES][NT][4], Rows rows, Hides hides, Chunk chunk,
                       const FlashCall<X> &call) {
    with_power<POST, PHI>(call.power, [&](auto power) {
        UNROLL
        for (int nt = 0; nt < NT; nt++) {
            const auto *row = rows(nt);
            auto offset = [&](int r) { return cap_offset<PHI>(call, chunk.b, other_position(chunk, {0, nt, r})); };
            UNROLL
            for (int m = 0; m < TILES; m++) {
                float f[4], slope[4], w[4];
                backward_values<X, PHI, POST, true, power.value, FOR_90>(d[m][nt], f, slope, w, s[m][nt], row, offset,
                                                                         call);
                UNROLL
                for (int e = 0; e < 4; e++) {
                    bool hidden = hides(Element{m, nt, e});
                    float dz = d[m][nt][e] * slope[e];
                    if (!FOR_90 && Post<POST>::CENTERS) dz *= row[e % 2].scale * slope_unit<X, PHI>;
                    if constexpr (FOR_90 && !scales_D<PHI, POST>) dz *= Post<POST>::template by_dz<PHI>(row[e % 2]);
                    s[m][nt][e] = hidden ? 0 : w[e];
                    d[m][nt][e] = hidden ? 0 : dz;
                }
            }
        }
    });
}

// Processes a chunk of queries for the warp's keys. q, dout, row_tile: the chunk's rows of the tiles   d: see dq_keys
// MASKED: not every query sees every key
template <bool MASKED, class X, int HS, int PHI, int POST, int MODE, int TILES, int NT>
DEVICE void dkv_rows(DkvWarp<X, HS, PHI, POST, MODE> &own, float (&d)[TILES][NT][4], const X *q, const X *dout,
                     const float4 *row_tile, Chunk chunk, const FlashCall<X> &call) {
    typedef typename DkvWarp<X, HS, PHI, POST, MODE>::P P;
    float s[TILES][NT][4];
    set_zero(s);
    matmul_by_rows(s, own.k, q);
    if (MODE != KEYS_DK_WIDE) set_zero(d);
    if (MODE == KEYS_BOTH) matmul_by_rows(d, own.v, dout);
    auto hides = [&](Element at) { return MASKED && !is_visible<true>(chunk, at); };
    typename Post<POST>::Row row[2];
    auto rows = [&](int nt) {
        rows_of_lane(row, row_tile, 8 * nt, P::STREAM);
        return row;
    };
    dkv_values<PHI, POST, false>(s, d, rows, hides, chunk, call);
    if (MASKED && call.first) keys_hide_before(s, d, call, chunk);
    if (MODE != KEYS_DK_WIDE) matmul_by_columns<X, HS>(own.dv, s, dout);
    if (MODE != KEYS_DV) matmul_by_columns<X, HS>(own.dk, d, q);
}

// Processes a tile of queries from row0 on, chunk by chunk.
template <class X, int HS, int PHI, int POST, int MODE, int TILES, int NT>
DEVICE void dkv_tile(DkvWarp<X, HS, PHI, POST, MODE> &own, float (&d)[TILES][NT][4],
                     const QueryTiles<X, HS, KeysPlan<X, HS, PHI, MODE == KEYS_DK_WIDE>> &tiles, int row0, KeyBlock at,
                     const FlashCall<X> &call) {
    typedef KeysPlan<X, HS, PHI, MODE == KEYS_DK_WIDE> P;
    enum { STEP = tile_step<HS> };
    const int step = row0 / P::STREAM;
    const X *q = buffer_of<HS, P>(tiles.q_tiles, step), *dout = buffer_of<HS, P>(tiles.dout_tiles, step);
    const float4 *row_tile = tiles.row_tiles + (step % 2) * 2 * P::STREAM;
    UNROLL_NOT
    for (int c = 0; c < P::STREAM && row0 + c < call.T; c += P::CHUNK) {
        if (row0 + c + P::CHUNK <= at.warp_key) continue;
        bool masked = row0 + c < at.warp_key + 16 * TILES - 1;
        if (call.first) {
            if (at.warp_key + 16 * TILES <= first_key(call, at.b, row0 + c)) continue;
            masked = masked || at.warp_key < first_key(call, at.b, row0 + c + P::CHUNK - 1);
        }
        const Chunk chunk = {at.warp_key, row0 + c, at.b};
        if (masked) dkv_rows<true>(own, d, q + c * STEP, dout + c * STEP, row_tile + c, chunk, call);
        else dkv_rows<false>(own, d, q + c * STEP, dout + c * STEP, row_tile + c, chunk, call);
    }
}

// Writes the gradients of the warp's keys. The place is recomputed, so that it occupies no registers in the loop.
template <class X, int HS, int PHI, int POST, int MODE>
DEVICE void dkv_store(const DkvWarp<X, HS, PHI, POST, MODE> &own, const FlashCall<X> &call) {
    typedef typename DkvWarp<X, HS, PHI, POST, MODE>::P P;
    const KeyBlock at = key_block<P, HS>(call, anew(threadIdx.x), anew(blockIdx.y));
    const int rows = call.T - at.warp_key;
    float by[2 * P::TILES];
    UNROLL
    for (int r = 0; r < 2 * P::TILES; r++) by[r] = 1;
    X *dk = head_at(call, call.dk, at.b, at.kv) + at.warp_key * call.dk.row;
    X *dv = head_at(call, call.dv, at.b, at.kv) + at.warp_key * call.dv.row + at.column0;
    if (MODE != KEYS_DV) store_rows(TileTarget<X>{dk, call.dk.row, rows, call.HS}, own.dk, by);
    if (MODE != KEYS_DK_WIDE) store_rows(TileTarget<X>{dv, call.dv.row, rows, at.columns}, own.dv, by);
}

template <class X, int HS, int PHI, int POST, int MODE>
KERNEL void flash_dkv_kernel(const FlashCall<X> call) {
    typedef KeysPlan<X, HS, PHI, MODE == KEYS_DK_WIDE> P;
    enum { STEP = tile_step<HS>, ROWS = P::STREAM, TILE = P::OWN * STEP, WIDE = MODE == KEYS_DK_WIDE };
    DYNAMIC_SHARED(X, shared);
    const KeyBlock at = key_block<P, HS>(call, threadIdx.x, blockIdx.y);
    const int T = call.T, group = call.NH / call.NKV, first = (at.key0 / ROWS) * ROWS;
    // Rows that start after these keys see none of them, and neither do later rows.
    auto sees_none = [&](int row) { return call.first && at.key0 + P::OWN <= first_key(call, at.b, row); };

    X *k_tile = shared, *v_tile = k_tile + TILE, *q_tiles = v_tile + TILE, *dout_tiles = q_tiles + 2 * ROWS * STEP;
    const int warp = threadIdx.x / 32;
    DkvWarp<X, HS, PHI, POST, MODE> own;
    set_zero(own.dk);
    set_zero(own.dv);
    own.k.tile = k_tile + warp * (16 * P::TILES * STEP);
    own.v.tile = v_tile + warp * (16 * P::TILES * STEP);
    const TileSource<X> k = {head_at(call, call.k, at.b, at.kv), call.k.row, T, call.HS};
    tile_load<P::OWN, HS, P::THREADS>(k_tile, rows_from(k, at.key0));
    if (MODE == KEYS_BOTH) tile_load<P::OWN, HS, P::THREADS>(v_tile, values_of(call, at));

    UNROLL_NOT
    for (int member = 0; member < group; member++) {    // the query heads that share these keys
        const int h = at.kv * group + member;
        const X *dout = head_at(call, call.dout, at.b, h) + at.column0;
        const QueryTiles<X, HS, P> tiles = {q_tiles,
                                            dout_tiles,
                                            (float4 *)(dout_tiles + 2 * ROWS * STEP),
                                            {head_at(call, call.q, at.b, h), call.q.row, T, call.HS},
                                            {dout, call.dout.row, T, at.columns},
                                            group,
                                            member};
        if (member > 0) __syncthreads();    // the previous head's tiles are free
        query_tiles_load<WIDE>(tiles, first, call);
        for (int row0 = first; row0 < T && !sees_none(row0); row0 += ROWS) {
            tile_wait();
            if (row0 + ROWS < T && !sees_none(row0 + ROWS)) query_tiles_load<WIDE>(tiles, row0 + ROWS, call);
            if (row0 == first && member == 0) {
                own_keep(own.k);
                if (MODE == KEYS_BOTH) own_keep(own.v);
            }
            float d[P::TILES][P::NT][4];
            if constexpr (WIDE) {
                set_zero(d);
                const KeyBlock again =
                    key_block<P, HS>(call, threadIdx.x, anew(blockIdx.y));    // not kept in registers
                matmul_wide<P>(d, own.v, v_tile, dout_tiles, values_of(call, again), rows_from(tiles.dout, row0));
            }
            dkv_tile(own, d, tiles, row0, at, call);
        }
    }
    dkv_store(own, call);
}
#endif

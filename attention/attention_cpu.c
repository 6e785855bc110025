// Attention for the whole family in blocks of rows: tiles, caches and threads. What happens in a row is in rows.c.
// Limits: any T, any head size; float, or double with REAL=double. Tested by test_gpt2.c (against the reference),
// dev/tests/test_gradients.c (against finite differences) and dev/tests/test_attention.c (properties that hold for any
// input).
#include "attention/attention_cpu.h"

#include <omp.h>
#include <string.h>

#include "attention/l2.h"
#include "runtime/size.h"

// A block of query rows needs their scores for all visible keys in the backward pass, which makes BLOCK · T numbers per
// thread. The forward pass goes through the keys in chunks where the normalizer allows it (row_in_parts); the scores of
// a chunk, which are a few keys of many rows, fit into the second-level cache.
enum { BLOCK = 64, CHUNK_ROWS = 128, CHUNK_KEYS = 512 };

// The stride between rows of scores, for whole tiles: an odd number of cache lines, so that the entries of a column
// spread over the cache. With a power of two they collide, and matmuls that read the scores by columns take twice as
// long.
static size_t row_step(size_t T) {
    return (tiled(T) / 16 | 1) * 16;
}

// The query heads that share keys and values are a group, which one thread processes if there are enough groups.
// Otherwise (for example, few sequences of the gated unit with its single head), the threads share each head: forward
// its blocks of rows, backward the matmuls and the rows of each block.

// The number of keys of a sequence.
static size_t key_count(AttentionShape shape) {
    return shape.past + shape.T;
}

static bool groups_in_parallel(AttentionShape shape, int threads) {
    return shape.B * shape.NKV >= (size_t)threads;
}

// A thread's share of the scratch: a block of scores and of dA, its row buffers, the left inputs (a block of q and of
// dout, as they are and transposed, and the weights or dS in bfloat16) and the sums of a block. The forward pass has
// scores, q, rounded and sums.
typedef struct {
    real *scores, *dscores, *buffers, *q, *dout, *q_transposed, *dout_transposed, *rounded, *sums;
    size_t rows, keys, step;    // the most rows of a block, and keys of a chunk; from one row of scores to the next
} Part;

// The elements in which a row of scores in bfloat16 fits.
static size_t rounded_row(size_t step) {
    return step * sizeof(uint16_t) / sizeof(real);
}

// The most keys of a block of rows, in whole tiles.
static size_t block_keys(AttentionShape shape, size_t rows) {
    size_t keys = tiled(key_count(shape));
    return shape.window && shape.window < keys ? smaller(keys, tiled(shape.window + rows + TILE - 2)) : keys;
}

// The next `count` elements of the scratch, or NULL if it is only measured.
static real *take(real *scratch, size_t *used, size_t count) {
    real *taken = scratch ? scratch + *used : NULL;
    *used += count;
    return taken;
}

// in_parts: does the pass go through the keys in chunks?
static Part forward_part(AttentionShape shape, bool in_parts, real *scratch, size_t *used) {
    Part p = {.rows = smaller(tiled(shape.T), in_parts ? CHUNK_ROWS : BLOCK)};
    size_t keys = block_keys(shape, p.rows);
    p.keys = in_parts ? smaller(keys, CHUNK_KEYS) : keys;
    p.step = row_step(p.keys);
    p.scores = take(scratch, used, p.rows * p.step);
    p.q = take(scratch, used, p.rows * tiled(shape.HS));
    p.sums = take(scratch, used, p.rows * tiled(shape.VS));
    p.rounded = take(scratch, used, p.rows * rounded_row(p.step));
    return p;
}

static Part backward_part(AttentionShape shape, real *scratch, size_t *used) {
    size_t HS = tiled(shape.HS), VS = tiled(shape.VS);
    Part p = {.rows = smaller(tiled(shape.T), BLOCK)};
    p.keys = block_keys(shape, p.rows);
    p.step = row_step(p.keys);
    p.scores = take(scratch, used, p.rows * p.step);
    p.dscores = take(scratch, used, p.rows * p.step);
    p.buffers = take(scratch, used, ROW_BUFFERS * p.step);
    p.q = take(scratch, used, p.rows * HS);
    p.q_transposed = take(scratch, used, p.rows * HS);
    p.dout = take(scratch, used, p.rows * VS);
    p.dout_transposed = take(scratch, used, p.rows * VS);
    p.sums = take(scratch, used, p.rows * larger(HS, VS));
    p.rounded = take(scratch, used, p.rows * rounded_row(p.step));
    return p;
}

static size_t thread_scratch(AttentionShape shape) {
    size_t in_parts = 0, whole = 0, backward = 0;
    forward_part(shape, true, NULL, &in_parts);
    forward_part(shape, false, NULL, &whole);
    backward_part(shape, NULL, &backward);
    return larger(larger(in_parts, whole), backward);
}

// The calling thread's.   thread: its number in the region that shares the scratch
static Part my_forward_part(AttentionShape shape, real *scratch, int thread) {
    size_t used = (size_t)thread * thread_scratch(shape);
    return forward_part(shape, row_in_parts(shape.normalizer), scratch, &used);
}

static Part my_backward_part(AttentionShape shape, real *scratch, int thread) {
    size_t used = (size_t)thread * thread_scratch(shape);
    return backward_part(shape, scratch, &used);
}

// What each row saves for the gradients of the learned scalars: the derivative of the loss with respect to its c (g =
// sum_j dz s), to phi's number, and to the ln of norm_extra.
enum { ROW_GRADS = SCALAR_STAGES };

static size_t row_grads_size(AttentionShape shape) {
    return ((shape.B * shape.NH * shape.T * ROW_GRADS + 15) / 16) * 16;
}

// Attention's scratch: each thread's part, then the row gradients, then space for the copies of one group or, if each
// thread processes groups by itself, of a group per thread.   threads: omp_get_max_threads() outside parallel regions;
// inside one, it depends on OMP_NUM_THREADS's list for nested regions
static real *row_grads(AttentionShape shape, real *scratch, int threads) {
    return scratch + (size_t)threads * thread_scratch(shape);
}

// The keys and values of the group being processed, in up to three forms, and their gradients.
static size_t packed_scratch(size_t keys, size_t width) {
    return tiled(keys) * tiled(width);
}

static size_t group_scratch(AttentionShape shape) {
    size_t keys = key_count(shape);
    return 3 * packed_scratch(keys, shape.HS) + 2 * packed_scratch(keys, shape.VS);
}

size_t attention_scratch(AttentionShape shape, int threads) {
    size_t groups = groups_in_parallel(shape, threads) ? (size_t)threads : 1;
    return (size_t)threads * thread_scratch(shape) + row_grads_size(shape) + groups * group_scratch(shape);
}

// What the heads of a group share: k (keys,HS) and v (keys,VS), packed in the forms that the pass reads, and their
// gradients. Each block of rows reads them again.
typedef struct {
    size_t b, kv;
    const void *k, *v;                  // for scores: k transposed (HS,keys); for out: v (keys,VS)
    const void *k_for_dq, *v_for_dA;    // k (keys,HS); v transposed (VS,keys)
    real *dk, *dv;                      // as tiled_sums() writes them
} Group;

static size_t group_offset(const Group *group, size_t keys, size_t row, size_t head) {
    return group->b * keys * row + group->kv * head;
}

static Group group_at(size_t i, AttentionShape shape) {
    return (Group){.b = i / shape.NKV, .kv = i % shape.NKV};
}

// groups: the space for the groups of all threads in attention's scratch
static Group packed_group(size_t i, const AttentionInput *in, AttentionShape shape, real *groups, bool backward) {
    Group group = group_at(i, shape);
    size_t keys = key_count(shape), HS = shape.HS, VS = shape.VS, used = 0;
    Matrix k = as_stored(in->k.p + group_offset(&group, keys, in->k.row, in->k.head), in->k.row), k_turned = k;
    Matrix v = as_stored(in->v.p + group_offset(&group, keys, in->v.row, in->v.head), in->v.row), v_turned = v;
    k_turned.transposed = v_turned.transposed = true;
    groups += (size_t)omp_get_thread_num() * group_scratch(shape);
    real *for_scores = take(groups, &used, packed_scratch(keys, HS)),
         *of_v = take(groups, &used, packed_scratch(keys, VS));
    group.k = for_scores;
    tiles_pack(in->tiles, for_scores, k_turned, HS, keys);
    if (!backward) {
        group.v = of_v;
        tiles_pack(in->tiles, of_v, v, keys, VS);
        return group;
    }
    real *for_dq = take(groups, &used, packed_scratch(keys, HS));
    group.v_for_dA = of_v;
    group.k_for_dq = for_dq;
    tiles_pack(in->tiles, of_v, v_turned, VS, keys);
    tiles_pack(in->tiles, for_dq, k, keys, HS);
    group.dk = take(groups, &used, packed_scratch(keys, HS));
    group.dv = take(groups, &used, packed_scratch(keys, VS));
    return group;
}

// Query head j of a group: where its position 0 lies in each array. q's row stride is that of the whole array.
typedef struct {
    size_t h;
    const Group *group;
    const real *q;
    const int32_t *first;    // (T) or NULL
    size_t rows, out;        // offsets in (B,NH,T), in (B,T,NH,VS)
} Head;

static Head head_of(AttentionShape shape, const AttentionInput *in, const Group *group, size_t j) {
    size_t b = group->b, t = b * shape.T, h = group->kv * (shape.NH / shape.NKV) + j;
    return (Head){.h = h,
                  .group = group,
                  .q = in->q.p + t * in->q.row + h * in->q.head,
                  .first = in->first ? in->first + t : NULL,
                  .rows = (b * shape.NH + h) * shape.T,
                  .out = (t * shape.NH + h) * shape.VS};
}

static size_t first_key(const Head *head, size_t t) {
    return head->first ? (size_t)head->first[t] : 0;
}

// The rows of a head from `from` on. Their scores cover `keys` keys from key `low` on, or a chunk of them: those of
// these keys from `begin` to `end`, whose scores begin in column 0. first: of the first row, NULL if all see key 0.
typedef struct {
    size_t from, rows, low, keys, begin, end;
    const int32_t *first;
} RowBlock;

static RowBlock block_at(const Head *head, size_t from, size_t rows, AttentionShape shape) {
    size_t low = first_key(head, from);
    if (rows > shape.T - from) rows = shape.T - from;
    low = (low / TILE) * TILE;
    size_t keys = shape.past + from + rows - low;
    return (RowBlock){from, rows, low, keys, 0, keys, head->first ? head->first + from : NULL};
}

// In a block's scores, each row has `hidden` keys before its n visible ones, and possibly others after them.
static Row block_row(AttentionShape shape, Scalars scalars, const Head *head, RowBlock block, size_t r,
                     size_t *hidden) {
    size_t t = block.from + r, first = first_key(head, t), end = shape.past + t + 1;
    *hidden = first - block.low;
    return row_at(shape.normalizer, scalars, head->h, end - first, shape.cached ? shape.before + end : key_count(shape),
                  shape.L, shape.HS);
}

static void hide(real *scores, const Row *row, size_t hidden, size_t keys) {
    size_t end = hidden + (size_t)row->at.n;
    memset(scores, 0, hidden * sizeof *scores);
    memset(scores + end, 0, (keys - end) * sizeof *scores);
}

// ---- matmuls of tiles, for a block of rows and its chunk of keys. `share`: by all threads.

// Where the keys of the chunk end, and in which tile they begin, that any of the 32 rows of a block from row r on sees.
static size_t visible_end(RowBlock at, size_t r) {
    size_t end = at.rows - r < TILE ? at.keys : at.keys - (at.rows - r - TILE);
    return smaller(end, at.end);
}

// Of all chunks
static size_t first_visible(RowBlock at, size_t r) {
    return at.first ? (((size_t)at.first[r] - at.low) / TILE) * TILE : 0;
}

static size_t visible_begin(RowBlock at, size_t r) {
    return larger(first_visible(at, r), at.begin);
}

// x (rows,width) as a left input, and zeros in the rest of its last 32 rows. Anything else there would be multiplied,
// too, and processors take a hundred times as long for subnormal numbers.
static void left_rows(Tiles tiles, real *out, const real *x, size_t ld, size_t rows, size_t width) {
    size_t step = tiles_row(tiles, width);
    tiles_left(tiles, out, as_stored(x, ld), rows, width);
    memset((char *)out + rows * step, 0, (tiled(rows) - rows) * step);
}

// out (rows,keys) = left (rows,width) · packed (width,keys), where keys are visible
static void tiled_scores(Tiles tiles, real *out, size_t ld, const void *left, const void *packed, size_t width,
                         RowBlock at, bool share) {
    size_t left_bytes = tiles_row(tiles, width);
    #pragma omp parallel if (share)
    {
        tiles_begin(tiles);
        #pragma omp for schedule(static)
        for (size_t key = at.begin; key < at.end; key += TILE) {
            TileRows b = tiles_at(tiles, packed, width, 0, at.low + key);
            for (size_t r = 0; r < at.rows; r += TILE) {
                TileRows a = {(const char *)left + r * left_bytes, left_bytes};
                if (key >= visible_begin(at, r) && key < visible_end(at, r))
                    tiles_multiply(tiles, out + r * ld + key - at.begin, ld, a, b, tiled(width), false);
            }
        }
        tiles_end(tiles);
    }
}

// The keys that all rows of a block are multiplied by before the next ones: what they meet stays in the first-level
// cache.
enum { OUTPUT_KEYS = 128 };

// sums (rows,tiled(width)) = left (rows,keys) · packed (key_count,width); added after the first keys of the rows
static void tiled_output(Tiles tiles, real *sums, TileRows left, const void *packed, size_t key_count, size_t width,
                         RowBlock at, bool share) {
    size_t ld = tiled(width);
    #pragma omp parallel if (share)
    {
        tiles_begin(tiles);
        #pragma omp for schedule(static)
        for (size_t col = 0; col < width; col += TILE) {
            for (size_t from = at.begin; from < at.end; from += OUTPUT_KEYS) {
                for (size_t r = 0; r < at.rows; r += TILE) {
                    size_t key = larger(from, visible_begin(at, r)),
                           end = smaller(from + OUTPUT_KEYS, visible_end(at, r));
                    TileRows a = {(const char *)left.at + r * left.step + tiles_row(tiles, key - at.begin), left.step};
                    TileRows b = tiles_at(tiles, packed, key_count, at.low + key, col);
                    if (key < end)
                        tiles_multiply(tiles, sums + r * ld + col, ld, a, b, tiled(end - key),
                                       key > first_visible(at, r));
                }
            }
        }
        tiles_end(tiles);
    }
}

// out (rows,width) = factor (rows) · sums (rows,tiled(width)), without a factor if it is NULL
//   out: step elements from one row to the next
static void scale_rows(real *out, size_t step, const real *factor, const real *sums, size_t rows, size_t width) {
    for (size_t r = 0; r < rows; r++) {
        real by = factor ? factor[r] : 1;
        #pragma omp simd
        for (size_t c = 0; c < width; c++) out[r * step + c] = by * sums[r * tiled(width) + c];
    }
}

// sums = left (width,rows) · weights (rows,keys), for the keys of the block; added if `add`. sums has, for each 32 keys
// of the whole sequence, tiled(width) rows of 32 numbers.
static void tiled_sums(Tiles tiles, real *sums, const void *left, size_t width, TileRows weights, RowBlock at, bool add,
                       bool share) {
    size_t left_bytes = tiles_row(tiles, at.rows);
    #pragma omp parallel if (share)
    {
        tiles_begin(tiles);
        #pragma omp for schedule(static)
        for (size_t key = 0; key < at.keys; key += TILE) {
            size_t r = 0, end;    // the rows that see some of these keys, in tiles
            while (key >= visible_end(at, r)) r += TILE;
            for (end = r + TILE; end < at.rows && key >= visible_begin(at, end);) end += TILE;
            end = smaller(end, at.rows);
            size_t steps = tiles_are_bf16(tiles) ? r / 2 : r;
            TileRows b = {(const char *)weights.at + steps * weights.step + key * tiles_number(tiles), weights.step};
            for (size_t c = 0; c < width; c += TILE) {
                TileRows a = {(const char *)left + c * left_bytes + tiles_row(tiles, r), left_bytes};
                real *out = sums + (at.low + key) * tiled(width) + c * TILE;
                tiles_multiply(tiles, out, TILE, a, b, tiled(end - r), add);
            }
        }
        tiles_end(tiles);
    }
}

static void copy_out(View all, const Group *group, const real *sums, size_t width, size_t T) {
    real *to = all.p + group_offset(group, T, all.row, all.head);
    for (size_t t = 0; t < T; t += TILE) {
        for (size_t c = 0; c < width; c += TILE)
            tiles_take_transposed(to + t * all.row + c, all.row, sums + t * tiled(width) + c * TILE,
                                  smaller(T - t, TILE), smaller(width - c, TILE));
    }
}

// The weights or dS of a block as a left input: in bfloat16 as rounded by round_left(), else where they are.
static TileRows left_of(Tiles tiles, const real *rounded, const real *scores, size_t ld) {
    bool bf16 = tiles_are_bf16(tiles);
    return (TileRows){bf16 ? rounded : scores, bf16 ? ld * sizeof(uint16_t) : ld * sizeof(real)};
}

static void round_left(Tiles tiles, real *rounded, size_t r, const real *scores, size_t ld, size_t keys) {
    if (tiles_are_bf16(tiles))
        tiles_left(tiles, rounded + r * rounded_row(ld), as_stored(scores + r * ld, ld), 1, keys);
}

// ---- forward

// part.scores (rows,keys) = q · k of a block of rows and its chunk of keys
static void block_scores(const Head *head, const AttentionInput *in, AttentionShape shape, Part part, RowBlock at,
                         bool share) {
    left_rows(in->tiles, part.q, head->q + at.from * in->q.row, in->q.row, at.rows, shape.HS);
    tiled_scores(in->tiles, part.scores, part.step, part.q, head->group->k, shape.HS, at, share);
}

// A row of a block, with `hidden` keys before those that it sees.
typedef struct {
    RowSoFar so_far;
    size_t hidden;
} BlockRow;

// scores: those of a chunk in, weights up to a factor out, 0 where keys are hidden
static void chunk_row(const Normalizer *normalizer, BlockRow *r, real *scores, RowBlock at, real *sums, size_t width) {
    size_t first = r->hidden, end = r->hidden + (size_t)r->so_far.row.at.n, columns = tiled(at.end - at.begin);
    if (first < at.begin) first = at.begin;
    if (end > at.end) end = at.end;
    if (first >= end) {
        memset(scores, 0, columns * sizeof *scores);
        return;
    }
    first -= at.begin;
    end -= at.begin;
    row_take(normalizer, &r->so_far, scores + first, (int)(end - first), sums, width);
    memset(scores, 0, first * sizeof *scores);
    memset(scores + end, 0, (columns - end) * sizeof *scores);
}

static uint64_t block_forward(real *out, real *stats, const Head *head, const AttentionInput *in, Scalars scalars,
                              AttentionShape shape, Part part, RowBlock at) {
    size_t VS = shape.VS, ld = part.step;
    const Normalizer *normalizer = shape.normalizer;
    Tiles tiles = in->tiles;
    BlockRow rows[CHUNK_ROWS];
    real factor[CHUNK_ROWS];
    uint64_t all_zero = 0;
    for (size_t r = 0; r < at.rows; r++) {
        rows[r] = (BlockRow){.hidden = 0};
        rows[r].so_far.row = block_row(shape, scalars, head, at, r, &rows[r].hidden);
    }
    left_rows(tiles, part.q, head->q + at.from * in->q.row, in->q.row, at.rows, shape.HS);
    for (; at.begin < at.keys; at.begin += part.keys) {
        at.end = smaller(at.keys, at.begin + part.keys);
        tiled_scores(tiles, part.scores, ld, part.q, head->group->k, shape.HS, at, false);
        for (size_t r = 0; r < at.rows; r++) {
            real *scores = part.scores + r * ld;
            chunk_row(normalizer, &rows[r], scores, at, part.sums + r * tiled(VS), VS);
            if (at.end == at.keys) {
                bool weight;
                factor[r] = row_finish(normalizer, &rows[r].so_far, scores + rows[r].hidden, &weight);
                row_keep(&rows[r].so_far.row, stats + (head->rows + at.from + r) * ROW_STATS);
                all_zero += !weight;
            }
            round_left(tiles, part.rounded, r, part.scores, ld, at.end - at.begin);
        }
        TileRows left = left_of(tiles, part.rounded, part.scores, ld);
        tiled_output(tiles, part.sums, left, head->group->v, key_count(shape), VS, at, false);
    }
    scale_rows(out + head->out + at.from * shape.NH * VS, shape.NH * VS, factor, part.sums, at.rows, VS);
    return all_zero;
}

// With `share`, the threads share the head's blocks, the longest first.
static uint64_t head_forward(real *out, real *stats, const Head *head, const AttentionInput *in, Scalars scalars,
                             AttentionShape shape, real *scratch, bool share) {
    int own = omp_get_thread_num();
    size_t rows = my_forward_part(shape, scratch, own).rows, blocks = (shape.T + rows - 1) / rows;
    uint64_t all_zero = 0;
    #pragma omp parallel for schedule(static, 1) reduction(+ : all_zero) if (share)
    for (size_t i = 0; i < blocks; i++) {
        Part part = my_forward_part(shape, scratch, share ? omp_get_thread_num() : own);
        RowBlock at = block_at(head, (blocks - 1 - i) * rows, rows, shape);
        all_zero += block_forward(out, stats, head, in, scalars, shape, part, at);
    }
    return all_zero;
}

// ---- the forward pass one query at a time, for decoding: to pack all keys for a few queries would take longer

enum { FEW_QUERIES = 4 };

bool attention_of_few(AttentionShape shape) {
    return shape.past > 0 && shape.T <= FEW_QUERIES;
}

// A query of a head and its row.
static Query query_at(const Head *head, size_t t, const AttentionInput *in, Scalars scalars, AttentionShape shape,
                      Row *row) {
    size_t keys = key_count(shape), first = first_key(head, t), hidden;
    *row = block_row(shape, scalars, head, (RowBlock){.from = t, .low = first}, 0, &hidden);
    return (Query){.q = head->q + t * in->q.row,
                   .k = in->k.p + group_offset(head->group, keys, in->k.row, in->k.head) + first * in->k.row,
                   .v = in->v.p + group_offset(head->group, keys, in->v.row, in->v.head) + first * in->v.row,
                   .k_step = in->k.row,
                   .v_step = in->v.row,
                   .HS = shape.HS,
                   .VS = shape.VS,
                   .unit_keys = in->unit_keys};
}

static uint64_t queries_forward(real *out, real *stats, const AttentionInput *in, Scalars scalars, AttentionShape shape,
                                real *scratch) {
    size_t group_heads = shape.NH / shape.NKV;
    uint64_t all_zero = 0;
    #pragma omp parallel for schedule(static) reduction(+ : all_zero)
    for (size_t i = 0; i < shape.B * shape.NH; i++) {
        Group group = group_at(i / group_heads, shape);
        Head head = head_of(shape, in, &group, i % group_heads);
        real *weights = scratch + (size_t)omp_get_thread_num() * thread_scratch(shape);
        for (size_t t = 0; t < shape.T; t++) {
            Row row;
            Query query = query_at(&head, t, in, scalars, shape, &row);
            bool weight =
                query_forward(out + head.out + t * shape.NH * shape.VS, query, shape.normalizer, &row, weights);
            row_keep(&row, stats + (head.rows + t) * ROW_STATS);
            all_zero += !weight;
        }
    }
    return all_zero;
}

void attention_weights_of_scores(real *weights, size_t ld, real *log_Z, const int32_t *first, Scalars scalars,
                                 AttentionShape shape, AttentionRows at) {
    size_t keys = shape.past + at.from + at.rows;
    Head head = {.h = at.h, .first = first ? first + at.b * shape.T : NULL};
    for (size_t r = 0; r < at.rows; r++) {
        bool weight;
        size_t hidden;
        real *scores = weights + r * ld;
        Row row =
            block_row(shape, scalars, &head, (RowBlock){.from = at.from, .rows = at.rows, .keys = keys}, r, &hidden);
        real factor = row_forward(shape.normalizer, scores + hidden, &row, &weight);
        hide(scores, &row, hidden, keys);
        #pragma omp simd
        for (size_t j = 0; j < keys; j++) scores[j] *= factor;
        if (!log_Z) continue;
        log_Z[r] = -INFINITY;
        if (row.inverse > 0) log_Z[r] = row.shift - real_log(row.inverse);
        if (isnan(row.inverse)) log_Z[r] = NAN;
    }
}

void attention_weights(real *weights, size_t ld, real *log_Z, AttentionInput in, Scalars scalars, AttentionShape shape,
                       AttentionRows at) {
    size_t group_heads = shape.NH / shape.NKV;
    Group group = {.b = at.b, .kv = at.h / group_heads};
    Head head = head_of(shape, &in, &group, at.h % group_heads);
    #pragma omp parallel for schedule(static)
    for (size_t r = 0; r < at.rows; r++) {
        Row row;
        Query query = query_at(&head, at.from + r, &in, scalars, shape, &row);
        query_scores(weights + r * ld + first_key(&head, at.from + r), query, (size_t)row.at.n);
    }
    attention_weights_of_scores(weights, ld, log_Z, in.first, scalars, shape, at);
}

// Where the forward pass writes, and its scratch.
typedef struct {
    real *out, *stats, *scratch, *groups;
} Forward;

static uint64_t group_forward(const Forward *pass, size_t i, const AttentionInput *in, Scalars scalars,
                              AttentionShape shape, bool share) {
    Group group = packed_group(i, in, shape, pass->groups, false);
    uint64_t all_zero = 0;
    for (size_t j = 0; j < shape.NH / shape.NKV; j++) {
        Head head = head_of(shape, in, &group, j);
        all_zero += head_forward(pass->out, pass->stats, &head, in, scalars, shape, pass->scratch, share);
    }
    return all_zero;
}

uint64_t attention_forward(real *out, real *stats, AttentionInput in, Scalars scalars, AttentionShape shape,
                           real *scratch) {
    if (attention_of_few(shape)) return queries_forward(out, stats, &in, scalars, shape, scratch);
    int threads = omp_get_max_threads();
    Forward pass = {out, stats, scratch, row_grads(shape, scratch, threads) + row_grads_size(shape)};
    uint64_t all_zero = 0;
    if (!groups_in_parallel(shape, threads)) {
        for (size_t i = 0; i < shape.B * shape.NKV; i++) all_zero += group_forward(&pass, i, &in, scalars, shape, true);
        return all_zero;
    }
    #pragma omp parallel for schedule(static) reduction(+ : all_zero)
    for (size_t i = 0; i < shape.B * shape.NKV; i++) all_zero += group_forward(&pass, i, &in, scalars, shape, false);
    return all_zero;
}

// What head_backward() reads in addition to the input, and where it writes.
typedef struct {
    const AttentionInput *in;
    const real *dout, *out, *stats;
    AttentionInputGrads d;
    real *g;    // (B,NH,T,ROW_GRADS) written
    real *scratch, *groups;
} Backward;

// Turns row r of a block's scores and dA (part.scores, part.dscores) into weights and gradients of the scores. D is
// of the same rounded dout as dA: in a row of one weight, the two cancel.
static void block_row_backward(const Backward *pass, const Head *head, RowBlock at, Scalars scalars,
                               AttentionShape shape, Part part, size_t r, real *buffers) {
    size_t VS = shape.VS, step = shape.NH * VS, ld = part.step, hidden;
    const real *out = pass->out + head->out + (at.from + r) * step,
               *dout = pass->dout + head->out + (at.from + r) * step;
    real *g_row = pass->g + (head->rows + at.from + r) * ROW_GRADS;
    Row row = block_row(shape, scalars, head, at, r, &hidden);
    bool bf16 = tiles_are_bf16(pass->in->tiles);
    real D = 0, *scores = part.scores + r * ld, *dscores = part.dscores + r * ld;
    row_recall(shape.normalizer, &row, pass->stats + (head->rows + at.from + r) * ROW_STATS);
    #pragma omp simd reduction(+ : D)
    for (size_t c = 0; c < VS; c++)
        D += (bf16 ? (real)bf16_to_float(bf16_from_float((float)dout[c])) : dout[c]) * out[c];
    g_row[IN_SCALE] = row_backward(shape.normalizer, scores + hidden, dscores + hidden, &row, D, buffers, part.step);
    g_row[IN_PHI] = row.by_number;
    g_row[IN_NORM] = -row.D * row.inverse * norm_extra(shape.normalizer->norm, row.at, row.shift);
    hide(scores, &row, hidden, tiled(at.keys));
    hide(dscores, &row, hidden, tiled(at.keys));
}

// All rows of a block, and the rows of zeros that fill the last tile; and in bfloat16, rounds dS as a left input, and
// both as pairs of rows.
static void block_backward(const Backward *pass, const Head *head, RowBlock at, Scalars scalars, AttentionShape shape,
                           Part part, bool share) {
    size_t ld = part.step, keys = tiled(at.keys);
    Tiles tiles = pass->in->tiles;
    #pragma omp parallel for schedule(static) if (share)
    for (size_t pair = 0; pair < tiled(at.rows); pair += 2) {
        real *buffers = share ? my_backward_part(shape, pass->scratch, omp_get_thread_num()).buffers : part.buffers;
        real *scores = part.scores + pair * ld, *dscores = part.dscores + pair * ld;
        for (size_t r = pair; r < pair + 2; r++) {
            if (r < at.rows) {
                block_row_backward(pass, head, at, scalars, shape, part, r, buffers);
                round_left(tiles, part.rounded, r, part.dscores, ld, at.keys);
            } else {
                memset(part.scores + r * ld, 0, keys * sizeof(real));
                memset(part.dscores + r * ld, 0, keys * sizeof(real));
            }
        }
        tiles_pair(tiles, scores, scores + ld, keys);
        tiles_pair(tiles, dscores, dscores + ld, keys);
    }
}

// part.dscores (rows,keys) = dout · v of a block of rows
static void block_dscores(const Backward *pass, const Head *head, AttentionShape shape, Part part, RowBlock at,
                          bool share) {
    size_t step = shape.NH * shape.VS;
    Tiles tiles = pass->in->tiles;
    left_rows(tiles, part.dout, pass->dout + head->out + at.from * step, step, at.rows, shape.VS);
    tiled_scores(tiles, part.dscores, part.step, part.dout, head->group->v_for_dA, shape.VS, at, share);
}

// `add`: dk and dv already contain the sums of the group's previous blocks of rows.
static void block_grads(const Backward *pass, const Head *head, RowBlock at, AttentionShape shape, Part part, bool add,
                        bool share) {
    size_t HS = shape.HS, VS = shape.VS, step = shape.NH * VS, dq_step = pass->d.q.row, ld = part.step;
    const AttentionInput *in = pass->in;
    const Group *group = head->group;
    const real *q = head->q + at.from * in->q.row, *dout = pass->dout + head->out + at.from * step;
    real *dq = pass->d.q.p + (group->b * shape.T + at.from) * dq_step + head->h * pass->d.q.head;
    Tiles tiles = in->tiles;
    tiles_left(tiles, part.q_transposed, transposed(q, in->q.row), HS, at.rows);
    tiles_left(tiles, part.dout_transposed, transposed(dout, step), VS, at.rows);
    tiled_sums(tiles, group->dv, part.dout_transposed, VS, tiles_in_place(tiles, part.scores, ld), at, add, share);
    tiled_sums(tiles, group->dk, part.q_transposed, HS, tiles_in_place(tiles, part.dscores, ld), at, add, share);
    tiled_output(tiles, part.sums, left_of(tiles, part.rounded, part.dscores, ld), group->k_for_dq, key_count(shape),
                 HS, at, share);
    scale_rows(dq, dq_step, NULL, part.sums, at.rows, HS);
}

// `add`: dk and dv already contain the sums of the group's previous heads.
static void head_backward(const Backward *pass, const Head *head, Scalars scalars, AttentionShape shape, bool share,
                          bool add) {
    const Group *group = head->group;
    Part part = my_backward_part(shape, pass->scratch, omp_get_thread_num());
    // Without `first`, the last block reaches all keys. Going backward, its matmuls come first and write all of dk and
    // dv.
    if (head->first && !add) {
        memset(group->dk, 0, packed_scratch(key_count(shape), shape.HS) * sizeof(real));
        memset(group->dv, 0, packed_scratch(key_count(shape), shape.VS) * sizeof(real));
    }
    size_t last = ((shape.T - 1) / BLOCK) * BLOCK;
    for (size_t from = last;; from -= BLOCK) {
        RowBlock at = block_at(head, from, BLOCK, shape);
        block_scores(head, pass->in, shape, part, at, share);
        block_dscores(pass, head, shape, part, at, share);
        block_backward(pass, head, at, scalars, shape, part, share);
        block_grads(pass, head, at, shape, part, add || head->first || from < last, share);
        if (from == 0) break;
    }
}

static void group_backward(const Backward *pass, size_t i, Scalars scalars, AttentionShape shape, bool share) {
    Group group = packed_group(i, pass->in, shape, pass->groups, true);
    for (size_t j = 0; j < shape.NH / shape.NKV; j++) {
        Head head = head_of(shape, pass->in, &group, j);
        head_backward(pass, &head, scalars, shape, share, j > 0);
    }
    copy_out(pass->d.k, &group, group.dk, shape.HS, key_count(shape));
    copy_out(pass->d.v, &group, group.dv, shape.VS, key_count(shape));
}

// For a scalar x with one value per head: dx[h] += sum over the batch and the rows of row_slope times the row's entry
// in g. With one value per position: dx[n-1] += the sum over the batch and the heads. g (B,NH,T,ROW_GRADS), first (B,T)
// or NULL.
static void scalars_backward(ScalarGrads grads, const real *g, const int32_t *first, Scalars scalars,
                             AttentionShape shape) {
    for (size_t i = 0; i < shape.B * shape.NH; i++) {
        size_t h = i % shape.NH, b = i / shape.NH;
        double sums[SCALAR_COUNT] = {0};
        for (size_t t = 0; t < shape.T; t++) {
            size_t n = shape.past + t + 1 - (first ? (size_t)first[b * shape.T + t] : 0);
            RowPlace at = row_place(scalars, h, (int)n, (int)key_count(shape), shape.L, (int)shape.HS);
            const real *g_row = g + (i * shape.T + t) * ROW_GRADS;
            for (int x = 0; x < SCALAR_COUNT; x++) {
                if (!grads.of[x]) continue;
                real of_row = row_slope(x, shape.normalizer->scale, at) * g_row[scalar_stage(x)];
                if (scalar_width(x) == PER_HEAD) sums[x] += of_row;
                else grads.of[x][n - 1] += of_row;
            }
        }
        for (int x = 0; x < SCALAR_COUNT; x++)
            if (grads.of[x] && scalar_width(x) == PER_HEAD) grads.of[x][h] += (real)sums[x];
    }
}

static bool any_wanted(ScalarGrads grads) {
    bool any = false;
    for (int x = 0; x < SCALAR_COUNT; x++) any |= grads.of[x] != NULL;
    return any;
}

void attention_backward(AttentionInputGrads d, ScalarGrads grads, const real *dout, const real *out, const real *stats,
                        AttentionInput in, Scalars scalars, AttentionShape shape, real *scratch) {
    int threads = omp_get_max_threads();
    Backward pass = {.in = &in, .dout = dout, .out = out, .stats = stats, .d = d, .scratch = scratch};
    pass.g = row_grads(shape, scratch, threads);
    pass.groups = pass.g + row_grads_size(shape);
    if (groups_in_parallel(shape, threads)) {
        #pragma omp parallel for schedule(static)
        for (size_t i = 0; i < shape.B * shape.NKV; i++) group_backward(&pass, i, scalars, shape, false);
    } else {
        for (size_t i = 0; i < shape.B * shape.NKV; i++) group_backward(&pass, i, scalars, shape, true);
    }
    if (any_wanted(grads)) scalars_backward(grads, pass.g, in.first, scalars, shape);
}

void attention_window_starts(int32_t *first, const int32_t *starts, size_t B, size_t T, size_t window) {
    for (size_t i = 0; i < B * T; i++) {
        size_t t = i % T, start = starts ? (size_t)starts[i] : 0;
        first[i] = (int32_t)(t + 1 > window ? larger(start, t + 1 - window) : start);
    }
}

bool attention_row(real *out, const real *q, ConstView k, ConstView v, size_t n, size_t h, Scalars scalars,
                   AttentionShape shape, real *scratch) {
    Row row = row_at(shape.normalizer, scalars, h, n, shape.T, shape.L, shape.HS);
    Query query = {.q = q, .k = k.p, .v = v.p, .k_step = k.row, .v_step = v.row, .HS = shape.HS, .VS = shape.VS};
    return query_forward(out, query, shape.normalizer, &row, scratch);
}

"""A model of how the blocks of attention/flash90_backward.cuh follow each other on an H100.

It shows what the fixed order of the sums in dq costs, and what other orders of the blocks would.

    python3 dev/bench/backward_schedule.py                       # T = 1,024 to 16,384, 384 heads
    python3 dev/bench/backward_schedule.py --heads 24 --lengths 4096
    python3 dev/bench/backward_schedule.py --markdown            # the tables of doc/kernels.md
    python3 dev/bench/backward_schedule.py --parts 12            # values of a gated unit, 16,384 tokens

Nothing here is measured. Time is counted in steps of a block, a tile of 128 keys by 64 queries, which all take equally
long. A block starts when a multiprocessor is free and draws the next number, and takes START steps more than its tiles.
An addition to dq takes LATENCY steps, and then the next block in the order of sums may add to the same queries. ADDERS
warps take turns with the additions, and each ends one before it starts its next. Consumers are up to BUFFERS tiles of
dq ahead of the additions. These are the numbers for a head size of 64. START is from when each block of keys had a
block of the grid; now a multiprocessor loads the next one while it finishes one, which hides part of it. With that head
size, softmax and its kin take the order "head by head, last tile first", and all others "last queries first, ranges of
heads".

The values of a gated unit come in parts, each with blocks of its own, which all add to the same dq. Those kernels, for
a head size of 128, have one buffer and one warp that adds. A step takes them longer, so an addition takes WIDE_LATENCY
steps.

L2 and DRAM are not modeled: the more heads the blocks of one moment belong to, the less of q, dout and the sums is in
L2.
"""
import argparse
import heapq

SMS = 132
START = 2.0
LATENCY = 1.0
ADDERS = 2
BUFFERS = 4
KEYS, QUERIES = 128, 64
WIDE_LATENCY = 0.45


def head_by_head(heads, tiles, last_first):
    order = range(tiles - 1, -1, -1) if last_first else range(tiles)
    return [(head, tile) for head in range(heads) for tile in order]


def together(heads, tiles):
    """How many heads share a range of numbers: heads_together() of the kernel."""
    ranges = -(-heads // max(256 // tiles, 16))
    return -(-heads // ranges)


def longest_first(heads, tiles, at_once=None):
    """`at_once` heads after each other (None: all together), and of these the blocks with the most queries first."""
    at_once = at_once or heads
    return [(head, tile) for first in range(0, heads, at_once) for tile in range(tiles)
            for head in range(first, min(first + at_once, heads))]


# {name: (function of heads and tiles to the blocks in the order in which they start, the distance of the tile that adds
# before a tile, or 0 if none has to; does a block start with its last queries?)}
ORDERS = {"any order, head by head, first tile first": (lambda h, n: head_by_head(h, n, False), 0, False),
          "fixed, head by head, last tile first": (lambda h, n: head_by_head(h, n, True), 1, False),
          "any order, longest of all heads first": (longest_first, 0, False),
          "fixed, first tile first, longest of all heads first": (longest_first, -1, False),
          "fixed, last queries first, longest of all heads first": (longest_first, -1, True),
          "fixed, last queries first, ranges of heads": (lambda h, n: longest_first(h, n, together(h, n)), -1, True)}
BASE, KERNEL = list(ORDERS)[0], list(ORDERS)[-1]


def block(now, queries, before, adders=ADDERS, buffers=BUFFERS, latency=None):
    """One block that starts at `now`, visits `queries` tiles and adds to each not before the time in `before` (None: at
    any time). Returns (its end, the times at which the next block in the order may add)."""
    latency = latency or LATENCY
    if before is None:
        return now + START + queries + latency, None
    computed, added, done = now + START, [], []
    for step in range(queries):
        # The buffer that dq of this step goes to has to be read first.
        computed += 1
        if step >= buffers and added[step - buffers] > computed:
            computed = added[step - buffers]
        at = before[step] if before[step] > computed else computed
        if step >= adders and done[step - adders] > at:
            at = done[step - adders]
        added.append(at)
        done.append(at + latency)
    return max(done[-adders:]), done


def simulate(heads, T, order):
    """The time until all blocks have ended, in steps."""
    numbers, neighbor, last_first = ORDERS[order]
    tiles, row_tiles = -(-T // KEYS), -(-T // QUERIES)
    free, released, end = [0.0] * SMS, {}, 0.0
    for head, tile in numbers(heads, tiles):
        now = heapq.heappop(free)
        first = tile * KEYS // QUERIES
        before = None
        if neighbor:
            # {tile of queries: time}; those that the block before this one does not see need not be waited for.
            start, times = released.pop((head, tile + neighbor), (row_tiles, []))
            before = [0.0] * max(0, start - first) + times[max(0, first - start):]
            if last_first:
                before.reverse()
        stop, done = block(now, row_tiles - first, before)
        if neighbor:
            released[head, tile] = first, done[::-1] if last_first else done
        end = max(end, stop)
        heapq.heappush(free, stop)
    return end


# {name: (do blocks of the same keys start together, rather than those of the same part? how many sums of dq, 0 for any
# order; do blocks start with the last queries, and the heads of a range together?)}. The last one is the kernel's.
WIDE_ORDERS = {"any order": (True, 0, True), "fixed, part by part": (False, 1, False),
               "fixed, keys by keys": (True, 1, False), "fixed, keys by keys, two sums of dq": (True, 2, False),
               "fixed, last queries first, two sums of dq": (True, 2, True)}


def simulate_wide(heads, T, parts, order):
    """The time until all blocks of a gated unit's backward pass have ended, in steps."""
    by_keys, sums, last_first = WIDE_ORDERS[order]
    tiles, row_tiles = -(-T // KEYS), -(-T // QUERIES)
    of_head = [(tile, part) for tile in range(tiles)[::1 if last_first else -1] for part in range(parts)]
    if not by_keys:
        of_head.sort(key=lambda at: at[1])
    at_once = together(heads, tiles) if last_first else 1
    numbers = [(head, tile, part) for start in range(0, heads, at_once) for tile, part in of_head
               for head in range(start, min(start + at_once, heads))]
    free, may_add, end = [0.0] * SMS, {}, 0.0
    for head, tile, part in numbers:
        first, key = tile * KEYS // QUERIES, (head, part % max(1, sums))
        times = may_add.setdefault(key, [0.0] * row_tiles)
        before = times[first:][::-1] if last_first else times[first:]
        stop, done = block(heapq.heappop(free), row_tiles - first, before if sums else None, 1, 1, WIDE_LATENCY)
        if sums:
            times[first:] = done[::-1] if last_first else done
        end = max(end, stop)
        heapq.heappush(free, stop)
    return end


def wide_rows(parts):
    """[sequences, T, steps in any order, the other orders' over these in percent]"""
    for heads, T in ((16, 1024), (4, 4096), (1, 16384)):
        least, *others = (simulate_wide(heads, T, parts, order) for order in WIDE_ORDERS)
        yield [heads, T, least, *(100 * (steps / least - 1) for steps in others)]


def wide_table(found):
    head = ["sequences", "T", "steps", *list(WIDE_ORDERS)[1:]]
    lines = ["| " + " | ".join(head) + " |", "|" + "--:|" * len(head)]
    for heads, T, least, *others in found:
        lines.append(f"| {heads} | {T:,} | {least:,.0f} | " + " | ".join(f"{x:+.0f} %" for x in others) + " |")
    return "\n".join(lines)


def work(heads, T):
    """The steps of each multiprocessor if all were always busy."""
    tiles, row_tiles = -(-T // KEYS), -(-T // QUERIES)
    return heads * sum(row_tiles - tile * KEYS // QUERIES + START + LATENCY for tile in range(tiles)) / SMS


def rows(heads, lengths):
    """[T, steps of BASE, its time over that of always busy multiprocessors in percent, the others' over BASE's]"""
    for T in lengths:
        base, least = simulate(heads, T, BASE), work(heads, T)
        yield [heads, T, base, 100 * (base / least - 1),
               *(100 * (simulate(heads, T, order) / base - 1) for order in list(ORDERS)[1:])]


def table(found):
    head = ["heads", "T", "steps", "above always busy", *list(ORDERS)[1:]]
    lines = ["| " + " | ".join(head) + " |", "|" + "--:|" * len(head)]
    for heads, T, base, above, *others in found:
        lines.append(f"| {heads} | {T:,} | {base:,.0f} | {above:.1f} % | "
                     + " | ".join(f"{round(x, 1) + 0.0:+.1f} %" for x in others) + " |")
    return "\n".join(lines)


LENGTHS = (1024, 2048, 4096, 8192, 16384)
MARKDOWN = ((384, LENGTHS), (24, LENGTHS))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=384, help="of all sequences of a batch")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--parts", type=int, help="of a gated unit's values: print their table")
    parser.add_argument("--markdown", action="store_true", help="print the tables of doc/kernels.md")
    o = parser.parse_args()
    if o.parts:
        print(wide_table(wide_rows(o.parts)))
        return
    cases = MARKDOWN if o.markdown else ((o.heads, [int(T) for T in o.lengths.split(",")]),)
    print(table([row for heads, lengths in cases for row in rows(heads, lengths)]))
    if o.markdown:
        print("\n" + wide_table(wide_rows(12)))


if __name__ == "__main__":
    main()

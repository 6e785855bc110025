"""dev/bench/backward_schedule.py: blocks by hand, the orders, and the table of doc/kernels.md."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/bench"))
import backward_schedule as model
from backward_schedule import LATENCY, START


def test_a_block_by_hand():
    """Alone, it adds after each step, and passes each tile on when its addition is over."""
    end, done = model.block(10, 4, [0] * 4)
    assert end == 10 + START + 4 + LATENCY == model.block(10, 4, None)[0]
    assert done == [10 + START + step + LATENCY for step in (1, 2, 3, 4)]


def test_a_block_that_waits():
    """Its second tile is late: it comes at 20. The block hands over three more, of which the other warp adds two, and
    continues once the late one's buffer is free."""
    end, done = model.block(0, 8, [0, 20, 0, 0, 0, 0, 0, 0])
    # Steps 0, 2 and 4 at once; 3, 5 and 7 each when their warp has ended the one before; 6 after its dq.
    assert done == [at + LATENCY for at in (3, 20, 5, 21, 7, 22, 21, 23)]
    assert end == 23 + LATENCY


def test_a_block_whose_additions_are_slow(monkeypatch):
    """Two warps that add for three steps each delay a block to two thirds of its speed."""
    monkeypatch.setattr(model, "LATENCY", 3.0)
    end, done = model.block(0, 60, [0] * 60)
    assert done[-1] - done[-21] == 30
    assert end == done[-1]


@pytest.mark.parametrize("order", model.ORDERS)
def test_every_block_runs_once_and_after_those_it_waits_for(order):
    numbers, neighbor, _ = model.ORDERS[order]
    drawn = numbers(35, 6)
    assert sorted(drawn) == [(head, tile) for head in range(35) for tile in range(6)]
    at = {work: i for i, work in enumerate(drawn)}
    for head, tile in drawn:
        if neighbor and 0 <= tile + neighbor < 6:
            assert at[head, tile + neighbor] < at[head, tile]


@pytest.mark.parametrize("order", model.ORDERS)
def test_bounds(order):
    """No order is faster than processors that are always busy; one tile of keys needs no order; enough processors for
    all blocks leave the longest one."""
    assert model.simulate(40, 1000, order) >= model.work(40, 1000)
    assert model.simulate(140, 128, order) == 2 * (START + 2 + LATENCY)
    longest = START + 16 + LATENCY
    assert longest <= model.simulate(4, 1024, order) <= 3 * longest
    if not model.ORDERS[order][1]:
        assert model.simulate(4, 1024, order) == longest


def test_the_table_of_the_page():
    """To refresh it: dev/bench/backward_schedule.py --markdown."""
    page = (ROOT / "doc/kernels.md").read_text()
    assert model.table([row for heads, lengths in model.MARKDOWN for row in model.rows(heads, lengths)]) in page
    assert model.wide_table(model.wide_rows(12)) in page


@pytest.mark.parametrize("latency, heads, softmax, others", ((2, (384,), "0 to 1", "9 to 11"),
                                                            (3, (384, 24), "26 to 45", "21 to 57")))
def test_slow_additions(monkeypatch, latency, heads, softmax, others):
    """What the fixed orders of softmax and of all others then cost, in percent, at T = 1,024 and 4,096
    (doc/kernels.md)."""
    monkeypatch.setattr(model, "LATENCY", float(latency))
    for order, expected in ((list(model.ORDERS)[1], softmax), (model.KERNEL, others)):
        found = [100 * (model.simulate(n, T, order) / model.simulate(n, T, model.BASE) - 1)
                 for n in heads for T in (1024, 4096)]
        assert f"{min(found):.0f} to {max(found):.0f}" == expected


def test_last_queries_first():
    """A head with a processor for each of its 8 blocks: all start with the last queries, and each adds a LATENCY after
    the one before it. So its first block, the longest, is not delayed, and ends last."""
    assert model.simulate(1, 1024, model.KERNEL) == START + 16 + LATENCY
    assert [model.together(*at) for at in ((192, 8), (33, 8), (6, 128), (17, 64))] == [32, 17, 6, 9]


@pytest.mark.parametrize("order", model.WIDE_ORDERS)
def test_wide_values(order):
    """Enough processors for all blocks leave the longest one. In a fixed order, its last part waits for an addition of
    each part before it in the same sum or, part by part, for one of each of their 8 tiles of keys. A single part is a
    head of its own."""
    longest = START + 16 + model.WIDE_LATENCY
    by_keys, sums, _ = model.WIDE_ORDERS[order]
    waits = model.simulate_wide(1, 1024, 4, order) - longest
    others = 4 / sums - 1 if sums else 0
    if by_keys:
        assert waits == pytest.approx(others * model.WIDE_LATENCY)
    else:
        assert waits == pytest.approx(3 * 8 * model.WIDE_LATENCY)
    assert model.simulate_wide(1, 1024, 1, order) == pytest.approx(longest)

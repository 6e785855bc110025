"""The test of hopper_on_cpu.h: each planted defect is found under the settings that should find it.

    pytest dev/cuda_on_cpu/test_hopper_on_cpu.py

Builds three versions of the test program, like test_cuda_on_cpu.py. CUDA_ON_CPU_LONG=1 also runs every correct kernel
under every setting. dev/tests/test_descriptors.py compares descriptors and layouts with CUTLASS's.
"""
import itertools
import os

import pytest
from test_cuda_on_cpu import RACE, WRONG, assert_found, assert_numbers, build_programs, run


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    return build_programs(tmp_path_factory.mktemp("hopper_on_cpu"), "test_hopper_on_cpu.cu")


def race(*words):
    """A report of a race that has these words, in this order."""
    return RACE + "".join(r"[\s\S]*?" + word for word in words)


POISON = "is -?nan, not"    # the result
DEADLOCK = "DEADLOCK: "
IN_USE = "REGISTERS IN USE: "
LANES = r"MISMATCH: thread \d+ executes "
# A wait is missing, or comes too early: what shows depends on when asynchronous work takes place.
TOO_EARLY = r"NOT LOADED YET: wgmma at .* that the tma_load at|BUFFER REUSED: the tma_load at .* that wgmma at"
TURN_TOO_EARLY = r"MISSING WAIT: add_to_counter at .* no bulk_wait has covered the bulk_reduce_add at .* of this turn"
DEFAULT, LATE, RANDOM = "", "ASYNC=wait ORDER=reverse", "ORDER=random SEED=3"
ALL = [DEFAULT, LATE, RANDOM]
ONE_BY_ONE = "THREADS=1"    # each block ends before the next one starts, unless it has to wait

# name: the message that the plain build prints under the default settings; or the message, the build, and the settings,
# each of which must find it
FOUND = {
    "missing_arrive": DEADLOCK + r".*1 thread wait in mbarrier_wait\(parity 0\) at .*:\d+ \(the mbarrier initialized "
                      r"at .*, in phase 0, lacks 8 of 8 arrivals",
    "missing_full_wait": (TOO_EARLY, "plain", [LATE]),
    "missing_empty_wait": r"OVERFLOW: mbarrier_arrive_expect_tx at .* arrives once more than the phase expects",
    "missing_expect_tx": (r"WRONG EXPECT_TX: tma_load at .* loads 16384 bytes, of which the phase expects 0",
                          "plain", ALL),
    "expects_too_many_bytes": DEADLOCK + r".*lacks 0 of 1 arrivals and 16 bytes",
    "missing_init_fence": r"MISSING FENCE: .* that thread 0 initialized at .* without a later mbarrier_init_fence",
    "missing_init": r"NOT INITIALIZED: mbarrier_wait at",
    "missing_sync_after_init": (race("mbarrier_wait", "mbarrier_init"), "race", [DEFAULT]),
    "too_many_arrivals": r"ARRIVED TWICE: mbarrier_arrive at .* has already arrived in this phase",
    "initialized_twice": r"INITIALIZED TWICE: mbarrier_init at",
    "mbarrier_overwritten": r"OVERWRITTEN: mbarrier_\w+ at",
    "missing_wgmma_fence": r"MISSING FENCE: wgmma at .* begins a group, and thread \d+ has not called wgmma_fence",
    "missing_wgmma_commit": r"MISSING COMMIT: wgmma_wait at .* does not cover the wgmma at",
    "missing_wgmma_wait": (TOO_EARLY, "plain", [LATE]),
    "wait_for_too_few_wgmmas": r"STILL IN FLIGHT: wgmma_wait<1> at .* that the wgmma at .* may still be writing",
    "result_read_before_wait": (POISON, "plain", [DEFAULT, "ASYNC=issue"]),
    "result_not_named": (POISON, "plain", [DEFAULT, "ASYNC=issue"]),
    "result_written_in_flight": IN_USE + r"accumulators of the wgmma at .* were written before the wait at",
    "a_written_after_fence": r"MISSING FENCE: wgmma at .* has written its registers of A after its last wgmma_fence",
    "a_written_in_flight": IN_USE + r"thread \d+ has changed registers of A between the wgmma at .* and the wait at",
    "laggards_release_before_wait": (TOO_EARLY, "plain", ["ASYNC=wait ORDER=laggards"]),
    "half_a_warpgroup": DEADLOCK + r".*64 threads wait in wgmma at .*\(64 of 128 have arrived\)",
    "different_descriptors": r"MISMATCH: threads of a warpgroup call wgmma at .* with different operands: ",
    "start_not_aligned": r"MISALIGNED: wgmma at .* the start address of B, .* not in the first row",
    "wrong_stride_offset": WRONG,
    "wrong_swizzle": r"WRONG SWIZZLE: wgmma at .* reads B with a swizzle of 64 bytes, and the tma_load at .* with 128",
    "descriptor_past_shared": r"OUT OF BOUNDS: wgmma at .* reads B",
    "misaligned_tile": r"MISALIGNED: the box of tma_load at .* is not a multiple of 1024",
    "past_the_rows_end": r"WRONG DESCRIPTOR: wgmma at .* 32 bytes from byte 112 of a row of A",
    "box_past_shared": r"OUT OF BOUNDS: the box of tma_load at",
    "wrong_rank": r"WRONG TENSOR MAP: tma_load at .* has 3 coordinates, and the tensor map 2 dimensions",
    "missing_proxy_fence": (r"MISSING PROXY FENCE: bulk_store at .* reads what thread \d+ stored at .*:\d+, and that "
                            r"thread has not called fence_proxy_async", "plain", ALL),
    "ordinary_store": (r"UNSEEN STORE: bulk_store at .* an ordinary store has changed", "plain", ALL),
    "missing_sync_before_store": (race("announce_copy", "stmatrix"), "race", [LATE]),
    "missing_bulk_commit": r"MISSING COMMIT: bulk_wait_read at .* does not cover the bulk_store at",
    "missing_bulk_wait": (r"MISSING WAIT: a block ends, .* without a bulk_wait for the bulk_store at", "plain", ALL),
    "source_reused": (r"BUFFER REUSED: thread \d+'s store at .* that bulk_store at", "plain", [LATE]),
    "wrong_barrier_count": r"MISMATCH: named_barrier_\w+ at .* expects \d+ threads at barrier 1, and .* expects",
    "incomplete_warps": r"MISMATCH: named_barrier_sync at .* completes barrier \d with 16 of the 32 threads",
    "missing_barrier_arrive": DEADLOCK + r".*wait in named_barrier_sync\(1, 256\) at .*\(128 have arrived\)",
    "arrived_twice": r"ARRIVED TWICE: named_barrier_arrive at",
    "registers_over_budget": DEADLOCK + r".*wait in setmaxnreg_inc<248> at .*over the budget",
    "unobserved_load": (r"MISSING WAIT: (nobody has waited for the last loads of|a block ends while the tma_load at)",
                        "plain", ALL),
    "store_into_load": (r"BUFFER IN USE: thread 0 stores at .* to bytes that the tma_load at",
                        "plain", [DEFAULT, LATE]),
    "load_over_unfenced_store": (r"MISSING PROXY FENCE: tma_load at .* writes what thread 0 stored at", "plain", ALL),
    "loads_overlap": (r"BUFFER IN USE: the tma_load at .* that the tma_load at .* is still writing", "plain", [LATE]),
    "a_from_accumulators_in_flight": (IN_USE + r"wgmma at .* takes A from accumulators of the wgmma at", "plain", ALL),
    "phase_not_observed": (r"UNOBSERVED PHASE: the mbarrier .* in phase 1, .* nobody has waited for the previous phase",
                           "plain", ALL),
    "ordinary_store_into_load": (r"BUFFER IN USE: something has stored to shared memory that the tma_load at",
                                 "plain", ["ASYNC=wait", LATE]),
    "load_over_ordinary_store": r"UNSEEN STORE: tma_load at .* writes shared memory that an ordinary store has changed",
    "operand_not_fenced": r"MISSING PROXY FENCE: wgmma at .* reads what thread \d+ stored at",
    "operand_not_shared": r"OUT OF BOUNDS: wgmma at .* reads 16 bytes outside the block's shared memory",
    "different_commits": r"MISMATCH: thread \d+ has committed [01] groups of wgmma, and another of its warpgroup [01]",
    "different_accumulators": r"MISMATCH: wgmma at .* continues an accumulation in flight in some threads",
    "accumulators_overlap": IN_USE + r"wgmma at .* accumulates into registers that overlap those of",
    "half_a_warp_arrives": (LANES + r"named_barrier_(sync|arrive)\(1\) at .* named_barrier_(sync|arrive)\(1\)",
                            "plain", ALL),
    "wgmma_without_wait": r"MISSING WAIT: not all threads have waited for the wgmma at",
    "store_not_shared": r"OUT OF BOUNDS: store_shared at .* writes 4 bytes",
    "store_over_store": r"MISSING WAIT: bulk_store at .* writes global memory that the bulk_reduce_add at .* writes",
    "load_of_what_is_stored": r"MISSING WAIT: tma_load at .* reads global memory that the bulk_store at .* writes",
    "load_at_misaligned_coordinate": r"MISALIGNED COORDINATE: tma_load at .* coordinate, 4, is at byte 8 ",
    "copy_without_commit": r"MISSING COMMIT: no bulk_commit\(\) follows the bulk_store at",
    "wrong_block": r"WRONG BLOCK: wgmma at .* in a block of 160 threads",
    "bulk_misaligned": r"MISALIGNED: bulk_store at .* the number of bytes, 8188, must be multiples of 16",
    "bulk_past_shared": r"OUT OF BOUNDS: bulk_store at .*, 8192 bytes outside the block's shared memory",
    "bulk_past_allocation": r"OUT OF BOUNDS: bulk_store at .* are not all device memory",
    "missing_counter_wait": (WRONG, "plain", ["ORDER=reverse"]),
    "counter_not_advanced": (r"DEADLOCK of blocks: 8 wait for counters of others, 0 of 8 have not started",
                             "plain", ALL),
    "counter_before_writes": (TURN_TOO_EARLY, "plain", ALL),
    "waits_for_a_block_not_resident": (r"DEADLOCK of blocks: 7 wait .*, 1 of 8 have not started", "plain", ALL),
    "order_of_launch": (r"DEADLOCK of blocks: 2 wait .*, 6 of 8 have not started",
                        "plain", ["ORDER=reverse RESIDENT=2"]),
    "turn_passed_on_before_store": (race("Read of size", "relay_kernel", "Previous write"), "race", [*ALL, ONE_BY_ONE]),
    "missing_syncwarp_before_arrival": (DEADLOCK + r".* wait in mbarrier_wait\(parity 0\) at .* in phase 20, lacks 1",
                                        "plain", ["ORDER=straggler ASYNC=issue"]),
    "map_row_longer_than_swizzle": r"cuTensorMapEncodeTiled: the box's rows have 256 bytes",
    "map_past_allocation": r"cuTensorMapEncodeTiled: the tensor's \d+ bytes at .* are not all device memory",
}

SETTINGS = [f"ORDER={order} ASYNC={when} SEED={seed}" for order, when, seed in itertools.product(
    ("forward", "reverse", "random", "greedy", "straggler", "laggards"), ("random", "issue", "wait"), (1, 2))]
SOME = ["", "ORDER=reverse ASYNC=wait MMA=hopper", "ORDER=random ASYNC=random SEED=7", "ORDER=greedy ASYNC=issue",
        "ORDER=straggler ASYNC=wait SUSPEND=often", "ORDER=laggards ASYNC=wait"]


def test_every_defect_is_listed(programs):
    assert run(programs, "plain", "help", 0).stdout.split() == list(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_defect_is_found(programs, name):
    assert_found(programs, name, FOUND[name])


# Defects of the pipeline, and of rules_kernel(), share their twins, so one of each stands for all.
TWINS = ["missing_arrive", "phase_not_observed", *list(FOUND)[list(FOUND).index("missing_counter_wait"):]]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", TWINS)
def test_correct_twin_passes(programs, name):
    settings = SETTINGS if os.environ.get("CUDA_ON_CPU_LONG") or name == TWINS[0] else SOME
    builds = [("plain", s) for s in settings] + [("address", SOME[1]), ("race", SOME[2])]
    if name == "order_of_launch":
        builds.append(("plain", "ORDER=reverse RESIDENT=2"))
    for build, s in builds:
        r = run(programs, build, name, False, s)
        assert r.returncode == 0 and not r.stderr, f"{build} {s}\n{r.stdout}{r.stderr}"


@pytest.mark.parametrize("build, settings", [("plain", s) for s in SOME] + [("address", SOME[1]), ("race", SOME[2])])
def test_numbers(programs, build, settings):
    assert_numbers(programs, build, settings)


def test_report_counts_asynchronous_work(programs):
    r = run(programs, "plain", TWINS[1], False, "REPORT=1")
    assert "4 wgmma, 4 bulk copies" in r.stderr, r.stderr

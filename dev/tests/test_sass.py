"""Instructions of the attention kernels, counted in their SASS by dev/bench/sass.py. Needs nvcc and nvdisasm, but no
GPU.

Covers softmax; SASS_ALL=1 also compares lssar with it."""
import os
import struct
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/bench"))
import sass
import sass_trace

NVCC = "13.0.88"

# Each of n rounds has `inner` ex2, kind + 1 lg2 if the round is a multiple of `every` (a division at run time), one
# special function chosen by a switch, and a precise division, whose slow path normal numbers do not take.
TOY = r"""
__device__ float special(float x, int kind) {
    switch (kind) {
    case 3: asm volatile("rcp.approx.ftz.f32 %0, %0;" : "+f"(x)); return x;
    case 4: asm volatile("rsqrt.approx.ftz.f32 %0, %0;" : "+f"(x)); return x + 1;
    case 5: asm volatile("sin.approx.ftz.f32 %0, %0;" : "+f"(x)); return x + 2;
    case 6: asm volatile("cos.approx.ftz.f32 %0, %0;" : "+f"(x)); return x + 3;
    default: return x * 4;
    }
}

__global__ void toy(float *out, int n, int inner, int every, int kind) {
    float x = out[threadIdx.x], y = out[threadIdx.x + 32];
    for (int i = 0; i < n; i++) {
#pragma unroll 1
        for (int j = 0; j < inner; j++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
        if (i % every == 0) {
#pragma unroll 1
            for (int j = 0; j <= kind; j++) asm volatile("lg2.approx.ftz.f32 %0, %0;" : "+f"(x));
        }
        x = special(x, kind) / y;
    }
    out[threadIdx.x] = x;
}
"""


@pytest.fixture(scope="module", autouse=True)
def tools():
    try:
        sass.toolkit()
        sass.nvdisasm()
    except sass.Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    source = tmp_path_factory.mktemp("toy") / "toy.cu"
    source.write_text(TOY)
    return next(iter(sass.disassemble(source).values()))


@pytest.mark.parametrize("n, inner, every, kind",
                         [(1, 1, 1, 3), (7, 5, 3, 4), (12, 9, 5, 5), (12, 1, 4, 6), (4, 2, 9, 0), (0, 3, 1, 3)])
def test_counts_of_a_toy_kernel(toy, n, inner, every, kind):
    trace = sass_trace.Trace(toy, struct.pack("<Qiiii", 1 << 32, n, inner, every, kind), (0, 0, 0), (1, 1, 1), 32)
    special = {name: count for name, count in trace.opcodes.items() if name.startswith("MUFU") and "RCP" not in name}
    wanted = {"MUFU.EX2": n * inner, "MUFU.LG2": (kind + 1) * len(range(0, n, every))}
    if kind > 3:
        wanted[{4: "MUFU.RSQ", 5: "MUFU.SIN", 6: "MUFU.COS"}[kind]] = n
    assert special == {name: count for name, count in wanted.items() if count}
    assert trace.opcodes["CALL.REL.NOINC"] == 0
    assert sum(trace.issued.values()) == sum(trace.opcodes.values())


def test_one_more_round_costs_the_same_each_time(toy):
    def issued(n):
        arguments = struct.pack("<Qiiii", 1 << 32, n, 5, 100, 3)
        return sum(sass_trace.Trace(toy, arguments, (0, 0, 0), (1, 1, 1), 32).issued.values())

    assert issued(9) - issued(8) == issued(8) - issued(7) > 5


# ---- the attention kernels, bf16, head size 64: instructions that a warp issues for 32x64 scores

CAPS = {"forward": 800, "dq": 980, "dkv": 1450}
HMMA = {"forward": 128, "dq": 192, "dkv": 256}             # 64 for each 32x64x64 matmul
LSSAR = 2.2                                                 # modeled time of its three kernels relative to softmax's


@pytest.fixture(scope="module")
def pinned():
    version = sass.nvcc_version()
    if version != NVCC:
        pytest.skip(f"the caps hold for nvcc {NVCC}, but this is {version}")


@pytest.fixture(scope="module")
def softmax(pinned):
    return {row["kernel"]: row for row in sass.report([])}


@pytest.mark.parametrize("kernel", CAPS)
def test_softmax_stays_below_its_cap(softmax, kernel):
    row = softmax[kernel]
    assert row["HMMA"] == HMMA[kernel]
    assert row["MUFU"] >= 64, "one exp for each score of a lane"
    assert row["issued"] <= CAPS[kernel]


@pytest.mark.parametrize("kernel", CAPS)
def test_the_documented_counts_of_softmax(softmax, kernel):
    """Checks a row of doc/kernels.md: issued instructions and modeled cycles."""
    name = {"dkv": "dk and dv"}.get(kernel, kernel)
    page = (sass.ROOT / "doc/kernels.md").read_text().splitlines()
    row = next(line for line in page if line.startswith(f"| softmax | {name} |"))
    assert f"| {softmax[kernel]['issued']:,.0f} |" in row and f"| {softmax[kernel]['cycles']:,.0f} |" in row


# For 128x128 scores: 4 + 8 wgmma, an exp for each of 64 scores and for the rescaling of 2 rows. Issue slots must stay
# below the 1,024 clocks of the special functions.
def test_the_kernel_for_compute_capability_90(pinned):
    row, = sass.report90([])
    assert row["HMMA"] == 12 and 64 <= row["MUFU"] <= 68 and row["issued"] <= 480
    assert row["tensor"] == 1024 and row["issue"] < row["special"]
    page = (sass.ROOT / "doc/kernels.md").read_text()
    assert sass.table90([row]).splitlines()[-1] in page


def test_the_model():
    """6.4 cycles for an HMMA, 8 for a special function, 0.64 for anything else."""
    assert sass.cycles({"HMMA": 1}) == pytest.approx(6.4)
    assert sass.cycles({"MUFU": 1}) == pytest.approx(8)
    assert sass.cycles({"FMA": 1, "ALU": 1, "LDSM": 1}) == pytest.approx(3 * 0.64)
    assert sass.cycles({"HMMA": 2, "MUFU": 3, "FMA": 5}) == pytest.approx(2 * 6.4 + 3 * 8 + 5 * 0.64)


@pytest.mark.skipif(os.environ.get("SASS_ALL") != "1", reason="a minute; SASS_ALL=1 runs it")
def test_lssar_against_softmax(pinned):
    ratio = {row["preset"]: row["ratio"] for row in sass.report(["lssar"]) if row["kernel"] == "all"}
    assert ratio["lssar"] <= LSSAR

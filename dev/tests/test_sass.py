"""Instructions of the attention kernels, counted in their SASS by dev/bench/sass.py. Needs nvcc and nvdisasm, but no
GPU.

Covers softmax, and on compute capability 9.0 four normalizers more; with SASS_ALL=1 every row of doc/kernels.md's
tables for 9.0, and lssar on 8.0."""
import os
import struct
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/bench"))
import sass
import sass_trace
import step_model

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


# Thread 0 of a block draws a number, and stores two that follow from it for all threads.
SHARED_TOY = r"""
__global__ void shared_toy(float *out, unsigned *drawn) {
    __shared__ int work[3];
    if (threadIdx.x == 0) {
        int number = atomicAdd(drawn, 1u);
        work[0] = number + 1;
        work[2] = 3 * number;
    }
    __syncthreads();
    float x = out[threadIdx.x];
#pragma unroll 1
    for (int i = 0; i < work[0]; i++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
#pragma unroll 1
    for (int i = 0; i < work[2]; i++) asm volatile("lg2.approx.ftz.f32 %0, %0;" : "+f"(x));
    out[threadIdx.x] = x;
}
"""


def test_shared_memory_that_thread_0_fills(tmp_path):
    source = tmp_path / "shared_toy.cu"
    source.write_text(SHARED_TOY)
    kernel = next(iter(sass.disassemble(source).values()))

    def special(**keys):
        trace = sass_trace.Trace(kernel, struct.pack("<QQ", 1 << 32, 1 << 33), (0, 0, 0), (9, 1, 1), 64, **keys)
        return trace, trace.opcodes["MUFU.EX2"], trace.opcodes["MUFU.LG2"]

    for drawn in (0, 6, 7):
        first, *counts = special(thread=0, drawn=[drawn])
        assert counts == [drawn + 1, 3 * drawn] and not first.assumed
        second, *counts = special(thread=32, shared=first.shared)
        assert counts == [drawn + 1, 3 * drawn] and not second.assumed
    assert special(thread=32)[0].assumed                    # nothing is known


# Thread 32 draws numbers until one is beyond the last, and stores what follows from each.
DRAWING_TOY = r"""
__global__ void drawing_toy(float *out, unsigned *drawn, int numbers) {
    __shared__ int work[4];
    if (threadIdx.x == 32) {
#pragma unroll 1
        for (int i = 0, number = 0; number < numbers; i++) {
            number = atomicAdd(drawn, 1u);
            work[i % 4] = number < numbers ? number : 0;
        }
    }
    __syncthreads();
    float x = out[threadIdx.x];
#pragma unroll 1
    for (int i = 0; work[i % 4] > 0; i++)
#pragma unroll 1
        for (int j = 0; j < work[i % 4]; j++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    out[threadIdx.x] = x;
}
"""


def test_numbers_drawn_in_a_loop(tmp_path):
    source = tmp_path / "drawing_toy.cu"
    source.write_text(DRAWING_TOY)
    kernel = next(iter(sass.disassemble(source).values()))

    def trace(**keys):
        return sass_trace.Trace(kernel, struct.pack("<QQi", 1 << 32, 1 << 33, 8), (0, 0, 0), (9, 1, 1), 64, **keys)

    for drawn in ([8], [3, 9], [5, 2, 7, 8]):
        draws = trace(thread=32, drawn=drawn)
        assert draws.drawn == [] and not draws.assumed
        assert draws.opcodes["MUFU.EX2"] == trace(shared=draws.shared).opcodes["MUFU.EX2"] == sum(drawn[:-1])


@pytest.mark.parametrize("line, work", (
    ("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR12].tnspA.tnspB, RZ, !UPT", {"macs": 32768, "operands": 2 * 16 * 96}),
    ("HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR16].tnspB, R88", {"macs": 131072, "operands": 2 * 16 * 128}),
    ("LDS.128 R4, [R2+UR7+0x10]", {"lanes": 512}), ("LDS R4, [R2]", {"lanes": 128}),
    ("STS.64 [R2], R4", {"lanes": 256}), ("STSM.16.M88.4 [R2], R4", {"lanes": 512}), ("FADD R1, R2, R3", {})))
def test_work_of_an_instruction(line, work):
    text = f"\t.section\t.text.k,\"ax\"\n        /*0000*/   {line} ;\n        /*0010*/   EXIT ;\n"
    trace = sass_trace.Trace(sass_trace.parse(text)["k"], b"", (0, 0, 0), (1, 1, 1), 32)
    assert trace.work == Counter(work)


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


# ---- the kernels for compute capability 9.0, bf16, head size 64: what a warp issues for 128x128 scores

# Forward, 4 wgmma for the scores and 8 for the output. Backward, in each of two steps, 4 each for S, dP, dV and dK, and
# 8 for dQ.
WGMMA90 = {"forward": 12, "backward": 2 * (4 * 4 + 8)}
TENSOR90 = {"forward": 1024, "backward": 2560}
CAPS90 = {"forward": 445, "backward": 846}
SHARED90 = {"forward": 960, "backward": 4195}               # clocks


@pytest.fixture(scope="module")
def softmax90(pinned):
    return {row["kernel"]: row for row in sass.report90([])}


@pytest.mark.parametrize("kernel", CAPS90)
def test_the_kernels_for_compute_capability_90(softmax90, kernel):
    """One exp for each of a lane's 64 scores, and forward for the rescaling of 2 rows. Issue slots must not be what
    limits softmax."""
    row = softmax90[kernel]
    assert row["HMMA"] == WGMMA90[kernel] and row["tensor"] == TENSOR90[kernel]
    assert 64 <= row["MUFU"] <= 68
    assert row["issued"] <= CAPS90[kernel] and row["shared"] <= SHARED90[kernel]
    assert row["issue"] < max(row["special"], row["tensor"])
    page = (sass.ROOT / "doc/kernels.md").read_text()
    assert sass.table90([row], kernel).splitlines()[-1] in page


def test_softmax_on_90_with_heads_of_128(pinned):
    """Their clocks, which the model of a step takes: tensor cores limit the forward kernel, shared memory the other."""
    rows = {row["kernel"]: row for row in sass.report90(["softmax"], 128)}
    assert {f"flash90_{name}_kernel": row["bound"] for name, row in rows.items()} == step_model.FLASH90[128]
    forward, backward = rows["forward"], rows["backward"]
    assert forward["bound"] == forward["tensor"] and backward["bound"] == backward["shared"]


def test_softmax_on_90_in_the_model_of_a_step(softmax90):
    assert {f"flash90_{name}_kernel": row["bound"] for name, row in softmax90.items()} == step_model.FLASH90[64]


# Special functions and the most instructions, forward, then backward. A score takes one special function, and a second
# where a division or a density takes the place of a polynomial: for all of mish's scores forward, and all backward.
# Four of sigmoid's share a division forward. lssar takes an exp and a logarithm for each.
OTHERS90 = {"sigmoid-l1": (80, 618, 128, 1361), "gelu-l1": (64, 1003, 128, 2205), "mish-l1": (128, 939, 128, 1880),
            "lssar": (130, 1724, 128, 2252)}


@pytest.fixture(scope="module")
def others90(pinned):
    presets = sass.presets_of_instances(sass.flash_calls(64)) if os.environ.get("SASS_ALL") == "1" else OTHERS90
    return {(row["preset"], row["kernel"]): row for row in sass.report90(presets)}


@pytest.mark.parametrize("preset", OTHERS90)
def test_what_other_normalizers_issue_on_90(others90, preset):
    (special, most), (special_backward, most_backward) = OTHERS90[preset][:2], OTHERS90[preset][2:]
    forward, backward = others90[preset, "forward"], others90[preset, "backward"]
    assert (forward["MUFU"], backward["MUFU"]) == (special, special_backward)
    assert forward["issued"] <= most and backward["issued"] <= most_backward


def test_the_documented_counts_on_90(others90):
    """doc/kernels.md has each row that is counted here, which are all of its rows with SASS_ALL=1."""
    page = (sass.ROOT / "doc/kernels.md").read_text()
    for (_, kernel), row in others90.items():
        assert sass.table90([row], kernel).splitlines()[-1] in page
    if os.environ.get("SASS_ALL") == "1":
        assert sass.summary90(list(others90.values())) in page


def test_steps_that_differ_are_an_error(monkeypatch):
    """If two blocks differ by more than the number of their tiles, there is no count for a tile."""
    class Fake:
        def __init__(self, issued):
            self.issued, self.work, self.shared = Counter(dict.fromkeys(sass.PIPES, issued)), Counter(), {}

    call = {"preset": "softmax", "call": "", "sweeps": 1}
    kernels = {"flash90_backward_kernelILi64E": "not looked at"}
    issued = {tiles: 7 + 3 * tiles for tiles in range(20)}
    monkeypatch.setattr(sass, "traces90", lambda kernel, name, call, tiles, HS: [Fake(issued[tiles])] * 5)
    assert sass.measure90(call, 64, kernels, "backward")["HMMA"] == 3
    idle = [Fake(9)]
    monkeypatch.setattr(sass, "traces90", lambda kernel, name, call, tiles, HS: [Fake(issued[tiles])] * 4 + idle)
    with pytest.raises(SystemExit, match="a warp of backward of softmax does nothing for a tile"):
        sass.measure90(call, 64, kernels, "backward")
    issued[9] += 1
    with pytest.raises(SystemExit, match="does not do the same"):
        sass.measure90(call, 64, kernels, "backward")


def test_clocks_of_the_backward_kernel():
    """By hand, for 128x128 scores, head size 64. A consumer's step has 64x64 scores: S, dP, dV and dK read a tile of
    64x64 each, dQ 128x64 of dz and 128x32 of k. Lanes store dz (64x64 bf16) and dq (64x32 floats)."""
    steps, tile = 4, 64 * 64 * 2
    consumer = Counter(macs=2 * (4 * 64**3 + 64 * 32 * 128), operands=2 * (4 * tile + 128 * 64 * 2 + 128 * 32 * 2),
                       lanes=2 * (tile + 64 * 32 * 4) // 4, MUFU=64)
    consumer.update(dict.fromkeys(("FMA", "ALU"), 100))
    clocks = sass.clocks90("backward", 64, 1, [(consumer, 8), (Counter(FMA=40, lanes=1024), 2)])
    read = steps * (4 * tile + 24 * 1024) + steps * (tile + 64 * 32 * 4) + 2 * 1024
    copied = 2 * (2 * tile + 64 * 64 * 4)                   # q and dout by TMA, dq by the additions
    assert clocks == {"tensor": 5 * 128 * 128 * 64 / 2048, "special": 64 * 8 * 32 / 16, "issue": (264 * 8 + 80) / 4,
                      "shared": (read + copied) / 128}


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

#!/usr/bin/env python3
"""Counts the instructions of the attention kernels for sm_90, without a GPU.

    .venv/bin/python dev/bench/sass.py                           # softmax: forward, dq, dk with dv; bf16, head size 64
    .venv/bin/python dev/bench/sass.py lssar sigmoid gelu-l1     # presets of attention/normalizer.h, beside softmax
    .venv/bin/python dev/bench/sass.py --all                     # a preset for each instance: doc/kernels.md's table
    .venv/bin/python dev/bench/sass.py --json lssar              # for machines

Builds the instance that a preset runs (attention/flash_instances.h), disassembles it and follows a warp through each
kernel (sass_trace.py), once in one block of rows and once in the next, whose rows see a few more tiles. The difference
is what a warp issues for a tile whose scores are all visible: the loops with their trip counts and the warp's share of
loading, without prologue. It is given for 32x64 scores, split by pipe:

    HMMA    products                        LDSM    LDSM, LDS, STS: shared memory
    MUFU    special functions, conversions  LDGSTS  copies from global to shared memory
    FMA     FFMA, FMUL, FADD, IMAD          SHFL    shuffles
    ALU     everything else                 branch  BRA, BSSY, BAR, ...      memory   LDG, STG, constants

The model: a warp's instructions take 6.4 HMMA + 8 MUFU + 0.64 rest cycles of an SM's sub-partition. 6.4 is the rate of
mma.sync on an H100, and 8 that of the special functions (four lanes per clock). 0.64 is less than an issue slot,
because some instructions overlap with others; it was chosen so that FlashAttention-2's kernel gets its measured 299
TFLOP/s. TFLOP/s count 4 HS FLOPs per score forward and 10 HS backward, on 132 SMs at 1,755 MHz. These are not
measurements: use them to compare kernels, not to predict times.

The tables for compute capability 9.0 say what a warp that computes issues for 128x128 scores: a tile of the forward
kernel, two steps of the backward kernel. The limits, in clocks of an SM:

    tensor cores        2,048 multiply-adds per clock
    special functions   16 per clock
    issue               4 instructions per clock, of all warps
    shared memory       128 bytes per clock: operands of wgmma (B for each warpgroup, and A unless it is in registers),
                        what lanes load and store (each lane's bytes, even if lanes load the same: NVIDIA,
                        https://forums.developer.nvidia.com/t/77228), what TMA writes, and in the backward kernel what
                        the additions to dq read

The longest one bounds the kernel from below; its TFLOP/s are a bound, not a prediction.

Needs nvcc and nvdisasm (requirements-test.txt). Counts change with the compiler: the caps of dev/tests/test_sass.py are
for nvcc 13.0.88.
"""
import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sass_trace import PIPES, Trace, parse

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("forward", "dq", "dkv")
CYCLES = {"HMMA": 6.4, "MUFU": 8.0}
REST = 0.64
SUB_PARTITIONS, HERTZ = 4 * 132, 1.755e9
B, T, NH, THREADS = 1, 4096, 12, 128


class Missing(Exception):
    """A tool that is not installed."""


def toolkit():
    """The folder of the CUDA Toolkit that the Makefile uses."""
    nvcc = shutil.which("nvcc")
    found = [Path(os.path.realpath(nvcc)).parents[1]] if nvcc else []
    for path in (*found, Path("/usr/local/cuda"), ROOT / ".cuda/nvidia/cu13"):
        if (path / "bin/nvcc").exists() and (path / "include/cuda_runtime.h").exists():
            return path
    raise Missing("nvcc is missing: scripts/setup_cuda.sh installs it")


def nvcc_version():
    text = subprocess.run([toolkit() / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V(\d+\.\d+\.\d+)", text)[1]


def nvdisasm():
    """The Toolkit's nvdisasm, or the one of PyPI's nvidia-cuda-nvdisasm."""
    found = [toolkit() / "bin/nvdisasm", *sorted(ROOT.glob(".venv/lib/python*/site-packages/nvidia/cu*/bin/nvdisasm")),
             *(Path(p) / "nvidia/cu13/bin/nvdisasm" for p in sys.path)]
    for path in found:
        if path.exists():
            return path
    raise Missing("nvdisasm is missing: pip install -r requirements-test.txt installs it")


def run(*command):
    done = subprocess.run([str(x) for x in command], cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"sass: {command[0]} failed:\n{done.stderr[-4000:]}")
    return done.stdout


@functools.cache
def disassemble(source, *flags, architecture="sm_90"):
    """{kernel: Kernel} of a .cu file."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "it.cubin"
        run(toolkit() / "bin/nvcc", "-std=c++17", "-I.", "-O3", "-lineinfo", f"-arch={architecture}", "-cubin", *flags,
            "-o", cubin, source)
        return parse(run(nvdisasm(), cubin))


def flash_calls(HS):
    """{preset: the output of dev/bench/flash_calls.cpp for it}"""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "calls"
        run(os.environ.get("CXX", "g++").split()[-1], "-std=c++17", "-O1", "-w", "-I.", "-Idev/cuda_on_cpu",
            "-isystem", toolkit() / "include", "-o", program, "dev/bench/flash_calls.cpp")
        return {call["preset"]: call for call in json.loads(run(program, B, T, NH, HS))}


def kernel_of(kernels, kernel, HS):
    """The kernel for bf16 and this head size; for dq the one where v is as wide as q, for dk and dv the one that
    computes both."""
    pattern = (rf"flash_{kernel}_kernelI13__nv_bfloat16Li{HS}EL"
               + {"forward": r"", "dq": r".*ELb0E", "dkv": r".*ELi0EE"}[kernel])
    found = [k for name, k in kernels.items() if re.search(pattern, name)]
    if len(found) != 1:
        raise SystemExit(f"sass: {len(found)} kernels match {pattern}; expected one of {', '.join(kernels)}")
    return found[0]


def count(kernel, name, call, warp=1):
    """{pipe: instructions that a warp issues for 32x64 scores}, and {address: count} of the branches whose direction
    was assumed."""
    plan = call[name]
    blocks = T // plan["own"]

    def issued(rows):
        """Traces the block whose rows see that many blocks of keys before the diagonal; for dk and dv, whose keys are
        seen by as many blocks of rows."""
        x = blocks - 1 - rows                       # the longest rows come first; for keys, the earliest
        trace = Trace(kernel, bytes.fromhex(call["call"]), (x, 0, 0), (blocks, B * NH, 1), THREADS, thread=32 * warp)
        return trace.issued, trace.assumed

    (few, _), (more, assumed), (most, _) = issued(9), issued(11), issued(13)
    difference = Counter({p: more[p] - few[p] for p in PIPES})
    if difference != Counter({p: most[p] - more[p] for p in PIPES}):
        raise SystemExit(f"sass: {name} of {call['preset']} does not do the same for each tile, "
                         "so two blocks do not give the counts")
    scores = 2 * plan["own"] * plan["warp"]
    return {p: difference[p] * 32 * 64 / scores for p in PIPES}, assumed


def cycles(pipes):
    return sum(n * CYCLES.get(p, REST) for p, n in pipes.items())


def measure(call, HS):
    """[a row for each kernel]"""
    kernels = disassemble("attention/flash_instance.cu", f"-DINSTANCE=FLASH_{call['instance']}")
    rows = []
    for name in KERNELS:
        pipes, assumed = count(kernel_of(kernels, name, HS), name, call)
        rows.append({"preset": call["preset"], "instance": call["instance"], "kernel": name,
                     "issued": sum(pipes.values()), **pipes, "cycles": cycles(pipes), "assumed_branches": len(assumed)})
    return rows


# The kernels for compute capability 9.0: the threads of which one warp each is followed, a computing one first, and
# the warps that do the same as it.
KERNELS90 = {"forward": {0: 8, 256: 1}, "backward": {0: 8, 256: 1, 288: 1, 320: 1, 352: 1}}
DRAWS, SECOND_ADDS = 320, 288         # of the backward kernel's threads
FLOPS = {"forward": 4, "backward": 10}


def threads90(name, HS):
    """KERNELS90's threads. With heads of 128, one warp adds dq, not two."""
    return {thread: warps for thread, warps in KERNELS90[name].items() if HS <= 64 or thread != SECOND_ADDS}


def traces90(kernel, name, call, tiles, HS):
    """[Trace] of threads90(), in a block of `tiles` times 128x128 scores. The forward kernel's Forward90Work
    has one block of rows, which sees that many tiles. In the backward kernel, DRAWS draws a block of keys that as many
    see, then a number beyond the last, and stores for the others in shared memory what these are."""
    arguments = bytes.fromhex(call["call"] + (call["work"][tiles - 1] if name == "forward" else ""))
    # The tensor maps, which no loop depends on. After them, the backward kernel has the number of heads that share a
    # range of numbers: 1.
    arguments += bytes(-(Trace.PARAMETERS + len(arguments)) % 64 + 4 * 128) + (1).to_bytes(4, "little")
    all_blocks = T // 128 * B * NH

    def trace(thread, **keys):
        return Trace(kernel, arguments, (0, 0, 0), (1 if name == "forward" else all_blocks, 1, 1), 384, thread, **keys)

    if name == "forward":
        return [trace(thread) for thread in threads90(name, HS)]
    draws = trace(DRAWS, drawn=(T // 128 - tiles if call["last_first"] else tiles - 1, all_blocks))
    return [draws if thread == DRAWS else trace(thread, shared=draws.shared) for thread in threads90(name, HS)]


def clocks90(name, HS, sweeps, counts):
    """{resource: clocks of an SM for 128x128 scores} from [(Counter, warps)], computing warps first."""
    work = counts[0][0]
    issued = sum(count[p] * warps for count, warps in counts for p in PIPES)
    lanes = sum(count["lanes"] * warps for count, warps in counts)
    # Forward, a tile of k for each sweep and one of v. Backward, q and dout, and float32 dq, which is read.
    copied = 128 * HS * 2 * (sweeps + 1) if name == "forward" else 128 * HS * (2 * 2 + 4)
    return {"tensor": 2 * work["macs"] / 2048, "special": counts[0][1] * 32 * work["MUFU"] / 16, "issue": issued / 4,
            "shared": (2 * work["operands"] + lanes + copied) / 128}


def measure90(call, HS, kernels, name):
    """The row of a kernel for compute capability 9.0, or None if there is none for this preset."""
    kernel = next((k for n, k in kernels.items() if re.search(rf"flash90_{name}_kernelILi{HS}E", n)), None)
    if not kernel:
        return None

    def counted(tiles):
        return [t.issued + t.work for t in traces90(kernel, name, call, tiles, HS)]

    few, *others = ((tiles, counted(tiles)) for tiles in (4, 5, 6, 9))
    one = [Counter({key: more[key] - less[key] for key in more}) for more, less in zip(others[0][1], few[1])]
    for tiles, counts in others:
        for count, before, step in zip(counts, few[1], one):
            if any(count[key] - before[key] != (tiles - few[0]) * step[key] for key in count):
                raise SystemExit(f"sass: {name} of {call['preset']} does not do the same for each tile")
    if any(count.total() == 0 for count in one):
        raise SystemExit(f"sass: a warp of {name} of {call['preset']} does nothing for a tile")
    clocks = clocks90(name, HS, call["sweeps"], list(zip(one, threads90(name, HS).values())))
    longest = max(clocks.values())
    return {"preset": call["preset"], "kernel": name, "issued": sum(one[0][p] for p in PIPES),
            **{p: one[0][p] for p in PIPES}, **clocks, "bound": longest,
            "tflops": FLOPS[name] * HS * 128 * 128 / longest * SUB_PARTITIONS / 4 * HERTZ / 1e12}


def rows90():
    """The rows of flash_instances.h that have kernels for compute capability 9.0."""
    return re.findall(r"^FLASH_INSTANCE\((\w+), bf16, PHI_", (ROOT / "attention/flash_instances.h").read_text(), re.M)


def report90(wanted, HS=64, jobs=os.cpu_count()):
    """[row], up to two for each preset."""
    calls = flash_calls(HS)

    def rows(preset):
        call = calls[preset]
        if call["instance"] not in rows90():
            return []
        kernels = disassemble("attention/flash90_instance.cu", f"-DINSTANCE=FLASH_{call['instance']}",
                              architecture="sm_90a")
        return [row for row in (measure90(call, HS, kernels, name) for name in KERNELS90) if row]

    with ThreadPoolExecutor(jobs) as pool:
        return [row for some in pool.map(rows, dict.fromkeys(["softmax", *wanted])) for row in some]


SHOWN90 = {"issued": "issued", "HMMA": "wgmma", "MUFU": "MUFU", "FMA": "FMA", "ALU": "ALU",
           "LDSM": "LDS, STS", "tensor": "clocks: tensor cores", "special": "special functions", "issue": "issue",
           "shared": "shared memory", "tflops": "TFLOP/s"}


def table90(rows, name):
    rows = [row for row in rows if row["kernel"] == name]
    lines = ["| preset | " + " | ".join(SHOWN90.values()) + " |", "|---|" + "--:|" * len(SHOWN90)]
    return "\n".join(lines + [f"| {row['preset']} | " + " | ".join(f"{row[key]:,.0f}" for key in SHOWN90) + " |"
                              for row in rows])


def summary90(rows):
    """Both kernels of each preset: the bounds, relative to softmax's, and TFLOP/s."""
    at = {(row["preset"], row["kernel"]): row for row in rows}
    lines = ["| preset | forward | backward | both | relative to softmax: forward | backward | both | TFLOP/s |",
             "|---|" + "--:|" * 7]
    softmax = [at["softmax", name]["bound"] for name in KERNELS90]
    for preset in dict.fromkeys(row["preset"] for row in rows):
        if any((preset, name) not in at for name in KERNELS90):
            continue
        found = [at[preset, name] for name in KERNELS90]
        bounds = [row["bound"] for row in found]
        flops = sum(row["tflops"] * row["bound"] for row in found)
        ratios = [a / b for a, b in zip((*bounds, sum(bounds)), (*softmax, sum(softmax)))]
        lines.append(f"| {preset} | " + " | ".join([*(f"{x:,.0f}" for x in (*bounds, sum(bounds))),
                                                   *(f"{x:.2f}" for x in ratios), f"{flops / sum(bounds):.0f}"])
                     + " |")
    return "\n".join(lines)


def add_totals(rows, softmax, HS):
    """Adds TFLOP/s, ratios to softmax's kernels, and a row for all three kernels together."""
    def tflops(flops, time):
        return flops * 32 * 64 * HS / time * SUB_PARTITIONS * HERTZ / 1e12

    time = {row["kernel"]: row["cycles"] for row in rows}
    base = {row["kernel"]: row["cycles"] for row in softmax}
    for row in rows:
        row["ratio"] = row["cycles"] / base[row["kernel"]]
    rows[0]["tflops"] = tflops(4, time["forward"])
    rows[2]["tflops_backward"] = tflops(10, time["dq"] + time["dkv"])
    together = {key: sum(row[key] for row in rows) for key in ("issued", *PIPES, "cycles")}
    rows.append({"preset": rows[0]["preset"], "instance": rows[0]["instance"], "kernel": "all", **together,
                 "assumed_branches": 0, "ratio": sum(time.values()) / sum(base.values()),
                 "tflops": tflops(14, sum(time.values()))})


def presets_of_instances(calls):
    """The first preset that runs each instance."""
    first = {}
    for name, call in calls.items():
        first.setdefault(call["instance"], name)
    return list(first.values())


def report(wanted, HS=64, jobs=os.cpu_count()):
    """[row], four for each preset."""
    calls = flash_calls(HS)
    unknown = [name for name in wanted if name not in calls]
    if unknown:
        raise SystemExit(f"sass: {unknown[0]}: no such preset; `./train_gpt2 --attn help` lists them")
    presets = list(dict.fromkeys(["softmax", *wanted]))
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda name: measure(calls[name], HS), presets))
    softmax = [dict(row) for row in results[0]]
    for rows in results:
        add_totals(rows, softmax, HS)
    return [row for rows in results for row in rows]


def table(rows):
    head = ["preset", "kernel", "issued", *PIPES, "cycles", "TFLOP/s", "to softmax"]
    lines = [head]
    for row in rows:
        speed = row.get("tflops") or row.get("tflops_backward")
        lines.append([row["preset"], row["kernel"], *(f"{row[key]:,.0f}" for key in ("issued", *PIPES, "cycles")),
                      f"{speed:.0f}" if speed else "", f"{row['ratio']:.2f}"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = ["| " + " | ".join(x.ljust(w) if i < 2 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths))) + " |"
           for line in lines]
    out.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("presets", nargs="*", help="presets of attention/normalizer.h")
    parser.add_argument("--all", action="store_true", help="one preset for each bf16 instance")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--head-size", type=int, default=64, choices=(48, 64, 128))
    options = parser.parse_args()
    try:
        presets = options.presets + (presets_of_instances(flash_calls(options.head_size)) if options.all else [])
        rows = report(presets, options.head_size)
        rows_90 = report90(presets, options.head_size) if options.head_size in (64, 128) else []
        version = nvcc_version()
    except Missing as missing:
        raise SystemExit(f"sass: {missing}")
    if options.json:
        print(json.dumps({"nvcc": version, "head_size": options.head_size, "rows": rows, "rows90": rows_90},
                         indent=1))
        return
    print(f"Instructions that a warp issues for 32x64 scores: bf16, head size {options.head_size}, sm_90, "
          f"nvcc {version}. Cycles come from a model.\n")
    print(table(rows))
    if rows_90:
        print("\nThe kernels for compute capability 9.0, forward and backward: instructions that a warp issues for "
              "128x128 scores, and clocks of an SM. Bounds of TFLOP/s.\n")
        print(*(table90(rows_90, name) for name in KERNELS90), summary90(rows_90), sep="\n\n")


if __name__ == "__main__":
    main()

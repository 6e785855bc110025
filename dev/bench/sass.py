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

The second table is of the forward kernel for compute capability 9.0: what a warp that computes issues for a tile of
128x128 scores. Its limits, in clocks of an SM per tile: the tensor cores (2,048 multiply-adds per clock), the special
functions (16 per clock for 8 warps), and the issue slots (8 warps on 4 schedulers).

Needs nvcc and nvdisasm (requirements-test.txt). Counts change with the compiler: the caps of dev/tests/test_sass.py are
for nvcc 13.0.88.
"""
import argparse
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


def measure90(call, HS):
    """The row of the forward kernel for compute capability 9.0, or None if the preset runs no such kernel."""
    if call["instance"] not in rows90():
        return None
    kernels = disassemble("attention/flash90_instance.cu", f"-DINSTANCE=FLASH_{call['instance']}",
                          architecture="sm_90a")
    kernel = next((k for name, k in kernels.items() if re.search(rf"flash90_forward_kernelILi{HS}E", name)), None)
    if not kernel:
        return None
    arguments = bytes.fromhex(call["call"])
    arguments += bytes(-len(arguments) % 64 + 3 * 128)      # the tensor maps, which no loop depends on
    blocks = T // 128

    def issued(tiles):
        place, grid = (blocks - tiles, 0, 0), (blocks, B * NH, 1)
        return Trace(kernel, arguments, place, grid, 384, thread=32).issued

    few, more, most = issued(9), issued(10), issued(12)
    pipes = {p: more[p] - few[p] for p in PIPES}
    if any(most[p] - more[p] != 2 * pipes[p] for p in PIPES):
        raise SystemExit(f"sass: forward of {call['preset']} does not do the same for each tile")
    scores = (pipes["HMMA"] - 128 // 16) // (HS // 16)      # matmuls q k: one for each sweep
    clocks = {"tensor": 128 * 128 * HS * (scores + 1) / 2048, "special": pipes["MUFU"] * 8 * 32 / 16,
              "issue": sum(pipes.values()) * 8 / 4}
    return {"preset": call["preset"], "issued": sum(pipes.values()), **pipes, **clocks}


def rows90():
    """The rows of flash_instances.h that have kernels for compute capability 9.0."""
    return re.findall(r"^FLASH_INSTANCE\((\w+), bf16, PHI_", (ROOT / "attention/flash_instances.h").read_text(), re.M)


def report90(wanted, HS=64, jobs=os.cpu_count()):
    calls = flash_calls(HS)
    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda name: measure90(calls[name], HS), dict.fromkeys(["softmax", *wanted])))
    return [row for row in rows if row]


def table90(rows):
    shown = ("issued", "HMMA", "MUFU", "FMA", "ALU", "tensor", "special", "issue")
    lines = ["| preset | issued | wgmma | MUFU | FMA | ALU | clocks: tensor cores | special functions | issue |",
             "|---|" + "--:|" * len(shown)]
    return "\n".join(lines + [f"| {row['preset']} | " + " | ".join(f"{row[key]:,.0f}" for key in shown) + " |"
                              for row in rows])


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
        print("\nThe forward kernel for compute capability 9.0: instructions that a warp issues for 128x128 scores, "
              "and clocks of an SM.\n")
        print(table90(rows_90))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What the compiler makes of attention's kernels, without a GPU: registers, spills, instructions, and whether ptxas
serialized wgmma.

    .venv/bin/python dev/bench/sass.py exp exp_any_reweight      # these rows of attention/flash_instances.h
    .venv/bin/python dev/bench/sass.py --base COMMIT exp         # the kernels that differ from another commit's
    .venv/bin/python dev/bench/sass.py --base COMMIT             # every row: 15 minutes on two cores

Instructions are counted in the text of a kernel, by opcode: a loop's body counts once. Equal
counts, registers and spills mean that a change left the machine code as it was but for addresses and the choice of
registers. The exit code is 1 if a kernel differs, spills, or has its wgmma serialized.

Needs nvcc and nvdisasm (scripts/setup_cuda.sh, requirements-test.txt).
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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


def nvdisasm():
    """The Toolkit's nvdisasm, or the one of PyPI's nvidia-cuda-nvdisasm."""
    found = [toolkit() / "bin/nvdisasm", *sorted(ROOT.glob(".venv/lib/python*/site-packages/nvidia/cu*/bin/nvdisasm"))]
    for path in found:
        if path.exists():
            return path
    raise Missing("nvdisasm is missing: pip install -r requirements-test.txt installs it")


def run(tree, *command):
    done = subprocess.run([str(x) for x in command], cwd=tree, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"sass: {command[0]} failed:\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def compile_kernels(tree, source, *flags, architecture):
    """{kernel: {"registers", "spilled" (bytes), "serialized", "opcodes" (Counter)}} of a .cu file in a source tree."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "it.cubin"
        log = run(tree, toolkit() / "bin/nvcc", "-std=c++17", "-I.", "-O3", f"-arch={architecture}", "-cubin",
                  "-Xptxas", "-v", *flags, "-o", cubin, source)
        listing = run(tree, nvdisasm(), cubin)
    found = {}
    parts = re.split(r"Compiling entry function '(\w+)'", log)
    for name, text in zip(parts[1::2], parts[2::2]):
        found[name] = {"registers": int(re.search(r"Used (\d+) registers", text)[1]),
                       "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", text))),
                       "serialized": bool(re.search(rf"Potential Performance Loss.*{name}\b", log))}
    for section in re.split(r"^//-+ \.text\.", listing, flags=re.M)[1:]:
        name = re.match(r"\w+", section)[0]
        if name in found:
            found[name]["opcodes"] = Counter(re.findall(r"^ +/\*[0-9a-f]+\*/ +(?:@!?U?P\w+ +)?([\w.]+)", section, re.M))
    return found


def rows(tree):
    """The names of attention's instances, and which of them have kernels for compute capability 9.0."""
    text = (Path(tree) / "attention/flash_instances.h").read_text()
    names = re.findall(r"^FLASH_INSTANCE\((\w+),", text, re.M)
    return names, set(re.findall(r"^FLASH_INSTANCE\((\w+), bf16, PHI_", text, re.M))


def instance(tree, name):
    """The kernels of a row, by file and name."""
    with_90 = name in rows(tree)[1]
    files = {"flash_instance": "sm_90"} | ({"flash90_instance": "sm_90a"} if with_90 else {})
    return {(name, kernel): values for file, architecture in files.items()
            for kernel, values in compile_kernels(tree, f"attention/{file}.cu", f"-DINSTANCE=FLASH_{name}",
                                                  architecture=architecture).items()}


def compiled(tree, names):
    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kernels in pool.map(lambda name: instance(tree, name), names):
            found |= kernels
    return found


def differences(before, after):
    """What differs between two kernels, in words; empty if nothing does."""
    found = [f"{key} {before[key]} -> {after[key]}" for key in ("registers", "spilled") if before[key] != after[key]]
    b, a = before["opcodes"], after["opcodes"]
    if b != a:
        changes = (f"{op} {a[op] - b[op]:+d}" for op in sorted(a.keys() | b.keys()) if a[op] != b[op])
        percent = 100 * (a.total() / b.total() - 1)
        found.append(f"{b.total():,} -> {a.total():,} instructions ({percent:+.2f}%): {', '.join(changes)}")
    return "; ".join(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="rows of attention/flash_instances.h (default: all)")
    parser.add_argument("--base", metavar="COMMIT", help="compare with this commit")
    options = parser.parse_args()
    names = options.rows or rows(ROOT)[0]
    if unknown := set(names) - set(rows(ROOT)[0]):
        parser.error(f"unknown rows: {' '.join(sorted(unknown))}; expected some of {' '.join(rows(ROOT)[0])}")
    after, bad = compiled(ROOT, names), 0
    if options.base:
        with tempfile.TemporaryDirectory() as tree:
            run(ROOT, "sh", "-c", 'git archive "$1" | tar -x -C "$2"', "sh", options.base, tree)
            before = compiled(tree, [name for name in names if name in rows(tree)[0]])
        print(f"{len(after)} kernels, of which {len(after.keys() - before.keys())} are not in {options.base}")
    for (row, name), kernel in sorted(after.items()):
        faults = [word for word in ("spilled", "serialized") if kernel[word]]
        text = f"{kernel['registers']} registers, {kernel['opcodes'].total():,} instructions"
        if options.base:
            text = differences(before[row, name], kernel) if (row, name) in before else ""
        bad += bool(faults or (options.base and text))
        if text or faults:
            print(f"{row} {name}: {' '.join([text, *faults])}")
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as missing:
        sys.exit(f"sass: {missing}")

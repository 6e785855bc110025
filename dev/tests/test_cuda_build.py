"""Builds the CUDA sources with nvcc, without a GPU: there must be no warnings, no spilled registers, and no more
registers than the budget stated above each kernel (`// registers: at most 64 (name, name)`). The registers and the
occupancy in the table of doc/kernels.md must be those of the compiler.

By default it builds every other kernel for sm_90, and two instances of attention for sm_80 and sm_90: exp, which has
kernels for Hopper, and one drawn by commit.
CUDA_BUILD=all builds every source and instance for both, in about six minutes on two cores: run it after a change to
attention's kernels, because one instance may spill where the others do not.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "dev/bench")]
import draw
import sass

ALL = os.environ.get("CUDA_BUILD") == "all"
SOURCES = [path for folder in ("cuda", "attention")
           for path in sorted((ROOT / folder).iterdir()) if path.suffix in (".cuh", ".cu", ".h")]


def make(*arguments):
    """Runs make. Each target's output stays in one piece, even if several are built at once."""
    return subprocess.run(["make", "--output-sync", "-C", ROOT, *map(str, arguments)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def budgets():
    """{kernel: registers} according to the sources."""
    found = {}
    for path in SOURCES:
        for most, names in re.findall(r"^// registers: at most (\d+) \(([\w, ]+)\)", path.read_text(), re.M):
            for name in names.split(", "):
                assert name not in found, f"{path.name}: {name} has two budgets"
                found[name] = int(most)
    return found


def kernels():
    """{kernel: file} of all kernels in the programs."""
    kernel = re.compile(r"\bKERNEL void (?:__launch_bounds__\([^()]*(?:\([^()]*\)[^()]*)*\)\s+)?(\w+)\(")
    return {name: path.name for path in SOURCES for name in kernel.findall(path.read_text())}


def compiled(log):
    """(kernel, the same with template arguments, architecture, registers, bytes of spills) of each kernel in the output
    of ptxas -v."""
    parts = re.split(r"Compiling entry function '(\w+)' for '(sm_\d+a?)'", log)
    names = subprocess.run(["c++filt"], input="\n".join(parts[1::3]), text=True, capture_output=True,
                           check=True).stdout.split("\n")
    for full, architecture, text in zip(names, parts[2::3], parts[3::3]):
        name = re.match(r"(?:void )?(?:[\w()]+::)*(\w+)[<(]", full).group(1)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", text.split("Used")[0])))
        yield name, full, architecture, int(re.search(r"Used (\d+) registers", text).group(1)), spills


@pytest.fixture(scope="module", autouse=True)
def toolkit():
    lacking = make("-s", "lacking").stdout.split()
    if {"toolkit", "cublas"} & set(lacking):
        pytest.skip(f"no {' and no '.join(sorted(lacking))} installed; scripts/setup_cuda.sh installs what is missing")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The output of nvcc and ptxas; the build treats warnings as errors."""
    build = tmp_path_factory.mktemp("cuda")
    flags = ["-j", os.cpu_count(), "-k", "WERROR=1", f"BUILD={build}", "PTXAS=-Xptxas -v"]

    instances = (ROOT / "attention/flash_instances.h").read_text()
    rows90 = re.findall(r"^FLASH_INSTANCE\((\w+), bf16, PHI_", instances, re.M)

    def one_instance(name):
        """Builds a row of flash_instances.h, or the kernels of a program for ssmax alone, in a folder of its own."""
        row = "" if name == "ssmax" else f"_{name}"
        files = ["flash_instance"] + ["flash90_instance"] * (not row or name in rows90)
        return make(*flags, "GPUS=80 90", *([] if row else ["ATTN=ssmax"]), f"BUILD={build}/{name}",
                    *(f"{build}/{name}/cuda/attention/{file}{row}.o" for file in files))

    if ALL:
        others = [one_instance("ssmax")]
        tests = [f"{build}/cuda/tests/{path.stem}" for path in (ROOT / "dev/tests").glob("test_*.cu")]
        programs = [f"{build}/{name}cu" for name in ("train_gpt2", "eval_gpt2", "test_gpt2")]
        run = make(*flags, *programs, f"{build}/cuda/flash.so", *tests)
    else:
        rows = re.findall(r"^FLASH_INSTANCE\((\w+),", instances, re.M)
        flags[-1] += " -Xcompiler -fsyntax-only"     # nothing is linked, so the host compiler only checks its code
        others = [one_instance(name) for name in dict.fromkeys(["exp", *draw.sample(["ssmax", *rows], 1)])]
        sources = ["train_gpt2.cu", "eval_gpt2.cu", "attention/flash.cu",
                   *(f"cuda/{path.name}" for path in (ROOT / "cuda").glob("*.cu"))]
        run = make(*flags, "GPUS=90", *(f"{build}/cuda/{name.removesuffix('.cu')}.o" for name in sources))
    for build in run, *others:
        assert build.returncode == 0, build.stdout[-4000:]
    return "".join(build.stdout for build in (run, *others))


def test_every_kernel_has_a_budget():
    have, stated = set(kernels()), set(budgets())
    assert len(have) > 20
    assert not stated - have, "budgets of kernels that do not exist"
    assert not have - stated, "kernels without a line `// registers: at most N (name)` above them"


def test_no_warnings(log):
    assert not re.findall(r"^.*\bwarning\b.*$", log, re.M | re.I)
    # C7508: setmaxnreg is ignored; C7510, C7514: wgmma is serialized
    assert not re.findall(r"^.*Potential Performance Loss.*$", log, re.M)


def test_no_spills(log):
    entries = list(compiled(log))
    assert len(entries) > (100 if ALL else 20)
    assert {architecture for _, _, architecture, _, _ in entries} - {"sm_90a"} == {"sm_80", "sm_90"}
    spilled = {(full, architecture): spills
               for name, full, architecture, _, spills in entries if spills and name in kernels()}
    assert not spilled, "bytes of spills"


def test_registers(log):
    most, over, seen = budgets(), [], set()
    for name, full, architecture, registers, _ in compiled(log):
        seen.add(name)
        if name in most and registers > most[name]:
            over.append(f"{full} ({architecture}): {registers}, but the budget is {most[name]}")
    assert not over
    missing = set(most) - seen
    assert len(missing) < len(most) / 2 and not (ALL and missing), f"not compiled: {missing}"


# Of an SM of compute capability 9.0. Registers are given to warps of each quarter of an SM, 256 at a time.
MOST_THREADS, MOST_BLOCKS, REGISTERS, SHARED = 2048, 32, 65536, 228 * 1024


def occupancy(registers, threads, shared):
    """The percentage of an SM's threads that it holds at once, as cuda_occupancy.h of the Toolkit computes it."""
    warps = 4 * (REGISTERS // 4 // (-(-32 * registers // 256) * 256))
    blocks = min(MOST_BLOCKS, MOST_THREADS // threads, warps // -(-threads // 32), SHARED // (shared + 1024))
    return f"{100 * blocks * threads / MOST_THREADS:.0f}"


def test_occupancy():
    kernels = ((64, 256, 24576), (50, 256, 24576), (40, 96, 0), (48, 96, 0), (32, 192, 0), (32, 1024, 256))
    assert [occupancy(*kernel) for kernel in kernels] == ["50", "50", "75", "61", "94", "100"]


def documented_kernels():
    """(names of kernels, registers, threads, bytes of shared memory, percentages of occupancy) for bf16, and for float
    if they differ, of each row of the table in doc/kernels.md."""
    section = (ROOT / "doc/kernels.md").read_text().split("## Registers, shared memory, occupancy")[1].split("\n## ")[0]
    for line in section.splitlines():
        if not re.match(r"\| `\w+_kernel`", line):
            continue
        names, *cells, filled = line.strip("| ").split(" | ")
        registers, threads = ([re.findall(r"\d+", part) for part in cell.split(" / ")] for cell in cells[:2])
        size, unit = re.match(r"(\d+) ?(KB|)", cells[2]).groups()
        percentages = set(re.findall(r"\d+", filled.split(";")[0]))
        yield (re.findall(r"`(\w+)`", names), [list(map(int, part)) for part in registers],
               [int(part[0]) for part in threads], int(size) * (1024 if unit else 1), percentages)


def test_the_documented_registers(log):
    """Each number is that of an instance of one of the row's kernels, and gives the row's occupancy."""
    page = (ROOT / "doc/kernels.md").read_text()
    version = re.search(r"`ptxas -v` of nvcc ([\d.]+\d)", page)[1]
    if sass.nvcc_version() != version:
        pytest.skip(f"the table is for nvcc {version}, but this is {sass.nvcc_version()}")
    instances = [(name, full, registers) for name, full, architecture, registers, _ in compiled(log)
                 if architecture == "sm_90"]
    rows = list(documented_kernels())
    assert len(rows) > 20
    for names, registers, threads, shared, percentages in rows:
        found = set()
        for i, numbers in enumerate(registers):
            of_type = {n for name, full, n in instances if name in names and
                       (len(registers) == 1 or ("bfloat16" in full.split("(")[0]) == (i == 0))}
            assert set(numbers) <= of_type, f"{names}: {numbers}, but these have {sorted(of_type)}"
            found |= {occupancy(n, threads[min(i, len(threads) - 1)], shared) for n in numbers}
        assert not percentages or percentages == found, f"{names}: {percentages}, but it should be {found}"

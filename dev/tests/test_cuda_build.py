"""Builds the CUDA sources with nvcc, without a GPU: there must be no warnings, no spilled registers, and no more
registers than the budget stated above each kernel (`// registers: at most 64 (name, name)`).

By default it builds what the commit draws: the kernels of one program for sm_90 and one instance of attention, exp for
half of the commits, for sm_80 or sm_90.
CUDA_BUILD=all builds every source and instance for both, in about six minutes on two cores: run it after a change to
attention's kernels, because one instance may spill where the others do not.
"""
import os
import re
import shutil
import subprocess
import sys

import pytest

import draw
from trainer import ROOT

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
    if {"toolkit", "cublas", "cublas12"} & set(lacking):
        pytest.skip(f"no {' and no '.join(sorted(lacking))} installed; scripts/setup_cuda.sh installs what is missing")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The output of nvcc and ptxas; the build treats warnings as errors."""
    build = tmp_path_factory.mktemp("cuda")
    flags = ["-j", os.cpu_count(), "-k", "WERROR=1", f"BUILD={build}", "PTXAS=-Xptxas -v"]

    instances = (ROOT / "attention/flash_instances.h").read_text()
    rows90 = re.findall(r"^FLASH_INSTANCE\((\w+), bf16, PHI_", instances, re.M)

    def one_instance(name, gpus):
        """Builds a row of flash_instances.h, or the kernels of a program for ssmax alone, in a folder of its own."""
        row = "" if name == "ssmax" else f"_{name}"
        files = ["flash_instance"] + ["flash90_instance"] * ("90" in gpus and (not row or name in rows90))
        return make(*flags, f"GPUS={gpus}", *([] if row else ["ATTN=ssmax"]), f"BUILD={build}/{name}",
                    *(f"{build}/{name}/cuda/attention/{file}{row}.o" for file in files))

    if ALL:
        others = [one_instance("ssmax", "80 90")]
        tests = [f"{build}/cuda/tests/{path.stem}" for path in (ROOT / "dev/tests").glob("test_*.cu")]
        programs = [f"{build}/{name}cu" for name in ("train_gpt2", "eval_gpt2", "test_gpt2")]
        run = make(*flags, *programs, f"{build}/cuda/flash.so", *tests)
    else:
        rows = re.findall(r"^FLASH_INSTANCE\((\w+),", instances, re.M)
        flags[-1] += " -Xcompiler -fsyntax-only"     # nothing is linked, so the host compiler only checks its code
        other, = draw.sample(["ssmax", *(row for row in rows if row != "exp")], 1)
        others = [one_instance(*draw.sample([(name, gpu) for name in ("exp", other) for gpu in ("80", "90")], 1)[0])]
        sources = [*draw.sample(["train_gpt2.cu", "eval_gpt2.cu"], 1), "attention/flash.cu",
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
    assert {architecture for _, _, architecture, _, _ in entries} >= ({"sm_80", "sm_90"} if ALL else {"sm_90"})
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


@pytest.mark.drawn(1)
@pytest.mark.parametrize("version", ["12.4.127", "12.8.90"])
def test_host_code_with_the_headers_of_cuda_12(tmp_path, version):
    """Of the runtime, from PyPI; 12.4 is the oldest. What needs cuBLASLt's, which are in a wheel of 0.6 GB, is compiled
    only in the long run. There is no nvcc of CUDA 12 on PyPI for the kernels."""
    cuda = tmp_path / "cuda-12"
    wheels = [f"nvidia-cuda-runtime-cu12=={version}", *["nvidia-cublas-cu12==12.8.4.1"] * ALL]
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:",
                           "--target", tmp_path / "pypi", *wheels], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot download {' '.join(wheels)}")
    shutil.copytree(tmp_path / "pypi/nvidia/cuda_runtime/include", cuda / "include")
    real, nccl = make("-s", "--eval=where:; @echo $(CUDA) $(or $(NCCL),0)", "where").stdout.split()
    for folder in ("crt", "nv"):                                # of the compiler and of CCCL
        (cuda / "include" / folder).symlink_to(ROOT / real / "include" / folder)
    sources = ["cuda/collective", "cuda/device", "cuda/graphs", "attention/flash90_instance_exp"]
    if ALL:
        sources += ["attention/flash", "cuda/matmul", "cuda/matmul_file", "train_gpt2", "eval_gpt2", "test_gpt2"]
    built = make("-j2", f"BUILD={tmp_path}/build", "WERROR=1", f"CUDA={cuda}", "CU_OPT=-fsyntax-only",
                 f"CUBLAS={tmp_path}/pypi/nvidia/cublas", f"NCCL={nccl}",
                 *(f"{tmp_path}/build/on_cpu/{source}.o" for source in sources))
    assert built.returncode == 0, built.stdout[-4000:]
    assert make("-s", "lacking", f"CUDA={cuda}", "NCCL=0").stdout == "cublas12\n"     # not that of CUDA 13 in .cuda

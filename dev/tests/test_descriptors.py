"""wgmma's matrix descriptors, as cuda/hopper.cuh makes them and as dev/cuda_on_cpu decodes them, equal CUTLASS's, whose
headers are in a package on PyPI."""
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "dev/cuda_on_cpu"
INCLUDE = "cutlass_library/source/include"
sys.path[:0] = [str(EMULATOR), str(ROOT / "data")]
from shards import DataError
from sources import package
from test_cuda_on_cpu import CXX, cuda_headers
from trainer import make


def cutlass_headers(folder):
    try:
        wheel = package("nvidia_cutlass-4.2.0.0-py3-none-any.whl", "nvidia-cutlass==4.2.0",
                        "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6", "binary")
    except DataError as error:
        pytest.skip(str(error))
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder, [name for name in files.namelist() if name.startswith(INCLUDE)])
    return folder / INCLUDE


@pytest.mark.drawn(2, of="long tests")
def test_descriptors_equal_cutlass(tmp_path):
    program = tmp_path / "cutlass_descriptors"
    include = ["-I", ROOT, "-I", EMULATOR, "-isystem", cutlass_headers(tmp_path), "-isystem", cuda_headers(),
               "-isystem", cuda_headers() / "cccl"]
    emulator = ROOT / "build/emulator/emulator.a"
    make("-s", "-j2", emulator.relative_to(ROOT), check=True)
    sources = [ROOT / "dev/tests/cutlass_descriptors.cpp", emulator]
    libraries = ["-fopenmp", "-ldl", "-lpthread"]
    done = subprocess.run([CXX, "-std=c++17", "-O0", "-w", *include, *sources, "-o", program, *libraries],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0 and "8 layouts compared, 0 differences" in run.stdout, run.stdout + run.stderr

"""wgmma's matrix descriptors, as cuda/hopper.cuh makes them and as dev/cuda_on_cpu decodes them, equal CUTLASS's.

    pip download nvidia-cutlass==4.2.0 --no-deps && unzip nvidia_cutlass*.whl
    CUTLASS=cutlass_library/source/include pytest dev/tests/test_descriptors.py

CUTLASS names the folder of CUTLASS's headers; an installed nvidia-cutlass is found. Skipped where there is none.
"""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "dev/cuda_on_cpu"
sys.path.insert(0, str(EMULATOR))
from test_cuda_on_cpu import CXX, cuda_headers


def cutlass_headers():
    installed = importlib.util.find_spec("cutlass_library")
    places = [os.environ.get("CUTLASS"), installed and Path(installed.origin).parent / "source/include"]
    for place in places:
        if place and (Path(place) / "cute/arch/mma_sm90_desc.hpp").exists():
            return Path(place).resolve()
    pytest.skip("CUTLASS's headers are missing (pip install nvidia-cutlass==4.2.0, or CUTLASS=DIR names their folder)")


def test_descriptors_equal_cutlass(tmp_path):
    program = tmp_path / "cutlass_descriptors"
    include = ["-I", ROOT, "-I", EMULATOR, "-isystem", cutlass_headers(), "-isystem", cuda_headers(),
               "-isystem", cuda_headers() / "cccl"]
    sources = [ROOT / "dev/tests/cutlass_descriptors.cpp", *(EMULATOR / f"{name}.cpp"
                                                             for name in ("blocks", "hopper", "runtime"))]
    done = subprocess.run([CXX, "-std=c++17", "-O0", "-w", *include, *sources, "-o", program, "-ldl", "-lpthread"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0 and "8 layouts compared, 0 differences" in run.stdout, run.stdout + run.stderr

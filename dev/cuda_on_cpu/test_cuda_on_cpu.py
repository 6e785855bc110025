"""The emulator's test: the sums of mma, the runtime's functions, and that each planted defect is found under the
settings that should find it. dev/tests/test_kernels.cu tests what kernels compute.

    pytest dev/cuda_on_cpu/test_cuda_on_cpu.py

Links three versions of the test program (plain; AddressSanitizer; ThreadSanitizer for the race check) with the emulator
that the CUDA programs on the CPU contain. CUDA_ON_CPU_LONG=1 also runs every correct kernel under every setting.
"""
import itertools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "dev/tests"))
from trainer import make        # noqa: E402

CXX = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
# for the kernels and the link; the emulator is the same in all three
BUILDS = {"plain": [], "address": ["-fsanitize=address"], "race": ["-fsanitize=thread"]}


def cuda_headers():
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda",
              ROOT / ".cuda/nvidia/cu13"]
    for place in places:
        if place and (Path(place) / "include/cuda_runtime.h").exists():
            return Path(place) / "include"
    pytest.skip("CUDA's headers are missing (CUDA=DIR names their folder)")


def build_programs(folder, test):
    """Builds the emulator, and each build of the test program in the folder, which it returns."""
    include = ["-I", str(HERE), "-isystem", str(cuda_headers())]
    emulator = "build/emulator/emulator.a"
    made = make("-j2", emulator, capture_output=True, text=True)
    if made.returncode and "scripts/setup_cuda.sh" in made.stderr:
        pytest.skip("CUDA's headers are missing: scripts/setup_cuda.sh installs them")
    assert made.returncode == 0, made.stderr

    def build(name, flags):
        done = subprocess.run([CXX, *FLAGS, *flags, *include, "-x", "c++", HERE / test, "-x", "none", ROOT / emulator,
                               "-o", folder / name, "-rdynamic", "-ldl", "-lpthread"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, BUILDS, BUILDS.values()))
    return folder


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    return build_programs(tmp_path_factory.mktemp("cuda_on_cpu"), "test_cuda_on_cpu.cu")


def run(programs, build, name, defect, settings=""):
    """settings: "ORDER=reverse COPY=wait" """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_ON_CPU_")}
    environment.update({"CUDA_ON_CPU_" + s.split("=")[0]: s.split("=")[1] for s in settings.split()})
    environment.setdefault("CUDA_ON_CPU_THREADS", "2")
    return subprocess.run([programs / build, name, str(int(defect))], env=environment, capture_output=True, text=True,
                          timeout=300)


def assert_found(programs, name, found):
    """found: what FOUND says. All of the settings find the defect, or any of them, if that is enough."""
    message, build, settings, *enough = (found, "plain", [""]) if isinstance(found, str) else found
    runs = [run(programs, build, name, True, s) for s in settings]
    found = [r.returncode != 0 and re.search(message, r.stdout + r.stderr) for r in runs]
    assert any(found) if enough else all(found), "\n".join(r.stdout + r.stderr for r in runs)


def assert_numbers(programs, build, settings):
    r = run(programs, build, "numbers", False, settings)
    assert r.returncode == 0, r.stdout + r.stderr
    assert "Sanitizer" not in r.stderr, r.stderr


WRONG = r"\d+ wrong"            # some results are
RACE = r"ThreadSanitizer: data race"
# Work in streams takes place in random order, which some seeds may leave as the program needs it.
LATE = ["STREAMS=late SEED=1", "STREAMS=late SEED=2", "STREAMS=late SEED=3", "STREAMS=late SEED=4"]

# name: the message that the plain build prints under the default settings; or the message, the build, and the settings,
# each of which must find it, or one of them (`any`)
FOUND = {
    "missing_barrier": WRONG,
    "missing_barrier_after_use": (WRONG, "plain", ["ORDER=greedy"]),
    "missing_syncwarp": WRONG,
    "missing_copy_wait": (WRONG, "plain", ["COPY=wait"]),
    "missing_barrier_after_copy": (WRONG, "plain", ["COPY=wait"]),
    "missing_copy_commit": (WRONG, "plain", ["COPY=wait"]),
    "wait_for_too_few_groups": (WRONG, "plain", ["COPY=wait"]),
    "copy_into_tile_in_use": (WRONG, "plain", ["COPY=issue"]),
    "missing_stream_wait": (WRONG, "plain", LATE, any),
    "missing_host_wait": (WRONG, "plain", ["STREAMS=late"]),
    "buffer_changed_under_copy": (WRONG, "plain", ["STREAMS=late"]),
    "diverged_shuffle": r"EXITED LANE: thread \d+ has exited, .*16 threads wait in __shfl_xor_sync at .*cu:\d+: 0-15",
    "shuffles_at_two_places": r"MISMATCH: .*16 threads wait in __shfl_xor_sync at .*: 0-15; 1 thread wait in .*: 16",
    "exited_lane": (r"EXITED LANE: ", "plain", ["", "ORDER=reverse"]),
    "partial_mask": r"WRONG MASK: __shfl_xor_sync at .*:\d+ with the mask 0000ffff",
    "partial_warp": r"EXITED LANE: .*ffff0000",
    "barrier_in_branch": r"MISMATCH: threads of a block wait at different barriers: 40 threads",
    "barrier_after_exit": r"DEADLOCK: 63 threads wait in __syncthreads at .*: 0-49, 51-63; 1 "
                          r"thread exited: 50",
    "deadlock": r"DEADLOCK: 40 threads wait in __syncthreads at .*: 0-39; 24 threads wait in "
                r"__shfl_xor_sync at .*: 40-63",
    "write_past_dynamic_shared": r"OUT OF BOUNDS: byte 0 past the end of the 4224 of dynamic shared memory",
    "write_just_past_dynamic_shared": r"OUT OF BOUNDS: .*dynamic shared memory, 160 bytes",
    "write_past_shared_array": r"OUT OF BOUNDS: .*shared array first \(.*, 160 bytes",
    "uninitialized_shared": WRONG,
    "uninitialized_device_memory": WRONG,
    "read_past_device_memory": r"OUT OF BOUNDS: .* 0 bytes past the end of the 256 of cudaMalloc number 1",
    "write_just_past_device_memory": r"OUT OF BOUNDS: .*past the end of the 200 bytes of cudaMalloc number 1",
    "race_between_warps": (RACE, "race", [""]),
    "race_between_blocks": (RACE, "race", ["", "THREADS=1"]),
    "missing_fence": (RACE, "race", ["", "THREADS=1"]),
    "race_in_later_launch": (RACE, "race", ["", "THREADS=1"]),
    "unordered_kernels_far_apart": (RACE, "race", [""]),
    "unordered_library": (RACE, "race", [""]),
    "wait_for_captured_stream": r"CAPTURE: cudaStreamSynchronize is not permitted",
    "wait_for_device_in_capture": r"CAPTURE: cudaDeviceSynchronize is not permitted",
    "allocation_in_capture": r"CAPTURE: cudaMalloc is not permitted",
    "event_in_capture": r"CAPTURE: cudaEventRecord: .* captures only kernels",
    "legacy_stream_in_capture": r"CAPTURE: .* work in the legacy stream",
    "pageable_memory_in_capture": r"CAPTURE: cudaMemcpyAsync: .* not pinned",
    "missing_wait_before_graph": (WRONG, "plain", LATE, any),
    "misaligned_ldmatrix": r"MISALIGNED: ldmatrix_x4 at .*cu:\d+",
    "ldmatrix_past_shared": r"OUT OF BOUNDS: ldmatrix_x4 at .*cu:\d+",
    "bank_conflicts": r"28 bank conflicts of ldmatrix",
    "bank_conflicts_of_copies": r"28 bank conflicts of copies",
    "copy_to_misaligned": r"MISALIGNED: copy_async_16 at .*cu:\d+",
    "misaligned_load": r"MISALIGNED: load_16 at .*cu:\d+ .* byte 8 of the 128 of cudaMalloc number 1",
    "copy_past_shared": r"OUT OF BOUNDS: copy_async_16 at .*cu:\d+",
    "grid_too_large": r"OVER LIMIT: .*a grid of \(1,65536,1\)",
    "too_much_shared": r"OVER LIMIT: .*232449 bytes of dynamic shared memory",
    "arrays_too_large": r"OVER LIMIT: the block's shared arrays take 49168 bytes with second",
    "host_pointer": r"HOST POINTER: add_one\(float\*, int\), launched at .*: its pointer argument number 1",
    "host_touches_device_memory": r"HOST ACCESS: the host touches 0 bytes past the end of the 256 of cudaMalloc",
    "stack_overflow": r"STACK OVERFLOW",
    "write_past_local_array": (r"AddressSanitizer: stack-buffer-overflow", "address", [""]),
}

# Races, which wrong values may also reveal; the race check finds them in any order of threads.
RACES = ["missing_barrier", "missing_barrier_after_use", "missing_syncwarp", "missing_copy_wait",
         "missing_barrier_after_copy", "missing_copy_commit", "wait_for_too_few_groups", "copy_into_tile_in_use",
         "missing_stream_wait", "missing_host_wait", "buffer_changed_under_copy", "missing_wait_before_graph"]

SETTINGS = [f"ORDER={order} COPY={copy} STREAMS={streams}" for order, copy, streams in itertools.product(
    ("forward", "reverse", "random", "greedy"), ("issue", "wait"), ("once", "late", "any"))]
SOME = ["", "ORDER=reverse COPY=wait STREAMS=late", "ORDER=random COPY=wait STREAMS=any SEED=7",
        "ORDER=greedy COPY=wait STREAMS=late SEED=3"]


def test_every_defect_is_listed(programs):
    assert sorted(run(programs, "plain", "help", 0).stdout.split()) == sorted(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_defect_is_found(programs, name):
    assert_found(programs, name, FOUND[name])


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", RACES)
def test_race_is_found(programs, name):
    for settings in ("", "ORDER=reverse COPY=wait"):
        r = run(programs, "race", name, True, settings)
        assert r.returncode != 0 and re.search(RACE, r.stderr), settings + r.stdout + r.stderr


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", FOUND)
def test_correct_twin_passes(programs, name):
    settings = SETTINGS if os.environ.get("CUDA_ON_CPU_LONG") else SOME
    for build, s in [("plain", s) for s in settings] + [("address", SOME[1]), ("race", SOME[2])]:
        r = run(programs, build, name, False, s)
        assert r.returncode == 0 and not r.stderr, f"{build} {s}\n{r.stdout}{r.stderr}"


@pytest.mark.parametrize("build, settings", [("plain", s) for s in SOME] + [("address", SOME[1]), ("race", SOME[2])])
def test_numbers(programs, build, settings):
    assert_numbers(programs, build, settings)


def test_settings_are_checked(programs):
    for settings, message in [("ORDER=backwards",
                               "CUDA_ON_CPU_ORDER=backwards is not one of forward, reverse, random, greedy, straggler"),
                              ("THREADS=two", "CUDA_ON_CPU_THREADS=two is not a whole number")]:
        r = run(programs, "plain", "help", 0, settings)
        assert r.returncode != 0 and message in r.stderr


def test_a_lower_limit_of_shared_memory(programs):
    """A block requests all of 227 KB where the limit is lower."""
    for less, code in (("232448", False), ("232447", True)):
        r = run(programs, "plain", "too_much_shared", False, "SHARED=" + less)
        assert (r.returncode != 0) == code, r.stdout + r.stderr
    assert "232448 bytes of dynamic shared memory; a block has 232447" in r.stderr
    assert "is not from 49152 to 232448" in run(programs, "plain", "help", 0, "SHARED=232449").stderr


def test_report_counts_bank_conflicts(programs):
    r = run(programs, "plain", "bank_conflicts", True, "REPORT=1")
    assert (re.search(r"ldmatrix 1, bank conflicts 28", r.stderr)
            and re.search(r"test_cuda_on_cpu.cu:\d+: 28 bank conflicts", r.stderr))


def test_the_shared_keyword_is_rejected(programs, tmp_path):
    source = tmp_path / "a.cu"
    source.write_text('#include "gpu_on_cpu.h"\nKERNEL void k() { __shared__ float x[4]; x[0] = 1; }\n')
    done = subprocess.run([CXX, "-x", "c++", "-std=c++17", "-fsyntax-only", "-I", HERE, "-isystem", cuda_headers(),
                           source], capture_output=True, text=True)
    assert done.returncode != 0 and "use SHARED_ARRAY" in done.stderr

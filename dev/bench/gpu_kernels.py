"""Runs our kernels under the tools that observe a GPU's kernels. Needs NumPy, but no PyTorch.

    python3 dev/bench/gpu_kernels.py run FLASH.SO bf16|fp32 ATTN T HS VS
        one forward and backward pass of attention; checks that its results are finite. Needs no cuBLASLt
    python3 dev/bench/gpu_kernels.py step REPORT TRAIN_GPT2CU
        the time and the memory traffic of each kernel in one training step at 124M, by ncu

Exit codes of step: 0; 1 if a program failed; 77 if ncu is not allowed to read the counters.
"""
import csv
import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/bench"), str(ROOT / "dev/tests")]
import cpu_step
import gpu_report
import gpu_step
from flash_types import Shape, arrays_for, scalars_at_start

STEP_METRICS = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
STEP_MODEL, STEP_BATCH, STEP_LENGTH = "124M", 16, 1024
# The kernel with which a step ends, and the names of cuBLASLt's kernels.
LAST_OF_STEP, MATMULS = "adamw_kernel", "nvjet|cublas|cutlass|gemm"
# ncu's units, in seconds and bytes; numbers in other units, such as inst, stay as they are.
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "Kbyte": 1e3,
         "Mbyte": 1e6, "Gbyte": 1e9}


def stored(x, dtype):
    """Converts float32 to the kernels' type; to bf16 by dropping the low half."""
    return x.copy() if dtype == "fp32" else (x.view(numpy.uint32) >> 16).astype(numpy.uint16)


def loaded(x, dtype):
    return x if dtype == "fp32" else (x.astype(numpy.uint32) << 16).view(numpy.float32)


def run(library, dtype, attn, T, HS, VS):
    """{name: array} of what a forward and backward pass writes."""
    random, B, NH = numpy.random.default_rng(0), 1, 2
    shape, arrays, held = Shape(B, T, NH, NH, HS, VS, T, NH * HS, NH * HS, NH * VS, NH * VS), arrays_for(library), {}
    q, k, v, dout = (random.standard_normal((B, T, NH, size), dtype=numpy.float32) for size in (HS, HS, VS, VS))
    if attn.startswith("lssa"):
        q, k = (x / numpy.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items():
        held[name] = stored(x, dtype)
    for name, like in {"out": v, "dq": q, "dk": k, "dv": v}.items():
        held[name] = numpy.zeros_like(stored(like, dtype))
    held["stats"] = numpy.zeros((B, NH, T, 4), numpy.float32)
    for name, x in held.items():
        setattr(arrays, name, x.ctypes.data)
    scalars = []
    for i, (size, start, trained) in scalars_at_start(library, attn, shape).items():
        scalars += numpy.full(size, start, numpy.float32), numpy.zeros(size, numpy.float32)
        arrays.scalars[i], arrays.grads[i] = scalars[-2].ctypes.data, scalars[-1].ctypes.data if trained else None
    library.flash_test(attn.encode(), ctypes.c_bool(dtype == "bf16"), ctypes.byref(shape), ctypes.byref(arrays))
    return {name: loaded(held[name], dtype) for name in ("out", "dq", "dk", "dv")}


def main_run(library, dtype, attn, *sizes):
    T, HS, VS = map(int, sizes)
    results = run(ctypes.CDLL(str(Path(library).resolve())), dtype, attn, T, HS, VS)
    wrong = [name for name, x in results.items() if not numpy.isfinite(x).all() or not x.any()]
    if wrong:
        raise SystemExit(f"gpu_kernels: {attn}: {', '.join(wrong)} not finite, or all zero")
    print(f"gpu_kernels: {attn} {dtype}, T = {T}, heads of {HS}: norm of out {numpy.linalg.norm(results['out']):.4g}")


# ---------------------------------------------------------------- ncu

def observe(metrics, command, *flags):
    """The output of ncu, which observes the kernels that a command launches."""
    words = ["ncu", "--csv", "--clock-control", "none", "--metrics", ",".join(metrics), *flags, *map(str, command)]
    result = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return result.stdout + result.stderr


def parse_launches(text):
    """[(kernel, {metric: value})] from `ncu --csv`, in the order of the launches. The command's own output may surround
    the table."""
    lines = text.splitlines()
    if "ERR_NVGPUCTRPERM" not in text and "The application returned an error code" in text:
        raise SystemExit("\n".join([*lines[-20:], "gpu_kernels: the program failed under ncu"]))
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        said = "ERR_NVGPUCTRPERM", "==ERROR==", "No kernels were profiled"
        reason = next((line for line in lines if any(word in line for word in said)), "ncu printed no table")
        print(f"the counters cannot be read: {reason.strip()}")
        sys.exit(gpu_report.NO_GPU)
    found = {}
    for row in csv.DictReader(lines[head:]):
        if row.get("Metric Value"):
            value = float(row["Metric Value"].replace(",", "")) * UNITS.get(row["Metric Unit"], 1)
            found.setdefault(int(row["ID"]), (row["Kernel Name"], {}))[1][row["Metric Name"]] = value
    return [found[number] for number in sorted(found)]


# ---------------------------------------------------------------- a step by kernel

def kind_of(name):
    """The name of a kernel's row."""
    return "matmuls (cuBLASLt)" if re.search(MATMULS, name) else re.sub(r"^void |[<(].*", "", name)


def parse_step(text):
    """{kernel: [launches, seconds, bytes read, bytes written]} of the last step that ncu observed from end to end."""
    launches = parse_launches(text)
    ends = [i for i, (name, _) in enumerate(launches) if LAST_OF_STEP in name]
    if len(ends) < 2:
        raise SystemExit(f"gpu_kernels: ncu saw {len(launches)} launches, {len(ends)} of them of {LAST_OF_STEP}; "
                         "expected at least 2, between which a step lies")
    found = {}
    for name, values in launches[ends[-2] + 1:ends[-1] + 1]:
        sums = found.setdefault(kind_of(name), [0] * 4)
        sums[:] = [a + b for a, b in zip(sums, (1, *(values[metric] for metric in STEP_METRICS)))]
    return found


def step_table(report, found):
    rows = [[f"`{name}`" if "_kernel" in name else name, *sums]
            for name, sums in sorted(found.items(), key=lambda item: -item[1][1])]
    rows.append(["all", *(sum(column) for column in zip(*found.values()))])
    report.table("counters", f"A step by kernel: {STEP_MODEL}, B = {STEP_BATCH}, T = {STEP_LENGTH}, bf16",
                 ["kernel", "launches", "ms per step", "GB read", "GB written", "TB/s"],
                 [[name, launches, f"{1e3 * seconds:.3f}", f"{read / 1e9:.2f}", f"{written / 1e9:.2f}",
                   f"{(read + written) / seconds / 1e12:.2f}"] for name, launches, seconds, read, written in rows],
                 ["by ncu, which runs one kernel at a time: their sum is not the time of a step",
                  "bytes are those that device memory moves, not those that the second-level cache answers"])


def main_step(folder, program):
    report = gpu_report.Report(folder)
    report.resume("counters")
    with gpu_step.scratch_folder() as data:
        tokens = 2 * STEP_BATCH * STEP_LENGTH + 1
        cpu_step.write_shard(Path(data) / "random_train_000001.bin", tokens)
        # --profile: without CUDA graphs, and without a checkpoint at the end.
        command = gpu_step.our_command(program, STEP_MODEL, STEP_BATCH, STEP_LENGTH, 2, data)
        # Of the first step, only the end is needed; observing the rest would take seconds.
        text = observe(STEP_METRICS, [*command, "--profile"], "--cache-control", "none", "--launch-skip", "100")
    found = parse_step(text)
    step_table(report, found)
    report.save()
    launches, seconds, read, written = (sum(column) for column in zip(*found.values()))
    print(f"{launches} launches, {1e3 * seconds:.2f} ms, {(read + written) / 1e9:.1f} GB")


def main():
    verb, *words = sys.argv[1:] or [""]
    if verb == "run" and len(words) == 6:
        return main_run(*words)
    if verb == "step" and len(words) == 2:
        return main_step(*words)
    asked = verb in ("-h", "--help")
    print(__doc__, file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)


if __name__ == "__main__":
    sys.exit(main())

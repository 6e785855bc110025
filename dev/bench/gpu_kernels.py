"""Runs only the kernels of attention (flash.so), for the tools that observe a GPU's kernels. Needs NumPy, but no
PyTorch and no cuBLASLt.

    python3 dev/bench/gpu_kernels.py run FLASH.SO bf16|fp32 ATTN T HS VS [B NH]
        one forward and backward pass; checks that its results are finite
    python3 dev/bench/gpu_kernels.py count REPORT FLASH.SO [ATTN...]
        the instructions that each kernel issues, by ncu: those for compute capability 8.0, then those for 9.0 if the
        GPU has it

A kernel issues a·T² + b·T + c instructions over T tokens. Counts at three lengths give a, the share of the main loops
without prologue and epilogue. The tables give the instructions for the scores of a tile, next to the count of
dev/bench/sass.py. On 9.0, a warp that waits for an mbarrier may ask for it again, which sass.py does not count.

Exit codes of count: 0, or 77 if ncu is not allowed to read the counters.
"""
import csv
import ctypes
import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/bench"), str(ROOT / "dev/tests")]
import gpu_report
from flash_types import Shape, arrays_for, scalars_at_start

METRIC, NO_KERNELS = "smsp__inst_issued.sum", "No kernels were profiled"
# By the value of FLASH90 with which they run. A tile's scores are a warp's for 8.0, and a block's for 9.0.
KERNELS = {"0": ("flash_forward_kernel", "flash_dq_kernel", "flash_dkv_kernel"),
           "1": ("flash90_forward_kernel", "flash90_backward_kernel")}
SCORES = {"0": 32 * 64, "1": 128 * 128}
LENGTHS, HEADS, SIZE = (1024, 2048, 4096), 4, 64
COUNTED = ("softmax", "sigmoid", "softplus-l1", "mish-l1", "gelu-l1", "relu2-n", "softpick", "softmax-recentered",
           "softmax-recentered-l1", "lssar")


def stored(x, dtype):
    """Converts float32 to the kernels' type; to bf16 by dropping the low half."""
    return x.copy() if dtype == "fp32" else (x.view(numpy.uint32) >> 16).astype(numpy.uint16)


def loaded(x, dtype):
    return x if dtype == "fp32" else (x.astype(numpy.uint32) << 16).view(numpy.float32)


def run(library, dtype, attn, T, HS, VS, B=1, NH=2):
    """{name: array} of what a forward and backward pass writes."""
    random = numpy.random.default_rng(0)
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
    T, HS, VS, *rest = map(int, sizes)
    results = run(ctypes.CDLL(str(Path(library).resolve())), dtype, attn, T, HS, VS, *rest)
    wrong = [name for name, x in results.items() if not numpy.isfinite(x).all() or not x.any()]
    if wrong:
        raise SystemExit(f"gpu_kernels: {attn}: {', '.join(wrong)} not finite, or all zero")
    print(f"gpu_kernels: {attn} {dtype}, T = {T}, heads of {HS}: norm of out {numpy.linalg.norm(results['out']):.4g}")


# ---------------------------------------------------------------- counting

class NotPermitted(Exception):
    pass


def kernel_of(name):
    return next((kernel for kernels in KERNELS.values() for kernel in kernels if kernel in name), None)


def parse_counts(text):
    """{kernel: count} from `ncu --csv`; the first launch of each kernel counts."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        said = "ERR_NVGPUCTRPERM", "==ERROR==", NO_KERNELS
        reason = next((line for line in lines if any(word in line for word in said)), "ncu printed no table")
        raise NotPermitted(reason.strip())
    counts = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[head:]))):
        kernel = kernel_of(row["Kernel Name"])
        if kernel and row["Metric Name"] == METRIC:
            counts.setdefault(kernel, int(float(row["Metric Value"].replace(",", ""))))
    return counts


def count(library, attn, T, flash90):
    command = ["ncu", "--csv", "--metrics", METRIC, "--clock-control", "none",
               "--kernel-name", f"regex:{'|'.join(KERNELS[flash90])}", sys.executable, __file__, "run", library, "bf16",
               attn, str(T), str(SIZE), str(SIZE), "1", str(HEADS)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"FLASH90": flash90})
    return parse_counts(result.stdout + result.stderr)


def per_tile(by_length, scores):
    """Instructions for that many scores from {T: count} at T, 2T and 4T: a·T² + b·T + c, and T²/2 scores per head."""
    (t, n1), (t2, n2), (t4, n4) = sorted(by_length.items())
    assert (t2, t4) == (2 * t, 4 * t)
    quadratic = ((n4 - n1) - 3 * (n2 - n1)) / (6 * t * t)
    return quadratic * 2 * scores / HEADS


def by_sass(attn):
    """{kernel: instructions} of dev/bench/sass.py for a preset; {} if it cannot run (without nvdisasm, for example)."""
    result = subprocess.run([sys.executable, ROOT / "dev/bench/sass.py", "--json", attn], capture_output=True,
                            text=True)
    try:
        found = json.loads(result.stdout)
        return ({f"flash_{row['kernel']}_kernel": row["issued"] for row in found["rows"] if row["preset"] == attn}
                | {f"flash90_{row['kernel']}_kernel": 4 * row["issue"] for row in found["rows90"]
                   if row["preset"] == attn})
    except (ValueError, KeyError):
        return {}


def main_count(folder, library, *names):
    report = gpu_report.Report(folder)
    report.resume("counters")
    wanted = [attn for attn in names or COUNTED
              if not any(record["attn"] == attn for record in report.part("counters")["records"])]
    with ThreadPoolExecutor() as pool:
        expected = dict(zip(wanted, pool.map(by_sass, wanted)))
    for attn in wanted:
        for flash90 in KERNELS:
            try:
                counts = {T: count(library, attn, T, flash90) for T in LENGTHS}
            except NotPermitted as error:
                if flash90 == "1" and NO_KERNELS in str(error):
                    continue
                print(f"the counters cannot be read: {error}")
                return gpu_report.NO_GPU
            for kernel in KERNELS[flash90]:
                by_length = {T: counts[T][kernel] for T in LENGTHS if kernel in counts[T]}
                if len(by_length) == len(LENGTHS):
                    report.record("counters", {"attn": attn, "kernel": kernel},
                                  issued=per_tile(by_length, SCORES[flash90]), by_sass=expected[attn].get(kernel))
        tabulate(report)
        report.save()
    print(f"{len(report.part('counters')['records'])} kernels counted")
    return 0


def tabulate(report):
    titles = {"0": "Instructions that a warp issues for 32×64 scores, compute capability 8.0",
              "1": "Instructions that a block issues for 128×128 scores, compute capability 9.0"}
    for flash90, title in titles.items():
        rows = []
        for record in report.part("counters")["records"]:
            issued, expected, kernel = record["issued"], record["by_sass"], record["kernel"]
            if kernel in KERNELS[flash90]:
                rows.append([f"`{record['attn']}`", re.sub(r"flash(90)?_|_kernel", "", kernel), f"{issued:.0f}",
                             f"{expected:.0f}" if expected else "", f"{issued / expected:.2f}" if expected else ""])
        if rows:
            report.table("counters", f"{title}, bf16, heads of 64",
                         ["normalizer", "kernel", "by ncu", "by sass.py", "ncu / sass.py"], rows,
                         [f"ncu's {METRIC} at T = {', '.join(map(str, LENGTHS))}; the part that grows with T²",
                          *([] if any(row[3] for row in rows) else ["sass.py could not run here: it needs nvdisasm"])])


def main():
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        return print(__doc__)
    verb, *rest = words or [""]
    numbers = all(word.isdecimal() for word in rest[3:])
    if verb == "run" and len(rest) in (6, 7, 8) and rest[1] in ("bf16", "fp32") and numbers:
        return main_run(*rest)
    if verb == "count" and len(rest) >= 2:
        return main_count(*rest)
    print(f"{__doc__}\ngpu_kernels: expected run or count with the words above, not: {' '.join(words) or 'nothing'}",
          file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

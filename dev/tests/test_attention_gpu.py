"""dev/bench/attention_gpu.py after an error of CUDA, in dry runs: it records the method, starts anew, and measures the
rest."""
import json
import subprocess
import sys

import pytest

import trainer
from trainer import ROOT

sys.path.insert(0, str(ROOT / "dev/bench"))
import gpu_report

FLASH = ROOT / "build/on_cpu/flash.so"
ERROR = "CUDA error: an illegal memory access was encountered"
ENDED = "flash.so ended with exit code 2"

# The program, in which each method that SPOILT names fails from its n-th call in a process on. With n = 0, flash.so
# rejects the call, which ends the process. Each process appends its arguments to the file LOG.
PROGRAM = f"""
import collections
import json
import os
import sys

sys.path.insert(0, {str(ROOT / "dev/bench")!r})
import attention_gpu
from attention_gpu import Flash, function_of

spoilt, calls, run = json.loads(os.environ["SPOILT"]), collections.Counter(), Flash.run
with open(os.environ["LOG"], "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)


def call(*method):
    key = " ".join(map(str, method))
    calls[key] += 1
    if 0 < spoilt.get(key, 0) <= calls[key]:
        raise RuntimeError("{ERROR}\\nSearch for it.")
    return spoilt.get(key) == 0


def function_that_fails(case, way):
    function = function_of(case, way)
    return lambda *x: call(case.name, case.T, way) or function(*x)


def run_that_fails(self, name, dtype, shape, *rest):
    if call(name, shape.T, "ours-any-order" if shape.any_order else "ours"):
        shape.HS = 7
    run(self, name, dtype, shape, *rest)


attention_gpu.function_of, Flash.run = function_that_fails, run_that_fails
sys.exit(attention_gpu.main())
"""


def measured(folder, part, words, spoilt, code):
    """{(attn, T, way): record} of a run, and the budget of each process."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, folder / "program.py", folder / "report", part, "--dry-run", "--budget", "500", *words]
    env = trainer.environment(SPOILT=json.dumps(spoilt), LOG=str(folder / "log"))
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert result.returncode == code, result.stdout + result.stderr
    records = json.loads((folder / "report/report.json").read_text())["parts"][part]["records"]
    processes = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    assert all(words[:len(processes[0])] == processes[0] for words in processes)
    assert result.stdout.count("starts anew") == len(processes) - 1
    return ({(r["attn"], r["T"], r["way"]): r for r in records},
            [float(words[-1]) if "--budget" in words[len(processes[0]) - 1:] else 500.0 for words in processes])


@pytest.mark.skipif(not FLASH.exists(), reason="make build/on_cpu/flash.so")
def test_attention_goes_on(tmp_path):
    """PyTorch's method fails in its third round, one of ours at once, and softmax where it is timed beside another
    normalizer. Every other method has all of its rounds."""
    spoilt = {"softmax 17 sdpa-cudnn": 6, "softmax 17 ours-any-order": 0, "softmax 9 ours": 4}
    records, budgets = measured(tmp_path, "attention", ["--sweep", "17", "--lengths", "9", "--attn", "gelu-l1,ssmax"],
                                spoilt, gpu_report.FAILED)
    failed = {key: r["failed"] for key, r in records.items() if "failed" in r}
    assert failed == {("softmax", 17, "sdpa-cudnn"): ERROR, ("softmax", 17, "ours-any-order"): ENDED,
                      ("softmax", 9, "ours"): ERROR}
    rounds = {key: len(r["both_ms"]) for key, r in records.items() if key not in failed}
    assert rounds == {**{("softmax", 17, way): 3 for way in ("ours", "ours-mma", "sdpa-flash")},
                      ("gelu-l1", 9, "ours"): 2, ("ssmax", 9, "ours"): 2}
    assert len(budgets) == 4 and budgets == sorted(budgets, reverse=True) and budgets[-1] < 500


@pytest.mark.skipif(not FLASH.exists(), reason="make build/on_cpu/flash.so")
def test_others_go_on(tmp_path):
    """One of PyTorch's methods fails while it is checked, and ours in a round."""
    records, budgets = measured(tmp_path, "others", ["--lengths", "9", "--attn", "ssmax,gelu-l1"],
                                {"ssmax 9 sdpa": 1, "gelu-l1 9 ours": 4}, gpu_report.FAILED)
    failed = {key: r["failed"] for key, r in records.items() if "failed" in r}
    assert failed == {("ssmax", 9, "sdpa"): ERROR, ("gelu-l1", 9, "ours"): ERROR}
    assert {key: len(r["both_ms"]) for key, r in records.items() if key not in failed} == {
        ("ssmax", 9, way): 2 for way in ("ours", "flex", "compile")} | {("gelu-l1", 9, "compile"): 2}
    assert len(budgets) == 3

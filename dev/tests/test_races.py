"""The race check of the CUDA source on the CPU: ThreadSanitizer, with one of its threads for each CUDA thread
(dev/cuda_on_cpu).

Covers each kernel, each instance of attention forward and backward in float32 and bfloat16, and a step of the trainer
with its streams. CI runs a few cases of one of the three tests, drawn by commit; RACES=all, which no other run
includes, takes an hour.
"""
import functools
import os
import re
import shutil
import subprocess

import pytest

import draw
from trainer import ROOT, command, environment, make, make_data, metrics

ALL = os.environ.get("RACES") == "all"
# setarch -R turns off address randomization, which can get in ThreadSanitizer's way. Where a container forbids it, the
# check usually works anyway.
FIXED = (["setarch", "-R"] if shutil.which("setarch")
         and subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0 else [])

KERNELS = [""] if ALL else ["rmsnorm bf16 N=33 C=768", "rope bf16", "bias bf16 N=33 OC=144", "qk_norm bf16 N=33",
                            "swiglu bf16", "embedding bf16", "classifier bf16", "adamw bf16", "adamw odd", "norms",
                             "gau bf16 B=2 T=3 E=96 HS=48 l2"]
# One of each instance of attention (attention/flash_instances.h), of each learned scalar, and of windows and caps, with
# its instance for bf16.
INSTANCES = {
    "ssmax-bias": "exp", "ssmax-pn": "exp", "softmax-sink": "exp", "softmax-recentered": "exp_recenter",
    "softmax-recentered-l1": "exp_recenter_l1", "softplus-l1": "softplus", "lssar": "softplus_reweight",
    "sigmoid": "sigmoid", "identity": "identity", "relu-l1": "relu", "relu2-n": "relu2", "gelu-l1": "gelu",
    "relu6-l1": "relu6", "mish-l1": "mish", "softpick": "expm1", "gelu-l1+post=recenter-l1": "any_recenter_l1",
    "mish-l1+norm=l1+2+post=recenter": "any_recenter", "sigmoid-logn-l1+post=reweight:15": "any_reweight",
    "ssmax-bias+window=20": "exp", "softmax-recentered+window=3": "exp_recenter", "softmax+cap=1.5": "any"}
# For attention/flash90.cuh: so many tiles that they reuse its buffers, and rows of q that it negates. CI draws one.
WITH_EXP = ["softmax_T257_d64", "softmax_T257_d128", "softmax+qk=l2+scale=const:-7_T64_d64"]
# With two SMs, a block of its kernels computes several blocks of rows or keys.
SETTINGS = {"CUDA_ON_CPU_THREADS": "2", "CUDA_ON_CPU_PROCESSORS": "2"}
# CI runs two instances, drawn by commit, and builds only those, and exp, each with its instance for float32.
NAMES = draw.sample(INSTANCES, 2) if os.environ.get("DRAW") else list(INSTANCES)
ROWS = [*dict.fromkeys(INSTANCES[name] for name in NAMES), "exp"]
BUILT = [*ROWS, *("_".join(["float", *row.split("_")[1:]]) for row in ROWS)]
CASES = [*(f"{name}_T33_d48" for name in NAMES),
         *(draw.sample(WITH_EXP, 1) if os.environ.get("DRAW") else WITH_EXP)]
ATTENTION = ["attention"] if ALL else [f"attention_{case}" for case in CASES]


@functools.cache
def program(name):
    rows = [f"INSTANCES={' '.join(dict.fromkeys(BUILT))}"] if os.environ.get("DRAW") else []
    made = make("-j2", "TSAN=1", *rows, f"build/tsan/{name}", capture_output=True, text=True)
    if made.returncode and "scripts/setup_cuda.sh" in made.stderr:
        pytest.skip("CUDA's headers are missing: scripts/setup_cuda.sh installs them")
    assert made.returncode == 0, made.stdout + made.stderr
    return ROOT / "build/tsan" / name


def threads(**more):
    return environment(**SETTINGS, **more)


def run(name, word):
    done = subprocess.run([*FIXED, program(name), word], cwd=ROOT, env=threads(), capture_output=True, text=True,
                          timeout=None if ALL else 600)
    assert "ThreadSanitizer" not in done.stderr and done.returncode == 0, done.stdout[-2000:] + done.stderr[:6000]
    passed = re.search(r"^(\d+) passed, 0 failed$", done.stdout, re.M)
    assert passed and int(passed[1]) > 0, done.stdout


@pytest.mark.drawn(2)
@pytest.mark.parametrize("word", KERNELS)
def test_kernels(word):
    run("on_cpu/tests/test_kernels", word)


@pytest.mark.parametrize("word", ATTENTION)
def test_attention(word):
    run("test_gpt2cu_on_cpu", word)


# Its values come in two parts, which attention/flash90.cuh processes like heads.
GAU = "layers=1,block=gau,channels=96,vocab=97"


@pytest.mark.drawn(1)
@pytest.mark.parametrize("processes, words", ((1, ["--dtype", "bf16", "--recompute", 1]),
                                              (1, ["--dtype", "bf16", "--model", GAU]),
                                              (2, ["--zero", 0]), (2, ["--zero", 1, "--dtype", "bf16"])),
                         ids=("llama", "gau", "two", "zero"))
def test_trainer(tmp_path, processes, words):
    """A step of two micro-batches, a batch of validation and a checkpoint. Work in streams is as late as possible."""
    trainer = program("train_gpt2cu_on_cpu")
    make_data(tmp_path)
    out = tmp_path / "run"
    run_command = command(tmp_path, "--model", "layers=1,heads=1,channels=48,ffn=40,vocab=97", "--seq-len", 20,
                          "--batch", 1, "--total-batch-tokens", 40 * processes, "--val-data", f"{tmp_path}/*_val_*.bin",
                          "--val-tokens", 20, "--steps", 1, "--out", out, *words,
                          program=trainer, processes=processes)
    at = run_command.index(str(trainer))
    done = subprocess.run([*run_command[:at], *FIXED, *run_command[at:]], capture_output=True, text=True,
                          env=threads(CUDA_ON_CPU_STREAMS="late"), timeout=600)
    assert "ThreadSanitizer" not in done.stderr and done.returncode == 0, done.stdout[-2000:] + done.stderr[:6000]
    assert len(metrics(out, ["loss"])) >= 1

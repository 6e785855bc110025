"""scripts/gpu_check.sh without a GPU: its parts run in their dry form, its report is well-formed, its verdicts are right, and nothing that was not
timed on a GPU passes for a measurement."""
import json
import math
import re
import shutil
import subprocess
import sys

import pytest
import torch

import trainer
from trainer import ROOT

sys.path[:0] = [str(ROOT / "dev/bench"), str(ROOT / "dev/reference")]
import attention_gpu
import gpu_report
import gpu_step
import model as reference

EMULATED, COLLECTIVE = ROOT / "train_gpt2cu_on_cpu", ROOT / "build/on_cpu/tests/test_collective"
FLASH = ROOT / "build/on_cpu/flash.so"


@pytest.fixture(autouse=True)
def dry(monkeypatch):
    for module in (attention_gpu, gpu_step):
        monkeypatch.setattr(module, "DRY", True)


def gpu_check(*parts, out, code, **environment):
    result = subprocess.run([ROOT / "scripts/gpu_check.sh", *parts], capture_output=True, text=True, timeout=300,
                            env=trainer.environment(OUT=str(out), DEPS=f"{out}/deps", **environment))
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def parts_of(out):
    return json.loads((out / "report.json").read_text())["parts"]


def assert_well_formed(text):
    """Every row of a table has the cells of its head."""
    rows = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines()]
    for before, now in zip(rows, rows[1:]):
        assert not before or not now or before == now, text


# ---- the script

@pytest.mark.skipif(gpu_report.device() != "CPU", reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    said = gpu_check("tests", "step", out=tmp_path, code=gpu_report.NO_GPU)
    assert said.count("no GPU: not measured") == 2
    assert {part["status"] for part in parts_of(tmp_path).values()} == {"not measured: no GPU"}
    assert gpu_report.MISSING in (tmp_path / "report.md").read_text()


def fake_programs(folder, **texts):
    """A PATH with these shell scripts in it before the system's own programs."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.skipif(shutil.which("compute-sanitizer", path="/usr/bin:/bin") is not None, reason="compute-sanitizer is among the system's programs")
def test_without_the_sanitizer_its_part_fails(tmp_path):
    path = fake_programs(tmp_path / "bin", **{"nvidia-smi": "echo GPU 0: stand-in", "make": "exit 0"})
    said = gpu_check("sanitizer", out=tmp_path, code=1, PATH=path)
    assert "FAILED: compute-sanitizer is not here" in said
    part = parts_of(tmp_path)["sanitizer"]
    assert part["status"] == "failed"
    assert [(check["verdict"], check["detail"]) for check in part["checks"]] == [("FAILED", "compute-sanitizer is not here")]


def test_a_wrong_part(tmp_path):
    assert "no such part" in gpu_check("attentoin", out=tmp_path, code=2)


def test_runs_on_the_cpu(tmp_path):
    trainer.make_data(tmp_path)
    known = dict(DEVICE="cpu", TRAIN=str(trainer.TRAIN), DATA=str(tmp_path), VOCAB=str(trainer.VOCAB))
    gpu_check("determinism", "train", out=tmp_path / "report", code=0, **known)
    parts = parts_of(tmp_path / "report")
    assert {name: part["status"] for name, part in parts.items()} == {"determinism": "done", "train": "done"}
    assert all(check["verdict"] == "ok" for part in parts.values() for check in part["checks"])
    assert len(parts["determinism"]["checks"]) == 13 and len(parts["train"]["curves"]["bf16"]) == 4
    assert_well_formed((tmp_path / "report/report.md").read_text())
    gpu_check("train", out=tmp_path / "broken", code=1, **{**known, "TRAIN": "/bin/false"})
    assert [check["verdict"][:6] for check in parts_of(tmp_path / "broken")["train"]["checks"]] == ["ok", "FAILED", "FAILED", "FAILED"]


def test_one_gpu_is_too_few_for_several(tmp_path):
    path = fake_programs(tmp_path / "bin", **{"nvidia-smi": "echo GPU 0: stand-in", "make": "exit 0"})
    assert "fewer than two GPUs: not measured" in gpu_check("several", out=tmp_path, code=gpu_report.NO_GPU, PATH=path)
    assert parts_of(tmp_path)["several"]["checks"] == []


@pytest.mark.skipif(not (EMULATED.exists() and COLLECTIVE.exists() and shutil.which("mpirun")), reason="make train_gpt2cu_on_cpu test_on_cpu, mpirun")
def test_several_processes(tmp_path):
    trainer.make_data(tmp_path)
    known = dict(DEVICE="cpu", DATA=str(tmp_path), VOCAB=str(trainer.VOCAB))
    gpu_check("several", out=tmp_path / "report", code=0, **known)
    checks = parts_of(tmp_path / "report")["several"]["checks"]
    assert [check["verdict"] for check in checks] == ["ok"] * 7
    assert [check["detail"] for check in checks[:2]] == ["2 processes are right"] * 2


# ---- runs side by side

def write_run(folder, losses, tensors=b"tensors"):
    (folder / "ckpt/step-00000001").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i + 1, "loss": loss}) + "\n" for i, loss in enumerate(losses)))
    for name in ("model.safetensors", "optimizer.safetensors"):
        (folder / "ckpt/step-00000001" / name).write_bytes(tensors)
    return folder


def test_same_runs_and_others(tmp_path):
    a = write_run(tmp_path / "a", [2.0, 1.0])
    assert gpu_report.same(a, write_run(tmp_path / "b", [2.0, 1.0]))[0]
    assert not gpu_report.same(a, write_run(tmp_path / "c", [2.0, 1.0000001]))[0]
    assert not gpu_report.same(a, write_run(tmp_path / "d", [2.0]))[0]
    assert not gpu_report.same(a, write_run(tmp_path / "e", [2.0, 1.0], b"others"))[0]


@pytest.mark.parametrize("losses, fine", [([2.0, 1.000009], True), ([2.0, 1.00002], False), ([2.0, math.nan], False), ([2.0], False), ([], False)])
def test_close(tmp_path, losses, fine):
    a = write_run(tmp_path / "a", [2.0, 1.0])
    assert gpu_report.close(1e-5, a, write_run(tmp_path / "b", losses))[0] == fine


@pytest.mark.parametrize("losses, fine", [([2.0, 1.00005], True), ([2.0, 1.001], False), ([2.0, math.nan], False), ([2.0], False)])
def test_curves(tmp_path, losses, fine):
    runs = [write_run(tmp_path / "fp32_on_cpu", [2.0, 1.0]), write_run(tmp_path / "fp32", losses)]
    assert gpu_report.curves(gpu_report.Report(tmp_path), "train", runs)[0] == fine


# ---- verdicts

def case(attn, T, way, ms, **more):
    return {"attn": attn, "T": T, "way": way, "device": "cuda", "forward_ms": [ms / 3], "both_ms": [ms], "wrong": False, **more}


def step(variant, rate, batch="16"):
    return {"model": "124M", "batch": batch, "variant": variant, "device": "cuda", "B": 16, "tok_per_s": rate}


def report_with(**more):
    """A report in which everything was measured; all bounds hold."""
    attention = [case("softmax", T, way, ms) for T in (1024, 2048, 4096) for way, ms in (("ours", 1.0), ("sdpa-flash", 0.9), ("sdpa-cudnn", 0.7))]
    attention += [case("ssmax", 4096, "ours", 1.02, of_softmax=[1.02]), case("lssar", 4096, "ours", 1.3, of_softmax=[1.3])]
    others = [case("ssmax", 4096, "ours", 1.0), case("ssmax", 4096, "sdpa", 4.0), case("ssmax", 4096, "compile", 8.0),
              case("lssar", 4096, "ours", 1.0), case("lssar", 4096, "compile", 12.0)]
    parts = {"attention": attention, "others": others, "step": [step("ours", 560e3), step("autocast", 500e3), step("bf16", 520e3)]}
    return {name: {"records": [*more.get(name, []), *records]} for name, records in parts.items()}


def verdicts(parts):
    return [row[-1] for row in gpu_report.bounds(parts)]


def test_verdicts():
    assert verdicts({}) == [gpu_report.MISSING] * 7
    assert verdicts(report_with()) == ["PASS", "PASS, aim reached", "PASS, aim reached", "PASS, aim reached", "PASS", "PASS", "PASS, aim reached"]


@pytest.mark.parametrize("row, change", [
    (0, {"attention": [case("softmax", 8192, "ours", 1.0), case("softmax", 8192, "sdpa-flash", 0.8)]}),
    (1, {"attention": [case("softmax1", 4096, "ours", 1.2, of_softmax=[1.2])]}),
    (2, {"attention": [case("softmax-recentered-l1", 4096, "ours", 2.1, of_softmax=[2.1])]}),
    (3, {"others": [case("relu2-n", 4096, "ours", 1.0), case("relu2-n", 4096, "compile", 2.9)]}),
    (4, {"others": [case("softmax-negated", 4096, "ours", 1.0), case("softmax-negated", 4096, "sdpa", 1.0)]}),
    (5, {"step": [step("bf16", 570e3)]}),
])
def test_one_case_below_must(row, change):
    found = verdicts(report_with(**change))
    assert found[row] == "below must"
    assert "below must" not in found[:row] + found[row + 1:]


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"wrong": True}, {"failed": "out of memory"}])
def test_only_right_values_timed_on_a_gpu_count(change):
    parts = report_with()
    for part in parts.values():
        for record in part["records"]:
            record.update(change)
    assert verdicts(parts) == [gpu_report.MISSING] * 7


def test_a_record_takes_the_place_of_the_one_before(tmp_path):
    report = gpu_report.Report(tmp_path)
    report.begin("others")
    for ms in (1.0, 2.0):
        report.record("others", {"attn": "ssmax", "T": 1024, "way": "ours"}, both_ms=[ms])
    report.save()
    again = gpu_report.Report(tmp_path)
    again.begin("others")
    assert [r["both_ms"] for r in again.part("others")["records"]] == [[2.0]]


# ---- timings of attention

def softmax_with_sum(q, k, v):
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return torch.softmax(scores, -1).to(v.dtype) @ v, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("name", reference.PRESETS)
def test_pytorchs_ways_compute_the_normaliser(name):
    """The formula, what SDPA does, and what FlexAttention does with its output and log-sum-exp."""
    case = attention_gpu.Case(name, 21, 1)
    judge = attention_gpu.Judge(case)
    for way in attention_gpu.way_names(name):
        if way != "flex":
            assert judge.error(attention_gpu.Torch(case, way)) <= judge.allowed, way
    if "flex" in attention_gpu.way_names(name):
        q, k, v, _ = case.heads(0)
        out = attention_gpu.by_softmax(softmax_with_sum, q, k, v, case, case.scalars)
        assert attention_gpu.distance([out[:1]], judge.expected[:1]) <= judge.allowed


def test_a_wrong_way_is_found():
    case = attention_gpu.Case("softmax", 21, 1)
    judge, right = attention_gpu.Judge(case), attention_gpu.Torch(case, "compile").both(0)
    assert attention_gpu.distance([x[:1] for x in right], judge.expected) <= judge.allowed
    for i, factor in ((0, 1.1), (2, 0.9), (3, math.nan)):
        spoilt = [x[:1] * (factor if j == i else 1) for j, x in enumerate(right)]
        assert not attention_gpu.distance(spoilt, judge.expected) <= judge.allowed


@pytest.mark.skipif(not FLASH.exists(), reason="make build/on_cpu/flash.so")
def test_our_kernels_by_their_addresses(tmp_path, monkeypatch):
    words = [str(tmp_path), "attention", "--dry-run", "--sweep", "17", "--lengths", "9", "--attn", "ssmax-fixed,gelu-l1,softpick"]
    monkeypatch.setattr(sys, "argv", ["attention_gpu.py", *words])
    assert attention_gpu.main() == 0
    records = parts_of(tmp_path)["attention"]["records"]
    assert {(r["attn"], r["way"]) for r in records} == {("softmax", "ours"), ("softmax", "sdpa-flash"), ("softmax", "sdpa-cudnn"), ("ssmax-fixed", "ours"),
                                                          ("gelu-l1", "ours"), ("softpick", "ours")}
    assert not any(r["wrong"] for r in records)
    assert_well_formed((tmp_path / "report.md").read_text())


# ---- timings of the step

def test_step_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_step, "run_torch", lambda **task: {"bytes": 1e12, "flops": 1e14} if task["variant"] == "ceilings" else
                        {"ms": [2.0], "peak_gb": 0.1, "reserved_gb": 0.2})
    for part in ("step", "memory"):
        monkeypatch.setattr(sys, "argv", ["gpu_step.py", str(tmp_path), part, "--dry-run", "--steps", "2", "--ours", str(trainer.TRAIN)])
        assert gpu_step.main() == 0
    parts = parts_of(tmp_path)
    assert len(parts["step"]["records"]) == 6 and len(parts["memory"]["records"]) == 4
    assert set(gpu_step.floors("124M", 16, 1024)) <= set(parts["step"]["profile"]["phases"])
    assert_well_formed((tmp_path / "report.md").read_text())


def test_floors_name_the_trainers_phases():
    source = (ROOT / "training.h").read_text()
    phases = set(re.findall(r'X\([A-Z_]+, "([^"]+)"\)', source[source.index("#define PHASES(X)"):source.index("PHASE_COUNT")]))
    assert {*gpu_step.floors("124M", 16, 1024), *gpu_step.PRODUCTS} <= phases


def test_the_largest_batch():
    """Linear in the batch: what is free after the fixed part, over a sequence's; at least 16."""
    fixed = 16 * gpu_step.parameters("124M") / 1e9
    found = gpu_step.largest_batch({"B": 16, "peak_gb": fixed + 0.016}, "124M", "autocast")
    assert found == int(0.97 * (4.0 - gpu_step.MARGIN_GB - fixed) / 0.001) // 8 * 8 or found == 16
    assert gpu_step.parameters("124M") == 123551232 + (50304 - 50257) * 768


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_model_in_pytorch(tied, monkeypatch):
    import cpu_step
    sizes = {**gpu_step.TINY["tiny"], "tied": tied}
    monkeypatch.setitem(gpu_step.TINY, "tiny", sizes)
    assert sum(p.numel() for p in cpu_step.torch_model()(8, **sizes).parameters()) == gpu_step.parameters("tiny")

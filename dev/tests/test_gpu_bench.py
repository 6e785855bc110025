"""The timings of dev/bench on a GPU, in dry runs: methods compute what they claim, wrong ones are found, and cases that
hang, fail or do not fit are reported."""
import math
import sys
from dataclasses import replace

import pytest
import torch

import trainer
from trainer import ROOT

sys.path[:0] = [str(ROOT / "dev/bench"), str(ROOT / "dev/reference")]
import attention_gpu
import gpu_eval
import gpu_kernels
import gpu_report
import gpu_step
import model as reference
from test_gpu_check import assert_well_formed, parts_of

FLASH = ROOT / "build/on_cpu/flash.so"
needs_flash = pytest.mark.skipif(not FLASH.exists(), reason="make build/on_cpu/flash.so")


@pytest.fixture(autouse=True)
def dry(monkeypatch):
    for module in (attention_gpu, gpu_step):
        monkeypatch.setattr(module, "DRY", True)


# ---- timings of attention

@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", reference.PRESETS)
def test_pytorchs_methods_compute_the_normalizer(name):
    """Those are the formula, SDPA, and FlexAttention, which has no backward pass on CPUs."""
    case = attention_gpu.Case(name, 21, 1)
    judge = attention_gpu.Judge(case)
    for way in attention_gpu.way_names(name):
        assert judge.error(attention_gpu.Torch(case, way)) <= judge.allowed, way


def dense_softmax(case):
    """What FlexAttention computes, with gradients on CPUs: output 0 and log-sum-exp -inf where all scores are -inf."""
    i, j = torch.arange(case.T)[:, None], torch.arange(case.T)
    score_mod = attention_gpu.score_mod(case) or (lambda score, b, h, i, j: score)

    def softmax(q, k, v):
        scores = score_mod(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), None, None, i, j)
        scores = scores.masked_fill(i < j, -math.inf)
        all_zero = (scores == -math.inf).all(-1, keepdim=True)
        scores = torch.where(all_zero, 0.0, scores)
        weights = torch.where(all_zero, 0.0, torch.softmax(scores, -1))
        return weights @ v, torch.where(all_zero[..., 0], -math.inf, torch.logsumexp(scores, -1))
    return softmax


BY_FLEX = [name for name in (*reference.PRESETS, "relu-l1+norm=l1+1", "relu2-l1+post=recenter", "sigmoid+norm=T2",
                             "relu6-l1+norm=l1+0", "sigmoid+offset=-logT", "softplus-l1+norm=n+post=recenter")
           if "flex" in attention_gpu.way_names(name)]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", BY_FLEX)
def test_flex_attention_by_logarithms_of_phi(name):
    """In float64 against the reference: flex_attention's output, and a dense softmax's gradients with its score_mod."""
    case = attention_gpu.Case(name, 21, 1)
    q, k, v, dout = (x.double() for x in case.heads(0))
    inputs = 4 * q, k, v                                        # so that relu6 reaches 6
    scalars = {key: x.double() + 0.1 * torch.randn(x.shape) for key, x in case.scalars.items()}
    trained = [x.requires_grad_() for x in (*inputs, *scalars.values())]
    normalizer = replace(case.normalizer, qk="none")            # the case's q and k have norm 1 already
    expected = reference.attention(*inputs, normalizer, case.T, scalars)
    assert (expected == 0).all(-1).any() == normalizer.phi.startswith("relu")
    found = attention_gpu.by_softmax(dense_softmax(case), *inputs, case, scalars)
    by_flex = attention_gpu.function_of(case, "flex")(*(x.detach() for x in inputs),
                                                      {key: x.detach() for key, x in scalars.items()})
    gradients = [torch.autograd.grad(out, trained, dout) for out in (found, expected)]
    assert attention_gpu.distance([by_flex, found], [expected, expected]) < 1e-10
    assert attention_gpu.distance(*gradients) < 1e-10
    if score_mod := attention_gpu.score_mod(case):
        z = torch.tensor(-200.0, requires_grad=True)            # there, phi is 0 in float32
        score = score_mod(z, None, None, torch.tensor(0), torch.tensor(0))
        assert score == -math.inf and torch.autograd.grad(score, z)[0] == 0


@pytest.mark.drawn(4)
@pytest.mark.parametrize("layout", attention_gpu.LAYOUTS)
@pytest.mark.parametrize("name", attention_gpu.SHAPES_ATTN)
def test_methods_in_each_layout(name, layout):
    """Ours and PyTorch's agree with the formula, and a wrong output or gradient does not."""
    layout = attention_gpu.LAYOUTS[layout]
    case = attention_gpu.Case(name, 21, 1, layout)
    judge = attention_gpu.Judge(case)
    ways = ["compile", *(attention_gpu.sdpa_ways(layout) if name == "softmax" else ())]
    methods = [attention_gpu.Torch(case, way) for way in ways]
    if FLASH.exists():
        methods.append(attention_gpu.Ours(case, attention_gpu.Flash(FLASH)))
    for method in methods:
        assert judge.error(method) <= judge.allowed
        right = [attention_gpu.some(x, case) for x in method.both(0)]
        for wrong, factor in ((0, 1 + 2 * judge.allowed), (2, -1), (3, math.nan)):
            spoilt = [x * factor if i == wrong else x for i, x in enumerate(right)]
            assert not attention_gpu.distance(spoilt, judge.expected) <= judge.allowed


# ---- a step by kernel

# ncu's output around its table, and the beginning of each of its rows.
BEFORE_TABLE = '''==WARNING== Note: Running with unmodified GPU clocks.
==PROF== Connected to process 71 (train_gpt2cu)
step     2/2 | loss 10.94 | "quoted"
==PROF== Disconnected from process 71
"ID","Process ID","Process Name","Kernel Name","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"
'''
AFTER_TABLE = '''"99","71","train_gpt2cu","void rope_kernel(float *)","(132, 1, 1)","metrics","dram__bytes.sum","",""
train_gpt2cu: a warning, which took
  two lines
'''


def ncu_text(*launches):
    """The output of `ncu --csv` for (kernel, {metric: (value, unit)})."""
    rows = [f'"{i}","71","train_gpt2cu","void {kernel}<64, 0>(FlashCall<__nv_bfloat16>, float)","(132, 1, 1)",'
            f'"Command line profiler metrics","{metric}","{unit}","{value:,}"\n'
            for i, (kernel, values) in enumerate(launches) for metric, (value, unit) in values.items()]
    return BEFORE_TABLE + "".join(rows) + AFTER_TABLE


def traffic(us, read, written):
    return {"gpu__time_duration.sum": (1000 * us, "ns"), "dram__bytes_read.sum": (read, "byte"),
            "dram__bytes_write.sum": (written, "byte")}


# The end of one step, two whole steps, of which the second is the one to show, and the beginning of another.
LAUNCHES = [("squares_kernel", traffic(900, 9, 9)), ("adamw_kernel", traffic(900, 9, 9)),
            ("flash90_forward_kernel", traffic(700, 7, 7)), ("adamw_kernel", traffic(700, 7, 7)),
            ("nvjet_sm90_tst_256x128_h_bz_coopA_NNT", traffic(60, 80_000_000, 40_000_000)),
            ("flash90_forward_kernel", traffic(100, 70_000_000, 30_000_000)),
            ("cublasLt::splitKreduce_kernel", traffic(40, 20_000_000, 0)),
            ("flash90_forward_kernel", traffic(150, 70_000_000, 30_000_000)),
            ("adamw_kernel", {"gpu__time_duration.sum": (1.0, "ms"), "dram__bytes_read.sum": (2.5, "Gbyte"),
                              "dram__bytes_write.sum": (1500, "Mbyte")}),
            ("embedding_forward_kernel", traffic(500, 5, 5))]


def run_step(folder, monkeypatch, text):
    commands = []
    monkeypatch.setattr(gpu_kernels, "observe", lambda *words: commands.append(words) or text)
    gpu_kernels.main_step(folder, "./train_gpt2cu")
    assert [words[1][0] for words in commands] == ["./train_gpt2cu"] and "--profile" in commands[0][1]


def test_a_step_by_kernel(tmp_path, monkeypatch):
    """Exactly one step, from one launch of AdamW to the next; the largest row first; cuBLASLt's kernels in one row."""
    run_step(tmp_path, monkeypatch, ncu_text(*LAUNCHES))
    table, = parts_of(tmp_path)["counters"]["tables"].values()
    assert table["head"] == ["kernel", "launches", "ms per step", "GB read", "GB written", "TB/s"]
    assert table["rows"] == [["`adamw_kernel`", "1", "1.000", "2.50", "1.50", "4.00"],
                             ["`flash90_forward_kernel`", "2", "0.250", "0.14", "0.06", "0.80"],
                             ["matmuls (cuBLASLt)", "2", "0.100", "0.10", "0.04", "1.40"],
                             ["all", "5", "1.350", "2.74", "1.60", "3.21"]]
    assert_well_formed((tmp_path / "report.md").read_text())


def test_a_step_that_ncu_cannot_observe(tmp_path, monkeypatch):
    refused = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    with pytest.raises(SystemExit, match=str(gpu_report.NO_GPU)):
        run_step(tmp_path, monkeypatch, refused)
    with pytest.raises(SystemExit, match="ncu saw 3 launches, 1 of them of adamw_kernel"):
        run_step(tmp_path, monkeypatch, ncu_text(*LAUNCHES[:3]))
    with pytest.raises(SystemExit, match="the program failed under ncu"):
        run_step(tmp_path, monkeypatch, "train_gpt2cu: out of memory\n==ERROR== The application returned an error code "
                                        "(4).\n==WARNING== No kernels were profiled.\n")


@needs_flash
@pytest.mark.parametrize("words", ["bf16 softmax 65 64 64", "fp32 softmax-sink 33 48 48"])
def test_a_pass_of_our_kernels(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "run", str(FLASH), *words.split()])
    assert not gpu_kernels.main() and "norm of out" in capsys.readouterr().out


# ---- timings of the step


def test_step_and_memory(tmp_path, monkeypatch):
    ceilings = {"bytes": 1e12, "flops": 1e14, "undoes_rope": True}
    times = {"ms": [2.0], "peak_gb": 0.1, "reserved_gb": 0.2}
    monkeypatch.setattr(gpu_step, "run_torch",
                        lambda budget, **task: dict(ceilings if task["variant"] == "ceilings" else times))
    for part in ("step", "memory"):
        monkeypatch.setattr(sys, "argv", ["gpu_step.py", str(tmp_path), part, "--dry-run",
                                          "--ours", str(trainer.TRAIN)])
        assert gpu_step.main() == 0
    parts = parts_of(tmp_path)
    assert all([r["variant"] for r in parts["step"]["records"]].count(name) == 1 for name in ("no graphs", "any order"))
    assert len(parts["step"]["records"]) == 8 and len(parts["memory"]["records"]) == 4
    head = parts["memory"]["tables"]["A step's memory, GB"]["head"]
    assert len(head) == 6 and not any("tok" in word for word in head)              # its times are not measurements
    assert all("used_gb" in r for r in parts["memory"]["records"] if r["variant"] == "ours")
    assert not any("used_gb" in r for r in parts["step"]["records"])    # nvidia-smi is not called while a step is timed
    assert {*gpu_step.floors("124M", 16, 1024, True), *gpu_step.PRODUCTS} <= set(parts["step"]["profile"]["phases"])
    assert_well_formed((tmp_path / "report.md").read_text())


def test_a_step_that_hangs_has_failed(tmp_path, monkeypatch):
    """If ours hangs, the part fails and names it; a case that the end of the call cuts off is left."""
    slow = trainer.script_of(tmp_path / "slow", "exec sleep 100")
    monkeypatch.setattr(gpu_step, "run_torch", lambda budget, **task: {"failed": "not here"})
    monkeypatch.setattr(gpu_step, "LIMIT", {"ours": 0.02})

    def call(folder, *flags):
        monkeypatch.setattr(sys, "argv", ["gpu_step.py", str(folder), "step", "--dry-run", "--ours", slow, *flags])
        code = gpu_step.main()
        return code, [r.get("failed") for r in parts_of(folder)["step"]["records"] if r["variant"] == "ours"]

    assert call(tmp_path / "a") == (gpu_report.FAILED, ["timed out after 0.2 s", "B = 16 failed"])
    monkeypatch.setattr(gpu_step, "LIMIT", {"ours": 10})
    assert call(tmp_path / "b", "--budget", "-8") == (gpu_report.UNFINISHED, [])


# ---- timings of evaluation

def time_evaluation(folder, monkeypatch, *flags, evaluate=trainer.TRAIN.parent / "eval_gpt2"):
    """gpu_eval.py's exit code and records in a dry run with the programs for the CPU."""
    words = ["--dry-run", "--train", str(trainer.TRAIN), "--evaluate", str(evaluate), *flags]
    monkeypatch.setattr(sys, "argv", ["gpu_eval.py", str(folder), "evaluation", *words])
    code = gpu_eval.main()
    return code, parts_of(folder)["evaluation"]["records"]


def test_evaluation_is_timed_beside_the_trainer(tmp_path, monkeypatch):
    code, records = time_evaluation(tmp_path, monkeypatch)
    assert code == 0 and [(r["dtype"], r["case"]) for r in records] == [(dtype, case) for dtype in ("bf16", "fp32")
                                                                       for case in gpu_eval.CASES]
    assert all(r["tok_per_s"] > 0 and r["device"] == "cpu" for r in records)
    assert_well_formed((tmp_path / "report.md").read_text())
    assert time_evaluation(tmp_path, monkeypatch, evaluate="/bin/false") == (0, records)     # nothing is measured again


def test_an_evaluator_that_fails(tmp_path, monkeypatch):
    code, records = time_evaluation(tmp_path, monkeypatch, evaluate="/bin/false")
    assert code == gpu_report.FAILED
    assert ["exit code 1" in r.get("failed", "") for r in records] == [False, True, True] * 2

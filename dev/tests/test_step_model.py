"""dev/bench/step_model.py: its list of launches against what the emulation launches in a step, bytes counted by hand,
sums and units, and the tables that the pages show."""
import re
import subprocess
import sys
from collections import Counter

import pytest

from trainer import ROOT, cuda_program, train

sys.path.insert(0, str(ROOT / "dev/bench"))
import step_model
import timeline
from step_model import Launch, Run, parse_model

T, B = 16, 2
RUNS = {"plain": ("layers=2,heads=2,channels=48,ffn=40,vocab=97", [], {}),
        "accumulated": ("layers=2,heads=2,channels=48,ffn=40,vocab=97", ["--total-batch-tokens", 3 * B * T],
                        {"micro_batches": 3}),
        "heads of 64": ("layers=1,heads=1,channels=64,ffn=40,vocab=97", [], {}),
        "ssmax": ("layers=1,heads=2,channels=48,ffn=40,vocab=97,tied=0", ["--attn", "ssmax"], {}),
        "recomputed": ("layers=1,heads=4,kv_heads=2,head_dim=16,channels=48,ffn=40,vocab=97,qk_norm=1,bias=qkv",
                       ["--recompute"], {"recompute": True})}


def counted(text):
    """{name: [count, bytes]} of a report of dev/cuda_on_cpu."""
    found = {}
    for name, count in re.findall(r"^  (?:void )?(\w+)[<(].*: (\d+) launches$", text, re.M):
        found[name] = [found.get(name, [0])[0] + int(count), 0]
    for name, count, size in re.findall(r"^  (.+): (\d+) calls, (\d+) bytes$", text, re.M):
        found[name] = [int(count), int(size)]
    return found


def one_step(data, out, program, *flags, processes=1):
    """What the last of three steps launches: the difference of two runs."""
    few, more = (counted(train(data, "--batch", B, "--seq-len", T, "--dtype", "bf16", "--steps", steps, *flags, "--out",
                               out / str(steps), program=program, processes=processes,
                               env={"CUDA_ON_CPU_REPORT": "1"})) for steps in (2, 3))
    return {name: (more[name][0] - few.get(name, [0])[0], more[name][1] - few.get(name, [0, 0])[1]) for name in more
            if more[name] != few.get(name)}


@pytest.mark.parametrize("name", RUNS)
def test_launches_are_those_of_the_emulation(data, tmp_path, name):
    """Every kernel, matmul, copy and fill of a step."""
    model, flags, keys = RUNS[name]
    found = one_step(data, tmp_path, cuda_program(), "--model", model, *flags)
    if name == "ssmax":
        model += ",scalars=1"
    run = Run(parse_model(model), B=B, T=T, **keys)
    expected = Counter(launch.name for launch in step_model.launches(run))
    assert {name: count for name, (count, _) in found.items()} == dict(expected)
    filled = sum(launch.bytes for launch in step_model.launches(run) if launch.name == "cudaMemsetAsync")
    assert filled <= found["cudaMemsetAsync"][1] < filled + 512            # up to the next tensor


def test_any_order_clears_the_sums_of_dq(data, tmp_path):
    """With --deterministic 0, attention's backward pass adds to dq in any order, from zeros. By default, it clears a
    counter for each tile of queries instead, and the first block of keys writes."""
    fixed, any_order = (one_step(data, tmp_path / str(x), cuda_program(), "--model", RUNS["heads of 64"][0],
                                 "--deterministic", x) for x in (1, 0))
    count, size = fixed.pop("cudaMemsetAsync")
    tiles = B                                          # of 64 queries: one for each sequence of the only head
    assert any_order.pop("cudaMemsetAsync") == (count + 1, size + tiles * (64 * 64 * 4 - 4))
    launched = [{name: count for name, (count, _) in found.items()} for found in (any_order, fixed)]
    assert launched[0] == launched[1]


def test_flash90_0_selects_the_other_kernels(data, tmp_path):
    """Without it, a GPU of compute capability 9.0 uses its own."""
    flags = ["--model", RUNS["heads of 64"][0], "--batch", B, "--seq-len", T, "--dtype", "bf16", "--steps", 1]
    for value, own in ((None, True), ("1", True), ("0", False)):
        env = {"CUDA_ON_CPU_REPORT": "1", **({"FLASH90": value} if value else {})}
        said = train(data, *flags, "--out", tmp_path / str(value), program=cuda_program(), env=env)
        kernels = {name for name in counted(said) if "flash" in name}
        assert {"flash90_forward_kernel", "flash90_backward_kernel"} <= kernels if own else (
            {"flash_forward_kernel", "flash_dq_kernel", "flash_dkv_kernel"} <= kernels)
        assert any(name.startswith("flash90") for name in kernels) == own
        assert ("; attention by the kernels for compute capability 8.0" in said) == (not own)
    said = train(data, *flags, "--out", tmp_path / "wrong", program=cuda_program(), env={"FLASH90": "no"}, code=2)
    assert "FLASH90=no in the environment: expected 0 or 1." in said


@pytest.mark.parametrize("capability", (80, 89, 100, 120))
def test_flash90_is_for_compute_capability_90_only(data, tmp_path, capability):
    """Neither older nor newer GPUs have its instructions: wgmma exists on 9.0 alone."""
    said = train(data, "--model", RUNS["heads of 64"][0], "--batch", B, "--seq-len", T, "--dtype", "bf16", "--steps", 1,
                 "--out", tmp_path / "run", program=cuda_program(),
                 env={"CUDA_ON_CPU_REPORT": "1", "CUDA_ON_CPU_CAPABILITY": str(capability)})
    kernels = {name for name in counted(said) if "flash" in name}
    assert {"flash_forward_kernel", "flash_dq_kernel", "flash_dkv_kernel"} <= kernels
    assert not any(name.startswith("flash90") for name in kernels)


def test_sums_over_ranks_are_those_of_the_emulation(data, tmp_path):
    model = RUNS["plain"][0]
    found = one_step(data, tmp_path, cuda_program(), "--model", model, processes=2)
    run = Run(parse_model(model), B=B, T=T, ranks=2)
    sums = [*step_model.reductions(run), step_model.numbers(run)]
    count, size = found["ncclAllReduce"]
    assert count == len(sums) == 5
    # A ring of two sends as many bytes as it sums.
    assert sum(s.bytes for s in sums) == pytest.approx(size, rel=0.02)     # the gaps between tensors are sent, too



SCHEDULED = "layers=12,heads=1,channels=64,ffn=40,vocab=97"


def schedule(data, out, *flags, processes=2):
    """One rank's log of what a run with as many layers as 124M queues in its streams."""
    train(data, "--model", SCHEDULED, "--batch", B, "--seq-len", T, "--dtype", "bf16", "--steps", 3, "--graphs", 0,
          *flags, "--out", out, program=cuda_program(), processes=processes,
          env={"CUDA_ON_CPU_SCHEDULE": f"{out}.log"})
    return next(out.parent.glob(f"{out.name}.log.*"))


@pytest.mark.parametrize("zero", (False, True), ids=("all-reduce", "zero"))
def test_overlap_is_that_of_the_program(data, tmp_path, zero):
    """timeline.py plays the order and the dependencies that the program has; overlap() has its own idea of them."""
    log = schedule(data, tmp_path / "run", "--zero", int(zero))
    run = Run(parse_model("124M"), ranks=8, zero=zero)
    t, o = timeline.timeline(log, run), step_model.overlap(run)
    layers = [f"layer {i}" for i in range(12)]
    names = [f"gradients: {name}" for name in ("rest", *reversed(layers), "embedding")] + ["loss and norm"]
    if zero:
        names = [f"weights: {name}" for name in ("embedding", *layers, "rest")] + names
    assert [name for name, _, _ in t.sums] == names
    waits = t.waits()
    assert sum(end - start for start, end in waits) == pytest.approx(o.extra, abs=1e-9)
    # The device waits for the embedding's gradient, for the loss, and with ZeRO first for the embedding.
    assert len(waits) == 2 + zero
    assert t.seconds == pytest.approx(step_model.step_seconds(run))
    ends = {name: end for name, _, end in t.sums}
    assert waits[-2][1] == pytest.approx(ends["gradients: embedding"])
    if zero:
        assert waits[0][1] == pytest.approx(ends["weights: embedding"])
        assert ends["weights: rest"] < 10e-3


def test_timeline_refuses_other_logs(data, tmp_path):
    log = schedule(data, tmp_path / "run", "--graphs", 1)
    with pytest.raises(SystemExit, match="run it with --graphs 0"):
        timeline.read(log)
    log = schedule(data, tmp_path / "alone", processes=1)
    with pytest.raises(SystemExit, match="on several ranks"):
        timeline.timeline(log, Run(parse_model("124M"), ranks=8))
    log = schedule(data, tmp_path / "zero", "--zero", 1)
    with pytest.raises(SystemExit, match="is --zero the same|are layers, tied"):
        timeline.timeline(log, Run(parse_model("124M"), ranks=8))
    with pytest.raises(SystemExit, match="are layers, tied"):
        timeline.timeline(log, Run(parse_model("124M,layers=11"), ranks=8, zero=True))


def test_timeline_prints_and_draws(data, tmp_path):
    log = schedule(data, tmp_path / "run")
    said = subprocess.run([sys.executable, ROOT / "dev/bench/timeline.py", "--all-reduce", log, "--png",
                           tmp_path / "t.png"], capture_output=True, text=True, check=True).stdout
    o = step_model.overlap(Run(parse_model("124M"), ranks=8))
    assert f"of which the device waits {1e3 * o.extra:.2f} ms" in said
    assert re.search(r"^gradients: layer 11 +[\d.]+ +[\d.]+$", said, re.M)
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_bytes_counted_by_hand():
    """16,384 rows of 124M, as in the headers of the kernels and in doc/kernels.md."""
    run = Run(parse_model("124M"), B=16)
    N, C, F, V = 16384, 768, 2048, 50304
    at = {}
    for launch in step_model.launches(run):
        at.setdefault(launch.name, launch)
    assert at["rmsnorm_forward_kernel"].bytes == 2 * N * C + 2 * N * C + 4 * N + 4 * C          # x; out, r, weight
    assert at["gate_forward_kernel"].bytes == 2 * N * F * 3
    assert at["gate_backward_kernel"].bytes == 2 * N * F * 5
    assert at["rope_forward_kernel"].bytes == 2 * (2 * N * C) * 2 + 1024 * 64 * 4              # q and k, in and out
    assert at["cublasLtMatmul m=4096 n=16384 k=768"].bytes == 2 * (N * C + 2 * F * C + N * 2 * F)
    assert at["cublasLtMatmul m=4096 n=16384 k=768"].flops == 2 * N * C * 2 * F
    assert at["cublasLtMatmul m=768 n=16384 k=2048 + C"].bytes == 2 * (N * F + C * F + 2 * N * C)
    assert at["adamw_kernel"].bytes == 30 * run.model.parameters
    text = (ROOT / "doc/kernels.md").read_text()
    for row, name, unit in (("rmsnorm_forward", "rmsnorm_forward_kernel", 1e6),
                            ("rope_forward", "rope_forward_kernel", 1e6), ("adamw", "adamw_kernel", 1e9),
                            ("swiglu_forward", "gate_forward_kernel", 1e6),
                            ("swiglu_backward", "gate_backward_kernel", 1e6),
                            ("gradient_squares", "squares_kernel", 1e6)):
        size = float(re.search(rf"^\| `{row}` \|[^|]*\| ([0-9.]+) [MG]B", text, re.M)[1])
        assert size == pytest.approx(at[name].bytes / unit, rel=0.005), row


def test_matmuls_and_scores():
    """6 FLOPs per weight and token, and all tiles on and below the diagonal."""
    run = Run(parse_model("162M"), B=2)
    m = run.model
    weights = m.layers * (4 * 768 * 768 + 3 * 768 * 2048) + m.padded * 768
    assert sum(launch.flops for launch in step_model.launches(run)) == 6 * weights * run.N
    assert m.parameters == weights + m.padded * 768 + (2 * m.layers + 1) * 768
    assert step_model.visited(1024, 128, 64) == 128 * sum(range(128, 1025, 128))
    assert step_model.visited(100, 128, 64) == 100 * 128


def test_seconds():
    """A launch takes the longest of its four limits, and the overhead."""
    d = step_model.DEVICES["h100"]
    loads = Launch("NORM", "", bytes=3.35e12 * step_model.BANDWIDTH_SHARE)
    assert loads.seconds(d) == pytest.approx(1 + step_model.LAUNCH)
    both = Launch("NORM", "", bytes=3.35e9, flops=989e12 * step_model.MATMUL_SHARE)
    assert both.seconds(d) == pytest.approx(1 + step_model.LAUNCH)
    clocks = Launch("ATTENTION", "", cycles=528 * 1.755e9 * step_model.ATTENTION_SHARE)
    assert clocks.seconds(d) == pytest.approx(1 + step_model.LAUNCH)
    assert Launch("OTHER", "", host=2.0).seconds(d) == 2


def test_sums_by_phase():
    run = Run(parse_model("124M"))
    found, kernels = step_model.by_phase(run), step_model.launches(run)
    names = list(step_model.phases().values())
    assert [name for name in names if name in found] == list(found)
    assert sum(p.launches for p in found.values()) == len(kernels)
    assert sum(p.seconds for p in found.values()) == pytest.approx(sum(x.seconds(run.device) for x in kernels))
    assert step_model.step_seconds(run) == pytest.approx(sum(row[5] for row in step_model.by_kernel(run)))
    norms = [x for x in kernels if x.phase == "NORM"]
    assert found["rmsnorm"].bytes == sum(x.bytes for x in norms) and found["rmsnorm"].launches == len(norms)
    assert 55e-3 < step_model.step_seconds(run) < 70e-3
    faster = Run(parse_model("124M"), device=step_model.DEVICES["h200"])
    assert step_model.step_seconds(faster) < step_model.step_seconds(run)


def test_overlap():
    """The embedding's bucket is complete last, so at least its sum is exposed."""
    run = Run(parse_model("124M"), ranks=8)
    o, sums = step_model.overlap(run), step_model.reductions(run)
    assert o.sent == pytest.approx(2 * 7 / 8 * 4 * run.model.parameters)
    assert sums[-1].seconds <= o.exposed <= o.total == pytest.approx(sum(s.seconds for s in sums))
    assert sums[-1].bytes == pytest.approx(2 * 7 / 8 * 4 * 50304 * 768)
    zero = Run(parse_model("124M"), ranks=8, zero=True)
    shares = [rank.total() for rank in step_model.owners(zero)]
    assert sum(shares) == run.model.parameters
    assert [round(shares[i] / 1e6, 1) for i in (0, -1)] == [38.6, 12.0]          # doc/gpu.md's table of shares
    rounds = [x for x in step_model.launches(zero) if x.name == "round_kernel"]
    assert sum(x.bytes for x in rounds) == 6 * run.model.parameters
    assert step_model.step_seconds(zero) == pytest.approx(
        step_model.step_seconds(Run(parse_model("124M"))) + step_model.overlap(zero).extra
        + sum(x.seconds(run.device) for x in step_model.update(zero) + rounds)
        - sum(x.seconds(run.device) for x in step_model.update(run)))


PROFILE = """
phase                                   ms/step    share
data, metrics and the rest                 1.00     1.0%
rmsnorm                                    5.62     5.0%
q, k, v and o matmuls                     20.00    20.0%
validation, samples, checkpoints          42.06     6.4%
"""


def test_a_profile_beside_the_model(tmp_path):
    (tmp_path / "log").write_text("step 3/3 | loss 6.03\n" + PROFILE)
    said = subprocess.run([sys.executable, ROOT / "dev/bench/step_model.py", "--profile", tmp_path / "log"],
                          capture_output=True, text=True, check=True).stdout
    modeled = 1e3 * step_model.by_phase(Run(parse_model("124M")))["rmsnorm"].seconds
    row = re.search(r"^rmsnorm .*$", said, re.M)[0].split()
    assert row[-2:] == ["5.62", f"{5.62 / modeled:.2f}"] and row[-3] == f"{modeled:.2f}"
    assert re.search(r"^sum .* 26\.62 +0\.\d\d$", said, re.M) and "validation" not in said
    (tmp_path / "empty").write_text("nothing")
    wrong = subprocess.run([sys.executable, ROOT / "dev/bench/step_model.py", "--profile", tmp_path / "empty"],
                           capture_output=True, text=True)
    assert wrong.returncode == 1 and "no table of phases" in wrong.stderr


def test_tables_of_the_pages():
    """To refresh them: dev/bench/step_model.py --markdown, --scaling, --attention."""
    assert step_model.markdown() in (ROOT / "doc/performance.md").read_text()
    assert step_model.scaling() in (ROOT / "doc/gpu.md").read_text()
    assert step_model.attention() in (ROOT / "doc/kernels.md").read_text()


def test_modeled_times_beside_the_measured_ones():
    """The last column of the table of phases in doc/performance.md, for an H200 and B = 16."""
    page = (ROOT / "doc/performance.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| [\d.]+ \| [\d.]+ % \| [\d.]+ \| \d+ % \| ([\d.]+) \|$", page, re.M))
    run = Run(parse_model("124M"), B=16, device=step_model.DEVICES["h200"])
    modeled = {name: f"{1e3 * phase.seconds:.2f}" for name, phase in step_model.by_phase(run).items()}
    assert len(rows) == 9 and rows == {name: modeled[name] for name in rows}


def test_a_row_of_the_table_by_hand():
    """124M, float32, 8 GPUs on NVLink: 123.6 million gradients in 14 buckets, 20 us to start each; the embedding's is
    exposed, and so is what is left of the others."""
    P, embedding, rate = 123587328, 50304 * 768, 0.82 * 450e9
    sent, total = 2 * 7 / 8 * 4 * P, 14 * 20e-6 + 2 * 7 / 8 * 4 * P / rate
    last = 20e-6 + 2 * 7 / 8 * 4 * embedding / rate
    start = "| 8, NVLink | 124M | all-reduce |"
    row = next(line for line in step_model.scaling().splitlines() if line.startswith(start))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[3:6] == ["float32", f"{sent / 1e9:.2f}", f"{1e3 * total:.2f}"]
    assert 1e3 * last <= float(cells[6]) + 0.005 < 1e3 * last + 0.15


def test_constants_are_those_of_the_sources():
    def constant(path, name):
        return int(re.search(rf"\b{name}\b(?: =|) (?:\(\(size_t\))?(\d+)", (ROOT / path).read_text())[1])
    assert constant("train_gpt2.cu", "LOSS_ROWS") == step_model.LOSS_ROWS
    assert constant("cuda/rmsnorm.cuh", "RMSNORM_BLOCKS") == step_model.RMSNORM_BLOCKS
    assert constant("cuda/rmsnorm.cuh", "RMSNORM_WARPS") == step_model.RMSNORM_WARPS
    assert constant("cuda/rmsnorm.cuh", "RMSNORM_SHARED") * 1024 == step_model.RMSNORM_SHARED
    assert constant("cuda/vector.cuh", "COLUMN_THREADS") == step_model.COLUMN_THREADS
    assert constant("cuda/classifier.cuh", "CLASSIFIER_THREADS") == step_model.CLASSIFIER_THREADS
    assert constant("attention/flash_sums.cuh", "SCALAR_ROWS") == step_model.SCALAR_ROWS
    assert constant("attention/flash_sums.cuh", "SCALAR_THREADS") == step_model.SCALAR_THREADS
    assert constant("cuda/qk_norm.cuh", "QK_NORM_BLOCKS") == step_model.QK_NORM_BLOCKS
    assert constant("cuda/bias.cuh", "BIAS_WARPS") == step_model.BIAS_WARPS
    assert constant("cuda/bias.cuh", "BIAS_ROWS") == step_model.BIAS_ROWS
    assert constant("cuda/adamw.cuh", "SEGMENT_PART") == step_model.SEGMENT_PART
    assert constant("cuda/embedding.cuh", "EMBEDDING_PIECE") == step_model.EMBEDDING_PIECE
    assert constant("attention/flash.h", "FLASH90_QUERIES") == step_model.FLASH90_QUERIES
    page = (ROOT / "doc/kernels.md").read_text()
    number = r"([\d,]+) \| "
    cycles = re.search(rf"^\| softmax \| (?:[\d,]+ \| ){{5}}{3 * number}[\d,]+ \| 1\.00", page, re.M)
    for text, (mma, rest) in zip(cycles.groups(), step_model.FLASH.values()):
        assert int(text.replace(",", "")) == pytest.approx(6.4 * mma + rest, abs=0.6)
    bounds = re.search(r"^\| softmax \| ([\d,]+) \| ([\d,]+) \| [\d,]+ \| 1\.00 \|", page, re.M)
    assert [int(text.replace(",", "")) for text in bounds.groups()] == list(step_model.FLASH90[64].values())

"""The source of the CUDA trainer, run on the CPU, against the CPU trainer: the same losses, and each resumes the
other's runs.

TRAIN_GPT2CU names another build to test, which may be one for a GPU.
"""
import ctypes
import ctypes.util
import fcntl
import json
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jobs import finish, start, wait_for, wait_for_line
from trainer import (ROOT, TRAIN, assert_held, assert_same_checkpoint, assert_same_run, checkpoint, command,
                     edit_tensors, environment, losses, metrics, read_header, script_of, steps, tokens, train,
                     write_shard)

MODEL = "layers=2,heads=1,channels=48,ffn=40,vocab=97"
GAU = "layers=1,block=gau,channels=32,vocab=97"
SMALL = ["--model", MODEL, "--seq-len", 20, "--batch", 2, "--warmup", 2, "--lr", 0.002]


def presets():
    text = subprocess.run([ROOT / "train_gpt2", "--attn", "help"], capture_output=True, text=True, check=True).stdout
    return [row.split()[0] for row in text.split("\n\n")[1].splitlines()[1:]]


QK_NORM = MODEL + ",heads=4,kv_heads=2,head_dim=16,norm_eps=0.01,qk_norm=1,gate=head"
BIAS = MODEL + ",heads=4,kv_heads=2,head_dim=16,bias=qkv,gate=channel"


def test_ranks_of_both_trainers(cuda, data, tmp_path):
    """They would wait for each other forever."""
    program = script_of(tmp_path / "program",
                        f'[ $OMPI_COMM_WORLD_RANK = 0 ] && exec {cuda} "$@"\nexec {TRAIN} "$@"')
    text = train(data, *SMALL, "--steps", 1, processes=2, code=2, program=program)
    assert "rank 1: the program is train_gpt2, but on rank 0 it is train_gpt2cu." in text


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name, model", [*((name, model) for name in presets() for model in (MODEL, GAU)),
                                         ("ssmax", QK_NORM), ("lssa", QK_NORM),
                                         ("softmax", BIAS), ("lssar", BIAS)],
                         ids=lambda x: "gau" if x == GAU else "llama" if x == MODEL else x)
def test_ten_steps(cuda, data, tmp_path, name, model):
    """Losses agree within 1e-4, and so do gradient norms, which show a defect earlier."""
    runs = []
    for program in (None, cuda):
        out = tmp_path / str(len(runs))
        # A power of 15 magnifies differences in rounding; a lower learning rate keeps them from growing from step to
        # step.
        rate = ["--lr", 0.0005] if name == "lssar" else []
        train(data, *SMALL, *rate, "--model", model, "--attn", name, "--steps", 10, "--out", out, program=program)
        runs.append(np.array(metrics(out, ["loss", "grad_norm", "lr"])))
    assert abs(runs[0][-1, 0] - runs[0][0, 0]) > 1e-3                 # the model learns
    np.testing.assert_allclose(runs[1][:, 0], runs[0][:, 0], atol=1e-4, rtol=0)
    np.testing.assert_allclose(runs[1][:, 1:], runs[0][:, 1:], rtol=1e-2 if name == "lssar" else 2e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_lr_scale(cuda, data, tmp_path, optimizer):
    """A step moves every tensor as a step with that tensor's learning rate does, to the last bit, in both trainers."""
    begin = [*SMALL, "--attn", "ssmax", "--warmup", 0, "--lr", 0.01, "--optimizer", optimizer, "--steps", 1]
    runs = {"start": ["--steps", 0], "whole": [], "quarter": ["--lr", 0.0025],
            "scaled": ["--lr-scale", "model.layers.0.*:0.25,*.0.mlp*:1,*attn_scale:0.25,*embed*:0"]}
    for program in (None, cuda):
        ends = {}
        for name, flags in runs.items():
            out = tmp_path / f"{name} {program is None}"
            train(data, *begin, *flags, "--out", out, program=program)
            ends[name] = load_file(checkpoint(out, int(name != "start")) / "model.safetensors")
        for name, found in ends["scaled"].items():
            quarter = ".layers.0." in name and ".mlp" not in name or name.endswith("attn_scale")
            expected = "start" if "embed" in name else "quarter" if quarter else "whole"
            for other in ("start", "whole", "quarter"):
                assert np.array_equal(found, ends[other][name]) == (other == expected), (program, name, other)


def test_validation_samples_and_scalars(cuda, data, tmp_path):
    """Validation losses, statistics of the learned scalars, and samples, drawn from the same logits."""
    flags = [*SMALL, "--attn", "ssmax-bias", "--steps", 4, "--val-data", data / "d_val_000000.bin", "--val-every", 2,
             "--val-tokens", 200, "--sample-every", 4, "--total-batch-tokens", 80]
    for run, program in {"cpu": None, "cuda": cuda}.items():
        train(data, *flags, "--out", tmp_path / run, program=program)
    assert (tmp_path / "cpu/samples.txt").read_text() == (tmp_path / "cuda/samples.txt").read_text()
    keys = ["val_loss", "attn_scale", "attn_bias"]
    for x, y in zip(metrics(tmp_path / "cpu", keys), metrics(tmp_path / "cuda", keys)):
        for p, q in zip(x, y):
            assert (p is None) == (q is None)
            np.testing.assert_allclose(np.array(q or 0, float), np.array(p or 0, float), rtol=1e-4, atol=1e-5)


def test_a_sample_is_a_single_document(cuda, data, tmp_path):
    """Whatever documents the batch before it has."""
    train(data, *SMALL, "--lr", 0.03, "--steps", 60, "--out", tmp_path)
    flags = ["--init-from", checkpoint(tmp_path, 60), "--seq-len", 20, "--batch", 2, "--lr", 0, "--steps", 4,
             "--sample-every", 1]
    for masks in (0, 1):
        train(data, *flags, "--doc-mask", masks, "--out", tmp_path / str(masks), program=cuda, model=False)
    assert (tmp_path / "0/samples.txt").read_text() == (tmp_path / "1/samples.txt").read_text()


COMPARED = {
    "recentered": ["--attn", "softmax-recentered", "--seq-len", "5,80"],
    "recentered-l1": ["--attn", "softmax-recentered-l1", "--seq-len", "1,80"],
    "examples": ["--pack", "example"],
    "documents": ["--doc-mask", "--attn", "ssmax-bias"],
    "switched": ["--attn", "gelu-l1", "--attn-switch", "2:softmax-recentered", "--seq-len", "10,20"],
    "list": ["--attn", "ssmax-pn+window=5,softmax-sink+window=9+cap=2+rope=none", "--doc-mask", "--sample-every", 5],
    "list, gau": ["--model", GAU, "--attn", "lssa+window=7+rope=none,ssmax+rope=100+cap=3"],
    "switched list": ["--attn", "softmax+rope=100,softmax+rope=none", "--attn-switch",
                      "2:ssmax+rope=none,ssmax+window=4+rope=500"],
    "z-loss and capped logits": ["--z-loss", 0.05, "--logit-softcap", 0.5, "--sample-every", 5],
    # with l2, yarn's factor of q and k cancels; under ntk, sequences are longer than L
    "yarn": ["--attn", "lssa", "--rope-scaling", "yarn:4:6", "--norm-length", 10],
    "llama3": ["--rope-scaling", "llama3:4:1:4:8", "--norm-length", 10],
    "yarn, gau": ["--model", GAU, "--attn", "lssa", "--rope-scaling", "yarn:4:600", "--norm-length", 10],
    "ntk, gau": ["--model", GAU, "--attn", "ssmax", "--rope-scaling", "ntk", "--norm-length", 10],
    # the embedding's gradient sums the rows of a token in pieces of 64
    "tokens that occur often": ["--train-data", "{folder}/often.bin", "--model", f"{MODEL},tied=0", "--batch", 8],
    "masks": ["--train-data", "{folder}/masked.bin", "--val-data", "{folder}/masked.bin", "--val-every", 2,
              "--val-tokens", 200],
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", COMPARED)
def test_equals_the_cpu(cuda, data, tmp_path, name):
    """Losses; gradient norms, which depend on the slope of what the loss depends on; and samples, drawn from capped
    logits."""
    write_shard(tmp_path / "often.bin", np.random.default_rng(1).integers(0, 2, 3000))
    write_shard(tmp_path / "masked.bin", tokens(3000))
    write_shard(tmp_path / "masked.mask", np.random.default_rng(1).random(3000) < 0.3, magic=20240521)
    flags = [str(flag).format(folder=tmp_path) for flag in COMPARED[name]]
    for run, program in {"cpu": None, "cuda": cuda}.items():
        train(data, *SMALL, *flags, "--steps", 5, "--out", tmp_path / run, program=program)
    a, b = (np.array(metrics(tmp_path / run, ["loss", "val_loss", "grad_norm"]), float) for run in ("cpu", "cuda"))
    np.testing.assert_allclose(b[:, :2], a[:, :2], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(b[:, 2], a[:, 2], rtol=2e-3)
    assert np.isfinite(a[1, 1]) == (name == "masks")
    if "--sample-every" in flags:
        assert (tmp_path / "cuda/samples.txt").read_text() == (tmp_path / "cpu/samples.txt").read_text()


@pytest.mark.drawn(5)
@pytest.mark.parametrize("flags", [[], ["--dtype", "bf16"], ["--recompute"],
                                   ["--dtype", "bf16", "--stochastic-rounding"],
                                   ["--optimizer", "muon", "--dtype", "bf16", "--stochastic-rounding"],
                                   ["--model", MODEL + ",tied=0"], ["--seq-len", "10,20"],
                                   ["--model", GAU, "--attn", "lssar"], ["--model", QK_NORM, "--recompute"],
                                   ["--zero", 1, "--batch", 1],
                                   ["--zero", 1, "--batch", 1, "--optimizer", "muon", "--dtype", "bf16",
                                    "--stochastic-rounding"]],
                         ids=lambda x: " ".join(map(str, x[:2] + x[2:][-1:])) or "plain")
def test_resume_to_the_last_bit(cuda, data, tmp_path, flags):
    whole, parts, how = tmp_path / "whole", tmp_path / "parts", {"program": cuda, "processes": 1 + ("--zero" in flags)}
    flags = [*SMALL, *flags]
    train(data, *flags, "--steps", 4, "--out", whole, **how)
    train(data, *flags, "--steps", 2, "--out", parts, **how)
    train(data, *flags, "--steps", 4, "--out", parts, "--resume", **how)
    assert_same_run(whole, parts, 4)


@pytest.mark.parametrize("how", ("switch", "init-from"))
def test_a_resume_after_scalars_are_gone(cuda, data, tmp_path, how):
    """The random bits of stochastic rounding depend on a weight's place among the tensors. A resumed run still has
    places for the scalars of normalizers that it no longer uses."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*SMALL, "--dtype", "bf16", "--stochastic-rounding", "--steps", 4, "--ckpt-every", 1, "--keep", 0]
    if how == "switch":
        flags += ["--attn", "ssmax-bias", "--attn-switch", "2:softmax"]
    else:
        train(data, *SMALL, "--attn", "ssmax-bias", "--steps", 1, "--out", tmp_path / "first", program=cuda)
        flags = [*flags[2:], "--init-from", checkpoint(tmp_path / "first", 1), "--attn", "softmax"]
    train(data, *flags, "--out", whole, program=cuda, model=how == "switch")
    shutil.copytree(whole, parts)
    shutil.rmtree(checkpoint(parts, 4))
    train(data, "--out", parts, "--resume", program=cuda, model=False)
    assert_same_run(whole, parts, 4)


def test_stochastic_rounding_depends_on_the_seed(cuda, data, tmp_path):
    """Two runs that differ in nothing else."""
    train(data, *SMALL, "--steps", 0, "--out", tmp_path / "first", program=cuda)
    for out, rounding, seed in (("a", 1, 1), ("b", 1, 2), ("c", 0, 1), ("d", 0, 2)):
        train(data, *SMALL[2:], "--init-from", checkpoint(tmp_path / "first", 0), "--dtype", "bf16", "--shuffle", 0,
              "--steps", 1, "--stochastic-rounding", rounding, "--seed", seed, "--out", tmp_path / out, program=cuda,
              model=False)
    a, b, c, d = (losses(tmp_path / out) for out in "abcd")
    assert a != b and c == d


@pytest.mark.parametrize("model", (QK_NORM, GAU), ids=("llama", "gau"))
def test_recomputing_changes_nothing(cuda, data, tmp_path, model):
    for name, flags in {"kept": [], "again": ["--recompute"]}.items():
        train(data, *SMALL, "--model", model, "--dtype", "bf16", *flags, "--steps", 3, "--out", tmp_path / name,
              program=cuda)
    assert_same_run(tmp_path / "kept", tmp_path / "again", 3)


@pytest.mark.parametrize("processes", (1, 2))
def test_late_streams_change_nothing(cuda, data, tmp_path, processes):
    """The bits are the same whether a stream's work is done at once or only when someone waits for it, with four
    micro-batches, two in flight at a time."""
    for streams in ("once", "late", "any"):
        train(data, *SMALL, "--batch", 1, "--total-batch-tokens", 80 * processes, "--steps", 2,
              "--out", tmp_path / streams, program=cuda, processes=processes, env={"CUDA_ON_CPU_STREAMS": streams})
    assert_same_run(tmp_path / "once", tmp_path / "late", 2)
    assert_same_run(tmp_path / "once", tmp_path / "any", 2)


# ---- steps that the host only queues


def waits(data, out, steps, *flags, program, processes=1):
    """(waits, those that left no work queued) of each rank of a run whose streams work only when the host waits."""
    text = train(data, *SMALL, *flags, "--steps", steps, "--out", out, program=program, processes=processes,
                 env={"CUDA_ON_CPU_STREAMS": "late", "CUDA_ON_CPU_REPORT": "1"})
    return [tuple(map(int, found))
            for found in re.findall(r"(\d+) waits of the host, (\d+) of them until no work was left", text)]


@pytest.mark.parametrize("batches, each", [(1, 1), (3, 3)])
def test_a_step_waits_only_for_the_step_before(cuda, data, tmp_path, batches, each):
    """Four more steps wait once each for the step before, and for a batch's slot if there are more batches than slots;
    no wait leaves the device without work."""
    flags = ["--batch", 1, "--total-batch-tokens", 20 * batches]
    (few,), (more,) = (waits(data, tmp_path / str(steps), steps, *flags, program=cuda) for steps in (3, 7))
    assert (more[0] - few[0], more[1] - few[1]) == (4 * each, 0)


@pytest.mark.parametrize("flags", ([], ["--zero", 1, "--dtype", "bf16"]), ids=("zero0", "zero1"))
def test_no_rank_waits_until_it_has_no_work(cuda, data, tmp_path, flags):
    few, more = (waits(data, tmp_path / str(steps), steps, "--batch", 1, *flags, program=cuda, processes=2)
                 for steps in (3, 6))
    assert len(few) == len(more) == 2
    assert sorted(idle for _, idle in few) == sorted(idle for _, idle in more)


def kernels(text):
    """{name: launches} of attention's kernels, and the calls and bytes of fills, in a report of the emulation."""
    found = {}
    for name, count in re.findall(r"^  (?:void )?(\w*flash\w*)[<(].*: (\d+) launches$", text, re.M):
        found[name] = found.get(name, 0) + int(count)
    fills = re.search(r"^  cudaMemsetAsync: (\d+) calls, (\d+) bytes$", text, re.M)
    return found, tuple(map(int, fills.groups()))


WIDE = ["--model", "layers=1,heads=1,channels=64,ffn=40,vocab=97", "--batch", 2, "--seq-len", 16, "--dtype", "bf16"]


def test_any_order_clears_the_sums_of_dq(cuda, data):
    """With --deterministic 0, attention's backward pass adds to dq in any order, from zeros. By default, it clears a
    counter for each tile of 64 queries instead, and the first block of keys writes."""
    (fixed, (count, size)), (any_order, fills) = (
        kernels(train(data, *WIDE, "--steps", 1, "--deterministic", x, program=cuda, env={"CUDA_ON_CPU_REPORT": "1"}))
        for x in (1, 0))
    assert fills == (count + 1, size + 2 * (64 * 64 * 4 - 4)) and any_order == fixed


@pytest.mark.parametrize("capability, flash90", [(90, None), (90, "1"), (90, "0"), (80, None), (120, None)])
def test_which_kernels_run(cuda, data, capability, flash90):
    """Compute capability 9.0 has kernels of its own, which FLASH90=0 turns off; wgmma exists on no other."""
    env = {"CUDA_ON_CPU_REPORT": "1", "CUDA_ON_CPU_CAPABILITY": str(capability)}
    text = train(data, *WIDE, "--steps", 1, program=cuda, env=env | ({"FLASH90": flash90} if flash90 else {}))
    own = capability == 90 and flash90 != "0"
    expected = {"flash90_forward_kernel", "flash90_backward_kernel"} if own else {
        "flash_forward_kernel", "flash_dq_kernel", "flash_dkv_kernel"}
    found = set(kernels(text)[0])
    assert expected <= found and own == any(name.startswith("flash90") for name in found)
    assert ("; attention by the kernels for compute capability 8.0" in text) == (flash90 == "0")


def test_a_wrong_choice_of_kernels(cuda, data):
    text = train(data, *WIDE, "--steps", 1, program=cuda, env={"FLASH90": "no"}, code=2)
    assert "FLASH90=no in the environment: expected 0 or 1." in text


def test_sums_overlap_with_the_backward_pass(cuda, data, tmp_path):
    """A layer's gradients are summed while the layers below it still work: no stream waits for a sum before the last
    one is queued."""
    train(data, *SMALL, "--model", MODEL + ",layers=4", "--steps", 3, "--graphs", 0, program=cuda, processes=2,
          env={"CUDA_ON_CPU_SCHEDULE": str(tmp_path / "log")})
    log = [line.split(" ", 3) for line in next(tmp_path.glob("log.*")).read_text().splitlines()]
    log = [(int(number), int(stream), int(after), name) for number, stream, after, name in log]
    updates = [i for i, (*_, name) in enumerate(log) if "adamw_kernel" in name]
    step = log[updates[-2] + 1:updates[-1]]
    sums = [(number, stream) for number, stream, _, name in step if name.startswith("nccl")]
    (communication,) = {stream for _, stream in sums}
    ours = {number for number, stream, *_ in log if stream == communication}
    waits = [number for number, stream, after, _ in step if stream != communication and after in ours]
    assert len(sums) == 4 + 3 and waits and min(waits) > sums[-2][0]      # layers; embedding, rest, loss and norm
    queued = [sum(1 for number, stream, _, name in step if name and stream != communication and a < number < b)
              for (a, _), (b, _) in zip(sums, sums[1:-1])]
    assert all(queued), "launches between one sum and the next"


# ---- graphs


def launches(text):
    """(launches of kernels, launches of graphs) of each rank, in the order of these numbers."""
    return sorted(tuple(map(int, found)) for found in
                  re.findall(r"cuda_on_cpu: (\d+) launches, .*; (\d+) launches of graphs", text))


# name: ranks, launches of graphs by each in six steps of 80 tokens, flags. A micro-batch is launched as a graph from
# the second of its kind on; with sums over ranks, the last one as 1 graph and 1 for each of 2 layers or gated units.
# With ZeRO-1, after a step without a pause, the forward pass is 1 graph and 1 for each layer more: steps 2 and 6 of
# "zero" are of this kind, and 2, 3 and 5 of "zero, arriving".
GRAPHS = {
    "plain": (1, 5, []),
    "micro-batches": (1, 5 + 17, ["--batch", 1, "--grad-clip", 0.5]),
    "micro-batches, two ranks": (2, 5 + 5 + 3 * 5, ["--batch", 1, "--total-batch-tokens", 120]),
    "recompute": (1, 5, ["--recompute", "--dtype", "bf16", "--stochastic-rounding"]),
    "documents": (1, 5, ["--doc-mask", "--attn", "ssmax-bias,ssmax-bias+window=6", "--model",
                         MODEL + ",vocab=97,tied=0"]),
    "gau": (1, 5, ["--model", GAU, "--attn", "lssar"]),
    "qk-norm": (1, 5, ["--model",
                       "layers=2,heads=4,channels=48,ffn=40,vocab=97,kv_heads=2,head_dim=16,qk_norm=1,bias=qkv"]),
    "a switch": (1, 2 + 2, ["--attn", "gelu-l1", "--attn-switch", "3:ssmax-bias"]),
    "lengths": (1, 3, ["--seq-len", "5,10,20", "--attn", "softmax-recentered"]),
    "masks": (1, 5, ["--train-data", "{masked}"]),
    "two ranks": (2, 3 * 5, ["--batch", 2]),
    "zero": (2, 3 * 5, ["--batch", 2, "--zero", 1, "--dtype", "bf16", "--reduce-dtype", "bf16"]),
    "zero, gau": (2, 3 * 5, ["--batch", 2, "--zero", 1, "--model", GAU]),
    "zero, arriving": (2, 6 + 3 + 6 + 3, ["--batch", 2, "--zero", 1, "--dtype", "bf16", "--stochastic-rounding",
                                          "--val-every", 6, "--sample-every", 5]),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_change_nothing(cuda, data, tmp_path, name):
    """The same bits and the same launches of kernels with and without graphs, with validations (whose last batch is
    smaller), samples and checkpoints between the steps."""
    processes, graphs, flags = GRAPHS[name]
    masked = tmp_path / "masked_train_000001.bin"
    write_shard(masked, tokens(3000))
    write_shard(masked.with_suffix(".mask"), np.random.default_rng(1).random(3000) < 0.7, magic=20240521)
    flags = [*SMALL, "--batch", 4, "--total-batch-tokens", 80, "--steps", 6, "--val-data", data / "d_val_000000.bin",
             "--val-every", 2, "--val-tokens", 200, "--sample-every", 4, "--ckpt-every", 3, "--keep", 0,
             *(masked if flag == "{masked}" else flag for flag in flags)]
    said = {}
    for on, streams in ((0, "once"), (1, "late")):
        env = {"CUDA_ON_CPU_STREAMS": streams, "CUDA_ON_CPU_REPORT": "1"}
        out = tmp_path / f"{on}-{streams}"
        said[out.name] = launches(train(data, *flags, "--graphs", on, "--out", out, program=cuda, processes=processes,
                                        env=env))
        for step in (3, 6):
            assert_same_run(tmp_path / "0-once", out, step)
        assert (out / "samples.txt").read_text() == (tmp_path / "0-once/samples.txt").read_text()
    kernels = [kernels for kernels, _ in said["0-once"]]
    assert len(kernels) == processes and said["0-once"] == [(count, 0) for count in kernels]
    assert said["1-late"] == [(count, graphs) for count in kernels]


def test_a_resume_keeps_what_determines_the_numbers(cuda, data, tmp_path):
    flags = [*SMALL, "--batch", 1, "--out", tmp_path / "out"]
    train(data, *flags, "--steps", 1, program=cuda)
    for flag, value in (("--reduce-dtype", "bf16"), ("--stochastic-rounding", 1), ("--deterministic", 0)):
        text = train(data, *flags, "--steps", 2, "--resume", flag, value, program=cuda, code=2)
        assert f"{flag} is {value}, but the run started with" in text, text
    train(data, *flags, "--steps", 2, "--resume", "--zero", "--recompute", "--graphs", 0, program=cuda)
    arguments = json.loads((tmp_path / "out/run.json").read_text())["arguments"]
    assert arguments["zero"] is True and arguments["recompute"] is True


def test_measured_matmuls_in_graphs(cuda, data, tmp_path):
    """Matmuls are measured before the capture, during which nothing may wait."""
    text = train(data, *SMALL, "--batch", 1, "--total-batch-tokens", 60, "--deterministic", 0, "--steps", 4,
                 "--attn-switch", "2:ssmax", "--out", tmp_path / "out", program=cuda, env={"CUDA_ON_CPU_REPORT": "1"})
    assert launches(text)[0][1] == 2 * (1 + 3) and np.isfinite(losses(tmp_path / "out")).all()


# ---- stored matmul algorithms


def sealed(entry):
    """The line of an entry of the file of --matmuls, with the hash of what it says now."""
    entry = entry[:entry.index(";") + 1]
    xxh32 = ctypes.CDLL(ctypes.util.find_library("xxhash")).XXH32
    return f"{entry} {xxh32(entry.encode(), ctypes.c_size_t(len(entry)), 0) & 0xFFFFFFFF:08x}"


def store(path, entries):
    path.write_text("".join(f"{line}\n" for line in ("attn.c matmuls 1", *map(sealed, entries), "end")))


def stored(path):
    first, *entries, last = path.read_text().splitlines()
    assert (first, last) == ("attn.c matmuls 1", "end") and [sealed(entry) for entry in entries] == entries
    matmuls = [entry.split(":")[0] for entry in entries]
    assert len(set(matmuls)) == len(matmuls)
    return entries


def with_algorithm(entry, number):
    """The entry with the emulation's algorithm of this number, without workspace."""
    return re.sub(r"algorithm \w+ \w+", f"algorithm {number} 0", entry)


@pytest.fixture(scope="module")
def measured_run(cuda, data, tmp_path_factory):
    """The flags of runs, and a folder with one of them and the file of the matmuls that it has measured. The validation
    at the end has a batch of 20 rows, others have 40."""
    folder = tmp_path_factory.mktemp("measured")
    file = folder / "matmuls"
    flags = [*SMALL, "--total-batch-tokens", 80, "--val-data", data / "d_val_000000.bin", "--val-every", 4,
             "--val-tokens", 60]
    said = train(data, *flags, "--matmuls", file, "--deterministic", 0, "--steps", 4, "--out", folder / "out",
                 program=cuda)
    assert "; 0 of 0 stored algorithms apply to this GPU" in said
    assert [any(f" {rows} " in entry for entry in stored(file)) for rows in ("m=20", "m=40", "k=40")] == [True] * 3
    return flags, folder


@pytest.fixture
def measured(measured_run, tmp_path):
    """The flags, and a copy of the file."""
    flags, folder = measured_run
    file = tmp_path / "matmuls"
    shutil.copy(folder / "matmuls", file)
    return [*flags, "--matmuls", file], file


def test_stored_matmuls_repeat_a_measured_run(cuda, data, tmp_path, measured_run, measured):
    """To the last bit, also across a resume, and if the run might measure others."""
    flags, file = measured
    text, count, first = file.read_text(), len(stored(file)), measured_run[1] / "out"
    for name, free in (("stored", 0), ("free", 1)):
        said = train(data, *flags, "--deterministic", 1 - free, "--steps", 4, "--out", tmp_path / name, program=cuda)
        assert f"; {count} of {count} stored algorithms apply to this GPU" in said
        assert_same_run(first, tmp_path / name, 4)
    for total in (2, 4):
        train(data, *flags, "--steps", total, "--out", tmp_path / "parts", "--resume", program=cuda)
    assert_same_run(first, tmp_path / "parts", 4)
    assert file.read_text() == text


def test_stored_matmuls_are_not_those_of_samples(cuda, data, tmp_path, measured):
    """A sample's matmuls are not measured, and those after it are."""
    flags, file = measured
    train(data, *flags, "--matmuls", tmp_path / "with samples", "--deterministic", 0, "--steps", 4, "--sample-every", 1,
          program=cuda)
    shapes, all_shapes = ({entry.split(":")[0] for entry in stored(path)} for path in (file, tmp_path / "with samples"))
    assert shapes == all_shapes


def test_stored_matmuls_of_two_ranks(cuda, data, tmp_path):
    """Only rank 0 reads and writes the file, and its algorithms become those of all ranks."""
    file = tmp_path / "matmuls"
    flags = [*SMALL, "--batch", 1, "--matmuls", file, "--steps", 2]
    wrapper = script_of(tmp_path / "wrapper",
                        f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exec {cuda} "$@" --matmuls {tmp_path}/none\n'
                        f'exec {cuda} "$@"')
    train(data, *flags, "--deterministic", 0, program=wrapper, processes=2)
    assert not (tmp_path / "none").exists()
    store(file, [with_algorithm(entry, 3) for entry in stored(file)])
    for name, program in (("a", cuda), ("b", wrapper)):
        said = train(data, *flags, "--out", tmp_path / name, program=program, processes=2)
        assert f"; {len(stored(file))} of {len(stored(file))} stored algorithms" in said
    assert_same_run(tmp_path / "a", tmp_path / "b", 2)


def test_stored_matmuls_of_others_are_kept(cuda, data, measured):
    """Entries of another GPU or version of the library, and of this one that other runs measured."""
    flags, file = measured
    entries = stored(file)
    others = [sealed(with_algorithm(entry, 99)) for entry in (
        re.sub('".*"', '"another GPU"', entries[0]), re.sub(r'(".*") (\d+)', r"\1 1\2", entries[1]))]
    store(file, others + entries[2:4])
    said = train(data, *flags, "--deterministic", 0, "--steps", 4, program=cuda)
    assert "; 2 of 4 stored algorithms apply to this GPU" in said
    assert stored(file)[:4] == others + entries[2:4] and len(stored(file)) == len(entries) + 2


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="/proc/locks shows who waits for a lock")
def test_stored_matmuls_of_runs_at_once(cuda, data, tmp_path):
    """While another run has the lock, runs wait before they write the file, and none loses what another one adds. With
    so many entries, they would all read the file before the first of them replaces it."""
    file = tmp_path / "matmuls"
    store(file, [f'"another GPU" 1 m={m} n=1 k=1 NN bf16 to bf16, aligned 2 2 2 2, workspace 0: 1.0000 ms, '
                 f"algorithm{8 * ' 0'};" for m in range(1, 2001)])
    written = file.stat().st_mtime_ns
    flags = [[*SMALL, "--model", MODEL.replace("channels=48", f"channels={channels}"), "--matmuls", file, "--steps", 2,
              "--deterministic", 0] for channels in (16, 32, 48)]
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = [subprocess.Popen(command(data, *words, program=cuda), env=environment(), stdout=subprocess.DEVNULL)
                for words in flags]
        for job in jobs:
            wait_for(lambda: re.search(rf"-> FLOCK .* {job.pid} ", Path("/proc/locks").read_text()), "a run that waits")
        assert file.stat().st_mtime_ns == written
    assert [job.wait() for job in jobs] == [0] * 3
    written = file.stat().st_mtime_ns
    for words in flags:
        train(data, *words, program=cuda)
    assert file.stat().st_mtime_ns == written


def test_stored_matmuls_behind_a_link(cuda, data, tmp_path):
    """What a run measures is added to the link's target."""
    (tmp_path / "file").write_text("attn.c matmuls 1\nend\n")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    train(data, *SMALL, "--matmuls", tmp_path / "link", "--deterministic", 0, "--steps", 2, program=cuda)
    assert stored(tmp_path / "file") and (tmp_path / "link").is_symlink()
    assert (tmp_path / "file.lock").exists() and not (tmp_path / "link.lock").exists()


def test_stored_matmuls_survive_a_kill(cuda, data, tmp_path):
    file = tmp_path / "matmuls"
    flags = [*SMALL, "--matmuls", file]
    job = start(command(data, *flags, "--deterministic", 0, "--steps", 10**6, program=cuda))
    wait_for(lambda: file.exists() or job.poll() is not None, file)
    job.kill()
    finish(job, -signal.SIGKILL)
    count = len(stored(file))
    said = train(data, *flags, "--steps", 3, program=cuda)
    assert count > 10 and f"; {count} of {count} stored algorithms" in said


# What is done to the file, and the error with its remedy.
NOT_STORED = {
    "missing": (lambda text: None, "there is no such file, or it is empty", "--deterministic 0 --matmuls "),
    "empty": (lambda text: "", "there is no such file, or it is empty", "--deterministic 0 --matmuls "),
    "another file": (lambda text: "hello\n", ", line 1: expected", "Choose another path"),
    "truncated": (lambda text: text[:-4], ": the file is truncated", "Copy it again"),
    "edited": (lambda text: text.replace(" ms", "0 ms", 1), ", line 2: the line was damaged or edited",
               "Delete this line"),
    "rejected": (lambda text: "\n".join(sealed(with_algorithm(line, 9)) if "algorithm" in line else line
                                        for line in text.split("\n")),
                 ", line 2: cuBLASLt rejects", "Delete this line"),
}


@pytest.mark.parametrize("name", NOT_STORED)
def test_stored_matmuls_that_are_not(cuda, data, tmp_path, measured, name):
    """An error names the file, the line and what to do, and nothing is written."""
    flags, file = measured
    change, *words = NOT_STORED[name]
    text = change(file.read_text())
    file.unlink() if text is None else file.write_text(text)
    said = train(data, *flags, "--steps", 1, "--out", tmp_path / "out", program=cuda, code=3)
    assert all(word in said for word in (str(file), *words)) and not (tmp_path / "out").exists(), said


def test_stored_matmuls_that_cannot_be_written(cuda, data, tmp_path, measured):
    """A warning, once, names the file; the run goes on, and what was stored stays."""
    flags, file = measured
    flags = [*flags, "--deterministic", 0, "--steps", 3, "--val-every", 0]
    said = train(data, *flags, "--matmuls", tmp_path / "none/matmuls", program=cuda)
    assert said.count(f"warning: {tmp_path}/none/matmuls") == said.count("not stored. The run continues") == 1
    store(file, stored(file)[1:])
    text = file.read_text()
    said = train(data, *flags, program=cuda,
                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))
    assert f"warning: {file}" in said and "File too large" in said and "step 3/3" in re.sub(" +", " ", said)
    assert file.read_text() == text and not Path(f"{file}.tmp").exists()


def test_what_follows_a_step_does_not_depend_on_when_it_is_read(cuda, data, tmp_path):
    """With a validation after every step, the host reads each step at once."""
    flags = [*SMALL, "--batch", 1, "--steps", 10, "--keep", 0, "--val-every", 4, "--val-tokens", 100, "--ckpt-every", 3,
             "--sample-every", 5, "--attn-switch", "7:ssmax", "--val-data", data / "d_val_000000.bin"]
    late, at_once = tmp_path / "late", tmp_path / "at_once"
    train(data, *flags, "--out", late, program=cuda, env={"CUDA_ON_CPU_STREAMS": "late"})
    train(data, *flags, "--val-every", 1, "--out", at_once, program=cuda)
    for step in (3, 6, 9, 10):
        assert_same_checkpoint(late, at_once, step)
    keys, validations = ["step", "tokens", "loss", "lr", "grad_norm"], metrics(at_once, ["step", "val_loss"])
    assert metrics(late, keys) == metrics(at_once, keys)
    assert [row for row in metrics(late, ["step", "val_loss"]) if row[1] is not None] == validations[3::4]
    assert (late / "samples.txt").read_text() == (at_once / "samples.txt").read_text()


def overflowing(data, tmp_path):
    """A folder with weights under which, with phi=exp without a sum, the score of token 90 with itself overflows."""
    def change(tensors):
        tensors["model.embed_tokens.weight"][:, 0] = 0
        tensors["model.embed_tokens.weight"][90] = np.eye(1, 48)
        for name in "qk":
            tensors[f"model.layers.0.self_attn.{name}_proj.weight"][0] = 100 * np.eye(1, 48)
    train(data, *SMALL, "--attn", "exp", "--model", MODEL + ",tied=0", "--steps", 1, "--out", tmp_path / "first")
    weights = checkpoint(tmp_path / "first", 1)
    edit_tensors(weights / "model.safetensors", change)
    (weights / "manifest.json").unlink()
    return weights


@pytest.mark.parametrize("every, processes, zero", [(0, 1, 0), (1, 1, 0), (3, 2, 0), (0, 2, 1)])
def test_divergence_names_its_step_and_is_not_saved(cuda, data, tmp_path, every, processes, zero):
    """Step 3, whose window has the token that overflows, diverges while the host is a step ahead, or right before a
    checkpoint. Nothing of it, or of a later step, is written."""
    weights, folder, out = overflowing(data, tmp_path), tmp_path / "data", tmp_path / "out"
    folder.mkdir()
    ids = np.minimum(tokens(3000), 80)
    ids[20 * (3 * processes - 1) + 5] = 90              # of the last rank
    write_shard(folder / "d_train_000001.bin", ids)
    flags = [*SMALL[2:], "--init-from", weights, "--attn", "exp", "--batch", 1, "--shuffle", 0, "--lr", "1e-6",
             "--zero", zero, "--steps", 9, "--ckpt-every", every, "--keep", 0, "--out", out]
    text = train(folder, *flags, program=cuda, processes=processes, code=5, model=False,
                 env={"CUDA_ON_CPU_STREAMS": "late"})
    assert "step 3: the loss is" in text and "training diverged. This step was discarded." in text
    assert [step for step, in metrics(out, ["step"])] == [1, 2]
    assert steps(out) == ([1, 2] if every == 1 else [])
    assert "step     3/9" not in text


@pytest.mark.parametrize("batches", (1, 3))
def test_a_stop_while_a_step_is_outstanding(cuda, data, tmp_path, batches):
    """The stop comes at any time during a long run; the run resumes to the same bits."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    flags = [*SMALL, "--batch", 1, "--total-batch-tokens", 20 * batches]
    process = start(command(data, *flags, "--steps", 99999, "--out", out, program=cuda))
    wait_for_line(process, "step     4/")
    process.terminate()
    text = finish(process, 75)
    done = steps(out)[-1]
    assert f"stopped by a signal at step {done}; resume with --resume" in text
    assert [step for step, in metrics(out, ["step"])] == list(range(1, done + 1))
    train(data, *flags, "--steps", done + 3, "--out", out, "--resume", program=cuda)
    train(data, *flags, "--steps", done + 3, "--out", whole, program=cuda)
    assert_same_run(whole, out, done + 3)


def bytes_read(pid):
    return int(re.search(r"rchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="/proc/PID/io shows how far a validation is")
def test_a_stop_while_a_switch_is_measured(cuda, data, tmp_path):
    """A stop in the second of a switch's two validations undoes the switch on the device, too: the checkpoint has the
    scalars from before."""
    val = tmp_path / "v_val_000000.bin"
    write_shard(val, tokens(1000))
    flags = [*SMALL, "--attn", "ssmax", "--lr", 0.02, "--warmup", 0]
    train(data, *flags, "--steps", 2, "--out", tmp_path / "before", program=cuda)
    process = start(command(data, *flags, "--steps", 99999, "--attn-switch", "2:ssmax-fixed", "--val-data", val,
                            "--val-every", 0, "--ckpt-every", 0, "--out", tmp_path / "stopped", program=cuda))
    wait_for_line(process, "step     2/")
    begin, val_size = bytes_read(process.pid), 2 * 1000
    while process.poll() is None and bytes_read(process.pid) < begin + 1.3 * val_size:
        time.sleep(0.0005)
    process.terminate()
    finish(process, 75)
    assert steps(tmp_path / "stopped") == [2]
    before, after = (tensors(tmp_path / out, 2, "attn_scale") for out in ("before", "stopped"))
    assert (before == after).all() and (before != 1).all()


@pytest.mark.parametrize("first, second", [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_trainer_resumes_the_others_run(cuda, data, tmp_path, first, second, dtype):
    program = {"cpu": None, "cuda": cuda}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*SMALL, "--attn", "ssmax", "--dtype", dtype]
    train(data, *flags, "--steps", 6, "--out", whole)
    train(data, *flags, "--steps", 3, "--out", parts, program=program[first])
    text = train(data, *flags, "--steps", 6, "--out", parts, "--resume", program=program[second])
    assert "resumes at step 3" in text
    assert [step for step, in metrics(parts, ["step"])] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5 if dtype == "fp32" else 5e-3)
    a, b = (read_header(checkpoint(run, 6) / "model.safetensors")[0] for run in (whole, parts))
    assert a == b                                        # names, types and shapes


def test_switch_mid_run(cuda, data, tmp_path):
    """Both trainers switch from softmax to SSMax at step 3, also by a flag of the resumed run, and on two ranks."""
    a, b, c, d = (tmp_path / name for name in ("cpu", "cuda", "resumed", "ranks"))
    flags = [*SMALL, "--val-data", data / "d_val_000000.bin", "--val-tokens", 80, "--val-every", 3]
    train(data, *flags, "--steps", 6, "--attn-switch", "3:ssmax", "--out", a)
    said = train(data, *flags, "--steps", 6, "--attn-switch", "3:ssmax", "--out", b, program=cuda)
    assert re.search(r"step 3: switched --attn softmax to ssmax; validation loss \d\.\d+ before, \d\.\d+ after", said)
    np.testing.assert_allclose(losses(b), losses(a), atol=1e-4, rtol=0)
    train(data, *flags, "--steps", 3, "--out", c, program=cuda)
    train(data, "--steps", 6, "--attn-switch", "3:ssmax", "--resume", "--out", c, program=cuda, model=False)
    train(data, *flags, "--batch", 1, "--steps", 6, "--attn-switch", "3:ssmax", "--out", d, program=cuda, processes=2)
    for run in (c, d):
        np.testing.assert_allclose(losses(run), losses(a), atol=1e-4, rtol=0)
    scales = [tensors(run, 6, "attn_scale") for run in (a, b, c, d)]
    assert np.ptp(scales[0]) > 1e-4      # the new scalars start equal in all heads and layers, and are trained
    np.testing.assert_allclose(scales[1:], [scales[0]] * 3, atol=1e-5, rtol=0)


def tensors(out, step, word):
    """The values of all tensors whose names contain the word."""
    found = load_file(checkpoint(out, step) / "model.safetensors")
    return np.concatenate([found[name].ravel() for name in sorted(found) if word in name])


# ---- all-zero rows


def test_all_zero_rows(cuda, data, tmp_path):
    """The line of each step has their share in that step alone, not in a validation before it."""
    said = []
    for name, program in {"cpu": None, "cuda": cuda}.items():
        text = train(data, *SMALL, "--model", QK_NORM, "--attn", "relu-l1", "--val-data", data / "d_val_000000.bin",
                     "--val-every", 1, "--val-tokens", 80, "--steps", 4, "--out", tmp_path / name, program=program)
        said.append([float(share) for share in re.findall(r"([\d.]+)% all-zero rows", text)])
    assert len(said[0]) == 4 and 0 < said[0][0] < 100
    np.testing.assert_allclose(said[1], said[0], atol=2)


# ---- norms by layer


def norms_of(tensors, like):
    """The norms of these tensors by group, as metrics.jsonl has them. like: such an object, for its groups"""
    found = {group: np.zeros(np.shape(norms)) for group, norms in like.items()}
    for name, tensor in tensors.items():
        group = {"model.embed_tokens.weight": "embed", "lm_head.weight": "head"}.get(name, "other")
        layer = re.match(r"model\.layers\.(\d+)\.(mlp)?", name)
        if layer:
            group = "gains" if re.search(r"norm\.weight$|_gain$", name) else layer[2] or "attn"
        found[group][int(layer[1]) if layer else ()] += (tensor.astype("f8") ** 2).sum()
    return {group: np.sqrt(squares) for group, squares in found.items()}


@pytest.mark.parametrize("model, flags", [(QK_NORM + ",tied=0", ["--attn", "ssmax-bias"]),
                                          (GAU, ["--dtype", "bf16", "--attn", "ssmax-pn"])], ids=["llama", "gau"])
def test_norms_by_layer(cuda, data, tmp_path, model, flags):
    """Norms equal those of a checkpoint's weights and, without beta1, of its first moments, which then are the
    gradient. On other steps, and without the flag, the metrics are the same without them."""
    found = []
    runs = {"cpu": {}, "cpus": {"processes": 2}, "zero": {"program": cuda, "processes": 2}, "off": {}}
    if model == GAU:
        runs = {"cpu": {}, "cuda": {"program": cuda}}
    for run, how in runs.items():
        train(data, *SMALL, *flags, "--model", model, "--batch", 1, "--total-batch-tokens", 40, "--steps", 3, "--beta1",
              0, "--grad-clip", 0, "--norms-every", 0 if run == "off" else 3, "--out", tmp_path / run,
              *(["--zero", 1] if run == "zero" else []), **how)
        *others, line = [json.loads(text) for text in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        assert not any("norms" in key for other in others for key in other)
        if run == "off":
            assert not any("norms" in key for key in line)
            assert metrics(tmp_path / run, ["loss", "grad_norm"]) == metrics(tmp_path / "cpu", ["loss", "grad_norm"])
            continue
        state = load_file(checkpoint(tmp_path / run, 3) / "optimizer.safetensors")
        moments = {key[:-8]: tensor for key, tensor in state.items() if key.endswith(".exp_avg")}
        if "bf16" in flags:
            weights = {name: state[f"{name}.master"] for name in moments}
        else:
            weights = load_file(checkpoint(tmp_path / run, 3) / "model.safetensors")
        for key, tensors in {"weight_norms": weights, "grad_norms": moments}.items():
            expected = norms_of(tensors, line[key])
            assert {"embed", "attn", "gains", "other"} <= line[key].keys()
            assert ("mlp" in line[key], "head" in line[key]) == (model != GAU, model != GAU)
            for group, norms in line[key].items():
                np.testing.assert_allclose(norms, expected[group], rtol=1e-5, atol=1e-9, err_msg=f"{run} {key} {group}")
        total = np.sqrt(sum(np.sum(np.square(norms)) for norms in line["grad_norms"].values()))
        np.testing.assert_allclose(total, line["grad_norm"], rtol=1e-5)
        found.append(np.concatenate([np.ravel(norms) for norms in line["grad_norms"].values()]))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-2 if "bf16" in flags else 1e-3)


# ---- several ranks


def assert_close_runs(a, b, step, of_losses, of_checkpoints):
    """Losses and gradient norms, and the norm of the difference of a step's checkpoints, relative to those of a."""
    np.testing.assert_allclose(*(np.array(metrics(run, ["loss", "grad_norm"])) for run in (b, a)), rtol=of_losses)
    for name in ("model.safetensors", "optimizer.safetensors"):
        (header, first), (other, second) = (read_header(checkpoint(run, step) / name) for run in (a, b))
        x, y = np.frombuffer(first, "<f4"), np.frombuffer(second, "<f4")
        assert header == other and np.linalg.norm(x - y) <= of_checkpoints * np.linalg.norm(x)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("processes, flags", [(2, []), (2, ["--zero", 1]), (4, ["--zero", 1]), (4, []),
                                              (2, ["--zero", 1, "--reduce-dtype", "bf16"]),
                                              (2, ["--zero", 1, "--dtype", "bf16"])],
                         ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else str(x))
def test_several_ranks(cuda, data, tmp_path, processes, flags):
    """The losses equal those of one rank, and checkpoints do not depend on the number of ranks."""
    one, many = tmp_path / "one", tmp_path / "many"
    common = [*SMALL, "--steps", 3, "--total-batch-tokens", 80, "--attn", "ssmax",
              "--val-data", data / "d_val_000000.bin", "--val-every", 3, "--val-tokens", 100]
    train(data, *common, *(flags[2:] if "--dtype" in flags else []), "--out", one, program=cuda)
    train(data, *common, "--batch", 1, *flags, "--out", many, program=cuda, processes=processes)
    assert_close_runs(one, many, 3, *((1e-2, 3e-2) if "bf16" in flags else (1e-5, 1e-4)))


def test_zero_with_fewer_windows_of_validation_than_ranks(cuda, data, tmp_path):
    """The rank without a window does not wait for the weights that arrive at the other."""
    found = []
    for zero in (0, 1):
        train(data, *SMALL, "--batch", 2, "--steps", 3, "--zero", zero, "--val-data", data / "d_val_000000.bin",
              "--val-every", 1, "--val-tokens", 20, "--out", tmp_path / str(zero), program=cuda, processes=2)
        found.append(metrics(tmp_path / str(zero), ["loss", "val_loss"]))
    np.testing.assert_allclose(np.array(found[0]), np.array(found[1]), rtol=1e-5)


@pytest.mark.parametrize("optimizer, state, bound", [("adamw", ["1.03 MB", "786 kB"], 1e-4),
                                                     ("muon", ["908 kB", "786 kB"], 2e-2)])
def test_zero_gives_whole_tensors_to_ranks(cuda, data, tmp_path, optimizer, state, bound):
    """Three ranks with unequal shares reproduce --zero 0. The embedding's moments, 786,432 of 1,027,968 bytes, are on
    one rank. Muon's rounds are in bfloat16, and the two kinds of sums over ranks differ in their last bits."""
    runs, moments = [], []
    flags = [*SMALL, "--model", "layers=2,heads=1,channels=48,ffn=40,vocab=2000", "--attn", "ssmax", "--batch", 1,
             "--steps", 3, "--grad-clip", 0.1, "--optimizer", optimizer]
    for zero in (0, 1):
        runs.append(tmp_path / str(zero))
        text = train(data, *flags, "--zero", zero, "--out", runs[-1], program=cuda, processes=3)
        moments.append(re.search(r"optimizer state  +(.*)", text).group(1))
    assert moments == state
    assert_close_runs(*runs, 3, 0.1 * bound, bound)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_zero_in_bf16_shares_master_weights(cuda, data, tmp_path, optimizer):
    """The same bits as --zero 0, whose ranks have all master weights, also after a switch and a resume; without
    clipping, because the two sum the gradient's norm in another order. The embedding's master weights, 393,216 of
    514,560 bytes, are on one rank."""
    flags = [*SMALL, "--model", "layers=2,heads=1,channels=48,ffn=40,vocab=2000,qk_norm=1", "--attn", "softmax-sink",
             "--attn-switch", "1:ssmax-bias", "--batch", 1, "--grad-clip", 0, "--dtype", "bf16",
             "--stochastic-rounding", "--optimizer", optimizer]
    kept = []
    for zero in (0, 1):
        for steps in (2, 3):
            text = train(data, *flags, "--steps", steps, "--zero", zero, "--resume", "--out", tmp_path / str(zero),
                         program=cuda, processes=3)
        kept.append(re.search(r"parameters  +(.*)", text).group(1))
    assert kept == ["515 kB", "395 kB"]
    assert_same_checkpoint(tmp_path / "0", tmp_path / "1", 3)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("flip, flags", [(2, []), (14, ["--zero", 1, "--dtype", "bf16"]),
                                         (18, ["--zero", 1, "--dtype", "bf16"])],
                         ids=["a sum of gradients", "a matrix that arrives", "a vector that arrives"])
def test_ranks_that_drift_apart(cuda, data, tmp_path, flip, flags):
    text = train(data, "--steps", 1, *flags, "--out", tmp_path, program=cuda, processes=2, code=6,
                 env={"CUDA_ON_CPU_FLIP": f"1:{flip}"})
    assert "step 1: rank 1 on " in text and ": other parameters than on rank 0 on " in text
    assert not steps(tmp_path)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("trainer, flags", [
    ("cpu", ["--model", "layers=2,heads=4,channels=256,ffn=512,vocab=97", "--seq-len", 40, "--batch", 8,
             "--total-batch-tokens", 2 * 320 * 4]),
    ("cuda", [*SMALL, "--batch", 1, "--total-batch-tokens", 2 * 20 * 5])])
def test_a_slow_rank_is_named(request, data, tmp_path, trainer, flags):
    """Most of the time, rank 1 is stopped. Its passes take most of the step's time, however many there are."""
    program = request.getfixturevalue("cuda") if trainer == "cuda" else TRAIN
    wrapper = script_of(tmp_path / "wrapper", f"""
        [ "$OMPI_COMM_WORLD_RANK" = 1 ] || exec {program} "$@"
        {program} "$@" & pid=$!
        while kill -STOP $pid && sleep 0.06 && kill -CONT $pid && sleep 0.02; do :; done 2>/dev/null
        wait $pid""", "bash")
    out = tmp_path / "out"
    text = train(data, *flags, "--steps", 5, "--profile", "--out", out, program=wrapper, processes=2)
    named = [row for row in metrics(out, ["slowest_rank", "slowest_ms", "mean_ms", "ms"]) if row[0] == 1]
    assert len(named) > 2 and text.count(" | rank 1 slow: ") == len(named), text
    assert all(1.1 * mean < slowest < 1.1 * ms and slowest > 0.3 * ms for _, slowest, mean, ms in named)
    first, second = map(float, re.search(r"all-reduce by rank, ms/step: (\S+) (\S+)\n", text).groups())
    assert first >= 0 and second >= 0


@pytest.mark.parametrize("visible, code", [("$OMPI_COMM_WORLD_RANK", 0), ("3", 2)])
def test_ranks_that_see_one_gpu(cuda, data, tmp_path, visible, code):
    """As with Slurm's --gpus-per-task. Two ranks must not have the same one."""
    wrapper = script_of(tmp_path / "wrapper",
                        f'CUDA_ON_CPU_DEVICES=1 CUDA_ON_CPU_FIRST_DEVICE={visible} exec {cuda} "$@"')
    text = train(data, *SMALL, "--steps", 1, "--batch", 1, program=wrapper, processes=2, code=code)
    assert text.count("ranks 0 and 1 have the same GPU") == (code == 2)


def test_the_environment_is_set_before_threads_start(cuda, data, tmp_path):
    """Another thread may read it at the same time."""
    (tmp_path / "setenv.c").write_text("""
        #define _GNU_SOURCE
        #include <dirent.h>
        #include <dlfcn.h>
        #include <stdio.h>
        #include <string.h>
        int setenv(const char *name, const char *value, int replace) {
            int threads = 0;
            DIR *tasks = opendir("/proc/self/task");
            for (struct dirent *task; (task = readdir(tasks));) threads += task->d_name[0] != '.';
            closedir(tasks);
            if (strncmp(name, "NCCL_", 5) == 0) fprintf(stderr, "%s: %d threads\\n", name, threads);
            return ((int (*)(const char *, const char *, int))dlsym(RTLD_NEXT, "setenv"))(name, value, replace);
        }""")
    library = tmp_path / "setenv.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "setenv.c", "-ldl"], check=True)
    text = train(data, *SMALL, "--dry-run", program=cuda, env={"LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1"})
    assert re.findall("NCCL_.*", text) == ["NCCL_RUNTIME_CONNECT: 1 threads", "NCCL_NVLS_ENABLE: 1 threads"]


# ---- what is rejected, and what is reported


def test_a_driver_older_than_the_toolkit(cuda, data):
    text = train(data, *SMALL, "--steps", 1, program=cuda, env={"CUDA_ON_CPU_DRIVER": "12080"}, code=6)
    assert "The driver supports CUDA 12.8; this program has CUDA 13." in text and "Install a newer driver" in text


def test_rejected_before_anything_is_written(cuda, data, tmp_path):
    out = tmp_path / "out"
    text = train(data, *SMALL, "--zero", 2, "--steps", 1, "--out", out, program=cuda, code=2)
    text += train(data, *SMALL, "--zeroo", 1, "--steps", 1, "--out", out, program=cuda, code=2)
    assert "--zero" in text and "Did you mean --zero?" in text and not out.exists()


PHASES = ("attention", "rmsnorm", "logits and loss", "gradient norm and AdamW")
ASIDE = "validation, samples, checkpoints"


def profile(text):
    """{phase: milliseconds per step} of the table that --profile prints."""
    return {name: float(ms) for name, ms in re.findall(r"^(.+?) +([\d.]+) +[\d.]+%$", text.split("phase")[1], re.M)}


@pytest.mark.parametrize("count, flags", [(1, []), (4, []), (4, ["--sample-every", 1])],
                         ids=["one step", "steps", "pauses"])
def test_a_profile_leaves_out_the_first_step(cuda, data, tmp_path, count, flags):
    """The table has the averages of the metrics' phases from the second step on, or those of a run's only step. Each
    phase is timed by itself, so there are no graphs, and they add up to about the time of the step. Streams work only
    when the host waits: otherwise the next step's batch would be done before the host looks at the clock."""
    text = train(data, *SMALL, *flags, "--steps", count, "--profile", "--out", tmp_path / "out", program=cuda,
                 env={"CUDA_ON_CPU_REPORT": "1", "CUDA_ON_CPU_STREAMS": "late"})
    assert launches(text)[0][1] == 0
    for phases, ms in metrics(tmp_path / "out", ["ms_by_phase", "ms"]):
        assert (phases["attention"] > 0 and phases["gradient norm and AdamW"] > 0
                and sum(ms for name, ms in phases.items() if name != ASIDE) < 1.5 * ms + 50)
    counted = [phases for phases, in metrics(tmp_path / "out", ["ms_by_phase"])][1 if count > 1 else 0:]
    for name in PHASES:
        assert profile(text)[name] == pytest.approx(np.mean([phases[name] for phases in counted]), abs=0.006)


def test_a_profile_leaves_out_the_first_validation(cuda, data):
    """With a validation after both of two steps, or after the second alone, one validation counts."""
    flags = [*SMALL, "--val-data", data / "d_val_000000.bin", "--val-tokens", 500, "--sample-every", 0, "--profile"]
    ratios = []
    while not ratios or not 0.6 < ratios[-1] < 1.5:      # on a busy machine one may take longer
        assert len(ratios) < 4, ratios
        both, one = (profile(train(data, *flags, "--steps", 2, "--val-every", every, program=cuda))[ASIDE]
                     for every in (1, 2))
        ratios.append(both / one)


def test_a_profile_on_the_cpu(data, tmp_path):
    """The phases add up to the time of the steps after the first."""
    flags = ["--model", "layers=2,heads=4,channels=256,ffn=512,vocab=97", "--seq-len", 64, "--batch", 8, "--steps", 3,
             "--warmup", 2, "--profile"]
    ratios = []
    while not ratios or not 0.9 < ratios[-1] < 1.1:
        assert len(ratios) < 4, ratios
        out = tmp_path / str(len(ratios))
        rows = profile(train(data, *flags, "--out", out))
        ratios.append(sum(ms for name, ms in rows.items() if name != ASIDE)
                      / np.mean([ms for ms, in metrics(out, ["ms"])][1:]))


def test_metrics_have_the_gpu_memory(cuda, data, tmp_path):
    train(data, *SMALL, "--steps", 1, "--out", tmp_path / "out", program=cuda)
    (memory, mfu), = metrics(tmp_path / "out", ["gpu_memory_gb", "mfu"])
    assert 0 < memory < 1 and 0 < mfu < 1


def test_the_peak_is_that_of_all_ranks(cuda, data):
    said = [train(data, *SMALL, "--steps", 1, program=cuda, processes=ranks) for ranks in (1, 2)]
    one, two = (int(re.search(r"peak (\d+) GFLOP/s", text)[1]) for text in said)
    assert abs(two - 2 * one) <= 2


def time_between_lines(data, out, *flags, program):
    """The seconds between the lines of the first and the ninth, last step, and the time of these steps in the
    metrics."""
    words = command(data, *flags, "--steps", 9, "--out", out, program=program)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True,
                               env=dict(environment(CUDA_ON_CPU_STREAMS="late"), OMP_NUM_THREADS="2"))
    ends = [time.monotonic() for line in process.stdout if "| loss " in line]
    assert process.wait(timeout=120) == 0 and len(ends) == 9
    for tok_per_s, ms in metrics(out, ["tok_per_s", "ms"]):
        assert tok_per_s * ms / 1e3 == pytest.approx(1, rel=1e-3)
    return ends[-1] - ends[0], sum(ms for ms, in metrics(out, ["ms"])[1:]) / 1e3


def test_a_step_lasts_until_its_update_is_done(cuda, data, tmp_path):
    """The steps' times add up to the time between their lines, and exclude validations, samples and checkpoints after
    every other step. Streams work only when the host waits, and the model is nearly all parameters, so that AdamW takes
    more than a quarter of a step."""
    flags = ["--model", "layers=1,heads=1,channels=64,ffn=64,vocab=30000", "--seq-len", 1, "--batch", 1, "--warmup", 2,
             "--dtype", "bf16", "--stochastic-rounding"]
    between = ["--val-data", data / "d_val_000000.bin", "--val-every", 2, "--val-tokens", 40, "--sample-every", 2,
               "--ckpt-every", 2, "--keep", 1]
    shares = []
    while not shares or not 0.9 < shares[-1] < 1.1:      # on a busy machine a line may be printed late
        assert len(shares) < 4, shares
        passed, counted = time_between_lines(data, tmp_path / str(len(shares)), *flags, program=cuda)
        shares.append(counted / passed)
    passed, counted = time_between_lines(data, tmp_path / "between", *flags, *between, program=cuda)
    assert counted < 0.75 * passed


def test_host_threads(cuda, data):
    """--threads overrides OMP_NUM_THREADS; OpenMP reports each thread when it starts."""
    said = train(data, "--steps", 1, "--threads", 3, program=cuda,
                 env={"OMP_DISPLAY_AFFINITY": "TRUE", "OMP_AFFINITY_FORMAT": "thread %n of %N"})
    assert set(re.findall(r"thread (\d+) of 3", said)) == {"0", "1", "2"}


def test_no_thread_runs_a_handler(cuda, data):
    """As in the CPU's trainer: dev/tests/test_signals.py."""
    process = start(command(data, *SMALL, "--steps", 10 ** 6, program=cuda), env=environment(OMP_NUM_THREADS="2"))
    try:
        wait_for_line(process, "| loss ")
        assert_held(cuda, data)
    finally:
        process.terminate()
        finish(process, 75)


@pytest.mark.parametrize("batch, gigabytes, logits", [(512, 80, "3.30 GB"), (512, 40, "1.65 GB"), (512, 20, "1.11 GB"),
                                                      (2048, 60, "3.30 GB"), (2048, 46, "824 MB")])
def test_rows_of_logits(cuda, tmp_path, batch, gigabytes, logits):
    """32,768 rows in one block, two, three or four, each at most a sixteenth of the memory; 131,072 rows in four or,
    where those would leave less than a tenth of it, sixteen."""
    write_shard(tmp_path / "d_train_000001.bin", tokens(140000))
    said = train(tmp_path, "--model", "124M", "--seq-len", 64, "--batch", batch, "--dtype", "bf16", "--dry-run",
                 program=cuda, env={"CUDA_ON_CPU_MEMORY": str(gigabytes * 10**9)})
    assert re.search(rf"logits of one block of rows +{logits}$", said, re.M), said

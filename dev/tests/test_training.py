"""The program's steps against the reference in float64: ten steps from the same initial weights, with accumulation,
clipping, decay, warmup and a cosine schedule. Also bfloat16 steps against float32 steps."""
import json
import math
import re
import signal
import subprocess

import numpy as np
import pytest
import torch

import model as reference
from trainer import VOCAB, command, cuda_program, environment, make_data, metrics, tensors, tokens, train, write_shard

torch.set_num_threads(1)
STEPS, WARMUP, LR, MIN_LR, DECAY = 10, 3, 1e-2, 0.1, 0.5
SHAPE = dict(layers=2, heads=2, channels=16, ffn=24, vocab=VOCAB)


def in_double(out, step, name="model.safetensors"):
    return {name: torch.tensor(t, dtype=torch.float64) for name, t in tensors(out, step, name).items()}


def test_threads_change_nothing(tmp_path):
    """At the shorter of two lengths, each of eight threads has a group of heads for itself, which takes more memory
    than a group at a time of the longer one. And OMP_NUM_THREADS may list the threads of nested regions."""
    write_shard(tmp_path / "d_train_000001.bin", tokens(20_000))
    for threads in ("1", "8", "4,1", "2,8"):
        train(tmp_path, "--model", f"layers=1,heads=6,channels=384,ffn=32,vocab={VOCAB}", "--batch", 1, "--seq-len",
              "512,1024", "--steps", 6, "--lr", 0.01, "--warmup", 1, "--out", tmp_path / threads,
              env={"OMP_NUM_THREADS": threads})
        np.testing.assert_allclose(metrics(tmp_path / threads, ["loss"]), metrics(tmp_path / "1", ["loss"]), rtol=1e-5,
                                   err_msg=f"OMP_NUM_THREADS={threads}")


def test_the_time_left_does_not_count_the_first_step(tmp_path):
    """The first step also allocates memory and, on a GPU, loads code."""
    make_data(tmp_path)
    steps, shown = 1_000_000, []
    with subprocess.Popen(command(tmp_path, "--steps", steps, "--out", tmp_path / "out"), stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, env=environment()) as process:
        for line in process.stdout:
            if left := re.fullmatch(r"step .* \| (.*) left\n", line):
                shown.append(sum(int(count) * {"d": 86400, "h": 3600, "min": 60, "s": 1}[unit]
                                 for count, unit in re.findall(r"(\d+) (\w+)", left[1])))
            if len(shown) == 4:
                break
        process.send_signal(signal.SIGTERM)
        process.communicate()
    ms = [json.loads(line)["ms"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    mean = ms[1]
    for step in 2, 3, 4:
        mean = 0.9 * mean + 0.1 * ms[step - 1]
        # the line shows two units and rounds down, as in 1 d 0 h
        assert shown[step - 1] == pytest.approx(mean / 1000 * (steps - step), rel=0.05), (step, ms[:4])


def flags(out, attn, tied, batch, T, accumulate, clip, steps=STEPS, shape=SHAPE):
    model = ",".join(f"{key}={value}" for key, value in shape.items())
    return ["--out", out, "--model", f"{model},tied={tied}", "--attn", attn, "--seed", 5, "--shuffle", 0,
            "--batch", batch, "--seq-len", T, "--total-batch-tokens", batch * T * accumulate, "--steps", steps,
            "--lr", LR, "--warmup", WARMUP, "--schedule", "cosine",
            "--min-lr-frac", MIN_LR, "--grad-clip", clip, "--weight-decay", DECAY, "--beta1", 0.9, "--beta2", 0.95]


def schedule(step):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (MIN_LR + (1 - MIN_LR) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2)


def gradients(parameters, data, config, sequences, step):
    """The reference's loss and gradients of a step. Sequence g is window g modulo the number of windows."""
    T, windows = config.L, (len(data) - 1) // config.L
    starts = [(step * sequences + i) % windows * T for i in range(sequences)]
    batch = torch.tensor(np.stack([data[a:a + T + 1] for a in starts]).astype("i8"))
    return reference.gradients(parameters, batch[:, :-1], batch[:, 1:], config)[1:]


def expected_steps(start, data, config, sequences, clip):
    """(loss, lr, gradient norm) of each step in the reference, and its AdamW at the end."""
    parameters = {name: p.clone() for name, p in start.items()}
    optimizer, lines = reference.AdamW(parameters, DECAY), []
    for step in range(STEPS):
        loss, grads = gradients(parameters, data, config, sequences, step)
        lines.append((loss, schedule(step), optimizer.step(grads, schedule(step), clip)))
    return np.array(lines), optimizer


def distance(a, b):
    return (a - b).norm().item() / b.norm().item()


def assert_near(got, expected, bound, what):
    assert got.keys() == expected.keys()
    for name in expected:
        if expected[name].norm() == 0:
            assert got[name].norm() == 0, f"{what} of {name}"
        else:
            off = distance(got[name], expected[name])
            assert off < bound, f"{what} of {name}: {off:.2g} off"


def changes(end, start):
    return {name: end[name] - start[name] for name in start}


CASES = {       # attn, tied, batch, T, accumulation, clip
    "softmax": ("softmax", 1, 2, 16, 3, 0.7),
    "ssmax": ("ssmax", 0, 2, 16, 3, 0.7),
    "several chunks of rows": ("softmax", 0, 20, 32, 2, 0.45),       # the output layer takes 512 rows at a time
    "several chunks of rows, tied": ("ssmax", 1, 20, 32, 2, 0.45),
    "z-loss and a cap": ("softmax", 1, 2, 16, 3, 0.6),
}
OBJECTIVE = {"z-loss and a cap": dict(z_loss=0.01, logit_softcap=1.5)}      # what is not the default


@pytest.fixture
def data(tmp_path):
    ids = tokens(3000, 1)
    write_shard(tmp_path / "d_train_000001.bin", ids)
    return ids


def trained(tmp_path, case, *more, shape=SHAPE, **how):
    """The weights before and after STEPS steps of the program."""
    train(tmp_path, *flags(tmp_path / "start", *case, steps=0, shape=shape))
    train(tmp_path, *flags(tmp_path / "run", *case, shape=shape), *more, **how)
    return in_double(tmp_path / "start", 0), in_double(tmp_path / "run", STEPS)


def state_of(out, kind):
    """One of the optimizer's arrays of each parameter."""
    state = in_double(out, STEPS, "optimizer.safetensors")
    return {name.removesuffix(kind): t for name, t in state.items() if name.endswith(kind)}


@pytest.mark.parametrize("case", CASES)
def test_float32_steps_match_the_reference(tmp_path, data, case):
    attn, tied, batch, T, accumulate, clip = CASES[case]
    objective = OBJECTIVE.get(case, {})
    more = [word for name, value in objective.items() for word in (f"--{name.replace('_', '-')}", value)]
    start, end = trained(tmp_path, CASES[case], *more)
    config = reference.Config(**SHAPE, **objective, tied=bool(tied), attn=attn, L=T)
    expected, optimizer = expected_steps(start, data, config, batch * accumulate, clip)
    got = np.array(metrics(tmp_path / "run", ["loss", "lr", "grad_norm"]))
    norms = expected[:, 2]
    some = (norms > 1.1 * clip).any() and (norms < 0.9 * clip).any()
    assert some, f"the clip must affect some steps and not others: {norms}"
    for column, bound in enumerate((1e-5, 1e-6, 1e-4)):
        np.testing.assert_allclose(got[:, column], expected[:, column], rtol=bound,
                                   err_msg=("loss", "lr", "gradient's norm")[column])

    assert_near(changes(end, start), changes(optimizer.parameters, start), 1e-3, "the change")
    for kind in ("exp_avg", "exp_avg_sq"):
        assert_near(state_of(tmp_path / "run", f".{kind}"), getattr(optimizer, kind), 1e-3, kind)


@pytest.mark.parametrize("case", ["several chunks of rows", "several chunks of rows, tied"])
def test_bfloat16_steps_stay_close_to_float32(tmp_path, data, case):
    train(tmp_path, *flags(tmp_path / "start", *CASES[case], steps=0))
    for dtype in ("fp32", "bf16"):      # at --lr 0.01 rounding alone can change a step's gradient by tens of percent
        train(tmp_path, *flags(tmp_path / dtype, *CASES[case]), "--lr", LR / 5, "--dtype", dtype)
    start, single = in_double(tmp_path / "start", 0), in_double(tmp_path / "fp32", STEPS)
    a, b = (np.array(metrics(tmp_path / dtype, ["loss", "grad_norm"])) for dtype in ("bf16", "fp32"))
    np.testing.assert_allclose(a[:, 0], b[:, 0], rtol=2e-3, err_msg="loss")
    np.testing.assert_allclose(a[:, 1], b[:, 1], rtol=2e-2, err_msg="gradient's norm")
    assert_near(changes(state_of(tmp_path / "bf16", ".master"), start), changes(single, start), 0.1, "the change")


# ---------------------------------------------------------------- Muon

HIDDEN = "_proj.weight"      # how the names of the layers' matrices end


def in_float64(monkeypatch):
    """torch.optim.Muon rounds its input to bfloat16 before the Newton-Schulz rounds. After this, it copies it."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


def torch_steps(start, data, config, sequences, clip):
    """Losses and parameters after STEPS steps of torch.optim.Muon for the layers' matrices and torch.optim.AdamW for
    all other tensors, by the reference's gradients in float64; and the two optimizers."""
    parameters = {name: p.clone() for name, p in start.items()}
    hidden = [p for name, p in parameters.items() if name.endswith(HIDDEN)]
    rest = [{"params": [p for name, p in parameters.items()
                        if not name.endswith(HIDDEN) and reference.decays(name) == bool(decay)], "weight_decay": decay}
            for decay in (DECAY, 0)]
    muon = torch.optim.Muon(hidden, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        loss, grads = gradients(parameters, data, config, sequences, step)
        scale = min(1, clip / (reference.global_norm(grads.values()) + 1e-6))
        losses.append(loss)
        for name, p in parameters.items():
            p.grad = grads[name] * scale
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            optimizer.step()
    momentum = {name: muon.state[p]["momentum_buffer"] for name, p in parameters.items() if p in muon.state}
    return losses, parameters, momentum


@pytest.mark.parametrize("case", ["softmax", "several chunks of rows, tied"])
def test_muon_equals_torch(tmp_path, data, case, monkeypatch):
    in_float64(monkeypatch)
    shape = SHAPE | dict(gate="channel")
    attn, tied, batch, T, accumulate, clip = CASES[case]
    start, end = trained(tmp_path, CASES[case], "--optimizer", "muon", shape=shape)
    config = reference.Config(**shape, tied=bool(tied), attn=attn, L=T)
    losses, parameters, momentum = torch_steps(start, data, config, batch * accumulate, clip)
    np.testing.assert_allclose([loss for loss, in metrics(tmp_path / "run", ["loss"])], losses, rtol=1e-5)
    assert_near(changes(end, start), changes(parameters, start), 1e-3, "the change")
    assert_near(state_of(tmp_path / "run", ".momentum"), momentum, 1e-3, "the momentum")
    assert state_of(tmp_path / "run", ".exp_avg").keys() == start.keys() - momentum.keys()


def test_muon_by_the_cuda_source(tmp_path, data, monkeypatch):
    """There, the Newton-Schulz rounds are in bfloat16 as in torch.optim.Muon. Compared with float64, their error must
    be no larger than torch's."""
    cuda, shape = cuda_program(), SHAPE | dict(channels=48, ffn=40, gate="head")
    attn, tied, batch, T, accumulate, clip = case = CASES["softmax"]
    start, ours = trained(tmp_path, case, "--optimizer", "muon", shape=shape, program=cuda)
    how = start, data, reference.Config(**shape, tied=bool(tied), attn=attn, L=T), batch * accumulate, clip
    theirs = torch_steps(*how)[1]
    in_float64(monkeypatch)
    losses, exact, _ = torch_steps(*how)
    np.testing.assert_allclose([loss for loss, in metrics(tmp_path / "run", ["loss"])], losses, rtol=1e-4)
    for name in start:
        off, allowed = (distance(changed[name], changes(exact, start)[name])
                        for changed in (changes(ours, start), changes(theirs, start)))
        assert off < 2 * allowed and allowed < 0.05, name


# ---- masks without a target that counts

def mask_at(*places):
    mask = np.zeros(200, int)
    mask[list(places)] = 1
    return mask


# the masks of two training shards and of the validation shard, more flags, and what a message names, or None
IDLE = {
    "training": ([mask_at(), mask_at()], mask_at(5), [], "d_train_000001.bin"),
    "one token that is no target": ([mask_at(0), mask_at()], mask_at(5), [], "d_train_000001.bin"),
    "beyond the last window": ([mask_at(), mask_at(199)], mask_at(5), [], "d_train_000001.bin"),
    "validation": ([mask_at(5), mask_at(7)], mask_at(), [], "d_val_000000.bin"),
    "the windows of a validation": ([mask_at(5), mask_at(7)], mask_at(17), ["--val-tokens", 16], "d_val_000000.bin"),
    "beyond the length of documents": ([mask_at(19), mask_at()], mask_at(5), ["--pack", "example"],
                                       "d_train_000001.bin"),
    "the first token of documents": ([mask_at(20), mask_at(40)], mask_at(5), ["--pack", "example"],
                                     "d_train_000001.bin"),
    "the last target": ([mask_at(), mask_at(192)], mask_at(16), ["--val-tokens", 16], None),
    "the last target of a document": ([mask_at(28), mask_at(48)], mask_at(5), ["--pack", "example"], None),
}


@pytest.mark.parametrize("name", IDLE)
def test_data_in_which_no_target_counts(name, tmp_path):
    """It is an error before anything is written, and one shard among others a warning."""
    train_masks, val_mask, flags, named = IDLE[name]
    ids = np.arange(200) % 20 + 1
    ids[::20] = VOCAB - 1
    for path, mask in zip(("d_train_000001", "d_train_000002", "d_val_000000"), (*train_masks, val_mask)):
        write_shard(tmp_path / f"{path}.bin", ids)
        write_shard(tmp_path / f"{path}.mask", mask, magic=20240521)
    words = ["--val-data", tmp_path / "d_val_*.bin", "--val-every", 1, "--keep-best", "--steps", 1, *flags]
    for more in (["--dry-run"], ["--out", tmp_path / "out"]):
        printed = train(tmp_path, *words, *more, code=3 if named else 0)
        if named:
            assert named in printed and "no token counts toward the loss" in printed
            assert not (tmp_path / "out").exists()
        else:
            idle = [i for i, mask in enumerate(train_masks) if not mask.any()]
            assert printed.count("no token counts") == len(idle)
            assert all(f"d_train_{i + 1:06d}" in printed for i in idle)

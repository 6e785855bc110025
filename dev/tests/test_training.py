"""The program's steps against the reference in float64: ten steps from the same initial weights, with accumulation,
clipping, decay, warmup and a cosine schedule. Also bfloat16 steps against float32 steps."""
import math
import sys

import numpy as np
import pytest
import torch

from trainer import ROOT, VOCAB, checkpoint, metrics, read_header, tokens, train, write_shard

sys.path.insert(0, str(ROOT / "dev" / "reference"))
import model as reference

torch.set_num_threads(1)
STEPS, WARMUP, LR, MIN_LR, DECAY = 10, 3, 1e-2, 0.1, 0.5
SHAPE = dict(layers=2, heads=2, channels=16, ffn=24, vocab=VOCAB)


def tensors(path):
    """A safetensors file's float32 tensors, in float64."""
    header, data = read_header(path)
    header.pop("__metadata__", None)
    return {name: torch.tensor(np.frombuffer(data[slice(*t["data_offsets"])], "<f4").reshape(t["shape"]).astype("f8"))
            for name, t in header.items() if t["dtype"] == "F32"}


def flags(out, attn, tied, batch, T, accumulate, clip, steps=STEPS):
    model = ",".join(f"{key}={value}" for key, value in SHAPE.items())
    return ["--out", out, "--model", f"{model},tied={tied}", "--attn", attn, "--seed", 5, "--shuffle", 0,
            "--batch", batch, "--seq-len", T, "--total-batch-tokens", batch * T * accumulate, "--steps", steps,
            "--lr", LR, "--warmup", WARMUP, "--schedule", "cosine",
            "--min-lr-frac", MIN_LR, "--grad-clip", clip, "--weight-decay", DECAY, "--beta1", 0.9, "--beta2", 0.95]


def schedule(step):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (MIN_LR + (1 - MIN_LR) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2)


def expected_steps(start, data, config, sequences, clip):
    """(loss, lr, gradient norm) of each step in the reference, and its AdamW at the end. Sequence g is window g modulo
    the number of windows."""
    parameters, T = {name: p.clone() for name, p in start.items()}, config.L
    windows = (len(data) - 1) // T
    optimizer, lines = reference.AdamW(parameters, DECAY), []
    for step in range(STEPS):
        starts = [(step * sequences + i) % windows * T for i in range(sequences)]
        batch = torch.tensor(np.stack([data[a:a + T + 1] for a in starts]).astype("i8"))
        _, loss, grads = reference.gradients(parameters, batch[:, :-1], batch[:, 1:], config)
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
}


@pytest.fixture
def data(tmp_path):
    ids = tokens(3000, 1)
    write_shard(tmp_path / "d_train_000001.bin", ids)
    return ids


@pytest.mark.parametrize("case", CASES)
def test_float32_steps_match_the_reference(tmp_path, data, case):
    attn, tied, batch, T, accumulate, clip = CASES[case]
    train(tmp_path, *flags(tmp_path / "start", *CASES[case], steps=0))
    train(tmp_path, *flags(tmp_path / "run", *CASES[case]))
    start, end = (tensors(checkpoint(tmp_path / out, step) / "model.safetensors")
                  for out, step in (("start", 0), ("run", STEPS)))

    config = reference.Config(**SHAPE, tied=bool(tied), attn=attn, L=T)
    expected, optimizer = expected_steps(start, data, config, batch * accumulate, clip)
    got = np.array(metrics(tmp_path / "run", ["loss", "lr", "grad_norm"]))
    norms = expected[:, 2]
    some = (norms > 1.1 * clip).any() and (norms < 0.9 * clip).any()
    assert some, f"the clip must affect some steps and not others: {norms}"
    for column, bound in enumerate((1e-5, 1e-6, 1e-4)):
        np.testing.assert_allclose(got[:, column], expected[:, column], rtol=bound,
                                   err_msg=("loss", "lr", "gradient's norm")[column])

    assert_near(changes(end, start), changes(optimizer.parameters, start), 1e-3, "the change")
    state = tensors(checkpoint(tmp_path / "run", STEPS) / "optimizer.safetensors")
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {name.removesuffix("." + kind): t for name, t in state.items() if name.endswith("." + kind)}
        assert_near(moments, getattr(optimizer, kind), 1e-3, kind)


@pytest.mark.parametrize("case", ["several chunks of rows", "several chunks of rows, tied"])
def test_bfloat16_steps_stay_close_to_float32(tmp_path, data, case):
    train(tmp_path, *flags(tmp_path / "start", *CASES[case], steps=0))
    for dtype in ("fp32", "bf16"):      # at --lr 0.01 rounding alone can change a step's gradient by tens of percent
        train(tmp_path, *flags(tmp_path / dtype, *CASES[case]), "--lr", LR / 5, "--dtype", dtype)
    start = tensors(checkpoint(tmp_path / "start", 0) / "model.safetensors")
    single = tensors(checkpoint(tmp_path / "fp32", STEPS) / "model.safetensors")
    state = tensors(checkpoint(tmp_path / "bf16", STEPS) / "optimizer.safetensors")
    master = {name.removesuffix(".master"): t for name, t in state.items() if name.endswith(".master")}

    a, b = (np.array(metrics(tmp_path / dtype, ["loss", "grad_norm"])) for dtype in ("bf16", "fp32"))
    np.testing.assert_allclose(a[:, 0], b[:, 0], rtol=2e-3, err_msg="loss")
    np.testing.assert_allclose(a[:, 1], b[:, 1], rtol=2e-2, err_msg="gradient's norm")
    assert_near(changes(master, start), changes(single, start), 0.1, "the change")

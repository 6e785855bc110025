"""Random combinations of flags: both trainers (the CUDA trainer's source runs on the CPU) have the losses and gradients
of the reference in float64, a resumed run repeats the bits of one that never stopped, and both evaluation programs and
transformers compute the reference's loss from the last checkpoint.

A case is drawn by its number, with flags that other tests set one at a time. Weights are large, so that scores differ
and each stage of the normalizer matters. A second set covers every pair of what layers may have: normalizers, windows,
caps, position rules, in lists, with grouped heads and document masks, in both kernel families and types.
"""
import itertools
import json
import math
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import model as reference
from test_huggingface import load
from tiny import BIN, run
from trainer import assert_same_run, checkpoint, cuda_program, metrics, steps, train, write_shard

torch.set_num_threads(1)
CASES = range(80)
OVERRIDES = {
    "qk": ["none", "l2"],
    "scale": ["rsqrt-d", "logn", "logn-bias", "pn", "log:L", "log:7", "floorlog:3", "logd-logn", "const:-0.4"],
    "offset": ["none", "-logL", "-logT", "-logn"],
    "phi": list(reference.PHI),
    "norm": ["l1", "l1+sink", "l1+0.25", "n", "n2", "L", "T", "T2", "const:9", "sqrt-half-n"],
    "post": ["none", "negate", "rectify", "recenter", "recenter-l1", "reweight:2.5", "reweight:3"],
}


# ---- drawing a case

def draw_attn(draw):
    """A preset, in half of the cases with one to three overrides that go together."""
    while True:
        stages = draw.sample(list(OVERRIDES), draw.choice([0, 0, 0, 1, 2, 3]))
        overrides = [f"+{stage}={draw.choice(OVERRIDES[stage])}" for stage in stages]
        name = draw.choice(list(reference.PRESETS)) + "".join(overrides)
        try:
            normalizer = reference.parse_normalizer(name)
        except ValueError:          # a sink needs exp
            continue
        if normalizer.has_s or not normalizer.fixed:
            return name


def draw_model(draw):
    vocab, tied = draw.choice([7, 33, 97, 130]), draw.choice([0, 1])
    if draw.random() < 0.2:
        return dict(block="gau", layers=1, channels=draw.choice([8, 12, 20, 36]), vocab=vocab, tied=tied)
    kv_heads = draw.choice([1, 1, 2])
    model = dict(layers=draw.choice([1, 1, 2]), heads=kv_heads * draw.choice([1, 1, 2, 3]), kv_heads=kv_heads,
                 head_dim=draw.choice([8, 16, 24, 40, 64, 72, 104, 128]), channels=draw.choice([5, 8, 17, 24, 34, 48]),
                 ffn=draw.choice([5, 8, 24, 33]), vocab=vocab, tied=tied)
    model |= draw.choice([{}, {}, {"qk_norm": 1}]) | draw.choice([{}, {}, {"bias": "qkv"}])
    model |= draw.choice([{}, {}, {"gate": "channel"}, {"gate": "head"}])
    return model | draw.choice([{}, {}, {"norm_eps": 0.01}])


def draw_flags(draw, choices):
    """The flags whose drawn value is not None, as words."""
    drawn = {name: draw.choice(values) for name, values in choices.items()}
    return {name: value for name, value in drawn.items() if value is not None}


def draw_case(number):
    draw = random.Random(number)
    model, attn, T = draw_model(draw), draw_attn(draw), draw.choice([2, 3, 8, 17, 33, 40, 66])
    shape = draw_flags(draw, {
        "rope-theta": [None, 50, 500000], "logit-softcap": [None, None, 2, 30], "norm-length": [T, T, 2 * T, 100],
        "rope-scaling": [None, None, "linear:2.5", "ntk", "llama3:4:1:4:8", "yarn:4:6"]})
    batch = draw.choice([1, 2, 3])
    training = draw_flags(draw, {
        "z-loss": [None, 0.01, 0.3], "optimizer": [None, None, "muon"], "grad-clip": [None, 0, 0.3],
        "weight-decay": [None, 0, 0.5], "schedule": [None, "cosine", "wsd"], "beta1": [None, 0.8], "warmup": [0, 1, 5],
        "total-batch-tokens": [None, 2 * batch * T], "shuffle": [0, 0, None], "doc-mask": [None, None, 1],
        "pack": [None, None, None, "example"]})
    return SimpleNamespace(model=model, attn=attn, T=T, L=shape["norm-length"], batch=batch, shape=shape,
                           training={"batch": batch, "seq-len": T, "lr": 5e-4} | training,
                           masked=draw.random() < 0.2, draw=draw)


LAYER_T = 130       # three tiles of 64
PAIRS = {
    "attn": ["softmax", "ssmax-bias", "ssmax-pn", "softmax-sink", "softmax-recentered", "lssar+post=reweight:3",
             "sigmoid-logn", "relu2-T"],
    "window": [1, 2, 63, 64, 65, LAYER_T, LAYER_T + 40],
    "others": ["", ",ssmax+rope=none", ",softmax1,ssmax-bias+window=70+cap=1.5"],
    "cap": ["", "+cap=2"],
    "rope": ["", "+rope=none", "+rope=50"],
    "kv_heads": [1, 2],
    "gate": ["none", "channel", "head"],
    "doc-mask": [None, 1],
    "dtype": ["fp32", "bf16"],
    "capability": ["80", "90"],
}


def covering(factors):
    """Choices of a value for each factor, in which every two values of two factors occur together."""
    draw, names = random.Random(1), list(factors)
    pairs_of = lambda case: {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}
    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    cases = []
    while missing:
        a, x, b, y = min(missing, key=str)
        drawn = [{name: draw.choice(values) for name, values in factors.items()} | {a: x, b: y} for _ in range(50)]
        cases.append(max(drawn, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(cases[-1])
    return cases


def layer_case(chosen):
    """A case of a list whose first entry, or every entry, is the chosen one."""
    attn = f"{chosen['attn']}+window={chosen['window']}{chosen['cap']}{chosen['rope']}{chosen['others']}"
    model = dict(layers=attn.count(",") + 1, heads=2, kv_heads=chosen["kv_heads"], head_dim=64, channels=24, ffn=24,
                 vocab=97, tied=1, gate=chosen["gate"])
    return SimpleNamespace(model=model, attn=attn, T=LAYER_T, L=LAYER_T, batch=1, shape={}, masked=False,
                           training={"batch": 1, "seq-len": LAYER_T, "lr": 5e-4, "warmup": 0, "shuffle": 0}
                           | ({"doc-mask": 1} if chosen["doc-mask"] else {}))


def words(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def write_data(case, folder):
    """Documents of 13 tokens, with masks or without."""
    random_numbers = np.random.default_rng(case.T)
    for name, count in (("d_train_000001", 700), ("d_val_000000", 300), ("e_eval_000000", 300)):
        ids = random_numbers.integers(0, case.model["vocab"], count)
        ids[::13] = case.model["vocab"] - 1
        write_shard(folder / f"{name}.bin", ids)
        if case.masked and name[0] == "d":
            write_shard(folder / f"{name}.mask", random_numbers.random(count) < 0.7, magic=20240521)


def initial_weights(case, data, folder):
    """A checkpoint's folder with large random weights; an s that is fixed keeps its value."""
    spec = ",".join(f"{key}={value}" for key, value in case.model.items())
    train(data, "--model", spec, "--attn", case.attn, *words(case.shape), *words(case.training), "--steps", 0, "--out",
          folder / "init", model=False)
    init, base = checkpoint(folder / "init", 0), folder / "base"
    random_numbers, weights = np.random.default_rng(1), load_file(init / "model.safetensors")
    for name, tensor in weights.items():
        noise = random_numbers.standard_normal(tensor.shape).astype("f4")
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.3 * noise
        elif tensor.ndim == 2:
            weights[name] = noise * (0.7 if "embed" in name else tensor.shape[1] ** -0.5)
        elif name.endswith("attn_scale"):
            fixed = normalizers_of(case)[int(name.split(".")[2])].fixed
            weights[name] = tensor if fixed else 0.7 + 0.3 * noise
        else:
            weights[name] = 0.5 * noise
    base.mkdir()
    shutil.copy(init / "config.json", base)
    save_file(weights, base / "model.safetensors")
    return base


# ---- the reference and the bounds

def normalizers_of(case):
    return reference.parse_layers(case.attn, case.model["layers"] * (2 if case.model.get("block") == "gau" else 1))


def bound_of(case):
    """Of gradients' relative errors: powers of weights, and differences from their mean, magnify rounding."""
    return 3e-2 if any(normalizer.post.startswith("re") for normalizer in normalizers_of(case)) else 1e-3


def reference_of(case, folder, monkeypatch):
    """The parameters in a folder, and their Config."""
    monkeypatch.setattr(reference, "THETA", float(case.shape.get("rope-theta", 10000)))
    model = {key: value for key, value in case.model.items() if key != "tied"}
    config = reference.Config(**model, tied=bool(case.model["tied"]), attn=case.attn, L=case.L,
                              rope_scaling=case.shape.get("rope-scaling", "none"),
                              logit_softcap=case.shape.get("logit-softcap", 0.0),
                              z_loss=case.training.get("z-loss", 0.0))
    return {name: torch.tensor(tensor.astype("f8")) for name, tensor in
            load_file(folder / "model.safetensors").items()}, config


def windows(path, count, T):
    ids = np.fromfile(path, "<u2", offset=1024).astype("i8")
    return torch.tensor(np.stack([ids[i * T:i * T + T + 1] for i in range(count)]))


def documents(case, inputs):
    """The first key that each token sees, or None: a document begins with the last token of the vocabulary."""
    if "doc-mask" not in case.training:
        return None
    at = torch.arange(inputs.shape[1]).expand(inputs.shape)
    return torch.where(inputs == case.model["vocab"] - 1, at, 0).cummax(1).values


def reference_gradients(case, data, base, monkeypatch):
    """Loss, norm and gradients of the first step, after clipping."""
    parameters, config = reference_of(case, base, monkeypatch)
    batch = windows(data / "d_train_000001.bin",
                    case.training.get("total-batch-tokens", case.batch * case.T) // case.T, case.T)
    first = documents(case, batch[:, :-1])
    _, loss, expected = reference.gradients(parameters, batch[:, :-1], batch[:, 1:], config, first)
    norm, clip = reference.global_norm(expected.values()), case.training.get("grad-clip", 1)
    scale = min(1, clip / (norm + 1e-6)) if clip else 1
    return loss, norm, {name: scale * tensor.numpy() for name, tensor in expected.items()}


def first_gradients(out):
    """Each tensor's gradient in the first step, after clipping: the first moment, or Muon's momentum, over its share in
    that."""
    beta1 = json.loads((out / "run.json").read_text())["arguments"]["beta1"]
    shares, state = {"exp_avg": 1 - beta1, "momentum": 0.05}, load_file(checkpoint(out, 1) / "optimizer.safetensors")
    return {name.removesuffix(f".{kind}"): tensor / share for kind, share in shares.items()
            for name, tensor in state.items() if name.endswith(f".{kind}")}


def assert_gradients(got, expected, bound, what):
    """Each tensor's error, relative to the tensor and a hundredth of the whole gradient."""
    whole = math.sqrt(sum(float((tensor.astype("f8") ** 2).sum()) for tensor in expected.values()))
    for name, tensor in expected.items():
        off = np.linalg.norm(got[name] - tensor) / (np.linalg.norm(tensor) + 1e-2 * whole + 1e-30)
        assert off < bound, f"{what}: the gradient of {name} is {off:.2g} off"


# ---- the test

@pytest.fixture(scope="module")
def programs():
    return cuda_program(), cuda_program("eval_gpt2cu")


def check_trainers(case, data, base, out, cuda, monkeypatch):
    """Two steps of both trainers; the first against the reference if its sequences are known."""
    more = case.draw.choice([[], ["--recompute"], ["--graphs", 0]])
    order = case.draw.choice(["forward", "random", "straggler"])
    flags = ["--init-from", base, *words(case.training), "--steps", 2, "--ckpt-every", 1, "--keep", 0]
    train(data, *flags, "--out", out / "cpu", model=False)
    train(data, *flags, *more, "--out", out / "cuda", program=cuda, model=False, env={"CUDA_ON_CPU_ORDER": order})
    a, b = (np.array(metrics(out / name, ["loss", "grad_norm", "lr"])) for name in ("cpu", "cuda"))
    gradients = {name: first_gradients(out / name) for name in ("cpu", "cuda")}
    bound = bound_of(case)
    np.testing.assert_allclose(b[0], a[0], rtol=bound)
    np.testing.assert_allclose(b[0, 0], a[0, 0], rtol=2e-5 if bound < 1e-2 else 1e-3)
    np.testing.assert_allclose(b[1], a[1], rtol=10 * bound)
    assert gradients["cpu"].keys() == gradients["cuda"].keys()
    assert_gradients(gradients["cuda"], gradients["cpu"], bound, "CUDA against the CPU")
    if case.training.get("shuffle") != 0 or "pack" in case.training or case.masked:
        return
    loss, norm, expected = reference_gradients(case, data, base, monkeypatch)
    for name, found in gradients.items():
        np.testing.assert_allclose({"cpu": a, "cuda": b}[name][0, :2], [loss, norm], rtol=bound)
        assert_gradients(found, expected, bound, f"{name} against the reference")


def check_resume(case, data, base, out, cuda):
    """To the last bit, of a run with validations and perhaps a switch."""
    draw = case.draw
    flags = ["--init-from", base, *words(case.training), "--dtype", draw.choice(["bf16", "fp32"]), "--steps", 3,
             "--ckpt-every", 1, "--keep", 0, "--val-data", data / "d_val_000000.bin", "--val-tokens", 100,
             "--val-every", draw.choice([1, 2])]
    flags += draw.choice([[], ["--attn-switch", f"{draw.choice([1, 2])}:{draw.choice(['ssmax', 'lssar', 'relu2-T'])}"]])
    flags += draw.choice([[], ["--stochastic-rounding"]])
    env = {"CUDA_ON_CPU_CAPABILITY": draw.choice(["80", "90"])}
    train(data, *flags, "--out", out / "whole", program=cuda, model=False, env=env)
    shutil.copytree(out / "whole", out / "parts")
    last = draw.choice([1, 2])
    for step in steps(out / "parts"):
        if step > last:
            shutil.rmtree(checkpoint(out / "parts", step))
    train(data, *flags, "--out", out / "parts", "--resume", program=cuda, model=False,
          env=env | {"CUDA_ON_CPU_STREAMS": draw.choice(["once", "late"])})
    assert_same_run(out / "whole", out / "parts", 3)


def check_evaluation(case, data, out, evaluation, monkeypatch):
    """At the training length and, unless p_n ends there, beyond it."""
    folder = checkpoint(out / "cuda", 2)
    parameters, config = reference_of(case, folder, monkeypatch)
    lengths = [case.T, case.L + 1][:1 if config.normalizer.scale == "pn" else 2]
    bound = 1e-3 if bound_of(case) > 1e-2 else 1e-4
    for T in lengths:
        batch = windows(data / "e_eval_000000.bin", max(1, 60 // T), T)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        with torch.no_grad():
            loss = reference.cross_entropy(reference.forward(parameters, inputs, config), targets).item()
            theirs = reference.cross_entropy(load(folder)(inputs).logits.double(), targets).item()
        assert theirs == pytest.approx(loss, rel=bound)
        for program in (BIN / "eval_gpt2", evaluation):
            run(program, "--model", folder, "--data", data / "e_eval_000000.bin", "--seq-lens", T, "--max-tokens",
                max(T, 60), "--picture", 0, "--out", out / "eval")
            [found] = json.loads((out / "eval/eval.json").read_text())["results"]
            assert found["loss"] == pytest.approx(loss, rel=bound)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("number", CASES)
def test_a_combination(number, programs, tmp_path, monkeypatch):
    case = draw_case(number)
    print(case.model, case.attn, case.shape, case.training)
    write_data(case, tmp_path)
    base = initial_weights(case, tmp_path, tmp_path)
    check_trainers(case, tmp_path, base, tmp_path, programs[0], monkeypatch)
    check_resume(case, tmp_path, base, tmp_path, programs[0])
    check_evaluation(case, tmp_path, tmp_path, programs[1], monkeypatch)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("chosen", covering(PAIRS), ids=lambda chosen: "-".join(map(str, chosen.values())))
def test_a_pair(chosen, programs, tmp_path, monkeypatch):
    """The first step of both trainers. bfloat16 has 8 bits, and powers magnify their rounding."""
    case = layer_case(chosen)
    bound = (0.1 if bound_of(case) > 1e-3 else 0.05) if chosen["dtype"] == "bf16" else bound_of(case)
    write_data(case, tmp_path)
    base = initial_weights(case, tmp_path, tmp_path)
    loss, norm, expected = reference_gradients(case, tmp_path, base, monkeypatch)
    for program in None, programs[0]:
        out = tmp_path / ("cuda" if program else "cpu")
        train(tmp_path, "--init-from", base, *words(case.training), "--steps", 1, "--ckpt-every", 1, "--dtype",
              chosen["dtype"], "--out", out, model=False, program=program,
              env={"CUDA_ON_CPU_CAPABILITY": chosen["capability"]})
        [found] = metrics(out, ["loss", "grad_norm"])
        np.testing.assert_allclose(found, [loss, norm], rtol=bound)
        assert_gradients(first_gradients(out), expected, bound, out.name)

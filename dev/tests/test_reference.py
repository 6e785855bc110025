"""The reference against transformers, torch.optim, finite differences and the papers' formulas written as loops; and
the stored fixtures against the reference."""

import math
import os
import subprocess

import numpy as np
import pytest
import torch

import draw
import fixtures
import model as reference
from model import parse_normalizer
from trainer import ROOT

torch.set_num_threads(1)
SMALL = dict(layers=2, heads=2, channels=16, ffn=24, vocab=31)
SMALL_GAU = dict(layers=1, channels=16, vocab=31, block="gau")


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend(name, q, k, v, L=16, **scalars):
    return reference.attention(q, k, v, parse_normalizer(name), L, scalars)


def scalars_of(name, heads, L, seed=7):
    """The normalizer's scalars, near their initial values, as leaves that collect gradients."""
    start = reference.scalars_at_start(parse_normalizer(name), heads, L)
    return {name: (x + 0.3 * random(len(x), seed=seed + i)).requires_grad_()
            for i, (name, x) in enumerate(start.items())}


# ---- The whole model against transformers

def llama_of(config):
    """transformers' Llama in float64, with QK norms its Qwen3, with biases its Qwen2. Its RMSNorm and RoPE always
    convert to float32."""
    from transformers import (LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                              Qwen3ForCausalLM)

    config_class, model_class = ((Qwen3Config, Qwen3ForCausalLM) if config.qk_norm else
                                 (Qwen2Config, Qwen2ForCausalLM) if config.bias == "qkv" else
                                 (LlamaConfig, LlamaForCausalLM))
    return model_class(config_class(
        vocab_size=config.vocab, hidden_size=config.channels, intermediate_size=config.ffn,
        num_hidden_layers=config.layers, num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads or config.heads, head_dim=config.query_width // config.heads,
        rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tied, max_position_embeddings=64)).double().eval()


@pytest.mark.parametrize("change", [{}, dict(heads=4, kv_heads=2), dict(heads=4, kv_heads=1, head_dim=6, norm_eps=0.05),
                                    dict(qk_norm=1), dict(heads=4, kv_heads=2, head_dim=6, qk_norm=1, norm_eps=0.05),
                                    dict(bias="qkv"), dict(heads=4, kv_heads=2, head_dim=6, bias="qkv")],
                         ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_softmax_equals_transformers(tied, change):
    config = reference.Config(**SMALL | change, tied=tied)
    llama = llama_of(config)
    weights = {name: fixtures.parameter(name, shape) for name, shape in reference.parameter_shapes(config).items()}
    missing, unexpected = llama.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tied else set())
    tokens = fixtures.indices("tokens", 0, 2 * 14, config.vocab).view(2, 14)
    logits, loss, grads = reference.gradients(weights, tokens[:, :-1], tokens[:, 1:], config)

    theirs = llama(tokens[:, :-1]).logits
    assert theirs.dtype == torch.float64
    their_loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), tokens[:, 1:].flatten())
    their_loss.backward()
    assert (logits - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    assert abs(loss - their_loss.item()) <= 1e-6
    their_grads = {name: p.grad for name, p in llama.named_parameters()}
    assert their_grads.keys() == grads.keys()
    for name, g in grads.items():
        assert (g - their_grads[name]).norm() <= 1e-5 * g.norm(), name


def test_adamw_equals_torch():
    start = {"matrix.weight": random(5, 7), "model.norm.weight": random(7, seed=1),
             "self_attn.attn_scale": random(2, seed=2)}
    ours = {name: p.clone() for name, p in start.items()}
    theirs = {name: p.clone().requires_grad_() for name, p in start.items()}
    optimizer = reference.AdamW(ours, weight_decay=0.1)
    groups = [{"params": [theirs["matrix.weight"]], "weight_decay": 0.1},
              {"params": [theirs["model.norm.weight"], theirs["self_attn.attn_scale"]], "weight_decay": 0.0}]
    torch_optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(10):
        lr, size = 1e-2 * min(1, (step + 1) / 2), 0.05 if step % 2 else 3.0     # alternately unclipped and clipped
        grads = {name: random(*p.shape, seed=10 * step + i, scale=size) for i, (name, p) in enumerate(start.items())}
        for name, p in theirs.items():
            p.grad = grads[name].clone()
        for group in torch_optimizer.param_groups:
            group["lr"] = lr
        their_norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        assert abs(optimizer.step(grads, lr, clip=1.0) - their_norm) <= 1e-12 * their_norm
        assert (their_norm > 1) == (step % 2 == 0)
        torch_optimizer.step()
        for name in ours:
            assert (ours[name] - theirs[name]).abs().max() <= 1e-12, (step, name)


@pytest.mark.parametrize("attn", ["softmax", "ssmax-pn", "relu2-n"])
def test_gau_by_loops(attn):
    """One unit, number by number, with RoPE by complex numbers."""
    config, T, C = reference.Config(**SMALL_GAU, tied=True, attn=attn, L=16), 5, 16
    p = {name: fixtures.parameter(name, shape) for name, shape in reference.parameter_shapes(config).items()}
    w = {name.removeprefix("model.layers.0.").removeprefix("gau."): x.numpy() for name, x in p.items()}
    x = random(1, T, C).numpy()[0]
    silu = lambda y: y / (1 + np.exp(-y))

    def rotated(y, t):
        turned = (y[:64] + 1j * y[64:]) * np.exp(1j * t * 10000.0 ** (-np.arange(64) / 64))
        return np.concatenate([turned.real, turned.imag])
    h = [row / np.sqrt(np.mean(row**2) + 1e-5) * w["input_layernorm.weight"] for row in x]
    U, V, Z = ([silu(w[f"{name}_proj.weight"] @ row) for row in h] for name in "uvz")
    q, k = ([rotated(Z[t] * w[f"{name}_gain"] + w[f"{name}_offset"], t) for t in range(T)] for name in "qk")
    for i in range(T):
        c = 1.0 if attn != "ssmax-pn" else w["attn_scale"][0] * w["model.attn_pn"][i] + w["attn_bias"][0]
        z = [c * (q[i] @ k[j]) / math.sqrt(128) for j in range(i + 1)]
        f = ([max(y, 0) ** 2 / (i + 1) for y in z] if attn == "relu2-n"
             else [math.exp(y) / sum(map(math.exp, z)) for y in z])
        expected = x[i] + w["o_proj.weight"] @ (U[i] * sum(f[j] * V[j] for j in range(i + 1)))
        ours = reference.gau_layer(torch.from_numpy(x)[None], p, "model.layers.0.", config, config.normalizer)
        ours = ours[0, i].numpy()
        assert np.abs(ours - expected).max() <= 1e-11 * np.abs(expected).max()


# ---- The normalizers

@pytest.mark.parametrize("name", ["ssmax-bias", "lssar", "softmax-recentered", "relu2-n"])
def test_a_window_hides_earlier_keys(name):
    """A row equals the last one of a text that begins with its first visible key."""
    q, k, v = (random(1, 2, 9, 4, seed=seed) for seed in range(3))
    scalars, first = scalars_of(name, 2, 16), torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4, 4]])
    for of, start in ((None, lambda i: i - 4), (first, lambda i: max(i - 4, int(first[0, i])))):
        out = reference.attention(q, k, v, parse_normalizer(name + "+window=5"), 16, scalars, of)
        for i in range(9):
            text = slice(max(start(i), 0), i + 1)
            alone = attend(name, q[:, :, text], k[:, :, text], v[:, :, text], **scalars)
            assert (out[:, :, i] - alone[:, :, -1]).abs().max() <= 1e-14, i


def row_by_loops(name, scores, d, s):
    """A row of A for n scores q·k, from the papers' formulas, number by number."""
    n, mean = len(scores), lambda x: sum(x) / len(x)
    z = [x / math.sqrt(d) for x in scores]
    share = lambda f: [x / sum(abs(y) for y in f) for x in f]
    softmax = share([math.exp(x) for x in z])
    if name == "softmax":
        return softmax
    if name == "ssmax":                                     # [SSMax] eq. 2
        return share([n ** (s * x) for x in z])
    if name == "softmax-log512":                            # [GAU]
        return share([512 ** (x * math.log(n) / math.log(512) ** 2) for x in z])
    if name == "softmax1":                                  # [Softer-Max]
        return [math.exp(x) / (1 + sum(math.exp(y) for y in z)) for x in z]
    if name == "softmax-sink":                              # gpt-oss: one more logit, here the test's s
        return [math.exp(x) / (math.exp(s) + sum(math.exp(y) for y in z)) for x in z]
    if name == "softmax-floorlog+scale=floorlog:4":         # Llama 4
        return share([math.exp(x * (1 + 0.1 * math.log(1 + n // 4))) for x in z])
    if name == "softpick":                                  # arXiv 2504.20966, without its eps
        return [max(math.exp(x) - 1, 0) / sum(abs(math.exp(y) - 1) for y in z) for x in z]
    if name == "softmax+cap=1.5":                           # Gemma 2
        return share([math.exp(1.5 * math.tanh(x / 1.5)) for x in z])
    if name == "relu2-n":
        return [max(x, 0) ** 2 / n for x in z]
    if name == "relu2-T":
        return [max(x, 0) ** 2 / 9 for x in z]              # the test's T
    if name == "sigmoid":
        return [1 / (1 + math.exp(-x + math.log(16))) for x in z]
    if name == "relu-sqrt":
        return [max(x, 0) / math.sqrt(n / 2) for x in z]
    if name == "mish-l1":
        return share([x * math.tanh(math.log(1 + math.exp(x))) for x in z])
    if name == "gelu-l1":
        return share([x * 0.5 * math.erfc(-x / math.sqrt(2)) for x in z])
    if name == "softmax-recentered":
        return [x - mean(softmax) for x in softmax] if n > 3 else softmax
    if name == "softmax-recentered-l1":
        return share([x - mean(softmax) for x in softmax]) if n > 3 else softmax
    lssa = share([math.log(1 + math.exp(math.log(d) * math.log(n) * x)) for x in scores])     # [LSSA] eq. 4
    if name == "lssa":
        return lssa
    assert name == "lssar"                                  # eq. 5
    return share([max(a * n - (1 if n > 3 else 0), 0) ** 15 for a in lssa])


@pytest.mark.parametrize("name", ["softmax", "ssmax", "softmax-log512", "softmax1", "relu2-n", "relu2-T", "sigmoid",
                                  "relu-sqrt", "softmax-sink", "softmax-floorlog+scale=floorlog:4", "softpick",
                                  "softmax+cap=1.5", "mish-l1", "gelu-l1", "softmax-recentered",
                                  "softmax-recentered-l1", "lssa", "lssar"])
def test_papers_formulas(name):
    T, d, s = 9, 6, 0.7
    q, k, v = (random(1, 1, T, d, seed=seed, scale=1.5) for seed in range(3))
    out = attend(name, q, k, v, **dict.fromkeys(("s", "sink"), torch.tensor([s], dtype=torch.float64)))
    for i in range(T):
        a, b = q[0, 0, i], k[0, 0, :i + 1]
        if name.startswith("lssa"):
            a, b = a / a.norm(), b / b.norm(dim=1, keepdim=True)
        row = torch.tensor(row_by_loops(name, (b @ a).tolist(), d, s), dtype=torch.float64)
        assert (out[0, 0, i] - row @ v[0, 0, :i + 1]).abs().max() <= 1e-12, i


OVERRIDES = [*fixtures.OVERRIDES, "softmax+qk=l2", "softmax+offset=-logT", "softmax+norm=n2", "sigmoid+norm=T2",
             "softmax+scale=const:0.3", "softmax+scale=log:L", "relu2-l1+post=reweight:1", "ssmax-bias+fixed",
             "gelu-l1+norm=l1+2", "ssmax-bias+window=3+cap=1.5", "lssar+window=4", "softpick+cap=2"]


@pytest.mark.drawn(16)
@pytest.mark.parametrize("name", [*reference.PRESETS, *OVERRIDES])
def test_finite_differences(name):
    leaves = [random(1, 2, 6, 4, seed=seed, scale=1.2).requires_grad_() for seed in (3, 4, 5)]
    scalars = scalars_of(name, heads=2, L=8)
    function = lambda q, k, v, *rest: attend(name, q, k, v, L=8, **dict(zip(scalars, rest)))
    assert torch.autograd.gradcheck(function, (*leaves, *scalars.values()), eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("shape", [SMALL, SMALL_GAU], ids=["llama", "gau"])
@pytest.mark.parametrize("attn", ["softmax", "ssmax-bias", "ssmax-pn", "relu2-n", "lssar", "softmax-sink",
                                  "ssmax-pn+window=3+rope=50,softmax-sink+rope=none+cap=2"])
def test_whole_model_finite_differences(attn, shape):
    config = reference.Config(**shape, tied=True, attn=attn, L=16)
    weights = {name: fixtures.parameter(name, shape) for name, shape in reference.parameter_shapes(config).items()}
    tokens = fixtures.indices("tokens", 0, 8, config.vocab).view(1, 8)
    loss = lambda w: reference.cross_entropy(reference.forward(w, tokens[:, :-1], config), tokens[:, 1:]).item()
    grads = reference.gradients(weights, tokens[:, :-1], tokens[:, 1:], config)[2]
    for name, g in grads.items():
        direction, h = random(*g.shape, seed=1), 1e-6
        above, below = (loss({**weights, name: weights[name] + move}) for move in (h * direction, -h * direction))
        slope = (above - below) / (2 * h)
        assert abs(slope - (g * direction).sum().item()) <= 1e-7 + 1e-5 * abs(slope), name


# ---- The fixtures

ERROR_PROGRAM = r"""
#include <stdio.h>
#include "dev/reference/hash.h"
int main(void) {
    static float x[70000];
    float stored[FIXTURE_DIGEST];
    double digest[FIXTURE_DIGEST];
    fixture_fill(x, 70000, "x", 0, 0, 1);
    fixture_digest(digest, x, 70000);
    for (int i = 0; i < FIXTURE_DIGEST; i++) stored[i] = (float)digest[i];
    printf("%.17g ", fixture_error(stored, x, 70000, 0));
    for (int i = 0; i < 70000; i += 2) x[i] *= 1.001f;
    printf("%.17g ", fixture_error(stored, x, 70000, 0));
    printf("%.17g ", fixture_error(x, x + 1, 90, 0));
    x[69999] = NAN;
    printf("%.17g %.17g ", fixture_error(stored, x, 70000, 0), fixture_error(x + 69990, x + 69990, 10, 1));
    for (int i = 0; i < 300; i++) x[i] = 0;
    printf("%.17g %.17g ", fixture_error(x, x, 90, 0), fixture_error(x, x, 300, 0));
    printf("%.17g", fixture_error(x, x + 299, 2, 0));
}
"""


def test_errors_of_fixtures(tmp_path):
    """That the numbers of hash.h are those of fixtures.py, every case of test_gpt2 shows."""
    (tmp_path / "error.c").write_text(ERROR_PROGRAM)
    subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}", tmp_path / "error.c", "-o",
                    tmp_path / "error", "-lm"], check=True)
    result = subprocess.run([tmp_path / "error"], check=True, capture_output=True, text=True)
    found = map(float, result.stdout.split())
    same, half_changed, shifted, nan_digest, nan_whole, zeros, zero_digests, not_zero = found
    assert same < 1e-6
    assert 0.5e-3 < half_changed / math.sqrt(0.5) < 1.5e-3     # half of the elements are off by 1e-3
    assert shifted > 0.1 and nan_digest == nan_whole == math.inf
    assert zeros == zero_digests == 0 and not_zero == math.inf


def test_digest_estimates_the_error():
    x = fixtures.values("x", (96, 96)).numpy()
    for seed in range(20):
        error = 1e-3 * random(96 * 96, seed=seed).numpy()
        estimate = np.sqrt(np.mean((fixtures.digest(x.ravel() + error) - fixtures.digest(x.ravel()))[1:17] ** 2))
        assert 0.5 < estimate / np.linalg.norm(error) < 1.6
    turned = np.abs(fixtures.digest(x.ravel()) - fixtures.digest(x.T.ravel()))
    assert turned[0] < 1e-9 and turned[1:17].mean() > 0.5 * np.linalg.norm(x)


def test_stored_fixtures_match_the_reference():
    """Checks all of them; CI checks one case in eight, drawn by commit."""
    names = [case["case"] for case in fixtures.cases()]
    drawn = draw.sample(names, len(names) // 8) if os.environ.get("DRAW") else None
    assert fixtures.differences(fixtures.FOLDER, drawn) == []


def test_a_changed_fixture_is_named(tmp_path):
    for path in fixtures.FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = fixtures.load_file(tmp_path / "layers.safetensors")
    tensors["rope_T33_d48/dx"][3] *= 1.001
    tensors["matmul_N1_C48_OC97/out"][0] = np.nan
    tensors["extra/out"] = tensors.pop("swiglu_N88/out")
    fixtures.save_file(tensors, tmp_path / "layers.safetensors")
    found = "\n".join(fixtures.differences(tmp_path, ["rope_T33_d48", "matmul_N1_C48_OC97", "swiglu_N88", "swiglu_N1"]))
    for name in "rope_T33_d48/dx differs", "matmul_N1_C48_OC97/out differs", "extra/out", "swiglu_N88/out":
        assert name in found
    assert found.count("\n") == 3


def test_stored_fixtures_are_small_and_awkward_enough():
    assert sum(path.stat().st_size for path in fixtures.FOLDER.iterdir()) < 2_300_000
    kept = fixtures.load_file(fixtures.FOLDER / "models.safetensors")
    for tensors in kept, fixtures.load_file(fixtures.FOLDER / "layers.safetensors"):
        assert all(np.isfinite(x).all() for x in tensors.values())
    optimized = [case for case in fixtures.cases() if case["kind"] == "model" and case["steps"] != "0"]
    clipped = {case["case"]: (kept[case["case"] + "/grad_norms"] > float(case["clip"])).tolist() for case in optimized}
    assert all(len(steps) == 10 for steps in clipped.values())
    assert all(1 <= sum(steps) <= 9 for name, steps in clipped.items() if "tied_v" in name)
    for block in "llama", "gau":
        assert sum(1 <= sum(steps) <= 9 for name, steps in clipped.items() if name.endswith(f"_{block}_T33")) >= 8

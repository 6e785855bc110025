"""RoPE's frequencies, and cos and sin of its angles, against transformers' rotary embedding, for every scaling. What a
run records of its scaling, and what may change it."""
import json
import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import modeling_attn_gpt as modeling
from tiny import BUILD, run
from trainer import checkpoint, run_json, train

KEYS = {"linear": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        "yarn": ["factor", "original_max_position_embeddings"]}
CASES = [       # --rope-scaling, head size, theta, L, T
    ("none", 64, 10000, 1024, 4096),
    ("linear:4", 64, 10000, 1024, 4096),
    ("ntk", 64, 10000, 1024, 512),
    ("ntk", 64, 10000, 1024, 1025),
    ("ntk", 64, 500, 1024, 20480),
    ("ntk", 4, 10000, 7, 100),
    ("llama3:8:1:4:8192", 128, 500000, 131072, 16384),      # Llama 3.1
    ("llama3:32:1:4:8192", 64, 500000, 131072, 16384),      # Llama 3.2
    ("llama3:4:2:64:512", 32, 10000, 2048, 2048),
    ("yarn:4:32768", 128, 1000000, 131072, 16384),          # Qwen3
    ("yarn:16:4096", 128, 10000, 65536, 8192),
    ("yarn:4:1024", 64, 10000, 4096, 4096),
    ("yarn:1:1024", 64, 10000, 1024, 1024),
    ("yarn:8:5", 64, 10000, 40, 40),                        # no frequency turns once over the original length
    ("yarn:8:7", 64, 10000, 56, 56),
    ("yarn:8:100000", 8, 2, 4096, 4096),                    # every frequency turns 32 times
    ("yarn:2:64", 2, 10000, 128, 128),
]


def drawn(count):
    """Scalings with random numbers."""
    draw = random.Random(7)
    for _ in range(count):
        factor, original = round(2 ** draw.uniform(0, 6), 3), draw.randint(1, 40000)
        low = round(draw.uniform(0.1, 8), 3)
        high = round(low * draw.uniform(1.1, 9), 3)
        text = draw.choice(["ntk", f"linear:{factor}", f"yarn:{factor}:{original}",
                            f"llama3:{factor}:{low}:{high}:{original}"])
        yield (text, 2 * draw.randint(2, 80), round(10 ** draw.uniform(1, 6.5), 2), draw.randint(1, 5000),
               draw.randint(1, 5000))


@pytest.mark.parametrize("text, head, theta, L, T", [*CASES, *drawn(40)])
def test_frequencies_equal_transformers(text, head, theta, L, T):
    """Those of the programs and of the modeling file. transformers computes in float32, so its angles at position T are
    off by about T x 1e-7."""
    printed, _ = run(BUILD / "tests/test_rope", head, theta, L, T, text)
    (amplitude,), *ours = (np.array(line.split(), float) for line in printed.splitlines())
    name, *numbers = text.split(":")
    parameters = dict(zip(KEYS.get(name, []), (int(x) if x.isdigit() else float(x) for x in numbers)))
    parameters |= {"rope_type": {"none": "default", "ntk": "dynamic"}.get(name, name), "rope_theta": float(theta)}
    parameters |= {"factor": 1.0} if name == "ntk" else {}
    config = LlamaConfig(hidden_size=4 * head, num_attention_heads=4, head_dim=head, max_position_embeddings=L,
                         rope_parameters=parameters)
    rope = LlamaRotaryEmbedding(config)
    cos, sin = (x[0, -1, :head // 2].numpy() for x in rope(torch.zeros(1), torch.arange(T)[None]))
    assert amplitude == pytest.approx(rope.attention_scaling, rel=1e-12)
    np.testing.assert_allclose(ours[0], rope.inv_freq.numpy(), rtol=2e-6)
    np.testing.assert_allclose(ours[1:], [cos, sin], rtol=0, atol=2e-6 + 3e-7 * T)
    frequency, factor = modeling.rope_frequencies(parameters, head, L, torch.tensor([T]))
    assert factor == pytest.approx(rope.attention_scaling, rel=1e-12)
    np.testing.assert_allclose(frequency[0].numpy(), rope.inv_freq.numpy(), rtol=2e-6)


# ---------------------------------------------------------------- runs

def recorded(out, step):
    """The scaling in run.json and that in the checkpoint's config.json."""
    config = json.loads((checkpoint(out, step) / "config.json").read_text())
    rope = config["rope_parameters"]
    assert {**rope, "rope_theta": 10000} == {**config.get("rope_scaling", {"rope_type": "default"}),
                                             "rope_theta": 10000}
    return run_json(out)["arguments"]["rope-scaling"], rope["rope_type"], rope.get("factor")


def test_a_run_of_an_older_version(data, tmp_path):
    """Its run.json has no scaling."""
    out = tmp_path / "out"
    train(data, "--steps", 2, "--out", out)
    known = run_json(out)
    assert known["arguments"].pop("rope-scaling") == "none"
    (out / "run.json").write_text(json.dumps(known))
    message = train(data, "--resume", "--steps", 3, "--out", out, "--rope-scaling", "ntk", code=2)
    assert "--rope-scaling is ntk, but the checkpoint has none" in message
    train(data, "--resume", "--steps", 3, "--out", out, "--rope-scaling", "none")


def test_a_new_run_from_weights_keeps_or_replaces_their_scaling(data, tmp_path):
    for step in (1, 2):     # the same command again
        train(data, "--rope-scaling", "linear:2.0", "--steps", step, "--out", tmp_path / "first", "--resume")
    first = ["--init-from", checkpoint(tmp_path / "first", 2), "--steps", 1, "--seq-len", 8, "--batch", 4]
    for name, flags, found in (("kept", [], ("linear:2", "linear", 2)),
                               ("replaced", ["--rope-scaling", "ntk"], ("ntk", "dynamic", 1)),
                               ("none", ["--rope-scaling", "none"], ("none", "default", None))):
        train(data, *first, *flags, "--out", tmp_path / name, model=False)
        assert recorded(tmp_path / name, 1) == found


@pytest.mark.parametrize("flags, parts", [
    (["--rope-scaling", "ntk", "--model", "layers=1,heads=4,channels=8,ffn=24,vocab=97"],
     ["--rope-scaling ntk", "heads of size 2"]),
    (["--rope-scaling", "ntk", "--norm-length", 4, "--seq-len", "4,8"],
     ["--rope-scaling ntk", "beyond L = 4", "one --seq-len"]),
])
def test_scalings_that_no_run_can_have(flags, parts, data, tmp_path):
    message = train(data, *flags, "--steps", 1, "--out", tmp_path / "out", code=2)
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()

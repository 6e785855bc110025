"""RoPE's frequencies, and cos and sin of its angles, against transformers' rotary embedding, for every scaling."""
import os
import random
import subprocess

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"    # set before transformers is imported: no test contacts a hub
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trainer import ROOT, make

KEYS = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
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
        factor, original, low = round(2 ** draw.uniform(0, 6), 3), draw.randint(1, 40000), round(draw.uniform(0.1, 8), 3)
        high = round(low * draw.uniform(1.1, 9), 3)
        text = draw.choice(["ntk", f"linear:{factor}", f"yarn:{factor}:{original}", f"llama3:{factor}:{low}:{high}:{original}"])
        yield text, 2 * draw.randint(2, 80), round(10 ** draw.uniform(1, 6.5), 2), draw.randint(1, 5000), draw.randint(1, 5000)


@pytest.fixture(scope="session")
def program():
    make("-s", "build/tests/test_rope", check=True)
    return ROOT / "build/tests/test_rope"


@pytest.mark.parametrize("text, head, theta, L, T", [*CASES, *drawn(40)])
def test_frequencies_equal_transformers(program, text, head, theta, L, T):
    """transformers computes in float32, so its angles at position T are off by about T x 1e-7."""
    printed = subprocess.run([program, *map(str, (head, theta, L, T, text))], capture_output=True, text=True, check=True).stdout
    (amplitude,), *ours = (np.array(line.split(), float) for line in printed.splitlines())
    name, *numbers = text.split(":")
    parameters = dict(zip(KEYS.get(name, []), (int(x) if x.isdigit() else float(x) for x in numbers)))
    parameters |= {"rope_type": {"none": "default", "ntk": "dynamic"}.get(name, name), "rope_theta": float(theta)}
    parameters |= {"factor": 1.0} if name == "ntk" else {}
    config = LlamaConfig(hidden_size=4 * head, num_attention_heads=4, head_dim=head, max_position_embeddings=L, rope_parameters=parameters)
    rope = LlamaRotaryEmbedding(config)
    cos, sin = (x[0, -1, :head // 2].numpy() for x in rope(torch.zeros(1), torch.arange(T)[None]))
    assert amplitude == pytest.approx(rope.attention_scaling, rel=1e-12)
    np.testing.assert_allclose(ours[0], rope.inv_freq.numpy(), rtol=2e-6)
    np.testing.assert_allclose(ours[1:], [cos, sin], rtol=0, atol=2e-6 + 3e-7 * T)

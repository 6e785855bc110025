"""llama.cpp computes from the files of scripts/to_gguf.py what our programs compute: logits, greedy tokens, and the
tokens of a text.

    LLAMA_CPP=PYTHON python -m pytest dev/tests/test_llama_cpp.py

PYTHON is an interpreter that has llama-cpp-python 0.3.36; dev/notes/tests.md says how to install it.
"""
import json
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch

import tiny
from test_families import FAMILIES, random_model
from test_smollm2 import real, smollm2      # noqa: F401
from test_to_gguf import LINEAR, LLAMA3, YARN, convert, of_transformers, with_tokenizer
from test_tokenizer import AWKWARD, code, shakespeare
from tiny import VOCAB
from tokenizers import Tokenizer

DATA = tiny.write_data
VERSION, PYTHON = "0.3.36", os.environ.get("LLAMA_CPP", "")
# llama.cpp computes in float32, as we do, but in another order, and it multiplies RoPE's angles up from the first. It
# differs by up to 5e-6 of the largest logit; a wrong divisor or a permuted head, by more than 0.1.
TOLERANCE = 2e-5
SCALED = {f"{family}, {rope['rope_type']}": (family, rope)
          for family, ropes in {"llama": [LINEAR, YARN, LLAMA3], "qwen2": [LINEAR, YARN],
                                "qwen3": [LINEAR, YARN]}.items() for rope in ropes}
# Keys and values are stored in float32, not in float16, which is llama.cpp's default.
PROGRAM = """
import json, sys
import llama_cpp
import numpy as np
path, out, ids, count, texts = json.load(sys.stdin)
model = llama_cpp.Llama(path, n_ctx=256, n_batch=256, n_threads=2, logits_all=True, type_k=0, type_v=0, verbose=False)
model.eval(ids)
logits, greedy = [*model.scores[:len(ids)]], []
for _ in range(count):
    greedy.append(int(logits[-1].argmax()))
    model.eval(greedy[-1:])
    logits.append(model.scores[model.n_tokens - 1].copy())
np.save(out, np.array(logits, np.float32))
print(json.dumps([greedy, [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]]))
"""


@pytest.fixture(scope="module", autouse=True)
def installed():
    if not PYTHON:
        pytest.skip(f"LLAMA_CPP=PYTHON runs it, with llama-cpp-python {VERSION}")
    words = [PYTHON, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    found = subprocess.run(words, capture_output=True, text=True).stdout.strip() if shutil.which(PYTHON) else None
    if found != VERSION:
        pytest.skip(f"{PYTHON} has no llama-cpp-python {VERSION} (dev/notes/tests.md says how to install it)")


def ask(path, ids, count=0, texts=()):
    """(logits after each id and each greedy token, greedy tokens, ids of the texts)."""
    request = json.dumps([str(path), f"{path}.npy", ids, count, texts])
    result = subprocess.run([PYTHON, "-c", PROGRAM], input=request, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return np.load(f"{path}.npy").astype(np.float64), *json.loads(result.stdout.splitlines()[-1])


def compare(folder, path, ids, *flags, tolerance=TOLERANCE):
    """The prompt at once, and then 20 greedy tokens with the cache. We compute all in one pass, in which each token
    must be the most likely one after those before it."""
    convert(folder, path, *flags)
    theirs, greedy, _ = ask(path, ids, 20)
    ours = tiny.logits(folder, ids + greedy)
    largest = abs(ours).max()
    error = abs(theirs - ours).max() / largest
    print(f"logits up to {largest:.1f}, differences up to {error:.1e} of that")
    assert largest > 1 and error < tolerance
    assert ours[len(ids) - 1:-1].argmax(1).tolist() == greedy
    return error


def prompt():
    return torch.randint(VOCAB, (100,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, data, tmp_path):
    random_model(name, data, tmp_path / "model")
    compare(tmp_path / "model", tmp_path / "model.gguf", prompt())


@pytest.mark.parametrize("name", SCALED)
def test_scaled_rope(name, data, tmp_path):
    family, rope = SCALED[name]
    make = of_transformers(family, rope_parameters=rope, vocab_size=VOCAB, max_position_embeddings=128)
    compare(make(data, tmp_path / "model"), tmp_path / "model.gguf", prompt())


def test_half_precision(data, tmp_path):
    """Matrices in float16: llama.cpp rounds what they are multiplied with, too."""
    random_model("Llama 3.2", data, tmp_path / "model")
    assert compare(tmp_path / "model", tmp_path / "model.gguf", prompt(), "--dtype", "f16", tolerance=5e-3) > 1e-5


@real
def test_smollm2(smollm2, tmp_path):     # noqa: F811
    folder, _ = smollm2
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("The capital of France is Paris. In 1789, the French Revolution began with the storming of "
                           "the Bastille, and the king").ids
    compare(folder, tmp_path / "model.gguf", ids)


def ordinary(texts):
    """Without what llama.cpp splits in another way than `tokenizers`: doc/gguf.md names it."""
    return [text for text in texts if not text.startswith((" ", "▁")) and " " * 15 not in text and text.isascii()]


@pytest.mark.parametrize("name", ["own", "llama3", "qwen", "mistral", "mistral-first", "mistral-never"])
def test_tokens(name, data, tmp_path):
    folder = with_tokenizer(name, data, tmp_path / "model")
    works = "".join(shakespeare.works())
    texts = ordinary([*AWKWARD, *(works[i:i + 2000] for i in range(0, 200_000, 10_000)),
                      *(code()[i:i + 500] for i in range(0, 100_000, 1000))])
    assert len(texts) > 60
    convert(folder, tmp_path / "model.gguf")
    *_, found = ask(tmp_path / "model.gguf", [1, 2], texts=texts)
    known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known.encode_special_tokens = True
    for text, ids in zip(texts, found, strict=True):
        assert known.encode(text, add_special_tokens=False).ids == ids, text

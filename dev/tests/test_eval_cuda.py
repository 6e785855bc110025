"""eval_gpt2cu's source, run on the CPU, against eval_gpt2: the same eval.json for every task.

EVAL_GPT2CU names another build to test, which may be one for a GPU.
"""
import json

import numpy as np
import pytest

import tiny
from trainer import cuda_program

TASKS = {
    "loss": ["--seq-lens", "32,20", "--max-tokens", 320],
    "positions": ["--seq-lens", "48", "--max-tokens", 192, "--rope-scaling", "ntk"],
    "doc mask": ["--seq-lens", "32", "--max-tokens", 320, "--doc-mask"],
    "needle": ["--seq-lens", "110", "--samples", 2, "--depths", "10,80", "--max-new-tokens", 5],
    "attention": ["--seq-lens", "40", "--samples", 3],
    "scores": [],
    "choice": ["--seq-lens", "128"],
}
MODELS = {
    "ssmax-pn": (tiny.SHAPE + ",kv_heads=2", ["--attn", "ssmax-pn"], ["--pn-extrapolate", "log"]),
    "lssar": (tiny.SHAPE, ["--attn", "lssar"], []),
    "gau": (f"layers=1,block=gau,channels=32,vocab={tiny.VOCAB}", ["--attn", "relu2-L"], ["--attn", "softmax1"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function of a name in MODELS that returns the data and a trained model."""
    folder = tmp_path_factory.mktemp("eval")
    data = tiny.write_data(folder / "data")
    (folder / "questions.jsonl").write_text("".join(json.dumps(
        {"activity_label": "Cats", "ctx_a": "The cat", "ctx_b": "Sat on", "endings": ["the house.", "it", "[x] 日本語"], "label": i}) + "\n" for i in range(3)))
    made = {}

    def model(name):
        if name not in made:
            shape, flags, _ = MODELS[name]
            made[name] = tiny.train(data, folder / name, "--model", shape, *flags, steps=10)[0]
        return data, made[name], folder / "questions.jsonl"
    return model


def differences(a, b, path=""):
    """(the difference of two numbers relative to 1 or the number, where) for all numbers; all else must be equal."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        return [row for key in a for row in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list):
        assert len(a) == len(b), path
        return [row for i, (x, y) in enumerate(zip(a, b)) for row in differences(x, y, f"{path}/{i}")]
    if isinstance(a, (int, float)) and not isinstance(a, bool):
        return [(abs(a - b) / max(1, abs(a)), path)]
    assert a == b, path
    return []


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_same_results(task, name, models, tmp_path):
    cuda = cuda_program("eval_gpt2cu")
    data, folder, questions = models(name)
    flags = ["--model", folder, "--data", questions if task == "choice" else f"{data}/*_val_*.bin", "--task", {"doc mask": "loss"}.get(task, task),
             *TASKS[task], *MODELS[name][2], "--picture", 0]
    found = []
    for program, out in ((tiny.BIN / "eval_gpt2", tmp_path / "cpu"), (cuda, tmp_path / "cuda")):
        tiny.run(program, *flags, "--out", out)
        found.append(json.loads((out / "eval.json").read_text()))
        found[-1].pop("arguments")
    rows = differences(*found)
    assert len(rows) > (0 if task == "scores" and name != "ssmax-pn" else 5) and max(rows) < (1e-4,), max(rows)
    for path in (tmp_path / "cpu").glob("*.npy"):
        np.testing.assert_allclose(np.load(path), np.load(tmp_path / "cuda" / path.name), atol=1e-5)

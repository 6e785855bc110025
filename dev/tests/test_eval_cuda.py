"""eval_gpt2cu's source, run on the CPU, against eval_gpt2: the same eval.json for every task, in float32 and bf16.

EVAL_GPT2CU names another build to test, which may be one for a GPU. Like a machine with a GPU, this file needs no
library of Python but NumPy, tqdm and pytest.
"""
import json
import re
import shutil

import numpy as np
import pytest

import tiny
from byte_text import VOCAB, write_text
from trainer import cuda_program, write_shard

TASKS = {       # the task is the first word
    "loss": ["--seq-lens", "32,20", "--max-tokens", 320],
    "positions": ["--seq-lens", "48", "--max-tokens", 192, "--rope-scaling", "ntk"],
    "loss, doc mask": ["--seq-lens", "32", "--max-tokens", 320, "--doc-mask"],
    "positions, masked shards": ["--seq-lens", "48,20", "--max-tokens", 192, "--data", "{masked}/*_val_*.bin"],
    "loss, an example a row": ["--seq-lens", "48", "--max-tokens", 192, "--pack", "example"],
    "loss, two models": ["--seq-lens", "32,20", "--max-tokens", 320, "--model", "{model},{model}"],
    "needle": ["--seq-lens", "110", "--samples", 2, "--depths", "10,80", "--max-new-tokens", 5],
    "needle, squad": ["--seq-lens", "110", "--samples", 2, "--random-depth", "--chat", "squad", "--max-new-tokens", 3],
    "needle, chatml": ["--seq-lens", "110,90", "--samples", 1, "--depths", "50", "--chat", "chatml", "--system", "Hi.",
                       "--max-new-tokens", 3, "--rope-scaling", "ntk"],
    "attention": ["--seq-lens", "40", "--samples", 3],
    "attention, prompts": ["--prompt-file", "{prompts}"],
    "scores": [],
    "choice": ["--seq-lens", "128"],
}
SHAPE = f"layers=2,heads=4,channels=32,ffn=64,vocab={VOCAB}"
MODELS = {
    "ssmax-pn": (SHAPE + ",kv_heads=2", ["--attn", "ssmax-pn"], ["--pn-extrapolate", "log"]),
    "lssar": (SHAPE, ["--attn", "lssar"], []),
    "list": (SHAPE, [], ["--attn", "ssmax+window=9+rope=100,softmax-sink+cap=2+rope=none"]),
    "gau": (f"layers=1,block=gau,channels=32,vocab={VOCAB}", ["--attn", "relu2-L"], ["--attn", "softmax1"]),
}


def enlarge(folder, out):
    """A copy with random weights, so large that the results depend on every flag and on the normalizer, and with
    scalars that differ between heads."""
    shutil.copytree(folder, out)
    (out / "manifest.json").unlink()
    path, draw = out / "model.safetensors", np.random.default_rng(4)
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    for entry in header.values():
        first, last = (start + offset for offset in entry["data_offsets"])
        old = np.frombuffer(raw[first:last], "<f4").reshape(entry["shape"])
        new = draw.normal(size=old.shape)
        new = new / np.sqrt(old.shape[-1]) if old.ndim == 2 else old + 0.1 * new
        raw[first:last] = new.astype("<f4").tobytes()
    path.write_bytes(raw)
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function of a name in MODELS that returns a model with large weights and all files."""
    folder = tmp_path_factory.mktemp("eval")
    data = write_text(folder / "data")
    (folder / "questions.jsonl").write_text("".join(json.dumps(
        {"activity_label": "Cats", "ctx_a": "The cat" + " and the dog" * 9, "ctx_b": "Sat on", "label": i,
         "endings": ["the house.", "it", "[x] 日本語"]}) + "\n" for i in range(3)))
    (folder / "prompts").write_text("the cat sat on the mat\na dog\nnaïve café\n")
    masked = write_text(folder / "masked", seed=2)
    for shard in masked.glob("*.bin"):
        bits = np.random.default_rng(3).integers(0, 2, (shard.stat().st_size - 1024) // 2)
        write_shard(shard.with_suffix(".mask"), bits, magic=20240521)
    files = {"data": data, "questions": folder / "questions.jsonl", "prompts": folder / "prompts", "masked": masked}
    made = {}

    def model(name):
        if name not in made:
            shape, flags, _ = MODELS[name]
            small = tiny.train(data, folder / name, "--model", shape, *flags, steps=0)[0]
            made[name] = enlarge(small, folder / f"{name}-large")
        return files | {"model": made[name]}
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


# In bf16 the two round at different places, and are about as far from each other as each is from float32: 0.045 in the
# intercept of ln Z over a few tokens. That may change which token is the likeliest and the order of prompts, and the
# power of 15 of lssar magnifies it too much for a comparison.
CASES = [(name, dtype) for dtype in ("fp32", "bf16") for name in MODELS if (name, dtype) != ("lssar", "bf16")]
BOUNDS = {"fp32": 1e-4, "bf16": 0.1}
MADE = {"arguments", "program", "version", "commit"}
CHOICES = {"answer", "verdict", "right", "first_digit", "best_layer", "best_head", "spearman_sum_perplexity"}


def without(found, names):
    if isinstance(found, list):
        return [without(item, names) for item in found]
    return {key: without(value, names) for key, value in found.items() if key not in names} \
        if isinstance(found, dict) else found


def results_in(folder, names=frozenset()):
    """eval.json without what differs between programs and without these keys."""
    return without(json.loads((folder / "eval.json").read_text()), MADE | names)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name, dtype", CASES)
@pytest.mark.parametrize("task", TASKS)
def test_same_results(task, name, dtype, models, tmp_path):
    cuda = cuda_program("eval_gpt2cu")
    files, kind = models(name), task.split(",")[0]
    own = [word.format(**files) if isinstance(word, str) else word for word in TASKS[task]]
    source = files["questions"] if kind == "choice" else f"{files['data']}/*_val_*.bin"
    flags = ["--model", files["model"], *([] if "--prompt-file" in own or kind == "scores" else ["--data", source]),
             "--task", kind, *own, *MODELS[name][2], "--dtype", dtype, "--picture", 0]
    found, computed = [], []
    for program, out in ((tiny.BIN / "eval_gpt2", tmp_path / "cpu"), (cuda, tmp_path / "cuda")):
        _, errors = tiny.run(program, *flags, "--out", out)
        computed += [int(tokens.replace(",", "")) for tokens in re.findall(r"([\d,]+) tokens in", errors)]
        found.append(results_in(out, CHOICES if dtype == "bf16" else set()))
    rows = differences(*found)
    assert len(rows) > (0 if task == "scores" and name != "ssmax-pn" else 5)
    assert bool(computed) == (task != "scores")
    assert len(set(computed)) <= 1 or dtype == "bf16", "both share the same tokens"
    assert max(rows) < (BOUNDS[dtype],), max(rows)
    for path in (tmp_path / "cpu").glob("*.npy"):
        np.testing.assert_allclose(np.load(path), np.load(tmp_path / "cuda" / path.name), atol=BOUNDS[dtype])
    if dtype == "bf16" and task != "scores":
        tiny.run(tiny.BIN / "eval_gpt2", *flags, "--dtype", "fp32", "--out", tmp_path / "exact")
        exact = results_in(tmp_path / "exact", CHOICES)
        assert all(max(differences(exact, rounded)) > (BOUNDS["fp32"],) for rounded in found), "neither ignores bf16"


def test_all_zero_rows_of_each_length(models, tmp_path):
    """The share of attention's rows at a length, of all layers, heads and batches, the last of which is not full."""
    files, found = models("ssmax-pn"), []
    for program in (tiny.BIN / "eval_gpt2", cuda_program("eval_gpt2cu")):
        tiny.run(program, "--model", files["model"], "--data", f"{files['data']}/*_val_*.bin", "--attn", "relu-l1",
                 "--seq-lens", "20,32", "--max-tokens", 1088, "--picture", 0, "--out", tmp_path / "out")
        results = json.loads((tmp_path / "out/eval.json").read_text())["results"]
        found.append([row["all_zero_rows"] for row in results if row["attn"] == "relu-l1"])
    assert found[0] == found[1] and 0.5 < found[0][0] / found[0][1] / (32 / 20) < 2 and found[0][1] > 0.01, found


@pytest.mark.parametrize("task", ["needle", "attention"])
@pytest.mark.parametrize("attn", ["relu2-T", "relu2-n+norm=T2", "sigmoid+offset=-logT"])
def test_weights_depend_on_T(attn, task, models, tmp_path):
    """A needle's T is each row's own length so far, otherwise it is that of the sequence. Early rows of a model of two
    layers, with large weights, show it."""
    data, found = models("ssmax-pn")["data"], []
    model = tiny.train(data, tmp_path / "run", "--model", SHAPE + ",kv_heads=2", "--attn", attn, steps=0)[0]
    model = enlarge(model, tmp_path / "model")
    for program in (tiny.BIN / "eval_gpt2", cuda_program("eval_gpt2cu")):
        own = ["--seq-lens", 110, "--depths", 10, "--max-new-tokens", 3] if task == "needle" else ["--seq-lens", 20]
        tiny.run(program, "--model", model, "--data", f"{data}/*_val_*.bin", "--task", task, "--samples", 2,
                 *own, "--picture", 0, "--out", tmp_path / "out")
        found.append(results_in(tmp_path / "out")["results"])
    assert max(differences(*found)) < (1e-4,)


def test_a_needle_with_T_in_a_window_is_rejected(models, tmp_path):
    data = models("ssmax-pn")["data"]
    model = tiny.train(data, tmp_path / "run", "--model", SHAPE, "--attn", "relu2-T+window=16", steps=0)[0]
    _, errors = tiny.run(cuda_program("eval_gpt2cu"), "--model", model, "--data", f"{data}/*_val_*.bin", "--task",
                         "needle", "--seq-lens", 110, "--samples", 1, "--out", tmp_path / "out", code=2)
    assert "relu2-T+window=16 has a window and depends on each row's length" in errors


@pytest.mark.drawn(1)
@pytest.mark.parametrize("attn", ["ssmax", "relu2-T", "relu2-n+norm=T2", "sigmoid+offset=-logT"])
def test_prompts_of_one_haystack(attn, models, tmp_path):
    """A prompt that continues the one before has the results that it has alone, and those of eval_gpt2, also where
    weights depend on T: each row's own length so far."""
    data = models("ssmax-pn")["data"]
    model = tiny.train(data, tmp_path, "--model", f"layers=1,heads=1,channels=16,ffn=16,vocab={VOCAB}", "--attn", attn,
                       steps=1)[0]

    def needles(program, *depths):
        """The number of tokens computed, and the trials."""
        _, errors = tiny.run(program, "--model", model, "--data", f"{data}/*_val_*.bin", "--task", "needle",
                             "--samples", 1, "--seq-lens", 1150, "--depths", ",".join(map(str, depths)),
                             "--max-new-tokens", 3, "--picture", 0, "--out", tmp_path / "out")
        [row] = json.loads((tmp_path / "out/eval.json").read_text())["results"]
        return int(re.search(r"([\d,]+) tokens in", errors)[1].replace(",", "")), row["trials"]

    cuda = cuda_program("eval_gpt2cu")
    both, alone, reference = needles(cuda, 97, 99), needles(cuda, 99), needles(tiny.BIN / "eval_gpt2", 97, 99)
    assert both[0] == reference[0]
    assert max(differences(alone[1][0], both[1][1])) < (1e-5,)
    assert max(differences(reference[1], both[1])) < (1e-4,)

"""--attn with a list: normalizers, windows, caps and position rules that differ by layer, in training, resuming,
switching, evaluation and decoding. What the layers compute: test_gpt2 (against the reference) and test_gradients."""
import json
import sys

import numpy as np
import pytest

import tiny
from tiny import END_OF_TEXT, T
from trainer import ROOT, assert_same_run, metrics, run_json

DATA = tiny.write_data
LIST = "ssmax+window=5+rope=none,softmax-sink+cap=4"
# A row for each width of a window, from itself to more than the text; T = 32 here, and the text that is decoded has 70.
LISTS = [LIST, "softmax-recentered+window=1,relu2-L+rope=500", "ssmax-bias+window=2+rope=100,lssar+window=63+cap=9",
         "ssmax-pn+window=32,softmax+window=64", "softmax+window=65", "softmax+window=70,softmax+window=900+rope=none"]
SHAPES = {"llama": [], "gau": ["--model", f"layers=1,block=gau,channels=32,vocab={tiny.VOCAB}"]}


@pytest.mark.parametrize("attn", LISTS)
def test_decoding_equals_recomputing(data, tmp_path, attn):
    """dev/tests/logits.c compares one pass with the cache, for prompts of several lengths and with documents, too."""
    block = SHAPES["gau" if LISTS.index(attn) % 3 == 1 else "llama"]
    folder, printed = tiny.train(data, tmp_path / "out", "--attn", attn, *block, steps=2)
    assert "layers    " in printed
    ids = [END_OF_TEXT, *np.random.default_rng(1).integers(0, END_OF_TEXT, 69)]
    ids[30] = END_OF_TEXT
    whole = tiny.logits(folder, ids)
    assert np.isfinite(whole).all()
    tiny.logits(folder, ids, "documents")
    if attn == LIST:    # a window of 5 in one of two layers, and none in the other
        assert abs(whole - tiny.logits(folder, [END_OF_TEXT, *ids[2:], 0])[:70]).max() > 1e-3


def test_resuming_has_the_same_bits(data, tmp_path):
    tiny.train(data, tmp_path / "whole", "--attn", LIST, "--ckpt-every", 2, steps=4)
    tiny.train(data, tmp_path / "parts", "--attn", LIST, steps=2)
    same = "1*" + LIST.replace("=5", "=05").replace("=4", "=4.0")
    tiny.train(data, tmp_path / "parts", "--resume", "--attn", f"{same},{same}", steps=4)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 4)
    _, printed = tiny.train(data, tmp_path / "parts", "--resume", "--attn", "softmax", steps=5, code=2)
    assert "--attn-switch" in printed


def test_switching_between_lists(data, tmp_path):
    """Layers are compared one by one: the first keeps its s, the second gets one; a name for all is a list, too."""
    before, after = "ssmax,softmax", "ssmax+window=4,ssmax-bias+rope=none"
    folder, printed = tiny.train(data, tmp_path / "out", "--attn", before, "--attn-switch", f"2:{after}", steps=3)
    assert "new parameters: model.layers.1.self_attn.attn_scale" in printed, printed
    assert "layers.0.self_attn.attn_scale" not in printed and "0..1" not in printed, printed
    tiny.train(data, tmp_path / "parts", "--attn", before, "--attn-switch", f"2:{after}", steps=2)
    tiny.train(data, tmp_path / "parts", "--resume", steps=3)
    assert_same_run(tmp_path / "out", tmp_path / "parts", 3)
    _, printed = tiny.train(data, tmp_path / "same", "--init-from", folder, "--attn", f"{after},{after}", steps=1)
    assert "switched" not in printed and "unused: ssmax+window=4, ssmax-bias+rope=none" in printed, printed
    _, printed = tiny.train(data, tmp_path / "one", "--init-from", folder, "--attn", "ssmax-bias", steps=1)
    assert f"switched --attn {after} to ssmax-bias" in printed, printed
    assert "new parameters: model.layers.0.self_attn.attn_bias, 0.0000" in printed, printed


def test_evaluation(data, tmp_path):
    """Every task runs under a list and under another one; beyond L, p_n suffices where the window is no wider."""
    folder, _ = tiny.train(data, tmp_path / "out", "--attn", "ssmax-pn+window=32,softmax", steps=2)
    val = ["--data", f"{data}/*_val_*.bin", "--picture", 0]

    def evaluate(name, *words, code=0):
        _, errors = tiny.run(tiny.BIN / "eval_gpt2", "--model", folder, "--out", tmp_path / name, *words, code=code)
        return json.loads((tmp_path / name / "eval.json").read_text()) if code == 0 else errors
    losses = evaluate("loss", *val, "--task", "positions", "--seq-lens", "32,64", "--attn", LIST)
    assert len(losses["results"]) == 4
    errors = evaluate("beyond", *val, "--seq-lens", 64, "--attn", "softmax,ssmax-pn", code=2)
    assert "softmax,ssmax-pn has p_n" in errors
    attention = evaluate("attention", *val, "--task", "attention", "--seq-lens", 32, "--samples", 1, "--attn", LIST)
    assert attention["results"]
    needle = evaluate("needle", *val, "--task", "needle", "--seq-lens", 100, "--samples", 2, "--depths", "0,50",
                      "--attn", LIST)
    assert needle["results"]
    evaluate("scores", "--task", "scores", "--attn", LIST)


def test_samples_of_long_prompts(data, tmp_path):
    """The ninth text is the third of its prompt, and copies the cache of a text whose window has moved beyond it."""
    folder, _ = tiny.train(data, tmp_path / "out", "--attn", "softmax+window=5", steps=2)
    prompts = [word + 1010 * "," for word in ("a", "e", "o")]
    (tmp_path / "prompts").write_text("\n".join(prompts))
    flags = ["--num-samples", 3, "--max-new-tokens", 40]
    together, errors = tiny.sample(folder, "--prompt-file", tmp_path / "prompts", *flags)
    assert "read 3,033 tokens" in errors        # 40 more do not fit in a cache of 1,024 + 4
    assert together == [text for prompt in prompts for text in tiny.sample(folder, "--prompt", prompt, *flags)[0]]


def test_a_window_of_one_name_changes_the_loss(data, tmp_path):
    for name, attn in (("full", "softmax"), ("wide", "softmax+window=32"), ("one", "softmax+window=1")):
        tiny.train(data, tmp_path / name, "--attn", attn, steps=2)
    full, wide, one = (metrics(tmp_path / name, ["loss"]) for name in ("full", "wide", "one"))
    assert full == wide and full[0] != one[0]
    assert run_json(tmp_path / "wide")["arguments"]["attn"] == "softmax+window=32"


def test_reports(data, tmp_path):
    """A scalar that only some layers have is null for the others, and plots skip it; maps count visible keys only."""
    folder, _ = tiny.train(data, tmp_path / "out", "--attn", "softmax,ssmax+window=2", "--val-every", 2, steps=2)
    last = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[-1])
    assert last["attn_scale"][0] == [None] * 3 and all(last["attn_scale"][1])
    tiny.run(sys.executable, ROOT / "scripts/plot.py", "--scalars", tmp_path / "out", "--out", tmp_path / "plot.png")
    tiny.run(tiny.BIN / "eval_gpt2", "--model", folder, "--out", tmp_path / "eval", "--task", "attention",
             "--data", f"{data}/*_val_*.bin", "--samples", 1, "--picture", 0)
    maps = np.load(tmp_path / "eval/map-0.npy")
    assert np.array_equal(maps[1] > 0, np.broadcast_to(np.tri(T) - np.tri(T, k=-2) > 0, maps[1].shape))
    layers = json.loads((tmp_path / "eval/eval.json").read_text())["results"][0]["layers"]
    assert all(head["zeros"] == 0 for layer in layers for head in layer["heads"]), layers[1]["heads"]

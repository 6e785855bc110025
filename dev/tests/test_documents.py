"""--doc-mask: attention stops at document boundaries, on the CPU in training, evaluation and decoding."""
import json

import numpy as np
import pytest

import tiny
from tiny import END_OF_TEXT, T
from trainer import EXACT, assert_same_run, metrics

FIRST, SECOND = [END_OF_TEXT, 20, 31, 5, 77, 140], [END_OF_TEXT, 9, 41, 260, 8, 133, 90, 55]


DATA = tiny.write_data


@pytest.fixture(scope="module", params=("ssmax", "softmax-recentered", "lssar", "softmax-sink", "ssmax-pn"))
def model(request, data, tmp_path_factory):
    return tiny.train(data, tmp_path_factory.mktemp("run") / "out", "--attn", request.param, "--doc-mask")[0]


def test_a_document_gives_the_same_logits_alone(model):
    """In one pass and with the cache, which dev/tests/logits.c compares. Alone, a document has other positions, so
    RoPE's angles differ, which changes scores only by rounding."""
    packed = tiny.logits(model, FIRST + SECOND, "documents")
    np.testing.assert_allclose(packed[:len(FIRST)], tiny.logits(model, FIRST), atol=1e-4)
    np.testing.assert_allclose(packed[len(FIRST):], tiny.logits(model, SECOND), atol=2e-3)
    unmasked = tiny.logits(model, FIRST + SECOND)
    assert abs(packed[len(FIRST):] - unmasked[len(FIRST):]).max() > 0.1


def test_a_single_document_has_the_same_bits_without_the_flag(data, tmp_path):
    """Without an end-of-text token inside the rows the flag changes nothing."""
    text = np.random.default_rng(1).integers(0, END_OF_TEXT, 20 * T + 1)
    tiny.write_shard(tmp_path / "one_train_000001.bin", text)
    for name, flags in ("with", ["--doc-mask"]), ("without", []):
        tiny.train(data, tmp_path / name, "--train-data", tmp_path / "one_train_*.bin",
                   "--val-data", tmp_path / "one_train_*.bin", "--attn", "ssmax-bias", *flags, steps=4)
    assert_same_run(tmp_path / "with", tmp_path / "without", 4)


def test_training_and_evaluation(data, tmp_path):
    """The flag changes the loss, is part of the run, and exists in eval_gpt2 as well."""
    folder, _ = tiny.train(data, tmp_path / "masked", "--doc-mask", "--val-every", 25)
    tiny.train(data, tmp_path / "open", "--val-every", 25)
    masked, other = (metrics(tmp_path / name, EXACT) for name in ("masked", "open"))
    assert masked[0] != other[0] and masked[-1] != other[-1]
    assert json.loads((tmp_path / "masked/run.json").read_text())["arguments"]["doc-mask"] is True
    _, printed = tiny.train(data, tmp_path / "open", "--doc-mask", "--resume", steps=30, code=2)
    assert "doc-mask" in printed
    found = {}
    for name, flags in ("masked", ["--doc-mask"]), ("open", []):
        tiny.run(tiny.BIN / "eval_gpt2", "--model", folder, "--data", f"{data}/*_val_*.bin", "--seq-lens", T,
                 "--picture", 0, "--out", tmp_path / f"eval-{name}", *flags)
        found[name] = json.loads((tmp_path / f"eval-{name}/eval.json").read_text())
    assert found["masked"] != found["open"]

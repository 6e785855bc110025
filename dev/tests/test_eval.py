"""eval_gpt2: its losses against those of the trainer and the reference; changes of normalizer; lengths beyond the
training length; masks; eval.json; messages."""
import json
import math
import shutil
import subprocess
import time
from functools import partial

import numpy as np
import pytest
import torch

import eval_models
from eval_models import SHAPES, reference, with_weights
from tiny import BIN, run
from trainer import MODEL, VOCAB, checkpoint, make_data, metrics, saving_and_pruning, train, write_shard

DATA = partial(make_data, val=1000)
L = 8
BLOCKS = ("llama", "gau")
ENTROPY = L / math.lgamma(L + 1)        # where s starts: 1/mean(ln n)


def model_flag(block, tied=1):
    keys = SHAPES[block] | dict(vocab=VOCAB, tied=tied)
    return ",".join(f"{key}={value}" for key, value in keys.items())


@pytest.fixture(scope="module")
def checkpoints(data, tmp_path_factory):
    """A function of the trainer's flags that returns a run's folder; it trains once for the same flags."""
    made, root = {}, tmp_path_factory.mktemp("runs")

    def make(*flags, steps=10):
        key = (*flags, steps)
        if key not in made:
            made[key] = root / f"run{len(made)}"
            train(data, "--val-data", f"{data}/*_val_*.bin", "--val-every", 5, "--lr", 0.03, *flags, "--steps", steps,
                  "--out", made[key])
        return made[key]
    return make


def evaluate(folder, data, out, *flags, code=0):
    """Like eval_models.evaluate(), but merges the keys of the only model into eval.json's."""
    found = eval_models.evaluate("loss", folder, data, out, *flags, code=code)
    if code:
        return found
    [model] = found[1].pop("models")
    return found[0], model | found[1]


def losses(result, attn=None):
    return [row["loss"] for row in result["results"] if attn in (None, row["attn"])]


# ---------------------------------------------------------------- the trainer's validation loss

TRAINED = {
    "softmax": [],
    "untied": ["--model", model_flag("llama", tied=0)],
    "ssmax-pn": ["--attn", "ssmax-pn"],
    "lssar": ["--attn", "lssar"],
    "relu2-T": ["--attn", "relu2-T"],
    "theta": ["--rope-theta", 50],
    "yarn": ["--rope-scaling", "yarn:4:16"],
    "gau": ["--model", model_flag("gau"), "--attn", "relu2-L"],
    "few tokens": ["--val-tokens", 333],
}


@pytest.mark.parametrize("name", TRAINED)
def test_losses_equal_the_trainers(name, checkpoints, data, tmp_path):
    """The trainer uses batches of 4 and keeps all layers' activations; eval_gpt2 uses batches of 128 and keeps one
    layer's."""
    run = checkpoints(*TRAINED[name])
    most = ["--max-tokens", 333] if name == "few tokens" else []
    output, result = evaluate(run, data, tmp_path, *most)
    [row] = result["results"]
    trained = metrics(run, ["val_loss"])
    assert abs(row["loss"] - trained[-1][0]) < 1e-6 and abs(trained[4][0] - trained[-1][0]) > 1e-3
    assert (row["perplexity"] == pytest.approx(math.exp(row["loss"])) and row["seq_len"] == L
            and f"{row['loss']:.4f}" in output)
    assert (row["tokens"], row["sequences"]) == ((328, 41) if most else (992, 124))
    assert "lineage" not in result and result["checkpoint"].endswith("ckpt/step-00000010")


def test_masked_tokens_do_not_count(checkpoints, data, tmp_path):
    """The trainer reports a loss per sequence; eval.json has that and the loss per token."""
    folder = tmp_path / "masked"
    folder.mkdir()
    for name in ("train_000001", "val_000000"):
        shutil.copy(data / f"d_{name}.bin", folder)
        count = (folder / f"d_{name}.bin").stat().st_size // 2 - 512
        bits = np.random.default_rng(3).integers(0, 2, count)
        bits[L::L] = 0                                  # the last target of each window
        write_shard(folder / f"d_{name}.mask", bits, magic=20240521)
    train(folder, "--val-data", f"{folder}/*_val_*.bin", "--val-every", 5, "--steps", 5, "--out", tmp_path / "run")
    output, result = evaluate(tmp_path / "run", folder, tmp_path, "--task", "positions", "--seq-lens", f"{L},{2 * L}")
    row = result["results"][0]
    assert abs(row["loss_per_sequence"] - metrics(tmp_path / "run", ["val_loss"])[-1][0]) < 1e-5
    assert row["tokens"] == bits[1:1 + 124 * L].sum() and "per sequence" in output
    assert row["loss"] * row["tokens"] == pytest.approx(row["loss_per_sequence"] * row["sequences"])
    assert row["loss_by_position"][-1] is None and None not in row["loss_by_position"][:-1]


@pytest.mark.parametrize("T", [L, 24])
def test_losses_of_one_example_a_row_equal_the_trainers(T, checkpoints, data, tmp_path):
    """Documents of 2 to 19 tokens: some are longer than T + 1 tokens, the others are padded."""
    folder = tmp_path / "documents"
    folder.mkdir()
    draw = np.random.default_rng(5)
    for name, count in (("train", 60), ("val", 40)):
        documents = [[VOCAB - 1, *draw.integers(0, VOCAB - 1, size)] for size in draw.integers(1, 19, count)]
        write_shard(folder / f"d_{name}_000000.bin", np.concatenate(documents))
    flags = ["--val-data", f"{folder}/*_val_*.bin", "--val-every", 2, "--pack", "example", "--seq-len", T]
    train(folder, *flags, "--steps", 2, "--out", tmp_path / "run")
    _, result = evaluate(tmp_path / "run", folder, tmp_path / "out", "--pack", "example")
    [row] = result["results"]
    assert row["sequences"] == 40
    assert abs(row["loss_per_sequence"] - metrics(tmp_path / "run", ["val_loss"])[-1][0]) < 1e-5
    _, stream = evaluate(tmp_path / "run", folder, tmp_path / "out")
    assert "loss_per_sequence" not in stream["results"][0]
    assert abs(stream["results"][0]["loss"] - row["loss"]) > 1e-3


# ---------------------------------------------------------------- the reference

@pytest.fixture(scope="module")
def softmax(model_of):
    return {block: model_of(block, "softmax") for block in BLOCKS}


def reference_losses(tensors, config, data, T):
    """The mean loss at each position (T)."""
    stream = torch.from_numpy(np.fromfile(data / "d_val_000000.bin", "<u2", offset=1024).astype(np.int64))
    count = (len(stream) - 1) // T
    inputs, targets = (stream[start:start + count * T].view(count, T) for start in (0, 1))
    logits = reference.forward(tensors, inputs, config).transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none").mean(0).numpy()


def near(found, expected):
    assert np.max(np.abs(np.asarray(found, float) - expected)) <= 1e-5 * np.max(expected), (found, expected)


def under(tensors, config, attn):
    """The reference under another normalizer, with its scalars at their initial values."""
    changed = reference.replace(config, attn=attn)
    starts = {scalar.tensor: scalar.start(changed.normalizer, L) for scalar in reference.SCALARS.values()}
    new = {name: torch.full(shape, starts[name.rpartition(".")[2]]).double()
           for name, shape in reference.parameter_shapes(changed).items() if name not in tensors}
    return tensors | new, changed


@pytest.mark.drawn(20)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("attn", [*reference.PRESETS, "softmax+post=reweight:3", "sigmoid-logn-l1+post=reweight:15"])
def test_losses_under_another_normalizer_equal_the_references(block, attn, softmax, data, tmp_path):
    """From softmax to every normalizer, without training: the loss before and after, at L and (except for p_n)
    beyond."""
    folder, tensors, config = softmax[block]
    lengths = [L] if attn == "ssmax-pn" else [L, 20]
    _, result = evaluate(folder, data, tmp_path, "--attn", attn, "--seq-lens", ",".join(map(str, lengths)),
                         "--task", "positions")
    expected = [reference_losses(*model, data, T) for model in ((tensors, config), under(tensors, config, attn))
                for T in lengths]
    if attn == "softmax":
        del expected[len(lengths):]
    assert len(result["results"]) == len(expected) and ("lineage" in result) == (attn != "softmax")
    for row, positions in zip(result["results"], expected):
        near(row["loss_by_position"], positions)
        near(row["loss"], positions.mean())
    if attn == "softmax":
        return
    softly = ("ssmax-pn", "softmax-floorlog")       # equal softmax: by their scalars' initial values; below n = 8192
    assert attn in softly or np.abs(expected[-1] - expected[len(lengths) - 1]).max() > 1e-3
    [entry] = result["lineage"]
    assert (entry["from"], entry["attn"], entry["seq_lens"]) == ("softmax", attn, lengths)
    assert entry["val_loss_before"] == losses(result, "softmax") and entry["val_loss_after"] == losses(result, attn)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("attn", ["ssmax", "ssmax-bias", "ssmax-pn", "softmax1", "softmax-sink", "softpick", "sigmoid",
                                  "lssar"])
def test_losses_by_position_equal_the_references(block, attn, model_of, data, tmp_path):
    """Uses the checkpoint's learned scalars. eval.json has the loss at each position, and the table has it by
    ranges."""
    folder, tensors, config = model_of(block, attn)
    lengths = [L, 5] if attn == "ssmax-pn" else [L, 20]
    output, result = evaluate(folder, data, tmp_path, "--task", "positions", "--seq-lens", ",".join(map(str, lengths)))
    table = output[output.index("loss by position"):].splitlines()
    assert table[1].split() == [str(T) for T in lengths]
    for T, row in zip(lengths, result["results"]):
        expected = reference_losses(tensors, config, data, T)
        near(row["loss_by_position"], expected)
        near(row["loss"], expected.mean())
        for line in table[2:]:
            first, last = map(int, line.split()[0].split("-"))
            cells = dict(zip([length for length in lengths if first <= length], line.split()[1:], strict=True))
            if first <= T:
                assert abs(float(cells[T]) - expected[first - 1:min(last, T)].mean()) < 1e-3
    assert [line.split()[0] for line in table[2:]] == ["1-1", "2-2", "3-4", "5-8"] + ["9-16", "17-20"] * (20 in lengths)


def test_a_learned_s_is_kept(model_of, data, tmp_path):
    """A start for s changes nothing then, and a warning says so."""
    folder = model_of("llama", "ssmax")[0]
    for attn, warned in (("ssmax+s=2", True), ("ssmax+s=2+fixed", False)):
        output, errors = run(BIN / "eval_gpt2", "--model", folder, "--data", f"{data}/*_val_*.bin", "--seq-lens", L,
                             "--attn", attn)
        assert (f"--attn {attn}: the model keeps the s that it has" in errors) == warned
        assert ("without training" in output) == (not warned)


# ---------------------------------------------------------------- a change of normalizer

STARTS = [("softmax", "ssmax", {"attn_scale": ENTROPY}), ("softmax", "ssmax+s=0.3", {"attn_scale": 0.3}),
          ("softmax", "ssmax-bias", {"attn_scale": ENTROPY, "attn_bias": 0}),
          ("softmax", "ssmax-pn", {"attn_scale": 1, "attn_bias": 0, "attn_pn": 1}), ("ssmax", "softmax", {}),
          ("ssmax", "ssmax-bias", {"attn_bias": 0}), ("ssmax", "ssmax-fixed", {"attn_scale": 1}),
          ("ssmax", "ssmax+post=reweight:3", {}), ("ssmax-pn", "ssmax", {"attn_scale": ENTROPY}),
          ("softmax", "softmax-sink", {"attn_sink": 0})]


@pytest.mark.parametrize("own, given, starts", STARTS)
def test_losses_around_a_switch_equal_the_trainers(own, given, starts, checkpoints, data, tmp_path):
    """The trainer's --init-from --attn measures the same losses just before and just after the switch."""
    first = checkpoints("--attn", own)
    there = checkpoints("--init-from", checkpoint(first, 10), "--attn", given, "--model", MODEL, steps=0)
    output, result = evaluate(first, data, tmp_path, "--attn", given)
    [entry], [_, trainers] = result["lineage"], json.loads((there / "run.json").read_text())["lineage"]
    assert (entry["from"], entry["attn"]) == (own, given) == (trainers["from"], trainers["attn"])
    for key in ("val_loss_before", "val_loss_after"):
        assert abs(entry[key][0] - float(trainers[key])) < 1.1e-6
    assert entry["started"] == pytest.approx(starts) and entry["started"].keys() == starts.keys()
    assert all(f"{name} starts at {value:.6g}" in output for name, value in starts.items())
    assert f"{entry['val_loss_after'][0] - entry['val_loss_before'][0]:+.4f}" in output


def test_another_name_for_the_same_normalizer_is_no_change(checkpoints, data, tmp_path):
    _, result = evaluate(checkpoints("--attn", "softmax1"), data, tmp_path, "--attn", "softmax+norm=l1+1")
    assert len(result["results"]) == 1 and "lineage" not in result


# ---------------------------------------------------------------- p_n and RoPE

@pytest.mark.parametrize("block", BLOCKS)
def test_pn_beyond_its_length_follows_the_fit(block, model_of, data, tmp_path):
    """There is no learned p_n beyond L: such lengths are rejected, unless the fit replaces p_n for all n and all
    lengths."""
    folder, tensors, config = model_of(block, "ssmax-pn")
    errors = evaluate(folder, data, tmp_path, "--seq-lens", f"{L},{L + 1}", code=2)
    assert f"up to L = {L}" in errors and f"asks for {L + 1}" in errors and "--pn-extrapolate log" in errors
    output, result = evaluate(folder, data, tmp_path, "--seq-lens", f"{L},{4 * L}", "--pn-extrapolate", "log")
    p, ln = tensors["model.attn_pn"].numpy(), np.log(np.arange(1, 4 * L + 1))
    a1, a2 = np.polyfit(ln[:L], p, 1)
    r2 = np.corrcoef(ln[:L], p)[0, 1] ** 2
    assert result["pn_fit"] == pytest.approx({"a1": a1, "a2": a2, "r2": r2}, rel=1e-6)
    assert f"{a1:.6g} ln(n) + {a2:.6g} for all n" in output and f"R^2 = {r2:.6f}" in output
    fitted = tensors | {"model.attn_pn": torch.from_numpy(a1 * ln + a2)}
    for T, loss in zip((L, 4 * L), losses(result)):
        near(loss, reference_losses(fitted, reference.replace(config, L=4 * L), data, T).mean())
    near(losses(evaluate(folder, data, tmp_path)[1]), [reference_losses(tensors, config, data, L).mean()])


def test_pn_extrapolate_without_pn_has_no_effect(softmax, data):
    words = ["--model", softmax["llama"][0], "--data", f"{data}/*_val_*.bin", "--seq-lens", L]
    assert ("--pn-extrapolate log has no effect: softmax has no p_n."
            in run(BIN / "eval_gpt2", *words, "--pn-extrapolate", "log")[1])
    assert "no effect" not in run(BIN / "eval_gpt2", *words)[1]


def test_pn_after_a_change_of_normalizer(softmax, model_of, data, tmp_path):
    """p_n starts at 1; a constant has a fit but no R^2. If the checkpoint has p_n, both normalizers use its fit."""
    folder, tensors, config = softmax["llama"]
    assert "ssmax-pn" in evaluate(folder, data, tmp_path, "--attn", "ssmax-pn", "--seq-lens", 2 * L, code=2)
    output, result = evaluate(folder, data, tmp_path, "--attn", "ssmax-pn", "--seq-lens", 2 * L,
                              "--pn-extrapolate", "log")
    assert result["pn_fit"] == {"a1": 0, "a2": 1, "r2": None} and "undefined" in output
    near(losses(result)[0], losses(result)[1])                      # s p_n + b = 1: softmax
    folder, *_ = model_of("llama", "ssmax-pn")
    output, result = evaluate(folder, data, tmp_path, "--attn", "ssmax-pn+norm=l1+1", "--seq-lens", 2 * L,
                              "--pn-extrapolate", "log")
    assert output.count("p_n =") == 1 and result["lineage"][0]["started"] == {}
    evaluate(folder, data, tmp_path, "--attn", "softmax", "--seq-lens", 2 * L, code=2)


@pytest.mark.parametrize("block, d", [("llama", 8), ("gau", 128)])
def test_theta(block, d, softmax, data, tmp_path, monkeypatch):
    """--rope-theta replaces the checkpoint's theta, also under ntk, which uses theta (T/L)^(d/(d-2)) beyond L."""
    folder, tensors, config = softmax[block]
    output, _ = evaluate(folder, data, tmp_path, "--seq-lens", 4 * L, "--rope-theta", 500000)
    assert "RoPE's theta is 500 k at every length" in output
    for scaling, factor in (("none", 1), ("ntk", 4 ** (d / (d - 2)))):
        _, result = evaluate(folder, data, tmp_path, "--rope-theta", 100, "--rope-scaling", scaling,
                             "--seq-lens", f"{L // 2},{4 * L}")
        thetas = [100, 100 * factor]
        assert [row["rope_theta"] for row in result["results"]] == pytest.approx(thetas)
        for T, theta, loss in zip((L // 2, 4 * L), thetas, losses(result)):
            monkeypatch.setattr(reference, "THETA", theta)
            near(loss, reference_losses(tensors, config, data, T).mean())


@pytest.mark.parametrize("scaling", ["linear:2.5", "ntk", "llama3:4:0.5:4:64", "yarn:4:64"])
@pytest.mark.parametrize("block", BLOCKS)
def test_rope_scalings(block, scaling, softmax, data, tmp_path):
    """Losses under --rope-scaling equal the reference's."""
    folder, tensors, config = softmax[block]
    lengths = ["--seq-lens", f"{L // 2},{4 * L}"]
    plain = losses(evaluate(folder, data, tmp_path, *lengths)[1])
    _, result = evaluate(folder, data, tmp_path, *lengths, "--rope-scaling", scaling)
    for T, loss, other in zip((L // 2, 4 * L), losses(result), plain):
        near(loss, reference_losses(tensors, reference.replace(config, rope_scaling=scaling), data, T).mean())
        assert (loss == other) == (scaling == "ntk" and T < L)


def test_the_checkpoints_rope_scaling(softmax, data, tmp_path):
    """A scaling in config.json gives the same losses as the flag, and the flag overrides it."""
    plain = softmax["llama"][0]
    own = shutil.copytree(plain, tmp_path / "own")
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000}}
    (own / "config.json").write_text(json.dumps(json.loads((own / "config.json").read_text()) | scaled))
    found = [losses(evaluate(folder, data, tmp_path, *flags)[1]) for folder, flags in (
        (own, []), (plain, ["--rope-scaling", "linear:2.5"]), (plain, []), (own, ["--rope-scaling", "none"]))]
    assert found[0] == found[1] != found[2] == found[3]


# ---------------------------------------------------------------- what is printed and written

def test_without_out_nothing_is_written(checkpoints, data, tmp_path):
    output, errors = run(BIN / "eval_gpt2", "--model", checkpoints(), "--data", f"{data}/*_val_*.bin")
    assert "perplexity" in output and "tokens/s" in errors and errors.count("\n") == 1
    again, result = evaluate(checkpoints(), data, tmp_path / "deep/out", "--max-tokens", 5000, "--task", "positions")
    assert again.startswith(output) and "loss by position" in again
    assert [path.name for path in (tmp_path / "deep/out").iterdir()] == ["eval.json"]
    assert (result["arguments"]["max-tokens"] == 5000 and result["arguments"]["task"] == "positions"
            and result["trained_seq_len"] == L)
    assert "depths" not in result["arguments"] and "max-tokens" in result["arguments"]
    assert result["program"] == "eval_gpt2" and result["version"] and result["commit"]
    assert result["data"]["tokens"] == 1000 and len(result["data"]["xxh3"]) == 16


def test_all_zero_rows_are_reported(softmax, data, tmp_path):
    flags = ["--attn", "relu-l1", "--seq-lens"]
    output, result = evaluate(softmax["llama"][0], data, tmp_path, *flags, f"0,{2 * L}")
    assert [row["seq_len"] for row in result["results"]] == 2 * [L, 2 * L] and "up to 2 L; L stays 8" in output
    shares = [row["all_zero_rows"] for row in result["results"]]
    assert shares[:2] == [0, 0] and 0 < shares[3] < shares[2] < 1
    assert all(f"{100 * share:.2g}% all-zero rows" in output for share in shares[2:])
    assert (evaluate(softmax["llama"][0], data, tmp_path, *flags, 2 * L)[1]["results"][1]["all_zero_rows"]
            == shares[3])


def test_nonfinite_losses_are_reported(model_of, data, tmp_path):
    folder = with_weights(model_of("llama", "softmax")[0], tmp_path / "large", lambda tensors: tensors.update(
        {name: 30 * tensor for name, tensor in tensors.items() if "q_proj" in name or "k_proj" in name}))
    output, result = evaluate(folder, data, tmp_path, "--attn", "exp")
    assert isinstance(losses(result)[0], float) and losses(result)[1] is None
    assert " nan" in output and "-nan" not in output
    _, errors = run(BIN / "eval_gpt2", "--model", folder, "--data", f"{data}/*_val_*.bin", "--attn", "exp")
    assert f"{folder.name} under exp: its activations are not finite in 1 of 1 lengths (--task loss, length " in errors
    assert "under softmax:" not in errors


def test_a_full_disk_is_reported(checkpoints, data):
    words = [BIN / "eval_gpt2", "--model", checkpoints(), "--data", f"{data}/*_val_*.bin"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 4 and b"stdout" in result.stderr


def test_while_a_run_prunes_its_checkpoints(data, checkpoints, tmp_path):
    """A checkpoint may be deleted between being found and being read."""
    out = shutil.copytree(checkpoints(), tmp_path / "run")
    words = [BIN / "eval_gpt2", "--model", out, "--data", f"{data}/*_val_*.bin", "--max-tokens", 64]
    start = time.monotonic()
    expected = run(*words)[0].splitlines()[-1]
    with saving_and_pruning(out, (time.monotonic() - start) / 2):
        for _ in range(25):
            assert run(*words)[0].splitlines()[-1] == expected


def test_a_note_on_lengths_below_l(checkpoints, data, tmp_path):
    """There is a note if s starts anew and the mean temperature at the shortest length is below 0.9 of softmax's; with
    the initial value in the note it equals softmax's."""
    folder = checkpoints("--model", model_flag("llama"))
    start, ratio = 4 / math.lgamma(5), math.lgamma(5) / 4 * ENTROPY

    def note(*flags):
        output, _ = evaluate(folder, data, tmp_path, "--max-tokens", 64, *flags)
        return output.split("under softmax")[0].partition("note      s starts")[2]

    text = note("--attn", "ssmax-bias", "--seq-lens", "8,4")
    assert (f"at {ENTROPY:.4f} for L = 8, but at T = 4 its mean temperature is only {ratio:.2f} of softmax's" in text
            and f"use --attn ssmax-bias+s={start:.4f} to start at softmax's" in text)
    assert not any(note(*flags) for flags in (["--attn", "ssmax-bias", "--seq-lens", "8"],
                                              ["--attn", f"ssmax+s={start:.4f}", "--seq-lens", "4"],
                                              ["--attn", "ssmax-pn", "--seq-lens", "4"], ["--seq-lens", "4"]))
    own = checkpoints("--model", model_flag("llama"), "--attn", "ssmax")
    output, _ = evaluate(own, data, tmp_path, "--max-tokens", 64, "--attn", "ssmax-bias", "--seq-lens", "4")
    assert "note" not in output                                # its s is learned, and stays

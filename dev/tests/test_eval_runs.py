"""eval_gpt2 as a program: several models in one call, memory at long lengths, runs that are killed, full disks, and the
learned scalars (--task scores)."""
import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from byte_text import END_OF_TEXT, exchange_tokens, write_text, write_tokenizer
from eval_models import evaluate
from tiny import BIN, environment, peak_memory, run
from trainer import write_shard

L = 128


DATA = partial(write_text, count=25000)
SHORT = ["--seq-lens", 16, "--max-tokens", 16]


@pytest.fixture(scope="module")
def model(model_of):
    """The folder of a model under softmax."""
    return model_of("grouped", "softmax")[0]


# ---------------------------------------------------------------- the learned scalars

NAMES = ("attn_scale", "attn_bias", "attn_sink")


@pytest.mark.parametrize("shape, attn", [("grouped", "ssmax"), ("grouped", "ssmax-bias"), ("llama", "ssmax-pn"),
                                         ("QK norms", "softmax-sink"), ("gau", "ssmax-bias"),
                                         ("gau", "ssmax-pn+norm=l1+sink"), ("grouped", "ssmax,ssmax-pn+window=9"),
                                         ("grouped", "softmax,ssmax")])
def test_scores_are_the_checkpoints(shape, attn, model_of, tmp_path):
    """Each layer's scalars, and the line a1 ln n + a2 that they make: s p_n + b with p_n's fit over the n it is for."""
    folder, _, config = model_of(shape, attn)
    tensors = load_file(folder / "model.safetensors")
    block = "gau" if shape == "gau" else "self_attn"
    output, result = evaluate("scores", folder, None, tmp_path)
    [row] = result["results"]
    fit, attns = (1, 0), attn.split(",")
    if "pn" in attn:
        p, used = tensors["model.attn_pn"], 9 if "window" in attn else 128
        fit = np.polyfit(np.log(np.arange(1, used + 1)), p[:used].astype(float), 1)
        assert (np.array_equal(np.float32(row["attn_pn"]), p)
                and result["models"][0]["pn_fit"]["a1"] == pytest.approx(fit[0], rel=1e-6))
    assert len(row["layers"]) == config.units and ("attn_pn" in row) == ("pn" in attn)
    for l, layer in enumerate(row["layers"]):
        p1, p2 = fit if "pn" in attns[l % len(attns)] else (1, 0)
        there = {name: tensors[key].astype(float)
                 for name in NAMES if (key := f"model.layers.{l}.{block}.{name}") in tensors}
        assert layer.keys() - {"fits"} == there.keys() and ("fits" in layer) == ("attn_scale" in there)
        [line] = [line for line in output.splitlines() if line.startswith(f"layer {l:2d}:")]
        assert there or line.endswith("  none")
        for name, values in there.items():
            assert np.array_equal(np.float32(layer[name]), np.float32(values))
            assert f"{name} {values.mean():.4f} ({values.min():.4f} to {values.max():.4f})" in line
        if "fits" in layer:
            s, b = there["attn_scale"], there.get("attn_bias", 0)
            assert np.allclose([fit["a1"] for fit in layer["fits"]], s * p1, rtol=1e-6)
            assert np.allclose([fit["a2"] for fit in layer["fits"]], s * p2 + b, rtol=1e-5, atol=1e-9)
            assert f"scale {np.mean(s * p1):.4f} ln n {np.mean(s * p2 + b):+.4f}" in line


def test_no_zero_has_a_sign(model_of, tmp_path):
    folder = shutil.copytree(model_of("grouped", "ssmax-bias")[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    small = {name: np.full_like(tensor, -1e-5) for name, tensor in tensors.items() if "attn_" in name}
    save_file(tensors | small, folder / "model.safetensors", metadata={"format": "pt"})
    output, _ = evaluate("scores", folder, None, tmp_path)
    assert "attn_bias 0.0000 (0.0000 to 0.0000)  scale 0.0000 ln n +0.0000" in output, output


def test_scores_without_scalars_and_after_a_switch(model_of, tmp_path):
    folder, *_ = model_of("grouped", "softmax")
    output, result = evaluate("scores", folder, None, tmp_path, "--attn", "ssmax-bias+s=0.25")
    before, after = result["results"]
    assert "softmax has no learned scalars" in output and before["layers"] == []
    layer = {"attn_scale": 4 * [0.25], "attn_bias": 4 * [0], "fits": 4 * [{"a1": 0.25, "a2": 0}]}
    assert after["layers"] == 2 * [layer]
    _, result = evaluate("scores", folder, None, tmp_path, "--attn", "ssmax-fixed")
    assert result["results"][1]["layers"] == 2 * [{"attn_scale": 4 * [1], "fits": 4 * [{"a1": 1, "a2": 0}]}]
    folder, *_ = model_of("llama", "ssmax-pn")
    _, result = evaluate("scores", folder, None, tmp_path, "--attn", "ssmax")
    for layer in result["results"][1]["layers"]:    # without p_n
        assert [fit["a1"] for fit in layer["fits"]] == layer["attn_scale"] and all(f["a2"] == 0 for f in layer["fits"])


# ---------------------------------------------------------------- several models

def names(result):
    return [model["name"] for model in result["models"]]


def test_several_models(model_of, data, tmp_path):
    """Each has the numbers of a call of its own."""
    folders = [model_of("grouped", "ssmax")[0], model_of("gau", "softmax")[0]]
    flags = ["--seq-lens", "16,40", "--max-tokens", 400, "--task", "positions"]
    _, both = evaluate("positions", f"{folders[0]},{folders[1]}", data, tmp_path, *flags)
    alone = [evaluate("positions", folder, data, tmp_path / "one", *flags)[1] for folder in folders]
    assert (names(both) == [folder.name for folder in folders]
            and [model["attn"] for model in both["models"]] == ["ssmax", "softmax"])
    assert (both["results"] == [row for result in alone for row in result["results"]]
            and both["models"] == [result["models"][0] for result in alone])


def test_the_table_of_all_losses(model_of, data, tmp_path):
    """A row for each model and normalizer, a column for each length of any of them."""
    folders = [model_of("grouped", "ssmax")[0], model_of("gau", "softmax", 64)[0]]
    for task in ("loss", "positions"):
        output, result = evaluate(task, f"{folders[0]},{folders[1]}", data, tmp_path, "--attn", "softmax1",
                                  "--seq-lens", "40,0,16", "--max-tokens", 400)
        lines = output[output.index("\nloss by length\n"):].splitlines()[2:]
        assert lines[0].split() == ["model", "attn", "16", "40", "64", "128"]
        expected = {}
        for row in result["results"]:
            expected.setdefault((row["model"], row["attn"]), {})[row["seq_len"]] = f"{row['loss']:.4f}"
        assert len(lines) == 5 == len(expected) + 1
        for line, (names, losses) in zip(lines[1:], expected.items()):
            assert line.split() == [*names, *(losses[T] for T in (16, 40, 64, 128) if T in losses)]
    for task, flags in (("loss", ["--max-tokens", 400]), ("needle", ["--seq-lens", 100, "--samples", 1])):
        assert "loss by length" not in evaluate(task, folders[0], data, tmp_path, *flags)[0]


def test_each_model_has_a_name_of_its_own(model, data, tmp_path):
    shutil.copytree(model, tmp_path / "a" / "same")
    shutil.copytree(model, tmp_path / "b" / "same")
    shutil.copytree(model, tmp_path / "c" / "with,comma")
    label = lambda models: names(evaluate("loss", models, data, tmp_path / "out", *SHORT)[1])
    assert label(f"{tmp_path}/a/same/,{tmp_path}/b/same/") == ["a/same", "b/same"]
    assert label(f"{model},{model},{model}") == [model.name, str(model), f"{model} (model 3)"]
    assert label(f"{tmp_path}/c/with,comma") == ["with,comma"]
    assert label(f",{model},") == [model.name]


def test_a_missing_model_is_named_before_any_work(model, data, tmp_path):
    words = ["--task", "loss", "--data", f"{data}/*_val_*.bin", "--out", tmp_path / "out"]
    output, errors = run(BIN / "eval_gpt2", "--model", f"{model},{tmp_path}/nowhere", *words, code=3)
    assert output == "" and f"{tmp_path}/nowhere" in errors and not (tmp_path / "out").exists()
    for models in (",", ""):
        assert "--model is empty" in run(BIN / "eval_gpt2", "--model", models, *words, code=2)[1]
    assert "more than 64" in run(BIN / "eval_gpt2", "--model", ",".join(65 * [str(model)]), *words, code=2)[1]


@pytest.fixture(scope="module")
def bad_models(model, tmp_path_factory):
    """A folder of models with something wrong, or that are under some flags."""
    root = tmp_path_factory.mktemp("bad")
    config, tensors = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    for name in ("bare", "plain", "scalar", "nan", "small"):
        shutil.copytree(model, root / name)
    for path in (root / "bare").glob("tokenizer*"):
        path.unlink()
    write_tokenizer(root / "plain", {"<|endoftext|>": END_OF_TEXT})
    ssmax = {"attention_normalizer": {"name": "ssmax", "seq_len": 128}}
    (root / "scalar/config.json").write_text(json.dumps(config | ssmax))
    cut = {name: tensor[:100] if "lm_head" in name or "embed" in name else tensor for name, tensor in tensors.items()}
    save_file(cut, root / "small/model.safetensors", metadata={"format": "pt"})
    small = {"vocab_size": 100, "bos_token_id": 99, "eos_token_id": 99}
    (root / "small/config.json").write_text(json.dumps(config | small))
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, root / "nan/model.safetensors", metadata={"format": "pt"})
    write_shard(root / "last.bin", np.repeat([98, 110], [3 * 128, 128]))
    return root


BAD = {
    "no tokenizer": ("bare", ["--task", "needle", "--seq-lens", 100], 3, "tokenizer.json"),
    "no ChatML": ("plain", ["--task", "needle", "--chat", "chatml", "--seq-lens", 100], 2, "<|im_start|>"),
    "no p_n there": (None, ["--seq-lens", 200], 2, "p_n for n up to L = 128"),
    "a length twice": ("bare", ["--seq-lens", "0,128"], 2, "128 is listed twice"),
    "a smaller vocabulary": ("small", [], 3, "below the vocabulary size"),
    "a smaller vocabulary for the last sequence": ("small", ["--data", "{folder}/last.bin"], 3, "token id 110"),
    "no such scalar": ("scalar", [], 3, "attn_scale"),
    "a NaN": ("nan", [], 3, "model.safetensors"),
}


@pytest.mark.parametrize("name", BAD)
def test_every_model_is_checked_before_the_first_is_evaluated(name, bad_models, model_of, data, tmp_path):
    folder, flags, code, part = BAD[name]
    second = bad_models / folder if folder else model_of("grouped", "ssmax-pn")[0]
    flags = [str(flag).format(folder=bad_models) for flag in flags]
    words = ["--model", f"{model_of('grouped', 'softmax')[0]},{second}", "--data", f"{data}/*_val_*.bin", *flags]
    output, errors = run(BIN / "eval_gpt2", *words, "--out", tmp_path / "out", code=code)
    assert output == "" and part in errors and not (tmp_path / "out").exists()


def test_another_tokenizer_beside_the_shards(model, data, tmp_path):
    """Only a warning: the shards may have been written with another file. The tokens are compared, not the bytes."""
    shard = shutil.copy(data / "d_val_000000.bin", tmp_path)
    words = ["--model", model, "--max-tokens", 100, "--data"]
    errors = lambda path: run(BIN / "eval_gpt2", *words, path)[1]
    assert not any("warning" in errors(path) for path in (data / "d_val_000000.bin", shard))
    write_tokenizer(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"truncation": {}}, indent=1))
    assert "warning" not in errors(shard)
    exchange_tokens(tmp_path)
    assert f"warning: {tmp_path}/tokenizer.json differs from {model}/tokenizer.json" in errors(shard)


# ---------------------------------------------------------------- what is in the folder

def test_files_of_the_eval_json_before_this_one_are_removed(model, data, prompt, tmp_path):
    """Only those that it lists and this one does not have."""
    mine = ["lengths.png", "map-1.npy", "map-12.npy", "prompts.jsonl", "attention.html", "notes.png", "inner.png"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/inner.png").write_text("mine")
    run(*attention_words(model, tmp_path, prompt))                 # there was no eval.json
    assert contents(tmp_path).keys() == {*mine, "sub", "eval.json", "map-0.npy"}
    result = json.loads((tmp_path / "eval.json").read_text())
    assert result["files"] == ["map-0.npy"]
    listed = ["map-0.npy", "map-1.npy", "attention.html", "lengths.png", "gone.png", "sub/inner.png", "sub", 5]
    (tmp_path / "eval.json").write_text(json.dumps(result | {"files": listed}))
    run(*attention_words(model, tmp_path, prompt))
    assert contents(tmp_path).keys() == {*mine, "sub", "eval.json", "map-0.npy"} - {*listed[1:4]}
    assert (tmp_path / "sub/inner.png").exists()
    needle = ["--task", "needle", "--model", model, "--data", f"{data}/*_val_*.bin", "--seq-lens", 100, "--samples", 1,
              "--picture", 0, "--out", tmp_path]
    run(BIN / "eval_gpt2", *needle, "--save-prompts")
    assert json.loads((tmp_path / "eval.json").read_text())["files"] == ["prompts.jsonl"]
    assert not (tmp_path / "map-0.npy").exists() and (tmp_path / "prompts.jsonl").read_text() != "mine"
    run(BIN / "eval_gpt2", *needle)
    assert contents(tmp_path).keys() == {"map-12.npy", "notes.png", "inner.png", "sub", "eval.json"}
    for damaged in ("", "[", '{"files": "map-12.npy"}', '{"files": {"a": "map-12.npy"}', "5"):
        (tmp_path / "eval.json").write_text(damaged)
        run(BIN / "eval_gpt2", *needle)
        assert contents(tmp_path).keys() == {"map-12.npy", "notes.png", "inner.png", "sub", "eval.json"}


def test_files_that_the_call_reads_are_never_removed(model, data, prompt, tmp_path):
    """Even if the eval.json before this one lists them: its prompts are now the questions, or the prompts, or data."""
    question = json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0}).encode()
    shard = (data / "d_val_000000.bin").read_bytes()
    names = {"prompts.jsonl", "map-7.npy"}
    for task, text, flag, path, kept in (
            ("choice", question, "--data", f"{tmp_path}/prompts.jsonl", {"prompts.jsonl"}),
            ("attention", question, "--prompt-file", f"{tmp_path}/prompts.jsonl", {"prompts.jsonl"}),
            ("loss", shard, "--data", f"{tmp_path}/map-7.npy", {"map-7.npy"}),
            ("loss", shard, "--data", f"{tmp_path}/prom*", {"prompts.jsonl"}),
            ("loss", shard, "--data", f"{tmp_path}/prompts.jsonl,{tmp_path}/map-[7].npy", names),
            ("loss", shard, "--data", f"{data}/*_val_*.bin", set())):
        for name in names:
            (tmp_path / name).write_bytes(text)
        (tmp_path / "eval.json").write_text(json.dumps({"files": sorted(names)}))
        run(BIN / "eval_gpt2", "--task", task, "--model", model, flag, path, "--picture", 0, "--out", tmp_path,
            *(["--max-tokens", 1] if task == "loss" else []))
        assert contents(tmp_path).keys() & names == kept, path


def test_a_folder_has_one_evaluation_at_a_time(model, data, tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    errors = evaluate("loss", model, data, tmp_path, *SHORT, code=7)
    assert "another evaluation is writing to this folder" in errors and "--out" in errors
    assert not list(tmp_path.iterdir())
    os.close(folder)
    evaluate("loss", model, data, tmp_path, *SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]


def test_a_folder_that_cannot_be_written_to_is_noticed_first(model, data, tmp_path):
    (tmp_path / "eval.json").mkdir()
    words = ["--task", "loss", "--model", model, "--data", f"{data}/*_val_*.bin", *SHORT, "--picture", 0]
    for out, said in ((tmp_path, "or none yet, found a folder"), ("/proc/self", "eval.json.tmp")):
        output, errors = run(BIN / "eval_gpt2", *words, "--out", out, code=4)
        assert not output and said in errors, (output, errors)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_results_are_not_written_through_a_link(model, data, tmp_path, link):
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    out.mkdir()
    for name in ("eval.json", "eval.json.tmp", "map-1.npy.tmp"):
        link(victim, out / name)
    evaluate("loss", model, data, out, *SHORT)
    assert victim.read_text() == "precious" and [path.name for path in out.iterdir()] == ["eval.json"]
    assert not (out / "eval.json").is_symlink()
    if os.getuid() == 0:
        os.chown(out, 65534, 65534)
        out.chmod(0o777)
        errors = evaluate("loss", model, data, out, *SHORT, code=4)
        assert f"{out}: this folder belongs to another user" in errors
        evaluate("loss", model, data, out, *SHORT, "--foreign-folder", 1)


def test_what_a_killed_evaluation_left_is_removed(model, data, tmp_path):
    mine = {"mine.tmp", "map.npy.tmp", "eval.json.tmp2"}
    for name in {*mine, "map-7.npy.tmp", "prompts.jsonl.tmp", "eval.json.tmp"}:
        (tmp_path / name).write_text("left")
    evaluate("loss", model, data, tmp_path, *SHORT)
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "eval.json"}


def test_columns_of_names_that_are_not_ascii(model, data, tmp_path):
    folders = [shutil.copytree(model, tmp_path / name) for name in ("naïve", "plain")]
    output, _ = evaluate("loss", f"{folders[0]},{folders[1]}", data, tmp_path / "out", *SHORT)
    first, second = output[output.index("\nloss by length\n"):].splitlines()[3:]
    assert first.index("softmax") == second.index("softmax") and len(first) == len(second)


# ---------------------------------------------------------------- long sequences

LONG = {        # T: the length of the sequences
    "positions": ["--seq-lens", "{T}", "--max-tokens", "{T}"],
    "needle": ["--seq-lens", "{T}", "--depths", "50", "--samples", "1", "--max-new-tokens", "1"],
    "attention": ["--seq-lens", "{T}", "--samples", "1"],
    "choice": ["--seq-lens", "{T}", "--data", "{folder}/{T}.jsonl"],
}


def peak(task, model, data, folder, T):
    """The peak memory in bytes, and eval.json."""
    ending = {"query": ("a " * T)[:T - 1], "choices": ["b", "c"], "gold": 0}    # T tokens with the space and the ending
    (folder / f"{T}.jsonl").write_text(json.dumps(ending))
    bytes_used = peak_memory(BIN / "eval_gpt2", "--model", model, "--data", f"{data}/*_val_*.bin", "--task", task,
                             "--picture", 0, "--out", folder / "out",
                             *(word.format(T=T, folder=folder) for word in LONG[task]), threads=2)
    return bytes_used, json.loads((folder / "out/eval.json").read_text())["results"][0]


@pytest.mark.parametrize("task, shape, lengths",
                         [("positions", "QK norms", [2048, 8192]), ("positions", "gau", [2048, 8192]),
                          ("needle", "QK norms", [2048, 8192]), ("choice", "QK norms", [2048, 8192]),
                          ("attention", "QK norms", [1024, 5120])])
def test_memory_is_linear_in_the_length(task, shape, lengths, model_of, data, tmp_path):
    """One T x T array of float32 would add 4 times this bound. Sequences of both lengths begin alike."""
    model, *_ = model_of(shape, "softmax")
    (bytes_short, short), (bytes_long, long) = (peak(task, model, data, tmp_path, T) for T in lengths)
    assert bytes_long - bytes_short < lengths[1] ** 2 - lengths[0] ** 2, (bytes_short, bytes_long)
    if task == "positions":
        assert len(long["loss_by_position"]) == lengths[1]
        assert np.abs(np.subtract(long["loss_by_position"][:lengths[0]], short["loss_by_position"])).max() < 1e-4


# ---------------------------------------------------------------- progress

PROGRESS = {       # enough work for several lines
    "loss": ["--seq-lens", "8,16", "--max-tokens", 4_000_000],
    "positions": ["--seq-lens", 8000, "--max-tokens", 1],           # a single sequence
    "needle": ["--seq-lens", "200,6000", "--depths", 50, "--samples", 1],
    "attention": ["--seq-lens", 1000, "--samples", 2],
    "choice": ["--seq-lens", 3000],
}

TOTAL = {"loss": 24992 + 24992, "positions": 8000, "needle": 6200, "attention": 4 * 1000, "choice": 20 * 2991}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("task", PROGRESS)
def test_progress_is_shown_on_a_terminal_alone(task, model, data, tmp_path):
    """A bar, the tokens of the whole call, and the time left, on a line that is deleted at the end."""
    source = f"{data}/*_val_*.bin"
    if task == "choice":
        source = tmp_path / "q.jsonl"
        source.write_text(10 * (json.dumps({"query": "a" * 2990, "choices": ["b", "c"], "gold": 0}) + "\n"))
    words = ["--task", task, "--model", f"{model},{model}", "--attn", "ssmax", "--data", source, *PROGRESS[task]]
    terminal, side = os.openpty()
    child = subprocess.Popen(list(map(str, [BIN / "eval_gpt2", *words])), stdout=subprocess.PIPE, stderr=side,
                             env=environment())
    os.close(side)
    output, shown = child.communicate()[0].decode(), b""
    with contextlib.suppress(OSError):          # the terminal's other side is closed
        while chunk := os.read(terminal, 1 << 16):
            shown += chunk
    os.close(terminal)
    assert child.returncode == 0 and re.match(r"\rtokens \[\.+\] 0/[\d,]+\033\[K", shown.decode()), shown
    lines = re.findall(r"tokens \[#*\.*\] ([\d,]+)/([\d,]+), .+? left", shown.decode())
    assert lines, shown
    done, total = zip(*([int(number.replace(",", "")) for number in line] for line in lines))
    assert list(done) == sorted(done) and done[-1] < total[0] and set(total) == {4 * TOTAL[task]}
    assert shown.decode().rindex("\rtokens [") < shown.decode().rindex("\r\033[K")
    again, errors = run(BIN / "eval_gpt2", *words)
    assert again == output and " left" not in errors


def test_ctrl_c_ends_the_bars_line(model, data):
    words = [BIN / "eval_gpt2", "--model", model, "--data", f"{data}/*_val_*.bin", "--task", "positions",
             "--seq-lens", 24_000, "--max-tokens", 1]
    terminal, side = os.openpty()
    child = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=side, env=environment())
    os.close(side)
    shown = os.read(terminal, 1 << 16)
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):          # the terminal's other side is closed
        while chunk := os.read(terminal, 1 << 16):
            shown += chunk
    os.close(terminal)
    assert child.wait() == -signal.SIGINT and shown.startswith(b"\rtokens [") and shown.endswith(b"\n"), shown


# ---------------------------------------------------------------- bf16

ROUNDED = {"loss": ("loss", ["--seq-lens", 50, "--max-tokens", 1000]),
           "needle": ("needle_scores", ["--seq-lens", 110, "--samples", 1, "--max-new-tokens", 1]),
           "attention": ("loss", ["--seq-lens", 50, "--samples", 2]), "choice": ("log_likelihoods", [])}


@pytest.mark.parametrize("shape", ["grouped", "gau"])
@pytest.mark.parametrize("task", ROUNDED)
def test_bf16_rounds_the_inputs_of_matmuls(task, shape, model_of, data, tmp_path):
    """The results change, but hardly."""
    key, flags = ROUNDED[task]
    if task == "choice":
        (tmp_path / "q.jsonl").write_text(json.dumps({"query": "the cat", "choices": ["sat", "went on"], "gold": 0}))
        flags = ["--data", tmp_path / "q.jsonl"]
    exact, rounded = (evaluate(task, model_of(shape, "softmax")[0], data, tmp_path, *flags, "--dtype", dtype)[1]
                      for dtype in ("fp32", "bf16"))
    found = [np.ravel([row[key] for row in result["results"] if key in row]) for result in (exact, rounded)]
    assert 1e-6 < np.max(np.abs(found[1] - found[0]) / np.maximum(1, np.abs(found[0]))) < 2e-2, found


# ---------------------------------------------------------------- kills and full disks

def attention_words(model, out, prompt):
    return list(map(str, [BIN / "eval_gpt2", "--task", "attention", "--model", model, "--prompt-file", prompt,
                          "--picture", 0, "--out", out]))


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompt") / "prompt"
    path.write_text("a long prompt, whose weights take a while. " * 9)
    return path


def contents(folder):
    return {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()
            if not path.name.endswith(".tmp")}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_the_results_before_it(end, model, model_of, prompt, data, tmp_path):
    """Its unfinished files have other names, and the next run replaces them."""
    folders = [model, model_of("gau", "ssmax")[0]]
    out = tmp_path / "out"
    subprocess.run(attention_words(folders[0], out, prompt), check=True, stdout=subprocess.DEVNULL, env=environment())
    before = contents(out)
    assert before.keys() == {"eval.json", "map-0.npy"}
    child = subprocess.Popen(attention_words(",".join([str(folders[1])] + 30 * [str(folders[0])]), out, prompt),
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    while not (out / "map-4.npy.tmp").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(end)
    assert child.wait() == -end and contents(out) == before
    subprocess.run(attention_words(folders[1], out, prompt), check=True, stdout=subprocess.DEVNULL, env=environment())
    after = contents(out)
    assert after.keys() == before.keys() and after["map-0.npy"] != before["map-0.npy"]
    row = json.loads(after["eval.json"])["results"][0]
    assert np.load(out / row["map"]).shape == (2, 1, *2 * [row["tokens"]])


@pytest.mark.parametrize("task, size, name, flags",
                         [("attention", 100_000, "map-0.npy", []),
                          ("needle", 3_000, "prompts.jsonl", ["--seq-lens", 200, "--samples", 5, "--save-prompts"]),
                          ("positions", 20_000, "eval.json", ["--seq-lens", 4000, "--max-tokens", 1])])
def test_a_full_disk_leaves_the_results_before_it(task, size, name, flags, model, prompt, data, tmp_path):
    (tmp_path / "eval.json").write_text("earlier")
    source = ["--prompt-file", prompt] if task == "attention" else ["--data", f"{data}/*_val_*.bin"]
    words = [BIN / "eval_gpt2", "--task", task, "--model", model, *source, *flags, "--picture", 0, "--out", tmp_path]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=environment(),
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    assert done.returncode == 4 and str(tmp_path / name) in done.stderr and "File too large" in done.stderr, done.stderr
    assert ([path.name for path in tmp_path.iterdir()] == ["eval.json"]
            and (tmp_path / "eval.json").read_text() == "earlier")


def test_files_that_cannot_be_written_are_named(model, prompt, data, tmp_path):
    """A folder with the name of a map's file; a file with the name of the folder."""
    words = attention_words(model, tmp_path / "out", prompt)
    (tmp_path / "out/map-0.npy.tmp").mkdir(parents=True)
    errors = run(words[0], *words[1:], code=4)[1]
    assert f"{tmp_path}/out/map-0.npy.tmp" in errors and "Is a directory" in errors
    errors = run(words[0], *words[1:], "--out", prompt, code=4)[1]
    assert f"{prompt}" in errors and "director" in errors.lower()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["map-0.npy.tmp"]

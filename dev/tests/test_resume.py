"""An interrupted and resumed run ends with the same bits in weights, moments and metrics."""
import json
import random
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from jobs import start, wait_for_line
from trainer import (MODEL, ROOT, TRAIN, VOCAB, assert_same_checkpoint, assert_same_run, checkpoint, command, embedding,
                     environment, lineage, losses, make_data, metrics, run_json, says, steps, tensors, tokens, train,
                     write_shard)


DATA = partial(make_data, shards=2)


def validation(folder):
    return ["--val-data", folder / "d_val_000000.bin", "--val-every", 4, "--val-tokens", 200]


def twice(folder, tmp_path, *flags, half=10, total=20):
    """Runs the same steps twice, the second time in two parts."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(folder, *flags, "--steps", total, "--out", whole)
    train(folder, *flags, "--steps", half, "--out", parts)
    text = train(folder, *flags, "--steps", total, "--out", parts, "--resume")
    assert f"resumes at step {half}" in text
    assert_same_run(whole, parts, total)
    assert [step for step, in metrics(parts, ["step"])] == list(range(1, total + 1))
    if "--sample-every" in flags:
        drawn, again = ({*(folder / "samples.txt").read_text().split("---- ")} for folder in (whole, parts))
        assert drawn < again     # which also has one of its first half's end


@pytest.mark.parametrize("flags", [
    [],
    ["--model", MODEL + ",tied=0", "--dtype", "bf16", "--attn", "ssmax"],
    ["--attn", "ssmax", "--batch", 2, "--total-batch-tokens", 64],
    ["--attn", "softmax1", "--seq-len", "8,16"],
    ["--pack", "example", "--sample-every", 7],
    ["--attn", "softmax+rope=none", "--attn-switch", "8:softmax", "--sample-every", 15],
    ["--optimizer", "muon"],
    ["--optimizer", "muon", "--dtype", "bf16", "--attn", "ssmax"],
], ids=["fp32", "untied bf16 ssmax", "ssmax accumulated", "mixed lengths", "examples",
        "samples after a switch", "muon", "muon bf16 ssmax"])
def test_ten_and_ten_are_twenty(data, tmp_path, flags):
    twice(data, tmp_path, *validation(data), *flags)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("sizes", [
    [321],            # 40 windows of 8: the epoch ends with step 10
    [160, 161],       # and the first shard ends with step 5
    [300],            # 37 windows: the epoch ends within step 10
    [83, 1, 200, 7],  # windows that span shards
], ids=str)
def test_at_an_edge(tmp_path, sizes):
    for i, size in enumerate(sizes):
        write_shard(tmp_path / f"d_train_{i:06d}.bin", tokens(size, i))
    for shuffle in (0, 1):
        (tmp_path / str(shuffle)).mkdir()
        twice(tmp_path, tmp_path / str(shuffle), "--shuffle", shuffle)
    (tmp_path / "5").mkdir()
    twice(tmp_path, tmp_path / "5", "--shuffle", 0, half=5)


def test_a_mixture_continues(data, tmp_path):
    """Step 10 is in the middle of the order of the sources, which repeats after 25 steps; also on two ranks. Other
    weights, or other data of a source, are not the run's."""
    parts = tmp_path / "data"
    shutil.copytree(data, parts)
    sources = f"{parts}/*_train_000001.bin:0.43,{parts}/*_train_000002.bin:0.57"
    flags = ["--train-data", sources, "--total-batch-tokens", 32]
    twice(parts, tmp_path, *flags)
    train(parts, *flags, "--steps", 10, "--out", tmp_path / "two")
    train(parts, *flags, "--steps", 20, "--batch", 2, "--out", tmp_path / "two", "--resume", processes=2)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "whole"), rtol=1e-5)
    out = ["--out", tmp_path / "two", "--steps", 30, "--batch", 4, "--resume"]
    other = sources.replace("0.43", "0.44")
    assert "a resumed run cannot change" in train(parts, *flags, "--train-data", other, *out, code=2)
    write_shard(parts / "d_train_000002.bin", tokens(1500, 77))
    assert "the train data differs from the run's" in train(parts, *flags, *out, code=2)


def test_resume_starts_a_run_in_an_empty_folder(data, tmp_path):
    """Its name is printed as escapes if it has characters that act on a terminal."""
    plain, fresh, empty = tmp_path / "plain", tmp_path / "fresh", tmp_path / "empty\x1b[2J\u202e"
    empty.mkdir()
    train(data, "--steps", 3, "--out", plain)
    for out in (fresh, empty):
        printed = train(data, "--steps", 3, "--out", out, "--resume")
        assert "starts at step 0" in printed
        assert_same_run(plain, out, 3)
    printed += train(data, "--steps", 3, "--out", empty, "--resume")
    printed += train(data, "--steps", 4, "--out", empty, "--resume")
    printed += train(data, "--init-from", empty, "--seq-len", 16, "--dry-run", model=False)
    printed += subprocess.run([ROOT / "eval_gpt2", "--model", f"{empty},{empty}", "--seq-lens", "16",
                               "--data", data / "d_val_000000.bin"],
                              capture_output=True, text=True, check=True).stdout
    assert not {"\x1b", "\u202e"} & set(printed) and printed.count(r"empty\x1b[2J\u202e") >= 10


# ---- kills


def test_kill_9_at_any_moment(data, tmp_path):
    """A run that saves at every step is killed repeatedly, in the middle of steps and of saves."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    flags = ["--steps", 250, "--schedule", "cosine", "--ckpt-every", 1, "--batch", 1, "--total-batch-tokens", 32]
    train(data, *flags, "--ckpt-every", 0, "--out", whole)
    moments = random.Random(1)
    for _ in range(6):
        process = start(command(data, *flags, "--out", out, "--resume"))
        wait_for_line(process, "| loss ")
        time.sleep(moments.uniform(0, 0.15))
        process.kill()
        process.communicate()
    assert "resumes at step" in train(data, *flags, "--out", out, "--resume")
    assert_same_run(whole, out, 250)


# How the n-th write, fsync, rename, mkdir or removal fails, and which n are tried.
FAULTS = {"kill": 1, "half": 4, "enospc": 5, "eio": 17}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", FAULTS)
def test_every_point_of_a_save(data, tmp_path, faults, kind):
    whole = tmp_path / "whole"
    flags = ["--steps", 4, "--warmup", 2, "--ckpt-every", 2, "--keep", 1]
    text = train(data, *flags, "--out", whole, program=faults, env={"FAULT_COUNT": "1"})
    points = int(re.search(r"fault points: (\d+)", text)[1])
    assert points > 80

    def interrupt_and_resume(n):
        out = tmp_path / str(n)
        result = subprocess.run(command(data, *flags, "--out", out, program=faults), capture_output=True, text=True,
                                env=environment(FAULT_AT=str(n), FAULT_KIND=kind))
        expected = (137,) if kind in ("kill", "half") else (0, 4)
        assert result.returncode in expected, (f"point {n}: exit code {result.returncode}\n"
                                               f"{result.stdout}{result.stderr}")
        if kind in ("enospc", "eio"):
            assert (result.returncode == 0 or "failed: " in result.stderr
                    or "cannot " in result.stderr), f"point {n}:\n{result.stderr}"
        text = train(data, *flags, "--out", out, "--resume", program=faults)
        assert "damaged" not in text and "warning" not in text, f"point {n}:\n{text}"
        assert_same_run(whole, out, 4)
        left = sorted(path.name for path in (out / "ckpt").iterdir())
        shutil.rmtree(out)
        return n, left

    numbers = range(1 + FAULTS[kind] // 2, points + 1, FAULTS[kind])
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(interrupt_and_resume, numbers))
    assert len(results) == len(numbers)
    # What a kill in the last save leaves would be removed by the next save, but there is none here.
    assert all("step-00000004" in left for _, left in results)


# ---- other numbers of ranks, other batches


def test_other_numbers_of_ranks(data, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*validation(data), "--total-batch-tokens", 12 * 8, "--keep", 0, "--lr", 0.001]
    train(data, *flags, "--steps", 15, "--batch", 12, "--out", whole)
    for processes, total in ((1, 5), (2, 10), (3, 15)):
        train(data, *flags, "--steps", total, "--batch", 12 // processes, "--out", parts,
              "--resume", processes=processes)
        state = json.loads((checkpoint(parts, total) / "state.json").read_text())
        assert state["ranks"] == processes and state["data_position"] == 12 * total
    a, b = metrics(whole), metrics(parts)
    assert len(a) == len(b) == 15
    for x, y in zip(a, b):
        np.testing.assert_allclose(y[:3], x[:3], rtol=1e-5)
        assert None in (x[-1], y[-1]) or abs(x[-1] - y[-1]) < 1e-5 * x[-1]


# ---- which checkpoints are kept


def test_keep(data, tmp_path):
    for keep, expected in ((1, [6]), (2, [5, 6]), (0, [1, 2, 3, 4, 5, 6])):
        out = tmp_path / str(keep)
        train(data, "--steps", 6, "--ckpt-every", 1, "--keep", keep, "--out", out)
        assert steps(out) == expected
        assert sorted(path.name for path in (out / "ckpt").iterdir()) == [f"step-{step:08d}" for step in expected]
    train(data, "--steps", 7, "--keep", 2, "--out", tmp_path / "0", "--resume")
    assert steps(tmp_path / "0") == [6, 7]


def test_keep_best(data, tmp_path):
    """Tokens that are rare in the training data are frequent in the validation data, so the best checkpoint is an early
    one. It is kept, also across a resume."""
    out = tmp_path / "out"
    other = write_shard(tmp_path / "other_val_000000.bin", VOCAB - 1 - tokens(600))
    flags = ["--val-data", other, "--val-every", 1, "--ckpt-every", 5, "--keep", 1, "--keep-best", "--out", out]
    train(data, *flags, "--steps", 17)
    train(data, *flags, "--steps", 22, "--resume")
    best = int(np.argmin([loss for loss, in metrics(out, ["val_loss"])])) + 1
    assert best < 17 and steps(out) == [best, 22]
    shutil.rmtree(checkpoint(out, best))    # as if the run had gone without --keep-best until now
    train(data, *flags, "--steps", 27, "--batch", 2, "--resume", processes=2)    # both must know that it is gone
    best = 23 + int(np.argmin([loss for loss, in metrics(out, ["val_loss"])][22:]))
    assert best < 27 and steps(out) == [best, 27]


def test_a_best_checkpoint_that_cannot_be_saved(data, tmp_path, faults):
    """The previous best one stays protected, also across a resume."""
    out = tmp_path / "out"
    flags = ["--val-data", data / "d_val_000000.bin", "--val-every", 2, "--ckpt-every", 5, "--keep", 1, "--keep-best",
             "--warmup", 0]
    text = train(data, *flags, "--steps", 2, "--out", tmp_path / "two", program=faults, env={"FAULT_COUNT": "1"})
    in_the_next_save = int(re.search(r"fault points: (\d+)", text)[1]) + 5
    text = train(data, *flags, "--steps", 5, "--out", out, program=faults,
                 env={"FAULT_AT": str(in_the_next_save), "FAULT_KIND": "enospc"})
    assert "Training continues" in text and steps(out) == [2, 5]
    second, fourth = (loss for loss, in metrics(out, ["val_loss"]) if loss)
    assert fourth < second
    train(data, *flags, "--val-every", 0, "--steps", 7, "--out", out, "--resume")
    assert steps(out) == [2, 7]


# ---- a change of normalizer


def changes(out):
    return [(entry["step"], entry["event"], entry.get("from"), entry.get("attn")) for entry in lineage(out)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attn_switch(data, tmp_path, dtype):
    """What a switch keeps and records is in test_normalizers.py."""
    whole, parts, later = tmp_path / "whole", tmp_path / "parts", tmp_path / "later"
    flags = [*validation(data), "--keep", 0, "--dtype", dtype]
    switch = ["--attn-switch", "6:ssmax"]
    train(data, *flags, *switch, "--steps", 12, "--ckpt-every", 2, "--out", whole)
    train(data, *flags, *switch, "--steps", 4, "--out", parts)
    for total in (6, 7, 9, 12):
        train(data, *flags, "--steps", total, "--out", parts, "--resume")         # the resume needs no flag
    assert_same_run(whole, parts, 12)
    train(data, *flags, "--steps", 6, "--out", later)
    text = train(data, *flags, *switch, "--steps", 12, "--out", later, "--resume")
    assert "softmax to ssmax" in text and "validation loss" in text and "attn_scale" in text
    assert_same_run(whole, later, 12)
    for out in (whole, parts, later):
        assert changes(out) == [(0, "start", None, "softmax"), (6, "attn-switch", "softmax", "ssmax")]
    text = train(data, *flags, "--attn-switch", "3:softmax", "--steps", 14, "--out", whole, "--resume", code=2)
    assert "the run is already at step 12" in text


def test_same_start_for_every_normalizer(data, tmp_path):
    weights = {}
    for name in ("softmax", "ssmax"):
        train(data, "--attn", name, "--steps", 0, "--out", tmp_path / name)
        weights[name] = tensors(tmp_path / name, 0)
    assert all((weights["ssmax"][key] == tensor).all() for key, tensor in weights["softmax"].items())


def test_attn_switch_and_back(data, tmp_path):
    out = tmp_path / "out"
    flags = ["--keep", 0, "--ckpt-every", 2, "--out", out]
    train(data, *flags, "--attn", "ssmax", "--attn-switch", "3:softmax", "--steps", 6)
    assert not any("attn_scale" in name for name in tensors(out, 6))
    train(data, *flags, "--resume", "--attn-switch", "8:ssmax", "--steps", 10)
    assert [entry[2:] for entry in changes(out)[1:]] == [("ssmax", "softmax"), ("softmax", "ssmax")]
    assert any("attn_scale" in name for name in tensors(out, 10))
    # One process makes both switches, and the scale has lost its moments.
    shutil.copytree(out, tmp_path / "parts")
    for step in steps(out):
        if step > 2:
            shutil.rmtree(checkpoint(out, step))
    train(data, *flags, "--resume", "--steps", 10)
    assert_same_run(tmp_path / "parts", out, 10)


# ---- a new run from weights


def test_init_from(data, tmp_path):
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other"
    train(data, "--steps", 60, "--out", first)
    source = checkpoint(first, 60)
    flags = ["--init-from", source, "--seq-len", 8, "--batch", 4, "--steps", 4]
    assert "starts at step 0" in train(data, *flags, "--out", second, model=False)
    assert losses(second)[0] < losses(first)[:5].mean() - 0.1
    assert [step for step, in metrics(second, ["step"])] == [1, 2, 3, 4]
    entry = lineage(second)[0]
    assert entry["event"] == "init-from" and entry["from"] == str(source)
    twice(data, tmp_path, *flags, half=2, total=4)
    train(data, *flags, "--attn", "ssmax", "--out", other, model=False)
    again = ["--init-from", checkpoint(other, 4), *flags[2:], "--dry-run", "--attn"]
    assert "--attn ssmax+s=2: the model keeps the s" in train(data, *again, "ssmax+s=2", model=False)
    assert "keeps the s" not in train(data, *again, "ssmax+s=2+fixed", model=False)
    assert "keeps the s" not in train(data, *flags, "--dry-run", "--attn", "ssmax+s=2", model=False)
    assert "--model" in train(data, *flags, "--model", MODEL.replace("ffn=24", "ffn=32"), code=2)
    runs = tmp_path / "of the checkpoint", tmp_path / "of the run"
    for out, given in zip(runs, (source, first)):
        train(data, "--init-from", given, *flags[2:], "--steps", 2, "--out", out, model=False)
    assert_same_run(*runs, 2)
    assert lineage(runs[1])[0]["from"] == str(source)


def test_a_run_without_a_checkpoint_starts_over_with_its_own_arguments(data, tmp_path):
    """A run killed before its first checkpoint uses its run.json; a rejected contradiction changes nothing."""
    out, whole = tmp_path / "killed", tmp_path / "whole"
    flags = ["--seed", 5, *validation(data), "--steps", 6]
    train(data, *flags, "--out", whole)
    train(data, *flags, "--out", out)
    shutil.rmtree(out / "ckpt")
    before = metrics(out)
    assert "--seed" in train(data, "--out", out, "--resume", "--seed", 6, code=2)
    assert metrics(out) == before
    text = subprocess.run([TRAIN, "--out", out, "--resume"], capture_output=True, text=True, env=environment(), cwd="/",
                          check=True).stdout
    assert "starts over" in text
    assert_same_run(out, whole, 6)


def test_what_differs_from_the_loaded_model_is_kept(data, tmp_path):
    """By a run that starts over, and by one that is repeated from run.json: theta, cap, normalizer, and a switch whose
    list is longer than the model. A repeated run does not resume another, nor trust what the first one did."""
    source, whole, out, again = (tmp_path / name for name in ("source", "whole", "out", "again"))
    train(data, "--rope-theta", 500, "--logit-softcap", 3, "--attn", "ssmax", "--steps", 2, "--out", source)
    flags = ["--init-from", source, "--attn", "softmax", "--rope-theta", 10000, "--logit-softcap", 0, "--seq-len", 8,
             "--batch", 4, "--steps", 6, "--attn-switch", "3:softmax,softmax,ssmax-pn"]
    for folder in (whole, out):
        train(data, *flags, "--out", folder, model=False)
    shutil.rmtree(out / "ckpt")
    assert "starts over" in train(data, "--out", out, "--resume", "--follow-links", 1, model=False)
    assert_same_run(out, whole, 6)
    text = subprocess.run([TRAIN, "--config", out / "run.json", "--out", again, "--print-config"], capture_output=True,
                          text=True, check=True, env=environment(), cwd="/").stdout
    assert "# resume = " in text and "# follow-links = " in text
    subprocess.run([TRAIN, "--config", out / "run.json", "--out", again], check=True, env=environment(), cwd="/")
    assert_same_run(again, whole, 6)


def test_a_resume_on_a_cpu_keeps_the_flags_of_gpus(data, tmp_path):
    train(data, "--steps", 2, "--out", tmp_path)
    path = tmp_path / "run.json"
    run = json.loads(path.read_text())
    run["arguments"] |= {"zero": True, "reduce-dtype": "bf16"}
    path.write_text(json.dumps(run))
    train(data, "--steps", 3, "--out", tmp_path, "--resume")
    kept = json.loads(path.read_text())["arguments"]
    assert (kept["zero"], kept["reduce-dtype"], kept["steps"]) == (True, "bf16", 3)


def test_a_stop_takes_effect_within_a_step(tmp_path):
    """A step that would take minutes is abandoned at once. For validations: test_stops.py"""
    out, flags = tmp_path / "out", ["--batch", 1, "--total-batch-tokens", 8_000_000]
    write_shard(tmp_path / "d_train_000000.bin", np.zeros(8_000_009, "<u2"))
    process = start(command(tmp_path, *flags, "--steps", 3, "--out", out))
    wait_for_line(process, "starts at step")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    asked = time.time()
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 75 and time.time() - asked < 10, text
    assert steps(out) == [0]


def test_a_glob_with_a_space(tmp_path):
    folder = tmp_path / "my data"
    folder.mkdir()
    make_data(folder)
    train(folder, "--steps", 1)


# ---------------------------------------------------------------- changed flags

def test_weight_decay_may_change(data, tmp_path):
    """The new value holds from the next step on, and nothing else changes."""
    for name in ("one", "two", "kept"):
        train(data, "--steps", 4, "--out", tmp_path / name)
    for name, decay in {"one": 0.1, "two": 5}.items():
        train(data, "--steps", 5, "--out", tmp_path / name, "--resume", "--weight-decay", decay)
    train(data, "--steps", 5, "--out", tmp_path / "kept", "--resume")
    assert_same_run(tmp_path / "one", tmp_path / "kept", 5)
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two"), "the last loss is from before the last update"
    before, one, two = (embedding(tmp_path / name, step) for name, step in (("one", 4), ("one", 5), ("two", 5)))
    np.testing.assert_allclose(one - two, 0.01 * (5 - 0.1) * before, atol=1e-6)
    changed = run_json(tmp_path / "two")["history"][-1]["changed"]
    assert changed["weight-decay"] == {"from": 0.1, "to": 5}


@pytest.mark.parametrize("flags, jump", [(["--steps", 20], "from 0.0055 at step 10 to 0.01 at step 11"),
                                         (["--steps", 20, "--schedule", "constant"], "to 0.01 at step 11"),
                                         (["--steps", 20, "--lr", 0.05], "from 0.0055 at step 10 to 0.05 at step 11"),
                                         (["--steps", 20, "--warmup", 1000], "to 0.00011 at step 11"),
                                         (["--steps", 11], ""), (["--steps", 11, "--schedule", "linear"], "")],
                         ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else "")
def test_a_learning_rate_that_jumps(data, tmp_path, flags, jump):
    """It is noted with the values before and after; --dry-run says the step as well, and writes nothing."""
    begin = ["--steps", 10, "--schedule", "wsd", "--warmup", 0, "--out", tmp_path]
    train(data, *begin)
    before = (tmp_path / "run.json").read_bytes()
    text = train(data, *flags, "--out", tmp_path, "--resume", "--dry-run", model=False)
    assert (tmp_path / "run.json").read_bytes() == before
    assert "at step 10, from" in text and f"--steps {flags[1]} (was 10)" in text
    assert ("the learning rate jumps" in text) == bool(jump) and jump in text


def test_the_decay_may_change(data, tmp_path):
    """As if the run had started with the new values, because the old decay had not begun."""
    begin = ["--steps", 10, "--schedule", "wsd", "--warmup", 0, "--ckpt-every", 4, "--keep", 0, "--out"]
    sqrt = ["--decay-frac", 0.4, "--decay-shape", "sqrt"]
    train(data, *begin, tmp_path / "old")
    text = train(data, *begin, tmp_path / "whole", *sqrt)
    assert "wsd after 0 steps of warmup, sqrt decay in the last 4 steps" in text
    np.testing.assert_allclose([rate for rate, in metrics(tmp_path / "whole", ["lr"])],
                               [0.01] * 7 + [0.001 + 0.009 * (1 - (i / 4) ** 0.5) for i in range(1, 4)], rtol=1e-6)
    for name, steps, flags in (("old", (8, 10), sqrt), ("whole", (10,), [])):
        resumed = tmp_path / f"{name} resumed"
        shutil.copytree(tmp_path / name, resumed)
        for step in steps:
            shutil.rmtree(checkpoint(resumed, step))
        train(data, *begin[:2], "--out", resumed, "--resume", *flags)
        assert_same_run(tmp_path / "whole", resumed, 10)
    arguments = run_json(tmp_path / "old resumed")["arguments"]
    assert (arguments["decay-frac"], arguments["decay-shape"]) == (0.4, "sqrt")


def test_lr_scale_may_change(data, tmp_path):
    """The new scales hold from the next step on; without the flag, a resumed run keeps its own."""
    scales = ["--lr-scale", "*embed*:0.3,*norm*:7"]
    for name, steps, flags in (("whole", 5, scales), ("kept", 4, scales), ("one", 4, []), ("two", 4, [])):
        train(data, "--steps", steps, *flags, "--out", tmp_path / name)
    text = train(data, "--steps", 5, "--out", tmp_path / "kept", "--resume")
    says(text, "  x 0.3   *embed*: 1 tensor, 1,552 parameters\n", "  x 7     *norm*: 3 tensors, 48 parameters\n")
    assert_same_run(tmp_path / "whole", tmp_path / "kept", 5)
    train(data, "--steps", 5, "--out", tmp_path / "one", "--resume", "--lr-scale", "*:0.5")
    train(data, "--steps", 5, "--out", tmp_path / "two", "--resume", "--lr", 0.005)
    assert_same_checkpoint(tmp_path / "one", tmp_path / "two", 5)
    changed = run_json(tmp_path / "one")["history"][-1]["changed"]
    assert changed["lr-scale"] == {"from": None, "to": "*:0.5"}


# ---------------------------------------------------------------- the history in run.json

def test_run_json_keeps_its_history(data, tmp_path):
    """One entry for each start and resume, with the flags that changed; a run of version 0.2 has no history."""
    out, path = ["--out", tmp_path, "--resume", "--steps"], tmp_path / "run.json"
    train(data, *out, 4)
    train(data, *out, 8, "--lr", 0.02, "--batch", 2, "--attn-switch", "6:ssmax", processes=2)
    run = json.loads(path.read_text())
    first, second = run["history"]
    assert (first["step"], first["event"], first["ranks"]) == (0, "start", 1) and "changed" not in first
    assert (second["step"], second["event"], second["ranks"]) == (4, "resume", 2)
    assert all(entry["commit"] == run["commit"] and entry["program"] == "train_gpt2" for entry in run["history"])
    assert first["time"] <= second["time"] and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", second["time"])
    assert second["changed"] == {"steps": {"from": 4, "to": 8}, "lr": {"from": 0.01, "to": 0.02},
                                 "batch": {"from": 4, "to": 2}, "attn-switch": {"from": None, "to": "6:ssmax"}}
    assert run["lineage"][1]["val_loss_before"] is None, "a number, or null if it was not measured"
    old = {key: value for key, value in run.items() if key != "history"}
    long = [first, second] + 2000 * [{"step": 8, "event": "resume"}, {"step": 8, "event": "resume", "changed": {}}]
    for history, omitted in (None, 0), (long, 2 + 4000 + 1 - 200):
        path.write_text(json.dumps(old | {"history": history} if history else old))
        train(data, *out, 10)
        run = json.loads(path.read_text())
        assert run["history"][-1]["step"] == 8 and run["history"][-1]["changed"]["steps"] == {"from": 8, "to": 10}
        assert run.get("history_omitted", 0) == omitted
        shutil.rmtree(checkpoint(tmp_path, 10))
    assert run["history"][0] == first and len(run["history"]) == 200
    for wrong in ({"history": 5}, {"history": [1]}, {"history": [{"step": "1"}]}, {"lineage": [1]}):
        path.write_text(json.dumps(old | wrong))
        assert [*wrong][0] in train(data, *out, 10, code=3)

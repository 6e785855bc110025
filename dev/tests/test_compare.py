"""scripts/compare.py: the runs that it starts, stops and resumes, and its table and picture."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from trainer import MODEL, ROOT, TRAIN, assert_same_run, environment, metrics

sys.path.insert(0, str(ROOT / "scripts"))
import compare  # noqa: E402

EMPTY = "relu-l1+offset=-logn"             # ln n exceeds every fresh score: only rows with one key are not all-zero
OVERFLOWS = "exp+scale=const:1e9"


def words(data, out, *more, steps=4):
    flags = ["--data", data, "--out", out, "--model", MODEL, "--steps", steps, "--batch", 4, "--seq-len", 8, "--val-tokens", 200]
    return [str(word) for word in (sys.executable, ROOT / "scripts/compare.py", *flags, *more)]


def run(*args, code=0, **how):
    result = subprocess.run(words(*args, **how), capture_output=True, text=True, env=environment(TRAIN_GPT2=str(TRAIN)), timeout=120)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def rows(out):
    """The table's rows as {name: [place, loss, difference, all-zero rows, outcome]}, in order."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (out / "comparison.md").read_text().splitlines()[2:]]
    return {name.strip("`"): [place, *rest] for place, name, *rest in cells}


@pytest.fixture(scope="module")
def compared(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    run(data, out, "--attn", OVERFLOWS, "softmax", EMPTY, "gau/ssmax", "--lr", 0.01)
    return out


def test_names_come_from_the_table():
    text = (ROOT / "attention/normalizer.h").read_text()
    assert compare.presets() == re.findall(r"^ +X\(([a-z0-9A-Z-]+),", text, re.M)


def test_final_losses_are_sorted_and_outcomes_shown(compared):
    found = rows(compared)
    last = {name: metrics(compared / name, ["val_loss"])[-1][0] for name in ("softmax", EMPTY, "gau/ssmax")}
    assert list(found) == [*sorted(last, key=last.get), OVERFLOWS]
    assert [row[0] for row in found.values()] == ["1", "2", "3", "4"]
    for name, loss in last.items():
        assert found[name][1:3] == [f"{loss:.4f}", f"{loss - last['softmax']:+.4f}"] and found[name][4] == ""
    assert found[OVERFLOWS][1:] == ["", "", "", "exit 5 at step 1"]
    share = float(re.match(r"(\S+) % \(most: \S+ %\)$", found[EMPTY][3])[1])
    assert 80 < share <= 100 and found["softmax"][3] == ""


def test_the_numbers_and_the_flags(compared):
    results = json.loads((compared / "comparison.json").read_text())
    wanted = [[tokens, loss] for tokens, loss in metrics(compared / EMPTY, ["tokens", "val_loss"])]
    assert results[EMPTY]["curve"] == wanted and len(wanted) == 4 and results[OVERFLOWS]["loss"] is None
    config = json.loads((compared / "gau/ssmax/ckpt/step-00000004/config.json").read_text())
    assert config["attention_normalizer"]["block"] == "gau" and config["attention_normalizer"]["name"] == "ssmax"
    assert max(lr for lr, in metrics(compared / "softmax", ["lr"])) <= 0.01 * 4 / 50 * 1.001, "--lr reaches the trainer"


def test_the_picture(compared):
    assert (compared / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    results = json.loads((compared / "comparison.json").read_text())
    *panels, bars = compare.picture(results).axes
    assert [[line.get_label() for line in axes.lines] for axes in panels] == [
        ["gau/ssmax", "softmax"], ["softmax"], ["softmax"], ["softmax"], [EMPTY, "softmax"],
        [OVERFLOWS + " (exit 5 at step 1)", "softmax"]]
    done = [name for name in results if name != OVERFLOWS]
    assert [label.get_text() for label in bars.get_yticklabels()] == done
    over = [results[name]["loss"] - results["softmax"]["loss"] for name in done]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx(over)


@pytest.mark.drawn(2, of="second calls")
def test_finished_runs_are_kept_and_more_steps_resume_them(data, tmp_path):
    attn = ["--attn", "softmax", OVERFLOWS]
    run(data, tmp_path, *attn)
    before = (tmp_path / "comparison.md").read_text(), [(tmp_path / f"{name}.log").read_text() for name in attn[1:]]
    run(data, tmp_path, *attn)
    assert before == ((tmp_path / "comparison.md").read_text(), [(tmp_path / f"{name}.log").read_text() for name in attn[1:]])
    run(data, tmp_path, *attn, steps=6)
    assert "resumes at step 4" in (tmp_path / "softmax.log").read_text() and len(metrics(tmp_path / "softmax")) == 6


@pytest.mark.drawn(2, of="second calls")
def test_a_failed_run_is_named_and_the_others_continue(data, tmp_path):
    text = run(data, tmp_path, "--attn", "ssmx", "softmax", code=1)
    assert rows(tmp_path)["ssmx"][4].startswith("exit 2: --attn ssmx: unknown normalizer") and "exit 2" in text
    assert rows(tmp_path)["softmax"][1]


@pytest.mark.drawn(2, of="second calls")
def test_a_stopped_comparison_resumes(data, tmp_path):
    flags, steps = ["--attn", "softmax", "ssmax", "--jobs", 1, "--schedule", "constant"], 1500
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    process = subprocess.Popen(words(data, stopped, *flags, steps=steps), env=environment(TRAIN_GPT2=str(TRAIN)),
                               stderr=subprocess.PIPE, text=True)
    file, end = stopped / "softmax/metrics.jsonl", time.monotonic() + 60
    while not (file.exists() and file.stat().st_size > 1000):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert "Rerun the same command to resume" in process.communicate(timeout=60)[1] and process.returncode == 75
    assert len(os.listdir(stopped / "softmax/ckpt")) == 1
    assert not (stopped / "ssmax").exists() and not (stopped / "comparison.md").exists()
    assert 0 < len(metrics(stopped / "softmax")) < steps
    run(data, stopped, *flags, steps=steps)
    run(data, whole, *flags, steps=steps)
    assert "resumes at step" in (stopped / "softmax.log").read_text()
    for name in "softmax", "ssmax":
        assert_same_run(stopped / name, whole / name, steps)

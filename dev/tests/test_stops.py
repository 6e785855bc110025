"""A run that is stopped anywhere and resumed equals one that never stopped, in metrics with validation losses, samples,
best checkpoint and lineage. Also changes of normalizer across restarts of the same command and returns to earlier
checkpoints.

TRAIN_GPT2_FAULTS names another build with fault points (dev/faults), which place the stops exactly.
"""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import byte_text
from trainer import (MODEL, assert_same_run, checkpoint, command, environment, lineage, metrics, run_json, steps, train)

TOTAL = 6


@pytest.fixture(scope="module")
def weights(data, tmp_path_factory):
    """A checkpoint to start from."""
    out = tmp_path_factory.mktemp("weights") / "out"
    train(data, "--steps", 5, "--attn", "ssmax+norm=L", "--out", out)
    return checkpoint(out, 5)


def switches(out):
    return [(entry["step"], entry["from"], entry["attn"]) for entry in lineage(out)[1:]]


def state(out, step):
    return json.loads((checkpoint(out, step) / "state.json").read_text())


def assert_same(whole, out, last=TOTAL):
    assert_same_run(whole, out, last)
    assert lineage(out) == lineage(whole)
    assert steps(out) == steps(whole)
    assert (out / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    assert state(out, last) == state(whole, last) and "owed" not in state(out, last)


def report(data):
    """Flags of a run with something due at most steps: validations of two batches, samples, the best and the newest
    checkpoint."""
    return ["--steps", TOTAL, "--val-data", data / "d_val_000000.bin", "--val-every", 2, "--val-tokens", 64,
            "--sample-every", 2, "--norms-every", 1, "--keep", 1, "--keep-best", "--ckpt-every", 3, "--lr", 0.05,
            "--beta2", 0.999, "--warmup", 2]


CASES = {
    "switch": ["--attn-switch", "3:ssmax-bias"],
    "scalars that start again": ["--attn", "ssmax", "--attn-switch", "3:ssmax-fixed"],
    "switch at a checkpoint": ["--attn-switch", "3:ssmax"],
    "switch at the first step": ["--attn-switch", "0:ssmax"],
    "init-from": ["--init-from", "WEIGHTS", "--attn", "softmax"],
    "init-from, another L": ["--init-from", "WEIGHTS", "--attn", "softmax", "--norm-length", 64],
    "two ranks": ["--attn-switch", "3:ssmax", "--batch", 2, "--val-tokens", 32],
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES)
def test_a_stop_anywhere(data, weights, faults, tmp_path, case):
    """Stops at each place where the run checks for a signal. Each stopped run is resumed by the command that started
    it."""
    model = "init-from" not in case
    words = [*report(data), *(weights if word == "WEIGHTS" else word for word in CASES[case])]
    if case != "switch at a checkpoint":
        words += ["--ckpt-every", 0]
    if not model:
        words += ["--seq-len", 8, "--batch", 4]
    how = {"program": faults, "model": model, "processes": 2 if case == "two ranks" else 1}
    whole = tmp_path / "whole"
    train(data, *words, "--out", whole, **how)

    def stop_and_resume(n):
        out = tmp_path / str(n)
        flags = [*words, "--out", out, "--resume"]
        result = subprocess.run(command(data, *flags, **{key: how[key] for key in how}), capture_output=True, text=True,
                                env=environment(FAULT_STOP=str(n)))
        if result.returncode == 0:
            return False
        assert result.returncode == 75, result.stdout + result.stderr
        assert "resume with --resume" in result.stdout
        train(data, *flags, **how)
        assert_same(whole, out)
        return True

    places = (range(1, 24) if case in ("switch", "scalars that start again") else [5, 8, 11] if case == "two ranks"
              else [1, 3, 6, 7, 8, 9, 10, 23])
    with ThreadPoolExecutor(2) as pool:
        stopped = list(pool.map(stop_and_resume, places))
    assert all(stopped) if case == "two ranks" else not stopped[-1] and stopped.count(True) >= 7


def test_stopped_again_and_again(data, faults, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    words = [*report(data), "--attn-switch", "3:ssmax"]
    train(data, *words, "--out", whole, program=faults)
    stops = 0
    while subprocess.run(command(data, *words, "--out", out, "--resume", program=faults), capture_output=True,
                         env=environment(FAULT_STOP="6")).returncode:
        stops += 1
        assert stops < 20
    assert stops > 2
    assert_same(whole, out)


def stop_in_the_first_validation(data, faults, out):
    train(data, *report(data), "--out", out, program=faults, env={"FAULT_STOP": "3"}, code=75)
    assert steps(out) == [2] and [step for step, in metrics(out, ["step"])] == [1]
    assert "owed" in state(out, 2)


def test_killed_after_an_owed_validation(data, faults, tmp_path):
    """The line of the step is already written, but no checkpoint has best_step yet, so the validation is repeated."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    train(data, *report(data), "--out", whole)
    stop_in_the_first_validation(data, faults, out)
    kept = tmp_path / "kept"
    shutil.copytree(out / "ckpt", kept)
    train(data, *report(data), "--out", out, "--resume", "--steps", 4)
    shutil.rmtree(out / "ckpt")
    shutil.copytree(kept, out / "ckpt")
    (out / "samples.txt").unlink()
    train(data, *report(data), "--out", out, "--resume")
    assert_same(whole, out)


def test_other_flags_on_resume_decide_what_is_due(data, faults, tmp_path):
    """The current flags decide what is due at the step."""
    out = tmp_path / "out"
    stop_in_the_first_validation(data, faults, out)
    train(data, *report(data), "--out", out, "--resume", "--val-every", 4, "--sample-every", 0)
    assert [step for step, loss in metrics(out, ["step", "val_loss"]) if loss] == [4]
    assert "owed" not in state(out, TOTAL) and not (out / "samples.txt").exists()


def test_stopped_in_the_last_validation(data, faults, tmp_path):
    """All steps are done, but the run is not."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    words = [*report(data), "--steps", 4]
    train(data, *words, "--out", whole)
    text = train(data, *words, "--out", out, program=faults, env={"FAULT_STOP": "8"}, code=75)
    assert "stopped by a signal at step 4, before its validation was complete" in text
    assert "resumes at step 4, whose validation is still due" in train(data, *words, "--out", out, "--resume")
    assert_same(whole, out, 4)
    text = train(data, *report(data), "--steps", 2, "--out", out, "--resume")
    assert "already at step 4; pass a --steps larger than 4" in text


# ---- changes of normalizer


def two_switches(data, out):
    """Switches to SSMax at step 3 and, by a flag of a later command, to softmax1 at step 7; every checkpoint is
    kept."""
    flags = ["--keep", 0, "--ckpt-every", 1, "--val-data", data / "d_val_000000.bin", "--val-tokens", 64,
             "--val-every", 4, "--sample-every", 4]
    train(data, *flags, "--attn-switch", "3:ssmax", "--steps", 5, "--out", out)
    train(data, *flags, "--attn-switch", "7:softmax1", "--steps", 9, "--out", out, "--resume")
    return flags


def go_back(out, step):
    for newer in steps(out):
        if newer > step:
            shutil.rmtree(checkpoint(out, newer))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("back", [0, 2, 3, 5])
@pytest.mark.parametrize("flag", [[], ["--attn-switch", "3:ssmax"], ["--attn-switch", "7:softmax1"]],
                         ids=["no flag", "the first", "the second"])
def test_back_to_before_two_switches(data, tmp_path, back, flag):
    """Any of the run's commands repeats its history, and a kill along the way loses none of it."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    flags = two_switches(data, whole)
    shutil.copytree(whole, out)
    if back:
        go_back(out, back)
    else:
        shutil.rmtree(out / "ckpt")
    resume = [*flags, *flag, "--out", out, "--resume", "--steps"]
    (out / "samples.txt").unlink()
    text = train(data, *resume, back + 1)
    assert "switch    to softmax1 at step 7, repeated from run.json" in text
    go_back(out, max(back, 1))
    train(data, *resume, 9)
    assert_same_run(whole, out, 9)
    assert lineage(out) == lineage(whole) and "to_repeat" not in run_json(out)


def test_a_new_switch_replaces_later_ones(data, tmp_path):
    """A new switch before those of the history replaces them from its step on, with a warning."""
    out = tmp_path / "out"
    flags = two_switches(data, out)
    go_back(out, 2)
    text = train(data, *flags, "--attn-switch", "5:sigmoid", "--out", out, "--resume", "--steps", 9)
    assert "the earlier switch to softmax1 at step 7 will not be repeated" in text
    assert "the change to ssmax at step 3, which" not in text
    assert switches(out) == [(3, "softmax", "ssmax"), (5, "ssmax", "sigmoid")]


def test_a_switch_to_the_same_normalizer(data, tmp_path):
    """A warning says that only the warmup restarts. The command can still be restarted at any step."""
    said = "--attn-switch 4:ssmax: ssmax is already the normalizer at that step; only the learning-rate warmup restarts"
    flags = ["--attn", "ssmax", "--attn-switch", "4:ssmax", "--out", tmp_path, "--resume", "--steps"]
    assert said in train(data, *flags, 2)
    assert said in train(data, *flags, 5)
    assert "already the normalizer" not in train(data, *flags, 6)
    assert switches(tmp_path) == [(4, "ssmax", "ssmax")]
    plan = ["--dry-run", "--out", tmp_path, "--resume", "--steps", 9, "--attn-switch"]
    assert "ssmax is already the normalizer" in train(data, *plan, "8:ssmax")
    text = train(data, *plan, "8:ssmax-fixed")
    assert "already the normalizer" not in text and "keeps the s" not in text
    assert "--attn-switch 8:ssmax+s=2: the model keeps the s that it has" in train(data, *plan, "8:ssmax+s=2")


def test_a_pending_switch_can_be_postponed(data, tmp_path):
    out = tmp_path / "out"
    train(data, "--attn-switch", "6:ssmax", "--steps", 4, "--out", out)
    train(data, "--attn-switch", "8:softmax1", "--steps", 10, "--out", out, "--resume")
    assert switches(out) == [(8, "softmax", "softmax1")]


@pytest.mark.parametrize("steps, warmup", [(1, 0), (29, 2), (50_000, 1000)])
def test_the_default_warmup(data, tmp_path, steps, warmup):
    """A resumed run keeps the value it started with."""
    model = ["--model", MODEL, "--seq-len", 8]
    text = train(data, *model, "--steps", steps, "--dry-run", model=False)
    assert f"after {warmup:,} step" in text and "warning" not in text
    if steps < 50:
        out = ["--out", tmp_path, "--steps"]
        train(data, *model, *out, steps, model=False)
        train(data, *out, 40, "--resume", model=False)
        assert run_json(tmp_path)["arguments"]["warmup"] == warmup


@pytest.mark.parametrize("flags, count", [
    (["--steps", 5000, "--ckpt-every", 10, "--keep", 0], 500), (["--steps", 5000, "--ckpt-every", 10], 3),
    (["--steps", 5001, "--ckpt-every", 10, "--keep", 0], 501), (["--steps", 5000, "--ckpt-every", 10, "--keep", 7], 8),
    (["--steps", 5000, "--keep-best", "--val-every", 100], 4), (["--steps", 1000], 1), (["--steps", 0], 1),
    (["--steps", 10, "--keep", 0, "--ckpt-every", 3, "--val-every", 2, "--keep-best"], 7),
    (["--steps", 10, "--keep", 0, "--ckpt-every", 0], 1),
    (["--steps", 10 ** 12, "--keep", 0, "--ckpt-every", 1], 10 ** 12)], ids=lambda x: " ".join(map(str, x))
    if isinstance(x, list) else "")
def test_the_disk_of_the_whole_run(data, tmp_path, flags, count):
    text = train(data, "--val-data", data / "d_val_000000.bin", *flags, "--out", tmp_path / "out", "--dry-run")
    at_once = re.search(r"per checkpoint, up to ([\d,]+) at once", text)[1]
    assert int(at_once.replace(",", "")) == count
    assert ("warning" in text and f"up to {at_once} checkpoints" in text) == (count == 10 ** 12)


def test_the_disk_of_a_resumed_run(data, tmp_path):
    """Counts what comes in addition to the checkpoints that are there. A real start prints the same."""
    out = ["--out", tmp_path, "--ckpt-every", 2]
    assert "up to 3 at once" in train(data, *out, "--steps", 6)
    for keep, count in ((2, 1), (3, 2), (5, 4), (0, 7)):
        text = train(data, *out, "--steps", 20, "--keep", keep, "--resume", "--dry-run")
        assert f"up to {count} more at once" in text
    train(data, *out, "--steps", 20, "--keep", 0, "--resume")
    assert len(steps(tmp_path)) == 2 + 7


def test_keep_best_without_validation(data):
    plan = ["--dry-run", "--steps", 1, "--warmup", 0, "--keep-best"]
    assert ("warning: --keep-best selects no checkpoint, because there is no validation: --val-every is 0"
            in train(data, *plan, *report(data), "--val-every", 0))
    assert "--val-data is missing" in train(data, *plan)
    assert "warning" not in train(data, *plan, *report(data))


def test_a_warmup_that_never_ends(data):
    plan = ["--dry-run", "--model", "layers=1,heads=2,channels=16,ffn=24,vocab=97", "--seq-len", 8]
    text = train(data, *plan, "--warmup", 1000, model=False)
    assert "warning: --warmup 1000 is not shorter than --steps 1000: " in text
    assert "--warmup 100." in text and "never decays" not in text
    text = train(data, *plan, "--schedule", "cosine", "--warmup", 1001, model=False)
    assert "rises during the whole run and never decays" in text
    assert "warning" not in train(data, *plan, "--warmup", 999, model=False)
    late = ["--attn-switch", "600:ssmax", "--warmup"]
    text = train(data, *plan, *late, 400, model=False)
    assert ("after the switch to ssmax at step 600, the learning-rate warmup of 400 steps restarts and does not end "
            "before the run does (--steps 1000)" in text)
    assert "warning" not in train(data, *plan, *late, 399, model=False)


# ---- the run folder


def wait_for(process, condition):
    start = time.time()
    while not condition():
        assert process.poll() is None and time.time() - start < 120
        time.sleep(0.01)


def last_step(out):
    return max(steps(out), default=0)


@pytest.mark.parametrize("removed", ["", "copied", "run.json", "metrics.jsonl", "lock"])
def test_the_run_folder_is_removed_mid_run(data, tmp_path, removed):
    """The folder, or a file in it, is removed, or a copy takes its place; the next checkpoint restores what a resume
    needs, with all metrics."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    flags = ["--ckpt-every", 20, "--keep", 2]
    process = subprocess.Popen(command(data, *flags, "--steps", 10 ** 6, "--out", out), stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True, env=environment())
    wait_for(process, lambda: last_step(out) >= 20)
    if removed == "copied":
        with paused_between_saves(process, out):
            out.rename(tmp_path / "moved")
            shutil.copytree(tmp_path / "moved", out)
    elif removed:
        (out / removed).unlink()
    else:
        shutil.rmtree(out, ignore_errors=True)      # a save may happen meanwhile
        shutil.rmtree(out, ignore_errors=True)
    at = last_step(out)
    wait_for(process, lambda: last_step(out) >= at + 40 and (out / "run.json").exists())
    assert "is using this run folder" in train(data, *flags, "--steps", 5, "--out", out, "--resume", code=7)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 75 and "was removed during this run" in errors, errors
    total = last_step(out) + 3
    train(data, *flags, "--steps", total, "--out", out, "--resume")
    train(data, *flags, "--steps", total, "--out", whole)
    assert_same_run(whole, out, total)


@contextlib.contextmanager
def paused_between_saves(process, out):
    """Pauses the process while it saves nothing. It saves checkpoints and samples only at multiples of 10 steps."""
    between, end = False, time.time() + 120
    while not between:
        time.sleep(0.01)
        assert process.poll() is None and time.time() < end
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)     # a thread may be in a system call
        step = metrics(out, ["step"])[-1][0]
        if between := 2 <= step % 10 <= 7:
            yield
        process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("how", ["folder", "lock"])
def test_the_run_folder_is_out_of_reach_mid_run(data, tmp_path, how):
    """While a file takes the folder's place, or the lock is not a file, saves fail and training continues. Once the
    folder is back, saves work again."""
    whole, out, log = tmp_path / "whole", tmp_path / "share/out", tmp_path / "log"
    gone = out.parent if how == "folder" else out / "lock"
    away = tmp_path / "away"
    flags = ["--ckpt-every", 20, "--sample-every", 30, "--keep", 2]
    with open(log, "w") as errors:
        process = subprocess.Popen(command(data, *flags, "--steps", 10 ** 6, "--out", out), stdout=subprocess.DEVNULL,
                                   stderr=errors, env=environment())
    try:
        wait_for(process, lambda: last_step(out) >= 20)
        with paused_between_saves(process, out):
            gone.rename(away)
            gone.touch() if how == "folder" else gone.symlink_to("/dev/full")
        wait_for(process, lambda: log.read_text().count("Training continues; earlier checkpoints are intact") >= 3)
        wait_for(process, lambda: "is lost. Training continues." in log.read_text())
        with paused_between_saves(process, away / "out" if how == "folder" else out):
            gone.unlink()
            away.rename(gone)
            at = last_step(out)
        wait_for(process, lambda: last_step(out) >= at + 40)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "have been restored" not in log.read_text()
    total = last_step(out) + 3
    train(data, *flags, "--steps", total, "--out", out, "--resume")
    train(data, *flags, "--steps", total, "--out", whole)
    assert_same_run(whole, out, total)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_after_a_failed_save(data, faults, tmp_path, processes):
    """It tries to save again, and does not claim a checkpoint that does not exist."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    flags = ["--steps", 4, "--ckpt-every", 1]
    how = {"program": faults, "processes": processes, "env": {"FAULT_STOP": "3"}}
    links = [checkpoint(out, step) for step in (1, 2)]
    links[0].parent.mkdir(parents=True)
    for link in links:                 # in the place of the folders
        link.symlink_to("/nonexistent")
    text = train(data, *flags, "--out", out, code=4, **how)
    assert text.count("Training continues; earlier checkpoints are intact") == 2 and "step     2/4" in text, text
    assert text.count("Remove the link") == 3 and "stopped by a signal" not in text, text
    for link in links:
        link.unlink()
    text = train(data, *flags, "--out", out, "--resume", code=75, **how)
    assert ("the run starts over" in text and steps(out) == [1, 2]
            and "stopped by a signal at step 2; resume with --resume" in text), text
    train(data, *flags, "--out", out, "--resume", processes=processes)
    train(data, *flags, "--out", whole, processes=processes)
    assert_same_run(whole, out, 4)


def test_another_run_took_the_folder(data, tmp_path):
    """The folder then belongs to that run: this one ends and writes nothing into it."""
    out = tmp_path / "out"
    flags = ["--steps", 10 ** 6, "--ckpt-every", 20, "--out", out]
    process = subprocess.Popen(command(data, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment())
    wait_for(process, lambda: last_step(out) >= 20)
    process.send_signal(signal.SIGSTOP)
    shutil.rmtree(out)
    other = subprocess.Popen(command(data, *flags, "--seed", 2), stdout=subprocess.DEVNULL, env=environment())
    try:
        wait_for(other, lambda: last_step(out) >= 20)
        process.send_signal(signal.SIGCONT)
        assert "is using this run folder" in process.communicate(timeout=60)[1] and process.returncode == 7
        assert run_json(out)["arguments"]["seed"] == 2
    finally:
        process.kill()
        other.kill()
        other.wait()


def test_metrics_are_synced_before_a_checkpoint_is_committed(data, faults, tmp_path):
    """fsync fails at one point of a run of one step, which only warns. A kill there leaves no checkpoint yet."""
    for n in range(1, 60):
        out = tmp_path / str(n)
        result = subprocess.run(command(data, "--steps", 1, "--out", out, program=faults), capture_output=True,
                                text=True, env=environment(FAULT_AT=str(n), FAULT_KIND="eio"))
        if "metrics.jsonl: fsync failed" in result.stderr:
            break
    assert re.search("warning: .*metrics.jsonl: fsync failed", result.stderr) and result.returncode == 0
    assert steps(out) == [1]
    train(data, "--steps", 1, "--out", tmp_path / "killed", program=faults, code=137,
          env={"FAULT_AT": str(n), "FAULT_KIND": "kill"})
    assert len(metrics(tmp_path / "killed")) == 1 and steps(tmp_path / "killed") == []


@pytest.mark.parametrize("keep, attempts", [(0, 3), (2, 2)])
def test_a_tokenizer_is_taken_from_where_it_is_whole(data, tmp_path, keep, attempts):
    """If one file cannot be copied, the next save does not take the rest for all of it, but tries again, as long as
    the checkpoint that has it exists."""
    folder, out = shutil.copytree(data, tmp_path / "data"), tmp_path / "out"
    byte_text.write_tokenizer(folder)
    flags = ["--out", out, "--model", MODEL.replace("vocab=97", "vocab=300"), "--ckpt-every", 1, "--keep", keep]
    train(folder, *flags, "--steps", 1)
    (folder / "tokenizer.json").unlink()
    (checkpoint(out, 1) / "chat_template.jinja").mkdir()
    text = train(folder, *flags, "--steps", 4, "--resume")
    assert text.count("step-00000001/chat_template.jinja: ") == attempts, text
    assert (checkpoint(out, 4) / "tokenizer.json").exists()


@pytest.mark.parametrize("name, target, wrong", [
    ("tokenizer.json", "outside", True), ("tokenizer.json", "inside", False), ("tokenizer.json", "snapshots", False),
    ("tokenizer.json", "blobs that are a link", True), ("tokenizer_config.json", "outside", True),
    ("chat_template.jinja", "outside", True)])
def test_a_link_does_not_carry_a_file_into_a_checkpoint(data, tmp_path, name, target, wrong):
    """A checkpoint is published. Hugging Face's cache is full of links, and stays usable."""
    folder, out, model = tmp_path / "hub/snapshots/1", tmp_path / "out", MODEL.replace("vocab=97", "vocab=300")
    shutil.copytree(data, folder)
    byte_text.write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    real = {"outside": tmp_path / "private", "inside": folder / "sub"}.get(target, tmp_path / "hub/blobs")
    if target == "blobs that are a link":
        real.symlink_to(tmp_path / "private")
        real = tmp_path / "private"
    real.mkdir(exist_ok=True)
    (folder / name).rename(real / "secret")
    (folder / name).symlink_to(real / "secret")
    text = train(folder, "--steps", 1, "--out", out, "--model", model, code=3 if wrong else 0)
    if wrong:
        assert f"{folder / name}: " in text and "--follow-links 1" in text and not (out / "ckpt").exists(), text
        train(folder, "--steps", 1, "--out", out, "--model", model, "--follow-links", 1)
    assert (checkpoint(out, 1) / name).read_bytes() == (real / "secret").read_bytes()

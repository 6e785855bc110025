"""scripts/follow.py: every step arrives once, in order, while the run writes, stops and resumes; wandb is a stub that
records its calls."""
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time

import pytest

from calls import call, limited
from event_files import events_of
from jobs import wait_for
from trainer import ROOT, environment, metrics, train
import follow as follow_script

FOLLOW = ROOT / "scripts/follow.py"
STUB = """
import json, os, pathlib
log = pathlib.Path(os.environ["WANDB_LOG"])
def record(*call):
    with open(log, "a") as file:
        file.write(json.dumps(call) + "\\n")
class Run:
    arrived = os.environ.get("WANDB_ARRIVED")
    resumed, summary = arrived is not None, {"step": arrived}
    def define_metric(self, name, step_metric=None):
        record("define", name, step_metric)
    def log(self, values):
        record("log", values)
    def finish(self):
        record("finish")
def init(**words):
    if "WANDB_FAILS" in os.environ:
        raise RuntimeError("no API key")
    record("init", words)
    return Run()
"""


def line(step, loss=None, **more):
    return {"step": step, "tokens": 32 * step, "loss": 5 - step / 100 if loss is None else loss, "lr": 1e-3,
            "grad_norm": 1.0, "ms": 10.0, **more}


def write(run, lines, tail="", steps=100):
    """Replaces a run's files as a resume does, by renaming new ones. These come from outside: a folder that has files
    and no lock is not taken for one of the trainer's."""
    run.mkdir(exist_ok=True)
    for name, text in {"run.json": json.dumps({"arguments": {"steps": steps, "attn": "ssmax"}}),
                       "metrics.jsonl": "".join(json.dumps(x) + "\n" for x in lines) + tail}.items():
        new = run.parent / f"{name}.tmp"
        new.write_text(text)
        new.rename(run / name)


def append(run, text):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(text)


def start(*words, **env):
    return subprocess.Popen([sys.executable, FOLLOW, *map(str, words)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment(**env))


def follow(*words, code=0, **env):
    """Runs follow.py until it ends by itself. With --wandb it needs a process, which imports the stub."""
    if "--wandb" in words:
        process = start(*words, **env)
        out, err = process.communicate(timeout=60)
        result = subprocess.CompletedProcess(words, process.returncode, out, err)
    else:
        result = call("follow.py", *words)
    assert result.returncode == code and "Traceback" not in result.stderr, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_a_file_that_gets_shorter(tmp_path):
    """Where a file is overwritten, not replaced, it is read from its start again."""
    write(tmp_path / "run", [line(1), line(2), line(3)])
    found = follow_script.Metrics(tmp_path / "run")
    assert [x["step"] for x in found.new_lines()] == [1, 2, 3] and found.new_lines() == []
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(line(2, 4.0)) + "\n")
    assert [(x["step"], x["loss"]) for x in found.new_lines()] == [(2, 4.0)]
    append(tmp_path / "run", json.dumps(line(3)) + "\n")
    assert [x["step"] for x in found.new_lines()] == [3]
    found.close()


def contents(folder):
    return sorted(os.listdir(folder)) if folder.exists() else []


def sent(path):
    """[(step, scalars)] as TensorBoard would show them: a restart voids what came after."""
    found = {}
    for event in events_of(path) if path.exists() and path.stat().st_size else []:
        if event.restart:
            found = {step: scalars for step, scalars in found.items() if step < event.step}
        else:
            found[event.step] = event.scalars
    return found


def test_a_real_run(data, tmp_path):
    """All steps of a run under ssmax, with its learned scalars, from before the trainer begins to its end."""
    out = tmp_path / "out"
    process = start(out, "--tensorboard", "--interval", 0.05)
    train(data, "--attn", "ssmax", "--steps", 30, "--out", out, "--val-data", f"{data}/*_val_*.bin", "--val-every", 10)
    text, errors = process.communicate(timeout=60)       # it ends by itself
    assert process.returncode == 0 and not errors and f"follow.py: {out}: 30 steps" in text
    found = sent(out / "tensorboard/events.out.tfevents.0.follow")
    assert list(found) == list(range(1, 31))
    for step, loss, val in metrics(out, ["step", "loss", "val_loss"]):
        assert found[step]["loss"] == pytest.approx(loss, rel=1e-6)
        assert ("val_loss" in found[step]) == ("attn_scale/layer 0 mean" in found[step]) == (val is not None)


@pytest.mark.parametrize("before", [None, "empty", "lock"])
def test_a_run_that_has_not_begun(before, tmp_path, stub):
    """Nothing is written before it begins, and wandb gets its flags."""
    run = tmp_path / "run"
    if before:
        run.mkdir()
    if before == "lock":
        (run / "lock").touch()
    process = start(run, "--wandb", "--interval", 0.02, **stub)
    assert select.select([process.stdout], [], [], 30)[0], "no message"
    assert process.stdout.readline() == f"follow.py: {run}: waiting for the trainer to begin this run\n"
    time.sleep(0.2)
    assert process.poll() is None and contents(run) == (["lock"] if before == "lock" else [])
    write(run, [line(1), line(2)], steps=2)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and out == f"follow.py: {run}: 2 steps\n" and not err
    init, *_ = calls(tmp_path)
    assert init[1]["config"] == {"steps": 2, "attn": "ssmax"}


def test_what_is_no_run(tmp_path):
    """A folder with other things in it, a file, and under --once also a run that has not begun."""
    other, empty = tmp_path / "other", tmp_path / "empty"
    for folder in (other, empty):
        folder.mkdir()
    (other / "notes.txt").write_text("x")
    for path, words in ((other, []), (other, ["--once"]), (empty, ["--once"]), (tmp_path / "missing", ["--once"])):
        text = follow(path, "--tensorboard", *words, code=3)
        assert f"follow.py: {path}: expected a run folder" in text and "neither run.json nor metrics.jsonl" in text
        assert contents(path) == (["notes.txt"] if path == other else [])
    assert "found a file" in follow(other / "notes.txt", "--tensorboard", code=3)


def test_lines_that_grow_and_a_resume(tmp_path):
    """A half line waits for its end; lines that a resumed run repeats count once; different ones replace the old."""
    run, path = tmp_path / "run", tmp_path / "events/events.out.tfevents.0.follow"
    half = json.dumps(line(4))
    write(run, [line(i) for i in (1, 2, 3)], tail=half[:20])
    process = start(run, "--tensorboard", tmp_path / "events", "--interval", 0.02)
    wait_for(lambda: len(sent(path)) == 3, "three steps")
    append(run, half[20:])
    time.sleep(0.3)
    assert len(sent(path)) == 3
    append(run, "\n" + json.dumps(line(5)) + "\n")
    wait_for(lambda: len(sent(path)) == 5, "five steps")
    write(run, [line(i) for i in range(1, 4)])                      # the resumed run is back at step 3
    time.sleep(0.3)
    append(run, "".join(json.dumps(line(i)) + "\n" for i in range(4, 8)))
    wait_for(lambda: len(sent(path)) == 7, "seven steps")
    assert not any(event.restart for event in events_of(path)) and len(events_of(path)) == 7
    write(run, [*(line(i) for i in range(1, 4)), line(4, loss=9.0)])     # with another learning rate, say
    wait_for(lambda: len(sent(path)) == 4, "the new step 4")
    assert sent(path)[4]["loss"] == 9.0 and sent(path)[3]["loss"] == pytest.approx(4.97)
    times = [event.time - events_of(path)[0].time for event in events_of(path)]
    assert times[2] == pytest.approx(0.02, abs=1e-3) and times[-1] == pytest.approx(0.03, abs=1e-3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and not err


@pytest.fixture
def stub(tmp_path):
    folder = tmp_path / "stub"
    folder.mkdir()
    (folder / "wandb.py").write_text(STUB)
    return dict(PYTHONPATH=str(folder), WANDB_LOG=str(tmp_path / "calls"))


def calls(tmp_path):
    return [json.loads(text) for text in (tmp_path / "calls").read_text().splitlines()]


def test_wandb(tmp_path, stub):
    run = tmp_path / "run"
    write(run, [line(i) for i in range(1, 4)])
    follow(run, "--wandb", "--project", "p", "--once", **stub)
    init, *rest = calls(tmp_path)
    first = init[1]
    assert init[0] == "init" and first["project"] == "p" and first["name"] == "run" and first["resume"] == "allow"
    assert first["config"] == {"steps": 100, "attn": "ssmax"} and first["dir"] == str(run)
    assert rest[:2] == [["define", "step", None], ["define", "*", "step"]] and rest[-1] == ["finish"]
    assert [values for _, values in rest[2:-1]] == [{"seconds": pytest.approx(i / 100), **line(i)} for i in (1, 2, 3)]

    # Started again, it continues the same run of wandb with the steps that are new.
    (tmp_path / "calls").unlink()
    fourth = line(4, attn_scale=[[0.5, 0.25, None]], grad_norms={"embed": 2, "mlp": [3, None]})
    append(run, json.dumps(fourth) + "\n" + json.dumps(line(5, loss=None)) + "\n")
    follow(run, "--wandb", "--once", **stub)
    init, _, _, *logs, finish = calls(tmp_path)
    assert init[1]["id"] == first["id"] and init[1]["project"] == "attn.c"
    assert [values["step"] for _, values in logs] == [4, 5]
    assert ({key: value for key, value in logs[0][1].items() if "norms" in key}
            == {"grad_norms/embed": 2, "grad_norms/mlp/layer 0": 3})
    assert logs[0][1]["attn_scale/layer 0 mean"] == 0.5 and "attn_scale/layer 0 maximum" not in logs[0][1]


@pytest.mark.parametrize("arrived, again", [(None, [1, 2, 3, 4, 5]), ("3", [4, 5])])
def test_wandb_and_a_kill(arrived, again, tmp_path, stub):
    """wandb may not have written what it was given, so it is given all again; a server says what has arrived."""
    run = tmp_path / "run"
    write(run, [line(i) for i in range(1, 5)])
    process = start(run, "--wandb", "--interval", 0.05, **stub)
    wait_for(lambda: (tmp_path / "calls").exists() and len(calls(tmp_path)) == 7, "four steps")
    process.kill()
    process.communicate()
    _, first = calls(tmp_path)[0]
    (tmp_path / "calls").unlink()
    append(run, json.dumps(line(5)) + "\n")
    follow(run, "--wandb", "--once", **stub, **({"WANDB_ARRIVED": arrived} if arrived else {}))
    init, _, _, *logs, finish = calls(tmp_path)
    assert init[1]["id"] == first["id"] and finish == ["finish"]
    assert [values["step"] for _, values in logs] == again


def test_wandb_and_a_run_that_goes_back(tmp_path, stub):
    """Steps before the last one that an earlier follow.py sent are sent after all if they are new."""
    run = tmp_path / "run"
    write(run, [line(i) for i in range(1, 6)])
    follow(run, "--wandb", "--once", **stub)
    process = start(run, "--wandb", "--interval", 0.05, **stub)
    wait_for(lambda: len([call for call in calls(tmp_path) if call[0] == "init"]) == 2, "the second follow.py")
    time.sleep(0.3)
    write(run, [*(line(i) for i in range(1, 4)), line(4, loss=9.0)], steps=4)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and err == "follow.py: the run differs from step 4 on; wandb shows both\n", out + err
    assert [values["step"] for name, values, *_ in (call for call in calls(tmp_path) if call[0] == "log")] == [
        1, 2, 3, 4, 5, 4]


def test_wandb_that_is_missing_or_fails(tmp_path, stub):
    run = tmp_path / "run"
    write(run, [line(1)])
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "wandb.py").write_text("raise ImportError")
    assert "follow.py: wandb is not installed. Install it (pip install wandb), or use --tensorboard" in follow(
        run, "--wandb", code=3, PYTHONPATH=str(blocked))
    assert "follow.py: wandb cannot start: no API key. Run `wandb login`, or set WANDB_MODE=offline." in follow(
        run, "--wandb", code=3, WANDB_FAILS="1", **stub)
    assert contents(run) == ["metrics.jsonl", "run.json"]


def test_a_full_disk(tmp_path):
    """A full disk, simulated by a limit on file sizes, ends the script with one message, which names the file."""
    run = tmp_path / "run"
    write(run, [line(step) for step in range(1, 200)])
    file = f"{run}/tensorboard/events.out.tfevents.0.follow"
    with limited(resource.RLIMIT_FSIZE, 3000):
        assert follow(run, "--tensorboard", "--once", code=3).endswith(f"follow.py: {file}: File too large.\n")


def test_wrong_usage_and_files(tmp_path):
    run = tmp_path / "run"
    assert "one of the arguments --wandb --tensorboard is required" in follow(run, code=2)
    for seconds in ("0", "nan", "inf", "1e300"):
        assert f"{seconds}: expected a num" in follow(run, "--tensorboard", "--interval", seconds, code=2)
    write(run, [line(1)])
    for folder in (run / "run.json", run / "run.json/a"):
        assert (f"follow.py: --tensorboard: {run}/run.json: expected a folder, found a file. Pass another folder"
                in follow(run, "--tensorboard", folder, code=3))
    (run / "tensorboard").symlink_to(tmp_path)
    assert f"{run}/tensorboard: expected a folder, found a link" in follow(run, "--tensorboard", code=3)
    (run / "tensorboard").unlink()
    for wrong in ('{"step": 2}', '{"step": "2", "tokens": 9}'):
        write(run, [line(1)], tail=wrong + "\n")
        said = follow(run, "--tensorboard", code=3)
        assert "metrics.jsonl: line 2: expected a JSON object" in said and f"found '{wrong}'. Remove the line" in said
    (run / "metrics.jsonl").unlink()
    assert "0 steps" in follow(run, "--tensorboard", "--once")

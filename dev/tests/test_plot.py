"""scripts/plot.py: what it reads, what it draws, and the event files, which are parsed here byte by byte. Also the
table of attention/README.md and the pictures of presets.md."""
import itertools
import json
import math
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from calls import call, limited, make_run, put_in_place, time_limit, write_known
from event_files import crc32c, events_of, unmask
from trainer import ROOT, TRAIN, make_data, read_header, train
from lib import drawing, events, files, run_folder
from lib.run_folder import Refused
from lib.pictures import runs

PNG = b"\x89PNG\r\n\x1a\n"


def command(*words):
    return call("plot.py", *words)


def drawn(*words):
    """The bytes of the picture that a call has drawn."""
    result = command(*words)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return Path(result.stdout.splitlines()[-1]).read_bytes()


@pytest.fixture
def unsaved(monkeypatch):
    """For tests of files and messages: no figure is drawn, and its file has only the first bytes of a PNG."""
    from matplotlib.figure import Figure
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **how: file.write(PNG))


def legend(figure):
    return [text.get_text() for text in figure.legends[0].texts]


def texts(axes):
    return [text.get_text() for text in axes.texts]


# ---------------------------------------------------------------- reading

@pytest.mark.parametrize("tail", ["", '{"step": 31, "tok', '{"step": 31, "tokens": 99, "loss": 1}'])
def test_a_line_still_being_written_is_skipped(tmp_path, tail):
    lines = run_folder.read_metrics(make_run(tmp_path / "a", 30, tail))
    assert [line["step"] for line in lines] == list(range(1, 31))


BROKEN = {"half": '{"step": 31, "tok', "list": "[]", "no tokens": '{"step": 4}',
          "text": '{"step": 1, "tokens": 5, "loss": "x"}', "large": '{"step": 1, "tokens": 1' + "0" * 400 + "}",
          "deep": "[" * 100_000}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_complete_line_is_named(tmp_path, name):
    run = make_run(tmp_path / "a", 30, BROKEN[name] + "\n")
    with pytest.raises(Refused, match=r"metrics\.jsonl: line 31: expected a JSON object with numbers"):
        run_folder.read_metrics(run)


@pytest.mark.parametrize("wrong", [{"arguments": []}, {"arguments": {"steps": "x"}}, {"arguments": {"seed": 10**30}},
                                   {"lineage": {}}, {"lineage": [None]}, {"history": [{"step": "1"}]},
                                   {"history": [{"step": -1}]}, {"history": [1]},
                                   {"data": {"train": {"tokens": "1"}}}, {"data": {"val": 3}}])
def test_a_broken_run_json_is_named(tmp_path, wrong):
    run = make_run(tmp_path / "a", 3, known=wrong)
    with pytest.raises(Refused, match="run.json: .*expected"):
        runs.losses([str(run)])


def test_smooth_is_a_centered_mean_that_leaves_nan_out():
    values = [float(i % 7) for i in range(300)]
    values[100] = math.nan
    got = drawing.smooth(values)
    for i in range(300):
        window = [value for value in values[max(0, i - 3):i + 4] if not math.isnan(value)]
        assert got[i] == pytest.approx(sum(window) / len(window))
    assert drawing.smooth([4.0, 2.0]) == [4.0, 2.0]


def test_names_are_short_unless_ambiguous(tmp_path):
    """A link has its own name: eval_gpt2 gives a model that one, too, by which a report finds its color."""
    assert run_folder.names(["out/a", "out/b/"]) == ["a", "b"]
    assert run_folder.names(["x/run", "y/run"]) == ["x/run", "y/run"]
    assert run_folder.names(["../x/run", "/y/run/", "run"])[1:] == ["y/run", str(Path("run").resolve())[1:]]
    make_run(tmp_path / "run")
    (tmp_path / "best").symlink_to("run")
    assert run_folder.names([tmp_path / "best", tmp_path / "run"]) == ["best", "run"]


# ---------------------------------------------------------------- somebody else's folder

@pytest.mark.parametrize("name, kind", [
    ("loss.png", "symlink"), (".loss.png.tmp", "hard link"), (".loss.png.tmp", "pipe"),
    ("tensorboard/events.out.tfevents.0.follow", "symlink")])
def test_what_has_the_name_of_a_file_to_write_is_replaced_never_followed(tmp_path, unsaved, name, kind):
    run, victim = make_run(tmp_path / "a", 3), tmp_path / "victim"
    victim.write_text("kept")
    (run / name).parent.mkdir(exist_ok=True)
    put_in_place(run / name, kind, victim)
    words = ["follow.py", run, "--once", "--tensorboard"] if "events" in name else ["plot.py", run]
    with time_limit(60):
        result = call(*words)
    assert result.returncode == 0 and victim.read_text() == "kept" and victim.stat().st_nlink == 1, result.stderr
    assert not (run / ".loss.png.tmp").is_symlink()


@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe"])
def test_a_log_is_not_appended_to_what_is_elsewhere(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    put_in_place(tmp_path / "log", kind, victim)
    with pytest.raises(OSError, match="log"), time_limit(60):
        files.extend(tmp_path / "log")
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("script, name, content", [
    ("plot.py", "metrics.jsonl", "holes"), ("plot.py", "run.json", "/dev/zero"), ("follow.py", "metrics.jsonl", "pipe"),
    ("plot_eval.py", "eval.json", "pipe"), ("grid.py", "grid.toml", "/dev/zero"),
    ("plot.py", "ckpt/step-00000003/state.json", "pipe"), ("plot.py", "ckpt/step-00000003/model.safetensors", "holes")])
def test_what_may_have_no_end_is_not_read(tmp_path, script, name, content):
    run = make_run(tmp_path / "a", 3)
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if "state" in name:
        (path.parent / "model.safetensors").write_bytes(b"")
    path.unlink(missing_ok=True)
    if content == "holes":
        path.touch()
        os.truncate(path, 1 << 40)
        if "safetensors" in name:
            path.open("r+b").write(struct.pack("<Q", 1 << 39))
    else:
        path.symlink_to(content) if content == "/dev/zero" else os.mkfifo(path)
    flags = {"follow.py": ["--once", "--tensorboard"], "plot.py": ["--scalars"] * ("ckpt" in name)}.get(script, [])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with time_limit(60), limited(resource.RLIMIT_AS, used + (1 << 31)):
        result = call(script, path if script == "grid.py" else run, *flags)
    assert result.returncode == 3 and name in result.stderr, result.stderr


# ---------------------------------------------------------------- usage

def test_one_run_is_drawn_beside_its_metrics(tmp_path):
    """By the command itself. Settings of a notebook, a user and the current folder (unreadable) have no effect."""
    run, folder = make_run(tmp_path / "a", 30, "{"), tmp_path / "folder"
    folder.mkdir()
    settings = tmp_path / "settings"
    settings.write_text("text.usetex: True\nfont.size: 30\naxes.facecolor: red\n")
    (folder / "matplotlibrc").write_bytes(settings.read_bytes() + b"font.family: \xff\n")
    result = subprocess.run([sys.executable, ROOT / "scripts/plot.py", run], capture_output=True, text=True, cwd=folder,
                            env=os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline",
                                              "MATPLOTLIBRC": str(settings)})
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{run}/loss.png\n", "")
    png = (run / "loss.png").read_bytes()
    assert png[:8] == PNG and struct.unpack(">2I", png[16:24]) > (1000, 800)
    assert png == drawn(run, "--out", tmp_path / "x.png")


def test_what_cannot_be_drawn_is_named_and_nothing_is_written(tmp_path, seeded):
    a, b, empty = make_run(tmp_path / "a", 3), make_run(tmp_path / "b", 3), make_run(tmp_path / "empty", 0, '{"step"')
    other, twin = (make_seeded(tmp_path / name, seed, attn, 0) for name, seed, attn in (
        ("other", 9, "lssa"), ("twin", 0, "softmax")))
    out = ["--out", tmp_path / "x.png"]
    for code, message, *words in (
            (3, "nowhere/metrics.jsonl: No such file", tmp_path / "nowhere"),
            (3, "no complete line yet", empty),
            (2, "x.foo: .foo is not a format of pictures. Expected one of ", a, "--out", tmp_path / "x.foo"),
            (2, "--out", a, b),
            (2, "not allowed with", a, "--scalars", "--tensorboard", tmp_path / "events"),
            (3, "expects runs with the same flags to have different seeds", seeded[0], twin, "--seeds", *out),
            (3, "expected one of the runs to plot", *seeded[:2], "--baseline", twin, *out),
            (3, "nothing to compare it with", *seeded[:3], "--seeds", "--baseline", seeded[0], *out),
            (3, "have no seed in common", *seeded, other, "--seeds", "--baseline", seeded[0], *out),
            (2, "--baseline compares losses", a, "--scalars", "--baseline", a, *out),
            (3, "b/metrics.jsonl: no attn_scale", b, "--scalars", *out),
            (2, "--heads plots one run", a, b, "--heads", *out),
            (3, "no learned scalars in its checkpoints", a, "--heads", *out)):
        result = command(*words)
        assert result.returncode == code and message in result.stderr, result.stderr
    assert [path.name for path in empty.iterdir()] == ["metrics.jsonl"]
    assert not {path.name for path in tmp_path.iterdir()} & {"x.png", "x.foo", "events"}


def test_what_is_no_run_among_several_is_left_out(tmp_path):
    """out/* also has pictures and the folders of eval_gpt2."""
    names = [make_run(tmp_path / name) for name in "ab"]
    (tmp_path / "both.png").touch()
    for folder in tmp_path / "eval", names[1]:
        folder.mkdir(exist_ok=True)
        (folder / "eval.json").write_text("{}")
    result = command(*sorted(tmp_path.iterdir()), "--tensorboard", tmp_path / "events")
    assert (result.returncode, len(result.stdout.splitlines())) == (0, 2), result.stderr


def test_a_single_step_and_a_diverged_run_are_drawn(tmp_path):
    tail = '{"step": 6, "tokens": 3072, "loss": null, "lr": 1e-4, "grad_norm": null, "ms": 5}\n'
    words = [make_run(tmp_path / "one", 1), make_run(tmp_path / "bad", 5, tail), "--out", tmp_path / "both.svg"]
    assert drawn(*words).startswith(b"<?xml")


# ---------------------------------------------------------------- the picture

def test_the_panels_show_every_run(tmp_path):
    figure = runs.losses([str(make_run(tmp_path / name, steps)) for name, steps in (("a", 200), ("b", 100))])
    by_tokens, by_time, lr, norm = figure.axes
    raw, smooth, val = by_tokens.lines[:3]
    assert raw.get_xdata()[-1] == pytest.approx(102.4) and by_tokens.get_xlabel() == "thousand tokens"
    assert list(raw.get_ydata()) == pytest.approx([3 + 8 / step for step in range(1, 201)])
    assert list(smooth.get_ydata()) == pytest.approx(drawing.smooth(list(raw.get_ydata())))
    assert list(val.get_xdata()) == pytest.approx([5.12 * i for i in range(1, 21)])
    assert by_time.lines[0].get_xdata()[-1] == pytest.approx(100 / 60) and by_time.get_xlabel() == "minutes"
    assert set(lr.lines[0].get_ydata()) == {6e-4} and norm.lines[2].get_ydata()[0] == 2.0
    low, high = by_tokens.get_ylim()
    assert low < 3.04 and 3.8 < high < 11, "the first steps must not flatten the rest"
    assert [texts(axes)[0] for axes in (by_tokens, by_time)] == ["axis truncated: early values reach 11.00"] * 2
    assert legend(figure) == ["a: mean loss 3.040, validation 3.540", "b: mean loss 3.080, validation 3.580"]
    untruncated = runs.losses([str(make_run(tmp_path / "c", 15))]).axes[0]
    assert untruncated.get_ylim()[1] > 11 and not untruncated.texts


def test_names_are_shown_as_they_are(tmp_path):
    """Dollars make no formulas, and a name that begins with an underscore is in the legend."""
    names = [r"m$\foo$1", "_a"]
    figure = runs.losses([str(make_run(tmp_path / name)) for name in names])
    figure.draw_without_rendering()
    assert [text.partition(":")[0] for text in legend(figure)] == names


def test_a_run_that_stopped_or_diverged_says_so(tmp_path):
    lost = '{"step": 16, "tokens": 8192, "loss": null}\n{"step": 17, "tokens": 8704, "loss": null}\n'
    figure = runs.losses([str(make_run(tmp_path / "a", 15, lost, known={"arguments": {"steps": 40}}))])
    assert "x: not finite from step 16 on, step 17 of 40" in legend(figure)[0]
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[8.192, 8.704]]


def resumed(run, step, **changed):
    described = json.loads((run / "run.json").read_text()) if (run / "run.json").exists() else {}
    described.setdefault("history", [{"step": 0, "event": "start"}]).append(
        {"step": step, "event": "resume", "changed": {flag: {"from": a, "to": b} for flag, (a, b) in changed.items()}})
    write_known(run, described)


def test_resumes_are_marked(tmp_path):
    """With the changed flags that say something about the losses."""
    run = make_run(tmp_path / "a", 30)
    resumed(run, 10, lr=(0.01, 0.003), shuffle=(True, None), keep=(0, 1),
            **{"attn-switch": (None, "11:ssmax"), "val-every": (10, 20)})
    resumed(run, 20)
    resumed(run, 31)        # still due
    marks = run_folder.read_marks(run, run_folder.read_metrics(run))
    assert [mark[:3] for mark in marks] == [(5120, 5.0, "resumed: lr 0.01 → 0.003, shuffle 1 → –"),
                                            (10240, 10.0, "resumed")]
    for axes in runs.losses([str(run)]).axes:
        where = [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]]
        assert where == pytest.approx([5, 10] if axes.get_xlabel() == "seconds" else [5.12, 10.24])
    for _ in range(run_folder.MOST_RESUMES):
        resumed(run, 20)
    marks = run_folder.read_marks(run, run_folder.read_metrics(run))
    assert [mark[2] for mark in marks[1:]] == [""] * 6, "too many to label"


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_after_its_parent(tmp_path, unsaved, moved):
    """And its parent's parent, up to the steps of the checkpoints."""
    parent = make_run(tmp_path / "parent", 30)
    for name, origin, step in ("child", "parent", 20), ("grandchild", "child", 10):
        checkpoint = (Path("/elsewhere") if moved else tmp_path) / origin / f"ckpt/step-{step:08}"
        make_run(tmp_path / name, known={"lineage": [
            {"step": 0, "event": "init-from", "attn": "x", "from": str(checkpoint)}]})
    lines = run_folder.after_parent(tmp_path / "grandchild", [])
    assert [lines[i]["tokens"] for i in (0, -1)] == [512 * 31, 512 * 50] and run_folder.seconds(lines)[-1] == 25.0
    words = [tmp_path / "child", "--after-parent", "--out", tmp_path / "x.png"]
    assert drawn(parent, *words).startswith(PNG)
    shutil.rmtree(parent)
    result = command(*words)
    assert result.returncode == 3 and "its parent" in result.stderr and "parent is not there" in result.stderr


def test_norms_by_layer(tmp_path, unsaved):
    norms = {"embed": 1.0, "attn": [1.0, 2.0], "mlp": [3.0, None], "gains": [5.0, 6.0]}
    run = make_run(tmp_path / "a", 5, change=lambda line: {} if line["step"] < 4 else {
        "grad_norms": norms, "weight_norms": norms | {"attn": [7.0, 8.0 + line["step"]]}})
    found = {axes.get_title(loc="left"): [list(line.get_ydata()) for line in axes.lines]
             for axes in runs.norms(run).axes}
    assert found["Weights: attention"] == [[7.0, 7.0], [12.0, 13.0]] and found["Gradient: attention"][1] == [2.0, 2.0]
    assert found["Gradient: feed-forward"][0] == [3.0, 3.0] and "Gradient: outside of the layers" in found
    assert drawn(run, "--norms") == (run / "norms.png").read_bytes()
    result = command(make_run(tmp_path / "none", 3), "--norms")
    assert result.returncode == 3 and "--norms-every" in result.stderr
    for wrong in "5", '{"attn": [[1]]}', '{"attn": [1, "x"]}':
        bad = make_run(tmp_path / f"bad{wrong}", 2, f'{{"step": 3, "tokens": 9, "grad_norms": {wrong}}}\n')
        with pytest.raises(Refused, match="grad_norms"):
            runs.norms(bad)


# ---------------------------------------------------------------- the normalizer's learned scalars

def make_scalars(folder, layers=3, steps=(10, 20, 30), keys=("attn_scale", "attn_bias"), tail=""):
    """A run whose layer l has the triple (l + i/100, 1 less, 2 more) at step i, and ten times that for attn_bias."""
    def scalars(line):
        step = line["step"]
        return {key: [[factor * (x := layer + step / 100), factor * (x - 1), factor * (x + 2)]
                      for layer in range(layers)]
                for key, factor in zip(keys, (1, 10)) if step in steps}
    return make_run(folder, 30, tail, scalars)


def save_p(run, step, values, dtype="F32"):
    """Writes p_n into a safetensors file by hand, with another tensor before it."""
    raw = np.asarray(values, "<f4")
    raw = (raw if dtype == "F32" else (raw.view("<u4") >> 16).astype("<u2")).tobytes()
    p = {"dtype": dtype, "shape": [len(values)], "data_offsets": [8, 8 + len(raw)]}
    other = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"other": other, "model.attn_pn": p}).encode()
    folder = run / "ckpt" / f"step-{step:08}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\x7f" * 8 + raw)
    return folder / "model.safetensors"


@pytest.mark.filterwarnings("error")
def test_the_fit_and_its_r2():
    """Of a line, of noise, of constant and of single values."""
    p = [0.25 * math.log(n) + 0.5 for n in range(1, 301)]
    assert drawing.fit_log(p) == pytest.approx((0.25, 0.5, 1), abs=1e-12)
    p = np.log(np.arange(1, 65)) * 0.3 + 1 + np.sin(np.arange(64) ** 2)
    columns = np.stack([np.log(np.arange(1, 65)), np.ones(64)], 1)
    wanted, rest, *_ = np.linalg.lstsq(columns, p)
    r2 = 1 - rest[0] / (64 * p.var())
    assert 0.02 < r2 < 0.5 and drawing.fit_log(p) == pytest.approx((*wanted, r2), rel=1e-9)
    a1, a2, r2 = drawing.fit_log([1.0] * 8)
    assert (a1, a2) == (0, 1) and math.isnan(r2)
    assert all(math.isnan(x) for x in drawing.fit_log([1.0]))


def test_scalars_by_layer(tmp_path):
    figure = runs.scalars([str(make_scalars(tmp_path / "a", keys=("attn_scale", "attn_sink")))])
    s, sink = figure.axes
    assert [axes.get_title(loc="left") for axes in (s, sink)] == ["s: a", "sink: a"]
    for axes, factor in (s, 1), (sink, 10):
        for layer in range(3):
            mean = [factor * (layer + i / 100) for i in (10, 20, 30)]
            assert list(axes.lines[layer].get_xdata()) == pytest.approx([5.12, 10.24, 15.36])
            assert list(axes.lines[layer].get_ydata()) == pytest.approx(mean)
            band = axes.collections[layer].get_paths()[0].vertices[:, 1]
            assert (band.min(), band.max()) == pytest.approx((mean[0] - factor, mean[2] + 2 * factor))


@pytest.mark.parametrize("dtype, error", [("F32", 1e-6), ("BF16", 2**-7)])
def test_p_of_the_newest_checkpoint_with_its_fit(tmp_path, dtype, error):
    run = make_scalars(tmp_path / "a")
    p = [0.25 * math.log(n) + 0.5 for n in range(1, 301)]
    save_p(run, 5, [7.0] * 300, dtype)
    save_p(run, 30, p, dtype)
    shutil.copytree(run / "ckpt" / "step-00000005", run / "ckpt" / "step-00000040-copy")
    panel = runs.scalars([str(run)]).axes[2]
    found = re.search(r"a1 = (\S+), a2 = (\S+), R\^2 = (\S+)", panel.get_xlabel())
    a1, a2, r2 = map(float, found.groups())
    assert a1 == pytest.approx(0.25, rel=2 * error) and a2 == pytest.approx(0.5, rel=4 * error) and r2 > 0.999
    points, line = panel.lines
    assert list(points.get_xdata()) == list(range(1, 301)) and list(points.get_ydata()) == pytest.approx(p, rel=error)
    assert line.get_ydata()[299] == pytest.approx(a1 * math.log(300) + a2, rel=1e-3)


def test_p_alone_is_drawn(tmp_path, unsaved):
    run = make_scalars(tmp_path / "a", steps=())
    save_p(run, 1, [1.0] * 4)
    assert drawn(run, "--scalars") == (run / "scalars.png").read_bytes()
    assert runs.scalars([run]).axes[0].get_xlabel().endswith("a1 = 0, a2 = 1, constant")


@pytest.mark.parametrize("value", ["0.3", "[]", "[0.1, 0.2, 0.3]", "[[1, 1], [1, 1], [1, 1]]", "[[1, 1, 1], [1, 1, 1]]",
                                   "null"])
def test_broken_scalars_are_named(tmp_path, value):
    run = make_scalars(tmp_path / "a", tail=f'{{"step": 31, "tokens": 9, "attn_bias": {value}}}\n')
    with pytest.raises(Refused, match=r"step 31: expected attn_bias as \[mean, minimum, maximum\]"):
        runs.scalars([str(run)])


@pytest.mark.filterwarnings("error")
def test_a_diverged_scalar_is_a_gap(tmp_path):
    tail = '{"step": 31, "tokens": 15872, "attn_scale": [[null, null, null]]}\n'
    figure = runs.scalars([str(make_scalars(tmp_path / "a", layers=1, tail=tail))])
    assert math.isnan(figure.axes[0].lines[0].get_ydata()[-1])


@pytest.mark.parametrize("damage", ["cut", "header", "dtype", "empty"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    run = make_scalars(tmp_path / "a")
    path = save_p(run, 30, [1.0] * 8)
    data = path.read_bytes()
    damaged = {"cut": data[:-4], "header": data[:20], "dtype": data.replace(b"F32", b"F99"), "empty": b""}
    path.write_bytes(damaged[damage])
    with pytest.raises(Refused, match=f"{path}: expected a safetensors file"):
        runs.scalars([str(run)])


# ---------------------------------------------------------------- a run that switches its normalizer

@pytest.fixture(scope="module")
def switched(tmp_path_factory):
    """A real run that switches from softmax to SSMax at step 6 of 8, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("switched")
    make_data(folder)
    train(folder, "--model", "layers=2,heads=2,channels=16,ffn=24,vocab=97", "--attn-switch", "6:ssmax-bias",
          "--steps", 8, "--ckpt-every", 1, "--keep", 0, "--out", folder / "run")
    return folder / "run"


def heads_in_checkpoint(run, step, name):
    """The values of a scalar's heads, (layers, heads)."""
    header, raw = read_header(run / f"ckpt/step-{step:08d}/model.safetensors")
    rows = [header[f"model.layers.{layer}.self_attn.{name}"] for layer in range(2)]
    return np.array([np.frombuffer(raw[slice(*row["data_offsets"])], "<f4") for row in rows])


def test_scalars_right_after_a_switch(switched):
    """No validation has recorded them yet, but the checkpoint has them."""
    figure = runs.scalars([str(switched)])
    for panel, name in zip(figure.axes, ("attn_scale", "attn_bias"), strict=True):
        means = heads_in_checkpoint(switched, 8, name).mean(axis=1)
        assert [list(line.get_xdata()) for line in panel.lines[:2]] == [[8 * 32]] * 2
        assert [line.get_ydata()[0] for line in panel.lines[:2]] == pytest.approx(means)


def test_every_head_of_every_checkpoint(switched, unsaved):
    """Each line is a head's s in the checkpoints after the switch; the points on the right are the newest ones."""
    assert drawn(switched, "--heads") == (switched / "heads.png").read_bytes()
    figure = runs.heads(str(switched))
    over, by_layer = figure.axes[:2]
    assert over.get_title(loc="left")[:2] == "s "
    found = np.array([heads_in_checkpoint(switched, step, "attn_scale") for step in (7, 8)])
    for layer, head in itertools.product(range(2), range(2)):
        line = over.lines[2 * layer + head]
        assert list(line.get_ydata()) == pytest.approx(found[:, layer, head])
        assert list(line.get_xdata()) == [7 * 32, 8 * 32]
        assert by_layer.lines[2 * layer].get_ydata()[head] == pytest.approx(found[1, layer, head])
    assert texts(over) == ["softmax → ssmax-bias"]


def test_a_switch_is_marked(switched, tmp_path):
    """Each panel has a line where the normalizer changed, but none for a later switch that is still due."""
    run = shutil.copytree(switched, tmp_path / "run")
    lineage = json.loads((run / "run.json").read_text())
    lineage["lineage"].append({"step": 9, "event": "attn-switch", "from": "ssmax-bias", "attn": "softmax"})
    write_known(run, lineage)
    panels = [axes for axes in runs.losses([str(run)]).axes if axes.get_xlabel()]
    elapsed = [sum(ms for ms in run_folder.column(run_folder.read_metrics(run), "ms")[:6]) / 1e3]
    for axes in panels:
        marks = [line.get_xdata()[0] for line in axes.lines
                 if list(line.get_xdata()) == [line.get_xdata()[0]] * 2 and list(line.get_ydata()) == [0, 1]]
        assert marks == pytest.approx(elapsed if axes.get_xlabel() == "seconds" else [6 * 32])
    assert "softmax → ssmax-bias" in " ".join(text for axes in panels for text in texts(axes))


@pytest.mark.parametrize("measured, said", [(("4.25", "4.5"), " (4.250 → 4.500)"),
                                            (("not measured", "not measured"), "")])
def test_a_switch_at_the_start_is_in_the_legend(tmp_path, measured, said):
    """With the losses before and after, which metrics.jsonl does not have."""
    run = make_run(tmp_path / "run", known={"lineage": [
        {"step": 0, "event": "init-from", "attn": "ssmax", "from": "x"},
        {"step": 0, "event": "attn-at-start", "from": "softmax", "attn": "ssmax", "val_loss_before": measured[0],
         "val_loss_after": measured[1]}]})
    assert run_folder.read_marks(run, run_folder.read_metrics(run)) == []
    [text] = legend(runs.losses([run]))
    assert text.endswith(", at the start softmax → ssmax" + said)


# ---------------------------------------------------------------- means over seeds, differences

def make_seeded(folder, seed, attn, offset, steps=100, change=lambda line: {}):
    """A run whose losses are those of make_run() plus an offset, with the flags of a real one."""
    def moved(line):
        line |= {key: line[key] + offset for key in ("loss", "val_loss") if key in line}
        return change(line)
    arguments = {"seed": seed, "attn": attn, "lr": 1e-3, "out": str(folder), "steps": 100}
    return make_run(folder, steps, change=moved, known={"arguments": arguments})


@pytest.fixture
def seeded(tmp_path):
    """Three seeds of softmax, 0.0, 0.1 and 0.2 above make_run(), and two of ssmax, 0.3 and 0.5 below those."""
    return [*(make_seeded(tmp_path / f"a{i}", i, "softmax", i / 10) for i in range(3)),
            make_seeded(tmp_path / "b0", 0, "ssmax", -0.3), make_seeded(tmp_path / "b2", 2, "ssmax", 0.2 - 0.5, 80)]


def test_means_over_seeds_and_differences_of_pairs(seeded):
    """Differences are those of runs with the same seed, at the steps that both have."""
    figure = runs.comparison(seeded, True, seeded[1])
    loss, val, loss_less, val_less = figure.axes
    assert legend(figure) == ["softmax, 3 seeds: validation 3.6800 ± 0.1000",
                              "ssmax, 2 seeds: validation 3.3000 ± 0.0000, difference -0.4000 ± 0.1414 "
                              "at 41 thousand tokens; mean to step 80, where b2 ends"]
    assert list(val.lines[0].get_ydata()) == pytest.approx([3.6 + 8 / step for step in range(10, 101, 10)])
    assert list(val.lines[1].get_xdata()) == pytest.approx([5.12 * i for i in range(1, 9)])
    assert list(val_less.lines[0].get_ydata()) == pytest.approx([-0.4] * 8)
    assert list(loss_less.lines[0].get_ydata()) == pytest.approx([-0.4] * 80)
    band = val_less.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(-0.5) and band.max() == pytest.approx(-0.3)


def test_a_validation_older_than_the_last_step_has_its_step(tmp_path):
    run = make_seeded(tmp_path / "a", 0, "softmax", 0, 105)
    assert legend(runs.comparison([run], False, None)) == ["a: validation 3.5800 (step 100)"]
    assert legend(runs.losses([run]))[0].endswith(", validation 3.580 (step 100)")


def test_differences_of_steps_that_differ_in_size(tmp_path, seeded):
    """They are taken at the same number of tokens: here, at step s and at the other run's step 2s."""
    other = make_seeded(tmp_path / "b", 0, "ssmax", -0.3, change=lambda line: {"tokens": 2 * line["tokens"]})
    figure = runs.comparison([seeded[0], other], False, seeded[0])
    steps = range(10, 51, 10)
    assert list(figure.axes[3].lines[0].get_xdata()) == pytest.approx([1.024 * step for step in steps])
    expected = [3.2 + 8 / step - (3.5 + 8 / (2 * step)) for step in steps]
    assert list(figure.axes[3].lines[0].get_ydata()) == pytest.approx(expected)
    assert legend(figure)[1] == f"b: validation 3.2800, difference {expected[-1]:+.4f} at 51.2 thousand tokens"


def test_a_run_without_a_finite_loss(tmp_path, seeded):
    """It diverged in its first step."""
    def lost(line):
        line.pop("val_loss", None)
        return {"loss": None}
    path = make_seeded(tmp_path / "diverged", 3, "relu-l1", 0, change=lost)
    figure = runs.comparison([seeded[0], path], False, seeded[0])
    assert legend(figure)[1].endswith("diverged: mean loss none is finite")


# ---------------------------------------------------------------- event files

def test_event_files_record_by_record(tmp_path):
    assert crc32c(b"123456789") == 0xE3069283 and unmask(events.masked_crc32c(b"123456789")) == 0xE3069283
    run = make_run(tmp_path / "a", 300, '{"step": 301, "tokens": 9, "loss": null}\n')
    for _ in range(2):
        result = command(run, "--tensorboard", tmp_path / "events")
        path, = (tmp_path / "events" / "a").iterdir()
        assert (result.returncode, result.stdout.strip()) == (0, str(path)) and "tfevents" in path.name
    rest = events_of(path)
    assert [event.step for event in rest] == list(range(1, 302))
    assert rest[299].time - rest[0].time == pytest.approx(149.5, abs=1e-3)
    scalars = [event.scalars for event in rest]
    assert scalars[0] == pytest.approx({"loss": 11.0, "lr": 6e-4, "grad_norm": 2.0, "tok_per_s": 1024.0, "mfu": 0.5})
    assert scalars[99]["val_loss"] == pytest.approx(3.58) and "val_loss" not in scalars[100]
    assert scalars[300] == {}


def test_a_full_disk_leaves_the_earlier_event_file_alone(tmp_path):
    """The disk is simulated by a limit on the size of files."""
    words = [make_run(tmp_path / "a", 300), "--tensorboard", tmp_path / "events"]
    assert command(*words).returncode == 0
    path, = (tmp_path / "events" / "a").iterdir()
    earlier = path.read_bytes()
    with limited(resource.RLIMIT_FSIZE, 1024):
        result = command(*words)
    assert result.returncode == 3 and "File too large" in result.stderr, result.stderr
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == earlier
    path.parent.rename(tmp_path / "other")
    path.parent.symlink_to(tmp_path / "other")
    result = command(*words)
    assert result.returncode == 3 and "expected a folder, found a link" in result.stderr


# ---------------------------------------------------------------- attention/README.md

def presets():
    """The table of `--attn help`: its lines, with single spaces."""
    text = subprocess.run([TRAIN, "--attn", "help"], capture_output=True, text=True, check=True).stdout
    return [" ".join(line.split()) for line in text.split("\n\n")[1].splitlines()]


def test_the_readme_has_the_programs_table():
    text = (ROOT / "attention/README.md").read_text()
    head, _, *rows = itertools.takewhile(lambda line: line.startswith("|"), text[text.index("| name |"):].splitlines())
    assert len(rows) > 30 and [" ".join(re.sub("[|`]", " ", line).split()) for line in (head, *rows)] == presets()


def test_every_normalizer_has_a_picture_that_is_current():
    shown = re.findall(r"!\[\]\(\.\./doc/img/weights/(.+)\.png\)", (ROOT / "attention/presets.md").read_text())
    assert sorted(shown) == sorted(line.split()[0] for line in presets()[1:])
    result = call("draw_weights.py", "--check")
    assert result.returncode == 0, result.stdout + result.stderr

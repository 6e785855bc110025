"""scripts/grid.py: what it reads from a grid file, the runs that it starts, stops and resumes, what it keeps of them,
its verdicts on claims, and its report."""
import csv
import errno
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jobs
from calls import call
from trainer import MODEL, ROOT, TRAIN, assert_same_run, environment, metrics, script_of, train, write_shard
import draw_pages
import grid
from lib import grid_export, grid_file, grid_parts, grid_report, grid_run, grid_store
from lib.grid_file import Refused, Run
from lib.pictures import charts, grids

EVAL = Path(os.environ.get("EVAL_GPT2", ROOT / "eval_gpt2"))
OVERFLOWS = "exp+scale=const:1e9"
GRIDS = sorted((ROOT / "grids").glob("*.toml"))

HEAD = """
[grid]
name = "tiny"
paper = "A paper"
baseline = "softmax"
[data.small.text]
train = "DATA/*_train_*.bin"
val = "DATA/*_val_*.bin"
[model.small]
sizes = { "4k" = "SHAPE" }
flags = { batch = 4, seq-len = 8, steps = 16, warmup = 5, lr = 0.01, val-tokens = 200 }
eval-flags = { max-tokens = 200 }
"""
PAPER = ('[model.paper]\nsizes = { "1M" = "x" }\n'
         'flags = { batch = 1, seq-len = 64, steps = 8 }\n[data.paper.text]\ntrain = "t"\nval = "v"\n')
ROWS = '[[run]]\nfor = { attn = ["softmax", "ssmax"] }\nattn = "{attn}"\n'
LOSS = '[[eval]]\nname = "lengths"\ntask = "loss"\nlengths = ["L/2", "L", "4L"]\n'


def write(folder, *texts, data="nowhere"):
    path = Path(folder) / "grid.toml"
    path.write_text("\n".join([HEAD.replace("DATA", str(data)).replace("SHAPE", MODEL), *texts]))
    return path


def read(folder, *texts, scale="small", **how):
    return grid_file.read(write(folder, *texts, **how), scale, lambda: ["softmax", "ssmax", "lssa"])


def words(path, out, *flags):
    return [path, "--out", out, "--results", out.parent / "results.json", "--threads", 1, *flags]


def programs(**env):
    return {"TRAIN_GPT2": str(TRAIN), "EVAL_GPT2": str(EVAL), "OMP_NUM_THREADS": "1"} | env


def run(path, out, *flags, code=0, draw=False, **env):
    """Runs grid.py in this process and returns what it printed, after checking the exit code."""
    result = call("grid.py", *words(path, out, *flags), *([] if draw else ["--no-pictures"]), env=programs(**env))
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def entries(out):
    """The results by row, seed and evaluation."""
    found = json.loads((out.parent / "results.json").read_text())["results"]
    return {(entry["row"], entry["seed"], entry.get("eval", "train")): entry for entry in found.values()}


def folder_of(out, row):
    """The folder of a row's run, whose name ends with a digest of what determines its numbers."""
    digest = grid_store.digest(entries(out)[row, 1337, "train"]["identity"])
    return next((out / "runs").glob(f"*-{digest[:10]}"))


# ---------------------------------------------------------------- the file

def test_rows_seeds_sizes_and_loops(tmp_path):
    grid = read(tmp_path, ROWS, '[[run]]\nfor = { P = [1, 3] }\nname = "P={P}"\n'
                                'attn = "lssa+post=reweight:{P}"\nseeds = [5]\nflags = { lr = 1 }\n')
    assert list(grid.rows) == ["softmax", "ssmax", "P=1", "P=3"] and grid.rows["P=3"].attn == "lssa+post=reweight:3"
    assert grid.runs() == [Run("softmax", "4k", 1337), Run("ssmax", "4k", 1337), Run("P=1", "4k", 5),
                           Run("P=3", "4k", 5)]
    assert grid.rows["P=1"].flags["lr"] == 1 and grid.rows["ssmax"].flags["lr"] == 0.01
    path = write(tmp_path, ROWS.replace('["softmax", "ssmax"]', '"presets"'))
    path.write_text("\ufeff" + path.read_text())      # a byte order mark is left out
    presets = ["softmax", "ssmax", "lssa"]
    assert list(grid_file.read(path, "small", lambda: presets).rows) == presets


def test_multiples_of_the_length_and_the_steps(tmp_path):
    grid = read(tmp_path, ROWS, '[[run]]\nname = "x"\nattn = "ssmax"\n'
                                'flags = { seq-len = ["L/4", "L"], steps = "S/2", warmup = "S/4" }\n', LOSS)
    assert ({key: grid.rows["x"].flags[key] for key in ("seq-len", "steps", "warmup")}
            == {"seq-len": [2, 8], "steps": 8, "warmup": 2})
    assert grid.evals[0].lengths == [4, 8, 32] and (grid.scale.L, grid.scale.S) == (8, 16)
    assert [grid_file.amount(text, {"S": 16}, "") for text in ("7S/8", "S", "3", 5)] == [14, 16, 3, 5]


def test_a_scale_has_rows_and_flags_of_its_own(tmp_path):
    rows = ROWS + 'flags-paper = { steps = 4 }\n[[run]]\nname = "x"\nattn = "lssa"\nscales = ["paper"]\n'
    small, paper = (read(tmp_path, PAPER, rows, scale=scale) for scale in ("small", "paper"))
    assert list(small.rows) == ["softmax", "ssmax"] and list(paper.rows) == ["softmax", "ssmax", "x"]
    assert ([grid.rows["ssmax"].flags["steps"] for grid in (small, paper)] == [16, 4]
            and paper.rows["x"].flags["seq-len"] == [64])


def test_claims_add_seeds_to_their_rows_and_to_those_they_start_from(tmp_path):
    tuned = '[[run]]\nname = "tuned"\ninit-from = "ssmax"\n'
    grid = read(tmp_path, ROWS, tuned,
                '[[claim]]\nname = "c"\npaper = "p"\nours = "tuned < softmax"\nseeds = [1, 1337]\n')
    assert [row.seeds for row in grid.rows.values()] == [[1337, 1]] * 3
    assert [run.seed for run in grid.runs()] == [1337] * 3 + [1] * 3, "the first seed of every row comes first"
    few = grid_file.limited(grid, ["tuned"], 1)
    assert {name: row.seeds for name, row in few.rows.items()} == {"ssmax": [1337], "tuned": [1337]}


X, LSSA = '[[run]]\nname = "x"\n', '[[run]]\nattn = "lssa"\n'
EVAL_E, NEEDLES_E = ('[[eval]]\nname = "e"\ntask = "%s"\n' % task for task in ("loss", "needle"))
PROMPTS = 'flags = { prompt-file = "grids/prompts.txt" }\n'
CLAIM = '[[claim]]\nname = "c"\npaper = ""\n'
BETTER = CLAIM + 'ours = "ssmax < softmax"\n'
NUMBERS = LOSS + '[[paper]]\nrow = "%s"\nof = "lengths.loss"\nnumbers = { %s }\n'
FORMULA = '[[formula]]\nname = "f"\nlow = 0\nhigh = %s\ns = 1\nagainst = "n"\nn = [%s]\n'
BAD = {    # what is appended to a correct file, and what the message says
    "brackets": (f"a = {'[' * 100000}\n", "not a valid TOML file"),
    "digits": (f"a = {'9' * 5000}\n", "not a valid TOML file"),
    "NUL": ('[[run]]\nattn = "ss\\u0000max"\n', "a text has a NUL"),
    "combinations": (f"[[run]]\nfor = {{ attn = {['x'] * 200}, b = {['y'] * 200} }}\n", "expected at most 10,000"),
    "many runs": (LSSA + f"seeds = {list(range(10001))}\n", "expected at most 10,000 runs"),
    "number": (FORMULA % ("inf", 8), "high: expected a number, found inf"),
    "section": ("[[runs]]\n", "unknown section runs. Did you mean run?"),
    "key": (LSSA + "sede = [1]\n", r"[[run]] 2 (lssa): unknown key sede. Did you mean seeds?"),
    "type": (LSSA + 'seeds = "all"\n', "seeds: expected a list of whole numbers, found 'all'"),
    "no attn": (X, "attn is missing"),
    "no source": ('[data.small.mix]\ntrain = "a*.bin:0.7, "\nval = "b"\n',
                  "[data.small.mix]: train: expected a source on both sides of each comma, found 'a*.bin:0.7, '"),
    "no name": ('[[eval]]\ntask = "loss"\n', "name is missing"),
    "twice": ('[[run]]\nattn = "softmax"\n', "there is another row named softmax"),
    "variable": ('[[run]]\nattn = "{P}"\n', "{P}: unknown variable"),
    "paper's row": (NUMBERS % ("ssmx", "L = 3"), "row: no row ssmx at scale small. Did you mean ssmax?"),
    "paper's column": (NUMBERS % ("ssmax", "64L = 3"), "lengths.loss has no number @512"),
    "paper's number": (NUMBERS % ("ssmax", 'L = "3"'), "numbers: L: expected a number, found '3'"),
    "base": (X + 'init-from = "ssmx"\n', "init-from: no row ssmx at scale small. Did you mean ssmax?"),
    "circle": (X + 'init-from = "x"\n', "x starts from itself"),
    "switch step": (X + 'attn = "ssmax"\nswitch = { from = "softmax", at = "S" }\n',
                    "expected a step between 0 and 16, found 16"),
    "switch flags": (X + 'attn = "ssmax"\nswitch = { from = "softmax", at = 4 }\nflags = { lr = 1 }\n',
                     "Remove these keys"),
    "own flag": (LSSA + 'flags = { out = "x" }\n', "--out is set by grid.py"),
    "key flag": (LSSA + "flags = { seed = 3 }\n", "--seed has a key of its own. Use seeds"),
    "fraction": (EVAL_E + 'lengths = ["L/3"]\n', "L/3 is not a whole number, because L is 8"),
    "length": (EVAL_E + 'lengths = ["2S"]\n', "expected a whole number, or a multiple of L such as 2L"),
    "runs": (EVAL_E + 'runs = ["lssa*"]\n', "runs: no row is called lssa*"),
    "eval name": ('[[eval]]\nname = "a.b"\ntask = "loss"\n', 'expected a name without "."'),
    "operator": (CLAIM + 'ours = "ssmax"\n', "with <, > or = between them"),
    "claimed row": (CLAIM + 'ours = "ssmx < softmax"\n', "no row ssmx at scale small. Did you mean ssmax?"),
    "claimed eval": (BETTER + 'of = "length.loss@L"\n', "no evaluation length"),
    "claimed training": (BETTER + 'of = "train.valloss"\n', "of: training has no valloss. Did you mean val_loss?"),
    "claimed column": (EVAL_E + BETTER + 'of = "e.loss@8L"\n',
                       "of: e.loss has no number @64. Its columns are 8, longest."),
    "longest of none": (NEEDLES_E + BETTER + 'of = "e.right@longest"\n', "of: e.right has no number @longest."),
    "no column": (EVAL_E + BETTER + 'of-right = "e.loss"\n', "of-right: e.loss has no number without @COLUMN"),
    "row not evaluated": (EVAL_E + 'runs = ["ssmax"]\n' + BETTER + 'of = "e.loss@L"\n',
                          "of: evaluation e does not have row softmax. Add it to its runs."),
    "negative within": (CLAIM + 'ours = "ssmax = softmax"\nwithin = -0.5\n',
                        "within: expected a number of 0 or more, found -0.5"),
    "task": ('[[eval]]\nname = "e"\ntask = "los"\n',
             "task: expected one of loss, positions, needle, attention, scores, choice, found los. Did you mean loss?"),
    "metric": (NEEDLES_E + 'metric = "rite"\n', "metric: the task needle has no rite. Did you mean right?"),
    "batch": (LSSA + 'flags = { batch = "four" }\n',
              "flags: batch: expected a whole number of 1 or more, found 'four'"),
    "no text": (f'[[eval]]\nname = "x"\ntask = "attention"\ndata = "text"\n{PROMPTS}',
                "[[eval]] 1 (x): data: this evaluation reads no text. Remove it."),
    "formula": (FORMULA % (1, "0, 8"), "n: expected whole numbers of 1 or more, found 0"),
    "within": (CLAIM + 'ours = "ssmax = softmax"\n', "within: required in a claim with ="),
    "size": (LSSA + 'sizes = ["9k"]\n', "sizes: 9k is not one of 4k"),
    "scale": (LSSA + 'scales = ["papr"]\n', "scales: papr is not one of small"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(tmp_path, name):
    text, message = BAD[name]
    with pytest.raises(Refused, match=re.escape(message)) as error:
        read(tmp_path, ROWS, text)
    assert str(error.value).startswith(f"{tmp_path}/grid.toml: ")


@pytest.mark.parametrize("right, wrong, message", [
    ('name = "tiny"', "", "[grid]: name is missing"),
    ("steps = 16, ", "", "steps is missing; it defines S"),
    ("[data.small.text]", "", "no [data.small]. Add [data.small]"),
    ("[model.small]", "[model.small]\njobs = 1.5", "jobs: expected a whole number of 1 or more, found 1.5"),
    ('baseline = "softmax"', 'baseline = "x"', "no row x at scale small")])
def test_bad_heads_are_named(tmp_path, right, wrong, message):
    path = write(tmp_path, ROWS)
    path.write_text(path.read_text().replace(right, wrong))
    with pytest.raises(Refused, match=re.escape(message)):
        grid_file.read(path, "small", list)


def test_a_missing_file_and_a_missing_scale():
    for path, scale, message in (("nowhere.toml", "small", "nowhere.toml: No such file"),
                                 (GRIDS[0], "papr", "Use --scale with one of its scales")):
        with pytest.raises(Refused, match=message):
            grid_file.read(path, scale, list)


# ---------------------------------------------------------------- the kept grids

@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_kept_grids(path):
    """Each is valid at all its scales, the trainer knows its flags and normalizers, and its small runs are small."""
    known = grid_parts.presets(TRAIN)
    scales = [scale for scale in ("small", "paper") if f"[model.{scale}]" in path.read_text()]
    for scale in scales:
        grid = grid_file.read(path, scale, lambda: known)
        grid_parts.check_flags(grid, type("Programs", (), {"train": str(TRAIN), "eval": str(EVAL)}))
        plan = grid_parts.Plan(grid, grid_store.Results("/nowhere/results.json"), {}, Path("out"))
        tokens = [part.cost for part in plan.parts.values() if not part.eval]
        assert max(tokens) <= 2e7 if scale == "small" else max(tokens) > 3e8
        assert not grid.notes, "no two rows are the same"
        for row in grid.rows.values():
            every = grid_parts.run_flags(grid, row)["val-every"]
            assert row.flags["steps"] % every == 0, f"{row.name}: no validation at its end"
    assert scales[0] == "small"


def test_the_comparison_has_every_preset():
    grid = grid_file.read(ROOT / "grids/comparison.toml", "small", list)
    assert sorted(grid.rows) == sorted([*grid_parts.presets(TRAIN), "gau/softmax", "gau/relu2-n"])


# ---------------------------------------------------------------- keys and results

def test_keys_change_with_what_determines_the_numbers(tmp_path):
    texts = {"text": ["a", "b"]}

    def key(more="", texts=texts, of=Run("x", "4k", 1)):
        grid = read(tmp_path, ROWS, f'[[run]]\nname = "x"\nattn = "ssmax"\nseeds = [1, 2]\n{more}')
        return grid_store.key_of(grid, of, texts)
    same = ["flags = { batch = 4, val-every = 2, ckpt-every = 4, keep = 3 }", 'group = "g"',
            "flags = { batch = 2, total-batch-tokens = 32 }"]
    other = ["flags = { lr = 0.02 }", "flags = { batch = 8 }", 'model = "qk_norm=1"', "flags = { steps = 32 }"]
    assert {key(more) for more in same} == {key()}
    assert len({key(), *map(key, other), key(texts={"text": ["a", "c"]}), key(texts={"text": ["c", "b"]}),
                key(of=Run("x", "4k", 2)), key(of=Run("softmax", "4k", 1337))}) == 5 + len(other)


def test_the_key_of_a_run_has_that_of_the_run_it_starts_from(tmp_path):
    def keys(lr):
        grid = read(tmp_path, f'[[run]]\nattn = "softmax"\nflags = {{ lr = {lr} }}\n'
                              '[[run]]\nname = "tuned"\ninit-from = "softmax"\n'
                              '[[run]]\nname = "later"\nattn = "ssmax"\nswitch = { from = "softmax", at = 8 }\n' + LOSS)
        return [grid_store.eval_key(grid, run, grid.evals[0], {}) for run in grid.runs()]
    assert not set(keys(0.1)) & set(keys(0.2)) and len(set(keys(0.1))) == 3


def test_fingerprints_cover_every_byte_and_no_name(tmp_path):
    write_shard(tmp_path / "a_train_1.bin", range(2000))
    first = grid_store.fingerprint(f"{tmp_path}/*_train_*.bin")
    (tmp_path / "a_train_1.bin").rename(tmp_path / "b_train_1.bin")
    assert grid_store.fingerprint(f"{tmp_path}/*_train_*.bin") == first
    changed = bytearray((tmp_path / "b_train_1.bin").read_bytes())
    changed[2500] ^= 1
    (tmp_path / "b_train_1.bin").write_bytes(changed)
    assert (grid_store.fingerprint(f"{tmp_path}/*_train_*.bin") != first
            and grid_store.fingerprint(f"{tmp_path}/x*") is None)


def test_weighted_texts(tmp_path):
    """Their fingerprint depends on the files and the ratio of the weights, not on their names or scale."""
    for name, count in (("a", 300), ("b", 400)):
        write_shard(tmp_path / f"{name}.bin", range(count))

    def of(text):
        return grid_store.fingerprint(text.replace("/", f"{tmp_path}/"))

    mix = of("/a.bin:0.7,/b.bin:0.3")
    assert mix == of("/a*.bin:7 /b.bin:3") and len({mix, of("/a.bin:0.6,/b.bin:0.4"), of("/b.bin:7,/a.bin:3"),
                                                    of("/a.bin")}) == 4
    assert of("/a.bin:0.7,/none.bin:0.3") is None

    def lacks(train):
        return grid_parts.missing(grid_file.Data("text", train.replace("/", f"{tmp_path}/"), f"{tmp_path}/b.bin", []))

    assert not lacks("/a.bin:0.7,/b.bin:0.3") and lacks("/a.bin:0.7,/none.bin:0.3")
    path = write(tmp_path, ROWS)
    path.write_text(path.read_text().replace("nowhere/*_train_*.bin", "a.bin:0.7,b.bin:0.3"))
    plan = grid_parts.Plan(grid_file.read(path, "small", list), grid_store.Results(tmp_path / "none"), {}, tmp_path)
    programs = type("Programs", (), {"launch": [], "train": "train_gpt2"})
    assert "--train-data=a.bin:0.7,b.bin:0.3" in grid_parts.train_words(plan, plan.todo[0], programs, 1)


def test_texts_are_those_of_the_trainer(tmp_path, monkeypatch):
    """The grid and the trainer find the same shards. The texts are lists without weights, names with spaces, a pattern
    that matches folders, and a path that starts with ~."""
    for name in ("a/x_1", "b/x_2", "with a space/x_3", "[1]/x_4"):
        (tmp_path / name).parent.mkdir()
        write_shard(tmp_path / f"{name}.bin", [1] * 300)
        write_shard(tmp_path / f"{name}.mask", [1] * 300, 20240521)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text, expected in (("/a/*.bin,/b/*.bin", 2), ("/b/x_2.bin /a/x_1.bin,/a/*.bin", 2), ("/?/x_*.bin", 2),
                           ("/?/x_*", 2), ("~/b/*.bin", 1), ("/with a space/x*.bin", 1), ("/[1]/x_4.bin", 1),
                           ("/[1]/x*.bin", 1), ("/[[]1]/x*.bin", 1),
                           ("/a/*.bin,/none.bin", 0), ("/none.bin", 0)):
        text = re.sub("(^|[ ,])/", rf"\1{tmp_path}/", text)
        shards = grid_store.shards_of(text)
        assert [path.suffix for path in shards] == [".bin", ".mask"] * expected
        said = subprocess.run([TRAIN, "--train-data", text, "--model", MODEL, "--seq-len", "8", "--batch", "1",
                               "--dry-run"], capture_output=True, text=True, env=environment())
        files = re.search(r"tokens in (\d+) shard", said.stdout)
        assert (int(files[1]) if files else 0) == expected, (text, said.stdout + said.stderr)
    (tmp_path / "a/x_2.bin.part").touch()
    for train in f"{tmp_path}/a/*.bin,{tmp_path}/b/*.bin", f"{tmp_path}/none.bin":
        assert grid_parts.missing(grid_file.Data("text", train, f"{tmp_path}/b/*.bin", []))


def test_results_are_merged_and_replaced_atomically(tmp_path, monkeypatch):
    path = tmp_path / "new/results.json"
    one, two = grid_store.Results(path), grid_store.Results(path)
    one.add("b", {"x": 1})
    two.add("a", {"x": 2})
    assert (grid_store.Results(path).entries == {"a": {"x": 2}, "b": {"x": 1}}
            and len(path.read_text().splitlines()) == 4)
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        one.add("c", {"x": 3})
    assert path.read_bytes() == before
    monkeypatch.undo()
    one.add("c", {"x": 3})
    assert list(grid_store.Results(path).entries) == ["a", "b", "c"]


@pytest.mark.parametrize("text, message", [("{", "expected the results of grids"),
                                           ('{"format": 1, "results": []}', "is a list, not an object"),
                                           ('{"format": 9, "results": {}}', "expected format 1, found 9")])
def test_broken_results_are_named(tmp_path, text, message):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(Refused, match=message):
        grid_store.Results(tmp_path / "results.json")


def test_what_is_kept_of_other_tasks():
    report = {"models": [{}],
              "results": [{"attn": "a", "seq_len": 8, "right": 0.5,
                           "depths": [{"depth": 10, "right": 1.0}, {"depth": 50, "right": 0.0}],
                           "trials": [{"sample": 3, "best_score": 0.25}, {"sample": 4, "best_score": 0.75}]}]}
    values = grid_parts.other_values(report)
    assert (values["best_score"] == {"8": 0.5, "mean": 0.5} and values["right"]["8 at 50 %"] == 0
            and "sample" not in values)
    report["results"][0] |= {"right": None, "depths": [{"depth": 10, "right": 1.0}, {"depth": 50, "right": None}]}
    assert grid_parts.other_values(report)["right"] == {"8": None, "mean": None, "8 at 10 %": 1, "8 at 50 %": None}
    report = {"models": [{}],
              "results": [{"attn": "a", "leading_end_of_text": with_it, "layers": [{"heads": [{"sum": with_it + x}]}]}
                          for with_it in (False, True) for x in (0, 1)]}
    assert grid_parts.other_values(report) == {"sum": {"plain": 0.5, "end-of-text": 1.5, "mean": 1.0}}


def test_only_the_other_normalizers_rows_are_kept():
    """An evaluation with `attn` also has rows under the checkpoint's own normalizer."""
    def report(of_softmax, of_ssmax):
        return {"models": [{"lineage": [{"event": "attn-switch", "from": "softmax", "attn": "ssmax"}]}],
                "results": [{"attn": "softmax"} | of_softmax, {"attn": "ssmax"} | of_ssmax]}
    assert grid_parts.other_values(report({"acc": 0.2}, {"acc": 0.6})) == {"acc": {"mean": 0.6}}
    losses = [{"seq_len": 8, "loss": loss, "all_zero_rows": 0.0} for loss in (4.0, 3.0)]
    assert grid_parts.loss_values(report(*losses))["loss"] == {"8": 3.0}


# ---------------------------------------------------------------- claims

def judged(tmp_path, monkeypatch, ours, values, more="", seeds=(1, 2, 3), diverged=(), bases=()):
    """The verdict on a claim. values is {row: {seed: number}}; seeds are those that the rows are to have; bases pairs
    each row with the one that it continues."""
    grid = read(tmp_path, ROWS, '[[run]]\nattn = "lssa"\n', LOSS,
                f'[[claim]]\nname = "c"\npaper = "p"\nours = "{ours}"\n{more}')
    for row in grid.rows.values():
        row.seeds = list(seeds)
    for row, base in bases:
        grid.rows[row].init_from = base
    plan = type("Plan", (), {"grid": grid})
    monkeypatch.setattr(grid_report, "values_of", lambda plan, row, size, of: values.get(row, {}))
    monkeypatch.setattr(grid_report, "diverged", lambda plan, row, size: row in diverged)
    return grid_report.verdict_on(plan, grid.claims[0])


SOFTMAX, INFINITE = {1: 3.0, 2: 4.0, 3: 5.0}, {1: math.inf, 2: math.inf, 3: math.inf}


@pytest.mark.parametrize("ours, softmax, ssmax, verdict", [
    # Two rows, so the interval is that of a paired test: -0.067 ± 0.143, then -0.1 ± 0.099.
    ("ssmax < softmax", SOFTMAX, {1: 2.9, 2: 3.9, 3: 5.0}, "undecided"),
    ("ssmax < softmax", SOFTMAX, {1: 2.94, 2: 3.9, 3: 4.86}, "agrees"),
    ("ssmax < softmax", SOFTMAX, {1: 3.1, 2: 4.1, 3: 5.12}, "disagrees"),
    ("ssmax < softmax", SOFTMAX, INFINITE, "disagrees"),
    ("ssmax > softmax", SOFTMAX, INFINITE, "agrees"),
    ("ssmax > softmax", INFINITE, INFINITE, "undecided"),
    ("ssmax > softmax", SOFTMAX, {1: math.inf, 2: 4, 3: 5}, "undecided"),
    ("ssmax < 3.5", SOFTMAX, {1: 3.0, 2: 3.1, 3: 3.2}, "agrees"),
    ("ssmax < softmax", SOFTMAX, {}, "not run"),
    ("ssmax < softmax", {1: 3.1}, {1: 3.0, 2: 3.1, 3: 3.0}, "1 of 3 seeds"),
    ("ssmax < softmax", {1: 3.1, 3: 3.2}, {1: 3.0, 2: 3.1, 3: 3.0}, "2 of 3 seeds"),
])
def test_verdicts(tmp_path, monkeypatch, ours, softmax, ssmax, verdict):
    found = judged(tmp_path, monkeypatch, ours, {"softmax": softmax, "ssmax": ssmax})
    assert found.verdict == verdict and found.seeds == min(len(softmax), len(ssmax))


def test_differences_are_seed_by_seed(tmp_path, monkeypatch):
    """The rows' own spread over seeds is 1, but not that of their difference. Of a loss at L, a third row narrows the
    interval, and a row with one seed has one; of anything else, the rows' own spreads decide."""
    two = {"softmax": {1: 3.0, 2: 4.0, 3: 5.0}, "ssmax": {1: 2.9, 2: 3.88, 3: 4.86}}
    at_L, beyond = "", 'of = "lengths.loss@4L"\n'
    for values, of, found in (
            (two, at_L, ("-0.120 ± 0.050", 3, "agrees")),
            (two | {"lssa": {1: 2.0, 2: 3.0, 3: 4.0}}, at_L, ("-0.120 ± 0.026", 3, "agrees")),
            (two | {"ssmax": {1: 2.9}, "lssa": {1: 2.9, 2: 3.88, 3: 4.86}}, at_L, ("-0.100 ± 0.086", 1, "agrees")),
            ({"softmax": {1: 3.0}, "ssmax": {1: 2.9}}, at_L, ("-0.100", 1, "undecided: one seed")),
            ({"softmax": {1: math.inf}, "ssmax": {1: 3.0}}, at_L, ("diverged", 1, "undecided: one seed")),
            (two, beyond, ("-0.1 ± 2.2", 3, "undecided")),
            (two | {"ssmax": {1: 2.9}}, beyond, ("-0.100", 1, "undecided: one seed"))):
        verdict = judged(tmp_path, monkeypatch, "ssmax < softmax", values, of, min(values.values(), key=len))
        assert (verdict.difference, verdict.seeds, verdict.verdict) == found


def test_a_row_that_continues_another_is_paired_with_it_and_not_pooled(tmp_path, monkeypatch):
    values = {"softmax": SOFTMAX, "ssmax": {1: 2.9, 2: 3.88, 3: 4.86}, "lssa": {1: 2.0, 2: 3.0, 3: 4.1}}
    for ours, of, found in (("ssmax < softmax", "", "-0.120 ± 0.050"),
                            ("ssmax < softmax", 'of = "lengths.loss@4L"\n', "-0.120 ± 0.050"),
                            ("lssa < softmax", "", "-0.97 ± 0.14")):
        assert judged(tmp_path, monkeypatch, ours, values, of, bases=[("ssmax", "softmax")]).difference == found


def test_a_claim_on_a_row_that_was_left_out_is_not_run(tmp_path):
    plan = reported(tmp_path, UNEVEN, BETTER)
    plan.grid = grid_file.limited(plan.grid, ["softmax"])
    assert grid_report.verdict_on(plan, plan.grid.claims[0]).verdict == "not run"


@pytest.mark.parametrize("of_softmax", [{}, {1: 0.2, 3: 0.3}])
def test_what_a_diverged_run_does_not_have_leaves_a_claim_undecided(tmp_path, monkeypatch, of_softmax):
    """Such as needles found. Its loss counts as infinite."""
    found = judged(tmp_path, monkeypatch, "ssmax > softmax",
                   {"softmax": of_softmax, "ssmax": {1: 0.9, 2: 0.8, 3: 0.7}}, diverged=["softmax"])
    assert found.verdict == "undecided: softmax diverged"


@pytest.mark.parametrize("lssa, verdict", [(1.0, "agrees"), (4.0, "disagrees"), (2.0, "undecided")])
def test_a_chain_needs_every_pair(tmp_path, monkeypatch, lssa, verdict):
    values = {"softmax": SOFTMAX, "ssmax": {1: 2.0, 2: 3.01, 3: 4.0}, "lssa": {1: lssa, 2: lssa + 1, 3: lssa + 2.02}}
    assert judged(tmp_path, monkeypatch, "lssa < ssmax < softmax", values).verdict == verdict


# ---------------------------------------------------------------- the time that it takes

def test_the_estimate_has_validations_and_evaluations(data, tmp_path):
    """Those of all tokens of the text take longer here than training; what is finished counts as long as it took."""
    evals = LOSS + '[[eval]]\nname = "other"\ntask = "positions"\n'
    grid = read(tmp_path, ROWS, evals, data=data)
    plan = grid_parts.Plan(grid, grid_store.Results(tmp_path / "none"), grid_parts.texts_of(grid, None), tmp_path)
    training, one_job = 16 * 32 / 100, grid_run.Estimate(plan, speed=100, start=1)
    softmax, _, lengths, other = (one_job.seconds(plan.todo[i]) for i in (0, 3, 1, 2))
    validations = 8 * 200 / 3 / 100
    assert softmax == pytest.approx(training + validations + 1, abs=2) and validations > training
    assert lengths == pytest.approx(3 * 200 / 3 / 100 + 1, abs=0.5) and other < lengths
    total = one_job.total(plan.todo, 1)
    assert total == pytest.approx(2 * (softmax + lengths + other), rel=1e-6) and one_job.total(plan.todo, 2) < total
    for part, seconds in (plan.todo[0], 40), (plan.todo[1], 30):
        one_job.add(part, {"info": {"seconds": 9, "whole": seconds}, "values": {"steps": 16}})
    left = [part for part in plan.todo if part.run.row == "ssmax"]
    assert [one_job.seconds(part) for part in left] == pytest.approx([40, 30, other], abs=0.5)


# ---------------------------------------------------------------- reports of made-up results

def reported(tmp_path, losses, *more, head=""):
    """The plan of a grid with results as they would be: {row: {seed: validation loss, None if it diverged}}. The
    evaluation `lengths` has the validation loss + 1 at every length, under another normalizer + 2."""
    text = "".join(f'[[run]]\nattn = "{row}"\nseeds = {list(of)}\ngroup = "{"A" if row == "softmax" else "B"}"\n'
                   for row, of in losses.items())
    path = write(tmp_path, text, LOSS, *more)
    path.write_text(path.read_text().replace('baseline = "softmax"', f'baseline = "softmax"\n{head}'))
    grid = grid_file.read(path, "small", list)
    results = type("Results", (), {"entries": {}})
    for run in grid.runs():
        loss = losses[run.row][run.seed]
        curve = [[32 * i, 4.0 + 1 / i] for i in range(1, 9)]
        results.entries[grid_store.key_of(grid, run, {})] = {
            "outcome": "diverged at step 3" if loss is None else "", "info": {"seconds": 60},
            "values": {"val_loss": loss, "grad_norm_max": loss}, "curves": {"val": curve, "loss": curve}}
        for e in grid.evals_of(run) if loss is not None else ():
            results.entries[grid_store.eval_key(grid, run, e, {})] = {
                "outcome": "", "values": {"loss": {str(T): loss + (2 if e.attn else 1) for T in e.lengths}}}
    return grid_parts.Plan(grid, results, {}, tmp_path / "out")


UNEVEN = {"softmax": {1: 5.0, 2: 4.0, 3: 4.8}, "ssmax": {1: 4.99, 2: 4.1, 3: 4.9}, "lssa": {1: 4.98}, "exp": {1: None}}


def test_differences_and_ranks_are_by_seed(tmp_path):
    """lssa is better than softmax with the one seed that both have, but worse than softmax's mean. The intervals are
    4.303 times a spread over seeds of 0.0635: over √3 for ssmax, as it is for a row with one seed."""
    plan = reported(tmp_path, UNEVEN, head='sort = "loss"')
    table, = grid_report.training_tables(plan)
    assert table.head == ["row", "validation loss", "minus softmax", "largest gradient norm", "clipped steps",
                          "all-zero rows", "minutes", "outcome"]
    assert [row[:4] for row in table.rows] == [
        ["1. lssa", "4.980", "-0.02 ± 0.27", "4.98"],
        ["2. softmax", "5.00 (3 seeds: 4.60 ± 0.53)", "+0.000", "5"],
        ["3. ssmax", "4.99 (3 seeds: 4.66 ± 0.49)", "+0.06 ± 0.16 (3)", "4.99"],
        ["4. exp", "diverged", "", ""]]
    axes, = drawn(grids.final_picture(plan))
    dots = [(x, y) for bars in axes.containers for x, y in zip(*bars[0].get_data())]
    assert dots == [(pytest.approx(-0.02), 0), (0, 1), (pytest.approx(0.19 / 3), 2)]
    wide = 4.302653 * np.std([-0.01, 0.1, 0.1], ddof=1)
    assert axes.patches[0].get_x() == pytest.approx(-wide, rel=1e-5) and axes.patches[0].get_width() == pytest.approx(
        2 * wide, rel=1e-5)
    half = wide / math.sqrt(3)
    [[a, b]] = [segment for bars in axes.containers for lines in bars[2] for segment in lines.get_segments()]
    assert (a[0], b[0]) == pytest.approx((0.19 / 3 - half, 0.19 / 3 + half), rel=1e-5)
    assert [text.get_text() for text in axes.texts] == ["-0.020", "+0.000", "+0.063", "diverged"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lssa", "softmax", "ssmax", "exp"]


def test_a_baseline_that_diverged_with_one_seed_is_not_compared_with(tmp_path):
    plan = reported(tmp_path, {"softmax": {1: None, 2: 4.0}, "ssmax": {1: 5.0, 2: 4.1}, "lssa": {1: 4.9, 2: 4.2}})
    found = {x.label: (x.loss, x.difference.mean) for x in grid_report.trained_rows(plan)}
    assert found["softmax"] == (math.inf, math.inf)
    assert found["ssmax"] == pytest.approx((4.55, 0.1)) and found["lssa"] == pytest.approx((4.55, 0.2))
    assert grid_report.training_tables(plan)[0].rows[0][1:4] == ["diverged (1 of 2)", "", "4"]
    claim = type("Claim", (), {"ours": ["softmax", "<", "ssmax"], "of": "train.grad_norm_max",
                               "of_right": "train.grad_norm_max", "size": list(plan.grid.scale.sizes)[0],
                               "within": 0.0})
    assert grid_report.verdict_on(plan, claim).verdict != "agrees", "a diverged run has the largest gradient norm"


def test_a_grid_without_a_seed_in_common_shows_first_seeds(tmp_path):
    plan = reported(tmp_path, {"softmax": {1: 5.0, 2: 4.0}, "lssa": {3: 4.5}})
    assert [(x.loss, x.difference.mean) for x in grid_report.trained_rows(plan)] == [(5.0, 0.0), (4.5, -0.5)]
    assert [row[2] for table in grid_report.training_tables(plan) for row in table.rows] == ["+0.000", ""]


def test_tables_and_pictures_of_lengths_have_one_set_of_seeds(tmp_path):
    plan = reported(tmp_path, UNEVEN)
    rows = {row[0]: row[1:] for table in grid_report.eval_tables(plan, plan.grid.evals) for row in table.rows}
    assert rows == {"softmax": ["6.00 (3 seeds: 5.60 ± 0.53)"] * 3, "ssmax": ["5.99 (3 seeds: 5.66 ± 0.49)"] * 3,
                    "lssa": ["5.980"] * 3, "exp": ["diverged"] * 3}
    axes, = drawn(grids.lengths_picture(plan, "lengths", plan.grid.evals))
    lines = {line.get_label(): line for line in axes.lines if len(line.get_xdata()) == 3}
    assert {name: list(lines[name].get_ydata()) for name in ("softmax", "ssmax", "lssa")} == {
        "softmax": [6.0] * 3, "ssmax": [5.99] * 3, "lssa": [5.98] * 3}
    assert "(x: not finite)" in axes.get_xlabel()
    axes, = drawn(grids.curves_picture(plan))
    assert "exp (diverged at step 3)" in axes.get_legend_handles_labels()[1]


def drawn(picture):
    """The axes of its panels."""
    return charts.figure(picture).axes


NASTY = r"a_b & 50% #1 $x$ {y} \z ~^ <i> | \"q\" --lr [2] * α → ±1 ü 中"


def test_tables_for_spreadsheets(tmp_path):
    """With all seeds of each row, in full precision."""
    plan = reported(tmp_path, UNEVEN)
    found = list(csv.DictReader(io.StringIO(grid_export.as_csv(plan))))
    cells = {(row["row"], row["table"], row["metric"], row["column"]): row for row in found}
    ssmax = cells["ssmax", "Training", "val_loss", ""]
    assert ssmax["seeds"] == "3" and float(ssmax["mean"]) == pytest.approx(13.99 / 3)
    assert float(ssmax["spread"]) == pytest.approx(np.std([4.99, 4.1, 4.9], ddof=1))
    minus = cells["ssmax", "Training", "val_loss", "minus softmax"]
    assert float(minus["mean"]) == pytest.approx(0.19 / 3) and ssmax["interval"] == ""
    assert float(minus["interval"]) == pytest.approx(0.157764, rel=1e-5)
    assert float(cells["softmax", "lengths", "loss", "32"]["mean"]) == pytest.approx(5.6)
    alone = cells["lssa", "lengths", "loss", "8"]
    assert (alone["mean"], alone["spread"], alone["seeds"]) == ("5.98", "", "1")
    assert cells["exp", "Training", "val_loss", ""]["mean"] == "inf"


def test_tables_for_latex(tmp_path):
    """Any name of a row is shown as it is, and is no command."""
    plan = reported(tmp_path, UNEVEN)
    plan.grid.name = NASTY
    label = grid_export.latex(NASTY)
    assert not re.search(r"(?<!\\)[&%#$_~^]", label.replace("^2", "")) and "\\textbackslash{}z" in label
    text = grid_export.as_latex(plan)
    assert label in text and "half of their 95\\% intervals" in text
    training, lengths = re.findall(r"\\begin{tabular}{(l.*?)}\n(.*?)\\end{tabular}", text, re.S)
    for columns, body in training, lengths:
        rows = [line for line in body.splitlines() if line.endswith("\\\\")]
        assert len(rows) == 5 and all(len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1 for row in rows)
    assert "softmax & 4.60 $\\pm$ 0.53 &  & 3 \\\\" in training[1] and "lssa & 4.980 & " in training[1]
    assert "$-$0.02 $\\pm$ 0.27 & 1" in training[1] and "exp & diverged & " in training[1]


def test_names_are_no_html(tmp_path):
    """In the report in Markdown: paper, groups, failures and tables. The plain text has them as they are."""
    plan = reported(tmp_path, {"softmax": {1: 5.0}, "ssmax": {1: 4.5}})
    plan.grid.paper = "A <b> & C"
    plan.grid.rows["ssmax"].group = "<i>"
    text = grid_report.write(plan, tmp_path, {"x<y": "z"}, draw=False)
    markdown = (tmp_path / "report.md").read_text()
    for name in "A <b> & C", "<i>", "x<y":
        assert name in text and name not in markdown
    assert "A &lt;b&gt; &amp; C" in markdown and "### &lt;i&gt;\n" in markdown
    assert grid_report.Table("", ["<u>|"], [["a & b"]]).markdown() == "| &lt;u&gt;\\| |\n|---|\n| a &amp; b |\n"


def test_shares_of_all_zero_rows():
    """The mean over the seeds of the last step's share, and the largest of any step."""
    assert grid_report.zero_rows_text([0.01, 0.03], [0.05, 0.25]) == "2% (most: 25%)"


def set_values(plan, evals):
    """Replaces the results of the plan's evaluations by {name: values}."""
    for run in plan.grid.runs():
        for e in plan.grid.evals_of(run):
            plan.results.entries[grid_store.eval_key(plan.grid, run, e, {})]["values"] = evals[e.name]


SCORES = ('[[eval]]\nname = "one prompt"\ntask = "needle"\nlengths = ["64L"]\nmetric = "best_score"\n'
          'flags = { samples = 1, depths = [50], digits = 1 }\n')


def test_needle_scores_are_not_drawn_as_needles_found(tmp_path):
    found = {"right": {"512": 0.0, "mean": 0.0, "512 at 50 %": 0.0}, "best_score": {"512": 0.2, "mean": 0.2}}
    for metric, pictures in (("best_score", set()), ("right", {"one prompt"})):
        plan = reported(tmp_path, {"softmax": {1: 5.0}}, SCORES.replace("best_score", metric))
        set_values(plan, {"one prompt": found, "lengths": {"loss": {"8": 5.0}}})
        assert {name for name, picture in grids.pictures(plan) if picture} & {"one prompt"} == pictures
        assert bool(grid_report.needle_scores_note(plan, plan.grid.evals[1:])) == (metric == "best_score")


def test_the_scalars_picture(tmp_path):
    plan = reported(tmp_path, {"ssmax": {1: 5.0}, "softmax": {1: 5.0}})
    values = {"s": [1.3, 0.8, 0.8, 0.9], "b": [0.1, 0.2, 0.3, 0.4]}
    for entry in plan.results.entries.values():
        entry["values"] |= values if "curves" in entry else {}
    for axes, numbers in zip(drawn(grids.scalars_picture(plan)), values.values(), strict=True):
        assert [list(line.get_ydata()) for line in axes.lines if line.get_label() == "ssmax, seed 1"] == [numbers]


def test_sides_with_two_numbers_of_one_evaluation_have_different_names(tmp_path):
    plan = reported(tmp_path, UNEVEN, CLAIM, 'ours = "lssa < lssa"\n',
                    'of = "lengths.loss@L"\nof-right = "lengths.loss@4L"\n')
    sides = grid_report.verdict_on(plan, plan.grid.claims[0]).ours
    assert sides == "lssa (lengths.loss@L) 5.980; lssa (lengths.loss@4L) 5.980"


# ---------------------------------------------------------------- runs

WHOLE = ROWS + f"""
[[run]]
name = "later"
attn = "ssmax"
switch = {{ from = "softmax", at = "S/2" }}
group = "B"
[[run]]
name = "tuned"
init-from = "softmax"
flags = {{ seq-len = "L/2", batch = 8, steps = "S/4" }}
group = "B"
[[run]]
name = "boom"
attn = "{OVERFLOWS}"
group = "B"
[[eval]]
name = "positions"
task = "positions"
lengths = ["L", "4L"]
runs = ["softmax", "tuned", "boom"]
[[eval]]
name = "afterwards"
task = "loss"
attn = "{{run.attn}}+post=reweight:3"
runs = ["softmax"]
[[claim]]
name = "a claim"
paper = "their | number"
ours = "ssmax < softmax"
[[formula]]
name = "fading"
low = -2
high = 3
s = 0.43
against = "n"
n = [10, 1000]
"""


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A grid that ran to its end: (its file, its output folder, what it printed)."""
    folder = tmp_path_factory.mktemp("whole")
    path = write(folder, WHOLE, data=data)
    return path, folder / "out", run(path, folder / "out", "--jobs", 2, draw=True)


def test_results_are_those_of_the_runs(whole):
    _, out, _ = whole
    found = entries(out)
    values = found["ssmax", 1337, "train"]["values"]
    lines = metrics(folder_of(out, "ssmax"), ["tokens", "val_loss", "grad_norm"])
    assert values["val_loss"] == lines[-1][1] and values["grad_norm_max"] == max(norm for *_, norm in lines)
    assert values["clipped"] == sum(norm > 1 for *_, norm in lines) / 16 and values["steps"] == 16
    assert (found["ssmax", 1337, "train"]["curves"]["val"] == [[t, loss] for t, loss, _ in lines if loss is not None]
            and len(values["s"]) == 1)
    report = json.loads(next(folder_of(out, "softmax").glob("eval/positions-*/eval.json")).read_text())
    by_length = {str(row["seq_len"]): row["loss"] for row in report["results"]}
    assert found["softmax", 1337, "positions"]["values"]["loss"] == by_length
    by_position = found["softmax", 1337, "positions"]["values"]["by_position"]["32"]
    assert by_position == pytest.approx(report["results"][1]["loss_by_position"], rel=1e-6)
    markdown = (out / "tiny-small/report.md").read_text()
    parts = [f"{sum(by_position[i:i + 2]) / 2:.3f}" for i in range(0, 32, 2)]
    assert f"| softmax | {' | '.join(parts)} |" in markdown
    assert "| loss of the positions up to | L/4 | L/2 |" in markdown


def test_an_evaluation_under_another_normalizer_keeps_those_numbers(whole):
    found = entries(whole[1])
    own, other = (found["softmax", 1337, name]["values"]["loss"]["8"] for name in ("positions", "afterwards"))
    assert own != other and found["softmax", 1337, "afterwards"]["identity"]["attn"] == "softmax+post=reweight:3"


def test_divergence_is_a_result(whole):
    _, out, text = whole
    assert (entries(out)["boom", 1337, "train"]["outcome"] == "diverged at step 1"
            and ("boom", 1337, "positions") not in entries(out))
    assert "boom, seed 1337, positions: not run, because boom, seed 1337 diverged at step 1" in text
    assert "Not run yet" not in text and "failed" not in text


def test_the_report(whole):
    _, out, text = whole
    markdown = (out / "tiny-small/report.md").read_text()
    found = entries(out)
    loss = {row: found[row, 1337, "train"]["values"]["val_loss"] for row in ("softmax", "ssmax", "later", "tuned")}
    for row in loss:
        assert f"| {row} | {loss[row]:.3f} | {loss[row] - loss['softmax']:+.3f} |" in markdown
    assert ("| boom | diverged |" in markdown and "diverged at step 1 |" in markdown
            and "| a claim | their \\| number |" in markdown)
    assert f"{loss['ssmax'] - loss['softmax']:+.3f} | 1 | undecided: one seed |" in markdown
    positions = found["tuned", 1337, "positions"]["values"]["loss"]
    assert (f"| tuned | {positions['8']:.3f} | {positions['32']:.3f} |" in markdown
            and "| row | L = 8 | 4 L |" in markdown)
    assert "| 1,000 | 0.12935 | 0.99965 |" in markdown, "1/(1 + 999 e^-5) and 1/(1 + 999 e^(-5 · 0.43 ln 1000))"
    drawn = set(re.findall(r"\]\((.+)\.png\)", markdown))
    assert drawn == {"curves", "final", "scalars", "positions", "positions-positions", "afterwards", "fading"}
    for name in drawn:
        assert (out / f"tiny-small/{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_a_row_that_switches_equals_a_run_from_its_first_step(whole, data, tmp_path):
    """Its first steps were copied from the other row."""
    _, out, _ = whole
    copied = folder_of(out, "later")
    train(data, "--val-data", f"{data}/*_val_*.bin", "--seed", 1337, "--steps", 16, "--val-every", 2,
          "--val-tokens", 200, "--attn", "softmax", "--attn-switch", "8:ssmax", "--out", tmp_path / "run",
          "--threads", 1)
    assert_same_run(copied, tmp_path / "run", 16)
    assert "resumes at step 8" in copied.with_name(copied.name + ".log").read_text()


def test_finished_parts_are_not_repeated_and_a_fresh_clone_has_their_results(whole, tmp_path):
    path, out, _ = whole
    logs = {log: log.read_text() for log in out.rglob("*.log")}
    assert "0 runs" in run(path, out) and logs == {log: log.read_text() for log in out.rglob("*.log")}
    shutil.copy(out.parent / "results.json", tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    text = run(path, tmp_path / "out")
    assert "0 runs of 0 tokens in all, 0 evaluations" in text and "time   " not in text
    assert not (tmp_path / "out/runs").exists()
    tables = [re.sub(r"^!\[.*\n\n?", "", (folder / "tiny-small/report.md").read_text(), flags=re.M).rstrip()
              for folder in (tmp_path / "out", out)]
    assert tables[0] == tables[1] and "| ssmax |" in tables[0]
    assert (tmp_path / "results.json").read_bytes() == before


def test_a_report_without_matplotlib_has_its_tables(whole, tmp_path):
    path, out, _ = whole
    shutil.copy(out.parent / "results.json", tmp_path)
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")")
    process = started(path, tmp_path / "out", "--report", PYTHONPATH=str(tmp_path))
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert "no pictures in the report of tiny: No module named 'matplotlib'. Use .venv/bin/python" in text
    report = (tmp_path / "out/tiny-small/report.md").read_text()
    assert "| ssmax |" in report and "![" not in report


@pytest.mark.drawn(3, of="further calls")
def test_a_fresh_clone_trains_again_only_what_a_new_evaluation_needs(whole, tmp_path):
    path, out, _ = whole
    shutil.copy(out.parent / "results.json", tmp_path)
    more = tmp_path / "more.toml"
    more.write_text(path.read_text() + '[[eval]]\nname = "new"\ntask = "loss"\nruns = ["tuned"]\n')
    text = run(more, tmp_path / "out")
    assert "2 runs of 640 tokens in all, 1 evaluation; 2 of the runs again" in text
    old, new = entries(out), entries(tmp_path / "out")
    assert set(new) - set(old) == {("tuned", 1337, "new")} and all(new[key] == old[key] for key in old)


@pytest.mark.drawn(3, of="further calls")
def test_the_report_of_what_there_is_needs_no_text(whole, tmp_path):
    path, out, _ = whole
    shutil.copy(out.parent / "results.json", tmp_path)
    elsewhere = tmp_path / "grid.toml"
    elsewhere.write_text(re.sub(r'(train|val) = "/.*/', r'\1 = "/nowhere/', path.read_text()))
    text = run(elsewhere, tmp_path / "out", "--report", "--only", "s*max", "--csv", "--latex", TRAIN_GPT2="/nowhere",
               EVAL_GPT2="/nowhere")
    assert f"{entries(out)['ssmax', 1337, 'train']['values']['val_loss']:.3f}" in text and "positions" in text
    assert "tuned" not in text and "tables.csv" in text and (tmp_path / "out/tiny-small/tables.tex").exists()


@pytest.mark.drawn(3, of="further calls")
def test_a_dry_run_writes_nothing(data, tmp_path):
    path = write(tmp_path, ROWS, LOSS, data=data)
    text = run(path, tmp_path / "out", "--dry-run")
    assert ("2 runs of 1,024 tokens in all, 2 evaluations" in text and "measured over a few steps" in text
            and "of checkpoints in" in text)
    assert "ssmax, seed 1337: 16 steps of 32 tokens, to do; 1 of 1 evaluation to do" in text
    assert [file.name for file in tmp_path.iterdir()] == ["grid.toml"]


@pytest.mark.drawn(3, of="further calls")
def test_a_failing_run_does_not_stop_the_others(data, tmp_path):
    """Nor do logs with half a character of a sample in them."""
    program = script_of(tmp_path / "train", f"printf 'sample \\342\\202 end\\n'\nexec {TRAIN} \"$@\"")
    path = write(tmp_path, '[[run]]\nname = "bad"\nattn = "ssmax"\nflags = { seq-len = 9999, batch = 1 }\n', ROWS, LOSS,
                 data=data)
    text = run(path, tmp_path / "out", code=1, TRAIN_GPT2=program)
    assert "grid.py: failed: tiny: bad, seed 1337: exit 3: " in text
    assert all(b"sample \xe2\x82 end" in log.read_bytes() for log in (tmp_path / "out/runs").glob("*.log"))
    assert "bad, seed 1337, lengths: not run, because bad, seed 1337 failed" in text
    assert {key for key in entries(tmp_path / "out")} == {(row, 1337, part) for row in ("softmax", "ssmax")
                                                          for part in ("train", "lengths")}
    assert "FAILED: bad" in (tmp_path / "out/tiny-small/report.md").read_text()


@pytest.mark.parametrize("row, message", [
    ('attn = "ssmx"', "[[run]] 2 (x): --attn ssmx: unknown normalizer. Did you mean ssmax?"),
    ('attn = "ssmax"\n[[eval]]\nname = "e"\ntask = "needle"\nflags = { max-tokens = 3 }',
     "[[eval]] 1 (e): --max-tokens is for --task loss or positions, not needle."),
    ('attn = "ssmax"\n[[eval]]\nname = "e"\ntask = "loss"\nattn = "{run.attn}+post=rewait:3"',
     "[[eval]] 1 (e): --attn softmax+post=rewait:3: unknown value for post")])
def test_what_a_program_does_not_have_is_rejected_before_any_run(data, tmp_path, row, message):
    path = write(tmp_path, '[[run]]\nattn = "softmax"\n', f'[[run]]\nname = "x"\n{row}\n', data=data)
    assert message in run(path, tmp_path / "out", code=3) and not (tmp_path / "out").exists()


def test_flags_for_losses_are_not_given_to_other_tasks(tmp_path):
    """eval_gpt2 rejects flags that its task does not use."""
    evals = ('[[eval]]\nname = "n"\ntask = "needle"\nlengths = ["4L"]\nflags = { samples = 3, depths = [10, 90] }\n'
             f'[[eval]]\nname = "a"\ntask = "attention"\n{PROMPTS}'
             '[[eval]]\nname = "s"\ntask = "scores"\n')
    grid = read(tmp_path, ROWS, LOSS, evals)
    assert [(e.flags.get("max-tokens"), e.reads_text(), grid_parts.eval_tokens(e, 8)) for e in grid.evals] == [
        (200, True, 600), (None, True, 192), (None, False, 0), (None, False, 0)]


def test_a_plan_for_a_gpu_needs_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(grid_parts, "ROOT", tmp_path)
    for name in "TRAIN", "EVAL":
        monkeypatch.delenv(f"{name}_GPT2", raising=False)
        (tmp_path / f"{name.lower()}_gpt2").touch()
    scale = type("Scale", (), {"program": "train_gpt2cu", "eval_program": "eval_gpt2cu"})
    with pytest.raises(Refused, match="train_gpt2cu: no such program. Build it with `make train_gpt2cu`"):
        grid_parts.Programs(scale)
    programs = grid_parts.Programs(scale, plan_only=True)
    assert (programs.train, programs.stand_in) == (str(tmp_path / "train_gpt2"), True)
    for name in "train_gpt2cu", "eval_gpt2cu":
        (tmp_path / name).touch()
    programs = grid_parts.Programs(scale, plan_only=True)
    assert (programs.train, programs.stand_in) == (str(tmp_path / "train_gpt2cu"), False)


def test_programs_that_cannot_be_used_are_named(data, tmp_path):
    path, program = write(tmp_path, ROWS, data=data), tmp_path / "program"
    program.write_text("#!/bin/sh\necho train_gpt2: broken >&2\nexit 9\n")
    text = run(path, tmp_path / "out", code=3, TRAIN_GPT2=str(program))
    assert text.startswith(f"grid.py: {program}: Permission denied.\n  Finished parts are kept.")
    program.chmod(0o755)
    path.write_text(path.read_text().replace('["softmax", "ssmax"]', '"presets"'))
    assert (f"{program} --attn help: expected a table of normalizers, found exit code 9: broken"
            in run(path, tmp_path / "out", code=3, TRAIN_GPT2=str(program)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_estimate_of_the_disk(data, tmp_path, dtype):
    """That of a dry run is what the run's checkpoints then take."""
    path = write(tmp_path, f'[[run]]\nattn = "softmax"\nflags = {{ dtype = "{dtype}", ckpt-every = 4, keep = 3 }}\n',
                 data=data)
    path.write_text(path.read_text().replace(MODEL, "layers=1,heads=2,channels=64,ffn=128,vocab=97"))
    text = run(path, tmp_path / "out", "--dry-run")
    number, unit = re.search(r"disk +about ([\d.]+) (kB|MB) of checkpoints", text).groups()
    run(path, tmp_path / "out")
    files = list(folder_of(tmp_path / "out", "softmax").glob("ckpt/*/*.safetensors"))
    assert len(files) == 6
    assert float(number) * {"kB": 1e3, "MB": 1e6}[unit] == pytest.approx(sum(f.stat().st_size for f in files), rel=0.03)


def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    results = grid_store.Results(tmp_path / "results.json")
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(grid, "run_grid", lambda *_: results.add("a", {}))
    monkeypatch.setattr(sys, "argv", ["grid.py", str(write(tmp_path, ROWS)), "--report"])
    assert grid.main() == 4
    assert f"grid.py: {tmp_path}/results.json: No space left on device." in capsys.readouterr().err
    assert not list(tmp_path.glob("*.tmp")) and not results.path.exists()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def lacking(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    monkeypatch.setattr(grid_run.fcntl, "flock", lacking)
    with pytest.raises(Refused, match="^--out: .*/lock: cannot lock it: Function not implemented.\n  Pass an --out"):
        grid_run.lock(tmp_path)
    with pytest.raises(Refused, match="^.*: cannot lock it: Function not implemented.\n  Pass --results FILE on"):
        grid_store.Results(tmp_path / "results.json").add("a", {})


@pytest.mark.parametrize("flags, code, message", [
    (["--seeds", "0"], 2, "error: --seeds 0: expected 1 or more"),
    (["--out", "FILE"], 2, "--out: FILE: expected a folder, found a file. Pass another --out."),
    (["--out", "/proc/x", "--report"], 2, "--out: /proc/x/tiny-small: cannot write there (No such file or directory)."),
    (["--results", "/proc/x/y.json"], 2, "--results: /proc/x: cannot write there (No such file or directory). Pass"),
    (["--results", "/", "--report"], 3, "/: expected a file with the results of grids, or none yet (Is a directory)")])
def test_flags_that_cannot_be_followed_are_named(data, tmp_path, flags, code, message):
    """Before any run."""
    file = tmp_path / "file"
    file.write_text("kept")
    text = run(write(tmp_path, ROWS, data=data), tmp_path / "out", *(flag.replace("FILE", str(file)) for flag in flags),
               code=code)
    assert f"grid.py: {message.replace('FILE', str(file))}" in text and file.read_text() == "kept"
    assert not (tmp_path / "out/runs").exists()


@pytest.mark.drawn(3, of="further calls")
def test_texts_are_prepared(tmp_path):
    (tmp_path / "make.py").write_text("import sys\n"
                                      f"sys.path.insert(0, {str(ROOT / 'dev/tests')!r})\n"
                                      "import trainer\nfrom pathlib import Path\n"
                                      "Path(sys.argv[1]).mkdir()\ntrainer.make_data(Path(sys.argv[1]))\n")
    path = write(tmp_path, '[[run]]\nattn = "softmax"\n', data=tmp_path / "text")
    assert "no shards match" in run(path, tmp_path / "out", code=3)
    prepare = f'prepare = ["{tmp_path}/make.py {tmp_path}/text"]'
    path.write_text(path.read_text().replace("[data.small.text]", f"[data.small.text]\n{prepare}"))
    assert "pass --trust-grid" in run(path, tmp_path / "out", code=3) and not (tmp_path / "text").exists()
    run(path, tmp_path / "out", "--trust-grid", "--dry-run")
    assert not (tmp_path / "text").exists()
    assert "softmax, seed 1337: validation loss" in run(path, tmp_path / "out", "--trust-grid")
    shutil.rmtree(tmp_path / "text")
    (tmp_path / "make.py").write_text("raise SystemExit(3)\n")
    assert "ended with exit code 3" in run(path, tmp_path / "out", "--trust-grid", code=3)


@pytest.mark.parametrize("section, line", [
    *(("[data.small.text]", f'prepare = ["{command}"]') for command in (
        "/bin/sh -c x", "../x.py", "data/../scripts/grid.py x", "data/docs/x.py", "data/x.sh", "", "scripts/plot.py x",
        "data/text.py x --out /tmp/x", "data/text.py x --out=../x", "data/text.py ~/.ssh --out data/x",
        "data/text.py x --out scripts/x", "data/text.py x --out data", "data/text.py x --ou scripts/x",
        "data/text.py x --o=scripts/x", "data/text.py x --foreign-folder", "data/text.py x --follow")),
    ("[model.small]", 'program = "/bin/sh"'), ("[model.small]", 'program = "eval_gpt2"'),
    ("[model.small]", 'eval-program = "../eval_gpt2"'), ("[[run]]", 'flags = { matmuls = "x" }'),
    *(("[[run]]", f"flags = {{ {flag} = 1 }}") for flag in ("foreign-folder", "follow-links"))])
def test_what_a_grid_file_may_not_start_or_write(tmp_path, section, line):
    """Without --trust-grid. TRAIN_GPT2 and EVAL_GPT2 are the user's own."""
    path = write(tmp_path, '[[run]]\nattn = "softmax"\n')
    path.write_text(path.read_text().replace(section, f"{section}\n{line}"))
    with pytest.raises(Refused, match="--trust-grid"):
        grid_parts.check_trust(grid_file.read(path, "small", list))


def test_no_value_of_a_grid_file_is_a_flag(data, tmp_path):
    """A switch takes no word after it that looks like a flag."""
    rows = f'[[run]]\nattn = "softmax"\nflags = {{ doc-mask = "--out={tmp_path}/other" }}\n'
    assert "--doc-mask" in run(write(tmp_path, rows, data=data), tmp_path / "out", code=3)
    with pytest.raises(Refused, match="expected the name of a flag"):
        read(tmp_path, f'[[run]]\nattn = "softmax"\nflags = {{ "out={tmp_path}/other" = 1 }}\n')
    assert not (tmp_path / "other").exists()


@pytest.mark.drawn(3, of="further calls")
def test_results_are_committed(data, tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run([*git, "init", "-q"], check=True)
    path = write(tmp_path, ROWS, LOSS, data=data)
    who = {f"GIT_{name}_{what}": "x@x" for name in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    run(path, tmp_path / "out", "--commit", "--jobs", 1, **who)
    log = subprocess.run([*git, "log", "--format=%s", "--name-only"], capture_output=True, text=True, check=True).stdout
    assert log.split("\n\n") == ["Results of grid tiny at scale small: ssmax, seed 1337",
                                 "results.json\nResults of grid tiny at scale small: softmax, seed 1337",
                                 "results.json\n"]


# ---------------------------------------------------------------- kills and stops

def started(path, out, *flags, **env):
    """grid.py in a process of its own."""
    command = [str(word) for word in (sys.executable, ROOT / "scripts/grid.py", *words(path, out, *flags))]
    return subprocess.Popen(command, env=environment(**programs(**env)), text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


@pytest.mark.drawn(1, of="kills")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_grid_that_was_killed_resumes(data, tmp_path, how):
    """After kill -9 of grid.py, the trainer saves a checkpoint and ends, and the next grid.py waits for it."""
    stopped, whole = tmp_path / "stopped/out", tmp_path / "whole/out"
    paths = []
    for out in stopped, whole:
        out.parent.mkdir()
        paths.append(write(out.parent, '[[run]]\nattn = "softmax"\nflags = { steps = 1500 }\n', data=data))
    process = started(paths[0], stopped, "--jobs", 1)
    jobs.wait_for(lambda: any(file.stat().st_size > 1000 for file in stopped.glob("runs/*/metrics.jsonl")),
                  "some steps")
    process.send_signal(how)
    said = process.communicate(timeout=300)[0]
    if how == signal.SIGTERM:
        assert process.returncode == 75 and "Rerun the same command to resume" in said
    assert not (stopped.parent / "results.json").exists()
    run(paths[0], stopped, "--jobs", 1)
    run(paths[1], whole)
    assert "resumes at step" in next((stopped / "runs").glob("softmax-*.log")).read_text()
    for folder in (path for path in (whole / "runs").iterdir() if path.is_dir()):
        assert_same_run(stopped / "runs" / folder.name, folder, 1500)
    numbers = [{key: entry["values"] for key, entry in entries(out).items()} for out in (stopped, whole)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 1


@pytest.mark.parametrize("what, how", [("prepare", signal.SIGKILL), ("measure", signal.SIGKILL),
                                       ("measure", signal.SIGTERM)])
def test_a_stop_before_the_first_run_leaves_no_process(data, tmp_path, what, how):
    """While a text is prepared, and while the speed is measured by programs that hang."""
    (tmp_path / "make.py").write_text(f"import os, time\nopen('{tmp_path}/pid', 'w').write(f'{{os.getpid()}}\\n')\n"
                                      "time.sleep(600)\n")
    train = script_of(tmp_path / "slow_train", f'case "$*" in *"--steps=6 "*) echo $$ > {tmp_path}/pid; '
                      f'exec sleep 600;; esac\nexec {TRAIN} "$@"')
    path = write(tmp_path, '[[run]]\nattn = "softmax"\n', data=tmp_path / "text" if what == "prepare" else data)
    path.write_text(path.read_text().replace("[data.small.text]",
                                             f'[data.small.text]\nprepare = ["{tmp_path}/make.py"]'))
    process = started(path, tmp_path / "out", "--trust-grid", TRAIN_GPT2=train)
    jobs.wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"), "the child")
    process.send_signal(how)
    said = process.communicate(timeout=60)[0]
    if how == signal.SIGTERM:
        assert process.returncode == 75 and said.endswith("stopped. Rerun the same command to resume.\n"), said
    jobs.wait_for(lambda: not jobs.alive(int((tmp_path / "pid").read_text())), "the child ends")


@pytest.mark.drawn(1, of="kills")
def test_a_kill_in_an_evaluation_and_two_at_once(data, tmp_path):
    path, out, hung = write(tmp_path, ROWS, LOSS, data=data), tmp_path / "out", tmp_path / "hung"
    slow = script_of(tmp_path / "slow_eval", f'case "$*" in *--model*) [ -e {hung} ] || {{ : > {hung}; exec sleep 600; '
                     f'}};; esac\nexec {EVAL} "$@"')
    process = started(path, out, "--jobs", 1, EVAL_GPT2=slow)
    jobs.wait_for(hung.exists, "the evaluation")
    text = run(path, out, code=7)
    assert f"another grid.py (process {process.pid}) is working here" in text and "pass another --out" in text
    process.kill()
    process.communicate(timeout=300)
    assert set(entries(out)) == {("softmax", 1337, "train")}
    log = next((out / "runs").glob("softmax-*.log")).read_text()
    run(path, out, "--jobs", 1)
    assert (len(entries(out)) == 4
            and next((out / "runs").glob("softmax-*.log")).read_text() == log), "the finished run is not repeated"


@pytest.mark.drawn(3, of="further calls")
def test_a_result_that_was_not_recorded_is_collected(whole, data, tmp_path):
    """A kill just before results.json is written repeats neither the run nor the evaluation."""
    path, out, _ = whole
    shutil.copytree(out, tmp_path / "out")
    logs = {log: log.read_text() for log in (tmp_path / "out").rglob("*.log") if "exp" not in log.name}
    run(path, tmp_path / "out")
    assert logs == {log: log.read_text() for log in logs}
    old, new = entries(out), entries(tmp_path / "out")
    assert {key: entry["values"] for key, entry in old.items()} == {key: entry["values"] for key, entry in new.items()}


# ---------------------------------------------------------------- pages

def test_the_studys_figure(tmp_path):
    """Beyond L, a line with YaRN has the means over seeds of YaRN's evaluations."""
    evals = '[[eval]]\nname = "positions"\ntask = "loss"\nlengths = ["L/2", "L", "4L"]\n' \
            '[[eval]]\nname = "yarn 4"\ntask = "loss"\nlengths = ["4L"]\nflags = { rope-scaling = "yarn:4:8" }\n'
    plan = reported(tmp_path, {"softmax": {1: 5.0, 2: 5.2}}, evals)
    set_values(plan, {"lengths": {}, "positions": {"loss": {"4": 4.5, "8": 4.0, "32": 6.0}},
                      "yarn 4": {"loss": {"32": 5.0}}})
    assert draw_pages.points(plan, "softmax", "positions") == [(4, 4.5, 0), (8, 4.0, 0), (32, 6.0, 0)]
    assert draw_pages.points(plan, "softmax", "yarn {}") == [(4, 4.5, 0), (8, 4.0, 0), (32, 5.0, 0)]


def test_the_pages_figures_are_drawn_from_the_results(tmp_path):
    assert call("draw_pages.py", "--out", tmp_path).returncode == 0
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert "study.png" in drawn and drawn <= {path.name for path in (ROOT / "doc/img").glob("*.png")}


def test_the_pages_tables_are_those_of_the_results(tmp_path):
    """The pages have the numbers of grids/results.json; a number that was changed is noticed."""
    def tables(page, *words):
        return call("grid_tables.py", page, *words, env=programs())
    pages = sorted((ROOT / "doc").glob("results*.md"))
    assert sum(page.read_text().count("<!-- table: ") for page in pages) >= 40
    for page in pages:
        checked = tables(page, "--check")
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    wrong, text = tmp_path / "results.md", (ROOT / "doc/results.md").read_text()
    for pattern in (r"(\| SSMax trains .*?)\d(?=\d )", r"(<!-- numbers: .*?-->.*?\d\.)\d(?=\d)"):
        wrong.write_text(re.sub(pattern, lambda m: m[1] + str((int(m[0][-1]) + 1) % 10), text, count=1, flags=re.S))
        assert wrong.read_text() != text
        found = tables(wrong, "--check")
        assert found.returncode == 1 and "differs" in found.stdout
        assert tables(wrong).returncode == 0 and wrong.read_text() == text
    wrong.write_text("<!-- table: lssa / Clams -->\n")
    assert "the report of lssa has no table Clams. It has Claims;" in tables(wrong).stderr

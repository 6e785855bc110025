"""scripts/plot_eval.py and scripts/report.py: the numbers of eval.json are those in the figures and pages; odd and
broken input; pages without external links; eval_gpt2 draws from any folder, and without Python."""
import base64
import io
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import calls
from calls import call, limited, write_known
from trainer import ROOT
from lib import drawing
from lib.run_folder import Refused
import plot_eval
import report
from lib.pictures import attention, charts, page, results, tasks
from tiny import BIN, BUILD, environment, make_path, run
import tiny

LAYERS, HEADS, L = 2, 3, 64


# ---------------------------------------------------------------- data

def write(folder, task, rows, models=(("a", "softmax"),), **arguments):
    """An eval.json; models: (name, its own normalizer) and, unless it is L, the training length."""
    folder.mkdir(parents=True, exist_ok=True)
    described = [{"name": name, "checkpoint": f"/runs/{name}", "attn": attn, "trained_seq_len": (*length, L)[0]}
                 for name, attn, *length in models]
    (folder / "eval.json").write_text(json.dumps({"task": task, "files": [], "arguments": arguments,
                                                  "models": described, "results": rows}))
    return folder


def loss_rows(model="a", attn="softmax", lengths=(16, 64, 256), start=3.0):
    return [{"model": model, "attn": attn, "seq_len": T, "rope_theta": 1e4, "sequences": 4, "tokens": 4 * T,
             "loss": start + i / 8, "perplexity": math.exp(start + i / 8), "all_zero_rows": 0}
            for i, T in enumerate(lengths)]


def position_rows(T=100, attn="softmax"):
    values = [5 + math.sin(t * t) - 0.01 * t for t in range(T)]
    return [{"model": "a", "attn": attn, "seq_len": T, "loss": 4.0, "perplexity": 55.0, "loss_by_position": values}]


def trial(depth, score, verdict):
    return {"depth": depth, "sample": 0, "city": "Oslo", "number": "12", "answer": "?", "verdict": verdict,
            "best_score": score, "best_layer": 0, "best_head": 1}


def needle_rows(attn="softmax"):
    rows = []
    for i, T in enumerate((64, 128)):
        scores_here = [[0.1 * (l * HEADS + h + 1) / (i + 1) for h in range(HEADS)] for l in range(LAYERS)]
        rows.append({"model": "a", "attn": attn, "seq_len": T, "right": 0.5, "needle_scores": scores_here,
                     "depths": [{"depth": depth, "right": (i + j) / 4, "first_digit": 0.25}
                                for j, depth in enumerate((10, 50))],
                     "trials": [trial(10, 0.2, "wrong"), trial(10, 0.9, "right"), trial(50, 0.5, "first digit right"),
                                trial(50, 0.7, "right")]})
    return rows


def head(x, bins):
    return {"sum": 1 - x / 100, "unspent": x / 100, "entropy": x, "first_token": x / 50, "zeros": 0,
            "log_z_slope": x / 4, "log_z_intercept": 1.0, "entropy_by_n": [x * b for b in range(bins)],
            "log_z_by_n": [None, *(x + b for b in range(1, bins))],
            "weight_by_distance": [1 / (bins - 1)] * (bins - 1) + [0]}


def attention_rows(T=16, prompts=3, layers=LAYERS, heads=HEADS, spearman=True):
    rows = []
    for prompt in range(prompts):
        for end in False, True:
            x = prompt + 10 * end
            rows.append({"model": "a", "attn": "softmax", "prompt": prompt, "leading_end_of_text": end, "tokens": T,
                         "loss": 3.0 + x, "perplexity": 20.0 + x,
                         "layers": [{"residual_kurtosis": 3.0 + l + x, "residual_largest": 7.0 + l + x,
                                     "heads": [head(1 + l * heads + h + x, T.bit_length()) for h in range(heads)]}
                                    for l in range(layers)]})
    rows[0] |= {"map": "map-softmax.npy", "map_cell": 1}
    if spearman:
        rows += [{"model": "a", "attn": "softmax", "leading_end_of_text": end, "prompts": prompts,
                  "spearman_sum_perplexity": r} for end, r in ((False, -0.5), (True, None))]
    return rows


def causal(layers, heads, T):
    weights = np.tril(np.random.default_rng(0).exponential(1, (layers, heads, T, T)) ** 3)
    return (weights / weights.sum(-1, keepdims=True)).astype("f4")


def attention_folder(folder, T=16, layers=LAYERS, heads=HEADS, **how):
    write(folder, "attention", attention_rows(T, layers=layers, heads=heads, **how))
    np.save(folder / "map-softmax.npy", causal(layers, heads, T))
    return folder


def score_rows():
    layers = [{"attn_scale": [0.1 + l + h / 10 for h in range(HEADS)], "attn_bias": [-l - h / 10 for h in range(HEADS)],
               "fits": [{"a1": 0.1 + l + h / 10, "a2": -l - h / 10} for h in range(HEADS)]} for l in range(LAYERS)]
    return [{"model": "a", "attn": "ssmax-bias", "layers": layers}]


def choice_rows(error=0.05):
    return [{"model": "a", "attn": "softmax", "questions": 3, "acc": 1 / 3, "acc_stderr": error, "acc_norm": 2 / 3,
             "acc_norm_stderr": error, "log_likelihoods": [[-1, -2], [-1, -2, -3, -4], [-1, -2]]}]


ALL = {"loss": loss_rows, "positions": position_rows, "needle": needle_rows, "scores": score_rows,
       "choice": choice_rows}


def folder_of(task, path):
    own = "ssmax-bias" if task == "scores" else "softmax"
    return attention_folder(path) if task == "attention" else write(path, task, ALL[task](), [("a", own)])


def figure_of(folder, name):
    """One of the pictures of an evaluation."""
    found, = [picture for picture in plot_eval.pictures([folder]) if picture.name == name]
    return charts.figure(found)


def figures(folder):
    return [charts.figure(picture) for picture in plot_eval.pictures([folder])]


@pytest.fixture(scope="module")
def attention_figure(tmp_path_factory):
    return figure_of(attention_folder(tmp_path_factory.mktemp("attention")), "attention")


def panel(figure, title):
    found, = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(title)]
    return found


def xy(line):
    return list(line.get_xdata()), list(line.get_ydata())


def lines_of(axes, count):
    """The lines without marks such as that of the training length."""
    return [line for line in axes.lines if len(line.get_xdata()) == count]


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of tables and legends: pages without pictures."""
    monkeypatch.setattr(charts, "svg", lambda panel, identity: "")


@pytest.fixture
def empty_figures(monkeypatch):
    """For tests of files: figures without panels, which are drawn at once."""
    monkeypatch.setattr(charts, "figure", lambda _: drawing.pyplot().figure())


# ---------------------------------------------------------------- loss and positions

def test_losses_by_length(tmp_path):
    rows = loss_rows() + loss_rows(attn="ssmax", start=2.5)
    figure = figure_of(write(tmp_path, "loss", rows[::-1]), "lengths")
    for title, key in ("Loss", "loss"), ("Perplexity", "perplexity"):
        axes = panel(figure, title)
        drawn = lines_of(axes, 3)
        assert [xy(line) for line in drawn] == [([16, 64, 256], [row[key] for row in part])
                                                for part in (rows[3:], rows[:3])]
        assert axes.get_xscale() == "log" and "trained at 64" in texts(axes)
        assert [list(line.get_xdata()) for line in axes.lines if line not in drawn] == [[L, L]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ssmax (untrained)", "softmax"]


def test_a_loss_that_is_not_finite_is_marked(tmp_path):
    rows = loss_rows()
    rows[1] |= {"loss": None, "perplexity": None}
    axes = panel(figure_of(write(tmp_path, "loss", rows), "lengths"), "Loss")
    assert math.isnan(axes.lines[0].get_ydata()[1]) and "x: not finite" in axes.get_xlabel()
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "x"] == [[64]]
    rows = [row | {"loss": None, "perplexity": None} for row in rows]
    assert figures(write(tmp_path, "loss", rows))


def test_the_running_mean_in_log_position():
    values = [float(t % 5) for t in range(300)]
    values[50] = math.nan
    got = tasks.smooth(values)
    for t in range(1, 301):
        window = [values[i - 1] for i in range(1, 301)
                  if t / tasks.WINDOW <= i <= t * tasks.WINDOW and not math.isnan(values[i - 1])]
        assert got[t - 1] == pytest.approx(np.mean(window)), t
    assert list(tasks.smooth([4.0])) == [4.0] and math.isnan(tasks.smooth([math.nan])[0])


def test_losses_by_position(tmp_path):
    rows = position_rows(256) + position_rows(8) + position_rows(256, "ssmax")
    rows[0]["loss_by_position"][7] = None
    figure = figure_of(write(tmp_path, "positions", rows), "positions")
    longest = panel(figure, "Loss by position, sequences of 256")
    raw = [results.number(x) for x in rows[0]["loss_by_position"]]
    drawn = lines_of(longest, 256)
    assert [x for x, _ in map(xy, drawn)] == [list(range(1, 257))] * 2
    assert [line.get_ydata() for line in drawn] == [pytest.approx(tasks.smooth(y), nan_ok=True)
                                                    for y in (raw, rows[2]["loss_by_position"])]
    raw, smooth = lines_of(panel(figure, "Loss by position, sequences of 8"), 8)
    assert raw.get_ydata() == pytest.approx(rows[1]["loss_by_position"])
    assert smooth.get_ydata() == pytest.approx(tasks.smooth(rows[1]["loss_by_position"]))


def test_differences_to_a_baseline(tmp_path, empty_figures):
    """Of losses by position and by length, at the lengths that both have."""
    folders = [tmp_path / "a", tmp_path / "b"]
    write(folders[0], "positions", position_rows(256) + position_rows(32))
    rows = position_rows(256, "ssmax")
    rows[0]["loss_by_position"] = [x + 0.5 for x in rows[0]["loss_by_position"]]
    write(folders[1], "positions", rows, (("a", "ssmax"),))
    series, title = plot_eval.subtract(plot_eval.read(folders)[0], folders[0])
    assert title == "ssmax: difference to softmax" and len(series) == 1 and len(series[0].rows) == 1
    assert series[0].rows[0]["loss_by_position"] == pytest.approx([0.5] * 256)
    write(folders[0], "loss", loss_rows())
    write(folders[1], "loss", loss_rows(attn="ssmax", start=2.75), (("a", "ssmax"),))
    series, title = plot_eval.subtract(plot_eval.read(folders)[0], folders[0])
    assert title == "ssmax: difference to softmax, perplexity as a ratio"
    assert [row["loss"] for row in series[0].rows] == pytest.approx([-0.25] * 3)
    assert [row["perplexity"] for row in series[0].rows] == pytest.approx([math.exp(-0.25)] * 3)
    assert plot_eval.write(folders, tmp_path / "out.png", folders[0]) == [tmp_path / "out.png"]


def test_other_series_of_the_baselines_folder_are_kept(tmp_path):
    folders = [write(tmp_path / name, "loss", loss_rows(start=start) + loss_rows(attn="ssmax", start=start - 0.5))
               for name, start in (("a", 3.0), ("b", 3.25))]
    for given, expected in ((folders, [-0.5, 0.25, -0.25]), (folders[:1], [-0.5])):
        series, _ = plot_eval.subtract(plot_eval.read(given)[0], folders[0])
        assert [s.rows[0]["loss"] for s in series] == pytest.approx(expected)


def test_baselines_that_cannot_be_subtracted(tmp_path):
    a, b, c = (write(tmp_path / name, "loss", loss_rows(lengths=lengths))
               for name, lengths in (("a", (16,)), ("b", (32,)), ("c", (16, 32))))
    needles = write(tmp_path / "n", "needle", needle_rows())
    result = call("plot_eval.py", a, "--baseline", a)
    assert result.returncode == 2 and "pass --out FILE" in result.stderr, "losses are drawn beside eval.json"
    for folders, base, message in (([a, c], b, "expected one of the folders to plot"),
                                   ([a], a, "nothing to compare it with"), ([a, b], a, "no length in common"),
                                   ([needles], needles, "has the task needle. Only losses are compared")):
        with pytest.raises(Refused, match=message):
            plot_eval.subtract(plot_eval.read(folders)[0], base)


# ---------------------------------------------------------------- needle

def test_needles_found(tmp_path):
    rows = needle_rows() + needle_rows(attn="ssmax")
    figure = figure_of(write(tmp_path, "needle", rows[::-1]), "needle")
    axes = panel(figure, "softmax")
    assert np.array_equal(axes.images[0].get_array(), [[0, 25], [25, 50]]) and axes.images[0].get_clim() == (0, 100)
    assert texts(axes) == ["0", "25", "25", "50", "trained at 64"]
    assert ([text.get_text() for text in axes.get_xticklabels()] == ["64", "128"]
            and [text.get_text() for text in axes.get_yticklabels()] == ["10%", "50%"])
    assert panel(figure, "ssmax (untrained)")


def test_needles_at_random_depths_and_missing_cells(tmp_path):
    rows = needle_rows()
    rows[1]["depths"] = [{"right": 1, "first_digit": 0}]
    rows[0]["depths"] = [{"right": None, "first_digit": None}]
    figure = figure_of(write(tmp_path, "needle", rows), "needle")
    right = figure.axes[0].images[0].get_array()
    assert right[0, 1] == 100 and not np.isfinite(right.filled(np.nan)[0, 0])
    figure.draw_without_rendering()


def test_heads_ranked_by_needle_score(tmp_path):
    figure = figure_of(write(tmp_path, "needle", needle_rows()), "needle-heads")
    axes = panel(figure, "Heads by needle score, context 128")
    x, y = xy(axes.lines[0])
    assert x == [1, 2, 3, 4, 5, 6] and y == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1, 0.05])
    assert texts(axes) == ["1.2", "1.1", "1.0", "0.2", "0.1"]
    many = {"needle_scores": [[(h * 7 % 40) / 40 for h in range(40)]]}
    assert [score for score, *_ in tasks.ranked_heads(many)] == [rank / 40 for rank in range(39, 14, -1)]


def test_trials_ranked(tmp_path):
    axes = panel(figure_of(write(tmp_path, "needle", needle_rows()), "needle-trials"), "a, softmax, context 64")
    drawn = {line.get_label(): xy(line) for line in axes.lines}
    assert drawn == {"right: 2": ([1, 2], [0.9, 0.7]), "first digit right: 1": ([3], [0.5]), "wrong: 1": ([4], [0.2])}


# ---------------------------------------------------------------- attention

def test_attention_by_layer_and_head(attention_figure):
    figure = attention_figure
    for title, key, of in (("Sum", "sum", lambda x: 1 - x / 100), ("Entropy of", "entropy", lambda x: x),
                           ("Slope", "log_z_slope", lambda x: x / 4)):
        axes = panel(figure, title)
        # Prompt 1 is the mean of 0 to 2.
        heads = np.array([[of(1 + l * HEADS + h + 1) for h in range(HEADS)] for l in range(LAYERS)])
        with_end = np.array([[of(1 + l * HEADS + h + 11) for h in range(HEADS)] for l in range(LAYERS)])
        assert xy(axes.lines[0]) == ([0, 0, 0, 1, 1, 1], pytest.approx(list(heads.ravel())))
        assert (axes.lines[1].get_ydata() == pytest.approx(heads.mean(1))
                and axes.lines[2].get_ydata() == pytest.approx(with_end.mean(1)))
    assert xy(panel(figure, "Kurtosis").lines[0]) == ([0, 1], [4, 5])
    assert [xy(line)[1] for line in panel(figure, "Largest").lines] == [[9, 10], [19, 20]]      # of all prompts


def test_entropy_and_log_z_by_n_and_weight_by_distance(attention_figure):
    figure = attention_figure
    n, mean = xy(panel(figure, "Entropy by n").lines[0])
    # The last bin has n = 16 alone.
    assert (n == pytest.approx([1, math.sqrt(2 * 3), math.sqrt(4 * 7), math.sqrt(8 * 15), 16])
            and mean == pytest.approx([4.5 * b for b in range(5)]))
    reference = panel(figure, "Entropy by n").lines[1]
    assert reference.get_ydata() == pytest.approx(np.log(n))
    line, = panel(figure, "ln Z by n").lines
    assert xy(line)[0] == pytest.approx(n) and math.isnan(line.get_ydata()[0])
    assert line.get_ydata()[1:] == pytest.approx([4.5 + b for b in range(1, 5)])
    distance = panel(figure, "Weight by distance")
    assert distance.lines[0].get_ydata() == pytest.approx([0.25] * 4), "a distance is at most 15: four ranges"


def test_sums_and_perplexities_of_the_prompts(attention_figure, tmp_path):
    axes = panel(attention_figure, "Row sum and perplexity")
    sums = [1 - (4.5 + prompt - 1) / 100 for prompt in range(3)]
    assert xy(axes.lines[0]) == (pytest.approx(sums), [20, 21, 22]) and xy(axes.lines[1])[1] == [30, 31, 32]
    assert axes.get_xlabel().endswith("Spearman's r: a, softmax: -0.50 without")
    picture, _ = plot_eval.pictures([attention_folder(tmp_path, spearman=False)])
    assert not [panel for panel in picture.panels if "perplexity" in panel.title]


def test_eval_json_lists_the_pictures_beside_it(tmp_path, empty_figures):
    """The next eval_gpt2 removes what is listed. The rest of the file stays as it is."""
    folder = folder_of("attention", tmp_path / "a")
    text = (folder / "eval.json").read_text().replace('"files": []', '"files":\t["map-0.npy"]')
    (folder / "eval.json").write_text(text)
    old = set(folder.iterdir())
    for _ in range(2):
        assert call("plot_eval.py", folder).returncode == 0
        drawn = sorted(path.name for path in set(folder.iterdir()) - old)
        after = (folder / "eval.json").read_text()
        files = json.loads(after)["files"]
        assert files[0] == "map-0.npy" and sorted(files[1:]) == drawn and drawn
        assert after.replace(json.dumps(files), '["map-0.npy"]') == text
    call("plot_eval.py", folder, "--out", tmp_path / "b.png")
    assert (folder / "eval.json").read_text() == after


def test_a_small_model_and_a_short_prompt(tmp_path):
    for figure in figures(attention_folder(tmp_path, 2, 1, 1, prompts=1, spearman=False)):
        figure.draw_without_rendering()


def test_null_statistics_are_left_out(tmp_path):
    rows = attention_rows()
    for row in rows[:6]:
        row["layers"][0]["heads"][0]["log_z_slope"] = None
        row["layers"][1]["residual_kurtosis"] = None
    figure = figure_of(write(tmp_path, "attention", rows), "attention")
    assert math.isnan(panel(figure, "Slope").lines[0].get_ydata()[0])
    slope = panel(figure, "Slope").lines[1].get_ydata()[0]
    assert slope == pytest.approx((3 + 4) / 8), "the mean of the layer's other heads"
    assert math.isnan(panel(figure, "Kurtosis").lines[0].get_ydata()[1])


# ---------------------------------------------------------------- maps

def decode(codes, top, signed):
    """What weight() in attention.js computes."""
    level = codes.astype(float) - (128 if signed else 1)
    steps = 127 if signed else 254
    return np.where((level == 0) | (codes == 0), 0.0,
                    np.sign(level) * top * 10 ** (attention.DECADES * (np.abs(level) / steps - 1)))


def averaged(weights, cell):
    """The means over the visible weights of cell x cell positions, by loops."""
    T = len(weights)
    side = -(-T // cell)
    out = np.zeros((side, side))
    for r in range(side):
        for c in range(side):
            seen = [weights[i, j] for i in range(r * cell, min((r + 1) * cell, T))
                    for j in range(c * cell, min((c + 1) * cell, T)) if j <= i]
            out[r, c] = np.mean(seen) if seen else 0
    return out


@pytest.mark.parametrize("T, cell, most", [(16, 1, 16), (16, 1, 5), (17, 1, 4), (23, 3, 3), (20, 2, 1)])
def test_coarser_maps_are_means_over_visible_weights(T, cell, most):
    weights = causal(1, 1, T)[0, 0].astype(float)
    got, got_cell = attention.coarsen(averaged(weights, cell), cell, T, most)
    assert (got_cell % cell == 0 and len(got) <= most
            and got == pytest.approx(averaged(weights, got_cell), rel=1e-9, abs=1e-15))


@pytest.mark.parametrize("signed", [False, True])
def test_codes_keep_weights_to_five_percent(signed):
    weights = causal(1, 1, 40)[0, 0].astype(float) * 7
    if signed:
        weights *= np.where(np.random.default_rng(1).random(weights.shape) < 0.5, -1, 1)
    weights[20, 3] = 0
    codes, top = attention.encode(weights, signed)
    got = decode(codes, top, signed)
    hidden = np.triu_indices(40, 1)
    assert top == np.abs(weights).max() and (codes[hidden] == 0).all() and (codes[np.tril_indices(40)] > 0).all()
    large = np.abs(weights) > 1.05 * top * 10.0**-attention.DECADES
    assert got[large] == pytest.approx(weights[large], rel=0.047 if signed else 0.024) and got[20, 3] == 0
    assert np.abs(got[~large]).max() <= top * 10.0**-attention.DECADES * 1.1


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_codes_of_odd_weights(value):
    codes, top = attention.encode(np.tril(np.full((3, 3), value)), False)
    assert top == 0 and (decode(codes, top, False) == 0).all()


def test_maps_that_are_missing_or_of_another_file(tmp_path):
    folder = attention_folder(tmp_path)
    (folder / "map-softmax.npy").unlink()
    assert ([picture.name for picture in plot_eval.pictures([folder])] == ["attention"]
            and "The file with this map is missing" in page.attention_page(results.read(folder), "a"))
    np.save(folder / "map-softmax.npy", causal(1, 1, 16))
    assert "does not belong" in call("plot_eval.py", folder).stderr
    (folder / "map-softmax.npy").write_bytes(b"\x93NUMPY")
    result = call("plot_eval.py", folder)
    assert result.returncode == 3 and "map-softmax.npy: expected an array" in result.stderr


# ---------------------------------------------------------------- scores and choice

def test_learned_scalars(tmp_path):
    figure = figure_of(write(tmp_path, "scores", score_rows(), [("a", "ssmax-bias")]), "scores")
    for title, key in ("s by layer", "attn_scale"), ("b by layer", "attn_bias"):
        values = np.array([layer[key] for layer in score_rows()[0]["layers"]])
        points, line = panel(figure, title).lines
        assert (xy(points) == ([0, 0, 0, 1, 1, 1], list(values.ravel()))
                and line.get_ydata() == pytest.approx(values.mean(1)))
    scale = panel(figure, "Scale × √d").lines
    n = np.array(scale[4].get_xdata())
    assert n[-1] == pytest.approx(4 * L) and scale[4].get_ydata() == pytest.approx(1.2 * np.log(n) - 1.1)


def test_pn_and_its_fit(tmp_path):
    row = score_rows()[0] | {"attn_pn": [0.25 * math.log(n) + 0.5 for n in range(1, L + 1)]}
    figure = figure_of(write(tmp_path, "scores", [row], [("a", "ssmax-pn")]), "scores")
    points, fit = panel(figure, "p_n").lines
    assert list(points.get_ydata()) == row["attn_pn"] and fit.get_ydata()[-1] == pytest.approx(row["attn_pn"][-1])
    assert "a1 = 0.25, a2 = 0.5" in panel(figure, "p_n").get_xlabel()


def test_a_normalizer_without_scalars_has_no_picture(tmp_path):
    result = call("plot_eval.py", write(tmp_path, "scores", [{"model": "a", "attn": "softmax", "layers": []}]))
    assert (result.returncode == 0 and "no learned scalars" in result.stdout
            and [path.name for path in tmp_path.iterdir()] == ["eval.json"])


@pytest.mark.parametrize("error", [0.05, None])
def test_accuracies(tmp_path, error):
    axes = panel(figure_of(write(tmp_path, "choice", choice_rows(error)), "choice"), "Multiple choice, 3 questions")
    assert sorted(bar.get_width() for bar in axes.patches) == pytest.approx([1 / 3, 2 / 3])
    spread = sorted(segment[1][0] - segment[0][0] for collection in axes.collections
                    for segment in collection.get_segments())
    assert spread == pytest.approx([2 * (error or 0)] * 2, abs=1e-12)
    assert [text for text in texts(axes) if text.startswith("acc ")] == ["acc 0.333" + (" ± 0.050" if error else "")]
    assert axes.lines[-1].get_xdata()[0] == pytest.approx((1 / 2 + 1 / 4 + 1 / 2) / 3), "the mean of 1/endings"


# ---------------------------------------------------------------- several models and folders

def labels(*folders):
    return [s.label for s in plot_eval.read(list(folders))[0]]


def test_labels_are_what_differs(tmp_path):
    one = write(tmp_path / "x/eval", "loss", loss_rows() + loss_rows(attn="ssmax"))
    assert labels(one) == ["softmax", "ssmax (untrained)"] and plot_eval.read([one])[1] == "a"
    two = write(tmp_path / "y", "loss", loss_rows("b") + loss_rows("c"), [("b", "softmax"), ("c", "softmax")])
    assert labels(two) == ["b", "c"] and plot_eval.read([two])[1] == "softmax"
    assert labels(one, two) == ["a, softmax", "a, ssmax (untrained)", "b, softmax", "c, softmax"]
    again = write(tmp_path / "ntk", "loss", loss_rows() + loss_rows(attn="ssmax"))
    assert labels(one, again) == ["eval, softmax", "eval, ssmax (untrained)", "ntk, softmax", "ntk, ssmax (untrained)"]
    assert labels(write(tmp_path / "z", "loss", loss_rows())) == ["a, softmax"]


def test_labels_are_the_flags_that_differ(tmp_path):
    """One or two flags with short values; otherwise the folders."""
    def labels_with(*each):
        return labels(*(write(tmp_path / f"e{i}", "loss", loss_rows(), seed=1, out=f"e{i}", threads=i, **flags)
                        for i, flags in enumerate(each)))
    ntk, none = {"rope-scaling": "ntk"}, {"rope-scaling": None}
    assert labels_with(none, ntk) == ["without --rope-scaling", "--rope-scaling ntk"]
    assert labels_with({"rope-theta": 0}, {"rope-theta": 500000}) == ["without --rope-theta", "--rope-theta 500000"]
    assert labels_with({"doc-mask": False}, {"doc-mask": True}) == ["without --doc-mask", "--doc-mask"]
    folders = ["e0", "e1"]
    assert labels_with({"data": "a" * 60}, {"data": "b" * 60}) == folders, "too long"
    assert labels_with({"x": 1, "y": 1, "z": 1}, {"x": 2, "y": 2, "z": 2}) == folders, "too many"
    assert labels_with(ntk, none, none) == [*folders, "e2"], "they do not tell all apart"


def test_several_folders_in_one_picture(tmp_path, empty_figures):
    folders = [write(tmp_path / name, "needle", [row | {"model": name} for row in needle_rows()], [(name, "softmax")])
               for name in "ab"]
    result = call("plot_eval.py", *folders, "--out", tmp_path / "both.png")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(tmp_path / name) for name in ("both.png", "both-heads.png", "both-trials.png")]
    assert all((tmp_path / Path(name).name).read_bytes()[:4] == b"\x89PNG" for name in result.stdout.split())
    assert {path.name for path in folders[0].iterdir()} == {"eval.json"}


# ---------------------------------------------------------------- what is wrong

def broken(data):
    """Variants of a whole eval.json, and what the message says."""
    def change(**keys):
        return json.dumps({key: value for key, value in (data | keys).items() if value is not ...})
    row = data["results"][0]
    whole = json.dumps(data)
    return {"half": (whole[:len(whole) // 2], "not a complete JSON file"), "empty": ("", "not a complete JSON file"),
            "list": ("[]", "expected a JSON object"), "no task": (change(task=...), "expected the key 'task'"),
            "other task": (change(task="maps"), "unknown task 'maps'"),
            "old": (change(models=...), "expected the key 'models'"), "no results": (change(results=[]), "no results"),
            "no loss": (change(results=[{"model": "a", "attn": "softmax", "seq_len": 8}]), "expected the key 'loss'"),
            "text": (change(results=[row | {"loss": "low"}]), "expected a number, found 'low'"),
            "no length": (change(results=[row | {"seq_len": None}]), "a whole number as 'seq_len', found null"),
            "other model": (change(results=[row | {"model": "b"}]), "the model 'b'")}


@pytest.mark.parametrize("name", broken({"results": [{}]}))
def test_broken_files_are_named(name, tmp_path):
    folder = write(tmp_path, "loss", loss_rows())
    text, said = broken(json.loads((folder / "eval.json").read_text()))[name]
    (folder / "eval.json").write_text(text)
    result = call("report.py", folder, "--out", tmp_path / "x.html")
    assert result.returncode == 3 and said in result.stderr and "eval.json" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]


def test_folders_without_results_and_different_tasks(tmp_path):
    (tmp_path / "empty").mkdir()
    for script, said in (("plot_eval.py", "eval.json: No such file"),
                         ("report.py", "neither a run (run.json, metrics.jsonl) nor an evaluation (eval.json)")):
        result = call(script, tmp_path / "empty", *(["--out", tmp_path / "x.html"] if script == "report.py" else []))
        assert result.returncode == 3 and said in result.stderr
    result = call("plot_eval.py", folder_of("loss", tmp_path / "a"), folder_of("needle", tmp_path / "b"),
                     "--out", tmp_path / "x.png")
    assert result.returncode == 3 and "has the task needle, but" in result.stderr and not (tmp_path / "x.png").exists()
    result = call("plot_eval.py", tmp_path / "a", "--out", tmp_path / "x.foo")
    assert result.returncode == 2 and ".foo is not a format of pictures" in result.stderr


# ---------------------------------------------------------------- pages

def assert_self_contained(text):
    """Nothing is loaded from anywhere: no address but names of XML dialects, and no file beside the page."""
    addresses = set(re.findall(r"https?://[^\s\"'<)]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"} and "@import" not in text
    targets = re.findall(r"\b(?:src|href)=\"([^\"]*)|\burl\(\"?([^)]*)", text)
    assert not [target for pair in targets if not (target := "".join(pair)).startswith(("#", "data:"))]


def embedded(text, identity):
    return json.loads(re.search(rf'<script type="application/json" id="{identity}-data">(.*?)</script>', text, re.S)[1])


def test_the_attention_page(tmp_path):
    from PIL import Image
    folder = attention_folder(tmp_path)
    rows = json.loads((folder / "eval.json").read_text())
    rows["results"][0]["token_texts"] = ["</script><b>", "<!--", *"cdefghijklmnop"]
    (folder / "eval.json").write_text(json.dumps(rows))
    text = page.attention_page(results.read(folder), "a </title><script>")
    assert_self_contained(text)
    assert "<title>Attention: a &lt;/title&gt;&lt;script&gt;</title>" in text
    assert text.count("</script>") == 3 and "<!--" not in text and "<noscript>" in text
    [data] = embedded(text, "attention")["series"]
    assert ((data["layers"], data["heads"], data["T"], data["side"], data["cell"]) == (LAYERS, HEADS, 16, 16, 1)
            and data["tokens"][:2] == ["</script><b>", "<!--"])
    for layer in range(LAYERS):
        for h in range(HEADS):
            x = 1 + layer * HEADS + h
            assert [data[part]["entropy"][layer][h] for part in ("first", "mean", "with_end")] == [x, x + 1, x + 11]
            weights = np.load(folder / "map-softmax.npy")[layer, h]
            codes = np.array(Image.open(io.BytesIO(base64.b64decode(data["maps"][layer][h]))))
            top = data["tops"][layer][h]
            assert (np.array_equal(codes, attention.encode(weights, False)[0])
                    and top == pytest.approx(weights.max(), rel=1e-5))
    assert data["mean"]["residual_kurtosis"] == [4, 5] and data["weight_by_distance"][0][0] == [0.25] * 4


def test_large_maps_are_averaged_in_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "CELLS", 64 * 64 * LAYERS * HEADS)
    folder = attention_folder(tmp_path, T=150)
    [data] = embedded(page.attention_page(results.read(folder), "a"), "attention")["series"]
    assert (data["cell"], data["side"], data["T"]) == (3, 50, 150)
    weights = np.load(folder / "map-softmax.npy")[1, 1].astype(float)
    assert data["tops"][1][1] == pytest.approx(averaged(weights, 3).max(), rel=1e-5)


def make_run(folder, attn="softmax", **flags):
    """A run that switches to ssmax."""
    def change(line):
        scalars = {"attn_scale": [[0.1, 0, 0.2], [0.3, 0.2, 0.4]]} if "val_loss" in line else {}
        return scalars | {"grad_norm": 0.5 + 1 / line["step"]}
    arguments = {"model": "15M", "attn": attn, "steps": 40, "grad-clip": 1.0, "lr": 6e-4, "out": str(folder)} | flags
    return calls.make_run(folder, 30, change=change, known={
        "arguments": arguments, "version": "0.2.0", "commit": "abc1234", "ranks": 1,
        "data": {"train": {"files": 1, "tokens": 1000}},
        "lineage": [{"step": 0, "event": "start", "attn": attn},
                    {"step": 20, "event": "attn-switch", "from": attn, "attn": "ssmax"}]})


@pytest.fixture(scope="session")
def whole_report(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    folders = [make_run(root / "a"), make_run(root / "b", lr=1e-3),
               *(folder_of(task, root / task) for task in plot_eval.DRAW)]
    write(root / "loss", "loss", loss_rows() + loss_rows(attn="ssmax", start=3.1))
    return report.report(list(map(str, folders)), "Two <runs>")


def test_a_loaded_model_has_no_default_shape(tmp_path, undrawn):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", **{"model": "124M", "init-from": "x"})]
    found = rows_of(report.report(list(map(str, folders)), "t"), "Flags that differ")
    assert found == [["", "a", "b"], ["--model", "15M", "–"], ["--init-from", "–", "x"]]


def rows_of(text, heading):
    """The cells of the first table after a heading."""
    table = re.search(r"<table>.*?</table>", text[text.index(heading):], re.S)[0]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.S)]


def test_the_report_has_everything(whole_report):
    assert_self_contained(whole_report)
    names = re.findall(r'<h2 id="([^"]+)">', whole_report)
    assert names == ["runs", "training", "learned-scalars-in-training", "loss-by-length", "loss-by-position",
                     "needle-in-a-haystack", "attention", "learned-scalars", "multiple-choice"]
    assert re.findall(r'<a href="#([^"]+)">', whole_report) == names and "<h1>Two &lt;runs&gt;</h1>" in whole_report


def test_the_reports_tables(whole_report):
    head, a, b = rows_of(whole_report, ">Runs</h2>")
    row = dict(zip(head, a))
    assert row["normalizer"] == "softmax, then ssmax at step 20"
    assert row["steps"] == "30 of 40" and row["tokens"] == "15,360"
    assert row["validation"] == f"{3.5 + 8 / 30:.4f}" and row["largest gradient norm"] == "1.50"
    assert row["clipped steps"] == "1" and row["time in steps"] == "15.0 seconds"
    assert rows_of(whole_report, "Flags that differ") == [["", "a", "b"], ["--lr", "0.0006", "0.001"]]
    assert "step 20: attn-switch" in re.sub("<[^>]*>", "", whole_report)
    losses_found = rows_of(whole_report, "<h3>Loss, nats per token</h3>")
    assert losses_found[0] == ["", "trained at", "16", "64", "256"]
    assert losses_found[1:] == [["softmax", "64", "3.0000", "3.1250", "3.2500"],
                                ["ssmax (untrained)", "64", "3.1000", "3.2250", "3.3500"]]
    assert rows_of(whole_report, "<h3>Perplexity</h3>")[1][2] == f"{math.exp(3):.5g}"
    assert rows_of(whole_report, "Needles found, mean over depths")[1][2:] == ["4", "50.0%", "50.0%"]
    assert rows_of(whole_report, ">Multiple choice</h2>")[1] == ["a, softmax", "3", "0.3333 ± 0.0500",
                                                                 "0.6667 ± 0.0500"]


def test_the_best_of_losses_is_the_least_and_of_needles_the_largest(tmp_path, undrawn):
    losses = loss_rows() + loss_rows(attn="ssmax", start=2.5)
    found = [row | {"right": right} for rows, right in ((needle_rows(), 0.25), (needle_rows(attn="ssmax"), 0.75))
             for row in rows]
    text = report.report([str(write(tmp_path / "l", "loss", losses)), str(write(tmp_path / "n", "needle", found))], "t")
    best = re.findall(r"<td class='best[^>]*>(.*?)</td>", text)
    assert best == ["2.5000", "2.6250", "2.7500", *(f"{math.exp(x):.5g}" for x in (2.5, 2.625, 2.75)), "75.0%", "75.0%"]


def test_the_flags_of_evaluations(tmp_path, undrawn):
    """Those that differ come first; all others are folded away."""
    common = {"model": "a", "samples": 2, "seed": 7, "picture": True, "rope-theta": 0}
    folders = [str(write(tmp_path / name, "needle", needle_rows(), **common | {"rope-scaling": scaling, "out": name}))
               for name, scaling in (("plain", None), ("ntk", "ntk"))]
    text = report.report(folders, "t")
    assert rows_of(text, "Flags that differ") == [["", "plain", "ntk"], ["--rope-scaling", "–", "ntk"]]
    others = {row[0]: row[1:] for row in rows_of(text, "<summary>All other flags</summary>")[1:]}
    assert others["--seed"] == ["7", "7"] and others["--rope-theta"] == ["–", "–"]
    assert "--rope-scaling" not in others


def grid_run(root, attn, seed, key, switch=None, **flags):
    """A run folder as grid.py leaves it, without evaluations."""
    run = make_run(root / f"{switch or attn}-s{seed}-{key * 10}", attn, seed=seed, **flags)
    described = json.loads((run / "run.json").read_text())
    write_known(run, described | {"lineage": described["lineage"][:2 if switch else 1]})
    return run


def grid_eval(run, name, task, rows, attn, **flags):
    """An evaluation of its last checkpoint, by which the model is named."""
    folder = write(run / "eval" / name, task, [row | {"model": "step-00000030"} for row in rows],
                   [("step-00000030", attn)], **flags)
    data = json.loads((folder / "eval.json").read_text())
    data["models"][0]["checkpoint"] = f"out/grids/runs/{run.name}/ckpt/step-00000030"
    (folder / "eval.json").write_text(json.dumps(data))
    return folder


def test_a_report_of_a_grids_runs(tmp_path, undrawn):
    """Rows have the names that a person would give. Other folders and files among the runs are left out."""
    runs = [grid_run(tmp_path, "softmax", 1, "a"), grid_run(tmp_path, "ssmax", 2, "b"),
            grid_run(tmp_path, "softmax", 1, "c", "ssmax"), grid_run(tmp_path, "lssa", 1, "d"),
            grid_run(tmp_path, "lssa", 1, "e", lr=1e-3)]
    for run in runs:
        attn = run.name.partition("-")[0]
        for name, theta in ("positions-0123456789", 0), ("theta-abcdef0123", 5e4):
            grid_eval(run, name, "positions", position_rows(attn=attn), attn, **{"rope-theta": theta})
    names = ["softmax, seed 1", "ssmax, seed 2", "softmax, then ssmax at step 20, seed 1", "lssa, seed 1, --lr 0.0006",
             "lssa, seed 1, --lr 0.001"]
    (tmp_path / "no evaluation yet").mkdir()
    (tmp_path / "ssmax-s2.log").write_text("")
    result = call("report.py", *sorted(tmp_path.iterdir()), "--out", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert result.returncode == 0 and "no evaluation yet: neither" in result.stderr and "log" not in result.stderr
    assert sorted(row[0] for row in rows_of(text, ">Runs</h2>")[1:]) == sorted(names)
    positions = text[text.index("Loss by position</h2>"):]
    assert all(f">{name}, {how}</li>" in positions for name in names
               for how in ("without --rope-theta", "--rope-theta 50000"))


def test_losses_over_seeds(tmp_path, undrawn):
    """Means with error bars and bands, of runs that differ only in their seeds."""
    losses, positions = [], []
    for key, (attn, seed, start) in zip("abcde", [("softmax", 1, 3.0), ("softmax", 2, 3.2), ("softmax", 3, 3.1),
                                                  ("ssmax", 1, 2.9), ("ssmax", 2, 2.9)]):
        run = grid_run(tmp_path, attn, seed, key)
        losses.append(grid_eval(run, "loss", "loss", loss_rows(attn=attn, start=start), attn))
        rows = [row | {"loss_by_position": [start] * 100} for row in position_rows(attn=attn)]
        positions.append(grid_eval(run, "positions", "positions", rows, attn))

    def drawn(folders, draw):
        series, title = plot_eval.means(plot_eval.read(folders)[0])
        assert [s.label for s in series] == ["softmax, 3 seeds", "ssmax, 2 seeds"] and "over seeds" in title
        return charts.figure(draw(series, title)[0]).axes[0]

    axes = drawn(losses, tasks.loss)
    ends = axes.containers[0].lines[2][0].get_segments()[0]
    assert list(ends[:, 0]) == [16, 16] and list(ends[:, 1]) == pytest.approx([3.0, 3.2])
    assert max(lines_of(axes, 3)[0].get_ydata()) == pytest.approx(3.35)
    axes = drawn(positions, tasks.positions)
    assert max(lines_of(axes, 100)[0].get_ydata()) == pytest.approx(3.1)
    assert axes.collections[0].get_paths()[0].get_extents().height == pytest.approx(0.2)
    text = report.report([str(folder) for folder in losses], "t")
    head, *rows = rows_of(text, "standard deviation over seeds</h3>")
    assert rows[0][:4] == ["softmax, 3 seeds", "64", "3", "3.1000 ± 0.1000"] and rows[1][3] == "2.9000 ± 0.0000"
    text = report.report([str(folder.parents[1]) for folder in losses], "t")
    assert all(f"{label}: validation" in text for label in ("softmax, 3 seeds", "ssmax, 2 seeds"))
    result = call("plot_eval.py", losses[0], "--seeds", "--out", tmp_path / "x.png")
    assert result.returncode == 3 and "differ only in --seed" in result.stderr


@pytest.mark.parametrize("metrics", [None, "", '{"step": 1, "tok'])
def test_a_run_without_a_step_is_reported(tmp_path, undrawn, metrics):
    started, empty = make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=1e-3)
    (empty / "metrics.jsonl").unlink()
    if metrics is not None:
        (empty / "metrics.jsonl").write_text(metrics)
    text = report.report([str(started), str(empty)], "t")
    head, _, row = rows_of(text, ">Runs</h2>")
    assert dict(zip(head, row))["steps"] == "no step yet" and len(row) == len(head)
    assert 'id="training"' in text
    alone = report.report([str(empty)], "t")
    assert "no step yet" in alone and "--lr" in alone and 'id="training"' not in alone


def test_where_the_report_goes(tmp_path, monkeypatch, undrawn):
    """A folder that is missing is created. What cannot be written is refused before anything is drawn."""
    run_folder = make_run(tmp_path / "a")
    result = call("report.py", run_folder, "--out", tmp_path / "new/er/r.html", "--title", "T")
    assert (result.returncode, result.stdout) == (0, f"{tmp_path}/new/er/r.html\n"), result.stderr
    text = (tmp_path / "new/er/r.html").read_text()
    assert "Flags that differ" not in text and "<h1>T</h1>" in text and 'id="loss-by-length"' not in text
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(report, "report", lambda *_: pytest.fail("drawn"))
    for out, said in (tmp_path, "this is a folder; expected a file"), (tmp_path / "file/r.html", "cannot create"):
        result = call("report.py", run_folder, "--out", out)
        assert result.returncode == 2 and f"--out {out}: {said}" in " ".join(result.stderr.split())


@pytest.mark.parametrize("script, name", [("report.py", "a.html"), ("plot_eval.py", "a.png")])
def test_a_full_disk_leaves_the_earlier_file(tmp_path, undrawn, script, name):
    """The disk is simulated by a limit on the size of files."""
    folder, out = folder_of("loss", tmp_path / "eval"), tmp_path / "out" / name
    out.parent.mkdir()
    out.write_text("earlier")
    with limited(resource.RLIMIT_FSIZE, 1000):
        result = call(script, folder, "--out", out)
    assert result.returncode == 3 and f"{script}: {out}: it could not be written (File too large)" in result.stderr
    assert "pass another --out" in result.stderr
    assert [path.name for path in out.parent.iterdir()] == [name] and out.read_text() == "earlier"


def test_the_pages_own_panel(tmp_path, monkeypatch):
    """The code in doc/reports.md runs as the page says."""
    text = (ROOT / "doc/reports.md").read_text()
    path, code = re.search(r"PYTHONPATH=(\S+) \S+python`.*?```python\n(.*?)```", text, re.S).groups()
    for folder in "books/eval", "ssmax/eval":
        write(tmp_path / "out" / folder, "loss", loss_rows())
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert path == "scripts" and (tmp_path / "lengths.png").exists()


def test_links_and_pipes_that_the_user_named_stay(tmp_path):
    (tmp_path / "page.html").write_text("earlier")
    (tmp_path / "link.html").symlink_to("page.html")
    os.mkfifo(tmp_path / "pipe.html")
    pipe = os.open(tmp_path / "pipe.html", os.O_RDWR | os.O_NONBLOCK)
    for name in "link.html", "pipe.html":
        drawing.replace(tmp_path / name, b"new", named=True)
    assert os.read(pipe, 9) == (tmp_path / "page.html").read_bytes() == b"new"
    os.close(pipe)
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "pipe.html").is_fifo()


def in_locale(script, *words, **variables):
    """Runs a script in a process of its own. Returns what it printed, as bytes."""
    done = subprocess.run([sys.executable, ROOT / "scripts" / script, *words], capture_output=True,
                          env=os.environ | {"LC_ALL": "C.UTF-8"} | variables)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr.decode()
    return done.stdout


def test_the_locale_does_not_matter(tmp_path):
    """POSIX without UTF-8, and an output for ASCII alone."""
    name = "naïve→"
    folders = [make_run(tmp_path / name), write(tmp_path / "é", "loss", loss_rows(name), [(name, "softmax")])]
    text = (folders[1] / "eval.json").read_text()
    (folders[1] / "eval.json").write_text(json.dumps(json.loads(text), ensure_ascii=False), "utf-8")
    expected = report.report([*map(str, folders)], "→")
    assert "<td>naïve→" in expected and "<h1>→</h1>" in expected
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    printed = in_locale("report.py", *folders, "--title", "→", "--out", tmp_path / "é.html", **posix)
    assert printed == f"{tmp_path}/é.html\n".encode() and (tmp_path / "é.html").read_text("utf-8") == expected
    follow = ["follow.py", folders[0], "--tensorboard", "--once"]
    assert name.encode("ascii", "backslashreplace") in in_locale(*follow, PYTHONIOENCODING="ascii")


def test_names_that_are_not_utf8(tmp_path, undrawn):
    raw = os.fsdecode(b"caf\xe9")
    try:
        run_folder = make_run(tmp_path / raw, out="caf")      # the trainer refuses the name, but folders can be renamed
    except OSError:
        pytest.skip("this file system has no such names")
    folder = write(tmp_path / "eval" / raw, "loss", loss_rows())
    for words in [], ["--tensorboard", tmp_path / "events"]:
        assert call("plot.py", run_folder, *words).returncode == 0
    assert (tmp_path / "events" / raw).is_dir() and (run_folder / "loss.png").exists()
    assert call("report.py", run_folder, folder, "--title", raw, "--out", tmp_path / "r.html").returncode == 0
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "<h1>caf\\xe9</h1>" in text and f"<code>{tmp_path}/eval/caf\\xe9</code>" in text


# ---------------------------------------------------------------- eval_gpt2

@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """(data, checkpoint) of a small model with a tokenizer."""
    if not (BIN / "eval_gpt2").exists():
        subprocess.run(["make", "-s", f"BUILD={make_path(BUILD)}", make_path(BIN / "eval_gpt2")], cwd=ROOT, check=True)
    root = tmp_path_factory.mktemp("trained")
    data = tiny.write_data(root / "data")
    folder, _ = tiny.train(data, root / "run", "--attn", "ssmax-bias", steps=5)
    (root / "q.jsonl").write_text('{"query": "The cat went", "choices": ["on a dog", "text", "in the house"], '
                                  '"gold": 2}\n' * 3)
    return root, folder


FLAGS = {"loss": ["--seq-lens", "16,32,64", "--max-tokens", 512],
         "positions": ["--seq-lens", "16,64", "--max-tokens", 512],
         "needle": ["--seq-lens", "96,128", "--samples", 2, "--digits", 2],
         "attention": ["--samples", 3], "scores": [], "choice": []}


def evaluate(trained, task, out, *flags, **how):
    root, folder = trained
    data = ["--data", root / "q.jsonl" if task == "choice" else f"{root}/data/*_val_*.bin"]
    words = ["--model", folder, *(data if task != "scores" else []), "--task", task, "--out", out, *FLAGS[task], *flags]
    return run(BIN / "eval_gpt2", *words, **how)


@pytest.mark.parametrize("task", FLAGS)
def test_what_eval_gpt2_writes_is_drawn(task, trained, tmp_path):
    evaluate(trained, task, tmp_path, "--picture", 0, "--attn", "softmax1")
    assert not list(tmp_path.glob("*.png"))
    for figure in figures(tmp_path):
        figure.draw_without_rendering()
    if task == "attention":
        own, other = embedded(page.attention_page(plot_eval.read([tmp_path])[0], "a"), "attention")["series"]
        assert own["maps"] != other["maps"]
        first, second, *_ = json.loads((tmp_path / "eval.json").read_text())["results"]
        assert (len(first["token_texts"]) == first["tokens"] and " dog" in "".join(first["token_texts"])
                and "token_texts" not in second)


def test_eval_gpt2_draws_from_any_folder(trained, tmp_path, monkeypatch):
    """The --out looks like a flag."""
    monkeypatch.chdir(tmp_path)
    output, errors = evaluate(trained, "loss", "-x")
    assert output.splitlines()[-1] == "-x/lengths.png" and "no plot" not in errors
    assert (tmp_path / "-x/lengths.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("missing, said",
                         [("script", "there is no {}/scripts/plot_eval.py"), ("python", "python3: No such file"),
                          ("matplotlib", "pip install -r requirements.txt")])
def test_without_what_pictures_need_the_results_are_complete(missing, said, trained, tmp_path):
    """The program in a folder without .venv, and a PATH with nothing but a Python that has no packages."""
    (root, folder), program = trained, tmp_path / "program"
    program.mkdir()
    for name in "scripts/plot_eval.py", ".venv/bin/python":     # somebody else's, in the current folder
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (tmp_path / name).chmod(0o755)
    shutil.copy(BIN / "eval_gpt2", program)
    if missing != "script":
        (program / "scripts").symlink_to(ROOT / "scripts")
    if missing == "matplotlib":
        (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        (tmp_path / "python3").chmod(0o755)
    words = [program / "eval_gpt2", "--model", folder, "--data", f"{root}/data/*_val_*.bin", "--max-tokens", 64,
             "--out", tmp_path / "out"]
    result = subprocess.run([*map(str, words)], capture_output=True, text=True, cwd=tmp_path,
                            env=environment() | {"PATH": str(tmp_path)})
    said = said.format(program)
    assert not (tmp_path / "ran").exists()
    assert result.returncode == 0 and said in result.stderr and "eval.json is complete" in result.stderr, result.stderr
    assert (tmp_path / "out/eval.json").exists()

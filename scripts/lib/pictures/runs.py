"""Training runs: their losses, means and spreads over seeds, differences to a baseline, norms by layer, and learned
scalars."""
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib import drawing, run_folder
from lib.run_folder import OWN, Refused

from . import charts, results
from .charts import Panel, Picture

NAMED = {"attn", "attn-switch"}     # in a run's normalizer


@dataclass
class Run:
    path: str
    lines: list
    arguments: dict

    def values(self, key):
        """{step: value} where the value is finite."""
        return {line["step"]: value for line, value in zip(self.lines, run_folder.column(self.lines, key))
                if math.isfinite(value)}

    @functools.cached_property
    def tokens(self):
        """{step: tokens up to its end}"""
        return {line["step"]: line["tokens"] for line in self.lines}

    @property
    def seed(self):
        return self.arguments.get("seed")


@dataclass
class Group:
    """Runs that differ in their seeds, or a single run."""
    name: str
    runs: list
    color: object = None
    dash: object = "-"

    @property
    def label(self):
        return f"{self.name}, {len(self.runs)} seeds" if len(self.runs) > 1 else self.name


# ---------------------------------------------------------------- losses

def unit_of(lines):
    """The unit of tokens, (size, name), of axes that reach as far as these lines of metrics."""
    return drawing.unit(max(line["tokens"] for line in lines), drawing.TOKEN_UNITS)


def curve_panels(runs, styles, loaded=None):
    """The loss against tokens and against time, the learning rate and the gradient norm against tokens. styles: the
    runs' (color, dash); loaded: their metrics"""
    loaded = loaded or [run_folder.read_metrics(run) for run in runs]
    time_unit = drawing.unit(max(run_folder.seconds(lines)[-1] for lines in loaded), drawing.TIME_UNITS)
    token_size, token_name = unit_of(lines[-1] for lines in loaded)

    def against(axes, draw, in_seconds=False, labels=False):
        """draw(x, lines, color, dash) draws a run."""
        size, name = time_unit if in_seconds else (token_size, f"{token_name}tokens")
        for lines, style in zip(loaded, styles):
            x = run_folder.seconds(lines) if in_seconds else run_folder.column(lines, "tokens")
            draw([value / size for value in x], lines, *style)
        for run, lines, (color, _) in zip(runs, loaded, styles):
            mark = "0.3" if len(runs) == 1 else [0.7 * c for c in color]
            drawing.draw_marks(axes, run_folder.read_marks(run, lines), size, mark, labels, int(in_seconds))
        axes.set_xlabel(name)
        axes.set_xlim(left=0)       # also of a run whose parent is not drawn

    def losses(axes, in_seconds):
        against(axes, lambda *run: drawing.draw_loss(axes, *run), in_seconds, True)
        axes.set(ylabel="nats per token", ylim=drawing.loss_limits(loaded))
        drawing.say_what_is_cut_off(axes)

    def rate(axes):
        def draw(x, lines, color, dash):
            axes.plot(x, run_folder.column(lines, "lr"), color=color, linestyle=dash, linewidth=1.4,
                      marker="." if len(lines) < 10 else None)
        against(axes, draw)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axes.set_ylim(bottom=0)

    def norm(axes):
        def draw(x, lines, color, dash):
            drawing.draw_smooth(axes, x, run_folder.column(lines, "grad_norm"), color, dash)
        against(axes, draw)
        charts.positive_axis(axes, [value for lines in loaded for value in run_folder.column(lines, "grad_norm")])

    return [Panel("Loss, running mean, against tokens (points: validation)", lambda axes: losses(axes, False), 6, 4.8),
            Panel("Loss, running mean, against time spent in steps", lambda axes: losses(axes, True), 6, 4.8),
            Panel("Learning rate", rate, 6, 3.2), Panel("Gradient norm, before clipping", norm, 6, 3.2)]


def losses(paths, loaded=None):
    """The picture of `plot.py RUN...`. loaded: the runs' metrics"""
    loaded = loaded or [run_folder.read_metrics(path) for path in paths]
    styles = charts.colors_of(len(paths))
    panels = curve_panels(paths, styles, loaded)
    labels = [drawing.title(*each) for each in zip(run_folder.names(paths), loaded, paths)]
    return charts.figure(Picture("loss", panels, 2, [(label, *style) for label, style in zip(labels, styles)]))


# ---------------------------------------------------------------- groups

def load(path):
    return Run(str(path), run_folder.read_metrics(path), run_folder.read_run(path)["arguments"])


def by_seed(runs):
    """Groups of runs whose flags differ in nothing but OWN, and in which checkpoint they began with, if any."""
    each = [run.arguments | {"init-from": bool(run.arguments.get("init-from"))} for run in runs]
    found, keys = {}, run_folder.differing(each, OWN)
    for run, arguments in zip(runs, each):
        found.setdefault(tuple(run_folder.shown(arguments.get(key)) for key in keys), []).append(run)
    groups = list(found.values())
    for together in groups:
        if len({run.seed for run in together}) < len(together):
            raise Refused(f"{together[0].path} and {together[1].path}: --seeds expects runs with the same flags "
                               "to have different seeds. Plot one of them, or omit --seeds.")
    firsts = [each[runs.index(together[0])] for together in groups]
    names = results.called([(run_folder.normalizers(run_folder.read_run(together[0].path)),
                             *(run_folder.flag_text(key, flags.get(key)) for key in keys if key not in NAMED))
                            for together, flags in zip(groups, firsts)])
    return [Group(name, together) for name, together in zip(names, groups)]


def groups_of(paths, seeds):
    runs = [load(path) for path in paths]
    groups = by_seed(runs) if seeds else [Group(name, [run]) for name, run in zip(run_folder.names(paths), runs)]
    for group, (group.color, group.dash) in zip(groups, charts.colors_of(len(groups))):
        pass
    return groups


# ---------------------------------------------------------------- curves

def pairs(group, base):
    """[(run, the baseline's run with its seed)], or with the baseline's only run."""
    if not base:
        return [(run, None) for run in group.runs]
    if len(base.runs) == 1:
        return [(run, base.runs[0]) for run in group.runs]
    of_seed = {run.seed: run for run in base.runs}
    found = [(run, of_seed[run.seed]) for run in group.runs if run.seed in of_seed]
    if not found:
        raise Refused(f"{group.name} and the baseline {base.name} have no seed in common: differences are those "
                           "of runs with the same seed, which read the same data.")
    return found


def curves(group, base, key):
    """(tokens, an array (runs, steps)) of the steps that all of the group's runs have, less those of the baseline. The
    training loss is a running mean."""
    found = []
    for run, other in pairs(group, base):
        values = run.values(key)
        if other:       # at the same number of tokens, because steps may differ in size
            below = {other.tokens[step]: value for step, value in other.values(key).items()}
            values = {step: value - below[run.tokens[step]] for step, value in values.items()
                      if run.tokens[step] in below}
        found.append(values)
    steps = sorted(set.intersection(*map(set, found)))
    tokens = group.runs[0].tokens
    rows = [[values[step] for step in steps] for values in found]
    return [tokens[step] for step in steps], np.array(list(map(drawing.smooth, rows)) if key == "loss" else rows)


def draw_curves(axes, groups, base, key, unit):
    """The mean over the seeds, and a band from the least to the largest."""
    drawn, begun = [], []
    for group in groups:
        tokens, values = curves(group, base, key)
        if not tokens:
            continue
        x, mean = [token / unit[0] for token in tokens], values.mean(axis=0)
        axes.plot(x, mean, color=group.color, linestyle=group.dash, linewidth=1.6,
                  marker="o" if key != "loss" or len(x) < 10 else None, markersize=3.5)
        if len(values) > 1:
            axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=group.color, alpha=0.18, linewidth=0)
        marks = run_folder.read_marks(group.runs[0].path, group.runs[0].lines)
        drawing.draw_marks(axes, [mark for mark in marks if mark[0] <= tokens[-1]], unit[0],
                        [0.7 * c for c in group.color])
        drawn.append(values[:, len(x) // 20:])
        begun += list(values[:, 0])
    if base:
        axes.axhline(0, color=base.color, linewidth=1.6)
    limit(axes, drawn, begun, base)
    axes.set(xlabel=f"{unit[1]}tokens", ylabel="nats per token")
    axes.set_xlim(left=0)
    drawing.say_what_is_cut_off(axes)


def limit(axes, drawn, begun, base):
    """Without the first twentieth, whose fall from ln(vocabulary) would flatten the rest."""
    values = np.concatenate([*(values.ravel() for values in drawn), [0.0] if base else []])
    if len(values):
        axes.set_ylim(drawing.with_margin(values.min(), values.max() if base else drawing.high_end(values, begun)))


def last_values(group, base, key):
    """(tokens, the value of each seed) of the last step that has them; (None, []) if none has."""
    tokens, values = curves(group, base, key)
    return (tokens[-1], values[:, -1]) if tokens else (None, [])


def spread(values, sign=""):
    """Their mean and, of several, the standard deviation."""
    if not len(values):
        return "none is finite"
    return f"{values.mean():{sign}.4f}" + (f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else "")


def label_of(group, base, unit):
    """The group's name, with its last validation loss and the difference to the baseline's at the last step that both
    have, which is named if it is not the last of both. A validation older than the last step has its step."""
    key, what = ("val_loss", "validation") if last_values(group, None, "val_loss")[0] else ("loss", "mean loss")
    ends, values = last_values(group, None, key)
    text = f"{group.label}: {what} {spread(values)}"
    if key == "val_loss" and ends < min(run.lines[-1]["tokens"] for run in group.runs):
        text += f" (step {next(step for step, tokens in group.runs[0].tokens.items() if tokens == ends):,})"
    last = {run.lines[-1]["step"]: run for run in group.runs}
    short = (f"; mean to step {min(last):,}, where {run_folder.names([last[min(last)].path])[0]} ends" if len(last) > 1
             else "")
    if not base or group is base:
        return text + short
    at, differences = last_values(group, base, key)
    if not at:
        return text + short
    same = at == ends == last_values(base, None, key)[0]
    return text + f", difference {spread(differences, '+')}" + (
        "" if same else f" at {at / unit[0]:.3g} {unit[1]}tokens") + short


def find_baseline(groups, paths, baseline):
    """The group that has the run."""
    wanted = Path(baseline).resolve()
    for group in groups:
        if any(Path(run.path).resolve() == wanted for run in group.runs):
            return group
    raise Refused(f"--baseline {baseline}: expected one of the runs to plot, {', '.join(map(str, paths))}.")


def loss_panels(groups, base, unit, ending=""):
    """The training loss and the validation loss, or their differences to the baseline's."""
    return [Panel(title + ending, lambda axes, key=key: draw_curves(axes, groups, base, key, unit), 6.2, 4.2)
            for key, title in (("loss", "Loss, running mean"), ("val_loss", "Validation loss"))]


def seed_panels(paths, styles):
    """(the panels of the mean losses of runs over their seeds, their legend), or ([], []) if none differ only in their
    seeds. styles: (color, dash) of each run; a mean has that of its first one."""
    try:
        groups = groups_of(paths, True)
    except Refused:        # two with one seed
        return [], []
    if len(groups) == len(paths):
        return [], []
    of_run = dict(zip(map(str, paths), styles))
    for group in groups:
        group.color, group.dash = of_run[group.runs[0].path]
    unit = unit_of(line for group in groups for run in group.runs for line in run.lines[-1:])
    return (loss_panels(groups, None, unit, ", mean and range over seeds"),
            [(label_of(group, None, unit), group.color, group.dash) for group in groups])


def comparison(paths, seeds, baseline):
    """The picture of `plot.py RUN... [--seeds] [--baseline RUN]`."""
    groups = groups_of(paths, seeds)
    unit = unit_of(line for group in groups for run in group.runs for line in run.lines[-1:])
    base = find_baseline(groups, paths, baseline) if baseline else None
    others = [group for group in groups if group is not base]
    if base and not others:
        raise Refused(f"--baseline {baseline}: there is nothing to compare it with. Name further runs.")
    panels = loss_panels(groups, None, unit)
    if base:
        panels += loss_panels(others, base, unit, f", difference to {base.name}")
    legend = [(label_of(group, base, unit), group.color, group.dash) for group in groups]
    return charts.figure(Picture("comparison", panels, 2, legend, "mean and range over seeds" if seeds else ""))


# ---------------------------------------------------------------- layers

def draw_against_tokens(axes, tokens, curves, unit, marks, labels=True):
    """curves: [(label or None, color, numbers (steps) or (steps, heads))]. labels: of the marks, too"""
    x = [token / unit[0] for token in tokens]
    for label, color, values in curves:
        first, *_ = axes.plot(x, values, color=color, linewidth=1.3, alpha=0.9, marker="." if len(x) < 10 else None)
        first.set_label(label)
    drawing.draw_marks(axes, marks, unit[0], "0.3", labels)
    axes.set_xlabel(f"{unit[1]}tokens")
    axes.set_xlim(left=0)
    axes.legend(fontsize=8, frameon=False)


# ---------------------------------------------------------------- norms by layer

NORMS = {"grad_norms": "Gradient", "weight_norms": "Weights"}
GROUPS = {"attn": "attention", "mlp": "feed-forward", "gains": "norms' gains"}


def read_norms(run, lines):
    """{key of NORMS: (tokens, {group: array (steps, layers), tensor outside of the layers: array (steps,)})} of the
    steps that have them."""
    found = {}
    for key in NORMS:
        rows = [line for line in lines if key in line]
        try:
            names = rows[0][key] if rows else ()
            arrays = {name: results.numbers([row[key][name] for row in rows]) for name in names}
            if any(array.ndim > 2 for array in arrays.values()):
                raise TypeError("lists in lists")
        except (TypeError, KeyError, Refused) as error:
            raise Refused(f"{run}/metrics.jsonl: {key}: expected the same tensors and layers on each line ({error}).")
        if rows:
            found[key] = [row["tokens"] for row in rows], arrays
    return found


def norm_panels(run, name=""):
    """The panels of one run's norms by layer, in the layers' colors; [] without any."""
    lines = run_folder.read_metrics(run)
    unit, marks = unit_of(lines), run_folder.read_marks(run, lines)

    def panel(title, tokens, curves):
        def draw(axes):
            draw_against_tokens(axes, tokens, curves, unit, marks, labels=False)
            charts.positive_axis(axes, [value for *_, values in curves for value in values])
        return Panel(title + f": {name}" * bool(name), draw, 6, 3)

    found, panels = read_norms(run, lines), []
    for group, called in GROUPS.items():
        panels += [panel(f"{NORMS[key]}: {called}", tokens, charts.by_layer(arrays[group].T))
                   for key, (tokens, arrays) in found.items() if group in arrays and arrays[group].ndim == 2]
    for key, (tokens, arrays) in found.items():
        others = {tensor: norms for tensor, norms in arrays.items() if norms.ndim == 1}
        curves = [(tensor, color, others[tensor]) for tensor, (color, _) in zip(others, charts.colors_of(len(others)))]
        panels.append(panel(f"{NORMS[key]}: outside of the layers", tokens, curves))
    return panels


def norms(run):
    """The picture of `plot.py RUN --norms`."""
    panels = norm_panels(run)
    if not panels:
        raise Refused(f"{run}/metrics.jsonl: no norms by layer. The trainer writes them with --norms-every N.")
    return charts.figure(Picture("norms", panels, 2, [], run_folder.names([run])[0]))


# ---------------------------------------------------------------- learned scalars

def draw_scalar(axes, tokens, values, unit, marks):
    """Draws each layer's mean over its heads as a line, and the range of its heads as a band. values: those of
    run_folder.triples()"""
    mean, least, largest = np.array(values).T       # each (layers, steps)
    curves = charts.by_layer(mean)
    draw_against_tokens(axes, tokens, curves, unit, marks)
    for (_, color, _), low, high in zip(curves, least, largest):
        axes.fill_between([token / unit[0] for token in tokens], low, high, color=color, alpha=0.12, linewidth=0)


def scalar_panels(found):
    """The learned scalars of the heads against tokens, and p_n. found: [(run, name, its drawing.read_scalars())]"""
    panels = []
    for key in drawing.in_order({key for *_, values in found for key in values}):
        for run, name, values in found:
            if key == "p" and "p" in values:
                panels.append(Panel(f"p_n: {name}", lambda axes, p=values["p"]: drawing.draw_p(axes, p)))
            elif key in values:
                lines = run_folder.read_metrics(run)
                drawn = *values[key], unit_of(lines), run_folder.read_marks(run, lines)
                panels.append(Panel(f"{key}: {name}", lambda axes, drawn=drawn: draw_scalar(axes, *drawn)))
    return panels


def scalars(paths):
    """The picture of `plot.py RUN... --scalars`."""
    found = [(path, name, drawing.read_scalars(path)) for path, name in zip(paths, run_folder.names(paths))]
    return charts.figure(Picture("scalars", scalar_panels(found), max(2, len(paths)), [],
                                 "Lines: means over the heads of a layer; bands: from the least to the largest head"))


def head_values(run):
    """{symbol: (tokens, [array (checkpoints, heads) of each layer])} in the run's checkpoints."""
    found = {}
    for path in sorted(Path(run).glob("ckpt/step-*/model.safetensors")):
        tokens, scalars = drawing.checkpoint_scalars(path)
        for name, layers in scalars.items():
            found.setdefault(name, {})[tokens] = layers
    if not found:
        raise Refused(f"{run}: no learned scalars in its checkpoints. Either its normalizer learns none, or the "
                           "run has no checkpoint with them yet; --keep 0 keeps all checkpoints.")
    return {name: (list(steps), [np.array(layer) for layer in zip(*steps.values())]) for name, steps in found.items()}


def draw_newest(axes, layers):
    for layer, (_, color, values) in enumerate(charts.by_layer(layers)):
        axes.plot([layer] * len(values[-1]), values[-1], "o", color=color, markersize=5, alpha=0.8)
        axes.plot(layer, values[-1].mean(), "_", color="black", markersize=18)
    charts.layer_axis(axes, len(layers))


def heads(run):
    """The picture of `plot.py RUN --heads`: each scalar over the steps, and by layer in the newest checkpoint."""
    found, lines = head_values(run), run_folder.read_metrics(run)
    unit, marks = unit_of(lines), run_folder.read_marks(run, lines)
    panels = []
    for name in drawing.in_order(found):
        tokens, layers = found[name]
        curves = charts.by_layer(layers)
        panels += [Panel(f"{name} of every head",
                         lambda axes, t=tokens, c=curves: draw_against_tokens(axes, t, c, unit, marks), 7),
                   Panel(f"{name} of every head by layer, newest checkpoint (line: mean)",
                         lambda axes, v=layers: draw_newest(axes, v), 6)]
    return charts.figure(Picture("heads", panels, 2, [], run_folder.names([run])[0]))

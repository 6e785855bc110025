"""The pictures of a grid's report. Those of evaluations are drawn by tasks.py."""
import itertools
import math
import statistics
from dataclasses import dataclass, replace

import numpy as np

from lib import drawing
from lib.grid_file import Run
from lib.grid_report import (by_position, deviation, entry_of, eval_groups, lines_of, mean_known, members, metrics_of,
                             number, ranked, seeds_of_lines, trained_rows, weight)

from . import charts, tasks
from .charts import Panel, Picture

SPREAD = "± standard deviation over seeds"


@dataclass(eq=False)
class Series:
    """A line of a picture, with what tasks.py uses of results.Series."""
    label: str
    L: int
    rows: list
    seeds: int = 1
    color: object = None
    dash: object = "-"


def spreads(numbers):
    """For each place, the standard deviation of its numbers; 0 where it is not known. numbers: a list for each
    place."""
    return [x if math.isfinite(x) else 0.0 for x in map(deviation, numbers)]


def draw_band(axes, x, y, spread, color):
    """A band of the spread around a curve, if it has any."""
    if any(spread):
        axes.fill_between(x, np.subtract(y, spread), np.add(y, spread), color=color, alpha=0.15, linewidth=0)


def draw_curves(axes, series, unit=1):
    """Series whose rows are (x, y, spread)."""
    for s in series:
        x, y, spread = np.transpose(s.rows)
        axes.plot(x / unit, y, color=s.color, linestyle=s.dash, linewidth=1.3, label=s.label)
        draw_band(axes, x / unit, y, spread, s.color)


# ---------------------------------------------------------------- a panel for each group of rows

def draw_group(axes, draw, series, columns):
    """draw(axes, series), with a legend of so many columns below."""
    draw(axes, series)
    handles, labels = axes.get_legend_handles_labels()
    texts, _ = drawing.fit_legend(labels, columns, 5.4, 7.5)
    drawing.legend(axes, handles, texts, fontsize=7.5, frameon=False, ncols=columns, loc="upper left",
                   bbox_to_anchor=(0, -0.17))


def picture(plan, title, found, draw, marks, base=True):
    """A panel for each title of {title: [(row, its Series)]}. The baseline is dashed in the panels that lack it, and
    has no panel of its own. None if there is nothing to draw. marks: what shows the spread over seeds, if there is
    any"""
    dashed = [s for pairs in found.values() for row, s in pairs if base and row.name == plan.grid.baseline]
    found = {name: [s for _, s in pairs] for name, pairs in found.items() if pairs}
    found = {name: series for name, series in found.items() if any(s not in dashed for s in series)} or found
    if not found:
        return None
    every = [s for series in found.values() for s in series]
    columns = charts.legend_columns([s.label for s in every], 7.2)      # 5.4 inches, in a smaller font
    height = 3.7 + 0.16 * math.ceil((max(map(len, found.values())) + len(dashed)) / columns)
    panels = []
    for name, series in found.items():
        shown = [replace(s, color=color, dash=dash) for s, (color, dash) in zip(series, charts.colors_of(len(series)))]
        shown += [replace(s, color="0.3", dash="--") for s in dashed if s not in series]
        panels.append(Panel(name, lambda axes, shown=shown: draw_group(axes, draw, shown, columns), height=height))
    title += f"; {marks}: {SPREAD}" if any(s.seeds > 1 for s in every + dashed) else ""
    return Picture("", panels, 3, title=title, share_y=True)


def line_picture(plan, title, evals, series_of, draw, marks):
    """The picture of some evaluations. series_of(line, seeds): its Series as the mean over these seeds, or None"""
    lines = lines_of(plan, evals)
    shared = seeds_of_lines(plan, lines)
    found = {name: [(line.row, s) for line in inside if (s := series_of(line, shared[line.key()]))]
             for name, inside in lines.items()}
    return picture(plan, title, found, draw, marks, len(evals) == 1)


# ---------------------------------------------------------------- training

def curve_of(plan, x):
    """The validation losses of a Trained, the mean over its seeds, with their spread over all seeds of the row; the
    smoothed training losses where there is no validation. None without results."""
    entries = {seed: entry for seed in x.row.seeds
               if (entry := entry_of(plan, Run(x.row.name, x.size, seed), "train"))}
    every = {seed: dict(map(tuple, entry["curves"]["val"] or entry["curves"]["loss"]))
             for seed, entry in entries.items()}
    common = sorted(set.intersection(*(set(every[seed]) for seed in x.seeds))) if x.seeds else []
    rows = [(tokens, statistics.fmean(every[seed][tokens] for seed in x.seeds),
             *spreads([[curve[tokens] for curve in every.values() if tokens in curve]])) for tokens in common]
    outcome = next((f" ({entries[seed]['outcome']})" for seed in x.seeds if entries[seed]["outcome"]), "")
    return Series(x.label + outcome, plan.grid.scale.L, rows, len(every)) if rows else None


def curves_picture(plan):
    found, whole, every = {}, [], []
    for x in trained_rows(plan):
        if s := curve_of(plan, x):
            found.setdefault(x.row.group, []).append((x.row, s))
            every.append(s)
            whole += [s] * (s.label == x.label)
    late = [loss for s in whole or every for _, loss, _ in s.rows[len(s.rows) // 4:]]
    unit, name = drawing.unit(max((tokens for s in every for tokens, *_ in s.rows), default=1), drawing.TOKEN_UNITS)

    def draw(axes, series):
        draw_curves(axes, series, unit)
        axes.set(xlabel=f"{name}tokens", ylabel="nats per token", ylim=(min(late) - 0.1, max(late) + 0.1))
        drawing.say_what_is_cut_off(axes)
    return picture(plan, "Validation loss while training", found, draw, "bands")


def draw_final(axes, final, order, band):
    """A point for each Trained, with its interval unless that is the band. Colors and markers are those of groups."""
    colors = drawing.pyplot().get_cmap("Dark2").colors
    axes.axvspan(-band, band, color="0.5", alpha=0.2, linewidth=0)
    drawn = {}
    for place, x in enumerate(final):
        axes.annotate(number(x.difference.mean, sign=True), (1, place), (4, 0), xycoords=("axes fraction", "data"),
                      textcoords="offset points", va="center", fontsize=8)
        if math.isfinite(x.difference.mean):
            wide, group = x.difference.half if x.difference.half < band else None, order.index(x.row.group)
            drawn[x.row.group] = axes.errorbar(
                x.difference.mean, place, fmt="osD^vP"[group % 6], markersize=5, xerr=wide, elinewidth=1.2, capsize=2.5,
                color=colors[group % len(colors)])
    axes.set_yticks(range(len(final)), [x.label for x in final], fontsize=8)
    axes.set_ylim(len(final) - 0.3, -0.7)
    axes.margins(x=0.05)
    axes.set_xlabel("nats per token")
    if len(drawn) > 1:
        names = sorted(drawn, key=order.index)
        axes.legend([drawn[name] for name in names], names, fontsize=7.5, frameon=False, loc="upper right")


def final_picture(plan):
    """The differences of final validation losses from the baseline, seed by seed, with their intervals, as in the
    table. The band is the interval of rows with the fewest seeds, which share it, around no difference."""
    final, order = ranked(trained_rows(plan)), list(dict.fromkeys(row.group for row in plan.grid.rows.values()))
    if not final:
        return None
    halves = [x.difference.half for x in final if math.isfinite(x.difference.mean + x.difference.half)]
    band = max(halves, default=0)
    base = plan.grid.baseline if plan.grid.baseline in [x.row.name for x in final] else final[0].label
    title = (f"Final validation loss, difference from {base}, seed by seed"
             + "\nband: 95% interval around no difference; bars: that of rows with more seeds" * bool(band))
    return Picture("", [Panel(title, lambda axes: draw_final(axes, final, order, band), 8, 1.2 + 0.24 * len(final))])


def scalars_picture(plan):
    """The learned scalars by layer, and p_n with its fit, as tasks.py draws those of --task scores."""
    series = []
    for label, row, size in members(plan):
        for seed in row.seeds:
            entry = entry_of(plan, Run(row.name, size, seed), "train")
            found = {name: x for name, x in entry["values"].items() if isinstance(x, list)} if entry else {}
            known = {"attn_pn": found.pop("p")} if "p" in found else {}
            known["layers"] = [{f"attn_{name}": [x] for name, x in zip(found, layer)} for layer in zip(*found.values())]
            series.append(Series(f"{label}, seed {seed}", plan.grid.scale.L, [known]))
    series = tasks.learned(series)
    charts.paint(series)
    return next(iter(tasks.scores(series, "At the end of training: means over the heads")), None)


# ---------------------------------------------------------------- evaluations

def lengths_picture(plan, title, evals):
    def series_of(line, seeds):
        rows = [{"seq_len": T, "loss": statistics.fmean(losses),
                 "loss_each": np.array(line.numbers(plan, line.row.seeds, "loss", str(T)))}
                for T in line.eval.lengths if (losses := line.numbers(plan, seeds, "loss", str(T)))]
        least = min((len(row["loss_each"]) for row in rows if np.isfinite(row["loss_each"]).all()), default=1)
        return Series(line.label, plan.grid.scale.L, rows, least) if rows else None

    def draw(axes, series):
        tasks.draw_by_length(axes, series, "loss")
        axes.set_ylabel("nats per token")
    return line_picture(plan, f"Loss by length ({title})", evals, series_of, draw, "bars")


def positions_picture(plan, title, evals):
    """Those of the longest length."""
    T = max(T for e in evals for T in e.lengths)

    def series_of(line, seeds):
        means = by_position(plan, line, seeds) if max(line.eval.lengths) == T else []
        each = list(filter(None, (by_position(plan, line, [seed]) for seed in line.row.seeds)))
        rows = [((i + 0.5) * T / len(means), mean, wide)
                for i, (mean, wide) in enumerate(zip(means, spreads(zip(*each))))]
        return Series(line.label, plan.grid.scale.L, rows, len(each)) if rows else None

    def draw(axes, series):
        draw_curves(axes, series)
        charts.mark_trained(axes, series)
        axes.set(xlabel="position", ylabel="nats per token")
    return line_picture(plan, f"Loss by position, sequences of {T:,} tokens ({title})", evals, series_of, draw, "bands")


def needles_picture(plan, evals):
    """The share of needles found, by length and depth, in a panel for each line. None if the evaluations show another
    metric, such as best_score, or have random depths."""
    series = []
    for line in (line for inside in lines_of(plan, evals).values() for line in inside):
        entries = [entry_of(plan, Run(line.row.name, line.size, seed), line.eval.name) for seed in line.row.seeds]
        each, rows = [entry["values"].get("right", {}) for entry in entries if entry], {}
        for column in dict.fromkeys(column for right in each for column in right if " at " in column):
            T, depth = column.removesuffix(" %").split(" at ")
            rows.setdefault(int(T), []).append({"depth": float(depth),
                                                "right": mean_known([right.get(column) for right in each])})
        if rows:
            series.append(Series(line.label + f", mean of {len(each)} seeds" * (len(each) > 1), plan.grid.scale.L,
                                 [{"seq_len": T, "depths": depths} for T, depths in rows.items()]))
    shown = series if "right" in metrics_of(plan, evals) else []
    return Picture("", tasks.found_panels(shown), 4, title="Needles found, percent") if shown else None


# ---------------------------------------------------------------- formulas

def draw_formula(axes, formula):
    """The weight of one score among n - 1 of `low`: softmax, and s ln(n) times the scores."""
    if formula.against == "n":
        n = sorted({round(2 ** (i / 8)) for i in range(8 * max(1, round(math.log2(max(formula.n)))) + 1)})
        cases = [("", n, [(k, formula.high) for k in n])]
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    else:
        scores = np.linspace(formula.low, formula.high, 201)
        cases = [(f", n = {k:,}", scores, [(k, x) for x in scores]) for k in formula.n]
    for (ending, x, points), dash in zip(cases, itertools.cycle(drawing.DASHES)):
        axes.plot(x, [weight(k, formula.low, score, 1) for k, score in points], color="tab:blue", linestyle=dash,
                  label="softmax" + ending)
        axes.plot(x, [weight(k, formula.low, score, formula.s * math.log(k)) for k, score in points], color="tab:red",
                  linestyle=dash, label="ssmax" + ending)
    axes.set(xlabel="n" if formula.against == "n" else "the one score", ylabel="weight", ylim=(0, 1.03))
    axes.legend(frameon=False, fontsize=8)


def formula_picture(formula):
    score = f"{formula.high:g}" if formula.against == "n" else f"{formula.low:g} to {formula.high:g}"
    title = f"Weight of one score of {score} among n - 1 of {formula.low:g}, s = {formula.s:g}"
    return Picture("", [Panel(title, lambda axes: draw_formula(axes, formula), 7, 4.2)])


# ---------------------------------------------------------------- all

def pictures(plan):
    """(name, Picture or None) of a report's pictures."""
    yield "curves", curves_picture(plan)
    yield "final", final_picture(plan)
    yield "scalars", scalars_picture(plan)
    for title, evals in eval_groups(plan).items():
        if all(e.task in ("loss", "positions") for e in evals):
            yield title, lengths_picture(plan, title, evals)
        if all(e.task == "positions" for e in evals):
            yield f"{title}-positions", positions_picture(plan, title, evals)
        if all(e.task == "needle" for e in evals):
            yield title, needles_picture(plan, evals)
    for formula in plan.grid.formulas:
        yield formula.name, formula_picture(formula)


def figures(plan):
    """(name, figure) of those that there is something for."""
    return ((name, charts.figure(picture)) for name, picture in pictures(plan) if picture)

"""The panels of --task loss, positions, needle, scores and choice. Each task ends with the function that arranges its
pictures."""
import math
import textwrap

import numpy as np

from lib import drawing

from . import charts
from .charts import Panel, Picture
from .results import number, numbers

WINDOW = 1.12       # the running mean at position t covers t/WINDOW to t WINDOW


# ---------------------------------------------------------------- loss

def by_length(series, key):
    """(lengths, values) in ascending order."""
    points = sorted((int(row["seq_len"]), number(row[key])) for row in series.rows)
    return [T for T, _ in points], [value for _, value in points]


def draw_by_length(axes, series, key):
    lengths, values = [], []
    for s in series:
        x, y = by_length(s, key)
        curve, = axes.plot(x, y, color=s.color, linestyle=s.dash, linewidth=1.6, marker="o", markersize=4,
                           label=s.label)
        if s.seeds > 1:
            each = {int(row["seq_len"]): row[f"{key}_each"].std(ddof=1) for row in s.rows}
            bars = axes.errorbar(x, y, yerr=np.nan_to_num([each[T] for T in x]), fmt="none", ecolor=s.color,
                                 elinewidth=1.2, capsize=3)
            drawing.move_beside(axes, curve, bars)
        missing = [T for T, value in zip(x, y) if not math.isfinite(value)]
        if missing:
            axes.plot(missing, [0.96] * len(missing), "x", color=s.color, transform=axes.get_xaxis_transform())
        lengths += x
        values += y
    charts.positive_axis(axes, values)
    owners = charts.mark_trained(axes, series)
    charts.length_axis(axes, lengths, "tokens per sequence"
                       + ("" if all(map(math.isfinite, values)) else " (x: not finite)") + owners)


def length_panels(series):
    return [Panel("Loss, nats per token", lambda axes: draw_by_length(axes, series, "loss")),
            Panel("Perplexity", lambda axes: draw_by_length(axes, series, "perplexity"))]


def loss(series, title):
    return [Picture("lengths", length_panels(series), 2, charts.legend_of(series), title)]


# ---------------------------------------------------------------- positions

def smooth(values):
    """The running mean in log position, without NaNs. Windows end where the sequence does."""
    t = np.arange(1, len(values) + 1)
    first, last = np.ceil(t / WINDOW).astype(int), np.floor(t * WINDOW).astype(int)
    return drawing.means(values, first - 1, np.minimum(last, len(values)))


def curves(series):
    """{length: [(series, loss at each position)]}, shortest first."""
    found = {}
    for s in series:
        for row in s.rows:
            found.setdefault(int(row["seq_len"]), []).append((s, numbers(row["loss_by_position"])))
    return dict(sorted(found.items()))


def draw_spread(axes, s, T):
    """A band of the standard deviation over seeds around the smoothed mean."""
    for row in s.rows if s.seeds > 1 else []:
        if int(row["seq_len"]) == T:
            each = np.array([smooth(y) for y in row["loss_by_position_each"]])
            middle, wide = smooth(row["loss_by_position"]), np.nan_to_num(each.std(axis=0, ddof=1))
            axes.fill_between(np.arange(1, T + 1), middle - wide, middle + wide, color=s.color, alpha=0.18, linewidth=0)


def limits(found):
    """From the least to the largest smoothed loss. The first 64th of the sequences, where losses are high and noisy,
    does not count if it would make the axis more than half as long again. The raw numbers may lie outside."""
    def finite(parts):
        values = np.concatenate(parts)
        return values[np.isfinite(values)]
    smoothed = [smooth(y) for rows in found.values() for _, y in rows]
    every, values = finite(smoothed), finite([y[len(y) // 64:] for y in smoothed])
    if not len(values):
        return 0, 1
    if np.ptp(every) <= 1.5 * np.ptp(values):
        values = every
    return drawing.with_margin(values.min(), values.max())


def draw_positions(axes, rows, T, between):
    for s, y in rows if len(rows) == 1 else []:
        axes.plot(np.arange(1, len(y) + 1), y, color=s.color, alpha=0.2, linewidth=0.7,
                  marker="." if len(y) < 40 else None, rasterized=len(y) > 1000)
    smoothed = []
    for s, y in rows:
        smoothed += axes.plot(np.arange(1, len(y) + 1), smooth(y), color=s.color, linestyle=s.dash, linewidth=1.7,
                              label=s.label)
        draw_spread(axes, s, T)
    owners = charts.mark_trained(axes, [s for s, _ in rows], T)
    charts.length_axis(axes, [*charts.powers_of_two(T), T], "position" + owners)
    axes.set(xlim=(0.9, max(T, 2) * 1.05), ylim=between, ylabel="nats per token")
    drawing.say_what_is_cut_off(axes, smoothed)


def position_panels(series, width=5.4):
    found = curves(series)
    between = limits(found)
    return [Panel(f"Loss by position, sequences of {T:,} tokens",
                  lambda axes, rows=rows, T=T: draw_positions(axes, rows, T, between), width)
            for T, rows in found.items()]


def positions(series, title):
    panels = position_panels(series, 7.2)
    return [Picture("positions", panels, 1 if len(panels) < 3 else 2, charts.legend_of(series), title)]


TOP = 25                    # heads in the ranking ([SSMax] Figure 7)
MOST_LENGTHS = 4            # with panels of their own for the scores
VERDICTS = {"right": ("#009e73", "o"), "first digit right": ("#e69f00", "^"), "wrong": ("#d55e00", "x")}


# ---------------------------------------------------------------- needles found

def share_right(series):
    """(lengths, depths or [None], percent right (depths, lengths)); NaN where a pair is missing."""
    rows = sorted(series.rows, key=lambda row: row["seq_len"])
    cells = {(row["seq_len"], cell.get("depth")): 100 * number(cell["right"]) for row in rows for cell in row["depths"]}
    lengths = [row["seq_len"] for row in rows]
    depths = sorted({depth for _, depth in cells}, key=lambda depth: depth or 0)
    values = np.array([[cells.get((T, depth), np.nan) for T in lengths] for depth in depths])
    return lengths, depths, values.reshape(len(depths), len(lengths))


def draw_found(axes, series):
    lengths, depths, right = share_right(series)
    image = axes.imshow(right, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (i, j), value in np.ndenumerate(right):
        bright = np.dot(image.cmap(image.norm(value))[:3], (0.3, 0.59, 0.11)) > 0.5
        axes.text(j, i, charts.decimals(value), ha="center", va="center", fontsize=8 if len(lengths) < 14 else 6.5,
                  color="#010101" if bright else "#fefefe")
    axes.set_xticks(range(len(lengths)), [f"{T:,}" for T in lengths], rotation=45 if len(lengths) > 7 else 0)
    axes.set_yticks(range(len(depths)), ["random" if depth is None else f"{depth:g}%" for depth in depths])
    axes.set(xlabel="tokens of context", ylabel="depth")
    axes.grid(False)
    inside = sum(T <= series.L for T in lengths)
    if 0 < inside < len(lengths):
        axes.axvline(inside - 0.5, color="#fefefe", linewidth=2.5)
        axes.axvline(inside - 0.5, color="#010101", linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(f"trained at {series.L:,}", (inside - 0.5, 1), (0, 3), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha="center", fontsize=8, alpha=charts.MUTED)


def found_panels(series):
    """The percentages of needles found."""
    panels = []
    for s in series:
        lengths, depths, _ = share_right(s)
        panels.append(Panel(f"{s.label}\n", lambda axes, s=s: draw_found(axes, s), max(3.6, 1.9 + 0.6 * len(lengths)),
                            1.5 + 0.36 * max(2, len(depths))))
    return panels


# ---------------------------------------------------------------- needle scores

def chosen_lengths(series):
    """All lengths, or MOST_LENGTHS of them, evenly spread."""
    lengths = sorted({row["seq_len"] for s in series for row in s.rows})
    if len(lengths) <= MOST_LENGTHS:
        return lengths
    return [lengths[round(i * (len(lengths) - 1) / (MOST_LENGTHS - 1))] for i in range(MOST_LENGTHS)]


def ranked_heads(row):
    """[(score, layer, head)], best first, at most TOP."""
    scores = numbers(row["needle_scores"])
    heads = [(score, *where) for where, score in np.ndenumerate(scores) if np.isfinite(score)]
    return sorted(heads, key=lambda head: (-head[0], *head[1:]))[:TOP]


def draw_heads(axes, rows):
    """rows: [(series, row)] of one length."""
    for s, row in rows:
        heads = ranked_heads(row)
        axes.plot(range(1, len(heads) + 1), [score for score, *_ in heads], color=s.color, linestyle=s.dash,
                  linewidth=1.3, marker="o", markersize=3.5, label=s.label)
        for rank, (score, layer, head) in enumerate(heads[:5] if len(rows) == 1 else [], 1):
            axes.annotate(f"{layer}.{head}", (rank, score), (4, 3), textcoords="offset points", fontsize=7,
                          color=s.color)
    axes.set(xlabel="rank of the head" + (" (labels: layer.head)" if len(rows) == 1 else ""),
             ylabel="mean needle score")
    axes.set_xlim(0, max(len(ranked_heads(row)) for _, row in rows) + 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))


def head_panels(series):
    panels = []
    for T in chosen_lengths(series):
        rows = [(s, row) for s in series for row in s.rows if row["seq_len"] == T]
        panels.append(Panel(f"Heads by needle score, context {T:,}", lambda axes, rows=rows: draw_heads(axes, rows)))
    return panels


def best_score(trial):
    return number(trial["best_score"])


def draw_trials(axes, trials, least, largest):
    """The best score of each trial, ranked, colored by what was answered; least, largest: of all panels."""
    ranked = sorted(trials, key=best_score, reverse=True)
    for verdict, (color, marker) in VERDICTS.items():
        points = [(rank, best_score(trial)) for rank, trial in enumerate(ranked, 1) if trial["verdict"] == verdict]
        axes.plot([x for x, _ in points], [y for _, y in points], marker, color=color, markersize=4.5, linestyle="none",
                  label=f"{verdict}: {len(points)}")
    axes.set(xlabel="rank of the trial", ylabel="best needle score")
    axes.set_xlim(0, len(trials) + 1)
    axes.set_ylim(1.05 * min(0, least), 1.05 * max(0.01, largest))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right", fontsize=8, frameon=False)


def trial_panels(series):
    chosen = chosen_lengths(series)
    drawn = [(s, row) for s in series for row in sorted(s.rows, key=lambda row: row["seq_len"])
             if row["seq_len"] in chosen]
    scores = [x for _, row in drawn for x in map(best_score, row["trials"]) if math.isfinite(x)]
    ends = min(scores, default=0), max(scores, default=0)
    return [Panel(f"{s.label}, context {row['seq_len']:,}",
                  lambda axes, row=row: draw_trials(axes, row["trials"], *ends), 4.6, 3.2) for s, row in drawn]


def needle(series, title):
    chosen = chosen_lengths(series)
    return [Picture("needle", found_panels(series), 2 if len(series) > 1 else 1, [],
                    f"{title}: needles found, percent" if title else "Needles found, percent"),
            Picture("needle-heads", head_panels(series), 2, charts.legend_of(series), title),
            Picture("needle-trials", trial_panels(series), len(chosen), [], title)]


# ---------------------------------------------------------------- scores

def scalars(series):
    """{symbol: (layers, heads)} of one series, and p_n as "p"."""
    row, = series.rows
    keys = dict.fromkeys(key for layer in row["layers"] for key in layer if key.startswith("attn_"))
    found = {drawing.symbol(key): numbers([layer[key] for layer in row["layers"]]) for key in keys}
    if "attn_pn" in row:
        found["p"] = numbers(row["attn_pn"])
    return found


def fits(series):
    """(layers, heads, 2): a1 and a2 of each head's scale (a1 ln n + a2)/sqrt(d), or None."""
    row, = series.rows
    if not row["layers"] or "fits" not in row["layers"][0]:
        return None
    return numbers([[[fit["a1"], fit["a2"]] for fit in layer["fits"]] for layer in row["layers"]])


def has_heads(rows):
    return any(values.shape[1] > 1 for _, values in rows)


def draw_scalar(axes, rows):
    """rows: [(series, (layers, heads))]: a point for each head, and a line through the means of the layers. The heads
    of different series stand side by side."""
    step = min(0.12, 0.6 / len(rows)) if has_heads(rows) else 0
    for place, (s, values) in enumerate(rows):
        layers = np.arange(len(values)) + (place - (len(rows) - 1) / 2) * step
        axes.plot(np.repeat(layers, values.shape[1]), values.ravel(), ".", color=s.color, alpha=0.5, markersize=5)
        axes.plot(layers, values.mean(1), color=s.color, linestyle=s.dash, linewidth=1.5, label=s.label)
    charts.layer_axis(axes, max(len(values) for _, values in rows))


def draw_scales(axes, s, ab):
    n = np.geomspace(1, 4 * s.L, 100)
    for label, color, heads in charts.by_layer(ab):
        first, *_ = axes.plot(n, np.outer(np.log(n), heads[:, 0]) + heads[:, 1], color=color, linewidth=0.9, alpha=0.7)
        first.set_label(label)
    axes.axhline(1, color="black", alpha=charts.MUTED, linestyle=":", linewidth=1.2)
    axes.annotate("softmax", (1, 1), (2, 3), textcoords="offset points", fontsize=8, alpha=charts.MUTED)
    charts.mark_trained(axes, [s])
    charts.length_axis(axes, charts.powers_of_two(4 * s.L), "n (visible keys)")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)     # inside, it would cover lines


def learned(series):
    """Those that have scalars."""
    return [s for s in series if scalars(s)]


def score_panels(series):
    found = [(s, scalars(s)) for s in series]
    panels = []
    for name in drawing.in_order({name for _, values in found for name in values}):
        rows = [(s, values[name]) for s, values in found if name in values]
        if name == "p":
            panels += [Panel(f"p_n: {s.label}", lambda axes, p=p: drawing.draw_p(axes, p)) for s, p in rows]
        else:
            owner = f": {rows[0][0].label}" if len(rows) == 1 < len(series) else ""
            panels.append(Panel(f"{name} by layer" + " (points: heads)" * has_heads(rows) + owner,
                                lambda axes, rows=rows: draw_scalar(axes, rows)))
    for s in series:
        ab = fits(s)
        if ab is not None:
            panels.append(Panel(f"Scale × √d = a1 ln n + a2: {s.label}",
                                lambda axes, s=s, ab=ab: draw_scales(axes, s, ab)))
    return panels


def scores(series, title):
    panels = score_panels(series)
    return [Picture("scores", panels, 2, charts.legend_of(learned(series)), title)] if panels else []


# ---------------------------------------------------------------- choice

def chance(series):
    """The accuracy of guessing: the mean of 1/(number of endings)."""
    endings = [len(question) for s in series for row in s.rows for question in row["log_likelihoods"]]
    return sum(1 / count for count in endings) / len(endings) if endings else math.nan


def draw_accuracies(axes, series):
    places = np.arange(len(series))
    for shift, key, hatch in (-0.2, "acc", ""), (0.2, "acc_norm", "///"):
        values = [number(s.rows[0][key]) for s in series]
        errors = [number(s.rows[0][f"{key}_stderr"]) for s in series]
        axes.barh(places + shift, values, 0.38, color=[s.color for s in series], hatch=hatch, edgecolor="#ffffff",
                  linewidth=0, alpha=0.9 if not hatch else 0.6)
        axes.errorbar(values, places + shift, xerr=np.nan_to_num(errors), fmt="none", ecolor="black", elinewidth=1.2,
                      capsize=3)
        for place, value, error in zip(places, values, errors):
            text = f"{value:.3f}" + (f" ± {error:.3f}" if math.isfinite(error) else "")
            axes.annotate(f"{key} {text}", (value + np.nan_to_num(error), place + shift), (5, 0),
                          textcoords="offset points", va="center", fontsize=8,
                          bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5})
    axes.axvline(chance(series), color="black", alpha=charts.MUTED, linestyle=":", linewidth=1.2)
    axes.annotate("chance", (chance(series), 0), (3, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                  fontsize=8, alpha=charts.MUTED)
    axes.set_yticks(places, [textwrap.fill(s.label, 32) for s in series])
    axes.set(xlim=(0, 1.55), ylim=(len(series) - 0.5, -0.5), xlabel="accuracy")
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.grid(axis="y", visible=False)


def choice_panels(series, width=5.4):
    questions = sorted({int(number(s.rows[0]["questions"])) for s in series})
    counted = ", ".join(f"{count:,}" for count in questions)
    return [Panel(f"Multiple choice, {counted} questions (lines: standard error)",
                  lambda axes: draw_accuracies(axes, series), width, 1.2 + 0.75 * len(series))]


def choice(series, title):
    return [Picture("choice", choice_panels(series, 7.2), 1, [], title)]

"""Curves of runs, and what all pictures share: axes, colors, legends, marks, and writing a figure."""
import argparse
import io
import math
import statistics
import textwrap
from pathlib import Path

from lib import files, run_folder
from lib.run_folder import Refused

TOKEN_UNITS = ((1, ""), (1e3, "thousand "), (1e6, "million "), (1e9, "billion "))
TIME_UNITS = ((1, "seconds"), (60, "minutes"), (3600, "hours"), (86400, "days"))
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))


def means(values, first, last):
    """The mean of values[first[i]:last[i]] for each i, without NaNs; NaN where nothing else is left."""
    import numpy as np
    x = np.asarray(values, float)
    finite = np.isfinite(x)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, x, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    inside = count[last] - count[first]
    return np.where(inside > 0, (total[last] - total[first]) / np.maximum(inside, 1), np.nan)


def smooth(values):
    """The mean over a centered window of a fiftieth of the run, truncated at its ends, without NaNs."""
    import numpy as np
    half, i = len(values) // 100, np.arange(len(values))
    return means(values, np.maximum(i - half, 0), np.minimum(i + half + 1, len(values))).tolist()


def unit(largest, units):
    """The largest of the units, (size, name) in ascending order, that `largest` reaches, or else the first."""
    return [u for u in units if u[0] <= largest or u is units[0]][-1]


def last_validation(lines, digits):
    """The last finite validation loss as text, with its step if the run has gone on since; "" if there is none."""
    losses = run_folder.column(lines, "val_loss")
    found = [(line["step"], value) for line, value in zip(lines, losses) if math.isfinite(value)]
    if not found:
        return ""
    step, value = found[-1]
    return f"{value:.{digits}f}" + (f" (step {step:,})" if step < lines[-1]["step"] else "")


def title(name, lines, run):
    """The run's name with its latest losses."""
    loss = [value for value in smooth(run_folder.column(lines, "loss")) if math.isfinite(value)]
    val = last_validation(lines, 3)
    losses = (f": mean loss {loss[-1]:.3f}" if loss else "") + (f", validation {val}" if val else "")
    lost = [line["step"] for line, value in zip(lines, run_folder.column(lines, "loss")) if not math.isfinite(value)]
    losses += f", x: not finite from step {lost[0]:,} on" if lost else ""
    steps = run_folder.read_run(run)["arguments"].get("steps") or 0
    losses += f", step {lines[-1]['step']:,} of {steps:,}" if steps > lines[-1]["step"] else ""
    return name + losses + run_folder.change_at_start(run)


def draw_smooth(axes, x, y, color, dash="-"):
    """Draws the values faintly and their running mean on top; if there are only a few, also as points."""
    axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8, marker="." if len(x) < 10 else None)
    axes.plot(x, smooth(y), color=color, linestyle=dash, linewidth=1.4)


def draw_loss(axes, x, lines, color, dash):
    """The training loss, an x at the top where it is not finite, and the validation losses as points on a thicker,
    darker line."""
    draw_smooth(axes, x, run_folder.column(lines, "loss"), color, dash)
    lost = [a for a, b in zip(x, run_folder.column(lines, "loss")) if not math.isfinite(b)]
    if lost:
        axes.plot(lost, [0.96] * len(lost), "x", color=color, transform=axes.get_xaxis_transform())
    points = [(a, b) for a, b in zip(x, run_folder.column(lines, "val_loss")) if math.isfinite(b)]
    if points:
        axes.plot(*zip(*points), color=[0.75 * c for c in color], linestyle=dash, linewidth=2, alpha=0.8, marker="o",
                  markersize=5, markeredgecolor="white", markeredgewidth=0.8)


def rim():
    """The path effects of a label that stands on curves: a narrow rim instead of a box, which would hide them."""
    from matplotlib import patheffects
    return [patheffects.withStroke(linewidth=2, foreground="white")]


def draw_marks(axes, marks, size, color, labels=True, place=0):
    """A line for each of run_folder.read_marks(), against tokens (place 0) or seconds (1) in units of `size`, labeled
    or not. Labels stand at the top, where losses rarely are, each on the side of its line with more room to its
    neighbors, and those of several runs beside each other."""
    for *at, _, style in marks:
        axes.axvline(at[place] / size, color=color, linestyle=style, linewidth=1.1, alpha=0.9)
    labeled = [(mark[place] / size, mark[2]) for mark in marks if labels and mark[2]]
    edges = [0, *(x for x, _ in labeled), axes.get_xlim()[1]]
    for before, (x, text), after in zip(edges, labeled, edges[2:]):
        side, sign = ("right", -1) if x - before > after - x else ("left", 1)
        text = "\n".join(textwrap.wrap(text, 36, max_lines=3, break_on_hyphens=False, placeholder=" …"))
        there = [label.get_text() for label in axes.texts if getattr(label, "xy", None) == (x, 0.93)
                 and label.get_ha() == side]
        if text not in there:
            lines = "\n".join([*there, ""]).count("\n")
            axes.annotate(text, (x, 0.93), (sign * (3 + 11 * lines), 0), xycoords=("data", "axes fraction"),
                          textcoords="offset points", rotation=90, ha=side, va="top", fontsize=8, color=color, zorder=5,
                          path_effects=rim())


def move_beside(axes, curve, bars):
    """Moves a curve and its error bars a few points to the left or the right in turn, so that no bars of the axes hide
    others."""
    from matplotlib.transforms import ScaledTranslation
    i = (len(axes.containers) - 1) % 9      # more would leave the axes
    points = 3 * ((i + 1) // 2) * (1 if i % 2 else -1)
    for artist in (curve, *bars.get_children()):
        artist.set_transform(axes.transData + ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans))


def high_end(late, begun):
    """The largest late loss that an axis shows. If a run diverges, the axis ends at the losses that the runs began with
    or, where these are low, half above the usual, so that the others are not flattened."""
    return min(max(late), max([*begun, 1.5 * statistics.median(late)]))


def with_margin(low, high):
    """The limits of an axis that shows these values."""
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def loss_limits(loaded):
    """From just below the lowest loss to just above the largest after the first twentieth of each run, so that the
    fall from ln(vocabulary) in the first steps does not flatten the rest."""
    late, begun = [], []
    for lines in loaded:
        loss, skip = run_folder.column(lines, "loss"), len(lines) // 20
        late += [*loss[skip:], *smooth(loss)[skip:], *run_folder.column(lines, "val_loss")[skip:]]
        begun += [value for value in loss[:1] if math.isfinite(value)]
    late = [value for value in late if math.isfinite(value)] or [0.0]
    return with_margin(min(late), high_end(late, begun))


def say_what_is_cut_off(axes, lines=None):
    """Adds a note below the top edge if some of the lines, or of all lines, lies above or below the axis."""
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    points = [(float(x), float(y)) for line in lines or axes.lines if line.get_transform() == axes.transData
              for x, y in zip(line.get_xdata(), line.get_ydata()) if math.isfinite(y)]
    cut = [(x, y) for x, y in points if not low <= y <= high]
    if not cut:
        return
    least, largest = min(y for _, y in cut), max(y for _, y in cut)
    early = least > high and max(x for x, _ in cut) < left + 0.1 * (right - left)
    parts = ([f"reach {largest:.2f}"] if largest > high else []) + ([f"fall to {least:.2f}"] if least < low else [])
    axes.text(0.5, 0.985, f"axis truncated: {'early values' if early else 'values'} {' and '.join(parts)}",
              transform=axes.transAxes, ha="center", va="top", fontsize=9, style="italic", color="0.35")


def pyplot():
    """matplotlib.pyplot without a display, in this file's style."""
    from lib import canvas  # noqa: F401
    import matplotlib.pyplot as plt
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
                         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
                         "text.parse_math": False})     # folders' names may contain $
    return plt


def legend(owner, handles, labels, **how):
    """The legend of axes or a figure. matplotlib leaves out labels that begin with _, unless they get that later."""
    made = owner.legend(handles, [f" {label}" for label in labels], **how)
    for text, label in zip(made.get_texts(), labels):
        text.set_text(label)
    return made


def fit_legend(labels, columns, width, size):
    """The labels, wrapped so that `columns` of them fit side by side into `width` inches at a font's `size` in points,
    and how many lines the tallest column has."""
    import numpy as np
    room = 72 * width / columns - 5 * size      # beside the line and the space around it
    wrapped = [textwrap.fill(label, max(1, int(room / (0.6 * size)))) for label in labels]
    return wrapped, max(sum(label.count("\n") + 1 for label in column) for column in np.array_split(wrapped, columns))


# ---------------------------------------------------------------- the normalizer's learned scalars

# A scalar of the heads is called attn_NAME in metrics.jsonl and checkpoints, and NAME, or one of these symbols, in
# pictures.
SYMBOLS = {"attn_scale": "s", "attn_bias": "b"}


def symbol(key):
    return SYMBOLS.get(key, key.removeprefix("attn_"))


def in_order(symbols):
    """s and b first, p_n last."""
    first = (*SYMBOLS.values(), "sink")
    return sorted(symbols, key=lambda name: (name == "p", first.index(name) if name in first else len(first), name))


def fit_log(p):
    """(a1, a2, R^2) of the least-squares fit p_n = a1 ln n + a2 over n = 1..len(p), as in [SSMax] Figure 2. R^2 = 1 -
    (sum of squared residuals)/(sum of squared differences from the mean), NaN where p is constant; all NaN for a single
    value."""
    import numpy as np
    x, p = np.log(np.arange(1, len(p) + 1)), np.asarray(p, float)
    dx, dp = x - x.mean(), p - p.mean()
    if len(p) < 2:
        return math.nan, math.nan, math.nan
    a1 = dx @ dp / (dx @ dx)
    rest = dp - a1 * dx
    return float(a1), float(p.mean() - a1 * x.mean()), float(1 - rest @ rest / (dp @ dp)) if dp.any() else math.nan


def checkpoint_scalars(path):
    """(tokens, {symbol: [the heads' values in each layer, NaN without any]}) of the learned scalars in a checkpoint's
    model.safetensors."""
    import numpy as np
    tokens, found = run_folder.read_json(path.parent / "state.json").get("tokens"), {}
    config = run_folder.read_json(path.parent / "config.json")
    fixed, layers = config.get("attention_normalizer", {}).get("fixed"), config.get("num_hidden_layers", 0)
    if tokens is not None and not fixed:
        for name, x in run_folder.read_tensors(path, r"model\.layers\.\d+\.(self_attn|gau)\.attn_\w+").items():
            values = found.setdefault(symbol(name.rpartition(".")[2]), layers * [np.array([math.nan])])
            values[int(name.split(".")[2])] = x
    return tokens, found


def add_newest(series, newest, layers):
    """The points of the validations and, if it is newer, that of the newest checkpoint: after a switch it may be the
    only one. newest: its tokens; layers: the heads' values there, in each layer"""
    tokens, values = series
    if layers and (not tokens or newest > tokens[-1]) and (not values or len(values[0]) == len(layers)):
        return [*tokens, newest], [*values, [(float(x.mean()), float(x.min()), float(x.max())) for x in layers]]
    return series


def read_scalars(run):
    """{symbol: (tokens, values)} of the heads' scalars that the run has, and {"p": array} if it has p_n."""
    path, checkpoint = Path(run) / "metrics.jsonl", run_folder.newest_checkpoint(run)
    lines = run_folder.read_metrics(run)
    newest, layers = checkpoint_scalars(checkpoint) if checkpoint else (0, {})
    keys = {symbol(key): key for line in lines for key in line if key.startswith("attn_")}
    found = {name: add_newest(run_folder.triples(lines, keys.get(name), path), newest, layers.get(name))
             for name in keys.keys() | layers.keys()}
    if checkpoint:
        found |= {"p": p for p in run_folder.read_tensors(checkpoint, r"model\.attn_pn").values()}
    if not found:
        raise Refused(f"{path}: no attn_scale, and no learned scalars in the newest checkpoint. Either its normalizer "
                      "learns none, or the run has not yet had a validation (--val-every) or a checkpoint with them.")
    return found


def draw_p(axes, p):
    n, (a1, a2, r2) = range(1, len(p) + 1), fit_log(p)
    axes.plot(n, p, ".", markersize=2.5, color="tab:blue")
    axes.plot(n, [a1 * math.log(i) + a2 for i in n], color="tab:red", linewidth=1.4)
    above = axes.get_xlabel() or "n (visible keys)"     # of another p_n in the same axes
    quality = "constant" if math.isnan(r2) else f"R^2 = {r2:.4f}"
    axes.set(title="p_n in the newest checkpoint",
             xlabel=f"{above}\nline: a1 ln n + a2, a1 = {a1:.4g}, a2 = {a2:.4g}, {quality}")


# ---------------------------------------------------------------- output

def file_to_save(path):
    """A type of argparse: a file name whose ending matplotlib knows. Without an ending, save() writes a PNG."""
    from lib import canvas  # noqa: F401
    from matplotlib.backend_bases import FigureCanvasBase
    formats, ending = FigureCanvasBase.get_supported_filetypes(), Path(path).suffix[1:]
    if ending and ending.lower() not in formats:
        raise argparse.ArgumentTypeError(f"{path}: .{ending} is not a format of pictures. Expected one of "
                                         f".{', .'.join(sorted(formats))}")
    return path


def replace(path, content, named=False):
    """As files.replace()."""
    try:
        files.replace(path, content, named)
    except OSError as error:
        raise Refused(f"{path}: it could not be written ({error.strerror}), and what was there is unchanged.\n"
                      "  Make room for it, or pass another --out.") from None


def save(figure, path, named=False):
    """Writes a picture in the format that its name ends with; without an ending, a PNG. Returns the file's path. named:
    has the user named the file?"""
    path, file = Path(path), io.BytesIO()
    figure.savefig(file, format=path.suffix[1:] or "png", dpi=110)
    path = path if path.suffix else path.with_suffix(".png")
    replace(path, file.getvalue(), named)
    return path

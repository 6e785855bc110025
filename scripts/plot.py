"""Plots one or several training runs in one plot, or exports them to TensorBoard.

    .venv/bin/python scripts/plot.py out/a                           # out/a/loss.png
    .venv/bin/python scripts/plot.py out/a out/b --out both.png
    .venv/bin/python scripts/plot.py out/* --seeds --out mean.png    # mean and range over seeds
    .venv/bin/python scripts/plot.py out/a out/b --baseline out/a --out difference.png
    .venv/bin/python scripts/plot.py out/a out/b --after-parent --out after.png    # b began with --init-from, from a
    .venv/bin/python scripts/plot.py out/a --norms                   # out/a/norms.png: norms by layer (--norms-every)
    .venv/bin/python scripts/plot.py out/a --scalars                 # out/a/scalars.png: the learned s, b, sink and p_n
    .venv/bin/python scripts/plot.py out/a --heads                   # out/a/heads.png: those of every head
    .venv/bin/python scripts/plot.py out/* --tensorboard out/events  # then: tensorboard --logdir out/events

A run is a folder with the trainer's metrics.jsonl; a run in progress can be plotted at any time. A dashed line marks a
change of normalizer, with the validation losses before and after it, and a dotted one a resume, with the flags that
changed.
"""
import io
import json
import math
import os
import re
import statistics
import struct
import sys
import textwrap
from pathlib import Path

import command_line
import events
import files

TOKEN_UNITS = ((1, ""), (1e3, "thousand "), (1e6, "million "), (1e9, "billion "))
TIME_UNITS = ((1, "seconds"), (60, "minutes"), (3600, "hours"), (86400, "days"))
SCALARS = ("loss", "val_loss", "lr", "grad_norm", "tok_per_s", "mfu")
GRID_RUN = re.compile(r"(.+)-s(\d+)-[0-9a-f]{10}")  # grid.py's name of a run folder: normalizer, seed, key
GRID_EVAL = re.compile(r"-[0-9a-f]{10}$")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))


class Refused(Exception):
    """A run that cannot be plotted; the text says why and what to do."""


class NoStep(Refused):
    """A run that has not finished its first step."""


# ---------------------------------------------------------------- reading

def read_metrics(run):
    """The lines of run/metrics.jsonl as dicts. A last line without a newline is still being written and is skipped."""
    path = Path(run) / "metrics.jsonl"
    try:
        text = files.read(path, files.METRICS)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}. Expected a run folder, the trainer's --out.")
    whole = text[:text.rfind(b"\n") + 1]
    lines = [parse_line(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]
    if not lines:
        raise NoStep(f"{path}: no complete line yet. The trainer writes the first one after its first step.")
    return lines


NUMBERS = (int, float)


def is_number(value):
    """A number that is not too large to count with, or null, which stands for NaN in JSON."""
    return value is None or type(value) is float or type(value) is int and abs(value) < 1 << 63


def parse_line(path, number, line):
    """A complete line of metrics.jsonl as a dict."""
    try:
        found = json.loads(line)
        right = (all(type(found[key]) is int for key in ("step", "tokens"))
                 and all(is_number(found.get(key, 0)) for key in ("step", "tokens", "ms", *SCALARS)))
    except (ValueError, KeyError, TypeError, RecursionError):
        right = False
    if not right:
        raise Refused(f"{path}: line {number}: expected a JSON object with numbers, step and tokens among them, found "
                      f"{line[:60].decode(errors='replace')!r}. Remove the line, or resume the run, which rewrites the "
                      "file.")
    return found


def column(lines, key):
    """The key's value on each line as a float; NaN if the line has none or null."""
    values = (line.get(key) for line in lines)
    return [math.nan if value is None else float(value) for value in values]


def seconds(lines):
    """Time spent in steps up to and including each line, in seconds: the sum of ms."""
    total, out = 0.0, []
    for ms in column(lines, "ms"):
        total += 0.0 if math.isnan(ms) else ms / 1e3
        out.append(total)
    return out


def began(run, lines):
    """When the run would have begun if it had done nothing but these steps until the last change of metrics.jsonl."""
    return (Path(run) / "metrics.jsonl").stat().st_mtime - seconds(lines)[-1]


def folder_names(runs):
    """The folders' names if they are distinct, otherwise their paths below the folder that has all of them. A link has
    its own name, as in eval_gpt2."""
    paths = [Path(os.path.abspath(run)) for run in runs]
    short = [path.name for path in paths]
    if len(set(short)) == len(short):
        return short
    above = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(above)) for path in paths]


def names(runs):
    """What pictures and pages call the runs: their folders' names. Where grid.py has chosen those, what a person would
    say: the normalizer, the seed and, if these do not tell them apart, the flags that do."""
    found = [files.printable(name) for name in folder_names(runs)]
    by_normalizer = {}
    for i, run in enumerate(runs):
        match, described = GRID_RUN.fullmatch(Path(os.path.abspath(run)).name), read_run(run)
        if match:
            attn = normalizers(described) if described["lineage"] else match[1]
            by_normalizer.setdefault(attn, []).append((i, match[2], described["arguments"]))
    for attn, members in by_normalizer.items():
        flags = telling_flags([arguments for *_, arguments in members])
        called = [", ".join([attn, f"seed {seed}", *more]) for (_, seed, _), more in zip(members, flags)]
        for (i, _, _), name in zip(members, called):
            found[i] = name if called.count(name) == 1 else f"{name} ({found[i]})"
    return found


def telling_flags(arguments):
    """For each run's flags, those as text that tell runs with one normalizer and seed apart; nothing if the seed
    does."""
    if len({flags.get("seed") for flags in arguments}) == len(arguments):
        return [[] for _ in arguments]
    from pictures import results, runs
    keys = results.differing(arguments, runs.OWN | {"attn", "attn-switch"})

    def text(key, value):
        parent = GRID_RUN.fullmatch(Path(value).parent.parent.name) if key == "init-from" and value else None
        return f"from {parent[1]}" if parent else results.flag_text(key, value)
    return [[text(key, flags.get(key)) for key in keys if key != "init-from" or flags.get(key)] for flags in arguments]


def triples(lines, key, path):
    """(tokens, values) of a scalar that the trainer writes beside val_loss: values[i][layer] is (mean, least, largest)
    over heads."""
    tokens, values = [], []
    for line in lines:
        if key not in line:
            continue
        row = line[key]
        if not (isinstance(row, list) and row and all(isinstance(layer, list) and len(layer) == 3 for layer in row)
                and (not values or len(row) == len(values[0]))):
            raise Refused(f"{path}: step {line['step']}: expected {key} as [mean, minimum, maximum] for each layer, "
                          f"found {str(row)[:60]}.")
        tokens.append(line["tokens"])
        values.append([[math.nan if x is None else float(x) for x in layer] for layer in row])
    return tokens, values


def newest_checkpoint(run):
    """The model.safetensors of the run's newest checkpoint, or None. A folder named step-* is complete."""
    whole = [path for path in Path(run).glob("ckpt/step-*/model.safetensors") if path.parent.name[5:].isdecimal()]
    return max(whole, key=lambda path: int(path.parent.name[5:]), default=None)


def read_tensors(path, pattern):
    """{name: values} of the float32 or bf16 tensors of a safetensors file whose names match, as flat float64 arrays, in
    order of the numbers in their names. The file is an 8-byte little-endian length, a JSON header of that length, and
    the data. The header's offsets are relative to the data."""
    import numpy as np
    found = {}
    try:
        with files.open_regular(path) as file:
            size, = struct.unpack("<Q", file.read(8))
            if size > files.TEXT:
                raise ValueError(f"a header of {size:,} bytes")
            header = json.loads(file.read(size))
            matching = [name for name in header if re.fullmatch(pattern, name)]
            for name in sorted(matching, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)]):
                begin, end = header[name]["data_offsets"]
                if not 0 <= end - begin <= files.TEXT:
                    raise ValueError(f"{name} has {end - begin:,} bytes")
                file.seek(8 + size + begin)
                data = file.read(end - begin)
                kind = {"F32": "<f4", "BF16": "<u2"}[header[name]["dtype"]]
                if len(data) != end - begin:
                    raise ValueError(f"it ends before {name} does")
                values = np.frombuffer(data, kind)
                found[name] = ((values.astype("<u4") << 16).view("<f4") if kind == "<u2" else values).astype(float)
    except (ValueError, KeyError, TypeError, OverflowError, MemoryError, struct.error) as error:
        raise Refused(f"{path}: expected a safetensors file with {pattern} in float32 or bf16 "
                      f"({type(error).__name__}: {error}).")
    return found


def read_json(path):
    """The JSON object in a file, or {} if there is none."""
    try:
        value = json.loads(files.read(path, files.JSON))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{path}: expected a JSON object ({error}).")
    return value if isinstance(value, dict) else {}


def read_run(run):
    """The object in run.json, or {}. What this module and the pages use of it has the right kinds."""
    path = Path(run) / "run.json"
    found = read_json(path)

    def check(table, key, kinds, where=""):
        value = table.get(key)
        if value is not None and (type(value) not in kinds or not is_number(value) and kinds == NUMBERS):
            raise Refused(f"{path}: {where}{key}: expected {kinds[0].__name__}, found {str(value)[:40]!r}. Resume the "
                          "run, which rewrites the file, or leave this run out.")
        return value if value is not None else kinds[0]()
    for key, kind in ("arguments", dict), ("data", dict), ("lineage", list), ("history", list):
        found[key] = check(found, key, (kind,))
    for key in "steps", "grad-clip", "seed":
        check(found["arguments"], key, NUMBERS, "arguments: ")
    for which in "train", "val":
        for key in "tokens", "files":
            check(check(found["data"], which, (dict,), "data: "), key, NUMBERS, f"data: {which}: ")
    for key in "lineage", "history":
        for entry in found[key]:
            step = entry.setdefault("step", 0) if isinstance(entry, dict) else None
            if type(step) is not int or not 0 <= step < 1 << 53:
                raise Refused(f"{path}: {key}: expected objects with a whole number as step, found "
                              f"{str(entry)[:40]!r}. Leave this run out.")
    return found


def changes(run):
    return read_run(run)["lineage"]


def normalizers(described, step=math.inf):
    """The normalizer of a run up to a step, "softmax, then ssmax at step 500", by its run.json."""
    text = str(described["arguments"].get("attn", "?"))
    for entry in described.get("lineage", []):
        if entry["step"] > step or "attn" not in entry:
            continue
        if entry.get("event") in ("attn-switch", "attn-at-start"):
            where = f"step {entry['step']:,}" if entry["event"] == "attn-switch" else "the start"
            start = text if ", then " in text else entry.get("from", text)
            text = f"{start}, then {entry['attn']} at {where}"
        else:
            text = str(entry["attn"])
    return text


def change_text(entry):
    """A change of normalizer, with the validation losses before and after it if they were measured."""
    text = f"{entry.get('from')} → {entry.get('attn')}"
    try:
        return text + f" ({float(entry['val_loss_before']):.3f} → {float(entry['val_loss_after']):.3f})"
    except (KeyError, TypeError, ValueError):
        return text


def change_at_start(run):
    """A change of normalizer at the start from a checkpoint, for the legend; or ""."""
    entry = next((entry for entry in changes(run) if entry.get("event") == "attn-at-start"), None)
    return f", at the start {change_text(entry)}" if entry else ""


SWITCH, RESUME = (0, (4, 3)), (0, (1, 2.5))     # line styles of marks
MOST_RESUMES = 5        # that changed nothing and are labeled


def read_marks(run, lines):
    """[(tokens, seconds, text, line style)] in the order of steps: where the normalizer changed mid-run, and where the
    run resumed, with the flags that changed and say something about the losses, according to run.json."""
    from pictures import runs
    described, times, found = read_run(run), seconds(lines), []
    resumes = [entry for entry in described["history"] if entry.get("event") == "resume"]
    for entry in described["lineage"]:
        if entry.get("event") == "attn-switch":
            found.append((entry["step"], change_text(entry), SWITCH))
    for entry in resumes:
        changed = entry.get("changed")
        texts = [f"{flag} {plain(pair.get('from'))} → {plain(pair.get('to'))}"
                 for flag, pair in (changed.items() if isinstance(changed, dict) else ())
                 if isinstance(pair, dict) and flag not in runs.OWN | {"attn-switch", "val-every"}]
        text = "resumed" + (": " + ", ".join(texts) if texts else "")
        found.append((entry["step"], text if texts or len(resumes) <= MOST_RESUMES else "", RESUME))
    marks = []
    for step, text, style in sorted(found, key=lambda mark: mark[0]):
        done = [i for i, line in enumerate(lines) if line["step"] <= step]
        if step <= lines[-1]["step"]:
            at = (lines[done[-1]]["tokens"], times[done[-1]]) if done else (0, 0.0)
            marks.append((*at, text, style))
    return marks


def plain(value):
    """A flag's value in a mark."""
    if isinstance(value, list):
        return ",".join(map(plain, value))
    return f"{value:g}" if isinstance(value, (bool, float)) else "–" if value is None else str(value)


# ---------------------------------------------------------------- runs after their parents

def parent_of(run, runs):
    """(the run folder, step) that a run's --init-from names, or None if it did not begin with another run's checkpoint.
    The folder may have moved together with the run, or be one of `runs`."""
    entry = next((entry for entry in changes(run) if entry.get("event") == "init-from"), {})
    path = Path(str(entry.get("from", "")))
    if path.parent.name != "ckpt" or not re.fullmatch("step-[0-9]+", path.name):
        return None
    parent = path.parent.parent
    for folder in (parent, Path(run).absolute().parent / parent.name, *map(Path, runs)):
        if folder.absolute().name == parent.name and (folder / "metrics.jsonl").exists():
            return folder, int(path.name[5:])
    raise Refused(f"{run}: --after-parent: its parent {parent} is not there. Correct the current folder, or name the "
                  "parent's folder, too.")


def after_parent(run, runs, children=()):
    """The lines of a run's metrics whose tokens and time continue those of its parent, and so on."""
    lines, parent = read_metrics(run), parent_of(run, runs)
    if not parent or os.path.abspath(parent[0]) in children:
        return lines
    before = [line for line in after_parent(parent[0], runs, (*children, os.path.abspath(run)))
              if line["step"] <= parent[1]]
    if not before:
        return lines
    tokens, first = before[-1]["tokens"], {"ms": (lines[0].get("ms") or 0) + 1e3 * seconds(before)[-1]}
    return [line | {"tokens": line["tokens"] + tokens} | (first if line is lines[0] else {}) for line in lines]


# ---------------------------------------------------------------- the picture

def smooth(values):
    """The mean over a centered window of a fiftieth of the run, truncated at its ends, without NaNs."""
    half = len(values) // 100
    total, count = [0.0], [0]
    for value in values:
        total.append(total[-1] + (value if math.isfinite(value) else 0.0))
        count.append(count[-1] + math.isfinite(value))
    out = []
    for i in range(len(values)):
        a, b = max(0, i - half), min(len(values), i + half + 1)
        out.append((total[b] - total[a]) / (count[b] - count[a]) if count[b] > count[a] else math.nan)
    return out


def unit(largest, units):
    """The largest of the units, (size, name) in ascending order, that `largest` reaches, or else the first."""
    return [u for u in units if u[0] <= largest or u is units[0]][-1]


def last_validation(lines, digits):
    """The last finite validation loss as text, with its step if the run has gone on since; "" if there is none."""
    found = [(line["step"], value) for line, value in zip(lines, column(lines, "val_loss")) if math.isfinite(value)]
    if not found:
        return ""
    step, value = found[-1]
    return f"{value:.{digits}f}" + (f" (step {step:,})" if step < lines[-1]["step"] else "")


def title(name, lines, run):
    """The run's name with its latest losses."""
    loss = [value for value in smooth(column(lines, "loss")) if math.isfinite(value)]
    val = last_validation(lines, 3)
    losses = (f": mean loss {loss[-1]:.3f}" if loss else "") + (f", validation {val}" if val else "")
    lost = [line["step"] for line, value in zip(lines, column(lines, "loss")) if not math.isfinite(value)]
    losses += f", x: not finite from step {lost[0]:,} on" if lost else ""
    steps = read_run(run)["arguments"].get("steps") or 0
    losses += f", step {lines[-1]['step']:,} of {steps:,}" if steps > lines[-1]["step"] else ""
    return name + losses + change_at_start(run)


def draw_smooth(axes, x, y, color, dash="-"):
    """Draws the values faintly and their running mean on top; if there are only a few, also as points."""
    axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8, marker="." if len(x) < 10 else None)
    axes.plot(x, smooth(y), color=color, linestyle=dash, linewidth=1.4)


def draw_loss(axes, x, lines, color, dash):
    """The training loss, an x at the top where it is not finite, and the validation losses as points on a thicker,
    darker line."""
    draw_smooth(axes, x, column(lines, "loss"), color, dash)
    lost = [a for a, b in zip(x, column(lines, "loss")) if not math.isfinite(b)]
    if lost:
        axes.plot(lost, [0.96] * len(lost), "x", color=color, transform=axes.get_xaxis_transform())
    points = [(a, b) for a, b in zip(x, column(lines, "val_loss")) if math.isfinite(b)]
    if points:
        axes.plot(*zip(*points), color=[0.75 * c for c in color], linestyle=dash, linewidth=2, alpha=0.8, marker="o",
                  markersize=5, markeredgecolor="white", markeredgewidth=0.8)


def rim():
    """The path effects of a label that stands on curves: a narrow rim instead of a box, which would hide them."""
    from matplotlib import patheffects
    return [patheffects.withStroke(linewidth=2, foreground="white")]


def draw_marks(axes, marks, size, color, labels=True, place=0):
    """A line for each of read_marks(), against tokens (place 0) or seconds (1) in units of `size`, labeled or not.
    Labels stand at the top, where losses rarely are, each on the side of its line with more room to its neighbors, and
    those of several runs beside each other."""
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


def loss_limits(loaded):
    """From just below the lowest loss to just above the largest after the first twentieth of each run, so that the
    fall from ln(vocabulary) in the first steps does not flatten the rest."""
    late, begun = [], []
    for lines in loaded:
        loss, skip = column(lines, "loss"), len(lines) // 20
        late += [*loss[skip:], *smooth(loss)[skip:], *column(lines, "val_loss")[skip:]]
        begun += [value for value in loss[:1] if math.isfinite(value)]
    late = [value for value in late if math.isfinite(value)] or [0.0]
    high = high_end(late, begun)
    margin = 0.04 * (high - min(late)) or 0.5
    return min(late) - margin, high + margin


def say_what_is_cut_off(axes):
    """Adds a note below the top edge if some of what is drawn lies above or below the axis."""
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    points = [(float(x), float(y)) for line in axes.lines if line.get_transform() == axes.transData
              for x, y in zip(line.get_xdata(), line.get_ydata()) if math.isfinite(y)]
    cut = [(x, y) for x, y in points if not low <= y <= high]
    if not cut:
        return
    least, largest = min(y for _, y in cut), max(y for _, y in cut)
    early = least > high and max(x for x, _ in cut) < left + 0.1 * (right - left)
    parts = ([f"reach {largest:.2f}"] if largest > high else []) + ([f"fall to {least:.2f}"] if least < low else [])
    axes.text(0.5, 0.985, f"axis truncated: {'the first steps' if early else 'values'} {' and '.join(parts)}",
              transform=axes.transAxes, ha="center", va="top", fontsize=9, style="italic", color="0.35")


def pyplot():
    """matplotlib.pyplot without a display, in this file's style."""
    import canvas  # noqa: F401
    import matplotlib.pyplot as plt
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
                         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
                         "text.parse_math": False})     # folders' names may contain $
    return plt


def run_colors(count):
    from matplotlib import colormaps
    palette = colormaps["tab10" if count <= 10 else "tab20"].colors
    return [palette[i % len(palette)] for i in range(count)]


def dashes_of(colors):
    """A line style for each color. Neighbors and equal colors get different ones."""
    return [DASHES[(i + colors[:i].count(color)) % len(DASHES)] for i, color in enumerate(colors)]


def legend(owner, handles, labels, **how):
    """The legend of axes or a figure. matplotlib leaves out labels that begin with _, unless they get that later."""
    made = owner.legend(handles, [f" {label}" for label in labels], **how)
    for text, label in zip(made.get_texts(), labels):
        text.set_text(label)
    return made


def curves(runs, colors=None, dashes=None, loaded=None):
    """[(title, draw(axes))]: the loss against tokens and against time, the learning rate and the gradient norm against
    tokens. loaded: the runs' metrics."""
    from matplotlib import ticker
    loaded = loaded or [read_metrics(run) for run in runs]
    token_size, token_name = unit(max(lines[-1]["tokens"] for lines in loaded), TOKEN_UNITS)
    time_size, time_name = unit(max(seconds(lines)[-1] for lines in loaded), TIME_UNITS)
    colors = colors or run_colors(len(runs))
    each = list(zip(runs, loaded, colors, dashes or dashes_of(colors)))

    def tokens_of(lines):
        return [value / token_size for value in column(lines, "tokens")]

    def against(axes, size, name, place, labels):
        for run, lines, color, _ in each:
            mark = "0.3" if len(runs) == 1 else [0.7 * c for c in color]
            draw_marks(axes, read_marks(run, lines), size, mark, labels, place)
        axes.set_xlabel(name)
        axes.set_xlim(left=0)       # also of a run whose parent is not drawn

    def draw_losses(axes):
        axes.set(ylabel="nats per token", ylim=loss_limits(loaded))
        say_what_is_cut_off(axes)

    def by_tokens(axes):
        for _, lines, color, dash in each:
            draw_loss(axes, tokens_of(lines), lines, color, dash)
        against(axes, token_size, f"{token_name}tokens", 0, True)
        draw_losses(axes)

    def by_time(axes):
        for _, lines, color, dash in each:
            draw_loss(axes, [value / time_size for value in seconds(lines)], lines, color, dash)
        against(axes, time_size, time_name, 1, True)
        draw_losses(axes)

    def rate(axes):
        for _, lines, color, dash in each:
            axes.plot(tokens_of(lines), column(lines, "lr"), color=color, linestyle=dash, linewidth=1.4,
                      marker="." if len(lines) < 10 else None)
        against(axes, token_size, f"{token_name}tokens", 0, False)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axes.set_ylim(bottom=0)

    def norm(axes):
        for _, lines, color, dash in each:
            draw_smooth(axes, tokens_of(lines), column(lines, "grad_norm"), color, dash)
        against(axes, token_size, f"{token_name}tokens", 0, False)
        if any(value > 0 for _, lines, *_ in each for value in column(lines, "grad_norm")):
            axes.set_yscale("log")
        axes.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 3, 5)))
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    return [("Loss, running mean, against tokens (points: validation)", by_tokens),
            ("Loss, running mean, against time spent in steps (points: validation)", by_time),
            ("Learning rate", rate), ("Gradient norm, before clipping", norm)]


def fit_legend(labels, columns, width, size):
    """The labels, wrapped so that `columns` of them fit side by side into `width` inches at a font's `size` in points,
    and how many lines the tallest column has."""
    import numpy as np
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path
    room = 72 * width / columns - 5 * size      # beside the line and the space around it

    def wrap(label):
        needed, _, _ = text_to_path.get_text_width_height_descent(label, FontProperties(size=size), ismath=False)
        return textwrap.fill(label, max(1, int(len(label) * room / needed))) if needed > room else label

    wrapped = [wrap(label) for label in labels]
    return wrapped, max(sum(label.count("\n") + 1 for label in column) for column in np.array_split(wrapped, columns))


def picture(runs, loaded=None):
    """A figure of the four panels of curves(), which grows with its legend."""
    plt = pyplot()
    from matplotlib.lines import Line2D
    loaded = loaded or [read_metrics(run) for run in runs]
    colors = run_colors(len(runs))
    figure, grid = plt.subplots(2, 2, figsize=(12, 8), height_ratios=(3, 2), layout="constrained")
    for axes, (name, draw) in zip(grid.flat, curves(runs, colors, loaded=loaded)):
        draw(axes)
        axes.set_title(name)
    handles = [Line2D([], [], color=color, linestyle=dash, linewidth=1.4)
               for color, dash in zip(colors, dashes_of(colors))]
    labels = [title(*each) for each in zip(names(runs), loaded, runs)]
    columns, size = (1, 11) if len(runs) < 4 else (2, 10)
    labels, lines = fit_legend(labels, columns, 12, size)
    figure.set_figheight(8 + 0.25 * max(0, lines - 4))
    legend(figure, handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=size)
    return figure


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


def fit_text(a1, a2, r2):
    return f"a1 = {a1:.4g}, a2 = {a2:.4g}, " + ("constant" if math.isnan(r2) else f"R^2 = {r2:.4f}")


def checkpoint_scalars(path):
    """(tokens, {symbol: [the heads' values in each layer, NaN without any]}) of the learned scalars in a checkpoint's
    model.safetensors."""
    import numpy as np
    tokens, found = read_json(path.parent / "state.json").get("tokens"), {}
    config = read_json(path.parent / "config.json")
    fixed, layers = config.get("attention_normalizer", {}).get("fixed"), config.get("num_hidden_layers", 0)
    if tokens is not None and not fixed:
        for name, x in read_tensors(path, r"model\.layers\.\d+\.(self_attn|gau)\.attn_\w+").items():
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
    path, checkpoint = Path(run) / "metrics.jsonl", newest_checkpoint(run)
    lines = read_metrics(run)
    newest, layers = checkpoint_scalars(checkpoint) if checkpoint else (0, {})
    keys = {symbol(key): key for line in lines for key in line if key.startswith("attn_")}
    found = {name: add_newest(triples(lines, keys.get(name), path), newest, layers.get(name))
             for name in keys.keys() | layers.keys()}
    if checkpoint:
        found |= {"p": p for p in read_tensors(checkpoint, r"model\.attn_pn").values()}
    if not found:
        raise Refused(f"{path}: no attn_scale, and no learned scalars in the newest checkpoint. Either its normalizer "
                      "learns none, or the run has not yet had a validation (--val-every) or a checkpoint with them.")
    return found


def draw_layers(axes, tokens, values, unit_size, color_of):
    """Draws each layer's mean over its heads as a line, and the range of its heads as a band."""
    x = [value / unit_size for value in tokens]
    for layer in range(len(values[0])):
        mean, least, largest = zip(*(step[layer] for step in values))
        color = color_of(layer)
        axes.plot(x, mean, color=color, linewidth=1.4, marker="." if len(x) < 10 else None)
        axes.fill_between(x, least, largest, color=color, alpha=0.12, linewidth=0)


def draw_p(axes, p, fit):
    n = range(1, len(p) + 1)
    axes.plot(n, p, ".", markersize=2.5, color="tab:blue")
    a1, a2, _ = fit
    axes.plot(n, [a1 * math.log(i) + a2 for i in n], color="tab:red", linewidth=1.4)
    above = axes.get_xlabel() or "n (visible keys)"     # of another p_n in the same axes
    axes.set(title="p_n in the newest checkpoint", xlabel=f"{above}\nline: a1 ln n + a2, {fit_text(*fit)}")


def scalars_picture(runs):
    """A figure with a column for each run: the scalars of the heads by layer against tokens, p_n against n with its
    fit, which is printed too."""
    loaded = [read_scalars(run) for run in runs]
    rows = in_order({name for found in loaded for name in found})
    series = [found[name] for found in loaded for name in found if name != "p"]
    token_size, token_name = unit(max((tokens[-1] for tokens, _ in series), default=1), TOKEN_UNITS)
    plt = pyplot()
    from matplotlib import ticker
    color = plt.cm.ScalarMappable(plt.Normalize(0, max([1, *(len(values[0]) - 1 for _, values in series)])), "viridis")
    figure, grid = plt.subplots(len(rows), len(runs), figsize=(1 + 6 * len(runs), 0.6 + 3.2 * len(rows)), squeeze=False,
                                layout="constrained")
    for found, run, name, panels in zip(loaded, runs, names(runs), grid.T):
        for scalar, axes in zip(rows, panels):
            if scalar not in found:
                axes.set_axis_off()
            elif scalar == "p":
                fit = fit_log(found["p"])
                print(f"{run}: p_n = a1 ln n + a2: {fit_text(*fit)}")
                draw_p(axes, found["p"], fit)
            else:
                draw_layers(axes, *found[scalar], token_size, color.to_rgba)
                draw_marks(axes, read_marks(run, read_metrics(run)), token_size, "0.3")
                axes.set(title=f"{scalar} by layer: mean over heads, band from minimum to maximum",
                         xlabel=f"{token_name}tokens")
                axes.set_xlim(left=0)
        panels[0].annotate(name, (0, 1), (0, 26), xycoords="axes fraction", textcoords="offset points", fontsize=12,
                           weight="bold")
    if series:      # layers count from 0, as in the checkpoints' names
        figure.colorbar(color, ax=list(grid[[name != "p" for name in rows]].flat), label="layer", aspect=40,
                        ticks=ticker.MaxNLocator(integer=True))
    return figure


# ---------------------------------------------------------------- output

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


# ---------------------------------------------------------------- TensorBoard

def write_events(run, folder):
    """Writes one event file with the run's SCALARS into the folder, replacing an earlier one."""
    files.refuse_link(folder)
    lines = read_metrics(run)
    partial, path = folder / "partial", folder / "events.out.tfevents.0.metrics"
    try:
        with events.EventFile(partial, began(run, lines)) as file:
            for line, time in zip(lines, seconds(lines)):
                file.write(line["step"], time, {key: line[key] for key in SCALARS if line.get(key) is not None})
        os.replace(partial, path)
    finally:
        if partial.is_file():
            partial.unlink()
    return path


# ---------------------------------------------------------------- main

def wrong_format(path):
    """What is wrong with the ending of a picture's name, or None. Without an ending matplotlib writes a PNG."""
    import canvas  # noqa: F401
    from matplotlib.backend_bases import FigureCanvasBase
    formats, ending = FigureCanvasBase.get_supported_filetypes(), Path(path).suffix[1:]
    if ending and ending.lower() not in formats:
        return f"--out {path}: .{ending} is not a format of pictures. Expected one of .{', .'.join(sorted(formats))}"
    return None


def is_no_run(path):
    """Is it a file, such as a picture, or the folder of an evaluation?"""
    return path.is_file() or (path / "eval.json").exists() and not (path / "metrics.jsonl").exists()


def chosen(options):
    """The figure that the flags ask for, and its file's default name."""
    from pictures import runs
    if options.heads:
        return runs.heads(options.runs[0]), "heads.png"
    if options.norms:
        return runs.norms(options.runs[0]), "norms.png"
    if options.seeds or options.baseline:
        return runs.comparison(options.runs, options.seeds, options.baseline), "comparison.png"
    if options.scalars:
        return scalars_picture(options.runs), "scalars.png"
    loaded = [after_parent(run, options.runs) for run in options.runs] if options.after_parent else None
    return picture(options.runs, loaded), "loss.png"


def main():
    files.print_escapes()
    parser = command_line.parser(__doc__, "doc/reports.md")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--out", metavar="FILE",
                        help="the picture, such as x.png or x.pdf (default: loss.png, norms.png and so on in the run "
                             "folder)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--scalars", action="store_true", help="plot the normalizer's learned s, b, sink and p_n")
    what.add_argument("--heads", action="store_true", help="plot the learned s, b and sink of every head of one run")
    what.add_argument("--norms", action="store_true",
                      help="plot the norms of one run's gradients and weights by layer; the trainer's --norms-every "
                           "writes them")
    what.add_argument("--after-parent", action="store_true",
                      help="draw each run that began with --init-from after the run that its checkpoint is from: "
                           "tokens and time go on from there")
    what.add_argument("--seeds", action="store_true",
                      help="draw runs that differ only in their seeds as one curve: the mean, and a band for the range")
    parser.add_argument("--baseline", metavar="RUN",
                        help="one of the runs; also plot how the others' losses differ from its own. With --seeds, "
                             "runs with the same seed are compared")
    what.add_argument("--tensorboard", metavar="DIR", type=Path,
                      help="write an event file for each run to DIR/NAME instead")
    options = parser.parse_args()
    if len(options.runs) > 1:       # out/*: there may be pictures and evaluations among the runs
        options.runs = [run for run in options.runs if not is_no_run(Path(run))] or options.runs
    if len(options.runs) > 1 and not (options.out or options.tensorboard):
        parser.error("to plot several runs in one picture, pass --out FILE")
    if options.baseline and (options.scalars or options.heads or options.norms or options.after_parent
                             or options.tensorboard):
        parser.error("--baseline compares losses: omit --scalars, --heads, --norms, --after-parent and --tensorboard")
    if (options.heads or options.norms) and len(options.runs) > 1:
        parser.error(f"--{'heads' if options.heads else 'norms'} plots one run")
    wrong = options.out and wrong_format(options.out)
    if wrong:
        parser.error(wrong)
    try:
        if options.tensorboard:
            for run, name in zip(options.runs, folder_names(options.runs)):
                print(write_events(run, options.tensorboard / name))
        else:
            figure, name = chosen(options)
            out = options.out or str(Path(options.runs[0]) / name)
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            print(save(figure, out, bool(options.out)))
    except (Refused, OSError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    import plot     # under this name, as the modules of pictures/ know it
    sys.exit(plot.main())

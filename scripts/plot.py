"""Draws one or many training runs in one picture, or writes them for TensorBoard.

    python scripts/plot.py out/a                                out/a/loss.png
    python scripts/plot.py out/a out/b --out both.png
    python scripts/plot.py out/* --tensorboard /tmp/events      then: tensorboard --logdir /tmp/events

A run is a folder with the trainer's metrics.jsonl; a run that is still going can be drawn at any time.
"""
import argparse
import json
import math
import os
import struct
import sys
from pathlib import Path

TOKEN_UNITS = ((1, ""), (1e3, "thousand "), (1e6, "million "), (1e9, "billion "))
TIME_UNITS = ((1, "seconds"), (60, "minutes"), (3600, "hours"), (86400, "days"))
SCALARS = ("loss", "val_loss", "lr", "grad_norm", "tok_per_s", "mfu")


class Refused(Exception):
    """A run that cannot be drawn; the text says why and what to do."""


# ---------------------------------------------------------------- reading

def read_metrics(run):
    """The lines of run/metrics.jsonl as dicts. A last line without its newline is still being written and is left out."""
    path = Path(run) / "metrics.jsonl"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}. A run is the folder that was given to the trainer as --out.")
    whole = text[:text.rfind(b"\n") + 1]
    lines = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            lines.append(json.loads(line))
            lines[-1]["step"], lines[-1]["tokens"]
        except (ValueError, KeyError, TypeError):
            raise Refused(f"{path}: line {number}: expected a JSON object with step and tokens, found {line[:60]!r}. "
                          "Remove the line, or resume the run, which writes the file anew.")
    if not lines:
        raise Refused(f"{path}: no whole line yet. The trainer writes the first one after its first step.")
    return lines


def column(lines, key):
    """The key's value on each line as a float; NaN where the line has none (or null, which is how JSON says NaN)."""
    values = (line.get(key) for line in lines)
    return [math.nan if value is None else float(value) for value in values]


def seconds(lines):
    """Time spent in steps up to and including each line, in seconds: the sum of ms."""
    total, out = 0.0, []
    for ms in column(lines, "ms"):
        total += 0.0 if math.isnan(ms) else ms / 1e3
        out.append(total)
    return out


def names(runs):
    """The folders' own names where these tell the runs apart, otherwise the whole paths."""
    short = [Path(run).resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]


# ---------------------------------------------------------------- the picture

def smooth(values):
    """The mean over a centred window of a fiftieth of the run, cut off at its ends. NaN is left out."""
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
    """The largest of the units, (size, name) in rising order, that `largest` reaches; the first where it reaches none."""
    return [u for u in units if u[0] <= largest or u is units[0]][-1]


def title(name, lines):
    """The run's name with its latest losses."""
    loss = [value for value in smooth(column(lines, "loss")) if math.isfinite(value)]
    val = [value for value in column(lines, "val_loss") if math.isfinite(value)]
    return name + (f": loss {loss[-1]:.3f}" if loss else "") + (f", validation {val[-1]:.3f}" if val else "")


def draw_smooth(axes, x, y, color, label=None):
    """The values faint, and their running mean over them; a few values alone as points."""
    axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8, marker="." if len(x) < 10 else None)
    axes.plot(x, smooth(y), color=color, linewidth=1.4, label=label)


def draw_loss(axes, x, lines, color, label):
    """The training loss, and the validation losses as points on a thicker, darker line."""
    draw_smooth(axes, x, column(lines, "loss"), color, label)
    points = [(a, b) for a, b in zip(x, column(lines, "val_loss")) if math.isfinite(b)]
    if points:
        axes.plot(*zip(*points), color=[0.75 * c for c in color], linewidth=2, alpha=0.8, marker="o", markersize=5,
                  markeredgecolor="white", markeredgewidth=0.8)


def loss_limits(loaded):
    """From just under the lowest loss to just over what is left when a twentieth of each run is past, so that the fall from
    ln(vocabulary) in the first steps does not flatten the rest."""
    late = []
    for lines in loaded:
        loss, skip = column(lines, "loss"), len(lines) // 20
        late += [*loss[skip:], *smooth(loss)[skip:], *column(lines, "val_loss")[skip:]]
    late = [value for value in late if math.isfinite(value)] or [0.0]
    margin = 0.04 * (max(late) - min(late)) or 0.5
    return min(late) - margin, max(late) + margin


def picture(runs):
    """A figure of four panels: the loss against tokens and against time, the learning rate and the gradient norm against tokens."""
    loaded = [read_metrics(run) for run in runs]
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
                         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
    figure, ((by_tokens, by_time), (lr, norm)) = plt.subplots(2, 2, figsize=(12, 8), height_ratios=(3, 2), layout="constrained")
    token_size, token_name = unit(max(lines[-1]["tokens"] for lines in loaded), TOKEN_UNITS)
    time_size, time_name = unit(max(seconds(lines)[-1] for lines in loaded), TIME_UNITS)
    colors = plt.get_cmap("tab10" if len(runs) <= 10 else "tab20").colors
    for i, (lines, name) in enumerate(zip(loaded, names(runs))):
        color = colors[i % len(colors)]
        tokens = [value / token_size for value in column(lines, "tokens")]
        draw_loss(by_tokens, tokens, lines, color, title(name, lines))
        draw_loss(by_time, [value / time_size for value in seconds(lines)], lines, color, None)
        lr.plot(tokens, column(lines, "lr"), color=color, linewidth=1.4, marker="." if len(lines) < 10 else None)
        draw_smooth(norm, tokens, column(lines, "grad_norm"), color)
    norm.set_yscale("log")
    norm.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 3, 5)))
    norm.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    norm.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    lr.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    lr.set_ylim(bottom=0)
    by_tokens.set(title="Loss against tokens (points: validation)", ylabel="nats a token", ylim=loss_limits(loaded))
    by_time.set(title="Loss against time in steps (points: validation)", ylabel="nats a token", ylim=loss_limits(loaded))
    lr.set_title("Learning rate")
    norm.set_title("Gradient norm, before clipping")
    for axes in (by_tokens, by_time, lr, norm):
        axes.set_xlabel(time_name if axes is by_time else f"{token_name}tokens")
        axes.set_xlim(left=0)
    figure.legend(loc="outside upper center", ncols=1 if len(runs) < 4 else 2, frameon=False, fontsize=11)
    return figure


# ---------------------------------------------------------------- TensorBoard
# An event file is a sequence of records: uint64 length, masked CRC-32C of the length, the bytes, masked CRC-32C of the bytes
# (little-endian). The bytes are protobuf messages: Event {wall_time 1: double, step 2: int64, file_version 3: string,
# summary 5}, Summary {value 1, repeated}, Value {tag 1: string, simple_value 2: float}.

def crc32c_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC32C = crc32c_table()


def masked_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data):
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def field(number, data):
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(wall_time, step, scalars):
    summary = b"".join(field(1, field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in scalars)
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + varint(step) + field(5, summary)


def write_events(run, folder):
    """Writes one event file with the run's SCALARS into the folder, in place of an earlier one. Times are counted back from
    when metrics.jsonl was last written."""
    lines = read_metrics(run)
    elapsed = seconds(lines)
    began = (Path(run) / "metrics.jsonl").stat().st_mtime - elapsed[-1]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "events.out.tfevents.0.metrics"
    partial = folder / "partial"
    with open(partial, "wb") as file:
        file.write(record(b"\x09" + struct.pack("<d", began) + field(3, b"brain.Event:2")))
        for line, time in zip(lines, elapsed):
            scalars = [(key, float(line[key])) for key in SCALARS if line.get(key) is not None]
            file.write(record(event(began + time, line["step"], scalars)))
    os.replace(partial, path)
    return path


# ---------------------------------------------------------------- main

def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--out", metavar="FILE", help="the picture: .png, .svg or .pdf (default: loss.png in the run's folder)")
    parser.add_argument("--tensorboard", metavar="DIR", type=Path, help="write event files to DIR/NAME of each run instead")
    options = parser.parse_args()
    if len(options.runs) > 1 and not (options.out or options.tensorboard):
        parser.error("several runs in one picture need --out FILE")
    try:
        if options.tensorboard:
            for run, name in zip(options.runs, names(options.runs)):
                print(write_events(run, options.tensorboard / name.strip("/")))
        else:
            out = options.out or str(Path(options.runs[0]) / "loss.png")
            picture(options.runs).savefig(out, dpi=110)
            print(out)
    except (Refused, OSError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""--task attention: where attention goes by layer and head, what the residual stream looks like, and the maps."""
import math
from pathlib import Path

import numpy as np

from lib import files
from lib.run_folder import Refused

from . import charts
from .charts import Panel, Picture
from .results import mean, number, numbers

HEAD_KEYS = ("sum", "unspent", "entropy", "first_token", "zeros", "log_z_slope", "log_z_intercept")
RESIDUAL_KEYS = ("residual_kurtosis", "residual_largest")
SAME = 1e-6         # sums this close to each other differ by rounding alone
FEW = 1e-4          # a share of zeros below this is weights that underflow


# ---------------------------------------------------------------- means over prompts

def prompts(series, end_of_text):
    """The rows of single prompts, with or without a leading end-of-text token."""
    return [row for row in series.rows if "prompt" in row and row["leading_end_of_text"] == end_of_text]


def of_heads(row, key):
    return numbers([[head[key] for head in layer["heads"]] for layer in row["layers"]])


def head_means(rows, key):
    """(layers, heads)"""
    return mean([of_heads(row, key) for row in rows])


def of_residual(rows, key):
    """(layers): the mean kurtosis of all prompts, or their largest |x|, as in eval_gpt2's table."""
    values = [[number(layer[key]) for layer in row["layers"]] for row in rows]
    return np.max(values, 0) if key == "residual_largest" else mean(values)


def bin_means(rows, key, missing=np.nan):
    """(layers, heads, bins): means over the prompts; one without a bin counts there as `missing`."""
    found = [of_heads(row, key) for row in rows]
    bins = max(x.shape[2] for x in found)
    return mean([np.pad(x, ((0, 0), (0, 0), (0, bins - x.shape[2])), constant_values=missing) for x in found])


def prompt_means(rows, key):
    """A head statistic of each prompt: the mean over layers and heads."""
    return [float(mean(of_heads(row, key), None)) for row in rows]


# ---------------------------------------------------------------- maps: map-N.npy as small images of 8 bits per cell

DECADES = 5         # weights are shown from the head's largest down to this many powers of ten below


def load_map(series, row):
    """(maps (layers, heads, side, side), positions per cell, T), not yet read into memory, or None if the row has none
    or the file is gone. A cell is the mean over the visible weights of cell x cell positions."""
    if "map" not in row:
        return None
    path, cell, T = series.folder / Path(str(row["map"])).name, row["map_cell"], row["tokens"]
    try:
        files.open_regular(path, files.ARRAY).close()
        maps = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: expected an array of NumPy ({error}). Run eval_gpt2 again.")
    side = -(-T // max(1, cell))
    if maps.shape != (len(row["layers"]), len(row["layers"][0]["heads"]), side, side):
        raise Refused(f"{path}: an array of {maps.shape} does not belong to this eval.json. Run eval_gpt2 again.")
    return maps, cell, T


def visible(cell, T):
    """(side, side): how many weights each cell averages."""
    edges = np.minimum(np.arange(-(-T // cell) + 1) * cell, T)
    # of the keys before position x, the queries up to y see all that are not after them
    y, x = edges[:, None], edges[None, :]
    seen = np.where(y >= x, x * (x + 1) / 2 + (y - x) * x, y * (y + 1) / 2)
    return np.diff(np.diff(seen, axis=0), axis=1)


def coarsen(values, cell, T, most):
    """The map of one head with at most `most` cells a side, and the positions per cell. Means stay means over the
    visible weights."""
    times = -(-len(values) // most)
    if times == 1:
        return np.asarray(values, float), cell
    counts = visible(cell, T)
    pad = -len(values) % times

    def blocks(x):
        x = np.pad(x, (0, pad))
        side = len(x) // times
        return x.reshape(side, times, side, times).sum((1, 3))
    total = blocks(np.asarray(values, float) * counts)
    return total / np.maximum(blocks(counts), 1), cell * times


def encode(values, signed):
    """(codes, largest |weight|): 0 is a key after the query, 1 (signed: 128) a weight of 0 or below the scale. The
    others are logarithmic: up to 255 over DECADES; signed ones count from 128 to both sides, 127 steps for as many
    decades. The nearest level is within 2.4% of the weight, or within 4.7% if signed. weight() in attention.js
    decodes them."""
    x = np.where(np.isfinite(values), values, 0.0)
    top = float(np.abs(x).max()) if x.size else 0.0
    if not top > 0 or not math.isfinite(top):
        codes, top = np.full(x.shape, 128 if signed else 1), 0.0
    else:
        steps = 127 if signed else 254
        with np.errstate(divide="ignore"):
            level = np.clip(np.rint(steps * (1 + np.log10(np.abs(x) / top) / DECADES)), 0, steps).astype(int)
        codes = 128 + np.where(x < 0, -level, level) if signed else 1 + level
    hidden = np.arange(x.shape[1])[None, :] > np.arange(x.shape[0])[:, None]
    return np.where(hidden, 0, codes).astype(np.uint8), top


def is_signed(maps):
    return any(bool((maps[layer] < 0).any()) for layer in range(len(maps)))


def palette(signed):
    """256 colors (r, g, b) of 0 to 255; the first, for hidden keys, does not matter."""
    from matplotlib import colormaps
    table = colormaps["RdBu_r" if signed else "viridis"](np.linspace(0, 1, 255))[:, :3]
    return np.concatenate([[[255, 255, 255]], np.round(255 * table)]).astype(np.uint8)


def sheet(maps, cell, T, side, gap=2):
    """An image (height, width, 4) with all heads: a row for each layer, at most `side` pixels a head, and a gap between
    them."""
    signed = is_signed(maps)
    colors, tiles = palette(signed), []
    for layer in maps:
        row = []
        for head in layer:
            codes, _ = encode(coarsen(head, cell, T, side)[0], signed)
            tile = np.dstack([colors[codes], np.where(codes == 0, 0, 255).astype(np.uint8)])
            row.append(np.pad(tile, ((0, gap), (0, gap), (0, 0))))
        tiles.append(np.concatenate(row, 1))
    whole = np.concatenate(tiles)
    return whole[:len(whole) - gap, :whole.shape[1] - gap]


# ---------------------------------------------------------------- panels

def draw_heads(axes, series, key, line=None):
    """A point for each head, and a line through the layers' means; thin with a leading end-of-text token."""
    for s in series:
        x = head_means(prompts(s, False), key)
        layers = np.arange(len(x))
        axes.plot(np.repeat(layers, x.shape[1]), x.ravel(), ".", color=s.color, alpha=0.35, markersize=5)
        axes.plot(layers, mean(x, 1), color=s.color, linewidth=2, linestyle=s.dash, label=s.label)
        with_end = prompts(s, True)
        if with_end:
            axes.plot(layers, mean(head_means(with_end, key), 1), color=s.color, linewidth=0.8, linestyle=s.dash)
    if line is not None:
        axes.axhline(line, color="black", alpha=charts.MUTED, linestyle=":", linewidth=1.2)
    charts.layer_axis(axes, max(len(s.rows[0]["layers"]) for s in series))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")


def draw_residual(axes, series, key):
    values = []
    for s in series:
        for end_of_text, width in (False, 2), (True, 0.8):
            rows = prompts(s, end_of_text)
            if rows:
                x = of_residual(rows, key)
                axes.plot(range(len(x)), x, color=s.color, linewidth=width, linestyle=s.dash,
                          marker="." if not end_of_text else None, label=s.label)
                values += list(x)
    charts.positive_axis(axes, values, 20)
    charts.layer_axis(axes, max(len(s.rows[0]["layers"]) for s in series))


def draw_by_n(axes, series, key):
    """The mean over heads against n, in a band from the least to the largest head. Returns n."""
    for s in series:
        x = bin_means(prompts(s, False), key).reshape(-1, bins_of(s))
        n = middles(x.shape[1], [s])
        axes.plot(n, mean(x), color=s.color, linestyle=s.dash, linewidth=1.7, marker="o", markersize=3.5, label=s.label)
        known = np.isfinite(x)
        least, largest = np.where(known, x, np.inf).min(0), np.where(known, x, -np.inf).max(0)
        axes.fill_between(n, least, largest, where=known.any(0), color=s.color, alpha=0.1, linewidth=0)
    most = max(map(bins_of, series))
    charts.length_axis(axes, [1 << b for b in range(most)], "n (visible keys)")
    return middles(most, series)


def draw_entropy_by_n(axes, series):
    n = draw_by_n(axes, series, "entropy_by_n")
    axes.plot(n, np.log(n), color="black", alpha=charts.MUTED, linestyle=":", linewidth=1.2)
    axes.annotate("ln n, all keys alike", (n[-1], math.log(n[-1])), (-4, 0), textcoords="offset points", ha="right",
                  va="bottom", fontsize=8, alpha=charts.MUTED)


def draw_by_distance(axes, series):
    for s in series:
        x = mean(weights_by_distance(prompts(s, False)).reshape(-1, distances_of(s)))
        axes.plot(range(len(x)), x, color=s.color, linestyle=s.dash, linewidth=1.7, marker="o", markersize=3.5,
                  label=s.label)
    most = max(map(distances_of, series))
    axes.set_xticks(range(most), ["0–1", *(f"{1 << b:,}" for b in range(1, most))], rotation=45 if most > 9 else 0)
    axes.set_xlabel("distance i − j, in ranges that double")
    axes.set_ylim(bottom=0)


def bins_of(series):
    return max(len(row["layers"][0]["heads"][0]["entropy_by_n"]) for row in prompts(series, False))


def distances_of(series):
    """The ranges of distances, which are at most T - 1, while n reaches T."""
    return max(int(row["tokens"]) - 1 for row in prompts(series, False)).bit_length() or 1


def weights_by_distance(rows):
    """(layers, heads, ranges)"""
    longest = max(int(row["tokens"]) for row in rows)
    return bin_means(rows, "weight_by_distance", 0.0)[:, :, :(longest - 1).bit_length() or 1]


def middles(bins, series):
    """The geometric middle of each bin 2^b <= n < 2^(b+1), as far as the longest prompt goes."""
    longest = max(int(row["tokens"]) for s in series for row in prompts(s, False))
    return [math.sqrt((1 << b) * min((2 << b) - 1, longest)) for b in range(bins)]


def draw_correlation(axes, series):
    """A point for each prompt: its row sum and its perplexity."""
    texts = []
    for s in series:
        for end_of_text in False, True:
            rows = prompts(s, end_of_text)
            axes.plot(prompt_means(rows, "sum"), [number(row["perplexity"]) for row in rows], "o", color=s.color,
                      markersize=4.5, markerfacecolor=s.color if not end_of_text else "none", label=s.label)
        found = {row["leading_end_of_text"]: number(row["spearman_sum_perplexity"])
                 for row in s.rows if "spearman_sum_perplexity" in row}
        finite = [f"{found[key]:+.2f} {name}" for key, name in ((False, "without"), (True, "with end-of-text"))
                  if math.isfinite(found.get(key, math.nan))]
        texts += [f"{s.label}: {', '.join(finite)}"] if finite else []
    charts.positive_axis(axes, [number(row["perplexity"]) for s in series for row in s.rows if "prompt" in row])
    axes.set_ylabel("perplexity")
    spearman = "\nSpearman's r: " + "\n".join(texts) if texts and len(series) < 6 else ""
    axes.set_xlabel("mean row sum (open: with end-of-text)" + spearman, fontsize=9)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.locator_params(axis="x", nbins=5)


def draw_sheet(axes, found):
    image = sheet(*found, side=max(16, min(96, 1600 // found[0].shape[1])))
    layers, heads = found[0].shape[:2]
    axes.imshow(image, extent=(-0.5, heads - 0.5, layers - 0.5, -0.5), interpolation="antialiased")
    axes.set(xlabel="head", ylabel="layer")
    axes.set_xticks(range(heads))
    axes.set_yticks(range(layers))
    axes.grid(False)


def all_sums_are_one(series):
    return all(np.nanmax(np.abs(of_heads(row, "sum") - 1), initial=0) < SAME
               for s in series for row in s.rows if "prompt" in row)


def hardly_any_zeros(series):
    return all(np.nanmax(head_means(prompts(s, False), "zeros"), initial=0) < FEW for s in series)


def left_out(series):
    """A sentence about the panels that would only show a flat line; empty if there are none."""
    said = (["all rows sum to 1"] * all_sums_are_one(series)
            + [f"less than {100 * FEW:g}% of any head's weights are 0"] * hardly_any_zeros(series))
    return ", and ".join(said).capitalize()


def statistic_panels(series):
    """The panels that have something to show; left_out() is about the others."""
    def heads(title, key, line=None):
        return Panel(title, lambda axes: draw_heads(axes, series, key, line))
    panels = [heads("Entropy of a row, nats", "entropy"),
              heads("Share of the weight on the first token", "first_token"),
              heads("Slope of ln Z against ln n", "log_z_slope", 1),
              Panel("Kurtosis of the residual stream after each layer",
                    lambda axes: draw_residual(axes, series, "residual_kurtosis")),
              Panel("Largest |x| in the residual stream, of all prompts",
                    lambda axes: draw_residual(axes, series, "residual_largest")),
              Panel("Entropy by n (band: least to largest head)", lambda axes: draw_entropy_by_n(axes, series)),
              Panel("ln Z by n (band: least to largest head)", lambda axes: draw_by_n(axes, series, "log_z_by_n")),
              Panel("Weight by distance", lambda axes: draw_by_distance(axes, series))]
    if not all_sums_are_one(series):
        panels.insert(0, heads("Sum of a row's weights (1 − sum stays unspent)", "sum", 1))
    if not hardly_any_zeros(series):
        panels.append(heads("Share of weights that are exactly 0", "zeros"))
    sums = [prompt_means([row for row in s.rows if "prompt" in row], "sum") for s in series]
    if any("spearman_sum_perplexity" in row for s in series for row in s.rows) and max(map(np.ptp, sums)) > SAME:
        panels.append(Panel("Row sum and perplexity of the prompts", lambda axes: draw_correlation(axes, series)))
    return panels


def sheet_panels(series):
    """The maps of the first prompt of each series that has them."""
    panels = []
    for s in series:
        found = next(filter(None, (load_map(s, row) for row in prompts(s, False))), None)
        if found:
            layers, heads = found[0].shape[:2]
            panels.append(Panel(f"{s.label}\n{found[2]:,} tokens", lambda axes, found=found: draw_sheet(axes, found),
                                max(3.5, 0.8 + 0.7 * heads), max(3.0, 0.8 + 0.7 * layers)))
    return panels


def attention(series, title):
    counted = len(prompts(series[0], False))
    said = f"Means over {counted} prompt{'s' * (counted != 1)}; thin: with a leading end-of-text token"
    missing = left_out(series)
    pictures = [Picture("attention", statistic_panels(series), 3, charts.legend_of(series),
                        title + " · " * bool(title) + said + f"\n{missing}" * bool(missing))]
    sheets = sheet_panels(series)
    if sheets:
        pictures.append(Picture("attention-maps", sheets, min(3, len(sheets)), [],
                                title + " · " * bool(title) + "Maps of the first prompt, logarithmic colors"))
    return pictures

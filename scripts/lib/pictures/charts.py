"""Panels: pictures that stand side by side in a PNG, or alone in a page."""
import io
import math
import re
import textwrap
from dataclasses import dataclass
from html import escape
from typing import Callable

import numpy as np

from lib import drawing

MUTED = 0.65        # the opacity of what is not data


@dataclass
class Panel:
    """draw(axes) may add to the axes all but the title."""
    title: str
    draw: Callable
    width: float = 5.4
    height: float = 3.7


@dataclass
class Picture:
    """Panels in rows of `columns`, under a legend of [(label, color, dash)]. A picture has its name's ending in its
    file name. share_y: all panels have the same y axis."""
    name: str
    panels: list
    columns: int = 2
    legend: list = ()
    title: str = ""
    share_y: bool = False


# ---------------------------------------------------------------- colors

def colors_of(count):
    """[(color, dash)] that tell `count` series apart. Neighbors and equal colors have different dashes."""
    from matplotlib import colormaps
    colors, dashes = colormaps["tab10" if count <= 10 else "tab20"].colors, drawing.DASHES
    return [(colors[i % len(colors)], dashes[(i + i // len(colors)) % len(dashes)]) for i in range(count)]


def paint(series):
    for s, (s.color, s.dash) in zip(series, colors_of(len(series))):
        pass


def by_layer(values):
    """[(label, color, values of the layer)]; only the first and the last layer have a label. The ends of viridis cannot
    be seen on a dark or on a light page."""
    from matplotlib import colormaps
    last = len(values) - 1
    return [(f"layer {i}" if i in (0, last) else None, colormaps["viridis"](0.25 + 0.65 * i / max(1, last)), layer)
            for i, layer in enumerate(values)]


def legend_of(series):
    """None for a single series, which a title names."""
    return [] if len(series) == 1 else [(s.label, s.color, s.dash) for s in series]


# ---------------------------------------------------------------- axes

def length_axis(axes, lengths, name):
    """A logarithmic x axis with ticks at those of the lengths that have room."""
    from matplotlib import ticker
    lengths = sorted(set(lengths))
    least = math.log2(lengths[-1] / lengths[0]) / 9
    ticks = []
    for length in reversed(lengths):
        if not ticks or math.log2(ticks[-1] / length) >= max(least, 0.2):
            ticks.append(length)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(ticker.FixedLocator(ticks[::-1]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel(name)
    if lengths[0] == lengths[-1]:
        axes.set_xlim(lengths[0] / 2, lengths[0] * 2)


def powers_of_two(limit):
    return [1 << i for i in range(int(limit).bit_length()) if 1 << i <= limit]


def positive_axis(axes, values, wide=8):
    """A logarithmic y axis where the finite values span more than a factor of `wide`."""
    from matplotlib import ticker
    axis, values = axes.yaxis, [x for x in values if math.isfinite(x)]
    if values and min(values) > 0 and max(values) / min(values) > wide:
        narrow = max(values) / min(values) < 100
        axes.set_yscale("log")
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if narrow else (1,)))
        axis.set_minor_locator(ticker.NullLocator() if narrow else ticker.LogLocator(subs=(2, 5)))
        axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}" if value < 1e7 else f"{value:.3g}")


def mark_trained(axes, series, end=math.inf):
    """A dashed line at each training length up to `end`. If the lengths differ, returns the lines that say below the
    axis which series has which length, otherwise ""."""
    owners = {}
    for s in series:
        owners.setdefault(s.L, []).append(s.label)
    for L in sorted(owners):
        if L <= end:
            axes.axvline(L, color="black", alpha=MUTED, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
            axes.annotate(f"trained at {L:,}" + ", see below" * (len(owners) > 1), (L, 0.98), (-3, 0),
                          xycoords=("data", "axes fraction"), textcoords="offset points", rotation=90, ha="right",
                          va="top", fontsize=8, color="0.35", zorder=5, path_effects=drawing.rim())
    lines = [f"trained at {L:,}{', beyond this axis' * (L > end)}: {'; '.join(labels)}"
             for L, labels in sorted(owners.items())]
    return "".join("\n" + textwrap.fill(line, 60) for line in lines) if len(owners) > 1 else ""


def layer_axis(axes, layers):
    from matplotlib import ticker
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(-0.5, layers - 0.5)
    axes.set_xlabel("layer")


# ---------------------------------------------------------------- output

def wrapped(text, width):
    """The text in lines that fit into `width` inches at a title's size."""
    return "\n".join(textwrap.fill(line, int(11 * width), break_on_hyphens=False) for line in text.split("\n"))


def figure(picture):
    """The picture as one figure."""
    from matplotlib.lines import Line2D
    plt = drawing.pyplot()
    panels, columns = picture.panels, min(picture.columns, len(picture.panels))
    rows = [panels[i:i + columns] for i in range(0, len(panels), columns)]
    widths = [max(row[i].width for row in rows if i < len(row)) for i in range(columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    width, labels, lines = max(sum(widths), 4), [label for label, *_ in picture.legend], 0
    if labels:
        ncols = legend_columns(labels, width)
        labels, lines = drawing.fit_legend(labels, ncols, width, size=10)
    title = wrapped(picture.title, width)
    top = 0.3 * len(title.splitlines()) + 0.24 * lines
    out = plt.figure(figsize=(width, sum(heights) + top), layout="constrained")
    grid = out.add_gridspec(len(rows), columns, width_ratios=widths, height_ratios=heights)
    for i, panel in enumerate(panels):
        axes = out.add_subplot(grid[i // columns, i % columns], sharey=out.axes[0] if picture.share_y and i else None)
        panel.draw(axes)
        axes.set_title(wrapped(panel.title, panel.width - 0.7))
    if picture.legend:
        handles = [Line2D([], [], color=color, linestyle=dash, linewidth=2.5) for _, color, dash in picture.legend]
        legend = drawing.legend(out, handles, labels, loc="outside upper center", frameon=False, title=title or None,
                             ncols=ncols, title_fontproperties={"weight": "bold", "size": 11})
        legend.get_title().set_multialignment("center")
    elif title:
        out.suptitle(title, weight="bold", fontsize=11)
    return out


def legend_columns(labels, width):
    """As many columns as fit into `width` inches."""
    longest = max(map(len, labels))
    return max(1, min(len(labels), int(width / (0.7 + 0.085 * longest))))


def svg(panel, identity):
    """The panel alone, as SVG for a page: black and white follow the page's --ink and --paper, and so does the font."""
    plt = drawing.pyplot()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": identity}):
        out = plt.figure(figsize=(panel.width, panel.height), layout="constrained")
        axes = out.add_subplot()
        panel.draw(axes)
        axes.set_title("")
        file = io.BytesIO()
        out.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(out)
    text = file.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg"):], flags=re.S)
    box, width = re.search(r'viewBox="([^"]+)"', text)[1], 96 * 1.15 * panel.width
    # On a narrow screen a picture shrinks until its text becomes hard to read, and then scrolls.
    start = (f'<svg viewBox="{box}" role="img" aria-label="{escape(panel.title.strip())}" '
             f'style="max-width: {width:.0f}px; min-width: {0.57 * width:.0f}px">')
    text = re.sub(r"<svg[^>]*>", lambda _: start, text, count=1)
    # figure_1, axes_1 and so on, which nothing refers to, would occur in several pictures of a page
    text = re.sub(r' id="(?!C\d+_)[a-zA-Z][a-zA-Z0-9.]*_\d+"', "", text)
    text = re.sub(r"(#000000|(?<=[: ])black)\b", "var(--ink)", text)
    text = re.sub(r"(#ffffff|(?<=[: ])white)\b", "var(--paper)", text)
    text = re.sub(r"#([0-7][0-9a-f])\1\1\b", lambda gray: gray[0] if gray[1] == "01" else "var(--muted)", text)
    # Text without a color is black.
    return re.sub(r"<text ", '<text fill="var(--ink)" ', text)


def decimals(value):
    """A percentage for a cell."""
    if not np.isfinite(value):
        return ""
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 or value >= 10 else f"{value:.1f}"

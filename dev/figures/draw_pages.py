"""Draws the figures of README and doc/ that show grids/results.json, for light and dark pages: those of the reports
without a background, and gray where they are black there, and that of grids/study.toml once for each.

    .venv/bin/python dev/figures/draw_pages.py            # into doc/img
    .venv/bin/python dev/figures/draw_pages.py --out /tmp
"""
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from lib import command_line, drawing, files, grid_file, grid_report  # noqa: E402
from lib.grid_store import ROOT  # noqa: E402
from lib.pictures import grids  # noqa: E402

import grid_tables  # noqa: E402

GRAY = "#7a828a"        # draw_weights.py's, too

# file, grid, the figure's name in the grid's report, title
FIGURES = (
    ("results_ssmax_needles", "ssmax", "needles",
     "Beyond the training length of 128, softmax finds fewer needles than ssmax, and none at 8 times it"),
    ("comparison", "comparison", "final",
     "All but six rows end too close to softmax to tell them apart\n"
     "final validation loss minus softmax's; band: 95% interval around no difference;\n"
     "bar: that of a row with three seeds"))

# The study's lines: label, row, evaluation beyond L, color on light and on dark pages. "YaRN" scales RoPE by the factor
# of the length. Colors of Okabe and Ito, darker on light pages.
LINES = (("softmax", "softmax", "positions", ("#d55e00", "#e69f00"), "-"),
         ("softmax, YaRN", "softmax", "yarn {}", ("#d55e00", "#e69f00"), "--"),
         ("ssmax", "ssmax", "positions", ("#0072b2", "#56b4e9"), "-"),
         ("ssmax, YaRN", "ssmax", "yarn {}", ("#0072b2", "#56b4e9"), "--"),
         ("lssar", "lssar", "positions", ("#007a5a", "#2fc79a"), "-"))
PAGES = (("study", "white", "black"), ("study_dark", "#0d1117", "#e6edf3"))      # file, background, text


def neutral(color):
    """Has it no hue? Numbers in the cells of a map are not quite black or white, and stay so."""
    from matplotlib.colors import to_rgb
    red, green, blue = to_rgb(color)
    return max(red, green, blue) - min(red, green, blue) < 0.05 and color not in ("#010101", "#fefefe")


def for_pages(figure):
    """Removes backgrounds, and makes gray what has no color."""
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
    for background in (figure.patch, *(axes.patch for axes in figure.axes)):
        background.set_alpha(0)
    for axes in figure.axes:
        axes.tick_params(colors=GRAY, which="both")
        axes.spines[:].set_edgecolor(GRAY)
    for artist in figure.findobj(lambda artist: isinstance(artist, (Line2D, Text)) and neutral(artist.get_color())):
        artist.set_color(GRAY)


def points(plan, name, beyond):
    """[(length, mean loss, its deviation over seeds)] of a row, beyond L by the evaluation whose name is `beyond` with
    the multiple of L."""
    row, L, found = plan.grid.rows[name], plan.grid.scale.L, []
    for T in next(e.lengths for e in plan.grid.evals if e.name == "positions"):
        losses = grid_report.of_seeds(plan, row, row.sizes[0], row.seeds,
                                      beyond.format(T // L) if T > L else "positions", "loss", str(T))
        if losses:
            found.append((T, statistics.fmean(losses), *grids.spreads([losses])))
    return found


def apart(places, least):
    """Places for labels, in order and at least so far from each other, as near as they can be to where they belong."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for _ in range(100):
        for low, high in zip(order, order[1:]):
            missing = least - (moved[high] - moved[low])
            if missing > 0:
                moved[low], moved[high] = moved[low] - missing / 2, moved[high] + missing / 2
    return moved


def study_figure(plan, page, background, text):
    """The loss against length, for light (page 0) or dark pages (1). Bands are standard deviations over seeds."""
    plt = drawing.pyplot()
    lines = [(line, points(plan, *line[1:3])) for line in LINES]
    with plt.rc_context({key: text for key in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color",
                                               "axes.edgecolor")}):
        drawn, axes = plt.subplots(figsize=(7.2, 4.2), facecolor=background, layout="constrained")
        axes.set_facecolor(background)
        for (_, _, _, colors, dash), found in lines:
            x, y, spread = zip(*found)
            axes.plot(x, y, color=colors[page], linestyle=dash, linewidth=2, marker="o", markersize=3.5)
            grids.draw_band(axes, x, y, spread, colors[page])
        lengths = sorted({T for _, found in lines for T, *_ in found})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [grid_report.column_title(plan, str(T)) for T in lengths])
        axes.set_xlim(lengths[0], lengths[-1])
        axes.axvline(plan.grid.scale.L, color=text, linewidth=0.8, linestyle=":")
        axes.set(xlabel="tokens per sequence", ylabel="loss, nats per token")
        low, high = axes.get_ylim()
        places = apart([found[-1][1] for _, found in lines], 0.055 * (high - low))
        for ((label, _, _, colors, _), found), place in zip(lines, places):
            axes.annotate(label, (lengths[-1], place), xytext=(8, 0), textcoords="offset points", va="center",
                          color=colors[page], annotation_clip=False)
    return drawn


def main():
    files.print_escapes()
    parser = command_line.parser(__doc__, "doc/results.md")
    parser.add_argument("--out", type=Path, default=ROOT / "doc/img", help="folder of the figures")
    options = parser.parse_args()
    try:
        for file, grid, name, title in FIGURES:
            figure = dict(grids.figures(grid_tables.plan_of(grid)))[name]
            if figure.get_suptitle() or len(figure.axes) > 1:
                figure.suptitle(title)
            else:
                figure.axes[0].set_title(title)
            for_pages(figure)
            print(drawing.save(figure, options.out / f"{file}.png"))
        for page, (file, *colors) in enumerate(PAGES):
            print(drawing.save(study_figure(grid_tables.plan_of("study"), page, *colors), options.out / f"{file}.png"))
    except (grid_file.Refused, OSError) as error:
        sys.exit(f"draw_pages.py: {error}")


if __name__ == "__main__":
    main()

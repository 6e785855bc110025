"""Draws the figures of README and doc/ that show grids/results.json, for light and dark pages: without a background,
and gray where other figures are black.

    .venv/bin/python dev/figures/draw_pages.py            # into doc/img
    .venv/bin/python dev/figures/draw_pages.py --out /tmp
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from lib import command_line, drawing, files, grid_file, grid_report  # noqa: E402
from lib.grid_store import ROOT  # noqa: E402

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


def neutral(color):
    from matplotlib.colors import to_rgb
    red, green, blue = to_rgb(color)
    return max(red, green, blue) - min(red, green, blue) < 0.05


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


def main():
    files.print_escapes()
    parser = command_line.parser(__doc__, "doc/results.md")
    parser.add_argument("--out", type=Path, default=ROOT / "doc/img", help="folder of the figures")
    options = parser.parse_args()
    try:
        drawn = {grid: dict(grid_report.pictures(grid_tables.plan_of(grid, ROOT / "grids/results.json")))
                 for grid in {grid for _, grid, *_ in FIGURES}}
        for file, grid, name, title in FIGURES:
            figure = drawn[grid][name]
            if figure.get_suptitle() or len(figure.axes) > 1:
                figure.suptitle(title)
            else:
                figure.axes[0].set_title(title)
            for_pages(figure)
            print(drawing.save(figure, options.out / f"{file}.png"))
    except (grid_file.Refused, OSError) as error:
        sys.exit(f"draw_pages.py: {error}")


if __name__ == "__main__":
    main()

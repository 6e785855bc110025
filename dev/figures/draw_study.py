"""Draws the figure of grids/study.toml: loss against length, from results.json, for light and for dark pages.

    .venv/bin/python dev/figures/draw_study.py            # doc/img/study.png and study_dark.png
    .venv/bin/python dev/figures/draw_study.py --out /tmp

Rows without results are left out. "YaRN" scales RoPE beyond the training length by the length's factor. Bands are the
standard deviation over seeds.
"""
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from lib import command_line, drawing, files, grid_file, grid_report  # noqa: E402
from lib.grid_store import ROOT  # noqa: E402

import grid_tables  # noqa: E402

# label, row, evaluation beyond L, color on light and on dark pages. Colors of Okabe and Ito, darker on light pages.
LINES = (("softmax", "softmax", "positions", ("#d55e00", "#e69f00"), "-"),
         ("softmax, YaRN", "softmax", "yarn {}", ("#d55e00", "#e69f00"), "--"),
         ("ssmax", "ssmax", "positions", ("#0072b2", "#56b4e9"), "-"),
         ("ssmax, YaRN", "ssmax", "yarn {}", ("#0072b2", "#56b4e9"), "--"),
         ("lssar", "lssar", "positions", ("#007a5a", "#2fc79a"), "-"))
PAGES = (("study.png", "white", "black"), ("study_dark.png", "#0d1117", "#e6edf3"))      # background, text


def points(plan, name, beyond):
    """[(length, mean loss, its deviation over seeds)] of a row, beyond L by the evaluation whose name is `beyond` with
    the multiple of L."""
    row, L, found = plan.grid.rows[name], plan.grid.scale.L, []
    for T in next(e.lengths for e in plan.grid.evals if e.name == "positions"):
        losses = grid_report.of_seeds(plan, row, row.sizes[0], row.seeds,
                                      beyond.format(T // L) if T > L else "positions", "loss", str(T))
        if losses:
            found.append((T, statistics.fmean(losses), *grid_report.spreads([losses])))
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


def figure(plan, lines, page, background, text):
    plt = drawing.pyplot()
    with plt.rc_context({key: text for key in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color",
                                               "axes.edgecolor")}):
        drawn, axes = plt.subplots(figsize=(7.2, 4.2), facecolor=background, layout="constrained")
        axes.set_facecolor(background)
        for (_, _, _, colors, dash), found in lines:
            x, y, spread = zip(*found)
            axes.plot(x, y, color=colors[page], linestyle=dash, linewidth=2, marker="o", markersize=3.5)
            grid_report.draw_band(axes, x, y, spread, colors[page])
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
    parser.add_argument("--out", type=Path, default=ROOT / "doc/img", help="folder of the pictures")
    parser.add_argument("--results", type=Path, default=ROOT / "grids/results.json", help="the results")
    options = parser.parse_args()
    try:
        plan = grid_tables.plan_of("study", options.results)
        lines = [(line, found) for line in LINES if (found := points(plan, *line[1:3]))]
        if not lines:
            raise grid_file.Refused(f"{options.results}: no row of the figure has results yet. Run scripts/grid.py "
                                    "grids/study.toml.")
        for page, (name, *colors) in enumerate(PAGES):
            print(drawing.save(figure(plan, lines, page, *colors), options.out / name))
    except (grid_file.Refused, OSError) as error:
        sys.exit(f"draw_study.py: {error}")


if __name__ == "__main__":
    main()

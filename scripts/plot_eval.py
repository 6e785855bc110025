"""Draws the results of eval_gpt2: the pictures of one eval.json, or of several together.

    .venv/bin/python scripts/plot_eval.py out/a/eval  # the pictures beside its eval.json
    .venv/bin/python scripts/plot_eval.py out/a/eval out/b/eval --out ab.png  # both in one, further ones in ab-NAME.png
    .venv/bin/python scripts/plot_eval.py out/a/eval out/b/eval --baseline out/a/eval --out difference.png

A folder is the --out of eval_gpt2, which draws the same pictures itself (--picture 0: without them). The task decides
what is drawn: doc/reports.md describes each picture.
"""
import json
import re
import sys
from pathlib import Path

from lib import command_line, drawing, files
from lib.run_folder import Refused
from lib.pictures import attention, charts, page, results, tasks

DRAW = {"loss": tasks.loss, "positions": tasks.positions, "needle": tasks.needle, "attention": attention.attention,
        "scores": tasks.scores, "choice": tasks.choice}


def read(folders):
    """(the series of all folders, which must have one task, labeled and painted; what they have in common, a title)"""
    series, _ = results.read_all(folders)
    for s in series:
        if s.task != series[0].task:
            raise Refused(f"{s.folder} has the task {s.task}, but {series[0].folder} has {series[0].task}. Plot "
                               "them one by one; scripts/report.py shows several tasks in one page.")
    common = results.label(series)
    charts.paint(series)
    return series, common or (series[0].full_name if len(series) == 1 else "")


def subtract(series, baseline):
    """All other series, with losses less those of the baseline folder's first series; and a title."""
    base = next((s for s in series if s.folder.resolve() == Path(baseline).resolve()), None)
    if not base:
        raise Refused(f"--baseline {baseline}: expected one of the folders to plot.")
    if base.task not in ("loss", "positions"):
        raise Refused(f"--baseline: {baseline} has the task {base.task}. Only losses are compared: loss, "
                           "positions.")
    found = [results.less(s, base) for s in series if s is not base]
    if not found:
        raise Refused(f"--baseline {baseline}: there is nothing to compare it with. Name further folders.")
    title = f"difference to {base.label}" + ", perplexity as a ratio" * (base.task == "loss")
    return found, f"{found[0].label}: {title}" if len(found) == 1 else title


def pictures(folders):
    """The pictures of one or several folders as [Picture]."""
    series, title = read(folders)
    return DRAW[series[0].task](series, title)


def means(series):
    """The series merged over seeds, and a title."""
    if series[0].task not in ("loss", "positions"):
        raise Refused(f"--seeds: {series[0].folder} has the task {series[0].task}. Only losses are drawn so: "
                           "loss, positions.")
    found = results.over_seeds(series)
    if len(found) == len(series):
        raise Refused("--seeds: no two of these evaluations are of runs that differ only in --seed. The run "
                           "folders must be at hand: above the evaluations, or where eval.json says (checkpoint).")
    common = results.label(found)
    charts.paint(found)
    return found, ", ".join(filter(None, (common or found[0].full_name * (len(found) == 1),
                                          "mean and standard deviation over seeds")))


def write(folders, out, baseline=None, seeds=False):
    """Writes all pictures and returns their paths. Only with --out do several folders' pictures have a name."""
    plt, paths = drawing.pyplot(), []
    series, title = read(folders)
    if seeds:
        series, title = means(series)
    if baseline:
        series, title = subtract(series, baseline)
    for i, picture in enumerate(DRAW[series[0].task](series, title)):
        path = Path(folders[0]) / f"{picture.name}.png"
        if out:
            path = Path(out) if i == 0 else Path(out).with_stem(f"{Path(out).stem}-{picture.name.rpartition('-')[2]}")
        figure = charts.figure(picture)
        drawing.save(figure, path, bool(out))
        plt.close(figure)
        paths.append(path)
    if series[0].task == "attention":
        paths.append(Path(out).with_suffix(".html") if out else Path(folders[0]) / "attention.html")
        drawing.replace(paths[-1], page.attention_page(series, title or f"{len(series)} models").encode(), bool(out))
    if not paths:
        print(f"{', '.join(s.full_name for s in series)}: no learned scalars, nothing to draw")
    if not out:
        record(Path(folders[0]) / "eval.json", [path.name for path in paths])
    return paths


def record(path, names):
    """Adds the names to "files" in eval.json, so that the next eval_gpt2 that replaces this file also removes its
    pictures. The rest of the text stays as it is."""
    def extended(found):
        listed = json.loads(found[2])
        return found[1] + json.dumps(listed + [name for name in names if name not in listed])
    text = files.read(path, files.EVAL).decode()
    changed = re.sub(r'("files":\s*)(\[[^\[\]{}]*\])', extended, text, count=1)
    if changed != text:
        drawing.replace(path, changed.encode())


def main():
    files.print_escapes()
    parser = command_line.parser(__doc__, "doc/reports.md")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a folder with eval.json")
    parser.add_argument("--out", metavar="FILE", type=drawing.file_to_save,
                        help="the first picture, such as x.png, x.svg or x.pdf (default: in the folder, named after "
                             "what it shows)")
    parser.add_argument("--baseline", metavar="FOLDER",
                        help="plot losses as differences to those of this folder, one of those to plot")
    parser.add_argument("--seeds", action="store_true",
                        help="draw losses of runs that differ only in --seed as one curve: the mean, and bars or a "
                             "band for the standard deviation")
    options = parser.parse_args()
    if options.seeds and options.baseline:
        parser.error("--seeds and --baseline exclude each other")
    if (len(options.folders) > 1 or options.baseline or options.seeds) and not options.out:
        parser.error("to plot several folders in one picture, or differences, pass --out FILE")
    try:
        for path in write(options.folders, options.out, options.baseline, options.seeds):
            print(path)
    except (Refused, OSError) as error:
        print(f"plot_eval.py: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

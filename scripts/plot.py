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
import os
import sys
from pathlib import Path

from lib import command_line, drawing, events, files, run_folder
from lib.run_folder import Refused

# ---------------------------------------------------------------- TensorBoard

def write_events(run, folder):
    """Writes one event file with the run's run_folder.SCALARS into the folder, replacing an earlier one."""
    files.refuse_link(folder)
    lines = run_folder.read_metrics(run)
    partial, path = folder / "partial", folder / "events.out.tfevents.0.metrics"
    try:
        with events.EventFile(partial, run_folder.began(run, lines)) as file:
            for line, time in zip(lines, run_folder.seconds(lines)):
                scalars = {key: line[key] for key in run_folder.SCALARS if line.get(key) is not None}
                file.write(line["step"], time, scalars)
        os.replace(partial, path)
    finally:
        if partial.is_file():
            partial.unlink()
    return path


# ---------------------------------------------------------------- main

def is_no_run(path):
    """Is it a file, such as a picture, or the folder of an evaluation?"""
    return path.is_file() or (path / "eval.json").exists() and not (path / "metrics.jsonl").exists()


def chosen(options):
    """The figure that the flags ask for, and its file's default name."""
    from lib.pictures import runs
    if options.heads:
        return runs.heads(options.runs[0]), "heads.png"
    if options.norms:
        return runs.norms(options.runs[0]), "norms.png"
    if options.seeds or options.baseline:
        return runs.comparison(options.runs, options.seeds, options.baseline), "comparison.png"
    if options.scalars:
        return runs.scalars(options.runs), "scalars.png"
    loaded = [run_folder.after_parent(run, options.runs) for run in options.runs] if options.after_parent else None
    return runs.losses(options.runs, loaded), "loss.png"


def main():
    files.print_escapes()
    parser = command_line.parser(__doc__, "doc/reports.md")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--out", metavar="FILE", type=drawing.file_to_save,
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
    try:
        if options.tensorboard:
            for run, name in zip(options.runs, run_folder.folder_names(options.runs)):
                print(write_events(run, options.tensorboard / name))
        else:
            figure, name = chosen(options)
            out = options.out or str(Path(options.runs[0]) / name)
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            print(drawing.save(figure, out, bool(options.out)))
    except (Refused, OSError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

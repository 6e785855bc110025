"""Writes one HTML page about runs and evaluations, side by side, that needs no other file.

    .venv/bin/python scripts/report.py out/softmax out/ssmax out/softmax/eval out/ssmax/eval --out report.html

Each folder is a run (the trainer's --out), an evaluation (eval_gpt2's --out), or both. Evaluations with the same task
share a section: the loss by length and by position, needles, attention, learned scalars, multiple choice. A run in
progress can be reported at any time.
"""
import itertools
import json
import math
import os
import sys
from html import escape
from pathlib import Path

from lib import command_line, drawing, files, run_folder
from lib.pictures import attention, charts, page, results, tasks
from lib.pictures import runs as pictures_of_runs
from lib.run_folder import NoStep, Refused, shown

# Flags that say nothing about the result.
SAME = {"out", "resume", "config", "dry-run", "profile", "threads", "rank-timeout", "progress-timeout", "graphs",
        "matmuls"}


MOST_NAMED = 6      # more folders are counted, not named

# ---------------------------------------------------------------- numbers as text

def text(value, digits=4):
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def short(value):
    """Five significant digits."""
    if not math.isfinite(value):
        return "–"
    if value < 99999.5:
        return f"{value:#,.5g}".rstrip(".")
    return f"{value:,.0f}" if value < 1e9 else f"{value:.3e}"


def duration(seconds):
    size, name = drawing.unit(seconds, drawing.TIME_UNITS)
    return f"{seconds / size:.1f} {name}"


# ---------------------------------------------------------------- flags

def flag_tables(names, arguments, same, others, made=()):
    """The flags that differ, and the rows `made` and all other flags folded away under the title "All other OTHERS".
    arguments: for each of `names` its flags; same: those that are never compared."""
    keys = dict.fromkeys(key for flags in arguments for key in flags)
    rows = {key: [f"--{key}", *(shown(flags.get(key)) for flags in arguments)] for key in keys}
    differ = run_folder.differing(arguments, same)
    folded = [*made, *(row for key, row in rows.items() if key not in differ)]
    wrap = {(i, j): "wrap text" if i >= 0 else "text"
            for i in range(-1, len(folded) + len(keys)) for j in range(1, len(names) + 1)}
    out = ""
    if differ:
        out += "<h3>Flags that differ</h3>\n" + page.table(["", *names], [rows[key] for key in differ], wrap)
    if folded:
        title = f"All other {others}" if differ else others.capitalize()
        out += f"<details><summary>{title}</summary>\n{page.table(['', *names], folded, wrap)}</details>\n"
    return out


# ---------------------------------------------------------------- runs

def has_step(folder):
    """Has this run finished a step?"""
    try:
        return (Path(folder) / "metrics.jsonl").exists() and bool(run_folder.read_metrics(folder))
    except NoStep:
        return False


def shape_of(arguments):
    """What determines the model's shape: --model, or the folder that it was loaded from."""
    return (f"that of {arguments['init-from']}" if arguments.get("init-from")
            else shown(arguments.get("model")).replace(",", ", "))


def summary_row(folder, name, run):
    arguments = run["arguments"]
    if not has_step(folder):
        return [name, run_folder.normalizers(run), shape_of(arguments), "no step yet", *[""] * (len(SUMMARY) - 4)]
    lines = run_folder.read_metrics(folder)
    finite = {key: [x for x in run_folder.column(lines, key) if math.isfinite(x)]
              for key in ("loss", "val_loss", "grad_norm")}
    clip = arguments.get("grad-clip") or math.inf
    return [name, run_folder.normalizers(run), shape_of(arguments),
            f"{lines[-1]['step']:,} of {arguments.get('steps', 0):,}",
            f"{lines[-1]['tokens']:,}", text(drawing.smooth(run_folder.column(lines, "loss"))[-1]),
            drawing.last_validation(lines, 4) or text(None), text(min(finite["val_loss"], default=None)),
            text(max(finite["grad_norm"], default=None), 2), f"{sum(x > clip for x in finite['grad_norm']):,}",
            duration(run_folder.seconds(lines)[-1])]


SUMMARY = ["run", "normalizer", "model", "steps", "tokens", "mean loss", "validation", "best validation",
           "largest gradient norm", "clipped steps", "time in steps"]
ABOUT_SUMMARY = ('<p class="muted">Mean loss: the training loss, averaged over the last 1% of the steps; of fewer '
                 "than 100 steps, that of the last one. A validation loss without a step is that of the last "
                 "step.</p>\n")


def configuration(names, runs):
    """The flags, and what the runs were made with."""
    arguments = [dict(run["arguments"]) for run in runs]
    for flags in arguments:
        if flags.get("init-from"):      # the default of --model did not apply
            flags["model"] = None
    made = [["version, commit", *(f"{run.get('version', '?')}, {run.get('commit', '?')}" for run in runs)],
            ["program", *(str(run.get("program", "?")) for run in runs)],
            ["ranks", *(str(run.get("ranks", run.get("processes", "?"))) for run in runs)]]
    for which in "train", "val":
        texts = [run.get("data", {}).get(which) for run in runs]
        made.append([f"{which} data", *(f"{data.get('tokens', 0):,} tokens in {data.get('files', 0):,} file"
                                        + "s" * (data.get('files') != 1) if data
                                        else "–" for data in texts)])
    return flag_tables(names, arguments, SAME, "flags, versions and data", made)


def lineage(names, runs):
    """What happened to each run beyond its start."""
    items = []
    for name, run in zip(names, runs):
        for entry in run.get("lineage", []):
            if isinstance(entry, dict) and entry.get("event") != "start":
                rest = ", ".join(f"{key} {json.dumps(value) if isinstance(value, dict) else shown(value)}"
                                 for key, value in entry.items() if key not in ("step", "event"))
                where = f"{name}, step {entry.get('step')}" if len(runs) > 1 else f"step {entry.get('step')}"
                items.append(f"<li>{escape(where)}: {escape(str(entry.get('event')))} "
                             f"<span class=\"muted\">{escape(rest)}</span></li>")
    return f"<h3>Lineage</h3>\n<ul>{''.join(items)}</ul>\n" if items else ""


def learned_scalars(folders, names):
    """[(folder, name, its learned scalars)] of the runs that have any."""
    found = []
    for folder, name in zip(folders, names):
        try:
            found.append((folder, name, drawing.read_scalars(folder)))
        except Refused:        # it learns none, or has none yet
            continue
    return found


def colors_of(names, runs, used):
    """[(color, dash)]: a run has those of its evaluations, or some that no evaluation has. used: {a series' full name:
    (color, dash)}"""
    styles = charts.colors_of(len(names) + len(used))
    free = itertools.cycle([style for style in styles if style not in used.values()] or styles)
    keys = [results.join([name, run_folder.normalizers(run)]) for name, run in zip(names, runs)]
    return [used[key] if key in used else next(free) for key in keys]


def about_runs(folders, names, colors):
    """The sections about runs, as [(title, HTML)]."""
    runs = [run_folder.read_run(folder) for folder in folders]
    chosen = colors_of(names, runs, colors)
    rows = [summary_row(folder, name, run) for folder, name, run in zip(folders, names, runs)]
    left = {(i, j): "text" if j == 1 or i < 0 else "text wrap" for i in range(-1, len(rows)) for j in (1, 2)}
    summary = page.table(SUMMARY, rows, left) + ABOUT_SUMMARY
    found = [("Runs", summary + configuration(names, runs) + lineage(names, runs))]
    started = [each for each in zip(folders, names, chosen) if has_step(each[0])]
    if not started:
        return found
    folders, names, chosen = zip(*started)
    legend = page.legend([(name, *style) for name, style in zip(names, chosen)])
    panels, seeds = pictures_of_runs.seed_panels(folders, chosen)
    over_seeds = page.legend(seeds) + page.panels(panels, "training-seeds") if panels else ""
    curves = page.panels(pictures_of_runs.curve_panels(folders, chosen), "training")
    found.append(("Training", legend + curves + over_seeds))
    panels = [panel for folder, name in zip(folders, names)
              for panel in pictures_of_runs.norm_panels(folder, name if len(folders) > 1 else "")]
    if panels:
        found.append(("Norms by layer", "<p>Euclidean norms of the gradient before clipping, and of the weights.</p>\n"
                      + page.panels(panels, "norms")))
    scalars = pictures_of_runs.scalar_panels(learned_scalars(folders, names))
    if scalars:
        about = "<p>Lines: means over the heads of a layer; bands: from the least to the largest head.</p>\n"
        found.append(("Learned scalars in training", about + page.panels(scalars, "scalars")))
    return found


# ---------------------------------------------------------------- evaluations

def length_table(series, key, digits, largest=False, more=None):
    """A row for each series, a column for each length; the best of a column, the least number or with `largest` the
    largest one, is marked, and where lengths go beyond the one trained at. more: {title: texts} of further columns
    before those of the lengths."""
    more = {"trained at": [f"{s.L:,}" for s in series]} | (more or {})
    lengths = sorted({int(row["seq_len"]) for s in series for row in s.rows})
    cells = {(i, int(row["seq_len"])): results.number(row[key]) for i, s in enumerate(series) for row in s.rows}
    spread = {(i, int(row["seq_len"])): f" ± {text(row[f'{key}_each'].std(ddof=1))}"
              for i, s in enumerate(series) if s.seeds > 1 for row in s.rows}
    rows = [[s.label, *(texts[i] for texts in more.values()),
             *(digits(cells[i, T]) + spread.get((i, T), "") if (i, T) in cells else "" for T in lengths)]
            for i, s in enumerate(series)]
    classes, first = {}, 1 + len(more)
    for j, T in enumerate(lengths, first):
        column = {i: cells[i, T] for i in range(len(series)) if math.isfinite(cells.get((i, T), math.nan))}
        best = (max if largest else min)(column.values(), default=None)
        for i, value in column.items():
            if value == best and len(set(column.values())) > 1:
                classes[i, j] = "best"
    if len({s.L for s in series}) == 1:
        beyond = next((j for j, T in enumerate(lengths, first) if T > series[0].L), None)
        if beyond:
            for i in range(-1, len(series)):
                classes[i, beyond] = (classes.get((i, beyond), "") + " beyond").strip()
    return page.table(["", *more, *(f"{T:,}" for T in lengths)], rows, classes)


def about_seeds(series, panels, identity):
    """Means over seeds, if there are several."""
    found = results.over_seeds(series)
    if len(found) == len(series):
        return ""
    results.label(found)
    return ("<h3>Loss, mean ± standard deviation over seeds</h3>\n"
            + length_table(found, "loss", text, more={"seeds": [str(s.seeds) for s in found]})
            + page.legend(charts.legend_of(found)) + page.panels(panels(found), identity))


def about_losses(series):
    return (about_seeds(series, tasks.length_panels, "seeds")
            + "<h3>Loss, nats per token</h3>\n" + length_table(series, "loss", text)
            + "<h3>Perplexity</h3>\n" + length_table(series, "perplexity", short)
            + page.legend(charts.legend_of(series)) + page.panels(tasks.length_panels(series), "lengths"))


def about_positions(series):
    return (f"<p>The running mean over positions from t/{tasks.WINDOW:g} to {tasks.WINDOW:g} t. "
            "Behind a single curve: the loss at each position.</p>\n"
            + about_seeds(series, tasks.position_panels, "position-seeds")
            + page.legend(charts.legend_of(series)) + page.panels(tasks.position_panels(series), "positions"))


def needles(s):
    """How many needles a series has at each length."""
    counts = [len(row["trials"]) for row in s.rows]
    return " to ".join(dict.fromkeys(f"{count:,}" for count in (min(counts), max(counts))))


def about_needles(series):
    return ("<h3>Needles found, mean over depths</h3>\n"
            + length_table(series, "right", lambda x: f"{100 * x:.1f}%", largest=True,
                           more={"needles per length": [needles(s) for s in series]})
            + "<h3>By depth, percent</h3>\n" + page.panels(tasks.found_panels(series), "found")
            + page.legend(charts.legend_of(series)) + page.panels(tasks.head_panels(series), "heads")
            + "<h3>The best needle score of each trial, ranked</h3>\n"
            + page.panels(tasks.trial_panels(series), "trials", 18))


def about_attention(series):
    missing = attention.left_out(series)
    return ("<p>Points: heads; lines: means over the heads of a layer; thin: with a leading end-of-text token."
            + f" {missing}." * bool(missing) + "</p>\n"
            + page.legend(charts.legend_of(series)) + page.panels(attention.statistic_panels(series), "attention")
            + "<h3>Maps</h3>\n" + page.attention(series, "maps"))


def about_scores(series):
    panels = tasks.score_panels(series)
    if not panels:
        return "<p>No learned scalars.</p>\n"
    return page.legend(charts.legend_of(tasks.learned(series))) + page.panels(panels, "scores")


def about_choice(series):
    rows = [[s.label, f"{results.number(s.rows[0]['questions']):,.0f}",
             *(f"{text(results.number(s.rows[0][key]))} ± {text(results.number(s.rows[0][f'{key}_stderr']))}"
               for key in ("acc", "acc_norm"))] for s in series]
    return page.table(["", "questions", "acc", "acc_norm"], rows) + page.panels(tasks.choice_panels(series), "choice")


SECTIONS = {"loss": ("Loss by length", about_losses), "positions": ("Loss by position", about_positions),
            "needle": ("Needle in a haystack", about_needles), "attention": ("Attention", about_attention),
            "scores": ("Learned scalars", about_scores), "choice": ("Multiple choice", about_choice)}


def read_evaluations(folders, runs):
    """({task: series}, {full name: (color, dash)}, the runs' names): a model has one style under one normalizer in all
    sections. If a section has it several times, under several flags, all have its color, and the first its dash."""
    series, called = results.read_all(folders, runs)
    styles = dict.fromkeys(s.full_name for s in series)
    styles = dict(zip(styles, charts.colors_of(len(styles))))
    found = {}
    for s in series:
        s.color, dash = styles[s.full_name]
        others = [other for other in found.setdefault(s.task, []) if other.full_name == s.full_name]
        s.dash = drawing.DASHES[(drawing.DASHES.index(dash) + len(others)) % len(drawing.DASHES)]
        found[s.task].append(s)
    names = [called[Path(os.path.abspath(run))] for run in runs]
    return {task: found[task] for task in SECTIONS if task in found}, styles, names


def settings(series):
    """What all series of a section have in common, where they are from, and how they were made."""
    common, flags = results.label(series), results.flags_of(series)
    shown = flags if len(flags) <= MOST_NAMED else [os.path.commonpath(map(os.path.abspath, flags))]
    folders = ", ".join(f"<code>{escape(files.printable(folder))}</code>" for folder in shown)
    name = common or (series[0].full_name if len(series) == 1 else "")
    about = f"{escape(name)}. " if name else ""
    labels = {folder: [s.label for s in series if s.folder == folder] for folder in flags}
    names = [label[0] if len(label) == 1 < len(series) and run_folder.GRID_EVAL.search(str(folder)) else name
             for (folder, label), name in zip(labels.items(), run_folder.names(flags))]
    many = f"{len(flags)} folders in " * (len(flags) > MOST_NAMED)
    return (f'<p class="muted">{about}From {many}{folders}.</p>\n'
            + flag_tables(names, flags.values(), results.SHOWN_ANYWAY, "flags"))


# ---------------------------------------------------------------- the page

def is_run(folder):
    return any((Path(folder) / name).exists() for name in ("run.json", "metrics.jsonl"))


def evaluations_in(folder):
    """The folders with eval.json: this one and, as grid.py leaves them, those up to two levels below."""
    return [str(path.parent) for pattern in ("eval.json", "*/eval.json", "*/*/eval.json")
            for path in sorted(Path(folder).glob(pattern))]


def report(folders, title):
    """Of several folders, as from out/*, those with neither runs nor evaluations are left out."""
    runs = [folder for folder in folders if is_run(folder)]
    each = {folder: evaluations_in(folder) for folder in folders}
    for folder in folders:
        if folder not in runs and not each[folder]:
            text = f"{folder}: neither a run (run.json, metrics.jsonl) nor an evaluation (eval.json)."
            if not Path(folder).exists() or not runs and not any(each.values()):
                raise Refused(text)
            if Path(folder).is_dir():
                print(f"report.py: note: {text}", file=sys.stderr)
    evaluations = {os.path.abspath(one): one for found in each.values() for one in found}
    found, colors, names = read_evaluations(evaluations.values(), runs)
    sections = about_runs(runs, names, colors) if runs else []
    for task, series in found.items():
        name, about = SECTIONS[task]
        sections.append((name, settings(series) + about(series)))
    links = "".join(f'<a href="#{name.lower().replace(" ", "-")}">{name}</a>' for name, _ in sections)
    body = "".join(f'<section><h2 id="{name.lower().replace(" ", "-")}">{name}</h2>\n{html}</section>\n'
                   for name, html in sections)
    return page.page(title, f"<nav>{links}</nav>\n{body}")


def main():
    files.print_escapes()
    parser = command_line.parser(__doc__, "doc/reports.md")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a run, an evaluation, or both")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page (default: report.html)")
    parser.add_argument("--title", help="the page's title (default: the folders' names)")
    options = parser.parse_args()
    out = options.out or Path("report.html")
    if out.is_dir():
        parser.error(f"--out {out}: this is a folder; expected a file, such as {out / 'report.html'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out}: cannot create the folder {out.parent} ({error.strerror}). Pass a path in a folder "
                     "that can be written")
    try:
        names = run_folder.names(options.folders)
        named = [name for name, folder in zip(names, options.folders) if Path(folder).is_dir()]
        called = ", ".join(dict.fromkeys(named)) if len(named) <= MOST_NAMED else f"{len(named)} folders"
        title = files.printable(options.title or "") or called
        drawing.replace(out, report(list(dict.fromkeys(options.folders)), title).encode(), bool(options.out))
        print(out)
    except (Refused, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

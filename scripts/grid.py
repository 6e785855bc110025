"""Trains and evaluates a grid of normalizers, seeds and sizes, and writes the papers' tables with our numbers beside
theirs.

    .venv/bin/python scripts/grid.py grids/lssa.toml                         # at the small scale, for two cores
    .venv/bin/python scripts/grid.py grids/lssa.toml --scale paper           # at the paper's own scale
    .venv/bin/python scripts/grid.py grids/lssa.toml --dry-run               # the plan: runs, tokens, time, disk
    .venv/bin/python scripts/grid.py grids/lssa.toml --report                # the report of the results so far
    .venv/bin/python scripts/grid.py grids/lssa.toml --report --csv --latex  # also its numbers, as tables to read on

Rerun it to resume: finished parts are kept, and interrupted runs continue. Results go to grids/results.json as runs
end, so that a fresh clone continues too. doc/grids.md explains the grid files.
"""
import errno
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

from lib import command_line, files, grid_export, grid_file, grid_parts, grid_report, grid_run
from lib.grid_run import count, duration, many
from lib.grid_store import ROOT, Results, make_folder, nearest_folder, step_tokens

FAILED, USAGE, INPUT, RESOURCE, STOPPED = 1, 2, 3, 4, 75


def parse():
    parser = command_line.parser(__doc__, "doc/grids.md")
    parser.add_argument("grids", nargs="+", metavar="GRID.toml", help="grid files, which are run one after another")
    parser.add_argument("--scale", default="small", help="small, paper or another scale of the file (default small)")
    parser.add_argument("--out", type=Path, default=ROOT / "out/grids",
                        help="folder for runs and reports (default out/grids); created, with its parents")
    parser.add_argument("--results", type=Path, default=ROOT / "grids/results.json",
                        help="the results (default grids/results.json); the file and its folder are created if "
                             "missing")
    parser.add_argument("--jobs", type=int, help="programs at a time (default: the scale's, else one per core)")
    parser.add_argument("--threads", type=int,
                        help="threads of each program (default: the cores divided among the jobs)")
    parser.add_argument("--launch", default="", metavar="COMMAND",
                        help='put before the trainer, such as "scripts/launch.sh 8"')
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW",
                        help="only rows whose names match, and those that they start from")
    parser.add_argument("--seeds", type=int, metavar="N", help="only the first N seeds of each row")
    parser.add_argument("--commit", action="store_true",
                        help="commit the results with git whenever a run and its evaluations are done")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, prepare no text and write nothing")
    parser.add_argument("--trust-grid", action="store_true",
                        help="let the grid file start other programs than the scripts of data/ and the trainers and "
                             "eval_gpt2 of this checkout, and write elsewhere; read such a file first")
    parser.add_argument("--report", action="store_true", help="write the report of the results so far, and run nothing")
    parser.add_argument("--no-pictures", action="store_true", help="leave the pictures out of the report")
    parser.add_argument("--csv", action="store_true",
                        help="also write the report's numbers to tables.csv: mean, spread and number of seeds")
    parser.add_argument("--latex", action="store_true", help="also write them to tables.tex, as tables with booktabs")
    options = parser.parse_args()
    for name in ("jobs", "threads", "seeds"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    return options


# ---------------------------------------------------------------- the plan

def print_texts(plan):
    for data in plan.grid.scale.data.values():
        if grid_parts.missing(data):
            remedy = ("prepared first by " + "; ".join(data.prepare) if data.prepare
                      else "missing, and the file does not say how to make it")
            print(f"text      {data.name}: {remedy}")
        else:
            print(f"text      {data.name}: {data.train}, fingerprint {plan.texts[data.name][0]}")
            known = [e["identity"]["text"] for e in grid_parts.known_texts(plan.grid, plan.results, data.name)]
            if known and plan.texts[data.name] not in known:
                print(f"note      {many(len(known), 'result')} on another text of this name, fingerprint "
                      f"{known[-1][0]}, do not count here")


def print_plan(plan, programs, jobs, threads):
    """Prints what is done and left, and returns the Estimate of the time that it takes."""
    grid = plan.grid
    runs, evals = ([part for part in plan.parts.values() if bool(part.eval) == kind] for kind in (False, True))
    left = [[part for part in plan.todo if bool(part.eval) == kind] for kind in (False, True)]
    print(f"grid      {grid.name} at scale {grid.scale.name}: {many(len(grid.rows), 'row')}, {many(len(runs), 'run')}, "
          f"{many(len(evals), 'evaluation')}")
    print_texts(plan)
    flags = [grid.rows[part.run.row].flags for part in left[0]]
    tokens = sum(of["steps"] * step_tokens(of) for of in flags)
    again = sum(not part.record for part in left[0])
    print(f"to do     {many(len(left[0]), 'run')} of {count(tokens)} tokens in all, {many(len(left[1]), 'evaluation')}"
          + (f"; {again} of the runs again, because their checkpoints are not here" if again else ""))
    measured = left[0] and not programs.stand_in
    speed, parameters, start = (grid_run.measured(plan, programs, jobs, threads) if measured else (None, None, None))
    estimate = grid_run.Estimate(plan, speed, parameters, start)
    seconds = estimate.total(plan.todo, jobs)
    if seconds:
        how = "as in the finished parts" if estimate.done else "measured over a few steps"
        print(f"time      about {duration(seconds)} with {many(jobs, 'job')} of {many(threads, 'thread')}, validation "
              f"and evaluation included ({how})")
    elif plan.todo:
        print(f"time      unknown with {many(jobs, 'job')} of {many(threads, 'thread')}: no finished run yet, and none "
              "could be measured")
    if parameters:
        print(f"disk      about {grid_run.size(grid_run.disk(plan, parameters))} of checkpoints in {plan.out}, "
              f"{grid_run.size(shutil.disk_usage(nearest_folder('--out', plan.out)).free)} free")
    for note in grid.notes:
        print(f"note      {note}")
    return estimate


def print_runs(plan):
    """The runs one by one, with their steps and what is left of each."""
    left = {part.key for part in plan.todo}
    for part in (part for part in plan.parts.values() if not part.eval):
        flags = plan.grid.rows[part.run.row].flags
        evals = [p for p in plan.parts.values() if p.eval and part.key in p.needs]
        state = "to do" if part.key in left else "done"
        print(f"  {part.label}: {flags['steps']:,} steps of {step_tokens(flags):,} tokens, {state}; "
              f"{sum(p.key in left for p in evals)} of {many(len(evals), 'evaluation')} to do")


# ---------------------------------------------------------------- main

def cores():
    return len(os.sched_getaffinity(0))


def read(path, options):
    grid = grid_file.read(path, options.scale, lambda: grid_parts.presets(grid_parts.find("TRAIN_GPT2", "train_gpt2")))
    if not options.trust_grid and not options.report:
        grid_parts.check_trust(grid)
    return grid_file.limited(grid, options.only, options.seeds)


def run_grid(grid, options):
    """Runs one grid; returns {label: what happened} of what failed."""
    out = options.out.absolute()
    results = Results(options.results)
    failed, folder = {}, out / f"{grid.name}-{grid.scale.name}"
    nearest_folder("--out", folder)
    if options.report:
        plan = grid_parts.Plan(grid, results, grid_parts.texts_of(grid, results), out)
    else:
        jobs = options.jobs or grid.scale.jobs or cores()
        threads = options.threads or max(1, cores() // jobs)
        programs = grid_parts.Programs(grid.scale, shlex.split(options.launch), options.dry_run)
        grid_parts.check_flags(grid, programs)
        held = None if options.dry_run else grid_run.lock(out)
        if held:
            make_folder("--results", options.results.absolute().parent)
            grid_run.prepare(grid)
        plan = grid_parts.Plan(grid, results, grid_parts.texts_of(grid, results), out)
        estimate = print_plan(plan, programs, jobs, threads)
        if options.dry_run:
            print_runs(plan)
            return {}
        work = grid_run.Work(plan, programs, jobs, threads, options.commit, estimate)
        expected = estimate.total(plan.todo, jobs)
        failed = work.run()
        if expected and work.ended:
            print(f"time      took {duration(time.monotonic() - work.began)}, estimated {duration(expected)}")
        held.close()
    make_folder("--out", folder)
    text = grid_report.write(plan, folder, failed, not options.no_pictures)
    print(text)
    print(f"{folder}/report.md has the tables and pictures; {options.results} the results.")
    for name, wanted, export in (("tables.csv", options.csv, grid_export.as_csv),
                                 ("tables.tex", options.latex, grid_export.as_latex)):
        if wanted:
            files.replace(folder / name, export(plan).encode())
            print(folder / name)
    return failed


def main():
    signal.signal(signal.SIGTERM, grid_run.stopped)
    files.print_escapes()
    options = parse()
    sys.stdout.reconfigure(line_buffering=True)      # in a log, too, messages follow what they are about
    failed = {}
    try:
        for grid in [read(path, options) for path in options.grids]:
            failed |= {f"{grid.name}: {label}": text for label, text in run_grid(grid, options).items()}
    except grid_run.Busy as error:
        print(f"grid.py: {error}", file=sys.stderr)
        return grid_run.BUSY
    except grid_file.Refused as error:
        print(f"grid.py: {error}", file=sys.stderr)
        return USAGE if str(error).startswith("--") else INPUT
    except OSError as error:
        print(f"grid.py: {error.filename or 'writing'}: {error.strerror or error}.\n"
              "  Finished parts are kept. Fix the cause, and rerun the same command to resume.", file=sys.stderr)
        return RESOURCE if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else INPUT
    except KeyboardInterrupt:
        print("grid.py: stopped. Rerun the same command to resume.", file=sys.stderr)
        return STOPPED
    for label, text in failed.items():
        print(f"grid.py: failed: {label}: {text}", file=sys.stderr)
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())

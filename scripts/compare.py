#!/usr/bin/env python3
"""Trains a small model with each attention normalizer, with the same tokens and seed, and compares validation losses.

    python scripts/compare.py --out out/compare                                  every preset, and two with gated attention units
    python scripts/compare.py --out out/compare --attn softmax ssmax gau/ssmax   only these; gau/ means block=gau
    python scripts/compare.py --out out/compare --lr 1e-3 --seq-len 128          other flags go to the trainer

Rerun it to resume: finished runs are kept, interrupted ones continue. --out receives, for each run, a folder NAME, its
output NAME.log and its outcome NAME.json; and for all of them comparison.md (a table), comparison.json and
comparison.png. TRAIN_GPT2 names a program to use instead of ./train_gpt2. doc/comparison.md has results, and the
commands that make its text: Shakespeare with a vocabulary of 1,024.
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import plot

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("TRAIN_GPT2", str(ROOT / "train_gpt2"))
RECIPE = ["--batch", "8", "--seq-len", "256", "--lr", "2e-3", "--warmup", "50", "--schedule", "cosine", "--val-tokens", "32768",
          "--ckpt-every", "100", "--keep", "1"]
DIVERGED, STOPPED = 5, 75    # exit codes of the trainer
GROUPS = (("Gated attention units", "gau/"), ("Softmax and its temperature", "ssmax|softmax-(floor)?log|softmax$"),
          ("Softmax, its norm or post changed", "softmax|softpick"), ("Sigmoid and softplus", "sigmoid|softplus|lssa"),
          ("Other phi, l1 norm", ".*-l1"), ("A fixed divisor or none", ""))


def presets():
    """The names in the table that `--attn help` prints: its indented lines from the header to the first empty line."""
    table = subprocess.run([PROGRAM, "--attn", "help"], check=True, capture_output=True, text=True).stdout
    return re.findall(r"^  (\S+)", re.search(r"^  name .*\n((?:  .*\n)+)", table, re.M)[1], re.M)


# ---------------------------------------------------------------- the runs

def command(name, options, more):
    """The trainer's command line for a name, without --out, so that a moved folder is still recognized."""
    block, attn = ("gau", name[4:]) if name.startswith("gau/") else ("", name)
    shape = options.model.split(",")
    if block:    # gated units have one head and widths of their own
        shape = [key for key in shape if not key.startswith(("heads=", "ffn="))] + ["block=gau"]
    fewest = max(1, options.steps // 8)    # steps between validations divide --steps, so that the last step has one
    every = next(n for n in range(fewest, options.steps + 1) if options.steps % n == 0)
    return [PROGRAM, "--train-data", f"{options.data}/*_train_*.bin", "--val-data", f"{options.data}/*_val_*.bin", *RECIPE,
            "--model", ",".join(shape), "--steps", str(options.steps), "--val-every", str(every), "--attn", attn, *more]


def ended(base, line):
    """The outcome of the run with this command line; None if it has not run, was stopped, or failed."""
    try:
        outcome = json.loads(Path(f"{base}.json").read_text())
    except OSError:
        return None
    return outcome if outcome["command"] == line[1:] and outcome["exit"] in (0, DIVERGED) else None


def start(base, line):
    """Starts the trainer, which resumes what is in `base`. Its output is appended to base.log."""
    base.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{base}.json").unlink(missing_ok=True)
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    with open(f"{base}.log", "a") as log:
        return subprocess.Popen([*line, "--out", str(base), "--resume"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env,
                                start_new_session=True)    # a second Ctrl-C would end it without a checkpoint


def run_all(todo, jobs):
    """Runs [(base, command line)], `jobs` at a time. A stop is passed on, and each run saves a checkpoint."""
    todo, running = list(todo), []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while todo or running:
            while todo and len(running) < jobs:
                running.append((*todo[0], start(*todo[0])))
                todo.pop(0)
            for job in [job for job in running if job[2].poll() is not None]:
                running.remove(job)
                base, line, process = job
                Path(f"{base}.json").write_text(json.dumps({"exit": process.returncode, "command": line[1:]}) + "\n")
                print(f"{base}: {summary(base)['happened'] or 'done'}, {len(todo) + len(running)} left", flush=True)
            time.sleep(0.2)
    except KeyboardInterrupt:
        print("compare.py: stopped. Rerun the same command to resume.", file=sys.stderr)
        sys.exit(STOPPED)
    finally:
        for *_, process in running:
            process.terminate()
        for *_, process in running:
            process.wait()


# ---------------------------------------------------------------- results

def summary(base):
    """A run as a dict: curve [[tokens, validation loss]], final loss or None, share of all-zero rows in the last step
    and the largest in any step (both in percent), and what happened, empty if all went well."""
    log = Path(f"{base}.log").read_text()
    code = json.loads(Path(f"{base}.json").read_text())["exit"]
    try:
        lines = plot.read_metrics(base)
    except plot.Refused:
        lines = []
    curve = [[line["tokens"], line["val_loss"]] for line in lines if line.get("val_loss") is not None]
    empty = {int(step): float(share) for step, share in re.findall(r"^step +(\d+)/.*\| (\S+) % all-zero rows", log, re.M)}
    said = (re.findall(r"^train_gpt2: (.*)", log, re.M) or [""])[-1]
    at = re.match(r"step (\d+)", said)
    happened = "" if not code else f"exit {code}" + (f" at step {at[1]}" if at else f": {said}")
    return {"happened": happened, "exit": code, "curve": curve, "loss": curve[-1][1] if curve and not code else None,
            "empty": empty.get(lines[-1]["step"], 0.0) if lines else 0.0, "most_empty": max(empty.values(), default=0.0),
            "minutes": plot.seconds(lines)[-1] / 60 if lines else 0.0}


def table(results):
    """The Markdown table of {name: summary}, which is already sorted by loss."""
    softmax = results.get("softmax", {}).get("loss")
    out = ["| | `--attn` | validation loss | minus softmax | all-zero rows | outcome |", "|--:|---|--:|--:|--:|---|"]
    for place, (name, r) in enumerate(results.items(), 1):
        loss = f"{r['loss']:.4f}" if r["loss"] is not None else ""
        difference = f"{r['loss'] - softmax:+.4f}" if loss and softmax is not None else ""
        empty = f"{r['empty']:g} % (most: {r['most_empty']:g} %)" if r["most_empty"] else ""
        out.append(f"| {place} | `{name}` | {loss} | {difference} | {empty} | {r['happened']} |")
    return "\n".join(out) + "\n"


def picture(results):
    """A panel of validation curves for each group, each with softmax's, and a bar chart of the final losses."""
    plt = plot.pyplot()
    groups = {title: [] for title, _ in GROUPS}
    for name in results:
        groups[next(title for title, names in GROUPS if re.match(names, name))].append(name)
    figure = plt.figure(figsize=(15, 10.5), layout="constrained")
    curves, bars = figure.subfigures(1, 2, width_ratios=(3, 2))
    panels = curves.subplots(3, 2, sharex=True, sharey=True).flat
    late = [loss for r in results.values() for _, loss in r["curve"][len(r["curve"]) // 4:]]
    colors, color_of = plt.get_cmap("tab10").colors, {}    # a bar has its group's color, and so has the panel's title
    for axes, (title, names), group_color in zip(panels, groups.items(), plt.get_cmap("Dark2").colors):
        for i, name in enumerate(names):
            color_of[name] = group_color
            r = results[name]
            axes.plot([t / 1e3 for t, _ in r["curve"]], [loss for _, loss in r["curve"]], color=colors[i % len(colors)], linewidth=1.3,
                      marker="x" if r["exit"] else None, label=name + (f" ({r['happened']})" if r["exit"] else ""))
        if "softmax" in results and "softmax" not in names:
            axes.plot([t / 1e3 for t, _ in results["softmax"]["curve"]], [loss for _, loss in results["softmax"]["curve"]],
                      color="0.3", linewidth=1, linestyle="--", label="softmax")
        axes.set_title(title, color=group_color, weight="bold")
        if late:
            axes.set_ylim(min(late) - 0.1, max(late) + 0.1)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7.5, frameon=False, ncols=1 + (len(names) > 5))
    curves.supxlabel("thousand tokens", fontsize=10)
    curves.supylabel("validation loss, nats per token", fontsize=10)

    axes, done = bars.subplots(), [name for name, r in results.items() if r["loss"] is not None]
    base = "softmax" if "softmax" in done else next(iter(done), None)
    over = [results[name]["loss"] - results[base]["loss"] for name in done]
    axes.barh(done, over, color=[color_of[name] for name in done], height=0.75)
    for place, (name, value) in enumerate(zip(done, over)):
        axes.text(max(value, 0), place, f" {results[name]['loss']:.3f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title(f"Final validation loss; bars: difference from {base}")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False,
                                     epilog="Other flags are passed to the trainer.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and the results")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps per run (default 400)")
    parser.add_argument("--model", default="layers=4,heads=4,channels=128,ffn=352,tied=1,vocab=1024", help="the trainer's --model")
    parser.add_argument("--data", default="data/shakespeare-1024", help="folder with *_train_*.bin and *_val_*.bin")
    parser.add_argument("--attn", nargs="+", metavar="NAME",
                        help="normalizers, or gau/NAME for gated units (default: all presets, and two with gau/)")
    parser.add_argument("--jobs", type=int, default=2,
                        help="parallel runs (default 2), each with OMP_NUM_THREADS threads (default 1)")
    options, more = parser.parse_known_args()
    if options.steps < 1 or options.jobs < 1:
        parser.error("--steps and --jobs: expected 1 or more")

    lines = {name: command(name, options, more) for name in options.attn or [*presets(), "gau/softmax", "gau/relu2-n"]}
    run_all(((options.out / name, line) for name, line in lines.items() if not ended(options.out / name, line)), options.jobs)
    results = {name: summary(options.out / name) for name in lines}
    results = dict(sorted(results.items(), key=lambda item: (item[1]["loss"] is None, item[1]["loss"])))
    (options.out / "comparison.md").write_text(table(results))
    (options.out / "comparison.json").write_text(json.dumps(results, indent=1) + "\n")
    picture(results).savefig(options.out / "comparison.png", dpi=110)
    print(table(results), end="")
    return any(r["exit"] not in (0, DIVERGED) for r in results.values())


if __name__ == "__main__":
    sys.exit(main())

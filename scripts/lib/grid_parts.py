"""The parts of a grid, training runs and evaluations: which are done, which are left, their command lines, and what is
kept of their output."""
import datetime
import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from lib import drawing, files, run_folder
from lib.grid_file import Refused, Run, base_of
from lib.grid_store import (ROOT, attn_of, eval_attn, eval_identity, eval_key, fingerprint, identity, key_of, matches,
                        model_of, patterns_of, shards_of, sources_of, step_tokens)

DIVERGED = 5                     # exit code of the trainer
POINTS = 64                      # of a curve in results.json
# Flags of programs and of scripts of data/ that reach beyond the run folder or the dataset.
RISKY = {"matmuls": "writes a file of its own", "foreign-folder": "writes to folders of other users",
         "follow-links": "reads what links lead to"}
FORWARD = 1 / 3                  # the cost of a token in an evaluation, in tokens of training


@dataclass
class Part:
    """A training run, or an evaluation of one."""
    key: str
    run: Run
    eval: object             # None: the training run
    folder: Path             # where the program writes
    cost: float              # in tokens of training
    needs: list = field(default_factory=list)      # keys of parts that must have succeeded
    after: list = field(default_factory=list)      # keys of parts that must have ended
    label: str = ""          # for the user
    record: bool = True      # False: results.json has the numbers; only the checkpoint is missing here
    tries: int = 0
    not_before: float = 0    # when to try again, on the monotonic clock

    def log(self):
        return self.folder.with_name(self.folder.name + ".log")

    def output(self):
        """The log's text. The trainer prints samples as the bytes of their tokens, which may be invalid UTF-8."""
        return files.read(self.log(), files.METRICS).decode(errors="replace") if self.log().exists() else ""


def slug(text):
    return re.sub(r"[^\w.=+-]+", "-", text)


def divisor(steps, least):
    """The smallest divisor of steps that is at least `least`, so that something happens at the last step."""
    return next(steps // n for n in range(steps // max(1, least), 0, -1) if steps % n == 0)


# ---------------------------------------------------------------- programs

class Programs:
    """The trainer, with what is put before it, and eval_gpt2. To plan only, the CPU's programs stand in for those that
    are not built here."""

    def __init__(self, scale, launch=(), plan_only=False):
        self.launch, self.stand_in = list(launch), False
        self.train = self.find("TRAIN_GPT2", scale.program, plan_only)
        self.eval = self.find("EVAL_GPT2", scale.eval_program, plan_only)

    def find(self, variable, name, plan_only):
        try:
            return find(variable, name)
        except Refused:
            if not plan_only or not name.endswith("cu"):
                raise
            self.stand_in = True
            return find(variable, name.removesuffix("cu"))


def find(variable, name):
    """The path of a program: that in an environment variable, else the one in the repository's root."""
    path = Path(os.environ.get(variable, ROOT / name)).absolute()
    if not path.exists():
        raise Refused(f"{path}: no such program. Build it with `make {name}`, or name another one in {variable}.")
    return str(path)


def presets(program):
    """The names in the table that `--attn help` prints: its indented lines from the header to the first empty line."""
    done = subprocess.run([program, "--attn", "help"], capture_output=True, text=True, errors="replace")
    table = re.search(r"^  name .*\n((?:  .*\n)+)", done.stdout, re.M)
    if done.returncode or not table:
        raise Refused(f"{program} --attn help: expected a table of normalizers, found exit code {done.returncode}: "
                      f"{said(done.stderr)}")
    return re.findall(r"^  (\S+)", table[1], re.M)


def escapes(command):
    """Why a command of `prepare` may do more than make a dataset of this checkout, or ""."""
    try:
        script, *words = shlex.split(command) or [""]
    except ValueError:
        return "expected quotation marks in pairs"
    path, data = ROOT / script, (ROOT / "data").resolve()
    if path.resolve().parent != data or path.suffix != ".py" or not path.is_file():
        return "expected a script of data/"
    for word in words:
        paths = [Path(part) for part in re.split("[=,:]", word)]
        if any(path.is_absolute() or ".." in path.parts or str(path).startswith("~") for path in paths):
            return f"expected paths in this checkout, found {word}"
    outs = []
    for word, value in zip(words, [*words[1:], ""]):
        name, equals, own = word.partition("=")
        flags = [flag for flag in ("out", *RISKY) if len(name) > 2 and f"--{flag}".startswith(name)]    # or abbreviated
        if flags == ["out"]:
            outs.append(own if equals else value)
        elif flags:
            return f"--{flags[0]} {RISKY[flags[0]]}"
    if any(Path(out).parts[:1] not in (("data",), ("out",)) or len(Path(out).parts) < 2 for out in outs):
        return "expected --out in data/ or out/"
    return ""


def check_trust(grid):
    """Rejects what a grid file could start or write beyond the scripts of data/, our programs and the run folders."""
    scale, where = grid.scale, f"{grid.path}: [model.{grid.scale.name}]"
    found = [(f"{data.where}: prepare: {command}", why) for data in scale.data.values() for command in data.prepare
             if (why := escapes(command))]
    for key, name, kind in ("program", scale.program, "train"), ("eval-program", scale.eval_program, "eval"):
        ours = [f"{kind}_gpt2{ending}" for ending in ("", "cu", "cu_on_cpu")]
        if name not in ours:
            found.append((f"{where}: {key}", f"expected one of {', '.join(ours)}, found {name}"))
    for part in [*grid.rows.values(), *grid.evals]:
        found += [(f"{part.where}: flags", f"--{name} {what}") for name, what in RISKY.items() if name in part.flags]
    if found:
        raise Refused(f"{': '.join(found[0])}.\n  If you have read the file and trust it, pass --trust-grid.")


def check_words(words, needed, where):
    """Rejects flags that a program rejects. It checks them before it asks for its input, the flag `needed`."""
    found = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL).stderr
    if f"{needed} is missing" not in found:
        raise Refused(f"{where}: {said(found)}")


def check_flags(grid, programs):
    """Rejects what the trainer or eval_gpt2 does not have: flags, values, models, normalizers, tasks."""
    for row in grid.rows.values():
        for size in row.sizes:
            check_words([programs.train, *row_words(grid, row, size)], "--train-data", row.where)
    for e in grid.evals:
        check_words([programs.eval, *task_words(e)], "--model", e.where)
    attns = {eval_attn(grid, run, e): e.where for run in grid.runs() for e in grid.evals_of(run) if e.attn}
    for attn, where in attns.items():
        check_words([programs.train, f"--attn={attn}"], "--train-data", where)


# ---------------------------------------------------------------- texts

def known_texts(grid, results, name):
    """The training runs with results on the text of this name, in any grid."""
    return [e for e in results.entries.values()
            if (e["scale"], e["text"]) == (grid.scale.name, name) and e["identity"]["task"] == "train"]


def only_evaluated(grid, results, name):
    """The grid's evaluations with results on a text of their own of this name."""
    named = {e.name for e in grid.evals if e.data == name}
    return [e for e in results.entries.values()
            if (e["grid"], e["scale"]) == (grid.name, grid.scale.name) and e.get("eval") in named]


def texts_of(grid, results):
    """{name: [fingerprint to train on, to validate on]} of the texts at hand; else, those of the newest results. If
    nothing was trained on a text, the first one is ""."""
    found = {}
    for data in grid.scale.data.values():
        pair = [fingerprint(data.train), fingerprint(data.val)]
        if None in pair:
            known = known_texts(grid, results, data.name) or only_evaluated(grid, results, data.name)
            pair = max(known, key=lambda e: e["info"]["date"])["identity"]["text"] if known else None
        found[data.name] = ["", pair] if isinstance(pair, str) else pair
    return found


def missing(data):
    """Must this text be prepared?"""
    texts = [text for part in (data.train, data.val) for text, _ in sources_of(part)]
    return any(not shards_of(text) or any(matches(pattern + ".part") for pattern in patterns_of(text))
               for text in texts)


# ---------------------------------------------------------------- parts

class Plan:
    """All parts of a grid, in order, and which of them are left."""

    def __init__(self, grid, results, texts, out):
        self.grid, self.results, self.texts, self.out = grid, results, texts, out
        self.parts = {}
        for run in grid.runs():
            self.add_run(run)
        self.todo = self.left()
        self.add_checkpoints()

    def left(self):
        """The parts without a result. What starts from a run that diverged never has one."""
        def hopeless(part):
            return any((entry := self.results.entries.get(key)) and entry["outcome"] or hopeless(self.parts[key])
                       for key in part.needs)
        return [part for part in self.parts.values() if part.key not in self.results.entries and not hopeless(part)]

    def add_run(self, run):
        grid, row = self.grid, self.grid.rows[run.row]
        label = (f"{run.row} ({run.size}), seed {run.seed}" if len(grid.scale.sizes) > 1
                 else f"{run.row}, seed {run.seed}")
        part = Part(key_of(grid, run, self.texts), run, None, self.folder(run),
                    row.flags["steps"] * step_tokens(row.flags) + val_tokens(grid, row) * FORWARD, label=label)
        if base_of(row):
            base = key_of(grid, Run(base_of(row), run.size, run.seed), self.texts)
            (part.needs if row.init_from else part.after).append(base)
        if part.key in self.parts:
            note = f"{run.row} is the same run as {self.parts[part.key].run.row}."
            grid.notes += [note] * (note not in grid.notes)
        else:
            self.parts[part.key] = part
        for e in grid.evals_of(run):
            key = eval_key(grid, run, e, self.texts)
            most = eval_tokens(e, grid.scale.L, (grid.scale.data[e.data] if e.data else row.data).val)
            most *= 2 if e.attn else 1
            folder = part.folder / "eval" / f"{slug(e.name)}-{key[:10]}"
            self.parts.setdefault(key, Part(key, run, e, folder, most * FORWARD, [part.key],
                                            label=f"{label}, {e.name}"))

    def folder(self, run):
        """The name says what the run is, and its key tells apart runs whose flags or text differ."""
        key = key_of(self.grid, run, self.texts)
        return self.out / "runs" / f"{slug(attn_of(self.grid, run))}-s{run.seed}-{key[:10]}"

    def add_checkpoints(self):
        """A run whose numbers are known is trained again if a part that is left needs its checkpoint, which this folder
        lacks."""
        queue = list(self.todo)
        for part in queue:
            for key in part.needs:
                base = self.parts[key]
                known = self.results.entries.get(key)
                if base not in queue and not (known and known["outcome"]) and not checkpoint(self.grid, base).exists():
                    base.record = False
                    queue.append(base)
        self.todo = [part for part in self.parts.values() if part in queue]


@functools.cache
def tokens_in(text):
    """About how many tokens the shards of a text have; infinite before it is prepared."""
    paths = [path for path in shards_of(text) if path.suffix != ".mask"]
    return sum(path.stat().st_size // 2 for path in paths) if paths else math.inf


def val_tokens(grid, row):
    """About how many tokens a run's validations compute, by the trainer's defaults; a switch has one before and one
    after it."""
    flags = run_flags(grid, row)
    count = flags["steps"] // flags["val-every"] + 2 * bool(row.switch) if flags["val-every"] else 0
    return count * min(flags.get("val-tokens", 1 << 20), tokens_in(row.data.val))


def eval_tokens(e, L, text=None):
    """About how many tokens an evaluation computes, by eval_gpt2's defaults, at most those of the text."""
    lengths, samples = e.lengths or [L], e.flags.get("samples", 20)
    if e.task in ("loss", "positions"):
        return len(lengths) * min(e.flags.get("max-tokens", 1 << 20), tokens_in(text) if text else math.inf)
    if e.task == "needle":
        return sum(lengths) * samples * (1 if e.flags.get("random-depth") else len(e.flags.get("depths", range(5))))
    return 2 * samples * max(lengths) if e.task == "attention" and e.reads_text() else 0


def checkpoint(grid, part, step=0):
    """The folder of a run's last checkpoint, or of the one at a step."""
    return part.folder / "ckpt" / f"step-{step or grid.rows[part.run.row].flags['steps']:08d}"


# ---------------------------------------------------------------- command lines

def words_of(flags):
    """--NAME=VALUE of each flag: as one word, no value can pass for a flag."""
    def text(value):
        return ",".join(map(str, value)) if isinstance(value, list) else str(int(value) if value is True else value)
    return [f"--{name}={text(value)}" for name, value in flags.items()]


def from_root(path):
    """A path relative to the repository's root, where the programs run, if it lies there: then the whole folder may be
    moved."""
    return os.path.relpath(path, ROOT) if Path(path).is_relative_to(ROOT) else str(path)


def switches_from(grid, name):
    """The steps at which other rows continue this one under another normalizer."""
    return [row.switch["at"] for row in grid.rows.values() if row.switch and row.switch["from"] == name]


def run_flags(grid, row):
    """The row's flags, and when to validate and save if it does not say."""
    steps = row.flags["steps"]
    every = divisor(steps, steps // 8)
    flags = {"val-every": every, "ckpt-every": every, "keep": 1, "sample-every": 0} | row.flags
    at = switches_from(grid, row.name)
    if at:    # their first steps are copied from here
        flags |= {"ckpt-every": divisor(at[0], at[0] // 8), "keep": 0}
    return flags


def row_words(grid, row, size):
    """The trainer's flags for a row, without its data and seed."""
    flags = {} if row.init_from else {"model": model_of(grid, row, size)}
    if row.switch:
        flags |= {"attn": grid.rows[row.switch["from"]].attn, "attn-switch": f"{row.switch['at']}:{row.attn}"}
    elif row.attn:
        flags["attn"] = row.attn
    return words_of(flags | run_flags(grid, row))


def train_words(plan, part, programs, threads):
    """The trainer's command line. The same command resumes the run."""
    row = plan.grid.rows[part.run.row]
    data = {"train-data": row.data.train, "val-data": row.data.val}
    if row.init_from:
        data["init-from"] = from_root(checkpoint(plan.grid, plan.parts[part.needs[0]]))
    own = {"seed": part.run.seed, "threads": threads, "out": from_root(part.folder), "resume": 1}
    return [*programs.launch, programs.train, *words_of(data), *row_words(plan.grid, row, part.run.size),
            *words_of(own)]


def copy_base(plan, part):
    """Starts a run that switches from the other run's checkpoint at that step, if there is one. The numbers are those
    of a run from step 0."""
    row = plan.grid.rows[part.run.row]
    base = plan.parts.get(part.after[0]) if row.switch else None
    if not base or part.folder.exists() or not checkpoint(plan.grid, base, row.switch["at"]).exists():
        return
    temporary = part.folder.with_name(part.folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()       # fails if a link is in its place
    source = checkpoint(plan.grid, base, row.switch["at"])
    shutil.copytree(source, temporary / "ckpt" / source.name)
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy2(base.folder / name, temporary / name)
    temporary.rename(part.folder)


def task_words(e):
    """eval_gpt2's flags for an evaluation, without its model, normalizer and data."""
    return words_of({"task": e.task} | ({"seq-lens": e.lengths} if e.lengths else {}) | e.flags)


def eval_words(plan, part, programs, threads):
    grid, run, e = plan.grid, part.run, part.eval
    attn = eval_attn(grid, run, e)
    data = grid.scale.data[e.data] if e.data else grid.rows[run.row].data
    flags = {"model": from_root(checkpoint(grid, plan.parts[part.needs[0]]))}
    flags |= {"data": data.val} if e.reads_text() else {}
    flags |= {"attn": attn} if attn else {}
    # The report has pictures of all runs.
    own = {"picture": 0, "threads": threads, "out": from_root(part.folder)}
    return [programs.eval, *words_of(flags), *task_words(e), *words_of(own)]


# ---------------------------------------------------------------- what is kept

def thinned(x, y):
    """At most POINTS points of a curve, the last among them."""
    step = max(1, -(-len(x) // POINTS))
    kept = range(len(x) - 1, -1, -step)[::-1]
    return [[x[i], float(f"{y[i]:.5g}")] for i in kept if y[i] == y[i]]


def train_values(grid, part, diverged):
    """(values, curves) of a training run from its folder and its log."""
    try:
        lines = run_folder.read_metrics(part.folder)
    except run_folder.Refused:
        if not diverged:
            raise
        lines = []      # it diverged in its first step
    clip = grid.rows[part.run.row].flags.get("grad-clip", 1)
    norms = [x for x in run_folder.column(lines, "grad_norm") if x == x]
    empty = {int(step): float(share) / 100
             for step, share in re.findall(r"^step +(\d+)/.*\| (\S+?) ?% all-zero rows", part.output(), re.M)}
    last = lines[-1] if lines else {"step": 0, "tokens": 0}
    val = [[line["tokens"], line["val_loss"]] for line in lines if line.get("val_loss") is not None]
    clipped = sum(x > clip for x in norms) / len(norms) if clip and norms else 0.0
    values = {"val_loss": None if diverged or not val else val[-1][1], "grad_norm_max": max(norms, default=None),
              "diverged": int(diverged), "clipped": clipped, "steps": last["step"], "tokens": last["tokens"],
              "zero_rows": empty.get(last["step"], 0.0), "zero_rows_max": max(empty.values(), default=0.0)}
    curve = thinned(run_folder.column(lines, "tokens"), drawing.smooth(run_folder.column(lines, "loss")))
    return values | scalar_values(part.folder), {"loss": curve, "val": val}


def scalar_values(folder):
    """The learned scalars of the newest checkpoint: mean over the heads of each layer, and p_n with its fit."""
    try:
        found = drawing.read_scalars(folder)
    except run_folder.Refused:
        return {}
    values = {name: [layer[0] for layer in series[1][-1]] for name, series in found.items() if name != "p"}
    if "p" in found:
        a1, a2, r2 = drawing.fit_log(found["p"])
        values |= {"p": [float(f"{x:.6g}") for x in found["p"]], "p_a1": a1, "p_a2": a2,
                   "p_r2": None if r2 != r2 else r2}
    return values


def rows_of(report):
    """The results of an evaluation. With --attn, only those under that normalizer."""
    rows = report["results"]
    lineage = report["models"][0].get("lineage")
    return [row for row in rows if row["attn"] == lineage[-1]["attn"]] if lineage else rows


def loss_values(report):
    """{metric: {length: number}} of the tasks loss and positions; by_position has means over equal parts of the
    sequence."""
    rows = rows_of(report)
    values = {"loss": {str(row["seq_len"]): row["loss"] for row in rows},
              "zero_rows": {str(row["seq_len"]): row["all_zero_rows"] for row in rows}}
    for row in rows:
        if "loss_by_position" in row:
            losses, T = row["loss_by_position"], row["seq_len"]
            parts = min(T, 2 * POINTS)

            def part(start, end):      # null at a position: masked or, if the row's loss is null as well, not finite
                numbers = losses[start:end]
                return None if row["loss"] is None and None in numbers else mean(numbers)
            means = [part(T * i // parts, T * (i + 1) // parts) for i in range(parts)]
            values.setdefault("by_position", {})[str(T)] = means
            values.setdefault("last_eighth", {})[str(T)] = part(T - max(1, T // 8), T)
    return values


def mean(numbers):
    known = [x for x in numbers if x is not None]
    return float(f"{sum(known) / len(known):.7g}") if known else None


# Numbers in the results of other tasks that say what was measured, not how much.
LABELS = {"seq_len", "rope_theta", "prompt", "prompts", "sample", "depth", "tokens", "best_layer", "best_head",
          "map_cell"}


def numbers_in(value):
    """(key, number) of all numbers in nested objects and lists of objects."""
    if isinstance(value, list):
        for x in value:
            yield from numbers_in(x) if isinstance(x, (dict, list)) else ()
    elif isinstance(value, dict):
        for key, x in value.items():
            if isinstance(x, (int, float)) and not isinstance(x, bool) and key not in LABELS:
                yield key, x
            else:
                yield from numbers_in(x)


def other_values(report):
    """The numbers of any other task: {metric: {column: mean}}. The columns are the lengths, at each depth too for
    needles; with or without a leading end-of-text token for attention; and the mean over all."""
    found, unknown = {}, set()

    def add(key, column, value):
        found.setdefault(key, {}).setdefault(column, []).append(value)
    for row in rows_of(report):
        column = str(row["seq_len"]) if "seq_len" in row else ""
        if "leading_end_of_text" in row:
            column = "end-of-text" if row["leading_end_of_text"] else "plain"
        for key, value in numbers_in(row):
            for at in filter(None, (column, "mean")):
                add(key, at, value)
        for depth in row.get("depths", []):
            if "depth" in depth:
                add("right", f"{column} at {depth['depth']:g} %", depth["right"])
        unknown |= {(key, at) for key, value in row.items() if value is None for at in (column, "mean")}    # not finite
    return {key: {at: None if (key, at) in unknown else mean(numbers) for at, numbers in columns.items()}
            for key, columns in found.items()}


def said(log):
    """The last complaint in a log."""
    found = re.findall(r"^(?:train|eval)_gpt2\w*: (?!warning)(.*)", log, re.M)
    return found[-1] if found else (log.strip().splitlines() or ["no output"])[-1][:200]


def machine():
    """The processor's name and the number of cores that this process may use."""
    try:
        name = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text("utf-8"), re.M)[1]
    except (OSError, TypeError):
        name = "unknown processor"
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def entry_of(plan, part, code, seconds, threads):
    """The entry of results.json for a part that ended."""
    grid, run = plan.grid, part.run
    row = grid.rows[run.row]
    entry = {"grid": grid.name, "scale": grid.scale.name, "row": run.row, "size": run.size, "seed": run.seed,
             "text": row.data.name, "outcome": ""}
    info = {"date": datetime.date.today().isoformat(), "machine": machine(), "threads": threads}
    if part.eval:
        report = json.loads(files.read(part.folder / "eval.json", files.EVAL))
        entry |= {"eval": part.eval.name, "identity": eval_identity(grid, run, part.eval, plan.texts),
                  "values": loss_values(report) if part.eval.task in ("loss", "positions") else other_values(report)}
    else:
        values, curves = train_values(grid, part, code == DIVERGED)
        in_steps = run_folder.seconds(run_folder.read_metrics(part.folder))[-1] if values["steps"] else 0.0
        info["whole"], seconds = round(max(seconds, in_steps), 2), in_steps     # whole: with validation and start
        info["commit"] = run_folder.read_run(part.folder).get("commit", "unknown")
        entry |= {"identity": identity(grid, run, plan.texts), "values": values, "curves": curves,
                  "outcome": f"diverged at step {values['steps'] + 1}" if code == DIVERGED else ""}
    return finite(entry | {"info": info | {"seconds": round(seconds, 2)}})


def finite(value):
    """Replaces what JSON cannot hold, NaN and infinity, by None."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value

"""Runs the parts of a grid side by side, records each one as it ends, and estimates how long the rest takes."""
import contextlib
import ctypes
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from lib import files, grid_parts
from lib.grid_file import Refused
from lib.grid_parts import DIVERGED
from lib.grid_store import ROOT, make_folder, step_tokens

BUSY = 7                      # exit code: the run folder is in use
TRIES, PAUSE = 60, 2          # how often, and after how many seconds, to try again
POLL = 0.2
# Guesses for the estimate before any part has ended.
GAP = 0.3                     # seconds until the end of a part is noticed and recorded, and the next one starts
SAVE, DISK = 0.1, 3e8         # seconds to save a small checkpoint; bytes per second of a large one


class Busy(Refused):
    """Another process works in this folder."""


def lock(out):
    """Locks the folder of the runs for this process. The lock of a dead process has no effect."""
    make_folder("--out", out)
    try:
        file = files.extend(out / "lock")
    except OSError as error:
        raise Refused(f"--out: {out}/lock: {error.strerror}. Pass another --out.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise Busy(f"{out}: another grid.py (process {file.read().strip() or 'unknown'}) is working here.\n"
                   f"  Wait for it, or pass another --out.") from None
    except OSError as error:
        raise Refused(f"--out: {out}/lock: cannot lock it: {error.strerror}.\n"
                      f"  Pass an --out on a file system with locks.") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def prepare(grid):
    """Runs the commands that make the texts that are missing."""
    for data in grid.scale.data.values():
        if not grid_parts.missing(data):
            continue
        if not data.prepare:
            raise Refused(f"{data.where}: no shards match {data.train} and {data.val}.\n"
                          "  Make them, or add prepare = [...] with the commands that do.")
        for command in data.prepare:
            words = shlex.split(command)
            print(f"== {shlex.join([sys.executable, *words])}", flush=True)
            if code := subprocess.run([sys.executable, *words], cwd=ROOT, stdin=subprocess.DEVNULL,
                                      preexec_fn=die_with_parent).returncode:
                raise Refused(f"{data.where}: {command}\n  ended with exit code {code}. Its message is above.")
        if grid_parts.missing(data):
            raise Refused(f"{data.where}: prepare made no shards that match {data.train} and {data.val}.")


# ---------------------------------------------------------------- processes

def die_with_parent():
    """In a child: a SIGTERM when grid.py ends, even by kill -9, so that the trainer saves a checkpoint and frees its
    folder."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)     # PR_SET_PDEATHSIG


def start(words, log, threads):
    """Starts a program in the repository's root; its output is appended to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with files.extend(log) as file:
        # A group of its own, because a second Ctrl-C would end it without a checkpoint; but the same session, by which
        # Linux shares the cores.
        return subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                preexec_fn=die_with_parent,
                                env=os.environ | {"OMP_NUM_THREADS": str(threads)}, process_group=0)


def stopped(number, frame):
    raise KeyboardInterrupt


# ---------------------------------------------------------------- time and disk

def duration(seconds):
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Estimate:
    """How long parts take. Those of a kind, training or an evaluation, take as long as the finished ones here, in
    proportion to their costs; before any has finished, as long as the measured speed in training says."""

    def __init__(self, plan, speed=None, parameters=None, start=None):
        self.plan, self.speed, self.parameters, self.start = plan, speed, parameters or 0, start
        self.done = {}      # {kind: [seconds, cost, count]}
        entries = [(part, plan.results.entries[part.key]) for part in plan.parts.values()
                   if part.key in plan.results.entries]
        here = [pair for pair in entries if pair[1]["info"].get("machine") == grid_parts.machine()]
        for part, entry in here or entries * (not speed):
            self.add(part, entry)

    @staticmethod
    def kind(part):
        return part.eval.name if part.eval else "train"

    def add(self, part, entry):
        """Counts a finished part."""
        share = 1.0
        if not part.eval:      # a run that diverged is shorter
            flags = self.plan.grid.rows[part.run.row].flags
            share = entry["values"]["steps"] / flags["steps"]
        seconds = entry["info"].get("whole") or entry["info"]["seconds"]
        if seconds and share:
            total = self.done.setdefault(self.kind(part), [0.0, 0.0, 0])
            for i, x in enumerate((seconds, part.cost * share, 1)):
                total[i] += x

    def seconds(self, part):
        """Of one part; None if nothing is known."""
        if self.kind(part) in self.done:
            seconds, cost, count = self.done[self.kind(part)]
            return GAP + (seconds * part.cost / cost if cost else seconds / count)
        if self.speed:
            saves, size = (0, 0) if part.eval else checkpoints(self.plan, part, self.parameters)
            return GAP + self.start + part.cost / self.speed + saves * (SAVE + size / DISK)
        seconds, cost, _ = self.done.get("train", (0, 0, 0))
        return GAP + part.cost * seconds / cost if cost else None

    def total(self, parts, jobs):
        """Of all these parts, `jobs` at a time; an evaluation waits for its run."""
        each = {part.key: self.seconds(part) for part in parts}
        if None in each.values():
            return None
        chains = [each[part.key] + max([each.get(key, 0.0) for key in part.needs], default=0.0) for part in parts]
        return max([sum(each.values()) / jobs, *chains])


def measured(plan, programs, jobs, threads, limit=60):
    """(tokens per second of one of `jobs` at a time, parameters, seconds to start) of a few steps of the first run that
    is left; None for what it does not say within the limit."""
    part = next((part for part in plan.todo if not part.eval and not plan.grid.rows[part.run.row].init_from), None)
    if not part or grid_parts.missing(plan.grid.rows[part.run.row].data):
        return None, None, None
    flags = plan.grid.rows[part.run.row].flags
    words = grid_parts.train_words(plan, part, programs, threads)
    words = [word for word in words if not word.startswith(("--out=", "--resume=", "--attn-switch="))]
    words += ["--steps=6", "--val-every=0", "--warmup=0"]
    if "batch" in flags:
        words.append(f"--total-batch-tokens={flags['batch'] * max(flags['seq-len'])}")
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        quiet = subprocess.DEVNULL
        started = [subprocess.Popen(words, cwd=ROOT, stdin=quiet, stdout=quiet if i else output, stderr=quiet,
                                    preexec_fn=die_with_parent) for i in range(min(jobs, len(plan.todo)))]
        try:
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, limit - (time.monotonic() - began)))
        finally:
            for process in started:
                process.kill()
                process.wait()
        took = time.monotonic() - began
        output.seek(0)
        text = output.read().decode(errors="replace")
    speeds = [float(number) * {"": 1, "k": 1e3, "M": 1e6}[unit]
              for number, unit in re.findall(r"([\d.]+) ?([kM]?) tok/s", text)]
    parameters = re.search(r"^model +([\d,]+) parameters", text, re.M)
    start = max(0.0, took - sum(step_tokens(flags) / speed for speed in speeds if speed))
    return speeds[-1] if speeds else None, int(parameters[1].replace(",", "")) if parameters else None, start


def checkpoints(plan, part, parameters):
    """(how many checkpoints a run saves, the bytes of each): float32 weights and two moments, and with bf16 a rounded
    copy."""
    flags = grid_parts.run_flags(plan.grid, plan.grid.rows[part.run.row])
    return (flags["steps"] // max(1, flags["ckpt-every"]) + 1,
            parameters * (14 if flags.get("dtype") == "bf16" else 12))


def disk(plan, parameters):
    """Bytes of the checkpoints that are left to write."""
    total = 0
    for part in plan.todo:
        if not part.eval:
            saves, size = checkpoints(plan, part, parameters)
            total += size * (grid_parts.run_flags(plan.grid, plan.grid.rows[part.run.row])["keep"] or saves)
    return total


def size(number):
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def count(number):
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"


def many(number, word):
    return f"{number} {word}{'' if number == 1 else 's'}"


# ---------------------------------------------------------------- the work

class Work:
    """Runs what is left of a plan."""

    def __init__(self, plan, programs, jobs, threads, commit=False, estimate=None):
        self.plan, self.programs, self.jobs, self.threads, self.commit = plan, programs, jobs, threads, commit
        self.waiting, self.running = list(plan.todo), []
        self.failed, self.ended = {}, 0
        self.began = self.shown = time.monotonic()
        self.estimate = estimate

    def run(self):
        """Returns {label: what happened} of the parts that failed. On a signal, the trainers save checkpoints, and
        KeyboardInterrupt passes."""
        try:
            while self.waiting or self.running:
                self.start_ready()
                self.reap()
                self.show()
                time.sleep(POLL)
        finally:
            for _, process, _ in self.running:
                process.terminate()
            for _, process, _ in self.running:
                process.wait()
        return self.failed

    def ready(self, part):
        """Can it start now? A part whose base failed or diverged fails too."""
        pending = {p.key for p in self.waiting} | {p.key for p, _, _ in self.running}
        for key in part.needs:
            if key in pending:
                return False
            entry = self.plan.results.entries.get(key)
            if not entry or entry["outcome"]:
                base = self.plan.parts[key]
                self.fail(part, f"not run, because {base.label} " + (entry["outcome"] if entry else "failed"),
                          quiet=bool(entry))
                return False
        return not pending.intersection(part.after) and time.monotonic() >= part.not_before

    def start_ready(self):
        for part in list(self.waiting):
            if len(self.running) < self.jobs and self.ready(part):
                self.waiting.remove(part)
                self.begin(part)

    def begin(self, part):
        if self.collected(part):
            return
        if part.eval:
            words = grid_parts.eval_words(self.plan, part, self.programs, self.threads)
        else:
            grid_parts.copy_base(self.plan, part)
            words = grid_parts.train_words(self.plan, part, self.programs, self.threads)
        self.running.append((part, start(words, part.log(), self.threads), time.monotonic()))

    def collected(self, part):
        """Was this part finished by a process that was killed before it recorded the result?"""
        done = part.folder / "eval.json" if part.eval else grid_parts.checkpoint(self.plan.grid, part)
        if done.exists():
            self.finish(part, 0, 0.0)
        return done.exists()

    def reap(self):
        for job in [job for job in self.running if job[1].poll() is not None]:
            self.running.remove(job)
            part, process, began = job
            code = process.returncode
            if code == BUSY and part.tries < TRIES:      # the trainer of a killed grid.py still saves its checkpoint
                part.tries, part.not_before = part.tries + 1, time.monotonic() + PAUSE
                self.waiting.insert(0, part)
            elif code in (0, DIVERGED) and not (code and part.eval):
                self.finish(part, code, time.monotonic() - began)
            else:
                self.fail(part, f"exit {code}: {grid_parts.said(part.output())}")

    def finish(self, part, code, seconds):
        """Records a part that ended well, or a run that diverged."""
        try:
            entry = grid_parts.entry_of(self.plan, part, code, seconds, self.threads)
        except (grid_parts.plot.Refused, OSError, ValueError, KeyError) as error:
            self.fail(part, f"no result: {type(error).__name__}: {error}")
            return
        if part.record:
            self.plan.results.add(part.key, entry)
        self.ended += 1
        self.estimate.add(part, entry)
        loss = entry["values"].get("val_loss") if not part.eval else None
        done = entry["outcome"] or (f"validation loss {loss:.4f}" if loss is not None else "done")
        self.say(f"{part.label}: {done}{self.remaining()}")
        if self.commit and not any(p.run == part.run for p in self.waiting):
            self.commit_results(part)

    def fail(self, part, text, quiet=False):
        """A quiet failure follows from a divergence, which is a result."""
        if part in self.waiting:
            self.waiting.remove(part)
        if not quiet:
            self.failed[part.label] = f"{text} ({part.log()})" if part.log().exists() else text
        self.say(f"{part.label}: {text}")

    def commit_results(self, part):
        path = str(self.plan.results.path.absolute())
        name = f"{self.plan.grid.name} at scale {self.plan.grid.scale.name}"
        git = ["git", "-C", str(self.plan.results.path.absolute().parent)]
        made = subprocess.run([*git, "add", path], capture_output=True, text=True)
        if made.returncode == 0:
            message = f"Results of grid {name}: {part.run.row}, seed {part.run.seed}"
            made = subprocess.run([*git, "commit", "--quiet", "-m", message, "--", path], capture_output=True,
                                  text=True)
        if made.returncode and "nothing to commit" not in made.stdout:
            self.say(f"warning: git could not commit {path}: {(made.stderr or made.stdout).strip()}")

    # ---- progress

    def spent(self, part, began):
        """The seconds that a running part need not take any more."""
        if part.eval:
            return min(time.monotonic() - began, self.estimate.seconds(part))
        steps = self.plan.grid.rows[part.run.row].flags["steps"]
        return self.estimate.seconds(part) * min(1.0, self.steps_of(part) / steps)

    @staticmethod
    def steps_of(part):
        """The last step in a run's metrics."""
        try:
            with files.open_regular(part.folder / "metrics.jsonl") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                found = re.findall(rb'^\{"step": (\d+)', file.read(), re.M)
        except OSError:
            return 0
        return int(found[-1]) if found else 0

    def left(self):
        """Seconds until all is done, or None."""
        total = self.estimate.total(self.waiting + [part for part, _, _ in self.running], self.jobs)
        return total and max(0.0, total - sum(self.spent(part, began) for part, _, began in self.running) / self.jobs)

    def remaining(self):
        parts, seconds = len(self.waiting) + len(self.running), self.left()
        if not parts:
            return ""
        return f"; {many(parts, 'part')} left" + (f", about {duration(seconds)}" if seconds else "")

    def say(self, text):
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=files.raw(sys.stderr), flush=True)
        print(text, flush=True)

    def show(self):
        """A line with what is running, on a terminal, every second."""
        if not sys.stderr.isatty() or time.monotonic() - self.shown < 1:
            return
        self.shown = time.monotonic()
        rows = self.plan.grid.rows
        now = [part.label if part.eval
               else f"{part.label} step {self.steps_of(part)}/{rows[part.run.row].flags['steps']}"
               for part, _, _ in self.running]
        line = f"{self.ended} done | " + " | ".join(now) + self.remaining().replace(";", " |", 1)
        line = files.escaped(line)[:shutil.get_terminal_size().columns - 1]
        print(f"\r\033[K{line}", end="", file=files.raw(sys.stderr), flush=True)

"""Sends the metrics of a run to Weights & Biases or TensorBoard, while the trainer writes them or afterwards.

    .venv/bin/python scripts/follow.py out/a --tensorboard          # out/a/tensorboard; then: tensorboard --logdir out
    .venv/bin/python scripts/follow.py out/a --wandb --project gpt  # needs: pip install wandb
    .venv/bin/python scripts/follow.py out/a --wandb --once         # what is there, and no more

It waits for a run that has not begun, if its folder is missing or empty. It ends when the run has made all its --steps,
or with Ctrl-C; it keeps following a run that stops and resumes. Started again, it continues. Steps that a resumed run
repeats are sent once; if they differ, the newer ones count.
"""
import argparse
import json
import os
import signal
import sys
import time
import uuid
from pathlib import Path

from lib import command_line, events, files, run_folder
from lib.run_folder import Refused

DAY = 86400     # seconds
SAME = ("loss", "grad_norm", "lr", "val_loss")      # what a repeated step has to the last bit


def scalars(line):
    """{name: number} of a line of metrics. Of the learned scalars, [mean, least, largest] of each layer's heads; of
    what is divided further, such as the norms, each part, and each layer of it."""
    found = {}

    def add(name, value):
        if isinstance(value, dict):
            for part, x in value.items():
                add(f"{name}/{part}", x)
        elif isinstance(value, list):
            for layer, x in enumerate(value):
                parts = zip((" mean", " minimum", " maximum"), x) if isinstance(x, list) else [("", x)]
                for what, number in parts:
                    add(f"{name}/layer {layer}{what}", number)
        elif isinstance(value, (int, float)):
            found[name] = value
    for key, value in line.items():
        if key != "step":
            add(key, value)
    return found


class Metrics:
    """Reads metrics.jsonl as it grows. A resumed run replaces the file, and then it is read from its start again."""

    def __init__(self, run):
        self.path, self.file, self.number = Path(run) / "metrics.jsonl", None, 0

    def reopen(self):
        """Opens the file if it is new. The old one stays open until then, so that the new one is another inode."""
        there = os.stat(self.path)
        if self.file and os.path.samestat(there, os.fstat(self.file.fileno())) and there.st_size >= self.file.tell():
            return
        file = files.open_regular(self.path, files.METRICS)
        self.close()
        self.file, self.number = file, 0

    def new_lines(self):
        """The complete lines since the last call."""
        try:
            self.reopen()
        except FileNotFoundError:
            return []
        start, text, lines = self.file.tell(), self.file.read(), []
        size = text.rfind(b"\n") + 1
        self.file.seek(start + size)
        for line in text[:size].splitlines():
            self.number += 1
            lines.append(run_folder.parse_line(self.path, self.number, line))
        return lines

    def close(self):
        if self.file:
            self.file.close()


# ---------------------------------------------------------------- where the metrics go
# write(step, seconds, scalars) adds a step; restart(step, seconds) voids it and later ones; flush() after some of them.

class TensorBoard(events.EventFile):
    """Begins anew each time that follow.py is started."""
    first = 0       # the last step that was sent before

    def __init__(self, run, folder, lines):
        path = folder / "events.out.tfevents.0.follow"
        super().__init__(path, run_folder.began(run, lines) if lines else time.time())
        print(f"follow.py: writing {path}")


class Wandb:
    """RUN/wandb.json has the run's id, and the last step when follow.py ended, so that it can be started again. If it
    was killed, wandb may have lost what it had not yet written: the steps since are sent again, unless the server knows
    the last one that arrived."""

    def __init__(self, run, project):
        try:
            import wandb
        except ImportError:
            raise Refused("wandb is not installed. Install it (pip install wandb), or use --tensorboard, which "
                               "needs no package.")
        files.refuse_link(Path(run) / "wandb")
        self.state = Path(run) / "wandb.json"
        saved = run_folder.read_json(self.state)
        self.id, self.first = saved.get("id", uuid.uuid4().hex[:8]), saved.get("step", 0)
        try:
            self.run = wandb.init(project=project, name=Path(run).resolve().name, id=self.id, resume="allow",
                                  dir=str(run), config=run_folder.read_run(run)["arguments"])
        except Exception as error:      # wandb's own, or the network's
            reason = str(error).rstrip(".")
            raise Refused(f"wandb cannot start: {reason}. Run `wandb login`, or set WANDB_MODE=offline.")
        if self.run.resumed:
            self.first = int(self.run.summary.get("step") or 0)
        self.step = self.first
        self.save(saved.get("step", 0))
        # An axis of its own: wandb's step cannot go back, but a run that resumes from a checkpoint does.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step, seconds, numbers):
        self.run.log({"step": step, "seconds": seconds, **numbers})
        self.step = step

    def restart(self, step, seconds):
        print(f"follow.py: the run differs from step {step} on; wandb shows both", file=sys.stderr)

    def save(self, step):
        files.replace(self.state, json.dumps({"id": self.id, "step": step}).encode())

    def flush(self):
        pass      # wandb writes when it likes

    def close(self):
        self.run.finish()
        self.save(self.step)


# ---------------------------------------------------------------- following

class Follower:
    def __init__(self, sink):
        self.sink, self.before, self.last = sink, sink.first, 0    # before: steps up to here have been sent earlier
        self.sent = {}                                             # {step: (what repeats to the last bit, seconds)}

    def take(self, line):
        step, numbers = line["step"], [line.get(key) for key in SAME]
        if step in self.sent and self.sent[step][0] == numbers:
            return
        before = self.sent[step - 1][1] if step - 1 in self.sent else 0.0
        seconds = before + (line.get("ms") or 0) / 1e3
        if step <= self.last:
            self.sink.restart(step, seconds)
            self.before = min(self.before, step - 1)
            self.sent = {number: value for number, value in self.sent.items() if number < step}
        if step > self.before:
            self.sink.write(step, seconds, scalars(line))
        self.sent[step], self.last = (numbers, seconds), step


def contents(run):
    """The names in a folder; none if there is no folder."""
    try:
        return set(os.listdir(run))
    except FileNotFoundError:
        return set()
    except NotADirectoryError:
        raise Refused(f"{run}: expected a run folder, the trainer's --out; found a file. Check the path.")


def wait_for_run(run, options):
    """Returns when the run has begun. Before that, its folder is missing or empty, or has the trainer's lock file."""
    waits = False
    while not (names := contents(run)) & {"run.json", "metrics.jsonl"}:
        if options.once or names and "lock" not in names:
            raise Refused(f"{run}: expected a run folder, the trainer's --out; found neither run.json nor "
                               "metrics.jsonl there. Check the path, or start the trainer first.")
        if not waits:
            print(f"follow.py: {run}: waiting for the trainer to begin this run", flush=True)
            waits = True
        time.sleep(options.interval)


def is_complete(run, last):
    arguments = run_folder.read_run(run).get("arguments")
    steps = arguments.get("steps") if isinstance(arguments, dict) else None
    return isinstance(steps, int) and last >= steps


def follow(run, sink, options, metrics, lines):
    follower = Follower(sink)
    while True:
        for line in lines:
            follower.take(line)
        if lines:
            sink.flush()
        if options.once or is_complete(run, follower.last):
            print(f"follow.py: {run}: {follower.last} steps")
            return
        time.sleep(options.interval)
        lines = metrics.new_lines()


def interrupt(*_):
    raise KeyboardInterrupt


def seconds_of(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= DAY:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of seconds above 0, at most {DAY:,}")
    return value


def flags():
    parser = command_line.parser(__doc__, "doc/reports.md")
    parser.add_argument("run", metavar="RUN", help="run folder, the trainer's --out")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--wandb", action="store_true", help="send them to Weights & Biases")
    where.add_argument("--tensorboard", metavar="DIR", nargs="?", const="", help="write an event file to DIR "
                       "(default: tensorboard in the run folder)")
    parser.add_argument("--project", default="attn.c", help="project in Weights & Biases (default: %(default)s)")
    parser.add_argument("--interval", metavar="S", type=seconds_of, default=5.0,
                        help="seconds between looks at the file (default: %(default)g)")
    parser.add_argument("--once", action="store_true", help="send the steps so far, and end")
    return parser.parse_args()


def main():
    files.print_escapes()
    options = flags()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        wait_for_run(options.run, options)
        metrics = Metrics(options.run)
        lines = metrics.new_lines()
        if options.wandb:
            sink = Wandb(options.run, options.project)
        else:
            folder = Path(options.tensorboard or Path(options.run) / "tensorboard")
            if not options.tensorboard:
                files.refuse_link(folder)
            sink = TensorBoard(options.run, folder, lines)
        try:
            follow(options.run, sink, options, metrics, lines)
        finally:
            sink.close()
    except (Refused, OSError) as error:
        filename = getattr(error, "filename", None)
        print(f"follow.py: {f'{filename}: {error.strerror}.' if filename else error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""When each part of a step on several GPUs runs, by the program's own order and the times of step_model.py.

    flags="--model layers=12,heads=1,channels=64,ffn=40 --batch 2 --seq-len 16 --dtype bf16 --steps 3 --graphs 0"
    for zero in 0 1; do
        CUDA_ON_CPU_SCHEDULE=build/zero$zero scripts/launch.sh 2 ./train_gpt2cu_on_cpu \\
            --train-data GLOB $flags --zero $zero --out build/timeline-$zero
    done
    python3 dev/bench/timeline.py --all-reduce $(ls build/zero0.* | head -1) --zero $(ls build/zero1.* | head -1) \\
        --png build/timeline.png

The emulation (dev/cuda_on_cpu) logs what the trainer queues in each stream, and which events a stream waits for. That
does not depend on the widths of the model or the number of tokens, so a tiny model with as many layers does. From the
update of the last step but one to that of the last, every launch and every sum gets the time that step_model.py gives
that of the large model; then both streams are played: an operation starts when the one before it in its stream has
ended, and so have those that the stream waits for. Nothing here is measured.
"""
import argparse
import itertools
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import step_model
from step_model import DEVICES, LINK_SHARE, Run, gathers, launches, numbers, parse_model, phases, reductions, update


@dataclass
class Operation:
    number: int
    stream: int
    after: int                  # 0, or the operation that it waits for
    name: str                   # "" for a wait, and for the recording of an event
    phase: str = ""
    seconds: float = 0.0
    start: float = 0.0
    end: float = 0.0


def short(name):
    """A kernel's name without its arguments, a matmul's without its sizes."""
    matmul = re.match(r"cublasLtMatmul .*?( \+ C)?$", name)
    if matmul:
        return "cublasLtMatmul" + (matmul[1] or "")
    return re.sub(r"^void |[<(].*", "", name)


def read(path):
    """[Operation] of one rank's log."""
    lines = [line.split(" ", 3) for line in Path(path).read_text().splitlines()]
    operations = [Operation(int(n), int(stream), int(after), short(name)) for n, stream, after, name in lines]
    if any(o.name == "cudaGraphLaunch" for o in operations):
        raise SystemExit(f"timeline: {path}: the run used CUDA graphs; run it with --graphs 0")
    return operations


def last_step(operations):
    """(operations between the updates of the last two steps and with the latter, the compute stream, that of the
    sums)."""
    updates = [i for i, o in enumerate(operations) if o.name == "adamw_kernel"]
    sums = {o.stream for o in operations if o.name.startswith("nccl")}
    if len(updates) < 2 or len(sums) != 1:
        raise SystemExit("timeline: expected the log of a run of at least two steps on several ranks")
    return operations[updates[-2] + 1:updates[-1] + 1], operations[updates[-1]].stream, sums.pop()


def groups(operations, name):
    """[(name, neighbors of that name)], as a function gives their names."""
    return [(key, list(group)) for key, group in itertools.groupby(operations, name)]


def time_launches(operations, run):
    """Gives the launches of the compute stream the model's phases and times. Neighbors of the same name share them: the
    number of stages of the embedding's gradient depends on the number of tokens."""
    expected = launches(run)
    end = len(update(run)) - [launch.name for launch in update(run)].index("adamw_kernel") - 1
    expected = groups(expected[-end:] + expected[:-end], lambda launch: short(launch.name))
    found = groups([o for o in operations if o.name], lambda o: o.name)
    names = [[name for name, _ in side] for side in (found, expected)]
    if names[0] != names[1]:
        at = next((i for i, pair in enumerate(zip(*names)) if pair[0] != pair[1]), min(map(len, names)))
        there, here = (side[at:at + 3] for side in names)
        raise SystemExit(f"timeline: launch {at}: {there} in the log, {here} in the model; are layers, tied, --zero "
                         "and the like the same in both?")
    for (_, group), (_, model) in zip(found, expected):
        for o in group:
            o.phase = model[0].phase
            o.seconds = sum(launch.seconds(run.device) for launch in model) / len(group)


def time_sums(operations, run):
    """Gives the first operation of each sum its time. A sum lies between a wait and the recording of an event. Returns
    [(name, its operations)]."""
    found, current = [], []
    for o in operations:
        if o.name:
            current.append(o)
        elif current:
            found.append(current)
            current = []
    L = run.model.layers
    buckets = ["embedding", *(f"layer {i}" for i in range(L)), "rest"]
    model = [*((f"weights: {name}", s) for name, s in zip(buckets, gathers(run))),
             *((f"gradients: {name}", s) for name, s in zip(reversed(buckets), reductions(run))),
             ("loss and norm", numbers(run))]
    if len(found) != len(model):
        raise SystemExit(f"timeline: {len(found)} sums in the log, {len(model)} in the model; is --zero the same?")
    for group, (name, s) in zip(found, model):
        group[0].seconds = s.seconds
        group[0].phase = name.split(":")[0]
    return [(name, group) for group, (name, _) in zip(found, model)]


def play(operations):
    """Sets when each operation starts and ends, in seconds from the first."""
    free, ended = {}, {}
    for o in operations:
        o.start = max(free.get(o.stream, 0.0), ended.get(o.after, 0.0))
        o.end = o.start + o.seconds
        free[o.stream] = ended[o.number] = o.end


@dataclass
class Timeline:
    launches: list              # [Operation] of the compute stream, named ones
    sums: list                  # [(name, start, end)]

    @property
    def seconds(self):
        return self.launches[-1].end

    def waits(self):
        """[(start, end)] of the compute stream."""
        pairs = zip([None, *self.launches], self.launches)
        gaps = [(before.end if before else 0.0, o.start) for before, o in pairs]
        return [(start, end) for start, end in gaps if end - start > 1e-9]


def timeline(path, run):
    operations, compute, sums = last_step(read(path))
    mine = [o for o in operations if o.stream == compute]
    time_launches(mine, run)
    named = time_sums([o for o in operations if o.stream == sums], run)
    play(operations)
    return Timeline([o for o in mine if o.name], [(name, group[0].start, group[-1].end) for name, group in named])


def report(t, text):
    lines = [f"Modeled, not measured: {text}; from one update to the next {1e3 * t.seconds:.2f} ms, of which the "
             f"device waits {1e3 * sum(end - start for start, end in t.waits()):.2f} ms", "",
             f"{'sum over ranks':<24}{'starts':>9}{'ends':>9}  ms"]
    lines += [f"{name:<24}{1e3 * start:9.2f}{1e3 * end:9.2f}" for name, start, end in t.sums]
    lines += ["", "the device waits from " + ", ".join(f"{1e3 * start:.2f} to {1e3 * end:.2f}" for start, end in
                                                       t.waits()) + " ms"]
    return "\n".join(lines)


def draw(rows, path):
    """A pair of bars, the device's work and the sums, for each (title, Timeline)."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    import canvas  # noqa: F401
    import matplotlib.pyplot as plt
    names = [key for key in phases() if any(o.phase == key for _, t in rows for o in t.launches)]
    colors = dict(zip(names, plt.cm.tab20.colors))
    colors |= {"gradients": "black", "weights": "tab:cyan", "loss and norm": "tab:olive"}
    figure, axes = plt.subplots(len(rows), 1, figsize=(11, 1 + 1.3 * len(rows)), sharex=True, squeeze=False)
    for (title, t), ax in zip(rows, axes[:, 0]):
        for o in t.launches:
            ax.broken_barh([(1e3 * o.start, 1e3 * o.seconds)], (1.1, 0.8), color=colors[o.phase], linewidth=0)
        for name, start, end in t.sums:
            ax.broken_barh([(1e3 * start, 1e3 * (end - start))], (0.1, 0.8), color=colors[name.split(":")[0]],
                           linewidth=0)
        ax.set(yticks=(0.5, 1.5), yticklabels=("sums", "kernels"), ylim=(0, 2), title=title)
        ax.title.set_fontsize(10)
    longest = max(t.seconds for _, t in rows)
    axes[-1, 0].set(xlabel="milliseconds from one update to the next (modeled)", xlim=(0, 1e3 * longest))
    labels = {key: phases().get(key, key) for key in (*names, "gradients", "weights", "loss and norm")}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[key], label=label) for key, label in labels.items()]
    figure.legend(handles=handles, loc="lower center", ncol=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.5 / (1 + 1.3 * len(rows)), 1, 1))
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all-reduce", metavar="LOG", help="one rank's log of a run with --zero 0")
    parser.add_argument("--zero", metavar="LOG", help="one rank's log of a run with --zero 1")
    parser.add_argument("--model", default="124M", help="whose times to use; it has as many layers as the logged one")
    parser.add_argument("--device", default="h100", choices=DEVICES)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a micro-batch on each rank")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--link", default="nvlink", choices=LINK_SHARE)
    parser.add_argument("--png", metavar="FILE", help="draw a picture")
    o = parser.parse_args()
    if not o.all_reduce and not o.zero:
        parser.error("expected --all-reduce LOG, --zero LOG or both")
    run = Run(parse_model(o.model), o.batch, o.seq_len, DEVICES[o.device], ranks=o.ranks, link=o.link)
    rows = []
    for log, zero, name in ((o.all_reduce, False, "all-reduce"), (o.zero, True, "ZeRO-1")):
        if log:
            rows.append((f"{o.model}, {o.ranks} {run.device.name}, {o.link}, {name}",
                         timeline(log, replace(run, zero=zero))))
    print("\n\n".join(report(t, text) for text, t in rows))
    if o.png:
        draw(rows, o.png)


if __name__ == "__main__":
    main()

"""A signal at any moment, whatever the threads compute, ends a run with exit code 75 and a checkpoint that resumes to
the same bits.

No signal handler may run on a compute thread: for a large k, oneDNN's generated matmul code points the stack register
at its workspace on the heap, and a handler's frame would overwrite the heap below it. The shape here is one whose
matmuls do that.

    STOPS=all .venv/bin/python -m pytest dev/tests/test_signals.py             all cases; otherwise those of CHOSEN
    STOPS=loops-2t-1r .venv/bin/python -m pytest dev/tests/test_signals.py     those with this text in their name
"""
import fcntl
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from trainer import (LAUNCH, ROOT, STOP_SIGNALS, TRAIN, assert_held, checkpoint, command, environment, make_data,
                     metrics, signal_masks, steps, train, write_shard)

VOCAB = 50257
FLAGS = ["--model", "layers=1,heads=4,channels=128,ffn=352,tied=1", "--batch", 4, "--seq-len", 256, "--warmup", 5,
         "--val-every", 1, "--val-tokens", 2048, "--sample-every", 1, "--ckpt-every", 1, "--keep", 0]
STOPPED = 75
PHASES = ["training", "validation", "saving", "sampling"]
BACKENDS = {"onednn": None, "blas": ["ONEDNN=0"], "loops": ["ONEDNN=0", "BLAS=0"]}      # make's flags
SAYS = {"onednn": "oneDNN", "blas": "CBLAS", "loops": "built-in loops"}
LAST = 4                       # steps of the uninterrupted runs; stops come in step 2
CHOSEN = {"onednn-1t-1r-training-0", "onednn-1t-1r-training-1", "onednn-1t-1r-saving-0", "onednn-1t-1r-sampling-0",
          "onednn-2t-2r-training-0", "onednn-2t-2r-validation-0"}


@dataclass
class Stop:
    backend: str
    threads: int
    ranks: int
    phase: str
    number: int
    moment: float              # fraction of the phase, from 0 to 1
    signal: signal.Signals

    @property
    def name(self):
        return f"{self.backend}-{self.threads}t-{self.ranks}r-{self.phase}-{self.number}"


def draw(backend, training, others):
    """That many stops in training and in each other phase, alternating between numbers of threads and ranks. Most are
    in training, because only its backward pass has large matmuls."""
    chance = random.Random(backend)
    phases = ["training"] * training + [phase for phase in PHASES[1:] for _ in range(others)]
    names = {}
    for i, phase in enumerate(phases):
        threads, ranks = (1, 1, 2, 2)[i % 4], (1, 2, 1, 2)[i % 4]
        number = names[threads, ranks, phase] = names.get((threads, ranks, phase), -1) + 1
        # with several ranks, launch.sh receives the signal
        yield Stop(backend, threads, ranks, phase, number, chance.random(), chance.choice(sorted(STOP_SIGNALS)))


ALL = [*draw("onednn", 21, 3), *draw("blas", 2, 1), *draw("loops", 2, 1)]
WANTED = os.environ.get("STOPS")
STOPS = [stop for stop in ALL if (stop.name in CHOSEN if not WANTED else WANTED == "all" or WANTED in stop.name)]


def DATA(folder):
    folder.mkdir()
    write_shard(folder / "d_train_000001.bin", np.random.default_rng(1).integers(0, VOCAB, 100_000))
    write_shard(folder / "d_val_000000.bin", np.random.default_rng(2).integers(0, VOCAB, 10_000))


def program(backend):
    """The program for oneDNN is TRAIN_GPT2; the others are built here."""
    if not BACKENDS[backend]:
        return TRAIN
    build = f"build/stops/{backend}"
    subprocess.run(["make", "-j2", f"BUILD={build}", *BACKENDS[backend], f"{build}/train_gpt2"], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    return ROOT / build / "train_gpt2"


def run(stop, data, out, *flags):
    if stop.ranks > 1 and not shutil.which("mpirun"):
        pytest.skip("needs mpirun")
    launch = [LAUNCH, stop.ranks] if stop.ranks > 1 else []
    words = [*launch, program(stop.backend), "--train-data", data / "d_train_*.bin",
             "--val-data", data / "d_val_*.bin", *FLAGS, "--out", out, *flags]
    return subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            errors="replace", cwd="/", stdin=subprocess.DEVNULL,
                            env=environment() | {"OMP_NUM_THREADS": str(stop.threads)}, start_new_session=True)


def finish(process, code=0):
    text = process.communicate(timeout=300)[0]
    assert process.returncode == code, f"exit code {process.returncode}, expected {code}\n{text}"
    return text


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The uninterrupted run, one for each backend and number of threads and ranks."""
    runs = {}

    def get(stop):
        key = stop.backend, stop.threads, stop.ranks
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("whole") / "out"
            text = finish(run(stop, data, runs[key], "--steps", LAST))
            if SAYS[stop.backend] not in text:
                pytest.skip(f"{TRAIN} is not built with oneDNN")
        return runs[key]

    yield get
    for out in runs.values():
        shutil.rmtree(out)


def line_with(process, word):
    """The next line with the word, and its time."""
    lines = []
    for line in process.stdout:
        if word in line:
            return line, time.monotonic()
        lines.append(line)
    pytest.fail(f"no {word!r}; exit code {process.wait()}\n{''.join(lines)}")


def wait_for_moment(process, stop):
    """The moment of a stop in step 2, assuming that each phase lasts as long as in step 1. The line of a step follows
    training and validation; a sample is printed once it is drawn, and a checkpoint once it is saved."""
    _, begun = line_with(process, "starts at")
    line, shown = line_with(process, "step     1/")
    _, sampled = line_with(process, "sample at step 1:")
    _, saved = line_with(process, "saved ")
    number, unit = next(part for part in line.split(" | ") if "tok/s" in part).split()[:2]
    training = float(number) * {"s,": 1, "ms,": 0.001}[unit]
    if stop.phase == "training":
        wait = training * stop.moment
    elif stop.phase == "validation":
        wait = training + (shown - begun - training) * stop.moment
    elif stop.phase == "sampling":
        line_with(process, "step     2/")
        wait = (sampled - shown) * stop.moment
    else:
        line_with(process, "sample at step 2:")
        wait = (saved - sampled) * stop.moment
    time.sleep(max(wait, 0))


def ask_to_stop(process, stop):
    """In training a stop sends ten signals, to hit most of the step, but only one Ctrl-C, because a second would end
    the run at once."""
    for _ in range(10 if stop.phase == "training" and stop.signal != signal.SIGINT else 1):
        process.send_signal(stop.signal)
        time.sleep(0.05)


def assert_same(a, b, step):
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (checkpoint(a, step) / name).read_bytes() == (checkpoint(b, step) / name).read_bytes(), name
    assert metrics(a) == metrics(b)[:step]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.name)
def test_stop(data, whole, tmp_path, stop):
    expected = whole(stop)
    for attempt in range(3):    # on a loaded machine, a stop may come after the uninterrupted run's last step
        out = tmp_path / f"out{attempt}"
        process = run(stop, data, out, "--steps", LAST + 8)
        try:
            wait_for_moment(process, stop)
            ask_to_stop(process, stop)
            text = finish(process, STOPPED)
        finally:
            process.kill()
        done = steps(out)[-1]
        assert f"stopped by a signal at step {done}" in text
        if done < LAST:
            break
    assert 1 <= done < LAST
    finish(run(stop, data, out, "--resume", "--steps", done + 1))
    assert_same(out, expected, done + 1)
    shutil.rmtree(out)


def test_a_stop_is_confirmed_at_once(little):
    """Before the work in progress is done. Once, even if it is asked for twice."""
    process = watch(command(little, "--steps", 10 ** 7), "| loss ")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    text = finish(process, STOPPED)
    said = "train_gpt2: stopping when the work in progress is done; Ctrl-C ends it at once"
    assert text.count(said) == 1 and text.index(said) < text.index("stopped by a signal at step")


def test_a_stop_needs_no_reader(little, tmp_path):
    """The thread that waits for signals does not wait for someone to read stderr."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writes, bytes(4096))
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command(little, "--steps", 10 ** 7), stdout=log, stderr=writes, cwd="/",
                                   env=environment())
    try:
        while "| loss " not in (tmp_path / "log").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == STOPPED
    finally:
        process.kill()
        os.close(reads)
        os.close(writes)


# ---- the signal masks that the kernel reports


def watch(words, word):
    """Starts a program and waits for a line with the word."""
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, cwd="/",
                               env=environment() | {"OMP_NUM_THREADS": "2"}, start_new_session=True)
    line_with(process, word)
    return process


@pytest.fixture(scope="module")
def little(shared_data):
    return shared_data(partial(make_data, val=50_000))


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_thread_of_the_trainer_runs_a_handler(little, ranks):
    process = watch(command(little, "--steps", 10 ** 7, processes=ranks), "| loss ")
    try:
        assert_held(TRAIN, little, ranks)
    finally:
        process.send_signal(signal.SIGTERM)
        finish(process, STOPPED)    # keeps reading, because a full pipe would block the trainer


def test_sampler_and_evaluator_end_by_a_signal(little, tmp_path):
    """They have nothing to save, and therefore no handlers."""
    train(little, "--steps", 1, "--out", tmp_path / "out")
    model = ["--model", tmp_path / "out"]
    measuring = ["--data", little / "d_val_000000.bin", "--seq-lens", ",".join(map(str, range(8, 24)))]
    for name, flags, word in (("sample_gpt2", ["--num-samples", 10 ** 6], "sample 1"),
                              ("eval_gpt2", measuring, "under softmax")):
        if not (TRAIN.parent / name).exists():
            pytest.skip(f"{TRAIN.parent / name} is not built")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            process = watch([TRAIN.parent / name, *model, *flags], word)
            for blocked, caught in signal_masks(process.pid):
                assert not blocked & STOP_SIGNALS and not caught & STOP_SIGNALS
            process.send_signal(number)
            process.stdout.close()
            assert process.wait(60) == -number

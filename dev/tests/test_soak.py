"""Random stops and kills of runs on two ranks, each of which then ends with the bits of one that was left alone.

SOAK=21600 does so for six hours instead of a quarter of a minute. SOAK_SEED=N repeats the choices of an earlier soak;
when they strike depends on the machine.
"""
import collections
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from functools import partial

import pytest

import machines
from jobs import alive, descendants, ranks_of, wait_for
from trainer import MODEL, assert_same_run, command, environment, make_data

SECONDS, STEPS = float(os.environ.get("SOAK", 15)), 1200
NEVER = {2, 3, 4, 5, 7}     # exit codes that neither a stop nor a kill explains


DATA = partial(make_data, train=20000, shards=2)


def random_flags(draw, data):
    """Flags of a run: its normalizer, a change of it, precision, data, and how often it validates and saves."""
    flags = ["--steps", STEPS, "--lr", 0.0005, "--batch", 2, "--seed", draw.randrange(1000), "--model",
             MODEL + draw.choice(["", ",tied=0", ",qk_norm=1", ",bias=qkv", ",gate=channel"]),
             "--attn", draw.choice(["softmax", "ssmax", "lssar"]),
             "--dtype", draw.choice(["fp32", "bf16"]), "--total-batch-tokens", draw.choice([32, 64]),
             "--ckpt-every", draw.choice([7, 25, 60]), "--keep", draw.choice([1, 3]),
             "--val-data", f"{data}/*_val_*.bin", "--val-every", draw.choice([10, 100])]
    flags += draw.choice([[], ["--attn-switch", f"{draw.randrange(1, STEPS)}:ssmax-bias"]])
    flags += draw.choice([[], ["--optimizer", "muon"], ["--z-loss", 0.01, "--logit-softcap", 5]])
    lengths = ["--seq-len", "8,16", "--total-batch-tokens", 64]
    flags += draw.choice([[], ["--keep-best"], ["--pack", "example"], lengths])
    sources = [f"{data}/*_train_00000{i}.bin:{draw.randint(1, 9)}" for i in (1, 2)]
    return flags + draw.choice([[], ["--train-data", ",".join(sources)]])


class Job:
    """A run on two ranks in the background. No process outlives it."""

    def __init__(self, data, out, flags):
        words = command(data, *flags, "--out", out, "--resume", processes=2)
        self.log = open(out.with_suffix(".log"), "a+")
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
                                        env=environment(), cwd="/", preexec_fn=machines.end_with_parent)
        self.all = []

    def strike(self, how, draw):
        """Stops the job by a signal to launch.sh, or kills some of its processes."""
        self.all = descendants(self.process.pid)
        ranks = list(ranks_of(self.process.pid).values())
        kills = {"kill a rank": ranks and [draw.choice(ranks)], "kill both ranks": ranks, "kill mpirun": self.all[:1],
                 "kill launch.sh": [self.process.pid]}
        number = signal.SIGKILL if how in kills else getattr(signal, how)
        for pid in kills.get(how, [self.process.pid]):
            with contextlib.suppress(ProcessLookupError):       # it has just ended
                os.kill(pid, number)

    def end(self):
        """Waits for the end of all processes; returns the exit code."""
        code = self.process.wait(timeout=120)
        wait_for(lambda: not any(map(alive, self.all)), "the end of all processes of the job")
        self.log.close()
        return code


STRIKES = ["SIGTERM", "SIGTERM", "SIGINT", "kill a rank", "kill a rank", "kill both ranks", "kill mpirun",
           "kill launch.sh"]


def interrupted_run(data, out, flags, draw, struck):
    """Runs to the last step, with a strike after a random time, again and again."""
    while True:
        job = Job(data, out, flags)
        # At least some jobs must get beyond a checkpoint.
        pause = time.monotonic() + draw.choice([draw.uniform(0, 2), draw.uniform(1, 4)])
        while job.process.poll() is None and time.monotonic() < pause:
            time.sleep(0.01)
        if job.process.poll() is None:
            how = draw.choice(STRIKES)
            struck[how] += 1
            job.strike(how, draw)
        code = job.end()
        assert code not in NEVER, f"exit code {code}:\n" + out.with_suffix(".log").read_text()[-3000:]
        if code == 0:
            return


def test_soak(data, tmp_path):
    if not shutil.which("mpirun"):
        pytest.skip("needs mpirun")
    seed = int(os.environ.get("SOAK_SEED", time.time_ns() % 10**6))
    draw, struck, rounds, end = random.Random(seed), collections.Counter(), 0, time.monotonic() + SECONDS
    while time.monotonic() < end or not struck and rounds < 30:        # a fast machine may end some runs unharmed
        flags, whole, out = random_flags(draw, data), tmp_path / "whole", tmp_path / "out"
        print(f"SOAK_SEED={seed}, round {rounds}: {' '.join(map(str, flags))}", flush=True)
        alone = Job(data, whole, flags)
        assert alone.end() == 0, whole.with_suffix(".log").read_text()[-3000:]
        interrupted_run(data, out, flags, draw, struck)
        assert_same_run(whole, out, STEPS)
        rounds += 1
        for path in (whole, out):
            shutil.rmtree(path)
    print(f"{rounds} rounds, {sum(struck.values())} strikes: {dict(struck)}")
    assert struck, "nothing was stopped"

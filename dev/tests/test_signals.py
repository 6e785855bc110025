"""A signal at any moment, whatever the threads compute, ends a run with exit code 75 and a checkpoint that resumes to
the same bits.

No signal handler may run on a compute thread: for a large k, oneDNN's generated matmul code points the stack register
at its workspace on the heap, and a handler's frame would overwrite the heap below it. The shape here is one whose
matmuls do that.
"""
import fcntl
import os
import random
import signal
import subprocess
import time
from functools import partial

import numpy as np
import pytest

from jobs import finish, start, wait_for_line
from trainer import (STOP_SIGNALS, TRAIN, assert_held, assert_same_run, command, environment, make_data, signal_masks,
                     train, write_shard)

VOCAB = 50257
FLAGS = ["--model", "layers=1,heads=4,channels=128,ffn=352,tied=1", "--batch", 4, "--seq-len", 256, "--warmup", 5,
         "--val-every", 1, "--val-tokens", 2048, "--sample-every", 1, "--ckpt-every", 1, "--keep", 1, "--steps", 4]
STOPPED = 75


def DATA(folder):
    folder.mkdir()
    write_shard(folder / "d_train_000001.bin", np.random.default_rng(1).integers(0, VOCAB, 100_000))
    write_shard(folder / "d_val_000000.bin", np.random.default_rng(2).integers(0, VOCAB, 10_000))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("threads, ranks", [(1, 1), (2, 2)])
def test_stops_at_random_moments(data, tmp_path, threads, ranks):
    """In training, validation, sampling or saving, which follow each other in each step. With several ranks, launch.sh
    receives the signal."""
    chance, stops = random.Random(ranks), 0

    def run(name):
        words = command(data, "--val-data", data / "d_val_000000.bin", *FLAGS, "--out", tmp_path / name, "--resume",
                        model=False, processes=ranks)
        env = environment(OMP_NUM_THREADS=str(threads))
        del env["GOMP_SPINCOUNT"]       # so the program executes itself again, as it does for users
        return start(words, env=env, start_new_session=True)
    process = run("whole")
    wait_for_line(process, "starts at step 0")
    begun = time.monotonic()
    finish(process)
    seconds = time.monotonic() - begun
    for _ in range(2):
        process = run("out")
        wait_for_line(process, "s at step")
        time.sleep(chance.uniform(0, seconds / 4))      # a step; the whole run may have been slower
        number = chance.choice(sorted(STOP_SIGNALS))
        for _ in range(1 if number == signal.SIGINT else 10):      # a second Ctrl-C would end the run at once
            process.send_signal(number)
            time.sleep(0.02)
        text = process.communicate(timeout=60)[0]
        if process.returncode == 0:      # the last step was already done
            break
        assert process.returncode == STOPPED and "stopped by a signal at step" in text, text
        stops += 1
    finish(run("out"))
    assert stops
    assert_same_run(tmp_path / "whole", tmp_path / "out", 4)


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
    process = start(words, env=environment(OMP_NUM_THREADS="2"), start_new_session=True)
    wait_for_line(process, word)
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

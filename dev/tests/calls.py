"""Runs scripts in this process, because starting Python and importing matplotlib takes one to two seconds; and makes
run folders for them to read."""
import contextlib
import importlib
import io
import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from trainer import ROOT

sys.path[:0] = [str(ROOT / name) for name in ("scripts", "data", "dev/figures")]


def call(script, *words, main=None, env=None):
    """Runs main() of a script of this name in scripts/, data/ or dev/figures/, or the function `main`. Returns what a
    process would: its exit code and its output. env: changed variables"""
    main = main or importlib.import_module(script.removesuffix(".py")).main
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    handler = signal.getsignal(signal.SIGTERM)
    with (pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
        patch.setattr(sys, "argv", [script, *map(str, words)])
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        try:
            code = main()
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):       # a message, which Python prints
                code = print(code, file=sys.stderr) or 1
        finally:
            signal.signal(signal.SIGTERM, handler)
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    assert "Traceback" not in texts[1], texts[1]
    return subprocess.CompletedProcess(sys.argv, code or 0, *texts)


def prepare(script, *words, code=0, env=None):
    """Runs a script of data/ and returns what it printed, after checking the exit code."""
    import shards
    main = importlib.import_module(script).main
    result = call(f"{script}.py", *words, main=lambda: shards.run(main), env=env)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


@contextlib.contextmanager
def limited(kind, most):
    """A soft limit on a resource of this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def time_limit(seconds):
    """Fails a test in which something waits that must not."""
    def late(*_):
        raise AssertionError(f"not within {seconds} s")
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def make_run(folder, steps=20, tail="", change=lambda line: {}, known=None):
    """A run folder. change(line): what differs from the line of a step; known: its run.json"""
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "tokens": 512 * step, "loss": 3 + 8 / step, "lr": 6e-4, "grad_norm": 1 + 1 / step,
                    "ms": 500.0, "tok_per_s": 1024.0, "mfu": 0.5}
            line |= {"val_loss": 3.5 + 8 / step} if step % 10 == 0 else {}
            file.write(json.dumps(line | change(line)) + "\n")
        file.write(tail)
    if known is not None:
        write_known(folder, known)
    return folder


def write_known(run, known):
    (run / "run.json").write_text(json.dumps(known))


def put_in_place(path, kind, victim):
    """Puts a link, by which a file elsewhere would change, or a pipe where a file belongs."""
    if kind == "symlink":
        path.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, path)
    else:
        os.mkfifo(path)

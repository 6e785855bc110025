"""Shared by tests of jobs that run in the background: their processes, and how far they are."""
import contextlib
import re
import subprocess
import time
from pathlib import Path

import pytest

from trainer import TRAIN, environment


def start(words, **how):
    """Starts a program, whose stdout and stderr are one pipe."""
    how = {"env": environment(), "cwd": "/", "stdin": subprocess.DEVNULL, "text": True, "errors": "replace"} | how
    return subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)


def finish(process, code=0, timeout=120):
    """Waits for the end of a program, which must have this exit code, and returns what it printed."""
    text, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, f"exit code {process.returncode}, expected {code}\n{text[-3000:]}"
    return text


def wait_for_line(process, text):
    """Reads a process's output up to a line with the text."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    pytest.fail(f"no {text!r}; exit code {process.wait()}\n{''.join(lines)}")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, what, timeout=60):
    end = time.time() + timeout
    while not condition():
        assert time.time() < end, f"not within {timeout} s: {what}"
        time.sleep(0.05)


def descendants(pid):
    found = []
    with contextlib.suppress(OSError):      # it has just ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def ranks_of(pid):
    """{rank: process} of the job that a launch.sh has started on this machine."""
    ranks = {}
    for child in descendants(pid):
        with contextlib.suppress(OSError):      # it has just ended
            environment = Path(f"/proc/{child}/environ").read_bytes()
            rank = re.search(rb"\0OMPI_COMM_WORLD_RANK=(\d+)\0", environment)
            if rank or Path(f"/proc/{child}/exe").resolve() == TRAIN.resolve():
                ranks[int(rank[1]) if rank else 0] = child
    return ranks


def line_count(out):
    path = Path(out) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0

#!/usr/bin/env python3
"""Breaks the attention code on purpose, one small change at a time, and sees that the tests notice.

    dev/mutate/mutate.py             every change of mutations.txt
    dev/mutate/mutate.py --draw 5    five of them, drawn by the date
    dev/mutate/mutate.py --only D    those whose line has the word in it

Works in a copy of the tree under a temporary folder. A change that the tests do not notice is a hole in them: it is listed, and the exit
status is 1. So is a change that does not apply any more, or does not build (that is not noticed by a test).
"""
import argparse
import datetime
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The quickest first; a change counts as noticed with the first that fails.
TESTS = (["./test_gpt2", "attention"], ["build/tests/test_attention"], ["build/tests/test_gradients"])


def mutations():
    """(file, text, text in its place) from mutations.txt: a line with the file, then the two, each indented, with a blank line behind."""
    for block in (Path(__file__).parent / "mutations.txt").read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            file, old, new = lines
            yield file, old.strip(), new.strip()


def build(tree, command):
    """None, or the compiler's first complaint."""
    made = subprocess.run(["make", "-s", "-j2", "OPT=-O1", command[0]], cwd=tree, capture_output=True, text=True)
    return (made.stderr.strip().splitlines() or ["make failed"])[0] if made.returncode else None


def verdict_of(tree):
    """The first test that fails, as "noticed by ..."; what does not build; None where all tests pass."""
    for command in TESTS:
        complaint = build(tree, command)
        if complaint:
            return f"does not build: {complaint}"
        if subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600).returncode:
            return "noticed by " + " ".join(command)
    return None


def try_mutation(tree, file, old, new):
    path = tree / file
    text = path.read_text()
    if text.count(old) != 1:
        return f"occurs {text.count(old)} times in {file}, expected once"
    try:
        path.write_text(text.replace(old, new))
        return verdict_of(tree)
    finally:
        path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, metavar="N")
    parser.add_argument("--only", metavar="WORD", default="")
    arguments = parser.parse_args()
    chosen = [m for m in mutations() if arguments.only in " ".join(m)]
    if arguments.draw:
        chosen = random.Random(datetime.date.today().toordinal()).sample(chosen, min(arguments.draw, len(chosen)))
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "out", "build", "__pycache__", "*.bin", "*_gpt2"))
        red = verdict_of(tree)
        if red:
            sys.exit(f"before anything was changed: {red}")
        for file, old, new in chosen:
            start = time.time()
            verdict = try_mutation(tree, file, old, new)
            good = verdict is not None and verdict.startswith("noticed")
            noticed += good
            print(f"{'ok' if good else 'HOLE'}  {file}: {old}  ->  {new}\n      {verdict or 'no test noticed'}, {time.time() - start:.0f} s", flush=True)
    print(f"{noticed} passed, {len(chosen) - noticed} failed")
    return noticed != len(chosen)


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())

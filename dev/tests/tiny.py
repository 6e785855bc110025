"""Shared by tests that need a trained model: the programs, a little text in shards, and small models trained on it."""
import functools
import os
import random
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import trainer
from trainer import ROOT, checkpoint

sys.path.insert(0, str(ROOT / "data"))
import vocabulary
from shards import write_shard

BIN = trainer.TRAIN.parent
BUILD = ROOT / "build" if BIN == ROOT else BIN              # the Makefile's
VOCAB, END_OF_TEXT, T = 300, 299, 32
SHAPE = f"layers=2,heads=4,channels=32,ffn=64,vocab={VOCAB}"
WORDS = "the The cat dog house on in a naïve café costs 5 € 10 £ 😀 🐈 日本語 text über said and, then. went Привет".split()


@functools.cache
def build(path):
    """Builds a program if it is missing, and the one that prints logits if it is out of date, too, with warnings as
    errors if the build has them."""
    stale = path == BUILD / "tests/logits" and BIN == ROOT    # a build with other flags keeps what it has
    if stale or not path.exists():
        flags = BUILD / "flags"
        werror = int(flags.exists() and "-Werror" in flags.read_text())
        trainer.make("-s", f"BUILD={make_path(BUILD)}", f"WERROR={werror}", make_path(path), check=True)


def make_path(path):
    """A path in the Makefile's form."""
    if not path.is_relative_to(ROOT):
        return str(path)
    inside = str(path.relative_to(ROOT))
    return inside if "/" in inside or path == BUILD else f"./{inside}"


def run(path, *words, code=0, threads=1, said=None):
    """Runs a program, which is built if it is missing, and returns its stdout and stderr. The exit code must be
    `code`. `said` is sent to stdin."""
    build(Path(path))
    result = subprocess.run([str(path), *map(str, words)], capture_output=True, env=environment(threads),
                            input=None if said is None else said.encode())
    assert result.returncode == code, (words, result.returncode, result.stderr.decode())
    return result.stdout.decode(), result.stderr.decode()


# A process counts the memory of the one that started it, until exec. This one is small.
MEASURE = """import os, sys
_, status, usage = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss, file=sys.stderr)"""


def peak_memory(path, *words, code=0, threads=1):
    """Runs a program and returns the bytes of memory that it had at most."""
    _, errors = run(sys.executable, "-I", "-S", "-c", MEASURE, path, *words, threads=threads)
    found, peak = map(int, errors.splitlines()[-1].split())
    assert found == code, (words, errors)
    return peak * 1024


def environment(threads=1):
    return dict(trainer.environment(), OMP_NUM_THREADS=str(threads))


def sentences(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(4, 16))) for _ in range(count)]


def write_data(folder, tokenizer=True):
    """Shards of sentences with a vocabulary of their own, with or without its tokenizer.json beside them."""
    folder.mkdir(parents=True)
    vocabulary.train(sentences(200), VOCAB, folder / "tokenizer.json")
    known = vocabulary.load(str(folder))
    assert (known.vocab, known.end_of_text) == (VOCAB, END_OF_TEXT)
    for name, count, seed in (("t_train_000001.bin", 1500, 1), ("t_val_000000.bin", 100, 2)):
        documents = known.encode_batch(sentences(count, seed))
        write_shard(folder / name, np.concatenate([[END_OF_TEXT, *document] for document in documents]))
    for name, content in known.files.items():
        (folder / name).write_bytes(content)
        if not tokenizer:
            (folder / name).unlink()
    return folder


def train(data, out, *words, steps=25, code=0):
    """Trains a small model, or the one that --init-from names; returns its last checkpoint's folder and the output."""
    flags = [] if "--init-from" in words else ["--model", SHAPE]
    flags += ["--seq-len", T, "--batch", 8, "--warmup", 5, "--lr", 1e-2, "--val-data", f"{data}/*_val_*.bin"]
    printed = trainer.train(data, *flags, "--steps", steps, "--out", out, *words, model=False, code=code)
    return checkpoint(out, steps), printed


def logits(folder, ids, *words):
    """Our logits (T, V), on which one pass of the trainer and its cache must agree. "documents": under --doc-mask;
    "pass": without the cache."""
    output, _ = run(BUILD / "tests/logits", folder, ",".join(map(str, ids)), *words)
    return np.array([line.split() for line in output.splitlines()], np.float64)


def sample(folder, *words, code=0, threads=1):
    """The texts that sample_gpt2 prints, and its stderr."""
    output, errors = run(BIN / "sample_gpt2", "--model", folder, *words, code=code, threads=threads)
    texts = re.split(r"\n?---- prompt \d+, sample \d+\n", output.removesuffix("\n"))
    return texts[output.startswith("---- prompt"):], errors


def ids_of(text):
    return [int(number) for number in text.split(",")]


LM_EVAL = "0.4.13"


def lm_eval_python():
    """The Python of build/lm_eval, an environment that sees this one's packages and adds lm_eval."""
    if not os.environ.get("LM_EVAL"):
        pytest.skip(f"LM_EVAL=1 runs it, and installs lm_eval {LM_EVAL} in build/lm_eval first (a minute, 470 MB)")
    folder = ROOT / "build/lm_eval"
    python, done = folder / "bin/python", folder / f"{LM_EVAL}.done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        purelib = sysconfig.get_path("purelib")
        Path(purelib.replace(sys.prefix, str(folder)), "outer.pth").write_text(purelib)
        subprocess.run([python, "-m", "pip", "install", "-q", f"lm_eval=={LM_EVAL}"], check=True)
        done.touch()
    return python

"""Shared by the tests of the trainer: synthetic shards, a model so small that a run takes a quarter of a second, and
functions that read a run folder.

TRAIN_GPT2=build/san/train_gpt2 tests another build. TRAIN_GPT2_FAULTS names a build with fault points (dev/faults); by
default make builds one.
"""
import contextlib
import ctypes.util
import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = Path(os.environ.get("TRAIN_GPT2", ROOT / "train_gpt2")).absolute()
LAUNCH = ROOT / "scripts/launch.sh"
SANITIZED = any(program.exists() and b"__asan_init" in program.read_bytes()
                for program in (TRAIN, ROOT / os.environ.get("TRAIN_GPT2CU", TRAIN)))
VOCAB = 97
MODEL = f"layers=1,heads=2,channels=16,ffn=24,vocab={VOCAB}"
# the metrics that a resumed run repeats to the last bit
EXACT = ("step", "tokens", "loss", "lr", "grad_norm", "val_loss", "grad_norms", "weight_norms")


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    """Writes a shard: with magic 20240801 of 32-bit tokens, with magic 20240521 a mask, whose items are bytes."""
    tokens = np.asarray(tokens)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.astype({20240521: "u1", 20240801: "<u4"}.get(magic, "<u2")).tobytes())
    return path


def xxh3_128(content):
    """The hash of bytes, as a manifest has it."""
    class Hash(ctypes.Structure):
        _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]
    xxh3 = ctypes.CDLL(ctypes.util.find_library("xxhash")).XXH3_128bits
    xxh3.restype, xxh3.argtypes = Hash, (ctypes.c_char_p, ctypes.c_size_t)
    value = xxh3(content, len(content))
    return f"{value.high:016x}{value.low:016x}"


def sign(folder, name):
    """Updates the manifest for a changed file."""
    path, content = folder / "manifest.json", (folder / name).read_bytes()
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"size": len(content), "xxh3_128": xxh3_128(content)}
    path.write_text(json.dumps(manifest))


def tokens(count, seed=0):
    """Random ids below VOCAB, in which large ids are more frequent, so that there is something to learn. The last id is
    end-of-text, and a document has about 12 tokens."""
    return np.maximum(VOCAB - np.random.default_rng(seed).geometric(0.08, count), 0)


def make_data(folder, train=3000, val=600, shards=1):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(shards):
        write_shard(folder / f"d_train_{i + 1:06d}.bin", tokens(train // shards, i + 1))
    write_shard(folder / "d_val_000000.bin", tokens(val, 99))


def environment(**more):
    env = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"} | more
    env.pop("OMP_WAIT_POLICY", None)                 # set by scripts/test.sh; programs have a default (runtime/cpu.c)
    env.setdefault("GOMP_SPINCOUNT", "10000")        # otherwise programs set it, and execute themselves again
    env.setdefault("GRACE", "1")
    env.setdefault("OMPI_MCA_pml", "ob1")            # without a search for network cards, which takes 0.2 s
    # Open MPI's leaks are recognized by complete stacks, with which programs take three times as long.
    if SANITIZED and "ASAN_OPTIONS" not in env:
        leaks = "detect_leaks=0" if os.environ.get("DRAW") else "fast_unwind_on_malloc=0"
        env.setdefault("MPIRUN", f"mpirun -x ASAN_OPTIONS={leaks}")
    env.setdefault("LSAN_OPTIONS", f"suppressions={ROOT / 'dev/faults/lsan.supp'}:print_suppressions=0")
    return env


def command(data, *flags, processes=1, program=None, model=True):
    """The command line of a run on the shards in a folder. Flags come last, so that they take precedence."""
    if processes > 1 and not shutil.which("mpirun"):
        pytest.skip("needs mpirun")
    words = [LAUNCH, processes] if processes > 1 else []
    words += [program or TRAIN, "--train-data", f"{data}/*_train_*.bin"]
    if model:
        words += ["--model", MODEL, "--seq-len", 8, "--warmup", 5, "--lr", 0.01]
        words += ["--batch", 4]
    return [str(word) for word in [*words, *flags]]


def train(data, *flags, code=0, env=None, timeout=120, **how):
    """Runs the trainer, checks its exit code, and returns what it printed (stdout, then stderr)."""
    popen = {key: how.pop(key) for key in ("user", "preexec_fn") if key in how}
    words = command(data, *flags, **how)
    result = subprocess.run(words, capture_output=True, text=True, errors="replace", env=environment(**(env or {})),
                            timeout=timeout, stdin=subprocess.DEVNULL, cwd="/", **popen)
    assert result.returncode == code, (f"exit code {result.returncode}, expected {code}\n"
                                       f"{' '.join(words)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def script_of(path, text, shell="sh"):
    """Writes a program that is a shell script, and returns its path as text."""
    path.write_text(f"#!/bin/{shell}\n{text}\n")
    path.chmod(0o755)
    return str(path)


def says(text, *parts):
    """Checks that a text has these parts."""
    for part in parts:
        assert str(part) in text, f"expected {part!r} in:\n{text}"


def metrics(out, keys=EXACT):
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line.get(key) for key in keys) for line in lines]


def losses(out):
    return np.array([loss for loss, in metrics(out, ["loss"])])


def steps(out):
    """The steps of the complete checkpoints."""
    return sorted(int(folder.name[5:]) for folder in (Path(out) / "ckpt").glob("step-*"))


def checkpoint(out, step):
    return Path(out) / "ckpt" / f"step-{step:08d}"


def assert_same_checkpoint(a, b, step):
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (checkpoint(a, step) / name).read_bytes() == (checkpoint(b, step) / name).read_bytes(), name


def assert_same_run(a, b, step):
    """Checks that the tensors of a step and all metrics have the same bits."""
    assert_same_checkpoint(a, b, step)
    assert metrics(a) == metrics(b)


@contextlib.contextmanager
def saving_and_pruning(out, pause):
    """While this is active, a newer checkpoint keeps replacing the run's newest one, as under --keep 1, so that there
    is always just one. pause: seconds that it lasts, or a slow reader never gets to its end."""
    folder, ended = Path(out) / "ckpt", threading.Event()

    def save():
        step = max(steps(out))
        while not ended.is_set():
            old, new = folder / f"step-{step:08d}", folder / f"step-{step + 1:08d}"
            unfinished, trash = folder / f".tmp-step-{step + 1:08d}", folder / f".trash-step-{step:08d}"
            shutil.copytree(old, unfinished)
            unfinished.rename(new)
            old.rename(trash)
            shutil.rmtree(trash)
            step += 1
            ended.wait(pause)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
# Open MPI prints a stack on these signals, which end the process anyway; glibc uses the last one itself.
FATAL_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, 33}


def signal_masks(pid):
    """The blocked and the caught signals of each thread."""
    def signals(line):
        mask = int(line.split()[1], 16)
        return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    masks = []
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = {line.split(":")[0]: line for line in status.read_text().splitlines()}
        masks.append((signals(lines["SigBlk"]), signals(lines["SigCgt"])))
    return masks


def assert_held(program, argument, processes=1):
    """Checks each process whose arguments contain this text: one thread waits for the stop signals (meanwhile the
    kernel shows them as not blocked there), all other threads block them, and there is no handler for any signal that
    may arrive during a computation."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "exe").resolve() != Path(program).resolve():
                continue
            if str(argument) not in (folder / "cmdline").read_text():
                continue
        except OSError:
            continue
        masks = signal_masks(folder.name)
        assert len(masks) > 2 and sum(not STOP_SIGNALS & blocked for blocked, _ in masks) == 1, masks
        assert sum(STOP_SIGNALS <= blocked for blocked, _ in masks) == len(masks) - 1, masks
        assert all(caught <= FATAL_SIGNALS for _, caught in masks), masks
        found += 1
    assert found == processes


def run_json(out):
    return json.loads((Path(out) / "run.json").read_text())


def lineage(out):
    return run_json(out)["lineage"]


def read_header(path):
    """The header and the data of a safetensors file."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + size]), raw[8 + size:]


def tensors(out, step, name="model.safetensors"):
    """The tensors of a checkpoint's file, which must be float32."""
    import safetensors.numpy        # which a machine with a GPU may lack
    return safetensors.numpy.load_file(checkpoint(out, step) / name)


def edit_tensors(path, change):
    """Applies a function to the {name: tensor} of a safetensors file."""
    import safetensors.numpy
    found = {name: tensor.copy() for name, tensor in safetensors.numpy.load_file(path).items()}
    change(found)
    safetensors.numpy.save_file(found, path, metadata={"format": "pt"})


def edit_config(folder, **change):
    """Sets keys of config.json, and removes those whose value is `...`."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def embedding(out, step):
    return tensors(out, step)["model.embed_tokens.weight"]


def make(*words, **how):
    """Runs make, one at a time: the processes of pytest-xdist share the build folder."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build/tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.run(["make", *map(str, words)], cwd=ROOT, **how)


def cuda_program(name="train_gpt2cu"):
    """A CUDA program, the trainer by default, built for the CPU if it is missing; or the one that an environment
    variable, TRAIN_GPT2CU, names. Skips the test where CUDA's headers are missing."""
    given = os.environ.get(name.upper())
    if given:
        return Path(given).absolute()
    made = make("-j2", f"{name}_on_cpu", capture_output=True, text=True)
    if made.returncode and "scripts/setup_cuda.sh" in made.stderr:
        pytest.skip("CUDA's headers are missing: scripts/setup_cuda.sh installs them")
    assert made.returncode == 0, made.stdout + made.stderr
    return ROOT / f"{name}_on_cpu"


def faults_program():
    """The trainer with fault points, built if it is missing."""
    given = os.environ.get("TRAIN_GPT2_FAULTS")
    if given:
        return Path(given).absolute()
    make("-j2", "build/faults/train_gpt2", check=True, stdout=subprocess.DEVNULL)
    return ROOT / "build/faults/train_gpt2"

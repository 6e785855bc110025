"""Our 124M training step on the CPU compared with the same model in PyTorch.

    .venv/bin/python dev/bench/cpu_step.py [--rounds 3] [--cases fp32:4x64,bf16:4x256] [--variants eager,compile]

Every round runs every variant of every case once, each in a process of its own, never two at a time, and every second
round in the opposite order, so that a machine that speeds up or slows down affects all of them alike. A figure is the
median over a round's steps and then over the rounds; a ratio is the median of the rounds' own ratios. The first steps
of a process (allocation, compilation) are not counted. Both sides train, with as many threads as there are cores:
forward, backward, gradient clipping and AdamW.

    ours      ./train_gpt2 with its usual flags; a step's time is `ms` of metrics.jsonl
    eager     PyTorch, float32 or bf16 autocast, AdamW(fused=True)
    compile   the same through torch.compile (needs g++; the first step of the first round takes a minute)

The floor is how long a step's matmuls would take at the best torch.matmul rate measured in the same run.
"""
import argparse
import datetime
import json
import math
import os
import platform
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from gpu_report import table_text

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "train_gpt2"
LAYERS, HEADS, CHANNELS, FFN, VOCAB = 12, 12, 768, 2048, 50257
PADDED_VOCAB = 50304
LR, BETAS, EPS, WEIGHT_DECAY, CLIP, THETA = 6e-4, (0.9, 0.95), 1e-8, 0.1, 1.0, 10000.0
CASES = "fp32:4x64,fp32:4x256,fp32:1x1024,bf16:4x256"
VARIANTS = ("eager", "compile")         # besides ours
UNCOUNTED_STEPS, STEPS = 2, 4   # the first compiles and allocates; the second may still touch new memory
THREADS = len(os.sched_getaffinity(0))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}


# ---------------------------------------------------------------- the same model in PyTorch (runs in a child process)

def torch_model():
    """The model's class. Its sizes are those of this file unless given: Llama(T, tied=False, layers=2, ...)."""
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    def rotate(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    class Layer(nn.Module):
        """A Llama layer. q, k and v come from one matmul, and so do gate and up, which is faster."""

        def __init__(self, heads, channels, ffn):
            super().__init__()
            self.heads = heads
            self.attention_norm = nn.Parameter(torch.ones(channels))
            self.ffn_norm = nn.Parameter(torch.ones(channels))
            self.qkv = nn.Linear(channels, 3 * channels, bias=False)
            self.o = nn.Linear(channels, channels, bias=False)
            self.gate_up = nn.Linear(channels, 2 * ffn, bias=False)
            self.down = nn.Linear(ffn, channels, bias=False)

        def forward(self, x, cos, sin):
            B, T, C = x.shape
            h = F.rms_norm(x, (C,), self.attention_norm, 1e-5)
            q, k, v = self.qkv(h).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
            y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
            gate, up = self.gate_up(F.rms_norm(x, (C,), self.ffn_norm, 1e-5)).chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self, T, tied=True, layers=LAYERS, heads=HEADS, channels=CHANNELS, ffn=FFN, vocab=PADDED_VOCAB):
            super().__init__()
            self.embedding = nn.Embedding(vocab, channels)
            self.head = self.embedding if tied else nn.Embedding(vocab, channels)
            self.layers = nn.ModuleList(Layer(heads, channels, ffn) for _ in range(layers))
            self.norm = nn.Parameter(torch.ones(channels))
            for p in self.parameters():
                if p.dim() == 2:
                    nn.init.normal_(p, 0.0, 0.02)
            size = channels // heads
            angle = torch.outer(torch.arange(T).float(), THETA ** (-torch.arange(0, size, 2).float() / size))
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())

        def forward(self, tokens, targets):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
            logits = F.linear(F.rms_norm(x, self.norm.shape, self.norm, 1e-5), self.head.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1))

    return Llama


def optimizer_of(model):
    """Matrices have weight decay, vectors none."""
    import torch
    groups = [{"params": [p for p in model.parameters() if (p.dim() >= 2) == matrix], "weight_decay": decay}
              for matrix, decay in ((True, WEIGHT_DECAY), (False, 0.0))]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def torch_steps(variant, dtype, B, T):
    """Trains; returns the milliseconds of each counted step."""
    import torch
    torch.manual_seed(0)
    model = torch_model()(T)
    optimizer = optimizer_of(model)
    forward = torch.compile(model) if variant == "compile" else model
    tokens = torch.randint(0, VOCAB, (UNCOUNTED_STEPS + STEPS, B, T + 1))
    ms = []
    for batch in tokens:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss = forward(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        ms.append(1e3 * (time.perf_counter() - start))
        if not math.isfinite(value):
            raise SystemExit(f"cpu_step: PyTorch {variant} {dtype}: the loss is {value}")
    return ms[UNCOUNTED_STEPS:]


def matmul_rate(dtype):
    """The best GFLOP/s of torch.matmul, over this model's matmuls with 1,024 rows and a large square one."""
    import torch
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    best = 0.0
    for rows, inner, columns in ((1024, CHANNELS, 3 * CHANNELS), (1024, CHANNELS, 2 * FFN), (1024, FFN, CHANNELS),
                                 (1024, CHANNELS, PADDED_VOCAB), (2048, 2048, 2048)):
        a, b = torch.randn(rows, inner).to(kind), torch.randn(columns, inner).to(kind)
        for _ in range(5):
            start = time.perf_counter()
            a @ b.t()
            best = max(best, 2e-9 * rows * inner * columns / (time.perf_counter() - start))
    return best


# ---------------------------------------------------------------- running one process and measuring it

def run(folder, *words):
    """What a process printed, and its peak memory in GB."""
    log, errors = folder / "log", folder / "errors"
    with open(log, "w") as out, open(errors, "w") as err:
        process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"cpu_step: {' '.join(map(str, words))} ended with exit code {process.returncode}:\n"
                         f"{errors.read_text()[-2000:]}")
    return log.read_text(), usage.ru_maxrss * 1024 / 1e9


def run_torch(folder, *task):
    """What matmul_rate() or torch_steps() returned in a process of its own, and its peak memory in GB."""
    output, peak_gb = run(folder, sys.executable, __file__, "--child", json.dumps(task))
    return json.loads(output.splitlines()[-1]), peak_gb


def write_shard(path, count, vocab=VOCAB):
    """A shard of random tokens, the last of the vocabulary first: the header's 256 int32, then uint16 (doc/data.md,
    "Files")."""
    rng = random.Random(0)
    tokens = [vocab - 1] + [rng.randrange(vocab) for _ in range(count - 1)]
    path.write_bytes(struct.pack("<256i", 20240520, 1, count, *([0] * 253)) + struct.pack(f"<{count}H", *tokens))


def run_ours(folder, dtype, B, T):
    """One run of our trainer: milliseconds of each counted step, and its peak memory in GB."""
    out = folder / "run"
    _, peak_gb = run(folder, TRAIN, "--train-data", f"{folder}/*_train_*.bin", "--val-data", f"{folder}/*_val_*.bin",
                     "--model", "124M", "--attn", "softmax", "--dtype", dtype, "--batch", B, "--seq-len", T,
                     "--steps", UNCOUNTED_STEPS + STEPS, "--val-every", 0, "--sample-every", 0, "--ckpt-every", 0,
                     "--out", out)
    ms = [json.loads(line)["ms"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    return ms[UNCOUNTED_STEPS:], peak_gb


# ---------------------------------------------------------------- rounds and the table

def flop_per_token(T):
    """FLOPs per token. Matmuls: 6 for each weight. Attention: two matmuls of C·(T + 1)/2 multiply-adds forward, four
    backward."""
    weights = LAYERS * (4 * CHANNELS * CHANNELS + 3 * CHANNELS * FFN) + PADDED_VOCAB * CHANNELS
    return 6 * weights + LAYERS * 6 * CHANNELS * (T + 1)


def measure(options, folder):
    """Three dictionaries: of each (case, variant) the tokens per second of every round and the peak memory in GB; of
    each dtype the best matmul rate in GFLOP/s."""
    speeds, peaks, rates = {}, {}, {}
    for number in range(options.rounds):
        for dtype in sorted({dtype for dtype, _, _ in options.cases}):
            rate, _ = run_torch(folder, "rate", dtype)
            rates[dtype] = max(rate, rates.get(dtype, 0.0))
            print(f"round {number + 1}: torch.matmul {dtype} {rate:.0f} GFLOP/s", file=sys.stderr, flush=True)
        jobs = [(case, variant) for case in options.cases for variant in ("ours", *options.variants)]
        for case, variant in jobs if number % 2 == 0 else jobs[::-1]:
            dtype, B, T = case
            ms, peak_gb = run_ours(folder, *case) if variant == "ours" else run_torch(folder, variant, *case)
            step = statistics.median(ms)
            speeds.setdefault((case, variant), []).append(1e3 * B * T / step)
            peaks[case, variant] = max(peak_gb, peaks.get((case, variant), 0.0))
            print(f"round {number + 1}: {dtype} B={B} T={T} {variant:8} {step:8.0f} ms {1e3 * B * T / step:7.1f} tok/s "
                  f"{peak_gb:5.2f} GB", file=sys.stderr, flush=True)
    return speeds, peaks, rates


def table(options, speeds, peaks, rates):
    """A Markdown table: tokens per second of every variant, ours over each of the others, and our share of the
    floor. A figure is the median of the rounds."""
    head = ["case", *[f"{variant} tok/s" for variant in ("ours", *options.variants)],
            *[f"ours/{variant}" for variant in options.variants], "floor tok/s", "of floor", "peak GB"]
    rows = []
    for case in options.cases:
        dtype, B, T = case
        ours, *others = (speeds[case, variant] for variant in ("ours", *options.variants))
        floor = 1e9 * rates[dtype] / flop_per_token(T)
        rows.append([f"{dtype} B={B} T={T}", *[f"{statistics.median(speed):.1f}" for speed in (ours, *others)],
                     *[f"{statistics.median(a / b for a, b in zip(ours, other)):.2f}" for other in others],
                     f"{floor:.0f}", f"{statistics.median(ours) / floor:.0%}", f"{peaks[case, 'ours']:.2f}"])
    return table_text(head, rows)


def machine():
    """The processor's name, the vector extensions that matter here, and its cores."""
    facts = dict(re.findall(r"^(.*?)\t*: (.*)", Path("/proc/cpuinfo").read_text(), re.M))
    units = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in facts.get("flags", "").split()]
    return (f"{facts.get('model name', platform.processor())} (family {facts.get('cpu family', '?')}, "
            f"model {facts.get('model', '?')}; {', '.join(units)}), {os.cpu_count()} cores")


def cases_of(text):
    """[(dtype, B, T)]"""
    found = [re.fullmatch(r"(fp32|bf16):([1-9]\d*)x([1-9]\d*)", word) for word in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text}: expected dtype:BxT,..., such as fp32:4x64 or bf16:4x256")
    return [(case[1], int(case[2]), int(case[3])) for case in found]


def some_of(names):
    """For argparse: turns comma-separated names into a list."""
    def words(text):
        if unknown := set(text.split(",")) - set(names):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return text.split(",")
    return words


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=cases_of, default=CASES,
                        help="dtype:BxT, comma-separated (default: %(default)s)")
    parser.add_argument("--variants", type=some_of(VARIANTS), default=",".join(VARIANTS),
                        help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3,
                        help="number of times each process runs (default: %(default)s)")
    options = parser.parse_args()
    if not os.access(TRAIN, os.X_OK):
        parser.error(f"{TRAIN} is missing: build it with make")
    return options


def main():
    if sys.argv[1:2] == ["--child"]:
        import torch
        torch.set_num_threads(THREADS)
        what, *case = json.loads(sys.argv[2])
        return print(json.dumps(matmul_rate(*case) if what == "rate" else torch_steps(what, *case)))
    options = parse()
    with tempfile.TemporaryDirectory(prefix="cpu_step_") as name:
        folder = Path(name)
        tokens = (UNCOUNTED_STEPS + STEPS + 1) * max(B * T for _, B, T in options.cases) + 1
        write_shard(folder / "random_train_000001.bin", tokens)
        write_shard(folder / "random_val_000000.bin", tokens)
        speeds, peaks, rates = measure(options, folder)
    command = " ".join(["dev/bench/cpu_step.py", *sys.argv[1:]])
    print(f"{machine()}; {datetime.date.today().isoformat()}; torch {version('torch')}; {THREADS} threads, "
          f"{options.rounds} rounds of {STEPS} steps\n{command}")
    print("torch.matmul: " + ", ".join(f"{dtype} {rate:.0f} GFLOP/s" for dtype, rate in rates.items()) + "\n")
    print(table(options, speeds, peaks, rates))


if __name__ == "__main__":
    main()

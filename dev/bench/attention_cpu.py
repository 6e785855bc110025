"""Attention alone, forward and backward, for each normalizer, against PyTorch's fastest method.

    .venv/bin/python dev/bench/attention_cpu.py [--lengths 256,1024,4096] [--attn softmax,softmax+window=256]
        [--torch-lengths 1024] [--rounds 3] [--seconds 0.5] [--memory lssa,lssar] [--json F] [--chart F]

Ours is attention/attention_cpu.c, run by build/bench/attention_cpu. PyTorch's is scaled_dot_product_attention for
softmax, and otherwise torch.compile of the formula in dev/reference/model.py, as a researcher would write it. Both use
float32 and the same number of threads. Each round measures every variant once, and every second round in the opposite
order. A time is the median of the rounds, a ratio the median of the rounds' ratios. Compilation and first calls do not
count. 12 heads of 64; one sequence, or as many as make 1,024 tokens.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "build/bench/attention_cpu"
HEADS, SIZE, LONGEST = 12, 64, 16384


def names():
    """The presets, from the program's own table."""
    text = subprocess.run([ROOT / "train_gpt2", "--attn", "help"], capture_output=True, text=True, check=True).stdout
    rows = text.split("\n\n")[1].splitlines()[1:]
    return [row.split()[0] for row in rows]


def sequences(T):
    return max(1, 1024 // T)


def ours(name, T, seconds, heads=HEADS, B=None):
    """Milliseconds forward and backward, and the peak resident size in MB."""
    words = [BENCH, name, T, B or sequences(T), heads, SIZE, seconds]
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
    return [float(x) for x in result.stdout.split()]


def torch_step(name, T):
    """A function that runs forward and backward once and returns the milliseconds of both."""
    import torch
    sys.path.insert(0, str(ROOT / "dev/reference"))
    import model as reference
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
    B, normalizer = sequences(T), reference.parse_normalizer(name)
    shape = (B, HEADS, T, SIZE)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(shape) for _ in range(4))
    scalars = reference.scalars_at_start(normalizer, HEADS, T, torch.float32)
    inputs = [x.requires_grad_() for x in (q, k, v, *scalars.values())]
    if name == "softmax":
        formula = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        attention = lambda q, k, v, *of: reference.attention(q, k, v, normalizer, T, dict(zip(scalars, of)))
        compiled = torch.compile(attention, dynamic=False)
        formula = lambda: compiled(*inputs)

    def step():
        start = time.perf_counter()
        out = formula()
        between = time.perf_counter()
        torch.autograd.grad(out, inputs, dout, allow_unused=True)
        return 1000 * (between - start), 1000 * (time.perf_counter() - between)
    return step


def torch_rate(name, T, seconds):
    """Medians of forward and backward, in a process of its own (the compiler's cache makes later rounds quick)."""
    code = f"""
import sys, time, statistics; sys.path.insert(0, {str(Path(__file__).parent)!r}); import attention_cpu as bench
step = bench.torch_step({name!r}, {T}); step(); step(); runs, start = [], time.time()
while len(runs) < 3 or time.time() - start < {seconds}: runs.append(step())
print(statistics.median(r[0] for r in runs), statistics.median(r[1] for r in runs))"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if result.returncode:
        print(f"{name} T={T}: PyTorch: {result.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return [float(x) for x in result.stdout.split()]


def measure(presets, lengths, torch_lengths, rounds, seconds):
    """{(name, T): [(ours, torch) of each round]}, each a pair of milliseconds."""
    found = {}
    for round_ in range(rounds):
        for T in lengths:
            for name in presets if round_ % 2 == 0 else reversed(presets):
                a, b = ours(name, T, seconds)[:2], torch_rate(name, T, seconds) if T in torch_lengths else None
                found.setdefault((name, T), []).append((a, b))
                print(f"round {round_ + 1}: T={T} {name:22} ours {sum(a):8.2f} ms  torch "
                      f"{sum(b) if b else float('nan'):8.2f} ms", flush=True)
    return found


def median_of(rounds, value):
    values = [value(a, b) for a, b in rounds if b]
    return statistics.median(values) if values else float("nan")


def table(found, presets, lengths, memory):
    rows = []
    for T in lengths:
        base = found.get(("softmax", T))
        for name in presets:
            here = found[name, T]
            milliseconds = statistics.median(sum(a) for a, _ in here)
            of_softmax = statistics.median(sum(a) / sum(s) for (a, _), (s, _) in zip(here, base)) if base else None
            rows.append({"name": name, "T": T, "forward_ms": statistics.median(a[0] for a, _ in here),
                         "backward_ms": statistics.median(a[1] for a, _ in here), "ms": milliseconds,
                         "torch_ms": median_of(here, lambda a, b: sum(b)),
                         "times_torch": median_of(here, lambda a, b: sum(b) / sum(a)),
                         "of_softmax": of_softmax, "memory": memory.get(name)})
    return rows


def print_table(rows):
    print("\n| normalizer | T | forward ms | backward ms | PyTorch ms | PyTorch/ours | ours/our softmax | peak at T = "
          f"{LONGEST:,} over softmax's |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        of_softmax = f"{r['of_softmax']:.2f}" if r["of_softmax"] else ""
        memory = f"{r['memory']:.2f}" if r["memory"] else ""
        print(f"| {r['name']} | {r['T']} | {r['forward_ms']:.2f} | {r['backward_ms']:.2f} | {r['torch_ms']:.2f} | "
              f"{r['times_torch']:.2f} | {of_softmax} | {memory} |")


def draw(rows, lengths, path):
    sys.path.insert(0, str(ROOT / "scripts"))
    from lib import canvas  # noqa: F401
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(lengths), figsize=(5 * len(lengths), 7), squeeze=False)
    for axis, T in zip(axes[0], lengths):
        here = [r for r in rows if r["T"] == T]
        at = range(len(here))
        axis.barh([y + 0.2 for y in at], [r["ms"] for r in here], 0.4, label="ours")
        if any(r["torch_ms"] == r["torch_ms"] for r in here):
            axis.barh([y - 0.2 for y in at], [r["torch_ms"] for r in here], 0.4, label="PyTorch")
        axis.set(title=f"T = {T}", xlabel="ms, forward and backward", yticks=list(at),
                 yticklabels=[r["name"] for r in here])
        axis.invert_yaxis()
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="256,1024,4096")
    parser.add_argument("--torch-lengths", default="",
                        help="lengths at which PyTorch also runs (it compiles for each); default: all")
    parser.add_argument("--attn", default="", help="comma-separated presets; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per measurement")
    parser.add_argument("--memory", default="",
                        help="presets whose peak resident size is measured, at 16,384 tokens and 6 heads")
    parser.add_argument("--json")
    parser.add_argument("--chart")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    subprocess.run(["make", "-s", "train_gpt2", "build/bench/attention_cpu"], check=True)
    presets = arguments.attn.split(",") if arguments.attn else names()
    lengths = [int(T) for T in arguments.lengths.split(",")]
    peaks = {name: ours(name, LONGEST, 0, heads=HEADS // 2, B=1)[2]
             for name in dict.fromkeys(["softmax", *arguments.memory.split(",")]) if arguments.memory}
    torch_lengths = [int(T) for T in arguments.torch_lengths.split(",")] if arguments.torch_lengths else lengths
    found = measure(presets, lengths, torch_lengths, arguments.rounds, arguments.seconds)
    rows = table(found, presets, lengths, {name: peak / peaks["softmax"] for name, peak in peaks.items()})
    print_table(rows)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    if arguments.chart:
        draw(rows, lengths, arguments.chart)


if __name__ == "__main__":
    main()

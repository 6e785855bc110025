"""attn_c's attention on a GPU through PyTorch: its results beside the CPU's, and its speed beside PyTorch's.

    make attn_c && PYTHONPATH=build/python python dev/bench/torch_gpu.py [--device cuda]

Every preset, in float32 and bfloat16, forward and backward, with grouped heads, padding and fewer queries than keys,
must equal the CPU's float32 numbers. Then milliseconds of forward and backward of softmax, ssmax and lssar in bfloat16
at T = 1,024 and 4,096, 12 heads of 64, 16,384 tokens, and of scaled_dot_product_attention for softmax. The exit status
is 1 if a result is wrong. --device cpu tries the script itself, with small shapes."""
import argparse
import statistics
import sys
import time

import torch
from torch.nn import functional as F

import attn_c

SEQ_LEN = 96
CASES = {       # B, heads, kv heads, queries, keys, padding
    "plain": (2, 2, 2, 70, 70, None),
    "grouped": (1, 4, 2, 33, 33, None),
    "padded": (2, 2, 1, 40, 40, [0, 7]),
    "cached": (1, 2, 2, 3, 50, None),
}
BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.1}     # of a tensor's norm


def inputs_of(case, dtype):
    B, heads, kv_heads, queries, keys, _ = CASES[case]
    torch.manual_seed(1)
    shapes = (B, heads, queries, 64), (B, kv_heads, keys, 64), (B, kv_heads, keys, 64), (B, heads, queries, 64)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def results(name, case, inputs, device):
    """out, dq, dk, dv and the gradients of the scalars, as float32 on the CPU."""
    *qkv, dout = (x.to(device) for x in inputs)
    norm = attn_c.Normalizer(name, heads=qkv[0].shape[1], seq_len=SEQ_LEN).to(device)
    wanted = [x.requires_grad_() for x in qkv] + [p for p in norm.parameters() if p.requires_grad]
    start = CASES[case][5]
    out = norm(*qkv, start=None if start is None else torch.tensor(start, device=device))
    return [x.detach().float().cpu() for x in (out, *torch.autograd.grad(out, wanted, dout))]


def check(device):
    """The worst error, and the number of wrong results."""
    worst, wrong = 0.0, 0
    for name in attn_c.PRESETS:
        for case in CASES:
            if case == "padded" and name == "relu2-T":      # not supported on GPUs
                continue
            for dtype, bound in BOUND.items():
                inputs = inputs_of(case, dtype)
                expected = results(name, case, [x.float() for x in inputs], "cpu")
                for what, x, y in zip(("out", "dq", "dk", "dv", "ds"), results(name, case, inputs, device), expected):
                    error = ((x - y).norm() / y.norm().clamp(min=1e-6)).item()
                    worst = max(worst, error)
                    if not error <= bound:
                        wrong += 1
                        print(f"FAILED {name}, {case}, {dtype}: {what} is {error:.2g} off")
    return worst, wrong


def milliseconds(step, device):
    """The median of 0.3 s, and of at least five steps."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, end = [], time.perf_counter() + 0.3
    step()
    while len(times) < 5 or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def speed(device):
    tokens, lengths = (16384, (1024, 4096)) if device == "cuda" else (128, (64,))
    for T in lengths:
        q, k, v, dout = (torch.randn(tokens // T, 12, T, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        ways = {name: attn_c.Normalizer(name, 12, T).to(device) for name in ("softmax", "ssmax", "lssar")}
        ways["scaled_dot_product_attention"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for name, way in ways.items():
            step = lambda: torch.autograd.grad(way(*inputs), inputs, dout)
            print(f"T = {T}: {name} {milliseconds(step, device):.3f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    worst, wrong = check(options.device)
    print(f"{len(attn_c.PRESETS)} normalizers: the worst error is {worst:.2g} of a tensor's norm, {wrong} are wrong")
    speed(options.device)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

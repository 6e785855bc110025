"""Attention alone on the CPU, forward and backward, for each normalizer.

    .venv/bin/python dev/bench/attention_cpu.py [--lengths 1024] [--attn softmax,lssar] [--variants C,attn_c]
        [--rounds 11] [--seconds 0.1] [--level v3]
    .venv/bin/python dev/bench/attention_cpu.py --overhead

In milliseconds, with float32, 12 heads of 64, and the same number of threads; one sequence, or as many as make 1,024
tokens:

    C         attention/attention_cpu.c as the trainer has it, run by build/bench/attention_cpu
    attn_c    the PyTorch package, in eager mode; --level selects its library for other processors
    PyTorch   scaled_dot_product_attention for softmax, and otherwise torch.compile of the formula in
              dev/reference/model.py, as a researcher would write it
    Flex      FlexAttention's forward pass (it has no other on CPUs), for normalizers that only scale softmax's scores

Variants alternate: a round measures each for --seconds, so that a slow minute of the machine meets all of them. A time
is the median of the rounds, a ratio the median of the rounds' ratios. Compilation and first calls do not count.

--overhead prints instead what a call costs that has almost nothing to compute, in microseconds over the call of the C
function by ctypes, beside a PyTorch operator that computes nothing.
"""
import argparse
import importlib
import json
import operator
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from cpu_step import some_of
from gpu_report import table_text

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "build/python"), str(ROOT / "dev/reference")]
HEADS, SIZE = 12, 64


def sequences(T):
    return max(1, 1024 // T)


# ---------------------------------------------------------------- the variants

def c_function(name, T, seconds):
    """Milliseconds forward and backward."""
    words = [ROOT / "build/bench/attention_cpu", name, T, sequences(T), HEADS, SIZE, seconds]
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
    return [float(x) for x in result.stdout.split()]


def timed(forward, wanted, dout):
    """A function that runs forward, and with `dout` backward, once, and returns the milliseconds of both."""
    import torch

    def step():
        start = time.perf_counter()
        out = forward()
        between = time.perf_counter()
        if dout is not None:
            torch.autograd.grad(out, wanted, dout, allow_unused=True)
        return 1000 * (between - start), 1000 * (time.perf_counter() - between)
    return step


def inputs_for(T):
    """q, k, v, and dout, in memory by position, as projections write them."""
    import torch
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(sequences(T), T, HEADS, SIZE).transpose(1, 2) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], dout


def by_attn_c(name, T):
    from attn_c import Normalizer
    inputs, dout = inputs_for(T)
    norm = Normalizer(name, HEADS, T)
    wanted = [*inputs, *(p for p in norm.parameters() if p.requires_grad)]
    return timed(lambda: norm(*inputs), wanted, dout)


def by_pytorch(name, T):
    import torch
    import model as reference
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(sequences(T), HEADS, T, SIZE) for _ in range(4))
    normalizer = reference.parse_normalizer(name)
    scalars = reference.scalars_at_start(normalizer, HEADS, T, torch.float32)
    inputs = [x.requires_grad_() for x in (q, k, v, *scalars.values())]
    if name == "softmax":
        return timed(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, dout)
    attention = lambda q, k, v, *of: reference.attention(q, k, v, normalizer, T, dict(zip(scalars, of)))
    compiled = torch.compile(attention, dynamic=False)
    return timed(lambda: compiled(*inputs), inputs, dout)


def by_flex(name, T):
    """None if the normalizer is not just softmax with other scores."""
    import torch
    import model as reference
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    normalizer = reference.parse_normalizer(name)
    if (normalizer.qk, normalizer.phi, normalizer.norm, normalizer.post) != ("none", "exp", "l1", "none"):
        return None
    inputs = [x.detach() for x in inputs_for(T)[0]]
    scalars = reference.scalars_at_start(normalizer, HEADS, T, torch.float32)
    n = torch.arange(1, T + 1.0)[:, None]
    scale = torch.as_tensor(reference.scale_of_row(normalizer.scale, n, SIZE, T, scalars)) * torch.ones(HEADS, T, 1)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    score_mod = lambda s, b, h, i, j: s * scale[h, i, 0]
    return timed(lambda: compiled(*inputs, score_mod=score_mod, block_mask=mask, scale=1.0), inputs, None)


IN_PYTHON = {"attn_c": by_attn_c, "PyTorch": by_pytorch, "Flex": by_flex}
VARIANTS = ("C", *IN_PYTHON)


# ---------------------------------------------------------------- a normalizer at a length, in a process of its own

def use(level):
    """As many threads as the C function has, and the library for a level of processors."""
    import torch
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
    if level:
        from attn_c import library, ops
        ops.library_for = lambda dtype: library.load(level)


def started(variant, name, T):
    """The variant's step, compiled; None if it cannot compute this normalizer."""
    try:
        step = IN_PYTHON[variant](name, T)
        for _ in range(2 if step else 0):
            step()
        return step
    except Exception as error:      # of PyTorch's compiler
        print(f"{name} T={T}: {variant}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return None


def repeated(step, seconds):
    """Medians of forward and backward."""
    runs, start = [], time.time()
    while not runs or time.time() - start < seconds:
        runs.append(step())
    return [statistics.median(ms) for ms in zip(*runs)]


def alternate(name, T, variants, rounds, seconds, level):
    """{variant: [(forward, backward) of each round]}, without variants that cannot compute this normalizer."""
    in_python = [variant for variant in variants if variant != "C"]
    if in_python:
        use(level)
    steps = {variant: started(variant, name, T) for variant in in_python}
    found = {variant: [] for variant in variants if variant == "C" or steps[variant]}
    for _ in range(rounds):
        for variant in filter(steps.get, in_python):
            found[variant].append(repeated(steps[variant], seconds))
        if "C" in variants:
            time.sleep(0.02)        # until PyTorch's threads no longer wait actively
            found["C"].append(c_function(name, T, seconds))
    return found


def measure(names, lengths, options):
    """{(name, T): what alternate() returns}"""
    found = {}
    for T in lengths:
        for name in names:
            task = [name, T, options.variants, options.rounds, options.seconds, options.level]
            words = [sys.executable, __file__, "--child", json.dumps(task)]
            result = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            found[name, T] = json.loads(result.stdout)
            print(f"T={T} {name:22} " + "  ".join(f"{variant} {median(times):.2f} ms"
                                                  for variant, times in found[name, T].items()),
                  file=sys.stderr, flush=True)
    return found


# ---------------------------------------------------------------- the table

def median(times, of=sum):
    """Of both passes, or what else `of` takes; None if there are no rounds."""
    return statistics.median(map(of, times)) if times else None


def over(times, others):
    """The median of the rounds' ratios."""
    return statistics.median(sum(a) / sum(b) for a, b in zip(times, others)) if times and others else None


def row(name, T, times, softmax):
    """times: {variant: rounds}. softmax: those at this length, or {}."""
    C, attn_c, pytorch, flex = (times.get(variant, []) for variant in VARIANTS)
    forward, backward = operator.itemgetter(0), operator.itemgetter(1)
    return {"name": name, "T": T, "C forward": median(C, forward), "C backward": median(C, backward), "C": median(C),
            "attn_c": median(attn_c), "PyTorch": median(pytorch), "PyTorch/C": over(pytorch, C),
            "C/attn_c": over(C, attn_c), "PyTorch/attn_c": over(pytorch, attn_c),
            "C/softmax's C": over(C, softmax.get("C")), "attn_c forward": median(attn_c, forward),
            "Flex forward": median(flex, forward)}


# ---------------------------------------------------------------- what a call costs

def microseconds(functions, calls=60, rounds=125):
    """{name: the least of a call}. Each round measures every function, so that a disturbance meets all of them."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[name] = min(best[name], 1e6 * (time.perf_counter() - start) / calls)
    return best


def empty_operator():
    """An operator with the arguments and outputs of attn_c's, but nothing to compute, made as PyTorch's guide says: an
    implementation, and an autograd.Function that calls it."""
    import torch
    from attn_c import ops
    library = torch.library.Library("empty", "DEF")
    library.define(f"attention({ops.ARGUMENTS}) -> (Tensor out, Tensor stats)")
    operator = torch.ops.empty.attention.default

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            with ops.BelowAutograd():
                out, stats = operator(*arguments)
            ctx.save_for_backward(out, stats, *arguments[:5])
            ctx.mark_non_differentiable(stats)
            return out, stats

    def autograd(*arguments):
        if ops.is_differentiated(arguments[:4]):
            return Function.apply(*arguments)
        with ops.BelowAutograd():
            return operator(*arguments)

    library.impl("attention", lambda q, *others: (torch.empty_like(q), q.new_empty((*q.shape[:3], 4))), "CPU")
    library.impl("attention", autograd, "Autograd")
    return operator, library        # which has the operator only as long as it lives


def overhead():
    """{whether there is a gradient: {what is called: microseconds of a forward pass}}, for 8 tokens and two heads of 8,
    on one thread. "C": the C function by ctypes."""
    import torch
    from attn_c import Normalizer, attention, ops
    torch.set_num_threads(1)
    (empty, _library), found = empty_operator(), {}
    for gradient in False, True:
        x = torch.randn(1, 2, 8, 8, requires_grad=gradient)
        q, _, _, _, scalars, plan = ops.prepare(x, x, x, None, None, "softmax", None, None)
        arrays = [torch.empty(n) for n in (128, 64, plan.scratch)]
        where = [q.data_ptr()] * 3 + [None, scalars.data_ptr(), *(a.data_ptr() for a in arrays)]
        s = torch.ones(2, requires_grad=gradient)
        calls = {"C": lambda: plan.forward(plan.pointer, *where),
                 "empty operator": lambda: empty(x, x, x, s, None, "ssmax", 8, None),
                 'attention("softmax")': lambda: attention(x, x, x, "softmax"),
                 'attention("ssmax")': lambda: attention(x, x, x, "ssmax", seq_len=8, scalars={"attn_scale": s})}
        for name in "ssmax", "ssmax-bias":
            module = Normalizer(name, 2, 8).requires_grad_(gradient)
            calls[f'Normalizer("{name}")'] = lambda module=module: module(x, x, x)
        found["with a gradient" if gradient else "without a gradient"] = microseconds(calls)
    return found


def print_overhead():
    for how, us in overhead().items():
        print(f"a forward pass {how}: C function {us['C']:.1f} us, empty operator {us['empty operator']:.1f} us; over "
              "the C function: " + ", ".join(f"{name} {us[name] - us['C']:.1f} us" for name in list(us)[2:]))


def main():
    if sys.argv[1:2] == ["--child"]:
        return print(json.dumps(alternate(*json.loads(sys.argv[2]))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024")
    parser.add_argument("--attn", default="", help="comma-separated presets; default: all")
    parser.add_argument("--variants", type=some_of(VARIANTS), default=",".join(VARIANTS),
                        help="comma-separated; default: all")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.1, help="seconds of each variant in a round")
    parser.add_argument("--level", help="v3, v4 or bf16: attn_c's library for these processors; default: the best")
    parser.add_argument("--overhead", action="store_true")
    options = parser.parse_args()
    os.chdir(ROOT)
    subprocess.run(["make", "-s", "attn_c", "build/bench/attention_cpu"], check=True, stdout=subprocess.DEVNULL)
    importlib.invalidate_caches()       # build/python is new in a fresh clone
    if options.overhead:
        return print_overhead()
    from attn_c import PRESETS
    names = options.attn.split(",") if options.attn else PRESETS
    if unknown := set(names) - set(PRESETS):
        parser.error(f"--attn: unknown: {', '.join(sorted(unknown))}")
    lengths = [int(T) for T in options.lengths.split(",")]
    found = measure(names, lengths, options)
    rows = [row(name, T, found[name, T], found.get(("softmax", T), {})) for T in lengths for name in names]
    print("\n" + table_text(rows[0], [[f"{x:.2f}" if isinstance(x, float) else "" if x is None else x
                                       for x in r.values()] for r in rows]))


if __name__ == "__main__":
    main()

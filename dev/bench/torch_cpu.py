"""attn_c's attention through PyTorch, on the CPU, beside PyTorch's own ways to compute the same values.

    .venv/bin/python dev/bench/torch_cpu.py [--lengths 1024] [--attn softmax,lssar | --attn all] [--rounds 11]
        [--seconds 0.1] [--level v3] [--json F] [--overhead]

In milliseconds, forward and backward: attn_c by attention(), in eager mode; the C function alone
(build/bench/attention_cpu); scaled_dot_product_attention for softmax, and otherwise torch.compile of the formula in
dev/reference/model.py. Forward alone: attn_c and FlexAttention, which on CPUs has no backward pass, for the normalizers
that only scale softmax's scores. float32, 12 heads of 64, the same number of threads; one sequence, or as many as make
1,024 tokens. Variants alternate: a round measures each for --seconds, so that a slow minute of the machine meets all
of them. A time is the median of the rounds, a ratio the median of the rounds' ratios. The last lines are what a call
costs that has almost nothing to compute, in microseconds over the call of the C function by ctypes, beside a PyTorch
operator that computes nothing. --overhead prints these alone. --level selects a library for other processors."""
import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "build/python"), str(ROOT / "dev/reference"), str(ROOT / "dev/bench")]
import attention_cpu        # noqa: E402
from attention_cpu import HEADS, SIZE, sequences        # noqa: E402


def inputs_for(name, T):
    import torch
    from attn_c import Normalizer
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(sequences(T), T, HEADS, SIZE).transpose(1, 2) for _ in range(4))
    return Normalizer(name, HEADS, T), [x.requires_grad_() for x in (q, k, v)], dout


def attn_c_step(name, T):
    """A function that runs forward and backward once and returns the milliseconds of both."""
    import torch
    norm, inputs, dout = inputs_for(name, T)
    wanted = [*inputs, *(p for p in norm.parameters() if p.requires_grad)]

    def step():
        start = time.perf_counter()
        out = norm(*inputs)
        between = time.perf_counter()
        torch.autograd.grad(out, wanted, dout)
        return 1000 * (between - start), 1000 * (time.perf_counter() - between)
    return step


def flex_step(name, T):
    """The same for FlexAttention's forward pass, or None if it is not just softmax with other scores."""
    import model as reference
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    normalizer = reference.parse_normalizer(name)
    if (normalizer.qk, normalizer.phi, normalizer.norm, normalizer.post) != ("none", "exp", "l1", "none"):
        return None
    inputs = [x.detach() for x in inputs_for(name, T)[1]]
    scalars = reference.scalars_at_start(normalizer, HEADS, T, torch.float32)
    n = torch.arange(1, T + 1.0)[:, None]
    scale = torch.as_tensor(reference.scale_of_row(normalizer.scale, n, SIZE, T, scalars)) * torch.ones(HEADS, T, 1)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    def step():
        start = time.perf_counter()
        compiled(*inputs, score_mod=lambda s, b, h, i, j: s * scale[h, i, 0], block_mask=mask, scale=1.0)
        return 1000 * (time.perf_counter() - start), 0
    return step


VARIANTS = {"attn_c": attn_c_step, "PyTorch": attention_cpu.torch_step, "Flex": flex_step}


def use(level):
    """As many threads as the other variants have, and the library for a level of processors."""
    import torch
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
    if level:
        from attn_c import library, ops
        ops.library_for = lambda dtype: library.load(level)


def started(variant, name, T):
    """The variant's step, compiled; None if it cannot compute this normalizer."""
    try:
        step = VARIANTS[variant](name, T)
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


def alternate(name, T, rounds, seconds):
    """[{variant: (forward, backward)} of each round]"""
    steps = {variant: started(variant, name, T) for variant in VARIANTS}
    found = []
    for _ in range(rounds):
        found.append({variant: step and repeated(step, seconds) for variant, step in steps.items()})
        time.sleep(0.02)        # until PyTorch's threads no longer wait actively
        found[-1]["C"] = attention_cpu.ours(name, T, seconds)[:2]
    return found


def measure(names, lengths, rounds, seconds, level):
    """{(name, T): what alternate() returns}, each in a process of its own."""
    found = {}
    for T in lengths:
        for name in names:
            code = f"""
import sys, json; sys.path.insert(0, {str(ROOT / "dev/bench")!r}); import torch_cpu as bench
bench.use({level!r}); print(json.dumps(bench.alternate({name!r}, {T}, {rounds}, {seconds})))"""
            result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
            found[name, T] = json.loads(result.stdout)
            print(f"T={T} {name:22} " + "  ".join(
                f"{variant} {median(found[name, T], total(variant)):.2f} ms" for variant in (*VARIANTS, "C")
                if found[name, T][0][variant]), file=sys.stderr, flush=True)
    return found


def median(rounds, value):
    values = [value(here) for here in rounds if value(here) is not None]
    return statistics.median(values) if values else None


def total(variant):
    return lambda here: sum(here[variant]) if here[variant] else None


def row(name, T, rounds):
    over = lambda a, b: lambda here: total(a)(here) / total(b)(here) if here[a] and here[b] else None
    return {"name": name, "T": T, "attn_c": median(rounds, total("attn_c")), "C": median(rounds, total("C")),
            "PyTorch": median(rounds, total("PyTorch")), "C/attn_c": median(rounds, over("C", "attn_c")),
            "PyTorch/attn_c": median(rounds, over("PyTorch", "attn_c")),
            "attn_c forward": median(rounds, lambda here: here["attn_c"][0]),
            "Flex forward": median(rounds, total("Flex"))}


def print_table(rows):
    print("\n| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for r in rows:
        print("| " + " | ".join(f"{x:.2f}" if isinstance(x, float) else str("" if x is None else x)
                                for x in r.values()) + " |")


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024")
    parser.add_argument("--attn", default="softmax,ssmax,softmax1,softmax-recentered-l1,lssa,lssar")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.1, help="seconds of each variant in a round")
    parser.add_argument("--level", help="v3, v4 or bf16: the library for these processors; default: the best")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--overhead", action="store_true", help="only the last lines")
    options = parser.parse_args()
    os.chdir(ROOT)
    subprocess.run(["make", "-s", "attn_c", "build/bench/attention_cpu", "train_gpt2"], check=True,
                   stdout=subprocess.DEVNULL)
    importlib.invalidate_caches()       # build/python is new in a fresh clone
    names = attention_cpu.names() if options.attn == "all" else options.attn.split(",")
    if unknown := set(names) - set(attention_cpu.names()):
        parser.error(f"--attn: unknown: {', '.join(sorted(unknown))}")
    lengths = [int(T) for T in options.lengths.split(",")]
    if options.overhead:
        lengths = []
    found = measure(names, lengths, options.rounds, options.seconds, options.level)
    rows = [row(name, T, found[name, T]) for T in lengths for name in names]
    if rows:
        print_table(rows)
        print()
    for how, us in overhead().items():
        print(f"a forward pass {how}: C function {us['C']:.1f} us, empty operator {us['empty operator']:.1f} us; over "
              "the C function: " + ", ".join(f"{name} {us[name] - us['C']:.1f} us" for name in list(us)[2:]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

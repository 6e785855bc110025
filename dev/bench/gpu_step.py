"""The training step on a GPU against the same model in PyTorch: tokens per second, memory, and where our time goes.

    python3 dev/bench/gpu_step.py REPORT step [--budget 500]
        124M at T = 1024: B = 16, also ours with other flags, then the largest batch that fits; and the phases of our
        step
    python3 dev/bench/gpu_step.py REPORT larger [--budget 500]
        the same for 162M, without the phases
    python3 dev/bench/gpu_step.py REPORT memory [--budget 300]
        124M, 16,384 tokens per batch, T = 1k to 16k: a step's memory
    python3 dev/bench/gpu_step.py REPORT step --dry-run --ours ./train_gpt2
        a tiny model on the CPU, to show that everything runs

Each case runs in a process of its own, one at a time. Both sides do the whole step: forward, backward, gradient
clipping, AdamW, and a new batch each time.

    ours       ./train_gpt2cu --dtype bf16 with its usual flags (float32 master weights and moments)
    autocast   torch.compile, scaled_dot_product_attention, bf16 autocast over float32 weights, AdamW(fused=True): the
               same numerics as ours
    bf16       the same with weights, gradients and moments in bf16: less memory traffic than ours, but less exact; no
               autocast
    no graphs  ours with --graphs 0
    any order  ours with --deterministic 0: sums of dq in any order, and the fastest matmul algorithms

Both sides leave out the same number of steps at the start, and both are timed with the host's clock from the end of one
step on the device to the end of the next: ours is `ms` in metrics.jsonl. Under PyTorch the host runs one step ahead of
the device, so that the device never waits for it. A figure is the median. Nothing else runs at the same time, except in
the memory part, which calls nvidia-smi and whose times are therefore not measurements. A case that does not end within
LIMIT seconds has failed; a case that the end of the budget cuts off is left for the next call.

The model is that of dev/bench/cpu_step.py, written as a skilled user would: one matmul for q, k and v, one for gate and
up, and a vocabulary padded to 50,304.
"""
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cpu_step
import gpu_report

ROOT = cpu_step.ROOT

# Llama()'s arguments. tiny: of a dry run.
SIZES = {"layers": cpu_step.LAYERS, "heads": cpu_step.HEADS, "channels": cpu_step.CHANNELS, "ffn": cpu_step.FFN,
         "vocab": cpu_step.PADDED_VOCAB}
MODELS = {"124M": {**SIZES, "tied": True}, "162M": {**SIZES, "tied": False},
          "tiny": {"layers": 1, "heads": 2, "channels": 96, "ffn": 128, "vocab": 128, "tied": True}}
# The last two only with B = 16.
VARIANTS = ("ours", "autocast", "bf16", "no graphs", "any order")
FLAGS = {"ours": [], "no graphs": ["--graphs", 0], "any order": ["--deterministic", 0]}    # of our variants
UNCOUNTED, STEPS, MARGIN_GB = 10, 20, 3.0     # MARGIN_GB: what CUDA, cuBLASLt and the allocator need besides the model
TOKENS, LENGTHS = 16384, (4096, 16384, 1024, 2048, 8192)
DRY = False


def device():
    return "cpu" if DRY else "cuda"


def tokens_of(model):
    """The size of the vocabulary without padding."""
    return min(cpu_step.VOCAB, MODELS[model]["vocab"])


# ---------------------------------------------------------------- PyTorch, in a child process

def torch_steps(task):
    """Trains; returns the milliseconds of each counted step and the peak memory."""
    import torch
    on = device()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    pure = task["variant"] == "bf16"
    model = cpu_step.torch_model()(task["T"], **MODELS[task["model"]]).to(on, torch.bfloat16 if pure else torch.float32)
    optimizer = cpu_step.optimizer_of(model)
    forward = model if DRY else torch.compile(model)
    steps = task["uncounted"] + task["steps"]
    batches = torch.randint(0, tokens_of(task["model"]), (min(steps, 8), task["B"], task["T"] + 1))
    batches = batches if DRY else batches.pin_memory()
    ends, running = [], []
    for i in range(steps):
        batch = batches[i % len(batches)].to(on, non_blocking=True)
        with torch.autocast(on, dtype=torch.bfloat16, enabled=not pure):
            loss = forward(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cpu_step.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running.append(mark())
        if i > 0:
            ends.append(end_of(running.pop(0)))           # the previous step's: one step is always queued
    ends.append(end_of(running.pop(0)))
    if not torch.isfinite(loss).item():
        raise SystemExit(f"gpu_step: the loss is {loss.item()}")
    ms = [1e3 * (b - a) for a, b in zip(ends, ends[1:])][task["uncounted"] - 1:]
    peak = 0 if DRY else torch.cuda.max_memory_allocated() / 1e9
    reserved = 0 if DRY else torch.cuda.max_memory_reserved() / 1e9
    return {"ms": ms, "peak_gb": peak, "reserved_gb": reserved}


def end_of(event):
    """Waits until the device reaches an event of mark(), and returns the host's time."""
    if DRY:
        return event
    event.synchronize()
    return time.perf_counter()


def mark():
    """Records a point in the device's work."""
    if DRY:
        return time.perf_counter()
    import torch
    event = torch.cuda.Event()
    event.record()
    return event


def ceilings(task):
    """This device's ceilings: bytes per second of a large copy (read and written), and FLOP/s of a large bf16 matmul of
    random numbers. And whether attention's backward pass undoes RoPE here, too."""
    import torch
    from torch.utils.benchmark import Timer
    size, n = (1 << 20, 256) if DRY else (1 << 31, 8192)
    a, b = (torch.randn(n, n, device=device()).bfloat16() for _ in range(2))
    source, target = (torch.empty(size, dtype=torch.uint8, device=device()) for _ in range(2))
    best = {}
    for name, amount, call in (("bytes", 2 * size, lambda: target.copy_(source)), ("flops", 2 * n ** 3, lambda: a @ b)):
        best[name] = amount / Timer("call()", globals={"call": call}).timeit(20).mean
    wgmma = not DRY and torch.cuda.get_device_capability()[0] == 9 and os.environ.get("FLASH90") != "0"
    return best | {"undoes_rope": wgmma}


def child(task):
    import torch
    try:
        return (ceilings if task["variant"] == "ceilings" else torch_steps)(task)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}


# Seconds after which a case has failed. A dry run has more time, because its machine may be slow.
LIMIT = {"ours": 120, "autocast": 240, "bf16": 240, "ceilings": 120}


def run_within(what, budget, *words):
    """Runs a command; returns (the result of subprocess.run(), None), or (None, the record of the case): {"failed":
    ...}, also if it reached its LIMIT, or {"left": ...} if it reached the end of this program's budget."""
    limit = LIMIT[what] * (10 if DRY else 1)
    seconds = min(limit, max(0.1, budget.until_stop()))
    try:
        result = subprocess.run(list(map(str, words)), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                timeout=seconds)
    except subprocess.TimeoutExpired as error:
        for text in filter(None, (error.stdout, error.stderr)):
            text = text.decode(errors="replace") if isinstance(text, bytes) else text
            print(text[-2000:], file=sys.stderr)
        if seconds == limit:
            return None, {"failed": f"timed out after {limit:g} s"}
        return None, {"left": f"stopped after {seconds:.0f} s, at the end of this call's time"}
    if result.returncode == 0:
        return result, None
    print(result.stdout[-2000:] + result.stderr[-2000:], file=sys.stderr)
    lines = result.stderr.strip().splitlines() or [""]
    said = lines[-1 if words[0] == sys.executable else 0]       # the error, of which our programs then tell more
    return None, {"failed": "out of memory" if result.returncode == 4
                  else f"exit code {result.returncode}: {said[:160]}"}


def run_torch(budget, **task):
    """Runs child() in a process of its own, or in a dry run in this one, which is quicker."""
    if DRY:
        return child(task)
    result, problem = run_within(task["variant"], budget, sys.executable, __file__, "child", json.dumps(task))
    return problem or json.loads(result.stdout.splitlines()[-1])


# ---------------------------------------------------------------- ours

def memory_gb(query):
    """The answer of the first GPU to a query about memory, in GB; None if nvidia-smi does not report it."""
    word = (gpu_report.ask_gpu(query).split() or [""])[0]
    return int(word) * 1.048576e-3 if word.isdecimal() else None


@contextlib.contextmanager
def watch_memory(found):
    """Sets found["used_gb"] to the peak device memory in use meanwhile, in GB beyond what was in use before; to None if
    nvidia-smi does not report it."""
    before, done = memory_gb("memory.used"), threading.Event()
    found["used_gb"] = None

    def watch():
        while before is not None and not done.wait(0.1):
            now = memory_gb("memory.used")
            if now is None:
                return
            found["used_gb"] = max(now - before, found["used_gb"] or 0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def our_command(program, model, B, T, steps, data, variant="ours"):
    shape = ",".join(f"{key}={int(value)}" for key, value in MODELS[model].items()) if model == "tiny" else model
    return [program, "--train-data", f"{data}/*_train_*.bin", "--model", shape, "--attn", "softmax",
            "--dtype", "bf16", "--batch", B, "--seq-len", T, "--steps", steps, "--val-every", 0, "--ckpt-every", 0,
            *FLAGS[variant]]


def scratch_folder():
    """A folder in memory if it has room for the checkpoint of 2 GB with which a run ends."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 16e9
    return tempfile.TemporaryDirectory(prefix="gpu_step_", dir=shared if roomy else None)


def run_ours(options, model, B, T, steps, profile=False, variant="ours"):
    """{ms, peak_gb (from the plan), mfu} of a run, in the part memory also used_gb (from nvidia-smi); with `profile`,
    {phases: {name: ms per step}}."""
    with scratch_folder() as name:
        data, out, used = Path(name), Path(name) / "run", {}
        cpu_step.write_shard(data / "random_train_000001.bin", 2 * B * T + 1, tokens_of(model))
        words = (our_command(options.ours, model, B, T, UNCOUNTED + steps, data, variant)
                 + (["--profile"] if profile else ["--out", out]))
        # Asking nvidia-smi slows the device down.
        with watch_memory(used) if options.part == "memory" else contextlib.nullcontext():
            result, problem = run_within("ours", options.budget, *words)
        if problem:
            return problem
        if profile:
            return {"phases": {m[1].strip(): float(m[2])
                               for m in re.finditer(r"^(\S.*?) +([0-9.]+) +[0-9.]+%$", result.stdout, re.M)}}
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][UNCOUNTED:]
        return {"ms": [line["ms"] for line in lines], "mfu": statistics.median(line.get("mfu") or 0 for line in lines),
                "peak_gb": lines[-1].get("gpu_memory_gb", 0), **used}


# ---------------------------------------------------------------- cases

def measure(options, model, B, T, variant, steps):
    result = run_ours(options, model, B, T, steps, variant=variant) if variant in FLAGS else \
        run_torch(options.budget, variant=variant, model=model, B=B, T=T, steps=steps, uncounted=UNCOUNTED)
    if "ms" in result:
        result["tok_per_s"] = 1e3 * B * T / statistics.median(result["ms"])
    said = (result.get("failed") or result.get("left")
            or f"{result['tok_per_s']:10.0f} tok/s, {result['peak_gb']:.1f} GB")
    print(f"{model} B={B} T={T} {variant:9} {said}", flush=True)
    return result


def parameters(model):
    """The number of parameters; a tied embedding counts once."""
    s = MODELS[model]
    C, F = s["channels"], s["ffn"]
    return s["layers"] * (4 * C * C + 3 * C * F + 2 * C) + (1 if s["tied"] else 2) * s["vocab"] * C + C


def largest_batch(at_16, model, variant):
    """The largest batch that should fit, a multiple of 8, extrapolated from the memory at B = 16: the part that does
    not depend on the batch is known, and the rest is proportional to it. Our logits do not grow: where memory is
    scarce, the trainer computes fewer rows of them at a time. 16 if nvidia-smi does not report the GPU's memory."""
    bytes_each = {"ours": 4 + 4 + 8 + 2, "autocast": 4 + 4 + 8, "bf16": 2 + 2 + 4}[variant]
    fixed = bytes_each * parameters(model) / 1e9
    if variant == "ours":
        fixed += 2 * at_16["B"] * at_16["T"] * cpu_step.PADDED_VOCAB / 1e9
    a_sequence = (at_16["peak_gb"] - fixed) / at_16["B"]
    memory = 4.0 if DRY else memory_gb("memory.total")
    return (16 if a_sequence <= 0 or memory is None
            else max(16, int(0.97 * (memory - MARGIN_GB - fixed) / a_sequence) // 8 * 8))


# Seconds that must be left to start a case; PyTorch's include compilation.
NEED = {"ours": 10, "autocast": 60, "bf16": 60, "no graphs": 10, "any order": 15, "phases": 25}


def fits(options, what):
    return DRY or options.budget.left() >= NEED[what]


def find(report, part, **keys):
    """The record with these keys, unless it failed."""
    return next((r for r in report.find(part, **keys) if "failed" not in r), None)


def step_case(report, options, **keys):
    """Measures a case, with a smaller batch if the largest runs out of memory. Returns False if there is no time for
    it."""
    model, variant, B = keys["model"], keys["variant"], options.batch
    if not fits(options, variant):
        return False
    if keys["batch"] == "largest":
        at_16 = {**keys, "batch": "16"}
        if not report.find(options.part, **at_16):
            return False
        base = find(report, options.part, **at_16)
        if base is None:
            report.record(options.part, keys, B=0, T=options.length, failed="B = 16 failed")
            return True
        B = min(largest_batch(base, model, variant), 2 * options.batch if DRY else 1024)
    result = measure(options, model, B, options.length, variant, options.steps)
    while result.get("failed") == "out of memory" and B > 16 and fits(options, variant):
        B = max(16, int(B * 0.85) // 8 * 8)
        result = measure(options, model, B, options.length, variant, options.steps)
    if "left" in result:
        return False
    report.record(options.part, keys, B=B, T=options.length, **result)
    report.save()
    return True


def part_step(report, options):
    """What was left. Our phases come before PyTorch, and the largest batches, whose steps take longest, last."""
    left_out = []
    for batch in ("16", "largest"):
        for variant in VARIANTS:
            if variant in VARIANTS[-2:] and (batch, options.part) != ("16", "step"):
                continue
            keys = {"model": options.model, "batch": batch, "variant": variant, "device": device()}
            if not report.find(options.part, **keys) and not step_case(report, options, **keys):
                left_out.append(f"{variant} of {options.model}, batch {batch}")
            if (options.part, batch, variant) == ("step", "16", "ours") and "profile" not in report.part("step"):
                if not fits(options, "phases") or phases(report, options):
                    left_out.append("the phases")
    tables_step(report, options, left_out)
    return left_out


def part_memory(report, options):
    """Measures memory. PyTorch at T = 1024 is the case B = 16 of the part step; ours is measured at every T, also by
    nvidia-smi."""
    left_out, model = [], options.model
    for variant in ("ours", "autocast"):
        for T in options.lengths:
            keys = {"model": model, "T": T, "variant": variant, "device": device()}
            if report.find("memory", **keys):
                continue
            B = max(1, options.tokens // T)
            known = (None if variant == "ours"
                     else find(report, "step", model=model, variant=variant, B=B, T=T, device=device()))
            found = known or (measure(options, model, B, T, variant, 3) if fits(options, variant)
                              else {"left": "no time"})
            if "left" in found:
                left_out.append(f"{variant} at T = {T}")
                continue
            result = {key: value for key, value in found.items() if key not in ("batch", *keys)}
            report.record("memory", keys, **{**result, "B": B})
            report.save()
    tables_memory(report, left_out)
    return left_out


# ---------------------------------------------------------------- where our time goes, and its floors

def floors(model, B, T, undoes_rope):
    """{phase of --profile: (bytes that must move, FLOPs)} of a step in bf16 with N = B·T rows: over all kernels of the
    phase, each input is read once and each output written once. Attention counts two matmuls forward and five backward,
    over the visible half."""
    s = MODELS[model]
    N, L, C, F, V, P = B * T, s["layers"], s["channels"], s["ffn"], s["vocab"], parameters(model)
    return {
        # rows in and out; gradient in, rows of float32 read and written
        "embedding": (6 * N * C + 8 * min(N, V) * C, 0),
        "rmsnorm": ((2 * L + 1) * 12 * N * C, 0),    # x in, h out; dh, x, dx in, dx out
        "q, k, v and o matmuls": (0, 6 * L * N * 4 * C * C),
        "rope": (L * (8 if undoes_rope else 16) * N * C, 0),      # q and k in and out, and their gradients
        "attention": (0, 7 * L * N * (T + 1) * C),
        "feed-forward matmuls": (0, 6 * L * N * 3 * C * F),
        "swiglu": (L * 16 * N * F, 0),               # gate, up in, act out; dact, gate, up in, dgate, dup out
        "logits and loss": (4 * N * V, 6 * N * C * V),    # logits in, their gradients out
        "gradient norm and AdamW": (34 * P, 0),      # gradients twice; weights, moments in and out; the bf16 copy out
    }


PRODUCTS = ("q, k, v and o matmuls", "feed-forward matmuls", "logits and loss")


def phases(report, options):
    """Tabulates --profile at B = 16 beside the floors, from the ceilings measured on this device.
    Returns True if time ran out."""
    model = options.model
    profile = run_ours(options, model, options.batch, options.length, options.steps, profile=True)
    best = profile if "phases" not in profile else run_torch(options.budget, variant="ceilings")
    if "left" in best:
        return True
    if "failed" in best:
        gpu_report.add_facts(report, "step", f"no phases: {best['failed']}")
        options.failed += [f"the phases: {best['failed']}"] if best is profile else []
        return False
    total, least = sum(profile["phases"].values()), floors(model, options.batch, options.length, best["undoes_rope"])
    rows = []
    for name, ms in profile["phases"].items():
        moved, flops = least.get(name, (0, 0))
        floor = 1e3 * (moved / best["bytes"] + flops / best["flops"])
        rows.append([name, f"{ms:.2f}", f"{100 * ms / total:.1f}%", f"{floor:.2f}" if floor else "",
                     f"{100 * floor / ms:.0f}%" if floor and ms else ""])
    share = sum(profile["phases"].get(name, 0) for name in PRODUCTS) / total if total else 0
    report.part("step")["profile"] = {"model": model, "B": options.batch, "T": options.length, **profile, **best}
    report.table("step", f"Where our time goes, {model}, B = {options.batch}, T = {options.length}",
                 ["phase", "ms per step", "share", "floor ms", "of floor"], rows,
                 [f"ceilings measured in this run: {best['bytes'] / 1e12:.2f} TB/s copied, "
                  f"{best['flops'] / 1e12:.0f} TFLOP/s for a bf16 matmul of 8192³ random numbers",
                  f"{100 * share:.0f}% of the step is spent in cuBLASLt's matmuls (including the loss kernel)",
                  "a floor counts each input and output once, and for attention two matmuls forward and five backward"])
    return False


# ---------------------------------------------------------------- tables

def figure(record, key, digits, scale=1.0):
    if record is None:
        return ""
    return (record["failed"][:60] if "failed" in record else "" if record.get(key) is None
            else f"{scale * record[key]:,.{digits}f}")


def tables_step(report, options, left_out):
    rows = []
    for batch in ("16", "largest"):
        ours = find(report, options.part, batch=batch, variant="ours")
        for r in report.find(options.part, batch=batch):
            timed = ours and "tok_per_s" in r and r is not ours
            over = f"{ours['tok_per_s'] / r['tok_per_s']:.2f}" if timed else ""
            ms = {"m": statistics.median(r["ms"])} if "ms" in r else {"failed": r["failed"]}
            rows.append([r["model"], r["B"], r["variant"], figure(ms, "m", 2), figure(r, "tok_per_s", 0), over,
                         figure(r, "mfu", 1, 100), figure(r, "peak_gb", 1)])
    report.table(options.part, f"Tokens per second, T = {options.length}",
                 ["model", "B", "variant", "ms per step", "tok/s", "ours over this", "MFU %", "peak GB"], rows,
                 ["peak GB: ours is the plan that the trainer prints and allocates; "
                  "PyTorch's is torch.cuda.max_memory_allocated",
                  *gpu_report.not_measured(left_out)])


def tables_memory(report, left_out):
    rows = []
    for T in sorted({r["T"] for r in report.find("memory")}):
        ours, other = (next(iter(report.find("memory", T=T, variant=variant)), None)
                       for variant in ("ours", "autocast"))
        rows.append([T, (ours or other)["B"], figure(ours, "peak_gb", 2), figure(ours, "used_gb", 2),
                     figure(other, "peak_gb", 2), figure(other, "reserved_gb", 2)])
    head = ["T", "B", "ours, planned", "ours, nvidia-smi", "autocast, allocated", "autocast, reserved"]
    report.table("memory", "A step's memory, GB", head, rows,
                 ["nvidia-smi also counts the CUDA context and the libraries",
                  *gpu_report.not_measured(left_out)])


# ---------------------------------------------------------------- the command line

def parse():
    parser = gpu_report.parser(__doc__, ("step", "memory", "larger"), 500)
    parser.add_argument("--ours", default=ROOT / "train_gpt2cu", help="the trainer; default: ./train_gpt2cu")
    options = parser.parse_args()
    global DRY, UNCOUNTED
    DRY = options.dry_run
    UNCOUNTED, options.steps = (2, 2) if DRY else (UNCOUNTED, STEPS)
    options.model = "tiny" if DRY else "162M" if options.part == "larger" else "124M"
    options.batch, options.length, options.tokens = (2, 32, 64) if DRY else (16, 1024, TOKENS)
    options.lengths = (16, 32) if DRY else LENGTHS
    options.failed = []
    return options


def main():
    if sys.argv[1:2] == ["child"]:
        return print(json.dumps(child(json.loads(sys.argv[2]))))
    options = parse()

    def failures(report):
        ours = report.find(options.part, variant="ours")
        return [f"{r['model']} ({r['failed']})" for r in ours if "failed" in r] + options.failed

    measure = part_memory if options.part == "memory" else part_step
    return gpu_report.run("gpu_step", options, [options.ours], measure, failures, "ours failed")


if __name__ == "__main__":
    sys.exit(main())

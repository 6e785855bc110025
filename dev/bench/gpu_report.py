"""The report of scripts/gpu_check.py: report.json, and report.md generated from it, in one folder. A part adds its
section and leaves the others alone.

A section has status, date, device, version, facts (lines), checks, tables {title: {head, rows, notes}}, records (one
dict per timed case), and curves. A check's verdict is "ok", "info" (it did not pass, but nothing depends on it), "left"
(there was no time), or begins with FAILED. The table of bounds at the top of report.md is computed from the records;
whatever was not timed on a GPU is "not yet measured". This file needs no PyTorch.
"""
import argparse
import datetime
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAILED, UNFINISHED, NO_GPU = 1, 75, 77          # exit codes
ASK_LIMIT = 10                                  # seconds for an answer from nvidia-smi, which hangs if the driver does
MISSING = "not yet measured"
EXACT = ("step", "tokens", "loss", "lr", "grad_norm", "val_loss")
SWEEPS = ("lssar", "softmax-recentered-l1")          # two sweeps over the keys
PYTORCH = ("sdpa", "sdpa-flash", "sdpa-cudnn", "flex", "compile")
COMPILED = ("autocast", "bf16")                      # gpu_step.py's variants under torch.compile


# What a part's results depend on: the programs, and these files; if nothing else runs them, the recipes in
# scripts/gpu_check.py.
PROGRAM_SOURCES = ("Makefile", "*.c", "*.h", "*.cu", "attention/**/*", "cuda/**/*", "model/**/*", "run/**/*",
                   "math/**/*", "text/**/*", "data/*.[ch]", "runtime/**/*")
RECIPES = ("scripts/gpu_check.py",)
FLASH_SO = "dev/tests/flash_so.cu"
TIMES_ATTENTION = ("dev/bench/attention_gpu.py", "dev/reference/model.py", FLASH_SO)
TIMES_STEPS = ("dev/bench/gpu_step.py", "dev/bench/cpu_step.py")
EVALUATES = (*TIMES_STEPS, "dev/bench/gpu_eval.py", "eval/*", "data/cities.txt",
             *(f"dev/tests/{name}.py" for name in ("test_eval_cuda", "byte_text", "tiny", "trainer")))
TESTS = ("dev/tests/*.cu*", "dev/tests/*.h", "dev/tests/test_flash.py", "dev/reference/*.*", "dev/reference/fixtures/*")
BUILT = ("eval/*", "data/cities.txt", "dev/tests/*.cu*", "dev/tests/*.h", "dev/reference/*.h", "dev/cuda_on_cpu/*")
PART_SOURCES = {"build": BUILT, "tests": TESTS, "sanitizer": (*TESTS, *RECIPES, "dev/bench/gpu_kernels.py"),
                "counters": (*TIMES_STEPS, "dev/bench/gpu_kernels.py"),
                "attention": TIMES_ATTENTION, "shapes": TIMES_ATTENTION, "others": TIMES_ATTENTION,
                "step": TIMES_STEPS, "memory": TIMES_STEPS, "larger": TIMES_STEPS,
                "evaluation": EVALUATES, "package": (*RECIPES, "dev/bench/torch_gpu.py")}


def ask_gpu(query):
    """The output of nvidia-smi, or "" if there is no GPU or it does not answer."""
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=ASK_LIMIT).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def device():
    """The GPU's name, its driver and memory, or "CPU". If GPU_CHECK_DEVICE is set, it is used instead, because
    nvidia-smi can take a second."""
    if os.environ.get("GPU_CHECK_DEVICE"):
        return os.environ["GPU_CHECK_DEVICE"]
    try:
        words = ask_gpu("name,driver_version,memory.total").splitlines()[0].split(", ")
        return f"{words[0]} (driver {words[1]}, {words[2].removesuffix(' MiB')} MiB)"
    except IndexError:
        return "CPU"


def sources(part):
    """The files that a part depends on."""
    patterns = (*PROGRAM_SOURCES, *PART_SOURCES.get(part, RECIPES))
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)
                   if path.is_file() and path.suffix not in (".md", ".pyc")})


def version(part):
    """A hash of the contents of the files that a part depends on. Unlike a commit, it also exists in a copy of the tree
    without git."""
    digest = hashlib.sha256()
    for path in sources(part):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


class Report:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.path = self.folder / "report.json"
        self.parts = self.load() if self.path.exists() else {}

    def load(self):
        try:
            parts = json.loads(self.path.read_text())["parts"]
            if not all(isinstance(section, dict) for section in parts.values()):
                raise ValueError("a section is not an object")
            return parts
        except (ValueError, KeyError, TypeError, AttributeError) as error:           # truncated by copying, for example
            bad = self.path.replace(f"{self.path}.bad")
            print(f"gpu_report: {self.path} cannot be read ({error}); renamed to {bad}, and a new report begins",
                  file=sys.stderr)
            return {}

    def part(self, name):
        return self.parts.setdefault(name, {"seconds": 0, "facts": [], "checks": [], "tables": {}, "records": []})

    def is_current(self, name):
        """True if the section was written for these sources on this device."""
        section = self.parts.get(name, {})
        return (section.get("device"), section.get("version")) == (device(), version(name))

    def state(self, name):
        status = self.parts.get(name, {}).get("status", "")
        if not self.is_current(name) or status.startswith("not measured"):
            return "new"
        return status if status in ("done", "failed") else "unfinished"

    def passed(self, name):
        """The names of the checks that need not run again."""
        checks = self.part(name)["checks"] if self.is_current(name) else []
        return [c["name"] for c in checks if c["verdict"] in ("ok", "info")]

    def failed(self, name, check):
        return self.is_current(name) and any(c["name"] == check and c["verdict"].startswith("FAILED")
                                             for c in self.part(name)["checks"])

    def begin(self, name):
        """Opens a section. If it was begun for these sources on this device, its passed checks and timed cases stay,
        and the part resumes."""
        if not self.is_current(name):
            self.parts.pop(name, None)
            self.part(name).update(device=device(), version=version(name))
        checks = [check for check in self.part(name)["checks"] if check["verdict"] in ("ok", "info")]
        self.part(name).update(status="unfinished", date=datetime.date.today().isoformat(), checks=checks)

    def resume(self, name):
        """Opens the section unless it is open, for a program that is run by hand."""
        if not self.is_current(name):
            self.begin(name)

    def postpone(self, *names):
        for name in names:
            if self.state(name) not in ("done", "failed"):
                self.begin(name)
                add_check(self, name, "all that is left", "left", 0, "no time was left to begin")
                self.end(name)

    def end(self, name, status=""):
        verdicts = [check["verdict"] for check in self.part(name)["checks"]]
        failed, left = any(v.startswith("FAILED") for v in verdicts), "left" in verdicts
        self.part(name)["status"] = status or ("failed" if failed else "unfinished" if left else "done")

    def record(self, part, keys, **figures):
        """Stores a case's figures, replacing those with the same keys."""
        records = self.part(part)["records"]
        records[:] = [r for r in records if any(r.get(key) != value for key, value in keys.items())]
        records.append({**keys, **figures})

    def find(self, part, **keys):
        """The records with these keys."""
        return [r for r in self.parts.get(part, {}).get("records", []) if all(r.get(k) == v for k, v in keys.items())]

    def table(self, part, title, head, rows, notes=()):
        self.part(part)["tables"][title] = {"head": list(head), "rows": [list(map(str, row)) for row in rows],
                                            "notes": list(notes)}

    def save(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("report.json", json.dumps({"parts": self.parts}, indent=1) + "\n"),
                           ("report.md", markdown(self.parts))):
            new = self.folder / f"{name}.new"
            new.write_text(text)
            new.replace(self.folder / name)


# ---------------------------------------------------------------- the bounds

def timed(parts, part, **keys):
    """Records with these keys that were timed on a GPU and gave the right values."""
    return [r for r in parts.get(part, {}).get("records", [])
            if not r.get("failed") and not r.get("wrong")
            and all(r.get(k) == v for k, v in {**keys, "device": "cuda"}.items())]


def case_of(parts, part, **keys):
    found = timed(parts, part, **keys)
    return found[0] if found else None


def ratio(over, under, key="both_ms"):
    """The median of the rounds' own ratios."""
    return statistics.median(a / b for a, b in zip(over[key], under[key]))


def folded(parts, name):
    """Is this normalizer reducible to SDPA, with a pre-scaled q or a post-processed output?"""
    return bool(timed(parts, "others", attn=name, way="sdpa"))


def against_flash(parts):
    """(ratio, case) for softmax at T = 2k and longer, forward alone and with backward: SDPA flash's time over ours."""
    found = []
    for ours in timed(parts, "attention", attn="softmax", way="ours"):
        flash = case_of(parts, "attention", attn="softmax", way="sdpa-flash", T=ours["T"])
        if ours["T"] >= 2048 and flash:
            found += [(ratio(flash, ours, key), f"T = {ours['T']}, {what}")
                      for key, what in (("forward_ms", "forward"), ("both_ms", "forward and backward"))]
    return found


def against_softmax(parts, wanted):
    """(ratio, case) of the given normalizers: their time over our softmax's."""
    found = []
    for ours in timed(parts, "attention", way="ours"):
        base = case_of(parts, "attention", attn="softmax", way="ours", T=ours["T"])
        if base and ours["attn"] != "softmax" and wanted(ours["attn"]) and "of_softmax" in ours:
            found += [(statistics.median(ours["of_softmax"]), f"{ours['attn']}, T = {ours['T']}")]
    return found


def against_pytorch(parts, wanted, T=4096):
    """(ratio, case): the time of PyTorch's fastest method over ours."""
    found = []
    for ours in timed(parts, "others", way="ours", T=T):
        ways = [r for r in timed(parts, "others", attn=ours["attn"], T=T) if r["way"] in PYTORCH]
        if ways and ours["attn"] != "softmax" and wanted(ours["attn"]):
            found += [min((ratio(r, ours), f"{ours['attn']}, {r['way']}") for r in ways)]
    return found


def step_ratio(parts):
    """(ratio, case): our tokens per second over the faster compiled variant's, at B = 16 and at each side's largest
    batch."""
    found = []
    for batch in ("16", "largest"):
        ours = case_of(parts, "step", model="124M", batch=batch, variant="ours")
        others = [r for r in timed(parts, "step", model="124M", batch=batch) if r["variant"] in COMPILED]
        if ours and others:
            other = max(others, key=lambda r: r["tok_per_s"])
            found += [(ours["tok_per_s"] / other["tok_per_s"], f"B = {ours['B']}, {other['variant']} B = {other['B']}")]
    return found


def rate(parts, key, T, way="ours"):
    """(TFLOP/s, case) of our softmax at a length."""
    return [(r[key], f"T = {T}") for r in timed(parts, "attention", attn="softmax", way=way, T=T) if key in r]


def step_rate(parts):
    return [(r["tok_per_s"] / 1e3, f"B = {r['B']}") for r in timed(parts, "step", model="124M", variant="ours")]


def evaluation_ratio(parts, case):
    """(ratio, case): eval_gpt2cu's tokens per second over those of the trainer's forward pass."""
    ours, forward = (case_of(parts, "evaluation", case=name, dtype="bf16") for name in (case, "forward"))
    return [(ours["tok_per_s"] / forward["tok_per_s"], "bf16")] if ours and forward else []


def bounds(parts):
    """Rows: what | must | aim | measured | case (and of how many) | verdict. The worst case counts; for the step, the
    better batch."""
    rows = []

    def row(what, sign, must, aim, found, pick, unit=""):
        value, case = pick(found, default=(None, ""))
        passes = lambda bound: bound is None or (value >= bound if sign == "≥" else value <= bound)
        verdict = (MISSING if value is None else "below must" if not passes(must)
                   else "PASS, aim reached" if passes(aim) else "aim missed" if must is None else "PASS")
        bounds = ["" if bound is None else f"{sign} {bound:g}{unit}" for bound in (must, aim)]
        measured = MISSING if value is None else f"{value:.{0 if value >= 100 else 2}f}{unit}"
        rows.append([what, *bounds, measured, f"{case} (of {len(found)})" if found else "", verdict])

    sweeps, fold = (lambda name: name in SWEEPS), (lambda name: folded(parts, name))
    row("flash softmax, T ≥ 2k: time of SDPA flash over ours", "≥", 0.85, 1.0, against_flash(parts), min)
    row("one-pass normalizers: time over our softmax's", "≤", 1.10, 1.05,
        against_softmax(parts, lambda name: not sweeps(name)), max)
    row("lssar, recenter-l1: time over our softmax's", "≤", 2.0, 1.35, against_softmax(parts, sweeps), max)
    row("normalizers that no SDPA call computes, T = 4k: time of the fastest PyTorch method over ours", "≥", 3.0, 10.0,
        against_pytorch(parts, lambda name: not fold(name)), min)
    row("normalizers reducible to SDPA (pre-scaled q or a post-processed output), T = 4k: the same", "≥", 3.0, 10.0,
        against_pytorch(parts, fold), min)
    row("124M step: our tokens per second over torch.compile's", "≥", 1.0, 1.25, step_ratio(parts), max)
    row("124M step: tokens per second", "≥", None, 550, step_rate(parts), max, " K")
    row("124M evaluation, T = 10,240: its tokens per second over the trainer's forward pass", "≥", 0.8, 1.0,
        evaluation_ratio(parts, "evaluation"), min)
    row("124M, a needle's prompt of 8,000 tokens: the same", "≥", None, 0.8, evaluation_ratio(parts, "prefill"), min)
    row("softmax forward, T = 2k: TFLOP/s", "≥", None, 330, rate(parts, "forward_tflops", 2048), min)
    row("softmax forward, T = 16k: TFLOP/s", "≥", None, 420, rate(parts, "forward_tflops", 16384), min)
    row("softmax forward + backward, T = 16k, --deterministic 0: TFLOP/s", "≥", None, 400,
        rate(parts, "both_tflops", 16384, "ours-any-order"), min)
    return rows


# ---------------------------------------------------------------- report.md

def table_text(head, rows):
    escaped = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in escaped])


def section_text(name, part):
    status = part.get("status", "unfinished")
    facts = [status, f"{part.get('seconds', 0):.0f} s", part.get("date", ""), part.get("device", ""),
             f"sources {part.get('version', '')}"]
    lines = [f"## {name}", "", "; ".join(facts)]
    lines += ["", *(f"- {fact}" for fact in part["facts"])] if part["facts"] else []
    if part["checks"]:
        checks = [[c["name"], c["verdict"], f"{c['seconds']:.0f}", c["detail"][:160]] for c in part["checks"]]
        lines += ["", table_text(["check", "verdict", "seconds", "last line"], checks)]
    for title, table in part["tables"].items():
        lines += ["", f"**{title}**", "", table_text(table["head"], table["rows"])]
        lines += ["", *(f"- {note}" for note in table["notes"])] if table["notes"] else []
    return "\n".join(lines)


def bounds_text(parts):
    return table_text(["", "must", "aim", "measured", "worst case", "verdict"], bounds(parts))


def markdown(parts):
    on_gpu = any(r.get("device") == "cuda" for part in parts.values() for r in part.get("records", []))
    head = ["# Results on a GPU", "", bounds_text(parts), ""]
    head += [f"The figures of `{name}` were measured on {part.get('device')}."
             for name, part in parts.items() if part.get("records") and on_gpu]
    if not on_gpu:
        head += ["Nothing here was timed on a GPU."]
    return "\n".join(head) + "\n\n" + "\n\n".join(section_text(name, part) for name, part in parts.items()) + "\n"


def summary(parts):
    """A line for each part: its status, its time, what failed, and what is left."""
    lines = []
    for name, part in parts.items():
        named = {word: [c["name"] for c in part["checks"] if c["verdict"].startswith(word)]
                 for word in ("FAILED", "left", "info")}
        more = {word: f" and {len(found) - 4} more" if len(found) > 4 else "" for word, found in named.items()}
        shown = "; ".join(f"{word}: {', '.join(found[:4])}{more[word]}" for word, found in named.items() if found)
        lines.append(f"{name:12} {part.get('status', 'unfinished'):12} "
                     f"{part.get('seconds', 0):5.0f} s  {shown}".rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------- runs side by side

def metrics(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def curves(report, part, runs):
    """Compares the losses of each run with the first one's. Rounding errors grow from step to step. With the recipe of
    scripts/gpu_check.py, on the CPU, two orders of the same float32 sums were at most 1e-6 apart over 120 steps; bf16
    was 4e-4 from float32 in the first ten steps, and at most 0.023 in all (2026-11-26). At a learning rate of 1e-3,
    whose gradients have spikes, it was 0.3. A defect shows in the early steps already."""
    losses = {Path(run).name: [m["loss"] for m in metrics(run)] for run in runs}
    (first, base), *others = losses.items()
    early, rows, good = 10, [], all(map(math.isfinite, base))
    for name, values in others:
        steps = min(len(values), len(base))
        apart = [abs(a - b) for a, b in zip(values, base)]
        bound_early, bound = (1e-5, 0.01) if name == "fp32" else (2e-3, 0.06)
        # A NaN makes it false.
        fine = (0 < steps == len(base) == len(values) and all(x <= bound_early for x in apart[:early])
                and all(x <= bound for x in apart))
        good = good and fine
        rows.append([name, f"{max(apart[:early]):.2g}", f"{bound_early:g}", f"{max(apart):.2g}", f"{bound:g}",
                     f"{values[-1]:.4f}", "ok" if fine else "FAILED"])
    at = sorted({0, *range(19, len(base), 20), len(base) - 1})
    report.table(part, f"Losses compared with {first}'s ({len(base)} steps, {base[0]:.4f} to {base[-1]:.4f})",
                 ["run", f"largest difference, first {early} steps", "allowed", "all steps", "allowed", "final loss",
                  "verdict"], rows)
    report.table(part, "The loss curves", ["step", *losses],
                 [[i + 1, *(f"{v[i]:.4f}" if i < len(v) else "" for v in losses.values())] for i in at])
    report.part(part)["curves"] = losses
    return good, f"largest differences from {first}'s losses: " + ", ".join(f"{row[0]} {row[3]}" for row in rows)


def checkpoint_hashes(run):
    """{file: sha256} of the newest checkpoint's tensors."""
    folder = max((Path(run) / "ckpt").glob("step-*"), default=None)
    if folder is None:
        return {}
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in ("model.safetensors", "optimizer.safetensors")}


def same(a, b):
    """Compares two runs to the last bit: their metrics and their newest checkpoints."""
    lines = [[[m.get(key) for key in EXACT] for m in metrics(run)] for run in (a, b)]
    differing = [one[0] for one, other in zip(*lines) if one != other]
    if len(lines[0]) != len(lines[1]) or differing:
        return False, f"metrics differ from step {differing[0]} on" if differing else "different numbers of steps"
    hashes = checkpoint_hashes(a), checkpoint_hashes(b)
    if not hashes[0] or hashes[0] != hashes[1]:
        return False, "no checkpoint" if not hashes[0] else "the metrics agree, the checkpoints do not"
    return (True, f"{len(lines[0])} steps, model {hashes[0]['model.safetensors'][:16]}, moments "
                  f"{hashes[0]['optimizer.safetensors'][:16]}")


def close(bound, a, b):
    """Compares two runs: the same number of steps, and losses at most `bound` apart."""
    losses = [[m["loss"] for m in metrics(run)] for run in (a, b)]
    apart = [abs(x - y) for x, y in zip(*losses)]
    fine = len(losses[0]) == len(losses[1]) > 0 and all(x <= bound for x in apart)          # false for a NaN
    return (fine, f"{len(losses[0])} and {len(losses[1])} steps, largest difference "
                  f"{max(apart, default=math.nan):.2g}, allowed {bound:g}")


# ---------------------------------------------------------------- what checks add

def add_check(report, part, name, verdict, seconds, detail):
    checks = report.part(part)["checks"]
    checks[:] = [check for check in checks if check["name"] != name]
    checks.append({"name": name, "verdict": verdict, "seconds": float(seconds), "detail": detail})


def add_facts(report, part, *texts):
    facts = report.part(part)["facts"]
    facts += [text for text in texts if text not in facts]


def exit_code(report, names):
    """The exit code for the parts with these names. A part that the report lacks is unfinished."""
    ends = [report.parts.get(name, {}).get("status", "unfinished") for name in names]
    for code, found in ((FAILED, "failed"), (UNFINISHED, "unfinished"), (NO_GPU, "not measured")):
        if any(end.startswith(found) for end in ends):
            return code
    return 0


# ---------------------------------------------------------------- what the programs that measure share

class Budget:
    def __init__(self, seconds):
        self.end = time.monotonic() + float(seconds)

    def left(self):
        """Seconds in which cases may be started."""
        return self.end - time.monotonic()

    def until_stop(self):
        """Seconds in which they may run: scripts/gpu_check.py ends the program 15 seconds after its budget."""
        return self.left() + 8


def parser(doc, parts, budget):
    """Of the command line; a program adds its own flags."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("report", type=Path, help="the folder of scripts/gpu_check.py's report. Cases that are already "
                       "in it are not measured again")
    found.add_argument("part", choices=parts)
    found.add_argument("--budget", type=Budget, default=str(budget),
                       help="seconds after which no case is started; rerun the part for the rest")
    found.add_argument("--dry-run", action="store_true", help="run a tiny case on the CPU")
    return found


def not_measured(left):
    """A note of a table."""
    return [f"not measured, no time left: {', '.join(left)}; rerun the part"] if left else []


def run(program, options, needs, measure, failures, what="failed"):
    """Measures a part and returns the program's exit code: 0 done; 1 one of our cases failed or is wrong; 75 cases are
    left, because time ran out; 77 no GPU. needs: the files that it runs. measure(report, options) returns what was
    left, failures(report) the names of the cases that failed."""
    if not options.dry_run and device() == "CPU":
        print(f"{program}: no GPU: not measured", file=sys.stderr)
        return NO_GPU
    for path in needs:
        if not Path(path).exists():
            raise SystemExit(f"{program}: {path} is missing: scripts/gpu_check.py build builds it")
    report = Report(options.report)
    report.resume(options.part)
    left = measure(report, options)
    failed = failures(report)
    report.save()
    print(f"{program}: {len(report.part(options.part)['records'])} records"
          + (f"; {what}: {', '.join(failed)}" if failed else "") + (f"; left: {', '.join(left)}" if left else ""))
    if failed:
        return FAILED
    return UNFINISHED if left else 0

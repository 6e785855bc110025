"""The report of scripts/gpu_check.sh: report.json, and report.md generated from it, in one folder. A part adds its
section and leaves the others alone.

    python3 dev/bench/gpu_report.py FOLDER state PART                 prints new, unfinished, done or failed
    python3 dev/bench/gpu_report.py FOLDER begin PART                 until `end`, the part is "unfinished"
    python3 dev/bench/gpu_report.py FOLDER check PART NAME VERDICT SECONDS DETAIL
    python3 dev/bench/gpu_report.py FOLDER passed PART                prints what this version on this device passed
    python3 dev/bench/gpu_report.py FOLDER failed PART NAME           exit code 0: failed
    python3 dev/bench/gpu_report.py FOLDER fact PART TEXT...
    python3 dev/bench/gpu_report.py FOLDER end PART [STATUS]          without STATUS, the checks decide
    python3 dev/bench/gpu_report.py FOLDER postpone PART...           there was no time for what is left of these
    python3 dev/bench/gpu_report.py FOLDER took PART SECONDS          adds to the time that the part took over all calls
    python3 dev/bench/gpu_report.py FOLDER forget PART
    python3 dev/bench/gpu_report.py FOLDER summary                    prints a line for each part
    python3 dev/bench/gpu_report.py FOLDER device                     prints the GPU, or CPU
    python3 dev/bench/gpu_report.py FOLDER status [PART...]           exit code 1: failed; 75: unfinished; 77: no GPU
    python3 dev/bench/gpu_report.py FOLDER version PART               a hash of the sources that the part depends on
    python3 dev/bench/gpu_report.py FOLDER curves PART RUN RUN...     tables of losses, compared with the first run's
    python3 dev/bench/gpu_report.py compare same RUN RUN              do two runs agree to the last bit?
    python3 dev/bench/gpu_report.py compare close X RUN RUN           are two runs' losses at most X apart?

A section has status, date, device, version, facts (lines), checks, tables {title: {head, rows, notes}}, records (one
dict per timed case), and curves. A check's verdict is "ok", "info" (it did not pass, but nothing depends on it), "left"
(there was no time), or begins with FAILED. The table of bounds at the top of report.md is computed from the records;
whatever was not timed on a GPU is "not yet measured". This file needs no PyTorch.
"""
import datetime
import hashlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAILED, UNFINISHED, NO_GPU = 1, 75, 77          # exit codes
MISSING = "not yet measured"
EXACT = ("step", "tokens", "loss", "lr", "grad_norm", "val_loss")
SWEEPS = ("lssar", "softmax-recentered-l1")          # two sweeps over the keys
PYTORCH = ("sdpa", "sdpa-flash", "sdpa-cudnn", "flex", "compile")
COMPILED = ("autocast", "bf16")                      # gpu_step.py's variants under torch.compile


# What a part's results depend on besides the programs.
PROGRAM_SOURCES = ("Makefile", "*.c", "*.h", "*.cu", "attention/**/*", "cuda/**/*", "model/**/*", "run/**/*",
                   "runtime/**/*")
FLASH_SO = "dev/tests/flash_so.cu"
TIMES_ATTENTION = ("dev/bench/attention_gpu.py", "dev/reference/model.py", FLASH_SO)
TIMES_STEPS = ("dev/bench/gpu_step.py", "dev/bench/cpu_step.py")
EVALUATES = (*TIMES_STEPS, "dev/bench/gpu_eval.py", "eval/*", "data/cities.txt",
             *(f"dev/tests/{name}.py" for name in ("test_eval_cuda", "byte_text", "tiny", "trainer")))
TESTS = ("dev/tests/*.cu*", "dev/tests/*.h", "dev/tests/test_flash.py", "dev/reference/*.*", "dev/reference/fixtures/*")
BUILT = ("eval/*", "data/cities.txt", "dev/tests/*.cu*", "dev/tests/*.h", "dev/reference/*.h", "dev/cuda_on_cpu/*")
PART_SOURCES = {"build": BUILT, "tests": TESTS, "sanitizer": (*TESTS, "dev/bench/gpu_kernels.py"),
                "counters": (*TIMES_STEPS, "dev/bench/gpu_kernels.py"),
                "attention": TIMES_ATTENTION, "shapes": TIMES_ATTENTION, "others": TIMES_ATTENTION,
                "step": TIMES_STEPS, "memory": TIMES_STEPS, "larger": TIMES_STEPS,
                "evaluation": EVALUATES, "package": ("dev/bench/torch_gpu.py",)}
# The functions and lists of scripts/gpu_check.sh that determine what these parts run.
PART_RECIPES = {"train": ("recipe", "run", "run_cpu", "curves_beside", "part_train"),
                "package": ("test_package", "part_package"),
                "determinism": ("recipe", "run", "same_runs", "free_run", "part_determinism"),
                "sanitizer": ("KERNELS", "attention_kinds", "sanitizer_runs", "part_sanitizer")}


def ask_gpu(query):
    """The output of nvidia-smi, or "" if there is no GPU or it does not answer."""
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout
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
    patterns = (*PROGRAM_SOURCES, *PART_SOURCES.get(part, ()))
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)
                   if path.is_file() and path.suffix not in (".md", ".pyc")})


def recipe(name):
    """The text of a function or a list in scripts/gpu_check.sh; "" if it has none with this name."""
    script = ROOT / "scripts/gpu_check.sh"
    text = script.read_text() if script.exists() else ""
    found = re.search(rf'^{name}\(\) {{(?:[^\n]*}}$|.*?^}}$)|^{name}="[^"]*"$', text, re.M | re.S)
    return found[0] if found else ""


def version(part):
    """A hash of the contents of the files that a part depends on. Unlike a commit, it also exists in a copy of the tree
    without git."""
    digest = hashlib.sha256()
    for path in sources(part):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    for name in PART_RECIPES.get(part, ()):
        digest.update(f"{name}\0{recipe(name)}\0".encode())
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
        return self.parts.setdefault(name, {"facts": [], "checks": [], "tables": {}, "records": []})

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
        before = self.parts[name] if self.is_current(name) else {}
        self.parts[name] = {"status": "unfinished", "date": datetime.date.today().isoformat(), "device": device(),
                            "version": version(name), "seconds": before.get("seconds", 0),
                            "facts": before.get("facts", []),
                            "checks": [c for c in before.get("checks", []) if c["verdict"] in ("ok", "info")],
                            "tables": before.get("tables", {}), "records": before.get("records", []),
                            **{key: before[key] for key in ("curves", "profile") if key in before}}

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
            if r.get("device") == "cuda" and not r.get("failed") and not r.get("wrong")
            and all(r.get(k) == v for k, v in keys.items())]


def case_of(parts, part, **keys):
    found = timed(parts, part, **keys)
    return found[0] if found else None


def ratio(over, under, key="both_ms"):
    """The median of the rounds' own ratios."""
    return statistics.median(a / b for a, b in zip(over[key], under[key]))


def names_of(parts, part):
    return list(dict.fromkeys(r["attn"] for r in timed(parts, part, way="ours")))


def folded(parts, name):
    """True if SDPA can compute this normalizer once q is scaled or its output is changed."""
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
    row("normalizers that SDPA computes once q is scaled or the output is changed, T = 4k: the same", "≥", 3.0, 10.0,
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


def markdown(parts):
    on_gpu = any(r.get("device") == "cuda" for part in parts.values() for r in part.get("records", []))
    columns = ["", "must", "aim", "measured", "worst case", "verdict"]
    head = ["# Results on a GPU", "", table_text(columns, bounds(parts)), ""]
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


def curves(report, part, runs, early=10, every=20):
    """Compares the losses of each run with the first one's. Rounding errors grow from step to step. With the recipe of
    scripts/gpu_check.sh, on the CPU, two orders of the same float32 sums were at most 1e-6 apart over 120 steps; bf16
    was 4e-4 from float32 in the first ten steps, and at most 0.023 in all (2026-11-26). At a learning rate of 1e-3,
    whose gradients have spikes, it was 0.3. A defect shows in the early steps already."""
    losses = {Path(run).name: [m["loss"] for m in metrics(run)] for run in runs}
    (first, base), *others = losses.items()
    rows, good = [], all(map(math.isfinite, base))
    for name, values in others:
        steps = min(len(values), len(base))
        apart = [abs(a - b) for a, b in zip(values, base)]
        bound_early, bound = (1e-5, 0.01) if "fp32" in name else (2e-3, 0.06)
        # A NaN makes it false.
        fine = (0 < steps == len(base) == len(values) and all(x <= bound_early for x in apart[:early])
                and all(x <= bound for x in apart))
        good = good and fine
        rows.append([name, f"{max(apart[:early]):.2g}", f"{bound_early:g}", f"{max(apart):.2g}", f"{bound:g}",
                     f"{values[-1]:.4f}", "ok" if fine else "FAILED"])
    at = sorted({0, *range(every - 1, len(base), every), len(base) - 1})
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


# ---------------------------------------------------------------- the command line

def add_check(report, part, name, verdict, seconds, detail):
    checks = report.part(part)["checks"]
    checks[:] = [check for check in checks if check["name"] != name]
    checks.append({"name": name, "verdict": verdict, "seconds": float(seconds), "detail": detail})


def add_facts(report, part, *texts):
    facts = report.part(part)["facts"]
    facts += [text for text in texts if text not in facts]


def add_seconds(report, part, seconds):
    report.part(part)["seconds"] = report.part(part).get("seconds", 0) + float(seconds)


def exit_code(report, names):
    """The exit code for the parts with these names (a part that the report lacks is unfinished), or for all parts in
    the report."""
    ends = [report.parts.get(name, {}).get("status", "unfinished") for name in names or report.parts] or ["unfinished"]
    for code, found in ((FAILED, "failed"), (UNFINISHED, "unfinished"), (NO_GPU, "not measured")):
        if any(end.startswith(found) for end in ends):
            return code
    return 0


def exit_code_of(failed, left):
    """The exit code of a program that measures: what has failed, and what there was no time for."""
    if failed:
        return FAILED
    return UNFINISHED if left else 0


def verdict_of(compare, *words):
    """Prints what a comparison of runs found; the exit code is its verdict."""
    try:
        fine, detail = compare(*words)
    except OSError as error:
        fine, detail = False, f"a run is missing: {error.filename}"
    print(detail)
    return 0 if fine else FAILED


# How many words follow a verb: at least and at most (None: any number).
COUNTS = {"state": (1, 1), "begin": (1, 1), "check": (5, 5), "passed": (1, 1), "failed": (2, 2), "fact": (1, None),
          "end": (1, 2), "postpone": (1, None), "took": (2, 2), "forget": (1, 1), "summary": (0, 0), "device": (0, 0),
          "status": (0, None), "version": (1, 1), "curves": (2, None)}
COMPARISONS = {"same": (2, 2), "close": (3, 3)}


def usage(problem):
    """Prints the comment at the top and what is wrong; exit code 2."""
    print(f"{__doc__}\ngpu_report: {problem}", file=sys.stderr)
    raise SystemExit(2)


def number(word):
    try:
        return float(word)
    except ValueError:
        usage(f"{word}: expected a number")


def parse(words):
    """(folder, verb, words), with as many words as the verb takes."""
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        raise SystemExit(0)
    if len(words) < 2:
        usage("expected a folder, or compare, and a verb")
    folder, verb, *words = words
    counts = COMPARISONS if folder == "compare" else COUNTS
    if verb not in counts:
        usage(f"{verb}: no such verb")
    least, most = counts[verb]
    if len(words) < least or most is not None and len(words) > most:
        more = " or more" if most is None else f" to {most}" if most > least else ""
        usage(f"{verb}: {len(words)} words follow; expected {least}{more}")
    return folder, verb, words


def main():
    folder, verb, words = parse(sys.argv[1:])
    if folder == "compare":
        return verdict_of(same, *words) if verb == "same" else verdict_of(close, number(words[0]), *words[1:])
    report = Report(folder)
    if verb == "status":
        return exit_code(report, words)
    if verb in ("summary", "device"):
        print(summary(report.parts) if verb == "summary" else device())
        return 0
    part = words[0]
    if verb in ("state", "version"):
        print(report.state(part) if verb == "state" else version(part))
        return 0
    if verb == "passed":
        print("\n".join(report.passed(part)))
        return 0
    if verb == "failed":
        return 0 if report.failed(part, words[1]) else FAILED
    writers = {"begin": report.begin, "end": report.end, "postpone": report.postpone,
               "forget": lambda name: report.parts.pop(name, None),
               "check": lambda part, name, verdict, seconds, detail: (
                   add_check(report, part, name, verdict, number(seconds), detail)),
               "fact": lambda *x: add_facts(report, *x),
               "took": lambda part, seconds: add_seconds(report, part, number(seconds)),
               "curves": lambda name, *runs: verdict_of(lambda: curves(report, name, runs))}
    code = writers[verb](*words)
    report.save()
    return code if verb == "curves" else 0


if __name__ == "__main__":
    sys.exit(main())

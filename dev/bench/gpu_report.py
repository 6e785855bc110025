"""The report of scripts/gpu_check.sh: report.json, and report.md made from it, in one folder. A part adds its section and leaves the others.

    python3 dev/bench/gpu_report.py FOLDER begin PART                      a part that never ends is "not finished"
    python3 dev/bench/gpu_report.py FOLDER check PART NAME VERDICT SECONDS DETAIL
    python3 dev/bench/gpu_report.py FOLDER fact PART TEXT
    python3 dev/bench/gpu_report.py FOLDER end PART done|failed|"not measured: WHY"
    python3 dev/bench/gpu_report.py FOLDER curves PART RUN RUN...          the losses of runs beside the first one's
    python3 dev/bench/gpu_report.py FOLDER same PART NAME RUN RUN          two runs, bit for bit
    python3 dev/bench/gpu_report.py FOLDER close PART NAME X RUN RUN       two runs' losses, which differ by X at most
    python3 dev/bench/gpu_report.py FOLDER status                          exit code 1 where a part did not end as it should, 77 where one found no GPU

A section: status, date, device, facts (lines), checks, tables {title: {head, rows, notes}}, records (what was timed, one dict a case), curves. The
bounds at the top, "must" and "aim", are computed from the records; what was not timed on a GPU is "not yet measured". No PyTorch is needed.
"""
import datetime
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = 77
MISSING = "not yet measured"
EXACT = ("step", "tokens", "loss", "lr", "grad_norm", "val_loss")
SWEEPS = ("lssar", "softmax-recentered-l1")          # two sweeps over the keys
PYTORCH = ("sdpa", "sdpa-flash", "sdpa-cudnn", "flex", "compile")


def device():
    """The GPU's name, its driver and memory, or "CPU"."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        words = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
        return f"{words[0]} (driver {words[1]}, {words[2]})"
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "CPU"


def version():
    result = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return os.environ.get("VERSION") or result.stdout.strip() or "unknown"


class Report:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.path = self.folder / "report.json"
        self.parts = json.loads(self.path.read_text())["parts"] if self.path.exists() else {}

    def part(self, name):
        return self.parts.setdefault(name, {"facts": [], "checks": [], "tables": {}, "records": []})

    def begin(self, name):
        """A new section; records of this version on this device stay, so that a part goes on where it was stopped."""
        before, on, of = self.parts.get(name, {}), device(), version()
        kept = before.get("records", []) if (before.get("device"), before.get("version")) == (on, of) else []
        self.parts[name] = {"status": "not finished", "date": datetime.date.today().isoformat(), "device": on, "version": of,
                            "facts": [], "checks": [], "tables": {}, "records": kept}

    def record(self, part, keys, **figures):
        """A case's figures, in the place of what was there for the same keys."""
        records = self.part(part)["records"]
        records[:] = [r for r in records if any(r.get(key) != value for key, value in keys.items())]
        records.append({**keys, **figures})

    def table(self, part, title, head, rows, notes=()):
        self.part(part)["tables"][title] = {"head": list(head), "rows": [list(map(str, row)) for row in rows], "notes": list(notes)}

    def save(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("report.json", json.dumps({"parts": self.parts}, indent=1) + "\n"), ("report.md", markdown(self.parts))):
            new = self.folder / f"{name}.new"
            new.write_text(text)
            new.replace(self.folder / name)


# ---------------------------------------------------------------- the bounds

def timed(parts, part, **keys):
    """Records with these keys that were timed on a GPU and gave the right values."""
    return [r for r in parts.get(part, {}).get("records", [])
            if r.get("device") == "cuda" and not r.get("failed") and not r.get("wrong") and all(r.get(k) == v for k, v in keys.items())]


def case_of(parts, part, **keys):
    found = timed(parts, part, **keys)
    return found[0] if found else None


def ratio(over, under, key="both_ms"):
    """The median of the rounds' own ratios."""
    return statistics.median(a / b for a, b in zip(over[key], under[key]))


def names_of(parts, part):
    return list(dict.fromkeys(r["attn"] for r in timed(parts, part, way="ours")))


def folded(parts, name):
    """Is this normaliser a call of SDPA, but for a scale of q and the like?"""
    return bool(timed(parts, "others", attn=name, way="sdpa"))


def against_flash(parts):
    """(ratio, case) for softmax from T = 2k on, forward and both, SDPA's flash over ours."""
    found = []
    for ours in timed(parts, "attention", attn="softmax", way="ours"):
        flash = case_of(parts, "attention", attn="softmax", way="sdpa-flash", T=ours["T"])
        if ours["T"] >= 2048 and flash:
            found += [(ratio(flash, ours, key), f"T = {ours['T']}, {what}") for key, what in (("forward_ms", "forward"), ("both_ms", "forward and backward"))]
    return found


def against_softmax(parts, wanted):
    """(ratio, case) of the normalisers that are wanted, over our softmax."""
    found = []
    for ours in timed(parts, "attention", way="ours"):
        base = case_of(parts, "attention", attn="softmax", way="ours", T=ours["T"])
        if base and ours["attn"] != "softmax" and wanted(ours["attn"]) and "of_softmax" in ours:
            found += [(statistics.median(ours["of_softmax"]), f"{ours['attn']}, T = {ours['T']}")]
    return found


def against_pytorch(parts, wanted, T=4096):
    """(ratio, case): the fastest of PyTorch's ways over ours."""
    found = []
    for ours in timed(parts, "others", way="ours", T=T):
        ways = [r for r in timed(parts, "others", attn=ours["attn"], T=T) if r["way"] in PYTORCH]
        if ways and ours["attn"] != "softmax" and wanted(ours["attn"]):
            found += [min((ratio(r, ours), f"{ours['attn']}, {r['way']}") for r in ways)]
    return found


def step_ratio(parts):
    """(ratio, case): our tokens a second over the faster compiled variant's, each at B = 16 and at its largest batch."""
    found = []
    for batch in ("16", "largest"):
        ours = case_of(parts, "step", model="124M", batch=batch, variant="ours")
        others = [r for r in timed(parts, "step", model="124M", batch=batch) if r["variant"] != "ours"]
        if ours and others:
            other = max(others, key=lambda r: r["tok_per_s"])
            found += [(ours["tok_per_s"] / other["tok_per_s"], f"B = {ours['B']}, {other['variant']} B = {other['B']}")]
    return found


def step_rate(parts):
    return [(r["tok_per_s"] / 1e3, f"B = {r['B']}") for r in timed(parts, "step", model="124M", variant="ours")]


def bounds(parts):
    """Rows: what | must | aim | measured | case | verdict. The worst case counts; of the step, the better batch."""
    rows = []

    def row(what, sign, must, aim, found, pick, unit=""):
        value, case = pick(found, default=(None, ""))
        passes = lambda bound: bound is None or (value >= bound if sign == "≥" else value <= bound)
        verdict = MISSING if value is None else "below must" if not passes(must) else "PASS, aim reached" if passes(aim) else "PASS"
        rows.append([what, *("" if bound is None else f"{sign} {bound:g}{unit}" for bound in (must, aim)),
                     MISSING if value is None else f"{value:.2f}{unit}", case, verdict])

    sweeps, fold = (lambda name: name in SWEEPS), (lambda name: folded(parts, name))
    row("flash softmax, T ≥ 2k: SDPA flash's time over ours", "≥", 0.85, 1.0, against_flash(parts), min)
    row("one-pass normalisers: time over our softmax's", "≤", 1.10, 1.05, against_softmax(parts, lambda name: not sweeps(name)), max)
    row("lssar, recenter-l1: time over our softmax's", "≤", 2.0, 1.35, against_softmax(parts, sweeps), max)
    row("normalisers that no SDPA call computes, T = 4k: the fastest PyTorch way's time over ours", "≥", 3.0, 10.0,
        against_pytorch(parts, lambda name: not fold(name)), min)
    row("normalisers that SDPA computes once q is scaled or its output changed, T = 4k: the same", "≥", 3.0, 10.0, against_pytorch(parts, fold), min)
    row("124M step: tokens a second over torch.compile's", "≥", 1.0, 1.25, step_ratio(parts), max)
    row("124M step: tokens a second", "≥", None, 550, step_rate(parts), max, " K")
    return rows


# ---------------------------------------------------------------- report.md

def table_text(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows])


def section_text(name, part):
    status = part.get("status", "not finished")
    lines = [f"## {name}", "", f"{status}; {part.get('date', '')}; {part.get('device', '')}; version {part.get('version', '')}"]
    lines += ["", *(f"- {fact}" for fact in part["facts"])] if part["facts"] else []
    if part["checks"]:
        lines += ["", table_text(["check", "verdict", "seconds", "last line"],
                                 [[c["name"], c["verdict"], f"{c['seconds']:.0f}", c["detail"][:160]] for c in part["checks"]])]
    for title, table in part["tables"].items():
        lines += ["", f"**{title}**", "", table_text(table["head"], table["rows"])]
        lines += ["", *(f"- {note}" for note in table["notes"])] if table["notes"] else []
    return "\n".join(lines)


def markdown(parts):
    on_gpu = any(r.get("device") == "cuda" for part in parts.values() for r in part.get("records", []))
    head = ["# What a GPU showed", "", table_text(["", "must", "aim", "measured", "worst case", "verdict"], bounds(parts)), ""]
    head += [f"The figures of `{name}` are {part['device']}'s." for name, part in parts.items() if part.get("records") and on_gpu]
    if not on_gpu:
        head += ["Nothing here was timed on a GPU."]
    return "\n".join(head) + "\n\n" + "\n\n".join(section_text(name, part) for name, part in parts.items()) + "\n"


# ---------------------------------------------------------------- runs side by side

def metrics(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def curves(report, part, runs, early=10, every=20):
    """The losses of each run beside the first one's. Rounding grows from step to step: two orders of the same sums on the CPU were 1e-6 apart by
    step 50 of a small model, 1e-4 by 100 and 0.02 by 120, float32 and bf16 0.03. A fault shows in the early steps."""
    losses = {Path(run).name: [m["loss"] for m in metrics(run)] for run in runs}
    (first, base), *others = losses.items()
    rows, good = [], all(map(math.isfinite, base))
    for name, values in others:
        steps = min(len(values), len(base))
        apart = [abs(a - b) for a, b in zip(values, base)]
        bound_early, bound = (1e-4, 0.05) if "fp32" in name else (5e-3, 0.1)
        fine = steps == len(base) == len(values) and all(x <= bound_early for x in apart[:early]) and all(x <= bound for x in apart)    # false for a NaN
        good = good and fine
        rows.append([name, f"{max(apart[:early]):.2g}", f"{bound_early:g}", f"{max(apart):.2g}", f"{bound:g}", f"{values[-1]:.4f}", "ok" if fine else "FAILED"])
    at = sorted({0, *range(every - 1, len(base), every), len(base) - 1})
    report.table(part, f"Losses beside {first}'s ({len(base)} steps, {base[0]:.4f} to {base[-1]:.4f})",
                 ["run", f"largest difference, {early} steps", "allowed", "all steps", "allowed", "last loss", "verdict"], rows)
    report.table(part, "The curves", ["step", *losses], [[i + 1, *(f"{v[i]:.4f}" if i < len(v) else "" for v in losses.values())] for i in at])
    report.part(part)["curves"] = losses
    return good, f"largest differences from {first}'s losses: " + ", ".join(f"{row[0]} {row[3]}" for row in rows)


def checkpoint_hashes(run):
    """{file: sha256} of the newest checkpoint's tensors."""
    folder = max((Path(run) / "ckpt").glob("step-*"), default=None)
    if folder is None:
        return {}
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("model.safetensors", "optimizer.safetensors")}


def same(a, b):
    """Do two runs agree to the last bit, in their metrics and their newest checkpoint?"""
    lines = [[[m.get(key) for key in EXACT] for m in metrics(run)] for run in (a, b)]
    differing = [one[0] for one, other in zip(*lines) if one != other]
    if len(lines[0]) != len(lines[1]) or differing:
        return False, f"metrics differ from step {differing[0]} on" if differing else "other numbers of steps"
    hashes = checkpoint_hashes(a), checkpoint_hashes(b)
    if not hashes[0] or hashes[0] != hashes[1]:
        return False, "no checkpoint" if not hashes[0] else "the metrics agree, the checkpoints do not"
    return True, f"{len(lines[0])} steps, model {hashes[0]['model.safetensors'][:16]}, moments {hashes[0]['optimizer.safetensors'][:16]}"


def close(bound, a, b):
    """Do two runs have the same number of steps, and losses at most `bound` apart?"""
    losses = [[m["loss"] for m in metrics(run)] for run in (a, b)]
    apart = [abs(x - y) for x, y in zip(*losses)]
    fine = len(losses[0]) == len(losses[1]) > 0 and all(x <= bound for x in apart)          # false for a NaN
    return fine, f"{len(losses[0])} and {len(losses[1])} steps, largest difference {max(apart, default=math.nan):.2g}, allowed {bound:g}"


# ---------------------------------------------------------------- the command line

def add_check(report, part, name, verdict, seconds, detail):
    report.part(part)["checks"].append({"name": name, "verdict": verdict, "seconds": float(seconds), "detail": detail})


def main():
    folder, verb, *words = sys.argv[1:]
    report = Report(folder)
    if verb == "status":
        ends = [part.get("status", "not finished") for name, part in report.parts.items() if not words or name in words]
        return 1 if any(end in ("failed", "not finished") for end in ends) else NO_GPU if any(end.startswith("not measured") for end in ends) else 0
    part = words[0]
    fine = True
    if verb == "begin":
        report.begin(part)
    elif verb == "check":
        add_check(report, part, *words[1:])
    elif verb == "fact":
        report.part(part)["facts"].append(words[1])
    elif verb == "end":
        section = report.part(part)
        bad = [check for check in section["checks"] if check["verdict"] not in ("ok", "told")]
        section["status"] = "failed" if bad and words[1] == "done" else words[1]
    elif verb in ("curves", "same", "close"):
        name = "losses" if verb == "curves" else words[1]
        compare = {"curves": lambda: curves(report, part, words[1:]), "same": lambda: same(*words[2:4]),
                   "close": lambda: close(float(words[2]), *words[3:5])}
        try:
            fine, detail = compare[verb]()
        except OSError as error:
            fine, detail = False, f"a run is missing: {error.filename}"
        add_check(report, part, name, "ok" if fine else "FAILED", 0, detail)
    else:
        raise SystemExit(f"gpu_report: {verb}: no such verb")
    report.save()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

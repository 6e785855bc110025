"""What a run folder tells: its metrics, flags, changes of normalizer and resumes, newest checkpoint, and parent."""
import json
import math
import os
import re
import struct
from pathlib import Path

from lib import files

SCALARS = ("loss", "val_loss", "lr", "grad_norm", "tok_per_s", "mfu")
GRID_RUN = re.compile(r"(.+)-s(\d+)-[0-9a-f]{10}")  # grid.py's name of a run folder: normalizer, seed, key
GRID_EVAL = re.compile(r"-[0-9a-f]{10}$")
# Flags that do not make two runs of a group different experiments.
OWN = {"seed", "out", "resume", "threads", "rank-timeout", "progress-timeout", "profile", "keep", "ckpt-every",
       "sample-every", "norms-every", "dry-run"}


class Refused(Exception):
    """A run that cannot be plotted; the text says why and what to do."""


class NoStep(Refused):
    """A run that has not finished its first step."""


# ---------------------------------------------------------------- reading

def read_metrics(run):
    """The lines of run/metrics.jsonl as dicts. A last line without a newline is still being written and is skipped."""
    path = Path(run) / "metrics.jsonl"
    try:
        text = files.read(path, files.METRICS)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}. Expected a run folder, the trainer's --out.")
    whole = text[:text.rfind(b"\n") + 1]
    lines = [parse_line(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]
    if not lines:
        raise NoStep(f"{path}: no complete line yet. The trainer writes the first one after its first step.")
    return lines


NUMBERS = (int, float)


def is_number(value):
    """A number that is not too large to count with, or null, which stands for NaN in JSON."""
    return value is None or type(value) is float or type(value) is int and abs(value) < 1 << 63


def parse_line(path, number, line):
    """A complete line of metrics.jsonl as a dict."""
    try:
        found = json.loads(line)
        right = (all(type(found[key]) is int for key in ("step", "tokens"))
                 and all(is_number(found.get(key, 0)) for key in ("step", "tokens", "ms", *SCALARS)))
    except (ValueError, KeyError, TypeError, RecursionError):
        right = False
    if not right:
        raise Refused(f"{path}: line {number}: expected a JSON object with numbers, step and tokens among them, found "
                      f"{line[:60].decode(errors='replace')!r}. Remove the line, or resume the run, which rewrites the "
                      "file.")
    return found


def column(lines, key):
    """The key's value on each line as a float; NaN if the line has none or null."""
    values = (line.get(key) for line in lines)
    return [math.nan if value is None else float(value) for value in values]


def seconds(lines):
    """Time spent in steps up to and including each line, in seconds: the sum of ms."""
    total, out = 0.0, []
    for ms in column(lines, "ms"):
        total += 0.0 if math.isnan(ms) else ms / 1e3
        out.append(total)
    return out


def began(run, lines):
    """When the run would have begun if it had done nothing but these steps until the last change of metrics.jsonl."""
    return (Path(run) / "metrics.jsonl").stat().st_mtime - seconds(lines)[-1]


def folder_names(runs):
    """The folders' names if they are distinct, otherwise their paths below the folder that has all of them. A link has
    its own name, as in eval_gpt2."""
    paths = [Path(os.path.abspath(run)) for run in runs]
    short = [path.name for path in paths]
    if len(set(short)) == len(short):
        return short
    above = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(above)) for path in paths]


def names(runs):
    """What pictures and pages call the runs: their folders' names. Where grid.py has chosen those, what a person would
    say: the normalizer, the seed and, if these do not tell them apart, the flags that do."""
    found = [files.printable(name) for name in folder_names(runs)]
    by_normalizer = {}
    for i, run in enumerate(runs):
        match, described = GRID_RUN.fullmatch(Path(os.path.abspath(run)).name), read_run(run)
        if match:
            attn = normalizers(described) if described["lineage"] else match[1]
            by_normalizer.setdefault(attn, []).append((i, match[2], described["arguments"]))
    for attn, members in by_normalizer.items():
        flags = telling_flags([arguments for *_, arguments in members])
        called = [", ".join([attn, f"seed {seed}", *more]) for (_, seed, _), more in zip(members, flags)]
        for (i, _, _), name in zip(members, called):
            found[i] = name if called.count(name) == 1 else f"{name} ({found[i]})"
    return found


def telling_flags(arguments):
    """For each run's flags, those as text that tell runs with one normalizer and seed apart; nothing if the seed
    does."""
    if len({flags.get("seed") for flags in arguments}) == len(arguments):
        return [[] for _ in arguments]
    keys = differing(arguments, OWN | {"attn", "attn-switch"})

    def text(key, value):
        parent = GRID_RUN.fullmatch(Path(value).parent.parent.name) if key == "init-from" and value else None
        return f"from {parent[1]}" if parent else flag_text(key, value)
    return [[text(key, flags.get(key)) for key in keys if key != "init-from" or flags.get(key)] for flags in arguments]


def triples(lines, key, path):
    """(tokens, values) of a scalar that the trainer writes beside val_loss: values[i][layer] is (mean, least, largest)
    over heads."""
    tokens, values = [], []
    for line in lines:
        if key not in line:
            continue
        row = line[key]
        if not (isinstance(row, list) and row and all(isinstance(layer, list) and len(layer) == 3 for layer in row)
                and (not values or len(row) == len(values[0]))):
            raise Refused(f"{path}: step {line['step']}: expected {key} as [mean, minimum, maximum] for each layer, "
                          f"found {str(row)[:60]}.")
        tokens.append(line["tokens"])
        values.append([[math.nan if x is None else float(x) for x in layer] for layer in row])
    return tokens, values


def newest_checkpoint(run):
    """The model.safetensors of the run's newest checkpoint, or None. A folder named step-* is complete."""
    whole = [path for path in Path(run).glob("ckpt/step-*/model.safetensors") if path.parent.name[5:].isdecimal()]
    return max(whole, key=lambda path: int(path.parent.name[5:]), default=None)


def read_tensors(path, pattern):
    """{name: values} of the float32 or bf16 tensors of a safetensors file whose names match, as flat float64 arrays, in
    order of the numbers in their names. The file is an 8-byte little-endian length, a JSON header of that length, and
    the data. The header's offsets are relative to the data."""
    import numpy as np
    found = {}
    try:
        with files.open_regular(path) as file:
            size, = struct.unpack("<Q", file.read(8))
            if size > files.TEXT:
                raise ValueError(f"a header of {size:,} bytes")
            header = json.loads(file.read(size))
            matching = [name for name in header if re.fullmatch(pattern, name)]
            for name in sorted(matching, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)]):
                begin, end = header[name]["data_offsets"]
                if not 0 <= end - begin <= files.TEXT:
                    raise ValueError(f"{name} has {end - begin:,} bytes")
                file.seek(8 + size + begin)
                data = file.read(end - begin)
                kind = {"F32": "<f4", "BF16": "<u2"}[header[name]["dtype"]]
                if len(data) != end - begin:
                    raise ValueError(f"it ends before {name} does")
                values = np.frombuffer(data, kind)
                found[name] = ((values.astype("<u4") << 16).view("<f4") if kind == "<u2" else values).astype(float)
    except (ValueError, KeyError, TypeError, OverflowError, MemoryError, struct.error) as error:
        raise Refused(f"{path}: expected a safetensors file with {pattern} in float32 or bf16 "
                      f"({type(error).__name__}: {error}).")
    return found


def read_json(path):
    """The JSON object in a file, or {} if there is none."""
    try:
        value = json.loads(files.read(path, files.JSON))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{path}: expected a JSON object ({error}).")
    return value if isinstance(value, dict) else {}


def read_run(run):
    """The object in run.json, or {}. What this module and the pages use of it has the right kinds."""
    path = Path(run) / "run.json"
    found = read_json(path)

    def check(table, key, kinds, where=""):
        value = table.get(key)
        if value is not None and (type(value) not in kinds or not is_number(value) and kinds == NUMBERS):
            raise Refused(f"{path}: {where}{key}: expected {kinds[0].__name__}, found {str(value)[:40]!r}. Resume the "
                          "run, which rewrites the file, or leave this run out.")
        return value if value is not None else kinds[0]()
    for key, kind in ("arguments", dict), ("data", dict), ("lineage", list), ("history", list):
        found[key] = check(found, key, (kind,))
    for key in "steps", "grad-clip", "seed":
        check(found["arguments"], key, NUMBERS, "arguments: ")
    for which in "train", "val":
        for key in "tokens", "files":
            check(check(found["data"], which, (dict,), "data: "), key, NUMBERS, f"data: {which}: ")
    for key in "lineage", "history":
        for entry in found[key]:
            step = entry.setdefault("step", 0) if isinstance(entry, dict) else None
            if type(step) is not int or not 0 <= step < 1 << 53:
                raise Refused(f"{path}: {key}: expected objects with a whole number as step, found "
                              f"{str(entry)[:40]!r}. Leave this run out.")
    return found


def changes(run):
    return read_run(run)["lineage"]


def normalizers(described, step=math.inf):
    """The normalizer of a run up to a step, "softmax, then ssmax at step 500", by its run.json."""
    text = str(described["arguments"].get("attn", "?"))
    for entry in described.get("lineage", []):
        if entry["step"] > step or "attn" not in entry:
            continue
        if entry.get("event") in ("attn-switch", "attn-at-start"):
            where = f"step {entry['step']:,}" if entry["event"] == "attn-switch" else "the start"
            start = text if ", then " in text else entry.get("from", text)
            text = f"{start}, then {entry['attn']} at {where}"
        else:
            text = str(entry["attn"])
    return text


def change_text(entry):
    """A change of normalizer, with the validation losses before and after it if they were measured."""
    text = f"{entry.get('from')} → {entry.get('attn')}"
    try:
        return text + f" ({float(entry['val_loss_before']):.3f} → {float(entry['val_loss_after']):.3f})"
    except (KeyError, TypeError, ValueError):
        return text


def change_at_start(run):
    """A change of normalizer at the start from a checkpoint, for the legend; or ""."""
    entry = next((entry for entry in changes(run) if entry.get("event") == "attn-at-start"), None)
    return f", at the start {change_text(entry)}" if entry else ""


SWITCH, RESUME = (0, (4, 3)), (0, (1, 2.5))     # line styles of marks
MOST_RESUMES = 5        # that changed nothing and are labeled


def read_marks(run, lines):
    """[(tokens, seconds, text, line style)] in the order of steps: where the normalizer changed mid-run, and where the
    run resumed, with the flags that changed and say something about the losses, according to run.json."""
    described, times, found = read_run(run), seconds(lines), []
    resumes = [entry for entry in described["history"] if entry.get("event") == "resume"]
    for entry in described["lineage"]:
        if entry.get("event") == "attn-switch":
            found.append((entry["step"], change_text(entry), SWITCH))
    for entry in resumes:
        changed = entry.get("changed")
        texts = [f"{flag} {shown(pair.get('from'))} → {shown(pair.get('to'))}"
                 for flag, pair in (changed.items() if isinstance(changed, dict) else ())
                 if isinstance(pair, dict) and flag not in OWN | {"attn-switch", "val-every"}]
        text = "resumed" + (": " + ", ".join(texts) if texts else "")
        found.append((entry["step"], text if texts or len(resumes) <= MOST_RESUMES else "", RESUME))
    marks = []
    for step, text, style in sorted(found, key=lambda mark: mark[0]):
        done = [i for i, line in enumerate(lines) if line["step"] <= step]
        if step <= lines[-1]["step"]:
            at = (lines[done[-1]]["tokens"], times[done[-1]]) if done else (0, 0.0)
            marks.append((*at, text, style))
    return marks


# ---------------------------------------------------------------- runs after their parents

def parent_of(run, runs):
    """(the run folder, step) that a run's --init-from names, or None if it did not begin with another run's checkpoint.
    The folder may have moved together with the run, or be one of `runs`."""
    entry = next((entry for entry in changes(run) if entry.get("event") == "init-from"), {})
    path = Path(str(entry.get("from", "")))
    if path.parent.name != "ckpt" or not re.fullmatch("step-[0-9]+", path.name):
        return None
    parent = path.parent.parent
    for folder in (parent, Path(run).absolute().parent / parent.name, *map(Path, runs)):
        if folder.absolute().name == parent.name and (folder / "metrics.jsonl").exists():
            return folder, int(path.name[5:])
    raise Refused(f"{run}: --after-parent: its parent {parent} is not there. Correct the current folder, or name the "
                  "parent's folder, too.")


def after_parent(run, runs, children=()):
    """The lines of a run's metrics whose tokens and time continue those of its parent, and so on."""
    lines, parent = read_metrics(run), parent_of(run, runs)
    if not parent or os.path.abspath(parent[0]) in children:
        return lines
    before = [line for line in after_parent(parent[0], runs, (*children, os.path.abspath(run)))
              if line["step"] <= parent[1]]
    if not before:
        return lines
    tokens, first = before[-1]["tokens"], {"ms": (lines[0].get("ms") or 0) + 1e3 * seconds(before)[-1]}
    return [line | {"tokens": line["tokens"] + tokens} | (first if line is lines[0] else {}) for line in lines]


# ---------------------------------------------------------------- flags

def shown(value):
    """A flag's value as it is typed."""
    if isinstance(value, list):
        return ",".join(map(shown, value))
    return f"{value:.15g}" if isinstance(value, (bool, float)) else "–" if value is None else str(value)


def differing(arguments, same):
    """The flags whose values differ, in order, but for those in `same`. arguments: dicts of flags."""
    keys = dict.fromkeys(key for flags in arguments for key in flags)
    return [key for key in keys if key not in same and len({shown(flags.get(key)) for flags in arguments}) > 1]


def flag_text(key, value):
    if value is None or value is False:
        return f"without --{key}"
    return f"--{key}" if value is True else f"--{key} {shown(value)}"

"""What a grid keeps: results.json, the fingerprint of a text, and the keys that identify a result by what determines
its numbers."""
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import tempfile
from fractions import Fraction
from pathlib import Path

from lib import files
from lib.grid_file import Refused, base_of

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 1
# Flags that change neither what a run learns nor what is kept of it, apart from the rounding of sums taken in another
# order. The batch counts by total-batch-tokens.
NOT_NUMBERS = {"batch", "val-every", "norms-every", "ckpt-every", "keep", "keep-best", "sample-every", "threads",
               "profile", "rank-timeout", "progress-timeout", "zero", "recompute", "graphs", "matmuls",
               "ignore-config-key"}
WHOLE = 1 << 30      # a text of more bytes than this is hashed in samples
SAMPLE = 1 << 20


# ---------------------------------------------------------------- folders

def nearest_folder(flag, folder):
    """The nearest folder that exists, this one or one above it. Rejects what the flag names if a file is in the way."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise Refused(f"{flag}: {nearest}: expected a folder, found a file. Pass another {flag}.")
    return nearest


def make_folder(flag, folder):
    """Creates a folder with its parents, and rejects what the flag names if no file can be written there."""
    nearest_folder(flag, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise Refused(f"{flag}: {folder}: cannot write there ({error.strerror}). Pass another {flag}.") from None


# ---------------------------------------------------------------- results.json

class Results:
    """The results in a file, {key: entry}. Several grids may share the file."""

    def __init__(self, path):
        self.path = Path(path)
        self.entries = self.read()

    def read(self):
        try:
            whole = json.loads(files.read(self.path, files.RESULTS))
            found, entries = whole["format"], whole["results"]
            if not isinstance(entries, dict):
                raise TypeError(f"\"results\" is a {type(entries).__name__}, not an object")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise Refused(f"{self.path}: expected a file with the results of grids, or none yet ({error.strerror}).\n"
                          "  Correct the path.") from None
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"{self.path}: expected the results of grids ({type(error).__name__}: {error}).\n"
                          f"  Restore it with git checkout, or remove it to start over.") from None
        if found != FORMAT:
            raise Refused(f"{self.path}: expected format {FORMAT}, found {found}. Use the version of grid.py "
                          "that wrote it.")
        return entries

    def add(self, key, entry):
        """Adds an entry to the file. What other processes added in the meantime is kept."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent):
            self.entries = self.read() | {key: entry}
            rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(self.entries[key], allow_nan=False, sort_keys=True)}"
                              for key in sorted(self.entries))
            files.replace(self.path, f'{{"format": {FORMAT}, "results": {{\n{rows}\n}}}}\n'.encode(), named=True)


@contextlib.contextmanager
def locked(folder):
    """Holds the lock of a folder, for as long as it takes to replace a file in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise Refused(f"{folder}: cannot lock it: {error.strerror}.\n"
                          f"  Pass --results FILE on a file system with locks.") from None
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------- keys

def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def sources_of(text):
    """[(glob, weight)] of the sources of --train-data 'GLOB:WEIGHT,...', or [(text, None)] without weights."""
    found = [re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", word) for word in re.split("[ ,]+", text.strip(" ,"))]
    return [(match[1], Fraction(match[2])) for match in found] if all(found) else [(text, None)]


def matches(pattern):
    """The files other than masks that a glob, relative to the repository's root, matches. A folder that exists is meant
    as it is."""
    folder, slash, name = pattern.rpartition("/")
    if slash and os.path.exists(ROOT / folder):
        pattern = glob.escape(folder) + slash + name
    found = glob.glob(os.path.expanduser(pattern), root_dir=ROOT)
    return {path for path in found if not path.endswith(".mask")}


def patterns_of(text):
    """The patterns in a text, as find_files() in data/shards.c splits it: one that contains spaces or commas and
    matches, otherwise a list."""
    if os.path.exists(ROOT / text):
        return [glob.escape(text)]
    return [text] if matches(text) else re.split("[ ,]+", text.strip(" ,"))


def shards_of(text):
    """The shards of a text, each followed by its mask if it has one; [] if one of its patterns matches nothing."""
    found = [matches(pattern) for pattern in patterns_of(text)]
    shards = [ROOT / path for path in sorted(set.union(*found))] if all(found) else []
    return [path for shard in shards for path in (shard, shard.with_suffix(".mask")) if path.exists()]


def fingerprint(text):
    """A hash of what the shards of all sources contain, and of the ratios of the weights; None if a source has no
    shards."""
    sources = sources_of(text)
    found = [shards_fingerprint(pattern) for pattern, _ in sources]
    if None in found or sources[0][1] is None:
        return None if None in found else found[0]
    total = sum(weight for _, weight in sources)
    return digest([[one, str(weight / total) if total else "0"] for one, (_, weight) in zip(found, sources)])


def shards_fingerprint(pattern):
    """A hash of what the shards contain, whatever their names are; None if there are none. Beyond 1 GiB it covers 1 MiB
    at the start, in the middle and at the end of each shard."""
    paths = shards_of(pattern)
    if not paths:
        return None
    found, sampled = hashlib.sha256(), sum(path.stat().st_size for path in paths) > WHOLE
    for path in paths:
        size = path.stat().st_size
        found.update(size.to_bytes(8, "little"))
        with files.open_regular(path) as file:
            for at in (0, size // 2, max(0, size - SAMPLE)) if sampled else range(0, size, SAMPLE):
                file.seek(at)
                found.update(file.read(SAMPLE))
    return found.hexdigest()[:16]


def step_tokens(flags):
    return flags.get("total-batch-tokens") or flags["batch"] * max(flags["seq-len"])


def model_of(grid, row, size):
    """The trainer's --model: the size with the row's keys. Gated units have one head and widths of their own."""
    spec = grid.scale.sizes[size]
    if "block=gau" in row.model:
        spec = ",".join(key for key in spec.split(",")
                        if not key.startswith(("heads=", "ffn=", "kv_heads=", "head_dim=")))
    return ",".join(part for part in (spec, row.model) if part)


def text_of(texts, name):
    """A text's fingerprints. The name of a text that does not exist yet takes their place, so that two such texts
    differ."""
    return texts.get(name) or [f"unknown {name}"] * 2


def identity(grid, run, texts):
    """All that determines the numbers of a training run. texts: {name of the text: [fingerprint to train on, to
    validate on]}."""
    row = grid.rows[run.row]
    found = {"task": "train", "attn": row.attn, "seed": run.seed, "text": text_of(texts, row.data.name),
             "flags": {key: value for key, value in row.flags.items() if key not in NOT_NUMBERS}
             | {"total-batch-tokens": step_tokens(row.flags)}}
    base = base_of(row) and key_of(grid, type(run)(base_of(row), run.size, run.seed), texts)
    if row.init_from:
        found["init-from"] = base
    else:
        found["model"] = model_of(grid, row, run.size)
    if row.switch:
        found["switch"] = [base, row.switch["at"]]
    return found


def key_of(grid, run, texts):
    return digest(identity(grid, run, texts))


def attn_of(grid, run):
    """The normalizer that a run ends with."""
    row = grid.rows[run.row]
    return row.attn or attn_of(grid, type(run)(row.init_from, run.size, run.seed))


def eval_attn(grid, run, e):
    """The normalizer under which a run is evaluated, or "" for its own."""
    return e.attn.replace("{run.attn}", attn_of(grid, run))


def contents(name):
    """A hash of what a file that a flag names contains; the path is relative to the repository's root."""
    try:
        return hashlib.sha256(files.read(ROOT / name, files.TEXT)).hexdigest()[:16]
    except OSError as error:
        raise Refused(f"{ROOT / name}: {error.strerror}. Correct prompt-file in the grid file.") from None


def eval_identity(grid, run, e, texts):
    """All that determines the numbers of an evaluation."""
    text = text_of(texts, e.data or grid.rows[run.row].data.name)[1]
    found = {"task": e.task, "of": key_of(grid, run, texts), "attn": eval_attn(grid, run, e), "lengths": e.lengths,
             "text": text, "flags": {key: value for key, value in e.flags.items() if key not in NOT_NUMBERS}}
    if "prompt-file" in e.flags:
        found["prompts"] = contents(e.flags["prompt-file"])
    return found


def eval_key(grid, run, e, texts):
    return digest(eval_identity(grid, run, e, texts))

"""Reads a grid file, and expands it to training runs, evaluations and claims at one scale. doc/grids.md has the
schema."""
import difflib
import fnmatch
import itertools
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from lib import files

LENGTHS = ("seq-len", "seq-lens", "norm-length")                       # flags whose values may be multiples of L
STEPS = ("steps", "warmup", "val-every", "ckpt-every")                 # and of S
COUNTS = ("seq-len", "steps", "batch", "max-tokens")                   # flags that are at least 1
# Flags that have a key of their own.
SET_HERE = {"train-data": "[data]", "val-data": "[data]", "data": "[data]",
            "model": "[model] sizes, or the run's model", "attn": "attn", "seed": "seeds", "init-from": "init-from",
            "attn-switch": "switch", "task": "task"}
# Flags that only grid.py sets.
OWN = ("out", "resume", "dry-run", "threads", "help", "version", "config", "print-config")


# What training and the tasks of eval_gpt2 measure.
METRICS = {
    "train": ("val_loss", "grad_norm_max", "diverged", "clipped", "steps", "tokens", "zero_rows", "zero_rows_max",
              "p_a1", "p_a2", "p_r2"),
    "loss": ("loss", "zero_rows"), "positions": ("loss", "zero_rows", "last_eighth"),
    "needle": ("right", "first_digit", "best_score"),
    "attention": ("loss", "perplexity", "sum", "unspent", "entropy", "first_token", "zeros", "log_z_slope",
                  "log_z_intercept", "residual_kurtosis", "residual_largest", "spearman_sum_perplexity"),
    "scores": ("a1", "a2"), "choice": ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "questions")}
MOST = 10000      # runs of a grid, and rows, evaluations or claims that a `for` makes
SECTIONS = ("grid", "data", "model", "run", "eval", "claim", "paper", "formula")


class Refused(Exception):
    """A grid, or results, that cannot be used; the text says why and what to do."""


# ---------------------------------------------------------------- checking

TEXT, NUMBER, TEXTS, NUMBERS, FLAGS, NAMES, SWITCH, LOOP = range(8)
EXPECTED = {TEXT: "a text", NUMBER: "a number", TEXTS: "a list of texts", NUMBERS: "a list of whole numbers",
            FLAGS: "a table of flags, such as { lr = 1e-3 }", NAMES: 'a table of texts, such as { "1M" = "layers=4" }',
            SWITCH: 'a table { from = "ROW", at = "S/2" }',
            LOOP: 'a table of lists, such as { attn = ["softmax", "ssmax"] }'}


def is_kind(value, kind):
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e15
    if kind in (TEXT, NUMBER):
        return isinstance(value, str) if kind == TEXT else number
    if kind in (TEXTS, NUMBERS):
        return (isinstance(value, list) and value != []
                and all(isinstance(x, str) if kind == TEXTS else type(x) is int and 0 <= x <= 1e15 for x in value))
    if not isinstance(value, dict):
        return False
    if kind == FLAGS:
        return all(isinstance(x, (str, int, float, bool)) or isinstance(x, list) for x in value.values())
    if kind == NAMES:
        return value != {} and all(isinstance(x, str) for x in value.values())
    if kind == SWITCH:
        return set(value) == {"from", "at"} and isinstance(value["from"], str) and isinstance(value["at"], (str, int))
    return all(isinstance(x, list) and x or x == "presets" for x in value.values())


def nearest(word, words):
    """ Did you mean ...? if one of the words is near."""
    near = difflib.get_close_matches(word, words, 1)
    return f" Did you mean {near[0]}?" if near else ""


def check(table, where, kinds, required=()):
    """Rejects unknown keys, values of another type, and missing keys of a table of the grid file."""
    if not isinstance(table, dict):
        raise Refused(f"{where}: expected a table, found {table!r}.")
    for key, value in table.items():
        if key not in kinds:
            raise Refused(f"{where}: unknown key {key}.{nearest(key, list(kinds))}\n  Its keys are {', '.join(kinds)}.")
        if not is_kind(value, kinds[key]):
            raise Refused(f"{where}: {key}: expected {EXPECTED[kinds[key]]}, found {value!r}.")
        if kinds[key] == FLAGS and "flags" in key:
            check_flags(value, f"{where}: {key}")
    for key in required:
        if key not in table:
            raise Refused(f"{where}: {key} is missing: add {key} = ..., {EXPECTED[kinds[key]]}.")


def chosen(names, known, where):
    """The names, by default all that are known; each must be known."""
    for name in names or ():
        if name not in known:
            raise Refused(f"{where}: {name} is not one of {', '.join(known)}.{nearest(name, list(known))}")
    return list(names or known)


def check_one_of(value, known, where):
    if value not in known:
        raise Refused(f"{where}: expected one of {', '.join(known)}, found {value}.{nearest(value, list(known))}")


def check_flags(flags, where):
    for name in flags:
        if not re.fullmatch("[a-z][a-z0-9-]*", name):
            raise Refused(f"{where}: expected the name of a flag without its dashes, found {name!r}.")
        if name in OWN:
            raise Refused(f"{where}: --{name} is set by grid.py. Remove it.")
        if name in SET_HERE:
            raise Refused(f"{where}: --{name} has a key of its own. Use {SET_HERE[name]} instead.")


# ---------------------------------------------------------------- lengths and steps

AMOUNT = re.compile(r"(\d{,15})([LS])(?:/(\d{1,15}))?|(\d{1,15})")


def amount(value, units, where):
    """A length or a number of steps: a whole number, or a multiple of L or S such as 2L, L/8 or 7S/8."""
    match = AMOUNT.fullmatch(str(value))
    if not match or match[2] and match[2] not in units:
        forms = "".join(f" or a multiple of {unit} such as 2{unit}, {unit}/8 or 7{unit}/8" for unit in units)
        raise Refused(f"{where}: expected a whole number{',' * bool(forms)}{forms}, found {value!r:.99}.")
    if match[4]:
        return int(match[4])
    number, divisor = units[match[2]] * int(match[1] or 1), int(match[3] or 1)
    if divisor < 1 or number % divisor:
        raise Refused(f"{where}: {value} is not a whole number, because {match[2]} is {units[match[2]]}.")
    return number // divisor


def amounts(value, units, where):
    """One amount, or several in a list or separated by commas, as a list of numbers."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return [amount(part.strip() if isinstance(part, str) else part, units, where) for part in parts]


# ---------------------------------------------------------------- rows

@dataclass
class Data:
    name: str
    train: str
    val: str
    prepare: list
    where: str = ""


@dataclass
class Scale:
    name: str
    sizes: dict
    seeds: list
    flags: dict           # of the trainer
    eval_flags: dict      # of eval_gpt2, for the tasks loss and positions
    program: str
    eval_program: str
    jobs: int             # 0: as many as there are cores
    data: dict
    L: int = 0
    S: int = 0


@dataclass
class Row:
    """A [[run]] after its loops are expanded: a run for each of its seeds and sizes."""
    name: str
    group: str
    attn: str
    model: str
    flags: dict
    seeds: list
    sizes: list
    data: Data
    init_from: str
    switch: dict
    where: str


@dataclass(frozen=True)
class Run:
    """A training run: a row with a seed and a size."""
    row: str
    size: str
    seed: int


@dataclass
class Eval:
    name: str
    task: str
    attn: str
    lengths: list
    flags: dict
    runs: list
    data: str             # "" is the run's own
    first_seed: bool
    metric: str
    group: str            # evaluations of one group share a table and a picture
    where: str

    def reads_text(self):
        """Does eval_gpt2 read --data?"""
        return self.task != "scores" and "prompt-file" not in self.flags


@dataclass
class Claim:
    name: str
    paper: str
    ours: list            # rows and numbers with an operator between each two
    of: str
    of_right: str
    within: float
    size: str
    seeds: list


@dataclass
class Formula:
    """The weight of one score among n - 1 others, without any training: [SSMax] Figures 1 and 3."""
    name: str
    paper: str
    low: float
    high: float
    s: float
    against: str          # "n" or "score"
    n: list


@dataclass
class Grid:
    path: Path
    name: str
    paper: str
    baseline: str
    sort_by_loss: bool
    scale: Scale
    rows: dict
    evals: list
    claims: list
    published: dict       # {(row, evaluation, metric, column): the paper's number}
    formulas: list
    notes: list = field(default_factory=list)

    def runs(self):
        """All runs, those of the rows' first seeds first."""
        every = [(row.seeds.index(seed), Run(row.name, size, seed))
                 for row in self.rows.values() for size in row.sizes for seed in row.seeds]
        return [run for _, run in sorted(every, key=lambda pair: pair[0])]

    def evals_of(self, run):
        row = self.rows[run.row]
        return [e for e in self.evals if any(fnmatch.fnmatchcase(run.row, p) for p in e.runs)
                and not (e.first_seed and run.seed != row.seeds[0])]


# ---------------------------------------------------------------- loops

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
LATER = ("run.attn",)      # what an evaluation may use of the run that it is applied to


def fill(value, variables, where, later=()):
    """Replaces each {variable} in the texts of a value."""
    if isinstance(value, str):
        def found(match):
            if match[1] in later:
                return match[0]
            if match[1] not in variables:
                raise Refused(f"{where}: {match[0]}: unknown variable. Add it to for = {{ ... }}, or correct its name; "
                              f"known: {', '.join([*variables, *later]) or 'none'}.")
            return str(variables[match[1]])
        return PLACEHOLDER.sub(found, value)
    if isinstance(value, list):
        return [fill(x, variables, where, later) for x in value]
    if isinstance(value, dict):
        return {key: fill(x, variables, where, later) for key, x in value.items()}
    return value


def loops(table, where, presets, later=()):
    """The table once for each combination of the values of its variables."""
    variables = {name: presets() if values == "presets" else values for name, values in table.get("for", {}).items()}
    if (count := math.prod(map(len, variables.values()))) > MOST:
        raise Refused(f"{where}: for: expected at most {MOST:,} combinations, found {count:,}.")
    for values in itertools.product(*variables.values()):
        yield fill({key: x for key, x in table.items() if key != "for"}, dict(zip(variables, values)), where, later)


# ---------------------------------------------------------------- reading

def load(path):
    try:
        import tomllib
    except ImportError:
        raise Refused("grid.py needs Python 3.11 or newer, for tomllib.") from None
    try:
        text = files.read(path, files.GRID).decode("utf-8-sig")
        if re.search(r"\\(u0000|U00000000)", text):
            raise Refused(f"{path}: a text has a NUL. Remove it.")
        return tomllib.loads(text)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}. Expected a grid file, such as grids/lssa.toml.") from None
    except (ValueError, RecursionError) as error:      # other bytes, other text, a long number, or many brackets
        raise Refused(f"{path}: not a valid TOML file: {error}.") from None


class Reader:
    """Reads one file at one scale. presets() returns the trainer's list of normalizers."""

    def __init__(self, path, scale, presets):
        self.path, self.presets = Path(path), presets
        self.whole = load(path)
        for key in self.whole:
            if key not in SECTIONS:
                raise Refused(f"{path}: unknown section {key}.{nearest(key, SECTIONS)}\n  The sections are "
                              f"{', '.join(SECTIONS)}.")
        self.scale = self.read_scale(scale)
        self.at = f"-{scale}"      # the ending of keys that only this scale reads

    # ---- sections

    def tables(self, key):
        """(where, table) for each [[key]]."""
        found = self.whole.get(key, [])
        if not isinstance(found, list):
            raise Refused(f"{self.path}: [{key}]: write [[{key}]], because there may be several.")
        for i, table in enumerate(found, 1):
            name = table.get("name", table.get("attn", "")) if isinstance(table, dict) else ""
            yield f"{self.path}: [[{key}]] {i}" + (f" ({name})" if isinstance(name, str) and name else ""), table

    def section(self, key, scale):
        found = self.whole.get(key)
        if not isinstance(found, dict) or not isinstance(found.get(scale), dict):
            has = ", ".join(found) if isinstance(found, dict) else ""
            raise Refused(f"{self.path}: no [{key}.{scale}]."
                          + (f" Use --scale with one of its scales: {has}." if has else f" Add [{key}.{scale}]."))
        return found[scale]

    def read_scale(self, name):
        table, where = self.section("model", name), f"{self.path}: [model.{name}]"
        check(table, where, {"sizes": NAMES, "seeds": NUMBERS, "flags": FLAGS, "eval-flags": FLAGS, "program": TEXT,
                             "eval-program": TEXT, "jobs": NUMBER}, ("sizes", "flags"))
        data = {}
        for key, text in self.section("data", name).items():
            place = f"{self.path}: [data.{name}.{key}]"
            check(text, place, {"train": TEXT, "val": TEXT, "prepare": TEXTS}, ("train", "val"))
            if not all(word.strip() for word in text["train"].split(",")):
                raise Refused(f"{place}: train: expected a source on both sides of each comma, found "
                              f"{text['train']!r}. Name the missing source, or remove the comma.")
            data[key] = Data(key, text["train"], text["val"], text.get("prepare", []), place)
        if not data:
            raise Refused(f"{self.path}: [data.{name}] has no text. Add [data.{name}.NAME] with train and val.")
        scale = Scale(name, table["sizes"], table.get("seeds", [1337]), table["flags"], table.get("eval-flags", {}),
                      table.get("program", "train_gpt2"), table.get("eval-program", "eval_gpt2"), table.get("jobs", 0),
                      data)
        for key in ("seq-len", "steps"):
            if key not in scale.flags:
                raise Refused(f"{where}: flags: {key} is missing; it defines {'L' if key == 'seq-len' else 'S'}. "
                              f"Add {key} = ...")
        if "batch" not in scale.flags and "total-batch-tokens" not in scale.flags:
            raise Refused(f"{where}: flags: batch is missing. Add batch = ...")
        if type(scale.jobs) is not int or "jobs" in table and scale.jobs < 1:
            raise Refused(f"{where}: jobs: expected a whole number of 1 or more, found {scale.jobs}.")
        scale.L, scale.S = (max(amounts(scale.flags[key], {}, f"{where}: flags: {key}"))
                            for key in ("seq-len", "steps"))
        return scale

    def flags(self, base, table, where):
        """The scale's flags with those of a row on top, lengths and steps as numbers."""
        merged = base | table.get("flags", {}) | table.get("flags" + self.at, {})
        steps = amount(merged["steps"], {"S": self.scale.S}, f"{where}: flags: steps") if "steps" in merged else 0
        for key in merged:
            place = f"{where}: flags: {key}"
            if key in LENGTHS:
                merged[key] = amounts(merged[key], {"L": self.scale.L}, place)
            elif key in STEPS:
                merged[key] = steps if key == "steps" else amount(merged[key], {"S": steps}, place)
            values = merged[key] if isinstance(merged[key], list) else [merged[key]]
            if key in COUNTS and not all(type(x) is int and x >= 1 for x in values):
                raise Refused(f"{place}: expected a whole number of 1 or more, found {merged[key]!r}.")
        return merged

    def each(self, key, kinds, required=(), later=()):
        """(where, table) for each [[key]] of this scale, once for each combination of its variables."""
        for where, table in self.tables(key):
            check(table, where, kinds | {"scales": TEXTS, "for": LOOP}, required)
            if self.scale.name in chosen(table.get("scales"), self.whole["model"], f"{where}: scales"):
                for one in loops(table, where, self.presets, later):
                    yield where, one

    def check_row(self, name, rows, where):
        if name not in rows:
            raise Refused(f"{where}: no row {name} at scale {self.scale.name}.{nearest(name, list(rows))}")

    # ---- rows

    def read_rows(self):
        kinds = ({"name": TEXT, "group": TEXT, "attn": TEXT, "model": TEXT, "flags": FLAGS, "seeds": NUMBERS,
                  "sizes": TEXTS, "data": TEXT, "init-from": TEXT, "switch": SWITCH}
                 | {f"flags-{scale}": FLAGS for scale in self.whole["model"]})
        rows = {}
        for where, one in self.each("run", kinds):
            row = self.read_row(one, where)
            if row.name in rows:
                raise Refused(f"{where}: there is another row named {row.name}. Give this one a name of its own.")
            rows[row.name] = row
        if not rows:
            raise Refused(f"{self.path}: no [[run]] at scale {self.scale.name}. Add one with name and attn.")
        for row in rows.values():
            self.check_base(row, rows)
        return rows

    def read_row(self, one, where):
        scale, origin = self.scale, one.get("init-from", "")
        if not one.get("attn") and not origin:
            raise Refused(f'{where}: attn is missing: add attn = "NAME"; `./train_gpt2 --attn help` lists the '
                          'normalizers.')
        if origin and ("switch" in one or "model" in one):
            raise Refused(f"{where}: init-from takes the model of row {origin}. Remove "
                          f"{'switch' if 'switch' in one else 'model'}.")
        if "switch" in one and {key for key in one if key.startswith(("flags", "model", "data"))}:
            raise Refused(f"{where}: switch continues row {one['switch']['from']} with its flags, model and data. "
                          "Remove these keys.")
        name = one.get("name", one.get("attn", ""))
        data = scale.data[chosen([one["data"]] if "data" in one else None, scale.data, f"{where}: data")[0]]
        if " < " in name or " > " in name or " = " in name:
            raise Refused(f"{where}: name: {name} has an operator of claims in it. Use another name.")
        seeds = list(dict.fromkeys(one.get("seeds", scale.seeds)))
        sizes = chosen(one.get("sizes"), scale.sizes, f"{where}: sizes")
        return Row(name, one.get("group", ""), one.get("attn", ""), one.get("model", ""),
                   self.flags(scale.flags, one, where), seeds, sizes, data, origin, one.get("switch"), where)

    def check_base(self, row, rows):
        """A row that another one starts from exists, and has the same flags and the seeds if it is continued."""
        origin = base_of(row)
        if not origin:
            return
        key = "init-from" if row.init_from else "switch"
        self.check_row(origin, rows, f"{row.where}: {key}")
        seen, at = {row.name}, rows[origin]
        while at:
            if at.name in seen:
                raise Refused(f"{row.where}: {key}: {at.name} starts from itself.")
            seen.add(at.name)
            at = rows.get(base_of(at))
        base = rows[origin]
        if row.switch:
            if base_of(base):
                raise Refused(f"{row.where}: switch: row {origin} starts from another row itself. Switch from a row "
                              "with attn alone.")
            row.flags, row.model, row.data = dict(base.flags), base.model, base.data
            at = amount(row.switch["at"], {"S": row.flags["steps"]}, f"{row.where}: switch: at")
            row.switch = {"from": origin, "at": at}
            if not 0 < row.switch["at"] < row.flags["steps"]:
                raise Refused(f"{row.where}: switch: at: expected a step between 0 and {row.flags['steps']}, found "
                              f"{row.switch['at']}.")

    def add_seeds(self, rows, claims):
        """Rows of a claim also have its seeds, and a row that others start from has theirs."""
        for claim in claims:
            for name in claim.ours[::2]:
                if isinstance(name, str):
                    rows[name].seeds = list(dict.fromkeys(rows[name].seeds + claim.seeds))
        for row in rows.values():
            while base_of(row):
                base = rows[base_of(row)]
                base.seeds = list(dict.fromkeys(base.seeds + row.seeds))
                if missing := [size for size in row.sizes if size not in base.sizes]:
                    raise Refused(f"{row.where}: sizes: row {base.name} has no size {missing[0]}. Add it there.")
                row = base

    # ---- evaluations, claims, formulas

    def read_evals(self, rows):
        kinds = ({"name": TEXT, "task": TEXT, "attn": TEXT, "lengths": TEXTS, "flags": FLAGS, "runs": TEXTS,
                  "data": TEXT, "seeds": TEXT, "metric": TEXT, "group": TEXT}
                 | {f"{key}-{scale}": kind for scale in self.whole["model"]
                    for key, kind in (("flags", FLAGS), ("lengths", TEXTS))})
        evals = []
        for where, one in self.each("eval", kinds, ("name", "task"), LATER):
            evals.append(self.read_eval(one, where, rows))
            if evals[-1].name in [e.name for e in evals[:-1]]:
                raise Refused(f"{where}: there is another evaluation named {one['name']}. Give this one a name of its "
                              "own.")
        return evals

    def read_eval(self, one, where, rows):
        name, task = one["name"], one["task"]
        if re.search(r"[.@{}]| [-+] ", name) or name == "train":
            raise Refused(f'{where}: name: expected a name without ".", "@" and signs between spaces, other than '
                          f'train, found {name}.')
        check_one_of(task, [known for known in METRICS if known != "train"], f"{where}: task")
        for pattern in one.get("runs", ["*"]):
            if not fnmatch.filter(rows, pattern):
                raise Refused(f"{where}: runs: no row is called {pattern}.{nearest(pattern, list(rows))}")
        check_one_of(one.get("seeds", "all"), ("all", "first"), f"{where}: seeds")
        plain = task in ("loss", "positions")
        lengths = amounts(one.get("lengths" + self.at, one.get("lengths", ["L"] if plain else [])),
                          {"L": self.scale.L}, f"{where}: lengths")
        flags = self.flags(self.scale.eval_flags if plain else {}, one, where)
        metric = one.get("metric", "loss" if plain else "")
        e = Eval(name, task, one.get("attn", ""), sorted(set(lengths)), flags, one.get("runs", ["*"]),
                 one.get("data", ""), one.get("seeds") == "first", metric, one.get("group", name), where)
        if metric:
            check_metric(e, metric, f"{where}: metric")
        if e.data and not e.reads_text():
            raise Refused(f"{where}: data: this evaluation reads no text. Remove it.")
        if e.data:
            chosen([e.data], self.scale.data, f"{where}: data")
        return e

    def read_claims(self, rows, evals):
        kinds = {"name": TEXT, "paper": TEXT, "ours": TEXT, "of": TEXT, "of-right": TEXT, "within": NUMBER,
                 "size": TEXT, "seeds": NUMBERS}
        return [self.read_claim(one, where, rows, evals) for where, one in self.each("claim", kinds, ("name", "ours"))]

    def read_claim(self, one, where, rows, evals):
        ours, of = self.sides(one["ours"], where, rows), one.get("of", "train.val_loss")
        if ("=" in ours) != ("within" in one):
            raise Refused(f"{where}: within: required in a claim with =, and not allowed in others: the tolerance, or "
                          "how far apart two numbers may be and still count as equal.")
        if one.get("within", 0) < 0:
            raise Refused(f"{where}: within: expected a number of 0 or more, found {one['within']}.")
        for name, key in zip(ours[::2], ["of"] + ["of-right"] * ("of-right" in one) + ["of"] * len(ours)):
            if isinstance(name, str):
                self.check_measured(one.get(key, of), name, evals, f"{where}: {key}")
        size = chosen([one["size"]] if "size" in one else None, self.scale.sizes, f"{where}: size")[0]
        return Claim(one["name"], one.get("paper", ""), ours, of, one.get("of-right", of), one.get("within", 0.0), size,
                     one.get("seeds", []))

    def check_measured(self, of, row, evals, where):
        """Rejects what no evaluation of the row measures."""
        for _, name, metric, column in terms(of, [e.name for e in evals], self.scale.L, where):
            e = next((e for e in evals if e.name == name), None)
            if e and not any(fnmatch.fnmatchcase(row, pattern) for pattern in e.runs):
                raise Refused(f"{where}: evaluation {name} does not have row {row}. Add it to its runs.")
            check_metric(e, metric, where)
            known = columns_of(e)
            if column not in known:
                raise Refused(f"{where}: {name}.{metric} has no number {'@' + column if column else 'without @COLUMN'}."
                              + (f" Its columns are {', '.join(known)}." if known != [""] else ""))

    def read_published(self, rows, evals):
        """The papers' own numbers, which tables show beside ours."""
        published = {}
        kinds = {"row": TEXT, "of": TEXT, "numbers": FLAGS}
        for where, table in self.each("paper", kinds, kinds):
            self.check_row(table["row"], rows, f"{where}: row")
            for column, value in table["numbers"].items():
                if not is_kind(value, NUMBER):
                    raise Refused(f"{where}: numbers: {column}: expected a number, found {value!r}.")
                of = f"{table['of']}@{column}"
                self.check_measured(of, table["row"], evals, f"{where}: numbers")
                (_, *key), = terms(of, [e.name for e in evals], self.scale.L, where)
                published[table["row"], *key] = value
        return published

    def sides(self, text, where, rows):
        """"a < b" as ["a", "<", "b"]; a side that is not a row is a number."""
        found = re.split(r" ([<>=]) ", text)
        if len(found) < 3:
            raise Refused(f"{where}: ours: expected two rows (or a row and a number) with <, > or = between them, such "
                          f"as lssa < softmax, found {text}.")
        for i in range(0, len(found), 2):
            if found[i] not in rows:
                try:
                    found[i] = float(found[i])
                except ValueError:
                    self.check_row(found[i], rows, f"{where}: ours")
        if not any(isinstance(side, str) for side in found[::2]):
            raise Refused(f"{where}: ours: expected a row, found only numbers.")
        return found

    def read_formulas(self):
        formulas, needed = [], {"name": TEXT, "low": NUMBER, "high": NUMBER, "s": NUMBER, "against": TEXT, "n": NUMBERS}
        for where, table in self.each("formula", needed | {"paper": TEXT}, needed):
            check_one_of(table["against"], ("n", "score"), f"{where}: against")
            if min(table["n"]) < 1:
                raise Refused(f"{where}: n: expected whole numbers of 1 or more, found {min(table['n'])}.")
            formulas.append(Formula(**{key: table.get(key, "") for key in ("paper", *needed)}))
        return formulas


def base_of(row):
    """The name of the row that a row starts from, or ""."""
    return row.init_from or (row.switch["from"] if row.switch else "")


def check_metric(e, metric, where):
    """Rejects what an evaluation (None: training) does not measure."""
    known = METRICS[e.task if e else "train"]
    if metric not in known:
        raise Refused(f"{where}: {f'the task {e.task}' if e else 'training'} has no {metric}.{nearest(metric, known)}\n"
                      f"  It has {', '.join(known)}.")


def columns_of(e):
    """The columns of an evaluation's numbers (None: training)."""
    if not e:
        return [""]
    lengths = [*map(str, e.lengths), *[LONGEST] * bool(e.lengths)]
    if e.task in ("loss", "positions"):
        return lengths
    depths = [f"{T} at {depth} %" for T in e.lengths for depth in e.flags.get("depths", (10, 30, 50, 70, 90))]
    return ["mean", *{"needle": lengths + depths, "attention": ("plain", "end-of-text")}.get(e.task, ())]


TERM = re.compile(r"(.+)\.(\w+)(?:@(.+))?")
LONGEST = "longest"      # the column of an evaluation's longest length


def terms(text, evals, L, where=""):
    """What a claim measures, "lengths.loss@16L - lengths.loss@L", as [(sign, evaluation, metric, column)]. A column
    that is a multiple of L becomes a number; it is "" where there is none."""
    found, parts = [], re.split(r" ([-+]) ", text)
    for sign, part in zip(["+", *parts[1::2]], parts[::2]):
        match = TERM.fullmatch(part)
        if not match:
            raise Refused(f"{where}: expected EVALUATION.METRIC@COLUMN, such as lengths.loss@8L or train.val_loss, "
                          f"found {part}.")
        if match[1] not in ("train", *evals):
            raise Refused(f"{where}: no evaluation {match[1]}.{nearest(match[1], ['train', *evals])}")
        column = match[3] or ""
        if AMOUNT.fullmatch(column):
            column = str(amount(column, {"L": L}, where))
        found.append((1 if sign == "+" else -1, match[1], match[2], column))
    return found


def read(path, scale, presets):
    """The Grid in a file at one scale. presets() is called if the file asks for all normalizers."""
    reader = Reader(path, scale, presets)
    head = reader.whole.get("grid", {})
    check(head, f"{path}: [grid]", {"name": TEXT, "paper": TEXT, "baseline": TEXT, "sort": TEXT}, ("name",))
    check_one_of(head.get("sort", "file"), ("file", "loss"), f"{path}: [grid]: sort")
    if not re.fullmatch(r"[\w.-]+", head["name"]):
        raise Refused(f"{path}: [grid]: name: expected letters, digits, - and _, because a folder gets this name, "
                      f"found {head['name']}.")
    rows = reader.read_rows()
    if head.get("baseline"):
        reader.check_row(head["baseline"], rows, f"{path}: [grid]: baseline")
    evals = reader.read_evals(rows)
    claims = reader.read_claims(rows, evals)
    reader.add_seeds(rows, claims)
    if (count := sum(len(row.seeds) * len(row.sizes) for row in rows.values())) > MOST:
        raise Refused(f"{path}: expected at most {MOST:,} runs, found {count:,}. Split the grid.")
    return Grid(Path(path), head["name"], head.get("paper", ""), head.get("baseline", ""), head.get("sort") == "loss",
                reader.scale, rows, evals, claims, reader.read_published(rows, evals), reader.read_formulas())


def limited(grid, patterns, seeds=None):
    """The grid with only the rows whose names match, those that they start from, and the first `seeds` seeds of each
    (None: all)."""
    for pattern in patterns:
        if not fnmatch.filter(grid.rows, pattern):
            raise Refused(f"--only {pattern}: {grid.path} has no such row.{nearest(pattern, list(grid.rows))}")
    kept = {name: replace(row, seeds=row.seeds[:seeds]) for name, row in grid.rows.items()
            if not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)}
    for row in list(kept.values()):
        while base := base_of(row):
            needed = [seed for seed in grid.rows[base].seeds
                      if seed in {*row.seeds, *(kept[base].seeds if base in kept else ())}]
            kept[base] = row = replace(grid.rows[base], seeds=needed)
    return replace(grid, rows={name: kept[name] for name in grid.rows if name in kept})

"""The report of a grid: the papers' claims with a verdict on each, tables as text and Markdown, and pictures. It needs
only results.json."""
import math
import re
import shlex
import statistics
import sys
from dataclasses import dataclass
from html import escape

from lib import drawing, files, grid_statistics
from lib.grid_file import LONGEST, Run, base_of, terms
from lib.grid_parts import from_root, slug
from lib.grid_store import attn_of, eval_attn, eval_key, key_of

# Metrics that are infinite where a run diverged; others are then unknown.
INFINITE = ("val_loss", "loss", "last_eighth", "grad_norm_max")


# ---------------------------------------------------------------- numbers

def entry_of(plan, run, name):
    """The entry of a run's training, or of its evaluation with this name; None if there is none."""
    if name == "train":
        return plan.results.entries.get(key_of(plan.grid, run, plan.texts))
    e = next((e for e in plan.grid.evals_of(run) if e.name == name), None) if run.row in plan.grid.rows else None
    return e and plan.results.entries.get(eval_key(plan.grid, run, e, plan.texts))


def value_of(plan, run, name, metric, column=""):
    """A number of a run; infinity for a loss that is not finite, None if it is not known."""
    train, entry = entry_of(plan, run, "train"), entry_of(plan, run, name)
    if column == LONGEST:
        column = str(max(next(e.lengths for e in plan.grid.evals if e.name == name)))
    if train and train["outcome"] and metric in INFINITE:
        return math.inf
    value = entry["values"].get(metric) if entry else None
    if isinstance(value, dict):
        if column not in value:
            return None
        value = value[column]
    if entry and value is None and metric in INFINITE and metric in entry["values"]:
        return math.inf
    return value if isinstance(value, (int, float)) else None


def values_of(plan, row, size, of):
    """{seed: number} of what a claim measures, over the seeds that have it."""
    found = {}
    for seed in plan.grid.rows[row].seeds if row in plan.grid.rows else ():
        parts = [(sign, value_of(plan, Run(row, size, seed), name, metric, column))
                 for sign, name, metric, column in terms(of, [e.name for e in plan.grid.evals], plan.grid.scale.L)]
        if all(value is not None for _, value in parts):
            total = sum(sign * value for sign, value in parts)
            found[seed] = math.inf if math.isnan(total) else total
    return found


def planned_seeds(plan, row, size, of):
    """The seeds of a row with which everything that a claim measures is run."""
    needed = {name for _, name, _, _ in terms(of, [e.name for e in plan.grid.evals], plan.grid.scale.L)} - {"train"}
    return [seed for seed in plan.grid.rows[row].seeds
            if needed <= {e.name for e in plan.grid.evals_of(Run(row, size, seed))}]


def seeds_in_common(found):
    """{name: seeds}: the seeds that all rows with results have, else each row's first one, so that no difference
    between two rows is one between seeds. found: {name: {seed: a result}}."""
    known = [set(of) for of in found.values() if of]
    common = set.intersection(*known) if known else ()
    return {name: [seed for seed in of if seed in common] or list(of)[:1] for name, of in found.items()}


def deviation(numbers):
    """The standard deviation over seeds; NaN for fewer than two numbers, 0 if all are the same, infinity included."""
    if len(numbers) < 2:
        return math.nan
    if all(x == numbers[0] for x in numbers):
        return 0.0
    return statistics.stdev(numbers) if all(map(math.isfinite, numbers)) else math.inf


# ---------------------------------------------------------------- differences and claims

def is_loss_at_L(plan, of):
    """Is this one loss at the training length, the training's or an evaluation's?"""
    found = terms(of, [e.name for e in plan.grid.evals], plan.grid.scale.L)
    _, name, metric, column = found[0]
    return len(found) == 1 and (name == "train" and metric == "val_loss"
                                or metric == "loss" and column == str(plan.grid.scale.L))


def residual(plan, size, of):
    """The pooled residual of all rows with several seeds: (standard deviation, degrees of freedom), or None. A row that
    continues another's runs is left out, because it shares their noise."""
    return grid_statistics.pooled([values_of(plan, name, size, of) for name, row in plan.grid.rows.items()
                                   if size in row.sizes and not base_of(row)])


@dataclass
class Difference:
    """Of two sides, left - right: the mean over the seeds that both have, and half of its 95% interval, which is NaN
    without an interval, 0 if all seeds of one side diverged, and infinite if only some did."""
    mean: float
    half: float
    each: tuple = ()      # the differences, seed by seed

    @property
    def seeds(self):
        return len(self.each)

    def text(self, seeds=True):
        """With two digits of the interval."""
        if not math.isfinite(self.mean + self.half):
            return number(self.mean, sign=True)
        digits = decimals(self.half)
        return (f"{number(self.mean, True, digits)} ± {number(self.half, digits=digits)}"
                + f" ({self.seeds})" * (seeds and self.seeds > 1))


def difference(plan, size, left, right, seeds):
    """The Difference of two sides, each (a row or a number, what is measured), over those of the seeds that both have;
    None if they have none."""
    a, b = (dict.fromkeys(seeds, x) if isinstance(x, float) else values_of(plan, x, size, of)
            for x, of in (left, right))
    both = [seed for seed in seeds if seed in a and seed in b]
    if not both:
        return None
    each = [a[seed] - b[seed] for seed in both]      # NaN if both diverged
    mean = statistics.fmean(each)
    if not all(map(math.isfinite, each)):
        return Difference(mean, deviation(each), each)
    names = {left[0], right[0]}
    rows = [plan.grid.rows[name] for name in names if isinstance(name, str)]
    if len(rows) == 1 or any(base_of(row) in names for row in rows):      # the same models, a number, or continued runs
        half = grid_statistics.half_of_paired(each)
    elif left[1] == right[1] and is_loss_at_L(plan, left[1]) and (pool := residual(plan, size, left[1])):
        half = grid_statistics.half_of_pooled(*pool, len(both))
    else:
        half = grid_statistics.half_of_welch([a[seed] for seed in both], [b[seed] for seed in both])
    return Difference(mean, half, each)


@dataclass
class Verdict:
    ours: str
    difference: str
    seeds: int
    verdict: str


def diverged(plan, row, size):
    """Did a run of this row diverge?"""
    entries = [entry_of(plan, Run(row, size, seed), "train") for seed in plan.grid.rows[row].seeds]
    return any(entry and entry["outcome"] for entry in entries)


def compare(plan, claim, left, operator, right):
    """(Difference, verdict) of two rows, or of a row and a number; None if a side has no number. There is no verdict
    before all seeds that both rows are to have are done."""
    sides = (left, claim.of), (right, claim.of_right)
    names = [x for x, _ in sides if isinstance(x, str)]
    if not all(name in plan.grid.rows for name in names):
        return None     # --only left it out
    each = [planned_seeds(plan, x, claim.size, of) for x, of in sides if isinstance(x, str)]
    planned = [seed for seed in each[0] if all(seed in seeds for seeds in each)]
    found = difference(plan, claim.size, *sides, planned)
    done = found.seeds if found else 0
    lost = [name for name in names if done < len(planned) and diverged(plan, name, claim.size)]
    if lost:
        return Difference(math.nan, math.nan, found.each if found else ()), f"undecided: {lost[0]} diverged"
    if done < len(planned):
        return found and (found, f"{done} of {len(planned)} seeds")
    return found, grid_statistics.judge(found.mean, found.half, operator, claim.within)


def decimals(noise, most=3):
    """How many decimals show two digits of the noise."""
    return min(most, max(0, 1 - math.floor(math.log10(noise)))) if 0 < noise < math.inf else most


def number(x, sign=False, digits=3):
    if x is None or math.isnan(x):
        return "unknown"
    if math.isinf(x):
        return "diverged"
    x = round(x, digits) + 0.0     # no -0.000
    if sign:
        return f"{x:+.{digits}f}"
    return f"{x:.{digits}f}" if abs(x) < 1e4 else f"{x:.5g}"


def spread_text(numbers, every=None):
    """The mean of some seeds' numbers. With several seeds in `every` number of the row (default: these), also their
    deviation and how many they are: of the same numbers as "mean ± deviation (seeds)", and of others, whose mean is
    another one, as "mean (seeds: mean ± deviation)"."""
    numbers = list(numbers)
    every = numbers if every is None else list(every)
    if not numbers:
        return ""
    bad = sum(map(math.isinf, every))
    if bad:
        return "diverged" if len(every) == 1 else f"diverged ({bad} of {len(every)})"
    spread = deviation(every)
    digits = decimals(spread)
    text, mean = (number(statistics.fmean(x), digits=digits) for x in (numbers, every))
    if len(every) > len(numbers):
        return f"{text} ({len(every)} seeds: {mean} ± {number(spread, digits=digits)})"
    return f"{text} ± {number(spread, digits=digits)} ({len(every)})" if len(every) > 1 else text


def sides_of(plan, claim):
    """The rows of a claim with their numbers, over the seeds that all of them have. If the sides are different
    evaluations, they are named."""
    measured = [claim.of_right if i and claim.of_right else claim.of for i in range(len(claim.ours[::2]))]
    names = [e.name for e in plan.grid.evals]
    evals = [", ".join(dict.fromkeys(name for _, name, *_ in terms(of, names, plan.grid.scale.L))) for of in measured]
    if len(set(evals)) < len(set(measured)):
        evals = measured
    sides = [(f"{name} ({e})" if len(set(measured)) > 1 else name, values_of(plan, name, claim.size, of))
             for name, of, e in zip(claim.ours[::2], measured, evals) if isinstance(name, str)]
    seeds = seeds_in_common(dict(sides))
    return [f"{name} {spread_text([values[seed] for seed in seeds[name]]) or 'not run'}" for name, values in sides]


def verdict_on(plan, claim):
    """The Verdict on a claim. In a chain a < b < c, each pair must agree; one that disagrees refutes it."""
    names, operators = claim.ours[::2], claim.ours[1::2]
    shown = sides_of(plan, claim)
    found = [compare(plan, claim, *pair) for pair in zip(names, operators, names[1:])]
    if None in found:
        return Verdict("; ".join(shown), "", 0, "not run")
    verdicts = [verdict for _, verdict in found]
    verdict = next((word for kind in ("seeds", "disagrees", "undecided") for word in verdicts if kind in word),
                   "agrees")
    return Verdict("; ".join(shown), ", ".join(pair.text(seeds=False) for pair, _ in found),
                   min(pair.seeds for pair, _ in found), verdict)


# ---------------------------------------------------------------- tables

# How the cells of a column of numbers begin. "1. softmax" is text.
NUMERIC = re.compile(r"([-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?|diverged|unknown)(?=$| %| ±| \(|, )|$")


def is_numeric(column):
    return any(column) and all(map(NUMERIC.match, column))


def plain(text):
    """Markdown for a text that may look like HTML."""
    return escape(text, quote=False)


@dataclass
class Table:
    title: str
    head: list
    rows: list

    def markdown(self):
        clean = [[plain(cell).replace("|", "\\|") for cell in row] for row in [self.head, *self.rows]]
        return "\n".join(["| " + " | ".join(clean[0]) + " |",
                          "|" + "|".join("--:" if is_numeric(column) else "---"
                                         for column in zip(*self.rows)) + "|",
                          *("| " + " | ".join(row) + " |" for row in clean[1:])]) + "\n"

    def text(self):
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows)]
        aligned = [str.rjust if is_numeric(column) else str.ljust for column in zip(*self.rows)]
        lines = ["  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths))
                 for row in [self.head, *self.rows]]
        return "\n".join(line.rstrip() for line in lines) + "\n"


def members(plan):
    """[(label, row, size)] of all rows and sizes."""
    several = len(plan.grid.scale.sizes) > 1
    return [(f"{row.name} ({size})" if several else row.name, row, size)
            for row in plan.grid.rows.values() for size in row.sizes]


def seeds_of(plan, row, size, name):
    """{seed: True} of the seeds with results, a diverged run's among them."""
    runs = [Run(row.name, size, seed) for seed in row.seeds]
    return {run.seed: True for run in runs
            if entry_of(plan, run, name) or ((trained := entry_of(plan, run, "train")) and trained["outcome"])}


def of_seeds(plan, row, size, seeds, name, metric, column=""):
    found = (value_of(plan, Run(row.name, size, seed), name, metric, column) for seed in seeds)
    return [x for x in found if x is not None]


def from_baseline(plan, row, size):
    """The Difference of the validation losses from the baseline's, over the seeds with which neither diverged; None if
    there are none."""
    base, of = plan.grid.baseline, "train.val_loss"
    if row.name == base or base not in plan.grid.rows or size not in plan.grid.rows[base].sizes:
        return None
    a, b = values_of(plan, row.name, size, of), values_of(plan, base, size, of)
    seeds = [seed for seed in a if seed in b and math.isfinite(a[seed] + b[seed])]
    return difference(plan, size, (row.name, of), (base, of), seeds)


@dataclass
class Trained:
    """A row after training. Its numbers are means over `seeds`, which all rows with results share if possible."""
    label: str
    row: object
    size: str
    seeds: list
    loss: float           # infinite if it diverged; None without results
    difference: Difference     # from the baseline, over the seeds that both have; None without results


def trained_rows(plan):
    """All rows as [Trained], in the file's order."""
    seeds = seeds_in_common({label: seeds_of(plan, row, size, "train") for label, row, size in members(plan)})
    found = []
    for label, row, size in members(plan):
        losses = of_seeds(plan, row, size, seeds[label], "train", "val_loss")
        loss = statistics.fmean(losses) if losses else None
        paired = from_baseline(plan, row, size)
        found.append(Trained(label, row, size, seeds[label], loss, paired))
    finite = [x for x in found if x.loss is not None and math.isfinite(x.loss)]
    best = min(finite, key=lambda x: x.loss, default=None)
    base = next((x for x in finite if x.row.name == plan.grid.baseline), best)
    for x in found:
        if x.loss is not None and not math.isfinite(x.loss):
            x.difference = Difference(math.inf, math.nan)
        elif x is base and x.row.name == plan.grid.baseline:
            x.difference = Difference(0.0, math.nan, (0.0,) * len(x.seeds))
        elif x.difference is None and x.loss is not None:     # no seed in common with the baseline, or no baseline
            x.difference = Difference(x.loss - base.loss, math.nan)
    return found


def ranked(found):
    """The rows with results by their differences from the baseline, the best first."""
    return sorted((x for x in found if x.loss is not None), key=lambda x: x.difference.mean)


def percent(numbers):
    return f"{100 * statistics.fmean(numbers):.3g}%" if numbers and max(numbers) > 0 else ""


def zero_rows_text(last, most):
    """The shares of all-zero rows in the last step and, at most, in any; empty if there never was one."""
    return f"{percent(last) or '0%'} (most: {100 * max(most):.2g}%)" if percent(most) else ""


def training_row(plan, x, label=""):
    def numbers(metric, seeds=x.seeds):
        return of_seeds(plan, x.row, x.size, seeds, "train", metric)
    norms = [norm for norm in numbers("grad_norm_max") if math.isfinite(norm)]
    entries = [entry_of(plan, Run(x.row.name, x.size, seed), "train") for seed in x.row.seeds]
    outcomes = [entry["outcome"] for entry in entries if entry and entry["outcome"]]
    minutes = [entry["info"]["seconds"] / 60 for entry in entries if entry]
    return [label or x.label, spread_text(numbers("val_loss"), numbers("val_loss", x.row.seeds)),
            x.difference.text() if x.difference and x.difference.seeds else "",
            f"{max(norms):.3g}" if norms else "", percent(numbers("clipped")),
            zero_rows_text(numbers("zero_rows"), numbers("zero_rows_max")),
            f"{statistics.fmean(minutes):.1f}" if minutes else "",
            "; ".join(dict.fromkeys(outcomes)) or ("" if any(entries) else "not run")]


def training_tables(plan):
    base = f"minus {plan.grid.baseline}" if plan.grid.baseline else "difference"
    head = ["row", "validation loss", base, "largest gradient norm", "clipped steps", "all-zero rows", "minutes",
            "outcome"]
    found = trained_rows(plan)
    if plan.grid.sort_by_loss:
        best, rest = ranked(found), [x for x in found if x.loss is None]
        return [Table("", head, [training_row(plan, x, f"{place}. {x.label}") for place, x in
                                 enumerate([*best, *rest], 1)])]
    tables = {}
    for x in found:
        tables.setdefault(x.row.group, []).append(training_row(plan, x))
    return [Table(group, head, rows) for group, rows in tables.items()]


@dataclass
class Line:
    """A row of an evaluation's table, and a line of its picture."""
    label: str
    row: object
    size: str
    eval: object          # None: its training

    def key(self):
        return self.row.name, self.size, self.eval and self.eval.name

    def numbers(self, plan, seeds, metric, column):
        return of_seeds(plan, self.row, self.size, seeds, self.eval.name, metric, column)


def eval_groups(plan):
    """{title: the evaluations that share a table and a picture}"""
    found = {}
    for e in plan.grid.evals:
        found.setdefault(e.group, []).append(e)
    return found


def line_label(plan, label, run, e, alone):
    """The label of a row's line: with the evaluation's name or its normalizer, where they tell lines apart."""
    attn, own = eval_attn(plan.grid, run, e), attn_of(plan.grid, run)
    if attn.startswith(own + "+"):
        return label + attn.removeprefix(own)
    if attn:
        return f"{label}, under {attn}"
    return label if alone or e.name == e.group else f"{label}, {e.name}"


def lines_of(plan, evals, most=12):
    """{title: its Lines}: by the rows' groups, or by rows if a group would have too many lines for a picture."""
    by_group, by_row = {}, {}
    for label, row, size in members(plan):
        for e in evals:
            if any(e in plan.grid.evals_of(Run(row.name, size, seed)) for seed in row.seeds):
                name = line_label(plan, label, Run(row.name, size, row.seeds[0]), e, len(evals) == 1)
                by_group.setdefault(row.group, []).append(Line(name, row, size, e))
                by_row.setdefault(label, []).append(Line(e.name, row, size, e))
    return by_group if len(evals) == 1 or max(map(len, by_group.values()), default=0) <= most else by_row


def seeds_of_lines(plan, found):
    """{(row, size, evaluation): the seeds that its numbers are means over} for {title: Lines}"""
    return seeds_in_common({line.key(): seeds_of(plan, line.row, line.size, line.eval.name)
                            for lines in found.values() for line in lines})


def results_of(plan, evals):
    """The entries of some evaluations."""
    return [entry for e in evals for run in plan.grid.runs() if (entry := entry_of(plan, run, e.name))]


def columns_of(plan, evals, metric):
    """The columns of a metric in the results of some evaluations: their lengths, else what the results have."""
    if all(e.lengths and e.task in ("loss", "positions") for e in evals):
        return [str(T) for T in sorted({T for e in evals for T in e.lengths})]
    found = [entry["values"].get(metric) for entry in results_of(plan, evals)]
    names = {name for value in found if isinstance(value, dict) for name in value if " at " not in name}
    return sorted(names, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def metrics_of(plan, evals):
    named = dict.fromkeys(e.metric for e in evals if e.metric)
    return list(named) or list(dict.fromkeys(name for entry in results_of(plan, evals) for name in entry["values"]))


def column_title(plan, column):
    L = plan.grid.scale.L
    if not column.isdigit() or column == str(L):
        return f"L = {L}" if column == str(L) else column
    T = int(column)
    if T % L == 0:
        return f"{T // L} L"
    return f"L/{L // T}" if L % T == 0 else column


def published(plan, line, metric, column):
    """The paper's number as text, or ""."""
    value = plan.grid.published.get((line.row.name, line.eval.name, metric, column))
    return "" if value is None else f"{value:g}"


def eval_tables(plan, evals):
    """A table for each metric and group of rows. The loss is not named where it is the only metric."""
    tables, found = [], lines_of(plan, evals)
    shared, metrics = seeds_of_lines(plan, found), metrics_of(plan, evals)
    for metric in metrics:
        columns = columns_of(plan, evals, metric)
        for title, lines in found.items():
            theirs = [column for column in columns if any(published(plan, line, metric, column) for line in lines)]
            rows = [[line.label, *(spread_text(*(line.numbers(plan, seeds, metric, column)
                                                 for seeds in (shared[line.key()], line.row.seeds)))
                                   for column in columns),
                     *(published(plan, line, metric, column) for column in theirs)] for line in lines]
            if any(any(row[1:]) for row in rows):
                tables.append(Table(", ".join(filter(None, (title, "" if metrics == ["loss"] else metric))),
                                    ["row", *(column_title(plan, column) for column in columns),
                                     *(f"paper: {column_title(plan, column).split(' = ')[0]}" for column in theirs)],
                                    rows))
    if all(e.task == "positions" for e in evals):
        tables += filter(None, [positions_table(plan, evals)])
    return tables


BINS = 16


def mean_known(numbers):
    known = [x for x in numbers if x is not None]
    return statistics.fmean(known) if known else math.nan


def by_position(plan, line, seeds):
    """The loss by position at the longest length, as the means over the line's seeds; [] if it has none."""
    T = str(max(line.eval.lengths))
    entries = (entry_of(plan, Run(line.row.name, line.size, seed), line.eval.name) for seed in seeds)
    curves = [entry["values"]["by_position"][T] for entry in entries if entry and "by_position" in entry["values"]]
    return [mean_known(point) for point in zip(*curves)]


def positions_table(plan, evals):
    """The loss by position at the longest length, in BINS equal parts; None without results."""
    found = lines_of(plan, evals)
    shared, T = seeds_of_lines(plan, found), max(T for e in evals for T in e.lengths)
    rows = []
    for line in (line for lines in found.values() for line in lines if max(line.eval.lengths) == T):
        curve = by_position(plan, line, shared[line.key()])
        ends = [len(curve) * i // BINS for i in range(BINS + 1)]
        if all(a < b for a, b in zip(ends, ends[1:])):
            rows.append([line.label, *(f"{mean_known(curve[a:b]):.3f}" for a, b in zip(ends, ends[1:]))])
    ends = [column_title(plan, str(T * (i + 1) // BINS)).split(" = ")[0] for i in range(BINS)]
    head = ["loss of the positions up to", *ends]
    return Table("by position", head, rows) if rows else None


def claims_table(plan):
    """With what the papers say and the tolerances, if a claim of the grid has them."""
    head, rows = ["claim", "paper", "ours", "difference", "tolerance", "seeds", "verdict"], []
    for claim in plan.grid.claims:
        v, tolerance = verdict_on(plan, claim), f"{claim.within:g}" if "=" in claim.ours else ""
        rows.append([claim.name, claim.paper, v.ours, v.difference, tolerance, str(v.seeds or ""), v.verdict])
    kept = [i for i, name in enumerate(head) if name not in ("paper", "tolerance") or any(row[i] for row in rows)]
    return Table("Claims", [head[i] for i in kept], [[row[i] for i in kept] for row in rows])


# ---------------------------------------------------------------- formulas

def weight(n, low, high, factor):
    """The weight that one score has among n - 1 others under exp, all times the factor."""
    return 1 / (1 + (n - 1) * math.exp(min(700, factor * (low - high))))


def formula_table(formula):
    """The weights in numbers, for the n of the file."""
    return Table("", ["n", "softmax", f"ssmax, s = {formula.s:g}"],
                 [[f"{k:,}", f"{weight(k, formula.low, formula.high, 1):.5f}",
                   f"{weight(k, formula.low, formula.high, formula.s * math.log(k)):.5f}"]
                  for k in formula.n])


# ---------------------------------------------------------------- the report

def needle_scores_note(plan, evals):
    """[how to draw what results.json does not keep of needle scores: that of each head and of each trial], or []."""
    if any(e.task != "needle" for e in evals) or metrics_of(plan, evals) != ["best_score"]:
        return []
    folders = " ".join(f"{shlex.quote(from_root(plan.out))}/runs/*/eval/{slug(e.name)}-*" for e in evals)
    return ["Each trial counts with its best head's score. Those of all heads and trials are only in the run folders. "
            "To draw them ([SSMax] Figures 7 and 8): "
            f"`.venv/bin/python scripts/plot_eval.py {folders} --out scores.png`"]


def sections(plan, failed):
    """[(title, tables, picture names, paragraphs)]"""
    grid = plan.grid
    notes = [*grid.notes, *(f"FAILED: {label}: {text}" for label, text in failed.items())]
    missing = [part for part in plan.left() if part.label not in failed]
    if missing:
        notes.append(f"Not run yet: {len(missing)} of {len(plan.parts)} parts.")
    yield f"Grid {grid.name} at scale {grid.scale.name}", [], [], [grid.paper, *notes]
    if grid.claims:
        note = ("The difference is left minus right, the mean over seeds, with its 95% interval. A claim agrees if the "
                "interval lies on the claimed side of 0, disagrees if it lies on the other side, and is undecided if "
                "it contains 0. A claim of equality agrees if the interval lies within the tolerance, and disagrees if "
                "it lies outside. doc/grids.md says how the intervals are computed.")
        yield "Claims", [claims_table(plan)], [], [note]
    note = ("Tables average over the seeds that every row has. Where a row has more, the mean and the standard "
            "deviation over all of them follow in parentheses. Differences and ranks compare rows seed by seed; a "
            "difference has its 95% interval.")
    several = any(len(row.seeds) > 1 for row in grid.rows.values())
    yield "Training", training_tables(plan), ["curves", "final", "scalars"], [note] * several
    for title, evals in eval_groups(plan).items():
        yield (f"Evaluation: {title}", eval_tables(plan, evals), [title, f"{title}-positions"],
               needle_scores_note(plan, evals))
    for formula in grid.formulas:
        yield f"Formula: {formula.name}", [formula_table(formula)], [formula.name], [formula.paper]


def draw_pictures(plan, folder):
    """The names of the pictures that were written."""
    drawn = set()
    try:
        plt = drawing.pyplot()
        from lib.pictures import grids
        for name, figure in grids.figures(plan):
            drawing.save(figure, folder / f"{slug(name)}.png")
            plt.close(figure)
            drawn.add(name)
    except ImportError as error:
        print(f"note: no pictures in the report of {plan.grid.name}: {error}. Use .venv/bin/python, which "
              "scripts/setup.sh makes, and --report draws them.", file=sys.stderr)
    return drawn


def write(plan, folder, failed, draw=True):
    """Writes report.md, report.txt and the pictures into a folder, and returns the text."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw_pictures(plan, folder) if draw else set()
    markdown, text = [], []
    for i, (title, tables, names, paragraphs) in enumerate(sections(plan, failed)):
        markdown.append(("#" if i == 0 else "##") + f" {plain(title)}\n")
        text.append(f"== {title}\n")
        for paragraph in filter(None, paragraphs):
            markdown.append(plain(paragraph) + "\n")
            text.append(paragraph + "\n")
        for table in tables:
            named = bool(table.title and table.title != title)
            markdown += [f"### {plain(table.title)}\n"] * named + [table.markdown()]
            text += [f"-- {table.title}\n"] * named + [table.text()]
        markdown += [f"![{plain(name)}]({slug(name)}.png)\n" for name in names if name in drawn]
    for name, lines in ("report.md", markdown), ("report.txt", text):
        files.replace(folder / name, "\n".join(lines).encode())
    return "\n".join(text)

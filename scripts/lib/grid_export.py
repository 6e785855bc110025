"""The numbers of a grid's report as a CSV file, for spreadsheets and pandas, and as LaTeX tables: means and spreads
over all seeds of each row, how many seeds these are, and differences from the baseline with their intervals."""
import csv
import io
import math
import re
import statistics
from dataclasses import dataclass

from lib import grid_report
from lib.grid_report import Difference

TRAINING = ("val_loss", "grad_norm_max", "clipped", "zero_rows")     # in the CSV


@dataclass
class Numbers:
    """A table: for each row, the numbers of its seeds in each column."""
    title: str
    metric: str
    columns: dict         # {key: title}
    rows: list            # (label, row, size, {key of a column: numbers, or a Difference})


def tables(plan):
    """The tables as [Numbers], training first."""
    base = plan.grid.baseline
    for metric in TRAINING:
        rows = [(label, row.name, size, {"": grid_report.of_seeds(plan, row, size, row.seeds, "train", metric)})
                for label, row, size in grid_report.members(plan)]
        if base and metric == "val_loss":
            for (_, _, size, numbers), (_, row, _) in zip(rows, grid_report.members(plan)):
                numbers[f"minus {base}"] = grid_report.from_baseline(plan, row, size)
        yield Numbers("Training", metric, {key: key or metric for key in rows[0][3]}, rows)
    for title, evals in grid_report.eval_groups(plan).items():
        lines = [line for group in grid_report.lines_of(plan, evals, math.inf).values() for line in group]
        for metric in grid_report.metrics_of(plan, evals):
            columns = {key: grid_report.column_title(plan, key) for key in grid_report.columns_of(plan, evals, metric)}
            rows = [(line.label, line.row.name, line.size, {key: line.numbers(plan, line.row.seeds, metric, key)
                                                            for key in columns}) for line in lines]
            if any(any(numbers.values()) for *_, numbers in rows):
                yield Numbers(title, metric, columns, rows)


def described(numbers):
    """Mean, standard deviation, how many numbers, and of a Difference half of its interval, as texts."""
    each, half = (numbers.each, numbers.half) if isinstance(numbers, Difference) else (numbers, math.nan)
    mean, spread, half = (f"{x:.8g}" if not math.isnan(x) else ""
                          for x in (statistics.fmean(each), grid_report.deviation(each), half))
    return mean, spread, len(each), half


def as_csv(plan):
    """A line for each number, in full precision: `spread` is the standard deviation over `seeds`; a run that diverged
    makes it and the mean infinite. `interval` is half of the 95% interval of a difference."""
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    out.writerow(["table", "row", "size", "line", "metric", "column", "mean", "spread", "seeds",
                  "interval"])
    for table in tables(plan):
        for label, row, size, numbers in table.rows:
            for key, values in numbers.items():
                if values:
                    out.writerow([table.title, row, size, label, table.metric, key, *described(values)])
    return file.getvalue()


# ---------------------------------------------------------------- LaTeX

SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
           ">": r"\textgreater{}", "|": r"\textbar{}", '"': "{''}", "[": "{[}", "]": "{]}", "*": "{*}",
           "`": r"\`{}", "-": "-{}", "'": "'{}", "±": r"\ensuremath{\pm}", "→": r"\ensuremath{\rightarrow}",
           "×": r"\ensuremath{\times}", "√": r"\ensuremath{\surd}", "≤": r"\ensuremath{\leq}", "−": r"\ensuremath{-}",
           "≥": r"\ensuremath{\geq}", "–": "--", "—": "---", "·": r"\ensuremath{\cdot}", "²": r"\ensuremath{^2}"}
SPECIAL |= {letter: "\\" + letter for letter in "&%$#_{}"}
SPECIAL |= {chr(code): rf"\ensuremath{{\{name}}}" for code, name in zip(
    [*range(0x3B1, 0x3BF), *range(0x3C0, 0x3C2), *range(0x3C3, 0x3CA)],
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega".split())}


def latex(text):
    """A text that LaTeX shows as it is. What its standard fonts lack is shown as its code."""
    def shown(letter):
        if letter in SPECIAL:
            return SPECIAL[letter]
        if letter.isspace():
            return " "
        known = " " <= letter <= "~" or "\xc0" <= letter <= "\xff" and letter not in "ÐÞðþ"
        return letter if known else f"(U+{ord(letter):04X})"
    return re.sub("-{}(?!-)", "-", "".join(map(shown, text)))


def cell(numbers):
    """"3.5572 $\\pm$ 0.0067" """
    if isinstance(numbers, Difference):
        text, _, more = numbers.text().partition(" ± ")
    else:
        text, _, more = grid_report.spread_text(numbers or []).partition(" ± ")
    spread = f" $\\pm$ {more.partition(' ')[0]}" if more else ""
    return ("$-$" + text[1:] if text.startswith("-") else latex(text)) + spread


def as_latex(plan):
    """A table environment for each table, for a document that has \\usepackage{booktabs}."""
    parts = ["% Tables of attn.c's grid " + latex(f"{plan.grid.name} at scale {plan.grid.scale.name}")
             + r". They need \usepackage{booktabs}.", ""]
    for table in tables(plan):
        if table.title == "Training" and table.metric != "val_loss":
            continue
        name = {"val_loss": "validation loss"}.get(table.metric, table.metric)
        heads = [title if title != table.metric else name for title in table.columns.values()]
        lines = []
        for label, _, _, numbers in table.rows:
            counts = sorted({described(values)[2] for values in numbers.values() if values})
            seeds = "--".join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]])))
            lines.append(" & ".join([latex(label), *map(cell, numbers.values()), seeds]) + r" \\")
        caption = f"{table.title}: {name}" if table.title != name else name
        known = [values for *_, numbers in table.rows for values in numbers.values() if values]
        spread = r", mean $\pm$ standard deviation over seeds" * any(described(values)[2] > 1 for values in known)
        if any(isinstance(values, Difference) and not math.isnan(values.half) for values in known):
            spread += r"; differences $\pm$ half of their 95\% intervals"
        parts += [r"\begin{table}", r"\centering",
                  rf"\caption{{{latex(caption)}{spread}.}}",
                  rf"\begin{{tabular}}{{l{'r' * len(heads)}r}}", r"\toprule",
                  " & ".join(["", *map(latex, heads), "seeds"]) + r" \\", r"\midrule", *lines, r"\bottomrule",
                  r"\end{tabular}", r"\end{table}", ""]
    return "\n".join(parts)

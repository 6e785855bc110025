"""Writes tables and numbers of grids into a page, so that the page has those of grids/results.json.

    .venv/bin/python dev/figures/grid_tables.py doc/results.md          # rewrites what its markers name
    .venv/bin/python dev/figures/grid_tables.py doc/results.md --check   # exit code 1 if something differs

A marker is a comment that names the grid, a section of its report and, where that has several, a table:

    <!-- table: lssa / Claims -->
    <!-- table: lssa / Evaluation: lengths / Table 4: re-weighted -->

The table that follows it is replaced. Before a paragraph or list, a marker names the grid and, in order, what all its
numbers with two decimals and percentages are: rows with what a claim measures, of which those after a minus are
subtracted. A number is the mean over the seeds that they all have:

    <!-- numbers: study: ssmax of train.val_loss - softmax of train.val_loss; softmax of needles.right@8L -->
"""
import functools
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from lib import command_line, files, grid_file, grid_parts, grid_report  # noqa: E402
from lib.grid_store import ROOT, Results  # noqa: E402

MARKED = re.compile(r"<!-- table: (?P<name>.+?) -->\n+(?P<table>(?:\|.*\n)*)\n*")
NUMBERED = re.compile(r"(?P<marker><!-- numbers: (?P<grid>\w+):\s(?P<terms>[^>]+) -->\n\n)(?P<text>.+?)(?=\n\n)", re.S)
NUMBER = re.compile(r"\d+\.\d\d(?!\d)|\d+%")


@functools.cache
def plan_of(name):
    """A grid at the small scale with its results."""
    path = ROOT / f"grids/{name}.toml"
    if not path.exists():
        raise grid_file.Refused(f"{path}: no such grid. Correct the marker.")
    results = Results(ROOT / "grids/results.json")
    grid = grid_file.read(path, "small", lambda: grid_parts.presets(grid_parts.find("TRAIN_GPT2", "train_gpt2")))
    return grid_parts.Plan(grid, results, grid_parts.texts_of(grid, results), ROOT / "out/grids")


@functools.cache
def report(name):
    """{name of a table: its Markdown} of a grid's report."""
    found = {}
    for title, tables, *_ in grid_report.sections(plan_of(name), {}):
        for table in tables:
            table.rows = [row for row in table.rows if any(cell not in ("", "not run") for cell in row[1:])]
            found[title if table.title in ("", title) else f"{title} / {table.title}"] = table.markdown()
    return found


@functools.cache
def number_of(grid, terms, percent):
    """What a marker names, with two decimals or as a percentage."""
    plan, total = plan_of(grid), {}
    for i, term in enumerate(terms.split(" - ")):
        row, _, of = term.strip().partition(" of ")
        if row not in plan.grid.rows:
            raise grid_file.Refused(f"{grid} has no row {row}. Correct the marker.")
        found = grid_report.values_of(plan, row, plan.grid.rows[row].sizes[0], of)
        total = {seed: total[seed] - x for seed, x in found.items() if seed in total} if i else found
    if not total:
        raise grid_file.Refused(f"{grid}: {terms}: no results with the same seeds.")
    mean = statistics.fmean(total.values())
    return f"{100 * mean:.0f}%" if percent else f"{mean:.2f}"


def main():
    files.print_escapes()
    parser = command_line.parser(__doc__, "doc/grids.md")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something differs")
    options = parser.parse_args()
    stale = []

    def fresh(match):
        grid, table = match["name"].split(" / ", 1)
        known = report(grid)
        if table not in known:
            raise grid_file.Refused(f"{options.page}: the report of {grid} has no table {table}. It has "
                                    f"{'; '.join(known)}.")
        found = known[table]
        if match["table"] != found:
            stale.append(match["name"])
        return f"<!-- table: {match['name']} -->\n\n{found}\n"

    def numbered(match):
        terms, found = " ".join(match["terms"].split()).split("; "), NUMBER.findall(match["text"])
        if len(terms) != len(found):
            raise grid_file.Refused(f"{options.page}: {len(found)} numbers below a marker that names {len(terms)}.")
        fresh = [number_of(match["grid"], term, number.endswith("%")) for term, number in zip(terms, found)]
        stale.extend(f"{term}, {old}" for term, old, new in zip(terms, found, fresh) if old != new)
        return match["marker"] + NUMBER.sub(lambda _: fresh.pop(0), match["text"])
    try:
        text = NUMBERED.sub(numbered, MARKED.sub(fresh, files.read(options.page, files.TEXT).decode()))
    except (grid_file.Refused, OSError) as error:
        sys.exit(f"grid_tables.py: {error}")
    for name in stale:
        print(f"{options.page}: {name}: {'differs' if options.check else 'rewritten'}")
    if not options.check:
        files.replace(options.page, f"{text.rstrip()}\n".encode(), named=True)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())

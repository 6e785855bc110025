"""Writes tables of grids' reports into a page, so that the page has the numbers of grids/results.json.

    .venv/bin/python dev/figures/grid_tables.py doc/results.md          # rewrites the tables below its markers
    .venv/bin/python dev/figures/grid_tables.py doc/results.md --check   # exit code 1 if a table differs

A marker is a comment that names the grid, a section of its report and, where that has several, a table:

    <!-- table: lssa / Claims -->
    <!-- table: lssa / Evaluation: lengths / Table 4: re-weighted -->

The table that follows it is replaced.
"""
import functools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from lib import command_line, files, grid_file, grid_parts, grid_report  # noqa: E402
from lib.grid_store import ROOT, Results  # noqa: E402

MARKED = re.compile(r"<!-- table: (?P<name>.+?) -->\n+(?P<table>(?:\|.*\n)*)\n*")


def plan_of(name, results=ROOT / "grids/results.json"):
    """A grid at the small scale with its results."""
    path = ROOT / f"grids/{name}.toml"
    if not path.exists():
        raise grid_file.Refused(f"{path}: no such grid. Correct the marker.")
    results = Results(results)
    grid = grid_file.read(path, "small", lambda: grid_parts.presets(grid_parts.find("TRAIN_GPT2", "train_gpt2")))
    return grid_parts.Plan(grid, results, grid_parts.texts_of(grid, results), ROOT / "out/grids")


@functools.cache
def report(name):
    """{name of a table: its Markdown} of a grid's report."""
    found = {}
    for title, tables, *_ in grid_report.sections(plan_of(name), {}):
        for table in tables:
            table.rows = [row for row in table.rows if any(row[1:])]      # without rows that have not run
            found[title if table.title in ("", title) else f"{title} / {table.title}"] = table.markdown()
    return found


def main():
    files.print_escapes()
    parser = command_line.parser(__doc__, "doc/grids.md")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table differs")
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
    try:
        text = MARKED.sub(fresh, files.read(options.page, files.TEXT).decode())
    except (grid_file.Refused, OSError) as error:
        sys.exit(f"grid_tables.py: {error}")
    for name in stale:
        print(f"{options.page}: {name}: {'differs' if options.check else 'rewritten'}")
    if not options.check:
        files.replace(options.page, f"{text.rstrip()}\n".encode(), named=True)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())

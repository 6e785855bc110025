"""The form of the sources: clang-format's, in lines of at most 120 columns."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = subprocess.run(["git", "ls-files", "*.c", "*.h", "*.cu", "*.cuh", "*.cpp"], cwd=ROOT, capture_output=True, text=True,
                         check=True).stdout.split()


def test_format():
    """.clang-format has the style. To mend: .venv/bin/clang-format -i FILE"""
    tool = Path(sys.executable).parent / "clang-format"
    run = subprocess.run([tool, "--dry-run", "-Werror", *SOURCES], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_columns():
    """clang-format breaks neither comments nor strings. A text that is one line to its reader may be longer, and so may
    the rows of a table, which stand between clang-format off and on or in a macro."""
    long = []
    for path in SOURCES:
        table = False
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            table = "clang-format off" in line or table and "clang-format on" not in line
            if len(line) > 120 and not (table or line.rstrip().endswith("\\") or '"' in line):
                long.append(f"{path}:{number}: {len(line)} columns")
    assert not long, "\n".join(long)


def test_mutations_apply():
    """dev/mutate/mutations.txt quotes the sources: each text occurs once in its file."""
    sys.path.insert(0, str(ROOT / "dev/mutate"))
    import mutate
    found = [(len(mutate.places((ROOT / file).read_text(), old)), file, old) for file, old, _ in mutate.mutations()]
    assert len(found) > 150 and not [row for row in found if row[0] != 1]

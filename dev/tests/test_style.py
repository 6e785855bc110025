"""The style of the sources: that of .editorconfig, lines of at most 120 columns, and libraries without mutable globals.
What other files quote from the sources is there. `scripts/test.sh format` runs clang-format."""
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from trainer import make

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns):
    return subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout.split("\n")[:-1]


SOURCES = tracked("*.c", "*.h", "*.cu", "*.cuh", "*.cpp")
PYTHON = tracked("*.py")
MARKDOWN = tracked("*.md")
EXEMPT = re.compile(r"    | *(\||#|!\[|\[!\[|<!--)")     # indented code; a table's row, a heading, an image, a comment


# Only these files open others. Elsewhere, a line may do so if it names the system's files, this checkout's own, a
# folder, or what has just been downloaded into a folder of its own.
OPENERS = "runtime/file.c", "runtime/own.c", "scripts/lib/files.py"
C_OPEN = r"\b(fopen|freopen|open|open64|openat|creat|mkstemp|tmpfile|fopen64)\s*\("
PYTHON_OPEN = (r"(?<![\w.])open\(|\bos\.open\(|\bio\.open\(|\.(read|write)_(text|bytes)\(|\.tofile\(|\.touch\("
               r"|\bnp\.(load|memmap|fromfile)\(")
OWN = (r"/dev/null|os\.devnull|/proc/|O_DIRECTORY|O_PATH|os\.open\(folder, os\.O_RDONLY\)|open\([12], \"w\"\)|\bROOT\b"
       r"|FOLDER /|DATA /|urlopen|wanted\.|open_regular\(|def open|mmap_mode|np\.fromfile\(file"
       r"|open\(path, O_RDONLY \| O_CLOEXEC\)")


def test_files_are_opened_in_one_place():
    """Elsewhere nobody would think of links, pipes, devices and endless files."""
    found = []
    for path in [*SOURCES, *tracked("data/*.py", "scripts/*.py")]:
        if path.startswith("dev/") or path in OPENERS:
            continue
        pattern = PYTHON_OPEN if path.endswith(".py") else C_OPEN
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            code = re.split(r"#|//", line)[0] if not re.search(r"[\"']", line) else line
            if re.search(pattern, code) and not line.lstrip().startswith(("//", "#")) and not re.search(OWN, line):
                found.append(f"{path}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_executable():
    """Python scripts without a shebang are started by .venv/bin/python, which has the packages that they need."""
    wrong = [path for path in [*PYTHON, *tracked("*.sh")]
             if (ROOT / path).read_text().startswith("#!") != os.access(ROOT / path, os.X_OK)]
    assert not wrong, wrong


# The folders whose files each folder's files include, besides its own. The README of each says what belongs there.
ROOMS = {"runtime": "", "math": "runtime", "text": "math runtime", "data": "text math runtime", "cuda": "math runtime",
         "attention": "cuda math runtime", "model": "attention text math runtime",
         "run": "model attention data text math runtime", "eval": "model attention data text math runtime"}


def test_includes_point_one_way():
    included = {path: [name for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', (ROOT / path).read_text(), re.M)
                       if not name.endswith("_on_cpu.h")]                   # of dev/cuda_on_cpu, instead of CUDA's
                for path in SOURCES if path.split("/")[0] in ROOMS}
    wrong = [f"{path} includes {name}" for path, names in included.items() for name in names
             if name.split("/")[0] not in (path.split("/")[0], *ROOMS[path.split("/")[0]].split())]
    assert not wrong, wrong
    assert len(list(TopologicalSorter(included).static_order())) > 150       # CycleError if files include each other


def test_columns():
    """clang-format breaks neither comments nor strings. In C, a message that is printed as one line may be longer, and
    so may the rows of a table, between clang-format off and on or in a macro. Nothing in Python may be longer. In
    Markdown, only what cannot be broken may be."""
    long = []
    for path in [*SOURCES, *PYTHON]:
        table = False
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            table = "clang-format off" in line or table and "clang-format on" not in line
            spared = path in SOURCES and (table or line.rstrip().endswith("\\") or '"' in line)
            if len(line) > 120 and not spared:
                long.append(f"{path}:{number}: {len(line)} columns")
    for path in MARKDOWN:
        long += [f"{path}:{number}: {len(line)} columns" for number, line in prose(path)
                 if len(line) > 120 and not EXEMPT.match(line)]
    assert len(PYTHON) > 90 and len(MARKDOWN) > 15 and not long, "\n".join(long)


def test_pages():
    """A page for users has at most 250 lines, and no page has a space before a percent sign."""
    wrong = []
    for path in MARKDOWN:
        lines = prose(path)
        if path.startswith(("doc/", "attention/")) and len(lines) > 250:
            wrong.append(f"{path}: {len(lines)} lines")
        wrong += [f"{path}:{number}: {line}" for number, line in lines if re.search(r"\d %", line)]
    assert not wrong, "\n".join(wrong)


def prose(path):
    """[(number, line)] of a Markdown file; those of blocks of code are empty."""
    text = re.sub(r"^ *```.*?^ *```$", lambda code: "\n" * code[0].count("\n"), (ROOT / path).read_text(),
                  flags=re.M | re.S)
    return list(enumerate(text.splitlines(), 1))


def test_editorconfig():
    """.editorconfig says how files end and how they are indented; its line length is that of test_columns."""
    rules = (ROOT / ".editorconfig").read_text()
    assert ("max_line_length = 120" in rules and "trim_trailing_whitespace = true" in rules
            and "insert_final_newline = true" in rules)
    wrong, checked = [], 0
    for path in tracked():
        raw = (ROOT / path).read_bytes()
        if Path(path).suffix in (".png", ".safetensors", ".svg") or not raw:
            continue
        checked += 1
        text = raw.decode()     # charset = utf-8
        wrong += [f"{path}: a carriage return"] if "\r" in text else []
        wrong += [f"{path}: no newline at the end"] if not text.endswith("\n") else []
        for number, line in enumerate(text.splitlines(), 1):
            tabs = "\t" in line[:len(line) - len(line.lstrip())] and Path(path).name != "Makefile"
            if line != line.rstrip() or tabs:
                wrong.append(f"{path}:{number}: {'a tab' if tabs else 'whitespace at the end'}")
    assert checked > 200 and not wrong, "\n".join(wrong)


def test_diffs_in_the_documentation_apply():
    """doc/normalizers*.md show changes as diffs. Their context lines are quotations: each must be in the file."""
    quoted, wrong, path = 0, [], None
    pages = "".join(path.read_text() for path in sorted((ROOT / "doc").glob("normalizers*.md")))
    for block in re.findall(r"```diff\n(.*?)```", pages, re.S):
        for line in block.splitlines():
            if line.startswith("--- "):
                path = line[4:]
            elif line.startswith(" ") and not line.rstrip().endswith(":") or line.startswith("-"):
                quoted += 1
                parts = [part.strip() for part in re.split("…|\\.\\.\\.", line[1:])]
                wrong += [f"{path}: {line}"] if not all(part in (ROOT / path).read_text() for part in parts) else []
    assert quoted > 6 and not wrong, "\n".join(wrong)


def test_kept_mutations_apply():
    """Each function that dev/mutate/kept.txt names has the text to change, once; and each source has tests."""
    sys.path.insert(0, str(ROOT / "dev/mutate"))
    import mutate
    assert list(mutate.kept()) and all(map(mutate.tests_of, mutate.sources()))


# The writable variables of the libraries, each with the reason why no caller owns it.
GLOBALS = {
    # fail() and warn() are called from anywhere
    "runtime/error": {"program_name", "fail_hook", "fail_speaker", "fail_where", "warn_off"},
    "runtime/activity": {"activity"},     # of the main thread, wherever it is
    # process: set once, and read wherever ranks differ, like MPI_COMM_WORLD
    "runtime/process": {"process",
                        "holding", "catching", "stop_requested",    # signals belong to the whole process
                        "started",                                  # of the process
                        "ending"},                                  # fail() ends the program from anywhere
    # the CUDA trainer: what its main() owns, and NVTX's own
    "train_gpt2": {"_ZZ4mainE3run", "_ZZ4mainE6config", "nvtxGlobals_v3", "InitializeInjectionNvtx2_fnptr"},
}


def writable(path):
    """The names of an object's writable variables, without the pointer that C++ exceptions need and without the shared
    memory of blocks on the CPU (dev/cuda_on_cpu)."""
    listing = subprocess.run(["nm", "-f", "sysv", path], capture_output=True, text=True, check=True).stdout
    rows = [[field.strip() for field in line.split("|")] for line in listing.splitlines() if line.count("|") == 6]
    return {row[0].split(".")[0] for row in rows
            if re.match(r"\.t?(bss|data)|\*COM\*", row[6]) and not row[6].startswith(".data.rel.ro")
            and not row[0].startswith("DW.ref.") and not row[0].endswith("_shared_")}


def test_no_mutable_globals():
    """State lives in a struct that the caller owns. Checks the CUDA objects that are already built."""
    make("-j2", "build/library.a", check=True, stdout=subprocess.DEVNULL)
    more, checked = [], 0
    for source in map(Path, SOURCES):
        built = ROOT / ("build" if source.suffix == ".c" else "build/on_cpu") / source.with_suffix(".o")
        library = source.parts[0] in ("attention", "cuda", "data", "eval", "math", "model", "run", "runtime", "text")
        if not (library or source.name == "train_gpt2.cu") or source.suffix not in (".c", ".cu"):
            continue
        if built.exists() and built.stat().st_mtime >= (ROOT / source).stat().st_mtime:
            checked += 1
            more += [f"{source}: {name}" for name in writable(built) - GLOBALS.get(str(source.with_suffix("")), set())]
    assert checked > 25 and not more, more

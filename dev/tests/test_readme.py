"""What a newcomer reads first: every command of README.md, doc/howto.md and CONTRIBUTING.md runs, in order, in a copy
of the source tree; the version is the same everywhere; links are valid.

A command is a line of a ```sh block, a ```python block, or a code span that begins with the name of a program. RULES
gives the shortened form in which it runs, in seconds. A command without a rule fails the test. Commands need each
other's files, so run the whole module, not one case.
"""
import re
import shutil
import subprocess
import sys

import pytest

from trainer import ROOT, environment

README, HOWTO, CONTRIBUTING = ((ROOT / name).read_text()
                               for name in ("README.md", "doc/howto.md", "CONTRIBUTING.md"))
CUDA_TRAINERS = ("train_gpt2cu", "train_gpt2cu_on_cpu")

TINY = ("--model layers=1,heads=2,channels=16,ffn=24 --batch 2 --seq-len 16 --total-batch-tokens 128 --steps 2 "
        "--warmup 1 --val-tokens 64 --val-every 1")
SMALL = "--model layers=4,heads=2,channels=16,ffn=24 --batch 2 --seq-len 16 --total-batch-tokens 32 --val-tokens 64"

# The beginning of a command -> the form in which it runs; {} is the command itself, {1} what its parentheses match, ""
# runs nothing. The first match wins. If a flag is given twice, the last one counts.
RULES = [
    (r"git clone \S+ attn\.c$", ""),                                  # the fixture has made a copy,
    (r"cd attn\.c$", ""),                                             # and commands start in it
    (r"scripts/quickstart\.sh$", "QUICKSTART_STEPS=2 {}"),
    # These take hours, gigabytes or a GPU.
    (r"scripts/test\.sh|scripts/setup_cuda\.sh$|scripts/setup\.sh --test$", "bash -n {}"),
    (r"scripts/setup\.sh$", "{}"),
    (r"GPUS=8 (OUT=\S+ scripts/run_\w+\.sh .*)", "GPUS=1 PROGRAM=./train_gpt2 {1} " + TINY),
    (r"HOSTFILE=hosts scripts/launch\.sh 16 \./train_gpt2cu (.*)", "./train_gpt2 {1} --dry-run " + SMALL),
    (r"sbatch --nodes=2 scripts/run_multi_node\.sbatch \./train_gpt2cu (.*)",
     "bash -n scripts/run_multi_node.sbatch && ./train_gpt2 {1} --dry-run " + SMALL),
    (r"\./train_gpt2 --out out/switch --resume ", "{}"),
    (r"\./train_gpt2 --out out/earlier --resume ", "{} --steps 210"),
    (r"\./train_gpt2 .*--out out/switch ", "{} " + SMALL),
    (r"\./train_gpt2 .*--out out/layers$", "{} --steps 2 " + SMALL),
    (r"\./train_gpt2 --init-from ", "{} --batch 2 --seq-len 16 --steps 2"),
    (r"\./train_gpt2 (--help|--version|--attn help)$", "{}"),
    (r"\./train_gpt2 ", "{} " + TINY),
    (r"\./sample_gpt2 ", "{} --max-new-tokens 8"),
    (r"\./eval_gpt2 ", "{} --seq-lens 16,32 --max-tokens 64"),
    (r"\./test_gpt2 attention$", "{}_softmax_T4"),
    (r"\.venv/bin/python data/fineweb\.py ", "{} --input ~/parquet"),
    (r"\.venv/bin/python scripts/(plot|report)\.py ", "{}"),
    (r"\.venv/bin/python scripts/follow\.py ", "{} --once"),
    (r"\.venv/bin/python scripts/grid\.py ", "{} --dry-run"),
    (r"\.venv/bin/pip install \.$", "{} --dry-run --no-deps --no-build-isolation"),
    (r"mkdir|cp ", "{}"),
    (r"\.venv/bin/pip install (pyarrow|torch transformers)$", "{} --dry-run --no-index"),
    (r"make (train_gpt2cu|train_gpt2cu_on_cpu|test_on_cpu|run/\S+ WORD=rope|test|check)$", "{} --dry-run"),
    (r"make -j\S+ WERROR=1$", "{} --dry-run"),
    (r"make( help| test_gpt2| -j\S+)?$", "{}"),
    (r"\.venv/bin/clang-format -i FILE$", "{} --version"),
    (r"dev/mutate/mutate\.py( row_slope)?$", "{} --help"),
]
PROGRAM = re.compile(r"(\./|scripts/\w+\.sh|make\b|git |\.venv/bin/|dev/\w+/\w+\.py)")


def commands(text):
    """A page's commands in order, each on one line and without its comment."""
    found = []
    for language, block, span in re.findall(r"^```(\w*)\n(.*?)^```$|`([^`]+)`", text, re.M | re.S):
        if language == "python":
            found.append("python\n" + block)
        elif language == "sh":
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [re.sub(r"  +# .*", "", line) for line in lines if line and not line.startswith("#")]
        elif PROGRAM.match(span):
            found.append(" ".join(span.split()))
    return found


def in_its_place(command):
    """The form in which a command runs."""
    for begins, replacement in RULES:
        if found := re.match(begins, command):
            form = replacement.replace("{1}", found[1]) if "{1}" in replacement else replacement
            return form.replace("{}", command)
    pytest.fail(f"{command}\nhas no rule in RULES. Add one that runs it in seconds.")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the source tree with what is built, installed and downloaded here, next to a home folder with books."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode != 0:
        pytest.skip("not a git repository, so the files of a clone are unknown")
    folder = tmp_path_factory.mktemp("readme")
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / "attn.c" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "attn.c" / name)
    for name in ("attention", "data", "eval", "math", "model", "run", "runtime", "text"):
        shutil.copytree(ROOT / "build" / name, folder / "attn.c/build" / name, ignore=shutil.ignore_patterns("*.tmp"))
    for path in [*(ROOT / "build").glob("*.[od]"), ROOT / "build/flags"]:
        shutil.copy2(path, folder / "attn.c/build")
    (ROOT / "data/cache").mkdir(exist_ok=True)
    for name in (".venv", ".cuda", "data/cache"):
        if (ROOT / name).exists():
            (folder / "attn.c" / name).symlink_to((ROOT / name).resolve())
    books = folder / "home/books"
    books.mkdir(parents=True)
    for i in range(40):
        (books / f"{i}.txt").write_text("It was the best of times, it was the worst of times. " * 300)
    import pyarrow
    import pyarrow.parquet
    (folder / "home/parquet").mkdir()
    pages = pyarrow.table({"text": ["It was the age of wisdom. " * 8] * 200})
    pyarrow.parquet.write_table(pages, folder / "home/parquet/000.parquet")
    return folder / "attn.c"


def run(checkout, words, **how):
    env = environment(HOME=str(checkout.parent / "home"), MPLBACKEND="Agg", **how)
    result = subprocess.run(words, cwd=checkout, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                            errors="replace", timeout=300)
    output = result.stdout[-3000:] + result.stderr[-3000:]
    assert result.returncode == 0, f"exit code {result.returncode}: {words}\n{output}"
    return output


def with_newest_checkpoints(checkout, code):
    """The code with the checkpoints of the short runs in place of those in the text."""
    return re.sub(r"(out/\w+/ckpt)/step-\d{8}", lambda found: str(max((checkout / found[1]).glob("step-*"))), code)


@pytest.mark.parametrize("command", [pytest.param(command, id=f"{i:02d} {command[:60]}") for i, command in enumerate(
    dict.fromkeys(commands(README) + commands(HOWTO) + commands(CONTRIBUTING)))])
def test_command(checkout, command, request):
    if command.startswith("python\n"):
        if "attn_c" in command:
            request.getfixturevalue("attn_c")
        code = with_newest_checkpoints(checkout, command.removeprefix("python\n"))
        run(checkout, [sys.executable, "-c", code], HF_HUB_OFFLINE="1", PYTHONPATH=ROOT / "build/python")
        return
    if re.match("make (train_gpt2cu|test_on_cpu)", command) and "toolkit" in run(checkout, ["make", "-s", "lacking"]):
        pytest.skip("needs the CUDA Toolkit")
    run(checkout, ["bash", "-c", in_its_place(command)])


def test_readme_has_its_commands():
    assert {"scripts/quickstart.sh", "scripts/test.sh"} <= set(commands(README)) and len(commands(README)) > 12
    languages = {language for language in re.findall(r"^```(\w*)$", README, re.M) if language}
    assert languages <= {"sh", "python", "text", "bibtex"}
    assert len(README.splitlines()) <= 150


def test_index_lists_each_page_once():
    listed = re.findall(r"\]\(([\w/]+\.md)\)", README[README.index("## Pages"):])
    pages = {str(path.relative_to(ROOT)) for path in PAGES if path.parent.name == "doc" or path.name == "README.md"}
    assert len(listed) == len(set(listed)) and pages - {"README.md"} <= set(listed)


def test_examples_are_of_one_checkpoint():
    """doc/evaluation.md evaluates what README's first command trains, on the text of its validation."""
    evaluation = (ROOT / "doc/evaluation.md").read_text()
    trained = re.search(r"\| val (\S+) \|", README)[1]
    assert re.search(r"^ +128 +128 +\S+ k +16,384 +(\S+)", evaluation, re.M)[1] == trained
    assert set(re.findall(r"out/quickstart/ckpt/step-(\d+)", evaluation + README)) == {"00000500"}


# ---- the name and the version


def version():
    return re.search(r'#define ATTN_C_VERSION "(\d+\.\d+\.\d+)"', (ROOT / "runtime/version.h").read_text())[1]


@pytest.mark.parametrize("name", ["train_gpt2", "sample_gpt2", "eval_gpt2", *CUDA_TRAINERS])
def test_version(name):
    if name in CUDA_TRAINERS and not (ROOT / name).exists():
        pytest.skip(f"no {name}: make it first")
    program, said = name.removesuffix("_on_cpu"), {}
    for flag in ("--version", "--help"):
        said[flag] = subprocess.run([ROOT / name, flag], capture_output=True, text=True, check=True).stdout
    assert said["--version"] == f"attn.c {version()} ({program})\n"
    assert said["--help"].startswith(f"{said['--version']}\nUsage: {program} ")


def test_version_is_the_same_everywhere():
    assert re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == version()
    assert re.search(r"^## (?!Unreleased)(\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version()
    assert f"Version {version()} " in README


# ---- links


def anchors(path):
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M)
    plain = [re.sub(r"\]\(.*?\)", "", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


PAGES = sorted(path for pattern in ("*.md", "doc/*.md", "attention/*.md", "dev/*/*.md") for path in ROOT.glob(pattern))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(page):
    wrong = []
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", text):
        name, _, anchor = "".join(target).partition("#")
        if re.match(r"https?:", name):
            continue
        path = (page.parent / name if name else page).resolve()
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append("".join(target))
    assert not wrong, f"{page.relative_to(ROOT)}: broken links: {wrong}"


OTHERS = {"attn.c", "llm.c", "llama.cpp", "cublasLt.h"}     # projects, and a header of CUDA


@pytest.mark.parametrize("page", [path for path in PAGES if path.name != "CHANGELOG.md"],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_sources(page):
    """Every source file that a page names exists. The name may lack the folder."""
    every = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ends = {path[i:] for path in every for i in range(len(path)) if i == 0 or path[i - 1] == "/"}
    named = re.findall(r"`(?:\.\./)*([\w/-][\w./-]*\.(?:c|h|cu|cuh|cpp|py|sh|sbatch))`", page.read_text())
    lost = {name for name in named if "NAME" not in name} - ends - OTHERS
    assert not lost, f"{page.relative_to(ROOT)}: no such files: {lost}"

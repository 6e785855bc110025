#!/usr/bin/env python3
"""Mutation tests: makes small changes to the sources, one at a time, and requires that a test fails each time.

    dev/mutate/mutate.py                           the changes of kept.txt, and 12 that operators.py generates
    dev/mutate/mutate.py --draw 5 attention cuda   five generated ones in files whose path begins so
    dev/mutate/mutate.py train_gpt2.c:812.2        the second one that can be generated for this line
    dev/mutate/mutate.py row_slope                 those of kept.txt in this function; row_slope.2 is the second

The commit draws (DRAW=COMMIT repeats another's draw), one of each operator in turn. Each change is made in a copy of
the tree in a temporary folder, and printed as the lines before and after, the test that failed, and the seconds. A
HOLE is a change that no test noticed: either the tests lack a case, or the program does the same with the change. A
generated change that does not build proves nothing, and another takes its place; one of kept.txt must apply and build.

The exit status is 1 if a change that was named or is in kept.txt is a hole, or more than a quarter of the drawn ones
are. At the end the tests that failed run once more with nothing changed, and must pass.
"""
import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from random import Random

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path += [str(FOLDER), str(ROOT / "dev")]
import draw
import operators

DRAWN, HOLES_ALLOWED = 12, 0.25
LIMIT = 900         # seconds for one command of the tests
# The tests of a file: dev/tests/test_NAME.* where its name is NAME or NAME_*, then those of the first row whose
# beginning its path has, as command lines. The first failure ends a change's tests, so what is quick comes first.
SLOW = ("test_gradients", "test_process")
C_TESTS = sorted((path.stem for path in (ROOT / "dev/tests").glob("test_*.c")), key=lambda name: (name in SLOW, name))
FLASH = ("test_kernels phi", "test_gpt2cu_on_cpu ssmax_bias_h4_kv2_T33", "test_gpt2cu_on_cpu softmax_gau_T33",
         "test_flash.py -k 'kinds or before_rope or (nan and (float or sigmoid)) or truncate or last_bit or future "
         "or order or conflicts or all_zero_rows or (scale_of_zero and not identity) or last_rows'",
         "test_cuda.py -k 'any_order or which_kernels'", "test_recipes.py -k shared_memory")
CUDA = ("test_kernels", "test_gpt2cu_on_cpu softmax_tied_v97_T33", "test_gpt2cu_on_cpu softmax_gau_T33",
        "test_gpt2cu_on_cpu ssmax_bias_h4_kv2_T33", "test_matmul", "test_collective",
        "test_cuda.py -k 'any_order or which_kernels'",
        "test_cuda.py -k 'late or waits or divergence or masks or all_zero_rows or switch_mid or several_ranks "
        "or zero_gives or recomputing or resume or graphs or stored or z-loss or sample or often "
        "or on_the_seed or is_measured or of_all_ranks or overlap'", "test_training.py -k muon_by", "test_eval_cuda.py")
TORCH = ("test_torch.py -k 'not (equals or bfloat16 or padding or interrupts or level or compiled or wrong_calls)'",
         "test_torch.py -k 'wrong_calls or (equals or padding_changes) and (ssmax-bias or sink or ssmax-pn or lssar)'")
TESTS = (
    (("attention/torch/attn_c_cuda.cu", "attention/torch/cuda.py"), ["test_torch_cuda.py"]),
    ("attention/torch/transformers.py", ["test_torch_models.py -k 'not wheel and not modeling'"]),
    ("attention/torch/", TORCH),
    ("attention/modeling", ["test_rope.py -k transformers", "test_huggingface.py -k 'new_model or normalizer'",
                            "test_huggingface.py -k 'not new_model and not normalizer'"]),
    (("attention/flash", "attention/phi.cuh"), FLASH),
    ("attention/", ["test_gpt2 attention", "test_attention", "test_gradients", "test_normalizer"]),
    (("cuda/", "train_gpt2.cu"), CUDA),
    ("eval_gpt2.cu", ["test_eval_cuda.py"]),
    (("eval/", "eval_gpt2.c"), ["test_eval_runs.py", "test_eval.py", "test_needle.py", "test_observe.py",
                                "test_choice.py"]),
    ("train_gpt2.c", ["test_gpt2", "test_gradients", "test_training.py", "test_sample.py"]),
    (("sample_gpt2.c", "model/decode.h"), ["test_sample.py", "test_chat.py", "test_families.py -k begins"]),
    ("model/", ["test_gpt2", "test_families.py", "test_sample.py -k stored", "test_resume.py -k switch",
                "test_config.py", "test_huggingface.py", "test_eval.py -k rope", "test_foreign.py -k rope"]),
    ("run/", ["test_order.py", "test_errors.py", "test_training.py", "test_resume.py", "test_normalizers.py",
              "test_stops.py", "test_sample.py"]),
    (("runtime/", "math/", "text/", "data/shards.c", "data/shards.h", "data/mixture.", "data/tokens_match."), [
                  *C_TESTS, "test_gpt2", "test_sample.py", "test_chat.py", "test_families.py -k begins",
                  "test_vocabularies.py -k short", "test_vocabulary.py -k accept", "test_errors.py",
                  "test_training.py -k muon_equals", "test_tokenizer.py -k 'broken or short'",
                  "test_safetensors.py -k rounding"]),
    ("data/", ["test_data.py", "test_squad.py", "test_needles.py", "test_debian_docs.py", "test_documents.py",
               "test_vocabulary.py"]),
    ("scripts/", ["test_follow.py", "test_grid.py", "test_to_gguf.py", "test_plot.py",
                  "test_plot_eval.py -k 'not eval_gpt2 and not without'"]),
)
# What pytest's tests need built, and some of them besides.
PROGRAMS = "train_gpt2 sample_gpt2 eval_gpt2 build/tests/logits"
NEEDS = {"test_flash.py": "build/on_cpu/flash.so", "test_torch.py": "attn_c", "test_torch_models.py": "attn_c",
         "test_torch_cuda.py": "attn_c build/on_cpu/attn_c_cuda.so", "test_eval_cuda.py": "eval_gpt2cu_on_cpu",
         "test_cuda.py": "train_gpt2cu_on_cpu", "test_training.py": "train_gpt2cu_on_cpu",
         "test_recipes.py": "train_gpt2cu_on_cpu"}
# Pictures: a test does not measure where a legend stands.
NOT_DRAWN = re.compile(r"scripts/(lib/(pictures/|drawing|canvas|grid_report)|plot|report)|text/\w*_(tables|classes)")

# Without the variables that select cases, and with builds that take little time.
INSTANCES = ("exp exp_recenter exp_recenter_l1 sigmoid relu2 relu6 softplus softplus_reweight any any_recenter_l1 "
             "any_reweight float float_recenter float_recenter_l1 float_reweight")
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name not in (*draw.VARIABLES, "WERROR")},
               "OPT": "-O2", "CU_OPT": "-O0", "INSTANCES": INSTANCES, "PYTHONPATH": str(FOLDER)}
PYTEST = [".venv/bin/python" if (ROOT / ".venv").exists() else sys.executable, "-m", "pytest", "-x", "-q",
          "-p", "last_started"]


@dataclass(frozen=True)
class Test:
    target: str        # of make
    command: tuple


def test_of(words):
    """The test that a command line in the table stands for."""
    name, *arguments = shlex.split(words)
    if name.endswith(".py"):
        return Test(f"{PROGRAMS} {NEEDS.get(name, '')}", (*PYTEST, f"dev/tests/{name}", *arguments))
    program = name if name.startswith("test_gpt2") else \
        f"build/{'on_cpu/' if (ROOT / f'dev/tests/{name}.cu').exists() else ''}tests/{name}"
    return Test(program, (f"./{program}", *arguments))


def tests_of(file):
    row = next(tests for beginning, tests in TESTS if file.startswith(beginning))
    paths = sorted((ROOT / "dev/tests").glob("test_*"))
    names = [path.name if path.suffix == ".py" else path.stem for path in paths
             if f"{Path(file).stem}_".startswith(f"{path.stem.removeprefix('test_')}_")]
    own = [name for name in names if not any(words.startswith(f"{name} ") for words in row)]
    return [test_of(words) for words in dict.fromkeys([*own, *row])]


def sources():
    listed = subprocess.run(["git", "ls-files", "*.c", "*.h", "*.cu", "*.cuh", "*.py"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout.splitlines()
    return [file for file in listed if not file.startswith(("dev/", "test_", "doc/")) and (ROOT / file).exists()]


def kept():
    """The changes of kept.txt. The texts there and in the sources may have different line breaks."""
    texts = {file: (ROOT / file).read_text() for file in sources()}
    number = defaultdict(int)
    for row in re.findall(r"^\w.*(?:\n +.*)*", (FOLDER / "kept.txt").read_text(), re.M):
        function, old, new = re.fullmatch(r"(\w+): +(.*?\S)\s+->  (.*)", row, re.S).groups()
        number[function] += 1
        address = f"{function}.{number[function]}"
        pattern = re.compile(r"\s*".join(map(re.escape, "".join(old.split()))))
        found = [(file, text, m) for file, text in texts.items() if f"{function}(" in text
                 for start, end in operators.bodies(file, text, function) for m in pattern.finditer(text, start, end)]
        if len(found) != 1:
            sys.exit(f"kept.txt, {address}: expected once in {function}(), found {len(found)} times: {old}")
        file, text, m = found[0]
        yield operators.Change(address, "kept", file, text.count("\n", 0, m.start()) + 1, m.start(), m[0], new)


def drawn(beginnings):
    """Generated changes in the order drawn: one of each operator in turn."""
    of_operator = defaultdict(list)
    for file in sources():
        if file.startswith(tuple(beginnings)) and not NOT_DRAWN.match(file):
            for change in operators.changes(file, (ROOT / file).read_text()):
                of_operator[change.operator].append(change)
    random = Random(draw.commit())
    shuffled = [random.sample(changes, len(changes)) for _, changes in sorted(of_operator.items())]
    return filter(None, chain.from_iterable(zip_longest(*shuffled)))


def named(name):
    """The change at an address, or those of kept.txt in a function."""
    file = name.rpartition(":")[0]
    if file and file not in sources():
        sys.exit(f"mutate.py: {file}: this file is not one that mutate.py changes")
    found = [change for change in (operators.changes(file, (ROOT / file).read_text()) if file else kept())
             if name in (change.address, change.address.rpartition(".")[0])]
    return found or sys.exit(f"mutate.py: {name}: no such change")


def copy_tree(tree):
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
                            text=True, check=True)
    for file in filter(None, listed.stdout.split("\0")):
        if (ROOT / file).exists():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, tree / file, follow_symlinks=False)
    for name in ".cuda", ".venv":       # where the Makefile looks for CUDA's headers
        if (ROOT / name).exists() and not (tree / name).exists():
            (tree / name).symlink_to(ROOT / name)
    return tree


def build(tree, target):
    """Builds; returns None, or the compiler's first error."""
    made = subprocess.run(["make", "-s", "-j2", *target.split()], cwd=tree, env=ENVIRONMENT, capture_output=True,
                          text=True)
    errors = [line for line in made.stderr.splitlines() if "rror" in line]
    return [*errors, "make failed"][0] if made.returncode else None


def run_tests(tree, tests):
    """Runs tests until one fails or takes longer than LIMIT; returns (the outcome in words, that test or
    None): of pytest's, the case that failed, or the whole command if none was started."""
    last = tree / "build/last_started"
    for test in tests:
        complaint = build(tree, test.target)
        if complaint:
            return f"does not build: {complaint}", None
        env = {**ENVIRONMENT, "FLASH_SO": str(tree / "build/on_cpu/flash.so"),
               "ATTN_C_CUDA_SO": str(tree / "build/on_cpu/attn_c_cuda.so"), "LAST_STARTED": str(last)}
        last.unlink(missing_ok=True)
        try:
            status = subprocess.run(test.command, cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                    timeout=LIMIT, env=env).returncode
        except subprocess.TimeoutExpired:
            status = "no end"
        if status:
            slow = f" (no end within {LIMIT} s)" if status == "no end" else ""
            failed = Test(test.target, (*PYTEST, last.read_text())) if last.exists() else test
            return f"noticed by {shlex.join(failed.command)}{slow}", failed
    return "no test noticed", None


def merged(tests):
    """The tests without repetitions, and the cases of the same file and target in one command."""
    commands, cases = [], {}
    for test in dict.fromkeys(tests):
        if "::" in test.command[-1]:
            cases.setdefault((test.target, test.command[-1].split("::")[0]), []).append(test.command[-1])
        else:
            commands.append(test)
    return commands + [Test(target, (*PYTEST, *names)) for (target, _), names in cases.items()]


def attempt(tree, change):
    path = tree / change.file
    text = path.read_text()
    try:
        path.write_text(change.applied_to(text))
        return run_tests(tree, tests_of(change.file))
    finally:
        path.write_text(text)


def shown(change):
    """The lines that a change touches, before and after."""
    text = (ROOT / change.file).read_text()
    after = change.applied_to(text).splitlines()
    first, lines = change.line - 1, text.splitlines()
    removed = lines[first:first + change.old.count("\n") + 1]
    added = after[first:first + change.new.count("\n") + 1]
    return "\n".join([f"  {change.file}:{change.line}, {change.operator}", *(f"  -{line}" for line in removed),
                      *(f"  +{line}" for line in added)])


class Changes:
    """The changes to make, and what became of them; threads share it. Drawn changes that do not build are replaced."""

    def __init__(self, wanted, drawn, to_draw, minutes):
        self.wanted, self.drawn, self.left = iter(wanted), drawn, to_draw
        self.end = time.time() + 60 * minutes
        self.lock = threading.Lock()
        self.tests, self.holes, self.drawn_holes, self.unbuilt = [], [], [], 0

    def take(self):
        """(a change, whether it is drawn), or None."""
        with self.lock:
            if time.time() > self.end:
                return None
            change = next(self.drawn, None) if self.left else None
            if change:
                self.left -= 1
                return change, True
            change = next(self.wanted, None)
            return change and (change, False)

    def add(self, change, is_drawn, verdict, test, seconds):
        with self.lock:
            word = "ok  " if test else "HOLE"
            if test:
                self.tests.append(test)
            elif is_drawn and verdict.startswith("does not build"):
                word, self.left, self.unbuilt = "----", self.left + 1, self.unbuilt + 1
            else:
                (self.drawn_holes if is_drawn else self.holes).append(change)
            print(f"{word} {change.address}\n{shown(change)}\n  {verdict}, {seconds:.0f} s", flush=True)

    def make_all(self, tree):
        while taken := self.take():
            start = time.time()
            verdict, test = attempt(tree, taken[0])
            self.add(*taken, verdict, test, time.time() - start)


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="addresses, functions or, with --draw, beginnings of paths")
    parser.add_argument("--draw", type=positive, metavar="N", help="draw as many generated changes")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N",
                        help="changes at a time, each in its own copy of the tree")
    parser.add_argument("--minutes", type=positive, default=10**6, metavar="N",
                        help="begin no change after so many minutes")
    options = parser.parse_args()
    if options.draw:
        wanted, beginnings, to_draw = [], options.names or [""], options.draw
    elif options.names:
        wanted, beginnings, to_draw = [change for name in options.names for change in named(name)], [], 0
    else:
        wanted, beginnings, to_draw = list(kept()), [""], DRAWN
        Random(draw.commit()).shuffle(wanted)       # so that --minutes leaves out other changes at each commit
    if to_draw:
        print(f"drawn by {draw.commit()}", flush=True)
        unknown = [name for name in beginnings if not any(file.startswith(name) for file in sources())]
        if unknown:
            parser.error(f"{unknown[0]}: no source file has a path that begins with this")
    made = Changes(wanted, drawn(beginnings), to_draw, options.minutes)
    with tempfile.TemporaryDirectory() as folder:
        trees = [copy_tree(Path(folder) / f"tree{i}") for i in range(options.jobs)]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(made.make_all, trees))
        # A test that fails without any change detects nothing.
        verdict, failing = run_tests(trees[0], merged(made.tests))
        if failing or verdict != "no test noticed":
            sys.exit(f"with nothing changed: {verdict}")
    if time.time() > made.end and (left := made.left + len(list(made.wanted))):
        print(f"left out: {left} changes, which did not begin within {options.minutes} minutes")
    holes = made.holes + made.drawn_holes
    failed = len(made.holes) + (len(made.drawn_holes) if len(made.drawn_holes) > HOLES_ALLOWED * to_draw else 0)
    if holes:
        print("to repeat the holes: dev/mutate/mutate.py", *(change.address for change in holes))
    if to_draw:
        print(f"holes among {to_draw} drawn changes: {len(made.drawn_holes)}, allowed: {HOLES_ALLOWED:.0%}. "
              f"Drawn, but did not build: {made.unbuilt}")
    print(f"{len(made.tests) + len(holes) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())

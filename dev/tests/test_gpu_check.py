"""scripts/gpu_check.py without a GPU: calls keep to their budget and resume; what fails or is missing is reported while
the rest goes on; programs are packed, built and recognized by their contents; verdicts are right, and nothing that was
not timed on a GPU counts as a measurement.

GPU_REHEARSAL=1 adds the rehearsal of dev/notes/gpu_check.md: every part, built and run with the emulation, in calls of
GPU_REHEARSAL_BUDGET seconds (570).
"""
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

import trainer
from trainer import ROOT

sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "dev/bench")]
import gpu_check
import gpu_report
from gpu_check import Part
from gpu_report import NO_GPU, UNFINISHED

EMULATED, EVALUATOR = ROOT / "train_gpt2cu_on_cpu", ROOT / "eval_gpt2cu_on_cpu"


def parts_of(out):
    return json.loads((out / "report.json").read_text())["parts"]


def verdicts_of(out, part):
    return {check["name"]: check["verdict"] for check in parts_of(out)[part]["checks"]}


def assert_well_formed(text):
    """Checks that every row of a table has as many cells as its head."""
    rows = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines()]
    for before, now in zip(rows, rows[1:]):
        assert not before or not now or before == now, text


# ---- calls with a table of toys, on a machine with fake GPUs

@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """f(rows of the table, words, code, GPUS=1, settings): runs a call and returns what it printed. `call.out` is its
    folder."""
    def run(rows, *words, code=0, gpus=1, **settings):
        answers = {"name,driver_version,memory.total": "stand-in, 1, 1 MiB\n" * gpus, "compute_cap": "9.0\n" * gpus}
        with monkeypatch.context() as patch:
            patch.setattr(gpu_report, "ask_gpu", answers.get)
            patch.setattr(gpu_check, "PARTS", rows)
            patch.setattr(gpu_check, "PART", {row.name: row for row in rows})
            for name, value in {"OUT": run.out, "REPORT": "none", "GPU_CHECK_DEVICE": "", **settings}.items():
                patch.setenv(name, str(value))
            patch.chdir(ROOT)
            found = gpu_check.main(list(words))
        said = "".join(capsys.readouterr())
        assert found == code, said
        return said
    run.out = tmp_path / "out"
    return run


def toy(name, *checks, gpus=1, needs="", beside=True):
    """A part whose checks, (name, need, limit, command), run side by side."""
    def run(call):
        for check in checks:
            (call.beside if beside else call.check)(*check[:3], "sh", "-c", check[3])
    return Part(name, 1, gpus, needs, run, "")


def test_verdicts_of_checks(call):
    """A crash ends its check alone, and a part that fails does not stop the next."""
    def broken(call):
        raise ValueError("no such kernel")

    rows = [toy("tests", ("good", 1, 9, "echo; echo 3 passed; echo"), ("bad", 1, 9, "echo wrong; exit 3"),
                ("crashed", 1, 9, "kill -SEGV $$"), ("killed", 1, 9, "kill -KILL $$"), ("hangs", 1, 1, "sleep 60"),
                ("unfinished", 1, 9, "echo cases are left; exit 75"), ("elsewhere", 1, 9, "exit 77")),
            Part("broken", 1, 1, "", broken, ""), toy("other", ("fine", 1, 9, "true"))]
    said = call(rows, "tests", "broken", "other", code=1)
    assert verdicts_of(call.out, "tests") == {
        "good": "ok", "bad": "FAILED (3)", "crashed": "FAILED (139)", "killed": "FAILED (137)",
        "hangs": "FAILED (timed out after 1 s)", "unfinished": "left", "elsewhere": "info"}
    assert verdicts_of(call.out, "broken") == {"broken": "FAILED"} and "ValueError: no such kernel" in said
    assert verdicts_of(call.out, "other") == {"fine": "ok"}
    details = {check["name"]: check["detail"] for check in parts_of(call.out)["tests"]["checks"]}
    assert details["good"] == "3 passed" and details["unfinished"] == "cases are left"
    assert "== tests: bad: sh -c echo wrong; exit 3\nwrong\n" in (call.out / "log").read_text()
    assert "| bad | FAILED (3) |" in (call.out / "report.md").read_text() and "    | wrong" in said
    summary = next(line for line in said.splitlines() if line.startswith("tests  "))
    assert all(word in summary for word in ("failed", "FAILED: ", "bad", "left: unfinished", "info: elsewhere"))


def test_runs_that_differ(call):
    """All comparisons are shown, and the report keeps what the check has added."""
    def compare(job):
        assert job.run("echo", "said") == "said\n"
        with job.call.report() as report:
            report.table("tests", "losses", ["run"], [["a"]])
            job.compare(lambda word: (word != "b", f"{word} is compared"), ("a",), ("b",), ("c",))

    call([Part("tests", 1, 1, "", lambda call: call.check("curves", 1, 9, compare), "")], "tests", code=1)
    part = parts_of(call.out)["tests"]
    assert [check["verdict"] for check in part["checks"]] == ["FAILED (1)"] and list(part["tables"]) == ["losses"]
    assert "said\na is compared\nb is compared\nc is compared\n" in (call.out / "log").read_text()


def test_a_part_resumes(call, tmp_path):
    """What passed is not repeated; what failed is if its part is named; FRESH=1 repeats all."""
    log, flag = tmp_path / "runs", tmp_path / "flag"
    rows = [toy("tests", ("a", 1, 9, f"echo a >>{log}"), ("b", 1, 9, f"echo b >>{log}; test -e {flag}"), beside=False)]
    runs = lambda: log.read_text().split()
    call(rows, code=1)
    call(rows, code=1)                                    # failed parts that are not named stay as they are
    assert runs() == ["a", "b"]
    flag.touch()
    call(rows, "tests")
    assert runs() == ["a", "b", "b"] and parts_of(call.out)["tests"]["status"] == "done"
    assert "done in an earlier call" in call(rows, "tests")
    call.out, earlier = tmp_path / "next", call.out
    assert "done in an earlier call" in call(rows, "tests", REPORT=earlier) and (call.out / "log").exists()
    call(rows, "tests", FRESH=1)
    assert runs() == ["a", "b", "b", "a", "b"]


def test_the_budget_is_kept(call, monkeypatch):
    """A check that does not fit is left, one that still runs at the end is stopped even if it ignores SIGTERM, and
    parts that cannot begin are left together. Repeated calls finish."""
    monkeypatch.setattr(gpu_check, "KILL_AFTER", 1)
    monkeypatch.setattr(gpu_check, "RESERVE", 2)
    rows = [toy("tests", ("quick", 1, 9, "true"), ("long", 1, 60, "trap '' TERM; while :; do sleep 0.1; done"),
                ("large", 50, 60, "true"), beside=False),
            toy("step", ("a", 1, 9, "true")), toy("memory", ("b", 1, 9, "true"))]
    start = time.monotonic()
    said = call(rows, "tests", "step", "memory", code=UNFINISHED, BUDGET="012")
    assert time.monotonic() - start < 40
    assert verdicts_of(call.out, "tests") == {"quick": "ok", "long": "left", "large": "left"}
    assert "at the end of this call's time" in said and "needs 50 s, but only" in said
    assert "no time is left for step memory" in said and "time ran out: call again" in said
    assert {name: part["status"] for name, part in parts_of(call.out).items()} == dict.fromkeys(
        ("tests", "step", "memory"), "unfinished")
    done = [toy("tests", ("quick", 1, 9, "false"), ("long", 1, 9, "true"), ("large", 50, 60, "true")), *rows[1:]]
    assert "passed in an earlier call" in call(done, "tests", "step", "memory")
    assert {part["status"] for part in parts_of(call.out).values()} == {"done"}


def test_seconds_of_a_part(call):
    said = call([toy("tests", ("a", 4, 9, "true"), beside=False)], "tests=3", code=UNFINISHED)
    assert "a: left, 0 s: needs 4 s, but only " in said


def test_verdicts_are_recorded_at_once(call):
    """A killed call keeps what is done: another check that still runs sees it, in a part that is unfinished."""
    report = call.out / "report.json"
    waits = f"until grep -q '\"verdict\": \"ok\"' {report}; do sleep 0.1; done; grep -q '\"unfinished\"' {report}"
    call([toy("tests", ("first", 1, 9, "true"), ("second", 1, 20, waits))], "tests")
    assert verdicts_of(call.out, "tests") == {"first": "ok", "second": "ok"}


def test_checks_run_side_by_side(call, tmp_path, monkeypatch):
    """Never more than AT_ONCE; a check that is not `beside` others runs alone."""
    monkeypatch.setattr(gpu_check, "AT_ONCE", 3)
    order = tmp_path / "order"
    command = f"echo begin >>{order}; until [ $(grep -c begin {order}) -ge $0 ]; do sleep 0.1; done; echo end >>{order}"

    def run(call):
        call.check("alone", 1, 60, "sh", "-c", command, 1)
        for i in range(7):                            # none of which ends before three have begun
            call.beside(f"check {i}", 1, 60, "sh", "-c", f"{command}; sleep 0.2", 4)

    call([Part("tests", 1, 1, "", run, "")], "tests")
    words = order.read_text().split()
    running = [words[:i + 1].count("begin") - words[:i + 1].count("end") for i in range(len(words))]
    assert words[:2] == ["begin", "end"] and max(running) == 3 and running[-1] == 0 and len(words) == 16


def test_what_a_part_needs(call):
    rows = [toy("one"), toy("two", gpus=2), toy("package", needs="no_such_package"), toy("programs", needs="json")]
    said = call(rows, "one", "two", "package", "programs", code=1)
    assert "two: not measured: fewer than 2 GPUs" in said and "no_such_package is missing: package cannot run" in said
    assert {name: part["status"] for name, part in parts_of(call.out).items()} == {
        "one": "done", "two": "not measured: fewer than 2 GPUs", "package": "failed", "programs": "done"}
    call(rows[:2], "one", "two", gpus=2)
    assert "one: not measured: no GPU" in call(rows[:2], "one", "two", gpus=0, code=NO_GPU)
    assert gpu_report.MISSING in (call.out / "report.md").read_text()


def test_without_wgmma_once_it_has_failed(call, tmp_path, monkeypatch):
    """Later parts, also of later calls, select the other kernels and say so."""
    seen = tmp_path / "seen"
    rows = [toy("tests", (gpu_check.WGMMA, 1, 9, "false")), toy("train", ("t", 1, 9, f"echo $FLASH90 >>{seen}"))]
    monkeypatch.setenv("FLASH90", "none")
    call(rows, "train")
    call(rows, "tests", code=1)
    assert f"{gpu_check.WGMMA} failed" in call(rows, "train", FRESH=1)
    assert seen.read_text().split() == ["none", "0"]


# ---- the table and the command line

def test_wrong_usage(call, capsys):
    for words, settings, says in ((["attentoin"], {}, "attentoin: no such part"),
                                  (["train=soon"], {}, "expected PART=SECONDS"),
                                  (["train"], {"OUT": "/proc/nothing"}, "cannot be created or written to")):
        with pytest.raises(SystemExit) as ended:
            call(gpu_check.PARTS, *words, **settings)
        assert ended.value.code == 2 and says in capsys.readouterr().err


def test_the_calls_of_the_page_fit():
    """The parts of each call in gpu_check.md take less than its BUDGET, and all calls less than 15 minutes."""
    calls = re.findall(r"^BUDGET=(\d+) scripts/gpu_check.py (.*)", (ROOT / "dev/notes/gpu_check.md").read_text(), re.M)
    for budget, words in calls:
        seconds = sum(gpu_check.PART[word.partition("=")[0]].seconds for word in words.split())
        assert seconds + gpu_check.RESERVE <= int(budget) <= 600, words
    assert len(calls) == 3 and sum(int(budget) for budget, _ in calls) <= 15 * 60
    named = {word.partition("=")[0] for _, words in calls for word in words.split()}
    assert set(gpu_check.ALL) - named == {"memory", "larger"}


def test_the_groups_of_tests():
    """Every case of the model is in one group. Those of kernels and matmuls are read from their tests."""
    lines = (ROOT / "dev/reference/fixtures/cases.txt").read_text().splitlines()
    lines = [line for line in lines if "kind=model" in line or "kind=attention" in line]
    assert len(lines) > 600
    assert [line for line in lines if sum(word in line for word in gpu_check.MODELS) != 1] == []
    kernels, matmuls = gpu_check.kernel_groups(), gpu_check.matmul_groups()
    assert kernels[0] == "wrappers" and {"rope", "adamw", "phi", "refused", "peak"} < set(kernels)
    assert {"layers", "stored", *gpu_check.NOT_NEEDED} < set(matmuls)


# ---- programs: a machine with a make that builds nothing

# The programs that it "builds" record their arguments. One group of kernels crashes, and one that is not needed fails.
PROGRAM = """
echo "$0 $*" >>"{log}"
[ "$1" != --help ] || exit ${{HELP_CODE:-0}}
case $1 in rope) kill -SEGV $$ ;; unaligned) echo "note: refused"; exit 6 ;; esac
echo "3 passed, 0 failed"
"""
MAKE = """
case "$*" in *lacking*|*--version*) exit 0 ;; *show-it*CUDA*|*show-it*CUBLAS*) echo "{cuda}"; exit 0 ;; esac
echo made >>"{log}"
for word in "$@"; do
    case $word in
        BUILD=*) build=${{word#*=}} ;;
        attn_c) mkdir -p "$build/python/attn_c" ;;
        build/*) mkdir -p "$(dirname "$word")"; cp "{program}" "$word"; chmod +x "$word" ;;
    esac
done
"""


class Machine:
    """A copy of what scripts/gpu_check.py needs, without .git, on a machine with a fake GPU."""

    def __init__(self, folder, **programs):
        self.root, self.log, self.out, self.cuda = (folder / name for name in ("tree", "log", "out", "cuda"))
        tests = (f"dev/tests/{name}" for name in ("test_kernels.cu", "hopper_wrappers.cuh", "test_matmul.cu"))
        copied = ("Makefile", "scripts/gpu_check.py", "scripts/lib/files.py", "attention/flash.cuh", *tests,
                  *(f"dev/bench/gpu_{name}.py" for name in ("report", "programs", "kernels")))
        self.root.mkdir()
        subprocess.run(["cp", "--parents", "-t", self.root, *copied], cwd=ROOT, check=True)
        for name in ("include/cublasLt.h", "lib/libcudart_static.a", "lib/libcublasLt.so"):
            (self.cuda / name).parent.mkdir(parents=True, exist_ok=True)
            (self.cuda / name).touch()
        program = trainer.script_of(folder / "program", PROGRAM.format(log=self.log))
        make = MAKE.format(cuda=self.cuda, log=self.log, program=program)
        fakes = {"nvidia-smi": "echo 'GPU 0, stand-in, 1 MiB'", "nvcc": "exit 1", "make": make, **programs}
        (self.cuda / "bin").mkdir()
        for name, text in fakes.items():
            trainer.script_of(self.cuda / "bin" / name, text)
        # In most cases, the system's Python has no PyTorch.
        self.path = f"{self.cuda}/bin:{sys.base_prefix}/bin:/usr/bin:/bin"

    def call(self, *parts, code=0, **settings):
        settings = {"OUT": str(self.out), "REPORT": "none", "PATH": self.path, **settings}
        done = subprocess.run([self.root / "scripts/gpu_check.py", *parts], capture_output=True, text=True, timeout=120,
                              env=trainer.environment(**settings))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def pack(self):
        """The programs; what else pack collects needs a network."""
        self.edit("dev/bench/gpu_programs.py", "in PACKED.items():", 'in (("programs", pack_programs),):')
        self.call("pack")

    def edit(self, name, old, new):
        """Changes this machine's copy of a file."""
        text = (self.root / name).read_text()
        assert old in text, (name, old)
        (self.root / name).write_text(text.replace(old, new))

    def calls(self, word):
        return self.log.read_text().count(word) if self.log.exists() else 0


def test_built_by_contents_not_by_times(tmp_path):
    machine = Machine(tmp_path)
    machine.call("build")
    assert machine.calls("made") == 1
    for path in machine.root.rglob("*"):
        os.utime(path)                                   # copied again: every source is newer than every object
    assert "nothing to do" in machine.call("build") and machine.calls("made") == 1
    machine.edit("attention/flash.cuh", "\n", "\n\n")
    os.utime(machine.root / "attention/flash.cuh", (1e9, 1e9))             # and older than every object
    assert "rebuilding them" in machine.call("build") and machine.calls("made") == 2
    program = machine.root / "build/gpu_programs/train_gpt2cu"
    program.write_text("something else was built here\n")
    machine.call("build")
    assert machine.calls("made") == 3
    (program.parent / "products").unlink()               # as after an interrupted build: its objects stay
    (program.parent / "an.o").touch()
    assert "resuming an unfinished build" in machine.call("build")
    assert machine.calls("made") == 4 and (program.parent / "an.o").exists()
    shutil.rmtree(program.parent)                        # another machine, with this one's report
    assert "counters needs the programs" in machine.call("counters") and machine.calls("made") == 5


def packed(folder):
    """A machine with the programs that pack has built there."""
    machine = Machine(folder)
    machine.pack()
    shutil.rmtree(machine.root / "build/packed")
    assert machine.calls("made") == 1
    return machine


def test_packed_programs_are_used(tmp_path):
    machine = packed(tmp_path)
    assert "pack's programs, sm_90: ok" in machine.call("build")
    assert "nothing to do" in machine.call("build")
    assert "== build" not in machine.call("tests", code=1)                   # 1: one of these programs crashes
    verdicts = verdicts_of(machine.out, "tests")
    assert verdicts.pop("kernels: rope") == "FAILED (139)" and machine.calls("test_kernels norms") == 1
    assert verdicts.pop("cuBLASLt, not needed: unaligned") == "info" and len(verdicts) > 20
    assert {verdicts[name] for name in verdicts if not re.search("ttention|PyTorch", name)} == {"ok"}
    (machine.root / "build/gpu_programs/train_gpt2cu").write_text("something else was built here\n")
    assert "pack's programs, sm_90: ok" in machine.call("build") and machine.calls("made") == 1
    assert "or for another GPU: not used" in machine.call("build", GPUS="80") and machine.calls("made") == 2
    machine.edit("attention/flash.cuh", "\n", "\n\n")
    shutil.rmtree(machine.root / "build/gpu_programs")
    assert "built from other sources" in machine.call("build") and machine.calls("made") == 3


def test_packed_programs_that_do_not_start_are_rebuilt(tmp_path):
    machine = packed(tmp_path)
    said = machine.call("build", HELP_CODE="1")
    assert "pack's programs, sm_90: info" in said and "train_gpt2cu --help: exit code 1" in said
    build = parts_of(machine.out)["build"]
    assert build["status"] == "done" and [c["verdict"] for c in build["checks"]] == ["info", "ok"]
    assert machine.calls("made") == 2
    assert "nothing to do" in machine.call("build", HELP_CODE="1")      # they are not tried again


def test_the_probe_finds_what_is_missing(tmp_path):
    """Nothing else is started then, unless pack has brought the programs."""
    machine = Machine(tmp_path)
    (machine.cuda / "include/cublasLt.h").unlink()
    said = machine.call(code=1)                          # all parts
    assert "cublasLt.h: FAILED, 0 s: cublasLt.h is missing: scripts/gpu_check.py pack provides it" in said
    assert "The other parts were not started" in said
    assert list(parts_of(machine.out)) == ["probe"] and machine.calls("made") == 0
    machine.pack()
    said = machine.call("probe")
    assert "programs: pack's" in said and "cublasLt.h: missing" in said


def test_a_probe_without_a_gpu(tmp_path):
    """Nothing else is started, also if nvidia-smi hangs, as it does if the driver hangs."""
    machine = Machine(tmp_path, **{"nvidia-smi": "exec sleep 100"})
    machine.edit("dev/bench/gpu_report.py", "ASK_LIMIT = 10", "ASK_LIMIT = 1")
    assert "GPU: missing" in machine.call("probe", "build", code=NO_GPU) and machine.calls("made") == 0
    assert {name: part["status"] for name, part in parts_of(machine.out).items()} == {"probe": "not measured: no GPU"}


# Like the real one: ends with the program's exit code, or with --error-exitcode if there are findings.
SANITIZER = """code=0
while true; do
    case $1 in --tool | --print-limit) ;; --error-exitcode) code=$2 ;; *) break ;; esac
    shift 2
done
case $2 in norms) echo '========= ERROR SUMMARY: 1 error'; exit "$code" ;; esac
exec "$@"
"""


def test_sanitizer_findings_are_reported(tmp_path):
    machine = Machine(tmp_path, **{"compute-sanitizer": SANITIZER})
    machine.edit("scripts/gpu_check.py", "row in ATTENTION_KINDS for", "row in () for")
    machine.call("sanitizer", code=1)
    verdicts = verdicts_of(machine.out, "sanitizer")
    assert all(verdicts[f"{tool}, kernels: norms"] == "FAILED (9)" for tool in ("memcheck", "racecheck", "synccheck"))
    assert verdicts["memcheck, kernels: rope"] == "FAILED (139)" and verdicts["synccheck, kernels: wrappers"] == "ok"
    assert "memcheck, kernels: peak" not in verdicts and "SUMMARY: 1 error" in (machine.out / "log").read_text()


# ---- dry runs

@pytest.fixture
def dry(tmp_path):
    """f(parts): a call with the emulated programs."""
    if not (EMULATED.exists() and EVALUATOR.exists()):
        pytest.skip("make train_gpt2cu_on_cpu eval_gpt2cu_on_cpu")

    def run(*parts):
        settings = {"OUT": str(tmp_path / "out"), "REPORT": "none", "DEPS": str(tmp_path / "deps"), "DEVICE": "cpu"}
        done = subprocess.run([ROOT / "scripts/gpu_check.py", *parts], capture_output=True, text=True, timeout=600,
                              env=trainer.environment(**settings))
        assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.mark.drawn(1, of="whole calls")
def test_runs_on_the_cpu(tmp_path, dry):
    dry("determinism", "train", "counters")
    parts = parts_of(tmp_path / "out")
    assert {part["status"] for part in parts.values()} == {"done"}
    assert [len(part["checks"]) for part in parts.values()] == [4, 1, 1] and len(parts["train"]["curves"]["bf16"]) == 4
    assert_well_formed((tmp_path / "out/report.md").read_text())


@pytest.mark.skipif(os.environ.get("GPU_REHEARSAL") != "1" or not shutil.which("mpirun"),
                    reason="GPU_REHEARSAL=1: minutes")
def test_several_ranks(tmp_path, dry):
    dry("several")
    checks = parts_of(tmp_path / "out")["several"]["checks"]
    assert {check["verdict"] for check in checks} == {"ok"} and len(checks) > 10
    assert [check["detail"] for check in checks[:2]] == ["2 processes are right"] * 2


@pytest.mark.drawn(1, of="whole calls")
def test_evaluation_part(tmp_path, dry):
    dry("evaluation")
    part = parts_of(tmp_path / "out")["evaluation"]
    assert verdicts_of(tmp_path / "out", "evaluation") == {"the same results as eval_gpt2": "ok", "evaluation": "ok"}
    assert re.match(r"[1-9]\d* passed", part["checks"][0]["detail"]) and len(part["records"]) == 6
    report = (tmp_path / "out/report.md").read_text()
    assert_well_formed(report)
    assert report.count(gpu_report.MISSING) == 24         # a dry run measures nothing


# ---- the rehearsal

TRAVELS_BYTES, FILES_BACK, FILE_BYTES = 64 << 20, 8, 16 << 20


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


@pytest.mark.skipif(os.environ.get("GPU_REHEARSAL") != "1", reason="GPU_REHEARSAL=1: minutes")
def test_rehearsal(tmp_path):
    """Repeats calls, as on a machine that is rented for minutes, until nothing is left: with a copy without .git whose
    files are older than the objects, an OUT that starts empty, and a report that the caller carries from call to call.
    Prints the seconds of each part."""
    root, out, carried = tmp_path / "tree", tmp_path / "out", tmp_path / "tree/build/gpu_check"
    budget = int(os.environ.get("GPU_REHEARSAL_BUDGET", 570))
    names = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
                           check=True).stdout
    root.mkdir()
    subprocess.run(["xargs", "-0", "cp", "--parents", "-t", root], cwd=ROOT, input=names, check=True)
    for path in root.rglob("*"):
        os.utime(path, (1e9, 1e9))
    for name in (".venv", ".cuda"):
        if (ROOT / name).exists():
            (root / name).symlink_to((ROOT / name).resolve())
    calls = []

    def call(*parts, code):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        settings = {"OUT": str(out), "BUDGET": str(budget), "DEVICE": "cpu", "PROGRAMS": "build/rehearsal"}
        start = time.monotonic()
        result = subprocess.run([root / "scripts/gpu_check.py", *parts], capture_output=True, text=True,
                                env={**os.environ, **settings})
        seconds = time.monotonic() - start
        calls.append(seconds)
        print(f"\n--- call {len(calls)}: {' '.join(parts) or 'all parts'}: {seconds:.0f} s, exit code "
              f"{result.returncode}\n{result.stdout}{result.stderr}", flush=True)
        assert result.returncode in code and (seconds <= budget + 30 or parts == ("pack",))
        assert (len(list(out.iterdir())) <= FILES_BACK
                and all(path.stat().st_size <= FILE_BYTES for path in out.iterdir()))
        if parts != ("pack",):
            shutil.copytree(out, carried, dirs_exist_ok=True)
        return result.returncode, result.stdout

    call("pack", code=(0, 1))                             # 1: something cannot be downloaded here
    assert size_of(root) - size_of(root / "build") + size_of(root / "build/deps") <= TRAVELS_BYTES
    while call(code=(0, UNFINISHED))[0]:
        assert len(calls) < 20
    parts = parts_of(carried)
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(gpu_check.ALL, "done")
    assert all(part["seconds"] <= budget for part in parts.values())
    print("\n".join(f"{name:12} {part['seconds']:5.0f} s" for name, part in parts.items()))


# ---- runs side by side

def write_run(folder, losses, tensors=b"tensors"):
    (folder / "ckpt/step-00000001").mkdir(parents=True)
    lines = [json.dumps({"step": i + 1, "loss": loss}) + "\n" for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for name in ("model.safetensors", "optimizer.safetensors"):
        (folder / "ckpt/step-00000001" / name).write_bytes(tensors)
    return folder


@pytest.mark.parametrize("losses, tensors, same, close", [
    ([2.0, 1.0], b"tensors", True, True), ([2.0, 1.000009], b"tensors", False, True),
    ([2.0, 1.00002], b"tensors", False, False), ([2.0, math.nan], b"tensors", False, False),
    ([2.0], b"tensors", False, False), ([], b"tensors", False, False), ([2.0, 1.0], b"others", False, True)])
def test_same_and_close_runs(tmp_path, losses, tensors, same, close):
    a, b = write_run(tmp_path / "a", [2.0, 1.0]), write_run(tmp_path / "b", losses, tensors)
    assert gpu_report.same(a, b)[0] == same and gpu_report.close(1e-5, a, b)[0] == close


@pytest.mark.parametrize("dtype, losses, fine", [
    ("fp32", [2.0 + 8e-6, 2.0 + 8e-3, 2.0], True), ("fp32", [2.0 + 2e-5, 2.0, 2.0], False),
    ("fp32", [2.0, 2.02, 2.0], False), ("fp32", [2.0, 2.0, math.nan], False), ("fp32", [2.0], False),
    ("bf16", [2.001, 2.05, 2.0], True), ("bf16", [2.003, 2.0, 2.0], False), ("bf16", [2.0, 2.07, 2.0], False)])
def test_the_bounds_of_curves(tmp_path, dtype, losses, fine):
    """The first ten steps have a tighter bound than the later ones, and float32 tighter ones than bf16."""
    runs = [write_run(tmp_path / "fp32_on_cpu", [2.0] * 12), write_run(tmp_path / dtype, [2.0] * 9 + losses)]
    assert gpu_report.curves(gpu_report.Report(tmp_path), "train", runs)[0] == fine


# ---- what a part depends on

def test_the_version_covers_every_source():
    """Every file from which the programs are compiled."""
    words = [*os.environ.get("CXX", "g++").split(), "-std=c++17", "-MM", "-MG", "-I.", "-Idev/cuda_on_cpu", "-x", "c++"]
    words += [path.relative_to(ROOT) for folder in (".", "attention", "cuda", "dev/tests")
              for path in (ROOT / folder).glob("*.cu")]
    text = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {word for word in text.replace("\\\n", " ").split() if not word.endswith(":")}
    wanted, covered = {ROOT / name for name in names if (ROOT / name).is_file()}, set(gpu_report.sources("build"))
    assert {"attention", "cuda"} <= {path.parent.name for path in wanted} and len(wanted) > 30
    assert {str(path.relative_to(ROOT)) for path in wanted - covered} == set()
    for name, parts in (("dev/tests/flash_so.cu", ("attention", "shapes", "others", "tests", "sanitizer")),
                        ("scripts/gpu_check.py", ("determinism", "train", "sanitizer", "package", "a new part"))):
        assert (ROOT / name).exists() and all(ROOT / name in gpu_report.sources(part) for part in parts)
    assert set(gpu_report.PART_SOURCES) <= set(gpu_check.PART)


def test_records_of_other_sources_or_devices_do_not_count(tmp_path, monkeypatch):
    """This also works without git, because the version is a hash of the sources' contents."""
    for name in ("Makefile", "attention/flash.cuh", "dev/bench/attention_gpu.py", "doc/gpu.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)

    def found():
        """Of both parts the state, and the figures that train begins with."""
        report = gpu_report.Report(tmp_path / "out")
        states = [report.state(part) for part in ("attention", "train")]
        report.begin("train")
        return [*states, *(r["both_ms"] for r in report.part("train")["records"])]

    report = gpu_report.Report(tmp_path / "out")
    for part in ("attention", "train"):
        report.begin(part)
        report.record(part, {"attn": "ssmax"}, both_ms=[1.0])
        report.record(part, {"attn": "ssmax"}, both_ms=[2.0])        # replaces the earlier one
        report.end(part)
    report.save()
    for name, text, expected in (("doc/gpu.md", "two", ["done", "done", [2.0]]),
                                 ("dev/bench/attention_gpu.py", "two", ["new", "done", [2.0]]),
                                 ("attention/flash.cuh", "two", ["new", "new"]),
                                 ("attention/flash.cuh", "one", ["new", "done", [2.0]])):
        (tmp_path / name).write_text(text)
        assert found() == expected, (name, text)
    monkeypatch.setenv("GPU_CHECK_DEVICE", "another GPU")
    assert found() == ["new", "new"]


def test_a_truncated_report(tmp_path, capsys):
    (tmp_path / "report.json").write_text('{"parts": {"step": {"sta')
    report = gpu_report.Report(tmp_path)
    assert report.parts == {} and "report.json.bad, and a new report begins" in capsys.readouterr().err
    assert (tmp_path / "report.json.bad").exists() and not (tmp_path / "report.json").exists()


# ---- the verdicts of measurements

def case(attn, T, way, ms, **more):
    return {"attn": attn, "T": T, "way": way, "device": "cuda", "forward_ms": [ms / 3], "both_ms": [ms], "wrong": False,
            **more}


def step(variant, rate, batch="16"):
    return {"model": "124M", "batch": batch, "variant": variant, "device": "cuda", "B": 16, "tok_per_s": rate}


def evaluation(case, rate, dtype="bf16"):
    return {"case": case, "dtype": dtype, "device": "cuda", "tok_per_s": rate}


def report_with(**more):
    """A report in which everything was measured; all bounds hold."""
    attention = [case("softmax", T, way, ms) for T in (1024, 2048, 4096)
                 for way, ms in (("ours", 1.0), ("sdpa-flash", 0.9), ("sdpa-cudnn", 0.7))]
    attention += [case("softmax", 2048, "ours", 1.0, forward_tflops=331),
                  case("softmax", 16384, "ours", 1.0, forward_tflops=421),
                  case("softmax", 16384, "ours-any-order", 1.0, both_tflops=401)]
    attention += [case("ssmax", 4096, "ours", 1.02, of_softmax=[1.02]),
                  case("lssar", 4096, "ours", 1.3, of_softmax=[1.3])]
    others = [case("ssmax", 4096, "ours", 1.0), case("ssmax", 4096, "sdpa", 4.0), case("ssmax", 4096, "compile", 8.0),
              case("lssar", 4096, "ours", 1.0), case("lssar", 4096, "compile", 12.0)]
    parts = {"attention": attention, "others": others,
             "step": [step("ours", 560e3), step("no graphs", 559e3), step("any order", 570e3), step("autocast", 500e3),
                      step("bf16", 520e3)],
             "evaluation": [evaluation("forward", 1e6), evaluation("evaluation", 1.1e6), evaluation("prefill", 0.9e6)]}
    return {name: {"records": [*more.get(name, []), *records]} for name, records in parts.items()}


def verdicts(parts):
    return [row[-1] for row in gpu_report.bounds(parts)]


def test_verdicts():
    assert verdicts({}) == [gpu_report.MISSING] * 12
    assert verdicts(report_with()) == ["PASS", "PASS, aim reached", "PASS, aim reached", "PASS, aim reached", "PASS",
                                       "PASS", *["PASS, aim reached"] * 6]
    slower = [evaluation("prefill", 0.7e6), evaluation("evaluation", 0.9e6)]
    assert verdicts(report_with(evaluation=slower))[7:9] == ["PASS", "aim missed"]
    slower = [case("softmax", 16384, "ours", 1.0, forward_tflops=419),
              case("softmax", 16384, "ours-any-order", 1.0, both_tflops=399)]
    assert verdicts(report_with(attention=slower))[9:] == ["PASS, aim reached", "aim missed", "aim missed"]


@pytest.mark.parametrize("row, change", [
    (0, {"attention": [case("softmax", 8192, "ours", 1.0), case("softmax", 8192, "sdpa-flash", 0.8)]}),
    (1, {"attention": [case("softmax1", 4096, "ours", 1.2, of_softmax=[1.2])]}),
    (2, {"attention": [case("softmax-recentered-l1", 4096, "ours", 2.1, of_softmax=[2.1])]}),
    (3, {"others": [case("relu2-n", 4096, "ours", 1.0), case("relu2-n", 4096, "compile", 2.9)]}),
    (4, {"others": [case("softmax-negated", 4096, "ours", 1.0), case("softmax-negated", 4096, "sdpa", 1.0)]}),
    (5, {"step": [step("bf16", 570e3)]}),
    (7, {"evaluation": [evaluation("evaluation", 0.79e6)]}),
])
def test_one_case_below_its_bound(row, change):
    found = verdicts(report_with(**change))
    assert found[row] == "below must"
    assert "below must" not in found[:row] + found[row + 1:]


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"wrong": True}, {"failed": "out of memory"}])
def test_only_correct_cases_timed_on_a_gpu_count(change):
    parts = report_with()
    for part in parts.values():
        for record in part["records"]:
            record.update(change)
    assert verdicts(parts) == [gpu_report.MISSING] * 12

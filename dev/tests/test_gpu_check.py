"""scripts/gpu_check.sh without a GPU: its parts work in a dry run and on machines that lack something; calls resume;
its report is well-formed, its verdicts are right, and nothing that was not timed on a GPU counts as a measurement.

GPU_REHEARSAL=1 adds the rehearsal of doc/gpu_check.md: every part, built and run with the emulation, in calls of
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import trainer
from trainer import ROOT

sys.path[:0] = [str(ROOT / "dev/bench"), str(ROOT / "dev/reference")]
import attention_gpu
import gpu_eval
import gpu_kernels
import gpu_report
import gpu_step
import model as reference

EMULATED, COLLECTIVE = ROOT / "train_gpt2cu_on_cpu", ROOT / "build/on_cpu/tests/test_collective"
EVALUATOR, FLASH = ROOT / "eval_gpt2cu_on_cpu", ROOT / "build/on_cpu/flash.so"


@pytest.fixture(autouse=True)
def dry(monkeypatch):
    for module in (attention_gpu, gpu_step):
        monkeypatch.setattr(module, "DRY", True)


def gpu_check(*parts, out, code, root=ROOT, timeout=300, **environment):
    settings = trainer.environment(**{"OUT": str(out), "REPORT": f"{out}/none", "DEPS": f"{out}/deps", **environment})
    result = subprocess.run([root / "scripts/gpu_check.sh", *parts], capture_output=True, text=True, timeout=timeout,
                            env=settings)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def parts_of(out):
    return json.loads((out / "report.json").read_text())["parts"]


def assert_well_formed(text):
    """Checks that every row of a table has as many cells as its head."""
    rows = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines()]
    for before, now in zip(rows, rows[1:]):
        assert not before or not now or before == now, text


# ---- the script

@pytest.mark.skipif(gpu_report.device() != "CPU", reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    said = gpu_check("tests", "step", out=tmp_path, code=gpu_report.NO_GPU)
    assert said.count("no GPU: not measured") == 2
    assert {part["status"] for part in parts_of(tmp_path).values()} == {"not measured: no GPU"}
    assert gpu_report.MISSING in (tmp_path / "report.md").read_text()


def fake_programs(folder, **texts):
    """A PATH with these shell scripts before the system's own programs."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


# The programs that make "builds" on the machine below; they record their arguments, and when they run. One group of
# kernels crashes, and another is killed, as if memory had run out.
PROGRAM = """#!/bin/sh
echo "$0 $*" >>"{log}"
[ "$1" != --help ] || exit ${{HELP_CODE:-0}}
echo "begin $1" >>"{log}.order"
sleep ${{NAP:-0}}
echo "end $1" >>"{log}.order"
case $1 in rope) kill -SEGV $$ ;; swiglu) kill -KILL $$ ;; orders) echo "note: refused"; exit 6 ;; esac
echo "3 passed, 0 failed"
"""
MAKE = """#!/bin/sh
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
    """A copy of what scripts/gpu_check.sh needs, without .git, on a machine with a fake GPU and a make that builds
    nothing."""

    def __init__(self, folder, *, lacks=(), **programs):
        self.root, self.log, self.out = folder / "tree", folder / "log", folder / "out"
        for name in ("Makefile", "scripts/gpu_check.sh", "attention/flash.cuh", "dev/bench/gpu_report.py",
                     "dev/bench/gpu_text.py", "dev/bench/gpu_kernels.py"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        (folder / "cuda/include").mkdir(parents=True)
        (folder / "cuda/lib").mkdir()
        for name in ("include/cublasLt.h", "lib/libcudart_static.a", "lib/libcublasLt.so"):
            (folder / "cuda" / name).touch()
        (folder / "program").write_text(PROGRAM.format(log=self.log))
        make = MAKE.format(cuda=folder / "cuda", log=self.log, program=folder / "program")
        fakes = {"nvidia-smi": "echo 'GPU 0, stand-in, 1 MiB'", "nvcc": "exit 1", "make": make, **programs}
        self.cuda = folder / "cuda"
        self.path = fake_programs(folder / "bin", **{name: text for name, text in fakes.items() if name not in lacks})

    def call(self, *parts, code, **environment):
        return gpu_check(*parts, out=self.out, code=code, root=self.root, PATH=self.path, PYTHON="", **environment)

    def edit(self, name, old, new):
        """Changes a constant in this machine's copy of a file."""
        text = (self.root / name).read_text()
        assert old in text, (name, old)
        (self.root / name).write_text(text.replace(old, new))

    def nvcc(self, text):
        fake_programs(self.cuda / "bin", nvcc=text)

    def calls(self, word):
        return self.log.read_text().count(word) if self.log.exists() else 0


@pytest.mark.drawn(3, of="whole calls")
def test_built_by_contents_not_by_times(tmp_path):
    machine = Machine(tmp_path)
    machine.call("build", code=0)
    assert machine.calls("made") == 1
    for path in machine.root.rglob("*"):
        os.utime(path)                                   # copied again: every source is newer than every object
    machine.call("build", code=0)
    assert machine.calls("made") == 1
    flash = machine.root / "attention/flash.cuh"
    flash.write_text(flash.read_text() + "// changed\n")
    os.utime(flash, (1e9, 1e9))                          # and older than every object
    machine.call("build", code=0)
    assert machine.calls("made") == 2
    program = machine.root / "build/gpu_programs/train_gpt2cu"
    program.write_text("something else was built here\n")
    machine.call("build", code=0)
    assert machine.calls("made") == 3
    (program.parent / "products").unlink()               # as after an interrupted build: its objects stay
    (program.parent / "an.o").touch()
    assert "resuming an unfinished build" in machine.call("build", code=0)
    assert machine.calls("made") == 4 and (program.parent / "an.o").exists()


def packed(folder, **programs):
    """A machine with the programs that pack has built there; what else pack collects needs a network."""
    machine = Machine(folder, **programs)
    machine.edit("scripts/gpu_check.sh", "for thing in libraries cudart cublas python text curve programs",
                 "for thing in programs")
    machine.call("pack", code=0)
    shutil.rmtree(machine.root / "build/packed")
    assert machine.calls("made") == 1
    return machine


@pytest.mark.drawn(3, of="whole calls")
def test_packed_programs_are_used(tmp_path):
    machine = packed(tmp_path)
    assert "pack's programs, sm_90: ok" in machine.call("build", code=0)
    assert "nothing to do" in machine.call("build", code=0)
    assert "== build" not in machine.call("tests", code=1)                   # 1: some of these programs crash
    assert machine.calls("made") == 1 and machine.calls("test_kernels norms") == 1
    (machine.root / "build/gpu_programs/train_gpt2cu").write_text("something else was built here\n")
    assert "pack's programs, sm_90: ok" in machine.call("build", code=0)
    assert machine.calls("made") == 1
    machine.call("several", code=gpu_report.NO_GPU)      # which needs MPI and NCCL
    assert machine.calls("made") == 2
    assert "nothing to do" in machine.call("build", code=0)


@pytest.mark.drawn(3, of="whole calls")
def test_packed_programs_of_another_version_are_not_used(tmp_path):
    machine = packed(tmp_path)
    assert "or for another GPU: not used" in machine.call("build", code=0, GPUS="80")
    assert machine.calls("made") == 2
    shutil.rmtree(machine.root / "build/gpu_programs")
    flash = machine.root / "attention/flash.cuh"
    flash.write_text(flash.read_text() + "// changed\n")
    assert "built from other sources" in machine.call("build", code=0)
    assert machine.calls("made") == 3


# As glibc's, for a program that was linked with a newer one.
LDD = "echo \"$1: libc.so.6: version \\`GLIBC_2.99' not found (required by $1)\""


@pytest.mark.drawn(3, of="whole calls")
@pytest.mark.parametrize("settings, programs, says", [
    ({"HELP_CODE": "1"}, {}, "train_gpt2cu --help: exit code 1"), ({}, {"ldd": LDD}, "GLIBC_2.99' not found"),
    ({"TRUNCATED": "1"}, {}, "ended before the end-of-stream marker")], ids=["help", "glibc", "truncated"])
def test_packed_programs_that_do_not_start_are_rebuilt(tmp_path, settings, programs, says):
    machine = packed(tmp_path, **programs)
    archive, = (machine.out / "deps/programs").glob("*.xz")
    if "TRUNCATED" in settings:
        os.truncate(archive, archive.stat().st_size - 40)
    said = machine.call("build", code=0, **settings)
    assert "pack's programs, sm_90: info" in said and says in said
    build = parts_of(machine.out)["build"]
    assert build["status"] == "done" and [c["verdict"] for c in build["checks"]] == ["info", "ok"]
    assert machine.calls("made") == 2
    assert "nothing to do" in machine.call("build", code=0, **settings)      # they are not tried again


def test_packed_programs_need_no_compiler(tmp_path):
    machine = packed(tmp_path)
    (tmp_path / "cuda/include/cublasLt.h").unlink()
    machine.nvcc('printf "#!/bin/sh\\n" >"$3"; chmod +x "$3"')                # the kernel that the probe builds
    said = machine.call("probe", code=0)
    assert "programs: pack's" in said and "cublasLt.h: missing" in said


@pytest.mark.drawn(3, of="whole calls")
def test_checks_run_side_by_side(tmp_path):
    """The wrappers' alone, before all others, and never more than AT_ONCE."""
    machine = Machine(tmp_path)
    machine.edit("scripts/gpu_check.sh", "AT_ONCE=$(nproc)\n", "AT_ONCE=3\n")
    machine.call("tests", code=1, NAP="0.3")
    order = [line.split() for line in Path(f"{machine.log}.order").read_text().splitlines()]
    assert order[:2] == [["begin", "wrappers"], ["end", "wrappers"]]
    running, most = set(), 0
    for what, group in order:
        (running.add if what == "begin" else running.discard)(group)
        most = max(most, len(running))
    assert most == 3 and not running
    log = (machine.out / "log").read_text()
    assert "== tests: kernels: norms: build/gpu_programs/cuda/tests/test_kernels norms\n3 passed, 0 failed\n" in log


SYSTEMS_PYTHON = ["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", "python3"]


@pytest.mark.drawn(3, of="whole calls")
@pytest.mark.skipif(subprocess.run([*SYSTEMS_PYTHON, "-c", "import torch"], capture_output=True).returncode == 0,
                    reason="the system's Python has PyTorch")
def test_a_crash_ends_its_group_alone(tmp_path):
    machine = Machine(tmp_path)
    machine.call("tests", code=1)
    checks = {check["name"]: check["verdict"] for check in parts_of(machine.out)["tests"]["checks"]}
    assert checks.pop("kernels: rope") == "FAILED (139)" and checks.pop("kernels: swiglu") == "FAILED (137)"
    assert checks.pop("PyTorch or pytest") == "FAILED"
    assert checks.pop("cuBLASLt, not needed: orders") == "info"
    assert len(checks) > 20 and set(checks.values()) == {"ok"}
    before = machine.calls("test_kernels rmsnorm"), machine.calls("test_kernels rope")
    machine.call("tests", code=1)    # passed checks are not run again; failed ones are if their part is named
    assert (machine.calls("test_kernels rmsnorm"), machine.calls("test_kernels rope")) == (before[0], before[1] + 1)


def test_without_the_sanitizer_its_part_fails(tmp_path):
    machine = Machine(tmp_path)
    if shutil.which("compute-sanitizer", path=machine.path):
        pytest.skip("compute-sanitizer is among the system's programs")
    assert "FAILED: compute-sanitizer is missing" in machine.call("sanitizer", code=1)
    assert [check["verdict"] for check in parts_of(machine.out)["sanitizer"]["checks"]] == ["FAILED"]


# Like the real one: ends with the program's exit code, or with --error-exitcode if there are findings.
SANITIZER = """code=0
while true; do
    case $1 in --tool | --print-limit) ;; --error-exitcode) code=$2 ;; *) break ;; esac
    shift 2
done
case $2 in
    norms) sleep 1; echo '========= ERROR SUMMARY: 1 error'; exit "$code" ;;
    peak) echo $$ >peak.pid; trap '' TERM; while true; do sleep 1; done ;;
esac
exec "$@"
"""


@pytest.mark.drawn(3, of="whole calls")
def test_sanitizer_findings_are_reported(tmp_path):
    """Each run is recorded as soon as it ends; one that does not end is left before the call runs out of time."""
    machine, ended = Machine(tmp_path, **{"compute-sanitizer": SANITIZER}), "norms"
    for old, new in (("phi rmsnorm", ""), ("gau embedding classifier adamw", ""), ("refused | peak", "refused"),
                     ("KILL_AFTER=5", "KILL_AFTER=1"), ("memcheck racecheck synccheck", "memcheck"),
                     ("cat <<'TABLE'", "return; cat <<'TABLE'"), ('"$name" 30 240', '"$name" 1 240')):
        machine.edit("scripts/gpu_check.sh", old, new)

    def verdicts():
        checks = parts_of(machine.out).get("sanitizer", {}).get("checks", [])
        return {check["name"].removeprefix("memcheck, kernels: "): check["verdict"] for check in checks}

    machine.call("build", code=0)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(machine.call, "sanitizer=20", code=1, timeout=60)
        while not call.done() and ended not in verdicts():
            time.sleep(0.05)
        assert verdicts()[ended] == "FAILED (9)"
        pid = (machine.root / "peak.pid").read_text().strip()
        assert Path(f"/proc/{pid}/cmdline").read_bytes()                # another run continues
        said = call.result()
    assert verdicts()["peak"] == "left", said
    assert verdicts()["rope"] == "FAILED (139)" and verdicts()["swiglu"] == "FAILED (137)"
    assert verdicts()["wrappers"] == "ok" and "SUMMARY: 1 error" in (machine.out / "log").read_text()
    assert parts_of(machine.out)["sanitizer"]["seconds"] <= 20


def test_a_missing_ncu_is_reported_but_no_failure(tmp_path):
    machine = Machine(tmp_path)
    if shutil.which("ncu", path=machine.path):
        pytest.skip("ncu is among the system's programs")
    machine.call("counters", code=0)
    assert ([(check["verdict"], check["detail"]) for check in parts_of(machine.out)["counters"]["checks"]]
            == [("info", "ncu is missing")])


def test_a_dry_run_counts_nothing(tmp_path, known):
    path = fake_programs(tmp_path / "bin", ncu="exit 1")
    gpu_check("counters", out=tmp_path / "out", code=0, **known, PATH=f"{path}:{os.environ['PATH']}")
    assert ([(check["verdict"], check["detail"]) for check in parts_of(tmp_path / "out")["counters"]["checks"]]
            == [("info", "a dry run has no kernels that ncu can observe")])


def test_missing_build_requirements_are_found_first(tmp_path):
    machine = Machine(tmp_path)
    (tmp_path / "cuda/include/cublasLt.h").unlink()
    said = machine.call(code=1)                          # all parts
    assert "FAILED: cublasLt.h is missing: scripts/gpu_check.sh pack provides it" in said
    assert "The other parts were not started" in said
    assert list(parts_of(machine.out)) == ["probe"] and machine.calls("made") == 0


def test_a_failed_probe_ends_the_call_that_names_it(tmp_path):
    machine = Machine(tmp_path)
    (tmp_path / "cuda/include/cublasLt.h").unlink()
    assert "The other parts were not" in machine.call("probe", "build", code=1)
    assert list(parts_of(machine.out)) == ["probe"]


def test_a_probe_without_a_gpu_ends_the_call(tmp_path):
    """Also if nvidia-smi hangs, as it does if the driver hangs."""
    machine = Machine(tmp_path, **{"nvidia-smi": "exec sleep 100"})
    machine.edit("scripts/gpu_check.sh", "ASK_LIMIT=10", "ASK_LIMIT=1")
    machine.edit("dev/bench/gpu_report.py", "timeout=10", "timeout=1")
    said = machine.call("probe", "build", code=gpu_report.NO_GPU, timeout=30)
    assert "GPU: missing" in said and machine.calls("made") == 0
    assert {name: part["status"] for name, part in parts_of(machine.out).items()} == {"probe": "not measured: no GPU"}


def test_nvidia_smi_is_always_called_with_a_limit():
    sources = ("scripts/gpu_check.sh",
               *(f"dev/bench/{name}.py" for name in ("gpu_report", "gpu_step", "attention_gpu")))
    calls = [line for path in sources for line in (ROOT / path).read_text().splitlines()
             if re.search(r'nvidia-smi "?[$@-]|"nvidia-smi"', line)]
    assert len(calls) == 2 and "timeout -k" in calls[0] and "words = " in calls[1]


def test_a_kernel_that_hangs_fails_the_probe(tmp_path):
    machine = Machine(tmp_path)
    machine.edit("scripts/gpu_check.sh", "SMOKE_LIMIT=30 ASK_LIMIT=10", "SMOKE_LIMIT=1 ASK_LIMIT=1")
    machine.nvcc("exec sleep 100")
    said = machine.call("probe", code=1, timeout=30)
    assert "a kernel for sm_90: FAILED (timed out after 1 s)" in said


def test_one_gpu_is_too_few_for_several(tmp_path):
    machine = Machine(tmp_path)
    assert "fewer than two GPUs: not measured" in machine.call("several", code=gpu_report.NO_GPU)
    assert parts_of(machine.out)["several"]["checks"] == []


@pytest.mark.parametrize("word, says", [("attentoin", "attentoin: no such part"),
                                        ("train=soon", "expected PART=SECONDS"),
                                        ("train=1=2", "expected PART=SECONDS")])
def test_an_unknown_part_is_rejected(tmp_path, word, says):
    assert says in gpu_check(word, out=tmp_path, code=2)


@pytest.mark.drawn(3, of="whole calls")
@pytest.mark.parametrize("word, settings", [("determinism", {"BUDGET": "08"}), ("determinism=01", {})])
def test_seconds_are_decimal(tmp_path, word, settings):
    """08 is not an octal number. Parts that could not begin are unfinished."""
    said = gpu_check(word, out=tmp_path, code=gpu_report.UNFINISHED, DEVICE="cpu", TRAIN="/bin/false", **settings)
    assert "too great" not in said and parts_of(tmp_path)["determinism"]["status"] == "unfinished"


def test_an_out_that_cannot_be_written(tmp_path):
    assert "cannot be created or written to" in gpu_check("step", out="/proc/nothing", code=2)


@pytest.mark.parametrize("word", ["help", "--help"])
def test_help(tmp_path, word):
    said = gpu_check(word, out=tmp_path / "out", code=0)
    assert "scripts/gpu_check.sh [PART[=SECONDS]...]" in said and "Exit codes: 0" in said and "set -u" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("program, words", [
    ("gpu_report", ""), ("gpu_report", "{out} begin"), ("gpu_report", "{out} beginn step"),
    ("gpu_report", "{out} took step soon"), ("gpu_report", "compare close x a b"),
    ("gpu_kernels", ""), ("gpu_kernels", "run flash.so bf16 softmax 64"), ("gpu_kernels", "step {out}")])
def test_usage_of_the_tools(tmp_path, monkeypatch, capsys, program, words):
    monkeypatch.setattr(sys, "argv", [program, *words.format(out=tmp_path).split()])
    with pytest.raises(SystemExit) as ended:
        sys.exit({"gpu_report": gpu_report, "gpu_kernels": gpu_kernels}[program].main())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"python3 dev/bench/{program}.py" in said and f"{program}: " in said


def test_a_truncated_report(tmp_path, capsys):
    (tmp_path / "report.json").write_text('{"parts": {"step": {"sta')
    report = gpu_report.Report(tmp_path)
    assert report.parts == {} and "report.json.bad, and a new report begins" in capsys.readouterr().err
    assert (tmp_path / "report.json.bad").exists() and not (tmp_path / "report.json").exists()


def test_an_absent_part_is_unfinished(tmp_path):
    report = gpu_report.Report(tmp_path)
    report.begin("step")
    report.end("step")
    assert gpu_report.exit_code(report, ["step"]) == 0
    assert gpu_report.exit_code(report, ["step", "memory"]) == gpu_report.UNFINISHED


@pytest.fixture
def known(tmp_path):
    """The environment of a dry run with the CPU trainer and a small vocabulary."""
    trainer.make_data(tmp_path)
    return dict(DEVICE="cpu", TRAIN=str(trainer.TRAIN), DATA=str(tmp_path), VOCAB=str(trainer.VOCAB))


@pytest.mark.drawn(3, of="whole calls")
def test_runs_on_the_cpu(tmp_path, known):
    gpu_check("determinism", "train", out=tmp_path / "report", code=0, **known)
    parts = parts_of(tmp_path / "report")
    assert {name: part["status"] for name, part in parts.items()} == {"determinism": "done", "train": "done"}
    assert all(check["verdict"] == "ok" for part in parts.values() for check in part["checks"])
    assert len(parts["determinism"]["checks"]) == 4 and len(parts["train"]["curves"]["bf16"]) == 4
    assert_well_formed((tmp_path / "report/report.md").read_text())
    gpu_check("train", out=tmp_path / "broken", code=1, **{**known, "TRAIN": "/bin/false"})
    assert [check["verdict"][:6] for check in parts_of(tmp_path / "broken")["train"]["checks"]] == ["FAILED"]


@pytest.mark.drawn(3, of="whole calls")
def test_a_part_without_time_is_left_and_resumed(tmp_path, known):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    said = gpu_check("determinism=3", out=first, code=gpu_report.UNFINISHED, **known)
    assert "left for the next call: needs 12 s" in said and "time ran out: call again" in said
    assert parts_of(first)["determinism"]["status"] == "unfinished"
    verdicts = [check["verdict"] for check in parts_of(first)["determinism"]["checks"]]
    assert verdicts[:2] == ["left", "left"]
    gpu_check("determinism", out=second, code=0, **known, REPORT=str(first))
    assert parts_of(second)["determinism"]["status"] == "done"
    broken = {**known, "TRAIN": "/bin/false"}            # a third call runs nothing
    assert "done in an earlier call" in gpu_check("determinism", out=third, code=0, **broken, REPORT=str(second))
    gpu_check("determinism", out=third, code=1, **broken, FRESH="1")


def test_parts_without_any_time_are_left_together(tmp_path, known):
    said = gpu_check("determinism", "train", out=tmp_path, code=gpu_report.UNFINISHED, **known, BUDGET="1")
    assert "no time is left for determinism train" in said
    assert ({name: part["status"] for name, part in parts_of(tmp_path).items()}
            == {"determinism": "unfinished", "train": "unfinished"})


@pytest.mark.drawn(3, of="whole calls")
def test_a_check_is_stopped_when_the_call_ends(tmp_path, known):
    """A check that is stopped because the call ends has not failed."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    said = gpu_check("determinism=20", out=tmp_path / "out", code=gpu_report.UNFINISHED,
                     **{**known, "TRAIN": str(slow)})
    assert "at the end of this call's time" in said
    assert [check["verdict"] for check in parts_of(tmp_path / "out")["determinism"]["checks"]] == ["left"] * 4


def test_without_wgmma_once_it_has_failed(tmp_path, known):
    """Later parts, also of later calls, select the other kernels and say so."""
    out, seen, program = tmp_path / "out", tmp_path / "seen", tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "${{FLASH90-none}}" >>{seen}\nexec {trainer.TRAIN} "$@"\n')
    program.chmod(0o755)
    known["TRAIN"] = str(program)
    gpu_check("train", out=out, code=0, **known)
    assert set(seen.read_text().split()) == {"none"}
    seen.unlink()
    for words in ("begin", "tests"), ("check", "tests", "attention with wgmma and TMA", "FAILED (1)", "60", "hangs"):
        subprocess.run([sys.executable, ROOT / "dev/bench/gpu_report.py", out, *words], check=True,
                       env=dict(os.environ, GPU_CHECK_DEVICE="CPU"))
    assert "attention with wgmma and TMA failed" in gpu_check("train", out=out, code=0, FRESH="1", **known)
    assert set(seen.read_text().split()) == {"0"}


def test_training_text_without_shards(tmp_path):
    """Without shards and network there is still text to train on, the same each time."""
    for name in ("a", "b"):
        subprocess.run([sys.executable, ROOT / "dev/bench/gpu_text.py", tmp_path / name], check=True)
    a, b = (tmp_path / name / "text_train_000001.bin" for name in ("a", "b"))
    assert a.read_bytes() == b.read_bytes() and a.stat().st_size > 1e6
    out = tmp_path / "run"
    trainer.train(tmp_path / "a", "--model", "layers=1,heads=1,channels=8,ffn=8,vocab=256", "--steps", 2, "--out", out)
    assert len(trainer.metrics(out)) == 2


@pytest.mark.drawn(3, of="whole calls")
@pytest.mark.skipif(not (EMULATED.exists() and COLLECTIVE.exists() and shutil.which("mpirun")),
                    reason="make train_gpt2cu_on_cpu test_on_cpu, mpirun")
def test_several_ranks(tmp_path, known):
    gpu_check("several", out=tmp_path / "report", code=0, **{**known, "TRAIN": str(EMULATED)})
    checks = parts_of(tmp_path / "report")["several"]["checks"]
    assert [check["verdict"] for check in checks] == ["ok"] * 4
    assert [check["detail"] for check in checks[:2]] == ["2 processes are right"] * 2


@pytest.mark.drawn(3, of="whole calls")
@pytest.mark.skipif(not (EMULATED.exists() and EVALUATOR.exists()),
                    reason="make train_gpt2cu_on_cpu eval_gpt2cu_on_cpu")
def test_evaluation_part(tmp_path, known):
    gpu_check("evaluation", out=tmp_path / "report", code=0, timeout=600, **{**known, "TRAIN": str(EMULATED)})
    part = parts_of(tmp_path / "report")["evaluation"]
    assert [(check["name"], check["verdict"]) for check in part["checks"]] == [("the same results as eval_gpt2", "ok"),
                                                                               ("evaluation", "ok")]
    assert re.match(r"[1-9]\d* passed", part["checks"][0]["detail"]) and len(part["records"]) == 6
    report = (tmp_path / "report/report.md").read_text()
    assert_well_formed(report)
    assert report.count(gpu_report.MISSING) == 24         # a dry run measures nothing


# ---- the rehearsal

TRAVELS_BYTES, FILES_BACK, FILE_BYTES = 64 << 20, 8, 16 << 20


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def edit(root, name):
    """Changes the file's contents, with a time before that of every object."""
    (root / name).write_text((root / name).read_text() + "\n// rehearsed\n")
    os.utime(root / name, (1e9, 1e9))


@pytest.mark.skipif(os.environ.get("GPU_REHEARSAL") != "1", reason="GPU_REHEARSAL=1: minutes")
def test_rehearsal(tmp_path):
    """Repeats calls, as on a machine that is rented for minutes, until nothing is left: with a copy without .git whose
    files are older than the objects, an OUT that starts empty, and a report that the caller carries from call to call.
    Prints the seconds of each part."""
    root, out, carried = tmp_path / "tree", tmp_path / "out", tmp_path / "tree/build/gpu_check"
    budget = int(os.environ.get("GPU_REHEARSAL_BUDGET", 570))
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.strip("\0").split("\0"):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
            os.utime(root / name, (1e9, 1e9))
    for name in (".venv", ".cuda"):
        if (ROOT / name).exists():
            (root / name).symlink_to((ROOT / name).resolve())
    calls = []

    def call(*parts, code):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        environment = {**os.environ, "OUT": str(out), "DEVICE": "cpu", "PROGRAMS": "build/rehearsal",
                       "BUDGET": str(budget), "VOCAB": "256"}
        start = time.monotonic()
        result = subprocess.run([root / "scripts/gpu_check.sh", *parts], capture_output=True, text=True,
                                env=environment)
        seconds = time.monotonic() - start
        calls.append(seconds)
        print(f"\n--- call {len(calls)}: {' '.join(parts) or 'all parts'}: {seconds:.0f} s, exit code "
              f"{result.returncode}", flush=True)
        print(result.stdout + result.stderr, flush=True)
        assert result.returncode in code and (seconds <= budget + 30 or parts == ("pack",))
        assert (len(list(out.iterdir())) <= FILES_BACK
                and all(path.stat().st_size <= FILE_BYTES for path in out.iterdir()))
        if parts != ("pack",):
            shutil.copytree(out, carried, dirs_exist_ok=True)
        return result.returncode, result.stdout

    call("pack", code=(0, 1))                             # 1: something cannot be downloaded here
    assert size_of(root) - size_of(root / "build") + size_of(root / "build/deps") <= TRAVELS_BYTES
    while call(code=(0, gpu_report.UNFINISHED))[0]:
        assert len(calls) < 20
    parts = parts_of(carried)
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(words_of("ALL"), "done")
    assert all(part["seconds"] <= budget for part in parts.values())
    for path in root.rglob("*"):                          # copied again, with newer times
        if "build" not in path.parts and path.is_file():
            os.utime(path)
    assert "nothing to do" in call("build", code=(0,))[1]
    edit(root, "dev/tests/test_matmul.cu")
    said = call("build", "determinism", code=(0,))[1]
    assert "rebuilding them" in said and "done in an earlier call" in said
    print("\n".join(f"{name:12} {part['seconds']:5.0f} s" for name, part in parts.items()))


# ---- what the groups of the part `tests` cover

def words_of(name):
    return re.search(rf'^{name}="([^"]*)"$', (ROOT / "scripts/gpu_check.sh").read_text(), re.M)[1].split()


def test_every_kernel_is_in_one_group():
    cases = re.findall(r'case_begins\("(\w+)', (ROOT / "dev/tests/test_kernels.cu").read_text())
    assert set(cases) == set(words_of("KERNELS"))


def test_every_matmul_is_in_one_group():
    source = (ROOT / "dev/tests/test_matmul.cu").read_text()
    assert set(re.findall(r'\{"(\w+)",\s+test_', source)) == {*words_of("PRODUCTS"), "unaligned", "orders", "refused"}


def test_every_model_is_in_one_group():
    lines = (ROOT / "dev/reference/fixtures/cases.txt").read_text().splitlines()
    lines = [line for line in lines if "kind=model" in line or "kind=attention" in line]
    assert len(lines) > 600
    assert [line for line in lines if sum(word in line for word in words_of("MODELS")) != 1] == []


# ---- runs side by side

def write_run(folder, losses, tensors=b"tensors"):
    (folder / "ckpt/step-00000001").mkdir(parents=True)
    lines = [json.dumps({"step": i + 1, "loss": loss}) + "\n" for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for name in ("model.safetensors", "optimizer.safetensors"):
        (folder / "ckpt/step-00000001" / name).write_bytes(tensors)
    return folder


def test_same_and_different_runs(tmp_path):
    a = write_run(tmp_path / "a", [2.0, 1.0])
    assert gpu_report.same(a, write_run(tmp_path / "b", [2.0, 1.0]))[0]
    assert not gpu_report.same(a, write_run(tmp_path / "c", [2.0, 1.0000001]))[0]
    assert not gpu_report.same(a, write_run(tmp_path / "d", [2.0]))[0]
    assert not gpu_report.same(a, write_run(tmp_path / "e", [2.0, 1.0], b"others"))[0]


@pytest.mark.parametrize("losses, fine", [([2.0, 1.000009], True), ([2.0, 1.00002], False), ([2.0, math.nan], False),
                                          ([2.0], False), ([], False)])
def test_close(tmp_path, losses, fine):
    a = write_run(tmp_path / "a", [2.0, 1.0])
    assert gpu_report.close(1e-5, a, write_run(tmp_path / "b", losses))[0] == fine


@pytest.mark.parametrize("losses, fine",
                         [([2.0, 1.000005], True), ([2.0, 1.00005], False), ([2.0, math.nan], False), ([2.0], False)])
def test_curves(tmp_path, losses, fine):
    runs = [write_run(tmp_path / "fp32_on_cpu", [2.0, 1.0]), write_run(tmp_path / "fp32", losses)]
    assert gpu_report.curves(gpu_report.Report(tmp_path), "train", runs)[0] == fine


@pytest.mark.parametrize("dtype, early, late, fine", [
    ("fp32", 8e-6, 8e-3, True), ("fp32", 2e-5, 0.0, False), ("fp32", 0.0, 0.02, False),
    ("bf16", 1e-3, 0.05, True), ("bf16", 3e-3, 0.0, False), ("bf16", 0.0, 0.07, False)])
def test_the_bounds_of_curves(tmp_path, dtype, early, late, fine):
    """The first ten steps have a tighter bound than the later ones, and float32 tighter ones than bf16."""
    runs = [write_run(tmp_path / "fp32_on_cpu", [2.0] * 12),
            write_run(tmp_path / dtype, [2.0] * 9 + [2.0 + early, 2.0 + late, 2.0])]
    assert gpu_report.curves(gpu_report.Report(tmp_path), "train", runs)[0] == fine


# ---- what a part depends on

def prerequisites():
    """The files of the tree from which the objects of the CUDA programs were compiled; if none are built here, those of
    the trainer."""
    patterns = ("on_cpu/**/*.d", "*.d", "attention/*.d", "model/*.d", "run/*.d", "runtime/*.d")
    compiled = [path for pattern in patterns for path in (ROOT / "build").glob(pattern)]
    text = "\n".join(path.read_text() for path in compiled)
    if not list(ROOT.glob("build/on_cpu/*.d")):
        words = [*os.environ.get("CXX", "g++").split(), "-std=c++17", "-MM", "-MG", "-I.", "-Idev/cuda_on_cpu"]
        words += ["-x", "c++", "train_gpt2.cu"]
        text += subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {word.removesuffix(":") for word in text.replace("\\\n", " ").split()}
    return {ROOT / name for name in names if not name.startswith(("/", "build/")) and (ROOT / name).is_file()}


def test_the_version_covers_every_source():
    wanted, covered = prerequisites(), set(gpu_report.sources("build"))
    assert {"attention", "cuda"} <= {path.parent.name for path in wanted} and len(wanted) > 30
    assert {str(path.relative_to(ROOT)) for path in wanted - covered} == set()
    flash_so = ROOT / "dev/tests/flash_so.cu"
    users = ("attention", "shapes", "others", "tests", "sanitizer")
    assert flash_so.exists() and all(flash_so in gpu_report.sources(part) for part in users)


def test_the_version_covers_the_recipes(tmp_path, monkeypatch):
    """A change of a part's recipe changes only the version of that part. Every recipe is found."""
    assert [name for names in gpu_report.PART_RECIPES.values() for name in names if not gpu_report.recipe(name)] == []
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/gpu_check.sh", tmp_path / "scripts")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)

    def changed_by(old, new):
        versions = [gpu_report.version(part) for part in gpu_report.PART_SOURCES | gpu_report.PART_RECIPES]
        script = tmp_path / "scripts/gpu_check.sh"
        assert old in script.read_text()
        script.write_text(script.read_text().replace(old, new))
        parts = gpu_report.PART_SOURCES | gpu_report.PART_RECIPES
        return {part for part, before in zip(parts, versions) if gpu_report.version(part) != before}

    assert changed_by("--batch 8 --seq-len 256", "--batch 4 --seq-len 256") == {"train", "determinism"}
    assert changed_by("bf16 lssar 96 64 64", "bf16 lssar 97 64 64") == {"sanitizer"}
    assert changed_by("--error-exitcode 9", "") == {"sanitizer"}
    assert changed_by("# Tests and times", "# Times and tests") == set()


# ---- verdicts

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


def test_records_of_other_sources_or_devices_do_not_count(tmp_path, monkeypatch):
    """This also works without git, because the version is a hash of the sources' contents."""
    for name in ("Makefile", "attention/flash.cuh", "dev/bench/attention_gpu.py", "doc/gpu.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)

    def states():
        return [gpu_report.Report(tmp_path / "out").state(part) for part in ("attention", "train")]

    report = gpu_report.Report(tmp_path / "out")
    for part in ("attention", "train"):
        report.begin(part)
        report.record(part, {"attn": "ssmax"}, both_ms=[1.0])
        report.end(part)
    report.save()
    assert states() == ["done", "done"]
    (tmp_path / "doc/gpu.md").write_text("two")
    assert states() == ["done", "done"]
    (tmp_path / "dev/bench/attention_gpu.py").write_text("two")
    assert states() == ["new", "done"]
    (tmp_path / "attention/flash.cuh").write_text("two")
    assert states() == ["new", "new"]
    again = gpu_report.Report(tmp_path / "out")
    again.begin("train")
    assert again.part("train")["records"] == []
    (tmp_path / "attention/flash.cuh").write_text("one")
    assert states()[1] == "done"
    monkeypatch.setenv("GPU_CHECK_DEVICE", "another GPU")
    assert states()[1] == "new"


@pytest.mark.parametrize("verdicts, status, code", [(["ok", "info"], "done", 0), (["ok", "left"], "unfinished", 75),
                                                    (["left", "FAILED (1)"], "failed", 1)])
def test_the_final_state_of_a_part(tmp_path, verdicts, status, code):
    report = gpu_report.Report(tmp_path)
    report.begin("tests")
    for i, verdict in enumerate(verdicts):
        gpu_report.add_check(report, "tests", str(i), verdict, 1, "")
    assert report.part("tests")["status"] == "unfinished"           # what a killed call leaves behind
    report.end("tests")
    assert report.part("tests")["status"] == status and gpu_report.exit_code(report, []) == code
    report.save()
    again = gpu_report.Report(tmp_path)
    again.begin("tests")
    assert [c["verdict"] for c in again.part("tests")["checks"]] == [v for v in verdicts if v in ("ok", "info")]


def test_a_record_replaces_the_earlier_one(tmp_path):
    report = gpu_report.Report(tmp_path)
    report.begin("others")
    for ms in (1.0, 2.0):
        report.record("others", {"attn": "ssmax", "T": 1024, "way": "ours"}, both_ms=[ms])
    report.save()
    again = gpu_report.Report(tmp_path)
    again.begin("others")
    assert [r["both_ms"] for r in again.part("others")["records"]] == [[2.0]]


# ---- timings of attention

def softmax_with_sum(q, k, v):
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return torch.softmax(scores, -1).to(v.dtype) @ v, torch.logsumexp(scores, -1)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", reference.PRESETS)
def test_pytorchs_methods_compute_the_normalizer(name):
    """Those are the formula, SDPA, and FlexAttention with its output and log-sum-exp."""
    case = attention_gpu.Case(name, 21, 1)
    judge = attention_gpu.Judge(case)
    for way in attention_gpu.way_names(name):
        if way != "flex":
            assert judge.error(attention_gpu.Torch(case, way)) <= judge.allowed, way
    if "flex" in attention_gpu.way_names(name):
        q, k, v, _ = case.heads(0)
        out = attention_gpu.by_softmax(softmax_with_sum, q, k, v, case, case.scalars)
        assert attention_gpu.distance([out[:1]], judge.expected[:1]) <= judge.allowed


def test_a_wrong_method_is_detected():
    case = attention_gpu.Case("softmax", 21, 1)
    judge, right = attention_gpu.Judge(case), attention_gpu.Torch(case, "compile").both(0)
    assert attention_gpu.distance([x[:1] for x in right], judge.expected) <= judge.allowed
    for i, factor in ((0, 1.1), (2, 0.9), (3, math.nan)):
        spoilt = [x[:1] * (factor if j == i else 1) for j, x in enumerate(right)]
        assert not attention_gpu.distance(spoilt, judge.expected) <= judge.allowed


@pytest.mark.skipif(not FLASH.exists(), reason="make build/on_cpu/flash.so")
def test_our_kernels_by_their_addresses(tmp_path, monkeypatch):
    words = [str(tmp_path), "attention", "--dry-run", "--sweep", "17", "--lengths", "9",
             "--attn", "ssmax-fixed,gelu-l1,softpick"]
    monkeypatch.setattr(sys, "argv", ["attention_gpu.py", *words])
    assert attention_gpu.main() == 0
    records = parts_of(tmp_path)["attention"]["records"]
    ways = (*attention_gpu.OURS, "sdpa-flash", "sdpa-cudnn")
    assert {(r["attn"], r["way"]) for r in records} == {*(("softmax", way) for way in ways), ("ssmax-fixed", "ours"),
                                                        ("gelu-l1", "ours"), ("softpick", "ours")}
    assert not any(r["wrong"] for r in records)
    assert_well_formed((tmp_path / "report.md").read_text())


@pytest.mark.drawn(4)
@pytest.mark.parametrize("layout", attention_gpu.LAYOUTS)
@pytest.mark.parametrize("name", attention_gpu.SHAPES_ATTN)
def test_methods_in_each_layout(name, layout):
    """Ours and PyTorch's agree with the formula, and a wrong gradient of k does not."""
    layout = attention_gpu.LAYOUTS[layout]
    case = attention_gpu.Case(name, 21, 1, layout)
    judge = attention_gpu.Judge(case)
    ways = ["compile", *(attention_gpu.sdpa_ways(layout) if name == "softmax" else ())]
    methods = [attention_gpu.Torch(case, way) for way in ways]
    if FLASH.exists():
        methods.append(attention_gpu.Ours(case, attention_gpu.Flash(FLASH)))
    for method in methods:
        assert judge.error(method) <= judge.allowed
        right = [attention_gpu.some(x, case) for x in method.both(0)]
        assert not attention_gpu.distance([*right[:2], -right[2], right[3]], judge.expected) <= judge.allowed


@pytest.mark.skipif(not FLASH.exists(), reason="make build/on_cpu/flash.so")
def test_the_table_of_layouts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["attention_gpu.py", str(tmp_path), "shapes", "--dry-run", "--lengths", "9"])
    monkeypatch.setattr(attention_gpu, "SHAPES_ATTN", ("softmax", "sigmoid"))
    assert attention_gpu.main() == 0
    records = parts_of(tmp_path)["shapes"]["records"]
    assert len(records) == 2 * len(attention_gpu.LAYOUTS) + 3 * 2 + 1 and not any(r["wrong"] for r in records)
    rows = parts_of(tmp_path)["shapes"]["tables"]["Other layouts, ms"]["rows"]
    assert [row[:3] for row in rows] == [[layout, f"`{name}`", "9"] for layout in attention_gpu.LAYOUTS
                                         for name in ("softmax", "sigmoid")]
    assert rows[0][6].startswith("sdpa-flash ") and rows[1][6] == ""
    assert_well_formed((tmp_path / "report.md").read_text())


@pytest.mark.parametrize("way, code", [("ours", gpu_report.FAILED), ("ours-mma", gpu_report.FAILED),
                                       ("flex", gpu_report.UNFINISHED)])
def test_attention_that_hangs_has_failed(tmp_path, monkeypatch, way, code):
    ended = []
    monkeypatch.setattr(attention_gpu, "LIMIT", 0.01)
    monkeypatch.setattr(attention_gpu.os, "_exit", ended.append)
    with attention_gpu.Watch(gpu_report.Report(tmp_path), "others", "ssmax", 4096) as watch:
        watch.way = way
        watch.timer.join(10)
    assert ended == [code]
    assert ([(r["way"], r["failed"]) for r in parts_of(tmp_path)["others"]["records"]]
            == [(way, "timed out after 0.1 s")])


# ncu's output around its table, and the beginning of each of its rows.
BEFORE_TABLE = '''==WARNING== Note: Running with unmodified GPU clocks.
==PROF== Connected to process 71 (train_gpt2cu)
step     2/2 | loss 10.94 | "quoted"
==PROF== Disconnected from process 71
"ID","Process ID","Process Name","Kernel Name","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"
'''
AFTER_TABLE = '''"99","71","train_gpt2cu","void rope_kernel(float *)","(132, 1, 1)","metrics","dram__bytes.sum","",""
train_gpt2cu: a warning, which took
  two lines
'''


def ncu_row(number, kernel, metric, unit, value):
    return (f'"{number}","71","train_gpt2cu","void {kernel}<64, 0>(FlashCall<__nv_bfloat16>, float)","(132, 1, 1)",'
            f'"Command line profiler metrics","{metric}","{unit}","{value:,}"\n')


def ncu_text(*launches):
    """The output of `ncu --csv` for (kernel, {metric: (value, unit)})."""
    return BEFORE_TABLE + "".join(ncu_row(i, kernel, metric, unit, value) for i, (kernel, values) in enumerate(launches)
                                  for metric, (value, unit) in values.items()) + AFTER_TABLE


NO_PERMISSION = ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
                 "Counters")


# ---- a step by kernel

def traffic(us, read, written):
    return {"gpu__time_duration.sum": (1000 * us, "ns"), "dram__bytes_read.sum": (read, "byte"),
            "dram__bytes_write.sum": (written, "byte")}


# The end of one step, two whole steps, of which the second is the one to show, and the beginning of another.
LAUNCHES = [("squares_kernel", traffic(900, 9, 9)), ("adamw_kernel", traffic(900, 9, 9)),
            ("flash90_forward_kernel", traffic(700, 7, 7)), ("adamw_kernel", traffic(700, 7, 7)),
            ("nvjet_sm90_tst_256x128_h_bz_coopA_NNT", traffic(60, 80_000_000, 40_000_000)),
            ("flash90_forward_kernel", traffic(100, 70_000_000, 30_000_000)),
            ("cublasLt::splitKreduce_kernel", traffic(40, 20_000_000, 0)),
            ("flash90_forward_kernel", traffic(150, 70_000_000, 30_000_000)),
            ("adamw_kernel", {"gpu__time_duration.sum": (1.0, "ms"), "dram__bytes_read.sum": (2.5, "Gbyte"),
                              "dram__bytes_write.sum": (1500, "Mbyte")}),
            ("embedding_forward_kernel", traffic(500, 5, 5))]


def run_step(folder, monkeypatch, text):
    commands = []
    monkeypatch.setattr(gpu_kernels, "observe", lambda *words: commands.append(words) or text)
    code = gpu_kernels.main_step(folder, "./train_gpt2cu")
    assert [words[1][0] for words in commands] == ["./train_gpt2cu"] and "--profile" in commands[0][1]
    return code


def test_a_step_by_kernel(tmp_path, monkeypatch):
    """Exactly one step, from one launch of AdamW to the next; the largest row first; cuBLASLt's kernels in one row."""
    assert run_step(tmp_path, monkeypatch, ncu_text(*LAUNCHES)) == 0
    table, = parts_of(tmp_path)["counters"]["tables"].values()
    assert table["head"] == ["kernel", "launches", "ms per step", "GB read", "GB written", "TB/s"]
    assert table["rows"] == [["`adamw_kernel`", "1", "1.000", "2.50", "1.50", "4.00"],
                             ["`flash90_forward_kernel`", "2", "0.250", "0.14", "0.06", "0.80"],
                             ["matmuls (cuBLASLt)", "2", "0.100", "0.10", "0.04", "1.40"],
                             ["all", "5", "1.350", "2.74", "1.60", "3.21"]]
    assert_well_formed((tmp_path / "report.md").read_text())


def test_a_step_that_ncu_cannot_observe(tmp_path, monkeypatch):
    assert run_step(tmp_path, monkeypatch, NO_PERMISSION) == gpu_report.NO_GPU
    with pytest.raises(SystemExit, match="ncu saw 3 launches, 1 of them of adamw_kernel"):
        run_step(tmp_path, monkeypatch, ncu_text(*LAUNCHES[:3]))
    with pytest.raises(SystemExit, match="the program failed under ncu"):
        run_step(tmp_path, monkeypatch, "train_gpt2cu: out of memory\n==ERROR== The application returned an error code "
                                        "(4).\n==WARNING== No kernels were profiled.\n")


@pytest.mark.skipif(not FLASH.exists(), reason="make build/on_cpu/flash.so")
@pytest.mark.parametrize("words", ["bf16 softmax 65 64 64", "fp32 softmax-sink 33 48 48", "bf16 ssmax-pn 33 64 64",
                                   "bf16 lssar 33 128 192"])
def test_kernels_without_pytorch(words):
    said = subprocess.run([sys.executable, ROOT / "dev/bench/gpu_kernels.py", "run", FLASH, *words.split()],
                          capture_output=True, text=True)
    assert said.returncode == 0 and "norm of out" in said.stdout, said.stdout + said.stderr


# ---- timings of the step

def test_step_and_memory(tmp_path, monkeypatch):
    ceilings = {"bytes": 1e12, "flops": 1e14, "undoes_rope": True, "name": "NVIDIA H200"}
    times = {"ms": [2.0], "peak_gb": 0.1, "reserved_gb": 0.2}
    monkeypatch.setattr(gpu_step, "run_torch",
                        lambda **task: dict(ceilings if task["variant"] == "ceilings" else times))
    for part in ("step", "memory"):
        monkeypatch.setattr(sys, "argv", ["gpu_step.py", str(tmp_path), part, "--dry-run", "--steps", "2",
                                          "--ours", str(trainer.TRAIN)])
        assert gpu_step.main() == 0
    parts = parts_of(tmp_path)
    assert all([r["variant"] for r in parts["step"]["records"]].count(name) == 1 for name in ("no graphs", "any order"))
    assert len(parts["step"]["records"]) == 8 and len(parts["memory"]["records"]) == 4
    head = parts["memory"]["tables"]["A step's memory, GB"]["head"]
    assert len(head) == 6 and not any("tok" in word for word in head)              # its times are not measurements
    assert all("used_gb" in r for r in parts["memory"]["records"] if r["variant"] == "ours")
    assert not any("used_gb" in r for r in parts["step"]["records"])    # nvidia-smi is not called while a step is timed
    assert set(gpu_step.floors("124M", 16, 1024, True)) <= set(parts["step"]["profile"]["phases"])
    assert_well_formed((tmp_path / "report.md").read_text())


def test_a_step_that_hangs_has_failed(tmp_path, monkeypatch):
    """If ours hangs, the part fails and names it; a case that the end of the call cuts off is left."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setattr(gpu_step, "run_torch", lambda **task: {"failed": "not here"})
    monkeypatch.setattr(gpu_step, "LIMIT", {"ours": 0.02})

    def call(folder, *flags):
        monkeypatch.setattr(sys, "argv", ["gpu_step.py", str(folder), "step", "--dry-run", "--ours", str(slow), *flags])
        code = gpu_step.main()
        return code, [r.get("failed") for r in parts_of(folder)["step"]["records"] if r["variant"] == "ours"]

    assert call(tmp_path / "a") == (gpu_report.FAILED, ["timed out after 0.2 s", "B = 16 failed"])
    monkeypatch.setattr(gpu_step, "LIMIT", {"ours": 10})
    assert call(tmp_path / "b", "--budget", "-8") == (gpu_report.UNFINISHED, [])


def test_pytorch_that_hangs_has_failed(tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setattr(gpu_step, "DRY", False)
    monkeypatch.setattr(gpu_step, "LIMIT", {"autocast": 0.2})
    monkeypatch.setattr(sys, "executable", str(slow))
    assert gpu_step.run_torch(end=time.monotonic() + 60, variant="autocast") == {"failed": "timed out after 0.2 s"}


def test_floors_name_the_trainers_phases():
    source = (ROOT / "run/profile.h").read_text()
    phases = set(re.findall(r'X\([A-Z_]+, +"([^"]+)"\)',
                            source[source.index("#define PHASES(X)"):source.index("PHASE_COUNT")]))
    assert {*gpu_step.floors("124M", 16, 1024, True), *gpu_step.PRODUCTS} <= phases


def test_the_largest_batch():
    """Memory is linear in the batch: what is free after the fixed part, divided by a sequence's share; at least 16."""
    fixed = 16 * gpu_step.parameters("124M") / 1e9
    found = gpu_step.largest_batch({"B": 16, "peak_gb": fixed + 0.016}, "124M", "autocast")
    assert found == int(0.97 * (4.0 - gpu_step.MARGIN_GB - fixed) / 0.001) // 8 * 8 or found == 16
    assert gpu_step.parameters("124M") == 123551232 + (50304 - 50257) * 768


# ---- timings of evaluation

def time_evaluation(folder, monkeypatch, *flags, evaluate=trainer.TRAIN.parent / "eval_gpt2"):
    """gpu_eval.py's exit code and records in a dry run with the programs for the CPU."""
    words = ["--dry-run", "--train", str(trainer.TRAIN), "--evaluate", str(evaluate), *flags]
    monkeypatch.setattr(sys, "argv", ["gpu_eval.py", str(folder), "evaluation", *words])
    code = gpu_eval.main()
    return code, parts_of(folder)["evaluation"]["records"]


def test_evaluation_is_timed_beside_the_trainer(tmp_path, monkeypatch):
    code, records = time_evaluation(tmp_path, monkeypatch)
    assert code == 0 and [(r["dtype"], r["case"]) for r in records] == [(dtype, case) for dtype in ("bf16", "fp32")
                                                                       for case in gpu_eval.CASES]
    assert all(r["tok_per_s"] > 0 and r["device"] == "cpu" for r in records)
    assert_well_formed((tmp_path / "report.md").read_text())
    assert time_evaluation(tmp_path, monkeypatch, evaluate="/bin/false") == (0, records)     # nothing is measured again


def test_an_evaluator_that_fails(tmp_path, monkeypatch):
    code, records = time_evaluation(tmp_path, monkeypatch, evaluate="/bin/false")
    assert code == gpu_report.FAILED
    assert ["exit code 1" in r.get("failed", "") for r in records] == [False, True, True] * 2


def test_evaluation_without_time_is_left(tmp_path, monkeypatch):
    assert time_evaluation(tmp_path, monkeypatch, "--budget", "-8") == (gpu_report.UNFINISHED, [])
    table, = parts_of(tmp_path)["evaluation"]["tables"].values()
    assert "forward bf16, evaluation bf16" in table["notes"][0]


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_model_in_pytorch(tied, monkeypatch):
    import cpu_step
    sizes = {**gpu_step.TINY["tiny"], "tied": tied}
    monkeypatch.setitem(gpu_step.TINY, "tiny", sizes)
    assert sum(p.numel() for p in cpu_step.torch_model()(8, **sizes).parameters()) == gpu_step.parameters("tiny")


def test_cases_that_do_not_fit_are_named(tmp_path, monkeypatch):
    """The phases come after our first case, and the largest batches last. If there is too little time to compile, only
    ours are measured."""
    order = []
    monkeypatch.setattr(gpu_step, "DRY", False)
    monkeypatch.setattr(gpu_step, "free_gb", lambda: 80.0)

    def measure(options, model, B, T, variant, steps):
        order.append((model, variant))
        return {"ms": [2.0], "peak_gb": 5.0, "tok_per_s": 1.0}

    monkeypatch.setattr(gpu_step, "measure", measure)
    monkeypatch.setattr(gpu_step, "phases", lambda report, options: order.append("phases"))

    def left(part, budget, folder):
        monkeypatch.setattr(sys, "argv", ["gpu_step.py", str(folder), part, "--budget", str(budget)])
        report = gpu_report.Report(folder)
        report.resume(part)
        return gpu_step.part_step(report, gpu_step.parse())

    assert left("step", 1000, tmp_path / "a") == []
    of = [("124M", variant) for variant in gpu_step.VARIANTS]
    assert order == [of[0], "phases", *of[1:], *of[:-2]]       # the last two only with B = 16
    order.clear()
    assert left("larger", 1000, tmp_path / "a") == [] and [model for model, _ in order] == ["162M"] * 6
    order.clear()
    found = left("step", 30, tmp_path / "b")
    assert found == [f"{variant} of 124M, batch {batch}"
                     for batch in ("16", "largest") for variant in ("autocast", "bf16")]
    assert order == [("124M", "ours"), "phases", ("124M", "no graphs"), ("124M", "any order"), ("124M", "ours")]


def test_pytorch_is_timed_by_the_hosts_clock(monkeypatch):
    """It times as many steps as requested, after skipping as many as ours does, each from one end to the next."""
    found = gpu_step.torch_steps({"variant": "autocast", "model": "tiny", "B": 2, "T": 16, "steps": 5, "uncounted": 3})
    assert len(found["ms"]) == 5 and all(ms > 0 for ms in found["ms"])

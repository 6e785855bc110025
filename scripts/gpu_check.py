#!/usr/bin/env python3
"""Tests and times the CUDA programs on a GPU, part by part. Each part adds a section to one report; a part that ran out
of time resumes in the next call. dev/notes/gpu_check.md has the commands for a quarter of an hour on a GPU.

    scripts/gpu_check.py [PART[=SECONDS]...]
    scripts/gpu_check.py --help

Without PART: all of these but pack and several, in this order. Repeat the call while the exit code is 75.
=SECONDS caps a part's time in this call. The second column is what a part takes on an H100 or H200.

{parts}

    BUDGET=N      seconds that this call may take (570). What does not fit is listed and left for the next call
    OUT=DIR       where report.json, report.md, log and loss.png go (build/gpu_check)
    REPORT=DIR    an earlier call's OUT, which this call continues (build/gpu_check)
    FRESH=1       repeats the named parts instead of resuming them
    DEPS=DIR      what pack has collected (build/deps)
    PROGRAMS=DIR  where the programs are built or unpacked (build/gpu_programs)
    GPUS=N        compute capability without its dot (this GPU's, or 90)
    DATA=DIR      shards to train on (data/shakespeare; without it, this project's own text)
    DEVICE=cpu    a dry run: the emulated programs, and PyTorch on the CPU, with tiny shapes

Exit codes: 0 everything is done and passed; 1 something failed, and the report says what; 2 wrong usage,
or OUT cannot be written; 75 time ran out: call again; 77 no GPU: nothing was measured.

Example: BUDGET=900 scripts/gpu_check.py probe build tests
See dev/notes/gpu_check.md.
"""
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "dev/bench"))
from lib import files
import gpu_programs
import gpu_report
from gpu_report import FAILED, NO_GPU, UNFINISHED

USAGE = 2
# In seconds. KILL_AFTER: from SIGTERM to SIGKILL for a program whose time is up. RESERVE: at the end of a call, for
# that and for the report.
KILL_AFTER, RESERVE = 5, 7
# How many checks that time nothing run side by side: 8, or as many as there are cores if that is fewer, but at least 2.
AT_ONCE = max(2, min(8, os.cpu_count() or 1))
LOG_BYTES = 8_000_000
RESULTS = ("report.json", "report.md", "log", "loss.png")       # what a call leaves in OUT


class Part(NamedTuple):
    name: str
    seconds: int           # that it takes on an H100 or H200
    gpus: int              # how many it needs
    needs: str             # programs: those that pack or make has built; mpi: with MPI and NCCL; text to train on;
                           # Python packages; tools
    run: Callable          # f(call)
    what: str              # for --help


def say(text):
    print(text, flush=True)


def stop(code, text):
    print(f"gpu_check: {text}", file=sys.stderr)
    raise SystemExit(code)


def seconds_of(text, form):
    if not re.fullmatch(r"\d{1,6}", text):
        stop(USAGE, f"{text}: expected {form}, a whole number of at most six digits")
    return int(text)


# ---------------------------------------------------------------- checks

class Failed(Exception):
    """Ends a check with this exit code."""


class Job:
    """A check that runs: commands one after another, until its seconds are over."""

    def __init__(self, call, seconds):
        self.call, self.seconds, self.start, self.timed_out = call, seconds, time.monotonic(), False
        self.folder = tempfile.mkdtemp(dir=call.folder.name)       # for its runs
        self.file = tempfile.TemporaryFile("w+", errors="replace")

    def took(self):
        return time.monotonic() - self.start

    def say(self, text):
        print(text, file=self.file, flush=True)

    def run(self, *words, **environment):
        """Runs a command and returns what it prints; raises Failed unless its exit code is 0."""
        before = os.fstat(self.file.fileno()).st_size
        words = ["timeout", "-k", KILL_AFTER, f"{max(0.1, self.seconds - self.took()):.1f}", *words]
        process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=self.file,
                                   stderr=self.file, env={**os.environ, **environment})
        self.call.running.add(process)
        code = process.wait()
        self.call.running.discard(process)
        code = code if code >= 0 else 128 - code
        # A program that is killed for lack of memory also has 137, but ends sooner.
        self.timed_out = code == 124 or code == 137 and self.took() >= self.seconds
        if code:
            raise Failed(code)
        return os.pread(self.file.fileno(), 1 << 24, before).decode(errors="replace")

    def compare(self, compare, *calls):
        """Prints what compare(*words) finds for the words of each call; raises Failed unless all runs agree."""
        agree = []
        for words in calls:
            try:
                fine, detail = compare(*words)
            except OSError as error:
                fine, detail = False, f"a run is missing: {error.filename}"
            self.say(detail)
            agree.append(fine)
        if not all(agree):
            raise Failed(FAILED)

    def finish(self, work, words):
        """Runs work(job, *words), or a command. Returns its exit code and output."""
        code = 0
        try:
            work(self, *words) if callable(work) else self.run(work, *words)
        except Failed as failed:
            code = failed.args[0]
        except Exception as error:
            self.say(f"{type(error).__name__}: {error}")
            code = FAILED
        self.file.seek(0)
        text = self.file.read()
        self.file.close()
        shutil.rmtree(self.folder)
        return code, text


class Call:
    """One call: its settings, what this machine has, and the report that it continues."""

    def __init__(self, words):
        self.start, self.running, self.lock = time.monotonic(), set(), threading.RLock()
        setting = lambda name, default="": os.environ.get(name) or default
        self.dry, self.fresh = setting("DEVICE", "cuda") == "cpu", setting("FRESH") == "1"
        self.out, self.earlier = (Path(setting(name, "build/gpu_check")) for name in ("OUT", "REPORT"))
        self.wanted = [self.parse(word) for word in words] or [(part, None) for part in PARTS if part.name in ALL]
        self.named = bool(words)
        self.budget = seconds_of(setting("BUDGET", "570"), "BUDGET=SECONDS")
        self.parts, self.part, self.part_end = PARTS, None, self.budget - RESERVE
        self.checks, self.pool, self.folder = [], ThreadPoolExecutor(AT_ONCE), tempfile.TemporaryDirectory()
        self.deps = Path(setting("DEPS", "build/deps")).absolute()
        self.where, self.suffix = ("on_cpu", "cu_on_cpu") if self.dry else ("cuda", "cu")
        # A dry run uses the programs that `make` has built, unless PROGRAMS names other ones.
        self.build = setting("PROGRAMS", "build" if self.dry else "build/gpu_programs")
        self.bin = "." if self.build == "build" else self.build
        if self.build == "build" and any(part.name == "build" for part, _ in self.wanted):
            stop(USAGE, "build: make builds in the folder build; set PROGRAMS to another one")
        self.train, self.evaluate = (f"{self.bin}/{name}_gpt2{self.suffix}" for name in ("train", "eval"))
        self.tests, self.flash = f"{self.build}/{self.where}/tests", f"{self.build}/{self.where}/flash.so"

    @staticmethod
    def parse(word):
        """(part, seconds or None)"""
        name, _, seconds = word.partition("=")
        if name not in PART:
            stop(USAGE, f"{name}: no such part. The parts are: {' '.join(PART)}")
        return PART[name], seconds_of(seconds, "PART=SECONDS") if "=" in word else None

    def prepare(self):
        """Finds out what this machine has, and opens the report of an earlier call."""
        if self.reporting():
            self.use_deps()
            self.continue_report()
        os.environ.pop("GPU_CHECK_DEVICE", None)
        os.environ["GPU_CHECK_DEVICE"] = gpu_report.device()
        found = gpu_report.ask_gpu("compute_cap").splitlines() if os.environ["GPU_CHECK_DEVICE"] != "CPU" else []
        self.gpus, capability = len(found), found[0].replace(".", "") if found else ""
        self.architecture = os.environ.get("GPUS") or (capability if capability.isdecimal() else "90")
        pythons = (sys.executable, "python3", ".venv/bin/python")
        self.python = next((python for python in pythons if self.has_module("torch", python)), sys.executable)
        self.programs = gpu_programs.Programs(self)

    def reporting(self):
        """False if the only part is pack, which measures nothing."""
        return any(part.name != "pack" for part, _ in self.wanted)

    def use_deps(self):
        """Prefers what pack has collected to what is installed."""
        if self.deps.is_dir():
            for name, folder in (("CPATH", "include"), ("LIBRARY_PATH", "lib"), ("LD_LIBRARY_PATH", "lib")):
                os.environ[name] = ":".join(filter(None, (f"{self.deps}/{folder}", os.environ.get(name))))
            os.environ["PYTHONPATH"] = ":".join(filter(None, (os.environ.get("PYTHONPATH"), f"{self.deps}/python")))

    def continue_report(self):
        """Copies the report of an earlier call if this call writes to another folder."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            files.extend(self.out / "log").close()
        except OSError:
            stop(USAGE, f"OUT={self.out}: cannot be created or written to")
        if not (self.out / "report.json").exists():
            for name in filter(lambda name: (self.earlier / name).exists(), RESULTS):
                shutil.copy(self.earlier / name, self.out)

    def has_module(self, name, python=None):
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
        return gpu_programs.succeeds(python or self.python, "-c", code, name)

    def has_gpu(self):
        return self.dry or os.environ["GPU_CHECK_DEVICE"] != "CPU"

    def seconds(self):
        """Since this call began."""
        return time.monotonic() - self.start

    def left(self):
        """The seconds left for the current part."""
        return int(self.part_end - self.seconds())

    def read(self):
        return gpu_report.Report(self.out)

    @contextmanager
    def report(self):
        """The report, to change it: read again each time, because the programs that measure also write it."""
        with self.lock:
            report = self.read()
            try:
                yield report
            finally:            # a comparison that fails has added its table
                report.save()

    # ------------------------------------------------------------ in a part

    def check(self, name, need, limit, work, *words, **how):
        """Runs a command or work(job, *words) for at most `limit` seconds, unless fewer than `need` seconds are left or
        it passed in an earlier call. Its verdict, time and last line of output go into the report, its whole output
        into the log. Exit code 75 means that it ran out of time. informational: nothing depends on it."""
        self.beside(name, need, limit, work, *words, margin=0, **how)
        self.wait()

    def beside(self, name, need, limit, work, *words, margin=KILL_AFTER + 5, informational=False):
        """The same, beside up to AT_ONCE - 1 other checks, until wait(). Each verdict is recorded as soon as a check
        ends, so that a killed call keeps what is done. Margin: all may have to be killed at the end, and recording
        their verdicts takes a few seconds."""
        if self.dry:            # its shapes are tiny, but its machine may be slow
            need, limit = need // 6, 3600

        def attempt():
            if name in self.passed:
                say(f"  {name}: passed in an earlier call")
            elif self.left() < need + margin:
                self.add(name, "left", f"needs {need + margin} s, but only {self.left()} s are left")
            else:
                self.attempt(Job(self, min(self.left() - margin, limit)), name, limit, informational, work, words)

        self.checks.append(self.pool.submit(attempt))

    def wait(self):
        while self.checks:
            try:
                self.checks.pop(0).result()
            except Exception:           # a defect of this program, not of what it checks
                self.failed(self.part)

    def failed(self, part):
        traceback.print_exc()
        self.add(part.name, "FAILED", traceback.format_exc().splitlines()[-1])

    def attempt(self, job, name, limit, informational, work, words):
        code, text = job.finish(work, words)
        took, lines = round(job.took()), [line for line in text.splitlines() if line.strip()]
        detail = lines[-1] if lines else ""
        shown = " ".join(map(str, [getattr(work, "__name__", work), *words]))
        with self.lock:
            with files.extend(self.out / "log") as log:
                log.write(f"\n== {self.part.name}: {name}: {shown}\n{text}")
            verdict = {0: "ok", NO_GPU: "info", UNFINISHED: "left"}.get(code, f"FAILED ({code})")
            if job.timed_out:
                verdict = f"FAILED (timed out after {limit} s)"
            if job.timed_out and job.seconds < limit:
                verdict, detail = "left", f"stopped after {job.seconds:.0f} s, at the end of this call's time"
            elif informational and code:
                verdict = "info"
            self.add(name, verdict, detail, took)
            if code and verdict != "left":
                say("\n".join(f"    | {line}" for line in text.splitlines()[-25:]))

    def add(self, name, verdict, detail, seconds=0):
        """Records a verdict: ok, info, left (for the next call) or FAILED."""
        with self.report() as report:
            gpu_report.add_check(report, self.part.name, name, verdict, seconds, detail)
        say(f"  {name}: {verdict}, {seconds} s" + (f": {detail[:140]}" if detail else ""))

    def fact(self, *lines):
        """Adds lines to the part's section of the report."""
        with self.report() as report:
            gpu_report.add_facts(report, self.part.name, *lines)
        say("\n".join(f"  {line}" for line in lines))

    # ------------------------------------------------------------ the parts of a call

    def run_part(self, part, seconds=None):
        begun, self.part = self.seconds(), part
        say(f"== {part.name}")
        if part.name == "pack":
            return part.run(self)
        if self.fresh or part.name in ("probe", "build"):       # an earlier call may have been on another machine
            with self.report() as report:
                report.parts.pop(part.name, None)
        state = self.read().state(part.name)
        if not self.dry and self.gpus < part.gpus:
            lack = f"not measured: {'no GPU' if self.gpus == 0 else f'fewer than {part.gpus} GPUs'}"
            say(f"gpu_check: {part.name}: {lack}")
            return self.close(part, begun, lack)
        if state == "done" or state == "failed" and not self.named:
            return say(f"  {state} in an earlier call (FRESH=1 scripts/gpu_check.py {part.name} repeats it)")
        if {"programs", "mpi"} & set(part.needs.split()):
            self.build_for(part)
        self.part, self.part_end = part, self.budget - RESERVE
        if seconds is not None:
            self.part_end = min(self.part_end, begun + seconds)
        with self.report() as report:
            report.begin(part.name)
            self.passed = report.passed(part.name)
        if self.dry:
            self.fact("a dry run on the CPU, which measures nothing")
        avoid_wgmma(self)
        try:
            if self.provides(part):
                part.run(self)
        except Exception:               # the other parts go on
            self.failed(part)
        self.wait()
        self.close(part, begun, "" if part.name != "probe" or self.has_gpu() else "not measured: no GPU")

    def close(self, part, begun, status=""):
        took = round(self.seconds() - begun)
        with self.report() as report:
            if status:
                report.begin(part.name)
            report.part(part.name)["seconds"] += took
            report.end(part.name, status)
        say(f"  {part.name}: {took} s")

    def provides(self, part):
        """Whether what the part needs is there."""
        for need in part.needs.split():
            if need in ("programs", "mpi"):
                if not self.has_programs():
                    failed = self.read().state("build") == "failed"
                    self.add("programs", *(("FAILED", "the part build failed") if failed
                                           else ("left", "the build is unfinished")))
                    return False
            elif need == "text":
                self.data = self.text()
            elif not self.dry and not (shutil.which if need in gpu_programs.TOOLS else self.has_module)(need):
                self.add(need, "FAILED", f"{need} is missing: {part.name} cannot run")
                return False
        return True

    def has_programs(self):
        return self.dry and self.build == "build" or self.programs.is_built()

    def build_for(self, part):
        """Builds the programs, which a fresh machine lacks."""
        if not self.has_programs():
            say(f"{part.name} needs the programs")
            self.run_part(PART["build"])
        if self.programs.are_packed():
            self.programs.find_cublas()

    def run(self):
        for i, (part, seconds) in enumerate(self.wanted):
            # A part takes a second or more even to say that there is no time.
            if self.budget - self.seconds() < RESERVE + 3 and part.name != "pack":
                names = [part.name for part, _ in self.wanted[i:]]
                with self.report() as report:
                    report.postpone(*names)
                say(f"gpu_check: no time is left for {' '.join(names)}")
                break
            self.run_part(part, seconds)
            if part.name == "probe" and self.wanted[i + 1:]:
                if not self.has_gpu():
                    stop(NO_GPU, "there is no GPU. The other parts were not started")
                if self.read().state("probe") == "failed":
                    stop(FAILED, "this machine lacks what the build needs: see above. The other parts were not started")
        return self.end() if self.reporting() else 0

    def end(self):
        log = self.out / "log"
        if log.stat().st_size > LOG_BYTES:
            files.replace(log, files.read(log, None)[-LOG_BYTES:])
        report = self.read()
        code = gpu_report.exit_code(report, [part.name for part, _ in self.wanted if part.name != "pack"])
        say(gpu_report.bounds_text(report.parts) + "\n\n" + gpu_report.summary(report.parts))
        say(f"gpu_check: {self.out}/report.md; {self.seconds():.0f} s of {self.budget}")
        if code == UNFINISHED:
            say(f"gpu_check: time ran out: call again to continue, with the report in {self.earlier} or REPORT=DIR")
        return code

    # ------------------------------------------------------------ text to train on

    def text(self, packed=True):
        """The folder of the shards to train on; in a dry run, whose vocabulary has 256 tokens, this project's text."""
        wanted = os.environ.get("DATA")
        if wanted and not shards(wanted):
            stop(USAGE, f"DATA={wanted}: no *_train_*.bin in this folder")
        folders = [wanted, self.deps / "text" if packed else None, "data/shakespeare"]
        found = [Path(folder) for folder in folders if folder and shards(folder) and not self.dry]
        if not found:
            found = [Path("build/gpu_text")]
            gpu_programs.write_own_text(found[0])
        return found[0]

    def train_on_cpu(self, folder):
        """Trains on pack's text; returns the exit code."""
        return Job(self, 3600).finish(train_on_cpu, [folder, self.deps / "text"])[0]

    def has_packed_curve(self, data):
        """Whether pack has the CPU's losses on this text with this recipe."""
        path = self.deps / "fp32_on_cpu/recipe"
        return path.exists() and files.read(path, files.JSON).decode() == curve_of(self, data)


def shards(folder):
    return sorted(Path(folder).glob("*_train_*.bin"))


# ---------------------------------------------------------------- tests

# Groups of the model's cases: each case has exactly one of these words.
MODELS = ("tied_v97 tied_v50257 _llama_ _gau_ _h4_kv2_T _kv1_d24 _qk_norm_T _bias_T _gate_T layers_ _d48 _d64 "
          "_d128").split()
# Sizes that the trainer never uses: the library's answers are only informational.
NOT_NEEDED = ("unaligned",)
WGMMA = "attention with wgmma and TMA"


def kernel_groups():
    """The groups of test_kernels; wrappers, which all kernels use, first."""
    text = "".join((ROOT / "dev/tests" / name).read_text() for name in ("hopper_wrappers.cuh", "test_kernels.cu"))
    return list(dict.fromkeys(re.findall(r'case_begins\("(\w+)', text)))


def matmul_groups():
    return re.findall(r'\{"(\w+)",\s+test_', (ROOT / "dev/tests/test_matmul.cu").read_text())


def part_tests(call):
    """Every group runs in a process of its own, so that a kernel that crashes ends only its group."""
    first, *others = kernel_groups()
    call.check(f"kernels: {first}", 10, 90, f"{call.tests}/test_kernels", first)
    # Attention's kernels for compute capability 9.0 come before everything that uses them: if they hang, each check
    # would take all of its time. If they fail, all that follows runs with the kernels for 8.0, in later calls too.
    can_test = call.has_module("torch") and call.has_module("pytest")
    if call.architecture == "90" and can_test:
        call.check(WGMMA, 30, 60, test_flash, "0", "-k", "kinds and bf16 and not sm80")
        avoid_wgmma(call)
    for group in others:
        call.beside(f"kernels: {group}", 10, 90, f"{call.tests}/test_kernels", group)
    for group in sorted(matmul_groups(), key=NOT_NEEDED.__contains__):
        name = f"cuBLASLt, not needed: {group}" if group in NOT_NEEDED else f"cuBLASLt: {group}"
        call.beside(name, 10, 60, f"{call.tests}/test_matmul", group, informational=group in NOT_NEEDED)
    for group in ["softmax_tied_v97_T33"] if call.dry else MODELS:
        call.beside(f"the model: {group}", 10, 120, f"{call.bin}/test_gpt2{call.suffix}", group)
    call.wait()
    if not can_test:
        return call.add("PyTorch or pytest", "FAILED", "is missing: attention is not tested")
    call.check("attention, a selection", 25, 180, test_flash, "0")
    if not call.dry:
        call.check("attention, every normalizer", 25, 300, test_flash, "1")


def test_flash(job, every, *flags):
    run_pytest(job, "dev/tests/test_flash.py", *flags, FLASH_ALL=every, FLASH_SO=os.path.abspath(job.call.flash))


def avoid_wgmma(call):
    if call.read().failed("tests", WGMMA):
        os.environ["FLASH90"] = "0"
        call.fact(f"with FLASH90=0, because {WGMMA} failed: attention runs with mma.sync")


def run_pytest(job, *words, **environment):
    call, flags = job.call, ["-q", "-p", "no:cacheprovider", "--maxfail=15"]
    if call.has_module("xdist"):
        flags += ["-n", 2 if call.dry else (os.cpu_count() * 3 + 3) // 4, "--max-worker-restart=15"]
    if call.has_module("pytest_timeout"):
        flags += ["--timeout=60", "--timeout-method=thread"]
    job.run(call.python, "-m", "pytest", *flags, *words, OMP_NUM_THREADS="1", **environment)


# ---------------------------------------------------------------- runs on text

def recipe(call):
    """The same small model for all runs: heads of 64, 2 M parameters plus the embedding."""
    if call.dry:
        return "--model layers=1,heads=2,channels=96,ffn=64,vocab=256 --batch 2 --seq-len 16 --warmup 2 --lr 1e-3"
    return "--model layers=4,heads=4,channels=256,ffn=688 --batch 8 --seq-len 256 --warmup 20 --lr 3e-4"


def steps_of(call, steps):
    return 4 if call.dry else steps


def train(job, out, steps, *flags, program=None, data=None):
    job.run(*(program or [job.call.train]), "--train-data", f"{data or job.call.data}/*_train_*.bin",
            *recipe(job.call).split(), "--steps", steps_of(job.call, steps), "--sample-every", 0, "--val-every", 0,
            "--ckpt-every", 0, "--out", out, *flags)


CURVE_STEPS = 120


def curve_of(call, data):
    """Identifies a recipe and its text."""
    digest = hashlib.sha256(b"".join(files.read(path, None) for path in shards(data)))
    return f"{recipe(call)} --steps {steps_of(call, CURVE_STEPS)}\n{digest.hexdigest()}\n"


def train_on_cpu(job, out, data):
    """Records beside the run which recipe and text it used."""
    train(job, out, CURVE_STEPS, "--dtype", "fp32", program=["./train_gpt2"], data=data)
    files.replace(Path(out) / "recipe", curve_of(job.call, data).encode())


def part_train(call):
    need, limit = 60, 480
    if call.has_packed_curve(call.data):
        need, limit = 15, 180
        call.fact("the CPU's losses are pack's")
    call.check("the same losses on CPU and GPU", need, limit, compare_curves)


def compare_curves(job):
    call, base, *others = job.call, *(f"{job.folder}/{name}" for name in ("fp32_on_cpu", "fp32", "bf16"))
    if call.has_packed_curve(call.data):
        shutil.copytree(call.deps / "fp32_on_cpu", base)
    else:
        if not call.dry:
            job.run("make", gpu_programs.jobs(), "train_gpt2")
        train_on_cpu(job, base, call.data)
    for out in others:
        train(job, out, CURVE_STEPS, "--dtype", Path(out).name)
    try:
        job.run(call.python, "scripts/plot.py", base, *others, "--out", call.out / "loss.png")
    except Failed:
        job.say("no picture")
    with call.report() as report:
        job.compare(gpu_report.curves, (report, "train", [base, *others]))


def part_determinism(call):
    agree = "two runs, one resumed half-way, and one without graphs agree"
    for dtype in ("bf16", "fp32"):
        call.beside(f"{dtype}: {agree}", 15, 200, same_runs, "--dtype", dtype)
    call.beside("bf16 with Muon and z-loss: the same", 15, 200, same_runs, "--dtype", "bf16", "--optimizer", "muon",
                "--z-loss", "1e-4")
    call.beside("bf16, --deterministic 0, and its matmul algorithms in two runs", 15, 90, free_runs)


def same_runs(job, *flags):
    flags = [*flags, "--shuffle", "--deterministic", 1]
    a, b, c, d = (f"{job.folder}/{name}" for name in "abcd")
    for out in (a, b):
        train(job, out, 30, *flags)
    train(job, c, 30, *flags, "--steps", steps_of(job.call, 30) // 2)
    train(job, c, 30, *flags, "--resume")
    train(job, d, 30, *flags, "--graphs", 0)
    job.compare(gpu_report.same, (a, b), (a, c), (a, d))


def free_runs(job):
    stored = ("--matmuls", f"{job.folder}/matmuls")
    free, *runs = (f"{job.folder}/{name}" for name in ("free", "stored", "again"))
    train(job, free, 30, "--dtype", "bf16", "--deterministic", 0, *stored)
    for out in runs:
        train(job, out, 30, "--dtype", "bf16", *stored)
    job.compare(gpu_report.same, runs)


# ---------------------------------------------------------------- several GPUs

BF16 = ("--dtype", "bf16", "--zero", 1, "--optimizer", "muon")


def part_several(call):
    collective = f"{call.tests}/test_collective"
    if call.build != "build":
        call.check("make test_collective", 30, 200, "make", gpu_programs.jobs(), *call.programs.flags, collective)
    for ranks in rank_counts(call):
        for word in ("sums", "bf16"):
            call.check(f"sums of {ranks} ranks: {word}", 15, 60, "scripts/launch.sh", ranks, collective, word)
        for zero in (0, 1):
            call.check(f"losses of {ranks} ranks, --zero {zero}", 30, 240, several_beside_one, ranks, 1e-5,
                       "--dtype", "fp32", "--zero", zero)
        call.check(f"losses of {ranks} ranks in bf16 with ZeRO-1 and Muon", 30, 240, several_beside_one, ranks, 5e-3,
                   *BF16)
        call.check(f"{ranks} ranks twice: the same bits", 30, 240, several_twice, ranks)
    call.check("a killed rank ends the job, which resumes", 30, 240, kill_a_rank, rank_counts(call)[-1])
    for model in SCALED:
        call.check(f"scaling of {model}", 120, 560, scale, model)


def rank_counts(call):
    return [ranks for ranks in (2, 4, 8) if ranks <= (4 if call.dry else call.gpus)]


def train_several(job, ranks, out, steps, *flags):
    train(job, out, steps, *flags, program=["scripts/launch.sh", ranks, job.call.train] if ranks > 1 else None)


def several_beside_one(job, ranks, bound, *flags):
    """Both runs see the same batches, so their losses differ only by rounding."""
    one, many = f"{job.folder}/one", f"{job.folder}/many"
    train_several(job, 1, one, 10, *flags, "--batch", 8)
    train_several(job, ranks, many, 10, *flags, "--batch", 8 // ranks)
    job.compare(gpu_report.close, (bound, one, many))


def several_twice(job, ranks):
    one, other = f"{job.folder}/one", f"{job.folder}/other"
    for out in (one, other):
        train_several(job, ranks, out, 10, *BF16, "--zero", 0)
    job.compare(gpu_report.same, (one, other))


def kill_a_rank(job, ranks):
    """Rank 1 is killed after a checkpoint. The job must end by itself, with an error, and resume."""
    out = Path(job.folder) / "killed"
    words = ["scripts/launch.sh", ranks, job.call.train, "--train-data", f"{job.call.data}/*_train_*.bin",
             *recipe(job.call).split(), *BF16, "--val-every", 0, "--ckpt-every", 2, "--steps", 10**6, "--out", out]
    process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=job.file,
                               stderr=job.file)
    job.call.running.add(process)
    try:
        while not list(out.glob("ckpt/step-*")) and process.poll() is None and job.took() < job.seconds:
            time.sleep(0.1)
        begun, victims = time.monotonic(), processes_of_rank(job.call.train, 1)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        code = process.wait(max(1, min(90, job.seconds - job.took())))
    finally:
        process.terminate()
        job.call.running.discard(process)
    took = time.monotonic() - begun
    steps = max(int(path.name[5:]) for path in out.glob("ckpt/step-*")) + 2
    job.run(*words, "--resume", "--steps", steps)
    job.say(f"{ranks} ranks ended {took:.1f} s after rank 1 was killed, with exit code {code}, and resumed")
    if not victims or code in (0, UNFINISHED):
        raise Failed(FAILED)


def processes_of_rank(program, rank):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "exe").samefile(program):
                ours = gpu_programs.succeeds("grep", "-qzx", f"OMPI_COMM_WORLD_RANK={rank}", folder / "environ")
                found += [int(folder.name)] if ours else []
        except OSError:            # it has ended, or belongs to somebody else
            pass
    return found


SCALED = {"124M": ("--batch", 32), "1.3B": ("--batch", 8, "--zero", 1)}


def scale(job, model):
    """Tokens per second on one GPU and on several, and the time per step that the stream waits for sums and weights of
    other ranks, which --profile measures in a run without graphs."""
    one = None
    for ranks in (1, *rank_counts(job.call)):
        program = ["scripts/launch.sh", ranks, job.call.train] if ranks > 1 else [job.call.train]
        shape = recipe(job.call).split() if job.call.dry else ["--model", model, "--seq-len", 1024, *SCALED[model]]
        words = [*program, "--train-data", f"{job.call.data}/*_train_*.bin", *shape, "--dtype", "bf16",
                 "--val-every", 0]
        said = job.run(*words, "--steps", steps_of(job.call, 30))
        found = re.findall(r"([\d.]+) ?([kM]?) tok/s", said)
        speeds = [float(number) * {"": 1, "k": 1e3, "M": 1e6}[unit] for number, unit in found[len(found) // 2:]]
        speed = sorted(speeds)[len(speeds) // 2]
        one = one or speed
        profile = job.run(*words, "--profile", "--steps", steps_of(job.call, 12))
        waits = re.search(r"gradient all-reduce +([\d.]+)", profile)
        line = (f"{model} on {ranks} GPU{'s'[:ranks > 1]}: {speed:,.0f} tokens/s, {speed / one / ranks:.1%} of {ranks} "
                f"times one, {waits[1] if waits else 0} ms per step in collectives")
        job.call.fact(line)
        job.say(line)


# ---------------------------------------------------------------- timings

def timing(need, program, *flags, wet=()):
    """A part that runs a program of dev/bench, which resumes by itself and starts no case that would not fit into the
    time left. wet: flags that a dry run leaves out."""
    def run(call):
        words = [word.format(train=call.train, evaluate=call.evaluate, flash=call.flash) for word in flags]
        call.check(call.part.name, need, 3600, call.python, f"dev/bench/{program}.py", call.out, call.part.name,
                   "--budget", call.left() - 15, *words, *(["--dry-run"] if call.dry else wet))
    return run


# Short measurements, each the median of at least 12 passes: there are more than thirty normalizers.
SHORT = ("--lengths", 4096, "--seconds", 0.06)


def part_evaluation(call):
    call.check("the same results as eval_gpt2", 25, 300, test_evaluation)
    timing(30, "gpu_eval", "--train", "{train}", "--evaluate", "{evaluate}")(call)


def test_evaluation(job):
    """The CPU's programs are beside those for the GPU."""
    run_pytest(job, "dev/tests/test_eval_cuda.py", *(["-k", "loss-gau"] if job.call.dry else []),
               TRAIN_GPT2=f"{job.call.bin}/train_gpt2", EVAL_GPT2CU=job.call.evaluate)


def part_package(call):
    call.check("attn_c: every normalizer on the GPU and on the CPU", 35, 300, test_package)


def test_package(job):
    call = job.call
    if not call.programs.are_packed():
        job.run("make", "-s", gpu_programs.jobs(), *call.programs.flags, f"TORCH_CUDA={int(not call.dry)}", "attn_c")
    job.run(call.python, "dev/bench/torch_gpu.py", "--device", "cpu" if call.dry else "cuda",
            PYTHONPATH=f"{call.build}/python:{os.environ.get('PYTHONPATH', '')}")


def part_counters(call):
    missing = "" if shutil.which("ncu") else "ncu is missing"
    if call.dry:
        missing = "a dry run has no kernels that ncu can observe"
    if missing:
        return call.add("counters", "info", missing)
    call.check("a step by kernel", 25, 120, call.python, "dev/bench/gpu_kernels.py", "step", call.out, call.train)


# One of each kind of attention kernel, following the rows of attention/flash_instances.h: dtype, T, head size, size of
# the values, and the normalizers.
ATTENTION_KINDS = (
    ("bf16", 96, 64, 64, "softmax softmax-recentered softmax-recentered-l1 softplus-l1 lssar sigmoid identity relu-l1 "
                         "relu2-n gelu-l1 relu6-l1 mish-l1 ssmax-pn softpick mish-l1+post=recenter "
                         "sigmoid-logn-l1+post=reweight:15"),
    ("bf16", 300, 64, 64, "softmax"),
    ("bf16", 300, 128, 128, "softmax relu6-l1"),
    ("bf16", 96, 48, 48, "ssmax-bias"),
    ("bf16", 65, 128, 192, "relu2-T lssar"),
    ("fp32", 96, 64, 64, "softmax-sink softmax-recentered lssar"),
)


def part_sanitizer(call):
    """memcheck comes first, for all kernels."""
    for tool in () if call.dry else ("memcheck", "racecheck", "synccheck"):
        def observe(what, *words):
            call.beside(f"{tool}, {what}", 30, 240, "compute-sanitizer", "--tool", tool, "--error-exitcode", 9,
                        "--print-limit", 20, *words)

        for group in kernel_groups():
            if group not in ("refused", "peak"):
                observe(f"kernels: {group}", f"{call.tests}/test_kernels", group)
        for dtype, *sizes, attn in (row[:-1] + (attn,) for row in ATTENTION_KINDS for attn in row[-1].split()):
            case = "{} {} at {}, heads of {}, values of {}".format(dtype, attn, *sizes)
            words = [call.python, "dev/bench/gpu_kernels.py", "run", call.flash, dtype, attn, *sizes]
            observe(case, *words)
            if tool == "memcheck" and dtype == "bf16":    # the kernels for 8.0, which this GPU would not choose
                observe(f"mma.sync: {case}", "env", "FLASH90=0", *words)


# ---------------------------------------------------------------- the table of parts

PARTS = (
    # name, seconds, GPUs, needs, function, what it does. Times of the step and of others depend on how much fits.
    Part("pack", 300, 0, "", gpu_programs.part_pack,
         "on a machine with a network: collects in DEPS what the GPU machine may lack, and builds the programs"),
    Part("probe", 3, 0, "", gpu_programs.part_probe,
         "what this machine has and lacks: GPU, driver, nvcc, libraries, Python packages, profilers"),
    Part("build", 6, 0, "", gpu_programs.part_build,
         "unpacks in PROGRAMS the programs that pack has built from these sources for this GPU, or builds them"),
    Part("tests", 75, 1, "programs", part_tests,
         "compares the wrappers of cuda/gpu.cuh and cuda/hopper.cuh, every kernel, cuBLASLt, the model, and attention "
         "under every normalizer with their references"),
    Part("determinism", 11, 1, "programs text", part_determinism,
         "checks that two runs and a resumed one agree to the last bit"),
    Part("train", 5, 1, "programs text", part_train,
         "compares training losses in float32 and in bf16 with the CPU's"),
    Part("attention", 38, 1, "programs torch", timing(60, "attention_gpu", "--library", "{flash}", wet=SHORT),
         "times attention: softmax at T = 1k to 16k against PyTorch's, every normalizer at 4k against softmax"),
    Part("step", 244, 1, "programs triton", timing(60, "gpu_step", "--ours", "{train}"),
         "times the training step at 124M against PyTorch's, and shows where the time goes"),
    Part("evaluation", 53, 1, "programs tqdm", part_evaluation,
         "compares eval_gpt2cu with eval_gpt2, task by task, and times it at 124M next to the trainer"),
    Part("memory", 120, 1, "programs triton", timing(45, "gpu_step", "--ours", "{train}"),
         "measures a step's memory at T = 1k to 16k"),
    Part("shapes", 20, 1, "programs torch", timing(30, "attention_gpu", "--library", "{flash}", wet=SHORT),
         "times attention with heads of 128 and 48, grouped heads, a gated unit's head, in float32, and in a window"),
    Part("others", 54, 1, "programs triton", timing(75, "attention_gpu", "--library", "{flash}"),
         "times every normalizer against PyTorch's methods to compute it, T = 4k first"),
    Part("package", 22, 1, "programs torch", part_package,
         "compares attn_c, the PyTorch package, on the GPU with itself on the CPU, and times it beside SDPA"),
    Part("counters", 15, 1, "programs", part_counters,
         "shows the time and memory traffic of each kernel of a step at 124M, by ncu"),
    Part("sanitizer", 42, 1, "programs compute-sanitizer", part_sanitizer,
         "runs compute-sanitizer's memcheck, racecheck and synccheck on our kernels, but not on cuBLASLt's"),
    Part("larger", 240, 1, "programs triton", timing(45, "gpu_step", "--ours", "{train}"),
         "times the training step at 162M against PyTorch's"),
    Part("several", 900, 2, "mpi text", part_several,
         "on 2, 4 and 8 GPUs of a node, with MPI and NCCL: sums, losses beside one rank's, repeated bits, a killed "
         "rank, and scaling at 124M and 1.3B; call it until it is complete"),
)
PART = {part.name: part for part in PARTS}
ALL = [part.name for part in PARTS if part.name not in ("pack", "several")]


def usage():
    rows = [textwrap.fill(part.what, 120, initial_indent=f"    {part.name:12}{part.seconds:4} s  ",
                          subsequent_indent=" " * 24) for part in PARTS]
    return __doc__.replace("{parts}", "\n".join(rows)).strip()


def main(words):
    if words[:1] in (["-h"], ["--help"], ["help"]):
        say(usage())
        return 0
    os.chdir(ROOT)
    call = Call(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        call.prepare()
        return call.run()
    finally:
        call.pool.shutdown(wait=False, cancel_futures=True)
        for process in list(call.running):
            process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

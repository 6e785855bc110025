"""What programs inherit from a shell or batch system: limits, closed descriptors, the number of threads.
Also what a killed scripts/setup_cuda.sh leaves behind."""
import os
import pty
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import tty
from pathlib import Path

import pytest

from calls import call, prepare
from trainer import (LAUNCH, ROOT, SANITIZED, TRAIN, assert_same_run, command, environment, metrics, script_of, steps,
                     train)

USAGE, INPUT, RESOURCE = 2, 3, 4
PROGRAMS = ["train_gpt2", "sample_gpt2", "eval_gpt2"]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A finished run, for the programs that read a model."""
    out = tmp_path_factory.mktemp("run") / "out"
    train(data, "--steps", 2, "--out", out)
    return out


def words(program, data, run):
    """A short command of each program."""
    if program == "train_gpt2":
        return command(data, "--steps", 1)
    if not (TRAIN.parent / program).exists():
        pytest.skip(f"{TRAIN.parent / program} is not built")
    flags = (["--max-new-tokens", 3] if program == "sample_gpt2"
             else ["--data", data / "d_val_000000.bin", "--max-tokens", 64])
    return [str(word) for word in [TRAIN.parent / program, "--model", run, *flags]]


def start(words, *, code=0, preexec_fn=None, user=None, **env):
    result = subprocess.run(words, capture_output=True, text=True, errors="replace", env=environment() | env,
                            timeout=120, cwd="/", stdin=subprocess.DEVNULL, preexec_fn=preexec_fn, user=user)
    assert result.returncode == code, f"exit code {result.returncode}, expected {code}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


def limit(kind, soft, hard=None):
    return lambda: resource.setrlimit(kind, (soft, soft if hard is None else hard))


# ---- files


def test_file_size_limit(data, tmp_path):
    """It acts like a full disk: training continues, no partial file stays, and the last save fails."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    flags = ["--steps", 8, "--ckpt-every", 2]
    train(data, *flags, "--out", whole)
    train(data, *flags, "--steps", 2, "--out", out)
    text = train(data, *flags, "--out", out, "--resume", code=RESOURCE, preexec_fn=limit(resource.RLIMIT_FSIZE, 20_000))
    assert ("File too large" in text and "ulimit -f" in text
            and "Training continues; earlier checkpoints are intact" in text and "step     8/8" in text), text
    assert [path.name for path in (out / "ckpt").iterdir()] == ["step-00000002"]
    train(data, *flags, "--out", out, "--resume")
    assert_same_run(whole, out, 8)


def test_too_many_open_files(data, tmp_path):
    """Whichever file cannot be opened, the advice is about the limit, not about the path."""
    failed = 0
    for files in range(4, 12):
        flags = command(data, "--val-data", data / "d_val_000000.bin", "--steps", 1, "--out", tmp_path / f"{files}")
        result = subprocess.run(flags, capture_output=True, text=True, env=environment(), cwd="/",
                                preexec_fn=limit(resource.RLIMIT_NOFILE, files))
        if result.returncode:
            failed += 1
            assert result.returncode in (INPUT, RESOURCE), result.stderr
            assert "Too many open files" in result.stderr and "`ulimit -n " in result.stderr, result.stderr
            more = result.stderr.split("Too many open files")[1]
            assert not re.search("folder|path|permission|--out|write permission", more), result.stderr
    assert failed >= 3 and result.returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors(data, tmp_path, closed):
    """What is printed must not land in a file of the run."""
    out = tmp_path / "out"
    flags = command(data, "--steps", 3, "--out", out)
    subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *flags], env=environment(), cwd="/", check=True,
                   timeout=60)
    assert re.fullmatch(r"\d+\n", (out / "lock").read_text())
    assert len(metrics(out)) == 3 and steps(out) == [3]
    train(data, "--steps", 4, "--out", out, "--resume")


# ---- stacks and threads


@pytest.mark.skipif(SANITIZED, reason="the sanitizers themselves need larger stacks")
@pytest.mark.parametrize("program", PROGRAMS)
def test_small_stacks(data, run, program):
    """A soft limit is raised; a hard limit is an error whose message names the remedy."""
    small = 64 << 10
    flags = words(program, data, run)
    start(flags, preexec_fn=limit(resource.RLIMIT_STACK, small, 8 << 20), OMP_NUM_THREADS="2")
    text = start(flags, code=RESOURCE, preexec_fn=limit(resource.RLIMIT_STACK, small))
    assert f"{program}: the stack limit is 64 KiB" in text and "ulimit -s 8192" in text


@pytest.mark.parametrize("variable, text", [("OMP_STACKSIZE", "16k"), ("OMP_STACKSIZE", " 16 "),
                                            ("OMP_STACKSIZE", "20000B"), ("GOMP_STACKSIZE", "16")])
@pytest.mark.parametrize("program", PROGRAMS)
def test_small_stacks_of_threads(data, run, program, variable, text):
    said = start(words(program, data, run), code=USAGE, **{"OMP_NUM_THREADS": "2", variable: text})
    assert f"{program}: {variable}={text}: threads need stacks of at least 512K" in said


@pytest.mark.parametrize("text", ["512K", "1M", "4096", "8192 k"])
def test_stacks_that_are_large_enough(data, run, text):
    start(words("train_gpt2", data, run), OMP_NUM_THREADS="2", OMP_STACKSIZE=text)


@pytest.mark.parametrize("program", PROGRAMS)
def test_too_many_threads(data, run, program):
    flags = words(program, data, run)
    text = start(flags, code=USAGE, OMP_NUM_THREADS="100000")
    assert (f"{program}: OMP_NUM_THREADS asks for 100000 threads, but at most 1024 are supported. "
            "Override it with --threads N." in text)
    text = start([*flags, "--threads", "100000"], code=USAGE)
    assert "--threads 100000: expected a whole number from 0 to 1024" in text
    start([*flags, "--threads", "1"], OMP_NUM_THREADS="100000")


def counts_processes():
    """Is a limit on processes enforced for the user nobody? It never is for root, and some containers ignore it."""
    try:
        return subprocess.run(["sh", "-c", "true & wait"], stderr=subprocess.DEVNULL, user=65534,
                              preexec_fn=limit(resource.RLIMIT_NPROC, 1)).returncode != 0
    except (OSError, subprocess.SubprocessError):
        return False


@pytest.mark.skipif(not counts_processes(), reason="cannot start programs as a user with a limit on processes")
@pytest.mark.parametrize("program", PROGRAMS)
def test_more_threads_than_ulimit_allows(data, run, program):
    """The limit applies to all processes of the user nobody, so it leaves room for others."""
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(shutil.copytree(path, f"{folder}/{path.name}")) for path in (data, run)]
        path, *flags = words(program, *copies)
        for reached in (Path(folder), *Path(folder).rglob("*")):
            reached.chmod(0o755)
        how = {"user": 65534, "preexec_fn": limit(resource.RLIMIT_NPROC, 400)}
        text = start([shutil.copy(path, folder), *flags, "--threads", "800"], code=RESOURCE, **how)
        assert f"{program}: cannot start 800 threads: Resource temporarily unavailable.\n  Pass a smaller" in text
        start([f"{folder}/{program}", *flags, "--threads", "2"], **how)
        start([f"{folder}/{program}", *flags, "--threads", "800"], OMP_THREAD_LIMIT="2", **how)


def test_a_quota_of_cpu_time(data, tmp_path):
    """In a mount namespace whose control group allows one core. What the user asks for counts."""
    mount = f"mount --bind {tmp_path} /sys/fs/cgroup"
    if (len(os.sched_getaffinity(0)) < 2
            or subprocess.run(["unshare", "-m", *mount.split()], capture_output=True).returncode):
        pytest.skip("needs two cores and a mount namespace")
    (tmp_path / "cpu.max").write_text("50000 50000\n")
    plan = shlex.join(command(data, "--dry-run"))
    runs = {plan: 1, f"{plan} --threads 2": 2, f"OMP_NUM_THREADS=2 {plan}": 2}
    if shutil.which("mpirun"):
        runs[f"{LAUNCH} 1 {plan}"] = 1
    text = start(["unshare", "-m", "sh", "-c", f"{mount} && unset OMP_NUM_THREADS && {' && '.join(runs)}"])
    assert [int(threads) for threads in re.findall(r"(\d+) threads? on 1 rank", text)] == list(runs.values())


def shown(words, threads, **env):
    """The number of threads that OpenMP starts, by its own report."""
    text = start(words, OMP_DISPLAY_AFFINITY="TRUE", OMP_AFFINITY_FORMAT="thread %n of %N", OMP_NUM_THREADS=threads,
                 **env)
    return len(set(re.findall(r"thread (\d+) of", text)))


@pytest.mark.parametrize("program", [*PROGRAMS, "train_gpt2cu", "train_gpt2cu_on_cpu"])
def test_threads_that_wait_spin_briefly(program):
    """Every program limits spinning unless the user sets it. OpenMP prints its settings at startup."""
    if not (TRAIN.parent / program).exists():
        pytest.skip(f"{TRAIN.parent / program} is not built")
    flags = ["env", "-u", "GOMP_SPINCOUNT", TRAIN.parent / program, "--version"]
    assert "GOMP_SPINCOUNT = '10000'" in start(flags, OMP_DISPLAY_ENV="VERBOSE")
    assert "GOMP_SPINCOUNT = '10000'" not in start(flags, OMP_DISPLAY_ENV="VERBOSE", OMP_WAIT_POLICY="passive")


@pytest.mark.parametrize("program", PROGRAMS)
def test_threads(data, run, program):
    flags = words(program, data, run)
    assert shown(flags, "2") == 2
    assert shown([*flags, "--threads", "3"], "1") == 3
    assert shown([*flags, "--threads", "2"], "3") == 2
    assert shown([*flags, "--threads", "0"], "2") == 2


def test_threads_of_ranks(data):
    assert "2 threads on 2 ranks" in train(data, "--steps", 1, "--threads", 2, processes=2)


# ---- the build

def make(build, *words, **env):
    return subprocess.run(["make", "-C", ROOT, f"BUILD={build}", f"BIN={build}", *words], capture_output=True,
                          text=True, env={key: x for key, x in os.environ.items() if key != "MAKEFLAGS"} | env)


@pytest.mark.parametrize("where", ["environment", "command line"])
def test_the_users_flags_are_added_to_ours(tmp_path, where):
    flags = {"CPPFLAGS": "-DMINE", "CFLAGS": "-DOF_C", "LDFLAGS": "-Wl,-z,now"}
    words, env = ([], flags) if where == "environment" else ([f"{key}={x}" for key, x in flags.items()], {})
    lines = make(tmp_path, "-n", "all", "attn_c", *words, **env).stdout.splitlines()
    compiled = [line for line in lines if " -c -o " in line]
    linked = [line for line in lines if " -o " in line and line not in compiled]
    assert len(compiled) > 50 and len(linked) > 5
    assert all({"-DMINE", "-DOF_C", "-Wall", "-fopenmp", "-I."} <= set(line.split()) for line in compiled)
    assert all("-Wl,-z,now" in line and "-lm" in line for line in linked)


def test_flags_of_a_distribution_build(tmp_path):
    """Hardening, position-independent executables, and definitions that the shell must not read."""
    env = {"CFLAGS": "-g -O2 -fPIE -fstack-protector-strong -Wformat -Werror=format-security",
           "CPPFLAGS": "-Wdate-time -D_FORTIFY_SOURCE=2 -DVENDOR='f(\"x\")'", "LDFLAGS": "-pie -Wl,-z,relro -Wl,-z,now"}
    objects = [f"{tmp_path}/{name}.o" for name in ("runtime/cpu", "runtime/number", "attention/modeling")]
    result = make(tmp_path, "WERROR=1", "-j2", *objects, f"{tmp_path}/python/attn_c/attn_c_double.so", **env)
    assert result.returncode == 0, result.stderr
    for flags, relinked in (env["LDFLAGS"], False), ("-pie", True):
        result = make(tmp_path, "WERROR=1", objects[0], **env | {"LDFLAGS": flags})
        assert result.returncode == 0 and ("runtime/cpu.c" in result.stdout) == relinked


def test_flags_that_the_compiler_rejects(tmp_path):
    """It is not a library that is missing."""
    result = make(tmp_path, "all", CFLAGS="-fno-such-flag")
    assert result.returncode and "-fno-such-flag`, which fails" in result.stderr and "apt-get" not in result.stderr


@pytest.mark.parametrize("shown, ranks", [
    ('echo "gcc -I/nonexistent/mpich/include -L/nonexistent/mpich/lib -lmpich"', False),
    ("echo usage >&2; exit 1", False),
    (f'echo "cc -g -O2 -Wdate-time $({shutil.which("mpicc")} -show | cut -d" " -f2-)"', True),
])
def test_mpicc_of_any_mpi(tmp_path, shown, ranks):
    """MPICH's knows -show, not --showme. If its flags do not work, the programs are built for one rank."""
    if ranks and not shutil.which("mpicc"):
        pytest.skip("needs mpicc")
    mpicc = script_of(tmp_path / "mpicc", f'[ "$1" = -show ] || exit 1\n{shown}')
    result = make(tmp_path, "help", f"MPICC={mpicc}")
    assert result.returncode == 0 and ("yes MPI" in result.stdout) == ranks
    assert ("building without ranks" in result.stderr) != ranks
    lines = make(tmp_path, "-n", "all", f"MPICC={mpicc}").stdout
    assert ("-DUSE_MPI" in lines) == ranks


def test_a_build_without_mpi_or_nccl(tmp_path):
    """make says what its programs cannot do, and several ranks of one say so, once."""
    cuda = f"{tmp_path}/train_gpt2cu"
    for words in (["all", "MPI=0"], [cuda, "MPI=0"], [cuda, "MPI=1", "NCCL=0"]):
        printed = make(tmp_path, "-n", f"CUDA={tmp_path}", f"CUBLAS={tmp_path}", *words).stdout
        linked = re.findall(r"LD  .*train_gpt2.*", printed)
        assert len(linked) == 1 and "a single " in linked[0] and f"without {words[-1][:-2]};" in linked[0], linked
    (tmp_path / "main.c").write_text('#include "runtime/process.h"\nint main(void) { process_check_build(NULL); }\n')
    subprocess.run(["gcc", tmp_path / "main.c", "-o", tmp_path / "main", f"-I{ROOT}",
                    *(ROOT / f"runtime/{name}.c" for name in ("process", "activity", "error", "utf8", "number")),
                    "-lm"], check=True)
    start([tmp_path / "main"], OMPI_COMM_WORLD_SIZE="1")
    said = [start([tmp_path / "main"], code=USAGE, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK=x) for x in "01"]
    assert "gpt2: 2 ranks were started, but this program was built without MPI" in said[0]
    assert f"gpt2: rank 1 on {os.uname().nodename}: 2 ranks were started" in said[1]


def test_clang_builds_without_warnings(tmp_path):
    """Files in which compilers differ; scripts/test.sh builds everything."""
    if subprocess.run("echo '#include <omp.h>' | clang -fsyntax-only -x c - 2>/dev/null", shell=True).returncode:
        pytest.skip("needs clang and libomp-dev")
    objects = [f"{tmp_path}/{name}.o" for name in ("math/tiles", "math/peak", "math/gemm", "runtime/cpu",
                                                   "attention/attention_cpu", "torch/bf16/math/tiles")]
    result = make(tmp_path, "CC=clang", "WERROR=1", "-j2", *objects)
    assert result.returncode == 0, result.stderr


def test_cdpath(tmp_path):
    """If CDPATH is set, cd prefers a folder in it to one in the current folder. Runs each script's line that changes
    to the repository's root."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    (ours / "scripts").mkdir(parents=True)
    (other / "scripts").mkdir(parents=True)
    lines = {line for path in (ROOT / "scripts").glob("*.sh") for line in path.read_text().splitlines()
             if "cd \"$(dirname" in line}
    (ours / "scripts/lines.sh").write_text("".join(f"({line}; pwd)\n" for line in lines))
    found = subprocess.run(["bash", "scripts/lines.sh"], cwd=ours, env=os.environ | {"CDPATH": str(other)},
                           capture_output=True, text=True, check=True).stdout
    assert lines and found == f"{ours}\n" * len(lines)


def copied_setup(folder, programs=()):
    """A function that runs a copy of setup.sh in this folder, with these programs (name: text) first in PATH."""
    (folder / "scripts").mkdir()
    (folder / "bin").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", folder / "scripts")
    for name, text in dict(programs).items():
        script_of(folder / "bin" / name, text, "bash")
    return lambda *words, **env: subprocess.run(
        [folder / "scripts/setup.sh", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} | env)


def test_setup_says_what_it_installs_and_why(tmp_path):
    setup = copied_setup(tmp_path, {"gcc": "exit 1", "clang": "exit 1", "sh": "exit 1", "id": "echo 0",
                                    "apt-get": "echo 'apt-get was called' >&2"})
    printed = setup("--test").stdout
    said = printed[:printed.index("apt-get was called")]
    for line in "gcc libc6-dev: the build", "libdnnl-dev: oneDNN", "clang libclang-rt-dev: the fuzzer's tests":
        assert line in said
    if not shutil.which("sshd") and not Path("/run/systemd/system").exists():
        assert "openssh-server" in said and "Nothing starts one" in said


def test_setup_despite_settings_of_python_and_pip(tmp_path):
    """Neither the user's settings nor packages installed elsewhere affect the virtual environment."""
    def write(folder, version):
        (folder / f"thing-{version}.dist-info").mkdir(parents=True)
        (folder / "thing.py").write_text(f"version = {version}\n")
        info = folder / f"thing-{version}.dist-info"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n")
        (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        (info / "RECORD").write_text("thing.py,,\n" + "".join(f"{info.name}/{x},,\n" for x in ("METADATA", "WHEEL")))

    write(tmp_path / "wheel", 1)
    write(tmp_path / "other", 1)
    wheel = shutil.make_archive(tmp_path / "wheel", "zip", tmp_path / "wheel")
    os.rename(wheel, tmp_path / "thing-1-py3-none-any.whl")
    (tmp_path / "requirements.txt").write_text("# What it needs.\nthing\n")
    (tmp_path / "pip.conf").write_text(f"[install]\ntarget = {tmp_path / 'target'}\nroot = {tmp_path / 'root'}\n")
    result = copied_setup(tmp_path)(
        PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path), PIP_CONFIG_FILE=str(tmp_path / "pip.conf"), PIP_USER="1",
        PIP_PREFIX=str(tmp_path / "prefix"), PYTHONPATH=str(tmp_path / "other"), PYTHONHOME="/nonexistent")
    assert result.returncode == 0, result.stdout
    assert "what it needs: thing" in result.stdout
    found = subprocess.run([tmp_path / ".venv/bin/python", "-Ic", "import thing; print(thing.__file__)"], text=True,
                           capture_output=True).stdout
    assert found.startswith(str(tmp_path / ".venv")), found


def test_an_interrupted_setup_goes_on(tmp_path):
    """scripts/setup_cuda.sh, killed while it copies what it has downloaded, finishes the copy in its next call."""
    for folder in "scripts", "bin", ".venv/bin":
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup_cuda.sh", tmp_path / "scripts")
    (tmp_path / "Makefile").write_text("lacking:\n\t@test -e .cuda/nvidia/nvcc || echo toolkit\n")
    script_of(tmp_path / ".venv/bin/python", """[ "$3" = --version ] || { echo pip >> log; mkdir -p .cuda/new/nvidia
                                echo a > .cuda/new/nvidia/header; echo b > .cuda/new/nvidia/nvcc; }""")
    script_of(tmp_path / "bin/cp", "mkdir .cuda/nvidia; : > .cuda/nvidia/header; kill -9 $PPID")
    for path, code in ((f"{tmp_path}/bin:", -9), ("", 0), ("", 0)):
        done = subprocess.run([tmp_path / "scripts/setup_cuda.sh"], capture_output=True, text=True,
                              env=os.environ | {"PATH": path + os.environ["PATH"]})
        assert done.returncode == code, done.stderr
    assert [(tmp_path / ".cuda/nvidia" / name).read_text() for name in ("header", "nvcc")] == ["a\n", "b\n"]
    assert (tmp_path / "log").read_text() == "pip\n" and [x.name for x in (tmp_path / ".cuda").iterdir()] == ["nvidia"]


# ---------------------------------------------------------------- names that act on a terminal

@pytest.mark.parametrize("script", ["data/text.py", "scripts/report.py", "scripts/grid.py"])
def test_messages_of_scripts_do_not_act_on_a_terminal(script):
    name = "no\x1b]52;c;eA==\x07\x9b\u202e\r"
    said = prepare("text", name, code=INPUT) if script == "data/text.py" else call(script[8:], name).stderr
    assert r"no\x1b]52;c;eA==\x07" in said and r"\u202e" in said
    assert not set("\x1b\x07\x9b\u202e\r").intersection(said)


def test_output_of_scripts_does_not_act_on_a_terminal():
    """A pipe gets it as it is."""
    program = "from lib import files; files.print_escapes(); print('a\\x1b\\x9b\\tb')"
    words = [sys.executable, "-X", "utf8", "-c", program]
    env = environment(PYTHONPATH=str(ROOT / "scripts"))
    assert subprocess.run(words, capture_output=True, env=env).stdout == "a\x1b\x9b\tb\n".encode()
    handle, side = pty.openpty()
    tty.setraw(side)
    subprocess.run(words, stdout=side, env=env, check=True)
    shown = b""
    while not shown.endswith(b"\n"):
        shown += os.read(handle, 100)
    assert shown == rb"a\x1b\u009b" + b"\tb\n"

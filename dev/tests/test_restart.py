"""scripts/launch.sh --restart: a job whose rank is killed ends with the same bits as one that never died; what is not
restarted."""
import os
import re
import resource
import shutil
import signal
import subprocess
import time

import pytest

import machines
from jobs import alive, finish, line_count, ranks_of, start, wait_for, wait_for_line
from trainer import LAUNCH, STOP_SIGNALS, assert_same_run, command, environment, script_of, train

STEPS = 1000
FLAGS = ["--steps", STEPS, "--ckpt-every", 50, "--batch", 2, "--lr", 0.0005]


class Restarting:
    """A job under --restart in the background."""

    def __init__(self, data, out, restarts, ranks, pause=0.2):
        self.out = out
        self.process = start([LAUNCH, "--restart", restarts, ranks, *command(data, *FLAGS, "--out", out)],
                             env=environment(PAUSE=str(pause)), preexec_fn=machines.end_with_parent)

    def reach(self, lines):
        """Waits until so many steps are in the metrics, and returns the processes of the ranks."""
        wait_for(lambda: line_count(self.out) >= lines or self.process.poll() is not None, f"{lines} steps", 120)
        assert self.process.poll() is None, self.process.communicate()[0]
        return ranks_of(self.process.pid)

    def end(self, code):
        return finish(self.process, code)


@pytest.mark.parametrize("ranks, victims", [(1, [0]), (2, [0, 1])], ids=str)
def test_killed_ranks(data, tmp_path, ranks, victims):
    """After kill -9 of a rank, and then of another one, the run ends as if nothing had happened."""
    train(data, *FLAGS, "--out", tmp_path / "whole", processes=ranks)
    job = Restarting(data, tmp_path / "out", 3, ranks)
    for i, victim in enumerate(victims):
        processes = job.reach(100 + 300 * i)
        assert sorted(processes) == list(range(ranks))
        os.kill(processes[victim], signal.SIGKILL)
        wait_for(lambda: ranks_of(job.process.pid).get(victim) != processes[victim], "the end of the rank")
    text = job.end(0)
    for i in range(len(victims)):
        assert f"launch.sh: the job ended with exit code 137. Restart {i + 1} of 3 follows in 0.2 s." in text
    assert text.count("launch.sh: ") == len(victims) and text.count("\nresumes at step ") == len(victims)
    assert_same_run(tmp_path / "whole", tmp_path / "out", STEPS)


@pytest.mark.parametrize("ranks, number", [(1, signal.SIGTERM), *((2, number) for number in sorted(STOP_SIGNALS))])
def test_a_stop_is_not_restarted(data, tmp_path, ranks, number):
    job = Restarting(data, tmp_path / "out", 3, ranks)
    job.reach(50)
    job.process.send_signal(number)
    text = job.end(75)
    assert "launch.sh: " not in text and "stopped by a signal at step" in text


def test_a_stop_between_a_death_and_the_restart(data, tmp_path):
    job = Restarting(data, tmp_path / "out", 3, 1, pause=60)
    os.kill(job.reach(50)[0], signal.SIGKILL)
    wait_for_line(job.process, "Restart 1 of 3 follows in 60 s")
    asked = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert "resumes" not in job.end(137)
    assert time.monotonic() - asked < 30, "the stop waited for the end of the pause"


def test_a_stop_at_the_moment_of_the_end(tmp_path):
    """The program asks for a stop and ends before it arrives: its own exit code remains that of the job."""
    program = script_of(tmp_path / "program", 'trap "" USR1\nkill -TERM $PPID\nexit 75')
    for _ in range(10):
        result = subprocess.run([str(LAUNCH), "--restart", "3", "1", program, "--out", "out"], cwd=tmp_path,
                                capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stdout, result.stderr) == (75, "", "")


def test_a_report_after_the_end_of_a_job(tmp_path):
    """A rank's report of a vanished machine that comes after the end of its job does not end or fail the next one."""
    mpirun = script_of(tmp_path / "mpirun", f"""
        [ ! -e {tmp_path}/started ] || exit 0
        touch {tmp_path}/started
        (sleep 0.5; echo "no heartbeat from rank 1" >&2) &
        exit 6""")
    (tmp_path / "hosts").write_text("one\ntwo\n")
    text = launch("--restart", 3, 2, "true", "--out", tmp_path / "out", code=0, MPIRUN=mpirun, PAUSE="0.3",
                  HOSTFILE=str(tmp_path / "hosts"), SLURM_JOB_ID="7")
    assert text.count("Restart ") == 1, text


@pytest.mark.drawn(1)
@pytest.mark.parametrize("restarts, waits", [(0, "sleep 0.1"), (1, "sleep 2 & wait"), (0, "sleep 2 &")])
def test_an_mpirun_that_outlives_its_ranks(tmp_path, restarts, waits):
    """As a deadlock of Open MPI's does: its ranks have ended, but it never will."""
    mpirun = script_of(tmp_path / "mpirun", f"{waits}\nexec sleep 1000")
    text = launch("--restart", restarts, 2, "true", "--out", "x", code=6, MPIRUN=mpirun)
    assert text.count("mpirun was killed: it started no rank, or was still running 10 s after") == restarts + 1
    assert ("Restart 1 of 1" in text) == bool(restarts)


def started(tmp_path, text):
    """launch.sh with a script as mpirun, which has created the file `started`."""
    mpirun = script_of(tmp_path / "mpirun", text, "bash")
    process = subprocess.Popen([str(LAUNCH), "2", "true"], env=environment(MPIRUN=mpirun),
                               preexec_fn=machines.end_with_parent)
    wait_for((tmp_path / "started").exists, "mpirun")
    return process


@pytest.mark.parametrize("dropped", [1, 2])
def test_a_stop_that_mpirun_drops(tmp_path, dropped):
    """As it does for ranks that it has not started yet. Stops are repeated while a rank lives, and this one ends with
    the next."""
    process = started(tmp_path, f"""
        sleep 60 & rank=$!
        trap 'count=$((count + 1)); [ $count -le {dropped} ] || {{ kill $rank; exit 75; }}' USR1
        touch {tmp_path}/started
        while :; do sleep 0.1; done""")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75


def test_stops_after_the_first(tmp_path):
    """mpirun gets one signal, because another one would end it once its ranks have ended."""
    process = started(tmp_path, f"""
        sleep 60 & rank=$!
        trap 'kill $rank; trap - USR1; sleep 1; exit 75' USR1
        sleep 4
        touch {tmp_path}/started
        while :; do sleep 0.1; done""")
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.01)
    assert process.returncode == 75


@pytest.mark.parametrize("starts, signals, code", [("", [signal.SIGTERM], 6), ("", [signal.SIGKILL], -9),
                                                   ("sleep 1000 &", [signal.SIGINT] * 2, 137)])
def test_an_mpirun_that_no_signal_ends(tmp_path, starts, signals, code):
    """As when it could not start its ranks."""
    process = started(tmp_path, f"trap '' USR1 USR2\n{starts}\necho $$ > {tmp_path}/started\nexec sleep 1000")
    for number in signals:
        time.sleep(1.2)
        process.send_signal(number)
    assert process.wait(20) == code
    wait_for(lambda: not alive((tmp_path / "started").read_text().strip()), "the end of mpirun", 20)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs mpirun")
def test_a_rank_that_ends_long_before_the_others(tmp_path):
    """As one that has --help, or that hangs once it has left MPI."""
    program = script_of(tmp_path / "program", "[ $OMPI_COMM_WORLD_RANK = 1 ] || exec sleep 1000")
    text = launch(3, program, code=137, LATE="2")
    assert "launch.sh: 2 s ago the first of these ranks ended: 1. The others" in text and "are killed: 0 2\n" in text


@pytest.mark.parametrize("kind, size, says", [("NOFILE", 30, "2 ranks need 74 open files, but the limit is 30"),
                                              ("FSIZE", 1024, "needs files of 8192 KiB, but the limit is 1")])
def test_limits_under_which_mpirun_hangs(kind, size, says):
    number = getattr(resource, f"RLIMIT_{kind}")
    done = subprocess.run([str(LAUNCH), "2", "true"], capture_output=True, text=True, env=environment(),
                          preexec_fn=lambda: resource.setrlimit(number, (size, size)), timeout=20)
    assert done.returncode == 4 and says in done.stderr, done.stderr


def test_closed_outputs():
    assert subprocess.run(f"MPIRUN=echo {LAUNCH} 2 true >&- 2>&-", shell=True).returncode == 0


def failing(tmp_path, *codes):
    """A program that ends with these exit codes, one after the other, and prints its flags."""
    return script_of(tmp_path / "program", f"""cd {tmp_path}
        echo . >> count
        echo "flags $*"
        set -- {" ".join(map(str, codes))}
        shift $(($(wc -l < count) - 1))
        exit $1""")


def launch(*words, code, **variables):
    result = subprocess.run([str(LAUNCH), *map(str, words)], capture_output=True, text=True,
                            env=environment(**({"PAUSE": "0"} | variables)), timeout=120)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 7, 75])
def test_codes_that_a_restart_cannot_help(tmp_path, code):
    text = launch("--restart", 2, 1, failing(tmp_path, code), "--out", "x", code=code)
    assert text == "flags --out x\n"


@pytest.mark.parametrize("code", [1, 6, 134, 139])
def test_other_codes_restart_up_to_the_limit(tmp_path, code):
    text = launch("--restart", 2, 1, failing(tmp_path, code, code, code, 0), "--out", "x", code=code)
    assert text.count("flags --out x\n") == 1 and text.count("flags --out x --resume\n") == 2
    assert f"ended with exit code {code}. Restart 2 of 2" in text
    assert f"ended with exit code {code} after restart 2, the limit of --restart." in text


@pytest.mark.parametrize("name, value", [("GRACE", "1.5"), ("GRACE", "soon"), ("PAUSE", "soon")])
def test_variables_that_are_no_numbers(name, value):
    assert f"{name}={value}: expected a number of seconds" in launch(2, "true", code=2, **{name: value})


def test_the_last_code_counts(tmp_path):
    assert "Restart 1 of 9" in launch("--restart", 9, 1, failing(tmp_path, 139, 5), "--out=x", code=5)


@pytest.mark.parametrize("words, message", [
    (["--restart"], '--restart "": expected the number of restarts'),
    (["--restart", "many", 2, "true", "--out", "x"], '--restart "many": expected the number of restarts, 0 or more.'),
    (["--restart", 2, 2, "true"], "--restart needs --out"),
    (["--restart", 2, 2], "expected a number of ranks and a program, found 1 arguments."),
    (["--restart", 2, 0, "true"], '"0": expected a number of ranks, 1 or more.'),
    (["--restart", 2, 2, "./nope"], "./nope: not found or not executable."),
    (["--restart", 2, "true", "--out", "x"], '"true": expected a number of ranks'),
    (["--restart=many", 2, "true", "--out", "x"], '--restart "many": expected the number of restarts'),
    ([2, "--restart", 3, "true", "--out", "x"], "--restart: expected a program after the number of ranks"),
])
def test_wrong_usage(words, message):
    text = launch(*words, code=2)
    assert message in text and "Usage: scripts/launch.sh [--restart R] N program flags..." in text


@pytest.mark.parametrize("text, code", [("lr = 1e-3\n", 2), ("lr = 1e-3\nout = \"x\"\n", 0)])
def test_a_restart_needs_out(tmp_path, text, code):
    """On the command line or in a file of flags, whose name may have spaces."""
    (tmp_path / "my flags.toml").write_text(text)
    for words in (["--config", tmp_path / "my flags.toml"], [f"--config={tmp_path}/my flags.toml"],
                  ["--prompt", "no --out x", "--config", tmp_path / "my flags.toml"]):
        assert ("--restart needs --out" in launch("--restart", 1, 1, "true", *words, code=code)) == (code == 2)


@pytest.mark.parametrize("second, signal_then",
                         [("1000.900000", "USR1"), ("1001.000000", "USR2"), ("400.500000", "USR2")])
def test_a_second_interrupt(second, signal_then):
    """One second after the first it ends the job, also if the clock was set back. Unset, EPOCHREALTIME is a variable
    like any other."""
    function = re.search(r"^interrupt\(\) \{\n.*?^\}\n", LAUNCH.read_text(), re.M | re.S)[0]
    script = (f"set -eu; unset EPOCHREALTIME; signal=USR1 interrupted=\n{function}"
              f"EPOCHREALTIME=1000.000000; interrupt; EPOCHREALTIME={second}; interrupt; echo $signal $asked")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{signal_then} 1\n", done.stderr

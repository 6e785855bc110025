"""Ranks and machines that fall silent, and launch.sh when it is killed. Machines are network namespaces (machines.py),
so most of this needs root.

MACHINES_LONG=1 pulls the cable for 30 s instead of 5.
"""
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

import jobs
import machines
from jobs import alive, descendants, finish, line_count, ranks_of, wait_for
from trainer import (LAUNCH, ROOT, TRAIN, checkpoint, command, cuda_program, environment, losses, make, make_data,
                     metrics, steps, tokens, train, write_shard)

OUTAGE, PATIENCE = (30, 60) if os.environ.get("MACHINES_LONG") else (5, 20)
PEER, STOPPED = 6, 75
needs_libsodium = pytest.mark.skipif(not TRAIN.exists() or b"libsodium.so" not in TRAIN.read_bytes(),
                                     reason="built without libsodium")
OTHER_BUILDS = ("bench", "cuda", "faults", "on_cpu", "pic", "python", "san", "tests", "torch", "tsan")
FAST = ["--val-every", 0, "--ckpt-every", 5]
# Steps have 150 micro-batches, so that a run of a few steps takes as long as an outage.
SLOW = [*FAST, "--lr", 0.0005, "--batch", 2, "--total-batch-tokens", 2 * 8 * 2 * 150]


DATA = partial(make_data, train=20000)


@pytest.fixture(scope="module")
def without_libsodium(tmp_path_factory):
    """The trainer as make builds it where libsodium is missing. All other objects are those of the build folder."""
    folder = tmp_path_factory.mktemp("without")
    flags = ROOT / "build/flags"
    shutil.copytree(ROOT / "build", folder / "build", copy_function=shutil.copy2,
                    ignore=lambda path, names: [name for name in names if name in OTHER_BUILDS])
    made = make("-j2", "SODIUM=0", f"WERROR={int('-Werror' in flags.read_text())}", f"BUILD={folder}/build",
                f"BIN={folder}", folder / "train_gpt2", capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder / "train_gpt2"


class Job:
    """A run of several ranks in the background. No process outlives the test, however it ends."""

    def __init__(self, data, out, *flags, **how):
        self.out, self.before = out, steps(out)
        words = command(data, *FAST, "--steps", 10**8, "--out", out, *flags, processes=2, **how)
        self.process = jobs.start(words, preexec_fn=machines.end_with_parent)

    def __enter__(self):
        wait_for(lambda: steps(self.out) != self.before or self.process.poll() is not None, "a checkpoint", 120)
        assert self.process.poll() is None, self.process.communicate()[0]
        self.ranks = ranks_of(self.process.pid)
        self.all = descendants(self.process.pid)
        assert sorted(self.ranks) == [0, 1]
        return self

    def __exit__(self, *_):
        for pid in [self.process.pid, *self.all]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.stdout.close()
        self.process.wait()

    def signal(self, number, *ranks):
        for rank in ranks:
            os.kill(self.ranks[rank], number)

    def end(self, code, timeout=60):
        text = finish(self.process, code, timeout)
        wait_for(lambda: not any(map(alive, self.all)), "the end of all its processes")
        return text


# ---- one machine


@pytest.mark.drawn(4, of="one machine")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_falls_silent_ends_the_others(data, tmp_path, victim):
    with Job(data, tmp_path / "out", "--rank-timeout", 2) as job:
        job.signal(signal.SIGSTOP, victim)
        text = job.end(PEER)
    said = re.findall(r"train_gpt2: no heartbeat from (rank \d) on (\S+) for 2 s", text)
    assert said == [(f"rank {victim}", os.uname().nodename)], text[-3000:]
    assert "Saved checkpoints are intact: resume with --resume" in text and "--rank-timeout" in text
    newest = steps(job.out)[-1]
    assert f"resumes at step {newest}" in train(data, "--steps", newest + 1, "--resume", "--out", job.out, "--batch", 8)


def test_a_silent_rank_without_libsodium(data, without_libsodium, tmp_path):
    with Job(data, tmp_path / "out", "--rank-timeout", 1, program=without_libsodium) as job:
        assert list(bound(job.ranks[0])) == list(bound(job.ranks[1])) == ["127.0.0.1"]
        job.signal(signal.SIGSTOP, 1)
        text = job.end(PEER)
    assert "no heartbeat from rank 1 on " in text and "libsodium" not in text


@pytest.mark.drawn(4, of="one machine")
def test_a_silent_rank_of_the_cuda_trainer(data, tmp_path):
    program = cuda_program()
    with Job(data, tmp_path / "out", "--rank-timeout", 2, "--batch", 1, program=Path(program).absolute()) as job:
        job.signal(signal.SIGSTOP, 1)
        assert "train_gpt2cu: no heartbeat from rank 1 on " in job.end(PEER)


@pytest.mark.drawn(4, of="one machine")
def test_a_resumed_run_keeps_its_timeout(data, tmp_path):
    """The heartbeat starts before the other flags are read from run.json."""
    train(data, "--steps", 5, "--rank-timeout", 2, "--out", tmp_path, "--batch", 8)
    with Job(data, tmp_path, "--resume") as job:
        job.signal(signal.SIGSTOP, 1)
        assert "no heartbeat from rank 1 on " in job.end(PEER, timeout=20)


@pytest.mark.drawn(4, of="one machine")
def test_a_suspended_job_continues(data, tmp_path):
    """As when Slurm suspends a job or a virtual machine pauses: no rank has heard from any other, yet all are alive."""
    with Job(data, tmp_path / "out", "--rank-timeout", 2) as job:
        job.signal(signal.SIGSTOP, 0, 1)
        time.sleep(4)
        job.signal(signal.SIGCONT, 1)
        job.signal(signal.SIGCONT, 0)
        before = line_count(job.out)
        time.sleep(3)
        wait_for(lambda: line_count(job.out) > before + 5, "more steps")
        job.process.send_signal(signal.SIGTERM)
        job.end(STOPPED)


@pytest.mark.drawn(4, of="one machine")
def test_timeout_0_waits(data, tmp_path):
    with Job(data, tmp_path / "out", "--rank-timeout", 0) as job:
        job.signal(signal.SIGSTOP, 1)
        time.sleep(3)
        job.signal(signal.SIGCONT, 1)
        job.process.send_signal(signal.SIGTERM)
        job.end(STOPPED)


@pytest.mark.drawn(4, of="one machine")
def test_a_long_validation_does_not_count_as_silence(data, tmp_path):
    """The step takes longer than the timeout."""
    write_shard(tmp_path / "long_val_000000.bin", tokens(2_400_000))

    def seconds(name, *flags):
        start = time.time()
        train(data, "--steps", 1, "--rank-timeout", 1, "--out", tmp_path / name, *flags, processes=2, timeout=300)
        assert [step for step, in metrics(tmp_path / name, ["step"])] == [1]
        return time.time() - start

    validated = seconds("long", "--val-data", tmp_path / "long_val_000000.bin", "--val-tokens", 10**7, "--val-every", 1)
    assert validated - seconds("none") > 1, "the validation was too short to show anything"


def overheard(port, count):
    """Datagrams to or from a port, as IPv4 packets: what somebody sees who listens to the network."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) as wire:
        wire.bind(("lo", 0x0800))
        wire.settimeout(10)
        packets = []
        while len(packets) < count:
            packet = wire.recv(2000)
            if packet[9] == socket.IPPROTO_UDP and str(port) in map(str, ports_of(packet)) and packet not in packets:
                packets.append(packet)
    return packets


def ports_of(packet):
    return int.from_bytes(packet[20:22], "big"), int.from_bytes(packet[22:24], "big")


def bound(pid, inside=lambda words: words):
    """{address: port} of a process's UDP sockets."""
    lines = subprocess.run(inside(["cat", f"/proc/{pid}/net/udp"]), capture_output=True, text=True, check=True).stdout
    links = subprocess.run(inside(["ls", "-l", f"/proc/{pid}/fd"]), capture_output=True, text=True).stdout
    found = {}
    for fields in map(str.split, lines.splitlines()[1:]):
        address, port = fields[1].split(":")
        if f"socket:[{fields[9]}]" in links:
            found[socket.inet_ntoa(bytes.fromhex(address)[::-1])] = int(port, 16)
    return found


@needs_libsodium
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can overhear and forge packets")
def test_a_strangers_datagrams(data, tmp_path):
    """Forged, altered, short, long and many datagrams, with the right addresses, do not end the job; replayed ones do
    not stand for a rank that has fallen silent."""
    chance = random.Random(1)
    with Job(data, tmp_path / "out", "--rank-timeout", 1) as job:
        (address, port), = bound(job.ranks[0]).items()
        assert address == "127.0.0.1" and list(bound(job.ranks[1])) == ["127.0.0.1"]
        genuine = overheard(port, 8)
        assert {port} < {own for packet in genuine for own in ports_of(packet)}
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as wire:

            def send(packet, payload=None):
                payload = packet[28:] if payload is None else payload
                size = (len(payload) + 8).to_bytes(2, "big")
                wire.sendto(packet[:24] + size + b"\0\0" + payload, ("127.0.0.1", 0))     # without a checksum

            for packet in genuine[-2:]:
                size = len(packet) - 28
                for first, second in itertools.combinations(range(size), 2):
                    altered = bytearray(packet[28:])
                    altered[first] ^= 255
                    altered[second] ^= 3
                    send(packet, bytes(altered))
                    time.sleep(0.01 if second == size - 1 else 0)
                for size in (0, 1, 8, 31, 32, 52, 53, 1000, 1076, 1100, 1472):
                    send(packet, chance.randbytes(size))
                    send(packet, (packet[28:] + bytes(1472))[:size])
            flood, before = time.time() + 3, line_count(job.out)
            while time.time() < flood:
                for packet in genuine[-2:]:
                    send(packet, bytes(60000))
            assert job.process.poll() is None and line_count(job.out) > before + 5
            job.signal(signal.SIGSTOP, 1)
            stopped = time.time()
            while alive(job.ranks[0]) and time.time() < stopped + 10:
                for packet in genuine:
                    send(packet)
                time.sleep(0.02)
        assert not alive(job.ranks[0]), "replayed datagrams stood for a rank"
        assert "no heartbeat from rank 1 on " in job.end(PEER)


def test_kill_9_of_launch_sh_ends_the_ranks(data, tmp_path):
    with Job(data, tmp_path / "out") as job:
        job.process.kill()
        wait_for(lambda: not any(map(alive, job.all)), "the end of mpirun and its ranks", 30)
    newest = steps(job.out)[-1]
    assert f"resumes at step {newest}" in train(data, "--steps", newest + 1, "--resume", "--out", job.out, "--batch", 8)


# ---- two machines, and a third that launches


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    reason = machines.missing()
    if reason:
        pytest.skip(f"cannot make machines of namespaces: {reason}")
    folder = tmp_path_factory.mktemp("network")
    (folder / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    with machines.Network(folder, ["login", "node1", "node2"]) as network:
        yield network


@pytest.fixture
def nodes(network):
    yield network.machines
    for machine in network.machines:
        machine.cable(True)
        machine.kill("mpirun", "orted", "ssh", TRAIN.name)
    wait_for(lambda: all(a.reaches(b) for a in network.machines for b in network.machines),
             "all machines reach each other again")


@pytest.fixture(scope="module")
def reference(data, tmp_path_factory):
    """The same run with two ranks on this machine."""
    out = tmp_path_factory.mktemp("reference") / "out"
    train(data, *SLOW, "--steps", 25, "--out", out, processes=2)
    return out


def start(data, machine, out, *flags, output=subprocess.PIPE, program=None):
    words = command(data, *FAST, "--out", out, *flags, processes=2, program=program)
    env = environment(HOSTFILE=str(machine.network.folder / "hostfile")) | machine.network.env
    return machine.start(*words, env=env, stdout=output, stderr=subprocess.STDOUT, cwd="/")


def wait_for_empty(nodes, timeout=60):
    wait_for(lambda: not any(machine.processes(name) for machine in nodes
                             for name in ("mpirun", "orted", "ssh", TRAIN.name)),
             "the end of every process on every machine", timeout)


@needs_libsodium
def test_two_machines_give_the_bits_of_one(data, nodes, reference, tmp_path):
    """One machine loses its network for less than the timeout. The run waits and then continues."""
    _, first, second = nodes
    out = tmp_path / "out"
    job = start(data, first, out, *SLOW, "--steps", 25, "--rank-timeout", PATIENCE)
    wait_for(lambda: line_count(out) > 2, "steps")
    for machine in (first, second):
        pid, = machine.processes(TRAIN.name)
        assert list(bound(pid, machine.inside)) == [machine.address], "UDP on another address than MPI's"
    second.cable(False)
    time.sleep(1)
    before = line_count(out)
    time.sleep(OUTAGE - 1)
    assert line_count(out) == before < 25, "the ranks did not need the network"
    second.cable(True)
    finish(job, 0, OUTAGE * 3 + 120)
    assert metrics(out) == metrics(reference)
    alone = tmp_path / "alone"
    train(data, *SLOW, "--batch", 4, "--steps", 25, "--out", alone)
    assert abs(losses(out) - losses(alone)).max() < 1e-5
    wait_for_empty(nodes)


def test_two_machines_without_libsodium(data, nodes, without_libsodium, tmp_path):
    job = start(data, nodes[1], tmp_path, "--steps", 10, program=without_libsodium)
    text = finish(job, 0)
    assert text.count("built without libsodium") == 1 and "run without heartbeats" in text, text


def test_a_stop_saves_on_two_machines(data, nodes, tmp_path):
    _, first, _ = nodes
    out = tmp_path / "out"
    job = start(data, first, out, "--steps", 10**8, "--ckpt-every", 0)
    wait_for(lambda: line_count(out) > 2, "steps")
    first.run("pkill", "-TERM", "-f", str(LAUNCH))
    assert "stopped by a signal" in finish(job, STOPPED)
    wait_for_empty(nodes)
    newest = steps(out)[-1]
    assert line_count(out) == newest


def test_kill_9_of_launch_sh_ends_two_machines(data, nodes, tmp_path):
    _, first, _ = nodes
    out = tmp_path / "out"
    start(data, first, out, "--steps", 10**8, output=subprocess.DEVNULL)       # a broken pipe would also end it
    wait_for(lambda: steps(out), "a checkpoint", 180)
    first.run("pkill", "-KILL", "-f", str(LAUNCH))
    wait_for_empty(nodes)


@needs_libsodium
@pytest.mark.drawn(1)
@pytest.mark.parametrize("launcher, victim", [(1, 2), (0, 1)],
                         ids=["launched beside rank 0", "launched elsewhere, rank 0 gone"])
def test_a_machine_that_vanishes(data, nodes, tmp_path, launcher, victim):
    out = tmp_path / "out"
    job = start(data, nodes[launcher], out, "--steps", 10**8, "--rank-timeout", 4)
    wait_for(lambda: steps(out), "a checkpoint", 180)
    nodes[victim].cable(False)
    text = finish(job, PEER)
    assert f"train_gpt2: no heartbeat from rank {victim - 1} on node{victim} for 4 s" in text, text[-3000:]
    assert "HOSTFILE" in text
    wait_for_empty(nodes)                  # also on the machine without a network
    newest = steps(out)[-1]
    assert checkpoint(out, newest).is_dir()
    assert f"resumes at step {newest}" in train(data, "--steps", newest + 5, "--resume", "--out", out, "--batch", 8)


def test_the_processes_of_one_machine_are_killed(data, nodes, tmp_path):
    _, first, second = nodes
    out = tmp_path / "out"
    job = start(data, first, out, "--steps", 10**8)
    wait_for(lambda: steps(out), "a checkpoint", 180)
    second.kill("orted", TRAIN.name)
    job.communicate(timeout=90)
    assert job.returncode not in (0, STOPPED)
    wait_for_empty(nodes)
    newest = steps(out)[-1]
    assert f"resumes at step {newest}" in train(data, "--steps", newest + 5, "--resume", "--out", out, "--batch", 8)

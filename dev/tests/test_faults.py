"""Ranks that die, hang or are slow in the calls by which they exchange data, one that lacks memory, and a disk that is
full where rank 0 writes. Nothing may hang beyond its deadline, every message names the rank, and a resumed run has the
bits of an undisturbed one. Networks that fail: test_machines.py.
"""
import shutil
import signal
import subprocess
import time
from functools import cache, partial

import pytest

from trainer import ROOT, TRAIN, assert_same_run, checkpoint, says, script_of, steps, train

FLAGS = ["--batch", 1, "--steps", 12, "--ckpt-every", 2, "--keep", 0]
ZERO = ["--zero", 1, "--dtype", "bf16"]
PEER, RESOURCE = 6, 4
# The call of rank 1 that fails, counted from the first checkpoint on: in training, in the comparison before a save,
# while pieces of moments are saved, and in several of NCCL's operations.
CALLS = [("MPI_Allreduce", 9), ("MPI_Allgather", 3), ("MPI_Send", 2), ("MPI_Iallgather", 1), ("MPI_Iallgather", 10),
         ("MPI_Iallgather", 19), ("MPI_Iallgather", 28)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not shutil.which("mpicc"):
        pytest.skip("needs mpicc")
    path = tmp_path_factory.mktemp("faults") / "ranks.so"
    subprocess.run(["mpicc", "-shared", "-fPIC", "-O1", "-o", path, ROOT / "dev/faults/ranks.c"], check=True)
    return path


def with_faults(program, library, path, setting=""):
    """Writes a script that runs a program with the library; as rank 1 with a setting, too."""
    return script_of(path, f'[ "$OMPI_COMM_WORLD_RANK" != 1 ] || export LC_ALL=C {setting}\n'
                           f'LD_PRELOAD={library} exec {program} "$@"')


@pytest.fixture
def faulty(cuda, library, tmp_path):
    """train_gpt2cu with the library; as rank 1 with a setting of the emulation, too."""
    return partial(with_faults, cuda, library, tmp_path / "faulty")


@pytest.fixture(scope="module")
def whole(cuda, data, tmp_path_factory):
    """The folder of an undisturbed run of so many ranks."""
    @cache
    def of(ranks):
        folder = tmp_path_factory.mktemp("whole")
        train(data, *FLAGS, *ZERO, "--out", folder, program=cuda, processes=ranks)
        return folder
    return of


def resumed(cuda, data, out, whole, ranks):
    train(data, *FLAGS, *ZERO, "--progress-timeout", 60, "--resume", "--out", out, program=cuda, processes=ranks)
    assert_same_run(out, whole(ranks), 12)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("action", ["die", "hang"])
@pytest.mark.parametrize("call, number", CALLS, ids=[f"{call} {number}" for call, number in CALLS])
def test_a_rank_that_dies_or_hangs(cuda, faulty, data, tmp_path, whole, ranks, action, call, number):
    out, start = tmp_path / "out", time.time()
    env = {"FAULT_RANK": "1", "FAULT_CALL": call, "FAULT_NUMBER": str(number), "FAULT_ACTION": action,
           "FAULT_AFTER": str(checkpoint(out, 2))}
    text = train(data, *FLAGS, *ZERO, "--progress-timeout", ranks, "--out", out, program=faulty(), processes=ranks,
                 env=env, code=PEER if action == "hang" else 128 + signal.SIGKILL)
    assert time.time() - start < 60
    says(text, *(["progress of rank ", "rank 1 on "] if action == "hang" else ["process rank 1 "]), "--resume")
    assert steps(out)
    resumed(cuda, data, out, whole, ranks)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("action, rank", [("delay", None), ("slow", "1"), ("slow", "0")])
def test_slow_ranks_change_nothing(faulty, data, tmp_path, whole, action, rank):
    """Random delays in all ranks, or a rank that takes a hundred times as long as another, within the timeouts."""
    env = {"FAULT_ACTION": action} | ({"FAULT_RANK": rank, "FAULT_CALL": "MPI_Iallgather"} if rank else {})
    train(data, *FLAGS, *ZERO, "--progress-timeout", 10, "--rank-timeout", 2, "--out", tmp_path / "out",
          program=faulty(), processes=2, env=env, timeout=300)
    assert_same_run(tmp_path / "out", whole(2), 12)


def test_one_rank_lacks_memory(faulty, data, tmp_path):
    text = train(data, *FLAGS, *ZERO, "--out", tmp_path / "out", program=faulty("CUDA_ON_CPU_MEMORY=1000000"),
                 processes=3, code=RESOURCE)
    assert "rank 1: this run needs " in text and not (tmp_path / "out").exists()


def test_weights_that_differ_are_not_saved(library, data, tmp_path):
    """Of train_gpt2; test_cuda.py has train_gpt2cu."""
    program = with_faults(TRAIN, library, tmp_path / "faulty")
    text = train(data, *FLAGS, "--out", tmp_path / "out", program=program, processes=4, env={"FAULT_WRONG": "2:3"},
                 code=PEER)
    says(text, "step 4: rank 2 on ", "other parameters than on rank 0 on ", "Nothing of this step is saved")
    assert steps(tmp_path / "out") == [2]


def test_a_full_disk_on_the_machine_of_rank_0(faults, data, tmp_path):
    """The others go on, and the next save succeeds."""
    text = train(data, *FLAGS, "--out", tmp_path / "out", program=faults, processes=2,
                 env={"FAULT_AT": "40", "FAULT_KIND": "enospc"})
    assert "Training continues; earlier checkpoints are intact" in text and steps(tmp_path / "out")[-1] == 12

"""--config and --print-config in the programs: a printed file repeats its run; several ranks; messages."""
import re
import subprocess

import pytest

from tiny import run
from trainer import MODEL, TRAIN, assert_same_run, command, environment, metrics, train

FLAGS = ["--model", MODEL, "--attn", "ssmax", "--seq-len", "8,16", "--batch", 4, "--lr", 0.003, "--warmup", 2,
         "--schedule", "cosine", "--shuffle", 0, "--doc-mask"]


def test_a_printed_file_repeats_the_run(data, tmp_path):
    train(data, *FLAGS, "--steps", 6, "--out", tmp_path / "a", model=False)
    path = tmp_path / "run.flags"
    path.write_text(run(TRAIN, "--train-data", f"{data}/*_train_*.bin", *FLAGS, "--steps", 6, "--print-config")[0])
    run(TRAIN, "--config", path, "--out", tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b", 6)
    # the command line wins, wherever the file stands
    run(TRAIN, "--steps", 2, "--out", tmp_path / "c", "--config", path)
    assert len(metrics(tmp_path / "c")) == 2


def test_every_flag_is_in_the_file():
    """Those that were given as lines, the others as comments."""
    for name in ("train_gpt2", "sample_gpt2", "eval_gpt2"):
        program = TRAIN.parent / name
        if not program.exists():
            pytest.skip(f"{program} is not built")
        flags = set(re.findall(r"^  --([a-z0-9-]+) ", run(program, "--help")[0], re.M)) - {"config", "print-config"}
        text, _ = run(program, "--seed", 7, "--model", 'x"\\', "--print-config")
        lines = re.findall("^(# )?([a-z0-9-]+) = (.*)", text, re.M)
        given = {(flag, value) for comment, flag, value in lines if not comment}
        assert given == {("seed", "7"), ("model", r'"x\"\\"')}
        assert {flag for _, flag, _ in lines} == flags


@pytest.mark.parametrize("flags", [["--print-config"], ["--help"], ["--version"], ["--dry-run"], ["--attn", "help"]],
                         ids=" ".join)
def test_a_full_disk_is_reported(data, flags):
    """What goes to a file is whole, or the exit code says that it is not."""
    with open("/dev/full", "w") as full:
        result = subprocess.run([str(word) for word in (TRAIN, "--train-data", data / "d_train_*.bin", *FLAGS, *flags)],
                                stdout=full, stderr=subprocess.PIPE, env=environment(), cwd="/")
    assert result.returncode == 4 and b"stdout: cannot write the" in result.stderr


@pytest.mark.parametrize("text, code, message", [
    ("stpes = 3", 2, "line 1: stpes: unknown flag. Did you mean steps?"),
    ("steps = 3\0", 3, "contains a 0 byte"),
])
@pytest.mark.parametrize("processes", [1, 2])
def test_wrong_files(data, tmp_path, text, code, message, processes):
    """The message comes once, and nothing is written. All messages: test_options.c"""
    path = tmp_path / "run.flags"
    path.write_text(text)
    said = train(data, "--config", path, "--out", tmp_path / "out", code=code, processes=processes)
    assert said.count("train_gpt2: ") == 1 and f"{path}: {message}" in said
    assert not (tmp_path / "out").exists()


def test_two_ranks_print_once(data):
    text = subprocess.run(command(data, "--steps", 3, "--print-config", processes=2, model=False), capture_output=True,
                          text=True, env=environment(), check=True).stdout
    assert text.count("steps = 3") == 1

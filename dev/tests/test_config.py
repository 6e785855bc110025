"""--config and --print-config in the programs: a printed file repeats its run; --resume; several ranks; messages."""
import re
import subprocess

import pytest

from trainer import MODEL, TRAIN, assert_same_run, command, environment, metrics, train

FLAGS = ["--model", MODEL, "--attn", "ssmax", "--seq-len", "8,16", "--batch", 4, "--lr", 0.003, "--warmup", 2,
         "--schedule", "cosine", "--shuffle", 0, "--doc-mask"]


def printed(program, *flags):
    """What --print-config prints."""
    return subprocess.run([program, *map(str, flags), "--print-config"], capture_output=True, text=True, check=True,
                          env=environment()).stdout


def config_of(folder, data, *flags):
    path = folder / "run.flags"
    path.write_text(printed(TRAIN, "--train-data", f"{data}/*_train_*.bin", *flags))
    return path


def run(*flags, code=0):
    result = subprocess.run([TRAIN, *map(str, flags)], capture_output=True, text=True, env=environment(), cwd="/")
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_a_printed_file_repeats_the_run(data, tmp_path):
    train(data, *FLAGS, "--steps", 6, "--out", tmp_path / "a", model=False)
    path = config_of(tmp_path, data, *FLAGS, "--steps", 6)
    run("--config", path, "--out", tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b", 6)
    run("--steps", 2, "--out", tmp_path / "c", "--config", path)     # the command line wins, wherever the file stands
    assert len(metrics(tmp_path / "c")) == 2


def test_every_flag_is_in_the_file():
    """Those that were given as lines, the others as comments."""
    for name in ("train_gpt2", "sample_gpt2", "eval_gpt2"):
        program = TRAIN.parent / name
        if not program.exists():
            pytest.skip(f"{program} is not built")
        text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
        flags = set(re.findall(r"^  --([a-z0-9-]+) ", text, re.M)) - {"config", "print-config"}
        lines = re.findall("^(# )?([a-z0-9-]+) = (.*)", printed(program, "--seed", 7, "--model", 'x"\\'), re.M)
        given = {(flag, value) for comment, flag, value in lines if not comment}
        assert given == {("seed", "7"), ("model", r'"x\"\\"')}
        assert {flag for _, flag, _ in lines} == flags


def test_a_run_is_repeated_from_its_run_json(data, tmp_path):
    train(data, *FLAGS, "--steps", 4, "--out", tmp_path / "a", model=False)
    run("--config", tmp_path / "a/run.json", "--out", tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b", 4)


@pytest.mark.parametrize("flags", [["--print-config"], ["--help"], ["--version"], ["--dry-run"], ["--attn", "help"]],
                         ids=" ".join)
def test_a_full_disk_is_reported(data, flags):
    """What goes to a file is whole, or the exit code says that it is not."""
    with open("/dev/full", "w") as full:
        result = subprocess.run([str(word) for word in (TRAIN, "--train-data", data / "d_train_*.bin", *FLAGS, *flags)],
                                stdout=full, stderr=subprocess.PIPE, env=environment(), cwd="/")
    assert result.returncode == 4 and b"stdout: cannot write the" in result.stderr


def test_resume(data, tmp_path):
    """Flags from a file are flags: a resumed run accepts the same values and rejects others by name."""
    path, out = config_of(tmp_path, data, *FLAGS), tmp_path / "out"
    run("--config", path, "--steps", 4, "--out", out)
    assert "resumes at step 4" in run("--config", path, "--steps", 5, "--out", out, "--resume")
    path.write_text(path.read_text().replace("doc-mask = true", "doc-mask = false"))
    assert "--doc-mask is 0, but the run started with 1" in run("--config", path, "--out", out, "--resume", code=2)


@pytest.mark.parametrize("text, code, message", [
    ("stpes = 3", 2, "line 1: stpes: unknown flag. Did you mean steps?"),
    ("steps = 3\nzero = 1", 2, "line 2: zero is only supported by train_gpt2cu, the GPU trainer, not by train_gpt2."),
    ("steps = 3\nsteps = 3", 2, "line 2: steps: is set twice; the first time is on line 1."),
    ("steps = 3\nconfig = 'x'", 2, "line 2: config: a file of flags cannot name another. Repeat --config"),
    ("[model]\n", 3, "line 1: expected flag = value, found [model]."),
    ("attn = ", 3, "line 1: expected a value, found the end of the line."),
    ("steps = 3\0", 3, "contains a 0 byte"),
])
@pytest.mark.parametrize("processes", [1, 2])
def test_wrong_files(data, tmp_path, text, code, message, processes):
    """The message comes once, and nothing is written."""
    path = tmp_path / "run.flags"
    path.write_text(text)
    said = train(data, "--config", path, "--out", tmp_path / "out", code=code, processes=processes)
    assert said.count("train_gpt2: ") == 1 and f"{path}: {message}" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path, message", [("gone.flags", "No such file"),
                                           (".", "expected a regular file, found a folder")])
def test_files_that_cannot_be_read(data, tmp_path, path, message):
    assert message in train(data, "--config", tmp_path / path, code=3)


def test_two_ranks(data, tmp_path):
    path = config_of(tmp_path, data, "--model", MODEL, "--seq-len", 8, "--batch", 2, "--steps", 3, "--warmup", 1)
    text = subprocess.run(command(data, "--config", path, "--out", tmp_path / "out", processes=2, model=False),
                          capture_output=True, text=True, env=environment(), check=True).stdout
    assert "2 ranks x 1 micro-batch of 2 x 8" in text
    text = subprocess.run(command(data, "--steps", 3, "--print-config", processes=2, model=False), capture_output=True,
                          text=True, env=environment(), check=True).stdout
    assert text.count("steps = 3") == 1

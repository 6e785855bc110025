"""data/needles.py: which training sequences get a needle, what they look like, and what stays as it was."""
import fcntl
import json
import os
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from calls import prepare
import needles
import shards
import vocabulary
from shards import read_shard, write_shard

T, VOCAB = 256, 280
END = VOCAB - 1


def script(*arguments, code=0, name="needles"):
    return prepare(name, *arguments, code=code)


def stream(folder):
    return np.concatenate([read_shard(path) for path in sorted(folder.glob("*_train_*.bin"))]).astype(int)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two training shards of ordinary tokens, the first of which ends within a sequence; a document starts every 2,000
    tokens."""
    folder = tmp_path_factory.mktemp("source")
    vocabulary.train(["the special magic number is in a city 0123456789"] * 9, VOCAB, folder / "tokenizer.json")
    assert vocabulary.load(str(folder)).end_of_text == END
    tokens = np.random.default_rng(1).integers(0, END, 100_000)
    tokens[::2000] = END
    write_shard(folder / "d_train_000001.bin", tokens[:30_100])
    write_shard(folder / "d_train_000002.bin", tokens[30_100:])
    write_shard(folder / "d_val_000000.bin", tokens[:500])
    return folder


@pytest.fixture(scope="module")
def copy(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("copy")
    text = script(source, "--out", out, "--seq-len", T, "--digits", 3)
    assert "100,000 tokens to train on, with 39 needles of 3 digits" in text      # of 117 and 272 whole sequences
    assert f"--train-data '{out}/*_train_*.bin' --val-data '{out}/*_val_*.bin'" in text
    return out


def test_a_tenth_of_the_sequences_change(source, copy):
    before, after = stream(source), stream(copy)
    different = [i for i in range(len(before) // T) if (before[i * T:i * T + T] != after[i * T:i * T + T]).any()]
    assert len(before) == len(after) and len(different) == 39
    kept = np.ones(len(before), bool)
    for i in different:
        kept[i * T:i * T + T] = False
        assert END not in before[i * T + 1:i * T + T], "no document starts in it"
    assert (before[kept] == after[kept]).all()
    assert len({i // 39 for i in different}) > 5, "they are spread over the text"


def test_each_has_its_needle_and_ends_with_the_answer(source, copy):
    """In the texts of the evaluation: see test_needle.py."""
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))

    def encode(city, digits):
        return [tokenizer.encode(text.format(city=city, digits=digits), add_special_tokens=False).ids
                for text in (needles.NEEDLE, needles.NUMBER, needles.NEEDLE_END, needles.QUESTION)]
    before, after = stream(source), stream(copy)
    depths, cities, numbers = [], set(), set()
    for start in range(0, len(before) - T + 1, T):
        row = after[start:start + T]
        if (row == before[start:start + T]).all():
            continue
        text = tokenizer.decode(row[1:].tolist())
        digits = text[-4:-1]
        city = next(city for city in needles.cities() if f" {city} number? " in text)
        needle = f"\nThe special magic {city} number is: {digits}.\n"
        question = f"\nWhat is the special magic {city} number? The special magic {city} number is: {digits}."
        assert row[0] == END and text.count(needle) == 1 and text.endswith(question) and 100 <= int(digits) <= 999
        head, number, end, asked = encode(city, digits)
        fact, tail = [*head, *number, *end], [*asked, *number]
        at = next(i for i in range(T) if row[i:i + len(fact)].tolist() == fact)
        hay = np.concatenate([row[1:at], row[at + len(fact):T - len(tail)]])
        assert (hay == before[start + 1:start + 1 + len(hay)]).all(), "the text goes on behind the needle"
        depths.append(text.index(needle) / text.index(question))
        cities.add(city)
        numbers.add(digits)
    assert min(depths) < 0.2 and max(depths) > 0.7 and len(cities) > 20 and len(numbers) > 30


def test_questions_are_repeated(source, copy, tmp_path):
    """The needles are the same; the text before them makes way."""
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    script(source, "--out", tmp_path, "--seq-len", T, "--digits", 1, "--questions", 2, "--fraction", 0.01)
    [row, *_] = [row for row in stream(tmp_path)[:99_840].reshape(-1, T)
                 if "special magic" in tokenizer.decode(row.tolist())]
    text = tokenizer.decode(row.tolist())
    question = text[text.rindex("\nWhat is the"):]
    assert text.endswith(2 * question) and text.count("special magic") == 5 and text.count(question[-2:]) >= 3


def test_the_rest_is_copied_and_a_second_call_changes_nothing(source, copy):
    for name in ("d_val_000000.bin", "tokenizer.json"):
        assert (copy / name).read_bytes() == (source / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert "39 needles, already there" in script(source, "--out", copy, "--seq-len", T, "--digits", 3)
    assert before == {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert "made with other settings" in script(source, "--out", copy, "--seq-len", T, "--digits", 4, code=2)


@pytest.mark.parametrize("name", ["d_train_000002.bin", "d_val_000000.bin"])
def test_a_folder_of_another_dataset_is_left_alone(source, copy, tmp_path, name):
    """One whose shards differ in a single token."""
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    tokens = read_shard(tmp_path / name).copy()
    tokens[-1] = (tokens[-1] + 1) % END
    write_shard(tmp_path / name, tokens)
    before = {path: path.read_bytes() for path in copy.iterdir()}
    assert "or from another dataset" in script(tmp_path, "--out", copy, "--seq-len", T, "--digits", 3, code=2)
    assert before == {path: path.read_bytes() for path in copy.iterdir()}


def test_the_source_and_other_datasets_are_not_overwritten(source, tmp_path):
    """A dataset without needles.json is not the script's, whichever split its shards have."""
    (tmp_path / "link").symlink_to(source)
    for name in ("other_train_000001.bin", "other_val_000000.bin"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(b"a shard")
    for out, message in ((source, "it is the dataset itself"), (tmp_path / "link", "it is the dataset itself"),
                         (tmp_path / "other_train_000001.bin", "another dataset (other_train_000001.bin)"),
                         (tmp_path / "other_val_000000.bin", "another dataset (other_val_000000.bin)")):
        before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
        text = script(source, "--out", out, "--seq-len", T, "--digits", 3, code=2)
        assert f"--out {out}: " in text and message in text and "Pass another --out" in text
        assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}


def test_a_killed_run_is_noticed_and_repeated(source, copy, tmp_path, monkeypatch):
    """It stops before the second shard."""
    def write_one(path, tokens):
        if "000002" in path.name:
            raise KeyboardInterrupt
        write_shard(path, tokens)
    monkeypatch.setattr(shards, "write_shard", write_one)
    words = [source, "--out", tmp_path, "--seq-len", T, "--digits", 3]
    assert "Rerun the same command to resume" in script(*words, code=shards.STOPPED)
    monkeypatch.undo()
    assert "made with other settings" in script(*words[:-1], 4, code=2)
    assert "with 39 needles" in script(*words)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_one_run_at_a_time(source, tmp_path):
    with open(tmp_path / ".needles.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run is writing needles here" in script(source, "--out", tmp_path, "--seq-len", T, code=7)
    assert [path.name for path in tmp_path.iterdir()] == [".needles.lock"]


def test_the_seed_decides(source, copy, tmp_path):
    for name, seed in (("same", 1337), ("other", 1)):
        script(source, "--out", tmp_path / name, "--seq-len", T, "--digits", 3, "--seed", seed)
    assert (stream(tmp_path / "same") == stream(copy)).all() and (stream(tmp_path / "other") != stream(copy)).any()
    assert json.loads((tmp_path / "other/needles.json").read_text())["needles"] == 39


@pytest.mark.parametrize("flags, code, message", [
    (["--seq-len", 64], 2, "--seq-len 64: too short, the needle, questions and answers for"),
    (["--seq-len", 999, "--fraction", 0.7], 2, "sequences of 999 tokens have no start of a document"),
    (["--fraction", 1.5], 2, "--fraction"),
])
def test_what_does_not_fit_is_rejected(source, tmp_path, flags, code, message):
    assert message in script(source, "--out", tmp_path / "out", *flags, code=code)
    assert not list(tmp_path.glob("out/*.bin"))
    script(source, "--out", tmp_path / "out", "--seq-len", T)      # nothing is left of those settings


def test_masks_and_missing_folders_are_rejected(source, tmp_path):
    assert "no *_train_*.bin" in script(tmp_path, "--out", tmp_path / "out", code=3)
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    (tmp_path / "d_train_000001.mask").write_bytes(b"")
    assert "has a mask" in script(tmp_path, "--out", tmp_path / "out", code=3)


@pytest.mark.parametrize("name", ["needles", "chunks"])
def test_a_link_does_not_carry_a_file_into_a_copy(name, source, tmp_path):
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    (tmp_path / "d_val_000000.bin").unlink()
    (tmp_path / "d_val_000000.bin").symlink_to(source / "d_val_000000.bin")
    said = script(tmp_path, "--out", tmp_path / "out", code=3, name=name)
    assert "d_val_000000.bin: expected a file in its folder, found a link" in said and not (tmp_path / "out").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize("name, flags", [("needles", ["--seq-len", T]), ("chunks", ["--tokens", 100])])
def test_a_folder_that_others_can_change(name, flags, source, tmp_path):
    os.chown(tmp_path, 65534, 65534)
    tmp_path.chmod(0o777)
    flags += ["--out", tmp_path / "out"]
    assert f"{tmp_path} belongs to another user" in script(source, *flags, code=4, name=name)
    script(source, *flags, "--foreign-folder", name=name)


def test_chunks_lie_inside_documents(source, tmp_path):
    """data/chunks.py: the whole chunks of each document in order, and a mask that leaves out the targets across
    borders."""
    tokens = np.random.default_rng(2).integers(0, END, 700)
    tokens[[0, 250, 300]] = END      # documents of 250, 50 and 400 tokens
    write_shard(tmp_path / "d_val_000000.bin", tokens)
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    out = tmp_path / "out"
    said = script(tmp_path, "--out", out, "--tokens", 100, name="chunks")
    assert "6 chunks of 100 tokens from 2 documents" in said
    kept = np.concatenate([tokens[:200], tokens[300:700]])
    assert (read_shard(out / "d_val_000000.bin")[:600] == kept).all()
    mask = np.fromfile(out / "d_val_000000.mask", np.uint8)[shards.HEADER_BYTES:]
    assert np.flatnonzero(mask == 0).tolist() == [0, 200, 600]
    assert "no validation document has 500 tokens" in script(tmp_path, "--out", out, "--tokens", 500, code=3,
                                                             name="chunks")
    assert "it is the dataset itself" in script(tmp_path, "--out", tmp_path, "--tokens", 100, code=2, name="chunks")
    (out / "e_val_000000.bin").write_bytes(b"")
    said = script(tmp_path, "--out", out, "--tokens", 100, code=2, name="chunks")
    assert "another dataset (e_val_000000.bin)" in said

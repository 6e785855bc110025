"""data/squad.py: shards and masks against examples counted by hand, what is skipped and why, kills, wrong files. How
the trainer reads them."""
import io
import json
import math
import os
import struct
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import trainer
from squad_files import END, facts, question, write, write_bytes_tokenizer
from test_data import read_mask, read_shard, script
import shards
import sources
import squad
import vocabulary


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def examples_of(folder, tokenizer, split="train"):
    """(text, part that counts in the loss) of each example, from all shards of a split; checks where end-of-text is."""
    decode = vocabulary.library("tokenizers", "this test").Tokenizer.from_file(str(tokenizer)).decode
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    tokens, mask = (sum(map(read, names), []) for read, names in
                    ((read_shard, paths), (read_mask, [path.with_suffix(".mask") for path in paths])))
    found, at = [], 0
    while at < len(tokens):
        end = tokens.index(END, at + 1)
        assert tokens[at] == END and mask[at] == 0 and mask[end] == 1
        counts = [token for token, bit in zip(tokens[at:end], mask[at:end]) if bit]
        assert tokens[end - len(counts):end] == counts, "the answer comes last"
        found.append((decode(tokens[at + 1:end]), decode(counts)))
        at = end + 1
    return found


# ---- masks

def test_files_to_the_byte(tmp_path, tokenizer):
    """Two examples, counted by hand: 26 bytes of prompt and 3 of answer, then 28 and 4."""
    write(tmp_path / "in.json", "1.1", ("Ab.", question("Q?", "x1"), question("Why?", "é")))
    script("squad", "--json", tmp_path / "in.json", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    texts = [b"Ab.\n\nQuestion: Q?\n\nAnswer: x1", b"Ab.\n\nQuestion: Why?\n\nAnswer: \xc3\xa9"]
    id_of = {byte: json.loads(tokenizer.read_text())["model"]["vocab"][name]
             for name, byte in vocabulary.alphabet().items()}
    tokens = [token for text in texts for token in (256, *(id_of[byte] for byte in text), 256)]
    mask = [0] + [0] * 26 + [1] * 3 + [1] + [0] + [0] * 28 + [1] * 3 + [1]
    assert len(tokens) == len(mask) == 31 + 33
    assert ((tmp_path / "out/squad_train_000001.bin").read_bytes()
            == struct.pack("<256i64H", 20240520, 1, 64, *[0] * 253, *tokens))
    assert ((tmp_path / "out/squad_train_000001.mask").read_bytes()
            == struct.pack("<256i64B", 20240521, 1, 64, *[0] * 253, *mask))


def test_gpt2(tmp_path):
    """GPT-2's tokens of prompt and answer are those of the whole text, so a prompt that ends where the answer begins
    continues as in training."""
    context = "The Normans (Norman: Nourmands) gave their name to Normandy.\nThey lived in 1066."
    asked, answer = "Who did?", "The \"Normans\""
    write(tmp_path / "in.json", "v2.0",
          (context, question(asked, answer, impossible=False), question("When?", "1066", impossible=False)))
    script("squad", "--json", tmp_path / "in.json", "--out", tmp_path / "out")
    encoding = vocabulary.gpt2_encoding()
    tokens, mask = (read_shard(tmp_path / "out/squad_train_000001.bin"),
                    read_mask(tmp_path / "out/squad_train_000001.mask"))
    expected = [[50256, *encoding.encode(f"{context}\n\nQuestion: {q}\n\nAnswer: {a}"), 50256]
                for q, a in ((asked, answer), ("When?", "1066"))]
    assert tokens == sum(expected, [])
    counting = [token for token, bit in zip(tokens, mask) if bit]
    assert counting == [*encoding.encode(' The "Normans"'), 50256, *encoding.encode(" 1066"), 50256]


# ---- what is used

def test_version_2(tmp_path, tokenizer):
    write(tmp_path / "in.json", "v2.0",
          ("Köln liegt am Rhein — 科隆. ", question(" Wo liegt Köln? ", "am Rhein", impossible=False),
           question("Who?", impossible=True)),
          ("", question("Of nothing?", "nothing", impossible=False)),
          ("A context.", question("  ", "A", impossible=False), question("Elsewhere?", "Not there", impossible=False),
           question("Empty?", "", impossible=False),
           question("Blank, then a text?", " ", "context\n", impossible=False)))
    text = script("squad", "--json", tmp_path / "in.json", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    before = "Köln liegt am Rhein — 科隆.\n\nQuestion: Wo liegt Köln?\n\nAnswer:"
    assert examples_of(tmp_path / "out", tokenizer) == [
        (before + " am Rhein", " am Rhein"),
        ("A context.\n\nQuestion: Elsewhere?\n\nAnswer: Not there", " Not there"),
        ("A context.\n\nQuestion: Blank, then a text?\n\nAnswer: context", " context")]
    assert ("3 of 7 questions used; skipped: 1 with an empty context; 1 with an empty question; 2 without an answer.\n"
            in text)
    assert "1 of them with an answer that does not occur in its context" in text
    assert script("squad", "--json", tmp_path / "in.json", "--tokenizer", tokenizer,
                  "--out", tmp_path / "out") == text, "the counts are kept"


def test_version_1(tmp_path, tokenizer):
    """The first of several answers is used."""
    write(tmp_path / "in.json", "1.1",
          ("One two three.", question("Which?", "two", "two three"), question("And?", "three")))
    text = script("squad", "--json", tmp_path / "in.json", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert [answer for _, answer in examples_of(tmp_path / "out", tokenizer)] == [" two", " three"]
    assert "2 of 2 questions used; skipped: none." in text and "does not occur" not in text


def test_what_does_not_fit_is_dropped(tmp_path, tokenizer):
    """End-of-text, 26 bytes of prompt and 3 of answer are 30 tokens; the end-of-text after them is only a target."""
    write(tmp_path / "in.json", "1.1", ("Ab.", question("Q?", "x1"), question("Q?", "x12")))
    text = script("squad", "--json", tmp_path / "in.json", "--tokenizer", tokenizer, "--max-tokens", 30,
                  "--out", tmp_path / "out")
    assert [answer for _, answer in examples_of(tmp_path / "out", tokenizer)] == [" x1"]
    assert "1 of 2 questions used; skipped: 1 too long, over 30 tokens." in text
    text = script("squad", "--json", tmp_path / "in.json", "--tokenizer", tokenizer, "--max-tokens", 29,
                  "--out", tmp_path / "none", code=2)
    assert "2 documents (2 too long), and no text to train on" in text and "raise --max-tokens" in text


def test_validation(tmp_path, tokenizer):
    """A part of the paragraphs, with all their questions."""
    write(tmp_path / "in.json", "1.1",
          *((f"Paragraph {i}.", question("Which?", str(i)), question("Really?", "Paragraph")) for i in range(30)))
    script("squad", "--json", tmp_path / "in.json", "--tokenizer", tokenizer, "--out", tmp_path / "out",
           "--val-fraction", 0.3)
    contexts = {split: [text.split("\n")[0] for text, _ in examples_of(tmp_path / "out", tokenizer, split)]
                for split in ("train", "val")}
    assert not set(contexts["train"]) & set(contexts["val"]) and len(contexts["train"] + contexts["val"]) == 60
    assert 6 <= len(contexts["val"]) <= 30 and all(contexts["val"].count(context) == 2 for context in contexts["val"])


@pytest.mark.parametrize("words, remedy", [
    (["--val-json", "dev.json"], "pass those to train on with --json, too; to use the download, drop --val-json"),
    (["--version", "2.0", "--json", "in.json"], "Drop --version, or drop --json to download")])
def test_flags_that_exclude_each_other(tmp_path, tokenizer, words, remedy):
    """Nothing is downloaded and nothing is written."""
    text = script("squad", *words, "--tokenizer", tokenizer, "--out", tmp_path / "out", code=2)
    assert words[0] in text and "--json" in text and remedy in " ".join(text.split())
    assert not (tmp_path / "out").exists()


def test_all_files_of_a_repeated_flag_count(tmp_path, tokenizer):
    for name in "abcd":
        write(tmp_path / f"{name}.json", "1.1", (f"It is {name}.", question("Who?", name)))
    words = ["--json", tmp_path / "a.json", "--json", tmp_path / "b.json", "--val-json", tmp_path / "c.json",
             "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    script("squad", *words, "--val-json", tmp_path / "d.json")
    assert [answer for _, answer in examples_of(tmp_path / "out", tokenizer)] == [" a", " b"]
    assert [answer for _, answer in examples_of(tmp_path / "out", tokenizer, "val")] == [" c", " d"]
    assert "made with val = " in script("squad", *words, code=2)


@pytest.mark.parametrize("content, message", [
    ("{", "not valid JSON"), ("", "If squad.py downloaded it, remove it and rerun the command."),
    ("[1]", "expected an object with 'data', an array, found [1]."),
    ('{"data": [{"title": "x"}]}', "article 0: expected 'paragraphs', an array"),
    ('{"data": [{"paragraphs": [{"context": 5}]}]}', "article 0, paragraph 0: expected 'context', a string, found 5"),
    ('{"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "q"}]}]}]}',
     "question 0: expected 'answers', an array, found null"),
    ('{"data": []}', "0 documents, and no text to train on")])
def test_wrong_files(tmp_path, tokenizer, content, message):
    (tmp_path / "in.json").write_text(content)
    text = script("squad", "--json", tmp_path / "in.json", "--tokenizer", tokenizer, "--out", tmp_path / "out", code=3)
    assert message in text and str(tmp_path) in text and not list((tmp_path / "out").glob("*.bin"))


# ---- a folder that was changed

def test_a_missing_mask_is_noticed(tmp_path, tokenizer):
    write(tmp_path / "in.json", "1.1", *facts(3))
    words = ["--json", tmp_path / "in.json", "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    script("squad", *words)
    (tmp_path / "out/squad_train_000001.mask").unlink()
    assert "squad_train_000001.mask: expected" in script("squad", *words, code=3)


# ---- downloads

def test_download(tmp_path, monkeypatch):
    class Interrupted(io.BytesIO):
        headers = {"Content-Length": "100"}

    monkeypatch.setattr(sources, "DATA", tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "file.json").write_bytes(b"content")
    at, synced = f"file://{tmp_path}/", []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").resolve().name))
    path = sources.download(at + "file.json", "--json")
    assert synced == ["file.json", "cache"]
    assert path.read_bytes() == b"content" and path == tmp_path / "data/cache/file.json"
    for reason in "No such file", "expected 100 bytes, received 9":
        message = f"none.json: cannot download it: .*{reason}.*\n.* pass it with --json"
        with pytest.raises(shards.DataError, match=message) as caught:
            sources.download(at + "none.json", "--json")
        assert caught.value.code == 3
        monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Interrupted(b"only this"))
    assert sources.download(at + "file.json", "--json") == path, "the second time, it is there"
    assert [path.name for path in (tmp_path / "data/cache").iterdir()] == ["file.json"]


# ---- the trainer

def test_the_loss_counts_answers_and_their_ends(tmp_path, tokenizer):
    """An untrained model's loss is ln V for each token that counts: five for " red" and its end, six for blue, seven
    for green."""
    write(tmp_path / "in.json", "1.1", *facts(12))
    script("squad", "--json", tmp_path / "in.json", "--tokenizer", tokenizer, "--out", tmp_path / "data")
    text = trainer.train(tmp_path / "data", "--model", "layers=1,heads=2,channels=16,ffn=24", "--pack", "example",
                         "--seq-len", 64, "--batch", 12,
                         "--steps", 1, "--lr", 0, "--out", tmp_path / "out", model=False)
    assert "12 windows of 64, 1.0 steps per epoch" in text
    ends = 1 + np.array([len(" red"), len(" blue"), len(" green")])
    assert trainer.losses(tmp_path / "out")[0] == pytest.approx(ends.mean() * math.log(257), rel=0.01)


def test_template():
    """doc/data.md states it on one line."""
    assert squad.prompt("CONTEXT", "QUESTION").replace("\n", "\\n") in (trainer.ROOT / "doc/data.md").read_text()

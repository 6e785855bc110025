"""Tokenizers of other kinds: data/vocabulary.py and text/tokenizer.c agree on which the C programs can use, and the
trainer trains on shards of any. Also the vocabulary size of a new model: that of --model, or else the tokenizer's, or
else the default."""
import copy
import ctypes
import json
import random
import time

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import byte_text
from calls import prepare
from test_tokenizer import AFTER_SPECIAL, AWKWARD, INSIDE, MORE, CTokenizer, Error, library      # noqa: F401, a fixture
from tiny import BIN, END_OF_TEXT, VOCAB, run, sentences, vocabulary, write_data
from trainer import checkpoint, embedding, make_data, train, write_shard

DATA = write_data
SHAPE = "layers=1,heads=2,channels=16,ffn=24"
FLAGS = ["--seq-len", 8, "--batch", 4, "--steps", 2, "--warmup", 0]
SPLIT = r"\p{N}{1,3}|\s?\p{L}+|[^\s\p{L}\p{N}]+|\s+"


def byte_level():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def trained(model, trainer, words=None, normalizer=None, texts=None):
    """tokenizer.json of a vocabulary trained here."""
    tokenizer = Tokenizer(model)
    if words:
        tokenizer.pre_tokenizer = words
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts or sentences(100), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return json.loads(tokenizer.to_str())


def across(words, normalizer=None):
    """A vocabulary whose merges cross all ends of words, so that ids show where words end."""
    whole = bpe(byte_level(), texts=[*sentences(100), *AWKWARD, *MORE], size=1500, normalizer=normalizer)
    return whole | {"pre_tokenizer": bpe(words)["pre_tokenizer"]}


def bpe(words=None, alphabet=True, special=(), size=VOCAB, **more):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=letters, special_tokens=list(special),
                                  show_progress=False)
    return trained(models.BPE(), trainer, words or pre_tokenizers.ByteLevel(add_prefix_space=False), **more)


def digits_first(individual=True):
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=individual),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False)])


def changed(whole, **change):
    """A copy with other values: model__dropout=0.1 sets whole["model"]["dropout"]."""
    whole = copy.deepcopy(whole)
    for path, value in change.items():
        *outer, last = path.split("__")
        place = whole
        for key in outer:
            place = place[key]
        place[last] = value
    return whole


def split_words(pattern, behavior="isolated"):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior), byte_level()])


def llama2_normalizer():
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def fallback(words=None, normalizer=None, across=True):
    """BPE on characters with byte fallback, as Llama 2's, and with tokens of several words if `across`."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = llama2_normalizer()
    learned.pre_tokenizer = None if across else pre_tokenizers.Metaspace()
    learned.train_from_iterator(sentences(100), trainers.BpeTrainer(vocab_size=VOCAB, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    model |= {"vocab": {name: i for i, name in enumerate(names)}, "unk_token": "<unk>", "fuse_unk": True,
              "byte_fallback": True}
    tokenizer = Tokenizer.from_str(json.dumps(vocabulary.bpe_json(model, [], words=None, decoder=None)))
    if words:
        tokenizer.pre_tokenizer = words
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(names[:3])
    return json.loads(tokenizer.to_str())


def tokenizer_files():
    """{name: (tokenizer.json, whether the C programs can use it)}. The `tokenizers` library can open each."""
    plain = bpe()
    vocab, merges = plain["model"]["vocab"], plain["model"]["merges"]
    special = plain["added_tokens"][0]
    some = bpe(digits_first(), alphabet=False)
    missing = next(letter for letter in "JQXZ" if letter not in some["model"]["vocab"])
    by_length = sorted(vocab, key=lambda name: vocab[name])
    sequence, level = pre_tokenizers.Sequence, pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    another = lambda **token: changed(plain, added_tokens=[special, special | {"id": VOCAB} | token])
    llama2 = fallback(normalizer=llama2_normalizer())
    pieces = llama2["model"]["vocab"]
    metaspace = fallback(pre_tokenizers.Metaspace(split=False))
    metaspace_words = {key: metaspace["pre_tokenizer"][key] for key in ("type", "replacement", "split")}
    return {
        "ours": (plain, True),
        "merges as text": (changed(plain, model__merges=[" ".join(pair) for pair in merges]), True),
        "a gap in the ids": (
            changed(plain, model__vocab=vocab | {"zzz": VOCAB + 20}, added_tokens=[special | {"id": VOCAB}]), True),
        "words of special tokens": (
            changed(plain, post_processor={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
                                           "use_regex": True}), True),
        "truncation": (
            changed(plain, truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst",
                                       "stride": 0}), True),
        "digits": (across(digits_first()), True),
        "special tokens first": (bpe(digits_first(), special=["<|endoftext|>", "<|im_start|>", "<pad é>"]), True),
        "digits, some bytes alone": (some, True),
        "a special token in place of a byte": (
            changed(some, added_tokens=[*some["added_tokens"], special | {
                "id": 1 + some["added_tokens"][0]["id"], "content": missing}]), True),
        "some bytes alone, an unknown token": (changed(some, model__unk_token="a"), False),
        "digits last": (bpe(sequence([level, digits])), False),
        "digits twice": (bpe(sequence([digits, digits_first()])), False),
        "runs of digits": (bpe(digits_first(individual=False)), False),
        "digits, no words": (bpe(sequence([digits, byte_level()])), False),
        "digits, space in front": (bpe(sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=True)])), False),
        "split": (bpe(split_words(SPLIT)), False),
        "a sequence of one": (bpe(sequence([level])), False),
        "space in front": (bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)), False),
        "no words": (bpe(byte_level()), False),
        "NFC": (bpe(normalizer=normalizers.NFC()), True),
        "NFKC": (bpe(normalizer=normalizers.NFKC()), False),
        "Llama 3's words": (
            changed(across(split_words(vocabulary.PATTERNS[0])), model__ignore_merges=True), True),
        "Qwen's words": (across(split_words(vocabulary.PATTERNS[1]), normalizers.NFC()), True),
        "Llama 3's words, removed": (bpe(split_words(vocabulary.PATTERNS[0], "removed")), False),
        "Llama 3's words, and ByteLevel's": (
            bpe(sequence([pre_tokenizers.Split(Regex(vocabulary.PATTERNS[0]), "isolated"), level])), False),
        "Llama 2": (llama2, True),
        "Llama 2, no merges across spaces": (fallback(normalizer=llama2_normalizer(), across=False), True),
        "metaspace first": (fallback(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)), True),
        "metaspace always": (fallback(pre_tokenizers.Metaspace(prepend_scheme="always", split=False)), True),
        "metaspace never": (fallback(pre_tokenizers.Metaspace(prepend_scheme="never", split=False)), True),
        "metaspace by default": (changed(metaspace, pre_tokenizer=metaspace_words), True),
        "metaspace, an old file": (
            changed(metaspace, pre_tokenizer=metaspace_words | {"add_prefix_space": False}), True),
        "metaspace that contradicts itself": (
            changed(metaspace, pre_tokenizer=metaspace_words | {"add_prefix_space": False, "prepend_scheme": "first"}),
            False),
        "spaces replaced": (fallback(normalizer=normalizers.Replace(" ", "▁")), True),
        "metaspace, split": (fallback(pre_tokenizers.Metaspace(prepend_scheme="first", split=True)), False),
        "metaspace of another sign": (
            fallback(pre_tokenizers.Metaspace(replacement="_", prepend_scheme="first", split=False)), False),
        "byte fallback, no spaces": (fallback(), False),
        "byte fallback, both": (
            fallback(pre_tokenizers.Metaspace(prepend_scheme="first", split=False), llama2_normalizer()), False),
        "byte fallback, whole words": (
            changed(llama2, model__ignore_merges=True), False),
        "byte fallback, a byte missing": (
            changed(llama2, model__vocab={name.replace("<0x41>", "<none>"): i for name, i in pieces.items()}), False),
        "byte fallback, a space in a name": (
            changed(llama2, model__vocab=pieces | {"a b": 5000}), False),
        "dropout": (changed(plain, model__dropout=0.1), False),
        "byte fallback": (changed(plain, model__byte_fallback=True), False),
        "ignore merges": (changed(plain, model__ignore_merges=True, model__merges=merges[:40]), True),
        "several at once": (
            changed(bpe(byte_level(), normalizer=normalizers.Lowercase()), model__ignore_merges=True), False),
        "not special": (
            changed(plain, added_tokens=[special, *(special | {"id": VOCAB + i, "content": name, "special": False} for
                                                    i, name in enumerate(("  ", "cat", "<|end", "at d", "catch")))]),
            True),
        "not special, normalized": (another(content="  ", special=False, normalized=True), False),
        "not special, a word alone": (another(content="cat", special=False, single_word=True), False),
        "some bytes alone": (bpe(alphabet=False), True),
        "a name outside the alphabet": (
            changed(plain, model__vocab=vocab | {"a b": VOCAB}, added_tokens=[special | {"id": VOCAB}]), False),
        "no end of text": (changed(plain, added_tokens=[]), False),
        "word pieces": (
            trained(models.WordPiece(unk_token="[UNK]"),
                    trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=["[UNK]"], show_progress=False),
                    pre_tokenizers.Whitespace()), False),
        "unigram": (
            trained(models.Unigram(), trainers.UnigramTrainer(vocab_size=200, show_progress=False),
                    pre_tokenizers.Metaspace()), False),
        "added tokens with other ids": (another(content="<pad>", id=VOCAB + 20), False),
        "a pair twice": (changed(plain, model__merges=[*merges, merges[0]]), False),
        "two names for one id": (changed(plain, model__vocab=vocab | {by_length[-1]: vocab[by_length[-2]]}), False),
    }


FILES = tokenizer_files()


def in_c(library, path):
    """The list of reasons for which tokenizer_open() rejects the file."""
    error = Error()
    handle = library.tokenizer_open(str(path).encode(), ctypes.byref(error))
    if handle:
        library.tokenizer_close(handle)
        return []
    text = error.text.decode(errors="replace")
    assert error.code == 3 and text.startswith(f"{path}: ")
    head, *lines = text.split("\n  - ")
    return lines or [head.removeprefix(f"{path}: ").removesuffix(".")]


@pytest.mark.parametrize("name", FILES)
def test_python_and_c_accept_the_same_tokenizers(name, library, tmp_path):
    whole, usable = FILES[name]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole))
    found = vocabulary.unusable(path.read_text())
    assert [reason[:100] for reason in in_c(library, path)] == [reason[:100] for reason in found]
    assert (found == []) == usable
    vocab, end = ctypes.c_int(), ctypes.c_int()
    assert library.tokenizer_ids(str(path).encode(), ctypes.byref(vocab), ctypes.byref(end))
    try:
        known = Tokenizer.from_file(str(path))
    except Exception:                                     # the last rows contradict themselves
        assert name in ("a pair twice", "two names for one id", "metaspace, an old file",
                        "metaspace that contradicts itself")
        return
    if name == "added tokens with other ids":
        return
    assert vocab.value == 1 + max(known.get_vocab().values())
    ends = [known.token_to_id(token) for token in vocabulary.DOCUMENT_TOKENS]
    assert end.value == next((i for i in ends if i is not None), -1)
    if usable:
        tokenizer, c = vocabulary.load_json(path), CTokenizer(library, path)
        texts = [*sentences(50, seed=3), *AWKWARD, *MORE, "<|endoftext|> <pad é> 123 it's   ",
                 "J in  1 Q  2X3Z   4''s ½² Ⅷ  ٣\n\n5\0\x1d6\U00011DE0 \U00016FF4", " ", "▁the", " the", "  ▁ x",
                 "catcher cat  dat do<|endoftext|>cat", "e\u0301\u0323 \uFB2C", "<s> the</s><0x41>"]
        data = [text.encode() for text in texts] + [b"the \xff\xe2\x96 1\xf0\x9f\x98 \xed\xa0\x80", b"e\xcc\x81\xcc"]
        expected = tokenizer.encode_batch([one.decode("utf-8", "replace") for one in data])
        assert all((c.encode(one) == ids).all() for one, ids in zip(data, expected))
        assert all((c.encode_at(INSIDE, text.encode()) == ids).all()
                   for text, ids in zip(texts, tokenizer.encode_inside(texts)))
        after = known.encode(whole["added_tokens"][0]["content"] + "a", add_special_tokens=False).ids[1:]
        assert c.encode_at(AFTER_SPECIAL, b"a").tolist() == after
        for token in whole["added_tokens"]:
            content = token["content"].encode()
            assert library.tokenizer_special(c.handle, content) == (token["id"] if token["special"] else -1)
            assert c.token(token["id"]) == content
        assert library.tokenizer_end_of_text(c.handle) == end.value
        assert library.tokenizer_adds_space(c.handle) == c.token(c.encode(b"a")[0]).startswith(b" ")


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("words", [None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)])
def test_settings_without_a_space_in_front(kind, words, library, tmp_path):
    """add_prefix_space false in tokenizer_config.json, as transformers reads it."""
    from transformers import AutoTokenizer
    whole = fallback(words, None if words else llama2_normalizer(), across=False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    settings = {"add_prefix_space": False, "tokenizer_class": kind, "unk_token": "<unk>", "bos_token": "<s>",
                "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    texts = ["the cat", " the  cat", "a", "日本 é", *sentences(5, seed=4)]
    expected = AutoTokenizer.from_pretrained(tmp_path)(texts, add_special_tokens=False).input_ids
    found = CTokenizer(library, tmp_path)
    assert [found.encode(text.encode()).tolist() for text in texts] == expected
    assert [ids.tolist() for ids in vocabulary.load_json(tmp_path).encode_batch(texts)] == expected


def test_many_added_tokens_take_little_time(library, tmp_path):
    """Names that model.vocab has in other characters than ByteLevel's, and names that are found in text."""
    whole, count = bpe(), 40_000
    special = whole["added_tokens"][0]
    for i in range(count):
        whole["model"]["vocab"][f"日{i}"] = VOCAB + i
        whole["added_tokens"].append(special | {"id": VOCAB + i, "content": f"日{i}", "special": i % 2 == 0})
    whole["model"]["vocab"]["<|endoftext|>"] = END_OF_TEXT
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    start = time.process_time()
    tokenizer = CTokenizer(library, tmp_path)
    ids = tokenizer.encode("日12日345日9".encode() * 20_000)
    assert time.process_time() - start < 5 and len(ids) > 20_000
    text = "日12日345日9 日99999日77777 日"
    assert tokenizer.encode(text.encode()).tolist() == vocabulary.load_json(tmp_path).encode_batch([text])[0].tolist()


# ---------------------------------------------------------------- through the programs

SPLITS = {"ours": bpe(), "digits": bpe(digits_first()), "llama3": bpe(split_words(vocabulary.PATTERNS[0])),
          "qwen": bpe(split_words(vocabulary.PATTERNS[1]), normalizer=normalizers.NFC())}


@pytest.mark.parametrize("name", SPLITS)
def test_long_texts_are_cut_where_words_start(name, monkeypatch):
    monkeypatch.setattr(vocabulary, "LONG", 4)
    monkeypatch.setattr(vocabulary, "PIECE", 8)
    whole, cut = vocabulary.library_encoder(SPLITS[name]), vocabulary.encoder(SPLITS[name])
    rng = random.Random(1)
    alphabet = [*" " * 8, *"\n\r\t\v\x1c\x85\u2000\u2028\u00a0\u200bab'1½!\u0301é中", "'s"]
    texts = ["".join(rng.choice(alphabet) * rng.choice((1, 1, 1, 7)) for _ in range(25)) for _ in range(3000)]
    for text, expected, found in zip(texts, whole(texts), cut(texts)):
        assert found.tolist() == expected.tolist(), repr(text)


def test_a_text_that_the_library_rejects(tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="?"))
    tokenizer.save(str(path))
    with pytest.raises(vocabulary.DataError, match="would become the token between documents"):
        vocabulary.load(path)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    with pytest.raises(vocabulary.DataError, match="cannot encode.*\n.*--tokenizer"):
        vocabulary.load(path).encode_batch(["b"])


@pytest.mark.parametrize("name", ["ours", "split", "unigram", "Llama 2"])
def test_training_on_shards_of_any_tokenizer(name, tmp_path):
    """The script says so before it encodes. The trainer warns once, shows samples as ids, and stores the tokenizer in
    the checkpoint for transformers."""
    whole, usable = FILES[name]
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    (tmp_path / "in.txt").write_text("\n\n".join(sentences(300, seed=4)))
    data = tmp_path / "data"
    said = prepare("text", tmp_path / "in.txt", "--separator", "\n\n", "--tokenizer", tmp_path / "tokenizer.json",
                   "--out", data)
    size = vocabulary.load_json(data).vocab
    assert ("cannot use this tokenizer" in said) == (not usable) and ("token ids" in said) == (not usable)
    printed = train(data, "--model", SHAPE, *FLAGS, "--sample-every", 1, "--out", tmp_path / "out", model=False)
    assert printed.count("warning") == (not usable) and f"vocabulary {size} (from the tokenizer), tied" in printed
    sample = (tmp_path / "out/samples.txt").read_text(errors="replace").splitlines()[1]
    assert usable or all(word.isdigit() for word in sample.split()), sample
    folder = checkpoint(tmp_path / "out", 2)
    config = json.loads((folder / "config.json").read_text())
    end = vocabulary.load_json(data).end_of_text
    assert (config["vocab_size"], config["eos_token_id"]) == (size, end)
    assert (folder / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()
    train(data, "--out", tmp_path / "out", "--resume", "--steps", 3, model=False)
    output, errors = run(BIN / "sample_gpt2", "--model", folder, "--prompt", "the cat" if usable else "1,2",
                         "--max-new-tokens", 3)
    assert output.startswith("the cat" if usable else "1,2,") and ("token ids" in errors) == (not usable)
    if not usable:
        assert ("that this program supports"
                in run(BIN / "sample_gpt2", "--model", folder, "--prompt", "the cat", code=2)[1])


# What a stranger may have in tokenizer_config.json: transformers would import the module under trust_remote_code=True.
CLASS = '["../module.Stranger", "../module.Stranger"]'
STRANGERS = {
    "plain": f'{{"auto_map": {{"AutoTokenizer": {CLASS}}}, "tokenizer_class": "Stranger", '
             '"eos_token": "<|endoftext|>"}',
    "old": f'{{"auto_map": {CLASS}, "eos_token": "<|endoftext|>"}}',
    "escaped": f'{{"\\u0061uto\\u005Fm\\u0061p": {{"AutoTokenizer": {CLASS}}}, "eos_token": "<|endoftext|>"}}',
    "twice": f'{{"auto_map": {{}}, "eos_token": "<|endoftext|>", "auto_map": {{"AutoTokenizer": {CLASS}}}}}',
    "inside": f'{{"a": [{{"b": {{"Auto_Map": {CLASS}}}}}], "a": 1, "custom_pipelines": {{"x": {CLASS}}}, '
              '"eos_token": "<|endoftext|>"}',
    "class": '{"tokenizer_class": "stranger/x--module.Stranger", "eos_token": "<|endoftext|>"}',
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_strangers_code_stays_behind(name, tmp_path, monkeypatch):
    """It gets neither from a tokenizer into shards nor from a folder of shards into a checkpoint, and other settings
    stay."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    from transformers import AutoTokenizer
    whole = FILES["ours"][0]
    (tmp_path / "data").mkdir()
    (tmp_path / "module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Stranger: pass\n")
    tokenizer, settings = tmp_path / "data/tokenizer.json", tmp_path / "data/tokenizer_config.json"
    tokenizer.write_text(json.dumps(whole))
    settings.write_text(STRANGERS[name])
    copied = vocabulary.load_json(tokenizer).files[settings.name]
    write_shard(tmp_path / "data/d_train_000001.bin", np.arange(3000) % 97)
    train(tmp_path / "data", "--model", SHAPE, *FLAGS, "--steps", 0, "--out", tmp_path / "out", model=False)
    folder = checkpoint(tmp_path / "out", 0)
    for text in copied, (folder / settings.name).read_bytes():
        assert json.loads(text)["eos_token"] == "<|endoftext|>"
        pairs = []
        json.loads(text, object_pairs_hook=pairs.extend)
        assert not any("auto_map" in key.lower() or "custom" in key or "module" in str(value) for key, value in pairs)
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("the cat")["input_ids"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_does_not_carry_a_file_into_shards(name, tmp_path):
    byte_text.write_tokenizer(tmp_path)
    blob = tmp_path.with_name(tmp_path.name + "_private")
    blob.write_bytes((tmp_path / name).read_bytes() if (tmp_path / name).exists() else b"{}")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(blob)
    with pytest.raises(vocabulary.DataError, match=f"{name}: expected a file in its folder"):
        vocabulary.load(str(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(vocabulary.DataError, match="regular file|in its folder"):
        vocabulary.load(str(tmp_path))


def test_harmless_settings_are_copied_as_they_are(tmp_path):
    """Also numbers that C would write in another way; a file that is not a JSON object stays behind."""
    make_data(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(FILES["ours"][0]))
    for text, kept in ('{"model_max_length": 1000000000000000019884624838656,\n "tokenizer_class": "GPT2Tokenizer"}',
                       True), ('{"a": NaN, "auto_map": 1}', False), ('[{"auto_map": 1}]', False):
        (tmp_path / "tokenizer_config.json").write_text(text)
        out = tmp_path / f"out_{len(text)}"
        printed = train(tmp_path, "--model", SHAPE, *FLAGS, "--steps", 0, "--out", out, model=False)
        copied = checkpoint(out, 0) / "tokenizer_config.json"
        assert copied.read_text() == text if kept else "saved without" in printed and not copied.exists()


def test_a_damaged_tokenizer_is_an_error(tmp_path):
    make_data(tmp_path)
    for text in ('{"model": {"vocab": ', "{}"):
        (tmp_path / "tokenizer.json").write_text(text)
        message = train(tmp_path, "--model", SHAPE, *FLAGS, "--out", tmp_path / "out", model=False, code=3)
        assert str(tmp_path / "tokenizer.json") in message and not (tmp_path / "out").exists()


@pytest.mark.parametrize("model, vocab, why", [
    (SHAPE, VOCAB, "from the tokenizer"),
    ("15M,layers=1,ffn=24", VOCAB, "from the tokenizer"),
    (f"vocab=400,{SHAPE}", 400, "from --model"),
])
def test_a_new_models_vocabulary(model, vocab, why, data, tmp_path):
    printed = train(data, "--model", model, *FLAGS, "--steps", 0, "--out", tmp_path / "out", model=False)
    assert f"vocabulary {vocab} ({why}), tied" in printed
    assert len(embedding(tmp_path / "out", 0)) == vocab
    assert json.loads((checkpoint(tmp_path / "out", 0) / "config.json").read_text())["eos_token_id"] == END_OF_TEXT
    train(data, "--out", tmp_path / "out", "--resume", "--steps", 1, model=False)
    assert len(embedding(tmp_path / "out", 1)) == vocab


def test_gpt2s_tokenizer_gives_the_default(tmp_path):
    """So --model 124M on GPT-2's shards has the preset's vocabulary."""
    make_data(tmp_path)
    printed = train(tmp_path, "--model", SHAPE, *FLAGS, "--dry-run", model=False)
    assert "vocabulary 50,257 (default; no tokenizer found)" in printed
    (tmp_path / "tokenizer.json").write_bytes(vocabulary.load_gpt2().files["tokenizer.json"])
    write_shard(tmp_path / "d_train_000001.bin", np.arange(1000) % 50257)
    printed = train(tmp_path, "--model", "124M", "--seq-len", 8, "--batch", 1, "--dry-run", model=False)
    assert "vocabulary 50,257 (from the tokenizer)" in printed and "123,551,232 parameters" in printed


def test_a_vocabulary_that_is_too_small(data, tmp_path):
    """The advice fits the case: the vocabulary of --model can be enlarged, that of loaded weights cannot."""
    message = train(data, "--model", f"{SHAPE},vocab=200", *FLAGS, "--out", tmp_path / "out", model=False, code=3)
    assert f"has {VOCAB} tokens" in message and f"Omit vocab= from --model, or set vocab={VOCAB}" in message
    small = tmp_path / "small"
    small.mkdir()
    make_data(small)
    train(small, "--steps", 1, "--out", tmp_path / "first")
    folder = checkpoint(tmp_path / "first", 1)
    message = train(data, "--init-from", folder, *FLAGS, "--out", tmp_path / "out", model=False, code=3)
    assert (f"the vocabulary of the model in {folder} has 97" in message
            and "Encode the text with the model's own tokenizer" in message)
    assert "vocab=" not in message and not (tmp_path / "out").exists()


def test_model_beside_init_from_needs_no_vocabulary(data, tmp_path):
    train(data, "--model", SHAPE, *FLAGS, "--out", tmp_path / "first", model=False)
    folder = checkpoint(tmp_path / "first", 2)
    printed = train(data, "--init-from", folder, "--model", SHAPE, *FLAGS, model=False)
    assert f"vocabulary {VOCAB} (from the loaded model)" in printed
    train(data, "--init-from", folder, "--model", f"{SHAPE},vocab=400", *FLAGS, model=False, code=2)

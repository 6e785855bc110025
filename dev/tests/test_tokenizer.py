"""The C tokenizer against tiktoken (GPT-2) and against `tokenizers` (a vocabulary trained here), on megabytes of mixed
text."""
import ctypes
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from trainer import ROOT

sys.path[:0] = [str(ROOT / "data"), str(ROOT / "dev")]
import nfc_tables
import shakespeare
import tokenizer_classes
import vocabulary


SOURCES = ("runtime/activity", "runtime/own", "runtime/utf8", "runtime/json", "runtime/file", "runtime/error",
           "text/chat", "text/tokenizer", "text/tokenizer_json", "text/pretokenize", "text/nfc")
AT_START, AFTER_SPECIAL, INSIDE = range(3)      # text/tokenizer.h's TextPlace


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 2048)]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The tokenizer as a shared library."""
    path = tmp_path_factory.mktemp("library") / "tokenizer.so"
    sources = [ROOT / f"{name}.c" for name in SOURCES]
    subprocess.run([*os.environ.get("CC", "gcc").split(), "-std=gnu11", "-O2", "-shared", "-fPIC", f"-I{ROOT}",
                    "-o", path, *sources, "-lcjson", "-lxxhash"], check=True)
    c = ctypes.CDLL(str(path))
    c.tokenizer_open.restype = ctypes.c_void_p
    c.tokenizer_encode_at.restype = ctypes.c_size_t
    c.tokenizer_encode_at.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p,
                                      ctypes.c_size_t]
    c.tokenizer_token.restype = ctypes.c_void_p
    c.tokenizer_token.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_size_t)]
    c.tokenizer_special.restype = ctypes.c_int32
    c.tokenizer_special.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    for name in ("tokenizer_vocab", "tokenizer_end_of_text", "tokenizer_adds_space", "tokenizer_close"):
        getattr(c, name).argtypes = [ctypes.c_void_p]
    c.tokenizer_adds_space.restype = ctypes.c_bool
    return c


class CTokenizer:
    def __init__(self, c, folder):
        error = Error()
        self.c, self.handle = c, c.tokenizer_open(str(folder).encode(), ctypes.byref(error))
        assert self.handle, error.text

    def encode(self, data):
        return self.encode_at(AT_START, data)

    def encode_at(self, place, data):
        ids = np.empty(3 * len(data) + 1, np.int32)
        return ids[:self.c.tokenizer_encode_at(self.handle, place, data, len(data), ids.ctypes.data, len(ids))]

    def token(self, index):
        length = ctypes.c_size_t()
        address = self.c.tokenizer_token(self.handle, index, ctypes.byref(length))
        return ctypes.string_at(address, length.value) if address else None

    def decode(self, ids):
        tokens = {i: self.token(i) for i in set(ids.tolist())}
        return b"".join(tokens[i] for i in ids.tolist())


@pytest.fixture(scope="session")
def gpt2(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    for name, content in vocabulary.load_gpt2().files.items():
        (folder / name).write_bytes(content)
    return CTokenizer(library, folder)


@pytest.fixture(scope="session")
def tiktoken_gpt2():
    return vocabulary.gpt2_encoding()


# ---- text

def planes():
    """Every character of Unicode: in order, then shuffled with spaces and letters between."""
    everything = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    rng = random.Random(1)
    mixed = rng.sample(everything[:0x30000], 0x28000)
    return "".join(everything) + "".join(c + rng.choice(("", "", " ", "  ", "a", "7", "'", "\n")) for c in mixed)


def code():
    """Python's own source files."""
    return "".join(p.read_text("utf-8", "replace")
                   for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))[:4_000_000]


def hostile(seed, characters):
    """Contractions, runs of all kinds of spaces, digits, emoji with joiners, and combining marks, mixed."""
    rng = random.Random(seed)
    spaces = [chr(c) for c in (9, 10, 11, 12, 13, 28, 31, 32, 32, 32, 0x85, 0xA0, 0x1680, 0x2000, 0x200A, 0x200B,
                               0x2028, 0x3000, 0xFEFF)]
    words = ["'s", "'S", "'t", "'re", "'RE", "'ve", "'m", "'ll", "'d", "'", "''", "\u2019s", "the", "of", "Hello",
             "naïve", "straße", "мир", "世界", "こんにちは", "שלום", "مرحبا", "नमस्ते", "e\u0301", "\U0001F600",
             "\U0001F469\u200D\U0001F680", "\U0001F1E9\U0001F1EA", "½", "²", "Ⅷ", "٣", "1234567890", "3.14", "0x7f",
             "!?", "...", "<|endoftext|>", "\0", "\x7f", "\ufffd", "\U0010FFFF", "aaaaaaaa", "------", "{}();", "\\n"]
    found, size = [], 0
    while size < characters:
        piece = (rng.choice(words) if rng.random() < 0.6
                 else "".join(rng.choice(spaces) for _ in range(rng.randint(1, 6))))
        found.append(piece)
        size += len(piece)
    return "".join(found)


def broken(size):
    """Invalid UTF-8: random bytes, and valid text with bytes changed, dropped and truncated."""
    rng = random.Random(3)
    good = bytearray((hostile(4, size) + planes()[0x700:0x8000] * 3).encode()[:size])
    for _ in range(size // 8):
        at = rng.randrange(len(good) - 1)
        bad = rng.choice((rng.randrange(256), 0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0x80, 0xBF))
        good[at:at + rng.randint(0, 2)] = bytes([bad])
    return rng.randbytes(size) + bytes(good) + b"\xe2\x82"


def same(found, expected, data):
    if len(found) == len(expected) and (found == expected).all():
        return True
    n = min(len(found), len(expected))
    at = next((i for i in range(n) if found[i] != expected[i]), n)
    print(f"id {at}: found {found[at:at + 8]}, expected {expected[at:at + 8]} in {len(data)} bytes")
    return False


@pytest.fixture(scope="session")
def texts():
    return {"plays": "".join(shakespeare.works()), "code": code(), "planes": planes(), "hostile": hostile(2, 1_500_000)}


# ---- GPT-2

def test_equals_tiktoken(gpt2, tiktoken_gpt2, texts):
    assert sum(len(text.encode()) for text in texts.values()) > 10_000_000
    for name, text in texts.items():
        data = text.encode()
        found = gpt2.encode(data)
        assert same(found, tiktoken_gpt2.encode_to_numpy(text, disallowed_special=()), data), name
        assert gpt2.decode(found) == data, name


def test_short_texts(gpt2, tiktoken_gpt2, texts):
    """Texts that begin and end anywhere: the pattern looks ahead, so the end of the text matters."""
    rng = random.Random(5)
    for _ in range(20_000):
        text = rng.choice((texts["hostile"], texts["planes"]))
        start = rng.randrange(len(text))
        piece = text[start:start + rng.randint(0, 12)]
        assert gpt2.encode(piece.encode()).tolist() == tiktoken_gpt2.encode_ordinary(piece), repr(piece)


def test_broken_utf8(gpt2, tiktoken_gpt2):
    data = broken(600_000)
    with pytest.raises(UnicodeDecodeError):
        data.decode()
    assert same(gpt2.encode(data),
                tiktoken_gpt2.encode_to_numpy(data.decode("utf-8", "replace"), disallowed_special=()), data)
    rng = random.Random(6)
    edges = (0x20, 0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xE2, 0xED, 0xF0, 0xF1, 0xF4, 0xF5)
    for _ in range(20_000):
        piece = bytes(rng.choice(edges) for _ in range(rng.randint(1, 6)))
        assert gpt2.encode(piece).tolist() == tiktoken_gpt2.encode_ordinary(piece.decode("utf-8", "replace")), piece


def test_every_token(gpt2, tiktoken_gpt2):
    assert gpt2.c.tokenizer_vocab(gpt2.handle) == 50257 and gpt2.c.tokenizer_end_of_text(gpt2.handle) == 50256
    for index in range(50257):
        assert gpt2.token(index) == tiktoken_gpt2.decode_single_token_bytes(index)
    assert gpt2.token(-1) is None and gpt2.token(50257) is None


@pytest.mark.parametrize("word", ["a", "ab", " ", "\n", "7", "é", "\u0301", " \t", "ab1"])
def test_long_words(gpt2, tiktoken_gpt2, word):
    text = word * (300_000 // len(word))
    assert same(gpt2.encode(text.encode()), tiktoken_gpt2.encode_to_numpy(text, disallowed_special=()), text)


@pytest.mark.parametrize("run", [" ", "\t", " \n"])
def test_runs_that_are_too_long_for_tiktoken(gpt2, tiktoken_gpt2, run):
    text = f"word{run * (1_000_000 // len(run))}word"
    with pytest.raises(ValueError):
        tiktoken_gpt2.encode_to_numpy(text)
    assert same(vocabulary.load_gpt2().encode_batch(["a", text])[1], gpt2.encode(text.encode()), text)


# ---- vocabularies trained here

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>", "«a b»"]
AWKWARD = ["", "0", "00", "3.14159", "1,000,000", "a1b2c3", " 1", "  1", "   1 ", "1 ", "1  ", "\n\n7\n\n", "\t1\t2",
           "it's 5's '5 5'll", "'1s '", "1'", "x² + y³ = z⁴", "½ ¼cup 2½",
           "Ⅷ ⅷ ↊ Ⅷth", "٣٤٥ ۳۴ ९ ৯ ੩ ௧௨ ๑๒ ໒ ༣ ၄ 三 四五 〇 〧 ㊷ ①② ⒈ 𝟙𝟚 🄀 𐄇 𒐀", "5\u0301 5\u20e3 5️⃣",
           "\U0001F6005\U0001F600", "👨‍👩‍👧‍👦7", "\U00011DE0\U00011DE9 \U00016FF4  \U00016FF6",
           "  \U00011DDF  \U00011DEA  \U00016FF3", "\x001\x04\x06 2\x1d\x14", "<|im_start|>user 12<|im_end|>",
           "<|endoftext|>", "«a b»", " " * 99 + "1" + " " * 99, "\n" * 50 + "1" + "\r\n" * 50, "7" * 999]
MORE = ["", " ", "  ", "▁", " ▁the", "the", " the", "1234567 12 1", "it's IT'S 'Ll 'ſ ſ'S a'Sa d'REd", "'ſc",
        "e\u0301\u0323q\u0323\u0307 e\u0305\u0301", "\uFB2C\u0344\u212B\u1112\u1161\u11AB\uAC01\uAC00\u11A8",
        "a\r\n\n b  \n\t\n  c", "...\n\n!?\r\n", "<s>a</s>[INST]", "<think>x</think> <tool_call>",
        "<|im_start|>user<|im_end|>", "<0x41><unk>"]


@pytest.fixture(scope="module", params=["own", "digits", "digits, some bytes"])
def trained(request, library, texts, tmp_path_factory):
    """A vocabulary in C and in the library: as data/tinystories.py trains it; or like SmolLM2's, with special tokens
    first, digits as words, and perhaps no token for some bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    if request.param == "own":
        vocabulary.train([texts["plays"], texts["hostile"][:200_000]], 8000, path)
        return CTokenizer(library, path), vocabulary.load(path)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if request.param == "digits" else []
    trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=SPECIAL, initial_alphabet=alphabet,
                                  show_progress=False)
    tokenizer.train_from_iterator([texts["plays"][:300_000], texts["hostile"][:100_000]], trainer)
    tokenizer.save(str(path))
    return CTokenizer(library, path), vocabulary.load(path)


def test_equals_tokenizers(trained, texts):
    found, expected = trained
    rng = random.Random(7)
    pieces = AWKWARD + [text[start:start + 40_000] for text in texts.values()
                        for start in (0, len(text) // 3, len(text) - 40_000)]
    numbers = "".join(chr(first + i) for first, last, name in tokenizer_classes.ranges() if name == "NUMBER"
                      for i in range(last - first + 1))
    mixed = numbers + "\U00011DE3\U00016FF5" + "a  é\n'sÀ\u3000\u200b"
    pieces += ["".join(rng.choice(mixed) for _ in range(rng.randint(1, 9))) for _ in range(3000)]
    for piece, ids in zip(pieces, expected.encode_batch(pieces)):
        assert same(found.encode(piece.encode()), ids, piece.encode()), repr(piece[:80])


def test_transformers_reads_the_files(gpt2, tiktoken_gpt2, tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, content in vocabulary.load_gpt2().files.items():
        (tmp_path / name).write_bytes(content)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Hello  world, it's 1623!\n\n  naïve \U0001F600 "
    assert loaded(text)["input_ids"] == tiktoken_gpt2.encode_ordinary(text)
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id == loaded.bos_token_id == 50256 and len(loaded) == 50257


# ---- the committed table

def test_character_classes_are_tiktokens():
    assert (ROOT / "text/tokenizer_classes.h").read_text() == tokenizer_classes.header()


def test_nfc_tables_are_the_librarys():
    assert (ROOT / "text/nfc_tables.h").read_text() == nfc_tables.header()

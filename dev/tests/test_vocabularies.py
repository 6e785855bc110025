"""The C tokenizer against `tokenizers` with the vocabularies of Llama 3, Qwen, SmolLM2 and Mistral, on mixed text: 1 MB
each, or 10 MB with VOCABULARIES_LONG=1. SmolLM2's takes a large download, so that run gets it; by default it is tested
only if data/smollm2 is there."""
import functools
import os
import random

import numpy as np
import pytest
from tokenizers import Tokenizer

import vocabularies
from test_tokenizer import AWKWARD, MORE, CTokenizer, code, hostile, library, planes, same, shakespeare  # noqa: F401

BYTES = 10_000_000 if os.environ.get("VOCABULARIES_LONG") == "1" else 1_000_000


@pytest.fixture(scope="module")
def both_of(library, tmp_path_factory):      # noqa: F811
    """A function of a name: the name, the tokenizer in C and in the library."""
    @functools.cache
    def read(name):
        path = vocabularies.write(name, tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")
        known = Tokenizer.from_file(str(path))
        known.encode_special_tokens = True
        return name, CTokenizer(library, path), known
    return read


@pytest.fixture(params=vocabularies.KINDS)
def both(request, both_of):
    return both_of(request.param)


@pytest.fixture(scope="module")
def pieces():
    """Pieces of English, code, every Unicode character, and hostile text, of the same sizes."""
    each, size = BYTES // 4, 50_000
    found = []
    for text in ("".join(shakespeare.works()), code(), planes(), hostile(2, BYTES // 3)):
        data = (text * (1 + each // len(text))).encode()[:each].decode(errors="ignore")
        found += [data[i:i + size] for i in range(0, len(data), size)]
    random.Random(9).shuffle(found)
    return found


def ids_of(known, texts):
    return [np.array(one.ids, np.int32) for one in known.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.mark.drawn(3)
def test_equal_tokenizers(both, pieces):
    name, found, known = both
    assert sum(len(piece.encode()) for piece in pieces) > 0.99 * BYTES
    for piece, expected in zip(pieces, ids_of(known, pieces)):
        assert same(found.encode(piece.encode()), expected, piece.encode())


@pytest.mark.drawn(4)
def test_short_texts(both, pieces):
    """Texts that begin and end anywhere: patterns look ahead, and some tokenizers put a space in front."""
    _, found, known = both
    rng = random.Random(10)
    texts = AWKWARD + MORE
    for _ in range(5000):
        piece = rng.choice(pieces)
        start = rng.randrange(len(piece))
        texts.append(piece[start:start + rng.randint(0, 12)])
    for text, expected in zip(texts, ids_of(known, texts)):
        assert found.encode(text.encode()).tolist() == expected.tolist(), repr(text)


@pytest.mark.drawn(4)
def test_every_token(both):
    _, found, known = both
    assert found.c.tokenizer_vocab(found.handle) == known.get_vocab_size()
    for token, index in known.get_vocab().items():
        if "mistral" not in both[0]:
            expected = known.decoder.decode([token]) if token not in known.get_added_tokens_decoder() else token
            assert found.token(index).decode("utf-8", "replace") == expected
        elif token.startswith("<0x"):
            assert found.token(index) == bytes([int(token[3:5], 16)])
        else:
            assert found.token(index).decode() == token.replace("▁", " ")

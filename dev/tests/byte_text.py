"""A tokenizer of single bytes, and shards of text in it. It needs only NumPy, tqdm and pytest: machines with a GPU
may have little else."""
import json
import sys

import numpy as np

from trainer import ROOT, write_shard

sys.path.insert(0, str(ROOT / "data"))
import vocabulary

END_OF_TEXT, IM_START, IM_END, VOCAB = 256, 257, 258, 259
SPECIAL = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}


def write_tokenizer(folder, special=SPECIAL):
    """One token per byte, whose id is the byte, then the special ones."""
    added = [vocabulary.added_token(index, name) for name, index in special.items()]
    whole = vocabulary.bpe_json({"vocab": vocabulary.alphabet(), "merges": []}, added)
    assert vocabulary.unusable(json.dumps(whole)) == []
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(vocabulary.CONFIG))


def exchange_tokens(folder):
    """Exchanges the ids of two letters in the folder's tokenizer."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    vocab = whole["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def text_of(tokens):
    """Special tokens are shown by their names."""
    names = {index: name for name, index in SPECIAL.items()}
    return b"".join(names[i].encode() if i in names else bytes([i]) for i in tokens).decode()


def write_text(folder, count=30000, document=70, seed=1):
    """A shard of random lower-case letters and spaces; each document starts with end-of-text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(seed).choice(list(b"abcdefghijklmnopqrstuvwxyz    "), count)
    tokens[::document] = END_OF_TEXT
    write_shard(folder / "d_train_000001.bin", tokens)
    write_shard(folder / "d_val_000000.bin", tokens)
    write_tokenizer(folder)
    return folder

"""Shared by the tests of eval_gpt2's tasks: a tokenizer of single bytes, shards of text, and folders of tiny models with
random weights, each with the same model in the reference."""
import json
import shutil
import sys

import numpy as np
import torch

from tiny import BIN, BUILD, make_path, run
from trainer import ROOT, checkpoint, make, train, write_shard

sys.path.insert(0, str(ROOT / "data"))
sys.path.insert(0, str(ROOT / "dev" / "reference"))
import fixtures
import model as reference
import vocabulary
from safetensors.numpy import load_file, save_file

torch.set_num_threads(1)
END_OF_TEXT, IM_START, IM_END, VOCAB = 256, 257, 258, 259
SPECIAL = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
SHAPES = {"llama": dict(layers=2, heads=2, channels=16, ffn=24),
          "grouped": dict(layers=2, heads=4, kv_heads=2, channels=16, ffn=24, head_dim=6, tied=0),
          "QK norms": dict(layers=1, heads=2, kv_heads=1, channels=16, ffn=24, qk_norm=1),
          "gau": dict(layers=1, channels=16, tied=0, block="gau")}
SAFE = 0.7        # times the fixtures' weights, so that exp without a norm does not overflow float32


def write_tokenizer(folder, special=SPECIAL):
    """One token per byte, whose id is the byte, then the special ones."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [{"id": index, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for name, index in special.items()]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary.alphabet(), "merges": []}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level,
             "post_processor": None, "decoder": byte_level, "model": model}
    assert vocabulary.unusable(json.dumps(whole)) == []
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(vocabulary.CONFIG))


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


def write_model(folder, data, shape, attn, L, vocab=VOCAB):
    """A folder with random weights and scalars, large enough that every normalizer differs, and the same model in the
    reference: (tensors, config). The trainer writes config.json."""
    keys = dict(tied=1, vocab=vocab) | SHAPES[shape]
    flag = ",".join(f"{key}={value}" for key, value in keys.items())
    out = folder.with_name(folder.name + "-run")
    train(data, "--train-data", f"{data}/*_train_*.bin", "--model", flag, "--attn", attn, "--seq-len", 8, "--batch", 1, "--steps", 0, "--out", out, model=False)
    folder.mkdir()
    found = json.loads((checkpoint(out, 0) / "config.json").read_text())
    found["max_position_embeddings"] = found["attention_normalizer"]["seq_len"] = L
    (folder / "config.json").write_text(json.dumps(found))
    for path in [*checkpoint(out, 0).glob("*.py"), *checkpoint(out, 0).glob("tokenizer*")]:
        shutil.copy(path, folder)
    config = reference.Config(**keys, attn=attn, L=L)
    tensors = {name: fixtures.parameter(name, shape) for name, shape in reference.parameter_shapes(config).items()}
    tensors = {name: (SAFE * tensor if tensor.ndim == 2 else tensor).float().double() for name, tensor in tensors.items()}
    fixed = load_file(checkpoint(out, 0) / "model.safetensors")       # a fixed s is stored, but the reference has no such parameter
    save_file(fixed | {name: tensor.float().numpy() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors, config


def evaluate(task, folder, data, out, *flags, code=0):
    """Stdout and eval.json; or, where the exit code is not 0, stderr. `data` (a folder, or None) and `out` may be
    overridden by the flags, of which the last one counts."""
    words = ["--task", task, "--model", folder, "--picture", 0, *(["--data", f"{data}/*_val_*.bin"] if data else []), *(["--out", out] if out else []), *flags]
    output, errors = run(BIN / "eval_gpt2", *words, code=code)
    return errors if code else (output, json.loads((out / "eval.json").read_text()))


def build():
    if not (BIN / "eval_gpt2").exists():
        make(f"BUILD={make_path(BUILD)}", make_path(BIN / "eval_gpt2"), check=True)


def models(root, data, **more):
    """A function of shape, normalizer and L that returns (folder, tensors, the reference's config)."""
    made = {}

    def get(shape, attn, L=600):
        key = (shape, attn, L)
        if key not in made:
            folder = root / f"model{len(made)}"
            made[key] = (folder, *write_model(folder, data, shape, attn, L, **more))
        return made[key]
    return get

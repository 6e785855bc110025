"""Shared by the tests of eval_gpt2's tasks: folders of tiny models with random weights, each with the same model in
the reference."""
import json
import re
import shutil

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import fixtures
import model as reference
from tiny import BIN, run
from trainer import VOCAB, checkpoint, edit_tensors, train

torch.set_num_threads(1)
SHAPES = {"llama": dict(layers=2, heads=2, channels=16, ffn=24),
          "grouped": dict(layers=2, heads=4, kv_heads=2, channels=16, ffn=24, head_dim=6, tied=0),
          "QK norms": dict(layers=2, heads=2, kv_heads=1, channels=16, ffn=24, qk_norm=1, bias="qkv", gate="head"),
          "gau": dict(layers=1, channels=16, tied=0, block="gau")}
SAFE = 0.7        # times the fixtures' weights, so that exp without a norm does not overflow float32


def write_model(folder, data, shape, attn, L):
    """A folder with random weights and scalars, large enough that every normalizer differs, and the same model in the
    reference: (tensors, config). The trainer writes config.json."""
    vocab = VOCAB
    if (data / "tokenizer.json").exists():
        tokenizer = json.loads((data / "tokenizer.json").read_text())
        vocab = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    keys = dict(tied=1, vocab=vocab) | SHAPES[shape]
    flag = ",".join(f"{key}={value}" for key, value in keys.items())
    out = folder.with_name(folder.name + "-run")
    train(data, "--train-data", f"{data}/*_train_*.bin", "--model", flag, "--attn", attn, "--seq-len", 8, "--batch", 1,
          "--steps", 0, "--out", out, model=False)
    folder.mkdir()
    found = json.loads((checkpoint(out, 0) / "config.json").read_text())
    found["max_position_embeddings"] = found["attention_normalizer"]["seq_len"] = L
    (folder / "config.json").write_text(json.dumps(found))
    for path in [*checkpoint(out, 0).glob("*.py"), *checkpoint(out, 0).glob("tokenizer*")]:
        shutil.copy(path, folder)
    config = reference.Config(**keys, attn=attn, L=L)
    tensors = {name: fixtures.parameter(name, shape) for name, shape in reference.parameter_shapes(config).items()}
    tensors = {name: (SAFE * tensor if tensor.ndim == 2 else tensor).float().double()
               for name, tensor in tensors.items()}
    # A fixed s is stored, but the reference has no such parameter.
    fixed = load_file(checkpoint(out, 0) / "model.safetensors")
    save_file(fixed | {name: tensor.float().numpy() for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    return tensors, config


def with_weights(folder, out, change):
    """Copies a model to `out`, applies change(tensors) to its weights, and returns the copy."""
    shutil.copytree(folder, out)
    edit_tensors(out / "model.safetensors", change)
    return out


def overflowing(folder, out):
    """A copy whose weights are finite, but whose activations are not."""
    return with_weights(folder, out, lambda tensors: tensors.update(
        {name: np.float32(1e25) * tensor for name, tensor in tensors.items() if re.search("(gate|up)_proj", name)}))


def write_chain(folder, text, end):
    """Changes the weights of a model so that each byte of the text, all of which differ, is followed by the next one,
    and the last one by the token `end`: each embedding points to the next byte's row of the head."""
    path = folder / "model.safetensors"
    tensors = {name: np.zeros_like(tensor) for name, tensor in load_file(path).items()}
    tensors["model.norm.weight"][:] = 1
    for i, (byte, following) in enumerate(zip(text, [*text[1:], end])):
        tensors["model.embed_tokens.weight"][byte, i] = tensors["lm_head.weight"][following, i] = 1
    save_file(tensors, path, metadata={"format": "pt"})


def evaluate(task, folder, data, out, *flags, code=0):
    """Stdout and eval.json; or, where the exit code is not 0, stderr. `data` (a folder, or None) and `out` may be
    overridden by the flags, of which the last one counts."""
    words = ["--task", task, "--model", folder, "--picture", 0, *(["--data", f"{data}/*_val_*.bin"] if data else []),
             *(["--out", out] if out else []), *flags]
    output, errors = run(BIN / "eval_gpt2", *words, code=code)
    return errors if code else (output, json.loads((out / "eval.json").read_text()))


def models(root, data, length):
    """A function of shape, normalizer and length that returns (folder, tensors, the reference's config)."""
    made = {}

    def get(shape, attn, L=length):
        key = (shape, attn, L)
        if key not in made:
            folder = root / f"model{len(made)}"
            made[key] = (folder, *write_model(folder, data, shape, attn, L))
        return made[key]
    return get

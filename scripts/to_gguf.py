"""Writes a softmax model and its tokenizer as a GGUF file, the format of llama.cpp.

    .venv/bin/python scripts/to_gguf.py out/run --out model.gguf

FOLDER is a checkpoint, a run (its newest checkpoint is taken) or any Hugging Face folder of a Llama, Mistral, Qwen2 or
Qwen3. train_gpt2, which must be built, checks it first.
Models with another normalizer, windows or gated units cannot be written, nor RoPE that is scaled in a way that
llama.cpp does not have: it would compute something else.
"""
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import command_line, files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "data"))
import shards  # noqa: E402     (first, because it says what to do if packages are missing)
import numpy as np  # noqa: E402
import vocabulary  # noqa: E402
from get_smollm2 import CONTROL, NORMAL, SPECIAL  # noqa: E402
from shards import INPUT, RESOURCE, USAGE, DataError  # noqa: E402
from sources import library  # noqa: E402

UNKNOWN, USER_DEFINED, UNUSED, BYTE = 2, 4, 5, 6             # more of llama.cpp's kinds of tokens
# transformers' defaults of max_position_embeddings, as in model/config_write.c.
LENGTHS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}     # llama.cpp's names
PRE = {"ByteLevel": "gpt-2", "Digits": "smollm", vocabulary.PATTERNS[0]: "llama-bpe", vocabulary.PATTERNS[1]: "qwen2"}
TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
SCALINGS = ("default", "linear", "yarn", "llama3")           # of RoPE, those that llama.cpp has


# ---------------------------------------------------------------- the folder

def model_folder(path):
    """The folder with config.json: `path`, or the newest checkpoint of the run there."""
    newest = sorted(path.glob("ckpt/step-*/config.json"))
    if (path / "config.json").exists() or not newest:
        return path
    return newest[-1].parent


def read_json(path, what):
    try:
        return json.loads(files.read(path, files.JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(INPUT, f"{path}: expected {what}: {error}.") from None


def section(config, *names):
    """The first of these objects that is there and not empty. train_gpt2 rejects what is no object."""
    return next((config[name] for name in names if config.get(name) and isinstance(config[name], dict)), {})


def rope_of(config):
    """RoPE's parameters, with the keys rope_type and rope_theta wherever the file has them."""
    rope = section(config, "rope_parameters", "rope_scaling")
    older = section(config, "rope_scaling")
    theta = rope.get("rope_theta") or config.get("rope_theta") or older.get("rope_theta") or 10000.0
    return rope | {"rope_type": rope.get("rope_type") or rope.get("type") or "default", "rope_theta": theta}


def context_length(config):
    """The training length."""
    return config.get("max_position_embeddings") or LENGTHS[config["model_type"]]


def window_of(config):
    """The layers' sliding window if it is shorter than the training length, or None."""
    family, window = config["model_type"], config.get("sliding_window", 4096)
    first = config.get("max_window_layers", 28)
    types = config.get("layer_types") or ["sliding_attention"] * (config["num_hidden_layers"] > first)
    there = family == "mistral" or config.get("use_sliding_window") and "sliding_attention" in types
    return window if there and window and window < context_length(config) else None


def check(config, folder):
    """Only what llama.cpp computes in the same way can be written."""
    normalizer = section(config, "attention_normalizer")
    name = str(normalizer.get("name", "softmax"))
    without_windows = {re.sub(r"^\d+\*|\+window=\d+", "", entry) for entry in name.split(",")}    # window_of() tells
    kind, family = rope_of(config)["rope_type"], config.get("model_type")
    channels, heads, head_dim = (config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    reasons = []
    if without_windows != {"softmax"} or (family == "attn_gpt" and "window" in name):
        reasons.append(f"its attention is {name}; llama.cpp has softmax alone")
    if normalizer.get("block"):
        reasons.append(f"its block is {normalizer['block']}; llama.cpp has no gated attention units")
    if config.get("gate"):
        reasons.append(f"its attention has gates ({config['gate']}), which llama.cpp does not have")
    if config.get("final_logit_softcapping"):
        reasons.append("its output logits are capped (--logit-softcap)")
    if config.get("qk_norm") and config.get("qkv_bias"):
        reasons.append("it has both QK norms and biases, and no family of llama.cpp has both")
    other = family not in ARCHITECTURES and not reasons
    if other:
        reasons.append(f"its model_type is {family!r}; expected {', '.join(ARCHITECTURES)}")
    if family == "qwen2" and head_dim and channels != heads * head_dim:
        reasons.append(f"its heads have {head_dim} channels; in a qwen2, llama.cpp has only hidden_size / heads")
    if kind not in SCALINGS:
        reasons.append(f"its RoPE is scaled ({kind}); llama.cpp has {', '.join(SCALINGS[1:])}")
    if kind == "llama3" and family in ("qwen2", "qwen3"):
        reasons.append(f"its RoPE is scaled (llama3), which llama.cpp does not have in a {family}")
    if reasons:
        raise DataError(INPUT, f"{folder}/config.json: this model cannot be written as GGUF:"
                               + "".join(f"\n  - {reason}" for reason in reasons)
                               + f"\n  Use it with {'' if other else 'sample_gpt2, or with '}transformers.")


def check_by_trainer(folder, ignored):
    """What train_gpt2 would reject: keys of config.json, other than `ignored`, that change what a model computes;
    missing or other tensors. Rejects the model, too, if train_gpt2 did not get to the end of these checks."""
    program = ROOT / "train_gpt2"
    if not program.exists():
        raise DataError(USAGE, f"{program}: not found, and it checks the model. Build it with make.")
    with tempfile.TemporaryDirectory() as temporary:
        shards.write_shard(Path(temporary) / "zeros_train_000001.bin", np.zeros(16, np.int64))
        result = subprocess.run([program, "--init-from", folder, "--train-data", f"{temporary}/*.bin", "--seq-len", "1",
                                 "--batch", "1", "--dry-run", "--ignore-config-key", ignored],
                                capture_output=True, text=True, errors="replace")
    said = result.stderr.strip().removeprefix("train_gpt2: ")
    if result.returncode == INPUT:
        raise DataError(INPUT, f"{folder}: this model cannot be written as GGUF: {said}")
    # The plan comes after the checks. A model that is too large to be trained here may still be written.
    too_large = result.returncode == RESOURCE and "\nmemory\n" in result.stdout
    if result.returncode and not too_large:
        raise DataError(INPUT, f"{folder}: {program} could not check this model (exit code {result.returncode}).\n"
                               f"  {said or 'It printed no message.'}")


# ---------------------------------------------------------------- the weights

def weight_files(folder):
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return [folder / "model.safetensors"]
    return [folder / name for name in sorted({*read_json(index, "an index of weights")["weight_map"].values()})]


def tensors(folder):
    """(name, float32 array) of all weights, one at a time."""
    for path in weight_files(folder):
        try:
            data = np.memmap(files.open_regular(path), np.uint8, "r")
            start = 8 + int(data[:8].view("<u8")[0])
            header = json.loads(bytes(data[8:start]))
        except (OSError, ValueError) as error:
            raise DataError(INPUT, f"{path}: expected a safetensors file: {error}.") from None
        for name, entry in header.items():
            if name == "__metadata__" or name.endswith(".rotary_emb.inv_freq"):     # what RoPE computes anyway
                continue
            if entry["dtype"] not in TYPES:
                raise DataError(INPUT, f"{path}: {name}: expected {' or '.join(TYPES)}, found {entry['dtype']}.")
            begin, end = (start + offset for offset in entry["data_offsets"])
            values = data[begin:end].view(TYPES[entry["dtype"]])
            if entry["dtype"] == "BF16":
                values = (values.astype("<u4") << 16).view("<f4")
            with np.errstate(over="ignore"):        # F64's may become infinities, which add_weights() rejects
                values = values.astype(np.float32)
            yield name, values.reshape(entry["shape"])


def interleaved(weight, heads):
    """llama.cpp's Llama rotates neighboring channels of a head; Hugging Face's, those of its two halves."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_weights(writer, config, folder, half):
    """Matrices in float32, or in `half`, another type of NumPy; vectors always in float32, as llama.cpp expects."""
    gguf, family = library("gguf", "writing a GGUF file"), ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"],
             "attn_k": config.get("num_key_value_heads") or config["num_attention_heads"]}
    for name, weight in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if not np.isfinite(weight).all():
            raise DataError(INPUT, f"{folder}: {name} contains a NaN or an infinity.")
        new = names.get_name(name, (".weight", ".bias"))
        if not new:
            raise DataError(INPUT, f"{folder}: {name}: a tensor that llama.cpp does not have in a {family}.")
        part = new.split(".")[-2]
        if family == "llama" and part in heads:
            weight = interleaved(weight, heads[part])
        with np.errstate(over="ignore"):
            weight = np.ascontiguousarray(weight, half if weight.ndim > 1 else np.float32)
        if not np.isfinite(weight).all():
            raise DataError(INPUT, f"{folder}: {name} has numbers that float16 cannot represent. Use --dtype f32.")
        writer.add_tensor(new, weight)


# ---------------------------------------------------------------- the shape

def llama3_divisors(rope, head_dim):
    """By what Llama 3.1's scaling divides each frequency: those with few rotations over the original length by factor,
    those with many by 1. model/rope.c has the formula."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    rotations = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / rope["factor"])).astype(np.float32)


def add_rope(writer, rope, head_dim):
    kind = rope["rope_type"]
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    if kind in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))


def add_shape(writer, config):
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(window_of(config) or context_length(config))      # attention is full up to the window
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    add_rope(writer, rope_of(config), head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


# ---------------------------------------------------------------- the tokenizer

def token_names(whole, vocab):
    """The name and kind of each id; ids without a token are unused."""
    model, byte_level = whole["model"], not whole["model"].get("byte_fallback")
    names, kinds, known = [f"[PAD{i}]" for i in range(vocab)], [UNUSED] * vocab, vocabulary.Names(not byte_level)
    for name, i in model["vocab"].items():
        names[i], kinds[i] = name, NORMAL if known.byte(name) is None else BYTE
    for token in whole.get("added_tokens") or []:
        names[token["id"]] = token["content"]
        kinds[token["id"]] = USER_DEFINED if token.get("special") is False else CONTROL
    if not byte_level and model.get("unk_token"):
        kinds[model["vocab"][model["unk_token"]]] = UNKNOWN
    return names, kinds


def pre_tokenizer(words):
    """llama.cpp's name for how text is split into words."""
    first = (words.get("pretokenizers") or [words])[0]
    return PRE[first["pattern"]["Regex"] if first["type"] == "Split" else first["type"]]


def scores(names, merges):
    """llama.cpp merges the pair whose result has the highest score: the first rank of a merge, below 0."""
    ranks = {}
    for rank, pair in enumerate(merges):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        ranks.setdefault(left + right, rank)
    return [float(-ranks.get(name, len(merges))) for name in names]


def adds_bos(whole):
    """Does every text start with the token bos? As in transformers, tokenizer.json decides."""
    processor = whole.get("post_processor") or {}
    return any("SpecialToken" in step["single"][0] for step in processor.get("processors", [processor])
               if step.get("single"))


def add_no_tokenizer(writer, reason):
    print(f"{reason}, so the file has no tokenizer.", file=sys.stderr)
    writer.add_tokenizer_model("none")


def add_tokenizer(writer, config, folder):
    path = folder / "tokenizer.json"
    if not path.exists():
        return add_no_tokenizer(writer, f"{folder}: no tokenizer.json")
    for file in (folder / name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")):
        if file.exists():
            vocabulary.check_copied(file)
    content = files.read(path, files.TEXT)
    if reasons := vocabulary.unusable(content):
        raise DataError(INPUT, f"{path}: this tokenizer cannot be written as GGUF:"
                               + "".join(f"\n  - {reason}" for reason in reasons))
    whole = json.loads(content)
    names, kinds = token_names(whole, config["vocab_size"])
    merges = whole["model"]["merges"]
    if not merges:
        return add_no_tokenizer(writer, f"{path}: no merges, without which llama.cpp loads no vocabulary")
    if whole["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores(names, merges))
        settings = folder / "tokenizer_config.json"
        never = settings.exists() and vocabulary.adds_no_space(read_json(settings, "a tokenizer's settings"))
        writer.add_add_space_prefix(vocabulary.without_space(whole) is not None and not never)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer(whole["pre_tokenizer"]))
        writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    add_special(writer, config, folder, names, whole)


def token_id(config, key):
    """An id in config.json, or the first of a list; None if it is not one of the vocabulary, such as -1."""
    found = config.get(key)
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, int) and 0 <= found < config["vocab_size"] else None


def add_special(writer, config, folder, names, whole):
    """The ids of the special tokens, and the chat template."""
    settings = {}
    if (folder / "tokenizer_config.json").exists():
        settings = read_json(folder / "tokenizer_config.json", "a tokenizer's settings")
        if not isinstance(settings, dict):
            raise DataError(INPUT, f"{folder}/tokenizer_config.json: expected an object.")
    for name, key in SPECIAL:
        found = token_id(config, f"{name}_token_id")
        text = settings.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if found is None and text in names:
            found = names.index(text)
        if found is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", found)
    writer.add_add_bos_token(adds_bos(whole))
    jinja = folder / "chat_template.jinja"
    template = files.read(jinja, files.JSON).decode("utf-8-sig") if jinja.exists() else settings.get("chat_template")
    if template:
        writer.add_chat_template(template)


def model_name(folder):
    """The folder's name, but not "mistral": transformers takes a Llama of that name for a Mistral, and loads none."""
    name = folder.resolve().name
    return "Mistral" if name == "mistral" else name


def unread_by_transformers(config):
    """What its GGUF loader does not read from the file, but takes from a config that it is given."""
    unread = []
    if rope_of(config)["rope_type"] != "default":
        unread.append("the scaling of RoPE")
    if config["model_type"] == "qwen3" and config.get("head_dim", 128) != 128:
        unread.append("the head size (it assumes 128)")
    return unread


def warn_of_transformers(config, folder, out):
    if unread := unread_by_transformers(config):
        read = "AutoConfig.from_pretrained({})"
        if config["model_type"] == "mistral":       # a Llama in a GGUF
            read = 'LlamaConfig.from_pretrained({}, model_type="llama")'
        print(f"{out}: transformers' GGUF loader ignores {' and '.join(unread)}.\n"
              f"  Load the file with from_pretrained(…, config={read.format(repr(str(folder)))}).", file=sys.stderr)


def convert(folder, out, half, ignored):
    gguf = library("gguf", "writing a GGUF file")
    config = read_json(folder / "config.json", "a model's config.json, in the folder of a checkpoint or of a run")
    check(config if isinstance(config, dict) else {}, folder)
    check_by_trainer(folder, ignored)
    # Sizes may be written as 16.0.
    config = {key: int(value) if isinstance(value, float) and value.is_integer() else value
              for key, value in config.items()}
    window = window_of(config)
    if window and "sliding_window" not in ignored.split(","):
        raise DataError(INPUT, f"{folder}/config.json: this model cannot be written as GGUF: its attention has a "
                               f"window of {window}, and llama.cpp has none in a {config['model_type']}.\n"
                               f"  For texts of up to {window} tokens, write it with --ignore-config-key "
                               "sliding_window.")
    temporary = out.with_name(out.name + ".part")
    files.create(temporary).close()
    writer = gguf.GGUFWriter(temporary, ARCHITECTURES[config["model_type"]])
    try:
        writer.add_name(model_name(folder))
        add_shape(writer, config)
        add_tokenizer(writer, config, folder)
        add_weights(writer, config, folder, half)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return config


def main():
    parser = command_line.parser(__doc__, "doc/gguf.md")
    parser.add_argument("folder", type=Path, help="folder of a checkpoint, of a run, or of a Hugging Face model")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--dtype", choices=["f32", "f16"], default="f32", help="of the matrices")
    parser.add_argument("--ignore-config-key", metavar="NAME[,...]",
                        help="unknown keys in config.json to ignore")
    args = parser.parse_args()
    if not args.folder.is_dir():
        raise DataError(USAGE, f"{args.folder}: " + ("expected the folder of a model, found a file."
                                                     if args.folder.exists() else "no such folder."))
    if args.out.exists() and not args.out.is_file():
        raise DataError(USAGE, f"--out {args.out}: exists and is not a file.")
    if not args.out.parent.is_dir():
        raise DataError(USAGE, f"{args.out.parent}: no such folder.")
    half = {"f32": np.float32, "f16": np.float16}[args.dtype]
    folder = model_folder(args.folder)
    config = convert(folder, args.out, half, args.ignore_config_key or "")
    layers = config["num_hidden_layers"]
    print(f"{args.out}: {config['model_type']}, {layers} layer{'s' * (layers != 1)} of {config['hidden_size']} "
          f"channels, {args.out.stat().st_size:,} bytes.")
    warn_of_transformers(config, folder, args.out)


if __name__ == "__main__":
    shards.run(main)

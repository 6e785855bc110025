"""scripts/to_gguf.py: transformers loads what it writes with the same logits and the same tokens, and what llama.cpp
would compute differently is rejected."""
import json
import os
import re
import shutil

import gguf
import pytest
import torch

import byte_text
from calls import call      # which finds the folders of what follows
import shards
import to_gguf
import vocabularies
import vocabulary
from eval_models import write_model
from safetensors.torch import load_file, save_file
from test_chat import SMOLLM2
from tiny import ROOT, sentences
from trainer import script_of

DATA = byte_text.write_text
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=259, max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=256, eos_token_id=258)
IDS = torch.tensor([[256, 1, 77, 200, 13, 97, 97, 258, 3]])
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def convert(folder, out, *flags, code=0):
    result = call("to_gguf.py", folder, "--out", out, *flags, main=lambda: shards.run(to_gguf.main))
    assert result.returncode == code, result.stderr
    return result.stdout, result.stderr


def metadata(path):
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def logits(folder, **how):
    from transformers import AutoModelForCausalLM
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)(IDS).logits


def llama_of_ours(data, folder):
    write_model(folder, data, "llama", "softmax", 64)
    return folder


def of_transformers(model_type, **more):
    def make(data, folder):
        from transformers import AutoConfig, AutoModelForCausalLM
        torch.manual_seed(1)
        config = AutoConfig.for_model(model_type, **SIZES | more, initializer_range=0.3)
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if weight.ndim == 1:                                   # gains and biases that are not all alike
                torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
        model.save_pretrained(folder, max_shard_size="40KB")
        return folder
    return make


# Loading Qwen3, transformers takes its default size of a head, 128, from no matter what file.
MODELS = {"ours": llama_of_ours, "llama": of_transformers("llama", rope_theta=500000.0),
          "qwen2": of_transformers("qwen2", tie_word_embeddings=True, rms_norm_eps=1e-6),
          "qwen3": of_transformers("qwen3", head_dim=128, rms_norm_eps=1e-6),
          "mistral": of_transformers("mistral", sliding_window=None)}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits(name, data, tmp_path):
    folder = MODELS[name](data, tmp_path / "model")
    output, notes = convert(folder, tmp_path / "out.gguf")
    assert "out.gguf" in output and "transformers" not in notes
    expected, found = logits(folder), logits(tmp_path, gguf_file="out.gguf")
    assert expected.abs().max() > 0.1 and (found - expected).abs().max() <= 1e-6
    convert(folder, tmp_path / "half.gguf", "--dtype", "f16")
    error = (logits(tmp_path, gguf_file="half.gguf") - expected).abs().max() / expected.abs().max()
    assert 0 < error < 0.02
    assert (tmp_path / "half.gguf").stat().st_size < (tmp_path / "out.gguf").stat().st_size


# No two keys have the same number, apart from the size of a head. A Qwen2's heads have channels / heads channels.
SHAPE = dict(num_hidden_layers=3, head_dim=16, rope_theta=500000.0, sliding_window=None)
EPS = {"llama": 2e-5, "mistral": 3e-5, "qwen2": 1e-6, "qwen3": 4e-6}


@pytest.mark.parametrize("family", EPS)
def test_the_metadata_of_the_shape(family, data, tmp_path):
    """All of it: transformers takes for granted what it does not read."""
    head_dim, name = (8 if family == "qwen2" else 16), {"mistral": "llama"}.get(family, family)
    more = SHAPE | {"head_dim": head_dim, "rms_norm_eps": EPS[family]}
    folder = of_transformers(family, **more)(data, tmp_path / "model")
    convert(folder, tmp_path / "out.gguf")
    fields = metadata(tmp_path / "out.gguf")
    assert fields["general.architecture"] == name
    assert {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")} == \
        pytest.approx({"context_length": 64, "embedding_length": 32, "block_count": 3, "feed_forward_length": 48,
                       "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": head_dim,
                       "attention.value_length": head_dim, "rope.dimension_count": head_dim,
                       "rope.freq_base": 500000.0, "attention.layer_norm_rms_epsilon": EPS[family],
                       "vocab_size": 259}, rel=1e-6)


def test_a_mistral_in_a_folder_of_that_name(data, tmp_path):
    """transformers would take the name for an architecture."""
    folder = MODELS["mistral"](data, tmp_path / "mistral")
    convert(folder, tmp_path / "out.gguf")
    assert (logits(tmp_path, gguf_file="out.gguf") - logits(folder)).abs().max() <= 1e-6


QWEN_WINDOW = dict(use_sliding_window=True, head_dim=8)


@pytest.mark.parametrize("family, arch, more", [
    ("mistral", "llama", {}), ("qwen2", "qwen2", QWEN_WINDOW | {"max_window_layers": 1}),
    ("qwen3", "qwen3", QWEN_WINDOW | {"layer_types": ["sliding_attention", "full_attention"],
                                      "attention_normalizer": {"name": "softmax+window=16,softmax"}})])
def test_a_window_shorter_than_the_training_length(family, arch, more, data, tmp_path):
    """It is written as the message says, as a model of the window's length."""
    folder = of_transformers(family, sliding_window=16, **more)(data, tmp_path / "model")
    _, errors = convert(folder, tmp_path / "out.gguf", code=3)
    assert f"window of 16, and llama.cpp has none in a {family}" in errors
    assert "up to 16 tokens, write it with --ignore-config-key sliding_window." in errors
    convert(folder, tmp_path / "out.gguf", "--ignore-config-key", "sliding_window")
    assert metadata(tmp_path / "out.gguf")[f"{arch}.context_length"] == 16


@pytest.mark.parametrize("family, length", [("llama", 2048), ("mistral", 131072), ("qwen2", 32768), ("qwen3", 32768)])
def test_the_length_that_a_config_leaves_out(family, length):
    for config in {}, {"max_position_embeddings": None}:
        assert to_gguf.context_length(config | {"model_type": family}) == length


@pytest.mark.parametrize("words, message", [
    ("exit 0", None), ("printf 'model\\nmemory\\n'; exit 4", None),
    ("echo train_gpt2: out of memory >&2; exit 4", "4).\n  out of"),
    ("echo train_gpt2: unknown flag >&2; exit 2", "2).\n  unknown flag"), ("kill -SEGV $$", "-11).\n  It printed no")])
def test_a_check_that_did_not_end(tmp_path, monkeypatch, words, message):
    """The model is written if the checker says that it is right, or that it is too large for this machine."""
    script_of(tmp_path / "train_gpt2", words)
    monkeypatch.setattr(to_gguf, "ROOT", tmp_path)
    if not message:
        return to_gguf.check_by_trainer(tmp_path, "")
    with pytest.raises(shards.DataError, match=re.escape(f"could not check this model (exit code {message}")):
        to_gguf.check_by_trainer(tmp_path, "")


def rope_metadata(path):
    """What the file says about RoPE's scaling, and the divisors of its frequencies."""
    found = {key.split(".scaling.")[1]: value for key, value in metadata(path).items() if ".scaling." in key}
    return found, [tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == "rope_freqs.weight"]


# The scaling, and what is written of it. transformers reads none of it, but takes it from a config that it is given.
SCALED = {"llama3": ("llama", LLAMA3, {}), "linear": ("qwen2", LINEAR, {"type": "linear", "factor": 4.0}),
          "linear, mistral": ("mistral", LINEAR, {"type": "linear", "factor": 4.0}),
          "yarn": ("qwen3", YARN, {"type": "yarn", "factor": 4.0, "original_context_length": 16})}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_rope(name, data, tmp_path):
    from transformers import AutoConfig, LlamaConfig
    family, rope, expected = SCALED[name]
    more = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 16}}.get(family, {})
    folder = of_transformers(family, rope_parameters=rope, **more)(data, tmp_path / "model")
    _, notes = convert(folder, tmp_path / "out.gguf")
    assert "ignores the scaling of RoPE" in notes and ("the head size" in notes) == (family == "qwen3")
    found, divisors = rope_metadata(tmp_path / "out.gguf")
    assert found == expected and len(divisors) == (name == "llama3")
    config = AutoConfig.from_pretrained(folder)
    if family == "mistral":
        config = LlamaConfig.from_pretrained(folder, model_type="llama")
    same = logits(folder)
    assert (logits(tmp_path, gguf_file="out.gguf", config=config) - same).abs().max() <= 1e-6
    if family in ("llama", "mistral"):
        assert (logits(tmp_path, gguf_file="out.gguf") - same).abs().max() > 0.1      # the page says so
    for divisor in divisors:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        plain = rope["rope_theta"] ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        scaled, amplitude = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        assert amplitude == 1 and torch.tensor(divisor).double() == pytest.approx(plain / scaled, rel=1e-6)
        assert divisor.min() == 1 and divisor.max() == 8 and len(set(divisor.tolist())) > 2


def test_a_run(data, tmp_path):
    """Its newest checkpoint is taken."""
    folder = llama_of_ours(data, tmp_path / "run/ckpt/step-00000010")
    os.rename(tmp_path / "run/ckpt/step-00000010-run", tmp_path / "unused")
    convert(folder, tmp_path / "a.gguf")
    convert(tmp_path / "run", tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def with_tokenizer(name, data, folder):
    """A Llama of ours with this tokenizer; "own": trained on a little text. Its vocabulary has five tokens more."""
    llama_of_ours(data, folder)
    path = folder / "tokenizer.json"
    vocabulary.train(sentences(200), 300, path) if name == "own" else vocabularies.write(name, path)
    whole = json.loads(path.read_text())
    size = 1 + 5 + max(*whole["model"]["vocab"].values(), *(token["id"] for token in whole["added_tokens"]))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.ones(size, config["hidden_size"])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name, pre", [("own", "gpt-2"), ("llama3", "llama-bpe"), ("qwen", "qwen2"),
                                       ("mistral", None), ("mistral-never", None)])
def test_the_tokenizer(name, pre, data, tmp_path):
    """Its metadata, one by one: llama.cpp knows more kinds of splitting than transformers reads from a GGUF."""
    folder = with_tokenizer(name, data, tmp_path / "model")
    whole, config = (json.loads((folder / file).read_text()) for file in ("tokenizer.json", "config.json"))
    size = config["vocab_size"]
    settings = {"chat_template": SMOLLM2, "bos_token": {"content": "<s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    writer = gguf.GGUFWriter(None, "llama")     # of a file, reading which would take half a minute
    to_gguf.add_tokenizer(writer, config, folder)

    def get(key):
        field = writer.kv_data[0].get(f"tokenizer.{key}")
        return field and field.value

    names, kinds = get("ggml.tokens"), get("ggml.token_type")
    assert len(names) == len(kinds) == size and names[-1] == f"[PAD{size - 1}]" and kinds[-1] == 5
    vocab = whole["model"]["vocab"]
    assert all(names[i] == text for text, i in vocab.items())
    assert all(names[token["id"]] == token["content"] and kinds[token["id"]] in ((2, 3) if token["special"] else (4,))
               for token in whole["added_tokens"])
    assert get("ggml.pre") == pre and get("chat_template") == SMOLLM2
    assert get("ggml.add_bos_token") is to_gguf.adds_bos(whole)
    assert get("ggml.eos_token_id") == config["eos_token_id"]
    assert get("ggml.add_space_prefix") == {"mistral": True, "mistral-never": False}.get(name)
    if "mistral" in name:
        assert get("ggml.model") == "llama" and kinds[:4] == [2, 3, 3, 6] and names[3] == "<0x00>"
        # The order of the scores is that of Mistral's own, which a tokenizer.json does not have.
        made, own = {left + right for left, right in whole["model"]["merges"]}, {}
        for score, (text, value, _) in zip(get("ggml.scores"), vocabularies.pieces()):
            if text in made:
                own.setdefault(value, []).append(score)
        groups = [own[value] for value in sorted(own, reverse=True)]
        assert len(groups) > 25000 and all(min(one) > max(two) for one, two in zip(groups, groups[1:]))
    else:
        assert get("ggml.model") == "gpt2"
        assert get("ggml.merges") == [" ".join(pair) for pair in whole["model"]["merges"]]


def test_ids_that_are_no_tokens(data, tmp_path):
    """They count as missing, as they do in the trainer. Folders of the first Llama have a pad_token_id of -1."""
    folder = with_tokenizer("own", data, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    wrong = {"pad_token_id": -1, "bos_token_id": config["vocab_size"], "eos_token_id": []}
    (folder / "config.json").write_text(json.dumps(config | wrong))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "a"}))
    convert(folder, tmp_path / "out.gguf")
    ids = {key: value for key, value in metadata(tmp_path / "out.gguf").items() if key.endswith("_token_id")}
    whole = json.loads((folder / "tokenizer.json").read_text())
    assert ids == {"tokenizer.ggml.bos_token_id": whole["model"]["vocab"]["a"]}


def test_what_may_be_missing_or_written_otherwise(data, tmp_path):
    """Sizes such as 16.0 and a tokenizer without added_tokens change nothing; a list of settings is rejected."""
    folder = with_tokenizer("own", data, tmp_path / "model")
    convert(folder, tmp_path / "out.gguf")
    config = json.loads((folder / "config.json").read_text())
    sizes = {key: float(value) for key, value in config.items() if type(value) is int}
    assert "hidden_size" in sizes and "vocab_size" in sizes
    (folder / "config.json").write_text(json.dumps(config | sizes))
    convert(folder, tmp_path / "same.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == (tmp_path / "out.gguf").read_bytes()
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["model"]["vocab"] |= {token["content"]: token["id"] for token in whole.pop("added_tokens")}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    convert(folder, tmp_path / "out.gguf")
    (folder / "tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json: expected an object" in convert(folder, tmp_path / "list.gguf", code=3)[1]
    assert not list(tmp_path.glob("list.gguf*"))


WRONG = {
    "ssmax": ({"attention_normalizer": {"name": "ssmax"}}, ["ssmax", "softmax alone"]),
    "gau": ({"attention_normalizer": {"name": "softmax", "block": "gau"}}, ["gated attention units"]),
    "another family": ({"model_type": "gpt2"}, ["'gpt2'", "qwen3", "with transformers"]),
    "gates": ({"model_type": "attn_gpt", "gate": "head"}, ["its attention has gates (head)"]),
    "a cap": ({"model_type": "attn_gpt", "final_logit_softcapping": 30.0}, ["capped"]),
    "a list": ({"attention_normalizer": {"name": "softmax+window=8,softmax+rope=none"}},
               ["is softmax+window=8,softmax+rope=none; llama.cpp has softmax alone"]),
    "some windows": ({"model_type": "attn_gpt", "attention_normalizer": {"name": "softmax+window=8,softmax"}},
                     ["is softmax+window=8,softmax; llama.cpp has softmax alone"]),
    "an unknown key": ({"residual_multiplier": 2.0}, ["residual_multiplier"]),
    "a lost tensor": ({"num_hidden_layers": 3}, ["model.layers.2."]),
    "no object": ([], ["model_type is None"]),
    "theta by length": ({"rope_parameters": {"rope_type": "dynamic", "factor": 1.0}},
                               ["RoPE is scaled (dynamic)", "llama.cpp has linear, yarn, llama3"]),
    "a Qwen2 with large heads": ({"model_type": "qwen2", "head_dim": 64}, ["heads have 64 channels", "in a qwen2"]),
    "a scaled Qwen2": ({"model_type": "qwen2", "rope_parameters": LLAMA3},
                       ["RoPE is scaled (llama3)", "does not have in a qwen2"]),
    "no objects": ({"rope_parameters": 5, "attention_normalizer": "softmax"},
                   ["rope_parameters", "expected an object"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_llama_cpp_would_compute_differently(name, data, tmp_path):
    change, parts = WRONG[name]
    folder = llama_of_ours(data, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change if change else change))
    _, errors = convert(folder, tmp_path / "out.gguf", code=3)
    assert str(folder) in errors and all(part in errors for part in parts)
    assert not list(tmp_path.glob("out.gguf*"))


def test_damage(data, tmp_path):
    folder = llama_of_ours(data, tmp_path / "model")
    assert "no such folder" in convert(tmp_path / "nowhere", tmp_path / "out.gguf", code=2)[1]
    assert "found a file" in convert(folder / "model.safetensors", tmp_path / "out.gguf", code=2)[1]
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    assert "model.safetensors" in convert(folder, tmp_path / "out.gguf", code=3)[1]
    (folder / "model.safetensors").write_bytes(weights)
    whole = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"pre_tokenizer": {"type": "Whitespace"}}))
    assert "cannot be written as GGUF" in convert(folder, tmp_path / "out.gguf", code=3)[1]
    (folder / "tokenizer.json").write_text(json.dumps(whole))       # of single bytes
    assert "no merges, without which llama.cpp loads no vocabulary" in convert(folder, tmp_path / "out.gguf")[1]
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer" in convert(folder, tmp_path / "out.gguf")[1]
    shutil.copy(ROOT / "LICENSE", folder / "config.json")
    assert "config.json" in convert(folder, tmp_path / "out.gguf", code=3)[1]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("name, value, message", [
    ("model.norm.weight", float("nan"), "contains a NaN or an infinity"),
    ("model.norm.weight", float("inf"), "contains a NaN or an infinity"),
    ("model.layers.0.mlp.up_proj.weight", 1e5, "has numbers that float16 cannot represent. Use --dtype f32.")])
def test_weights_that_float16_does_not_have(name, value, message, data, tmp_path):
    folder = llama_of_ours(data, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[3] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _, errors = convert(folder, tmp_path / "out.gguf", "--dtype", "f16", code=3)
    assert f"{name} {message}" in errors and "Warning" not in errors and not list(tmp_path.glob("out.gguf*"))
    convert(folder, tmp_path / "out.gguf", code=0 if value == 1e5 else 3)


def test_what_the_trainer_loads_as_well(data, tmp_path):
    """float64, and RoPE's frequencies, which old Llamas have as tensors."""
    folder = llama_of_ours(data, tmp_path / "model")
    convert(folder, tmp_path / "a.gguf")
    weights = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    convert(folder, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_does_not_carry_a_file_into_a_gguf(name, data, tmp_path):
    folder = with_tokenizer("own", data, tmp_path / "model")
    private = tmp_path / "private"
    private.write_text((folder / name).read_text() if (folder / name).exists() else "private")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    assert f"{name}: expected a file in its folder" in convert(folder, tmp_path / "out.gguf", code=3)[1]
    assert not (tmp_path / "out.gguf").exists()


def test_out_is_not_a_file(data, tmp_path):
    folder = llama_of_ours(data, tmp_path / "model")
    assert "is not a file" in convert(folder, tmp_path, code=2)[1]
    assert f"{tmp_path}/new: no such folder" in convert(folder, tmp_path / "new/out.gguf", code=2)[1]


def test_a_template_that_starts_with_bos(data, tmp_path):
    """tokenizer.json's post_processor says whether texts start with bos, whatever tokenizer_config.json says."""
    folder = with_tokenizer("own", data, tmp_path / "model")
    whole = json.loads((folder / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    for processor, adds in ((None, False), (template, True),
                            ({"type": "Sequence", "processors": [whole["decoder"], template]}, True)):
        (folder / "tokenizer.json").write_text(json.dumps(whole | {"post_processor": processor}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": not adds}))
        convert(folder, tmp_path / "out.gguf")
        assert metadata(tmp_path / "out.gguf")["tokenizer.ggml.add_bos_token"] is adds

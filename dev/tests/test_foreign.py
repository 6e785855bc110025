"""Models from elsewhere: transformers makes tiny random models, and each must either give the same loss here or be
rejected before any work, with exit code 3 and every reason. FOREIGN=all tries every class that AutoModelForCausalLM
maps; -rs lists those that could not be built."""
import json
import math
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from trainer import ROOT, TRAIN, VOCAB, edit_config, edit_tensors, environment, train
import transformers
from transformers import (CohereConfig, GemmaConfig, GPT2Config, GraniteConfig, LlamaConfig, MistralConfig,
                          MixtralConfig, Olmo2Config, Phi3Config, Qwen2Config, Qwen3Config, StableLmConfig)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

torch.set_num_threads(1)
EVAL = TRAIN.parent / "eval_gpt2"
T, HEAD = 16, 8
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=64, rms_norm_eps=1e-5, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)
CLOSE = 1e-5      # of losses near 4.6 in float32, nats


def test_transformers_has_the_pinned_version():
    """Which models are equal depends on it."""
    [pinned] = re.findall(r"^transformers==(\S+)", (ROOT / "requirements-test.txt").read_text(), re.M)
    assert transformers.__version__ == pinned, "run scripts/setup.sh --test"


def build(config, model_class=None):
    """A model with random weights so large that each of them, gains and biases included, affects the loss."""
    torch.manual_seed(1)
    model = (model_class or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.tie_weights()
    return model


def llama(**change):
    return build(LlamaConfig(**SMALL | change))


def loss_there(model, data):
    stream = torch.from_numpy(np.fromfile(data / "d_val_000000.bin", "<u2", offset=1024).astype(np.int64))
    count = (len(stream) - 1) // T
    inputs, targets = stream[:count * T].view(count, T), stream[1:count * T + 1].view(count, T)
    with torch.no_grad():
        logits = model(inputs).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def evaluate(folder, data, *flags):
    """The exit code, and either the loss or the message."""
    out = folder.parent / "eval"
    words = [EVAL, "--model", folder, "--data", f"{data}/d_val_*.bin", "--seq-lens", T, "--picture", 0, "--out", out,
             *flags]
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=environment(), timeout=300)
    if result.returncode:
        assert not out.exists() and result.stdout == "", "something was written"
        return result.returncode, result.stderr
    loss = json.loads((out / "eval.json").read_text())["results"][0]["loss"]
    shutil.rmtree(out)
    return 0, loss


def assert_same_or_refused(model, folder, data):
    """Checks the requirement for every model; without `model`, for the one that transformers loads from the folder.
    Returns the message, or "" if the losses are equal."""
    code, found = evaluate(folder, data)
    if code == 0:
        model = model or transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        assert abs(found - loss_there(model, data)) < CLOSE, "computed wrongly without a message"
        return ""
    assert code == 3 and str(folder) in found and "\n  - " in found, found
    return found


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(base, data):
    """What evaluate() returns for the folder as it is."""
    result = evaluate(base, data)
    assert result[0] == 0
    return result


@pytest.fixture
def folder(base, tmp_path):
    """A small Llama that a test may change."""
    return shutil.copytree(base, tmp_path / "model")


# ---------------------------------------------------------------- families

FAMILIES = {
    "Llama": (LlamaConfig(**SMALL), []),
    "Mistral": (MistralConfig(**SMALL, sliding_window=4), []),
    "Mistral without a window": (MistralConfig(**SMALL, sliding_window=None), []),
    "Mistral with a wide window": (MistralConfig(**SMALL | dict(num_key_value_heads=2, head_dim=12), sliding_window=64),
                                   []),
    "Mixtral": (MixtralConfig(**SMALL, num_local_experts=2), ['"mixtral"']),
    "Qwen2": (Qwen2Config(**SMALL), []),
    "Qwen2 with a window": (Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1),
                            []),
    "Qwen3": (Qwen3Config(**SMALL, head_dim=HEAD), []),
    "Qwen3 with a window": (Qwen3Config(**SMALL, head_dim=HEAD, use_sliding_window=True, sliding_window=4,
                                        layer_types=["sliding_attention", "full_attention"]), []),
    "Gemma": (GemmaConfig(**SMALL, head_dim=HEAD), ['"gemma"', "hidden_act"]),
    "OLMo 2": (Olmo2Config(**SMALL), ['"olmo2"']),
    "Phi-3": (Phi3Config(**SMALL), ['"phi3"']),
    "GPT-2": (GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1,
                         eos_token_id=2),
              ['"gpt2"', "a GPT-2 has learned positions"]),
    "StableLM": (StableLmConfig(**{k: v for k, v in SMALL.items() if k != "rms_norm_eps"}, partial_rotary_factor=1.0),
                 ['"stablelm"']),
    "Granite": (GraniteConfig(**SMALL, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22),
                ['"granite"']),
    "Cohere": (CohereConfig(**{k: v for k, v in SMALL.items() if k != "rms_norm_eps"}), ['"cohere"']),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, data, tmp_path):
    config, reasons = FAMILIES[name]
    model = build(config)
    model.save_pretrained(tmp_path / "model")
    message = assert_same_or_refused(model, tmp_path / "model", data)
    assert (message == "") == (reasons == []), message
    for reason in reasons:
        assert reason in message
    edit_config(tmp_path / "model", model_type="llama")        # only families that compute the same may load
    message = assert_same_or_refused(model, tmp_path / "model", data)
    assert (message == "") == (name in ("Llama", "Mistral without a window")), message


# The keys of a Qwen3's windows: what is wrong with them.
WRONG_WINDOWS = {
    '"layer_types" is ["sliding_attention","full_attention"]; expected "full_attention" in every layer, because '
    '"use_sliding_window" is not true': dict(use_sliding_window=False),
    'or "sliding_window" is null': dict(sliding_window=None),
    '"sliding_window" is 0; expected a whole number': dict(sliding_window=0),
    '"use_sliding_window" is "yes"; expected true or false': dict(use_sliding_window="yes", layer_types=None),
    '"max_window_layers" is -1; expected a whole number': dict(max_window_layers=-1),
    '"layer_types" has 1 items; expected one for each of 2 layers': dict(layer_types=["full_attention"]),
    '; expected "full_attention" or "sliding_attention" in every layer': dict(layer_types=["chunked_attention"] * 2),
    '"ssmax+window=5" has other windows than the keys of a qwen3; change one':
        dict(attention_normalizer={"name": "ssmax+window=5", "seq_len": 64}),
}


def test_wrong_keys_of_windows(data, tmp_path):
    build(FAMILIES["Qwen3 with a window"][0]).save_pretrained(tmp_path / "model")
    for says, change in WRONG_WINDOWS.items():
        folder = shutil.copytree(tmp_path / "model", tmp_path / "changed", dirs_exist_ok=True)
        edit_config(folder, **change)
        code, message = evaluate(folder, data)
        assert code == 3 and says in message, (says, message)


def test_a_mistral_with_layer_types(data, tmp_path):
    """transformers reads it as another family, in which they select the layers with the window."""
    build(FAMILIES["Mistral"][0]).save_pretrained(tmp_path / "model")
    edit_config(tmp_path / "model", sliding_window=4, layer_types=["full_attention"] * 2)
    code, message = evaluate(tmp_path / "model", data)
    assert code == 3 and 'expected no such key beside "sliding_window"' in message, message


# ---------------------------------------------------------------- a Llama's variants

YARN = {"factor": 2.0, "original_max_position_embeddings": 32}
LLAMA3 = YARN | {"low_freq_factor": 0.5, "high_freq_factor": 4.0}
ROPE = {        # name: rope_type, its numbers, and why it is rejected, if it is; T is twice max_position_embeddings
    "linear": ("linear", {"factor": 2.0}, []),
    "linear, factor 1.25": ("linear", {"factor": 1.25}, []),
    "dynamic": ("dynamic", {"factor": 1.0}, []),
    "dynamic, factor 2": ("dynamic", {"factor": 2.0}, ['factor is 2; only 1 is supported with rope_type "dynamic"']),
    "yarn": ("yarn", YARN, []),
    "yarn with its defaults": (
        "yarn", YARN | {"beta_fast": 32, "beta_slow": 1.0, "attention_factor": 0.1 * math.log(2) + 1, "mscale": None,
                        "mscale_all_dim": None, "truncate": True}, []),
    "beta_fast": ("yarn", YARN | {"beta_fast": 16}, ["beta_fast is 16; only transformers' default, 32, is supported"]),
    "beta_slow": ("yarn", YARN | {"beta_slow": 2}, ["beta_slow is 2; only transformers' default, 1, is supported"]),
    "attention_factor": ("yarn", YARN | {"attention_factor": 1.2},
                         ["attention_factor is 1.2; only transformers' default, 1.0693147, is supported"]),
    "mscale": ("yarn", YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
               ["mscale is 1; it is not supported", "mscale_all_dim is 0.5; it is not supported"]),
    "truncate": ("yarn", YARN | {"truncate": False}, ["truncate is false; only true is supported"]),
    "longrope": ("longrope", YARN | {"short_factor": [1.5] * (HEAD // 2), "long_factor": [2.0] * (HEAD // 2)},
                 ['type is "longrope"', '"llama3"']),
    "llama3": ("llama3", LLAMA3, []),
    "llama3, HIGH below LOW": ("llama3", LLAMA3 | {"high_freq_factor": 0.25},
                               ['"llama3": HIGH (high_freq_factor) must be above LOW']),
    "llama3, factor 0.5": ("llama3", LLAMA3 | {"factor": 0.5}, ["factor is 0.5; expected a number from 1 to"]),
    "proportional": ("proportional", {"partial_rotary_factor": 0.5}, ['type is "proportional"', '"default"']),
    "of a part": ("linear", {"factor": 2.0, "partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5; only 1"]),
}
VARIANTS = {
    "another theta": (dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), []),
    "dropout": (dict(attention_dropout=0.5), []),
    "pretraining_tp": (dict(pretraining_tp=2), []),
    "swish": (dict(hidden_act="swish"), []),
    "attention biases": (dict(attention_bias=True), ['"attention_bias" is true']),
    "mlp biases": (dict(mlp_bias=True), ['"mlp_bias" is true']),
    "GELU": (dict(hidden_act="gelu"), ['"hidden_act" is "gelu"; expected "silu"']),
    "eps too large": (dict(rms_norm_eps=0.5), ['"rms_norm_eps" is 0.5', "1e-12 to 0.1"]),
    "one key-value head": (dict(num_key_value_heads=1, head_dim=4, rms_norm_eps=1e-3), []),
    "three key-value heads": (dict(num_key_value_heads=3), ["4 heads", "3 key-value heads"]),
    "all at once": (dict(attention_bias=True, mlp_bias=True, hidden_act="gelu", num_key_value_heads=3, rms_norm_eps=0.5,
                         rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
                         vocab_size=1048577),
                    ["attention_bias", "mlp_bias", "hidden_act", "3 key-value heads", "rms_norm_eps",
                     "rope_parameters.factor", '"vocab_size" is 1048577', "doc/checkpoints.md"]),
}


def test_every_rope_type_is_covered():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    assert set(ROPE_INIT_FUNCTIONS) == {rope_type for rope_type, *_ in ROPE.values()}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, data, tmp_path):
    change, reasons = VARIANTS[name]
    model = llama(**change)
    model.save_pretrained(tmp_path / "model")
    message = assert_same_or_refused(model, tmp_path / "model", data)
    assert (message == "") == (reasons == []), message
    for reason in reasons:
        assert reason in message
    assert message.count("\n  - ") <= 12


@pytest.mark.parametrize("name", ROPE)
def test_rope(name, data, tmp_path):
    """In the form of transformers 5, and in those of older versions, which wrote rope_scaling, and the oldest of which
    called its type "type"."""
    rope_type, numbers, reasons = ROPE[name]
    model = llama(rope_parameters=numbers | {"rope_type": rope_type, "rope_theta": 10000.0},
                  max_position_embeddings=T // 2)
    model.save_pretrained(tmp_path / "model")
    for change in ({}, *(dict(rope_parameters=..., rope_theta=10000.0, rope_scaling=numbers | {key: rope_type})
                         for key in ("type", "rope_type"))):
        edit_config(tmp_path / "model", **change)
        message = assert_same_or_refused(model, tmp_path / "model", data)
        assert (message == "") == (reasons == []), message
        assert all(reason in message for reason in reasons), message


@pytest.mark.parametrize("tied", [True, False])
def test_sharded(tied, data, tmp_path):
    model = llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert (tmp_path / "model/model.safetensors.index.json").exists()
    assert assert_same_or_refused(model, tmp_path / "model", data) == ""


# ---------------------------------------------------------------- tensors

def test_extra_tensors_are_rejected(folder, data, tmp_path):
    more = {f"model.layers.{i}.self_attn.q_proj.bias": np.zeros(32, "f4") for i in range(2)}
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update(more))
    code, message = evaluate(folder, data)
    assert code == 3 and str(folder) in message
    for i in range(2):
        assert f"tensor model.layers.{i}.self_attn.q_proj.bias is not part of the model" in message
    printed = train(data, "--init-from", folder, "--out", tmp_path / "out", model=False, code=3)
    assert "is not part of the model" in printed and not (tmp_path / "out").exists()


def test_extra_tensors_in_shards_are_rejected(data, tmp_path):
    llama().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    edit_config(tmp_path / "model", num_hidden_layers=1)
    code, message = evaluate(tmp_path / "model", data)
    assert code == 3 and "tensor model.layers.1.input_layernorm.weight is not part of the model" in message


def test_everything_wrong_with_the_tensors_is_listed(folder, data):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1]
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].astype("i4")
        tensors["stray"] = np.zeros(3, "f4")
    edit_tensors(folder / "model.safetensors", change)
    code, message = evaluate(folder, data)
    assert code == 3 and message.count("\n  - ") == 4
    for part in ("expected a tensor model.norm.weight [32]", "expected the shape [48, 32], found [47, 32]", "found I32",
                 "tensor stray is not part of the model"):
        assert part in message


def test_rotary_buffers_of_older_files_are_ignored(folder, data, expected):
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, "f4")}
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update(more))
    assert evaluate(folder, data) == expected


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_may_store_a_copy_of_its_embedding(same, data, tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    edit_tensors(tmp_path / "model/model.safetensors",
                 lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + (0 if same else 1e-3)}))
    message = assert_same_or_refused(model, tmp_path / "model", data)
    assert (message == "") == same and (same or "lm_head.weight differs from model.embed_tokens.weight" in message)


@pytest.mark.parametrize("said", [True, False])
def test_tie_word_embeddings_against_the_tensors(said, data, tmp_path):
    llama(tie_word_embeddings=not said).save_pretrained(tmp_path / "model")
    edit_config(tmp_path / "model", tie_word_embeddings=said)
    code, message = evaluate(tmp_path / "model", data)
    assert code == 3 and "lm_head.weight" in message


# ---------------------------------------------------------------- keys

UNKNOWN = {"sliding_window": 4, "logit_scale": 0.0625, "quant": {"bits": 4}, "extra": "yes", "use_sliding_window": True,
           "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}


def test_unknown_keys_are_named_and_can_be_ignored(folder, data, expected):
    for nothing in (None, False, [], {}):
        edit_config(folder, **dict.fromkeys(UNKNOWN, nothing))
        assert evaluate(folder, data) == expected
    edit_config(folder, **UNKNOWN)
    code, message = evaluate(folder, data)
    assert code == 3 and str(folder / "config.json") in message
    for key, value in UNKNOWN.items():
        assert f'"{key}" is {json.dumps(value, separators=(",", ":"))}: an unknown key, which may change' in message
    assert f"load it with --ignore-config-key {','.join(UNKNOWN)}." in message
    assert evaluate(folder, data, "--ignore-config-key", ",".join(UNKNOWN)) == expected
    first, *others = UNKNOWN
    assert evaluate(folder, data, "--ignore-config-key", ",".join([f"{first}x", f"x{first}", *others]))[0] == 3


@pytest.mark.parametrize("value", [False, None, 1])
def test_only_causal_attention_is_computed(value, folder, data):
    """Unlike other keys that are false, this one is not as good as missing."""
    edit_config(folder, is_causal=value)
    for flags in [], ["--ignore-config-key", "is_causal"]:
        code, message = evaluate(folder, data, *flags)
        assert code == 3 and f'"is_causal" is {json.dumps(value)}; only causal attention is supported' in message


def test_several_ignored_keys_in_every_program(folder, data, tmp_path):
    """A name that the file lacks gets a warning."""
    edit_config(folder, one=1, **{"two.parts": 2},
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "three": 3})
    code, message = evaluate(folder, data)
    names, absent = "rope_parameters.three,one,two.parts", ["nosuch", "rope_parameters.nosuch", "hidden_act.nosuch"]
    assert code == 3 and message.count("\n  - ") == 3 and f"--ignore-config-key {names}" in message
    assert evaluate(folder, data, "--ignore-config-key", "one,two.parts")[0] == 3
    words = {
        "eval_gpt2": ["--model", folder, "--data", f"{data}/d_val_*.bin", "--seq-lens", T],
        "sample_gpt2": ["--model", folder, "--prompt", "1,2", "--max-new-tokens", 2],
        TRAIN.name: ["--init-from", folder, "--train-data", f"{data}/*_train_*.bin", "--seq-len", T, "--batch", 4,
                     "--steps", 1, "--warmup", 0, "--out", tmp_path / "out"],
    }
    how = dict(capture_output=True, text=True, env=environment(), timeout=300)
    for program, flags in words.items():
        command = list(map(str, [TRAIN.parent / program, *flags]))
        result = subprocess.run(command, **how)
        assert result.returncode == 3 and "rope_parameters.three" in result.stderr and not (tmp_path / "out").exists()
        command += ["--ignore-config-key", f"{names},,rope_parameters.rope_type,{','.join(absent)}"]
        result = subprocess.run(command, **how)
        assert result.returncode == 0, result.stderr
        warned = [line for line in result.stderr.splitlines() if "has no such key" in line]
        assert warned == [f"{program}: warning: --ignore-config-key {name}: {folder}/config.json has no such key."
                          for name in absent]
    # our own config.json has none of these keys
    train(data, "--out", tmp_path / "out", "--resume", "--steps", 2, model=False)


@pytest.mark.parametrize("value, place", [(0.5, ""), (0.5, "rope_parameters."), ("x", ""), (0, "")])
def test_a_part_of_rope_cannot_be_ignored(value, place, folder, data, expected):
    """transformers' Llama reads partial_rotary_factor where RoPE is scaled."""
    key = f"{place}partial_rotary_factor"

    def edited(x):
        change = {"partial_rotary_factor": x}
        if place:
            change = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **change}}
        edit_config(folder, **change)
        return evaluate(folder, data, "--ignore-config-key", key)

    assert edited(1.0) == edited(None) == expected
    code, message = edited(value)
    assert code == 3 and f"{key} is {json.dumps(value)}; only 1 is supported" in message
    assert "load it with --ignore-config-key" not in message


def test_keys_that_change_the_model_cannot_be_ignored(folder, data):
    edit_config(folder, hidden_act="gelu", quantization_config={"bits": 4},
                layer_types=["full_attention", "sliding_attention"])
    code, message = evaluate(folder, data, "--ignore-config-key", "hidden_act,quantization_config,layer_types")
    assert code == 3 and message.count("\n  - ") == 3 and "--ignore-config-key" not in message


def test_an_adapter_beside_the_model_is_rejected(folder, data, expected, tmp_path):
    """transformers adds an adapter to the weights if peft is installed and the folder has adapter_config.json."""
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    assert evaluate(folder, data) == expected
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    edit_config(folder, hidden_act="gelu")
    code, message = evaluate(folder, data)
    assert (code == 3 and "adapter_config.json exists" in message and "merge it into the model first" in message
            and "hidden_act" in message)
    edit_config(folder, hidden_act="silu")
    sample = [TRAIN.parent / "sample_gpt2", "--model", folder, "--prompt", "1,2", "--max-new-tokens", "2"]
    assert subprocess.run(sample, capture_output=True, env=environment()).returncode == 3
    assert "adapter_config.json" in train(data, "--init-from", folder, "--out", tmp_path / "out", model=False, code=3)


def test_reasons_that_do_not_fit_are_counted(folder, data):
    edit_config(folder, **{f"a_rather_long_name_{i:03d}_{'x' * 40}": i + 1 for i in range(100)})
    code, message = evaluate(folder, data)
    shown = message.count(": an unknown key, which may change the results")
    assert code == 3 and 5 < shown < 100 and f"\n  - and {100 - shown} more\n" in message
    assert "--ignore-config-key NAME" in message                   # the message is complete


UNITS = {"model_type": "attn_gpt", "attention_normalizer": {"name": "softmax", "block": "gau"}}
REJECTED = [
    (dict(model_type=...), '"model_type" is missing'),
    (dict(model_type="LLAMA"), '"model_type" is "LLAMA"'),
    (dict(model_type=7), '"model_type" is 7'),
    (dict(rms_norm_eps=...), '"rms_norm_eps" is missing'),
    (dict(hidden_act=3), '"hidden_act" is 3'),
    (dict(attention_bias=1), '"attention_bias" is 1'),
    (dict(tie_word_embeddings="yes"), '"tie_word_embeddings" is "yes"'),
    *((dict(quantization_config=value), f'"quantization_config" is {json.dumps(value, separators=(",", ":"))}')
      for value in ("gptq", "", 4, 0, True, {"bits": 4}, [4])),
    (dict(rope_theta="big"), '"rope_theta" is "big"'),
    (dict(rope_parameters=7), '"rope_parameters" is 7'),
    (dict(rope_parameters={"rope_theta": 10000.0, "rope_type": 1}), "rope_parameters.rope_type is 1"),
    (dict(rope_parameters={"rope_theta": True}), "rope_parameters.rope_theta is true"),
    (dict(rope_scaling={"rope_theta": 500.0}), "rope_scaling.rope_theta is 500"),
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_parameters and rope_scaling differ"),
    (dict(rope_scaling={"type": "default"}, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
     "remove rope_scaling"),
    (dict(rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 1.0}, rope_parameters=...),
     "rope_scaling.rope_type and rope_scaling.type differ"),
    (dict(rope_parameters={"rope_type": "default", "factor": 2.0}), "rope_parameters.factor"),
    (dict(rope_parameters={"rope_type": "linear"}), "rope_parameters.factor is missing; expected a number from 1"),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
     "rope_parameters.original_max_position_embeddings is missing; expected a whole number"),
    (dict(rope_parameters={"rope_type": "linear", "factor": "2"}),
     'rope_parameters.factor is "2"; expected a number from 1'),
    (dict(rope_parameters={"rope_type": "dynamic", "factor": 1.0}, max_position_embeddings=...),
     '"max_position_embeddings" is missing, but rope_type "dynamic"'),
    (dict(rope_parameters={"rope_type": "dynamic", "factor": 1.0},
          attention_normalizer={"name": "softmax", "seq_len": 32}),
     '"max_position_embeddings" is 64, but rope_type "dynamic"'),
    (dict(rope_parameters={"rope_type": "dynamic", "factor": 1.0}, num_attention_heads=16, num_key_value_heads=16,
          head_dim=2), "heads of size 2"),
    (dict(layer_types=7), '"layer_types" is 7'),
    (dict(eos_token_id=VOCAB), f'"eos_token_id" is {VOCAB}'),
    (dict(eos_token_id=[2, VOCAB]), f'"eos_token_id" is [2,{VOCAB}]'),
    (dict(eos_token_id=list(range(9))), "or a list of at most 8"),
    (dict(model_type="attn_gpt"), '"attention_normalizer" is missing'),
    (dict(attention_normalizer={"name": "softmax", "sharpness": 2}), "attention_normalizer.sharpness"),
    (dict(attention_normalizer={"name": "softmax", "block": "gru"}),
     'attention_normalizer.block is "gru"; expected "gau"'),
    (dict(attention_normalizer={"name": "softmax", "block": 1}), 'attention_normalizer.block is 1; expected "gau"'),
    (dict(num_attention_heads=2, **UNITS), '"num_attention_heads" is 2; expected 1 with block "gau"'),
    (dict(num_key_value_heads=2, **UNITS), '"num_key_value_heads" is 2; expected 1 with block "gau"'),
    (dict(head_dim=64, **UNITS), '"head_dim" is 64; expected 128 with block "gau"'),
    (dict(hidden_size=16, intermediate_size=31, **UNITS), '"intermediate_size" is 31; expected 32 with block "gau"'),
    (dict(qk_norm=True, **UNITS), '"qk_norm" is true; expected false with block "gau"'),
    (dict(gate="head", **UNITS), '"gate" is "head"; expected no such key with block "gau"'),
    (dict(UNITS, gate="row", attention_normalizer={"name": "softmax"}), '"gate" is "row"; expected "channel", "head"'),
]


@pytest.mark.parametrize("change, reason", REJECTED, ids=lambda value: value if isinstance(value, str) else "")
def test_values_that_no_llama_can_have(change, reason, folder, data):
    edit_config(folder, **change)
    code, message = evaluate(folder, data)
    assert code == 3 and reason in message, message
    assert message.count("\n  - ") == 1 or "attn_gpt" in change.values(), message


# transformers 4 wrote these settings if a config's to_dict() was saved, most with a value other than null or false.
GENERATION = dict(
    max_length=20, min_length=0, do_sample=False, early_stopping=True, num_beams=1, temperature=1.0, top_k=50,
    top_p=1.0, typical_p=1.0, repetition_penalty=1.0, length_penalty=1.0, no_repeat_ngram_size=0,
    encoder_no_repeat_ngram_size=0, bad_words_ids=[[1]], num_return_sequences=1, output_scores=False,
    return_dict_in_generate=False, forced_bos_token_id=1, forced_eos_token_id=2, remove_invalid_values=True,
    exponential_decay_length_penalty=[5, 1.5], suppress_tokens=[3], begin_suppress_tokens=[3], num_beam_groups=1,
    diversity_penalty=0.0)
# All keys of SmolLM2-1.7B, and those that Unsloth adds.
PUBLISHED = dict(
    rope_parameters=..., rope_theta=10000, rope_scaling=None, torch_dtype="bfloat16", transformers_version="4.42.3",
    rope_interleaved=False, is_llama_config=True, unsloth_version="2025.9.1", unsloth_fixed=True,
    **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}})


@pytest.mark.parametrize("change", [
    dict(eos_token_id=[2, 5]), dict(layer_types=["full_attention"] * 2), dict(rope_scaling=None),
    dict(rope_parameters={}, rope_theta=10000.0), dict(rope_scaling={"type": "default"}), dict(is_causal=True),
    dict(architectures=["XForCausalLM"]), PUBLISHED, GENERATION,
    *(dict(quantization_config=nothing) for nothing in (None, False, {}, []))])
def test_values_that_mean_the_same(change, folder, data, expected):
    edit_config(folder, **change)
    assert evaluate(folder, data) == expected


# ---------------------------------------------------------------- every class

SIZES = {          # the first row whose words are all in a key's name applies
    ("vocab",): VOCAB, ("kv", "head", "num"): 4, ("key_value", "heads"): 4, ("num", "head"): 4, ("n_head",): 4,
    ("head_dim",): HEAD, ("attention_heads",): 4, ("num", "layers"): 2, ("n_layer",): 2, ("layers",): 2,
    ("num", "experts_per"): 2, ("top_k",): 2, ("experts",): 4, ("n_group",): 1, ("topk_group",): 1, ("lora_rank",): 8,
    ("rope_head",): HEAD, ("nope_head",): HEAD, ("v_head",): HEAD, ("intermediate",): 48, ("ffn",): 48, ("inner",): 64,
    ("hidden_size",): 32, ("n_embd",): 32, ("d_model",): 32, ("dim",): 32, ("embed",): 32, ("position",): 64,
    ("window",): 16, ("chunk",): 16, ("conv",): 4, ("state",): 8, ("token_id",): 1,
}


def shrunk(config, layers):
    """Shrinks the numbers of a config that determine its size, also in nested configs."""
    small = {}
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            small[key] = shrunk(value, layers)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for words, size in SIZES.items() if all(word in key for word in words)), None)
            size = layers if size == 2 and "layer" in key else size
            if size is not None and (value > size or "head" in key or "token_id" in key):
                small[key] = size
        elif isinstance(value, list) and key in ("layer_types", "layers_block_type", "mlp_layer_types") and value:
            small[key] = value[:layers]
    return small


def build_class(name):
    """A tiny model of the class, or None and the reason why there is none."""
    config_class, why = getattr(transformers, CONFIG_MAPPING_NAMES[name]), ""
    for layers in (2, 4, 8):                   # some have a special layer at every fourth or eighth place
        for part in (lambda whole: whole, lambda whole: whole.get_text_config()):
            try:
                whole = config_class(**shrunk(config_class().to_dict(), layers))
                model_class, config = MODEL_FOR_CAUSAL_LM_MAPPING[config_class], part(whole)
                with torch.device("meta"):
                    count = sum(p.numel() for p in model_class._from_config(config).parameters())
                if count < 50e6:
                    return build(config, model_class), ""
                why = why or f"{count:,} parameters after shrinking"
            except BaseException as error:     # these classes may raise anything
                why = why or f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return None, why


@pytest.mark.parametrize("name", (sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if os.environ.get("FOREIGN") == "all"
                                  else ["llama", "mistral", "gpt_neox"]))
def test_every_class(name, data, tmp_path):
    model, why = build_class(name)
    if model is None:
        pytest.skip(f"{name} could not be built: {why}")
    try:
        model.save_pretrained(tmp_path / "model")
    except Exception as error:
        pytest.skip(f"{name} could not be saved: {type(error).__name__}: {' '.join(str(error).split())[:150]}")
    message = assert_same_or_refused(model, tmp_path / "model", data)
    print(f"{name}: {message or 'the same loss'}")
    if name != "llama":
        # relabeled as a Llama, it is compared with what transformers loads
        edit_config(tmp_path / "model", model_type="llama")
        assert_same_or_refused(None, tmp_path / "model", data)

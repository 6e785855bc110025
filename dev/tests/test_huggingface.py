"""Checkpoints and transformers: what we write loads there and gives our logits and our texts; what it saves again
trains here. Also compares the modeling file with the reference. Covers every normalizer in both blocks."""
import functools
import json
import math
import re
from dataclasses import asdict

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import (AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig,
                          LlamaForCausalLM)

import model as reference
import modeling_attn_gpt as modeling
from tiny import BIN, END_OF_TEXT, SHAPE, T, VOCAB, logits, run, sample, sentences, train, write_data

torch.set_num_threads(1)

GAU = f"layers=1,block=gau,channels=32,vocab={VOCAB}"
BLOCKS = {"llama": SHAPE, "gau": GAU}
OVERRIDES = ["softmax+post=reweight:3", "sigmoid-logn-l1+post=reweight:15", "softmax+qk=l2", "exp+norm=n2",
             "softmax+scale=log:L", "softmax+scale=const:0.3", "relu-l1+norm=l1+0.5", "sigmoid+offset=-logT",
             "relu2-T+norm=T2", "ssmax+s=0.3+fixed",
             "lssa+norm=l1+0.5+post=recenter-l1", "softmax-floorlog+scale=floorlog:4"]
NORMALIZERS = [*reference.PRESETS, *OVERRIDES]
LISTS = ["softmax+window=6,ssmax+rope=none", "ssmax-fixed+window=1+rope=50,ssmax-pn+window=24+cap=1.5",
         "softmax-recentered+window=5,ssmax+window=5+fixed", "relu2-l1+cap=2", "lssar+window=7+rope=none"]

# name: training flags. The texts are longer than the training length, so that n > L occurs.
CHECKPOINTS = {
    "softmax": [],
    "ssmax-bias-untied-bf16": ["--attn", "ssmax-bias", "--model", f"{SHAPE},tied=0", "--dtype", "bf16"],
    "gau-ssmax-bias-untied-bf16": ["--attn", "ssmax-bias", "--model", f"{GAU},tied=0", "--dtype", "bf16"],
    "qk-norm-grouped-softmax-bf16": [
        "--model", f"{SHAPE},heads=3,kv_heads=1,head_dim=12,norm_eps=0.01,qk_norm=1,tied=0", "--dtype", "bf16"],
    "qk-norm-lssar": ["--attn", "lssar", "--model", f"{SHAPE},kv_heads=2,qk_norm=1"],
    "bias-qk-norm-softmax": ["--model", f"{SHAPE},bias=qkv,qk_norm=1"],
    "bias-lssar": ["--attn", "lssar", "--model", f"{SHAPE},kv_heads=2,bias=qkv,gate=head"],
    "gate-softmax": ["--model", f"{SHAPE},gate=channel"],
    "capped-softmax": ["--logit-softcap", 3, "--z-loss", 1e-3],
    "linear-softmax": ["--rope-scaling", "linear:2.5"],
    "ntk-softmax": ["--rope-scaling", "ntk"],
    "llama3-softmax": ["--rope-scaling", "llama3:4:0.5:4:16"],
    "yarn-softmax-qk-norm": ["--rope-scaling", "yarn:4:16", "--model", f"{SHAPE},qk_norm=1", "--rope-theta", 500],
    "yarn-ssmax": ["--rope-scaling", "yarn:4:16", "--attn", "ssmax"],
    "ntk-gau-ssmax": ["--rope-scaling", "ntk", "--attn", "ssmax", "--model", GAU],
    "window-softmax": ["--attn", "softmax+window=7"],       # a Mistral
    "windows-nope-grouped": ["--attn", "softmax-sink+window=9+cap=20,ssmax-bias+rope=none",
                             "--model", f"{SHAPE},heads=4,kv_heads=2,tied=0"],
    "grouped-ssmax-bias-head-size": ["--attn", "ssmax-bias",
                                     "--model", f"{SHAPE},heads=3,kv_heads=1,head_dim=12,tied=0"],
}


DATA = write_data


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request, data, tmp_path_factory):
    """A checkpoint for each row of CHECKPOINTS."""
    return train(data, tmp_path_factory.mktemp("run") / "out", *CHECKPOINTS[request.param], steps=40)[0]


PLAIN = ("llama", "mistral", "qwen2", "qwen3")      # what transformers loads without our code


@functools.lru_cache(4)
def load(folder):
    """Loads the model in float32; plain softmax without trust_remote_code."""
    config = json.loads((folder / "config.json").read_text())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                trust_remote_code=config["model_type"] not in PLAIN).eval()


def random_ids(length):
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(3))


def whole_length(name):
    """True if a row depends on the length of the whole text, so that later tokens, a cache and padding change it."""
    normalizers = [reference.parse_normalizer(name) for name in name.split(",")]
    return any(normalizer.norm in ("T", "T2") or normalizer.offset == "-logT" for normalizer in normalizers)


# ---------------------------------------------------------------- our models in transformers

def test_transformers_gives_our_logits(folder):
    model = load(folder)
    ids = random_ids(T + 16)
    with torch.no_grad():
        theirs = model(ids).logits[0].double().numpy()
    ours = logits(folder, ids[0].tolist())
    assert ours.shape == theirs.shape and abs(ours).max() > 1
    assert abs(ours - theirs).max() < 1e-4


def test_automodel_gives_the_hidden_states(folder, caplog):
    """Those of the causal model, whose output layer our own model leaves out without a warning."""
    trusted = json.loads((folder / "config.json").read_text())["model_type"] not in PLAIN
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trusted).eval()
    assert not trusted or "lm_head" not in caplog.text
    ids = random_ids(20)
    with torch.no_grad():
        expected, found = (each(ids, output_hidden_states=True) for each in (load(folder), model))
    assert torch.equal(found.last_hidden_state, expected.hidden_states[-1])
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))


def test_generate_and_sample_give_the_same_text(folder):
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    for prompt in ("the cat", "€ 日本", "on"):
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=END_OF_TEXT)[0]
        text, _ = sample(folder, "--prompt", prompt, "--temperature", 0, "--max-new-tokens", 20)
        assert text == [tokenizer.decode(ids, skip_special_tokens=True)]


def test_only_plain_models_are_llamas(folder):
    """Only plain softmax in a Llama's block is written as a Llama, with QK norms as a Qwen3, with biases as a Qwen2, or
    with a window as a Mistral. Without trust_remote_code the others are rejected rather than computed as softmax."""
    config = json.loads((folder / "config.json").read_text())
    normalizer = config["attention_normalizer"]
    name = normalizer["name"]
    plain = name in ("softmax", "softmax+window=7") and "block" not in normalizer
    names = load_file(folder / "model.safetensors")
    norms, biases = (any(name.endswith(end) for name in names) for end in ("q_norm.weight", "q_proj.bias"))
    plain = plain and not (norms and biases) and not {"final_logit_softcapping", "gate"} & config.keys()
    assert config["model_type"] == ("attn_gpt" if not plain else "qwen3" if norms else "qwen2" if biases
                                    else "mistral" if "window" in name else "llama")
    if not plain:
        with pytest.raises(ValueError, match="trust_remote_code"):
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


def test_a_model_saved_by_transformers_trains_here(folder, data, tmp_path):
    """Saved again by transformers, the model has the same logits here, and --init-from accepts it."""
    load(folder).save_pretrained(tmp_path / "saved")
    assert (logits(tmp_path / "saved", [1, 2, 3]) == logits(folder, [1, 2, 3])).all()
    train(data, tmp_path / "out", "--init-from", tmp_path / "saved", steps=2)


@pytest.mark.parametrize("folder", ["softmax"], indirect=True)
def test_the_checkpoint_has_the_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == END_OF_TEXT and len(tokenizer) == VOCAB
    for text in sentences(20, seed=5):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


# ---------------------------------------------------------------- the whole family

def test_the_whole_family_is_tested(data):
    """These tests cover the presets of --attn help and every value of each stage. The modeling file has each phi."""
    table, values = run(BIN / "train_gpt2", "--attn", "help")[0].split("\n\n")[1:3]
    assert [line.split()[0] for line in table.splitlines()[1:]] == list(reference.PRESETS)
    there = set(re.findall(r"^  (\w+)=([-\w]+)", values, re.M)) - {
        ("s", "X"), ("cap", "C"), ("window", "W"), ("rope", "none")}
    used = {(stage, re.split("[:+]", getattr(reference.parse_normalizer(name), stage))[0])
            for name in NORMALIZERS for stage in ("qk", "scale", "offset", "phi", "norm", "post")}
    assert used == there and {phi for stage, phi in there if stage == "phi"} == set(modeling.PHI)


@pytest.fixture(scope="module")
def bases(data, tmp_path_factory):
    """A softmax model of each block, trained for a few steps. Its scores are neither all alike nor so large that a
    sigmoid is 1 everywhere; in both cases the posts would divide one rounding error by another."""
    return {block: train(data, tmp_path_factory.mktemp(block) / "out", "--model", shape, steps=15)[0]
            for block, shape in BLOCKS.items()}


@pytest.fixture(scope="module")
def model_of(bases, data, tmp_path_factory):
    """The folder of a block's model under any normalizer: one step from the softmax model, in which the scalars leave
    their initial values."""
    def make(block, name):
        flags = ["--init-from", bases[block], "--attn", name, "--warmup", 1, "--lr", 0.02]
        return train(data, tmp_path_factory.mktemp("run") / "out", *flags, steps=1)[0]
    return make


def loose_cache(name):
    """True for posts that subtract nearly equal numbers, which may lose the digits that dev/tests/logits.c
    requires of the cache."""
    return whole_length(name) or any(reference.parse_normalizer(name).post not in ("none", "negate")
                                     for name in name.split(","))


@pytest.mark.drawn(24)
@pytest.mark.parametrize("name", [*NORMALIZERS, *LISTS])
@pytest.mark.parametrize("block", BLOCKS)
def test_every_normalizer_gives_our_logits(block, name, model_of):
    folder = model_of(block, name)
    model, ids = load(folder), random_ids(T if "pn" in name else T + 16)
    ours = logits(folder, ids[0].tolist(), *["pass"] * loose_cache(name))
    with torch.no_grad():
        theirs = model(ids).logits[0].double().numpy()
    assert ours.shape == theirs.shape and abs(ours).max() > 1
    assert abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize("block", BLOCKS)
def test_pn_ends_at_its_length(block, model_of):
    """There are L numbers p_n, so a text of L tokens works and one more token is an error, in one pass and with the
    cache."""
    model = load(model_of(block, "ssmax-pn"))
    assert model.generate(random_ids(T), max_new_tokens=1, min_new_tokens=1, do_sample=False).shape == (1, T + 1)
    with pytest.raises(ValueError, match=f"{T} lengths, but .* {T + 1}"):
        model(random_ids(T + 1))
    with pytest.raises(ValueError, match=f"{T} lengths, but .* {T + 1}"):
        model.generate(random_ids(T), max_new_tokens=2, min_new_tokens=2, do_sample=False)


def assert_new(model, block):
    """The initial weights of a new model, under normalizers whose s starts at 1."""
    for key, parameter in model.named_parameters():
        std = (0.02 / math.sqrt(2 if block == "gau" else 4) if key.endswith(("o_proj.weight", "down_proj.weight"))
               else 0.02)
        if parameter.ndim == 2:
            assert abs(parameter.std().item() / std - 1) < 0.1 and abs(parameter.mean().item()) < std / 10, key
        else:
            assert (parameter == (0 if key.endswith(("bias", "offset", "sink")) else 1)).all(), key


@pytest.mark.parametrize("name", ["12*ssmax-fixed", "ssmax-pn", "lssar", "softmax-sink"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_new_model_made_by_transformers(block, name, model_of, data, tmp_path):
    """transformers makes a model from config.json alone: its initial weights have our distribution, it trains here,
    and what we save loads there."""
    config = AutoConfig.from_pretrained(model_of(block, name), trust_remote_code=True)
    torch.manual_seed(1)
    new = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert_new(new, block)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.fill_(7)
    # as transformers does for tensors that a folder lacks, whose values are undefined
    assert_new(new.apply(new._init_weights), block)
    new.save_pretrained(tmp_path / "new")
    ids = random_ids(T)
    with torch.no_grad():
        assert abs(logits(tmp_path / "new", ids[0].tolist()) - new(ids).logits[0].double().numpy()).max() < 1e-5
        saved, _ = train(data, tmp_path / "out", "--init-from", tmp_path / "new", steps=1)
        assert abs(logits(saved, ids[0].tolist()) - load(saved)(ids).logits[0].double().numpy()).max() < 1e-4


# ---------------------------------------------------------------- transformers' models here

@pytest.mark.parametrize("bos, eos, pad", [(3, 5, 7), (3, [5, END_OF_TEXT, 2], 0), (None, 5, None)])
def test_the_ids_of_special_tokens_come_back(bos, eos, pad, data, tmp_path):
    """Even where the tokenizer beside the data has others, and after a change of the normalizer."""
    LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=T, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)).save_pretrained(
            tmp_path / "llama")
    llama, _ = train(data, tmp_path / "out", "--init-from", tmp_path / "llama", steps=1)
    ssmax, _ = train(data, tmp_path / "ssmax", "--init-from", llama, "--attn", "ssmax", steps=1)
    for folder in (llama, ssmax):
        found = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (bos, eos, pad)


# ---------------------------------------------------------------- the modeling file against the reference

def test_gelu_far_below_zero():
    """It does not become 0, which would make a row under l1 all-zero."""
    z = [-12.0, -9.0, -6.0, -1.0, 0.0, 3.0]
    exact = torch.tensor([x * math.erfc(-x / math.sqrt(2)) / 2 for x in z], dtype=torch.float64)
    for gelu, dtype, rtol in ((modeling.PHI["gelu"], torch.float32, 1e-4),
                              (lambda x, _: reference.PHI["gelu"](x), torch.float64, 1e-12)):
        torch.testing.assert_close(gelu(torch.tensor(z, dtype=dtype), None).double(), exact, rtol=rtol, atol=0)


ROPE = {        # --rope-scaling: rope_parameters
    "none": {"rope_type": "default"},
    "linear:2.5": {"rope_type": "linear", "factor": 2.5},
    "ntk": {"rope_type": "dynamic", "factor": 1.0},
    "llama3:4:0.5:4:12": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 12},
    "yarn:4:6000": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6000},
    "yarn:4:4": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
}


def said_of(name):
    """The keys of attention_normalizer for a layer with this normalizer."""
    of = asdict(reference.parse_normalizer(name))
    rope = {"rope": of["rope"] if of["rope"] == "none" else float(of["rope"])} if of["rope"] else {}
    return ({"name": name} | {key: value for key, value in of.items() if value and key not in ("s", "rope")} | rope)


def pair(name, L, block="llama", tied=True, **change):
    """The modeling file's model in float64 with random weights, and a function that runs the reference with the same
    weights. `change` overrides the reference's shape."""
    names, gau = name.split(","), block == "gau"
    shape = reference.Config(**dict(layers=1 if gau else 2, heads=1 if gau else 2, channels=16, ffn=24, tied=tied,
                                    vocab=31, attn=name, L=L, block=block) | change)
    said = said_of(name) if len(names) == 1 else {"name": name, "layers": [said_of(name) for name in names]}
    said |= {"seq_len": L} | ({"block": "gau"} if gau else {})
    config = modeling.AttnGPTConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32 if gau else 24, num_hidden_layers=2,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads or shape.heads, qk_norm=bool(shape.qk_norm),
        qkv_bias=shape.bias == "qkv", gate=None if shape.gate == "none" else shape.gate,
        head_dim=128 if gau else shape.query_width // shape.heads, rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
        rope_parameters=ROPE[shape.rope_scaling] | {"rope_theta": 10000.0}, attention_normalizer=said)
    torch.manual_seed(0)
    model = modeling.AttnGPTForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:       # a fixed s, which float32 has rounded
                start = shape.normalizers[int(parameter_name.split(".")[2])].s_start(L)
                torch.testing.assert_close(parameter, torch.full_like(parameter, start), rtol=1e-6, atol=0)
                parameter.fill_(start)
    parameters = {key: value for key, value in model.state_dict().items() if key in reference.parameter_shapes(shape)}
    assert parameters.keys() == reference.parameter_shapes(shape).keys()
    return model, lambda ids, trace=None: reference.forward(parameters, ids, shape, trace)


HEADS = {
    "grouped": dict(heads=4, kv_heads=2),
    "multi-query, head size, eps": dict(heads=3, kv_heads=1, head_dim=6, norm_eps=0.05),
    "QK norms": dict(qk_norm=1, gate="channel"),
    "all": dict(heads=4, kv_heads=2, head_dim=6, norm_eps=0.05, qk_norm=1),
    "biases": dict(heads=4, kv_heads=2, bias="qkv", gate="head"),
}


@pytest.mark.parametrize("name, block, heads", [
    *((name, block, None) for block in BLOCKS for name in NORMALIZERS),
    *((name, "llama", heads) for heads in HEADS
      for name in ("softmax", "ssmax-pn", "lssar", "softmax-sink", "softmax-recentered")),
    *((name, block, None) for name in LISTS for block in BLOCKS)])
def test_the_modeling_file_equals_the_reference(block, name, heads, tmp_path):
    model, logits_of = pair(name, L=24, block=block, **HEADS.get(heads, {}))
    model.config.save_pretrained(tmp_path)
    whole = assert_same_logits(model, logits_of)
    if not whole_length(name):
        assert_cache_and_padding(model, *whole)


IDS = torch.randint(31, (2, 20), generator=torch.Generator().manual_seed(1))


def assert_same_logits(model, logits_of):
    """And the same attention weights. Returns both: logits, (layers, B, heads, T, T)."""
    trace = reference.Trace()
    with torch.no_grad():
        out = model(IDS, output_attentions=True)
        weights = torch.stack(out.attentions)
        assert (out.logits - logits_of(IDS, trace)).abs().max() < 1e-9 * out.logits.abs().max()
        assert (weights - torch.stack(trace.weights)).abs().max() < 1e-9 * weights.abs().max()
    return out.logits, weights


def assert_cache_and_padding(model, logits, weights, cached=True):
    """The logits are the same when the text is processed in parts, with a cache, and when it is padded; the weights of
    the parts are rows of the whole text's."""
    with torch.no_grad():
        cache, parts, past = None, [], 0
        for part in IDS.split([7, 1, 12], dim=1):
            name = "past_key_values" if past else "cache"       # as transformers 5.24 calls it
            out = model(part, **{name: cache}, use_cache=True, output_attentions=True)
            cache, end = out.past_key_values, past + part.shape[1]
            parts.append(out.logits)
            difference = torch.stack(out.attentions) - weights[:, :, :, past:end, :end]
            assert not cached or difference.abs().max() < 1e-9 * weights.abs().max()
            past = end
        assert not cached or (torch.cat(parts, 1) - logits).abs().max() < 1e-9 * logits.abs().max()
        padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], 1)
        mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 20)], 1).long()
        assert (model(padded, attention_mask=mask).logits[:, 3:] - logits).abs().max() < 1e-9 * logits.abs().max()


@pytest.mark.parametrize("L", [24, 5])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("scaling", ROPE)
def test_rope_scalings_of_the_modeling_file(scaling, block, L):
    """Beyond L, ntk depends on the length so far, so that a cache changes the logits, as in transformers."""
    model, logits_of = pair("ssmax", L=L, block=block, rope_scaling=scaling)
    logits, weights = assert_same_logits(model, logits_of)
    assert_cache_and_padding(model, logits, weights, cached=not (scaling == "ntk" and L < 20))
    plain, _ = pair("ssmax", L=L, block=block)
    with torch.no_grad():
        same = (plain(IDS).logits - logits).abs().max() < 1e-6 * logits.abs().max()
    assert same == (scaling == "none" or scaling == "ntk" and L == 24)


class AppleGPU(TorchFunctionMode):
    """Tensors of the CPU that claim to be on such a GPU, which has no float64."""
    def __torch_function__(self, function, types, arguments=(), named=None):
        if function == torch.Tensor.device.__get__:
            return torch.device("mps")
        out = function(*arguments, **{key: value for key, value in (named or {}).items() if key != "device"})
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            raise TypeError(f"{function}: float64")
        return out


@pytest.mark.parametrize("scaling", ROPE)
def test_rope_on_apples_gpus(scaling):
    model, _ = pair("ssmax", L=5, rope_scaling=scaling)
    with torch.no_grad():
        expected = model.float()(IDS).logits
        with AppleGPU():
            found = model(IDS).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("change, word", [
    ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4,
      "original_max_position_embeddings": 8}, "unknown rope_type 'longrope'"),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": 16}, "beta_fast"),
    ({"rope_type": "dynamic", "factor": 2.0}, "needs factor 1, not 2"),
])
def test_unsupported_rope_scalings_are_rejected(change, word):
    model, _ = pair("ssmax", L=24)
    model.config.rope_parameters = change | {"rope_theta": 10000.0}
    with pytest.raises(ValueError, match=word):
        modeling.AttnGPTForCausalLM(model.config)


def test_hidden_states_and_weights_are_those_of_transformers():
    """Of a Llama with the same weights, from forward() and from generate(), and None where nobody asks for them."""
    ours, _ = pair("softmax", L=24, heads=4, kv_heads=2)
    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
        rms_norm_eps=ours.config.rms_norm_eps, attn_implementation="eager")).double().eval()
    theirs.load_state_dict(ours.state_dict())
    how = dict(output_hidden_states=True, output_attentions=True)
    found, expected = (model(IDS, **how) for model in (ours, theirs))
    for key, count in ("hidden_states", 3), ("attentions", 2):
        assert len(found[key]) == len(expected[key]) == count
        for a, b in zip(found[key], expected[key]):
            assert a.shape == b.shape and (a - b).abs().max() < 1e-6 * b.abs().max()   # they have parts in float32
    how |= dict(max_new_tokens=3, min_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    found, expected = ([[A.shape for A in attentions] for attentions in model.generate(IDS, **how).attentions]
                       for model in (ours, theirs))
    assert found == expected and found[2] == 2 * [(2, 4, 1, 22)]
    assert ours(IDS).hidden_states is ours(IDS).attentions is None
    ours.config.output_hidden_states = ours.config.output_attentions = True
    loss, logits, states, weights = ours(IDS, labels=IDS, use_cache=False, return_dict=False)
    assert loss.ndim == 0 and logits.shape == (2, 20, 31) and len(states) == 3 and len(weights) == 2
    assert ours(IDS, output_attentions=False).attentions is None


@pytest.mark.parametrize("name, block", [("ssmax-pn", "llama"), ("relu2-n", "gau")])
def test_layers_that_accelerate_dispatches(name, block):
    """Its hooks replace lists by copies, and move the tensors among a layer's arguments to the layer's device."""
    model, _ = pair(name, L=24, block=block)
    how = dict(attention_mask=torch.ones_like(IDS).index_fill_(1, torch.arange(3), 0), output_attentions=True,
               output_hidden_states=True)
    with torch.no_grad():
        expected, found = model(IDS, **how), cpu_offload(model, "cpu")(IDS, **how)
    for key in "logits", "attentions", "hidden_states":
        assert len(found[key]) == len(expected[key]) and all(map(torch.equal, found[key], expected[key]))


def test_layers_on_several_devices():
    """meta is the only other device on every machine."""
    model, _ = pair("relu2-n", L=24, tied=False)
    for module in model.model.layers[1], model.model.norm, model.lm_head:
        add_hook_to_module(module, AlignDevicesHook("meta", place_submodules=True))
    out = model(IDS, output_attentions=True, output_hidden_states=True)
    assert [x.device.type for x in out.attentions] == ["cpu", "meta"] and out.logits.is_meta
    assert [x.device.type for x in out.hidden_states] == ["cpu", "cpu", "meta"]


def test_wrong_inputs_and_caches():
    model, _ = pair("ssmax", L=24)
    ids = torch.randint(1, 31, (1, 6), generator=torch.Generator().manual_seed(1))
    for inputs in {}, {"input_ids": ids, "inputs_embeds": model.model.embed_tokens(ids)}:
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            model(**inputs)
    with pytest.raises(ValueError, match="such as DynamicCache, found StaticCache, whose length is fixed"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("block, name", [("llama", "ssmax-pn"), ("gau", "relu2-n"), ("llama", "softmax-sink")])
def test_gradient_checkpointing(block, name, reentrant):
    """The same gradients, and layers do run twice."""
    model, _ = pair(name, L=24, block=block)
    calls, gradients = [], []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    model.train()
    for checkpointing in False, True:
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        gradients.append({name: x.grad.clone() for name, x in model.named_parameters() if x.requires_grad})
    assert len(calls) == 3 and gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(x, gradients[1][name]) for name, x in gradients[0].items())
    with pytest.raises(ValueError, match="past_key_values"):
        model(IDS, past_key_values=DynamicCache())
    how = dict(max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(IDS, **how), model.eval().generate(IDS, **how))       # without gradients


def test_unknown_arguments_are_rejected():
    """One that hides something from the model would otherwise leave wrong numbers. None means that it is not given."""
    model, _ = pair("softmax", L=24)
    with pytest.raises(TypeError, match="unknown arguments: kv_cache$"):
        model(IDS, kv_cache=DynamicCache(), head_mask=None, token_type_ids=torch.zeros_like(IDS))


def test_packed_texts_are_rejected():
    """Unless a mask is passed: then generate() numbers the positions of padding itself."""
    model, _ = pair("ssmax", L=24)
    ids = torch.randint(31, (1, 6), generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="packed into one row"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    same = model(ids, position_ids=torch.arange(6)[None]).logits
    assert torch.equal(same, model(ids).logits)
    with pytest.raises(ValueError, match="expected 6 of them, found 4"):
        model(ids, position_ids=torch.arange(4)[None])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    padded = model(ids, attention_mask=mask, position_ids=torch.tensor([[1, 1, 0, 1, 2, 3]])).logits[:, 2:]
    assert (padded - model(ids[:, 2:]).logits).abs().max() < 1e-9


@pytest.mark.parametrize("block", BLOCKS)
def test_the_loss_is_the_usual_cross_entropy(block):
    model, _ = pair("ssmax", L=24, block=block)
    out = model(IDS, labels=IDS)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert math.isclose(out.loss.item(), expected.item(), rel_tol=1e-6)


def test_masked_scores_may_overflow():
    n = torch.arange(1, 5.0)[:, None]
    z = torch.full((4, 4), 1e4).tril(-1) * 0 + torch.full((4, 4), 1e4).triu(1)
    z.requires_grad_()
    A = modeling.normalized(z, torch.ones(4, 4, dtype=torch.bool).tril(), "exp", "none", n, 4, 4, {})
    A.sum().backward()
    assert z.grad.isfinite().all() and A.isfinite().all()


@pytest.mark.parametrize("key, value", [("scale", "log2"), ("phi", "exq"), ("norm", "l2"), ("post", "recentre"),
                                        ("offset", "-logM"), ("qk", "l1")])
def test_an_unknown_stage_is_rejected(key, value):
    config = pair("softmax1", L=8)[0].config
    config.attention_normalizer[key] = value
    with pytest.raises(ValueError, match=value):
        modeling.AttnGPTForCausalLM(config)(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("change, says", [
    (lambda a: a["layers"][0].update(window=0), "means window 6.0 in layer 0, but the file has 0"),
    (lambda a: a["layers"][0].update(window="6"), "means window 6.0 in layer 0, but the file has '6'"),
    (lambda a: a["layers"][1].pop("rope"), "means rope none in layer 1, but the file has None"),
    (lambda a: a["layers"][1].update(cap=2), "means cap None in layer 1, but the file has 2"),
    (lambda a: a.update(phi="exp"), "has phi, which belong in"),
    (lambda a: a.update(layers=5), "expected a list"), (lambda a: a["layers"].pop(), "has 1 layers")])
def test_a_list_that_contradicts_its_name_is_rejected(change, says):
    config = pair("softmax+window=6,ssmax+rope=none", L=8)[0].config
    change(config.attention_normalizer)
    with pytest.raises(ValueError, match=says):
        modeling.AttnGPTForCausalLM(config)


@pytest.mark.parametrize("key, value", [("block", "moe"), ("name", None), ("num_attention_heads", 2), ("head_dim", 64),
                                        ("intermediate_size", 24)])
def test_another_block_is_rejected(key, value):
    config = pair("softmax", L=8, block="gau")[0].config
    if key in ("block", "name"):
        config.attention_normalizer = {k: v for k, v in (config.attention_normalizer | {key: value}).items()
                                       if v is not None}
    else:
        setattr(config, key, value)
    with pytest.raises(ValueError, match=key):
        modeling.AttnGPTForCausalLM(config)

"""Checkpoints and transformers, in both directions: what we write loads there and gives our logits and our texts; what it writes trains
on here. And the modelling file against the reference, for every normaliser."""
import importlib.util
import json
import math
import sys
from dataclasses import fields

import pytest
import torch

from tiny import END_OF_TEXT, ROOT, SHAPE, T, VOCAB, build, ids_of, logits, sample, sentences, train, write_data
from trainer import checkpoint, losses, metrics

sys.path.insert(0, str(ROOT / "dev" / "reference"))
import model as reference
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)

# name: flags of training. Lengths beyond the training length too: n > L.
CHECKPOINTS = {
    "softmax": [],
    "softmax-untied": ["--model", f"{SHAPE},tied=0"],
    "softmax-bf16": ["--dtype", "bf16"],
    "ssmax": ["--attn", "ssmax"],
    "ssmax-untied-bf16": ["--attn", "ssmax", "--model", f"{SHAPE},tied=0", "--dtype", "bf16"],
    "softmax1": ["--attn", "softmax1"],
    "relu2-n": ["--attn", "relu2-n"],
}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    build()
    return write_data(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="session", params=CHECKPOINTS)
def folder(request, data, tmp_path_factory):
    """A checkpoint for each row of CHECKPOINTS."""
    return train(data, tmp_path_factory.mktemp("run") / "out", *CHECKPOINTS[request.param], steps=40)[0]


def load(folder):
    """In float32; plain softmax without trusting any code."""
    config = json.loads((folder / "config.json").read_text())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=config["model_type"] != "llama").eval()


# ---------------------------------------------------------------- ours in transformers

def test_logits_are_ours(folder):
    model = load(folder)
    ids = torch.randint(VOCAB, (1, T + 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model(ids).logits[0].double().numpy()
    ours = logits(folder, ids[0].tolist())
    assert ours.shape == theirs.shape and abs(ours).max() > 1
    assert abs(ours - theirs).max() < 1e-4


def test_generate_and_sample_are_the_same(folder):
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    for prompt in ("the cat", "€ 日本", "on"):
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=END_OF_TEXT)[0]
        text, _ = sample(folder, "--prompt", prompt, "--temperature", 0, "--max-new-tokens", 20)
        assert text == [tokenizer.decode(ids, skip_special_tokens=True)]


def test_the_type_is_told(folder):
    """Only plain softmax is a Llama; loaded without trust, the others are refused rather than computed as softmax."""
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"] == "llama") == (config["attention_normalizer"]["name"] == "softmax")
    if config["model_type"] != "llama":
        with pytest.raises(ValueError, match="trust_remote_code"):
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


def test_saved_again_it_trains_on_here(folder, data, tmp_path):
    """Through transformers and back: the same logits, and --init-from takes it."""
    load(folder).save_pretrained(tmp_path / "saved")
    assert (logits(tmp_path / "saved", [1, 2, 3]) == logits(folder, [1, 2, 3])).all()
    train(data, tmp_path / "out", "--init-from", tmp_path / "saved", steps=2)


def test_the_tokenizer_lies_in_the_checkpoint(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == END_OF_TEXT and len(tokenizer) == VOCAB
    for text in sentences(20, seed=5):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizers_agree(data, tmp_path):
    """The same prompt as text, and as the ids that AutoTokenizer gives."""
    folder, _ = train(data, tmp_path / "out", steps=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors"):
        (plain / name).write_bytes((folder / name).read_bytes())
    for prompt in sentences(5, seed=6):
        ids = tokenizer(prompt).input_ids
        text, _ = sample(folder, "--prompt", prompt, "--max-new-tokens", 30)
        same, _ = sample(plain, "--prompt", ",".join(map(str, ids)), "--max-new-tokens", 30)
        assert ids_of(same[0])[:len(ids)] == ids and text == [tokenizer.decode(ids_of(same[0]))]


# ---------------------------------------------------------------- transformers' here

def make_llama(**change):
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, rms_norm_eps=1e-5,
        max_position_embeddings=T, initializer_range=0.2, bos_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT) | change))


def validation_loss(model, data):
    """The mean loss over the windows of the validation data, as the trainer takes them."""
    tokens = torch.frombuffer(bytearray((data / "t_val_000000.bin").read_bytes()[1024:]), dtype=torch.uint16).long()
    windows = tokens[:-1][:(len(tokens) - 1) // T * T].view(-1, T), tokens[1:][:(len(tokens) - 1) // T * T].view(-1, T)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(windows[0]).logits.double().transpose(1, 2), windows[1]).item()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["10GB", "20KB"])
def test_a_llama_trains_on(tied, dtype, shard_size, data, tmp_path):
    llama = make_llama(tie_word_embeddings=tied).to(dtype)
    llama.save_pretrained(tmp_path / "llama", max_shard_size=shard_size)
    assert (tmp_path / "llama/model.safetensors.index.json").exists() == (shard_size == "20KB")
    # A step at learning rate 0 leaves the weights, so that its validation is that of the first weights.
    flags = ["--init-from", tmp_path / "llama", "--val-every", 1]
    train(data, tmp_path / "still", *flags, "--lr", 0, steps=1)
    [(loss,)] = metrics(tmp_path / "still", ["val_loss"])
    assert abs(loss - validation_loss(llama.float().eval(), data)) < 1e-4
    train(data, tmp_path / "on", *flags, steps=15)
    assert losses(tmp_path / "on")[-3:].mean() < losses(tmp_path / "on")[0] - 0.3
    saved = LlamaForCausalLM.from_pretrained(checkpoint(tmp_path / "on", 15), dtype=torch.float32)
    assert abs(validation_loss(saved, data) - metrics(tmp_path / "on", ["val_loss"])[-1][0]) < 1e-4


REFUSED = {
    "grouped-query": (dict(num_key_value_heads=2), "grouped-query"),
    "eps": (dict(rms_norm_eps=1e-6), "rms_norm_eps"),
    "biases": (dict(attention_bias=True), "biases"),
    "activation": (dict(hidden_act="gelu"), "hidden_act"),
    "rope": (dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}), "rope_type"),
    "head size": (dict(head_dim=16), "head_dim"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_our_model_is_refused(name, data, tmp_path):
    change, word = REFUSED[name]
    make_llama(**change).save_pretrained(tmp_path / "llama")
    printed = train(data, tmp_path / "out", "--init-from", tmp_path / "llama", steps=1, code=3)[1]
    assert word in printed and "config.json" in printed and not (tmp_path / "out/ckpt").exists()
    assert word in sample(tmp_path / "llama", code=3)[1]


# ---------------------------------------------------------------- the modelling file against the reference

NORMALIZERS = [*reference.PRESETS, "softmax+post=reweight:3", "sigmoid-logn-l1+post=reweight:15", "softmax+qk=l2", "exp+norm=n2",
               "softmax+scale=log:L", "softmax+scale=const:0.3", "relu-l1+norm=l1+0.5", "sigmoid+offset=-logT", "relu2-T+norm=T2"]


@pytest.fixture(scope="session")
def modeling():
    spec = importlib.util.spec_from_file_location("modeling_attn_gpt", ROOT / "attention" / "modeling_attn_gpt.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["modeling_attn_gpt"] = module
    spec.loader.exec_module(module)
    return module


def pair(modeling, name, L, tied=True):
    """The modelling file's model in float64 with random weights, and the reference's logits of the same weights."""
    normalizer = reference.parse_normalizer(name)
    shape = reference.Config(layers=2, heads=2, channels=16, ffn=24, tied=tied, vocab=31, attn=name, L=L)
    said = {f.name: getattr(normalizer, f.name) for f in fields(normalizer) if f.name not in ("s", "fixed")}
    config = modeling.AttnGPTConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, rms_norm_eps=1e-5,
        tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=0, eos_token_id=0,
        attention_normalizer=said | {"name": name, "seq_len": L, "fixed": normalizer.fixed})
    torch.manual_seed(0)
    model = modeling.AttnGPTForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("attn_scale") and normalizer.fixed:
                parameter.fill_(normalizer.s_start(L))
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    parameters = {key: value for key, value in model.state_dict().items() if key in reference.parameter_shapes(shape)}
    assert parameters.keys() == reference.parameter_shapes(shape).keys()
    return model, lambda ids: reference.forward(parameters, ids, shape)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_the_formulas_are_the_reference(modeling, name):
    model, logits_of = pair(modeling, name, L=24)
    ids = torch.randint(31, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(ids).logits
        assert (whole - logits_of(ids)).abs().max() < 1e-9 * whole.abs().max()
        if model.config.attention_normalizer["norm"] in ("T", "T2") or "T" in model.config.attention_normalizer["offset"]:
            return      # a row depends on what comes after it: the cache and padding give other numbers
        cache, parts = None, []
        for part in ids.split([7, 1, 12], dim=1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        assert (torch.cat(parts, 1) - whole).abs().max() < 1e-9 * whole.abs().max()
        padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
        mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 20)], 1).long()
        assert (model(padded, attention_mask=mask).logits[:, 3:] - whole).abs().max() < 1e-9 * whole.abs().max()


@pytest.mark.parametrize("name", NORMALIZERS)
def test_it_trains_there(modeling, name):
    """Gradients are finite, also where scores are so large that what is masked would overflow; and the loss is the usual one."""
    model, _ = pair(modeling, name, L=24)
    ids = torch.randint(31, (2, 20), generator=torch.Generator().manual_seed(1))
    out = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert math.isclose(out.loss.item(), expected.item(), rel_tol=1e-6)
    out.loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.isfinite().all(), parameter_name


def test_masked_scores_may_overflow(modeling):
    n = torch.arange(1, 5.0)[:, None]
    z = torch.full((4, 4), 1e4).tril(-1) * 0 + torch.full((4, 4), 1e4).triu(1)
    z.requires_grad_()
    A = modeling.normalized(z, torch.ones(4, 4, dtype=torch.bool).tril(), "exp", "none", n, 4, 4)
    A.sum().backward()
    assert z.grad.isfinite().all() and A.isfinite().all()


def test_pn_ends_at_its_length(modeling):
    model, _ = pair(modeling, "ssmax-pn", L=8)
    with pytest.raises(ValueError, match="8 lengths"):
        model(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize("key, value", [("scale", "log2"), ("phi", "exq"), ("norm", "l2"), ("post", "recentre"), ("offset", "-logM"), ("qk", "l1")])
def test_an_unknown_stage_is_refused(modeling, key, value):
    model, _ = pair(modeling, "softmax1", L=8)
    model.config.attention_normalizer[key] = value
    with pytest.raises(ValueError, match=value):
        model(torch.zeros(1, 4, dtype=torch.long))

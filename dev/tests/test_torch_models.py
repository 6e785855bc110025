"""attn_c in models: through transformers' attention interface, in the modeling file of our checkpoints, against the
trainer, and installed from a wheel."""
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
import zipfile
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import (AutoModelForCausalLM, CLIPVisionConfig, CLIPVisionModel, Gemma2Config, Gemma3TextConfig,
                          LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Phi3Config)
from transformers.masking_utils import and_masks, chunked_overlay, sliding_window_causal_mask_function

import calls
import model as reference
import modeling_attn_gpt as modeling
from test_huggingface import BLOCKS, IDS, NORMALIZERS, bases, model_of, pair        # noqa: F401
from tiny import ROOT, T, VOCAB, lm_eval_python, logits, train, write_data
from trainer import losses

DATA = write_data
torch.set_num_threads(1)


# ---- transformers' interface

@pytest.fixture(scope="session")
def interface(attn_c):
    import attn_c.transformers
    return attn_c.transformers


def make_llama(**change):
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**dict(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, bos_token_id=0, eos_token_id=None)
        | change)).eval()


TOKENS = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones(2, 12, dtype=torch.long).index_fill_(1, torch.arange(5), 0)
PADDED[0] = 1


@pytest.mark.parametrize("name", [*reference.PRESETS, "softmax+post=reweight:3"])
def test_padding_and_cache(interface, name):
    """Generation after padding equals generation without it, and cached decoding equals whole passes, but for the
    normalizers that depend on the length of the whole text."""
    model = make_llama()
    model.set_attn_implementation(interface.register(name) if "+" in name else f"attn_c:{name}")
    how = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        padded = model.generate(TOKENS, attention_mask=PADDED, **how)[1, 5:]
        alone = model.generate(TOKENS[1:, 5:], attention_mask=PADDED[1:, 5:], **how)[0]
        assert torch.equal(padded, alone)
        mask = torch.cat([PADDED, torch.ones_like(PADDED)], 1)[:, :19]
        whole = model(torch.cat([TOKENS, TOKENS], 1)[:, :19], attention_mask=mask).logits[1, 5:]
        unpadded = model(torch.cat([TOKENS, TOKENS], 1)[1:, 5:19]).logits[0]
        assert (whole - unpadded).abs().max() < 2e-5 * whole.abs().max()
        if reference.parse_normalizer(name).norm != "T":
            steps = model(alone[None, :-1]).logits[0].argmax(-1)
            assert torch.equal(steps[6:], alone[7:])


def test_compiled(interface):
    model = make_llama()
    model.set_attn_implementation("attn_c:lssar")
    with torch.no_grad():
        expected = model(TOKENS, attention_mask=PADDED, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = compiled(TOKENS, attention_mask=PADDED, use_cache=False).logits
        assert (found - expected)[PADDED.bool()].abs().max() < 1e-5 * expected.abs().max()
        with pytest.raises(RuntimeError, match="padding between tokens"):
            compiled(TOKENS, attention_mask=PADDED.index_fill(1, torch.tensor(8), 0), use_cache=False)


def test_attached_scalars(interface, tmp_path):
    """They are trained, saved and shared as the names say; without them s keeps its initial value."""
    model = make_llama()
    interface.attach(model, "ssmax-pn", seq_len=64)
    names = {name.removeprefix("model.layers.") for name, _ in model.named_parameters() if "attn_" in name}
    assert names == {"0.self_attn.normalizer.attn_pn",
                     *(f"{i}.self_attn.normalizer.{name}" for i in (0, 1) for name in ("attn_scale", "attn_bias"))}
    model(TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "attn_" in name)
    with pytest.raises(ValueError, match="the scalars of ssmax-pn"):
        model.set_attn_implementation("attn_c:ssmax")
        model(TOKENS)
    model.save_pretrained(tmp_path)     # the shared parameter once
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert [name for name in file.keys() if "attn_pn" in name] == ["model.layers.0.self_attn.normalizer.attn_pn"]
    interface.detach(model)
    assert model._tied_weights_keys == LlamaForCausalLM._tied_weights_keys
    start = model(TOKENS).logits
    interface.attach(model, "ssmax", seq_len=64)
    assert torch.equal(model(TOKENS).logits, start)
    for normalizer in ("ssmax-pn", "ssmax"):        # the second replaces the first
        interface.attach(model, normalizer, seq_len=64)
    assert not any("attn_pn" in name for name in [*model.state_dict(), *model._tied_weights_keys])


@pytest.mark.parametrize("name", ["ssmax-pn", "ssmax-fixed", "softmax-sink", "softmax+post=reweight:3",
                                  "softmax+scale=log:L"])
def test_an_attached_model_goes_to_the_trainer(interface, name, data, tmp_path):
    """Trained in PyTorch and written by save_pretrained(): the C programs give the same logits, and train it on."""
    model = make_llama(vocab_size=VOCAB, max_position_embeddings=T)
    interface.attach(model, name, seq_len=T)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01, weight_decay=0)
    ids = torch.randint(1, VOCAB, (4, T), generator=torch.Generator().manual_seed(4))
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        expected = model(ids[:1]).logits[0].double().numpy()
    assert abs(logits(tmp_path / "saved", ids[0].tolist()) - expected).max() < 1e-4
    folder = train(data, tmp_path / "out", "--init-from", tmp_path / "saved", steps=2)[0]
    assert json.loads((folder / "config.json").read_text())["attention_normalizer"]["name"] == name
    interface.detach(model)
    assert "attention_normalizer" not in model.config.to_dict()


@pytest.mark.parametrize("normalizer, seq_len, message", [
    ("ssmx", 64, "Did you mean ssmax"), ("ssmax-bias", None, "depends on the length"),
    ("ssmax", 0, "expected seq_len")])
def test_rejected_calls_of_attach_change_nothing(interface, normalizer, seq_len, message):
    model = make_llama()
    interface.attach(model, "ssmax-pn", seq_len=64)
    with torch.no_grad():
        for name, scalar in model.named_parameters():
            scalar += 0.2 * ("normalizer" in name)
        logits, tied = model(TOKENS).logits, dict(model._tied_weights_keys)
        state = {name: x.clone() for name, x in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            interface.attach(model, normalizer, seq_len=seq_len)
        assert torch.equal(model(TOKENS).logits, logits) and model._tied_weights_keys == tied
    found = model.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[name], x) for name, x in state.items())


def test_scalars_are_on_the_device_of_their_layer(interface):
    with torch.device("meta"):
        model = make_llama()
    interface.attach(model, "ssmax-pn", seq_len=64)
    assert {x.device.type for name, x in model.named_parameters() if "normalizer" in name} == {"meta"}


def test_padding_at_the_end(interface):
    """Nothing before it sees it."""
    model, mask = make_llama(), PADDED.flip(1)
    with torch.no_grad():
        own = model(TOKENS, attention_mask=mask).logits
        model.set_attn_implementation("attn_c:softmax")
        found = model(TOKENS, attention_mask=mask).logits
    assert (found - own)[mask.bool()].abs().max() < 1e-5 * own.abs().max()


@pytest.mark.parametrize("name", ["relu2-T", "relu2-T+norm=T2", "sigmoid+offset=-logT"])
def test_padding_at_the_end_under_normalizers_that_read_T(interface, name):
    """It would count in T."""
    model = make_llama()
    model.set_attn_implementation(interface.register(name))
    message = "padding at the end under a normalizer that depends on the length of each text is not supported"
    with torch.no_grad():
        with pytest.raises(ValueError, match=rf"{message}, found it in sequences \[1\]; pad at the beginning"):
            model(TOKENS, attention_mask=PADDED.flip(1))
        if name == "relu2-T":
            with pytest.raises(RuntimeError, match=message):
                torch.compile(model, backend="aot_eager")(TOKENS, attention_mask=PADDED.flip(1), use_cache=False)


@pytest.mark.parametrize("attached", [False, True])
def test_scaling_is_honored(interface, attached):
    model = make_llama()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9
    with torch.no_grad():
        own = model(TOKENS).logits
        if attached:
            interface.attach(model, "softmax", seq_len=64)
        else:
            model.set_attn_implementation("attn_c:softmax")
        assert (model(TOKENS).logits - own).abs().max() < 1e-5 * own.abs().max()


def with_cache(model, mask, compute):
    """The logits of the last 5 tokens, after 7 in a cache."""
    cache = model(TOKENS[:, :7], attention_mask=PADDED[:, :7], use_cache=True).past_key_values
    return compute(TOKENS[:, 7:], attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize("compiled", [False, True])
def test_masks_shorter_or_longer_than_the_keys(interface, compiled):
    """transformers ignores the end of a longer one, and takes what a shorter one lacks for padding."""
    model = make_llama(num_hidden_layers=1)
    with torch.no_grad():
        own = with_cache(model, PADDED, model)
        model.set_attn_implementation("attn_c:softmax")
        compute = torch.compile(model, backend="aot_eager") if compiled else model
        for mask in PADDED, torch.cat([PADDED, torch.zeros_like(PADDED)], 1):
            assert (with_cache(model, mask, compute) - own).abs().max() < 1e-5 * own.abs().max()
        with pytest.raises(ValueError, match="expected an attention_mask over all 12 keys, found 7; pass"):
            with_cache(model, PADDED[:, :7], compute)
        with pytest.raises(ValueError, match="expected an attention_mask over all 12 keys, found 7; pass"):
            compute(TOKENS, attention_mask=PADDED[:, :7], use_cache=False)


def call(**arguments):
    """A call as a model makes it."""
    def run(interface):
        x = torch.zeros(1, 2, 4, 8)
        interface.registered("softmax")(torch.nn.Module(), x, x, x, None, **arguments)
    return run


SLIDING = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=2, sliding_window=4, pad_token_id=0, initializer_range=0.3)


def gemma(config, **change):
    return config(**SLIDING | dict(head_dim=8, query_pre_attn_scalar=8,
                                   layer_types=["sliding_attention", "full_attention"]) | change)


@pytest.mark.parametrize("config", [
    gemma(Gemma3TextConfig), gemma(Gemma3TextConfig, layer_types=["sliding_attention"] * 2),
    gemma(Gemma2Config, attn_logit_softcapping=None), MistralConfig(**SLIDING)], ids=lambda c: c.model_type)
@pytest.mark.parametrize("padded", [False, True])
def test_a_sliding_window(interface, config, padded):
    """Gradients; and generation with a cache that drops tokens. Where every layer has a window, transformers makes a
    Gemma 3's mask of full attention from such a cache, too."""
    torch.manual_seed(3)
    model, mask = AutoModelForCausalLM.from_config(config).eval(), PADDED if padded else torch.ones_like(PADDED)
    how = dict(do_sample=False, eos_token_id=None, attention_mask=mask, max_new_tokens=12)

    def everything():
        model.zero_grad()
        logits = model(TOKENS, attention_mask=mask).logits * mask[..., None]
        logits.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        return [logits.detach(), *gradients], model.generate(TOKENS, **how)

    numbers, text = everything()
    model.set_attn_implementation("attn_c:softmax")
    ours, our_text = everything()
    assert torch.equal(our_text, text)
    for x, y in zip(ours, numbers, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


def test_a_normalizer_in_a_sliding_window(interface):
    """Its rows count the keys in the window: their number is the text's in a text that is no longer."""
    model = MistralForCausalLM(MistralConfig(**SLIDING | {"num_hidden_layers": 1})).eval()
    interface.attach(model, "ssmax", seq_len=64)
    s = model.model.layers[0].self_attn.normalizer.attn_scale[0].item()
    assert s == pytest.approx(1 / torch.arange(1, 65).clamp(max=4).log().mean().item())
    with torch.no_grad():
        whole, part = model(TOKENS).logits, model(TOKENS[:, 8:], position_ids=torch.arange(8, 12)[None]).logits
        text = model.generate(TOKENS, max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert torch.equal(model(text[:, :-1]).logits.argmax(-1)[:, 11:], text[:, 12:])
    assert (whole[:, -1] - part[:, -1]).abs().max() < 1e-5 * whole.abs().max()


def window_of_the_mask_alone(interface):
    """As a Qwen2-MoE, which does not pass it to its attention."""
    x = torch.zeros(1, 2, 4, 8)
    mask = interface.mask(1, 4, 4, mask_function=sliding_window_causal_mask_function(3), local_size=3)
    interface.registered("softmax")(torch.nn.Module(), x, x, x, mask)


def dropping_cache(interface):
    model = MistralForCausalLM(MistralConfig(**SLIDING, attn_implementation="attn_c:relu2-T"))
    model.generate(TOKENS, max_new_tokens=6, do_sample=False, eos_token_id=None)


def softcap(interface):
    model = AutoModelForCausalLM.from_config(gemma(Gemma2Config))
    model.set_attn_implementation("attn_c:softmax")
    model(TOKENS)


def vision(interface):
    config = CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                              image_size=16, patch_size=4, attn_implementation="attn_c:softmax")
    CLIPVisionModel(config)(torch.zeros(1, 3, 16, 16))


def forward(**arguments):
    def run(interface):
        model = make_llama(attn_implementation="attn_c:softmax")
        return model(TOKENS, **arguments)
    return run


def chunks_in_window(interface):
    """A window that hides nothing, and a mask that does."""
    function = and_masks(sliding_window_causal_mask_function(30), chunked_overlay(6, torch.zeros(2, dtype=torch.int)))
    interface.mask(2, 12, 12, mask_function=function, local_size=30)


def static_cache(interface):
    model = make_llama(attn_implementation="attn_c:softmax")
    model.generate(TOKENS, max_new_tokens=3, cache_implementation="static", pad_token_id=0)


REJECTED = {
    "a sliding window without its mask is not supported, found sliding_window=3 for 4 keys": call(sliding_window=3),
    "a sliding window of which only the mask tells is not supported, found it in Module": window_of_the_mask_alone,
    "a cache that drops tokens under a normalizer that depends on the length": dropping_cache,
    r"s_aux is not supported, found a tensor \(2,\)": call(s_aux=torch.zeros(2)),
    "attention that is not causal is not supported, found is_causal=False in Module; use another":
        call(is_causal=False),
    "softcap is not supported, found 50.0; use another attn_implementation for this model": softcap,
    "dropout is not supported, found 0.2; set it to 0, or use another": call(dropout=0.2),
    "output_attentions is not supported, found True": call(output_attentions=True),
    "cu_seq_lens_q is not supported, found a tensor": forward(
        position_ids=torch.arange(6).repeat(2, 2), cu_seq_lens_q=torch.tensor([0, 6, 12], dtype=torch.int32)),
    "a prepared mask is not supported, found a tensor": forward(attention_mask=torch.zeros(2, 1, 12, 12)),
    "packed_sequence_mask_function;": forward(position_ids=torch.arange(6).repeat(2, 2), use_cache=False),
    "a mask other than a causal one with padding is not supported, found chunked_overlay;": chunks_in_window,
    r"padding between tokens is not supported, found it in sequences \[1\]":
        forward(attention_mask=torch.tensor([[1] * 12, [1] * 5 + [0] * 3 + [1] * 4])),
    "a cache whose length is fixed": static_cache,
    # This module's calls do not say so, only its attribute.
    "not causal is not supported, found is_causal=False in CLIPAtt": vision,
    "Did you mean ssmax": lambda interface: interface.register("ssmx"),
}


def test_a_window_of_0_is_none(interface):
    """As in Qwen2-MoE."""
    call(sliding_window=0)(interface)


@pytest.mark.parametrize("message", REJECTED)
def test_rejected_by_name(interface, message):
    with pytest.raises(ValueError, match=message):
        REJECTED[message](interface)


# ---- the modeling file

@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_modeling_file_gives_the_same_numbers(attn_c, monkeypatch, block, name):
    """With attn_c and without: logits, gradients, padding, and parts with a cache."""
    model, _ = pair(name, L=24, block=block, **({} if block == "gau" else dict(heads=4, kv_heads=2)))
    masks = torch.ones_like(IDS), torch.ones_like(IDS).index_fill_(1, torch.arange(4), 0)

    def everything():
        calls.clear()
        model.zero_grad()
        found = [model(IDS, attention_mask=mask).logits[:, 4:] for mask in masks]
        sum(x.square().sum() for x in found).backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
        first = model(IDS[:, :15], use_cache=True)
        return [x.detach().clone() for x in [
            *found, model(IDS[:, 15:], past_key_values=first.past_key_values, use_cache=True).logits]], len(calls)

    calls = []
    fused = modeling.fused_attention
    monkeypatch.setattr(modeling, "fused_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    monkeypatch.setattr(modeling, "attn_c", None)
    plain, count = everything()
    assert count == 0
    monkeypatch.setattr(modeling, "attn_c", attn_c)
    ours, count = everything()
    assert count == 4 * model.config.num_hidden_layers
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).norm() <= 1e-10 * max(b.norm(), 0.1)


@pytest.mark.parametrize("name", [*NORMALIZERS, "ssmax-fixed+s=1e+0+post=negate", "ssmax-bias+s=2+s=-.5"])
def test_the_modeling_file_has_the_scalars_of_normalizer_h(attn_c, name):
    """Their sizes, initial values, and whether they are trained."""
    model, found = pair(name, L=24)[0], {}
    for path, x in model.named_parameters():
        if (scalar := path.split(".")[-1]) in modeling.SCALARS:
            start = modeling.SCALARS[scalar][2](model.config.attention_normalizer)
            found[scalar] = (x.numel(), pytest.approx(start, rel=1e-12), x.requires_grad)
    assert found == attn_c.library.scalars_of(name, 2, 24)


def test_which_attention_the_modeling_file_uses(attn_c, monkeypatch):
    monkeypatch.setattr(modeling, "attn_c", attn_c)
    config, x, ones = pair("relu2-T", L=24)[0].config, torch.zeros(2, 5, 8), torch.ones(2, 5)
    choose = lambda *arguments: modeling.attention_for(config, x, 0, *arguments)
    assert choose(None, False) == choose(ones, False) == (modeling.fused_attention, None)
    compute, start = choose(ones.index_fill(1, torch.tensor(0), 0), False)
    assert compute is modeling.fused_attention and start.tolist() == [1, 1]
    for mask, with_weights in (None, True), (ones.index_fill(1, torch.tensor(4), 0), False), (
            ones.index_fill(1, torch.tensor(2), 0), False):
        assert choose(mask, with_weights)[0] is modeling.attention


@pytest.mark.parametrize("name, with_padding", [("relu2-T", False), ("relu2-T+norm=T2", False),
                                                ("sigmoid+offset=-logT", False), ("relu2-n", True)])
def test_padding_under_the_kernels_of_gpus(monkeypatch, name, with_padding):
    """attn_c rejects it for normalizers that depend on the length of each text."""
    monkeypatch.setattr(modeling, "attn_c", SimpleNamespace(supports=lambda *_: True))
    config, start = pair(name, L=24)[0].config, torch.tensor([0, 1])
    on = lambda device: SimpleNamespace(device=torch.device(device))
    assert modeling.is_fused(config, on("cuda"), None) and modeling.is_fused(config, on("cpu"), start)
    assert modeling.is_fused(config, on("cuda"), start) == with_padding


# ---- the trainer

def batches(folder, steps, rows):
    """The trainer's batches without --shuffle: rows of T tokens one after the other, and their next tokens."""
    tokens = torch.frombuffer(bytearray((folder / "t_train_000001.bin").read_bytes()[1024:]), dtype=torch.uint16).long()
    for first in range(0, steps * rows * T, rows * T):
        part = tokens[first:first + rows * T + 1]
        yield part[:-1].view(rows, T), part[1:].view(rows, T)


@pytest.mark.parametrize("name", ["ssmax", "lssar"])
def test_fifty_steps_equal_the_trainers(attn_c, name, model_of, data, tmp_path):
    """The same weights, batches and AdamW: the loss of each step agrees to 1e-4. (At a learning rate of 1e-3, rounding
    errors grow so fast under lssar that float32 and float64 differ by 1e-3.)"""
    start = model_of("llama", name)
    flags = ["--lr", 3e-4, "--warmup", 0, "--schedule", "constant", "--weight-decay", 0, "--grad-clip", 0]
    train(data, tmp_path / "ours", "--init-from", start, *flags, "--shuffle", 0, steps=50)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, trust_remote_code=True)
    optimizer, found = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0), []
    assert sys.modules[type(model).__module__].attn_c is attn_c
    for inputs, targets in batches(data, 50, 8):
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = losses(tmp_path / "ours")
    assert len(expected) == 50 and abs(expected - found).max() < 1e-4 and expected[-1] < expected[0]


# ---- the wheel

@pytest.mark.drawn(2, of="long tests")
def test_wheel(attn_c, tmp_path):
    """pip builds it without the trainer's libraries, also where a path has a space, and it works where it is
    installed. For speed, all but one source have been compiled by the fixture attn_c."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "build/torch", clone / "build/torch")
    for name in "attention", "math", "runtime":
        shutil.copytree(ROOT / name, clone / name)
    for name in "LICENSE", "Makefile", "pyproject.toml", "setup.py":
        shutil.copy(ROOT / name, clone)
    (clone / "runtime/utf8.c").touch()
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel", "--no-deps",
                    "--no-build-isolation", "-w", tmp_path, clone], check=True,
                   env=dict(os.environ, TORCH_CUDA="0"))
    [wheel] = tmp_path.glob("attn_c-*-py3-none-linux_x86_64.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("attn_c/")}
    python = {f"attn_c/{file.name}" for file in (ROOT / "attention/torch").glob("*.py")}
    assert names == python | {f"attn_c/attn_c_{level}.so" for level in ("v3", "v4", "bf16", "double")}
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = ("import torch, attn_c; x = torch.ones(1, 1, 2, 8); "
            "print(attn_c.__file__, attn_c.attention(x, x, x, 'lssar'))")
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path,
                             env=dict(os.environ, PYTHONPATH=str(tmp_path / "site"))).stdout
    assert printed.startswith(f"{tmp_path}/site/attn_c/__init__.py tensor([[[[1.")


def test_when_the_library_for_gpus_is_built(monkeypatch, tmp_path):
    """Where the Makefile finds a whole CUDA Toolkit; an nvcc alone, as conda installs it, is not one."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    finds_cuda = runpy.run_path(ROOT / "setup.py")["finds_cuda"]
    for name in "bin/nvcc", "include/cuda_runtime.h", "include/cublasLt.h":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(0o755)
    monkeypatch.delenv("CUDA", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    assert finds_cuda()
    monkeypatch.setenv("CUDA", "")
    assert not finds_cuda()


def test_editable_installations_are_refused(tmp_path):
    run = subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target",
                          tmp_path, "-e", ROOT], capture_output=True, text=True)
    assert run.returncode != 0 and "found an editable installation" in run.stdout + run.stderr


def test_fused_projections_switch_but_cannot_be_attached(interface):
    torch.manual_seed(1)
    config = Phi3Config(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                        num_key_value_heads=4, intermediate_size=48, initializer_range=0.5, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        before = model.eval()(ids).logits
        with pytest.raises(ValueError, match="expected attention layers with q_proj, o_proj"):
            interface.attach(model, "ssmax", seq_len=16)
        assert torch.equal(model(ids).logits, before)
        for name, same in (("softmax", True), ("softmax1", False)):
            model.set_attn_implementation(f"attn_c:{name}")
            assert ((model(ids).logits - before).abs().max() < 1e-4) == same


# ---- the examples

EXAMPLES = ROOT / "attention/torch/examples"


def example(name, *words):
    def main():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return calls.call(str(EXAMPLES / name), *words, main=main)


def refused(name, *words, code=None):
    """The one message with which an example ends."""
    run = example(name, *words)
    assert run.returncode in ([code] if code else [1, 2]) and not run.stdout and run.stderr.count("\n") == 1, run.stderr
    return run.stderr


def test_pretraining_example(attn_c, tmp_path, monkeypatch):
    """The loss falls, the scalars are trained and saved, and the model loads again."""
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 300)
    (tmp_path / "short").write_bytes(b"the quick brown")
    assert "at least --seq-len 32 bytes, found 15" in refused("pretrain.py", tmp_path / "short", tmp_path / "out",
                                                              "--seq-len", 32)
    assert refused("pretrain.py", tmp_path / "none", tmp_path / "out") == (
        f"pretrain.py: {tmp_path}/none: expected a text: No such file or directory\n")
    assert refused("pretrain.py", tmp_path / "text", "/proc/x") == (
        "pretrain.py: /proc/x: expected a folder, or a path where one can be made: No such file or directory\n")
    assert "text/x: expected a folder" in refused("pretrain.py", tmp_path / "text", tmp_path / "text/x")
    for flag, value, message in (("--seq-len", 0, "expected an integer from 2 to 2147483647, found '0'"),
                                 ("--steps", "x", "expected an integer from 1 to 2147483647, found 'x'"),
                                 ("--attn", "ssmx", "attn_c: ssmx: unknown normalizer. Did you mean ssmax?")):
        found = refused("pretrain.py", tmp_path / "text", tmp_path / "out", flag, value, code=2)
        assert f"pretrain.py: argument {flag}: {message}" in found
    assert not (tmp_path / "out").exists()
    run = example("pretrain.py", tmp_path / "text", tmp_path / "out", "--steps", 20, "--seq-len", 32)
    assert run.returncode == 0, run.stderr
    found = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", run.stdout)]
    assert len(found) == 2 and found[1] < found[0] - 0.3, run.stdout
    assert "self_attn.normalizer.attn_scale" in run.stdout
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import pretrain
    model = pretrain.load(tmp_path / "out", "ssmax")
    printed = [float(x) for x in re.search(r"layers\.0\.\S+ \[(.*)\]", run.stdout)[1].split(",")]
    assert model.model.layers[0].self_attn.normalizer.attn_scale.tolist() == pytest.approx(printed, abs=1e-6)
    with pytest.raises(ValueError, match="expected a model under softmax-sink"):
        pretrain.load(tmp_path / "out", "softmax-sink")


def test_plotting_example(attn_c, tmp_path, monkeypatch):
    draw = torch.Generator().manual_seed(1)
    qk = {name: torch.randn(2, 20, 8, generator=draw) for name in "qk"}
    torch.save(qk, tmp_path / "qk.pt")
    monkeypatch.setattr(attn_c, "PRESETS", [*attn_c.PRESETS][:2])       # each has a panel
    run = example("plot_weights.py", tmp_path / "qk.pt", tmp_path / "w.png", "--row", 12)
    assert run.returncode == 0 and (tmp_path / "w.png").read_bytes()[:4] == b"\x89PNG", run.stderr
    assert "expected a query from 0 to 19, found 20" in refused("plot_weights.py", tmp_path / "qk.pt",
                                                                tmp_path / "w.png", "--row", 20)
    for out, message in (("w.xyz", "w.xyz: .xyz is not a format of pictures. Expected one of ."),
                         ("none/w.png", "none/w.png: expected a picture that can be written: No such file")):
        assert f"{tmp_path}/{message}" in refused("plot_weights.py", tmp_path / "qk.pt", tmp_path / out)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import plot_weights
    scores = qk["q"][0] @ qk["k"][0].T / 8**0.5
    expected = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
    assert (plot_weights.weights(qk["q"][0], qk["k"][0], "softmax") - expected).abs().max() < 1e-6


@pytest.mark.drawn(2)
@pytest.mark.parametrize("given", [None, b"text", b"", [torch.ones(2, 2)] * 2, {"q": torch.ones(2, 2)},
                                   {"q": [[1.0]], "k": [[1.0]]}, {"q": torch.ones(2), "k": torch.ones(2)},
                                   {"q": torch.ones(0, 2, 2), "k": torch.ones(0, 2, 2)},
                                   {"q": torch.ones(2, 2), "k": torch.tensor([[1, 1], [1, torch.nan]])}],
                         ids=["no file", "text", "empty", "a list", "no k", "lists", "vectors", "no heads", "NaN"])
def test_plotting_what_is_no_q_and_k(given, attn_c, tmp_path):
    path = tmp_path / "qk.pt"
    if isinstance(given, bytes):
        path.write_bytes(given)
    elif given:
        torch.save(given, path)
    assert refused("plot_weights.py", path, tmp_path / "w.png").startswith(f"{path}: expected ")


def test_evaluation_without_lm_eval(attn_c, tmp_path, monkeypatch):
    (tmp_path / "lm_eval.py").write_text("raise ImportError(\"No module named 'lm_eval'\")")
    monkeypatch.syspath_prepend(tmp_path)
    assert refused("evaluate.py", "model", "task") == "evaluate.py: No module named 'lm_eval'; pip install lm_eval\n"


def test_evaluation_example(interface, tmp_path):
    """A task of multiple choice out of a file, with questions to which softmax gives another answer, so that accuracy
    is 1 only for the switched model."""
    python = lm_eval_python()
    from transformers import PreTrainedTokenizerFast
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = "[UNK] the cat dog sat ran on mat".split()
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", eos_token="[UNK]").save_pretrained(tmp_path / "m")
    model = make_llama(eos_token_id=0)
    model.save_pretrained(tmp_path / "m")
    choices = [words.index("sat"), words.index("ran")]

    def answer(question, attn):
        model.set_attn_implementation(attn)
        with torch.no_grad():
            return int(model(torch.tensor([question])).logits[0, -1, choices].argmax())

    rows = []
    for question in itertools.product(range(1, len(words)), repeat=3):
        found = answer(question, "attn_c:lssar")
        if found != answer(question, "attn_c:softmax") and len(rows) < 5:
            rows.append({"q": " ".join(words[i] for i in question), "c": ["sat", "ran"], "a": found})
    assert len(rows) == 5
    (tmp_path / "t").mkdir()
    (tmp_path / "t/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t/cats.yaml").write_text(
        f"task: cats\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path}/t/rows.jsonl}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{c}}'\n"
        "doc_to_target: '{{a}}'\nmetric_list: [{metric: acc}]\n")
    for attn, accuracy in ("lssar", 1), ("softmax", 0):
        run = subprocess.run([python, EXAMPLES / "evaluate.py", tmp_path / "m", "cats", "--attn", attn, "--include",
                              tmp_path / "t"], capture_output=True, text=True,
                             env=dict(os.environ, PYTHONPATH=str(ROOT / "build/python"), OMP_NUM_THREADS="1"))
        assert run.returncode == 0, run.stderr[-2000:]
        assert re.search(rf"\|cats .*\|acc .*\| +{accuracy}\|", run.stdout), run.stdout

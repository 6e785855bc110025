"""Public model families, each as a tiny random model that transformers makes: its logits and ten steps here equal those
of transformers; what we save loads there again as the same class; and a switch of the normalizer leads there and
back."""
import json
import shutil

import numpy as np
import pytest
import torch

import tiny
from tiny import END_OF_TEXT, T, VOCAB, logits, sample
from trainer import checkpoint, metrics
from trainer import train as run_trainer

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

torch.set_num_threads(1)
DATA = tiny.write_data
B, STEPS, LR, CLIP, DECAY = 2, 10, 1e-3, 1.0, 0.1
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, pad_token_id=None,
             bos_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT, tie_word_embeddings=False)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}


def config(of, **change):
    return of(**SIZES | change)


# What distinguishes each family's models of any size.
FAMILIES = {
    "Llama 2": config(LlamaConfig, num_key_value_heads=4),
    "Llama 3": config(LlamaConfig, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "Llama 3.1": config(LlamaConfig, rope_parameters=LLAMA3),
    "Llama 3.2": config(LlamaConfig, rope_parameters=LLAMA3 | {"factor": 32.0}, tie_word_embeddings=True, head_dim=16),
    "TinyLlama": config(LlamaConfig, num_key_value_heads=1),
    "SmolLM2": config(LlamaConfig, num_attention_heads=3, num_key_value_heads=1, hidden_size=48,
                      rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True),
    "Mistral": config(MistralConfig, sliding_window=None, head_dim=16),
    "Mistral with a window": config(MistralConfig, sliding_window=20),
    "Qwen2": config(Qwen2Config, rms_norm_eps=1e-6, use_sliding_window=True, sliding_window=24, max_window_layers=1,
                    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "Qwen2.5": config(Qwen2Config, rms_norm_eps=1e-6, tie_word_embeddings=True, num_key_value_heads=1),
    "Qwen3": config(Qwen3Config, rms_norm_eps=1e-6, head_dim=16),
    "Qwen3, tied": config(Qwen3Config, rms_norm_eps=1e-6, head_dim=24, tie_word_embeddings=True,
                          num_hidden_layers=3, use_sliding_window=True, sliding_window=20,
                          layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
}


def random_model(name, data, folder):
    """Of this family, with weights so large that each of them, gains and biases included, affects the logits."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(FAMILIES[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.tie_weights()
    model.save_pretrained(folder)
    for path in data.glob("tokenizer*"):
        shutil.copy(path, folder)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, data, tmp_path_factory):
    """(folder, model)"""
    folder = tmp_path_factory.mktemp("model") / "foreign"
    return folder, random_model(request.param, data, folder)


def flags(data, *more):
    """The order of the data is that of the shards."""
    return ["--train-data", f"{data}/*_train_*.bin", "--seq-len", T, "--batch", B, "--shuffle", 0, "--lr", LR,
            "--warmup", 3, "--weight-decay", DECAY, *more]


def train(data, folder, out, *more):
    run_trainer(data, "--init-from", folder, "--out", out, *flags(data, *more), model=False)
    return out


def test_logits(family):
    folder, model = family
    ids = torch.randint(VOCAB, (1, 100), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model(ids).logits[0].double().numpy()
    ours = logits(folder, ids[0].tolist())      # also with the key-value cache: see dev/tests/logits.c
    assert abs(theirs).max() > 1 and abs(ours - theirs).max() < 1e-4


def torch_steps(folder, data):
    """Losses, gradient norms and the model after STEPS steps of torch.optim.AdamW in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    stream = np.fromfile(next(data.glob("*_train_*.bin")), "<u2", offset=1024).astype(np.int64)
    found = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 3)
        batch = torch.from_numpy(np.stack([stream[(step * B + i) * T:][:T + 1] for i in range(B)]))
        logits = model(batch[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        found.append((loss.item(), torch.nn.utils.clip_grad_norm_(parameters, CLIP).item()))
        optimizer.step()
    return np.array(found), model


def test_ten_steps_there_and_back(family, data, tmp_path):
    folder, start = family
    out = train(data, folder, tmp_path / "out", "--steps", STEPS, "--grad-clip", CLIP)
    theirs, model = torch_steps(folder, data)
    assert (theirs[:, 1] > CLIP).any()
    assert np.array(metrics(out, ["loss", "grad_norm"])) == pytest.approx(theirs, rel=1e-4)
    saved = checkpoint(out, STEPS)
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64)     # without trust_remote_code
    assert type(again) is type(start) and json.loads((saved / "config.json").read_text())["architectures"] == [
        type(start).__name__]
    before, after = dict(start.named_parameters()), dict(again.named_parameters())
    for name, p in model.named_parameters():
        step = p - before[name].double()
        assert (after[name] - before[name] - step).norm() < 1e-3 * step.norm(), name


@pytest.mark.parametrize("family", ["Llama 3"], indirect=True)
def test_a_tokenizer_that_begins_texts(family, tmp_path):
    """The token of post_processor comes before a prompt, as in Llama 3 and Mistral."""
    folder, model = shutil.copytree(family[0], tmp_path / "begins"), family[1]
    whole = json.loads((folder / "tokenizer.json").read_text())
    begins = "<|endoftext|>"
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": begins, "type_id": 0}},
                                                         {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {begins: {"id": begins, "ids": [END_OF_TEXT], "tokens": [begins]}}}
    texts = []
    for processor in (template, {"type": "Sequence", "processors": [whole["post_processor"] or template, template]}):
        (folder / "tokenizer.json").write_text(json.dumps(whole | {"post_processor": processor}))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        given = tokenizer("the dog went", return_tensors="pt")
        assert given.input_ids[0, 0] == END_OF_TEXT
        ids = model.generate(**given, max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=END_OF_TEXT)
        texts.append(sample(folder, "--prompt", "the dog went", "--temperature", 0, "--max-new-tokens", 30)[0][0])
        theirs = tokenizer.decode(ids[0], skip_special_tokens=True)
        assert texts[-1] == theirs or END_OF_TEXT in ids[0, 1:] and theirs.startswith(texts[-1])
    without = sample(family[0], "--prompt", "the dog went", "--temperature", 0, "--max-new-tokens", 30)[0][0]
    assert texts[0] == texts[1] != without


def attn_of(config):
    """--attn for a model of transformers."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return ",".join("softmax" if not window or types and types[i] == "full_attention" else f"softmax+window={window}"
                    for i in range(config.num_hidden_layers))


def test_a_switch_there_and_back(family, data, tmp_path):
    folder, start = family
    out = train(data, folder, tmp_path / "ssmax", "--attn", "ssmax", "--steps", 2)
    switched = checkpoint(out, 2)
    assert json.loads((switched / "config.json").read_text())["model_type"] == "attn_gpt"
    ids = list(range(20, 60))
    back = train(data, switched, tmp_path / "back", "--attn", attn_of(start.config), "--steps", 2)
    for path, trusted in (switched, True), (checkpoint(back, 2), False):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=trusted).eval()
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0].double().numpy()
        assert abs(logits(path, ids) - theirs).max() < 1e-4
    assert type(model) is type(start)
    for key in ("sliding_window", "layer_types"):
        assert getattr(model.config, key, None) == getattr(start.config, key, None)


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_no_max_position_embeddings(kind, data, tmp_path):
    """L is what transformers assumes."""
    torch.manual_seed(0)
    full = {"sliding_window": None} if kind is MistralConfig else {}
    AutoModelForCausalLM.from_config(config(kind, **full)).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items()
                                if key != "max_position_embeddings"}))
    run_trainer(data, "--init-from", tmp_path / "model", "--steps", 1, "--out", tmp_path / "out", *flags(data),
                "--seq-len", 33, model=False)
    found = json.loads((checkpoint(tmp_path / "out", 1) / "config.json").read_text())
    assert found["max_position_embeddings"] == kind().max_position_embeddings


@pytest.mark.parametrize("attn", ["softmax", "ssmax"])
def test_a_long_training_length(attn, data, tmp_path):
    """L of a model from elsewhere may be longer than the sequences that the trainer accepts."""
    torch.manual_seed(0)
    long = config(LlamaConfig, max_position_embeddings=4194304)
    AutoModelForCausalLM.from_config(long).save_pretrained(tmp_path / "model")
    out = train(data, tmp_path / "model", tmp_path / "out", "--attn", attn, "--steps", 1)
    run_trainer(data, "--resume", "--out", out, "--steps", 2, *flags(data), model=False)
    found = json.loads((checkpoint(out, 2) / "config.json").read_text())
    assert found["max_position_embeddings"] == found["attention_normalizer"]["seq_len"] == 4194304
    sample(checkpoint(out, 2), "--prompt", "the", "--max-new-tokens", 2)

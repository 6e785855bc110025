"""sample_gpt2: prompts, batches, sampling, streamed UTF-8, messages."""
import json
import os
import pty
import shutil
import subprocess
import time
import tty

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

import byte_text
from eval_models import with_weights, write_chain
from tiny import (BIN, END_OF_TEXT, SHAPE, T, VOCAB, environment, ids_of, logits, run, sample, train,
                  write_data)
import trainer
from trainer import checkpoint, saving_and_pruning


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Run folders: "text" has a tokenizer; "ids", whose model uses ssmax, and "untied" have none."""
    folder = tmp_path_factory.mktemp("runs")
    plain = write_data(folder / "plain", tokenizer=False)
    train(write_data(folder / "data"), folder / "text", steps=60)
    train(plain, folder / "ids", "--attn", "ssmax", steps=60)
    train(plain, folder / "untied", "--model", f"{SHAPE},tied=0", steps=60)
    return folder


# ---------------------------------------------------------------- the same text

def test_the_seed_decides(runs):
    flags = ["--prompt", "the cat", "--max-new-tokens", 40]
    texts = [sample(runs / "text", *flags, "--seed", seed, threads=threads)[0]
             for seed, threads in ((1, 1), (1, 2), (2, 1))]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 1 and texts[0][0].startswith("the cat")


def test_other_texts_in_the_batch_change_nothing(runs, tmp_path):
    """Each text of a batch is the same as alone, whatever the other texts and however many there are."""
    prompts = ["the cat", "€", "on", "a dog said über", "The house", "in", "naïve café", "日本", "then.", "and, " * 30,
               "x"]
    (tmp_path / "prompts").write_text("\n".join(prompts))
    flags = ["--max-new-tokens", 30, "--num-samples", 3, "--temperature", 1.2]
    together, _ = sample(runs / "text", *flags, "--prompt-file", tmp_path / "prompts")
    alone = [text for prompt in prompts for text in sample(runs / "text", *flags, "--prompt", prompt)[0]]
    assert together == alone and len(set(together)) == 3 * len(prompts)
    for prompt, text in zip(np.repeat(prompts, 3), together):
        assert text.startswith(prompt)


def test_the_trainer_samples_the_same(tmp_path):
    """At step S, it draws what this program draws as sample S."""
    trainer.make_data(tmp_path)
    trainer.train(tmp_path, "--seq-len", 64, "--steps", 3, "--sample-every", 3, "--out", tmp_path / "out")
    drawn = (tmp_path / "out/samples.txt").read_text()
    assert drawn.startswith("---- step 3\n")
    texts, _ = sample(tmp_path / "out", "--num-samples", 4, "--max-new-tokens", 64)
    ids = texts[3].split(",")[1:]       # without end-of-text, which begins it
    assert len(ids) > 5 and ids == drawn.split("\n")[1].split()


@pytest.mark.parametrize("shape", [f"{SHAPE},kv_heads=2", f"layers=2,block=gau,channels=32,vocab={VOCAB}"])
def test_samples_share_the_reading_of_their_prompt(shape, tmp_path):
    """The cache of a prompt is copied, also from one batch of 8 texts to the next: at temperature 0, all samples are
    the text that a full pass gives for each token."""
    train(write_data(tmp_path / "data", tokenizer=False), tmp_path / "run", "--model", shape, steps=60)
    prompts = [[7, 8], [3], [20, 21, 22]]
    (tmp_path / "prompts").write_text("\n".join(",".join(map(str, ids)) for ids in prompts))
    texts, errors = sample(tmp_path / "run", "--prompt-file", tmp_path / "prompts", "--num-samples", 3,
                           "--temperature", 0, "--max-new-tokens", 12)
    assert texts[::3] == texts[1::3] == texts[2::3] and len(set(texts)) == 3
    for prompt, text in zip(prompts, texts[::3]):
        ids = ids_of(text)
        likeliest = logits(tmp_path / "run/ckpt/step-00000060", ids).argmax(-1).tolist()
        assert ids == prompt + likeliest[len(prompt) - 1:-1]
        assert len(ids) == len(prompt) + 12 or likeliest[-1] == END_OF_TEXT
    assert "read 6 tokens" in errors


def test_lines_of_a_prompt_file(runs, tmp_path):
    (tmp_path / "prompts").write_bytes(b"\n5,7\r\n\r\n\n 9 , 2 \n11")
    output, _ = run(BIN / "sample_gpt2", "--model", runs / "ids", "--prompt-file", tmp_path / "prompts",
                    "--max-new-tokens", 3)
    lines = output.splitlines()
    assert lines[::2] == [f"---- prompt {i}, sample 1" for i in (1, 2, 3)]
    assert [line.split(",")[:2] for line in lines[1::2]][:2] == [["5", "7"], ["9", "2"]] and lines[5].startswith("11")


def test_bf16_rounds_the_weights_of_matmuls(runs, tmp_path):
    """As long as one token at a time is decoded, nothing else is rounded."""
    flags, untied = ["--num-samples", 64, "--temperature", 1.2], checkpoint(runs / "untied", 60)

    def change(weights):
        for name, w in weights.items():
            if w.ndim == 2 and "embed_tokens" not in name:
                weights[name] = torch.from_numpy(w).bfloat16().float().numpy()

    rounded = with_weights(untied, tmp_path / "rounded", change)
    wanted, _ = sample(rounded, *flags)
    assert sample(untied, *flags, "--dtype", "bf16")[0] == wanted != sample(untied, *flags)[0]


def test_matrices_that_are_stored_in_bf16(runs, tmp_path):
    """In float32, decoding reads them as they are stored, and computes the same. If one is float32, none is rounded."""
    flags = ["--num-samples", 64, "--temperature", 1.2, "--prompt", "5,9,2"]
    untied = checkpoint(runs / "untied", 60)
    weights = load_file(untied / "model.safetensors")
    exact, texts = {name: torch.from_numpy(w).bfloat16() if w.ndim == 2 else w for name, w in weights.items()}, {}
    for name, changed in {
            "stored": exact, "widened": {n: w.float() if w.ndim == 2 else w for n, w in exact.items()},
            "mixed": {**exact, "lm_head.weight": weights["lm_head.weight"]},
            "mixed, widened": {n: w if n == "lm_head.weight" or w.ndim < 2 else exact[n].float()
                               for n, w in weights.items()}}.items():
        folder = shutil.copytree(untied, tmp_path / name)
        save_file({n: torch.as_tensor(w) for n, w in changed.items()}, folder / "model.safetensors", {"format": "pt"})
        texts[name] = sample(folder, *flags)[0]
    assert texts["stored"] == texts["widened"] != texts["mixed"] == texts["mixed, widened"]


def test_while_the_run_prunes(runs, tmp_path):
    """A checkpoint may be deleted between being found and being read."""
    out = shutil.copytree(runs / "text", tmp_path / "run")
    start = time.monotonic()
    expected = sample(out, "--max-new-tokens", 3)[0]
    with saving_and_pruning(out, (time.monotonic() - start) / 2):
        for _ in range(25):
            assert sample(out, "--max-new-tokens", 3)[0] == expected


def test_a_run_without_checkpoints(runs, tmp_path):
    """Its only checkpoint has been removed, so there is nothing to load."""
    out = shutil.copytree(runs / "text", tmp_path / "run")
    shutil.rmtree(out / "ckpt/step-00000060")
    assert "found neither" in run(BIN / "sample_gpt2", "--model", out, code=3)[1]


# ---------------------------------------------------------------- sampling

@pytest.mark.parametrize("given, same", [("the cat\n", "the cat"), ("the cat\r\n", "the cat"), ("\r\n", ""),
                                         ("a\n\nb\n\n", "a\n\nb\n"), ("a\r\n\r\n", "a\r\n"),
                                         ("naïve café " * 20, "naïve café " * 20)], ids=repr)
def test_a_prompt_from_stdin(runs, given, same):
    """The prompt is all of stdin, without one newline at its end."""
    words = ["--model", runs / "text", "--max-new-tokens", 5, "--prompt"]
    found, expected = (run(BIN / "sample_gpt2", *words, prompt, said=given)[0] for prompt in ("-", same))
    assert found == expected and found.startswith(same)


def test_prompts_from_a_pipe(runs):
    """They are read to their end, but not forever."""
    words = [BIN / "sample_gpt2", "--model", runs / "text", "--max-new-tokens", "5"]
    how = dict(capture_output=True, env=environment(), timeout=60)
    piped = subprocess.run([*words, "--prompt-file", "/dev/stdin"], input=b"the cat\n", **how)
    assert piped.returncode == 0 and piped.stdout == subprocess.run([*words, "--prompt", "the cat"], **how).stdout
    for flags, standard in ((["--prompt-file", "/dev/zero"], "/dev/null"), (["--prompt", "-"], "/dev/zero")):
        with open(standard, "rb") as file:
            result = subprocess.run([*words, *flags], stdin=file, **how)
        assert result.returncode == 3 and b"expected at most 67108864 bytes" in result.stderr, result.stderr


def test_a_byte_order_mark_is_no_text(runs, tmp_path):
    """Some programs begin a text file with it. Elsewhere, it is a character."""
    flags, mark, texts = ["--model", runs / "text", "--temperature", 0, "--max-new-tokens", 5], "\ufeff", []
    for start in ("", mark):
        (tmp_path / "prompts").write_text(f"{start}the cat\n{mark}on\n")
        (tmp_path / "config").write_text(start + 'prompt = "the cat"\n')
        found = [run(BIN / "sample_gpt2", *flags, *words, said=said)[0] for words, said in (
            (["--prompt-file", tmp_path / "prompts"], ""), (["--config", tmp_path / "config"], ""),
            (["--prompt", "-"], f"{start}the cat{mark}\n"),
            (["--interactive", "--chat", "raw", "--context", 30], f"{start}the cat\n{mark}on\n"))]
        assert found[0].count(mark) == 1
        texts.append(found)
    assert texts[0] == texts[1]


def test_an_empty_prompt_is_end_of_text(runs):
    assert (sample(runs / "ids", "--prompt", "")[0] == sample(runs / "ids")[0]
            == sample(runs / "ids", "--prompt", END_OF_TEXT)[0])
    assert not sample(runs / "text")[0][0].startswith("<|endoftext|>")


def test_end_of_text_ends_a_text(runs):
    texts, _ = sample(runs / "ids", "--prompt", "5", "--num-samples", 30, "--max-new-tokens", 200, "--top-k", 0)
    lengths = {len(ids_of(text)) for text in texts}
    assert len(lengths) > 5 and max(lengths) <= 201 and END_OF_TEXT not in {i for text in texts for i in ids_of(text)}


def test_temperature_0_takes_the_likeliest_token(runs):
    text, _ = sample(runs / "ids", "--prompt", "5,7", "--temperature", 0, "--max-new-tokens", 20)
    ids = ids_of(text[0])
    rows = logits(runs / "ids/ckpt/step-00000060", ids)
    assert ids[2:] == rows.argmax(-1)[1:-1].tolist()
    for flags in (["--top-k", 1], ["--top-p", 1e-9], ["--temperature", 1e-39]):
        assert sample(runs / "ids", "--prompt", "5,7", "--max-new-tokens", 20, *flags)[0] == text


@pytest.mark.parametrize("temperature, top_k, top_p", [(1, 0, 1), (0.7, 12, 1), (1.3, 0, 0.6), (1, 20, 0.8)])
def test_token_frequencies_match_their_probabilities(runs, temperature, top_k, top_p):
    count = 4000
    texts, _ = sample(runs / "ids", "--prompt", "5,7", "--max-new-tokens", 1, "--num-samples", count,
                      "--temperature", temperature, "--top-k", top_k, "--top-p", top_p)
    found = np.zeros(VOCAB)
    for text in texts:
        found[(ids_of(text) + [END_OF_TEXT])[2]] += 1
    z = logits(runs / "ids/ckpt/step-00000060", [5, 7])[-1] / temperature
    p = np.exp(z - z.max())
    order = np.argsort(-p, kind="stable")
    p[order[top_k or VOCAB:]] = 0
    p /= p.sum()
    if top_p < 1:
        p[order[1:][np.cumsum(p[order])[:-1] >= top_p]] = 0
    p /= p.sum()
    assert found.sum() == count and not found[p == 0].any()
    assert (np.abs(found - count * p) < 5 * np.sqrt(count * p * (1 - p)) + 3).all()


# ---------------------------------------------------------------- text

@pytest.mark.parametrize("flags", [["--prompt", "日本"], ["--temperature", "9", "--top-k", "0", "--num-samples", "5"]])
def test_output_is_always_whole_characters(runs, flags):
    """At temperature 9 most bytes form no characters, and are shown as U+FFFD."""
    process = subprocess.Popen([BIN / "sample_gpt2", "--model", runs / "text", "--max-new-tokens", "300", *flags],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment())
    parts = []
    while part := os.read(process.stdout.fileno(), 1 << 16):
        parts.append(part.decode())                 # strict
    assert process.wait() == 0
    text = "".join(parts)
    assert any(ord(c) > 127 for c in text) and ("\N{REPLACEMENT CHARACTER}" in text or "--temperature" not in flags)


def test_invalid_utf8_is_replaced_as_in_python(runs):
    broken = (b"a\xff\xc3 \xe2\x82 \xe2\x82\xac \xed\xa0\x80 \xf0\x9f\x98 \xf5 \xc0\x80 \xf4\x90\x80\x80 "
              b"\xf0\x9f\x98\x80 \xe2")
    result = subprocess.run([BIN / "sample_gpt2", "--model", runs / "text", "--max-new-tokens", "1",
                             "--temperature", "0", b"--prompt", broken],
                            capture_output=True, check=True)
    assert result.stdout.decode().startswith(broken[:-1].decode(errors="replace"))


def test_a_full_disk_is_reported(runs):
    with open("/dev/full", "w") as full:
        result = subprocess.run([BIN / "sample_gpt2", "--model", runs / "text"], stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 4 and b"stdout" in result.stderr


# ---------------------------------------------------------------- a given text

# every byte once: the clipboard's sequence, C1 and bidirectional characters over several tokens, and other controls
HOSTILE = b"x\x1b]52;c\x07\xc2\x9b\xe2\x80\xae\r\x7f\ty"


@pytest.fixture(scope="session")
def chain(tmp_path_factory):
    """A model that writes HOSTILE, a token for each byte."""
    root = tmp_path_factory.mktemp("chain")
    shape = f"layers=1,heads=1,channels=32,ffn=32,tied=0,vocab={byte_text.VOCAB}"
    trainer.train(byte_text.write_text(root / "data"), "--model", shape, "--steps", 0, "--batch", 1, "--seq-len", 64,
                  "--out", root / "run", model=False)
    path = trainer.checkpoint(root / "run", 0) / "model.safetensors"
    write_chain(path.parent, HOSTILE, byte_text.END_OF_TEXT)
    trainer.sign(path.parent, path.name)
    return root / "run"


CHAIN = ["--temperature", 0, "--max-new-tokens", 40]
RAW = ["--interactive", "--chat", "raw", "--context"]


def on_a_terminal(words, said, end="\n"):
    """What the program prints on one."""
    handle, side = pty.openpty()
    tty.setraw(side)
    subprocess.run(words, input=said, stdout=side, stderr=subprocess.DEVNULL, env=environment(), check=True)
    shown = b""
    while not shown.endswith(end.encode()):
        shown += os.read(handle, 4096)
    return shown.decode()


@pytest.mark.parametrize("words, said", [(["--prompt", "x"], b""), (["--interactive", "--chat", "raw"], b"x\n")])
def test_sampled_text_does_not_act_on_a_terminal(chain, words, said):
    """A pipe has the bytes as they are."""
    words = [BIN / "sample_gpt2", "--model", chain, *CHAIN, *words]
    words = list(map(str, words + ["--context", 60] * bool(said)))
    piped = subprocess.run(words, input=said, capture_output=True, env=environment(), check=True).stdout
    assert piped == HOSTILE[bool(said):] + b"\n"
    shown = on_a_terminal(words, said)
    assert shown.removeprefix("x") == r"\x1b]52;c\x07\u009b\u202e\x0d\x7f" + "\ty\n"


def test_printed_flags_do_not_act_on_a_terminal():
    """They may come from a run.json, which anybody may have made. A pipe has the bytes as they are."""
    words = [BIN / "sample_gpt2", "--print-config", "--prompt", HOSTILE.decode()]
    text = 'prompt = "x\\u001b]52;c\\u0007\x9b\u202e\\u000d\\u007f\\u0009y"\n'
    assert text in run(*words)[0]
    assert text.replace("\x9b\u202e", r"\u009b\u202e") in on_a_terminal(words, b"", "# threads = 0\n")


@pytest.mark.parametrize("stops, end", [
    (["52;c"], b"]"), (["c", "52"], b"]"), (["\u202e", "7"], b"\xc2\x9b"), (["ty", "\ty"], b"\x7f"),
    (["zz", "yz"], b"y"), (["x"], b"y"), ([",", "5,2"], b"y"), (["\x1b"], b"x")], ids=repr)
def test_stop(chain, stops, end, tmp_path):
    """A text ends before the first of the texts, which many tokens may form; the prompt does not count."""
    whole = HOSTILE[:HOSTILE.index(end) + len(end)] + b"\n"
    flags = [word for stop in stops for word in ("--stop", stop)]
    for more in ([], ["--num-samples", 2]):
        output, _ = run(BIN / "sample_gpt2", "--model", chain, "--prompt", "x", *CHAIN, *flags, *more)
        assert output.split("\n")[-2].encode() + b"\n" == whole.split(b"\n")[0] + b"\n"
    config, _ = run(BIN / "sample_gpt2", "--model", chain, "--prompt", "x", *CHAIN, *flags, "--print-config")
    (tmp_path / "flags.toml").write_text(config)
    assert run(BIN / "sample_gpt2", "--config", tmp_path / "flags.toml")[0].encode() == whole
    (tmp_path / "own").write_text('stop = ["\\n", "]"]\n')
    told, _ = run(BIN / "sample_gpt2", "--config", tmp_path / "flags.toml", "--config", tmp_path / "own")
    assert told == "x\x1b\n"
    told, _ = run(BIN / "sample_gpt2", "--config", tmp_path / "flags.toml", "--stop", "]")      # the command line wins
    assert told == "x\x1b\n"
    answers, _ = run(BIN / "sample_gpt2", "--model", chain, *CHAIN, *flags, *RAW, 60, said="x\n")
    assert answers.encode() == whole[1:]


def test_after_a_stop_a_conversation_has_what_was_printed(chain):
    """The second line continues what was printed, not the tokens of the stop."""
    answers, _ = run(BIN / "sample_gpt2", "--model", chain, *CHAIN, "--stop", 52, *RAW, 100, said="x\n5\n")
    assert answers.encode() == b"\x1b]\n" + HOSTILE[HOSTILE.index(b"2;"):] + b"\n"


# ---------------------------------------------------------------- stderr

@pytest.mark.parametrize("flags", [[], ["--num-samples", 3], ["--temperature", 0], ["--top-k", 0],
                                   ["--top-p", 0.5]], ids=str)
@pytest.mark.parametrize("interactive", [False, True])
def test_logits_that_are_not_finite(runs, flags, interactive):
    """No token is made up."""
    flags = [] if interactive and "--num-samples" in flags else flags
    words = [*RAW, 30] if interactive else ["--prompt", "the cat"]
    output, errors = run(BIN / "sample_gpt2", "--model", runs / "text", "--attn", "exp+scale=const:1e4",
                         "--max-new-tokens", 9, *words, *flags, said="the cat\n", code=5)
    assert "exp+scale=const:1e4" in errors and "not finite" in errors
    assert output.splitlines()[-1] == ("" if interactive else "the cat")


def test_activations_whose_squares_overflow(chain, tmp_path):
    """RMSNorm makes zeros of them, so that all logits are equal."""
    def change(weights):
        weights["model.embed_tokens.weight"] *= np.float32(1e25)

    folder = with_weights(checkpoint(chain, 0), tmp_path / "model", change)
    output, errors = run(BIN / "sample_gpt2", "--model", folder, "--prompt", "x", *CHAIN, code=5)
    assert output == "x\n" and "all equal" in errors


def test_messages_do_not_act_on_a_terminal(runs, tmp_path):
    """They quote names from files, which anybody may have made."""
    names = "\x1b]52;c;eA==\x07 \u009b2J \u202e\u2066\u061c \x7f\r ok\t"
    config = json.loads((checkpoint(runs / "ids", 60) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {names: 1}))
    _, errors = run(BIN / "sample_gpt2", "--model", tmp_path, code=3)
    assert r"\x1b]52;c;eA==\x07 \u009b2J \u202e\u2066\u061c \x7f\x0d ok" + "\t" in errors
    result = subprocess.run([BIN / "sample_gpt2", b"--model=\x9b\xff"], capture_output=True)
    assert rb"\x9b\xff" in result.stderr and b"\x9b" not in result.stderr


def test_another_normalizer(runs):
    flags = ["--prompt", "5,7", "--max-new-tokens", 30, "--num-samples", 5]
    own, _ = sample(runs / "ids", *flags)
    same, errors = sample(runs / "ids", *flags, "--attn", "ssmax")
    assert same == own
    restarted, errors = sample(runs / "ids", *flags, "--attn", "ssmax+s=0.5")
    assert restarted == own and "--attn ssmax+s=0.5: the model keeps the s that it has" in errors
    restarted, errors = sample(runs / "ids", *flags, "--attn", "ssmax+s=0.5+fixed")
    assert restarted != own and "s = 0.5000 in every head" in errors and "keeps the s" not in errors
    other, errors = sample(runs / "ids", *flags, "--attn", "softmax1")
    assert other != own and "softmax1" in errors and "trained with ssmax" in errors and "attn_scale" not in errors
    _, errors = sample(runs / "text", "--attn", "ssmax", "--max-new-tokens", 3)
    assert f"s = {T / sum(np.log(np.arange(1, T + 1))):.4f}" in errors


def test_beyond_the_training_length_it_warns_once(runs):
    _, errors = sample(runs / "ids", "--prompt", ",".join("5" * (T - 3)), "--max-new-tokens", 3)
    assert errors.count("\n") == 1 and "tokens/s" in errors
    _, errors = sample(runs / "ids", "--prompt", ",".join("5" * (T + 1)), "--max-new-tokens", 3, "--num-samples", 3)
    assert errors.count("warning") == 1 and f"the length of {T} with" in errors


def test_a_tokenizer_with_more_tokens_than_the_model(runs, tmp_path):
    """Only texts with a token that the model lacks are rejected; the message has its name."""
    shutil.copytree(checkpoint(runs / "text", 60), tmp_path / "model")
    path = tmp_path / "model/tokenizer.json"
    whole = json.loads(path.read_text())
    whole["added_tokens"].append(whole["added_tokens"][0] | {"id": VOCAB, "content": "<pad>", "special": False})
    path.write_text(json.dumps(whole))
    assert sample(tmp_path / "model", "--prompt", "the cat")[0] == sample(runs / "text", "--prompt", "the cat")[0]
    _, errors = run(BIN / "sample_gpt2", "--model", tmp_path / "model", "--prompt", "the <pad>", code=2)
    assert '--prompt: the token "<pad>"' in errors and f"only {VOCAB} ids" in errors
    (tmp_path / "prompts").write_text("the cat\nthe <pad>\n")
    _, errors = run(BIN / "sample_gpt2", "--model", tmp_path / "model", "--prompt-file", tmp_path / "prompts", code=3)
    assert 'line 2: the token "<pad>"' in errors
    answers, errors = run(BIN / "sample_gpt2", "--model", tmp_path / "model", *RAW, 30, "--max-new-tokens", 5,
                          said="the <pad>\nthe cat\n")
    assert '"<pad>"' in errors and answers.count("\n") >= 1

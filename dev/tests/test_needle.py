"""eval_gpt2 --task needle: answers against transformers', needle scores against the reference, the cache that prompts
share, what the prompts are, verdicts, messages."""
import json
import re

import numpy as np
import pytest
import torch

from byte_text import END_OF_TEXT, IM_END, text_of, write_text
from eval_models import evaluate, overflowing, reference, with_weights, write_chain
from tiny import BIN, run
from trainer import ROOT

from transformers import AutoModelForCausalLM

DATA = write_text
L = 600


def needles(folder, data, out, *flags):
    """Stdout, the results, and the lines of prompts.jsonl in the order of the trials."""
    return needles_and_tokens(folder, data, out, *flags)[:3]


def needles_and_tokens(folder, data, out, *flags):
    """The same, and the number of tokens that eval_gpt2 says it has computed."""
    output, errors = run(BIN / "eval_gpt2", "--task", "needle", "--model", folder, "--data", f"{data}/*_val_*.bin",
                         "--picture", 0, "--out", out, "--save-prompts", *flags)
    results = json.loads((out / "eval.json").read_text())["results"]
    prompts = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    trials = [trial for row in results for trial in row["trials"]]
    assert len(prompts) == len(trials)
    for prompt, trial in zip(prompts, trials):
        assert (prompt["depth"], prompt["sample"]) == (trial["depth"], trial["sample"])
    return output, results, prompts, int(re.search(r"eval_gpt2: ([\d,]+) tokens in", errors)[1].replace(",", ""))


def tokens_to_compute(prompts):
    """(how many tokens of the prompts and answers the model computes if prompts of a length share whole blocks of 1,024
    tokens with the one before, how many without sharing). The last token of an answer is not fed."""
    computed = whole = 0
    for before, prompt in zip([None, *prompts], prompts):
        tokens, shared = prompt["tokens"], 0
        if before and before["seq_len"] == prompt["seq_len"]:
            pairs = zip(tokens[:-1], before["tokens"][:-1])
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), 0) // 1024 * 1024
        whole += len(tokens) + len(prompt["answer"]) - 1
        computed += len(tokens) - shared + len(prompt["answer"]) - 1
    return computed, whole


# ---------------------------------------------------------------- transformers and the reference

@pytest.mark.parametrize("shape, attn", [("grouped", "softmax"), ("grouped", "ssmax-bias"), ("QK norms", "lssa"),
                                         ("gau", "softmax1")])
def test_answers_equal_transformers_greedy_decoding(shape, attn, model_of, data, tmp_path):
    """Without end-of-text."""
    folder = model_of(shape, attn)[0]
    _, [row], prompts = needles(folder, data, tmp_path, "--seq-lens", "150", "--depths", "20,80", "--samples", 3,
                                "--max-new-tokens", 8)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    for prompt, trial in zip(prompts, row["trials"]):
        ids, count = torch.tensor([prompt["tokens"]]), len(prompt["answer"])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                                min_new_tokens=count, eos_token_id=None, pad_token_id=END_OF_TEXT,
                                suppress_tokens=[END_OF_TEXT])
        assert prompt["answer"] == theirs[0, ids.shape[1]:].tolist()
        assert END_OF_TEXT not in prompt["answer"] and (prompt["model"], prompt["attn"]) == (row["model"], attn)
        shown = "".join(chr(i) if i == 10 or 32 <= i < 127 else "?" for i in prompt["answer"] if i < 256)
        if max(prompt["answer"]) < 256:
            assert trial["answer"] == shown
    assert len({token for prompt in prompts for token in prompt["answer"]}) > 5


def write_biased(model, out, factors, **keys):
    """A copy of the model whose output projection's rows are multiplied by the factors of their tokens. The keys go to
    its config.json."""
    def untie(tensors):
        head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        for token, factor in factors.items():
            head[token] *= factor

    with_weights(model[0], out, untie)
    config = json.loads((out / "config.json").read_text()) | {"tie_word_embeddings": False} | keys
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_end_of_text_is_never_the_answer(model_of, data, tmp_path):
    """Even where it is the likeliest token by far."""
    model, answers = model_of("llama", "softmax", 601), []
    for name, factors in (("plain", {}), ("biased", {END_OF_TEXT: 30})):
        folder = write_biased(model, tmp_path / name, factors)
        _, _, prompts = needles(folder, data, tmp_path / "out", "--seq-lens", 100, "--samples", 4)
        answers.append([prompt["answer"] for prompt in prompts])
    assert answers[0] == answers[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "biased", dtype=torch.float32)
    assert (model(torch.tensor([[END_OF_TEXT, 97, 98, 99]])).logits[0].argmax(-1) == END_OF_TEXT).any()


def test_the_end_of_a_turn_ends_an_answer_in_chatml_alone(model_of, data, tmp_path):
    """With --chat raw it is never chosen if it ends the model's texts, which eos_token_id says."""
    folder = write_biased(model_of("llama", "softmax", 602), tmp_path / "chat", {IM_END: 30}, eos_token_id=IM_END)
    answers = {chat: [prompt["answer"]
                      for prompt in needles(folder, data, tmp_path / "out", "--chat", chat,
                                            "--seq-lens", 100, "--samples", 4, "--max-new-tokens", 20)[2]]
               for chat in ("raw", "chatml")}
    assert not any(IM_END in answer for answer in answers["raw"])
    assert (any(answer[-1] == IM_END for answer in answers["chatml"])
            and not any(IM_END in answer[:-1] for answer in answers["chatml"]))


def test_the_default_length_of_an_answer(model_of, data, tmp_path):
    """The digits plus 4, and 48 in ChatML. The model writes neither digits nor the end of a turn."""
    never = {token: 0 for token in (*b"0123456789", IM_END)}
    folder = write_biased(model_of("llama", "softmax"), tmp_path / "model", never)
    for flags, length in (([], 11), (["--digits", 3], 7), (["--number", "12345"], 9), (["--chat", "squad"], 11),
                          (["--chat", "chatml"], 48), (["--max-new-tokens", 5], 5), (["--max-new-tokens", 600], 600)):
        _, [row], prompts = needles(folder, data, tmp_path / "out", "--seq-lens", 100, "--samples", 2, "--depths", 50,
                                *flags)
        assert [len(prompt["answer"]) for prompt in prompts] == 2 * [length], flags
        assert min(len(trial["answer"]) for trial in row["trials"]) >= length, flags


def scores_of_reference(tensors, config, prompt):
    """(layers, heads): the attention of the prompt's last token, summed over the number's tokens; and the largest
    weight."""
    trace, (first, end) = reference.Trace(), prompt["number"]
    reference.forward(tensors, torch.tensor([prompt["tokens"]]), config, trace)
    rows = torch.stack([A[0, :, -1] for A in trace.weights])
    return rows[..., first:end].sum(-1).numpy(), rows.abs().max().item()


# The normalizers that compute, in one pass, what the cache does, where T is each row's own length so far.
IN_ONE_PASS = {"relu2-T": "relu2-n", "relu2-T+norm=T2": "relu2-n+norm=n2", "sigmoid+offset=-logT": "sigmoid-logn"}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("shape, attn",
                         [*((shape, attn) for shape in ("grouped", "gau")
                            for attn in (*reference.PRESETS, "softmax+post=reweight:3")),
                          *(("QK norms", attn) for attn in ("softmax", "ssmax-bias", "softmax-sink", "lssar")),
                          ("llama", "sigmoid+offset=-logT"), ("llama", "relu2-T+norm=T2")])
def test_needle_scores_equal_the_references(shape, attn, model_of, data, tmp_path):
    """Prompts of more than 1,024 tokens are read in two parts."""
    folder, tensors, config = model_of(shape, attn)
    output, [row], prompts = needles(folder, data, tmp_path, "--seq-lens", 1100 if shape == "QK norms" else 330,
                                     "--depths", "15,60", "--samples", 2)
    config = reference.replace(config, attn=IN_ONE_PASS.get(attn, attn))
    mean = 0
    for prompt, trial in zip(prompts, row["trials"], strict=True):
        expected, largest = scores_of_reference(tensors, config, prompt)
        found = np.array(trial["needle_scores"])
        assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-5 * max(1, largest)
        best = trial["best_layer"], trial["best_head"]
        assert found[best] == found.max() == trial["best_score"]
        mean = mean + found / 4
    found = np.array(row["needle_scores"])
    assert np.abs(found - mean).max() < 1e-12 * max(1, np.abs(mean).max())
    layer, head = np.unravel_index(found.argmax(), found.shape)
    assert output.splitlines()[-1].endswith(f" {found.max():.4f}, layer {layer}, head {head}")


# ---------------------------------------------------------------- the cache

@pytest.mark.parametrize("shape, attn", [("grouped", "ssmax"), ("gau", "relu2-T")])
def test_sharing_the_cache_changes_no_bit(shape, attn, model_of, data, tmp_path):
    """Prompts of one haystack continue the cache of the one before; each alone gives the same numbers."""
    folder, *_ = model_of(shape, attn, 1200)
    how = ["--seq-lens", 2500, "--samples", 2, "--threads", 2, "--max-new-tokens", 4]
    _, [row], prompts, tokens = needles_and_tokens(folder, data, tmp_path, *how, "--depths", "60,95,5,90")
    computed, whole = tokens_to_compute(prompts)
    assert tokens == computed == whole - 2 * 1024                       # 95 % after 60 %, twice
    _, [again], prompts, tokens = needles_and_tokens(folder, data, tmp_path, *how, "--depths", "60,90,95")
    computed, whole = tokens_to_compute(prompts)
    assert tokens == computed == whole - 2 * (1024 + 2048)
    for depth in (90, 95):
        _, [row_alone], prompts, tokens = needles_and_tokens(folder, data, tmp_path, *how, "--depths", depth)
        assert tokens == tokens_to_compute(prompts)[1]                  # two haystacks share nothing
        for trial in row_alone["trials"]:
            assert all(trial in found["trials"] for found in (row, again))


def test_theta_depends_on_the_length_alone(model_of, data, tmp_path, monkeypatch):
    """Under ntk, a needle's score does not change with more samples, whose cities make longer prompts, or with longer
    answers."""
    folder, tensors, config = model_of("llama", "softmax", 100)
    flags = ["--rope-scaling", "ntk", "--seq-lens", 150, "--depths", 50]
    output, [one], prompts = needles(folder, data, tmp_path, *flags, "--samples", 1)
    _, [many], longer = needles(folder, data, tmp_path, *flags, "--samples", 40, "--max-new-tokens", 30)
    assert max(len(prompt["tokens"]) for prompt in longer) > len(prompts[0]["tokens"])
    for key in ("city", "number", "needle_scores", "best_score"):
        assert one["trials"][0][key] == many["trials"][0][key], key
    theta = 10000 * 1.5 ** (8 / 6)
    assert one["rope_theta"] == many["rope_theta"] == pytest.approx(theta)
    assert output.splitlines()[-1].split()[:3] == ["150", f"{theta / 1000:.1f}", "k"]
    monkeypatch.setattr(reference, "THETA", theta)
    expected, _ = scores_of_reference(tensors, config, prompts[0])
    assert np.abs(np.array(one["trials"][0]["needle_scores"]) - expected).max() < 1e-5


def test_lengths_share_no_cache(model_of, data, tmp_path):
    """Each has its own angles under ntk, although the prompts of a sample begin with the same block."""
    folder, *_ = model_of("llama", "softmax", 100)
    flags = ["--rope-scaling", "ntk", "--depths", 99, "--samples", 1, "--max-new-tokens", 1]
    trials = lambda lengths: [row["trials"]
                              for row in needles(folder, data, tmp_path, *flags, "--seq-lens", lengths)[1]]
    assert trials("1300,1200") == [*trials("1300"), *trials("1200")]


# ---------------------------------------------------------------- prompts

RAW = "\nWhat is the special magic {0} number? The special magic {0} number is:"
FRAMES = {"raw": ("<|endoftext|>", RAW),
          "squad": ("<|endoftext|>", "\n\nQuestion: What is the special magic {0} number?\n\nAnswer:"),
          "chatml": ("<|im_start|>user\n",
                     "\n\nWhat is the special magic {0} number?<|im_end|>\n<|im_start|>assistant\n")}
SYSTEM = "<|im_start|>system\nBe 100 % brief.<|im_end|>\n"
FRAMES["chatml --system"] = (SYSTEM + FRAMES["chatml"][0], FRAMES["chatml"][1])


def parts_of(prompt, trial, chat):
    """(haystack before the needle, haystack after it) as tokens, after checking everything around them."""
    opening, question = (part.format(trial["city"]) for part in FRAMES[chat])
    needle = f"\nThe special magic {trial['city']} number is: {trial['number']}.\n"
    text = text_of(prompt["tokens"])
    assert text.startswith(opening) and text.endswith(question)
    context = text[len(opening):len(text) - len(question)]
    assert context.count(needle) == 1 and len(context.encode()) == prompt["seq_len"]
    first, end = prompt["number"]
    assert (text_of(prompt["tokens"][first:end]) == f" {trial['number']}."
            and text_of(prompt["tokens"][:first]).endswith(" number is:"))
    return context.split(needle)


@pytest.mark.parametrize("chat", FRAMES)
def test_prompts(chat, model_of, data, tmp_path):
    """The context has the length asked for and the needle is at its depth, in one piece of the data without its
    end-of-text tokens. City and number depend on the seed and the sample alone."""
    folder, *_ = model_of("llama", "softmax")
    flags = ["--chat", *chat.split(), *["Be 100 % brief."] * chat.endswith("--system"), "--seq-lens", "200,333",
             "--depths", "0,33,100", "--samples", 4]
    _, rows, prompts = needles(folder, data, tmp_path, *flags, "--attn", "ssmax")
    trials = [trial for row in rows for trial in row["trials"]]
    stream = np.fromfile(data / "d_val_000000.bin", "<u2", offset=1024)[:30000 // 64 * 64]
    stream = 2 * "".join(chr(i) for i in stream if i != END_OF_TEXT)       # goes on at its start
    named = {}
    for prompt, trial in zip(prompts, trials):
        before, after = parts_of(prompt, trial, chat)
        assert len(before) == int((len(before) + len(after)) * trial["depth"] / 100) and before + after in stream
        assert named.setdefault(trial["sample"], (trial["city"], trial["number"])) == (trial["city"], trial["number"])
        assert len(trial["number"]) == 7 and trial["number"].isdigit() and trial["number"][0] != "0"
        assert trial["city"] in (ROOT / "data/cities.txt").read_text().splitlines()
    assert len(set(named.values())) == 4 and [row["attn"] for row in rows] == 2 * ["softmax"] + 2 * ["ssmax"]
    assert rows[0]["needle_scores"] != rows[2]["needle_scores"]
    assert len(prompts) == 48 and [p["tokens"] for p in prompts[:24]] == [p["tokens"] for p in prompts[24:]]
    haystacks = {prompt["sample"]: parts_of(prompt, trial, chat)
                 for prompt, trial in zip(prompts[:12], trials) if trial["depth"] == 0}
    assert len({after for _, after in haystacks.values()}) == 4


def test_the_seed_chooses_the_needles(model_of, data, tmp_path):
    folder, *_ = model_of("llama", "softmax")
    flags = ["--seq-lens", 150, "--depths", 50, "--samples", 5]
    tokens = lambda *more: [prompt["tokens"] for prompt in needles(folder, data, tmp_path, *flags, *more)[2]]
    first = tokens()
    assert first == tokens() == tokens("--seed", 1337) and not any(prompt in first for prompt in tokens("--seed", 3))
    assert tokens("--samples", 2) == first[:2]                      # more samples leave the first ones


def test_city_number_and_digits(model_of, data, tmp_path):
    folder, *_ = model_of("llama", "softmax")
    flags = ["--seq-lens", 200, "--depths", "50,70", "--samples", 3]
    for more, city, digits in ((["--city", "São Tomé"], "São Tomé", 7),
                               (["--number", "007"], None, 3), (["--digits", 12], None, 12),
                               (["--city", "X" * 63, "--number", "9" * 18], "X" * 63, 18)):
        _, [row], prompts = needles(folder, data, tmp_path, *flags, *more)
        for prompt, trial in zip(prompts, row["trials"]):
            parts_of(prompt, trial, "raw")
            assert (city in (None, trial["city"]) and len(trial["number"]) == digits
                    and ("007" in more) <= (trial["number"] == "007"))


def test_random_depths(model_of, data, tmp_path):
    """Each sample's depth is drawn once, for every length."""
    folder, *_ = model_of("llama", "softmax")
    output, rows, prompts = needles(folder, data, tmp_path, "--seq-lens", "200,300", "--random-depth", "--samples", 12)
    depths = [[trial["depth"] for trial in row["trials"]] for row in rows]
    assert depths[0] == depths[1] and len(set(depths[0])) == 12 and min(depths[0]) < 30 and max(depths[0]) > 70
    for prompt, trial in zip(prompts, (trial for row in rows for trial in row["trials"])):
        before, after = parts_of(prompt, trial, "raw")
        assert len(before) == int((len(before) + len(after)) * trial["depth"] / 100)
    assert "random" in output and "depth" not in rows[0]["depths"][0]


@pytest.mark.parametrize("samples", [100, 101])
def test_scores_of_single_trials_are_kept_up_to_100(samples, model_of, data, tmp_path):
    _, [row], _ = needles(model_of("llama", "softmax")[0], data, tmp_path, "--seq-lens", 150, "--depths", 50,
                          "--samples", samples, "--max-new-tokens", 1)
    assert len(row["trials"]) == samples
    assert all(("needle_scores" in trial) == (samples == 100) for trial in row["trials"]) and "needle_scores" in row


@pytest.mark.parametrize("answer, verdict", [("8106425", "right"), ("8106427", "first digit right"),
                                             ("7106425", "wrong"), ("81064253", "first digit right"),
                                             ("810642", "first digit right")])
def test_verdicts(answer, verdict, model_of, data, tmp_path):
    """A number counts only as a whole; neither a part of it nor a longer number is right."""
    folder = write_biased(model_of("llama", "softmax"), tmp_path / "model", {})
    write_chain(folder, f": {answer}.\n".encode(), ord("\n"))
    output, [row], _ = needles(folder, data, tmp_path, "--seq-lens", 200, "--depths", "10,50,90", "--samples", 2,
                               "--number", "8106425")
    for trial in row["trials"]:
        assert trial["answer"].startswith(f" {answer}.") and trial["verdict"] == verdict
    assert row["right"] == (verdict == "right") and output.count("100.0%") == 4 * row["right"]
    assert [depth["right"] for depth in row["depths"]] == 3 * [row["right"]]
    assert [depth["first_digit"] for depth in row["depths"]] == 3 * [verdict == "first digit right"]


def test_logits_that_are_not_finite(model_of, data, tmp_path):
    """They are no answer, and the shares are unknown."""
    folder = overflowing(model_of("llama", "softmax")[0], tmp_path / "model")
    words = ["--task", "needle", "--model", folder, "--data", f"{data}/*_val_*.bin", "--seq-lens", 100, "--samples", 1]
    output, errors = run(BIN / "eval_gpt2", *words, "--picture", 0, "--out", tmp_path / "out")
    [row] = json.loads((tmp_path / "out/eval.json").read_text())["results"]
    assert "model under softmax: its activations are not finite in 5 of 5 needles (--task needle, length 100)" in errors
    assert [(trial["answer"], trial["verdict"]) for trial in row["trials"]] == 5 * [(None, "not finite")]
    assert row["right"] is None and all(depth["right"] is depth["first_digit"] is None for depth in row["depths"])
    assert output.splitlines()[-1].split()[:9] == ["100", "10.0", "k", *6 * ["nan%"]]
    assert "layer" not in output.splitlines()[-1]


# ---------------------------------------------------------------- p_n

def test_pn_suffices_up_to_its_length(model_of, data, tmp_path):
    """A prompt and its answer, whose last token is not fed, may have L positions, and one more is too many."""
    folder, *_ = model_of("llama", "ssmax-pn")
    flags = "--samples", 1, "--depths", "50", "--city", "Paris", "--max-new-tokens", 5
    asked = int(re.search(r"asks for (\d+)", evaluate("needle", folder, data, tmp_path, "--seq-lens", L, *flags,
                                                       code=2))[1])
    longest = 2 * L - asked
    _, _, [prompt] = needles(folder, data, tmp_path, "--seq-lens", longest, *flags)
    assert len(prompt["tokens"]) + 5 - 1 == L
    assert f"asks for {L + 1}." in evaluate("needle", folder, data, tmp_path, "--seq-lens", longest + 1, *flags, code=2)

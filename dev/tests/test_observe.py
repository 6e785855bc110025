"""eval_gpt2 --task attention: every statistic, the maps and the residual stream against the reference in float64;
prompts from a file and from shards; Spearman's correlation; messages."""
import json
import math
import shutil

import numpy as np
import pytest
import torch

from byte_text import END_OF_TEXT, write_text
from eval_models import evaluate, overflowing, reference, with_weights
from tiny import BIN, run
from trainer import write_shard

DATA = write_text
L = 64
PROMPTS = ["the cat sat on the mat, and the dog on the log", "naïve café: 5 € 😀", "aaaaaaaaaaaaaaaaaaaaaaaab",
           "It is a truth universally acknowledged"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return path


def log2(n):
    return int(n).bit_length() - 1


def head_statistics(A, log_Z):
    """Of one head: A (T, T), log_Z (T)."""
    T, A, log_Z = len(A), A.numpy(), log_Z.numpy()
    absolute = np.abs(A)
    totals = absolute.sum(1)
    p = np.divide(absolute, totals[:, None], out=np.zeros_like(A), where=totals[:, None] > 0)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1)
    bins = [log2(n) for n in range(1, T + 1)]
    by_distance = np.zeros(log2(T) + 1)
    for i in range(T):
        for j in range(i + 1):
            by_distance[log2(max(i - j, 1))] += p[i, j] / T
    log_z = [log_Z[(np.array(bins) == b) & np.isfinite(log_Z)] for b in range(log2(T) + 1)]
    x, y = (values[1:][np.isfinite(log_Z[1:])] for values in (np.log(np.arange(1, T + 1)), log_Z))
    slope, intercept = np.polyfit(x, y, 1) if len(x) > 1 else (math.nan, math.nan)
    visible = np.tril(np.ones((T, T), bool))
    return {"sum": A.sum(1).mean(), "unspent": 1 - A.sum(1).mean(), "entropy": entropy.mean(),
            "first_token": p[1:, 0].mean(), "zeros": (A[visible] == 0).mean(), "log_z_slope": slope,
            "log_z_intercept": intercept,
            "entropy_by_n": [np.mean(entropy[np.array(bins) == b]) for b in range(log2(T) + 1)],
            "log_z_by_n": [values.mean() if len(values) else math.nan for values in log_z],
            "weight_by_distance": by_distance}


def near(found, expected, bound=1e-5):
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    close = np.abs(found - expected) <= bound * np.maximum(1, np.abs(expected))
    assert found.shape == expected.shape and np.all(close | (np.isnan(found) & np.isnan(expected))), (found, expected)


def rounding(config):
    """The bound on float32's errors. A power multiplies relative errors."""
    kind, _, power = config.normalizer.post.partition(":")
    return 1e-5 * (float(power) if kind == "reweight" else 1)


def compare(row, tensors, config, ids):
    """A row of eval.json against the reference. Returns the reference's trace."""
    trace, tokens = reference.Trace(), torch.tensor([ids])
    logits = reference.forward(tensors, tokens, config, trace)
    losses = -torch.log_softmax(logits[0, :-1], -1).gather(-1, tokens[0, 1:, None])[:, 0]
    loss = losses[1 if row["leading_end_of_text"] else 0:].mean().item()
    near(row["loss"], loss)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"])) and row["tokens"] == len(ids)
    assert len(row["layers"]) == config.units and all(len(layer["heads"]) == config.heads for layer in row["layers"])
    for layer, A, log_Z, x in zip(row["layers"], trace.weights, trace.log_Z, trace.residual):
        centered = x - x.mean()
        near(layer["residual_kurtosis"], ((centered**4).mean() / (centered**2).mean() ** 2).item())
        near(layer["residual_largest"], x.abs().max().item())
        for found, *head in zip(layer["heads"], A[0], log_Z[0]):
            expected = head_statistics(*head)
            assert found.keys() == expected.keys()
            scale = max(1, head[0].abs().sum(1).max().item())       # sums of weights that are not normalized
            if "reweight" in config.normalizer.post:        # powers below float32's smallest number are 0 or not
                visible = np.abs(head[0].numpy())[np.tril(np.ones(head[0].shape, bool))]
                expected["zeros"] = np.clip(found["zeros"], (visible <= 1e-46).mean(), (visible <= 1e-37).mean())
            for key in expected:
                near(found[key], expected[key], rounding(config) * (scale if key in ("sum", "unspent") else 1))
    return trace


CASES = [*((shape, attn) for shape in ("grouped", "gau")
           for attn in (*reference.PRESETS, "softmax+post=reweight:3", "relu-l1+norm=l1+0.5", "sigmoid+offset=-logT")),
         *(("QK norms", attn) for attn in ("softmax", "ssmax-bias", "softmax-sink", "lssar", "relu2-T"))]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("shape, attn", CASES)
def test_statistics_equal_the_references(shape, attn, model_of, prompts, tmp_path):
    folder, tensors, config = model_of(shape, attn)
    output, result = evaluate("attention", folder, None, tmp_path, "--prompt-file", prompts)
    rows = [row for row in result["results"] if "layers" in row]
    assert ([(row["prompt"], row["leading_end_of_text"]) for row in rows]
            == [(i, b) for i in range(len(PROMPTS)) for b in (False, True)])
    for row in rows:
        ids = [END_OF_TEXT] * row["leading_end_of_text"] + list(PROMPTS[row["prompt"]].encode())
        trace = compare(row, tensors, config, ids)
        assert ("map" in row) == (row is rows[0])
        if row is rows[0]:
            near(np.load(tmp_path / row["map"]), torch.stack(trace.weights)[:, 0].numpy(), rounding(config))
    line = next(line for line in output.splitlines() if line.split()[:2] == ["1", "no"]).split()
    assert line[2] == str(rows[0]["tokens"])
    near_printed(line[3:], [rows[0]["perplexity"], *printed_means(rows[0]["layers"], max)])


def printed_means(layers, of_kurtosis):
    """The columns of the tables, from the layers of eval.json."""
    heads = [head for layer in layers for head in layer["heads"]]
    means = [np.mean([head[key] for head in heads]) for key in ("sum", "unspent", "entropy", "first_token", "zeros")]
    slopes = [head["log_z_slope"] for head in heads if head["log_z_slope"] is not None]
    return [*means, np.mean(slopes) if slopes else math.nan,
            of_kurtosis([layer["residual_kurtosis"] for layer in layers]),
            max(layer["residual_largest"] for layer in layers)]


def near_printed(words, values):
    assert len(words) == len(values)
    for word, value in zip(words, values):
        assert float(word) == pytest.approx(value, rel=1e-3, abs=1e-4, nan_ok=True), (words, values)


@pytest.mark.parametrize("attn", ["softmax1", "relu2-L"])
def test_tables_by_layer_n_and_distance(attn, model_of, prompts, tmp_path):
    """Means over all prompts, without and with a leading end-of-text token. Prompts differ in length, so means over
    rows are not those over prompts."""
    output, result = evaluate("attention", model_of("grouped", attn)[0], None, tmp_path, "--prompt-file", prompts)
    for leading, title in ((False, "means over 4 prompts without"), (True, "means over 4 prompts with a")):
        rows = [row for row in result["results"] if "layers" in row and row["leading_end_of_text"] == leading]
        lines = [line.split() for line in output[output.index(title):].split("\n\n")[0].splitlines()]
        for l in range(2):
            assert lines[2 + l][0] == str(l)
            near_printed(lines[2 + l][1:], printed_means([row["layers"][l] for row in rows], np.mean))
        heads = [(head, row["tokens"]) for row in rows for layer in row["layers"] for head in layer["heads"]]
        bins = max(len(head["entropy_by_n"]) for head, _ in heads)
        longest = max(tokens for _, tokens in heads)
        assert [line[0] for line in lines[5:]] == ["1", "2-3", "4-7", "8-15", "16-31", f"32-{longest}"][:bins]
        assert [line[2] for line in lines[5:]] == ["0-1", "2-3", "4-7", "8-15", "16-31", f"32-{longest - 1}"][:bins]
        for b in range(bins):
            in_bin = [(head["entropy_by_n"][b], min(2 * 2**b, T + 1) - 2**b)
                      for head, T in heads if b < len(head["entropy_by_n"])]
            weights = [(head["weight_by_distance"][b] if b < len(head["weight_by_distance"]) else 0, T)
                       for head, T in heads]
            means = [sum(x * n for x, n in pairs) / sum(n for _, n in pairs) for pairs in (in_bin, weights)]
            near_printed([lines[5 + b][i] for i in (1, 3)], means)


def cells(A, cell):
    """The mean over the visible weights of each cell."""
    T = A.shape[-1]
    side = -(-T // cell)
    padded = np.zeros((*A.shape[:2], side * cell, side * cell))
    visible = np.zeros((side * cell, side * cell))
    padded[:, :, :T, :T] = A
    visible[:T, :T] = np.tril(np.ones((T, T)))
    blocks = lambda x: x.reshape(*x.shape[:-2], side, cell, side, cell).sum((-3, -1))
    return np.divide(blocks(padded), blocks(visible), out=np.zeros((*A.shape[:2], side, side)),
                     where=blocks(visible) > 0)


@pytest.mark.parametrize("tokens, cell", [(1024, 1), (1025, 2), (2100, 3)])
def test_maps_of_long_prompts(tokens, cell, model_of, data, tmp_path):
    """A map has at most 1,024 rows; a longer prompt's cells are means over several positions."""
    folder, tensors, config = model_of("QK norms", "softmax")
    ids = np.random.default_rng(2).integers(97, 123, tokens)
    (tmp_path / "prompt").write_bytes(bytes(ids.tolist()))
    _, result = evaluate("attention", folder, None, tmp_path, "--prompt-file", tmp_path / "prompt", "--threads", 2)
    row, found = result["results"][0], np.load(tmp_path / "map-0.npy")
    trace = reference.Trace()
    reference.forward(tensors, torch.from_numpy(ids[None]), config, trace)
    expected = cells(torch.stack(trace.weights)[:, 0].numpy(), cell)
    assert found.dtype == np.float32 and row["map_cell"] == cell and row["tokens"] == tokens
    near(found, expected, 1e-7 * np.sqrt(tokens))


def test_sequences_of_the_data(model_of, data, tmp_path):
    """Sequences have T tokens, also with the leading end-of-text token; one at their start is not doubled. None starts
    with two, as at the end of a document that ends with one."""
    folder, tensors, config = model_of("grouped", "ssmax-pn")
    tokens = np.fromfile(data / "d_val_000000.bin", "<u2", offset=1024)[:65]
    assert tokens[0] == END_OF_TEXT
    doubled = np.concatenate([[END_OF_TEXT, END_OF_TEXT], tokens[1:63], tokens])
    for name, kept, start in (("marked", tokens, 1), ("unmarked", np.roll(tokens, -3), 0), ("doubled", doubled, 65)):
        write_shard(tmp_path / f"{name}.bin", kept)
        _, result = evaluate("attention", folder, None, tmp_path / name, "--data", tmp_path / f"{name}.bin",
                             "--samples", 2)
        rows = [row for row in result["results"] if "layers" in row]
        assert [row["tokens"] for row in rows] == 2 * [64]    # the data has only one such sequence
        for row in rows:
            compare(row, tensors, config,
                    ([END_OF_TEXT] * row["leading_end_of_text"] + kept[start:start + 64].tolist())[:64])
        assert result["models"][0]["data"]["tokens"] == len(kept)
    write_shard(tmp_path / "ends.bin", 65 * [END_OF_TEXT])
    errors = evaluate("attention", folder, None, tmp_path / "out", "--data", tmp_path / "ends.bin", code=3)
    assert "ends.bin: every sequence of 64 tokens begins with two end-of-text tokens" in errors


def test_ntk_depends_on_the_length(model_of, data, tmp_path):
    folder, tensors, config = model_of("grouped", "ssmax")
    tokens = np.fromfile(data / "d_val_000000.bin", "<u2", offset=1024)[:151]
    write_shard(tmp_path / "d.bin", tokens)
    _, result = evaluate("attention", folder, None, tmp_path, "--data", tmp_path / "d.bin", "--samples", 1,
                         "--seq-lens", 150, "--rope-scaling", "ntk")
    [row] = [row for row in result["results"] if "layers" in row and not row["leading_end_of_text"]]
    compare(row, tensors, reference.replace(config, rope_scaling="ntk"), tokens[1:].tolist())


def test_the_seed_chooses_the_sequences(model_of, data, tmp_path):
    """None is drawn twice."""
    folder, *_ = model_of("llama", "softmax")
    write_shard(tmp_path / "eight.bin", np.fromfile(data / "d_val_000000.bin", "<u2", offset=1024)[:8 * 50 + 1])

    def losses(samples, *flags):
        _, result = evaluate("attention", folder, None, tmp_path, "--data", tmp_path / "eight.bin", "--seq-lens", 50,
                             "--samples", samples, *flags)
        return [row["loss"] for row in result["results"] if "layers" in row and row["leading_end_of_text"]]

    first = losses(4)
    assert len(set(first)) == 4 and first == losses(4, "--seed", 1337) != losses(4, "--seed", 2)
    for samples in 8, 100:
        assert len(set(losses(samples))) == len(losses(samples)) == 8


def ranks(values):
    return [sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
            for value in values]


def correlation(a, b):
    return np.corrcoef(ranks(a), ranks(b))[0, 1]


def test_spearmans_correlation(model_of, tmp_path):
    """Of the mean sums, to five decimals, with the perplexities. The prompts are so alike that three decimals would
    give some of them the same sum."""
    prompts = tmp_path / "prompts"
    prompts.write_text("".join(chr(97 + i) * 20 + chr(98 + i) * 12 + "\n" for i in range(24)))
    output, result = evaluate("attention", model_of("grouped", "softmax1")[0], None, tmp_path, "--prompt-file", prompts)
    for leading in (False, True):
        rows = [row for row in result["results"] if row["leading_end_of_text"] == leading]
        [last] = [row for row in rows if "spearman_sum_perplexity" in row]
        sums = [round(np.mean([head["sum"] for layer in row["layers"] for head in layer["heads"]]), 5)
                for row in rows[:-1]]
        assert last is rows[-1] and last["prompts"] == 24
        assert len(set(sums)) > len({round(x, 3) for x in sums}) > 1
        expected = correlation(sums, [row["loss"] for row in rows[:-1]])
        assert last["spearman_sum_perplexity"] == pytest.approx(expected, abs=1e-12)
        assert f"{'with' if leading else 'without'} end-of-text: {last['spearman_sum_perplexity']:+.3f}" in output
    output, result = evaluate("attention", model_of("grouped", "softmax")[0], None, tmp_path, "--prompt-file", prompts)
    assert [row["spearman_sum_perplexity"] for row in result["results"][-2:]] == [None, None]
    assert output.count("undefined (all sums are equal)") == 2


def test_ranges_end_with_the_longest_prompt(model_of, tmp_path):
    """Of 8 tokens, the last n is 8 and the greatest distance 7."""
    (tmp_path / "prompts").write_text("abcdefgh\n")
    output, _ = evaluate("attention", model_of("grouped", "softmax1")[0], None, tmp_path,
                         "--prompt-file", tmp_path / "prompts")
    table = [line.split() for line in output[output.index("distance"):].splitlines()[1:5]]
    assert [line[0] for line in table] == ["1", "2-3", "4-7", "8"]
    assert [line[2:3] for line in table] == [["0-1"], ["2-3"], ["4-7"], []]


def test_equal_perplexities_have_no_correlation(model_of, tmp_path):
    """All logits are 0, so the perplexities are equal, but the sums are not."""
    folder = with_weights(model_of("grouped", "softmax1")[0], tmp_path / "flat",
                          lambda tensors: tensors["lm_head.weight"].fill(0))
    (tmp_path / "prompts").write_text("abcd\nefgh\nijkl\n")
    output, result = evaluate("attention", folder, None, tmp_path, "--prompt-file", tmp_path / "prompts")
    assert output.count("undefined (all perplexities are equal)") == 2
    assert [row["spearman_sum_perplexity"] for row in result["results"][-2:]] == [None, None]


def test_rows_that_all_see_as_many_keys_have_no_slope(model_of, data, tmp_path):
    """1,000 equal logarithms leave a spread of rounding errors."""
    _, result = evaluate("attention", model_of("grouped", "softmax")[0], data, tmp_path, "--attn", "softmax+window=2",
                         "--seq-lens", 1000, "--samples", 1)
    slopes = [head["log_z_slope"] for row in result["results"] if row.get("attn") == "softmax+window=2"
              for layer in row.get("layers", []) for head in layer["heads"]]
    assert slopes and set(slopes) == {None}


def test_activations_that_are_not_finite(model_of, prompts, tmp_path):
    """NaN in every statistic that depends on them, and a warning; the first layer's weights do not."""
    folder = overflowing(model_of("grouped", "softmax")[0], tmp_path / "model")
    words = ["--task", "attention", "--model", folder, "--prompt-file", prompts, "--picture", 0]
    output, errors = run(BIN / "eval_gpt2", *words, "--out", tmp_path / "out")
    assert "model under softmax: its activations are not finite in 8 of 8 prompts" in errors and "-nan" not in output
    for row in json.loads((tmp_path / "out/eval.json").read_text())["results"][:8]:
        assert row["loss"] is row["perplexity"] is None
        assert all(layer[key] is None for layer in row["layers"] for key in ("residual_largest", "residual_kurtosis"))
        first, second = (layer["heads"] for layer in row["layers"])
        assert all(head["sum"] == pytest.approx(1) and head["entropy"] > 0 for head in first)
        for head in second:
            assert {head[key] for key in ("sum", "unspent", "entropy", "first_token", "zeros", "log_z_slope")} == {None}
            assert {*head["entropy_by_n"], *head["log_z_by_n"], *head["weight_by_distance"]} == {None}
    assert output.count("undefined (not all are finite)") == 2


def test_two_normalizers_and_two_models(model_of, prompts, tmp_path):
    """Each has its own rows and its own map."""
    folders = [model_of("grouped", "softmax")[0], model_of("gau", "ssmax")[0]]
    _, result = evaluate("attention", f"{folders[0]},{folders[1]}", None, tmp_path, "--prompt-file", prompts,
                         "--attn", "softmax1")
    maps = [(row["model"], row["attn"], row["map"]) for row in result["results"] if "map" in row]
    assert [row[:2] for row in maps] == [(folder.name, attn) for folder, own in zip(folders, ("softmax", "ssmax"))
                                         for attn in (own, "softmax1")]
    assert len({row[2] for row in maps}) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["eval.json", *(row[2] for row in maps)])
    shapes = [np.load(tmp_path / row[2]).shape for row in maps]
    assert shapes == 2 * [(2, 4, 46, 46)] + 2 * [(2, 1, 46, 46)]
    _, again = evaluate("attention", folders[1], None, tmp_path / "one", "--prompt-file", prompts, "--attn", "softmax1")
    assert [row for row in result["results"] if row["model"] == folders[1].name and "layers" in row][1:8] == \
           [row for row in again["results"] if "layers" in row][1:8]


def test_without_out_there_are_no_maps(model_of, prompts, tmp_path):
    folder = model_of("llama", "softmax")[0]
    output, _ = run(BIN / "eval_gpt2", "--task", "attention", "--model", folder, "--prompt-file", prompts)
    assert "kurtosis" in output and output == evaluate("attention", folder, None, tmp_path, "--prompt-file", prompts)[0]


def test_a_damaged_tokenizer_leaves_the_maps_without_texts(model_of, data, tmp_path):
    """With --data, the task needs no tokenizer."""
    folder = shutil.copytree(model_of("llama", "softmax")[0], tmp_path / "model")
    words = ["--task", "attention", "--model", f"{folder},{folder}", "--data", f"{data}/*_val_*.bin", "--samples", 1,
             "--picture", 0, "--out", tmp_path / "out"]
    assert run(BIN / "eval_gpt2", *words)[1].count("warning") == 0
    (folder / "tokenizer.json").write_text("{")
    errors = run(BIN / "eval_gpt2", *words)[1]
    assert errors.count("The page of maps will not show") == errors.count("tokenizer.json differs from") == 2
    assert errors.count("warning") == 4 and f"{folder}/tokenizer.json" in errors
    (folder / "tokenizer.json").unlink()
    assert run(BIN / "eval_gpt2", *words)[1].count("warning") == 0


def test_blank_lines_and_carriage_returns(model_of, tmp_path):
    path = tmp_path / "prompts"
    path.write_bytes(b"one prompt\r\n\n\r\n \t \n  \r\nand another\n ")
    _, result = evaluate("attention", model_of("llama", "softmax")[0], None, tmp_path, "--prompt-file", path)
    assert [row["tokens"] for row in result["results"]] == [10, 11, 11, 12]

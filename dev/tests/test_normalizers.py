"""The family of attention normalizers through the programs: every preset with both blocks trains, resumes and samples;
config.json; a change of a model's normalizer; the learned scalars in the metrics and in checkpoints; `make ATTN=`."""
import hashlib
import json
import math
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import model as reference
from tiny import BIN, ROOT, make_path, run, sample
from trainer import (SANITIZED, TRAIN, VOCAB, assert_same_run, checkpoint, embedding, lineage, losses, metrics,
                     tensors, tokens, train, write_shard)

torch.set_num_threads(1)
MODELS = {"llama": f"layers=2,heads=2,channels=16,ffn=24,vocab={VOCAB}",
          "gau": f"layers=1,block=gau,channels=16,vocab={VOCAB}"}
STAGES = ("qk", "scale", "offset", "phi", "norm", "post")
T = 8                                                       # trainer.command's


def preset_table():
    """{name: {stage: text}} from the table of `--attn help`, whose columns begin under the header's words."""
    lines = subprocess.run([TRAIN, "--attn", "help"], capture_output=True, text=True, check=True).stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:2] == ["name", "qk"])
    starts = [lines[first].index(f" {column}") + 1 for column in ("name", *STAGES, "source")]
    rows = lines[first + 1:lines.index("", first)]
    cells = [[row[a:b].strip() for a, b in zip(starts, starts[1:])] for row in rows]
    return {name: dict(zip(STAGES, stages)) for name, *stages in cells}


def each(function, items):
    """Applies the function to all items, a few processes at a time."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(function, items))


@pytest.fixture(scope="module")
def names(data):
    return list(preset_table())


@pytest.fixture(scope="module")
def runs(data, names, tmp_path_factory):
    """runs[block, name]: six steps, with a checkpoint and a validation after every second step."""
    folder = tmp_path_factory.mktemp("runs")
    cases = [(block, name) for block in MODELS for name in names]

    def one(case):
        block, name = case
        train(data, "--model", MODELS[block], "--attn", name, *validation(data), "--steps", 6, "--ckpt-every", 2,
              "--keep", 0, "--out", folder / f"{block}-{name}")
        return folder / f"{block}-{name}"
    return dict(zip(cases, each(one, cases)))


def validation(folder):
    return ["--val-data", folder / "d_val_000000.bin", "--val-every", 2, "--val-tokens", 64]


def attn_config(folder):
    return json.loads((folder / "config.json").read_text())["attention_normalizer"]


# ---------------------------------------------------------------- every preset

def test_the_reference_has_the_same_presets(names):
    for name, stages in preset_table().items():
        known = reference.PRESETS[name]
        expected = {stage: getattr(known, stage) for stage in STAGES}
        if known.fixed:
            expected["scale"] += f", s = {known.s:g} fixed"
        assert stages == expected, name
    assert names == list(reference.PRESETS)


def test_every_preset_trains_differently(runs, names):
    weights = {}
    for (block, name), out in runs.items():
        curve = losses(out)
        assert len(curve) == 6 and np.isfinite(curve).all(), (block, name, curve)
        assert abs(curve[0] - math.log(VOCAB)) < 0.1 and curve[-1] < curve[0], (block, name, curve)
        weights.setdefault(hashlib.sha256(embedding(out, 6).tobytes()).digest(), []).append((block, name))
    # At the single length L, relu2-T and relu2-L are the same function. So are relu and relu6 for small scores, and
    # floor(n/8192) is 0.
    alike = sorted(group for group in weights.values() if len(group) > 1)
    pairs = ("relu-l1", "relu6-l1"), ("relu2-T", "relu2-L"), ("softmax", "softmax-floorlog")
    assert alike == [[(block, one), (block, other)] for block in ("gau", "llama") for one, other in pairs]


@pytest.mark.parametrize("block, name", [("llama", "ssmax-pn"), ("gau", "ssmax-bias"), ("gau", "softmax-sink")])
def test_a_resumed_run_has_the_same_bits(data, runs, tmp_path, block, name):
    shutil.copytree(runs[block, name], tmp_path / "parts")
    for step in (4, 6):
        shutil.rmtree(checkpoint(tmp_path / "parts", step))
    text = train(data, *validation(data), "--out", tmp_path / "parts", "--resume", "--steps", 6, model=False)
    assert "resumes at step 2" in text
    assert_same_run(runs[block, name], tmp_path / "parts", 6)


def test_exp_says_why_it_diverged(data):
    wild = ["--warmup", 0, "--grad-clip", 0, "--steps", 60]
    for attn, phi in (("exp", "exp"), ("relu2-n+phi=expm1", "expm1")):
        text = train(data, "--attn", attn, "--lr", 100, *wild, code=5)
        assert f"phi={phi} without norm=l1 is unbounded" in text and "-nan" not in text, text
    assert "unbounded" not in train(data, "--attn", "relu2-n+scale=const:1e30", *wild, code=5)


def test_a_switch_to_a_loss_that_is_not_finite(data):
    text = train(data, *validation(data), "--steps", 2, "--attn-switch", "1:exp+scale=const:1e5", code=5)
    assert re.search(r"validation loss \d\.\d+ before, not finite after", text)


# ---------------------------------------------------------------- config.json

CONFIGS = ["softmax", "ssmax-fixed", "softmax+norm=l1+0.50+post=negate", "ssmax+s=0.5+fixed",
           "lssar+post=reweight:12.5", "softmax+scale=log:64.0", "softmax+cap=2.5+window=7+rope=500",
           "ssmax-fixed+window=7,ssmax+rope=none+cap=2"]


def stages_of(normalizer):
    """The keys of attention_normalizer for a layer of the reference."""
    number = {"l1+0.50": "l1+0.5", "log:64.0": "log:64"}
    keys = {stage: number.get(getattr(normalizer, stage), getattr(normalizer, stage)) for stage in STAGES}
    rope = float(normalizer.rope) if normalizer.rope not in ("", "none") else normalizer.rope
    more = {"cap": normalizer.cap, "window": normalizer.window, "rope": rope, "fixed": normalizer.fixed}
    return keys | {key: value for key, value in more.items() if value}


@pytest.mark.parametrize("block", MODELS)
def test_config_has_the_name_and_its_stages(data, tmp_path, block):
    for i, text in enumerate(CONFIGS):
        train(data, "--model", MODELS[block], "--attn", text, "--steps", 0, "--out", tmp_path / str(i))
        found = attn_config(checkpoint(tmp_path / str(i), 0))
        expected = {"name": text, "seq_len": T} | ({"block": "gau"} if block == "gau" else {})
        layers = [stages_of(normalizer) for normalizer in reference.parse_layers(text, 2)]
        if "," in text:
            layers = [{"name": name} | layer for name, layer in zip(["ssmax-fixed", "ssmax+cap=2"], layers)]
            assert found == expected | {"layers": layers}
        else:
            assert found == expected | layers[0]


# What a message says of a change of attention_normalizer, for one normalizer and for a list.
CONTRADICTIONS = {
    'means "post": "none", but the file has "post": "negate"': lambda a: a.update(post="negate"),
    'means "scale": "rsqrt-d", but the file has "scale": "logn"': lambda a: a.update(name="softmax1"),
    "Did you mean ssmax[?]": lambda a: a.update(name="ssmx"),
    'has no "name"': lambda a: a.update(name=None),
    'expected "gau" or no such key': lambda a: a.update(block="mamba"),
    "seq_len": lambda a: a.update(seq_len=0),
}
LIST_CONTRADICTIONS = {
    'layers[0]: .* means "window": 7, but the file has "window": 6': lambda a: a["layers"][0].update(window=6),
    'layers[0]: .* means "window": 7, but the file has no "window"': lambda a: a["layers"][0].pop("window"),
    'layers[0]: .* means "fixed": true, but the file has no "fixed"': lambda a: a["layers"][0].pop("fixed"),
    'layers[0]: .* means no "rope", but the file has "rope": "none"': lambda a: a["layers"][0].update(rope="none"),
    'layers[1]: .* means "phi": "exp", but the file has "phi": "relu"': lambda a: a["layers"][1].update(phi="relu"),
    "layers[1].gate is 1: an unknown key": lambda a: a["layers"][1].update(gate=1),
    "layers[1] is 5; expected an object": lambda a: a["layers"].__setitem__(1, 5),
    "layers has 1 object; expected one for each of 2 layers": lambda a: a["layers"].pop(),
    "layers is 5; expected a list": lambda a: a.update(layers=5),
    'attention_normalizer.qk is "none"; where layers differ, it belongs into': lambda a: a.update(qk="none"),
}


@pytest.mark.parametrize("attn, cases", [("ssmax", CONTRADICTIONS), (CONFIGS[-1], LIST_CONTRADICTIONS)],
                         ids=["one", "list"])
def test_a_config_that_contradicts_itself_is_rejected(data, tmp_path, attn, cases):
    train(data, "--model", MODELS["llama"], "--attn", attn, "--steps", 0, "--out", tmp_path / "out")
    bare = bare_model(tmp_path / "out", tmp_path / "bare")
    whole = (bare / "config.json").read_text()
    for says, change in cases.items():
        config = json.loads(whole)
        change(config["attention_normalizer"])
        (bare / "config.json").write_text(json.dumps(config))
        _, errors = run(BIN / "sample_gpt2", "--model", bare, code=3)
        assert str(bare / "config.json") in errors and re.search(says.replace("s[", r"s\["), errors), (says, errors)


def bare_model(out, bare):
    """A copy of a checkpoint's model without its manifest, so that tests can change it."""
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint(out, 0) / name, bare)
    return bare


def init_from(data, folder, *flags, code=0):
    fixed = ["--seq-len", T, "--batch", 4, "--warmup", 2, "--shuffle", 0, "--steps", 1]
    return train(data, "--init-from", folder, *fixed, *flags, model=False, code=code)


# ---------------------------------------------------------------- a change of normalizer

NEW = {         # from, to: the tensors that the change adds
    ("softmax", "ssmax"): ["attn_scale"], ("softmax", "ssmax-pn"): ["attn_scale", "attn_bias", "attn_pn"],
    ("softmax", "lssar"): [],
    ("ssmax", "ssmax-bias"): ["attn_bias"], ("ssmax", "ssmax-pn"): ["attn_scale", "attn_bias", "attn_pn"],
    ("ssmax", "ssmax-fixed"): ["attn_scale"], ("ssmax", "softmax"): [],
    ("softmax", "softmax-sink"): ["attn_sink"],
}
CHANGES = list(NEW)
STAYS_AS_IT_IS = {("softmax", "ssmax-pn"), ("ssmax", "ssmax-bias")}         # p = s = 1 and b = 0; b = 0


@pytest.fixture(scope="module")
def short_data(tmp_path_factory):
    """Twelve windows, read sequentially, four per step: the fourth step reads those of the first again."""
    folder = tmp_path_factory.mktemp("short")
    write_shard(folder / "d_train_000001.bin", tokens(12 * T + 1, 1))
    write_shard(folder / "d_val_000000.bin", tokens(200, 2))
    return folder


@pytest.fixture(scope="module")
def changed(data, short_data, tmp_path_factory):
    """changed[from, to]: a run of three steps under `from`; the same run switched to `to` for two more steps, with a
    learning rate too small to change a weight; a new run from its weights under `to`; and the output of the last
    two."""
    folder = tmp_path_factory.mktemp("changed")
    val = ["--val-data", short_data / "d_val_000000.bin"]
    flags = ["--model", MODELS["llama"], "--shuffle", 0, "--warmup", 2, *val, "--keep", 0, "--ckpt-every", 1]

    def base(name):
        train(short_data, *flags, "--attn", name, "--val-every", 3, "--steps", 3, "--out", folder / name)

    def change(case):
        before, after = case
        start, switched, new = folder / before, folder / f"{before}-{after}", folder / f"{before}-{after}-new"
        shutil.copytree(start, switched)
        a = train(short_data, "--out", switched, "--resume", "--attn-switch", f"3:{after}", "--lr", 1e-30, "--steps", 5,
                  model=False)
        b = init_from(short_data, checkpoint(start, 3), "--attn", after, "--lr", 1e-30, *val, "--out", new)
        return start, switched, new, a, b
    each(base, ("softmax", "ssmax"))
    return dict(zip(CHANGES, each(change, CHANGES)))


@pytest.mark.parametrize("case", CHANGES, ids="-to-".join)
def test_weights_and_moments_stay(changed, case):
    start, switched, new, *_ = changed[case]
    old, now = tensors(start, 3), tensors(switched, 4)
    brought = [name for name in now if any(name.endswith(word) for word in NEW[case])]
    first = {scalar.tensor: scalar.start(reference.PRESETS[case[1]], T) for scalar in reference.SCALARS.values()}
    for name, values in now.items():
        expected = np.full(values.shape, first[name.split(".")[-1]], "f4") if name in brought else old[name]
        assert np.allclose(values, expected, rtol=0, atol=1e-29), name    # a zero changes by the learning rate
    gone = set(old) - set(now)
    assert all("attn_" in name for name in gone) and bool(gone) == (case == ("ssmax", "softmax"))
    assert (len(brought) > 0) == (len(NEW[case]) > 0)

    # The fourth step under `to` has the data and weights of the new run's first step, and so its gradient g. The
    # moments of the switched run are therefore 0.9 and 0.95 times the old ones plus the new run's.
    assert metrics(switched, ["loss", "grad_norm"])[3] == metrics(new, ["loss", "grad_norm"])[0]
    places = (start, 3), (switched, 4), (new, 1)
    before, after, alone = (tensors(out, step, "optimizer.safetensors") for out, step in places)
    for kind, keep in (("exp_avg", 0.9), ("exp_avg_sq", 0.95)):
        for name in now:
            key = f"{name}.{kind}"
            kept = before[key] if name not in brought and key in before else 0
            np.testing.assert_allclose(after[key], keep * kept + alone[key], rtol=1e-5,
                                       atol=1e-6 * np.abs(after[key]).max(), err_msg=key)
    state = json.loads((checkpoint(switched, 5) / "state.json").read_text())
    assert (state["step"], state["tokens"], state["data_position"]) == (5, 5 * 4 * T, 5 * 4)


@pytest.mark.parametrize("case", CHANGES, ids="-to-".join)
def test_the_log_and_the_lineage_record_the_change(changed, case):
    start, switched, new, *printed = changed[case]
    before, after = case
    for text in printed:
        named = " ".join(line for line in text.splitlines() if "new parameters:" in line)
        assert re.findall(r"attn_\w+", named) == NEW[case], text
        assert ("not trained" in named) == (after == "ssmax-fixed")
        assert f"switched --attn {before} to {after}; validation loss" in text
    rates = [lr for lr, in metrics(switched, ["lr"])]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 5e-31, 1e-30], rel=1e-6, abs=0), "the warmup runs again"
    one, two = lineage(switched), lineage(new)
    assert ([(entry["step"], entry["event"], entry["attn"]) for entry in one]
            == [(0, "start", before), (3, "attn-switch", after)])
    assert ([(entry["step"], entry["event"], entry["attn"]) for entry in two]
            == [(0, "init-from", after), (0, "attn-at-start", after)])
    assert two[0]["from"] == str(checkpoint(start, 3)) and one[1]["from"] == two[1]["from"] == before
    losses_of = {(entry["val_loss_before"], entry["val_loss_after"]) for entry in (one[1], two[1])}
    assert len(losses_of) == 1
    loss_before, loss_after = map(float, losses_of.pop())
    assert loss_before == pytest.approx(metrics(start, ["val_loss"])[-1][0], abs=1e-6)
    assert (loss_before == loss_after) == (case in STAYS_AS_IT_IS)
    assert (attn_config(checkpoint(switched, 3))["name"] == before
            and attn_config(checkpoint(switched, 4))["name"] == after)


def test_the_loss_before_has_the_models_own_length(short_data, tmp_path):
    """--norm-length sets L for the new normalizer, not for the one that the weights were trained with."""
    flags = ["--val-data", short_data / "d_val_000000.bin", "--val-every", 3, "--out"]
    train(short_data, *flags, tmp_path / "start", "--attn", "exp+norm=L", "--lr", 0.05, "--steps", 3)
    init_from(short_data, checkpoint(tmp_path / "start", 3), *flags, tmp_path / "new", "--attn", "softmax",
              "--norm-length", 64 * T, "--steps", 0)
    own, = metrics(tmp_path / "start", ["val_loss"])[-1]
    assert float(lineage(tmp_path / "new")[1]["val_loss_before"]) == pytest.approx(own, abs=2e-6)
    assert attn_config(checkpoint(tmp_path / "new", 0))["seq_len"] == 64 * T


# ---------------------------------------------------------------- the learned scalars

@pytest.mark.parametrize("block", MODELS)
def test_metrics_have_the_scalars(runs, names, block):
    unit = "gau" if block == "gau" else "self_attn"
    for name in names:
        known, out = reference.PRESETS[name], runs[block, name]
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        of_heads = {name: scalar for name, scalar in reference.SCALARS.items() if not scalar.by_position}
        for word, there in ((scalar.tensor, scalar.of(known) and reference.trains(known, name))
                            for name, scalar in of_heads.items()):
            assert [word in line for line in lines] == [there and line["step"] % 2 == 0 for line in lines], (name, word)
            for line in filter(lambda line: word in line, lines):
                saved = tensors(out, line["step"])
                layers = [saved[f"model.layers.{i}.{unit}.{word}"].astype("f8") for i in range(2)]
                expected = [[x.mean(), x.min(), x.max()] for x in layers]
                np.testing.assert_allclose(line[word], expected, rtol=1e-5, atol=1e-12, err_msg=f"{name} {word}")
        if known.has_s:
            saved = tensors(out, 6)
            moved = {np.unique(saved[f"model.layers.{i}.{unit}.attn_scale"]).size for i in range(2)}
            stays = all((saved[f"model.layers.{i}.{unit}.attn_scale"] == known.s).all() for i in range(2))
            assert known.fixed == stays, name
            assert block == "gau" or known.fixed == (moved == {1}), "two heads learn different values"
        if known.scale == "pn":
            assert np.unique(tensors(out, 6)["model.attn_pn"]).size == T


def test_p_n_ends_at_the_training_length(data, runs):
    trained = checkpoint(runs["llama", "ssmax-pn"], 6)
    says = f"p_n is learned for n up to L = {T}, but with --seq-len 16 queries see"
    for source, name in ((trained, "ssmax-pn"), (checkpoint(runs["llama", "softmax"], 6), "ssmax-pn")):
        assert says in init_from(data, source, "--attn", name, "--seq-len", 16, code=2)
    assert says in init_from(data, trained, "--attn-switch", "0:ssmax-pn", "--attn", "softmax", "--seq-len", 16, code=2)
    init_from(data, trained, "--attn", "ssmax", "--seq-len", 16)
    sample(trained, "--prompt", "1,2,3", "--max-new-tokens", T - 2)          # the last token is not a key
    _, errors = run(BIN / "sample_gpt2", "--model", trained, "--prompt", "1,2,3", "--max-new-tokens", T - 1, code=2)
    assert "p_n" in errors and str(T) in errors


# ---------------------------------------------------------------- other properties

@pytest.mark.skipif(SANITIZED, reason="builds another program")
def test_make_attn(data, tmp_path):
    """The program built for ssmax alone gives the same bits and rejects other normalizers."""
    program = tmp_path / "build/train_gpt2"
    subprocess.run(["make", "-s", "-j2", "ATTN=ssmax", f"BUILD={make_path(tmp_path / 'build')}", str(program)],
                   cwd=ROOT, check=True)
    flags = ["--model", MODELS["llama"], *validation(data), "--steps", 5]
    train(data, *flags, "--attn", "ssmax", "--out", tmp_path / "all")
    train(data, *flags, "--attn", "ssmax", "--out", tmp_path / "one", program=program)
    assert_same_run(tmp_path / "all", tmp_path / "one", 5)
    listed = [*flags, "--attn", "ssmax+window=3+cap=9,ssmax+rope=none", "--out"]
    train(data, *listed, tmp_path / "all lists")
    train(data, *listed, tmp_path / "one list", program=program)
    assert_same_run(tmp_path / "all lists", tmp_path / "one list", 5)
    for text in ("softmax", "ssmax-bias", "ssmax+post=reweight:3", "ssmax,softmax"):
        refused = train(data, "--attn", text, "--steps", 1, program=program, code=2)
        assert f"--attn {text}: " in refused and "this program was built only for ssmax" in refused
    train(data, "--attn", "softmax", "--steps", 0, "--out", tmp_path / "softmax")
    alone = ["--attn", "ssmax", "--seq-len", T, "--steps", 1]
    refused = train(data, "--init-from", checkpoint(tmp_path / "softmax", 0), *alone, model=False, program=program,
                    code=3)
    assert "softmax" in refused and "built only for ssmax" in refused
    llama = checkpoint(tmp_path / "softmax", 0) / "config.json"    # a Llama from elsewhere is softmax without saying so
    config = json.loads(llama.read_text())
    del config["attention_normalizer"]
    bare = bare_model(tmp_path / "softmax", tmp_path / "bare")
    (bare / "config.json").write_text(json.dumps(config))
    refused = train(data, "--init-from", bare, *alone, model=False, program=program, code=3)
    assert "built only for ssmax" in refused


def test_an_unknown_name_for_make_attn(tmp_path):
    result = subprocess.run(["make", "ATTN=ssmx", f"BUILD={tmp_path / 'build'}"], cwd=ROOT, capture_output=True,
                            text=True)
    assert result.returncode != 0 and "ATTN=ssmx: no such preset" in result.stderr
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize("block", MODELS)
@pytest.mark.parametrize("name", ["relu2-T", "sigmoid+offset=-logT"])
def test_mixed_lengths(data, tmp_path, block, name):
    """Each step takes one of the lengths, so that under a norm that depends on T the run differs from one at any single
    length."""
    curves = {}
    for lengths in ("8,16,32", "8", "16", "32"):
        train(data, "--model", MODELS[block], "--attn", name, "--seq-len", lengths,
              "--batch", 64 // int(lengths.split(",")[-1]), "--norm-length", 32, "--steps", 12,
              "--out", tmp_path / lengths)
        curves[lengths] = losses(tmp_path / lengths)
        assert np.isfinite(curves[lengths]).all()
        assert [count for count, in metrics(tmp_path / lengths, ["tokens"])] == [64 * step for step in range(1, 13)]
    assert attn_config(checkpoint(tmp_path / "8,16,32", 12))["seq_len"] == 32
    assert all((curves["8,16,32"] != curves[length]).any() for length in ("8", "16", "32"))


def test_the_step_line_shows_all_zero_rows(data, tmp_path):
    """And the metrics have them."""
    def shares(*flags):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        printed = train(data, *flags, "--model", MODELS["llama"], "--steps", 3, "--out", out)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found = re.findall(r"\| (\S+)% all-zero rows", printed)
        kept = [100 * line["all_zero_rows"] for line in lines if "all_zero_rows" in line]
        assert kept == pytest.approx([float(share) for share in found], abs=0.5)
        return found
    assert shares("--attn", "softmax") == shares("--attn", "softplus-l1") == []
    some = shares("--attn", "relu-l1")
    assert some and all(0 < float(share) < 50 for share in some), "a first score is often negative"
    assert shares("--attn", "relu-l1+scale=const:0")[-1] == "100"
    # z = -ln L: sigmoid(z) = 1/(L + 1) is below every 1/n; the first three rows are compared with 0.
    assert (float(shares("--attn", "sigmoid+scale=const:0+post=reweight:2")[-1])
            == pytest.approx(100 * (T - 3) / T, abs=0.6))

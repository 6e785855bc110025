"""A step reads the same sequences for any batch size, accumulation and number of ranks, so losses agree."""
import numpy as np
import pytest
from functools import partial

from trainer import assert_same_run, embedding, losses, make_data, metrics, tokens, train, write_shard

STEPS, SEQUENCES = 30, 24
# ranks x batch x micro-batches = 24 sequences per step
WAYS = [(1, 8), (1, 2), (2, 4), (3, 8)]


# about three epochs in 30 steps; the steps cross the ends of epochs and of shards
DATA = partial(make_data, train=2000, shards=3)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    make_data(folder, train=2000, shards=2)
    for i in (1, 2):
        bits = np.random.default_rng(i).integers(0, 3, 1000) > 0
        bits[200:400] = False       # entire sequences that do not count
        write_shard(folder / f"d_train_{i:06d}.mask", bits, magic=20240521)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three sources for --train-data, the first with masks and for less than an epoch, the last for many."""
    folder = tmp_path_factory.mktemp("sources")
    for i, (name, count) in enumerate({"a": 4000, "b": 900, "c": 300}.items()):
        write_shard(folder / f"{name}_train_1.bin", tokens(count, i))
    write_shard(folder / "a_train_1.mask", np.random.default_rng(1).integers(0, 3, 4000) > 0, magic=20240521)
    return folder


def mixture(folder, weights):
    return ",".join(f"{folder}/{name}_train_*.bin:{weight}" for name, weight in weights.items())


WEIGHTS = {"a": 0.62, "b": 0.25, "c": 0.13}     # repeats after 100 sequences, which no step of 24 divides


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind, flags", [
    ("data", []),
    ("data", ["--shuffle", 0]),
    ("data", ["--seq-len", "16,32,8"]),
    ("data", ["--attn", "ssmax", "--val-every", 10, "--val-tokens", 300]),
    ("masked", []),
    ("data", ["--pack", "example"]),
    ("sources", []),
    ("sources", ["--pack", "example", "--shuffle", 0]),
    ("sources", ["--seq-len", "16,32,8"]),
], ids=["shuffled", "in sequence", "mixed lengths", "validation", "masks", "examples", "mixture", "mixture of examples",
        "mixture, mixed lengths"])
def test_same_losses(request, tmp_path, kind, flags):
    folder = request.getfixturevalue(kind)
    length = 32 if "--seq-len" in flags else 8
    if kind == "sources":
        flags = [*flags, "--train-data", mixture(folder, WEIGHTS)]
    if "--val-every" in flags:
        flags = [*flags, "--val-data", folder / "d_val_000000.bin"]
    # At this rate rounding errors do not grow. With steps of 0.01, weights of 0.02 would change sign, and errors would
    # grow tenfold per step.
    common = [*flags, "--lr", 0.001, "--steps", STEPS, "--total-batch-tokens", SEQUENCES * length]

    def run(processes, batch):
        out = tmp_path / f"{processes}x{batch}"
        train(folder, *common, "--batch", batch, "--out", out, processes=processes)
        return np.array([[np.nan if x is None else x for x in line]
                         for line in metrics(out, ["step", "tokens", "loss", "lr", "val_loss"])])

    first = run(1, SEQUENCES)
    assert first.shape[0] == STEPS and first[-1, 1] == STEPS * SEQUENCES * length
    assert abs(first[-1, 2] - first[0, 2]) > 1e-2      # the loss changes
    for way in WAYS:
        np.testing.assert_allclose(run(*way), first, rtol=1e-5, err_msg=f"{way[0]} processes, batch {way[1]}")


def test_masks_count_only_in_their_own_data(tmp_path):
    """With weights that stay the same, masks of the validation data leave training as it is, and those of the training
    data the loss of a validation."""
    make_data(tmp_path)
    flags = ["--lr", 0, "--steps", 2, "--val-data", tmp_path / "d_val_000000.bin", "--val-every", 1]
    train(tmp_path, *flags, "--out", tmp_path / "none")
    for name, kept in (("d_val_000000", ["loss", "grad_norm"]), ("d_train_000001", ["val_loss"])):
        mask = tmp_path / f"{name}.mask"
        write_shard(mask, np.arange(mask.with_suffix(".bin").stat().st_size // 2 - 512) % 3 == 0, magic=20240521)
        train(tmp_path, *flags, "--out", tmp_path / name)
        mask.unlink()
        assert metrics(tmp_path / name, kept) == metrics(tmp_path / "none", kept)
        assert metrics(tmp_path / name) != metrics(tmp_path / "none")


def test_one_source_is_plain_data(data, tmp_path):
    """A source with a weight, alone, is the same run as its globs without one."""
    for name, text in {"a": f"{data}/*_train_*.bin", "b": f"{data}/*_train_*.bin:0.4"}.items():
        train(data, "--steps", 3, "--train-data", text, "--out", tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b", 3)


def test_a_mixture_has_its_proportions(tmp_path):
    """A step changes the embeddings of the ids that it reads, and each source has ids of its own."""
    for i, name in enumerate("ab"):
        write_shard(tmp_path / f"{name}_train_1.bin", np.arange(30 * i, 30 * i + 30).repeat(8))   # one id per window
    flags = ["--train-data", mixture(tmp_path, {"a": 3, "b": 1}), "--batch", 16, "--weight-decay", 0, "--model",
             "layers=1,heads=2,channels=16,ffn=24,vocab=97,tied=0"]
    for steps in (0, 1):
        train(tmp_path, *flags, "--steps", steps, "--out", tmp_path / str(steps))
    before, after = (embedding(tmp_path / str(steps), steps) for steps in (0, 1))
    changed = (before != after).any(axis=1)
    assert (changed[:30].sum(), changed[30:60].sum(), changed[60:].sum()) == (12, 4, 0)


def test_the_share_of_the_peak_depends_on_the_length(data, tmp_path):
    """FLOPs per token by hand, for a tied model of one layer with 16 channels. The peak is measured again in the first
    steps, which are left out."""
    train(data, "--seq-len", "8,512", "--batch", 1, "--steps", 16, "--model",
          "layers=1,heads=2,channels=16,ffn=24,vocab=97,tied=1", "--out", tmp_path)
    ratios = np.array([mfu / speed for mfu, speed in metrics(tmp_path, ["mfu", "tok_per_s"])[4:]])
    ratios /= ratios.min()
    matrices = 4 * 16 * 16 + 3 * 16 * 24 + 97 * 16 + 3 * 16       # and the gains of three norms
    longer = (6 * matrices + 6 * (16 + 16) * 512) / (6 * matrices + 6 * (16 + 16) * 8)
    is_long = ratios > 2
    assert 0 < is_long.sum() < 12
    np.testing.assert_allclose(ratios, np.where(is_long, longer, 1), rtol=0.01)


def test_shuffle_and_seed_matter(data, tmp_path):
    """Otherwise the comparison above would prove nothing."""
    runs = {}
    for name, flags in {"a": [], "b": ["--shuffle", 0], "c": ["--seed", 2]}.items():
        train(data, "--steps", 3, "--lr", 0, "--out", tmp_path / name, *flags)
        runs[name] = losses(tmp_path / name)
    assert (abs(runs["a"] - runs["b"]) > 1e-4).all() and (abs(runs["a"] - runs["c"]) > 1e-4).all()

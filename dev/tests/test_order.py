"""A step reads the same sequences for any batch size, accumulation and number of ranks, so losses agree."""
import numpy as np
import pytest

from trainer import losses, make_data, metrics, train, write_shard

STEPS, SEQUENCES = 30, 24
# ranks x batch x micro-batches = 24 sequences per step
WAYS = [(1, 8), (1, 2), (2, 4), (3, 8)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Data for about three epochs in 30 steps, in three shards, so that steps cross the ends of both."""
    folder = tmp_path_factory.mktemp("data")
    make_data(folder, train=2000, shards=3)
    return folder


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    make_data(folder, train=2000, shards=2)
    for i in (1, 2):
        bits = np.random.default_rng(i).integers(0, 3, 1000) > 0
        bits[200:400] = False       # entire sequences that do not count
        write_shard(folder / f"d_train_{i:06d}.mask", bits, magic=20240521)
    return folder


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind, flags", [
    ("data", []),
    ("data", ["--shuffle", 0]),
    ("data", ["--seq-len", "16,32,8"]),
    ("data", ["--attn", "ssmax", "--val-every", 10, "--val-tokens", 300]),
    ("masked", []),
    ("data", ["--pack", "example"]),
], ids=["shuffled", "in sequence", "mixed lengths", "validation", "masks", "examples"])
def test_same_losses(request, tmp_path, kind, flags):
    folder = request.getfixturevalue(kind)
    length = 32 if "--seq-len" in flags else 8
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


def test_shuffle_and_seed_matter(data, tmp_path):
    """Otherwise the comparison above would prove nothing."""
    runs = {}
    for name, flags in {"a": [], "b": ["--shuffle", 0], "c": ["--seed", 2]}.items():
        train(data, "--steps", 3, "--lr", 0, "--out", tmp_path / name, *flags)
        runs[name] = losses(tmp_path / name)
    assert (abs(runs["a"] - runs["b"]) > 1e-4).all() and (abs(runs["a"] - runs["c"]) > 1e-4).all()

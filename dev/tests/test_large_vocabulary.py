"""Vocabularies over 65,536: 32-bit shards, training on ids that need 17 bits, and the memory plan."""
import re

import numpy as np
import pytest

from trainer import assert_same_run, cuda_program, embedding, metrics, tokens, train, write_shard

VOCAB, T = 70000, 8
MODEL = ["--model", f"layers=1,heads=1,channels=16,ffn=16,tied=0,vocab={VOCAB}"]
WIDE = dict(magic=20240801, version=7)


@pytest.fixture(params=["cpu", "cuda"])
def program(request):
    return cuda_program() if request.param == "cuda" else None


def test_both_formats_give_the_same_run(tmp_path):
    """A dataset of 16-bit shards, of 32-bit shards, and of both; also with a mask and with one document a row."""
    ids, bits = [tokens(1500, i) for i in range(2)], np.random.default_rng(3).integers(0, 2, 1500)
    for name, formats in {"narrow": ({}, {}), "wide": (WIDE, WIDE), "mixed": ({}, WIDE)}.items():
        folder = tmp_path / name
        folder.mkdir()
        for i, form in enumerate(formats):
            write_shard(folder / f"d_train_{i}.bin", ids[i], **form)
            write_shard(folder / f"d_train_{i}.mask", bits, magic=20240521)
        for pack in ("stream", "example"):
            train(folder, "--steps", 4, "--pack", pack, "--out", folder / pack)
    for name in ("wide", "mixed"):
        for pack in ("stream", "example"):
            assert_same_run(tmp_path / "narrow" / pack, tmp_path / name / pack, 4)


def test_ids_of_17_bits(tmp_path, program):
    """A step changes the embeddings of exactly the ids that it read, and the model learns them."""
    ids = np.where(tokens(2000) < 90, tokens(2000), tokens(2000) + VOCAB - 97)      # half of them above 65,535
    assert 0.2 < (ids > 65535).mean() < 0.8
    write_shard(tmp_path / "d_train_1.bin", ids, **WIDE)
    flags = [*MODEL, "--weight-decay", 0, "--shuffle", 0, "--warmup", 0, "--ckpt-every", 1, "--keep", 0]
    train(tmp_path, *flags, "--steps", 0, "--out", tmp_path / "start", program=program)
    train(tmp_path, *flags, "--steps", 30, "--out", tmp_path / "out", program=program)
    changed = (embedding(tmp_path / "start", 0) != embedding(tmp_path / "out", 1)).any(axis=1)
    assert set(changed.nonzero()[0]) == set(ids[:4 * T])
    first, *_, last = (loss for loss, in metrics(tmp_path / "out", ["loss"]))
    assert abs(first - np.log(VOCAB)) < 0.1 and last < first - 3


def test_ids_above_the_vocabulary(tmp_path):
    path = write_shard(tmp_path / "d_train_1.bin", [*range(400), VOCAB + 65536], **WIDE)
    said = train(tmp_path, *MODEL, "--dry-run", code=3)
    assert f"{path}: at offset 2,624: found token id 135536" in said and f"vocabulary size, {VOCAB}" in said


@pytest.mark.parametrize("tied", [0, 1])
def test_memory_plan(tmp_path, program, tied):
    """Parameters, gradients and optimizer state of Llama 3.2 1B's vocabulary and width are what its tensors need,
    and no row of the plan wraps around: an embedding alone has 262,668,288 numbers."""
    write_shard(tmp_path / "d_train_1.bin", tokens(3000), **WIDE)
    said = train(tmp_path, "--model", f"layers=1,heads=32,kv_heads=8,channels=2048,ffn=8192,vocab=128256,tied={tied}",
                 "--batch", 1, "--seq-len", 64, "--dry-run", program=program,
                 env={"CUDA_ON_CPU_MEMORY": str(80 * 10**9)})
    count = (2 - tied) * 128256 * 2048 + 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 3 * 2048
    assert f"{count:,} parameters" in said
    device = said[said.find("device memory"):] if program else said
    for row, copies in (("parameters", 1), ("gradients", 1), ("optimizer state", 2)):
        value = float(re.search(rf"^  {row} +([\d.]+) GB$", device, re.M)[1])
        assert abs(value - 4e-9 * copies * count) <= 0.006, (row, value)
    logits = re.search(r"logits of one block of rows +([\d.]+) MB", device)
    assert abs(float(logits[1]) - 64 * 128256 * 4e-6) <= 0.06

"""What goes wrong for users: each error has its exit code, and its message gives the file, what was expected and found,
and a remedy."""
import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

import byte_text
from jobs import start, wait_for_line
from trainer import (MODEL, SANITIZED, TRAIN, VOCAB, checkpoint, command, edit_config, edit_tensors, environment,
                     make_data, metrics, says, script_of, sign, steps, tokens, train, write_shard)

USAGE, INPUT, RESOURCE, DIVERGED, PEER, BUSY = 2, 3, 4, 5, 6, 7


@pytest.fixture(scope="module")
def first_run(data, tmp_path_factory):
    """A finished run with two checkpoints; tests work on copies of it."""
    out = tmp_path_factory.mktemp("run") / "out"
    train(data, "--attn", "ssmax", "--steps", 4, "--ckpt-every", 2, "--keep", 0, "--out", out)
    return out


@pytest.fixture
def run(first_run, tmp_path):
    return shutil.copytree(first_run, tmp_path / "run")


@pytest.fixture
def model(first_run, tmp_path):
    """A checkpoint without its manifest, like a folder from elsewhere."""
    folder = shutil.copytree(checkpoint(first_run, 4), tmp_path / "model")
    (folder / "manifest.json").unlink()
    return folder


def tree(folder):
    """Every file with its contents and modification time."""
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
            for path in sorted(Path(folder).rglob("*"))}


# ---- data


def run_data(folder, *flags, code=INPUT):
    return train(folder, "--steps", 2, *flags, code=code)


def shard_with(folder, **how):
    return write_shard(folder / "d_train_000001.bin", how.pop("ids", tokens(1000)), **how)


@pytest.mark.parametrize("name, how, parts", [
    ("d_train_000001.bin", dict(version=2), ["offset 4", "expected version 1", "found 2", "Recreate"]),
    ("*_train_*.bin", dict(ids=tokens(8)),
     ["too little data", "8 tokens", "0 windows of 8 + 1", "4 are needed", "--batch"]),
    ("d_val_000000.bin", dict(count=2000), ["2,000 tokens", "truncated"]),
])
def test_broken_data(tmp_path, name, how, parts):
    """What else can be broken is in test_shards.c."""
    for shard in ("d_train_000001.bin", "d_val_000000.bin"):
        write_shard(tmp_path / shard, tokens(1000))
    write_shard(tmp_path / name.replace("*_train_*", "d_train_000001"), how.get("ids", tokens(1000)),
                **{key: value for key, value in how.items() if key != "ids"})
    out = tmp_path / "out"
    says(run_data(tmp_path, "--val-data", tmp_path / "d_val_000000.bin", "--out", out), f"{tmp_path}/{name}", *parts)
    assert not out.exists()


TINY = "layers=1,heads=1,channels=16,ffn=16"      # with the vocabulary of the tokenizer


def test_sources_with_different_tokenizers(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        byte_text.write_text(folder)
    text = ",".join(f"{folder}/*_train_*.bin:1" for folder in folders)
    plan = train(tmp_path, "--train-data", text, "--batch", 1, "--seq-len", 8, "--dry-run", model=False)
    says(plan, "data      3 sources", "\n  33.33% ", " epochs\n")
    whole = json.loads((folders[2] / "tokenizer.json").read_text())
    (folders[2] / "tokenizer.json").write_text(json.dumps(whole, indent=1))
    flags = ["--batch", 1, "--seq-len", 8, "--dry-run"]
    assert "differs" not in train(tmp_path, "--train-data", text, *flags, model=False)
    byte_text.exchange_tokens(folders[2])
    differs = f"{folders[2]}/tokenizer.json: differs from {folders[0]}/tokenizer.json"
    says(train(tmp_path, "--train-data", text, *flags, model=False, code=INPUT), differs, "--tokenizer")
    one, other = (f"{folder}/*_train_*.bin" for folder in (folders[0], folders[2]))
    says(train(tmp_path, "--train-data", one, "--val-data", other, *flags, model=False, code=INPUT), differs)
    train(tmp_path, "--train-data", one, *flags[:-1], "--steps", 1, "--model", TINY, "--out", tmp_path / "out",
          model=False)
    both = f"{folders[0]}/*_train_*.bin,{folders[2]}/*_train_*.bin"      # one source
    says(train(tmp_path, "--train-data", both, *flags, model=False, code=INPUT), differs)
    loaded = ["--init-from", checkpoint(tmp_path / "out", 1), *flags, "--train-data"]
    assert "differs" not in train(tmp_path, *loaded, one, model=False)
    says(train(tmp_path, *loaded, other, model=False),
         f"warning: {folders[2]}/tokenizer.json differs from {checkpoint(tmp_path / 'out', 1)}/tokenizer.json")


def test_id_above_the_vocabulary(tmp_path):
    ids = tokens(1000)
    ids[20] = VOCAB
    path = shard_with(tmp_path, ids=ids)
    parts = [path, "offset 1,064", f"token id {VOCAB}", f"vocabulary size, {VOCAB}", "vocab="]
    says(run_data(tmp_path, "--shuffle", 0), *parts)
    says(run_data(tmp_path, "--dry-run"), *parts)
    ids[20], ids[-1] = 1, 50000      # two steps of training would not read it
    shard_with(tmp_path, ids=ids)
    run_data(tmp_path, "--shuffle", 0, code=0)
    says(run_data(tmp_path, "--dry-run"), path, "offset 3,022", "token id 50000")


def test_a_pipe_in_place_of_samples(data, run):
    """One that somebody reads; without a reader: test_nothing_is_appended_through_a_link."""
    os.mkfifo(run / "samples.txt")
    reader = os.open(run / "samples.txt", os.O_RDONLY | os.O_NONBLOCK)
    text = train(data, "--resume", "--out", run, "--steps", 5, "--sample-every", 1, timeout=30, model=False)
    says(text, "samples.txt: cannot write the sample of step 5", "Training continues")
    os.close(reader)


@pytest.mark.drawn(2, of="long tests")
def test_past_2_gib(tmp_path):
    """Documents past the 2 GiB mark of a sparse shard, after a long run of zeros, train like the same documents
    alone."""
    text = tokens(2000, 5).astype("<u2")
    text[::20] = 50256
    plain, sparse = tmp_path / "plain", tmp_path / "sparse"
    plain.mkdir(), sparse.mkdir()
    write_shard(plain / "d_train_000001.bin", text)
    count = (1 << 30) + 5000
    path = write_shard(sparse / "d_train_000001.bin", [], count=count)
    os.truncate(path, 1024 + 2 * count)
    with open(path, "r+b") as file:
        file.seek(1024 + 2 * (count - len(text)))
        file.write(text.tobytes())
    for folder in (plain, sparse):
        train(folder, "--model", "layers=1,heads=1,channels=8,ffn=8", "--pack", "example", "--steps", 5,
              "--out", folder / "out")
    assert metrics(plain / "out") == metrics(sparse / "out")


# ---- checkpoints


def init_from(data, model, code=INPUT, steps=1):
    return train(data, "--init-from", model, "--seq-len", 8, "--batch", 4, "--steps", steps, code=code, model=False)


UP = "model.layers.0.mlp.up_proj.weight"


def with_config(**changes):
    return lambda model: edit_config(model, **changes)


def with_tensors(change):
    return lambda model: edit_tensors(model / "model.safetensors", change)


def with_text(text):
    return lambda model: (model / "config.json").write_bytes(text)


SCALE = "model.layers.0.self_attn.attn_scale"
WRONG_MODELS = [
    (with_tensors(lambda t: t.pop(SCALE)), [f"expected a tensor {SCALE}", "none of that name", "config.json"]),
    (with_tensors(lambda t: t[UP].put(53, float("nan"))),
     ["model.safetensors", UP, "expected finite values", "element 53 of 384", "offset ", "earlier checkpoint"]),
    *((with_text(text), ["config.json", "expected"]) for text in (b"", b"\xff\xfe", b"[]")),
    (with_text(b"{\"a\": 1, \"a\": 2}"), ["config.json", "twice"]),
    (with_config(num_key_value_heads=0), ["num_key_value_heads", "1 to 1024"]),
    (with_config(head_dim=4), ["q_proj", "o_proj", "[8, 16]", "[16, 8]"]),
    (with_config(head_dim=5), ["head size is 5", "even"]),
    (with_config(hidden_size=None), ["hidden_size", "whole number"]),
    (with_config(intermediate_size=25), ["[25, 16]", "[24, 16]"]),
    (with_config(rope_theta=500000), ["rope_theta is 500000", "rope_parameters.rope_theta is 10000"]),
]


@pytest.mark.parametrize("change, parts", WRONG_MODELS, ids=[parts[-1] for _, parts in WRONG_MODELS])
def test_wrong_models(data, model, change, parts):
    """What else can be wrong with models is in test_foreign.py."""
    change(model)
    says(init_from(data, model), model, *parts)


def test_not_a_checkpoint(data, tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        says(init_from(data, folder), f"--init-from {folder}: expected the folder of a checkpoint",
             "found neither")


def resume(data, run, *flags, code=0, **how):
    return train(data, "--out", run, "--resume", "--attn", "ssmax", "--steps", 6, *flags, code=code, **how)


def test_wrong_hash(data, run):
    path = checkpoint(run, 4) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    parts = [path, "expected XXH3-128", "manifest.json", "found", "damaged",
             "to resume from the previous one, delete this folder"]
    says(resume(data, run, code=INPUT), *parts)
    says(init_from(data, checkpoint(run, 4)), *parts)
    shutil.rmtree(checkpoint(run, 4))      # the message's advice
    says(resume(data, run), "resumes at step 2")


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path)


def without_entry(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["optimizer.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "optimizer.safetensors").unlink()


DAMAGED = {     # what is done to a checkpoint, and what is said about it
    "link": (lambda folder: link_to_itself(folder / "state.json"), ["state.json", "Too many levels of symbolic links"]),
    "entry": (without_entry, ["manifest.json", "expected an entry of optimizer.safetensors"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_skipped(data, run, name):
    damage, parts = DAMAGED[name]
    damage(checkpoint(run, 4))
    text = resume(data, run)
    says(text, "warning", checkpoint(run, 4), *parts, "Skipping", "resumes at step 2")
    assert text.count("Skipping") == 1 and "delete this folder" not in text and "missing" not in text


def test_damaged_checkpoints_alone_are_no_reason_to_start_over(data, run):
    """Starting over would truncate the metrics of a run whose checkpoints may still be repaired."""
    for step in steps(run):
        (checkpoint(run, step) / "manifest.json").unlink()
    before = metrics(run)
    says(resume(data, run, code=INPUT), f"{run}/ckpt", "every checkpoint is damaged", "another --out")
    assert metrics(run) == before


OWED = {"loss": 4, "lr": 0.01, "grad_norm": 123, "ms": 1, "tok_per_s": 1, "mfu": 0.1}


@pytest.mark.parametrize("change, parts", [
    (lambda state: "{", ["expected JSON", "offset 1"]),
    *((lambda state, key=key, value=value: json.dumps({**state, key: value}), [f'"{key}": expected', "damaged"])
      for key, value in [("step", 3), ("tokens", None), ("tokens", -128), ("data_position", 0.5), ("rewarm", 5),
                         ("ranks", 0), ("random", []), ("best_val_loss", 1e39), ("best_val_loss", -1), ("owed", 3)]),
    (lambda state: json.dumps({**state, "data_position": 17}), ["data_position", "4 x 4 after 4 steps", "17"]),
    (lambda state: json.dumps({**state, "tokens": 129}), ["tokens", "4 x 32", "129"]),
    (lambda state: json.dumps({**state, "random": {"seed": 1}}), ["has the seed 1, but its run.json says 1337"]),
    (lambda state: json.dumps({**state, "step": 2}), ["found 2", "renamed or copied", "remove it"]),
    (lambda state: json.dumps({**state, "best_val_loss": 4, "best_step": 5}), ["best_step"]),
    (lambda state: json.dumps({**state, "owed": OWED}).replace("123", "1e999"), ["grad_norm", "expected a number"]),
    (lambda state: json.dumps({**state, "owed": OWED | {"lr": -1}}), ["lr", "expected a number"]),
])
def test_malformed_state(data, run, change, parts):
    path = checkpoint(run, 4) / "state.json"
    path.write_text(change(json.loads(path.read_text())))
    sign(path.parent, "state.json")
    says(resume(data, run, code=INPUT), path, *parts)


@pytest.mark.parametrize("change, parts", [
    (lambda moments: moments[f"{UP}.exp_avg_sq"].put(2, -1e-9), ["exp_avg_sq", "at least 0", "element 2 of"]),
    (lambda moments: moments.pop(f"{UP}.exp_avg"), [f"{UP}.exp_avg", "none of that name"]),
])
def test_wrong_moments(data, run, change, parts):
    path = checkpoint(run, 4) / "optimizer.safetensors"
    edit_tensors(path, change)
    sign(path.parent, "optimizer.safetensors")
    says(resume(data, run, code=INPUT), path, *parts)


@pytest.mark.parametrize("change, parts", [
    (lambda run: "{\"arguments\": ", ["expected JSON"]),
    (lambda run: "{}", ["arguments", "lineage", "--init-from"]),
    (lambda run: json.dumps({**run, "arguments": {**run["arguments"], "batch": "four"}}),
     ["batch", "whole number", "damaged"]),
])
def test_malformed_run_json(data, run, change, parts):
    path = run / "run.json"
    path.write_text(change(json.loads(path.read_text())))
    says(resume(data, run, code=INPUT), "run.json", *parts)


# ---- the run folder


def test_missing_metrics(data, run):
    (run / "metrics.jsonl").unlink()
    says(resume(data, run), "metrics.jsonl: this file is missing. A new one begins with step 5.")


def test_run_without_resume(data, run):
    before = tree(run / "ckpt")
    says(train(data, "--out", run, code=USAGE), run, "already contains a run", "--resume")
    assert tree(run / "ckpt") == before


FIXED = {"--model": MODEL.replace("ffn=24", "ffn=32"), "--attn": "softmax", "--seq-len": 16, "--norm-length": 32,
         "--rope-theta": 5000, "--rope-scaling": "linear:2", "--dtype": "bf16", "--seed": 3, "--shuffle": 0,
         "--pack": "example", "--z-loss": 0.2, "--beta1": 0.8, "--beta2": 0.9, "--grad-clip": 2,
         "--init-from": "/elsewhere", "--val-data": "/elsewhere", "--train-data": "/elsewhere"}


def test_resume_with_contradicting_flags(data, run):
    """One message names all of them, and nothing else."""
    before = tree(run / "ckpt"), (run / "metrics.jsonl").read_bytes()
    text = resume(data, run, "--lr", 0.02, *(word for pair in FIXED.items() for word in pair), code=USAGE)
    says(text, *(f"{flag} is {value}, but the run started with" for flag, value in FIXED.items()), "cannot change",
         "--out", "use --attn-switch")
    assert "--lr" not in text
    assert before == (tree(run / "ckpt"), (run / "metrics.jsonl").read_bytes())


def test_resume_may_change(data, run):
    text = resume(data, run, "--batch", 2, "--steps", 7, "--lr", 0.02, "--warmup", 0, "--schedule", "linear",
                  "--min-lr-frac", 0.2, "--keep", 3, "--ckpt-every", 3, "--val-every", 0, "--sample-every", 0,
                  "--keep-best", "--threads", 2)
    says(text, "2 threads on 1 rank")
    assert steps(run) == [4, 6, 7] and [step for step, in metrics(run, ["step"])] == list(range(1, 8))
    says(resume(data, run, "--steps", 8), "2 threads on 1 rank")      # from run.json


@pytest.mark.parametrize("flag, value", [("--total-batch-tokens", 64), ("--val-tokens", 8)])
def test_resume_may_not_change_what_a_step_reads(data, run, flag, value):
    says(resume(data, run, flag, value, code=USAGE), flag)


def test_two_jobs_in_one_folder(data, tmp_path):
    out = tmp_path / "out"
    first = start(command(data, "--steps", 10 ** 9, "--out", out))
    wait_for_line(first, "| loss ")
    try:
        for flags in ([], ["--resume"]):
            says(train(data, "--out", out, *flags, code=BUSY), out, f"process {first.pid}", "--out")
    finally:
        first.kill()
        first.communicate()
    train(data, "--out", out, "--steps", 1, "--resume")      # a killed job's lock is released


@pytest.mark.parametrize("resumes", [[], ["--resume"]])
def test_another_job_finishes_a_run_before_this_one_has_the_lock(data, tmp_path, resumes):
    """This job waits in between, because the pipe that it prints its plan to is full."""
    out, (reads, writes) = tmp_path / "out", os.pipe()
    os.write(writes, b" " * fcntl.fcntl(writes, fcntl.F_GETPIPE_SZ))
    job = subprocess.Popen(command(data, "--steps", 2, "--out", out, *resumes), stdout=writes, stderr=subprocess.PIPE,
                           text=True, env=environment())
    os.close(writes)
    end = time.monotonic() + 30
    while "pipe_write" not in Path(f"/proc/{job.pid}/wchan").read_text():
        assert job.poll() is None, job.communicate()[1]
        if time.monotonic() > end:
            job.kill()
            pytest.skip("needs a kernel that shows where a process waits")
        time.sleep(0.01)
    train(data, "--steps", 3, "--out", out)
    before = tree(out)
    os.set_blocking(reads, False)
    while job.poll() is None:
        with contextlib.suppress(BlockingIOError):
            os.read(reads, 1 << 16)
        time.sleep(0.01)
    os.close(reads)
    says(job.communicate()[1], "already contains a run")
    assert job.returncode == USAGE
    del before[out / "lock"]
    assert before.items() <= tree(out).items()


def test_dry_run_writes_nothing(data, run, tmp_path):
    before = tree(tmp_path)
    text = train(data, "--dry-run", "--out", tmp_path / "new/out", "--val-data", data / "d_val_000000.bin",
                 "--sample-every", 5)
    says(text, "parameters", "memory", "total", "free", "tokens", "steps per epoch", "per checkpoint",
         "nothing was written")
    says(resume(data, run, "--dry-run"), "nothing was written")
    assert tree(tmp_path) == before


def test_the_plan_names_what_it_does(data, tmp_path):
    flags = ["--seq-len", "4,2,8", "--steps", 300, "--warmup", 20, "--schedule", "cosine", "--optimizer", "muon",
             "--z-loss", "1e-4", "--logit-softcap", 30, "--doc-mask", "--rope-scaling", "linear:2", "--norm-length", 64]
    text = train(data, "--dry-run", *flags)
    says(text, "logit softcap 30\n",
         "\nattention softmax, L = 64, although sequences have 8 tokens, within documents\n",
         "rope      scaling linear:2\n", "validate  never, without --val-data\n",
         "of 4 x 8, which each step cuts to 4, 2 or 8\n",
         "update    muon, learning rate 0.01, cosine after 20 steps of warmup, z-loss 0.0001\n",
         "run       300 steps, 9.60 k tokens, ", " epochs, nothing is saved")
    assert "although" not in train(data, "--dry-run") and "warning" not in text
    text = train(data, "--dry-run", "--attn", "softmax+norm=l1+1")
    says(text, "attention softmax+norm=l1+1, the same as softmax1, L = 8")


def test_tokenizers_that_cannot_be_compared(tmp_path):
    """A warning, because both may have the same tokens. A run that exists goes on with any."""
    for name, changed in (("a", {"type": "Unigram"}), ("b", {"type": "Unigram", "unk_id": 0})):
        byte_text.write_text(tmp_path / name)
        path = tmp_path / name / "tokenizer.json"
        whole = json.loads(path.read_text())
        path.write_text(json.dumps(whole | {"model": whole["model"] | changed}))
    flags = ["--train-data", f"{tmp_path}/a/*_train_*.bin", "--val-data", f"{tmp_path}/b/*_train_*.bin", "--batch", 1,
             "--seq-len", 8, "--model", TINY, "--steps", 1]
    warning = f"warning: {tmp_path}/b/tokenizer.json differs from {tmp_path}/a/tokenizer.json"
    says(train(tmp_path, *flags, "--out", tmp_path / "out", model=False), warning)
    for name in "ab":
        byte_text.write_text(tmp_path / name)
    byte_text.exchange_tokens(tmp_path / "b")
    says(train(tmp_path, *flags[:2], "--out", tmp_path / "out", "--resume", "--steps", 2, model=False), warning)


def test_a_shard_of_training_and_validation(data):
    text = train(data, "--dry-run", "--warmup", 0, "--val-data", data / ".." / data.name / "d_train_*.bin")
    says(text, "warning", "d_train_000001.bin is in --train-data and in --val-data")
    assert "warning" not in train(data, "--dry-run", "--warmup", 0, "--val-data", data / "d_val_000000.bin")


def test_no_run_json(data, run):
    (run / "run.json").unlink()
    says(resume(data, run, code=INPUT), f"{run}/run.json: this file is missing", f"--init-from {run} ")


def test_a_resumed_step_keeps_its_tokens(data, run):
    text = resume(data, run, "--batch", 3, code=USAGE)
    says(text, "is not a multiple", "change --batch or the number of ranks")
    assert "Nearest" not in text


def test_no_such_folder(data, tmp_path):
    (tmp_path / "file").write_text("")
    says(train(data, "--steps", 1, "--out", tmp_path / "file/out", code=RESOURCE), tmp_path / "file", "folder",
         "Choose another")


@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--resume"]], ids=str)
def test_names_of_out(data, tmp_path, flags):
    """A path with no room for the files of a checkpoint is rejected before any training, as is an empty one."""
    says(train(data, "--out", "", *flags, code=USAGE), "--out is empty")
    longest = str(tmp_path) + "/folder" * 540
    longest += "x" * (3996 - len(longest))
    says(train(data, "--steps", 1, "--out", longest + "y", *flags, code=USAGE), "--out", "at most 3996 bytes", "3997")
    train(data, "--steps", 1, "--out", longest, *flags)
    assert os.path.exists(longest + "/ckpt/step-00000001/manifest.json") == ("--dry-run" not in flags)


# ---- links, pipes and other people's folders


def put(path, what, victim):
    """Puts something that leads to the victim's file, or blocks, in the place of a file."""
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "hard link":
        os.link(victim, path)
    else:
        path.symlink_to(victim if what == "link" else victim.with_name("new"))


@pytest.mark.parametrize("what", ["link", "link to nothing", "hard link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "samples.txt"])
def test_nothing_is_appended_through_a_link(data, tmp_path, name, what):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    before = "" if name == "metrics.jsonl" else "precious"       # with lines, the folder already contains a run
    victim.write_text(before)
    put(out / name, what, victim)
    samples = name == "samples.txt"
    text = train(data, "--steps", 1, "--sample-every", 1, "--out", out, code=0 if samples else RESOURCE, timeout=30)
    says(text, out / name, "cannot", "" if samples else "Remove it, or choose another --out.",
         what.split(" to ")[0] if "link" in what or what == "pipe" and not samples else "")
    assert victim.read_text() == before and not (tmp_path / "new").exists()


@pytest.mark.parametrize("what", ["link", "link to nothing", "hard link", "pipe"])
def test_a_temporary_file_is_not_written_through_a_link(data, run, tmp_path, what):
    """A link in the place of a checkpoint's folder is removed too, but not followed."""
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    folder.mkdir()
    (folder / "config.json").write_text("precious")
    for name in ("run.json.tmp", "metrics.jsonl.tmp"):
        put(run / name, what, victim)
    with open(run / "metrics.jsonl", "a") as file:
        file.write("half a line")                            # so that the file is written again
    for name in (".tmp-step-00000006", ".old-step-00000006", ".trash-step-00000002"):
        (run / "ckpt" / name).symlink_to(folder)
    train(data, "--resume", "--out", run, "--steps", 6, "--keep", 1, model=False, timeout=30)
    assert victim.read_text() == (folder / "config.json").read_text() == "precious"
    assert not (tmp_path / "new").exists() and steps(run) == [6] and not list(run.glob("*.tmp"))


def endless(path, what):
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 42)


@pytest.mark.parametrize("what", ["pipe", "device", "holes"])
def test_endless_files(data, model, run, tmp_path, what):
    """Nothing waits, fills the memory, or takes a run beyond the file."""
    folder = shutil.copytree(data, tmp_path / "data")
    byte_text.write_tokenizer(folder)
    shutil.rmtree(checkpoint(run, 2))
    new = ["--steps", 1, "--out", tmp_path / "new", "--model", MODEL.replace("vocab=97", "vocab=300")]
    cases = [(model / name, ["--init-from", model], INPUT) for name in ("model.safetensors", "config.json")]
    cases += [(folder / f"d_train_000001.{end}", new, INPUT) for end in ("bin", "mask")]
    cases += [(folder / "tokenizer.json", new, INPUT)]
    cases += [(folder / name, new, 0) for name in ("tokenizer_config.json", "chat_template.jinja")]
    cases += [(tmp_path / "flags.toml", ["--config", tmp_path / "flags.toml"], INPUT)]
    cases += [(path, ["--resume", "--out", run, "--steps", 6], code) for path, code in (
        (run / "metrics.jsonl", INPUT if what == "holes" else RESOURCE), (checkpoint(run, 4) / "state.json", INPUT),
        (checkpoint(run, 4) / "manifest.json", INPUT), (run / "run.json", INPUT))]
    for path, flags, code in cases:
        kept = path.read_bytes() if path.exists() else None
        endless(path, what)
        if code == 0 and what == "device":              # a link out of its folder
            flags = [*flags, "--follow-links", 1]
        at, plain = folder if folder in path.parents else data, flags[0] not in ("--resume", "--init-from")
        says(train(at, *flags, code=code, timeout=30, model=plain), path)
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)


def test_a_manifest_of_terabytes(data, run):
    """Their hash would take hours."""
    shutil.rmtree(checkpoint(run, 2))
    for name in ("more", "optimizer.safetensors"):
        path, manifest = checkpoint(run, 4) / name, checkpoint(run, 4) / "manifest.json"
        kept, before = manifest.read_text(), path.read_bytes() if path.exists() else b""
        endless(path, "holes")
        content = json.loads(kept)
        content["files"][name] = {"size": 1 << 42, "xxh3_128": "0" * 32}
        manifest.write_text(json.dumps(content))
        says(resume(data, run, code=INPUT), path, "expected at most")
        path.write_bytes(before)
        manifest.write_text(kept)


def test_checkpoints_in_another_runs_folder(data, run, tmp_path):
    """Saving and pruning there would delete the checkpoints of the other run."""
    out = shutil.copytree(run, tmp_path / "out")
    shutil.rmtree(out / "ckpt")
    (out / "ckpt").symlink_to(run / "ckpt")
    before = tree(run)
    text = train(data, "--resume", "--steps", 6, "--keep", 1, "--out", out, code=RESOURCE, model=False)
    says(text, out / "ckpt", "is a link", "another --out")
    assert tree(run) == before
    (tmp_path / "mine").symlink_to(run)                      # the user's own flag may be a link
    train(data, "--resume", "--steps", 5, "--out", tmp_path / "mine", model=False)
    assert steps(run) == [2, 4, 5]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize("owner, mode, refused", [(65534, 0o777, True), (65534, 0o775, False), (65534, 0o755, False),
                                                  (0, 0o777, False), (65534, 0o1777, None)])
def test_a_folder_that_others_can_change(data, tmp_path, owner, mode, refused):
    """refused: None if only the run folder itself is, as of /tmp"""
    other = tmp_path / "other"
    other.mkdir()
    os.chown(other, owner, owner)
    os.chmod(other, mode)
    for out, wrong in ((other / "new" / "run", refused), (other / "run", refused), (other, refused is not False)):
        text = train(data, "--steps", 1, "--out", out, code=RESOURCE if wrong else 0)
        if wrong:
            says(text, out, "belongs to another user", "--foreign-folder 1")
            assert not (out / "lock").exists()
            train(data, "--steps", 1, "--out", out, "--foreign-folder", 1)
            still = out.parent != other / "new"
            again = train(data, "--out", out, "--resume", "--steps", 2, code=RESOURCE if still else 0)
            assert ("--foreign-folder 1" in again) == still      # run.json cannot allow it
        shutil.rmtree(out / "ckpt")
    if refused:
        train(data, "--steps", 1, "--out", tmp_path / "out")
        shutil.copystat(other, tmp_path / "out/ckpt")
        os.chown(tmp_path / "out/ckpt", owner, owner)
        text = train(data, "--steps", 2, "--resume", "--out", tmp_path / "out", code=RESOURCE)
        says(text, tmp_path / "out/ckpt", "belongs to another user", "--foreign-folder 1")


def test_no_folder_for_checkpoints(data, tmp_path):
    (tmp_path / "ckpt").touch()
    text = train(data, "--steps", 2, "--ckpt-every", 1, "--out", tmp_path, code=RESOURCE)
    says(text, tmp_path / "ckpt", "folder", "Choose another")
    assert "step     1/2" not in text, text


@pytest.fixture
def open_folder(data):
    """A folder that another user can reach, with the data and the program."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        shutil.copytree(data, Path(name) / "data")
        os.chmod(Path(name) / "data", 0o755)
        shutil.copy(TRAIN, Path(name) / "train_gpt2")
        yield Path(name)


def test_no_permission(open_folder):
    """Runs as nobody, because root may write anywhere."""
    out = open_folder / "out"
    how = {"program": open_folder / "train_gpt2", "code": RESOURCE}
    train(open_folder / "data", "--steps", 2, "--out", out)
    if os.getuid() == 0:
        how["user"] = 65534
        words = [open_folder / "data", "--steps", 4, "--out", out, "--resume"]
        says(train(*words, **how), out, "Permission denied")
        os.chown(out, 65534, 65534)
        os.chown(out / "lock", 65534, 65534)
        says(train(*words, **how), out / "ckpt", "Permission denied")
    os.chmod(open_folder, 0o555)
    says(train(open_folder / "data", "--steps", 1, "--out", open_folder / "new", **how),
         open_folder / "new", "Permission denied", "Choose a folder that you can write to")
    os.chmod(open_folder, 0o755)


# ---- memory and disk


@pytest.fixture(scope="module")
def much_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("much")
    count = 80_000_000
    path = write_shard(folder / "d_train_000001.bin", [], count=count)
    os.truncate(path, 1024 + 2 * count)
    return folder


def test_more_memory_than_is_free(much_data, tmp_path):
    out = tmp_path / "out"
    text = train(much_data, "--batch", 65536, "--seq-len", 1024, "--model", MODEL.replace("layers=1", "layers=99"),
                 "--out", out, code=RESOURCE)
    says(text, "this run needs", "of memory", "is available", "--batch")
    assert not out.exists()
    text = train(much_data, "--model", "layers=1024,heads=64,channels=65536,ffn=262144", code=RESOURCE)
    says(text, "this run needs", "is available", "--model")


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's own mappings exceed any limit")
def test_more_memory_than_ulimit_allows(much_data):
    """2.5 GB of activations where the process may map 2 GiB."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    says(train(much_data, "--batch", 1500, "--seq-len", 1024, code=RESOURCE, preexec_fn=limit), "cannot allocate",
         "of memory", "--batch")
    train(much_data, "--batch", 15, "--seq-len", 1024, "--steps", 1, preexec_fn=limit)


def test_full_disk_at_the_start(data, tmp_path):
    """There is room for a file, but not for its contents."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "none", disk]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs permission to mount")
    try:
        (disk / "full").write_bytes(bytes(8192))
        says(train(data, "--steps", 1, "--out", disk, code=RESOURCE), disk / "lock", "No space left on device",
             "Free some space")
    finally:
        subprocess.run(["umount", disk], check=True)


# ---- a run that ends early


def test_diverged(data, tmp_path):
    out = tmp_path / "out"
    text = train(data, "--lr", 100, "--weight-decay", 10, "--warmup", 0, "--grad-clip", 0, "--steps", 100,
                 "--ckpt-every", 1, "--out", out, code=DIVERGED)
    step = int(re.search(r"train_gpt2: step (\d+): the loss is", text)[1])
    says(text, "diverged", "Last good checkpoint", checkpoint(out, step - 1), "--lr")
    assert steps(out)[-1] == step - 1 == len(metrics(out))
    init_from(data, checkpoint(out, step - 1), code=0, steps=0)


# ---- several ranks: one message, within seconds, and the exit code


def test_several_ranks_print_one_message(data):
    text = train(data, "--dry-run", "--seq-len", 16, "--batch", 300, processes=2, code=INPUT, timeout=15)
    assert text.count("train_gpt2: ") == 1 and text.count("too little data") == 1, text


def test_several_ranks_find_the_folder_locked(data, run):
    with open(run / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = resume(data, run, processes=2, code=BUSY)
    assert text.count("another job") == 1, text


def test_ranks_that_find_different_checkpoints(data, run, tmp_path):
    """Each rank gets a folder of its own, in which one of them has a newer checkpoint."""
    other = shutil.copytree(run, f"{run}1")
    shutil.rmtree(checkpoint(other, 4))
    program = on_each_rank(tmp_path / "program", "", f"--out {other}")
    text = resume(data, run, "--batch", 2, processes=2, code=PEER, program=program)
    says(text, "some ranks find step 4 in", "others step 2", "same --out folder")
    assert text.count("train_gpt2: ") == 1, text


def on_each_rank(path, *flags):
    """Writes a program that trains with more flags, of its own on each rank."""
    cases = " ".join(f"{rank}) set -- \"$@\" {words};;" for rank, words in enumerate(flags))
    return script_of(path, f'case $OMPI_COMM_WORLD_RANK in {cases} esac\nexec {TRAIN} "$@"')


def test_an_error_of_one_rank_before_it_knows_the_others(data, tmp_path):
    text = train(data, processes=2, code=USAGE, program=on_each_rank(tmp_path / "program", "", "--stpes 3"))
    says(text, f"train_gpt2: rank 1 on {os.uname().nodename}: --stpes: unknown flag")


RANKS_DIFFER = {
    "a dry run": (["--dry-run"], "rank 1: --dry-run is 1, but on rank 0 it is 0."),
    "a switch": (["--attn-switch", "1:ssmax"], "rank 1: --attn-switch is 1:ssmax, but on rank 0 it is none."),
    "a --config file": (["--config", "{folder}/config.toml"], "rank 1: --seed is 7, but on rank 0 it is 1337."),
    "the data": (["--train-data", "{folder}/d_train_*.bin"], "rank 1: the training data is {{\"files\": 1, "),
    "the vocabulary": (["--model", MODEL.replace("97", "98")], "rank 1: --model is"),
}


@pytest.mark.parametrize("name", RANKS_DIFFER)
def test_ranks_that_differ(data, tmp_path, name):
    """They would add gradients of different models or data, or wait for each other forever."""
    flags, message = RANKS_DIFFER[name]
    other = tmp_path / "other"
    other.mkdir()
    make_data(other, train=2990)
    (other / "config.toml").write_text("seed = 7\n")
    program = on_each_rank(tmp_path / "program", "", " ".join(f"'{str(flag).format(folder=other)}'" for flag in flags))
    text = train(data, "--steps", 2, "--out", tmp_path / "out", processes=2, code=USAGE, program=program)
    says(text, message.format(), "All ranks need the same program, flags, --config files, model and data.")
    assert text.count("train_gpt2: rank") == 1 and not (tmp_path / "out").exists(), text


def test_ranks_of_different_builds(data, tmp_path):
    """Other instructions of the same build's matmuls are a warning."""
    ours, other = TRAIN.read_bytes(), tmp_path / "other"
    other.write_bytes(ours.replace(b"of commit ", b"of commit_"))
    other.chmod(0o755)
    for second, code, message in ((other, USAGE, "rank 1: the build is of commit_"),
                                  (f"env ONEDNN_MAX_CPU_ISA=SSE41 {TRAIN}", 0, "the matmuls of rank 1 use other")):
        program = script_of(tmp_path / "program",
                            f'[ $OMPI_COMM_WORLD_RANK = 1 ] || exec {TRAIN} "$@"\nexec {second} "$@"')
        text = train(data, "--steps", 1, processes=2, program=program, code=code)
        assert (message in text) == (code == USAGE or b"libdnnl" in ours), text


def test_only_one_rank_has_a_run_folder(data, tmp_path):
    """The others would not save with it."""
    program = on_each_rank(tmp_path / "program", f"--out {tmp_path}/out", "")
    text = train(data, "--steps", 1, processes=2, code=USAGE, program=program)
    says(text, "rank 1: --out is not given, but on rank 0 it is given.")
    train(data, "--steps", 1, "--out", tmp_path / "out")
    program = on_each_rank(tmp_path / "program", f"--out {tmp_path}/out --resume", "")
    says(train(data, "--steps", 2, processes=2, code=USAGE, program=program), "rank 1 has no --resume")


SSMAX, CAPPED = ["--attn", "ssmax"], ["--attn", "ssmax", "--logit-softcap", 30]


@pytest.mark.parametrize("attn, first, second, message", [
    ("softmax", [], ["--rope-theta", 500], "rank 1: the model's rope_theta is 500, but on rank 0 it is 10000."),
    ("ssmax", SSMAX, CAPPED, "rank 1: the model's final_logit_softcapping is 30, but on rank 0 it is missing."),
    ("ssmax", CAPPED, SSMAX, "rank 1: the model's final_logit_softcapping is missing, but on rank 0 it is 30."),
    ("softmax", [], SSMAX, "rank 1: the normalizer before the start is ssmax, but on rank 0 it is softmax.")],
                         ids=["rope", "softcap", "no softcap", "attn"])
def test_ranks_that_start_from_different_models(data, tmp_path, attn, first, second, message):
    """Of the same shape. A key of config.json may be missing on either rank."""
    for name, own in {"a": first, "b": second}.items():
        train(data, "--steps", 0, *own, "--out", tmp_path / name)
    own = [f"--init-from {checkpoint(tmp_path / name, 0)} --seq-len 8 --warmup 0" for name in "ab"]
    says(train(data, "--attn", attn, "--steps", 1, processes=2, code=USAGE, model=False,
               program=on_each_rank(tmp_path / "program", *own)), message)


def test_what_ranks_may_have_of_their_own(data, tmp_path):
    """The same data under another path, a number of threads."""
    other = shutil.copytree(data, tmp_path / "other")
    own = f"--train-data '{other}/*_train_*.bin' --threads 2"
    train(data, "--steps", 2, processes=2, program=on_each_rank(tmp_path / "program", "", own))


def test_a_bad_token_on_one_rank(tmp_path):
    """Only the second rank reads the window with it."""
    ids = tokens(1000)
    ids[8 * 4 + 2] = VOCAB
    shard_with(tmp_path, ids=ids)
    text = train(tmp_path, "--shuffle", 0, "--steps", 1, processes=2, code=INPUT)
    assert text.count("token id") == 1, text

#!/usr/bin/env python3
"""Checks that a change to the code keeps the numbers: runs the programs of two trees on the same small cases and
compares their output.

    dev/tests/compare_builds.py OLD NEW             trees with train_gpt2 and eval_gpt2 built
    dev/tests/compare_builds.py --cuda OLD NEW      also train_gpt2cu_on_cpu
    dev/tests/compare_builds.py -k WORD OLD NEW     only the cases whose program or name contains WORD

Per case: the hashes of model.safetensors and optimizer.safetensors of every checkpoint, the numbers in metrics.jsonl
that do not depend on time, samples.txt, and eval.json. Bits are expected to be equal if both trees are built with
the same compiler and with

    make OPT='-O1 -ffp-contract=off' CU_OPT='-O1 -ffp-contract=off' WHAT=...

In a default build the compiler may contract a*b + c differently after a change; with `--losses 1e-6` only losses must
agree, and the cases whose bits differ are listed. The exit status is 1 if a case fails.
"""
import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from trainer import environment, make_data, tokens, write_shard

TIMES = ("ms", "tok_per_s", "mfu", "gpu_memory_gb", "ms_by_phase")
MODELS = {"llama": "layers=2,heads=2,channels=32,ffn=48,vocab=97", "gau": "layers=2,channels=32,vocab=97,block=gau"}
NORMALIZERS = ("softmax", "ssmax", "ssmax-bias", "ssmax-pn", "softmax1", "softmax-sink", "lssa", "lssar",
               "softmax-recentered", "softmax-recentered-l1", "relu2-n", "sigmoid", "gelu-l1", "softpick")
BASE = ("--batch", 4, "--seq-len", 32, "--steps", 6, "--warmup", 2, "--val-tokens", 300, "--val-every", 3,
        "--ckpt-every", 3, "--keep", 0, "--lr", "3e-3")


def cases(cuda):
    """(name, ranks, list of flag lists: the runs that follow each other in one folder)."""
    for attn in NORMALIZERS:
        for block in ("llama", "gau"):
            for tied in (0, 1):
                yield f"{attn} {block} tied={tied}", 1, [["--attn", attn, "--model", f"{MODELS[block]},tied={tied}"]]
    model = ["--model", MODELS["llama"]]
    for attn in ("softmax", "ssmax-bias", "lssar"):
        for block in ("llama", "gau"):
            yield f"{attn} {block} bf16", 1, [["--attn", attn, "--model", MODELS[block], "--dtype", "bf16"]]
            yield f"{attn} {block} two ranks", 2, [["--attn", attn, "--model", MODELS[block], "--batch", 2]]
    yield "accumulation", 1, [[*model, "--batch", 2, "--total-batch-tokens", 256, "--grad-clip", "0.5"]]
    yield "accumulation, two ranks", 2, [[*model, "--batch", 2, "--total-batch-tokens", 256]]
    yield "mixed lengths", 1, [[*model, "--attn", "ssmax", "--seq-len", "8,16,32"]]
    yield "packed documents", 1, [[*model, "--pack", "example"]]
    yield "masks", 1, [[*model, "--train-data", "masked/*_train_*.bin", "--val-data", "masked/*_val_*.bin"]]
    yield "switch mid-run", 1, [[*model, "--attn-switch", "4:ssmax-bias"]]
    yield "switch on resuming", 1, [[*model, "--steps", 3],
                                    [*model, "--steps", 6, "--resume", "--attn-switch", "3:lssar"]]
    yield "resume", 1, [[*model, "--attn", "ssmax", "--steps", 3],
                        [*model, "--attn", "ssmax", "--steps", 6, "--resume"]]
    yield "samples", 1, [[*model, "--attn", "ssmax", "--sample-every", 2]]
    yield "samples gau", 1, [["--model", MODELS["gau"], "--attn", "lssar", "--sample-every", 2]]
    yield "cosine, no decay", 1, [[*model, "--schedule", "cosine", "--weight-decay", 0]]
    if cuda:
        for zero in (0, 1):
            yield f"two ranks --zero {zero}", 2, [[*model, "--attn", "ssmax", "--batch", 2, "--zero", zero]]
        yield "recompute", 1, [[*model, "--attn", "ssmax", "--recompute"]]
        yield "recompute gau bf16", 1, [["--model", MODELS["gau"], "--recompute", "--dtype", "bf16"]]
        yield "stochastic rounding", 1, [[*model, "--dtype", "bf16", "--stochastic-rounding"]]


def run(words, where, ranks=1, launch=None):
    if ranks > 1:
        words = [launch, ranks, *words]
    done = subprocess.run([str(w) for w in words], cwd=where, env=environment(), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")


def written(out):
    """The contents of a run folder without times: {name: a hash, or the numbers}."""
    found = {}
    for path in sorted(Path(out).glob("ckpt/*/*.safetensors")) + sorted(Path(out).glob("samples.txt")):
        found[str(path.relative_to(out))] = hashlib.sha256(path.read_bytes()).hexdigest()
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    found["metrics.jsonl"] = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
    return found


def evaluate(tree, out, where, more):
    """The losses of the newest checkpoint under its own normalizer and under softmax, also beyond the training
    length."""
    folder = max(Path(out).glob("ckpt/step-*"))
    run([tree / "eval_gpt2", "--model", folder, "--data", "data/*_val_*.bin", "--seq-lens", "16,32,64",
         "--attn", "softmax", "--task", "positions", "--max-tokens", 300, "--out", out / "eval", *more], where)
    return json.loads((out / "eval/eval.json").read_text())["results"]


def losses(found):
    lines = found["metrics.jsonl"]
    return [line["loss"] for line in lines] + [line["val_loss"] for line in lines if "val_loss" in line]


def result_of(tree, program, case, where):
    name, ranks, runs = case
    out = Path("out")
    for flags in runs:
        words = [tree / program, "--train-data", "data/*_train_*.bin", "--val-data", "data/*_val_*.bin", *BASE,
                 "--out", out, *flags]
        run(words, where, ranks, tree / "scripts/launch.sh")
    found = written(where / out)
    if program == "train_gpt2" and ranks == 1:
        found["eval.json"] = evaluate(tree, where / out, where,
                                      ["--pn-extrapolate", "log"] if "ssmax-pn" in name else [])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--losses", type=float, metavar="BOUND")
    parser.add_argument("-k", default="", metavar="WORD")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    trees = [args.old.absolute(), args.new.absolute()]
    equal = differ = failed = 0
    for program in ["train_gpt2", *(["train_gpt2cu_on_cpu"] if args.cuda else [])]:
        for case in cases(program != "train_gpt2"):
            if args.k not in f"{program}: {case[0]}":
                continue
            found = []
            for tree in trees:
                with tempfile.TemporaryDirectory() as folder:
                    where = Path(folder)
                    (where / "data").mkdir()
                    (where / "masked").mkdir()
                    make_data(where / "data")
                    make_masked(where / "masked")
                    found.append(result_of(tree, program, case, where))
            if found[0] == found[1]:
                equal += 1
                continue
            names = [key for key in sorted(found[0].keys() | found[1].keys()) if found[0].get(key) != found[1].get(key)]
            distance = max((abs(a - b) for a, b in zip(losses(found[0]), losses(found[1]))), default=0)
            if args.losses is not None and distance <= args.losses and "samples.txt" not in names:
                differ += 1
                print(f"differs  {program}: {case[0]}: losses by {distance:.2g}")
                continue
            failed += 1
            print(f"FAILED   {program}: {case[0]}: {', '.join(names)}; losses by {distance:.2g}", flush=True)
    print(f"{equal} equal, {differ} with different bits, {failed} failed")
    return 1 if failed or not equal + differ else 0


def make_masked(folder):
    """Shards with masks in which every third token does not count."""
    for i, (name, count) in enumerate((("d_train_000001", 3000), ("d_val_000000", 600))):
        ids = tokens(count, 7 + i)
        write_shard(folder / f"{name}.bin", ids)
        write_shard(folder / f"{name}.mask", [n % 3 > 0 for n in range(count)], magic=20240521)


if __name__ == "__main__":
    sys.exit(main())

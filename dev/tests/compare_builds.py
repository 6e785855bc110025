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

TIMES = ("ms", "tok_per_s", "mfu", "gpu_memory_gb", "ms_by_phase", "mean_ms", "slowest_rank",
         "slowest_ms")
BLOCKS = {"llama": "layers=2,heads=2,channels=32,ffn=48,vocab=97", "gau": "layers=2,channels=32,vocab=97,block=gau"}
NORMALIZERS = ("softmax", "ssmax", "ssmax-bias", "ssmax-pn", "softmax1", "softmax-sink", "lssa", "lssar",
               "softmax-recentered", "softmax-recentered-l1", "relu2-n", "sigmoid", "gelu-l1", "softpick")
BASE = "--batch 4 --seq-len 32 --steps 6 --warmup 2 --val-tokens 300 --val-every 3 --ckpt-every 3 --keep 0 --lr 3e-3"
# name: ranks, and the flags of runs that follow each other in one folder
OTHERS = {
    "accumulation": (1, ["--batch 2 --total-batch-tokens 256 --grad-clip 0.5"]),
    "accumulation, two ranks": (2, ["--batch 2 --total-batch-tokens 256"]),
    "mixed lengths": (1, ["--attn ssmax --seq-len 8,16,32"]),
    "packed documents": (1, ["--pack example"]),
    "masks": (1, ["--train-data masked/*_train_*.bin --val-data masked/*_val_*.bin"]),
    "switch mid-run": (1, ["--attn-switch 4:ssmax-bias"]),
    "switch on resuming": (1, ["--steps 3", "--resume --attn-switch 3:lssar"]),
    "resume": (1, ["--attn ssmax --steps 3", "--attn ssmax --resume"]),
    "samples": (1, ["--attn ssmax --sample-every 2"]),
    "samples gau": (1, [f"--model {BLOCKS['gau']} --attn lssar --sample-every 2"]),
    "cosine, no decay": (1, ["--schedule cosine --weight-decay 0"]),
}
CUDA_ONLY = {
    "two ranks": (2, ["--attn ssmax --batch 2 --zero 0"]),
    "two ranks, ZeRO": (2, ["--attn ssmax --batch 2 --zero 1"]),
    "recompute": (1, ["--attn ssmax --recompute"]),
    "recompute gau bf16": (1, [f"--model {BLOCKS['gau']} --recompute --dtype bf16"]),
    "stochastic rounding": (1, ["--dtype bf16 --stochastic-rounding"]),
}


def cases(cuda):
    found = {}
    for attn in NORMALIZERS:
        for block, model in BLOCKS.items():
            for tied in (0, 1):
                found[f"{attn} {block} tied={tied}"] = 1, [f"--attn {attn} --model {model},tied={tied}"]
            if attn in ("softmax", "ssmax-bias", "lssar"):
                found[f"{attn} {block} bf16"] = 1, [f"--attn {attn} --model {model} --dtype bf16"]
                found[f"{attn} {block} two ranks"] = 2, [f"--attn {attn} --model {model} --batch 2"]
    return found | OTHERS | (CUDA_ONLY if cuda else {})


def run(words, where):
    done = subprocess.run([str(word) for word in words], cwd=where, env=environment(), stdin=subprocess.DEVNULL,
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


def losses(found):
    lines = found["metrics.jsonl"]
    return [line["loss"] for line in lines] + [line["val_loss"] for line in lines if "val_loss" in line]


def result_of(tree, program, name, ranks, runs):
    """What the runs write. With one rank of the CPU's trainer also the losses of the newest checkpoint under its own
    normalizer and under softmax, beyond the training length, too."""
    with tempfile.TemporaryDirectory() as folder:
        where, out = Path(folder), Path(folder) / "out"
        make_data(where / "data")
        make_masked(where / "masked")
        launch = [tree / "scripts/launch.sh", ranks] if ranks > 1 else []
        for flags in runs:
            run([*launch, tree / program, "--train-data", "data/*_train_*.bin", "--val-data", "data/*_val_*.bin",
                 "--model", BLOCKS["llama"], *BASE.split(), "--out", "out", *flags.split()], where)
        found = written(out)
        if program == "train_gpt2" and ranks == 1:
            more = ["--pn-extrapolate", "log"] if "ssmax-pn" in name else []
            run([tree / "eval_gpt2", "--model", max(out.glob("ckpt/step-*")), "--data", "data/*_val_*.bin",
                 "--seq-lens", "16,32,64", "--attn", "softmax", "--task", "positions", "--max-tokens", 300,
                 "--picture", 0, "--out", "eval", *more], where)
            found["eval.json"] = json.loads((where / "eval/eval.json").read_text())["results"]
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
        for name, (ranks, runs) in cases(program != "train_gpt2").items():
            if args.k not in f"{program}: {name}":
                continue
            found = [result_of(tree, program, name, ranks, runs) for tree in trees]
            if found[0] == found[1]:
                equal += 1
                continue
            names = [key for key in sorted(found[0].keys() | found[1].keys()) if found[0].get(key) != found[1].get(key)]
            distance = max((abs(a - b) for a, b in zip(losses(found[0]), losses(found[1]))), default=0)
            if args.losses is not None and distance <= args.losses and "samples.txt" not in names:
                differ += 1
                print(f"differs  {program}: {name}: losses by {distance:.2g}")
                continue
            failed += 1
            print(f"FAILED   {program}: {name}: {', '.join(names)}; losses by {distance:.2g}", flush=True)
    print(f"{equal} equal, {differ} with different bits, {failed} failed")
    return 1 if failed or not equal + differ else 0


def make_masked(folder):
    """Shards with masks in which every third token does not count."""
    folder.mkdir()
    for i, (name, count) in enumerate((("d_train_000001", 3000), ("d_val_000000", 600))):
        ids = tokens(count, 7 + i)
        write_shard(folder / f"{name}.bin", ids)
        write_shard(folder / f"{name}.mask", [n % 3 > 0 for n in range(count)], magic=20240521)


if __name__ == "__main__":
    sys.exit(main())

"""Evaluation of a 124M model on a GPU: tokens per second, next to the trainer's forward pass.

    python3 dev/bench/gpu_eval.py REPORT evaluation [--budget 120]
    python3 dev/bench/gpu_eval.py REPORT evaluation --dry-run --train ./train_gpt2 --evaluate ./eval_gpt2
        a tiny model on the CPU, to show that everything runs

The weights are random, and a sequence is a batch of its own.

    forward      the trainer's validation at T = 10,240: its forward pass and loss, timed by --profile on the device
    evaluation   eval_gpt2cu --task loss at the same T, by the tokens per second that it prints
    prefill      eval_gpt2cu --task needle: prompts of 8,000 tokens, each with an answer of a single token

Evaluation and prefill are timed from the first batch on, so they include the work of first launches, in which the
device waits for the host; prefill also includes a prompt's scores, from which the host computes the weights on the
needle.
"""
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/bench"), str(ROOT / "dev/tests")]
import byte_text
import cpu_step
import gpu_report
import gpu_step

CASES = ("forward", "evaluation", "prefill")
LENGTH, PROMPT = 10240, 8000
SEQUENCES = {"bf16": 400, "fp32": 40}     # and prompts: some seconds of evaluation on one H100
NEED = 15                                 # seconds that must be left to start a case


def words_of(options, case, dtype):
    """The command that measures a case."""
    if case == "forward":
        return [options.train, "--train-data", options.data, "--val-data", options.data, "--model", options.spec,
                "--batch", 1, "--seq-len", options.length, "--dtype", dtype, "--steps", 2, "--warmup", 1,
                "--val-every", 1, "--val-tokens", options.sequences[dtype] // 4 * options.length,
                "--sample-every", 0, "--profile"]
    words = [options.evaluate, "--model", options.model, "--data", options.data, "--dtype", dtype]
    if case == "evaluation":
        return words + ["--seq-lens", options.length, "--max-tokens", options.sequences[dtype] * options.length]
    return words + ["--task", "needle", "--seq-lens", options.prompt, "--depths", 50,
                    "--samples", options.prompts[dtype], "--max-new-tokens", 1]


def rate(options, case, dtype, result):
    """The tokens per second that a program printed."""
    if case != "forward":
        return float(re.search(r"([\d.]+) tokens/s", result.stderr)[1])
    ms = float(re.search(r"^validation, samples, checkpoints +([\d.]+) ", result.stdout, re.M)[1])
    return 1e3 * (options.sequences[dtype] // 4 * options.length) / ms


def write_model(options, folder):
    """Writes the data and a model with random weights; returns the problem, if there is one."""
    cpu_step.write_shard(folder / "random_train_000001.bin", max(options.sequences.values()) * options.length + 1, 256)
    byte_text.write_tokenizer(folder)
    options.data, options.model = folder / "*_train_*.bin", folder / "run"
    return gpu_step.run_within("ours", options.budget, options.train, "--train-data", options.data, "--model",
                               options.spec, "--batch", 1, "--seq-len", 1024, "--steps", 0, "--out", options.model)[1]


def measure(options, case, dtype):
    result, problem = gpu_step.run_within("ours", options.budget, *words_of(options, case, dtype))
    figures = problem or {"tok_per_s": rate(options, case, dtype, result)}
    said = figures.get("failed") or figures.get("left") or f"{figures['tok_per_s']:.0f} tok/s"
    print(f"{case:10} {dtype}: {said}", flush=True)
    return figures


def part_evaluation(report, options):
    """Measures what the report lacks; returns what was left."""
    left, device = [], gpu_step.device()
    wanted = [(case, dtype) for dtype in SEQUENCES for case in CASES
              if not report.find("evaluation", case=case, dtype=dtype, device=device)]
    with gpu_step.scratch_folder() as name:
        problem = write_model(options, Path(name)) if wanted else None
        for case, dtype in wanted:
            short = options.budget.until_stop() < (0 if gpu_step.DRY else NEED)
            figures = problem or ({"left": "no time"} if short else measure(options, case, dtype))
            if "left" in figures:
                left.append(f"{case} {dtype}")
                continue
            report.record("evaluation", {"case": case, "dtype": dtype, "device": device}, **figures)
            report.save()
    table(report, options, left)
    return left


def table(report, options, left):
    records = report.part("evaluation")["records"]
    found = {(r["case"], r["dtype"]): r for r in records}
    rows = []
    for dtype in SEQUENCES:
        for case, T in (("forward", options.length), ("evaluation", options.length), ("prefill", options.prompt)):
            r, forward = found.get((case, dtype)), found.get(("forward", dtype))
            known = r and forward and "tok_per_s" in r and "tok_per_s" in forward
            rows.append([dtype, case, T, gpu_step.figure(r, "tok_per_s", 0),
                         f"{r['tok_per_s'] / forward['tok_per_s']:.2f}" if known else ""])
    report.table("evaluation", f"Tokens per second of evaluation, {options.spec}, one sequence at a time",
                 ["dtype", "case", "T", "tok/s", "of the trainer's forward pass"], rows,
                 gpu_report.not_measured(left))


def parse():
    parser = gpu_report.parser(__doc__, ("evaluation",), 120)
    parser.add_argument("--train", type=os.path.abspath, default=ROOT / "train_gpt2cu", help="the trainer")
    parser.add_argument("--evaluate", type=os.path.abspath, default=ROOT / "eval_gpt2cu", help="the evaluator")
    options = parser.parse_args()
    gpu_step.DRY = options.dry_run
    options.spec, options.length, options.prompt = "124M,vocab=50257", LENGTH, PROMPT
    options.sequences = options.prompts = SEQUENCES
    if gpu_step.DRY:
        options.spec, options.length, options.prompt = "layers=1,heads=2,channels=96,ffn=64,vocab=259", 160, 120
        options.sequences, options.prompts = dict.fromkeys(SEQUENCES, 8), dict.fromkeys(SEQUENCES, 1)
    return options


def main():
    options = parse()

    def failures(report):
        return [f"{r['case']} {r['dtype']} ({r['failed']})" for r in report.find("evaluation") if "failed" in r]

    return gpu_report.run("gpu_eval", options, [options.train, options.evaluate], part_evaluation, failures)


if __name__ == "__main__":
    sys.exit(main())

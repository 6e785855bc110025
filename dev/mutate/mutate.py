#!/usr/bin/env python3
"""Mutation tests: makes each of the small changes in mutations.txt to the code, one at a time, and requires that a test
fails each time.

    dev/mutate/mutate.py             every change in mutations.txt
    dev/mutate/mutate.py --draw 5    five of them, drawn by commit
    dev/mutate/mutate.py --only D    those whose line contains D
    dev/mutate/mutate.py --jobs 2    two at a time

It works in a copy of the tree in a temporary folder. A change that no test notices is a hole in the tests: it is
listed, and the exit status is 1. The same goes for a change that no longer applies or does not build, because then no
test noticed it. At the end the tests that failed run once more with nothing changed, and must pass: of pytest's tests,
the failed cases alone.
"""
import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import draw

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
# What make builds, and the test that needs it. The quickest come first; the first failure ends a change's tests.
TESTS = [("test_gpt2", ["./test_gpt2", "attention"]),
         *((test, [test]) for test in ("build/tests/test_attention", "build/tests/test_gradients"))]
PYTEST = [str(PYTHON if PYTHON.exists() else sys.executable), "-m", "pytest", "-x", "-q", "-p", "last_started"]
# The GPU kernels on the CPU: representative cases of test_flash.py, and the instances that they need.
FLASH_WORDS = ("kinds or before_rope or (nan and (float or sigmoid)) or truncate or last_bit or future or order "
               "or conflicts or all_zero_rows or (scale_of_zero and not identity) or last_rows")
FLASH_TESTS = [("build/on_cpu/flash.so", [*PYTEST, "dev/tests/test_flash.py", "-k", FLASH_WORDS])]
# Which of them run, and in which order they add.
SELECTION_TESTS = [("train_gpt2cu_on_cpu", [*PYTEST, "dev/tests/test_cuda.py", "-k", "any_order or which_kernels"])]
KERNEL_TESTS = [("build/on_cpu/tests/test_kernels", ["build/on_cpu/tests/test_kernels"])]
PHI_TESTS = [("build/on_cpu/tests/test_kernels", ["build/on_cpu/tests/test_kernels", "phi"])]
# What builds on the kernels: the trainer, its matmuls, its sums over ranks.
TRAINER = ("train_gpt2.cu", "cuda/graphs")
TRAINER_WORDS = ("late or waits or divergence or masks or all_zero_rows or switch_mid or several_ranks or zero_gives "
                 "or same_number or recomputing or resume or graphs or stored or z_loss or sample or often "
                 "or on_the_seed or is_measured or of_all_ranks or overlap")
TRAINER_TESTS = [("test_gpt2cu_on_cpu", ["./test_gpt2cu_on_cpu", "softmax_tied_v97_T33"]),
                 ("test_gpt2cu_on_cpu", ["./test_gpt2cu_on_cpu", "softmax_gau_T33"]),
                 ("test_gpt2cu_on_cpu", ["./test_gpt2cu_on_cpu", "ssmax_bias_h4_kv2_T33"]),
                 *SELECTION_TESTS,
                 ("train_gpt2cu_on_cpu", [*PYTEST, "dev/tests/test_cuda.py", "-k", TRAINER_WORDS])]
MATMUL_TESTS = [("build/on_cpu/tests/test_matmul", ["build/on_cpu/tests/test_matmul"]),
                ("train_gpt2cu_on_cpu", [*PYTEST, "dev/tests/test_cuda.py", "-k", "stored"])]


def pytest_of(target, name, *options):
    return [(target, [*PYTEST, f"dev/tests/{name}.py", *options])]


# The PyTorch package, which its tests build: what is quick first.
TORCH_SLOW = "equals or bfloat16 or padding_changes or interrupts or level or compiled or wrong_calls"
TORCH_NAMES = "ssmax-bias or softmax-sink or ssmax-pn or lssar or qk=l2"
TORCH_TESTS = [*pytest_of("", "test_torch", "-k", f"not ({TORCH_SLOW})"),
               *pytest_of("", "test_torch", "-k", f"wrong_calls or (equals or padding_changes) and ({TORCH_NAMES})")]
TORCH_CUDA_TESTS = pytest_of("build/on_cpu/attn_c_cuda.so", "test_torch_cuda", "-k",
                             "lssar or bias or pn or compute or checks or sink")
TORCH_MODELS = "(interface or cache or rejected or not_causal or window or attached or scaling or end) and not modeling"

BEGINS = pytest_of("train_gpt2 sample_gpt2 build/tests/logits", "test_families", "-k", "begins and Llama")

# The tests of a file: those of the first row that its path begins with.
TESTS_OF = (
    ("attention/phi.cuh", PHI_TESTS),
    ("attention/flash.cuh", FLASH_TESTS),
    ("attention/flash.cu", [*SELECTION_TESTS, *FLASH_TESTS]),
    ("attention/flash", FLASH_TESTS),
    *((file, TORCH_CUDA_TESTS) for file in ("attention/torch/attn_c_cuda.cu", "attention/torch/cuda.py")),
    ("attention/torch/transformers.py", pytest_of("", "test_torch_models", "-k", TORCH_MODELS)),
    ("attention/torch/", TORCH_TESTS),
    ("attention/modeling_attn_gpt.py",
     [*pytest_of("build/tests/test_rope", "test_rope", "-k", "transformers"),
      *pytest_of("train_gpt2 sample_gpt2 build/tests/logits", "test_huggingface", "-k", "new_model")]),
    *((file, TRAINER_TESTS) for file in TRAINER),
    ("cuda/collective.cu", [("build/on_cpu/tests/test_collective", ["build/on_cpu/tests/test_collective"]),
                            *TRAINER_TESTS]),
    ("cuda/matmul", MATMUL_TESTS),
    ("cuda/muon.cuh", [*KERNEL_TESTS, *pytest_of("train_gpt2 train_gpt2cu_on_cpu", "test_training", "-k", "muon_by")]),
    ("runtime/muon.h", pytest_of("train_gpt2", "test_training", "-k", "muon_equals")),
    ("cuda/", KERNEL_TESTS),
    ("eval/needle.c",
     pytest_of("eval_gpt2", "test_needle",
               "-k", "verdicts or finite or never_the_answer or default_length or no_bit or no_cache or "
                     "references and grouped-softmax")),
    ("eval/observe.c",
     pytest_of("eval_gpt2", "test_observe",
               "-k", "tables or 1025 or not_finite or correlation or (statistics and grouped-softmax)")),
    ("eval/choice.c", pytest_of("eval_gpt2", "test_choice")),
    ("eval/eval.c",
     pytest_of("eval_gpt2", "test_eval_runs",
               "-k", "checked or only_files or not_use or at_a_time or noticed_first or killed_evaluation")),
    ("eval/program.h", [*pytest_of("eval_gpt2", "test_eval_runs", "-k", "checked"),
                        *pytest_of("eval_gpt2", "test_needle", "-k", "no_bit and grouped")]),
    ("eval/scores.c", pytest_of("eval_gpt2", "test_eval_runs", "-k", "scores")),
    ("eval/losses.c", [*pytest_of("eval_gpt2", "test_eval", "-k", "masked or by_position or fit or example"),
                       *pytest_of("eval_gpt2", "test_eval_runs", "-k", "checked and vocabulary")]),
    ("model/rope.c", [("build/tests/test_rope", ["build/tests/test_rope"]),
                      *pytest_of("build/tests/test_rope", "test_rope", "-k", "transformers")]),
    ("runtime/tiles.c", [TESTS[1], ("test_gpt2", ["./test_gpt2"])]),
    ("train_gpt2.c", [("test_gpt2", ["./test_gpt2"]),
                      *pytest_of("train_gpt2", "test_training", "-k", "float32 or equals or threads")]),
    ("runtime/gemm_tiles.c", [("test_gpt2", ["./test_gpt2"])]),
    ("runtime/tokenizer_json.c", [("build/tests/test_tokenizer", ["build/tests/test_tokenizer"]), *BEGINS]),
    ("sample_gpt2.c", BEGINS),
    *((file, [("build/tests/test_tokenizer", ["build/tests/test_tokenizer"])])
      for file in ("runtime/tokenizer", "runtime/pretokenize.c", "runtime/search.h")),
    ("runtime/nfc.c", [("build/tests/test_tokenizer", ["build/tests/test_tokenizer"]),
                       *pytest_of("train_gpt2", "test_vocabularies", "-k", "short and qwen")]),
    ("model/weights.c", [*pytest_of("train_gpt2 sample_gpt2 build/tests/logits", "test_sample", "-k", "stored"),
                         *pytest_of("train_gpt2", "test_resume", "-k", "switch_and_back")]),
    ("model/config.c", pytest_of("train_gpt2", "test_families", "-k", "beyond")),
    ("scripts/to_gguf.py", pytest_of("train_gpt2", "test_to_gguf", "-k", "scaled or metadata_of or no_tokens")),
    ("runtime/chat.c", pytest_of("sample_gpt2 build/tests/logits", "test_chat", "-k", "date")),
    ("runtime/start.c", [("build/tests/test_process", ["build/tests/test_process"])]),
    ("runtime/mixture.c", [("build/tests/test_mixture", ["build/tests/test_mixture"])]),
    ("runtime/memory.c", [("build/tests/test_memory", ["build/tests/test_memory"])]),
    ("run/checkpoint.c", [("build/tests/test_checkpoint", ["build/tests/test_checkpoint"])]),
    ("run/metrics.c", [("build/tests/test_metrics", ["build/tests/test_metrics"])]),
    *((file, [*pytest_of("train_gpt2", "test_resume", "-k", "keep_best or switch"),
              *pytest_of("train_gpt2", "test_stops", "-k", "tokenizer")])
      for file in ("run/save.c", "run/settle.c")),
    ("run/agree.c", pytest_of("train_gpt2", "test_errors", "-k", "ranks and (differ or own) or only_one_rank")),
    ("run/report.c", [*pytest_of("train_gpt2", "test_normalizers", "-k", "describe"),
                      *pytest_of("train_gpt2 sample_gpt2 build/tests/logits", "test_sample", "-k", "trainer_samples")]),
    ("run/run.c", [*pytest_of("train_gpt2", "test_order", "-k", "share_of_the_peak"),
                   *pytest_of("train_gpt2", "test_training", "-k", "time_left")]),
    ("runtime/options.c", [("build/tests/test_options", ["build/tests/test_options"])]),
    ("runtime/file.c", [("build/tests/test_checkpoint", ["build/tests/test_checkpoint"])]),
    ("runtime/safetensors.c", [("build/tests/test_safetensors", ["build/tests/test_safetensors"])]),
    ("runtime/shards.c", [("build/tests/test_shards", ["build/tests/test_shards"])]),
    ("data/squad.py", pytest_of("train_gpt2", "test_squad")),
    ("data/shards.py", [*pytest_of("train_gpt2", "test_squad"),
                        *pytest_of("train_gpt2", "test_data", "-k", "32_bits or synced")]),
    ("data/sources.py", pytest_of("train_gpt2", "test_data", "-k", "among_the_texts or inside_out")),
    ("data/needles.py", pytest_of("train_gpt2", "test_needles")),
    ("data/", pytest_of("train_gpt2", "test_debian_docs")),
    *((file, pytest_of("train_gpt2", "test_plot_eval", "-k", "not eval_gpt2 and not without"))
      for file in ("scripts/pictures/", "scripts/report.py")),
    ("scripts/follow.py", pytest_of("train_gpt2", "test_follow")),
    ("scripts/grid", pytest_of("eval_gpt2", "test_grid")),
    ("eval_gpt2.cu", pytest_of("eval_gpt2 eval_gpt2cu_on_cpu", "test_eval_cuda",
                               "-k", "fp32 and ssmax and (mask or needle) or haystack or depend_on or doc_mask "
                                     "or zero_rows")),
    ("dev/bench/gpu_", pytest_of("eval_gpt2", "test_gpu_check", "-k", "verdict or bound or evaluator or is_timed")),
    ("", TESTS),
)

# The environment without the variables that make tests long (doc/tests.md).
LONG = ("STOPS", "FLASH_ALL", "SASS_ALL", "CUDA_ON_CPU_LONG", "MACHINES_LONG", "VOCABULARIES_LONG", "SOAK", "FOREIGN",
        "CUDA_BUILD", "GPU_REHEARSAL", "LLAMA_CPP")
SHORT = {name: value for name, value in os.environ.items() if name not in LONG}
INSTANCES = ("exp exp_recenter exp_recenter_l1 sigmoid relu2 relu6 softplus softplus_reweight any_two_sweeps float "
             "float_recenter float_two_sweeps")


def mutations():
    """(file, text, replacement) from mutations.txt: a line with the file, a line for each text, indented, and a blank
    line."""
    for block in (Path(__file__).parent / "mutations.txt").read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            file, old, new = lines
            yield file, old.strip(), new.strip()


def build(tree, target):
    """Builds; returns None, or the compiler's first error."""
    made = subprocess.run(["make", "-s", "-j2", "OPT=-O2", "CU_OPT=-O0", f"INSTANCES={INSTANCES}", "train_gpt2",
                           *target.split()], cwd=tree, capture_output=True, text=True)
    return (made.stderr.strip().splitlines() or ["make failed"])[0] if made.returncode else None


def tests_of(file):
    return next(tests for beginning, tests in TESTS_OF if file.startswith(beginning))


def verdict_of(tree, tests):
    """Runs the tests; returns (the outcome in words, the first test that fails or None). Of pytest's, that is the case
    that failed, or the whole command if none was started."""
    last = tree / "build/last_started"
    for target, command in tests:
        complaint = build(tree, target)
        if complaint:
            return f"does not build: {complaint}", None
        env = {**SHORT, "FLASH_SO": str(tree / "build/on_cpu/flash.so"),
               "ATTN_C_CUDA_SO": str(tree / "build/on_cpu/attn_c_cuda.so"),
               "TRAIN_GPT2CU": str(tree / "train_gpt2cu_on_cpu"),
               "EVAL_GPT2CU": str(tree / "eval_gpt2cu_on_cpu"),
               "LAST_STARTED": str(last), "PYTHONPATH": str(tree / "dev/mutate")}
        last.unlink(missing_ok=True)
        try:
            status = subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                    timeout=600, env=env).returncode
        except subprocess.TimeoutExpired:
            status = "no end"
        if status:
            if last.exists():
                command = [*PYTEST, last.read_text()]
            return "noticed by " + " ".join(command), (target, command)
    return "no test noticed", None


def merged(tests):
    """The tests without repetitions, and the cases of the same file and target in one command."""
    commands, cases = [], {}
    for target, command in tests:
        if "::" in command[-1]:
            file = command[-1].split("::")[0]
            cases.setdefault((target, file), {})[command[-1]] = None
        elif (target, command) not in commands:
            commands.append((target, command))
    return [*commands, *((target, [*PYTEST, *names]) for (target, _), names in cases.items())]


def places(text, old):
    """The positions of `old` in a source text, whatever line breaks either has."""
    return list(re.finditer(r"\s*".join(map(re.escape, "".join(old.split()))), text))


def try_mutation(tree, file, old, new):
    path = tree / file
    text = path.read_text()
    found = places(text, old)
    if len(found) != 1:
        return f"occurs {len(found)} times in {file}, expected once", None
    try:
        path.write_text(text[:found[0].start()] + new + text[found[0].end():])
        return verdict_of(tree, tests_of(file))
    finally:
        path.write_text(text)


def copy_tree(tree):
    ignored = shutil.ignore_patterns(".git", ".venv", ".cuda", "out", "build", "__pycache__", "*.bin", "*_gpt2")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    for name in ".cuda", ".venv":       # where the Makefile looks for CUDA's headers
        if (ROOT / name).exists():
            (tree / name).symlink_to(ROOT / name)
    return tree


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, metavar="N")
    parser.add_argument("--only", metavar="WORD", default="")
    parser.add_argument("--jobs", type=int, default=1, metavar="N",
                        help="changes at a time, each in its own copy of the tree")
    arguments = parser.parse_args()
    chosen = [m for m in mutations() if arguments.only in " ".join(m)]
    if arguments.draw:
        chosen = draw.sample(chosen, arguments.draw)
        print(f"drawn by {draw.commit()}", flush=True)
    trees = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.jobs):
            trees.put(copy_tree(Path(folder) / f"tree{i}"))

        def attempt(mutation):
            tree, start = trees.get(), time.time()
            verdict, test = try_mutation(tree, *mutation)
            trees.put(tree)
            file, old, new = mutation
            print(f"{'ok' if test else 'HOLE'}  {file}: {old}  ->  {new}\n      {verdict}, {time.time() - start:.0f} s",
                  flush=True)
            return test

        with ThreadPoolExecutor(arguments.jobs) as pool:
            results = list(pool.map(attempt, chosen))
        # A test that fails without any change detects nothing.
        verdict, failing = verdict_of(trees.get(), merged(filter(None, results)))
        if failing or verdict != "no test noticed":
            sys.exit(f"with nothing changed: {verdict}")
    holes = results.count(None)
    print(f"{len(chosen) - holes} passed, {holes} failed")
    return holes > 0


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())

"""Evaluation, decoding and prefill of a 124M model on the CPU, next to transformers and to what the machine allows.

    .venv/bin/python dev/bench/inference.py [--rounds 3] [--cases evaluation,decoding,prefill] [--dtypes fp32,bf16]
    .venv/bin/python dev/bench/inference.py --cases decoding --model data/smollm2

    evaluation   eval_gpt2 --task loss at T = 10,240, next to the trainer's validation at the same T
    decoding     256 tokens after a prompt of one, one text: sample_gpt2 next to transformers' generate(), both with
                 their key-value caches. "bf16 in fp32": both compute in float32, from a folder in bfloat16
    prefill      a prompt of 8,000 tokens: sample_gpt2 next to transformers

Each round runs every measurement once, each in a process of its own, and every second round in the opposite order. A
figure is the median of the rounds, and a ratio the median of the rounds' own ratios. The weights are random, unless
--model names a folder. The floor of decoding is the time to read the weights and the cache at the bandwidth of
torch.sum() in the same run; that of prefill is the time of the matmuls and of causal attention at the best rate of
torch.matmul().
"""
import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpu_step import ENVIRONMENT, ROOT, THREADS, VOCAB, machine, matmul_rate, some_of, write_shard
from gpu_report import table_text

LONG, PROMPT, NEW = 10240, 8000, 256
STORED = "bf16 in fp32"
BYTES = {"fp32": 4, STORED: 2, "bf16": 2}    # of a weight, as the floor of decoding reads it


# ---------------------------------------------------------------- PyTorch's side, in a child process

def bandwidth():
    """The most bytes per second that torch.sum() reads, of 1 GiB."""
    import torch
    x = torch.ones(1 << 28)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        x.sum()
        seconds.append(time.perf_counter() - start)
    return 4 * x.numel() / min(seconds)


def transformers_seconds(what, dtype, folder):
    """Of decoding NEW tokens after the first one, or of reading PROMPT tokens."""
    import torch
    import transformers
    dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval()
    torch.manual_seed(0)
    with torch.inference_mode():
        if what == "prefill":
            ids = torch.randint(0, VOCAB - 1, (1, PROMPT))
            start = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - start
        times = []
        for count in (1, NEW + 1):    # the difference is the time of the tokens after the first
            start = time.perf_counter()
            model.generate(torch.tensor([[1]]), attention_mask=torch.ones(1, 1, dtype=torch.long), do_sample=False,
                           min_new_tokens=count, max_new_tokens=count, pad_token_id=0)
            times.append(time.perf_counter() - start)
        return times[1] - times[0]


# ---------------------------------------------------------------- one measurement

class Bench:
    def __init__(self, folder, model):
        self.folder = Path(folder)
        self.model = Path(model) if model else self.new_model("fp32")
        self.stored = None if model else self.new_model("bf16")
        config = json.loads((self.model / "config.json").read_text())
        self.layers, C = config["num_hidden_layers"], config["hidden_size"]
        d = config.get("head_dim") or C // config["num_attention_heads"]
        self.queries, self.keys = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
        self.layer_weights = self.layers * (2 * C * (self.queries + self.keys) + 3 * C * config["intermediate_size"])
        self.head_weights = -(-config["vocab_size"] // 128) * 128 * C

    def new_model(self, dtype):
        """A 124M with random weights, stored in this type."""
        out = self.folder / dtype
        write_shard(self.folder / "random_train_000001.bin", 2 * LONG + 2)
        self.run(ROOT / "train_gpt2", "--train-data", self.folder / "random_train_*.bin", "--model", "124M",
                 "--batch", 1, "--seq-len", 1024, "--steps", 1, "--lr", 0, "--warmup", 0, "--dtype", dtype,
                 "--out", out)
        return next(out.glob("ckpt/step-*"))

    def folder_of(self, dtype):
        return self.stored if dtype == STORED else self.model

    def run(self, *words):
        result = subprocess.run(list(map(str, words)), capture_output=True, text=True, errors="replace",
                                env=ENVIRONMENT)
        if result.returncode:
            sys.exit(f"inference.py: {' '.join(map(str, words))[:200]} ended with {result.returncode}:\n"
                     f"{result.stderr[-2000:]}")
        return result

    def torch(self, function, *arguments):
        """What a function above returned in a process of its own."""
        words = [sys.executable, __file__, "--child", function.__name__, *arguments]
        return float(self.run(*words).stdout.splitlines()[-1])

    def evaluation(self, dtype):
        """Tokens per second."""
        return float(re.search(r"([\d.]+) tokens/s", self.run(
            ROOT / "eval_gpt2", "--model", self.model, "--data", self.folder / "random_train_*.bin", "--seq-lens", LONG,
            "--dtype", dtype).stderr)[1])

    def forward(self, dtype):
        """The trainer's validation: its forward pass and loss, in the memory that training uses."""
        data, windows = self.folder / "random_train_*.bin", 2
        said = self.run(ROOT / "train_gpt2", "--train-data", data, "--val-data", data, "--model", "124M", "--batch", 1,
                        "--seq-len", LONG, "--dtype", dtype, "--steps", 1, "--lr", 0, "--warmup", 0, "--val-every", 1,
                        "--val-tokens", windows * LONG, "--sample-every", 0, "--profile").stdout
        return 1e3 * windows * LONG / float(re.search(r"^validation, samples, checkpoints +([\d.]+) ", said, re.M)[1])

    def sample(self, dtype, prompt, new_tokens):
        """Tokens per second of reading a prompt of so many tokens, and of the text."""
        prompt = ",".join(str((7919 * t + 1) % (VOCAB - 1)) for t in range(prompt))
        words = self.run(ROOT / "sample_gpt2", "--model", self.folder_of(dtype), "--prompt", prompt, "--max-new-tokens",
                         new_tokens, "--temperature", 0, "--dtype", "bf16" if dtype == "bf16" else "fp32").stderr
        return [float(number) for number in re.findall(r"([\d.]+) tokens/s", words)]

    def ours(self, what, dtype):
        if what == "decoding":
            return self.sample(dtype, 1, NEW + 1)[1]
        return self.sample(dtype, PROMPT, 1)[0]

    def transformers(self, what, dtype):
        return ((NEW if what == "decoding" else PROMPT)
                / self.torch(transformers_seconds, what, dtype, self.folder_of(dtype)))

    def floor(self, what, dtype):
        """The most tokens per second that the machine allows."""
        if what == "decoding":
            cache = self.layers * 2 * self.keys * 4 * NEW / 2    # float32, on average
            return self.torch(bandwidth) / ((self.layer_weights + self.head_weights) * BYTES[dtype] + cache)
        flop = 2 * self.layer_weights + self.layers * 2 * self.queries * (PROMPT + 1)
        return 1e9 * self.torch(matmul_rate, dtype) / flop


MEASUREMENTS = {"evaluation": ("evaluation", "forward"), "decoding": ("ours", "transformers", "floor"),
                "prefill": ("ours", "transformers", "floor")}


def measure(bench, options):
    """figures[case, dtype, side]: a list, one number for each round."""
    figures = {}
    jobs = [(case, dtype, side) for case in options.cases for dtype in options.dtypes for side in MEASUREMENTS[case]
            if dtype != STORED or (case == "decoding" and bench.stored)]
    for number in range(options.rounds):
        for case, dtype, side in jobs if number % 2 == 0 else jobs[::-1]:
            method = getattr(bench, side)
            figure = method(dtype) if case == "evaluation" else method(case, dtype)
            figures.setdefault((case, dtype, side), []).append(figure)
            print(f"round {number + 1}: {case} {dtype} {side}: {figure:.1f} tok/s", file=sys.stderr, flush=True)
    return figures


def table(cases, figures):
    rows = []
    for case in cases:
        first, second = MEASUREMENTS[case][:2]
        for dtype in (dtype for dtype in BYTES if (case, dtype, first) in figures):
            ours, theirs = figures[case, dtype, first], figures[case, dtype, second]
            ratio = statistics.median(a / b for a, b in zip(ours, theirs))
            row = [f"{case}, {dtype}", f"{statistics.median(ours):.1f}",
                   {"forward": "the trainer's validation"}.get(second, second),
                   f"{statistics.median(theirs):.1f}", f"{ratio:.2f}"]
            limit = figures.get((case, dtype, "floor"))
            row += ([f"{statistics.median(limit):.1f}", f"{statistics.median(a / b for a, b in zip(ours, limit)):.0%}"]
                    if limit else ["", ""])
            rows.append(row)
    return table_text(["case", "ours tok/s", "compared with", "its tok/s", "ours/its", "floor tok/s", "of floor"], rows)


def main():
    if sys.argv[1:2] == ["--child"]:
        import torch
        torch.set_num_threads(THREADS)
        measured = {function.__name__: function for function in (bandwidth, matmul_rate, transformers_seconds)}
        return print(measured[sys.argv[2]](*sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for flag, names in (("--cases", MEASUREMENTS), ("--dtypes", BYTES)):
        parser.add_argument(flag, type=some_of(names), default=",".join(names),
                            help="comma-separated (default: %(default)s)")
    parser.add_argument("--model", metavar="DIR", help="a model's folder, for decoding (default: 124M, random weights)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.model and options.cases != ["decoding"]:
        parser.error("--model: only with --cases decoding")
    subprocess.run(["make", "-s", "train_gpt2", "eval_gpt2", "sample_gpt2"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory(prefix="inference_") as folder:
        figures = measure(Bench(folder, options.model), options)
    command = " ".join(["dev/bench/inference.py", *sys.argv[1:]])
    print(f"{machine()}; {datetime.date.today().isoformat()}; {THREADS} threads, {options.rounds} "
          f"rounds\n{command}\n")
    print(table(options.cases, figures))


if __name__ == "__main__":
    main()

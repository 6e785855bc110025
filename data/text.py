"""Converts text to shards: files and folders of plain text, JSON, JSON Lines and Parquet, also compressed.

    .venv/bin/python data/text.py ~/books --out data/books
    .venv/bin/python data/text.py ~/books --out data/books --tokenizer own --vocab 8192  # with a vocabulary of its own

A plain text file is one document, or several with --separator; a JSONL line and a Parquet row are one document each.
"""

import shards
import sources
import vocabulary

SAMPLE = 1 << 28     # characters to train a vocabulary on


def main():
    parser = shards.add_flags(shards.parser(__doc__), "text", 0.05, own=True)
    vocabulary.add_flag(parser, 4096, "the text")
    sources.add_flags(parser, plain=True)
    parser.add_argument("inputs", nargs="+", help="files and folders")
    args = parser.parse_args()
    reader = sources.reader(args, args.inputs)
    if reader.one_each():
        shards.check_count(args, len(reader.files))
    tokenizer, settings = vocabulary.choose(args, reader.settings(), lambda: reader.sample(SAMPLE),
                                            f"the text, or {SAMPLE:,} characters of it", inputs=reader.inputs())
    shards.write(args, reader.documents, tokenizer, settings, reader=reader)


if __name__ == "__main__":
    shards.run(main)

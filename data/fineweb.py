"""Converts FineWeb or FineWeb-Edu, web text filtered for pretraining, to shards.

    .venv/bin/python data/fineweb.py --version 10B                 # streams it from the Hugging Face hub
    .venv/bin/python data/fineweb.py --version 10B --input FOLDER  # from Parquet files on this machine

10B tokens are 20 GB of shards. You can train on the first finished shards while the others are being made.
"""
import argparse

import shards
import sources
import vocabulary

#            version    repository                   files                     shards' name    val fraction
VERSIONS = {"10B":      ("HuggingFaceFW/fineweb",     "sample/10BT/*.parquet",  "fineweb",      0.01),
            "100B":     ("HuggingFaceFW/fineweb",     "sample/100BT/*.parquet", "fineweb",      0.001),
            "edu":      ("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet",  "edu_fineweb",  0.01),
            "edu-100B": ("HuggingFaceFW/fineweb-edu", "sample/100BT/*.parquet", "edu_fineweb",  0.001)}


def main():
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--version", choices=VERSIONS, default="10B",
                       help="the sample, named by its number of tokens; edu has 10B")
    version = first.parse_known_args()[0].version
    repo, pattern, name, val_fraction = VERSIONS[version]
    parser = shards.parser(__doc__, parents=[first])
    shards.add_flags(parser, name, val_fraction, out=shards.DATA / f"fineweb-{version}")
    parser.add_argument("--input", nargs="+", help="Parquet files, or folders with them, to read instead of the hub")
    sources.add_flags(parser)
    args = parser.parse_args()
    reader = sources.reader(args, args.input, (repo, [pattern]))
    shards.write(args, reader.documents, vocabulary.load(args.tokenizer), reader.settings(), reader=reader)


if __name__ == "__main__":
    shards.run(main)

"""Cuts the validation documents of a dataset into chunks, so that no sequence of an evaluation spans two documents.

    .venv/bin/python data/chunks.py data/docs --tokens 4096 --out data/docs-chunks

Every chunk has --tokens tokens of one document, from its start on; what is left at a document's end is dropped. So at
every length that divides --tokens, `eval_gpt2` reads the same text, and each of its sequences lies inside one document.
A mask leaves out the one target that would cross a border: the first token of the next document.
"""
from pathlib import Path

import shards    # first, because it says what to do if packages are missing

import numpy as np

import needles
import vocabulary
from shards import INPUT, DataError


def chunks(tokens, end_of_text, size):
    """The chunks of all documents in order, as (tokens, whether a document starts there)."""
    starts = np.append(np.flatnonzero(tokens == end_of_text), len(tokens))
    for start, end in zip(starts, starts[1:]):
        for at in range(start, end - size + 1, size):
            yield tokens[at:at + size], at == start


def flags():
    parser = shards.parser(__doc__)
    parser.add_argument("source", type=Path, help="folder of a dataset, with its tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the chunks")
    shards.add_foreign_folder(parser)
    parser.add_argument("--tokens", type=shards.count, default=4096, help="tokens of a chunk")
    return parser


def main():
    args = flags().parse_args()
    val = needles.source_shards(args.source, "val")
    path = args.out / val[0].name
    for name in needles.shards_in_copy(args):
        if name not in (path.name, path.with_suffix(".mask").name):
            raise needles.other_dataset(args, name)
    tokenizer = vocabulary.load(str(args.source))
    text = np.concatenate([shards.read_shard(path) for path in val])
    found = list(chunks(text, tokenizer.end_of_text, args.tokens))
    if not found:
        raise DataError(INPUT, f"{args.source}: no validation document has {args.tokens:,} tokens.\n"
                               "  Pass a smaller --tokens, or prepare the dataset with a larger --val-fraction.")
    masks = [np.ones(args.tokens, np.uint8) for _ in found]
    for mask, (_, starts) in zip(masks, found):
        mask[0] = not starts
    # Sequences overlap by one token, so the last one needs a token behind it, which does not count.
    tokens = np.concatenate([chunk for chunk, _ in found] + [text[:1]])
    mask = np.concatenate([*masks, np.zeros(1, np.uint8)])
    shards.check_owner(args)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer.files.items():
        shards.write_atomically(args.out / name, content)
    shards.write_atomically(path.with_suffix(".mask"), shards.header(len(mask), shards.MASK) + mask.tobytes())
    shards.write_shard(path, tokens)
    print(f"{args.out}: {len(found):,} chunks of {args.tokens:,} tokens from "
          f"{sum(starts for _, starts in found):,} documents.\n  --data {shards.shell_pattern(path, '')}")


if __name__ == "__main__":
    shards.run(main)

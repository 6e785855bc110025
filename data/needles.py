"""Copies a dataset, with a needle in some of its training sequences, so that a small model learns to find one.

    .venv/bin/python data/needles.py data/docs --seq-len 128 --digits 3 --out data/docs-needles

A training sequence is the trainer's: a window of --seq-len tokens of all shards in order. In each one that is chosen,

    The special magic Tokyo number is: 810.

stands at a random depth, and at the end the question and its answer,

    What is the special magic Tokyo number? The special magic Tokyo number is: 810.

as in the prompts of `eval_gpt2 --task needle --chat raw`. With --questions 3, question and answer stand there three
times, which teaches a small model to copy after far fewer needles. The sequence starts with end-of-text, and its last
tokens make way; the number of tokens stays. Sequences in which a document starts are not chosen. Cities come from
data/cities.txt. Validation shards are copied unchanged.
"""
import hashlib
import json
import random
from pathlib import Path

import shards    # first, because it says what to do if packages are missing

import numpy as np

import vocabulary
from shards import DATA, INPUT, MOST_BYTES, USAGE, DataError, files
from sources import leads_inside

# eval/needle.c has the same texts, and encodes them in the same pieces.
NEEDLE, NUMBER, NEEDLE_END = "\nThe special magic {city} number is:", " {digits}.", "\n"
QUESTION = "\nWhat is the special magic {city} number? The special magic {city} number is:"


def cities():
    return (DATA / "cities.txt").read_text("utf-8").splitlines()


def source_shards(folder, split):
    found = sorted(folder.glob(f"*_{split}_*.bin"))
    if not found:
        raise DataError(INPUT, f"{folder}: no *_{split}_*.bin. Expected a dataset that a script in data/ has made.")
    if linked := [path for path in found if path.is_symlink() and not leads_inside(path, folder.resolve())]:
        raise DataError(INPUT, f"{linked[0]}: expected a file in its folder, found a link out of it, which could "
                               "reveal another file.\n  Copy the file into the folder.")
    if masked := [path for path in found if path.with_suffix(".mask").exists()]:
        raise DataError(INPUT, f"{masked[0]}: has a mask, which would no longer fit. Use a dataset without masks.")
    return found


def number(draw, digits):
    """A random number without leading zeros."""
    return str(draw.randrange(10 ** (digits - 1), 10 ** digits))


def choose(tokens, first, args, end_of_text, draw):
    """The offsets of the sequences to change: a random fraction of those that lie in this shard, the first of which
    starts at `first`."""
    starts = range(first, len(tokens) - args.seq_len + 1, args.seq_len)
    wanted = round(args.fraction * len(starts))
    able = [at for at in starts if not (tokens[at + 1:at + args.seq_len] == end_of_text).any()]
    if wanted > len(able):
        raise DataError(USAGE, f"--fraction {args.fraction}: only {len(able):,} of {len(starts):,} sequences "
                               f"of {args.seq_len} tokens have no start of a document in them.\n  Pass a smaller "
                               "--fraction or --seq-len.")
    return sorted(draw.sample(able, wanted))


def with_needles(tokens, first, args, tokenizer, draw, names):
    """A shard's tokens with needles, and how many."""
    places = choose(tokens, first, args, tokenizer.end_of_text, draw)
    facts = [(draw.choice(names), number(draw, args.digits), draw.random()) for _ in places]
    texts = [text.format(city=city, digits=digits) for city, digits, _ in facts
             for text in (NEEDLE, NUMBER, NEEDLE_END, QUESTION)]
    pieces = tokenizer.encode_inside(texts)
    out = tokens.copy()
    for i, (at, (city, _, depth)) in enumerate(zip(places, facts)):
        head, digits, end, question = pieces[4 * i:4 * i + 4]
        needle, tail = np.concatenate([head, digits, end]), np.concatenate([question, digits] * args.questions)
        room = args.seq_len - 1 - len(needle) - len(tail)
        if room < 1:
            raise DataError(USAGE, f"--seq-len {args.seq_len}: too short, the needle, questions and answers for {city} "
                                   f"have {len(needle) + len(tail)} tokens.")
        hay, before = tokens[at + 1:at + 1 + room], int(room * depth)
        out[at:at + args.seq_len] = np.concatenate([[tokenizer.end_of_text], hay[:before], needle, hay[before:], tail])
    return out, len(places)


def settings_of(args, sources):
    """What determines the output."""
    digest = hashlib.sha256((DATA / "cities.txt").read_bytes())
    for path in (*sources, args.source / "tokenizer.json"):
        digest.update(files.read(path, MOST_BYTES))
    return {"sha256": digest.hexdigest(), "seq_len": args.seq_len, "fraction": args.fraction, "digits": args.digits,
            "questions": args.questions, "seed": args.seed}


def shards_in_copy(args):
    """The names of the shards and masks in --out, which may not be the dataset itself."""
    if args.out.exists() and args.out.samefile(args.source):
        raise DataError(USAGE, f"--out {args.out}: it is the dataset itself.\n  Pass another --out for the copy.")
    return sorted(path.name for split in shards.FIRST for path in args.out.glob(f"*_{split}_*"))


def other_dataset(args, name):
    return DataError(USAGE, f"--out {args.out}: it holds another dataset ({name}).\n  Pass another --out.")


def recorded(args, settings):
    """What needles.json says of the shards in --out: {} without shards, no "needles" if the run was killed. Rejects a
    folder with other shards."""
    state, names = args.out / "needles.json", shards_in_copy(args)
    if not names:
        return {}
    if not state.exists():
        raise other_dataset(args, names[0])
    found = json.loads(files.read(state, files.JSON))
    if found["settings"] != settings:
        raise DataError(USAGE, f"{args.out} holds needles made with other settings or from another dataset.\n"
                               f"  Pass another --out, or remove the folder to start over.")
    return found


def write(args, train, val, tokenizer, settings):
    """Writes the copy, and its settings first, so that a rerun knows what a killed run has left."""
    def record(**more):
        text = json.dumps({"settings": settings, **more}, indent=1)
        shards.write_atomically(args.out / "needles.json", text.encode() + b"\n")
    record()
    names, start, needles = cities(), 0, 0
    for path in train:
        tokens = shards.read_shard(path)
        draw = random.Random(f"{args.seed} {start}")
        changed, count = with_needles(tokens, -start % args.seq_len, args, tokenizer, draw, names)
        shards.write_shard(args.out / path.name, changed)
        start, needles = start + len(tokens), needles + count
    for name, content in tokenizer.files.items():
        shards.write_atomically(args.out / name, content)
    for path in val:      # last: a folder with validation shards is complete
        shards.write_atomically(args.out / path.name, files.read(path, MOST_BYTES))
    record(needles=needles)
    print(f"{args.out}: {start:,} tokens to train on, with {needles:,} needles of {args.digits} digits.")


def flags():
    parser = shards.parser(__doc__)
    parser.add_argument("source", type=Path, help="folder of a dataset, with its tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the copy")
    shards.add_foreign_folder(parser)
    parser.add_argument("--seq-len", type=shards.count, default=1024, help="the trainer's --seq-len")
    parser.add_argument("--fraction", type=shards.fraction, default=0.1,
                        help="fraction of the training sequences that get a needle")
    parser.add_argument("--digits", type=int, choices=range(1, 19), metavar="1-18", default=7,
                        help="digits of the numbers")
    parser.add_argument("--questions", type=shards.count, default=1, help="how often question and answer are repeated")
    parser.add_argument("--seed", type=int, default=1337,
                        help="for the choice of sequences, cities, numbers and depths")
    return parser


def main():
    args = flags().parse_args()
    train, val = source_shards(args.source, "train"), source_shards(args.source, "val")
    tokenizer = vocabulary.load(str(args.source))
    settings = settings_of(args, [*train, *val])
    recorded(args, settings)      # before anything is written
    shards.check_owner(args)
    args.out.mkdir(parents=True, exist_ok=True)
    with shards.lock(args.out, "needles"):
        if "needles" in (found := recorded(args, settings)):
            print(f"{args.out}: {found['needles']:,} needles, already there.")
        else:
            write(args, train, val, tokenizer, settings)
    print("  " + " ".join(f"--{split}-data {shards.shell_pattern(args.out, f'/*_{split}_*.bin')}"
                          for split in shards.FIRST))


if __name__ == "__main__":
    shards.run(main)

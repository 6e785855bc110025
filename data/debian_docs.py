"""Collects prose from the documentation in Debian packages, cleaned and without duplicates, and converts it to shards.

    .venv/bin/python data/debian_docs.py                                    # downloads the packages with apt-get
    .venv/bin/python data/debian_docs.py --debs FOLDER --packages perl-doc  # from .deb files on this machine
    .venv/bin/python data/debian_docs.py --tokenizer own --vocab 4096       # with a vocabulary trained on the text

Markup, code, tables and what does not read like English are left out, and so is every paragraph that has occurred
before, whatever its digits and punctuation. The hash of a document decides whether it is for validation.
"""
import functools
import gzip
import hashlib
import itertools
import os
import re
import subprocess
import tempfile
import zlib
from pathlib import Path

import dictd
import markup
import shakespeare
import shards
import sources
import vocabulary
from shards import INPUT, DataError, files, many

MIN_WORDS = 50          # of a document
ENTRIES = 50            # of a dictionary in a document


# ---- documents of a file: lists of paragraphs

def text_of(path):
    with files.open_regular(path, files.TEXT) as file:
        whole = gzip.open(file) if path.suffix == ".gz" else file
        return whole.read(files.TEXT).decode("utf-8", "replace")


def rst(path, known):
    yield markup.rst(text_of(path), known)


def pod(path, known):
    yield markup.pod(text_of(path), known)


def gcide(path, known):
    entries = (entry for entry in map(dictd.gcide, dictd.entries(path)) if entry and not known(entry))
    while group := list(itertools.islice(entries, ENTRIES)):
        yield group


#           name            package              its files, reader
SOURCES = {"linux-doc":   (r"linux-doc-[\d.]+", r"usr/share/doc/[^/]+/Documentation/(?!translations/).*\.(rst|txt)\.gz",
                           rst),
           "perl-doc":    (r"perl-doc",          r"usr/share/perl/.*\.pod",                pod),
           "python3-doc": (r"python3\.\d+-doc",  r"usr/share/doc/.*/_sources/.*\.rst\.txt", rst),
           "dict-gcide":  (r"dict-gcide",        r"usr/share/dictd/gcide\.dict\.dz",        gcide)}
OTHER = "shakespeare"    # data/shakespeare.py's works


# ---- packages

def run(*command, **options):
    """The output of a Debian program, in English."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, **options)
    except FileNotFoundError:
        raise DataError(INPUT, f"{command[0]}: not found. This script needs apt-get and dpkg-deb, so run it on Debian "
                               "or Ubuntu.\n  dpkg-deb alone suffices with --debs.") from None
    if result.returncode:
        raise DataError(INPUT, f"{' '.join(map(str, command))} failed:\n  {result.stderr.strip()[-600:]}")
    return result.stdout


def find(folder, package):
    """The package's newest .deb file in a folder, NAME_VERSION_ARCHITECTURE.deb, or None."""

    def version(path):
        return [[int(part) if part.isdigit() else part for part in re.split(r"(\d+)", word)]
                for word in path.name.split("_")[:2]]

    return max((path for path in Path(folder).glob("*.deb") if re.fullmatch(package, path.name.split("_")[0])),
               key=version, default=None)


def download(name, package):
    """The .deb file of a package, or of the dependency of that name if the package is empty; data/cache keeps it."""
    cache = shards.DATA / "cache/debs"
    cache.mkdir(parents=True, exist_ok=True)
    if not find(cache, package):
        depends = re.findall(r"Depends: (\S+)", run("apt-cache", "depends", name))
        wanted = next((one for one in [name, *depends] if re.fullmatch(package, one)), name)
        print(f"downloading {wanted}")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            try:
                run("apt-get", "download", "-q", wanted, cwd=folder)
            except DataError as error:
                raise DataError(INPUT, f"{error}\n  Run apt-get update first. Without a network, pass the folder of "
                                       "the .deb files with --debs.") from None
            for path in Path(folder).glob("*.deb"):
                path.replace(cache / path.name)
    return find(cache, package)


def deb_of(name, folder):
    package = SOURCES[name][0]
    path = find(folder, package) if folder else download(name, package)
    if not path:
        if folder and not folder.is_dir():
            raise DataError(INPUT, f"{folder}: not a folder.\n  Pass the folder of the .deb files with --debs.")
        wanted = f"{name}'s .deb file" + f", whose name matches {package}" * (package != name)
        raise DataError(INPUT, f"{folder or shards.DATA / 'cache/debs'}: expected {wanted}, found none.\n"
                               "  Download it there, or leave it out of --packages.")
    return path


def files_of(deb, pattern, folder):
    """The package's files that match, unpacked into a folder, in order of their names. Links are not followed, and
    only regular files are opened."""
    run("dpkg-deb", "-x", str(deb), folder)
    found = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found
                  if path.is_file() and not path.is_symlink() and re.fullmatch(pattern, str(path.relative_to(folder))))


# ---- all documents

class Known:
    """Has a paragraph occurred before? Those that differ only in digits, punctuation and case are the same."""

    def __init__(self):
        self.hashes, self.repeated = set(), 0

    def __call__(self, paragraph):
        letters = re.sub(r"[\W\d_]+", " ", paragraph).strip().lower()
        key, before = hashlib.blake2b(letters.encode(), digest_size=8).digest(), len(self.hashes)
        self.hashes.add(key)
        self.repeated += len(self.hashes) == before
        return len(self.hashes) == before


def documents_of(name, deb, known):
    """The texts of a package's documents."""
    files, texts, repeated = 0, [], known.repeated
    with tempfile.TemporaryDirectory() as folder:
        for path in files_of(deb, SOURCES[name][1], folder):
            files += 1
            try:
                texts += ["\n\n".join(paragraphs) for paragraphs in SOURCES[name][2](path, known)]
            except (DataError, OSError, EOFError, zlib.error) as error:
                raise DataError(INPUT, f"{deb}: {path.relative_to(folder)}: {sources.first_line(error)}.\n"
                                       f"  The package is damaged. Remove it and download it again, or leave {name} "
                                       "out of --packages.") from None
    texts = [text for text in texts if len(text.split()) >= MIN_WORDS]
    if not texts:
        raise DataError(INPUT, f"{deb}: found no prose in files that match {SOURCES[name][1]}.")
    print(f"{deb.name}: {many(files, 'file')}, {many(len(texts), 'document')}, {sum(map(len, texts)):,} characters; "
          f"{many(known.repeated - repeated, 'paragraph')} had occurred before.")
    return texts


def all_documents(debs, other):
    known = Known()
    texts = [text for name, deb in debs.items() for text in documents_of(name, deb, known)]
    return texts + (shakespeare.works() if other else [])


def main():
    parser = shards.add_flags(shards.parser(__doc__), "debian_docs", 0.02, own=True)
    parser.add_argument("--packages", nargs="+", choices=[*SOURCES, OTHER], default=[*SOURCES, OTHER], metavar="NAME",
                        help=f"which of {', '.join(SOURCES)} and {OTHER}")
    parser.add_argument("--debs", type=Path, help="folder with the .deb files, instead of downloading them")
    vocabulary.add_flag(parser, 4096, "the text")
    args = parser.parse_args()
    debs = {name: deb_of(name, args.debs) for name in SOURCES if name in args.packages}
    texts = functools.cache(lambda: all_documents(debs, OTHER in args.packages))
    settings = (sources.settings([sources.File(str(path), path.stat().st_size) for path in debs.values()])
                | {OTHER: OTHER in args.packages})
    tokenizer, settings = vocabulary.choose(args, settings, texts, "all documents")

    def encode(batch):
        return [(ids, None, shards.in_validation(text, args.val_fraction))
                for text, ids in zip(batch, tokenizer.encode_batch(batch))]

    shards.write(args, lambda skip: texts()[skip:], tokenizer, settings, encode=encode)


if __name__ == "__main__":
    shards.run(main)

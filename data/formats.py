"""Documents in one file, whose content, and where that can't its name, decides its compression, encoding and format.

The bytes of a file may be compressed by gzip, zstd, bzip2 or xz, and are UTF-8, or UTF-16 or UTF-32 after a byte order
mark. JSON is an array of objects or one object per line (JSON Lines); Parquet has one row per document; prose is one
document, or several between separators. Invalid bytes become U+FFFD and are counted.

Nothing here holds more of a file than a few times `limit`, the size of the largest document that is read.
"""
import bz2
import codecs
import fnmatch
import functools
import gzip
import importlib
import itertools
import json
import lzma
import re
import shlex
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from shards import INPUT, USAGE, DataError, files

CHUNK, SMALL = 1 << 20, 1 << 14
WINDOW = 1 << 31         # zstd's largest
HEAD = 1 << 16           # bytes at the start of a file that decide what it is
MAX_EXPANSION = 1000     # bytes of text for a byte of a file, beyond the size of a document
FREE_RECORDS = 10**6     # of a file, even if it has fewer bytes
BATCH_BYTES = 1 << 28    # of a Parquet column, at a time
SPARE = 1 << 15          # what a Parquet page has beside its values
FORMATS = {".txt": "prose", ".md": "prose", ".parquet": "parquet",
           **dict.fromkeys((".json", ".jsonl", ".jsonlines", ".ndjson"), "json")}
COMPRESSIONS = {".gz": rb"\x1f\x8b", ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
                ".xz": rb"\xfd7zXZ\0", ".bz2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"}       # what their files start with
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
         codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}   # UTF-32's start with those of UTF-16


class Bad(DataError):
    """A record that cannot be read: the file, the place in it, and what is wrong."""

    def __init__(self, text):
        super().__init__(INPUT, text)


class TooLong(Bad):
    """A document above the limit."""


def library(name, use):
    """Imports a Python package that only some of the sources need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(USAGE, f"{use} needs the Python package {name.split('.')[0]}, which is not installed. Run: "
                               f"{shlex.quote(sys.executable)} -m pip install {name.split('.')[0]}") from None


def first_line(error):
    return str(error).strip().split("\n")[0][:200].rstrip(".")


@dataclass
class File:
    """A file to read: a local one if hub is None, otherwise one in that file system."""
    name: str
    size: int
    hub: object = None
    format: str = None      # one of FORMATS
    mtime: int = 0          # in ns

    def open(self):
        return HubStream(self.hub.open(self.name, "rb")) if self.hub else files.open_regular(self.name)


class HubFailure(Exception):
    """A failure while reading from the hub. Most are OSErrors, which would pass for corrupt data."""


class HubStream:
    """An open file on the hub, which raises HubFailure for whatever goes wrong."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()

    def read(self, *size):
        try:
            return self.stream.read(*size)
        except Exception as error:
            raise HubFailure from error

    read1 = read


# ---- what a file is

def suffix_of(name):
    """The suffix in lower case, without that of a compression."""
    path = Path(name.lower())
    return path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix


def format_of(name, prose=""):
    """The format that a name stands for, or None. prose: patterns of names, between commas"""
    name = Path(name.lower())
    names = [name.name, name.stem] if name.suffix in COMPRESSIONS else [name.name]
    if any(fnmatch.fnmatch(one, pattern.strip().lower()) for one in names for pattern in prose.split(",")):
        return "prose"
    return FORMATS.get(suffix_of(str(name)))


def compression_of(head):
    return next((suffix for suffix, start in COMPRESSIONS.items() if re.match(start, head)), None)


def encoding_of(head):
    return next((codec for mark, codec in MARKS.items() if head.startswith(mark)), "utf-8")


def is_text(head):
    return encoding_of(head) != "utf-8" or not (b"\0" in head or head.startswith(b"%PDF-"))


def sniff(file, prose="", column="text"):
    """The format of a local file: "binary" where it isn't text, None if it is text of unknown format. Objects are JSON
    Lines whatever the name, if they have the column."""
    with file.open() as source:
        head = source.read(HEAD)
    if head.startswith(b"PAR1"):
        return "parquet"
    known = format_of(file.name, prose)
    if compression_of(head):
        if known:
            return known
        try:
            head = next(filter(None, uncompressed(file)), b"")[:HEAD]
        except Bad:
            return "binary"
    if known == "parquet":
        return known
    if not is_text(head):
        return "binary"
    start = head.decode(encoding_of(head), "ignore").removeprefix("\ufeff")
    is_json = re.match(r'\s*\{[ \t]*"[^"\n]*"[ \t]*:', start) and json.dumps(column) in start
    return known or ("json" if is_json else None)


# ---- bytes of a file

class Sentinel:
    """A file of zstd frames, with one more at its end. The library ends quietly in the middle of a frame, but then
    the contents of this one, which no text contains, don't come last."""
    CONTENT = b"\xff" * 1000

    def __init__(self, source, zstandard):
        self.source, self.frame = source, zstandard.ZstdCompressor().compress(self.CONTENT)

    def read(self, size):
        data = self.source.read(size)
        if not data:
            data, self.frame = self.frame, b""
        return data


def zstd_chunks(source):
    zstandard = library("zstandard", "a file compressed by zstd")
    whole, held, error = Sentinel(source, zstandard), b"", EOFError()
    stream = zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(whole, CHUNK, read_across_frames=True)
    try:
        while data := stream.read1(CHUNK):
            held += data
            yield held[:-len(Sentinel.CONTENT)]
            held = held[-len(Sentinel.CONTENT):]
    except zstandard.ZstdError as found:
        if whole.frame:
            error = OSError(first_line(found))
    if held != Sentinel.CONTENT:
        yield held
        raise error


def stream_chunks(source, decompressor):
    """The bytes of bzip2 or xz streams, between which there may be zeros."""
    decoder = None
    while data := source.read(SMALL):      # what follows a stream is copied, and there may be many in a chunk
        while data := data if decoder else data.lstrip(b"\0"):
            decoder = decoder or decompressor()
            yield decoder.decompress(data, CHUNK)
            while not (decoder.eof or decoder.needs_input):
                yield decoder.decompress(b"", CHUNK)
            data, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
    if decoder:
        raise EOFError


def raw_chunks(source):
    """The bytes of an open file, decompressed, in chunks of about 1 MiB."""
    compression = compression_of(source.read(HEAD))
    source.seek(0)
    if compression == ".zst":
        return zstd_chunks(source)
    if compression in (".bz2", ".xz"):
        return stream_chunks(source, bz2.BZ2Decompressor if compression == ".bz2" else
                             functools.partial(lzma.LZMADecompressor, memlimit=WINDOW))
    source = gzip.open(source) if compression else source
    return iter(lambda: source.read1(CHUNK), b"")      # unlike read(), it returns what comes before an error


def uncompressed(file):
    """The bytes of a file in chunks. A truncated stream and a corrupt one are bad."""
    size = 0
    try:
        with file.open() as source:
            for chunk in raw_chunks(source):
                size += len(chunk)
                yield chunk
    except EOFError:
        raise Bad(f"{file.name}: truncated: it ends in the middle of the compressed stream, after {size:,} bytes of "
                  "text.\n  Download it again.") from None
    except (OSError, zlib.error, lzma.LZMAError) as error:
        raise Bad(f"{file.name}: corrupt or unreadable after {size:,} bytes of text: "
                  f"{getattr(error, 'strerror', None) or first_line(error)}.") from None


# ---- documents of a file

def parse(text):
    """A JSON value, with or without a byte order mark. What isn't one raises ValueError."""
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except RecursionError as error:
        raise ValueError(error) from None


def may_go_on(error, size):
    """Can more text make JSON of one of that size? Only if this one ends in a string, or the error is in its last
    word."""
    return isinstance(error, json.JSONDecodeError) and (error.msg.startswith("Unterminated") or error.pos > size - 16)


def goes_on(line):
    """Is it the start of an object that takes several lines, rather than a bad record?"""
    if line.startswith(b"{") and line.endswith((b"{", b"[", b",", b":")):
        try:
            json.loads(text := line.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            return getattr(error, "pos", 0) == len(text)
    return False


def without_surrogates(text):
    """Replaces lone surrogates, which JSON can hold but UTF-8 cannot."""
    try:
        text.isascii() or text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class FileReader:
    """Reads a file's documents, none of which may exceed `limit` bytes, and counts what it replaces by U+FFFD."""

    def __init__(self, file, column="text", separator=None, limit=1 << 28):
        self.file, self.column, self.separator, self.limit = file, column, separator, limit
        self.replaced = self.spent = self.records = 0

    def documents(self):
        """The documents: for each a text or, where there is none to be had, a Bad. The last may be raised instead."""
        return {"prose": self.prose, "json": self.json, "parquet": self.parquet}[self.file.format]()

    def too_long(self, where=""):
        return TooLong(f"{self.file.name}{where}: more than {self.limit:,} bytes.\n"
                       "  --max-document SIZE accepts longer documents.")

    def spend(self, size, records=1):
        """Counts bytes of text and records. More than a file's size can account for would keep us busy for hours."""
        self.spent += size
        self.records += records
        if self.spent > max(1.25 * self.limit, MAX_EXPANSION * self.file.size):
            found = f"{self.spent - size:,} bytes of text"
        elif self.records > max(FREE_RECORDS, self.file.size):
            found = f"{self.records - records:,} records"
        else:
            return
        raise Bad(f"{self.file.name}: its {self.file.size:,} bytes expand to more than {found}.\n"
                  "  If you trust the file, convert it to uncompressed JSON Lines first.")

    # ---- text

    def decode(self, data, encoding="utf-8"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            text = data.decode(encoding, "replace")
            self.replaced += text.count("\ufffd") - data.decode(encoding, "ignore").count("\ufffd")
            return text

    def transcoded(self, chunks, encoding):
        """Chunks of UTF-16 or UTF-32 in UTF-8."""
        replacing, ignoring = (codecs.getincrementaldecoder(encoding)(errors) for errors in ("replace", "ignore"))
        for chunk in itertools.chain(chunks, [b""]):
            text = replacing.decode(chunk, not chunk)
            self.replaced += text.count("\ufffd") - ignoring.decode(chunk, not chunk).count("\ufffd")
            yield text.encode()

    def chunks(self):
        """The file's bytes, decompressed and in UTF-8, without a byte order mark."""
        chunks, head, error = uncompressed(self.file), b"", None
        try:
            while len(head) < HEAD and (chunk := next(chunks, None)) is not None:
                head += chunk
        except Bad as bad:
            error = bad      # what comes before it counts
        if not is_text(head[:HEAD]):
            raise Bad(f"{self.file.name}: expected text, found binary data.")
        mark = next(filter(head.startswith, MARKS), b"")
        chunks = itertools.chain([head.removeprefix(codecs.BOM_UTF8)], chunks)
        for chunk in chunks if MARKS.get(mark, "utf-8") == "utf-8" else self.transcoded(chunks, MARKS[mark]):
            if len(chunk) > HEAD and not chunk.strip(b"\0"):       # the hole of a sparse file may be endless
                raise Bad(f"{self.file.name}: expected text, found zeros.")
            self.spend(len(chunk) // 16, 0)     # more, if it becomes documents
            yield chunk
        if error:
            raise error

    def pieces(self, chunks, separator):
        """(number from 1, bytes) of each piece between separators; None stands for a piece above the limit."""
        parts, size, number, tail, keep = [], 0, 1, b"", len(separator) - 1

        def take():
            nonlocal parts, size
            found, parts, size = None if size > self.limit else b"".join(parts), [], 0
            return found

        for chunk in chunks:
            *whole, rest = (tail + chunk).split(separator)
            for piece in whole:
                parts.append(piece)
                size += len(piece)
                yield number, take()
                number += 1
            tail = rest[max(len(rest) - keep, 0):]      # a separator may start here
            parts.append(rest[:len(rest) - len(tail)])
            size += len(parts[-1])
            if size > self.limit:
                parts.clear()
        parts.append(tail)
        size += len(tail)
        yield number, take()

    def whole(self):
        """The contents of a file that is one document."""
        parts, size = [], 0
        for chunk in self.chunks():
            parts.append(chunk)
            size += len(chunk)
            if size > self.limit:
                raise self.too_long()
        return b"".join(parts)

    def prose(self):
        if not self.separator:
            yield self.decode(self.whole())
            return
        for number, piece in self.pieces(self.chunks(), self.separator.encode()):
            self.spend(len(piece or b""))
            yield self.too_long(f": document {number:,}") if piece is None else self.decode(piece)

    # ---- JSON

    def json(self):
        chunks = self.chunks()
        head = next((chunk for chunk in chunks if chunk.strip()), b"")
        if head.lstrip().startswith(b"["):
            yield from self.array(itertools.chain([head.lstrip()[1:]], chunks))
        else:
            yield from self.lines(itertools.chain([head], chunks))

    def lines(self, chunks):
        """The documents of JSON Lines, or the one of an object that takes a whole file."""
        pieces, first = self.pieces(chunks, b"\n"), True
        for number, line in pieces:
            if line is None:
                yield self.too_long(f": line {number:,}")
            elif line and not line.isspace():
                if first and goes_on(line.strip()):
                    line, number = b"\n".join([line, *self.rest(pieces)]), 0
                yield self.value(line, f": line {number:,}" * bool(number))
                first = False

    def rest(self, pieces):
        size = 0
        for _, piece in pieces:
            size = self.limit + 1 if piece is None else size + len(piece)
            if size > self.limit:
                raise self.too_long()
            yield piece

    def array(self, chunks):
        """The documents in an array, from the bytes after its bracket. Its elements are cut out before they are
        decoded; latin-1 makes each byte a character."""
        decoder, text, at = json.JSONDecoder(), "", 0
        for number in itertools.count():
            where = f": element {number:,}"
            while True:
                at = re.compile(r"[ \t\r\n,]*").match(text, at).end()
                try:
                    end = at if text.startswith("]", at) else decoder.raw_decode(text, at)[1]
                    break
                except (ValueError, RecursionError) as error:
                    if not may_go_on(error, len(text)):
                        raise self.invalid(where, error) from None
                    left, text, at = len(text) - at, text[at:], 0
                    if left > self.limit:
                        raise self.too_long(where + " and what follows it") from None
                    text += b"".join(self.some(chunks, max(left, CHUNK))).decode("latin-1")
                    if len(text) == left:
                        raise self.invalid(where, error) from None
            if end == at:
                break
            yield self.too_long(where) if end - at > self.limit else self.value(text[at:end].encode("latin-1"), where)
            at = end
        if text[at + 1:].strip() or any(map(bytes.strip, chunks)):
            raise Bad(f"{self.file.name}: expected nothing after the array, found more.")

    @staticmethod
    def some(chunks, size):
        """The next chunks, of `size` bytes or more if there are so many."""
        while size > 0 and (chunk := next(chunks, None)) is not None:
            size -= len(chunk)
            yield chunk

    def invalid(self, where, error):
        return Bad(f"{self.file.name}{where}: not valid JSON: {first_line(error)}.")

    def value(self, data, where):
        """The text in an object; "" where it is null."""
        self.spend(len(data))
        try:
            value = parse(self.decode(data))
        except ValueError as error:
            return self.invalid(where, error)
        found = value.get(self.column, ...) if isinstance(value, dict) else ...
        if found is None or isinstance(found, str):
            text = without_surrogates(found or "")
            self.replaced += text.count("\ufffd") - (found or "").count("\ufffd") if text is not found else 0
            return text
        keys = (f"{type(found).__name__} there" if found is not ... else
                ", ".join(value) or "none" if isinstance(value, dict) else type(value).__name__)
        return Bad(f"{self.file.name}{where}: expected an object with the text under {self.column!r}, found "
                   f"{keys[:200]}.\n  Use --column to name another one.")

    # ---- Parquet

    def parquet(self):
        pyarrow = library("pyarrow", self.file.name)
        corrupt = pyarrow.ArrowException, OSError
        with self.file.open() as source:
            try:
                table = library("pyarrow.parquet", self.file.name).ParquetFile(source, pre_buffer=False,
                                                                               buffer_size=CHUNK)
            except corrupt as error:
                raise Bad(f"{self.file.name}: not a complete Parquet file ({self.file.size:,} bytes): "
                          f"{first_line(error)}.\n  Download it again.") from None
            column = self.parquet_column(pyarrow, table)
            for group in range(table.num_row_groups):
                try:
                    yield from self.rows(pyarrow, table, group, column)
                except corrupt as error:
                    yield Bad(f"{self.file.name}: row group {group}: corrupt Parquet data: {first_line(error)}.\n"
                              "  Download the file again.")

    def parquet_column(self, pyarrow, table):
        """The number of the column with the text among those that the file stores."""
        schema = table.schema_arrow
        if schema.names.count(self.column) != 1:
            raise Bad(f"{self.file.name}: expected a column {self.column!r}, found {', '.join(schema.names)[:200]}.\n"
                      "  Use --column to name another one.")
        kind = schema.field(self.column).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not re.fullmatch(r"(large_)?(string|binary)|(string|binary)_view|fixed_size_binary.*|null", str(kind)):
            raise Bad(f"{self.file.name}: expected text in column {self.column!r}, found {kind}.\n"
                      "  Use --column to name another one.")
        return next(i for i in range(len(table.schema)) if table.schema.column(i).path == self.column)

    def rows(self, pyarrow, table, group, column):
        """The documents of a row group. What is not in its pages cannot be in a row, so few rows are read at a time
        where the pages are large."""
        meta = table.metadata.row_group(group)
        size, rows = meta.column(column).total_uncompressed_size, meta.num_rows
        if rows and size / rows > self.limit + SPARE:
            for _ in range(rows):
                self.spend(0)
                yield self.too_long(f": row group {group}")
            return
        batches = table.iter_batches(min(64, max(4, BATCH_BYTES // max(size, 1))), [group], [self.column])
        for batch in batches:
            values = batch.column(0)
            values = values.dictionary_decode() if hasattr(values, "dictionary_decode") else values
            for value in values.cast(pyarrow.large_binary()):
                text = value.as_py() or b""
                self.spend(len(text))
                if len(text) > self.limit:
                    yield self.too_long(f": a row of group {group}")
                else:
                    yield self.decode(text)

"""TensorBoard's event files, without TensorBoard.

An event file is a sequence of records: uint64 length, masked CRC-32C of the length, the bytes, masked CRC-32C of the
bytes (little-endian). The bytes are protobuf messages: Event {wall_time 1: double, step 2: int64, file_version 3:
string, summary 5, session_log 7}, Summary {value 1, repeated}, Value {tag 1: string, simple_value 2: float}, SessionLog
{status 1: START = 1}.
"""
import contextlib
import struct

from lib import files


def crc32c_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC32C = crc32c_table()


def masked_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data):
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def field(number, data):
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def summary(scalars):
    values = (field(1, tag.encode()) + b"\x15" + struct.pack("<f", value) for tag, value in scalars.items())
    return b"".join(field(1, value) for value in values)


def make_folder(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (folder, *folder.parents) if path.exists())
        raise NotADirectoryError(f"--tensorboard: {file}: expected a folder, found a file. Pass another folder, or "
                                 "move the file.") from None


@contextlib.contextmanager
def named(path):
    """Adds the file's name to an OSError. Those of write() and close() lack it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class EventFile:
    """A new event file. Times are in seconds since `began`, in seconds since 1970."""

    def __init__(self, path, began):
        make_folder(path.parent)
        self.path, self.file, self.began = path, files.create(path), began
        self.record(0, None, field(3, b"brain.Event:2"))

    def record(self, time, step, content):
        number = b"" if step is None else b"\x10" + varint(step)
        with named(self.path):
            self.file.write(record(b"\x09" + struct.pack("<d", self.began + time) + number + content))

    def write(self, step, time, scalars):
        """scalars: {tag: number}"""
        self.record(time, step, field(5, summary(scalars)))

    def restart(self, step, time):
        """What was written for this step and later ones is void."""
        self.record(time, step, field(7, b"\x08\x01"))

    def flush(self):
        with named(self.path):
            self.file.flush()

    def close(self):
        with named(self.path):
            self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

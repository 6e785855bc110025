"""Reads TensorBoard's event files record by record, without the code that writes them."""
import collections
import struct

Event = collections.namedtuple("Event", "time step scalars restart")


def crc32c(data):
    """CRC-32C computed bit by bit from the polynomial, without the table that events.py uses."""
    crc = 0xFFFFFFFF
    for bit in (byte >> i & 1 for byte in data for i in range(8)):
        crc = crc >> 1 ^ (0x82F63B78 if (crc ^ bit) & 1 else 0)
    return crc ^ 0xFFFFFFFF


def unmask(masked):
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def records(data):
    while data:
        length, length_crc = struct.unpack("<QI", data[:12])
        body, crc = data[12:12 + length], struct.unpack("<I", data[12 + length:16 + length])[0]
        assert unmask(length_crc) == crc32c(data[:8]) and unmask(crc) == crc32c(body)
        yield body
        data = data[16 + length:]


def fields(message):
    """A protobuf message as (number, value) pairs: varints as int, doubles and floats as float, the rest as bytes."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            value = message[at:at + size]
            assert len(value) == size
            at += size
            kind = {1: "<d", 5: "<f"}.get(key & 7)
            yield key >> 3, struct.unpack(kind, value)[0] if kind else value


def events_of(path):
    """The events of a file, after the first one, which gives the version."""
    first, *rest = [dict(fields(body)) for body in records(path.read_bytes())]
    assert first[3] == b"brain.Event:2"
    return [Event(event[1], event[2], scalars_of(event.get(5, b"")), event.get(7) == b"\x08\x01") for event in rest]


def scalars_of(summary):
    return {value[1].decode(): value[2] for value in (dict(fields(v)) for _, v in fields(summary))}

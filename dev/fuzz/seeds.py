#!/usr/bin/env python3
"""Writes the small files that each target of dev/fuzz starts from: seeds.py FOLDER makes FOLDER/fuzz_NAME/*."""
import json
import pathlib
import struct
import sys


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_seeds():
    every = {"__metadata__": {"format": "pt"}, "a.weight": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32),
             "c": entry("F16", [], 32, 34), "d": entry("F64", [1], 34, 42), "e": entry("I64", [0, 7], 42, 42),
             "f": entry("I32", [1], 42, 46), "g": entry("U8", [2], 46, 48), "\u00e9\"": entry("BOOL", [1, 1, 1, 1], 48, 49)}
    overlap = {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}
    hole = {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}
    huge = {"a": entry("F32", [4294967296, 4294967296], 0, 9007199254740991)}
    many = {"h": entry("F32", [1, 1, 1, 1, 1, 1, 1, 1], 0, 4), "i": entry("F32", [0, 0, 0, 0, 0, 0, 0, 0, 0], 4, 4)}
    wraps = {"a": entry("F32", [2147483648, 8589934592, 0], 0, 0), "b": entry("F32", [3037000500, 3037000500, 1, 3], 0, 0)}
    for header, size in ((every, 49), (many, 4), (wraps, 0), ({}, 0), (overlap, 8), (hole, 12), (huge, 8), ({"n": entry("F32", [1], 0, 4)}, 4)):
        text = json.dumps(header, ensure_ascii=False).encode()
        data = bytes(range(size)) if header is not hole else b"\0\0\x80\x7f" * 3
        yield b"h" + text + b"\0" + data
        yield b"r" + struct.pack("<Q", len(text)) + text + data
    for name in (b"\xc3\xa9", b"\xe2\x82\xac", b"\xf0\x9f\x98\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\\u20ac\\n\\"):
        for cut in range(len(name) + 1):
            yield b'h{"' + name[:cut]
            yield b'h{"' + name[:cut] + b'":7}'
    yield b"h" + b"[" * 40 + b"]" * 40
    yield b'h{"a\\u0000":1e5,"\\ud83d\\ude00":[-0.5E-3,true,false,null]}'


def index_seeds():
    for weight_map in ({"a": "a.safetensors", "b": "b.safetensors"}, {"a": "b.safetensors"}, {"a": "../a"}, {"a": 1}, []):
        yield json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}).encode()


def manifest_seeds():
    right = {"size": 1, "xxh3_128": "5c7401c0ec22eeeeeaf06c6480b2cd11"}
    for files in ({"a": right}, {"a": {"size": 2, "xxh3_128": ""}}, {"../a": right}, {"b": right}, {"a": {"size": -1}}, []):
        yield json.dumps({"files": files}).encode()


for name, seeds in (("fuzz_safetensors", safetensors_seeds), ("fuzz_index", index_seeds), ("fuzz_manifest", manifest_seeds)):
    folder = pathlib.Path(sys.argv[1]) / name
    folder.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds()):
        (folder / f"seed-{i:02}").write_bytes(seed)

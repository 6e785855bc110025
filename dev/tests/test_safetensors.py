"""Our safetensors code against the official package: each reads what the other writes, bit for bit, and ours rejects
what the other rejects. test_safetensors.c has the broken files."""
import ctypes
import pathlib
import struct
import subprocess

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
F32, BF16 = 1, 3   # enum DType


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 2048)]


class TensorRow(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dtype", ctypes.c_int), ("ndim", ctypes.c_int),
                ("shape", ctypes.c_size_t * 4),
                ("data", ctypes.c_void_p)]


@pytest.fixture(scope="session")
def c(tmp_path_factory):
    library = tmp_path_factory.mktemp("c") / "safetensors.so"
    sources = [ROOT / f"{name}.c" for name in ("model/safetensors", *(f"runtime/{part}" for part in
               ("activity", "error", "file", "json", "own", "utf8")))]
    subprocess.run(["cc", "-std=gnu11", "-O1", "-shared", "-fPIC", f"-I{ROOT}", "-o", library, *sources,
                    "-lcjson", "-lxxhash", "-lm"],
                   check=True)
    c = ctypes.CDLL(str(library))
    c.safetensors_open.restype = ctypes.c_void_p
    c.safetensors_close.argtypes = [ctypes.c_void_p]
    c.safetensors_write.restype = c.safetensors_read.restype = ctypes.c_bool
    c.safetensors_write.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(TensorRow), ctypes.c_size_t,
                                    ctypes.POINTER(ctypes.c_char_p), ctypes.c_void_p, ctypes.POINTER(Error)]
    c.safetensors_read.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p,
        ctypes.POINTER(Error)]
    return c


def write(c, path, tensors, metadata=None):
    """tensors: name -> (float32 tensor, F32 or BF16)"""
    rows = (TensorRow * len(tensors))()
    for row, (name, (tensor, dtype)) in zip(rows, tensors.items()):
        row.name, row.dtype, row.ndim, row.data = name.encode(), dtype, tensor.dim(), tensor.data_ptr()
        row.shape[:tensor.dim()] = tensor.shape
    pairs = [text.encode() for pair in (metadata or {}).items() for text in pair]
    words = (ctypes.c_char_p * (len(pairs) + 1))(*pairs, None)
    error = Error()
    folder = -100      # AT_FDCWD
    assert c.safetensors_write(folder, str(path).encode(), rows, len(tensors), words, None, error), error.text.decode()


def open_or_error(c, path):
    error = Error()
    handle = c.safetensors_open(str(path).encode(), ctypes.byref(error))
    return handle, error


def read(c, path, shapes):
    handle, error = open_or_error(c, path)
    assert handle, error.text.decode()
    out = {}
    for name, shape in shapes.items():
        out[name] = torch.empty(shape)
        sizes = (ctypes.c_size_t * max(1, len(shape)))(*shape)
        read = c.safetensors_read(handle, name.encode(), len(shape), sizes, out[name].data_ptr(), error)
        assert read, error.text.decode()
    c.safetensors_close(handle)
    return out


def some_tensors():
    random = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens.weight": (257, 33), "model.norm.weight": (33,), "scalar": (), "empty": (0, 5),
              "four": (2, 3, 4, 5), "é \"quoted\\\"": (3,)}
    return {name: torch.randn(shape, generator=random) * 10 ** i for i, (name, shape) in enumerate(shapes.items())}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype).tolist()


def test_official_reads_ours(c, tmp_path):
    tensors = some_tensors()
    dtypes = {name: (F32, BF16)[i % 2] for i, name in enumerate(tensors)}
    path = tmp_path / "ours.safetensors"
    write(c, path, {name: (tensor, dtypes[name]) for name, tensor in tensors.items()},
          {"format": "pt", "a \"b\"\n": "\té"})
    read_back = load_file(path)
    assert read_back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.to(torch.bfloat16) if dtypes[name] == BF16 else tensor
        assert read_back[name].dtype == expected.dtype and read_back[name].shape == expected.shape
        assert bits(read_back[name]) == bits(expected), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "a \"b\"\n": "\té"}


def test_rounding_to_bf16(c, tmp_path):
    """Of any bits, of ties, and of values near the ends of the range."""
    patterns = [0, 1 << 31, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
                0xFF800000, 0x7FC00000, 0x7F800001, 0xFF80FFFF, 1, 0x8000, 0x8001, 0x007FFFFF, 0x00800000]
    draw = torch.randint(-1 << 31, 1 << 31, (1_000_000,), generator=torch.Generator().manual_seed(1))
    awkward = torch.tensor([p - (1 << 32) if p >> 31 else p for p in patterns])
    values = torch.cat([awkward, draw, draw & ~0xFFFF | 0x8000]).to(torch.int32).view(torch.float32)
    path = tmp_path / "awkward.safetensors"
    write(c, path, {"x": (values, BF16)})
    ours, theirs = load_file(path)["x"], values.to(torch.bfloat16)
    assert torch.equal(ours.isnan(), values.isnan())
    assert torch.equal(ours[~values.isnan()].view(torch.int16), theirs[~values.isnan()].view(torch.int16))


def test_ours_reads_every_half_float(c, tmp_path):
    halves = torch.arange(-1 << 15, 1 << 15).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    save_file({"x": halves}, tmp_path / "halves.safetensors")
    assert bits(read(c, tmp_path / "halves.safetensors", {"x": halves.shape})["x"]) == bits(halves.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_ours_reads_official(c, tmp_path, dtype):
    tensors = {name: (tensor / 10 ** i).to(dtype) for i, (name, tensor) in enumerate(some_tensors().items())}
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    read_back = read(c, tmp_path / "theirs.safetensors", shapes)
    for name, tensor in tensors.items():
        assert bits(read_back[name]) == bits(tensor.float()), name


def test_ours_reads_every_dtype_header(c, tmp_path):
    names = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool", "float8_e4m3fn",
             "float8_e5m2", "float16", "bfloat16", "float32", "float64"]
    save_file({name: torch.zeros(3).to(getattr(torch, name)) for name in names}, tmp_path / "all.safetensors")
    read(c, tmp_path / "all.safetensors", {"float32": (3,), "bfloat16": (3,)})


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_one_changed_byte_of_a_header(c, tmp_path, first):
    """Ours rejects whatever the official package rejects; what both accept has the same tensors."""
    path = tmp_path / "changed.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.tensor(1.0)}, path, {"format": "pt"})
    original = path.read_bytes()
    header = struct.unpack_from("<Q", original)[0] + 8
    for change in range(first, first + 50):
        data = bytearray(original)
        random = torch.Generator().manual_seed(change)
        at, value = (torch.randint(n, (1,), generator=random).item() for n in (header, 256))
        data[at] = value if change % 2 else ord('0123456789{}[]",:abF '[value % 21])
        path.write_bytes(data)
        what = f"change {change}: byte {at} is {data[at]}"
        try:
            expected = load_file(path)
        except Exception:
            expected = None
        handle, error = open_or_error(c, path)
        if expected is None:
            assert not handle, what
        elif handle:
            readable = {name: tuple(t.shape)
                        for name, t in expected.items() if t.is_floating_point() and t.isfinite().all()}
            for name, tensor in read(c, path, readable).items():
                assert bits(tensor) == bits(expected[name].float()), what
        if handle:
            c.safetensors_close(handle)

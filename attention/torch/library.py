"""The C libraries of attn_c, called by ctypes: attn_c.c describes what its functions compute."""
import ctypes
import functools
import re
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_double, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch        # before the libraries, which use the OpenMP runtime that it has loaded

FOLDER = Path(__file__).parent

# The libraries in float32, best first, and what a processor needs for them.
LEVELS = {
    "bf16": "avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16",
    "v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
    "v3": "avx avx2 bmi1 bmi2 f16c fma movbe",
}


class Strides(Structure):
    _fields_ = [(name, c_size_t) for name in ("sequence", "head", "position")]


class Call(Structure):
    """Call in attn_c.c."""
    _fields_ = [("normalizer", c_void_p),
                *((name, c_size_t) for name in ("B", "NH", "NKV", "queries", "keys", "HS", "VS", "window")),
                *((name, c_int) for name in ("L", "threads", "bf16")), ("scaling", c_double),
                *((name, Strides) for name in "qkv")]


def level():
    """The best of LEVELS for this processor."""
    found = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)       # None on other architectures
    flags = set(found[1].split() if found else ())
    for name, needed in LEVELS.items():
        if flags.issuperset(needed.split()):
            return name
    raise ImportError("attn_c: this processor has none of the instruction sets that the package is built for; it needs "
                      f"at least those of x86-64-v3: {LEVELS['v3']}")


def share_openmp():
    """Makes PyTorch's OpenMP runtime visible to libraries that are loaded later. Usually it is already."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    loaded = sorted({line.split()[-1] for line in open("/proc/self/maps") if re.search(r"/lib[gi]?omp[^/]*\.so", line)})
    if not loaded:
        raise ImportError("attn_c: expected PyTorch to load an OpenMP runtime (libgomp, libomp or libiomp5), found "
                          "none; install a build of PyTorch with OpenMP")
    ctypes.CDLL(loaded[0], mode=ctypes.RTLD_GLOBAL)


@functools.cache
def load(name):
    """The library of a level, or `double`."""
    file = FOLDER / f"attn_c_{name}.so"
    if not file.exists():
        raise ImportError(f"{file}: expected the package's library here, found nothing; run `make attn_c` in the "
                          "source tree, or reinstall the package")
    share_openmp()
    library = ctypes.CDLL(str(file))
    library.attn_c_normalizer.restype = c_void_p
    library.attn_c_normalizer.argtypes = c_char_p, c_int, c_char_p, c_size_t
    library.attn_c_scalar.restype = c_size_t
    library.attn_c_scalar.argtypes = c_void_p, c_size_t, c_int, c_size_t, c_int, POINTER(c_double), POINTER(c_bool)
    library.attn_c_scalar_name.restype = library.attn_c_preset.restype = c_char_p
    library.attn_c_scratch.restype = c_size_t
    library.attn_c_scratch.argtypes = [POINTER(Call)]
    library.attn_c_forward.restype = library.attn_c_backward.restype = None
    library.attn_c_forward.argtypes = [c_void_p] * 9
    library.attn_c_backward.argtypes = [c_void_p] * 14
    return library


def library_for(dtype):
    return load("double" if dtype == torch.float64 else level_here())


level_here = functools.cache(level)


def all_names(function):
    """The names that a C function has by number."""
    names = []
    while (name := function(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


try:
    SCALARS = all_names(load(level_here()).attn_c_scalar_name)      # the learned scalars, in C's order
    PRESETS = all_names(load(level_here()).attn_c_preset)
except OSError as error:        # callers that can do without the package expect an ImportError
    raise ImportError("attn_c: expected Linux with /proc, and a libc that can load the package's libraries; found "
                      f"{error}") from error


# ---- normalizers

EXPECTED_LENGTH = (f"expected seq_len to be an int from 1 to {(1 << 31) - 1}, or None where the normalizer does not "
                   "depend on it")


@functools.cache
def parsed(text, seq_len):
    """The normalizer of a text, as C's pointer; the same for all libraries. seq_len: None if unknown."""
    if seq_len is not None and not 0 < seq_len < 1 << 31:
        raise ValueError(f"attn_c: {text}: {EXPECTED_LENGTH}, found {seq_len}")
    if "\0" in text:       # where C takes it for ended
        raise ValueError(f"attn_c: {text!r}: expected the normalizer's name, found a NUL character in it; remove it")
    message = ctypes.create_string_buffer(1024)
    pointer = load(level_here()).attn_c_normalizer(text.encode(), seq_len or 0, message, len(message))
    if not pointer:
        reason = message.value.decode().replace("Run `--attn help` for the full list",
                                                f"Expected one of {' '.join(PRESETS)}, or one with overrides")
        raise ValueError(f"attn_c: {text}: {reason}")
    return pointer


class ScalarStart(NamedTuple):
    size: int
    start: float
    trained: bool


@functools.cache
def scalars_of(text, heads, seq_len, window=None):
    """{name: ScalarStart} of the learned scalars that a normalizer has."""
    start, trained, found = c_double(), c_bool(), {}
    for i, name in enumerate(SCALARS):
        size = load(level_here()).attn_c_scalar(parsed(text, seq_len), heads, seq_len or 0, window or 0, i,
                                                byref(start), byref(trained))
        if size:
            found[name] = ScalarStart(size, start.value, trained.value)
    return found


@torch.compiler.assume_constant_result
def scalar_names(text):
    """The learned scalars that a normalizer has, of any number of heads and any length."""
    return names_of(text)[0]


@torch.compiler.assume_constant_result
def scalars_by_position(text):
    """Those of scalar_names() that have a value for each position; the others have one for each head."""
    return names_of(text)[1]


@functools.cache
def names_of(text):
    """Both, in a function of its own since torch.compile has to find the two above without a cache around them."""
    found = scalars_of(text, 1, 2)      # a scale of log:L has no length of 1
    return tuple(found), tuple(name for name, scalar in found.items() if scalar.size == 2)

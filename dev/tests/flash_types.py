"""The arguments of dev/tests/flash_so.cu for ctypes. Needs no PyTorch."""
import ctypes


class Shape(ctypes.Structure):
    """FlashTestShape."""
    _fields_ = [*((name, ctypes.c_size_t) for name in ("B", "T", "NH", "NKV", "HS", "VS")), ("L", ctypes.c_int),
                *((name, ctypes.c_size_t) for name in ("q_row", "k_row", "v_row", "out_row")),
                ("first", ctypes.c_void_p), ("any_order", ctypes.c_bool),
                ("cosines", ctypes.c_void_p), ("sines", ctypes.c_void_p), ("from_row", ctypes.c_size_t),
                ("window", ctypes.c_size_t)]


def scalar_names(library):
    """The names of the learned scalars in checkpoints, in the order of SCALARS in attention/normalizer.h."""
    count = ctypes.c_int.in_dll(library, "flash_scalar_count").value
    return [name.decode() for name in (ctypes.c_char_p * count).in_dll(library, "scalar_names")]


def arrays_for(library):
    """A new FlashTestArrays of NULLs: an attribute for each array; scalars[i] and grads[i] for the scalar i of
    scalar_names()."""
    count = len(scalar_names(library))
    pointers = lambda *names: [(name, ctypes.c_void_p) for name in names]

    class Arrays(ctypes.Structure):
        _fields_ = [*pointers("q", "k", "v", "dout"), ("scalars", ctypes.c_void_p * count),
                    *pointers("out", "dq", "dk", "dv", "stats"), ("grads", ctypes.c_void_p * count),
                    ("all_zero_rows", ctypes.c_ulonglong)]
    return Arrays()


def scalars_at_start(library, attn, shape):
    """{i: (how many numbers, initial value, trained or not)} for the scalars that a normalizer has."""
    start, trained, found = ctypes.c_double(), ctypes.c_bool(), {}
    library.flash_scalar.restype = ctypes.c_size_t
    for i in range(len(scalar_names(library))):
        size = library.flash_scalar(attn.encode(), ctypes.byref(shape), i, ctypes.byref(start), ctypes.byref(trained))
        if size:
            found[i] = size, start.value, trained.value
    return found

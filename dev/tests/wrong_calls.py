"""Random wrong calls of attn_c's operators, for test_torch.py, which makes them in a process of its own, since what it
looks for is a crash: each array ends where no memory follows."""
import collections
import ctypes
import mmap
import random

import torch
from attn_c import PRESETS, attention
from attn_c.library import scalars_of

PAGE, L = mmap.PAGESIZE, 24
draw, memories = random.Random(), []


def is_usual(x):
    return (isinstance(x, torch.Tensor) and not (x.is_nested or x.is_quantized or x.is_neg() or x._is_zerotensor())
            and x.device.type == "cpu" and x.layout == torch.strided and x.is_contiguous() and x.numel() > 0)


def guarded(x):
    """A copy of x after which no memory can be read."""
    if not is_usual(x):
        return x
    size = x.numel() * x.element_size()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    memories.append(memory)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages * PAGE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(PAGE), 0) == 0
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=pages * PAGE - size).view(x.shape).copy_(x)


# ---- changes

DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool,
          torch.complex64)


def resized(x):
    shape = list(x.shape) or [1]
    at = draw.randrange(len(shape))
    shape[at] = draw.choice([0, 1, 2, shape[at] + 1, 3 * shape[at], max(shape[at] - 1, 0)])
    return torch.ones(shape, dtype=x.dtype)


OF_TENSORS = [
    resized, resized, resized, resized,
    lambda x: None, lambda x: 3, lambda x: [1], lambda x: x.tolist(), lambda x: x.numpy(),
    lambda x: x[0], lambda x: x[None], lambda x: x.sum(), lambda x: x[:0], lambda x: x[..., :0],
    lambda x: x.transpose(-1, 0), lambda x: x.flatten()[::2], lambda x: x.flatten()[:1].expand(x.shape),
    lambda x: x * float("nan"), lambda x: x * 1e30, lambda x: -x - 2**40,
    lambda x: x.to(draw.choice(DTYPES)), lambda x: x.to("meta"), lambda x: x.to_sparse(), lambda x: torch._neg_view(x),
    lambda x: torch._efficientzerotensor(tuple(x.shape)), lambda x: torch.nested.nested_tensor([x, x]),
    lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
]
OF_SCALARS = [
    lambda x: [], lambda x: {}, lambda x: x | {"attn_scale": torch.ones(3)}, lambda x: dict(list(x.items())[1:]),
    lambda x: {name: changed(value) for name, value in x.items()},
]
OTHERS = [None, True, -1, 0, 1, 2**31, 2**63, -2**70, 1.5, float("nan"), float("inf"), "", "ssmx", "softmax+post=", "é",
          "a" * 5000, [], {}, object(), torch.ones(2), *PRESETS, "softmax+qk=l2", "ssmax-bias+norm=l1+sink"]


def changed(x):
    if isinstance(x, dict):
        return draw.choice(OF_SCALARS)(x)
    if not isinstance(x, torch.Tensor):
        return draw.choice(OTHERS)
    try:
        return draw.choice(OF_TENSORS)(x)
    except (RuntimeError, TypeError, IndexError):       # there is no such tensor
        return resized(x)


# ---- calls

def right_call():
    """A function and its arguments: one of the package's three entries."""
    B, kv_heads, group, keys, d, width = (draw.randint(1, limit) for limit in (3, 2, 2, 20, 9, 9))
    heads, queries, name = group * kv_heads, draw.randint(1, keys), draw.choice(PRESETS)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
    shapes = (B, heads, queries, d), (B, kv_heads, keys, d), (B, kv_heads, keys, width)
    qkv = [torch.randn(shape).to(dtype) for shape in shapes]
    scalars = {key: torch.rand(scalar.size) for key, scalar in scalars_of(name, heads, L).items()}
    start = draw.choice([None, torch.randint(0, keys + 2, (B,))])
    entry, flat = draw.randrange(3), torch.cat([*scalars.values()]) if scalars else None
    if entry == 0:
        return lambda *x: attention(*x[:4], scalars=x[4], start=x[5], seq_len=x[6], scaling=x[7]), [
            *qkv, name, scalars, start, L, 0.5]
    given = [*qkv, flat, start, name, L, 0.5]
    if entry == 1:
        return torch.ops.attn_c.attention.default, given
    out, stats = torch.ops.attn_c.attention.default(*given)
    return torch.ops.attn_c.attention_backward.default, [torch.ones_like(out), out, stats, *given]


def run(seed, cases):
    """How many calls ended how, and those whose error does not name the package."""
    draw.seed(seed)
    counts, unnamed = collections.Counter(), []
    for case in range(cases):
        function, given = right_call()
        for i in draw.sample(range(len(given)), draw.choice([1, 1, 2])):
            given[i] = changed(given[i])
        given = [guarded(x) for x in given]
        try:
            function(*given)
            counts["computed"] += 1
        except Exception as error:
            counts[type(error).__name__] += 1
            if "attn_c" not in str(error):
                unnamed.append(f"case {case}: {error!r}")
        given = None
        memories.clear()
    return counts, unnamed

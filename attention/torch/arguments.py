"""The arguments of attn_c's operators (ops.py): their checks, which every implementation makes before it reads an
array, and the arrays that implementations make.

check_arguments() makes all checks of a forward pass. The CPU implementation makes the same, but those of shapes and
numbers only once for each combination."""
import functools
import math
import operator

import torch

from .library import scalars_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def exact_int(x):
    """The int that x stands for, as NumPy's integers do; None for anything else, and for True and False."""
    try:
        return None if isinstance(x, bool) else int(operator.index(x))
    except TypeError:
        return None


def check_tensors(**arguments):
    """What the dispatcher would reject in its own words. Objects that handle PyTorch's functions count as tensors."""
    for name, x in arguments.items():
        if x is not None and not isinstance(x, torch.Tensor) and not hasattr(x, "__torch_function__"):
            raise ValueError(f"attn_c: expected {name} to be a tensor, found {type(x).__name__}; convert it")
        if isinstance(x, torch.Tensor) and (x.layout != torch.strided or x.is_nested):
            raise ValueError(f"attn_c: expected {name} to be a dense tensor, found "
                             f"{'a nested one' if x.is_nested else x.layout}; convert it")
        if hasattr(x, "placements"):
            raise ValueError(f"attn_c: expected {name} to be a plain tensor, found a DTensor with {x.placements}; pass "
                             f"{name}.to_local(), with whole heads and sequences on each device")


def check_devices(q, **others):
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"attn_c: expected all tensors on one device, found q on {q.device} and {name} on "
                             f"{x.device}; move one of them")


def check_kinds(q, k, v):
    if q is None or k is None or v is None:     # which the dispatcher takes for tensors
        raise ValueError("attn_c: expected tensors q, k and v, found None")
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"attn_c: expected q, k and v (batch, heads, positions, head_dim), found {q.ndim}, {k.ndim} "
                         f"and {v.ndim} dimensions")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attn_c: expected one dtype, found q in {q.dtype}, k in {k.dtype}, v in {v.dtype}")


def check_values(q, k, v, dtype, scaling, window):
    """q, k, v: shapes."""
    if dtype not in DTYPES:
        raise ValueError(f"attn_c: expected tensors in {', '.join(map(str, DTYPES))}, found {dtype}; convert them")
    if k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3] or k[1] == 0 or q[1] % k[1]:
        raise ValueError("attn_c: expected q (B, heads, Tq, d), k (B, kv heads, Tk, d) and v (B, kv heads, Tk, width), "
                         f"where kv heads divides heads; found {tuple(q)}, {tuple(k)} and {tuple(v)}")
    if q[3] == 0:
        raise ValueError("attn_c: expected a head_dim of at least 1, found 0")
    if q[2] > k[2]:
        raise ValueError(f"attn_c: expected at most as many queries as keys, found {q[2]} queries and {k[2]} keys; the "
                         "queries are the last positions of the keys")
    if scaling is not None and not 0 < scaling < math.inf:
        raise ValueError(f"attn_c: expected scaling to be a positive number or None, found {scaling!r}")
    if window is not None and not 0 < window < 1 << 31:
        raise ValueError(f"attn_c: expected window to be a positive int or None, found {window!r}")


def check_scalars(scalars, count, normalizer, heads):
    if scalars.shape != (count,):
        raise ValueError(f"attn_c: {normalizer}: expected {count} values of learned scalars for {heads} heads, found "
                         f"{tuple(scalars.shape)}")
    if not scalars.is_floating_point():
        raise ValueError(f"attn_c: expected learned scalars in floating point, found {scalars.dtype}")


def check_start(start, batch):
    if start.shape != (batch,):
        raise ValueError(f"attn_c: expected start to be one number for each of {batch} sequences, found "
                         f"{tuple(start.shape)}")
    if start.is_floating_point() or start.is_complex() or start.dtype == torch.bool:
        raise ValueError(f"attn_c: expected start in integers, found {start.dtype}")


def check_arguments(q, k, v, scalars, start, normalizer, seq_len, scaling, window):
    """Returns how many values all scalars have together."""
    check_kinds(q, k, v)
    check_devices(q, k=k, v=v, scalars=scalars, start=start)
    check_values(q.shape, k.shape, v.shape, q.dtype, scaling, window)
    count = sum(scalar.size for scalar in scalars_of(normalizer, int(q.shape[1]), seq_len).values())
    if scalars is not None:
        check_scalars(scalars, count, normalizer, q.shape[1])
    if start is not None:
        check_start(start, q.shape[0])
    return count


def check_saved(dout, out, stats, q, v, kept):
    """What the backward pass gets in addition. kept: how many statistics the forward pass keeps for each row."""
    if dout is None or out is None or stats is None:
        raise ValueError("attn_c: expected tensors dout, out and stats, found None")
    rows = q.shape[:3]
    if not (dout.shape == out.shape == (*rows, v.shape[3]) and stats.shape == (*rows, kept)):
        raise ValueError(f"attn_c: expected dout and out {(*rows, v.shape[3])} and stats {(*rows, kept)}, found "
                         f"{tuple(dout.shape)}, {tuple(out.shape)} and {tuple(stats.shape)}")
    if not (out.dtype == q.dtype and stats.dtype == statistics_dtype(q) and dout.is_floating_point()):
        raise ValueError(f"attn_c: expected out in {q.dtype}, stats in {statistics_dtype(q)} and dout in floating "
                         f"point, found {out.dtype}, {stats.dtype} and {dout.dtype}")


def check_positions(normalizer, seq_len, keys, start, window):
    """For normalizers with a factor for each position up to seq_len."""
    positions = keys if start is None or not len(start) else keys - max(0, int(start.min()))
    positions = min(positions, window or positions)
    if positions > seq_len:
        raise ValueError(f"attn_c: {normalizer} has a factor for each of {seq_len} lengths, but the "
                         f"{'window' if window else 'text'} has {positions} tokens; pass fewer, or use another "
                         "normalizer")


# ---- arrays

def by_position(x, T, width):
    """An uninitialized (B, heads, T, width) for x's B and heads that lies in memory as (B, T, heads, width), the order
    that projections read."""
    return x.new_empty_strided(*as_by_position(*x.shape[:2], T, width))


def as_by_position(B, heads, T, width):
    """Its size and strides."""
    return (B, heads, T, width), (T * heads * width, width, heads * width, 1)


def like(x):
    return by_position(x, x.shape[2], x.shape[3])


def statistics_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@functools.lru_cache(256)
def start_scalars(normalizer, heads, seq_len, window, dtype, device="cpu"):
    """The initial values of a normalizer's scalars, flat."""
    values = [torch.full((scalar.size,), scalar.start, dtype=dtype, device=device)
              for scalar in scalars_of(normalizer, heads, seq_len, window).values()]
    return torch.cat(values) if values else torch.empty(0, dtype=dtype, device=device)


def clamped(start, keys):
    return start.clamp(0, keys).to(torch.int32).contiguous()

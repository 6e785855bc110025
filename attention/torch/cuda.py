"""The operators on CUDA GPUs, by attention/flash.h's kernels (attn_c_cuda.cu). Tested on an emulated GPU, and by
dev/bench/torch_gpu.py on a real one.

The kernels compute all positions of adjacent sequences. Fewer queries than keys are padded in front, which costs a
backward pass as much as all queries would."""
import contextlib
import ctypes
import functools
import math
from ctypes import POINTER, Structure, byref, c_bool, c_int, c_size_t, c_void_p

import torch
from torch.nn import functional as F

from .arguments import (by_position, check_arguments, check_devices, check_positions, check_saved, clamped, like,
                        start_scalars)
from .library import FOLDER, Strides, level_here, load, parsed, scalars_of


class CudaCall(Structure):
    """CudaCall in attn_c_cuda.cu."""
    _fields_ = [("normalizer", c_void_p), *((name, c_size_t) for name in ("B", "T", "NH", "NKV", "HS", "VS", "start",
                                                                      "window")),
                *((name, c_int) for name in ("L", "bf16", "any_order")), *((name, Strides) for name in "qkv")]


class CudaInput(Structure):
    _fields_ = [(name, c_void_p) for name in ("q", "k", "v", "first", "scalars")]


def library_file():
    return FOLDER / "attn_c_cuda.so"


@functools.cache
def library():
    if not library_file().exists():
        raise ValueError(f"attn_c: found tensors on a GPU, but this build has no {library_file().name}; reinstall "
                         "attn_c with TORCH_CUDA=1 on a machine with nvcc, or move the tensors to the CPU")
    found = ctypes.CDLL(str(library_file()))
    found.attn_c_cuda_stats.restype = found.attn_c_cuda_scratch.restype = c_size_t
    found.attn_c_cuda_stats.argtypes = found.attn_c_cuda_scratch.argtypes = [POINTER(CudaCall)]
    found.attn_c_cuda_forward.restype = found.attn_c_cuda_backward.restype = None
    found.attn_c_cuda_forward.argtypes = [POINTER(CudaCall), POINTER(CudaInput), *[c_void_p] * 5]
    found.attn_c_cuda_backward.argtypes = [POINTER(CudaCall), POINTER(CudaInput), *[c_void_p] * 9]
    return found


@functools.cache
def traits(normalizer, seq_len):
    """(qk=l2?, has a 1/sqrt(d)?, reads the length of the text?)"""
    flags = c_bool(), c_bool(), c_bool()
    load(level_here()).attn_c_traits(c_void_p(parsed(normalizer, seq_len)), *map(byref, flags))
    return tuple(flag.value for flag in flags)


def fits(head_dim, width):
    return (head_dim % 8 == 0 and 8 <= head_dim <= 128
            and (width == head_dim or head_dim == 128 and width % 8 == 0 and width > 0))


def check(q, k, v, scalars, start, normalizer, seq_len, scaling, window=None):
    """What every implementation checks, and the limits of the kernels. Returns how many values all scalars have
    together."""
    count = check_arguments(q, k, v, scalars, start, normalizer, seq_len, scaling, window)
    if q.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"attn_c: expected float32 or bfloat16 on a GPU, found {q.dtype}; convert them")
    if not fits(q.shape[3], v.shape[3]):
        raise ValueError("attn_c: on a GPU, expected a head_dim that is a multiple of 8 and at most 128, and values of "
                         f"the same size (or, at 128, of any multiple of 8), found {q.shape[3]} and {v.shape[3]}")
    B, heads, keys = *q.shape[:2], k.shape[2]
    if B * heads > 65535 or keys > 1 << 24:
        raise ValueError("attn_c: on a GPU, expected at most 65,535 heads in all sequences together and 16,777,216 "
                         f"keys, found {B} x {heads} heads and {keys} keys; pass fewer sequences at a time")
    if start is not None and traits(normalizer, seq_len)[2]:
        raise ValueError(f"attn_c: {normalizer} depends on the length of each text, which is not supported with "
                         "padding on a GPU; process texts of different lengths apart")
    if "attn_pn" in scalars_of(normalizer, q.shape[1], seq_len):
        check_positions(normalizer, seq_len, k.shape[2], start, window)
    return count


# ---- q and k before the kernels, and the gradients of that

def ratio_of(scaling, d, rsqrt_d):
    ratio = scaling * math.sqrt(d) if scaling and rsqrt_d else 1.0
    return 1.0 if abs(ratio - 1) < 1e-9 else ratio


def inverse_norm(x):
    square = x.square().sum(-1, keepdim=True)
    return torch.where(square < torch.finfo(torch.float32).tiny, 0, torch.rsqrt(square))


def prepare(x, l2, ratio):
    if not l2:
        return x if ratio == 1 else x * ratio
    wide = x.float()
    return (wide * inverse_norm(wide) * ratio).to(x.dtype)


def prepare_backward(dx, x, l2, ratio):
    if not l2:
        return dx if ratio == 1 else dx * ratio
    wide, d = x.float(), dx.float() * ratio
    inverse = inverse_norm(wide)
    u = wide * inverse
    return ((d - u * (u * d).sum(-1, keepdim=True)) * inverse).to(x.dtype)


def arranged(x):
    """x if the kernels can read it where it is: adjacent sequences, and rows and heads of multiples of 16 bytes."""
    pack, (B, _, T, _), step = 16 // x.element_size(), x.shape, x.stride()
    ready = (step[3] == 1 and (B == 1 or step[0] == T * step[2]) and step[1] % pack == step[2] % pack == 0
             and x.data_ptr() % 16 == 0)
    return x if ready else x.transpose(1, 2).contiguous().transpose(1, 2)


# ---- calls

def call_of(q, k, v, normalizer, seq_len, start=0, window=None):
    strides = (Strides(*x.stride()[:3]) for x in (q, k, v))
    return CudaCall(parsed(normalizer, seq_len), *(k.shape[i] for i in (0, 2)), q.shape[1], k.shape[1], q.shape[3],
                    v.shape[3], start, window if window and window < k.shape[2] else 0, seq_len or 0,
                    q.dtype == torch.bfloat16, not torch.are_deterministic_algorithms_enabled(), *strides)


def input_of(q, k, v, first, scalars):
    return CudaInput(q.data_ptr(), k.data_ptr(), v.data_ptr(), None if first is None else first.data_ptr(),
                     scalars.data_ptr())


def on_device(x):
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def stream_of(x):
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None


def bytes_for(x, size):
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def run_forward(q, k, v, first, scalars, normalizer, seq_len, window, past=0):
    """out (B, Tk, heads, width) and stats; rows before `past` are undefined. One sequence, if past is not 0."""
    lib, call = library(), call_of(q, k, v, normalizer, seq_len, past, window)
    B, heads, T, _ = q.shape
    out = q.new_empty((B, T, heads, v.shape[3]))
    stats = torch.empty((B, heads, T, lib.attn_c_cuda_stats(call)), dtype=torch.float32, device=q.device)
    scratch, counter = bytes_for(q, lib.attn_c_cuda_scratch(call)), bytes_for(q, 8)
    lib.attn_c_cuda_forward(call, input_of(q, k, v, first, scalars), out.data_ptr(), stats.data_ptr(),
                            counter.data_ptr(), scratch.data_ptr(), stream_of(q))
    return out, stats


def stats_size(q, v, normalizer, seq_len):
    """How many numbers the forward pass keeps for each row."""
    one = [q.new_empty((1, 1, 1, int(x.shape[3])), device="cpu") for x in (q, q, v)]
    return library().attn_c_cuda_stats(call_of(*one, normalizer, seq_len))


def arguments(q, k, v, scalars, start, normalizer, seq_len, scaling, window=None):
    """What the kernels read: q with as many positions as k, k, v, first (B, Tk), scalars; and hidden (B, Tk), the
    padding."""
    l2, rsqrt_d, _ = traits(normalizer, seq_len)
    if scalars is None:
        scalars = start_scalars(normalizer, q.shape[1], seq_len, window, torch.float32, q.device)
    else:
        scalars = scalars.to(torch.float32).contiguous()
    q = prepare(q, l2, ratio_of(scaling, q.shape[3], rsqrt_d))
    q = F.pad(q, (0, 0, k.shape[2] - q.shape[2], 0)) if k.shape[2] > q.shape[2] else q
    first = hidden = None
    at = torch.arange(k.shape[2], device=q.device, dtype=torch.int32)
    if start is not None:
        start = clamped(start, k.shape[2])
        first, hidden = torch.minimum(at, start[:, None]).contiguous(), at < start[:, None]
    if window is not None and window < k.shape[2]:
        earliest = (at - (window - 1)).clamp(min=0)
        first = earliest.repeat(k.shape[0], 1) if first is None else torch.maximum(first, earliest)
    return arranged(q), arranged(prepare(k, l2, 1.0)), arranged(v), first, scalars, hidden


def without(x, hidden):
    """x (B, T, heads, width), 0 where a position is padding."""
    return x if hidden is None else x.masked_fill(hidden[:, :, None, None], 0)


def forward(q, k, v, scalars, start, normalizer, seq_len, scaling, window=None):
    check(q, k, v, scalars, start, normalizer, seq_len, scaling, window)
    if not q.numel():
        stats = q.new_empty((*q.shape[:3], stats_size(q, v, normalizer, seq_len)), dtype=torch.float32)
        return by_position(q, q.shape[2], v.shape[3]), stats
    past = k.shape[2] - q.shape[2]
    with on_device(q):
        q, k, v, first, scalars, hidden = arguments(q, k, v, scalars, start, normalizer, seq_len, scaling, window)
        if past == 0:
            out, stats = run_forward(q, k, v, first, scalars, normalizer, seq_len, window)
        else:
            parts = [run_forward(q[b:b + 1], k[b:b + 1], v[b:b + 1], None if first is None else first[b:b + 1], scalars,
                                 normalizer, seq_len, window, past) for b in range(q.shape[0])]
            out, stats = (torch.cat(x) for x in zip(*parts))
    return without(out, hidden)[:, past:].contiguous().transpose(1, 2), stats[:, :, past:].contiguous()


def backward(dout, out, stats, q, k, v, scalars, *others):
    count = check(q, k, v, scalars, *others)
    check_devices(q, dout=dout, out=out, stats=stats)
    check_saved(dout, out, stats, q, v, stats_size(q, v, *others[1:3]))
    if not q.numel():
        dscalars = (stats if scalars is None else scalars).new_zeros(count)
        return like(q), like(k).zero_(), like(v).zero_(), dscalars
    with on_device(q):
        dout, out = dout.to(q.dtype).transpose(1, 2), out.transpose(1, 2).contiguous()
        return gradients(dout, out, stats.contiguous(), q, k, v, scalars, *others)


def gradients(dout, out, stats, q, k, v, scalars, start, normalizer, seq_len, scaling, window=None):
    """dout, out (B, Tq, heads, width)"""
    given_q, given_k, given_scalars, past = q, k, scalars, k.shape[2] - q.shape[2]
    q, k, v, first, scalars, hidden = arguments(q, k, v, scalars, start, normalizer, seq_len, scaling, window)
    if past:        # statistics of the queries in front, too
        out, stats = run_forward(q, k, v, first, scalars, normalizer, seq_len, window)
        dout = F.pad(dout, (0, 0, 0, 0, past, 0))
    dout = without(dout, hidden).contiguous()
    lib, call = library(), call_of(q, k, v, normalizer, seq_len, window=window)
    dq, dk, dv = like(q), like(k), like(v)
    dscalars = bytes_for(q, 4 * scalars.numel()).view(torch.float32).zero_()
    scratch = bytes_for(q, lib.attn_c_cuda_scratch(call))
    lib.attn_c_cuda_backward(call, input_of(q, k, v, first, scalars), dout.data_ptr(), out.data_ptr(),
                             stats.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
                             None if given_scalars is None else dscalars.data_ptr(), scratch.data_ptr(), stream_of(q))
    l2, rsqrt_d, _ = traits(normalizer, seq_len)
    dq = prepare_backward(dq[:, :, past:], given_q, l2, ratio_of(scaling, q.shape[3], rsqrt_d))
    dk = prepare_backward(dk, given_k, l2, 1.0)
    return dq, dk, dv, dscalars if given_scalars is None else dscalars.to(given_scalars.dtype)

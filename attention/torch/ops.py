"""The operators attn_c::attention and attn_c::attention_backward: their CPU and fake implementations, autograd and
autocast (cuda.py has the implementations for GPUs). attention() and Normalizer in __init__.py call the first one.

Shapes: q (B, heads, Tq, d), k (B, kv heads, Tk, d), v (B, kv heads, Tk, any width), in any memory format; the queries
are the last Tq positions. scalars: those that the normalizer has, flat, in the order of library.SCALARS; None: their
initial values. start (B): how many keys at the beginning of each sequence are padding; None: none. seq_len, scaling,
window: None if not given. out (B, heads, Tq, width of v), in memory as by_position(); stats: for the backward pass. The
gradients have the shapes of their inputs."""
import functools
from typing import NamedTuple

import torch
from torch._C import _AutoDispatchBelowAutograd as BelowAutograd
from torch._C import _dispatch_keys as dispatch_keys
from torch.autograd import forward_ad

from . import cuda
from .arguments import (as_by_position, by_position, check_arguments, check_devices, check_kinds, check_positions,
                        check_saved, check_scalars, check_start, check_tensors, check_values, clamped, like,
                        start_scalars, statistics_dtype)
from .library import Call, Strides, byref, library_for, parsed, scalars_of

ARGUMENTS = ("Tensor q, Tensor k, Tensor v, Tensor? scalars, Tensor? start, str normalizer, int? seq_len, "
             "float? scaling, int? window=None")
library = torch.library.Library("attn_c", "DEF")
library.define(f"attention({ARGUMENTS}) -> (Tensor out, Tensor stats)", tags=torch.Tag.pt2_compliant_tag)
library.define(f"attention_backward(Tensor dout, Tensor out, Tensor stats, {ARGUMENTS}) -> "
               "(Tensor dq, Tensor dk, Tensor dv, Tensor dscalars)", tags=torch.Tag.pt2_compliant_tag)
forward_op = torch.ops.attn_c.attention.default
backward_op = torch.ops.attn_c.attention_backward.default

ROW_STATS = 4       # of attention/attention_cpu.h
FEW = 1 << 18       # multiplications that one thread finishes before others wake up


# ---- what a call needs on the CPU, by the shapes of its arrays

class Plan(NamedTuple):
    call: Call
    pointer: object         # to call
    scratch: int            # elements
    out: tuple              # the size and strides of the output, as by_position()
    stats: tuple            # of the statistics
    scalars: int            # how many values all scalars have together
    by_position: bool       # is one of them attn_pn?
    forward: object
    backward: object


@functools.lru_cache(4096)
def plan(normalizer, seq_len, scaling, window, bf16, dtype, threads, q, k, v, q_step, k_step, v_step):
    """dtype: of the arrays that C reads, which were bfloat16 before if `bf16`. q, k, v: shapes; q_step...: strides."""
    check_values(q, k, v, dtype, scaling, window)
    strides = (Strides(step[0], step[1], step[2]) for step in (q_step, k_step, v_step))
    call = Call(parsed(normalizer, seq_len), q[0], q[1], k[1], q[2], k[2], q[3], v[3], window or 0, seq_len or 0,
                threads, bf16, scaling or 0, *strides)
    if q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]) < FEW:
        call.threads = 1
    lib = library_for(dtype)
    scalars = scalars_of(normalizer, q[1], seq_len)
    B, heads, T, _ = q
    return Plan(call, byref(call), lib.attn_c_scratch(call), as_by_position(B, heads, T, v[3]),
                ((B, heads, T, ROW_STATS), (heads * T * ROW_STATS, T * ROW_STATS, ROW_STATS, 1)),
                sum(scalar.size for scalar in scalars.values()), "attn_pn" in scalars, lib.attn_c_forward,
                lib.attn_c_backward)


def prepare(q, k, v, scalars, start, normalizer, seq_len, scaling, window=None):
    """The arguments as C reads them: the arrays (the caller must hold on to them) and the plan. The caller has called
    check_kinds(). All tensors are on the CPU: the dispatcher and is_plain() see to that."""
    dtype = q.dtype
    bf16 = dtype == torch.bfloat16
    if bf16:
        q, k, v, dtype = q.float(), k.float(), v.float(), torch.float32
    steps = q.stride(), k.stride(), v.stride()
    if not steps[0][3] == steps[1][3] == steps[2][3] == 1:
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        steps = q.stride(), k.stride(), v.stride()
    p = plan(normalizer, seq_len, scaling, window, bf16, dtype, torch.get_num_threads(), q.shape, k.shape, v.shape,
             *steps)
    if scalars is None:
        scalars = start_scalars(normalizer, q.shape[1], seq_len, window, dtype)
    else:
        check_scalars(scalars, p.scalars, normalizer, q.shape[1])
        scalars = (scalars if scalars.dtype == dtype else scalars.to(dtype)).contiguous()     # to() alone takes 1 µs
    if start is not None:
        check_start(start, q.shape[0])
        start = clamped(start, k.shape[2])
    if p.by_position:
        check_positions(normalizer, seq_len, k.shape[2], start, window)
    return q, k, v, start, scalars, p


def pointer(x):
    return None if x is None else x.data_ptr()


def forward_cpu(q, k, v, scalars, start, normalizer, seq_len, scaling, window=None, keep=True):
    """keep: are the statistics returned? Otherwise they take room in the scratch memory, since each array takes a
    microsecond or two."""
    check_kinds(q, k, v)
    given = q.dtype
    q, k, v, start, scalars, p = prepare(q, k, v, scalars, start, normalizer, seq_len, scaling, window)
    out = q.new_empty_strided(*p.out)
    stats = q.new_empty_strided(*p.stats) if keep else None
    if out.numel():
        scratch = q.new_empty(p.scratch if keep else p.scratch + p.stats[1][0] * q.shape[0])
        end = scratch.data_ptr() + p.scratch * scratch.itemsize
        p.forward(p.pointer, q.data_ptr(), k.data_ptr(), v.data_ptr(), pointer(start), scalars.data_ptr(),
                  out.data_ptr(), stats.data_ptr() if keep else end, scratch.data_ptr())
    return out if out.dtype == given else out.to(given), stats


def rows_of(x, dtype):
    """The array (B, T, heads, width) of an x as by_position()."""
    return x.to(dtype).transpose(1, 2).contiguous()


def backward_cpu(dout, out, stats, q, k, v, scalars, start, normalizer, seq_len, scaling, window=None):
    check_kinds(q, k, v)
    check_saved(dout, out, stats, q, v, ROW_STATS)
    given, of_scalars = q.dtype, scalars
    q, k, v, start, scalars, p = prepare(q, k, v, scalars, start, normalizer, seq_len, scaling, window)
    dout, out, stats = rows_of(dout, q.dtype), rows_of(out, q.dtype), stats.contiguous()
    dq, dk, dv, dscalars = like(q), like(k), like(v), torch.zeros_like(scalars)
    if out.numel():
        scratch = q.new_empty(p.scratch)
        p.backward(p.pointer, q.data_ptr(), k.data_ptr(), v.data_ptr(), pointer(start), scalars.data_ptr(),
                   dout.data_ptr(), out.data_ptr(), stats.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
                   None if of_scalars is None else dscalars.data_ptr(), scratch.data_ptr())
    else:
        dq.zero_(), dk.zero_(), dv.zero_()
    if given != q.dtype:
        dq, dk, dv = dq.to(given), dk.to(given), dv.to(given)
    return dq, dk, dv, dscalars if of_scalars is None else dscalars.to(of_scalars.dtype)


library.impl("attention", forward_cpu, "CPU")
library.impl("attention_backward", backward_cpu, "CPU")
library.impl("attention", cuda.forward, "CUDA")
library.impl("attention_backward", cuda.backward, "CUDA")


# ---- fake

def kept_by(q, v, normalizer, seq_len):
    """How many statistics the forward pass keeps for each row."""
    return cuda.stats_size(q, v, normalizer, seq_len) if q.is_cuda else ROW_STATS


@torch.library.register_fake("attn_c::attention", lib=library)
def forward_fake(q, k, v, scalars, start, normalizer, seq_len, scaling, window=None):
    check_arguments(q, k, v, scalars, start, normalizer, seq_len, scaling, window)
    stats = q.new_empty((*q.shape[:3], kept_by(q, v, normalizer, seq_len)), dtype=statistics_dtype(q))
    return by_position(q, q.shape[2], v.shape[3]), stats


@torch.library.register_fake("attn_c::attention_backward", lib=library)
def backward_fake(dout, out, stats, q, k, v, scalars, start, normalizer, seq_len, scaling, window=None):
    count = check_arguments(q, k, v, scalars, start, normalizer, seq_len, scaling, window)
    check_devices(q, dout=dout, out=out, stats=stats)
    check_saved(dout, out, stats, q, v, kept_by(q, v, normalizer, seq_len))
    return like(q), like(k), like(v), (stats if scalars is None else scalars).new_empty(count)


# ---- autograd and autocast

class Attention(torch.autograd.Function):
    """The operator. `others`: the arguments that are not tensors."""

    @staticmethod
    def forward(ctx, q, k, v, scalars, start, others):
        out, stats = forward_below(q, k, v, scalars, start, *others)
        ctx.save_for_backward(out, stats, q, k, v, scalars, start)
        ctx.others = others
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return out, stats

    @staticmethod
    def backward(ctx, dout, _):
        return gradients(ctx, dout, backward_op)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("attn_c: forward-mode derivatives of attention are not implemented; expected "
                                  "backward() or grad()")


class DirectAttention(torch.autograd.Function):
    """The same by the CPU implementations, without the statistics, since each output takes a few microseconds."""

    @staticmethod
    def forward(ctx, q, k, v, scalars, start, others):
        out, stats = forward_cpu(q, k, v, scalars, start, *others)
        ctx.save_for_backward(out, stats, q, k, v, scalars, start)
        ctx.others = others
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dout):
        return gradients(ctx, dout, backward_cpu)

    jvp = Attention.jvp


def gradients(ctx, dout, backward_pass):
    if dout is None:
        return (None,) * 6
    saved = ctx.saved_tensors
    compute = backward_pass if is_plain(dout) and not torch.is_grad_enabled() else backward_op
    dq, dk, dv, dscalars = compute(dout, *saved, *ctx.others)
    return dq, dk, dv, None if saved[5] is None else dscalars, None, None


def needs_gradient(tensors):
    if torch.is_grad_enabled():
        for x in tensors:       # any() would take a microsecond
            if x is not None and x.requires_grad:
                return True
    return False


def is_differentiated(tensors):
    """Also in forward mode, which Attention rejects."""
    return forward_ad._current_level >= 0 or needs_gradient(tensors)


def forward_below(*arguments):
    with BelowAutograd():
        return forward_op(*arguments)


def forward_autograd(*arguments):
    if torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError("attn_c: derivatives by torch.func of attention are not implemented; expected "
                                  "backward() or torch.autograd.grad()")
    if is_differentiated(arguments[:4]):
        return Attention.apply(*arguments[:5], arguments[5:])
    return forward_below(*arguments)


def backward_autograd(*arguments):
    if needs_gradient(arguments[:7]):
        raise RuntimeError("attn_c: second derivatives of attention are not implemented; expected backward() or grad() "
                           "without create_graph=True")
    with BelowAutograd():
        return backward_op(*arguments)


library.impl("attention", forward_autograd, "Autograd")
library.impl("attention_backward", backward_autograd, "Autograd")


def autocast_on(device):
    def forward_autocast(q, k, v, *others):
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return forward_op(q.to(dtype), k.to(dtype), v.to(dtype), *others)
    return forward_autocast


for device, key in ("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"):
    library.impl("attention", autocast_on(device), key)


# ---- without the dispatcher, which takes 10 µs for the operator with autograd

def plain_keys():
    """The keys of tensors on the CPU, and of those without autograd: for others, such as negative views, sparse tensors
    and wrappers, the dispatcher does more than to call the CPU implementation."""
    with torch.inference_mode():
        inference = torch.empty(0, device="cpu")
    with torch.inference_mode(False):
        return {dispatch_keys(x).raw_repr() for x in (inference, torch.empty(0, device="cpu"))}


PLAIN = plain_keys()


def is_plain(*tensors):
    """Are all of them plain, apart from None?"""
    try:
        for x in tensors:
            if x is not None and dispatch_keys(x).raw_repr() not in PLAIN:
                return False
    except TypeError:       # not a tensor
        return False
    return True


def is_direct():
    """Outside of compilation, tracing, autocast, modes and functional transforms?"""
    return (not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
            and torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.maybe_current_level() is None
            and torch._C._get_tracing_state() is None)


# apply() without its search for functional transforms.
apply_direct = super(torch.autograd.Function, DirectAttention).apply


def forward(q, k, v, scalars, start, *others):
    """The output of the operator, by the shortest way."""
    if not (is_direct() and is_plain(q, k, v, scalars, start)):
        check_tensors(q=q, k=k, v=v, scalars=scalars, start=start)
        return forward_op(q, k, v, scalars, start, *others)[0]
    if is_differentiated((q, k, v, scalars)):
        return apply_direct(q, k, v, scalars, start, others)
    return forward_cpu(q, k, v, scalars, start, *others, keep=False)[0]

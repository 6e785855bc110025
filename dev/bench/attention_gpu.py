"""Attention alone on a GPU, forward and backward, for each normalizer: ours (flash.so) against PyTorch's methods.

    python3 dev/bench/attention_gpu.py REPORT attention [--budget 200]
        softmax against SDPA at T = 1k to 16k, also with sums in any order and with the kernels for compute capability
        8.0; each normalizer against our softmax at 4k and 1k
    python3 dev/bench/attention_gpu.py REPORT shapes [--budget 60]
        a few normalizers at T = 4k with heads of 128 and 48, grouped heads, a gated unit's head, and in float32; then
        softmax at T = 16k in a window of 512 against FlexAttention with a block mask
    python3 dev/bench/attention_gpu.py REPORT others [--budget 500]
        each normalizer against PyTorch's methods at 4k, then 1k
    python3 dev/bench/attention_gpu.py REPORT others --dry-run
        tiny shapes on the CPU, no compiler, to show that everything runs

Causal, 16,384 tokens per batch; except in `shapes`, bf16 and 12 heads of 64. PyTorch's methods:

    sdpa-flash, sdpa-cudnn, sdpa-efficient
                             scaled_dot_product_attention with that backend (softmax)
    sdpa                     the same, for normalizers reducible to it: q pre-scaled by row, or the output negated or
                             recentered (ssmax, ...)
    flex                     FlexAttention, for any phi that is never negative: with ln phi(z) as the score, its softmax
                             is phi over its sum, and its log-sum-exp gives any other Z
    compile                  torch.compile of the formula in dev/reference/model.py, with matmuls in bf16 and rows in
                             float32, as a researcher would write it

Each case alternates between SETS sets of random inputs, more than the cache holds. A pass over one set is a CUDA graph,
so that Python's time does not count. Both sides get the same warmup, events around each replay, and the median of a
round; two rounds run in opposite orders. First the output and gradients of every method are compared with the float32
formula: a method whose error is more than three times that of the plain bf16 formula is "wrong" and does not count.
Under qk=l2 all sides get q and k that already have norm 1 (in the trainer that is part of RoPE's kernel). Compilation
is never timed.

After an error of CUDA, such as an illegal memory access, a process can no longer use the GPU. The method in which it
occurred is recorded as failed, and the program starts anew with the time that is left.
"""
import ctypes
import math
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("dev/bench", "dev/reference", "dev/tests")]
import gpu_report

import torch
import torch.nn.functional as F

import model as reference
from flash_types import Shape, arrays_for, scalar_names

TOKENS, SETS, ROUNDS = 16384, 4, 2
SWEEP, LENGTHS = (4096, 1024, 2048, 8192, 16384), (4096, 1024)        # those that the bounds are about come first
# One of each kind: if time is short, these are measured and the others left.
FIRST = ("softmax", "lssar", "ssmax", "softmax-recentered-l1", "gelu-l1", "sigmoid", "softpick", "softmax-sink",
         "softplus-l1", "relu2-n", "softmax-recentered", "mish-l1", "lssa", "softmax1", "ssmax-bias", "ssmax-pn",
         "identity-l1", "exp")
ATTN = [*FIRST, *(name for name in reference.PRESETS if name not in FIRST)]


@dataclass(frozen=True)
class Layout:
    """Of q, k and v. The number of heads of k and v divides that of q."""
    heads: int = 12
    kv_heads: int = 12
    size: int = 64
    value_size: int = 64
    dtype: torch.dtype = torch.bfloat16

    def shape(self, T):
        """(B, T, NH, NKV)"""
        if DRY:
            kv_heads = min(2, self.kv_heads)
            return 2, T, kv_heads * (self.heads // self.kv_heads), kv_heads
        return max(1, TOKENS // T), T, self.heads, self.kv_heads


# 12 heads of 64 are those of the 124M model; the gated unit's head is that of a model with 768 channels.
LAYOUTS = {"6 heads of 128": Layout(6, 6, 128, 128), "12 heads of 64, 4 of keys and values": Layout(12, 4),
           "16 heads of 48": Layout(16, 16, 48, 48), "1 head of 128, values of 1,536": Layout(1, 1, 128, 1536),
           "12 heads of 64, float32": Layout(dtype=torch.float32)}
SHAPES_ATTN = "softmax", "sigmoid", "lssar"
WINDOW, WINDOW_T = "softmax+window=512", 16384

LIMIT = 150                      # seconds after which a case, or its compilation, has failed
START = 5                        # seconds that a new process takes to begin
DRY = False


def device():
    return "cpu" if DRY else "cuda"


def synchronize():
    """Waits for the device, so that an error in what ran there is raised here."""
    if not DRY:
        torch.cuda.synchronize()


# ---------------------------------------------------------------- inputs

class Case:
    """A normalizer at a length: sets of inputs, and the scalars that it has. q (B,NH,T,HS), k (B,NKV,T,HS) and v
    (B,NKV,T,VS) are views of an array (B,T,NH·HS + NKV·HS + NKV·VS)."""

    def __init__(self, name, T, sets, layout=Layout()):
        self.name, self.T, self.layout = name, T, layout
        self.normalizer = reference.parse_normalizer(name)
        self.keys = min(T, self.normalizer.window or T)        # the most that a row sees
        self.text = name.replace(f"+window={self.normalizer.window}", "")         # what flash.so parses
        self.B, _, self.NH, self.NKV = layout.shape(T)
        self.parts = self.NH * layout.size, self.NKV * layout.size, self.NKV * layout.value_size
        torch.manual_seed(T)
        self.joined, self.douts = [], []
        for _ in range(sets):
            joined = torch.randn(self.B, T, sum(self.parts), device=device())
            if self.normalizer.qk == "l2":
                for x in self.views(joined)[:2]:
                    x.copy_(F.normalize(x, dim=-1))
            self.joined.append(joined.to(layout.dtype))
            self.douts.append(torch.randn(self.B, T, self.NH, layout.value_size, device=device()).to(layout.dtype))
        start = reference.scalars_at_start(self.normalizer, self.NH, T, torch.float32)
        self.scalars = {key: x.to(device()) for key, x in start.items()}

    def views(self, joined):
        return [x.unflatten(-1, (heads, -1)).transpose(1, 2)
                for x, heads in zip(joined.split(self.parts, -1), (self.NH, self.NKV, self.NKV))]

    def heads(self, i):
        """q, k, v and dout (B,NH,T,VS) of set i."""
        return [*self.views(self.joined[i]), self.douts[i].transpose(1, 2)]


# ---------------------------------------------------------------- ours

class Flash:
    """Loads flash.so; a dry run uses the one in build/on_cpu, whose device memory belongs to the emulator.

    flash.so ends the process on an error. Before that it calls `failed`, if there is one, with a text."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.flash_on_device_scratch.restype = self.library.flash_on_device_stats.restype = ctypes.c_size_t
        self.failed = None
        self.hook = ctypes.CFUNCTYPE(None, ctypes.c_int)(self.ends)           # fail_hook of runtime/error.h
        ctypes.c_void_p.in_dll(self.library, "fail_hook").value = ctypes.cast(self.hook, ctypes.c_void_p).value

    def ends(self, code):
        if self.failed:
            self.failed(f"flash.so ended with exit code {code}")

    def tensor(self, shape, dtype):
        """Zeros on the device."""
        if not DRY:
            return torch.zeros(shape, dtype=dtype, device="cuda")
        count, where = math.prod(shape), ctypes.c_void_p()
        size = max(1, count * torch.empty((), dtype=dtype).element_size())
        if self.library.cudaMalloc(ctypes.byref(where), ctypes.c_size_t(size)):
            raise MemoryError(f"{size} bytes of the emulated device")
        raw = (ctypes.c_char * size).from_address(where.value)
        return torch.frombuffer(raw, dtype=dtype, count=count).view(shape).zero_()

    def copy(self, x):
        return self.tensor(x.shape, x.dtype).copy_(x)

    def size(self, what, name, dtype, shape):
        """Of "scratch", in bytes; of "stats", in floats that a forward pass keeps for the backward pass."""
        function = getattr(self.library, f"flash_on_device_{what}")
        return function(name.encode(), is_bf16(dtype), ctypes.byref(shape))

    def run(self, name, dtype, shape, arrays, all_zero_rows, scratch, backward):
        stream = 0 if DRY else torch.cuda.current_stream().cuda_stream
        self.library.flash_on_device(name.encode(), is_bf16(dtype), ctypes.byref(shape), ctypes.byref(arrays),
                                     ctypes.c_void_p(all_zero_rows.data_ptr()), ctypes.c_void_p(scratch.data_ptr()),
                                     ctypes.c_bool(backward), ctypes.c_void_p(stream))


def is_bf16(dtype):
    return ctypes.c_bool(dtype == torch.bfloat16)


# As trained by default; with --deterministic 0; and with the kernels for compute capability 8.0 on any GPU, as all are
# if FLASH90=0 is set.
OURS = ("ours", "ours-any-order", "ours-mma")
ALL_MMA = os.environ.get("FLASH90") == "0"


class Ours:
    """Our kernels on the sets of a case. q, k and v are parts of one array, as in the trainer."""

    def __init__(self, case, flash, way="ours"):
        self.case, self.flash, self.way = case, flash, way
        row, layout = sum(case.parts), case.layout
        self.shape = Shape(case.B, case.T, case.NH, case.NKV, layout.size, layout.value_size, case.T, row, row, row,
                           case.NH * layout.value_size)
        self.shape.any_order = way == "ours-any-order"
        if case.normalizer.window:
            first = (torch.arange(case.T) + 1 - case.keys).clamp(min=0).repeat(case.B, 1).int()
            self.first = flash.copy(first.to(device()))
            self.shape.first, self.shape.window = self.first.data_ptr(), case.keys
        self.select()
        self.scratch = flash.tensor((flash.size("scratch", case.text, layout.dtype, self.shape),), torch.uint8)
        self.rows = flash.tensor((1,), torch.int64)
        self.scalars = {key: flash.copy(x) for key, x in case.scalars.items()}
        self.sets = [self.take(joined, dout) for joined, dout in zip(case.joined, case.douts)]

    def select(self):
        os.environ["FLASH90"] = "0" if ALL_MMA or self.way == "ours-mma" else "1"

    def take(self, joined, dout):
        """(tensors, their addresses) for a set."""
        new, dtype = self.flash.tensor, self.case.layout.dtype
        x = {"joined": joined, "dout": dout, "out": new(dout.shape, dtype), "djoined": new(joined.shape, dtype),
             "stats": new((self.flash.size("stats", self.case.text, dtype, self.shape),), torch.float32),
             **{"d" + key: new(value.shape, torch.float32) for key, value in self.scalars.items()}}
        if DRY:
            x.update(joined=self.flash.copy(joined), dout=self.flash.copy(dout))
        arrays, offset = arrays_for(self.flash.library), 0
        for key, size in zip("qkv", self.case.parts):
            setattr(arrays, key, x["joined"].data_ptr() + offset)
            setattr(arrays, "d" + key, x["djoined"].data_ptr() + offset)
            offset += size * dtype.itemsize
        for key in ("dout", "out", "stats"):
            setattr(arrays, key, x[key].data_ptr())
        order = scalar_names(self.flash.library)
        for key, value in self.scalars.items():
            at = order.index(reference.SCALARS[key].tensor)
            arrays.scalars[at] = value.data_ptr()
            arrays.grads[at] = x["d" + key].data_ptr() if reference.trains(self.case.normalizer, key) else None
        return x, arrays

    def forward(self, i):
        self.select()
        self.run(i, False)

    def both(self, i):
        """Output (B,NH,T,VS), then the gradients of q, k, v."""
        self.forward(i)
        self.run(i, True)
        x = self.sets[i][0]
        return [x["out"].transpose(1, 2), *self.case.views(x["djoined"])]

    def run(self, i, backward):
        case = self.case
        self.flash.run(case.text, case.layout.dtype, self.shape, self.sets[i][1], self.rows, self.scratch, backward)

    def peak_gb(self):
        """The memory that a pass needs besides q, k, v and dout."""
        new = [x for key, x in self.sets[0][0].items() if key not in ("joined", "dout")] + [self.scratch]
        return sum(x.numel() * x.element_size() for x in new) / 1e9


# ---------------------------------------------------------------- PyTorch

def formula(q, k, v, case, scalars):
    """The reference's formula, with matmuls in the inputs' type and rows in float32, or in float64 if they are."""
    normalizer, group = case.normalizer, case.NH // case.NKV
    n = torch.arange(1, case.T + 1, dtype=torch.float32, device=q.device)[:, None].clamp(max=case.keys)
    visible = torch.ones(case.T, case.T, dtype=torch.bool, device=q.device).tril().triu(1 - case.keys)
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    z = (reference.scale_of_row(normalizer.scale, n, case.layout.size, case.T, scalars) * scores
         + reference.offset_of_row(normalizer.offset, n, case.T))
    A = reference.normalized(z, visible, normalizer.norm, n, case.T, normalizer.phi, scalars.get("sink"))
    return reference.posted(A, visible, normalizer.post, n).to(v.dtype) @ v


SIGNED = "identity", "expm1", "gelu", "mish"            # phi that is negative for some z


def not_by_flex(normalizer):
    """Why a single call of FlexAttention cannot compute a normalizer, or "" if it can."""
    if normalizer.phi in SIGNED:
        return "phi has both signs"
    if normalizer.post.startswith(("recenter-l1", "reweight")):
        return "a second sweep over the keys"
    return ""


def by_sdpa(normalizer):
    """True for a softmax of scaled scores, possibly negated or minus its mean."""
    return ((normalizer.phi, normalizer.offset, normalizer.norm) == ("exp", "none", "l1")
            and normalizer.post in ("none", "negate", "recenter"))


def needs_sum(normalizer):
    """True if the output depends on the row's log-sum-exp."""
    return normalizer.norm != "l1" or (normalizer.post == "recenter" and normalizer.phi != "exp")


def score_mod(case):
    """FlexAttention's f(score, b, h, i, j) that returns ln phi(z), so that the softmax is phi over its sum; None for
    softmax's own scores."""
    phi, offset = case.normalizer.phi, case.normalizer.offset
    if (phi, offset) == ("exp", "none"):
        return None

    def log_phi(score, b, h, i, j):
        z = score
        if offset == "-logn":
            z = z - torch.log((i + 1).to(z.dtype))
        elif offset != "none":
            z = z - math.log(case.T)                        # -logT, and -logL, since a case's L is its T
        if phi == "exp":
            return z
        f = reference.PHI[phi](z)
        return torch.where(f > 0, torch.log(torch.where(f > 0, f, 1.0)), -math.inf)     # gradient 0, not NaN

    return log_phi


def sum_of_weights(norm, n, L, log_sum, scalars):
    """The sum of each row of A before post, from ln of the sum of phi(z) (B,NH,T,1), which is -inf if all of them are
    0."""
    if norm == "l1+sink":
        return torch.sigmoid(log_sum - scalars["sink"][:, None, None])
    if not norm.startswith("l1"):
        return torch.exp(log_sum) / reference.fixed_norm(norm, n, L)
    C = float(norm[3:] or 0)
    return torch.sigmoid(log_sum - math.log(C)) if C > 0 else (log_sum > -math.inf).to(log_sum.dtype)


def by_softmax(softmax, q, k, v, case, scalars):
    """Computes the normalizer from softmax(q, k, v), which returns the output and, if needs_sum(), each row's
    log-sum-exp. A row's scale is a factor of q: in the score modification, it would cost a multiplication per
    score."""
    normalizer, dtype = case.normalizer, torch.promote_types(q.dtype, torch.float32)
    n = torch.arange(1, case.T + 1, dtype=dtype, device=q.device)[:, None]
    if normalizer.scale != "rsqrt-d":
        size = case.layout.size
        q = (q * (reference.scale_of_row(normalizer.scale, n, size, case.T, scalars) * math.sqrt(size))).to(q.dtype)
    out, log_sum = softmax(q, k, v)
    weights = 1.0
    if needs_sum(normalizer):
        weights = sum_of_weights(normalizer.norm, n, case.T, log_sum[..., None], scalars)
        out = (out * weights).to(v.dtype)
    if normalizer.post == "recenter":
        out = out - torch.where(n > 3, weights * torch.cumsum(v, -2, dtype=dtype) / n, 0.0).to(out.dtype)
    return -out if normalizer.post == "negate" else out


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]), None


def sdpa_by(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def softmax(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return sdpa(q, k, v)
    return softmax


def flex(case):
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (j > i - case.keys), None, None, case.T, case.T,
                             device=device())

    def softmax(q, k, v):
        if not needs_sum(case.normalizer):
            return flex_attention(q, k, v, score_mod=score_mod(case), block_mask=mask), None
        out, aux = flex_attention(q, k, v, score_mod=score_mod(case), block_mask=mask, return_aux=AuxRequest(lse=True))
        return out, aux.lse
    return softmax


def compiled(function):
    return function if DRY else torch.compile(function, dynamic=False)


def way_names(name):
    """The names of PyTorch's methods that can compute a normalizer."""
    normalizer = reference.parse_normalizer(name)
    if name == "softmax":
        return ["sdpa-flash", "sdpa-cudnn", "flex", "compile"]
    sdpa_ = ["sdpa"] if by_sdpa(normalizer) else []
    flex_ = [] if not_by_flex(normalizer) else ["flex"]
    return [*sdpa_, *flex_, "compile"]


def function_of(case, way):
    """f(q, k, v, scalars) by the method with this name from way_names(). Nothing is compiled yet."""
    if way == "compile":
        return compiled(lambda *x: formula(*x[:3], case, x[3]))
    back_ends = {"sdpa-flash": "FLASH_ATTENTION", "sdpa-cudnn": "CUDNN_ATTENTION",
                 "sdpa-efficient": "EFFICIENT_ATTENTION"}
    if way in back_ends:
        softmax = sdpa_by("MATH" if DRY else back_ends[way])
        return lambda *x: by_softmax(softmax, *x[:3], case, x[3])
    softmax = flex(case) if way == "flex" else sdpa
    return compiled(lambda *x: by_softmax(softmax, *x[:3], case, x[3]))


class Torch:
    """One of PyTorch's methods, ready to run on set i of a case. Learned scalars also get gradients."""

    def __init__(self, case, way):
        self.case, self.function = case, function_of(case, way)
        self.trains = not (DRY and way == "flex")                  # FlexAttention has no backward pass on a CPU
        self.scalars = {key: x.detach().clone().requires_grad_(self.trains and reference.trains(case.normalizer, key))
                        for key, x in case.scalars.items()}

    def inputs(self, i):
        return [x.detach().requires_grad_(self.trains) for x in self.case.heads(i)[:3]]

    def forward(self, i, inputs=None):
        return self.function(*(inputs or self.inputs(i)), self.scalars)

    def both(self, i):
        """Output, then the gradients of q, k, v."""
        inputs = self.inputs(i)
        out = self.forward(i, inputs)
        if not self.trains:
            return [out]
        wanted = inputs + [x for x in self.scalars.values() if x.requires_grad]
        return [out, *torch.autograd.grad(out, wanted, self.case.heads(i)[3])[:3]]

    def peak_gb(self):
        """The device memory that forward and backward take besides q, k, v and dout, according to PyTorch's
        allocator."""
        if DRY:
            return None
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.both(0)
        synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e9


# ---------------------------------------------------------------- are the values right?

def some(x, case):
    """The first sequence of an array (B,NH,T,HS) or (B,NKV,T,HS), and as many heads as leave room for the formula's
    T×T arrays in float32."""
    kv_heads = max(1, int(case.NKV * min(1, 4096 / case.T) ** 2))
    return x[:1, :kv_heads * (x.shape[1] // case.NKV)]


def slice_of(case, dtype):
    """The formula's output and gradients of q, k, v for some() of set 0, with matmuls in `dtype`."""
    q, k, v, dout = (some(x, case).to(dtype) for x in case.heads(0))
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = formula(*inputs, case, {key: x if key == "p" else x[:q.shape[1]] for key, x in case.scalars.items()})
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def distance(found, expected):
    """The largest relative error of output and gradients; NaN if one of them is NaN."""
    errors = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected)]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


class Judge:
    """Compares with the float32 formula; the error of the plain bf16 formula sets the bound. For float32 inputs,
    float64 and float32 take their places."""

    def __init__(self, case):
        in_bf16 = case.layout.dtype == torch.bfloat16
        self.case, self.expected = case, slice_of(case, torch.float32 if in_bf16 else torch.float64)
        self.allowed = 3 * distance(slice_of(case, case.layout.dtype), self.expected) + (1e-3 if in_bf16 else 1e-5)

    def error(self, variant):
        return distance([some(x, self.case) for x in variant.both(0)], self.expected)


# ---------------------------------------------------------------- how long does it take?

def graphs(calls):
    """Functions that replay each call as a CUDA graph; the calls themselves if one cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        captured = []
        for call in calls:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=captured[0].pool() if captured else None):
                call()
            captured.append(graph)
        return [graph.replay for graph in captured]
    except RuntimeError as error:
        print(f"  no graph: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return calls


def milliseconds(calls, seconds):
    """The median time of a call, alternating between the calls."""
    if DRY:
        times = []
        for call in calls:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    events = []
    start = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    once = max(1e-5, (time.perf_counter() - start) / len(calls))
    for i in range(max(12, min(200, int(seconds / once)))):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        calls[i % len(calls)]()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


class Timed:
    """A variant and its record: checked, its memory measured, captured, then timed round by round."""

    def __init__(self, variant, judge, sets):
        self.variant = variant          # its tensors, to which the graphs have only pointers, live as long as they do
        self.record = {"forward_ms": [], "both_ms": [], "error": judge.error(variant), "allowed": judge.allowed}
        self.record["wrong"] = not self.record["error"] <= judge.allowed
        self.record["peak_gb"] = variant.peak_gb()
        passes = [[lambda i=i: variant.forward(i) for i in range(sets)],
                  [lambda i=i: variant.both(i) for i in range(sets)]]
        self.passes = passes if DRY else [graphs(calls) for calls in passes]

    def round(self, seconds):
        forward, both = self.passes
        self.record["forward_ms"].append(milliseconds(forward, seconds))        # a traceback shows which of the two
        self.record["both_ms"].append(milliseconds(both, seconds))


def first_line(error):
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else ""


def ends_context(error):
    """True for an error of CUDA, after which this process may be unable to use the GPU."""
    return (isinstance(error, getattr(torch, "AcceleratorError", ()))
            or isinstance(error, RuntimeError) and str(error).startswith(("CUDA error", "Triton Error [CUDA]")))


def start_anew(seconds):
    """Replaces this process by a new one, with so many seconds left, that skips what has been recorded."""
    print("attention_gpu: starts anew", flush=True)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.argv, "--budget", f"{max(0, seconds - START):.1f}"])


class Watch:
    """Guards the measurement of a case. `name` and `way` say what runs. If it does not end within LIMIT seconds, it is
    recorded as failed, and this process ends, since a call into the driver cannot be interrupted; the next call
    continues with the rest. If CUDA or flash.so fails, it is recorded as failed, and the program starts anew. The
    case's other methods, whose rounds are not complete, are then measured again."""

    def __init__(self, report, options, flash, name, T, way="ours", **keys):
        self.report, self.options, self.flash, self.T, self.keys = report, options, flash, T, keys
        self.at(name, way)
        self.seconds = LIMIT * (10 if DRY else 1)
        self.timer = threading.Timer(self.seconds, self.give_up)
        self.timer.daemon = True

    def at(self, name, way):
        self.name, self.way = name, way

    def record(self, text):
        keep(self.report, self.options.part, self.name, self.T, {self.way: {"failed": text}}, **self.keys)

    def give_up(self):
        self.record(f"timed out after {self.seconds:g} s")
        os._exit(gpu_report.FAILED if self.way in OURS else gpu_report.UNFINISHED)

    def failed(self, text):
        self.timer.cancel()
        self.record(text)
        start_anew(self.options.budget.left())

    def __enter__(self):
        self.flash.failed = self.failed
        self.timer.start()
        return self

    def __exit__(self, kind, error, trace):
        self.timer.cancel()
        self.flash.failed = None
        if error is not None and ends_context(error):
            traceback.print_exception(kind, error, trace)
            self.failed(first_line(error))


def measure(name, T, ways, flash, rounds, seconds, watch, beside=None, layout=Layout()):
    """{method: record} for a normalizer at a length; the methods are OURS and those of function_of(). Each of our
    rounds is compared with a round of `beside`, a Timed of softmax (record["of_softmax"]). The device has finished one
    method before the next begins, so that an error is raised while `watch` names the method that it belongs to."""
    watch.at(name, ways[0])
    case = Case(name, T, 1 if DRY else SETS, layout)
    sets = len(case.joined)
    judge = Judge(case)
    found, timed = {}, {}
    for way in ways:
        watch.at(name, way)
        try:
            timed[way] = Timed(Ours(case, flash, way) if way in OURS else Torch(case, way), judge, sets)
        except (RuntimeError, NotImplementedError, ValueError, ImportError) as error:
            if ends_context(error):
                raise
            # Out of memory, or an unsupported shape.
            found[way] = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        synchronize()
    for round_ in range(rounds):
        for way in list(timed) if round_ % 2 == 0 else reversed(list(timed)):
            if beside and way == "ours":
                watch.at("softmax", way)
                beside.round(seconds)
            watch.at(name, way)
            timed[way].round(seconds)
            if beside and way == "ours":
                ratio = timed[way].record["both_ms"][-1] / beside.record["both_ms"][-1]
                timed[way].record.setdefault("of_softmax", []).append(ratio)
    for t in timed.values():
        add_rates(t.record, case)
    return {**found, **{way: t.record for way, t in timed.items()}}


def add_rates(record, case):
    """Adds TFLOP/s over the visible scores: two matmuls forward, and five more backward, of which three are over q's
    and k's columns and two over v's."""
    layout = case.layout
    scores = case.B * case.NH * (case.T * case.keys - case.keys * (case.keys - 1) / 2)
    for key, columns in (("forward", layout.size + layout.value_size),
                         ("both", 4 * layout.size + 3 * layout.value_size)):
        record[f"{key}_tflops"] = 2 * scores * columns / statistics.median(record[f"{key}_ms"]) / 1e9


# ---------------------------------------------------------------- the parts

def keep(report, part, name, T, found, **keys):
    """keys: what else identifies the case"""
    for way, record in found.items():
        said = (record.get("failed") or f"forward {statistics.median(record['forward_ms']):8.3f} ms, both "
                f"{statistics.median(record['both_ms']):8.3f} ms, error {record['error']:.1e}"
                f"{' WRONG' if record['wrong'] else ''}")
        print(f"T={T:6} {name:24} {way:11} {said}", *keys.values(), flush=True)
        report.record(part, {"attn": name, "T": T, "way": way, **keys}, device=device(), **record)
    report.save()


def lacking(report, part, name, T, ways, **keys):
    """The methods to measure. Those that failed are not tried again: a method may not exist here."""
    return [way for way in ways if not report.find(part, attn=name, T=T, way=way, **keys, device=device())]


def time_case(report, options, flash, name, T, ways, rounds=ROUNDS, beside=None, **keys):
    with Watch(report, options, flash, name, T, ways[0], **keys) as watch:
        found = measure(name, T, ways, flash, rounds, options.seconds, watch, beside,
                        LAYOUTS.get(keys.get("layout"), Layout()))
    keep(report, options.part, name, T, found, **keys)


def part_attention(report, options, flash):
    """Times softmax against SDPA at each T, then each normalizer of ours against our softmax. Returns the cases that
    were left."""
    left_out, beside = [], {}
    cases = [("softmax", T, (*OURS, "sdpa-flash", "sdpa-cudnn")) for T in options.sweep]
    cases += [(name, T, ("ours",)) for T in options.lengths for name in ATTN if name != "softmax"]
    for name, T, ways in cases:
        ways = lacking(report, "attention", name, T, ways)
        if ways and options.budget.left() < 10:
            left_out.append(f"{name} at T = {T}")
        elif ways and name == "softmax":
            time_case(report, options, flash, name, T, ways, ROUNDS + 1)
        elif ways:
            softmax = report.find("attention", attn="softmax", T=T, way="ours", device=device())
            if T not in beside and not any("failed" in r for r in softmax):
                with Watch(report, options, flash, "softmax", T):
                    beside = {T: timed_softmax(T, flash)}
            time_case(report, options, flash, name, T, ways, beside=beside.get(T))
    tables_attention(report, left_out)
    return left_out


def part_shapes(report, options, flash):
    """Times SHAPES_ATTN in each layout; softmax beside SDPA, where it has a backend for it. Then WINDOW. Returns the
    cases that were left."""
    left_out, T = [], options.lengths[0]
    cases = [(layout_name, name, T, sdpa_ways(layout) if name == "softmax" else [])
             for layout_name, layout in LAYOUTS.items() for name in SHAPES_ATTN]
    cases.append(("12 heads of 64", WINDOW, T if DRY else WINDOW_T, ["flex"]))
    for layout_name, name, T, others in cases:
        ways = lacking(report, "shapes", name, T, ("ours", *others), layout=layout_name)
        if ways and options.budget.left() < 10:
            left_out.append(f"{name}, {layout_name}")
        elif ways:
            time_case(report, options, flash, name, T, ways, layout=layout_name)
    table_shapes(report, left_out)
    return left_out


def sdpa_ways(layout):
    """SDPA's backends for a layout. None takes values this much longer than queries, and none but this one float32."""
    if layout.size != layout.value_size:
        return []
    return ["sdpa-efficient"] if layout.dtype == torch.float32 else ["sdpa-flash", "sdpa-cudnn"]


def timed_softmax(T, flash):
    case = Case("softmax", T, 1 if DRY else SETS)
    timed = Timed(Ours(case, flash), Judge(case), len(case.joined))
    synchronize()
    return timed


A_PROCESS_GB = 20                # of a compiling process at T = 4096: several T×T arrays in float32


def workers(T):
    """The number of processes that may compile at a time."""
    memory = torch.cuda.mem_get_info()[0] / 1e9
    return int(max(1, min((os.cpu_count() or 1) - 2, memory / (4 + A_PROCESS_GB * T / 4096))))


def warm(options, cases):
    """Compiles the cases into the compiler's cache on disk, in processes of their own, several at a time. Returns those
    that ended in time, and those that did not end within LIMIT seconds."""
    def one(case):
        name, T, way = case
        seconds = min(LIMIT, options.budget.left())
        if seconds < 30:
            return None
        words = [sys.executable, __file__, "warm", name, str(T), way]
        try:
            one_thread = dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1")
            result = subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=one_thread)
            print(f"compiled {name} T={T} {way}: "
                  f"{'done' if result.returncode == 0 else result.stderr.strip().splitlines()[-1:]}", flush=True)
            return case
        except subprocess.TimeoutExpired:
            print(f"compiled {name} T={T} {way}: timed out after {seconds:.0f} s", flush=True)
            if seconds == LIMIT:
                endless.add(case)
            return None

    endless = set()
    with ThreadPoolExecutor(workers(cases[0][1])) as pool:
        return {case for case in pool.map(one, cases) if case}, endless


def part_others(report, options, flash):
    """Times each normalizer against PyTorch's methods, several normalizers at a time: their methods are compiled in
    parallel, then timed one by one. Returns the cases that were left."""
    left_out = []

    def lacks(name, T, *ways):
        return lacking(report, "others", name, T, ways or way_names(name))

    missing = [(name, T) for T in options.lengths for name in ATTN if lacks(name, T, "ours") or lacks(name, T)]
    while missing:
        T = missing[0][1]
        size = len(missing) if DRY else workers(T)
        some = [case for case in missing[:size] if case[1] == T]
        missing = missing[len(some):]
        to_compile = [(name, T, way) for name, T in some for way in lacks(name, T) if not way.startswith("sdpa-")]
        ready, endless = set(to_compile) if DRY else set(), set()
        if not DRY and to_compile and options.budget.left() > 60:
            ready, endless = warm(options, to_compile)
        for name, T, way in endless:
            keep(report, "others", name, T, {way: {"failed": f"not compiled within {LIMIT} s"}})
        for name, T in some:
            ways = [way for way in lacks(name, T) if way.startswith("sdpa-") or (name, T, way) in ready]
            if options.budget.left() < 15 or len(ways) < len(lacks(name, T)):
                left_out.append(f"{name} at T = {T}")
                continue
            ways = lacks(name, T, "ours") + ways
            if not ways:                                      # its last method has just failed to compile
                continue
            torch._dynamo.reset()
            if not DRY:
                torch.cuda.empty_cache()
            time_case(report, options, flash, name, T, ways)
    tables_others(report, left_out)
    return left_out


# ---------------------------------------------------------------- tables

def cell(value, digits=2):
    return "" if value is None else f"{value:.{digits}f}"


def ms(record, key):
    if record is None:
        return ""
    return (record["failed"][:60] if record.get("failed")
            else cell(statistics.median(record[key]), 3) + (" (wrong)" if record["wrong"] else ""))


def notes_of(left_out, heads="12 heads of 64, bf16, "):
    shape = (f"{heads}causal, {TOKENS:,} tokens per batch" if not DRY
             else f"{heads}a dry run on the CPU with fewer heads: the times mean nothing")
    return [f"{shape}; PyTorch {torch.__version__}; medians over the rounds, which alternate between the variants",
            *gpu_report.not_measured(left_out)]


def over(theirs, ours, key="both_ms"):
    """Their time over ours, if both were measured."""
    return cell(gpu_report.ratio(theirs, ours, key)) if theirs and ours and key in theirs and key in ours else ""


def tables_attention(report, left_out):
    table, of_ours, rates, passes = [], [], [], ("forward_ms", "both_ms")
    for T in sorted({r["T"] for r in report.find("attention", attn="softmax", way="ours")}):
        ways = {r["way"]: r for r in report.find("attention", attn="softmax", T=T)}
        ours, flash, cudnn = (ways.get(way) for way in ("ours", "sdpa-flash", "sdpa-cudnn"))
        table.append([T, *(ms(r, key) for key in passes for r in (ours, flash, cudnn)),
                      *(over(flash, ours, key) for key in passes), cell(ours.get("both_tflops"), 0),
                      *(cell(r.get("peak_gb")) if r else "" for r in (ours, flash))])
        of_ours.append([T, *(ms(ways.get(way), key) for way in OURS for key in passes)])
        rates.append([T, *(cell(ways.get(way, {}).get(key), 0)
                           for way in OURS for key in ("forward_tflops", "both_tflops"))])
    report.table("attention", "softmax, ms",
                 ["T", "ours forward", "SDPA flash", "SDPA cuDNN", "ours both", "SDPA flash", "SDPA cuDNN",
                  "flash/ours forward", "flash/ours both", "ours TFLOP/s both", "peak GB ours", "peak GB flash"], table,
                 notes_of(left_out) + ["TFLOP/s: as usual, 3.5 times the forward pass's matmuls over the causal half"])
    head = ["T", *(f"{what} {key}" for what in ("default", "any order", "mma.sync") for key in ("forward", "both"))]
    report.table("attention", "softmax, our kernels, ms", head, of_ours,
                 ["any order: --deterministic 0. mma.sync: the kernels for compute capability 8.0 (FLASH90=0)"])
    report.table("attention", "softmax, our kernels, TFLOP/s", head, rates)
    others = [r for r in report.find("attention") if r["attn"] != "softmax"]
    lengths, by_name = sorted({r["T"] for r in others}), {}
    for r in others:
        of_softmax = cell(statistics.median(r["of_softmax"])) if "of_softmax" in r else ""
        by_name.setdefault(r["attn"], {})[r["T"]] = [*(ms(r, key) for key in passes), of_softmax]
    report.table("attention", "Ours by normalizer, ms",
                 ["normalizer", *(f"T = {T} {what}" for T in lengths for what in ("forward", "both", "of softmax"))],
                 [[f"`{name}`", *(text for T in lengths for text in by_T.get(T, [""] * 3))]
                  for name, by_T in by_name.items()], notes_of(left_out))


def table_shapes(report, left_out):
    records, table = report.part("shapes")["records"], []
    for layout, name, T in dict.fromkeys((r["layout"], r["attn"], r["T"]) for r in records):
        by_way = {r["way"]: r for r in records if (r["layout"], r["attn"], r["T"]) == (layout, name, T)}
        others = [way for way in by_way if way != "ours"]
        table.append([layout, f"`{name}`", T, ms(by_way.get("ours"), "forward_ms"), ms(by_way.get("ours"), "both_ms"),
                      cell(by_way.get("ours", {}).get("both_tflops"), 0),
                      *(", ".join(f"{way} {ms(by_way[way], key)}" for way in others)
                        for key in ("forward_ms", "both_ms"))])
    report.table("shapes", "Other layouts, ms",
                 ["layout", "normalizer", "T", "ours forward", "ours both", "ours TFLOP/s both", "PyTorch forward",
                  "PyTorch both"], table, notes_of(left_out, heads=""))


def tables_others(report, left_out):
    records, without_flex = report.part("others")["records"], {}
    for name in dict.fromkeys(r["attn"] for r in records):
        if reason := not_by_flex(reference.parse_normalizer(name)):
            without_flex.setdefault(reason, []).append(f"`{name}`")
    notes = [f"not by FlexAttention, {reason}: {', '.join(names)}" for reason, names in without_flex.items()]
    for T in sorted({r["T"] for r in records}):
        table = []
        for name in dict.fromkeys(r["attn"] for r in records):
            by_way = {r["way"]: r for r in records if r["attn"] == name and r["T"] == T}
            ours = by_way.get("ours")
            good = [r for way, r in by_way.items() if way != "ours" and not r.get("failed") and not r.get("wrong")]
            fastest = min(good, key=lambda r: statistics.median(r["both_ms"])) if good else None
            table.append([f"`{name}`", ms(ours, "both_ms"),
                          *(ms(by_way.get(way), "both_ms") for way in gpu_report.PYTORCH),
                          over(fastest, ours), fastest["way"] if fastest else "",
                          cell(ours.get("peak_gb")) if ours else "",
                          cell(by_way["compile"].get("peak_gb")) if "compile" in by_way else ""])
        report.table("others", f"Forward and backward at T = {T}, ms",
                     ["normalizer", "ours", *gpu_report.PYTORCH, "fastest/ours", "fastest", "peak GB ours",
                      "peak GB compile"], table, notes_of(left_out) + notes)


# ---------------------------------------------------------------- the command line

def parse():
    parser = gpu_report.parser(__doc__, ("attention", "shapes", "others"), 500)
    parser.add_argument("--lengths", default="", help="default: 4096,1024")
    parser.add_argument("--seconds", type=float, default=0.15, help="seconds per measurement")
    parser.add_argument("--library", help="default: scripts/gpu_check.py's")
    options = parser.parse_args()
    global DRY
    DRY = options.dry_run
    options.lengths = ([int(x) for x in options.lengths.split(",")] if options.lengths
                       else [17, 33] if DRY else list(LENGTHS))
    options.sweep = (17, 33) if DRY else SWEEP
    built = "build/on_cpu/flash.so" if DRY else "build/gpu_programs/cuda/flash.so"
    options.library = options.library or str(ROOT / built)
    return options


def main():
    if sys.argv[1:2] == ["warm"]:
        name, T, way = sys.argv[2:]
        Torch(Case(name, int(T), 1), way).both(0)
        return synchronize()
    options = parse()
    if not DRY and not torch.cuda.is_available():
        print("attention_gpu: PyTorch finds no GPU: not measured", file=sys.stderr)
        return gpu_report.NO_GPU

    def measure(report, options):
        parts = {"attention": part_attention, "shapes": part_shapes, "others": part_others}
        return parts[options.part](report, options, Flash(options.library))

    def wrong(report):
        return [f"{r['attn']} T={r['T']}" for r in report.find(options.part)
                if r["way"] in OURS and (r.get("wrong") or r.get("failed"))]

    return gpu_report.run("attention_gpu", options, [options.library], measure, wrong, "ours wrong")


if __name__ == "__main__":
    sys.exit(main())

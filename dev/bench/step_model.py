#!/usr/bin/env python3
"""A model of one training step of train_gpt2.cu on GPUs: the bytes, FLOPs and time of every launch.

    python3 dev/bench/step_model.py                                   # 124M, B = 32, T = 1024, one H100
    python3 dev/bench/step_model.py --launches                        # every kernel instead of sums by phase
    python3 dev/bench/step_model.py --device a100 --model 162M --batch 16 --micro-batches 4
    python3 dev/bench/step_model.py --profile FILE                    # beside what train_gpt2cu --profile printed
    python3 dev/bench/step_model.py --ranks 8 --link nvlink --zero    # the sums over ranks, and what overlaps
    python3 dev/bench/step_model.py --markdown                        # the table of doc/performance.md
    python3 dev/bench/step_model.py --scaling                         # the table of doc/gpu.md
    python3 dev/bench/step_model.py --attention                       # the table of doc/kernels.md

Nothing here is measured. A launch takes

    max(bytes / (bandwidth · efficiency), FLOPs / (rate · efficiency), rounds of loads · latency) + overhead

where bytes counts each array of the kernel once. Attention's FLOPs are replaced by the cycles of dev/bench/sass.py.
ASSUMPTIONS has every efficiency. bf16 and Llama blocks only.

The list of launches follows train_gpt2.cu function by function. dev/tests/test_step_model.py compares it with what the
emulation launches in a step.
"""
import argparse
import math
import re
import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# As in model/model.c.
PRESETS = {"15M": dict(layers=6, heads=6, channels=288, ffn=768, vocab=50257, tied=1),
           "124M": dict(layers=12, heads=12, channels=768, ffn=2048, vocab=50257, tied=1),
           "162M": dict(layers=12, heads=12, channels=768, ffn=2048, vocab=50257, tied=0)}


@dataclass(frozen=True)
class Device:
    name: str
    processors: int
    clock: float            # Hz under load
    flops: float            # FLOP/s of dense bf16 matmuls
    bandwidth: float        # bytes/s
    mma_cycles: float       # of a sub-partition of an SM for one mma.m16n8k16
    nvlink: float           # bytes/s in each direction
    adapter: float          # bytes/s of a GPU's InfiniBand adapter, in each direction
    memory: float           # bytes
    wgmma: bool             # compute capability 9.0: attention's kernels with wgmma
    source: str


# The vendor's data sheets. 6.4 cycles for mma.sync on Hopper is sass.py's; an A100's SM does 2,048 FLOP per clock.
DEVICES = {
    "h100": Device("H100 SXM", 132, 1.755e9, 989e12, 3.35e12, 6.4, 450e9, 50e9, 80e9, True,
                   "NVIDIA H100 data sheet (SXM, without sparsity); DGX H100: a 400 Gb/s adapter for each GPU"),
    "h200": Device("H200 SXM", 132, 1.755e9, 989e12, 4.8e12, 6.4, 450e9, 50e9, 141e9, True,
                   "NVIDIA H200 data sheet (SXM, without sparsity); DGX H200: a 400 Gb/s adapter for each GPU"),
    "a100": Device("A100 SXM 80GB", 108, 1.41e9, 312e12, 2.039e12, 8.0, 300e9, 25e9, 80e9, False,
                   "NVIDIA A100 data sheet (80GB SXM, without sparsity); DGX A100: a 200 Gb/s adapter for each GPU"),
}

BANDWIDTH_SHARE = 0.90
MATMUL_SHARE = 0.63
ATTENTION_SHARE = 0.72
OVERLAP_SHARE = 0.75
LATENCY = 0.7e-6
IN_FLIGHT = 4
LAUNCH = 2.5e-6
REREAD = 0.5
PCIE = 50e9
LINK_SHARE = {"nvlink": 0.82, "infiniband": 0.82}
LINK_START = {"nvlink": 20e-6, "infiniband": 60e-6}
GPUS_PER_NODE = 8

ASSUMPTIONS = (
    f"Memory delivers {BANDWIDTH_SHARE:.0%} of the data sheet's bandwidth, cuBLASLt {MATMUL_SHARE:.0%} of its FLOP/s.",
    "Attention: clocks of dev/bench/sass.py (doc/kernels.md, nvcc 13.0.88), times the tiles on and below the diagonal, "
    f"at {ATTENTION_SHARE:.0%}: start, end and last wave of the blocks. On compute capability 9.0, the clocks of an "
    f"SM's longest resource, at {OVERLAP_SHARE:.0%}: the share of the tensor cores' peak that FlashAttention-3 reports "
    "(arXiv 2407.08608: 740 of 989 TFLOP/s).",
    f"A launch costs {1e6 * LAUNCH:g} us between its predecessor's end and its own work. The device never waits for "
    "the host.",
    f"A load takes {1e6 * LATENCY:g} us, {IN_FLIGHT} are in flight per thread. This limits kernels of few blocks.",
    f"The classifier's second reading of a row misses the caches for {REREAD:.0%} of it (on an H200, for 5 %).",
    f"Sums over ranks: {LINK_SHARE['nvlink']:.0%} of a link's rate, the share that NCCL's rings reach on NVLink "
    "(NVIDIA, nccl-tests issue 212: 370 of 450 GB/s), also assumed for InfiniBand; a ring of several nodes is as fast "
    "as the slower of NVLink and a node's adapters together. Starting one takes "
    f"{1e6 * LINK_START['nvlink']:g} us, {1e6 * LINK_START['infiniband']:g} us between nodes. They do not slow down "
    "the kernels beside them.",
)

# Tokens per second of others on one H100, 124M: printed for scale. Neither was reproduced here.
OTHERS = (("llm.c", 468e3, 468e3), ("torch.compile", 332e3, 450e3))

# dev/bench/sass.py, softmax, bf16, head size 64: HMMA instructions, and the cycles of everything else, per 32x64 scores
FLASH = {"flash_forward_kernel": (128, 1690 - 6.4 * 128), "flash_dq_kernel": (192, 2097 - 6.4 * 192),
         "flash_dkv_kernel": (256, 2644 - 6.4 * 256)}
# Rows of a block, and keys (for dk and dv: the other way round) that it visits at a time.
FLASH_TILE = {"flash_forward_kernel": (128, 64), "flash_dq_kernel": (128, 64), "flash_dkv_kernel": (128, 64)}

# The same for compute capability 9.0: clocks of the longest resource of an SM per 128x128 scores, for heads of up to 64
# and 128.
FLASH90 = {64: {"flash90_forward_kernel": 1056, "flash90_backward_kernel": 3918},
           128: {"flash90_forward_kernel": 2048, "flash90_backward_kernel": 7056}}
FLASH90_QUERIES = 64        # of a tile of the backward kernel

# What FlashAttention-3 reports for its forward pass by T: causal, heads of 64, 16,384 tokens, H100 SXM (arXiv
# 2407.08608, Figure 5). FLOP/s, half of the T x T scores counted.
FLASH3 = {1024: 265e12, 2048: 371e12, 4096: 420e12, 8192: 460e12, 16384: 473e12}
# The goals for ours, FLOP/s by T: forward, and both passes with --deterministic 0.
GOALS = {2048: (330e12, None), 16384: (420e12, 400e12)}

# The constants of the kernels' headers.
LOSS_ROWS = 8192
RMSNORM_WARPS, RMSNORM_BLOCKS, RMSNORM_SHARED = 8, 528, 96 * 1024
QK_NORM_BLOCKS, QK_NORM_THREADS = 528, 256
BIAS_WARPS, BIAS_ROWS = 8, 64
COLUMN_THREADS = 32
SEGMENT_PART = 4096
EMBEDDING_PIECE = 64
SCALAR_ROWS, SCALAR_THREADS = 1024, 256
CLASSIFIER_THREADS = 1024


def phases():
    """{PHASE_x's x: name} in the order in which --profile prints them, from run/profile.h."""
    return dict(re.findall(r'X\((\w+), +"([^"]+)"\)', (ROOT / "run/profile.h").read_text()))


def rounded(n, to):
    return -(-n // to) * to


# ---------------------------------------------------------------- the model that is trained

@dataclass(frozen=True)
class Model:
    layers: int
    heads: int
    channels: int
    ffn: int
    vocab: int = 50257
    tied: int = 1
    kv_heads: int = 0
    head_dim: int = 0
    qk_norm: int = 0
    bias: str = "none"          # or qkv
    scalars: int = 0            # learned scalars per head and layer: 1 for ssmax

    def __post_init__(self):
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.channels // self.heads)

    @property
    def padded(self):
        return rounded(self.vocab, 128)

    @property
    def query(self):
        return self.heads * self.head_dim

    @property
    def key(self):
        return self.kv_heads * self.head_dim

    @property
    def joined(self):
        return self.query + 2 * self.key

    def tensors(self):
        """[(bucket, floats)] in the order of model/model.c. Buckets as in train_gpt2.cu: 0 is the embedding, then one
        for each layer, then the rest."""
        C, F = self.channels, self.ffn
        layer = [C, self.query * C, self.key * C, self.key * C]
        layer += [self.query, self.key, self.key] * (self.bias == "qkv")
        layer += [self.head_dim] * 2 * self.qk_norm + [self.heads] * self.scalars
        layer += [C * self.query, C, F * C, F * C, C * F]
        list_ = [(0, self.padded * C)]
        list_ += [(1 + i, floats) for i in range(self.layers) for floats in layer]
        return list_ + [(1 + self.layers, C)] + ([] if self.tied else [(1 + self.layers, self.padded * C)])

    @property
    def parameters(self):
        return sum(floats for _, floats in self.tensors())

    def buckets(self):
        sums = Counter()
        for bucket, floats in self.tensors():
            sums[bucket] += floats
        return [sums[i] for i in range(self.layers + 2)]


def parse_model(text):
    """--model's presets and keys."""
    values = {}
    for word in text.split(","):
        if "=" not in word:
            if word not in PRESETS:
                raise SystemExit(f"step_model: {word}: expected one of {', '.join(PRESETS)} or keys such as layers=12")
            values.update(PRESETS[word])
        else:
            key, value = word.split("=")
            if key not in Model.__dataclass_fields__:
                raise SystemExit(f"step_model: {key}=: expected one of {', '.join(Model.__dataclass_fields__)}")
            values[key] = value if key == "bias" else int(value)
    missing = [key for key in ("layers", "heads", "channels", "ffn") if key not in values]
    if missing:
        raise SystemExit(f"step_model: --model {text}: {missing[0]}= is missing")
    return Model(**values)


@dataclass(frozen=True)
class Run:
    """What is run. `rows` of a micro-batch are B T."""
    model: Model
    B: int = 32
    T: int = 1024
    device: Device = DEVICES["h100"]
    micro_batches: int = 1
    recompute: bool = False
    ranks: int = 1
    link: str = "nvlink"
    zero: bool = False
    reduce_bytes: int = 4           # of a gradient on the wire: 2 with --reduce-dtype bf16
    attention_share: float = OVERLAP_SHARE * ATTENTION_SHARE        # on compute capability 9.0

    @property
    def N(self):
        return self.B * self.T

    @property
    def loss_rows(self):
        """plan_more_logits(), without its limit for the whole plan."""
        most = max(1, int(self.device.memory / 16 / (2 * self.model.padded)) // 128 * 128)
        blocks = -(-self.N // most)
        return min(self.N, max(LOSS_ROWS, rounded(-(-self.N // blocks), 128)))

    @property
    def tokens(self):
        return self.N * self.micro_batches * self.ranks


# ---------------------------------------------------------------- launches

@dataclass
class Launch:
    phase: str                # PHASE_x
    name: str                 # as the emulation's report names it
    bytes: float = 0          # that DRAM moves
    flops: float = 0          # of matmuls
    cycles: float = 0         # of all sub-partitions together, as if none of them ever waited
    share: float = ATTENTION_SHARE      # of the time in which none does
    rounds: float = 0         # loads that a thread makes one after the other
    host: float = 0           # seconds on PCIe while the device waits

    def seconds(self, device):
        if self.host:
            return self.host
        return LAUNCH + max(self.bytes / (device.bandwidth * BANDWIDTH_SHARE),
                            self.flops / (device.flops * MATMUL_SHARE),
                            self.cycles / (4 * device.processors * device.clock * self.share),
                            math.ceil(self.rounds / IN_FLIGHT) * LATENCY)


def matmul(phase, m, n, k, add=False, out=2):
    """matmul_run(): D (m,n) = A (m,k) B (k,n) (+ D or C), bf16 inputs, `out` bytes per element of D and C."""
    return Launch(phase, f"cublasLtMatmul m={n} n={m} k={k}" + (" + C" if add else ""),
                  bytes=2 * (m * k + k * n) + out * m * n * (2 if add else 1), flops=2 * m * n * k)


def matmul_backward(phase, N, C, OC, add):
    """dinp (N,C), then dweight (OC,C)."""
    return [matmul(phase, N, C, OC), matmul(phase, OC, C, N, add, out=4)]


def columns_sum(phase, rows, columns, add):
    return Launch(phase, "columns_sum_kernel", bytes=4 * columns * (rows + 1 + add), rounds=rows / COLUMN_THREADS)


def rmsnorm_forward(N, C):
    return Launch("NORM", "rmsnorm_forward_kernel", bytes=2 * 2 * N * C + 4 * N + 4 * C)


def rmsnorm_backward(N, C, add, add_input=True):
    """`add`: to dweight, `add_input`: to dinp, which is read then."""
    width = 8 if C % 8 == 0 else 1
    room = rounded(C, 32 * width) * 4
    warps = min(RMSNORM_SHARED // room, RMSNORM_WARPS)
    blocks = min(-(-N // warps), RMSNORM_BLOCKS)
    return [Launch("NORM", "rmsnorm_backward_kernel", bytes=(3 + add_input) * 2 * N * C + 4 * N + 4 * blocks * C),
            columns_sum("NORM", blocks, C, add)]


def bias_backward(N, OC, add):
    blocks = min(-(-N // BIAS_WARPS), BIAS_ROWS)
    return [Launch("PROJECTIONS", "bias_backward_kernel", bytes=2 * N * OC + 4 * blocks * OC),
            columns_sum("PROJECTIONS", blocks, OC, add)]


def qk_norm_backward(N, m, add):
    width = 8 if m.head_dim % 8 == 0 else 1
    group = 1
    while group * width < m.head_dim and group < 32:
        group *= 2
    heads = m.heads + m.kv_heads
    blocks = min(-(-N * heads // (QK_NORM_THREADS // group)), QK_NORM_BLOCKS)
    rows = 2 * N * heads * m.head_dim
    return [Launch("NORM", "qk_norm_backward_kernel", bytes=3 * rows + 4 * N * heads),
            columns_sum("NORM", blocks, 2 * m.head_dim, add)]


def rope(name, N, T, m):
    """q and k are read and written."""
    return Launch("ROPE", name, bytes=2 * 2 * N * (m.query + m.key) + 4 * T * m.head_dim)


def visited(T, own, tile):
    """The scores of a head that blocks of `own` rows compute, tile by tile, diagonal included."""
    return sum(min(own, T - from_) * rounded(min(from_ + own, T), tile) for from_ in range(0, T, own))


def flash(name, run, extra):
    """A kernel with mma.sync. `extra`: the bytes beyond q, k and v."""
    m, padded = run.model, next((size for size in (48, 64, 128) if size >= run.model.head_dim), 128)
    mma, rest = FLASH[name]
    tiles = run.B * m.heads * visited(run.T, *FLASH_TILE[name]) / (32 * 64)
    return Launch("ATTENTION", name, bytes=2 * run.N * m.joined + extra,
                  cycles=tiles * (mma * run.device.mma_cycles * padded / 64 + rest))


def flash90(name, run, extra):
    """A kernel with wgmma."""
    m = run.model
    tiles = run.B * m.heads * visited(run.T, 128, 128) / (128 * 128)
    return Launch("ATTENTION", name, bytes=2 * run.N * m.joined + extra,
                  cycles=4 * tiles * FLASH90[flash90_head(m)][name], share=run.attention_share)


def flash90_head(m):
    return 64 if m.head_dim <= 64 else 128


def undoes_rope(run):
    """Does attention's backward pass undo RoPE, too?"""
    return run.device.wgmma and run.model.head_dim in (64, 128)


def attention_forward(run):
    N, m = run.N, run.model
    kernel, name = (flash90, "flash90_forward_kernel") if run.device.wgmma else (flash, "flash_forward_kernel")
    return [kernel(name, run, 2 * N * m.query + 16 * N * m.heads)]


def attention_gradients(run):
    """dq, dk and dv from dout, `rows` and, for learned scalars, g. flash90_dq_kernel reads `rows` for g alone."""
    N, m = run.N, run.model
    dout, rows, g = 2 * N * m.query, 32 * N * m.heads, 4 * N * m.heads * bool(m.scalars)
    dk_dv = 2 * 2 * N * m.key
    if not run.device.wgmma:
        return [flash("flash_dq_kernel", run, 2 * dout + rows + g), flash("flash_dkv_kernel", run, dout + rows + dk_dv)]
    tiles = run.B * m.heads * -(-run.T // FLASH90_QUERIES)
    sums = 4 * tiles * FLASH90_QUERIES * flash90_head(m)
    return [Launch("ATTENTION", "cudaMemsetAsync", bytes=4 * (1 + tiles)),
            flash90("flash90_backward_kernel", run, dout + rows + dk_dv + sums),
            Launch("ATTENTION", "flash90_dq_kernel",
                   bytes=sums + 2 * N * m.query + g + (rows + 2 * N * m.query) * bool(m.scalars))]


def attention_backward(run):
    N, m = run.N, run.model
    launches = [Launch("ATTENTION", "flash_rows_kernel", bytes=2 * 2 * N * m.query + (16 + 32) * N * m.heads),
                *attention_gradients(run)]
    if m.scalars:
        pieces = -(-N // SCALAR_ROWS)
        launches += [Launch("ATTENTION", "flash_scalars_kernel", bytes=4 * N * m.heads,
                            rounds=SCALAR_ROWS / SCALAR_THREADS),
                     Launch("ATTENTION", "flash_scalars_add_kernel", bytes=8 * pieces * m.heads, rounds=pieces / 32)]
    return launches


def swiglu_forward(N, F):
    return Launch("SWIGLU", "gate_forward_kernel", bytes=2 * 3 * N * F)


def layer_forward(run):
    N, m, T = run.N, run.model, run.T
    C, F = m.channels, m.ffn
    qk = [Launch("NORM", "qk_norm_forward_kernel",
                 bytes=3 * 2 * N * (m.query + m.key) + 4 * N * (m.heads + m.kv_heads))] if m.qk_norm else []
    bias = [Launch("PROJECTIONS", "bias_forward_kernel", bytes=2 * 2 * N * m.joined)] if m.bias == "qkv" else []
    return [rmsnorm_forward(N, C), matmul("PROJECTIONS", N, m.joined, C), *bias, *qk,
            rope("rope_forward_kernel", N, T, m), *attention_forward(run),
            matmul("PROJECTIONS", N, C, m.query, add=True),
            rmsnorm_forward(N, C), matmul("FEED_FORWARD", N, 2 * F, C), swiglu_forward(N, F),
            matmul("FEED_FORWARD", N, C, F, add=True)]


def layer_backward(run, add):
    N, m, T = run.N, run.model, run.T
    C, F = m.channels, m.ffn
    again = run.recompute
    return [*[swiglu_forward(N, F)] * again, *matmul_backward("FEED_FORWARD", N, F, C, add),
            Launch("SWIGLU", "gate_backward_kernel", bytes=2 * 5 * N * F),
            *[rmsnorm_forward(N, C)] * again, *matmul_backward("FEED_FORWARD", N, C, 2 * F, add),
            *rmsnorm_backward(N, C, add),
            *matmul_backward("PROJECTIONS", N, m.query, C, add), *attention_backward(run),
            *([] if undoes_rope(run) else [rope("rope_backward_kernel", N, T, m)]),
            *(qk_norm_backward(N, m, add) if m.qk_norm else []),
            *[rmsnorm_forward(N, C)] * again, *(bias_backward(N, m.joined, add) if m.bias == "qkv" else []),
            *matmul_backward("PROJECTIONS", N, C, m.joined, add),
            *rmsnorm_backward(N, C, add)]


def model_loss(run, add):
    """Chunks of rows. Each reads and writes the gradient of the output projection, except that the first writes it."""
    m, launches = run.model, []
    for start in range(0, run.N, run.loss_rows):
        rows = min(run.loss_rows, run.N - start)
        dinp, dweight = matmul_backward("CLASSIFIER", rows, m.channels, m.padded, add or start > 0)
        launches += [matmul("CLASSIFIER", rows, m.padded, m.channels),
                     Launch("CLASSIFIER", "classifier_kernel", bytes=2 * rows * m.padded * (2 + REREAD) + 8 * rows),
                     dinp, dweight]
    return [*launches, Launch("CLASSIFIER", "losses_sum_kernel", bytes=4 * run.N, rounds=run.N / CLASSIFIER_THREADS)]


def distinct_tokens(N, vocab):
    """About 4,000 in 16,384 tokens of English, growing with the root of the length."""
    return min(vocab, N, 4000 * math.sqrt(N / 16384))


def embedding_backward(run):
    """A second stage adds the pieces of tokens with more than EMBEDDING_PIECE rows: in English, one in 20 is the most
    frequent token."""
    N, C = run.N, run.model.channels
    stages = 2 if N / 20 > EMBEDDING_PIECE else 1
    first = 2 * N * C + 8 * C * distinct_tokens(N, run.model.vocab)
    return [Launch("EMBEDDING", "embedding_backward_kernel", bytes=first if i == 0 else 8 * C * N / 200,
                   rounds=EMBEDDING_PIECE if i == 0 else 0) for i in range(stages)]


def cleared(m):
    """clear_gradients(): the bytes of each fill. Only an untied embedding and learned scalars are added to zeros."""
    return [4 * m.padded * m.channels] * (not m.tied) + [4 * m.heads * m.scalars] * m.layers * bool(m.scalars)


def forward(run, first):
    """upload_batch() and model_step() up to the layers' backward passes, one list for each bucket of parameters that it
    needs: [the embedding, layer 0, ..., layer L - 1, the rest]."""
    N, m = run.N, run.model
    C, add = m.channels, not first
    start = [Launch("OTHER", "cudaMemcpyAsync", host=20 * N / PCIE)]
    if first:
        start += [Launch("OTHER", "cudaMemsetAsync", bytes=size) for size in (*cleared(m), 8)]
    start += [Launch("EMBEDDING", "embedding_forward_kernel", bytes=4 * N * C + 4 * N)]
    end = [rmsnorm_forward(N, C), *model_loss(run, add), *rmsnorm_backward(N, C, add, add_input=False)]
    parts = [start, *(layer_forward(run) for _ in range(m.layers)), end]
    if first and gathers(run):
        for i, (floats, part) in enumerate(zip(m.buckets(), parts)):
            part.insert(1 if i == 0 else 0, Launch("UPDATE", "round_kernel", bytes=6 * floats))
    return parts


def backward(run, first):
    """The rest of model_step(): [layer L - 1, ..., layer 0, the embedding]."""
    return [*(layer_backward(run, not first) for _ in range(run.model.layers)), embedding_backward(run)]


# ---- update

def owners(run):
    """[{bucket: floats}] that each rank owns with --zero, the largest share first: collective_assign_owners()."""
    owned = [Counter() for _ in range(run.ranks)]
    for bucket, floats in sorted(run.model.tensors(), key=lambda tensor: -tensor[1]):
        min(owned, key=lambda rank: rank.total())[bucket] += floats
    return sorted(owned, key=lambda rank: -rank.total())


def update(run):
    """gradients_end(), model_update() and step_end() of the rank that owns most."""
    P = run.model.parameters
    owned = owners(run)[0].total() if run.zero and run.ranks > 1 else P
    return [Launch("UPDATE", "squares_kernel", bytes=4 * owned),
            Launch("UPDATE", "sum_kernel", bytes=8 * owned / SEGMENT_PART, rounds=owned / SEGMENT_PART / 1024),
            Launch("UPDATE", "step_numbers_kernel", bytes=40),
            Launch("UPDATE", "adamw_kernel", bytes=(16 + 12 + 2) * owned),
            Launch("OTHER", "cudaMemcpyAsync", bytes=24), Launch("OTHER", "cudaMemcpyAsync", bytes=8),
            Launch("OTHER", "cudaMemsetAsync", bytes=8)]


def launches(run):
    """Every launch of a step, without the sums over ranks."""
    firsts = [i == 0 for i in range(run.micro_batches)]
    return [launch for first in firsts for part in (*forward(run, first), *backward(run, first)) for launch in part
            ] + update(run)


# ---------------------------------------------------------------- sums over ranks

def link_rate(run):
    """The bytes per second that a ring through all ranks moves, in each direction."""
    d, share = run.device, LINK_SHARE[run.link]
    if run.link == "nvlink":
        if run.ranks > GPUS_PER_NODE:
            raise SystemExit(f"step_model: NVLink connects {GPUS_PER_NODE} GPUs; use --link infiniband")
        return share * d.nvlink
    per_node = min(run.ranks, GPUS_PER_NODE)
    return share * min(d.nvlink, per_node * d.adapter)


@dataclass
class Sum:
    """One operation on a bucket."""
    bytes: float        # that a rank sends, on average
    seconds: float


def sum_of(run, floats, element, least, times=1):
    """A ring on which each rank sends all but its own share of the floats, `times` times; `least` is the smallest."""
    seconds = LINK_START[run.link] + times * element * (floats - least) / link_rate(run)
    return Sum(times * element * floats * (run.ranks - 1) / run.ranks, seconds)


def reductions(run):
    """The sums of the buckets' gradients, in the order in which the backward pass starts them. An all-reduce is a
    reduction to equal shares, then their distribution. With --zero, the shares are what the ranks own."""
    sums, owned, buckets = [], owners(run), run.model.buckets()
    for bucket in range(run.model.layers + 1, -1, -1):
        floats = buckets[bucket]
        least = min(rank[bucket] for rank in owned) if run.zero else floats / run.ranks
        s = sum_of(run, floats, run.reduce_bytes, least, 1 if run.zero else 2)
        if run.reduce_bytes == 2:       # collective_round_kernel, collective_widen_kernel: 6 bytes per float each
            s.seconds += 2 * LAUNCH + 2 * 6 * floats / (run.device.bandwidth * BANDWIDTH_SHARE)
        sums.append(s)
    return sums


def numbers(run):
    """The sum of the step's loss, with --zero also of the gradient's squares."""
    count = 2 if run.zero else 1
    return Sum(2 * 8 * count * (run.ranks - 1) / run.ranks, LINK_START[run.link])


def gathers(run):
    """With --zero, the new weights, in float32, bucket by bucket from the update on."""
    owned = owners(run)
    return [sum_of(run, floats, 4, min(rank[bucket] for rank in owned))
            for bucket, floats in enumerate(run.model.buckets())] if run.zero and run.ranks > 1 else []


@dataclass
class Overlap:
    total: float        # seconds of sums of gradients
    exposed: float      # of these after the backward pass, while the device waits
    numbers: float      # seconds of summing the step's numbers, which nothing overlaps with
    gather: float       # seconds of gathering weights
    waited: float       # of these the device waits in the next forward pass
    sent: float         # bytes that each rank sends in a step
    backward: float     # seconds of the last backward pass

    @property
    def extra(self):
        return self.exposed + self.numbers + self.waited


def seconds_of(parts, device):
    return [sum(launch.seconds(device) for launch in part) for part in parts]


def overlap(run):
    """Plays the last micro-batch's backward pass and the stream of the sums: a bucket's sum starts when its gradients
    are complete and the sum before it has ended. Then the first micro-batch's forward pass and the stream of weights:
    the forward pass waits for a bucket when it needs it."""
    sums = reductions(run)
    times = seconds_of(backward(run, first=run.micro_batches == 1), run.device)
    now = ended = 0.0
    for i, s in enumerate(sums):
        now += times[i - 1] if i else 0       # bucket layers + 1 is complete before the first layer's backward pass
        ended = max(now, ended) + s.seconds
    moved, last = gathers(run), numbers(run)
    # From the update on, the device first finishes the step and copies the next batch.
    after = [launch.name for launch in update(run)].index("adamw_kernel") + 1
    (copy, *start), *rest = forward(run, first=True)
    passed = sum(launch.seconds(run.device) for launch in [*update(run)[after:], copy])
    arrived = waited = 0.0
    for s, seconds in zip(moved, seconds_of([start, *rest], run.device)):
        arrived += s.seconds
        waited += max(0, arrived - passed)
        passed = max(arrived, passed) + seconds
    return Overlap(sum(s.seconds for s in sums), ended - now, last.seconds, sum(s.seconds for s in moved), waited,
                   sum(s.bytes for s in (*sums, last, *moved)), now)


# ---------------------------------------------------------------- results

@dataclass
class Phase:
    launches: int = 0
    bytes: float = 0
    flops: float = 0
    overhead: float = 0
    seconds: float = 0


def by_phase(run):
    """{name: Phase} in the order of --profile, of the phases that occur."""
    found = {}
    for launch in launches(run):
        p = found.setdefault(launch.phase, Phase())
        p.launches += 1
        p.bytes += launch.bytes
        p.flops += launch.flops
        p.overhead += launch.host or LAUNCH
        p.seconds += launch.seconds(run.device)
    if run.ranks > 1:
        o = overlap(run)
        found["REDUCE"] = Phase(len([*reductions(run), numbers(run), *gathers(run)]), o.sent, 0, 0,
                                o.exposed + o.waited)
        found["UPDATE"].seconds += o.numbers
    return {name: found[key] for key, name in phases().items() if key in found}


def by_kernel(run):
    """[(phase, name, count, bytes, FLOPs, seconds)]"""
    rows = {}
    for launch in launches(run):
        row = rows.setdefault((launch.phase, launch.name), [0, 0.0, 0.0, 0.0])
        for i, x in enumerate((1, launch.bytes, launch.flops, launch.seconds(run.device))):
            row[i] += x
    return [(*key, *row) for key, row in rows.items()]


def step_seconds(run):
    return sum(p.seconds for p in by_phase(run).values())


def read_profile(text):
    """{phase: milliseconds per step} of a table that --profile printed."""
    names = set(phases().values())
    found = {}
    for line in text.splitlines():
        match = re.match(r"(.+?)\s+([0-9.]+)\s+[0-9.]+%\s*$", line)
        if match and match[1] in names:
            found[match[1]] = float(match[2])
    if not found:
        raise SystemExit("step_model: --profile: no table of phases; expected the output of train_gpt2cu --profile")
    return found


# ---------------------------------------------------------------- tables

def table(head, rows, markdown=False, left=1):
    """The first `left` columns are aligned to the left."""
    lines = [[str(x) for x in line] for line in (head, *rows)]
    if markdown:
        rule = "|" + "|".join(["---"] * left + ["--:"] * (len(head) - left)) + "|"
        out = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([out[0], rule, *out[1:]])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths)))
                     for line in lines)


def phase_rows(run, measured=None):
    found, rows = by_phase(run), []
    total = Phase()
    names = [name for name in phases().values() if name in found or name in (measured or {})]
    for name in names:
        p = found.get(name, Phase())
        row = [name, p.launches or "", f"{p.bytes / 1e9:.2f}", f"{p.flops / 1e12:.2f}" if p.flops else "",
               f"{1e3 * p.overhead:.2f}", f"{1e3 * p.seconds:.2f}"]
        if measured:
            ms = measured.get(name)
            row += [f"{ms:.2f}" if ms is not None else "",
                    f"{ms / (1e3 * p.seconds):.2f}" if ms and p.seconds else ""]
        rows.append(row)
        for key in ("launches", "bytes", "flops", "overhead", "seconds"):
            setattr(total, key, getattr(total, key) + getattr(p, key))
    row = ["sum", total.launches, f"{total.bytes / 1e9:.2f}", f"{total.flops / 1e12:.2f}",
           f"{1e3 * total.overhead:.2f}", f"{1e3 * total.seconds:.2f}"]
    if measured:
        ms = sum(measured.values())
        row += [f"{ms:.2f}", f"{ms / (1e3 * total.seconds):.2f}"]
    head = ["phase", "launches", "GB", "TFLOP", "overhead ms", "modeled ms"]
    return head + (["measured ms", "measured/modeled"] if measured else []), [*rows, row]


def rate(tokens, seconds):
    return f"{tokens / seconds / 1e3:,.0f} K tok/s"


def report(run, text, measured=None, every_launch=False):
    m, d = run.model, run.device
    o = overlap(run) if run.ranks > 1 else None
    lines = [f"Modeled, not measured: {text}, {m.parameters / 1e6:.1f} M parameters in memory, B = {run.B}, "
             f"T = {run.T}, {run.micro_batches} micro-batch{'es' if run.micro_batches > 1 else ''}, bf16, "
             f"{run.ranks} {d.name}",
             f"  {d.name}: {d.flops / 1e12:.0f} TFLOP/s, {d.bandwidth / 1e12:.2f} TB/s ({d.source})"]
    lines += [f"  {line}" for line in ASSUMPTIONS] + [""]
    if every_launch:
        rows = [[phases()[phase], name, count, f"{moved / count / 1e6:.1f}",
                 f"{flops / count / 1e9:.1f}" if flops else "", f"{1e6 * seconds / count:.1f}", f"{1e3 * seconds:.2f}"]
                for phase, name, count, moved, flops, seconds in by_kernel(run)]
        lines.append(table(["phase", "launch", "launches", "MB each", "GFLOP each", "us each", "ms"], rows, left=2))
    else:
        lines.append(table(*phase_rows(run, measured)))
    seconds = step_seconds(run)
    lines += ["", f"{rate(run.tokens, seconds)}, {1e3 * seconds:.1f} ms per step"]
    if o:
        lines.append(f"sums over {run.ranks} ranks ({run.link}, {link_rate(run) / 1e9:.0f} GB/s): each rank sends "
                     f"{o.sent / 1e9:.2f} GB; gradients {1e3 * o.total:.2f} ms, of which {1e3 * o.exposed:.2f} ms "
                     f"after a backward pass of {1e3 * o.backward:.1f} ms; weights {1e3 * o.gather:.2f} ms, of which "
                     f"{1e3 * o.waited:.2f} ms in front of the forward pass")
    elif d is DEVICES["h100"]:
        lines.append("reported by others, 124M, per H100: " + "; ".join(
            f"{name} {low / 1e3:.0f}{f' to {high / 1e3:.0f}' if high > low else ''} K tok/s"
            for name, low, high in OTHERS))
    return "\n".join(lines)


MARKDOWN = Run(parse_model("124M"))


def markdown(run=MARKDOWN):
    """The table of doc/performance.md."""
    head, rows = phase_rows(run)
    seconds = step_seconds(run)
    rows[-1] = [f"**{x}**" if x else "" for x in rows[-1]]
    share = flash3_share(run.T)
    slower = step_seconds(replace(run, attention_share=share))
    text = (f"That is {rate(run.tokens, seconds)} ({1e3 * seconds:.1f} ms for {run.tokens:,} tokens). "
            f"If attention reaches {100 * share:.0f} % of its clocks instead, as FlashAttention-3's forward pass would "
            f"at this T, it is {rate(run.tokens, slower)} ({1e3 * slower:.1f} ms).")
    return table(head, rows, markdown=True) + "\n\n" + textwrap.fill(text, 120)


def attention_rates(T, share):
    """FLOP/s of attention's forward pass, and of both, in 16,384 tokens of the 124M model on an H100."""
    run = Run(parse_model("124M"), 16384 // T, T, attention_share=share)
    seconds = [sum(launch.seconds(run.device) for launch in part(run) if launch.name.startswith("flash90_"))
               for part in (attention_forward, attention_gradients)]
    forward = 2 * run.B * run.model.heads * T * T * run.model.head_dim
    return forward / seconds[0], 3.5 * forward / sum(seconds)


def flash3_share(T):
    """The share of our forward kernel's clocks at which it would be as fast as FlashAttention-3."""
    low, high = 0.01, 1
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if attention_rates(T, middle)[0] < FLASH3[T] else (low, middle)
    return low


def attention():
    """The table of doc/kernels.md: TFLOP/s of softmax's kernels on an H100, by T."""
    tera = lambda x: f"{x / 1e12:.0f}" if x else ""
    rows = []
    for T in FLASH3:
        model, flash3 = attention_rates(T, Run.attention_share), attention_rates(T, flash3_share(T))
        goals = GOALS.get(T, (None, None))
        rows.append([f"{T:,}", *map(tera, (model[0], flash3[0], goals[0], model[1], flash3[1], goals[1]))])
    head = ["T", f"forward at {Run.attention_share:.0%}".replace("%", " %"), "as FlashAttention-3", "goal",
            "both passes", "as FlashAttention-3", "goal"]
    return table(head, rows, markdown=True)


def scaling():
    """The table of doc/gpu.md: bytes and times of sums over ranks, B = 32, T = 1024, one micro-batch, on H100s."""
    rows = []
    for ranks, link in ((8, "nvlink"), (64, "infiniband")):
        for model in ("124M", "162M"):
            alone = step_seconds(Run(parse_model(model)))
            for zero in (False, True):
                for element in (4, 2):
                    run = Run(parse_model(model), ranks=ranks, link=link, zero=zero, reduce_bytes=element)
                    o, seconds = overlap(run), step_seconds(run)
                    rows.append([f"{ranks}, {'NVLink' if link == 'nvlink' else 'InfiniBand'}", model,
                                 "ZeRO-1" if zero else "all-reduce", "bf16" if element == 2 else "float32",
                                 f"{o.sent / 1e9:.2f}", f"{1e3 * o.total:.2f}", f"{1e3 * o.exposed:.2f}",
                                 f"{1e3 * o.gather:.2f}" if zero else "",
                                 f"{1e3 * o.waited:.2f}" if zero else "", f"{1e3 * seconds:.1f}",
                                 f"{alone / seconds:.0%}".replace("%", " %")])
    head = ["GPUs", "model", "sums", "gradients travel as", "GB sent per rank", "gradients ms", "of these exposed",
            "weights ms", "of these exposed", "step ms", "efficiency"]
    return table(head, rows, markdown=True, left=4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="124M", help="a preset or layers=...,heads=..., as for train_gpt2cu; "
                        "scalars=1 for a normalizer with a learned scalar per head")
    parser.add_argument("--device", default="h100", choices=DEVICES)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a micro-batch on each rank")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--link", default="nvlink", choices=LINK_SHARE)
    parser.add_argument("--zero", action="store_true", help="--zero 1")
    parser.add_argument("--reduce-dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--profile", metavar="FILE", help="what train_gpt2cu --profile printed; - for standard input")
    parser.add_argument("--launches", action="store_true", help="a line for each kernel instead of each phase")
    parser.add_argument("--markdown", action="store_true", help="print the table of doc/performance.md")
    parser.add_argument("--scaling", action="store_true", help="print the table of doc/gpu.md")
    parser.add_argument("--attention", action="store_true", help="print the table of doc/kernels.md")
    o = parser.parse_args()
    run = Run(parse_model(o.model), o.batch, o.seq_len, DEVICES[o.device], o.micro_batches, o.recompute, o.ranks,
              o.link, o.zero, 2 if o.reduce_dtype == "bf16" else 4)
    if o.markdown or o.scaling or o.attention:
        print(markdown(run) if o.markdown else scaling() if o.scaling else attention())
        return
    measured = None
    if o.profile:
        measured = read_profile(Path("/dev/stdin" if o.profile == "-" else o.profile).read_text())
        measured.pop(phases()["ASIDE"], None)         # part of no step
    print(report(run, o.model, measured, o.launches))


if __name__ == "__main__":
    main()

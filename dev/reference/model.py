"""The model and its attention normalizers in PyTorch, from the papers' formulas, with plain T x T arrays and gradients
by autograd. Use it in float64. It is a reference: it is meant to be readable and correct, not fast.

A normalizer is a sequence of five choices. For the query at position i, n = i + 1 keys are visible, or the last W of
them in a window; d is the head size, T the length of the sequence, and L the length with which the model was trained:
  1. qk            l2: q and k over their Euclidean norms (after RoPE)
  2. scale, offset z_ij = c_i (q_i . k_j) + o_i; with a cap C, C tanh(z_ij / C) takes its place
  3. phi           f_ij = phi(z_ij); masked entries are 0 after phi
  4. norm          A_ij = f_ij / Z_i
  5. post          a change of the row A_i
The output is sum_j A_ij v_j. A row whose Z (or sum of weights in post) is 0 has output 0 and gradient 0.

[SSMax] Nakanishi, "Scalable-Softmax Is Superior for Attention"; [LSSA] Gao and Spratling, "Softplus Attention with
Re-weighting Boosts Length Extrapolation in Large Language Models"; [GAU] Su, kexue.fm 9019; [Softer-Max] "Softer-Max,
not Softmax"; softmax-sink is gpt-oss's, arXiv 2508.10925; softmax-floorlog Llama 4's; softpick arXiv 2504.20966."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

THETA = 10000.0     # RoPE's


# ---- The normalizer: five stages, what a layer adds to them, and the text that names both

@dataclass(frozen=True)
class Normalizer:
    qk: str = "none"
    scale: str = "rsqrt-d"
    offset: str = "none"
    phi: str = "exp"
    norm: str = "l1"
    post: str = "none"
    s: float | None = None      # an initial value of s that replaces s_start()
    fixed: bool = False         # s is not learned
    cap: float = 0.0            # of the scores, as in Gemma 2; 0: none
    window: int = 0             # how many keys a query sees, itself included; 0: all
    rope: str = ""              # none, or theta in place of the model's

    @property
    def has_s(self):
        return self.scale in ("logn", "logn-bias", "pn")

    @property
    def has_b(self):
        return self.scale in ("logn-bias", "pn")

    @property
    def has_sink(self):
        return self.norm == "l1+sink"

    def s_start(self, L):
        """The initial value of s [SSMax], with which the mean temperature equals softmax's; 1 if p_n replaces ln n, or
        if every row sees a single key."""
        if self.s is not None:
            return self.s
        mean = sum(math.log(min(n, self.window or n)) for n in range(1, L + 1)) / L
        return 1.0 if self.scale == "pn" or mean == 0 else 1 / mean


@dataclass(frozen=True)
class Scalar:
    """A learned scalar: its tensor's name, which normalizers have it, and its initial value for training length L. Each
    head of each layer has one; with by_position, the whole model has one for each n up to L."""
    tensor: str
    of: Callable[[Normalizer], bool]
    start: Callable[[Normalizer, int], float]
    by_position: bool = False


SCALARS = {
    "s": Scalar("attn_scale", lambda a: a.has_s, lambda a, L: a.s_start(L)),
    "b": Scalar("attn_bias", lambda a: a.has_b, lambda a, L: 0.0),
    "sink": Scalar("attn_sink", lambda a: a.has_sink, lambda a, L: 0.0),
    "p": Scalar("attn_pn", lambda a: a.scale == "pn", lambda a, L: 1.0, by_position=True),
}


def trains(normalizer, name):
    return not (name == "s" and normalizer.fixed)


def scalars_at_start(normalizer, heads, L, dtype=torch.float64):
    """The scalars that a normalizer has, by their names in SCALARS."""
    return {name: torch.full((L if scalar.by_position else heads,), scalar.start(normalizer, L), dtype=dtype)
            for name, scalar in SCALARS.items() if scalar.of(normalizer)}


PRESETS = {
    "softmax": Normalizer(),
    "ssmax": Normalizer(scale="logn"),
    "ssmax-fixed": Normalizer(scale="logn", s=1.0, fixed=True),
    "ssmax-bias": Normalizer(scale="logn-bias"),
    "ssmax-pn": Normalizer(scale="pn"),
    "softmax-log512": Normalizer(scale="log:512"),
    "softmax1": Normalizer(norm="l1+1"),
    "softmax-negated": Normalizer(post="negate"),
    "softmax-recentered": Normalizer(post="recenter"),
    "softmax-recentered-l1": Normalizer(post="recenter-l1"),
    "identity": Normalizer(phi="identity", norm="none"),
    "exp": Normalizer(norm="none"),
    "identity-l1": Normalizer(phi="identity"),
    **{f"{phi}-l1": Normalizer(phi=phi) for phi in ("relu", "relu2", "relu6", "gelu", "sigmoid", "softplus", "mish")},
    "sigmoid": Normalizer(offset="-logL", phi="sigmoid", norm="none"),
    "sigmoid-logn": Normalizer(offset="-logn", phi="sigmoid", norm="none"),
    "sigmoid-logn-l1": Normalizer(offset="-logn", phi="sigmoid"),
    "relu-L": Normalizer(phi="relu", norm="L"),
    "relu-sqrt": Normalizer(phi="relu", norm="sqrt-half-n"),
    "lssa": Normalizer(qk="l2", scale="logd-logn", phi="softplus"),
    "lssar": Normalizer(qk="l2", scale="logd-logn", phi="softplus", post="reweight:15"),
    "relu2-n": Normalizer(phi="relu2", norm="n"),
    "relu2-T": Normalizer(phi="relu2", norm="T"),
    "relu2-L": Normalizer(phi="relu2", norm="L"),
    "relu2-512": Normalizer(phi="relu2", norm="const:512"),
    "softmax-sink": Normalizer(norm="l1+sink"),
    "softmax-floorlog": Normalizer(scale="floorlog:8192"),
    "softpick": Normalizer(phi="expm1", post="rectify"),
}

NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
POSITIVE = r"(?!0*\.?0*(e|$))\+?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
STAGES = {      # the values of each stage
    "qk": r"none|l2",
    "scale": rf"rsqrt-d|logn|logn-bias|pn|log:L|log:{POSITIVE}|floorlog:{POSITIVE}|logd-logn|const:{NUMBER}",
    "offset": r"none|-logL|-logT|-logn",
    "phi": r"exp|expm1|identity|relu|relu2|relu6|gelu|sigmoid|softplus|mish",
    "norm": rf"l1|l1\+sink|l1\+(\d+\.?\d*|\.\d+)|n|n2|L|T|T2|const:{POSITIVE}|sqrt-half-n|none",
    "post": rf"none|negate|rectify|recenter|recenter-l1|reweight:{POSITIVE}",
    "s": NUMBER,
    "cap": POSITIVE,
    "window": r"[1-9]\d*",
    "rope": rf"none|{POSITIVE}",
}
TYPES = {"s": float, "cap": float, "window": int}     # of the values that are no text


def parse_normalizer(text):
    """`NAME[+stage=value...][+s=X][+fixed]...`. A `+` starts an override only before one of those words. ValueError
    otherwise."""
    name, *overrides = re.split(rf"\+(?=(?:{'|'.join(STAGES)})=|fixed(?:\+|$))", text)
    if name not in PRESETS:
        raise ValueError(f"{text}: no normalizer {name!r}; expected one of {' '.join(PRESETS)}")
    normalizer = PRESETS[name]
    for override in overrides:
        stage, _, value = override.partition("=")
        if stage == "fixed":
            normalizer = replace(normalizer, fixed=True)
        elif not re.fullmatch(STAGES[stage], value):
            raise ValueError(f"{text}: {stage} cannot be {value!r}; it matches {STAGES[stage]}")
        else:
            normalizer = replace(normalizer, **{stage: TYPES.get(stage, str)(value)})
    if normalizer.has_sink and normalizer.phi != "exp":
        raise ValueError(f"{text}: a sink is a logit, so it needs phi=exp")
    return normalizer


def parse_layers(text, layers):
    """`[COUNT*]NAME...,...`: the normalizer of each layer. The list repeats until every layer has one."""
    dealt = []
    for entry in text.split(","):
        count, name = re.fullmatch(r"(?:(\d+)\*)?(.*)", entry).groups()
        dealt += int(count or 1) * [parse_normalizer(name)]
    return [dealt[i % len(dealt)] for i in range(layers)]


# ---- Attention

def softplus(x):
    return torch.clamp(x, min=0) + torch.log1p(torch.exp(-x.abs()))


PHI = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "identity": lambda z: z,
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z) ** 2,
    "relu6": lambda z: torch.clamp(torch.relu(z), max=6),       # relu has slope 0 at 0, clamp has 1
    "gelu": lambda z: z * torch.erfc(-z / math.sqrt(2)) / 2,
    "sigmoid": torch.sigmoid,
    "softplus": softplus,
    "mish": lambda z: z * torch.tanh(softplus(z)),
}


def over(x, divisor):
    """x / divisor, with 0 and gradient 0 where the divisor is 0."""
    dead = divisor == 0
    return torch.where(dead, 0.0, x / torch.where(dead, 1.0, divisor))


def scale_of_row(spec, n, d, L, scalars):
    """c_i, broadcasting to (NH, T, 1). scalars: s, b (NH), p (L), by their names in SCALARS."""
    rsqrt_d, ln = 1 / math.sqrt(d), torch.log(n)
    s, b = (None if x is None else x[:, None, None] for x in (scalars.get("s"), scalars.get("b")))
    kind, _, value = spec.partition(":")
    if kind == "rsqrt-d":
        return rsqrt_d
    if kind == "logn":
        return s * ln * rsqrt_d
    if kind == "logn-bias":
        return (s * ln + b) * rsqrt_d
    if kind == "pn":
        if n.max() > L:
            raise ValueError(f"pn has {L} values, a row has {int(n.max())} keys")
        return (s * scalars["p"][(n - 1).long()] + b) * rsqrt_d
    if kind == "log":
        return ln / math.log(L if value == "L" else float(value)) * rsqrt_d
    if kind == "floorlog":
        return (1 + 0.1 * torch.log(1 + torch.floor(n / float(value)))) * rsqrt_d
    if kind == "logd-logn":
        return math.log(d) * ln
    return float(value)     # const:X


def offset_of_row(spec, n, L):
    return {"none": 0.0, "-logL": -math.log(L), "-logT": -math.log(n.shape[-2]), "-logn": -torch.log(n)}[spec]


def fixed_norm(spec, n, L):
    kind, _, value = spec.partition(":")
    T = n.shape[-2]
    return {"n": n, "n2": n**2, "L": L, "T": T, "T2": T**2, "sqrt-half-n": torch.sqrt(n / 2), "none": 1.0,
            "const": float(value or 1)}[kind]


def normalized(z, visible, spec, n, L, phi, sink):
    """A before post: f / Z. exp under l1 is computed relative to the row's maximum, which does not change A (C counts
    as C e^0). sink (NH) is the logit of a key without a value."""
    if spec == "l1+sink":
        with_sink = torch.cat([z.masked_fill(~visible, -math.inf), sink[:, None, None].expand(*z.shape[:-1], 1)], -1)
        return torch.softmax(with_sink, -1)[..., :-1]
    if not spec.startswith("l1"):
        return torch.where(visible, PHI[phi](z), 0.0) / fixed_norm(spec, n, L)
    C = float(spec[3:] or 0)
    if phi == "exp":
        maximum = z.detach().masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
        if C > 0:
            maximum = maximum.clamp(min=0)
        f = torch.where(visible, torch.exp(torch.where(visible, z - maximum, 0.0)), 0.0)
        return f / (C * torch.exp(-maximum) + f.sum(-1, keepdim=True))
    f = torch.where(visible, PHI[phi](z), 0.0)
    return over(f, C + f.abs().sum(-1, keepdim=True))


def posted(A, visible, spec, n):
    kind, _, value = spec.partition(":")
    if kind == "none":
        return A
    if kind == "negate":
        return -A
    if kind == "rectify":
        return torch.relu(A)
    if kind == "reweight":
        w = torch.relu(torch.where(visible, A * n - torch.where(n > 3, 1.0, 0.0), 0.0))
        w = over(w, w.detach().amax(-1, keepdim=True))      # does not change w / sum w, and keeps it finite
        w = torch.where(w > 0, torch.where(w > 0, w, 1.0) ** float(value), 0.0)
        return over(w, w.sum(-1, keepdim=True))
    centered = torch.where(visible, A - A.sum(-1, keepdim=True) / n, 0.0)
    if kind == "recenter-l1":
        centered = over(centered, centered.abs().sum(-1, keepdim=True))
    return torch.where(n > 3, centered, A)


def log_norm(z, visible, spec, n, L, phi, sink):
    """ln Z_i, with A = f / Z before post; -inf where Z is 0."""
    if phi == "exp" and spec.startswith("l1"):
        terms = [z.masked_fill(~visible, -math.inf)]
        if spec == "l1+sink":
            terms.append(sink[:, None, None].expand(*z.shape[:-1], 1))
        elif float(spec[3:] or 0) > 0:
            terms.append(torch.full_like(z[..., :1], math.log(float(spec[3:]))))
        return torch.logsumexp(torch.cat(terms, -1), -1)
    if spec.startswith("l1"):
        return torch.log(torch.where(visible, PHI[phi](z), 0.0).abs().sum(-1) + float(spec[3:] or 0))
    return torch.log(torch.as_tensor(fixed_norm(spec, n, L), dtype=z.dtype)).expand(*z.shape[:-1], 1)[..., 0]


@dataclass
class Trace:
    """What forward() saw, one item per layer: A (B, NH, T, T), ln Z (B, NH, T), and the residual stream after the layer
    (B, T, C)."""
    weights: list = field(default_factory=list)
    log_Z: list = field(default_factory=list)
    residual: list = field(default_factory=list)


def attention(q, k, v, normalizer, L, scalars, first=None, trace=None):
    """q (B, NH, T, HS) and k (B, NKV, T, HS) after RoPE, v (B, NKV, T, any width); returns (B, NH, T, any width).
    NH/NKV consecutive query heads share a key-value head. scalars: by their names in SCALARS. first (B, T): the first
    key that each row sees, from which its n counts; None: every row sees the sequence from its start."""
    T, d = q.shape[-2:]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    n = torch.arange(1, T + 1, dtype=q.dtype)[:, None]                  # (T, 1)
    visible = torch.ones(T, T, dtype=torch.bool).tril()
    if first is not None:
        n = n - first[:, None, :, None].to(q.dtype)                     # (B, 1, T, 1)
        visible = visible & (torch.arange(T) >= first[:, None, :, None])
    if normalizer.window:
        n = n.clamp(max=normalizer.window)
        visible = visible & torch.ones(T, T, dtype=torch.bool).triu(1 - normalizer.window)
    if normalizer.qk == "l2":
        q, k = (over(x, torch.linalg.vector_norm(x, dim=-1, keepdim=True)) for x in (q, k))
    z = (scale_of_row(normalizer.scale, n, d, L, scalars) * (q @ k.transpose(-1, -2))
         + offset_of_row(normalizer.offset, n, L))
    z = softcap(z, normalizer.cap)
    how = visible, normalizer.norm, n, L, normalizer.phi, scalars.get("sink")
    A = posted(normalized(z, *how), visible, normalizer.post, n)
    if trace is not None:
        trace.weights.append(A)
        trace.log_Z.append(log_norm(z, *how))
    return A @ v


# ---- The layers

def rmsnorm(x, weight, eps=1e-5):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope_frequencies(scaling, T, d, L, dtype, theta=None):
    """The d/2 rotations per position of a text of T tokens, and the factor of cos and sin. scaling: none,
    linear:FACTOR, ntk, llama3:FACTOR:LOW:HIGH:ORIGINAL or yarn:FACTOR:ORIGINAL; not of a theta of a layer's own."""
    if theta is not None:
        return theta ** (-2 * torch.arange(d // 2, dtype=dtype) / d), 1.0
    name, *numbers = scaling.split(":")
    numbers = [float(number) for number in numbers]
    i = torch.arange(d // 2, dtype=dtype)
    frequency = THETA ** (-2 * i / d)
    if name == "none":
        return frequency, 1.0
    if name == "linear":                                # Chen et al., arXiv 2306.15595
        return frequency / numbers[0], 1.0
    if name == "ntk":                                   # bloc97, 2023
        return (THETA * max(1, T / L) ** (d / (d - 2))) ** (-2 * i / d), 1.0
    if name == "llama3":                                # the code of Llama 3.1, by wavelength
        factor, low, high, original = numbers
        wavelength = 2 * math.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        between = (1 - smooth) * frequency / factor + smooth * frequency
        kept = torch.where(wavelength < original / high, frequency, between)
        return torch.where(wavelength > original / low, frequency / factor, kept), 1.0
    assert name == "yarn", scaling                      # Peng et al., arXiv 2309.00071
    factor, original = numbers
    # theta^(2i/d) 2 pi rotations = original, solved for i; the ends of the ramp are rounded outward
    i_of = lambda rotations: d / 2 * math.log(original / (2 * math.pi * rotations), THETA)
    start, end = max(math.floor(i_of(32)), 0), min(math.ceil(i_of(1)), d - 1)
    ramp = torch.clamp((i - start) / (end - start or 0.001), 0, 1)
    return frequency * (1 - ramp) + frequency / factor * ramp, 0.1 * math.log(factor) + 1


def rope(x, scaling="none", L=None, own=""):
    """x (..., T, HS): the pair (x_i, x_(i + HS/2)) turns by t times the frequency i, theta^(-2i/HS) without scaling.
    own: Normalizer.rope."""
    if own == "none":
        return x
    T, d = x.shape[-2:]
    frequency, factor = rope_frequencies(scaling, T, d, L, x.dtype, float(own) if own else None)
    angle = torch.arange(T, dtype=x.dtype)[:, None] * frequency
    cos, sin = factor * torch.cos(angle), factor * torch.sin(angle)
    first, second = x[..., :d // 2], x[..., d // 2:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def silu(x):
    return x / (1 + torch.exp(-x))


def swiglu(gate, up):
    return silu(gate) * up


def cross_entropy(logits, targets):
    """The mean over the rows of -ln softmax(logits)[target]."""
    return (torch.logsumexp(logits, -1) - logits.gather(-1, targets[..., None])[..., 0]).mean()


def softcap(logits, c):
    """c tanh(logits / c); c = 0: unchanged. Gemma 2, arXiv 2408.00118."""
    return c * torch.tanh(logits / c) if c else logits


def z_loss(logits):
    """The mean over the rows of ln(sum exp)^2. PaLM, arXiv 2204.02311, section 5."""
    return (torch.logsumexp(logits, -1) ** 2).mean()


# ---- The model

GAU_WIDTH = 128     # of a gated unit's q and k


@dataclass(frozen=True)
class Config:
    layers: int             # with block="gau", pairs of units; a pair replaces attention and feed-forward
    channels: int
    tied: bool
    heads: int = 1          # a gated unit has one
    ffn: int = 0            # a gated unit has none
    vocab: int = 50257
    attn: str = "softmax"   # or a list for the layers
    L: int = 1024
    block: str = "llama"    # or "gau"
    kv_heads: int = 0       # 0: as many as heads
    head_dim: int = 0       # 0: channels/heads
    norm_eps: float = 1e-5  # of every RMSNorm
    qk_norm: int = 0        # 1: an RMSNorm over each head's q and k, before RoPE
    bias: str = "none"      # qkv: the projections to q, k and v have biases
    gate: str = "none"      # channel, head: what each gate of attention's output multiplies
    rope_scaling: str = "none"
    logit_softcap: float = 0.0
    z_loss: float = 0.0     # its factor in what is minimized

    @property
    def query_width(self):
        return self.heads * self.head_dim if self.head_dim else self.channels

    @property
    def key_width(self):
        return self.query_width // self.heads * (self.kv_heads or self.heads)

    @property
    def units(self):
        return 2 * self.layers if self.block == "gau" else self.layers

    @property
    def normalizers(self):
        return parse_layers(self.attn, self.units)

    @property
    def normalizer(self):
        """Of every layer."""
        return parse_normalizer(self.attn)


def scalar_shapes(normalizer, heads=None, L=None):
    """The shapes of the trained scalars: with `heads`, those of a layer; with L, those of the whole model."""
    sizes = {scalar.tensor: L if scalar.by_position else heads for name, scalar in SCALARS.items()
             if scalar.of(normalizer) and trains(normalizer, name)}
    return {tensor: (size,) for tensor, size in sizes.items() if size}


def llama_shapes(config, normalizer):
    C, F, Q, K = config.channels, config.ffn, config.query_width, config.key_width
    gains = ("q_norm", "k_norm") if config.qk_norm else ()
    return {"input_layernorm.weight": (C,),
            "self_attn.q_proj.weight": (Q, C), "self_attn.k_proj.weight": (K, C), "self_attn.v_proj.weight": (K, C),
            "self_attn.o_proj.weight": (C, Q),
            **({"self_attn.gate_proj.weight": (Q if config.gate == "channel" else config.heads, C)}
               if config.gate != "none" else {}),
            **({f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (Q, K, K))}
               if config.bias == "qkv" else {}),
            **{f"self_attn.{name}.weight": (Q // config.heads,) for name in gains},
            **{f"self_attn.{name}": shape for name, shape in scalar_shapes(normalizer, config.heads).items()},
            "post_attention_layernorm.weight": (C,),
            "mlp.gate_proj.weight": (F, C), "mlp.up_proj.weight": (F, C), "mlp.down_proj.weight": (C, F)}


def gau_shapes(config, normalizer):
    C, e = config.channels, 2 * config.channels
    return {"input_layernorm.weight": (C,),
            "gau.u_proj.weight": (e, C), "gau.v_proj.weight": (e, C), "gau.z_proj.weight": (GAU_WIDTH, C),
            **{f"gau.{name}": (GAU_WIDTH,) for name in ("q_gain", "q_offset", "k_gain", "k_offset")},
            **{f"gau.{name}": shape for name, shape in scalar_shapes(normalizer, config.heads).items()},
            "gau.o_proj.weight": (C, e)}


def parameter_shapes(config):
    """Name -> shape, under Hugging Face's names; a normalizer may add attn_scale (s), attn_bias (b), attn_sink and
    attn_pn (p)."""
    C, of_layer = config.channels, gau_shapes if config.block == "gau" else llama_shapes
    shapes, of_model = {"model.embed_tokens.weight": (config.vocab, C)}, {}
    for i, normalizer in enumerate(config.normalizers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in of_layer(config, normalizer).items()})
        of_model |= scalar_shapes(normalizer, L=config.L)
    shapes.update({f"model.{name}": shape for name, shape in of_model.items()})
    shapes["model.norm.weight"] = (C,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, C)
    return shapes


def decays(name):
    """True for matrices, which have weight decay. Gains, offsets, biases and the normalizer's scalars, whatever their
    shape, have none."""
    last = name.rpartition(".")[2]
    return not (name.endswith("norm.weight") or last.startswith("attn_") or last.endswith(("_gain", "_offset", "bias")))


def attention_scalars(parameters, prefix, config, normalizer):
    """The scalars of a layer's normalizer; those that are not trained have their initial values."""
    scalars = scalars_at_start(normalizer, config.heads, config.L, parameters["model.norm.weight"].dtype)
    return {name: parameters[("model." if SCALARS[name].by_position else prefix) + SCALARS[name].tensor]
            if trains(normalizer, name) else start for name, start in scalars.items()}


def llama_layer(x, parameters, layer, config, normalizer, first=None, trace=None):
    """x + Wo attention(h), and to that + Wdown (silu(Wgate h) * (Wup h)), each time with h = rmsnorm(x)."""
    B, T, C = x.shape
    weight = lambda name: parameters[layer + name + ".weight"]
    split = lambda x: x.view(B, T, -1, config.query_width // config.heads).transpose(1, 2)
    h = rmsnorm(x, weight("input_layernorm"), config.norm_eps)
    bias = lambda name: parameters[f"{layer}self_attn.{name}_proj.bias"] if config.bias == "qkv" else 0.0
    q, k, v = (split(h @ weight(f"self_attn.{name}_proj").T + bias(name)) for name in "qkv")
    if config.qk_norm:
        q, k = (rmsnorm(x, weight(f"self_attn.{name}_norm"), config.norm_eps) for x, name in ((q, "q"), (k, "k")))
    scalars = attention_scalars(parameters, layer + "self_attn.", config, normalizer)
    q, k = (rope(x, config.rope_scaling, config.L, normalizer.rope) for x in (q, k))
    mixed = attention(q, k, v, normalizer, config.L, scalars, first, trace)
    mixed = mixed.transpose(1, 2)       # (B, T, heads, head_dim)
    if config.gate != "none":
        mixed = mixed * torch.sigmoid(h @ weight("self_attn.gate_proj").T).view(B, T, config.heads, -1)
    x = x + mixed.reshape(B, T, -1) @ weight("self_attn.o_proj").T
    h = rmsnorm(x, weight("post_attention_layernorm"), config.norm_eps)
    return x + swiglu(h @ weight("mlp.gate_proj").T, h @ weight("mlp.up_proj").T) @ weight("mlp.down_proj").T


def gau_layer(x, parameters, layer, config, normalizer, first=None, trace=None):
    """x + Wo (U * A V) with h = rmsnorm(x), U, V, Z = silu(Wu h), silu(Wv h), silu(Wz h); q and k are Z with a gain and
    an offset for each of its 128 elements, and RoPE ([GAU])."""
    of_unit = lambda name: parameters[f"{layer}gau.{name}"]
    h = rmsnorm(x, parameters[layer + "input_layernorm.weight"], config.norm_eps)
    U, V, Z = (silu(h @ of_unit(f"{name}_proj.weight").T) for name in "uvz")
    q, k = (rope(Z * of_unit(f"{name}_gain") + of_unit(f"{name}_offset"), config.rope_scaling, config.L,
                 normalizer.rope) for name in "qk")
    scalars = attention_scalars(parameters, layer + "gau.", config, normalizer)
    AV = attention(q[:, None], k[:, None], V[:, None], normalizer, config.L, scalars, first, trace)[:, 0]
    return x + (U * AV) @ of_unit("o_proj.weight").T


def forward(parameters, tokens, config, trace=None, first=None):
    """Logits (B, T, vocab) for tokens (B, T). A Trace is filled. first: as in attention()."""
    embedding = parameters["model.embed_tokens.weight"]
    x = embedding[tokens]
    layer = gau_layer if config.block == "gau" else llama_layer
    for i, normalizer in enumerate(config.normalizers):
        x = layer(x, parameters, f"model.layers.{i}.", config, normalizer, first, trace)
        if trace is not None:
            trace.residual.append(x)
    x = rmsnorm(x, parameters["model.norm.weight"], config.norm_eps)
    return softcap(x @ (embedding if config.tied else parameters["lm_head.weight"]).T, config.logit_softcap)


def gradients(parameters, tokens, targets, config, first=None):
    """Logits, loss (without z), and each parameter's gradient by name. first: as in attention()."""
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    logits = forward(leaves, tokens, config, first=first)
    loss = cross_entropy(logits, targets)
    minimized = loss + config.z_loss * z_loss(logits)
    values = torch.autograd.grad(minimized, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return logits.detach(), loss.item(), dict(zip(leaves, values))


# ---- The optimizer

def global_norm(tensors):
    return math.sqrt(sum((x * x).sum().item() for x in tensors))


class AdamW:
    """AdamW by Loshchilov and Hutter; eps is added to the bias-corrected root, as in PyTorch. step() changes the
    parameters in place."""

    def __init__(self, parameters, weight_decay, beta1=0.9, beta2=0.95, eps=1e-8):
        self.parameters, self.weight_decay = parameters, weight_decay
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.exp_avg = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.steps = 0

    def step(self, grads, lr, clip=math.inf):
        """Multiplies the gradients by min(1, clip / (norm + 1e-6)); returns the norm before clipping."""
        self.steps += 1
        norm = global_norm(grads.values())
        factor = min(1.0, clip / (norm + 1e-6))
        for name, p in self.parameters.items():
            g, m, v = grads[name] * factor, self.exp_avg[name], self.exp_avg_sq[name]
            m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
            v.mul_(self.beta2).add_(g * g, alpha=1 - self.beta2)
            m_hat, v_hat = m / (1 - self.beta1**self.steps), v / (1 - self.beta2**self.steps)
            p -= lr * (m_hat / (v_hat.sqrt() + self.eps) + (self.weight_decay * p if decays(name) else 0.0))
        return norm

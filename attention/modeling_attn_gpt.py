"""For transformers: a Llama whose attention uses a normalizer other than softmax, or whose layers are gated attention
units.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

The checkpoints that need this file contain it; it needs nothing else of the project, so it repeats the formulas and the
table of learned scalars in attention/normalizer.h, with which the project's tests compare it. "attention_normalizer" in
config.json defines the normalizer as a sequence of five choices. For the query at position i, n = i + 1 keys are
visible; d is the head size, L the length with which the model was trained ("seq_len"), and T the length of the text so
far:

    qk              none; l2: q and k over their Euclidean norms
    scale, offset   z_ij = c_i (q_i . k_j) + o_i, q and k after RoPE; with a "cap" C, C tanh(z_ij / C) takes its place
    phi             f_ij = phi(z_ij); masked entries are 0 after phi
    norm            A_ij = f_ij / Z_i
    post            a change of the row A_i

A layer with a "window" W sees the last W keys, and n is at most W. Its "rope" is "none", so that q and k are not
rotated, or a theta of its own, without scaling. Where layers differ, "layers" has for each its "name", its stages and
these keys.

The output is sum_j A_ij v_j. A row whose Z, or sum in post, is 0 has output 0. Learned scalars: s (attn_scale), b
(attn_bias) and sink (attn_sink) for each layer and head, and p (attn_pn) for the whole model. With padding, n counts
only the visible keys that are not padding. Attention uses plain T x T arrays, because this code is meant to be readable
and correct, not fast. Where the package attn_c is installed, its fused attention computes the same numbers, except with
output_attentions. With "block": "gau" each layer is a gated attention unit, which replaces attention and the
feed-forward layer.

[SSMax] Nakanishi, "Scalable-Softmax Is Superior for Attention"; [LSSA] Gao and Spratling, "Softplus Attention with
Re-weighting Boosts Length Extrapolation in Large Language Models"; [GAU] Su, kexue.fm 9019; [Softer-Max] "Softer-Max,
not Softmax"; l1+sink gpt-oss, arXiv 2508.10925; floorlog Llama 4; expm1 with rectify softpick, arXiv 2504.20966."""
import math
import re

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

try:
    import attn_c
except ImportError:
    attn_c = None

STAGES = ("qk", "scale", "offset", "phi", "norm", "post")
VALUES = ("cap", "window", "rope")


class AttnGPTConfig(LlamaConfig):
    """The keys of LlamaConfig, including those of grouped-query attention, and a few more. attention_normalizer has
    name, seq_len, the six keys of the five stages or layers, and cap, window, rope, fixed and block where they apply;
    qk_norm is true for an RMSNorm over each head's q and k before RoPE, qkv_bias if the projections to q, k and v have
    biases. gate is "channel" or "head" if attention's output is multiplied by sigmoids of gates, one for each of its
    channels or heads. final_logit_softcapping is c in c tanh(logits / c)."""
    model_type = "attn_gpt"
    qk_norm: bool = False
    qkv_bias: bool = False
    gate: str | None = None
    final_logit_softcapping: float | None = None

    def validate(self):
        """Replaces LlamaConfig's check, which requires that heads divide hidden_size even if head_dim is given. See
        check_config()."""


def normalizers_of(config):
    """attention_normalizer as each layer has it."""
    whole = config.attention_normalizer
    return [whole | own for own in whole.get("layers", [{}] * config.num_hidden_layers)]


# ---- The normalizer. n (B, 1, T, 1): the number of keys that a query sees; z, f, A (B, heads, T, keys)

def softplus(x):
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


# Functions of z and the learned scalars, which none of these reads; doc/normalizers_more.md has one that does.
PHI = {
    "exp": lambda z, _: torch.exp(z),
    "expm1": lambda z, _: torch.expm1(z),
    "identity": lambda z, _: z,
    "relu": lambda z, _: torch.relu(z),
    "relu2": lambda z, _: torch.relu(z) ** 2,
    "relu6": lambda z, _: F.relu6(z),
    "gelu": lambda z, _: z * torch.erfc(-z / math.sqrt(2)) / 2,       # 1 + erf(z) would cancel far below 0
    "sigmoid": lambda z, _: torch.sigmoid(z),
    "softplus": lambda z, _: softplus(z),
    "mish": lambda z, _: z * torch.tanh(softplus(z)),
}


def start_of_s(normalizer):
    """The initial value of s: the number in the name if there is one. Otherwise 1 / mean(ln n over n = 1..L), which
    makes the mean temperature that of softmax [SSMax], or 1 if p_n replaces ln n or that mean is 0. config.json has no
    other trace of the 1 at which ssmax-fixed fixes s."""
    name, L = normalizer["name"], normalizer["seq_len"]
    W = min(normalizer.get("window", L), L)
    said = re.findall(r"\+s=([-+.\deE]+)(?=\+[a-z]|$)", name)
    if said:
        return float(said[-1])
    if re.match(r"(\d+\*)?ssmax-fixed", name) or normalizer["scale"] == "pn" or W == 1:
        return 1.0
    return L / (math.lgamma(W + 1) + (L - W) * math.log(W))


# The learned scalars: one for each head of a layer, or one for each n up to L in the whole model; which normalizers
# have them; their initial values.
SCALARS = {
    "attn_scale": ("head", lambda a: a["scale"] in ("logn", "logn-bias", "pn"), start_of_s),
    "attn_bias": ("head", lambda a: a["scale"] in ("logn-bias", "pn"), lambda a: 0.0),
    "attn_sink": ("head", lambda a: a["norm"] == "l1+sink", lambda a: 0.0),
    "attn_pn": ("n", lambda a: a["scale"] == "pn", lambda a: 1.0),
}


def add_scalars(module, normalizer, width, size):
    """Registers the scalars of that width as parameters of the module; those that the normalizer lacks are None."""
    for name, (of, there, start) in SCALARS.items():
        if of == width:
            trained = not (name == "attn_scale" and normalizer.get("fixed", False))
            value = (nn.Parameter(torch.full((size,), start(normalizer)), requires_grad=trained) if there(normalizer)
                     else None)
            module.register_parameter(name, value)


def over(x, divisor):
    """x / divisor; 0, with gradient 0, where the divisor is 0."""
    dead = divisor == 0
    return torch.where(dead, 0, x / torch.where(dead, 1, divisor))


def scale_of(spec, n, d, L, scalars):
    """c (B, heads or 1, T, 1). scalars: (heads, 1, 1), attn_pn (L), where the normalizer has them."""
    s, b, p = (scalars.get(name) for name in ("attn_scale", "attn_bias", "attn_pn"))
    ln, root = torch.log(n), math.sqrt(d)
    kind, _, value = spec.partition(":")
    if kind == "rsqrt-d":
        return torch.full_like(n, 1 / root)
    if kind == "logn":
        return s * ln / root
    if kind == "logn-bias":
        return (s * ln + b) / root
    if kind == "pn":
        if n.max() > L:
            raise ValueError(f"attention_normalizer scale=pn has a factor for each of {L} lengths, "
                             f"but a token sees {int(n.max())}")
        return (s * p[n.long() - 1] + b) / root
    if kind == "log":
        return ln / math.log(L if value == "L" else float(value)) / root
    if kind == "floorlog":
        return (1 + 0.1 * torch.log(1 + torch.floor(n / float(value)))) / root
    if kind == "logd-logn":
        return math.log(d) * ln
    if kind == "const":
        return torch.full_like(n, float(value))
    raise ValueError(f"attention_normalizer: unknown scale {spec!r}")


def offset_of(spec, n, L, T):
    if spec == "none":
        return 0
    if spec == "-logL":
        return -math.log(L)
    if spec == "-logT":
        return -torch.log(T)
    if spec == "-logn":
        return -torch.log(n)
    raise ValueError(f"attention_normalizer: unknown offset {spec!r}")


def fixed_norm(spec, n, L, T):
    kind, _, value = spec.partition(":")
    if kind == "const":
        return float(value)
    known = {"n": n, "n2": n**2, "L": L, "T": T, "T2": T**2, "sqrt-half-n": torch.sqrt(n / 2), "none": 1}
    if kind not in known:
        raise ValueError(f"attention_normalizer: unknown norm {spec!r}")
    return known[kind]


def normalized(z, visible, phi, norm, n, L, T, scalars):
    if phi not in PHI:
        raise ValueError(f"attention_normalizer: unknown phi {phi!r}")
    z = torch.where(visible, z, 0)
    if norm != "l1" and not norm.startswith("l1+"):
        return torch.where(visible, PHI[phi](z, scalars), 0) / fixed_norm(norm, n, L, T)
    C = 0.0 if norm == "l1+sink" and phi == "exp" else float(norm[3:] or 0)
    if phi not in ("exp", "expm1"):
        f = torch.where(visible, PHI[phi](z, scalars), 0)
        return over(f, C + f.abs().sum(-1, keepdim=True))
    # Computed relative to the row's largest z, which does not change A. C counts as C e^0, expm1's 1 as e^0, the sink
    # as a z.
    sink = scalars.get("attn_sink")
    largest = z.detach().masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
    if norm == "l1+sink":
        largest = torch.maximum(largest, sink.detach().to(z.dtype))
    else:
        largest = largest.clamp(min=0) if C > 0 or phi == "expm1" else largest.masked_fill(largest == -math.inf, 0)
    f = torch.exp(torch.where(visible, z - largest, 0)) - (torch.exp(-largest) if phi == "expm1" else 0)
    f = torch.where(visible, f, 0)
    extra = torch.exp(sink - largest) if norm == "l1+sink" else C * torch.exp(-largest)
    return over(f, extra + f.abs().sum(-1, keepdim=True))


def posted(A, visible, spec, n):
    kind, _, value = spec.partition(":")
    if kind == "none":
        return A
    if kind == "negate":
        return -A
    if kind == "rectify":
        return torch.relu(A)
    tiny = 32 * torch.finfo(A.dtype).eps        # what rounding leaves of equal weights must not be mistaken for weight
    if kind == "reweight":      # the first three rows use 0 in place of the 1
        w = torch.relu(torch.where(visible, A * n - (n > 3).to(A.dtype), 0))
        w = torch.where((n > 3) & (w.amax(-1, keepdim=True) < tiny), 0, w)
        w = over(w, w.detach().amax(-1, keepdim=True))      # so that the power stays finite
        w = torch.where(w > 0, torch.where(w > 0, w, 1) ** float(value), 0)
        return over(w, w.sum(-1, keepdim=True))
    if kind in ("recenter", "recenter-l1"):                 # the first three rows are unchanged
        centered = torch.where(visible, A - A.sum(-1, keepdim=True) / n, 0)
        if kind == "recenter-l1":
            size = centered.abs().sum(-1, keepdim=True)
            centered = over(centered, torch.where(size < tiny * A.abs().sum(-1, keepdim=True), 0, size))
        return torch.where(n > 3, centered, A)
    raise ValueError(f"attention_normalizer: unknown post {spec!r}")


def attention(q, k, v, visible, normalizer, scalars):
    """Returns A v (B, heads, T, d) and A (B, heads, T, keys). q (B, heads, T, d), k, v (B, key-value heads, keys, d)
    after RoPE; visible (B, 1, T, keys), before the window. Row statistics are at least float32. Consecutive heads share
    a key-value head."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k = q.to(wide), k.to(wide)
    d, L = q.shape[-1], normalizer["seq_len"]
    T = visible[:, :, -1:].sum(-1, keepdim=True).clamp(min=1).to(wide)
    if window := normalizer.get("window"):
        past = visible.shape[-1] - visible.shape[-2]
        visible = visible & torch.ones_like(visible).triu(past + 1 - window)
    n = visible.sum(-1, keepdim=True).clamp(min=1).to(wide)     # 1 for a query that is padding
    if normalizer["qk"] == "l2":
        q, k = (over(x, torch.linalg.vector_norm(x, dim=-1, keepdim=True)) for x in (q, k))
    elif normalizer["qk"] != "none":
        raise ValueError(f"attention_normalizer: unknown qk {normalizer['qk']!r}")
    z = (scale_of(normalizer["scale"], n, d, L, scalars) * (q @ k.transpose(-1, -2))
         + offset_of(normalizer["offset"], n, L, T))
    if cap := normalizer.get("cap"):
        z = cap * torch.tanh(z / cap)
    A = normalized(z, visible, normalizer["phi"], normalizer["norm"], n, L, T, scalars)
    A = posted(A, visible, normalizer["post"], n).to(v.dtype)
    return A @ v, A


# ---- The same by attn_c

def padding_before(attention_mask):
    """The number of padding tokens before each text (B), or None if there is padding elsewhere."""
    seen = attention_mask.bool()
    elsewhere = not seen[:, -1].all() or (seen[:, :-1] & ~seen[:, 1:]).any()
    return None if elsewhere else (~seen).sum(-1, dtype=torch.int32)


def fused_attention(q, k, v, start, normalizer, scalars):
    """attention() with None in place of A. start: padding_before(), or None without padding."""
    text = "softmax" + "".join(f"+{key}={normalizer[key]}" for key in (*STAGES, "cap") if key in normalizer)
    return attn_c.attention(q, k, v, text, seq_len=normalizer["seq_len"], scalars=scalars or None, start=start,
                            window=normalizer.get("window")), None


def is_fused(config, x, start):
    """Can attn_c compute attention for x? On GPUs, the T of its kernels includes padding."""
    if start is not None and x.device.type == "cuda" and any(
            normalizer["offset"] == "-logT" or normalizer["norm"] in ("T", "T2") for normalizer in
            normalizers_of(config)):
        return False
    width = config.intermediate_size if config.attention_normalizer.get("block") else config.head_dim
    return attn_c is not None and attn_c.supports(x, config.head_dim, width)


def attention_for(config, x, past, attention_mask, with_weights):
    """attention() or fused_attention() for x (B, T, C) after `past` other tokens, and the function's `visible` or
    `start`: a layer gets both as arguments, of which accelerate moves tensors to the layer's device."""
    branches = not torch.compiler.is_compiling()        # may code depend on the numbers in the mask?
    if attention_mask is not None and branches and attention_mask.all():
        attention_mask = None
    start = padding_before(attention_mask) if attention_mask is not None and branches else None
    if not with_weights and (attention_mask is None) == (start is None) and is_fused(config, x, start):
        return fused_attention, start
    at, keys = (torch.arange(first, past + x.shape[1], device=x.device) for first in (past, 0))
    visible = (keys <= at[:, None])[None, None]
    return attention, visible if attention_mask is None else visible & attention_mask[:, None, None].bool()


# ---- The layers

class RMSNorm(nn.Module):
    def __init__(self, config, size=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size or config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


# What rope_parameters in config.json may hold besides rope_type and rope_theta.
ROPE_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def rope_frequencies(parameters, d, L, T):
    """The rotation of each pair per position (B or 1, d/2), in radians, and the factor of cos and sin. parameters:
    rope_parameters, which mean what they mean in transformers; L the training length; T (B) the length of each text so
    far. Computed in float64; in float32 on Apple's GPUs, which have no float64."""
    kind, theta, factor = parameters["rope_type"], parameters["rope_theta"], parameters.get("factor", 1.0)
    i = torch.arange(d // 2, dtype=torch.float32 if T.device.type == "mps" else torch.float64, device=T.device)
    if kind == "dynamic":
        theta = theta * ((T / L).clamp(min=1).to(i.dtype) ** (d / (d - 2)))[:, None]
        return theta ** (-i / (d // 2)), 1.0
    frequency = (theta ** (-i / (d // 2)))[None]
    if kind == "default":
        return frequency, 1.0
    if kind == "linear":
        return frequency / factor, 1.0
    rotations = lambda frequency: parameters["original_max_position_embeddings"] * frequency / (2 * math.pi)
    if kind == "llama3":        # frequencies with few rotations over the original length are divided by the factor
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        divided = ((high - rotations(frequency)) / (high - low)).clamp(0, 1)
        return divided * frequency / factor + (1 - divided) * frequency, 1.0
    # yarn: the same between the pairs that make 32 rotations and 1, but linear in i
    first, last = (d * math.log(rotations(1) / count) / (2 * math.log(theta)) for count in (32, 1))
    first, last = max(math.floor(first), 0), min(math.ceil(last), d - 1)
    divided = ((i - first) / (last - first if last != first else 0.001)).clamp(0, 1)
    return divided * frequency / factor + (1 - divided) * frequency, 0.1 * math.log(factor) + 1


def rope(x, positions, frequency, factor):
    """x (B, heads, T, d): the pair (x_i, x_(i + d/2)) turns by the angle position . frequency_i and grows by the
    factor."""
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None].to(frequency.dtype) * frequency[:, None, None]
    cos, sin = ((factor * f(angle)).to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Output(nn.Linear):
    """Writes to the residual stream, so a new model starts with smaller weights here."""


class Normalized(nn.Module):
    """What both blocks share: the normalizer with its learned scalars, RoPE and the cache."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.normalizer, self.rope_parameters = layer, normalizers_of(config)[layer], config.rope_parameters
        if theta := self.normalizer.get("rope"):
            self.rope_parameters = None if theta == "none" else {"rope_type": "default", "rope_theta": theta}
        add_scalars(self, self.normalizer, "head", config.num_attention_heads)

    def attend(self, q, k, v, positions, lengths, compute, seen, cache, of_model):
        """compute(), seen: attention_for()."""
        if self.rope_parameters:
            angles = rope_frequencies(self.rope_parameters, q.shape[-1], self.normalizer["seq_len"], lengths)
            q, k = rope(q, positions, *angles), rope(k, positions, *angles)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        of_heads = {name: w[:, None, None] for name, w in self.named_parameters(recurse=False) if name in SCALARS}
        of_model = {name: p for name, p in of_model.items() if SCALARS[name][1](self.normalizer)}
        return compute(q, k, v, seen, self.normalizer, of_model | of_heads)


class Attention(Normalized):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        C, self.head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, n * self.head_dim, bias=config.qkv_bias)
                                                 for n in (heads, kv_heads, kv_heads))
        self.o_proj = Output(heads * self.head_dim, C, bias=False)
        gates = {None: 0, "channel": heads * self.head_dim, "head": heads}[config.gate]
        self.gate_proj = nn.Linear(C, gates, bias=False) if gates else None
        self.q_norm, self.k_norm = (RMSNorm(config, self.head_dim) if config.qk_norm else nn.Identity() for _ in "qk")

    def forward(self, x, *where):
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, -1, self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        out, A = self.attend(q, k, v, *where)
        out = out.transpose(1, 2)
        if self.gate_proj is not None:
            gate = self.gate_proj(x).view(B, T, out.shape[2], -1)
            out = out * torch.sigmoid(gate.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
        return self.o_proj(out.reshape(B, T, -1)), A


class GatedUnit(Normalized):
    """(U * A V) Wo, with U, V, Z = silu(x Wu), silu(x Wv), silu(x Wz); q and k are Z times a gain plus an offset for
    each element [GAU]. One head."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        C, e, d = config.hidden_size, config.intermediate_size, config.head_dim
        self.u_proj, self.v_proj, self.z_proj = (nn.Linear(C, width, bias=False) for width in (e, e, d))
        self.q_gain, self.k_gain = (nn.Parameter(torch.ones(d)) for _ in "qk")
        self.q_offset, self.k_offset = (nn.Parameter(torch.zeros(d)) for _ in "qk")
        self.o_proj = Output(e, C, bias=False)

    def forward(self, x, *where):
        U, V, Z = (F.silu(f(x)) for f in (self.u_proj, self.v_proj, self.z_proj))
        q, k = Z * self.q_gain + self.q_offset, Z * self.k_gain + self.k_offset
        out, A = self.attend(q[:, None], k[:, None], V[:, None], *where)
        return self.o_proj(U * out[:, 0]), A


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Output(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(GradientCheckpointingLayer):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(config), RMSNorm(config)
        self.self_attn, self.mlp = Attention(config, layer), SwiGLU(config)

    def forward(self, x, *where):
        out, A = self.self_attn(self.input_layernorm(x), *where)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), A


class GatedLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm, self.gau = RMSNorm(config), GatedUnit(config, layer)

    def forward(self, x, *where):
        out, A = self.gau(self.input_layernorm(x), *where)
        return x + out, A


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        normalizers = normalizers_of(config)
        layer = GatedLayer if config.attention_normalizer.get("block") == "gau" else Layer
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)
        with_p = next((normalizer for normalizer in normalizers if SCALARS["attn_pn"][1](normalizer)), normalizers[0])
        add_scalars(self, with_p, "n", with_p["seq_len"])

    def forward(self, x, with_states, with_weights, *where):
        """Returns the output; the states, which are the input and each layer's output, of the last layer after the
        final RMSNorm; and each layer's A. Both are None unless asked for."""
        scalars, states, weights = dict(self.named_parameters(recurse=False)), [], []
        for layer in self.layers:
            if with_states:
                states.append(x)
            x, A = layer(x, *where, scalars)
            if with_weights:
                weights.append(A)
        x = self.norm(x)
        return x, (*states, x) if with_states else None, tuple(weights) if with_weights else None


# ---- The model

def check_rope(parameters):
    kind = parameters["rope_type"]
    if kind not in ROPE_NUMBERS:
        raise ValueError(f"config.json: unknown rope_type {kind!r}; expected one of {', '.join(ROPE_NUMBERS)}")
    known = {"rope_type", "type", "rope_theta", *ROPE_NUMBERS[kind]}
    wrong = [key for key, value in parameters.items() if key not in known and value is not None]
    wrong += [key for key in ROPE_NUMBERS[kind] if key not in parameters]
    if wrong:
        raise ValueError(f"config.json: rope_parameters of type {kind} need "
                         f"{', '.join(ROPE_NUMBERS[kind]) or 'no numbers'}; missing or unknown: {', '.join(wrong)}")
    if kind == "dynamic" and parameters["factor"] != 1:
        raise ValueError(f"config.json: rope_type dynamic needs factor 1, not {parameters['factor']}")


def check_positions(positions, T, attention_mask):
    """Positions that begin anew mean packed texts. Without a mask, nothing would hide them from each other."""
    if positions.shape[-1] != T:
        raise ValueError(f"position_ids: expected {T} of them, found {positions.shape[-1]}")
    if attention_mask is None and not torch.compiler.is_compiling() and (positions.diff(dim=-1) < 1).any():
        raise ValueError("position_ids: expected ascending positions, found texts that are packed into one row; pass "
                         "each text as a row of its own")


def check_values(name, objects):
    """The name, a list [COUNT*]NAME+..., that is dealt to the layers, says which cap, window and rope each has."""
    dealt = []
    for entry in str(name).split(","):
        count = re.match(r"(\d+)\*", entry)
        said = re.findall(r"\+(cap|window|rope)=(.+?)(?=\+[a-z]|$)", entry)
        said = {key: value if value == "none" else float(value) for key, value in said}
        dealt += min(int(count[1]) if count else 1, len(objects)) * [said]
    for i, own in enumerate(objects):
        for key in VALUES:
            means, has = dealt[i % len(dealt)].get(key) or None, None if own.get(key) is False else own.get(key)
            if means != has:
                raise ValueError(f"config.json: attention_normalizer: \"{name}\" means {key} {means} in layer {i}, but "
                                 f"the file has {has!r}")


def check_config(config):
    """Raises ValueError for configurations that would be computed as something else."""
    normalizer = getattr(config, "attention_normalizer", None) or {}
    layers = normalizer.get("layers")
    if "layers" in normalizer and not (isinstance(layers, list) and all(isinstance(own, dict) for own in layers)):
        raise ValueError("config.json: attention_normalizer.layers: expected a list with an object for each layer")
    outside = [key for key in (*STAGES, *VALUES, "fixed") if layers is not None and key in normalizer]
    if outside:
        raise ValueError(f"config.json: attention_normalizer has {', '.join(outside)}, which belong in \"layers\" here")
    lacking = [key for key in ("name", "seq_len", *(STAGES if layers is None else ())) if key not in normalizer]
    lacking += [f"{key} of layer {i}" for i, own in enumerate(layers or []) for key in ("name", *STAGES)
                if key not in own]
    if lacking:
        raise ValueError(f"config.json: attention_normalizer lacks {', '.join(lacking)}")
    if layers is not None and len(layers) != config.num_hidden_layers:
        raise ValueError(f"config.json: attention_normalizer.layers has {len(layers)} layers, but num_hidden_layers is "
                         f"{config.num_hidden_layers}")
    check_values(normalizer["name"], layers or [normalizer])
    check_rope(config.rope_parameters)
    if config.gate not in (None, "channel", "head"):
        raise ValueError(f"config.json: unknown gate {config.gate!r}; expected \"channel\" or \"head\"")
    block = normalizer.get("block")
    if block not in (None, "gau"):
        raise ValueError(f"config.json: attention_normalizer: unknown block {block!r}")
    unit = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128,
            "intermediate_size": 2 * config.hidden_size, "qk_norm": False, "qkv_bias": False, "gate": None}
    wrong = [f"{key} is {getattr(config, key)}, not {value}"
             for key, value in unit.items() if getattr(config, key) != value]
    if block and wrong:
        raise ValueError(f"config.json: in a gated attention unit (block gau) {', '.join(wrong)}")


# The cache's name in the output. It is past_key_values before transformers 5.24.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
# Arguments of forward() that go to the loss, and two that some callers pass and that change nothing here.
KNOWN = {"num_items_in_batch", "ignore_index", "shift_labels", "cache_position", "token_type_ids"}


class AttnGPT(PreTrainedModel):
    """What the two models below share."""
    config_class = AttnGPTConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer", "GatedLayer"]
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        check_config(config)
        self.model = Decoder(config)

    def _init_weights(self, module):
        """The initial weights of a new model; a checkpoint's tensors are not touched."""
        super()._init_weights(module)
        if isinstance(module, Output):
            writes = self.config.num_hidden_layers * (1 if self.config.attention_normalizer.get("block") else 2)
            nn.init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(writes))
        for name, parameter in module.named_parameters(recurse=False):
            if name in SCALARS:
                nn.init.constant_(parameter, SCALARS[name][2](getattr(module, "normalizer", None)))     # p needs none
            elif name in ("q_gain", "k_gain"):
                nn.init.ones_(parameter)
            elif name in ("q_offset", "k_offset"):
                nn.init.zeros_(parameter)

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, embedding):
        self.model.embed_tokens = embedding

    def decode(self, input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, output_attentions,
               output_hidden_states, **kwargs):
        """Returns the Decoder's output (B, T, C), and by name what it may return besides: hidden_states, attentions and
        the cache."""
        default = lambda value, name: getattr(self.config, name) if value is None else value
        unknown = [name for name, value in kwargs.items() if value is not None and name not in KNOWN]
        if unknown:
            raise TypeError(f"unknown arguments: {', '.join(unknown)}")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, _ = x.shape
        use_cache = default(use_cache, "use_cache")
        if self.training and self.is_gradient_checkpointing and torch.is_grad_enabled():
            # Layers run twice, and would fill a cache twice.
            if cache is not None:
                raise ValueError("past_key_values: expected None with gradient checkpointing")
            use_cache = False
        cache = DynamicCache() if use_cache and cache is None else cache
        if getattr(cache, "is_compileable", False):
            raise ValueError("past_key_values: expected a cache that grows, such as DynamicCache, found "
                             f"{type(cache).__name__}, whose length is fixed")
        past = 0 if cache is None else int(cache.get_seq_length())
        positions = torch.arange(past, past + T, device=x.device)[None] if position_ids is None else position_ids
        check_positions(positions, T, attention_mask)
        lengths = torch.full((1,), past + T, device=x.device)
        if attention_mask is not None:
            if attention_mask.shape != (B, past + T):
                raise ValueError(f"attention_mask: expected one number for each of {B} x {past + T} keys, found "
                                 f"{tuple(attention_mask.shape)}")
            lengths = attention_mask.bool().sum(-1)
        with_weights = default(output_attentions, "output_attentions")
        with_states = default(output_hidden_states, "output_hidden_states")
        compute, seen = attention_for(self.config, x, past, attention_mask, with_weights)
        x, states, weights = self.model(x, with_states, with_weights, positions, lengths, compute, seen, cache)
        return x, {"hidden_states": states, "attentions": weights, CACHE: cache if use_cache else None}


class AttnGPTModel(AttnGPT):
    """The hidden states without the logits, for AutoModel."""
    _keys_to_ignore_on_load_unexpected = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                use_cache=None, output_attentions=None, output_hidden_states=None, return_dict=None, cache=None,
                **kwargs):
        """The arguments of AttnGPTForCausalLM."""
        x, others = self.decode(input_ids, attention_mask, position_ids, past_key_values if cache is None else cache,
                                inputs_embeds, use_cache, output_attentions, output_hidden_states, **kwargs)
        out = BaseModelOutputWithPast(last_hidden_state=x, **others)
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()


class AttnGPTForCausalLM(AttnGPT, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, head):
        self.lm_head = head

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                labels=None, use_cache=None, logits_to_keep=0, output_attentions=None, output_hidden_states=None,
                return_dict=None, cache=None, **kwargs):
        """attention_mask (B, keys): 0 for padding. cache: what transformers calls past_key_values from 5.24 on.
        logits_to_keep: computes only the logits of that many last tokens; 0: of all. output_attentions: also returns
        each layer's A (B, heads, T, keys). output_hidden_states: also returns the embeddings (B, T, C), and each
        layer's output, the last one after its RMSNorm."""
        x, others = self.decode(input_ids, attention_mask, position_ids, past_key_values if cache is None else cache,
                                inputs_embeds, use_cache, output_attentions, output_hidden_states, **kwargs)
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
        logits = self.lm_head(x[:, logits_to_keep])
        if cap := self.config.final_logit_softcapping:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **others)
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()

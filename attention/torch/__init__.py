"""Attention with any of attn.c's normalizers for PyTorch, forward and backward, on the CPU and on CUDA GPUs.

    from attn_c import attention, Normalizer
    y = attention(q, k, v, "lssar")
    norm = Normalizer("ssmax", heads=12, seq_len=1024)      # a module that owns the learned scalar s
    y = norm(q, k, v)

doc/pytorch.md in attn.c's repository describes the package."""
import numbers

import torch

from . import cuda, library
from .arguments import DTYPES, exact_int
from .library import PRESETS, SCALARS, scalar_names, scalars_by_position
from .ops import forward

__all__ = ["PRESETS", "SCALARS", "Normalizer", "attention", "supports"]


def supports(x, head_dim, width):
    """Can attention() compute for tensors of this one's dtype and device, and heads and values of these sizes? Under
    torch.autocast, its dtype counts."""
    device = x.device.type
    if device not in ("cpu", "cuda"):
        return False
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if device == "cuda":
        return dtype in DTYPES[:2] and cuda.library_file().exists() and cuda.fits(head_dim, width)
    return dtype in DTYPES


def attention(q, k, v, normalizer, *, seq_len=None, scalars=None, start=None, scaling=None, window=None):
    """Causal attention (B, heads, Tq, width of v) of q (B, heads, Tq, d), which are the last Tq positions of k (B, kv
    heads, Tk, d) and v (B, kv heads, Tk, width); kv heads divides heads. All in float32, bfloat16 or float64.

    normalizer  a name of PRESETS, or a name with overrides such as "softmax+post=reweight:3" or "softmax+cap=50"
    seq_len     the length that the model is trained with, for the normalizers that depend on it
    scalars     {name: tensor} of all learned scalars that the normalizer has: one for each head, attn_pn one for each
                position up to seq_len. None: their initial values
    start       (B): how many positions at the beginning of each sequence are padding. Nothing sees them, and their
                output is 0
    scaling     replaces 1/sqrt(d) in the normalizers that have it
    window      how many keys a query sees, its own position included; None: all"""
    seq_len = check_types(normalizer, seq_len)
    if scalars is not None:
        scalars = flat(normalizer, seq_len, scalars)
    return forward(q, k, v, scalars, start, normalizer, seq_len, None if scaling is None else real(scaling),
                   whole(window))


def check_types(normalizer, seq_len):
    """What the operator's schema checks; the operator checks the values. Returns seq_len as an int, or None."""
    if not isinstance(normalizer, str):
        raise ValueError(f"attn_c: expected the normalizer's name, found {normalizer!r}")
    if seq_len is None or type(seq_len) is int:
        return seq_len
    if (number := exact_int(seq_len)) is None:
        raise ValueError(f"attn_c: {normalizer}: {library.EXPECTED_LENGTH}, found {seq_len!r}")
    return number


def whole(window):
    """The int of any whole number; the operator checks its value."""
    if window is None or type(window) is int:
        return window
    if (number := exact_int(window)) is None:
        raise ValueError(f"attn_c: expected window to be a positive int or None, found {window!r}")
    return number


def real(scaling):
    """The float of any real number, such as NumPy's."""
    if type(scaling) is float:
        return scaling
    if isinstance(scaling, bool) or not isinstance(scaling, numbers.Real):
        raise ValueError(f"attn_c: expected scaling to be a real number or None, found {scaling!r} of type "
                         f"{type(scaling).__name__}")
    return float(scaling)


def flat(normalizer, seq_len, scalars):
    """All values of {name: tensor} in the order in which C has them, or None if there are none."""
    names = scalar_names(normalizer)
    if not isinstance(scalars, (dict, torch.nn.ParameterDict)):
        raise ValueError(f"attn_c: {normalizer}: expected scalars to be {{name: tensor}} or None, found {scalars!r}")
    if scalars.keys() != set(names):
        raise ValueError(f"attn_c: {normalizer}: expected scalars {', '.join(names) or 'none'}, found "
                         f"{', '.join(scalars) or 'none'}")
    if not all([isinstance(scalars[name], torch.Tensor) for name in names]):
        raise ValueError(f"attn_c: {normalizer}: expected tensors as scalars, found {scalars}")
    return joined(normalizer, seq_len, names, [scalars[name] for name in names])


def joined(normalizer, seq_len, names, values):
    """flat() for tensors in the order of their names."""
    values = [x if x.ndim == 1 else x.reshape(-1) for x in values]
    if len(values) < 2:
        return values[0] if values else None
    heads, positions = values[0].shape, scalars_by_position(normalizer)     # the operator checks the sum of all sizes
    if [x.shape for x in values] != [(seq_len,) if name in positions else heads for name in names]:
        found = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(names, values))
        raise ValueError(f"attn_c: {normalizer}: expected each scalar to be (heads), and attn_pn ({seq_len}), "
                         f"found {found}")
    return torch.cat(values)


class Normalizer(torch.nn.Module):
    """attention() with a normalizer's learned scalars as parameters, under their names in attn.c's checkpoints:
    attn_scale (s), attn_bias (b) and attn_sink (heads), attn_pn (seq_len). A scalar that the normalizer fixes is a
    parameter without gradient."""

    def __init__(self, normalizer, heads, seq_len, device=None, dtype=None, window=None):
        super().__init__()
        seq_len, given, heads = check_types(normalizer, seq_len), heads, exact_int(heads)
        if heads is None or not 0 < heads < 1 << 31:
            raise ValueError(f"attn_c: {normalizer}: expected heads to be a positive int, found {given!r}")
        self.normalizer, self.heads, self.seq_len, self.window = normalizer, heads, seq_len, whole(window)
        self.names = scalar_names(normalizer)
        for name, scalar in library.scalars_of(normalizer, heads, seq_len, self.window).items():
            value = torch.empty(scalar.size, device=device, dtype=dtype)
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=scalar.trained))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Writes the initial values of all scalars, those that the normalizer fixes among them, as after to_empty()."""
        for name, scalar in library.scalars_of(self.normalizer, self.heads, self.seq_len, self.window).items():
            getattr(self, name).fill_(scalar.start)

    def forward(self, q, k, v, start=None, scaling=None, window=None):
        """window: in place of the module's."""
        shape = getattr(q, "shape", ())
        if len(shape) == 4 and shape[1] != self.heads:
            raise ValueError(f"attn_c: {self}: expected q with {self.heads} heads, found {shape[1]} in {tuple(shape)}")
        own = self._parameters      # getattr() alone would take a microsecond; a parametrization has no parameter
        scalars = [own[name] if name in own else getattr(self, name) for name in self.names]
        scalars = joined(self.normalizer, self.seq_len, self.names, scalars)
        scaling = None if scaling is None else real(scaling)
        window = self.window if window is None else whole(window)
        return forward(q, k, v, scalars, start, self.normalizer, self.seq_len, scaling, window)

    def extra_repr(self):
        window = f", window={self.window}" if self.window else ""
        return f"{self.normalizer!r}, heads={self.heads}, seq_len={self.seq_len}{window}"

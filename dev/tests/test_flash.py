"""The fused attention of attention/flash.h against the reference in float64: on the CPU (dev/cuda_on_cpu) by
build/on_cpu/flash.so, on a GPU by build/cuda/flash.so.

    pytest dev/tests/test_flash.py                a selection
    FLASH_ALL=1 pytest dev/tests/test_flash.py    every normalizer at every length and head size
    FLASH_SO=FILE                                 uses this library instead of make's

bf16 runs with the kernels for compute capability 9.0 (flash90.cuh) and with those for 8.0. dev/notes/tests.md has the
bounds."""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import draw
import fixtures
import model as reference
from flash_types import Shape, arrays_for, scalar_names
from trainer import ROOT, make

ALL = os.environ.get("FLASH_ALL") == "1"
ON_GPU = torch.cuda.is_available() or (shutil.which("nvidia-smi") is not None and "FLASH_SO" not in os.environ)


# ---- The library

SETTINGS = {"PROCESSORS": "2"}


@pytest.fixture(scope="session")
def flash_file():
    if "FLASH_SO" in os.environ:
        return Path(os.environ["FLASH_SO"])
    file = "build/cuda/flash.so" if ON_GPU else "build/on_cpu/flash.so"
    make("-s", file, check=True)
    return ROOT / file


@dataclass
class Libraries:
    """The library, as loaded for each compute capability: copies, which read the emulator's settings when loaded."""
    file: Path
    folder: Path
    settings: dict
    loaded: dict = field(default_factory=dict)

    def of(self, case):
        if ON_GPU:
            os.environ["FLASH90"] = "1" if case.capability == 90 else "0"
            return self.loaded.setdefault(90, ctypes.CDLL(str(self.file)))
        if case.capability not in self.loaded:
            copy = shutil.copy(self.file, self.folder / f"flash_{case.capability}.so")
            with pytest.MonkeyPatch.context() as patch:
                for name, value in (self.settings | {"CAPABILITY": str(case.capability)}).items():
                    patch.setenv(f"CUDA_ON_CPU_{name}", value)
                self.loaded[case.capability] = ctypes.CDLL(copy)
        return self.loaded[case.capability]


@pytest.fixture(scope="session")
def flash(flash_file, tmp_path_factory):
    return Libraries(flash_file, tmp_path_factory.mktemp("flash"), SETTINGS)


@pytest.fixture(scope="session")
def flash_with(flash_file, tmp_path_factory):
    """The library with settings of the emulator, loaded once for the same settings. With few SMs, blocks of the kernels
    for compute capability 9.0 compute several blocks of rows or keys; PROCESSORS="132" gives each its own."""
    loaded = {}

    def libraries(**settings):
        if ON_GPU:
            pytest.skip("a GPU has no settings for the order")
        settings = SETTINGS | settings
        key = tuple(sorted(settings.items()))
        if key not in loaded:
            loaded[key] = Libraries(flash_file, tmp_path_factory.mktemp("flash"), settings)
        return loaded[key]
    return libraries


# ---- A case

@dataclass(frozen=True)
class Case:
    attn: str
    dtype: torch.dtype
    T: int
    HS: int = 48
    VS: int = 0             # size of the values in a gated unit; otherwise HS
    B: int = 2
    NH: int = 2
    gap: int = 0            # unused elements between rows
    NKV: int = 0            # key-value heads; 0: NH
    documents: bool = False     # rows see only the keys of their own document
    window: int = 0         # rows see at most so many keys
    from_row: int = 0       # a forward pass alone, of the rows from this one on
    sequence: int = 0       # the first sequence's number, which selects the documents
    capability: int = 90    # the GPU's compute capability times 10
    any_order: bool = False     # of the sums in dq

    def __str__(self):
        name = f"{self.attn}-{'bf16' if self.dtype == torch.bfloat16 else 'float'}-T{self.T}-d{self.HS}"
        return (name + (f"-v{self.VS}" if self.VS else "")
                + (f"-B{self.B}x{self.NH}" if (self.B, self.NH) != (2, 2) else "") + ("-gap" if self.gap else "")
                + (f"-kv{self.NKV}" if self.NKV else "") + ("-documents" if self.documents else "")
                + (f"-window{self.window}" if self.window else "")
                + ("-any_order" if self.any_order else "") + (f"-from{self.from_row}" if self.from_row else "")
                + ("-sm80" if self.capability == 80 else ""))

    @property
    def values(self):
        return self.VS or self.HS

    @property
    def kv_heads(self):
        return self.NKV or self.NH

    @property
    def first(self):
        """(B,T): the first visible key of each row, for documents of many lengths, from 1 to more than a tile of keys,
        which differ between sequences, and in a window; None: every row sees all keys before it."""
        if not (self.documents or self.window):
            return None
        positions, starts = torch.arange(self.T).expand(self.B, -1), torch.zeros(self.B, self.T, dtype=torch.bool)
        for i in range(self.B if self.documents else 0):
            b = self.sequence + i
            starts[i, [t for t in (0, 1, 4 + b, 20, 21, 37 + 3 * b, 64, 66, 140 - b) if t < self.T]] = True
        first = torch.where(starts, positions, 0).cummax(1).values
        return torch.maximum(first, positions + 1 - (self.window or self.T)).int()

    @property
    def normalizer(self):
        return reference.parse_normalizer(self.attn)

    @property
    def L(self):
        return 257 if self.normalizer.scale == "pn" else 64


def unit(x):
    return reference.over(x, torch.linalg.vector_norm(x, dim=-1, keepdim=True))


def inputs(case):
    """q, k, v (B,T,NH,size) and scalars, rounded to the kernels' type; under qk=l2, q and k already have norm 1."""
    shape = (case.B, case.T, case.NH, case.HS)
    scale = fixtures.QK_SCALE.get(case.attn, 2) * (48 / case.HS) ** 0.5
    keys = (case.B, case.T, case.kv_heads, case.HS)
    q, k = fixtures.values("q", shape, scale=scale), fixtures.values("k", keys, scale=scale)
    if case.normalizer.qk == "l2":
        q, k = unit(q), unit(k)
    x = {"q": q, "k": k, "v": fixtures.values("v", (*keys[:3], case.values), scale=2)}
    x["dout"] = fixtures.values("dout", (*shape[:3], case.values))
    x = {name: value.to(case.dtype).double() for name, value in x.items()}
    scalars = reference.scalars_at_start(case.normalizer, case.NH, case.L)
    trained = {name: fixtures.parameter(reference.SCALARS[name].tensor, value.shape) for name, value in scalars.items()
               if reference.trains(case.normalizer, name)}
    return x, scalars | trained


def by_formula(case, x, scalars, dtype):
    """out, dq, dk, dv and the scalars' gradients from the reference in `dtype`."""
    normalizer = replace(case.normalizer, qk="none")
    leaves = {name: value.to(dtype, copy=True).requires_grad_()
              for name, value in {**{n: x[n] for n in "qkv"}, **scalars}.items()}
    q, k, v = (leaves[name].transpose(1, 2) for name in "qkv")
    torch.set_default_dtype(dtype if dtype == torch.bfloat16 else torch.float32)       # of the formula's own numbers
    out = reference.attention(q, k, v, normalizer, case.L, {name: leaves[name] for name in scalars},
                              case.first).transpose(1, 2)
    torch.set_default_dtype(torch.float32)
    grads = torch.autograd.grad(out, list(leaves.values()), x["dout"].to(dtype), allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves.values(), grads)]
    return {"out": out.detach().double(), **{"d" + name: g.double() for name, g in zip(leaves, grads)}}


def in_rows(like, row, dtype):
    """Memory full of NaNs with rows of `row` elements, and a view of it as an array like (B,T,NH,size)."""
    B, T, NH, size = like.shape
    whole = torch.full((B * T, row), float("nan"), dtype=dtype)
    return whole, whole.as_strided((B, T, NH, size), (T * row, row, size, 1))


def by_flash(libraries, case, x, scalars, finite=True, rope=None):
    """Runs the kernels. Arrays that they write start as NaNs, which must remain where there is no head. finite: checks
    that no other NaNs remain. rope: RoPE's cosines and sines (T,HS/2), for gradients before RoPE."""
    library = libraries.of(case)
    C, K, CV, is_bf16 = case.NH * case.HS, case.kv_heads * case.HS, case.NH * case.values, case.dtype == torch.bfloat16
    rows = dict.fromkeys("qkv", C + 2 * K) if not case.VS else {"q": C, "k": K, "v": case.kv_heads * case.values}
    rows = {name: row + case.gap for name, row in rows.items()}
    rows["out"] = rows["dout"] = CV + case.gap
    arrays, held, written = arrays_for(library), [], {}
    shape = Shape(case.B, case.T, case.NH, case.kv_heads, case.HS, case.values, case.L, rows["q"], rows["k"], rows["v"],
                  rows["out"])
    shape.any_order = case.any_order
    if rope:
        held += rope
        shape.cosines, shape.sines = (table.data_ptr() for table in rope)
    shape.from_row, shape.window = case.from_row, case.window
    first = case.first
    if first is not None:
        held.append(first.contiguous())
        shape.first = held[-1].data_ptr()

    def give(name, tensor):
        held.append(tensor)
        setattr(arrays, name, tensor.data_ptr())
    for name in ("q", "k", "v", "dout"):
        whole, view = in_rows(x[name], rows[name], case.dtype)
        view.copy_(x[name])
        if name != "dout" or not case.from_row:
            give(name, whole)
    for name, like in (("out", "dout"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        whole, view = in_rows(x[like], rows[like] if name != "out" else rows["out"], case.dtype)
        written[name] = whole, view
        give(name, whole)
    stats = torch.full((case.B, case.NH, case.T, 4), float("nan"))
    give("stats", stats)
    grads, order = {}, scalar_names(library)
    for name, value in scalars.items():
        at = order.index(reference.SCALARS[name].tensor)
        grads["d" + name] = torch.full(value.shape, 0.5)      # accumulated
        held.append(value.float())
        arrays.scalars[at], arrays.grads[at] = held[-1].data_ptr(), grads["d" + name].data_ptr()
    library.flash_test(case.attn.encode(), ctypes.c_bool(is_bf16), ctypes.byref(shape), ctypes.byref(arrays))
    result = {name: view.double() for name, (whole, view) in written.items()}
    for name, (whole, view) in written.items():
        missing = int(view.isnan().sum())
        assert not (finite and missing), f"{name} is not written, or NaN, in {missing} places"
        view.fill_(float("nan"))
        assert whole.isnan().all(), f"{name} is written where no head is"
    assert not (finite and stats.isnan().any()), "stats are not written"
    return {**result, **{name: g.double() - 0.5 for name, g in grads.items()}, "rows": arrays.all_zero_rows,
            "stats": stats}


# ---- The bounds

IN_SCALE = "s", "b", "p"        # the other scalars are in phi or in Z


def by_head(x):
    return [x[:, :, h] for h in range(x.shape[2])] if x.dim() == 4 else [x]


# Additional error, relative to the norm of dv. In a nearly one-hot row, d - D is a difference of nearly equal numbers,
# and its rounding in float32 is multiplied by a power of 100. The slope of a root is infinite at r = 0, and r = 1 +
# (f - mean) factor is rounded as 1 is: with r = 4e-6, a slope is off by 1%.
FLOAT_ROUNDING = {"lssar+post=reweight:100": 5e-4, "exp+post=reweight:0.5": 5e-3}


def output_rounding(case, x, scalars, name, out):
    """The error of a scalar's gradient when each element of the output O_t is rounded to bf16. D_t = dO_t · O_t is in
    the gradient as -sum_t D_t d(ln Z_t)/d(scalar): rows with signs that cancel have errors that do not."""
    q, k, v = (x[part].transpose(1, 2) for part in "qkv")

    def log_Z(value):
        trace = reference.Trace()
        reference.attention(q, k, v, replace(case.normalizer, qk="none"), case.L, scalars | {name: value}, case.first,
                            trace)
        return trace.log_Z[0]

    slope = torch.func.jvp(log_Z, (scalars[name],), (torch.ones_like(scalars[name]),))[1]
    return 2.0**-8 * (slope.transpose(1, 2)[..., None] * x["dout"] * out).norm().item()


def scale_rounding(x, scalars, want, plain):
    """The error of ds = sum_t q_t · dq_t / s if each dq_t has plain's error. plain's own ds may be right by chance."""
    rows = (x["q"] * (plain["dq"] - want["dq"])).sum(-1)
    return (rows / scalars["s"].double()).norm().item()


def before_rope(grads, rope):
    """The gradients, with those of q and k turned back by RoPE's angles."""
    def turned(d):
        a, b = d.chunk(2, -1)
        c, s = (table.double()[:, None] for table in rope)
        return torch.cat([a * c + b * s, b * c - a * s], -1)
    return {name: turned(d) if name in ("dq", "dk") else d for name, d in grads.items()}


def check(case, got, rope=None):
    x, scalars = inputs(case)
    want = by_formula(case, x, scalars, torch.float64)
    plain = by_formula(case, x, scalars, torch.bfloat16) if case.dtype == torch.bfloat16 else None
    if rope:
        want, plain = before_rope(want, rope), before_rope(plain, rope)
    assert got["rows"] == (want["out"] == 0).all(-1).sum(), "all-zero rows"
    whole = want["dv"].norm().item()        # for gradients that are nothing but rounding
    single = 1 in (case.T, case.window)     # keys of a row
    for name in want:
        for h, (a, b) in enumerate(zip(by_head(got[name]), by_head(want[name]))):
            error, norm = (a - b).norm().item(), b.norm().item()
            if plain is None:
                floor = (2e-1 if single else 1e-2) * whole
                allowed = (1e-5 * norm if name == "out"
                           else 1e-4 * max(norm, floor) + FLOAT_ROUNDING.get(case.attn, 0) * whole)
            else:       # with a single row, or a number that sums one rounding per row, PyTorch may be right by chance
                allowed = ((3 if single else 2) * (by_head(plain[name])[h] - b).norm().item()
                           + 1e-6 * max(norm, whole))
                allowed += 2.0**-8 * norm if name.removeprefix("d") in scalars and name != "dp" else 0
                allowed += scale_rounding(x, scalars, want, plain) if name == "ds" else 0
                if (scalar := name.removeprefix("d")) in scalars and scalar not in IN_SCALE:
                    allowed += output_rounding(case, x, scalars, scalar, want["out"])
            assert error <= allowed, f"{name}, head {h}: off by {error:.3g}, allowed {allowed:.3g}, norm {norm:.3g}"


FLOAT, BF16 = torch.float32, torch.bfloat16
NORMALIZERS = fixtures.NORMALIZERS


def on_both(cases):
    """The cases, those in bf16 also with the kernels for compute capability 8.0."""
    for case in cases:
        yield case
        if case.dtype == BF16:
            yield replace(case, capability=80)


def every_case():
    for attn in NORMALIZERS:
        for dtype in (BF16, FLOAT):
            for HS in (48, 64, 128):
                yield from (Case(attn, dtype, T, HS, B=1, NH=2 if T < 200 else 1) for T in (1, 17, 64, 65, 200, 257))
            yield from (Case(attn, dtype, T, 128, VS, B=1, NH=1) for T, VS in ((17, 256), (65, 192), (200, 256)))


def quick_cases():
    for i, attn in enumerate(NORMALIZERS):
        yield Case(attn, BF16, (200, 65)[i % 2], (48, 64)[i // 2 % 2])
        yield Case(attn, FLOAT, (65, 17)[i % 2], (48, 64)[i // 2 % 2], B=1)
        yield Case(attn, BF16, 1, 48, B=1)          # a single weight, which is exactly 1 under most norms
    for attn in ("softmax", "lssar", "softmax-recentered", "gelu-l1", "ssmax-bias"):
        yield Case(attn, BF16, 65, 128, 192, B=1, NH=1)
        yield Case(attn, FLOAT, 17, 128, 256, B=2, NH=1)
        yield Case(attn, BF16, 65, 128, B=1)
        yield Case(attn, FLOAT, 65, 128, B=1, NH=1)
        yield Case(attn, BF16, 33, 64, gap=16)
    for T in (1, 64, 257):
        yield Case("softmax", BF16, T, 64, B=1)
        yield Case("softmax", FLOAT, T, 64, B=1, NH=1)
    for attn in ("ssmax", "lssar", "softmax-recentered"):       # padded with zeros
        yield from (Case(attn, BF16, 65, HS, B=1) for HS in (8, 32, 96))
        yield Case(attn, FLOAT, 33, 40, B=1)
    yield Case("ssmax", FLOAT, 257, 48, B=1, NH=1)
    yield Case("lssar", BF16, 257, 48, B=1, NH=1)


def shared_cases():
    """Grouped-query attention and documents, for every normalizer; with ALL also multi-query attention and other
    ratios."""
    for i, attn in enumerate(NORMALIZERS):
        yield Case(attn, (BF16, FLOAT)[i % 2], (150, 65)[i % 2], (64, 48)[i % 2], B=2, NH=4, NKV=2, documents=True)
        if ALL:
            yield from (Case(attn, dtype, 80, HS, B=1, NH=NH, NKV=NKV, documents=documents)
                        for dtype in (BF16, FLOAT) for HS in (48, 128) for NH, NKV in ((3, 1), (4, 2))
                        for documents in (False, True))
            yield Case(attn, BF16, 200, 128, 192, B=2, NH=1, documents=True)


@pytest.mark.drawn(20)
@pytest.mark.parametrize("case", list(on_both(shared_cases())), ids=str)
def test_shared_heads_and_documents(flash, case):
    check(case, by_flash(flash, case, *inputs(case)))


def limited_cases():
    """A window, with and without documents, and a cap, for every normalizer."""
    for i, attn in enumerate(NORMALIZERS):
        dtype, T, HS = ((BF16, 150, 64), (FLOAT, 90, 48))[i % 2]
        # recenter leaves rows of three keys alone, and PyTorch's bf16 has only NaNs for their gradients.
        widths = (1, 2, 63, 64, 65, T, T + 1) if "recenter" not in attn else (4, 63, 64, 65, T)
        for window in widths if ALL else widths[i // 2 % len(widths):][:1]:
            yield Case(attn, dtype, T, HS, B=2, NH=4, NKV=2, window=window, documents=i % 3 == 0)
        capped = attn + "+cap=2"
        yield Case(capped, dtype, 65, HS, B=1, window=20 * (i % 3), documents=i % 4 == 0)
        if ALL:
            yield from (Case(capped, dtype, 65, 128, VS, B=1, NH=1) for dtype in (BF16, FLOAT) for VS in (0, 192))


@pytest.mark.drawn(12)
@pytest.mark.parametrize("case", list(on_both(limited_cases())), ids=str)
def test_windows_and_caps(flash, case):
    check(case, by_flash(flash, case, *inputs(case)))


@pytest.mark.drawn(80)
@pytest.mark.parametrize("case", list(on_both(every_case() if ALL else quick_cases())), ids=str)
def test_values_match_the_formula(flash, case):
    check(case, by_flash(flash, case, *inputs(case)))


# ---- Properties that hold for any numbers

# The longer one has tiles whose scores are all visible.
@pytest.mark.parametrize("capability, dtype, T, row", ((90, BF16, 33, 20), (80, BF16, 33, 20), (90, FLOAT, 33, 20),
                                                       (80, FLOAT, 33, 20), (90, BF16, 300, 200)),
                         ids=("90-bf16", "80-bf16", "90-float", "80-float", "90-bf16-300"))
@pytest.mark.parametrize("attn", ("softmax", "softmax-recentered-l1", "relu-l1", "gelu-l1", "sigmoid", "lssar",
                                  "softpick", "softpick+norm=n"))
def test_a_nan_is_not_lost(flash, attn, capability, dtype, T, row):
    """A NaN in a query makes its own row of the output NaN, and no other row; no gradient of another head is NaN."""
    case = Case(attn, dtype, T, 48, B=1, capability=capability)
    x, scalars = inputs(case)
    x["q"][0, row, 1, 7] = float("nan")
    got = by_flash(flash, case, x, scalars, finite=False)
    out = got["out"]
    assert out[0, row, 1].isnan().all() and out.isnan().sum() == case.values
    assert got["dk"][0, :, 1].isnan().any()
    assert not any(got[name][0, :, 0].isnan().any() for name in ("dq", "dk", "dv"))

def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a)


# One of each kind of kernel: a running maximum, a negative scale, sums of v, two sweeps forward and backward, a phi
# chosen at run time, wide values, float32. They need few instances, so that dev/mutate can build only those.
KINDS = list(on_both([
         Case("softmax", BF16, 150, 64, B=1, NH=4, NKV=2), Case("softmax", BF16, 150, 64, B=2, NH=1, documents=True),
         Case("softmax", BF16, 65, 128, 192, B=1, NH=1),
         Case("softmax", BF16, 70, 64, B=2, NH=8, NKV=2),             # more heads than a block of the dq kernel has
         Case("sigmoid-l1", BF16, 200, 64, B=1, NH=1),
         Case("softmax-negated+qk=l2+scale=const:-7", BF16, 65, 48, B=1),
         Case("softmax+qk=l2+scale=const:-7", BF16, 300, 64, B=1),   # a block of the grid computes several of rows
         Case("softmax", BF16, 300, 128, B=1, NH=1),                  # several blocks of keys, which wait in turn
         Case("softmax-recentered+scale=log:512", BF16, 130, 48, B=1, NH=1),
         Case("lssar", BF16, 130, 48, B=1, NH=1), Case("softmax-recentered-l1+phi=gelu", BF16, 65, 48, B=1, NH=1),
         Case("ssmax-bias", FLOAT, 65, 48, B=1), Case("ssmax-pn", FLOAT, 33, 48, B=2),
         Case("softmax-sink", FLOAT, 33, 48, B=1), Case("softpick", FLOAT, 33, 48, B=1, NH=1),
         Case("lssar", FLOAT, 33, 128, 192, B=1, NH=1), Case("lssar", FLOAT, 33, 48, B=1, NH=1),
         Case("softmax-recentered+scale=log:512", BF16, 150, 48, B=1, NH=4, NKV=2, documents=True),
         Case("lssar", BF16, 80, 48, NH=3, NKV=1, documents=True),
         Case("softmax-recentered-l1+phi=gelu", BF16, 80, 48, B=1, NH=2, NKV=1, documents=True),
         Case("ssmax-pn", FLOAT, 70, 48, NH=2, NKV=1, documents=True),
         Case("ssmax-pn", FLOAT, 70, 48, NH=2, NKV=1, window=18), Case("softmax", BF16, 300, 64, B=1, NH=1, window=140),
         Case("softmax-recentered", BF16, 300, 48, B=1, NH=1, window=70, documents=True),
         Case("softmax+cap=2+offset=-logn", BF16, 150, 48, B=1, NH=2, NKV=1, window=70),
         Case("softmax-sink", FLOAT, 70, 48, NH=2, NKV=1, documents=True),
         Case("softmax", BF16, 65, 128, 192, B=1, NH=1, documents=True),
         Case("softmax", BF16, 300, 64, B=1, NH=1, documents=True), Case("lssar", BF16, 300, 64, B=1, NH=1)]))


# With lssar's power of 15, bf16's bound is too wide to notice errors in the sums over a row that its gradients need.
SMALL_POWER = on_both([Case("softplus-l1+post=reweight:1.5", BF16, 130, 48, B=1, NH=1)])


# Where units and signs that cancel elsewhere count: gradients of scalars and of sinks, Z that is not a sum of f alone,
# and negated weights. And heads of 128 whose weights are not exp's, or with wide values, in five parts, or narrow ones.
UNITS = ("softplus-l1+scale=logn", "lssar+norm=l1+1", "lssar+norm=const:64", "ssmax+post=negate",
         "softmax-sink+post=recenter", "softmax-sink+post=recenter-l1")
UNITS = list(on_both([*(Case(attn, BF16, 130, 64, B=1, NH=2) for attn in UNITS),
                      Case("relu2-n", BF16, 130, 128, B=1, NH=1), Case("relu6-l1", BF16, 300, 128, B=1, NH=1),
                      *(Case(attn, BF16, 130, 128, 640, B=1, NH=1)
                        for attn in ("softmax-sink+post=recenter", "softmax-sink+post=recenter-l1", "ssmax")),
                      Case("softmax", BF16, 130, 128, 72, B=1, NH=1)]))


@pytest.mark.parametrize("case", [*KINDS, *SMALL_POWER, *UNITS], ids=str)
def test_kinds(flash, case):
    check(case, by_flash(flash, case, *inputs(case)))


@pytest.mark.parametrize("attn", ("ssmax-pn", "softmax-sink"))
def test_kinds_of_many_rows(flash, attn):
    """The sums of the scalars' gradients span more rows (1,024) and heads (16) than one block handles."""
    case = Case(attn, FLOAT, 65, 48, B=17, NH=1)
    check(case, by_flash(flash, case, *inputs(case)))


@pytest.mark.parametrize("limits", ({}, {"documents": True}, {"window": 5}, {"window": 700}), ids=str)
def test_kinds_of_many_segments(flash, limits):
    """The prefix sums of v span more segments (of 64 positions) than a block has groups of threads (8), and more
    columns than a block (64)."""
    case = Case("softmax-recentered", FLOAT, 800, 128, 72, B=1, NH=1, **limits)
    check(case, by_flash(flash, case, *inputs(case)))


@pytest.mark.parametrize("T", (300, 384, 520))
@pytest.mark.parametrize("attn", ("softmax", "softmax-recentered-l1"))
def test_an_sm_for_each_block(flash, flash_with, attn, T):
    """With as many SMs as blocks of rows, the forward kernel computes one in each block, and the bits are the same."""
    case = Case(attn, BF16, T, 64, B=1, NH=2)
    x, scalars = inputs(case)
    check(case, whole := by_flash(flash_with(PROCESSORS="132"), case, x, scalars))
    assert same(whole, by_flash(flash, case, x, scalars))


@pytest.mark.drawn(30)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_repeats_to_the_last_bit(flash, case):
    case = replace(case, B=2)
    x, scalars = inputs(case)
    whole = by_flash(flash, case, x, scalars)
    assert same(whole, by_flash(flash, case, x, scalars))
    for b in range(case.B):       # a sequence alone gives the same
        alone = by_flash(flash, replace(case, B=1, sequence=b), {name: value[b:b + 1] for name, value in x.items()},
                         scalars)
        assert all(torch.equal(alone[name], whole[name][b:b + 1]) for name in ("out", "dq", "dk", "dv", "stats"))


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_future_has_no_effect(flash, case):
    """Later keys, however large, change no bit of a row: not through a maximum, a sum or a matmul."""
    x, scalars = inputs(case)
    now = case.T - 20
    later = {name: torch.cat([value[:, :now], value[:, now:] * 64], 1) for name, value in x.items()}
    a, b = (by_flash(flash, case, y, scalars) for y in (x, later))
    assert all(torch.equal(a[name][:, :now], b[name][:, :now]) for name in ("out", "dq"))
    assert torch.equal(a["stats"][:, :, :now], b["stats"][:, :, :now])


@pytest.mark.parametrize("HS", (64, 128))
@pytest.mark.parametrize("attn", ("softmax", "ssmax-bias", "softmax-recentered"))
def test_gradients_before_rope(flash, attn, HS):
    """flash_undoes_rope() is true for these: heads of 64 and 128 in bf16 on compute capability 9.0."""
    case = Case(attn, BF16, 150, HS, B=1, NH=4, NKV=2)
    angles = fixtures.values("angles", (case.T, HS // 2), scale=3)
    rope = [angles.cos().float().contiguous(), angles.sin().float().contiguous()]
    check(case, by_flash(flash, case, *inputs(case), rope=rope), rope)


# Many blocks of keys on compute capability 9.0. They add to dq, or take a single step each.
MANY = [Case("softmax", BF16, 600, 64, B=1, NH=2), Case("ssmax", BF16, 400, 128, B=1, NH=2, NKV=1),
        Case("lssar", BF16, 400, 64, B=1, NH=2, NKV=1, documents=True), Case("softmax", BF16, 33, 64, B=9, NH=2),
        Case("ssmax", BF16, 400, 128, 320, B=1, NH=2, NKV=1),         # wide values, in three parts
        Case("softmax-recentered", BF16, 300, 128, 264, B=2, NH=1, documents=True),
        Case("sigmoid", BF16, 130, 64, B=129, NH=1)]                  # two ranges of blocks, of 65 and 64 heads


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", MANY, ids=str)
def test_sums_in_any_order(flash, flash_with, case):
    """With any_order, dq differs by rounding alone, and nothing else differs."""
    x = inputs(case)
    check(case, by_flash(flash, case, *x))
    any_order = by_flash(flash_with(ORDER="random", SEED="3"), replace(case, any_order=True), *x)
    check(case, any_order)
    fixed = by_flash(flash, case, *x)
    assert all(torch.equal(fixed[name], any_order[name]) for name in ("out", "dk", "dv", "stats"))


ORDERS = [{"ORDER": "random", "ASYNC": "random", "THREADS": "4"},
          {"ORDER": "reverse", "ASYNC": "wait", "THREADS": "4", "RESIDENT": "2"},
          {"ORDER": "forward", "ASYNC": "issue", "THREADS": "4", "RESIDENT": "1"},
          {"ORDER": "straggler", "ASYNC": "issue", "THREADS": "1"},
          {"ORDER": "laggards", "ASYNC": "wait", "THREADS": "1"},
          {"ORDER": "forward", "ASYNC": "wait", "THREADS": "1", "SUSPEND": "often"}]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", MANY, ids=str)
def test_fixed_order_of_sums(flash, flash_with, case):
    """Blocks that start in any order, few at a time or all at once, add to dq in the same order, also if other blocks
    run at every place where they signal, or if single threads or warpgroups fall behind."""
    x = inputs(case)
    fixed = by_flash(flash, case, *x)
    for settings in draw.sample(ORDERS, 3 if os.environ.get("DRAW") else len(ORDERS)):
        assert same(by_flash(flash_with(SEED="5", **settings), case, *x), fixed), settings


def test_the_last_rows_alone(flash):
    """FlashShape.from: these rows are the same to the last bit, and blocks of rows before them are not touched."""
    for attn, dtype, how in (("softmax", BF16, {}), ("lssar", BF16, {"HS": 64}), ("softmax-recentered", FLOAT, {}),
                             ("ssmax-pn", FLOAT, {"NH": 4, "NKV": 2}), ("relu2-T", BF16, {"HS": 128, "VS": 256})):
        for case in on_both([Case(attn, dtype, 257, B=1, **({"NH": 1} | how))]):
            x = inputs(case)
            whole = by_flash(flash, case, *x)["out"]
            for from_row in (255, 256, 130):
                last = by_flash(flash, replace(case, from_row=from_row), *x, finite=False)["out"]
                assert torch.equal(last[:, from_row:], whole[:, from_row:]) and last[:, :128].isnan().all()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("order", ("forward", "reverse", "random", "greedy"))
@pytest.mark.parametrize("copy", ("issue", "wait"))
def test_any_order_of_threads_and_copies(flash, flash_with, order, copy):
    other = flash_with(ORDER=order, COPY=copy, ASYNC=copy, SEED="7")
    for case in KINDS:
        x = inputs(case)
        assert same(by_flash(other, case, *x), by_flash(flash, case, *x)), str(case)


def errors(case, got):
    x, scalars = inputs(case)
    want = by_formula(case, x, scalars, torch.float64)
    return {name: ((got[name] - want[name]).norm() / want[name].norm()).item() for name in want}


LONG = [Case(attn, FLOAT, T, HS, B=1, NH=1)
        for attn, HS in (("softmax", 64), ("lssar", 64), ("gelu-l1", 48), ("softmax-recentered", 64), ("ssmax", 128))
        for T in ((1024, 4096) if ALL else (512,) if attn in ("softmax", "lssar") else ())]


@pytest.mark.parametrize("case", LONG, ids=str)
def test_float32_on_tensor_cores_that_truncate(flash, flash_with, case):
    """With sums rounded toward zero, as on an H100, the error of float32 is about the same as with sums rounded to
    nearest, at every length. The error of ds, one number, may be small by chance."""
    x = inputs(case)
    truncated = by_flash(flash_with(MMA="hopper"), case, *x)
    check(case, truncated)
    nearest = errors(case, by_flash(flash, case, *x))
    for name, error in errors(case, truncated).items():
        allowed = 1.5 * nearest[name] + (3e-7 if name == "ds" else 1e-7)
        assert error <= allowed, f"{name}: off by {error:.3g}, rounded to nearest only by {nearest[name]:.3g}"


@pytest.mark.parametrize("case", [*KINDS, *on_both(Case(attn, BF16, 1024, 64, B=1, NH=1)
                                                   for attn in ("softmax", "lssar", "gelu-l1") if ALL)], ids=str)
def test_kinds_on_tensor_cores_that_truncate(flash_with, case):
    check(case, by_flash(flash_with(MMA="hopper"), case, *inputs(case)))


class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("launches", "blocks", "barriers", "collectives", "mmas",
                                                     "ldmatrix", "ldmatrix_conflicts", "copies", "copy_conflicts",
                                                     "stmatrix", "stmatrix_conflicts", "wgmmas", "bulk_copies")]


def has_wgmma(case):
    """Does compute capability 9.0 have kernels of its own for this case? In bf16, unless phi is chosen at run time."""
    return case.dtype == BF16 and not any(word in case.attn for word in ("phi=", "cap="))


def counted(libraries, case):
    counts = libraries.of(case)._ZN11cuda_on_cpu6countsEv            # cuda_on_cpu::counts()
    counts.restype = Counts
    return counts()


def test_no_bank_conflicts(flash_with):
    libraries = flash_with(REPORT="0")
    for case in KINDS:
        before = counted(libraries, case)
        by_flash(libraries, case, *inputs(case))
        after = counted(libraries, case)
        on_90 = case.capability == 90 and has_wgmma(case)
        assert (after.wgmmas > before.wgmmas) == on_90, str(case)
        assert on_90 or after.copies > before.copies
        in_place = on_90 and case.HS == 128                          # keys and values, for which registers lack room
        assert (after.ldmatrix > before.ldmatrix) == (case.dtype == BF16 and not in_place), str(case)
        assert (after.stmatrix > before.stmatrix) == on_90, str(case)     # of the backward pass
        for name in ("ldmatrix_conflicts", "stmatrix_conflicts", "copy_conflicts"):
            assert getattr(after, name) == getattr(before, name), f"{name}: {case}"


def tiles(case, rows, keys):
    """How many tiles of so many rows and keys of a head have a row that sees one of the keys."""
    j = torch.arange(case.T)
    visible = (j <= j[:, None]) & (j >= case.first[0][:, None])
    return visible.unfold(0, rows, rows).unfold(1, keys, keys).any(-1).any(-1).sum().item()


@pytest.mark.parametrize("window", (1, 64, 66, 200, 640))
def test_only_tiles_in_the_window_are_loaded(flash, window):
    """Of both passes. On 9.0 a tile of 64 columns is one copy, two for k in the backward pass, and one that adds dq; on
    8.0, with 16 bytes to a copy, a tile of 64 rows is 512."""
    for capability, kind in ((90, "bulk_copies"), (80, "copies")):
        case = Case("softmax", BF16, 640, 64, B=1, NH=1, window=window, capability=capability)
        blocks, of_keys = case.T // 128, tiles(case, 64, 128)
        if capability == 90:        # q, k and v; then k, v, q, dout and dq
            expected = blocks + 2 * tiles(case, 128, 128) + 3 * blocks + 3 * of_keys
        else:                       # forward q, k, v; for dq q, dout, k, v; for dk k, v, q, dout and rows' numbers
            expected = 1024 * (5 * blocks + 2 * tiles(case, 128, 64) + of_keys) + 128 * of_keys
        before = counted(flash, case)
        by_flash(flash, case, *inputs(case))
        assert getattr(counted(flash, case), kind) - getattr(before, kind) == expected


@pytest.mark.parametrize("dtype, capability", ((BF16, 90), (BF16, 80), (FLOAT, 90)))
def test_all_zero_rows(flash, dtype, capability):
    """relu and its square divided by their sum, where every second query has no positive score; reweight and
    recenter-l1, where all weights of a row are equal. A row counts once."""
    for attn in ("relu-l1+post=recenter-l1", "relu2-l1"):
        case = Case(attn, dtype, 33, 48, capability=capability)
        x, scalars = inputs(case)
        x["k"] = x["k"].abs()
        x["q"] = x["q"].abs() * torch.where(torch.arange(33) % 2 == 0, -1.0, 1.0)[:, None, None]
        got = by_flash(flash, case, x, scalars)
        assert got["rows"] == case.B * case.NH * 17
        assert (got["out"][:, ::2] == 0).all() and (got["dq"][:, ::2] == 0).all() and (got["out"][:, 1::2] != 0).any()
    for post in "reweight:3", "recenter-l1":
        case = Case(f"softplus-l1+post={post}", dtype, 200, 48, capability=capability)
        x, scalars = inputs(case)
        x["q"] = torch.zeros_like(x["q"])
        got = by_flash(flash, case, x, scalars)
        assert got["rows"] == case.B * case.NH * 197
        assert (got["out"][:, 3:] == 0).all() and (got["dq"][:, 3:] == 0).all() and (got["out"][:, :3] != 0).all()


@pytest.mark.parametrize("T, HS, VS, any_order", ((33, 48, 48, False), (300, 64, 64, True), (150, 128, 640, False)))
@pytest.mark.parametrize("attn", ("ssmax-bias", "sigmoid+scale=logn-bias", "identity+scale=logn-bias",
                                  "sigmoid-l1+scale=logn-bias"))
def test_a_scale_of_zero(flash, attn, T, HS, VS, any_order):
    """A learned scale, and its bias, may be 0, as at n = 1 in the first step. Their gradients are not, although those
    of q and k are. In the longer cases several blocks add to a row's dq, whose sums must stay normal numbers although
    the keys are small."""
    case = Case(attn, BF16, T, HS, VS, B=1, any_order=any_order)
    x, scalars = inputs(case)
    unit = {"q": 2.0**70, "k": 2.0**-70}
    for name in unit:
        x[name] = x[name] * unit[name]
    scalars = {name: torch.zeros_like(value) for name, value in scalars.items()}
    got = by_flash(flash, case, x, scalars)
    want = by_formula(case, x, scalars, torch.float64)
    whole = x["dout"].norm()
    assert not want["dq"].any() and not want["dk"].any() and min(want["ds"].norm(), want["db"].norm()) > 1e-3 * whole
    for name in want:
        error, norm = (got[name] - want[name]).norm(), want[name].norm()
        least = 1e-9 * whole * {"dq": unit["k"], "dk": unit["q"]}.get(name, 1)
        assert error < 0.01 * norm + least, f"{name}: off by {error:.3g}, norm {norm:.3g}"


@pytest.mark.parametrize("HS, VS, words", ((44, 44, "head size of 44"), (136, 136, "at most 128"),
                                           (64, 128, "values of size 128"), (128, 132, "multiple of 8")))
def test_unsupported_shapes_are_rejected(flash_file, HS, VS, words):
    call = f"""import ctypes, sys
sys.path.insert(0, {str(ROOT / "dev/tests")!r})
from flash_types import Shape
shape, arrays = Shape(1, 4, 1, 1, {HS}, {VS}, 64, {HS}, {HS}, {VS}, {VS}), (ctypes.c_uint64 * 18)()
ctypes.CDLL({str(flash_file)!r}).flash_test(b"softmax", ctypes.c_bool(True), ctypes.byref(shape), arrays)
"""
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr, (done.returncode, done.stderr)

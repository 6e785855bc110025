"""attn_c's implementation for GPUs, on an emulated one (dev/cuda_on_cpu), whose memory is the host's: the same code but
for the stream. Compute capability 8.0, because the emulated TMA of 9.0 reads only what cudaMalloc() returned; scratch
memory must be such memory here, too. ATTN_C_CUDA_SO=FILE uses this library instead of make's."""
import ctypes
import itertools
import os
from pathlib import Path

import pytest
import torch

from test_torch import SHAPES, Case, Shape, assert_close
from trainer import ROOT, make

NAMES = ["softmax", "ssmax-bias", "ssmax-pn", "softmax-sink", "lssa", "lssar", "relu-l1", "identity-l1", "relu2-T",
         "softmax-recentered-l1", "softmax+qk=l2"]
MEMORY = 1 << 24        # more than a call needs
HEADS = [Shape(2, 4, 2, 33, 33, 16, 16), Shape(2, 2, 1, 3, 70, 8, 8), Shape(1, 2, 2, 1, 40, 24, 24)]


@pytest.fixture(scope="module")
def gpu(attn_c):
    """attn_c.cuda with the emulator's library."""
    from attn_c import cuda
    file = Path(os.environ.get("ATTN_C_CUDA_SO") or ROOT / "build/on_cpu/attn_c_cuda.so")
    if "ATTN_C_CUDA_SO" not in os.environ:
        make("-s", "-j2", "build/on_cpu/attn_c_cuda.so", check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_ON_CPU_CAPABILITY", "80")      # read when the library is loaded
        patch.setattr(cuda, "library_file", lambda: file)
        cuda.library.cache_clear()
        memory = ctypes.c_void_p()
        assert cuda.library().cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(MEMORY)) == 0
        device = torch.frombuffer((ctypes.c_byte * MEMORY).from_address(memory.value), dtype=torch.uint8)
        at = [0]

        def bytes_for(x, size):
            at[0] = 0 if at[0] + size > MEMORY else at[0]
            at[0] += (size + 255) // 256 * 256
            return device[at[0] - (size + 255) // 256 * 256:][:size]
        patch.setattr(cuda, "bytes_for", bytes_for)
        yield cuda
    cuda.library.cache_clear()


def on_gpu(gpu, case, scaling=None):
    """By the operator's autograd, with the implementation for GPUs in place of the dispatcher."""
    from attn_c import SCALARS, ops

    def compute(q, k, v, scalars):
        flat = torch.cat([scalars[name] for name in SCALARS if name in scalars]) if scalars else None
        return ops.Attention.apply(q, k, v, flat, case.start, (case.name, 150, scaling, case.window))[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "forward_below", gpu.forward)
        patch.setattr(ops, "backward_op", gpu.backward)
        return case.by(compute)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.04)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(gpu, name, dtype, tolerance):
    for shape in HEADS:
        case = Case(name, shape, dtype)
        assert_close(on_gpu(gpu, case), case.reference(), tolerance)


@pytest.mark.parametrize("name, window", [("softmax", None), ("ssmax-bias", 5), ("lssar", None), ("lssar", 40)])
def test_equals_the_cpu(gpu, attn_c, name, window):
    """With padding, a window, a scaling, and strides that the kernels can and cannot read."""
    for shape, start in itertools.product(HEADS[:2], [None, torch.tensor([0, 7])]):
        case = Case(name, shape, torch.float32, start=start, window=window)
        assert_close(on_gpu(gpu, case, 0.3), case.package(attn_c, scaling=0.3), 1e-4)
    case = Case(name, HEADS[0], torch.float32)
    x = case.inputs["q"]
    joint = torch.cat([x, x], 1).transpose(1, 2).contiguous().transpose(1, 2)[:, :4]
    assert gpu.arranged(joint) is joint and gpu.arranged(x) is not x and gpu.arranged(x[:1]) is not None
    assert torch.equal(gpu.arranged(x), x)


def test_nothing_to_compute(gpu):
    """The kernels are not called."""
    for shape in (0, 2, 1, 4, 5), (2, 0, 1, 4, 5), (2, 2, 1, 0, 5), (2, 2, 1, 0, 0):
        B, heads, kv_heads, queries, keys = shape
        case = Case("ssmax", Shape(B, heads, kv_heads, queries, keys, 8, 8), torch.float32)
        found = on_gpu(gpu, case)
        assert all(not x.any() and x.shape == case.inputs.get(key, case.dout).shape for key, x in found.items())


def test_the_backward_pass_checks_what_was_saved(gpu):
    x, stats = torch.ones(1, 2, 6, 8), torch.ones(1, 2, 6, 9)
    with pytest.raises(ValueError, match=r"expected dout and out \(1, 2, 6, 8\) and stats .*found .*\(1, 2, 6, 9\)"):
        gpu.backward(x, x, stats, x, x, x, None, None, "softmax", None, None)
    with pytest.raises(ValueError, match="found q on cpu and k on meta"):
        gpu.forward(x, x.to("meta"), x, None, None, "softmax", None, None)


@pytest.mark.parametrize("message, shape, change", [
    ("multiple of 8 and at most 128.*found 5", SHAPES[4], {}),
    ("at most 65,535 heads .*found 8192 x 8 heads", Shape(8192, 8, 8, 1, 1, 8, 8), {}),
    ("expected float32 or bfloat16 on a GPU", HEADS[0], dict(dtype=torch.float64)),
    ("depends on the length of each text", HEADS[0], dict(name="relu2-T", start=torch.tensor([0, 1])))])
def test_what_the_kernels_cannot_do(gpu, message, shape, change):
    case = Case(**dict(name="softmax", shape=shape, dtype=torch.float32) | change)
    with pytest.raises(ValueError, match=message):
        on_gpu(gpu, case)


def test_without_the_library(attn_c, monkeypatch, tmp_path):
    from attn_c import cuda
    monkeypatch.setattr(cuda, "library_file", lambda: tmp_path / "attn_c_cuda.so")
    cuda.library.cache_clear()
    with pytest.raises(ValueError, match="has no attn_c_cuda.so; reinstall attn_c with TORCH_CUDA=1"):
        cuda.library()

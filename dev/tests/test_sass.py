"""dev/bench/sass.py: what it says of small kernels. Needs nvcc and nvdisasm, but no GPU."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/bench"))
import sass

TOY = """
extern "C" __global__ void toy(float *x) { x[threadIdx.x] = FUNCTION(x[threadIdx.x]); }
extern "C" __global__ void large(float *x) {
    float y[64];
#pragma unroll
    for (int i = 0; i < 64; i++) y[i] = x[32 * i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; i++) x[i] = y[i] * y[63 - i];
}
"""


def test_kernels_are_compared(tmp_path):
    try:
        sass.nvdisasm()
    except sass.Missing as missing:
        pytest.skip(str(missing))
    source = tmp_path / "toy.cu"
    source.write_text(TOY)
    first, again, other = (sass.compile_kernels(ROOT, source, "-maxrregcount=24", f"-DFUNCTION={function}",
                                                architecture="sm_90")
                           for function in ("__sinf", "__sinf", "__cosf"))
    assert first["toy"]["registers"] <= 24 and not first["toy"]["serialized"]
    assert first["large"]["spilled"] > 0 == first["toy"]["spilled"]
    assert not sass.differences(first["toy"], again["toy"])
    assert "MUFU.COS +1, MUFU.SIN -1" in sass.differences(first["toy"], other["toy"])

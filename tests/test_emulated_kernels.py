"""The CUDA kernels on the CPU: logic, waits and shared memory accesses, without a GPU (see emulator/emulator.hpp)."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from emulator import emulator
from emulator.emulator import Way

from cuflash.device import known_device
from cuflash.plan import contiguous_operands
from cuflash.problem import Options, make_problem
from cuflash.reference import check_forward
from cuflash.variants import sm80_forward, sm90_forward

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="g++ is not installed")

VARIANTS = {
    "sm80": (sm80_forward.VARIANT, emulator.sm80_forward),
    "sm90": (sm90_forward.VARIANT, emulator.sm90_forward),
}
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
WAYS = [Way(1, False), Way(2, True)]


def attend(variant, q, k, v, way, **options):
    """(out, lse) of contiguous (batch, seqlen, heads, head_dim) arrays."""
    module, launch = VARIANTS[variant]
    dtype = next(name for name, dtype in DTYPES.items() if dtype == q.dtype)
    problem = make_problem(q.shape, k.shape, v.shape, dtype, Options(**options))
    operands = contiguous_operands(problem)
    config = module.config(problem, operands, known_device("sm_90"))
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32)
    launch(config, problem, operands, tuple(x.ctypes.data for x in (q, k, v, out, lse)), way)
    return out, lse


def inputs(b, m, n, hq, hkv, d, dv, dtype, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (b, m, hq, d), (b, n, hkv, d), (b, n, hkv, dv)
    return [rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype]) for shape in shapes]


CASES = [
    # m, n, d, options
    (130, 200, 64, {}),
    (200, 200, 64, {"causal": True}),
    (130, 280, 128, {"causal": True}),
    (70, 200, 128, {"window": (40, 30)}),
    (300, 70, 64, {"causal": True}),  # rows without keys
    (60, 100, 256, {"causal": "top-left"}),
    (420, 90, 64, {}),  # more tiles than blocks of a persistent grid
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("m", "n", "d", "options"), CASES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward(variant, m, n, d, options, way):
    q, k, v = inputs(1, m, n, 2, 1, d, d, "bfloat16")
    out, lse = attend(variant, q, k, v, way, **options)
    check_forward(out, q, k, v, lse=lse, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_nan_reaches_the_rows_that_see_it_alone(variant):
    q, k, v = inputs(1, 150, 150, 1, 1, 64, 64, "float16")
    for way, place in itertools.product(WAYS, (20, 140)):
        v[0, place, 0, 5] = np.nan
        out, lse = attend(variant, q, k, v, way, causal=True)
        check_forward(out, q, k, v, lse=lse, causal=True)
        assert np.isnan(out[0, place:, 0, 5]).all() and not np.isnan(out[0, :place]).any()
        v[0, place, 0, 5] = 1

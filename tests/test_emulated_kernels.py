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


@pytest.mark.parametrize("way", ["grows", "shrinks", "jumps", "differs by row", "negative"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_maxima_that_grow_from_tile_to_tile(variant, way):
    """References of rows are raised again and again, or in some rows of a warp only; never their neighbours'."""
    n = 300
    q, k, v = inputs(1, n, n, 1, 1, 64, 64, "bfloat16")
    place = np.linspace(0, 1, n, dtype=np.float32)[None, :, None, None]
    factor = {"grows": 1 + 40 * (1 - place), "shrinks": 1 + 40 * place, "jumps": np.where(place < 0.3, 60, 1)}.get(
        way, 1
    )
    k = (k.astype(np.float32) * factor).astype(k.dtype)
    if way == "differs by row":
        q = (q.astype(np.float32) * np.where(np.arange(n) % 7 == 3, 50, 0.1)[None, :, None, None]).astype(q.dtype)
    if way == "negative":  # every score; numbers below zero compare the other way round as integers
        q, k = np.abs(q), -np.abs(k)
        k[:, ::37] = -k[:, ::37]
        q[:, ::5] = -q[:, ::5]
    out, lse = attend(variant, q, k, v, Way(3, True))
    check_forward(out, q, k, v, lse=lse)
    alone, alone_lse = attend(variant, q[:, 130:143].copy(), k, v, Way(4, False))
    np.testing.assert_array_equal(alone.view(np.uint16), out[:, 130:143].view(np.uint16))
    np.testing.assert_array_equal(alone_lse, lse[..., 130:143])


@pytest.mark.parametrize("size", [3e2, 1e8, 1.2e19])
@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_far_from_zero(variant, size):
    """Each query agrees with one key so much that its output is that key's value and its lse that score."""
    d = 64
    _, _, v = inputs(1, d, 4 * d, 1, 1, d, d, "bfloat16")
    ordinary = inputs(1, d, d, 1, 1, d, d, "bfloat16", seed=1)[0]
    eye = (np.eye(d) * size).astype(v.dtype)[None, :, None, :]
    k = np.concatenate([np.zeros_like(eye), np.zeros_like(eye), np.zeros_like(eye), eye], axis=1)
    for keys in (k, k[:, ::-1].copy()):  # met in the first tile, and in the last
        rows = np.arange(d) % 3 == 0
        q = np.where(rows[None, :, None, None], eye, ordinary).astype(v.dtype)
        out, lse = attend(variant, q, keys, v, Way(5, True), scale=1.0)
        best = np.argmax(keys[0, :, 0].astype(np.float64) @ eye[0, :, 0].astype(np.float64).T, axis=0)
        np.testing.assert_array_equal(out[0, rows, 0], v[0, best[rows], 0])
        np.testing.assert_allclose(lse[0, 0, rows], float(eye[0, 0, 0, 0]) ** 2, rtol=1e-6)


def test_equal_scores_far_from_zero_share_the_weight():
    """Their references must be subtracted exactly, whichever tile they are in."""
    q = np.full((1, 70, 1, 64), 1e6, DTYPES["bfloat16"])
    k = np.full((1, 400, 1, 64), -1e6, DTYPES["bfloat16"])
    k[:, [3, 200, 390]] = 1e6
    v = inputs(1, 1, 400, 1, 1, 64, 64, "bfloat16")[2]
    for variant, way in itertools.product(VARIANTS, WAYS):
        out, _ = attend(variant, q, k, v, way)
        want = v[0, [3, 200, 390], 0].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(
            out[0, :, 0].astype(np.float64), np.broadcast_to(want, (70, 64)), rtol=2**-8, atol=1e-3
        )

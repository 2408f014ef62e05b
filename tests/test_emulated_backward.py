"""The backward kernels on the CPU; see test_emulated_kernels.py."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from backends import visible
from emulator import emulator
from emulator.emulator import Way
from test_backward import past_float16, wide
from test_emulated_kernels import DTYPES, WAYS, inputs

import cuflash
from cuflash import launch, select
from cuflash.device import known_device
from cuflash.plan import contiguous_operands
from cuflash.problem import BackwardProblem, Options, make_problem
from cuflash.reference import check_backward
from cuflash.variants import sm80_backward
from cuflash.variants.base import BackwardOperands

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="g++ is not installed")
VARIANTS = pytest.mark.parametrize("variant", ["sm80", "sm90"])


def differentiate(
    dout, q, k, v, out, lse, way, dlse=None, deterministic=False, arch="sm_90", variant="sm80", **options
):
    """(dq, dk, dv) of contiguous (batch, seqlen, heads, head_dim) arrays."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype == q.dtype)
    forward = make_problem(q.shape, k.shape, v.shape, dtype, Options(**options))
    problem = BackwardProblem(**asdict(forward), has_dlse=dlse is not None, deterministic=deterministic)
    o = contiguous_operands(forward)
    operands = BackwardOperands(dout=o.out, q=o.q, k=o.k, v=o.v, out=o.out, dq=o.q, dk=o.k, dv=o.v)
    grads = {name: np.full_like(x, np.nan) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    chosen = select.load(variant, "backward")
    parts = chosen.config(problem, operands, known_device(arch)).workspace
    workspace = {name: np.full(size // 4, np.nan, np.float32) for name, size in parts}
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse, **grads, **workspace}
    pointers = {name: x.ctypes.data for name, x in arrays.items() if x is not None}
    pointers = {name: pointers.get(name, 0) for name in (*arrays, "turns")}
    emulator.backward(chosen, problem, operands, known_device(arch), pointers, way)
    return grads["dq"], grads["dk"], grads["dv"]


def case(m, n, d, dv, dtype="bfloat16", hq=2, hkv=1, **options):
    """Inputs of a backward pass, with out and lse of the NumPy backend."""
    q, k, v = inputs(1, m, n, hq, hkv, d, dv, dtype)
    dout = inputs(1, m, n, hq, hkv, dv, dv, dtype, seed=9)[0]
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    return dout, q, k, v, out, lse


CASES = [
    # m, n, d, dv, options
    (130, 150, 64, 64, {}),
    (150, 130, 64, 64, {"causal": True}),
    (90, 200, 128, 128, {"window": (40, 30)}),
    (200, 70, 64, 32, {"causal": True}),  # rows without keys
    (70, 80, 128, 64, {"softcap": 5.0}),
    (40, 100, 256, 256, {"causal": "top-left"}),
    (70, 70, 40, 59, {"scale": -0.3}),
]


@VARIANTS
@pytest.mark.parametrize(("m", "n", "d", "dv", "options"), CASES, ids=str)
def test_backward(m, n, d, dv, options, variant):
    arrays = case(m, n, d, dv, **options)
    for way in WAYS:
        check_backward(differentiate(*arrays, way, variant=variant, **options), *arrays, **options)


@VARIANTS
@pytest.mark.parametrize(("m", "n", "d", "dv", "options"), CASES[1:4], ids=str)
def test_deterministic_pass(m, n, d, dv, options, variant):
    arrays = case(m, n, d, dv, **options)
    runs = [differentiate(*arrays, way, deterministic=True, variant=variant, **options) for way in WAYS]
    check_backward(runs[0], *arrays, **options)
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))


@pytest.mark.parametrize(("arch", "d"), [("sm_80", 64), ("sm_89", 128), ("sm_89", 256)])
def test_tiles_of_smaller_gpus(arch, d):
    arrays = case(70, 100, d, d, dtype="float16")
    check_backward(differentiate(*arrays, Way(3, True), arch=arch), *arrays)


# Half of the warps half a step ahead of the others; rows of S that belong to one warp.
OVERLAPPING = {"warps": 8, "warps_n": 4, "score_warps_n": 4, "stages": 3, "row_blocks": 2}
OWN_ROWS = {"warps_n": 2, "score_warps_n": 1, "stages": 2, "row_blocks": 2}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("tile", "fields", "sizes", "options"),
    [
        ((64, 64), OVERLAPPING, (200, 150, 64, 64), {"causal": True}),
        ((64, 64), OVERLAPPING, (90, 200, 64, 64), {"window": (40, 30)}),
        ((64, 128), OVERLAPPING, (150, 290, 128, 128), {"causal": True}),
        ((64, 128), OVERLAPPING, (1, 1, 128, 128), {}),
        ((128, 64), OWN_ROWS | {"warps": 4}, (300, 150, 64, 64), {"causal": True}),
        ((128, 64), OWN_ROWS | {"warps": 8}, (150, 290, 64, 64), {"window": (40, 30)}),
        ((64, 64), OWN_ROWS | {"warps": 4}, (90, 100, 64, 32), {"softcap": 3.0}),
    ],
    ids=str,
)
def test_ways_to_share_out_a_tile(tile, fields, sizes, options, deterministic, monkeypatch):
    """Warps ahead of others, and dS in registers."""
    choose = sm80_backward.backward_config

    def other(*args, **how):
        changes = {"tile_m": tile[0], "tile_n": tile[1]} | fields
        return replace(choose(*args, **how), **changes)

    monkeypatch.setattr(sm80_backward, "backward_config", other)
    arrays = case(*sizes, **options)
    for way in WAYS:
        check_backward(differentiate(*arrays, way, deterministic=deterministic, **options), *arrays, **options)


@VARIANTS
def test_gradient_through_lse(variant):
    arrays = case(100, 90, 64, 64, causal=True)
    dlse = np.random.default_rng(5).standard_normal(arrays[-1].shape).astype(np.float32)
    grads = differentiate(*arrays, Way(3, True), dlse=dlse, causal=True, variant=variant)
    check_backward(grads, *arrays, dlse=dlse, causal=True)


@VARIANTS
@pytest.mark.parametrize("deterministic", [False, True])
def test_hidden_nan_reaches_no_row_that_does_not_see_it(deterministic, variant):
    dout, q, k, v, _, _ = case(100, 100, 64, 64, hq=1)
    for x in (k, v):
        x[0, 60, 0, 3] = np.nan
    out, lse = cuflash.attention(q, k, v, return_lse=True, causal=True)
    clean = [x.copy() for x in (dout, q, k, v, out, lse)]
    dq, _, _ = differentiate(
        dout, q, k, v, out, lse, Way(2, True), causal=True, deterministic=deterministic, variant=variant
    )
    assert np.isnan(dq[0, 60:].astype(np.float32)).any(axis=-1).all()
    for x in clean[2:4]:
        x[0, 60, 0, 3] = 0
    want, _, _ = differentiate(*clean, Way(2, True), causal=True, deterministic=deterministic, variant=variant)
    np.testing.assert_array_equal(dq[0, :60].view(np.uint16), want[0, :60].view(np.uint16))


@pytest.mark.parametrize(("d", "variant"), [(64, "sm80"), (64, "sm90"), (128, "sm90"), (192, "sm90")])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (20, 30)}], ids=str)
def test_what_sees_no_nan_keeps_its_bits(options, deterministic, d, variant):
    """A tile that holds NaN under a mask goes another way, which rounds the rest as the usual one does."""
    clean = case(100, 128, d, d, dtype="float16", hq=1, **options)[:4]
    sees = visible(100, 128, **options)
    for which, at in ((0, 50), (1, 50), (2, 70), (3, 70)):
        arrays = [x.copy() for x in clean]
        arrays[which][0, at, 0, 5] = np.nan
        runs = []
        for x in (clean, arrays):
            out, lse = cuflash.attention(*x[1:], return_lse=True, **options)
            runs.append(
                differentiate(*x, out, lse, Way(2, True), deterministic=deterministic, variant=variant, **options)
            )
        rows = np.arange(100) == at if which < 2 else sees[:, at]
        keys = sees[rows].any(axis=0)
        for want, got, touched in zip(*runs, (rows, keys, keys), strict=True):
            np.testing.assert_array_equal(got[:, ~touched].view(np.uint16), want[:, ~touched].view(np.uint16))
        assert np.isnan(wide(runs[1][2 if which == 0 else 0])).any()


@pytest.mark.parametrize(("d", "variant"), [(64, "sm80"), (64, "sm90"), (128, "sm90"), (192, "sm90")])
def test_infinite_query_with_finite_scores_reaches_no_key_that_it_does_not_see(d, variant):
    """softcap makes finite scores of infinite products, so that neither lse nor delta tells."""
    options = {"causal": True, "softcap": 5.0}
    clean = case(100, 100, d, d, hq=1, **options)[:4]
    arrays = [x.copy() for x in clean]
    arrays[1][0, 50, 0, 5] = np.inf
    runs = []
    for x in (clean, arrays):
        out, lse = cuflash.attention(*x[1:], return_lse=True, **options)
        assert np.isfinite(lse).all()
        runs.append(differentiate(*x, out, lse, Way(2, True), variant=variant, **options))
    for want, got in zip(*(run[1:] for run in runs), strict=True):
        np.testing.assert_array_equal(got[:, 51:].view(np.uint16), want[:, 51:].view(np.uint16))
    assert np.isnan(wide(runs[1][1][0, :51, 0, 5])).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("d", "dv", "arch", "variant"),
    [
        (64, 64, "sm_90", "sm80"),
        (128, 59, "sm_90", "sm80"),
        (64, 256, "sm_89", "sm80"),
        (64, 64, "sm_90", "sm90"),
        (128, 59, "sm_90", "sm90"),
        (64, 256, "sm_90", "sm90"),
    ],
)
def test_one_key_has_a_weight_of_1_whatever_its_score(d, dv, arch, variant, deterministic):
    for n, options in ((70, {"causal": "top-left"}), (70, {"window": (0, 0)}), (1, {})):
        arrays = case(70, n, d, dv, hq=1, **options)
        how = {"deterministic": deterministic, "arch": arch, "variant": variant}
        dq, dk, dv_ = differentiate(*arrays, Way(4, True), **how, **options)
        check_backward((dq, dk, dv_), *arrays, **options)
        one = visible(70, n, **options).sum(axis=1) == 1
        assert one.any() and not wide(dq)[:, one].any()
        if one.all():
            assert not wide(dk).any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("d", "arch", "variant", "options"),
    [
        (64, "sm_90", "sm80", {}),
        (64, "sm_90", "sm80", {"causal": "top-left"}),  # without a mask on the tile of rows 128 and keys 0
        (64, "sm_90", "sm80", {"window": (150, 0)}),
        (128, "sm_90", "sm80", {}),
        (40, "sm_80", "sm80", {"causal": True}),
        (256, "sm_89", "sm80", {"causal": "top-left"}),
        (64, "sm_90", "sm90", {}),
        (64, "sm_90", "sm90", {"window": (150, 0)}),
        (128, "sm_90", "sm90", {"causal": "top-left"}),
        (256, "sm_90", "sm90", {"causal": True}),
    ],
    ids=str,
)
def test_row_whose_scores_are_all_minus_infinity(d, arch, variant, options, deterministic):
    dout, q, k, v = case(200, 200, d, 64, dtype="float16", hq=1, **options)[:4]
    k = np.abs(k) + np.float16(1)
    bad = [3, 190]

    def run(row, incoming):
        q[:, bad], dout[:, bad], dlse[..., bad] = row, incoming, incoming
        return differentiate(dout, q, k, v, out, lse, Way(5, True), dlse, deterministic, arch, variant, **options)

    q[:, bad] = -np.inf
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    assert (lse[0, 0, bad] == -np.inf).all() and np.isfinite(np.delete(lse, bad, axis=2)).all()
    dlse = np.random.default_rng(5).standard_normal(lse.shape).astype(np.float32)
    want = run(1, 0)
    for incoming in (1, np.inf, np.nan):
        grads = run(-np.inf, incoming)
        assert not wide(grads[0][:, bad]).any()
        check_backward(grads, dout, q, k, v, out, lse, dlse=dlse, **options)
        for a, b in zip(grads, want, strict=True):
            np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@VARIANTS
@pytest.mark.parametrize("deterministic", [False, True])
def test_row_whose_only_key_gives_a_score_of_minus_infinity(deterministic, variant):
    options = {"window": (0, 0)}
    dout, q, k, v = case(60, 60, 64, 64, hq=1, **options)[:4]
    q[0, 0], k[0, 0] = 1, -np.inf
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    grads = differentiate(
        dout, q, k, v, out, lse, Way(6, True), deterministic=deterministic, variant=variant, **options
    )
    assert lse[0, 0, 0] == -np.inf and not any(wide(x[0, 0]).any() for x in grads)
    check_backward(grads, dout, q, k, v, out, lse, **options)


@VARIANTS
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_scores_past_float16(deterministic, variant):
    """See test_backward.test_gradients_of_scores_past_float16."""
    for dtype, size, fits in (("float16", 1024, True), ("float16", 4096, False), ("bfloat16", 4096, True)):
        arrays = past_float16(DTYPES[dtype], size)
        out, lse = cuflash.attention(*arrays[1:], return_lse=True)
        grads = differentiate(*arrays, out, lse, Way(6, True), deterministic=deterministic, variant=variant)
        assert np.isfinite(wide(grads[0])).all() == fits
        if fits:
            check_backward(grads, *arrays, out, lse)


@pytest.mark.parametrize("deterministic", [False, True])
def test_launches_of_a_plan(deterministic, monkeypatch):
    """The launcher as it is, on a driver that emulates; a batch of three on grids that hold two entries."""
    pytest.importorskip("cupy", reason="CuPy is not installed")

    def load(config, index, *, arch, dynamic_shared_bytes):
        return SimpleNamespace(function=0, config=config, compiled=None)

    def enqueue(self, x, y, z, stream):
        assert stream == 77 and self._threads == self._kernel.config.threads
        emulator.run(self._kernel.config, bytes(self._struct), (x, y, z), self._shared_bytes, Way(6, True))

    monkeypatch.setattr(sm80_backward.jit, "load", load)
    monkeypatch.setattr(launch.KernelLaunch, "_enqueue", enqueue)
    monkeypatch.setattr(sm80_backward, "MAX_GRID_YZ", 2)
    dout, q, k, v = (np.concatenate([x, x[:, ::-1], -x]) for x in case(70, 90, 64, 64, causal=True)[:4])
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    dlse = np.random.default_rng(5).standard_normal(lse.shape).astype(np.float32)
    forward = make_problem(q.shape, k.shape, v.shape, "bfloat16", Options(causal=True))
    problem = BackwardProblem(**asdict(forward), has_dlse=True, deterministic=deterministic)
    o, device = contiguous_operands(forward), known_device("sm_90")
    operands = BackwardOperands(dout=o.out, q=o.q, k=o.k, v=o.v, out=o.out, dq=o.q, dk=o.k, dv=o.v)
    config = sm80_backward.VARIANT.config(problem, operands, device)
    workspace = np.full(sm80_backward.VARIANT.workspace_bytes(problem, device, config), 0xFF, np.uint8)
    grads = [np.full_like(x, np.nan) for x in (q, k, v)]
    arrays = (dout, q, k, v, out, lse, dlse, *grads, workspace)
    sm80_backward.VARIANT.launcher(problem, operands, device, config)(*(x.ctypes.data for x in arrays), 77)
    check_backward(grads, dout, q, k, v, out, lse, dlse=dlse, causal=True)

"""The NumPy backward pass: threads and their turns, tiles, memory, and what happens when something fails."""

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from backends import Target, assert_same_bits, visible
from problems import problem as make_problem_of
from threadpoolctl import ThreadpoolController

from cuflash import numpy_backend, numpy_backward
from cuflash.blas import way
from cuflash.problem import BackwardProblem, check_options, make_problem
from cuflash.reference import attention_backward_reference, check_backward
from cuflash.variants.base import CPU, BackwardOperands, DeviceInfo, Operand
from cuflash.variants.numpy_backward import VARIANT

DTYPES = ["float16", "bfloat16", "float32", "float64"]
SMALL = {"tile_q": 32, "tile_k": 32}  # many tiles at short lengths


class Case:
    """Inputs of a backward call and its problem, ready for ``numpy_backward.backward``."""

    def __init__(self, dtype="float32", causal=False, window=None, softcap=0.0, scale=None, **sizes):
        target = Target("numpy", "cpu", "numpy", dtype)
        self.options = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        q, k, v = target.inputs(**sizes)
        options = check_options(causal, window, softcap, scale, "bshd")
        self.problem = make_problem(q.shape, k.shape, v.shape, dtype, options)
        out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
        lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), self.problem.lse_dtype)
        numpy_backend.forward(q, k, v, out, lse, self.problem)
        dout, dlse = target.draw(77, *out.shape), np.random.default_rng(78).standard_normal(lse.shape).astype(lse.dtype)
        self.inputs = (dout, q, k, v, out, lse, dlse)

    def run(self, problem=None, inputs=None, **how):
        inputs = self.inputs if inputs is None else inputs
        grads = tuple(np.full(x.shape, 7, x.dtype) for x in inputs[1:4])
        numpy_backward.backward(*inputs, *grads, self.problem if problem is None else problem, **how)
        return grads

    def check(self, **how):
        *inputs, dlse = self.inputs
        return check_backward(self.run(**how), *inputs, dlse=dlse, **self.options)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


OPTIONS = [
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (20, 7)},
    {"window": (0, 0)},
    {"window": (None, 3), "softcap": 1.5},
    {"causal": True, "window": (33, None), "softcap": 20.0},
    {"scale": -0.3},
]


@pytest.mark.parametrize("sizes", [{"m": 97, "n": 130, "hq": 4, "hkv": 2, "d": 17}, {"m": 130, "n": 97}], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tiles(dtype, options, sizes):
    Case(dtype, b=2, **sizes, **options).check(**SMALL)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (11, None)}, {"window": (6, 2)}], ids=str)
def test_band_edges_at_every_offset_from_a_tile_edge(options):
    for n in range(40, 74):
        case = Case("float64", m=64, n=n, d=4, **options)
        exact = attention_backward_reference(*case.inputs[:4], dlse=case.inputs[6], **case.options)
        for got, want in zip(case.run(**SMALL), exact, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-13)


ONE_KEY = [
    ({"m": 70, "n": 1}, {}),
    ({"m": 70, "n": 1}, {"softcap": 0.5}),
    ({"m": 100, "n": 100}, {"causal": True}),
    ({"m": 100, "n": 70}, {"causal": True, "softcap": 0.5}),
    ({"m": 100, "n": 70}, {"causal": "top-left", "window": (3, None)}),
    ({"m": 100, "n": 100}, {"window": (0, 0), "scale": -0.3}),
    ({"m": 100, "n": 100}, {"window": (None, 0)}),
    ({"m": 100, "n": 100}, {"window": (0, None)}),
    ({"m": 100, "n": 70}, {"window": (2, 2)}),
]


@pytest.mark.parametrize(("sizes", "options"), ONE_KEY, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_rows_with_one_key_get_no_gradient(dtype, sizes, options):
    """Whatever order BLAS sums in; only dlse reaches such a score."""
    case = Case(dtype, hq=4, hkv=2, d=24, dv=40, **sizes, **options)
    case.check(**SMALL)
    inputs = case.inputs[:6]
    sees = visible(*sizes.values(), **options)
    one = sees.sum(axis=1) == 1
    dq, dk, _ = case.run(inputs=(*inputs, None), **SMALL)
    assert one.any() and not dq[:, one].any()
    if one.all():
        assert not dk.any()
    if "softcap" in options:
        return
    k, dlse = inputs[2].astype(np.float64), case.inputs[6].swapaxes(1, 2)[..., None]
    want = case.problem.scale * dlse[:, one] * np.repeat(k, 2, axis=2)[:, sees[one].argmax(axis=1)]
    got = case.run(**SMALL)[0][:, one].astype(np.float64)
    kind = ml_dtypes.finfo(dq.dtype)
    np.testing.assert_allclose(got, want, rtol=16 * float(kind.eps), atol=float(kind.smallest_subnormal))


def test_one_key_of_many_with_the_out_and_lse_of_all():
    """A call that is given one key of those that out and lse are of is a part of the whole, with gradients."""
    case = Case("float64", m=50, n=20)
    dout, q, k, v, out, lse, dlse = case.inputs
    whole, total = case.run()[0], 0
    problem = make_problem(
        q.shape, k[:, :1].shape, v[:, :1].shape, "float64", check_options(False, None, 0.0, None, "bshd")
    )
    for i in range(20):
        total = total + case.run(problem, (dout, q, k[:, i : i + 1], v[:, i : i + 1], out, lse, dlse))[0]
    np.testing.assert_allclose(total, whole, atol=1e-13)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["dout", "q", "k", "v"])
def test_bad_numbers_of_rows_with_one_key(which, bad):
    case = Case(m=70, n=70, window=(0, 0))
    clean = case.run(**SMALL)
    inputs = [x.copy() for x in case.inputs]
    inputs[which][0, 40, 0, 3] = bad
    numpy_backend.forward(*inputs[1:6], case.problem)
    grads = case.run(inputs=inputs, **SMALL)
    others = np.arange(70) != 40
    same([x[:, others] for x in grads], [x[:, others] for x in clean])
    exact = attention_backward_reference(*inputs[:4], dlse=inputs[6], **case.options)
    for got, want in zip(grads, exact, strict=True):
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"m": 300, "n": 1100}, {}),  # one head: its key tiles take turns
        ({"m": 600, "n": 600, "hq": 4}, {"causal": True}),
        ({"m": 600, "n": 2100}, {"window": (100, 0)}),
        ({"b": 2, "m": 300, "n": 530, "hq": 6, "hkv": 3}, {}),
        ({"b": 5, "m": 20, "n": 30, "hq": 2, "hkv": 1}, {"causal": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_threads_do_not_change_bits(dtype, sizes, options):
    case = Case(dtype, **sizes, **options)
    want = case.run(threads=1)
    for threads in (2, 3, 8):
        same(case.run(threads=threads), want)
    want = case.run(threads=1, **SMALL)
    same(case.run(threads=4, **SMALL), want)


def test_a_hundred_repeats_under_load_have_the_same_bits():
    case = Case(m=130, n=200, hq=2, hkv=1, causal=True)
    want = case.run(threads=1, **SMALL)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda i: case.run(threads=1 + i % 4, **SMALL), range(100)):
            same(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_have_the_bits_of_the_forward_pass(dtype):
    """One key takes all of the weight wherever it is: exactly 1, which dlse shows without dP and the row sums."""
    case = Case(dtype, m=300, n=1100, d=48)
    dout, q, k, v, *_, dlse = case.inputs
    k[:] = 0
    q[..., 0], k[0, 700, 0, 0] = 1, 30000
    out, lse = np.empty_like(case.inputs[4]), np.empty_like(case.inputs[5])
    numpy_backend.forward(q, k, v, out, lse, case.problem)
    _, dk, dv = case.run(inputs=(dout, q, k, v, out, lse, None))
    others = np.arange(1100) != 700
    assert not dk[:, others].any() and not dv[:, others].any() and dv[0, 700].all()
    dq, *_ = case.run(inputs=(np.zeros_like(dout), q, k, v, out, lse, np.ones_like(dlse)))
    want = np.zeros(dq.shape, np.float32)
    want[..., 0] = k[0, 700, 0, 0].astype(np.float32) * np.float32(case.problem.scale)
    assert_same_bits(dq, want.astype(dq.dtype))


def peak_bytes(case, **how):
    case.run(problem=None, **how)  # what is made once
    tracemalloc.start()
    try:
        grads = case.run(**how)
        return tracemalloc.get_traced_memory()[1], grads
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{"window": (64, 0)}, {"causal": True, "window": (300, None)}], ids=str)
def test_memory_at_65536_tokens(options):
    n = 65536
    case = Case(m=n, n=n, d=4, **options)
    peak, grads = peak_bytes(case, threads=2)
    width = np.dtype(way("float32", 4, 4, numpy_backend.TILE_Q, numpy_backend.TILE_K).compute).itemsize
    # The results, the sums of dq, five numbers a row, the list of tiles, and two workers' buffers.
    bound = 3 * (4 * n * 4) + width * n * 4 + 8 * width * n + 2 * (width << 20)
    assert peak < bound < n * n * width / 1000
    last = [x[:, n - 400 :] for x in case.inputs[:4]]
    exact = attention_backward_reference(*last, dlse=case.inputs[6][..., n - 400 :], **case.options)
    for got, want in zip(grads, exact, strict=True):  # the first rows of the slice see keys before it
        np.testing.assert_allclose(got[:, n - 50 :], want[:, -50:], atol=2e-6)


def test_memory_without_a_window_does_not_grow_with_the_square_of_the_length():
    short, long = (peak_bytes(Case(m=n, n=n, d=4), threads=1)[0] for n in (2048, 8192))
    assert long - short < 128 * (8192 - 2048) < (8192**2 - 2048**2) * 4 / 200


def blas_threads():
    return [pool["num_threads"] for pool in ThreadpoolController().select(user_api="blas").info()]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_error_ends_all_threads_and_is_raised(monkeypatch, threads):
    before, lock, calls = blas_threads(), threading.Lock(), []
    real = numpy_backward._product

    def fail(*arguments):
        with lock:
            calls.append(1)
            if len(calls) == 30:
                raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(numpy_backward, "_product", fail)
    with pytest.raises(KeyboardInterrupt):
        Case(m=130, n=1000, hq=2, hkv=1).run(threads=threads, **SMALL)
    assert blas_threads() == before
    assert len(calls) < 30 + 400  # those that waited for their turn did not go on to other jobs


def test_variant():
    base = make_problem_of(d=16, dtype="float32", b=1, m=40, n=50, hq=2, hkv=1)
    problem = BackwardProblem(**{name: getattr(base, name) for name in base.__dataclass_fields__}, has_dlse=True)
    operands = BackwardOperands(*[Operand((1, 1, 1), 16)] * 8)
    assert (VARIANT.name, VARIANT.device_kind, VARIANT.arch(CPU)) == ("numpy", "cpu", "")
    assert VARIANT.unsupported(problem, operands, CPU) is None
    assert VARIANT.unsupported(problem, operands, DeviceInfo("cuda", 0, "GPU")) == "needs arrays on the CPU"
    config = VARIANT.config(problem, operands, CPU)
    assert (config.tile_q, config.tile_k) == (numpy_backend.TILE_Q, numpy_backend.TILE_K)
    assert VARIANT.workspace_bytes(problem, CPU, config) == 0
    case = Case(m=40, n=50, hq=2, hkv=1)
    grads = [np.empty_like(x) for x in case.inputs[1:4]]
    VARIANT.launcher(problem, operands, CPU, config)(*case.inputs, *grads)
    same(grads, case.run())


def test_flops_are_those_of_five_products():
    base = make_problem_of(d=16, dv=8, causal=True)
    problem = BackwardProblem(**{name: getattr(base, name) for name in base.__dataclass_fields__})
    assert problem.flops() == 2 * 2 * 4 * base.visible_pairs() * (3 * 16 + 2 * 8)


def test_float16_accumulates_in_float32():
    """Sums of many parts that float16 alone would lose."""
    n = 3000
    q = np.zeros((1, n, 1, 8), np.float16)
    dout = np.full((1, n, 1, 8), 1, np.float16)
    lse = np.full((1, 1, n), np.log(n), np.float32)
    problem = make_problem(q.shape, q.shape, q.shape, "float16", check_options(False, None, 0.0, None, "bshd"))
    grads = [np.empty_like(q) for _ in range(3)]
    numpy_backward.backward(dout, q, q, q, q, lse, None, *grads, problem)
    assert float(np.abs(grads[2].astype(np.float64) - 1).max()) <= float(ml_dtypes.finfo(np.float16).eps)

"""The tiled NumPy backend against the float64 oracle, and its promises: bits, memory, NaN, threads."""

from __future__ import annotations

import resource
import sys
import threading
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from cuflash import blas, numpy_backend, numpy_plan
from cuflash.problem import check_options, make_problem
from cuflash.reference import attention_reference, check_forward
from cuflash.variants.base import CPU, DeviceInfo, Operand, Operands
from cuflash.variants.numpy_tiled import VARIANT, NumpyConfig

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float16, BF16, np.float32, np.float64]
SMALL = {"tile_q": 32, "tile_k": 32}  # many tiles at short lengths


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def inputs(b=1, m=64, n=64, hq=1, hkv=1, d=16, dv=None, dtype=np.float32, seed=0):
    return (
        draw(seed, b, m, hq, d, dtype=dtype),
        draw(seed + 1, b, n, hkv, d, dtype=dtype),
        draw(seed + 2, b, n, hkv, d if dv is None else dv, dtype=dtype),
    )


def problem_of(q, k, v, *, causal=False, window=None, softcap=0.0, scale=None):
    options = check_options(causal, window, softcap, scale, "bshd")
    return make_problem(q.shape, k.shape, v.shape, q.dtype.name, options)


def attend(q, k, v, *, threads=None, tile_q=numpy_backend.TILE_Q, tile_k=numpy_backend.TILE_K, **options):
    problem = problem_of(q, k, v, **options)
    out = np.full((*q.shape[:3], v.shape[3]), 7, q.dtype)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), 7, problem.lse_dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numpy_backend.forward(q, k, v, out, lse, problem, threads=threads, tile_q=tile_q, tile_k=tile_k)
    return out, lse


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def assert_same_bits(got, want):
    np.testing.assert_array_equal(bits(got), bits(want))


OPTIONS = [
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (20, 7)},
    {"window": (None, 3), "softcap": 1.5},
    {"window": (0, 0)},
    {"causal": True, "window": (33, None), "softcap": 20.0},
    {"scale": -0.3},
    {"scale": 0.0},
    {"scale": 2.5, "softcap": 0.5},
]
SHAPES = [
    {"m": 1, "n": 1},
    {"m": 33, "n": 97, "hq": 6, "hkv": 2, "d": 17, "dv": 5},
    {"m": 97, "n": 33, "b": 2, "hq": 3, "hkv": 1, "d": 8, "dv": 24},
    {"m": 1, "n": 200, "hq": 4, "hkv": 2, "d": 64},
    {"m": 130, "n": 131, "hq": 2, "hkv": 2, "d": 1, "dv": 3},
]


@pytest.mark.parametrize("tiles", [{}, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
def test_against_the_oracle(dtype, options, shape, tiles):
    q, k, v = inputs(dtype=dtype, **shape)
    out, lse = attend(q, k, v, **options, **tiles)
    check_forward(out, q, k, v, lse=lse, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 5)}], ids=str)
@pytest.mark.parametrize("d", [64, 256])
def test_several_default_tiles(dtype, options, d):
    q, k, v = inputs(m=270, n=530, hq=2, hkv=1, d=d, dtype=dtype)
    out, lse = attend(q, k, v, **options)
    check_forward(out, q, k, v, lse=lse, **options)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (11, None)}, {"window": (6, 2)}], ids=str)
def test_band_edges_at_every_offset_from_a_tile_edge(options):
    for n in range(40, 74):
        q, k, v = inputs(m=64, n=n, d=4, dtype=np.float64)
        out, _ = attend(q, k, v, **options, **SMALL)
        np.testing.assert_allclose(out, attention_reference(q, k, v, **options), atol=1e-13)


@pytest.mark.parametrize(("b", "m", "n"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
def test_zero_sizes(b, m, n):
    q, k, v = inputs(b=b, m=m, n=n, hq=2, hkv=1)
    out, lse = attend(q, k, v, causal=True)
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("tiles", [{}, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
def test_rows_without_a_key(dtype, tiles):
    q, k, v = inputs(m=100, n=40, dtype=dtype)
    out, lse = attend(q, k, v, causal=True, **tiles)
    assert (out[:, :60] == 0).all() and (lse[..., :60] == -np.inf).all() and np.isfinite(lse[..., 60:]).all()
    q[0, 90] = -np.inf
    k = np.abs(k)
    out, lse = attend(q, k, v, causal=True, **tiles)
    assert (out[:, 90] == 0).all() and (lse[..., 90] == -np.inf).all() and np.isfinite(lse[..., 91:]).all()


def test_scales_and_values_at_the_ends_of_float32():
    q, k, v = inputs(m=40, n=40)
    for scale in (2.0**-100, 2.0**100):
        q[:, :, :, :] = 0
        out, lse = attend(q, k, v, scale=scale)  # all scores are 0 whatever the scale
        check_forward(out, q, k, v, lse=lse, scale=0.0)
    q, k, v = inputs(m=40, n=40)
    q, k = q * np.float32(1e30), k * np.float32(1e-34)
    out, lse = attend(q, k, v, scale=1e5)  # scale * q alone would overflow
    check_forward(out, q, k, v, lse=lse, scale=1e5)
    with np.errstate(under="ignore"):
        tiny = inputs(m=40, n=40)[2] * np.float32(1e-41)  # subnormal values stay
    out, _ = attend(*inputs(m=40, n=40)[:2], tiny)
    assert out.any()
    check_forward(out, *inputs(m=40, n=40)[:2], tiny)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32], ids=lambda t: np.dtype(t).name)
def test_strides_do_not_show(dtype):
    q, k, v = inputs(b=2, m=70, n=70, hq=4, hkv=2, d=16, dtype=dtype)
    want, want_lse = attend(q, k, v, causal=True)
    views = [np.ascontiguousarray(x.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3) for x in (q, k, v)]
    wide = [np.zeros((*x.shape[:3], 2 * x.shape[3] + 1), dtype) for x in views]
    for big, x in zip(wide, views, strict=True):
        big[..., 1 : 1 + x.shape[3]] = x
    views = [big[:, ::-1, :, 1 : 1 + x.shape[3]][:, ::-1] for big, x in zip(wide, views, strict=True)]
    holder = np.full((2, 4, 70, 40), 3, dtype)
    out = holder[:, :, :, 5:21].transpose(0, 2, 1, 3)
    lse = np.full((70, 4, 2), 3, np.float32).transpose(2, 1, 0)
    numpy_backend.forward(*views, out, lse, problem_of(q, k, v, causal=True))
    assert_same_bits(out, want)
    assert_same_bits(lse, want_lse)
    assert (holder[..., :5] == 3).all() and (holder[..., 21:] == 3).all()


def test_stride_zero_and_read_only_inputs():
    q, k, v = inputs(b=3, m=50, n=60, hq=2, hkv=2)
    k, v = np.broadcast_to(k[:1, :, :1], k.shape), np.broadcast_to(v[:1, :1], v.shape)
    q.setflags(write=False)
    out, lse = attend(q, k, v)
    check_forward(out, q, np.array(k), np.array(v), lse=lse)


BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("tiles", [{}, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 4)}, {"window": (40, None)}], ids=str)
def test_masked_bad_keys_and_values_never_matter(dtype, bad, options, tiles):
    q, k, v = inputs(m=100, n=100, hq=2, d=8, dtype=dtype)
    clean, clean_lse = attend(q, k, v, **options, **tiles)
    for target in (k, v):
        saved = target[0, 50].copy()
        target[0, 50] = bad
        out, lse = attend(q, k, v, **options, **tiles)
        rows = np.arange(100)
        left, right = options.get("window", (None, 0))
        sees = (rows <= 50 + (100 if left is None else left)) & (rows >= 50 - (100 if right is None else right))
        assert_same_bits(out[:, ~sees], clean[:, ~sees])
        assert_same_bits(lse[..., ~sees], clean_lse[..., ~sees])
        if target is v:
            assert not np.isfinite(out[:, sees].astype(np.float64)).any()
            assert_same_bits(lse, clean_lse)
        else:  # a score of -inf is legal, so compare with the oracle
            check_forward(out, q, k, v, lse=lse, **options)
        target[0, 50] = saved


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_value_keeps_its_kind_and_its_column(bad):
    q, k, v = inputs(m=40, n=40, d=8)
    v[0, 7, 0, 3] = bad
    out, _ = attend(q, k, v)
    assert np.isfinite(np.delete(out, 3, axis=3)).all()
    np.testing.assert_array_equal(out[..., 3], np.full_like(out[..., 3], bad))
    check_forward(out, q, k, v)
    v[0, 9, 0, 3] = -bad
    assert np.isnan(attend(q, k, v)[0][..., 3]).all()  # inf - inf


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64], ids=lambda t: np.dtype(t).name)
def test_values_near_the_largest_number(dtype):
    q, k, v = inputs(b=2, m=70, n=600, hq=2, d=16, dtype=dtype)
    ordinary, ordinary_lse = attend(q, k, v, causal=True)
    v[0] = (v[0].astype(np.float64) * (0.2 * float(ml_dtypes.finfo(dtype).max))).astype(dtype)
    v[0, :, :, :8] = np.abs(v[0, :, :, :8])  # sums of these overflow before they are normalised
    v[:, 580] = np.nan  # beside a key that half of the rows see
    out, lse = attend(q, k, v, causal=True)
    assert np.isfinite(out[0, :50].astype(np.float64)).all() and np.isnan(out[:, 50:].astype(np.float64)).all()
    check_forward(out, q, k, v, causal=True)
    assert_same_bits(out[1, :50], ordinary[1, :50])  # the other batch entry is what it was
    assert_same_bits(lse, ordinary_lse)
    for row in (0, 49):
        alone = attend(q[:, row : row + 1], k[:, : 531 + row], v[:, : 531 + row], causal=True)
        assert_same_bits(alone[0], out[:, row : row + 1])


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("d", [16, 48, 64, 256])
@pytest.mark.parametrize("n", [255, 256, 2560, 3001])
def test_few_queries_have_the_bits_of_many(dtype, d, n):
    """Few rows read K and V where they lie, several key tiles at a time."""
    q, k, v = inputs(m=300, n=n, hq=4, hkv=2, d=d, dtype=dtype)
    out, lse = attend(q, k, v)
    for rows in (slice(0, 1), slice(299, 300), slice(17, 40)):
        got, got_lse = attend(q[:, rows], k, v)
        assert_same_bits(got, out[:, rows])
        assert_same_bits(got_lse, lse[..., rows])
        gone = attend(q[:, rows], np.ascontiguousarray(k[:, ::-1])[:, ::-1], v)  # rows that BLAS cannot read
        assert_same_bits(gone[0], got)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("d", [31, 100, 128, 256])
def test_short_problems_of_wide_heads_round_as_little_as_two_passes(dtype, d):
    for seed in range(0, 60, 3):
        q, k, v = inputs(b=4, m=16, n=64, d=d, dv=64, dtype=dtype, seed=seed)
        check_forward(attend(q, k, v)[0], q, k, v)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_query_touches_its_own_row_only(bad):
    q, k, v = inputs(m=70, n=80)
    clean, clean_lse = attend(q, k, v)
    q[0, 30, 0, 2] = bad
    out, lse = attend(q, k, v)
    others = np.arange(70) != 30
    assert_same_bits(out[:, others], clean[:, others])
    assert_same_bits(lse[..., others], clean_lse[..., others])
    check_forward(out, q, k, v, lse=lse)
    assert np.isnan(out[0, 30]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("d", [5, 64, 128, 256])
def test_batch_heads_and_threads_do_not_change_bits(dtype, d):
    q, k, v = inputs(b=2, m=300, n=290, hq=4, hkv=2, d=d, dtype=dtype)
    out, lse = attend(q, k, v, causal=True, threads=1)
    for threads in (2, 3, 8):
        again, lse_again = attend(q, k, v, causal=True, threads=threads)
        assert_same_bits(again, out)
        assert_same_bits(lse_again, lse)
    for batch in range(2):
        for head in range(4):
            kv = slice(head // 2, head // 2 + 1)
            one = attend(q[batch : batch + 1, :, head : head + 1], k[batch : batch + 1, :, kv],
                         v[batch : batch + 1, :, kv], causal=True)  # fmt: skip
            assert_same_bits(one[0][0, :, 0], out[batch, :, head])
            assert_same_bits(one[1][0, 0], lse[batch, head])
    repeated = attend(q, k.repeat(2, axis=2), v.repeat(2, axis=2), causal=True)
    assert_same_bits(repeated[0], out)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("d", [5, 64, 256])
def test_a_causal_prefix_has_the_bits_of_the_whole(dtype, d):
    q, k, v = inputs(m=600, n=600, d=d, dtype=dtype)
    out, lse = attend(q, k, v, causal=True)
    for n in (1, 2, 15, 16, 17, 33, 65, 129, 255, 256, 257, 511, 513, 599):
        head, head_lse = attend(q[:, :n], k[:, :n], v[:, :n], causal=True)
        assert_same_bits(head, out[:, :n])
        assert_same_bits(head_lse, lse[..., :n])


def test_other_rows_do_not_change_bits():
    q, k, v = inputs(m=300, n=400)
    out, _ = attend(q, k, v)
    q2 = draw(9, *q.shape)
    q2[:, 100:150] = q[:, 100:150]
    assert_same_bits(attend(q2, k, v)[0][:, 100:150], out[:, 100:150])
    for rows in (1, 20, 40, 100, 256):  # every row count that short tiles are padded to
        assert_same_bits(attend(q[:, :rows], k, v)[0], out[:, :rows])


def test_blas_that_differs_for_few_rows_gets_full_tiles(monkeypatch):
    calls = []
    real = blas._Products.same_first
    monkeypatch.setattr(
        blas._Products, "same_first", lambda self, few, many: calls.append(few) or (few > 64 and real(self, few, many))
    )
    counts = blas.way.__wrapped__("float64", 64, 64, 256, 256).counts
    assert counts[-1] == 256 and min(counts) > 64 and calls


def test_blas_where_the_place_of_a_row_shows(monkeypatch):
    """OpenBLAS in float32 on AVX2 is one, but for its inner columns. What no way helps is computed as it is."""

    def uneven(where):
        monkeypatch.setattr(blas._Products, "same_anywhere", lambda self, count: not where(self))

    uneven(lambda products: True)
    monkeypatch.setattr(blas._Products, "same_first", lambda self, few, many: True)
    choose, sizes = blas.way.__wrapped__, (64, 64, 256, 512)
    assert choose("float32", *sizes) == blas.Way("float32", 0, 512, 8, (256,))
    assert choose("float64", *sizes) == blas.Way("float64", 0, 512, 8, (256,))
    uneven(lambda products: products.q.dtype == np.float32)
    assert choose("float32", *sizes) == blas.Way("float64", 0, 512, 8, (8, 16, 32, 64, 128, 256))
    uneven(lambda products: products.inner[0].start == 0)
    assert choose("float32", *sizes) == blas.Way("float32", 8, 256, 16, (12, 24, 48, 96, 264))


WAYS = [
    blas.Way("float64", 0, 512, 8, (8, 64, 256)),
    blas.Way("float32", 8, 256, 16, (12, 96, 264)),
    blas.Way("float32", 8, 64, 4, (264,)),
    blas.Way("float32", 0, 512, 8, (256,)),
]


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=lambda t: np.dtype(t).name)
def test_every_way_on_every_blas(dtype, how, monkeypatch):
    monkeypatch.setattr(numpy_plan, "way", lambda *args: how)
    numpy_plan.make_plan.cache_clear()
    try:
        q, k, v = inputs(m=300, n=700, hq=4, hkv=2, d=40, dtype=dtype)
        for options in ({}, {"causal": True, "softcap": 3.0}, {"window": (50, 3)}):
            out, lse = attend(q, k, v, **options)
            check_forward(out, q, k, v, lse=lse, **options)
            assert out.dtype == dtype and lse.dtype == np.float32
        k[0, 400, :, 3], v[0, 450, :, 1], v[0, 30, 0, 5] = np.nan, np.inf, -np.inf
        q[0, 100, :, :] = -np.inf
        out, lse = attend(q, k, v, causal=True)
        check_forward(out, q, k, v, lse=lse, causal=True)
    finally:
        numpy_plan.make_plan.cache_clear()


def peak_bytes(n, threads, **options):
    q, k, v = inputs(m=n, n=n, d=16)
    out, lse = np.empty_like(q), np.empty((1, 1, n), np.float32)
    problem = problem_of(q, k, v, **options)
    numpy_backend.forward(q[:, :8], k[:, :8], v[:, :8], out[:, :8], None, problem_of(q[:, :8], k[:, :8], v[:, :8]))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        numpy_backend.forward(q, k, v, out, lse, problem, threads=threads)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * (1 if sys.platform == "darwin" else 1024)
    rows = slice(n - 40, n)
    options.setdefault("window", (None, None))
    want = attention_reference(q[:, rows], k, v, **options)  # bottom-right aligned: the last rows stay themselves
    np.testing.assert_allclose(out[:, rows], want, atol=2e-6)
    return peak, grown


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_memory_at_32768_tokens(options):
    n, threads = 32768, 2
    peak, grown = peak_bytes(n, threads, **options)
    # Scratch of a worker: scores 1 MiB and tiles of about 0.3 MiB; then masks and the list of tiles.
    compute = np.dtype(blas.way("float32", 16, 16, numpy_backend.TILE_Q, numpy_backend.TILE_K).compute)
    bound = threads * (compute.itemsize << 20) + 64 * n
    assert peak < bound < n * n * compute.itemsize / 400
    assert grown < 32 << 20  # what NumPy does not report to tracemalloc: BLAS packing buffers and thread stacks


def test_memory_does_not_grow_with_length():
    short, long = (peak_bytes(n, 1, window=(64, 0))[0] for n in (4096, 65536))
    assert long - short < 64 * (65536 - 4096) < 65536 * 65536 * 4 / 1000


def blas_threads():
    return [pool["num_threads"] for pool in ThreadpoolController().select(user_api="blas").info()]


@pytest.fixture
def two_blas_threads():
    with threadpool_limits(2, user_api="blas"):
        yield


def test_blas_has_one_thread_whoever_calls(two_blas_threads, monkeypatch):
    """A thread of a pool, too, while the main thread is inside limits of its own."""
    seen, real = [], numpy_backend.score_products
    monkeypatch.setattr(numpy_backend, "score_products", lambda *args: seen.append(blas_threads()) or real(*args))
    case = inputs(m=50, n=60)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(attend_quiet, *case, threads=1).result()
    assert seen and {count for counts in seen for count in counts} == {1}
    assert set(blas_threads()) == {2}


def test_callers_from_several_threads(two_blas_threads):
    before = blas_threads()
    assert set(before) == {2}
    cases = [inputs(m=200 + 40 * i, n=300, hq=2, hkv=1, d=32, seed=10 * i) for i in range(4)]
    want = [attend(*case, threads=1) for case in cases]
    barrier = threading.Barrier(4)

    def call(i):
        barrier.wait()
        return [attend_quiet(*cases[i], threads=1 + i % 2) for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        for i, results in enumerate(pool.map(call, range(4))):
            for out, lse in results:
                assert_same_bits(out, want[i][0])
                assert_same_bits(lse, want[i][1])
    assert blas_threads() == before


def attend_quiet(q, k, v, threads):
    """Like attend, without ``catch_warnings``, which is not thread-safe."""
    out, lse = np.empty_like(q), np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    numpy_backend.forward(q, k, v, out, lse, problem_of(q, k, v), threads=threads)
    return out, lse


def test_blas_limit_is_restored_after_an_error(two_blas_threads):
    before = blas_threads()
    assert set(before) == {2}
    q, k, v = inputs(m=300, n=300)
    too_short = np.empty((1, 3, 1, 16), np.float32)
    for threads in (1, 2):
        with pytest.raises((ValueError, IndexError)):
            numpy_backend.forward(q, k, v, too_short, None, problem_of(q, k, v), threads=threads)
        assert blas_threads() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_nobody_goes_on_after_an_error(monkeypatch, threads):
    jobs = []

    def fail(*_):
        jobs.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(numpy_backend, "_attend", fail)
    with pytest.raises(KeyboardInterrupt):
        attend(*inputs(b=50, m=300, n=300, hq=4, hkv=4), threads=threads)
    assert len(jobs) <= threads


def test_lse_is_optional():
    q, k, v = inputs()
    out = np.empty_like(q)
    numpy_backend.forward(q, k, v, out, None, problem_of(q, k, v))
    assert_same_bits(out, attend(q, k, v)[0])


def test_variant():
    q, k, v = inputs(m=300, n=300, dtype=BF16)
    problem = problem_of(q, k, v, causal=True)
    operands = Operands(*[Operand((1, 1, 1), 16)] * 4)
    assert (VARIANT.name, VARIANT.device_kind) == ("numpy", "cpu")
    assert VARIANT.unsupported(problem, operands, CPU) is None
    assert VARIANT.unsupported(problem, operands, DeviceInfo("cuda", 0, "GPU")) == "needs arrays on the CPU"
    config = VARIANT.config(problem, operands, CPU)
    assert config == NumpyConfig(numpy_backend.TILE_Q, numpy_backend.TILE_K, numpy_backend.default_threads(problem))
    assert {"tile", "threads"} <= config.describe().keys()
    out, lse = np.empty_like(q), np.empty((1, 1, 300), np.float32)
    VARIANT.launcher(problem, operands, CPU, config)(q, k, v, out, lse)
    want = attend(q, k, v, causal=True)
    assert_same_bits(out, want[0])
    assert_same_bits(lse, want[1])

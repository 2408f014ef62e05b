"""The contract of ``cuflash.attention``, the same on every framework, device, variant and dtype of the table.

Values are held to the error rule of :func:`cuflash.reference.check_forward`; what must not show (strides, hidden keys,
other rows) is held bit by bit.
"""

import itertools

import numpy as np
import pytest
from backends import Target, assert_same_bits, bits, row_major, targets, visible

import cuflash
from cuflash.reference import check_forward

strided = targets(lambda target: target.has_strides)


# ---- masks, scores, heads, sizes -------------------------------------------------------------------------------------

MASKS = [
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (0, 0)},
    {"window": (5, 3)},
    {"window": (None, 2)},
    {"window": (2, None)},
    {"window": (0, None)},
    {"window": (None, 0)},
    {"window": (1000, 1000)},
    {"window": (1000, 0)},
    {"causal": True, "window": (4, 9)},
    {"causal": "bottom-right", "window": (70, None)},
    {"causal": "top-left", "window": (3, 2)},
    {"causal": "top-left", "window": (40, None)},
]


@pytest.mark.parametrize(("m", "n"), [(40, 40), (33, 97), (97, 33), (130, 130), (1, 70), (70, 1)])
@pytest.mark.parametrize("options", MASKS, ids=str)
@targets()
def test_masks(target, options, m, n):
    q, k, v = target.inputs(m=m, n=n, hq=4, hkv=2, d=16, dv=24)
    out, lse, _ = target.check(q, k, v, **options)
    empty = ~visible(m, n, **options).any(axis=1)
    assert not bits(out[:, empty]).any() and (lse[..., empty] == -np.inf).all()
    assert np.isfinite(lse[..., ~empty]).all()


@pytest.mark.parametrize(("m", "n"), [(300, 300), (200, 420), (420, 200)])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "top-left"},
        {"window": (130, 10)},
        {"window": (64, 64)},
        {"window": (0, 128)},
        {"window": (255, 0)},
    ],
    ids=str,
)
@targets()
def test_masks_over_several_tiles(target, options, m, n):
    target.check(*target.inputs(m=m, n=n, hq=2, d=32), **options)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize(
    "score",
    [
        {"softcap": 0.5},
        {"softcap": 1.0, "scale": 3.0},
        {"softcap": 20.0, "scale": -0.7},
        {"softcap": 1000.0},
        {"scale": 0},
        {"scale": -0.3},
        {"scale": 1e-3},
        {"scale": 2},
        {"scale": None},
    ],
    ids=str,
)
@targets()
def test_scores(target, score, mask):
    q, k, v = target.inputs(m=97, n=130, hq=2, d=64)
    target.check(q, k, v, **score, **mask)


@targets()
def test_default_scale(target):
    q, k, v = target.inputs(m=20, n=30, d=16)
    given, default = target.attend(q, k, v, scale=0.25), target.attend(q, k, v)
    for a, b in zip(given, default, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("hkv", [1, 3])
@pytest.mark.parametrize("ratio", range(1, 9))
@targets()
def test_grouped_heads(target, ratio, hkv):
    target.check(*target.inputs(b=2, m=33, n=70, hq=ratio * hkv, hkv=hkv, d=32), causal=True)


@targets()
def test_many_query_heads_on_one(target):
    target.check(*target.inputs(m=17, n=40, hq=71, d=8))


HEAD_DIMS = [(d, d) for d in (1, 8, 16, 31, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256)]
HEAD_DIMS += [(192, 128), (64, 256), (256, 32), (16, 1), (1, 31)]


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
@targets()
def test_head_dims(target, d, dv, options):
    target.check(*target.inputs(m=70, n=133, hq=2, d=d, dv=dv), **options)


@pytest.mark.parametrize(("m", "n"), [(1, 64), (16, 5), (16, 64)])
@pytest.mark.parametrize("d", [128, 256])
@targets()
def test_short_problems_of_wide_heads(target, d, m, n):
    for seed in range(10):
        target.check(*target.inputs(b=-(-64 // m), m=m, n=n, d=d, dv=64, seed=seed))


LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]


@pytest.mark.parametrize("m", LENGTHS)
@targets()
def test_lengths(target, m):
    # Every new shape is an XLA compilation on a GPU.
    many = target.framework != "jax" or target.device == "cpu"
    for n in LENGTHS if many else sorted({0, m, 129}):
        q, k, v = target.inputs(m=m, n=n, hq=4, hkv=2, d=16)
        for options in ({}, {"causal": True}):
            try:
                target.check(q, k, v, **options)
            except AssertionError as error:
                raise AssertionError(f"seqlen_k {n}, {options}") from error


@pytest.mark.parametrize(("b", "m", "n"), [(0, 5, 7), (0, 0, 0), (2, 0, 7), (2, 5, 0), (0, 5, 0)])
@targets()
def test_nothing_to_see_or_to_do(target, b, m, n):
    q, k, v = target.inputs(b=b, m=m, n=n, hq=4, hkv=2, d=16, dv=8)
    for options in ({}, {"causal": True, "window": (3, 0)}):
        out, lse = target.attend(q, k, v, **options)
        assert out.shape == (b, m, 4, 8) and lse.shape == (b, 4, m)
        assert not bits(out).any() and (lse == -np.inf).all()


# ---- layouts and strides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ndim", [4, 3, 2])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@targets()
def test_layouts_and_ranks(target, layout, ndim):
    hq, hkv = (1, 1) if ndim == 2 else (4, 2)
    q, k, v = target.inputs(b=2 if ndim == 4 else 1, m=33, n=50, hq=hq, hkv=hkv, d=24, dv=16)
    want, want_lse = target.attend(q, k, v, causal=True)

    def turn(x):
        if ndim == 2:
            return x[0, :, 0]
        x = x if layout == "bshd" else x.transpose(0, 2, 1, 3)
        return x if ndim == 4 else x[0]

    out, lse, _ = target.check(*(turn(x) for x in (q, k, v)), causal=True, layout=layout)
    assert_same_bits(out, turn(want))
    assert_same_bits(lse, want_lse if ndim == 4 else want_lse[0] if ndim == 3 else want_lse[0, 0])


def padded(shape, by, offset):
    """Rows `by` elements longer than they are used."""
    b, s, h, d = shape
    return row_major((b, s, h, d + by)), offset


def permuted(shape, order):
    """Memory with the axes in another order."""
    strides = [0] * 4
    for axis, step in zip(order, row_major([shape[axis] for axis in order]), strict=True):
        strides[axis] = step
    return tuple(strides), 0


def reversed_axis(shape, axis):
    strides = list(row_major(shape))
    strides[axis] *= -1
    return tuple(strides), 0


# name: shape -> (strides in elements, first element)
STRIDES = {
    "rows aligned to 1 element": lambda s: padded(s, 1, 1),
    "start aligned to 1 element": lambda s: padded(s, 0, 1),
    "rows aligned to 2 elements": lambda s: padded(s, 2, 2),
    "rows aligned to 4 elements": lambda s: padded(s, 4, 4),
    "rows aligned to 8 elements": lambda s: padded(s, 8, 8),
    "sliced": lambda s: (row_major((s[0], s[1] + 3, s[2] + 2, s[3] + 8)), 40),
    "every second position": lambda s: (row_major((s[0], s[1], 2 * s[2], s[3])), 0),
    "heads before positions": lambda s: permuted(s, (0, 2, 1, 3)),
    "positions before batch": lambda s: permuted(s, (1, 0, 2, 3)),
    "batch inside heads": lambda s: permuted(s, (2, 1, 0, 3)),
    "last axis strided": lambda s: (tuple(2 * step for step in row_major(s)), 1),
    "last axis outermost": lambda s: permuted(s, (3, 0, 1, 2)),
    "positions reversed": lambda s: reversed_axis(s, 1),
    "last axis reversed": lambda s: reversed_axis(s, 3),
}


def place(target: Target, name, x):
    """`x` with the strides of a recipe, NaN everywhere around it."""
    if "reversed" in name and not target.kit.negative_strides:
        pytest.skip(f"{target.framework} has no negative strides")
    return target.scatter(x, *STRIDES[name](x.shape))


@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize("name", STRIDES)
@strided
def test_strides_do_not_show(target, name, d):
    q, k, v = target.inputs(b=2, m=70, n=75, hq=4, hkv=2, d=d)
    out, lse, _ = target.check(q, k, v, causal=True)
    plain = [target.make(x) for x in (q, k, v)]
    odd = [place(target, name, x)[1] for x in (q, k, v)]
    alone = [[odd[i] if i == j else plain[i] for i in range(3)] for j in range(3)]
    for arrays in (odd, *alone):
        got, got_lse = target.call(*arrays, causal=True)
        assert_same_bits(got, out)
        assert_same_bits(got_lse, lse)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
@strided
def test_stride_zero(target, axes):
    q, k, v = target.inputs(b=3, m=40, n=66, hq=4, hkv=4, d=32)
    one = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))
    strides = tuple(0 if axis in axes else step for axis, step in enumerate(row_major(k.shape)))
    k, v = (np.array(np.broadcast_to(x[one], x.shape)) for x in (k, v))
    out, lse, _ = target.check(q, k, v)
    expanded = [target.scatter(x, strides)[1] for x in (k, v)]
    got, got_lse = target.call(target.make(q), *expanded)
    assert_same_bits(got, out)
    assert_same_bits(got_lse, lse)
    if 1 not in axes:  # queries too
        qs = np.array(np.broadcast_to(q[one], q.shape))
        strides = tuple(0 if axis in axes else step for axis, step in enumerate(row_major(q.shape)))
        got, _ = target.call(target.scatter(qs, strides)[1], *expanded)
        assert_same_bits(got, target.attend(qs, k, v)[0])


@pytest.mark.parametrize("odd", [1, 3, 7, 1_000_003])
@strided
def test_strides_of_axes_of_size_one(target, odd):
    q, k, v = target.inputs(b=1, m=40, n=1, hq=1, hkv=1, d=32)
    out, lse = target.attend(q, k, v)
    q1 = target.scatter(q, (odd, 32, odd, 1))[1]
    k1, v1 = (target.scatter(x, (odd, odd, odd, 1))[1] for x in (k, v))
    got, got_lse = target.call(q1, k1, v1)
    assert_same_bits(got, out)
    assert_same_bits(got_lse, lse)
    q, k, v = target.inputs(b=1, m=40, n=50, hq=2, hkv=1, d=1)  # a last axis of size 1 may have any stride too
    q1, k1, v1 = (target.scatter(x, (*row_major(x.shape)[:3], odd % 1000))[1] for x in (q, k, v))
    assert_same_bits(target.call(q1, k1, v1)[0], target.attend(q, k, v)[0])


# ---- out -------------------------------------------------------------------------------------------------------------

OUT_STRIDES = [name for name in STRIDES if not name.startswith("last axis") and "reversed" not in name]


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("d", [31, 64, 160])
@pytest.mark.parametrize("name", OUT_STRIDES)
@strided
def test_out_is_filled_and_its_surroundings_are_not(target, name, d, options):
    q, k, v = target.inputs(b=2, m=100, n=60, hq=2, hkv=1, d=d)  # causal: with rows that see no key
    want, want_lse = target.attend(q, k, v, **options)
    poison = np.full(want.shape, np.nan, target.np_dtype)
    strides, offset = STRIDES[name](want.shape)
    guard, out = target.scatter(poison, strides, offset, fill=-7)
    inputs = [target.make(x) for x in (q, k, v)]
    got, lse = target.call(*inputs, out=out, **options)
    assert_same_bits(got, want)
    assert_same_bits(lse, want_lse)
    expected, _ = target.scatter(want, strides, offset, fill=-7)
    assert_same_bits(target.kit.numpy(guard), target.kit.numpy(expected), "memory around out")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@strided
def test_out_in_each_layout(target, layout):
    q, k, v = target.inputs(b=2, m=33, n=33, hq=33, hkv=33, d=16, dv=8)
    want, _ = target.attend(q, k, v, layout=layout)
    out = target.make(np.full(want.shape, np.nan, target.np_dtype))
    arrays = [target.make(x) for x in (q, k, v)]
    assert_same_bits(target.call(*arrays, layout=layout, out=out)[0], want)
    alone = cuflash.attention(*arrays, layout=layout, variant=target.variant)  # without lse, which is another plan
    assert_same_bits(target.kit.numpy(alone), want)


# ---- NaN and infinity ------------------------------------------------------------------------------------------------

HIDING = [
    {"causal": True},
    {"causal": "top-left"},
    {"window": (9, 4)},
    {"window": (40, None)},
    {"window": (None, 0)},
    {"causal": "top-left", "window": (30, None)},
]
BAD = [np.nan, np.inf, -np.inf]
BAD_DIMS = pytest.mark.parametrize(("d", "dv"), [(8, 8), (64, 64), (160, 192)])
EVERYTHING = slice(None)


def assert_only_where(bad, clean, where, what):
    """(out, lse) pairs agree bit by bit but for the elements of out and the rows of lse in `where`."""
    for got, want, ignored in zip(bad, clean, where, strict=True):
        ignored = np.broadcast_to(ignored, got.shape)
        assert_same_bits(got[~ignored], want[~ignored], what)


@BAD_DIMS
@pytest.mark.parametrize("options", HIDING, ids=str)
@targets()
def test_hidden_keys_and_values_never_matter(target, options, d, dv):
    m, n = 100, 140
    q, k, v = target.inputs(m=m, n=n, hq=2, d=d, dv=dv)
    clean = target.attend(q, k, v, **options)
    sees = visible(m, n, **options)
    for (key, part), bad, which in itertools.product(((0, 3), (65, EVERYTHING), (n - 1, 3)), BAD, (1, 2)):
        arrays = [q, k.copy(), v.copy()]
        arrays[which][0, key, 0, part] = bad
        got = target.attend(*arrays, **options)
        where = sees[None, :, None, [key]], sees[None, None, :, key]
        assert_only_where(got, clean, where, (key, bad, which))
        if which == 2:
            assert_same_bits(got[1], clean[1])
            values = got[0][:, sees[:, key]][..., part].astype(np.float64)
            assert (np.isnan(values) if np.isnan(bad) else ~np.isfinite(values)).all()
        elif np.isnan(bad):
            assert np.isnan(got[0][:, sees[:, key]].astype(np.float64)).all()
            assert np.isnan(got[1][..., sees[:, key]]).all()
        elif d == 8:  # an infinite key may give a score of -inf, which is legal: the rule decides
            check_forward(got[0], *arrays, lse=got[1], **options)
    # All that no row sees, at once.
    hidden = ~sees.any(axis=0)
    k[:, hidden], v[:, hidden] = np.nan, np.inf
    again = target.attend(q, k, v, **options)
    assert_same_bits(again[0], clean[0])
    assert_same_bits(again[1], clean[1])


@BAD_DIMS
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 20)}], ids=str)
@targets()
def test_bad_element_of_v_hits_its_column_and_the_rows_that_see_it(target, options, d, dv):
    m = n = 100
    q, k, v = target.inputs(m=m, n=n, hq=4, hkv=2, d=d, dv=dv)
    clean = target.attend(q, k, v, **options)
    for key, bad in itertools.product((0, 50, 99), BAD):
        dirty = v.copy()
        dirty[0, key, 1, dv - 2] = bad
        got = target.attend(q, k, dirty, **options)
        hit = np.zeros(got[0].shape, bool)
        hit[0, visible(m, n, **options)[:, key], 2:, dv - 2] = True  # the two query heads of key/value head 1
        assert_only_where(got, clean, (hit, np.zeros(got[1].shape, bool)), (key, bad))
        values = got[0][hit].astype(np.float64)
        assert (np.isnan(values) if np.isnan(bad) else ~np.isfinite(values)).all()
        check_forward(got[0], q, k, dirty, lse=got[1], **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 20)}, {"softcap": 5.0}], ids=str)
@targets()
def test_nan_in_k_hits_the_rows_that_see_it(target, options):
    m = n = 100
    q, k, v = target.inputs(m=m, n=n, hq=4, hkv=2, d=64)
    clean = target.attend(q, k, v, **options)
    for key in (0, 50, 99):
        dirty = k.copy()
        dirty[0, key, 1, 5] = np.nan
        got = target.attend(q, dirty, v, **options)
        rows = np.zeros(got[1].shape, bool)
        rows[0, 2:, visible(m, n, **options)[:, key]] = True
        assert_only_where(got, clean, (rows.transpose(0, 2, 1)[..., None], rows), key)
        assert np.isnan(got[0][rows.transpose(0, 2, 1)].astype(np.float64)).all() and np.isnan(got[1][rows]).all()


@BAD_DIMS
@pytest.mark.parametrize("bad", BAD, ids=str)
@targets()
def test_bad_query_hits_its_row(target, bad, d, dv):
    q, k, v = target.inputs(m=100, n=70, hq=2, d=d, dv=dv)
    options = {"causal": True}  # rows 0 to 29 see no key
    clean = target.attend(q, k, v, **options)
    for row in (3, 30, 47, 99):
        dirty = q.copy()
        dirty[0, row, 1, 2] = bad
        got = target.attend(dirty, k, v, **options)
        rows = np.zeros(got[1].shape, bool)
        rows[0, 1, row] = row >= 30  # an empty row stays 0 and -inf whatever its query
        assert_only_where(got, clean, (rows.transpose(0, 2, 1)[..., None], rows), row)
        check_forward(got[0], dirty, k, v, lse=got[1], **options)


@pytest.mark.parametrize("d", [8, 64, 192])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@targets()
def test_row_whose_scores_are_all_minus_infinity(target, options, d):
    q, k, v = target.inputs(m=90, n=90, d=d)
    k = np.abs(k)
    clean = target.attend(q, k, v, **options)
    q[0, 40] = -np.inf
    out, lse = target.attend(q, k, v, **options)
    assert not bits(out[0, 40]).any() and lse[0, 0, 40] == -np.inf
    rows = np.arange(90) == 40
    assert_only_where((out, lse), clean, (rows[None, :, None, None], rows[None, None]), "other rows")


@targets()
def test_values_near_the_end_of_the_range_stay_finite(target):
    q, k, v = target.inputs(m=60, n=90, hq=2, d=64)
    v = (v * np.float32(1e4)).astype(target.np_dtype)
    target.check(q, k, v)
    v = np.full_like(v, np.asarray(6e4).astype(target.np_dtype))
    out, _, _ = target.check(q, k, v)
    assert np.isfinite(out.astype(np.float64)).all()


# ---- refusals that need a GPU (the others are in test_api_errors.py) -------------------------------------------------


@targets(lambda target: target.device == "cuda")
def test_host_and_device_arrays_are_not_mixed(target):
    arrays = target.inputs(m=8, n=8)
    cpu = Target(target.framework, "cpu", "numpy", target.dtype)
    if target.framework == "cupy":
        with pytest.raises(TypeError, match=r"q is a CuPy array but v is a NumPy array .* arrays of one framework"):
            cuflash.attention(target.make(arrays[0]), target.make(arrays[1]), arrays[2])
        return
    mixed = [target.make(arrays[0]), target.make(arrays[1]), cpu.make(arrays[2])]
    with pytest.raises(ValueError, match=r"q is on cuda:0 but v is on the CPU; move them to one device"):
        cuflash.attention(*mixed)


@targets(lambda target: target.device == "cuda" and target.dtype == "bfloat16")
def test_dtype_without_a_gpu_kernel(target):
    single = Target(target.framework, "cuda", "sm80", "float32")
    arrays = [single.make(x) for x in single.inputs(m=8, n=8)]
    with pytest.raises(cuflash.UnsupportedProblem, match=r"sm80: takes float16 and bfloat16, not float32") as caught:
        cuflash.attention(*arrays)
    assert {"sm80", "numpy"} <= caught.value.reasons.keys()
    assert "never moves data" in caught.value.reasons["numpy"]


@targets(lambda target: target.device == "cuda" and target.dtype == "bfloat16")
def test_cpu_variant_is_refused_on_the_gpu(target):
    arrays = [target.make(x) for x in target.inputs(m=8, n=8)]
    with pytest.raises(cuflash.UnsupportedProblem, match=r"variant='numpy' cannot run") as caught:
        cuflash.attention(*arrays, variant="numpy")
    assert list(caught.value.reasons) == ["numpy"]

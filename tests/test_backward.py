"""Gradients on every backend and variant that has a backward pass: values, bits, strides, NaN and sizes."""

import ml_dtypes
import numpy as np
import pytest
from backends import Target, assert_same_bits, backward_targets, row_major, visible
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases, measurable_cases

import cuflash
from cuflash.reference import attention_backward_reference, check_backward

FLOAT64 = Target("numpy", "cpu", "numpy", "float64")
strided = backward_targets(lambda target: target.has_strides)
computed = backward_targets(lambda target: target.framework in ("numpy", "cupy"))
NAMES = ("dq", "dk", "dv")
NO_MASK = st.just({})

OPTIONS = [
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (20, 7)},
    {"window": (None, 3), "softcap": 1.5},
    {"causal": True, "window": (33, None), "softcap": 20.0},
    {"scale": -0.3},
    {"scale": 0.0},
]


def wide(x):
    return x.astype(np.float64)


def dout_of(target, q, v, seed=1):
    return target.draw(seed, *q.shape[:3], v.shape[3])


def dlse_of(target, q, seed=2):
    dtype = np.float64 if target.dtype == "float64" else np.float32
    return np.random.default_rng(seed).standard_normal((q.shape[0], q.shape[2], q.shape[1])).astype(dtype)


def same(got, want, what=""):
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_same_bits(a, b, f"{name} {what}")


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [{"m": 9, "n": 12, "hq": 4, "hkv": 2, "d": 5, "dv": 3}, {"b": 2, "m": 12, "n": 7}, {"m": 260, "n": 520, "d": 8}],
    ids=str,
)
def test_finite_differences(sizes, options):
    q, k, v = FLOAT64.inputs(**sizes)
    dout, dlse = dout_of(FLOAT64, q, v), dlse_of(FLOAT64, q)

    def loss(*arrays):
        out, lse = FLOAT64.attend(*arrays, **options)
        return (out * dout).sum() + (np.where(lse == -np.inf, 0, lse) * dlse).sum()

    grads, *_ = FLOAT64.differentiate(dout, q, k, v, dlse, **options)
    step = 1e-5
    for i, grad in enumerate(grads):
        direction = FLOAT64.draw(10 + i, *grad.shape)
        ahead, behind = [q, k, v], [q, k, v]
        ahead[i], behind[i] = ahead[i] + step * direction, behind[i] - step * direction
        slope = (loss(*ahead) - loss(*behind)) / (2 * step)
        np.testing.assert_allclose((grad * direction).sum(), slope, rtol=1e-6, atol=1e-6, err_msg=NAMES[i])


SHAPES = [
    {"b": 2, "m": 33, "n": 97, "hq": 6, "hkv": 2, "d": 17, "dv": 5},
    {"b": 2, "m": 97, "n": 33, "hq": 3, "hkv": 1, "d": 8, "dv": 24},
    {"b": 1, "m": 300, "n": 530, "hq": 2, "hkv": 1, "d": 16},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@backward_targets()
def test_error_rule(target, options, shape):
    q, k, v = target.inputs(**shape)
    target.check_backward(dout_of(target, q, v), q, k, v, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=str)
@backward_targets()
def test_gradient_through_lse(target, options):
    q, k, v = target.inputs(b=2, m=80, n=70, hq=4, hkv=2, d=32)
    target.check_backward(dout_of(target, q, v), q, k, v, dlse_of(target, q), **options)
    nothing = np.zeros_like(dout_of(target, q, v))
    (dq, dk, dv), _ = target.check_backward(nothing, q, k, v, dlse_of(target, q), **options)
    assert wide(dq).any() and wide(dk).any() and not wide(dv).any()


@pytest.mark.parametrize("d", [40, 59, 111, 160, 256])
@backward_targets()
def test_head_dims(target, d):
    q, k, v = target.inputs(b=2, m=70, n=90, hq=2, hkv=1, d=d)
    target.check_backward(dout_of(target, q, v), q, k, v, causal=True)


@pytest.mark.parametrize("n", [1, 2, 17, 100])
@pytest.mark.parametrize("m", [1, 2, 17, 100])
@backward_targets()
def test_short_lengths(target, m, n):
    q, k, v = target.inputs(b=-(-70 // m), m=m, n=n, hq=2, hkv=2, d=16)
    for options in ({}, {"causal": True}):  # with m > n: rows without a key
        (dq, dk, _), _ = target.check_backward(dout_of(target, q, v), q, k, v, **options)
        rows = visible(m, n, **options).sum(axis=1)
        assert not wide(dq[:, rows < 2]).any(), "one key: its weight is 1 whatever its score"
        if n == 1:
            assert not wide(dk).any()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@backward_targets()
def test_layouts_and_ranks(target, layout):
    q, k, v = target.inputs(b=2, m=20, n=30, hq=4, hkv=2, d=16, dv=8)
    dout, dlse = dout_of(target, q, v), dlse_of(target, q)
    want, *_ = target.differentiate(dout, q, k, v, dlse, causal=True)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) if layout == "bhsd" else x for x in (dout, q, k, v)]
    got, *_ = target.differentiate(*turned, dlse, causal=True, layout=layout)
    same([x.swapaxes(1, 2) if layout == "bhsd" else x for x in got], want)
    three, *_ = target.differentiate(*(x[1] for x in turned), dlse[1], causal=True, layout=layout)
    same([x.swapaxes(0, 1) if layout == "bhsd" else x for x in three], [x[1] for x in want])
    two, *_ = target.differentiate(dout[1, :, 3], q[1, :, 3], k[1, :, 1], v[1, :, 1], dlse[1, 3], causal=True)
    assert_same_bits(two[0], want[0][1, :, 3])


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize(("b", "m", "n"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0), (2, 0, 0)])
@backward_targets()
def test_zero_sizes(target, b, m, n, options):
    q, k, v = target.inputs(b=b, m=m, n=n, hq=2, hkv=1)
    grads, *_ = target.differentiate(dout_of(target, q, v), q, k, v, dlse_of(target, q), **options)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape and not wide(grad).any()


@pytest.mark.parametrize(
    "options", [{"scale": 0.5}, {"scale": -0.5, "causal": True}, {"scale": 0.5, "softcap": 200.0}], ids=str
)
@computed
def test_lse_past_the_range_of_exp(target, options):
    q, k, v = (wide(x) for x in target.inputs(b=2, m=100, n=120, hq=2, d=64))
    k += 2
    q[:, ::2] += 2
    q[:, 1::2] -= 2
    q, k, v = (x.astype(target.np_dtype) for x in (q, k, v))
    dout = dout_of(target, q, v)
    grads, out, lse = target.differentiate(dout, q, k, v, **options)
    assert lse.max() > 88 and lse.min() < -88
    check_backward(grads, dout, q, k, v, out, lse, **options)


@computed
def test_inputs_scaled_by_30(target):
    q, k, v = ((30 * wide(x)).astype(x.dtype) for x in target.inputs(b=2, m=100, n=120, hq=2, d=64))
    target.check_backward((30 * wide(dout_of(target, q, v))).astype(q.dtype), q, k, v)


# ---- strides and the caller's arrays ---------------------------------------------------------------------------------


def _strides(shape):
    """Layouts of dout by name: (strides, offset)."""
    b, m, h, d = shape
    return {
        "heads outside": ((h * m * d, d, m * d, 1), 0),
        "batch inside": ((d, b * h * d, b * d, 1), 3),
        "rows apart": ((m * h * (d + 7), h * (d + 7), d + 7, 1), 1),
        "last axis strided": ((m * h * 2 * d, h * 2 * d, 2 * d, 2), 0),
    }


@pytest.mark.parametrize("name", list(_strides((1, 1, 1, 1))))
@strided
def test_strides_do_not_show(target, name):
    q, k, v = target.inputs(b=2, m=33, n=40, hq=4, hkv=4, d=16)
    dout, dlse = dout_of(target, q, v), dlse_of(target, q)
    want, out, lse = target.differentiate(dout, q, k, v, dlse, causal=True)
    compact = [target.make(x) for x in (dout, q, k, v, out, lse)]
    for i in range(5):  # each by itself, so that their layouts differ
        arrays = list(compact)
        x = (dout, q, k, v, out)[i]
        strides, offset = _strides(x.shape)[name]
        arrays[i] = target.scatter(x, strides, offset)[1]
        same(target.call_backward(*arrays, dlse=target.make(dlse), causal=True), want, i)
    b, h, _ = lse.shape
    turned = [target.scatter(x, (1, b, b * h), 0)[1] for x in (lse, dlse)]
    same(target.call_backward(*compact[:5], turned[0], dlse=turned[1], causal=True), want, "rows")


@pytest.mark.parametrize("axes", [(0,), (1,), (3,), (0, 1, 2, 3)], ids=str)
@strided
def test_dout_of_stride_zero(target, axes):
    q, k, v = target.inputs(b=2, m=33, n=40, hq=2, hkv=1, d=16)
    dout = dout_of(target, q, v)
    first = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))
    dout = np.array(np.broadcast_to(dout[first], dout.shape))
    want, out, lse = target.differentiate(dout, q, k, v)
    strides = tuple(0 if axis in axes else step for axis, step in enumerate(row_major(dout.shape)))
    expanded = target.scatter(dout, strides)[1]
    same(target.call_backward(expanded, *(target.make(x) for x in (q, k, v, out, lse))), want)


@strided
def test_caller_gives_the_arrays(target):
    q, k, v = target.inputs(b=2, m=33, n=40, hq=4, hkv=2, d=16)
    dout = dout_of(target, q, v)
    want, out, lse = target.differentiate(dout, q, k, v, causal=True)
    inputs = [target.make(x) for x in (dout, q, k, v, out, lse)]
    poison = [np.full(x.shape, np.nan, x.dtype) for x in want]
    same(target.call_backward(*inputs, causal=True, grads=tuple(target.make(x) for x in poison)), want)
    layouts = [_strides(x.shape)["rows apart"] for x in want]
    held = [target.scatter(x, *layout, fill=-7) for x, layout in zip(poison, layouts, strict=True)]
    same(target.call_backward(*inputs, causal=True, grads=[view for _, view in held]), want)
    for x, layout, (memory, _) in zip(want, layouts, held, strict=True):
        assert_same_bits(target.kit.numpy(memory), target.kit.numpy(target.scatter(x, *layout, fill=-7)[0]), "around")


def test_interleaved_results_of_one_buffer():
    q, k, v = FLOAT64.inputs(m=20, n=20, hq=3, hkv=3)
    dout = dout_of(FLOAT64, q, v)
    want, out, lse = FLOAT64.differentiate(dout, q, k, v)
    packed = np.empty((1, 20, 9, 16))
    got = cuflash.attention_backward(dout, q, k, v, out, lse, grads=tuple(np.split(packed, 3, axis=2)))
    same(got, want)
    assert_same_bits(packed, np.concatenate(want, axis=2))


# ---- rows without keys, keys without rows, NaN and infinity ----------------------------------------------------------

# On CUDA dq is a sum over tiles of keys in any order. The tests below compare bits of the default pass all the same:
# they have at most two tiles, and two numbers added to 0 give the same bits in both orders.

HIDING = [{"causal": True}, {"causal": "top-left"}, {"window": (9, 4)}, {"window": (None, 0)}, {"window": (20, None)}]
BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("options", HIDING, ids=str)
@backward_targets()
def test_masked_keys_and_empty_rows_have_zero_gradients(target, options, deterministic):
    hidden = 0
    for m, n in ((90, 50), (50, 90)):
        q, k, v = target.inputs(b=2, m=m, n=n, hq=2, hkv=1)
        dout, dlse = dout_of(target, q, v), dlse_of(target, q)
        clean, *_ = target.differentiate(dout, q, k, v, dlse, deterministic, **options)
        sees = visible(m, n, **options)
        rows, keys = ~sees.any(axis=1), ~sees.any(axis=0)
        hidden += rows.sum() + keys.sum()
        q[:, rows], dout[:, rows], k[:, keys], v[:, keys] = np.nan, np.inf, np.nan, np.inf
        dlse[..., rows] = np.nan
        grads, *_ = target.differentiate(dout, q, k, v, dlse, deterministic, **options)
        same(grads, clean)
        assert not wide(grads[0][:, rows]).any() and not any(wide(x[:, keys]).any() for x in grads[1:])
    assert hidden


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("which", range(4), ids=["dout", "q", "k", "v"])
@pytest.mark.parametrize("options", [{}, *HIDING], ids=str)
@computed
def test_bad_numbers_reach_only_what_they_touch(target, options, which, deterministic):
    m, n = 70, 90
    arrays = [target.draw(9, 1, m, 4, 16), *target.inputs(m=m, n=n, hq=4, hkv=2)]
    sees = visible(m, n, **options)
    clean, *_ = target.differentiate(*arrays, None, deterministic, **options)
    for at in (3, 50, 69):
        for bad in BAD:
            dirty = [x.copy() for x in arrays]
            dirty[which][0, at, 1, 5] = bad
            grads, out, lse = target.differentiate(*dirty, None, deterministic, **options)
            rows = sees[:, at] if which >= 2 else np.arange(m) == at
            touched = sees[rows].any(axis=0)
            queries, kv = (slice(1, 2), 0) if which < 2 else (slice(2, 4), 1)
            other = np.ones(clean[0].shape, bool)
            other[0, rows, queries] = False
            assert_same_bits(grads[0][other], clean[0][other])
            other = np.ones(clean[1].shape, bool)
            other[0, touched, kv] = False
            for got, want in zip(grads[1:], clean[1:], strict=True):
                assert_same_bits(got[other], want[other])
            if np.isnan(bad):
                check_backward(grads, *dirty, out, lse, **options)
                if rows.any():
                    assert np.isnan(wide(grads[2 if which == 0 else 0])).any()


@computed
def test_row_whose_scores_are_all_minus_infinity(target):
    q, k, v = target.inputs(m=90, n=90)
    dout, k = dout_of(target, q, v), np.abs(k)
    clean, *_ = target.differentiate(dout, q, k, v)
    q[0, 40] = -np.inf
    grads, out, lse = target.differentiate(dout, q, k, v)
    assert lse[0, 0, 40] == -np.inf and not wide(grads[0][0, 40]).any()
    others = np.arange(90) != 40
    assert_same_bits(grads[0][:, others], clean[0][:, others])
    check_backward(grads, dout, q, k, v, out, lse)


@computed
def test_row_whose_only_key_gives_a_score_of_minus_infinity(target):
    q, k, v = target.inputs(m=60, n=60)
    dout, q[0, 0], k[0, 0] = dout_of(target, q, v), 1, -np.inf
    options = {"window": (0, 0)}  # each row sees one key
    grads, out, lse = target.differentiate(dout, q, k, v, **options)
    assert lse[0, 0, 0] == -np.inf and not any(wide(x[0, 0]).any() for x in grads)
    check_backward(grads, dout, q, k, v, out, lse, **options)


# ---- properties ------------------------------------------------------------------------------------------------------

# Where one row or key decides the largest error, the error rule compares two random numbers.
STEADY = ("normal", "large values", "tiny values")


def rounding(target, dout, q, k, v, **options):
    """Bounds of the errors of dq, dk and dv, element by element, from the sizes of the terms that they are sums of.

    With u the unit roundoff of the sums, a weight and its dS err by about u * (|S| + chain) relatively, where |S| is
    the score's sum of absolute products; out and the result are rounded to the dtype.
    """
    u = np.finfo(np.float64 if target.dtype == "float64" else np.float32).eps
    eps = float(ml_dtypes.finfo(target.np_dtype).eps)
    scale, cap = options.get("scale", q.shape[3] ** -0.5), options.get("softcap", 0.0)
    sees = visible(q.shape[1], k.shape[1], **options)
    bounds = [np.zeros(x.shape) for x in (q, k, v)]
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        kv = h // (q.shape[2] // k.shape[2])
        queries, keys, values = wide(q[b, :, h]), wide(k[b, :, kv]), np.abs(wide(v[b, :, kv]))
        scores, sizes = scale * queries @ keys.T, abs(scale) * np.abs(queries) @ np.abs(keys).T
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights = np.exp(np.where(sees, scores, -np.inf) - scores.max(axis=1, initial=0, where=sees, keepdims=True))
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        errors = weights * (2 * eps + u * (32 + 8 * sizes + 8 * sizes.max(axis=1, keepdims=True)))
        incoming = np.abs(wide(dout[b, :, h]))
        dscores = errors * (incoming @ values.T + (incoming * (weights @ values)).sum(axis=1, keepdims=True))
        bounds[0][b, :, h] = abs(scale) * dscores @ np.abs(keys)
        bounds[1][b, :, kv] += abs(scale) * dscores.T @ np.abs(queries)
        bounds[2][b, :, kv] += errors.T @ incoming
    return [bound + float(ml_dtypes.finfo(target.np_dtype).smallest_subnormal) for bound in bounds]


def past_float16(dtype, size):
    """(dout, q, k, v) where each row weighs two keys alike, with gradients of the scores of +-32 * size.

    dq is finite in float16 even where these are not.
    """
    dout, q = np.ones((1, 40, 1, 64)), np.zeros((1, 40, 1, 64))
    k, v = np.zeros((1, 2, 1, 64)), np.zeros((1, 2, 1, 64))
    k[0, 0], v[0, 0], v[0, 1] = 2.0**-10, size, -size
    return tuple(x.astype(dtype) for x in (dout, q, k, v))


@computed
def test_gradients_of_scores_past_float16(target):
    """On CUDA they are rounded to the dtype before they meet k and q, and what overflows shows in dq."""
    for size in (1024, 4096):
        arrays = past_float16(target.np_dtype, size)
        grads, out, lse = target.differentiate(*arrays)
        overflows = size == 4096 and (target.device, target.dtype) == ("cuda", "float16")
        assert np.isfinite(wide(grads[0])).all() != overflows
        if not overflows:
            check_backward(grads, *arrays, out, lse)


@computed
@given(data=st.data())
def test_error_rule_everywhere(target, data):
    score = NO_MASK | st.sampled_from([{"scale": 0.125}, {"softcap": 2.0}])
    largest = 140 if target.dtype != "float64" else 65  # extended precision is slow
    case = data.draw(measurable_cases(target.dtype, kinds=STEADY, score=score, largest=largest))
    q, k, v = (np.concatenate([x] * 4) for x in case.arrays)
    q = (wide(q) * (1 + np.arange(len(q))[:, None, None, None] / 64)).astype(q.dtype)  # no two entries alike
    dlse = dlse_of(target, q) if data.draw(st.booleans()) else None
    dout = dout_of(target, q, v)
    if (target.device, target.dtype, case.kind) == ("cuda", "float16", "large values"):
        dout = (wide(dout) / 16).astype(dout.dtype)  # see test_gradients_of_scores_past_float16
    target.check_backward(dout, q, k, v, dlse, **case.options)


@computed
@given(data=st.data())
def test_linear_in_dout(target, data):
    kinds = STEADY if target.dtype != "float16" else ("normal", "large scores")  # no overflow, no subnormal numbers
    case = data.draw(cases(target.dtype, largest=140, kinds=kinds))
    q, _, v = case.arrays
    rng = np.random.default_rng(case.seed)
    one, two = ((rng.integers(-16, 17, (*q.shape[:3], v.shape[3])) / 4).astype(q.dtype) for _ in range(2))
    results = [target.differentiate(dout, *case.arrays, **case.options)[0] for dout in (one, two, one + two)]
    bounds = [rounding(target, dout, *case.arrays, **case.options) for dout in (one, two, one + two)]
    for (a, b, both), bound in zip(zip(*results, strict=True), zip(*bounds, strict=True), strict=True):
        assert (np.abs(wide(a) + wide(b) - wide(both)) <= sum(bound)).all()
    if target.dtype != "float16":
        single, double = (
            target.differentiate(dout, *case.arrays, deterministic=True, **case.options)[0] for dout in (one, 2 * one)
        )
        same(double, [2 * grad for grad in single])


@computed
@given(data=st.data())
def test_shared_heads_have_the_sums_of_repeated_heads(target, data):
    case = data.draw(cases(target.dtype, largest=140, kinds=("normal", "outliers", "few keys", "large scores")))
    q, k, v = case.arrays
    hkv = k.shape[2]
    if q.shape[2] == hkv:
        q = np.concatenate([q, q[..., ::-1]], axis=2)
    group = q.shape[2] // hkv
    dout = dout_of(target, q, v)
    options = {**case.options, "deterministic": True}
    shared, *_ = target.differentiate(dout, q, k, v, **options)
    repeated_inputs = dout, q, np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    repeated, *_ = target.differentiate(*repeated_inputs, **options)
    assert_same_bits(shared[0], repeated[0])
    bounds = rounding(target, dout, q, k, v, **case.options), rounding(target, *repeated_inputs, **case.options)
    for i in (1, 2):
        b, n, _, d = shared[i].shape
        total, bound = (x.reshape(b, n, hkv, group, d).sum(axis=3) for x in (wide(repeated[i]), bounds[1][i]))
        assert (np.abs(wide(shared[i]) - total) <= bounds[0][i] + bound).all()


@computed
@given(data=st.data())
def test_batch_does_not_change_bits(target, data):
    case = data.draw(cases(target.dtype, largest=300, batch=3))
    dout = dout_of(target, case.q, case.v)
    options = {**case.options, "deterministic": True}
    out, lse = target.attend(*case.arrays, **case.options)
    inputs = (dout, *case.arrays, out, lse)
    want = target.backward(*inputs, **options)
    at = data.draw(st.integers(0, len(case.q) - 1))
    same(target.backward(*(x[at : at + 1] for x in inputs), **options), [x[at : at + 1] for x in want])
    order = [at, *range(len(case.q)), at]
    same(target.backward(*(x[order] for x in inputs), **options), [x[order] for x in want])


@computed
@given(data=st.data())
def test_parts_of_the_keys_sum_to_the_whole(target, data):
    """With the out and lse of the whole, each part gives its own dk and dv and a part of dq."""
    kinds = ("normal", "outliers", "few keys", "large scores")
    case = data.draw(cases(target.dtype, largest=140, kinds=kinds, mask=NO_MASK))
    q, k, v = case.arrays
    dout = dout_of(target, q, v)
    whole, out, lse = target.differentiate(dout, q, k, v, **case.options)
    cut = data.draw(st.integers(0, k.shape[1]))
    parts = [
        target.backward(dout, q, k[:, s], v[:, s], out, lse, **case.options) for s in (slice(0, cut), slice(cut, None))
    ]
    bounds = rounding(target, dout, q, k, v, **case.options)
    assert (np.abs(wide(parts[0][0]) + wide(parts[1][0]) - wide(whole[0])) <= 3 * bounds[0]).all()
    for i in (1, 2):
        joined = np.concatenate([part[i] for part in parts], axis=1)
        assert (np.abs(wide(joined) - wide(whole[i])) <= 2 * bounds[i]).all()


# ---- an independent implementation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (15, 4), "softcap": 3.0}, {"scale": -0.2}], ids=str
)
def test_torch_autograd(options, dtype):
    torch = pytest.importorskip("torch")
    target = Target("numpy", "cpu", "numpy", dtype)
    q, k, v = target.inputs(b=2, m=100, n=130, hq=4, hkv=2, d=32, dv=24)
    dout, dlse = dout_of(target, q, v), dlse_of(target, q)
    sees = torch.from_numpy(visible(100, 130, **options))

    def by_torch(kind):
        leaves = [torch.from_numpy(x).to(kind).requires_grad_() for x in (q, k, v)]
        queries, keys, values = (x.transpose(1, 2) for x in leaves)
        keys, values = (x.repeat_interleave(2, dim=1) for x in (keys, values))
        scores = queries @ keys.mT * options.get("scale", 32**-0.5)
        if "softcap" in options:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        scores = scores.masked_fill(~sees, -torch.inf)
        out = (torch.softmax(scores, dim=-1) @ values).transpose(1, 2)
        loss = (out * torch.from_numpy(dout)).sum() + (scores.logsumexp(dim=-1) * torch.from_numpy(dlse)).sum()
        return [x.numpy().astype(np.float64) for x in torch.autograd.grad(loss, leaves)]

    grads, *_ = target.differentiate(dout, q, k, v, dlse, **options)
    exact = by_torch(torch.float64)
    if dtype == "float64":
        for got, want in zip(grads, exact, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
        return
    for got, usual, want in zip(grads, by_torch(torch.float32), exact, strict=True):
        step = np.finfo(np.float32).eps * np.abs(want).max()
        assert np.abs(got - want).max() <= 2 * np.abs(usual - want).max() + step


# ---- large problems, with small heads so that they are quick ---------------------------------------------------------


@pytest.mark.parametrize(("batch", "n", "window"), [(300, 2048, (16, 0)), (10_240, 4, None)], ids=str)
def test_large_batches(batch, n, window):
    target = Target("numpy", "cpu", "numpy", "float32")
    q, k, v = target.inputs(b=batch, m=n, n=n, d=4)
    dout = dout_of(target, q, v)
    out, lse = target.attend(q, k, v, window=window)
    grads = target.backward(dout, q, k, v, out, lse, window=window)
    for at in (0, batch // 2, batch - 1):
        alone = slice(at, at + 1)
        inputs = [x[alone] for x in (dout, q, k, v, out, lse)]
        same(target.backward(*inputs, window=window), [x[alone] for x in grads])
        exact = attention_backward_reference(*inputs[:4], window=window)
        for got, want in zip(grads, exact, strict=True):
            np.testing.assert_allclose(got[alone], want, atol=2e-6)


def test_lengths_of_65537():
    target = Target("numpy", "cpu", "numpy", "float32")
    n, options = 65537, {"window": (3, 0)}
    q, k, v = target.inputs(m=n, n=n, d=2)
    dout = dout_of(target, q, v)
    grads, *_ = target.differentiate(dout, q, k, v, **options)
    for first, cut in ((0, 0), (n - 40, 3)):  # the first keys of a slice are seen by rows before it too
        rows = slice(first, first + 40)
        exact = attention_backward_reference(*(x[:, rows] for x in (dout, q, k, v)), **options)
        stop = 40 if cut else 37
        for got, want in zip(grads, exact, strict=True):
            np.testing.assert_allclose(got[:, rows][:, cut:stop], want[:, cut:stop], atol=2e-6)

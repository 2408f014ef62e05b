"""Properties of attention that hold for any input, drawn by Hypothesis.

``CUFLASH_HYPOTHESIS=deep`` draws at random and much more than the fixed few examples of the default profile.
"""

import numpy as np
from backends import assert_same_bits, targets, visible
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases, heads, lengths, masks, measurable_cases

from cuflash.reference import attention_reference, check_forward

# One framework a device: that all give the same bits is tested elsewhere.
computed = targets(lambda target: target.framework in ("numpy", "cupy"))
NO_MASK = st.just({})


def wide(x):
    return x.astype(np.float64)


def same(got, want, what=""):
    """Both out and lse have the same bits."""
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b, what)


# ---- values, within the error rule -----------------------------------------------------------------------------------


@computed
@given(data=st.data())
def test_error_rule(target, data):
    case = data.draw(measurable_cases(target.dtype))
    target.check(*case.arrays, **case.options)


@computed
@given(data=st.data())
def test_order_of_keys_does_not_matter(target, data):
    case = data.draw(measurable_cases(target.dtype, mask=NO_MASK))
    q, k, v = case.arrays
    order = np.random.default_rng(case.seed).permutation(k.shape[1])
    out, _, report = target.check(q, k, v, **case.options)
    other, other_lse, other_report = target.check(q, k[:, order], v[:, order], **case.options)
    assert np.abs(wide(out) - wide(other)).max() <= report.max_bound + other_report.max_bound
    check_forward(out, q, k, v, lse=other_lse, **case.options)


@computed
@given(data=st.data())
def test_parts_of_the_keys_merge_through_lse(target, data):
    case = data.draw(cases(target.dtype, mask=NO_MASK, largest=140))
    q, k, v = case.arrays
    cut = data.draw(st.integers(0, k.shape[1]))
    results = [target.attend(q, k[:, s], v[:, s], **case.options) for s in (slice(0, cut), slice(cut, None))]
    parts = [wide(out) for out, _ in results]
    lses = [lse.astype(np.float64) for _, lse in results]
    errors, lse_errors = [], []
    for s, out, lse in zip((slice(0, cut), slice(cut, None)), parts, lses, strict=True):
        exact, exact_lse = attention_reference(q, k[:, s], v[:, s], return_lse=True, **case.options)
        errors.append(np.abs(out - exact).max())
        lse_errors.append(np.abs(lse - exact_lse).max() if s.stop != s.start and k[:, s].size else 0.0)  # -inf - -inf
    exact, exact_lse = attention_reference(q, k, v, return_lse=True, **case.options)
    merged_lse = np.logaddexp(*lses)
    weights = [np.exp(lse - merged_lse).transpose(0, 2, 1)[..., None] for lse in lses]
    merged = weights[0] * parts[0] + weights[1] * parts[1]
    # A convex combination errs by no more than its parts, and its weights by a quarter of the lse errors at most.
    largest = np.abs(wide(v)).max()
    bound = max(errors) + sum(lse_errors) / 4 * 2 * largest + 1e-12 * largest
    assert np.abs(merged - exact).max() <= bound
    assert np.abs(merged_lse - exact_lse).max() <= max(lse_errors) + 1e-12 * max(1, np.abs(exact_lse).max())


@computed
@given(data=st.data())
def test_a_constant_added_to_the_scores_only_moves_lse(target, data):
    kinds = ("normal", "few keys", "large values")
    case = data.draw(measurable_cases(target.dtype, score=NO_MASK, kinds=kinds))
    q, k, v = case.arrays
    b, m, hq, d = q.shape
    if d == 256:
        q, k = q[..., :255], k[..., :255]
    scale, shift = 0.125, data.draw(st.sampled_from([-6.0, -0.5, 1.0, 6.0]))
    out, lse, report = target.check(q, k, v, scale=scale, **case.options)
    one = np.ones((*k.shape[:3], 1), k.dtype)
    constant = np.full((b, m, hq, 1), shift / scale, q.dtype)
    moved = np.concatenate([q, constant], axis=3), np.concatenate([k, one], axis=3)
    out2, lse2, report2 = target.check(*moved, v, scale=scale, **case.options)
    assert np.abs(wide(out) - wide(out2)).max() <= report.max_bound + report2.max_bound
    _, exact = attention_reference(q, k, v, scale=scale, return_lse=True, **case.options)
    seen = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(lse2), seen)
    error = np.abs(lse[seen] - exact[seen]).max(initial=0)
    exact2 = attention_reference(*moved, v, scale=scale, return_lse=True, **case.options)[1]
    np.testing.assert_allclose(exact2[seen], exact[seen] + shift, rtol=0, atol=1e-12)
    error2 = np.abs(lse2[seen] - exact2[seen]).max(initial=0)
    assert np.abs(wide(lse2)[seen] - wide(lse)[seen] - shift).max(initial=0) <= error + error2 + 1e-12


@computed
@given(data=st.data())
def test_one_hot_rows_select_a_value_exactly(target, data):
    m, n = data.draw(lengths()), data.draw(lengths(256))
    hq, hkv = data.draw(heads())
    d, dv = data.draw(st.sampled_from([(8, 8), (64, 64), (128, 128), (192, 128)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # Keys are different sign vectors, and a query is one of them: its score leads by 2 at least before scaling.
    width = min(d, 16)
    codes = (rng.permutation(2**width)[:n, None] >> np.arange(width) & 1) * 2.0 - 1
    k = np.zeros((1, n, hkv, d))
    k[..., :width] = codes[None, :, None]
    k[..., width:] = rng.standard_normal((1, n, hkv, d - width))
    chosen = rng.integers(0, n, (m, hq))
    q = np.zeros((1, m, hq, d))
    q[0, ..., :width] = codes[chosen]
    v = rng.standard_normal((1, n, hkv, dv)).astype(target.np_dtype)
    # Twice the scale is enough for exp to give 0: beyond 104 in float32, 745 in float64.
    scale = 400.0 if target.dtype == "float64" else 60.0
    out, lse = target.attend(q.astype(target.np_dtype), k.astype(target.np_dtype), v, scale=scale)
    kv = np.arange(hq) // (hq // hkv)
    assert_same_bits(out[0], v[0][chosen, kv])
    np.testing.assert_allclose(lse, np.full(lse.shape, scale * width), rtol=1e-6)


@computed
@given(data=st.data())
def test_the_largest_weight_is_not_rounded(target, data):
    """One key leads by up to 9 nats, wherever it lies. All values are equal, so that only rounded weights can err."""
    n, d = data.draw(st.integers(2, 700)), data.draw(st.sampled_from([8, 64, 128, 256]))
    leads = np.array(data.draw(st.lists(st.floats(4, 9), min_size=1, max_size=40)))
    q, k = np.zeros((1, len(leads), 1, d)), np.zeros((1, n, 1, d))
    q[0, :, 0, 0], k[0, data.draw(st.integers(0, n - 1)), 0, 0] = leads, 1
    v = np.repeat(np.random.default_rng(n).standard_normal((1, 1, 1, d)), n, axis=1)
    q, k, v = (x.astype(target.np_dtype) for x in (q, k, v))
    out, _ = target.attend(q, k, v, scale=1.0)
    tolerance = {"float32": 1e-5, "float64": 1e-13}.get(target.dtype, 0)
    np.testing.assert_allclose(wide(out), np.broadcast_to(wide(v[:, :1]), out.shape), rtol=tolerance, atol=tolerance)


# ---- bits ------------------------------------------------------------------------------------------------------------


@computed
@given(data=st.data())
def test_repeats_give_the_same_bits(target, data):
    case = data.draw(cases(target.dtype, largest=400))
    arrays = [target.make(x) for x in case.arrays]
    first = target.call(*arrays, **case.options)
    for _ in range(3):
        same(target.call(*arrays, **case.options), first)


@computed
@given(data=st.data())
def test_a_batch_entry_and_head_alone_has_the_same_bits(target, data):
    case = data.draw(cases(target.dtype, largest=300, batch=3, most_heads=6))
    q, k, v = case.arrays
    out, lse = target.attend(q, k, v, **case.options)
    group = q.shape[2] // k.shape[2]
    b = data.draw(st.integers(0, q.shape[0] - 1))
    h = data.draw(st.integers(0, q.shape[2] - 1))
    kv = slice(h // group, h // group + 1)
    alone = q[b : b + 1, :, h : h + 1], k[b : b + 1, :, kv], v[b : b + 1, :, kv]
    want = out[b : b + 1, :, h : h + 1], lse[b : b + 1, h : h + 1]
    same(target.attend(*alone, **case.options), want)
    # The same memory as one entry of the batch, through strides.
    whole = [target.make(x) for x in (q, k, v)]
    views = whole[0][b : b + 1, :, h : h + 1], whole[1][b : b + 1, :, kv], whole[2][b : b + 1, :, kv]
    same(target.call(*views, **case.options), want)
    # One entry repeated 5 times by stride 0.
    repeated = [target.scatter(np.repeat(x, 5, axis=0), (0, *_steps(x)))[1] for x in alone]
    got = target.call(*repeated, **case.options)
    same(got, [np.repeat(x, 5, axis=0) for x in want])


def _steps(x):
    """Strides of a C-contiguous copy of `x` along its last three axes, in elements."""
    return tuple(step // x.itemsize for step in np.ascontiguousarray(x).strides[1:])


@computed
@given(data=st.data())
def test_grouped_heads_equal_repeated_heads(target, data):
    case = data.draw(cases(target.dtype, largest=200, most_heads=8))
    q, k, v = case.arrays
    group = q.shape[2] // k.shape[2]
    repeated = q, np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    same(target.attend(*repeated, **case.options), target.attend(q, k, v, **case.options))


@computed
@given(data=st.data())
def test_a_causal_prefix_has_the_bits_of_the_whole(target, data):
    window = st.none() | st.tuples(st.integers(0, 200), st.none())
    causal = st.fixed_dictionaries({"causal": st.just(True), "window": window})
    case = data.draw(cases(target.dtype, mask=causal, square=True, largest=600, most_heads=2))
    q, k, v = case.arrays
    out, lse = target.attend(q, k, v, **case.options)
    for stop in {data.draw(lengths(q.shape[1])) for _ in range(3)}:
        got = target.attend(q[:, :stop], k[:, :stop], v[:, :stop], **case.options)
        same(got, (out[:, :stop], lse[..., :stop]), stop)


@computed
@given(data=st.data())
def test_rows_alone_have_the_same_bits(target, data):
    case = data.draw(cases(target.dtype, mask=NO_MASK, largest=500, most_heads=2))
    q, k, v = case.arrays
    out, lse = target.attend(q, k, v, **case.options)
    start = data.draw(st.integers(0, q.shape[1] - 1))
    stop = data.draw(st.integers(start + 1, q.shape[1]))
    rows = slice(start, stop)
    same(target.attend(q[:, rows], k, v, **case.options), (out[:, rows], lse[..., rows]), rows)


@computed
@given(data=st.data())
def test_the_last_rows_alone_have_the_same_bits(target, data):
    mask = masks(causal=(True, "bottom-right"))  # aligned to the last row, as windows are
    case = data.draw(cases(target.dtype, mask=mask, largest=500, most_heads=2))
    q, k, v = case.arrays
    out, lse = target.attend(q, k, v, **case.options)
    last = slice(data.draw(st.integers(0, q.shape[1] - 1)), None)
    same(target.attend(q[:, last], k, v, **case.options), (out[:, last], lse[..., last]), last)


@computed
@given(data=st.data())
def test_other_rows_do_not_matter(target, data):
    case = data.draw(cases(target.dtype, largest=300, most_heads=2))
    q, k, v = case.arrays
    out, lse = target.attend(q, k, v, **case.options)
    kept = np.random.default_rng(case.seed).random(q.shape[1]) < 0.5
    other = np.where(kept[None, :, None, None], q, target.draw(case.seed, *q.shape)).astype(q.dtype)
    got_out, got_lse = target.attend(other, k, v, **case.options)
    same((got_out[:, kept], got_lse[..., kept]), (out[:, kept], lse[..., kept]))


@computed
@given(data=st.data())
def test_hidden_nan_does_not_leak_and_empty_rows_are_empty(target, data):
    case = data.draw(cases(target.dtype, largest=300, most_heads=2))
    q, k, v = case.arrays
    sees = visible(q.shape[1], k.shape[1], **case.options)
    out, lse = target.attend(q, k, v, **case.options)
    empty = ~sees.any(axis=1)
    assert not wide(out[:, empty]).any() and (lse[..., empty] == -np.inf).all()
    assert np.isfinite(wide(out)).all() and np.isfinite(lse[..., ~empty]).all()
    key = data.draw(st.integers(0, k.shape[1] - 1))
    bad = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    k, v = k.copy(), v.copy()
    k[:, key], v[:, key] = bad, bad
    got_out, got_lse = target.attend(q, k, v, **case.options)
    hidden = ~sees[:, key]
    same((got_out[:, hidden], got_lse[..., hidden]), (out[:, hidden], lse[..., hidden]), key)
    if np.isnan(bad):
        assert np.isnan(wide(got_out[:, ~hidden])).all() and np.isnan(got_lse[..., ~hidden]).all()

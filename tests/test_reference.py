"""The oracle itself, against loops over scalars and hand-made cases, and the error rule's power to fail."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from cuflash.reference import (
    attention_backward_reference,
    attention_reference,
    check_backward,
    check_forward,
    two_pass,
    two_pass_backward,
)

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def draw(seed, *shape, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def by_hand(q, k, v, visible, scale, softcap=0.0):
    """Attention by scalar loops on (seqlen, dim) lists; `visible(i, j)` says what is seen."""
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -math.inf)
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if visible(i, j)]
        scores = [scale * math.fsum(float(a) * float(b) for a, b in zip(q[i], k[j], strict=True)) for j in keys]
        if softcap:
            scores = [softcap * math.tanh(s / softcap) for s in scores]
        if not keys:
            continue
        total = math.fsum(math.exp(s) for s in scores)
        lse[i] = math.log(total)
        for c in range(v.shape[1]):
            out[i, c] = math.fsum(math.exp(s) * float(v[j, c]) for s, j in zip(scores, keys, strict=True)) / total
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({}, lambda i, j, off: True),
        ({"causal": True}, lambda i, j, off: j <= i + off),
        ({"causal": "top-left"}, lambda i, j, off: j <= i),
        ({"window": (2, 1)}, lambda i, j, off: i + off - 2 <= j <= i + off + 1),
        ({"window": (None, 0), "softcap": 0.7}, lambda i, j, off: j <= i + off),
        ({"window": (1, None), "causal": True, "scale": -0.5}, lambda i, j, off: i + off - 1 <= j <= i + off),
    ],
)
@pytest.mark.parametrize(("m", "n"), [(5, 7), (7, 5), (1, 4)])
def test_reference_equals_scalar_loops(dtype, options, visible, m, n):
    q, k, v = draw(1, m, 3, dtype=dtype), draw(2, n, 3, dtype=dtype), draw(3, n, 2, dtype=dtype)
    out, lse = attention_reference(q, k, v, **options, return_lse=True)
    scale = options.get("scale", 1 / math.sqrt(3))
    want, want_lse = by_hand(q, k, v, lambda i, j: visible(i, j, n - m), scale, options.get("softcap", 0.0))
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, want, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-13, atol=1e-14)


def test_layouts_ranks_and_gqa_agree():
    q, k, v = draw(1, 2, 5, 6, 4), draw(2, 2, 7, 2, 4), draw(3, 2, 7, 2, 3)
    out, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    assert out.shape == (2, 5, 6, 3) and lse.shape == (2, 6, 5)
    swapped = attention_reference(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), causal=True, layout="bhsd")
    np.testing.assert_array_equal(swapped.transpose(0, 2, 1, 3), out)
    three, lse3 = attention_reference(q[1], k[1], v[1], causal=True, return_lse=True)
    np.testing.assert_array_equal(three, out[1])
    np.testing.assert_array_equal(lse3, lse[1])
    for head in range(6):
        two, lse2 = attention_reference(
            q[1, :, head], k[1, :, head // 3], v[1, :, head // 3], causal=True, return_lse=True
        )
        np.testing.assert_array_equal(two, out[1, :, head])
        np.testing.assert_array_equal(lse2, lse[1, head])


def test_row_blocks_do_not_show(monkeypatch):
    q, k, v = draw(1, 9, 4), draw(2, 8, 4), draw(3, 8, 4)
    whole = attention_reference(q, k, v, window=(3, 1))
    monkeypatch.setattr("cuflash.reference._BLOCK_ELEMENTS", 17)
    np.testing.assert_allclose(attention_reference(q, k, v, window=(3, 1)), whole, rtol=1e-14)


def test_empty_rows_and_zero_lengths():
    q, k, v = draw(1, 6, 4), draw(2, 3, 4), draw(3, 3, 2)
    out, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    assert (out[:3] == 0).all() and (lse[:3] == -np.inf).all() and np.isfinite(lse[3:]).all()
    out, lse = attention_reference(q, k[:0], v[:0], return_lse=True)
    assert out.shape == (6, 2) and (out == 0).all() and (lse == -np.inf).all()
    assert attention_reference(q[:0], k, v).shape == (0, 2)
    low = np.full_like(q, -np.inf)
    out, lse = attention_reference(low, np.ones_like(k), v, return_lse=True)  # every visible score is -inf
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_only_rows_that_see_a_bad_key_change(bad, where):
    arrays = {"q": draw(1, 8, 4), "k": draw(2, 8, 4), "v": draw(3, 8, 4)}
    clean = attention_reference(**arrays, window=(2, 1))
    arrays[where][4, 1] = bad
    out = attention_reference(**arrays, window=(2, 1))
    sees = np.array([i - 2 <= 4 <= i + 1 for i in range(8)])
    np.testing.assert_array_equal(out[~sees], clean[~sees])
    assert (out[sees] != clean[sees]).any(axis=1).all()
    if where == "v":
        assert not np.isfinite(out[sees, 1]).any() and np.isfinite(np.delete(out, 1, axis=1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_pass_rounds_weights_and_result(dtype):
    q, k, v = (draw(i, 40, 16, dtype=dtype) for i in range(3))
    out, lse = two_pass(q, k, v, return_lse=True)
    exact = attention_reference(q, k, v)
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    error = np.abs(out.astype(np.float64) - exact).max()
    assert error <= 4 * eps
    if dtype not in (np.float32, np.float64):
        unrounded = attention_reference(q, k, v).astype(dtype)
        assert (unrounded != out).any()  # the rounding of the weights shows


@pytest.mark.parametrize("dtype", DTYPES)
def test_check_forward_accepts_the_rounded_oracle_and_reports(dtype):
    q, k, v = (draw(i, 2, 50, 2, 16, dtype=dtype) for i in range(3))
    exact, exact_lse = attention_reference(q, k, v, causal=True, return_lse=True)
    lse = exact_lse.astype(np.float64 if dtype == np.float64 else np.float32)
    report = check_forward(exact.astype(dtype), q, k, v, lse=lse, causal=True)
    assert 0 <= report.max_error <= report.max_bound and 0 < report.rms_bound < report.max_bound
    assert report.lse_max_error <= report.lse_bound and len(report.location) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_check_forward_can_fail(dtype):
    q, k, v = (draw(i, 50, 16, dtype=dtype) for i in range(3))
    exact, lse = attention_reference(q, k, v, return_lse=True)
    lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
    good = exact.astype(dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    one = exact.copy()
    one[17, 3] += 40 * eps
    with pytest.raises(AssertionError, match=r"\(17, 3\)"):
        check_forward(one.astype(dtype), q, k, v)
    with pytest.raises(AssertionError, match="RMS"):
        check_forward((exact * (1 + 8 * eps)).astype(dtype), q, k, v)
    for value, match in ((np.nan, "must be finite"), (np.inf, "must be finite")):
        wrong = good.copy()
        wrong[4, 2] = value
        with pytest.raises(AssertionError, match=rf"out\[4, 2\] = .* {match}"):
            check_forward(wrong, q, k, v)
    with pytest.raises(AssertionError, match="shape"):
        check_forward(good[1:], q, k, v)
    check_forward(good, q, k, v, lse=lse)
    wrong = lse.copy()
    wrong[9] *= 1 + 200 * np.finfo(lse.dtype).eps
    with pytest.raises(AssertionError, match=r"lse\[9\]"):
        check_forward(good, q, k, v, lse=wrong)
    wrong[9] = -np.inf
    with pytest.raises(AssertionError, match=r"lse\[9\]"):
        check_forward(good, q, k, v, lse=wrong)


def test_check_forward_demands_nan_where_the_oracle_has_it():
    q, k, v = (draw(i, 8, 4, dtype=np.float32) for i in range(3))
    v[2, 1] = np.nan
    out = two_pass(q, k, v)
    check_forward(out, q, k, v)
    out[5, 1] = 0
    with pytest.raises(AssertionError, match="must be NaN"):
        check_forward(out, q, k, v)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"scale": math.nan}, ValueError),
        ({"window": (-1, 0)}, ValueError),
        ({"layout": "sbhd"}, ValueError),
        ({"k": np.zeros((4, 5))}, ValueError),
    ],
)
def test_bad_options_are_refused(change, error):
    arguments = {"q": np.zeros((4, 3)), "k": np.zeros((4, 3)), "v": np.zeros((4, 3))} | change
    with pytest.raises(error):
        attention_reference(**arguments)


# ---- gradients -------------------------------------------------------------------------------------------------------

BACKWARD_OPTIONS = [
    {},
    {"causal": True},
    {"causal": "top-left", "softcap": 0.7},
    {"window": (1, 2), "scale": -0.4},
    {"window": (None, 0), "softcap": 3.0, "scale": 0.0},
]


@pytest.mark.parametrize("options", BACKWARD_OPTIONS, ids=str)
@pytest.mark.parametrize(("m", "n"), [(9, 12), (12, 9), (1, 1)])
def test_backward_reference_equals_finite_differences(options, m, n):
    q, k, v = draw(1, 2, m, 4, 5), draw(2, 2, n, 2, 5), draw(3, 2, n, 2, 3)
    dout, dlse = draw(4, 2, m, 4, 3), draw(5, 2, 4, m)

    def loss(*arrays):
        out, lse = attention_reference(*arrays, return_lse=True, **options)
        return (out * dout).sum() + (np.where(lse == -np.inf, 0, lse) * dlse).sum()

    grads = attention_backward_reference(dout, q, k, v, dlse=dlse, **options)
    for i, grad in enumerate(grads):
        for at in np.ndindex(2, 1, *grad.shape[2:]):  # one row of each batch entry and head, element by element
            at = (at[0], at[0] * (grad.shape[1] - 1), *at[2:])
            ends = []
            for step in (1e-5, -1e-5):
                arrays = [q.copy(), k.copy(), v.copy()]
                arrays[i][at] += step
                ends.append(loss(*arrays))
            np.testing.assert_allclose(grad[at], (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-8)


def test_backward_layouts_and_ranks_agree():
    q, k, v = draw(1, 2, 5, 6, 4), draw(2, 2, 7, 2, 4), draw(3, 2, 7, 2, 3)
    dout, dlse = draw(4, 2, 5, 6, 3), draw(5, 2, 6, 5)
    grads = attention_backward_reference(dout, q, k, v, dlse=dlse, causal=True)
    swapped = (x.swapaxes(1, 2) for x in (dout, q, k, v))
    for got, want in zip(
        attention_backward_reference(*swapped, dlse=dlse, causal=True, layout="bhsd"), grads, strict=True
    ):
        np.testing.assert_array_equal(got.swapaxes(1, 2), want)
    three = attention_backward_reference(dout[1], q[1], k[1], v[1], dlse=dlse[1], causal=True)
    for got, want in zip(three, grads, strict=True):
        np.testing.assert_array_equal(got, want[1])
    heads = [(dout[1, :, h], q[1, :, h], k[1, :, h // 3], v[1, :, h // 3]) for h in range(6)]
    two = [attention_backward_reference(*x, dlse=dlse[1, h], causal=True) for h, x in enumerate(heads)]
    np.testing.assert_array_equal(np.stack([x[0] for x in two], axis=1), grads[0][1])
    for i in (1, 2):
        shared = np.stack([two[h][i] + two[h + 1][i] + two[h + 2][i] for h in (0, 3)], axis=1)
        np.testing.assert_allclose(shared, grads[i][1], rtol=1e-13, atol=1e-14)


def test_backward_of_empty_rows_and_hidden_keys_is_zero_whatever_they_hold():
    q, k, v, dout = draw(1, 6, 4), draw(2, 3, 4), draw(3, 3, 2), draw(4, 6, 2)
    clean = attention_backward_reference(dout, q, k, v, causal=True)  # rows 0 to 2 see no key
    q[:3], dout[:3] = np.nan, np.inf
    for got, want in zip(attention_backward_reference(dout, q, k, v, causal=True), clean, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not clean[0][:3].any() and clean[0][4:].any()
    q, k, v, dout = draw(1, 3, 4), draw(2, 6, 4), draw(3, 6, 2), draw(4, 3, 2)
    k[3:], v[3:] = np.nan, np.inf
    dq, dk, dv = attention_backward_reference(dout, q, k, v, causal="top-left")
    assert np.isfinite(dq).all() and not dk[3:].any() and not dv[3:].any()
    for grad in attention_backward_reference(dout, q, k[:0], v[:0]):
        assert not grad.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_check_backward_accepts_the_rounded_oracle_and_can_fail(dtype):
    q, k, v, dout = (draw(i, 50, 16, dtype=dtype) for i in range(4))
    out, lse = two_pass(q, k, v, return_lse=True)
    dlse = draw(9, 50, dtype=lse.dtype)
    stored = (dout, q, k, v, out, lse)
    exact = attention_backward_reference(dout, q, k, v, dlse=dlse)
    good = tuple(x.astype(dtype) for x in exact)
    reports = check_backward(good, *stored, dlse=dlse)
    assert all(0 <= report.max_error <= report.max_bound for report in reports)
    check_backward(two_pass_backward(*stored, dlse=dlse), *stored, dlse=dlse)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for i, name in enumerate(("dq", "dk", "dv")):
        wrong = list(exact)
        wrong[i] = exact[i].copy()
        wrong[i][17, 3] += 60 * eps * np.abs(exact[i]).max()
        with pytest.raises(AssertionError, match=rf"{name} .*\(17, 3\)"):
            check_backward(tuple(x.astype(dtype) for x in wrong), *stored, dlse=dlse)
        wrong[i] = exact[i].astype(dtype)
        wrong[i][4, 2] = np.nan
        with pytest.raises(AssertionError, match=rf"{name}\[4, 2\] = nan must be finite"):
            check_backward(tuple(x.astype(dtype) for x in wrong), *stored, dlse=dlse)
    with pytest.raises(AssertionError, match=r"dq \(.*too far"):
        check_backward(good, *stored)  # without the gradient through the lse
    with pytest.raises(AssertionError, match="dk is"):
        check_backward((good[0], good[1][1:], good[2]), *stored, dlse=dlse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_pass_backward_rounds_what_it_writes(dtype):
    q, k, v, dout = (draw(i, 40, 16, dtype=dtype) for i in range(4))
    out, lse = two_pass(q, k, v, return_lse=True)
    grads, eps = two_pass_backward(dout, q, k, v, out, lse), float(ml_dtypes.finfo(dtype).eps)
    for got, want in zip(grads, attention_backward_reference(dout, q, k, v), strict=True):
        assert got.dtype == dtype
        error = np.abs(got.astype(np.float64) - want).max()
        assert error <= 16 * eps * max(1, np.abs(want).max())
        if dtype not in (np.float32, np.float64):
            assert (got != want.astype(dtype)).any()


def test_backward_shapes_that_do_not_fit():
    q, k, v = np.zeros((4, 3)), np.zeros((5, 3)), np.zeros((5, 2))
    with pytest.raises(ValueError, match=r"dout has shape \(4, 3\); it must be that of q with the head_dim of v"):
        attention_backward_reference(q, q, k, v)
    with pytest.raises(ValueError, match=r"dlse has shape \(5,\); it must be \(4,\)"):
        attention_backward_reference(np.zeros((4, 2)), q, k, v, dlse=np.zeros(5))
    with pytest.raises(ValueError, match="lse has shape"):
        two_pass_backward(np.zeros((4, 2)), q, k, v, np.zeros((4, 2)), np.zeros(3))

"""The float64 oracles, the two-pass attention of each dtype, and the error rule that ties a result to both.

Everything here is written for plainness, not speed: one (batch, head) at a time, a few query rows at a time, so that
memory stays bounded at any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.problem import Layout, Options, Problem, canonical_axes, check_options, make_problem

Array = np.ndarray[Any, Any]

_BLOCK_ELEMENTS = 1 << 21  # scores held at once
# BLAS sums in another order when a matrix has few rows or columns; padded, the yardstick does not depend on how many.
_MATRIX_SIDE = 16


def attention_reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
) -> Any:
    """Two-pass attention in float64 on the exact values of the inputs.

    Parameters
    ----------
    q, k, v : array-like
        (batch, seqlen, heads, dim) in `layout`, or without batch, or without batch and heads; any real dtype,
        ``ml_dtypes.bfloat16`` too. Heads of q a multiple of those of k and v.
    causal, window, softcap, scale, layout
        As in ``cuflash.attention``.
    return_lse : bool
        Return (out, lse).

    Returns
    -------
    out : numpy.ndarray
        float64, the shape of q with the last axis of v. Rows that see no key are 0; NaN and inf of visible inputs reach
        the rows that see them, masked keys and values never matter.
    lse : numpy.ndarray
        float64 natural log-sum-exp, (batch, heads, seqlen_q) without the axes that q lacks; -inf for empty rows.

    Raises
    ------
    ValueError, TypeError
        For shapes or options that ``cuflash.attention`` refuses too.
    """
    options = check_options(causal, window, softcap, scale, layout)
    case = _Case.make(q, k, v, options)
    out, lse = _attend(case, np.dtype(np.float64), None)
    result = case.restore(out)
    return (result, case.restore_lse(lse)) if return_lse else result


def two_pass(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: Any = None,
    causal: Any = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
) -> Any:
    """Two-pass attention as usually written in `dtype` (default that of q): the yardstick of the error rule.

    The inputs are rounded to `dtype`; scores, softmax and both accumulations are float32 (float64 for float64), the
    normalised weights are rounded to `dtype` before they meet v, and so is the result. Parameters and results are
    those of :func:`attention_reference` but for the dtypes: out has `dtype`, lse is float32 (float64 for float64).
    """
    options = check_options(causal, window, softcap, scale, layout)
    rounding = np.dtype(np.asarray(q).dtype if dtype is None else dtype)
    q, k, v = (np.asarray(x).astype(rounding) for x in (q, k, v))
    case = _Case.make(q, k, v, options)
    out, lse = _attend(case, _compute_dtype(rounding), rounding)
    with np.errstate(all="ignore"):
        result = case.restore(out.astype(rounding))
    return (result, case.restore_lse(lse)) if return_lse else result


def attention_backward_reference(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = None,
    causal: Any = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bshd",
) -> tuple[Array, Array, Array]:
    r"""Gradients of attention in float64, by hand, on the exact values of the inputs.

    With the loss :math:`\phi`, :math:`dX = \partial \phi / \partial X`, scores
    :math:`S = \mathrm{scale} \cdot Q K^T`, :math:`T = S` or :math:`c \tanh(S / c)` with a softcap :math:`c`, row sums
    :math:`L_i = \log \sum_j e^{T_{ij}}` over the keys that row :math:`i` sees, weights
    :math:`P_{ij} = e^{T_{ij} - L_i}` (0 for masked pairs) and :math:`O = P V` ([1]_, appendix B.2; [2]_, section 3.2)::

        dV    = P^T dO
        dP    = dO V^T
        D_i   = sum_j P_ij dP_ij        = sum_c dO_ic O_ic, which needs no row of P
        dT_ij = P_ij (dP_ij - D_i + dL_i)
        dS_ij = dT_ij (1 - (T_ij / c)^2), or dT_ij without a softcap
        dQ    = scale * dS K
        dK    = scale * dS^T Q

    :math:`dT` is the softmax's Jacobian :math:`\mathrm{diag}(P_i) - P_i P_i^T` times :math:`dP_i`, and
    :math:`\partial L_i / \partial T_{ij} = P_{ij}` adds the gradient that arrives through the lse. Query heads
    that share a key/value head add their dK and dV.

    Parameters
    ----------
    dout : array-like
        Gradient of the loss by out, of its shape: that of q with the last axis of v.
    q, k, v, causal, window, softcap, scale, layout
        As in :func:`attention_reference`.
    dlse : array-like, optional
        Gradient of the loss by the lse, (batch, heads, seqlen_q) without the axes that q lacks; 0 when None.

    Returns
    -------
    dq, dk, dv : numpy.ndarray
        float64, of the shapes of q, k and v. Rows without a key (lse of -inf) have a zero dq and add nothing to dk and
        dv, whatever their q and dout hold; keys that no row sees have zero dk and dv. NaN and inf reach the gradients
        of the rows and keys that see each other and no others.

    Raises
    ------
    ValueError, TypeError
        For shapes or options that do not fit.

    References
    ----------
    .. [1] T. Dao, D. Y. Fu, S. Ermon, A. Rudra and C. Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention
       with IO-Awareness", NeurIPS 2022, arXiv:2205.14135, appendices B.2 to B.4.
    .. [2] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", ICLR 2024,
       arXiv:2307.08691, section 3.2.
    """
    case = _BackwardCase.make(dout, q, k, v, dlse, check_options(causal, window, softcap, scale, layout))
    return case.restore(_differentiate(case, np.dtype(np.float64)))


def two_pass_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    dtype: Any = None,
    causal: Any = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bshd",
) -> tuple[Array, Array, Array]:
    """The two-pass backward as usually written in `dtype` (default that of q): the yardstick of the error rule.

    The standard backward pass of Dao et al. 2022 (appendix B.4, Algorithm 3), which writes P, dP and dS out, on what a
    forward pass has stored, as ``cuflash.attention_backward`` takes it: P is exp(T - lse) and D the row sum of
    dout * out. The inputs, P, dP, dS and the results are rounded to `dtype`; scores and all accumulations are float32
    (float64 for float64). Other parameters and results are those of :func:`attention_backward_reference`.
    """
    rounding = np.dtype(np.asarray(q).dtype if dtype is None else dtype)
    dout, q, k, v, out = (np.asarray(x).astype(rounding) for x in (dout, q, k, v, out))
    options = check_options(causal, window, softcap, scale, layout)
    case = _BackwardCase.make(dout, q, k, v, dlse, options)
    with np.errstate(all="ignore"):
        wide = _differentiate(case, _compute_dtype(rounding), case.stored(out, lse), rounding)
        dq, dk, dv = case.restore((wide[0].astype(rounding), wide[1].astype(rounding), wide[2].astype(rounding)))
    return dq, dk, dv


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """How far a result is from float64, and how far it may be.

    Attributes
    ----------
    max_error, rms_error : float
        Of out, over the elements that are finite in the dtype.
    max_bound, rms_bound : float
        What :func:`check_forward` allows.
    reference_max_error, reference_rms_error : float
        Of :func:`two_pass` on the same inputs.
    location : tuple of int
        Index in out of the largest error.
    lse_max_error, lse_bound : float
        Largest lse error and the bound of that row (the row nearest to its bound); 0 when no lse was given.
    """

    max_error: float
    rms_error: float
    max_bound: float
    rms_bound: float
    reference_max_error: float
    reference_rms_error: float
    location: tuple[int, ...]
    lse_max_error: float = 0.0
    lse_bound: float = 0.0


def check_forward(
    out: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    lse: Any = None,
    causal: Any = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bshd",
) -> ErrorReport:
    """Check a forward result (NumPy arrays, out in the dtype of the inputs) against float64.

    The rule is the one FlashAttention tests by, for the largest and the root-mean-square error alike::

        error(out) <= 2 * error(two_pass) + eps(dtype) * magnitude + smallest_subnormal(dtype)

    where errors are against :func:`attention_reference`, magnitude is the largest (or RMS) absolute value of the
    float64 result, and eps is the spacing of the dtype at 1, so that the middle term is one rounding step. Elements
    that are not finite once rounded to the dtype must be NaN where float64 has NaN, and not finite elsewhere.

    float64 results are held against extended precision where the platform's ``longdouble`` has it. Where it has not,
    the yardstick has no error of its own and ``16 * eps`` of the magnitude is allowed.

    lse, when given, is held row by row to :func:`lse_bound`.

    Raises
    ------
    AssertionError
        With error, bound and location.
    """
    options = check_options(causal, window, softcap, scale, layout)
    out, case = np.asarray(out), _Case.make(q, k, v, options)
    dtype = out.dtype
    exact_dtype = np.dtype(np.longdouble if dtype == np.float64 else np.float64)
    exact, exact_lse = _attend(case, exact_dtype, None)
    exact = case.restore(exact)
    if out.shape != exact.shape:
        raise AssertionError(f"out has shape {out.shape}, expected {exact.shape}")
    yardstick = case.restore(_attend(case, _compute_dtype(dtype), dtype)[0])
    report = _compare(out, exact, yardstick)
    if lse is not None:
        error, bound = _check_lse(np.asarray(lse), case, exact_lse, lse_bound(case.problem, case.q, case.k, exact_lse))
        report = replace(report, lse_max_error=error, lse_bound=bound)
    return report


def check_backward(
    grads: tuple[Any, Any, Any],
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: Any = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bshd",
) -> tuple[ErrorReport, ErrorReport, ErrorReport]:
    """Check gradients (dq, dk, dv) (NumPy arrays in the dtype of the inputs) against float64.

    The rule is that of :func:`check_forward`, for each of the three alike. The truth is
    :func:`attention_backward_reference` (in extended precision for float64), which does without `out` and `lse`; the
    yardstick is :func:`two_pass_backward` of the same stored `out` and `lse`, which are to be held to
    :func:`check_forward` themselves.

    Returns
    -------
    tuple of ErrorReport
        Of dq, dk and dv.

    Raises
    ------
    AssertionError
        With the gradient's name, error, bound and location.
    """
    case = _BackwardCase.make(dout, q, k, v, dlse, check_options(causal, window, softcap, scale, layout))
    dtype = np.asarray(grads[0]).dtype
    exact_dtype = np.dtype(np.longdouble if dtype == np.float64 else np.float64)
    exact = case.restore(_differentiate(case, exact_dtype))
    yardstick = case.restore(_differentiate(case, _compute_dtype(dtype), case.stored(out, lse), dtype))
    reports = []
    for name, got, want, usual in zip(("dq", "dk", "dv"), map(np.asarray, grads), exact, yardstick, strict=True):
        if got.shape != want.shape or got.dtype != dtype:
            raise AssertionError(f"{name} is {got.dtype} {got.shape}, expected {dtype} {want.shape}")
        reports.append(_compare(got, want, usual, name))
    return reports[0], reports[1], reports[2]


def _compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _compare(out: Array, exact: Array, yardstick: Array, name: str = "out") -> ErrorReport:
    """Apply the rule to `out`; `exact` is wider, `yardstick` the two-pass result not yet rounded to out's dtype."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(out.dtype).astype(np.float64)
        reference = yardstick.astype(out.dtype)
    wide = out.astype(exact.dtype)
    finite = np.isfinite(rounded)
    _require(~(np.isnan(exact) & ~np.isnan(wide)), out, exact, f"{name}{{}} = {{}} must be NaN")
    _require(finite | ~np.isfinite(wide), out, exact, f"{name}{{}} = {{}} must not be finite")
    _require(~finite | np.isfinite(wide), out, exact, f"{name}{{}} = {{}} must be finite")
    if not finite.any():
        return ErrorReport(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ())
    with np.errstate(all="ignore"):
        errors = np.where(finite, np.abs(wide - exact), 0)
        reference_errors = np.abs(reference.astype(exact.dtype) - exact)[finite]
        reference_errors = reference_errors[np.isfinite(reference_errors)]
    magnitude = np.abs(exact[finite])
    info = ml_dtypes.finfo(out.dtype)
    steps = 1.0 if exact.dtype != np.float64 or out.dtype != np.float64 else 16.0
    step, floor = steps * float(info.eps), float(info.smallest_subnormal)
    reference_max = float(reference_errors.max(initial=0))
    reference_rms = _rms(reference_errors)
    location = tuple(int(i) for i in np.unravel_index(int(errors.argmax()), errors.shape))
    report = ErrorReport(
        max_error=float(errors.max()),
        rms_error=_rms(errors[finite]),
        max_bound=2 * reference_max + step * float(magnitude.max()) + floor,
        rms_bound=2 * reference_rms + step * _rms(magnitude) + floor,
        reference_max_error=reference_max,
        reference_rms_error=reference_rms,
        location=location,
    )
    if report.max_error > report.max_bound or report.rms_error > report.rms_bound:
        raise AssertionError(
            f"{name} ({out.dtype}) is too far from float64: max error {report.max_error:.3e} "
            f"(bound {report.max_bound:.3e}), RMS error {report.rms_error:.3e} (bound {report.rms_bound:.3e}); "
            f"largest at {location}: got {out[location]}, expected {float(exact[location]):.9g}"
        )
    return report


def _require(good: Array, out: Array, exact: Array, what: str) -> None:
    if not good.all():
        location = tuple(int(i) for i in np.argwhere(~good)[0])
        raise AssertionError(
            f"{what.format(list(location), out[location])}: float64 has {float(exact[location])} "
            f"({int((~good).sum())} such elements)"
        )


def _rms(values: Array) -> float:
    """Root mean square, scaled so that squares neither overflow nor underflow."""
    top = float(np.abs(values).max(initial=0))
    return top * float(np.sqrt(np.mean(np.square(values / top)))) if top > 0 else 0.0


def lse_bound(problem: Problem, q: Array, k: Array, lse: Array) -> Array:
    """Largest error allowed in each lse, (batch, heads_q, seqlen_q), for q and k in bshd order.

    With u the unit roundoff of the lse dtype, d the head dim, n the keys and A = |scale| * |q_i| * max_j |k_j| over
    the keys that row i sees (Cauchy-Schwarz: no product sum exceeds it):

    - a rounded dot product of d terms errs by about sqrt(d) u A (d u A at worst); 4 sqrt(d) u A leaves four sigma, and
      covers the scaling by ``scale`` (u A). A softcap adds 4 u min(softcap, A) for tanh and its product;
    - lse moves at most as much as the largest score error, since it is 1-Lipschitz in the max norm;
    - each exp(s - m) has a relative error of a few u beside u |s - m|, and |s - m| exp(s - m) <= 1/e; a sum of n
      positive terms errs by about sqrt(n) u relatively when added one by one: u (8 + sqrt(n)) after the log, since
      d log(l) = dl / l;
    - m + log(l) is rounded once, and log(l) and the stored value each once more: 4 u |lse| + 4 u log(n).
    """
    u = float(np.finfo(problem.lse_dtype).eps) / 2
    bound = np.zeros(lse.shape)
    for b, h, rows in _blocks(problem):
        with np.errstate(all="ignore"):
            q_norm = np.linalg.norm(q[b, rows, h].astype(np.float64), axis=-1)
            k_norm = np.linalg.norm(k[b, :, h // problem.group].astype(np.float64), axis=-1)
            largest = np.where(_visible(problem, rows), k_norm, 0).max(axis=1, initial=0)
            a = abs(problem.scale) * q_norm * largest
            cap = np.minimum(problem.softcap, a)
            tail = 8 + np.sqrt(problem.seqlen_k) + 4 * np.log(max(problem.seqlen_k, 1))
            bound[b, h, rows] = u * (4 * np.sqrt(problem.head_dim) * a + 4 * cap + tail + 4 * np.abs(lse[b, h, rows]))
    return bound


def _check_lse(lse: Array, case: _Case, exact: Array, bound: Array) -> tuple[float, float]:
    """Raise when a row's lse is past its bound; else the error and bound of the row nearest to it."""
    expected = case.restore_lse(exact)
    if lse.shape != expected.shape or lse.dtype != case.problem.lse_dtype:
        raise AssertionError(
            f"lse has shape {lse.shape} and dtype {lse.dtype}, expected {expected.shape} and {case.problem.lse_dtype}"
        )
    bound = case.restore_lse(bound)
    with np.errstate(all="ignore"):
        same = (lse == expected) | (np.isnan(lse) & np.isnan(expected))
        errors = np.where(same, 0, np.abs(lse.astype(expected.dtype) - expected)).astype(np.float64)
        good = same | (np.isfinite(expected) & (errors <= bound))
    if not good.all():
        location = tuple(int(i) for i in np.argwhere(~good)[0])
        raise AssertionError(
            f"lse{list(location)} = {lse[location]}, expected {float(expected[location]):.9g}: "
            f"error {errors[location]:.3e}, bound {bound[location]:.3e} ({int((~good).sum())} such rows)"
        )
    if not errors.size:
        return 0.0, 0.0
    with np.errstate(all="ignore"):
        ratio = np.where(errors > 0, errors / bound, 0)
    nearest = int(ratio.argmax())
    return float(errors.flat[nearest]), float(bound.flat[nearest])


@dataclass(frozen=True, slots=True)
class _Case:
    """Inputs in bshd order with their Problem, and the way back to the caller's layout."""

    q: Array
    k: Array
    v: Array
    problem: Problem
    layout: Layout
    ndim: int

    @classmethod
    def make(cls, q: Any, k: Any, v: Any, options: Options) -> _Case:
        arrays: list[Array] = [np.asarray(x) for x in (q, k, v)]
        name = str(arrays[0].dtype)
        dtype = name if name in ("float16", "bfloat16", "float32") else "float64"
        problem = make_problem(arrays[0].shape, arrays[1].shape, arrays[2].shape, dtype, options)
        views = [_to_bshd(x, options.layout) for x in arrays]
        return cls(views[0], views[1], views[2], problem, options.layout, arrays[0].ndim)

    def restore(self, out: Array) -> Array:
        """Out in the caller's layout and number of dimensions."""
        heads_first = self.layout == "bhsd" or self.ndim == 2
        index: tuple[int, ...] = (0,) * (4 - self.ndim)
        restored: Array = (out.transpose(0, 2, 1, 3) if heads_first else out)[index]
        return restored

    def restore_lse(self, lse: Array) -> Array:
        """Lse without the axes that the caller's arrays lack."""
        index: tuple[int, ...] = (0,) * (4 - self.ndim)
        restored: Array = lse[index]
        return restored

    def of_out(self, name: str, x: Any) -> Array:
        """An array of the shape of out, in bshd order."""
        p, x = self.problem, np.asarray(x)
        shape = (p.batch, p.seqlen_q, p.heads_q, p.head_dim_v)
        view = _to_bshd(x, self.layout) if x.ndim == self.ndim else x
        if view.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; it must be that of q with the head_dim of v")
        return view

    def of_lse(self, name: str, x: Any) -> Array:
        """An array of the shape of the lse, (batch, heads_q, seqlen_q)."""
        p, x = self.problem, np.asarray(x)
        shape = (p.batch, p.heads_q, p.seqlen_q)
        if x.shape != shape[4 - self.ndim :]:
            raise ValueError(f"{name} has shape {x.shape}; it must be {shape[4 - self.ndim :]}, that of the lse")
        full: Array = x.reshape(shape)
        return full


def _to_bshd(x: Array, layout: Layout) -> Array:
    shape = canonical_axes("array", x.shape, layout)
    strides = canonical_axes("array", x.strides, layout, missing=0)
    view: Array = np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)
    return view


def _blocks(problem: Problem) -> Iterator[tuple[int, int, slice]]:
    """(batch, head, rows) over everything, with a bounded number of scores each."""
    step = max(1, _BLOCK_ELEMENTS // max(problem.seqlen_k, 1))
    for b in range(problem.batch):
        for h in range(problem.heads_q):
            for start in range(0, problem.seqlen_q, step):
                yield b, h, slice(start, min(start + step, problem.seqlen_q))


def _visible(problem: Problem, rows: slice) -> Array:
    """Which keys each of the rows sees, (rows, seqlen_k)."""
    difference = np.arange(problem.seqlen_k)[None, :] - np.arange(rows.start, rows.stop)[:, None]
    visible = np.ones(difference.shape, bool)
    if problem.diag_lower is not None:
        visible &= difference >= problem.diag_lower
    if problem.diag_upper is not None:
        visible &= difference <= problem.diag_upper
    return visible


def _attend(case: _Case, compute: np.dtype[Any], rounding: np.dtype[Any] | None) -> tuple[Array, Array]:
    """Two-pass attention in `compute`, with the weights rounded to `rounding`; out and lse in `compute`, bshd."""
    problem = case.problem
    out = np.zeros((problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v), compute)
    lse: Array = np.full((problem.batch, problem.heads_q, problem.seqlen_q), -np.inf, compute)
    if problem.seqlen_k == 0:
        return out, lse
    for b, h, rows in _blocks(problem):
        with np.errstate(all="ignore"):
            q = _at_least(_MATRIX_SIDE, case.q[b, rows, h].astype(compute))
            k = case.k[b, :, h // problem.group].astype(compute)
            v = _at_least(_MATRIX_SIDE, case.v[b, :, h // problem.group].astype(compute).T).T
            visible = _at_least(_MATRIX_SIDE, _visible(problem, rows))
            scores = (q @ k.T) * compute.type(problem.scale)
            if problem.softcap:
                cap = compute.type(problem.softcap)
                scores = cap * np.tanh(scores / cap)
            scores[~visible] = -np.inf
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - np.where(top == -np.inf, 0, top))
            total = weights.sum(axis=1, keepdims=True)
            lse[b, h, rows] = (top + np.log(total))[: rows.stop - rows.start, 0]
            weights /= np.where(total == 0, 1, total)
            if rounding is not None:
                weights = weights.astype(rounding).astype(compute)
            out[b, rows, h] = _weigh(weights, v, visible)[: rows.stop - rows.start, : problem.head_dim_v]
    return out, lse


@dataclass(frozen=True, slots=True)
class _BackwardCase:
    """A :class:`_Case` with the gradients that arrive, dout in bshd order and dlse (batch, heads_q, seqlen_q)."""

    case: _Case
    dout: Array
    dlse: Array

    @classmethod
    def make(cls, dout: Any, q: Any, k: Any, v: Any, dlse: Any, options: Options) -> _BackwardCase:
        case = _Case.make(q, k, v, options)
        p = case.problem
        dlse = np.zeros((p.batch, p.heads_q, p.seqlen_q)) if dlse is None else case.of_lse("dlse", dlse)
        return cls(case, case.of_out("dout", dout), dlse)

    def stored(self, out: Any, lse: Any) -> tuple[Array, Array]:
        """Out and lse of a forward pass in bshd order."""
        return self.case.of_out("out", out), self.case.of_lse("lse", lse)

    def restore(self, grads: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Dq, dk and dv in the caller's layout and number of dimensions."""
        dq, dk, dv = (self.case.restore(x) for x in grads)
        return dq, dk, dv


def _differentiate(
    case: _BackwardCase,
    compute: np.dtype[Any],
    stored: tuple[Array, Array] | None = None,
    rounding: np.dtype[Any] | None = None,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in `compute`, bshd, from out and lse if they are given; P, dP and dS are rounded to `rounding`."""
    forward, problem = case.case, case.case.problem
    out, lse = (x.astype(compute) for x in stored or _attend(forward, compute, None))
    dq, dk, dv = (np.zeros(x.shape, compute) for x in (forward.q, forward.k, forward.v))
    if problem.seqlen_k == 0:
        return dq, dk, dv
    for b, h, rows in _blocks(problem):
        kv = h // problem.group
        with np.errstate(all="ignore"):
            q, k = forward.q[b, rows, h].astype(compute), forward.k[b, :, kv].astype(compute)
            v, dout = forward.v[b, :, kv].astype(compute), case.dout[b, rows, h].astype(compute)
            scores, slope = _scores(problem, q, k, usual=stored is not None)
            visible = _visible(problem, rows) & (lse[b, h, rows, None] != -np.inf)
            weights = np.where(visible, np.exp(scores - lse[b, h, rows, None]), 0)
            weights, dweights = _round(weights, rounding), _round(dout @ v.T, rounding)
            delta = (dout * out[b, rows, h]).sum(axis=1, keepdims=True)
            dlse = case.dlse[b, h, rows, None].astype(compute)
            dscores = _round(weights * (dweights - delta + dlse) * slope, rounding)
            dscores = np.where(visible, dscores, 0)
            scale = compute.type(problem.scale)
            dq[b, rows, h] = _weigh(dscores, k, visible) * scale
            dk[b, :, kv] += _weigh(dscores.T, q, visible.T) * scale
            dv[b, :, kv] += _weigh(weights.T, dout, visible.T)
    return dq, dk, dv


def _scores(problem: Problem, q: Array, k: Array, usual: bool) -> tuple[Array, Array | float]:
    """Scores of some rows after scale and softcap, masked pairs too, and the slope of the softcap.

    The slope is usually written 1 - tanh^2, which cancels where tanh is near 1; the truth takes 1 / cosh^2.
    """
    compute = q.dtype.type
    scores = (q @ k.T) * compute(problem.scale)
    if not problem.softcap:
        return scores, 1.0
    ratio = scores / compute(problem.softcap)
    capped = np.tanh(ratio)
    return compute(problem.softcap) * capped, 1 - np.square(capped) if usual else 1 / np.square(np.cosh(ratio))


def _round(x: Array, dtype: np.dtype[Any] | None) -> Array:
    """`x` rounded to a dtype, in its own."""
    return x if dtype is None else x.astype(dtype).astype(x.dtype)


def _at_least(rows: int, x: Array) -> Array:
    """`x` with zero rows appended up to `rows`."""
    return x if len(x) >= rows else np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)])


def _weigh(weights: Array, v: Array, visible: Array) -> Array:
    """weights @ v in which invisible values count for nothing, even NaN and inf."""
    finite = np.isfinite(v)
    out: Array = weights @ np.where(finite, v, 0)
    for key in np.flatnonzero(~finite.all(axis=1)):
        seen = visible[:, key]
        out[seen] += np.where(finite[key], 0, weights[seen, key, None] * v[key])
    return out

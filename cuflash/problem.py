"""What is to be computed: the shapes, dtype and options of one attention call, checked and normalised.

Everything here is plain Python on tuples and numbers, so that it is testable with no array library and no GPU.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Literal

Layout = Literal["bshd", "bhsd"]
Causal = bool | Literal["bottom-right", "top-left"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256
_MAX_SEQLEN = 2**30 - 2**10  # a row plus a diagonal, rounded up to tiles, is 32-bit in the kernels


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention forward pass, independent of any array, device or kernel.

    Attributes
    ----------
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v : int
        Sizes. ``heads_q`` is a multiple of ``heads_kv``.
    dtype : str
        ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``.
    scale : float
        Factor on q.k.
    softcap : float
        ``softcap * tanh(s / softcap)`` on the scaled scores; 0 means none.
    diag_lower, diag_upper : int or None
        Query ``i`` sees key ``j`` when ``diag_lower <= j - i <= diag_upper``; None leaves that side open.
        Causal masks of both alignments and windows all reduce to these two diagonals.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    softcap: float = 0.0
    diag_lower: int | None = None
    diag_upper: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q, k, v and out."""
        return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[self.dtype]

    @property
    def lse_dtype(self) -> str:
        """Dtype of the log-sum-exp: float64 for float64 inputs, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element at all."""
        return self.batch == 0 or self.seqlen_q == 0

    @property
    def has_band(self) -> bool:
        """Whether a causal mask or a window hides any key (open sides that hide nothing do not count)."""
        lower_hides = self.diag_lower is not None and self.diag_lower > -(self.seqlen_q - 1)
        upper_hides = self.diag_upper is not None and self.diag_upper < self.seqlen_k - 1
        return lower_hides or upper_hides

    def visible_pairs(self) -> int:
        """Number of (query, key) pairs that the mask leaves visible, for one batch entry and one head."""
        if not self.has_band:
            return self.seqlen_q * self.seqlen_k
        below_upper = _count_below(self, self.diag_upper, self.seqlen_k - 1)
        below_lower = _count_below(self, None if self.diag_lower is None else self.diag_lower - 1, -self.seqlen_q)
        return max(below_upper - below_lower, 0)

    def flops(self) -> int:
        """Multiply-add FLOPs of both matrix products over the visible pairs (two per multiply-add)."""
        return 2 * self.batch * self.heads_q * self.visible_pairs() * (self.head_dim + self.head_dim_v)


@dataclass(frozen=True, slots=True)
class BackwardProblem(Problem):
    """One attention backward pass: the forward problem whose gradients are wanted, and how.

    Attributes
    ----------
    has_dlse : bool
        Whether a gradient arrives through the log-sum-exp too.
    deterministic : bool
        Whether repeated calls must give the same bits.
    """

    has_dlse: bool = False
    deterministic: bool = False

    @property
    def has_no_gradients(self) -> bool:
        """Whether no gradient has any element; without visible pairs they are zeros, which have to be written."""
        return self.batch == 0 or self.seqlen_q == self.seqlen_k == 0

    def flops(self) -> int:
        """Multiply-add FLOPs of the five matrix products over the visible pairs: S, dP, dQ, dK and dV."""
        pairs = 2 * self.batch * self.heads_q * self.visible_pairs()
        return pairs * (3 * self.head_dim + 2 * self.head_dim_v)


def _count_below(problem: Problem, diagonal: int | None, default: int) -> int:
    """Pairs with j - i <= diagonal inside the seqlen_q x seqlen_k rectangle."""
    d = default if diagonal is None else diagonal
    m, n = problem.seqlen_q, problem.seqlen_k
    # Row i holds clamp(i + d + 1, 0, n) keys: rows before `first` hold none, rows from `full` on hold all n.
    first = min(max(-d, 0), m)
    full = min(max(n - d - 1, first), m)
    rows = full - first
    ramp = rows * (first + d + 1) + rows * (rows - 1) // 2
    return ramp + (m - full) * n


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword options of a call after :func:`check_options`, still independent of shapes."""

    causal: Causal = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    scale: float | None = None
    layout: Layout = "bshd"


def check_options(causal: object, window: object, softcap: object, scale: object, layout: object) -> Options:
    """Check the options that do not depend on shapes.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, its value and the remedy.
    """
    return Options(
        causal=_check_causal(causal),
        window=_check_window(window),
        softcap=_check_softcap(softcap),
        scale=_check_scale(scale),
        layout=_check_layout(layout),
    )


def check_deterministic(deterministic: object) -> bool:
    """Check the option of the backward pass.

    Raises
    ------
    TypeError
    """
    if isinstance(deterministic, bool):
        return deterministic
    raise TypeError(f"deterministic={deterministic!r} must be True or False, not {type(deterministic).__name__}")


def _check_causal(causal: object) -> Causal:
    if isinstance(causal, str) and causal in ("bottom-right", "top-left"):
        return causal  # type: ignore[return-value]
    if isinstance(causal, bool) or type(causal).__name__ in ("bool_", "bool"):
        return bool(causal)
    raise ValueError(
        f"causal={causal!r} is not understood; "
        "pass False, True (the same as 'bottom-right'), 'bottom-right' or 'top-left'"
    )


def _check_window(window: object) -> tuple[int | None, int | None]:
    if window is None:
        return (None, None)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window={window!r} must be None or a pair (left, right); use None for an open side")
    return (_check_side(window, 0, "left"), _check_side(window, 1, "right"))


def _check_side(window: tuple[object, object] | list[object], index: int, side: str) -> int | None:
    value = window[index]
    if value is None:
        return None
    try:
        reach = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"window={window!r}: the {side} side must be an int or None, not {kind}") from None
    if reach < 0:
        raise ValueError(f"window={window!r}: the {side} side must be >= 0; use None for an open side")
    return reach


def _as_float(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real):  # arrays and tensors too: reading one may wait for its device
        raise TypeError(f"{name}={value!r} must be a real number, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float; use a smaller one") from None


def _check_softcap(softcap: object) -> float:
    if softcap is None:
        return 0.0
    cap = _as_float("softcap", softcap)
    if not math.isfinite(cap) or cap < 0:
        raise ValueError(f"softcap={softcap!r} must be finite and > 0; use 0 or None for no cap")
    return cap


def _check_scale(scale: object) -> float | None:
    if scale is None:
        return None
    value = _as_float("scale", scale)
    if not math.isfinite(value):
        raise ValueError(f"scale={scale!r} must be finite; use None for 1/sqrt(head_dim)")
    return value


def _check_layout(layout: object) -> Layout:
    if not isinstance(layout, str) or layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout={layout!r} is not known; use 'bshd' (batch, seqlen, heads, dim) or 'bhsd'")
    return "bshd" if layout == "bshd" else "bhsd"


Shape4 = tuple[int, int, int, int]


def canonical_shape(name: str, shape: tuple[int, ...], layout: Layout) -> Shape4:
    """Shape as ``(batch, seqlen, heads, dim)`` from a 2-, 3- or 4-dimensional array in `layout`."""
    b, s, h, d = canonical_axes(name, tuple(shape), layout)
    return (b, s, h, d)


def canonical_axes(name: str, sizes: tuple[int, ...], layout: Layout, missing: int = 1) -> tuple[int, ...]:
    """Permute per-axis numbers (a shape or strides) to bshd order, with `missing` for axes that are not there."""
    if len(sizes) == 4:
        return sizes if layout == "bshd" else (sizes[0], sizes[2], sizes[1], sizes[3])
    if len(sizes) == 3:
        return (missing, *sizes) if layout == "bshd" else (missing, sizes[1], sizes[0], sizes[2])
    if len(sizes) == 2:
        return (missing, sizes[0], missing, sizes[1])
    raise ValueError(
        f"{name} has {len(sizes)} dimensions (shape {sizes}); pass 4 (batch, seqlen, heads, dim), "
        "3 (seqlen, heads, dim) or 2 (seqlen, dim), with heads before seqlen for layout='bhsd'"
    )


def make_problem(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...], dtype: str, options: Options
) -> Problem:
    """Check three shapes against each other and fold the options into a :class:`Problem`.

    Raises
    ------
    ValueError
        Naming the argument, its shape and the remedy.
    """
    if not len(q_shape) == len(k_shape) == len(v_shape):
        raise ValueError(
            "q, k and v must have the same number of dimensions; "
            f"their shapes are {tuple(q_shape)}, {tuple(k_shape)} and {tuple(v_shape)}"
        )
    batch, seqlen_q, heads_q, head_dim = canonical_shape("q", q_shape, options.layout)
    batch_k, seqlen_k, heads_kv, head_dim_k = canonical_shape("k", k_shape, options.layout)
    batch_v, seqlen_v, heads_v, head_dim_v = canonical_shape("v", v_shape, options.layout)
    shapes = f"(q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)}, layout {options.layout!r})"
    if not batch == batch_k == batch_v:
        sizes = f"{batch}, {batch_k} and {batch_v}"
        raise ValueError(f"q, k and v must have one batch size, not {sizes} {shapes}; broadcast them first")
    if head_dim != head_dim_k:
        raise ValueError(f"q and k must have the same head_dim, not {head_dim} and {head_dim_k} {shapes}")
    if seqlen_k != seqlen_v:
        raise ValueError(f"k and v must have the same seqlen, not {seqlen_k} and {seqlen_v} {shapes}")
    if heads_kv != heads_v:
        raise ValueError(f"k and v must have the same number of heads, not {heads_kv} and {heads_v} {shapes}")
    if heads_q < 1 or heads_kv < 1 or heads_q % heads_kv:
        raise ValueError(
            f"the heads of q ({heads_q}) must be a positive multiple of the heads of k and v ({heads_kv}) {shapes}"
        )
    for name, dim in (("q and k", head_dim), ("v", head_dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"the head_dim of {name} is {dim}; it must be between 1 and {MAX_HEAD_DIM} {shapes}")
    if max(seqlen_q, seqlen_k) > _MAX_SEQLEN:
        raise ValueError(f"seqlen {max(seqlen_q, seqlen_k)} is over the limit of {_MAX_SEQLEN} {shapes}")
    lower, upper = _diagonals(options, seqlen_q, seqlen_k)
    scale = 1.0 / math.sqrt(head_dim) if options.scale is None else options.scale
    _check_range(scale, options.softcap, dtype)
    return Problem(
        batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v, dtype, scale, options.softcap, lower, upper
    )


def _check_range(scale: float, softcap: float, dtype: str) -> None:
    """Refuse numbers that the dtype's arithmetic cannot hold, where a result would be silently wrong."""
    low, high = (2.0**-1000, 2.0**1000) if dtype == "float64" else (2.0**-100, 2.0**100)
    numbers_used = {f"scale={scale}": abs(scale), f"softcap={softcap}": softcap}
    if scale and softcap:
        numbers_used[f"scale={scale} over softcap={softcap}"] = abs(scale) / softcap
    for what, size in numbers_used.items():
        if size and not low <= size <= high:
            raise ValueError(
                f"{what} is out of range for {dtype}: its size must be 0 or between {low:.2g} and {high:.2g}; "
                "rescale the inputs"
            )


def _diagonals(options: Options, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
    """The two diagonals that causal and window leave visible (see :class:`Problem`)."""
    offset = seqlen_k - seqlen_q  # windows are always centred on i + offset
    left, right = options.window
    uppers = [] if right is None else [offset + right]
    if options.causal:
        uppers.append(0 if options.causal == "top-left" else offset)
    lower = None if left is None else max(offset - left, -_MAX_SEQLEN)
    upper = min(uppers, default=None)
    return lower, None if upper is None else min(upper, _MAX_SEQLEN)

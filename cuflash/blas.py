"""Matrix products whose bits do not depend on the batch: what NumPy's BLAS is asked for, and under which limits.

A BLAS picks kernels by the shape of a product, and kernels sum in different orders. So the products of attention have
few shapes, BLAS runs with one thread, and what else may vary is measured here, not assumed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

Array = np.ndarray[Any, Any]

# Long chains of sums round more than those of the error rule's yardstick, whose products BLAS sums by other kernels
# when they are small. So the sum over a key tile is made of PARTS shorter ones, and a score of chains of COLUMNS or
# fewer (half as many up to that head_dim, where the yardstick rounds least). Each costs some 5 to 10 % of the time.
PARTS = 8
COLUMNS = 32


def padded_dim(head_dim_v: int) -> int:
    """Columns of the value tiles: OpenBLAS gives few rows the bits of many only for multiples of 16."""
    return -(-head_dim_v // 16) * 16


def score_products(q: Array, k: Array, out: Array, spare: Array) -> None:
    """``q @ k.T`` of all pairs: q (slots, rows, dim), k (tiles, keys, dim), out (tiles, slots, rows, keys).

    `spare` is a flat buffer of as many elements as `out` or more.
    """
    dim, keys = q.shape[-1], k[:, None].swapaxes(-1, -2)
    step = -(-dim // max(-(-dim // COLUMNS), 2 if dim > COLUMNS // 2 else 1))
    np.matmul(q[..., :step], keys[..., :step, :], out=out)
    addend = spare[: out.size].reshape(out.shape)
    for start in range(step, dim, step):
        np.matmul(q[..., start : start + step], keys[..., start : start + step, :], out=addend)
        np.add(out, addend, out=out)


def value_products(weights: Array, v: Array, out: Array) -> None:
    """Products of parts of the keys: (..., rows, keys) by (..., keys, width) into `out`, (..., PARTS, rows, width)."""
    split = weights.reshape(*weights.shape[:-1], PARTS, -1).swapaxes(-2, -3)
    np.matmul(split, v.reshape(*v.shape[:-2], PARTS, -1, v.shape[-1]), out=out)


def is_blas_matrix(x: Array, dtype: np.dtype[Any]) -> bool:
    """Whether NumPy hands rows of the matrix `x` to BLAS without copying them."""
    step = x.strides[0] // x.itemsize
    return (
        x.dtype == dtype
        and x.flags.aligned
        and x.strides[1] == x.itemsize
        and x.strides[0] % x.itemsize == 0
        and x.shape[1] <= step < 2**31
    )


@lru_cache(maxsize=256)
def row_counts(compute: str, head_dim: int, head_dim_v: int, tile_q: int, tile_k: int) -> tuple[int, ...]:
    """Row counts, ascending, the last at least `tile_q`, whose products give a row the same bits wherever it stands.

    Empty where the place of a row in a product of `tile_q` rows shows in its bits. That is so with OpenBLAS in float32
    on processors with AVX2 but no AVX-512: of 12 rows it sums the first 6 in another order, in some columns.
    """
    measured = _Products(compute, head_dim, head_dim_v, tile_q, tile_k)
    if not measured.same_anywhere(tile_q):
        return ()
    good = [tile_q]
    for rows in (tile_q >> shift for shift in range(1, 6)):
        if rows < 8 or not measured.same_anywhere(rows) or not measured.same_first(rows, tile_q):
            break
        good.append(rows)
    return tuple(reversed(good))


def compute_dtype(dtype: str, head_dim: int, head_dim_v: int, tile_q: int, tile_k: int) -> str:
    """In what to compute results of `dtype`: in float64 where only that keeps bits from depending on a row's place.

    Where not even that does, no place is like another in this BLAS, and `dtype` will do.
    """
    for compute in (dtype, "float64"):
        if row_counts(compute, head_dim, head_dim_v, tile_q, tile_k):
            return compute
    return dtype


@lru_cache(maxsize=256)
def strides_keep_bits(compute: str, head_dim: int, head_dim_v: int, tile_q: int, tile_k: int) -> bool:
    """Whether products of K and V rows that lie apart in memory have the bits of those that are contiguous."""
    measured = _Products(compute, head_dim, head_dim_v, tile_q, tile_k)
    k, v = _apart(measured.k), _apart(measured.v)
    counts = row_counts(compute, head_dim, head_dim_v, tile_q, tile_k)
    return all(_equal(measured.products(0, rows, k, v), measured.products(0, rows)) for rows in counts)


def _apart(x: Array) -> Array:
    """A copy of the matrix whose rows are not contiguous with each other and not aligned to cache lines."""
    wide = np.zeros((len(x), 3 * x.shape[1] + 1), x.dtype)
    wide[:, 1 : 1 + x.shape[1]] = x
    return wide[:, 1 : 1 + x.shape[1]]


def _equal(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class _Products:
    """Both products of random rows with a tile of random keys and values, to compare with each other."""

    def __init__(self, compute: str, head_dim: int, head_dim_v: int, tile_q: int, tile_k: int) -> None:
        rng, width, rows = np.random.default_rng(0), padded_dim(head_dim_v), 2 * tile_q
        self.q, self.k, self.p, self.v = (
            rng.standard_normal(shape).astype(compute)
            for shape in ((rows, head_dim), (tile_k, head_dim), (rows, tile_k), (tile_k, width))
        )

    def products(self, start: int, count: int, k: Array | None = None, v: Array | None = None) -> tuple[Array, Array]:
        """Scores (rows, tile_k), and products with the values (rows, PARTS, width), of rows start..start+count."""
        k, v = self.k if k is None else k, self.v if v is None else v
        scores = np.empty((1, 1, count, len(k)), k.dtype)
        values = np.empty((PARTS, count, v.shape[1]), v.dtype)
        with one_blas_thread():
            score_products(self.q[None, start : start + count], k[None], scores, np.empty(scores.size, k.dtype))
            value_products(self.p[start : start + count], v, values)
        return scores[0, 0], values.swapaxes(0, 1)

    def same_anywhere(self, count: int) -> bool:
        """Whether rows have the same bits at every place in a product of `count` rows."""
        first = self.products(0, count)
        for start in {1, 5, count // 2, count - 1}:  # a row `start` places further up
            moved = self.products(start, count)
            if not _equal((moved[0][: count - start], moved[1][: count - start]), (first[0][start:], first[1][start:])):
                return False
        return True

    def same_first(self, few: int, many: int) -> bool:
        """Whether the first rows of `many` have the same bits in a product of their own."""
        scores, values = self.products(0, many)
        return _equal(self.products(0, few), (scores[:few], values[:few]))


class _BlasGuard:
    """Limits BLAS to one thread while any call is inside; the limit is the process's, so calls are counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._controller: ThreadpoolController | None = None
        self._limit: Any = None
        self._inside = 0

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                if self._controller is None:  # finding the libraries takes about a millisecond: once
                    self._controller = ThreadpoolController().select(user_api="blas")
                self._limit = self._controller.limit(limits=1)
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._limit.restore_original_limits()

    def after_fork(self) -> None:
        """A child has only the forking thread: whoever was inside, or held the lock, is gone."""
        self._lock = threading.Lock()
        if self._inside:
            self._inside = 0
            if self._limit is not None:
                self._limit.restore_original_limits()


_guard = _BlasGuard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard.after_fork)


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread in the whole process; may be entered by several threads at once."""
    _guard.enter()
    try:
        yield
    finally:
        _guard.leave()

"""Matrix products whose bits do not depend on the batch: what NumPy's BLAS is asked for, and under which limits.

A BLAS picks kernels by the shape of a product, and kernels sum in different orders. So the products of attention have
few shapes, BLAS runs with one thread, and what else may vary is measured here, not assumed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

Array = np.ndarray[Any, Any]

# Long chains of sums round more than those of the error rule's yardstick, whose products BLAS sums by other kernels
# when they are small. So the sum over a key tile is made of shorter ones (Way.parts), and a score of chains of COLUMNS
# or fewer (half as many up to that head_dim, where the yardstick rounds least). Each costs some 5 to 10 % of the time.
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
    """Products of parts of the keys: (..., rows, keys) by (..., keys, width) into `out`, (..., parts, rows, width)."""
    parts = out.shape[-3]
    split = weights.reshape(*weights.shape[:-1], parts, -1).swapaxes(-2, -3)
    np.matmul(split, v.reshape(*v.shape[:-2], parts, -1, v.shape[-1]), out=out)


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


@dataclass(frozen=True, slots=True)
class Way:
    """How to make products so that the place of a row does not show in its bits.

    Attributes
    ----------
    compute : str
        Dtype of the products.
    guard : int
        Columns of zeros on either side of the keys in scores, and on either side of the values.
    tile_k : int
        Keys of a tile.
    parts : int
        Products with the values that a tile is made of.
    counts : tuple of int
        Rows that a product may have, ascending, the last at least as many as a tile has.
    """

    compute: str
    guard: int
    tile_k: int
    parts: int
    counts: tuple[int, ...]


@lru_cache(maxsize=256)
def way(dtype: str, head_dim: int, head_dim_v: int, tile_q: int, tile_k: int) -> Way:
    """The first way to results of `dtype`, float32 or float64, that passes the test on this BLAS.

    OpenBLAS in float32 on processors with AVX2 but no AVX-512 takes 12 rows at a time and sums the first 6 of them in
    another order, but only in the first and last 8 columns of up to some 300: hence the guards. A BLAS that is not so
    either computes in float64. Where not even that helps, no place is like another, and any way will do.
    """
    for compute, guard, unit, keys, parts in (
        (dtype, 0, 1, tile_k, 8),
        (dtype, 8, 12, min(tile_k, 256), 16),  # where the yardstick's small products round least of all
        ("float64", 0, 1, tile_k, 8),
    ):
        measured = _Products(compute, head_dim, head_dim_v, tile_q, keys, guard, parts)
        full = -(-tile_q // unit) * unit
        if not measured.same_anywhere(full):
            continue
        fewer = [tile_q >> shift for shift in range(1, 6)] if unit == 1 else [8 * unit, 4 * unit, 2 * unit, unit]
        counts = [full]
        for rows in (rows for rows in fewer if 8 <= rows < full):
            if not (measured.same_anywhere(rows) and measured.same_first(rows, full)):
                break
            counts.append(rows)
        return Way(compute, guard, keys, parts, tuple(reversed(counts)))
    return Way(dtype, 0, tile_k, 8, (tile_q,))


@lru_cache(maxsize=256)
def strides_keep_bits(compute: str, head_dim: int, head_dim_v: int, tile_q: int, tile_k: int) -> bool:
    """Whether products of K and V rows that lie apart in memory have the bits of those that are contiguous."""
    how = way(compute, head_dim, head_dim_v, tile_q, tile_k)
    measured = _Products(compute, head_dim, head_dim_v, tile_q, tile_k, 0, how.parts)
    k, v = _apart(measured.k), _apart(measured.v)
    return all(_equal(measured.products(0, rows, k, v), measured.products(0, rows)) for rows in how.counts)


def _apart(x: Array) -> Array:
    """A copy of the matrix whose rows are not contiguous with each other and not aligned to cache lines."""
    wide = np.zeros((len(x), 3 * x.shape[1] + 1), x.dtype)
    wide[:, 1 : 1 + x.shape[1]] = x
    return wide[:, 1 : 1 + x.shape[1]]


def _equal(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class _Products:
    """Both products of random rows with a tile of random keys and values, to compare with each other."""

    def __init__(
        self, compute: str, head_dim: int, head_dim_v: int, tile_q: int, tile_k: int, guard: int, parts: int
    ) -> None:
        rng, width, rows = np.random.default_rng(0), padded_dim(head_dim_v), 2 * tile_q + 24
        columns, inner = tile_k + 2 * guard, slice(guard, guard + tile_k)
        self.q = rng.standard_normal((rows, head_dim)).astype(compute)
        self.k, self.v = np.zeros((columns, head_dim), compute), np.zeros((columns, width + 2 * guard), compute)
        self.p = np.zeros((rows, columns), compute)
        self.k[inner] = rng.standard_normal((tile_k, head_dim))
        self.v[inner, guard : guard + width] = rng.standard_normal((tile_k, width))
        self.p[:, inner] = rng.standard_normal((rows, tile_k))
        self.inner, self.parts = (inner, slice(guard, guard + width)), parts

    def products(self, start: int, count: int, k: Array | None = None, v: Array | None = None) -> tuple[Array, Array]:
        """Scores (rows, keys), and products with the values (rows, parts, width), of rows start..start+count."""
        k, v = self.k if k is None else k, self.v if v is None else v
        scores = np.empty((1, 1, count, len(k)), k.dtype)
        values = np.empty((self.parts, count, v.shape[1]), v.dtype)
        with one_blas_thread():
            score_products(self.q[None, start : start + count], k[None], scores, np.empty(scores.size, k.dtype))
            value_products(self.p[start : start + count], v, values)
        return scores[0, 0, :, self.inner[0]], values.swapaxes(0, 1)[..., self.inner[1]]

    def same_anywhere(self, count: int) -> bool:
        """Whether rows have the same bits at every place in a product of `count` rows."""
        first = self.products(0, count)
        for start in {1, 5, 6, count // 2, count - 1}:  # a row `start` places further up
            moved = self.products(start, count)
            if not _equal((moved[0][: count - start], moved[1][: count - start]), (first[0][start:], first[1][start:])):
                return False
        return True

    def same_first(self, few: int, many: int) -> bool:
        """Whether the first rows of `many` have the same bits in a product of their own."""
        scores, values = self.products(0, many)
        return _equal(self.products(0, few), (scores[:few], values[:few]))


class _BlasGuard:
    """Limits BLAS to one thread while any call is inside; the limit is the process's, so calls are counted.

    threadpoolctl from 3.8 on lets the first thread that sets a limit keep it from all others, until it is cleared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._libraries: list[Any] | None = None
        self._threads: list[int] = []
        self._inside = 0

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                if self._libraries is None:  # finding them takes about a millisecond: once
                    self._libraries = list(ThreadpoolController().select(user_api="blas").lib_controllers)
                self._threads = [library.get_num_threads() for library in self._libraries]
                self._set([1] * len(self._threads))
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._set(self._threads)

    def _set(self, threads: list[int]) -> None:
        for library, count in zip(self._libraries or [], threads, strict=False):
            clear = getattr(library, "clear_controlling_thread", lambda force: None)
            clear(force=True)
            library.set_num_threads(count)
            clear(force=True)

    def after_fork(self) -> None:
        """A child has only the forking thread: whoever was inside, or held the lock, is gone."""
        self._lock = threading.Lock()
        if self._inside:
            self._inside = 0
            self._set(self._threads)


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

"""Exact attention on NumPy arrays: tiled online softmax on BLAS, O(1) extra memory a worker, no N x N array.

Bits of one (batch, head, query) row must not depend on anything but that row and the keys it sees, yet a BLAS may sum in
another order when the shape of a product changes. So every product has a fixed shape: query tiles start at multiples of
``tile_q``, key tiles at multiples of ``tile_k``, both are copied to contiguous scratch and padded, and BLAS runs with one
thread. The only shape that varies is the row count of short query tiles, and only when :func:`row_counts` has seen
that this BLAS gives the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 casts with NumPy)
import numpy as np
from threadpoolctl import ThreadpoolController

from cuflash.problem import Problem

Array = np.ndarray[Any, Any]

# 128 x 256 float32 scores are 128 KiB: they stay in L2 between the two products.
TILE_Q = 128
TILE_K = 256
# Query tiles that share one converted key/value tile; amortises the upcast of 16-bit keys and values.
_CHUNK = 8
# Below this many FLOPs starting threads costs more than it gains.
_FLOPS_PER_THREAD = 10_000_000


def forward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    problem: Problem,
    *,
    threads: int | None = None,
    tile_q: int = TILE_Q,
    tile_k: int = TILE_K,
) -> None:
    """Compute attention into `out` (and `lse`), accumulating in float32, or in float64 for float64 problems.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        (batch, seqlen, heads, dim) of ``problem.dtype``; any strides, stride 0 too.
    out : numpy.ndarray
        (batch, seqlen_q, heads_q, head_dim_v) of ``problem.dtype``; rows that see no key become 0.
    lse : numpy.ndarray or None
        (batch, heads_q, seqlen_q), natural log-sum-exp of each row; -inf where a row sees no key.
    problem : Problem
        Shapes and options; trusted, not checked against the arrays.
    threads : int, optional
        Most worker threads, the caller's included. Default :func:`default_threads`. Never changes the result's bits.
    tile_q, tile_k : int
        Tile sizes. These do change the last bits.

    Notes
    -----
    NaN and inf in visible inputs reach the rows that see them and no other; NumPy warnings stay silent.
    While it runs, BLAS is limited to one thread in the whole process.
    """
    if problem.is_empty:
        return
    workers = default_threads(problem) if threads is None else max(threads, 1)
    plan = _make_plan(problem, tile_q, tile_k, workers)
    jobs = itertools.product(plan.chunks, range(problem.batch), range(problem.heads_kv))
    workers = min(workers, len(plan.chunks) * problem.batch * problem.heads_kv)
    lock = threading.Lock()

    def work() -> None:
        scratch = _Scratch(plan)
        with np.errstate(all="ignore"):  # thread-local, hence here
            while True:
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                chunk, batch, head_kv = job
                _run_chunk(plan, scratch, chunk, q[batch], k[batch, :, head_kv], v[batch, :, head_kv], head_kv)
                _store_chunk(plan, scratch, chunk, out[batch], None if lse is None else lse[batch], head_kv)

    with _one_blas_thread():
        if workers == 1:
            work()
            return
        with ThreadPoolExecutor(workers - 1, thread_name_prefix="cuflash") as pool:
            futures = [pool.submit(work) for _ in range(workers - 1)]
            work()
            for future in futures:
                future.result()


def default_threads(problem: Problem) -> int:
    """CPUs that this process may use, fewer when the problem is too small to feed them."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(cpus, problem.flops() // _FLOPS_PER_THREAD))


@dataclass(frozen=True, slots=True)
class _Tile:
    """One query tile: ``rows`` queries of one head from ``start`` on, and the key tiles that any of them sees."""

    head: int  # within the group that shares a key/value head
    start: int
    rows: int
    padded: int  # rows in the products
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Plan:
    problem: Problem
    compute: np.dtype[Any]
    tile_q: int
    tile_k: int
    chunks: tuple[tuple[_Tile, ...], ...]  # longest first, the same for each (batch, key/value head)
    scale_before: np.float64 | None  # on q, before Q K^T
    scale_after: Any | None  # on the scores
    softcap: Any | None


def _make_plan(problem: Problem, tile_q: int, tile_k: int, workers: int) -> _Plan:
    compute = np.dtype(problem.lse_dtype)
    counts = row_counts(compute.name, problem.head_dim, problem.head_dim_v, tile_q, tile_k)
    tiles = []
    for start in range(0, problem.seqlen_q, tile_q):
        rows = min(tile_q, problem.seqlen_q - start)
        padded = next(count for count in counts if count >= rows)
        first, stop = _key_tiles(problem, start, rows, tile_k)
        tiles += [_Tile(head, start, rows, padded, first, stop) for head in range(problem.group)]
    jobs_wanted = 4 * workers
    total = len(tiles) * problem.batch * problem.heads_kv
    size = min(max(total // jobs_wanted, 1), _CHUNK)
    chunks = [tuple(tiles[i : i + size]) for i in range(0, len(tiles), size)]
    chunks.sort(key=lambda chunk: -sum(tile.stop - tile.first for tile in chunk))
    # tanh wants s / softcap. A factor <= 1 is folded into q, where it cannot overflow.
    factor = problem.scale / problem.softcap if problem.softcap else problem.scale
    fold = abs(factor) <= 1.0
    return _Plan(
        problem, compute, tile_q, tile_k, tuple(chunks),
        scale_before=np.float64(factor) if fold else None,
        scale_after=None if fold else _scalar(factor, compute),
        softcap=_scalar(problem.softcap, compute) if problem.softcap else None,
    )  # fmt: skip


def _scalar(value: float, compute: np.dtype[Any]) -> Any:
    """`value` in the compute dtype, or float64 (so that NumPy multiplies in float64) when it would overflow there."""
    return compute.type(value) if abs(value) <= np.finfo(compute).max else np.float64(value)


def _key_tiles(problem: Problem, start: int, rows: int, tile_k: int) -> tuple[int, int]:
    """Half-open range of key tiles that queries start..start+rows see; (0, 0) for none."""
    low = 0 if problem.diag_lower is None else max(start + problem.diag_lower, 0)
    high = problem.seqlen_k
    if problem.diag_upper is not None:
        high = min(high, start + rows + problem.diag_upper)
    return (low // tile_k, -(-high // tile_k)) if low < high else (0, 0)


@lru_cache(maxsize=256)
def row_counts(compute: str, head_dim: int, head_dim_v: int, tile_q: int, tile_k: int) -> tuple[int, ...]:
    """Row counts, ascending and ending with `tile_q`, whose products have the bits of the first rows of full ones.

    BLAS picks kernels by shape, so this is measured on random data, not assumed.
    """
    rng = np.random.default_rng(0)
    q, k, p, v = (
        rng.standard_normal(shape).astype(compute)
        for shape in ((tile_q, head_dim), (tile_k, head_dim), (tile_q, tile_k), (tile_k, head_dim_v + 1))
    )
    with _one_blas_thread():
        scores, values = q @ k.T, p @ v
        good = [tile_q]
        for rows in (tile_q // 2, tile_q // 4, tile_q // 8):
            if rows < 2 or not (
                np.array_equal(q[:rows] @ k.T, scores[:rows]) and np.array_equal(p[:rows] @ v, values[:rows])
            ):
                break
            good.append(rows)
    return tuple(reversed(good))


class _Scratch:
    """Buffers of one worker; their size does not depend on the sequence lengths."""

    def __init__(self, plan: _Plan) -> None:
        problem, slots = plan.problem, max(len(chunk) for chunk in plan.chunks)

        def buffer(*shape: int) -> Array:
            return np.zeros(shape, plan.compute)

        self.q = buffer(slots, plan.tile_q, problem.head_dim)
        # The last column of v is 1, so that the last column of acc is the running sum of exp(score - top).
        self.acc = buffer(slots, plan.tile_q, problem.head_dim_v + 1)
        self.top = buffer(slots, plan.tile_q, 1)  # running row maximum
        self.k = buffer(plan.tile_k, problem.head_dim)
        self.v = buffer(plan.tile_k, problem.head_dim_v + 1)
        self.v[:, -1] = 1
        self.scores = buffer(plan.tile_q, plan.tile_k)
        self.values = buffer(plan.tile_q, problem.head_dim_v + 1)
        self.column = buffer(plan.tile_q, 1)


def _run_chunk(
    plan: _Plan, scratch: _Scratch, chunk: tuple[_Tile, ...], q: Array, k: Array, v: Array, head_kv: int
) -> None:
    """Online softmax of a chunk of query tiles; q is (seqlen_q, heads_q, dim), k and v are (seqlen_k, dim)."""
    for slot, tile in enumerate(chunk):
        _load_queries(plan, scratch, slot, tile, q[:, head_kv * plan.problem.group + tile.head])
    for index in range(min(tile.first for tile in chunk), max(tile.stop for tile in chunk)):
        users = [(slot, tile) for slot, tile in enumerate(chunk) if tile.first <= index < tile.stop]
        if not users:
            continue
        start = index * plan.tile_k
        _load(scratch.k, k[start : start + plan.tile_k])
        values = scratch.v[:, :-1]
        _load(values, v[start : start + plan.tile_k])
        finite, special = np.isfinite(values), None
        if not finite.all():
            special = np.where(finite, 0, values)
            values[~finite] = 0
        for slot, tile in users:
            _update(plan, scratch, slot, tile, start, special)


def _load(buffer: Array, rows: Array) -> None:
    """Copy rows to the compute dtype and zero the padding."""
    np.copyto(buffer[: len(rows)], rows)
    buffer[len(rows) :] = 0


def _load_queries(plan: _Plan, scratch: _Scratch, slot: int, tile: _Tile, q: Array) -> None:
    queries = scratch.q[slot, : tile.padded]
    _load(queries, q[tile.start : tile.start + tile.rows])
    if plan.scale_before is not None:
        np.multiply(queries, plan.scale_before, out=queries, casting="same_kind")  # in float64, rounded once
    scratch.acc[slot] = 0
    scratch.top[slot] = np.finfo(plan.compute).min  # not -inf, because -inf - -inf would be NaN


def _update(plan: _Plan, scratch: _Scratch, slot: int, tile: _Tile, start: int, special: Array | None) -> None:
    """Add the key/value tile that begins at key `start` to the running state of one query tile."""
    padded = scratch.scores[: tile.padded]
    np.matmul(scratch.q[slot, : tile.padded], scratch.k.T, out=padded)
    scores = padded[: tile.rows]  # the padding rows stay finite or not: nothing reads them
    if plan.scale_after is not None:
        np.multiply(scores, plan.scale_after, out=scores, casting="same_kind")
    if plan.softcap is not None:
        np.tanh(scores, out=scores)
        np.multiply(scores, plan.softcap, out=scores, casting="same_kind")
    hidden = _hidden(plan, tile, start)
    if hidden is not None:
        np.copyto(scores, -np.inf, where=hidden)

    top, column, acc = scratch.top[slot, : tile.rows], scratch.column[: tile.rows], scratch.acc[slot, : tile.rows]
    np.maximum.reduce(scores, axis=1, keepdims=True, out=column)
    np.maximum(column, top, out=column)
    np.subtract(top, column, out=top)
    rescale = np.exp(top)
    np.subtract(scores, column, out=scores)
    np.copyto(top, column)
    np.exp(scores, out=scores)
    np.matmul(padded, scratch.v, out=scratch.values[: tile.padded])
    values = scratch.values[: tile.rows]
    if special is not None:
        _add_special(values[:, :-1], scores, special, hidden)
    np.multiply(acc, rescale, out=acc)
    np.add(acc, values, out=acc)


def _hidden(plan: _Plan, tile: _Tile, start: int) -> Array | None:
    """True where a key of the tile is masked or past the end, (rows, tile_k); None when all are visible."""
    problem, offset = plan.problem, start - tile.start
    lowest, highest = offset - (tile.rows - 1), offset + plan.tile_k - 1  # diagonals that the tile touches
    hidden: Array | None = None
    differences = _differences(plan.tile_q, plan.tile_k)[: tile.rows]
    if problem.diag_upper is not None and highest > problem.diag_upper:
        hidden = differences > problem.diag_upper - offset
    if problem.diag_lower is not None and lowest < problem.diag_lower:
        below = differences < problem.diag_lower - offset
        hidden = below if hidden is None else np.logical_or(hidden, below, out=hidden)
    if start + plan.tile_k > problem.seqlen_k:
        if hidden is None:
            hidden = np.zeros((tile.rows, plan.tile_k), bool)
        hidden[:, problem.seqlen_k - start :] = True
    return hidden


@lru_cache(maxsize=8)
def _differences(tile_q: int, tile_k: int) -> Array:
    """Key minus query position inside a tile, read-only (tile_q, tile_k)."""
    differences = np.arange(tile_k, dtype=np.int64)[None, :] - np.arange(tile_q, dtype=np.int64)[:, None]
    differences.setflags(write=False)
    return differences


def _add_special(values: Array, weights: Array, special: Array, hidden: Array | None) -> None:
    """Add weight * value for the NaN and inf values of a tile (`special`, 0 elsewhere), for visible pairs only.

    A plain product would make NaN of 0 * inf for masked keys; counting with 0/1 matrices cannot.
    """
    dtype = values.dtype
    visible = np.ones(weights.shape, bool) if hidden is None else ~hidden
    positive = (weights > 0).astype(dtype)
    zero = (visible & (weights == 0)).astype(dtype)  # underflow, or a score of -inf: 0 * inf is NaN as usual
    infinite, nan = np.isinf(special), np.isnan(special)
    poisoned = visible.astype(dtype) @ nan.astype(dtype) + zero @ infinite.astype(dtype)
    values[positive @ (special == np.inf).astype(dtype) > 0] += np.inf
    values[positive @ (special == -np.inf).astype(dtype) > 0] -= np.inf
    values[poisoned > 0] = np.nan


def _store_chunk(
    plan: _Plan, scratch: _Scratch, chunk: tuple[_Tile, ...], out: Array, lse: Array | None, head_kv: int
) -> None:
    for slot, tile in enumerate(chunk):
        head, rows = head_kv * plan.problem.group + tile.head, slice(tile.start, tile.start + tile.rows)
        acc, total = scratch.acc[slot, : tile.rows, :-1], scratch.acc[slot, : tile.rows, -1:]
        empty = total == 0
        np.divide(acc, np.where(empty, 1, total), out=acc)
        np.copyto(out[rows, head], acc, casting="unsafe")
        if lse is not None:
            top = scratch.top[slot, : tile.rows]
            lse[head, rows] = np.where(empty, -np.inf, top + np.log(total))[:, 0]


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
def _one_blas_thread() -> Iterator[None]:
    _guard.enter()
    try:
        yield
    finally:
        _guard.leave()

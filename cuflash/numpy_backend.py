"""Exact attention on NumPy arrays: tiled online softmax on BLAS, O(1) extra memory a worker, no N x N array.

Bits of one (batch, head, query) row must not depend on anything but that row and the keys it sees, yet a BLAS may sum
in another order when the shape of a product changes. So every product has a fixed shape: query tiles start at multiples
of ``tile_q``, key tiles at multiples of ``tile_k``, both are copied to contiguous scratch and padded, and BLAS runs
with one thread. The only shape that varies is the row count of short query tiles, and only when :func:`row_counts` has
seen that this BLAS gives the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
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

# Four 256 x 256 float32 score tiles are 1 MiB; smaller ones stay in smaller caches but switch threads more often.
TILE_Q = 256
TILE_K = 256
# Query tiles that go through each NumPy call together and share one converted key/value tile.
_CHUNK = 4
# The sum over a key tile is made of this many shorter ones, which round less than one long chain (5 % of the time).
_PARTS = 4
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
        Most worker threads; 1 computes in the caller's. Default :func:`default_threads`. Never changes the bits.
    tile_q, tile_k : int
        Tile sizes, `tile_k` a multiple of 4. These do change the last bits.

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
        # New threads, and the caller only waits: the kernel starts a new thread on an idle CPU, while a woken one may
        # land on its waker's CPU and share it for milliseconds.
        with ThreadPoolExecutor(workers, thread_name_prefix="cuflash") as pool:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()


def default_threads(problem: Problem) -> int:
    """CPUs that this process may use, fewer when the problem is too small to feed them."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    # With few queries, reading and converting the keys and values dominates: some 32 FLOPs' worth an element.
    loads = problem.batch * problem.heads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    return max(1, min(cpus, (problem.flops() + 32 * loads) // _FLOPS_PER_THREAD))


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
    scale_before: Any | None  # on q, before Q K^T
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
    chunks = []
    for _, same in itertools.groupby(tiles, key=lambda tile: tile.rows):
        group = tuple(same)
        chunks += [group[i : i + size] for i in range(0, len(group), size)]
    chunks.sort(key=lambda chunk: -sum(tile.stop - tile.first for tile in chunk))
    # tanh wants s / softcap. Powers of two up to 1 go into q, where they round nothing and cannot overflow.
    factor = problem.scale / problem.softcap if problem.softcap else problem.scale
    fold = abs(factor) <= 1.0 and abs(math.frexp(factor)[0]) == 0.5
    return _Plan(
        problem, compute, tile_q, tile_k, tuple(chunks),
        scale_before=_scalar(factor, compute) if fold else None,
        scale_after=None if fold else _scalar(factor, compute),
        softcap=_scalar(problem.softcap, compute) if problem.softcap else None,
    )  # fmt: skip


def _scalar(value: float, compute: np.dtype[Any]) -> Any:
    """`value` in the compute dtype, or float64 (so that NumPy multiplies in float64) when it would overflow there."""
    return compute.type(value) if abs(value) <= float(np.finfo(compute).max) else np.float64(value)


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
    rng, width = np.random.default_rng(0), _padded_dim(head_dim_v)
    q, k, p, v = (
        rng.standard_normal(shape).astype(compute)
        for shape in ((tile_q, head_dim), (tile_k, head_dim), (tile_q, tile_k), (_PARTS, tile_k // _PARTS, width))
    )
    with _one_blas_thread():
        scores, values = q @ k.T, _split(p) @ v
        good = [tile_q]
        for rows in (tile_q >> shift for shift in range(1, 6)):
            if rows < 8 or not (
                np.array_equal(q[:rows] @ k.T, scores[:rows]) and np.array_equal(_split(p[:rows]) @ v, values[:, :rows])
            ):
                break
            good.append(rows)
    return tuple(reversed(good))


def _padded_dim(head_dim_v: int) -> int:
    """Columns of the value tiles: OpenBLAS gives few rows the bits of many only for multiples of 16."""
    return -(-head_dim_v // 16) * 16


class _Scratch:
    """Buffers of one worker; their size does not depend on the sequence lengths."""

    def __init__(self, plan: _Plan) -> None:
        problem, slots = plan.problem, max(len(chunk) for chunk in plan.chunks)

        def buffer(*shape: int) -> Array:
            return np.zeros(shape, plan.compute)

        self.q = buffer(slots, plan.tile_q, problem.head_dim)
        width = _padded_dim(problem.head_dim_v)
        self.acc = buffer(slots, plan.tile_q, width)
        self.top = buffer(slots, plan.tile_q, 1)  # running row maximum
        self.total = buffer(slots, plan.tile_q, 1)  # running sum of exp(score - top)
        self.k = buffer(plan.tile_k, problem.head_dim)
        self.v = buffer(plan.tile_k, width)
        self.scores = buffer(slots, plan.tile_q, plan.tile_k)
        self.values = buffer(slots, _PARTS, plan.tile_q, width)  # one for each part of the keys
        self.column = buffer(slots, plan.tile_q, 1)


def _run_chunk(
    plan: _Plan, scratch: _Scratch, chunk: tuple[_Tile, ...], q: Array, k: Array, v: Array, head_kv: int
) -> None:
    """Online softmax of a chunk of query tiles; q is (seqlen_q, heads_q, dim), k and v are (seqlen_k, dim)."""
    for slot, tile in enumerate(chunk):
        _load_queries(plan, scratch, slot, tile, q[:, head_kv * plan.problem.group + tile.head])
    for index in range(min(tile.first for tile in chunk), max(tile.stop for tile in chunk)):
        # Both ends of a tile's range grow with its start, so the tiles that see this key tile are neighbours.
        users = [slot for slot, tile in enumerate(chunk) if tile.first <= index < tile.stop]
        if not users:
            continue
        start = index * plan.tile_k
        values = scratch.v[:, : plan.problem.head_dim_v]
        _load(scratch.k, k[start : start + plan.tile_k])
        _load(values, v[start : start + plan.tile_k])
        finite, special = np.isfinite(values), None
        if not finite.all():
            special = np.where(finite, 0, values)
            values[~finite] = 0
        _update(plan, scratch, chunk, slice(users[0], users[-1] + 1), start, special)


def _load(buffer: Array, rows: Array) -> None:
    """Copy rows to the compute dtype and zero the padding."""
    np.copyto(buffer[: len(rows)], rows)
    buffer[len(rows) :] = 0


def _load_queries(plan: _Plan, scratch: _Scratch, slot: int, tile: _Tile, q: Array) -> None:
    queries = scratch.q[slot, : tile.padded]
    _load(queries, q[tile.start : tile.start + tile.rows])
    if plan.scale_before is not None:
        np.multiply(queries, plan.scale_before, out=queries)
    scratch.acc[slot] = 0
    scratch.total[slot] = 0
    scratch.top[slot] = np.finfo(plan.compute).min  # not -inf, because -inf - -inf would be NaN


def _update(
    plan: _Plan, scratch: _Scratch, chunk: tuple[_Tile, ...], slots: slice, start: int, special: Array | None
) -> None:
    """Add the key/value tile that begins at key `start` to the running state of the query tiles in `slots`.

    All of them go through each NumPy call together: the products keep their shape (NumPy makes one BLAS call a tile),
    and the long calls without the GIL are what lets the workers overlap.
    """
    rows, padded = chunk[0].rows, chunk[0].padded  # the same in a whole chunk
    products = scratch.scores[slots, :padded]
    np.matmul(scratch.q[slots, :padded], scratch.k.T, out=products)
    scores = products[:, :rows]  # the padding rows may hold anything: nothing reads them
    if plan.scale_after is not None:
        np.multiply(scores, plan.scale_after, out=scores, casting="same_kind")
    if plan.softcap is not None:
        np.tanh(scores, out=scores)
        np.multiply(scores, plan.softcap, out=scores, casting="same_kind")
    masks = [_hidden(plan, tile, start) for tile in chunk[slots]]
    for tile_scores, hidden in zip(scores, masks, strict=True):
        if hidden is not None:
            np.copyto(tile_scores, -np.inf, where=hidden)

    top, total = scratch.top[slots, :rows], scratch.total[slots, :rows]
    column, acc = scratch.column[slots, :rows], scratch.acc[slots, :rows]
    np.maximum.reduce(scores, axis=-1, keepdims=True, out=column)
    np.maximum(column, top, out=column)
    np.subtract(top, column, out=top)
    rescale = np.exp(top)
    np.copyto(top, column)
    np.subtract(scores, column, out=scores)
    np.exp(scores, out=scores)
    np.add.reduce(scores, axis=-1, keepdims=True, out=column)
    np.multiply(total, rescale, out=total)
    np.add(total, column, out=total)
    parts = scratch.values[slots, :, :padded]
    np.matmul(_split(products), scratch.v.reshape(_PARTS, -1, scratch.v.shape[1]), out=parts)
    values = parts[:, 0, :rows]
    for part in range(1, _PARTS):
        np.add(values, parts[:, part, :rows], out=values)
    if special is not None:
        for tile_values, weights, hidden in zip(values, scores, masks, strict=True):
            _add_special(tile_values[:, : special.shape[1]], weights, special, hidden)
    np.multiply(acc, rescale, out=acc)
    np.add(acc, values, out=acc)


def _split(weights: Array) -> Array:
    """View (..., rows, tile_k) as (..., parts, rows, tile_k / parts)."""
    split: Array = weights.reshape(*weights.shape[:-1], _PARTS, -1).swapaxes(-2, -3)
    return split


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
        acc = scratch.acc[slot, : tile.rows, : plan.problem.head_dim_v]
        total = scratch.total[slot, : tile.rows]
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

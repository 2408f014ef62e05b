"""Exact attention on NumPy arrays: tiled online softmax on BLAS, O(1) extra memory a worker, no N x N array.

Bits of one (batch, head, query) row must not depend on anything but that row and the keys it sees, yet a BLAS may sum
in another order when the shape of a product changes. So every product has a fixed shape: query tiles start at multiples
of ``tile_q``, key tiles at multiples of ``tile_k``, the last of each is padded, and BLAS runs with one thread. The only
shape that varies is the row count of short query tiles, and only when :func:`cuflash.blas.way` has seen that this BLAS
gives the same bits; it also says where keys and values need guards of zeros, or float64. That sets a floor for
decoding: OpenBLAS gives fewer than 5 rows other bits than many, so one query costs the products of 8 rows (0.9 ms for
8192 keys of 64 on a core of a 2-core VM), where a two-pass that promises nothing takes two matrix-vector products. Keys
are not split over threads, (batch, key/value head)s are.
"""

from __future__ import annotations

import itertools
import math
import threading
from functools import lru_cache
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 casts with NumPy)
import numpy as np

from cuflash.blas import (
    is_blas_matrix,
    one_blas_thread,
    score_products,
    strides_keep_bits,
    value_products,
)
from cuflash.numpy_plan import Chunk, Plan, Tile, make_plan
from cuflash.problem import Problem
from cuflash.workers import available_cpus, run

Array = np.ndarray[Any, Any]

# Two 256 x 512 float32 score tiles are 1 MiB; smaller ones stay in smaller caches but switch threads more often.
TILE_Q = 256
TILE_K = 512
# Below this many FLOPs starting threads costs more than it gains.
_FLOPS_PER_THREAD = 10_000_000
# Results that overflowed are tried again on V times this: weights are at most 1 each and keys at most 2**30.
_V_SCALE = 2.0**-32


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
    """Compute attention into `out` (and `lse`), accumulating in float32 or more, and in float64 for float64 problems.

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
        Most threads that compute, the caller's among them. Default :func:`default_threads`. Never changes the bits.
    tile_q, tile_k : int
        Tile sizes, `tile_k` a multiple of 4. These do change the last bits.

    Notes
    -----
    NaN and inf in visible inputs reach the rows that see them and no other; NumPy warnings stay silent. Query tiles
    whose results are not finite are computed twice more, with NaN and inf among V set apart and then V scaled down, so
    that masked values do not matter and large ones (near 3e38 in float32) do not overflow in the unnormalised sums.
    While it runs, BLAS is limited to one thread in the whole process, and each thread that computes, the caller's too,
    keeps to some of the caller's CPUs.
    """
    if problem.is_empty:
        return
    workers = default_threads(problem) if threads is None else max(threads, 1)
    plan = make_plan(problem, tile_q, tile_k, workers)
    jobs = itertools.product(plan.chunks, range(problem.batch), range(problem.heads_kv))
    workers = min(workers, len(plan.chunks) * problem.batch * problem.heads_kv)
    lock = threading.Lock()

    def take() -> tuple[Chunk, int, int] | None:
        with lock:
            return next(jobs, None)

    def work() -> None:
        scratch = _Scratch(plan)
        try:
            with np.errstate(all="ignore"):  # thread-local, hence here
                for chunk, batch, head_kv in iter(take, None):
                    inputs = q[batch], k[batch, :, head_kv], v[batch, :, head_kv], head_kv
                    result = _attend(plan, scratch, chunk, *inputs)
                    _store(plan, scratch, chunk, result, out[batch], None if lse is None else lse[batch], head_kv)
        except BaseException:
            while take() is not None:  # so that the others end, too
                pass
            raise

    with one_blas_thread():
        run(work, workers)


def default_threads(problem: Problem) -> int:
    """CPUs that this process may use, fewer when the problem is too small to feed them."""
    # With few queries, reading and converting the keys and values dominates: some 32 FLOPs' worth an element.
    loads = problem.batch * problem.heads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    return max(1, min(len(available_cpus()), (problem.flops() + 32 * loads) // _FLOPS_PER_THREAD))


class _Scratch:
    """Buffers of one worker; their size does not depend on the sequence lengths."""

    def __init__(self, plan: Plan) -> None:
        problem, width = plan.problem, plan.width

        def buffer(*shape: int) -> Array:
            return np.empty(shape, plan.compute)

        self.q = buffer(plan.slots, plan.padded, problem.head_dim)
        self.acc = buffer(plan.slots, plan.padded, width)
        self.total = buffer(plan.slots, plan.padded, 1)  # running sum of exp(score - top)
        self.top = buffer(plan.slots, plan.padded, 1)  # running row maximum
        self.k = np.zeros((plan.span, plan.columns, problem.head_dim), plan.compute)
        self.v = np.zeros((plan.span, plan.columns, width + 2 * plan.guard), plan.compute)
        self.scores = buffer(plan.products * plan.columns)
        self.spare = buffer(plan.products * max(plan.columns, plan.parts * self.v.shape[2]))  # addends of both products


def view_as(buffer: Array, *shape: int) -> Array:
    """The first elements of a flat buffer, in a shape."""
    return buffer[: math.prod(shape)].reshape(shape)


def _attend(plan: Plan, scratch: _Scratch, chunk: Chunk, q: Array, k: Array, v: Array, head_kv: int) -> Array:
    """Results of a chunk, (tiles, rows, head_dim_v); q is (seqlen_q, heads_q, dim), k and v are (seqlen_k, dim)."""
    slots = slice(0, len(chunk.tiles))
    total = scratch.total[slots, : chunk.rows]
    acc = scratch.acc[slots, : chunk.rows, : plan.problem.head_dim_v]
    _run_chunk(plan, scratch, chunk, q, k, v, head_kv)
    divisor = np.where(total == 0, 1, total)
    bad = ~np.isfinite(acc)
    result: Array = np.divide(acc, divisor)
    # NaN or inf: masked values (0 * NaN), or sums that overflowed, or rightly so. Element by element, so that rows do
    # not depend on each other.
    for v_scale in (1.0, _V_SCALE):
        if not bad.any():
            break
        _run_chunk(plan, scratch, chunk, q, k, v, head_kv, v_scale)
        np.copyto(result, np.divide(acc, divisor) / plan.compute.type(v_scale), where=bad)
        bad &= ~np.isfinite(acc)
    return result


def _run_chunk(
    plan: Plan,
    scratch: _Scratch,
    chunk: Chunk,
    q: Array,
    k: Array,
    v: Array,
    head_kv: int,
    v_scale: float | None = None,
) -> None:
    """Online softmax of a chunk of query tiles into `scratch`; with `v_scale`, on scaled V without NaN and inf."""
    for slot, tile in enumerate(chunk.tiles):
        _load_queries(plan, scratch, slot, chunk.padded, tile, q[:, head_kv * plan.problem.group + tile.head])
    in_place = v_scale is None and _can_stay(plan, k, v)
    index = chunk.first
    while index < chunk.stop:
        count = min(chunk.span, chunk.stop - index)
        whole = (index + count) * plan.tile_k <= len(k)
        if in_place and not whole and count > 1:  # the last tile, which needs padding, comes alone
            count, whole = count - 1, True
        # Both ends of a tile's range grow with its start, so the tiles that see these key tiles are neighbours.
        users = [i for i, tile in enumerate(chunk.tiles) if tile.first < index + count and index < tile.stop]
        if users:
            rows = slice(index * plan.tile_k, (index + count) * plan.tile_k)
            special = None
            if in_place and whole:
                keys, values = (_tiles(x[rows], count) for x in (k, v))
            else:
                keys = _load_tiles(plan, scratch.k[:count], k[rows], 0)
                values = _load_tiles(plan, scratch.v[:count], v[rows], plan.guard)
            if v_scale is not None:
                special = np.where(np.isfinite(values), 0, values)
                np.copyto(values, 0, where=special != 0)
                np.multiply(values, plan.compute.type(v_scale), out=values)
            tiles = slice(users[0], users[-1] + 1)
            _update(plan, scratch, chunk, tiles, rows.start, keys, values, special)
        index += count


def _can_stay(plan: Plan, k: Array, v: Array) -> bool:
    """Whether the products may read K and V where they lie."""
    problem, compute = plan.problem, plan.compute
    if plan.guard or plan.width != problem.head_dim_v:
        return False
    if not (is_blas_matrix(k, compute) and is_blas_matrix(v, compute)):
        return False
    return strides_keep_bits(compute.name, problem.head_dim, problem.head_dim_v, plan.tile_q, plan.tile_k)


def load_rows(buffer: Array, rows: Array) -> Array:
    """Copy rows to the compute dtype and zero the rows that are missing."""
    np.copyto(buffer[: len(rows), : rows.shape[1]], rows)
    buffer[len(rows) :] = 0
    return buffer


def _load_tiles(plan: Plan, buffer: Array, rows: Array, column: int) -> Array:
    """Copy rows to the keys' places in (tiles, columns, width), from a column on, and zero those that are missing."""
    for index, tile in enumerate(buffer):
        load_rows(tile[plan.keys, column:], rows[index * plan.tile_k : (index + 1) * plan.tile_k])
    return buffer


def _load_queries(plan: Plan, scratch: _Scratch, slot: int, padded: int, tile: Tile, q: Array) -> None:
    queries = load_rows(scratch.q[slot, :padded], q[tile.start : tile.start + tile.rows])
    if plan.scale_before is not None:
        np.multiply(queries, plan.scale_before, out=queries)
    scratch.acc[slot] = 0
    scratch.total[slot] = 0
    scratch.top[slot] = np.finfo(plan.compute).min  # not -inf, because -inf - -inf would be NaN


def _update(
    plan: Plan,
    scratch: _Scratch,
    chunk: Chunk,
    slots: slice,
    start: int,
    keys: Array,
    values: Array,
    special: Array | None,
) -> None:
    """Add key/value tiles, (tiles, columns, dim) from key `start` on, to the running state of the tiles in `slots`.

    All of them go through each NumPy call together: the products keep their shape (NumPy makes one BLAS call a tile),
    and the long calls without the GIL are what lets the workers overlap. The sums still run tile by tile.
    """
    rows, count, slot_count = chunk.rows, len(keys), slots.stop - slots.start
    products = view_as(scratch.scores, count, slot_count, chunk.padded, plan.columns)
    scores = products[:, :, :rows, plan.keys]  # the padding rows may hold anything: nothing reads them
    score_products(scratch.q[slots, : chunk.padded], keys, products, scratch.spare)
    _finish_scores(plan, scores)
    masks = _mask(plan, chunk.tiles[slots], start, scores)

    tops = np.empty((count + 1, slot_count, rows, 1), plan.compute)  # running, before and after each key tile
    tops[0] = scratch.top[slots, :rows]
    np.maximum.reduceat(scores, (0,), axis=-1, out=tops[1:])  # a third faster than reduce
    np.maximum.accumulate(tops, axis=0, out=tops)
    scratch.top[slots, :rows] = tops[-1]
    rescale = np.exp(tops[:-1] - tops[1:])
    np.subtract(scores, tops[1:], out=scores)
    np.exp(scores, out=scores)
    sums = np.vecdot(scores, _ones(plan.tile_k, plan.compute))[..., None]
    if plan.guard:  # the products of NaN and inf with zeros
        products[..., : plan.guard] = 0
        products[..., -plan.guard :] = 0
    parts = view_as(scratch.spare, count, slot_count, plan.parts, chunk.padded, values.shape[2])
    value_products(products, values[:, None], parts)
    weighted = np.add.reduce(parts[:, :, :, :rows, plan.values], axis=2)
    if special is not None:
        for (tile, slot), hidden in masks.items():
            _add_special(weighted[tile, slot], scores[tile, slot], special[tile, plan.keys, plan.values], hidden)
    total, acc = scratch.total[slots, :rows], scratch.acc[slots, :rows]
    for factor, addend, value in zip(rescale, sums, weighted, strict=True):
        np.multiply(total, factor, out=total)
        np.add(total, addend, out=total)
        np.multiply(acc, factor, out=acc)
        np.add(acc, value, out=acc)


@lru_cache(maxsize=8)
def _ones(count: int, dtype: np.dtype[Any]) -> Array:
    """For sums by BLAS, which takes less than half the time of ``np.add.reduce`` and rounds no more."""
    return np.ones(count, dtype)


def _tiles(rows: Array, count: int) -> Array:
    """View (count * tile_k, dim) as (count, tile_k, dim)."""
    tiles: Array = rows.reshape(count, -1, rows.shape[1])
    return tiles


def _finish_scores(plan: Plan, scores: Array) -> None:
    if plan.scale_after is not None:
        np.multiply(scores, plan.scale_after, out=scores, casting="same_kind")
    if plan.softcap is not None:
        np.tanh(scores, out=scores)
        np.multiply(scores, plan.softcap, out=scores, casting="same_kind")


def _mask(plan: Plan, tiles: tuple[Tile, ...], start: int, scores: Array) -> dict[tuple[int, int], Array | None]:
    """Write -inf where a key is hidden; the masks by (key tile, query tile)."""
    masks = {}
    for at in np.ndindex(scores.shape[:2]):
        hidden = masks[at] = plan.hidden(tiles[at[1]], start + at[0] * plan.tile_k)
        if hidden is not None:
            np.copyto(scores[at], -np.inf, where=hidden)
    return masks


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


def _store(
    plan: Plan, scratch: _Scratch, chunk: Chunk, result: Array, out: Array, lse: Array | None, head_kv: int
) -> None:
    for slot, tile in enumerate(chunk.tiles):
        head, rows = head_kv * plan.problem.group + tile.head, slice(tile.start, tile.start + tile.rows)
        np.copyto(out[rows, head], result[slot], casting="unsafe")
        if lse is not None:
            top, total = scratch.top[slot, : tile.rows, 0], scratch.total[slot, : tile.rows, 0]
            lse[head, rows] = np.where(total == 0, -np.inf, top + np.log(total))

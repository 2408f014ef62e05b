"""Gradients of attention on NumPy arrays: tiles recomputed from the stored out and lse, no N x N array.

The loop order is that of FlashAttention-2 (Dao 2023, section 3.1 and Algorithm 2): each job owns one key tile of one
(batch, key/value head), goes over the query tiles that see it, keeps dK and dV of the tile and adds its part of dQ to a
sum in memory. GPUs add these parts in whatever order they come. Here a query tile takes them from the key tiles in
ascending order: jobs start in that order and go over the query tiles in the same order, so one that runs beside its
predecessor is a step behind it and seldom waits. The bits are those of one thread, whatever the number of threads.

Scores are made by the same products of the same shapes as in the forward pass (:mod:`cuflash.numpy_backend`), so that
they have its bits. The row sums of dout * out are made like dP, but some BLAS kernels sum one element of a product in
another order than the next. So a row that sees one key takes its row sum for its dP, of which it is another spelling:
its weight is 1 whatever its score, which gets no gradient but that of the lse, not the difference of two roundings.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.blas import one_blas_thread, score_products
from cuflash.numpy_backend import TILE_K, TILE_Q, load_rows, view_as
from cuflash.numpy_plan import Plan, Tile, make_plan
from cuflash.problem import Problem
from cuflash.workers import available_cpus, run

Array = np.ndarray[Any, Any]

# Below this many FLOPs starting threads costs more than it gains.
_FLOPS_PER_THREAD = 10_000_000
# Terms that one product adds up: BLAS sums one after the other, so longer sums round more (see cuflash.blas).
_TERMS = 64


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
    problem: Problem,
    *,
    threads: int | None = None,
    tile_q: int = TILE_Q,
    tile_k: int = TILE_K,
) -> None:
    """Compute the gradients into `dq`, `dk` and `dv`, accumulating in float32, or in float64 where `forward` does.

    Parameters
    ----------
    dout, out : numpy.ndarray
        (batch, seqlen_q, heads_q, head_dim_v) of ``problem.dtype``: the gradient of the output and the output itself.
    q, k, v : numpy.ndarray
        (batch, seqlen, heads, dim) of ``problem.dtype``. All inputs may have any strides, stride 0 too.
    lse, dlse : numpy.ndarray
        (batch, heads_q, seqlen_q): the log-sum-exp of each row, and its gradient (None for 0).
    dq, dk, dv : numpy.ndarray
        Of the shapes of q, k and v and of ``problem.dtype``; dk and dv hold the sums over the heads that share a key.
    problem : Problem
        Shapes and options; trusted, not checked against the arrays.
    threads : int, optional
        Most threads that compute. Default :func:`default_threads`. Never changes the bits.
    tile_q, tile_k : int
        Tile sizes, `tile_q` no larger than `tile_k`. These do change the last bits.

    Notes
    -----
    Rows whose lse is -inf get a zero dq and add nothing, whatever they hold. NaN and inf reach the gradients of the
    rows and keys that see each other, and no others. Beside the results there are at most ``2 * threads`` float32
    (float64) copies of dq of one key/value head's queries, and about 2 MiB a thread.
    """
    if problem.visible_pairs() == 0 or problem.batch == 0:
        for grad in (dq, dk, dv):
            grad[...] = 0
        return
    workers = default_threads(problem) if threads is None else max(threads, 1)
    plan = make_plan(problem, tile_q, tile_k, workers)
    call = _Call(plan, (dout, q, k, v, out, lse, dlse), (dq, dk, dv), workers)
    with one_blas_thread():
        run(call.work, min(workers, call.count))


def default_threads(problem: Problem) -> int:
    """CPUs that this process may use, fewer when the problem is too small to feed them."""
    return max(1, min(len(available_cpus()), 5 * problem.flops() // (2 * _FLOPS_PER_THREAD)))


@dataclass(frozen=True, slots=True)
class _Queries:
    """A query tile with the rows of its products, and its index in the order of all."""

    index: int
    tile: Tile
    padded: int


class _Head:
    """What the jobs of one (batch, key/value head) share; made by the first of them."""

    def __init__(self, plan: Plan, batch: int, head_kv: int, tiles: tuple[_Queries, ...], jobs: int) -> None:
        problem = plan.problem
        rows = (problem.group, problem.seqlen_q)
        self.batch, self.kv, self.jobs_left = batch, head_kv, jobs
        self.lock, self.is_ready = threading.Lock(), False
        self.queries = slice(head_kv * problem.group, (head_kv + 1) * problem.group)
        self.dq: Array = np.zeros((*rows, problem.head_dim), plan.compute)
        self.delta: Array = np.empty((*rows, 1), plan.compute)  # rowsum(dout * out)
        self.lse: Array = np.empty((*rows, 1), plan.compute)
        self.dlse: Array = np.zeros((*rows, 1), plan.compute)
        self.dead: Array = np.empty(rows, bool)  # rows without a key
        self.has_dead = [False] * len(tiles)
        self.is_finite = [True] * len(tiles)  # q and dout
        self.next_key_tile = [queries.tile.first for queries in tiles]  # whose turn it is to add to dq


class _Scratch:
    """Buffers of one worker; their size does not depend on the sequence lengths."""

    def __init__(self, plan: Plan) -> None:
        problem = plan.problem
        d, dv, scores = problem.head_dim, problem.head_dim_v, plan.padded * plan.columns

        def buffer(*shape: int) -> Array:
            return np.empty(shape, plan.compute)

        self.q, self.dout = buffer(plan.padded, d), buffer(plan.padded, dv)
        # With guards, as in the forward pass, for the scores; without for all else.
        self.wide_k, self.wide_v = (np.zeros((plan.columns, width), plan.compute) for width in (d, dv))
        self.k, self.v = self.wide_k[plan.keys], self.wide_v[plan.keys]
        self.dk, self.dv = buffer(plan.tile_k, d), buffer(plan.tile_k, dv)
        self.weights, self.dscores, self.slope = buffer(scores), buffer(scores), buffer(scores)
        widest = max(plan.tile_k, plan.padded) * max(d, dv)
        self.spare = buffer(max(scores, -(-scores // _TERMS) * max(d, dv), widest))
        self.sums = buffer(widest)


class _Call:
    """One backward pass: its jobs, handed out in order, and the state of the heads that are in work."""

    def __init__(
        self,
        plan: Plan,
        inputs: tuple[Array, Array, Array, Array, Array, Array, Array | None],
        grads: tuple[Array, Array, Array],
        workers: int,
    ) -> None:
        problem = plan.problem
        self.plan, self.inputs, self.grads = plan, inputs, grads
        tiles = [(tile, chunk.padded) for chunk in plan.chunks for tile in chunk.tiles]
        tiles.sort(key=lambda pair: (pair[0].start, pair[0].head))
        self.tiles = tuple(_Queries(i, tile, padded) for i, (tile, padded) in enumerate(tiles))
        self.key_tiles = -(-problem.seqlen_k // plan.tile_k)
        self.count = problem.batch * problem.heads_kv * self.key_tiles
        self.jobs = self._order(workers)
        self.heads: dict[tuple[int, int], _Head] = {}
        self.heads_lock = threading.Lock()
        self.jobs_lock = threading.Lock()
        self.turn = threading.Condition()
        self.failed = False
        self.factor: Any = plan.scale_after if plan.scale_before is None else plan.scale_before

    def _order(self, workers: int) -> Iterator[tuple[int, int, int]]:
        """(batch, head_kv, key tile): as many heads at a time as there are workers, so that each has its own if it can.

        The key tiles of a head ascend, which is what keeps jobs that wait for their turn from waiting for ever.
        """
        problem = self.plan.problem
        heads = problem.batch * problem.heads_kv
        for first in range(0, heads, workers):
            for key_tile in range(self.key_tiles):
                for head in range(first, min(first + workers, heads)):
                    yield head // problem.heads_kv, head % problem.heads_kv, key_tile

    def _take(self) -> tuple[int, int, int] | None:
        with self.jobs_lock:
            return next(self.jobs, None)

    def work(self) -> None:
        """Do jobs until there are none left."""
        scratch = _Scratch(self.plan)
        try:
            with np.errstate(all="ignore"):  # thread-local, hence here
                for batch, head_kv, key_tile in iter(self._take, None):
                    head = self._head(batch, head_kv, scratch)
                    self._key_tile(head, key_tile, scratch)
                    self._finish(head)
        except BaseException:
            with self.turn:
                self.failed = True
                self.turn.notify_all()
            while self._take() is not None:  # so that the others end, too
                pass
            raise

    def _head(self, batch: int, head_kv: int, scratch: _Scratch) -> _Head:
        with self.heads_lock:
            head = self.heads.get((batch, head_kv))
            if head is None:
                head = self.heads[batch, head_kv] = _Head(self.plan, batch, head_kv, self.tiles, self.key_tiles)
        with head.lock:  # whoever comes second needs what the first is making
            if not head.is_ready:
                for queries in self.tiles:
                    self._prepare(head, queries, scratch)
                head.is_ready = True
        return head

    def _rows(self, head: _Head, x: Array, tile: Tile) -> Array:
        """The rows of a query tile of a (batch, seqlen, heads, dim) array."""
        rows: Array = x[head.batch, tile.start : tile.start + tile.rows, head.queries.start + tile.head]
        return rows

    def _prepare(self, head: _Head, queries: _Queries, scratch: _Scratch) -> None:
        """Row sums, lse and the kinds of rows of one query tile."""
        *_, out, lse, dlse = self.inputs
        tile, index = queries.tile, queries.index
        rows = slice(tile.start, tile.start + tile.rows)
        at = head.batch, head.queries.start + tile.head, rows
        here = tile.head, rows
        head.lse[here][:, 0] = lse[at]
        dead = np.equal(head.lse[here][:, 0], -np.inf, out=head.dead[here])
        head.has_dead[index] = bool(dead.any())
        loaded = self._load_queries(head, queries, scratch)
        head.is_finite[index] = all(bool(np.isfinite(x[: tile.rows]).all()) for x in loaded)
        # The diagonal of dout @ out.T, by the product that gives dP: where out is a row of v they all but cancel.
        load_rows(scratch.v, self._rows(head, out, tile))
        products = view_as(scratch.dscores, queries.padded, self.plan.columns)
        score_products(loaded[1][None], scratch.wide_v[None], products[None, None], scratch.spare)
        delta = head.delta[here][:, 0]
        delta[...] = products[:, self.plan.keys].diagonal()[: tile.rows]
        if dlse is not None:
            head.dlse[here][:, 0] = dlse[at]

    def _load_queries(self, head: _Head, queries: _Queries, scratch: _Scratch) -> tuple[Array, Array]:
        """(q, dout) of a query tile in the compute dtype, with zeros for the rows that are missing."""
        dout, q, *_ = self.inputs
        return (
            load_rows(scratch.q[: queries.padded], self._rows(head, q, queries.tile)),
            load_rows(scratch.dout[: queries.padded], self._rows(head, dout, queries.tile)),
        )

    def _dead(self, head: _Head, tile: Tile) -> Array:
        dead: Array = head.dead[tile.head, tile.start : tile.start + tile.rows]
        return dead

    def _key_tile(self, head: _Head, key_tile: int, scratch: _Scratch) -> None:
        """One job: dk and dv of a key tile, and its part of the dq of all rows that see it."""
        _, _, k, v, *_ = self.inputs
        _, dk, dv = self.grads
        start = key_tile * self.plan.tile_k
        rows = slice(start, min(start + self.plan.tile_k, self.plan.problem.seqlen_k))
        keys = load_rows(scratch.k, k[head.batch, rows, head.kv])
        load_rows(scratch.v, v[head.batch, rows, head.kv])
        scratch.dk[...] = 0
        scratch.dv[...] = 0
        is_finite = bool(np.isfinite(keys).all())
        for queries in self.tiles:
            if queries.tile.first <= key_tile < queries.tile.stop:
                self._pair(head, queries, key_tile, scratch, is_finite)
        self._store(dk[head.batch, rows, head.kv], scratch.dk[: rows.stop - start], self.plan.problem.scale)
        self._store(dv[head.batch, rows, head.kv], scratch.dv[: rows.stop - start], None)

    def _pair(self, head: _Head, queries: _Queries, key_tile: int, scratch: _Scratch, is_finite: bool) -> None:
        """Add what one query tile and the key tile in `scratch` give to dq, dk and dv."""
        plan, tile = self.plan, queries.tile
        q, dout = self._load_queries(head, queries, scratch)
        hidden = plan.hidden(tile, key_tile * plan.tile_k)
        weights, dscores = self._weights(head, queries, key_tile, hidden, scratch)
        if is_finite and head.is_finite[queries.index]:
            counts = None
        else:
            counts = np.zeros(weights.shape, bool)
            counts[: tile.rows] = True if hidden is None else ~hidden
            counts[: tile.rows][self._dead(head, tile)] = False
        _add_product(scratch.dv, weights.T, dout, scratch, None if counts is None else counts.T)
        _add_product(scratch.dk, dscores.T, q, scratch, None if counts is None else counts.T)
        dq = _product(dscores, scratch.k, scratch, counts)[: tile.rows]
        rows = head.dq[tile.head, tile.start : tile.start + tile.rows]
        with self.turn:
            self.turn.wait_for(lambda: self.failed or head.next_key_tile[queries.index] == key_tile)
        np.add(rows, dq, out=rows)  # nobody else's turn comes before this is done
        with self.turn:
            head.next_key_tile[queries.index] = key_tile + 1
            self.turn.notify_all()

    def _weights(
        self, head: _Head, queries: _Queries, key_tile: int, hidden: Array | None, scratch: _Scratch
    ) -> tuple[Array, Array]:
        """P and dS of a pair of tiles, (padded, tile_k), 0 where a key is hidden or a row missing or without a key."""
        plan, tile, padded = self.plan, queries.tile, queries.padded
        here = tile.head, slice(tile.start, tile.start + tile.rows)
        shape = padded, plan.columns
        products, dproducts = view_as(scratch.weights, *shape), view_as(scratch.dscores, *shape)
        score_products(scratch.q[None, :padded], scratch.wide_k[None], products[None, None], scratch.spare)
        score_products(scratch.dout[None, :padded], scratch.wide_v[None], dproducts[None, None], scratch.spare)
        products, dproducts = products[:, plan.keys], dproducts[:, plan.keys]
        weights, dscores = products[: tile.rows], dproducts[: tile.rows]
        np.multiply(weights, self.factor, out=weights, casting="same_kind")
        slope = None
        if plan.softcap is not None:
            slope = self._slope(weights, view_as(scratch.slope, padded, plan.tile_k)[: tile.rows])
            np.tanh(weights, out=weights)
            np.multiply(weights, plan.softcap, out=weights, casting="same_kind")
        if plan.compute != plan.problem.lse_dtype:  # as lse is rounded: a weight of 1 is the difference of equals
            np.copyto(weights, weights.astype(plan.problem.lse_dtype))
        np.subtract(weights, head.lse[here], out=weights)
        np.exp(weights, out=weights)
        if hidden is not None:  # else each row sees all keys of the tile
            self._share_sums(head, tile, key_tile * plan.tile_k, dscores, scratch)
        np.subtract(dscores, head.delta[here], out=dscores)
        if self.inputs[6] is not None:  # by itself: dP - delta may be 0 exactly
            np.add(dscores, head.dlse[here], out=dscores)
        np.multiply(dscores, weights, out=dscores)
        if slope is not None:
            np.multiply(dscores, slope, out=dscores)
        for x in (weights, dscores):
            if hidden is not None:
                np.copyto(x, 0, where=hidden)
            if head.has_dead[queries.index]:
                x[self._dead(head, tile)] = 0
        products[tile.rows :] = 0
        dproducts[tile.rows :] = 0
        return products, dproducts

    def _share_sums(self, head: _Head, tile: Tile, start: int, dweights: Array, scratch: _Scratch) -> None:
        """Let rows that see one key take ``rowsum(dout * out)`` for the dP of that key, where their out is its v.

        Out is another where the caller gives a part of the keys with the out and lse of all, and where v is NaN.
        """
        rows, keys = self.plan.only_keys(tile, start)
        sums = head.delta[tile.head, tile.start : tile.start + tile.rows, 0][rows]
        differs = np.flatnonzero(dweights[rows, keys] != sums)  # seldom, so that this costs little
        if differs.size:
            rows, keys, sums = rows[differs], keys[differs], sums[differs]
            is_value = np.equal(self._rows(head, self.inputs[4], tile)[rows], scratch.v[keys]).all(axis=1)
            dweights[rows[is_value], keys[is_value]] = sums[is_value]

    def _slope(self, x: Array, slope: Array) -> Array:
        """The derivative of tanh, 4 e / (1 + e)^2 with e = exp(-2 |x|): 1 - tanh^2 cancels where tanh is near 1."""
        np.multiply(np.abs(x, out=slope), -2, out=slope)
        np.exp(slope, out=slope)
        denominator = np.add(slope, 1)
        np.divide(slope, np.square(denominator, out=denominator), out=slope)
        return np.multiply(slope, 4, out=slope)

    def _finish(self, head: _Head) -> None:
        """Count a job of a head; after its last one, write dq."""
        with self.heads_lock:
            head.jobs_left -= 1
            if head.jobs_left:
                return
            del self.heads[head.batch, head.kv]
        dq = self.grads[0][head.batch, :, head.queries]
        self._store(dq.swapaxes(0, 1), head.dq, self.plan.problem.scale)

    def _store(self, grad: Array, sums: Array, scale: float | None) -> None:
        if scale is not None:
            np.multiply(sums, scale, out=sums, casting="same_kind")
        np.copyto(grad, sums, casting="unsafe")


def _add_product(out: Array, weights: Array, x: Array, scratch: _Scratch, counts: Array | None) -> None:
    np.add(out, _product(weights, x, scratch, counts), out=out)


def _product(weights: Array, x: Array, scratch: _Scratch, counts: Array | None) -> Array:
    """``weights @ x`` in a buffer of `scratch`; with `counts`, NaN and inf of x count only for the pairs in it.

    Few and long calls: threads that pass each other the GIL often wait for it longer than they compute.
    """
    finite = x
    if counts is not None:
        finite = np.where(np.isfinite(x), x, 0)
    rows, terms = weights.shape
    width = x.shape[1]
    parts = max(terms // _TERMS, 1)
    total, addends = view_as(scratch.sums, rows, width), view_as(scratch.spare, parts, rows, width)
    split = weights.reshape(rows, parts, -1).swapaxes(0, 1)
    np.matmul(split, finite.reshape(parts, -1, width), out=addends)
    np.add.reduce(addends, axis=0, out=total)
    if counts is not None:
        for i in np.flatnonzero((finite != x).any(axis=1)):
            seen = counts[:, i]
            total[seen] += np.where(np.isfinite(x[i]), 0, weights[seen, i, None] * x[i])
    return total

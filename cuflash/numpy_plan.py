"""How the NumPy backend cuts a problem into tiles, and which keys of a tile are hidden."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cuflash.blas import padded_dim, way
from cuflash.problem import Problem

Array = np.ndarray[Any, Any]

# Query tiles that go through each NumPy call together and share one converted key/value tile.
_CHUNK = 4
# Fewer query tiles take several key tiles through each call: up to this many scores, and elements of K and V.
_BLOCK = 1 << 19


@dataclass(frozen=True, slots=True)
class Tile:
    """One query tile: ``rows`` queries of one head from ``start`` on, and the key tiles that any of them sees."""

    head: int  # within the group that shares a key/value head
    start: int
    rows: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Query tiles of as many rows each that go through every call together, `span` key tiles at a time."""

    tiles: tuple[Tile, ...]
    rows: int
    padded: int  # rows in the products
    first: int
    stop: int
    span: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What every worker needs to know about a problem."""

    problem: Problem
    compute: np.dtype[Any]
    tile_q: int
    tile_k: int
    guard: int  # this and the next: see cuflash.blas.Way
    parts: int
    width: int  # columns of V in the products, without the guards
    chunks: tuple[Chunk, ...]  # longest first, the same for each (batch, key/value head)
    slots: int  # most tiles, rows in the products, key tiles and rows of all products that a call takes
    padded: int
    span: int
    products: int
    scale_before: Any | None  # on q, before Q K^T
    scale_after: Any | None  # on the scores
    softcap: Any | None

    @property
    def columns(self) -> int:
        """Columns of the scores of a key tile."""
        return self.tile_k + 2 * self.guard

    @property
    def keys(self) -> slice:
        """Those of them that are keys."""
        return slice(self.guard, self.guard + self.tile_k)

    @property
    def values(self) -> slice:
        """The columns of V between the guards."""
        return slice(self.guard, self.guard + self.width)

    def hidden(self, tile: Tile, start: int) -> Array | None:
        """True where a key of the tile is masked or past the end, (rows, tile_k); None when all are visible."""
        problem, offset = self.problem, start - tile.start
        lowest, highest = offset - (tile.rows - 1), offset + self.tile_k - 1  # diagonals that the tile touches
        hidden: Array | None = None
        differences = _differences(self.tile_q, self.tile_k)[: tile.rows]
        if problem.diag_upper is not None and highest > problem.diag_upper:
            hidden = differences > problem.diag_upper - offset
        if problem.diag_lower is not None and lowest < problem.diag_lower:
            below = differences < problem.diag_lower - offset
            hidden = below if hidden is None else np.logical_or(hidden, below, out=hidden)
        if start + self.tile_k > problem.seqlen_k:
            if hidden is None:
                hidden = np.zeros((tile.rows, self.tile_k), bool)
            hidden[:, problem.seqlen_k - start :] = True
        return hidden

    def only_keys(self, tile: Tile, start: int) -> tuple[Array, Array]:
        """Rows of the tile that see one key in all, when it is in the key tile from `start` on, and that key of it."""
        return _only_keys(self.problem, tile.start, tile.rows, start, self.tile_k)


@lru_cache(maxsize=16)
def make_plan(problem: Problem, tile_q: int, tile_k: int, workers: int) -> Plan:
    """The plan of a problem; `workers` decides how many tiles go together, never the bits."""
    width = padded_dim(problem.head_dim_v)
    how = way(problem.lse_dtype, problem.head_dim, problem.head_dim_v, tile_q, tile_k)
    compute, tile_k = np.dtype(how.compute), how.tile_k
    tiles = []
    for start in range(0, problem.seqlen_q, tile_q):
        rows = min(tile_q, problem.seqlen_q - start)
        first, stop = _key_tiles(problem, start, rows, tile_k)
        tiles += [Tile(head, start, rows, first, stop) for head in range(problem.group)]
    size = _chunk_size(tiles, problem.batch * problem.heads_kv, workers)
    chunks = []
    for rows, same in itertools.groupby(tiles, key=lambda tile: tile.rows):
        group, padded = tuple(same), next(count for count in how.counts if count >= rows)
        for i in range(0, len(group), size):
            chunks.append(_make_chunk(group[i : i + size], padded, tile_k, max(problem.head_dim, width)))
    chunks.sort(key=lambda chunk: -sum(tile.stop - tile.first for tile in chunk.tiles))
    # tanh wants s / softcap. Powers of two up to 1 go into q, where they round nothing and cannot overflow.
    factor = problem.scale / problem.softcap if problem.softcap else problem.scale
    fold = abs(factor) <= 1.0 and abs(math.frexp(factor)[0]) == 0.5
    return Plan(
        problem, compute, tile_q, tile_k, how.guard, how.parts, width, tuple(chunks),
        slots=max(len(chunk.tiles) for chunk in chunks),
        padded=max(chunk.padded for chunk in chunks),
        span=max(chunk.span for chunk in chunks),
        products=max(chunk.span * len(chunk.tiles) * chunk.padded for chunk in chunks),
        scale_before=_scalar(factor, compute) if fold else None,
        scale_after=None if fold else _scalar(factor, compute),
        softcap=_scalar(problem.softcap, compute) if problem.softcap else None,
    )  # fmt: skip


def _chunk_size(tiles: list[Tile], groups: int, workers: int) -> int:
    """Tiles that go together, of `groups` times these tiles: the most, but all workers shall end at the same time."""
    if len({tile.stop - tile.first for tile in tiles}) > 1:
        return min(max(len(tiles) * groups // (4 * workers), 1), _CHUNK)
    rounds = {size: -(-groups * -(-len(tiles) // size) // workers) for size in range(_CHUNK, 0, -1)}
    return min(rounds, key=lambda size: size * rounds[size])


def _make_chunk(tiles: tuple[Tile, ...], padded: int, tile_k: int, dim: int) -> Chunk:
    first, stop = min(tile.first for tile in tiles), max(tile.stop for tile in tiles)
    span = 1
    if all((tile.first, tile.stop) == (first, stop) for tile in tiles):  # else tiles would meet keys they do not see
        span = max(1, min(_BLOCK // (len(tiles) * padded * tile_k), _BLOCK // (tile_k * dim), stop - first))
    return Chunk(tiles, tiles[0].rows, padded, first, stop, span)


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


@lru_cache(maxsize=8)
def _differences(tile_q: int, tile_k: int) -> Array:
    """Key minus query position inside a tile, read-only (tile_q, tile_k)."""
    differences = np.arange(tile_k, dtype=np.int64)[None, :] - np.arange(tile_q, dtype=np.int64)[:, None]
    differences.setflags(write=False)
    return differences


@lru_cache(maxsize=256)
def _only_keys(problem: Problem, start: int, count: int, key_start: int, key_count: int) -> tuple[Array, Array]:
    """See :meth:`Plan.only_keys`; read-only, the same for all heads."""
    rows = np.arange(start, start + count)
    first, last = np.zeros_like(rows), np.full_like(rows, problem.seqlen_k - 1)
    if problem.diag_lower is not None:
        np.maximum(rows + problem.diag_lower, first, out=first)
    if problem.diag_upper is not None:
        np.minimum(rows + problem.diag_upper, last, out=last)
    at = np.flatnonzero((first == last) & (key_start <= first) & (first < key_start + key_count))
    found = at, first[at] - key_start
    for x in found:
        x.setflags(write=False)
    return found

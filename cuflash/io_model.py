"""Bytes that attention moves to and from device memory, by algorithm: a model, with nothing measured.

The model is that of the FlashAttention paper (Dao et al. 2022, section 3.2): one level of fast memory of a given size,
and every array element that is not in it costs its bytes. Caches that several blocks share are not in it, so a GPU with
a large L2 does better than the per-tile figures; no algorithm does better than :func:`compulsory_bytes`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from cuflash.problem import BackwardProblem, Problem

Algorithm = Literal["standard", "flash-1", "flash-2"]
_STATE_BYTES = 4  # of each running maximum or sum


def compulsory_bytes(problem: Problem) -> int:
    """Every input element that the result depends on read once, and every output element written once."""
    p = problem
    keys = _rows_seen(p.seqlen_q, p.seqlen_k, max(p.seqlen_q, 1), p.diag_lower, p.diag_upper)
    upper, lower = _negated(p.diag_lower), _negated(p.diag_upper)
    queries = _rows_seen(p.seqlen_k, p.seqlen_q, max(p.seqlen_k, 1), lower, upper)
    read = p.heads_q * queries * p.head_dim + p.heads_kv * keys * (p.head_dim + p.head_dim_v)
    return p.batch * read * p.itemsize + _array_bytes(p)[2]


def forward_bytes(problem: Problem, algorithm: Algorithm, tile_m: int, cache_bytes: int) -> int:
    r"""Device-memory traffic of one forward pass.

    Parameters
    ----------
    problem : Problem
    algorithm : {"standard", "flash-1", "flash-2"}
        "standard" (Algorithm 0): write S = QK^T, read S and write P = softmax(S), read P; S and P in the dtype of
        the inputs, masked entries too. Bytes = Q + K + V + O + 4 * batch * heads * seqlen_q * seqlen_k * itemsize,
        the :math:`\Theta(Nd + N^2)` of Theorem 2.

        "flash-1" (Algorithm 1, Theorem 2): K and V in blocks of :math:`B_c = \lceil M / 4d \rceil` rows in the outer
        loop, each read once; for each block all queries that see it are read, and their O, running maximum l and sum m
        are read and written. O, l and m are first written once. :math:`T_c = N / B_c` passes over Q and O are the
        :math:`\Theta(N^2 d^2 / M)` of Theorem 2.

        "flash-2" (Dao 2023, section 3.1): query tiles in the outer loop, so that Q is read once and O and the
        log-sum-exp written once, while each tile of `tile_m` queries reads the keys and values that it sees: about
        :math:`\lceil N / B_r \rceil` passes over K and V. When K and V of one head fit in the cache together they are
        read once.
    tile_m : int
        Queries of one tile; only "flash-2" depends on it.
    cache_bytes : int
        Fast memory, the M of the paper in bytes.

    Returns
    -------
    int
        0 when the output has no element, since nothing is launched.

    Raises
    ------
    ValueError
        If the algorithm is not known, or `tile_m` or `cache_bytes` is not positive.
    """
    if tile_m < 1 or cache_bytes < 1:
        raise ValueError(f"tile_m={tile_m} and cache_bytes={cache_bytes} must be positive")
    if algorithm not in ("standard", "flash-1", "flash-2"):
        raise ValueError(f"algorithm={algorithm!r} is not known; use 'standard', 'flash-1' or 'flash-2'")
    if problem.is_empty:
        return 0
    if algorithm == "standard":
        scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
        return sum(_array_bytes(problem)) + 4 * scores * problem.itemsize
    if algorithm == "flash-1":
        return _flash1_bytes(problem, cache_bytes)
    return _flash2_bytes(problem, tile_m, cache_bytes)


def backward_bytes(problem: BackwardProblem, tile_n: int) -> dict[str, int]:
    r"""Device-memory traffic of one backward pass.

    Parameters
    ----------
    problem : BackwardProblem
    tile_n : int
        Keys of one tile.

    Returns
    -------
    dict of str to int
        ``"minimum"``: q, k, v, out, dout, lse and dlse read once, dq, dk and dv written once. ``"flash-2"`` (Dao 2023,
        section 3.2): key tiles in the outer loop, so that K and V are read once for each query head that shares them,
        dK and dV written once, while each tile reads Q, dO, lse and D of the queries that see it and adds to the
        float32 sums of dQ, which is a read and a write. Before that D is made of dO and O; after it dQ of its sums.

    Raises
    ------
    ValueError
        If `tile_n` is not positive.
    """
    if tile_n < 1:
        raise ValueError(f"tile_n={tile_n} must be positive")
    p = problem
    q, kv, out = _array_bytes(p)
    rows = p.batch * p.heads_q * p.seqlen_q * _STATE_BYTES  # lse, dlse or D
    given = rows * (2 if p.has_dlse else 1)
    minimum = q + kv + 2 * out + given + q + kv
    seen = _rows_seen(p.seqlen_k, p.seqlen_q, tile_n, _negated(p.diag_upper), _negated(p.diag_lower))
    row = (p.head_dim + p.head_dim_v) * p.itemsize + 2 * _STATE_BYTES
    sums = _STATE_BYTES * p.head_dim
    tiles = p.batch * p.heads_q * seen * (row + 2 * sums)
    flash = 2 * out + rows * (2 if p.has_dlse else 1) + kv * p.group + kv + tiles + q
    flash += 2 * p.batch * p.heads_q * p.seqlen_q * sums  # set to zero, and read in the end
    return {"minimum": minimum, "flash-2": flash}


def _array_bytes(problem: Problem) -> tuple[int, int, int]:
    """Bytes of Q, of K and V together, and of O."""
    p = problem
    q = p.batch * p.heads_q * p.seqlen_q * p.head_dim * p.itemsize
    kv = p.batch * p.heads_kv * p.seqlen_k * (p.head_dim + p.head_dim_v) * p.itemsize
    return q, kv, p.batch * p.heads_q * p.seqlen_q * p.head_dim_v * p.itemsize


def _flash1_bytes(problem: Problem, cache_bytes: int) -> int:
    p = problem
    block = max(-(-cache_bytes // (4 * max(p.head_dim, p.head_dim_v) * p.itemsize)), 1)
    _, kv, out = _array_bytes(p)
    rows = _rows_seen(p.seqlen_k, p.seqlen_q, block, _negated(p.diag_upper), _negated(p.diag_lower))
    state = 2 * _STATE_BYTES
    per_row = p.head_dim * p.itemsize + 2 * (p.head_dim_v * p.itemsize + state)
    first_write = out + p.batch * p.heads_q * p.seqlen_q * state
    # Each query head runs the algorithm by itself, so a shared key/value head is read once for each.
    return kv * p.group + first_write + p.batch * p.heads_q * rows * per_row


def _flash2_bytes(problem: Problem, tile_m: int, cache_bytes: int) -> int:
    p = problem
    q, kv, out = _array_bytes(p)
    lse = p.batch * p.heads_q * p.seqlen_q * _STATE_BYTES
    row = (p.head_dim + p.head_dim_v) * p.itemsize
    if p.seqlen_k * row <= cache_bytes:
        return q + out + lse + kv
    keys = _rows_seen(p.seqlen_q, p.seqlen_k, tile_m, p.diag_lower, p.diag_upper)
    return q + out + lse + p.batch * p.heads_q * keys * row


def _negated(diagonal: int | None) -> int | None:
    return None if diagonal is None else -diagonal


def _rows_seen(outer: int, inner: int, block: int, lower: int | None, upper: int | None) -> int:
    """Sum over blocks of outer positions o of the inner positions i that one of them sees: lower <= i - o <= upper."""
    if lower is not None and upper is not None and lower > upper:
        return 0
    first = np.arange(0, outer, block, dtype=np.int64)
    last = np.minimum(first + block, outer) - 1
    start = np.zeros_like(first) if lower is None else np.clip(first + lower, 0, inner)
    stop = np.full_like(first, inner) if upper is None else np.clip(last + upper + 1, 0, inner)
    return int(np.maximum(stop - start, 0).sum())

"""Tiled NumPy attention against the naive two-pass one: ``python benchmarks/numpy_forward.py [--heads 8] [--dim 64]``.

``--queries 1`` times decoding: one query on all keys.

Naive is what one would write by hand: the whole N x N softmax in float32 on BLAS with all its threads, 16-bit inputs
upcast once. Both are timed alternately in one run; best and median of the repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cuflash import numpy_backend
from cuflash.problem import Options, make_problem

Array = np.ndarray[Any, Any]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def naive(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """Two-pass attention with the N x N scores of all heads in memory, as one would write it by hand."""
    qf, kf, vf = (np.asarray(x, np.float32).transpose(0, 2, 1, 3) for x in (q, k, v))
    s = np.matmul(qf, kf.swapaxes(-1, -2))
    s *= np.float32(1 / np.sqrt(q.shape[-1]))
    if causal:
        n, m = s.shape[-2:]
        s[..., ~np.tri(n, m, m - n, dtype=bool)] = -np.inf
    s -= s.max(-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(-1, keepdims=True)
    out: Array = np.matmul(s, vf).transpose(0, 2, 1, 3).astype(q.dtype)
    return out


def times(functions: list[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Milliseconds of each function, sorted, run in turns.

    OpenBLAS threads spin for some 0.1 s after a product and would steal cores from whoever is timed next, so each turn
    starts with a longer pause and an untimed call.
    """
    seen: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, mine in zip(functions, seen, strict=True):
            time.sleep(0.25)
            function()
            start = time.perf_counter()
            function()
            mine.append((time.perf_counter() - start) * 1e3)
    return [sorted(mine) for mine in seen]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--queries", type=int, help="query rows (default: as many as keys)")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(f"forward, batch 1, {args.heads} heads, head_dim {args.dim}; best (median) of {args.repeats}, milliseconds")
    heading = f"{'dtype':>9} {'queries':>7} {'keys':>6} {'causal':>6} {'tiled':>19} {'naive':>19}"
    print(f"{heading} {'speed-up':>8} {'GFLOP/s':>8}")
    rng = np.random.default_rng(0)
    for name in args.dtypes:
        for n in args.seqlens:
            m = args.queries or n
            shapes = (1, m, args.heads, args.dim), (1, n, args.heads, args.dim), (1, n, args.heads, args.dim)
            q, k, v = (rng.standard_normal(shape, dtype=np.float32).astype(DTYPES[name]) for shape in shapes)
            for causal in (False, True):
                problem = make_problem(*shapes, name, Options(causal=causal))
                out = np.empty_like(q)
                ours = partial(numpy_backend.forward, q, k, v, out, None, problem)
                tiled, plain = times([ours, partial(naive, q, k, v, causal)], args.repeats)
                columns = " ".join(f"{t[0]:9.2f} ({t[len(t) // 2]:7.2f})" for t in (tiled, plain))
                print(
                    f"{name:>9} {m:7d} {n:6d} {causal!s:>6} {columns} {plain[0] / tiled[0]:7.2f}x "
                    f"{problem.flops() / tiled[0] / 1e6:8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Tiled NumPy attention against the naive two-pass one: ``python benchmarks/numpy_forward.py [--heads 8] [--dim 64]``.

Naive is what one would write by hand: the whole N x N softmax in float32 on BLAS with all its threads, 16-bit inputs
upcast once. Both are timed alternately in one run; the best of the repeats counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
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
    return np.matmul(s, vf).transpose(0, 2, 1, 3).astype(q.dtype)


def best_times(functions: list[Callable[[], object]], repeats: int) -> list[float]:
    """Best seconds of each function, run in turns.

    OpenBLAS threads spin for a while after a product and would steal cores from whoever is timed next, so each turn
    starts with a pause and an untimed call.
    """
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            time.sleep(0.1)
            function()
            for _ in range(2):
                start = time.perf_counter()
                function()
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"forward, batch 1, {args.heads} heads, head_dim {args.dim}; best of {args.repeats}, milliseconds")
    print(f"{'dtype':>9} {'seqlen':>7} {'causal':>6} {'tiled':>9} {'naive':>9} {'speed-up':>8} {'GFLOP/s':>8}")
    rng = np.random.default_rng(0)
    for name in args.dtypes:
        for n in args.seqlens:
            shape = (1, n, args.heads, args.dim)
            q, k, v = (rng.standard_normal(shape, dtype=np.float32).astype(DTYPES[name]) for _ in range(3))
            for causal in (False, True):
                problem = make_problem(shape, shape, shape, name, Options(causal=causal))
                out = np.empty_like(q)
                tiled, plain = best_times(
                    [
                        lambda q=q, k=k, v=v, out=out, p=problem: numpy_backend.forward(q, k, v, out, None, p),
                        lambda q=q, k=k, v=v, causal=causal: naive(q, k, v, causal),
                    ],
                    args.repeats,
                )
                print(
                    f"{name:>9} {n:7d} {causal!s:>6} {tiled * 1e3:9.2f} {plain * 1e3:9.2f} {plain / tiled:7.2f}x "
                    f"{problem.flops() / tiled / 1e9:8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

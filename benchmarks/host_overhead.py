"""Host time of one call on a tiny input, in steady state: ``python benchmarks/host_overhead.py`` (needs a GPU).

Calls are enqueued in bursts that fit the launch queue; the GPU is waited for between bursts, outside the timed part.
All rows take turns; for each the median over the bursts of a round is taken, and the best round counts. torch's
scaled_dot_product_attention is timed in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import cuflash
from cuflash.arrays import adapter_of
from cuflash.measure import gpu_problem
from cuflash.plan import make_plan
from cuflash.problem import Options

SHAPE = (1, 16, 1, 64)
BURST = 64  # calls between two waits; far below the depth of the launch queue

Row = tuple[str, Callable[[], Any], Callable[[], Any]]  # name, call, wait for the GPU


def cupy_rows() -> Iterator[Row]:
    """CuPy arrays, and the parts of a call."""
    import cupy

    q, k, v = (cupy.asarray(np.random.default_rng(i).standard_normal(SHAPE), np.float16) for i in range(3))
    wait = cupy.cuda.runtime.deviceSynchronize
    yield "cuflash, CuPy float16", lambda: cuflash.attention(q, k, v), wait
    yield "cuflash, CuPy float16, lse", lambda: cuflash.attention(q, k, v, return_lse=True), wait
    out = cupy.empty_like(q)
    yield "cuflash, CuPy float16, out=", lambda: cuflash.attention(q, k, v, out=out), wait
    yield from _parts("CuPy", q, k, v, out, wait)


def torch_rows() -> Iterator[Row]:
    """torch tensors, the parts of a call, and SDPA."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(SHAPE, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    wait = torch.cuda.synchronize
    yield "cuflash, torch bfloat16", lambda: cuflash.attention(q, k, v), wait
    yield "cuflash, torch bfloat16, lse", lambda: cuflash.attention(q, k, v, return_lse=True), wait
    yield from _parts("torch", q, k, v, torch.empty_like(q), wait)
    attend = torch.nn.functional.scaled_dot_product_attention
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    yield "torch SDPA, its own choice", lambda: attend(*heads_first), wait
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        # The choice is made when the row's burst starts, so that setting it is not timed.
        name = f"torch SDPA, {backend.name.removesuffix('_ATTENTION').lower()}"
        yield name, _Within(partial(sdpa_kernel, backend), lambda: attend(*heads_first)), wait


class _Within:
    """A call made inside a context that is entered once a burst."""

    def __init__(self, context: Callable[[], Any], call: Callable[[], Any]) -> None:
        self.context, self.call = context, call

    def __call__(self) -> Any:
        return self.call()


def jax_rows() -> Iterator[Row]:
    """JAX arrays, called eagerly."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "gpu":
        return
    q, k, v = (jax.random.normal(jax.random.key(i), SHAPE, jnp.bfloat16) for i in range(3))
    last: list[Any] = [q]

    def ours() -> None:
        last[0] = cuflash.attention(q, k, v)

    jitted = jax.jit(jax.nn.dot_product_attention)

    def theirs() -> None:
        last[0] = jitted(q, k, v)

    def wait() -> None:
        last[0].block_until_ready()

    yield "cuflash, JAX bfloat16", ours, wait
    yield "jax.nn.dot_product_attention, jitted", theirs, wait


def _parts(framework: str, q: Any, k: Any, v: Any, out: Any, wait: Callable[[], Any]) -> Iterator[Row]:
    """What looking at three arrays, making an output and launching cost by themselves."""
    adapter = adapter_of(q, "q")

    def look() -> None:
        adapter.facts(q, "q")
        adapter.facts(k, "k")
        adapter.facts(v, "v")

    plan: Any = make_plan(adapter, (q, k, v), Options(), None, False, None)
    at_q, at_k, at_v, at_out = (adapter.address(x) for x in (q, k, v, out))
    stream = adapter.stream(0)
    yield f"  part: look at three {framework} arrays", look, wait
    yield f"  part: allocate the output by {framework}", plan.new_out, wait
    yield f"  part: current stream of {framework}", lambda: adapter.stream(0), wait
    yield "  part: launch alone", lambda: plan.launch(at_q, at_k, at_v, at_out, 0, stream), wait


def burst(row: Row) -> float:
    """Seconds a call in one burst."""
    _, call, wait = row
    inner, context = (call.call, call.context()) if isinstance(call, _Within) else (call, None)
    if context is not None:
        context.__enter__()
    try:
        inner()
        wait()
        started = time.perf_counter()
        for _ in range(BURST):
            inner()
        seconds = time.perf_counter() - started
        wait()
    finally:
        if context is not None:
            context.__exit__(None, None, None)
    return seconds / BURST


def collect() -> list[Row]:
    """The rows that can run here; says which framework cannot."""
    rows: list[Row] = []
    for name, make in (("cupy", cupy_rows), ("torch", torch_rows), ("jax", jax_rows)):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed")
            continue
        for row in make():
            try:
                burst(row)
            except Exception as error:  # a backend that refuses the problem must not stop the others
                print(f"{row[0]}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            rows.append(row)
    return rows


def main() -> int:
    """Print the table; the exit status is 1 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bursts", type=int, default=50, help="of 64 calls, for each row in each round")
    args = parser.parse_args()
    if problem := gpu_problem():
        print(f"this measures calls on a GPU: {problem}", file=sys.stderr)
        return 1
    rows = collect()
    best = [float("inf")] * len(rows)
    for _ in range(args.rounds):
        for i, row in enumerate(rows):
            best[i] = min(best[i], statistics.median(burst(row) for _ in range(args.bursts)))
    print(f"\nhost microseconds a call, (batch, seqlen, heads, head_dim) = {SHAPE}")
    for row, seconds in zip(rows, best, strict=True):
        print(f"{row[0]:<44}{seconds * 1e6:8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

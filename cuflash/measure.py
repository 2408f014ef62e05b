"""Where the commands compute and how they measure it: NumPy on the CPU or CuPy on a GPU, time and peak memory."""

from __future__ import annotations

import os
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def gpu_problem() -> str | None:
    """Why no GPU can be used through CuPy, or None when one can."""
    try:
        from cupy.cuda import runtime
    except Exception as error:  # a broken install can raise anything
        return f"CuPy cannot be imported ({error}); pip install 'cuflash[cuda13]' or 'cuflash[cuda12]'"
    try:
        return None if runtime.getDeviceCount() else "there is no CUDA GPU"
    except runtime.CUDARuntimeError as error:
        return f"there is no CUDA GPU or no driver ({error})"


def matplotlib_problem() -> str | None:
    """Why matplotlib cannot draw, or None when it can."""
    try:
        from matplotlib.backends import backend_agg  # noqa: F401
    except ImportError as error:
        return f"matplotlib cannot be imported ({error}); pip install 'cuflash[plot]'"
    return None


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


class PlaceError(RuntimeError):
    """The device asked for cannot be used; the message says why."""


@dataclass(frozen=True)
class Place:
    """NumPy or CuPy, with a clock and a memory gauge that suit it.

    Attributes
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    gpu : bool
    """

    xp: Any
    gpu: bool

    @classmethod
    def choose(cls, device: str) -> Place:
        """The place for ``"cpu"``, ``"cuda"`` or ``"auto"`` (a GPU when CuPy finds one).

        Raises
        ------
        PlaceError
            When ``"cuda"`` is asked for and is not there.
        """
        problem = None if device == "cpu" else gpu_problem()
        if device == "cpu" or (device == "auto" and problem):
            return cls(np, gpu=False)
        if problem:
            raise PlaceError(f"--device cuda: {problem}")
        import cupy

        return cls(cupy, gpu=True)

    def put(self, x: Array) -> Any:
        """A NumPy array here."""
        if not self.gpu:
            return x
        if x.dtype.itemsize == 2:  # as bits, so that bfloat16 needs no support from CuPy
            return self.xp.asarray(x.view(np.uint16)).view(x.dtype)
        return self.xp.asarray(x)

    def get(self, x: Any) -> Array:
        """An array from here in NumPy."""
        if not self.gpu:
            return np.asarray(x)
        bits = x.view(np.uint16) if x.dtype.itemsize == 2 else x
        host: Array = bits.get().view(x.dtype)
        return host

    def seconds(self, function: Callable[[], Any], calls: int = 1) -> float:
        """Seconds of one call, averaged over `calls` in a row; by CUDA events on a GPU."""
        if self.gpu:
            start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
            start.record()
            for _ in range(calls):
                function()
            stop.record()
            stop.synchronize()
            return float(self.xp.cuda.get_elapsed_time(start, stop)) / 1e3 / calls
        started = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - started) / calls

    def available_bytes(self) -> int:
        """Memory that is free for arrays here."""
        return int(self.xp.cuda.runtime.memGetInfo()[0]) if self.gpu else available_memory()

    def peak_bytes(self, function: Callable[[], Any]) -> int:
        """Most memory that a call holds at once beyond its arguments, its result included."""
        if self.gpu:
            pool = self.xp.cuda.MemoryPool()
            with self.xp.cuda.using_allocator(pool.malloc):
                function()
            return int(pool.total_bytes())
        tracemalloc.start()
        try:
            function()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def two_pass_attention(xp: Any, q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """Two-pass attention as one would write it by hand, with all scores in memory at once.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    q, k, v : array, shape (batch, seqlen, heads, dim)
        With the same number of heads; computed in float32 (float64 for float64).

    Returns
    -------
    array, shape (batch, seqlen_q, heads, head_dim_v)
    """
    wide = xp.float64 if q.dtype == xp.float64 else xp.float32
    qs, ks, vs = (x.transpose(0, 2, 1, 3).astype(wide, copy=False) for x in (q, k, v))
    scores = xp.matmul(qs, ks.swapaxes(-1, -2))
    scores *= wide(q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, keys = scores.shape[-2:]
        scores += xp.where(xp.tri(rows, keys, keys - rows, dtype=bool), 0, -xp.inf).astype(wide)
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return xp.matmul(scores, vs).transpose(0, 2, 1, 3).astype(q.dtype)

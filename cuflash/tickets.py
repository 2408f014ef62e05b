"""Counters in device memory by which the blocks of a persistent grid share out their tiles while they run.

A kernel finds its two counters at zero and leaves them so. Launches that may run at the same time need counters of
their own: eager launches go round a ring that is far longer than the launches that a GPU can have in flight (128), and
a launch that is captured in a graph, which may run beside anything later, keeps its counters for good.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

_RING = 4096
_CAPTURED = 12288
_BYTES = 8  # two 32-bit counters


class Tickets:
    """The counters of one device."""

    def __init__(self, device: int) -> None:
        import cupy

        with cupy.cuda.Device(device):
            # Not from CuPy's pool, which another library's captures or allocators may tie to a stream.
            self._memory = cupy.cuda.memory.Memory(_BYTES * (_RING + _CAPTURED))
            cupy.cuda.runtime.memset(self._memory.ptr, 0, self._memory.size)
            cupy.cuda.runtime.deviceSynchronize()
        self._next, self._next_captured = itertools.count(), itertools.count(_RING)
        self._capturing: Callable[[int], bool] = cupy.cuda.runtime.streamIsCapturing

    def take(self, stream: int) -> int:
        """Address of the counters for a launch on `stream`; 0, which means sharing out by turns, when none is left."""
        if not self._capturing(stream):
            return int(self._memory.ptr) + _BYTES * (next(self._next) % _RING)
        index = next(self._next_captured)
        return int(self._memory.ptr) + _BYTES * index if index < _RING + _CAPTURED else 0


@functools.cache
def tickets(device: int) -> Tickets:
    """The counters of a device, made once."""
    return Tickets(device)

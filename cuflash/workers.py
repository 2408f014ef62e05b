"""Threads that stay: a call may be over in the time that starting threads, or even waking them, takes."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable

import numpy as np

# Reads of a flag, some 0.3 ms, for which a thread waits awake. Waking takes 30 us; on virtual machines, often 4 ms.
_READS = 1 << 20


def available_cpus() -> tuple[int, ...]:
    """CPUs that the calling thread may use, ascending."""
    affinity = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(affinity(0))) if affinity is not None else tuple(range(os.cpu_count() or 1))


def run(work: Callable[[], None], workers: int) -> None:
    """Call `work` in the calling thread and in `workers` - 1 others at once; raises what it raised, once all are done.

    Each thread keeps to CPUs of its own meanwhile, if there are enough and no other call runs. Left to itself, Linux
    wakes a thread on the CPU of the one that wakes it, which threads that pass each other the GIL do all the time: they
    then share a CPU for milliseconds while another is idle.
    """
    if workers == 1:
        work()
        return
    cpus = available_cpus()
    alone = _alone.acquire(blocking=False)  # calls side by side would all take the same CPUs
    try:
        share = _shares(cpus, workers) if alone else [set(cpus)] * workers
        helpers = [_take() for _ in range(workers - 1)]
        for helper, mine in zip(helpers, share[1:], strict=True):
            helper.start(work, mine)
        try:
            _keep_to(share[0])
            work()
        finally:
            _keep_to(set(cpus))
            errors = [helper.wait() for helper in helpers]
    finally:
        if alone:
            _alone.release()
    for error in errors:
        if error is not None:
            raise error


def _shares(cpus: tuple[int, ...], workers: int) -> list[set[int]]:
    """CPUs for each worker, different ones if there are enough."""
    return [set(cpus[i * len(cpus) // workers : (i + 1) * len(cpus) // workers]) or set(cpus) for i in range(workers)]


def _keep_to(cpus: set[int]) -> None:
    """Limit the calling thread to these CPUs, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


class _Gate:
    """Each opening lets one wait pass; who waits is awake for a while, without the GIL."""

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), np.zeros(1, bool)
        self._lock.acquire()
        self._reads = np.broadcast_to(self._open, _READS)

    def open(self) -> None:
        self._open[0] = True
        self._lock.release()

    def wait(self) -> None:
        np.logical_or.reduce(self._reads)  # one element again and again, until it is true
        self._lock.acquire()
        self._open[0] = False


class _Helper:
    """A thread that waits for work, over and over; a daemon, so that the interpreter can exit in any case."""

    def __init__(self) -> None:
        self._go, self._done = _Gate(), _Gate()
        self._work: Callable[[], None] | None = None
        self._cpus: set[int] = set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cuflash", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None], cpus: set[int]) -> None:
        self._work, self._cpus = work, cpus
        self._go.open()

    def wait(self) -> BaseException | None:
        """Wait for the end of the work; returns its exception."""
        self._done.wait()
        error, self._error = self._error, None
        _idle.append(self)
        return error

    def stop(self) -> None:
        """End the thread, which must be idle."""
        self._go.open()
        self._thread.join()

    def _run(self) -> None:
        cpus: set[int] = set()
        while True:
            self._go.wait()
            if self._work is None:
                return
            if cpus != self._cpus:
                cpus = self._cpus
                _keep_to(cpus)
            try:
                self._work()
            except BaseException as error:
                self._error = error
            self._work = None  # it holds the caller's arrays
            self._done.open()


_alone = threading.Lock()  # held by the call whose threads keep to CPUs of their own
_idle: list[_Helper] = []  # append and pop are atomic


def _take() -> _Helper:
    try:
        return _idle.pop()
    except IndexError:
        return _Helper()


def _stop_idle() -> None:
    """Leave no thread to a fork, which would warn of it, or to the end of the interpreter."""
    while _idle:
        _idle.pop().stop()


def _after_fork() -> None:
    global _alone
    _alone = threading.Lock()  # another thread may have held it
    _idle.clear()


atexit.register(_stop_idle)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_stop_idle, after_in_child=_after_fork)

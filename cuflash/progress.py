"""A one-line progress display on standard error, silent where that is not a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

_WIDTH = 24


class Progress:
    """Context manager; call :meth:`step` once for each piece of work, before it starts.

    Parameters
    ----------
    total : int
        Pieces of work.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done = max(total, 1), 0
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clear()

    def step(self, label: str, count: int = 1) -> None:
        """Show the bar with what comes next; `count` pieces of work belong to it."""
        if self._shown:
            filled = _WIDTH * min(self._done, self._total) // self._total
            bar = "#" * filled + "." * (_WIDTH - filled)
            print(f"\r\033[K[{bar}] {self._done}/{self._total} {label}", end="", file=sys.stderr, flush=True)
        self._done += count

    def clear(self) -> None:
        """Remove the line, so that something else can be printed."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

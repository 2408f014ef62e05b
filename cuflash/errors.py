"""Exceptions that cuflash raises beside the built-in ``ValueError`` and ``TypeError``."""

from __future__ import annotations

from collections.abc import Mapping


class UnsupportedProblem(NotImplementedError):
    """No variant (or not the variant asked for) can run a well-formed problem.

    Attributes
    ----------
    reasons : dict of str to str
        For each variant that was considered, why it cannot run the problem.
    """

    def __init__(self, summary: str, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        lines = [summary, *(f"  {name}: {reason}" for name, reason in self.reasons.items())]
        super().__init__("\n".join(lines))


class CompilationError(RuntimeError):
    """A kernel did not compile; the message holds the compiler's log and the Config."""

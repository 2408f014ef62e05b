"""Which score stage of ``core/score.cuh`` a problem needs."""

from __future__ import annotations

from cuflash.problem import Problem


def score_stage(problem: Problem) -> str:
    """Name of the C++ type: a Config field of every CUDA variant."""
    if problem.softcap > 0:
        return "score_softcap"
    # Folded into the exponent, a scale must be positive, and neither it nor its products may leave float32.
    return "score_folded" if 2.0**-60 <= problem.scale <= 2.0**60 else "score_scaled"

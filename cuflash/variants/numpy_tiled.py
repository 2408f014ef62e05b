"""The CPU variant: tiled online softmax on NumPy and BLAS (see :mod:`cuflash.numpy_backend`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from cuflash import numpy_backend
from cuflash.problem import Problem
from cuflash.variants.base import DeviceInfo, Launcher, Operands
from cuflash.view import DeviceKind


@dataclass(frozen=True, slots=True)
class NumpyConfig:
    """How the CPU variant runs: tile sizes (rows) and the most worker threads."""

    tile_q: int
    tile_k: int
    threads: int

    def describe(self) -> dict[str, Any]:
        """Facts for ``explain``."""
        return {"tile": (self.tile_q, self.tile_k), "threads": self.threads, "backend": "NumPy matmul (BLAS)"}


class NumpyTiled:
    """Runs every valid problem whose arrays are on the CPU."""

    name: str = "numpy"
    device_kind: DeviceKind = "cpu"

    def unsupported(self, problem: Problem, operands: Operands, device: DeviceInfo) -> str | None:
        """Why this variant cannot run the problem on the device, or None when it can."""
        return None if device.kind == "cpu" else "needs arrays on the CPU"

    def config(self, problem: Problem, operands: Operands, device: DeviceInfo) -> NumpyConfig:
        """Fixed tiles (they decide the last bits, so they must not depend on the problem) and the threads to use."""
        return NumpyConfig(numpy_backend.TILE_Q, numpy_backend.TILE_K, numpy_backend.default_threads(problem))

    def arch(self, device: DeviceInfo) -> str:
        """There is nothing to compile."""
        return ""

    def launcher(self, problem: Problem, operands: Operands, device: DeviceInfo, config: NumpyConfig) -> Launcher:
        """A function of (q, k, v, out, lse), NumPy arrays in bshd order (lse may be None)."""
        return partial(
            numpy_backend.forward,
            problem=problem,
            threads=config.threads,
            tile_q=config.tile_q,
            tile_k=config.tile_k,
        )


VARIANT = NumpyTiled()

"""The backward pass of the CPU variant (see :mod:`cuflash.numpy_backward`)."""

from __future__ import annotations

from functools import partial

from cuflash import numpy_backend, numpy_backward
from cuflash.problem import BackwardProblem
from cuflash.variants.base import BackwardOperands, DeviceInfo, Launcher
from cuflash.variants.numpy_tiled import NumpyConfig
from cuflash.view import DeviceKind


class NumpyBackward:
    """Runs every valid problem whose arrays are on the CPU; always deterministic."""

    name: str = "numpy"
    device_kind: DeviceKind = "cpu"

    def unsupported(self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo) -> str | None:
        """Why this variant cannot run the problem on the device, or None when it can."""
        return None if device.kind == "cpu" else "needs arrays on the CPU"

    def config(self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo) -> NumpyConfig:
        """The tiles of the forward pass, so that scores have the same bits, and the threads to use."""
        return NumpyConfig(numpy_backend.TILE_Q, numpy_backend.TILE_K, numpy_backward.default_threads(problem))

    def arch(self, device: DeviceInfo) -> str:
        """There is nothing to compile."""
        return ""

    def launcher(
        self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo, config: NumpyConfig
    ) -> Launcher:
        """A function of (dout, q, k, v, out, lse, dlse, dq, dk, dv), NumPy arrays in bshd order (dlse may be None)."""
        return partial(
            numpy_backward.backward,
            problem=problem,
            threads=config.threads,
            tile_q=config.tile_q,
            tile_k=config.tile_k,
        )

    def workspace_bytes(self, problem: BackwardProblem, device: DeviceInfo, config: NumpyConfig) -> int:
        """None: what it needs it allocates itself."""
        return 0


VARIANT = NumpyBackward()

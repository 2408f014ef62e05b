"""What the CUDA variants share: the problems they take, the score stage of a problem, and the compiler's account."""

from __future__ import annotations

from typing import Any, ClassVar

from cuflash import jit
from cuflash.problem import Problem
from cuflash.variants.base import DeviceInfo
from cuflash.view import DeviceKind


class CudaVariant:
    """Base of the variants that are one CUDA kernel for 16-bit elements.

    Attributes
    ----------
    needs : str
        Compute capability, in words.
    """

    device_kind: DeviceKind = "cuda"
    needs: ClassVar[str]

    def runs_on(self, compute_capability: tuple[int, int]) -> bool:
        """Whether the kernel can run on such a device."""
        raise NotImplementedError

    def unsuitable(self, problem: Problem, device: DeviceInfo) -> str | None:
        """Why no 16-bit CUDA kernel, or not this one, can run the problem on the device, or None."""
        if device.kind != "cuda":
            return "needs arrays on a CUDA device"
        if not self.runs_on(device.compute_capability):
            found = "{} has {}.{}".format(device.name, *device.compute_capability)
            return f"needs compute capability {self.needs}; {found}"
        if problem.dtype not in ("float16", "bfloat16"):
            return f"takes float16 and bfloat16, not {problem.dtype}; cast the inputs"
        return None

    def arch(self, device: DeviceInfo) -> str:
        """What the kernel is compiled for on a device."""
        return device.arch

    def report(self, config: Any, device: DeviceInfo) -> dict[str, Any]:
        """What the compiler says of the kernel, for ``explain``."""
        arch = self.arch(device)
        return jit.compile_config(config, arch).report.summary(arch)


def score_stage(problem: Problem) -> str:
    """Name of the type of ``core/score.cuh`` that a problem needs: a Config field of every CUDA variant."""
    if problem.softcap > 0:
        return "score_softcap"
    # Folded into the exponent, a scale must be positive, and neither it nor its products may leave float32.
    return "score_folded" if 2.0**-60 <= problem.scale <= 2.0**60 else "score_scaled"

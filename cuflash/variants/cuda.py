"""What the CUDA variants share: the problems they take, the score stage of a problem, and the compiler's account."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

from cuflash import jit
from cuflash.problem import Problem
from cuflash.variants.base import DeviceInfo
from cuflash.view import DeviceKind

_RESERVED_SHARED = 1024  # bytes of shared memory that the driver takes for each block


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


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple that is no less than x."""
    return -(-x // multiple) * multiple


_Config = TypeVar("_Config", bound=Any)
_Tile = TypeVar("_Tile", bound=Any)


def first_that_fits(configs: Iterable[_Config], device: DeviceInfo) -> _Config | None:
    """The first Config whose blocks_per_sm fit a multiprocessor, else the first of which a block fits, else None."""
    fitting = [config for config in configs if config.shared_bytes <= device.shared_memory]
    together = (
        config
        for config in fitting
        if config.blocks_per_sm * (config.shared_bytes + _RESERVED_SHARED) <= device.shared_memory_sm
    )
    return next(together, fitting[0] if fitting else None)


def tiles_of_size(table: Iterable[_Tile], problem: Problem) -> list[_Tile]:
    """The entries of a table of tiles whose ``max_dim`` is the smallest that holds both head dims."""
    fitting = [tile for tile in table if max(problem.head_dim, problem.head_dim_v) <= tile.max_dim]
    return [tile for tile in fitting if tile.max_dim == min(other.max_dim for other in fitting)]


def ci_problems() -> Iterator[tuple[Problem, str, int]]:
    """What CI compiles sm80 kernels for: (problem, arch, alignment of all arrays), with and without a mask."""
    dims = [(d, d) for d in range(32, 257, 32)] + [(192, 128), (64, 256), (256, 32)]
    cases: list[tuple[str, int, dict[str, Any]]] = []
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90"):
        cases += [(arch, 16, {"head_dim": d, "head_dim_v": dv}) for d, dv in dims]
    for d in (64, 128, 256):
        cases += [("sm_90", align, {"head_dim": d - 5, "head_dim_v": d - 5}) for align in (16, 8, 4, 2)]
        extras: tuple[dict[str, Any], ...] = ({"dtype": "float16"}, {"softcap": 30.0}, {"scale": -1.0})
        cases += [("sm_90", 16, {"head_dim": d, "head_dim_v": d, **extra}) for extra in extras]
    base = {
        "batch": 1,
        "seqlen_q": 256,
        "seqlen_k": 256,
        "heads_q": 1,
        "heads_kv": 1,
        "dtype": "bfloat16",
        "scale": 1.0,
    }
    for arch, alignment, extra in cases:
        for upper in (None, 0):
            yield Problem(**{**base, **extra, "diag_upper": upper}), arch, alignment

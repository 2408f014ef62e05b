"""What the sm90 variants share: the device they need, operands that TMA reads, and launches with tensor maps."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

from cuflash import tma
from cuflash.jit import LoadedKernel
from cuflash.launch import KernelLaunch
from cuflash.problem import Problem
from cuflash.variants.base import DeviceInfo, Operand
from cuflash.variants.cuda import CudaVariant

ARCH = "sm_90a"  # wgmma and setmaxnreg are not in plain sm_90


class HopperVariant(CudaVariant):
    """Base of the variants for compute capability 9.0."""

    name = "sm90"
    needs = "9.0"

    def runs_on(self, compute_capability: tuple[int, int]) -> bool:
        """On Hopper only: later architectures have no WGMMA."""
        return compute_capability == (9, 0)

    def arch(self, device: DeviceInfo) -> str:
        """What the kernels are compiled for on a device."""
        return ARCH


def unreadable(problem: Problem, operands: Any, names: Iterable[str]) -> str | None:
    """Why TMA cannot read one of the named operands, or None."""
    for name in names:
        seqlen = problem.seqlen_k if name in ("k", "v") else problem.seqlen_q
        if reason := tma.cannot_describe(getattr(operands, name), seqlen, problem.itemsize):
            return f"TMA cannot read {name}: {reason}"
    return None


def most_within(cache_bytes: int, bytes_each: int) -> int:
    """The largest power of two of things of that size that fit a cache; 1 when not even one does."""
    fitting = max(1, cache_bytes // max(bytes_each, 1))
    most: int = 1 << (fitting.bit_length() - 1)
    return most


class MappedLaunch(KernelLaunch):
    """A kernel whose struct begins with tensor maps. They hold addresses: those of the last few calls are kept.

    Parameters
    ----------
    kernel, device, threads, shared_bytes
        As in :class:`cuflash.launch.KernelLaunch`.
    encoders : sequence of tma.Encoder
        In the order of the maps.
    params : bytes
        The struct behind the maps, from byte ``_params_at`` on.
    """

    _KEPT = 64

    def __init__(
        self,
        kernel: LoadedKernel,
        device: int,
        encoders: Sequence[tma.Encoder],
        params: bytes,
        threads: int,
        shared_bytes: int,
    ) -> None:
        self._params_at = len(encoders) * tma.MAP_BYTES
        super().__init__(kernel, device, bytes(self._params_at) + params, threads, shared_bytes)
        self._encoders = encoders
        self._maps: dict[tuple[int, ...], bytes] = {}
        self._packed: tuple[int, ...] | None = None  # the addresses whose maps are in the struct

    def _pack_maps(self, addresses: tuple[int, ...]) -> None:
        maps = self._maps.get(addresses)
        if maps is None:
            if len(self._maps) >= self._KEPT:
                self._maps.clear()
            maps = b"".join(encode(address) for encode, address in zip(self._encoders, addresses, strict=True))
            self._maps[addresses] = maps
        self._packed = None
        ctypes.memmove(self._struct, maps, len(maps))
        self._packed = addresses


CI_EXTRAS: tuple[dict[str, Any], ...] = ({"dtype": "float16"}, {"scale": -1.0}, {"align": 2}, {"align": 4})


def ci_problem(case: dict[str, Any], diag_upper: int | None) -> tuple[Problem, Operand, Operand]:
    """What CI compiles kernels for: a problem, and the layouts of its inputs and of its results."""
    d, dv = case["d"]
    problem = Problem(
        1, 256, 256, 1, 1, d, dv, case.get("dtype", "bfloat16"), case.get("scale", 1.0),
        softcap=case.get("softcap", 0.0), diag_upper=diag_upper,
    )  # fmt: skip
    return problem, Operand((0, 0, 0), 16), Operand((0, 0, 0), case.get("align", 16))

"""What a variant is: one way to compute a Problem, with its own Config and launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cuflash.problem import BackwardProblem, Problem
from cuflash.view import DeviceKind


@dataclass(frozen=True, slots=True)
class Operand:
    """Layout of one 4-D array in bshd order.

    Attributes
    ----------
    strides : tuple of int
        Elements between neighbours along batch, seqlen and heads (the last axis is contiguous).
    alignment : int
        Largest power of two, at most 16, that divides the address of every row, in bytes.
    """

    strides: tuple[int, int, int]
    alignment: int

    @property
    def store_bytes(self) -> int:
        """Bytes that kernels write at once to such rows: 16, 4 or 2."""
        return self.alignment if self.alignment != 8 else 4


@dataclass(frozen=True, slots=True)
class Operands:
    """Layouts of the four arrays of a forward call."""

    q: Operand
    k: Operand
    v: Operand
    out: Operand


@dataclass(frozen=True, slots=True)
class BackwardOperands:
    """Layouts of the eight arrays of a backward call; lse and dlse are always C-contiguous."""

    dout: Operand
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    dq: Operand
    dk: Operand
    dv: Operand


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The facts about a device that selection and tiling depend on; made up by hand in tests.

    Attributes
    ----------
    kind : {"cpu", "cuda"}
    index : int
        CUDA ordinal; 0 for the CPU.
    name : str
    compute_capability : tuple of int
        (major, minor); (0, 0) for the CPU.
    shared_memory : int
        Bytes of shared memory that one block may opt in to.
    shared_memory_sm : int
        Bytes of shared memory of one multiprocessor.
    multiprocessors : int
    """

    kind: DeviceKind
    index: int
    name: str
    compute_capability: tuple[int, int] = (0, 0)
    shared_memory: int = 0
    shared_memory_sm: int = 0
    multiprocessors: int = 1

    @property
    def arch(self) -> str:
        """NVRTC's name for the device's architecture, for example ``"sm_90"``."""
        return "sm_{}{}".format(*self.compute_capability)


CPU = DeviceInfo("cpu", 0, "CPU")

# CUDA launchers take (q, k, v, out, lse, stream) as addresses (lse 0 for none) and enqueue without waiting.
# CPU launchers take (q, k, v, out, lse) as NumPy arrays in bshd order (lse (batch, heads, seqlen_q) or None).
# Backward launchers take (dout, q, k, v, out, lse, dlse, dq, dk, dv) in the same two ways (dlse 0 or None for none), on
# CUDA then the address of the workspace (0 for none) and the stream. Without visible pairs they write zeros.
Launcher = Callable[..., None]


class Config(Protocol):
    """A frozen dataclass: how a variant runs a Problem. Its fields are the kernel's template arguments."""

    def describe(self) -> dict[str, Any]:
        """Facts for ``explain``: tile, stages, threads, shared memory in bytes and so on."""


class Variant(Protocol):
    """One way to compute attention forward."""

    name: str
    device_kind: DeviceKind

    def unsupported(self, problem: Problem, operands: Operands, device: DeviceInfo) -> str | None:
        """Why this variant cannot run the problem on the device, or None when it can."""

    def config(self, problem: Problem, operands: Operands, device: DeviceInfo) -> Config:
        """The frozen Config for a problem that :meth:`unsupported` accepts."""

    def arch(self, device: DeviceInfo) -> str:
        """What NVRTC compiles the variant's kernels for on a device; empty for a variant without kernels."""

    def launcher(self, problem: Problem, operands: Operands, device: DeviceInfo, config: Any) -> Launcher:
        """Compile or load what is needed and return the function that runs it."""


class BackwardVariant(Protocol):
    """One way to compute the gradients of attention; its methods are those of :class:`Variant` unless said here."""

    name: str
    device_kind: DeviceKind

    def unsupported(self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo) -> str | None:
        """Why this variant cannot run the problem on the device, or None when it can."""

    def config(self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo) -> Config:
        """The frozen Config for a problem that :meth:`unsupported` accepts."""

    def arch(self, device: DeviceInfo) -> str:
        """What NVRTC compiles the variant's kernels for on a device; empty for a variant without kernels."""

    def launcher(
        self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo, config: Any
    ) -> Launcher:
        """Compile or load what is needed and return the function that runs it."""

    def workspace_bytes(self, problem: BackwardProblem, device: DeviceInfo, config: Any) -> int:
        """Temporary device memory that the launcher wants from the caller's framework; 0 on the CPU."""
